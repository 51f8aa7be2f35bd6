//! From an id to the agent that serves its pool.

use std::sync::Arc;

use tonic::Code;

use super::Router;
use super::agents::{Agent, ShownPool};
use super::cluster::KnownPool;
use crate::error::{Error, Kind, Result};
use crate::model::{PoolId, VolumeId};
use crate::service::Rpc;

/// Where a pool's ids lead.
#[derive(Clone)]
pub(super) enum Route {
    /// To this agent, which has answered not long ago.
    Agent(Arc<Agent>),
    /// Nowhere any more, because an administrator says so. The pool for people.
    Lost(String),
}

/// Why an id leads nowhere.
pub(super) enum Nowhere {
    /// It's none of ours.
    NotAnId,
    /// Its pool is marked as lost. The pool for people.
    Lost(String),
}

/// Where an id leads.
pub(super) enum Owner {
    /// To this agent.
    Agent(Arc<Agent>),
    /// Nowhere, for good.
    Nowhere(Nowhere),
}

impl Router {
    /// Where the id of a volume or snapshot leads.
    pub(super) async fn owner(&self, id: &str) -> Result<Owner> {
        let Ok(parsed) = id.parse::<VolumeId>() else {
            return Ok(Owner::Nowhere(Nowhere::NotAnId));
        };
        Ok(match self.route(parsed.pool).await? {
            Route::Agent(agent) => Owner::Agent(agent),
            Route::Lost(pool) => Owner::Nowhere(Nowhere::Lost(pool)),
        })
    }

    /// Where a pool's ids lead. For a pool that nobody shows all agents are asked again; then it's
    /// an error that names who had it last. Never "nowhere".
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
            return Err(self.nobody_shows(pool));
        };
        agent
            .reachable()
            .await
            .map_err(|error| self.behind(pool, &error))?;
        Ok(Route::Agent(agent))
    }

    /// The agent that serves a pool. A lost pool is an error that is final.
    pub async fn agent_of(&self, pool: PoolId) -> Result<Arc<Agent>> {
        match self.route(pool).await? {
            Route::Agent(agent) => Ok(agent),
            Route::Lost(pool) => Err(lost(&pool)),
        }
    }

    /// Which of the agents that show a pool has it. The node that had it last, as the cluster
    /// remembers or a person says, keeps it for as long as its agent shows it or can't be asked.
    /// Another gets it once that agent answers and shows it no more, or the Node is gone.
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
        // That its volumes are gone only the node says that had it.
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
        Err(Error::Unreachable {
            what: self.in_words(pool),
            reason: format!(
                "it was last on node {last}, whose agent cannot be reached. Node {claiming} reports it now, but is not used: if its disk was moved there, run slackwater pool hand-over {pool} --to NODE"
            ),
        })
    }

    /// The node that had a pool last.
    pub(super) fn last_node(&self, pool: PoolId) -> Option<String> {
        let known = self.known(pool).map(|known| known.node);
        let known = known.filter(|node| !node.is_empty());
        known.or_else(|| self.agents.served_by(pool))
    }

    /// Whether the node that had a pool is gone, or its agent answers, knows all of its pools, and
    /// does not show this one any more.
    async fn has_given_up(&self, node: &str, pool: PoolId) -> Result<bool> {
        if let Some(agent) = self.agents.of_node(node)
            && agent.reachable().await.is_ok()
        {
            let told = agent.seen().told;
            let unknown = told.iter().flat_map(|told| &told.pools);
            let knows_all = unknown.into_iter().all(|pool| !pool.id.is_empty());
            return Ok(knows_all && agent.shown(pool).is_none_or(|shown| shown.forgotten));
        }
        Ok(self.cluster.knows_nodes() && !self.cluster.has_node(node).await?)
    }

    /// Of a pool that no node is known to have had: who serves it; else who is about to; else who
    /// has forgotten it, and knows that its ids lead nowhere. Two of a kind are an error, since
    /// either disk may be the copy.
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
                    return Err(Error::Unreachable {
                        what: self.in_words(pool),
                        reason: format!(
                            "the agents of nodes {first} and {second} both report it; stop one of them, and check which disk is the copy"
                        ),
                    });
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

    /// A pool for people.
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

    /// The error of a pool whose agent has this one.
    pub(super) fn behind(&self, pool: PoolId, error: &Error) -> Error {
        let reason = match error {
            Error::Unreachable { what, reason } => format!("{what} cannot be reached: {reason}"),
            other => other.to_string(),
        };
        Error::Unreachable {
            what: self.in_words(pool),
            reason,
        }
    }

    pub(super) fn nobody_shows(&self, pool: PoolId) -> Error {
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
        Error::Unreachable {
            what: self.in_words(pool),
            reason,
        }
    }
}

/// What is final about making something of what was on a lost pool.
pub(super) fn lost(pool: &str) -> Error {
    Error::refused(pool, "it is marked as lost, together with all its volumes")
}

/// What a call about one object answers where its id leads nowhere.
pub(super) fn absent(rpc: Rpc, kind: Kind, id: &str, why: Nowhere) -> Error {
    match why {
        Nowhere::NotAnId => Error::NotFound {
            kind,
            id: id.to_string(),
        },
        // Something is to be made of it: nothing was, and nothing will be.
        Nowhere::Lost(pool) if matches!(rpc, Rpc::CreateVolume | Rpc::CreateSnapshot) => {
            lost(&pool)
        }
        // Growth and changes are given up at this code.
        Nowhere::Lost(pool) => Error::Forwarded {
            code: Code::NotFound as i32,
            message: format!("{kind} {id} no longer exists: {pool} is marked as lost"),
        },
    }
}
