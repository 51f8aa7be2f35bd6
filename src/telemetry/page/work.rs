//! Running work, with the time that it takes until it is done.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Serialize;

use super::list::{Listed, Search, limited};
use super::problems::{STALE, is_stale};
use super::text::{Ahead, When, duration, permille, shown, size};
use super::world::{Pool, Work, World};

/// The resource of evacuations, of which the moves of their volumes are parts, and of single copies.
const EVACUATION: &str = "pools";

/// Work that has not ended.
#[derive(Clone, Debug, Serialize)]
pub struct WorkRow {
    /// Its object, such as `volumemoves.slackwater.dev/away`.
    pub object: String,
    pub namespace: String,
    pub what: String,
    pub phase: String,
    pub message: String,
    /// When it began, if that is known.
    pub since: Option<When>,
    /// Its progress was not reported for minutes: nothing of it is its present state.
    pub is_stale: bool,
    /// When its progress was reported last, if that is known.
    pub reported: Option<When>,
    /// Volumes of which it is done; `None` if it is about one.
    pub done_volumes: Option<u64>,
    pub volumes: Option<u64>,
    pub done_bytes: u64,
    pub total_bytes: u64,
    /// Seconds until its bytes are copied, at the rate so far; `None` if that is not known.
    pub left_seconds: Option<i64>,
    /// It fails if it has not begun to change anything by then.
    pub deadline: Option<Ahead>,
    #[serde(skip)]
    pub(super) done: String,
    #[serde(skip)]
    pub(super) total: String,
    #[serde(skip)]
    pub(super) left: Option<String>,
    #[serde(skip)]
    pub(super) done_part: u64,
}

/// Running work: what has failed first, then evacuations, then what makes progress.
pub(super) fn work(world: &World, by: &Search) -> Listed<WorkRow> {
    let pools: BTreeMap<&str, &Pool> = world.pools.iter().map(|it| (it.id.as_str(), it)).collect();
    let found = |work: &&Work| by.finds(&[&work.namespace, &work.name, &work.what]);
    let found = world.work.iter().filter(found);
    let mut all: Vec<(&Work, Reported)> = found
        .map(|work| (work, reported(world, work, &pools)))
        .collect();
    all.sort_by_cached_key(|(work, reported)| {
        (
            work.failing.is_none(),
            work.resource != EVACUATION || work.is_copy,
            time_left(work, reported, world.now).is_none(),
            (work.resource, &work.namespace, &work.name, &work.what),
        )
    });
    limited(&all, |(work, reported)| row(work, reported, world.now))
}

fn row(work: &Work, reported: &Reported, now: Timestamp) -> WorkRow {
    let left = time_left(work, reported, now);
    WorkRow {
        object: shown(&format!("{}.slackwater.dev/{}", work.resource, work.name)),
        namespace: shown(&work.namespace),
        what: shown(&work.what),
        phase: shown(&work.phase),
        message: shown(&work.message),
        since: work.since.map(|since| When::new(since, now)),
        is_stale: reported.is_stale,
        reported: reported.at.map(|at| When::new(at, now)),
        done_volumes: work.volumes.map(|(done, _)| done),
        volumes: work.volumes.map(|(_, all)| all),
        done_bytes: work.done_bytes,
        total_bytes: work.total_bytes,
        left_seconds: left,
        deadline: work.deadline.map(|at| Ahead::new(at, now)),
        done: size(work.done_bytes),
        total: size(work.total_bytes),
        left: left.map(duration),
        done_part: permille(work.done_bytes, work.total_bytes),
    }
}

/// How old the progress of work is.
struct Reported {
    /// When it was reported last, if that is known.
    at: Option<Timestamp>,
    is_stale: bool,
}

fn reported(world: &World, work: &Work, pools: &BTreeMap<&str, &Pool>) -> Reported {
    let is_old = |at: Timestamp| world.now.duration_since(at) > STALE;
    let named = work.pools.iter();
    let stale = named
        .filter_map(|id| pools.get(id.as_str()).copied())
        .filter(|pool| is_stale(pool, world.now));
    let seen: Vec<Option<Timestamp>> = stale.map(|pool| pool.seen).collect();
    let oldest = seen.iter().copied().flatten().min();
    Reported {
        at: work.reported.into_iter().chain(oldest).min(),
        is_stale: world.problem.is_some() || !seen.is_empty() || work.reported.is_some_and(is_old),
    }
}

/// Seconds until all bytes are copied, at the mean rate since the copy began. What is outdated has no rate.
fn time_left(work: &Work, reported: &Reported, now: Timestamp) -> Option<i64> {
    let until = work.reported.unwrap_or(now);
    let since = until.duration_since(work.copying_since?).as_secs();
    let done = work.done_bytes.checked_sub(work.done_before)?;
    let left = work.total_bytes.checked_sub(work.done_bytes)?;
    if reported.is_stale || since <= 0 || done == 0 || left == 0 {
        return None;
    }
    let seconds = i128::from(left) * i128::from(since) / i128::from(done);
    i64::try_from(seconds).ok()
}
