//! What a snapshot has reached, as annotations of its VolumeSnapshotContent or
//! VolumeGroupSnapshotContent: an event is gone after an hour, and an auditor asks a year later.
//!
//! They go through a bounded queue, as events do. A snapshot is a good one whether or not this can
//! be written down.

use std::time::Duration;

use ::kube::api::{Api, DynamicObject, Patch, PatchParams};
use ::kube::core::{ApiResource, GroupVersionKind, PartialObjectMeta};
use ::kube::{Client, Error as KubeError};
use k8s_openapi::jiff::Timestamp;
use tokio::sync::mpsc;

use super::API_TIMEOUT;
use crate::error::chain;
use crate::router::cluster::{Content, Reached};

/// All of them begin with it: nothing else of these objects is changed, and the chart has a
/// ValidatingAdmissionPolicy that says so.
const PREFIX: &str = "slackwater.dev/";
/// Snapshots that wait for the API server; of more nothing is noted.
const WAITING: usize = 512;
/// An API server that doesn't answer is tried again after these.
const RETRIES: [Duration; 3] = [
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(20),
];

/// A note to be written.
pub(super) type Note = (Content, Reached);

/// The ends of the queue.
pub(super) fn queue() -> (mpsc::Sender<Note>, mpsc::Receiver<Note>) {
    mpsc::channel(WAITING)
}

/// Writes what comes, for ever.
pub(super) async fn write(client: Client, mut notes: mpsc::Receiver<Note>) {
    while let Some((content, reached)) = notes.recv().await {
        let mut pauses = RETRIES.iter();
        loop {
            let written = patch(&client, &content, &reached);
            let problem = match tokio::time::timeout(API_TIMEOUT, written).await {
                Ok(Ok(())) => break,
                Ok(Err(KubeError::Api(status))) if status.code < 500 && status.code != 429 => {
                    let error = status.message;
                    tracing::debug!(
                        ?content,
                        error,
                        "failed to record the consistency level of a snapshot"
                    );
                    break;
                }
                Ok(Err(error)) => chain(&error),
                Err(_) => "no answer from the API server".into(),
            };
            let Some(pause) = pauses.next() else {
                tracing::warn!(
                    ?content,
                    problem,
                    "failed to record the consistency level of a snapshot"
                );
                break;
            };
            tokio::time::sleep(*pause).await;
        }
    }
}

/// The kind of the object that stands for a snapshot.
pub(super) fn snapshot_contents() -> GroupVersionKind {
    GroupVersionKind::gvk("snapshot.storage.k8s.io", "v1", "VolumeSnapshotContent")
}

/// The kind of the object that stands for a group: versions of the API that a cluster may have,
/// the newest first.
pub(super) fn group_contents() -> Vec<GroupVersionKind> {
    let (group, kind) = ("groupsnapshot.storage.k8s.io", "VolumeGroupSnapshotContent");
    let versions = ["v1", "v1beta2", "v1beta1"].into_iter();
    versions
        .map(|version| GroupVersionKind::gvk(group, version, kind))
        .collect()
}

fn kinds(content: &Content) -> (&str, Vec<GroupVersionKind>) {
    match content {
        Content::Snapshot(name) => (name, vec![snapshot_contents()]),
        Content::Group(name) => (name, group_contents()),
    }
}

async fn patch(client: &Client, content: &Content, reached: &Reached) -> Result<(), KubeError> {
    let at = Timestamp::from_nanosecond(i128::from(reached.cut_at));
    let note = serde_json::json!({ "metadata": { "annotations": {
        format!("{PREFIX}level"): reached.level.word(),
        format!("{PREFIX}cut-at"): at.map(|at| at.to_string()).unwrap_or_default(),
        format!("{PREFIX}reason"): reached.reason,
    }}});
    let (params, note) = (PatchParams::default(), Patch::Merge(note));
    let (name, kinds) = kinds(content);
    let mut last = Ok(());
    for kind in kinds {
        type Any = PartialObjectMeta<DynamicObject>;
        let api = Api::<Any>::all_with(client.clone(), &ApiResource::from_gvk(&kind));
        last = match api.patch_metadata(name, &params, &note).await {
            // No such version, or no such object.
            Err(KubeError::Api(status)) if status.code == 404 => Err(KubeError::Api(status)),
            answer => return answer.map(drop),
        };
    }
    last
}
