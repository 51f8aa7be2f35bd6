//! Does the steps of a revert, and shows them in its status.

use ::kube::ResourceExt;
use ::kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams};
use futures_util::StreamExt;
use serde_json::{Value, json};
use tonic::Code;

use super::decide::{Decision, FAILED, Observed, Step, given_up, old_name};
use super::object::{FINALIZER, RevertMember, RevertPhase, RevertStatus, VolumeRevert};
use super::observe::UID_ANNOTATION;
use super::read::{parsed, snapshots_api};
use super::{Revert, RevertController};
use crate::error::{Error, Result, chain};
use crate::model::VolumeId;
use crate::operation::Members;
use crate::router::cluster::{Cluster, ObjectRef};
use crate::router::kube::reconcile::{Outcome, written};
use crate::router::volume_reverts::RevertStep;

/// Members that are prepared at the same time.
const MAX_PREPARED_AT_ONCE: usize = 8;

/// Writes the status if it has changed; otherwise does the step. So a decision is written before
/// anything follows from it.
pub(super) async fn execute(
    controller: &RevertController,
    revert: &Revert,
    decision: &Decision,
) -> Result<Outcome> {
    let Some(seen) = &revert.seen else {
        return Ok(Outcome::Stale);
    };
    let executor = Executor {
        controller,
        seen,
        object: &seen.object,
    };
    let before = seen.object.status.clone().unwrap_or_default();
    if decision.status != before {
        return executor.write(&before, &decision.status).await;
    }
    let Some(step) = decision.step else {
        return Ok(Outcome::Done);
    };
    match executor.step(step).await {
        Ok(outcome) => Ok(outcome),
        Err(error) => executor.failed(step, error).await,
    }
}

struct Executor<'a> {
    controller: &'a RevertController,
    seen: &'a Observed,
    object: &'a VolumeRevert,
}

impl Executor<'_> {
    fn api(&self) -> Api<VolumeRevert> {
        let namespace = self.object.namespace().unwrap_or_default();
        Api::namespaced(self.controller.cluster.client.clone(), &namespace)
    }

    async fn step(&self, step: Step) -> Result<Outcome> {
        match step {
            Step::AddFinalizer => {
                let mut all = self.object.metadata.finalizers.clone().unwrap_or_default();
                all.push(FINALIZER.into());
                self.set_finalizers(all).await
            }
            Step::RemoveFinalizer => {
                let mut all = self.object.metadata.finalizers.clone().unwrap_or_default();
                all.retain(|one| one != FINALIZER);
                self.set_finalizers(all).await
            }
            Step::Keep(n) => self.keep(n).await,
            Step::Fence(n) => {
                let member = self.member(n)?;
                let begin = RevertStep::Begin {
                    name: self.object.path(),
                    snapshot: parsed(&member.snapshot_handle)?,
                    number: member.number,
                    members: self.members(),
                };
                self.order(n, begin).await
            }
            Step::Prepare => self.prepare().await,
            Step::Switch(n) => {
                let members = self.members();
                self.order(n, RevertStep::Switch { members }).await
            }
            Step::Lift(n) => self.order(n, RevertStep::End).await,
            Step::Abort(n) => {
                let aborted = self.abort(n).await;
                if aborted.is_err() {
                    self.abort_others(n).await;
                }
                aborted
            }
        }
    }

    /// Prepares the members at the same time: they may be on different agents, and a copy takes long.
    /// Of several errors it returns one that undoes the revert, if there is one.
    async fn prepare(&self) -> Result<Outcome> {
        let phase = self.object.status.as_ref().map(|status| status.phase);
        let gives_up = |error: &Error| {
            phase.is_some_and(|phase| Step::Prepare.gives_up(phase, code_of(error)))
        };
        let orders = self.unprepared().into_iter();
        let orders = orders.map(|n| self.order(n, RevertStep::Prepare));
        let mut answers = futures_util::stream::iter(orders).buffer_unordered(MAX_PREPARED_AT_ONCE);
        let mut failed: Option<Error> = None;
        while let Some(answer) = answers.next().await {
            if let Err(error) = answer
                && (failed.is_none() || gives_up(&error))
            {
                failed = Some(error);
            }
        }
        failed.map_or(Ok(Outcome::Done), Err)
    }

    fn unprepared(&self) -> Vec<usize> {
        let uid = self.object.uid();
        let members = self.seen.members.iter().enumerate();
        let open = members.filter(|(_, member)| {
            member.volume.as_ref().is_ok_and(|volume| {
                uid.is_some() && volume.fenced == uid && !volume.is_prepared && !volume.is_switched
            })
        });
        open.map(|(n, _)| n).collect()
    }

    async fn abort(&self, n: usize) -> Result<Outcome> {
        let number = self.member(n)?.number;
        self.order(n, RevertStep::Abort { number }).await
    }

    /// A member that fails keeps no other one fenced.
    async fn abort_others(&self, failed: usize) {
        let uid = self.object.uid();
        for (n, member) in self.seen.members.iter().enumerate() {
            let fenced = member.volume.as_ref().ok().and_then(|volume| volume.fenced);
            if n != failed
                && fenced.is_some()
                && fenced == uid
                && let Err(error) = self.abort(n).await
            {
                tracing::debug!(error = %chain(&error), "failed to abort another member of a revert");
            }
        }
    }

    /// The volumes of the revert.
    fn members(&self) -> Members {
        let status = self.object.status.as_ref();
        let members = status.iter().flat_map(|status| &status.members);
        Members::of(members.map(|member| member.handle.as_str()))
    }

    fn member(&self, n: usize) -> Result<&RevertMember> {
        let status = self.object.status.as_ref();
        let member = status.and_then(|status| status.members.get(n));
        member.ok_or_else(|| Error::bug("a step is for a member"))
    }

    async fn order(&self, n: usize, step: RevertStep) -> Result<Outcome> {
        let handle = &self.member(n)?.handle;
        let namespace = self.object.namespace().unwrap_or_default();
        let seen = self.seen.members.get(n).map(|member| &member.volume);
        let is_own = matches!(seen, Some(Ok(volume)) if volume.fenced.is_some() && volume.fenced == self.object.uid());
        let foreign = self.controller.cluster.foreign_claim(handle, &namespace);
        if let Some(claim) = foreign.filter(|_| !is_own) {
            let reason = format!("it is the volume of claim {claim}");
            return Err(Error::refused(format!("volume {handle}"), reason));
        }
        let volume: VolumeId = parsed(handle)?;
        let uid = self.object.uid().unwrap_or_default();
        let volumes = &self.controller.volumes;
        volumes.step(volume, uid, step).await?;
        Ok(Outcome::Done)
    }

    /// Writes why a step has failed. What would be refused again is undone instead.
    async fn failed(&self, step: Step, error: Error) -> Result<Outcome> {
        let code = code_of(&error);
        let why = chain(&error);
        let before = self.object.status.clone().unwrap_or_default();
        if step.gives_up(before.phase, code) {
            return self.write(&before, &given_up(self.seen, &why)).await;
        }
        let mut status = before.clone();
        status.message = why;
        for condition in &mut status.conditions {
            condition.reason = FAILED.into();
            condition.message.clone_from(&status.message);
        }
        // While it is undone, the status shows why.
        if status != before && before.phase != RevertPhase::Aborting {
            self.write(&before, &status).await?;
        }
        // An operation that still runs is no failure.
        match code {
            Code::Aborted | Code::DeadlineExceeded => Ok(Outcome::Stale),
            _ => Err(error),
        }
    }

    /// Creates the VolumeSnapshot with the old content of a member. Its name follows from the UID of
    /// the revert, so there is never a second one.
    async fn keep(&self, n: usize) -> Result<Outcome> {
        let member = self.member(n)?;
        let name = old_name(self.object, n);
        let mut source = json!({ "source": { "persistentVolumeClaimName": member.claim } });
        if let Some(class) = &member.class {
            source["volumeSnapshotClassName"] = json!(class);
        }
        let object = json!({
            "apiVersion": "snapshot.storage.k8s.io/v1",
            "kind": "VolumeSnapshot",
            "metadata": {
                "name": name,
                "annotations": {
                    UID_ANNOTATION: self.object.metadata.uid,
                    "slackwater.dev/revert": self.object.name_any(),
                },
            },
            "spec": source,
        });
        let unusable = |error: serde_json::Error| Error::unreachable(&name, error.to_string());
        let object: DynamicObject = serde_json::from_value(object).map_err(unusable)?;
        let namespace = self.object.namespace().unwrap_or_default();
        let client = self.controller.cluster.client.clone();
        let api = Api::namespaced_with(client, &namespace, &snapshots_api());
        let what = format!("VolumeSnapshot {name}");
        written(&what, api.create(&PostParams::default(), &object)).await
    }

    async fn set_finalizers(&self, finalizers: Vec<String>) -> Result<Outcome> {
        let fields = json!({ "metadata": {
            "uid": self.object.metadata.uid,
            "resourceVersion": self.object.metadata.resource_version,
            "finalizers": finalizers,
        } });
        let (params, patch) = (PatchParams::default(), Patch::Merge(fields));
        let name = self.object.name_any();
        let what = format!("VolumeRevert {}", self.object.path());
        written(&what, self.api().patch(&name, &params, &patch)).await
    }

    /// Writes the status of this version of the object.
    async fn write(&self, before: &RevertStatus, status: &RevertStatus) -> Result<Outcome> {
        let unusable = |error: serde_json::Error| Error::unreachable("status", error.to_string());
        let value = serde_json::to_value(status).map_err(unusable)?;
        let outcome = self.write_value(value).await?;
        if outcome == Outcome::Done && before.phase != status.phase {
            self.tell(status);
        }
        Ok(outcome)
    }

    async fn write_value(&self, status: Value) -> Result<Outcome> {
        let fields = json!({
            "metadata": {
                "uid": self.object.metadata.uid,
                "resourceVersion": self.object.metadata.resource_version,
            },
            "status": status,
        });
        let (params, patch) = (PatchParams::default(), Patch::Merge(fields));
        let name = self.object.name_any();
        let what = format!("VolumeRevert {}", self.object.path());
        let api = self.api();
        written(&what, api.patch_status(&name, &params, &patch)).await
    }

    /// Events about the phases that people want to know of, at the revert and its claims.
    fn tell(&self, status: &RevertStatus) {
        let (is_warning, reason, message) = match status.phase {
            RevertPhase::Waiting => (false, "RevertWaiting", "waits until no pod uses it"),
            RevertPhase::Preparing => (false, "RevertBegun", "is being reverted to a snapshot"),
            RevertPhase::Done => (false, "Reverted", "has the content of its snapshot"),
            RevertPhase::Failed => (true, "RevertFailed", "has kept its content"),
            RevertPhase::Incomplete => (
                true,
                "RevertIncomplete",
                "has the content of its snapshot, unless this names it",
            ),
            _ => return,
        };
        let path = self.object.path();
        let why = match status.message.is_empty() {
            true => String::new(),
            false => format!(": {}", status.message),
        };
        let cluster = &self.controller.cluster;
        let about = ObjectRef::Revert(path.clone());
        let text = format!("each claim {message}{why}");
        cluster.record_event(&about, is_warning, reason, text);
        let namespace = self.object.namespace().unwrap_or_default();
        for member in &status.members {
            let about = ObjectRef::Claim(format!("{namespace}/{}", member.claim));
            let text = format!("VolumeRevert {path}: it {message}{why}");
            cluster.record_event(&about, is_warning, reason, text);
        }
    }
}

/// The code with which an agent has refused a step.
fn code_of(error: &Error) -> Code {
    match error {
        Error::Forwarded { code, .. } => Code::from_i32(*code),
        Error::NotFound { .. } => Code::NotFound,
        _ => Code::Unknown,
    }
}
