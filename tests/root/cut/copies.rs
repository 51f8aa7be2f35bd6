//! Copies on pools without block sharing: of idle volumes, with progress that survives a restart of
//! the driver, and into another pool of the same machine.

use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use serde_json::Value;
use tonic::Code;

use super::held::{Release, arm, await_hang, await_stop, end_of, go_on};
use super::{GIB, MIB, Node, check_pattern, refused, write_pattern};
use slackwater_testkit::snapshots::{from_snapshot, from_volume};
use slackwater_testkit::{Disk, Scratch, Server, eventually, mount};

const BYTES: usize = 8 << 20;
/// Large enough that a copy at the copy rate takes seconds.
const SIZE: u64 = GIB;
/// For tests where the copy must only take some time.
const LESS: u64 = 512 * MIB;

/// A volume with content that is no longer in use.
async fn filled(node: &Node, name: &str, size: u64) -> (String, PathBuf) {
    let client = &node.client;
    let id = client.create(name, size, mount("ext4"), &[]).await.unwrap();
    let staging = node.staging(name);
    client.stage(&id, &staging, mount("ext4")).await.unwrap();
    write_pattern(&staging.join("first"), 1, BYTES);
    // ext4 places it into another block group, far behind.
    std::fs::create_dir(staging.join("folder")).unwrap();
    write_pattern(&staging.join("folder/last"), 2, BYTES);
    client.unstage(&id, &staging).await.unwrap();
    (id, staging)
}

fn check_content(staging: &Path) {
    check_pattern(&staging.join("first"), 1, BYTES);
    check_pattern(&staging.join("folder/last"), 2, BYTES);
}

/// The only record in a folder of the pool that is not ready.
fn unready(folder: &Path) -> Option<Value> {
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    let mut records = entries.filter_map(|entry| {
        let text = std::fs::read_to_string(entry.path().join("record.json")).ok()?;
        serde_json::from_str::<Value>(&text).ok()
    });
    records.find(|record| record["copy"].is_object())
}

/// Terminates a driver that has stopped itself in a copy.
fn terminate(node: &mut Node) {
    await_stop(node);
    node.server.signal(Signal::SIGTERM);
    go_on(node);
    assert_eq!(node.server.wait(), Some(0));
}

fn copied(folder: &Path) -> Option<u64> {
    unready(folder)?["copy"]["copied"].as_u64()
}

/// Restores a snapshot, and checks its content.
async fn check_snapshot(node: &Node, snapshot: &str) {
    let client = &node.client;
    let source = from_snapshot(snapshot);
    let restored = client.create_from("check", SIZE, mount("ext4"), source, &[]);
    let restored = restored.await.unwrap().volume_id;
    let staging = node.staging("check");
    let staged = client.stage(&restored, &staging, mount("ext4")).await;
    staged.unwrap();
    check_content(&staging);
    node.unstage_and_delete(&restored, &staging).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_is_resumed_after_the_driver_was_killed() {
    let mut node = Node::on("ext4", 12 * GIB);
    let (id, staging) = filled(&node, "v", SIZE).await;
    let snapshots = node.disk.mount_point.join("snapshots");
    let call = |node: &Node| {
        let (client, id) = (node.client.clone(), id.clone());
        tokio::spawn(async move { client.snapshot("s", &id, &[]).await })
    };
    let first = call(&node);
    eventually("a part of the copy is durable", || {
        copied(&snapshots).is_some_and(|copied| copied > 0)
    });
    // While the copy runs, other calls are refused with a temporary error, and nothing of it is
    // listed. It runs until the test has checked this, because the pool is frozen below it.
    let mut release = Release::of(&node);
    release.freeze(&node.disk.mount_point);
    let client = &node.client;
    refused(client.snapshot_at_once("s", &id).await, Code::Aborted);
    refused(client.snapshot_at_once("other", &id).await, Code::Aborted);
    refused(client.delete(&id).await, Code::Aborted);
    let source = from_volume(&id);
    let clone = client.create_from("c", SIZE, mount("ext4"), source, &[]);
    refused(clone.await, Code::Aborted);
    assert_eq!(client.snapshots("").await.unwrap(), Vec::<String>::new());
    let listed_snapshot = &node.cli_snapshots()[0];
    assert_eq!(listed_snapshot["state"], "preparing");
    assert!(
        listed_snapshot["copied_bytes"].as_u64().unwrap() > 0,
        "{listed_snapshot}"
    );
    await_hang(&node);
    node.server.signal(Signal::SIGKILL);
    release.thaw();
    node.server.kill();
    end_of(first).await.unwrap_err();
    let at_death = copied(&snapshots).unwrap();
    assert!((512 * MIB..SIZE).contains(&at_death), "{at_death}");

    // A stop makes all of the copy durable, and reports no final error.
    arm(&mut node, "effect.copy_range:stop-after");
    let second = call(&node);
    terminate(&mut node);
    refused(end_of(second).await, Code::Unavailable);
    let at_stop = copied(&snapshots).unwrap();
    assert!(
        (at_death + 1..SIZE).contains(&at_stop),
        "{at_death} {at_stop}"
    );

    node.restart_with(&[]);
    let effects = node.scratch.join("effects");
    let log = format!("effect.all:log={}", effects.display());
    node.restart_with(&[("SLACKWATER_FAULT", &log)]);
    let snapshot = end_of(call(&node)).await.unwrap().snapshot_id;
    let effects = std::fs::read_to_string(effects).unwrap();
    let steps = effects.lines().filter(|line| line.ends_with("copy_range"));
    let expected = (SIZE - at_stop).div_ceil(16 * MIB);
    assert_eq!(
        steps.count() as u64,
        expected,
        "only the remainder was copied"
    );
    assert_eq!(copied(&snapshots), None);
    node.client.delete(&id).await.unwrap();
    check_snapshot(&node, &snapshot).await;
    node.client.delete_snapshot(&snapshot).await.unwrap();
    drop(staging);
    node.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_ends_when_its_source_is_staged() {
    let mut node = Node::on("ext4", 12 * GIB);
    let (id, staging) = filled(&node, "v", LESS).await;
    for of_volume in [false, true] {
        arm(&mut node, "effect.copy_range:stop-after");
        let client = &node.client;
        let (again, source) = (client.clone(), id.clone());
        let call = tokio::spawn(async move {
            if of_volume {
                let source = from_volume(&source);
                let clone = again.create_from("c", LESS, mount("ext4"), source, &[]);
                return clone.await.map(|volume| volume.volume_id);
            }
            let snapshot = again.snapshot("s", &source, &[]).await;
            snapshot.map(|snapshot| snapshot.snapshot_id)
        });
        await_stop(&node);
        let folder = if of_volume { "volumes" } else { "snapshots" };
        assert!(unready(&node.disk.mount_point.join(folder)).is_some());
        go_on(&node);
        client.stage(&id, &staging, mount("ext4")).await.unwrap();
        let answer = refused(end_of(call).await, Code::Aborted);
        assert!(answer.contains("aborted the copy"), "{answer}");
        // The volume is in use, so a retry cannot help.
        let answer = client.snapshot("s", &id, &[]).await;
        refused(answer, Code::FailedPrecondition);
        assert!(node.disk.snapshots().is_empty());
        assert_eq!(client.list().await.unwrap(), std::slice::from_ref(&id));
        check_content(&staging);
        std::fs::write(staging.join("more"), "its user continues").unwrap();
        client.unstage(&id, &staging).await.unwrap();
    }
    node.client.delete(&id).await.unwrap();
    node.assert_nothing_left();
}

/// Data that was copied from a volume that has changed since is worthless.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_of_a_volume_that_was_used_in_between_starts_over() {
    let mut node = Node::on("ext4", 8 * GIB);
    let (id, staging) = filled(&node, "v", LESS).await;
    arm(&mut node, "effect.copy_range:stop-after");
    let (client, of) = (node.client.clone(), id.clone());
    let call = tokio::spawn(async move { client.snapshot("s", &of, &[]).await });
    let snapshots = node.disk.mount_point.join("snapshots");
    terminate(&mut node);
    end_of(call).await.unwrap_err();
    assert!(copied(&snapshots).unwrap() > 0);
    node.restart_with(&[]);
    let client = &node.client;
    client.stage(&id, &staging, mount("ext4")).await.unwrap();
    write_pattern(&staging.join("first"), 7, BYTES);
    client.unstage(&id, &staging).await.unwrap();
    let snapshot = client.snapshot("s", &id, &[]).await.unwrap().snapshot_id;
    let source = from_snapshot(&snapshot);
    let restored = client.create_from("check", LESS, mount("ext4"), source, &[]);
    let restored = restored.await.unwrap().volume_id;
    let place = node.staging("check");
    let staged = client.stage(&restored, &place, mount("ext4")).await;
    staged.unwrap();
    check_pattern(&place.join("first"), 7, BYTES);
    check_pattern(&place.join("folder/last"), 2, BYTES);
    node.unstage_and_delete(&restored, &place).await;
    client.delete_snapshot(&snapshot).await.unwrap();
    client.delete(&id).await.unwrap();
    node.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_by_copy_is_resumed_after_a_stop() {
    let mut node = Node::on("ext4", 8 * GIB);
    let (id, _) = filled(&node, "v", LESS).await;
    let call = |node: &Node| {
        let (client, source) = (node.client.clone(), from_volume(&id));
        tokio::spawn(async move {
            let clone = client.create_from("c", LESS, mount("ext4"), source, &[]);
            clone.await
        })
    };
    let volumes = node.disk.mount_point.join("volumes");
    arm(&mut node, "effect.copy_range:stop-after");
    let first = call(&node);
    terminate(&mut node);
    end_of(first).await.unwrap_err();
    let effects = node.scratch.join("effects");
    let log = format!("effect.all:log={}", effects.display());
    node.restart_with(&[("SLACKWATER_FAULT", &log)]);
    let at_stop = copied(&volumes).expect("a start keeps what is copied");
    assert!((1..LESS).contains(&at_stop), "{at_stop}");
    let listed = node.client.list().await.unwrap();
    assert_eq!(listed, std::slice::from_ref(&id), "it is not a volume yet");
    let clone = end_of(call(&node)).await.unwrap().volume_id;
    let effects = std::fs::read_to_string(effects).unwrap();
    let steps = effects.lines().filter(|line| line.ends_with("copy_range"));
    let expected = (LESS - at_stop).div_ceil(16 * MIB);
    assert_eq!(
        steps.count() as u64,
        expected,
        "only the remainder was copied"
    );
    node.client.delete(&id).await.unwrap();
    let place = node.staging("c");
    let staged = node.client.stage(&clone, &place, mount("ext4")).await;
    staged.unwrap();
    check_content(&place);
    node.unstage_and_delete(&clone, &place).await;
    node.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restore_or_clone_into_another_pool_is_a_copy() {
    let scratch = Scratch::new();
    let disk = Disk::new(&scratch, "pool", "xfs", 4 * GIB);
    let other = Disk::new(&scratch, "other", "ext4", 4 * GIB);
    let pools = [&disk, &other].map(|disk| {
        let name = disk.mount_point.file_name().unwrap().to_str().unwrap();
        let name = if name == "pool" { "default" } else { name };
        format!("{name}=file:{},init", disk.mount_point.display())
    });
    let server = Server::start(&scratch, &[&pools[0], &pools[1]]);
    let client = server.client();
    let node = Node {
        server,
        client,
        disk,
        scratch,
    };
    let client = &node.client;
    let (id, staging) = filled(&node, "v", LESS).await;
    client.stage(&id, &staging, mount("ext4")).await.unwrap();
    // A snapshot of a volume in use is possible; a clone of it into another pool would be a copy.
    let snapshot = client.snapshot("s", &id, &[]).await.unwrap().snapshot_id;
    let there = [("pool", "other")];
    let clone = client.create_from("c", LESS, mount("ext4"), from_volume(&id), &there);
    let answer = refused(clone.await, Code::FailedPrecondition);
    assert!(answer.contains("take a snapshot and restore"), "{answer}");
    write_pattern(&staging.join("first"), 9, BYTES);
    client.unstage(&id, &staging).await.unwrap();
    for (name, source, seed) in [
        ("restored", from_snapshot(&snapshot), 1),
        ("cloned", from_volume(&id), 9),
    ] {
        let created = client.create_from(name, LESS, mount("ext4"), source.clone(), &there);
        let created = created.await.unwrap();
        assert_eq!(created.content_source, Some(source));
        assert_eq!(other.volumes().len(), 1, "{name} is in the other pool");
        let place = node.staging(name);
        let staged = client
            .stage(&created.volume_id, &place, mount("ext4"))
            .await;
        staged.unwrap();
        check_pattern(&place.join("first"), seed, BYTES);
        check_pattern(&place.join("folder/last"), 2, BYTES);
        node.unstage_and_delete(&created.volume_id, &place).await;
        assert!(other.volumes().is_empty() && other.trash().is_empty());
    }
    client.delete_snapshot(&snapshot).await.unwrap();
    client.delete(&id).await.unwrap();
    node.assert_nothing_left();
}
