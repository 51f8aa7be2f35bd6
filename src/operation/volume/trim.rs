//! Thin volumes give back to their pool what their files need no more: nothing else does it for
//! pods, which may not trim. One volume at a time, now and then, if the pool's definition says so.

use std::path::Path;

use uuid::Uuid;

use crate::error::{ErrorContext, Result, chain};
use crate::host::Effect;
use crate::model::{Allocation, PoolId, VolumeId, size};
use crate::operation::lock::Key;
use crate::operation::usage::view::View;
use crate::operation::{Driver, Pool};
use crate::record::{FormattedAs, VolumeRecord, VolumeState};

/// Runs of free blocks that are shorter stay with the volume: each hole in an image is one extent
/// more, and the snapshots of an image take the longer the more it has.
const LEAST: u64 = 64 * size::KIB;

impl Driver {
    /// Trims the volumes of a pool, one after the other, if that is due by its definition. Waits
    /// for no lock, and only for this pool's disk. A round that a stop has cut short begins anew
    /// with the next start.
    pub fn trim_volumes(&self, pool: PoolId) {
        let Ok(Some(pool)) = self.pool(pool) else {
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
        for record in pool.backend.volumes(None, usize::MAX) {
            if self.in_flight.is_stopping() {
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
        if let Err(error) = pool.backend.note_trimmed(begun) {
            tracing::warn!(pool = %name, error = %chain(&error), "failed to record the time of a trim; the next start trims the volumes again");
        }
    }

    /// Trims a volume if it's thin, and mounted to be written, and nobody works on it just now;
    /// whether it was.
    fn trim_volume(&self, pool: &Pool, uuid: Uuid) -> Result<bool> {
        let Ok(_lock) = self.locks.acquire(Key::Volume(uuid)) else {
            return Ok(false);
        };
        let Some(record) = pool.backend.volume(uuid)?.filter(is_trimmed) else {
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
        if self.refuse_frozen(&id.to_string()).is_err() {
            return Ok(false);
        }
        let view = View::of(self, pool, &record)?;
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
            least: LEAST,
        };
        let trimmed = self.host.perform(&effect);
        trimmed.context(|| format!("trim volume {id}"))?;
        Ok(true)
    }
}

/// A clock that was wrong when they were trimmed must not put it off for years.
fn is_due(pool: &Pool, now: u64) -> Result<bool> {
    let Some(interval) = pool.definition.trim else {
        return Ok(false);
    };
    let last = pool.backend.trimmed()?;
    Ok(last.is_none_or(|last| last > now || now - last >= interval.get().as_secs()))
}

/// The blocks of a thick volume were promised to it.
fn is_trimmed(record: &VolumeRecord) -> bool {
    record.state == VolumeState::Ready && record.allocation == Allocation::Thin
}

#[cfg(test)]
mod tests;
