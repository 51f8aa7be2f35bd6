//! The pod of each kind of source, and how pods end.

use super::*;
use crate::record::formats::check_with;
use crate::router::kube::populators::source::{Platform, SecretRef};

fn claim(mode: &str) -> PersistentVolumeClaim {
    serde_json::from_value(json!({
        "metadata": {"namespace": "shop", "name": "data", "uid": "c-1"},
        "spec": {"volumeMode": mode, "accessModes": ["ReadWriteOnce"]},
    }))
    .unwrap()
}

fn settings() -> Settings {
    Settings {
        refused: vec!["10.0.0.1".into()],
        proxy: Some("http://proxy.example:3128".into()),
        ..Settings::new("csi.slackwater.dev", "registry.example/populate@sha256:00")
    }
}

fn attempt(kind: Kind, spec: SourceSpec) -> Attempt {
    let source = Source {
        spec,
        ..Source::default()
    };
    Attempt {
        kind,
        source,
        origins: Vec::new(),
        resume: None,
        digest: None,
    }
}

fn words(text: &str) -> Option<String> {
    Some(text.into())
}

fn http() -> SourceSpec {
    SourceSpec {
        url: words("https://images.example/base.img"),
        sha256: Some("0a".repeat(32)),
        ..SourceSpec::default()
    }
}

/// The configuration in the pod of an attempt.
fn configured(mode: &str, attempt: &Attempt) -> Value {
    configured_with(&settings(), mode, attempt)
}

fn configured_with(settings: &Settings, mode: &str, attempt: &Attempt) -> Value {
    let pod = pod(&claim(mode), attempt, settings).unwrap();
    let env = pod.spec.unwrap().containers[0].env.clone().unwrap();
    serde_json::from_str(env[0].value.as_deref().unwrap()).unwrap()
}

/// The program reads the same files (`populate/src/config.rs`).
#[test]
fn each_kind_of_source_becomes_a_configuration() {
    let mut of_http = attempt(
        Kind::Http,
        SourceSpec {
            secret_ref: Some(SecretRef {
                name: "token".into(),
            }),
            format: words("raw"),
            ..http()
        },
    );
    of_http.origins = vec!["https://images.example".into()];
    of_http.resume = Some(Point {
        bytes: 5,
        validator: "\"e\"".into(),
    });
    let oci = SourceSpec {
        image: words("registry.example/base:1"),
        path: words("disk"),
        platform: Some(Platform {
            os: "linux".into(),
            architecture: "arm64".into(),
        }),
        file_name: words("base.img"),
        preserve_owners: true,
        ..SourceSpec::default()
    };
    let mut of_oci = attempt(Kind::Oci, oci);
    of_oci.digest = Some(format!("sha256:{}", "11".repeat(32)));
    let s3 = SourceSpec {
        endpoint: words("https://s3.example"),
        bucket: words("data"),
        prefix: words("set/"),
        unverified: true,
        ..SourceSpec::default()
    };
    let s3 = configured("Filesystem", &attempt(Kind::S3, s3));
    let key = SourceSpec {
        endpoint: words("https://s3.example"),
        region: words("here"),
        bucket: words("data"),
        key: words("a/b"),
        sha256: Some("0a".repeat(32)),
        ..SourceSpec::default()
    };
    let trusting = Settings {
        certificates: words("-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"),
        ..settings()
    };
    let certificates = configured_with(&trusting, "Block", &attempt(Kind::Http, http()));
    let expected = vec![
        ("certificates.json", certificates),
        ("http.json", configured("Block", &of_http)),
        ("oci.json", configured("Filesystem", &of_oci)),
        ("s3-key.json", configured("Block", &attempt(Kind::S3, key))),
        ("s3-prefix.json", s3),
    ];
    let read = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
    let write = |config: &Value| serde_json::to_vec_pretty(config).unwrap();
    check_with("populate-config", expected, read, write);
}

/// An image that is named by a digest keeps it.
#[test]
fn a_digest_in_the_name_of_an_image_decides() {
    let image = words("registry.example/base@sha256:22");
    let spec = SourceSpec {
        image: image.clone(),
        ..SourceSpec::default()
    };
    let mut of_oci = attempt(Kind::Oci, spec);
    of_oci.digest = words("sha256:11");
    let config = configured("Filesystem", &of_oci);
    assert_eq!(config["source"]["oci"]["image"].as_str(), image.as_deref());
}

#[test]
fn the_pod_is_root_only_where_that_was_decided() {
    let user = |mode: &str, spec: SourceSpec, root_for_block: bool| {
        let settings = Settings {
            root_for_block,
            ..settings()
        };
        let pod = pod(&claim(mode), &attempt(Kind::Http, spec), &settings).unwrap();
        let spec = pod.spec.unwrap();
        let of_pod = spec.security_context.unwrap();
        let of_container = spec.containers[0].security_context.clone().unwrap();
        let added = of_container.capabilities.unwrap().add.unwrap_or_default();
        let ids = (of_pod.run_as_user, of_pod.run_as_group, of_pod.fs_group);
        (ids, of_pod.run_as_non_root, added.len())
    };
    let owned = SourceSpec {
        owner: Some(Owner { uid: 7, gid: 8 }),
        ..http()
    };
    let kept = SourceSpec {
        preserve_owners: true,
        ..http()
    };
    let plain = (Some(65532), Some(65532), Some(65532));
    assert_eq!(user("Filesystem", http(), true), (plain, Some(true), 0));
    let its = (Some(7), Some(8), Some(8));
    assert_eq!(
        user("Filesystem", owned.clone(), true),
        (its, Some(true), 0)
    );
    assert_eq!(user("Block", owned, false), (its, Some(true), 0));
    let root = (Some(0), Some(0), Some(0));
    assert_eq!(user("Block", http(), true), (root, Some(false), 0));
    assert_eq!(user("Filesystem", kept, false), (root, Some(false), 4));
}

#[test]
fn what_cannot_be_filled_is_refused_before_anything_is_created() {
    let tar = SourceSpec {
        format: words("tar"),
        ..http()
    };
    assert!(check(Kind::Http, &tar, &claim("Filesystem")).is_ok());
    let why = check(Kind::Http, &tar, &claim("Block")).unwrap_err();
    assert!(why.contains("raw or qcow2"), "{why}");
    let image = SourceSpec::default();
    assert!(check(Kind::Oci, &image, &claim("Block")).is_err());
    let disk = SourceSpec {
        path: words("disk"),
        ..image
    };
    assert!(check(Kind::Oci, &disk, &claim("Block")).is_ok());
    let many = SourceSpec {
        prefix: words("set/"),
        ..SourceSpec::default()
    };
    assert!(check(Kind::S3, &many, &claim("Block")).is_err());
    let mut read_only = claim("Filesystem");
    read_only.spec.as_mut().unwrap().access_modes = Some(vec!["ReadOnlyMany".into()]);
    assert!(check(Kind::Http, &http(), &read_only).is_err());
}

fn ended(status: Value) -> Ending {
    let pod = json!({"metadata": {}, "status": status});
    ending(&serde_json::from_value(pod).unwrap())
}

#[test]
fn the_end_of_a_pod_has_an_exit_code_only_if_its_node_has_reported_one() {
    let said = |text: &str| {
        ended(
            json!({"phase": "Failed", "containerStatuses": [{"name": "populate", "image": "",
            "imageID": "", "ready": false, "restartCount": 0,
            "state": {"terminated": {"exitCode": 10, "message": text}}}]}),
        )
    };
    let ending = said(r#"{"reason": "ChecksumMismatch", "message": "a\nb"}"#);
    assert_eq!(ending.exit_code, Some(10));
    assert_eq!(ending.message, "ChecksumMismatch: ab");
    assert_eq!(
        said("free text").message,
        "the program was ended (exit code 10)"
    );
    let long = json!({"reason": "X", "message": "y".repeat(5000)}).to_string();
    assert!(said(&long).message.len() < 600);
    let evicted = ended(json!({"phase": "Failed", "reason": "Evicted"}));
    assert_eq!(
        (evicted.exit_code, evicted.message.as_str()),
        (None, "Evicted")
    );
}

#[test]
fn a_refusal_by_pod_security_says_which_profile_is_needed() {
    let kept = SourceSpec {
        preserve_owners: true,
        ..http()
    };
    let of = |spec| {
        pod(
            &claim("Filesystem"),
            &attempt(Kind::Http, spec),
            &settings(),
        )
        .unwrap()
    };
    let by = "pods \"prime-c-1\" is forbidden: violates PodSecurity \"restricted:latest\": x";
    let advice = "need a namespace that allows the baseline profile";
    assert!(refusal(by, &of(kept.clone())).contains(advice));
    assert_eq!(refusal(by, &of(http())), by, "it needs no more than others");
    assert_eq!(refusal("exceeded quota", &of(kept)), "exceeded quota");
}
