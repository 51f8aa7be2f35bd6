//! Volumes that are being filled, and that a repeat continues.

use super::remote::Offer;
use crate::backend::Image;
use crate::error::Result;
use crate::model::Allocation;
use crate::operation::Pool;
use crate::record::{CopyProgress, VolumeRecord};

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
    let from = begun.copy.map(|copy| copy.source_modified);
    let continues = from == Some(source_modified)
        && is_same(planned, &begun)
        && planned.content_source == begun.content_source
        && without_identity(planned) == without_identity(&begun)
        && pool.backend.has_image(Image::Volume(begun.uuid))?;
    Ok(continues.then_some(begun))
}

/// A volume that earlier calls have filled with the content of a base of this offer, with the
/// progress of a copy of the differences. Its other values are those that are planned now.
pub(super) fn find_based(
    pool: &Pool,
    planned: &VolumeRecord,
    offer: &Offer,
) -> Result<Option<VolumeRecord>> {
    let begun = pool.backend.volumes.get(planned.uuid)?;
    let begun = begun.filter(|begun| is_same(planned, begun));
    let Some((copy, begun)) = begun.and_then(|begun| Some((begun.copy?, begun))) else {
        return Ok(None);
    };
    let filled = is_filled(pool, &begun)?;
    let beside = CopyProgress::beside(offer.identity);
    let copy = match copy.base {
        // Differences to the same base are being copied: the image is a mixture of both snapshots.
        Some(base) if offer.bases.contains(&base) && copy.source_modified == beside => copy,
        None if offer.bases.contains(&copy.source_modified) && filled => CopyProgress {
            copied: 0,
            source_modified: beside,
            base: Some(copy.source_modified),
        },
        Some(_) | None => return Ok(None),
    };
    let image = pool.backend.has_image(Image::Volume(begun.uuid))?;
    Ok(image.then(|| VolumeRecord {
        incarnation: begun.incarnation,
        created_at: begun.created_at,
        lineage: begun.lineage,
        image: begun.image,
        copy: Some(copy),
        ..planned.clone()
    }))
}

/// Whether a volume has the whole content of one snapshot of another node.
pub(in crate::operation) fn is_filled(pool: &Pool, record: &VolumeRecord) -> Result<bool> {
    let copy = record.copy.filter(|copy| copy.base.is_none());
    let length = pool.backend.find_length(Image::Volume(record.uuid))?;
    Ok(copy
        .zip(length)
        .is_some_and(|(copy, length)| copy.copied >= length))
}

/// Whether a record is that of a planned volume, apart from its content.
fn is_same(planned: &VolumeRecord, begun: &VolumeRecord) -> bool {
    let same = VolumeRecord {
        incarnation: begun.incarnation,
        created_at: begun.created_at,
        content_source: begun.content_source.clone(),
        copy: begun.copy,
        lineage: begun.lineage,
        image: begun.image,
        imported: begun.imported,
        formatted: begun.formatted.clone(),
        ..planned.clone()
    };
    same == *begun
}
