//! Thin volumes return blocks that their files no longer use to their pool. Nothing else does this
//! for pods, which are not permitted to trim. One volume is trimmed at a time, at the interval in
//! the pool's definition, if it has one.

use std::path::Path;

use uuid::Uuid;

use crate::error::{ErrorContext, Result, chain};
use crate::host::Effect;
use crate::model::{Allocation, PoolId, VolumeId, size};
use crate::operation::lock::Key;
use crate::operation::{Pool, Volumes};
use crate::record::{FormattedAs, VolumeRecord, VolumeState};

/// Shorter runs of free blocks are not trimmed: each hole in an image adds an extent, and a
/// snapshot takes longer the more extents its image has.
const MIN_TRIM_BYTES: u64 = 64 * size::KIB;

impl Volumes {
    /// Trims the volumes of a pool, one after the other, if that is due by its definition. It waits
    /// for no lock, and only for the disk of this pool. If a stop interrupts it, the next start
    /// trims all volumes again.
    pub fn trim_volumes(&self, pool: PoolId) {
        let Ok(Some(pool)) = self.pools.pool(pool) else {
            return;
        };
        let begun = self.host.now();
        let name = &pool.definition.name;
        match is_due(&pool, begun) {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => {
                tracing::debug!(pool = %name, error = %chain(&error), "failed to read when the volumes of a pool were last trimmed");
                return;
            }
        }
        let mut trimmed = 0;
        for record in pool.backend.volumes.ready(None, usize::MAX) {
            if self.pools.in_flight.is_stopping() {
                return;
            }
            match self.trim_volume(&pool, record.uuid) {
                Ok(true) => trimmed += 1,
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(pool = %name, volume = %record.uuid, error = %chain(&error), "failed to trim a volume, will retry at the next interval");
                }
            }
        }
        tracing::info!(pool = %name, volumes = trimmed, "trimmed the volumes in use");
        if let Err(error) = pool.backend.folder.note_trimmed(begun) {
            tracing::warn!(pool = %name, error = %chain(&error), "failed to record the time of a trim; the next start trims the volumes again");
        }
    }

    /// Trims a volume if it is thin, mounted for writing, and not locked by another call. Returns
    /// whether it was trimmed.
    fn trim_volume(&self, pool: &Pool, uuid: Uuid) -> Result<bool> {
        let Ok(_lock) = self.pools.locks.acquire(Key::Volume(uuid)) else {
            return Ok(false);
        };
        let Some(record) = pool.backend.volumes.get(uuid)?.filter(is_trimmed) else {
            return Ok(false);
        };
        let formatted = record.formatted.as_ref().map(|formatted| formatted.kind);
        let Some(fs) = formatted.and_then(FormattedAs::fs) else {
            return Ok(false);
        };
        let pool_id = pool.id();
        let id = VolumeId {
            pool: pool_id,
            uuid,
        };
        if self.usage.refuse_frozen(&id.to_string()).is_err() {
            return Ok(false);
        }
        let view = self.usage.view(pool, &record)?;
        let mut uses = view.uses().into_iter();
        let Some((mount, device)) = uses.find_map(|mount| {
            let is_writable = !mount.is_read_only() && mount.root == Path::new("/");
            let device = view.device_of(mount).filter(|_| is_writable)?;
            Some((mount, device))
        }) else {
            return Ok(false);
        };
        let root = self.host.open_mount_root(&mount.mount_point, device, fs);
        let root = root.context(|| format!("open the file system of volume {id}"))?;
        let effect = Effect::TrimVolume {
            root: &root,
            least: MIN_TRIM_BYTES,
        };
        let trimmed = self.host.perform(&effect);
        trimmed.context(|| format!("trim volume {id}"))?;
        Ok(true)
    }
}

/// A recorded time in the future counts as due: a clock that was wrong at the last trim must not
/// postpone the next one for years.
fn is_due(pool: &Pool, now: u64) -> Result<bool> {
    let Some(interval) = pool.definition.trim else {
        return Ok(false);
    };
    let last = pool.backend.folder.trimmed()?;
    Ok(last.is_none_or(|last| last > now || now - last >= interval.get().as_secs()))
}

/// The blocks of a thick volume are reserved for it, so they are not trimmed.
fn is_trimmed(record: &VolumeRecord) -> bool {
    record.state == VolumeState::Ready && record.allocation == Allocation::Thin
}

#[cfg(test)]
mod tests;
