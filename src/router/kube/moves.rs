//! Moves of volumes to other pools, as a controller: the volume of a claim is copied to another node
//! while nothing uses it, and its PersistentVolume is exchanged for one that names the copy.
//!
//! [`object`] has the VolumeMove, [`decide`] has all decisions, and [`fences`] lifts fences whose
//! VolumeMove was removed. What a move must not forget is in its status, in the fence of its
//! source, and in the annotation in which the PersistentVolume is stored while it is exchanged. IDs
//! of the copy and of the snapshot follow from the UID of the move.
//!
//! | file | content |
//! |---|---|
//! | `object` | the VolumeMove |
//! | `observe`, `decide`, `execute` | the reconciler |
//! | `propose` | where a volume could go |
//! | `others`, `pod_use` | what pods require |
//! | `fences` | fences without a move |
//! | `show` | the status |
//! | `trust` | what its status may say |

mod decide;
mod execute;
mod fences;
pub(super) mod object;
mod observe;
mod others;
mod pod_use;
mod propose;
mod show;
mod trust;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, PoisonError};

use k8s_openapi::jiff::Timestamp;
use uuid::Uuid;

use super::InCluster;
use super::reconcile::crd_watch::follow;
use super::reconcile::{Controller, Next, Outcome, Reconciler};
use crate::error::Result;
use crate::model::{SnapshotId, VolumeId};
use crate::router::cluster::Cluster;
use crate::router::volume_moves::{MovingVolumes, ROUNDS, Round, snapshot_of};
use decide::{Decision, Observed, decide};
use object::{MoveStatus, VolumeMove};

/// The name of the watch in messages.
pub(super) const MOVES: &str = "VolumeMoves";
/// The prefix of the annotations in which PersistentVolumes are stored during a move. `slackwater
/// pool adopt` has another one, so that neither completes what the other has begun.
pub(super) const NOTE: &str = "move.slackwater.dev/";
/// Steps that one pass does for a move. An exchange of a PersistentVolume needs ten.
const MAX_STEPS: usize = 30;

/// A move, and what is known of it.
pub(super) struct Moving {
    object: VolumeMove,
    /// `None` before it is observed, and if it is gone or belongs to another driver.
    seen: Option<Box<Observed>>,
}

impl fmt::Display for Moving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VolumeMove {}", self.object.path())
    }
}

/// Moves volumes.
pub(super) struct MoveController {
    pub(super) cluster: Arc<InCluster>,
    pub(super) volumes: Arc<dyn MovingVolumes>,
}

impl InCluster {
    /// Moves volumes from now on, while this router leads.
    pub fn move_volumes(self: &Arc<InCluster>, volumes: Arc<dyn MovingVolumes>) {
        self.spawn(follow(Arc::clone(self), MOVES, |it| &it.moves));
        let cluster = Arc::clone(self);
        let changes = Some(self.changes.subscribe());
        let controller = Arc::new(MoveController { cluster, volumes });
        self.control(controller, self.options.poll_interval, changes);
    }

    /// All moves, by namespace and name.
    pub(super) fn moves(&self) -> BTreeMap<String, VolumeMove> {
        let moves = self.moves.read().unwrap_or_else(PoisonError::into_inner);
        moves.now().clone()
    }

    /// IDs of the volumes and snapshots of moves that have not ended.
    pub(super) fn ids_of_moves(&self) -> BTreeSet<String> {
        let mut ids = BTreeSet::new();
        for object in self.moves().values() {
            let status = object.status.clone().unwrap_or_default();
            let places = [&status.from, &status.to].into_iter().flatten();
            ids.extend(places.map(|place| place.handle.clone()));
            let source = status.from.and_then(|from| from.handle.parse().ok());
            if let (Some(source), Some(uid)) = (source, object.uid()) {
                let snapshots = snapshots_of(source, uid).into_values();
                ids.extend(snapshots.map(|id| id.to_string()));
            }
        }
        ids
    }

    /// The number of moves in each phase, if this router leads and has read them.
    pub(super) fn count_moves(&self) -> Option<BTreeMap<&'static str, u64>> {
        let moves = self.moves();
        let phases = moves.values().map(|object| {
            let status = object.status.as_ref();
            status.map(|it| it.phase).unwrap_or_default().as_str()
        });
        self.count_phases(MOVES, phases)
    }

    /// How often there is each phase, if this router leads and has read the objects of this kind.
    pub(super) fn count_phases(
        &self,
        kind: &'static str,
        phases: impl Iterator<Item = &'static str>,
    ) -> Option<BTreeMap<&'static str, u64>> {
        let mut counts = BTreeMap::new();
        for phase in phases {
            *counts.entry(phase).or_default() += 1;
        }
        (self.is_leader() && self.following.is_complete(kind)).then_some(counts)
    }
}

/// Since when a step of a move has failed; `None` if none has.
pub(super) fn failed_since(object: &VolumeMove) -> Option<Timestamp> {
    let mut conditions = object.status.iter().flat_map(|it| &it.conditions);
    let failed = conditions.find(|one| one.reason == show::FAILED)?;
    Some(failed.last_transition_time.0)
}

/// All snapshots that a move may have.
pub(super) fn snapshots_of(source: VolumeId, move_uid: Uuid) -> BTreeMap<Round, SnapshotId> {
    let rounds = ROUNDS.map(Some).into_iter().chain([None]);
    let each = rounds.map(|round| (round, snapshot_of(source, move_uid, round)));
    each.collect()
}

#[tonic::async_trait]
impl Reconciler for MoveController {
    type Object = Moving;
    type Step = Decision;

    async fn observe(&self, moving: Moving) -> Result<Moving> {
        observe::observe(self, moving).await
    }

    fn next(moving: &Moving) -> Next<Decision> {
        let Some(seen) = &moving.seen else {
            return Next::Done;
        };
        let decision = decide(seen);
        let empty = MoveStatus::default();
        let before = moving.object.status.as_ref().unwrap_or(&empty);
        let is_shown = show::shown(seen, &decision) == *before;
        match decision.step.is_none() && is_shown {
            true => Next::Wait,
            false => Next::Step(decision),
        }
    }

    /// Does the step and, without a pause, those that follow it: the claim is Lost while its
    /// PersistentVolume does not exist.
    async fn execute(&self, moving: &Moving, decision: Decision) -> Result<Outcome> {
        let mut is_last = decision.step.is_none();
        let mut outcome = execute::execute(self, moving, &decision).await?;
        for _ in 1..MAX_STEPS {
            if is_last || outcome == Outcome::Stale || !self.cluster.is_leader() {
                break;
            }
            let again = Moving {
                object: moving.object.clone(),
                seen: None,
            };
            let again = self.observe(again).await?;
            let Next::Step(decision) = Self::next(&again) else {
                break;
            };
            is_last = decision.step.is_none();
            outcome = execute::execute(self, &again, &decision).await?;
        }
        Ok(outcome)
    }
}

#[tonic::async_trait]
impl Controller for MoveController {
    const NAME: &'static str = "volume moves";

    async fn list(&self, _leads_since: Timestamp) -> Option<Vec<Moving>> {
        let cluster = &self.cluster;
        let is_known = cluster.has_read_objects() && cluster.following.is_complete(MOVES);
        is_known.then(|| {
            let all = cluster.moves().into_values();
            all.map(|object| Moving { object, seen: None }).collect()
        })
    }
}
