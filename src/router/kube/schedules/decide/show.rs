//! What the status of a schedule shows.

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::{Decision, Deletion, Seen, Step};
use crate::router::kube::reconcile::with_transitions;
use crate::router::kube::schedules::check::verdict;
use crate::router::kube::schedules::duty::needed_after;
use crate::router::kube::schedules::object::{Due, ScheduleStatus, SnapshotSchedule};
use crate::router::kube::schedules::retention::Reason;
use crate::router::kube::schedules::sets::Set;
use crate::router::kube::schedules::spec::Plan;

/// The condition: whether slots are executed.
pub(in crate::router::kube::schedules) const SCHEDULING: &str = "Scheduling";
/// The condition: whether the newest slot has good sets.
pub(in crate::router::kube::schedules) const CUT: &str = "Cut";
/// The condition: whether nothing is left to be deleted.
pub(in crate::router::kube::schedules) const RETENTION: &str = "Retention";
/// The condition: whether a check of a restore has succeeded lately; only if the spec has one.
pub(in crate::router::kube::schedules) const RESTORE_CHECKED: &str = "RestoreChecked";
/// A reason of Scheduling: the API server has refused an object.
pub(in crate::router::kube::schedules) const CREATE_FAILED: &str = "CreateFailed";
/// A reason of Scheduling: a person has suspended the schedule.
pub(in crate::router::kube::schedules) const SUSPENDED: &str = "Suspended";
/// A reason of Scheduling and Retention: what they need could not be read.
pub(in crate::router::kube::schedules) const READ_FAILED: &str = "ReadFailed";
/// A reason of Retention: the API server has refused to delete a set.
pub(in crate::router::kube::schedules) const DELETE_FAILED: &str = "DeleteFailed";
/// A reason of Retention: sets of a former spec stay.
pub(in crate::router::kube::schedules) const FORMER_SETS: &str = "FormerSets";
/// In this order.
const CONDITIONS: [&str; 4] = [SCHEDULING, CUT, RETENTION, RESTORE_CHECKED];
/// Sets that are to be deleted, in the status. An object has at most 1.5 MiB.
const MAX_DELETIONS: usize = 100;
/// A set that is not ready after this time has failed.
const CUT_TIMEOUT: SignedDuration = SignedDuration::from_mins(5);

/// A status in the making.
pub(super) struct Shown<'a> {
    seen: &'a Seen,
    pub(super) status: ScheduleStatus,
    conditions: Vec<Condition>,
}

impl<'a> Shown<'a> {
    pub(super) fn new(seen: &'a Seen, status: ScheduleStatus) -> Shown<'a> {
        Shown {
            seen,
            status,
            conditions: Vec::new(),
        }
    }

    fn set(&mut self, type_: &str, status: &str, reason: &str, message: String) {
        let now = self.seen.now;
        self.conditions
            .push(condition(type_, status, reason, message, now));
    }

    /// Nothing is done.
    pub(super) fn refuse(&mut self, reason: &str, message: String) {
        self.status.next_slot = None;
        self.set(SCHEDULING, "False", reason, message);
    }

    /// Whether the last set could not be created.
    pub(super) fn has_failed_to_create(&self) -> bool {
        let mut all = self.status.conditions.iter();
        all.any(|one| one.type_ == SCHEDULING && one.reason == CREATE_FAILED)
    }

    /// Whether the schedule was suspended when it was read last.
    pub(super) fn was_suspended(&self) -> bool {
        let mut all = self.status.conditions.iter();
        all.any(|one| one.type_ == SCHEDULING && one.reason == SUSPENDED)
    }

    pub(super) fn suspended(&mut self) {
        self.status.next_slot = None;
        self.status.overdue_since = None;
        self.set(SCHEDULING, "False", SUSPENDED, String::new());
    }

    /// Slots are executed.
    pub(super) fn scheduling(&mut self, plan: &Plan) {
        let last = self.status.last_slot.as_ref();
        let after = last.map_or(self.seen.now, |last| last.0.max(self.seen.now));
        let run = plan.run_at.filter(|run| *run > after);
        let next = plan.times.next(after).into_iter().chain(run).min();
        self.status.next_slot = next.map(|next| next.to_string());
        self.set(SCHEDULING, "True", "Scheduled", String::new());
    }

    /// The sets that are not to be kept, in the order in which they are deleted.
    pub(super) fn deletions(&mut self, found: &[(&String, Deletion)]) {
        let records = &self.status.expired;
        let mut expiring = BTreeSet::new();
        let mut is_later = |claim: &String, deletion: &Deletion| {
            let record = records.iter().find(|one| one.claim == *claim);
            deletion.reason == Reason::Expired
                && match record {
                    Some(one) if one.name == deletion.set.name => false,
                    Some(one) if one.after.0 >= deletion.newer.slot => true,
                    Some(_) | None => !expiring.insert(claim.clone()),
                }
        };
        let due = |(claim, deletion): &(&String, Deletion)| {
            let waits = match &deletion.set.used {
                Some(why) => why.clone(),
                None if is_later(claim, deletion) => {
                    "after each new set, one is deleted for its age".into()
                }
                None => String::new(),
            };
            Due {
                name: deletion.set.name.clone(),
                reason: deletion.reason.text().into(),
                waits,
            }
        };
        let all = found.iter().take(MAX_DELETIONS).map(due);
        self.status.deletions = Some(all.collect());
    }

    pub(super) fn retention(&mut self, is_kept: bool, reason: &str, message: String) {
        let status = if is_kept { "True" } else { "False" };
        self.set(RETENTION, status, reason, message);
    }

    /// Nothing is left to be deleted. Sets of a former spec stay, which a person has to know.
    pub(super) fn kept(&mut self, former: &[&Set]) {
        let Some(newest) = former.iter().max_by_key(|set| (set.slot, &set.name)) else {
            return self.retention(true, "Kept", String::new());
        };
        let message = format!(
            "{} sets are of claims or of a selector that the spec does not have any more, the newest is {}. No new set replaces them: they stay until you delete them",
            former.len(),
            newest.name
        );
        self.retention(true, FORMER_SETS, message);
    }

    /// The checks of restores.
    pub(super) fn check(&mut self, plan: &Plan) {
        let (status, reason, message) = match (&plan.check, &self.seen.check) {
            (Some(Err(why)), _) => ("False", "Invalid", why.clone()),
            (Some(Ok(check)), Some(found)) => verdict(check, found, self.seen.now),
            (Some(Ok(_)), None) | (None, _) => return,
        };
        self.set(RESTORE_CHECKED, status, reason, message);
    }

    /// The newest sets.
    pub(super) fn cuts(&mut self, plan: &Plan) {
        let now = self.seen.now;
        let series = plan.what.series();
        let of = |claim: &String| self.seen.sets.get(claim).map_or(&[][..], Vec::as_slice);
        let newest = series.iter().map(|claim| newest(of(claim), now, |_| true));
        let newest: Vec<_> = newest.collect();
        let good = series.iter().map(|claim| newest_good(of(claim), now));
        let good: Option<Vec<&Set>> = good.collect();
        self.last_cut(&good.unwrap_or_default());
        let overdue = series.iter().filter_map(|claim| {
            let good = newest_good(of(claim), now).map(|set| set.slot);
            let needed = needed_after(&self.status, claim);
            plan.times.next(good.max(needed)?)
        });
        let overdue = overdue.min();
        let overdue = overdue.filter(|slot| *slot <= now);
        self.status.overdue_since = overdue.map(Time);
        let (status, reason, message) = cut(&newest, overdue, now);
        self.set(CUT, status, reason, message);
    }

    /// The newest good set of each claim.
    fn last_cut(&mut self, good: &[&Set]) {
        let status = &mut self.status;
        let Some(oldest) = good.iter().min_by_key(|set| set.slot) else {
            (status.last_cut_slot, status.last_cut) = (None, None);
            (status.level, status.delay) = (None, None);
            return;
        };
        let slot = Some(Time(oldest.slot));
        let is_same = status.last_cut_slot == slot;
        let levels: Option<Vec<_>> = good.iter().map(|set| set.level).collect();
        status.level = match levels.and_then(|levels| levels.into_iter().min()) {
            Some(level) => Some(level.as_str().into()),
            // It was read before.
            None => status.level.take().filter(|_| is_same),
        };
        status.last_cut_slot = slot;
        status.last_cut = Some(Time(oldest.created));
        status.delay = Some(delay(oldest.created.duration_since(oldest.slot)));
    }

    /// The decision. Conditions that were not decided stay as they were.
    pub(super) fn decided(mut self, step: Option<Step>, needs_more: bool) -> Decision {
        let before = std::mem::take(&mut self.status.conditions);
        let generation = self.seen.object.metadata.generation;
        let mut all = with_transitions(self.conditions, &before, generation);
        for old in before {
            let is_gone = old.type_ == RESTORE_CHECKED && self.seen.object.spec.check.is_none();
            if !is_gone && !all.iter().any(|new| new.type_ == old.type_) {
                all.push(old);
            }
        }
        sort(&mut all);
        self.status.conditions = all;
        Decision {
            status: self.status,
            step,
            needs_more,
        }
    }
}

/// The decision about a schedule of which nothing could be read: it is shown, unless the schedule is
/// suspended.
pub(in crate::router::kube::schedules) fn unread(
    object: &SnapshotSchedule,
    now: Timestamp,
    why: &str,
) -> Decision {
    let mut status = object.status.clone().unwrap_or_default();
    if !object.spec.suspend {
        let mut failed = condition(SCHEDULING, "False", READ_FAILED, why.into(), now);
        // The present spec has not been considered.
        let mut before = status.conditions.iter();
        let before = before.find(|one| one.type_ == SCHEDULING);
        failed.observed_generation = before.and_then(|one| one.observed_generation);
        replace(&mut status, failed);
    }
    Decision {
        status,
        step: None,
        needs_more: false,
    }
}

/// Replaces a condition. The time of its last transition stays if it has the same status.
pub(in crate::router::kube::schedules) fn replace(status: &mut ScheduleStatus, new: Condition) {
    let before = std::mem::take(&mut status.conditions);
    let generation = new.observed_generation;
    status.conditions = with_transitions(vec![new], &before, generation);
    let others = before.into_iter();
    let is_other = |one: &Condition| one.type_ != status.conditions[0].type_;
    let others: Vec<_> = others.filter(is_other).collect();
    status.conditions.extend(others);
    sort(&mut status.conditions);
}

fn sort(conditions: &mut [Condition]) {
    conditions.sort_by_key(|one| CONDITIONS.iter().position(|type_| one.type_ == *type_));
}

pub(in crate::router::kube::schedules) fn condition(
    type_: &str,
    status: &str,
    reason: &str,
    message: String,
    now: Timestamp,
) -> Condition {
    Condition {
        last_transition_time: Time(now),
        message,
        observed_generation: None,
        reason: reason.into(),
        status: status.into(),
        type_: type_.into(),
    }
}

/// The newest set that is not of the future.
fn newest(sets: &[Set], now: Timestamp, is_meant: impl Fn(&Set) -> bool) -> Option<&Set> {
    let sets = sets.iter().filter(|set| set.slot <= now && is_meant(set));
    sets.max_by_key(|set| set.slot)
}

pub(in crate::router::kube::schedules) fn newest_good(
    sets: &[Set],
    now: Timestamp,
) -> Option<&Set> {
    newest(sets, now, Set::is_good)
}

/// The condition of the newest sets: its status, its reason and a message.
fn cut(
    newest: &[Option<&Set>],
    overdue: Option<Timestamp>,
    now: Timestamp,
) -> (&'static str, &'static str, String) {
    let mut pending = newest.iter().flatten().filter(|set| !set.is_good());
    let failed = |set: &&&Set| {
        let is_late = now.duration_since(set.created) > CUT_TIMEOUT;
        set.error.is_some() || is_late
    };
    if let Some(set) = pending.clone().find(failed) {
        let why = set.error.as_deref().unwrap_or("it is not ready");
        return ("False", "NotReady", format!("{}: {why}", set.name));
    }
    if pending.next().is_some() {
        return ("Unknown", "InProgress", String::new());
    }
    match overdue {
        Some(slot) if now.duration_since(slot) > CUT_TIMEOUT => {
            ("False", "Missed", format!("there is no set of {slot}"))
        }
        Some(_) => ("Unknown", "InProgress", String::new()),
        None if newest.iter().any(Option::is_none) => ("Unknown", "NoneYet", String::new()),
        None => ("True", "Ready", String::new()),
    }
}

/// A duration as people read it.
fn delay(delay: SignedDuration) -> String {
    match delay.as_secs() {
        seconds if seconds < 120 => format!("{seconds}s"),
        seconds if seconds < 2 * 60 * 60 => format!("{}m", seconds / 60),
        seconds => format!("{}h", seconds / 60 / 60),
    }
}
