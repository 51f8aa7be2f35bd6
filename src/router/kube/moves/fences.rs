//! Fences whose VolumeMove was removed together with its finalizer, as a controller: such a volume could
//! never be used again.
//!
//! A fence is lifted only if its volume is certainly the one that is to be used: the PersistentVolume
//! names it, no exchange of that PersistentVolume has begun, and nothing names a copy of the move. What
//! is not certain stays fenced, and is logged.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ::kube::api::{Api, ListParams};
use k8s_openapi::jiff::Timestamp;
use uuid::Uuid;

use super::object::VolumeMove;
use super::{MOVES, NOTE, snapshots_of};
use crate::error::Result;
use crate::model::VolumeId;
use crate::model::id::NameKind;
use crate::operation::snapshot_name;
use crate::router::cluster::{Cluster, ObjectRef};
use crate::router::kube::adopt::manifest::{HANDLE, Manifest};
use crate::router::kube::adopt::{noted, resource};
use crate::router::kube::pools::object::Pool;
use crate::router::kube::reconcile::{Controller, Next, Outcome, Reconciler};
use crate::router::kube::{InCluster, ask};
use crate::router::volume_moves::MovingVolumes;

/// A fenced volume, with the UID of the move that has fenced it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Fence {
    volume: VolumeId,
    move_uid: Uuid,
}

/// A fence, and what is known about it.
pub(super) struct Fenced {
    fence: Fence,
    seen: Seen,
}

/// What decides about a fence.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// Its VolumeMove exists.
    pub(super) has_move: bool,
    /// The PersistentVolume that names the volume.
    pub(in crate::router::kube) live: Option<Manifest>,
    /// Another PersistentVolume that names the volume, or one that names a copy.
    pub(in crate::router::kube) other: Option<String>,
    /// A PersistentVolume with this name is stored while it is exchanged.
    pub(super) is_stored: bool,
}

/// Whether the fence is lifted, or why it stays.
pub(super) fn decide(seen: &Seen) -> Next<()> {
    let stays = |why: String| Next::Refused(format!("its VolumeMove does not exist, but {why}"));
    if seen.has_move {
        return Next::Wait;
    }
    let Some(live) = &seen.live else {
        return stays("no PersistentVolume names the volume".into());
    };
    if let Some(other) = &seen.other {
        return stays(format!("PersistentVolume {other} names it or a copy of it"));
    }
    if live.is_leaving() || live.policy_before().is_some() || seen.is_stored {
        return stays("its PersistentVolume is being exchanged".into());
    }
    Next::Step(())
}

impl fmt::Display for Fenced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the fence of volume {}", self.fence.volume)
    }
}

/// Lifts fences without a move.
struct FenceController {
    cluster: Arc<InCluster>,
    volumes: Arc<dyn MovingVolumes>,
    /// Since when each fence has no move. A router that has just started, or has missed an object for a
    /// moment, must not lift a fence.
    since: Mutex<BTreeMap<Fence, Instant>>,
}

impl InCluster {
    /// Lifts fences without a move from now on, while this router leads.
    pub fn lift_fences(self: &Arc<InCluster>, volumes: Arc<dyn MovingVolumes>) {
        let controller = FenceController {
            cluster: Arc::clone(self),
            volumes,
            since: Mutex::default(),
        };
        self.control(Arc::new(controller), self.options.poll_interval, None);
    }
}

impl FenceController {
    fn since(&self) -> MutexGuard<'_, BTreeMap<Fence, Instant>> {
        self.since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// IDs that the copy of a move may have. Its name is known, and its pool is one of the cluster's.
    fn copies(&self, move_uid: Uuid) -> impl Iterator<Item = String> + use<> {
        let name = snapshot_name(move_uid, None);
        let pools = self.cluster.known_pools().into_iter();
        pools.map(move |pool| VolumeId::of_name(pool.id, NameKind::Volume, &name).to_string())
    }
}

/// The fences that agents report.
fn reported(cluster: &InCluster) -> Vec<Fence> {
    let reports = cluster.agents.reports().into_iter();
    let answers = reports.filter_map(|report| report.seen);
    let fences = answers.flat_map(|(_, answer)| answer.fences.clone());
    let parsed = fences.filter_map(|fence| {
        Some(Fence {
            volume: fence.volume_id.parse().ok()?,
            move_uid: fence.move_uid.parse().ok()?,
        })
    });
    parsed.collect()
}

#[tonic::async_trait]
impl Controller for FenceController {
    const NAME: &'static str = "fences";

    async fn list(&self, _leads_since: Timestamp) -> Option<Vec<Fenced>> {
        let cluster = &self.cluster;
        if !cluster.has_read_objects() || !cluster.following.is_complete(MOVES) {
            return None;
        }
        let moves = cluster.moves();
        let has_move = |fence: &Fence| moves.values().any(|one| one.uid() == Some(fence.move_uid));
        let fences: Vec<Fence> = reported(cluster)
            .into_iter()
            .filter(|it| !has_move(it))
            .collect();
        let now = Instant::now();
        let mut since = self.since();
        since.retain(|fence, _| fences.contains(fence));
        let age = cluster.options.orphans.age;
        let old = fences.into_iter().filter(|fence| {
            let at = since.entry(fence.clone()).or_insert(now);
            now.duration_since(*at) >= age
        });
        let seen = Seen::default();
        Some(
            old.map(|fence| Fenced {
                fence,
                seen: seen.clone(),
            })
            .collect(),
        )
    }

    async fn refuse(&self, fenced: &Fenced, why: String) -> Result<()> {
        // Again after the same time.
        self.since().insert(fenced.fence.clone(), Instant::now());
        let volume = fenced.fence.volume.to_string();
        tracing::warn!(volume, why, "a volume stays fenced");
        Ok(())
    }

    fn reset(&self) {
        self.since().clear();
    }
}

#[tonic::async_trait]
impl Reconciler for FenceController {
    type Object = Fenced;
    type Step = ();

    /// Everything is read again: what is in memory may be out of date.
    async fn observe(&self, fenced: Fenced) -> Result<Fenced> {
        let cluster = &self.cluster;
        let Fence { volume, move_uid } = fenced.fence.clone();
        let moves = Api::<VolumeMove>::all(cluster.client.clone());
        let moves = ask("VolumeMoves", moves.list(&ListParams::default())).await?;
        let has_move = moves.items.iter().any(|one| one.uid() == Some(move_uid));
        let handle = volume.to_string();
        let mut names = cluster.volumes.names_of(&handle).into_iter();
        let (name, double) = (names.next(), names.next());
        let of_copies = self
            .copies(move_uid)
            .flat_map(|copy| cluster.volumes.names_of(&copy));
        let other = double.or_else(|| of_copies.into_iter().next());
        let (mut live, mut is_stored) = (None, false);
        if let Some(name) = name {
            let api = Api::all_with(cluster.client.clone(), &resource());
            let found = ask(&format!("PersistentVolume {name}"), api.get_opt(&name)).await?;
            let found = found.map(Manifest);
            live = found.filter(|live| live.text(HANDLE) == Some(&handle));
            let pools = Api::<Pool>::all(cluster.client.clone());
            for pool in ask("Pools", pools.list(&ListParams::default()))
                .await?
                .items
            {
                is_stored |= noted(&pool, NOTE)?.contains_key(&name);
            }
        }
        let seen = Seen {
            has_move,
            live,
            other,
            is_stored,
        };
        Ok(Fenced { seen, ..fenced })
    }

    fn next(fenced: &Fenced) -> Next<()> {
        decide(&fenced.seen)
    }

    async fn execute(&self, fenced: &Fenced, (): ()) -> Result<Outcome> {
        let Fence { volume, move_uid } = fenced.fence;
        // First: without the fence, nothing would look for what is left.
        for snapshot in snapshots_of(volume, move_uid).into_values() {
            self.volumes.delete_snapshot(snapshot).await?;
        }
        self.volumes.fence(volume, move_uid, true).await?;
        let handle = volume.to_string();
        let uid = move_uid.to_string();
        tracing::info!(
            volume = handle,
            uid,
            "lifted the fence of a VolumeMove that does not exist"
        );
        if let Some(claim) = self.cluster.claim_of(&handle) {
            let message = "its volume can be used again: it was fenced for a VolumeMove that does not exist any more";
            let about = ObjectRef::Claim(claim);
            self.cluster
                .record_event(&about, false, "FenceLifted", message.into());
        }
        Ok(Outcome::Done)
    }
}

#[cfg(test)]
mod tests;
