//! A Secret of Kubernetes as a mounted folder, and the origins to which it may be sent.

use std::fs;
use std::path::Path;

use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use serde::Deserialize;
use url::Url;

use crate::failure::{Failure, Result};

/// The largest value that is read.
const VALUE_BYTES: u64 = 1 << 20;

/// Where a Secret is, and where it may be sent.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Secret {
    /// The folder in which it is mounted.
    pub directory: std::path::PathBuf,
    /// Its annotation `slackwater.dev/origins`, as a list.
    #[serde(default)]
    pub origins: Vec<String>,
}

/// Headers that determine what a request is or where it ends. The program sets them itself.
const RESERVED_HEADERS: [&str; 12] = [
    "accept-encoding",
    "connection",
    "content-length",
    "expect",
    "host",
    "if-range",
    "proxy-authorization",
    "range",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

impl Secret {
    /// Refuses a URL to which the Secret may not be sent.
    pub fn check(&self, url: &Url) -> Result<()> {
        let refused = |what: String| Err(Failure::refused("SecretRefused", what));
        let origin = url.origin();
        let name = origin.ascii_serialization();
        if url.scheme() != "https" {
            return refused(format!("a Secret is not sent to {name}: only over https"));
        }
        let mut listed = self.origins.iter().filter_map(|text| Url::parse(text).ok());
        if listed.any(|url| url.origin() == origin) {
            return Ok(());
        }
        refused(format!(
            "the Secret's annotation slackwater.dev/origins does not list {name}; add it if this server may see the Secret"
        ))
    }

    /// The content of one key; `None` if the Secret has no such key.
    pub fn find(&self, key: &str) -> Result<Option<Vec<u8>>> {
        read(&self.directory.join(key), key)
    }

    /// A value of one line that must be there.
    pub fn get_text(&self, key: &str) -> Result<String> {
        let bytes = self.find(key)?;
        let text = bytes.and_then(|bytes| String::from_utf8(bytes).ok());
        let text = text.map(|text| text.trim_end_matches(['\r', '\n']).to_string());
        text.filter(|text| !text.is_empty()).ok_or_else(|| {
            Failure::refused(
                "SecretInvalid",
                format!("the Secret has no text in its key {key}"),
            )
        })
    }

    /// The keys `header.NAME` as headers, whose values no log shows.
    pub fn headers(&self) -> Result<HeaderMap> {
        let mut headers = HeaderMap::new();
        let unreadable = |error| {
            Failure::again(
                "SecretInvalid",
                format!("read the folder of the Secret: {error}"),
            )
        };
        for entry in fs::read_dir(&self.directory).map_err(unreadable)? {
            let key = entry.map_err(unreadable)?.file_name();
            let Some(key) = key.to_str() else { continue };
            let Some(name) = key.strip_prefix("header.") else {
                continue;
            };
            let invalid = |what: &str| {
                Failure::refused(
                    "SecretInvalid",
                    format!("the key {key} of the Secret {what}"),
                )
            };
            let name = HeaderName::from_bytes(name.as_bytes())
                .map_err(|_| invalid("has no name of a header after its first dot"))?;
            if RESERVED_HEADERS.contains(&name.as_str()) {
                return Err(invalid("is a header that this program sets itself"));
            }
            let value = HeaderValue::from_str(&self.get_text(key)?);
            let mut value = value.map_err(|_| invalid("is not the value of a header"))?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        Ok(headers)
    }
}

fn read(path: &Path, key: &str) -> Result<Option<Vec<u8>>> {
    use std::io::Read;
    let failed = |error: std::io::Error| {
        Failure::again(
            "SecretInvalid",
            format!("read the key {key} of the Secret: {error}"),
        )
    };
    let file = match fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let mut bytes = Vec::new();
    file.take(VALUE_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() as u64 > VALUE_BYTES {
        let what = format!("the key {key} of the Secret is larger than {VALUE_BYTES} bytes");
        return Err(Failure::refused("SecretInvalid", what));
    }
    Ok(Some(bytes))
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "a test writes its files")]
mod tests {
    use super::*;

    fn secret(origins: &[&str]) -> (tempfile::TempDir, Secret) {
        let folder = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
        let secret = Secret {
            directory: folder.path().to_path_buf(),
            origins: origins.iter().map(|text| text.to_string()).collect(),
        };
        (folder, secret)
    }

    #[test]
    fn a_secret_goes_only_to_the_origins_that_it_lists() {
        let (_folder, secret) =
            secret(&["https://a.example", "https://b.example:8443", "nonsense"]);
        let allowed = |text: &str| secret.check(&Url::parse(text).expect("a URL")).is_ok();
        assert!(allowed("https://a.example/x?y"));
        assert!(allowed("https://a.example:443/"), "the default port");
        assert!(allowed("https://b.example:8443/"));
        for other in [
            "http://a.example/",
            "https://a.example:8443/",
            "https://b.example/",
            "https://www.a.example/",
            "https://a.example.evil.example/",
        ] {
            assert!(!allowed(other), "{other}");
        }
    }

    #[test]
    fn headers_are_read_and_hidden_and_those_of_the_protocol_are_refused() {
        let (folder, secret) = secret(&[]);
        let write = |key: &str, value: &str| {
            fs::write(folder.path().join(key), value).expect("a file");
        };
        write("header.Authorization", "Bearer hunter2\n");
        write("ca.crt", "not a header");
        let headers = secret.headers().expect("headers");
        assert_eq!(headers.len(), 1);
        assert_eq!(headers["authorization"], "Bearer hunter2");
        assert!(!format!("{headers:?}").contains("hunter2"));
        for (key, value) in [
            ("header.Range", "bytes=0-"),
            ("header.X", "a\nb"),
            ("header.a b", "c"),
        ] {
            write(key, value);
            let failure = secret.headers().expect_err("it is refused");
            assert_eq!(failure.reason, "SecretInvalid");
            fs::remove_file(folder.path().join(key)).expect("it is removed");
        }
    }
}
