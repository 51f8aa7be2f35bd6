//! The scripts around a run of the tests: what they find on the machine, and their last lines.

#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "helpers of tests, and scripts"
)]

use std::fs;
use std::process::{Command, Output};

use slackwater_testkit::{Scratch, left_out};

/// Runs a command on a machine whose default folders, below `/run` and `/var/lib`, are empty.
fn on_a_machine(history: &str, command: &str) -> Output {
    let script = format!(
        "mount -t tmpfs slackwater-test /run && mount -t tmpfs slackwater-test /var/lib && \
         {history} && exec tests/machine.sh around bash -c '{command}'"
    );
    Command::new("unshare")
        .args(["--mount", "--propagation", "private", "bash", "-ec"])
        .arg(script)
        .env("MACHINE_MAX_WAIT", "1")
        // It belongs to the run that contains this test; findings here are not its own.
        .env_remove("MACHINE_LOG")
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap()
}

#[test]
fn root_leftovers_of_a_run_are_found_whatever_existed_before() {
    if !nix::unistd::geteuid().is_root() {
        return left_out("what a run leaves on the machine: it needs root");
    }
    // The scripts copy the mount table.
    let _alone = Scratch::alone();
    let before = [
        "true",
        "mkdir -p /run/slackwater /var/lib/slackwater",
        "mkdir -p /run/slackwater/state/freezes && touch /run/slackwater/state/guard.lock",
    ];
    for history in before {
        let clean = on_a_machine(history, "true");
        let output_text = String::from_utf8_lossy(&clean.stderr);
        assert_eq!(clean.status.code(), Some(0), "{history}: {output_text}");
        assert!(
            output_text.contains("as it was found"),
            "{history}: {output_text}"
        );

        let unclean = on_a_machine(history, "mkdir -p /run/slackwater/state/freezes");
        let output_text = String::from_utf8_lossy(&unclean.stderr);
        assert_eq!(unclean.status.code(), Some(1), "{history}: {output_text}");
        assert!(
            output_text.contains("file /run/slackwater/state/freezes"),
            "{history}: {output_text}"
        );
    }
}

#[test]
fn the_last_line_is_the_reason_for_the_exit_status() {
    let folder = tempfile::TempDir::with_prefix("slackwater-").unwrap();
    let file = |name| folder.path().join(name);
    let (log, left, out) = (file("log"), file("left"), file("out"));
    fs::write(&out, "").unwrap();
    let good = "test result: ok. 3 passed; 0 failed; 1 ignored; finished in 1 s\n";
    let bad = "test result: FAILED. 2 passed; 1 failed; 1 ignored; finished in 1 s\n";
    let state = "file /run/slackwater/state\n";
    let cases = [
        (0, good, "", "ok. 3 passed; 0 failed; 1 ignored; all of it"),
        (2, bad, "", "; tests failed"),
        (0, bad, "", "; tests failed"),
        (
            2,
            good,
            state,
            "; the run left on the machine: file /run/slackwater/state",
        ),
        (
            2,
            good,
            "",
            "; a step failed that counts no tests, exit status 2: its own lines are above",
        ),
        (0, "", "", "; no test ran"),
    ];
    for (code, results, found, reason) in cases {
        fs::write(&log, results).unwrap();
        fs::write(&left, found).unwrap();
        let summary = Command::new("tests/summary")
            .arg(code.to_string())
            .args([&left, &out, &log])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .unwrap();
        let output_text = String::from_utf8_lossy(&summary.stdout);
        let last = output_text.lines().last().unwrap();
        assert!(last.ends_with(reason), "{last}");
        let is_good = last.starts_with("test result: ok. ");
        assert_eq!(is_good, summary.status.success(), "{last}");
        assert_eq!(is_good, (code, results, found) == (0, good, ""), "{last}");
    }
}

#[test]
fn skipped_parts_are_named_and_counted_and_are_not_failures() {
    let folder = tempfile::TempDir::with_prefix("slackwater-").unwrap();
    let file = |name| folder.path().join(name);
    let (log, left, out) = (file("log"), file("left"), file("out"));
    fs::write(&left, "").unwrap();
    fs::write(&out, "the chart: no helm\na plane\nthe chart: no helm\n").unwrap();
    fs::write(&log, "test result: ok. 3 passed; 0 failed; 1 ignored; x\n").unwrap();
    let summary = Command::new("tests/summary")
        .arg("0")
        .args([&left, &out, &log])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    let output_text = String::from_utf8_lossy(&summary.stdout);
    assert!(summary.status.success(), "{output_text}");
    assert!(
        output_text.contains("left out 2 times: the chart: no helm\n"),
        "{output_text}"
    );
    assert!(
        output_text.ends_with("; 1 ignored; 3 left out\n"),
        "{output_text}"
    );
}

/// The parts of a test program that are compiled only with the feature `fault`: modules and tests.
fn parts_with_faults(text: &str) -> Vec<&str> {
    let lines: Vec<_> = text.lines().map(str::trim_start).collect();
    // Attributes stand in any order, each in a line of its own.
    let mut found = Vec::new();
    for attributes in lines.chunk_by(|line, _| line.starts_with("#[") || line.starts_with("//")) {
        let Some((item, attributes)) = attributes.split_last() else {
            continue;
        };
        let has = |start: &str| attributes.iter().any(|line| line.starts_with(start));
        let is_test = has("#[test]") || has("#[tokio::test");
        let words: Vec<_> = item.split([' ', '(', ';', '<']).collect();
        // A module at another path is not of this folder: it has helpers.
        let kind = match is_test {
            true => "fn",
            false if has("#[path") => continue,
            false => "mod",
        };
        let at = words.iter().position(|word| *word == kind);
        if let Some(name) = at.and_then(|at| words.get(at + 1))
            && has("#[cfg(feature = \"fault\")]")
        {
            found.push(*name);
        }
    }
    found
}

/// Without the feature `fault`, the parts of a program that need it are not compiled.
#[test]
fn parts_that_need_planned_faults_are_named_when_they_are_left_out() {
    let mut named = Vec::new();
    for folder in ["tests", "populate/tests", "kubectl-slackwater/tests"] {
        for source in crate::shape::below(folder) {
            let parts = parts_with_faults(&source.text);
            if !parts.is_empty() {
                named.push(format!("{folder}/{}: {}", source.path, parts.join(", ")));
            }
        }
    }
    for part in [
        "tests/root/main.rs: across, cut, databases, guard, hooks, kill, roles",
        "tests/root/host_linux.rs: fault",
        "tests/unprivileged/cli.rs: an_unknown_fault_is_refused_with_those_that_are_known",
    ] {
        assert!(named.iter().any(|line| line == part), "{part}: {named:#?}");
    }
    for line in named.iter().filter(|_| cfg!(not(feature = "fault"))) {
        left_out(&format!("{line}: without the feature `fault`"));
    }
}

/// `cargo test` without `--workspace` runs the default members, which are what a release builds without
/// `--package`.
#[test]
fn members_that_are_not_tested_by_default_are_named_when_they_are_left_out() {
    let manifest = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).unwrap();
    let manifest: toml::Table = manifest.parse().unwrap();
    let get = |key: &str| -> Vec<String> {
        let members = manifest["workspace"][key].as_array().unwrap().iter();
        members.map(|name| name.as_str().unwrap().into()).collect()
    };
    let (members, default) = (get("members"), get("default-members"));
    // It has no tests.
    let others = members
        .iter()
        .filter(|name| !default.contains(name) && *name != "testkit");
    // It is the parent of a test program. `make test` names all members, and uses the feature `fault`.
    let parent = format!("/proc/{}/cmdline", std::os::unix::process::parent_id());
    let parent = fs::read_to_string(parent).unwrap_or_default();
    let is_default = !parent
        .split('\0')
        .any(|word| ["--workspace", "--all", "--package", "-p"].contains(&word));
    for name in others.filter(|_| is_default && cfg!(not(feature = "fault"))) {
        left_out(&format!("the tests in {name}: without `--workspace`"));
    }
}

#[test]
fn tests_and_modules_with_planned_faults_are_found_wherever_their_attribute_stands() {
    let text = "\
#[cfg(feature = \"fault\")]
mod one;
#[cfg(feature = \"fault\")]
#[path = \"../x.rs\"]
mod helpers;
mod always;
/// Why.
#[tokio::test]
#[cfg(feature = \"fault\")]
async fn two() {}
#[cfg(feature = \"fault\")]
// Why.
#[test]
fn three() {}
#[cfg(feature = \"fault\")]
fn helper() {}
#[test]
fn four() {}
";
    assert_eq!(parts_with_faults(text), ["one", "two", "three"]);
}
