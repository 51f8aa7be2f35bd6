//! Disks that die or hang while they are served, on real file systems. Needs root.
//!
//! A loop device on a dead file system fails also for programs that have nothing to do with it:
//! the mkfs.btrfs of another test asks every mounted loop device. So these tests are a program of their own, which runs
//! beside no other, and they run one after the other.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test says what it expects, and works on its own files"
)]

#[path = "../support/mod.rs"]
mod support;

mod disks;

pub use support::node::*;
