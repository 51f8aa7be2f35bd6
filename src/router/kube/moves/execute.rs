//! Does the steps of a move, and shows them in its status.

use ::kube::Error as KubeError;
use ::kube::api::{Api, DeleteParams, EvictParams, Patch, PatchParams, Preconditions};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};
use tokio::time::error::Elapsed;
use tokio::time::timeout;
use tonic::Code;
use uuid::Uuid;

use super::decide::{Decision, Observed, PodUse, Step};
use super::object::{FINALIZER, MoveStatus, Phase, Place, PreCopy, VolumeMove};
use super::observe::capacity;
use super::show::{CONDITION, FAILED, shown};
use super::{MoveController, Moving, NOTE};
use crate::error::{Error, Result, chain};
use crate::model::VolumeId;
use crate::operation::snapshot_name;
use crate::router::cluster::{Cluster, ObjectRef};
use crate::router::kube::API_TIMEOUT;
use crate::router::kube::adopt::exchange::Exchange;
use crate::router::kube::adopt::manifest::Goal;
use crate::router::kube::adopt::step::Step as PvStep;
use crate::router::kube::reconcile::{Outcome, written};
use crate::router::volume_moves::{Copied, MoveCopy, ROUNDS, Round, snapshot_of};

/// Writes the status if it has changed, and does the step.
pub(super) async fn execute(
    controller: &MoveController,
    moving: &Moving,
    decision: &Decision,
) -> Result<Outcome> {
    let Some(seen) = &moving.seen else {
        return Ok(Outcome::Stale);
    };
    let executor = Executor {
        controller,
        object: &moving.object,
        seen,
    };
    let status = shown(seen, decision);
    let before = moving.object.status.clone().unwrap_or_default();
    if status != before {
        let outcome = executor.write(&status).await?;
        if outcome == Outcome::Stale {
            return Ok(outcome);
        }
        if status.phase != before.phase {
            executor.tell(&status);
        }
        // The version has changed. The step is decided again.
        return Ok(outcome);
    }
    let Some(step) = &decision.step else {
        return Ok(Outcome::Done);
    };
    executor.step(step, &status).await
}

struct Executor<'a> {
    controller: &'a MoveController,
    object: &'a VolumeMove,
    seen: &'a Observed,
}

/// The volumes of a move.
struct Volumes<'a> {
    source: VolumeId,
    copy: VolumeId,
    to: &'a Place,
    move_uid: Uuid,
}

impl Executor<'_> {
    fn api(&self) -> Api<VolumeMove> {
        let client = self.controller.cluster.client.clone();
        let namespace = self.object.metadata.namespace.as_deref();
        Api::namespaced(client, namespace.unwrap_or_default())
    }

    fn name(&self) -> &str {
        self.object.metadata.name.as_deref().unwrap_or_default()
    }

    fn what(&self) -> String {
        format!("VolumeMove {}", self.object.path())
    }

    /// Metadata that makes a patch apply to exactly this version of the object.
    fn version(&self) -> Value {
        let metadata = &self.object.metadata;
        json!({ "uid": metadata.uid, "resourceVersion": metadata.resource_version })
    }

    async fn write(&self, status: &MoveStatus) -> Result<Outcome> {
        let fields = Patch::Merge(json!({ "metadata": self.version(), "status": status }));
        let (api, params) = (self.api(), PatchParams::default());
        written(
            &self.what(),
            api.patch_status(self.name(), &params, &fields),
        )
        .await
    }

    async fn finalizers(&self, all: Vec<String>) -> Result<Outcome> {
        let mut metadata = self.version();
        metadata["finalizers"] = json!(all);
        let fields = Patch::Merge(json!({ "metadata": metadata }));
        let (api, params) = (self.api(), PatchParams::default());
        written(&self.what(), api.patch(self.name(), &params, &fields)).await
    }

    /// An event at the claim for each phase.
    fn tell(&self, status: &MoveStatus) {
        let node = |place: &Option<Place>| {
            let place = place.as_ref();
            place.map(|place| place.node.clone()).unwrap_or_default()
        };
        let (from, to) = (node(&status.from), node(&status.to));
        let (reason, message) = match status.phase {
            Phase::Waiting => (
                "MoveWaiting",
                format!(
                    "the volume will be moved from node {from} to node {to} once no pod uses it; kubectl drain {from} ends its pods"
                ),
            ),
            Phase::Fenced => (
                "MoveFenced",
                format!("no pod can use the volume until it is moved to node {to}"),
            ),
            Phase::Switched => (
                "MoveSwitched",
                format!(
                    "the copy on node {to} was compared with the volume, and its PersistentVolume is created again; no data is lost, even if another event says so"
                ),
            ),
            Phase::Done => ("MoveDone", format!("the volume is on node {to}")),
            Phase::Aborted => (
                "MoveAborted",
                format!("the volume stays on node {from}: {}", status.message),
            ),
            Phase::Pending | Phase::Copying | Phase::LastCopy | Phase::Aborting | Phase::Other => {
                return;
            }
        };
        let claim = ObjectRef::Claim(self.object.claim());
        let is_warning = status.phase == Phase::Aborted;
        let cluster = &self.controller.cluster;
        cluster.record_event(&claim, is_warning, reason, message);
    }

    async fn step(&self, step: &Step, status: &MoveStatus) -> Result<Outcome> {
        let finalizers = self.object.metadata.finalizers.clone().unwrap_or_default();
        match step {
            Step::AddFinalizer => {
                let all = finalizers.into_iter().chain([FINALIZER.into()]);
                return self.finalizers(all.collect()).await;
            }
            Step::RemoveFinalizer => {
                let others = finalizers.into_iter().filter(|one| one != FINALIZER);
                return self.finalizers(others.collect()).await;
            }
            Step::Begin(begun) => return self.write(begun).await,
            Step::BeginRound(round) => {
                let pre_copy = PreCopy {
                    round: *round,
                    begun_at: Some(Time(self.seen.now)),
                    ..PreCopy::default()
                };
                return self.write_pre_copy(status, pre_copy).await;
            }
            Step::Evict(pod) => return self.evict(pod).await,
            Step::DeletePod(pod) => return self.delete_pod(pod).await,
            _ => {}
        }
        let (Some(from), Some(to), Some(uid)) = (&status.from, &status.to, self.object.uid())
        else {
            return Ok(Outcome::Stale);
        };
        let invalid = |_| Error::invalid("status", "has no valid volume ID");
        let volumes = Volumes {
            source: from.handle.parse().map_err(invalid)?,
            copy: to.handle.parse().map_err(invalid)?,
            to,
            move_uid: uid,
        };
        match self.order(step, status, &volumes).await {
            Ok(outcome) => Ok(outcome),
            Err(error) if is_pending(&error) => Ok(Outcome::Stale),
            Err(error) if is_final(&error) => self.refused(step, status, &volumes, error).await,
            Err(error) => self.failed(status, error).await,
        }
    }

    /// Does a step about the volumes.
    async fn order(&self, step: &Step, status: &MoveStatus, of: &Volumes<'_>) -> Result<Outcome> {
        let agents = &self.controller.volumes;
        let &Volumes {
            source, move_uid, ..
        } = of;
        let done = match step {
            Step::Fence => agents.fence(source, move_uid, false).await,
            Step::LiftFence => agents.fence(source, move_uid, true).await,
            Step::Snapshot(round) => return self.snapshot(status, of, *round).await,
            Step::Fill(round) => return self.copy(of, Some(*round)).await,
            Step::Copy => return self.copy(of, None).await,
            Step::DeleteSnapshot(round) => {
                let snapshot = snapshot_of(source, move_uid, *round);
                agents.delete_snapshot(snapshot).await
            }
            Step::DeleteCopy => agents.delete_copy(of.copy).await,
            Step::DeleteSource => agents.delete_source(source, move_uid).await,
            Step::MarkFenced => {
                let status = MoveStatus {
                    fenced_at: Some(Time(self.seen.now)),
                    ..status.clone()
                };
                return self.write(&status).await;
            }
            Step::MarkSwitched => return self.switched(status).await,
            Step::Pv(step) => return self.exchange(*step, status, of.to).await,
            Step::AddFinalizer
            | Step::RemoveFinalizer
            | Step::Begin(_)
            | Step::BeginRound(_)
            | Step::Evict(_)
            | Step::DeletePod(_) => Ok(()),
        };
        done.map(|()| Outcome::Done)
    }

    /// An agent has refused a step, and would again.
    async fn refused(
        &self,
        step: &Step,
        status: &MoveStatus,
        of: &Volumes<'_>,
        error: Error,
    ) -> Result<Outcome> {
        match step {
            // The application waits, so its volume is given back.
            Step::Copy => {
                let status = MoveStatus {
                    phase: Phase::Aborting,
                    message: chain(&error),
                    ..status.clone()
                };
                self.write(&status).await
            }
            // The move goes on without this copy.
            Step::Snapshot(_) | Step::Fill(_) => {
                if let Step::Fill(_) = step {
                    self.controller.volumes.delete_copy(of.copy).await?;
                }
                let pre_copy = PreCopy {
                    problem: Some(chain(&error)),
                    ..status.pre_copy.clone()
                };
                self.write_pre_copy(status, pre_copy).await
            }
            _ => self.failed(status, error).await,
        }
    }

    async fn snapshot(&self, status: &MoveStatus, of: &Volumes<'_>, round: u32) -> Result<Outcome> {
        let has = |other: &u32| self.seen.snapshots.contains_key(&Some(*other));
        let mut others = ROUNDS.into_iter().filter(|other| *other != round);
        let wanted = self.wanted(of, Some(round));
        let taken = self.controller.volumes.snapshot(&wanted, others.find(has));
        let pre_copy = PreCopy {
            bytes: Some(taken.await?),
            ..status.pre_copy.clone()
        };
        self.write_pre_copy(status, pre_copy).await
    }

    async fn copy(&self, of: &Volumes<'_>, round: Round) -> Result<Outcome> {
        let wanted = self.wanted(of, round);
        Ok(match self.controller.volumes.copy(&wanted).await? {
            Copied::Continues => Outcome::Stale,
            Copied::Complete => Outcome::Done,
        })
    }

    async fn write_pre_copy(&self, status: &MoveStatus, pre_copy: PreCopy) -> Result<Outcome> {
        let status = MoveStatus {
            pre_copy,
            ..status.clone()
        };
        self.write(&status).await
    }

    fn wanted(&self, of: &Volumes<'_>, round: Round) -> MoveCopy {
        MoveCopy {
            move_uid: of.move_uid,
            source: of.source,
            name: snapshot_name(of.move_uid, None),
            target: of.copy,
            pool: of.to.pool_name.clone(),
            claim: self.object.claim(),
            max_bytes: self.seen.live.as_ref().and_then(capacity).unwrap_or(0),
            round,
        }
    }

    /// Shows why a step has failed. The step is repeated.
    async fn failed(&self, status: &MoveStatus, error: Error) -> Result<Outcome> {
        let mut status = status.clone();
        status.message = chain(&error);
        let mut conditions = status.conditions.iter_mut();
        if let Some(condition) = conditions.find(|one| one.type_ == CONDITION) {
            condition.status = "False".into();
            condition.reason = FAILED.into();
            condition.message.clone_from(&status.message);
        }
        self.write(&status).await?;
        Err(error)
    }

    async fn exchange(&self, step: PvStep, status: &MoveStatus, to: &Place) -> Result<Outcome> {
        let pool = to.pool.parse();
        let pool = pool.map_err(|_| Error::invalid("status", "has no valid pool ID"))?;
        let name = status.volume.as_deref().unwrap_or_default();
        let exchange = Exchange::new(&self.controller.cluster.client, pool, NOTE);
        let goal = Goal {
            key: &self.seen.key,
            home: &to.home,
            handle: Some(&to.handle),
        };
        let manifests = (name, self.seen.live.as_ref(), self.seen.noted.as_ref());
        exchange.execute(step, goal, manifests).await
    }

    async fn switched(&self, status: &MoveStatus) -> Result<Outcome> {
        let now = self.seen.now;
        let fenced_at = status.fenced_at.as_ref().map_or(now, |at| at.0);
        let still = now.duration_since(fenced_at).as_millis();
        self.write(&MoveStatus {
            switched_at: Some(Time(now)),
            still_ms: Some(u64::try_from(still).unwrap_or(0)),
            ..status.clone()
        })
        .await
    }

    fn pods(&self) -> Api<Pod> {
        let client = self.controller.cluster.client.clone();
        let namespace = self.object.metadata.namespace.as_deref();
        Api::namespaced(client, namespace.unwrap_or_default())
    }

    async fn evict(&self, pod: &PodUse) -> Result<Outcome> {
        let params = EvictParams {
            delete_options: Some(only(pod)),
            ..EvictParams::default()
        };
        let evicted = timeout(API_TIMEOUT, self.pods().evict(&pod.name, &params)).await;
        self.ended(pod, evicted.map(|evicted| evicted.map(drop)))
            .await
    }

    async fn delete_pod(&self, pod: &PodUse) -> Result<Outcome> {
        let deleted = timeout(API_TIMEOUT, self.pods().delete(&pod.name, &only(pod))).await;
        self.ended(pod, deleted.map(|deleted| deleted.map(drop)))
            .await
    }

    /// A pod takes time to end, and its eviction may be refused for a while.
    async fn ended(
        &self,
        pod: &PodUse,
        done: Result<Result<(), KubeError>, Elapsed>,
    ) -> Result<Outcome> {
        let why = match done {
            Ok(Ok(())) => return Ok(Outcome::Stale),
            Err(_) => "the API server does not answer the request to end it".into(),
            Ok(Err(KubeError::Api(status))) => match status.code {
                404 | 409 => return Ok(Outcome::Stale),
                403 => {
                    "the router may not evict the pod; set moves.evict in the chart, or delete the pod"
                        .into()
                }
                429 => "its PodDisruptionBudget does not allow its eviction now".into(),
                _ => status.message,
            },
            Ok(Err(error)) => chain(&error),
        };
        let error = Error::refused(format!("pod {}", pod.name), why);
        let status = self.object.status.clone().unwrap_or_default();
        self.failed(&status, error).await
    }
}

fn only(pod: &PodUse) -> DeleteParams {
    DeleteParams {
        preconditions: Some(Preconditions {
            uid: Some(pod.uid.clone()),
            resource_version: None,
        }),
        ..DeleteParams::default()
    }
}

/// An agent has refused the copy, so that a repeat would fail too.
fn is_final(error: &Error) -> bool {
    match error {
        Error::Forwarded { code, .. } => Code::from_i32(*code) != Code::Unavailable,
        _ => false,
    }
}

/// The agent is working on the volume, or it is in use: the next observation shows it.
fn is_pending(error: &Error) -> bool {
    match error {
        Error::Pending { .. } | Error::InUse { .. } => true,
        Error::Forwarded { code, .. } => Code::from_i32(*code) == Code::Aborted,
        _ => false,
    }
}
