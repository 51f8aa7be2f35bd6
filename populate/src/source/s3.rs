//! Requests and replies of object stores with the interface of S3: signatures of version 4, and lists
//! of objects.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hyper::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use ring::digest;
use ring::hmac;
use serde::Deserialize;
use url::Url;

use crate::failure::{Failure, Result};
use crate::source::received::hex;

/// The largest page of a list; 1000 keys of 1 KiB fit.
pub const PAGE_BYTES: usize = 8 << 20;
/// The SHA-256 of no body.
const NO_BODY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

/// Signs requests with the keys of a user.
#[derive(Clone)]
pub struct Signer {
    pub access_key: String,
    pub secret_key: String,
    pub session_token: Option<String>,
    pub region: String,
}

impl std::fmt::Debug for Signer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Signer of {}", self.region)
    }
}

impl Signer {
    /// Adds the headers of a signature, at a time.
    pub fn sign(&self, url: &Url, now: SystemTime, headers: &mut HeaderMap) -> Result<()> {
        let invalid = |_| {
            Failure::refused(
                "SecretInvalid",
                "the keys of the Secret are not valid in a header",
            )
        };
        let time = timestamp(now);
        let date = &time[..8];
        let host = &url[url::Position::BeforeHost..url::Position::AfterPort];
        let mut signed = vec![
            ("host", host.to_string()),
            ("x-amz-content-sha256", NO_BODY.to_string()),
            ("x-amz-date", time.clone()),
        ];
        if let Some(token) = &self.session_token {
            signed.push(("x-amz-security-token", token.clone()));
        }
        let names: Vec<_> = signed.iter().map(|(name, _)| *name).collect();
        let names = names.join(";");
        let lines: String = signed
            .iter()
            .map(|(name, value)| format!("{name}:{value}\n"))
            .collect();
        let (path, query) = (url.path(), url.query().unwrap_or_default());
        let request = format!("GET\n{path}\n{query}\n{lines}\n{names}\n{NO_BODY}");
        let request = hex(digest::digest(&digest::SHA256, request.as_bytes()).as_ref());
        let scope = format!("{date}/{}/s3/aws4_request", self.region);
        let text = format!("AWS4-HMAC-SHA256\n{time}\n{scope}\n{request}");
        let mut key = format!("AWS4{}", self.secret_key).into_bytes();
        for part in [date, &self.region, "s3", "aws4_request"] {
            key = hmac(&key, part);
        }
        let signature = hex(&hmac(&key, &text));
        let value = format!(
            "AWS4-HMAC-SHA256 Credential={}/{scope},SignedHeaders={names},Signature={signature}",
            self.access_key
        );
        let mut value = HeaderValue::from_str(&value).map_err(invalid)?;
        value.set_sensitive(true);
        headers.insert(AUTHORIZATION, value);
        for (name, value) in signed.into_iter().skip(1) {
            let mut value = HeaderValue::from_str(&value).map_err(invalid)?;
            value.set_sensitive(name == "x-amz-security-token");
            headers.insert(HeaderName::from_static(name), value);
        }
        Ok(())
    }
}

fn hmac(key: &[u8], text: &str) -> Vec<u8> {
    let key = hmac::Key::new(hmac::HMAC_SHA256, key);
    hmac::sign(&key, text.as_bytes()).as_ref().to_vec()
}

/// `YYYYMMDDTHHMMSSZ`.
fn timestamp(now: SystemTime) -> String {
    let seconds = now
        .duration_since(UNIX_EPOCH)
        .unwrap_or(Duration::ZERO)
        .as_secs();
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // The calendar repeats after 400 years; years begin in March here, so that a leap day is the last.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let date = day - (153 * month + 2) / 5 + 1;
    let (year, month) = match month {
        0..=9 => (era * 400 + year, month + 3),
        _ => (era * 400 + year + 1, month - 9),
    };
    let (hour, minute, second) = (rest / 3600, rest % 3600 / 60, rest % 60);
    format!("{year:04}{month:02}{date:02}T{hour:02}{minute:02}{second:02}Z")
}

/// Encodes as signatures require: all but letters, digits and `-_.~`.
pub fn encode(text: &str, keeps_slashes: bool) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                encoded.push(byte.into());
            }
            b'/' if keeps_slashes => encoded.push('/'),
            byte => encoded += &format!("%{byte:02X}"),
        }
    }
    encoded
}

/// The URL of an object, with the bucket in the path.
pub fn object_url(endpoint: &Url, bucket: &str, key: &str) -> Result<Url> {
    // A parser of URLs would resolve these, and request another object.
    if key.is_empty() || key.split('/').any(|part| matches!(part, "." | "..")) {
        let what = format!("the object {key:?} has no name that a URL can have");
        return Err(Failure::refused("UrlRefused", what));
    }
    let mut url = bucket_url(endpoint, bucket)?;
    let path = format!("{}/{}", url.path(), encode(key, true));
    url.set_path(&path);
    Ok(url)
}

/// The URL of a page of the list of objects with a prefix. The order of its query is that of the
/// signature.
pub fn list_url(endpoint: &Url, bucket: &str, prefix: &str, after: Option<&str>) -> Result<Url> {
    let mut url = bucket_url(endpoint, bucket)?;
    let mut query = String::new();
    if let Some(token) = after {
        query = format!("continuation-token={}&", encode(token, false));
    }
    query += &format!("list-type=2&prefix={}", encode(prefix, false));
    url.set_query(Some(&query));
    Ok(url)
}

fn bucket_url(endpoint: &Url, bucket: &str) -> Result<Url> {
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
    let is_name = (3..=63).contains(&bucket.len())
        && bucket.chars().all(is_plain)
        && !bucket.starts_with('.');
    if !is_name {
        let what = format!("{bucket:?} is not the name of a bucket");
        return Err(Failure::refused("UrlRefused", what));
    }
    let mut url = endpoint.clone();
    url.set_query(None);
    let path = format!("{}/{bucket}", endpoint.path().trim_end_matches('/'));
    url.set_path(&path);
    Ok(url)
}

/// One object of a list.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Object {
    pub key: String,
    #[serde(rename = "ETag")]
    pub etag: String,
    pub size: u64,
}

/// A page of a list.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Page {
    #[serde(default, rename = "Contents")]
    pub objects: Vec<Object>,
    #[serde(default)]
    is_truncated: bool,
    next_continuation_token: Option<String>,
}

impl Page {
    pub fn parse(bytes: &[u8]) -> Result<Page> {
        let invalid = |what: &dyn std::fmt::Display| {
            Failure::again(
                "TransferFailed",
                format!("read the list of objects: {what}"),
            )
        };
        let text = std::str::from_utf8(bytes).map_err(|error| invalid(&error))?;
        let page: Page = quick_xml::de::from_str(text).map_err(|error| invalid(&error))?;
        match page.is_truncated == page.next_continuation_token.is_some() {
            true => Ok(page),
            false => Err(invalid(
                &"it is truncated, and does not say where it continues, or the reverse",
            )),
        }
    }

    /// Where the next page begins.
    pub fn next(&self) -> Option<&str> {
        self.next_continuation_token.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn signature(url: &str) -> String {
        let signer = Signer {
            access_key: "AKIAIOSFODNN7EXAMPLE".into(),
            secret_key: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".into(),
            session_token: None,
            region: "us-east-1".into(),
        };
        let now = UNIX_EPOCH + Duration::from_secs(1_369_353_600);
        let mut headers = HeaderMap::new();
        let url = Url::parse(url).expect("a URL");
        signer.sign(&url, now, &mut headers).expect("it is signed");
        assert!(!format!("{headers:?} {signer:?}").contains("EXAMPLE"));
        let value = headers[AUTHORIZATION].to_str().expect("text");
        value.rsplit('=').next().expect("a signature").to_string()
    }

    /// The examples of Amazon's page "Authenticating Requests (AWS Signature Version 4)".
    #[test]
    fn signatures_are_those_of_the_documentation() {
        assert_eq!(
            signature("https://examplebucket.s3.amazonaws.com/?lifecycle="),
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"
        );
        assert_eq!(
            signature("https://examplebucket.s3.amazonaws.com/?max-keys=2&prefix=J"),
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
        );
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        let at = |seconds: u64| timestamp(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "19700101T000000Z");
        assert_eq!(at(951_782_399), "20000228T235959Z");
        assert_eq!(at(951_782_400), "20000229T000000Z");
        assert_eq!(at(1_369_353_600), "20130524T000000Z");
        assert_eq!(at(4_107_542_400), "21000301T000000Z");
        assert_eq!(at(1_798_761_599), "20261231T235959Z");
    }

    #[test]
    fn urls_are_encoded_for_the_signature() {
        let endpoint = Url::parse("https://s3.example/base/").expect("a URL");
        let url = object_url(&endpoint, "bucket", "a b/ü+&?#%2e").expect("a URL");
        assert_eq!(
            url.as_str(),
            "https://s3.example/base/bucket/a%20b/%C3%BC%2B%26%3F%23%252e"
        );
        let url = list_url(&endpoint, "bucket", "p/", Some("a=b")).expect("a URL");
        assert_eq!(
            url.query(),
            Some("continuation-token=a%3Db&list-type=2&prefix=p%2F")
        );
        for (bucket, key) in [
            ("bucket", "a/../b"),
            ("bucket", "."),
            ("bucket", ""),
            ("a/b", "k"),
            ("..", "k"),
            ("B", "k"),
        ] {
            assert!(
                object_url(&endpoint, bucket, key).is_err(),
                "{bucket} {key}"
            );
        }
    }

    const LIST: &str = r#"<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name><IsTruncated>true</IsTruncated><Contents><Key>p/a&amp;b</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;1&quot;</ETag><Size>5</Size></Contents><Contents><Key>p/c</Key><ETag>"2"</ETag><Size>0</Size></Contents><NextContinuationToken>t</NextContinuationToken></ListBucketResult>"#;

    #[test]
    fn lists_have_objects_and_the_next_page() {
        let page = Page::parse(LIST.as_bytes()).expect("it is valid");
        let found: Vec<_> = page
            .objects
            .iter()
            .map(|one| (&one.key[..], &one.etag[..], one.size))
            .collect();
        assert_eq!(found, [("p/a&b", "\"1\"", 5), ("p/c", "\"2\"", 0)]);
        assert_eq!(page.next(), Some("t"));
        for (from, to) in [
            ("<NextContinuationToken>t</NextContinuationToken>", ""),
            ("<IsTruncated>true</IsTruncated>", ""),
            ("<Size>5", "<Size>-5"),
            ("<Key>p/c</Key>", ""),
            ("&quot;", "&evil;"),
            ("</ListBucketResult>", ""),
        ] {
            assert!(LIST.contains(from));
            assert!(
                Page::parse(LIST.replace(from, to).as_bytes()).is_err(),
                "{from}"
            );
        }
        assert!(Page::parse(b"\xff").is_err());
    }

    #[test]
    fn fuzz_list_of_objects() {
        slackwater_core::fuzz::fuzz_text("list of objects", &[LIST], |text| {
            Page::parse(text.as_bytes()).ok()
        });
    }

    proptest! {
        /// A parser of URLs changes nothing in what was signed.
        #[test]
        fn an_encoded_key_is_not_changed_by_a_url(key in "[ -~é]{1,40}") {
            let endpoint = Url::parse("https://s3.example").expect("a URL");
            if let Ok(url) = object_url(&endpoint, "bucket", &key) {
                prop_assert_eq!(url.path(), format!("/bucket/{}", encode(&key, true)));
            }
        }
    }
}
