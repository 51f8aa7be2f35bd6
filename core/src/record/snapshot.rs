//! The record of a snapshot, beside its image.

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::Record;
use super::volume::Formatted;
use crate::model::{Allocation, Capability, Level, Wipe};

/// Everything that is known of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotRecord {
    /// Its uuid: version 5 of pool, kind and name; of a member, of the group's name and its source.
    pub uuid: Uuid,
    /// The request name; of a member, the group's.
    pub name: String,
    /// Random, new with each creation of the same name.
    pub incarnation: Uuid,
    /// Where in its life it is.
    pub state: SnapshotState,
    /// The try that made it. Members of different tries never make a group.
    pub attempt: Uuid,
    /// The volume that it's of; on the same pool.
    pub source: Uuid,
    /// Which volume of this id: a deleted one's name may have come again.
    pub source_incarnation: Uuid,
    /// Bytes of the volume at the cut.
    pub size: u64,
    /// Logical block size, inherited by restores.
    pub block_size: u32,
    /// How the volume's blocks were had.
    #[serde(default)]
    pub allocation: Allocation,
    /// What the volume was formatted as, inherited by restores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub formatted: Option<Formatted>,
    /// What the volume was made for.
    #[serde(default)]
    pub capabilities: Vec<Capability>,
    /// What a delete does to the blocks: as the volume had it at the cut.
    #[serde(default)]
    pub wipe: Wipe,
    /// When it was cut: nanoseconds since 1970, one for all members of a group. 0 before.
    #[serde(default)]
    pub cut_at: u64,
    /// The level that it reached.
    #[serde(default)]
    pub level: Level,
    /// The lowest level that its class took for one, for comparing repeats; none of a member, whose
    /// group is compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promised: Option<Level>,
    /// Why it's this level and not a higher one, in words.
    #[serde(default)]
    pub reason: String,
    /// The group that it's a member of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<GroupMembership>,
    /// A copy that isn't finished, on a pool that can't share blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<CopyProgress>,
    /// As in [`super::VolumeRecord::lineage`]; none is the source's incarnation. The backend sets it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lineage: Option<Uuid>,
}

impl SnapshotRecord {
    /// Where its blocks come from in the end.
    pub fn lineage(&self) -> Uuid {
        self.lineage.unwrap_or(self.source_incarnation)
    }
}

impl Record for SnapshotRecord {
    const VERSION: u32 = 2;
    const WHAT: &'static str = "record of a snapshot";

    fn written_version(&self) -> u32 {
        super::Formatted::version(self.formatted.as_ref())
    }
}

/// What the id of a snapshot follows from.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct SnapshotOrigin {
    /// The request name.
    pub name: String,
    /// The volume that it's of.
    pub source: Uuid,
    /// The group that it's a member of.
    #[serde(default)]
    pub group: Option<OriginGroup>,
}

impl SnapshotOrigin {
    /// Of a record of whatever version; `None` if it doesn't say all of it.
    pub fn parse(record: &[u8]) -> Option<SnapshotOrigin> {
        serde_json::from_slice(record).ok()
    }
}

/// A group, by its id alone.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct OriginGroup {
    /// Its id.
    pub id: Uuid,
}

/// A snapshot's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotState {
    /// Intent, or a cut that isn't proven: in no list, never answered, deleted at the next start
    /// (but a copy that goes on).
    Preparing,
    /// Cut and proven good, durable; its group's first member has not been committed yet.
    Cut,
    /// Answered.
    Ready,
}

/// What a member knows of its group: all of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupMembership {
    /// The group's id.
    pub id: Uuid,
    /// Ids of all members, in the order of the sources. The first one's state commits the group:
    /// once it's ready, the others are rolled forward; until then, all are rolled back.
    pub members: Vec<String>,
    /// Ids of all sources, in the order of the request.
    pub sources: Vec<String>,
    /// The parameters that it was asked for with, for comparing repeats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<String>,
    /// Members may be deleted one by one. A program that doesn't know it deletes them together,
    /// which loses nothing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub independent: bool,
}

/// How far a copy has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyProgress {
    /// Bytes that are copied, durably.
    pub copied: u64,
    /// When the source had been changed last when the copy began, in nanoseconds since 1970:
    /// if that has changed, the copy begins anew.
    pub source_modified: u64,
}
