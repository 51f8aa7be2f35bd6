//! What a VolumeRevert orders of the agents, as an interface, so that the decisions about reverts can be
//! tested without agents.

mod agent_calls;

use uuid::Uuid;

use crate::error::Result;
use crate::model::{SnapshotId, VolumeId};
use crate::operation::{Members, VolumeRevertStatus};

/// A step of the revert of one volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RevertStep {
    /// Fences the volume.
    Begin {
        /// "namespace/name" of the VolumeRevert.
        name: String,
        snapshot: SnapshotId,
        /// How many reverts of the volume had ended when this one was planned.
        number: u64,
        /// The volumes of the revert.
        members: Members,
    },
    /// Fills its new image.
    Prepare,
    /// Gives it the new image. `members` are the same as at the beginning.
    Switch { members: Members },
    /// Lifts the fence after the switch.
    End,
    /// Lifts the fence before the switch, for good.
    Abort { number: u64 },
}

/// The agents, for reverts. An agent that cannot be reached is an error, and never "absent".
#[tonic::async_trait]
pub trait RevertingVolumes: Send + Sync + 'static {
    /// The state of a volume that is, or is to be, reverted to a snapshot. Everything on a pool that is
    /// marked as lost is absent.
    async fn look(&self, volume: VolumeId, snapshot: SnapshotId) -> Result<VolumeRevertStatus>;

    /// Does a step.
    async fn step(&self, volume: VolumeId, uid: Uuid, step: RevertStep) -> Result<()>;
}
