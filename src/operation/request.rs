//! What the edge hands to operations and gets back: values, already validated in themselves.

use crate::error::Result;
use crate::model::Capability;
use crate::model::CapacityRange;
use crate::model::GroupId;
use crate::model::HomeId;
use crate::model::Level;
use crate::model::MutableParameters;
use crate::model::PoolId;
use crate::model::SnapshotId;
use crate::model::SnapshotParameters;
use crate::model::VolumeId;
use crate::model::VolumeParameters;
use crate::model::parameters::EphemeralParameters;
use uuid::Uuid;

pub use crate::record::ContentSource;

/// Entries of a page at most, also where the caller sets no limit. With about 300 bytes each, a
/// page is well below the 4 MiB that gRPC clients accept by default.
pub const MOST_LISTED: usize = 5000;

/// CreateVolume.
#[derive(Clone, Debug)]
pub struct CreateVolume {
    /// Request name: 1 to 128 bytes in any script.
    pub name: String,
    /// Size.
    pub capacity: CapacityRange,
    /// At least one.
    pub capabilities: Vec<Capability>,
    /// The class; mutable parameters already override.
    pub parameters: VolumeParameters,
    /// Values of our topology key among `requisite`; empty is "anywhere". A segment without our
    /// key is nowhere: the edge then gives one that can't be a home.
    pub requisite: Vec<String>,
    /// What it begins with; nothing is an empty volume.
    pub content_source: Option<ContentSource>,
}

/// A volume, as answers tell it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// Id.
    pub id: VolumeId,
    /// Bytes as asked for.
    pub size: u64,
    /// Where it is.
    pub home: HomeId,
    /// What it was made from.
    pub content_source: Option<ContentSource>,
    /// Made by a publish, for as long as its pod lives.
    pub ephemeral: bool,
}

/// ControllerPublishVolume.
#[derive(Clone, Debug)]
pub struct Attach {
    /// As given.
    pub volume_id: String,
    /// As given.
    pub node_id: String,
    /// How it will be used.
    pub capability: Capability,
    /// Read-only attach: not offered (PUBLISH_READONLY).
    pub read_only: bool,
}

/// ValidateVolumeCapabilities.
#[derive(Clone, Debug)]
pub struct Validate {
    /// As given.
    pub volume_id: String,
    /// To confirm. `Err` is the sentence for one that can't be served, such as a multi-node mode.
    pub capabilities: Vec<Result<Capability, String>>,
    /// Class parameters to confirm, if any were given.
    pub parameters: Option<VolumeParameters>,
    /// Mutable ones to confirm.
    pub mutable: MutableParameters,
}

/// ListVolumes.
#[derive(Clone, Debug, Default)]
pub struct ListVolumes {
    /// At most so many; 0 is no limit.
    pub max_entries: usize,
    /// Empty or a `next_token`.
    pub starting_token: String,
    /// Only those of this pool; the router asks so.
    pub pool: Option<PoolId>,
}

/// A page.
#[derive(Clone, Debug, Default)]
pub struct VolumePage {
    /// In the order of ids.
    pub volumes: Vec<Volume>,
    /// Empty at the end.
    pub next_token: String,
}

/// GetCapacity.
#[derive(Clone, Debug)]
pub struct AskCapacity {
    /// Empty is "any".
    pub capabilities: Vec<Capability>,
    /// The class.
    pub parameters: VolumeParameters,
    /// Value of our topology key, if a topology was given; as in [`CreateVolume::requisite`].
    pub topology: Option<String>,
}

/// What can be had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// Bytes in all.
    pub available: u64,
    /// The largest single volume.
    pub maximum: u64,
    /// The smallest that isn't raised.
    pub minimum: u64,
}

/// ControllerExpandVolume.
#[derive(Clone, Debug)]
pub struct ExpandVolume {
    /// As given.
    pub volume_id: String,
    /// Wanted.
    pub capacity: CapacityRange,
    /// If given, it must fit the volume.
    pub capability: Option<Capability>,
}

/// ControllerExpandVolume's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expanded {
    /// Bytes now.
    pub size: u64,
    /// Whether the node has something to do.
    pub node_expansion_required: bool,
}

/// ControllerModifyVolume.
#[derive(Clone, Debug)]
pub struct ModifyVolume {
    /// As given.
    pub volume_id: String,
    /// What to change.
    pub mutable: MutableParameters,
}

/// NodeStageVolume.
#[derive(Clone, Debug)]
pub struct StageVolume {
    /// As given.
    pub volume_id: String,
    /// Where.
    pub staging_path: String,
    /// How.
    pub capability: Capability,
}

/// NodePublishVolume of a persistent volume.
#[derive(Clone, Debug)]
pub struct PublishVolume {
    /// As given.
    pub volume_id: String,
    /// Empty if not given.
    pub staging_path: String,
    /// Where.
    pub target_path: String,
    /// How.
    pub capability: Capability,
    /// Really read-only.
    pub read_only: bool,
}

/// NodePublishVolume of an inline volume.
#[derive(Clone, Debug)]
pub struct PublishEphemeral {
    /// The kubelet's id: any text, a name for us.
    pub volume_id: String,
    /// Where.
    pub target_path: String,
    /// How.
    pub capability: Capability,
    /// Really read-only.
    pub read_only: bool,
    /// What its pod asks for.
    pub attributes: EphemeralParameters,
}

/// NodeGetVolumeStats.
#[derive(Clone, Debug)]
pub struct AskStats {
    /// As given.
    pub volume_id: String,
    /// A staging or target path.
    pub volume_path: String,
}

/// One row of usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// In all.
    pub total: u64,
    /// Free for users; `None` for block.
    pub available: Option<u64>,
    /// Used; `None` for block.
    pub used: Option<u64>,
}

/// NodeGetVolumeStats's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stats {
    /// Bytes.
    pub bytes: Usage,
    /// Inodes; `None` for block, and where the file system has no fixed number.
    pub inodes: Option<Usage>,
}

/// NodeExpandVolume.
#[derive(Clone, Debug)]
pub struct ExpandNode {
    /// As given.
    pub volume_id: String,
    /// Staging or target path.
    pub volume_path: String,
    /// May be absent: to the volume's size.
    pub capacity: Option<CapacityRange>,
    /// If given, it must fit the volume.
    pub capability: Option<Capability>,
}

/// One finding about a volume's or pool's health.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How bad.
    pub severity: Severity,
    /// CamelCase, stable.
    pub reason: &'static str,
    /// For people.
    pub message: String,
}

/// How bad a finding is; the edge maps it to CSI's two enums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// Works, but not well.
    Degraded,
    /// Can't be reached.
    Inaccessible,
    /// Content is gone.
    DataLoss,
}

/// A volume's findings; none is "healthy".
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeHealth {
    /// Id.
    pub id: VolumeId,
    /// Each (severity, reason) once.
    pub findings: Vec<Finding>,
}

/// CreateSnapshot.
#[derive(Clone, Debug)]
pub struct CreateSnapshot {
    /// Request name: 1 to 128 bytes in any script.
    pub name: String,
    /// As given.
    pub source_volume_id: String,
    /// The class.
    pub parameters: SnapshotParameters,
    /// As in [`CreateVolume::requisite`].
    pub requisite: Vec<String>,
}

/// A snapshot, as answers tell it: cut and durable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Id.
    pub id: SnapshotId,
    /// The volume that it's of, which may be gone.
    pub source_volume_id: VolumeId,
    /// Bytes that a restore needs.
    pub size: u64,
    /// Nanoseconds since 1970.
    pub cut_at: u64,
    /// What it reached.
    pub level: Level,
    /// Why not more.
    pub reason: String,
    /// Its group.
    pub group: Option<GroupId>,
    /// It may be deleted without its group, and is told as a snapshot of its own.
    pub independent: bool,
    /// Where it is.
    pub home: HomeId,
}

/// ListSnapshots.
#[derive(Clone, Debug, Default)]
pub struct ListSnapshots {
    /// At most so many; 0 is no limit.
    pub max_entries: usize,
    /// Empty or a `next_token`.
    pub starting_token: String,
    /// Only those of this volume, if not empty.
    pub source_volume_id: String,
    /// Only this one, if not empty.
    pub snapshot_id: String,
    /// As in [`ListVolumes::pool`], where neither of them is given.
    pub pool: Option<PoolId>,
}

/// A page.
#[derive(Clone, Debug, Default)]
pub struct SnapshotPage {
    /// In the order of ids.
    pub snapshots: Vec<Snapshot>,
    /// Empty at the end.
    pub next_token: String,
}

/// CreateVolumeGroupSnapshot.
#[derive(Clone, Debug)]
pub struct CreateGroup {
    /// Request name.
    pub name: String,
    /// As given, at least one, each once.
    pub source_volume_ids: Vec<String>,
    /// The class.
    pub parameters: SnapshotParameters,
}

/// A group snapshot, as answers tell it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Id.
    pub id: GroupId,
    /// Its members, in the order of the request.
    pub snapshots: Vec<Snapshot>,
    /// Nanoseconds since 1970; the same in each member.
    pub cut_at: u64,
}

/// DeleteVolumeGroupSnapshot, GetVolumeGroupSnapshot.
#[derive(Clone, Debug)]
pub struct NamedGroup {
    /// As given.
    pub group_id: String,
    /// As given.
    pub snapshot_ids: Vec<String>,
}

/// How a single snapshot is deleted.
#[derive(Clone, Debug, Default)]
pub struct DeleteOne {
    /// Also a member of a group that is deleted together: a person says that nobody owns it.
    pub of_any_group: bool,
    /// The group that has been settled on all nodes.
    pub settled: Option<GroupId>,
}

/// GetMetadataAllocated (no base), GetMetadataDelta.
#[derive(Clone, Debug)]
pub struct AskMetadata {
    /// As given; `None` is "everything allocated".
    pub base_snapshot_id: Option<String>,
    /// As given.
    pub snapshot_id: String,
    /// Only what ends beyond this byte.
    pub starting_offset: u64,
    /// At most so many ranges.
    pub max_results: usize,
    /// What earlier pages were of, if there were any.
    pub of: Option<MetadataOf>,
}

/// Which snapshots a page is of: a deleted one's name, and with it its id, may have come again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MetadataOf {
    /// Incarnation of the base.
    pub base: Option<Uuid>,
    /// Incarnation of the snapshot.
    pub target: Uuid,
}

/// A part of the answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetadataPage {
    /// Bytes of the volume.
    pub capacity: u64,
    /// (offset, bytes), ascending, not overlapping.
    pub ranges: Vec<(u64, u64)>,
    /// Where the next page begins; `None` at the end.
    pub next: Option<u64>,
    /// To be handed back for the next page.
    pub of: MetadataOf,
}

/// Who a deleted thing was; for logs.
pub type Incarnation = Uuid;
