//! Group snapshots, as lanes of cuts on a time axis.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Serialize;

use super::list::{Listed, MAX_LISTED, Search};
use super::text::{When, permille, shown};
use super::world::{Cut, CutState, Schedule, World};

/// A schedule with its snapshots, or those of a namespace that no schedule has made.
#[derive(Clone, Debug, Serialize)]
pub struct Group {
    /// "namespace/name" of the schedule, or the namespace.
    pub name: String,
    pub is_scheduled: bool,
    /// Its snapshots are group snapshots. Others are not read for this page.
    pub is_group: bool,
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
    /// The newest of its group snapshots, the newest first.
    pub cuts: Listed<CutRow>,
    /// Where the lane is drawn as overdue, of 1000.
    #[serde(skip)]
    pub(super) overdue_x: Option<u64>,
}

/// A group snapshot.
#[derive(Clone, Debug, Serialize)]
pub struct CutRow {
    pub name: String,
    pub at: When,
    /// `application`, `filesystem` or `crash`; `unknown` if it is none of them.
    pub level: &'static str,
    /// Milliseconds.
    pub frozen_ms: Option<u64>,
    /// Milliseconds.
    pub held_ms: Option<u64>,
    pub state: &'static str,
    pub error: Option<String>,
    /// Its place on the lane, of 1000.
    #[serde(skip)]
    pub(super) x: u64,
}

/// All groups, those with a problem first.
pub(super) fn groups(world: &World, by: &Search) -> Listed<Group> {
    let mut cuts = BTreeMap::<(Option<&str>, &str), Vec<&Cut>>::new();
    for cut in &world.cuts.all {
        let key = (cut.schedule.as_deref(), cut.namespace.as_str());
        cuts.entry(key).or_default().push(cut);
    }
    let schedules = world.schedules.iter().flatten();
    let mut found: Vec<(Option<&Schedule>, String, Vec<&Cut>)> = Vec::new();
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
    found.retain(|(_, name, _)| by.finds(&[name]));
    let is_well = |schedule: &Option<&Schedule>| {
        schedule.is_none_or(|it| it.failing.is_empty() && it.overdue.is_none())
    };
    found.sort_by(|a, b| (is_well(&a.0), &a.1).cmp(&(is_well(&b.0), &b.1)));
    let count = found.len();
    let first = found.into_iter().take(MAX_LISTED);
    let first = first.map(|(schedule, name, cuts)| group(schedule, &name, cuts, world.now));
    Listed {
        first: first.collect(),
        count,
    }
}

fn group(schedule: Option<&Schedule>, name: &str, mut cuts: Vec<&Cut>, now: Timestamp) -> Group {
    cuts.sort_by(|a, b| (b.at, &b.name).cmp(&(a.at, &a.name)));
    let count = cuts.len();
    cuts.truncate(MAX_LISTED);
    let overdue = schedule.and_then(|schedule| schedule.overdue);
    let begin = cuts.last().map(|cut| cut.at);
    let begin = begin.into_iter().chain(overdue).min().unwrap_or(now);
    let place = |at: Timestamp| {
        let seconds = |from: Timestamp, to: Timestamp| to.duration_since(from).as_secs();
        let part = |seconds: i64| u64::try_from(seconds).unwrap_or(0);
        permille(part(seconds(begin, at)), part(seconds(begin, now)))
    };
    let rows = cuts.iter().map(|cut| CutRow {
        name: shown(&cut.name),
        at: When::new(cut.at, now),
        level: level(cut.level.as_deref()),
        frozen_ms: cut.frozen_ms,
        held_ms: cut.held_ms,
        state: state(cut.state),
        error: cut.error.as_deref().map(shown),
        x: place(cut.at),
    });
    let rows = Listed {
        first: rows.collect(),
        count,
    };
    let good = cuts.iter().find(|cut| cut.state == CutState::Ready);
    let when = |at: Timestamp| When::new(at, now);
    let Some(schedule) = schedule else {
        return Group {
            name: shown(name),
            is_scheduled: false,
            is_group: true,
            is_suspended: false,
            timetable: String::new(),
            last_cut: good.map(|cut| when(cut.at)),
            level: good.and_then(|cut| cut.level.as_deref()).map(shown),
            next_slot: None,
            overdue: None,
            missed: 0,
            failing: Vec::new(),
            cuts: rows,
            overdue_x: None,
        };
    };
    let failing = schedule.failing.iter().take(MAX_LISTED);
    Group {
        name: shown(name),
        is_scheduled: true,
        is_group: schedule.is_group,
        is_suspended: schedule.is_suspended,
        timetable: shown(&schedule.timetable),
        last_cut: schedule.last_cut.map(when),
        level: schedule.level.as_deref().map(shown),
        next_slot: schedule.next_slot.as_deref().map(shown),
        overdue: overdue.map(when),
        missed: schedule.missed,
        failing: failing.map(|(_, what)| shown(what)).collect(),
        cuts: rows,
        overdue_x: overdue.map(place),
    }
}

fn level(level: Option<&str>) -> &'static str {
    let known = ["application", "filesystem", "crash"];
    let found = known.into_iter().find(|known| Some(*known) == level);
    found.unwrap_or("unknown")
}

fn state(state: CutState) -> &'static str {
    match state {
        CutState::Ready => "ready",
        CutState::Unready => "not ready",
        CutState::Failed => "failed",
        CutState::Leaving => "being deleted",
    }
}
