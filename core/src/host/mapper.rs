//! Thin devices, in the terms of the kernel's device mapper.
//!
//! A *thin pool* stores thin devices, each identified by a 24-bit ID. Thin devices can share blocks.
//! A thin device has no size and no node until it is *active*: until a mapped device has a table
//! that names the pool, the ID and a length. A mapped device is identified by its UUID, which is a
//! text. The kernel refuses a second mapped device with the same UUID, but with another UUID it maps
//! the same thin device twice.

use std::any::Any;
use std::path::{Path, PathBuf};

use super::Device;

/// What the UUID of a second device of a volume ends with, which shows the volume with its future
/// size. Users of the volume write through the first one and do not see what is beyond it.
pub const FILLING_SUFFIX: &str = "-filling";

/// The largest ID of a thin device.
pub const MAX_THIN_ID: u32 = (1 << 24) - 1;
/// The ID in the table of a device whose pool has failed, which the kernel does not show.
pub const UNKNOWN_THIN_ID: u32 = u32::MAX;

/// Bytes that are in use, of all bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes in use.
    pub used: u64,
    /// All bytes.
    pub total: u64,
}

impl Usage {
    /// Bytes that are not in use.
    pub fn free(self) -> u64 {
        self.total.saturating_sub(self.used)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThinPoolStatus {
    /// A number that only [`ThinMessage::SetTransactionId`] changes.
    pub transaction_id: u64,
    /// The space for blocks.
    pub data: Usage,
    /// The space for the maps of all thin devices.
    pub metadata: Usage,
    /// The device number of the pool.
    pub rdev: u64,
    /// The size of a block in bytes.
    pub block_bytes: u64,
    /// Whether the pool accepts writes and messages.
    pub mode: ThinPoolMode,
    /// The pool writes zeros to the rest of a block before it shows the block in a thin device.
    pub zeroes_blocks: bool,
    /// A write that needs a block of a full pool fails. Otherwise it waits for up to a minute, and a
    /// suspend waits for it.
    pub errors_when_full: bool,
    /// The metadata must be repaired before the pool accepts changes.
    pub needs_check: bool,
    /// A process has a snapshot of the metadata, of which a pool has at most one.
    pub holds_metadata: bool,
}

/// What a thin pool accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThinPoolMode {
    /// Everything.
    ReadWrite,
    /// It has no free block of data. It returns to [`ThinPoolMode::ReadWrite`] when it has.
    OutOfData,
    ReadOnly,
    /// Nothing.
    Failed,
}

/// A message to a thin pool. Each one commits the metadata of the pool, and is durable when it
/// returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThinMessage {
    /// Creates an empty thin device. EEXIST if the ID is taken.
    CreateThin { id: u32 },
    /// Deletes a thin device, and frees the blocks that only it has. EBUSY if it is active, ENODATA
    /// if it does not exist.
    Delete { id: u32 },
    /// Replaces the transaction ID. EINVAL if it is not `from`.
    SetTransactionId {
        /// The present one.
        from: u64,
        /// The new one.
        to: u64,
    },
    /// Gives up the snapshot of the metadata that a process holds, which may be one that has died.
    /// EINVAL if there is none.
    ReleaseMetadata,
}

impl ThinMessage {
    /// The name of the message, as the kernel spells it.
    pub fn name(&self) -> &'static str {
        match self {
            ThinMessage::CreateThin { .. } => "create_thin",
            ThinMessage::Delete { .. } => "delete_thin",
            ThinMessage::SetTransactionId { .. } => "set_transaction_id",
            ThinMessage::ReleaseMetadata => "release_metadata_snap",
        }
    }
}

/// A thin device that is to share all blocks of another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThinSnapshot {
    /// The name of the thin pool.
    pub pool: String,
    /// The device number of the thin pool. Another pool that has got the name is refused.
    pub rdev: u64,
    /// The ID of the new thin device.
    pub id: u32,
    /// The thin device with which it shares blocks.
    pub origin: u32,
}

/// A snapshot for which everything is allocated that its creation needs, so that it can be created
/// while the disk is suspended to which the kernel would write memory back. See
/// [`Effect::CreateThinSnapshot`](super::Effect::CreateThinSnapshot).
#[derive(Debug)]
pub struct PreparedThinSnapshot {
    pub snapshot: ThinSnapshot,
    /// What the host has allocated.
    pub keep: Box<dyn Any + Send + Sync>,
}

/// The table of a mapped device that shows a thin device from its first byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThinTable {
    /// The name of the thin pool.
    pub pool: String,
    /// The thin device.
    pub id: u32,
    /// The length in bytes.
    pub bytes: u64,
}

impl ThinTable {
    /// The ID; `None` if the kernel does not show it because the pool has failed.
    pub fn known_id(&self) -> Option<u32> {
        Some(self.id).filter(|id| *id != UNKNOWN_THIN_ID)
    }
}

/// The table of a mapped device that shows another block device from its first byte.
///
/// It has two targets, although one would map the same bytes: the kernel forwards ioctls to the lower
/// device through a table with a single target only (`dm_prepare_ioctl`), and a process that has the
/// mapped device must not detach or change a loop device below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearTable {
    /// The lower device, which is open as long as the table exists.
    pub lower: Device,
    /// The length in bytes, a multiple of the logical block size of the lower device.
    pub bytes: u64,
}

impl LinearTable {
    /// The length of the first target in bytes. It does not change when the device grows, and is a
    /// multiple of each block size, so that few requests reach both targets.
    const FIRST_BYTES: u64 = 1 << 20;

    /// The start and the length in bytes of each of the two targets; `None` if the device is too
    /// small for two.
    pub fn targets(&self) -> Option<[(u64, u64); 2]> {
        LinearTable::targets_of(self.bytes)
    }

    /// The targets of a table of this length in bytes.
    pub fn targets_of(bytes: u64) -> Option<[(u64, u64); 2]> {
        let first = Self::FIRST_BYTES;
        let rest = bytes.checked_sub(first).filter(|rest| *rest > 0)?;
        Some([(0, first), (first, rest)])
    }
}

/// A mapped device that shows a thin device (with a [`ThinTable`]) or another block device (with a
/// [`LinearTable`]), or that has no table yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedDevice<T = ThinTable> {
    pub device: Device,
    pub uuid: String,
    /// The table in use; `None` if the device has never been resumed with one.
    pub table: Option<T>,
    pub read_only: bool,
    /// It has a table that the next resume switches to, as after a crash between the two steps, or
    /// while another program changes the device.
    pub has_inactive_table: bool,
    /// I/O waits until the device is resumed.
    pub suspended: bool,
    /// The kernel removes it when its last opener closes it.
    pub deferred_remove: bool,
}

impl<T> MappedDevice<T> {
    /// The same device with another description of its table.
    #[must_use]
    pub fn with_table<U>(self, table: Option<U>) -> MappedDevice<U> {
        MappedDevice {
            device: self.device,
            uuid: self.uuid,
            table,
            read_only: self.read_only,
            has_inactive_table: self.has_inactive_table,
            suspended: self.suspended,
            deferred_remove: self.deferred_remove,
        }
    }
}

/// A volume group, as the LVM of this machine lists it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeGroup {
    pub uuid: String,
    /// How machines that share the group exclude each other; empty if they do not.
    pub lock_type: String,
    /// The machine that owns the group; empty if none does.
    pub system_id: String,
    /// It is owned by another machine than this one.
    pub is_foreign: bool,
}

/// How the UUID of each mapped device of the driver begins. The guard suspends no other device.
pub const UUID_PREFIX: &str = "SLACKWATER-";

/// The folder of the nodes of mapped devices.
const MAPPED_FOLDER: &str = "/dev/mapper";

/// The node of the mapped device with this UUID: the driver gives it the same name, in lower case.
pub fn mapped_path(uuid: &str) -> PathBuf {
    Path::new(MAPPED_FOLDER).join(uuid.to_ascii_lowercase())
}
