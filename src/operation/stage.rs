//! NodeStage: attach the device, make the file system once, mount it.
//!
//! Whether a mounted volume is staged, the mount table says; a block volume's stage is a line in
//! its record, valid for one boot.

use std::path::{Path, PathBuf};

use super::format::wanted_fs;
use super::lock::Key;
use super::pool::Pool;
use super::publish::View;
use super::restore::copy_options;
use super::{Driver, StageVolume, usage};
use crate::backend::{AttachMode, Attached};
use crate::error::{Doing, Error, Kind, Mismatch, Result, chain};
use crate::host::{Effect, MountSpec, NodeKind};
use crate::model::{AccessType, Capability, FsType, mount_option};
use crate::record::{FormattedAs, LastStage, VolumeRecord};

impl Driver {
    /// NodeStageVolume. A crash leaves at most an attached device, which vanishes with the
    /// process (autoclear), or a finished stage, which a repeat finds.
    pub fn stage_volume(&self, request: &StageVolume) -> Result<()> {
        let staging = self.caller_path("staging_target_path", &request.staging_path)?;
        let (pool, id, _) = self.find(&request.volume_id)?;
        let _lock = self.locks.acquire(Key::Volume(id.uuid))?;
        self.copies.end(id.uuid);
        // Read again: it may have been deleted before the lock was ours.
        let (_, _, record) = self.find(&request.volume_id)?;
        let Some(fs) = wanted_fs(&record, &request.capability) else {
            return self.stage_block(&pool, record, request);
        };
        self.refuse_other_access(&record, "mount")?;
        let staged = self.is_staged(&pool, &record, request, &staging);
        if staged.map_err(Error::unseen)? {
            return Ok(());
        }
        let mut record = record;
        let stage = LastStage {
            staging_path: request.staging_path.clone(),
            capability: request.capability.clone(),
            boot: None,
        };
        self.make_target("staging_target_path", &staging, NodeKind::Dir)?;
        self.mount_volume(&pool, &mut record, fs, &staging, stage, false)
    }

    /// Attach, format once, mount, grow. On an error the mount is gone again and the device
    /// vanishes with its last opener.
    pub(super) fn mount_volume(
        &self,
        pool: &Pool,
        record: &mut VolumeRecord,
        fs: FsType,
        target: &Path,
        stage: LastStage,
        read_only: bool,
    ) -> Result<()> {
        let attached = pool.backend.attach(
            record,
            AttachMode {
                read_only: false,
                lasting: false,
            },
        )?;
        if !self.is_mounted(&attached)? && self.is_claimed(&attached.device)? {
            return Err(Error::Busy {
                subject: format!("volume {}", record.uuid),
                holder: format!(
                    "{} has a file system that is not mounted here (frozen, or in another mount namespace)",
                    attached.device.path.display()
                ),
            });
        }
        let AccessType::Mount { mount_flags, .. } = stage.capability.access_type.clone() else {
            return Err(Error::Bug {
                invariant: "only a mount capability is mounted".into(),
            });
        };
        self.format_once(pool, record, &attached, fs, stage)?;
        let read_only = read_only || mount_option::is_read_only(&mount_flags);
        let spec = MountSpec {
            device: &attached.device,
            target,
            fs,
            options: &copy_options(record, fs, &mount_flags),
            read_only,
        };
        let mounted = self
            .host
            .perform(&Effect::Mount(spec))
            .doing(|| format!("mount volume {} at {}", record.uuid, target.display()));
        let grown = mounted.and_then(|_| {
            if read_only {
                return Ok(());
            }
            self.grow_mounted(&attached, target, fs)
        });
        grown.map_err(|first| self.undo_mount(target, first))
    }

    /// Unmounts what an attempt has mounted at a path where nothing was; an error doesn't tell
    /// whether it came to that.
    pub(super) fn undo_mount(&self, target: &Path, first: Error) -> Error {
        let unmounted = self.mount_at(target).and_then(|mounted| match mounted {
            None => Ok(()),
            Some(_) => self
                .host
                .perform(&Effect::Unmount { target })
                .map(drop)
                .doing(|| format!("unmount {}", target.display())),
        });
        match unmounted {
            Ok(()) => first,
            Err(undo) => Error::Undo {
                first: Box::new(first),
                undo: chain(&undo),
            },
        }
    }

    fn is_mounted(&self, attached: &Attached) -> Result<bool> {
        let mounts = self.mounts()?;
        Ok(!usage::of_device(&mounts, &attached.device).is_empty())
    }

    /// Grows a mounted file system that is smaller than its device: nobody calls NodeExpand for
    /// a volume that grew while it was not staged.
    pub(super) fn grow_mounted(
        &self,
        attached: &Attached,
        mount_point: &Path,
        fs: FsType,
    ) -> Result<()> {
        let doing = || format!("grow {fs} at {}", mount_point.display());
        if self
            .host
            .wants_growth(&attached.device, mount_point, fs)
            .doing(doing)?
        {
            self.host
                .perform(&Effect::GrowFs {
                    device: &attached.device,
                    mount_point,
                    fs,
                })
                .doing(doing)?;
        }
        Ok(())
    }

    /// Whether the volume is staged at this path as asked. Staged otherwise is an error.
    fn is_staged(
        &self,
        pool: &Pool,
        record: &VolumeRecord,
        request: &StageVolume,
        staging: &Path,
    ) -> Result<bool> {
        let view = View::of(self, pool, record)?;
        match usage::at(&view.mounts, &self.table_path(staging)?).last() {
            Some(top) if view.device_of(top).is_some() => {
                same_capability(record, request).map(|()| true)
            }
            Some(top) => Err(usage::stranger(staging, top)),
            None => match self.staged_elsewhere(record, request, &view) {
                Some(path) => Err(staged_at(request, &path.display().to_string())),
                None => Ok(false),
            },
        }
    }

    /// Where else the volume is still mounted by an earlier stage.
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
        // The old path may be gone, or outside of what is allowed by now.
        let old = self
            .table_path(Path::new(&stage.staging_path))
            .unwrap_or_else(|_| stage.staging_path.clone().into());
        usage::at(&view.mounts, &old)
            .into_iter()
            .find(|mount| view.device_of(mount).is_some())
            .map(|_| old)
    }

    /// Refuses a volume that has been used with the other access type.
    pub(super) fn refuse_other_access(&self, record: &VolumeRecord, wanted: &str) -> Result<()> {
        let Some(formatted) = record
            .formatted
            .as_ref()
            .filter(|formatted| formatted.complete)
        else {
            return Ok(());
        };
        if (formatted.kind == FormattedAs::Raw) == (wanted == "block") {
            return Ok(());
        }
        Err(Error::refused(
            format!("volume {}", record.uuid),
            format!(
                "it has been used as {}, access type {wanted} would destroy that",
                formatted.kind.word()
            ),
        ))
    }
}

/// A repeat must ask for what the stage was made with.
pub(super) fn same_capability(record: &VolumeRecord, request: &StageVolume) -> Result<()> {
    let differs = record
        .last_stage
        .as_ref()
        .filter(|stage| stage.capability != request.capability);
    let Some(stage) = differs else { return Ok(()) };
    let (found, wanted) = Capability::tell_apart(
        std::slice::from_ref(&stage.capability),
        std::slice::from_ref(&request.capability),
    );
    let mismatch = Mismatch::new("volume_capability", found, wanted);
    Err(Error::exists(Kind::Volume, &request.volume_id, mismatch))
}

/// A volume has one staging path at a time.
pub(super) fn staged_at(request: &StageVolume, path: &str) -> Error {
    Error::refused(
        format!("volume {}", request.volume_id),
        format!("it is staged at {path}; unstage it there first"),
    )
}
