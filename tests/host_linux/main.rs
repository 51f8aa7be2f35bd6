//! The real host against this machine's kernel.
//!
//! Needs root, loop devices, and the programs of e2fsprogs, xfsprogs, btrfs-progs and util-linux.
//! Every test makes a pool of its own (an image in a temporary folder, on a loop device) and takes
//! it apart again, also when it fails; loop devices on other images are never touched, so tests
//! run beside each other and beside other users of loop devices.

#![expect(
    clippy::disallowed_methods,
    reason = "a test prepares what it needs with programs and plain files"
)]
#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests, which clippy takes for ordinary code"
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
mod scratch;
