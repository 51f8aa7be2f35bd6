//! What is restored or reverted: a snapshot, or all members of a group snapshot.

use super::group;
use crate::cluster::{Cluster, Scope};
use crate::cuts::{self, Snapshot};
use crate::failure::{Failure, Result};

/// What is restored.
#[derive(Debug)]
pub struct Source {
    /// As a message names it.
    pub title: String,
    /// Its snapshots, sorted by the name of their claim. Each is ready, and has a name to which its
    /// copy is restored.
    pub members: Vec<Snapshot>,
}

impl Source {
    /// Refuses snapshots from which no claim can be created, because their size is not known.
    pub fn refuse_unsized(&self) -> Result<()> {
        match self.members.iter().find(|one| one.restore_bytes <= 0) {
            None => Ok(()),
            Some(one) => Err(Failure::failed(format!(
                "VolumeSnapshot {}/{} has no status.restoreSize, so the size of its copy is not known",
                one.namespace, one.name
            ))),
        }
    }
}

/// The kind that the user has named.
enum Named {
    Any,
    Snapshot,
    Group,
}

/// The snapshot or the group snapshot with this name, which may have the kind before it
/// (`volumegroupsnapshot/NAME`).
pub async fn find(cluster: &Cluster, which: &str) -> Result<Source> {
    let (named, name) = match which.split_once('/') {
        None => (Named::Any, which),
        // As `-o name` prints it, with the API group.
        Some((kind, name)) => match kind.split('.').next().unwrap_or_default() {
            "volumesnapshot" | "volumesnapshots" => (Named::Snapshot, name),
            "volumegroupsnapshot" | "volumegroupsnapshots" => (Named::Group, name),
            _ => {
                return Err(Failure::usage(format!(
                    "{which} is neither volumesnapshot/NAME nor volumegroupsnapshot/NAME"
                )));
            }
        },
    };
    let scope = Scope::Namespace(cluster.namespace.clone());
    let mut snapshots = cuts::snapshots(cluster, &scope, None).await?;
    let groups = match named {
        Named::Snapshot => Vec::new(),
        _ => cuts::groups(cluster, &scope, None).await?,
    };
    let group = groups.iter().find(|group| group.name == name);
    let snapshot = match named {
        Named::Group => None,
        _ => snapshots.iter().position(|one| one.name == name),
    };
    match (snapshot, group) {
        (Some(_), Some(_)) => Err(Failure::usage(format!(
            "{name} is a VolumeSnapshot and a VolumeGroupSnapshot: give volumesnapshot/{name} or volumegroupsnapshot/{name}"
        ))),
        (Some(at), None) => {
            let snapshot = snapshots.swap_remove(at);
            refuse_unready(&snapshot)?;
            Ok(Source {
                title: format!("VolumeSnapshot {}/{name}", cluster.namespace),
                members: vec![snapshot],
            })
        }
        (None, Some(group)) => {
            let members = group::members(cluster, group, snapshots).await?;
            members.iter().try_for_each(refuse_unready)?;
            Ok(Source {
                title: group::title(group),
                members,
            })
        }
        (None, None) => {
            // Not the same if groups could not be listed.
            let notes = cluster.take_notes();
            let notes: String = notes.iter().map(|note| format!("\n  {note}")).collect();
            Err(Failure::failed(format!(
                "namespace {} has no snapshot and no group snapshot {name} of {}; `kubectl slackwater snapshots` lists them{notes}",
                cluster.namespace, cluster.driver
            )))
        }
    }
}

fn refuse_unready(snapshot: &Snapshot) -> Result<()> {
    let title = format!("VolumeSnapshot {}/{}", snapshot.namespace, snapshot.name);
    let refuse = |why: String| Err(Failure::failed(format!("{title} {why}")));
    if snapshot.is_leaving {
        return refuse("is being deleted".into());
    }
    if !snapshot.ready {
        let why = match snapshot.error.as_str() {
            "" => String::new(),
            error => format!(": {error}"),
        };
        return refuse(format!("is not ready{why}"));
    }
    Ok(())
}
