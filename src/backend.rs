//! The storage of one pool behind a trait: records, images, devices.
//!
//! `file` keeps volumes as image files on loop devices. A `memory:` pool is the same backend on the
//! simulated host, so tests without root run the same code as tests with root. An LVM backend would
//! be a second implementation. A backend keeps its own data consistent; `operation` decides what a
//! CSI call means.

mod copier;
pub mod file;
mod handle;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use uuid::Uuid;

pub use copier::{Copier, CopyCost, CopyMode};
pub use handle::ImageHandle;

use crate::error::Result;
use crate::host::{Budget, Device, LoopHold, LoopStatus, Space};
use crate::record::{PoolRecord, SnapshotOrigin, SnapshotRecord, VolumeRecord};

/// The space of a pool.
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
    pub own: u64,
    /// Bytes of blocks that snapshots have. A shared block is counted in each snapshot that has it.
    pub snapshots: u64,
    /// Bytes that are promised: the sizes of all volumes, thin and thick, and the bytes that copies
    /// of snapshots in progress will fill.
    pub promised: u64,
    /// The part of `available` that operations in progress will certainly fill: creations of thick
    /// volumes, copies, and snapshots of thick volumes.
    pub claimed: u64,
}

/// A volume's device, which stays attached while this value exists.
#[derive(Debug)]
pub struct Attached {
    /// The device.
    pub device: Device,
    /// Keeps the device attached.
    pub hold: LoopHold,
}

/// A device on a volume's image, which this driver or a foreign process has attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundDevice {
    /// The device.
    pub device: Device,
    /// It maps the whole image from its first byte, as the devices of this driver do.
    pub whole: bool,
    /// Read-only.
    pub read_only: bool,
    /// The kernel detaches it when its last opener closes it.
    pub autoclear: bool,
}

/// How a device is to be attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachMode {
    /// Read-only.
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

/// One pool. The caller holds the lock of a volume during every call that names it.
pub trait Backend: Send + Sync + 'static {
    /// The pool's record.
    fn pool(&self) -> &PoolRecord;
    /// The pool's place for messages, such as "file:/path".
    fn place(&self) -> String;
    /// The pool's path, for `slackwater doctor` and errors.
    fn path(&self) -> PathBuf;
    /// The logical block size if the storage class does not set one.
    fn default_block_size(&self) -> u32;
    /// The smallest logical block size that a storage class may set: the one that the pool's disk
    /// supports.
    fn least_block_size(&self) -> u32;
    /// Why this pool cannot have thick volumes; `None` if it can.
    fn refuses_thick(&self) -> Option<&'static str>;
    /// Why writing zeros would not overwrite the old blocks; `None` if it would.
    fn refuses_zeroing(&self) -> Option<&'static str>;
    /// The maximum size of an image on the pool's file system, in bytes.
    fn largest(&self) -> u64;

    /// A volume's record; an error if the record exists and cannot be read.
    fn volume(&self, uuid: Uuid) -> Result<Option<VolumeRecord>>;
    /// All volumes with a UUID after `after`, in the order of UUIDs, at most `limit`. Damaged ones
    /// are omitted.
    fn volumes(&self, after: Option<Uuid>, limit: usize) -> Vec<VolumeRecord>;
    /// Volumes whose record cannot be read, with the reason. Each is read again first.
    fn damaged(&self) -> Vec<(Uuid, String)>;
    /// Volumes in any state, including damaged ones, from memory without access to the disk.
    fn known_volumes(&self) -> Vec<Uuid>;
    /// The number of volumes, without damaged ones.
    fn count(&self) -> u64;

    /// The space of the pool now.
    fn space(&self) -> Result<PoolSpace>;
    /// The space of the file system, from one query that reads no image.
    fn disk(&self) -> Result<Space>;

    /// Writes to the pool's disk, durably and without needing free space. An error means that the
    /// disk is dead or no longer accepts writes. Returns only after the disk has answered.
    fn try_disk(&self) -> Result<()>;

    /// Creates a volume: intent, image, completed record. `admit` decides whether there is enough
    /// space. It runs before anything is changed, and its input includes the promises of all
    /// operations in progress. On an error everything is undone durably, or the error is
    /// [`crate::error::Error::RollbackFailed`]. A crash leaves an intent, which
    /// [`Backend::clean_up`] or [`Backend::delete`] removes.
    fn create(&self, record: VolumeRecord, admit: Admit<'_>) -> Result<VolumeRecord>;
    /// Replaces a record durably.
    fn update(&self, record: &VolumeRecord) -> Result<()>;
    /// Grows the image, then updates the record. On an error the image has its old length again, or
    /// the error is [`crate::error::Error::RollbackFailed`].
    fn grow(&self, record: &VolumeRecord, size: u64, admit: Admit<'_>) -> Result<VolumeRecord>;
    /// Deletes a volume: a durable rename hides it, then its blocks are freed, and its record is
    /// removed last. Also removes what an earlier attempt left of it. It is a success if nothing
    /// exists. A failure or a crash leaves an entry in the trash, which a repeat or
    /// [`Backend::clean_up`] purges.
    fn delete(&self, uuid: Uuid) -> Result<()>;
    /// The first step of [`Backend::delete`]: hides a volume, and leaves its blocks to
    /// [`Backend::clean_up`].
    fn hide(&self, uuid: Uuid) -> Result<()>;
    /// Deletes what remains of a creation that was never acknowledged. The record is read from the
    /// disk again; it is an error if it cannot be read, or if the volume is complete.
    fn delete_unanswered(&self, uuid: Uuid) -> Result<()>;
    /// What failed or interrupted calls may have left, also of snapshots, because not every caller
    /// repeats its call. The result may contain objects that are being created now.
    fn leftovers(&self) -> Result<Vec<Leftover>>;
    /// Cleans up a leftover if it still is one according to the disk, and returns whether it was.
    /// The caller holds the lock of its volume or snapshot.
    fn clean_up(&self, leftover: &Leftover) -> Result<bool>;
    /// Whether the cleanup of a leftover overwrites blocks with zeros, which may take hours.
    fn is_wiped(&self, leftover: &Leftover) -> bool;
    /// Discards the blocks that deletions with `wipe: discard` have freed, with one trim for all of
    /// them. Does nothing if there are none, or if the last trim was less than a minute ago.
    fn tell_disk(&self) -> Result<()>;
    /// When the volumes of this pool were trimmed last, in seconds since 1970; `None` if this is
    /// not known.
    fn trimmed(&self) -> Result<Option<u64>>;
    /// Records when the volumes were trimmed; an error if the time could not be stored for a later
    /// process.
    fn note_trimmed(&self, at: u64) -> Result<()>;

    /// Whether images of this pool can share blocks. Otherwise snapshots are full copies.
    fn shares_blocks(&self) -> bool;

    /// Opens an image to copy from it, or to write to it while it is being filled.
    fn open(&self, image: Image) -> Result<ImageHandle>;
    /// Extends an image that is being filled to at least this length.
    fn lengthen(&self, image: Image, bytes: u64) -> Result<()>;
    /// Makes a prepared image the clone of another image of this pool, which must not change during
    /// the call. Requires [`Backend::shares_blocks`].
    fn clone_quiet(&self, source: Image, copy: Image) -> Result<()>;
    /// Returns the copier of an image of this pool, which may be in use, into a prepared image. All
    /// members of a cut share `budget`. Requires [`Backend::shares_blocks`].
    fn copier(&self, source: Image, copy: Image, budget: &Arc<Budget>) -> Result<Box<dyn Copier>>;
    /// Gives the btrfs on an image a new fsid. No device may be attached to the image.
    fn renew_fs_id(&self, image: Image, fs_id: Uuid) -> Result<()>;

    /// Creates a volume that is to be filled: an intent recorded as `creating`, and an image of
    /// full length without blocks. The caller fills it with [`Backend::clone_quiet`],
    /// [`Backend::copier`] or [`ImageHandle::copy_to`], and then calls [`Backend::complete`] or
    /// [`Backend::delete`]. A crash leaves an intent, and a copy that can be continued if the
    /// record has `copy`. On an error nothing is left, or the error is
    /// [`crate::error::Error::RollbackFailed`]. The object that `content_source` names must exist
    /// if it is on this pool.
    fn prepare(&self, record: &VolumeRecord, admit: Admit<'_>) -> Result<()>;
    /// Extends a filled image to its full length, syncs it and records it as `ready`. A thick
    /// volume is first reserved and un-shared completely. A clone of a thick volume is un-shared as
    /// well, so that no write to the source can fail; for this, `admit` must have checked that the
    /// size of the clone is free. After an error the caller may continue, or calls
    /// [`Backend::delete`].
    fn complete(&self, record: &VolumeRecord) -> Result<VolumeRecord>;

    /// Un-shares the first `bytes` of an image durably and in steps, and logs the progress. This is
    /// safe while the image is being written to. A repeat passes quickly over the part that is
    /// done.
    fn unshare(&self, image: Image, bytes: u64) -> Result<()>;
    /// Frees all blocks of an image whose creation was never acknowledged, so that the blocks it
    /// shared belong to the other image alone.
    fn empty(&self, image: Image) -> Result<()>;

    /// A snapshot's record in any state; an error if the record exists and cannot be read.
    fn snapshot(&self, uuid: Uuid) -> Result<Option<SnapshotRecord>>;
    /// All snapshots that are ready, with a UUID after `after`, in the order of UUIDs, at most
    /// `limit`.
    fn snapshots(&self, after: Option<Uuid>, limit: usize) -> Vec<SnapshotRecord>;
    /// Snapshots in other states: left by a crash, or being created.
    fn unready_snapshots(&self) -> Vec<SnapshotRecord>;
    /// Snapshots whose record cannot be read, with the reason. Each is read again first.
    fn damaged_snapshots(&self) -> Vec<(Uuid, String)>;
    /// The fields of a snapshot's record from which its ID is derived, also from a record that
    /// cannot be parsed otherwise; `None` if they are missing. No other field of such a record may
    /// be trusted.
    fn origin(&self, uuid: Uuid) -> Option<SnapshotOrigin>;
    /// The number of snapshots that are ready.
    fn count_snapshots(&self) -> u64;
    /// Creates an empty snapshot in the state of its record (`preparing`), with an image that is as
    /// long as that of its source and has no blocks. A snapshot of a thick volume counts with its
    /// full size until it is ready. On an error nothing is left, or the error is
    /// [`crate::error::Error::RollbackFailed`].
    fn prepare_snapshot(&self, record: &SnapshotRecord, admit: Admit<'_>) -> Result<()>;
    /// Syncs a snapshot's image, which must happen before its record may become `cut` or `ready`.
    /// The image's name becomes durable with that record.
    fn sync_snapshot(&self, uuid: Uuid) -> Result<()>;
    /// Replaces a snapshot's record durably.
    fn update_snapshot(&self, record: &SnapshotRecord) -> Result<()>;
    /// Deletes a snapshot, like [`Backend::delete`] for a volume.
    fn delete_snapshot(&self, uuid: Uuid) -> Result<()>;
    /// Like [`Backend::delete_unanswered`], for a snapshot.
    fn delete_unanswered_snapshot(&self, uuid: Uuid) -> Result<()>;

    /// What is wrong with the length or the blocks of the image, for reports of its health; `None`
    /// if nothing is.
    fn image_problem(&self, record: &VolumeRecord) -> Result<Option<String>>;
    /// Every device on the image, including foreign ones; empty if there is no image.
    fn devices(&self, uuid: Uuid) -> Result<Vec<FoundDevice>>;
    /// Returns the volume's device, and attaches one if there is none. Never attaches a second one.
    fn attach(&self, record: &VolumeRecord, mode: AttachMode) -> Result<Attached>;
    /// Detaches a device that [`Backend::devices`] returned, if it is still attached to this image.
    /// The kernel detaches a device that is open elsewhere when its last opener closes it.
    fn detach(&self, uuid: Uuid, device: &Device) -> Result<()>;
    /// Opens the device of a volume and keeps it open, if it is one of `among`.
    fn hold(&self, uuid: Uuid, among: &[LoopStatus]) -> Result<Option<(LoopHold, LoopStatus)>>;
    /// Must be called with a device that was the volume's and is detached. It removes the settings
    /// that the volume made on the device, so that the next user of its number does not get them.
    fn released(&self, record: &VolumeRecord, device: &Device) -> Result<()>;
    /// Updates a device to the present size of the image.
    fn resize(&self, uuid: Uuid, device: &Device) -> Result<()>;

    /// Detaches loop devices that a crash left, before the first call, and counts the other
    /// leftovers. `in_use` returns whether a mount or a published target uses a device.
    fn recover(&self, in_use: &dyn Fn(&Device) -> bool) -> Result<Leftovers>;
}
