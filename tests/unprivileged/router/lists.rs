//! Lists and capacity of all agents together.

use std::collections::BTreeSet;

use slackwater::csi::*;
use slackwater::router::cluster::KnownPool;
use slackwater::router::kube::AgentReports;
use slackwater::router::orphans::Stored;
use tonic::Code;
use uuid::Uuid;

use crate::router::cluster::*;
use crate::service::harness::*;

async fn three() -> (Vec<AgentNode>, TestRouter) {
    let nodes: Vec<_> = ["node-a", "node-b", "node-c"]
        .iter()
        .map(|name| AgentNode::start(name, &["default", "second"], None))
        .collect();
    let routed = TestRouter::of(&nodes.iter().collect::<Vec<_>>()).await;
    (nodes, routed)
}

async fn fill(routed: &TestRouter, nodes: &[AgentNode], each: usize) -> Vec<String> {
    let mut ids = Vec::new();
    for (i, node) in nodes.iter().enumerate() {
        for n in 0..each {
            let mut request = at(create(&format!("v{i}-{n}")), &[&node.home()]);
            request.capacity_range = at_least(8 * MIB);
            let pool = ["default", "second"][n % 2];
            request.parameters.insert("pool".into(), pool.into());
            ids.push(routed.create(request).await.unwrap().volume_id);
        }
    }
    ids.sort();
    ids
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_every_size_are_one_list_in_the_order_of_ids() {
    let (nodes, routed) = three().await;
    assert_eq!(routed.list(0).await.unwrap(), Vec::<String>::new());
    let ids = fill(&routed, &nodes, 6).await;
    for most in [0, 1, 2, 5, 17, 18, 19, 100] {
        assert_eq!(routed.list(most).await.unwrap(), ids, "pages of {most}");
    }
    let from_any = ListVolumesRequest {
        starting_token: format!("{}.{}", Uuid::nil(), Uuid::nil()),
        ..Default::default()
    };
    let listed = routed.controller().list_volumes(from_any).await.unwrap();
    assert_eq!(listed.into_inner().entries.len(), ids.len());
    for (max_entries, token, code) in [
        (0, "no-token", Code::Aborted),
        (-1, "", Code::InvalidArgument),
    ] {
        let request = ListVolumesRequest {
            max_entries,
            starting_token: token.into(),
        };
        refused(routed.controller().list_volumes(request).await, code, &[]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_stay_right_while_volumes_come_and_go() {
    let (nodes, routed) = three().await;
    let ids = fill(&routed, &nodes, 6).await;
    let (mut seen, mut token) = (Vec::new(), String::new());
    let mut gone = BTreeSet::new();
    let mut round = 0;
    loop {
        let request = ListVolumesRequest {
            max_entries: 2,
            starting_token: token.clone(),
        };
        let page = routed
            .controller()
            .list_volumes(request)
            .await
            .unwrap()
            .into_inner();
        let page_ids: Vec<_> = page
            .entries
            .into_iter()
            .map(|entry| entry.volume.unwrap().volume_id)
            .collect();
        seen.extend(page_ids.iter().cloned());
        token = page.next_token;
        if token.is_empty() {
            break;
        }
        // The volume of the token is deleted, and a new one is created on each node.
        assert_eq!(page_ids.last(), Some(&token));
        gone.insert(token.clone());
        let request = DeleteVolumeRequest {
            volume_id: token.clone(),
            ..Default::default()
        };
        routed.controller().delete_volume(request).await.unwrap();
        round += 1;
        let node = &nodes[round % nodes.len()];
        let mut request = at(create(&format!("late{round}")), &[&node.home()]);
        request.capacity_range = at_least(8 * MIB);
        request.parameters.insert("pool".into(), "default".into());
        routed.create(request).await.unwrap();
    }
    let unique: BTreeSet<_> = seen.iter().cloned().collect();
    assert_eq!(unique.len(), seen.len(), "each volume once");
    assert!(seen.is_sorted());
    // All volumes that existed all the time were listed.
    for id in ids.iter().filter(|id| !gone.contains(*id)) {
        assert!(unique.contains(id), "{id}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshots_are_listed_in_total_by_source_and_by_id() {
    let (nodes, routed) = three().await;
    let volumes = fill(&routed, &nodes, 2).await;
    let mut all = Vec::new();
    for (i, volume) in volumes.iter().enumerate() {
        let created = routed
            .controller()
            .create_snapshot(snapshot(&format!("s{i}"), volume))
            .await;
        all.push((
            created.unwrap().into_inner().snapshot.unwrap().snapshot_id,
            volume,
        ));
    }
    all.sort();
    let ids: Vec<_> = all.iter().map(|(id, _)| id.clone()).collect();
    let list = async |request: ListSnapshotsRequest| {
        let page = routed
            .controller()
            .list_snapshots(request)
            .await
            .unwrap()
            .into_inner();
        let entries = page.entries.into_iter();
        let ids: Vec<_> = entries
            .map(|entry| entry.snapshot.unwrap().snapshot_id)
            .collect();
        (ids, page.next_token)
    };
    for most in [1, 4, 0] {
        let (mut seen, mut token) = (Vec::new(), String::new());
        loop {
            let (page, next) = list(ListSnapshotsRequest {
                max_entries: most,
                starting_token: token,
                ..Default::default()
            })
            .await;
            seen.extend(page);
            token = next;
            if token.is_empty() {
                break;
            }
        }
        assert_eq!(seen, ids, "pages of {most}");
    }
    for (id, source) in &all {
        let by_id = ListSnapshotsRequest {
            snapshot_id: id.clone(),
            ..Default::default()
        };
        assert_eq!(list(by_id).await.0, [id.as_str()]);
        let by_source = ListSnapshotsRequest {
            source_volume_id: source.to_string(),
            ..Default::default()
        };
        assert_eq!(list(by_source).await.0, [id.as_str()]);
    }
    // A name exists once, wherever its volume is.
    let (id, source) = &all[0];
    let node_of = |volume: &str| {
        let has = |node: &AgentNode| {
            let pools = node.driver.pool_status().into_iter();
            let mut ids = pools.filter_map(|pool| pool.id);
            ids.any(|id| volume.starts_with(&id.to_string()))
        };
        nodes.iter().position(has).unwrap()
    };
    let other = all
        .iter()
        .find(|(_, other)| node_of(other) != node_of(source))
        .unwrap();
    let name = format!(
        "s{}",
        volumes.iter().position(|volume| volume == *source).unwrap()
    );
    let again = routed
        .controller()
        .create_snapshot(snapshot(&name, source))
        .await
        .unwrap();
    assert_eq!(&again.into_inner().snapshot.unwrap().snapshot_id, id);
    refused(
        routed
            .controller()
            .create_snapshot(snapshot(&name, other.1))
            .await,
        Code::AlreadyExists,
        &[&name, id],
    );
    // Names that Kubernetes generates are not looked up on other nodes.
    let mut from_kubernetes = snapshot(&name, other.1);
    let key = "csi.storage.k8s.io/volumesnapshotcontent/name".to_string();
    from_kubernetes.parameters.insert(key, "content".into());
    routed
        .controller()
        .create_snapshot(from_kubernetes)
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_content_of_each_reachable_pool_is_reported() {
    let (mut nodes, routed) = three().await;
    let volumes = fill(&routed, &nodes, 4).await;
    let asked = snapshot("s", &volumes[0]);
    let created = routed.controller().create_snapshot(asked).await.unwrap();
    let created = created.into_inner().snapshot.unwrap().snapshot_id;
    let stored = async || {
        let stored = routed.agents.stored().await;
        let snapshots = |one: &Stored| one.snapshots.iter().map(|one| one.id.clone()).collect();
        let flat = |ids: &dyn Fn(&Stored) -> Vec<String>| {
            let mut all: Vec<String> = stored.iter().flat_map(ids).collect();
            all.sort();
            all
        };
        (
            stored.len(),
            flat(&|one| one.volumes.clone()),
            flat(&snapshots),
        )
    };
    assert_eq!(stored().await, (6, volumes.clone(), vec![created]));
    nodes[1].kill();
    routed.until("node-b", false).await;
    let (pools, left, _) = stored().await;
    assert_eq!(
        (pools, left.len()),
        (4, 8),
        "no capacity is reported for an agent that is away"
    );
    assert!(left.iter().all(|id| volumes.contains(id)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_needs_every_pool_that_isnt_lost() {
    let (mut nodes, routed) = three().await;
    let ids = fill(&routed, &nodes, 2).await;
    let missing = KnownPool {
        id: slackwater::model::PoolId(Uuid::from_u128(9)),
        name: "old".into(),
        node: "node-x".into(),
        home: "h".into(),
        lost: false,
    };
    routed
        .kubernetes
        .update(|state| state.known.push(missing.clone()));
    refused(
        routed.list(0).await,
        Code::Unavailable,
        &["node-x", "pool old"],
    );
    let snapshots = ListSnapshotsRequest::default();
    refused(
        routed.controller().list_snapshots(snapshots.clone()).await,
        Code::Unavailable,
        &["node-x"],
    );
    routed.kubernetes.update(|state| {
        state.lost.insert(missing.id);
    });
    assert_eq!(routed.list(0).await.unwrap(), ids);
    nodes[1].kill();
    routed.until("node-b", false).await;
    refused(routed.list(0).await, Code::Unavailable, &["node-b"]);
    refused(
        routed.controller().list_snapshots(snapshots).await,
        Code::Unavailable,
        &["node-b"],
    );
}

fn of_home(home: &str) -> GetCapacityRequest {
    GetCapacityRequest {
        accessible_topology: Some(Topology {
            segments: [(KEY.to_string(), home.to_string())].into(),
        }),
        parameters: map([("pool", "default")]),
        ..Default::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn capacity_is_that_of_a_home_or_the_sum_and_zero_for_unreachable_nodes() {
    let mut a = AgentNode::start("node-a", &["default", "only-a"], Some(64 * GIB as u64));
    let b = AgentNode::start("node-b", &["default"], Some(16 * GIB as u64));
    let routed = TestRouter::of(&[&a, &b]).await;
    let ask = async |request: GetCapacityRequest| {
        let answer = routed.controller().get_capacity(request).await;
        answer.map(|answer| answer.into_inner())
    };
    let of_a = ask(of_home(&a.home())).await.unwrap();
    let of_b = ask(of_home(&b.home())).await.unwrap();
    assert!(of_a.available_capacity > of_b.available_capacity && of_b.available_capacity > 0);
    let anywhere = || GetCapacityRequest {
        parameters: map([("pool", "default")]),
        ..Default::default()
    };
    let sum = ask(anywhere()).await.unwrap();
    assert_eq!(
        sum.available_capacity,
        of_a.available_capacity + of_b.available_capacity
    );
    assert_eq!(sum.maximum_volume_size, of_a.maximum_volume_size);
    assert_eq!(
        ask(of_home("nobody's")).await.unwrap().available_capacity,
        0
    );
    // A class that only some nodes can serve has no capacity on the others.
    let only_a = |home: &str| GetCapacityRequest {
        parameters: map([("pool", "only-a")]),
        ..of_home(home)
    };
    assert!(ask(only_a(&a.home())).await.unwrap().available_capacity > 0);
    assert_eq!(ask(only_a(&b.home())).await.unwrap().available_capacity, 0);
    let unknown_pool = GetCapacityRequest {
        parameters: map([("pool", "nobody's")]),
        ..of_home(&a.home())
    };
    refused(
        ask(unknown_pool).await,
        Code::InvalidArgument,
        &["nobody's"],
    );
    a.kill();
    routed.until("node-a", false).await;
    assert_eq!(ask(of_home(&a.home())).await.unwrap().available_capacity, 0);
    assert_eq!(
        ask(anywhere()).await.unwrap().available_capacity,
        of_b.available_capacity
    );
    routed.kubernetes.update(|state| {
        state.lost.insert(b.pool_id());
    });
    assert_eq!(ask(of_home(&b.home())).await.unwrap().available_capacity, 0);
}
