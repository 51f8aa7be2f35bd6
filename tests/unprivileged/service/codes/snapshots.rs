//! Rows of the table for calls about snapshots, restores and groups.

use std::path::Path;
use std::sync::Arc;

use nix::errno::Errno;
use slackwater::csi::*;
use slackwater::host::memory::{MemoryHost, MemoryOptions};
use slackwater::model::Alpha;
use tonic::Code;

use super::{ELSEWHERE, refused};
use crate::service::calls::Call;
use crate::service::gate::GatedHost;
use crate::service::harness::*;
use crate::service::snapshots::{made_from, of_class, restore, three};

fn get(id: &str) -> GetSnapshotRequest {
    GetSnapshotRequest {
        snapshot_id: id.to_string(),
        ..Default::default()
    }
}

fn get_group(id: &str, members: &[&str]) -> GetVolumeGroupSnapshotRequest {
    GetVolumeGroupSnapshotRequest {
        group_snapshot_id: id.to_string(),
        snapshot_ids: members.iter().map(|id| id.to_string()).collect(),
        ..Default::default()
    }
}

fn delete_group(id: &str, members: &[&str]) -> DeleteVolumeGroupSnapshotRequest {
    DeleteVolumeGroupSnapshotRequest {
        group_snapshot_id: id.to_string(),
        snapshot_ids: members.iter().map(|id| id.to_string()).collect(),
        ..Default::default()
    }
}

#[tokio::test]
async fn snapshots() {
    let node = Node::with_alpha(all_alpha()).await;
    let (a, b) = (node.create("a").await, node.create("b").await);
    let cut = node.cut("s", &a.volume_id).await;
    let other = snapshot("s", &b.volume_id);
    refused(&node, other, Code::AlreadyExists, "source_volume_id").await;
    let field = "parameters.consistency filesystem instead of application";
    let more = of_class("s", &a.volume_id, &[("consistency", "application")]);
    refused(&node, more, Code::AlreadyExists, field).await;
    for id in ["nothing", "../../etc/passwd", "ä\u{0}b"] {
        refused(&node, snapshot("t", id), Code::NotFound, "volume").await;
        refused(&node, get(id), Code::NotFound, "snapshot").await;
        Call::from(delete_snapshot(id)).send(&node).await.unwrap();
    }
    // A snapshot is not a volume and a volume is not a snapshot, although their IDs look alike.
    refused(&node, get(&a.volume_id), Code::NotFound, &a.volume_id).await;
    let of_a_snapshot = snapshot("t", &cut.snapshot_id);
    refused(&node, of_a_snapshot, Code::NotFound, &cut.snapshot_id).await;
    refused(&node, get(""), Code::InvalidArgument, "snapshot_id").await;
    let list = ListSnapshotsRequest {
        starting_token: "invalid-token".into(),
        ..Default::default()
    };
    refused(&node, list, Code::Aborted, "start the list again").await;
    Call::from(delete_snapshot(&a.volume_id))
        .send(&node)
        .await
        .unwrap();
    node.read(&a.volume_id).await;
    node.stop().await;
}

#[tokio::test]
async fn volumes_from_a_source() {
    let node = Node::start().await;
    let id = node.create("v").await.volume_id;
    node.read(&id).await;
    let cut = node.cut("s", &id).await.snapshot_id;
    refused(
        &node,
        restore("r", "nothing"),
        Code::NotFound,
        "snapshot nothing",
    )
    .await;
    refused(&node, restore("r", &id), Code::NotFound, &id).await;
    let clone = |name: &str, id: &str| made_from(name, from_volume(id));
    refused(
        &node,
        clone("c", "nothing"),
        Code::NotFound,
        "volume nothing",
    )
    .await;
    refused(&node, clone("c", &cut), Code::NotFound, &cut).await;

    let smaller = CreateVolumeRequest {
        capacity_range: at_least(GIB - 1),
        ..restore("r", &cut)
    };
    refused(
        &node,
        smaller,
        Code::OutOfRange,
        "capacity_range.required_bytes",
    )
    .await;
    let smaller = CreateVolumeRequest {
        capacity_range: range(0, GIB - 1),
        ..clone("c", &id)
    };
    refused(
        &node,
        smaller,
        Code::OutOfRange,
        "capacity_range.limit_bytes",
    )
    .await;
    let other_fs = CreateVolumeRequest {
        volume_capabilities: vec![mount_as("xfs", &[])],
        ..restore("r", &cut)
    };
    refused(&node, other_fs, Code::InvalidArgument, "xfs").await;

    // A name belongs to one source, and an empty volume has no source.
    node.make(restore("r", &cut)).await;
    let field = "volume_content_source";
    refused(&node, create("r"), Code::AlreadyExists, field).await;
    refused(&node, clone("r", &id), Code::AlreadyExists, field).await;
    refused(&node, restore("v", &cut), Code::AlreadyExists, field).await;
    node.stop().await;
}

#[tokio::test]
async fn groups() {
    let node = Node::start().await;
    let (a, b) = (node.create("a").await, node.create("b").await);
    let (a, b) = (a.volume_id.as_str(), b.volume_id.as_str());
    let lost = group("g", &[a, "nothing"]);
    refused(&node, lost, Code::NotFound, "volume nothing").await;
    assert_eq!(node.snapshots().await, [], "all or none");

    let created = node.group(group("g", &[a, b])).await;
    let id = created.group_snapshot_id.as_str();
    let members: Vec<_> = created.snapshots.iter().map(|s| &*s.snapshot_id).collect();
    let fewer = group("g", &[a]);
    refused(&node, fewer, Code::AlreadyExists, "source_volume_ids").await;
    refused(
        &node,
        delete_snapshot(members[0]),
        Code::InvalidArgument,
        id,
    )
    .await;
    for wrong in [&members[..1], &[members[0], "nothing"], &["nothing"]] {
        let call = get_group(id, wrong);
        refused(&node, call, Code::InvalidArgument, "snapshot_ids").await;
        let call = delete_group(id, wrong);
        refused(&node, call, Code::InvalidArgument, "snapshot_ids").await;
    }
    assert_eq!(node.snapshots().await.len(), 2, "nothing was changed");
    for none in ["nothing", "../..", "ä\u{0}b"] {
        refused(
            &node,
            get_group(none, &[]),
            Code::NotFound,
            "group snapshot",
        )
        .await;
        Call::from(delete_group(none, &[]))
            .send(&node)
            .await
            .unwrap();
    }
    node.stop().await;
}

/// Several volumes in use need one moment at which all of them are cut.
#[tokio::test]
async fn groups_of_volumes_in_use() {
    let node = Node::start().await;
    let ids = three(&node).await;
    let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
    let class = |pairs: [(&str, &str); 2]| CreateVolumeGroupSnapshotRequest {
        parameters: map(pairs),
        ..group("g", &ids)
    };
    let crash = class([("consistency", "crash"), ("retries", "0")]);
    let field = "parameters.consistency";
    refused(&node, crash.clone(), Code::InvalidArgument, field).await;
    let way_out = class([
        ("consistency", "application"),
        ("onQuiesceFailure", "crash"),
    ]);
    let field = "parameters.onQuiesceFailure";
    refused(&node, way_out, Code::InvalidArgument, field).await;

    let raw = CreateVolumeRequest {
        volume_capabilities: vec![block()],
        parameters: map([("blockGroups", "false")]),
        ..create("raw")
    };
    let raw = node.make(raw).await.volume_id;
    let stage = NodeStageVolumeRequest {
        volume_capability: Some(block()),
        ..stage(&raw)
    };
    Call::from(stage).send(&node).await.unwrap();
    let publish = NodePublishVolumeRequest {
        volume_capability: Some(block()),
        ..publish(&raw, TARGET)
    };
    Call::from(publish).send(&node).await.unwrap();
    let with_raw = group("g", &[ids[0], &raw]);
    refused(&node, with_raw, Code::FailedPrecondition, "blockGroups").await;
    assert_eq!(node.snapshots().await, [], "nothing was changed");
    // A single volume has a moment of its own, and so has a volume in use together with idle ones.
    node.cut("alone", &raw).await;
    let quiet = node.create("quiet").await.volume_id;
    let beside = CreateVolumeGroupSnapshotRequest {
        source_volume_ids: vec![raw, quiet],
        ..crash
    };
    node.group(beside).await;
    node.stop().await;
}

#[tokio::test]
async fn a_pool_that_is_not_served_is_unavailable_for_snapshots_as_well() {
    let node = Node::with_alpha(all_alpha()).await;
    let id = ELSEWHERE;
    let here = node.create("v").await.volume_id;
    let list = |source: &str, one: &str| ListSnapshotsRequest {
        source_volume_id: source.into(),
        snapshot_id: one.into(),
        ..Default::default()
    };
    let unavailable: [Call; 9] = [
        snapshot("s", id).into(),
        delete_snapshot(id).into(),
        get(id).into(),
        list(id, "").into(),
        list("", id).into(),
        restore("r", id).into(),
        made_from("c", from_volume(id)).into(),
        group("g", &[&here, id]).into(),
        delete_group("00000000-0000-5000-8000-000000000003", &[id]).into(),
    ];
    let pool = "00000000-0000-4000-8000-000000000001";
    for call in unavailable {
        refused(&node, call, Code::Unavailable, pool).await;
    }
    assert_eq!(node.snapshots().await, []);
    node.stop().await;
}

#[tokio::test]
async fn a_host_that_fails_leaves_nothing_or_is_not_final() {
    let node = Node::start().await;
    let id = node.create("v").await.volume_id;
    let snapshots = Path::new("/memory/default/snapshots");
    for (errno, code) in [
        (Errno::EIO, Code::Internal),
        (Errno::ENOSPC, Code::ResourceExhausted),
    ] {
        node.host.fail_always("clone_whole", Some(errno));
        refused(&node, snapshot("s", &id), code, "").await;
        refused(&node, group("g", &[&id]), code, "").await;
        refused(&node, made_from("c", from_volume(&id)), code, "").await;
        node.host.clear_faults();
        let left = node.host.files_below(snapshots);
        assert!(
            left.is_empty(),
            "the code is final, but something is left: {left:?}"
        );
    }
    node.stop().await;
}

#[tokio::test]
async fn a_defect_while_cutting_is_never_final() {
    let machine = MemoryHost::new();
    let host = GatedHost::new(machine.clone());
    let node = Node::on(machine, Arc::new(host.clone()), Alpha::default(), |_| {}).await;
    let id = node.create("v").await.volume_id;
    host.panic_from_now();
    refused(&node, snapshot("s", &id), Code::Aborted, "internal error").await;
    refused(&node, group("g", &[&id]), Code::Aborted, "internal error").await;
    assert_eq!(
        node.driver.pools.locks_held(),
        0,
        "a defect releases its locks"
    );
    node.stop().await;
}

#[tokio::test]
async fn a_damaged_record_is_never_a_forgotten_snapshot() {
    let before = Node::start().await;
    let id = before.create("v").await.volume_id;
    let cut = before.cut("s", &id).await.snapshot_id;
    let uuid = cut.split_once('.').unwrap().1;
    let record = format!("/memory/default/snapshots/{uuid}/record.json");
    let machine = before.host.clone();
    machine.put_file(Path::new(&record), b"{ not json").unwrap();
    let machine = machine.restart_process();
    before.stop().await;
    let node = Node::on(machine.clone(), Arc::new(machine), all_alpha(), |_| {}).await;
    let again = snapshot("s", &id);
    refused(&node, again, Code::Unavailable, "damaged").await;
    refused(&node, restore("r", &cut), Code::Unavailable, "damaged").await;
    refused(&node, get(&cut), Code::Internal, "damaged").await;
    node.stop().await;
}

#[tokio::test]
async fn a_full_pool_is_exhausted_and_a_cut_that_runs_is_aborted() {
    let machine = MemoryHost::with_options(MemoryOptions {
        capacity: 4 << 30,
        ..Default::default()
    });
    let host = GatedHost::new(machine.clone());
    let node = Node::on(machine, Arc::new(host.clone()), Alpha::default(), |_| {}).await;
    let thick = CreateVolumeRequest {
        parameters: map([("allocation", "thick")]),
        capacity_range: at_least(2 * GIB),
        ..create("v")
    };
    // Its snapshot may grow to hold all of it.
    let id = node.make(thick).await.volume_id;
    refused(
        &node,
        snapshot("s", &id),
        Code::ResourceExhausted,
        "bytes available",
    )
    .await;
    refused(
        &node,
        group("g", &[&id]),
        Code::ResourceExhausted,
        "bytes available",
    )
    .await;

    let id = node.create("w").await.volume_id;
    host.close("clone_whole");
    let (caller, request) = (node.controller.clone(), snapshot("s", &id));
    let cut = tokio::spawn(async move { caller.clone().create_snapshot(request).await });
    host.reached(1).await;
    let again = snapshot("s", &id);
    // Each call waits for a while before it is refused. They run at the same time, so that the held
    // call does not meet its own deadline.
    tokio::join!(
        refused(&node, again, Code::Aborted, "snapshot name \"s\""),
        refused(&node, snapshot("t", &id), Code::Aborted, "volume"),
        refused(&node, group("g", &[&id]), Code::Aborted, "volume"),
    );
    refused(&node, delete(&id), Code::Aborted, "volume").await;
    refused(&node, stage(&id), Code::Aborted, "volume").await;
    host.open();
    let created = cut.await.unwrap().unwrap().into_inner().snapshot.unwrap();
    assert_eq!(node.snapshots().await, [created]);
    node.stop().await;
}
