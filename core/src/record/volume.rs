//! The record of a volume, beside its image.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::Record;
use crate::model::{AccessMode, Allocation, Capability, FsType, Wipe};

/// Everything that is known of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeRecord {
    /// Its uuid: version 5 of pool, kind and name.
    pub uuid: Uuid,
    /// The request name, for people.
    pub name: String,
    /// Random, new with each creation of the same name.
    pub incarnation: Uuid,
    /// Where in its life it is.
    pub state: VolumeState,
    /// Bytes as asked for and reported; the image may be a little longer.
    pub size: u64,
    /// Thin or thick.
    #[serde(default)]
    pub allocation: Allocation,
    /// Logical block size of its loop devices, decided at creation and kept.
    pub block_size: u32,
    /// The block size that the class asked for, if it did: for comparing repeats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked_block_size: Option<u32>,
    /// Extra words for mkfs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mkfs_options: Vec<String>,
    /// What delete does.
    #[serde(default)]
    pub wipe: Wipe,
    /// What wipe was at creation: for comparing repeats after a modify.
    #[serde(default)]
    pub created_wipe: Wipe,
    /// Capabilities asked for at creation.
    pub capabilities: Vec<Capability>,
    /// Whether and how it was ever formatted; set *before* mkfs starts. Never goes back to none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub formatted: Option<Formatted>,
    /// An inline volume: its life ends with its publish.
    #[serde(default, skip_serializing_if = "is_false")]
    pub ephemeral: bool,
    /// How it was staged last. Whether it still is, the kernel says (for block: `boot`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_stage: Option<LastStage>,
    /// Seconds since 1970.
    #[serde(default)]
    pub created_at: u64,
    /// What it was made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_source: Option<ContentSource>,
    /// The claim that it was made for, "namespace/name", where the provisioner says it: hooks are
    /// found by it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim: Option<String>,
    /// A copy that isn't finished, from where blocks can't be shared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<super::CopyProgress>,
    /// The incarnation of the volume that its blocks come from in the end, however many copies
    /// lie between; none is its own. Only what has one lineage can share blocks. The backend
    /// sets it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lineage: Option<Uuid>,
}

impl VolumeRecord {
    /// Whether its content is the user's from the first byte on: raw block.
    pub fn is_raw(&self) -> bool {
        let formatted = self.formatted.as_ref();
        formatted.is_some_and(|formatted| formatted.kind == FormattedAs::Raw)
    }

    /// A copy for readers of many nodes alone: nobody ever writes to it.
    pub fn is_for_readers(&self) -> bool {
        let mut modes = self.capabilities.iter().map(|it| it.access_mode);
        self.content_source.is_some()
            && !self.capabilities.is_empty()
            && modes.all(|mode| mode == AccessMode::MultiNodeReaderOnly)
    }

    /// Where its blocks come from in the end.
    pub fn lineage(&self) -> Uuid {
        self.lineage.unwrap_or(self.incarnation)
    }
}

/// What a volume was made from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ContentSource {
    /// A snapshot, by its id.
    Snapshot(String),
    /// A volume, by its id.
    Volume(String),
}

fn is_false(value: &bool) -> bool {
    !*value
}

impl Record for VolumeRecord {
    const VERSION: u32 = 2;
    const WHAT: &'static str = "record of a volume";

    fn written_version(&self) -> u32 {
        match self.is_for_readers() {
            // Before 2, programs do not know the mode.
            true => 2,
            false => Formatted::version(self.formatted.as_ref()),
        }
    }
}

/// A volume's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VolumeState {
    /// The intent is recorded; the image may be missing or short. Never answered to anybody.
    Creating,
    /// Complete.
    Ready,
}

/// What was put on the volume, once and for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FormattedAs {
    /// The user has it as a raw device: whatever is on it is theirs.
    Raw,
    /// ext4.
    Ext4,
    /// xfs.
    Xfs,
    /// btrfs.
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
    /// The file system, if it is one.
    pub fn fs(self) -> Option<FsType> {
        match self {
            FormattedAs::Raw => None,
            FormattedAs::Ext4 => Some(FsType::Ext4),
            FormattedAs::Xfs => Some(FsType::Xfs),
            FormattedAs::Btrfs => Some(FsType::Btrfs),
        }
    }

    /// For sentences.
    pub fn word(self) -> &'static str {
        self.fs().map_or("a raw block device", FsType::name)
    }
}

/// The mark that a volume has content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Formatted {
    /// As what.
    #[serde(rename = "as")]
    pub kind: FormattedAs,
    /// Uuid given to mkfs; nil for raw.
    pub uuid: Uuid,
    /// False from before mkfs starts until after it has ended. A volume is never mounted or
    /// shown while this is false, so only then may mkfs run (again).
    pub complete: bool,
    /// Set from before the file system is grown unmounted until that has ended. While it is set
    /// the file system may be in the middle of that, and is repaired before it is mounted.
    #[serde(default, skip_serializing_if = "is_false")]
    pub growing: bool,
    /// Its user made the file system, on a raw device: it is mounted with more caution.
    #[serde(default, skip_serializing_if = "is_false")]
    pub found: bool,
}

impl Formatted {
    /// A mark for mkfs, which is about to start.
    pub fn begun(kind: FormattedAs, uuid: Uuid) -> Formatted {
        Formatted {
            kind,
            uuid,
            complete: false,
            growing: false,
            found: false,
        }
    }

    /// The same for what is made.
    pub fn complete(kind: FormattedAs, uuid: Uuid) -> Formatted {
        Formatted {
            complete: true,
            ..Formatted::begun(kind, uuid)
        }
    }

    /// The version of a record with this mark: before 2, programs would mount what a user has made
    /// without caution, and what is in the middle of its growth as it is.
    pub(super) fn version(formatted: Option<&Formatted>) -> u32 {
        let is_new = formatted.is_some_and(|it| it.growing || it.found);
        if is_new { 2 } else { 1 }
    }

    /// A raw device.
    pub fn raw() -> Formatted {
        Formatted::complete(FormattedAs::Raw, Uuid::nil())
    }
}

/// How a volume was staged last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastStage {
    /// Where.
    pub staging_path: String,
    /// How.
    pub capability: Capability,
    /// For block: the boot in which it was staged; removed by unstage. A mounted volume's stage
    /// is told by the mount table alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<Uuid>,
}
