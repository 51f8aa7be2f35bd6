//! What happens to a thin pool over the years: volumes grow, metadata fills and is repaired, and the
//! volume group moves to another machine.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and writes files"
)]

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;

use nix::libc;
use slackwater_testkit::guest::{self, in_guest, in_guests};
use slackwater_testkit::snapshots::from_snapshot;
use slackwater_testkit::{Scratch, Server, binary, block, eventually, mount, run};
use tonic::Code;

use crate::guest_lvm::{
    DISKS, POOL, Volume, create_pool, create_pool_with, created, end, end_pool, read_at, release,
    restore, runtime,
};
use crate::guest_power::{self, STATE};

const MIB: u64 = 1 << 20;

#[test]
fn mounted_volumes_grow_while_they_are_used() {
    let test = "guest_pool::mounted_volumes_grow_while_they_are_used";
    in_guest(test, &DISKS, || {
        create_pool("640M");
        let scratch = Scratch::new();
        let server = Server::start(&scratch, &[POOL]);
        runtime().block_on(async {
            let client = server.client();
            for (kind, size) in [("ext4", 64 * MIB), ("xfs", 300 * MIB), ("btrfs", 128 * MIB)] {
                let id = client.create(kind, size, mount(kind), &[]).await.unwrap();
                let volume = Volume::of(&scratch, kind, id, mount(kind));
                volume.up(&client).await;
                let file = volume.target.join("data");
                fs::write(&file, kind).unwrap();
                let (before, _) = client.stats(&volume.id, &volume.target).await.unwrap();
                client.expand(&volume.id, 2 * size).await.unwrap();
                let grown = client
                    .expand_node(&volume.id, &volume.target)
                    .await
                    .unwrap();
                assert!(grown >= 2 * size, "{kind}: {grown}");
                let (after, _) = client.stats(&volume.id, &volume.target).await.unwrap();
                assert!(after > before + size / 2, "{kind}: {before} to {after}");
                assert_eq!(fs::read_to_string(&file).unwrap(), kind);
                volume.down(&client).await;
                volume.up(&client).await;
                assert_eq!(fs::read_to_string(&file).unwrap(), kind);
                volume.down(&client).await;
                client.delete(&volume.id).await.unwrap();
            }
        });
        end_pool(server);
    });
}

pub(crate) fn slackwater(arguments: &[&str], scratch: &Scratch) -> String {
    let mut command = Command::new(binary());
    command.args(arguments);
    command.arg("--node-record").arg(scratch.join("node.json"));
    let output = command.output().unwrap();
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    text
}

/// Writes one page to each of these blocks of 64 KiB; returns whether all writes succeeded.
fn touch(device: &Path, blocks: impl Iterator<Item = u64>) -> bool {
    #[repr(align(4096))]
    struct Page([u8; 4096]);
    let file = OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(device)
        .unwrap();
    let page = Page([7; 4096]);
    let mut each = blocks.map(|block| file.write_all_at(&page.0, block << 16));
    each.all(|written| written.is_ok()) && file.sync_all().is_ok()
}

/// Lets each write to the device of a pool's metadata fail while `work` runs.
fn fail_writes_of_metadata(device: &str, work: impl FnOnce()) {
    let table = run("dmsetup", &["table", device]);
    let failing: Vec<String> = table
        .lines()
        .map(|line| format!("{} 0 1 1 error_writes", line.replace("linear", "flakey")))
        .collect();
    let replace = |table: &str| {
        run("dmsetup", &["load", device, "--table", table]);
        run("dmsetup", &["suspend", "--nolockfs", "--noflush", device]);
        run("dmsetup", &["resume", device]);
    };
    replace(&failing.join("\n"));
    work();
    replace(table.trim());
}

/// Uses a volume whose blocks no snapshot shares while its pool is read-only: only new blocks need
/// metadata, and every block of the records is allocated.
fn use_mapped_blocks(server: &Server, volume: &Volume) {
    let written = || assert!(touch(&volume.target, 0..16), "{}", server.log());
    written();
    runtime().block_on(async {
        let client = server.client();
        volume.down(&client).await;
        volume.up(&client).await;
    });
    written();
}

#[test]
fn full_metadata_needs_lvextend_only_and_damaged_metadata_a_repair() {
    let test = "guest_pool::full_metadata_needs_lvextend_only_and_damaged_metadata_a_repair";
    in_guest(test, &DISKS, || {
        const BLOCKS: u64 = 4000;
        create_pool_with("700M", "2M");
        let scratch = Scratch::new();
        let server = Server::start(&scratch, &[POOL]);
        let (volume, other, mut snapshots) = runtime().block_on(async {
            let client = server.client();
            let id = client.create("raw", BLOCKS << 16, block(), &[]).await;
            let volume = Volume::of(&scratch, "raw", id.unwrap(), block());
            volume.up(&client).await;
            assert!(touch(&volume.target, 0..BLOCKS));
            let id = client.create("other", MIB, block(), &[]).await;
            let other = Volume::of(&scratch, "other", id.unwrap(), block());
            other.up(&client).await;
            assert!(touch(&other.target, 0..16));
            // After each snapshot, one write to each node of the tree copies that node.
            let class = [("consistency", "crash")];
            let mut snapshots = Vec::new();
            let refused = loop {
                let name = format!("s{}", snapshots.len());
                match client.snapshot(&name, &volume.id, &class).await {
                    Ok(made) => snapshots.push(made.snapshot_id),
                    Err(refused) => break refused,
                }
                assert!(touch(&volume.target, (0..BLOCKS).step_by(100)));
            };
            assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
            assert!(
                refused.message().contains("--poolmetadatasize"),
                "{refused}"
            );
            // What exists goes on, also deletions, until the writers fill the rest.
            let last = snapshots.pop().unwrap();
            client.delete_snapshot(&last).await.unwrap();
            (volume, other, snapshots)
        });
        // dmsetup takes what the driver refuses.
        let mapped = "slackwater--vg-thin";
        let device = run("dmsetup", &["ls", "--target", "thin"]);
        let device = device
            .lines()
            .find(|line| line.contains(volume.id.split_once('.').unwrap().1))
            .unwrap();
        let device = device.split_whitespace().next().unwrap().to_string();
        let fill = || {
            for id in 100_000..100_200 {
                run("dmsetup", &["suspend", "--nolockfs", &device]);
                let message = format!("create_snap {id} 3");
                let sent = Command::new("dmsetup")
                    .args(["message", mapped, "0", &message])
                    .output()
                    .unwrap();
                run("dmsetup", &["resume", &device]);
                if !sent.status.success() || !touch(&volume.target, (0..BLOCKS).step_by(50)) {
                    return;
                }
            }
            panic!("the metadata is never full");
        };
        fill();
        let refused_with = |advice: &str| {
            let refused = runtime().block_on(async {
                let client = server.client();
                client.create("more", MIB, mount("ext4"), &[]).await
            });
            let message = refused.unwrap_err().message().to_string();
            assert!(message.contains(advice), "{message}");
            message
        };
        let status = || run("dmsetup", &["status", mapped]);
        let full = status();
        assert!(
            full.contains(" ro ") && !full.contains("needs_check"),
            "{full}"
        );
        refused_with("its metadata is full; run: lvextend --poolmetadatasize +SIZE");
        use_mapped_blocks(&server, &other);
        let still = status();
        assert!(still.contains(" ro "), "{still}");
        let extend = ["--poolmetadatasize", "+4M", "slackwater-vg/thin"];
        run("lvextend", &extend);
        assert!(status().contains(" rw "), "{}", status());
        assert!(touch(&volume.target, (0..BLOCKS).step_by(50)));
        let last = snapshots.pop().unwrap();
        runtime().block_on(async {
            let client = server.client();
            client.delete_snapshot(&last).await.unwrap();
            other.down(&client).await;
            client.delete(&other.id).await.unwrap();
        });

        fail_writes_of_metadata("slackwater--vg-thin_tmeta", || {
            assert!(!touch(&volume.target, 0..BLOCKS));
        });
        assert!(status().contains("needs_check"), "{}", status());
        let advice = refused_with("lvconvert --repair");
        runtime().block_on(async { volume.down(&server.client()).await });
        end(server);

        // The steps of the refusal.
        release();
        run("lvchange", &["--activate", "n", "slackwater-vg/thin"]);
        run("lvconvert", &["--yes", "--repair", "slackwater-vg/thin"]);
        let config = r#"global/thin_check_options=["-q","--clear-needs-check-flag"]"#;
        assert!(advice.contains(&format!("--config '{config}'")), "{advice}");
        run(
            "lvchange",
            &["--activate", "y", "--config", config, "slackwater-vg/thin"],
        );
        assert!(!status().contains("needs_check"), "{}", status());
        let server = Server::start(&scratch, &[POOL]);
        runtime().block_on(async {
            let client = server.client();
            let listed = client.list().await.unwrap();
            assert_eq!(listed, std::slice::from_ref(&volume.id));
            // What was put there without the driver is reported, and left alone.
            let listed = slackwater(&["volumes"], &scratch);
            assert!(listed.contains("thin device 100000"), "{listed}");
            for message in listed.lines().filter_map(|line| line.split('"').nth(1)) {
                run("dmsetup", &["message", mapped, "0", message]);
            }
            for snapshot in &snapshots[1..] {
                client.delete_snapshot(snapshot).await.unwrap();
            }
            let source = from_snapshot(&snapshots[0]);
            let made = client.create_from("copy", BLOCKS << 16, block(), source, &[]);
            let id = made.await.unwrap().volume_id;
            let copy = Volume::of(&scratch, "copy", id, block());
            copy.up(&client).await;
            assert!(touch(&copy.target, [5].into_iter()));
            copy.down(&client).await;
        });
        end_pool(server);
    });
}

/// What the shutdown of a machine with systemd and LVM does.
fn shut_down() {
    // blk-availability.service
    let tool = ["--umount", "--lvmoptions", "wholevg"];
    let _ = Command::new("blkdeactivate").args(tool).output();
    // systemd-shutdown tries this until nothing changes any more.
    let mounts = || {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let points = mounts.lines().filter_map(|line| line.split(' ').nth(1));
        let own = points.filter(|at| at.starts_with("/run/"));
        own.map(str::to_string).collect::<Vec<_>>()
    };
    for point in mounts().iter().rev() {
        let _ = Command::new("umount").arg(point).output();
    }
    for device in run("dmsetup", &["ls"]).lines().rev() {
        let name = device.split_whitespace().next().unwrap();
        let _ = Command::new("dmsetup").args(["remove", name]).output();
    }
    assert_eq!(run("dmsetup", &["ls"]).trim(), "No devices found");
}

/// A published ext4 with a text, a snapshot of it, and a published raw volume, in this order.
fn make() {
    let (scratch, server, _) = guest_power::start();
    let ids = runtime().block_on(async {
        let client = server.client();
        let files = created(&scratch, &client, "files", mount("ext4")).await;
        let raw = created(&scratch, &client, "raw", block()).await;
        files.up(&client).await;
        raw.up(&client).await;
        fs::write(files.target.join("data"), "kept").unwrap();
        assert!(touch(&raw.target, [5].into_iter()));
        let snapshot = client.snapshot("s", &files.id, &[]).await.unwrap();
        [files.id, snapshot.snapshot_id, raw.id]
    });
    fs::write(Path::new(STATE).join("ids"), ids.join(" ")).unwrap();
    end(server);
    let listed = run("dmsetup", &["ls"]);
    assert!(listed.contains("-records"), "{listed}");
    shut_down();
}

/// Finds everything that [`make`] has made.
fn check(scratch: &Scratch, server: &Server) {
    let ids = fs::read_to_string(Path::new(STATE).join("ids")).unwrap();
    let ids: Vec<&str> = ids.split(' ').collect();
    runtime().block_on(async {
        let client = server.client();
        let mut listed = client.list().await.unwrap();
        listed.sort_by_key(|id| id == ids[2]);
        assert_eq!(listed, [ids[0], ids[2]]);
        let files = Volume::of(scratch, "files", ids[0].into(), mount("ext4"));
        let copy = restore(scratch, &client, ids[1], mount("ext4")).await;
        for one in [&files, &copy] {
            one.up(&client).await;
            let read = fs::read_to_string(one.target.join("data")).unwrap();
            assert_eq!(read, "kept");
            one.down(&client).await;
        }
        client.delete(&copy.id).await.unwrap();
        let raw = Volume::of(scratch, "raw", ids[2].into(), block());
        raw.up(&client).await;
        assert_eq!(read_at(&raw.target, 5 << 16), 7);
        raw.down(&client).await;
    });
}

/// Another machine: its node record has another home.
fn adopt() {
    fs::create_dir_all(STATE).unwrap();
    run("mount", &[&guest::disk("state"), STATE]);
    run("vgimport", &["slackwater-vg"]);
    run("vgchange", &["--activate", "y", "slackwater-vg"]);
    let scratch = Scratch::new();
    let home = r#"{"version":1,"home":"8c0d6c5e-0f5f-4c86-8f27-5c1f6c5d7a11"}"#;
    fs::write(scratch.join("node.json"), home).unwrap();
    let server = Server::spawn(&scratch, &[POOL], &[], &[]);
    eventually("the pool is refused", || {
        server.log().contains("it belongs to another machine")
    });
    drop(server);
    let place = "default=lvm:slackwater-vg/thin";
    slackwater(&["pool", "adopt", place], &scratch);
    let server = Server::start(&scratch, &[POOL]);
    check(&scratch, &server);
    end_pool(server);
}

#[test]
fn a_pool_outlives_a_shutdown_and_is_adopted_by_the_machine_to_which_its_group_moves() {
    let test = "guest_pool::a_pool_outlives_a_shutdown_and_is_adopted_by_the_machine_to_which_its_group_moves";
    let boot = || {
        let (scratch, server, _) = guest_power::start();
        check(&scratch, &server);
        end_pool(server);
        run("vgexport", &["slackwater-vg"]);
    };
    in_guests(test, &guest_power::DISKS, &[&make, &boot, &adopt]);
}
