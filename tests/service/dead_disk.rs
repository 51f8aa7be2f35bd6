//! A disk that dies beneath one pool is that pool's trouble alone.

use std::path::Path;

use slackwater::csi::*;
use slackwater::cut::Seams;
use slackwater::model::Alpha;
use slackwater::operation::Driver;

use crate::harness::*;

/// A node with the pools "a" and "b".
async fn two_pools() -> Node {
    let pools = |settings: &mut slackwater::operation::Settings| {
        settings.pools = vec![pool("a"), pool("b")];
    };
    Node::with(Alpha::default(), pools).await
}

/// A volume in a pool, staged and published.
async fn published(node: &Node, pool: &str) -> String {
    let request = CreateVolumeRequest {
        parameters: map([("pool", pool)]),
        ..create(pool)
    };
    let made = node.controller.clone().create_volume(request).await;
    let id = made.unwrap().into_inner().volume.unwrap().volume_id;
    let mut client = node.node.clone();
    client.node_stage_volume(stage_in(pool, &id)).await.unwrap();
    let target = format!("{TARGET}-{pool}");
    let request = NodePublishVolumeRequest {
        staging_target_path: format!("{STAGING}-{pool}"),
        ..publish(&id, &target)
    };
    client.node_publish_volume(request).await.unwrap();
    id
}

fn stage_in(pool: &str, id: &str) -> NodeStageVolumeRequest {
    NodeStageVolumeRequest {
        staging_target_path: format!("{STAGING}-{pool}"),
        ..stage(id)
    }
}

/// Takes a published volume through the rest of its life.
async fn end(node: &Node, pool: &str, id: &str) {
    let mut client = node.node.clone();
    let unpublish = NodeUnpublishVolumeRequest {
        volume_id: id.into(),
        target_path: format!("{TARGET}-{pool}"),
    };
    client.node_unpublish_volume(unpublish).await.unwrap();
    let unstage = NodeUnstageVolumeRequest {
        volume_id: id.into(),
        staging_target_path: format!("{STAGING}-{pool}"),
    };
    client.node_unstage_volume(unstage.clone()).await.unwrap();
    let staged = client.node_stage_volume(stage_in(pool, id)).await;
    staged.unwrap();
    client.node_unstage_volume(unstage).await.unwrap();
    let delete = DeleteVolumeRequest {
        volume_id: id.into(),
        ..Default::default()
    };
    let deleted = node.controller.clone().delete_volume(delete).await;
    deleted.unwrap();
}

#[tokio::test]
async fn volumes_of_other_pools_go_on_beside_a_dead_loop() {
    let node = two_pools().await;
    published(&node, "a").await;
    let id = published(&node, "b").await;
    node.host.kill_disk(Path::new("/memory/a")).unwrap();
    end(&node, "b", &id).await;
}

#[tokio::test]
async fn a_start_beside_a_dead_loop_serves_the_other_pools() {
    let node = two_pools().await;
    published(&node, "a").await;
    published(&node, "b").await;
    node.host.kill_disk(Path::new("/memory/a")).unwrap();
    let (settings, host) = (node.driver.settings().clone(), node.host.restart_process());
    let next = Driver::start(settings, Seams::simulated(host)).unwrap();
    let refused = |name: &str| {
        let status = next.pool_status();
        let pool = status.iter().find(|pool| pool.name == name).unwrap();
        pool.refusal.clone()
    };
    assert_eq!(refused("b"), None);
    assert!(refused("a").unwrap().contains("EIO"));
}
