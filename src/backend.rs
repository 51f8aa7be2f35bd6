//! The storage of one pool behind a trait: records, images, devices.
//!
//! `file` keeps volumes as image files on loop devices. A `memory:` pool is the same backend on
//! the simulated host, so that what runs without root is what runs with it. LVM comes beside it.
//! A backend holds its own bytes right; what a CSI call means is decided in `operation`.

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

/// Room in a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolSpace {
    /// Bytes that the pool's file system has in all.
    pub total: u64,
    /// Bytes that may still be filled.
    pub available: u64,
    /// Bytes of blocks that volumes have, shared ones counted in each.
    pub allocated: u64,
    /// Bytes of blocks, at least, that volumes have and no snapshot: each counted once. Room for
    /// what volumes are promised, beside what is available.
    pub own: u64,
    /// Bytes of blocks that snapshots have, shared ones counted in each.
    pub snapshots: u64,
    /// Bytes that volumes were promised: their sizes, thin and thick; and what copies of snapshots
    /// that are being made will fill.
    pub promised: u64,
    /// Of what is available, bytes that what is being made will surely fill: thick volumes, copies,
    /// and snapshots of thick volumes.
    pub claimed: u64,
}

/// A volume's device, kept attached while this lives.
#[derive(Debug)]
pub struct Attached {
    /// The device.
    pub device: Device,
    /// Keeps it.
    pub hold: LoopHold,
}

/// A device that exists on a volume's image, whoever made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundDevice {
    /// The device.
    pub device: Device,
    /// Shows the whole image from its first byte, as ours do.
    pub whole: bool,
    /// Read-only.
    pub read_only: bool,
    /// Vanishes with its last opener.
    pub autoclear: bool,
}

/// How a device is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachMode {
    /// Read-only.
    pub read_only: bool,
    /// Outlives its openers until it's detached: raw block.
    pub lasting: bool,
}

/// What start-up found. Loop devices and inline volumes are ended before the pool is served, the rest
/// beside its calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leftovers {
    /// Volumes whose creation was never answered.
    pub half_made: u64,
    /// Deleted volumes whose blocks were still there.
    pub trash: u64,
    /// Loop devices that no stage held.
    pub loops: u64,
    /// Inline volumes that nothing showed any more.
    pub ephemeral: u64,
    /// Snapshots that were never answered.
    pub snapshots: u64,
}

impl Leftovers {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.half_made + self.trash + self.loops + self.ephemeral + self.snapshots
    }
}

/// What a call that failed, or that a crash has cut off, may have left on a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Leftover {
    /// A volume whose creation was never answered, or its empty directory.
    Volume(Uuid),
    /// The same of a snapshot.
    Snapshot(Uuid),
    /// A copy that was begun, of which not all is there: a repeat of its call goes on with it.
    Copy(Image),
    /// Blocks of what was deleted.
    Trash {
        /// Of the volume or snapshot.
        uuid: Uuid,
        /// Within the trash.
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
    /// Of a volume.
    Volume(Uuid),
    /// Of a snapshot.
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

/// Judges whether there is room, before anything is done.
pub type Admit<'a> = &'a dyn Fn(&PoolSpace) -> Result<()>;

/// One pool. Callers hold the volume's lock around everything that names a volume.
pub trait Backend: Send + Sync + 'static {
    /// Identity.
    fn pool(&self) -> &PoolRecord;
    /// For people: "file:/path".
    fn place(&self) -> String;
    /// Where it lies, for doctor and errors.
    fn path(&self) -> PathBuf;
    /// Logical block size where a class says nothing.
    fn default_block_size(&self) -> u32;
    /// The smallest that a class may ask for: what the pool's disk takes.
    fn least_block_size(&self) -> u32;
    /// Why thick volumes can't be kept here, if they can't.
    fn refuses_thick(&self) -> Option<&'static str>;
    /// Why overwriting with zeros would not overwrite, if so.
    fn refuses_zeroing(&self) -> Option<&'static str>;
    /// The longest image that the pool's file system can have.
    fn largest(&self) -> u64;

    /// A volume's record; an error if there is one that can't be read.
    fn volume(&self, uuid: Uuid) -> Result<Option<VolumeRecord>>;
    /// All volumes in the order of uuids after `after`, at most `limit`; damaged ones are left out.
    fn volumes(&self, after: Option<Uuid>, limit: usize) -> Vec<VolumeRecord>;
    /// Volumes whose record can't be read, with the reason. They are read again first.
    fn damaged(&self) -> Vec<(Uuid, String)>;
    /// Volumes in any state, damaged ones too, as this process remembers them: the disk isn't asked.
    fn known_volumes(&self) -> Vec<Uuid>;
    /// Number of volumes, damaged ones left out.
    fn count(&self) -> u64;

    /// Room now.
    fn space(&self) -> Result<PoolSpace>;
    /// What the disk beneath has, by one look: no image is asked.
    fn disk(&self) -> Result<Space>;

    /// Writes to the disk beneath, durably and without needing room: an error if the disk is dead,
    /// or takes no writes any more. Ends only with the disk's answer.
    fn try_disk(&self) -> Result<()>;

    /// Makes a volume: intent, image, completed record. `admit` judges the room and runs before
    /// anything is done, with the promises of everything else that is running counted in. On an
    /// error everything is undone durably (or the error is [`crate::error::Error::RollbackFailed`]). A crash
    /// leaves an intent, which [`Backend::clean_up`] or [`Backend::delete`] ends.
    fn create(&self, record: VolumeRecord, admit: Admit<'_>) -> Result<VolumeRecord>;
    /// Replaces a record durably.
    fn update(&self, record: &VolumeRecord) -> Result<()>;
    /// Makes the image larger, then the record. On an error the image has its old length again,
    /// or the error is [`crate::error::Error::RollbackFailed`].
    fn grow(&self, record: &VolumeRecord, size: u64, admit: Admit<'_>) -> Result<VolumeRecord>;
    /// Ends a volume: out of sight durably, then its blocks, its record last; and whatever an
    /// earlier try left of it. Nothing there is success. A failure or a crash leaves trash, which a
    /// repeat or [`Backend::clean_up`] ends.
    fn delete(&self, uuid: Uuid) -> Result<()>;
    /// The first step of [`Backend::delete`]: takes a volume out of sight, and leaves its blocks to
    /// [`Backend::clean_up`].
    fn hide(&self, uuid: Uuid) -> Result<()>;
    /// Ends what an earlier creation of a volume has left that was never answered. The record is
    /// read from the disk again: an error if it can't be read, or says that the volume is complete.
    fn delete_unanswered(&self, uuid: Uuid) -> Result<()>;
    /// What may have been left by calls that failed or were cut off, of snapshots too: not every
    /// caller comes again. Something that is being made is among it.
    fn leftovers(&self) -> Result<Vec<Leftover>>;
    /// Ends a leftover, with the lock of its volume or snapshot held, if the disk still says that it
    /// is one; whether it was.
    fn clean_up(&self, leftover: &Leftover) -> Result<bool>;
    /// Whether the end of a leftover is to overwrite blocks with zeros, which may take hours.
    fn is_wiped(&self, leftover: &Leftover) -> bool;
    /// Tells the pool's disk of blocks that deletes with `wipe: discard` have freed, once for all
    /// of them. Does nothing if there are none, or if it was told less than a minute ago.
    fn tell_disk(&self) -> Result<()>;
    /// When the volumes of this pool were trimmed last, in seconds since 1970, if that is known.
    fn trimmed(&self) -> Result<Option<u64>>;
    /// Notes that they were; an error if a later process won't know of it.
    fn note_trimmed(&self, at: u64) -> Result<()>;

    /// Whether images of this pool can share blocks: else snapshots are copies.
    fn shares_blocks(&self) -> bool;

    /// Opens an image, so that it can be copied from, or written to while it is being filled.
    fn open(&self, image: Image) -> Result<ImageHandle>;
    /// Gives an image that is being filled at least this length.
    fn lengthen(&self, image: Image, bytes: u64) -> Result<()>;
    /// Makes a prepared image the clone of one of the same pool that does not change meanwhile.
    /// Only where [`Backend::shares_blocks`].
    fn clone_quiet(&self, source: Image, copy: Image) -> Result<()>;
    /// What copies an image of this pool, which may be in use, into a prepared one. `budget` is
    /// shared by all members of a cut. Only where [`Backend::shares_blocks`].
    fn copier(&self, source: Image, copy: Image, budget: &Arc<Budget>) -> Result<Box<dyn Copier>>;
    /// Gives the btrfs on an image a new fsid; no device may be on the image.
    fn renew_fs_id(&self, image: Image, fs_id: Uuid) -> Result<()>;

    /// Makes a volume that is to be filled: intent recorded as `creating`, an image of its full
    /// length without blocks. Filled by [`Backend::clone_quiet`], [`Backend::copier`] or
    /// [`ImageHandle::copy_to`], then completed by [`Backend::complete`], or ended by [`Backend::delete`]. A crash leaves an intent (and with
    /// `copy` in its record a copy that can go on). On an error nothing is left, or it's
    /// [`crate::error::Error::RollbackFailed`]. What `content_source` names on this pool must exist.
    fn prepare(&self, record: &VolumeRecord, admit: Admit<'_>) -> Result<()>;
    /// Gives a filled image its full length, syncs it and records it as `ready`; reserves and
    /// un-shares all of it first if it's thick. A clone of a thick volume is un-shared as well, so
    /// that its source takes every write: `admit` must have seen that its size is free. After an
    /// error the caller goes on, or calls [`Backend::delete`].
    fn complete(&self, record: &VolumeRecord) -> Result<VolumeRecord>;

    /// Un-shares the first `bytes` of an image in steps, durably, and says in the log how far it
    /// is. Beside
    /// writers it's safe; a repeat is quick over what is done.
    fn unshare(&self, image: Image, bytes: u64) -> Result<()>;
    /// Takes all blocks from an image that was never answered: what it shared is the other's alone.
    fn empty(&self, image: Image) -> Result<()>;

    /// A snapshot's record in any state; an error if there is one that can't be read.
    fn snapshot(&self, uuid: Uuid) -> Result<Option<SnapshotRecord>>;
    /// All snapshots that are ready, in the order of uuids after `after`, at most `limit`.
    fn snapshots(&self, after: Option<Uuid>, limit: usize) -> Vec<SnapshotRecord>;
    /// Snapshots in other states: what a crash left, or what is being made.
    fn unready_snapshots(&self) -> Vec<SnapshotRecord>;
    /// Snapshots whose record can't be read, with the reason. They are read again first.
    fn damaged_snapshots(&self) -> Vec<(Uuid, String)>;
    /// What the record of a snapshot says that its id follows from, also one that can't be read
    /// otherwise; `None` if it doesn't say it. Nothing else of such a record is to be believed.
    fn origin(&self, uuid: Uuid) -> Option<SnapshotOrigin>;
    /// Number of snapshots that are ready.
    fn count_snapshots(&self) -> u64;
    /// Makes an empty snapshot in the state of its record (`preparing`), with an image as long as
    /// its source's and without blocks. Of a thick volume it counts in full until it's ready. On an
    /// error nothing is left, or it's [`crate::error::Error::RollbackFailed`].
    fn prepare_snapshot(&self, record: &SnapshotRecord, admit: Admit<'_>) -> Result<()>;
    /// fsync of a snapshot's image: before its record may say `cut` or `ready`. Its name becomes
    /// durable with that record.
    fn sync_snapshot(&self, uuid: Uuid) -> Result<()>;
    /// Replaces a snapshot's record durably.
    fn update_snapshot(&self, record: &SnapshotRecord) -> Result<()>;
    /// Ends a snapshot, as [`Backend::delete`] does a volume.
    fn delete_snapshot(&self, uuid: Uuid) -> Result<()>;
    /// As [`Backend::delete_unanswered`].
    fn delete_unanswered_snapshot(&self, uuid: Uuid) -> Result<()>;

    /// What is wrong with the image by its length and blocks, if anything: for health.
    fn image_problem(&self, record: &VolumeRecord) -> Result<Option<String>>;
    /// Every device that stands on the image, whoever made it; none if there is no image.
    fn devices(&self, uuid: Uuid) -> Result<Vec<FoundDevice>>;
    /// The volume's device: the one there is, or a new one. Never a second one.
    fn attach(&self, record: &VolumeRecord, mode: AttachMode) -> Result<Attached>;
    /// Ends a device that [`Backend::devices`] found, if it still stands on this image. One that
    /// is open elsewhere goes with its last opener.
    fn detach(&self, uuid: Uuid, device: &Device) -> Result<()>;
    /// Holds the device of a volume open that is among these, if one is.
    fn hold(&self, uuid: Uuid, among: &[LoopStatus]) -> Result<Option<(LoopHold, LoopStatus)>>;
    /// To be called with a device that was the volume's and is gone: whatever the volume had set
    /// on it doesn't stay for the next user of its number.
    fn released(&self, record: &VolumeRecord, device: &Device) -> Result<()>;
    /// Lets a device show the image's present size.
    fn resize(&self, uuid: Uuid, device: &Device) -> Result<()>;

    /// Ends loop devices that a crash left, before the first call, and counts what else is left.
    /// `in_use` tells whether a device is held by a mount or a target.
    fn recover(&self, in_use: &dyn Fn(&Device) -> bool) -> Result<Leftovers>;
}
