//! Faults at the n-th effect: this test program starts itself again, and dies there.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use slackwater::host::linux::LinuxHost;
use slackwater::host::{Effect, Host};

use super::scratch::folder;

/// Not a test of its own: the work of the child process.
#[test]
#[ignore = "run by the tests below, in a process of its own"]
fn child() {
    let folder = PathBuf::from(std::env::var_os("FOLDER").unwrap());
    let host = LinuxHost::new(Vec::new());
    for name in ["a", "b", "c"] {
        let path = folder.join(name);
        if let Err(error) = host.perform(&Effect::MakeDir { path: &path }) {
            println!("{name}: {}", super::scratch::error_text(&error));
        }
    }
}

fn run_child(folder: &Path, faults: &str) -> Output {
    let log = folder.join("log");
    Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "host_linux::fault::child",
            "--ignored",
            "--nocapture",
        ])
        .env("FOLDER", folder)
        .env(
            "SLACKWATER_FAULT",
            format!("{faults},effect.all:log={}", log.display()),
        )
        .output()
        .unwrap()
}

fn created(folder: &Path) -> Vec<&'static str> {
    let there = |name: &&str| folder.join(name).exists();
    ["a", "b", "c"].into_iter().filter(there).collect()
}

#[test]
fn the_process_is_killed_before_or_after_the_effect_of_the_number() {
    for (fault, left) in [
        ("effect.2:kill", vec!["a"]),
        ("effect.2:kill-after", vec!["a", "b"]),
    ] {
        let folder = folder();
        let ended = run_child(folder.path(), fault);
        assert_eq!(ended.status.signal(), Some(9), "{fault}: {ended:?}");
        assert_eq!(created(folder.path()), left, "{fault}");
        let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
        assert_eq!(log, format!("1 make_dir\n2 make_dir\n{fault}\n"));
    }
}

#[test]
fn an_effect_is_refused_with_the_errno_and_not_performed() {
    let folder = folder();
    let ended = run_child(folder.path(), "effect.2:error=ENOSPC");
    assert!(
        String::from_utf8_lossy(&ended.stdout).contains("b: fault at make_dir: ENOSPC"),
        "{ended:?}"
    );
    assert_eq!(created(folder.path()), ["a", "c"]);
}

#[test]
fn counting_begins_when_the_marker_is_there() {
    let folder = folder();
    let marker = folder.path().join("b");
    let after = format!("effect.9:kill,effect.all:after={}", marker.display());
    run_child(folder.path(), &after);
    assert_eq!(created(folder.path()), ["a", "b", "c"]);
    let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
    assert_eq!(log, "1 make_dir\n", "only the third effect is counted");
}
