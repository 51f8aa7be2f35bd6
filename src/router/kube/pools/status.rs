//! The Pool objects as a controller: their status follows from what agents report, and a pool whose
//! node is gone for good is marked as lost.
//!
//! Everything is decided from memory. The writes are in [`reconciler`].

mod counted;
mod observation;
mod place;
mod reconciler;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::evacuation::remaining::{self, Checked};
use super::object::{Health, Pool, PoolOrphans, PoolStatus};
use super::requests::progress::{self, PoolRequests};
use super::{running_copies, usage};
use crate::agent::DescribeResponse;
use crate::model::PoolId;
use crate::router::checked::MAX_POOLS;
use crate::router::kube::reconcile::with_transitions;
use observation::{Observation, keep_unreported};
pub(in crate::router::kube) use reconciler::PoolController;

/// The default of [`Options::unreachable_after`](crate::router::kube::Options::unreachable_after). An
/// agent that is restarted is back sooner.
pub(in crate::router::kube) const UNREACHABLE_AFTER: SignedDuration = SignedDuration::from_secs(30);
/// Numbers that change all the time are written at most this often.
const USAGE_UPDATE_INTERVAL: SignedDuration = SignedDuration::from_secs(60);

/// The last answer of an agent.
#[derive(Clone, Debug)]
pub struct Report {
    pub node: String,
    /// Its last answer, and when it came.
    pub seen: Option<(Timestamp, Arc<DescribeResponse>)>,
    /// Why it cannot be reached now; `None` if it can.
    pub problem: Option<String>,
    /// It can be reached, and what it reports of itself is refused, for the reason in `problem`.
    pub is_refused: bool,
}

impl Report {
    /// Its answer, if it can be reached, or has answered after `silent_since`.
    pub(super) fn fresh(
        &self,
        silent_since: Timestamp,
    ) -> Option<(Timestamp, &Arc<DescribeResponse>)> {
        let (at, answer) = self.seen.as_ref()?;
        let fresh = self.problem.is_none() || *at > silent_since;
        fresh.then_some((*at, answer))
    }

    /// The home that it reports, if it can be reached and has one.
    pub(in crate::router::kube) fn home(&self, silent_since: Timestamp) -> Option<&str> {
        let (_, answer) = self.fresh(silent_since)?;
        Some(answer.home.as_str()).filter(|home| !home.is_empty())
    }
}

/// What is in memory in one pass.
#[derive(Debug)]
pub struct PoolStatuses {
    /// All agents.
    pub reports: Vec<Report>,
    /// All Pool objects of this driver.
    pub pools: BTreeMap<PoolId, Pool>,
    /// The number of PersistentVolumes of each pool that name each home.
    pub homes: BTreeMap<PoolId, BTreeMap<String, usize>>,
    /// Names of pods that keep the disks of pools, by UID.
    pub pods: BTreeMap<String, String>,
    /// Names of all Node objects.
    pub nodes: BTreeSet<String>,
    /// What is left in pools that are being emptied.
    pub evacuations: BTreeMap<PoolId, Checked>,
    /// How far requests about pools are.
    pub requests: PoolRequests,
    /// When this router has checked the orphans of a pool, and what its status shows of them.
    pub orphans: BTreeMap<PoolId, (Time, Option<PoolOrphans>)>,
    /// A pool is marked as lost after its node and its agent have been gone for this time.
    pub lost_after: Option<Duration>,
    /// The pools of an agent are unreachable after it has been silent for this time.
    pub unreachable_after: SignedDuration,
    /// When this router began to lead. Agents that it has not heard of yet may be well.
    pub leads_since: Timestamp,
    /// The time of the pass.
    pub now: Timestamp,
}

/// A pool that has an object, or that an agent reports.
#[derive(Debug)]
pub struct ObservedPool {
    id: PoolId,
    /// Reports of it that are fresh.
    reported: Vec<Observation>,
    all: Arc<PoolStatuses>,
}

impl fmt::Display for ObservedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pool {}", self.id)
    }
}

/// What is to be written about a pool.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    pub id: PoolId,
    /// It has no object yet.
    pub is_new: bool,
    /// Its new status.
    pub status: PoolStatus,
    /// It is to be marked as lost, for this reason.
    pub lose: Option<String>,
    /// Its health was another before, so an event is recorded.
    pub turned: bool,
    /// A person has named this node as the pool's, and it reports the pool: `spec.node` is to be
    /// removed.
    pub handed_over: bool,
}

impl PoolStatuses {
    /// All pools of this pass.
    pub fn observed(self) -> Vec<ObservedPool> {
        let mut reported: BTreeMap<PoolId, Vec<Observation>> = BTreeMap::new();
        for id in self.pools.keys() {
            reported.insert(*id, Vec::new());
        }
        for report in &self.reports {
            let Some((at, answer)) = report.fresh(self.now - self.unreachable_after) else {
                continue;
            };
            for (index, pool) in answer.pools.iter().enumerate() {
                if let Ok(id) = pool.id.parse() {
                    reported.entry(id).or_default().push(Observation {
                        at,
                        answer: Arc::clone(answer),
                        index,
                    });
                }
            }
        }
        let all = Arc::new(self);
        let pools = reported.into_iter().map(|(id, reported)| ObservedPool {
            id,
            reported,
            all: Arc::clone(&all),
        });
        pools.collect()
    }

    /// What is to be written about a pool now; `None` if its object has that already.
    fn change(&self, id: PoolId, by: &[Observation]) -> Option<Change> {
        let before = self.pools.get(&id);
        let last = before.and_then(Pool::known).map(|known| known.node);
        let last = last.filter(|node| !node.is_empty());
        let (shows, claims) = self.shows(last.as_deref(), by);
        // The object of a pool that is only remembered is not created again after a person has
        // deleted it.
        if before.is_none() && (shows.is_empty() || self.has_enough(shows[0])) {
            return None;
        }
        // Only the node that had the pool can report that its volumes are gone.
        let is_its = |observation: &&Observation| {
            let node = &observation.answer.node_name;
            last.as_ref().is_none_or(|last| last == node)
        };
        let forgets = || by.iter().find(is_its);
        let mut status = match shows.first().copied().or_else(forgets) {
            Some(observation) => observation.status(self.strays(id, observation), &self.pods),
            None => self.unobserved(before?)?,
        };
        if !claims.is_empty() {
            claimed(&mut status, id, &claims);
        }
        if shows.len() > 1 {
            // It is not known which node has it, and the router does not guess.
            status.node = String::new();
            status.health = Health::Conflict;
            let nodes: Vec<_> = shows
                .iter()
                .map(|one| one.answer.node_name.as_str())
                .collect();
            status.message = format!(
                "nodes {} report this pool, so it receives no calls; remove it from all but one node",
                nodes.join(" and ")
            );
        }
        self.finish(id, before, status, !shows.is_empty())
    }

    /// Whether a node has as many Pool objects as one may have.
    fn has_enough(&self, observation: &Observation) -> bool {
        let of_node = |pool: &&Pool| {
            let status = pool.status.as_ref();
            status.is_some_and(|status| status.node == observation.answer.node_name)
        };
        self.pools.values().filter(of_node).count() >= MAX_POOLS
    }

    /// PersistentVolumes of a pool that name another home than that of its node.
    fn strays(&self, pool: PoolId, observation: &Observation) -> usize {
        let homes = self.homes.get(&pool).into_iter().flatten();
        let others = homes.filter(|(home, _)| **home != observation.answer.home);
        others.map(|(_, volumes)| volumes).sum()
    }

    /// The status of a pool that no agent reports: as it was last seen. `None` while it is too
    /// early to call the pool unreachable.
    fn unobserved(&self, before: &Pool) -> Option<PoolStatus> {
        let mut status = before.status.clone()?;
        let its = self
            .reports
            .iter()
            .find(|report| report.node == status.node);
        let since_start = self.now.duration_since(self.leads_since);
        status.health = Health::Unreachable;
        status.message = match its {
            Some(Report {
                problem: Some(problem),
                seen,
                ..
            }) => {
                // An agent at a new address, as after each upgrade, was heard of at its old one.
                let heard = status.last_seen.as_ref().is_some_and(|seen| {
                    self.now.duration_since(seen.0) < USAGE_UPDATE_INTERVAL + self.unreachable_after
                });
                if seen.is_none() && (since_start < self.unreachable_after || heard) {
                    return None;
                }
                if let Some((at, _)) = seen {
                    let at = whole(*at);
                    status.last_seen = status.last_seen.max(Some(at));
                }
                format!(
                    "the agent of node {} cannot be reached: {problem}",
                    status.node
                )
            }
            Some(Report { seen: None, .. }) => return None,
            Some(Report { seen: Some(_), .. }) => format!(
                "the agent of node {} answers but does not report this pool; is its disk present?",
                status.node
            ),
            None if since_start < self.unreachable_after => return None,
            None => format!("node {} has no agent", status.node),
        };
        Some(status)
    }

    /// Adds what does not come from agents; `None` if nothing is to be written.
    fn finish(
        &self,
        id: PoolId,
        before: Option<&Pool>,
        mut status: PoolStatus,
        is_shown: bool,
    ) -> Option<Change> {
        let old = before.and_then(|pool| pool.status.as_ref());
        let is_there = status.node.is_empty() || self.nodes.contains(&status.node);
        let gone_since = old.and_then(|old| old.node_gone_since.clone());
        status.node_gone_since = (!is_there).then(|| gone_since.unwrap_or_else(|| whole(self.now)));
        if let Some(old) = old {
            keep_unreported(&mut status, old);
        }
        status.orphans = self.shown_orphans(id, old);
        self.sample_usage(&mut status, old, is_shown);
        status.placed_since = self.placed_since(&status, old, is_shown);
        let checked = before
            .and_then(|pool| remaining::shown(pool, self.evacuations.get(&id), whole(self.now)));
        let (evacuation, condition) = checked.unzip();
        status.evacuation = evacuation.flatten();
        status
            .conditions
            .retain(|one| one.type_ != remaining::EVACUATED);
        status.conditions.extend(condition);
        status.conditions.retain(|one| !progress::is_own(one));
        let requests = before.map(|pool| progress::shown(pool, &self.requests, &whole(self.now)));
        status.conditions.extend(requests.into_iter().flatten());
        if !status.conditions.is_empty() {
            let earlier = old.map_or(&[][..], |old| &old.conditions);
            let generation = before.and_then(|pool| pool.metadata.generation);
            status.conditions = with_transitions(status.conditions, earlier, generation);
        }
        let mut lost = before.is_some_and(|pool| pool.spec.lost);
        let lose = (!lost).then(|| self.find_loss_reason(&status)).flatten();
        lost |= lose.is_some();
        match (lost, is_shown && status.health != Health::Forgotten) {
            (true, true) => {
                status.health = Health::Quarantined;
                status.message = format!(
                    "it is marked as lost, but node {} reports it: it is not used until spec.lost is set to false, or its disk is removed",
                    status.node
                );
            }
            (true, false) => {
                status.health = Health::Lost;
                status.message = "it is marked as lost: its volumes count as deleted".into();
            }
            (false, _) => {}
        }
        let turned = old.is_none_or(|old| old.health != status.health);
        status.since = match old {
            Some(old) if !turned => old.since.clone(),
            Some(_) | None => Some(whole(self.now)),
        };
        let mark = before.and_then(|pool| pool.spec.node.as_ref());
        let change = Change {
            id,
            handed_over: mark == Some(&status.node),
            is_new: before.is_none(),
            turned: turned && !(old.is_none() && status.health == Health::Healthy),
            lose,
            status,
        };
        self.is_worth_it(old, &change).then_some(change)
    }

    /// Adds what is used of it, and when it is full at that rate.
    fn sample_usage(&self, status: &mut PoolStatus, old: Option<&PoolStatus>, is_shown: bool) {
        let is_well = is_shown && status.health == Health::Healthy;
        let is_used = is_shown && matches!(status.health, Health::Healthy | Health::Degraded);
        let used = status.used_bytes();
        let samples = old.map_or(&[][..], |old| &old.usage);
        let now = whole(self.now);
        status.usage = usage::sampled(samples, now.clone(), is_well.then_some(used));
        let full = usage::full_at(&status.usage, now.0, used, status.available_bytes);
        status.full_at = full.filter(|_| is_used).map(whole);
    }

    /// Why the policy marks it as lost.
    fn find_loss_reason(&self, status: &PoolStatus) -> Option<String> {
        let after = SignedDuration::try_from(self.lost_after?).ok()?;
        let gone = |since: &Option<Time>| {
            let since = since.as_ref()?;
            Some(self.now.duration_since(since.0) >= after)
        };
        let both = gone(&status.node_gone_since)? && gone(&status.last_seen)?;
        (both && status.health == Health::Unreachable).then(|| {
            format!(
                "node {} and its agent have been gone for {}",
                status.node,
                in_words(after)
            )
        })
    }

    /// Whether it is worth a write. Numbers that change all the time are written at most once a
    /// minute, and `lastSeen` alone once a minute too, which shows people that the router is at work.
    fn is_worth_it(&self, old: Option<&PoolStatus>, change: &Change) -> bool {
        let Some(old) = old else {
            return true;
        };
        let of_the_spec = |status: &PoolStatus| {
            let all = status.conditions.iter();
            let is_one =
                |one: &&Condition| one.type_ == remaining::EVACUATED || progress::is_own(one);
            all.filter(is_one).cloned().collect()
        };
        let steady = |status: &PoolStatus| PoolStatus {
            capacity: String::new(),
            available: String::new(),
            available_bytes: 0,
            promised_bytes: 0,
            volumes: 0,
            snapshots: 0,
            last_seen: None,
            // The CRD of the previous release does not have them, so the API server drops them.
            file_system: String::new(),
            mount: String::new(),
            shares_blocks: None,
            placed_since: None,
            orphans: None,
            usage: Vec::new(),
            images: None,
            growth: None,
            full_at: None,
            frozen: Vec::new(),
            copies: None,
            conditions: of_the_spec(status),
            ..status.clone()
        };
        if change.lose.is_some() || change.handed_over || steady(old) != steady(&change.status) {
            return true;
        }
        let since = old
            .last_seen
            .as_ref()
            .map(|seen| self.now.duration_since(seen.0));
        let copies = [old, &change.status].map(|status| status.copies.as_ref());
        running_copies::are_worth_it(copies[0], copies[1], since)
            || old != &change.status && since.is_none_or(|since| since >= USAGE_UPDATE_INTERVAL)
    }
}

/// Names the nodes that report a pool besides the one that has it.
fn claimed(status: &mut PoolStatus, id: PoolId, claims: &[&str]) {
    if status.health == Health::Healthy {
        status.health = Health::Degraded;
    }
    let and = if status.message.is_empty() { "" } else { "; " };
    status.message = format!(
        "{}{and}node {} also reports it, which is ignored: if its disk was moved there, run slackwater pool hand-over {id} --to NODE",
        status.message,
        claims.join(" and ")
    );
}

/// In hours, or in minutes if these are not whole hours.
fn in_words(time: SignedDuration) -> String {
    match time.as_mins() {
        minutes if minutes % 60 == 0 => format!("{} hours", minutes / 60),
        minutes => format!("{minutes} minutes"),
    }
}

/// Rounded down to a second, as the API server stores it, so that what is read back is equal to what
/// was written.
fn whole(at: Timestamp) -> Time {
    Time(Timestamp::from_second(at.as_second()).unwrap_or(at))
}

/// Bytes with three digits, as quantities of Kubernetes are written.
fn bytes(bytes: i64) -> String {
    let units = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let mut value = bytes.max(0) as f64;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = match value {
        _ if unit == 0 => 0,
        value if value < 9.995 => 2,
        value if value < 99.95 => 1,
        _ => 0,
    };
    let text = format!("{value:.digits$}");
    let text = match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.'),
        false => &text,
    };
    format!("{text}{}", units[unit])
}

#[cfg(test)]
mod tests;
