//! A pool in a thin pool of LVM: calls and cuts, compared with the same messages to device mapper
//! by hand, and with `lvcreate -s`. It runs itself in a guest kernel (tests/guest), because the
//! machine's own kernel may have no device mapper.
//!
//! `PART=calls`, `delayed-calls`, `members`, `delayed`, `blocks`, `chunks` or `topolvm` runs a part
//! of it; `ROUNDS=3` is a shorter run. `LVMD` is TopoLVM's program `lvmd`, for the last part.

#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark is not the driver: it may start programs and write files"
)]

#[path = "thin/calls.rs"]
mod calls;
#[path = "thin/chunks.rs"]
mod chunks;
#[path = "thin/cuts.rs"]
mod cuts;
#[path = "thin/fixture.rs"]
mod fixture;
#[path = "hand/mod.rs"]
mod hand;
#[path = "measure/mod.rs"]
mod measure;
#[path = "thin/topolvm.rs"]
mod topolvm;

use std::path::Path;
use std::process::Command;

/// Starts this program again in a guest.
fn run_in_guest() {
    let run = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/guest/guest-run");
    let mut command = Command::new(run);
    // Sparse: only what is written takes memory of the machine.
    command.args(["--timeout", "3000", "--disk", "pool:16G"]);
    for name in ["PART", "ROUNDS", "LVMD"] {
        if let Ok(value) = std::env::var(name) {
            command.args(["--env", &format!("{name}={value}")]);
        }
    }
    let program = std::env::current_exe().expect("this program");
    let ended = command.arg("--").arg(program).status();
    let ended = ended.expect("tests/guest/guest-run starts (deploy/deps test installs it)");
    assert!(ended.success(), "in the guest: {ended}");
}

fn main() {
    if std::env::var_os("GUEST").is_none() {
        return run_in_guest();
    }
    let part = std::env::var("PART").unwrap_or_default();
    let parts: [(&str, fn()); 7] = [
        ("calls", calls::measure),
        ("delayed-calls", calls::measure_with_slow_flushes),
        ("members", cuts::members),
        ("delayed", cuts::members_with_slow_flushes),
        ("blocks", cuts::blocks),
        ("chunks", chunks::measure),
        ("topolvm", topolvm::measure),
    ];
    for (name, measure) in parts {
        if part.is_empty() || part == name {
            measure();
        }
    }
}
