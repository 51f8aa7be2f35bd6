//! The thin pools and mapped devices of the real host, on a pool that LVM has created.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and writes files"
)]

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use nix::errno::Errno;
use slackwater::host::linux::LinuxHost;
use slackwater::host::{
    Effect, Host, MappedDevice, Piece, Result, ThinMessage, ThinPoolMode, ThinSnapshot, ThinTable,
};
use slackwater_testkit::guest::{self, in_guest};
use slackwater_testkit::run;
use slackwater_testkit::thin_rules::Rules;

const MIB: u64 = 1 << 20;
const DISKS: [&str; 1] = ["pool:512M"];
/// Device mapper's name for the pool `thin` of the group `slackwater-vg`.
const POOL: &str = "slackwater--vg-thin";
const ONE: &str = "SLACKWATER-default-one";
const TWO: &str = "SLACKWATER-default-two";

fn create_pool() -> LinuxHost {
    let disk = guest::disk("pool");
    run("vgcreate", &["slackwater-vg", &disk]);
    let size = [
        "--size",
        "256M",
        "--poolmetadatasize",
        "8M",
        "--chunksize",
        "64k",
    ];
    let named = ["--type", "thin-pool", "--name", "thin", "slackwater-vg"];
    run("lvcreate", &[&size[..], &named[..]].concat());
    run("lvchange", &["--errorwhenfull", "y", "slackwater-vg/thin"]);
    LinuxHost::new(vec![PathBuf::from("/tmp")])
}

fn send(host: &LinuxHost, message: ThinMessage) -> Result<()> {
    let pool = POOL;
    host.perform(&Effect::ThinMessage { pool, message })
        .map(drop)
}

/// Creates a snapshot of a thin device.
fn snapshot(host: &LinuxHost, id: u32, origin: u32) -> Result<()> {
    let snapshot = ThinSnapshot {
        pool: POOL.into(),
        rdev: host.thin_pool(POOL)?.unwrap().rdev,
        id,
        origin,
    };
    let prepared = &host.prepare_thin_snapshot(snapshot)?;
    host.perform(&Effect::CreateThinSnapshot { prepared })
        .map(drop)
}

fn load(host: &LinuxHost, uuid: &str, id: u32, bytes: u64) -> Result<()> {
    let table = &ThinTable {
        pool: POOL.into(),
        id,
        bytes,
    };
    let read_only = false;
    host.perform(&Effect::LoadTable {
        uuid,
        table,
        read_only,
    })?;
    host.perform(&Effect::ResumeMapped { uuid }).map(drop)
}

fn activate(host: &LinuxHost, uuid: &str, id: u32, bytes: u64) -> PathBuf {
    host.perform(&Effect::CreateMapped { uuid }).unwrap();
    load(host, uuid, id, bytes).unwrap();
    find(host, uuid).unwrap().device.path
}

/// Suspends a mapped device, as another program does.
pub(crate) fn suspend(uuid: &str) {
    run("dmsetup", &["suspend", "--nolockfs", "--uuid", uuid]);
}

fn find(host: &LinuxHost, uuid: &str) -> Option<MappedDevice> {
    let found = host.mapped_devices(POOL, "SLACKWATER-").unwrap();
    found.into_iter().find(|device| device.uuid == uuid)
}

fn errno<T: std::fmt::Debug>(result: Result<T>) -> Option<Errno> {
    result.unwrap_err().code()
}

fn write(path: &PathBuf, at: u64, byte: u8) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(&[byte; 4096], at).unwrap();
    file.sync_all().unwrap();
}

fn first_byte(path: &PathBuf) -> u8 {
    let mut byte = [0];
    let file = fs::File::open(path).unwrap();
    file.read_exact_at(&mut byte, 0).unwrap();
    byte[0]
}

#[test]
fn thin_devices_are_created_and_deleted_once() {
    in_guest(
        "guest_thin_host::thin_devices_are_created_and_deleted_once",
        &DISKS,
        || {
            let host = create_pool();
            let status = host.thin_pool(POOL).unwrap().unwrap();
            assert_eq!(status.mode, ThinPoolMode::ReadWrite);
            assert_eq!((status.transaction_id, status.block_bytes), (0, 64 << 10));
            assert_eq!((status.data.used, status.data.total), (0, 256 * MIB));
            assert!(status.errors_when_full && status.zeroes_blocks);
            assert!(!status.needs_check && !status.holds_metadata);
            assert!(host.thin_pool("slackwater--vg-absent").unwrap().is_none());

            send(&host, ThinMessage::CreateThin { id: 7 }).unwrap();
            assert_eq!(
                errno(send(&host, ThinMessage::CreateThin { id: 7 })),
                Some(Errno::EEXIST)
            );
            assert_eq!(errno(snapshot(&host, 8, 9)), Some(Errno::ENODATA));
            assert_eq!(
                errno(send(&host, ThinMessage::Delete { id: 9 })),
                Some(Errno::ENODATA)
            );
            let claim = ThinMessage::SetTransactionId {
                from: 0,
                to: 1 << 40,
            };
            send(&host, claim).unwrap();
            assert_eq!(errno(send(&host, claim)), Some(Errno::EINVAL));
            assert_eq!(
                host.thin_pool(POOL).unwrap().unwrap().transaction_id,
                1 << 40
            );

            let path = activate(&host, ONE, 7, 32 * MIB);
            write(&path, 0, 1);
            write(&path, 5 * MIB, 1);
            let devices = host.thin_devices(POOL).unwrap();
            assert_eq!(devices.into_iter().collect::<Vec<_>>(), [(7, 128 << 10)]);
            assert!(!host.thin_pool(POOL).unwrap().unwrap().holds_metadata);
            assert_eq!(
                errno(send(&host, ThinMessage::Delete { id: 7 })),
                Some(Errno::EBUSY)
            );

            host.perform(&Effect::RemoveMapped { uuid: ONE }).unwrap();
            host.perform(&Effect::RemoveMapped { uuid: ONE }).unwrap();
            send(&host, ThinMessage::Delete { id: 7 }).unwrap();
            assert!(host.thin_devices(POOL).unwrap().is_empty());
        },
    );
}

#[test]
fn a_snapshot_needs_an_origin_that_is_suspended() {
    in_guest(
        "guest_thin_host::a_snapshot_needs_an_origin_that_is_suspended",
        &DISKS,
        || {
            let host = create_pool();
            send(&host, ThinMessage::CreateThin { id: 1 }).unwrap();
            let path = activate(&host, ONE, 1, 32 * MIB);
            write(&path, 0, 1);
            let refused = format!("{:?}", snapshot(&host, 2, 1).unwrap_err());
            assert!(refused.contains("is active on thin device 1"), "{refused}");

            suspend(ONE);
            assert!(find(&host, ONE).unwrap().suspended);
            snapshot(&host, 2, 1).unwrap();
            host.perform(&Effect::ResumeMapped { uuid: ONE }).unwrap();
            assert!(!find(&host, ONE).unwrap().suspended);
            write(&path, 0, 2);

            let copy = activate(&host, TWO, 2, 32 * MIB);
            assert_eq!((first_byte(&path), first_byte(&copy)), (2, 1));
        },
    );
}

#[test]
fn a_device_is_found_by_its_uuid_and_keeps_its_number_while_it_is_open() {
    let test =
        "guest_thin_host::a_device_is_found_by_its_uuid_and_keeps_its_number_while_it_is_open";
    in_guest(test, &DISKS, || {
        let host = create_pool();
        send(&host, ThinMessage::CreateThin { id: 1 }).unwrap();
        host.perform(&Effect::CreateMapped { uuid: ONE }).unwrap();
        assert_eq!(
            errno(host.perform(&Effect::CreateMapped { uuid: ONE })),
            Some(Errno::EBUSY)
        );
        assert!(find(&host, ONE).unwrap().table.is_none());
        // The kernel has registered no block device yet, so it has no node.
        assert!(host.hold_mapped(ONE).unwrap().is_none());
        assert_eq!(errno(load(&host, ONE, 3, MIB)), Some(Errno::ENODATA));
        load(&host, ONE, 1, 32 * MIB).unwrap();
        let found = find(&host, ONE).unwrap();
        let table = found.table.unwrap();
        assert_eq!((table.id, table.bytes), (1, 32 * MIB));
        assert_eq!(
            run(
                "dmsetup",
                &["info", "-c", "--noheadings", "-o", "name", "-u", ONE]
            )
            .trim(),
            ONE.to_lowercase()
        );

        let held = host.hold_mapped(ONE).unwrap().unwrap();
        assert_eq!(held.device, found.device);
        assert!(host.hold_mapped(TWO).unwrap().is_none());
        // It grows while it is open.
        load(&host, ONE, 1, 64 * MIB).unwrap();
        assert_eq!(host.device_bytes(&held.device).unwrap(), 64 * MIB);
        // And it exists until it is closed.
        host.perform(&Effect::RemoveMapped { uuid: ONE }).unwrap();
        assert!(find(&host, ONE).unwrap().deferred_remove);
        drop(held);
        run("udevadm", &["settle"]);
        assert!(find(&host, ONE).is_none());

        let path = activate(&host, ONE, 1, 32 * MIB);
        let claimed = host.claim_mapped(ONE).unwrap().unwrap();
        assert_eq!(errno(host.claim_mapped(ONE)), Some(Errno::EBUSY));
        assert_eq!(claimed.device.path, path);
    });
}

/// The extents of a snapshot that were written before it, and those in which it differs from its
/// origin, are those that the metadata of the pool names.
#[test]
fn the_extents_of_thin_devices_are_read_from_the_metadata() {
    let test = "guest_thin_host::the_extents_of_thin_devices_are_read_from_the_metadata";
    in_guest(test, &DISKS, || {
        const BLOCK: u64 = 64 << 10;
        let host = create_pool();
        send(&host, ThinMessage::CreateThin { id: 1 }).unwrap();
        let path = activate(&host, ONE, 1, 32 * MIB);
        for block in [0, 1, 2, 100, 300, 511] {
            write(&path, block * BLOCK, 1);
        }
        suspend(ONE);
        snapshot(&host, 2, 1).unwrap();
        host.perform(&Effect::ResumeMapped { uuid: ONE }).unwrap();
        for block in [1, 7, 511] {
            write(&path, block * BLOCK, 2);
        }
        let copy = activate(&host, TWO, 2, 32 * MIB);

        let map = |path: &PathBuf, from| {
            let extents = host.extents(path, from, 100).unwrap();
            let blocks = extents.into_iter().flat_map(|it| {
                (0..it.length / BLOCK)
                    .map(move |i| (it.logical / BLOCK + i, it.physical / BLOCK + i))
            });
            blocks.collect::<BTreeMap<u64, u64>>()
        };
        let (live, old) = (map(&path, 0), map(&copy, 0));
        assert_eq!(
            Vec::from_iter(old.keys().copied()),
            [0, 1, 2, 100, 300, 511]
        );
        assert_eq!(
            Vec::from_iter(live.keys().copied()),
            [0, 1, 2, 7, 100, 300, 511]
        );
        let differs = live
            .iter()
            .filter(|(block, data)| old.get(block) != Some(data));
        assert_eq!(
            Vec::from_iter(differs.map(|(block, _)| *block)),
            [1, 7, 511]
        );
        let rest = map(&copy, 100 * BLOCK + 5);
        assert_eq!(Vec::from_iter(rest.into_keys()), [100, 300, 511]);
        assert_eq!(host.extents(&copy, 0, 2).unwrap().len(), 2);
        assert!(!host.thin_pool(POOL).unwrap().unwrap().holds_metadata);
    });
}

#[test]
fn a_device_grows_while_its_file_system_is_frozen_and_does_not_thaw_it() {
    let test =
        "guest_thin_host::a_device_grows_while_its_file_system_is_frozen_and_does_not_thaw_it";
    in_guest(test, &DISKS, || {
        let host = create_pool();
        send(&host, ThinMessage::CreateThin { id: 1 }).unwrap();
        let path = activate(&host, ONE, 1, 32 * MIB);
        let device = find(&host, ONE).unwrap().device;
        run("mkfs.ext4", &["-q", path.to_str().unwrap()]);
        fs::create_dir("/run/grows").unwrap();
        run("mount", &[path.to_str().unwrap(), "/run/grows"]);

        run("fsfreeze", &["--freeze", "/run/grows"]);
        load(&host, ONE, 1, 64 * MIB).unwrap();
        assert_eq!(host.device_bytes(&device).unwrap(), 64 * MIB);
        // It is frozen once, and still is.
        run("fsfreeze", &["--unfreeze", "/run/grows"]);
        load(&host, ONE, 1, 96 * MIB).unwrap();
        assert_eq!(host.device_bytes(&device).unwrap(), 96 * MIB);
        run("umount", &["/run/grows"]);
    });
}

#[test]
fn the_kernel_has_the_rules_of_thin_pools_that_the_simulation_has() {
    let test = "guest_thin_host::the_kernel_has_the_rules_of_thin_pools_that_the_simulation_has";
    in_guest(test, &DISKS, || {
        let host = create_pool();
        let rules = Rules {
            host: &host,
            pool: POOL,
            suspend_device: &suspend,
            suspend: &|it| {
                run("dmsetup", &[if it { "suspend" } else { "resume" }, POOL]);
            },
        };
        rules.check();
    });
}

#[test]
fn zeros_free_whole_blocks_of_a_thin_device_and_overwrite_the_rest() {
    let test = "guest_thin_host::zeros_free_whole_blocks_of_a_thin_device_and_overwrite_the_rest";
    in_guest(test, &DISKS, || {
        const BLOCK: u64 = 64 << 10;
        let host = create_pool();
        send(&host, ThinMessage::CreateThin { id: 1 }).unwrap();
        let target = &activate(&host, ONE, 1, 32 * MIB);
        let write = |pieces: &[Piece], zeros: &[Range<u64>]| {
            let range = Effect::WriteRange {
                target,
                offset: 0,
                length: 32 * MIB,
                pieces,
                zeros,
            };
            host.perform(&range).unwrap();
            host.perform(&Effect::SyncFile { path: target }).unwrap();
        };
        let data = |offset: u64, bytes: u64| Piece {
            offset,
            bytes: vec![7; bytes as usize],
        };
        write(&[data(0, 8 * BLOCK)], &[]);
        assert_eq!(host.thin_devices(POOL).unwrap()[&1], 8 * BLOCK);
        // A part of the first block, two whole ones, and a part of the fourth one.
        let (start, end) = (4096, 3 * BLOCK + 8192);
        write(&[data(6 * BLOCK, 4096)], &[start..end, 20 * MIB..30 * MIB]);
        assert_eq!(host.thin_devices(POOL).unwrap()[&1], 6 * BLOCK);
        let found = host.read_range(target, 0, 32 * MIB).unwrap();
        assert_eq!(found, [data(0, start), data(end, 8 * BLOCK - end)]);
    });
}
