//! Inline ephemeral volumes: made by their publish, ended by their unpublish.
//!
//! They have no stage; their file system is mounted at the target itself. Their size is that of
//! their image, so it holds. Who may make a pod makes them, beside every quota of claims: so there
//! are none unless the administrator says up to which size, and their size is all that a pod
//! chooses. One that nothing shows any more is ended when its pool is opened.

use std::path::Path;
use std::sync::Arc;

use uuid::Uuid;

use super::create::check_new;
use crate::backend::FoundDevice;
use crate::backend::file::IMAGE;
use crate::error::{Error, ErrorContext, Kind, Mismatch, Result};
use crate::host::NodeKind;
use crate::model::{FsType, VolumeId, VolumeParameters, size};
use crate::operation::lock::Key;
use crate::operation::pools::capacity::{admit, minimum_size};
use crate::operation::pools::pool::Pool;
use crate::operation::usage::view::View;
use crate::operation::{Driver, PublishEphemeral, usage};
use crate::record::{LastStage, VolumeRecord, VolumeState};

impl Driver {
    /// NodePublishVolume of an inline volume. A crash leaves a volume that a repeat takes over
    /// and an unpublish ends.
    pub fn publish_ephemeral(&self, request: &PublishEphemeral) -> Result<()> {
        let target = self.caller_path("target_path", &request.target_path)?;
        let Some(fs) = request.capability.access_type.fs() else {
            return Err(Error::invalid(
                "volume_capability",
                "an inline volume must be mounted; access type block is not supported",
            ));
        };
        // One that is there may be of another pool: a pod of an earlier release could name one.
        let pool = match self.pool_of_inline(&request.volume_id)? {
            Some(pool) => pool,
            None => {
                self.refuse_new_inline(fs, request)?;
                self.choose_pool(None)?
            }
        };
        let id = VolumeId {
            pool: pool.id(),
            uuid: Driver::ephemeral_uuid(&pool, &request.volume_id),
        };
        let _lock = self.locks.acquire(Key::Volume(id.uuid))?;
        let record = match pool.backend.volume(id.uuid)? {
            Some(record) if record.state == VolumeState::Ready => record,
            Some(_) | None => {
                self.refuse_new_inline(fs, request)?;
                if let Some(top) = self.mount_at(&target).map_err(Error::into_indeterminate)? {
                    return Err(usage::stranger(&target, &top));
                }
                self.create_ephemeral(&pool, id, fs, request)
                    .map_err(|first| self.undo_target(&target, first))?
            }
        };
        // The kubelet unpublishes only what it saw published: a failure leaves nothing behind.
        let uuid = record.uuid;
        self.show_ephemeral(&pool, record, fs, &target, request)
            .map_err(|first| self.undo_ephemeral(&pool, uuid, &target, request, first))
    }

    /// Mounts an inline volume at its target, unless it is there already.
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
        self.make_target("target_path", target, NodeKind::Dir)?;
        self.mount_volume(pool, &mut record, fs, target, stage, read_only)
    }

    /// Ends what a failed publish leaves. What is mounted, or in use elsewhere, was there before
    /// and stays; then the answer isn't final.
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
        match self.mount_at(target) {
            Ok(None) => {}
            Ok(Some(_)) | Err(_) => return first.into_indeterminate(),
        }
        let first = self.undo_target(target, first);
        first.with_undo(self.delete_ephemeral(pool, uuid, &request.volume_id, &[]))
    }

    /// Whether the volume is at this target as asked. There otherwise is an error.
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
        let view = View::of(self, pool, record)?;
        let here = self.table_path(target)?;
        if let Some(top) = usage::at(&view.mounts, &here).last() {
            return match view.device_of(top) {
                Some(_) if top.is_read_only() == read_only => Ok(true),
                Some(_) => {
                    let mismatch = Mismatch::new("readonly", top.is_read_only(), read_only);
                    Err(Error::exists(Kind::Volume, &request.volume_id, mismatch))
                }
                None => Err(usage::stranger(target, top)),
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
        let ended = pool.backend.delete_unanswered(id.uuid);
        ended.map_err(Error::into_indeterminate)?;
        pool.backend.create(record, &|space| {
            admit(pool, space, parameters.allocation, 0, size)
        })
    }

    /// Refuses an inline volume that isn't there yet: where the administrator allows none, of more
    /// than they allow, and with attributes that aren't a pod's to choose.
    fn refuse_new_inline(&self, fs: FsType, request: &PublishEphemeral) -> Result<()> {
        let Some(most) = self.settings.inline_max_size else {
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

    /// The scheduler keeps claims within the limit of volumes, and doesn't count inline volumes.
    fn refuse_too_many(&self, volume_id: &str) -> Result<()> {
        let Some(most) = self.settings.max_volumes else {
            return Ok(());
        };
        let is_image = |name: &Path| name.ends_with(IMAGE);
        let attached = self.host.loop_devices(&is_image);
        let attached = attached.context(|| "list loop devices".into());
        if attached.map_err(Error::into_indeterminate)?.len() < usize::from(most.get()) {
            return Ok(());
        }
        Err(Error::refused(
            format!("inline volume {volume_id}"),
            format!(
                "this node has {most} volumes attached, which is the configured limit (--max-volumes; in the chart: node.maxVolumes)"
            ),
        ))
    }

    /// The pool that has an inline volume, in any state.
    pub(in crate::operation) fn pool_of_inline(
        &self,
        volume_id: &str,
    ) -> Result<Option<Arc<Pool>>> {
        for pool in self.serving() {
            let uuid = Driver::ephemeral_uuid(&pool, volume_id);
            if pool.backend.volume(uuid)?.is_some() {
                return Ok(Some(pool));
            }
        }
        Ok(None)
    }

    /// Ends inline volumes of a pool which nothing shows any more: of an earlier boot, or of an
    /// unpublish that worked without the pool's disk. One of which that isn't certain, because its
    /// devices or the mounts can't be looked at, stays. Tells how many, and what has failed.
    pub(in crate::operation) fn delete_leftover_inline(&self, pool: &Pool) -> (u64, Option<Error>) {
        let mut ended = 0;
        let mut failed = None;
        let all = pool.backend.volumes(None, usize::MAX).into_iter();
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
        // A call that is at work on it ends or shows it.
        let Ok(_lock) = self.locks.acquire(Key::Volume(uuid)) else {
            return Ok(false);
        };
        let is_left = match pool.backend.volume(uuid)? {
            Some(record) => record.ephemeral && self.is_left(pool, &record)?,
            None => false,
        };
        if is_left {
            pool.backend.hide(uuid)?;
        }
        Ok(is_left)
    }

    /// Whether no device stands on an inline volume, and no mount of one is where it was published.
    fn is_left(&self, pool: &Pool, record: &VolumeRecord) -> Result<bool> {
        if let Some(stage) = &record.last_stage {
            // Asked first: it's quick, and mostly one is shown.
            let here = self.table_path(Path::new(&stage.staging_path))?;
            let mounts = self.mounts()?;
            if usage::at(&mounts, &here).into_iter().any(usage::is_of_loop) {
                return Ok(false);
            }
        }
        Ok(pool.backend.devices(record.uuid)?.is_empty())
    }

    /// Ends an inline volume once nothing shows it.
    pub(in crate::operation) fn delete_ephemeral(
        &self,
        pool: &Pool,
        uuid: Uuid,
        volume_id: &str,
        before: &[FoundDevice],
    ) -> Result<()> {
        self.free_devices(pool, uuid, before)?;
        if let Some(device) = self.lingering(pool, uuid)? {
            return Err(Error::InUse {
                id: volume_id.to_string(),
                holder: format!(
                    "{} is still open or mounted elsewhere",
                    device.path.display()
                ),
            });
        }
        pool.backend.delete(uuid)
    }

    /// Ends blocks of inline volumes of this name whose unpublish was cut off after they were out
    /// of sight.
    pub(in crate::operation) fn delete_hidden_inline(&self, volume_id: &str) -> Result<()> {
        if volume_id.parse::<VolumeId>().is_ok() {
            return Ok(());
        }
        for pool in self.serving() {
            let uuid = Driver::ephemeral_uuid(&pool, volume_id);
            let _lock = self.locks.acquire(Key::Volume(uuid))?;
            if pool.backend.volume(uuid)?.is_none() {
                pool.backend.delete(uuid)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
