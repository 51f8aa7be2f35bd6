//! Rows of the table for the node's calls.

use nix::errno::Errno;
use slackwater::csi::volume_capability::access_mode::Mode;
use slackwater::csi::*;
use tonic::Code;

use super::{grow, refused};
use crate::service::harness::*;

fn grow_node(id: &str, path: &str, required: i64) -> NodeExpandVolumeRequest {
    NodeExpandVolumeRequest {
        volume_id: id.to_string(),
        volume_path: path.to_string(),
        capacity_range: at_least(required),
        ..Default::default()
    }
}

fn stats(id: &str, path: &str) -> NodeGetVolumeStatsRequest {
    NodeGetVolumeStatsRequest {
        volume_id: id.to_string(),
        volume_path: path.to_string(),
        ..Default::default()
    }
}

#[tokio::test]
async fn node_stage_volume() {
    let node = Node::start().await;
    let id = node.staged("v").await;
    let other_fs = NodeStageVolumeRequest {
        volume_capability: Some(mount_as("xfs", &[])),
        ..stage(&id)
    };
    let status = node
        .node
        .clone()
        .node_stage_volume(other_fs)
        .await
        .unwrap_err();
    assert!(
        matches!(
            status.code(),
            Code::AlreadyExists | Code::FailedPrecondition
        ),
        "{status:?}"
    );
    let as_block = NodeStageVolumeRequest {
        volume_capability: Some(block()),
        ..stage(&id)
    };
    refused(&node, as_block, Code::FailedPrecondition, &id[37..]).await;
    refused(&node, stage("nothing"), Code::NotFound, "nothing").await;

    let fresh = node.create("fresh").await.volume_id;
    let path = "/var/lib/kubelet/fresh".to_string();
    let stage = || NodeStageVolumeRequest {
        staging_target_path: path.clone(),
        ..stage(&fresh)
    };
    node.host.fail_always("mount", Some(Errno::EIO));
    refused(&node, stage(), Code::Internal, "EIO").await;
    node.host.fail_always("mount", Some(Errno::ENOSPC));
    refused(&node, stage(), Code::ResourceExhausted, "ENOSPC").await;
    node.host.clear_faults();
    node.node.clone().node_stage_volume(stage()).await.unwrap();
    node.stop().await;
}

#[tokio::test]
async fn node_publish_volume() {
    let node = Node::start().await;
    refused(&node, publish("nothing", TARGET), Code::NotFound, "nothing").await;
    let id = node.create("v").await.volume_id;
    refused(
        &node,
        publish(&id, TARGET),
        Code::FailedPrecondition,
        "not staged",
    )
    .await;
    let unsaid = NodePublishVolumeRequest {
        staging_target_path: String::new(),
        ..publish(&id, TARGET)
    };
    refused(
        &node,
        unsaid,
        Code::FailedPrecondition,
        "staging_target_path",
    )
    .await;
    node.node
        .clone()
        .node_stage_volume(stage(&id))
        .await
        .unwrap();
    node.node
        .clone()
        .node_publish_volume(publish(&id, TARGET))
        .await
        .unwrap();
    let read_only = NodePublishVolumeRequest {
        readonly: true,
        ..publish(&id, TARGET)
    };
    refused(&node, read_only, Code::AlreadyExists, TARGET).await;
    node.stop().await;
}

#[tokio::test]
async fn a_single_writer_is_single() {
    let node = Node::start().await;
    let id = node.staged("v").await;
    let single = |target: &str, mode_: Mode| NodePublishVolumeRequest {
        volume_capability: Some(VolumeCapability {
            access_mode: mode(mode_),
            ..mount()
        }),
        ..publish(&id, target)
    };
    let second = "/var/lib/kubelet/second";
    let mut kubelet = node.node.clone();
    kubelet
        .node_publish_volume(single(TARGET, Mode::SingleNodeSingleWriter))
        .await
        .unwrap();
    let again = single(second, Mode::SingleNodeSingleWriter);
    refused(&node, again, Code::FailedPrecondition, TARGET).await;
    // Several pods of one node share a ReadWriteOnce volume.
    let unpublish = NodeUnpublishVolumeRequest {
        volume_id: id.clone(),
        target_path: TARGET.into(),
    };
    kubelet.node_unpublish_volume(unpublish).await.unwrap();
    for target in [TARGET, second] {
        kubelet
            .node_publish_volume(single(target, Mode::SingleNodeMultiWriter))
            .await
            .unwrap();
    }
    node.stop().await;
}

#[tokio::test]
async fn stats_and_growth_on_the_node() {
    let node = Node::start().await;
    let id = node.staged("v").await;
    refused(
        &node,
        stats("nothing", "some/path"),
        Code::NotFound,
        "nothing",
    )
    .await;
    refused(&node, stats(&id, "some/path"), Code::NotFound, "some/path").await;
    refused(
        &node,
        grow_node("nothing", "some/path", GIB),
        Code::NotFound,
        "nothing",
    )
    .await;
    refused(
        &node,
        grow_node(&id, STAGING, 2 * GIB),
        Code::OutOfRange,
        "capacity_range",
    )
    .await;
    node.controller
        .clone()
        .controller_expand_volume(grow(&id, 2 * GIB, 0))
        .await
        .unwrap();
    node.host.fail_always("grow_fs", Some(Errno::ENOSPC));
    refused(
        &node,
        grow_node(&id, STAGING, 2 * GIB),
        // With any other code, the kubelet does not mount the volume.
        Code::FailedPrecondition,
        "ENOSPC",
    )
    .await;
    node.host.clear_faults();
    node.node
        .clone()
        .node_expand_volume(grow_node(&id, STAGING, 2 * GIB))
        .await
        .unwrap();
    node.stop().await;
}
