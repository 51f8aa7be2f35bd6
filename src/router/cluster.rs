//! The router's interface to its cluster, so that everything else can be tested without one.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::create_volume::pod_placement::{Fit, PodClaims};
use crate::error::Result;
use crate::hook::{Hooks, NoHooks};
use crate::model::{Level, PoolId};
use crate::operation::ContentSource;
use crate::telemetry::router::ClusterStatus;
use crate::telemetry::volumes::VolumeClaim;

/// The object of an event.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ObjectRef {
    /// A PersistentVolumeClaim, "namespace/name".
    Claim(String),
    /// A VolumeSnapshot, "namespace/name".
    Snapshot(String),
    /// A VolumeGroupSnapshot, "namespace/name".
    Group(String),
    Node(String),
    /// The Pool object of a pool.
    Pool(PoolId),
    /// A SnapshotSchedule, "namespace/name".
    Schedule(String),
    /// A VolumeRevert, "namespace/name".
    Revert(String),
    /// The routers of this installation: their Lease.
    Router,
}

/// The object that represents a snapshot in a cluster, by its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// A VolumeSnapshotContent.
    Snapshot(String),
    /// A VolumeGroupSnapshotContent.
    Group(String),
}

/// The result of a snapshot, or of all members of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reached {
    /// The consistency level.
    pub level: Level,
    /// Why the level is not higher; empty if it is the requested one.
    pub reason: String,
    /// The time of the cut in nanoseconds since 1970.
    pub cut_at: u64,
    /// As in [`Note::Durations`], of a cut that an agent took without the router.
    pub frozen: Option<Duration>,
}

/// What is recorded at the object of a snapshot, or of a group for all of its members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// Its result.
    Reached(Reached),
    /// How long a cut that the router coordinated stopped writers.
    Durations {
        /// From the first freeze to the last thaw, if anything was frozen.
        frozen: Option<Duration>,
        /// From the moment at which all hooks were ready until all members were thawed, if any ran.
        held: Option<Duration>,
    },
}

/// Why a copy is not continued, with the reason as a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unwanted {
    /// The scheduler must select another node.
    Node(String),
    /// No claim waits for the volume.
    Claim(String),
}

/// A cluster. Answers come from a cache that follows the API server, and may be slightly out of
/// date.
#[tonic::async_trait]
pub trait Cluster: Send + Sync + 'static {
    /// The node that the scheduler has selected for a PVC, "namespace/name"; none if there is no
    /// selection, or no such PVC. Fails if that cannot be determined now.
    async fn selected_node(&self, claim: &str) -> Result<Option<String>>;

    /// The claims whose volumes must be on one node with that of a claim, "namespace/name", because
    /// pods use them together. `source` is the content source of its volume. `None` if no
    /// other claim of the namespace has a content source and `is_elsewhere` is false: then nothing
    /// can demand another node than the selected one. Fails if the claims cannot be read now.
    async fn pod_claims(
        &self,
        _claim: &str,
        _source: Option<&ContentSource>,
        _is_elsewhere: bool,
    ) -> Result<Option<PodClaims>> {
        Ok(None)
    }

    /// Whether the pod that uses the claims could run on a node; `Err` has the reason why not, also
    /// if that cannot be determined.
    async fn check_node(&self, _claims: &PodClaims, node: &str) -> Fit {
        Err(format!("node {node} cannot be examined"))
    }

    /// Whether a Node object with this name exists. Fails if that cannot be determined now.
    async fn has_node(&self, node: &str) -> Result<bool>;

    /// Whether [`Cluster::has_node`] knows nodes at all; otherwise only the nodes of agents are
    /// known.
    fn knows_nodes(&self) -> bool {
        true
    }

    /// Why a volume is no longer to be copied to a node, for a PVC ("namespace/name"). `None` if it
    /// is, or if that cannot be determined now.
    async fn find_unwanted(&self, _node: &str, _claim: Option<&str>) -> Option<Unwanted> {
        None
    }

    /// The PVC, "namespace/name", of a volume.
    fn claim_of(&self, volume_id: &str) -> Option<String>;

    /// Whether an administrator has marked a pool as lost.
    fn is_lost(&self, pool: PoolId) -> bool;

    /// Whether an administrator empties a pool, so that nothing new is created there.
    fn is_evacuated(&self, _pool: PoolId) -> bool {
        false
    }

    /// Whether a pool is marked as lost or is being emptied, so that it gets no new volumes.
    fn is_closed(&self, pool: &str) -> bool {
        let is_closed = |id| self.is_lost(id) || self.is_evacuated(id);
        pool.parse().is_ok_and(is_closed)
    }

    /// Pools that this cluster has had, whether or not an agent reports them now, with the node and
    /// topology segment that they last had.
    fn known_pools(&self) -> Vec<KnownPool>;

    /// IDs of the volumes and snapshots of moves that have not ended. No object of the cluster names
    /// these snapshots.
    fn moved_ids(&self) -> BTreeSet<String> {
        BTreeSet::new()
    }

    /// Whether this router is the leader, which performs the tasks that only one router may
    /// perform. There are never two leaders at once.
    fn is_leader(&self) -> bool;

    /// Records an event on an object. Never fails and never waits.
    fn record_event(
        &self,
        about: &ObjectRef,
        is_warning: bool,
        reason: &'static str,
        message: String,
    );

    /// Records annotations of a snapshot on its object. Never fails and never waits.
    fn note(&self, _content: Content, _note: Note) {}

    /// Whether the API server answers and is ready; this always sends a request.
    async fn answers(&self) -> bool {
        true
    }

    /// The state of the connection to the cluster, for metrics and readiness; `None` if there is no
    /// cluster.
    fn status(&self) -> Option<ClusterStatus> {
        None
    }

    /// The claims of all volumes, if this router leads and reports them.
    fn volume_claims(&self) -> Option<Vec<VolumeClaim>> {
        None
    }

    /// Quiesce hooks of the pods that use volumes.
    fn hooks(&self) -> Arc<dyn Hooks>;
}

/// A pool as recorded in the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownPool {
    pub id: PoolId,
    /// Its name in its agent's configuration.
    pub name: String,
    /// The node that has it: the one set by an administrator, or the one that last reported it;
    /// empty if not known.
    pub node: String,
    /// Its topology segment.
    pub home: String,
    /// Whether it is marked as lost.
    pub lost: bool,
}

/// No cluster: agents are configured by address, and events are not recorded.
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
