//! Does the steps of a schedule, and writes its status.

use ::kube::ResourceExt;
use ::kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams, TypeMeta};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use serde_json::{Value, json};

use super::decide::show::{
    CREATE_FAILED, CUT, DELETE_FAILED, FORMER_SETS, RESTORE_CHECKED, RETENTION, SCHEDULING,
    SUSPENDED, condition, replace,
};
use super::decide::{Decision, Deletion, Seen, Step};
use super::object::{ScheduleStatus, SnapshotSchedule};
use super::observe::{Pass, snapshots_api};
use super::sets::{Set, objects};
use super::spec::{Plan, ScheduleTarget};
use crate::error::{Error, Result, chain};
use crate::router::cluster::{Cluster, ObjectRef};
use crate::router::kube::reconcile::{Outcome, only, written};
use crate::router::kube::{InCluster, ask};

/// Does a step, and writes the status that follows from it.
pub(super) async fn execute(
    cluster: &InCluster,
    pass: &Pass,
    seen: &Seen,
    decision: &Decision,
) -> Result<Outcome> {
    let writer = Writer {
        cluster,
        schedule: &seen.object,
    };
    let executor = Executor { writer, pass, seen };
    let outcome = match &decision.step {
        None => Outcome::Done,
        Some(Step::Cut(slot)) => executor.cut(*slot).await?,
        Some(Step::Delete(deletion)) => executor.delete(deletion, &decision.status).await?,
    };
    match outcome {
        Outcome::Done => executor.writer.write(&decision.status).await,
        Outcome::Stale => Ok(outcome),
    }
}

/// Writes a status without a step.
pub(super) async fn report(
    cluster: &InCluster,
    schedule: &SnapshotSchedule,
    status: &ScheduleStatus,
) -> Result<Outcome> {
    Writer { cluster, schedule }.write(status).await
}

struct Executor<'a> {
    writer: Writer<'a>,
    pass: &'a Pass,
    seen: &'a Seen,
}

/// Writes what people see.
struct Writer<'a> {
    cluster: &'a InCluster,
    schedule: &'a SnapshotSchedule,
}

impl Executor<'_> {
    fn api(&self, is_group: bool) -> Option<Api<DynamicObject>> {
        let namespace = self.writer.schedule.namespace().unwrap_or_default();
        let api = match is_group {
            true => self.pass.groups_api.clone()?,
            false => snapshots_api(),
        };
        let client = self.writer.cluster.client.clone();
        Some(Api::namespaced_with(client, &namespace, &api))
    }

    /// Creates all objects of a slot that do not exist yet. One that cannot be created does not keep
    /// the others from being created.
    async fn cut(&self, slot: Timestamp) -> Result<Outcome> {
        let Ok(plan) = Plan::of(self.writer.schedule) else {
            return Ok(Outcome::Stale);
        };
        let is_group = matches!(plan.what, ScheduleTarget::Group(_));
        let Some(api) = self.api(is_group) else {
            return Ok(Outcome::Stale);
        };
        let mut failure = None;
        for object in objects(self.writer.schedule, &plan.names, &plan.what, slot) {
            let result = self.create(&api, is_group, &plan, object).await;
            failure = result.err().or(failure);
        }
        let Some(error) = failure else {
            let message = format!("created the snapshots of {slot}");
            self.writer.tell(false, "Cut", message);
            return Ok(Outcome::Done);
        };
        let why = format!("the snapshots of {slot}: {}", chain(&error));
        let status = self.writer.schedule.status.clone().unwrap_or_default();
        self.failed(status, SCHEDULING, CREATE_FAILED, why).await?;
        Err(error)
    }

    /// Writes that a step has failed.
    async fn failed(
        &self,
        mut status: ScheduleStatus,
        type_: &str,
        reason: &str,
        why: String,
    ) -> Result<Outcome> {
        let mut failed = condition(type_, "False", reason, why, self.seen.now);
        failed.observed_generation = self.writer.schedule.metadata.generation;
        replace(&mut status, failed);
        self.writer.write(&status).await
    }

    async fn create(
        &self,
        api: &Api<DynamicObject>,
        is_group: bool,
        plan: &Plan,
        object: Value,
    ) -> Result<()> {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let name = name.to_string();
        let unusable = |error: serde_json::Error| Error::unreachable(&name, error.to_string());
        let mut object: DynamicObject = serde_json::from_value(object).map_err(unusable)?;
        let resource = match (is_group, &self.pass.groups_api) {
            (true, Some(api)) => api.clone(),
            _ => snapshots_api(),
        };
        object.types = Some(TypeMeta {
            api_version: resource.api_version,
            kind: resource.kind.clone(),
        });
        let what = format!("{} {name}", resource.kind);
        let params = PostParams::default();
        let create = async {
            match api.create(&params, &object).await {
                Ok(_) => Ok(true),
                Err(::kube::Error::Api(status)) if status.code == 409 => Ok(false),
                Err(error) => Err(error),
            }
        };
        if ask(&what, create).await? {
            tracing::info!(
                schedule = self.writer.schedule.path(),
                name,
                "created a set"
            );
            return Ok(());
        }
        let found = ask(&what, api.get_opt(&name)).await?;
        match found {
            // An earlier attempt has created it, or it has gone again.
            Some(found) if Set::read(&found, &plan.names, is_group).is_none() => {
                Err(Error::refused(
                    what,
                    "exists, and is not a set of this schedule and slot; delete or rename it",
                ))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Deletes a set. `status` is that after the step.
    async fn delete(&self, deletion: &Deletion, status: &ScheduleStatus) -> Result<Outcome> {
        let Deletion { set, reason, newer } = deletion;
        let Some(api) = self.api(set.claim.is_empty()) else {
            return Ok(Outcome::Stale);
        };
        // It may have been deleted since it was listed.
        let still = ask(&newer.name, api.get_opt(&newer.name)).await?;
        let is_there = still.is_some_and(|it| {
            it.metadata.uid.as_ref() == Some(&newer.uid) && it.metadata.deletion_timestamp.is_none()
        });
        if !is_there {
            return Ok(Outcome::Stale);
        }
        let params = only(Some(set.uid.clone()), Some(set.version.clone()));
        let outcome = match written(&set.name, api.delete(&set.name, &params)).await {
            Ok(outcome) => outcome,
            Err(error) => {
                let why = chain(&error);
                let status = status.clone();
                self.failed(status, RETENTION, DELETE_FAILED, why).await?;
                return Err(error);
            }
        };
        if outcome == Outcome::Done {
            let message = format!("deleted {}: {}", set.name, reason.text());
            tracing::info!(
                schedule = self.writer.schedule.path(),
                message,
                "deleted a set"
            );
            self.writer.tell(false, "SetDeleted", message);
        }
        Ok(outcome)
    }
}

impl Writer<'_> {
    /// Writes the status, unless the schedule was changed.
    async fn write(&self, status: &ScheduleStatus) -> Result<Outcome> {
        let before = self.schedule.status.clone().unwrap_or_default();
        if status.is_shown_by(&before) {
            return Ok(Outcome::Done);
        }
        let namespace = self.schedule.namespace().unwrap_or_default();
        let client = self.cluster.client.clone();
        let api = Api::<SnapshotSchedule>::namespaced(client, &namespace);
        let metadata = &self.schedule.metadata;
        let fields = json!({
            "metadata": { "uid": metadata.uid, "resourceVersion": metadata.resource_version },
            "status": status,
        });
        let what = format!("SnapshotSchedule {}", self.schedule.path());
        let patch = Patch::Merge(fields);
        let params = PatchParams::default();
        let name = self.schedule.name_any();
        let write = api.patch_status(&name, &params, &patch);
        let outcome = written(&what, write).await?;
        if outcome == Outcome::Done {
            self.tell_changes(&before, status);
        }
        Ok(outcome)
    }

    /// Events about what has become wrong.
    fn tell_changes(&self, before: &ScheduleStatus, now: &ScheduleStatus) {
        for (type_, event) in [
            (SCHEDULING, "NotScheduled"),
            (CUT, "CutFailed"),
            (RETENTION, "RetentionWaits"),
            (RESTORE_CHECKED, "RestoreCheckFailed"),
        ] {
            let of = |status: &ScheduleStatus| {
                let mut all = status.conditions.iter();
                all.find(|one| one.type_ == type_).cloned()
            };
            let same =
                |a: &Condition, b: &Condition| (&a.reason, &a.message) == (&b.reason, &b.message);
            let Some(one) = of(now).filter(is_problem) else {
                continue;
            };
            if !of(before).is_some_and(|before| same(&before, &one)) {
                let message = format!("{}: {}", one.reason, one.message);
                self.tell(true, event, message);
            }
        }
        let former = |status: &ScheduleStatus| {
            let mut all = status.conditions.iter();
            all.find(|one| one.reason == FORMER_SETS).cloned()
        };
        if let (None, Some(one)) = (former(before), former(now)) {
            self.tell(false, "SetsStay", one.message);
        }
        if now.missed > before.missed {
            let slot = now.last_slot.as_ref().map(|slot| slot.0.to_string());
            let slot = slot.unwrap_or_default();
            let message = format!("skipped the slot {slot}, because startingDeadline has passed");
            self.tell(true, "SlotMissed", message);
        }
    }

    fn tell(&self, is_warning: bool, reason: &'static str, message: String) {
        let about = ObjectRef::Schedule(self.schedule.path());
        self.cluster
            .record_event(&about, is_warning, reason, message);
    }
}

/// What a person should look at.
pub(super) fn is_problem(condition: &Condition) -> bool {
    condition.status == "False" && ![SUSPENDED, "Deleting"].contains(&condition.reason.as_str())
}
