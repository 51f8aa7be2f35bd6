//! NodeGetVolumeStats.

use std::path::Path;

use crate::error::{Error, ErrorContext, Kind, Result};
use crate::operation::{GetVolumeStats, Stats, VolumeUsage, Volumes, usage};

impl Volumes {
    /// NodeGetVolumeStats. It only reads, and never waits for a running operation.
    pub fn volume_stats(&self, request: &GetVolumeStats) -> Result<Stats> {
        let (pool, _, record) = match self.pools.get_volume_even_if_fenced(&request.volume_id) {
            Err(Error::NotFound { .. }) => self.get_inline(&request.volume_id)?,
            found => found?,
        };
        let missing = || Error::NotFound {
            kind: Kind::Volume,
            id: format!("{} at {}", request.volume_id, request.volume_path),
        };
        if request.volume_path.is_empty() {
            return Err(Error::invalid(
                "volume_path",
                "is missing; give the staging or target path",
            ));
        }
        let path = Path::new(&request.volume_path);
        if self.host.check_path(path).is_err() {
            return Err(missing());
        }
        let whole = VolumeUsage {
            total: record.size,
            available: None,
            used: None,
        };
        if record.is_raw()
            && self
                .usage
                .staged_as_block(&record)?
                .is_some_and(|staged| staged == request.volume_path)
        {
            return Ok(Stats {
                bytes: whole,
                inodes: None,
            });
        }
        let view = self.usage.view(&pool, &record)?;
        let here = self.usage.table_path(path)?;
        let mount = usage::at(&view.mounts, &here)
            .last()
            .copied()
            .filter(|mount| view.device_of(mount).is_some());
        let Some(mount) = mount else {
            return Err(missing());
        };
        if usage::is_node(mount) {
            return Ok(Stats {
                bytes: whole,
                inodes: None,
            });
        }
        let space = self
            .host
            .space_csi_path(path)
            .context(|| format!("read the usage of {}", path.display()))?;
        let bytes = VolumeUsage {
            total: space.total,
            available: Some(space.available),
            used: Some(space.total - space.free.min(space.total)),
        };
        let inodes = (space.inodes > 0).then(|| VolumeUsage {
            total: space.inodes,
            available: Some(space.inodes_free),
            used: Some(space.inodes - space.inodes_free.min(space.inodes)),
        });
        Ok(Stats { bytes, inodes })
    }

    /// Returns an inline volume, whose ID is the one that the kubelet has generated.
    fn get_inline(
        &self,
        volume_id: &str,
    ) -> Result<(
        std::sync::Arc<crate::operation::Pool>,
        crate::model::VolumeId,
        crate::record::VolumeRecord,
    )> {
        for pool in self.pools.serving() {
            let uuid = pool.ephemeral_uuid(volume_id);
            if let Some(record) = pool.backend.volumes.get(uuid)? {
                let id = crate::model::VolumeId {
                    pool: pool.id(),
                    uuid,
                };
                return Ok((pool, id, record));
            }
        }
        Err(Error::no_volume(volume_id))
    }
}
