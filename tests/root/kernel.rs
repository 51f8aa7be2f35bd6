//! The real driver as a process on real disks: xfs, btrfs and ext4 pools on loop devices, real
//! mounts, real files. Needs root. Each test has a scratch folder of its own and leaves nothing
//! behind.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and works on its own files"
)]

mod access;
mod archives;
mod checks;
mod crowd;
mod found;
mod growth;
mod image_pool;
mod import_clones;
mod import_folders;
mod imports;
mod life;
mod pools;
mod readers;
mod refusals;
mod room;
mod tenants;
mod tracking;
mod trims;

pub use slackwater_testkit::node::*;
