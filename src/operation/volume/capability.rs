//! Checks whether a volume can be used with a capability.

use crate::error::{Error, Kind, Mismatch, Result};
use crate::model::{AccessMode, Capability};
use crate::operation::{StageVolume, Volumes};
use crate::record::{FormattedAs, LastStage, VolumeRecord};

impl Volumes {
    /// Refuses a volume that has been used with the other access type.
    pub(in crate::operation) fn refuse_other_access(
        &self,
        record: &VolumeRecord,
        wanted: &str,
    ) -> Result<()> {
        let Some(formatted) = record
            .formatted
            .as_ref()
            .filter(|formatted| formatted.complete)
        else {
            return Ok(());
        };
        if (formatted.kind == FormattedAs::Raw) == (wanted == "block") {
            return Ok(());
        }
        Err(Error::refused(
            format!("volume {}", record.uuid),
            format!(
                "it was used as {}, and access type {wanted} would destroy its data",
                formatted.kind.as_str()
            ),
        ))
    }
}

/// Refuses the access mode MULTI_NODE_READER_ONLY for a volume that was not created for it.
pub(in crate::operation) fn for_its_readers(
    record: &VolumeRecord,
    asked: &Capability,
) -> Result<()> {
    if asked.access_mode != AccessMode::MultiNodeReaderOnly || record.is_for_readers() {
        return Ok(());
    }
    Err(Error::invalid(
        "volume_capability.access_mode",
        "MULTI_NODE_READER_ONLY was not requested when the volume was created; give a SINGLE_NODE mode, or create a volume from it with only that mode",
    ))
}

/// A retry must have the capability with which the volume was staged.
pub(in crate::operation) fn same_capability(
    stage: Option<&LastStage>,
    request: &StageVolume,
) -> Result<()> {
    let differs = stage.filter(|stage| stage.capability != request.capability);
    let Some(stage) = differs else { return Ok(()) };
    let (found, wanted) = Capability::describe_difference(
        std::slice::from_ref(&stage.capability),
        std::slice::from_ref(&request.capability),
    );
    let mismatch = Mismatch::new("volume_capability", found, wanted);
    Err(Error::exists(Kind::Volume, &request.volume_id, mismatch))
}

/// The error for a second staging path: a volume has one staging path at a time.
pub(in crate::operation) fn staged_at(request: &StageVolume, path: &str) -> Error {
    Error::refused(
        format!("volume {}", request.volume_id),
        format!("it is staged at {path}; unstage it there first"),
    )
}
