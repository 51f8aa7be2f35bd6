//! What the driver and its guard are linked with, of what parses the data of others.

#![allow(clippy::disallowed_methods, reason = "a test starts programs")]

use std::collections::BTreeSet;
use std::process::Command;

/// Crates, each with its features, that are linked into programs of the workspace.
fn linked(members: &[&str]) -> BTreeSet<String> {
    let packages = members.iter().flat_map(|member| ["--package", member]);
    let output = Command::new(env!("CARGO"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["tree", "--locked", "--offline", "--edges", "normal"])
        .args(["--prefix", "none", "--no-dedupe", "--format", "{p} {f}"])
        .args(packages)
        .output()
        .expect("cargo starts");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("text");
    text.lines().map(str::to_string).collect()
}

fn names(linked: &BTreeSet<String>) -> BTreeSet<&str> {
    linked
        .iter()
        .filter_map(|line| line.split(' ').next())
        .collect()
}

/// Archives, compression, disk images, URLs, and clients of HTTP. hyper is there for gRPC, for the
/// metrics, and beneath kube, whose requests go to the API server alone.
const ONLY_OF_POPULATE: [&str; 16] = [
    "flate2",
    "idna",
    "imago",
    "landlock",
    "lzma-rust2",
    "miniz_oxide",
    "object_store",
    "oci-client",
    "quick-xml",
    "reqwest",
    "ruzstd",
    "tar",
    "ureq",
    "url",
    "zlib-rs",
    "zstd",
];

#[test]
fn driver_and_guard_link_nothing_that_reads_foreign_data() {
    let driver = linked(&["slackwater"]);
    let guard = linked(&["slackwater-guard"]);
    let populate = linked(&["slackwater-populate"]);
    for (program, linked) in [("slackwater", &driver), ("slackwater-guard", &guard)] {
        let names = names(linked);
        let found: Vec<_> = ONLY_OF_POPULATE
            .iter()
            .filter(|name| names.contains(**name))
            .collect();
        assert!(found.is_empty(), "{program} is linked with {found:?}");
        assert!(!names.contains("slackwater-populate"));
    }
    let guard = names(&guard);
    for name in ["hyper", "tokio", "rustls"] {
        assert!(
            names(&driver).contains(name),
            "the list is that of the driver"
        );
        assert!(!guard.contains(name), "the guard is linked with {name}");
    }
    for name in ["tar", "flate2", "ruzstd", "lzma-rust2", "url"] {
        assert!(
            names(&populate).contains(name),
            "{name} is found where it is"
        );
    }
    let own = names(&populate);
    let members = own.iter().filter(|name| name.starts_with("slackwater"));
    assert_eq!(members.count(), 1, "it is linked with no other member");
}

/// Tests build all members at once, and a release builds the driver alone: both have the same driver
/// only if the other member adds no feature to its dependencies.
#[test]
fn the_driver_is_the_same_beside_the_program_that_fills_volumes() {
    let alone = linked(&["slackwater", "slackwater-core", "slackwater-guard"]);
    let together = linked(&[
        "slackwater",
        "slackwater-core",
        "slackwater-guard",
        "slackwater-populate",
    ]);
    let changed: Vec<_> = alone.difference(&together).collect();
    assert!(changed.is_empty(), "other features: {changed:#?}");
}
