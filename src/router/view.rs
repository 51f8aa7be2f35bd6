//! What a router shows of its agents, for metrics and readiness.

use std::sync::Arc;

use super::agents::Agents;
use super::cluster::Cluster;
use super::cutting::Cuts;
use crate::operation::CutCounts;
use crate::telemetry::router::{AgentStatus, ClusterStatus, RouterView};

/// A router, as metrics show it.
pub(super) struct View {
    pub(super) agents: Arc<Agents>,
    pub(super) cluster: Arc<dyn Cluster>,
    pub(super) cuts: Arc<Cuts>,
}

impl RouterView for View {
    fn agents(&self) -> Vec<AgentStatus> {
        let each = self.agents.all().into_iter().map(|agent| {
            let seen = agent.seen();
            AgentStatus {
                node: agent.node().to_string(),
                up: seen.is_reachable(),
                silent: seen.answered.map(|at| at.elapsed()),
                pools: seen.pools.iter().filter(|pool| pool.served).count() as u64,
            }
        });
        each.collect()
    }

    fn cluster(&self) -> Option<ClusterStatus> {
        self.cluster.status()
    }

    fn cuts(&self) -> &CutCounts {
        &self.cuts.counts
    }

    fn missing(&self) -> Vec<String> {
        let asked = self.agents.all_asked().err().map(|error| error.to_string());
        let around = self.cluster.status().and_then(|status| status.missing);
        asked.into_iter().chain(around).collect()
    }
}
