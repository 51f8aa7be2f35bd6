//! Snapshots are carried out of a thin pool of LVM: with `slackwater export` and `slackwater import` and
//! a deleted snapshot as a hidden base, and as copies in another pool. Logical volumes of others are
//! imported. The new volumes have each byte.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and writes devices"
)]

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::Signal;
use slackwater::csi::VolumeCapability;
use slackwater_testkit::guest::{self, in_guest};
use slackwater_testkit::snapshots::from_snapshot;
use slackwater_testkit::{Client, Scratch, Server, block, mount, run};
use tonic::Code;

use crate::guest_lvm::{
    DISKS, OTHER, POOL, Volume, create_other_pool, create_pool, created, end_both_pools, end_pool,
    restore, runtime,
};
use crate::guest_pool::slackwater;

const MIB: u64 = 1 << 20;
const KEEP: [(&str, &str); 1] = [("base", "keep")];

/// Writes pages with this number, each into a chunk of the pool of its own.
fn write(volume: &Volume, number: u8) {
    let pages = |number: u8| (0..40).map(move |n| (u64::from(number) * 7 + n) % 60 * MIB);
    let path = match volume.target.is_dir() {
        true => volume.target.join("data"),
        false => volume.target.clone(),
    };
    let mut options = OpenOptions::new();
    let file = options.write(true).create(volume.target.is_dir());
    let file = file.open(path).unwrap();
    let scale = if volume.target.is_dir() { 4 } else { 1 };
    for at in pages(number) {
        file.write_all_at(&[number; 4096], at / scale).unwrap();
    }
    file.sync_all().unwrap();
}

fn sum(path: &Path) -> String {
    let printed = run("sha256sum", &[path.to_str().unwrap()]);
    printed.split(' ').next().unwrap().to_string()
}

/// The SHA-256 of a volume: of its device, or of the file on it.
async fn sum_of(client: &Client, volume: &Volume) -> String {
    volume.up(client).await;
    let sum = match volume.target.is_dir() {
        true => sum(&volume.target.join("data")),
        false => sum(&volume.target),
    };
    volume.down(client).await;
    sum
}

fn export(server: &Server, words: &[&str]) -> Vec<u8> {
    let (done, archive, said) = server.archive(&[&["export"], words].concat(), &[]);
    assert!(done, "{said}");
    archive
}

/// The ID of the only volume of an archive.
fn import(server: &Server, name: &str, more: &[&str], archive: &[u8]) -> String {
    let words = ["import", "--json", "--name", name];
    let (done, printed, said) = server.archive(&[&words, more].concat(), archive);
    assert!(done, "{said}");
    let printed: serde_json::Value = serde_json::from_slice(&printed).unwrap();
    printed["volumes"][0]["id"].as_str().unwrap().to_string()
}

/// Backs up a volume twice, as a whole and as differences, and imports both.
async fn back_up(server: &Server, scratch: &Scratch, kind: &str, how: VolumeCapability) {
    let client = server.client();
    let volume = created(scratch, &client, kind, how.clone()).await;
    let snapshot = async |name: &str| {
        let name = format!("{kind}-{name}");
        let made = client.snapshot(&name, &volume.id, &KEEP);
        made.await.unwrap().snapshot_id
    };
    volume.up(&client).await;
    write(&volume, 1);
    let first = snapshot("first").await;
    let whole = export(server, &[&first]);
    client.delete_snapshot(&first).await.unwrap();
    write(&volume, 2);
    let second = snapshot("second").await;
    write(&volume, 3);
    let more = export(server, &[&second, "--base", &first]);
    assert!(more.len() < whole.len() + whole.len() / 2, "{}", more.len());
    let all = export(server, &[&second]);
    volume.down(&client).await;
    assert_eq!(client.snapshots("").await.unwrap(), [second.as_str()]);

    let (chain, again) = (format!("{kind}-chain"), format!("{kind}-again"));
    let (done, _, said) = server.archive(&["import", "--name", &chain], &more);
    assert!(!done && said.contains("only the differences"), "{said}");
    import(server, &chain, &["--more"], &whole);
    let chain = Volume::of(
        scratch,
        &chain,
        import(server, &chain, &[], &more),
        how.clone(),
    );
    let again = Volume::of(
        scratch,
        &again,
        import(server, &again, &[], &all),
        how.clone(),
    );
    let restored = restore(scratch, &client, &second, how).await;
    let expected = sum_of(&client, &restored).await;
    for copy in [&chain, &again] {
        assert_eq!(sum_of(&client, copy).await, expected, "{kind}");
    }
    assert_ne!(sum_of(&client, &volume).await, expected, "{kind}");

    client.delete_snapshot(&second).await.unwrap();
    for volume in [volume, chain, again, restored] {
        client.delete(&volume.id).await.unwrap();
    }
}

#[test]
fn a_chain_of_archives_with_a_deleted_base_has_each_byte_of_its_snapshot() {
    let test =
        "guest_archives::a_chain_of_archives_with_a_deleted_base_has_each_byte_of_its_snapshot";
    in_guest(test, &DISKS, || {
        create_pool("800M");
        let scratch = Scratch::new();
        let server = Server::start(&scratch, &[POOL]);
        runtime().block_on(async {
            for (kind, how) in [("raw", block()), ("ext4", mount("ext4"))] {
                back_up(&server, &scratch, kind, how).await;
            }
        });
        let listed = slackwater(&["volumes"], &scratch);
        assert!(!listed.contains("thin device"), "{listed}");
        let snapshots = fs::read_dir("/run/slackwater/pools")
            .unwrap()
            .next()
            .unwrap();
        let snapshots = fs::read_dir(snapshots.unwrap().path().join("snapshots")).unwrap();
        assert_eq!(snapshots.count(), 0, "the base is deleted with its volume");
        end_pool(server);
    });
}

#[test]
fn a_copy_in_another_pool_continues_after_a_restart() {
    let test = "guest_archives::a_copy_in_another_pool_continues_after_a_restart";
    in_guest(test, &["pool:2G"], || {
        create_pool("640M");
        create_other_pool();
        let scratch = Scratch::new();
        let mut server = Server::start(&scratch, &[POOL, OTHER]);
        runtime().block_on(async {
            let client = server.client();
            let volume = created(&scratch, &client, "raw", block()).await;
            volume.up(&client).await;
            write(&volume, 1);
            let expected = sum(&volume.target);
            let made = client.snapshot("cut", &volume.id, &[]).await;
            let snapshot = made.unwrap().snapshot_id;
            let copied = async |client: Client| {
                let class = [("pool", "other")];
                let source = from_snapshot(&snapshot);
                let made = client.create_from("copy", 64 * MIB, block(), source, &class);
                made.await.map(|volume| volume.volume_id)
            };
            server.restart_with(&[("SLACKWATER_FAULT", "effect.copy_range:stop-after")]);
            let stop = async {
                while !server.is_stopped() {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                server.signal(Signal::SIGTERM);
                server.signal(Signal::SIGCONT);
            };
            let (refused, ()) = tokio::join!(copied(server.client()), stop);
            assert_eq!(refused.unwrap_err().code(), Code::Unavailable);
            let log = scratch.join("effects");
            let plan = format!("effect.all:log={}", log.display());
            server.restart_with(&[("SLACKWATER_FAULT", &plan)]);
            let client = server.client();
            let copy = copied(server.client()).await.unwrap();
            let effects = fs::read_to_string(log).unwrap();
            let steps = effects.lines().filter(|line| line.ends_with("copy_range"));
            assert!(
                (1..4).contains(&steps.count()),
                "of four steps, one or more were done"
            );
            let copy = Volume::of(&scratch, "copy", copy, block());
            assert_eq!(sum_of(&client, &copy).await, expected);
            volume.down(&client).await;
            for volume in [volume, copy] {
                client.delete(&volume.id).await.unwrap();
            }
            client.delete_snapshot(&snapshot).await.unwrap();
        });
        end_both_pools(server);
    });
}

/// Logical volumes as LVM LocalPV makes them (thick, one for a claim) and as TopoLVM does with a thin
/// pool, with the data of their pods.
fn logical_volumes_of_others() -> [&'static str; 2] {
    run("vgcreate", &["others", &guest::disk("others")]);
    let place = ["--name", "pool", "others"];
    run(
        "lvcreate",
        &[&["--type", "thin-pool", "--size", "400M"], &place[..]].concat(),
    );
    run("lvcreate", &["--size", "128M", "--name", "pvc-1", "others"]);
    let thin = ["--virtualsize", "400M", "--thinpool", "pool"];
    run(
        "lvcreate",
        &[&thin[..], &["--name", "pvc-2", "others"]].concat(),
    );
    let devices = ["/dev/others/pvc-1", "/dev/others/pvc-2"];
    run("mkfs.ext4", &["-q", devices[0]]);
    run("mkfs.xfs", &["-q", devices[1]]);
    for device in devices {
        fs::create_dir_all("/mnt/of-others").unwrap();
        run("mount", &[device, "/mnt/of-others"]);
        fs::write("/mnt/of-others/data", device.repeat(1 << 16)).unwrap();
        run("umount", &["/mnt/of-others"]);
    }
    devices
}

#[test]
fn logical_volumes_of_other_drivers_become_volumes_and_stay_as_they_are() {
    let test =
        "guest_archives::logical_volumes_of_other_drivers_become_volumes_and_stay_as_they_are";
    in_guest(test, &["pool:1G", "others:1G"], || {
        create_pool("800M");
        let devices = logical_volumes_of_others();
        let scratch = Scratch::new();
        let server = Server::start(&scratch, &[POOL]);
        let words = ["volumes", "import", "--to-pool", "default", "--yes"];
        let import = |device: &str, name: &str| {
            let words = [&words[..], &["--from", device, "--name", name]].concat();
            let (done, printed, said) = server.archive(&words, &[]);
            match done {
                true => Ok(String::from_utf8(printed).unwrap().trim().to_string()),
                false => Err(said),
            }
        };
        run("mount", &[devices[0], "/mnt/of-others"]);
        let refused = import(devices[0], "mounted").unwrap_err();
        assert!(refused.contains("is mounted"), "{refused}");
        run("umount", &["/mnt/of-others"]);
        for (device, kind) in devices.into_iter().zip(["ext4", "xfs"]) {
            let before = sum(Path::new(device));
            let id = import(device, kind).unwrap();
            assert_eq!(sum(Path::new(device)), before);
            let volume = Volume::of(&scratch, kind, id, mount(kind));
            runtime().block_on(async {
                let client = server.client();
                volume.up(&client).await;
                let data = fs::read(volume.target.join("data")).unwrap();
                assert!(data == device.repeat(1 << 16).into_bytes(), "{device}");
                volume.down(&client).await;
                client.delete(&volume.id).await.unwrap();
            });
        }
        run("vgchange", &["--activate", "n", "others"]);
        end_pool(server);
    });
}
