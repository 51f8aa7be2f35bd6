//! Value types: IDs, sizes, capabilities, parameters. Nothing here reads a clock, a disk or the
//! kernel, and every parsed value can be printed so that parsing it again gives the same value.

pub mod alpha;
pub mod capability;
pub mod id;
pub mod mkfs;
pub mod mount_option;
pub mod mount_rule;
pub mod parameters;
pub mod pool;
pub mod raw_block;
pub mod size;
pub mod snapshot;
pub mod snapshot_room;
pub mod thin_pool_name;
pub mod trim_interval;

pub use alpha::Alpha;
pub use capability::{AccessMode, AccessType, Capability, FsType};
pub use id::{GroupId, HomeId, PoolId, SnapshotId, VolumeId};
pub use mount_rule::MountRule;
pub use parameters::{
    Allocation, MutableParameters, Restore, VolumeParameters, Wipe, is_claim, is_object_name,
};
pub use pool::{PoolDefinition, PoolOptions, PoolPlace};
pub use raw_block::RawBlock;
pub use size::CapacityRange;
pub use snapshot::{Level, Members, OnQuiesceFailure, SharedVolume, SnapshotParameters};
pub use snapshot_room::SnapshotSpacePolicy;
pub use thin_pool_name::ThinPoolName;
pub use trim_interval::TrimInterval;
