//! `schedule run`: sets `runAt` of a SnapshotSchedule to the present minute, which is one more slot. The
//! controller executes it as any other slot, once, and retention counts its sets.

use k8s_openapi::jiff::Timestamp;
use k8s_openapi::jiff::tz::TimeZone;
use kube::api::DynamicObject;
use serde_json::{Value, json};

use crate::change::{
    Need, Progress, check_stored, confirm, follow, mark, patch, print_lines, require,
};
use crate::cli::{Change, Wait};
use crate::cluster::object::{self, Fields, Kind};
use crate::cluster::{Cluster, Scope};
use crate::failure::{DENIED, Failure, Result};
use crate::model::snapshot;

const SECONDS_PER_MINUTE: i64 = 60;
/// The format of a slot in the name of a set, as the controller has it (docs/schedules.md).
const SLOT: &str = "%Y%m%d-%H%M";
/// Characters of the UID of the schedule in the name of a set.
const UID_CHARACTERS: usize = 5;

/// The sets that a slot makes.
pub struct Sets {
    /// VolumeGroupSnapshot, or VolumeSnapshot for single claims.
    pub kind: &'static Kind,
    slot: Timestamp,
    /// One for each claim, or one group.
    pub names: Vec<String>,
}

/// Has a schedule executed now.
pub async fn run(cluster: &Cluster, name: &str, change: &Change, wait: &Wait) -> Result<()> {
    let object = get(cluster, name).await?;
    refuse(&object)?;
    let slot = slot(&object, cluster.server_time().await?)?;
    let sets = Sets::of(&object, slot);
    let need = |verb, kind, name| Need {
        verb,
        kind,
        namespace: &cluster.namespace,
        name,
    };
    let mut needs = vec![need("patch", &object::SCHEDULE, name)];
    if wait.wait {
        needs.push(need("get", sets.kind, ""));
    }
    require(cluster, &needs).await?;
    let plan = format!(
        "SnapshotSchedule {}/{name} will be executed for {slot}, besides its own times. The controller will create, as sets that its keep counts: {} {}",
        cluster.namespace,
        sets.kind.kind,
        sets.names.join(", ")
    );
    confirm(change, &plan)?;
    let run = json!({"spec": {"runAt": slot.to_string()}});
    let now = patch(cluster, change, &object::SCHEDULE, &object, run).await?;
    let is_there = now.time("/spec/runAt") == Some(slot);
    check_stored(is_there, "spec.runAt", "snapshotschedules.yaml")?;
    print_lines(&format!(
        "snapshotschedule.slackwater.dev/{name} runs{}",
        mark(change)
    ));
    let what = format!("the run of SnapshotSchedule {name}");
    follow(wait, change, &what, || progress(cluster, name, &sets)).await
}

/// The schedule.
pub async fn get(cluster: &Cluster, name: &str) -> Result<DynamicObject> {
    let found = cluster.find_one(&object::SCHEDULE, &cluster.namespace, name);
    found.await?.ok_or_else(|| {
        Failure::failed(format!(
            "SnapshotSchedule {}/{name} does not exist; `kubectl slackwater schedules` lists them",
            cluster.namespace
        ))
    })
}

/// Refuses what the controller would not execute.
fn refuse(object: &DynamicObject) -> Result<()> {
    let title = format!("SnapshotSchedule {}/{}", object.namespace(), object.name());
    let refuse = |why: String| Err(Failure::failed(format!("{title} {why}")));
    if object.is_being_deleted() {
        return refuse("is being deleted".into());
    }
    if object.is_true("/spec/suspend") {
        return refuse("is suspended: nothing is created. Set spec.suspend to false first".into());
    }
    let conditions = object.conditions();
    let Some([_, status, reason, message]) =
        conditions.iter().find(|[kind, ..]| *kind == "Scheduling")
    else {
        return refuse(
            "is executed by no controller yet: the chart needs schedules.create: true".into(),
        );
    };
    // What could not be created may be possible now.
    match *status == "False" && !matches!(*reason, "CreateFailed" | "Suspended") {
        true => refuse(format!("cannot be executed: {reason}: {message}")),
        false => Ok(()),
    }
}

/// The slot of the present minute, or of the next one if this one is settled already.
fn slot(object: &DynamicObject, now: Timestamp) -> Result<Timestamp> {
    let minute = now.as_second().div_euclid(SECONDS_PER_MINUTE);
    let of = |minute: i64| {
        let slot = Timestamp::from_second(minute * SECONDS_PER_MINUTE);
        slot.map_err(|error| Failure::failed(format!("the time of the API server: {error}")))
    };
    let last = object.time("/status/lastSlot").or_else(|| object.created());
    let is_new = |slot: &Timestamp| last.is_none_or(|last| *slot > last);
    for minute in [minute, minute + 1] {
        let slot = of(minute)?;
        if is_new(&slot) {
            return Ok(slot);
        }
    }
    Err(Failure::failed(format!(
        "SnapshotSchedule {}/{} has executed a slot of the future, {}, when a clock was wrong; wait until then, or for its next slot",
        object.namespace(),
        object.name(),
        last.map(|last| last.to_string()).unwrap_or_default()
    )))
}

impl Sets {
    /// The sets of a schedule for a slot, which need not exist.
    pub fn of(object: &DynamicObject, slot: Timestamp) -> Sets {
        let uid = object.metadata.uid.iter().flat_map(|uid| uid.chars());
        let uid: String = uid.take(UID_CHARACTERS).collect();
        let time = slot.to_zoned(TimeZone::UTC).strftime(SLOT).to_string();
        let name = format!("{}-{time}-{uid}", object.name());
        let claims = object.list("/spec/claims").iter();
        let claims: Vec<_> = claims.filter_map(Value::as_str).collect();
        match claims.is_empty() {
            true => Sets {
                kind: &object::GROUP,
                slot,
                names: vec![name],
            },
            false => Sets {
                kind: &object::SNAPSHOT,
                slot,
                names: claims
                    .iter()
                    .map(|claim| format!("{name}-{claim}"))
                    .collect(),
            },
        }
    }
}

async fn progress(cluster: &Cluster, name: &str, sets: &Sets) -> Result<Progress> {
    // Before the sets: those of a slot that is settled exist, unless they were deleted.
    let schedule = get(cluster, name).await?;
    let is_settled = schedule
        .time("/status/lastSlot")
        .is_some_and(|last| last >= sets.slot);
    let (mut ready, mut waits) = (0, String::new());
    for set in &sets.names {
        let found = cluster.find_one(sets.kind, &cluster.namespace, set).await?;
        match found {
            Some(found) if found.is_true("/status/readyToUse") => ready += 1,
            Some(found) => {
                waits = match found.text("/status/error/message") {
                    "" => format!("{set} is being created"),
                    error => format!("{set}: {error}"),
                };
            }
            None if is_settled => {
                return Ok(Progress::Ended(Err(Failure::failed(format!(
                    "{} {set} does not exist, and the slot {} is settled: it was skipped, or the set was deleted",
                    sets.kind.kind, sets.slot
                )))));
            }
            None => waits = pending_reason(&schedule),
        }
    }
    Ok(match ready == sets.names.len() {
        true => Progress::Ended(Ok(describe_levels(cluster, sets).await?)),
        false => Progress::Running(waits),
    })
}

/// Why a set does not exist yet.
fn pending_reason(schedule: &DynamicObject) -> String {
    let conditions = schedule.conditions();
    let failing = conditions
        .iter()
        .find(|[kind, status, ..]| *kind == "Scheduling" && *status == "False");
    match failing {
        Some([_, _, reason, message]) => format!("{reason}: {message}"),
        None => "the controller has not executed it yet".into(),
    }
}

/// The sets with the levels that they have reached, as far as the user may read them.
async fn describe_levels(cluster: &Cluster, sets: &Sets) -> Result<String> {
    let scope = Scope::Namespace(cluster.namespace.clone());
    let levels: Vec<_> = match *sets.kind == object::GROUP {
        true => {
            let all = snapshot::groups(cluster, &scope, None).await?.into_iter();
            all.map(|one| (one.name, one.cut.level)).collect()
        }
        false => match snapshot::snapshots(cluster, &scope, None).await {
            Ok(all) => all
                .into_iter()
                .map(|one| (one.name, one.cut.level))
                .collect(),
            Err(failure) if failure.code == DENIED => Vec::new(),
            Err(failure) => return Err(failure),
        },
    };
    let each = sets.names.iter().map(|set| {
        let level = levels.iter().find(|(name, _)| name == set);
        match level.map(|(_, level)| level.as_str()) {
            None | Some("") => format!("{set} is ready."),
            Some(level) => format!("{set} is ready (level {level})."),
        }
    });
    Ok(each.collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(spec: Value, status: Value) -> DynamicObject {
        let object = json!({"metadata": {"name": "pg", "namespace": "shop",
            "uid": "0a1b2c3d-1111-4222-8333-444444444444",
            "creationTimestamp": "2026-11-22T01:06:10Z"}, "spec": spec, "status": status});
        serde_json::from_value(object).unwrap()
    }

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    /// The test `a_schedule_is_run_once_when_a_person_requests_it` of the controller has the same names.
    #[test]
    fn the_names_of_sets_are_those_of_the_controller() {
        let slot = at("2026-11-22T01:07:00Z");
        let claims = object(json!({"claims": ["a", "b"]}), json!({}));
        let expected = ["pg-20261122-0107-0a1b2-a", "pg-20261122-0107-0a1b2-b"];
        assert_eq!(Sets::of(&claims, slot).names, expected);
        let group = object(
            json!({"selector": {"matchLabels": {"app": "pg"}}}),
            json!({}),
        );
        assert_eq!(Sets::of(&group, slot).names, ["pg-20261122-0107-0a1b2"]);
    }

    #[test]
    fn the_slot_of_a_run_is_one_that_is_not_settled() {
        let settled = |last: Option<&str>, now: &str| {
            let object = object(json!({}), json!({ "lastSlot": last }));
            slot(&object, at(now)).map(|slot| slot.to_string())
        };
        let run = |last, now| settled(last, now).unwrap();
        let last = Some("2026-11-22T01:00:00Z");
        assert_eq!(run(last, "2026-11-22T01:07:42Z"), "2026-11-22T01:07:00Z");
        // The slot of this minute was executed, or the schedule was created in it.
        assert_eq!(run(last, "2026-11-22T01:00:42Z"), "2026-11-22T01:01:00Z");
        assert_eq!(run(None, "2026-11-22T01:06:42Z"), "2026-11-22T01:07:00Z");
        let failure = settled(Some("2036-01-01T00:00:00Z"), "2026-11-22T01:07:42Z").unwrap_err();
        assert!(
            failure.message.contains("2036-01-01"),
            "{}",
            failure.message
        );
    }
}
