//! The content of a status page, which is also its JSON twin.
//!
//! [`view`] computes it from a [`World`] alone. Its size does not grow with the cluster: each list has at
//! most [`MAX_LISTED`](super::list::MAX_LISTED) entries, and each text a bounded length. The search finds
//! the others.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Serialize;

use super::frozen::{FrozenRow, frozen};
use super::groups::{Group, groups};
use super::images::{self, GrowingRow, ImagesRow, Part};
use super::list::{Listed, Search, limited};
use super::problems::{Problem, is_stale, problems};
use super::text::{Ahead, When, permille, shown, size};
use super::work::{self, WorkRow};
use super::world::{Agent, Claim, Pool, World};

/// The content of a status page.
#[derive(Clone, Debug, Serialize)]
pub struct View {
    pub driver: String,
    /// When it was computed.
    pub at: String,
    /// What the lists were searched for; empty if for nothing.
    pub search: String,
    /// Objects could not be read, so everything may be outdated.
    pub is_outdated: bool,
    /// Whether anything is wrong.
    pub headline: String,
    pub problems: Listed<Problem>,
    /// File systems that are frozen for longer than a cut takes.
    pub frozen: Listed<FrozenRow>,
    pub pools: Listed<PoolRow>,
    /// The claims by which pools grow most.
    pub growing: Listed<GrowingRow>,
    /// The number of pools of which that is not known.
    pub pools_without_growth: usize,
    pub groups: Listed<Group>,
    /// Why snapshots are missing.
    pub groups_problem: Option<String>,
    pub nodes: Listed<NodeRow>,
    pub work: Listed<WorkRow>,
    /// Why work is missing.
    pub work_problem: Option<String>,
    /// Of a search; otherwise empty.
    pub claims: Listed<ClaimRow>,
}

#[derive(Clone, Debug, Serialize)]
pub struct PoolRow {
    pub id: String,
    pub name: String,
    pub node: String,
    pub health: &'static str,
    pub is_well: bool,
    /// It was not reported for minutes: nothing of it is its present state.
    pub is_stale: bool,
    pub seen: Option<When>,
    pub total_bytes: u64,
    pub used_bytes: u64,
    pub available_bytes: u64,
    pub promised_bytes: u64,
    pub volumes: u64,
    pub snapshots: u64,
    pub orphans: u64,
    /// When it is full, if it fills as it did in the last day.
    pub full: Option<Ahead>,
    /// What its images occupy; `None` if that is not known.
    pub images: Option<ImagesRow>,
    #[serde(skip)]
    pub(super) total: String,
    #[serde(skip)]
    pub(super) used: String,
    #[serde(skip)]
    pub(super) available: String,
    #[serde(skip)]
    pub(super) promised: String,
    /// What is used, in the bar.
    #[serde(skip)]
    pub(super) parts: Vec<Part>,
    /// Of 1000.
    #[serde(skip)]
    pub(super) promised_part: u64,
}

#[derive(Clone, Debug, Serialize)]
pub struct NodeRow {
    pub node: String,
    pub version: String,
    /// Its agent could be reached.
    pub is_up: bool,
    /// When its agent answered last.
    pub seen: Option<When>,
    pub pools: usize,
    /// Claims whose volume is in a pool of this node, and nowhere else.
    pub claims: usize,
    /// Snapshots in pools of this node.
    pub snapshots: u64,
    #[serde(skip)]
    pub(super) is_stale: bool,
}

/// A claim that the search has found.
#[derive(Clone, Debug, Serialize)]
pub struct ClaimRow {
    /// "namespace/name".
    pub claim: String,
    pub pool: String,
    pub pool_name: String,
    pub node: String,
}

/// The page of this state of a cluster, for a search.
pub fn view(world: &World, search: &str) -> View {
    let problems = problems(world);
    let by = Search::new(search);
    let is_outdated = world.problem.is_some();
    View {
        driver: shown(&world.driver),
        at: When::new(world.now, world.now).at,
        search: shown(search.trim()),
        is_outdated,
        headline: headline(&problems, is_outdated),
        problems: Listed::of(problems),
        frozen: frozen(world, &by),
        pools: pools(world, &by),
        growing: images::growing(world, &by),
        pools_without_growth: images::not_known(world),
        groups: groups(world, &by),
        groups_problem: groups_problem(world),
        nodes: nodes(world, &by),
        work: work::work(world, &by),
        work_problem: world.work_problem.as_deref().map(shown),
        claims: claims(world, &by),
    }
}

fn headline(problems: &[Problem], is_outdated: bool) -> String {
    match problems.len() {
        0 => "Nothing is wrong, as far as objects and agents report it.".into(),
        _ if is_outdated => "The state is not known completely.".into(),
        1 => "One thing is wrong.".into(),
        count => format!("{count} things are wrong."),
    }
}

fn groups_problem(world: &World) -> Option<String> {
    let cuts = &world.cuts;
    match &cuts.problem {
        Some(problem) => Some(shown(problem)),
        None if cuts.is_cut_off => Some(format!(
            "only the first {} snapshots of the cluster were read",
            cuts.all.len()
        )),
        None => None,
    }
}

fn pools(world: &World, by: &Search) -> Listed<PoolRow> {
    let found = |pool: &&Pool| by.finds(&[&pool.id, &pool.name, &pool.node, pool.health]);
    let mut all: Vec<&Pool> = world.pools.iter().filter(found).collect();
    let free = |pool: &Pool| permille(pool.available_bytes, pool.total_bytes);
    // The worst first, then the fullest.
    all.sort_by_key(|pool| {
        let is_bad = !pool.is_gone && (!pool.is_well || is_stale(pool, world.now));
        (!is_bad, pool.is_gone, free(pool), pool.id.as_str())
    });
    let row = |pool: &Pool| {
        let used = pool.total_bytes.saturating_sub(pool.available_bytes);
        let is_stale = world.problem.is_some() || is_stale(pool, world.now);
        let full_at = pool.full_at.filter(|_| !is_stale && !pool.is_gone);
        PoolRow {
            id: shown(&pool.id),
            name: shown(&pool.name),
            node: shown(&pool.node),
            health: pool.health,
            is_well: pool.is_well && !is_stale,
            is_stale,
            seen: pool.seen.map(|seen| When::new(seen, world.now)),
            total_bytes: pool.total_bytes,
            used_bytes: used,
            available_bytes: pool.available_bytes,
            promised_bytes: pool.promised_bytes,
            volumes: pool.volumes,
            snapshots: pool.snapshots,
            orphans: pool.orphans,
            full: full_at.map(|at| Ahead::new(at, world.now)),
            images: images::images(world, pool),
            total: size(pool.total_bytes),
            used: size(used),
            available: size(pool.available_bytes),
            promised: size(pool.promised_bytes),
            parts: images::bar(pool),
            promised_part: permille(pool.promised_bytes, pool.total_bytes),
        }
    };
    limited(&all, |pool| row(pool))
}

fn nodes(world: &World, by: &Search) -> Listed<NodeRow> {
    let mut rows = BTreeMap::<&str, NodeRow>::new();
    for agent in world.agents.iter().filter(|it| by.finds(&[&it.node])) {
        rows.insert(&agent.node, node_row(&agent.node, Some(agent), world.now));
    }
    // A node whose agent is gone still has its pools.
    let pools = world.pools.iter();
    let pools: Vec<&Pool> = pools
        .filter(|pool| !pool.is_gone && !pool.node.is_empty() && by.finds(&[&pool.node]))
        .collect();
    let mut node_of = BTreeMap::<&str, &str>::new();
    for pool in pools {
        let row = rows.entry(&pool.node);
        let row = row.or_insert_with(|| node_row(&pool.node, None, world.now));
        row.pools += 1;
        row.snapshots += pool.snapshots;
        node_of.insert(&pool.id, &pool.node);
    }
    for claim in &world.claims {
        let node = node_of.get(claim.pool.as_str());
        if let Some(row) = node.and_then(|node| rows.get_mut(*node)) {
            row.claims += 1;
        }
    }
    let mut all: Vec<NodeRow> = rows.into_values().collect();
    // Those that cannot be reached first, then those with most to lose.
    all.sort_by_key(|row| (row.is_up, Reverse(row.claims)));
    Listed::of(all)
}

fn node_row(node: &str, agent: Option<&Agent>, now: Timestamp) -> NodeRow {
    let is_up = agent.is_some_and(|agent| agent.problem.is_none() && agent.seen.is_some());
    NodeRow {
        node: shown(node),
        version: agent.map_or(String::new(), |agent| shown(&agent.version)),
        is_up,
        seen: agent
            .and_then(|agent| agent.seen)
            .map(|seen| When::new(seen, now)),
        pools: 0,
        claims: 0,
        snapshots: 0,
        is_stale: !is_up,
    }
}

fn claims(world: &World, by: &Search) -> Listed<ClaimRow> {
    if by.is_empty() {
        return Listed::of([]);
    }
    let pools: BTreeMap<&str, &Pool> = world.pools.iter().map(|it| (it.id.as_str(), it)).collect();
    let of = |claim: &Claim| pools.get(claim.pool.as_str()).copied();
    let found = |claim: &&Claim| {
        let (name, node) = of(claim).map_or(("", ""), |pool| (&pool.name, &pool.node));
        by.finds(&[&claim.name, &claim.pool, name, node])
    };
    let all: Vec<&Claim> = world.claims.iter().filter(found).collect();
    limited(&all, |claim| {
        let pool = of(claim);
        ClaimRow {
            claim: shown(&claim.name),
            pool: shown(&claim.pool),
            pool_name: pool.map_or(String::new(), |pool| shown(&pool.name)),
            node: pool.map_or(String::new(), |pool| shown(&pool.node)),
        }
    })
}
