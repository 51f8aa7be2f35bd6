//! NodeStageVolume: attach the device, create the file system once, mount it.
//!
//! The mount table shows whether a mounted volume is staged. The stage of a block volume is an
//! entry that is valid for one boot.

use std::path::{Path, PathBuf};

use super::capability::{for_its_readers, same_capability, staged_at};
use super::format::wanted_fs;
use crate::backend::{AttachMode, Attached};
use crate::error::{Error, Result};
use crate::host::{MountSpec, NodeKind};
use crate::model::{AccessType, FsType, mount_option};
use crate::operation::lock::Key;
use crate::operation::pools::pool::Pool;
use crate::operation::snapshot::restore::copy_options;
use crate::operation::usage::view::View;
use crate::operation::{StageVolume, Volumes, usage};
use crate::record::{Formatted, LastStage, VolumeRecord};

impl Volumes {
    /// NodeStageVolume. A crash leaves at most an attached device, which the kernel detaches when
    /// the process ends (autoclear), or a finished stage, which a retry finds.
    pub fn stage_volume(&self, request: &StageVolume) -> Result<()> {
        let staging = self
            .usage
            .csi_path("staging_target_path", &request.staging_path)?;
        let (pool, id, _) = self.pools.get_volume(&request.volume_id)?;
        let _lock = self.pools.locks.acquire(Key::Volume(id.uuid))?;
        self.snapshots.copies.cancel(id.uuid);
        // Read again, because the volume may have been deleted before the lock was acquired.
        let (_, _, record) = self.pools.get_volume(&request.volume_id)?;
        for_its_readers(&record, &request.capability)?;
        let Some(fs) = wanted_fs(&record, &request.capability) else {
            return self.stage_block(&pool, record, request);
        };
        let mut record = record;
        let staged = self.is_staged(&pool, &record, request, &staging);
        if staged.map_err(Error::into_indeterminate)? {
            return self.fit_staged(&pool, &mut record, fs, &staging, &request.capability);
        }
        if record.formatted == Some(Formatted::raw()) {
            self.adopt_raw_fs(&pool, &mut record, fs)?;
        }
        let stage = LastStage {
            staging_path: request.staging_path.clone(),
            capability: request.capability.clone(),
            boot: None,
        };
        self.usage
            .make_target("staging_target_path", &staging, NodeKind::Dir)?;
        self.mount_volume(&pool, &mut record, fs, &staging, stage, false)
    }

    /// Attaches the device, formats it once, checks a file system that was not unmounted cleanly,
    /// mounts it, and grows it. On an error the mount is removed and the device is detached with
    /// its last opener.
    pub(in crate::operation) fn mount_volume(
        &self,
        pool: &Pool,
        record: &mut VolumeRecord,
        fs: FsType,
        target: &Path,
        stage: LastStage,
        read_only: bool,
    ) -> Result<()> {
        let attached = pool.backend.devices().attach(
            record,
            AttachMode {
                read_only: false,
                lasting: false,
            },
        )?;
        let mounted = self.is_mounted(&attached)?;
        if !mounted {
            self.usage.refuse_claimed(record.uuid, &attached.device)?;
        }
        let AccessType::Mount { mount_flags, .. } = stage.capability.access_type.clone() else {
            return Err(Error::Bug {
                invariant: "only a mount capability is mounted".into(),
            });
        };
        self.format_once(pool, record, &attached, fs, stage)?;
        let read_only =
            read_only || mount_option::is_read_only(&mount_flags) || record.is_for_readers();
        let options = copy_options(record, fs, &mount_flags);
        let spec = MountSpec {
            device: &attached.device,
            target,
            fs,
            options: &options,
            read_only,
        };
        if mounted {
            self.mount(record, &spec)?;
        } else {
            self.mount_sound(pool, record, &spec)?;
        }
        if read_only {
            return Ok(());
        }
        self.fit(pool, record, &spec)
    }

    fn is_mounted(&self, attached: &Attached) -> Result<bool> {
        let mounts = self.usage.mounts()?;
        Ok(!usage::of_device(&mounts, &attached.device).is_empty())
    }

    /// Whether the volume is staged at this path as requested. If it is staged in another way, that
    /// is an error.
    fn is_staged(
        &self,
        pool: &Pool,
        record: &VolumeRecord,
        request: &StageVolume,
        staging: &Path,
    ) -> Result<bool> {
        let view = self.usage.view(pool, record)?;
        match usage::at(&view.mounts, &self.usage.table_path(staging)?).last() {
            Some(top) if view.device_of(top).is_some() => {
                same_capability(record.last_stage.as_ref(), request).map(|()| true)
            }
            Some(top) => Err(usage::foreign_mount(staging, top)),
            None => match self.staged_elsewhere(record, request, &view) {
                Some(path) => Err(staged_at(request, &path.display().to_string())),
                None => Ok(false),
            },
        }
    }

    /// The other path at which an earlier stage still has the volume mounted.
    fn staged_elsewhere(
        &self,
        record: &VolumeRecord,
        request: &StageVolume,
        view: &View,
    ) -> Option<PathBuf> {
        let stage = record
            .last_stage
            .as_ref()
            .filter(|stage| stage.staging_path != request.staging_path)?;
        // The old path may no longer exist, or no longer be allowed.
        let old = self
            .usage
            .table_path(Path::new(&stage.staging_path))
            .unwrap_or_else(|_| stage.staging_path.clone().into());
        usage::at(&view.mounts, &old)
            .into_iter()
            .find(|mount| view.device_of(mount).is_some())
            .map(|_| old)
    }
}
