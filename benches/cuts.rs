//! Snapshots, groups and restores beside the same by hand, in turns, and what those who write
//! meanwhile feel of them: the longest time between two acknowledged writes.
//!
//! `PART=calls`, `members`, `extents`, `held` or `hints` is a part of it; `ROUNDS=3` is a shorter run. The
//! pictures go to target/cuts.

#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark is not the driver: it starts programs and writes files as it likes"
)]

#[path = "cuts/calls.rs"]
mod calls;
#[path = "cuts/ground.rs"]
mod ground;
#[path = "hand/mod.rs"]
mod hand;
#[path = "cuts/held.rs"]
mod held;
#[path = "cuts/hints.rs"]
mod hints;
#[path = "measure/mod.rs"]
mod measure;
#[path = "plot/mod.rs"]
mod plot;
#[path = "stall/mod.rs"]
mod stall;
#[path = "cuts/stalls.rs"]
mod stalls;
#[path = "../tests/support/mod.rs"]
mod support;

use std::path::PathBuf;

/// Where the pictures go.
fn pictures() -> PathBuf {
    let folder = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/target/cuts"));
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

fn main() {
    let part = std::env::var("PART").unwrap_or_default();
    let wanted = |name: &str| part.is_empty() || part == name;
    if wanted("calls") {
        calls::measure();
    }
    if wanted("members") {
        stalls::members();
    }
    if wanted("extents") {
        stalls::extents();
    }
    if wanted("held") {
        held::measure();
    }
    if wanted("hints") {
        hints::measure();
    }
}
