//! NodeUnstage, and the ends of mounts and devices that other operations share.

use std::path::Path;

use uuid::Uuid;

use super::lock::Key;
use super::pool::{Owner, Pool};
use super::{Driver, usage};
use crate::error::{Doing, Error, Result};
use crate::host::Effect;
use crate::model::VolumeId;

impl Driver {
    /// NodeUnstageVolume. Works from the mount table also when the pool isn't served. Nothing
    /// there is success; targets that are still published keep the file system alive.
    pub fn unstage_volume(&self, volume_id: &str, staging_path: &str) -> Result<()> {
        let staging = self.caller_path("staging_target_path", staging_path)?;
        let owner = self.owner(volume_id);
        let key = match &owner {
            Ok(Owner::Pool(_, id)) => Key::Volume(id.uuid),
            Ok(Owner::Nobody) | Err(_) => volume_id
                .parse::<VolumeId>()
                .map_or(Key::Path(staging_path.into()), |id| Key::Volume(id.uuid)),
        };
        let _lock = self.locks.acquire(key)?;
        let owned = match &owner {
            Ok(Owner::Pool(pool, id)) => Some((pool.as_ref(), id.uuid)),
            Ok(Owner::Nobody) | Err(_) => None,
        };
        self.unmount_all(owned, &staging)?;
        let Some((pool, uuid)) = owned else {
            return Ok(());
        };
        if let Ok(Some(mut record)) = pool.backend.volume(uuid)
            && self
                .staged_as_block(&record)?
                .is_some_and(|path| path == staging_path)
        {
            record.last_stage = None;
            pool.backend.update(&record)?;
        }
        self.free_devices(pool, uuid)
    }

    /// Unmounts what is ours at a path, however often it's mounted there. With the pool served
    /// "ours" is this volume's device; without, any loop device.
    pub(super) fn unmount_all(&self, owned: Option<(&Pool, Uuid)>, path: &Path) -> Result<()> {
        let here = self.table_path(path)?;
        let devices = match owned {
            Some((pool, uuid)) => pool.backend.devices(uuid)?,
            None => Vec::new(),
        };
        let known = owned.is_some_and(|(pool, uuid)| {
            pool.backend
                .volume(uuid)
                .is_ok_and(|record| record.is_some())
        });
        loop {
            let mounts = self.mounts()?;
            let Some(top) = usage::at(&mounts, &here).last().copied() else {
                return Ok(());
            };
            let ours = devices.iter().any(|found| usage::shows(top, &found.device))
                || (!known && usage::is_of_loop(top));
            if !ours {
                return Err(Error::refused(
                    path.display(),
                    format!(
                        "what is mounted there ({} of {}) is not this volume",
                        top.fs_name,
                        top.source.display()
                    ),
                ));
            }
            self.host
                .perform(&Effect::Unmount { target: path })
                .doing(|| format!("unmount {}", path.display()))?;
        }
    }

    /// Ends devices of a volume that nothing uses any more. One with a claim (another mount
    /// namespace, a frozen file system) or an opener stays until that ends.
    pub(super) fn free_devices(&self, pool: &Pool, uuid: Uuid) -> Result<()> {
        let found = pool.backend.devices(uuid)?;
        if found.is_empty() {
            return Ok(());
        }
        let mounts = self.mounts()?;
        for found in found
            .iter()
            .filter(|found| usage::of_device(&mounts, &found.device).is_empty())
        {
            if self.is_claimed(&found.device)? {
                tracing::warn!(volume = %uuid, device = %found.device.path.display(), "unmounted here, but a file system still holds the device");
                continue;
            }
            pool.backend.detach(uuid, &found.device)?;
        }
        Ok(())
    }
}
