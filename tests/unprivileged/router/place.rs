//! The placement of new volumes.

use slackwater::csi::*;
use tonic::Code;

use crate::router::cluster::*;
use crate::service::harness::*;

fn restore(name: &str, source: volume_content_source::Type) -> CreateVolumeRequest {
    CreateVolumeRequest {
        volume_content_source: Some(VolumeContentSource {
            r#type: Some(source),
        }),
        ..create(name)
    }
}

fn large(name: &str) -> CreateVolumeRequest {
    CreateVolumeRequest {
        capacity_range: at_least(20 * GIB),
        ..create(name)
    }
}

/// One large node and one small one.
async fn unlike() -> (AgentNode, AgentNode, TestRouter) {
    let a = AgentNode::start("node-a", &["default", "only-a"], Some(200 * GIB as u64));
    let b = AgentNode::start("node-b", &["default"], Some(10 * GIB as u64));
    let routed = TestRouter::of(&[&a, &b]).await;
    (a, b, routed)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_with_restore_source_goes_where_its_source_is() {
    let (a, b, routed) = unlike().await;
    let id = routed.create_on("v", &a).await;
    let created = routed
        .controller()
        .create_snapshot(snapshot("s", &id))
        .await
        .unwrap();
    let snapshot_id = created.into_inner().snapshot.unwrap().snapshot_id;
    routed.kubernetes.update(|state| {
        state.selected.insert("ns/claim".into(), "node-b".into());
    });
    for (name, source) in [
        ("clone", from_volume(&id)),
        ("restore", from_snapshot(&snapshot_id)),
    ] {
        // The other node is preferred and selected.
        let mut request = at(restore(name, source.clone()), &[&b.home(), &a.home()]);
        request.parameters.insert("restore".into(), "source".into());
        let created = routed.create(claimed(request, "ns/claim")).await.unwrap();
        assert_eq!(home_of(&created), a.home());
        let out_of_reach = at(restore("x", source), &[&b.home()]);
        refused(
            routed.create(out_of_reach).await,
            Code::ResourceExhausted,
            &[&a.home()],
        );
    }
    assert_eq!(b.driver.pool_status()[0].volumes, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_with_a_selected_node_goes_there_or_nowhere() {
    let (a, b, routed) = unlike().await;
    routed.kubernetes.update(|state| {
        state.selected.insert("ns/claim".into(), "node-b".into());
    });
    let preferred = |request| claimed(at(request, &[&b.home(), &a.home()]), "ns/claim");
    let created = routed.create(preferred(create("small"))).await.unwrap();
    assert_eq!(home_of(&created), b.home());
    // Its node is full: the volume is not created on the other one, although the topology allows
    // it.
    refused(
        routed.create(preferred(large("large"))).await,
        Code::ResourceExhausted,
        &["node-b"],
    );
    assert_eq!(a.driver.pool_status()[0].volumes, 0);
    // A pool that this node lacks.
    let mut elsewhere = preferred(create("pool"));
    elsewhere.parameters.insert("pool".into(), "only-a".into());
    refused(
        routed.create(elsewhere).await,
        Code::ResourceExhausted,
        &["node-b", "only-a"],
    );
    // Without a selected node, the router tries the next one.
    let created = routed
        .create(at(large("large"), &[&b.home(), &a.home()]))
        .await
        .unwrap();
    assert_eq!(home_of(&created), a.home());
    // It is unknown whether a node is selected.
    routed.kubernetes.update(|state| state.unknown = true);
    refused(
        routed.create(preferred(create("unknown"))).await,
        Code::Unavailable,
        &["API server"],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_gone_takes_no_new_volumes() {
    let (a, b, routed) = unlike().await;
    routed.kubernetes.update(|state| {
        state.selected.insert("ns/claim".into(), "node-b".into());
        state.gone.insert("node-b".into());
    });
    let request = || at(create("v"), &[&b.home(), &a.home()]);
    refused(
        routed.create(claimed(request(), "ns/claim")).await,
        Code::ResourceExhausted,
        &["node-b is no longer in the cluster"],
    );
    let created = routed.create(request()).await.unwrap();
    assert_eq!(home_of(&created), a.home());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_is_found_wherever_it_is() {
    let (a, b, routed) = unlike().await;
    let created = routed.create(at(create("v"), &[&b.home()])).await.unwrap();
    for request in [
        create("v"),
        at(create("v"), &[&a.home(), &b.home()]),
        at(create("v"), &[&b.home(), &a.home()]),
    ] {
        let again = routed.create(request).await.unwrap();
        assert_eq!(again.volume_id, created.volume_id);
    }
    refused(
        routed.create(large("v")).await,
        Code::AlreadyExists,
        &["capacity_bytes"],
    );
    assert_eq!(a.driver.pool_status()[0].volumes, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_leaves_no_second_volume() {
    let (a, mut b, routed) = unlike().await;
    let created = routed.create(at(create("v"), &[&b.home()])).await.unwrap();
    // The node that has the volume is away. Since it may have the volume, no other node creates
    // another one.
    b.kill();
    for request in [create("v"), at(create("v"), &[&a.home(), &b.home()])] {
        refused(routed.create(request).await, Code::Unavailable, &["node-b"]);
        routed.until("node-b", false).await;
    }
    assert_eq!(a.driver.pool_status()[0].volumes, 0);
    // Where it cannot exist, a new one may be created.
    let here = routed.create(at(create("w"), &[&a.home()])).await.unwrap();
    assert_eq!(home_of(&here), a.home());
    b.revive();
    routed.until("node-b", true).await;
    let again = routed
        .create(at(create("v"), &[&a.home(), &b.home()]))
        .await
        .unwrap();
    assert_eq!(again.volume_id, created.volume_id);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_class_names_pools_that_only_some_nodes_have() {
    let (a, b, routed) = unlike().await;
    for n in 0..6 {
        let mut request = create(&format!("v{n}"));
        request.parameters.insert("pool".into(), "only-a".into());
        let created = routed.create(request).await.unwrap();
        assert_eq!(home_of(&created), a.home());
    }
    let mut request = at(create("x"), &[&b.home()]);
    request.parameters.insert("pool".into(), "only-a".into());
    refused(
        routed.create(request).await,
        Code::ResourceExhausted,
        &["only-a"],
    );
    let mut request = create("y");
    request.parameters.insert("pool".into(), "nobody's".into());
    refused(
        routed.create(request).await,
        Code::InvalidArgument,
        &["nobody's"],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_for_anywhere_are_spread_and_each_finds_its_place_again() {
    let nodes: Vec<_> = (0..4)
        .map(|n| AgentNode::start(&format!("node-{n}"), &["default"], None))
        .collect();
    let routed = TestRouter::of(&nodes.iter().collect::<Vec<_>>()).await;
    for n in 0..40 {
        let mut request = create(&format!("v{n}"));
        request.capacity_range = at_least(8 * MIB);
        routed.create(request).await.unwrap();
    }
    let counts: Vec<_> = nodes
        .iter()
        .map(|node| node.driver.pool_status()[0].volumes)
        .collect();
    assert_eq!(counts.iter().sum::<u64>(), 40);
    assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
    // Full nodes are skipped, as long as they report that they are full.
    refused(
        routed
            .create(CreateVolumeRequest {
                capacity_range: at_least(1 << 50),
                ..create("huge")
            })
            .await,
        Code::ResourceExhausted,
        &["node-0", "node-3"],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topology_that_no_node_has_is_for_the_scheduler_to_change() {
    let (a, _b, routed) = unlike().await;
    let nowhere = "00000000-0000-0000-0000-000000000001";
    refused(
        routed.create(at(create("v"), &[nowhere])).await,
        Code::ResourceExhausted,
        &[nowhere],
    );
    // An agent that never answered may have the volume.
    let unused_address = std::net::SocketAddr::from(([127, 0, 0, 1], 1));
    routed
        .set(&[("node-a", a.address), ("node-z", unused_address)])
        .await;
    refused(
        routed.create(at(create("v"), &[nowhere])).await,
        Code::Unavailable,
        &["node-z"],
    );
    // Invalid requests are refused without calling any agent.
    refused(
        routed.create(CreateVolumeRequest::default()).await,
        Code::InvalidArgument,
        &["name"],
    );
    let mut request = create("v");
    request.parameters.insert("color".into(), "blue".into());
    refused(
        routed.create(request).await,
        Code::InvalidArgument,
        &["color"],
    );
}
