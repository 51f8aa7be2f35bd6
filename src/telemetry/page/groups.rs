//! Schedules with their snapshots.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Serialize;

use super::lanes::{Lane, lane};
use super::list::{Listed, MAX_LISTED, Search};
use super::text::{When, shown};
use super::world::{Cut, CutState, Schedule, World};

/// A schedule with its snapshots, or those of a namespace that no schedule has made.
#[derive(Clone, Debug, Serialize)]
pub struct Group {
    /// "namespace/name" of the schedule, or the namespace.
    pub name: String,
    pub is_scheduled: bool,
    pub is_suspended: bool,
    /// Its interval or cron expression.
    pub timetable: String,
    /// The newest good snapshot.
    pub last_cut: Option<When>,
    pub level: Option<String>,
    pub next_slot: Option<String>,
    /// The first slot whose time has come and that has no good snapshot.
    pub overdue: Option<When>,
    /// Slots that were skipped.
    pub missed: u64,
    /// Its conditions that report a problem.
    pub failing: Vec<String>,
    /// Its group snapshots, or those of each of its claims. All schedules of a page share 20 lanes of single
    /// claims, and each has at least one.
    pub lanes: Listed<Lane>,
}

/// A schedule, or `None` for snapshots that none has made, with its name and its snapshots.
type Found<'a> = (Option<&'a Schedule>, String, Vec<&'a Cut>);

/// All groups, those with a problem first.
pub(super) fn groups(world: &World, by: &Search) -> Listed<Group> {
    let mut found = found(world);
    found.retain(|(schedule, name, cuts)| {
        let namespace = schedule.map_or(name, |schedule| &schedule.namespace);
        by.finds(&[name]) || cuts.iter().any(|cut| is_claim_match(by, namespace, cut))
    });
    let is_well = |schedule: &Option<&Schedule>| {
        schedule.is_none_or(|it| it.failing.is_empty() && it.overdue.is_none())
    };
    found.sort_by(|a, b| (is_well(&a.0), &a.1).cmp(&(is_well(&b.0), &b.1)));
    let count = found.len();
    let mut room = MAX_LISTED;
    let first = found.into_iter().take(MAX_LISTED);
    let first = first.map(|(schedule, name, cuts)| {
        let lanes = lanes(schedule, &name, &cuts, by, room.max(1), world.now);
        let singles = lanes.first.iter().filter(|lane| lane.claim.is_some());
        room = room.saturating_sub(singles.count());
        group(schedule, &name, &cuts, lanes, world.now)
    });
    Listed {
        first: first.collect(),
        count,
    }
}

fn found(world: &World) -> Vec<Found<'_>> {
    let mut cuts = BTreeMap::<(Option<&str>, &str), Vec<&Cut>>::new();
    for cut in &world.cuts.all {
        let key = (cut.schedule.as_deref(), cut.namespace.as_str());
        cuts.entry(key).or_default().push(cut);
    }
    let schedules = world.schedules.iter().flatten();
    let mut found: Vec<Found<'_>> = Vec::new();
    for schedule in schedules {
        let key = (Some(schedule.uid.as_str()), schedule.namespace.as_str());
        let its = cuts.remove(&key).unwrap_or_default();
        let name = format!("{}/{}", schedule.namespace, schedule.name);
        found.push((Some(schedule), name, its));
    }
    // Those of deleted schedules are listed with those of their namespace.
    let mut others = BTreeMap::<&str, Vec<&Cut>>::new();
    for ((_, namespace), its) in cuts {
        others.entry(namespace).or_default().extend(its);
    }
    let others = others.into_iter();
    found.extend(others.map(|(namespace, its)| (None, namespace.to_string(), its)));
    found
}

fn is_claim_match(by: &Search, namespace: &str, cut: &Cut) -> bool {
    let claim = cut.claim.as_ref();
    claim.is_some_and(|claim| by.finds(&[&format!("{namespace}/{claim}")]))
}

/// The lane of the group snapshots, and one for each claim that has snapshots of its own.
fn lanes(
    schedule: Option<&Schedule>,
    name: &str,
    cuts: &[&Cut],
    by: &Search,
    room: usize,
    now: Timestamp,
) -> Listed<Lane> {
    let namespace = schedule.map_or(name, |schedule| &schedule.namespace);
    let mut each = BTreeMap::<Option<&str>, Vec<&Cut>>::new();
    let has_skipped = schedule.is_some_and(|it| it.is_group && !it.skipped.is_empty());
    if has_skipped {
        each.entry(None).or_default();
    }
    let is_found = |cut: &&&Cut| by.finds(&[name]) || is_claim_match(by, namespace, cut);
    for cut in cuts.iter().filter(is_found) {
        each.entry(cut.claim.as_deref()).or_default().push(cut);
    }
    let count = each.len();
    let first = each.into_iter().take(room);
    let first = first.map(|(claim, cuts)| lane(claim, &cuts, schedule, now));
    Listed {
        first: first.collect(),
        count,
    }
}

fn group(
    schedule: Option<&Schedule>,
    name: &str,
    cuts: &[&Cut],
    lanes: Listed<Lane>,
    now: Timestamp,
) -> Group {
    let ready = cuts.iter().filter(|cut| cut.state == CutState::Ready);
    let good = ready.max_by_key(|cut| (cut.at, &cut.name));
    let when = |at: Timestamp| When::new(at, now);
    let Some(schedule) = schedule else {
        return Group {
            name: shown(name),
            is_scheduled: false,
            is_suspended: false,
            timetable: String::new(),
            last_cut: good.map(|cut| when(cut.at)),
            level: good.and_then(|cut| cut.level.as_deref()).map(shown),
            next_slot: None,
            overdue: None,
            missed: 0,
            failing: Vec::new(),
            lanes,
        };
    };
    let failing = schedule.failing.iter().take(MAX_LISTED);
    Group {
        name: shown(name),
        is_scheduled: true,
        is_suspended: schedule.is_suspended,
        timetable: shown(&schedule.timetable),
        last_cut: schedule.last_cut.map(when),
        level: schedule.level.as_deref().map(shown),
        next_slot: schedule.next_slot.as_deref().map(shown),
        overdue: schedule.overdue.map(when),
        missed: schedule.missed,
        failing: failing.map(|(_, what)| shown(what)).collect(),
        lanes,
    }
}
