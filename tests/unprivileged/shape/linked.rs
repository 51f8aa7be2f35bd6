//! What the driver and its guard are linked with, of what parses the data of others.

#![allow(clippy::disallowed_methods, reason = "a test starts programs")]

use std::collections::BTreeSet;
use std::process::Command;

/// Crates, each with its features, that are linked into programs of the workspace.
fn linked(members: &[&str]) -> BTreeSet<String> {
    linked_for(members, &[])
}

/// The same with more options of `cargo tree`.
fn linked_for(members: &[&str], options: &[&str]) -> BTreeSet<String> {
    let packages = members.iter().flat_map(|member| ["--package", member]);
    let output = Command::new(env!("CARGO"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["tree", "--locked", "--offline", "--edges", "normal"])
        .args(["--prefix", "none", "--no-dedupe", "--format", "{p} {f}"])
        .args(packages)
        .args(options)
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
    for name in ["hyper", "tokio", "rustls", "tonic", "kube"] {
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

/// The library above is that of the member `slackwater-guard`. The program is of the package `slackwater`, whose
/// dependencies include all of the driver's, so its source must not name them.
#[test]
fn the_program_of_the_guard_names_only_the_library_of_the_guard() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/bin/slackwater-guard.rs");
    let text = std::fs::read_to_string(path).expect("it is read");
    assert_eq!(
        crates_of(&text),
        BTreeSet::from(["slackwater_guard", "std"])
    );
    let planted = "use slackwater::cli; fn main() { ::tokio::x(); kube::y(); Vec::<u8>::new(); }";
    let found = BTreeSet::from(["kube", "slackwater", "tokio"]);
    assert_eq!(crates_of(planted), found);
}

/// The crates that paths begin with. Paths of types begin with a capital.
fn crates_of(text: &str) -> BTreeSet<&str> {
    let code = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    let words =
        code.flat_map(|line| line.split(|c: char| !(c.is_alphanumeric() || "_:".contains(c))));
    let paths = words.map(|word| word.trim_start_matches(':'));
    let first = paths.filter_map(|path| path.split_once("::").map(|(first, _)| first));
    first
        .filter(|first| first.starts_with(|c: char| c.is_lowercase()))
        .collect()
}

/// Its image has the program, its libraries and certificates: nothing that mounts, formats or starts programs.
#[test]
fn the_image_of_populate_begins_with_nothing() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/Dockerfile");
    let text = std::fs::read_to_string(path).expect("it is read");
    let stages: Vec<_> = text.split("\nFROM ").skip(1).collect();
    let get = |name: &str| {
        let its = |stage: &&&str| {
            let first = stage.lines().next().unwrap_or_default();
            first.ends_with(&format!(" AS {name}"))
        };
        let stage = stages.iter().find(its).expect("a stage");
        let lines = stage.lines().map(str::trim);
        let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
        lines.collect::<Vec<_>>()
    };
    for (name, files) in [
        ("populate", "populate-files"),
        ("populate-prebuilt", "populate-prebuilt-files"),
    ] {
        let expected = [
            format!("scratch AS {name}"),
            format!("COPY --from={files} /files /"),
            "USER 65532:65532".into(),
            "ENTRYPOINT [\"/usr/local/bin/slackwater-populate\"]".into(),
        ];
        assert_eq!(get(name), expected);
    }
    // What is copied there is named by its path; of programs, only one.
    let copied = get("populate-base").join("\n");
    for word in [
        "/bin/mount",
        "/sbin/",
        "mkfs",
        "--recursive",
        "cp -r",
        "cp -a",
    ] {
        let is_login = word == "/sbin/" && copied.matches(word).count() == 1;
        assert!(!copied.contains(word) || is_login, "{word}: {copied}");
    }
}

/// Tests build all members at once, and a release builds the driver alone: both have the same driver
/// only if the other members add no feature to its dependencies.
#[test]
fn the_driver_is_the_same_beside_the_programs_that_are_no_part_of_it() {
    let alone = linked(&["slackwater", "slackwater-core", "slackwater-guard"]);
    let together = linked(&[
        "slackwater",
        "slackwater-core",
        "slackwater-guard",
        "slackwater-populate",
        "kubectl-slackwater",
    ]);
    let changed: Vec<_> = alone.difference(&together).collect();
    assert!(changed.is_empty(), "other features: {changed:#?}");
}

/// People run the plugin on machines without the kernel's calls of the driver.
#[test]
fn the_plugin_is_linked_with_nothing_of_the_driver_on_any_system() {
    let targets = [
        "x86_64-unknown-linux-gnu",
        "aarch64-unknown-linux-gnu",
        "x86_64-pc-windows-gnu",
        "x86_64-apple-darwin",
        "aarch64-apple-darwin",
    ];
    for target in targets {
        let plugin = linked_for(&["kubectl-slackwater"], &["--target", target]);
        let plugin = names(&plugin);
        for name in ["nix", "tonic", "prost", "openssl-sys", "reqwest"] {
            assert!(!plugin.contains(name), "{target}: linked with {name}");
        }
        let own = plugin.iter().filter(|name| name.contains("slackwater"));
        assert_eq!(own.count(), 1, "{target}: it is linked with another member");
        assert!(
            plugin.contains("kube"),
            "{target}: the list is that of the plugin"
        );
    }
    let driver = linked_for(&["slackwater"], &["--target", targets[0]]);
    assert!(names(&driver).contains("nix"), "nix is found where it is");
}
