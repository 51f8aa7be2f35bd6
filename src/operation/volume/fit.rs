//! Prepares and mounts the file system of a volume: repairs it, mounts it, and grows it to the size
//! of its device.
//!
//! Growth is online. Only ext4, and only where the kernel refuses online growth, is grown while it
//! is not mounted. A file system that cannot be grown stays mounted at its old size, and each stage
//! tries again.

use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;

use crate::backend::AttachMode;
use crate::error::{Error, ErrorContext, HostError, Result, chain};
use crate::host::{Check, Device, Effect, MountSpec};
use crate::model::{AccessType, Capability, FsType};
use crate::operation::snapshot::restore::copy_options;
use crate::operation::{Pool, Volumes};
use crate::record::VolumeRecord;

/// How long an unmounted file system may stay claimed before its growth is left to the next stage:
/// a container that starts or terminates has a copy of every mount for a moment.
const RELEASE_TRIES: u32 = 100;
const RELEASE_WAIT: Duration = Duration::from_millis(50);

impl Volumes {
    /// Mounts a file system. On an error it is not mounted.
    pub(in crate::operation) fn mount(
        &self,
        record: &VolumeRecord,
        spec: &MountSpec<'_>,
    ) -> Result<()> {
        self.host
            .perform(&Effect::Mount(*spec))
            .map(drop)
            .context(|| format!("mount volume {} at {}", record.uuid, spec.target.display()))
            .map_err(|first| self.usage.undo_mount(spec.target, first))
    }

    /// Mounts a file system that is not mounted anywhere, and repairs it before that if necessary.
    pub(in crate::operation) fn mount_sound(
        &self,
        pool: &Pool,
        record: &mut VolumeRecord,
        spec: &MountSpec<'_>,
    ) -> Result<()> {
        if record.formatted.as_ref().is_some_and(|it| it.growing) {
            self.repair_growth(pool, record, spec.device, spec.fs)?;
        }
        self.check_unclean(pool, record, spec.device, spec.fs)?;
        self.mount(record, spec)
    }

    /// Grows the file system of an existing stage: the call that staged it may have been
    /// interrupted before the growth.
    pub(in crate::operation) fn fit_staged(
        &self,
        pool: &Pool,
        record: &mut VolumeRecord,
        fs: FsType,
        staging: &Path,
        capability: &Capability,
    ) -> Result<()> {
        let top = self
            .usage
            .mount_at(staging)
            .map_err(Error::into_indeterminate)?;
        let AccessType::Mount { mount_flags, .. } = &capability.access_type else {
            return Ok(());
        };
        if top.is_none_or(|top| top.is_read_only()) {
            return Ok(());
        }
        let mode = AttachMode {
            read_only: false,
            lasting: false,
        };
        let attached = pool
            .backend
            .devices()
            .attach(record, mode)
            .map_err(Error::into_indeterminate)?;
        let options = copy_options(record, fs, mount_flags);
        let spec = MountSpec {
            device: &attached.device,
            target: staging,
            fs,
            options: &options,
            read_only: false,
        };
        self.fit(pool, record, &spec)
    }

    /// Grows a file system that is mounted for writing to the size of its device. It is needed
    /// because NodeExpandVolume is not called for a volume that grew while it was not staged. A
    /// failure is reported and leaves the file system mounted; it is an error only if the file
    /// system could not be mounted again.
    pub(in crate::operation) fn fit(
        &self,
        pool: &Pool,
        record: &mut VolumeRecord,
        spec: &MountSpec<'_>,
    ) -> Result<()> {
        self.usage.clear_not_grown(record.uuid);
        let refused = match self.grow_mounted(spec.device, spec.target, spec.fs) {
            Ok(()) => return Ok(()),
            Err(error) if spec.fs == FsType::Ext4 && is_refusal(&error) => error,
            Err(error) => return self.usage.record_not_grown(pool, record, &error),
        };
        match self.can_unmount(pool, record, spec) {
            Ok(true) => {}
            Ok(false) => return self.usage.record_not_grown(pool, record, &refused),
            Err(error) => return self.usage.record_not_grown(pool, record, &error),
        }
        if let Err(error) = self.usage.unmount(spec.target) {
            match self
                .usage
                .mount_at(spec.target)
                .map_err(Error::into_indeterminate)?
            {
                Some(_) => return self.usage.record_not_grown(pool, record, &error),
                None => {
                    tracing::warn!(error = %chain(&error), "unmounted a file system, but the kernel reported an error");
                }
            }
        }
        if let Err(error) = self.grow_unmounted(pool, record, spec.device) {
            self.usage.record_not_grown(pool, record, &error)?;
        }
        // The volume may have been staged before this call, so the caller must still unstage it.
        self.mount_sound(pool, record, spec)
            .map_err(|first| match first {
                first @ Error::Host { .. } => Error::RollbackFailed {
                    first: Box::new(first),
                    undo: "it is no longer mounted".into(),
                },
                other => other,
            })
    }

    /// Whether a stage may be unmounted for a moment: no other mount shows the volume, and the
    /// unmounted file system can be grown.
    fn can_unmount(
        &self,
        pool: &Pool,
        record: &VolumeRecord,
        spec: &MountSpec<'_>,
    ) -> Result<bool> {
        let is_sole = self.usage.view(pool, record)?.uses().len() == 1;
        let doing = || format!("read the size of volume {}", record.uuid);
        Ok(is_sole && self.host.can_grow_unmounted(spec.device).context(doing)?)
    }

    /// Grows a mounted file system that is smaller than its device.
    pub(in crate::operation) fn grow_mounted(
        &self,
        device: &Device,
        mount_point: &Path,
        fs: FsType,
    ) -> Result<()> {
        let doing = || format!("grow {fs} at {}", mount_point.display());
        let wanted = self.host.should_grow(device, mount_point, fs);
        if wanted.context(doing)? {
            let effect = Effect::GrowFs {
                device,
                mount_point,
                fs,
            };
            self.host.perform(&effect).context(doing)?;
        }
        Ok(())
    }

    /// Runs resize2fs on a file system that e2fsck has just found to be sound. A mark in the record
    /// is written before: if resize2fs or this process is killed, the next stage repairs the file
    /// system because of the mark. No check would do so without it.
    fn grow_unmounted(
        &self,
        pool: &Pool,
        record: &mut VolumeRecord,
        device: &Device,
    ) -> Result<()> {
        let uuid = record.uuid;
        let doing = || format!("grow the unmounted ext4 of volume {uuid}");
        let check = Effect::CheckFs {
            device,
            fs: FsType::Ext4,
            how: Check::Whole,
        };
        self.wait_for_release(device)?;
        self.host.perform(&check).context(doing)?;
        let marked = self.mark_growing(pool, record, true);
        let grown = marked.and_then(|()| {
            self.host
                .perform(&Effect::GrowUnmounted { device })
                .map(drop)
                .context(doing)
        });
        if grown.is_ok() || record.formatted.as_ref().is_some_and(|it| !it.growing) {
            self.unmark(pool, record);
        }
        grown
    }

    /// Waits until no other mount namespace holds the file system that was just unmounted. If it
    /// stays claimed, e2fsck refuses to check it.
    fn wait_for_release(&self, device: &Device) -> Result<()> {
        for _ in 0..RELEASE_TRIES {
            if !self.usage.is_claimed(device)? {
                break;
            }
            self.host.pause(RELEASE_WAIT);
        }
        Ok(())
    }

    /// Ends a growth that was interrupted: e2fsck repairs all errors, since the file system was
    /// sound before. If that fails, the mark stays.
    fn repair_growth(
        &self,
        pool: &Pool,
        record: &mut VolumeRecord,
        device: &Device,
        fs: FsType,
    ) -> Result<()> {
        tracing::warn!(volume = %record.uuid, "repairing a file system whose growth was interrupted before mounting it");
        self.repair(pool, record, device, fs, Check::Repair)?;
        self.unmark(pool, record);
        Ok(())
    }
}

/// Whether the kernel does not grow this file system while it is mounted, now or ever.
pub(in crate::operation) fn is_refusal(error: &Error) -> bool {
    let code = match error {
        Error::Host { source, .. } => HostError::code(source),
        _ => None,
    };
    matches!(code, Some(Errno::EPERM | Errno::EOPNOTSUPP))
}

#[cfg(test)]
mod tests;
