//! Clones of volumes of another node: what is copied, and what is left of the hidden snapshot.

use std::path::Path;
use std::time::{Duration, Instant};

use slackwater::csi::*;
use slackwater::model::{AccessMode, AccessType, Capability, FsType};
use slackwater::operation::StageVolume;
use tonic::{Code, Request, Status};

use crate::router::cluster::*;
use crate::router::receive::{CHANGES, CLAIM, Case, LONG, sized, undo_changes};
use crate::service::gate::Opens;
use crate::service::harness::*;

impl Case {
    fn clone_request(&self) -> CreateVolumeRequest {
        let homes = [&*self.b.home(), &*self.a.home()];
        let mut request = claimed(at(sized("clone"), &homes), CLAIM);
        request.parameters.insert("restore".into(), "pod".into());
        request.volume_content_source = Some(VolumeContentSource {
            r#type: Some(from_volume(&self.volume)),
        });
        request
    }

    fn call_clone(&self, deadline: Duration) -> tokio::task::JoinHandle<Result<Volume, Status>> {
        let mut client = self.routed.controller();
        let mut request = Request::new(self.clone_request());
        request.set_timeout(deadline);
        tokio::spawn(async move {
            let created = client.create_volume(request).await?;
            Ok(created.into_inner().volume.unwrap())
        })
    }

    async fn cloned(&self) -> Result<Volume, Status> {
        self.call_clone(LONG).await.unwrap()
    }

    /// The number of snapshots on node-a, the hidden ones included. One is the user's.
    fn hidden(&self) -> i64 {
        i64::try_from(self.a.driver.pool_status()[0].snapshots).unwrap() - 1
    }

    async fn listed(&self) -> usize {
        let mut client = self.routed.controller();
        let listed = client.list_snapshots(ListSnapshotsRequest::default()).await;
        listed.unwrap().into_inner().entries.len()
    }

    /// A clone that ended before its end because its source was away, which it still is.
    async fn begun_clone(&mut self) {
        let opens = Opens(self.b.gate.clone());
        // After this, the target asks the source.
        self.b.gate.close("make_dir");
        let call = self.call_clone(LONG);
        self.b.gate.reached(1).await;
        self.a.kill();
        drop(opens);
        refused(call.await.unwrap(), Code::Unavailable, &["node-a"]);
    }

    /// A clone that waits at its first write, and the call for it.
    async fn cloning(&self) -> (Opens, tokio::task::JoinHandle<Result<Volume, Status>>) {
        let opens = Opens(self.b.gate.clone());
        self.b.gate.close("write_range");
        let call = self.call_clone(LONG);
        self.b.gate.reached(1).await;
        (opens, call)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_in_use_is_cloned_on_the_selected_node_and_its_hidden_snapshot_is_deleted() {
    let case = Case::new().await;
    let staged = case.a.driver.volumes.stage_volume(&StageVolume {
        volume_id: case.volume.clone(),
        staging_path: STAGING.into(),
        capability: Capability {
            access_type: AccessType::Mount {
                fs_type: Some(FsType::Ext4),
                mount_flags: Vec::new(),
            },
            access_mode: AccessMode::SingleNodeWriter,
        },
    });
    staged.unwrap();
    let (opens, call) = case.cloning().await;
    assert_eq!(
        (case.hidden(), case.listed().await),
        (1, 1),
        "no list has it"
    );
    // What is written after the snapshot is not in the clone.
    case.a.machine.write_token(Path::new(STAGING), 99).unwrap();
    drop(opens);
    let made = call.await.unwrap().unwrap();
    let source = made.content_source.clone().unwrap();
    assert_eq!(source.r#type, Some(from_volume(&case.volume)));
    assert_eq!(case.hidden(), 0);
    case.check(&made);
    // A repeat takes no other one, and does not need the source.
    let cuts = || case.a.machine.effects();
    let before = cuts();
    assert_eq!(case.cloned().await.unwrap(), made);
    assert_eq!((case.hidden(), cuts()), (0, before));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeat_continues_a_clone_with_the_snapshot_of_the_first_call() {
    let case = Case::new().await;
    let (opens, first) = case.cloning().await;
    let second = case.call_clone(LONG);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!first.is_finished() && !second.is_finished());
    assert_eq!(case.hidden(), 1);
    drop(opens);
    let first = first.await.unwrap().unwrap();
    assert_eq!(second.await.unwrap().unwrap(), first);
    case.check(&first);
    assert_eq!(case.hidden(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_left_of_a_clone_that_is_not_wanted_any_more() {
    let case = Case::new().await;
    for (change, code, word) in CHANGES {
        let (opens, call) = case.cloning().await;
        case.update(change);
        // The router has seen it, and the copy is still in its first step.
        tokio::time::sleep(Duration::from_secs(6)).await;
        drop(opens);
        refused(call.await.unwrap(), code, &[word]);
        case.assert_nothing_left();
        assert_eq!(case.hidden(), 0, "{word}");
        case.update(undo_changes);
    }
    case.check(&case.cloned().await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clone_waits_for_its_source_and_continues() {
    let mut case = Case::new().await;
    case.begun_clone().await;
    refused(case.cloned().await, Code::Unavailable, &["node-a"]);
    assert!(!case.left().is_empty(), "a repeat continues it");
    case.a.revive();
    case.routed.until("node-a", true).await;
    assert_eq!(case.hidden(), 1);
    case.check(&case.cloned().await.unwrap());
    assert_eq!(case.hidden(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_is_gone_is_a_final_answer_that_leaves_nothing() {
    let case = Case::new().await;
    let mut client = case.routed.controller();
    let deleted = client.delete_volume(delete(&case.volume)).await;
    deleted.unwrap();
    refused(case.cloned().await, Code::NotFound, &[&case.volume]);
    case.assert_nothing_left();
    assert_eq!(case.hidden(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_with_the_name_of_a_hidden_one_is_not_deleted() {
    let case = Case::new().await;
    let mut client = case.routed.controller();
    let made = client.create_snapshot(snapshot("clone-clone", &case.volume));
    made.await.unwrap();
    assert_eq!((case.hidden(), case.listed().await), (1, 2));
    refused(case.cloned().await, Code::AlreadyExists, &["clone-clone"]);
    case.assert_nothing_left();
    assert_eq!((case.hidden(), case.listed().await), (1, 2));
}

/// The file system of the source is not frozen for a clone that its pool would refuse.
#[tokio::test(flavor = "multi_thread")]
async fn no_snapshot_is_taken_for_a_clone_for_which_there_is_no_room() {
    let case = Case::new().await;
    let before = case.a.machine.effects();
    let mut request = case.clone_request();
    request.capacity_range = at_least(1 << 50);
    refused(
        case.routed.create(request).await,
        Code::ResourceExhausted,
        &["node-b", "pool default has room"],
    );
    assert_eq!((case.hidden(), case.a.machine.effects()), (0, before));
    case.assert_nothing_left();
    case.check(&case.cloned().await.unwrap());
}

/// The agent deletes it an hour after the last call.
#[tokio::test(flavor = "multi_thread")]
async fn a_clone_whose_hidden_snapshot_was_deleted_begins_again() {
    let mut case = Case::new().await;
    case.begun_clone().await;
    let ended = case.a.driver.snapshots.end_for_clone(&case.volume, "clone");
    ended.unwrap();
    assert_eq!(case.hidden(), 0);
    case.a.revive();
    case.routed.until("node-a", true).await;
    case.check(&case.cloned().await.unwrap());
    assert_eq!(case.hidden(), 0);
}

/// An error of the source names it, although the call asks for a volume on another node.
#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_a_move_has_fenced_is_not_cloned() {
    let case = Case::new().await;
    let move_uid = uuid::Uuid::from_u128(7);
    let fenced = case.a.driver.volumes.fence_volume(&case.volume, move_uid);
    fenced.unwrap();
    let words = ["node-a", &*case.volume, &*move_uid.to_string()];
    refused(case.cloned().await, Code::FailedPrecondition, &words);
    case.assert_nothing_left();
    assert_eq!(case.hidden(), 0);
}

/// The disk of the source hangs when the hidden snapshot is deleted.
#[tokio::test(flavor = "multi_thread")]
async fn a_complete_clone_is_returned_although_its_source_hangs() {
    let case = Case::new().await;
    let (opens, call) = case.cloning().await;
    let hangs = Opens(case.a.gate.clone());
    case.a.gate.close("rename");
    drop(opens);
    let begun = Instant::now();
    let made = call.await.unwrap().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(30));
    assert_eq!(case.a.gate.waiting(), 1, "the deletion waits");
    assert_eq!(case.cloned().await.unwrap(), made, "a repeat");
    case.check(&made);
    drop(hangs);
    // The deletion continues by itself.
    while case.hidden() > 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
