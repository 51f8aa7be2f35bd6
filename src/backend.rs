//! The storage of one pool: records, images, devices.
//!
//! [`PoolBackend`] is the same for all kinds of pools; a [`Store`](store::Store) says how a kind
//! stores images. `file` keeps them as files on loop devices, and `thin` as thin devices of a thin
//! pool. A `memory:` pool is a file pool on the simulated host, so tests without root run the same
//! code as tests with root. [`place`] finds, creates, opens and closes them.

mod copier;
pub mod file;
mod handle;
pub mod mapped;
pub mod place;
pub mod pool;
pub mod records;
pub mod shown;
mod store;
pub mod thin;

use std::fmt;

use uuid::Uuid;

pub use copier::{Copier, CopyCost, CopyMode};
pub use handle::ImageHandle;
pub use pool::shares::{Family, LineageBytes, VolumeBytes};
pub use pool::{OpenResult, PoolBackend};
pub use store::{Devices, FindPublished, StoreProperties, Watched};

use crate::error::Result;
use crate::host::{Device, DeviceHold, ThinPoolStatus};
use crate::thin_metadata;

/// How a pool stores images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolKind<'a> {
    /// As files in its folder.
    File {
        /// The extent size hint of new volumes in bytes, if the pool's definition sets one.
        extent: Option<u64>,
    },
    /// As thin devices of the thin pool with this name.
    Thin {
        /// The name.
        pool: &'a str,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolSpace {
    /// The size of the pool's file system in bytes.
    pub total: u64,
    /// Free bytes of the pool's file system.
    pub available: u64,
    /// Bytes of blocks that volumes have. A shared block is counted in each volume that has it.
    pub allocated: u64,
    /// A lower bound of the bytes of blocks that volumes have and no snapshot has, each block
    /// counted once. Together with `available`, this is the space for promises to volumes.
    pub not_in_snapshots: u64,
    /// Bytes of blocks that snapshots have. A shared block is counted in each snapshot that has it.
    pub snapshots: u64,
    /// Bytes of blocks that hidden bases have or keep from volumes, which are not counted in
    /// `snapshots`.
    pub bases: u64,
    /// What `not_in_snapshots` would be without hidden bases.
    pub not_in_snapshots_or_bases: u64,
    /// Bytes that are provisioned: the sizes of all volumes, thin and thick, and the bytes that copies
    /// of snapshots in progress will fill.
    pub provisioned: u64,
    /// The part of `available` that operations in progress will certainly fill: creations of thick
    /// volumes, copies, and snapshots of thick volumes.
    pub pending_bytes: u64,
    /// The metadata of a thin pool; `None` in other pools.
    pub metadata: Option<MetadataSpace>,
}

impl PoolSpace {
    /// An upper bound of the space after all hidden bases were released: which of their blocks no
    /// other image has is unknown.
    pub fn without_bases(self) -> PoolSpace {
        let most = self.total.saturating_sub(self.not_in_snapshots_or_bases);
        let freed = self.available.saturating_add(self.bases).min(most);
        PoolSpace {
            available: freed.max(self.available),
            not_in_snapshots: self.not_in_snapshots_or_bases,
            bases: 0,
            ..self
        }
    }
}

/// The space for the maps of the thin devices of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetadataSpace {
    /// All bytes.
    pub total: u64,
    /// Bytes that are not in use.
    pub free: u64,
    /// The part of `free` that thick volumes and their snapshots may take.
    pub reserved: u64,
    /// The size of a block of data in bytes.
    pub block_bytes: u64,
}

impl From<&ThinPoolStatus> for MetadataSpace {
    /// Without what is reserved.
    fn from(status: &ThinPoolStatus) -> MetadataSpace {
        MetadataSpace {
            total: status.metadata.total,
            free: status.metadata.free(),
            reserved: 0,
            block_bytes: status.block_bytes,
        }
    }
}

impl MetadataSpace {
    /// Bytes that the map of an image of this size takes at most: each block is mapped, and no other
    /// map has the same nodes.
    pub fn worst(&self, bytes: u64) -> u64 {
        let blocks = bytes.div_ceil(self.block_bytes);
        thin_metadata::MAX_PER_MAP + blocks * thin_metadata::MAX_PER_MAPPING
    }

    /// Bytes that the map of an image of this size takes at least, if each block is mapped.
    pub fn least(&self, bytes: u64) -> u64 {
        bytes / self.block_bytes * thin_metadata::MIN_PER_MAPPING
    }

    /// Bytes that are neither in use nor reserved.
    pub fn available(&self) -> u64 {
        self.free.saturating_sub(self.reserved)
    }

    /// Bytes that nothing new may take: without free metadata the pool could not create snapshots,
    /// and writes to shared blocks would fail.
    pub fn kept(&self) -> u64 {
        self.total / thin::METADATA_RESERVE_DIVISOR
    }

    /// The size of the largest image whose map fits in the worst case.
    pub fn largest(&self) -> u64 {
        let taken = self.kept() + thin_metadata::MAX_PER_MAP;
        let available = self.available().saturating_sub(taken);
        available / thin_metadata::MAX_PER_MAPPING * self.block_bytes
    }
}

/// A volume's device, which stays attached while this value exists.
#[derive(Debug)]
pub struct Attached {
    pub device: Device,
    /// Keeps the device attached.
    pub hold: DeviceHold,
}

/// A device on a volume's image, which this driver or a foreign process has attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundDevice {
    pub device: Device,
    /// It maps the whole image from its first byte, as the devices of this driver do.
    pub whole: bool,
    pub read_only: bool,
}

/// How a device is to be attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachMode {
    pub read_only: bool,
    /// It stays attached without openers until it is detached, for raw block volumes.
    pub lasting: bool,
}

/// What was found at start-up. Loop devices and inline volumes are cleaned up before the pool is
/// served, the rest while it is served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leftovers {
    /// Volumes whose creation was never acknowledged.
    pub half_made: u64,
    /// Deleted volumes whose blocks are not freed yet.
    pub trash: u64,
    /// Loop devices that no staged volume used.
    pub loops: u64,
    /// Inline volumes that were not mounted anywhere any more.
    pub ephemeral: u64,
    /// Snapshots whose creation was never acknowledged.
    pub snapshots: u64,
}

impl Leftovers {
    /// The sum of all counts.
    pub fn total(&self) -> u64 {
        self.half_made + self.trash + self.loops + self.ephemeral + self.snapshots
    }
}

/// What a failed call, or a call that a crash interrupted, may have left on a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Leftover {
    /// A volume whose creation was never acknowledged, or its empty directory.
    Volume(Uuid),
    /// A snapshot whose creation was never acknowledged, or its empty directory.
    Snapshot(Uuid),
    /// An incomplete copy. A repeat of its call continues it.
    Copy(Image),
    /// Blocks beyond the end of a thick volume. A repeat of its growth takes them.
    Growth(Uuid),
    /// The image of a revert whose volume does not name it.
    Spare(Uuid),
    /// A volume that has the image of a revert, and whose former image is not in the trash yet.
    Switched(Uuid),
    /// Blocks of a deleted volume or snapshot.
    Trash {
        /// The UUID of the volume or snapshot.
        uuid: Uuid,
        /// The name of the entry in the trash.
        name: String,
    },
}

impl fmt::Display for Leftover {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Leftover::Volume(uuid) => write!(f, "incomplete volume {uuid}"),
            Leftover::Snapshot(uuid) => write!(f, "incomplete snapshot {uuid}"),
            Leftover::Copy(image) => write!(f, "incomplete copy into {image}"),
            Leftover::Growth(uuid) => write!(f, "unfinished growth of volume {uuid}"),
            Leftover::Spare(uuid) => write!(f, "spare image {uuid}"),
            Leftover::Switched(uuid) => write!(f, "former image of volume {uuid}"),
            Leftover::Trash { name, .. } => write!(f, "trash entry {name}"),
        }
    }
}

/// An image of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Image {
    /// The image of a volume.
    Volume(Uuid),
    /// The image of a snapshot.
    Snapshot(Uuid),
}

impl Image {
    /// The volume or snapshot.
    pub fn uuid(self) -> Uuid {
        match self {
            Image::Volume(uuid) | Image::Snapshot(uuid) => uuid,
        }
    }
}

impl fmt::Display for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Image::Volume(uuid) => write!(f, "volume {uuid}"),
            Image::Snapshot(uuid) => write!(f, "snapshot {uuid}"),
        }
    }
}

/// Decides whether there is enough space. Runs before anything is changed.
pub type Admit<'a> = &'a dyn Fn(&PoolSpace) -> Result<()>;
