//! The table of codes: rendered into `docs/errors.md`, and each row tested with the real driver.

mod document;
mod node;
mod snapshots;

use std::path::Path;
use std::sync::Arc;

use nix::errno::Errno;
use slackwater::csi::*;
use slackwater::host::memory::{MemoryHost, MemoryOptions};
use slackwater::model::Alpha;
use tonic::{Code, Status};

use crate::service::calls::Call;
use crate::service::gate::GatedHost;
use crate::service::harness::*;

/// Sends a call that must be refused with this code and these words.
async fn refused(node: &Node, call: impl Into<Call>, code: Code, words: &str) -> Status {
    let call = call.into();
    let rpc = call.rpc();
    let status = match call.send(node).await {
        Ok(answer) => panic!("{rpc} was answered with {answer}"),
        Err(status) => status,
    };
    assert_eq!(status.code(), code, "{rpc}: {}", status.message());
    assert!(
        status.message().contains(words),
        "{rpc}: {}",
        status.message()
    );
    assert!(status.details().is_empty(), "details stay empty");
    status
}

fn attach(id: &str, node_id: &str) -> ControllerPublishVolumeRequest {
    ControllerPublishVolumeRequest {
        volume_id: id.to_string(),
        node_id: node_id.to_string(),
        volume_capability: Some(mount()),
        ..Default::default()
    }
}

fn grow(id: &str, required: i64, limit: i64) -> ControllerExpandVolumeRequest {
    ControllerExpandVolumeRequest {
        volume_id: id.to_string(),
        capacity_range: range(required, limit),
        ..Default::default()
    }
}

/// A well-formed ID of a pool that does not exist.
const ELSEWHERE: &str = "00000000-0000-4000-8000-000000000001.00000000-0000-5000-8000-000000000002";

#[tokio::test]
async fn create_volume() {
    let node = Node::start().await;
    node.create("taken").await;
    let other_size = CreateVolumeRequest {
        capacity_range: range(2 * GIB, 2 * GIB),
        ..create("taken")
    };
    refused(&node, other_size, Code::AlreadyExists, "capacity_bytes").await;
    let other_class = CreateVolumeRequest {
        parameters: map([("allocation", "thick")]),
        ..create("taken")
    };
    refused(
        &node,
        other_class,
        Code::AlreadyExists,
        "allocation thin instead of thick",
    )
    .await;
    let other_access = CreateVolumeRequest {
        volume_capabilities: vec![block()],
        ..create("taken")
    };
    refused(
        &node,
        other_access,
        Code::AlreadyExists,
        "volume_capabilities",
    )
    .await;

    let elsewhere = Topology {
        segments: map([("topology.csi.slackwater.dev/home", "another")]),
    };
    let elsewhere = CreateVolumeRequest {
        accessibility_requirements: Some(TopologyRequirement {
            requisite: vec![elsewhere.clone()],
            preferred: vec![elsewhere],
        }),
        ..create("elsewhere")
    };
    refused(
        &node,
        elsewhere,
        Code::ResourceExhausted,
        "accessibility_requirements",
    )
    .await;
    let keyless = CreateVolumeRequest {
        accessibility_requirements: Some(TopologyRequirement {
            requisite: vec![Topology::default()],
            preferred: vec![],
        }),
        ..create("keyless")
    };
    refused(
        &node,
        keyless,
        Code::ResourceExhausted,
        "accessibility_requirements",
    )
    .await;

    let large = CreateVolumeRequest {
        capacity_range: at_least(1 << 45),
        ..create("large")
    };
    refused(&node, large, Code::ResourceExhausted, "pool default").await;
    let small = CreateVolumeRequest {
        capacity_range: range(MIB, 100 * MIB),
        volume_capabilities: vec![mount_as("xfs", &[])],
        ..create("small")
    };
    refused(&node, small, Code::OutOfRange, "capacity_range.limit_bytes").await;
    let absurd = CreateVolumeRequest {
        capacity_range: at_least(i64::MAX),
        ..create("absurd")
    };
    refused(
        &node,
        absurd,
        Code::OutOfRange,
        "capacity_range.required_bytes",
    )
    .await;
    node.stop().await;
}

#[tokio::test]
async fn create_volume_on_a_host_that_fails() {
    let node = Node::start().await;
    let volumes = Path::new("/memory/default/volumes");
    node.host.fail_always("allocate", Some(Errno::EIO));
    refused(&node, create("v"), Code::Internal, "EIO").await;
    let left = node.host.files_below(volumes);
    assert!(
        left.is_empty(),
        "the code is final, but something is left: {left:?}"
    );
    node.host.fail_always("allocate", Some(Errno::ENOSPC));
    refused(&node, create("v"), Code::ResourceExhausted, "ENOSPC").await;
    // Longer than the longest file of the pool's file system. Another node's pool has the same
    // limit.
    node.host.fail_always("allocate", Some(Errno::EFBIG));
    refused(&node, create("v"), Code::OutOfRange, "EFBIG").await;
    let left = node.host.files_below(volumes);
    assert!(
        left.is_empty(),
        "the code is final, but something is left: {left:?}"
    );
    node.host.clear_faults();
    // Neither the work nor its undo succeeds.
    node.host.fail_always("rename", Some(Errno::EIO));
    refused(&node, create("v"), Code::Aborted, "cleanup").await;
    assert!(!node.host.files_below(volumes).is_empty());
    node.host.clear_faults();
    node.create("v").await;
    node.stop().await;
}

#[tokio::test]
async fn a_defect_is_never_final_if_something_may_be_left() {
    let machine = MemoryHost::new();
    let host = GatedHost::new(machine.clone());
    let node = Node::on(machine, Arc::new(host.clone()), Alpha::default(), |_| {}).await;
    let id = node.create("v").await.volume_id;
    host.panic_from_now();
    refused(&node, create("w"), Code::Aborted, "internal error").await;
    refused(&node, stage(&id), Code::Aborted, "internal error").await;
    refused(&node, delete(&id), Code::Internal, "internal error").await;
    assert_eq!(
        node.driver.pools.locks_held(),
        0,
        "a defect releases its locks"
    );
    assert_eq!(node.driver.running(), 0);
    node.stop().await;
}

#[tokio::test]
async fn a_pool_that_is_not_served_is_unavailable_and_never_not_found() {
    let node = Node::start().await;
    let id = ELSEWHERE;
    let unavailable: [Call; 7] = [
        delete(id).into(),
        attach(id, NODE).into(),
        grow(id, GIB, 0).into(),
        ControllerModifyVolumeRequest {
            volume_id: id.into(),
            ..Default::default()
        }
        .into(),
        ValidateVolumeCapabilitiesRequest {
            volume_id: id.into(),
            volume_capabilities: vec![mount()],
            ..Default::default()
        }
        .into(),
        stage(id).into(),
        publish(id, TARGET).into(),
    ];
    for call in unavailable {
        refused(
            &node,
            call,
            Code::Unavailable,
            "00000000-0000-4000-8000-000000000001",
        )
        .await;
    }
    // These calls need only the mount table.
    node.unstage(id).await;
    let unpublish = NodeUnpublishVolumeRequest {
        volume_id: id.into(),
        target_path: TARGET.into(),
    };
    node.node
        .clone()
        .node_unpublish_volume(unpublish)
        .await
        .unwrap();
    node.stop().await;
}

#[tokio::test]
async fn a_damaged_record_is_never_a_forgotten_volume() {
    let before = Node::start().await;
    let id = before.create("v").await.volume_id;
    let uuid = id.split_once('.').unwrap().1;
    let record = format!("/memory/default/volumes/{uuid}/record.json");
    before
        .host
        .put_file(Path::new(&record), b"{ not json")
        .unwrap();
    let machine = before.host.restart_process();
    before.stop().await;
    let node = Node::on(machine.clone(), Arc::new(machine), Alpha::default(), |_| {}).await;
    refused(&node, create("v"), Code::Unavailable, "damaged").await;
    refused(&node, stage(&id), Code::Unavailable, "damaged").await;
    refused(&node, grow(&id, 2 * GIB, 0), Code::Internal, "damaged").await;
    // A delete must not remove a volume whose record is unreadable.
    refused(&node, delete(&id), Code::Internal, "damaged").await;
    node.stop().await;
}

#[tokio::test]
async fn delete_volume() {
    let node = Node::start().await;
    let id = node.staged("v").await;
    refused(&node, delete(&id), Code::FailedPrecondition, STAGING).await;
    node.stop().await;
}

#[tokio::test]
async fn the_controllers_other_calls() {
    let node = Node::with_alpha(all_alpha()).await;
    let id = node.create("v").await.volume_id;
    refused(
        &node,
        attach("nothing", NODE),
        Code::NotFound,
        "volume nothing",
    )
    .await;
    refused(&node, attach(&id, "node-2"), Code::NotFound, "node node-2").await;
    let validate = ValidateVolumeCapabilitiesRequest {
        volume_id: "nothing".into(),
        volume_capabilities: vec![mount()],
        ..Default::default()
    };
    refused(&node, validate, Code::NotFound, "nothing").await;
    let list = |token: &str| ListVolumesRequest {
        starting_token: token.into(),
        ..Default::default()
    };
    refused(
        &node,
        list("invalid-token"),
        Code::Aborted,
        "start the list again",
    )
    .await;
    let list = ControllerListVolumeHealthRequest {
        starting_token: "\u{7f}".into(),
        ..Default::default()
    };
    refused(&node, list, Code::Aborted, "starting_token").await;
    let get = ControllerGetVolumeRequest {
        volume_id: "nothing".into(),
    };
    refused(&node, get, Code::NotFound, "nothing").await;
    let health = ControllerGetVolumeHealthRequest {
        volume_id: "nothing".into(),
        ..Default::default()
    };
    refused(&node, health, Code::NotFound, "nothing").await;
    let modify = ControllerModifyVolumeRequest {
        volume_id: "nothing".into(),
        mutable_parameters: map([("wipe", "zero")]),
        ..Default::default()
    };
    refused(&node, modify, Code::NotFound, "nothing").await;

    refused(&node, grow("nothing", GIB, 0), Code::NotFound, "nothing").await;
    refused(&node, grow(&id, 0, MIB), Code::OutOfRange, "cannot shrink").await;
    // The user can lower the claim again; after RESOURCE_EXHAUSTED, the resizer would repeat for
    // ever.
    refused(
        &node,
        grow(&id, 1 << 45, 0),
        Code::OutOfRange,
        "pool default",
    )
    .await;
    node.stop().await;
}

#[tokio::test]
async fn a_full_pool_refuses_thick_volumes_as_the_scheduler_needs_it() {
    let machine = MemoryHost::with_options(MemoryOptions {
        capacity: 3 << 30,
        ..Default::default()
    });
    let node = Node::on(machine.clone(), Arc::new(machine), Alpha::default(), |_| {}).await;
    let thick = |name: &str| CreateVolumeRequest {
        parameters: map([("allocation", "thick")]),
        capacity_range: at_least(2 * GIB),
        ..create(name)
    };
    let created = node
        .controller
        .clone()
        .create_volume(thick("a"))
        .await
        .unwrap();
    // A lost answer must not leak a volume: existing volumes are compared before free space is
    // checked.
    let again = node
        .controller
        .clone()
        .create_volume(thick("a"))
        .await
        .unwrap();
    assert_eq!(created.into_inner(), again.into_inner());
    refused(
        &node,
        thick("b"),
        Code::ResourceExhausted,
        "bytes available",
    )
    .await;
    node.stop().await;
}

#[tokio::test]
async fn a_stopping_driver_is_unavailable() {
    let node = Node::start().await;
    node.driver.stop();
    refused(&node, create("v"), Code::Unavailable, "stopping").await;
    refused(&node, stage("v"), Code::Unavailable, "stopping").await;
    node.stop().await;
}
