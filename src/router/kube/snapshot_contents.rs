//! The consistency level of snapshots, and how long their cuts stopped writers, as annotations of
//! their VolumeSnapshotContent or VolumeGroupSnapshotContent. An event is deleted after an hour; an
//! auditor may ask a year later.
//!
//! They go through a bounded queue, as events do. A snapshot is valid whether or not its annotations
//! can be written.

use std::collections::BTreeMap;
use std::time::Duration;

use ::kube::api::{Api, DynamicObject, Patch, PatchParams};
use ::kube::core::{ApiResource, GroupVersionKind, PartialObjectMeta};
use ::kube::{Client, Error as KubeError};
use k8s_openapi::jiff::Timestamp;
use tokio::sync::mpsc;

use super::{Unsent, retried};
use crate::router::cluster::{Content, Note};

/// The prefix of the annotations. Nothing else of these objects is changed, which a
/// ValidatingAdmissionPolicy of the chart enforces.
const PREFIX: &str = "slackwater.dev/";
/// The length of the queue. A snapshot that does not fit gets no annotations.
const MAX_WAITING: usize = 512;
/// The delays before a request is sent again after the API server did not answer.
const RETRY_DELAYS: [Duration; 3] = [
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(20),
];

/// What is recorded at which object.
pub(super) type Noted = (Content, Note);

/// Both ends of a queue.
pub(super) fn queue() -> (mpsc::Sender<Noted>, mpsc::Receiver<Noted>) {
    mpsc::channel(MAX_WAITING)
}

/// Writes the annotations of a queue, for ever.
pub(super) async fn write(client: Client, mut notes: mpsc::Receiver<Noted>) {
    while let Some((content, note)) = notes.recv().await {
        let note = annotations(&note);
        match retried(&RETRY_DELAYS, || patch(&client, &content, &note)).await {
            Ok(()) => {}
            Err(Unsent::Rejected(error)) => tracing::debug!(
                ?content,
                error,
                "failed to annotate the object of a snapshot"
            ),
            Err(Unsent::Unanswered(problem)) => tracing::warn!(
                ?content,
                problem,
                "failed to annotate the object of a snapshot"
            ),
        }
    }
}

/// The kind of the object of a snapshot.
pub(super) fn snapshot_contents() -> GroupVersionKind {
    GroupVersionKind::gvk("snapshot.storage.k8s.io", "v1", "VolumeSnapshotContent")
}

/// The kind of the object of a group, in all versions of the API that a cluster may have, the newest
/// first.
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

fn annotations(note: &Note) -> BTreeMap<String, String> {
    // A started millisecond counts as one, so that 0 never stands for a short freeze.
    let milliseconds = |time: &Duration| time.as_micros().div_ceil(1000).to_string();
    let all = match note {
        Note::Reached(reached) => {
            let at = Timestamp::from_nanosecond(i128::from(reached.cut_at));
            let frozen = reached.frozen.iter();
            let mut all = vec![
                ("level", reached.level.as_str().to_string()),
                ("cut-at", at.map(|at| at.to_string()).unwrap_or_default()),
                ("reason", reached.reason.clone()),
            ];
            all.extend(frozen.map(|time| ("frozen-ms", milliseconds(time))));
            all
        }
        Note::Durations { frozen, held } => {
            let frozen = frozen.iter().map(|time| ("frozen-ms", milliseconds(time)));
            let held = held.iter().map(|time| ("held-ms", milliseconds(time)));
            frozen.chain(held).collect()
        }
    };
    let all = all.into_iter();
    all.map(|(name, value)| (format!("{PREFIX}{name}"), value))
        .collect()
}

async fn patch(
    client: &Client,
    content: &Content,
    annotations: &BTreeMap<String, String>,
) -> Result<(), KubeError> {
    let note = serde_json::json!({"metadata": {"annotations": annotations}});
    let (params, note) = (PatchParams::default(), Patch::Merge(note));
    let (name, kinds) = kinds(content);
    let mut last = Ok(());
    for kind in kinds {
        type Any = PartialObjectMeta<DynamicObject>;
        let api = Api::<Any>::all_with(client.clone(), &ApiResource::from_gvk(&kind));
        last = match api.patch_metadata(name, &params, &note).await {
            // The cluster does not have this version, or the object does not exist.
            Err(KubeError::Api(status)) if status.code == 404 => Err(KubeError::Api(status)),
            answer => return answer.map(drop),
        };
    }
    last
}
