//! Which moves a pool that is being emptied needs, and what is left in it. Pure functions of what was
//! read.

use std::collections::{BTreeMap, BTreeSet};

use ::kube::api::{ObjectMeta, TypeMeta};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::EVACUATES;
use super::remaining::MAX_LISTED;
use crate::model::{PoolId, VolumeId};
use crate::router::kube::moves::object::{MoveSpec, Phase, VolumeMove};
use crate::router::kube::orphans::Stored;
use crate::router::kube::pools::object::Evacuation;

/// Volumes that are copied at the same time. More would only make each of them slower.
const COPIES_AT_ONCE: usize = 2;
/// After this time an undone move is tried again.
const RETRY_AFTER: SignedDuration = SignedDuration::from_mins(10);

/// What has to be known of a pool.
pub(super) struct Seen {
    pub(super) id: PoolId,
    pub(super) is_evacuated: bool,
    /// PersistentVolumes: name, handle and claim.
    pub(super) volumes: Vec<(String, String, Option<String>)>,
    /// What its agent has, if it could be asked.
    pub(super) stored: Option<Stored>,
    /// The moves that were created for it.
    pub(super) its: Vec<VolumeMove>,
    /// All moves.
    pub(super) all: Vec<VolumeMove>,
    /// IDs of the volumes and snapshots of all moves.
    pub(super) named: BTreeSet<String>,
    pub(super) now: Timestamp,
}

/// Moves to be created and deleted.
#[derive(Debug, Default)]
pub(in crate::router::kube) struct Change {
    /// Of these, the first that can be created.
    pub(super) create: Vec<VolumeMove>,
    /// How many are created at most.
    pub(super) at_most: usize,
    pub(super) delete: Vec<VolumeMove>,
}

impl Change {
    pub(super) fn is_empty(&self) -> bool {
        (self.create.is_empty() || self.at_most == 0) && self.delete.is_empty()
    }
}

fn phase(object: &VolumeMove) -> Phase {
    let status = object.status.as_ref();
    status.map(|status| status.phase).unwrap_or_default()
}

/// Whether it copies a volume, or is about to.
fn is_copying(object: &VolumeMove) -> bool {
    let waits =
        |status: &crate::router::kube::moves::object::MoveStatus| !status.message.is_empty();
    match phase(object) {
        Phase::Copying | Phase::Fenced | Phase::LastCopy => true,
        // With a message it waits for a target.
        Phase::Pending => !object.status.as_ref().is_some_and(waits),
        _ => false,
    }
}

/// Decides which moves are created and deleted.
pub(super) fn decide(seen: &Seen) -> Change {
    let here = seen.its.iter().filter(|object| !object.is_leaving());
    if !seen.is_evacuated {
        let switched = |object: &VolumeMove| {
            let status = object.status.as_ref();
            status.is_some_and(|status| status.switched_at.is_some())
        };
        // One that has switched ends by itself.
        let undone = here.filter(|object| phase(object).is_final() || !switched(object));
        return Change {
            delete: undone.cloned().collect(),
            ..Change::default()
        };
    }
    let is_old = |object: &VolumeMove| {
        let created = object.metadata.creation_timestamp.as_ref();
        created.is_none_or(|at| seen.now.duration_since(at.0) >= RETRY_AFTER)
    };
    let failed = here.filter(|object| phase(object) == Phase::Aborted && is_old(object));
    let delete = failed.cloned().collect();
    let copying = seen.its.iter().filter(|object| is_copying(object)).count();
    let taken: BTreeSet<String> = {
        let active = seen.all.iter().filter(|object| !phase(object).is_final());
        active.map(VolumeMove::claim).collect()
    };
    // Also one that a user has created with the name that the move of a volume would have.
    let paths: BTreeSet<String> = seen.all.iter().map(VolumeMove::path).collect();
    let wanted = seen.volumes.iter().filter_map(|(_, handle, claim)| {
        let claim = claim.as_ref().filter(|claim| !taken.contains(*claim))?;
        let object = move_of(seen.id, handle.parse().ok()?, claim)?;
        (!paths.contains(&object.path())).then_some(object)
    });
    Change {
        create: wanted.collect(),
        at_most: COPIES_AT_ONCE.saturating_sub(copying),
        delete,
    }
}

/// The move of a volume out of a pool. Its name follows from the volume, so that two routers create only
/// one. The source is not kept: the pool is to be emptied.
fn move_of(pool: PoolId, volume: VolumeId, claim: &str) -> Option<VolumeMove> {
    let (namespace, claim) = claim.split_once('/')?;
    let labels = [(EVACUATES.to_string(), pool.to_string())];
    Some(VolumeMove {
        types: Some(TypeMeta::resource::<VolumeMove>()),
        metadata: ObjectMeta {
            name: Some(format!("evacuate-{}", volume.uuid)),
            namespace: Some(namespace.into()),
            labels: Some(BTreeMap::from(labels)),
            ..ObjectMeta::default()
        },
        spec: MoveSpec {
            claim: claim.into(),
            keep_source: Some("0s".into()),
            ..MoveSpec::default()
        },
        status: None,
    })
}

/// What is left in a pool, or why that is not known.
pub(super) fn left(seen: &Seen) -> Result<Evacuation, String> {
    let stored = seen.stored.as_ref();
    let stored = stored.ok_or("its agent cannot be asked what is in it")?;
    let mut found = Evacuation::default();
    for (name, _, claim) in &seen.volumes {
        match claim {
            Some(claim) => found.claims.push(claim.clone()),
            None => found.unclaimed.push(name.clone()),
        }
    }
    let handles: BTreeSet<&String> = seen.volumes.iter().map(|(_, handle, _)| handle).collect();
    for id in stored.volumes.iter().filter(|id| !handles.contains(id)) {
        match seen.named.contains(id) {
            true => found.sources.push(id.clone()),
            false => found.orphans.push(id.clone()),
        }
    }
    let snapshots = stored.snapshots.iter();
    found.snapshots = snapshots.map(|snapshot| snapshot.id.clone()).collect();
    let Evacuation {
        claims,
        unclaimed,
        orphans,
        sources,
        snapshots,
        left,
    } = &mut found;
    for list in [claims, unclaimed, orphans, sources, snapshots] {
        *left += list.len() as u64;
        list.sort();
        list.truncate(MAX_LISTED);
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
