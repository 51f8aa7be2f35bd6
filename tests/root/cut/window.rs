//! The freeze window of a real cut: its members cannot be changed, frozen file systems are listed
//! and can be thawed, and an early thaw discards the cut.

use std::path::{Path, PathBuf};
use std::time::Duration;

use slackwater::csi;
use tonic::{Code, Status};

use super::held::{Probe, Release, arm, await_stop, end_of, go_on};
use super::{GIB, Node, refused};
use slackwater_testkit::disk::mounts_below;
use slackwater_testkit::snapshots::from_snapshot;
use slackwater_testkit::{WAIT_TIMEOUT, eventually, mount, run, succeeds, unmount};

/// Longer than a test needs for its checks in the window.
const LONG: [(&str, &str); 2] = [("freezeTimeout", "30s"), ("retries", "0")];

/// A volume that is staged and published.
struct UsedVolume {
    id: String,
    fs: &'static str,
    staging: PathBuf,
    target: PathBuf,
}

async fn used(node: &Node, fs: &'static str) -> UsedVolume {
    let (staging, target) = (node.staging(fs), node.path(&format!("{fs}.target")));
    let id = node.staged(fs, &staging, fs).await;
    let published = node
        .client
        .publish(&id, &staging, &target, mount(fs), false)
        .await;
    published.unwrap();
    UsedVolume {
        id,
        fs,
        staging,
        target,
    }
}

async fn end(node: &Node, volumes: Vec<UsedVolume>) {
    for volume in volumes {
        let unpublished = node.client.unpublish(&volume.id, &volume.target).await;
        unpublished.unwrap();
        node.unstage_and_delete(&volume.id, &volume.staging).await;
    }
    node.assert_nothing_left();
}

/// Every call that could change a volume.
async fn everything(node: &Node, volume: &UsedVolume) -> Vec<(&'static str, Result<(), Status>)> {
    let (client, id, cap) = (&node.client, &volume.id, mount(volume.fs));
    let elsewhere = node.path(&format!("{}.elsewhere", volume.fs));
    let publish = client.publish(id, &volume.staging, &elsewhere, cap.clone(), false);
    vec![
        ("unpublish", client.unpublish(id, &volume.target).await),
        ("unstage", client.unstage(id, &volume.staging).await),
        ("expand", client.expand(id, 2 * GIB).await.map(drop)),
        (
            "node expand",
            client.expand_node(id, &volume.target).await.map(drop),
        ),
        ("publish", publish.await),
        ("stage", client.stage(id, &volume.staging, cap).await),
        ("delete", client.delete(id).await),
    ]
}

fn cannot_be_unmounted(path: &Path) {
    assert!(
        !succeeds("umount", &[path.to_str().unwrap()]),
        "{} is held",
        path.display()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn members_in_the_window_cannot_be_changed() {
    let mut node = Node::new();
    let mut volumes = Vec::new();
    for fs in ["ext4", "xfs", "btrfs"] {
        volumes.push(used(&node, fs).await);
    }
    // The guard stops when all file systems are frozen, and the driver waits for it.
    let faults = "guard.thaw:stop,driver.kill_guard:delay=300";
    node.restart_with(&[("SLACKWATER_FAULT", faults)]);
    let release = Release::of(&node);
    let ids: Vec<_> = volumes.iter().map(|volume| volume.id.clone()).collect();
    let before = mounts_below(&node.scratch.join("kubelet"));
    let client = node.client.clone();
    let call = tokio::spawn(async move { client.group("g", &ids, &LONG).await });
    release.await_stopped_guard();
    let writers: Vec<_> = volumes.iter().map(|v| Probe::start(&v.staging)).collect();
    assert!(writers.iter().all(Probe::is_stopped), "all are frozen");
    for volume in &volumes {
        for (what, answer) in everything(&node, volume).await {
            let status = answer.expect_err(what);
            assert_eq!(status.code(), Code::Aborted, "{what}: {status}");
        }
        cannot_be_unmounted(&volume.staging);
    }
    let mut same = tonic::Request::new(csi::CreateVolumeGroupSnapshotRequest {
        name: "g".into(),
        source_volume_ids: vec![volumes[0].id.clone()],
        ..Default::default()
    });
    same.set_timeout(Duration::from_secs(5));
    let mut groups = node.client.groups();
    let same = groups.create_volume_group_snapshot(same).await;
    refused(same, Code::Aborted);
    let single = node.client.snapshot_at_once("s", &volumes[0].id).await;
    refused(single, Code::Aborted);
    assert!(
        !call.is_finished() && writers.iter().all(Probe::is_stopped),
        "all of these errors occurred in the window"
    );
    release.kill_guards();
    let response = end_of(call).await.unwrap_err();
    assert!(response.message().contains("thawed"), "{response}");
    for writer in writers {
        writer.goes_on();
    }
    assert_eq!(
        node.client.snapshots("").await.unwrap(),
        Vec::<String>::new()
    );
    assert_eq!(mounts_below(&node.scratch.join("kubelet")), before);
    for volume in &volumes {
        let length = std::fs::metadata(node.image(&volume.id)).unwrap().len();
        assert_eq!(length, GIB, "the volume has not grown");
    }
    drop(release);
    node.restart_with(&[]);
    end(&node, volumes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn frozen_file_systems_are_listed_and_thawed_by_hand_and_the_cut_is_discarded() {
    let mut node = Node::new();
    let volume = used(&node, "xfs").await;
    assert_eq!(node.frozen(&[])["frozen"].as_array().unwrap().len(), 0);
    arm(&mut node, "effect.guard_freeze:stop-after");
    let release = Release::of(&node);
    let (client, id) = (node.client.clone(), volume.id.clone());
    let call = tokio::spawn(async move { client.snapshot("s", &id, &LONG).await });
    await_stop(&node);
    let writer = Probe::start(&volume.staging);
    assert!(writer.is_stopped());
    cannot_be_unmounted(&volume.staging);
    let listed = node.frozen(&[]);
    assert_eq!(listed["frozen"].as_array().unwrap().len(), 1, "{listed}");
    let one = &listed["frozen"][0];
    assert_eq!(one["volume"], volume.id);
    assert_eq!(one["owner_pid"], node.server.pid().as_raw());
    assert_eq!(one["state"], "held");
    let seconds = one["until"].as_u64().unwrap() - one["since"].as_u64().unwrap();
    assert!((30..=31).contains(&seconds), "{seconds}");
    let thawed = node.frozen(&["--thaw"]);
    assert_eq!(thawed["thawed"], serde_json::json!([volume.id]));
    writer.goes_on();
    go_on(&node);
    let response = end_of(call).await.unwrap_err();
    assert!(
        response.message().contains("another program thawed it"),
        "{response}"
    );
    assert_eq!(
        node.client.snapshots("").await.unwrap(),
        Vec::<String>::new()
    );
    eventually("the journal is empty", || {
        node.frozen(&[])["frozen"].as_array().unwrap().is_empty()
    });

    // After a regular cut, it is listed with its level.
    let snapshot = node.client.snapshot("t", &volume.id, &[]).await.unwrap();
    let listed_snapshots = node.cli_snapshots();
    assert_eq!(listed_snapshots.len(), 1);
    assert_eq!(listed_snapshots[0]["id"], snapshot.snapshot_id);
    assert_eq!(listed_snapshots[0]["level"], "filesystem");
    assert_eq!(listed_snapshots[0]["state"], "ready");
    let deleted = node.client.delete_snapshot(&snapshot.snapshot_id).await;
    deleted.unwrap();
    drop(release);
    end(&node, vec![volume]).await;
}

/// A foreign process thaws in the window, and writes: that cut is never answered.
async fn foreign_thaw(fs: &'static str, retries: &'static str) {
    let mut node = Node::new();
    let volume = used(&node, fs).await;
    arm(&mut node, "effect.guard_freeze:stop-after");
    let release = Release::of(&node);
    let (client, id) = (node.client.clone(), volume.id.clone());
    let call = tokio::spawn(async move {
        let class = [
            ("freezeTimeout", "30s"),
            ("retries", retries),
            ("retryInterval", "10ms"),
        ];
        client.snapshot("s", &id, &class).await
    });
    await_stop(&node);
    run("fsfreeze", &["-u", volume.staging.to_str().unwrap()]);
    std::fs::write(volume.staging.join("later"), "in between").unwrap();
    go_on(&node);
    let answer = end_of(call).await;
    Probe::start(&volume.staging).goes_on();
    if retries == "0" {
        answer.unwrap_err();
        let listed = node.client.snapshots("").await.unwrap();
        assert_eq!(listed, Vec::<String>::new());
        assert_eq!(node.disk.snapshots().len(), 0);
    } else {
        // The second cut is answered: it contains the data written after the first freeze.
        let snapshot = answer.unwrap().snapshot_id;
        let source = from_snapshot(&snapshot);
        let restored = node.client.create_from("r", GIB, mount(fs), source, &[]);
        let restored = restored.await.unwrap().volume_id;
        let place = node.staging("r");
        node.stage(&restored, &place, mount(fs)).await;
        let later = std::fs::read_to_string(place.join("later")).unwrap();
        assert_eq!(later, "in between");
        node.unstage_and_delete(&restored, &place).await;
        node.client.delete_snapshot(&snapshot).await.unwrap();
    }
    drop(release);
    end(&node, vec![volume]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_thaw_in_the_window_never_results_in_a_snapshot() {
    tokio::join!(foreign_thaw("xfs", "0"), foreign_thaw("btrfs", "1"));
}

/// A pool that nothing could be written to for some seconds refuses calls until its disk was
/// checked again.
async fn snapshot_once_the_disk_answers(node: &Node, volume: &str) -> String {
    let taken = async {
        loop {
            match node.client.snapshot("t", volume, &[]).await {
                Err(status) if status.message().contains("its disk hangs") => {
                    assert_eq!(status.code(), Code::Unavailable);
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                answer => return answer.unwrap().snapshot_id,
            }
        }
    };
    let taken = tokio::time::timeout(WAIT_TIMEOUT, taken).await;
    taken.expect("the pool is used again")
}

/// The pool's own file system is frozen below, so that FIFREEZE does not return.
#[tokio::test(flavor = "multi_thread")]
async fn a_freeze_that_hangs_blocks_the_writer_no_longer_than_its_cause() {
    let mut node = Node::new();
    let volume = used(&node, "ext4").await;
    arm(&mut node, "effect.guard_freeze:stop");
    let mut release = Release::of(&node);
    let (client, id) = (node.client.clone(), volume.id.clone());
    let call = tokio::spawn(async move {
        let class = [("freezeTimeout", "1s"), ("retries", "0")];
        client.snapshot("s", &id, &class).await
    });
    await_stop(&node);
    // Gives the freeze something to write back.
    std::fs::write(volume.staging.join("loose"), "not written back").unwrap();
    release.freeze(&node.disk.mount_point);
    go_on(&node);
    // The prepared files are on the pool and cannot be removed, so the answer is not final.
    let response = refused(end_of(call).await, Code::Aborted);
    assert!(response.contains("before the deadline"), "{response}");
    let again = node.client.snapshot_at_once("s", &volume.id).await;
    refused(again, Code::Aborted);
    let writer = Probe::start(&volume.staging);
    assert!(writer.is_stopped(), "its cause lasts");
    release.thaw();
    writer.goes_on();
    eventually("the prepared files are removed", || {
        node.disk.snapshots().is_empty()
    });
    let snapshot = snapshot_once_the_disk_answers(&node, &volume.id).await;
    assert_eq!(
        node.client.snapshots("").await.unwrap(),
        std::slice::from_ref(&snapshot)
    );
    node.client.delete_snapshot(&snapshot).await.unwrap();
    drop(release);
    end(&node, vec![volume]).await;
}

/// A file system that is mounted over a staging path is not the volume.
#[tokio::test(flavor = "multi_thread")]
async fn a_mount_over_a_staged_volume_is_never_frozen_instead() {
    let node = Node::new();
    let volume = used(&node, "xfs").await;
    let path = volume.staging.to_str().unwrap();
    run("mount", &["-t", "tmpfs", "none", path]);
    let response = node.client.snapshot("s", &volume.id, &[]).await;
    Probe::start(&volume.staging).goes_on();
    unmount(&volume.staging);
    assert!(response.unwrap_err().message().contains("mounted there"));
    let listed = node.client.snapshots("").await.unwrap();
    assert_eq!(listed, Vec::<String>::new());
    Probe::start(&volume.staging).goes_on();
    end(&node, vec![volume]).await;
}
