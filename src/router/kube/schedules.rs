//! Schedules of snapshots, as a controller: at each slot of a SnapshotSchedule it creates a
//! VolumeGroupSnapshot, or VolumeSnapshots of single claims, and it deletes those that are not to be kept.
//! Nothing else of the driver knows about schedules.
//!
//! [`decide`] has all decisions. What must not be forgotten is in the names of the sets, and in the
//! status of the schedule.

mod cron;
mod decide;
mod duty;
mod execute;
mod names;
pub(super) mod object;
mod observe;
mod retention;
mod sets;
mod shown;
mod skipped;
mod slots;
mod spec;
mod uses;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, PoisonError};

use k8s_openapi::jiff::Timestamp;

use super::InCluster;
use super::follow::follow;
use super::reconcile::{Controller, Next, Outcome, Reconciler};
use crate::error::{Result, chain};
use crate::router::cluster::Cluster;
use crate::telemetry::router::ScheduleStatus as ScheduleNumbers;
use decide::{Decision, Seen, decide};
use object::SnapshotSchedule;
use observe::Pass;

/// The name of the watch in messages.
const SCHEDULES: &str = "SnapshotSchedules";

/// What a pass reads, in messages.
const SNAPSHOTS: &str = "snapshots and classes of SnapshotSchedules";

/// A schedule, and what is known of it.
pub(super) struct Scheduled {
    object: SnapshotSchedule,
    pass: Arc<Pass>,
    /// `None` before it is observed, and if it is gone.
    seen: Option<Box<Seen>>,
}

impl fmt::Display for Scheduled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SnapshotSchedule {}", self.object.path())
    }
}

/// Executes schedules.
struct ScheduleController(Arc<InCluster>);

impl ScheduleController {
    /// Counts and reports a pass that could not read its objects with the watches that fail.
    fn record_read(&self, answer: std::result::Result<(), String>) {
        let states = &self.0.following;
        if answer.is_ok() {
            states.completed(SNAPSHOTS);
        }
        states.record_answer(SNAPSHOTS, answer);
    }
}

impl InCluster {
    /// Executes schedules of snapshots from now on, while this router leads.
    pub fn schedule_snapshots(self: &Arc<InCluster>) {
        self.spawn(follow(Arc::clone(self), SCHEDULES, |it| &it.schedules));
        let changes = Some(self.changes.subscribe());
        let controller = Arc::new(ScheduleController(Arc::clone(self)));
        self.control(controller, self.options.look_every * 3, changes);
    }

    /// What schedules report of themselves, by "namespace/name", if this router leads and executes them.
    pub(super) fn schedule_numbers(&self) -> Option<BTreeMap<String, ScheduleNumbers>> {
        if !self.is_leader() || !self.following.is_complete(SCHEDULES) {
            return None;
        }
        let now = Timestamp::now();
        let all = self.schedules.read();
        let all = all.unwrap_or_else(PoisonError::into_inner);
        let each = all.now().iter().map(|(path, schedule)| {
            let status = schedule.status.clone().unwrap_or_default();
            let overdue = status
                .overdue_since
                .map(|since| now.duration_since(since.0));
            let conditions = status.conditions.iter();
            let failing = conditions.filter(|one| execute::is_problem(one));
            let numbers = ScheduleNumbers {
                last_cut: status.last_cut_slot.map(|slot| slot.0.as_second()),
                overdue_seconds: overdue.map_or(0, |time| time.as_secs().max(0)),
                missed: status.missed,
                failing: failing.map(|one| one.type_.clone()).collect(),
            };
            (path.clone(), numbers)
        });
        Some(each.collect())
    }
}

#[tonic::async_trait]
impl Reconciler for ScheduleController {
    type Object = Scheduled;
    type Step = Decision;

    async fn observe(&self, scheduled: Scheduled) -> Result<Scheduled> {
        let seen = observe::observe(&self.0, &scheduled.pass, &scheduled.object).await?;
        let seen = seen.map(Box::new);
        Ok(Scheduled { seen, ..scheduled })
    }

    fn next(scheduled: &Scheduled) -> Next<Decision> {
        let Some(seen) = &scheduled.seen else {
            return Next::Done;
        };
        let decision = decide(seen);
        match decision.is_nothing(seen) {
            true => Next::Wait,
            false => Next::Step(decision),
        }
    }

    async fn execute(&self, scheduled: &Scheduled, decision: Decision) -> Result<Outcome> {
        match &scheduled.seen {
            Some(seen) => execute::execute(&self.0, &scheduled.pass, seen, &decision).await,
            None => Ok(Outcome::Stale),
        }
    }
}

#[tonic::async_trait]
impl Controller for ScheduleController {
    const NAME: &'static str = "snapshot schedules";

    async fn list(&self, _leads_since: Timestamp) -> Option<Vec<Scheduled>> {
        let cluster = &self.0;
        if !cluster.has_read_objects() || !cluster.following.is_complete(SCHEDULES) {
            return None;
        }
        let all: Vec<SnapshotSchedule> = {
            let schedules = cluster.schedules.read();
            let schedules = schedules.unwrap_or_else(PoisonError::into_inner);
            schedules.now().values().cloned().collect()
        };
        if all.is_empty() {
            self.record_read(Ok(()));
            return Some(Vec::new());
        }
        let pass = observe::pass(cluster).await;
        self.record_read(pass.as_ref().map(drop).map_err(|error| chain(error)));
        let pass = Arc::new(pass.ok()?);
        let each = all.into_iter().map(|object| Scheduled {
            object,
            pass: Arc::clone(&pass),
            seen: None,
        });
        Some(each.collect())
    }
    /// A router that does not lead reads nothing, so nothing fails.
    fn reset(&self) {
        self.record_read(Ok(()));
    }
}
