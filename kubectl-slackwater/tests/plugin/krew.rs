//! The manifest for krew follows the rules that krew and its index check.

use serde_json::Value;

const TEMPLATE: &str = include_str!("../../krew/slackwater.yaml");

/// The manifest as a release fills it in.
fn manifest() -> Value {
    let hash = "0123456789abcdef".repeat(4);
    let text = TEMPLATE
        .replace("VERSION", env!("CARGO_PKG_VERSION"))
        .replace("URL", "https://example.org/slackwater")
        .replace("SHA256-linux-amd64", &hash)
        .replace("SHA256-linux-arm64", &hash);
    serde_saphyr::from_str(&text).unwrap()
}

fn text<'a>(value: &'a Value, pointer: &str) -> &'a str {
    value
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

/// What krew refuses, or what its index does not accept.
fn complaints(manifest: &Value) -> Vec<String> {
    let mut found = Vec::new();
    let mut check = |is_right: bool, what: &str| {
        if !is_right {
            found.push(what.to_string());
        }
    };
    let api = "krew.googlecontainertools.github.com/v1alpha2";
    check(text(manifest, "/apiVersion") == api, "apiVersion");
    check(text(manifest, "/kind") == "Plugin", "kind");
    let name = text(manifest, "/metadata/name");
    let is_letter = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    check(
        !name.is_empty() && name.chars().all(is_letter),
        "name has other characters",
    );
    check(
        name.starts_with(|c: char| c.is_ascii_lowercase()),
        "name begins with no letter",
    );
    check(!name.starts_with("kube"), "name repeats kubectl");
    let version = text(manifest, "/spec/version")
        .strip_prefix('v')
        .unwrap_or_default();
    let numbers: Vec<_> = version.split('.').map(str::parse::<u64>).collect();
    check(
        numbers.len() == 3 && numbers.iter().all(Result::is_ok),
        "version",
    );
    check(
        text(manifest, "/spec/homepage").starts_with("https://"),
        "homepage",
    );
    let short = text(manifest, "/spec/shortDescription");
    check(
        (1..=50).contains(&short.len()),
        "shortDescription is too long",
    );
    check(
        !short.contains('\n') && !short.ends_with('.'),
        "shortDescription is a sentence",
    );
    check(
        !text(manifest, "/spec/description").is_empty(),
        "description",
    );
    let platforms = manifest["spec"]["platforms"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    check(!platforms.is_empty(), "no platform");
    let mut selectors = std::collections::BTreeSet::new();
    for platform in &platforms {
        let labels = &platform["selector"]["matchLabels"];
        let [os, arch] = ["os", "arch"].map(|key| labels[key].as_str().unwrap_or_default());
        check(["linux", "darwin", "windows"].contains(&os), "os");
        check(["amd64", "arm64"].contains(&arch), "arch");
        check(
            selectors.insert((os.to_string(), arch.to_string())),
            "two platforms are the same",
        );
        let uri = text(platform, "/uri");
        let end = format!("-{os}-{arch}.tar.gz");
        check(uri.starts_with("https://") && uri.ends_with(&end), "uri");
        let hash = text(platform, "/sha256");
        let is_hash = hash.len() == 64 && hash.chars().all(|c| matches!(c, '0'..='9' | 'a'..='f'));
        check(is_hash, "sha256");
        let files = platform["files"].as_array().cloned().unwrap_or_default();
        let has = |name: &str| {
            files
                .iter()
                .any(|file| file["from"] == name && file["to"] == ".")
        };
        // krew links `bin` as kubectl-NAME; with that name it also works without krew.
        check(
            text(platform, "/bin") == format!("kubectl-{name}") && has(text(platform, "/bin")),
            "bin",
        );
        check(has("LICENSE"), "no license");
    }
    found
}

#[test]
fn the_manifest_for_krew_follows_its_rules() {
    assert_eq!(complaints(&manifest()), [""; 0]);
    let page = include_str!("../../../docs/plugin.md");
    assert!(
        page.contains("kubectl-slackwater/krew/slackwater.yaml"),
        "the page names it"
    );
}

#[test]
fn what_krew_refuses_is_found() {
    let broken = |pointer: &str, value: &str| {
        let mut manifest = manifest();
        *manifest.pointer_mut(pointer).unwrap() = value.into();
        complaints(&manifest)
    };
    let cases = [
        ("/apiVersion", "v1", "apiVersion"),
        (
            "/metadata/name",
            "kubectl-slackwater",
            "name repeats kubectl",
        ),
        ("/metadata/name", "Slackwater", "name has other characters"),
        ("/spec/version", "0.1.0", "version"),
        (
            "/spec/shortDescription",
            "One sentence.",
            "shortDescription is a sentence",
        ),
        ("/spec/platforms/0/sha256", "SHA256", "sha256"),
        ("/spec/platforms/0/bin", "slackwater", "bin"),
        (
            "/spec/platforms/1/selector/matchLabels/arch",
            "amd64",
            "two platforms are the same",
        ),
    ];
    for (pointer, value, expected) in cases {
        let found = broken(pointer, value);
        assert!(
            found.iter().any(|what| what == expected),
            "{pointer}: {found:?}"
        );
    }
}
