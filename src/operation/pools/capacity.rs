//! How many bytes may still be provisioned.
//!
//! The sizes of volumes are provisioned. The space for them is the free space of the pool's file
//! system, plus the blocks that volumes have and no snapshot has. With overcommit 1 each volume can
//! get its whole size, whatever else uses the same file system.

use crate::backend::place::lvm;
use crate::backend::place::pool_fs::machine_reserve;
use crate::backend::{MetadataSpace, PoolSpace};
use crate::error::{Error, Result, chain};
use crate::model::size::{GRAIN, MIB, image_bytes};
use crate::model::{Allocation, Capability, PoolPlace, SnapshotSpacePolicy};
use crate::operation::{Capacity, GetCapacity, Pool, Pools};
use crate::record::SnapshotRecord;

/// The share that is reserved for the pool's own metadata: extent maps of images, records, logs. An
/// xfs whose images are all fully fragmented into extents of 64 KiB needs 16 bytes for each extent;
/// 1/64 of the pool is more than 60 times that.
const HEADROOM_DIVISOR: u64 = 64;
/// The minimum of the reserve in bytes: the log and the directories of a small pool.
const MIN_HEADROOM_BYTES: u64 = 8 * MIB;

/// Bytes that stay reserved on a file system of this size.
pub(in crate::operation) fn headroom(total: u64) -> u64 {
    (total / HEADROOM_DIVISOR).max(MIN_HEADROOM_BYTES)
}

/// Bytes that new volumes and growth leave free.
pub(in crate::operation) fn kept_for_new(pool: &Pool, space: &PoolSpace) -> u64 {
    let kept = headroom(space.total);
    match pool.pool_fs.of_machine {
        true => kept.max(machine_reserve(space.total)),
        false => kept,
    }
}

/// Bytes that may be provisioned in total, with `kept` bytes left free.
fn max_provisioned(space: &PoolSpace, overcommit: f64, kept: u64) -> u64 {
    let room = space.available.saturating_add(space.not_in_snapshots);
    (room.saturating_sub(kept) as f64 * overcommit) as u64
}

/// Bytes that may still be provisioned, with `kept` bytes left free. Rounded down to whole grains, so
/// that a volume of this size can be created.
pub(in crate::operation) fn provisionable(space: &PoolSpace, overcommit: f64, kept: u64) -> u64 {
    max_provisioned(space, overcommit, kept).saturating_sub(space.provisioned) / GRAIN * GRAIN
}

/// Bytes that can be reserved now, apart from what operations in progress will fill and with `kept`
/// bytes left free.
fn reservable(space: &PoolSpace, kept: u64) -> u64 {
    let taken = kept.saturating_add(space.pending_bytes);
    space.available.saturating_sub(taken) / GRAIN * GRAIN
}

/// Bytes of data for a volume of this allocation, with `kept` bytes left free.
fn room(pool: &Pool, space: &PoolSpace, allocation: Allocation, kept: u64) -> u64 {
    let provisionable = provisionable(space, pool.definition.overcommit, kept);
    match allocation {
        Allocation::Thin => provisionable,
        Allocation::Thick => provisionable.min(reservable(space, kept)),
    }
}

/// The maximum size of a new volume of this allocation.
fn available(pool: &Pool, space: &PoolSpace, allocation: Allocation) -> u64 {
    let room = room(pool, space, allocation, kept_for_new(pool, space));
    match (allocation, &space.metadata) {
        (_, Some(metadata)) if check_metadata_available(pool, metadata, None).is_err() => 0,
        (Allocation::Thick, Some(metadata)) => room.min(metadata.largest()),
        (Allocation::Thin, _) | (_, None) => room,
    }
}

/// Checks the space for a new volume, or for the growth of a volume that had `had` bytes.
pub(in crate::operation) fn admit(
    pool: &Pool,
    space: &PoolSpace,
    allocation: Allocation,
    had: u64,
    size: u64,
) -> Result<()> {
    let more = image_bytes(size).saturating_sub(if had == 0 { 0 } else { image_bytes(had) });
    let kept = kept_for_new(pool, space);
    check_available(pool, more, room(pool, space, allocation, kept))?;
    let thick = allocation == Allocation::Thick;
    check_metadata(pool, space, thick.then_some(more))
}

/// Checks the space for a volume that is created from another one or from a snapshot. `is_of_thick`
/// means that the source is thick and may share the map of its blocks with the new volume.
pub(in crate::operation) fn admit_copy(
    pool: &Pool,
    space: &PoolSpace,
    allocation: Allocation,
    is_of_thick: bool,
    size: u64,
) -> Result<()> {
    let kept = headroom(space.total);
    // A thick source may need a map of its own beside a thin copy.
    let is_mapped = is_of_thick || allocation == Allocation::Thick;
    let size = image_bytes(size);
    check_available(pool, size, room(pool, space, allocation, kept))?;
    check_metadata(pool, space, is_mapped.then_some(size))
}

/// Refuses what needs space while a pool of LVM is set up in a way that loses data, or cannot be
/// written. An administrator can change that while the pool is served.
pub(in crate::operation) fn check_setup(pool: &Pool) -> Result<()> {
    match &pool.definition.place {
        PoolPlace::Lvm { pool: name } => {
            let status = lvm::usable(pool.backend.host(), &pool.definition, name)?;
            check_metadata_available(pool, &(&status).into(), None)
        }
        PoolPlace::File { .. } | PoolPlace::Memory { .. } => Ok(()),
    }
}

/// Checks that the metadata of a thin pool has space for the map of an image of `thick` bytes, all of
/// whose blocks are reserved. Nothing is reserved for thin images, but they are refused before they
/// take what is kept free.
fn check_metadata(pool: &Pool, space: &PoolSpace, thick: Option<u64>) -> Result<()> {
    match &space.metadata {
        Some(metadata) => check_metadata_available(pool, metadata, thick),
        None => Ok(()),
    }
}

fn check_metadata_available(
    pool: &Pool,
    metadata: &MetadataSpace,
    thick: Option<u64>,
) -> Result<()> {
    let more = thick.map_or(0, |bytes| metadata.worst(bytes));
    let (required, available) = (metadata.kept() + more, metadata.available());
    if required <= available {
        return Ok(());
    }
    Err(Error::OutOfMetadata {
        pool: pool.definition.name.clone(),
        place: match &pool.definition.place {
            PoolPlace::Lvm { pool } => pool.to_string(),
            PoolPlace::File { .. } | PoolPlace::Memory { .. } => pool.definition.name.clone(),
        },
        required,
        available,
    })
}

fn check_available(pool: &Pool, required: u64, available: u64) -> Result<()> {
    check_setup(pool)?;
    if required <= available {
        return Ok(());
    }
    Err(Error::OutOfSpace {
        pool: pool.definition.name.clone(),
        enlarge: pool.definition.place.enlarge(),
        required,
        available,
    })
}

/// Checks the space for a snapshot. A snapshot of a thin volume shares its blocks, and needs space
/// only for data that is written back at the cut and for extent maps. A snapshot of a thick volume
/// gets blocks of its own afterwards, and a full copy has blocks of its own: both need their full
/// size now.
pub(in crate::operation) fn admit_snapshot(
    pool: &Pool,
    space: &PoolSpace,
    record: &SnapshotRecord,
) -> Result<()> {
    let thick = record.allocation == Allocation::Thick;
    if let (true, Some(why)) = (thick, pool.thick_refusal()) {
        let subject = format!("a snapshot of thick volume {}", record.source);
        return Err(Error::refused(subject, why));
    }
    let full = thick || !pool.backend.facts.shares_blocks;
    let required = if full {
        image_bytes(record.size)
    } else {
        GRAIN
    };
    check_available(pool, required, reservable(space, headroom(space.total)))?;
    check_metadata(pool, space, thick.then_some(required))?;
    check_guarantees(pool, space)
}

/// Checks that all volumes can still be written completely next to the existing snapshots and those
/// in progress, if the pool reserves that space for them (docs/adr/0031).
pub(in crate::operation) fn check_guarantees(pool: &Pool, space: &PoolSpace) -> Result<()> {
    let room = max_provisioned(space, pool.definition.overcommit, headroom(space.total));
    if pool.snapshots() == SnapshotSpacePolicy::BestEffort || space.provisioned <= room {
        return Ok(());
    }
    Err(Error::SpaceGuaranteed {
        pool: pool.definition.name.clone(),
        enlarge: pool.definition.place.enlarge(),
        provisioned: space.provisioned,
        room,
    })
}

/// Checks with one query that a pool still has its reserve for metadata.
pub(in crate::operation) fn check_headroom(pool: &Pool) -> Result<()> {
    check_setup(pool)?;
    let space = pool.backend.disk()?;
    let required = headroom(space.total);
    if space.available >= required {
        return Ok(());
    }
    Err(Error::OutOfSpace {
        pool: pool.definition.name.clone(),
        enlarge: pool.definition.place.enlarge(),
        required,
        available: space.available,
    })
}

/// The minimum size for which mkfs works with these capabilities.
pub(in crate::operation) fn minimum_size(capabilities: &[Capability]) -> u64 {
    let each = capabilities.iter().map(|capability| {
        capability
            .access_type
            .fs()
            .map_or(GRAIN, |fs| fs.minimum_bytes())
    });
    each.max().unwrap_or(GRAIN)
}

impl Pools {
    /// Answers GetCapacity. A pool that cannot be reached has a capacity of 0, without a delay, and
    /// so has a request that would be refused.
    pub fn capacity(&self, request: &GetCapacity) -> Result<Capacity> {
        let minimum = minimum_size(&request.capabilities);
        let nothing = Capacity {
            available: 0,
            maximum: 0,
            minimum,
        };
        if request
            .topology
            .as_ref()
            .is_some_and(|home| *home != self.home().to_string())
        {
            return Ok(nothing);
        }
        let pool = match self.choose_pool(request.parameters.pool.as_deref()) {
            Ok(pool) => pool,
            Err(Error::Unreachable { .. }) => return Ok(nothing),
            Err(error) => return Err(error),
        };
        let allocation = request.parameters.allocation;
        if allocation == Allocation::Thick && pool.thick_refusal().is_some() {
            return Ok(nothing);
        }
        let space = match check_setup(&pool).and_then(|()| pool.backend.space()) {
            Ok(space) => space,
            Err(error) => {
                tracing::warn!(pool = %pool.definition.name, error = %chain(&error), "failed to read the free space of the pool, reporting no capacity");
                return Ok(nothing);
            }
        };
        let available = available(&pool, &space.without_bases(), allocation);
        Ok(Capacity {
            available,
            maximum: available.min(pool.backend.facts.largest),
            minimum,
        })
    }
}

impl Pool {
    /// Why this pool cannot have thick volumes or snapshots of them; `None` if it can. Where blocks
    /// cannot be un-shared, a thick volume next to a snapshot depends on the space that is kept for
    /// volumes.
    pub(in crate::operation) fn thick_refusal(&self) -> Option<&'static str> {
        let facts = &self.backend.facts;
        let guarantees_sizes =
            self.definition.overcommit <= 1.0 && self.snapshots() == SnapshotSpacePolicy::Reserved;
        match facts.thick_refusal {
            None if !facts.unshares && !guarantees_sizes => {
                Some("a thin pool can have them only with overcommit=1 and snapshots=reserved")
            }
            refusal => refusal,
        }
    }

    /// Bytes that may still be provisioned with the overcommit of this pool.
    pub fn provisionable(&self, space: &PoolSpace) -> u64 {
        let kept = super::capacity::kept_for_new(self, space);
        super::capacity::provisionable(&space.without_bases(), self.definition.overcommit, kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn at_overcommit_one_all_promises_fit_what_is_there(total in 0u64..1 << 50, available in 0u64..1 << 50, not_in_snapshots in 0u64..1 << 50, provisioned in 0u64..1 << 50) {
            let space = PoolSpace { total, available, not_in_snapshots, provisioned, ..PoolSpace::default() };
            let more = provisionable(&space, 1.0, headroom(total));
            prop_assert!(more == 0 || provisioned + more <= available + not_in_snapshots);
            prop_assert!(more.is_multiple_of(GRAIN));
        }

        #[test]
        fn promises_leave_free_what_is_kept(total in 0u64..1 << 50, available in 0u64..1 << 50, not_in_snapshots in 0u64..1 << 50, provisioned in 0u64..1 << 50) {
            let space = PoolSpace { total, available, not_in_snapshots, provisioned, ..PoolSpace::default() };
            let kept = machine_reserve(total);
            let more = provisionable(&space, 1.0, kept);
            prop_assert!(more == 0 || provisioned + more + kept <= available + not_in_snapshots);
            prop_assert!(kept * 5 >= total);
        }

        #[test]
        fn a_larger_overcommit_never_offers_less(total in 0u64..1 << 50, available in 0u64..1 << 50, provisioned in 0u64..1 << 50, factor in 1.0f64..100.0) {
            let space = PoolSpace { total, available, provisioned, ..PoolSpace::default() };
            prop_assert!(provisionable(&space, factor, headroom(total)) >= provisionable(&space, 1.0, headroom(total)));
        }
    }
}
