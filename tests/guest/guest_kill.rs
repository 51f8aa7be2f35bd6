//! The driver on a thin pool of LVM, killed with SIGKILL at its effects on devices and records.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and reads devices"
)]

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use slackwater_testkit::guest::in_guest;
use slackwater_testkit::snapshots::{from_snapshot, members};
use slackwater_testkit::{Client, Scratch, Server, block, mount, run};
use tonic::{Code, Status};

use crate::guest_lvm::{
    DISKS, POOL, Volume, create_pool, created, end_pool, read_at, runtime, write_at,
};
use crate::guest_pool::slackwater;

const MIB: u64 = 1 << 20;
const KEEPS_PROMISES: &str = "default=lvm:slackwater-vg/thin,init,rawBlock=unfiltered";
/// The effects of a pool's start and of [`life`]. The driver is killed before the first one of each.
#[rustfmt::skip]
const EFFECTS: &[&str] = &[
    "make_dir", "write_file", "sync_file", "sync_dir", "rename", "remove_file", "remove_dir",
    "discard", "forbid_discard", "format", "grow_fs", "make_target", "remove_target",
    "mount", "bind", "bind_device", "unmount", "create_thin", "create_snap",
    "delete_thin", "set_transaction_id", "create_mapped", "load_table", "resume_mapped",
    "remove_mapped", "write_blocks", "fill_with_zeros", "rewrite", "guard_begin", "guard_sync",
    "guard_freeze", "guard_thaw", "guard_written",
];

/// The number of the device that is mounted at a target.
fn shown(target: &Path) -> Option<u64> {
    let found = fs::metadata(target).ok()?;
    found.file_type().is_block_device().then(|| found.rdev())
}

#[test]
fn a_target_whose_driver_was_killed_never_shows_the_volume_of_another_tenant() {
    let test =
        "guest_kill::a_target_whose_driver_was_killed_never_shows_the_volume_of_another_tenant";
    in_guest(test, &DISKS, || {
        create_pool("640M");
        let scratch = Scratch::new();
        let mut server = Server::start(&scratch, &[POOL]);
        runtime().block_on(async {
            let first = created(&scratch, &server.client(), "first", block()).await;
            let second = created(&scratch, &server.client(), "second", block()).await;
            let gate = scratch.join("gate");
            for fault in [
                "unmount:kill",
                "unmount:kill-after",
                "remove_mapped:kill-after",
            ] {
                first.up(&server.client()).await;
                write_at(&first.target, 0, 1);
                // No process has the device open until the driver runs again.
                let faults = format!("effect.{fault},effect.all:after={}", gate.display());
                server.restart_with(&[("SLACKWATER_FAULT", &faults)]);
                fs::write(&gate, "").unwrap();
                let client = server.client();
                first.try_down(&client).await.expect_err(fault);
                assert_eq!(server.wait(), None, "{fault}");
                fs::remove_file(&gate).unwrap();
                server.restart();
                second.up(&server.client()).await;
                write_at(&second.target, 0, 2);
                if let Some(number) = shown(&first.target) {
                    assert_ne!(Some(number), shown(&second.target), "{fault}");
                    assert_eq!(read_at(&first.target, 0), 1, "{fault}");
                }
                second.down(&server.client()).await;
                first.down(&server.client()).await;
            }
            // Another program removes the device while no driver runs.
            first.up(&server.client()).await;
            server.kill();
            let devices = run("dmsetup", &["ls", "--target", "thin"]);
            let of_first = |line: &&str| line.contains(first.id.split_once('.').unwrap().1);
            let device = devices.lines().find(of_first).unwrap();
            run("dmsetup", &["remove", device.split('\t').next().unwrap()]);
            server.restart();
            second.up(&server.client()).await;
            assert_ne!(shown(&first.target), shown(&second.target), "reused");
            for volume in [first, second] {
                volume.down(&server.client()).await;
                server.client().delete(&volume.id).await.unwrap();
            }
        });
        end_pool(server);
    });
}

/// A driver that is killed before each effect of a list, once.
struct Killed {
    server: Server,
    log: PathBuf,
    left: BTreeSet<&'static str>,
    seen: BTreeSet<String>,
}

impl Killed {
    /// Starts the driver until it serves.
    async fn start(&mut self) {
        loop {
            let kills = self.left.iter().map(|name| format!("effect.{name}:kill,"));
            let log = format!("effect.all:log={}", self.log.display());
            let faults = kills.collect::<String>() + &log;
            self.server.respawn_with(&[("SLACKWATER_FAULT", &faults)]);
            while self.server.is_alive() {
                if self.server.client().is_ready().await {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            self.note_death();
        }
    }

    /// Notes which effects have begun; the last one was not performed.
    fn note_death(&mut self) {
        let text = fs::read_to_string(&self.log).unwrap();
        let begun = text.lines().filter_map(|line| line.split(' ').nth(1));
        self.seen.extend(begun.clone().map(str::to_string));
        let last = begun.rev().find(|name| self.left.contains(name));
        let last = last.unwrap_or_else(|| panic!("it died by itself\n{}", self.server.log()));
        self.left.remove(last);
        fs::remove_file(&self.log).unwrap();
    }

    /// Repeats a call until it succeeds, and starts the driver after each death.
    async fn done<T>(&mut self, what: &str, call: impl AsyncFn(Client) -> Result<T, Status>) -> T {
        for _ in 0..600 {
            let refused = match call(self.server.client()).await {
                Ok(value) => return value,
                Err(refused) => refused,
            };
            // The connection ends before the process does.
            tokio::time::sleep(Duration::from_millis(50)).await;
            if !self.server.is_alive() {
                self.note_death();
                self.start().await;
                continue;
            }
            let is_temporary = matches!(refused.code(), Code::Aborted | Code::Unavailable);
            let is_cut_off = std::error::Error::source(&refused).is_some();
            assert!(is_temporary || is_cut_off, "{what}: {refused}");
        }
        panic!("{what} never succeeds");
    }
}

/// Volumes are created, used, cut, restored, grown and deleted.
async fn life(driver: &mut Killed, scratch: &Scratch) {
    let mut volumes = Vec::new();
    let kinds = [
        ("raw", block(), ("wipe", "none")),
        ("files", mount("ext4"), ("wipe", "discard")),
        ("thick", block(), ("allocation", "thick")),
    ];
    for (name, how, class) in kinds {
        let create =
            async |client: Client| client.create(name, 32 * MIB, how.clone(), &[class]).await;
        let id = driver.done(name, create).await;
        let volume = Volume::of(scratch, name, id, how.clone());
        driver
            .done(name, async |client| volume.try_up(&client).await)
            .await;
        volumes.push(volume);
    }
    let [raw, files, thick] = &volumes[..] else {
        unreachable!()
    };
    write_at(&raw.target, 0, 1);
    write_at(&thick.target, 0, 2);
    fs::write(files.target.join("data"), "written").unwrap();
    let ids: Vec<String> = volumes.iter().map(|volume| volume.id.clone()).collect();
    let cut = async |client: Client| client.group("cut", &ids, &[]).await;
    let group = driver.done("cut", cut).await;
    write_at(&raw.target, 0, 3);

    for volume in [files, thick] {
        let grow = async |client: Client| client.expand(&volume.id, 64 * MIB).await;
        driver.done("grow", grow).await;
        let grow = async |client: Client| client.expand_node(&volume.id, &volume.target).await;
        driver.done("grow on the node", grow).await;
    }
    assert_eq!(read_at(&raw.target, 0), 3);
    assert_eq!(read_at(&thick.target, 0), 2);
    let mut copies = Vec::new();
    let snapshots = members(&group);
    for (n, snapshot) in snapshots.iter().enumerate().take(2) {
        let how = volumes[n].how.clone();
        let name = format!("copy-{n}");
        let create = async |client: Client| {
            let source = from_snapshot(snapshot);
            let made = client.create_from(&name, 64 * MIB, how.clone(), source, &[]);
            made.await
        };
        let id = driver.done("restore", create).await.volume_id;
        let copy = Volume::of(scratch, &name, id, how.clone());
        driver
            .done("stage", async |client| copy.try_up(&client).await)
            .await;
        copies.push(copy);
    }
    assert_eq!(read_at(&copies[0].target, 0), 1);
    let read = fs::read_to_string(copies[1].target.join("data")).unwrap();
    assert_eq!(read, "written");

    for volume in volumes.iter().chain(&copies) {
        driver
            .done("unstage", async |client| volume.try_down(&client).await)
            .await;
        driver
            .done("delete", async |client| client.delete(&volume.id).await)
            .await;
    }
    let delete = async |client: Client| {
        let id = &group.group_snapshot_id;
        client.delete_group(id, &snapshots).await
    };
    driver.done("delete the group", delete).await;
}

#[test]
fn a_driver_that_is_killed_at_each_kind_of_effect_completes_every_call_and_leaves_nothing() {
    let test = "guest_kill::a_driver_that_is_killed_at_each_kind_of_effect_completes_every_call_and_leaves_nothing";
    in_guest(test, &DISKS, || {
        create_pool("640M");
        let scratch = Scratch::new();
        let log = scratch.join("effects");
        // The first faults are of this start.
        let server = Server::spawn(
            &scratch,
            &[KEEPS_PROMISES],
            &[],
            &[("SLACKWATER_FAULT", "effect.1:kill")],
        );
        let mut driver = Killed {
            server,
            log,
            left: EFFECTS.iter().copied().collect(),
            seen: BTreeSet::new(),
        };
        runtime().block_on(async {
            driver.start().await;
            life(&mut driver, &scratch).await;
            let listed = driver.server.client().list().await.unwrap();
            assert_eq!(listed, Vec::<String>::new());
        });
        let listed = slackwater(&["volumes"], &scratch);
        assert!(!listed.contains("thin device"), "{listed}");
        assert_eq!(driver.left, BTreeSet::new(), "they do not occur");
        // What a start does for a session whose guard is slow to end.
        driver.seen.retain(|name| !name.starts_with("sweep_"));
        let seen: Vec<&str> = driver.seen.iter().map(String::as_str).collect();
        let unlisted: Vec<_> = seen.iter().filter(|name| !EFFECTS.contains(name)).collect();
        assert!(unlisted.is_empty(), "not killed at: {unlisted:?}");
        end_pool(driver.server);
    });
}
