//! A real API server accepts the objects that the chart renders and those on the page about
//! installation, and knows all their fields.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::kube::plane::Plane;

/// API groups of other projects, whose CRDs are not installed here.
const FOREIGN: [&str; 4] = [
    "cert-manager.io",
    "monitoring.coreos.com",
    "cbt.storage.k8s.io",
    "security.openshift.io",
];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The objects in a YAML text.
fn objects(text: &str) -> Vec<&str> {
    let each = text.split("\n---\n");
    each.filter(|one| one.lines().any(|line| line.starts_with("apiVersion: ")))
        .collect()
}

fn is_foreign(object: &str) -> bool {
    let api = |group: &&str| object.contains(&format!("apiVersion: {group}/"));
    FOREIGN.iter().any(api)
}

fn rendered(helm: &Path, words: &[&str]) -> String {
    let output = Command::new(helm)
        .args(["template", "slackwater"])
        .arg(root().join("deploy/chart"))
        .args(["--namespace=slackwater", "--include-crds"])
        .arg("--api-versions=snapshot.storage.k8s.io/v1")
        .arg("--api-versions=groupsnapshot.storage.k8s.io/v1beta2")
        .args(words)
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{words:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

/// The indented blocks of a page that are objects.
fn shown(page: &str) -> Vec<String> {
    let mut blocks = vec![String::new()];
    for line in page.lines() {
        let block = blocks.last_mut().expect("one");
        match line.strip_prefix("    ") {
            Some(rest) => *block += &format!("{rest}\n"),
            None if line.is_empty() && !block.is_empty() => block.push('\n'),
            None if block.is_empty() => {}
            None => blocks.push(String::new()),
        }
    }
    blocks.retain(|block| block.starts_with("apiVersion: "));
    blocks
}

fn check(plane: &Plane, what: &str, objects: &[&str]) {
    let file = plane.path("checked");
    std::fs::write(&file, objects.join("\n---\n")).unwrap();
    let file = file.to_str().unwrap();
    let words = [
        "apply",
        "--server-side",
        "--dry-run=server",
        "--validate=strict",
        "-f",
        file,
    ];
    let done = plane.try_kubectl(&words);
    let done = done.unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(done.lines().count(), objects.len(), "{what}: {done}");
}

#[test]
fn a_real_api_server_accepts_the_objects_of_the_chart_and_of_the_page() {
    let Some(plane) = Plane::start("the chart on a real API server") else {
        return;
    };
    let cache = plane.program().parent().unwrap().parent().unwrap();
    let crds = cache.join("manifests/crd");
    plane.kubectl(&["apply", "--server-side", "-f", crds.to_str().unwrap()]);
    plane.kubectl(&[
        "wait",
        "--for=condition=Established",
        "--timeout=60s",
        "crd",
        "--all",
    ]);
    plane.kubectl(&["create", "namespace", "slackwater"]);
    for namespace in ["shop", "bank"] {
        plane.kubectl(&["create", "namespace", namespace]);
    }
    let cases: [(&str, &[&str]); 5] = [
        ("defaults", &[]),
        ("single node", &["--set=singleNode=true"]),
        (
            "cert-manager",
            &[
                "--set=certificates.mode=cert-manager",
                "--set=certificates.nodes={a,b}",
            ],
        ),
        (
            "data sources",
            &[
                "--set=populators.create=true,populators.namespaces={shop,bank}",
                "--set=populators.image.digest=sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
            ],
        ),
        (
            "everything",
            &[
                "--set=hooks.namespaces={shop,bank}",
                "--set=pools[0].name=fast,pools[0].path=/disks/fast",
                "--set=certificates.mode=existing",
                "--set=snapshotMetadata.create=true",
                "--set=snapshotMetadata.caCert=BEGIN CERTIFICATE",
                "--set=node.maxUnavailable=10%",
                "--set=node.resources.limits.memory=1Gi",
                "--set=imagePullSecrets[0].name=a",
                "--set=storageClass.mountOptions={noatime}",
            ],
        ),
    ];
    for (name, words) in cases {
        let text = rendered(&cache.join("bin/helm"), words);
        let ours = objects(&text).into_iter().filter(|one| !is_foreign(one));
        let ours: Vec<_> = ours.collect();
        assert!(ours.len() > 10, "{name}: {}", ours.len());
        check(&plane, name, &ours);
    }
    let page = std::fs::read_to_string(root().join("docs/install.md")).unwrap();
    let blocks = shown(&page);
    assert!(blocks.len() >= 2, "{blocks:?}");
    for block in &blocks {
        check(&plane, "docs/install.md", &objects(block));
    }
}
