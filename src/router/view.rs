//! What a router shows of its agents, for metrics and readiness.

use std::sync::Arc;

use super::agents::Agents;
use super::cluster::Cluster;
use crate::telemetry::router::{AgentStatus, ClusterStatus, RouterView};

/// Agents, as metrics show them.
pub(super) struct View(pub(super) Arc<Agents>, pub(super) Arc<dyn Cluster>);

impl RouterView for View {
    fn agents(&self) -> Vec<AgentStatus> {
        let each = self.0.all().into_iter().map(|agent| {
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
        self.1.status()
    }

    fn missing(&self) -> Vec<String> {
        let asked = self.0.all_asked().err().map(|error| error.to_string());
        let around = self.1.status().and_then(|status| status.missing);
        asked.into_iter().chain(around).collect()
    }
}
