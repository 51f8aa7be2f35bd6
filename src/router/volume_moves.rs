//! What a VolumeMove orders of the agents, as an interface, so that the decisions about moves can be
//! tested without agents.

mod agent_calls;

use uuid::Uuid;

use crate::error::Result;
use crate::model::id::NameKind;
use crate::model::{PoolId, SnapshotId, VolumeId};
use crate::operation::{VolumeMoveStatus, snapshot_name};

/// Which snapshot of a move: one of those before the fence, or the last one.
pub type Round = Option<u32>;

/// The numbers of the snapshots before the fence. Each round takes the one that is not the base of its
/// copy, so that there are never more than these, whichever step of a router comes late.
pub const ROUNDS: [u32; 2] = [1, 2];

/// A snapshot of a move.
pub fn snapshot_of(source: VolumeId, move_uid: Uuid, round: Round) -> SnapshotId {
    let name = snapshot_name(move_uid, round);
    SnapshotId::of_name(source.pool, NameKind::Snapshot, &name)
}

/// A pool to which a volume could be moved, by the last report of its agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetPool {
    pub id: PoolId,
    /// Its name in the configuration of its node.
    pub name: String,
    pub node: String,
    pub home: String,
    /// Bytes that may still be promised to volumes.
    pub provisionable: u64,
    /// Why no volume can be moved to it now; `None` if one can.
    pub problem: Option<String>,
}

/// A copy of a volume that moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoveCopy {
    pub move_uid: Uuid,
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
    /// The snapshot that is copied: one before the fence, after which the copy is incomplete, or the
    /// last one.
    pub round: Round,
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
    async fn look(&self, volume: VolumeId, snapshots: &[SnapshotId]) -> Result<VolumeMoveStatus>;

    /// Sets the fence of a move, or lifts it.
    async fn fence(&self, volume: VolumeId, move_uid: Uuid, lift: bool) -> Result<()>;

    /// Takes a snapshot of a volume before the fence, unless it exists. Returns the bytes in which it
    /// differs from that of another round; all bytes of the volume if there is none.
    async fn snapshot(&self, copy: &MoveCopy, base: Option<u32>) -> Result<u64>;

    /// Takes the snapshot, unless it exists, and lets the other agent copy what differs from the
    /// content that the copy has. The agent reads a copy of the last one back, and compares it.
    async fn copy(&self, copy: &MoveCopy) -> Result<Copied>;

    /// Deletes the source of a move, which it has fenced.
    async fn delete_source(&self, volume: VolumeId, move_uid: Uuid) -> Result<()>;

    /// Deletes the copy of a move.
    async fn delete_copy(&self, volume: VolumeId) -> Result<()>;

    async fn delete_snapshot(&self, snapshot: SnapshotId) -> Result<()>;
}
