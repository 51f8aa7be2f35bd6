//! Images of a registry.

use std::collections::BTreeMap;
use std::fs;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use slackwater_populate::failure::Next;

use crate::server::{Request, Server, Steps, Tls, redirect, reply, serves};
use crate::support::{Outcome, Volume, digest, fill, noise, qcow2, tar};

/// A registry with blobs and manifests by their path.
pub struct Registry {
    server: Server,
    tls: Tls,
    files: Arc<Mutex<BTreeMap<String, Vec<u8>>>>,
}

impl Registry {
    /// One that asks for a token unless `token` is empty.
    pub fn new(token: &'static str, blobs: Option<String>) -> Registry {
        let tls = Tls::new();
        let files: Arc<Mutex<BTreeMap<String, Vec<u8>>>> = Arc::default();
        let kept = files.clone();
        let handle = move |request: &Request| -> Steps {
            let path = request.path();
            if let Some(query) = path.strip_prefix("/token?") {
                let is_expected = query.contains("scope=repository%3Ateam%2Fapp%3Apull");
                let body = json!({"token": if is_expected { token } else { "wrong" }});
                return reply("200 OK", &[], body.to_string().as_bytes());
            }
            let sent = request.header("authorization").unwrap_or_default();
            if !token.is_empty() && sent != format!("Bearer {token}") {
                let host = request.header("host").unwrap_or_default();
                let header = format!(
                    "WWW-Authenticate: Bearer realm=\"https://{host}/token\",service=\"s\""
                );
                return reply("401 Unauthorized", &[&header], b"");
            }
            if let (Some(to), true) = (&blobs, path.contains("/blobs/")) {
                return redirect(&format!("{to}{path}"));
            }
            match kept.lock().expect("no panic").get(path) {
                Some(bytes) => reply("200 OK", &[], bytes),
                None => reply("404 Not Found", &[], b""),
            }
        };
        Registry {
            server: Server::at("127.0.0.1", Some(&tls), handle),
            tls,
            files,
        }
    }

    pub fn put(&self, path: &str, bytes: &[u8]) {
        let path = format!("/v2/team/app/{path}");
        self.files
            .lock()
            .expect("no panic")
            .insert(path, bytes.to_vec());
    }

    pub fn blob(&self, bytes: &[u8]) -> Value {
        let digest = format!("sha256:{}", digest(bytes));
        self.put(&format!("blobs/{digest}"), bytes);
        json!({"digest": digest, "size": bytes.len(), "mediaType": "application/vnd.oci.image.layer.v1.tar"})
    }

    /// An image of these layers with a tag, and its digest.
    pub fn image(&self, layers: &[Value]) -> String {
        let manifest = json!({"schemaVersion": 2, "layers": layers}).to_string();
        self.put("manifests/v1", manifest.as_bytes());
        let digest = format!("sha256:{}", digest(manifest.as_bytes()));
        self.put(&format!("manifests/{digest}"), manifest.as_bytes());
        digest
    }

    fn name(&self, version: &str) -> String {
        format!("{}/team/app{version}", self.server.address)
    }

    pub fn fill(&self, volume: &Volume, version: &str, more: Value) -> Outcome {
        let bundle = volume.folder.path().join("bundle");
        fs::write(&bundle, &self.tls.authority).expect("a file");
        let mut config = volume.config("", more);
        let mut source = json!({"image": self.name(version)});
        if let Some(path) = config["source"]["oci"]["path"].as_str() {
            source["path"] = json!(path);
        }
        config["source"] = json!({"oci": source});
        config["network"] = json!({"caBundle": bundle});
        fill(&config)
    }
}

/// A layer of files, by name and content.
pub fn layer(files: &[(&str, &[u8])], flags: &[&str]) -> Vec<u8> {
    let folder = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
    for (name, content) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, content).expect("a file");
    }
    tar(folder.path(), flags)
}

fn in_path(path: &str) -> Value {
    json!({"source": {"oci": {"path": path}}})
}

#[test]
fn layers_become_a_tree_and_the_digest_is_reported() {
    let registry = Registry::new("token-1", None);
    let lower = registry.blob(&layer(&[("a", b"1"), ("d/b", b"1"), ("gone", b"1")], &[]));
    let upper = registry.blob(&layer(&[("d/b", b"2"), (".wh.gone", b"")], &["--gzip"]));
    let digest = registry.image(&[lower, upper]);
    let volume = Volume::new();
    let outcome = registry.fill(&volume, ":v1", json!({}));
    outcome.good();
    assert_eq!(volume.names(), ["a", "d"]);
    assert_eq!(volume.read("d/b"), b"2");
    let bytes = outcome.last["digest"].as_array().expect("numbers").iter();
    let hex: String = bytes
        .map(|byte| format!("{:02x}", byte.as_u64().expect("a byte")))
        .collect();
    assert_eq!(format!("sha256:{hex}"), digest);
    // The same by its digest, whatever the tag leads to then.
    registry.put("manifests/v1", b"other");
    registry
        .fill(&Volume::new(), &format!(":v1@{digest}"), json!({}))
        .good();
}

#[test]
fn what_has_another_digest_is_refused() {
    let registry = Registry::new("", None);
    let bytes = layer(&[("a", b"1")], &[]);
    let blob = registry.blob(&bytes);
    let digest = registry.image(std::slice::from_ref(&blob));
    registry.put(
        &format!("manifests/{digest}"),
        br#"{"schemaVersion": 2, "layers": []}"#,
    );
    let outcome = registry.fill(&Volume::new(), &format!("@{digest}"), json!({}));
    assert_eq!(outcome.failure("ChecksumMismatch").next, Next::Nothing);
    let path = format!("blobs/{}", blob["digest"].as_str().expect("text"));
    registry.put(&path, &layer(&[("a", b"2")], &[]));
    let outcome = registry.fill(&Volume::new(), ":v1", json!({}));
    assert_eq!(outcome.failure("ChecksumMismatch").next, Next::Nothing);
    registry.put(&path, &[bytes, vec![0; 512]].concat());
    let outcome = registry.fill(&Volume::new(), ":v1", json!({}));
    assert_eq!(outcome.failure("TooLarge").next, Next::Nothing);
}

#[test]
fn layers_at_other_urls_are_refused() {
    let registry = Registry::new("", None);
    let mut blob = registry.blob(&layer(&[("a", b"1")], &[]));
    blob["urls"] = json!(["http://169.254.169.254/"]);
    registry.image(&[blob]);
    let outcome = registry.fill(&Volume::new(), ":v1", json!({}));
    assert_eq!(outcome.failure("ImageRefused").next, Next::Nothing);
}

#[test]
fn one_file_of_an_image_becomes_a_disk() {
    let registry = Registry::new("", None);
    let content = noise(100_000);
    let old = registry.blob(&layer(&[("disk/vm.img", b"old"), ("other", b"1")], &[]));
    let new = registry.blob(&layer(&[("disk/vm.img", &content)], &["--gzip"]));
    let empty = registry.blob(&layer(&[("etc/x", b"1")], &[]));
    registry.image(&[old, new, empty]);
    for path in ["disk/vm.img", "/disk/vm.img", "disk"] {
        let volume = Volume::new();
        let outcome = registry.fill(&volume, ":v1", in_path(path));
        outcome.good();
        assert!(volume.read("disk.img") == content, "{path}");
        assert_eq!(outcome.last["received"], outcome.last["total"]);
    }
    let volume = Volume::new();
    let outcome = registry.fill(&volume, ":v1", in_path("missing"));
    assert_eq!(outcome.failure("ImageRefused").next, Next::Nothing);
    let image = registry.blob(&layer(&[("disk/a.qcow2", &qcow2(&content))], &[]));
    registry.image(&[image]);
    registry.fill(&volume, ":v1", in_path("disk")).good();
    assert!(volume.read("disk.img").starts_with(&content));
    assert_eq!(volume.names(), ["disk.img"]);
    let two = registry.blob(&layer(&[("disk/a", b"1"), ("disk/b", b"2")], &[]));
    registry.image(&[two]);
    registry
        .fill(&Volume::new(), ":v1", in_path("disk"))
        .failure("ImageRefused");
    let hidden = registry.blob(&layer(&[(".wh.disk", b"")], &[]));
    let lower = registry.blob(&layer(&[("disk/a", b"1")], &[]));
    registry.image(&[lower, hidden]);
    registry
        .fill(&Volume::new(), ":v1", in_path("disk/a"))
        .failure("ImageRefused");
}

#[test]
fn a_token_goes_to_the_registry_and_not_where_it_redirects_to() {
    let tls = Tls::new();
    let bytes = layer(&[("a", b"1")], &[]);
    let stored = bytes.clone();
    let store = Server::at("127.0.0.1", Some(&tls), move |_| {
        reply("200 OK", &[], &stored)
    });
    let registry = Registry::new("token-2", Some(store.origin()));
    let blob = registry.blob(&bytes);
    registry.image(&[blob]);
    let volume = Volume::new();
    let bundle = volume.folder.path().join("both");
    fs::write(
        &bundle,
        format!("{}{}", registry.tls.authority, tls.authority),
    )
    .expect("a file");
    let mut config = volume.config("", json!({}));
    config["source"] = json!({"oci": {"image": registry.name(":v1")}});
    config["network"] = json!({"caBundle": bundle});
    fill(&config).good();
    assert_eq!(volume.read("a"), b"1");
    assert_eq!(store.requests()[0].header("authorization"), None);
}

#[test]
fn the_keys_of_a_registry_are_sent_to_listed_origins_alone() {
    let registry = Registry::new("token-3", None);
    let blob = registry.blob(&layer(&[("a", b"1")], &[]));
    registry.image(&[blob]);
    let volume = Volume::new();
    let attempt = |origins: &[String]| {
        let mut secret = volume.secret(origins, &registry.tls.authority);
        let folder = std::path::PathBuf::from(secret["directory"].take().as_str().expect("a path"));
        let auths =
            json!({"auths": {registry.server.address.to_string(): {"auth": "aHVudGVyMg=="}}});
        fs::write(folder.join(".dockerconfigjson"), auths.to_string()).expect("a file");
        secret["directory"] = json!(folder);
        registry.fill(&volume, ":v1", json!({"secret": secret}))
    };
    let failure = attempt(&["https://other.example".into()]);
    failure.failure("SecretRefused");
    let sent = || {
        let requests = registry.server.requests().into_iter();
        let basic =
            requests.filter(|one| one.header("authorization") == Some("Basic aHVudGVyMg=="));
        basic
            .map(|one| one.path().starts_with("/token?"))
            .collect::<Vec<_>>()
    };
    assert!(sent().is_empty());
    attempt(&[registry.server.origin()]).good();
    assert_eq!(sent(), [true]);
}

/// A server of tokens that the registry names counts as a redirect.
#[test]
fn a_public_registry_names_no_server_of_tokens_with_a_private_address() {
    let tls = Tls::new();
    let inside = Server::at("127.0.0.1", Some(&tls), |_| {
        reply("200 OK", &[], br#"{"token": "t"}"#)
    });
    let realm = inside.url("/token");
    let registry = Server::at("127.0.0.2", Some(&tls), move |_| {
        let header = format!("WWW-Authenticate: Bearer realm=\"{realm}\",service=\"s\"");
        reply("401 Unauthorized", &[&header], b"")
    });
    let plain = serves(b"{}".to_vec());
    let realm = plain.url("/token");
    let other = Server::at("127.0.0.1", Some(&tls), move |_| {
        let header = format!("WWW-Authenticate: Bearer realm=\"{realm}\",service=\"s\"");
        reply("401 Unauthorized", &[&header], b"")
    });
    for (registry, reason) in [(registry, "AddressRefused"), (other, "RedirectRefused")] {
        let volume = Volume::new();
        let mut config = volume.config("", json!({}));
        config["source"] = json!({"oci": {"image": format!("{}/team/app:v1", registry.address)}});
        config["network"] = json!({"certificates": tls.authority});
        assert_eq!(fill(&config).failure(reason).next, Next::Nothing);
    }
    assert!(inside.requests().is_empty() && plain.requests().is_empty());
}
