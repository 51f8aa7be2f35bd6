//! What is restored or reverted: a snapshot, all members of a group snapshot, or the newest sets of a
//! schedule.

use super::group_snapshot;
use crate::cluster::object::{self, Fields};
use crate::cluster::{Cluster, Scope};
use crate::failure::{Failure, Result};
use crate::model::snapshot::{self, Snapshot};
use crate::schedules::run::{self, Sets};
use crate::text::after_colon;

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
#[derive(Clone, Copy)]
enum Named {
    Any,
    Snapshot,
    Group,
}

/// The snapshot or the group snapshot with this name, which may have the kind before it
/// (`volumegroupsnapshot/NAME`). For `snapshotschedule/NAME`, what this schedule has taken last.
pub async fn get(cluster: &Cluster, which: &str) -> Result<Source> {
    let Some((kind, name)) = which.split_once('/') else {
        return get_named(cluster, Named::Any, which).await;
    };
    // As `-o name` prints it, with the API group.
    match kind.split('.').next().unwrap_or_default() {
        "volumesnapshot" | "volumesnapshots" => get_named(cluster, Named::Snapshot, name).await,
        "volumegroupsnapshot" | "volumegroupsnapshots" => {
            get_named(cluster, Named::Group, name).await
        }
        "snapshotschedule" | "snapshotschedules" => get_newest(cluster, name).await,
        _ => Err(Failure::usage(format!(
            "{which} is neither volumesnapshot/NAME, volumegroupsnapshot/NAME nor snapshotschedule/NAME, nor a content (volumesnapshotcontent/NAME, volumegroupsnapshotcontent/NAME)"
        ))),
    }
}

/// The sets of the last slot of a schedule of which each set is complete, as its controller has written to
/// its status. One that was deleted since then is an error, and never replaced by an older one.
async fn get_newest(cluster: &Cluster, schedule: &str) -> Result<Source> {
    let object = run::get(cluster, schedule).await?;
    let title = format!("SnapshotSchedule {}/{schedule}", cluster.namespace);
    let Some(slot) = object.time("/status/lastCutSlot") else {
        return Err(Failure::failed(format!(
            "{title} has no complete set yet; `kubectl slackwater schedules` shows why"
        )));
    };
    let sets = Sets::of(&object, slot);
    let named = match sets.kind.kind == object::GROUP.kind {
        true => Named::Group,
        false => Named::Snapshot,
    };
    let mut members = Vec::new();
    for name in &sets.names {
        members.extend(get_named(cluster, named, name).await?.members);
    }
    let sets = sets.names.join(", ");
    Ok(Source {
        title: format!("{title}, slot {slot} ({sets}),"),
        members,
    })
}

async fn get_named(cluster: &Cluster, named: Named, name: &str) -> Result<Source> {
    let scope = Scope::Namespace(cluster.namespace.clone());
    let mut snapshots = snapshot::snapshots(cluster, &scope, None).await?;
    let groups = match named {
        Named::Snapshot => Vec::new(),
        _ => snapshot::groups(cluster, &scope, None).await?,
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
            let members = group_snapshot::members(cluster, group, snapshots).await?;
            members.iter().try_for_each(refuse_unready)?;
            Ok(Source {
                title: group_snapshot::title(group),
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
    if snapshot.is_being_deleted {
        return refuse("is being deleted".into());
    }
    if !snapshot.ready {
        let why = after_colon(&snapshot.error);
        return refuse(format!("is not ready{why}"));
    }
    Ok(())
}
