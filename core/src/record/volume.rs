//! The record of a volume, next to its image.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::Record;
use crate::model::{AccessMode, Allocation, Capability, FsType, Wipe};

/// The stored state of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeRecord {
    /// Its UUID: version 5 of pool, kind and name.
    pub uuid: Uuid,
    /// The request name, for information.
    pub name: String,
    /// Random, new for each creation with the same name.
    pub incarnation: Uuid,
    pub state: VolumeState,
    /// Size in bytes as requested and reported; the image may be a little longer.
    pub size: u64,
    /// Thin or thick.
    #[serde(default)]
    pub allocation: Allocation,
    /// Logical block size of its loop devices, set at creation and never changed.
    pub block_size: u32,
    /// The block size that the class requested, if any, to compare repeated calls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked_block_size: Option<u32>,
    /// Additional arguments of mkfs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mkfs_options: Vec<String>,
    /// What DeleteVolume does to the blocks.
    #[serde(default)]
    pub wipe: Wipe,
    /// The value of `wipe` at creation, to compare repeated calls after a modification.
    #[serde(default)]
    pub created_wipe: Wipe,
    /// It is published as a raw block volume with a device that can be suspended. Volumes of earlier
    /// releases are, too, from their next publish on.
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    pub block_groups: bool,
    /// Capabilities that were requested at creation.
    pub capabilities: Vec<Capability>,
    /// Whether and how it was ever formatted; set *before* mkfs starts, and never cleared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub formatted: Option<Formatted>,
    /// An inline volume: unpublishing it deletes it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub ephemeral: bool,
    /// How it was last staged. Whether it still is, is read from the kernel (for block: from
    /// `boot`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_stage: Option<LastStage>,
    /// Seconds since 1970.
    #[serde(default)]
    pub created_at: u64,
    /// The source from which it was created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_source: Option<ContentSource>,
    /// The PVC for which it was created, "namespace/name", if the provisioner passes it; hooks are
    /// found by it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,
    /// Progress of a copy that is not finished, from a source with which blocks cannot be shared, or
    /// of the writes that reserve the blocks of a new thick volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<super::CopyProgress>,
    /// A growth that is not finished and reserves blocks by writing them. A program that does not
    /// know this field writes all of them again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub growth: Option<GrowthProgress>,
    /// The incarnation of the volume from which its blocks originate, through any number of copies;
    /// if not set, it is its own. Only images with the same lineage can share blocks. The backend
    /// sets it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lineage: Option<Uuid>,
    /// The number of its image within the pool: the ID of its thin device, or 0 for an image file.
    /// The backend sets it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub image: u32,
    /// The UID of the VolumeMove that has fenced it: only that move may read or delete it, and it is
    /// not used any more. Another copy of it may be in use on another node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fenced: Option<Uuid>,
    /// The last move whose fence was lifted. A request of it that arrives late must not fence the
    /// volume again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifted: Option<Uuid>,
    /// The identity of the content with which it was imported, to recognize a repeat.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub imported: Option<u64>,
    /// Bytes of blocks that the volume from which its blocks originate shared with a file of others
    /// when it was imported, and may still share: they count as blocks of that file. A program that
    /// does not know this field counts them as blocks of the volume alone. The backend sets it, except
    /// for an import.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub foreign_bytes: Option<u64>,
    /// The VolumeRevert that has fenced it and replaces its image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reverting: Option<Reverting>,
    /// The last VolumeRevert that has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reverted: Option<Reverted>,
    /// It is no volume, but the image with which a VolumeRevert replaces that of a volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spare: Option<Spare>,
}

/// A revert of a volume that has begun.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reverting {
    /// The UID of the VolumeRevert.
    pub uid: Uuid,
    /// Its "namespace/name", for messages.
    pub name: String,
    /// The snapshot whose content the volume gets.
    pub snapshot: Uuid,
    /// The incarnation of that snapshot.
    pub incarnation: Uuid,
    /// How many volumes the revert has, with this one, if the router has named it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub members: Option<u32>,
    /// A digest of the IDs of these volumes, if the router has named it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub members_digest: Option<Uuid>,
    /// The record with the other image: before the switch the new one, after it the old one.
    pub spare: Uuid,
    /// The volume has its new image.
    #[serde(default, skip_serializing_if = "is_false")]
    pub is_switched: bool,
    /// The number of the old image, once the volume has the new one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub image: u32,
}

/// A revert that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reverted {
    /// The UID of the VolumeRevert.
    pub uid: Uuid,
    /// The volume has the content of the snapshot. Otherwise it has kept its own.
    pub is_done: bool,
    /// How many reverts of this volume have ended, with this one. A revert names the number that it
    /// was planned with, so that a request that was delayed on its way has no effect later.
    pub number: u64,
}

/// An image with which that of a volume is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spare {
    /// The volume.
    pub of: Uuid,
    /// It has its whole content.
    #[serde(default, skip_serializing_if = "is_false")]
    pub is_whole: bool,
}

impl VolumeRecord {
    /// Whether its content is a raw block device of the user.
    pub fn is_raw(&self) -> bool {
        let formatted = self.formatted.as_ref();
        formatted.is_some_and(|formatted| formatted.kind == FormattedAs::Raw)
    }

    /// Whether it is a copy that many nodes may only read: it is never written.
    pub fn is_for_readers(&self) -> bool {
        let mut modes = self.capabilities.iter().map(|it| it.access_mode);
        self.content_source.is_some()
            && !self.capabilities.is_empty()
            && modes.all(|mode| mode == AccessMode::MultiNodeReaderOnly)
    }

    /// Whether it is a spare that has its whole content.
    pub fn is_whole_spare(&self) -> bool {
        self.spare.is_some_and(|spare| spare.is_whole)
    }

    /// How many reverts of it have ended.
    pub fn reverts(&self) -> u64 {
        self.reverted.map_or(0, |reverted| reverted.number)
    }

    /// The incarnation from which its blocks originate.
    pub fn lineage(&self) -> Uuid {
        self.lineage.unwrap_or(self.incarnation)
    }
}

/// How far a thick volume has blocks beyond its end, to which its users cannot write yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrowthProgress {
    /// No block beyond this offset was written.
    pub end: u64,
    /// All blocks before this offset are written durably.
    pub written: u64,
}

/// The source from which a volume was created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ContentSource {
    /// A snapshot, by its ID.
    Snapshot(String),
    /// A volume, by its ID.
    Volume(String),
}

fn is_false(value: &bool) -> bool {
    !*value
}

fn is_true(value: &bool) -> bool {
    *value
}

fn yes() -> bool {
    true
}

pub(super) fn is_zero(value: &u32) -> bool {
    *value == 0
}

impl Record for VolumeRecord {
    const VERSION: u32 = 4;
    const WHAT: &'static str = "record of a volume";

    fn written_version(&self) -> u32 {
        // Programs that only read version 3 would let a pod use it while its image is replaced, and
        // would delete the other image as an incomplete volume.
        if self.reverting.is_some() || self.spare.is_some() {
            return 4;
        }
        // Programs that only read version 2 would let a pod use it, while its copy is in use too.
        if self.fenced.is_some() {
            return 3;
        }
        match self.is_for_readers() || self.image != 0 {
            // Programs that only read version 1 do not know this mode, and would look for an image
            // file.
            true => 2,
            false => Formatted::version(self.formatted.as_ref()),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VolumeState {
    /// The intent is recorded; the image may be missing or too short. It is never returned to
    /// callers.
    Creating,
    /// Complete.
    Ready,
}

/// What was first written to the volume; this never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FormattedAs {
    /// The user has it as a raw device: its content belongs to the user.
    Raw,
    Ext4,
    Xfs,
    Btrfs,
}

impl From<FsType> for FormattedAs {
    fn from(fs: FsType) -> FormattedAs {
        match fs {
            FsType::Ext4 => FormattedAs::Ext4,
            FsType::Xfs => FormattedAs::Xfs,
            FsType::Btrfs => FormattedAs::Btrfs,
        }
    }
}

impl FormattedAs {
    /// The file system, unless it is a raw device.
    pub fn fs(self) -> Option<FsType> {
        match self {
            FormattedAs::Raw => None,
            FormattedAs::Ext4 => Some(FsType::Ext4),
            FormattedAs::Xfs => Some(FsType::Xfs),
            FormattedAs::Btrfs => Some(FsType::Btrfs),
        }
    }

    /// The name used in messages.
    pub fn as_str(self) -> &'static str {
        self.fs().map_or("a raw block device", FsType::name)
    }
}

/// The record that a volume has content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Formatted {
    /// The kind of content.
    #[serde(rename = "as")]
    pub kind: FormattedAs,
    /// UUID passed to mkfs; nil for a raw device.
    pub uuid: Uuid,
    /// False from before mkfs starts until after it has exited. A volume is never mounted or
    /// exposed while this is false, and mkfs may run (again) only then.
    pub complete: bool,
    /// Set from before the file system is grown unmounted until that has finished. While it is set,
    /// the growth may have been interrupted, so the file system is repaired before it is mounted.
    #[serde(default, skip_serializing_if = "is_false")]
    pub growing: bool,
    /// Its user created the file system on a raw device, so it is mounted with more caution.
    #[serde(default, skip_serializing_if = "is_false")]
    pub found: bool,
}

impl Formatted {
    /// The record for a file system for which mkfs is about to start.
    pub fn begun(kind: FormattedAs, uuid: Uuid) -> Formatted {
        Formatted {
            kind,
            uuid,
            complete: false,
            growing: false,
            found: false,
        }
    }

    /// The record for a complete file system.
    pub fn complete(kind: FormattedAs, uuid: Uuid) -> Formatted {
        Formatted {
            complete: true,
            ..Formatted::begun(kind, uuid)
        }
    }

    /// The version of a record with this content: programs that only read version 1 would mount a
    /// file system that a user created without caution, and one whose growth was interrupted
    /// without repair.
    pub(super) fn version(formatted: Option<&Formatted>) -> u32 {
        let is_new = formatted.is_some_and(|it| it.growing || it.found);
        if is_new { 2 } else { 1 }
    }

    /// The record for a raw device.
    pub fn raw() -> Formatted {
        Formatted::complete(FormattedAs::Raw, Uuid::nil())
    }
}

/// How a volume was last staged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastStage {
    pub staging_path: String,
    pub capability: Capability,
    /// For block: the boot in which it was staged; unstaging clears it. For mounted volumes only
    /// the mount table is used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<Uuid>,
}
