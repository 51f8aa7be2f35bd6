//! Pools of LVM that are away, renamed, or whose records cannot be written: volumes in use can be
//! unmounted, no pool counts as absent, and each is served again by itself.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and writes files"
)]

use std::fs;
use std::path::{Path, PathBuf};

use slackwater_testkit::guest::in_guest;
use slackwater_testkit::{Client, Scratch, Server, mount, run};

use crate::guest_lvm::{DISKS, POOL, Volume, create_pool, end, end_pool, runtime, until};
use crate::guest_pool::slackwater;

const MAPPED: &str = "slackwater--vg-thin";
const MIB: u64 = 1 << 20;

/// The source of the mount at a path.
fn source_of(at: &Path) -> PathBuf {
    let table = fs::read_to_string("/proc/mounts").unwrap();
    let mut lines = table.lines().map(|line| line.split(' '));
    lines
        .find_map(|mut words| {
            let source = words.next()?;
            (words.next()? == at.to_str()?).then(|| source.into())
        })
        .unwrap()
}

/// Lets the file system of the pool's records become read-only, as after an error of its disk.
fn break_records() {
    let mut folders = fs::read_dir("/run/slackwater/pools").unwrap();
    let folder = folders.next().unwrap().unwrap().path();
    let target = folder.to_str().unwrap();
    run("mount", &["-o", "remount,errors=remount-ro", target]);
    let device = source_of(&folder);
    let device = fs::canonicalize(device).unwrap();
    let name = device.file_name().unwrap().to_str().unwrap();
    let trigger = format!("/sys/fs/ext4/{name}/trigger_fs_error");
    fs::write(trigger, "tests/guest").unwrap();
}

async fn is_served(client: &Client) -> bool {
    let made = client.create("probe", MIB, mount("ext4"), &[]).await;
    let id = made.as_ref().cloned().unwrap_or_default();
    made.is_ok() && client.delete(&id).await.is_ok()
}

#[test]
fn records_that_became_read_only_are_mounted_again() {
    let test = "guest_outage::records_that_became_read_only_are_mounted_again";
    in_guest(test, &DISKS, || {
        create_pool("640M");
        let scratch = Scratch::new();
        let server = Server::start(&scratch, &[POOL]);
        runtime().block_on(async {
            let client = server.client();
            let id = client.create("files", 64 * MIB, mount("ext4"), &[]).await;
            let volume = Volume::of(&scratch, "files", id.unwrap(), mount("ext4"));
            volume.up(&client).await;
            break_records();
            assert!(!is_served(&client).await);
            until("the pool is served again", || is_served(&client)).await;
            volume.down(&client).await;
            client.delete(&volume.id).await.unwrap();
        });
        end_pool(server);
    });
}

#[test]
fn volumes_are_unmounted_while_their_pool_is_away_or_renamed() {
    let test = "guest_outage::volumes_are_unmounted_while_their_pool_is_away_or_renamed";
    in_guest(test, &DISKS, || {
        create_pool("640M");
        let scratch = Scratch::new();
        let server = Server::start(&scratch, &[POOL]);
        let volume = runtime().block_on(async {
            let client = server.client();
            let id = client.create("files", 128 * MIB, mount("btrfs"), &[]).await;
            let volume = Volume::of(&scratch, "files", id.unwrap(), mount("btrfs"));
            volume.up(&client).await;
            run("vgrename", &["slackwater-vg", "renamed"]);
            volume.down(&client).await;
            run("vgrename", &["renamed", "slackwater-vg"]);
            until("the pool is served again", || is_served(&client)).await;
            volume.up(&client).await;
            volume
        });
        end(server);

        let status = run("dmsetup", &["status", MAPPED]);
        let id = status.split_whitespace().nth(3).unwrap();
        let set = |from: &str, to: &str| {
            let message = format!("set_transaction_id {from} {to}");
            run("dmsetup", &["message", MAPPED, "0", &message]);
        };
        set(id, "5");
        let server = Server::start(&scratch, &[POOL]);
        runtime().block_on(async {
            let client = server.client();
            assert!(!is_served(&client).await);
            let refused = slackwater(&["pool", "forget", "default"], &scratch);
            assert!(refused.contains("its transaction ID is 5"), "{refused}");
            volume.down(&client).await;
            set("5", id);
            until("the pool is served again", || is_served(&client)).await;
            client.delete(&volume.id).await.unwrap();
        });
        end_pool(server);
    });
}
