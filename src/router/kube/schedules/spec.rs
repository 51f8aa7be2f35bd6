//! What a schedule requests, checked.

use std::collections::{BTreeMap, BTreeSet};

use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};

use super::check::{Check, DEFAULT_MAX_AGE};
use super::names::Names;
use super::object::{CheckSpec, KeepSpec, ScheduleSpec, SnapshotSchedule};
use super::retention::Keep;
use super::slots::{self, Timetable};
use crate::model::is_object_name;
use crate::router::kube::custom_resource::duration::duration;

const NANOSECONDS_PER_MINUTE: i128 = 60 * 1_000_000_000;

/// What a schedule requests.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) what: ScheduleTarget,
    pub(super) times: Timetable,
    /// `None`: all sets are kept.
    pub(super) keep: Option<Keep>,
    pub(super) deadline: Option<SignedDuration>,
    /// One more slot, which is due at once.
    pub(super) run_at: Option<Timestamp>,
    /// If it is wrong, snapshots are taken all the same.
    pub(super) check: Option<Result<Check, String>>,
    pub(super) names: Names,
}

/// What a slot makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ScheduleTarget {
    /// A group snapshot of the claims with these labels.
    Group(BTreeMap<String, String>),
    /// A snapshot of each of these claims.
    Claims(BTreeSet<String>),
}

impl Plan {
    /// Checks a schedule; the error says what is wrong with it. The schema of the CRD refuses most of
    /// this already, but a cluster may have an older CRD.
    pub(super) fn of(schedule: &SnapshotSchedule) -> Result<Plan, String> {
        let spec = &schedule.spec;
        let zone = slots::zone(spec.time_zone.as_deref())?;
        let what = what(spec)?;
        if spec.class.is_empty() {
            return Err("class is missing".into());
        }
        let names = Names::of(schedule).ok_or("it has no UID")?;
        names.check(&what.series())?;
        Ok(Plan {
            what,
            times: times(spec, zone)?,
            keep: spec.keep.as_ref().map(keep).transpose()?.flatten(),
            deadline: spec
                .starting_deadline
                .as_deref()
                .map(|text| time("startingDeadline", text))
                .transpose()?,
            run_at: spec.run_at.as_deref().map(minute).transpose()?,
            check: spec.check.as_ref().map(check),
            names,
        })
    }
}

impl ScheduleTarget {
    /// The claims of which each slot has a set of its own; one empty name for groups.
    pub(super) fn series(&self) -> BTreeSet<String> {
        match self {
            ScheduleTarget::Group(_) => [String::new()].into(),
            ScheduleTarget::Claims(claims) => claims.clone(),
        }
    }
}

fn what(spec: &ScheduleSpec) -> Result<ScheduleTarget, String> {
    let refuse = |why: &str| Err(why.to_string());
    match (&spec.selector, &spec.claims, spec.group) {
        (None, None, _) => refuse("give a selector or claims"),
        (Some(_), Some(_), _) => refuse("give either a selector or claims, not both"),
        (Some(_), None, Some(false)) => {
            refuse("a selector makes group snapshots; for single ones give claims")
        }
        (None, Some(_), Some(true)) => refuse(
            "claims make single snapshots; for a group snapshot give a selector with labels of the claims",
        ),
        (Some(selector), None, _) if !selector.match_expressions.is_empty() => {
            refuse("selector.matchExpressions is not supported by group snapshots; use matchLabels")
        }
        (Some(selector), None, _) if selector.match_labels.is_empty() => {
            refuse("selector.matchLabels is empty")
        }
        (Some(selector), None, _) => Ok(ScheduleTarget::Group(selector.match_labels.clone())),
        (None, Some(claims), _) if claims.is_empty() || claims.iter().any(String::is_empty) => {
            refuse("claims is empty")
        }
        (None, Some(claims), _) => Ok(ScheduleTarget::Claims(claims.iter().cloned().collect())),
    }
}

fn times(spec: &ScheduleSpec, zone: TimeZone) -> Result<Timetable, String> {
    match (&spec.cron, &spec.every) {
        (Some(cron), None) => Timetable::cron(cron, zone),
        (None, Some(every)) => Timetable::every(time("every", every)?, zone),
        (None, None) => Err("give cron or every".into()),
        (Some(_), Some(_)) => Err("give either cron or every, not both".into()),
    }
}

fn keep(spec: &KeepSpec) -> Result<Option<Keep>, String> {
    if *spec == KeepSpec::default() {
        return Ok(None);
    }
    let counts = [spec.last, spec.hourly, spec.daily, spec.weekly];
    if counts.contains(&Some(0)) {
        return Err("a number in keep is 0; leave it out instead".into());
    }
    let number = |count: Option<u32>| count.map_or(0, |count| count as usize);
    Ok(Some(Keep {
        last: number(spec.last),
        hourly: number(spec.hourly),
        daily: number(spec.daily),
        weekly: number(spec.weekly),
        max_age: spec
            .max_age
            .as_deref()
            .map(|text| time("keep.maxAge", text))
            .transpose()?,
    }))
}

/// Checks what a schedule names to check restores.
pub(super) fn check(spec: &CheckSpec) -> Result<Check, String> {
    let name = &spec.cron_job;
    if !is_object_name(name) {
        return Err(format!(
            "check.cronJob {name:?} is not the name of a CronJob"
        ));
    }
    let max_age = spec.max_age.as_deref();
    let max_age = max_age.map(|text| time("check.maxAge", text)).transpose()?;
    Ok(Check {
        cron_job: spec.cron_job.clone(),
        max_age: max_age.unwrap_or(DEFAULT_MAX_AGE),
    })
}

/// A time in whole minutes, as all slots are.
fn minute(text: &str) -> Result<Timestamp, String> {
    let time = text.parse::<Timestamp>().ok();
    let time = time.filter(|time| time.as_nanosecond() % NANOSECONDS_PER_MINUTE == 0);
    time.ok_or_else(|| {
        format!(
            "runAt {text:?} is not a time in whole minutes; give one such as 2026-11-22T11:05:00Z"
        )
    })
}

fn time(field: &str, text: &str) -> Result<SignedDuration, String> {
    let time = duration(text).filter(|time| !time.is_zero());
    let time = time.and_then(|time| SignedDuration::try_from(time).ok());
    time.ok_or_else(|| {
        format!("{field} {text:?} is not a duration of at most 365 days; give one such as 6h")
    })
}

#[cfg(test)]
mod tests;
