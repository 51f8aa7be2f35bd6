//! The arguments and results of operations. Each argument has been validated on its own, without
//! regard to the state of the node.

use std::path::PathBuf;
use std::time::Duration;

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

/// Maximum number of entries in a page, also if the caller sets no limit. With about 300 bytes
/// each, a page is well below the 4 MiB that gRPC clients accept by default.
pub const MAX_LISTED: usize = 5000;

/// Arguments of CreateVolume.
#[derive(Clone, Debug)]
pub struct CreateVolume {
    /// Request name: 1 to 128 bytes in any script.
    pub name: String,
    /// The requested size.
    pub capacity: CapacityRange,
    /// The requested capabilities; at least one.
    pub capabilities: Vec<Capability>,
    /// The class parameters, already overridden by the mutable parameters.
    pub parameters: VolumeParameters,
    /// The values of the driver's topology key in `requisite`; if empty, any node is allowed. For a
    /// segment without the key the parser passes an empty string, which is the ID of no home.
    pub requisite: Vec<String>,
    /// The initial content. Without it the volume is empty.
    pub content_source: Option<ContentSource>,
}

/// A volume, as returned to callers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    pub id: VolumeId,
    /// The size in bytes, as requested.
    pub size: u64,
    /// The home of the node on which the volume is.
    pub home: HomeId,
    /// The snapshot or volume from which it was created.
    pub content_source: Option<ContentSource>,
    /// Whether it is an inline volume: created by NodePublishVolume, and deleted with its pod.
    pub ephemeral: bool,
    /// Whether it is complete: not one that moves to this node and still gets data.
    pub is_complete: bool,
}

/// Arguments of ControllerPublishVolume.
#[derive(Clone, Debug)]
pub struct Attach {
    /// The volume ID, as received.
    pub volume_id: String,
    /// The node ID, as received.
    pub node_id: String,
    /// How the volume will be used.
    pub capability: Capability,
    /// Whether a read-only attachment is requested, which is not supported (PUBLISH_READONLY).
    pub read_only: bool,
}

/// Arguments of ValidateVolumeCapabilities.
#[derive(Clone, Debug)]
pub struct Validate {
    /// The volume ID, as received.
    pub volume_id: String,
    /// The capabilities to confirm. `Err` has the message for a capability that is not supported,
    /// such as a multi-node mode.
    pub capabilities: Vec<Result<Capability, String>>,
    /// The class parameters to confirm, if there are any.
    pub parameters: Option<VolumeParameters>,
    /// The mutable parameters to confirm.
    pub mutable: MutableParameters,
}

/// Arguments of ListVolumes.
#[derive(Clone, Debug, Default)]
pub struct ListVolumes {
    /// The maximum number of entries; 0 means no limit.
    pub max_entries: usize,
    /// A `next_token`, or empty to begin at the first volume.
    pub starting_token: String,
    /// Restricts the list to one pool. Only the router sets it.
    pub pool: Option<PoolId>,
}

#[derive(Clone, Debug, Default)]
pub struct VolumePage {
    /// The volumes, ordered by ID.
    pub volumes: Vec<Volume>,
    /// The token of the next page; empty on the last page.
    pub next_token: String,
}

/// Arguments of GetCapacity.
#[derive(Clone, Debug)]
pub struct GetCapacity {
    /// The requested capabilities; if empty, any.
    pub capabilities: Vec<Capability>,
    /// The class parameters.
    pub parameters: VolumeParameters,
    /// The value of the driver's topology key, if a topology was given; see
    /// [`CreateVolume::requisite`].
    pub topology: Option<String>,
}

/// The capacity that is available for new volumes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// The total, in bytes.
    pub available: u64,
    /// The maximum size of a volume, in bytes.
    pub maximum: u64,
    /// The minimum size of a volume, in bytes. A smaller request is raised to it.
    pub minimum: u64,
}

/// Arguments of ControllerExpandVolume.
#[derive(Clone, Debug)]
pub struct ExpandVolume {
    /// The volume ID, as received.
    pub volume_id: String,
    /// The requested size.
    pub capacity: CapacityRange,
    /// If given, it must match the volume.
    pub capability: Option<Capability>,
}

/// Result of ControllerExpandVolume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expanded {
    /// The new size in bytes.
    pub size: u64,
    /// Whether NodeExpandVolume must be called.
    pub node_expansion_required: bool,
}

/// Arguments of ControllerModifyVolume.
#[derive(Clone, Debug)]
pub struct ModifyVolume {
    /// The volume ID, as received.
    pub volume_id: String,
    /// The parameters to change.
    pub mutable: MutableParameters,
}

/// Arguments of NodeStageVolume.
#[derive(Clone, Debug)]
pub struct StageVolume {
    /// The volume ID, as received.
    pub volume_id: String,
    pub staging_path: String,
    /// How the volume will be used.
    pub capability: Capability,
}

/// Arguments of NodePublishVolume for a persistent volume.
#[derive(Clone, Debug)]
pub struct PublishVolume {
    /// The volume ID, as received.
    pub volume_id: String,
    /// The staging path; empty if not given.
    pub staging_path: String,
    pub target_path: String,
    /// How the volume will be used.
    pub capability: Capability,
    /// Whether the target must be read-only.
    pub read_only: bool,
}

/// Arguments of NodePublishVolume for an inline volume.
#[derive(Clone, Debug)]
pub struct PublishEphemeral {
    /// The ID that the kubelet has generated: any text, which the driver uses as a name.
    pub volume_id: String,
    pub target_path: String,
    /// How the volume will be used.
    pub capability: Capability,
    /// Whether the target must be read-only.
    pub read_only: bool,
    /// The attributes in the pod's definition.
    pub attributes: EphemeralParameters,
}

/// Arguments of NodeGetVolumeStats.
#[derive(Clone, Debug)]
pub struct GetVolumeStats {
    /// The volume ID, as received.
    pub volume_id: String,
    /// The staging path or a target path.
    pub volume_path: String,
}

/// The usage of one resource: bytes or inodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeUsage {
    pub total: u64,
    /// What unprivileged users can still use; `None` for block volumes.
    pub available: Option<u64>,
    /// What is used; `None` for block volumes.
    pub used: Option<u64>,
}

/// Result of NodeGetVolumeStats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stats {
    pub bytes: VolumeUsage,
    /// The usage of inodes; `None` for block volumes, and for file systems without a fixed number
    /// of inodes.
    pub inodes: Option<VolumeUsage>,
}

/// Arguments of NodeExpandVolume.
#[derive(Clone, Debug)]
pub struct NodeExpandVolume {
    /// The volume ID, as received.
    pub volume_id: String,
    /// The staging path or a target path.
    pub volume_path: String,
    /// The requested size. Without it the volume's size applies.
    pub capacity: Option<CapacityRange>,
    /// If given, it must match the volume.
    pub capability: Option<Capability>,
}

/// One finding about the health of a volume or pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub severity: Severity,
    /// A stable name in CamelCase.
    pub reason: &'static str,
    /// The description for people.
    pub message: String,
}

/// The severity of a finding; the CSI service maps it to the two enums of CSI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// It works, but with restrictions.
    Degraded,
    /// It cannot be reached.
    Inaccessible,
    /// Data is lost.
    DataLoss,
}

/// The findings about a volume; a volume without findings is healthy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeHealth {
    pub id: VolumeId,
    /// The findings; each pair of severity and reason occurs once.
    pub findings: Vec<Finding>,
}

/// Arguments of CreateSnapshot.
#[derive(Clone, Debug)]
pub struct CreateSnapshot {
    /// Request name: 1 to 128 bytes in any script.
    pub name: String,
    /// The ID of the source volume, as received.
    pub source_volume_id: String,
    /// The class parameters.
    pub parameters: SnapshotParameters,
    /// As in [`CreateVolume::requisite`].
    pub requisite: Vec<String>,
}

/// A snapshot that is complete and durable, as returned to callers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub id: SnapshotId,
    /// The source volume, which may no longer exist.
    pub source_volume_id: VolumeId,
    /// The minimum size in bytes of a volume that is restored from it.
    pub size: u64,
    /// The time of the cut, in nanoseconds since 1970.
    pub cut_at: u64,
    /// The consistency level that was reached.
    pub level: Level,
    /// Why a higher level was not reached.
    pub reason: String,
    /// The group snapshot of which it is a member.
    pub group: Option<GroupId>,
    /// Whether it can be deleted without its group, and is reported as a snapshot of its own.
    pub independent: bool,
    /// The home of the node on which the snapshot is.
    pub home: HomeId,
    /// From the first freeze to the last thaw of its cut, if anything was frozen. Only the call that
    /// took the snapshot knows it: no record has it.
    pub frozen: Option<Duration>,
}

/// Arguments of ListSnapshots.
#[derive(Clone, Debug, Default)]
pub struct ListSnapshots {
    /// The maximum number of entries; 0 means no limit.
    pub max_entries: usize,
    /// A `next_token`, or empty to begin at the first snapshot.
    pub starting_token: String,
    /// Restricts the list to snapshots of this volume, unless empty.
    pub source_volume_id: String,
    /// Restricts the list to this snapshot, unless empty.
    pub snapshot_id: String,
    /// As [`ListVolumes::pool`], if neither of the two IDs is given.
    pub pool: Option<PoolId>,
}

#[derive(Clone, Debug, Default)]
pub struct SnapshotPage {
    /// The snapshots, ordered by ID.
    pub snapshots: Vec<Snapshot>,
    /// The token of the next page; empty on the last page.
    pub next_token: String,
}

/// Arguments of CreateVolumeGroupSnapshot.
#[derive(Clone, Debug)]
pub struct CreateGroup {
    /// The request name.
    pub name: String,
    /// The IDs of the source volumes, as received: at least one, without duplicates.
    pub source_volume_ids: Vec<String>,
    /// The class parameters.
    pub parameters: SnapshotParameters,
}

/// A group snapshot, as returned to callers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The ID of the group snapshot.
    pub id: GroupId,
    /// Its members, in the order of the request.
    pub snapshots: Vec<Snapshot>,
    /// The time of the cut, in nanoseconds since 1970; it is the same in each member.
    pub cut_at: u64,
}

/// Arguments of DeleteVolumeGroupSnapshot and GetVolumeGroupSnapshot.
#[derive(Clone, Debug)]
pub struct NamedGroup {
    /// The ID of the group snapshot, as received.
    pub group_id: String,
    /// The IDs of its members, as received.
    pub snapshot_ids: Vec<String>,
}

/// Options for the deletion of a single snapshot.
#[derive(Clone, Debug, Default)]
pub struct DeleteSnapshotOptions {
    /// Also deletes a member of a group that can otherwise only be deleted as a whole: an
    /// administrator asserts that no owner manages the group any more.
    pub of_any_group: bool,
    /// The group that the router has found to be settled on all nodes.
    pub settled: Option<GroupId>,
    /// Deletes only one that was taken for a clone on another node.
    pub for_clone: bool,
}

/// Arguments of an export.
#[derive(Clone, Debug, Default)]
pub struct Export {
    /// The IDs of the snapshots, as received: one, or members of one group.
    pub snapshot_ids: Vec<String>,
    /// The IDs of snapshots of the same volumes, to which only the differences are exported.
    pub base_snapshot_ids: Vec<String>,
}

/// Arguments of an import.
#[derive(Clone, Debug, Default)]
pub struct Import {
    /// The name of the volume; `None` means the one in the archive, with the prefix.
    pub name: Option<String>,
    pub prefix: String,
    /// The name of the pool; `None` means the one in the archive.
    pub pool: Option<String>,
    /// The size of each volume in bytes; `None` means the one in the archive.
    pub size: Option<u64>,
    /// An archive with differences follows: the volumes stay incomplete.
    pub more: bool,
}

/// Arguments of an import whose volume shares the blocks of a file of this node.
#[derive(Clone, Debug)]
pub struct ImportFile {
    /// Its `name` is set.
    pub import: Import,
    pub path: PathBuf,
    /// The number for the content that the caller has examined.
    pub identity: u64,
    /// Only find out whether it is possible.
    pub dry_run: bool,
}

/// The result of such an import.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileImport {
    /// The volume shares the blocks of the file.
    Shared(Volume),
    /// It would. Nothing was created.
    Possible,
    /// Why it cannot, so that the content must be copied. Nothing was created.
    Obstacle(String),
}

/// Arguments of GetMetadataAllocated (without a base) and GetMetadataDelta.
#[derive(Clone, Debug)]
pub struct GetMetadata {
    /// The ID of the base snapshot, as received; `None` requests all allocated ranges.
    pub base_snapshot_id: Option<String>,
    /// The ID of the snapshot, as received.
    pub snapshot_id: String,
    /// Only ranges that end after this byte are returned.
    pub starting_offset: u64,
    /// The maximum number of ranges.
    pub max_results: usize,
    /// The snapshots that earlier pages were read from, if there were any.
    pub of: Option<MetadataOf>,
}

/// The snapshots that a page was read from. An ID does not suffice: a snapshot that is created with
/// the name of a deleted one gets the same ID.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MetadataOf {
    /// The incarnation of the base.
    pub base: Option<Uuid>,
    /// The incarnation of the snapshot.
    pub target: Uuid,
}

/// One page of ranges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetadataPage {
    /// The size of the volume in bytes.
    pub capacity: u64,
    /// Pairs of offset and length in bytes; ascending, without overlaps.
    pub ranges: Vec<(u64, u64)>,
    /// The offset at which the next page begins; `None` on the last page.
    pub next: Option<u64>,
    /// To be passed with the request for the next page.
    pub of: MetadataOf,
}
