//! The operations: each call of CSI as a function of values, idempotent, locked and recorded.
//!
//! An operation validates, locks, reads, compares, acts and records. Its functions block;
//! [`Driver::run_blocking`] is the one place in which async code calls them. An operation that was
//! started runs to its end, whether or not its caller still waits.
//!
//! The [`Driver`] has one part for each layer, from the lowest to the highest: [`Pools`],
//! [`Usage`], [`Snapshots`] and [`Volumes`]. The methods of a part are in the folder of its layer. A
//! part has references to the parts below it only, so an operation cannot call one of a higher
//! layer. The uppermost layer, the folder `node`, is the driver itself.

mod blocking;
mod lock;
mod node;
pub mod pools;
pub mod request;
mod snapshot;
mod usage;
mod volume;

#[cfg(test)]
mod tests;

use std::num::NonZeroU16;
use std::path::PathBuf;
use std::sync::Arc;

use crate::host::Host;
use crate::model::PoolDefinition;

pub use blocking::{InFlight, WorkClass};
pub use lock::{Key, Locks};
pub use node::describe::{Description, Forgotten, NameLookup};
pub use node::pool_status::PoolStatus;
pub use node::volume_usage::growth::GrownVolume;
pub use node::volume_usage::{ImageUsage, LastCut, VolumeReport};
pub use pools::Pools;
pub use pools::pool::{Pool, Presence, ServingState};
pub use request::*;
pub use snapshot::Snapshots;
pub use snapshot::archive::{
    ArchiveReader, ArchiveWriter, Content, ContentInfo, Manifest, archive_content, content_identity,
};
pub use snapshot::attempt::VerifiedCut;
pub use snapshot::cut_counts::{CutCounts, LongFreeze};
pub use snapshot::for_clone::{request_for_clone, snapshot_id_for_clone};
pub use snapshot::group::{of_another_moment, same_members, same_request};
pub use snapshot::members::member_of;
pub use snapshot::outgoing::OutgoingRead;
pub use snapshot::remote::{
    Checksum, Offer, Purpose, Ranges, RemoteSnapshot, SnapshotRange, SnapshotSource, Ticket, Wanted,
};
pub use snapshot::resolve::{GroupDecision, GroupHere, GroupMember};
pub use snapshot::running::{CopyKind, CopyOf, CopyStatus};
pub use snapshot::session::{
    BeginParticipation, Coordinator, ParticipationAnswer, ParticipationStep,
};
pub use usage::Usage;
pub use usage::not_grown::NotGrown;
pub use usage::published::ChangedDevice;
pub use volume::Volumes;
pub use volume::describe::{DescribedVolume, MAX_DESCRIBED};
pub use volume::moving::{
    MoveContentStatus, MoveSnapshotStatus, MovingState, VolumeMoveStatus, snapshot_name,
};
pub use volume::reverting::{BeginRevert, Members, RevertFence, VolumeRevertStatus};

pub use crate::host::Piece;

pub use crate::cut::AbortHandle;
pub use crate::cut::coordinator::Used;
pub use crate::cut::participant::CutStep;
pub use crate::record::{GroupMembership, SnapshotState};

/// The part of the configuration that the operations use.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// `--node-name`, also the CSI node id.
    pub node_name: String,
    pub driver_name: String,
    /// `--pool`, in the order of the command line.
    pub pools: Vec<PoolDefinition>,
    pub node_record: PathBuf,
    /// `--state-dir`: for records that are valid until the next boot.
    pub state_dir: PathBuf,
    /// Role `all`: if another process serves a pool, the command line is wrong, and the start
    /// fails. In a cluster such a pool is refused like every pool that cannot be served.
    pub alone: bool,
    /// `--allowed-path`: directories below which the paths in CSI requests must be, such as the
    /// kubelet's.
    pub allowed_paths: Vec<PathBuf>,
    /// `--max-volumes`: the maximum number of volumes in use on this node.
    pub max_volumes: Option<NonZeroU16>,
    /// `--inline-max-size`: the maximum size in bytes of a pod's inline volume. Without it, no
    /// inline volumes are created.
    pub inline_max_size: Option<u64>,
    /// `--copy-rate`: the maximum rate at which all copies together read or write a pool, in bytes
    /// per second. Without it, half of what a SATA disk delivers.
    pub copy_rate: Option<u64>,
    /// `--import-path`: directories below which the files must be whose blocks imported volumes share.
    pub import_paths: Vec<PathBuf>,
    /// `--metrics-per-volume`: the bytes and the last cut of each volume are reported in metrics.
    pub metrics_per_volume: bool,
}

impl Settings {
    /// Whether the blocks of volumes are counted: a router shows them, or metrics have them.
    fn should_count_blocks(&self) -> bool {
        !self.alone || self.metrics_per_volume
    }
}

/// The driver of one node, with one part for each layer. Each part has the ones before it, and none
/// has one after it. The driver itself is the uppermost layer: it serves the pools and cleans up.
pub struct Driver {
    host: Arc<dyn Host>,
    /// The pools, and what all operations share.
    pub pools: Arc<Pools>,
    /// How this node uses volumes.
    pub usage: Arc<Usage>,
    /// Snapshots, groups and clones.
    pub snapshots: Arc<Snapshots>,
    /// The other operations on volumes.
    pub volumes: Volumes,
    /// Queries to pools whose disks may hang.
    questions: node::disk::PoolQueries,
    /// Numbers of volumes for metrics.
    numbers: Arc<node::volume_usage::VolumeStatistics>,
}
