//! The snapshots of a schedule, and its slots without one, as a lane on a time axis.

use jiff::Timestamp;
use serde::Serialize;

use super::list::{Listed, MAX_LISTED};
use super::text::{When, permille, shown};
use super::world::{Cut, CutState, Schedule};

/// Group snapshots, or snapshots of one claim.
#[derive(Clone, Debug, Serialize)]
pub struct Lane {
    /// The claim; `None` for group snapshots.
    pub claim: Option<String>,
    /// The newest snapshots and skipped slots, the newest first.
    pub cuts: Listed<CutRow>,
    /// Where the lane is drawn as overdue, of 1000.
    #[serde(skip)]
    pub(super) overdue_x: Option<u64>,
}

/// A snapshot, or a slot that was skipped.
#[derive(Clone, Debug, Serialize)]
pub struct CutRow {
    /// Empty for a slot that was skipped.
    pub name: String,
    pub at: When,
    /// `application`, `filesystem` or `crash`; `unknown` if it is none of them.
    pub level: &'static str,
    /// Milliseconds.
    pub frozen_ms: Option<u64>,
    /// Milliseconds.
    pub held_ms: Option<u64>,
    /// `skipped` for a slot without a snapshot.
    pub state: &'static str,
    pub error: Option<String>,
    /// Its place on the lane, of 1000.
    #[serde(skip)]
    pub(super) x: u64,
}

/// The lane of these snapshots of a schedule.
pub(super) fn lane(
    claim: Option<&str>,
    cuts: &[&Cut],
    schedule: Option<&Schedule>,
    now: Timestamp,
) -> Lane {
    let skipped = schedule.into_iter().flat_map(|schedule| &schedule.skipped);
    let skipped = skipped.map(|slot| (*slot, None));
    let mut all: Vec<(Timestamp, Option<&Cut>)> = skipped.collect();
    all.extend(cuts.iter().map(|cut| (cut.at, Some(*cut))));
    let key = |(at, cut): &(Timestamp, Option<&Cut>)| (*at, cut.map(|cut| cut.name.clone()));
    all.sort_by_key(|one| std::cmp::Reverse(key(one)));
    let count = all.len();
    all.truncate(MAX_LISTED);
    let overdue = schedule.and_then(|schedule| schedule.overdue);
    let begin = all.last().map(|(at, _)| *at);
    let begin = begin.into_iter().chain(overdue).min().unwrap_or(now);
    let place = |at: Timestamp| {
        let seconds = |from: Timestamp, to: Timestamp| to.duration_since(from).as_secs();
        let part = |seconds: i64| u64::try_from(seconds).unwrap_or(0);
        permille(part(seconds(begin, at)), part(seconds(begin, now)))
    };
    let row = |(at, cut): &(Timestamp, Option<&Cut>)| CutRow {
        name: cut.map(|cut| shown(&cut.name)).unwrap_or_default(),
        at: When::new(*at, now),
        level: level(cut.and_then(|cut| cut.level.as_deref())),
        frozen_ms: cut.and_then(|cut| cut.frozen_ms),
        held_ms: cut.and_then(|cut| cut.held_ms),
        state: cut.map_or("skipped", |cut| state(cut.state)),
        error: cut.and_then(|cut| cut.error.as_deref()).map(shown),
        x: place(*at),
    };
    Lane {
        claim: claim.map(shown),
        cuts: Listed {
            first: all.iter().map(row).collect(),
            count,
        },
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
