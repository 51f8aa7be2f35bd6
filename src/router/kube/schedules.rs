//! Schedules of snapshots, as a controller: at each slot of a SnapshotSchedule it creates a
//! VolumeGroupSnapshot, or VolumeSnapshots of single claims, and it deletes those that are not to be kept.
//! Nothing else of the driver knows about schedules.
//!
//! [`decide`] has all decisions. What must not be forgotten is in the names of the sets, and in the
//! status of the schedule.
//!
//! | file | content |
//! |---|---|
//! | `object`, `spec` | the SnapshotSchedule, and what it requests |
//! | `observe`, `decide`, `execute` | the reconciler |
//! | `cron`, `slots`, `skipped` | times |
//! | `names`, `sets` | the snapshots of a slot |
//! | `retention`, `uses` | what is deleted, and what is still used |
//! | `duty` | since when sets must exist |
//! | `check` | the CronJob that checks snapshots |
//! | `shown` | what the status page shows |

mod check;
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
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError};

use k8s_openapi::jiff::Timestamp;

use super::InCluster;
use super::reconcile::crd_watch::follow;
use super::reconcile::{Controller, Next, Outcome, Reconciler};
use crate::error::{Error, Result, chain};
use crate::router::cluster::Cluster;
use crate::telemetry::router::ScheduleStatus as ScheduleNumbers;
use decide::show::unread;
use decide::{Decision, Seen, decide};
use object::SnapshotSchedule;
use observe::Pass;

/// The name of the watch in messages.
const SCHEDULES: &str = "SnapshotSchedules";

/// What a pass reads, in messages.
const SNAPSHOTS: &str = "snapshots and classes of SnapshotSchedules";

/// A pass that fails is reported at the schedules from the second time in a row: one that fails alone may be
/// a restart of the API server.
const REPORTED_FAILURES: u32 = 2;

/// A schedule, and what is known of it.
pub(super) struct Scheduled {
    object: SnapshotSchedule,
    /// What was read for all schedules, or why it was not.
    pass: Result<Arc<Pass>, Unread>,
    /// `None` before it is observed, and if it is gone.
    seen: Option<Box<Seen>>,
}

/// Why something was not read, and when.
#[derive(Clone, Debug)]
pub(super) struct Unread {
    at: Timestamp,
    why: String,
}

impl Unread {
    fn new(error: &Error) -> Unread {
        Unread {
            at: Timestamp::now(),
            why: chain(error),
        }
    }
}

impl fmt::Display for Scheduled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SnapshotSchedule {}", self.object.path())
    }
}

/// Executes schedules.
struct ScheduleController {
    cluster: Arc<InCluster>,
    /// Passes in a row that have failed.
    failures: AtomicU32,
    checks: Arc<check::Cache>,
}

impl ScheduleController {
    /// Counts and reports a pass that could not read its objects with the watches that fail.
    fn record_read(&self, answer: Result<(), String>) {
        let states = &self.cluster.following;
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
        let controller = Arc::new(ScheduleController {
            cluster: Arc::clone(self),
            failures: AtomicU32::default(),
            checks: Arc::default(),
        });
        self.control(controller, self.options.poll_interval * 3, changes);
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

    async fn observe(&self, mut scheduled: Scheduled) -> Result<Scheduled> {
        if let Ok(pass) = &scheduled.pass {
            let seen = observe::observe(&self.cluster, pass, &scheduled.object).await;
            match seen {
                Ok(seen) => scheduled.seen = seen.map(Box::new),
                Err(error) => scheduled.pass = Err(Unread::new(&error)),
            }
        }
        Ok(scheduled)
    }

    fn next(scheduled: &Scheduled) -> Next<Decision> {
        let before = scheduled.object.status.clone().unwrap_or_default();
        let (decision, before) = match (&scheduled.pass, &scheduled.seen) {
            (Err(Unread { at, why }), _) => (unread(&scheduled.object, *at, why), before),
            (Ok(_), Some(seen)) => (decide(seen), seen.object.status.clone().unwrap_or_default()),
            (Ok(_), None) => return Next::Done,
        };
        match decision.step.is_none() && decision.status.is_shown_by(&before) {
            true => Next::Wait,
            false => Next::Step(decision),
        }
    }

    async fn execute(&self, scheduled: &Scheduled, decision: Decision) -> Result<Outcome> {
        let cluster = &self.cluster;
        match (&scheduled.pass, &scheduled.seen) {
            (Ok(pass), Some(seen)) => execute::execute(cluster, pass, seen, &decision).await,
            (Ok(_), None) => Ok(Outcome::Stale),
            (Err(_), _) => execute::report(cluster, &scheduled.object, &decision.status).await,
        }
    }
}

#[tonic::async_trait]
impl Controller for ScheduleController {
    const NAME: &'static str = "snapshot schedules";

    async fn list(&self, _leads_since: Timestamp) -> Option<Vec<Scheduled>> {
        let cluster = &self.cluster;
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
        let pass = observe::pass(cluster, &self.checks).await;
        self.record_read(pass.as_ref().map(drop).map_err(|error| chain(error)));
        let pass = match pass {
            Ok(pass) => {
                self.failures.store(0, Ordering::Relaxed);
                Ok(Arc::new(pass))
            }
            Err(error) => {
                let before = self.failures.fetch_add(1, Ordering::Relaxed);
                let is_reported = before + 1 >= REPORTED_FAILURES;
                Err(is_reported.then(|| Unread::new(&error))?)
            }
        };
        let each = all.into_iter().map(|object| Scheduled {
            object,
            pass: pass.clone(),
            seen: None,
        });
        Some(each.collect())
    }

    /// A router that does not lead reads nothing, so nothing fails.
    fn reset(&self) {
        self.failures.store(0, Ordering::Relaxed);
        self.record_read(Ok(()));
    }
}
