//! GetMetadataAllocated, GetMetadataDelta: which blocks of a snapshot are there, or differ.

use super::{AskMetadata, Driver, MetadataPage};
use crate::error::{Error, Result};

impl Driver {
    /// One page of either call.
    pub fn snapshot_metadata(&self, _request: &AskMetadata) -> Result<MetadataPage> {
        Err(Error::Unsupported {
            what: "snapshot metadata".into(),
        })
    }
}
