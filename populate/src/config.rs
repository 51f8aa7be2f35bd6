//! The configuration: one JSON document. An unknown field is refused, because it could be a limit.

use std::path::PathBuf;

use serde::Deserialize;

use crate::confine::Confinement;
use crate::failure::{Failure, Result};
use crate::format::Format;
use crate::net::address::{API_SERVER, Net, Policy};
use crate::net::client::parse_url;
use crate::net::download::{Point, is_strong};
use crate::net::secret::Secret;
use crate::source::oci::{Platform, Reference};

/// What one attempt does.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Config {
    pub source: Source,
    pub target: Target,
    /// What the content is. Without it, its first bytes decide.
    pub format: Option<Format>,
    /// Of the file that receives blocks on a file system.
    #[serde(default = "file_name")]
    pub file_name: String,
    /// Keeps owners, setuid and setgid of archives; needs CHOWN.
    #[serde(default)]
    pub preserve_owners: bool,
    /// A folder for temporary files.
    pub scratch: Option<PathBuf>,
    #[serde(default)]
    pub confinement: Confinement,
    /// The Secret of the source.
    pub secret: Option<Secret>,
    #[serde(default)]
    pub network: Network,
    #[serde(default)]
    pub limits: Limits,
    /// Where an earlier attempt has come to.
    pub resume: Option<Resume>,
}

/// Where the content is from.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Source {
    Http(Http),
    Oci(Oci),
    S3(S3),
}

/// One object of a server.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Http {
    pub url: String,
    #[serde(flatten)]
    pub checksum: Checksum,
}

/// An image of a registry. It is verified by its digests.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Oci {
    pub image: String,
    /// One file that is a disk, or a folder with one such file.
    pub path: Option<String>,
    #[serde(default)]
    pub platform: Platform,
}

/// Objects of a bucket: one, or all whose names begin with a prefix.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct S3 {
    pub endpoint: String,
    #[serde(default = "region")]
    pub region: String,
    pub bucket: String,
    pub key: Option<String>,
    pub prefix: Option<String>,
    #[serde(flatten)]
    pub checksum: Checksum,
}

/// What is known about the bytes that are received.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Checksum {
    /// In hexadecimal digits.
    pub sha256: Option<String>,
    #[serde(default)]
    pub unverified: bool,
}

/// What is filled.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Target {
    /// A block device.
    Block(PathBuf),
    /// The root of a mounted file system.
    Filesystem(PathBuf),
}

/// Of the administrator.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Network {
    pub private_networks: bool,
    /// Addresses and networks of the API server.
    pub refused: Vec<String>,
    /// `http://HOST:PORT` of a proxy with CONNECT.
    pub proxy: Option<String>,
    /// Certificates that are trusted in addition to those of the image: a file.
    pub ca_bundle: Option<PathBuf>,
    /// More of them, in PEM: the pods of the controller have no file of the administrator.
    pub certificates: Option<String>,
}

impl Default for Network {
    fn default() -> Network {
        Network {
            private_networks: true,
            refused: Vec::new(),
            proxy: None,
            ca_bundle: None,
            certificates: None,
        }
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Limits {
    /// Of the attempt.
    pub seconds: u64,
    /// Without a byte from a server.
    pub silence_seconds: u64,
    pub redirects: usize,
    /// Of an archive.
    pub entries: u64,
    /// Of what is received. Without it, twice the size of the volume and 1 GiB.
    pub received_bytes: Option<u64>,
    /// Between two points from which an attempt can be continued.
    pub durable_bytes: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            seconds: 24 * 60 * 60,
            silence_seconds: 60,
            redirects: 10,
            entries: 1_000_000,
            received_bytes: None,
            durable_bytes: 256 << 20,
        }
    }
}

/// A point that an earlier attempt has printed.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Resume {
    pub bytes: u64,
    pub validator: String,
}

fn region() -> String {
    "us-east-1".to_string()
}

fn file_name() -> String {
    "disk.img".to_string()
}

fn invalid(what: impl std::fmt::Display) -> Failure {
    Failure::refused("ConfigurationInvalid", what)
}

impl Config {
    /// Parses and checks a document.
    pub fn parse(text: &str) -> Result<Config> {
        let config: Config =
            serde_json::from_str(text).map_err(|error| invalid(error.to_string()))?;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let name = &config.file_name;
        let is_name = !name.is_empty() && name.len() <= 255 && name.chars().all(is_plain);
        if !is_name || name.starts_with('.') {
            return Err(invalid(
                "fileName is not made of letters, digits, dots, dashes and underscores, or begins with a dot",
            ));
        }
        match &config.source {
            Source::Http(http) => {
                parse_url(&http.url)?;
                http.checksum.expected()?;
            }
            Source::Oci(oci) => {
                Reference::parse(&oci.image)?;
            }
            Source::S3(s3) => s3.check()?,
        }
        config.resume_point()?;
        config.proxy()?;
        config.policy(None)?;
        Ok(config)
    }

    /// Which addresses may be dialled. `api_server` is that of the environment.
    pub fn policy(&self, api_server: Option<&str>) -> Result<Policy> {
        let refused = self
            .network
            .refused
            .iter()
            .map(String::as_str)
            .chain(api_server);
        let refused = refused.map(|text| text.parse::<Net>().map_err(invalid));
        let known = refused.map(|net| net.map(|net| (net, API_SERVER)));
        Ok(Policy {
            private_networks: self.network.private_networks,
            known: known.collect::<Result<_>>()?,
        })
    }

    pub fn proxy(&self) -> Result<Option<url::Url>> {
        let proxy = self.network.proxy.as_deref().map(parse_url).transpose()?;
        match proxy.as_ref().is_none_or(|proxy| proxy.scheme() == "http") {
            true => Ok(proxy),
            false => Err(invalid("network.proxy does not begin with http://")),
        }
    }

    pub fn resume_point(&self) -> Result<Option<Point>> {
        let Some(Resume { bytes, validator }) = self.resume.clone() else {
            return Ok(None);
        };
        match is_strong(&validator) {
            true => Ok(Some(Point { bytes, validator })),
            false => Err(invalid("resume.validator is not a strong ETag")),
        }
    }
}

impl S3 {
    fn check(&self) -> Result<()> {
        parse_url(&self.endpoint)?;
        let checksum = self.checksum.expected()?;
        match (&self.key, &self.prefix, checksum) {
            (Some(_), None, _) | (None, Some(_), None) => Ok(()),
            (None, Some(_), Some(_)) => Err(invalid(
                "many objects have no checksum: `unverified: true` is needed",
            )),
            _ => Err(invalid("source.s3 needs either key or prefix")),
        }
    }
}

impl Checksum {
    /// The expected SHA-256; `None` if the content is not verified.
    pub fn expected(&self) -> Result<Option<String>> {
        match (&self.sha256, self.unverified) {
            (None, true) => Ok(None),
            (Some(text), false) => {
                let is_digest =
                    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
                match is_digest {
                    true => Ok(Some(text.to_ascii_lowercase())),
                    false => Err(invalid("sha256 does not have 64 hexadecimal digits")),
                }
            }
            _ => Err(invalid("either sha256 or `unverified: true` is needed")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(change: &str, to: &str) -> Result<Config> {
        let text = r#"{"source": {"http": {"url": "https://a.example/b", "unverified": true}},
            "target": {"block": "/dev/target"}, "fileName": "disk.img", "limits": {"seconds": 5},
            "network": {"refused": ["10.96.0.1"]}, "resume": {"bytes": 5, "validator": "\"e\""}}"#;
        assert!(text.contains(change), "{change}");
        Config::parse(&text.replace(change, to))
    }

    #[test]
    fn a_configuration_has_defaults() {
        let config = config("", "").expect("it is valid");
        assert_eq!((config.limits.seconds, config.limits.redirects), (5, 10));
        assert!(config.network.private_networks);
        assert_eq!(
            config
                .resume_point()
                .expect("valid")
                .map(|point| point.bytes),
            Some(5)
        );
        assert_eq!(
            config.policy(Some("10.0.0.1")).expect("valid").known.len(),
            2
        );
    }

    /// What the controller of data sources writes (`src/router/kube/populators/pod.rs`).
    #[test]
    fn the_configurations_of_the_controller_are_accepted() {
        let folder = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../tests/formats/populate-config"
        );
        let mut count = 0;
        for entry in std::fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let text = std::fs::read_to_string(&path).expect("text");
            let config = Config::parse(&text).unwrap_or_else(|error| panic!("{path:?}: {error}"));
            assert_eq!(config.network.refused.len(), 1, "{path:?}");
            count += 1;
        }
        assert_eq!(count, 5);
    }

    #[test]
    fn what_is_invalid_is_refused() {
        for (change, to) in [
            ("https://a.example/b", "file:///etc/passwd"),
            ("\"unverified\": true", "\"sha256\": \"12\""),
            ("\"unverified\": true", "\"unverified\": false"),
            (
                "\"unverified\": true",
                "\"unverified\": true, \"sha256\": \"12\"",
            ),
            (
                "\"unverified\": true",
                "\"unverified\": true, \"sha512\": \"12\"",
            ),
            ("disk.img", "../disk.img"),
            ("disk.img", ".hidden"),
            ("disk.img", ""),
            ("\"seconds\"", "\"second\""),
            ("10.96.0.1", "kubernetes"),
            ("\\\"e\\\"", "W/\\\"e\\\""),
            ("\"block\"", "\"device\""),
        ] {
            let failure = config(change, to).expect_err(to);
            assert_eq!(failure.exit_code(), 10, "{to}");
        }
        let digest = format!("\"sha256\": \"{}\"", "Ab".repeat(32));
        assert!(config("\"unverified\": true", &digest).is_ok());
    }

    #[test]
    fn fuzz_configuration() {
        let text = r#"{"source": {"http": {"url": "https://a.example/b", "unverified": true}},
            "target": {"filesystem": "/target"}, "network": {"proxy": "http://p:1", "refused": ["::1/128"]}}"#;
        slackwater_core::fuzz::fuzz_text("configuration", &[text], |text| {
            Config::parse(text).ok().map(|config| format!("{config:?}"))
        });
    }
}
