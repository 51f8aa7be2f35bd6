//! `schedules`: SnapshotSchedules with their last and next cut.

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::DynamicObject;
use serde::Serialize;
use serde_json::{Value, json};

use crate::cli::ListArguments;
use crate::cluster::object::{self, Fields, Kind};
use crate::cluster::{Cluster, labeled};
use crate::failure::Result;
use crate::listing::{Column, Listing, Row, column, wide_column};
use crate::text::age;

/// What it reads.
pub const KINDS: [&Kind; 1] = [&object::SCHEDULE];

const COLUMNS: [Column; 10] = [
    column("SCHEDULE"),
    column("LAST CUT"),
    column("LEVEL"),
    column("DELAY"),
    column("NEXT CUT"),
    column("SUSPENDED"),
    column("PROBLEM"),
    wide_column("TIMES"),
    wide_column("CLAIMS"),
    wide_column("CLASS"),
];

/// A controller reads a new schedule within seconds, and executes a slot within a minute or two.
const MAX_DELAY: SignedDuration = SignedDuration::from_mins(5);
/// Reasons of conditions that are False and are no problem.
const EXPECTED: [&str; 2] = ["Suspended", "Deleting"];

/// A SnapshotSchedule.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Schedule {
    pub namespace: String,
    pub name: String,
    pub last_cut: Option<Timestamp>,
    pub level: String,
    /// How long after its slot the last cut was.
    pub delay: String,
    pub next_cut: Option<Timestamp>,
    pub suspended: bool,
    /// What keeps it from being executed, as "condition: reason: message".
    pub problems: Vec<String>,
    /// Slots that were skipped.
    pub missed: i64,
    pub cron: String,
    pub every: String,
    pub time_zone: String,
    /// The labels of its claims, or their names.
    pub claims: Vec<String>,
    pub class: String,
}

impl Schedule {
    /// From its object.
    pub fn of(object: &DynamicObject, now: Timestamp) -> Schedule {
        let text = |pointer| object.text(pointer).to_string();
        let labels = object
            .match_labels("/spec/selector/matchLabels")
            .into_iter();
        let names = object.list("/spec/claims").iter();
        let names = names.filter_map(Value::as_str).map(str::to_string);
        Schedule {
            namespace: object.namespace().into(),
            name: object.name().into(),
            last_cut: object.time("/status/lastCut"),
            level: text("/status/level"),
            delay: text("/status/delay"),
            next_cut: object.time("/status/nextSlot"),
            suspended: object.is_true("/spec/suspend"),
            problems: problems(object, now),
            missed: object.number("/status/missed"),
            cron: text("/spec/cron"),
            every: text("/spec/every"),
            time_zone: text("/spec/timeZone"),
            claims: labels.chain(names).collect(),
            class: text("/spec/class"),
        }
    }

    /// When it is due, as its spec has it.
    fn times(&self) -> String {
        let zone = match self.time_zone.as_str() {
            "" => String::new(),
            zone => format!(" {zone}"),
        };
        match self.cron.as_str() {
            "" => format!("every {}", self.every),
            cron => format!("{cron}{zone}"),
        }
    }
}

/// The problems of a schedule: what a person has to correct.
fn problems(object: &DynamicObject, now: Timestamp) -> Vec<String> {
    let conditions = object.conditions();
    if conditions.is_empty() {
        let created = object.created().unwrap_or(now);
        let is_new = now.duration_since(created) < MAX_DELAY;
        let none = "no controller executes it: the chart needs schedules.create: true";
        return Vec::from_iter((!is_new).then(|| none.to_string()));
    }
    let is_problem =
        |[_, status, reason, _]: &[&str; 4]| *status == "False" && !EXPECTED.contains(reason);
    let problems = conditions.into_iter().filter(is_problem);
    let mut problems: Vec<_> = problems
        .map(|[kind, _, reason, message]| match message {
            "" => format!("{kind}: {reason}"),
            message => format!("{kind}: {reason}: {message}"),
        })
        .collect();
    let is_late = |next: Timestamp| now.duration_since(next) > MAX_DELAY;
    if problems.is_empty() && object.time("/status/nextSlot").is_some_and(is_late) {
        problems.push("the next cut was due, and no controller has executed it".into());
    }
    problems
}

/// The schedules, sorted.
pub async fn listing(cluster: &Cluster, arguments: &ListArguments) -> Result<Listing> {
    let scope = arguments.scope(cluster);
    let params = labeled(arguments.selector.as_deref());
    let objects = cluster.get_all(&object::SCHEDULE, &scope, &params).await?;
    let now = Timestamp::now();
    let mut all: Vec<_> = objects.iter().map(|it| Schedule::of(it, now)).collect();
    all.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
    let rows = all.iter().map(|one| row(one, now)).collect();
    let notes = cluster.take_notes();
    Ok(Listing::namespaced(
        "schedules of snapshots".into(),
        &COLUMNS,
        rows,
        (&scope, notes),
    ))
}

fn row(schedule: &Schedule, now: Timestamp) -> Row {
    let next = schedule.next_cut.map(|next| next.to_string());
    let cells = vec![
        schedule.name.clone(),
        age(schedule.last_cut, now),
        schedule.level.clone(),
        schedule.delay.clone(),
        next.unwrap_or_default(),
        schedule.suspended.to_string(),
        schedule.problems.join("; "),
        schedule.times(),
        schedule.claims.join(", "),
        schedule.class.clone(),
    ];
    Row {
        name: format!("snapshotschedule.slackwater.dev/{}", schedule.name),
        cells,
        value: json!(schedule),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schedule_that_no_controller_executes_is_a_problem() {
        let now: Timestamp = "2026-11-22T12:00:00Z".parse().unwrap();
        let of = |created: &str, status: Value| {
            let object = json!({"metadata": {"name": "pg", "namespace": "shop",
                "creationTimestamp": created}, "status": status});
            problems(&serde_json::from_value(object).unwrap(), now)
        };
        let (old, new) = ("2026-11-22T11:00:00Z", "2026-11-22T11:59:00Z");
        assert_eq!(of(new, json!({})), Vec::<String>::new());
        assert!(of(old, json!({}))[0].contains("schedules.create"));
        let at = |next: &str, reason: &str| {
            let status = if reason == "Scheduled" {
                "True"
            } else {
                "False"
            };
            of(
                old,
                json!({"nextSlot": next, "conditions": [{"type": "Scheduling",
                "status": status, "reason": reason, "message": ""}]}),
            )
        };
        assert_eq!(
            at("2026-11-22T11:57:00Z", "Scheduled"),
            Vec::<String>::new()
        );
        assert!(at("2026-11-22T11:50:00Z", "Scheduled")[0].contains("no controller"));
        assert_eq!(
            at("2026-11-22T13:00:00Z", "Suspended"),
            Vec::<String>::new()
        );
        assert_eq!(
            at("2026-11-22T13:00:00Z", "NoClass"),
            ["Scheduling: NoClass"]
        );
    }
}
