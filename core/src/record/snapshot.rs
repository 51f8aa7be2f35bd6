//! The record of a snapshot, next to its image.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::Record;
use super::volume::Formatted;
use crate::model::{Allocation, Capability, Level, Wipe};

/// The stored state of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotRecord {
    /// Its UUID: version 5 of pool, kind and name; for a member of a group, of the group's name and
    /// its source.
    pub uuid: Uuid,
    /// The request name; for a member, that of the group.
    pub name: String,
    /// Random, new for each creation with the same name.
    pub incarnation: Uuid,
    pub state: SnapshotState,
    /// The attempt that created it. Members of different attempts never form a group.
    pub attempt: Uuid,
    /// The source volume, on the same pool.
    pub source: Uuid,
    /// Which volume with this ID it is: after a deletion, another volume can get the same name and
    /// ID.
    pub source_incarnation: Uuid,
    /// Size of the volume at the cut, in bytes.
    pub size: u64,
    /// Logical block size, which restored volumes inherit.
    pub block_size: u32,
    /// How the blocks of the volume were allocated.
    #[serde(default)]
    pub allocation: Allocation,
    /// The file system of the volume, which restored volumes inherit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub formatted: Option<Formatted>,
    /// The capabilities with which the volume was created.
    #[serde(default)]
    pub capabilities: Vec<Capability>,
    /// What deletion does to the blocks: the setting of the volume at the cut.
    #[serde(default)]
    pub wipe: Wipe,
    /// The time of the cut in nanoseconds since 1970, equal for all members of a group; 0 before
    /// the cut.
    #[serde(default)]
    pub cut_at: u64,
    /// The consistency level that it reached.
    #[serde(default)]
    pub level: Level,
    /// The lowest level that its class accepted for it, to compare repeated calls; not set for a
    /// member, whose group is compared.
    #[serde(rename = "promised", default, skip_serializing_if = "Option::is_none")]
    pub min_level: Option<Level>,
    /// Why it did not reach a higher level.
    #[serde(default)]
    pub reason: String,
    /// The group to which it belongs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<GroupMembership>,
    /// Progress of a copy that is not finished, on a pool that cannot share blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<CopyProgress>,
    /// As in [`super::VolumeRecord::lineage`]; if not set, it is the source's incarnation. The
    /// backend sets it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lineage: Option<Uuid>,
    /// Whether it stays as the hidden base of its volume once it is deleted, or stays as one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<Base>,
    /// As in [`super::VolumeRecord::image`].
    #[serde(default, skip_serializing_if = "super::volume::is_zero")]
    pub image: u32,
    /// It is the content of a clone on another node: no list has it, and it is deleted when no call has
    /// named it for an hour. A program that does not know the field lists it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub for_clone: bool,
    /// As in [`super::VolumeRecord::foreign_bytes`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub foreign_bytes: Option<u64>,
}

fn is_false(value: &bool) -> bool {
    !value
}

impl SnapshotRecord {
    /// Whether it was deleted, and stays as the hidden base of its volume.
    pub fn is_base(&self) -> bool {
        self.state == SnapshotState::Preparing && self.base == Some(Base::Kept)
    }

    /// The incarnation from which its blocks originate.
    pub fn lineage(&self) -> Uuid {
        self.lineage.unwrap_or(self.source_incarnation)
    }
}

impl Record for SnapshotRecord {
    const VERSION: u32 = 2;
    const WHAT: &'static str = "record of a snapshot";

    fn written_version(&self) -> u32 {
        match self.image {
            0 => super::Formatted::version(self.formatted.as_ref()),
            // Programs that only read version 1 would look for an image file.
            _ => 2,
        }
    }
}

/// The values from which the ID of a snapshot is derived.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct SnapshotOrigin {
    /// The request name.
    pub name: String,
    /// The source volume.
    pub source: Uuid,
    /// The group to which it belongs.
    #[serde(default)]
    pub group: Option<OriginGroup>,
}

impl SnapshotOrigin {
    /// Parses a record of any version; `None` if it lacks one of the values.
    pub fn parse(record: &[u8]) -> Option<SnapshotOrigin> {
        serde_json::from_slice(record).ok()
    }
}

/// A group, identified by its ID only.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct OriginGroup {
    pub id: Uuid,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotState {
    /// The intent is recorded, or the cut is not verified. It is in no list and never returned; the
    /// next start deletes it, except for a copy that can continue.
    Preparing,
    /// The cut is verified and durable; the first member of its group has not been committed yet.
    Cut,
    /// Complete: it can be returned to callers.
    Ready,
}

/// The snapshot as a base to which later snapshots of its volume are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Base {
    /// Its class keeps it as the hidden base of the volume once it is deleted.
    Keep,
    /// It was deleted, and is the hidden base. Its state is [`SnapshotState::Preparing`]: a program
    /// that does not know this field deletes it, as any snapshot that was never returned.
    Kept,
}

/// What a member records about its group, which is everything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupMembership {
    /// The group's id.
    pub id: Uuid,
    /// IDs of all members, in the order of the sources. The state of the first one commits the
    /// group: once it is ready, the others are rolled forward; until then, all are rolled back.
    pub members: Vec<String>,
    /// IDs of all sources, in the order of the request.
    pub sources: Vec<String>,
    /// The parameters of the request, to compare repeated calls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<String>,
    /// Members may be deleted individually. A program that does not know this field deletes them
    /// together, which loses nothing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub independent: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyProgress {
    /// Number of bytes that are copied durably, or written to reserve blocks.
    pub copied: u64,
    /// When the source had last been modified when the copy began, in nanoseconds since 1970: if
    /// that has changed, the copy starts again. Where the blocks of the source are shared already
    /// and are only written, this is its identity; without a source it is 0.
    /// While differences are copied, it is [`CopyProgress::beside`] of the identity of the source.
    pub source_modified: u64,
    /// The identity of the snapshot of another node whose content the image still has where nothing
    /// is copied yet: only differences to it are copied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<u64>,
}

impl CopyProgress {
    /// What [`CopyProgress::source_modified`] is for a source if `base` is set: not its identity, so
    /// that a program that does not know `base` begins the copy again instead of continuing it.
    pub fn beside(identity: u64) -> u64 {
        !identity
    }
}
