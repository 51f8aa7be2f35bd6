//! Cleans up in the background what failed or interrupted calls have left: not every caller repeats
//! its call, and a call may have returned a final error before its cleanup was done.
//!
//! Leftovers are not kept in memory. The disk is read, under the lock of the operation that may
//! still be in progress. What cannot be read there is never changed.

use std::collections::BTreeSet;

use crate::backend::{Image, Leftover};
use crate::error::{Error, Result, chain};
use crate::model::PoolId;
use crate::operation::lock::{Key, LockGuard};
use crate::operation::{Driver, Pool};

impl Driver {
    /// The pools that are served now.
    pub fn served(&self) -> Vec<PoolId> {
        self.pools.serving().iter().map(|pool| pool.id()).collect()
    }

    /// Cleans up what calls have left on a pool, except for what is to be overwritten
    /// ([`Driver::wipe`]) and members of groups ([`Driver::resolve_groups`]). Waits for no lock,
    /// and for no disk but that of this pool.
    pub fn clean(&self, pool: PoolId) {
        if let Ok(Some(pool)) = self.pools.pool(pool) {
            self.clean_up_inline(&pool);
            self.clean_up_leftovers(&pool, false);
            self.end_sharing(&pool);
            self.snapshots.clean_up_bases(&pool);
            self.snapshots.clean_up_for_clones(&pool);
        }
    }

    /// Cleans up what calls have left on a pool and is to be overwritten, one after the other,
    /// which takes as long as the wipes.
    pub fn wipe(&self, pool: PoolId) {
        if let Ok(Some(pool)) = self.pools.pool(pool) {
            self.clean_up_leftovers(&pool, true);
        }
    }

    fn clean_up_inline(&self, pool: &Pool) {
        let name = &pool.definition.name;
        let (ended, failed) = self.volumes.delete_leftover_inline(pool);
        if ended > 0 {
            tracing::info!(pool = %name, volumes = ended, "deleted unused inline volumes");
        }
        if let Some(error) = failed {
            tracing::debug!(pool = %name, error = %chain(&error), "failed to delete an unused inline volume");
        }
    }

    /// Checks once an hour whether imported volumes still share blocks with files of other programs.
    fn end_sharing(&self, pool: &Pool) {
        let name = &pool.definition.name;
        for uuid in pool.backend.with_foreign_bytes() {
            let now = self.host.now();
            if !self.snapshots.copies.is_forgotten(uuid, now) {
                continue;
            }
            let Ok(_lock) = self.pools.locks.acquire(Key::Volume(uuid)) else {
                continue;
            };
            self.snapshots.copies.ask(uuid, now);
            match pool.backend.end_sharing(uuid) {
                Ok(true) => {
                    tracing::info!(pool = %name, volume = %uuid, "an imported volume shares no blocks any more");
                }
                Ok(false) => {}
                Err(error) => {
                    tracing::debug!(pool = %name, volume = %uuid, error = %chain(&error), "failed to find shared blocks");
                }
            }
        }
    }

    fn clean_up_leftovers(&self, pool: &Pool, wiped: bool) {
        let name = &pool.definition.name;
        let leftovers = match pool.backend.leftovers() {
            Ok(leftovers) => leftovers,
            Err(error) => {
                tracing::debug!(pool = %name, error = %chain(&error), "failed to list leftovers of interrupted calls");
                return;
            }
        };
        for leftover in leftovers {
            if self.pools.in_flight.is_stopping() {
                return;
            }
            if pool.backend.is_wiped(&leftover) != wiped {
                continue;
            }
            let Ok(_locks) = self.lock_leftover(&leftover) else {
                continue;
            };
            if let Leftover::Copy(Image::Volume(uuid) | Image::Snapshot(uuid))
            | Leftover::Growth(uuid) = leftover
                && !self.snapshots.copies.is_forgotten(uuid, self.host.now())
            {
                continue;
            }
            match pool.backend.clean_up(&leftover) {
                Ok(true) => {
                    tracing::info!(pool = %name, %leftover, "cleaned up after an interrupted call");
                }
                Ok(false) => {}
                // The first failure was logged as an error, and a broken disk fails every time.
                Err(error) => {
                    tracing::debug!(pool = %name, %leftover, error = %chain(&error), "failed to clean up after an interrupted call");
                }
            }
        }
    }

    fn lock_leftover(&self, leftover: &Leftover) -> Result<Vec<LockGuard>> {
        let keys = match leftover {
            Leftover::Volume(uuid)
            | Leftover::Copy(Image::Volume(uuid))
            | Leftover::Growth(uuid)
            | Leftover::Spare(uuid)
            | Leftover::Switched(uuid) => {
                vec![Key::Volume(*uuid)]
            }
            Leftover::Snapshot(uuid) | Leftover::Copy(Image::Snapshot(uuid)) => {
                vec![Key::Snapshot(*uuid)]
            }
            // The name does not show whether it was a volume or a snapshot.
            Leftover::Trash { uuid, .. } => vec![Key::Volume(*uuid), Key::Snapshot(*uuid)],
        };
        keys.into_iter()
            .map(|key| self.pools.locks.acquire(key))
            .collect()
    }

    /// Discards the blocks that deletions with `wipe: discard` have freed on a pool.
    pub fn discard_freed(&self, pool: PoolId) {
        if let Ok(Some(pool)) = self.pools.pool(pool)
            && let Err(error) = pool.backend.folder.discard_freed()
        {
            tracing::warn!(pool = %pool.definition.name, error = %chain(&error), "failed to discard free blocks of the pool, will retry");
        }
    }

    /// Resolves the groups that have members on a pool and are in doubt, one after the other. Skips
    /// groups that are being created, and groups whose coordinating member is on another node.
    pub fn resolve_groups(&self, pool: PoolId) {
        if let Ok(Some(pool)) = self.pools.pool(pool) {
            self.resolve_groups_of(&pool);
        }
    }

    pub(super) fn resolve_groups_of(&self, pool: &Pool) {
        let records = pool.backend.snapshots.unready().into_iter();
        let groups: BTreeSet<_> = records.filter_map(|one| Some(one.group?.id)).collect();
        for group in groups {
            let Ok(_lock) = self.pools.locks.acquire(Key::Group(group)) else {
                continue;
            };
            match self.snapshots.resolve_group(group) {
                Ok(()) => {}
                Err(error @ Error::Unreachable { .. }) => {
                    tracing::debug!(%group, error = %chain(&error), "skipping a group snapshot whose coordinating member is not on this node");
                }
                Err(error) => {
                    tracing::error!(%group, error = %chain(&error), "failed to resolve a group snapshot that a crash left in doubt");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
