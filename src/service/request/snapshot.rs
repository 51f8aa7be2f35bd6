//! Requests about snapshots, groups of snapshots, and volume content sources.

use std::collections::HashMap;

use super::{bounded_map, entries, name, required, segment};
use crate::csi;
use crate::csi::volume_content_source::Type as Given;
use crate::error::{Error, Result};
use crate::model::{PoolId, SnapshotParameters};
use crate::operation::{
    ContentSource, CreateGroup, CreateSnapshot, ListSnapshots as List, NamedGroup,
};

/// A request with parameters of a class, and whether to warn about the class.
#[derive(Clone, Debug)]
pub struct WithClassWarning<T> {
    /// The request.
    pub args: T,
    /// `deletionPolicy` was among the parameters, where it has no effect.
    pub slip: bool,
}

/// Parses CreateSnapshot. `topology_key` is set if snapshots report their topology; otherwise
/// topologies are a field of a later protocol, and are ignored.
pub fn create_snapshot(
    request: &csi::CreateSnapshotRequest,
    topology_key: Option<&str>,
) -> Result<WithClassWarning<CreateSnapshot>> {
    let name = name(&request.name)?;
    let source_volume_id = required("source_volume_id", &request.source_volume_id)?.to_string();
    let (parameters, slip) = parameters(&request.parameters)?;
    if request.parameters.contains_key("members") {
        return Err(Error::invalid(
            "parameters.members",
            "is a parameter of groups; set it in a VolumeGroupSnapshotClass instead of a VolumeSnapshotClass",
        ));
    }
    let topologies = request.accessibility_requirements.iter();
    let requisite = topology_key.map(|key| {
        topologies
            .flat_map(|requirement| &requirement.requisite)
            .map(|topology| segment(topology, key))
            .collect()
    });
    let args = CreateSnapshot {
        name,
        source_volume_id,
        parameters,
        requisite: requisite.unwrap_or_default(),
    };
    Ok(WithClassWarning { args, slip })
}

fn parameters(given: &HashMap<String, String>) -> Result<(SnapshotParameters, bool)> {
    bounded_map("parameters", given)?;
    SnapshotParameters::parse(given)
}

/// Checks that an ID is present. Like the ID of a volume, it may be any text.
pub(crate) fn snapshot_id(id: &str) -> Result<String> {
    required("snapshot_id", id).map(str::to_string)
}

/// Parses ListSnapshots. Both filters may be set; the IDs in them need not exist.
/// `pool` is the result of [`super::only_pool`].
pub fn list_snapshots(
    request: &csi::ListSnapshotsRequest,
    pool: Result<Option<PoolId>>,
) -> Result<List> {
    Ok(List {
        max_entries: entries(request.max_entries)?,
        starting_token: request.starting_token.clone(),
        source_volume_id: request.source_volume_id.clone(),
        snapshot_id: request.snapshot_id.clone(),
        pool: pool?,
    })
}

/// Parses the content source of a new volume.
pub(super) fn content_source(
    given: Option<&csi::VolumeContentSource>,
) -> Result<Option<ContentSource>> {
    const FIELD: &str = "volume_content_source";
    let Some(source) = given else {
        return Ok(None);
    };
    let parsed = match &source.r#type {
        Some(Given::Snapshot(source)) => {
            let field = format!("{FIELD}.snapshot.snapshot_id");
            ContentSource::Snapshot(required(&field, &source.snapshot_id)?.to_string())
        }
        Some(Given::Volume(source)) => {
            let field = format!("{FIELD}.volume.volume_id");
            ContentSource::Volume(required(&field, &source.volume_id)?.to_string())
        }
        None => {
            return Err(Error::invalid(
                FIELD,
                "is neither a snapshot nor a volume; give one of them, or omit it for an empty volume",
            ));
        }
    };
    Ok(Some(parsed))
}

/// Parses CreateVolumeGroupSnapshot.
pub fn create_group(
    request: &csi::CreateVolumeGroupSnapshotRequest,
) -> Result<WithClassWarning<CreateGroup>> {
    let name = name(&request.name)?;
    let source_volume_ids = sources(&request.source_volume_ids)?;
    let (parameters, slip) = parameters(&request.parameters)?;
    let args = CreateGroup {
        name,
        source_volume_ids,
        parameters,
    };
    Ok(WithClassWarning { args, slip })
}

/// Checks the sources: at least one, none of them empty, each only once.
fn sources(ids: &[String]) -> Result<Vec<String>> {
    const LIST: &str = "source_volume_ids";
    if ids.is_empty() {
        return Err(Error::invalid(LIST, "is missing; give at least one volume"));
    }
    let mut seen: HashMap<&str, usize> = HashMap::new();
    for (i, id) in ids.iter().enumerate() {
        let field = format!("{LIST}[{i}]");
        if let Some(first) = seen.insert(required(&field, id)?, i) {
            let problem =
                format!("{id:?} is already listed as {LIST}[{first}]; give each volume once");
            return Err(Error::invalid(field, problem));
        }
    }
    Ok(ids.to_vec())
}

/// Parses DeleteVolumeGroupSnapshot.
pub fn delete_group(request: &csi::DeleteVolumeGroupSnapshotRequest) -> Result<NamedGroup> {
    named(&request.group_snapshot_id, &request.snapshot_ids)
}

/// Parses GetVolumeGroupSnapshot.
pub fn get_group(request: &csi::GetVolumeGroupSnapshotRequest) -> Result<NamedGroup> {
    named(&request.group_snapshot_id, &request.snapshot_ids)
}

/// The operation compares the group's members, which are not known here.
fn named(group_id: &str, snapshot_ids: &[String]) -> Result<NamedGroup> {
    Ok(NamedGroup {
        group_id: required("group_snapshot_id", group_id)?.to_string(),
        snapshot_ids: snapshot_ids.to_vec(),
    })
}
