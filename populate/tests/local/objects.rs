//! Objects of an object store.

use std::fs;

use serde_json::{Value, json};
use slackwater_populate::failure::Next;

use crate::server::{Request, Server, Steps, Tls, reply};
use crate::support::{Outcome, Volume, digest, fill, noise};

/// A bucket with the objects `p/a`, `p/d/b`, `p/empty/` and `q`, in pages of two.
struct Store {
    server: Server,
    tls: Tls,
}

const OBJECTS: [(&str, &[u8]); 4] = [
    ("p/a", b"first"),
    ("p/d/b b", b"second"),
    ("p/empty/", b""),
    ("q", b"other"),
];

fn etag(content: &[u8]) -> String {
    format!("\"{}\"", &digest(content)[..8])
}

fn list(path: &str, objects: &[(&str, &[u8])]) -> Steps {
    let is_second = path.contains("continuation-token=t%20k&");
    let page = if is_second {
        &objects[2..]
    } else {
        &objects[..2]
    };
    let mut text = String::from("<ListBucketResult>");
    for (key, content) in page.iter().filter(|(key, _)| key.starts_with("p/")) {
        text += &format!(
            "<Contents><Key>{key}</Key><ETag>{}</ETag><Size>{}</Size></Contents>",
            etag(content).replace('"', "&quot;"),
            content.len()
        );
    }
    text += match is_second {
        true => "<IsTruncated>false</IsTruncated></ListBucketResult>",
        false => {
            "<IsTruncated>true</IsTruncated><NextContinuationToken>t k</NextContinuationToken></ListBucketResult>"
        }
    };
    reply("200 OK", &[], text.as_bytes())
}

impl Store {
    fn new(handle: impl Fn(&Request) -> Option<Steps> + Send + Sync + 'static) -> Store {
        let tls = Tls::new();
        let serve = move |request: &Request| {
            let path = request.path().to_string();
            if let Some(steps) = handle(request) {
                return steps;
            }
            if path.starts_with("/bucket?") {
                return list(&path, &OBJECTS);
            }
            let key = path.trim_start_matches("/bucket/").replace("%20", " ");
            let found = OBJECTS.iter().find(|(name, _)| *name == key);
            match found {
                Some((_, content))
                    if request
                        .header("if-match")
                        .is_none_or(|etag_| etag_ == etag(content)) =>
                {
                    reply("200 OK", &[&format!("ETag: {}", etag(content))], content)
                }
                Some(_) => reply("412 Precondition Failed", &[], b""),
                None => reply("404 Not Found", &[], b""),
            }
        };
        Store {
            server: Server::at("127.0.0.1", Some(&tls), serve),
            tls,
        }
    }

    fn fill(&self, volume: &Volume, source: Value) -> Outcome {
        let secret = volume.secret(&[self.server.origin()], &self.tls.authority);
        let folder = std::path::PathBuf::from(secret["directory"].as_str().expect("a path"));
        fs::write(folder.join("accessKeyId"), "AKIA").expect("a file");
        fs::write(folder.join("secretAccessKey"), "hunter2\n").expect("a file");
        let mut config = volume.config("", json!({"secret": secret}));
        config["source"] = json!({"s3": {"endpoint": self.server.origin(), "bucket": "bucket"}});
        for (key, value) in source.as_object().expect("an object") {
            config["source"]["s3"][key] = value.clone();
        }
        fill(&config)
    }
}

#[test]
fn all_objects_with_a_prefix_become_files() {
    let store = Store::new(|_| None);
    let volume = Volume::new();
    let outcome = store.fill(&volume, json!({"prefix": "p/", "unverified": true}));
    outcome.good();
    assert_eq!(volume.names(), ["a", "d", "empty"]);
    assert_eq!(volume.read("a"), b"first");
    assert_eq!(volume.read("d/b b"), b"second");
    assert_eq!(outcome.last["entries"], 3);
    let requests = store.server.requests();
    let signed = |request: &Request| {
        let sent = request.header("authorization").unwrap_or_default();
        sent.starts_with("AWS4-HMAC-SHA256 Credential=AKIA/") && !sent.contains("hunter2")
    };
    assert!(requests.iter().all(signed));
    let objects = requests
        .iter()
        .filter(|request| request.path().starts_with("/bucket/"));
    assert!(
        objects
            .clone()
            .all(|request| request.header("if-match").is_some())
    );
    assert_eq!(objects.count(), 2);
}

#[test]
fn one_object_is_like_that_of_any_server() {
    let content = noise(100_000);
    let sum = digest(&content);
    let store = Store::new(move |request| {
        (request.path() == "/bucket/disk").then(|| reply("200 OK", &[], &content))
    });
    let volume = Volume::new();
    store
        .fill(&volume, json!({"key": "disk", "sha256": sum}))
        .good();
    assert_eq!(digest(&volume.read("disk.img")), sum);
}

#[test]
fn an_object_that_changes_between_list_and_request_is_not_mixed_in() {
    let store = Store::new(|request| {
        (request.path() == "/bucket/p/d/b%20b").then(|| reply("412 Precondition Failed", &[], b""))
    });
    let outcome = store.fill(&Volume::new(), json!({"prefix": "p/", "unverified": true}));
    assert_eq!(outcome.failure("SourceChanged").next, Next::NewVolume);
    let store = Store::new(|request| {
        (request.path() == "/bucket/p/a").then(|| reply("200 OK", &[], b"firs"))
    });
    let outcome = store.fill(&Volume::new(), json!({"prefix": "p/", "unverified": true}));
    assert_eq!(
        outcome.result.expect_err("another length").next,
        Next::NewVolume
    );
    let store = Store::new(|request| {
        (request.path() == "/bucket/p/a").then(|| reply("200 OK", &[], b"first!"))
    });
    store
        .fill(&Volume::new(), json!({"prefix": "p/", "unverified": true}))
        .failure("TooLarge");
}

#[test]
fn names_of_objects_follow_the_rules_of_archives() {
    for key in ["p/../../x", "p//etc/passwd/../..", "p/a/../b", "q/x"] {
        let store = Store::new(move |request| {
            let text = format!(
                "<ListBucketResult><Contents><Key>{key}</Key><ETag>\"1\"</ETag><Size>1</Size></Contents></ListBucketResult>"
            );
            request
                .path()
                .starts_with("/bucket?")
                .then(|| reply("200 OK", &[], text.as_bytes()))
        });
        let volume = Volume::new();
        let outcome = store.fill(&volume, json!({"prefix": "p/", "unverified": true}));
        assert!(outcome.result.is_err(), "{key}");
        assert!(volume.names().is_empty(), "{key}");
        assert_eq!(store.server.requests().len(), 1);
    }
}

#[test]
fn lists_that_never_end_are_given_up() {
    let store = Store::new(|request| {
        let text = "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken></ListBucketResult>";
        request
            .path()
            .starts_with("/bucket?")
            .then(|| reply("200 OK", &[], text.as_bytes()))
    });
    let outcome = store.fill(&Volume::new(), json!({"prefix": "p/", "unverified": true}));
    outcome.failure("TransferFailed");
}

#[test]
fn a_prefix_needs_a_folder_and_no_checksum() {
    let store = Store::new(|_| None);
    let sum = digest(b"");
    for source in [
        json!({"prefix": "p/", "sha256": sum}),
        json!({"prefix": "p/"}),
        json!({"prefix": "p/", "key": "q", "unverified": true}),
        json!({"unverified": true}),
    ] {
        store
            .fill(&Volume::new(), source)
            .failure("ConfigurationInvalid");
    }
    assert!(store.server.requests().is_empty());
}
