//! The agents, from the side of the cluster: their addresses, and what controllers request of them.

mod endpoints;
mod reports;

use std::collections::BTreeMap;
use std::net::SocketAddr;

use super::orphans::{DescribedVolume, Orphan, Stored};
use super::pools::requests::progress::PoolRequest;
use super::pools::status::Report;
use crate::error::Result;
use crate::model::PoolId;
pub(super) use endpoints::{by_node, read};

/// The agents, as the router knows them.
#[tonic::async_trait]
pub trait AgentReports: Send + Sync + 'static {
    /// Sets the addresses of the agents of all nodes. An agent that has no address any more stays
    /// known, and cannot be reached.
    fn place(&self, agents: BTreeMap<String, SocketAddr>);

    /// The last answer of each agent.
    fn reports(&self) -> Vec<Report>;

    /// The contents of each pool that is served now. Pools that cannot be asked are missing.
    async fn stored(&self) -> Vec<Stored>;

    /// What the agent of a node reports of volumes that no object names. Nothing of it is checked.
    async fn describe(&self, node: &str, volume_ids: Vec<String>) -> Result<Vec<DescribedVolume>>;

    /// Deletes a volume or a snapshot on the agent of its node. The agent refuses this for one that is used.
    async fn delete(&self, orphan: &Orphan) -> Result<()>;

    /// Has the agent of a node adopt or forget a pool. The agent refuses this for a pool whose disk is not
    /// there, or is there.
    async fn change_pool(&self, node: &str, pool: PoolId, request: PoolRequest) -> Result<()>;
}
