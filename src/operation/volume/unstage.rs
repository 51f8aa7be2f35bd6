//! NodeUnstageVolume.

use std::path::Path;

use crate::error::Result;
use crate::model::VolumeId;
use crate::operation::Volumes;
use crate::operation::lock::Key;
use crate::operation::pools::lookup::PoolLookup;
use crate::operation::usage::devices::without_disk;

impl Volumes {
    /// NodeUnstageVolume. If the pool is not served, it works from the mount table. It is success
    /// if nothing is mounted there. Targets that are still published keep the file system mounted.
    pub fn unstage_volume(&self, volume_id: &str, staging_path: &str) -> Result<()> {
        let staging = self.usage.csi_path("staging_target_path", staging_path)?;
        without_disk(|by_table| self.unstage(volume_id, staging_path, &staging, by_table))
    }

    fn unstage(
        &self,
        volume_id: &str,
        staging_path: &str,
        staging: &Path,
        by_table: bool,
    ) -> Result<()> {
        let owner = self.pools.owner(volume_id);
        let uuid = volume_id.parse::<VolumeId>().ok().map(|id| id.uuid);
        let _lock = self
            .pools
            .locks
            .acquire(uuid.map_or(Key::Path(staging_path.into()), Key::Volume))?;
        let owned = match &owner {
            Ok(PoolLookup::Pool(pool, id)) if !by_table => Some((pool.as_ref(), id.uuid)),
            Ok(_) | Err(_) => None,
        };
        if owned.is_none() {
            self.usage.refuse_frozen(volume_id)?;
        }
        let before = self.usage.unmount_all(owned, staging)?;
        if let Some(uuid) = uuid
            && !matches!(owner, Ok(PoolLookup::Unknown))
        {
            self.usage
                .unstage_block(owned.map(|(pool, _)| pool), uuid, staging_path)?;
        }
        match (owned, uuid) {
            (Some((pool, uuid)), _) => self.usage.free_devices(pool, uuid, &before),
            (None, Some(uuid)) => self.usage.free_dead_devices(uuid),
            (None, None) => Ok(()),
        }
    }
}
