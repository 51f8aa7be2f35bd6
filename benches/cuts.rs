//! Snapshots, groups and restores, compared with the same work by hand, in turns, and their effect
//! on concurrent writers: the longest time between two acknowledged writes.
//!
//! `PART=calls`, `members`, `extents`, `held` or `hints` runs a part of it; `ROUNDS=3` is a shorter
//! run. The plots are written to target/cuts.

#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark is not the driver: it may start programs and write files"
)]

#[path = "cuts/calls.rs"]
mod calls;
#[path = "cuts/fixture.rs"]
mod fixture;
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

use std::path::{Path, PathBuf};

/// The folder of the plots.
fn pictures() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("cuts");
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
