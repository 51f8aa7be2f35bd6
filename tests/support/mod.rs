//! Real things for tests: a scratch folder, a pool's disk, the driver as a process, a client.
//!
//! Everything lies below one folder named `slackwater-…`, and goes when its guard is dropped,
//! also by a panic: processes by id, mounts and loop devices by what they stand on.

#![allow(dead_code, unused_imports, reason = "each test program uses a part")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test says what it expects"
)]

pub mod client;
pub mod disk;
pub mod node;
pub mod server;
pub mod snapshots;
pub mod writers;

pub use client::{Client, block, capability, mount};
pub use disk::{Disk, Scratch};
pub use server::{Server, binary};

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// How long a test waits for what must happen: only what hangs takes longer, also on a slow
/// machine under load.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Runs a program of the machine to its end; its output, or a panic with what it said.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}\n{text}{said}",
        output.status
    );
    text
}

/// Whether a program succeeds.
pub fn succeeds(program: &str, arguments: &[&str]) -> bool {
    Command::new(program)
        .args(arguments)
        .output()
        .is_ok_and(|output| output.status.success())
}

/// The letter by which the kernel tells the state of a process or thread, in its `stat` file.
pub fn state_of(stat: &Path) -> Option<char> {
    let stat = std::fs::read_to_string(stat).ok()?;
    stat.rsplit(')').next()?.trim_start().chars().next()
}

/// Waits until something is true, with [`PATIENCE`].
pub fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let start = Instant::now();
    while !check() {
        assert!(start.elapsed() < PATIENCE, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
