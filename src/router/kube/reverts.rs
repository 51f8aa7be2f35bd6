//! Reverts of volumes, as a controller: the volumes of claims get the content of their snapshots, and
//! the claims and PersistentVolumes stay as they are.
//!
//! [`object`] has the VolumeRevert, [`decide`] has all decisions, and [`fences`] ends fences whose
//! VolumeRevert was removed. What a revert must not forget is in its status, and in the fences of
//! its volumes, which their agents keep.
//!
//! | file | content |
//! |---|---|
//! | `object` | the VolumeRevert |
//! | `observe`, `decide`, `execute` | the reconciler |
//! | `propose` | with which members a revert begins |
//! | `read` | reads the objects that it names |
//! | `fences` | fences without a revert |

mod decide;
mod execute;
mod fences;
pub(super) mod object;
mod observe;
mod propose;
mod read;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, PoisonError};

use k8s_openapi::jiff::Timestamp;

use super::InCluster;
use super::reconcile::crd_watch::follow;
use super::reconcile::{Controller, Next, Outcome, Reconciler};
use crate::error::Result;
use crate::router::cluster::Cluster;
use crate::router::volume_reverts::RevertingVolumes;
use decide::{Decision, Observed, decide};
use object::VolumeRevert;

/// The name of the watch in messages.
const REVERTS: &str = "VolumeReverts";
/// Steps that one pass does for a revert, so that a group is fenced for a short time.
const MAX_STEPS: usize = 50;

/// A revert, and what is known of it.
pub(super) struct Revert {
    object: VolumeRevert,
    /// `None` before it is observed, and if it is gone.
    seen: Option<Box<Observed>>,
}

impl fmt::Display for Revert {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VolumeRevert {}", self.object.path())
    }
}

/// Reverts volumes.
pub(super) struct RevertController {
    pub(super) cluster: Arc<InCluster>,
    pub(super) volumes: Arc<dyn RevertingVolumes>,
}

impl InCluster {
    /// Reverts volumes from now on, while this router leads.
    pub fn revert_volumes(self: &Arc<InCluster>, volumes: Arc<dyn RevertingVolumes>) {
        self.spawn(follow(Arc::clone(self), REVERTS, |it| &it.reverts));
        let cluster = Arc::clone(self);
        let changes = Some(self.changes.subscribe());
        let controller = Arc::new(RevertController { cluster, volumes });
        self.control(controller, self.options.poll_interval, changes);
    }

    /// All reverts, by namespace and name.
    pub(super) fn reverts(&self) -> BTreeMap<String, VolumeRevert> {
        let reverts = self.reverts.read().unwrap_or_else(PoisonError::into_inner);
        reverts.now().clone()
    }

    /// The number of reverts in each phase, if this router leads and has read them.
    pub(super) fn count_reverts(&self) -> Option<BTreeMap<&'static str, u64>> {
        let reverts = self.reverts();
        let phases = reverts.values().map(|object| {
            let status = object.status.as_ref();
            status.map(|it| it.phase).unwrap_or_default().as_str()
        });
        self.count_phases(REVERTS, phases)
    }
}

#[tonic::async_trait]
impl Reconciler for RevertController {
    type Object = Revert;
    type Step = Decision;

    async fn observe(&self, revert: Revert) -> Result<Revert> {
        observe::observe(self, revert).await
    }

    fn next(revert: &Revert) -> Next<Decision> {
        let Some(seen) = &revert.seen else {
            return Next::Done;
        };
        let decision = decide(seen);
        let before = seen.object.status.clone().unwrap_or_default();
        match decision.step.is_none() && decision.status == before {
            true => Next::Wait,
            false => Next::Step(decision),
        }
    }

    /// Does the step and, without a pause, those that follow it: nothing can use the volumes now.
    async fn execute(&self, revert: &Revert, decision: Decision) -> Result<Outcome> {
        let mut outcome = execute::execute(self, revert, &decision).await?;
        for _ in 1..MAX_STEPS {
            if outcome == Outcome::Stale || !self.cluster.is_leader() {
                break;
            }
            let again = Revert {
                object: revert.object.clone(),
                seen: None,
            };
            let again = self.observe(again).await?;
            let Next::Step(decision) = Self::next(&again) else {
                break;
            };
            outcome = execute::execute(self, &again, &decision).await?;
        }
        Ok(outcome)
    }
}

#[tonic::async_trait]
impl Controller for RevertController {
    const NAME: &'static str = "volume reverts";

    async fn list(&self, _leads_since: Timestamp) -> Option<Vec<Revert>> {
        let cluster = &self.cluster;
        let is_known = cluster.has_read_objects() && cluster.following.is_complete(REVERTS);
        is_known.then(|| {
            let all = cluster.reverts().into_values();
            all.map(|object| Revert { object, seen: None }).collect()
        })
    }
}
