//! Calls about one object: the router sends them to the node that has it, and the answer is that of
//! a single node.

use slackwater::csi::*;
use slackwater::model::{Alpha, PoolId};
use tonic::{Code, Request};
use uuid::Uuid;

use crate::router::cluster::*;
use crate::router::fake::Fake;
use crate::service::harness::*;

async fn two() -> (AgentNode, AgentNode, TestRouter) {
    let (a, b) = (
        AgentNode::start("node-a", &["default"], None),
        AgentNode::start("node-b", &["default"], None),
    );
    let routed = TestRouter::of(&[&a, &b]).await;
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
        let created = controller
            .create_snapshot(snapshot(name, &id))
            .await
            .unwrap();
        let created = created.into_inner().snapshot.unwrap();
        assert_eq!(created.source_volume_id, id);
        let deleted = controller
            .delete_snapshot(delete_snapshot(&created.snapshot_id))
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
async fn an_invalid_id_is_refused_without_calling_any_agent() {
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
    // A missing field is reported first, also for an unknown object.
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
async fn a_pool_that_no_agent_reports_is_never_considered_deleted() {
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
    routed.kubernetes.update(|state| {
        state.known.push(slackwater::router::cluster::KnownPool {
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
async fn two_agents_with_one_pool_are_both_named_and_none_is_called() {
    let a = AgentNode::start("node-a", &["default"], None);
    let twin = Fake::new("node-b", &a.home(), &[a.pool_id()]);
    let served = twin.serve();
    let routed = TestRouter::new(&[("node-a", a.address), ("node-b", served.address)]).await;
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
        "at most one lookup"
    );
    // An agent that only remembers the pool does not count.
    twin.description.lock().unwrap().pools[0].refusal = "its disk is not mounted".into();
    routed
        .until_described("node-b", |description| {
            !description.pools[0].refusal.is_empty()
        })
        .await;
    controller.delete_volume(delete(&id)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_moves_to_another_agent_is_found_there() {
    let (mut a, b, routed) = two().await;
    let id = routed.create_on("v", &a).await;
    let pool = a.pool_id();
    a.kill();
    let move_uid = Fake::new("node-c", &a.home(), &[pool]);
    let served = move_uid.serve();
    routed
        .set(&[("node-b", b.address), ("node-c", served.address)])
        .await;
    routed
        .controller()
        .delete_volume(delete(&id))
        .await
        .unwrap();
    assert_eq!(move_uid.timeouts.lock().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_detach_calls_no_agent() {
    let routed = TestRouter::with(Alpha::default()).await;
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
async fn alpha_calls_are_served_if_enabled() {
    let a = AgentNode::start("node-a", &["default"], None);
    let plain = TestRouter::of(&[&a]).await;
    let all = TestRouter::with(all_alpha()).await;
    all.set(&[("node-a", a.address)]).await;
    let id = plain.create_on("v", &a).await;
    let created = plain
        .controller()
        .create_snapshot(snapshot("s", &id))
        .await
        .unwrap();
    let snapshot_id = created.into_inner().snapshot.unwrap().snapshot_id;
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
    let node = AgentNode::start("node-x", &["default"], None);
    let asked = ControllerGetCapabilitiesRequest {};
    let mut agent = csi_client(&node).await;
    let agents = agent.controller_get_capabilities(asked).await.unwrap();
    assert_eq!(can.unwrap().into_inner(), agents.into_inner());
}

async fn csi_client(
    node: &AgentNode,
) -> controller_client::ControllerClient<tonic::transport::Channel> {
    let endpoint = slackwater::router::agents::endpoint(&node.address.to_string());
    controller_client::ControllerClient::new(endpoint.unwrap().connect_lazy())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_is_ready_when_each_agent_has_answered_or_failed() {
    let routed = TestRouter::with(Alpha::default()).await;
    let mut identity = routed.identity.clone();
    let ready = async |identity: &mut identity_client::IdentityClient<_>| {
        let probe = identity.probe(Request::new(ProbeRequest {})).await;
        probe.unwrap().into_inner().ready
    };
    assert_eq!(ready(&mut identity).await, Some(false));
    refused(routed.list(0).await, Code::Unavailable, &["not known yet"]);
    let unused_address = std::net::SocketAddr::from(([127, 0, 0, 1], 1));
    routed.set(&[("node-a", unused_address)]).await;
    assert_eq!(ready(&mut identity).await, Some(true));
    let info = identity
        .get_plugin_info(GetPluginInfoRequest {})
        .await
        .unwrap();
    assert_eq!(info.into_inner().name, DRIVER);
}
