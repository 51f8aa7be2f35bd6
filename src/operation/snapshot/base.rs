//! Hidden bases: a class can keep the most recently deleted snapshot of each volume, so that the next
//! backup can still be compared with it. Only comparisons use it.
//!
//! A volume has one base at most: the former base is deleted before a snapshot becomes the next one.
//! A base is worth less than anything else on the pool, so it is deleted before an operation is
//! refused for lack of space, and with its volume.

use std::collections::{BTreeSet, HashMap};
use std::sync::{MutexGuard, PoisonError};

use uuid::Uuid;

use crate::backend::PoolBackend;
use crate::error::{Error, Result, chain};
use crate::model::Wipe;
use crate::operation::lock::{Key, LockGuard};
use crate::operation::pools::capacity::check_headroom;
use crate::operation::{Pool, Snapshots};
use crate::record::{Base, SnapshotRecord, SnapshotState};

impl Snapshots {
    /// Deletes snapshots that were returned to callers, or makes each the hidden base of its volume.
    /// Those without a record may have left blocks. The caller holds their locks, and nothing reads
    /// them. A crash in between leaves any of them, some without the former base of their volume, and a
    /// repeat continues.
    pub(super) fn delete_or_keep_as_bases(
        &self,
        pool: &Pool,
        ends: impl IntoIterator<Item = (Uuid, Option<SnapshotRecord>)>,
    ) -> Result<()> {
        let (mut deleted, mut kept, mut locks) = (Vec::new(), Vec::new(), Vec::new());
        for (uuid, record) in ends {
            match record {
                Some(record) if record.is_base() => {
                    self.delete_bases(pool, record.source, record.cut_at)?;
                }
                // A deletion must succeed on a full pool, on which no record can be written.
                Some(record) if can_become_base(&pool.backend, &record) && !is_full(pool) => {
                    locks.push(self.delete_base_of(pool, record.source)?);
                    kept.push(SnapshotRecord {
                        state: SnapshotState::Preparing,
                        base: Some(Base::Kept),
                        // Nothing that concerns its group applies to it any more.
                        group: None,
                        ..record
                    });
                }
                Some(_) | None => deleted.push(uuid),
            }
        }
        if !deleted.is_empty() {
            pool.backend.snapshots.delete_all(&deleted)?;
        }
        if kept.is_empty() {
            return Ok(());
        }
        let kept: Vec<&SnapshotRecord> = kept.iter().collect();
        let kept = pool.backend.update_snapshots(&kept);
        kept.map_err(Error::into_indeterminate)
    }

    /// Deletes the hidden base of a volume. No snapshot becomes its base until the result is dropped.
    pub(in crate::operation) fn delete_base_of(
        &self,
        pool: &Pool,
        volume: Uuid,
    ) -> Result<LockGuard> {
        self.delete_bases(pool, volume, u64::MAX)
    }

    /// Deletes those bases of a volume that were cut before a time. There is more than one if the
    /// record of the former one could not be read when a snapshot became the next one.
    fn delete_bases(&self, pool: &Pool, volume: Uuid, before: u64) -> Result<LockGuard> {
        let lock = self.pools.locks.acquire(Key::Base(volume))?;
        // Reads again what could not be read.
        pool.backend.snapshots.damaged();
        let bases = pool.backend.snapshots.bases().into_iter();
        let bases = bases.filter(|base| base.source == volume && base.cut_at < before);
        let mut uuids: BTreeSet<Uuid> = bases.map(|base| base.uuid).collect();
        let unfreed = self.unfreed_bases().get(&volume).copied();
        uuids.extend(unfreed);
        for uuid in uuids {
            self.unfreed_bases().insert(volume, uuid);
            self.delete_base(pool, uuid)?;
            self.unfreed_bases().remove(&volume);
        }
        Ok(lock)
    }

    fn unfreed_bases(&self) -> MutexGuard<'_, HashMap<Uuid, Uuid>> {
        let unfreed = self.unfreed_bases.lock();
        unfreed.unwrap_or_else(PoisonError::into_inner)
    }

    /// Deletes a base, or frees the blocks of one that is hidden already.
    fn delete_base(&self, pool: &Pool, uuid: Uuid) -> Result<()> {
        let _lock = self.pools.locks.acquire(Key::Snapshot(uuid))?;
        let found = pool.backend.snapshots.get(uuid)?;
        if found.is_some_and(|record| !record.is_base()) {
            return Ok(());
        }
        let _deleting = self.grants.begin_delete([uuid])?;
        pool.backend.snapshots.delete(uuid)
    }

    /// Makes an attempt that may be refused for lack of space, and repeats it for as long as a hidden
    /// base can be deleted instead. A refused attempt has left nothing.
    pub(in crate::operation) fn before_bases<T>(
        &self,
        pool: &Pool,
        attempt: impl Fn() -> Result<T>,
    ) -> Result<T> {
        loop {
            let refused = match attempt() {
                Err(refused) if can_suffice(pool, &refused) => refused,
                done => return done,
            };
            if !self.release_base(pool) {
                return Err(refused);
            }
        }
    }

    /// Deletes the oldest base of a pool that can be deleted now.
    fn release_base(&self, pool: &Pool) -> bool {
        let mut bases = pool.backend.snapshots.bases();
        bases.sort_by_key(|base| base.cut_at);
        let name = &pool.definition.name;
        bases.iter().any(|base| {
            match self.delete_base(pool, base.uuid) {
                Ok(()) => {
                    tracing::info!(pool = %name, snapshot = %base.uuid, volume = %base.source, "deleted a hidden base for its space");
                    true
                }
                Err(error) => {
                    tracing::warn!(pool = %name, snapshot = %base.uuid, error = %chain(&error), "failed to delete a hidden base");
                    false
                }
            }
        })
    }

    /// Deletes bases that have been replaced or whose volume does not exist any more, and all that take
    /// space that the pool keeps free.
    pub(in crate::operation) fn clean_up_bases(&self, pool: &Pool) {
        let bases = pool.backend.snapshots.bases();
        for base in &bases {
            let replaces =
                |other: &SnapshotRecord| other.source == base.source && other.cut_at > base.cut_at;
            if has_volume(&pool.backend, base) && !bases.iter().any(replaces) {
                continue;
            }
            if let Err(error) = self.delete_base(pool, base.uuid) {
                tracing::debug!(snapshot = %base.uuid, error = %chain(&error), "failed to delete a hidden base that nothing needs");
            }
        }
        // A writer that meets a full pool cannot wait for a deletion.
        while is_full(pool) && self.release_base(pool) {}
    }
}

/// Whether space that a pool keeps free is in use.
fn is_full(pool: &Pool) -> bool {
    let kept = check_headroom(pool);
    matches!(
        kept,
        Err(Error::OutOfSpace { .. } | Error::OutOfMetadata { .. })
    )
}

/// Whether a snapshot is kept when it is deleted. Elsewhere than on pools that share blocks, nothing
/// can be compared; and what is to be overwritten is not kept.
fn can_become_base(backend: &PoolBackend, record: &SnapshotRecord) -> bool {
    record.base == Some(Base::Keep)
        && record.state == SnapshotState::Ready
        && record.wipe != Wipe::Zero
        && backend.facts.shares_blocks
        && has_volume(backend, record)
}

/// Whether the volume of a snapshot still exists, as far as that can be read.
fn has_volume(backend: &PoolBackend, record: &SnapshotRecord) -> bool {
    match backend.volumes.get(record.source) {
        Ok(Some(volume)) => volume.incarnation == record.source_incarnation,
        Ok(None) => false,
        Err(_) => true,
    }
}

/// Whether the space for a refused operation may be there once all bases are deleted.
fn can_suffice(pool: &Pool, refused: &Error) -> bool {
    let missing = match refused {
        Error::OutOfSpace {
            required,
            available,
            ..
        } => required.saturating_sub(*available),
        Error::SpaceGuaranteed {
            provisioned, room, ..
        } => provisioned.saturating_sub(*room),
        Error::OutOfMetadata { .. } => 0,
        _ => return false,
    };
    let Ok(space) = pool.backend.space() else {
        return false;
    };
    let bases = space.bases as f64 * pool.definition.overcommit.max(1.0);
    space.bases > 0 && missing as f64 <= bases
}

#[cfg(test)]
mod tests;
