//! SnapshotMetadata: streams pass through the router, no faster than they are read, and a broken
//! stream never ends with success.

use slackwater::csi::*;
use slackwater::model::{Alpha, PoolId};
use tonic::Code;
use uuid::Uuid;

use crate::router::cluster::*;
use crate::router::fake::{Fake, MESSAGES};
use crate::service::harness::*;

fn allocated(id: &str) -> GetMetadataAllocatedRequest {
    GetMetadataAllocatedRequest {
        snapshot_id: id.to_string(),
        ..Default::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_comes_from_the_snapshots_node() {
    let a = AgentNode::start("node-a", &["default"], None);
    let b = AgentNode::start("node-b", &["default"], None);
    let routed = TestRouter::with(all_alpha()).await;
    routed
        .set(&[("node-a", a.address), ("node-b", b.address)])
        .await;
    let id = routed.create_on("v", &b).await;
    let mut ids = Vec::new();
    for name in ["s1", "s2"] {
        let created = routed
            .controller()
            .create_snapshot(snapshot(name, &id))
            .await
            .unwrap();
        ids.push(created.into_inner().snapshot.unwrap().snapshot_id);
    }
    let mut metadata = routed.metadata.clone();
    let mut stream = metadata
        .get_metadata_allocated(allocated(&ids[0]))
        .await
        .unwrap()
        .into_inner();
    let mut size = 0;
    while let Some(message) = stream.message().await.unwrap() {
        size = message.volume_capacity_bytes;
    }
    assert_eq!(size, GIB);
    let delta = |base: &str, target: &str| GetMetadataDeltaRequest {
        base_snapshot_id: base.into(),
        target_snapshot_id: target.into(),
        ..Default::default()
    };
    let mut stream = metadata
        .get_metadata_delta(delta(&ids[0], &ids[1]))
        .await
        .unwrap()
        .into_inner();
    while stream.message().await.unwrap().is_some() {}
    refused(
        metadata.get_metadata_allocated(allocated("x")).await,
        Code::NotFound,
        &["x"],
    );
    refused(
        metadata.get_metadata_allocated(allocated("")).await,
        Code::InvalidArgument,
        &[],
    );
    refused(
        metadata.get_metadata_delta(delta("x", &ids[0])).await,
        Code::NotFound,
        &["x"],
    );
    let plain = TestRouter::with(Alpha::default()).await;
    plain.set(&[("node-b", b.address)]).await;
    let off = plain
        .metadata
        .clone()
        .get_metadata_allocated(allocated(&ids[0]))
        .await;
    refused(off, Code::Unimplemented, &["snapshot-metadata"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_reader_stops_the_agent_and_a_broken_stream_is_an_error() {
    let pool = PoolId(Uuid::from_u128(5));
    let fake = Fake::new("node-a", "home", &[pool]);
    let served = fake.serve();
    let routed = TestRouter::with(all_alpha()).await;
    routed.set(&[("node-a", served.address)]).await;
    let id = format!("{pool}.{}", Uuid::from_u128(6));
    let stream = routed
        .metadata
        .clone()
        .get_metadata_allocated(allocated(&id))
        .await;
    let mut stream = stream.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();
    // The agent sends as much as fits into the windows of both connections, and no more.
    let mut before = 0;
    eventually("the agent stops sending", async || {
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        let now = *fake.sent.lock().unwrap();
        std::mem::replace(&mut before, now) == now
    })
    .await;
    assert!(before < MESSAGES / 2, "{before} of {MESSAGES} were sent");
    drop(served);
    let broken = loop {
        match stream.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("a broken stream ended with success"),
            Err(status) => break status,
        }
    };
    assert_eq!(broken.code(), Code::Unavailable, "{broken:?}");
    assert!(broken.message().contains("node-a"), "{broken:?}");
}
