//! `slackwater snapshots delete`: deletes snapshots that no object of the cluster owns. Members of groups
//! are among them: once the object of their group is gone, no other object can delete them.
//!
//! Each snapshot is looked up at the driver by its id, and the API server is asked about this snapshot
//! immediately before it is deleted. If anything cannot be determined, the snapshot is kept.

use std::path::Path;
use std::time::Duration;

use ::kube::api::DynamicObject;
use ::kube::{Client, ResourceExt};
use serde_json::Value;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::{Unlisted, each};
use crate::agent::DeleteSnapshotRequest;
use crate::agent::admin_client::AdminClient;
use crate::csi::controller_client::ControllerClient;
use crate::csi::{ListSnapshotsRequest, Snapshot};
use crate::error::{Error, Result, chain};
use crate::model::SnapshotId;
use crate::router::call::within;
use crate::router::csi_socket;
use crate::router::kube::snapshot_contents;

/// A long timeout: the driver resolves the state of a group with all nodes, and may overwrite blocks
/// with zeros.
const DELETE_TIMEOUT: Duration = Duration::from_secs(300);

/// A snapshot that was named, and what is done with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnownedSnapshot {
    pub id: SnapshotId,
    /// The group that it is a member of.
    pub group: Option<String>,
    /// What is done with it.
    pub outcome: SnapshotOutcome,
}

/// What is done with a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotOutcome {
    /// The driver has no snapshot with this id.
    Absent,
    /// No object owns it, and it would be deleted.
    Unowned,
    /// No object owned it, and it was deleted.
    Deleted,
    /// It is kept, for this reason.
    Left(String),
}

/// The driver that has the snapshots, and its cluster.
pub struct UnownedSnapshots {
    client: Client,
    channel: Channel,
}

impl UnownedSnapshots {
    /// The snapshots of the driver at a socket. An error if its name differs from `expected`.
    pub async fn new(
        client: Client,
        expected: Option<&str>,
        socket: &Path,
    ) -> Result<UnownedSnapshots> {
        let (channel, _) = csi_socket::driver(socket, expected).await?;
        Ok(UnownedSnapshots { client, channel })
    }

    /// Decides about a snapshot. With `yes` it is deleted if no object owns it.
    pub async fn delete_unowned(&self, id: SnapshotId, yes: bool) -> UnownedSnapshot {
        let mut line = UnownedSnapshot {
            id,
            group: None,
            outcome: SnapshotOutcome::Absent,
        };
        let found = match self.find(id).await {
            Ok(Some(found)) => found,
            Ok(None) => return line,
            Err(error) => {
                line.outcome = SnapshotOutcome::Left(chain(&error));
                return line;
            }
        };
        line.group = Some(found.group_snapshot_id.clone()).filter(|group| !group.is_empty());
        line.outcome = match self.owner(&found).await {
            Err(error) => SnapshotOutcome::Left(chain(&error)),
            Ok(Some(owner)) => SnapshotOutcome::Left(owner),
            Ok(None) if !yes => SnapshotOutcome::Unowned,
            Ok(None) => match self.delete(id).await {
                Ok(()) => SnapshotOutcome::Deleted,
                Err(status) => SnapshotOutcome::Left(status_text(&status)),
            },
        };
        line
    }

    /// The snapshot with this id, if the driver has it.
    async fn find(&self, id: SnapshotId) -> Result<Option<Snapshot>> {
        let question = ListSnapshotsRequest {
            snapshot_id: id.to_string(),
            ..ListSnapshotsRequest::default()
        };
        let question = within(question, DELETE_TIMEOUT);
        let answer = ControllerClient::new(self.channel.clone());
        let answer = answer.clone().list_snapshots(question).await;
        let entries = answer.map_err(|status| unknown(status_text(&status)))?;
        let mut found = entries.into_inner().entries.into_iter();
        let found = found.find_map(|entry| entry.snapshot);
        match found {
            Some(other) if other.snapshot_id != id.to_string() => Err(unknown(format!(
                "the request was about {id}, but the answer is about {}",
                other.snapshot_id
            ))),
            found => Ok(found),
        }
    }

    /// Why a snapshot is kept: an object that names it or its group, or that may be about to.
    async fn owner(&self, snapshot: &Snapshot) -> Result<Option<String>> {
        let mut names = vec![snapshot.snapshot_id.as_str()];
        let single = snapshot_contents::snapshot_contents();
        let mut owner = None;
        let looked = each(&self.client, &single, |content| {
            let handle = "/status/snapshotHandle";
            owner = owner
                .take()
                .or(why(&single.kind, content, &names, snapshot, handle));
        });
        match looked.await {
            Ok(()) => {}
            Err(Unlisted::Failed(error)) => return Err(error),
            Err(Unlisted::Unknown | Unlisted::Forbidden) => return Err(unlisted(&single.kind)),
        }
        if !snapshot.group_snapshot_id.is_empty() {
            names.push(&snapshot.group_snapshot_id);
        }
        for kind in snapshot_contents::group_contents() {
            let looked = each(&self.client, &kind, |content| {
                let handle = "/status/volumeGroupSnapshotHandle";
                owner = owner
                    .take()
                    .or(why(&kind.kind, content, &names, snapshot, handle));
            });
            match looked.await {
                Ok(()) => break,
                // The cluster has another version of the API, or no groups.
                Err(Unlisted::Unknown) => {}
                Err(Unlisted::Forbidden) => return Err(unlisted(&kind.kind)),
                Err(Unlisted::Failed(error)) => return Err(error),
            }
        }
        Ok(owner)
    }

    async fn delete(&self, id: SnapshotId) -> std::result::Result<(), Status> {
        let snapshot_id = id.to_string();
        let question = within(DeleteSnapshotRequest { snapshot_id }, DELETE_TIMEOUT);
        let client = AdminClient::new(self.channel.clone());
        client.clone().delete_snapshot(question).await.map(drop)
    }
}

/// Why an object keeps a snapshot: it contains one of these names anywhere, or it is of the same volume
/// and has no handle yet.
fn why(
    kind: &str,
    content: &DynamicObject,
    names: &[&str],
    snapshot: &Snapshot,
    handle: &str,
) -> Option<String> {
    let says = |text: &&str| mentions(&content.data, text);
    if let Some(name) = names.iter().find(|name| says(name)) {
        return Some(format!("{kind} {} references {name}", content.name_any()));
    }
    let has_handle = content.data.pointer(handle).is_some();
    (!has_handle && says(&&*snapshot.source_volume_id)).then(|| {
        format!(
            "{kind} {} is of its volume {} and has no handle yet",
            content.name_any(),
            snapshot.source_volume_id
        )
    })
}

/// Whether a text is anywhere in a value. Versions of the API have handles in different fields.
pub(super) fn mentions(value: &Value, text: &str) -> bool {
    match value {
        Value::String(value) => value == text,
        Value::Array(values) => values.iter().any(|value| mentions(value, text)),
        Value::Object(fields) => fields.values().any(|value| mentions(value, text)),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

fn status_text(status: &Status) -> String {
    match status.code() {
        Code::Unimplemented => {
            "the driver at --endpoint is of an earlier release, which cannot delete members of groups".into()
        }
        _ => status.message().to_string(),
    }
}

fn unknown(reason: String) -> Error {
    Error::unreachable("the driver", reason)
}

fn unlisted(kind: &str) -> Error {
    Error::unreachable(
        format!("the list of {kind}s"),
        "the API server does not list them, so it is unknown which snapshots are in use",
    )
}
