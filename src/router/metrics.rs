//! What a router reports of its agents in metrics and readiness.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::agents::{Agents, ShownPool};
use super::cluster::Cluster;
use super::cuts::Cuts;
use crate::model::PoolId;
use crate::operation::CutCounts;
use crate::telemetry::router::{AgentStatus, ClusterStatus, RouterView};
use crate::telemetry::volumes::VolumeClaim;

/// A router as the source of metrics.
pub(super) struct View {
    pub(super) agents: Arc<Agents>,
    pub(super) cluster: Arc<dyn Cluster>,
    pub(super) cuts: Arc<Cuts>,
}

impl RouterView for View {
    fn agents(&self) -> Vec<AgentStatus> {
        let known = self.cluster.known_pools().into_iter();
        let of: BTreeMap<PoolId, String> = known.map(|pool| (pool.id, pool.node)).collect();
        let agents = self.agents.all().into_iter().map(|agent| {
            let seen = agent.seen();
            let is_others = |pool: &&ShownPool| {
                let node = of.get(&pool.id).filter(|node| !node.is_empty());
                pool.served && node.is_some_and(|node| node != agent.node())
            };
            AgentStatus {
                node: agent.node().to_string(),
                up: seen.is_reachable(),
                silent: seen.answered.map(|at| at.elapsed()),
                pools: seen.pools.iter().filter(|pool| pool.served).count() as u64,
                pools_of_other_nodes: seen.pools.iter().filter(is_others).count() as u64,
                refused: agent.refusals(),
            }
        });
        agents.collect()
    }

    fn cluster(&self) -> Option<ClusterStatus> {
        self.cluster.status()
    }

    fn volume_claims(&self) -> Option<Vec<VolumeClaim>> {
        self.cluster.volume_claims()
    }

    fn cuts(&self) -> &CutCounts {
        &self.cuts.counts
    }

    fn missing(&self) -> Vec<String> {
        let asked = self.agents.all_asked().err().map(|error| error.to_string());
        let cluster_problem = self.cluster.status().and_then(|status| status.missing);
        asked.into_iter().chain(cluster_problem).collect()
    }
}
