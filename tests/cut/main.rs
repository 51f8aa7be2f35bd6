//! The consistent cut with the real driver on real disks: snapshots, groups, restores, clones, and
//! the oracles that detect an inconsistent one. Needs root. `SLACKWATER_SOAK=1` runs many rounds.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and works on its own files"
)]

#[path = "../support/mod.rs"]
mod support;

mod carried;
#[cfg(feature = "fault")]
mod copies;
#[cfg(feature = "fault")]
mod crash;
mod groups;
#[cfg(feature = "fault")]
mod held;
#[cfg(feature = "fault")]
mod hooks;
mod in_place;
mod order;
#[cfg(feature = "fault")]
mod promises;
mod restores;
#[cfg(feature = "fault")]
mod room;
#[cfg(feature = "fault")]
mod window;

pub use support::node::*;

/// The number of rounds: few, or many in a soak test.
pub fn rounds(few: usize, many: usize) -> usize {
    match std::env::var_os("SLACKWATER_SOAK") {
        Some(_) => many,
        None => few,
    }
}
