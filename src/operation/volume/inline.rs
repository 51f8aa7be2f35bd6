//! Inline ephemeral volumes: created by NodePublishVolume, deleted by NodeUnpublishVolume.
//!
//! They have no stage; their file system is mounted at the target itself. Their size is that of
//! their image, so it is enforced. Every user who may create a pod can create them, and quotas of
//! claims do not count them. So they are disabled unless the administrator sets a maximum size, and
//! the size is the only attribute that a pod can choose. An inline volume that no mount and no
//! device shows any more is deleted when its pool is opened or cleaned up.

use std::path::Path;
use std::sync::Arc;

use uuid::Uuid;

use super::create::check_new;
use crate::backend::FoundDevice;
use crate::backend::file::count_devices;
use crate::backend::shown;
use crate::error::{Error, ErrorContext, Kind, Mismatch, Result};
use crate::host::{Mount, NodeKind};
use crate::model::{FsType, VolumeId, VolumeParameters, size};
use crate::operation::lock::Key;
use crate::operation::pools::capacity::{admit, minimum_size};
use crate::operation::pools::pool::Pool;
use crate::operation::{PublishEphemeral, Volumes, usage};
use crate::record::{LastStage, VolumeRecord, VolumeState};

impl Volumes {
    /// NodePublishVolume of an inline volume. A crash leaves a volume that a retry reuses and an
    /// unpublish deletes.
    pub fn publish_ephemeral(&self, request: &PublishEphemeral) -> Result<()> {
        let target = self.usage.csi_path("target_path", &request.target_path)?;
        let Some(fs) = request.capability.access_type.fs() else {
            return Err(Error::invalid(
                "volume_capability",
                "an inline volume must be mounted; access type block is not supported",
            ));
        };
        // An existing volume may be in another pool: pods of an earlier release could name a pool.
        let pool = match self.pool_of_inline(&request.volume_id)? {
            Some(pool) => pool,
            None => {
                self.refuse_new_inline(fs, request)?;
                self.pools.choose_pool(None)?
            }
        };
        let id = VolumeId {
            pool: pool.id(),
            uuid: pool.ephemeral_uuid(&request.volume_id),
        };
        let _lock = self.pools.locks.acquire(Key::Volume(id.uuid))?;
        let record = match pool.backend.volumes.get(id.uuid)? {
            Some(record) if record.state == VolumeState::Ready => record,
            Some(_) | None => {
                self.refuse_new_inline(fs, request)?;
                if let Some(top) = self
                    .usage
                    .mount_at(&target)
                    .map_err(Error::into_indeterminate)?
                {
                    return Err(usage::foreign_mount(&target, &top));
                }
                self.create_ephemeral(&pool, id, fs, request)
                    .map_err(|first| self.usage.undo_target(&target, first))?
            }
        };
        // The kubelet unpublishes only volumes whose publish succeeded, so a failure must leave
        // nothing behind.
        let uuid = record.uuid;
        self.show_ephemeral(&pool, record, fs, &target, request)
            .map_err(|first| self.undo_ephemeral(&pool, uuid, &target, request, first))
    }

    /// Mounts an inline volume at its target, unless it is already mounted there.
    fn show_ephemeral(
        &self,
        pool: &Pool,
        mut record: VolumeRecord,
        fs: FsType,
        target: &Path,
        request: &PublishEphemeral,
    ) -> Result<()> {
        let read_only = request.read_only || request.capability.is_read_only();
        if self.is_inline_published(pool, &record, request, target, read_only)? {
            return Ok(());
        }
        let boot = self.host.boot_id().context(|| "read the boot ID".into())?;
        let stage = LastStage {
            staging_path: request.target_path.clone(),
            capability: request.capability.clone(),
            boot: Some(boot),
        };
        self.usage
            .make_target("target_path", target, NodeKind::Dir)?;
        self.mount_volume(pool, &mut record, fs, target, stage, read_only)
    }

    /// Undoes a failed publish. If the volume is mounted, or in use elsewhere, it existed before
    /// and stays; the error is then not final.
    fn undo_ephemeral(
        &self,
        pool: &Pool,
        uuid: Uuid,
        target: &Path,
        request: &PublishEphemeral,
        first: Error,
    ) -> Error {
        if matches!(first, Error::Exists { .. } | Error::InUse { .. }) {
            return first;
        }
        match self.usage.mount_at(target) {
            Ok(None) => {}
            Ok(Some(_)) | Err(_) => return first.into_indeterminate(),
        }
        let first = self.usage.undo_target(target, first);
        first.with_undo(self.delete_ephemeral(pool, uuid, &request.volume_id, &[]))
    }

    /// Whether the volume is published at this target as requested. If it is published in another
    /// way, that is an error.
    fn is_inline_published(
        &self,
        pool: &Pool,
        record: &VolumeRecord,
        request: &PublishEphemeral,
        target: &Path,
        read_only: bool,
    ) -> Result<bool> {
        let asked = request.attributes.size;
        let wanted = asked.max(minimum_size(std::slice::from_ref(&request.capability)));
        if record.size != wanted {
            let mismatch = Mismatch::new("size", record.size, wanted);
            return Err(Error::exists(Kind::Volume, &request.volume_id, mismatch));
        }
        let view = self.usage.view(pool, record)?;
        let here = self.usage.table_path(target)?;
        if let Some(top) = usage::at(&view.mounts, &here).last() {
            return match view.device_of(top) {
                Some(_) if top.is_read_only() == read_only => Ok(true),
                Some(_) => {
                    let mismatch = Mismatch::new("readonly", top.is_read_only(), read_only);
                    Err(Error::exists(Kind::Volume, &request.volume_id, mismatch))
                }
                None => Err(usage::foreign_mount(target, top)),
            };
        }
        if let Some(other) = view.uses().first() {
            return Err(Error::InUse {
                id: request.volume_id.clone(),
                holder: format!(
                    "an inline volume has only one target path, and it is mounted at {}",
                    other.mount_point.display()
                ),
            });
        }
        Ok(false)
    }

    fn create_ephemeral(
        &self,
        pool: &Pool,
        id: VolumeId,
        fs: FsType,
        request: &PublishEphemeral,
    ) -> Result<VolumeRecord> {
        let size = request.attributes.size.max(fs.minimum_bytes());
        let parameters = VolumeParameters::default();
        let record = VolumeRecord {
            capabilities: vec![request.capability.clone()],
            ephemeral: true,
            ..self.plan(pool, id, &request.volume_id, size, &parameters)?
        };
        check_new("volume_context", "volume_capability", &record)?;
        let ended = pool.backend.volumes.delete_unanswered(id.uuid);
        ended.map_err(Error::into_indeterminate)?;
        self.snapshots.before_bases(pool, || {
            pool.backend.create(record.clone(), &|space| {
                admit(pool, space, parameters.allocation, 0, size)
            })
        })
    }

    /// Refuses to create an inline volume if the administrator allows none, if it is larger than
    /// they allow, or if it has attributes that a pod cannot choose.
    fn refuse_new_inline(&self, fs: FsType, request: &PublishEphemeral) -> Result<()> {
        let Some(most) = self.pools.settings.inline_max_size else {
            return Err(Error::refused(
                format!("inline volume {}", request.volume_id),
                "inline volumes are disabled on this node; use a generic ephemeral volume, or ask an administrator to set --inline-max-size (in the chart: csiDriver.inlineEphemeral)",
            ));
        };
        request.attributes.check_new()?;
        let size = request.attributes.size.max(fs.minimum_bytes());
        if size > most.min(size::MAX) {
            return Err(Error::OutOfRange {
                field: "volume_context.size".into(),
                problem: format!(
                    "{size} bytes are more than the {most} bytes that an inline volume may have (--inline-max-size)"
                ),
            });
        }
        self.refuse_too_many(&request.volume_id)
    }

    /// Refuses an inline volume beyond the maximum number of volumes. The scheduler applies that
    /// limit to claims, and does not count inline volumes.
    fn refuse_too_many(&self, volume_id: &str) -> Result<()> {
        let Some(most) = self.pools.settings.max_volumes else {
            return Ok(());
        };
        let mut attached = count_devices(self.host.as_ref()).map_err(Error::into_indeterminate)?;
        for pool in self.pools.serving() {
            let mapped = pool.backend.devices().count_without_loops();
            attached += mapped.map_err(Error::into_indeterminate)?;
        }
        if attached < usize::from(most.get()) {
            return Ok(());
        }
        Err(Error::refused(
            format!("inline volume {volume_id}"),
            format!(
                "this node has {most} volumes attached, which is the configured limit (--max-volumes; in the chart: node.maxVolumes)"
            ),
        ))
    }

    /// The pool that contains an inline volume, in any state.
    pub(in crate::operation) fn pool_of_inline(
        &self,
        volume_id: &str,
    ) -> Result<Option<Arc<Pool>>> {
        for pool in self.pools.serving() {
            let uuid = pool.ephemeral_uuid(volume_id);
            if pool.backend.volumes.get(uuid)?.is_some() {
                return Ok(Some(pool));
            }
        }
        Ok(None)
    }

    /// Deletes the inline volumes of a pool that no mount and no device shows any more: volumes of
    /// an earlier boot, or of an unpublish that worked without the pool's disk. A volume for which
    /// that is uncertain, because its devices or the mounts cannot be read, stays. Returns the
    /// number of deleted volumes, and the first error.
    pub(in crate::operation) fn delete_leftover_inline(&self, pool: &Pool) -> (u64, Option<Error>) {
        let mut ended = 0;
        let mut failed = None;
        let all = pool.backend.volumes.ready(None, usize::MAX).into_iter();
        for record in all.filter(|record| record.ephemeral) {
            match self.hide_if_left(pool, record.uuid) {
                Ok(true) => ended += 1,
                Ok(false) => {}
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        (ended, failed)
    }

    fn hide_if_left(&self, pool: &Pool, uuid: Uuid) -> Result<bool> {
        // The call that holds the lock deletes the volume or publishes it.
        let Ok(_lock) = self.pools.locks.acquire(Key::Volume(uuid)) else {
            return Ok(false);
        };
        let is_left = match pool.backend.volumes.get(uuid)? {
            Some(record) => record.ephemeral && self.is_left(pool, &record)?,
            None => false,
        };
        if is_left {
            pool.backend.volumes.hide(uuid)?;
        }
        Ok(is_left)
    }

    /// Whether no device is attached to an inline volume, and no device of a volume is mounted at the path
    /// at which it was published.
    fn is_left(&self, pool: &Pool, record: &VolumeRecord) -> Result<bool> {
        if let Some(stage) = &record.last_stage {
            // Checked first, because it is fast and most inline volumes are mounted.
            let here = self.usage.table_path(Path::new(&stage.staging_path))?;
            let mounts = self.usage.mounts()?;
            let is_volume_mount =
                |mount: &&Mount| shown::is_volume_mount(self.host.as_ref(), mount);
            if usage::at(&mounts, &here).iter().any(is_volume_mount) {
                return Ok(false);
            }
        }
        Ok(pool.backend.devices().list(record.uuid)?.is_empty())
    }

    /// Deletes an inline volume once no mount and no device shows it.
    pub(in crate::operation) fn delete_ephemeral(
        &self,
        pool: &Pool,
        uuid: Uuid,
        volume_id: &str,
        before: &[FoundDevice],
    ) -> Result<()> {
        self.usage.free_devices(pool, uuid, before)?;
        if let Some(device) = self.usage.lingering(pool, uuid)? {
            return Err(Error::InUse {
                id: volume_id.to_string(),
                holder: format!(
                    "{} is still open or mounted elsewhere",
                    device.path.display()
                ),
            });
        }
        pool.backend.volumes.delete(uuid)
    }

    /// Deletes the blocks of an inline volume of this name whose unpublish was interrupted after
    /// the volume was hidden.
    pub(in crate::operation) fn delete_hidden_inline(&self, volume_id: &str) -> Result<()> {
        if volume_id.parse::<VolumeId>().is_ok() {
            return Ok(());
        }
        for pool in self.pools.serving() {
            let uuid = pool.ephemeral_uuid(volume_id);
            let _lock = self.pools.locks.acquire(Key::Volume(uuid))?;
            if pool.backend.volumes.get(uuid)?.is_none() {
                pool.backend.volumes.delete(uuid)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
