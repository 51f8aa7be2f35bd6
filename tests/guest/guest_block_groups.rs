//! Groups of raw block volumes of a file pool, whose mapped devices the guard suspends, and copies
//! between a pool of files and one of LVM.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails"
)]

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;

use slackwater::csi::VolumeGroupSnapshot;
use slackwater_testkit::guest::{self, in_guest, rounds};
use slackwater_testkit::snapshots::{from_volume, members};
use slackwater_testkit::{Client, Scratch, Server, block, mount, run};
use tonic::Code;

use crate::guest_linear::refuses_loop_ioctls;
use crate::guest_lvm::{Volume, create_pool, end, end_pool, runtime};
use crate::guest_order::violations;

const DISKS: [&str; 2] = ["pool:1G", "files:2G"];
const THIN_POOL: &str = "thin=lvm:slackwater-vg/thin,init,rawBlock=unfiltered";
const POD: &str = "11111111-2222-3333-4444-555555555555";

/// Mounts an xfs on the guest's disk; returns the definition of a pool on it.
pub fn file_pool(scratch: &Scratch) -> String {
    let disk = guest::disk("files");
    run("mkfs.xfs", &["-q", "-f", &disk]);
    let folder = scratch.dir("files");
    run("mount", &[&disk, folder.to_str().unwrap()]);
    format!("default=file:{},init", folder.display())
}

async fn created(
    scratch: &Scratch,
    client: &Client,
    (name, pool): (&str, &str),
    raw: bool,
) -> Volume {
    let how = if raw { block() } else { mount("ext4") };
    let class = [("pool", pool)];
    let id = client.create(name, 64 << 20, how.clone(), &class).await;
    let volume = Volume::of(scratch, name, id.unwrap(), how);
    volume.up(client).await;
    volume
}

/// The level of each member of a group by the UUID of its volume, and why it is not higher.
fn levels(scratch: &Scratch, group: &VolumeGroupSnapshot) -> BTreeMap<String, (String, String)> {
    let each = members(group).into_iter().map(|id| {
        let folder = scratch
            .join("files/snapshots")
            .join(id.split_once('.').unwrap().1);
        let record = fs::read(folder.join("record.json")).unwrap();
        let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
        let text = |key: &str| record[key].as_str().unwrap().to_string();
        (text("source"), (text("level"), text("reason")))
    });
    each.collect()
}

fn linear_devices() -> String {
    run("dmsetup", &["ls", "--target", "linear"])
}

#[test]
fn no_group_with_raw_volumes_of_a_file_pool_is_out_of_order() {
    let test = "guest_block_groups::no_group_with_raw_volumes_of_a_file_pool_is_out_of_order";
    in_guest(test, &DISKS, || {
        create_pool("640M");
        let scratch = Scratch::new();
        let server = Server::start(&scratch, &[&file_pool(&scratch), THIN_POOL]);
        runtime().block_on(async {
            let client = server.client();
            let mut all = Vec::new();
            for n in 0..4 {
                let name = format!("file-{n}");
                all.push(created(&scratch, &client, (&name, "default"), n % 2 == 0).await);
            }
            for n in 0..2 {
                let name = format!("thin-{n}");
                all.push(created(&scratch, &client, (&name, "thin"), n % 2 == 0).await);
            }
            let all: Vec<&Volume> = all.iter().collect();
            let raw = [all[0], all[2]];
            for (members, cuts) in [
                (&raw[..], rounds(2, 100)),
                (&all[..4], rounds(1, 30)),
                (&all[..], rounds(1, 30)),
            ] {
                let wrong = violations(&scratch, &client, members, (cuts, false)).await;
                assert_eq!(wrong, 0, "{} members\n{}", members.len(), server.log());
            }
            // The oracle finds what is wrong with cuts of one volume after the other.
            let wrong = violations(&scratch, &client, &all[..4], (2, true)).await;
            assert_ne!(wrong, 0);
            for volume in all {
                volume.down(&client).await;
                client.delete(&volume.id).await.unwrap();
            }
        });
        end_pool(server);
    });
}

#[test]
fn a_raw_volume_with_a_loop_device_joins_groups_after_its_pod_was_restarted() {
    let test = "guest_block_groups::a_raw_volume_with_a_loop_device_joins_groups_after_its_pod_was_restarted";
    in_guest(test, &DISKS[1..], || {
        let scratch = Scratch::new();
        let mut server = Server::start(&scratch, &[&file_pool(&scratch)]);
        runtime().block_on(async {
            let client = server.client();
            let created = client.create("raw", 64 << 20, block(), &[]);
            let raw = Volume::of(&scratch, POD, created.await.unwrap(), block());
            let class = [("blockGroups", "false")];
            let created = client.create("never", 64 << 20, block(), &class);
            let never = Volume::of(&scratch, "never", created.await.unwrap(), block());
            let mounted = self::created(&scratch, &client, ("mounted", "default"), false).await;
            // As an earlier release published it.
            let uuid = raw.id.split_once('.').unwrap().1;
            let image = scratch.join("files/volumes").join(uuid).join("data.img");
            let direct = ["--find", "--direct-io=on", image.to_str().unwrap()];
            run("losetup", &direct);
            raw.up(&client).await;
            let ids = [raw.id.clone(), mounted.id.clone()];
            let refused = client.group("early", &ids, &[]).await.unwrap_err();
            assert_eq!(refused.code(), Code::FailedPrecondition);
            let reported = refused.message();
            assert!(
                reported.contains(&format!("restart the pod with UID {POD}")),
                "{reported}"
            );

            raw.down(&client).await;
            raw.up(&client).await;
            assert!(linear_devices().contains(uuid));
            let tenant = OpenOptions::new().write(true).open(&raw.target).unwrap();
            // The process is root, and so has CAP_SYS_RAWIO.
            refuses_loop_ioctls(&tenant, &File::open(&image).unwrap());
            drop(tenant);
            // A pod keeps its device while the driver is killed.
            server.kill();
            server.restart();
            let client = server.client();
            let group = client.group("later", &ids, &[]).await.unwrap();
            let crash = ("crash", "common moment, device cache not flushed");
            let expected = BTreeMap::from(
                [
                    (&raw, crash),
                    (&mounted, ("filesystem", "filesystem was requested")),
                ]
                .map(|(volume, (level, reason))| {
                    let uuid = volume.id.split_once('.').unwrap().1;
                    (uuid.to_string(), (level.to_string(), reason.to_string()))
                }),
            );
            assert_eq!(levels(&scratch, &group), expected);
            client.delete_all_of(&group).await;

            never.up(&client).await;
            let ids = [never.id.clone(), mounted.id.clone()];
            let refused = client.group("never", &ids, &[]).await.unwrap_err();
            assert_eq!(refused.code(), Code::FailedPrecondition);
            let reported = refused.message();
            assert!(reported.contains("blockGroups"), "{reported}");
            for volume in [raw, never, mounted] {
                volume.down(&client).await;
                client.delete(&volume.id).await.unwrap();
            }
        });
        assert!(
            !linear_devices().contains("slackwater-linear"),
            "none is left"
        );
        assert_eq!(run("losetup", &["--list", "--noheadings"]).trim(), "");
        end(server);
    });
}

#[test]
fn volumes_are_copied_whole_between_a_pool_of_files_and_one_of_lvm() {
    let test =
        "guest_block_groups::volumes_are_copied_whole_between_a_pool_of_files_and_one_of_lvm";
    in_guest(test, &DISKS, || {
        create_pool("640M");
        let scratch = Scratch::new();
        let files = file_pool(&scratch);
        let server = Server::start(&scratch, &[&files, THIN_POOL]);
        runtime().block_on(async {
            let client = server.client();
            for (from, to, allocation) in [
                ("thin", "default", "thin"),
                ("default", "thin", "thin"),
                ("default", "thin", "thick"),
            ] {
                let (name, copy) = (format!("{from}-{allocation}"), format!("{to}-{allocation}"));
                let volume = created(&scratch, &client, (&name, from), true).await;
                let written = vec![7; 3 << 20];
                let device = OpenOptions::new().write(true).open(&volume.target).unwrap();
                for at in [0, 30 << 20, 61 << 20] {
                    device.write_all_at(&written, at).unwrap();
                }
                device.sync_all().unwrap();
                drop(device);
                let expected = fs::read(&volume.target).unwrap();
                volume.down(&client).await;
                let class = [("pool", to), ("allocation", allocation)];
                let source = from_volume(&volume.id);
                let made = client.create_from(&copy, 64 << 20, block(), source, &class);
                let id = made.await.unwrap().volume_id;
                let copied = Volume::of(&scratch, &copy, id, block());
                copied.up(&client).await;
                let found = fs::read(&copied.target).unwrap();
                assert!(found == expected, "{from} to {to}, {allocation}");
                copied.down(&client).await;
                for one in [&volume, &copied] {
                    client.delete(&one.id).await.unwrap();
                }
            }
        });
        end_pool(server);
        run("umount", &[scratch.join("files").to_str().unwrap()]);
    });
}
