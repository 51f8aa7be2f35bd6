//! Groups of two nodes: with records that cannot be read on one of them, and with members that are
//! deleted one by one.

use std::path::{Path, PathBuf};
use std::time::Duration;

use slackwater::agent::DeleteSnapshotRequest as DeleteSnapshotByHand;
use slackwater::csi::*;
use slackwater::host::Host;
use tonic::{Code, Request};

use crate::router::cluster::*;
use crate::service::harness::*;

/// The record of a snapshot on its machine.
fn record(snapshot_id: &str) -> PathBuf {
    let uuid = snapshot_id.split('.').nth(1).unwrap();
    let folder = Path::new("/memory/default/snapshots").join(uuid);
    folder.join("record.json")
}

/// Replaces a record by one of a newer release. Returns the old record.
fn unreadable(peer: &mut AgentNode, snapshot_id: &str) -> Vec<u8> {
    changed(peer, snapshot_id, "version", 99.into())
}

/// Changes a field of a record, and restarts its driver. Returns the old record.
fn changed(peer: &mut AgentNode, snapshot_id: &str, field: &str, to: serde_json::Value) -> Vec<u8> {
    let path = record(snapshot_id);
    let before = peer.machine.read_file(&path).unwrap().unwrap();
    let mut record: serde_json::Value = serde_json::from_slice(&before).unwrap();
    record[field] = to;
    let record = record.to_string();
    peer.machine.put_file(&path, record.as_bytes()).unwrap();
    peer.driver.leave();
    peer.restart(&["default"]);
    before
}

/// Creates a group as the sidecar does, which repeats after ABORTED: an agent that has answered may
/// hold the lock of the group for a moment longer.
async fn create_group(
    routed: &TestRouter,
    create: &CreateVolumeGroupSnapshotRequest,
) -> VolumeGroupSnapshot {
    for _ in 0..100 {
        let mut groups = routed.groups();
        match groups.create_volume_group_snapshot(create.clone()).await {
            Ok(created) => return created.into_inner().group_snapshot.unwrap(),
            Err(status) if status.code() == Code::Aborted => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Err(status) => panic!("{status:?}"),
        }
    }
    panic!("the group is ABORTED again and again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_with_an_unreadable_record_is_neither_absent_nor_created_again_nor_deleted() {
    let mut a = AgentNode::start("node-a", &["default"], None);
    let b = AgentNode::start("node-b", &["default"], None);
    let routed = TestRouter::of(&[&a, &b]).await;
    let volumes = [
        routed.create_on("va", &a).await,
        routed.create_on("vb", &b).await,
    ];
    for (name, sources) in [("one", &volumes[..1]), ("two", &volumes[..])] {
        let sources: Vec<&str> = sources.iter().map(String::as_str).collect();
        let create = group(name, &sources);
        let mut groups = routed.groups();
        let group = create_group(&routed, &create).await;
        let ids: Vec<String> = group
            .snapshots
            .iter()
            .map(|s| s.snapshot_id.clone())
            .collect();
        let before = unreadable(&mut a, &ids[0]);
        routed.until("node-a", true).await;
        let files = |peer: &AgentNode| peer.machine.files_below(Path::new("/memory/default"));
        let there = [files(&a), files(&b)];
        for snapshot_ids in [Vec::new(), ids.clone()] {
            let get = GetVolumeGroupSnapshotRequest {
                group_snapshot_id: group.group_snapshot_id.clone(),
                snapshot_ids: snapshot_ids.clone(),
                ..Default::default()
            };
            let got = groups.get_volume_group_snapshot(get).await.unwrap_err();
            let reported = [Code::Internal, Code::Unavailable].contains(&got.code());
            assert!(
                reported && got.message().contains("newer"),
                "{name}: {got:?}"
            );
            let delete = DeleteVolumeGroupSnapshotRequest {
                group_snapshot_id: group.group_snapshot_id.clone(),
                snapshot_ids,
                ..Default::default()
            };
            let deleted = groups.delete_volume_group_snapshot(delete).await;
            let deleted = deleted.unwrap_err();
            assert!(deleted.message().contains("newer"), "{name}: {deleted:?}");
        }
        let again = groups.create_volume_group_snapshot(create.clone()).await;
        refused(again, Code::Unavailable, &["newer"]);
        assert_eq!([files(&a), files(&b)], there, "{name}");
        a.machine.put_file(&record(&ids[0]), &before).unwrap();
        assert_eq!(create_group(&routed, &create).await, group, "{name}");
    }
}

fn delete(snapshot_id: &str) -> DeleteSnapshotRequest {
    DeleteSnapshotRequest {
        snapshot_id: snapshot_id.to_string(),
        ..Default::default()
    }
}

/// Creates a group of two volumes on two nodes. Returns it with the IDs of its members.
async fn two(
    routed: &TestRouter,
    (a, b): (&AgentNode, &AgentNode),
    name: &str,
    members: &str,
) -> (VolumeGroupSnapshot, [String; 2]) {
    let volumes = [
        routed.create_on(&format!("{name}-a"), a).await,
        routed.create_on(&format!("{name}-b"), b).await,
    ];
    let create = CreateVolumeGroupSnapshotRequest {
        parameters: map([("members", members)]),
        ..group(name, &[&volumes[0], &volumes[1]])
    };
    let group = create_group(routed, &create).await;
    let id = |n: usize| group.snapshots[n].snapshot_id.clone();
    let ids = [id(0), id(1)];
    (group, ids)
}

/// The group ID of a snapshot in the list, if the snapshot is listed.
async fn listed(routed: &TestRouter, snapshot_id: &str) -> Option<String> {
    let question = ListSnapshotsRequest {
        snapshot_id: snapshot_id.to_string(),
        ..Default::default()
    };
    let mut controller = routed.controller();
    let page = controller.list_snapshots(question).await.unwrap();
    let entry = page.into_inner().entries.pop()?;
    Some(entry.snapshot.unwrap().group_snapshot_id)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_independent_member_is_deleted_by_itself_once_all_are_committed() {
    let a = AgentNode::start("node-a", &["default"], None);
    let mut b = AgentNode::start("node-b", &["default"], None);
    let routed = TestRouter::of(&[&a, &b]).await;
    let (created, [first, second]) = two(&routed, (&a, &b), "g", "independent").await;
    let of_group = created.snapshots.iter().map(|one| &one.group_snapshot_id);
    assert!(
        of_group
            .into_iter()
            .all(|id| *id == created.group_snapshot_id)
    );
    // A caller that finds it by itself receives no group ID, which would prevent a delete.
    assert_eq!(listed(&routed, &first).await, Some(String::new()));

    // A router that died between the two commits has left the second member in doubt.
    changed(&mut b, &second, "state", "cut".into());
    b.kill();
    routed.until("node-b", false).await;
    let refused = routed.controller().delete_snapshot(delete(&first)).await;
    self::refused(refused, Code::Aborted, &["in doubt", "node-b"]);
    assert!(listed(&routed, &first).await.is_some());
    b.revive();
    routed.until("node-b", true).await;
    eventually("the first member is deleted", async || {
        let deleted = routed.controller().delete_snapshot(delete(&first)).await;
        match deleted {
            Ok(_) => true,
            Err(status) if status.code() == Code::Aborted => false,
            Err(status) => panic!("{status:?}"),
        }
    })
    .await;
    assert_eq!(listed(&routed, &first).await, None);
    assert_eq!(listed(&routed, &second).await, Some(String::new()));
    b.driver.refresh_pools();

    for snapshot_ids in [vec![], vec![second.clone()], vec![first, second.clone()]] {
        let get = GetVolumeGroupSnapshotRequest {
            group_snapshot_id: created.group_snapshot_id.clone(),
            snapshot_ids,
            ..Default::default()
        };
        let left = routed
            .groups()
            .get_volume_group_snapshot(get)
            .await
            .unwrap();
        let left = left.into_inner().group_snapshot.unwrap();
        assert_eq!(left.snapshots, created.snapshots[1..]);
    }
    let delete = DeleteVolumeGroupSnapshotRequest {
        group_snapshot_id: created.group_snapshot_id.clone(),
        snapshot_ids: created
            .snapshots
            .iter()
            .map(|one| one.snapshot_id.clone())
            .collect(),
        ..Default::default()
    };
    routed
        .groups()
        .delete_volume_group_snapshot(delete)
        .await
        .unwrap();
    assert_eq!(listed(&routed, &second).await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_of_a_joint_group_is_deleted_only_by_an_administrator() {
    let a = AgentNode::start("node-a", &["default"], None);
    let mut b = AgentNode::start("node-b", &["default"], None);
    let routed = TestRouter::of(&[&a, &b]).await;
    let (created, [first, second]) = two(&routed, (&a, &b), "g", "together").await;
    for member in [&first, &second] {
        let refused = routed.controller().delete_snapshot(delete(member)).await;
        self::refused(
            refused,
            Code::InvalidArgument,
            &[&created.group_snapshot_id],
        );
        assert_eq!(
            listed(&routed, member).await.as_ref(),
            Some(&created.group_snapshot_id)
        );
    }
    let by_hand = |id: &str| DeleteSnapshotByHand {
        snapshot_id: id.to_string(),
    };
    changed(&mut b, &second, "state", "cut".into());
    b.kill();
    routed.until("node-b", false).await;
    let refused = routed.admin().delete_snapshot(by_hand(&first)).await;
    self::refused(refused, Code::Aborted, &["in doubt", "node-b"]);
    b.revive();
    routed.until("node-b", true).await;
    for member in [&first, &second, &first] {
        eventually("a member is deleted", async || {
            match routed.admin().delete_snapshot(by_hand(member)).await {
                Ok(_) => true,
                Err(status) if status.code() == Code::Aborted => false,
                Err(status) => panic!("{status:?}"),
            }
        })
        .await;
        assert_eq!(listed(&routed, member).await, None);
        if *member == first {
            assert!(a.machine.read_file(&record(&first)).unwrap().is_none());
            b.driver.refresh_pools();
        }
    }
    assert!(b.machine.read_file(&record(&second)).unwrap().is_none());
}

/// Also where the router queries agents: the call that holds the volume ends by itself, and some
/// callers treat the first ABORTED as a failed backup.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_of_one_node_waits_until_its_volume_is_free() {
    let a = AgentNode::start("node-a", &["default"], None);
    let routed = TestRouter::of(&[&a]).await;
    let volume = routed.create_on("v", &a).await;
    a.gate.close("allocate");
    let mut controller = routed.controller();
    let growth = ControllerExpandVolumeRequest {
        volume_id: volume.clone(),
        capacity_range: at_least(2 * GIB),
        ..Default::default()
    };
    let grows = tokio::spawn(async move { controller.controller_expand_volume(growth).await });
    a.gate.reached(1).await;
    let waits = |seconds: u64| {
        let (mut groups, source) = (routed.groups(), volume.clone());
        let mut request = Request::new(group("g", &[&source]));
        request.set_timeout(Duration::from_secs(seconds));
        tokio::spawn(async move { groups.create_volume_group_snapshot(request).await })
    };
    let hurried = waits(5).await.unwrap().unwrap_err();
    assert_eq!(hurried.code(), Code::Aborted, "{hurried:?}");
    let waiting = waits(300);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!waiting.is_finished());
    assert_eq!(a.driver.running(), 1, "only the growth has a thread");
    a.gate.open();
    grows.await.unwrap().unwrap();
    let created = waiting.await.unwrap().unwrap().into_inner();
    assert_eq!(created.group_snapshot.unwrap().snapshots.len(), 1);
}

/// Such a pair would be restored as if it had been cut at one moment.
#[tokio::test(flavor = "multi_thread")]
async fn members_of_two_attempts_on_two_nodes_are_never_reported_as_one_group() {
    let mut a = AgentNode::start("node-a", &["default"], None);
    let b = AgentNode::start("node-b", &["default"], None);
    let routed = TestRouter::of(&[&a, &b]).await;
    let (created, ids) = two(&routed, (&a, &b), "g", "together").await;
    let another = uuid::Uuid::new_v4().to_string();
    changed(&mut a, &ids[0], "attempt", another.into());
    routed.until("node-a", true).await;
    let mut groups = routed.groups();
    let get = GetVolumeGroupSnapshotRequest {
        group_snapshot_id: created.group_snapshot_id.clone(),
        snapshot_ids: ids.to_vec(),
        ..Default::default()
    };
    let got = groups.get_volume_group_snapshot(get).await;
    refused(
        got,
        Code::FailedPrecondition,
        &["a different attempt", "delete the group"],
    );
    let delete = DeleteVolumeGroupSnapshotRequest {
        group_snapshot_id: created.group_snapshot_id.clone(),
        snapshot_ids: ids.to_vec(),
        ..Default::default()
    };
    groups.delete_volume_group_snapshot(delete).await.unwrap();
    for id in &ids {
        assert_eq!(listed(&routed, id).await, None);
    }
}

/// Otherwise a node with a false record could keep a group of other nodes forever.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_two_nodes_define_differently_is_refused_and_can_be_deleted() {
    let a = AgentNode::start("node-a", &["default"], None);
    let mut b = AgentNode::start("node-b", &["default"], None);
    let routed = TestRouter::of(&[&a, &b]).await;
    // The members that node b's record names, by their position. If its first member were another
    // one, node b would resolve its member in doubt by itself.
    for (state, named) in [("ready", vec![1]), ("cut", vec![0, 1, 1])] {
        let (created, ids) = two(&routed, (&a, &b), state, "together").await;
        let group = created.group_snapshot_id.clone();
        let source = |n: &usize| created.snapshots[*n].source_volume_id.clone();
        let definition = serde_json::json!({
            "id": group,
            "members": named.iter().map(|n| ids[*n].clone()).collect::<Vec<_>>(),
            "sources": named.iter().map(source).collect::<Vec<_>>(),
        });
        changed(&mut b, &ids[1], "group", definition);
        changed(&mut b, &ids[1], "state", state.into());
        routed.until("node-b", true).await;
        let mut groups = routed.groups();
        let get = GetVolumeGroupSnapshotRequest {
            group_snapshot_id: group.clone(),
            snapshot_ids: ids.to_vec(),
            ..Default::default()
        };
        let got = groups.get_volume_group_snapshot(get).await;
        let words = ["report different members", "delete the group"];
        refused(got, Code::FailedPrecondition, &words);
        let delete = DeleteVolumeGroupSnapshotRequest {
            group_snapshot_id: group,
            snapshot_ids: ids.to_vec(),
            ..Default::default()
        };
        let deleted = groups.delete_volume_group_snapshot(delete).await;
        deleted.unwrap_or_else(|status| panic!("{state}: {status:?}"));
        for (peer, id) in [(&a, &ids[0]), (&b, &ids[1])] {
            let left = peer.machine.read_file(&record(id)).unwrap();
            assert!(left.is_none(), "{state}: {id}");
        }
    }
}
