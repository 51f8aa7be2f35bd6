//! Fences whose VolumeRevert was removed together with its finalizer, as a controller: such a volume could
//! never be used again.
//!
//! Before the switch of any volume of the revert, the fences are lifted and the volumes keep their
//! content. After it, the others are switched as well, so that a group stays whole.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use ::kube::api::{Api, ListParams};
use k8s_openapi::jiff::Timestamp;
use uuid::Uuid;

use super::REVERTS;
use super::object::{RevertPhase, VolumeRevert};
use crate::error::Result;
use crate::model::VolumeId;
use crate::operation::Members;
use crate::router::cluster::{Cluster, ObjectRef};
use crate::router::kube::pools::object::{Health, Pool};
use crate::router::kube::pools::status::Report;
use crate::router::kube::reconcile::{Controller, Next, Outcome, Reconciler};
use crate::router::kube::{InCluster, ask};
use crate::router::volume_reverts::{RevertStep, RevertingVolumes};

/// The fences of one revert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::router::kube) struct Fences {
    uid: Uuid,
    volumes: Vec<Fenced>,
    has_revert: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Fenced {
    volume: VolumeId,
    number: u64,
    members: Members,
    is_switched: bool,
}

/// The next step for the fences of a revert that does not exist.
fn decide(fences: &Fences) -> Next<(VolumeId, RevertStep)> {
    if fences.has_revert {
        return Next::Wait;
    }
    let mut volumes = fences.volumes.iter();
    let is_any_switched = fences.volumes.iter().any(|one| one.is_switched);
    let next = match is_any_switched {
        false => volumes.next().map(|one| {
            let number = one.number;
            (one.volume, RevertStep::Abort { number })
        }),
        true => match fences.volumes.iter().find(|one| !one.is_switched) {
            Some(left) => {
                let members = left.members;
                Some((left.volume, RevertStep::Switch { members }))
            }
            None => volumes.next().map(|one| (one.volume, RevertStep::End)),
        },
    };
    next.map_or(Next::Done, Next::Step)
}

impl fmt::Display for Fences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the fences of VolumeRevert {}", self.uid)
    }
}

/// Lifts fences without a revert.
struct RevertFenceController {
    cluster: Arc<InCluster>,
    volumes: Arc<dyn RevertingVolumes>,
    /// Since when each has no object. A router that has just started, or has missed an object for a
    /// moment, must not lift a fence.
    since: Mutex<BTreeMap<Uuid, Instant>>,
}

impl InCluster {
    /// Lifts fences without a revert from now on, while this router leads.
    pub fn lift_revert_fences(self: &Arc<InCluster>, volumes: Arc<dyn RevertingVolumes>) {
        let controller = RevertFenceController {
            cluster: Arc::clone(self),
            volumes,
            since: Mutex::default(),
        };
        self.control(Arc::new(controller), self.options.poll_interval, None);
    }
}

impl RevertFenceController {
    fn since(&self) -> MutexGuard<'_, BTreeMap<Uuid, Instant>> {
        self.since.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether all fences are known: while an agent is silent or a disk is away, a member of a group may be
/// there whose fence says more than those that are known. A pool that is gone for good is marked as lost.
fn knows_all(cluster: &InCluster) -> bool {
    let reports = cluster.agents.reports();
    let answers = |report: &Report| report.problem.is_none() && report.seen.is_some();
    let is_served = |pool: &Pool| {
        let health = pool.status.as_ref().map(|status| status.health);
        pool.spec.lost
            || matches!(
                health,
                Some(Health::Healthy | Health::Degraded | Health::Forgotten | Health::Lost)
            )
    };
    reports.iter().all(answers) && cluster.pool_objects().values().all(is_served)
}

/// Whether a VolumeRevert still acts on its fences.
fn acts(revert: &VolumeRevert, uid: Uuid) -> bool {
    let phase = revert.status.as_ref().map(|status| status.phase);
    revert.uid() == Some(uid) && !phase.is_some_and(RevertPhase::is_final)
}

/// The fences that agents report.
fn reported(cluster: &InCluster) -> Vec<Fences> {
    let mut found: BTreeMap<Uuid, Vec<Fenced>> = BTreeMap::new();
    let reports = cluster.agents.reports().into_iter();
    let answers = reports.filter_map(|report| report.seen);
    for fence in answers.flat_map(|(_, answer)| answer.revert_fences.clone()) {
        let (Ok(volume), Ok(uid)) = (fence.volume_id.parse(), fence.revert_uid.parse()) else {
            continue;
        };
        found.entry(uid).or_default().push(Fenced {
            volume,
            number: fence.number,
            members: Members {
                count: fence.members,
                digest: fence.members_digest.parse().ok(),
            },
            is_switched: fence.switched,
        });
    }
    let each = found.into_iter().map(|(uid, volumes)| Fences {
        uid,
        volumes,
        has_revert: true,
    });
    each.collect()
}

#[tonic::async_trait]
impl Controller for RevertFenceController {
    const NAME: &'static str = "revert fences";

    async fn list(&self, _leads_since: Timestamp) -> Option<Vec<Fences>> {
        let cluster = &self.cluster;
        if !cluster.has_read_objects() || !cluster.following.is_complete(REVERTS) {
            return None;
        }
        if !knows_all(cluster) {
            return Some(Vec::new());
        }
        let reverts = cluster.reverts();
        let has_revert = |uid: Uuid| reverts.values().any(|one| acts(one, uid));
        let mut fences = reported(cluster);
        fences.retain(|fences| !has_revert(fences.uid));
        let now = Instant::now();
        let mut since = self.since();
        since.retain(|uid, _| fences.iter().any(|fences| fences.uid == *uid));
        let age = cluster.options.orphans.age;
        fences.retain(|fences| {
            let at = since.entry(fences.uid).or_insert(now);
            now.duration_since(*at) >= age
        });
        Some(fences)
    }

    fn reset(&self) {
        self.since().clear();
    }
}

#[tonic::async_trait]
impl Reconciler for RevertFenceController {
    type Object = Fences;
    type Step = (VolumeId, RevertStep);

    /// Everything is read again: what is in memory may be out of date.
    async fn observe(&self, fences: Fences) -> Result<Fences> {
        let api = Api::<VolumeRevert>::all(self.cluster.client.clone());
        let all = ask("VolumeReverts", api.list(&ListParams::default())).await?;
        let has_revert =
            all.items.iter().any(|one| acts(one, fences.uid)) || !knows_all(&self.cluster);
        Ok(Fences {
            has_revert,
            ..fences
        })
    }

    fn next(fences: &Fences) -> Next<(VolumeId, RevertStep)> {
        decide(fences)
    }

    async fn execute(
        &self,
        fences: &Fences,
        (volume, step): (VolumeId, RevertStep),
    ) -> Result<Outcome> {
        let is_last = !matches!(step, RevertStep::Switch { .. });
        self.volumes.step(volume, fences.uid, step).await?;
        let (volume, uid) = (volume.to_string(), fences.uid);
        tracing::info!(volume, %uid, "ended the fence of a VolumeRevert that does not exist");
        if let Some(claim) = self.cluster.claim_of(&volume).filter(|_| is_last) {
            let message = "its volume can be used again: it was fenced for a VolumeRevert that does not exist any more";
            let about = ObjectRef::Claim(claim);
            self.cluster
                .record_event(&about, false, "FenceLifted", message.into());
        }
        Ok(Outcome::Done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::PoolId;
    use crate::router::kube::reverts::object::RevertStatus;

    const MEMBERS: Members = Members {
        count: 2,
        digest: Some(Uuid::from_u128(9)),
    };

    fn fences(switched: &[bool], has_revert: bool) -> Fences {
        let volumes = switched.iter().zip(1..).map(|(switched, n)| Fenced {
            volume: VolumeId {
                pool: PoolId(Uuid::from_u128(1)),
                uuid: Uuid::from_u128(n),
            },
            number: 3,
            members: MEMBERS,
            is_switched: *switched,
        });
        Fences {
            uid: Uuid::from_u128(7),
            volumes: volumes.collect(),
            has_revert,
        }
    }

    #[test]
    fn fences_without_a_revert_end_with_the_old_content_of_all_volumes_or_the_new_one_of_all() {
        let step = |fences: &Fences| match decide(fences) {
            Next::Step((volume, step)) => Some((volume.uuid.as_u128(), step)),
            _ => None,
        };
        let abort = RevertStep::Abort { number: 3 };
        assert_eq!(step(&fences(&[false, false], false)), Some((1, abort)));
        let switch = Some((2, RevertStep::Switch { members: MEMBERS }));
        assert_eq!(step(&fences(&[true, false], false)), switch);
        let end = Some((1, RevertStep::End));
        assert_eq!(step(&fences(&[true, true], false)), end);
        assert_eq!(step(&fences(&[true, true], true)), None);
    }

    #[test]
    fn a_revert_that_has_ended_does_not_protect_a_fence() {
        let uid = Uuid::from_u128(7);
        let of = |phase: Option<RevertPhase>| {
            let mut revert = VolumeRevert::default();
            revert.metadata.uid = Some(uid.to_string());
            revert.status = phase.map(|phase| RevertStatus {
                phase,
                ..RevertStatus::default()
            });
            acts(&revert, uid)
        };
        assert!(of(None) && of(Some(RevertPhase::Switching)) && of(Some(RevertPhase::Aborting)));
        assert!(!of(Some(RevertPhase::Done)) && !of(Some(RevertPhase::Failed)));
        assert!(!acts(&VolumeRevert::default(), uid));
    }
}
