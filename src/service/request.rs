//! Converts protobuf to the operations' requests: one pure function per call.
//!
//! A missing argument is reported before any other error. IDs and paths may be any text here:
//! whether they refer to something is checked by the operations, which report "not found". An error
//! contains the CSI name of the field, its value, and the allowed values.
//!
//! Secrets are ignored: this driver needs none.

pub mod capability;
pub mod controller;
#[cfg(test)]
mod fuzz;
pub mod metadata;
pub mod node;
pub mod snapshot;

use std::collections::HashMap;

use tonic::metadata::MetadataMap;

use crate::csi;
use crate::error::{Error, Result};
use crate::model::parameters::SIDECAR_PREFIX;
use crate::model::{Capability, CapacityRange, PoolId, VolumeParameters, mkfs};
use crate::operation::ListVolumes;

pub use controller::*;
pub use node::*;
pub use snapshot::*;

/// The CSI limit for strings that have no limit of their own.
const STRING_BYTES: usize = 128;
/// The CSI limit for `node_id`.
const NODE_ID_BYTES: usize = 256;
/// The CSI limit for a map: all keys and values together.
const MAP_BYTES: usize = 4096;

/// Checks that a string is not empty.
fn required<'a>(field: &str, text: &'a str) -> Result<&'a str> {
    if text.is_empty() {
        Err(Error::invalid(field, "is missing"))
    } else {
        Ok(text)
    }
}

/// Checks the length of a string.
fn bounded(field: &str, text: &str, bound: usize) -> Result<()> {
    if text.len() > bound {
        let problem = format!("has {} bytes; at most {bound}", text.len());
        return Err(Error::invalid(field, problem));
    }
    Ok(())
}

/// Checks the name of a new object: any script, but no control characters.
pub(super) fn name(text: &str) -> Result<String> {
    const FIELD: &str = "name";
    bounded(FIELD, required(FIELD, text)?, STRING_BYTES)?;
    if let Some(c) = text.chars().find(|c| is_forbidden(*c)) {
        let problem = format!(
            "{text:?} contains the control character U+{:04X}; give a name without it",
            u32::from(c)
        );
        return Err(Error::invalid(FIELD, problem));
    }
    Ok(text.to_string())
}

/// The characters that CSI forbids; tab, line feed and carriage return are allowed.
fn is_forbidden(c: char) -> bool {
    c.is_control() && !matches!(c, '\t' | '\n' | '\r')
}

/// Checks the size of a map.
fn bounded_map<'a>(
    field: &str,
    map: impl IntoIterator<Item = (&'a String, &'a String)>,
) -> Result<()> {
    let bytes: usize = map.into_iter().map(|(k, v)| k.len() + v.len()).sum();
    if bytes > MAP_BYTES {
        let problem = format!("has {bytes} bytes of keys and values; at most {MAP_BYTES}");
        return Err(Error::invalid(field, problem));
    }
    Ok(())
}

/// Checks the size of a volume context. Keys that the kubelet adds (tokens of service accounts) may
/// be longer, and are not read.
fn bounded_context(map: &HashMap<String, String>) -> Result<()> {
    let ours = map
        .iter()
        .filter(|(key, _)| !key.starts_with(SIDECAR_PREFIX));
    bounded_map("volume_context", ours)
}

fn capacity_range(range: Option<csi::CapacityRange>) -> Result<CapacityRange> {
    let range = range.unwrap_or_default();
    CapacityRange::new(range.required_bytes, range.limit_bytes)
}

/// The capacity range of an expansion, which must set at least one limit.
fn growth_range(range: csi::CapacityRange) -> Result<CapacityRange> {
    let parsed = capacity_range(Some(range))?;
    if parsed == CapacityRange::default() {
        return Err(Error::invalid(
            "capacity_range",
            "is empty; give required_bytes, limit_bytes or both",
        ));
    }
    Ok(parsed)
}

/// Checks the arguments of mkfs for the file systems that may be created.
fn check_mkfs(
    field: &str,
    parameters: &VolumeParameters,
    capabilities: &[Capability],
) -> Result<()> {
    let mut file_systems = capabilities.iter().filter_map(|c| c.access_type.fs());
    file_systems.try_for_each(|fs| mkfs::check(field, fs, &parameters.mkfs_options))
}

/// The value of the driver's topology key. For a topology without the key, a value that no node
/// has.
pub fn segment(topology: &csi::Topology, key: &str) -> String {
    topology.segments.get(key).cloned().unwrap_or_default()
}

/// Metadata key with which the router requests the list of one pool.
pub const ONLY_POOL: &str = "slackwater-pool";

/// The pool whose list the router requests; `None` for all other callers.
pub fn only_pool(metadata: &MetadataMap) -> Result<Option<PoolId>> {
    let Some(given) = metadata.get(ONLY_POOL) else {
        return Ok(None);
    };
    let parsed = given.to_str().ok().and_then(|text| text.parse().ok());
    match parsed {
        Some(pool) => Ok(Some(pool)),
        None => Err(Error::invalid(ONLY_POOL, "is not the ID of a pool")),
    }
}

/// Parses the limits of a page of ListVolumes or ControllerListVolumeHealth. `pool` is the result of
/// [`only_pool`].
pub fn page(
    max_entries: i32,
    starting_token: &str,
    pool: Result<Option<PoolId>>,
) -> Result<ListVolumes> {
    Ok(ListVolumes {
        max_entries: entries(max_entries)?,
        starting_token: starting_token.to_string(),
        pool: pool?,
    })
}

/// Maximum number of entries of a list; 0 means no limit.
pub fn entries(max_entries: i32) -> Result<usize> {
    usize::try_from(max_entries).map_err(|_| {
        let problem =
            format!("{max_entries} is negative; give 0 for no limit, or a positive number");
        Error::invalid("max_entries", problem)
    })
}
