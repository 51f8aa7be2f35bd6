//! Pools on an image: an ext4 disk with one reserved image, whose xfs is the pool (`image=SIZE`).

use std::os::unix::fs::MetadataExt;
#[cfg(feature = "fault")]
use std::path::Path;
use std::process::Command;

use nix::sys::signal::Signal;
use slackwater::csi;
use tonic::Code;

use super::{GIB, MIB, check_pattern, refused, write_pattern};
use slackwater_testkit::disk::{loops_on, mounts_below};
use slackwater_testkit::image_pool::*;
use slackwater_testkit::{Client, Disk, Scratch, Server, binary, block, eventually, mount, run};

const DATA: usize = 1 << 20;

#[track_caller]
fn assert_reserved(disk: &Disk, bytes: u64) {
    let found = std::fs::metadata(image(disk)).unwrap();
    assert!(found.len() >= bytes, "{} of {bytes}", found.len());
    assert!(
        found.blocks() * 512 >= bytes,
        "{} of {bytes} bytes are reserved",
        found.blocks() * 512
    );
}

#[tokio::test]
async fn volumes_on_an_image_pool_survive_a_kill_and_a_stop() {
    let scratch = Scratch::new();
    let disk = ext4(&scratch);
    let mut server = Server::start(&scratch, &[&definition(&disk, "1Gi")]);
    let client = server.client();
    let (device, uuid) = (the_loop(&disk), fs_uuid(&disk));
    assert_reserved(&disk, GIB);
    let (id, staging) = staged(&client, &scratch, "a", "ext4").await;
    let target = scratch.join("kubelet/a.target");
    client
        .publish(&id, &staging, &target, mount("ext4"), false)
        .await
        .unwrap();
    let raw = client.create("raw", 16 * MIB, block(), &[]).await.unwrap();
    let node = scratch.join("kubelet/raw.target");
    let raw_staging = scratch.dir("kubelet/raw");
    client.stage(&raw, &raw_staging, block()).await.unwrap();
    client
        .publish(&raw, &raw_staging, &node, block(), false)
        .await
        .unwrap();
    write_pattern(&target.join("before"), 1, DATA);

    // Two levels deep, and bypassing the page cache on both of them.
    let direct = run("losetup", &["-l", "-n", "-O", "NAME,DIO,LOG-SEC"]);
    let of = |name: &str| -> Vec<String> {
        let line = direct
            .lines()
            .find(|line| line.starts_with(&format!("{name} ")));
        line.unwrap().split_whitespace().map(String::from).collect()
    };
    assert_eq!(of(&device)[1..], ["1", "512"], "the image itself");
    let volume = mounts_below(&staging)[0].source.clone();
    assert_eq!(
        of(volume.to_str().unwrap())[1..],
        ["1", "4096"],
        "a volume on an xfs that shares blocks"
    );

    server.restart();
    assert_eq!(the_loop(&disk), device, "the same device");
    assert_eq!(fs_uuid(&disk), uuid, "formatted once");
    check_pattern(&target.join("before"), 1, DATA);
    write_pattern(&target.join("after"), 2, DATA);

    // A stop leaves devices that are in use.
    server.signal(Signal::SIGTERM);
    assert_eq!(server.wait(), Some(0));
    assert_eq!(the_loop(&disk), device);
    check_pattern(&target.join("after"), 2, DATA);
    server.restart();
    let client = server.client();
    assert_eq!(the_loop(&disk), device);
    client.unpublish(&raw, &node).await.unwrap();
    client.unstage(&raw, &raw_staging).await.unwrap();
    client.delete(&raw).await.unwrap();
    client.unpublish(&id, &target).await.unwrap();
    client.unstage(&id, &staging).await.unwrap();

    // A pool that is not in use is unmounted, and found again with all of its content.
    server.signal(Signal::SIGTERM);
    assert_eq!(server.wait(), Some(0));
    eventually("the image is unmounted", || unmounted(&disk));
    assert_reserved(&disk, GIB);
    server.restart();
    let client = server.client();
    client.stage(&id, &staging, mount("ext4")).await.unwrap();
    check_pattern(&staging.join("before"), 1, DATA);
    check_pattern(&staging.join("after"), 2, DATA);
    run("fstrim", &[staging.to_str().unwrap()]);
    client.unstage(&id, &staging).await.unwrap();
    client.delete(&id).await.unwrap();
    assert_eq!(fs_uuid(&disk), uuid, "formatted once");
    assert_reserved(&disk, GIB);
}

#[tokio::test]
async fn a_larger_image_size_grows_the_pool_under_volumes_in_use_and_a_smaller_one_changes_nothing()
{
    let scratch = Scratch::new();
    let disk = ext4(&scratch);
    let mut server = Server::start(&scratch, &[&definition(&disk, "600Mi")]);
    let client = server.client();
    let uuid = fs_uuid(&disk);
    let (id, staging) = staged(&client, &scratch, "a", "xfs").await;
    write_pattern(&staging.join("data"), 1, DATA);
    let before = client.capacity(&[]).await.unwrap();
    server.kill();

    let mut server = Server::start(&scratch, &[&definition(&disk, "1Gi")]);
    let client = server.client();
    assert_reserved(&disk, GIB);
    let after = client.capacity(&[]).await.unwrap();
    assert!(
        after > before + 300 * MIB,
        "the room is served: {before}, then {after}"
    );
    write_pattern(&staging.join("more"), 2, DATA);
    server.kill();

    let mut server = Server::start(&scratch, &[&definition(&disk, "600Mi")]);
    assert!(server.log().contains("cannot shrink"));
    // The writes in between take a few blocks.
    let again = server.client().capacity(&[]).await.unwrap();
    assert!(again.abs_diff(after) < 16 * MIB, "{after}, then {again}");
    assert_reserved(&disk, GIB);
    server.kill();

    // More than the disk has: the pool is served with its present size.
    let server = Server::start(&scratch, &[&definition(&disk, "8Gi")]);
    let client = server.client();
    assert!(server.log().contains("does not fit"), "{}", server.log());
    assert_eq!(std::fs::metadata(image(&disk)).unwrap().len(), GIB);
    assert_eq!(fs_uuid(&disk), uuid, "formatted once");
    check_pattern(&staging.join("data"), 1, DATA);
    check_pattern(&staging.join("more"), 2, DATA);
    client.unstage(&id, &staging).await.unwrap();
    client.delete(&id).await.unwrap();
}

#[tokio::test]
async fn a_reserved_pool_accepts_every_write_on_a_full_disk() {
    let scratch = Scratch::new();
    let disk = ext4(&scratch);
    let server = Server::start(&scratch, &[&definition(&disk, "600Mi")]);
    let client = server.client();
    let parameters = [("allocation", "thick")];
    let id = client
        .create("a", 400 * MIB, block(), &parameters)
        .await
        .unwrap();
    let (staging, node) = (scratch.dir("kubelet/a"), scratch.join("kubelet/a.target"));
    client.stage(&id, &staging, block()).await.unwrap();
    client
        .publish(&id, &staging, &node, block(), false)
        .await
        .unwrap();
    // A foreign process fills the disk to its last block.
    let mut filler = std::fs::File::create(disk.mount_point.join("filler")).unwrap();
    let piece = vec![0x5a; 1 << 20];
    while std::io::Write::write_all(&mut filler, &piece).is_ok() {}
    let _ = filler.sync_all();
    write_pattern(&node, 3, 400 << 20);
    check_pattern(&node, 3, 400 << 20);
    client.unpublish(&id, &node).await.unwrap();
    client.unstage(&id, &staging).await.unwrap();
    client.delete(&id).await.unwrap();
    assert_reserved(&disk, 600 * MIB);
}

/// Runs `slackwater`. Returns its exit code and its output.
fn slackwater(arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(binary()).args(arguments).output().unwrap();
    let printed = [output.stdout, output.stderr].concat();
    (
        output.status.code(),
        String::from_utf8_lossy(&printed).into_owned(),
    )
}

#[tokio::test]
async fn init_creates_the_image_once_and_contradictory_options_are_refused() {
    let scratch = Scratch::new();
    let disk = ext4(&scratch);
    let record = scratch.join("node.json");
    let place = format!("a=file:{}", disk.mount_point.display());
    let act = |act: &str, pool: &str| {
        slackwater(&["pool", act, "--node-record", record.to_str().unwrap(), pool])
    };
    let (code, printed) = act("init", &format!("{place},image=3Gi"));
    assert_eq!(code, Some(1));
    assert!(
        printed.contains("does not fit") && printed.contains("give at most"),
        "{printed}"
    );
    assert!(!image(&disk).exists(), "nothing is reserved");
    let (code, printed) = act("init", &format!("{place},image=400Mi"));
    assert_eq!(code, Some(0), "{printed}");
    eventually("an act leaves no mount and no device", || unmounted(&disk));
    assert_reserved(&disk, 400 * MIB);
    let (code, printed) = act("init", &format!("{place},image=400Mi"));
    assert_eq!(
        (code, printed.contains("already exists")),
        (Some(0), true),
        "{printed}"
    );
    let (code, printed) = act("init", &place);
    assert_eq!(
        (code, printed.contains("add image=400Mi")),
        (Some(1), true),
        "{printed}"
    );
    let (code, printed) = act("forget", "a");
    assert_eq!(
        (code, printed.contains("image of a pool")),
        (Some(1), true),
        "{printed}"
    );

    // While a driver runs: it holds the image, and the commands use its mount.
    let server = Server::start(&scratch, &[&format!("{place},image=400Mi")]);
    let (code, printed) = act("init", &format!("{place},image=400Mi"));
    assert_eq!(
        (code, printed.contains("already exists")),
        (Some(0), true),
        "{printed}"
    );
    let pool = format!("{place},image=400Mi");
    let list = ["--node-record", record.to_str().unwrap(), "--pool", &pool];
    let (code, printed) = slackwater(&[&["pool", "list"], &list[..]].concat());
    assert_eq!(
        (code, printed.contains("here")),
        (Some(0), true),
        "{printed}"
    );
    let (code, printed) = slackwater(&[&["volumes"], &list[..]].concat());
    assert_eq!(code, Some(0), "{printed}");
    let state = scratch.join("state");
    let doctor = ["doctor", "--state-dir", state.to_str().unwrap()];
    let (code, printed) = slackwater(&[&doctor, &list[..]].concat());
    assert!(
        printed.contains("the freeze guard froze and thawed a temporary ext4 file system"),
        "{printed}"
    );
    assert_eq!(
        mounts_below(&state),
        Vec::new(),
        "the trial leaves no mount"
    );
    assert!(printed.contains("shares blocks between files"), "{printed}");
    assert!(printed.contains("fully reserved"), "{code:?} {printed}");
    let (code, printed) = act("forget", "a");
    assert_eq!(
        (code, printed.contains("the pool is present")),
        (Some(1), true),
        "{printed}"
    );
    let second = scratch.join("second");
    std::fs::create_dir(&second).unwrap();
    let socket = format!("unix://{}/csi.sock", second.display());
    let (code, printed) = slackwater(&[
        "serve",
        "--node-name",
        "n",
        "--endpoint",
        &socket,
        "--node-record",
        record.to_str().unwrap(),
        "--pool",
        &pool,
    ]);
    assert_eq!(
        (code, printed.contains("another slackwater process")),
        (Some(1), true),
        "{printed}"
    );
    the_loop(&disk);
    drop(server);

    // A pool without an image is not moved onto one.
    let plain = scratch.dir("plain");
    std::fs::create_dir(plain.join("pool")).unwrap();
    let other = Disk::new(&scratch, "other", "ext4", GIB);
    let place = format!("b=file:{}", other.mount_point.display());
    assert_eq!(act("init", &place).0, Some(0));
    let (code, printed) = act("init", &format!("{place},image=400Mi"));
    assert_eq!(
        (code, printed.contains("remove image=")),
        (Some(1), true),
        "{printed}"
    );
    assert!(!image(&other).exists());
}

#[tokio::test]
async fn no_new_image_is_created_while_the_disk_is_missing() {
    let scratch = Scratch::new();
    let disk = ext4(&scratch);
    let mut server = Server::start(&scratch, &[&definition(&disk, "400Mi")]);
    let id = server
        .client()
        .create("a", 32 * MIB, mount("ext4"), &[])
        .await
        .unwrap();
    server.signal(Signal::SIGTERM);
    server.wait();
    eventually("the image is unmounted", || unmounted(&disk));
    disk.unmount();
    server.restart();
    let client = server.client();
    let message = refused(client.delete(&id).await, Code::Unavailable);
    assert!(message.contains("is its disk mounted?"), "{message}");
    assert_eq!(std::fs::read_dir(&disk.mount_point).unwrap().count(), 0);
    server.kill();
    disk.mount();
    server.restart();
    server.client().delete(&id).await.unwrap();
}

/// A fault, and a log of all effects.
#[cfg(feature = "fault")]
fn logged(fault: &str, log: &Path) -> String {
    format!("{fault},effect.all:log={}", log.display())
}

/// Runs a command with a fault at its n-th effect. Returns whether the effect was reached.
#[cfg(feature = "fault")]
fn init_with(plan: &str, log: &Path, record: &Path, pool: &str) -> Option<i32> {
    let _ = std::fs::remove_file(log);
    Command::new(binary())
        .args([
            "pool",
            "init",
            "--node-record",
            record.to_str().unwrap(),
            pool,
        ])
        .env("SLACKWATER_FAULT", logged(plan, log))
        .output()
        .unwrap()
        .status
        .code()
}

#[tokio::test]
#[cfg(feature = "fault")]
async fn a_creation_that_is_killed_or_fails_at_any_effect_formats_the_image_once() {
    let scratch = Scratch::new();
    let disk = Disk::new(&scratch, "pool", "ext4", 2 * GIB);
    let log = scratch.join("effects");
    for mode in ["kill", "kill-after", "error=EIO"] {
        for number in 1.. {
            let case = format!("effect.{number}:{mode}");
            let record = scratch.join("node.json");
            let pool = format!("a=file:{},image=320Mi", disk.mount_point.display());
            let code = init_with(&case, &log, &record, &pool);
            let loops = loops_on_if(&image(&disk));
            assert!(loops.len() <= 1, "{case}: {loops:?}");
            let was_complete = std::fs::read_to_string(disk.mount_point.join("image.json"))
                .is_ok_and(|text| text.contains("\"complete\": true"));
            let before = was_complete.then(|| offline_uuid(&disk));
            if code == Some(0) {
                // A fault in an optional effect is not a failure; beyond the last effect, no fault
                // occurs.
                let effects = std::fs::read_to_string(&log).unwrap();
                if effects.lines().count() < number {
                    wipe(&disk, &record);
                    break;
                }
            }
            eventually("a repeat ends the work", || {
                slackwater(&[
                    "pool",
                    "init",
                    "--node-record",
                    record.to_str().unwrap(),
                    &pool,
                ])
                .0 == Some(0)
            });
            assert!(
                before.is_none_or(|before| before == offline_uuid(&disk)),
                "{case}: formatted twice"
            );
            assert_reserved(&disk, 320 * MIB);
            eventually("nothing of the commands is left", || {
                unmounted(&disk) || unmount_left(&disk)
            });
            wipe(&disk, &record);
        }
    }
}

#[cfg(feature = "fault")]
fn loops_on_if(path: &Path) -> Vec<String> {
    if path.exists() {
        loops_on(path)
    } else {
        Vec::new()
    }
}

/// On the image itself: no device is needed.
#[cfg(feature = "fault")]
fn offline_uuid(disk: &Disk) -> String {
    run(
        "blkid",
        &[
            "-p",
            "-o",
            "value",
            "-s",
            "UUID",
            image(disk).to_str().unwrap(),
        ],
    )
}

/// A killed command has left its mount, and the next one has found it and left it unchanged.
#[cfg(feature = "fault")]
fn unmount_left(disk: &Disk) -> bool {
    slackwater_testkit::succeeds("umount", &[mounted(disk).to_str().unwrap()]);
    unmounted(disk)
}

#[cfg(feature = "fault")]
fn wipe(disk: &Disk, record: &Path) {
    unmount_left(disk);
    for name in ["image.json", "image.json.new", "pool.img", "lock"] {
        let _ = std::fs::remove_file(disk.mount_point.join(name));
    }
    let _ = std::fs::remove_dir(mounted(disk));
    let _ = std::fs::remove_file(record);
}

#[tokio::test]
#[cfg(feature = "fault")]
async fn an_image_pool_is_found_again_after_a_kill_at_any_effect_of_a_start_with_growth() {
    let scratch = Scratch::new();
    let disk = ext4(&scratch);
    let mut size = 400;
    let mut server = Server::start(&scratch, &[&definition(&disk, "400Mi")]);
    let uuid = fs_uuid(&disk);
    let client = server.client();
    let id = client
        .create("a", 32 * MIB, mount("ext4"), &[])
        .await
        .unwrap();
    let staging = scratch.dir("kubelet/a");
    client.stage(&id, &staging, mount("ext4")).await.unwrap();
    write_pattern(&staging.join("data"), 1, DATA);
    let log = scratch.join("effects");
    for mode in ["kill", "kill-after", "error=EIO"] {
        for number in 1.. {
            // Every second time, nothing is mounted any more.
            if number % 2 == 0 {
                server.client().unstage(&id, &staging).await.unwrap();
                server.signal(Signal::SIGTERM);
                server.wait();
            }
            server.kill();
            size += 4;
            let pool = definition(&disk, &format!("{size}Mi"));
            let plan = format!("effect.{number}:{mode}");
            let _ = std::fs::remove_file(&log);
            let faults = logged(&plan, &log);
            let environment = [("SLACKWATER_FAULT", faults.as_str())];
            let mut faulty = Server::spawn(&scratch, &[&pool], &[], &environment);
            // After an error, the driver may serve without the pool, or exit.
            let client = faulty.client();
            while faulty.is_alive() && !client.is_ready().await {}
            faulty.kill();
            let effects = std::fs::read_to_string(&log).unwrap().lines().count();
            let loops = loops_on(&image(&disk));
            assert!(loops.len() <= 1, "{plan}: {loops:?}");
            server = Server::start(&scratch, &[&pool]);
            the_loop(&disk);
            assert_eq!(fs_uuid(&disk), uuid, "{plan}: formatted once");
            assert_reserved(&disk, size * MIB);
            let client = server.client();
            client.stage(&id, &staging, mount("ext4")).await.unwrap();
            check_pattern(&staging.join("data"), 1, DATA);
            if effects < number {
                assert!(number > 10, "each effect of the start was reached");
                break;
            }
        }
    }
    let client = server.client();
    client.unstage(&id, &staging).await.unwrap();
    client.delete(&id).await.unwrap();
}

async fn snapshot(client: &Client, id: &str, name: &str) -> Result<String, tonic::Status> {
    let request = csi::CreateSnapshotRequest {
        source_volume_id: id.into(),
        name: name.into(),
        parameters: [("consistency".to_string(), "crash".to_string())].into(),
        ..Default::default()
    };
    let answer = client.controller().create_snapshot(request).await?;
    let snapshot = answer.into_inner().snapshot.unwrap();
    assert!(snapshot.ready_to_use);
    Ok(snapshot.snapshot_id)
}

#[tokio::test]
async fn a_node_whose_disk_is_ext4_has_snapshots_of_volumes_in_use() {
    let scratch = Scratch::new();
    let disk = ext4(&scratch);
    let plain = scratch.dir("pool/plain");
    let image_pool = scratch.dir("pool/image");
    let pools = [
        format!("plain=file:{},init,mount=any", plain.display()),
        format!(
            "image=file:{},init,mount=any,image=1Gi",
            image_pool.display()
        ),
    ];
    let mut server = Server::start(&scratch, &[&pools[0], &pools[1]]);
    let client = server.client();
    let mut ids = Vec::new();
    for pool in ["plain", "image"] {
        let id = client
            .create(pool, 64 * MIB, mount("ext4"), &[("pool", pool)])
            .await
            .unwrap();
        let staging = scratch.dir(&format!("kubelet/{pool}"));
        client.stage(&id, &staging, mount("ext4")).await.unwrap();
        write_pattern(&staging.join("data"), 1, DATA);
        ids.push((id, staging));
    }
    let message = refused(
        snapshot(&client, &ids[0].0, "a").await,
        Code::FailedPrecondition,
    );
    assert!(
        message.contains("image=SIZE"),
        "the solution is named: {message}"
    );

    let (id, staging) = &ids[1];
    let taken = snapshot(&client, id, "b").await.unwrap();
    write_pattern(&staging.join("data"), 2, DATA);
    let request = csi::CreateVolumeRequest {
        name: "restored".into(),
        capacity_range: Some(csi::CapacityRange {
            required_bytes: 64 << 20,
            limit_bytes: 0,
        }),
        volume_capabilities: vec![mount("ext4")],
        parameters: [("pool".to_string(), "image".to_string())].into(),
        volume_content_source: Some(csi::VolumeContentSource {
            r#type: Some(csi::volume_content_source::Type::Snapshot(
                csi::volume_content_source::SnapshotSource {
                    snapshot_id: taken.clone(),
                },
            )),
        }),
        ..Default::default()
    };
    let answer = client.controller().create_volume(request).await.unwrap();
    let restored = answer.into_inner().volume.unwrap().volume_id;
    let beside = scratch.dir("kubelet/restored");
    client
        .stage(&restored, &beside, mount("ext4"))
        .await
        .unwrap();
    check_pattern(&beside.join("data"), 1, DATA);
    check_pattern(&staging.join("data"), 2, DATA);

    client.unstage(&restored, &beside).await.unwrap();
    client.delete(&restored).await.unwrap();
    let request = csi::DeleteSnapshotRequest {
        snapshot_id: taken,
        ..Default::default()
    };
    client.controller().delete_snapshot(request).await.unwrap();
    for (id, staging) in &ids {
        client.unstage(id, staging).await.unwrap();
        client.delete(id).await.unwrap();
    }
    server.signal(Signal::SIGTERM);
    assert_eq!(server.wait(), Some(0));
    eventually("the image is unmounted", || {
        loops_on(&image_pool.join("pool.img")).is_empty()
    });
    drop(disk);
}
