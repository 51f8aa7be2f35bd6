//! What the router asks of the cluster that it's in: a seam, so that everything else is proven
//! without one.

use std::sync::Arc;

use crate::error::Result;
use crate::hook::{Hooks, NoHooks};
use crate::model::{Level, PoolId};
use crate::telemetry::router::ClusterStatus;

/// Kind of an event's object.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ObjectRef {
    /// A claim, "namespace/name".
    Claim(String),
    /// A VolumeSnapshot, "namespace/name".
    Snapshot(String),
    /// A VolumeGroupSnapshot, "namespace/name".
    Group(String),
    /// A node.
    Node(String),
    /// A pool's object.
    Pool(PoolId),
    /// The routers of this installation: their Lease.
    Router,
}

/// The object that stands for a snapshot in a cluster, by its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// A VolumeSnapshotContent.
    Snapshot(String),
    /// A VolumeGroupSnapshotContent.
    Group(String),
}

/// What a snapshot, or all members of a group, have reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reached {
    /// The level.
    pub level: Level,
    /// Why not a higher one; empty if it's the one asked for.
    pub reason: String,
    /// Nanoseconds since 1970.
    pub cut_at: u64,
}

/// A cluster. Answers come from memory that follows the API server, and may be a moment old.
#[tonic::async_trait]
pub trait Cluster: Send + Sync + 'static {
    /// The node that the scheduler has chosen for a claim, "namespace/name"; none if it hasn't,
    /// or there is no such claim. An error if it can't be known now.
    async fn selected_node(&self, claim: &str) -> Result<Option<String>>;

    /// Whether there is a Node object of this name. An error if it can't be known now.
    async fn has_node(&self, node: &str) -> Result<bool>;

    /// Whether [`Cluster::has_node`] knows of nodes at all; else only those of agents are known.
    fn knows_nodes(&self) -> bool {
        true
    }

    /// The claim, "namespace/name", of a volume.
    fn claim_of(&self, volume_id: &str) -> Option<String>;

    /// Whether an administrator has marked a pool as lost.
    fn is_lost(&self, pool: PoolId) -> bool;

    /// Pools that this cluster has had, whether or not an agent shows them now, with the node and
    /// home that they were last seen at.
    fn known_pools(&self) -> Vec<KnownPool>;

    /// Whether this router is the one that does what must be done by one; never two at once.
    fn is_leader(&self) -> bool;

    /// Tells people something, by an event on an object. Never fails and never waits.
    fn record_event(
        &self,
        about: &ObjectRef,
        is_warning: bool,
        reason: &'static str,
        message: String,
    );

    /// Writes down, at the object of a snapshot, what it has reached. Never fails and never waits.
    fn note(&self, _content: &Content, _reached: Reached) {}

    /// Whether the API server answers and is ready, asked anew.
    async fn answers(&self) -> bool {
        true
    }

    /// How the cluster is followed, for metrics and readiness; `None` if there is none.
    fn status(&self) -> Option<ClusterStatus> {
        None
    }

    /// Hooks of the pods that use volumes.
    fn hooks(&self) -> Arc<dyn Hooks>;
}

/// A pool as the cluster remembers it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownPool {
    /// Its id.
    pub id: PoolId,
    /// Its name in its agent's configuration.
    pub name: String,
    /// The node that has it: as a person says, or else the one that showed it last; empty if that
    /// isn't known.
    pub node: String,
    /// Its topology value.
    pub home: String,
    /// Marked as lost.
    pub lost: bool,
}

/// No cluster: agents are given by address, nobody is told anything.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoCluster;

#[tonic::async_trait]
impl Cluster for NoCluster {
    async fn selected_node(&self, _claim: &str) -> Result<Option<String>> {
        Ok(None)
    }

    async fn has_node(&self, _node: &str) -> Result<bool> {
        Ok(true)
    }

    fn knows_nodes(&self) -> bool {
        false
    }

    fn claim_of(&self, _volume_id: &str) -> Option<String> {
        None
    }

    fn is_lost(&self, _pool: PoolId) -> bool {
        false
    }

    fn known_pools(&self) -> Vec<KnownPool> {
        Vec::new()
    }

    fn is_leader(&self) -> bool {
        true
    }

    fn record_event(
        &self,
        _about: &ObjectRef,
        _is_warning: bool,
        _reason: &'static str,
        _message: String,
    ) {
    }

    fn hooks(&self) -> Arc<dyn Hooks> {
        Arc::new(NoHooks)
    }
}
