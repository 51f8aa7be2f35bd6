//! Requests of the SnapshotMetadata service.

use super::required;
use crate::csi;
use crate::error::{Error, Result};
use crate::operation::GetMetadata;

/// Number of ranges per query, and maximum number in one message: with at most 22 bytes each, a
/// message stays far below the 4 MiB that clients accept.
const MAX_RANGES: usize = 8192;

/// The requested ranges, and how they are divided into messages.
#[derive(Clone, Debug)]
pub struct MetadataStream {
    /// The query for the first page.
    pub ask: GetMetadata,
    /// Maximum number of ranges in one message.
    pub ranges_per_message: usize,
}

/// Parses GetMetadataAllocated.
pub fn allocated(request: &csi::GetMetadataAllocatedRequest) -> Result<MetadataStream> {
    let snapshot_id = required("snapshot_id", &request.snapshot_id)?;
    streamed(
        None,
        snapshot_id,
        request.starting_offset,
        request.max_results,
    )
}

/// Parses GetMetadataDelta.
pub fn delta(request: &csi::GetMetadataDeltaRequest) -> Result<MetadataStream> {
    let base = required("base_snapshot_id", &request.base_snapshot_id)?;
    let target = required("target_snapshot_id", &request.target_snapshot_id)?;
    streamed(
        Some(base),
        target,
        request.starting_offset,
        request.max_results,
    )
}

fn streamed(base: Option<&str>, id: &str, offset: i64, max_results: i32) -> Result<MetadataStream> {
    let ranges_per_message = usize::try_from(max_results).map_err(|_| {
        let problem = format!("is {max_results}; give 0 for any number, or a positive number");
        Error::invalid("max_results", problem)
    })?;
    let starting_offset = u64::try_from(offset).map_err(|_| Error::OutOfRange {
        field: "starting_offset".into(),
        problem: format!("{offset} is before the beginning of the volume"),
    })?;
    Ok(MetadataStream {
        ask: GetMetadata {
            base_snapshot_id: base.map(str::to_string),
            snapshot_id: id.to_string(),
            starting_offset,
            max_results: MAX_RANGES,
            of: None,
        },
        ranges_per_message: match ranges_per_message {
            0 => MAX_RANGES,
            some => some.min(MAX_RANGES),
        },
    })
}
