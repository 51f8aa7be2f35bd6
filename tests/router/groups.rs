//! Groups whose records can't be read on one of their nodes.

use std::path::{Path, PathBuf};

use slackwater::csi::*;
use slackwater::host::Host;
use tonic::Code;

use crate::ground::*;
use crate::harness::*;

/// The record of a snapshot, on its machine.
fn record(snapshot_id: &str) -> PathBuf {
    let uuid = snapshot_id.split('.').nth(1).unwrap();
    let folder = Path::new("/memory/default/snapshots").join(uuid);
    folder.join("record.json")
}

/// Makes a record one of a newer release; what it was.
fn unreadable(peer: &mut Peer, snapshot_id: &str) -> Vec<u8> {
    let path = record(snapshot_id);
    let before = peer.machine.read_file(&path).unwrap().unwrap();
    let mut newer: serde_json::Value = serde_json::from_slice(&before).unwrap();
    newer["version"] = 99.into();
    let newer = newer.to_string();
    peer.machine.put_file(&path, newer.as_bytes()).unwrap();
    peer.driver.leave();
    peer.restart(&["default"]);
    before
}

/// Makes a group as the sidecar does, which repeats what is ABORTED: an agent that has answered may
/// hold the lock of the group for a moment longer.
async fn made(routed: &Routed, create: &CreateVolumeGroupSnapshotRequest) -> VolumeGroupSnapshot {
    for _ in 0..100 {
        let mut groups = routed.groups();
        match groups.create_volume_group_snapshot(create.clone()).await {
            Ok(made) => return made.into_inner().group_snapshot.unwrap(),
            Err(status) if status.code() == Code::Aborted => {
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
            Err(status) => panic!("{status:?}"),
        }
    }
    panic!("the group is ABORTED again and again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_with_an_unreadable_record_is_neither_absent_nor_made_again_nor_deleted() {
    let mut a = Peer::start("node-a", &["default"], None);
    let b = Peer::start("node-b", &["default"], None);
    let routed = Routed::of(&[&a, &b]).await;
    let volumes = [
        routed.create_on("va", &a).await,
        routed.create_on("vb", &b).await,
    ];
    for (name, sources) in [("one", &volumes[..1]), ("two", &volumes[..])] {
        let sources: Vec<&str> = sources.iter().map(String::as_str).collect();
        let create = group(name, &sources);
        let mut groups = routed.groups();
        let made = made(&routed, &create).await;
        let ids: Vec<String> = made
            .snapshots
            .iter()
            .map(|s| s.snapshot_id.clone())
            .collect();
        let before = unreadable(&mut a, &ids[0]);
        routed.until("node-a", true).await;
        let files = |peer: &Peer| peer.machine.files_below(Path::new("/memory/default"));
        let there = [files(&a), files(&b)];
        for snapshot_ids in [Vec::new(), ids.clone()] {
            let get = GetVolumeGroupSnapshotRequest {
                group_snapshot_id: made.group_snapshot_id.clone(),
                snapshot_ids: snapshot_ids.clone(),
                ..Default::default()
            };
            let got = groups.get_volume_group_snapshot(get).await.unwrap_err();
            let told = [Code::Internal, Code::Unavailable].contains(&got.code());
            assert!(told && got.message().contains("newer"), "{name}: {got:?}");
            let delete = DeleteVolumeGroupSnapshotRequest {
                group_snapshot_id: made.group_snapshot_id.clone(),
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
        assert_eq!(self::made(&routed, &create).await, made, "{name}");
    }
}
