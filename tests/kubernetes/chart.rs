//! The chart renders to its reviewed snapshots, refuses invalid values, and gives containers no
//! privilege that the page about installation does not name. Rendering needs helm: on the path, or
//! in the cache of tests/cluster (`make helm`). Without it, only checks that need no rendering run.

#![allow(clippy::disallowed_methods, reason = "a test starts programs")]

mod alerts;
mod cluster;
mod dashboard;
mod program;
mod sidecars;
mod values;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

use slackwater_testkit::left_out;

fn chart() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/chart")
}

fn read(file: &str) -> String {
    let path = chart().join(file);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The program `helm`, if this machine has it.
fn find_helm() -> Option<&'static str> {
    static FOUND: LazyLock<Option<String>> = LazyLock::new(|| {
        let home = std::env::var("HOME").unwrap_or_default();
        let cached = format!("{home}/.cache/slackwater-cluster/bin/helm");
        let starts = |program: &String| Command::new(program).arg("version").output().is_ok();
        ["helm".into(), cached].into_iter().find(starts)
    });
    FOUND.as_deref()
}

/// Runs `helm`, if this machine has it.
fn helm(words: &[&str]) -> Option<Output> {
    let Some(program) = find_helm() else {
        left_out("tests that render the chart: helm is missing (make helm builds it)");
        return None;
    };
    let output = Command::new(program)
        .args(words)
        // It ends before garbage collection would gain anything.
        .env("GOGC", "off")
        .output();
    Some(output.expect("helm starts"))
}

/// The chart rendered with these arguments.
fn rendered(words: &[&str]) -> Option<Output> {
    let chart = chart().to_string_lossy().into_owned();
    let snapshots = [
        "snapshot.storage.k8s.io/v1",
        "groupsnapshot.storage.k8s.io/v1beta2",
    ];
    let mut all = vec![
        "template",
        "slackwater",
        &chart,
        "--namespace",
        "slackwater",
    ];
    for version in &snapshots {
        all.extend(["--api-versions", version]);
    }
    all.extend(words);
    helm(&all)
}

/// Cases: a name and the arguments.
const CASES: [(&str, &[&str]); 5] = [
    ("defaults", &[]),
    ("single_node", &["--set", "singleNode=true"]),
    (
        "everything",
        &[
            "--set=hooks.namespaces={shop,bank}",
            "--set=metrics.serviceMonitor.create=true,metrics.perVolume=true",
            "--set=metrics.prometheusRule.create=true",
            "--set=pools[0].name=fast,pools[0].path=/disks/fast,pools[0].image=20Gi,pools[0].snapshots=reserved,pools[0].extent=64Ki,pools[0].overcommit=2,pools[0].trim=7d,pools[0].init=true",
            "--set=csiDriver.attach=true,csiDriver.inlineEphemeral=true,poolLostAfter=720h",
            "--set=onNodeLost.recreate=true,schedules.create=true,page.create=true",
            "--set=global.imageRegistry=registry.example.org/mirror,networkPolicy.create=true",
            "--set=openshift.scc=true",
            "--set=node.importPaths={/opt/local-path-provisioner,/var/csi/rawfile}",
            "--set=alpha={health,get-volume}",
            "--set=certificates.mode=existing",
            "--set=snapshotMetadata.create=true,snapshotMetadata.audience=backups",
            "--set=snapshotMetadata.caCert=BEGIN CERTIFICATE",
            "--set=storageClass.parameters.csi\\.storage\\.k8s\\.io/fstype=xfs",
        ],
    ),
    (
        "populators",
        &[
            "--set=populators.create=true,populators.privateNetworks=false,populators.rootForBlock=true",
            "--set=populators.image.digest=sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
            "--set=populators.namespaces={shop,bank},populators.refused={10.96.0.0/12}",
            "--set=populators.proxy=http://proxy.example.org:3128",
            "--set=populators.caBundle=BEGIN CERTIFICATE",
            "--api-versions=populator.storage.k8s.io/v1beta1",
        ],
    ),
    (
        "cert_manager",
        &[
            "--set=certificates.mode=cert-manager",
            "--set=certificates.nodes={node-1,node-2.example.org}",
        ],
    ),
];

#[test]
fn the_chart_renders_to_the_reviewed_snapshots() {
    for (name, words) in CASES {
        // The rest equals that of another case.
        let part: &[&str] = match name {
            "cert_manager" => &["--show-only=templates/certificates.yaml"],
            "populators" => &[
                "--show-only=templates/populators.yaml",
                "--show-only=templates/populators-admission.yaml",
                "--show-only=templates/rbac-users.yaml",
            ],
            _ => &[],
        };
        let Some(output) = rendered(&[words, part].concat()) else {
            return;
        };
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name}: {error}");
        let text = String::from_utf8(output.stdout).expect("text");
        insta::assert_snapshot!(name, text);
    }
}

/// Keys of values.yaml with the comments before them. An indented key belongs to the key above it.
fn values() -> Vec<(String, bool)> {
    let mut path: Vec<(usize, String)> = Vec::new();
    let mut explained = false;
    let mut found = Vec::new();
    for line in read("values.yaml").lines() {
        let text = line.trim_start();
        if text.starts_with('#') {
            explained = true;
            continue;
        }
        let indent = line.len() - text.len();
        let key: String = text.chars().take_while(|c| c.is_alphanumeric()).collect();
        if !key.is_empty() && text[key.len()..].starts_with(':') {
            path.retain(|(other, _)| *other < indent);
            path.push((indent, key));
            let names: Vec<_> = path.iter().map(|(_, key)| key.as_str()).collect();
            found.push((names.join("."), explained));
        }
        explained = false;
    }
    found
}

#[test]
fn every_group_of_values_is_explained_and_known_to_the_schema() {
    let schema = read("values.schema.json");
    let schema: serde_json::Value = serde_json::from_str(&schema).expect("JSON");
    let known = schema["properties"].as_object().expect("properties");
    let mut tops = BTreeSet::new();
    let mut unexplained = Vec::new();
    for (path, explained) in values() {
        let top = path.split('.').next().expect("a first").to_string();
        if !path.contains('.') && !explained {
            unexplained.push(path);
        }
        tops.insert(top);
    }
    assert!(tops.len() > 15, "the values are found: {tops:?}");
    assert!(
        unexplained.is_empty(),
        "without a sentence: {unexplained:?}"
    );
    for top in &tops {
        assert!(
            known.contains_key(top),
            "{top} is not in values.schema.json"
        );
    }
    for key in known.keys().filter(|key| *key != "global") {
        assert!(tops.contains(key), "{key} is not in values.yaml");
    }
}

/// The names of the containers between two keys of a rendered pod, and that text.
fn containers<'a>(text: &'a str, from: &str, to: &str) -> (Vec<&'a str>, &'a str) {
    let (_, rest) = text.split_once(from).expect("the part begins");
    let (part, _) = rest.split_once(to).expect("the part ends");
    let named = |line: &'a str| line.strip_prefix("        - name: ");
    (part.lines().filter_map(named).collect(), part)
}

/// A node that was rebooted provides its pods' volumes even if no router can sign: containers that
/// run before the driver would have to be waited for.
#[test]
fn only_the_guard_starts_before_the_driver() {
    for (name, words) in CASES {
        let Some(output) = rendered(words) else {
            return;
        };
        let text = String::from_utf8(output.stdout).expect("text");
        let (_, daemon) = text.split_once("kind: DaemonSet").expect("the node's pods");
        let (before, part) =
            containers(daemon, "\n      initContainers:\n", "\n      containers:\n");
        assert_eq!(before, ["guard"], "{name}");
        assert!(part.contains("restartPolicy: Always"), "{name}: a sidecar");
        let (beside, _) = containers(daemon, "\n      containers:\n", "\n      volumes:\n");
        assert_eq!(beside.first(), Some(&"driver"), "{name}");
        let has_own_authority = ["defaults", "populators"].contains(&name);
        assert_eq!(beside.contains(&"enrol"), has_own_authority, "{name}");
    }
}

/// The rule that is tested in a guest is the one that the chart installs for udev, and installing
/// it needs only root's privileges.
#[test]
fn the_udev_rule_is_copied_as_it_is_before_anything_is_attached() {
    let Some(output) = rendered(&["--set=udevRule.install=true"]) else {
        return;
    };
    let text = String::from_utf8(output.stdout).expect("text");
    let (_, map) = text
        .split_once("  59-slackwater.rules: |\n")
        .expect("the rule");
    let (map, _) = map.split_once("\n---\n").expect("its end");
    let rule_lines: Vec<_> = map.lines().map(str::trim).collect();
    let rule = read("files/59-slackwater.rules");
    assert_eq!(rule_lines.join("\n").trim(), rule.trim());
    let (_, daemon) = text.split_once("kind: DaemonSet").expect("the node's pods");
    let (before, part) = containers(daemon, "\n      initContainers:\n", "\n      containers:\n");
    assert_eq!(before, ["udev-rule", "guard"]);
    let (copies, _) = part.split_once("- name: guard").expect("the guard");
    assert!(copies.contains("capabilities: {drop: [ALL]}") && !copies.contains("privileged"));
}

/// A token in a privileged container would be available to an attacker who controls it.
#[test]
fn no_privileged_container_has_a_token() {
    const TOKEN: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
    for (name, words) in CASES {
        let Some(output) = rendered(words) else {
            return;
        };
        let text = String::from_utf8(output.stdout).expect("text");
        let (_, daemon) = text.split_once("kind: DaemonSet").expect("the node's pods");
        assert!(daemon.contains("\n      automountServiceAccountToken: false\n"));
        let with_token: BTreeSet<_> = daemon
            .split("\n        - name: ")
            .filter(|container| container.contains(TOKEN))
            .filter_map(|container| container.lines().next())
            .collect();
        let expected: &[&str] = match name {
            "defaults" | "populators" | "cert_manager" if daemon.contains("- name: enrol") => {
                &["enrol"]
            }
            "single_node" => &["provisioner", "resizer", "snapshotter"],
            _ => &[],
        };
        assert_eq!(with_token, expected.iter().copied().collect(), "{name}");
    }
}

/// On nodes with SELinux enabled, containers that are not privileged may not use the sockets of
/// privileged ones.
#[test]
fn containers_that_use_the_drivers_sockets_have_a_permitted_selinux_type() {
    for (name, words) in CASES {
        for (value, expected) in [("spc_t", true), ("", false)] {
            let set = format!("--set=node.seLinuxType={value}");
            let Some(output) = rendered(&[words, &[set.as_str()][..]].concat()) else {
                return;
            };
            let text = String::from_utf8(output.stdout).expect("text");
            let (_, daemon) = text.split_once("kind: DaemonSet").expect("the node's pods");
            let (daemon, _) = daemon.split_once("\n      volumes:\n").expect("volumes");
            for container in daemon.split("\n        - name: ").skip(1) {
                let it = container.lines().next().unwrap_or_default();
                let confined = container.contains("capabilities: {drop: [ALL]}");
                let typed = container.contains("seLinuxOptions: {type: spc_t}");
                assert_eq!(typed, confined && expected, "{name}: {it}");
            }
        }
    }
}

/// The privileged containers, by name.
#[test]
fn only_the_driver_and_its_guard_are_privileged() {
    for (name, words) in CASES {
        let Some(output) = rendered(words) else {
            return;
        };
        let text = String::from_utf8(output.stdout).expect("text");
        let mut container = "";
        let mut privileged = BTreeSet::new();
        let mut confined = BTreeSet::new();
        let mut all = BTreeSet::new();
        for line in text.lines() {
            let trimmed = line.trim_start();
            if let Some(found) = trimmed.strip_prefix("- name: ") {
                container = found;
            }
            if trimmed.starts_with("image: ") {
                all.insert(container);
            }
            if trimmed.contains("privileged: true") {
                privileged.insert(container);
                assert!(
                    trimmed.contains("readOnlyRootFilesystem: true"),
                    "{name}: {container}"
                );
            }
            if trimmed.contains("capabilities: {drop: [ALL]}") {
                confined.insert(container);
            }
        }
        assert_eq!(privileged, BTreeSet::from(["driver", "guard"]), "{name}");
        assert_eq!(&all - &privileged, confined, "{name}");
        assert!(all.len() >= 7, "{name}: {all:?}");
    }
}
