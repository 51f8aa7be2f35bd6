//! Requests of the Node service. Paths may be any text: the operations check them after they have
//! found the volume.

use super::controller::volume_id;
use super::{bounded_context, bounded_map, capability, capacity_range, required};
use crate::csi;
use crate::error::Result;
use crate::model::parameters::EphemeralParameters;
use crate::operation::{
    GetVolumeStats, NodeExpandVolume, PublishEphemeral, PublishVolume, StageVolume,
};

/// Key that the kubelet adds to the context of an inline volume.
pub const EPHEMERAL: &str = "csi.storage.k8s.io/ephemeral";

/// Parses NodeStageVolume.
pub fn stage(request: &csi::NodeStageVolumeRequest) -> Result<StageVolume> {
    let volume_id = volume_id(&request.volume_id)?;
    let staging_path = path("staging_target_path", &request.staging_target_path)?;
    let capability = capability::required(request.volume_capability.as_ref())?;
    bounded_map("publish_context", &request.publish_context)?;
    bounded_context(&request.volume_context)?;
    Ok(StageVolume {
        volume_id,
        staging_path,
        capability,
    })
}

fn path(field: &str, path: &str) -> Result<String> {
    required(field, path).map(str::to_string)
}

/// Parses NodeUnstageVolume: volume ID and staging path.
pub fn unstage(request: &csi::NodeUnstageVolumeRequest) -> Result<(String, String)> {
    Ok((
        volume_id(&request.volume_id)?,
        path("staging_target_path", &request.staging_target_path)?,
    ))
}

/// NodePublishVolume of either kind of volume.
#[derive(Clone, Debug)]
pub enum Publish {
    /// A volume created by CreateVolume.
    Persistent(PublishVolume),
    /// A volume that exists as long as its pod.
    Ephemeral(PublishEphemeral),
}

/// Parses NodePublishVolume. A missing staging path is accepted here: it is FAILED_PRECONDITION,
/// not a missing argument.
pub fn publish(request: &csi::NodePublishVolumeRequest) -> Result<Publish> {
    let volume_id = volume_id(&request.volume_id)?;
    let target_path = path("target_path", &request.target_path)?;
    let capability = capability::required(request.volume_capability.as_ref())?;
    bounded_map("publish_context", &request.publish_context)?;
    bounded_context(&request.volume_context)?;
    let context = &request.volume_context;
    if context.get(EPHEMERAL).map(String::as_str) != Some("true") {
        return Ok(Publish::Persistent(PublishVolume {
            volume_id,
            staging_path: request.staging_target_path.clone(),
            target_path,
            capability,
            read_only: request.readonly,
        }));
    }
    let attributes = EphemeralParameters::parse(context)?;
    let capabilities = std::slice::from_ref(&capability);
    capability::readers_of_copies("volume_capability", capabilities, false)?;
    Ok(Publish::Ephemeral(PublishEphemeral {
        volume_id,
        target_path,
        capability,
        read_only: request.readonly,
        attributes,
    }))
}

/// Parses NodeUnpublishVolume: volume ID and target path.
pub fn unpublish(request: &csi::NodeUnpublishVolumeRequest) -> Result<(String, String)> {
    Ok((
        volume_id(&request.volume_id)?,
        path("target_path", &request.target_path)?,
    ))
}

/// Parses NodeGetVolumeStats.
pub fn stats(request: &csi::NodeGetVolumeStatsRequest) -> Result<GetVolumeStats> {
    Ok(GetVolumeStats {
        volume_id: volume_id(&request.volume_id)?,
        volume_path: path("volume_path", &request.volume_path)?,
    })
}

/// Parses NodeExpandVolume.
pub fn expand_node(request: &csi::NodeExpandVolumeRequest) -> Result<NodeExpandVolume> {
    let volume_id = volume_id(&request.volume_id)?;
    let volume_path = path("volume_path", &request.volume_path)?;
    let range = request.capacity_range;
    Ok(NodeExpandVolume {
        volume_id,
        volume_path,
        capacity: range.map(|range| capacity_range(Some(range))).transpose()?,
        capability: capability::optional(request.volume_capability.as_ref())?,
    })
}
