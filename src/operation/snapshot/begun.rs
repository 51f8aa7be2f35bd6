//! Volumes that are being filled, and that a repeat continues.

use crate::backend::Image;
use crate::error::Result;
use crate::model::Allocation;
use crate::operation::Pool;
use crate::record::VolumeRecord;

/// Whether the blocks of a volume are reserved by writing them.
pub(in crate::operation) fn is_written(pool: &Pool, record: &VolumeRecord) -> bool {
    record.allocation == Allocation::Thick && pool.backend.facts.reserves_by_writing
}

/// A volume that an earlier call with the same request has begun to fill from this state of its
/// source. A file system that was copied has got an identity of its own.
pub(super) fn find_begun(
    pool: &Pool,
    planned: &VolumeRecord,
    source_modified: u64,
) -> Result<Option<VolumeRecord>> {
    let without_identity = |record: &VolumeRecord| {
        let formatted = record.formatted.as_ref();
        formatted.map(|it| (it.kind, it.complete, it.growing, it.found))
    };
    let Some(begun) = pool.backend.volumes.get(planned.uuid)? else {
        return Ok(None);
    };
    let same = VolumeRecord {
        incarnation: begun.incarnation,
        created_at: begun.created_at,
        copy: begun.copy,
        lineage: begun.lineage,
        image: begun.image,
        formatted: begun.formatted.clone(),
        ..planned.clone()
    };
    let from = begun.copy.map(|copy| copy.source_modified);
    let continues = from == Some(source_modified)
        && same == begun
        && without_identity(planned) == without_identity(&begun)
        && pool.backend.has_image(Image::Volume(begun.uuid))?;
    Ok(continues.then_some(begun))
}
