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

/// Without the feature `fault`, the parts of a program that need it are not compiled.
#[test]
fn programs_that_need_planned_faults_are_named_when_they_are_left_out() {
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/root/main.rs");
    let program = fs::read_to_string(program).unwrap();
    let parts = program.split("#[cfg(feature = \"fault\")]\nmod ").skip(1);
    let names: Vec<_> = parts.filter_map(|rest| rest.split(';').next()).collect();
    assert!(names.contains(&"guard"), "{names:?}");
    let missing = names.iter().filter(|_| cfg!(not(feature = "fault")));
    for name in missing {
        left_out(&format!("{name}: it needs the feature `fault`"));
    }
}
