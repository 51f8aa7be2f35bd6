//! What a VolumeMove orders of the agents, as an interface, so that the decisions about moves can be
//! tested without agents.

use uuid::Uuid;

use crate::error::Result;
use crate::model::{PoolId, SnapshotId, VolumeId};
use crate::operation::MovedVolume;

/// A pool to which a volume could be moved, by the last report of its agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetPool {
    pub id: PoolId,
    /// Its name in the configuration of its node.
    pub name: String,
    pub node: String,
    pub home: String,
    /// Bytes that may still be promised to volumes.
    pub promisable: u64,
    /// Why no volume can be moved to it now; `None` if one can.
    pub problem: Option<String>,
}

/// A copy of a fenced volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoveCopy {
    pub mover: Uuid,
    pub source: VolumeId,
    /// The name and the ID of its copy.
    pub name: String,
    pub target: VolumeId,
    /// The name of the pool of the copy.
    pub pool: String,
    /// "namespace/name" of the claim.
    pub claim: String,
    /// The size in the PersistentVolume: an agent that reports a larger one is refused.
    pub max_bytes: u64,
}

/// The state of a copy after a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copied {
    Complete,
    /// The call is over, the copy continues.
    Continues,
}

/// The agents, for moves. An agent that cannot be reached is an error, and never "absent".
#[tonic::async_trait]
pub trait MovingVolumes: Send + Sync + 'static {
    /// All pools, by the last reports.
    fn targets(&self) -> Vec<TargetPool>;

    /// The state of a volume, and which of these snapshots exist. Everything on a pool that is marked
    /// as lost is absent.
    async fn look(&self, volume: VolumeId, snapshots: &[SnapshotId]) -> Result<MovedVolume>;

    /// Sets the fence of a move, or lifts it.
    async fn fence(&self, volume: VolumeId, mover: Uuid, lift: bool) -> Result<()>;

    /// Takes the last snapshot of a fenced volume, unless it exists, and lets the other agent copy
    /// it, read the copy back and compare it.
    async fn copy(&self, copy: &MoveCopy) -> Result<Copied>;

    /// Deletes the source of a move, which it has fenced.
    async fn delete_source(&self, volume: VolumeId, mover: Uuid) -> Result<()>;

    /// Deletes the copy of a move.
    async fn delete_copy(&self, volume: VolumeId) -> Result<()>;

    async fn delete_snapshot(&self, snapshot: SnapshotId) -> Result<()>;
}
