//! What tests and benchmarks share: a scratch folder, a pool's disk, the driver as a process, a
//! client, writers and their oracle. No released program contains it.
//!
//! Everything is below one folder named `slackwater-…`, and is removed when its guard is dropped,
//! also by a panic: processes by ID, mounts and loop devices by the folder that their files are in.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    clippy::new_without_default,
    reason = "a test panics where an expectation fails, and works on its own files"
)]

pub mod client;
pub mod cluster;
pub mod disk;
pub mod guest;
pub mod image_pool;
pub mod left_out;
pub mod node;
pub mod packages;
pub mod plane;
pub mod prometheus;
pub mod server;
pub mod snapshots;
pub mod sweep;
pub mod thin_rules;
pub mod writers;

pub use client::{Client, block, capability, mount};
pub use disk::{Disk, Scratch};
pub use left_out::left_out;
pub use server::{Server, archive_command, binary};
pub use sweep::Sweep;

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

/// How long a test waits for an expected event. Only a process that hangs takes longer, also on a
/// slow machine under load.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(120);

/// A program of the machine, with the same output in the environment of every user.
fn program(name: &str) -> Command {
    let mut command = Command::new(name);
    command.env("LC_ALL", "C");
    command
}

/// The program under test, without variables of the tests' environment that would configure it.
pub fn slackwater() -> Command {
    without_configuration(Command::new(binary()))
}

/// A command without the variables that configure our program.
pub fn without_configuration(mut command: Command) -> Command {
    for name in ["CSI_ENDPOINT", "RUST_LOG", "NO_COLOR"] {
        command.env_remove(name);
    }
    command
}

/// A free port. It is below the ports that the kernel assigns by itself, so that no other program
/// gets it before it is used; test programs that run at once begin at different ports.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 10_000 + (std::process::id() % 100 * 200) as u16;
    let mut ports = std::iter::repeat_with(|| first + NEXT.fetch_add(1, Ordering::Relaxed) % 2000);
    let free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    ports.by_ref().take(2000).find(free).expect("a free port")
}

/// Unmounts a folder. A process that another thread is just starting holds our descriptors until it
/// runs exec, so a file that we have closed may be busy for a moment.
pub fn unmount(folder: &Path) {
    let folder = folder.to_str().unwrap();
    eventually(&format!("{folder} is unmounted"), || {
        succeeds("umount", &[folder])
    });
}

/// Runs a program of the machine to its end. Returns its output; panics with its messages if it
/// fails.
pub fn run(name: &str, arguments: &[&str]) -> String {
    let output = program(name)
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("{name}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{name} {arguments:?}: {}\n{text}{stderr}",
        output.status
    );
    text
}

/// Whether a program succeeds.
pub fn succeeds(name: &str, arguments: &[&str]) -> bool {
    program(name)
        .args(arguments)
        .output()
        .is_ok_and(|output| output.status.success())
}

/// The number of rounds of a test: few, or many in a soak test.
pub fn rounds(few: usize, many: usize) -> usize {
    match std::env::var_os("SLACKWATER_SOAK") {
        Some(_) => many,
        None => few,
    }
}

/// The letter of the state of a process or thread, from its `stat` file.
pub fn state_of(stat: &Path) -> Option<char> {
    let stat = std::fs::read_to_string(stat).ok()?;
    stat.rsplit(')').next()?.trim_start().chars().next()
}

/// Waits until a condition is true, for at most [`WAIT_TIMEOUT`]. Between two checks it waits as long as a check
/// takes: some start a program.
#[track_caller]
pub fn eventually(what: &str, check: impl FnMut() -> bool) {
    eventually_within(WAIT_TIMEOUT, what, check);
}

/// The same, for at most this time.
#[track_caller]
pub fn eventually_within(limit: Duration, what: &str, mut check: impl FnMut() -> bool) {
    let start = Instant::now();
    loop {
        let checked_at = Instant::now();
        if check() {
            return;
        }
        assert!(start.elapsed() < limit, "not within {limit:?}: {what}");
        std::thread::sleep(checked_at.elapsed().max(Duration::from_millis(5)));
    }
}
