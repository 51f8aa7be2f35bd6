//! Calls about one object: they go to whoever has it, and answer as a single node does.

use slackwater::csi::*;
use slackwater::model::{Alpha, PoolId};
use tonic::{Code, Request};
use uuid::Uuid;

use crate::fake::Fake;
use crate::ground::*;
use crate::harness::*;

async fn two() -> (Peer, Peer, Routed) {
    let (a, b) = (
        Peer::start("node-a", &["default"], None),
        Peer::start("node-b", &["default"], None),
    );
    let routed = Routed::of(&[&a, &b]).await;
    (a, b, routed)
}

fn delete(id: &str) -> DeleteVolumeRequest {
    DeleteVolumeRequest {
        volume_id: id.to_string(),
        ..Default::default()
    }
}

fn expand(id: &str, bytes: i64) -> ControllerExpandVolumeRequest {
    ControllerExpandVolumeRequest {
        volume_id: id.to_string(),
        capacity_range: at_least(bytes),
        ..Default::default()
    }
}

fn attach(id: &str, node: &str) -> ControllerPublishVolumeRequest {
    ControllerPublishVolumeRequest {
        volume_id: id.to_string(),
        node_id: node.to_string(),
        volume_capability: Some(mount()),
        ..Default::default()
    }
}

fn validate(id: &str) -> ValidateVolumeCapabilitiesRequest {
    ValidateVolumeCapabilitiesRequest {
        volume_id: id.to_string(),
        volume_capabilities: vec![mount()],
        ..Default::default()
    }
}

fn modify(id: &str) -> ControllerModifyVolumeRequest {
    ControllerModifyVolumeRequest {
        volume_id: id.to_string(),
        mutable_parameters: map([("wipe", "zero")]),
        ..Default::default()
    }
}

fn delete_snapshot(id: &str) -> DeleteSnapshotRequest {
    DeleteSnapshotRequest {
        snapshot_id: id.to_string(),
        ..Default::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_call_reaches_the_node_that_has_the_volume() {
    let (a, b, routed) = two().await;
    for (name, node, other) in [("va", &a, &b), ("vb", &b, &a)] {
        let id = routed.create_on(name, node).await;
        assert!(id.starts_with(&node.pool_id().to_string()), "{id}");
        let mut controller = routed.controller();
        let grown = controller
            .controller_expand_volume(expand(&id, 2 * GIB))
            .await;
        assert_eq!(grown.unwrap().into_inner().capacity_bytes, 2 * GIB);
        let confirmed = controller.validate_volume_capabilities(validate(&id)).await;
        assert!(confirmed.unwrap().into_inner().confirmed.is_some());
        controller
            .controller_modify_volume(modify(&id))
            .await
            .unwrap();
        let attached = controller
            .controller_publish_volume(attach(&id, &node.name))
            .await;
        attached.unwrap();
        let elsewhere = controller
            .controller_publish_volume(attach(&id, &other.name))
            .await;
        refused(
            elsewhere,
            Code::FailedPrecondition,
            &[&node.name, &other.name],
        );
        let nowhere = controller
            .controller_publish_volume(attach(&id, "nowhere"))
            .await;
        refused(nowhere, Code::NotFound, &["node nowhere"]);
        let made = controller
            .create_snapshot(snapshot(name, &id))
            .await
            .unwrap();
        let made = made.into_inner().snapshot.unwrap();
        assert_eq!(made.source_volume_id, id);
        let deleted = controller
            .delete_snapshot(delete_snapshot(&made.snapshot_id))
            .await;
        deleted.unwrap();
        controller.delete_volume(delete(&id)).await.unwrap();
        controller.delete_volume(delete(&id)).await.unwrap();
        let gone = controller
            .controller_expand_volume(expand(&id, 3 * GIB))
            .await;
        refused(gone, Code::NotFound, &[&id]);
    }
    assert_eq!(a.machine.violations(), Vec::<String>::new());
    assert_eq!(b.machine.violations(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_id_leads_nowhere_without_asking_anybody() {
    let (mut a, mut b, routed) = two().await;
    a.kill();
    b.kill();
    let mut controller = routed.controller();
    for id in ["x", "../../etc", &format!("{}", Uuid::nil())] {
        controller.delete_volume(delete(id)).await.unwrap();
        controller
            .delete_snapshot(delete_snapshot(id))
            .await
            .unwrap();
        let request = ListSnapshotsRequest {
            snapshot_id: id.to_string(),
            ..Default::default()
        };
        let listed = controller.list_snapshots(request).await.unwrap();
        assert!(listed.into_inner().entries.is_empty());
        refused(
            controller.controller_expand_volume(expand(id, GIB)).await,
            Code::NotFound,
            &[id],
        );
        refused(
            controller.validate_volume_capabilities(validate(id)).await,
            Code::NotFound,
            &[],
        );
        refused(
            controller.controller_modify_volume(modify(id)).await,
            Code::NotFound,
            &[],
        );
        refused(
            controller
                .controller_publish_volume(attach(id, "node-a"))
                .await,
            Code::NotFound,
            &[],
        );
        refused(
            controller.create_snapshot(snapshot("s", id)).await,
            Code::NotFound,
            &[id],
        );
        let source = VolumeContentSource {
            r#type: Some(from_snapshot(id)),
        };
        let restore = CreateVolumeRequest {
            volume_content_source: Some(source),
            ..create("r")
        };
        refused(
            controller.create_volume(restore).await,
            Code::NotFound,
            &["snapshot"],
        );
    }
    // What is missing is said first, also of what nobody has.
    refused(
        controller.delete_volume(delete("")).await,
        Code::InvalidArgument,
        &["volume_id"],
    );
    let nothing = ValidateVolumeCapabilitiesRequest {
        volume_id: "x".into(),
        ..Default::default()
    };
    refused(
        controller.validate_volume_capabilities(nothing).await,
        Code::InvalidArgument,
        &["volume_capabilities"],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_nobody_shows_is_never_taken_for_deleted() {
    let (_a, _b, routed) = two().await;
    let pool = PoolId(Uuid::from_u128(7));
    let id = format!("{pool}.{}", Uuid::from_u128(8));
    let mut controller = routed.controller();
    let unknown = controller.delete_volume(delete(&id)).await;
    refused(
        unknown,
        Code::Unavailable,
        &[&pool.to_string(), "no agent reports it"],
    );
    let unknown = controller.delete_snapshot(delete_snapshot(&id)).await;
    refused(unknown, Code::Unavailable, &[&pool.to_string()]);
    routed.kubernetes.say(|said| {
        said.known.push(slackwater::router::cluster::KnownPool {
            id: pool,
            name: "fast".into(),
            node: "node-c".into(),
            home: "h".into(),
            lost: false,
        });
    });
    let known = controller.delete_volume(delete(&id)).await;
    refused(known, Code::Unavailable, &["node-c", "pool fast"]);
    let listed = ListSnapshotsRequest {
        source_volume_id: id.clone(),
        ..Default::default()
    };
    refused(
        controller.list_snapshots(listed).await,
        Code::Unavailable,
        &["node-c"],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn two_agents_with_one_pool_are_both_named_and_none_is_asked() {
    let a = Peer::start("node-a", &["default"], None);
    let twin = Fake::new("node-b", &a.home(), &[a.pool_id()]);
    let served = twin.serve();
    let routed = Routed::new(&[("node-a", a.address), ("node-b", served.address)]).await;
    let id = format!("{}.{}", a.pool_id(), Uuid::from_u128(8));
    let mut controller = routed.controller();
    let both = controller.delete_volume(delete(&id)).await;
    refused(both, Code::Unavailable, &["node-a", "node-b"]);
    refused(
        routed.list(0).await,
        Code::Unavailable,
        &["node-a", "node-b"],
    );
    refused(
        routed.create(at(create("v"), &[&a.home()])).await,
        Code::Unavailable,
        &["node-a", "node-b"],
    );
    assert!(
        twin.timeouts.lock().unwrap().len() <= 1,
        "at most a look-up"
    );
    // One that only remembers it doesn't count.
    twin.told.lock().unwrap().pools[0].refusal = "its disk isn't mounted".into();
    routed
        .until_told("node-b", |told| !told.pools[0].refusal.is_empty())
        .await;
    controller.delete_volume(delete(&id)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_moves_to_another_agent_is_found_there() {
    let (mut a, b, routed) = two().await;
    let id = routed.create_on("v", &a).await;
    let pool = a.pool_id();
    a.kill();
    let mover = Fake::new("node-c", &a.home(), &[pool]);
    let served = mover.serve();
    routed
        .set(&[("node-b", b.address), ("node-c", served.address)])
        .await;
    routed
        .controller()
        .delete_volume(delete(&id))
        .await
        .unwrap();
    assert_eq!(mover.timeouts.lock().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_detach_asks_nobody() {
    let routed = Routed::with(Alpha::default()).await;
    let request = ControllerUnpublishVolumeRequest {
        volume_id: format!("{}.{}", Uuid::from_u128(1), Uuid::from_u128(2)),
        node_id: "node-a".into(),
        ..Default::default()
    };
    let mut controller = routed.controller();
    controller
        .controller_unpublish_volume(request)
        .await
        .unwrap();
    let nothing = ControllerUnpublishVolumeRequest::default();
    refused(
        controller.controller_unpublish_volume(nothing).await,
        Code::InvalidArgument,
        &["volume_id"],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn alpha_calls_are_served_where_they_are_asked_for() {
    let a = Peer::start("node-a", &["default"], None);
    let plain = Routed::of(&[&a]).await;
    let all = Routed::with(all_alpha()).await;
    all.set(&[("node-a", a.address)]).await;
    let id = plain.create_on("v", &a).await;
    let made = plain
        .controller()
        .create_snapshot(snapshot("s", &id))
        .await
        .unwrap();
    let snapshot_id = made.into_inner().snapshot.unwrap().snapshot_id;
    let get = || ControllerGetVolumeRequest {
        volume_id: id.clone(),
    };
    let get_snapshot = || GetSnapshotRequest {
        snapshot_id: snapshot_id.clone(),
        ..Default::default()
    };
    let health = || ControllerGetVolumeHealthRequest {
        volume_id: id.clone(),
        ..Default::default()
    };
    let (mut off, mut on) = (plain.controller(), all.controller());
    refused(
        off.controller_get_volume(get()).await,
        Code::Unimplemented,
        &["get-volume"],
    );
    refused(
        off.get_snapshot(get_snapshot()).await,
        Code::Unimplemented,
        &["get-snapshot"],
    );
    refused(
        off.controller_get_volume_health(health()).await,
        Code::Unimplemented,
        &["health"],
    );
    let list = ControllerListVolumeHealthRequest::default();
    refused(
        off.controller_list_volume_health(list).await,
        Code::Unimplemented,
        &["health"],
    );
    let got = on.controller_get_volume(get()).await.unwrap().into_inner();
    assert_eq!(got.volume.unwrap().volume_id, id);
    let got = on.get_snapshot(get_snapshot()).await.unwrap().into_inner();
    assert_eq!(got.snapshot.unwrap().snapshot_id, snapshot_id);
    on.controller_get_volume_health(health()).await.unwrap();
    let list = ControllerListVolumeHealthRequest::default();
    let listed = on
        .controller_list_volume_health(list)
        .await
        .unwrap()
        .into_inner();
    assert_eq!(listed.entries[0].volume_id, id);
    let can = on
        .controller_get_capabilities(ControllerGetCapabilitiesRequest {})
        .await;
    let node = Peer::start("node-x", &["default"], None);
    let asked = ControllerGetCapabilitiesRequest {};
    let mut agent = csi_client(&node).await;
    let agents = agent.controller_get_capabilities(asked).await.unwrap();
    assert_eq!(can.unwrap().into_inner(), agents.into_inner());
}

async fn csi_client(node: &Peer) -> controller_client::ControllerClient<tonic::transport::Channel> {
    let endpoint = slackwater::router::agents::endpoint(&node.address.to_string());
    controller_client::ControllerClient::new(endpoint.unwrap().connect_lazy())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_is_ready_when_each_agent_has_answered_or_failed() {
    let routed = Routed::with(Alpha::default()).await;
    let mut identity = routed.identity.clone();
    let ready = async |identity: &mut identity_client::IdentityClient<_>| {
        let probe = identity.probe(Request::new(ProbeRequest {})).await;
        probe.unwrap().into_inner().ready
    };
    assert_eq!(ready(&mut identity).await, Some(false));
    refused(routed.list(0).await, Code::Unavailable, &["not known yet"]);
    let nobody = std::net::SocketAddr::from(([127, 0, 0, 1], 1));
    routed.set(&[("node-a", nobody)]).await;
    assert_eq!(ready(&mut identity).await, Some(true));
    let info = identity
        .get_plugin_info(GetPluginInfoRequest {})
        .await
        .unwrap();
    assert_eq!(info.into_inner().name, DRIVER);
}
