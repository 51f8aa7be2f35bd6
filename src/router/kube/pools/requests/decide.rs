//! What is to be done about a request, from the reports of all agents. Pure functions.
//!
//! An agent finds out by itself whether the disk of the pool is there, so a request to the wrong node
//! changes nothing. What no agent can know is decided here: that no other node has the pool.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;

use super::progress::PoolRequest;
use crate::agent::pool::Presence;
use crate::agent::{DescribeResponse, Pool as Shown};
use crate::model::PoolId;
use crate::router::kube::pools::object::{Health, Pool};
use crate::router::kube::pools::status::Report;

/// What all requests of a pass have in common.
#[derive(Debug)]
pub(super) struct Look {
    /// All agents.
    pub(super) reports: Vec<Report>,
    /// Names of all Node objects.
    pub(super) nodes: BTreeSet<String>,
    /// An agent that cannot be reached and has not answered since then is silent.
    pub(super) silent_since: Timestamp,
}

/// A request.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) id: PoolId,
    pub(super) request: PoolRequest,
    /// The node that is to adopt or to forget the pool.
    pub(super) node: String,
    pub(super) pool: Pool,
    pub(super) look: Arc<Look>,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::router::kube) enum Decision {
    /// The agent is asked to do it.
    Ask,
    /// It is done, and the field is removed.
    Complete {
        /// The pool is handed over to the node at the same time.
        hand_over: bool,
    },
    /// Nothing, for this reason, until something has changed.
    Wait(&'static str, String),
}

pub(super) fn decide(seen: &Seen) -> Decision {
    let decided = match seen.request {
        PoolRequest::Adopt => seen.adopt(),
        PoolRequest::Forget => seen.forget(),
    };
    decided.unwrap_or_else(|(reason, message)| Decision::Wait(reason, message))
}

type Decided<T = Decision> = Result<T, (&'static str, String)>;

fn wait<T>(reason: &'static str, message: impl Into<String>) -> Decided<T> {
    Err((reason, message.into()))
}

impl Seen {
    fn adopt(&self) -> Decided {
        let node = &self.node;
        if self.pool.spec.lost {
            return wait(
                "Lost",
                "the pool is marked as lost; set spec.lost to false first",
            );
        }
        if let Some(other) = self.pool.spec.node.as_ref().filter(|other| *other != node) {
            return wait(
                "HandedOver",
                format!("spec.node names node {other}; remove it first"),
            );
        }
        if !self.look.nodes.contains(node) {
            return wait("NoNode", format!("there is no node {node}"));
        }
        let shown = self.shown(self.answer_of_its_agent()?);
        let shown = shown.filter(|pool| !pool.forgotten);
        let owner = self.owner();
        let is_served = shown.is_some_and(|pool| pool.refusal.is_empty());
        if is_served && owner == node {
            return Ok(Decision::Complete { hand_over: false });
        }
        if self.health() == Health::Conflict {
            return wait(
                "Conflict",
                "several nodes report the pool; remove it from all but one node first",
            );
        }
        self.check_others()?;
        self.check_owner()?;
        let Some(pool) = shown else {
            return wait(
                "NotReported",
                format!(
                    "node {node} does not report the pool; mount its disk there, and add it to the pools of the driver"
                ),
            );
        };
        match pool.presence() {
            _ if is_served => Ok(Decision::Complete {
                hand_over: self.pool.spec.node.is_none(),
            }),
            Presence::OtherHome => Ok(Decision::Ask),
            Presence::Absent | Presence::Unknown => wait(
                "NotPresent",
                format!(
                    "node {node} does not report that the disk of the pool waits there for its adoption (agents of earlier releases never do): {}",
                    pool.refusal
                ),
            ),
        }
    }

    fn forget(&self) -> Decided {
        let node = &self.node;
        // If the node that had the pool forgot it now, its volumes would count as deleted.
        let spec = &self.pool.spec;
        if PoolRequest::Adopt.node(spec).is_some() || spec.node.is_some() {
            return wait("Adopting", "it waits until another node has the pool");
        }
        let is_here = format!(
            "the pool is present on node {node}; it can be forgotten only after its disk was unmounted, or its thin pool deactivated"
        );
        match self.shown(self.answer_of_its_agent()?) {
            Some(pool) if pool.forgotten => match self.health() {
                Health::Forgotten | Health::Lost => Ok(Decision::Complete { hand_over: false }),
                _ if self.owner() != node => Ok(Decision::Complete { hand_over: false }),
                _ => wait("Completing", "the status of the pool does not show it yet"),
            },
            Some(pool) if pool.refusal.is_empty() => wait("Present", is_here),
            Some(pool) if pool.presence() == Presence::OtherHome => wait("Present", is_here),
            Some(_) | None => Ok(Decision::Ask),
        }
    }

    fn health(&self) -> Health {
        let status = self.pool.status.as_ref();
        status.map_or(Health::Unknown, |status| status.health)
    }

    /// The node that has the pool; empty if none is known.
    fn owner(&self) -> &str {
        let status = self.pool.status.as_ref();
        status.map_or("", |status| &status.node)
    }

    /// The last answer of an agent that is not silent.
    fn report_of(&self, node: &str) -> Option<&DescribeResponse> {
        let report = self.look.reports.iter().find(|one| one.node == node)?;
        let (_, answer) = report.fresh(self.look.silent_since)?;
        Some(answer)
    }

    fn shown<'a>(&self, answer: &'a DescribeResponse) -> Option<&'a Shown> {
        let id = self.id.to_string();
        answer.pools.iter().find(|pool| pool.id == id)
    }

    /// What the agent of the node reports, if it can be asked.
    fn answer_of_its_agent(&self) -> Decided<&DescribeResponse> {
        let node = &self.node;
        let report = self.look.reports.iter().find(|one| one.node == *node);
        match report {
            None => wait(
                "Unreachable",
                format!("node {node} has no agent of the driver"),
            ),
            Some(Report {
                problem: Some(why), ..
            }) => wait(
                "Unreachable",
                format!("the agent of node {node} cannot be reached: {why}"),
            ),
            Some(Report { seen: None, .. }) => wait(
                "Unknown",
                format!("the agent of node {node} has not answered yet"),
            ),
            Some(Report {
                seen: Some((_, answer)),
                ..
            }) => Ok(answer),
        }
    }

    /// No other node may serve the pool.
    fn check_others(&self) -> Decided<()> {
        let others = self.look.reports.iter();
        for other in others.filter(|one| one.node != self.node) {
            if other.seen.is_none() && other.problem.is_none() {
                return wait(
                    "Unknown",
                    format!("the agent of node {} has not answered yet", other.node),
                );
            }
            let answer = self.report_of(&other.node);
            let shown = answer.and_then(|answer| self.shown(answer));
            if shown.is_some_and(|pool| pool.refusal.is_empty()) {
                return wait(
                    "Served",
                    format!(
                        "node {} serves the pool; shut it down, or remove the disk from it",
                        other.node
                    ),
                );
            }
        }
        Ok(())
    }

    /// The node that has the pool must be the same, be unreachable, or miss the disk.
    fn check_owner(&self) -> Decided<()> {
        let owner = self.owner();
        if owner.is_empty() || owner == self.node {
            return Ok(());
        }
        let Some(answer) = self.report_of(owner) else {
            return match self.health() {
                Health::Unreachable => Ok(()),
                _ => wait(
                    "Unknown",
                    format!("it is not certain yet that node {owner} cannot be reached"),
                ),
            };
        };
        match self.shown(answer) {
            None => Ok(()),
            Some(pool) if pool.forgotten || pool.presence() == Presence::Absent => Ok(()),
            Some(pool) => wait(
                "NotMissing",
                format!(
                    "node {owner} has the pool, and does not report that its disk is missing there (agents of earlier releases never do): {}",
                    pool.refusal
                ),
            ),
        }
    }
}

#[cfg(test)]
mod tests;
