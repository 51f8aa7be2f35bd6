//! A volume whose file system carries a pool of this node: freezing the volume would stop that
//! pool.

use tonic::Code;

use super::{GIB, Node, definition, refused};
use slackwater_testkit::Server;

/// Replaces this driver by one with other pools.
fn serve(node: Node, pools: &[&str]) -> Node {
    let Node {
        server,
        client,
        disk,
        scratch,
    } = node;
    drop((server, client));
    let server = Server::start(&scratch, pools);
    Node::of(server, disk, scratch)
}

#[tokio::test]
async fn a_volume_that_carries_a_pool_is_not_frozen_while_that_pool_is_served() {
    let node = Node::on("xfs", 2 * GIB);
    let outer = definition(&node.disk.mount_point);
    let at = node.staging("v");
    let id = node.staged("v", &at, "xfs").await;
    let folder = at.join("pool");
    std::fs::create_dir(&folder).unwrap();
    let inner = format!("inner=file:{},init,mount=any", folder.display());

    let node = serve(node, &[&outer, &inner]);
    let message = refused(
        node.client.snapshot("s", &id, &[]).await,
        Code::FailedPrecondition,
    );
    assert!(message.contains("pool inner is stored on it"), "{message}");
    assert!(node.disk.snapshots().is_empty(), "nothing is left");

    let node = serve(node, &[&outer]);
    node.client.snapshot("s", &id, &[]).await.unwrap();
}
