//! Tests that need what the machine's kernel lacks: they start themselves again in a guest kernel
//! (tests/guest), and print the guest's output if they fail.

use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// guest-run's exit code for a guest that did not end in time.
const HUNG: i32 = 124;
/// User Mode Linux 6.1 sometimes loses its timer (2 of 8 boots on a busy machine, none of 20 on an
/// idle one): it spins in its idle loop and wakes no process. A driver that hangs does so at each
/// try; a slow machine gets more time at each try, in seconds.
const GUESTS: [&str; 3] = ["90", "180", "900"];

/// Runs `body` in a guest with these disks (`NAME:SIZE`; the guest finds them in
/// `$GUEST_DISK_NAME`). `test` is the name of the calling test.
pub fn in_guest(test: &str, disks: &[&str], body: impl FnOnce()) {
    if std::env::var_os("GUEST").is_some() {
        return body();
    }
    // One at a time, because a guest occupies a processor.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let guest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/guest/guest-run");
    for (left, seconds) in (0..GUESTS.len()).rev().zip(GUESTS) {
        let output = Command::new(&guest)
            .args(disks.iter().flat_map(|disk| ["--disk", disk]))
            .args(["--timeout", seconds, "--"])
            .arg(std::env::current_exe().expect("this program"))
            .args(["--exact", test, "--nocapture"])
            .output()
            .expect("tests/guest/guest-run starts (deploy/deps test installs what it needs)");
        let stdout = String::from_utf8_lossy(&output.stdout);
        let stderr = String::from_utf8_lossy(&output.stderr);
        if output.status.code() == Some(HUNG) && left > 0 {
            eprintln!("the guest hung, {left} tries left: {stdout}{stderr}");
            continue;
        }
        assert!(
            output.status.success() && stdout.contains("1 passed"),
            "in the guest: {}\n{stdout}\n{stderr}",
            output.status
        );
        return;
    }
}

/// The device of one of the guest's disks.
pub fn disk(name: &str) -> String {
    let variable = format!("GUEST_DISK_{}", name.to_uppercase());
    std::env::var(&variable).unwrap_or_else(|_| panic!("the guest has no {variable}"))
}
