//! The record of the pools that this machine has had, on its own disk.

use std::path::Path;

use super::make::make_folders;
use crate::error::Result;
use crate::host::Host;
use crate::model::{PoolDefinition, PoolId, PoolPlace};
use crate::record::{self, NodeRecord};

/// The node record, empty if there is none.
pub fn load_node(host: &dyn Host, path: &Path) -> Result<NodeRecord> {
    Ok(record::load(host, path)?.unwrap_or_default())
}

/// Writes the node record, with the folders above it where they are missing.
pub fn store_node(host: &dyn Host, path: &Path, node: &NodeRecord) -> Result<()> {
    make_folders(host, path.parent().unwrap_or(Path::new("/")))?;
    record::store(host, path, node)
}

/// The pool that the node record knows at a place.
pub fn known_at(node: &NodeRecord, place: &PoolPlace) -> Option<PoolId> {
    let place = place.to_string();
    node.pools
        .iter()
        .find(|(_, known)| known.place == place)
        .map(|(id, _)| *id)
}

/// The pool that the node record knows by a definition's place or name.
pub fn known_as(node: &NodeRecord, pool: &PoolDefinition) -> Option<PoolId> {
    known_at(node, &pool.place).or_else(|| {
        let mut known = node.pools.iter();
        known
            .find(|(_, known)| known.name == pool.name)
            .map(|(id, _)| *id)
    })
}
