//! Pools that an administrator has marked as lost: all their objects are deleted, and a pool that
//! comes back is left alone.

use slackwater::csi::*;
use tonic::Code;

use crate::router::cluster::*;
use crate::service::harness::*;

#[tokio::test(flavor = "multi_thread")]
async fn all_objects_of_a_lost_pool_are_deleted_and_its_return_changes_nothing() {
    let mut a = AgentNode::start("node-a", &["default"], None);
    let b = AgentNode::start("node-b", &["default"], None);
    let routed = TestRouter::of(&[&a, &b]).await;
    let (va, vb) = (
        routed.create_on("va", &a).await,
        routed.create_on("vb", &b).await,
    );
    let created = routed
        .controller()
        .create_snapshot(snapshot("s", &va))
        .await
        .unwrap();
    let sa = created.into_inner().snapshot.unwrap().snapshot_id;
    a.kill();
    routed.until("node-a", false).await;
    routed.kubernetes.update(|state| {
        state.lost.insert(a.pool_id());
    });
    for comes_back in [false, true] {
        if comes_back {
            a.revive();
            routed.until("node-a", true).await;
        }
        let lost = &["lost"];
        let mut controller = routed.controller();
        let delete = DeleteVolumeRequest {
            volume_id: va.clone(),
            ..Default::default()
        };
        controller.delete_volume(delete).await.unwrap();
        let delete = DeleteSnapshotRequest {
            snapshot_id: sa.clone(),
            ..Default::default()
        };
        controller.delete_snapshot(delete).await.unwrap();
        let created = controller.create_snapshot(snapshot("t", &va)).await;
        refused(created, Code::FailedPrecondition, lost);
        for source in [from_volume(&va), from_snapshot(&sa)] {
            let source = VolumeContentSource {
                r#type: Some(source),
            };
            let copy = CreateVolumeRequest {
                volume_content_source: Some(source),
                ..create("copy")
            };
            refused(routed.create(copy).await, Code::FailedPrecondition, lost);
        }
        let grow = ControllerExpandVolumeRequest {
            volume_id: va.clone(),
            capacity_range: at_least(2 * GIB),
            ..Default::default()
        };
        refused(
            controller.controller_expand_volume(grow).await,
            Code::NotFound,
            lost,
        );
        assert_eq!(routed.list(0).await.unwrap(), [vb.as_str()]);
        let by_source = ListSnapshotsRequest {
            source_volume_id: va.clone(),
            ..Default::default()
        };
        let listed = controller.list_snapshots(by_source).await.unwrap();
        assert!(listed.into_inner().entries.is_empty());
        // New volumes go to the other node, whatever determines their place.
        for n in 0..4 {
            let request = create(&format!("new-{comes_back}-{n}"));
            let created = routed.create(request).await.unwrap();
            assert_eq!(home_of(&created), b.home());
            let delete = DeleteVolumeRequest {
                volume_id: created.volume_id,
                ..Default::default()
            };
            controller.delete_volume(delete).await.unwrap();
        }
        let only_there = at(create("only"), &[&a.home()]);
        refused(
            routed.create(only_there).await,
            Code::ResourceExhausted,
            &["node-a"],
        );
    }
    // Nothing on it was changed, and it is used again when the mark is removed.
    assert_eq!(a.driver.pool_status()[0].volumes, 1);
    routed.kubernetes.update(|state| state.lost.clear());
    assert_eq!(routed.list(0).await.unwrap().len(), 2);
    let delete = DeleteSnapshotRequest {
        snapshot_id: sa,
        ..Default::default()
    };
    routed.controller().delete_snapshot(delete).await.unwrap();
    assert_eq!(a.driver.pool_status()[0].snapshots, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_is_being_emptied_gets_nothing_new_and_keeps_what_it_has() {
    let a = AgentNode::start("node-a", &["default"], None);
    let b = AgentNode::start("node-b", &["default"], None);
    let routed = TestRouter::of(&[&a, &b]).await;
    let old = routed.create_on("old", &a).await;
    let made = routed
        .controller()
        .create_snapshot(snapshot("s", &old))
        .await;
    let made = made.unwrap().into_inner().snapshot.unwrap().snapshot_id;
    let capacity = async || {
        let asked = GetCapacityRequest {
            volume_capabilities: create("x").volume_capabilities,
            accessible_topology: Some(Topology {
                segments: [(KEY.to_string(), a.home())].into(),
            }),
            ..Default::default()
        };
        let answer = routed.controller().get_capacity(asked).await;
        answer.unwrap().into_inner().available_capacity
    };
    assert!(capacity().await > 0);
    routed.kubernetes.update(|state| {
        state.evacuated.insert(a.pool_id());
    });
    assert_eq!(capacity().await, 0);
    let emptied = &["emptied"];
    let there = at(create("new"), &[&a.home()]);
    refused(routed.create(there).await, Code::ResourceExhausted, emptied);
    for source in [from_volume(&old), from_snapshot(&made)] {
        let source = VolumeContentSource {
            r#type: Some(source),
        };
        let copy = CreateVolumeRequest {
            volume_content_source: Some(source),
            ..create("copy")
        };
        refused(routed.create(copy).await, Code::ResourceExhausted, emptied);
    }
    for n in 0..4 {
        let created = routed.create(create(&format!("new-{n}"))).await.unwrap();
        assert_eq!(home_of(&created), b.home());
    }
    // The answer to its creation was lost.
    let again = routed
        .create(at(create("old"), &[&a.home()]))
        .await
        .unwrap();
    assert_eq!(again.volume_id, old);
    assert_eq!(a.driver.pool_status()[0].volumes, 1);
    // Snapshots are taken as before.
    let late = routed
        .controller()
        .create_snapshot(snapshot("t", &old))
        .await;
    late.unwrap();
    routed.kubernetes.update(|state| state.evacuated.clear());
    routed.create_on("new", &a).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshots_of_moves_are_in_no_list() {
    let a = AgentNode::start("node-a", &["default"], None);
    let routed = TestRouter::of(&[&a]).await;
    let volume = routed.create_on("v", &a).await;
    let mut ids = Vec::new();
    for name in ["own", "hidden"] {
        let made = routed
            .controller()
            .create_snapshot(snapshot(name, &volume))
            .await;
        ids.push(made.unwrap().into_inner().snapshot.unwrap().snapshot_id);
    }
    routed.kubernetes.update(|state| {
        state.moved.insert(ids[1].clone());
    });
    let all = ListSnapshotsRequest::default();
    let of_volume = ListSnapshotsRequest {
        source_volume_id: volume.clone(),
        ..Default::default()
    };
    for asked in [all, of_volume] {
        let listed = routed.controller().list_snapshots(asked).await.unwrap();
        let entries = listed.into_inner().entries;
        let listed: Vec<_> = entries
            .into_iter()
            .map(|it| it.snapshot.unwrap().snapshot_id)
            .collect();
        assert_eq!(listed, ids[..1]);
    }
}
