//! How much may still be promised.
//!
//! What the pool's file system has left, and what volumes already fill and no snapshot holds, is
//! the room for promises; sizes of volumes are promises. With overcommit 1 every promise can be kept, whatever else
//! lies on the same file system.

use crate::backend::PoolSpace;
use crate::error::{Error, Result, chain};
use crate::model::size::{GRAIN, MIB, image_bytes};
use crate::model::{Allocation, Capability, SnapshotRoom};
use crate::operation::{AskCapacity, Capacity, Driver, Pool};
use crate::record::SnapshotRecord;

/// Kept back for the pool's own metadata: maps of images, records, logs. 1/64 of a pool is what
/// an xfs with all images fully fragmented into 64 KiB extents needs at 16 bytes each, 60 times.
const HEADROOM_SHARE: u64 = 64;
/// And at least this much: a small pool's log and directories.
const HEADROOM_LEAST: u64 = 8 * MIB;

/// Bytes that are kept back on a file system of this size.
pub(in crate::operation) fn headroom(total: u64) -> u64 {
    (total / HEADROOM_SHARE).max(HEADROOM_LEAST)
}

/// Where the machine itself lives on the file system, one part in so many stays free of new volumes
/// and growth: kubelets evict pods from a disk with less than 10 or 15 % left. What is made of
/// volumes that are there is bound by the head-room alone, so that a backup is still possible.
const MACHINE_SHARE: u64 = 5;

/// Bytes that are kept for the machine on its own file system of this size.
pub(in crate::operation) fn machine_reserve(total: u64) -> u64 {
    total.div_ceil(MACHINE_SHARE)
}

/// Bytes that new volumes and growth leave free.
pub(in crate::operation) fn kept_for_new(pool: &Pool, space: &PoolSpace) -> u64 {
    let kept = headroom(space.total);
    match pool.ground.of_machine {
        true => kept.max(machine_reserve(space.total)),
        false => kept,
    }
}

/// Bytes that may be promised in all, with so many kept free.
fn promises(space: &PoolSpace, overcommit: f64, kept: u64) -> u64 {
    let room = space.available.saturating_add(space.own);
    (room.saturating_sub(kept) as f64 * overcommit) as u64
}

/// Bytes that may still be promised, with so many kept free: whole grains, so that what is answered
/// can be asked for.
pub(in crate::operation) fn promisable(space: &PoolSpace, overcommit: f64, kept: u64) -> u64 {
    promises(space, overcommit, kept).saturating_sub(space.promised) / GRAIN * GRAIN
}

/// Bytes that can really be reserved now, beside what is being made and with so many kept free.
fn reservable(space: &PoolSpace, kept: u64) -> u64 {
    let taken = kept.saturating_add(space.claimed);
    space.available.saturating_sub(taken) / GRAIN * GRAIN
}

/// What a volume of this allocation could have, with so many bytes kept free.
fn available(pool: &Pool, space: &PoolSpace, allocation: Allocation, kept: u64) -> u64 {
    let promisable = promisable(space, pool.definition.overcommit, kept);
    match allocation {
        Allocation::Thin => promisable,
        Allocation::Thick => promisable.min(reservable(space, kept)),
    }
}

/// Judges a new volume, or the growth of one that had so many bytes.
pub(in crate::operation) fn admit(
    pool: &Pool,
    space: &PoolSpace,
    allocation: Allocation,
    had: u64,
    size: u64,
) -> Result<()> {
    let more = image_bytes(size).saturating_sub(if had == 0 { 0 } else { image_bytes(had) });
    let kept = kept_for_new(pool, space);
    judge(pool, more, available(pool, space, allocation, kept))
}

/// Judges a volume that is made of another, or of a snapshot.
pub(in crate::operation) fn admit_copy(
    pool: &Pool,
    space: &PoolSpace,
    allocation: Allocation,
    size: u64,
) -> Result<()> {
    let kept = headroom(space.total);
    let available = available(pool, space, allocation, kept);
    judge(pool, image_bytes(size), available)
}

fn judge(pool: &Pool, required: u64, available: u64) -> Result<()> {
    if required <= available {
        return Ok(());
    }
    Err(Error::OutOfSpace {
        pool: pool.definition.name.clone(),
        required,
        available,
    })
}

/// Judges a snapshot. A thin volume's shares its blocks, and needs room only for what is written
/// back at the cut and for the maps; a thick one's gets blocks of its own afterwards, and so
/// does a copy: these need their full size now.
pub(in crate::operation) fn admit_snapshot(
    pool: &Pool,
    space: &PoolSpace,
    record: &SnapshotRecord,
) -> Result<()> {
    let full = record.allocation == Allocation::Thick || !pool.backend.shares_blocks();
    let required = if full {
        image_bytes(record.size)
    } else {
        GRAIN
    };
    judge(pool, required, reservable(space, headroom(space.total)))?;
    check_promises(pool, space)
}

/// That all volumes can still be written in full beside the snapshots that are there or being made,
/// where the pool keeps that room for them (docs/adr/0031).
pub(in crate::operation) fn check_promises(pool: &Pool, space: &PoolSpace) -> Result<()> {
    let room = promises(space, pool.definition.overcommit, headroom(space.total));
    if pool.snapshots() == SnapshotRoom::BestEffort || space.promised <= room {
        return Ok(());
    }
    Err(Error::Promised {
        pool: pool.definition.name.clone(),
        promised: space.promised,
        room,
    })
}

/// That a pool still has its head-room, by one look at its disk.
pub(in crate::operation) fn check_headroom(pool: &Pool) -> Result<()> {
    let space = pool.backend.disk()?;
    let required = headroom(space.total);
    if space.available >= required {
        return Ok(());
    }
    Err(Error::OutOfSpace {
        pool: pool.definition.name.clone(),
        required,
        available: space.available,
    })
}

/// The least size that mkfs takes for these capabilities.
pub(in crate::operation) fn minimum_size(capabilities: &[Capability]) -> u64 {
    let each = capabilities.iter().map(|capability| {
        capability
            .access_type
            .fs()
            .map_or(GRAIN, |fs| fs.minimum_bytes())
    });
    each.max().unwrap_or(GRAIN)
}

impl Driver {
    /// GetCapacity. What can't be reached has 0, at once; so has what would be refused.
    pub fn capacity(&self, request: &AskCapacity) -> Result<Capacity> {
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
        if allocation == Allocation::Thick && pool.backend.refuses_thick().is_some() {
            return Ok(nothing);
        }
        let space = match pool.backend.space() {
            Ok(space) => space,
            Err(error) => {
                tracing::warn!(pool = %pool.definition.name, error = %chain(&error), "failed to read the free space of the pool, reporting no capacity");
                return Ok(nothing);
            }
        };
        let available = available(&pool, &space, allocation, kept_for_new(&pool, &space));
        Ok(Capacity {
            available,
            maximum: available.min(pool.backend.largest()),
            minimum,
        })
    }
}

impl Pool {
    /// Bytes that may still be promised, at this overcommit.
    pub fn promisable(&self, space: &PoolSpace) -> u64 {
        let kept = super::capacity::kept_for_new(self, space);
        super::capacity::promisable(space, self.definition.overcommit, kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn at_overcommit_one_all_promises_fit_what_is_there(total in 0u64..1 << 50, available in 0u64..1 << 50, own in 0u64..1 << 50, promised in 0u64..1 << 50) {
            let space = PoolSpace { total, available, own, promised, ..PoolSpace::default() };
            let more = promisable(&space, 1.0, headroom(total));
            prop_assert!(more == 0 || promised + more <= available + own);
            prop_assert!(more.is_multiple_of(GRAIN));
        }

        #[test]
        fn promises_leave_free_what_is_kept(total in 0u64..1 << 50, available in 0u64..1 << 50, own in 0u64..1 << 50, promised in 0u64..1 << 50) {
            let space = PoolSpace { total, available, own, promised, ..PoolSpace::default() };
            let kept = machine_reserve(total);
            let more = promisable(&space, 1.0, kept);
            prop_assert!(more == 0 || promised + more + kept <= available + own);
            prop_assert!(kept * 5 >= total);
        }

        #[test]
        fn a_larger_overcommit_never_offers_less(total in 0u64..1 << 50, available in 0u64..1 << 50, promised in 0u64..1 << 50, factor in 1.0f64..100.0) {
            let space = PoolSpace { total, available, promised, ..PoolSpace::default() };
            prop_assert!(promisable(&space, factor, headroom(total)) >= promisable(&space, 1.0, headroom(total)));
        }
    }
}
