//! Inline ephemeral volumes: made by their publish, ended by their unpublish.
//!
//! They have no stage; their file system is mounted at the target itself. Their size is that of
//! their image, so it holds. One that a reboot left behind is ended at the next start.

use std::path::Path;

use super::capacity::{admit, minimum_size};
use super::lock::Key;
use super::pool::Pool;
use super::publish::View;
use super::{Driver, PublishEphemeral, usage};
use crate::backend::FoundDevice;
use crate::error::{Doing, Error, Kind, Mismatch, Result};
use crate::host::{Effect, NodeKind};
use crate::model::{FsType, VolumeId, mkfs, size};
use crate::record::{LastStage, VolumeRecord, VolumeState};

impl Driver {
    /// NodePublishVolume of an inline volume. A crash leaves a volume that a repeat takes over
    /// and an unpublish ends.
    pub fn publish_ephemeral(&self, request: &PublishEphemeral) -> Result<()> {
        let target = self.caller_path("target_path", &request.target_path)?;
        let Some(fs) = request.capability.access_type.fs() else {
            return Err(Error::invalid(
                "volume_capability",
                "an inline volume is mounted; access type block can't be",
            ));
        };
        let pool = self.choose_pool(request.parameters.pool.as_deref())?;
        let id = VolumeId {
            pool: pool.id(),
            uuid: Driver::ephemeral_uuid(&pool, &request.volume_id),
        };
        let _lock = self.locks.acquire(Key::Volume(id.uuid))?;
        let mut record = match pool.backend.volume(id.uuid)? {
            Some(record) if record.state == VolumeState::Ready => record,
            Some(_) | None => self.create_ephemeral(&pool, id, fs, request)?,
        };
        if self.is_inline_published(&pool, &record, request, &target)? {
            return Ok(());
        }
        let boot = self.host.boot_id().doing(|| "read the boot id".into())?;
        let stage = LastStage {
            staging_path: request.target_path.clone(),
            capability: request.capability.clone(),
            boot: Some(boot),
        };
        let mounted = self
            .make_target("target_path", &target, NodeKind::Dir)
            .and_then(|()| {
                self.mount_volume(&pool, &mut record, fs, &target, stage, request.read_only)
            });
        // The kubelet unpublishes only what it saw published: a failure leaves nothing behind.
        mounted.map_err(|first| {
            let removed = self
                .host
                .perform(&Effect::RemoveTarget { path: &target })
                .doing(|| format!("remove {}", target.display()));
            match removed.and_then(|_| self.end_ephemeral(&pool, &record, &request.volume_id, &[]))
            {
                Ok(()) => first,
                Err(undo) => Error::Undo {
                    first: Box::new(first),
                    undo: crate::error::chain(&undo),
                },
            }
        })
    }

    /// Whether the volume is at this target as asked. There otherwise is an error.
    fn is_inline_published(
        &self,
        pool: &Pool,
        record: &VolumeRecord,
        request: &PublishEphemeral,
        target: &Path,
    ) -> Result<bool> {
        let wanted = request
            .size
            .max(minimum_size(std::slice::from_ref(&request.capability)));
        if record.size != wanted {
            let mismatch = Mismatch {
                field: "size",
                found: record.size.to_string(),
                wanted: wanted.to_string(),
            };
            return Err(Error::Exists {
                kind: Kind::Volume,
                id: request.volume_id.clone(),
                mismatch,
            });
        }
        let view = View::of(self, pool, record)?;
        let here = self.table_path(target)?;
        if let Some(top) = usage::at(&view.mounts, &here).last() {
            return match view.device_of(top) {
                Some(_) if top.is_read_only() == request.read_only => Ok(true),
                Some(_) => Err(Error::Exists {
                    kind: Kind::Volume,
                    id: request.volume_id.clone(),
                    mismatch: Mismatch {
                        field: "readonly",
                        found: top.is_read_only().to_string(),
                        wanted: request.read_only.to_string(),
                    },
                }),
                None => Err(usage::stranger(target, top)),
            };
        }
        if let Some(other) = view.uses().first() {
            return Err(Error::InUse {
                id: request.volume_id.clone(),
                holder: format!(
                    "an inline volume has one target, and it is mounted at {}",
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
        mkfs::check("volume_context", fs, &request.parameters.mkfs_options)?;
        let size = request.size.max(fs.minimum_bytes());
        if size > size::MAX {
            return Err(Error::OutOfRange {
                field: "volume_context.size".into(),
                problem: format!("{size} is more than any pool can hold"),
            });
        }
        let record = VolumeRecord {
            capabilities: vec![request.capability.clone()],
            ephemeral: true,
            ..self.plan(pool, id, &request.volume_id, size, &request.parameters)?
        };
        pool.backend.delete(id.uuid)?;
        pool.backend.create(record, &|space| {
            admit(pool, space, request.parameters.allocation, 0, size)
        })
    }

    /// Ends an inline volume once nothing shows it.
    pub(super) fn end_ephemeral(
        &self,
        pool: &Pool,
        record: &VolumeRecord,
        volume_id: &str,
        before: &[FoundDevice],
    ) -> Result<()> {
        self.free_devices(pool, record.uuid, before)?;
        if let Some(device) = self.lingering(pool, record.uuid)? {
            return Err(Error::InUse {
                id: volume_id.to_string(),
                holder: format!(
                    "{} is still open or mounted elsewhere",
                    device.path.display()
                ),
            });
        }
        pool.backend.delete(record.uuid)
    }
}
