//! A volume that was used as a raw device, and is then staged to be mounted: a backup program
//! restores a file system in this way, through the device. The volume is never formatted.

use uuid::Uuid;

use crate::backend::{AttachMode, Image};
use crate::error::{Error, ErrorContext, Result};
use crate::host::Signature;
use crate::model::FsType;
use crate::operation::{Pool, Volumes};
use crate::record::{Formatted, VolumeRecord};

impl Volumes {
    /// Adopts the file system on a raw volume, if it is exactly one complete file system of the
    /// requested type and the volume is not in use. The content comes from the user: each mount has
    /// the options of [`crate::operation::snapshot::restore::copy_options`], which keep it from
    /// harming others. A crash leaves the volume raw, or with the adopted file system.
    pub(in crate::operation) fn adopt_raw_fs(
        &self,
        pool: &Pool,
        record: &mut VolumeRecord,
        fs: FsType,
    ) -> Result<()> {
        let refuse =
            |reason: String| Err(Error::refused(format!("volume {}", record.uuid), reason));
        if let Some(path) = self
            .usage
            .staged_as_block(record)
            .map_err(Error::into_indeterminate)?
        {
            return refuse(format!(
                "it is staged as a raw block device at {path}; unstage it there first"
            ));
        }
        let view = self
            .usage
            .view(pool, record)
            .map_err(Error::into_indeterminate)?;
        if let Some(mount) = view.uses().first() {
            let at = mount.mount_point.display();
            return refuse(format!(
                "it is published as a raw block device at {at}; unpublish it there first"
            ));
        }
        let mode = AttachMode {
            read_only: false,
            lasting: false,
        };
        let attached = pool.backend.devices().attach(record, mode)?;
        let device = &attached.device;
        self.usage.refuse_claimed(record.uuid, device)?;
        let doing = || format!("probe volume {}", record.uuid);
        let signature = self.host.signature(device).context(doing)?;
        let bytes = self.host.device_bytes(device).context(doing)?;
        let uuid = match whole(&signature, fs, bytes) {
            Ok(uuid) => uuid,
            Err(found) => {
                return refuse(format!(
                    "it was used as a raw block device, and {found}; it can be mounted only if its content is exactly one complete {fs}; the driver does not format it"
                ));
            }
        };
        self.check_unclean(pool, record, device, fs)?;
        let uuid = match fs {
            FsType::Ext4 | FsType::Xfs => uuid,
            FsType::Btrfs => {
                // The fsid could be that of another volume, and the kernel cannot mount two file
                // systems with the same fsid.
                drop(attached);
                self.renew_found(pool, record)?
            }
        };
        record.formatted = Some(Formatted {
            found: true,
            ..Formatted::complete(fs.into(), uuid)
        });
        pool.backend.update(record)
    }

    /// Gives a btrfs a new fsid, once its device is detached.
    fn renew_found(&self, pool: &Pool, record: &VolumeRecord) -> Result<Uuid> {
        self.usage.free_devices(pool, record.uuid, &[])?;
        if let Some(device) = self.usage.lingering(pool, record.uuid)? {
            return Err(Error::Busy {
                subject: format!("volume {}", record.uuid),
                holder: format!("a process has {} open", device.path.display()),
            });
        }
        let uuid = self.host.random_uuid();
        pool.backend.renew_fs_id(Image::Volume(record.uuid), uuid)?;
        Ok(uuid)
    }
}

/// The UUID of the only file system on a device, or a description of what is there instead.
fn whole(signature: &Signature, fs: FsType, bytes: u64) -> std::result::Result<Uuid, String> {
    match signature {
        Signature::None => Err("no known file system was found on it".into()),
        Signature::Other(what) => Err(format!("{what} was found on it")),
        Signature::Fs { name, .. } if name != fs.name() => {
            Err(format!("{name} was found on it instead of {fs}"))
        }
        Signature::Fs {
            beside: Some(what), ..
        } => Err(format!("{what} was found on it in addition to {fs}")),
        Signature::Fs {
            size: Some(size),
            uuid,
            ..
        } if *size <= bytes => Ok(uuid.parse().unwrap_or_default()),
        Signature::Fs { size, .. } => Err(format!(
            "the {fs} on it has {} bytes, but the volume has {bytes}",
            size.map_or("an unknown number of".into(), |size| size.to_string())
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_whole_file_system_of_the_kind_asked_for_is_taken() {
        let found = |name: &str, size, beside: Option<&str>| Signature::Fs {
            name: name.into(),
            uuid: Uuid::max().to_string(),
            size,
            beside: beside.map(str::to_string),
        };
        let take = |signature: &Signature| whole(signature, FsType::Ext4, 1000);
        assert_eq!(take(&found("ext4", Some(1000), None)), Ok(Uuid::max()));
        for other in [
            Signature::None,
            Signature::Other("partition table gpt".into()),
            found("xfs", Some(10), None),
            found("ext3", Some(10), None),
            found("ext4", Some(1001), None),
            found("ext4", None, None),
            found("ext4", Some(10), Some("partition table dos")),
        ] {
            assert!(take(&other).is_err(), "{other:?}");
        }
    }
}
