//! Metadata of a thin pool that has lost its transaction ID, and a full thin pool that LVM extends
//! while it is in use.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and writes files"
)]

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Child, Command};

use nix::libc;
use slackwater_testkit::guest::{in_guest, in_guest_with};
use slackwater_testkit::{Scratch, Server, block, eventually, mount, run};

use tonic::Code;

use crate::guest_lvm::{
    AUTOACTIVATE, DISKS, POOL, configure_as_distributions, create_pool, created, end, end_pool,
    release, restore, runtime,
};
use crate::guest_pool::slackwater;

const MIB: u64 = 1 << 20;
const PLACE: &str = "slackwater-vg/thin";
const MAPPED: &str = "slackwater--vg-thin";

/// Exchanges the metadata of the inactive pool with the logical volume `copy`.
fn swap_metadata() {
    let other = ["--poolmetadata", "slackwater-vg/copy"];
    let pool = ["--yes", "--thinpool", PLACE];
    run("lvconvert", &[&pool[..], &other[..]].concat());
}

/// Writes the metadata again with the transaction ID 0 and everything else as it is.
fn lose_transaction_id() {
    run("lvchange", &["--activate", "n", PLACE]);
    let copy = ["--yes", "--size", "8M", "--name", "copy", "slackwater-vg"];
    run("lvcreate", &copy);
    swap_metadata();
    run("lvchange", &["--activate", "y", "slackwater-vg/copy"]);
    let device = "/dev/slackwater-vg/copy";
    let text = run("thin_dump", &[device]);
    let was = "transaction=\"8317129691479110770\"";
    assert!(text.contains(was), "{text}");
    let file = "/run/metadata.xml";
    fs::write(file, text.replacen(was, "transaction=\"0\"", 1)).unwrap();
    run("thin_restore", &["--input", file, "--output", device]);
    run("lvchange", &["--activate", "n", "slackwater-vg/copy"]);
    swap_metadata();
    run("lvchange", &["--activate", "y", PLACE]);
}

#[test]
fn metadata_without_its_transaction_id_is_refused_with_the_way_back() {
    let test = "guest_repair::metadata_without_its_transaction_id_is_refused_with_the_way_back";
    in_guest(test, &DISKS, || {
        create_pool("640M");
        let scratch = Scratch::new();
        let server = Server::start(&scratch, &[POOL]);
        let (volume, snapshot) = runtime().block_on(async {
            let client = server.client();
            let volume = created(&scratch, &client, "a", mount("ext4")).await;
            volume.up(&client).await;
            fs::write(volume.target.join("data"), "kept").unwrap();
            let snapshot = client.snapshot("s", &volume.id, &[]).await.unwrap();
            volume.down(&client).await;
            (volume, snapshot.snapshot_id)
        });
        end(server);
        release();
        lose_transaction_id();
        let before = run("dmsetup", &["status", MAPPED]);

        let server = Server::spawn(&scratch, &[POOL], &[], &[]);
        // A pool that was never used has this transaction ID too, so `init` must not take it.
        let way_back = "set_transaction_id 0 8317129691479110770";
        eventually("the pool is refused", || server.log().contains(way_back));
        let refused = server.log();
        assert!(
            refused.contains("this machine had the pool in slackwater-vg/thin"),
            "{refused}"
        );
        assert_eq!(run("dmsetup", &["status", MAPPED]), before);

        run("dmsetup", &["message", MAPPED, "0", way_back]);
        runtime().block_on(async {
            let client = server.client();
            let start = std::time::Instant::now();
            while client.list().await.is_err() {
                assert!(start.elapsed() < slackwater_testkit::WAIT_TIMEOUT);
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            }
            let listed = client.list().await.unwrap();
            assert_eq!(listed, std::slice::from_ref(&volume.id));
            let copy = restore(&scratch, &client, &snapshot, mount("ext4")).await;
            for one in [&volume, &copy] {
                one.up(&client).await;
                let read = fs::read_to_string(one.target.join("data")).unwrap();
                assert_eq!(read, "kept");
                one.down(&client).await;
            }
        });
        end_pool(server);
    });
}

/// Writes the first 64 MiB without the page cache; returns whether all writes succeeded.
fn fill(device: &Path) -> bool {
    const BLOCK: u64 = 256 << 10;
    #[repr(align(4096))]
    struct Block([u8; BLOCK as usize]);
    let file = OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(device)
        .unwrap();
    let block = Block([7; BLOCK as usize]);
    let mut each = (0..64 * MIB / BLOCK).map(|at| file.write_all_at(&block.0, at * BLOCK));
    each.all(|written| written.is_ok()) && file.sync_all().is_ok()
}

#[test]
fn a_full_pool_needs_only_to_be_extended() {
    let test = "guest_repair::a_full_pool_needs_only_to_be_extended";
    in_guest(test, &DISKS, || {
        create_pool("320M");
        let scratch = Scratch::new();
        let server = Server::start(&scratch, &[POOL]);
        runtime().block_on(async {
            let client = server.client();
            let volume = created(&scratch, &client, "raw", block()).await;
            volume.up(&client).await;
            assert!(!fill(&volume.target));
            let status = run("dmsetup", &["status", MAPPED]);
            assert!(status.contains("out_of_data_space"), "{status}");

            // The volume stays in use, and the driver is not started again.
            run("lvextend", &["--size", "+128M", PLACE]);
            assert!(fill(&volume.target));
            let class = [("consistency", "crash")];
            let cut = client.snapshot("cut", &volume.id, &class).await.unwrap();
            volume.down(&client).await;
            client.delete_snapshot(&cut.snapshot_id).await.unwrap();
            client.delete(&volume.id).await.unwrap();
        });
        end_pool(server);
    });
}

/// The number in eight bytes of a block of the metadata.
fn number_at(metadata: &fs::File, block: u64, at: u64) -> u64 {
    let mut bytes = [0; 8];
    metadata
        .read_exact_at(&mut bytes, block * 4096 + at)
        .unwrap();
    u64::from_le_bytes(bytes)
}

/// Overwrites the root of the map of a thin device, in the metadata of the inactive pool.
fn damage_map_of(id: u64) {
    const COPY: &str = "/dev/slackwater-vg/copy";
    // drivers/md/dm-thin-metadata.c: struct thin_disk_superblock.
    const MAP_ROOT: u64 = 320;
    // persistent-data/dm-btree-internal.h: struct node_header, and the keys behind it.
    const MAX_ENTRIES: u64 = 20;
    const KEYS: u64 = 32;
    let copy = ["--yes", "--size", "8M", "--name", "copy", "slackwater-vg"];
    run("lvcreate", &copy);
    swap_metadata();
    run("lvchange", &["--activate", "y", "slackwater-vg/copy"]);
    let mut options = OpenOptions::new();
    let metadata = options.read(true).write(true).open(COPY).unwrap();
    let root = number_at(&metadata, 0, MAP_ROOT);
    let [entries, most] = [MAX_ENTRIES - 4, MAX_ENTRIES]
        .map(|at| number_at(&metadata, root, at) & u64::from(u32::MAX));
    let place = (0..entries)
        .find(|n| number_at(&metadata, root, KEYS + n * 8) == id)
        .expect("the device has a map");
    let map = number_at(&metadata, root, KEYS + (most + place) * 8);
    metadata.write_all_at(&[0xa5; 4096], map * 4096).unwrap();
    metadata.sync_all().unwrap();
    drop(metadata);
    run("lvchange", &["--activate", "n", "slackwater-vg/copy"]);
    swap_metadata();
}

#[test]
fn a_repair_that_loses_a_thin_device_is_reported_and_nothing_is_deleted() {
    let test = "guest_repair::a_repair_that_loses_a_thin_device_is_reported_and_nothing_is_deleted";
    in_guest(test, &DISKS, || {
        create_pool("640M");
        let scratch = Scratch::new();
        let server = Server::start(&scratch, &[POOL]);
        let (kept, lost) = runtime().block_on(async {
            let client = server.client();
            let kept = created(&scratch, &client, "kept", mount("ext4")).await;
            let lost = created(&scratch, &client, "lost", mount("ext4")).await;
            for volume in [&kept, &lost] {
                volume.up(&client).await;
                fs::write(volume.target.join("data"), "kept").unwrap();
                volume.down(&client).await;
            }
            (kept, lost)
        });
        end(server);
        release();
        run("lvchange", &["--activate", "n", PLACE]);
        // The header, the records, `kept`, and then `lost`.
        damage_map_of(4);
        run("lvconvert", &["--yes", "--repair", PLACE]);
        run("lvchange", &["--activate", "y", PLACE]);

        let server = Server::start(&scratch, &[POOL]);
        runtime().block_on(async {
            let client = server.client();
            kept.up(&client).await;
            let read = fs::read_to_string(kept.target.join("data")).unwrap();
            assert_eq!(read, "kept");
            kept.down(&client).await;
            let listed = slackwater(&["volumes"], &scratch);
            let uuid = lost.id.split_once('.').unwrap().1;
            let problem = "its thin device 4 had a file system and has no block";
            assert!(listed.contains(problem), "{listed}");
            assert_eq!(listed.matches("thin device").count(), 1, "{listed}");
            let staging = scratch.join("kubelet/lost.staging");
            let refused = client.stage(&lost.id, &staging, mount("ext4")).await;
            let refused = refused.unwrap_err();
            assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
            // An administrator decides.
            client.delete(&lost.id).await.unwrap();
            assert!(!slackwater(&["volumes"], &scratch).contains(uuid));
        });
        end_pool(server);
    });
}

/// A program that ends with the test.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_pool_that_dmeventd_extends_serves_without_a_pause() {
    let test = "guest_repair::a_pool_that_dmeventd_extends_serves_without_a_pause";
    in_guest_with(&AUTOACTIVATE, test, &DISKS, || {
        configure_as_distributions();
        let wanted = "activation {\n monitoring = 1\n thin_pool_autoextend_threshold = 60\n thin_pool_autoextend_percent = 40\n}\n";
        fs::write("/etc/lvm/lvmlocal.conf", wanted).unwrap();
        create_pool("320M");
        let _daemon = Daemon(Command::new("dmeventd").arg("-f").spawn().unwrap());
        run("lvchange", &["--monitor", "y", PLACE]);
        let scratch = Scratch::new();
        let server = Server::start(&scratch, &[POOL]);
        runtime().block_on(async {
            let client = server.client();
            let volume = created(&scratch, &client, "raw", block()).await;
            volume.up(&client).await;
            let blocks = || {
                let status = run("dmsetup", &["status", MAPPED]);
                let used = status.split_whitespace().nth(5).unwrap();
                let (_, total) = used.split_once('/').unwrap();
                total.parse::<u64>().unwrap()
            };
            let before = blocks();
            let _ = fill(&volume.target);
            eventually("dmeventd extends the pool", || blocks() > before);
            let class = [("consistency", "crash")];
            let cut = client.snapshot("cut", &volume.id, &class).await.unwrap();
            assert!(fill(&volume.target));
            volume.down(&client).await;
            client.delete_snapshot(&cut.snapshot_id).await.unwrap();
            client.delete(&volume.id).await.unwrap();
        });
        run("lvchange", &["--monitor", "n", PLACE]);
        end_pool(server);
    });
}
