//! Disks that die or hang while they are served, on real file systems. Needs root.
//!
//! A loop device on a dead file system causes failures of unrelated programs as well: the
//! mkfs.btrfs of another test queries every mounted loop device. Therefore these tests are a
//! separate program that runs alone, and they run one after the other.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and works on its own files"
)]

mod disks;

pub use slackwater_testkit::node::*;
