//! Thick volumes in a thin pool of LVM that a thin volume fills.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and writes files"
)]

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use slackwater::thin_metadata::{MAX_PER_MAP, MAX_PER_MAPPING, MIN_PER_MAPPING};
use slackwater_testkit::guest::in_guest;
use slackwater_testkit::snapshots::from_snapshot;
use slackwater_testkit::{Scratch, Server, block, run};
use tonic::Code;

use crate::guest_lvm::{DISKS, POOL, Volume, create_pool, end, end_pool, runtime};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;
/// Bytes that the driver writes with one effect.
const STEP: u64 = 16 * MIB;
const KEEPS_PROMISES: &str = "default=lvm:slackwater-vg/thin,init,rawBlock=unfiltered";

/// Writes all of a device; whether that succeeded.
fn fill(device: &Path, byte: u8) -> bool {
    let device = OpenOptions::new().write(true).open(device).unwrap();
    let each = (0..SIZE / MIB).map(|at| device.write_all_at(&[byte; MIB as usize], at * MIB));
    let written = each.collect::<Result<Vec<_>, _>>();
    written.and_then(|_| device.sync_all()).is_ok()
}

fn is_filled(device: &Path, byte: u8) -> bool {
    let device = File::open(device).unwrap();
    let mut bytes = vec![0; MIB as usize];
    (0..SIZE / MIB).all(|at| {
        device.read_exact_at(&mut bytes, at * MIB).unwrap();
        bytes.iter().all(|it| *it == byte)
    })
}

fn length(device: &Path) -> u64 {
    let mut device = File::open(device).unwrap();
    device.seek(SeekFrom::End(0)).unwrap()
}

/// The mapped bytes of each thin device that is active, except that of the records.
fn mapped_bytes() -> Vec<u64> {
    let status = run("dmsetup", &["status", "--target", "thin"]);
    let volumes = status.lines().filter(|line| !line.contains("-records:"));
    let sectors = volumes.map(|line| line.split(' ').nth(4).unwrap().parse::<u64>());
    sectors.map(|sectors| 512 * sectors.unwrap()).collect()
}

#[test]
fn a_thick_volume_takes_every_write_while_thin_ones_have_filled_the_pool() {
    let test = "guest_thick::a_thick_volume_takes_every_write_while_thin_ones_have_filled_the_pool";
    in_guest(test, &DISKS, || {
        create_pool("384M");
        let scratch = Scratch::new();
        let thick = [("allocation", "thick")];
        let server = Server::start(&scratch, &[KEEPS_PROMISES]);
        let id = runtime().block_on(async {
            let client = server.client();
            let large = client.create("large", 8 * SIZE, block(), &thick).await;
            assert_eq!(large.unwrap_err().code(), Code::ResourceExhausted);
            let id = client.create("thick", SIZE, block(), &thick).await.unwrap();
            let again = client.create("thick", SIZE, block(), &thick).await;
            assert_eq!(again.unwrap(), id);
            id
        });
        end(server);
        let server = Server::start(&scratch, &[POOL]);
        runtime().block_on(async {
            let client = server.client();
            let refused = client.create("b", SIZE, block(), &thick).await.unwrap_err();
            assert!(refused.message().contains("overcommit=1"), "{refused}");
            let volume = Volume::of(&scratch, "thick", id, block());
            let first = client.create("first", SIZE, block(), &[]).await.unwrap();
            let first = Volume::of(&scratch, "first", first, block());
            let second = client.create("second", SIZE, block(), &[]).await.unwrap();
            let second = Volume::of(&scratch, "second", second, block());
            for volume in [&volume, &first, &second] {
                volume.up(&client).await;
            }
            let discard = Command::new("blkdiscard").arg(&volume.target).status();
            assert!(!discard.unwrap().success());
            let filled = [fill(&first.target, 1), fill(&second.target, 2)];
            assert!(filled.contains(&false), "the pool is not full");
            assert!(fill(&volume.target, 3));
            assert!(is_filled(&volume.target, 3));
            run("lvextend", &["--size", "+128M", "slackwater-vg/thin"]);
            assert!(fill(&first.target, 4) && fill(&second.target, 5));
            assert!(fill(&volume.target, 6) && is_filled(&volume.target, 6));
            for volume in [volume, first, second] {
                volume.down(&client).await;
                client.delete(&volume.id).await.unwrap();
            }
        });
        end_pool(server);
    });
}

#[test]
fn a_thick_volume_grows_while_it_is_written_and_has_thick_copies() {
    let test = "guest_thick::a_thick_volume_grows_while_it_is_written_and_has_thick_copies";
    in_guest(test, &DISKS, || {
        create_pool("896M");
        let scratch = Scratch::new();
        let thick = [("allocation", "thick")];
        let server = Server::start(&scratch, &[KEEPS_PROMISES]);
        runtime().block_on(async {
            let client = server.client();
            let id = client.create("raw", SIZE, block(), &thick).await.unwrap();
            let raw = Volume::of(&scratch, "raw", id, block());
            raw.up(&client).await;
            assert_eq!(mapped_bytes(), [SIZE]);
            let target = raw.target.clone();
            let writer = std::thread::spawn(move || (5..=7).all(|byte| fill(&target, byte)));
            let granted = client.expand(&raw.id, 2 * SIZE).await.unwrap();
            assert_eq!(granted, 2 * SIZE);
            assert_eq!(length(&raw.target), SIZE, "before NodeExpandVolume");
            assert_eq!(mapped_bytes(), [2 * SIZE]);
            assert!(writer.join().unwrap() && is_filled(&raw.target, 7));
            client.expand_node(&raw.id, &raw.target).await.unwrap();
            assert_eq!(length(&raw.target), 2 * SIZE);
            let discard = Command::new("blkdiscard").arg(&raw.target).status();
            assert!(!discard.unwrap().success());

            let snapshot = client.snapshot("s", &raw.id, &[]).await.unwrap();
            let source = from_snapshot(&snapshot.snapshot_id);
            let made = client.create_from("copy", 2 * SIZE, block(), source, &thick);
            let copy = made.await.unwrap().volume_id;
            let copy = Volume::of(&scratch, "copy", copy, block());
            client.delete_snapshot(&snapshot.snapshot_id).await.unwrap();
            copy.up(&client).await;
            assert_eq!(mapped_bytes(), [2 * SIZE, 2 * SIZE]);
            assert!(is_filled(&copy.target, 7));
            for volume in [raw, copy] {
                volume.down(&client).await;
                client.delete(&volume.id).await.unwrap();
            }
        });
        end_pool(server);
    });
}

#[test]
fn a_growth_is_completed_after_the_driver_was_killed() {
    let test = "guest_thick::a_growth_is_completed_after_the_driver_was_killed";
    in_guest(test, &DISKS, || {
        create_pool("640M");
        let scratch = Scratch::new();
        let mut server = Server::start(&scratch, &[KEEPS_PROMISES]);
        runtime().block_on(async {
            let client = server.client();
            let thick = [("allocation", "thick")];
            let id = client.create("raw", SIZE, block(), &thick).await.unwrap();
            let raw = Volume::of(&scratch, "raw", id, block());
            raw.up(&client).await;
            assert!(fill(&raw.target, 5));
            let devices = run("dmsetup", &["ls"]);
            for mode in ["kill", "kill-after"] {
                let fault = format!("effect.rewrite:{mode}");
                server.restart_with(&[("SLACKWATER_FAULT", &fault)]);
                let grown = server.client().expand(&raw.id, 2 * SIZE).await;
                grown.expect_err(&fault);
                server.wait();
                server.restart();
                assert_eq!(run("dmsetup", &["ls"]), devices, "{fault}");
                assert_eq!(length(&raw.target), SIZE, "{fault}");
                let blocks = if mode == "kill" { SIZE } else { SIZE + STEP };
                assert_eq!(mapped_bytes(), [blocks], "{fault}");
            }
            server.restart_with(&[("SLACKWATER_FAULT", "effect.rewrite:error=EIO")]);
            let grown = server.client().expand(&raw.id, 2 * SIZE).await;
            grown.expect_err("an error of the disk");
            assert_eq!(mapped_bytes(), [SIZE], "the growth gave its blocks back");
            server.restart();
            let client = server.client();
            let granted = client.expand(&raw.id, 2 * SIZE).await.unwrap();
            assert_eq!((granted, mapped_bytes()), (2 * SIZE, vec![2 * SIZE]));
            client.expand_node(&raw.id, &raw.target).await.unwrap();
            assert_eq!(length(&raw.target), 2 * SIZE);
            assert!(is_filled(&raw.target, 5));
            raw.down(&client).await;
            client.delete(&raw.id).await.unwrap();
        });
        end_pool(server);
    });
}

/// Writes to each block of a thin pool that a device has, in an order that is not theirs.
fn write_each_block(device: &Path) {
    const BLOCK: u64 = 64 << 10;
    let device = OpenOptions::new().write(true).open(device).unwrap();
    for n in 0..SIZE / BLOCK {
        // A prime, so each block comes once.
        let at = n * 389 % (SIZE / BLOCK) * BLOCK;
        device.write_all_at(&[n as u8; 4096], at).unwrap();
        if n % 100 == 0 {
            device.sync_all().unwrap();
        }
    }
    device.sync_all().unwrap();
}

/// The bytes of metadata that the thin pool uses.
fn metadata_used() -> u64 {
    let status = run("dmsetup", &["status", "slackwater--vg-thin"]);
    let used = status.split_whitespace().nth(4).unwrap();
    4096 * used.split('/').next().unwrap().parse::<u64>().unwrap()
}

#[test]
fn thick_volumes_and_their_snapshots_take_no_more_metadata_than_is_reserved() {
    let test =
        "guest_thick::thick_volumes_and_their_snapshots_take_no_more_metadata_than_is_reserved";
    in_guest(test, &DISKS, || {
        create_pool("896M");
        let scratch = Scratch::new();
        let server = Server::start(&scratch, &[KEEPS_PROMISES]);
        runtime().block_on(async {
            let client = server.client();
            let before = metadata_used();
            let thick = [("allocation", "thick")];
            let id = client.create("raw", SIZE, block(), &thick).await.unwrap();
            let raw = Volume::of(&scratch, "raw", id, block());
            raw.up(&client).await;
            let mut maps = 1;
            for name in ["a", "b", "c", "d"] {
                client.snapshot(name, &raw.id, &[]).await.unwrap();
                write_each_block(&raw.target);
                maps += 1;
                let used = metadata_used() - before;
                let [least, most] =
                    [MIN_PER_MAPPING, MAX_PER_MAPPING].map(|each| maps * (SIZE >> 16) * each);
                println!("{maps} maps have {used} bytes of metadata");
                assert!(used >= least, "{used} of {least}");
                assert!(used <= most + maps * MAX_PER_MAP, "{used} of {most}");
            }
            raw.down(&client).await;
        });
        end_pool(server);
    });
}
