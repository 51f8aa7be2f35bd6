//! The rules of the CRDs: what is contradictory or would be refused later is refused when it is written.

use serde_json::{Value, json};

use crate::kube::plane::Plane;

fn sha() -> String {
    "0a".repeat(32)
}

fn valid(kind: &str) -> Value {
    match kind {
        "HttpSource" => json!({"url": "https://images.example/base.img?x=1", "sha256": sha(),
            "format": "raw", "fileName": "base.img", "secretRef": {"name": "token"},
            "owner": {"uid": 1000, "gid": 1000}}),
        "OciSource" => json!({"image": "registry.example:5000/team/base:1.2",
            "path": "disk", "platform": {"os": "linux", "architecture": "arm64"}}),
        _ => {
            json!({"endpoint": "https://s3.example", "bucket": "data", "key": "a/b", "region": "x",
            "sha256": sha()})
        }
    }
}

/// A field is set, or removed with null.
type Change = (&'static str, Value);
/// A kind, changes of a valid source, and a part of the refusal; nothing if it is accepted.
type Case = (&'static str, Vec<Change>, &'static str);

fn cases() -> Vec<Case> {
    let (http, oci, s3) = ("HttpSource", "OciSource", "S3Source");
    let none = || Value::Null;
    vec![
        (http, vec![], ""),
        (
            http,
            vec![("sha256", none()), ("unverified", json!(true))],
            "",
        ),
        (http, vec![("unverified", json!(false))], ""),
        (
            http,
            vec![("owner", none()), ("preserveOwners", json!(true))],
            "",
        ),
        (
            http,
            vec![("unverified", json!(true))],
            "either sha256 or unverified",
        ),
        (
            http,
            vec![("sha256", none())],
            "either sha256 or unverified",
        ),
        (http, vec![("sha256", json!("12"))], "spec.sha256"),
        (http, vec![("url", none())], "spec.url: Required"),
        (http, vec![("url", json!("ftp://a.example/b"))], "spec.url"),
        (
            http,
            vec![("url", json!("https://user:word@a.example/b"))],
            "spec.url",
        ),
        (
            http,
            vec![("url", json!("https://a.example/b#c"))],
            "spec.url",
        ),
        (http, vec![("format", json!("iso"))], "spec.format"),
        (http, vec![("format", json!("tar"))], "not for an archive"),
        (http, vec![("fileName", json!("../x"))], "spec.fileName"),
        (http, vec![("fileName", json!(".x"))], "spec.fileName"),
        (
            http,
            vec![("preserveOwners", json!(true))],
            "exclude each other",
        ),
        (
            http,
            vec![("owner", json!({"uid": 0, "gid": 1}))],
            "spec.owner.uid",
        ),
        (
            http,
            vec![("owner", json!({"uid": 1}))],
            "spec.owner.gid: Required",
        ),
        (
            http,
            vec![("secretRef", json!({"name": "../x"}))],
            "spec.secretRef.name",
        ),
        (http, vec![("cache", json!("node"))], ""),
        (http, vec![("cache", json!("cluster"))], "spec.cache"),
        (
            http,
            vec![
                ("cache", json!("node")),
                ("sha256", none()),
                ("unverified", json!(true)),
            ],
            "cache needs sha256",
        ),
        (oci, vec![], ""),
        (
            oci,
            vec![("cache", json!("node"))],
            "cache needs an image by digest",
        ),
        (
            oci,
            vec![
                ("cache", json!("node")),
                (
                    "image",
                    json!(format!("registry.example/base:1@sha256:{}", sha())),
                ),
            ],
            "",
        ),
        (
            oci,
            vec![(
                "image",
                json!(format!("registry.example/base@sha256:{}", sha())),
            )],
            "",
        ),
        (
            oci,
            vec![(
                "image",
                json!(format!("registry.example/base:1@sha256:{}", sha())),
            )],
            "",
        ),
        (oci, vec![("path", none())], ""),
        (
            oci,
            vec![("image", json!("registry.example/base"))],
            "spec.image",
        ),
        (oci, vec![("image", json!("base:1"))], "spec.image"),
        (
            oci,
            vec![("image", json!("registry.example/base@sha256:12"))],
            "spec.image",
        ),
        (
            oci,
            vec![("path", none()), ("format", json!("raw"))],
            "they need path",
        ),
        (
            oci,
            vec![("path", none()), ("fileName", json!("a.img"))],
            "they need path",
        ),
        (oci, vec![("format", json!("tar"))], "spec.format"),
        (
            oci,
            vec![("platform", json!({"architecture": "arm64"}))],
            "spec.platform.os: Required",
        ),
        (
            oci,
            vec![("preserveOwners", json!(true))],
            "tree of an image",
        ),
        (s3, vec![("cache", json!("node"))], ""),
        (
            s3,
            vec![
                ("cache", json!("node")),
                ("sha256", none()),
                ("unverified", json!(true)),
            ],
            "cache needs sha256",
        ),
        (s3, vec![], ""),
        (
            s3,
            vec![
                ("key", none()),
                ("sha256", none()),
                ("unverified", json!(true)),
                ("prefix", json!("a/")),
            ],
            "",
        ),
        (s3, vec![("prefix", json!("a/"))], "either key or prefix"),
        (s3, vec![("key", none())], "either key or prefix"),
        (
            s3,
            vec![("key", none()), ("prefix", json!("a/"))],
            "prefix needs unverified",
        ),
        (
            s3,
            vec![
                ("key", none()),
                ("prefix", json!("a/")),
                ("sha256", none()),
                ("unverified", json!(true)),
                ("format", json!("raw")),
            ],
            "they need key",
        ),
        (
            s3,
            vec![("endpoint", json!("http://s3.example"))],
            "spec.endpoint",
        ),
        (s3, vec![("endpoint", none())], "spec.endpoint: Required"),
        (s3, vec![("bucket", none())], "spec.bucket: Required"),
        (s3, vec![("bucket", json!("a/b"))], "spec.bucket"),
        (s3, vec![("sha256", none())], "either sha256 or unverified"),
        (
            s3,
            vec![("format", json!("tar")), ("fileName", json!("a"))],
            "not for an archive",
        ),
    ]
}

pub fn are_enforced(plane: &Plane) {
    for (number, (kind, changes, refusal)) in cases().into_iter().enumerate() {
        let mut spec = valid(kind);
        let fields = spec.as_object_mut().unwrap();
        for (field, value) in &changes {
            match value.is_null() {
                true => drop(fields.remove(*field)),
                false => drop(fields.insert((*field).to_string(), value.clone())),
            }
        }
        let object = json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": kind,
            "metadata": {"name": format!("case-{number}"), "namespace": "default"}, "spec": spec});
        let file = plane.path("source");
        std::fs::write(&file, object.to_string()).unwrap();
        let words = [
            "create",
            "--dry-run=server",
            "--validate=strict",
            "-f",
            file.to_str().unwrap(),
        ];
        match (plane.try_kubectl(&words), refusal) {
            (Ok(_), "") => {}
            (Err(error), refusal) if !refusal.is_empty() => {
                assert!(error.contains(refusal), "{kind} {changes:?}: {error}");
            }
            (done, _) => panic!("{kind} {changes:?}: {done:?}"),
        }
    }
}
