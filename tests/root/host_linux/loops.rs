//! Loop devices: how an image's device is identified, and how it is detached.

use std::collections::HashSet;
use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Barrier;

use slackwater::host::{Effect, FileId, Host, LoopSpec, LoopStatus};
use slackwater::model::FsType;
use slackwater::model::size::MIB;

use super::scratch::{Image, Scratch, eventually, run, text};

fn status(scratch: &Scratch, image: &Image) -> Option<LoopStatus> {
    let loops = scratch.host.loops().unwrap();
    loops.into_iter().find(|status| status.backing == image.id)
}

fn discard_limit(number: u32) -> u64 {
    let path = format!("/sys/block/loop{number}/queue/discard_max_bytes");
    fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

#[test]
fn a_loop_device_is_identified_by_its_file_on_every_file_system() {
    for fs in FsType::ALL {
        let scratch = Scratch::on(fs);
        let (image, other) = (scratch.image("a", 16 * MIB), scratch.image("b", 16 * MIB));
        let hold = scratch.attach(&image);
        let found = status(&scratch, &image).expect("it is listed under the image's id");
        assert_eq!(
            (found.number, found.offset, found.size_limit),
            (hold.number, 0, 0),
            "{fs}"
        );
        assert!(found.autoclear && !found.read_only, "{fs}");
        assert!(
            found.direct_io,
            "{fs}: direct I/O with the sector size of the backing file system"
        );
        assert!(
            scratch
                .host
                .hold_loop(hold.number, image.id)
                .unwrap()
                .is_some()
        );
        assert!(
            scratch
                .host
                .hold_loop(hold.number, other.id)
                .unwrap()
                .is_none()
        );
    }
}

#[test]
fn an_image_that_shares_blocks_keeps_direct_io() {
    for fs in [FsType::Xfs, FsType::Btrfs] {
        let scratch = Scratch::on(fs);
        let image = scratch.image("a", 16 * MIB);
        fs::write(&image.path, vec![7; 16 << 20]).unwrap();
        let snapshot = scratch.pool.join("snapshot");
        run(
            "cp",
            &["--reflink=always", text(&image.path), text(&snapshot)],
        );
        let _hold = scratch.attach(&image);
        assert!(status(&scratch, &image).unwrap().direct_io, "{fs}");
    }
}

#[test]
fn a_loop_number_that_was_reused_for_another_image_is_neither_held_nor_detached() {
    let scratch = Scratch::new();
    let (ours, thief) = (
        scratch.image("ours", 16 * MIB),
        scratch.image("thief", 16 * MIB),
    );
    let hold = scratch.attach_as(&thief, false, false);
    let number = hold.number;
    assert!(scratch.host.hold_loop(number, ours.id).unwrap().is_none());
    scratch.done(&Effect::DetachLoop {
        number,
        backing: ours.id,
    });
    drop(hold);
    assert_eq!(
        status(&scratch, &thief).map(|found| found.number),
        Some(number)
    );
    let detach = Effect::DetachLoop {
        number,
        backing: thief.id,
    };
    scratch.done(&detach);
    eventually("the loop device is gone", || {
        status(&scratch, &thief).is_none()
    });
    // A detach of a device that is no longer the image's succeeds.
    scratch.done(&detach);
}

#[test]
fn a_held_loop_stays_attached_until_the_hold_is_dropped() {
    let scratch = Scratch::new();
    let image = scratch.image("a", 16 * MIB);
    let first = scratch.attach_as(&image, false, false);
    let number = first.number;
    let second = scratch.host.hold_loop(number, image.id).unwrap().unwrap();
    drop(first);
    scratch.done(&Effect::DetachLoop {
        number,
        backing: image.id,
    });
    assert_eq!(
        status(&scratch, &image).map(|found| found.number),
        Some(number)
    );
    drop(second);
    eventually("the loop device is gone", || {
        status(&scratch, &image).is_none()
    });
}

#[test]
fn an_autoclear_loop_vanishes_with_its_last_opener() {
    let scratch = Scratch::new();
    let image = scratch.image("a", 16 * MIB);
    let hold = scratch.attach(&image);
    assert!(status(&scratch, &image).is_some());
    drop(hold);
    eventually("the loop device is gone", || {
        status(&scratch, &image).is_none()
    });

    let kept = scratch.attach_as(&image, false, false);
    let number = kept.number;
    drop(kept);
    assert!(!status(&scratch, &image).unwrap().autoclear);
    scratch.done(&Effect::DetachLoop {
        number,
        backing: image.id,
    });
    eventually("the loop device is gone", || {
        status(&scratch, &image).is_none()
    });
}

#[test]
fn sixteen_concurrent_attaches_each_get_a_device_of_their_own() {
    let scratch = Scratch::new();
    let images: Vec<_> = (0..16)
        .map(|n| scratch.image(&n.to_string(), 4 * MIB))
        .collect();
    let start = Barrier::new(images.len());
    let holds: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = images
            .iter()
            .map(|image| {
                let (scratch, start) = (&scratch, &start);
                scope.spawn(move || {
                    start.wait();
                    scratch.attach(image)
                })
            })
            .collect();
        threads.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let numbers: HashSet<_> = holds.iter().map(|hold| hold.number).collect();
    assert_eq!(numbers.len(), images.len());
    for (image, hold) in images.iter().zip(&holds) {
        assert_eq!(
            status(&scratch, image).map(|found| found.number),
            Some(hold.number)
        );
    }
}

#[test]
fn an_image_that_is_not_the_expected_file_is_refused() {
    let scratch = Scratch::new();
    let image = scratch.image("a", 16 * MIB);
    let link = scratch.pool.join("link");
    symlink(&image.path, &link).unwrap();
    let mut spec = LoopSpec {
        image: &link,
        backing: image.id,
        block_size: 4096,
        autoclear: true,
        read_only: false,
    };
    assert!(scratch.refused(&Effect::AttachLoop(spec)).contains("ELOOP"));
    spec.image = &image.path;
    spec.backing = FileId {
        device: image.id.device,
        inode: image.id.inode + 1,
    };
    assert!(
        scratch
            .refused(&Effect::AttachLoop(spec))
            .contains("expected")
    );
    assert!(status(&scratch, &image).is_none());
}

#[test]
fn a_read_only_loop_is_not_written() {
    let scratch = Scratch::new();
    let image = scratch.image("a", 16 * MIB);
    let hold = scratch.attach_as(&image, true, true);
    assert!(status(&scratch, &image).unwrap().read_only);
    let written = fs::OpenOptions::new()
        .write(true)
        .open(hold.device().path)
        .and_then(|mut node| node.write_all(&[1; 4096]).and_then(|()| node.sync_all()));
    assert!(written.is_err());
}

#[test]
fn a_grown_image_is_shown_whole_after_a_resize() {
    let scratch = Scratch::new();
    let image = scratch.image("a", 16 * MIB);
    let hold = scratch.attach(&image);
    scratch.image("a", 24 * MIB);
    assert_eq!(scratch.host.device_bytes(&hold.device()).unwrap(), 16 * MIB);
    scratch.done(&Effect::ResizeLoop {
        number: hold.number,
    });
    assert_eq!(scratch.host.device_bytes(&hold.device()).unwrap(), 24 * MIB);
    assert!(
        status(&scratch, &image).unwrap().autoclear,
        "a resize keeps the flags"
    );
}

#[test]
fn a_mounted_device_is_claimed_and_so_is_a_frozen_one_that_was_unmounted() {
    let scratch = Scratch::new();
    let volume = scratch.volume("v", FsType::Ext4, 32 * MIB);
    let claimed = || scratch.host.is_claimed(&volume.device).unwrap();
    assert!(claimed());
    run("fsfreeze", &["--freeze", text(&volume.target)]);
    scratch.unmount(&volume.target);
    assert!(claimed(), "the frozen super block lives on");

    scratch.mount(&volume.device, &volume.target, FsType::Ext4, &[]);
    run("fsfreeze", &["--unfreeze", text(&volume.target)]);
    scratch.unmount(&volume.target);
    eventually("the claim ends", || !claimed());
    assert_eq!(
        status(&scratch, &volume.image).map(|found| found.number),
        Some(volume.hold.number)
    );
}

#[test]
fn a_discard_limit_does_not_outlive_its_loop() {
    let scratch = Scratch::new();
    let thick = scratch.image("thick", 16 * MIB);
    let mut used = HashSet::new();
    for _ in 0..40 {
        let hold = scratch.attach(&thick);
        assert_ne!(discard_limit(hold.number), 0, "loop{}", hold.number);
        scratch.done(&Effect::DisableDiscard {
            device: &hold.device(),
        });
        assert_eq!(discard_limit(hold.number), 0);
        used.insert(hold.number);
        drop(hold);
        eventually("the loop device is gone", || {
            status(&scratch, &thick).is_none()
        });
    }
    // The devices are reused: 40 rounds do not leave 40 devices behind.
    assert!(used.len() < 40, "{used:?}");
}

/// A loop device whose file system was shut down, next to one on an image of the same name.
#[test]
fn a_loop_on_a_dead_file_system_is_ignored_if_it_certainly_is_another_image() {
    let (dead, well) = (Scratch::new(), Scratch::new());
    let (lost, image) = (dead.image("a", 16 * MIB), well.image("a", 16 * MIB));
    let (_lost, hold) = (dead.attach(&lost), well.attach(&image));
    let name = Path::new("a");
    let on = |scratch: &Scratch, image: &Image| scratch.host.loops_on(&image.path, name);
    run("xfs_io", &["-x", "-c", "shutdown", text(&dead.pool)]);
    let (_, loops) = on(&well, &image).unwrap().unwrap();
    let numbers: Vec<_> = loops.iter().map(|found| found.number).collect();
    assert_eq!(numbers, [hold.number]);
    let error = on(&dead, &lost).expect_err("a dead file system cannot be inspected");
    assert_eq!(error.code(), Some(nix::errno::Errno::EIO));
}

#[test]
fn a_loop_device_with_another_file_name_is_not_queried() {
    let scratch = Scratch::new();
    let image = scratch.image("a", 16 * MIB);
    let hold = scratch.attach(&image);
    let numbers = |name: &str| -> Vec<_> {
        let found = scratch.host.loops_on(&image.path, Path::new(name)).unwrap();
        found.unwrap().1.iter().map(|found| found.number).collect()
    };
    assert_eq!(numbers("a"), [hold.number]);
    assert_eq!(numbers("pool/a"), [hold.number]);
    assert!(numbers("b").is_empty(), "its name is another");
    fs::remove_file(&image.path).unwrap();
    let devices = scratch.host.loop_devices(&|name| name.ends_with("pool/a"));
    let found = devices
        .unwrap()
        .into_iter()
        .any(|found| found.number == hold.number);
    assert!(found, "a file that was removed keeps its name");
}
