//! Whether what a schedule takes can be restored. A CronJob in its namespace restores the newest sets and
//! checks them, with the permissions of its own service account. The schedule names it, and reports its
//! results: the controller creates nothing for a check, and believes the status that Kubernetes writes.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ::kube::api::Api;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::batch::v1::CronJob;
use tokio::sync::Mutex;

use super::object::SnapshotSchedule;
use crate::error::chain;
use crate::router::kube::{InCluster, ask};

/// How old the last check may be if the schedule does not say it: a daily one may fail to start once.
pub(super) const DEFAULT_MAX_AGE: SignedDuration = SignedDuration::from_hours(48);
/// How long the state of a CronJob is used.
const CACHE_LIFETIME: Duration = Duration::from_secs(60);

/// What a schedule requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Check {
    pub(super) cron_job: String,
    /// How long ago the last check that succeeded may have ended.
    pub(super) max_age: SignedDuration,
}

/// What is known of the CronJob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// It was not read, and why.
    Unread(String),
    Missing,
    Present(State),
}

/// A CronJob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct State {
    /// One of its containers has the schedule among its arguments.
    pub(super) names_schedule: bool,
    pub(super) is_suspended: bool,
    pub(super) is_running: bool,
    pub(super) created: Timestamp,
    /// When the last Job was created.
    pub(super) scheduled: Option<Timestamp>,
    /// When a Job has succeeded last.
    pub(super) succeeded: Option<Timestamp>,
}

impl State {
    pub(super) fn of(cron_job: &CronJob, schedule: &str, now: Timestamp) -> State {
        let created = cron_job.metadata.creation_timestamp.as_ref();
        let spec = cron_job.spec.as_ref();
        let template = spec.and_then(|spec| spec.job_template.spec.as_ref());
        let pod = template.and_then(|job| job.template.spec.as_ref());
        let containers = pod.into_iter().flat_map(|pod| &pod.containers);
        let mut words = containers.flat_map(|it| it.command.iter().chain(&it.args).flatten());
        let status = cron_job.status.as_ref();
        State {
            names_schedule: words.any(|word| names(word, schedule)),
            is_suspended: spec.is_some_and(|spec| spec.suspend == Some(true)),
            is_running: status
                .is_some_and(|it| it.active.as_ref().is_some_and(|it| !it.is_empty())),
            created: created.map_or(now, |created| created.0),
            scheduled: status.and_then(|it| Some(it.last_schedule_time.as_ref()?.0)),
            succeeded: status.and_then(|it| Some(it.last_successful_time.as_ref()?.0)),
        }
    }
}

/// Whether a word of a command, which may be a whole line for a shell, names the schedule as the plugin does.
fn names(word: &str, schedule: &str) -> bool {
    let ends = |c: char| c.is_whitespace() || matches!(c, '"' | '\'' | ';' | '&' | '|');
    let mut parts = word.split(ends);
    parts.any(|part| part.strip_prefix("snapshotschedule/") == Some(schedule))
}

/// The condition that follows: its status, its reason and a message.
pub(super) fn verdict(
    check: &Check,
    found: &Found,
    now: Timestamp,
) -> (&'static str, &'static str, String) {
    let name = &check.cron_job;
    let state = match found {
        Found::Unread(why) => return ("False", "ReadFailed", why.clone()),
        Found::Missing => {
            let why = format!("there is no CronJob {name} in the namespace");
            return ("False", "NoCronJob", why);
        }
        Found::Present(state) => state,
    };
    if !state.names_schedule {
        let why = format!(
            "no container of CronJob {name} has the argument snapshotschedule/NAME with the name of this schedule"
        );
        return ("False", "OtherCronJob", why);
    }
    if state.is_suspended {
        return (
            "False",
            "CronJobSuspended",
            format!("CronJob {name} is suspended"),
        );
    }
    if let Some(began) = state.scheduled.filter(|_| !state.is_running)
        && state.succeeded.is_none_or(|ended| ended < began)
    {
        let why = format!(
            "the check of {began} has not succeeded: see the Jobs of CronJob {name}, and their pods"
        );
        return ("False", "CheckFailed", why);
    }
    let is_old = |at: Timestamp| now.duration_since(at) > check.max_age;
    match state.succeeded {
        Some(ended) if is_old(ended) => {
            let why = format!("the last check that has succeeded ended at {ended}");
            ("False", "CheckTooOld", why)
        }
        Some(ended) => ("True", "Checked", format!("checked at {ended}")),
        None if is_old(state.created) => {
            let why = format!("CronJob {name} has never succeeded");
            ("False", "NeverChecked", why)
        }
        None => (
            "Unknown",
            "NotChecked",
            format!("CronJob {name} has not succeeded yet"),
        ),
    }
}

/// The CronJobs that were read within the last minute, by the schedule and the name, so that hundreds of
/// schedules do not read one each in every pass.
#[derive(Debug, Default)]
pub(super) struct Cache(Mutex<BTreeMap<(String, String), (Instant, Found)>>);

impl Cache {
    /// Reads the CronJob of a schedule.
    pub(super) async fn read(
        &self,
        cluster: &InCluster,
        schedule: &SnapshotSchedule,
        name: &str,
        now: Timestamp,
    ) -> Found {
        let key = (schedule.path(), name.to_string());
        if let Some((at, found)) = self.0.lock().await.get(&key)
            && at.elapsed() < CACHE_LIFETIME
        {
            return found.clone();
        }
        let found = find(cluster, schedule, name, now).await;
        let mut all = self.0.lock().await;
        all.retain(|_, (at, _)| at.elapsed() < CACHE_LIFETIME);
        all.insert(key, (Instant::now(), found.clone()));
        found
    }
}

async fn find(
    cluster: &InCluster,
    schedule: &SnapshotSchedule,
    name: &str,
    now: Timestamp,
) -> Found {
    let (namespace, own_name) = schedule.key();
    let api = Api::<CronJob>::namespaced(cluster.client.clone(), &namespace);
    match ask(&format!("CronJob {namespace}/{name}"), api.get_opt(name)).await {
        Err(error) => Found::Unread(chain(&error)),
        Ok(None) => Found::Missing,
        Ok(Some(found)) => Found::Present(State::of(&found, &own_name, now)),
    }
}

#[cfg(test)]
mod tests;
