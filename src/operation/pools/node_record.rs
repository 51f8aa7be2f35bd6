//! The record of the pools that this machine has had, on its own disk.

use std::path::Path;

use crate::backend::place::make::make_folders;
use crate::error::Result;
use crate::host::Host;
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
