//! File systems that are frozen for longer than a cut takes.

use jiff::Timestamp;
use serde::Serialize;

use super::list::{Listed, Search, limited};
use super::problems::is_stale;
use super::text::{Ahead, When, shown};
use super::world::{Frozen, Pool, World};

/// A file system that is frozen, or was when the agent of its node answered last.
#[derive(Clone, Debug, Serialize)]
pub struct FrozenRow {
    /// "namespace/name"; empty if it is not known.
    pub claim: String,
    /// The ID of the volume.
    pub volume: String,
    pub node: String,
    pub pool: String,
    pub since: When,
    /// When the freeze guard thaws it at the latest.
    pub until: Ahead,
    /// That time is over.
    pub is_overdue: bool,
    /// `held` by a driver or a freeze guard, or `orphaned`: the next sweep thaws it.
    pub state: &'static str,
    /// Its agent has not reported it for minutes.
    pub is_stale: bool,
    pub seen: Option<When>,
}

/// All of them, the oldest first.
pub(super) fn frozen(world: &World, by: &Search) -> Listed<FrozenRow> {
    let pools = world.pools.iter().filter(|pool| !pool.is_gone);
    let each = pools.flat_map(|pool| pool.frozen.iter().map(move |one| (pool, one)));
    let found = each.filter(|(pool, one)| {
        let claim = one.claim.as_deref().unwrap_or_default();
        by.finds(&[claim, &one.volume, &pool.id, &pool.name, &pool.node])
    });
    let mut all: Vec<(&Pool, &Frozen)> = found.collect();
    all.sort_by(|(_, a), (_, b)| (a.since, &a.volume).cmp(&(b.since, &b.volume)));
    let is_outdated = world.problem.is_some();
    limited(&all, |(pool, one)| row(pool, one, is_outdated, world.now))
}

fn row(pool: &Pool, one: &Frozen, is_outdated: bool, now: Timestamp) -> FrozenRow {
    FrozenRow {
        claim: one.claim.as_deref().map(shown).unwrap_or_default(),
        volume: shown(&one.volume),
        node: shown(&pool.node),
        pool: shown(&pool.name),
        since: When::new(one.since, now),
        until: Ahead::new(one.until, now),
        is_overdue: one.until < now,
        state: if one.is_held { "held" } else { "orphaned" },
        is_stale: is_outdated || is_stale(pool, now),
        seen: pool.seen.map(|seen| When::new(seen, now)),
    }
}
