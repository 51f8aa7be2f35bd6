//! What is done about a schedule, decided from what was read and from nothing else. So a router that
//! crashed anywhere is continued by the next one.
//!
//! A slot is settled once its objects exist, or once it is not executed any more. Only the newest slot
//! that is due is executed, so those that were missed before it are not. The time is the earlier one of
//! the clocks of the router and the API server, so a wrong clock makes no sets of the future.
//!
//! `maxAge` is the only rule by which a wrong clock could delete good sets. So a set is recorded in the
//! status before it is deleted for its age, and no other one is until there is a newer good set.

pub(super) mod show;

use std::collections::{BTreeMap, BTreeSet};

use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::check::Found;
use super::duty::{MAX_AHEAD, Now};
use super::object::{Expired, ScheduleStatus, SnapshotSchedule};
use super::retention::{Keep, Reason, State, victims};
use super::sets::Set;
use super::skipped::{between, skip};
use super::slots::{SPREAD, jitter};
use super::spec::{Plan, ScheduleTarget};
use crate::model::Level;
use show::{READ_FAILED, SCHEDULING, Shown};

/// A class of snapshots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Class {
    /// It is of this driver.
    pub(super) is_ours: bool,
    /// Its snapshots are deleted with their objects.
    pub(super) deletes: bool,
    /// The level that it requests, or what is wrong with it.
    pub(super) level: Result<Level, String>,
}

/// What is known of a schedule.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) object: SnapshotSchedule,
    /// The earlier one of the times of the router and the API server.
    pub(super) now: Timestamp,
    /// How much these differ, if that is too much.
    pub(super) skew: Option<String>,
    /// Whether the cluster has group snapshots.
    pub(super) has_groups: bool,
    pub(super) class: Option<Class>,
    /// The sets by their claims; by an empty name for groups.
    pub(super) sets: BTreeMap<String, Vec<Set>>,
    /// The sets of the other kind, which were made when the spec had claims instead of a selector, or a
    /// selector instead of claims.
    pub(super) others: Vec<Set>,
    /// Why members, levels and uses could not be read.
    pub(super) unread: Option<String>,
    /// Members, levels and uses of the sets are read. Otherwise, each ready set counts as good.
    pub(super) is_complete: bool,
    /// The CronJob that checks restores; `None` if the spec names none.
    pub(super) check: Option<Found>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    /// Creates the objects of a slot.
    Cut(Timestamp),
    Delete(Box<Deletion>),
}

/// The deletion of a set.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Deletion {
    pub(super) set: Set,
    pub(super) reason: Reason,
    /// A newer good set of all its volumes, which must still be there.
    pub(super) newer: Set,
}

/// What is done about a schedule.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::router::kube) struct Decision {
    /// The status after the step.
    pub(super) status: ScheduleStatus,
    pub(super) step: Option<Step>,
    /// A set may have to be deleted, if its members and uses, which have not been read, allow it.
    pub(super) needs_more: bool,
}

impl Decision {
    /// Neither a step nor a status that is to be written.
    pub(super) fn is_nothing(&self, seen: &Seen) -> bool {
        let before = seen.object.status.clone().unwrap_or_default();
        self.step.is_none() && self.status.is_shown_by(&before)
    }
}

/// Decides what is done.
pub(super) fn decide(seen: &Seen) -> Decision {
    let before = seen.object.status.clone().unwrap_or_default();
    let mut shown = Shown::new(seen, before);
    let plan = match usable(seen) {
        Ok(plan) => plan,
        Err((reason, message)) => {
            shown.refuse(reason, message);
            return shown.decided(None, false);
        }
    };
    shown.check(&plan);
    if seen.object.spec.suspend {
        settle_suspended(seen, &plan, &mut shown);
        record_needed(seen, &plan, &mut shown);
        let needs_more = preview(seen, &plan, &mut shown);
        return shown.decided(None, needs_more);
    }
    record_needed(seen, &plan, &mut shown);
    shown.cuts(&plan);
    let settled = shown.status.last_slot.clone();
    let due = due(seen, &plan, &mut shown.status);
    if let Some(slot) = due {
        // What is to be deleted may be what keeps a set from being created, for example in a quota.
        if shown.has_failed_to_create() {
            let (step, needs_more) = retain(seen, &plan, &mut shown);
            if step.is_some() || needs_more {
                shown.status.last_slot = settled;
                return shown.decided(step, needs_more);
            }
        }
        shown.scheduling(&plan);
        return shown.decided(Some(Step::Cut(slot)), false);
    }
    shown.scheduling(&plan);
    let (step, needs_more) = retain(seen, &plan, &mut shown);
    shown.decided(step, needs_more)
}

/// The plan of a schedule, or why nothing is done: the reason of the condition, and a message.
fn usable(seen: &Seen) -> Result<Plan, (&'static str, String)> {
    let plan = Plan::of(&seen.object).map_err(|why| ("Invalid", why))?;
    let name = &seen.object.spec.class;
    let is_group = matches!(plan.what, ScheduleTarget::Group(_));
    if is_group && !seen.has_groups {
        let why = "the cluster has no VolumeGroupSnapshots: install the CRDs of group snapshots";
        return Err(("NoGroups", why.into()));
    }
    let kind = match is_group {
        true => "VolumeGroupSnapshotClass",
        false => "VolumeSnapshotClass",
    };
    let Some(class) = &seen.class else {
        return Err(("NoClass", format!("there is no {kind} {name}")));
    };
    if !class.is_ours {
        let why = format!("{kind} {name} is of another driver");
        return Err(("OtherDriver", why));
    }
    if !class.deletes {
        let why = format!(
            "{kind} {name} has the deletionPolicy Retain: deleted snapshots would keep their space"
        );
        return Err(("ClassRetains", why));
    }
    if let Err(why) = &class.level {
        return Err(("InvalidClass", format!("{kind} {name}: {why}")));
    }
    Ok(plan)
}

/// Records since when the claims must have sets.
fn record_needed(seen: &Seen, plan: &Plan, shown: &mut Shown<'_>) {
    let now = Now {
        now: seen.now,
        created: created(seen),
        times: &plan.times,
        suspended: seen.object.spec.suspend || shown.was_suspended(),
        changed: !has_seen_spec(seen),
    };
    let claims = plan.what.series().into_iter();
    now.record(&mut shown.status, claims);
}

fn created(seen: &Seen) -> Timestamp {
    let created = seen.object.metadata.creation_timestamp.as_ref();
    created.map_or(seen.now, |created| created.0)
}

/// The slots of a suspended schedule pass.
fn settle_suspended(seen: &Seen, plan: &Plan, shown: &mut Shown<'_>) {
    if let Some(slot) = plan.times.last(seen.now).max(run(seen, plan))
        && shown.status.last_slot.as_ref().map(|last| last.0) != Some(slot)
    {
        shown.status.last_slot = Some(Time(slot));
    }
    shown.suspended();
}

/// The slot that a person has added, once its time has come.
fn run(seen: &Seen, plan: &Plan) -> Option<Timestamp> {
    plan.run_at.filter(|at| *at <= seen.now)
}

/// The slot that is to be executed now. Those that are not executed any more are settled.
fn due(seen: &Seen, plan: &Plan, status: &mut ScheduleStatus) -> Option<Timestamp> {
    let jitter = jitter(&plan.names.uid);
    let slot = plan.times.last(seen.now.checked_sub(jitter).ok()?);
    // A person waits for the one that was added. It is the minute in which it was, so it may be as late
    // as others that are spread over theirs.
    let run = run(seen, plan);
    let (slot, spread) = match run > slot {
        true => (run?, SPREAD),
        false => (slot?, jitter),
    };
    let before = status.last_slot.as_ref();
    let before = before.map_or(created(seen), |last| last.0);
    // If a settled slot, or the creation of the schedule, is that far in the future, the clocks were wrong,
    // and slots are settled again. Until then, nothing is executed twice because of a clock that was
    // corrected.
    if before.duration_since(seen.now) > MAX_AHEAD {
        status.last_slot = Some(Time(slot));
        return None;
    }
    if slot <= before {
        return None;
    }
    if has_seen_spec(seen) {
        skip(status, between(&plan.times, before, slot));
    }
    status.last_slot = Some(Time(slot));
    let is_late = |most: SignedDuration| seen.now.duration_since(slot) - spread > most;
    if plan.deadline.is_some_and(is_late) {
        status.missed += 1;
        skip(status, [slot]);
        return None;
    }
    Some(slot)
}

/// Whether the present spec was read before. Otherwise, it is not known which slots the schedule had since
/// the last one that was settled.
fn has_seen_spec(seen: &Seen) -> bool {
    let status = seen.object.status.as_ref();
    let mut conditions = status.into_iter().flat_map(|status| &status.conditions);
    let scheduling = conditions.find(|one| one.type_ == SCHEDULING);
    let generation = scheduling.and_then(|one| one.observed_generation);
    generation.is_some() && generation == seen.object.metadata.generation
}

/// Shows what would be deleted if the schedule were not suspended. Returns whether that is not known yet.
fn preview(seen: &Seen, plan: &Plan, shown: &mut Shown<'_>) -> bool {
    let found = match &plan.keep {
        Some(keep) => surplus(seen, keep, &plan.times.zone).0,
        None => Vec::new(),
    };
    if !found.is_empty() && !seen.is_complete {
        return seen.unread.is_none();
    }
    shown.deletions(&found);
    false
}

/// The sets that are not to be kept, with their claims, and one that is being deleted.
fn surplus<'a>(
    seen: &'a Seen,
    keep: &Keep,
    zone: &TimeZone,
) -> (Vec<(&'a String, Deletion)>, Option<&'a Set>) {
    let mut found = Vec::new();
    let mut leaving = None;
    for (claim, sets) in &seen.sets {
        // One at a time. A set of another claim that cannot go is not waited for.
        if let Some(set) = sets.iter().find(|set| set.state == State::Leaving) {
            leaving = Some(set);
            continue;
        }
        let its = deletions(seen, keep, zone, sets);
        found.extend(its.map(|deletion| (claim, deletion)));
    }
    (found, leaving)
}

/// The sets of claims, or of a selector, that the spec does not have any more. No set of the present spec
/// has the same volumes and is cut at one time as they are, so none displaces them.
fn former<'a>(seen: &'a Seen, plan: &Plan) -> Vec<&'a Set> {
    let series = plan.what.series();
    let removed = seen
        .sets
        .iter()
        .filter(|(claim, _)| !series.contains(*claim));
    let removed = removed.flat_map(|(_, sets)| sets);
    let all = removed.chain(&seen.others);
    all.filter(|set| set.state != State::Leaving).collect()
}

/// What is done to keep what is to be kept, and nothing else: the deletion of one set.
fn retain(seen: &Seen, plan: &Plan, shown: &mut Shown<'_>) -> (Option<Step>, bool) {
    let Some(keep) = &plan.keep else {
        shown.deletions(&[]);
        shown.retention(true, "AllKept", String::new());
        return (None, false);
    };
    let (found, leaving) = surplus(seen, keep, &plan.times.zone);
    if let (true, Some(set)) = (found.is_empty(), leaving) {
        let why = format!("{} is being deleted", set.name);
        shown.retention(false, "Deleting", why);
        return (None, false);
    }
    if found.is_empty() {
        shown.deletions(&[]);
        shown.kept(&former(seen, plan));
        return (None, false);
    }
    if let Some(skew) = &seen.skew {
        shown.retention(false, "ClocksDiffer", skew.clone());
        return (None, false);
    }
    if let Some(why) = &seen.unread {
        shown.retention(false, READ_FAILED, why.clone());
        return (None, false);
    }
    if !seen.is_complete {
        return (None, true);
    }
    shown.deletions(&found);
    let mut in_use = Vec::new();
    for (claim, deletion) in found {
        let set = &deletion.set;
        if let Some(why) = &set.used {
            in_use.push(format!("{}: {why}", set.name));
            continue;
        }
        if deletion.reason == Reason::Expired {
            match allow_expiry(&mut shown.status, claim, set, deletion.newer.slot) {
                Expiry::Allowed => {}
                Expiry::Later => continue,
                // Recorded first.
                Expiry::Recorded => return (None, false),
            }
        }
        shown.retention(false, "Deleting", format!("{} is being deleted", set.name));
        return (Some(Step::Delete(Box::new(deletion))), false);
    }
    match in_use.as_slice() {
        [] => shown.kept(&former(seen, plan)),
        [first] => shown.retention(false, "InUse", first.clone()),
        [first, more @ ..] => {
            let message = format!("{first}; and {} more", more.len());
            shown.retention(false, "InUse", message);
        }
    }
    (None, false)
}

/// The sets of one claim, or of groups, that are not to be kept. A set counts against another one only if
/// it has all volumes of that one: a claim can be made again with an empty volume, and a label can be
/// removed from most claims of a group.
fn deletions(
    seen: &Seen,
    keep: &Keep,
    zone: &TimeZone,
    sets: &[Set],
) -> impl Iterator<Item = Deletion> {
    // Levels are known of some sets only, before all are read. Then they decide nothing, so that no set that
    // may have to be deleted is overlooked.
    let state = |set: &Set| match set.state {
        State::Good { .. } if !seen.is_complete => State::Good { is_at_level: true },
        state => state,
    };
    let different: BTreeSet<_> = sets.iter().map(|set| &set.volumes).collect();
    let mut found = Vec::new();
    for volumes in different {
        let counted = sets.iter().filter(|set| set.volumes.is_superset(volumes));
        let states: Vec<_> = counted.clone().map(|set| (set.slot, state(set))).collect();
        for (slot, reason) in victims(keep, zone, seen.now, &states) {
            let mut its = sets.iter().filter(|set| set.volumes == *volumes);
            let Some(set) = its.find(|set| set.slot == slot) else {
                continue;
            };
            let must_be_at_level = state(set) == State::Good { is_at_level: true };
            let replaces = |one: &&Set| {
                let is_enough = match state(one) {
                    State::Good { is_at_level } => is_at_level || !must_be_at_level,
                    State::Partial | State::Unready | State::Leaving => false,
                };
                is_enough && one.slot > slot && one.slot <= seen.now
            };
            let newer = counted.clone().filter(replaces).max_by_key(|one| one.slot);
            found.extend(newer.map(|newer| Deletion {
                set: set.clone(),
                reason,
                newer: newer.clone(),
            }));
        }
    }
    found.sort_by_key(|deletion| deletion.set.slot);
    found.into_iter()
}

enum Expiry {
    Allowed,
    /// Another one was removed since the newest good set.
    Later,
    /// It was recorded, and is allowed from now on.
    Recorded,
}

/// Whether a set may be deleted for its age.
fn allow_expiry(status: &mut ScheduleStatus, claim: &str, set: &Set, newest: Timestamp) -> Expiry {
    let record = Expired {
        claim: claim.into(),
        name: set.name.clone(),
        after: Time(newest),
    };
    match status.expired.iter_mut().find(|one| one.claim == claim) {
        Some(one) if one.name == set.name => return Expiry::Allowed,
        Some(one) if one.after.0 >= newest => return Expiry::Later,
        Some(one) => *one = record,
        None => status.expired.push(record),
    }
    Expiry::Recorded
}

#[cfg(test)]
mod tests;
