//! What agents report becomes the status of Pool objects: pure, from what is in memory.

mod observation;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use super::pool::{Health, Pool, PoolStatus};
use crate::agent::DescribeResponse;
use crate::model::PoolId;
use crate::router::checked::MOST_POOLS;
use observation::Observation;

/// An agent is silent for so long before its pools are called unreachable: one that is restarted
/// is back sooner.
const UNREACHABLE_AFTER: SignedDuration = SignedDuration::from_secs(30);
/// Numbers that go up and down are written no more often.
const USAGE_UPDATE_INTERVAL: SignedDuration = SignedDuration::from_secs(60);

/// What an agent has said last.
#[derive(Clone, Debug)]
pub struct Report {
    /// Its node.
    pub node: String,
    /// Its last answer, and when it came.
    pub seen: Option<(Timestamp, Arc<DescribeResponse>)>,
    /// Why it can't be reached now; `None` if it can.
    pub problem: Option<String>,
    /// It can be reached, and what it says of itself is refused: the problem.
    pub is_refused: bool,
}

impl Report {
    /// Its answer, if it can be reached, or could just now.
    fn fresh(&self, now: Timestamp) -> Option<(Timestamp, &DescribeResponse)> {
        let (at, answer) = self.seen.as_ref()?;
        let fresh = self.problem.is_none() || now.duration_since(*at) < UNREACHABLE_AFTER;
        fresh.then_some((*at, answer.as_ref()))
    }

    /// The home that it tells, if it can be reached and has one.
    pub(super) fn home(&self, now: Timestamp) -> Option<&str> {
        let (_, answer) = self.fresh(now)?;
        Some(answer.home.as_str()).filter(|home| !home.is_empty())
    }
}

/// What is in memory, and what follows from it.
pub struct PoolStatuses<'a> {
    /// All agents.
    pub reports: &'a [Report],
    /// All Pool objects of this driver.
    pub pools: &'a BTreeMap<PoolId, Pool>,
    /// How many PersistentVolumes of each pool name which home.
    pub homes: &'a BTreeMap<PoolId, BTreeMap<String, usize>>,
    /// Names of pods that keep the disks of pools, by UID.
    pub pods: &'a BTreeMap<String, String>,
    /// Names of all Node objects.
    pub nodes: &'a BTreeSet<String>,
    /// Mark a pool as lost after its node and its agent have been gone for so long.
    pub lost_after: Option<Duration>,
    /// When this router began to lead: agents that it hasn't heard of yet may be well.
    pub leads_since: Timestamp,
    /// Now.
    pub now: Timestamp,
}

/// What is to be written about a pool.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// The pool.
    pub id: PoolId,
    /// It has no object yet.
    pub is_new: bool,
    /// Its new status.
    pub status: PoolStatus,
    /// It's to be marked as lost, for this reason.
    pub lose: Option<String>,
    /// Its health was another before: tell people.
    pub turned: bool,
    /// A person has said that this node has it, and it's so: the mark is to be taken away.
    pub handed_over: bool,
}

impl PoolStatuses<'_> {
    /// What is to be written now: nothing that says the same as what is there.
    pub fn changes(&self) -> Vec<Change> {
        let mut shown: BTreeMap<PoolId, Vec<Observation<'_>>> = BTreeMap::new();
        for report in self.reports {
            let Some((at, answer)) = report.fresh(self.now) else {
                continue;
            };
            for pool in &answer.pools {
                if let Ok(id) = pool.id.parse() {
                    shown
                        .entry(id)
                        .or_default()
                        .push(Observation { at, answer, pool });
                }
            }
        }
        let all: BTreeSet<PoolId> = self.pools.keys().chain(shown.keys()).copied().collect();
        let each = all.into_iter().filter_map(|id| {
            let before = self.pools.get(&id);
            let by = shown.get(&id).map(Vec::as_slice).unwrap_or_default();
            let last = before.and_then(Pool::known).map(|known| known.node);
            let last = last.filter(|node| !node.is_empty());
            let (shows, claims) = self.shows(last.as_deref(), by);
            // Whoever deletes the object of a pool that is only remembered is done with it.
            if before.is_none() && (shows.is_empty() || self.has_enough(shows[0])) {
                return None;
            }
            // That its volumes are gone only the node says that had it.
            let is_its = |observation: &&Observation<'_>| {
                let node = &observation.answer.node_name;
                last.as_ref().is_none_or(|last| last == node)
            };
            let forgets = || by.iter().find(is_its);
            let mut status = match shows.first().copied().or_else(forgets) {
                Some(observation) => observation.status(self.strays(id, observation), self.pods),
                None => self.unobserved(before?)?,
            };
            if !claims.is_empty() {
                claimed(&mut status, id, &claims);
            }
            if shows.len() > 1 {
                // Whose it is isn't known, and is not guessed.
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
        });
        each.collect()
    }

    /// Those that count among the agents that show a pool, and the nodes of others that serve it.
    /// The node that had it last keeps it, as long as its agent shows it or can't be asked.
    fn shows<'a>(
        &self,
        last: Option<&str>,
        by: &'a [Observation<'a>],
    ) -> (Vec<&'a Observation<'a>>, Vec<&'a str>) {
        // One that forgets it shows nothing; and calls go to who serves it, though one that
        // misses its disk shows it too.
        let mut shows: Vec<_> = by
            .iter()
            .filter(|observation| !observation.pool.forgotten)
            .collect();
        if let Some(last) = last {
            let is_its = |observation: &&Observation<'_>| observation.answer.node_name == last;
            if shows.iter().any(is_its) || !self.has_given_up(last) {
                let claims = shows.iter().filter(|observation| !is_its(observation));
                let claims = claims.filter(|observation| observation.pool.refusal.is_empty());
                let claims = claims
                    .map(|observation| &*observation.answer.node_name)
                    .collect();
                shows.retain(is_its);
                return (shows, claims);
            }
        }
        if shows
            .iter()
            .any(|observation| observation.pool.refusal.is_empty())
        {
            shows.retain(|observation| observation.pool.refusal.is_empty());
        }
        (shows, Vec::new())
    }

    /// Whether the node that had a pool is gone, or its agent answers and knows all its pools.
    fn has_given_up(&self, node: &str) -> bool {
        let its = self.reports.iter().find(|report| report.node == node);
        let told = its.filter(|report| report.problem.is_none());
        let told = told.and_then(|report| report.fresh(self.now));
        let knows_all = told.is_some_and(|(_, told)| {
            let mut pools = told.pools.iter();
            pools.all(|pool| !pool.id.is_empty())
        });
        knows_all || !self.nodes.contains(node)
    }

    /// Whether a node has as many Pool objects as one may have.
    fn has_enough(&self, observation: &Observation<'_>) -> bool {
        let of_node = |pool: &&Pool| {
            let status = pool.status.as_ref();
            status.is_some_and(|status| status.node == observation.answer.node_name)
        };
        self.pools.values().filter(of_node).count() >= MOST_POOLS
    }

    /// PersistentVolumes of a pool that name another home than that of its node.
    fn strays(&self, pool: PoolId, observation: &Observation<'_>) -> usize {
        let homes = self.homes.get(&pool).into_iter().flatten();
        let others = homes.filter(|(home, _)| **home != observation.answer.home);
        others.map(|(_, volumes)| volumes).sum()
    }

    /// A pool that no agent shows: as it was last seen. Nothing while that may be too early.
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
                // At a new address, as after each upgrade, it was heard of at the old one.
                let heard = status.last_seen.as_ref().is_some_and(|seen| {
                    self.now.duration_since(seen.0) < USAGE_UPDATE_INTERVAL + UNREACHABLE_AFTER
                });
                if seen.is_none() && (since_start < UNREACHABLE_AFTER || heard) {
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
            None if since_start < UNREACHABLE_AFTER => return None,
            None => format!("node {} has no agent", status.node),
        };
        Some(status)
    }

    /// What doesn't come from agents; nothing if all is as it was.
    fn finish(
        &self,
        id: PoolId,
        before: Option<&Pool>,
        mut status: PoolStatus,
        is_shown: bool,
    ) -> Option<Change> {
        let old = before.and_then(|pool| pool.status.as_ref());
        let is_there = status.node.is_empty() || self.nodes.contains(&status.node);
        status.node_gone_since = match is_there {
            true => None,
            false => {
                let before = old.and_then(|old| old.node_gone_since.clone());
                before.or(Some(whole(self.now)))
            }
        };
        if let Some(old) = old {
            keep_ground(&mut status, old);
        }
        let mut lost = before.is_some_and(|pool| pool.spec.lost);
        let lose = (!lost).then(|| self.is_to_be_lost(&status)).flatten();
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

    /// Why the policy takes it for lost.
    fn is_to_be_lost(&self, status: &PoolStatus) -> Option<String> {
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

    /// What changes by itself all the time is written once a minute at most, and `lastSeen` alone
    /// once a minute too: it's what tells people that somebody looks.
    fn is_worth_it(&self, old: Option<&PoolStatus>, change: &Change) -> bool {
        let Some(old) = old else {
            return true;
        };
        let steady = |status: &PoolStatus| PoolStatus {
            capacity: String::new(),
            available: String::new(),
            available_bytes: 0,
            promised_bytes: 0,
            volumes: 0,
            snapshots: 0,
            last_seen: None,
            // A CRD of the release before doesn't keep them.
            file_system: String::new(),
            mount: String::new(),
            shares_blocks: None,
            conditions: Vec::new(),
            ..status.clone()
        };
        if change.lose.is_some() || change.handed_over || steady(old) != steady(&change.status) {
            return true;
        }
        let since = old
            .last_seen
            .as_ref()
            .map(|seen| self.now.duration_since(seen.0));
        old != &change.status && since.is_none_or(|since| since >= USAGE_UPDATE_INTERVAL)
    }
}

/// What only a pool that is served tells stays as it was; and a condition that is as it was has been
/// so since then.
fn keep_ground(status: &mut PoolStatus, old: &PoolStatus) {
    if status.file_system.is_empty() {
        status.file_system = old.file_system.clone();
        status.mount = old.mount.clone();
        status.shares_blocks = old.shares_blocks;
        status.conditions = old.conditions.clone();
    }
    for condition in &mut status.conditions {
        let mut before = old.conditions.iter();
        let same =
            before.find(|old| old.type_ == condition.type_ && old.status == condition.status);
        if let Some(same) = same {
            condition.last_transition_time = same.last_transition_time.clone();
        }
    }
}

/// Says which nodes show a pool beside the one that has it.
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

/// Hours, or minutes where it isn't whole hours.
fn in_words(time: SignedDuration) -> String {
    match time.as_mins() {
        minutes if minutes % 60 == 0 => format!("{} hours", minutes / 60),
        minutes => format!("{minutes} minutes"),
    }
}

/// To the second, as the API keeps it: so that what is read back is what was written.
fn whole(at: Timestamp) -> Time {
    Time(Timestamp::from_second(at.as_second()).unwrap_or(at))
}

/// Bytes in three digits, as quantities of Kubernetes are written.
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
