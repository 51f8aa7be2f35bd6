//! DeleteVolume.

use uuid::Uuid;

use crate::error::{Error, Result};
use crate::operation::lock::Key;
use crate::operation::pools::lookup::{PoolLookup, check_fence};
use crate::operation::pools::pool::Pool;
use crate::operation::{Volumes, usage};
use crate::record::{VolumeRecord, VolumeState};

impl Volumes {
    /// DeleteVolume. A volume that does not exist counts as deleted; for a volume in use the error
    /// names its user. A failure or a crash leaves trash, which a retry, the next start or
    /// [`Driver::clean`](crate::operation::Driver::clean) purges.
    pub fn delete_volume(&self, volume_id: &str) -> Result<()> {
        self.delete_for(volume_id, None)
    }

    /// DeleteVolume, also of a volume that this move has fenced.
    pub(in crate::operation) fn delete_for(
        &self,
        volume_id: &str,
        move_uid: Option<Uuid>,
    ) -> Result<()> {
        let PoolLookup::Pool(pool, id) = self.pools.owner(volume_id)? else {
            return Ok(());
        };
        if let Some(record) = pool.backend.volumes.get(id.uuid)?
            && record.state == VolumeState::Creating
        {
            // The copy into it would keep the lock to its end.
            self.snapshots.stop_copy(&record.name);
        }
        let _lock = self.pools.locks.acquire(Key::Volume(id.uuid))?;
        if self.snapshots.copies.has(id.uuid) {
            return Err(Error::Pending {
                what: format!("a copy of volume {volume_id}"),
            });
        }
        if let Some(record) = pool.backend.volumes.get(id.uuid)? {
            check_fence(volume_id, &record, move_uid)?;
            self.refuse_if_used(&pool, &record, volume_id)?;
        }
        let _base = self.snapshots.delete_base_of(&pool, id.uuid)?;
        pool.backend.volumes.delete(id.uuid)
    }

    /// Returns an error that names the user, if a mount, a target, a stage or an open device uses
    /// the volume. Devices that are not in use are detached.
    pub(in crate::operation) fn refuse_if_used(
        &self,
        pool: &Pool,
        record: &VolumeRecord,
        volume_id: &str,
    ) -> Result<()> {
        let in_use = |holder: String| Error::InUse {
            id: volume_id.to_string(),
            holder,
        };
        if let Some(path) = self.usage.staged_as_block(record)? {
            return Err(in_use(format!("staged at {path}; unstage it first")));
        }
        self.usage.close_published(record.uuid)?;
        let found = pool.backend.devices().list(record.uuid)?;
        if found.is_empty() {
            return Ok(());
        }
        let mounts = self.usage.mounts()?;
        for found in &found {
            let device = &found.device;
            if let Some(mount) = usage::of_device(&mounts, device).first() {
                return Err(in_use(format!(
                    "{} is mounted at {}; unpublish and unstage it first",
                    device.path.display(),
                    mount.mount_point.display()
                )));
            }
            if let Some(claim) = self.usage.find_holder(device)? {
                return Err(in_use(claim));
            }
            pool.backend.devices().detach(record.uuid, device)?;
        }
        match self.usage.lingering(pool, record.uuid)? {
            Some(device) => Err(in_use(format!(
                "a process has {} open",
                device.path.display()
            ))),
            None => Ok(()),
        }
    }
}
