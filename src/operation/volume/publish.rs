//! NodePublishVolume and NodeUnpublishVolume: mount a staged volume at a target path.
//!
//! Nothing is recorded: the mount table shows where and how a volume is published.

use std::path::Path;
use std::sync::Arc;

use uuid::Uuid;

use super::capability::for_its_readers;
use crate::error::{Error, ErrorContext, Result};
use crate::host::{Effect, NodeKind};
use crate::model::{AccessType, VolumeId};
use crate::operation::lock::Key;
use crate::operation::pools::lookup::PoolLookup;
use crate::operation::pools::pool::Pool;
use crate::operation::usage::devices::without_disk;
use crate::operation::usage::view::View;
use crate::operation::{PublishVolume, Volumes};
use crate::record::VolumeRecord;

impl Volumes {
    /// NodePublishVolume. A crash leaves at most an empty target or a finished publish; a retry or
    /// an unpublish handles both.
    pub fn publish_volume(&self, request: &PublishVolume) -> Result<()> {
        if request.staging_path.is_empty() {
            return Err(Error::refused(
                format!("volume {}", request.volume_id),
                "staging_target_path is missing; stage the volume first",
            ));
        }
        let target = self.usage.csi_path("target_path", &request.target_path)?;
        let staging = self
            .usage
            .csi_path("staging_target_path", &request.staging_path)?;
        let (pool, id, _) = self.pools.get_volume(&request.volume_id)?;
        let _lock = self.pools.locks.acquire(Key::Volume(id.uuid))?;
        let (_, _, record) = self.pools.get_volume(&request.volume_id)?;
        let view = self
            .usage
            .view(&pool, &record)
            .map_err(Error::into_indeterminate)?;
        for_its_readers(&record, &request.capability)?;
        let read_only =
            request.read_only || request.capability.is_read_only() || record.is_for_readers();
        match &request.capability.access_type {
            AccessType::Block => {
                self.publish_block(&pool, &record, request, &view, &target, read_only)
            }
            AccessType::Mount { .. } => {
                self.publish_mount(&record, request, &view, &staging, &target, read_only)
            }
        }
    }

    fn publish_mount(
        &self,
        record: &VolumeRecord,
        request: &PublishVolume,
        view: &View,
        staging: &Path,
        target: &Path,
        read_only: bool,
    ) -> Result<()> {
        let here = self.usage.table_path(staging)?;
        let staged = view
            .uses()
            .into_iter()
            .rfind(|mount| mount.mount_point == here);
        let Some(staged) = staged else {
            let reason = format!(
                "it is not staged at {}; stage it there first",
                request.staging_path
            );
            return Err(Error::refused(
                format!("volume {}", request.volume_id),
                reason,
            ));
        };
        // A volume that is staged read-only cannot be published for writing.
        let read_only = read_only || staged.is_read_only();
        if self.usage.is_published(request, view, target, read_only)? {
            return Ok(());
        }
        let own = [here, self.usage.table_path(target)?];
        self.usage
            .refuse_second_writer(record.last_stage.as_ref(), request, view, &own)?;
        let bind = Effect::Bind {
            source: staging,
            target,
            read_only,
        };
        self.usage.show(target, NodeKind::Dir, bind, || {
            format!(
                "publish volume {} at {}",
                request.volume_id,
                target.display()
            )
        })
    }

    /// NodeUnpublishVolume. If the pool is not served, it works from the mount table. It is success
    /// if nothing is mounted there. The target is removed, and an inline volume is deleted.
    pub fn unpublish_volume(&self, volume_id: &str, target_path: &str) -> Result<()> {
        let target = self.usage.csi_path("target_path", target_path)?;
        without_disk(|by_table| self.unpublish(volume_id, target_path, &target, by_table))
    }

    fn unpublish(
        &self,
        volume_id: &str,
        target_path: &str,
        target: &Path,
        by_table: bool,
    ) -> Result<()> {
        let owned = match by_table {
            true => None,
            false => self.owner_on_node(volume_id)?,
        };
        let key = match &owned {
            Some((_, uuid)) => Key::Volume(*uuid),
            None => volume_id
                .parse::<VolumeId>()
                .map_or(Key::Path(target_path.into()), |id| Key::Volume(id.uuid)),
        };
        let uuid = match &key {
            Key::Volume(uuid) => Some(*uuid),
            _ => None,
        };
        let _lock = self.pools.locks.acquire(key)?;
        if owned.is_none() {
            self.usage.refuse_frozen(volume_id)?;
        }
        let before = self.usage.unmount_all(
            owned.as_ref().map(|(pool, uuid)| (pool.as_ref(), *uuid)),
            target,
        )?;
        self.host
            .perform(&Effect::RemoveTarget { path: target })
            .context(|| format!("remove {}", target.display()))?;
        let Some((pool, uuid)) = owned else {
            uuid.map_or(Ok(()), |uuid| self.usage.free_dead_devices(uuid))?;
            return match by_table {
                // The blocks of an inline volume are deleted when its pool is opened or cleaned up.
                true => Ok(()),
                false => self.delete_hidden_inline(volume_id),
            };
        };
        self.usage.close_published(uuid)?;
        let Ok(Some(record)) = pool.backend.volumes.get(uuid) else {
            return Ok(());
        };
        if record.ephemeral {
            return self.delete_ephemeral(&pool, uuid, volume_id, &before);
        }
        if record.is_raw() {
            self.usage.free_devices(&pool, uuid, &before)
        } else {
            Ok(())
        }
    }

    /// The volume of an ID in a node call, including inline volumes. It is no error if its pool is
    /// not served, because the mount table suffices.
    fn owner_on_node(&self, volume_id: &str) -> Result<Option<(Arc<Pool>, Uuid)>> {
        if let Ok(PoolLookup::Pool(pool, id)) = self.pools.owner(volume_id) {
            return Ok(Some((pool, id.uuid)));
        }
        Ok(self.pool_of_inline(volume_id)?.map(|pool| {
            let uuid = pool.ephemeral_uuid(volume_id);
            (pool, uuid)
        }))
    }
}
