//! The demo, which is also the shortest test of everything, with the real driver and the real
//! kernel. Needs root.

#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "helpers of tests, and the program from outside"
)]

use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

fn demo(folder: &TempDir) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slackwater"));
    command.args(["demo", "--dir"]).arg(folder.path());
    command
}

fn assert_empty(folder: &TempDir) {
    let left: Vec<_> = folder.path().read_dir().unwrap().flatten().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn root_the_demo_leaves_nothing_behind() {
    let folder = TempDir::with_prefix("slackwater-").unwrap();
    let output = demo(&folder).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{printed}");
    assert!(printed.contains("nothing is left behind"), "{printed}");
    assert!(printed.contains("verify the order of writes"), "{printed}");
    assert!(printed.contains("the writer was paused for"), "{printed}");
    assert!(
        !printed.contains('\x1b'),
        "plain without a terminal: {printed}"
    );
    assert_empty(&folder);
}

#[test]
fn root_a_demo_that_is_stopped_at_any_time_leaves_nothing_behind() {
    for (milliseconds, signal) in [
        (30, Signal::SIGINT),
        (300, Signal::SIGTERM),
        (900, Signal::SIGINT),
        (2500, Signal::SIGTERM),
        (3500, Signal::SIGINT),
    ] {
        let folder = TempDir::with_prefix("slackwater-").unwrap();
        let mut child = demo(&folder).stdout(Stdio::piped()).spawn().unwrap();
        sleep(Duration::from_millis(milliseconds));
        let id = Pid::from_raw(i32::try_from(child.id()).unwrap());
        // The signal may have killed it only before it had created anything.
        kill(id, signal).unwrap();
        child.wait().unwrap();
        assert_empty(&folder);
    }
}

#[test]
fn root_a_demo_whose_driver_dies_cleans_up_by_itself() {
    let folder = TempDir::with_prefix("slackwater-").unwrap();
    let child = demo(&folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let id = child.id();
    // One minute.
    let driver = (0..6000).find_map(|_| {
        sleep(Duration::from_millis(10));
        let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).ok()?;
        let driver: i32 = children.split_whitespace().next()?.parse().ok()?;
        let words = std::fs::read(format!("/proc/{driver}/cmdline")).ok()?;
        let is_serving = words.split(|byte| *byte == 0).nth(1) == Some(b"serve");
        is_serving.then_some(driver)
    });
    sleep(Duration::from_millis(300));
    kill(Pid::from_raw(driver.unwrap()), Signal::SIGKILL).unwrap();
    let output = child.wait_with_output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{printed}");
    assert!(printed.contains("nothing is left behind"), "{printed}");
    assert_empty(&folder);
}
