//! What RELEASE.md, the chart and the scripts say about a release agrees.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use super::{code, entries, files, read, root, test_names};

/// The value of a key at the beginning of a line, without quotes.
fn value<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    Some(line.trim().trim_matches('"'))
}

#[test]
fn the_versions_of_programs_chart_and_image_agree() {
    let version = env!("CARGO_PKG_VERSION");
    let chart = read(&root().join("deploy/chart/Chart.yaml"));
    assert_eq!(value(&chart, "version:"), Some(version));
    assert_eq!(value(&chart, "appVersion:"), Some(version));
    // The scripts that tag the image and name the release take the first version of the manifest.
    let manifest = read(&root().join("Cargo.toml"));
    assert_eq!(value(&manifest, "version ="), Some(version));
    for script in ["deploy/image/build", "deploy/release/build"] {
        let text = read(&root().join(script));
        let takes_it =
            text.contains(r#"version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)"#);
        assert!(takes_it, "{script} takes the version from elsewhere");
    }
    // The chart's image is the one that `make image` makes, unless values say otherwise.
    let values = read(&root().join("deploy/chart/values.yaml"));
    let (_, image) = values
        .split_once("\nimage:\n")
        .expect("values of the image");
    assert_eq!(value(image, "  repository:"), Some("slackwater"));
    assert_eq!(value(image, "  tag:"), Some(""));
    let helpers = read(&root().join("deploy/chart/templates/_helpers.tpl"));
    assert!(helpers.contains("(.Values.image.tag | default .Chart.AppVersion)"));
    // So is that of the program that fills volumes, whose digest only its registry decides.
    assert!(values.contains("\n  image: {repository: slackwater-populate, digest: \"\"}\n"));
    let script = read(&root().join("deploy/image/build"));
    assert!(script.contains("name=slackwater-populate:$version"));
    for (page, name) in [
        ("install", "/slackwater:"),
        ("populate", "/slackwater-populate:"),
    ] {
        let text = read(&root().join(format!("docs/{page}.md")));
        let mut tags = text.split(name).skip(1).peekable();
        assert!(tags.peek().is_some(), "docs/{page}.md names no image");
        for tag in tags {
            assert!(
                tag.starts_with(version),
                "docs/{page}.md names another image"
            );
        }
    }
}

#[test]
fn the_page_of_releases_names_every_file_of_one() {
    let output = Command::new(root().join("deploy/release/build"))
        .arg("--list")
        .output()
        .expect("the script starts");
    let list = String::from_utf8(output.stdout).expect("text");
    let page = read(&root().join("RELEASE.md"));
    let named: Vec<_> = code(&page).collect();
    assert!(list.lines().count() >= 14, "{list}");
    let images: Vec<_> = list.lines().filter(|file| file.ends_with(".tar")).collect();
    assert_eq!(images.len(), 2, "{list}");
    for image in images {
        let materials = image.replace(".tar", ".cdx.json");
        assert!(list.lines().any(|file| file == materials), "{materials}");
    }
    for file in list.lines() {
        assert!(named.contains(&file), "RELEASE.md does not name {file}");
    }
}

#[test]
fn the_metadata_of_the_chart_lists_its_crds() {
    let chart = read(&root().join("deploy/chart/Chart.yaml"));
    let (_, listed) = chart
        .split_once("artifacthub.io/crds: |\n")
        .expect("a list");
    let crds = files(&root().join("deploy/chart/crds"), ".yaml");
    assert_eq!(listed.matches("- kind: ").count(), crds.len());
    for crd in crds {
        let text = read(&crd);
        let name = value(&text, "  name:").expect("a name");
        let kind = value(&text, "    kind:").expect("a kind");
        let version = value(&text, "    - name:").expect("a version");
        let entry = format!("    - kind: {kind}\n      version: {version}\n      name: {name}\n");
        assert!(listed.contains(&entry), "Chart.yaml lacks\n{entry}");
    }
}

fn git(folder: &Path, words: &[&str]) -> Output {
    let identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"];
    let output = Command::new("git")
        .current_dir(folder)
        .args(identity)
        .args(words)
        .output()
        .expect("git starts");
    assert!(output.status.success(), "git {words:?}: {output:?}");
    output
}

#[test]
fn a_release_is_refused_with_changes_and_with_the_tag_of_another_version() {
    let checkout = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
    let script = checkout.path().join("deploy/release/build");
    fs::create_dir_all(script.parent().expect("a folder")).expect("a folder");
    fs::copy(root().join("deploy/release/build"), &script).expect("a script");
    fs::copy(
        root().join("Cargo.toml"),
        checkout.path().join("Cargo.toml"),
    )
    .expect("a manifest");
    let refusal = || {
        // By its interpreter: a file that this process has just written may be "busy" for as long as
        // another thread is starting a process.
        let output = Command::new("bash")
            .arg(&script)
            .output()
            .expect("the script starts");
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        String::from_utf8(output.stderr).expect("text")
    };
    git(checkout.path(), &["init", "--quiet"]);
    assert!(refusal().contains("a release is built from a commit"));
    git(checkout.path(), &["add", "."]);
    git(checkout.path(), &["commit", "--quiet", "--message=all"]);
    let change = checkout.path().join("change");
    fs::write(&change, "").expect("a file");
    let said = refusal();
    assert!(
        said.contains("changes that are not committed") && said.contains("?? change"),
        "{said}"
    );
    fs::remove_file(&change).expect("it is removed");
    git(checkout.path(), &["tag", "v99.0.0"]);
    assert!(refusal().contains("the commit has the tag v99.0.0, but Cargo.toml has the version"));
    assert!(
        !checkout.path().join("target").exists(),
        "nothing was built"
    );
}

/// The workflows of hosted CI run targets of the Makefile, with few rights and actions of exact versions,
/// and say what of them has not been run.
#[test]
fn workflows_run_targets_of_the_makefile() {
    let makefile = read(&root().join("Makefile"));
    let workflows = files(&root().join(".github/workflows"), ".yml");
    assert_eq!(workflows.len(), 3);
    for path in workflows {
        let (text, path) = (read(&path), path.display());
        assert!(
            text.starts_with("# No part of this file has been run"),
            "{path}"
        );
        assert!(text.contains("\npermissions: {"), "{path}");
        let after = |key| text.lines().filter_map(move |line| line.split_once(key));
        let mut count = 0;
        for target in after("- run: make ").filter_map(|(_, words)| words.split(' ').next()) {
            assert!(
                makefile.contains(&format!("\n{target}:")),
                "{path}: no target {target}"
            );
            count += 1;
        }
        assert!(count > 0, "{path} runs no target");
        for (_, action) in after("uses: ") {
            let (_, version) = action.split_once("@v").expect("a version");
            assert_eq!(version.split('.').count(), 3, "{path}: {action}");
        }
    }
}

#[test]
fn the_page_of_releases_names_every_format_and_tests_that_exist() {
    let page = read(&root().join("RELEASE.md"));
    let named: BTreeSet<_> = code(&page).collect();
    for kind in entries("tests/formats") {
        let path = format!("tests/formats/{kind}");
        let is_named = named.contains(&*kind) || named.contains(&*path);
        assert!(is_named, "RELEASE.md does not name {path}");
    }
    for path in named.iter().filter(|word| word.starts_with("tests/")) {
        assert!(root().join(path).exists(), "RELEASE.md names {path}");
    }
    let is_test = |word: &&&str| word.matches('_').count() >= 3 && !word.contains('…');
    let (tests, mut count) = (test_names(), 0);
    for name in named.iter().filter(is_test) {
        assert!(tests.contains(*name), "no test is named {name}");
        count += 1;
    }
    assert!(count > 10, "the names are found");
}

/// Texts of the sources that are a name: what stands between two quotation marks.
fn names(folder: &str, is_name: impl Fn(&str) -> bool) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for path in files(&root().join(folder), ".rs") {
        let place = path.to_string_lossy();
        if place.ends_with("/tests.rs") || place.contains("/tests/") {
            continue;
        }
        let text = read(&path);
        let tests = "#[cfg(test)]\nmod tests {";
        let text = text.split(tests).next().unwrap_or_default();
        let texts = text.split('"').filter(|text| is_name(text));
        found.extend(texts.map(str::to_string));
    }
    found
}

/// Rules, scripts and people look for reasons of events, types and reasons of conditions, phases, and
/// annotations. The list has all names of this form in the sources, so that it has each of these.
#[test]
fn the_names_in_objects_are_kept() {
    let is_camel = |text: &str| {
        let is_word = text.chars().all(|c| c.is_ascii_alphanumeric());
        let has_both = text.chars().any(|c| c.is_ascii_lowercase());
        text.len() > 2 && is_word && has_both && text.starts_with(|c: char| c.is_ascii_uppercase())
    };
    let mut found = names("src/router", is_camel);
    found.extend(names("src/operation/volume", is_camel));
    for reason in ["FileSystemNotGrown", "NodeChosen", "PoolNearlyFull"] {
        assert!(found.contains(reason), "{reason} is found");
    }
    for folder in ["src/router", "kubectl-slackwater/src"] {
        let is_annotation = |text: &str| text.starts_with("slackwater.dev/");
        found.extend(names(folder, is_annotation));
    }
    insta::assert_snapshot!(found.into_iter().collect::<Vec<_>>().join("\n"));
}
