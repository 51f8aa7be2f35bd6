//! Files that are opened below a directory whose users may exchange them.

#![allow(clippy::disallowed_methods, reason = "a test changes its own files")]

use std::fs;
use std::os::unix::fs::symlink;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::*;
use crate::error::chain;

/// A directory as rawfile has it, with the image of one volume.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::TempDir::with_prefix("slackwater-").unwrap();
    fs::create_dir(folder.path().join("pvc-1")).unwrap();
    fs::write(folder.path().join("pvc-1/disk.img"), [7; 5000]).unwrap();
    folder
}

fn refused(top: &Path, below: &str) -> String {
    match open(top, Path::new(below)) {
        Err(error) => chain(&error),
        Ok(_) => panic!("{below} is not refused"),
    }
}

#[test]
fn the_path_reaches_the_file_that_was_opened_whatever_its_name_leads_to() {
    let folder = folder();
    let (top, image) = (folder.path(), folder.path().join("pvc-1/disk.img"));
    let opened = open(top, Path::new("pvc-1/disk.img")).unwrap();
    assert_eq!((opened.bytes(), opened.block_size()), (5000, 512));
    assert!(opened.allocated() >= 4096);
    fs::write(top.join("other"), [9; 10]).unwrap();
    fs::rename(top.join("other"), &image).unwrap();
    assert_eq!(fs::read(opened.path()).unwrap(), [7; 5000]);
    // It has lost its name.
    assert!(chain(&opened.check_unchanged().unwrap_err()).contains("changed"));
    let other = open(top, Path::new("pvc-1/disk.img")).unwrap();
    assert_ne!(opened.state(), other.state());
    other.check_unchanged().unwrap();
}

#[test]
fn the_administrators_directory_may_be_a_link_and_nothing_below_it() {
    let folder = folder();
    let top = folder.path();
    symlink(top, top.join("chosen")).unwrap();
    open(&top.join("chosen"), Path::new("pvc-1/disk.img")).unwrap();
    symlink("pvc-1/disk.img", top.join("link.img")).unwrap();
    symlink("pvc-1", top.join("pvc-2")).unwrap();
    symlink("/", top.join("pvc-3")).unwrap();
    for below in [
        "link.img",
        "pvc-2/disk.img",
        "pvc-3/etc/passwd",
        "chosen/pvc-1/disk.img",
    ] {
        let why = refused(top, below);
        assert!(why.contains("is a symbolic link"), "{why}");
        assert!(why.contains(top.to_str().unwrap()), "{why}");
    }
    let fd = File::open(top.join("pvc-1/disk.img")).unwrap();
    let magic = format!("self/fd/{}", fd.as_raw_fd());
    assert!(refused(Path::new("/proc"), &magic).contains("is a symbolic link"));
    // The caller has excluded this, and the kernel does as well.
    assert!(refused(&top.join("pvc-1"), "../pvc-1/disk.img").contains("EXDEV"));
}

#[test]
fn only_a_regular_file_with_content_is_opened() {
    let folder = folder();
    let top = folder.path();
    mkfifo(&top.join("fifo"), Mode::S_IRWXU).unwrap();
    fs::write(top.join("empty"), []).unwrap();
    for below in ["pvc-1", "fifo"] {
        assert!(
            refused(top, below).contains("is not a regular file"),
            "{below}"
        );
    }
    assert!(refused(Path::new("/dev"), "null").contains("is not a regular file"));
    assert!(refused(top, "empty").contains("is empty"));
    assert!(refused(top, "pvc-9/disk.img").contains("ENOENT"));
}

#[test]
fn a_file_that_is_open_for_writing_is_refused() {
    let folder = folder();
    let image = folder.path().join("pvc-1/disk.img");
    let writer = OpenOptions::new().write(true).open(&image).unwrap();
    assert!(refused(folder.path(), "pvc-1/disk.img").contains("open for writing"));
    drop(writer);
    open(folder.path(), Path::new("pvc-1/disk.img")).unwrap();
}

#[test]
fn another_file_system_is_an_obstacle_and_nothing_is_left_in_the_directory() {
    let folder = folder();
    let opened = open(folder.path(), Path::new("pvc-1/disk.img")).unwrap();
    let other = tempfile::TempDir::with_prefix_in("slackwater-", "/dev/shm").unwrap();
    let obstacle = opened.find_obstacle(other.path()).unwrap();
    assert!(obstacle.is_some(), "/dev/shm shares no blocks");
    assert_eq!(fs::read_dir(other.path()).unwrap().count(), 0);
    let nowhere = opened.find_obstacle(Path::new("/nowhere")).unwrap_err();
    assert!(chain(&nowhere).contains("ENOENT"));
}

#[test]
fn what_another_try_can_change_is_no_obstacle() {
    for errno in [Errno::ENOSPC, Errno::EIO, Errno::EDQUOT, Errno::EACCES] {
        assert_eq!(obstacle(errno), None, "{errno}");
    }
    for errno in [
        Errno::EXDEV,
        Errno::EOPNOTSUPP,
        Errno::EINVAL,
        Errno::ETXTBSY,
    ] {
        assert!(obstacle(errno).is_some(), "{errno}");
    }
}
