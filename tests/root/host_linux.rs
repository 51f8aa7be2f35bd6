//! The real host with this machine's kernel.
//!
//! Needs root, loop devices, and the programs of e2fsprogs, xfsprogs, btrfs-progs and util-linux.
//! Every test creates a pool of its own (an image in a temporary folder, on a loop device) and
//! removes it, also when it fails. Tests never touch loop devices on other images, so they can run
//! next to each other and to other users of loop devices.

#![expect(
    clippy::disallowed_methods,
    reason = "a test prepares its files and devices with programs and std::fs"
)]
#![expect(
    clippy::unwrap_used,
    reason = "test helpers, which clippy treats as ordinary code"
)]

mod blocks;
mod clones;
#[cfg(feature = "fault")]
mod fault;
mod files;
mod formats;
mod loops;
mod mounts;
mod oracle;
mod paths;
pub mod scratch;
