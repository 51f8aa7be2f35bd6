//! The IDs in a call, for the one line that is logged about it.

use tracing::Span;

use crate::csi;
use crate::csi::volume_content_source::Type as Source;
use crate::model::{GroupId, SnapshotId, VolumeId};

/// Records the fields of a call's span that a request fills. `server::watch` declares them.
pub trait Ids {
    /// Records the IDs in this message on the current span.
    fn note(&self);
}

/// Maximum logged length of a text that may be as long as a request.
const SHOWN_BYTES: usize = 256;

/// Records a text in a field of the current span.
pub(crate) fn record(field: &'static str, text: &str) {
    if !text.is_empty() {
        let shown = &text[..text.floor_char_boundary(SHOWN_BYTES)];
        Span::current().record(field, shown);
    }
}

/// Records the ID of the created volume in addition to the requested name.
pub(super) fn record_volume_id(id: &VolumeId) {
    record("volume_id", &id.to_string());
}

/// Records the ID of the created snapshot.
pub(super) fn record_snapshot_id(id: &SnapshotId) {
    record("snapshot_id", &id.to_string());
}

/// Records the ID of the created group.
pub(crate) fn grouped(id: GroupId) {
    record("group_snapshot_id", &id.to_string());
}

/// Records several IDs as one field.
fn record_all(field: &'static str, ids: &[String]) {
    // More IDs than this would be truncated anyway.
    let shown = &ids[..ids.len().min(SHOWN_BYTES)];
    record(field, &shown.join(" "));
}

/// The field is `volume_name` because JSON logs use `name` for the span.
impl Ids for csi::CreateVolumeRequest {
    fn note(&self) {
        record("volume_name", &self.name);
        match self
            .volume_content_source
            .as_ref()
            .and_then(|source| source.r#type.as_ref())
        {
            Some(Source::Snapshot(source)) => record("source_snapshot_id", &source.snapshot_id),
            Some(Source::Volume(source)) => record("source_volume_id", &source.volume_id),
            None => {}
        }
    }
}

impl Ids for csi::CreateSnapshotRequest {
    fn note(&self) {
        record("snapshot_name", &self.name);
        record("source_volume_id", &self.source_volume_id);
    }
}

impl Ids for csi::CreateVolumeGroupSnapshotRequest {
    fn note(&self) {
        record("group_snapshot_name", &self.name);
        record_all("source_volume_ids", &self.source_volume_ids);
    }
}

impl Ids for csi::DeleteVolumeGroupSnapshotRequest {
    fn note(&self) {
        record("group_snapshot_id", &self.group_snapshot_id);
        record_all("snapshot_ids", &self.snapshot_ids);
    }
}

impl Ids for csi::GetVolumeGroupSnapshotRequest {
    fn note(&self) {
        record("group_snapshot_id", &self.group_snapshot_id);
        record_all("snapshot_ids", &self.snapshot_ids);
    }
}

macro_rules! ids {
    ($($message:ident: $($field:ident)*;)*) => {
        $(
            impl Ids for csi::$message {
                fn note(&self) {
                    $(record(stringify!($field), &self.$field);)*
                }
            }
        )*
    };
}

ids! {
    GetPluginInfoRequest: ;
    GetPluginCapabilitiesRequest: ;
    ProbeRequest: ;
    DeleteVolumeRequest: volume_id;
    ControllerPublishVolumeRequest: volume_id node_id;
    ControllerUnpublishVolumeRequest: volume_id node_id;
    ValidateVolumeCapabilitiesRequest: volume_id;
    ListVolumesRequest: ;
    ControllerListVolumeHealthRequest: ;
    ControllerGetVolumeHealthRequest: volume_id;
    ControllerGetVolumeRequest: volume_id;
    GetCapacityRequest: ;
    ControllerGetCapabilitiesRequest: ;
    DeleteSnapshotRequest: snapshot_id;
    ListSnapshotsRequest: snapshot_id source_volume_id;
    GetSnapshotRequest: snapshot_id;
    GetMetadataAllocatedRequest: snapshot_id;
    GetMetadataDeltaRequest: base_snapshot_id target_snapshot_id;
    GroupControllerGetCapabilitiesRequest: ;
    ControllerExpandVolumeRequest: volume_id;
    ControllerModifyVolumeRequest: volume_id;
    NodeStageVolumeRequest: volume_id staging_target_path;
    NodeUnstageVolumeRequest: volume_id staging_target_path;
    NodePublishVolumeRequest: volume_id target_path;
    NodeUnpublishVolumeRequest: volume_id target_path;
    NodeGetVolumeStatsRequest: volume_id volume_path;
    NodeGetVolumeHealthRequest: volume_id;
    NodeGetStorageHealthRequest: ;
    NodeExpandVolumeRequest: volume_id volume_path;
    NodeGetCapabilitiesRequest: ;
    NodeGetInfoRequest: ;
}
