//! Requests of the Controller service.

use std::collections::HashMap;

use super::{
    NODE_ID_BYTES, bounded, bounded_context, bounded_map, capability, capacity_range, check_mkfs,
    growth_range, name, required, segment, snapshot::content_source,
};
use crate::csi;
use crate::error::{Error, Result};
use crate::model::{MutableParameters, VolumeParameters};
use crate::operation::{Attach, CreateVolume, ExpandVolume, GetCapacity, ModifyVolume, Validate};

/// Parses CreateVolume. `key` is the driver's topology key.
pub fn create_volume(request: &csi::CreateVolumeRequest, key: &str) -> Result<CreateVolume> {
    let name = name(&request.name)?;
    let capabilities = capability::for_one_volume(&request.volume_capabilities)?;
    let content_source = content_source(request.volume_content_source.as_ref())?;
    let is_copy = content_source.is_some();
    capability::readers_of_copies("volume_capabilities", &capabilities, is_copy)?;
    let parameters = class(&request.parameters, &request.mutable_parameters)?;
    check_mkfs(PARAMETERS, &parameters, &capabilities)?;
    let topologies = request.accessibility_requirements.iter();
    Ok(CreateVolume {
        name,
        capacity: capacity_range(request.capacity_range)?,
        capabilities,
        parameters,
        requisite: topologies
            .flat_map(|requirement| &requirement.requisite)
            .map(|topology| segment(topology, key))
            .collect(),
        content_source,
    })
}

const PARAMETERS: &str = "parameters";
const MUTABLE: &str = "mutable_parameters";

type Map = HashMap<String, String>;

fn parameters(given: &Map) -> Result<VolumeParameters> {
    bounded_map(PARAMETERS, given)?;
    VolumeParameters::parse(PARAMETERS, given)
}

fn mutable(given: &Map) -> Result<MutableParameters> {
    bounded_map(MUTABLE, given)?;
    MutableParameters::parse(given)
}

/// The parameters of a StorageClass, overridden by those of a VolumeAttributesClass.
fn class(class: &Map, attributes: &Map) -> Result<VolumeParameters> {
    let mut parsed = parameters(class)?;
    let MutableParameters { wipe } = mutable(attributes)?;
    if let Some(wipe) = wipe {
        parsed.wipe = wipe;
    }
    Ok(parsed)
}

/// Checks that an ID is present. It may be any text: one that refers to nothing is "not found", or
/// already deleted.
pub fn volume_id(id: &str) -> Result<String> {
    required("volume_id", id).map(str::to_string)
}

/// Parses ControllerPublishVolume.
pub fn attach(request: &csi::ControllerPublishVolumeRequest) -> Result<Attach> {
    let volume_id = volume_id(&request.volume_id)?;
    let node_id = required("node_id", &request.node_id)?.to_string();
    let capability = capability::required(request.volume_capability.as_ref())?;
    bounded("node_id", &node_id, NODE_ID_BYTES)?;
    bounded_context(&request.volume_context)?;
    if request.readonly {
        return Err(Error::invalid(
            "readonly",
            "true is not supported: this controller does not have the capability PUBLISH_READONLY; set readonly in NodePublishVolume",
        ));
    }
    Ok(Attach {
        volume_id,
        node_id,
        capability,
        read_only: false,
    })
}

/// Parses ControllerUnpublishVolume. Attachments have no state, so the result is empty.
pub fn detach(request: &csi::ControllerUnpublishVolumeRequest) -> Result<()> {
    volume_id(&request.volume_id).map(drop)
}

/// Parses ValidateVolumeCapabilities. Unsupported parameters give an additional message.
pub fn validate(request: &csi::ValidateVolumeCapabilitiesRequest) -> Result<Validate> {
    let volume_id = volume_id(&request.volume_id)?;
    let mut capabilities = capability::parse_each(&request.volume_capabilities)?;
    bounded_context(&request.volume_context)?;
    let mut record_error = |error: Error| capabilities.push(Err(error.to_string()));
    let parameters = match request.parameters.is_empty() {
        true => None,
        false => parameters(&request.parameters)
            .map_err(&mut record_error)
            .ok(),
    };
    let mutable = mutable(&request.mutable_parameters).map_err(record_error);
    Ok(Validate {
        volume_id,
        capabilities,
        parameters,
        mutable: mutable.unwrap_or_default(),
    })
}

/// Parses GetCapacity; `None` if the capabilities are not supported: the capacity for such volumes
/// is 0.
pub fn capacity(request: &csi::GetCapacityRequest, key: &str) -> Result<Option<GetCapacity>> {
    let judged = match request.volume_capabilities.as_slice() {
        [] => Vec::new(),
        given => capability::parse_each(given)?,
    };
    let parameters = parameters(&request.parameters)?;
    let topology = request.accessible_topology.as_ref();
    let capabilities: std::result::Result<_, String> = judged.into_iter().collect();
    Ok(capabilities.ok().map(|capabilities| GetCapacity {
        capabilities,
        parameters,
        topology: topology.map(|topology| segment(topology, key)),
    }))
}

/// Parses ControllerExpandVolume.
pub fn expand_volume(request: &csi::ControllerExpandVolumeRequest) -> Result<ExpandVolume> {
    let volume_id = volume_id(&request.volume_id)?;
    let Some(range) = request.capacity_range else {
        return Err(Error::invalid("capacity_range", "is missing"));
    };
    Ok(ExpandVolume {
        volume_id,
        capacity: growth_range(range)?,
        capability: capability::optional(request.volume_capability.as_ref())?,
    })
}

/// Parses ControllerModifyVolume.
pub fn modify_volume(request: &csi::ControllerModifyVolumeRequest) -> Result<ModifyVolume> {
    Ok(ModifyVolume {
        volume_id: volume_id(&request.volume_id)?,
        mutable: mutable(&request.mutable_parameters)?,
    })
}
