//! The consistent cut with the real driver on real disks: snapshots, groups, restores, clones, and
//! the oracles that detect an inconsistent one. Needs root. `SLACKWATER_SOAK=1` runs many rounds.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and works on its own files"
)]

mod carried;
mod copies;
mod crash;
mod groups;
mod held;
mod hooks;
mod in_place;
mod order;
mod promises;
mod restores;
mod room;
mod window;

pub use slackwater_testkit::node::*;
pub use slackwater_testkit::rounds;
