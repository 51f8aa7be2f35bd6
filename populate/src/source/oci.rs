//! References, manifests and challenges of registries, as the specifications of OCI describe them.

use serde::Deserialize;

use crate::failure::{Failure, Result};

/// The media types of manifests and of lists of them.
pub const ACCEPT: &str = "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.v2+json, application/vnd.docker.distribution.manifest.list.v2+json";
/// The largest manifest, as registries limit it too.
pub const MANIFEST_BYTES: usize = 4 << 20;
/// The most layers of an image; container runtimes mount no more than 127 or so.
const LAYERS: usize = 512;

fn refused(what: impl std::fmt::Display) -> Failure {
    Failure::refused("ImageRefused", what)
}

/// The name of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// The host and port of the registry.
    pub registry: String,
    pub repository: String,
    /// A tag, or a digest.
    pub version: String,
}

/// A SHA-256 as registries write it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Digest(String);

impl TryFrom<String> for Digest {
    type Error = Failure;

    fn try_from(text: String) -> Result<Digest> {
        let hex = text.strip_prefix("sha256:").unwrap_or_default();
        let is_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        match hex.len() == 64 && hex.bytes().all(is_hex) {
            true => Ok(Digest(text)),
            false => Err(refused(format!("the digest {text:?} is not of SHA-256"))),
        }
    }
}

impl Digest {
    pub fn of(hex: &str) -> Digest {
        Digest(format!("sha256:{hex}"))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn bytes(&self) -> [u8; 32] {
        let hex = self.0.trim_start_matches("sha256:");
        std::array::from_fn(|at| {
            let pair = hex.get(2 * at..2 * at + 2).unwrap_or_default();
            u8::from_str_radix(pair, 16).unwrap_or_default()
        })
    }
}

impl Reference {
    /// Parses `[REGISTRY/]REPOSITORY[:TAG][@DIGEST]`. A digest decides, and the tag beside it is not
    /// read.
    pub fn parse(text: &str) -> Result<Reference> {
        let invalid = || refused(format!("{text:?} is not the name of an image"));
        let (name, digest) = match text.split_once('@') {
            Some((name, digest)) => (name, Some(Digest::try_from(digest.to_string())?)),
            None => (text, None),
        };
        let (registry, rest) = match name.split_once('/') {
            Some((first, rest)) if first.contains(['.', ':']) || first == "localhost" => {
                (first, rest)
            }
            _ => ("docker.io", name),
        };
        let (repository, tag) = rest.split_once(':').unwrap_or((rest, "latest"));
        let is_part = |part: &str| {
            let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
            part.starts_with(is_plain)
                && part.ends_with(is_plain)
                && part.chars().all(|c| is_plain(c) || "._-".contains(c))
        };
        let is_host = |c: char| c.is_ascii_alphanumeric() || ".-:[]".contains(c);
        let is_tag = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let is_valid = repository.split('/').all(is_part)
            && repository.len() <= 255
            && registry.chars().all(is_host)
            && (1..=128).contains(&tag.len())
            && tag.chars().all(is_tag)
            && !tag.starts_with(['.', '-']);
        if !is_valid {
            return Err(invalid());
        }
        let (registry, repository) = match registry {
            // Its registry has another name, and images without a user have one there.
            "docker.io" if !repository.contains('/') => {
                ("registry-1.docker.io", format!("library/{repository}"))
            }
            "docker.io" => ("registry-1.docker.io", repository.to_string()),
            other => (other, repository.to_string()),
        };
        let version = digest.map_or_else(|| tag.to_string(), |digest| digest.0);
        Ok(Reference {
            registry: registry.to_string(),
            repository,
            version,
        })
    }

    /// The digest, if the reference has one.
    pub fn digest(&self) -> Option<Digest> {
        Digest::try_from(self.version.clone()).ok()
    }
}

/// For which machine an image is.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Platform {
    pub os: String,
    pub architecture: String,
}

impl Default for Platform {
    fn default() -> Platform {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        Platform {
            os: "linux".to_string(),
            architecture: architecture.to_string(),
        }
    }
}

/// A part of an image.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Descriptor {
    pub digest: Digest,
    pub size: u64,
    #[serde(default, rename = "mediaType")]
    media_type: String,
    #[serde(default)]
    urls: Vec<String>,
    platform: Option<Platform>,
}

/// What a reference leads to.
#[derive(Debug, PartialEq, Eq)]
pub enum Manifest {
    /// The layers of an image, the lowest first.
    Image(Vec<Descriptor>),
    /// The manifest of one platform, by its digest.
    Other(Digest),
}

#[derive(Deserialize)]
struct Document {
    #[serde(rename = "schemaVersion")]
    schema_version: u32,
    manifests: Option<Vec<Descriptor>>,
    layers: Option<Vec<Descriptor>>,
}

impl Manifest {
    pub fn parse(bytes: &[u8], platform: &Platform) -> Result<Manifest> {
        let document: Document = serde_json::from_slice(bytes)
            .map_err(|error| refused(format!("the manifest is invalid: {error}")))?;
        if document.schema_version != 2 {
            return Err(refused("the manifest does not have the schema version 2"));
        }
        match (document.manifests, document.layers) {
            (None, Some(layers)) => check_layers(&layers).map(|()| Manifest::Image(layers)),
            (Some(manifests), None) => {
                let mut found = manifests.into_iter();
                let found = found.find(|one| one.platform.as_ref() == Some(platform));
                let found = found.ok_or_else(|| {
                    refused(format!(
                        "the image has no platform {}/{}",
                        platform.os, platform.architecture
                    ))
                })?;
                Ok(Manifest::Other(found.digest))
            }
            // Programs that read one or the other would read two images with one digest.
            _ => Err(refused(
                "the manifest is either both an image and an index, or neither",
            )),
        }
    }
}

fn check_layers(layers: &[Descriptor]) -> Result<()> {
    if layers.is_empty() || layers.len() > LAYERS {
        return Err(refused(format!(
            "the image has {} layers; between 1 and {LAYERS} are possible",
            layers.len()
        )));
    }
    let is_elsewhere = |layer: &Descriptor| {
        !layer.urls.is_empty()
            || ["foreign", "nondistributable"]
                .iter()
                .any(|word| layer.media_type.contains(word))
    };
    match layers.iter().any(is_elsewhere) {
        true => Err(refused(
            "a layer of the image is at other URLs than the registry",
        )),
        false => Ok(()),
    }
}

/// How a registry wants requests to be authenticated, by WWW-Authenticate.
#[derive(Debug, PartialEq, Eq)]
pub enum Challenge {
    Basic,
    /// A token, from this URL.
    Bearer {
        realm: String,
        service: String,
    },
}

impl Challenge {
    pub fn parse(header: &str) -> Option<Challenge> {
        let (scheme, rest) = header.split_once(' ').unwrap_or((header, ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return Some(Challenge::Basic);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let mut realm = None;
        let mut service = String::new();
        let mut rest = rest.trim_start();
        while let Some((key, after)) = rest.split_once("=\"") {
            let (value, after) = after.split_once('"')?;
            match key.trim_start_matches([',', ' ']) {
                "realm" => realm = Some(value.to_string()),
                "service" => service = value.to_string(),
                _ => {}
            }
            rest = after;
        }
        Some(Challenge::Bearer {
            realm: realm?,
            service,
        })
    }
}

#[derive(Deserialize)]
struct DockerConfig {
    #[serde(default)]
    auths: std::collections::BTreeMap<String, DockerAuth>,
}

#[derive(Deserialize)]
struct DockerAuth {
    auth: Option<String>,
}

/// The value of Basic for a registry, of a Secret of the type `kubernetes.io/dockerconfigjson`.
pub fn basic_credentials(config: &[u8], registry: &str) -> Option<String> {
    let config: DockerConfig = serde_json::from_slice(config).ok()?;
    let is_it = |key: &str| {
        let host = key
            .trim_start_matches("https://")
            .split('/')
            .next()
            .unwrap_or_default();
        host == registry || registry == "registry-1.docker.io" && host == "index.docker.io"
    };
    let mut auths = config.auths.into_iter();
    let (_, found) = auths.find(|(key, _)| is_it(key))?;
    let is_base64 = |c: char| c.is_ascii_alphanumeric() || "+/=".contains(c);
    found
        .auth
        .filter(|auth| !auth.is_empty() && auth.chars().all(is_base64))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEX: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn references_have_a_registry_and_a_version() {
        let parts = |text: &str| {
            let reference = Reference::parse(text).ok()?;
            Some(format!(
                "{} {} {}",
                reference.registry, reference.repository, reference.version
            ))
        };
        let is = |text: &str, expected: &str| assert_eq!(parts(text).as_deref(), Some(expected));
        is("debian", "registry-1.docker.io library/debian latest");
        is("user/app:v1", "registry-1.docker.io user/app v1");
        is("quay.io/a/b/c:1.2", "quay.io a/b/c 1.2");
        is("localhost:5000/a", "localhost:5000 a latest");
        is(
            &format!("quay.io/a:v1@sha256:{HEX}"),
            &format!("quay.io a sha256:{HEX}"),
        );
        for text in [
            "",
            "/",
            "A",
            "quay.io/",
            "quay.io/../a",
            "a//b",
            "a:",
            "a:-x",
            "a@sha256:12",
            "a@md5:1",
            "quay.io/a?b",
            "user@evil.example/a",
            "quay.io/a:b:c",
            "a b",
            "quay.io/a/.",
            "quay.io/-a",
        ] {
            assert_eq!(parts(text), None, "{text:?}");
        }
        let upper = format!("a@sha256:{}", HEX.to_uppercase());
        assert_eq!(parts(&upper), None);
        assert_eq!(Digest::of(HEX).bytes()[..2], [0xba, 0x78]);
    }

    fn manifest(text: &str) -> Result<Manifest> {
        let text = text.replace("DIGEST", &format!("sha256:{HEX}"));
        let platform = Platform {
            os: "linux".into(),
            architecture: "amd64".into(),
        };
        Manifest::parse(text.as_bytes(), &platform)
    }

    #[test]
    fn an_index_leads_to_the_manifest_of_the_platform() {
        let index = |architecture: &str| {
            manifest(&format!(
                r#"{{"schemaVersion": 2, "manifests": [{{"digest": "DIGEST", "size": 1, "platform": {{"os": "linux", "architecture": "{architecture}"}}}}]}}"#
            ))
        };
        assert_eq!(
            index("amd64").expect("valid"),
            Manifest::Other(Digest::of(HEX))
        );
        assert!(index("arm64").is_err());
        let image =
            manifest(r#"{"schemaVersion": 2, "layers": [{"digest": "DIGEST", "size": 7}]}"#);
        assert!(matches!(image, Ok(Manifest::Image(layers)) if layers[0].size == 7));
    }

    #[test]
    fn manifests_that_lead_elsewhere_or_are_two_things_are_refused() {
        for text in [
            r#"{"schemaVersion": 2, "layers": [{"digest": "DIGEST", "size": 1, "urls": ["https://169.254.169.254/"]}]}"#,
            r#"{"schemaVersion": 2, "layers": [{"digest": "DIGEST", "size": 1, "mediaType": "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"}]}"#,
            r#"{"schemaVersion": 2, "layers": [{"digest": "DIGEST", "size": 1}], "manifests": []}"#,
            r#"{"schemaVersion": 2, "layers": []}"#,
            r#"{"schemaVersion": 2}"#,
            r#"{"schemaVersion": 1, "layers": [{"digest": "DIGEST", "size": 1}]}"#,
            r#"{"schemaVersion": 2, "layers": [{"digest": "sha256:../../etc", "size": 1}]}"#,
            r#"{"schemaVersion": 2, "layers": [{"digest": "DIGEST", "size": -1}]}"#,
            "[]",
            "",
            "null",
        ] {
            assert_eq!(manifest(text).expect_err(text).exit_code(), 10);
        }
    }

    #[test]
    fn challenges_name_where_a_token_is() {
        let parsed =
            Challenge::parse(r#"Bearer realm="https://a.example/token",service="b",scope="c""#);
        let (realm, service) = ("https://a.example/token".into(), "b".into());
        assert_eq!(parsed, Some(Challenge::Bearer { realm, service }));
        assert_eq!(
            Challenge::parse("Basic realm=\"x\""),
            Some(Challenge::Basic)
        );
        for text in [
            "",
            "Bearer",
            "Bearer service=\"b\"",
            "Bearer realm=\"x",
            "Digest realm=\"x\"",
        ] {
            assert_eq!(Challenge::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_pull_secret_is_for_its_registry_alone() {
        let config = br#"{"auths": {"https://index.docker.io/v1/": {"auth": "aaa="}, "quay.io": {"auth": "bbb"}, "x.example": {"auth": "a\nb"}}}"#;
        assert_eq!(
            basic_credentials(config, "registry-1.docker.io").as_deref(),
            Some("aaa=")
        );
        assert_eq!(basic_credentials(config, "quay.io").as_deref(), Some("bbb"));
        for registry in ["quay.io.evil.example", "x.example", "other.example"] {
            assert_eq!(basic_credentials(config, registry), None);
        }
    }

    const IMAGE: &str = r#"{"schemaVersion": 2, "layers": [{"digest": "DIGEST", "size": 7, "mediaType": "x", "urls": []}]}"#;
    const INDEX: &str = r#"{"schemaVersion": 2, "manifests": [{"digest": "DIGEST", "size": 7, "platform": {"os": "linux", "architecture": "arm64"}}, {"digest": "DIGEST", "size": 8, "platform": {"os": "linux", "architecture": "amd64"}}]}"#;

    #[test]
    fn fuzz_manifest() {
        let with = |text: &str| text.replace("DIGEST", &format!("sha256:{HEX}"));
        let platform = Platform {
            os: "linux".into(),
            architecture: "amd64".into(),
        };
        let seeds = [with(IMAGE), with(INDEX)];
        let seeds: Vec<_> = seeds.iter().map(String::as_str).collect();
        slackwater_core::fuzz::fuzz_text("manifest", &seeds, |text| {
            let found = Manifest::parse(text.as_bytes(), &platform).ok()?;
            let digests: Vec<_> = match &found {
                Manifest::Image(layers) => layers.iter().map(|layer| &layer.digest).collect(),
                Manifest::Other(digest) => vec![digest],
            };
            // They become parts of a URL.
            assert!((1..=LAYERS).contains(&digests.len()));
            for digest in digests {
                assert_eq!(*digest, Digest::of(&hex_of(digest)));
            }
            Some(found)
        });
    }

    fn hex_of(digest: &Digest) -> String {
        crate::source::received::hex(&digest.bytes())
    }

    #[test]
    fn fuzz_reference() {
        let seeds = [
            "quay.io:5000/a/b-c:1.2",
            &format!("localhost/a@sha256:{HEX}"),
        ];
        slackwater_core::fuzz::fuzz_text("name of an image", &seeds, |text| {
            let found = Reference::parse(text).ok()?;
            let base = format!("https://{}/v2/{}/", found.registry, found.repository);
            // A host that is invalid is refused later. None leads to another one, or to another path.
            if let Ok(url) = url::Url::parse(&base) {
                assert_eq!(url.path(), format!("/v2/{}/", found.repository));
                assert!(url.username().is_empty() && url.query().is_none());
            }
            Some((found.registry, found.repository, found.version))
        });
    }

    #[test]
    fn fuzz_challenge() {
        let seeds = [
            r#"Bearer realm="https://a.example/token",service="b",scope="c""#,
            "Basic realm=\"x\"",
        ];
        slackwater_core::fuzz::fuzz_text("challenge", &seeds, Challenge::parse);
    }

    #[test]
    fn fuzz_keys_of_a_registry() {
        let seed = r#"{"auths": {"https://quay.io/v1/": {"auth": "aaa="}}}"#;
        slackwater_core::fuzz::fuzz_text("keys of a registry", &[seed], |text| {
            let found = basic_credentials(text.as_bytes(), "quay.io")?;
            let is_valid = hyper::header::HeaderValue::from_str(&found).is_ok();
            assert!(is_valid && !found.is_empty());
            Some(found)
        });
    }
}
