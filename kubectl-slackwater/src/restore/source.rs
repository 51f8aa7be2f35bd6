//! What is restored or reverted: a snapshot, or all members of a group snapshot.

use crate::cluster::{Cluster, Scope};
use crate::cuts::{self, Snapshot};
use crate::failure::{Failure, Result};
use crate::object::{self, Fields};

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
        (None, Some(group)) => members(cluster, group, snapshots).await,
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

/// All members of a group. A group of which one is missing is refused: the application would start
/// with volumes of different times, or with an empty one.
async fn members(
    cluster: &Cluster,
    group: &cuts::Group,
    snapshots: Vec<Snapshot>,
) -> Result<Source> {
    let title = format!("VolumeGroupSnapshot {}/{}", group.namespace, group.name);
    let refuse = |why: String| Err(Failure::failed(format!("{title} {why}")));
    if group.is_leaving {
        return refuse("is being deleted".into());
    }
    if !group.ready {
        let why = match group.error.as_str() {
            "" => String::new(),
            error => format!(": {error}"),
        };
        return refuse(format!("is not ready{why}"));
    }
    let is_member = |one: &Snapshot| {
        // The owner is absent where a backup program has removed it.
        one.group == group.name && (one.group_uid.is_empty() || one.group_uid == group.uid)
    };
    let mut members: Vec<_> = snapshots.into_iter().filter(is_member).collect();
    members.sort_by(|a, b| (a.base(), &a.name).cmp(&(b.base(), &b.name)));
    // Without its content, a group that has lost members looks complete.
    let content = cluster
        .get_one(&object::GROUP_CONTENT, "", &group.content)
        .await?;
    let Some(content) = content else {
        return refuse(
            "has no VolumeGroupSnapshotContent, so whether it is complete is not known".into(),
        );
    };
    let volumes = content.list("/spec/source/volumeHandles").len();
    let imported = content.list("/spec/source/groupSnapshotHandles/volumeSnapshotHandles");
    let expected = volumes.max(imported.len());
    if members.len() != expected || members.is_empty() {
        return refuse(format!(
            "is incomplete: it has members for {} of {expected} volumes; single members can be restored by the names of their VolumeSnapshots",
            members.len()
        ));
    }
    members.iter().try_for_each(refuse_unready)?;
    let twice = members
        .windows(2)
        .find(|pair| pair[0].base() == pair[1].base());
    if let Some(pair) = twice {
        return refuse(format!(
            "has two members for the claim {}: {} and {}",
            pair[0].base(),
            pair[0].name,
            pair[1].name
        ));
    }
    Ok(Source { title, members })
}
