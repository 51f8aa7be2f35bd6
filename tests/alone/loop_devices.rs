//! Loop devices that other programs have claimed. Needs root.
//!
//! A test that claims a free device could claim one that another test has just attached.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and works on its own files"
)]

use std::fs;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

use slackwater::host::linux::LinuxHost;
use slackwater::host::{FileId, Host, LoopSpec, attach_loop};
use slackwater_testkit::node::MIB;
use slackwater_testkit::{Scratch, run};

/// The kernel keeps offering a free number that another process holds open without a file.
#[test]
fn a_free_device_that_cannot_be_used_is_skipped() {
    let scratch = Scratch::alone();
    let path = scratch.join("image");
    fs::File::create(&path).unwrap().set_len(4 * MIB).unwrap();
    let found = fs::metadata(&path).unwrap();
    let backing = FileId {
        device: found.dev(),
        inode: found.ino(),
    };
    let offered = run("losetup", &["--find"]);
    let _claimed = fs::OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_EXCL)
        .open(offered.trim())
        .unwrap();
    assert_eq!(run("losetup", &["--find"]), offered, "it is still offered");

    let host = LinuxHost::new(Vec::new());
    let spec = LoopSpec {
        image: &path,
        backing,
        block_size: 512,
        autoclear: true,
        read_only: false,
    };
    let hold = attach_loop(&host, spec).unwrap();
    assert_ne!(format!("/dev/loop{}", hold.number), offered.trim());
    let loops = host.loops().unwrap();
    let status = loops.into_iter().find(|status| status.backing == backing);
    assert_eq!(status.map(|status| status.number), Some(hold.number));
}
