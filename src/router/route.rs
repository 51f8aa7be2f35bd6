//! From an ID to the agent that serves its pool.

use std::sync::Arc;

use tonic::Code;

use super::Router;
use super::agents::{Agent, ShownPool};
use super::cluster::KnownPool;
use crate::error::{Error, Kind, Result};
use crate::model::{PoolId, VolumeId};
use crate::service::Rpc;

/// Where calls about a pool are sent.
#[derive(Clone)]
pub(super) enum Route {
    /// To this agent, which has answered recently.
    Agent(Arc<Agent>),
    /// Nowhere, because an administrator has marked the pool as lost. Contains a description of the
    /// pool.
    Lost(String),
}

/// Why an ID has no owner.
pub(super) enum Nowhere {
    /// It is not an ID of this driver.
    NotAnId,
    /// Its pool is marked as lost. Contains a description of the pool.
    Lost(String),
}

/// The owner of an ID.
pub(super) enum Owner {
    Agent(Arc<Agent>),
    /// None, permanently.
    Nowhere(Nowhere),
}

impl Router {
    /// The owner of the ID of a volume or snapshot.
    pub(super) async fn owner(&self, id: &str) -> Result<Owner> {
        let Ok(parsed) = id.parse::<VolumeId>() else {
            return Ok(Owner::Nowhere(Nowhere::NotAnId));
        };
        Ok(match self.route(parsed.pool).await? {
            Route::Agent(agent) => Owner::Agent(agent),
            Route::Lost(pool) => Owner::Nowhere(Nowhere::Lost(pool)),
        })
    }

    /// Where calls about a pool are sent. If no agent reports the pool, all agents are asked again;
    /// if still none does, the error names the node that had it last. It never returns "nowhere"
    /// for that reason.
    pub(super) async fn route(&self, pool: PoolId) -> Result<Route> {
        if self.cluster.is_lost(pool) {
            return Ok(Route::Lost(self.in_words(pool)));
        }
        let mut showing = self.agents.showing(pool);
        if showing.is_empty() {
            self.agents.ask_all().await;
            showing = self.agents.showing(pool);
        }
        let Some(agent) = self.the_one(pool, &showing).await? else {
            self.agents.all_asked()?;
            return Err(self.unreported(pool));
        };
        agent
            .reachable()
            .await
            .map_err(|error| self.behind(pool, &error))?;
        Ok(Route::Agent(agent))
    }

    /// The agent that serves a pool. For a lost pool, the error is final.
    pub async fn agent_of(&self, pool: PoolId) -> Result<Arc<Agent>> {
        match self.route(pool).await? {
            Route::Agent(agent) => Ok(agent),
            Route::Lost(pool) => Err(lost(&pool)),
        }
    }

    /// Chooses among the agents that report a pool. The node that had it last, as recorded in the
    /// cluster or set by an administrator, keeps it as long as its agent reports it or cannot be
    /// asked. Another node gets it once that agent answers without reporting it, or once the Node
    /// is deleted.
    pub(super) async fn the_one(
        &self,
        pool: PoolId,
        showing: &[(Arc<Agent>, ShownPool)],
    ) -> Result<Option<Arc<Agent>>> {
        let Some(last) = self.last_node(pool) else {
            return self.best(pool, showing);
        };
        let (its, others): (Vec<_>, Vec<_>) = showing
            .iter()
            .cloned()
            .partition(|(agent, _)| agent.node() == last);
        // Only the node that had the pool can report that its volumes are gone.
        let mut others = others;
        others.retain(|(_, shown)| !shown.forgotten);
        let its = its.into_iter().next();
        if others.is_empty() {
            return Ok(its.map(|(agent, _)| agent));
        }
        if self.has_given_up(&last, pool).await? {
            return self.best(pool, &others);
        }
        if let Some((agent, shown)) = its
            && !shown.forgotten
            && agent.check().is_ok()
        {
            return Ok(Some(agent));
        }
        let claiming = others.iter().map(|(agent, _)| agent.node());
        let claiming = claiming.collect::<Vec<_>>().join(", ");
        Err(Error::unreachable(
            self.in_words(pool),
            format!(
                "it was last on node {last}, whose agent cannot be reached. Node {claiming} reports it now, but is not used: if its disk was moved there, run slackwater pool hand-over {pool} --to NODE"
            ),
        ))
    }

    /// The node that had a pool last.
    pub(super) fn last_node(&self, pool: PoolId) -> Option<String> {
        let known = self.known(pool).map(|known| known.node);
        let known = known.filter(|node| !node.is_empty());
        known.or_else(|| self.agents.served_by(pool))
    }

    /// Whether the node that had a pool is deleted, or its agent answers, knows all of its own
    /// pools, and does not report this one any more.
    async fn has_given_up(&self, node: &str, pool: PoolId) -> Result<bool> {
        if let Some(agent) = self.agents.of_node(node)
            && agent.reachable().await.is_ok()
        {
            let description = agent.seen().description;
            let unknown = description
                .iter()
                .flat_map(|description| &description.pools);
            let knows_all = unknown.into_iter().all(|pool| !pool.id.is_empty());
            return Ok(knows_all && agent.shown(pool).is_none_or(|shown| shown.forgotten));
        }
        Ok(self.cluster.knows_nodes() && !self.cluster.has_node(node).await?)
    }

    /// Chooses for a pool that no node is known to have had: the agent that serves it; otherwise
    /// one that is about to; otherwise one that has removed it with `pool forget`, and so knows
    /// that its IDs are invalid. Two agents of the same kind are an error, since either disk may be
    /// the copy.
    fn best(
        &self,
        pool: PoolId,
        showing: &[(Arc<Agent>, ShownPool)],
    ) -> Result<Option<Arc<Agent>>> {
        let ranks: [fn(&ShownPool) -> bool; 2] = [|shown| shown.served, |shown| !shown.forgotten];
        for rank in ranks {
            let mut having = showing.iter().filter(|(_, shown)| rank(shown));
            match (having.next(), having.next()) {
                (Some((first, _)), Some((second, _))) => {
                    let (first, second) = (first.node(), second.node());
                    return Err(Error::unreachable(
                        self.in_words(pool),
                        format!(
                            "the agents of nodes {first} and {second} both report it; stop one of them, and check which disk is the copy"
                        ),
                    ));
                }
                (Some((one, shown)), None) => {
                    if shown.served {
                        self.agents.serves(pool, one);
                    }
                    return Ok(Some(one.clone()));
                }
                (None, _) => {}
            }
        }
        Ok(showing.first().map(|(agent, _)| agent.clone()))
    }

    /// Whether all pools that an agent has reported are marked as lost.
    pub(super) fn is_written_off(&self, agent: &Agent) -> bool {
        let pools = agent.seen().pools;
        let mut shown = pools.iter().filter(|shown| !shown.forgotten).peekable();
        shown.peek().is_some() && shown.all(|shown| self.cluster.is_lost(shown.id))
    }

    /// A description of a pool for messages.
    pub(super) fn in_words(&self, pool: PoolId) -> String {
        match self.known(pool) {
            Some(known) => format!("pool {} of node {} ({pool})", known.name, known.node),
            None => format!("pool {pool}"),
        }
    }

    pub(super) fn known(&self, pool: PoolId) -> Option<KnownPool> {
        let known = self.cluster.known_pools();
        known.into_iter().find(|known| known.id == pool)
    }

    /// Adds the pool to an error of its agent.
    pub(super) fn behind(&self, pool: PoolId, error: &Error) -> Error {
        let reason = match error {
            Error::Unreachable { what, reason } => format!("{what} cannot be reached: {reason}"),
            other => other.to_string(),
        };
        Error::unreachable(self.in_words(pool), reason)
    }

    pub(super) fn unreported(&self, pool: PoolId) -> Error {
        let reason = match self.known(pool) {
            Some(known) => format!(
                "no agent reports it, and it was last on node {}; bring its disk back, or mark the pool as lost",
                known.node
            ),
            None => {
                let agents = self.agents.all().into_iter();
                let silent = agents.filter(|agent| agent.check().is_err());
                let silent: Vec<String> = silent.map(|agent| agent.node().to_string()).collect();
                match silent.is_empty() {
                    true => "no agent reports it".into(),
                    false => format!(
                        "no agent reports it, and the agents of nodes {} cannot be reached",
                        silent.join(", ")
                    ),
                }
            }
        };
        Error::unreachable(self.in_words(pool), reason)
    }
}

/// The final error of creating something from an object on a lost pool.
pub(super) fn lost(pool: &str) -> Error {
    Error::refused(pool, "it is marked as lost, together with all its volumes")
}

/// The answer of a call about one object that has no owner.
pub(super) fn absent(rpc: Rpc, kind: Kind, id: &str, why: Nowhere) -> Error {
    match why {
        Nowhere::NotAnId => Error::not_found(kind, id),
        // An object should be created from it: it was not, and cannot be.
        Nowhere::Lost(pool) if matches!(rpc, Rpc::CreateVolume | Rpc::CreateSnapshot) => {
            lost(&pool)
        }
        // The callers of expansion and modification give up at this code.
        Nowhere::Lost(pool) => Error::Forwarded {
            code: Code::NotFound as i32,
            message: format!("{kind} {id} no longer exists: {pool} is marked as lost"),
        },
    }
}
