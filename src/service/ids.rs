//! What a call is about, for the one line that is logged of it.

use tracing::Span;

use crate::csi;
use crate::model::VolumeId;

/// Fields of the span of a call that requests may fill. `server::watch` declares them.
pub trait Ids {
    /// Puts the ids of this message on the current span.
    fn note(&self);
}

/// A line shows so much of a text that may be as long as a request.
const SHOWN_BYTES: usize = 256;

fn record(field: &'static str, text: &str) {
    if !text.is_empty() {
        let shown = &text[..text.floor_char_boundary(SHOWN_BYTES)];
        Span::current().record(field, shown);
    }
}

/// Puts the id of what a call has made beside the name that it was asked for.
pub(super) fn made(id: &VolumeId) {
    record("volume_id", &id.to_string());
}

/// `name` is the span's own in JSON.
impl Ids for csi::CreateVolumeRequest {
    fn note(&self) {
        record("volume_name", &self.name);
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
