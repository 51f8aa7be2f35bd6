//! ControllerExpandVolume grows the image; NodeExpandVolume grows the device and the file system.

use std::path::Path;

use super::capability::for_its_readers;
use super::fit::is_refusal;
use crate::backend::file::count_devices_on;
use crate::error::{Error, Result, chain};
use crate::host::Mount;
use crate::model::{Capability, CapacityRange};
use crate::operation::lock::Key;
use crate::operation::usage::view::View;
use crate::operation::{ExpandVolume, Expanded, NodeExpandVolume, Volumes, usage};
use crate::record::VolumeRecord;

impl Volumes {
    /// ControllerExpandVolume. Growth beyond the free space is OUT_OF_RANGE, so that the claim can
    /// be lowered again. A crash leaves the image longer than its record says; a retry completes
    /// the growth.
    pub fn expand_volume(&self, request: &ExpandVolume) -> Result<Expanded> {
        let (pool, id, _) = self.pools.get_volume(&request.volume_id)?;
        let lock = self.pools.locks.acquire(Key::Volume(id.uuid))?;
        let (_, _, record) = self.pools.get_volume(&request.volume_id)?;
        fits(&record, request.capability.as_ref())?;
        let wanted = request.capacity.required.max(record.size);
        if !request.capacity.admits(wanted) {
            return Err(Error::OutOfRange {
                field: "capacity_range.limit_bytes".into(),
                problem: format!(
                    "{} is below the volume's size of {} bytes; volumes cannot shrink",
                    request.capacity.limit, record.size
                ),
            });
        }
        if wanted > record.size {
            lock.describe(format!("its growth to {wanted} bytes"));
            self.snapshots.grow(&pool, &record, wanted)?;
        }
        Ok(Expanded {
            size: wanted,
            node_expansion_required: true,
        })
    }

    /// NodeExpandVolume: resizes the device to the image, and a mounted file system to its device.
    /// It always grows to the size that the controller has granted, even if the request asks for
    /// less.
    pub fn expand_node(&self, request: &NodeExpandVolume) -> Result<u64> {
        let (pool, id, _) = self.pools.get_volume(&request.volume_id)?;
        if request.volume_path.is_empty() {
            return Err(Error::invalid(
                "volume_path",
                "is missing; give the staging or target path",
            ));
        }
        let _lock = self.pools.locks.acquire(Key::Volume(id.uuid))?;
        let (_, _, record) = self.pools.get_volume(&request.volume_id)?;
        let path = self.usage.csi_path("volume_path", &request.volume_path)?;
        fits(&record, request.capability.as_ref())?;
        self.granted(&record, request.capacity)?;
        let view = self.usage.view(&pool, &record)?;
        let here = self.usage.table_path(&path)?;
        let staged_block = self
            .usage
            .staged_as_block(&record)?
            .is_some_and(|staged| staged == request.volume_path);
        let mount = match usage::at(&view.mounts, &here).last().copied() {
            Some(mount) if view.device_of(mount).is_some() => mount,
            Some(_) | None if staged_block => return self.resize_all(&pool, &record, &view),
            Some(_) | None => {
                return Err(Error::NotFound {
                    kind: crate::error::Kind::Volume,
                    id: format!("{} at {}", request.volume_id, request.volume_path),
                });
            }
        };
        self.resize_all(&pool, &record, &view)?;
        // A target may be read-only although the stage is not, so the file system is grown through
        // any writable mount of the volume.
        let writable = std::iter::once(mount)
            .chain(view.uses())
            .find(|mount| !mount.is_read_only() && mount.root == Path::new("/"));
        if !usage::is_node(mount) {
            self.grow_fs(&pool, &record, writable, &path)?;
            self.usage.clear_not_grown(record.uuid);
        }
        Ok(record.size)
    }

    fn resize_all(
        &self,
        pool: &crate::operation::Pool,
        record: &VolumeRecord,
        view: &View,
    ) -> Result<u64> {
        for found in &view.devices {
            pool.backend.devices().resize(record, &found.device)?;
        }
        Ok(record.size)
    }

    /// Grows the file system through a writable mount. A volume without a file system is unchanged.
    fn grow_fs(
        &self,
        pool: &crate::operation::Pool,
        record: &VolumeRecord,
        writable: Option<&Mount>,
        path: &Path,
    ) -> Result<()> {
        let Some(fs) = record
            .formatted
            .as_ref()
            .and_then(|formatted| formatted.kind.fs())
        else {
            return Ok(());
        };
        let Some(writable) = writable else {
            return Err(Error::refused(
                path.display(),
                "the volume is only mounted read-only, so its file system cannot grow; stage it read-write",
            ));
        };
        let attached = pool.backend.devices().attach(
            record,
            crate::backend::AttachMode {
                read_only: false,
                lasting: false,
            },
        )?;
        self.grow_mounted(&attached.device, &writable.mount_point, fs)
            .map_err(|error| not_grown(record, &error))
    }

    /// Refuses a size that the controller has not granted.
    fn granted(&self, record: &VolumeRecord, capacity: Option<CapacityRange>) -> Result<()> {
        match capacity {
            Some(capacity) if capacity.required > record.size => Err(Error::OutOfRange {
                field: "capacity_range.required_bytes".into(),
                problem: format!(
                    "{} is more than the volume's {} bytes; call ControllerExpandVolume first",
                    capacity.required, record.size
                ),
            }),
            Some(capacity) if capacity.limit != 0 && capacity.limit < record.size => {
                Err(Error::OutOfRange {
                    field: "capacity_range.limit_bytes".into(),
                    problem: format!(
                        "{} is below the volume's size of {} bytes; volumes cannot shrink",
                        capacity.limit, record.size
                    ),
                })
            }
            Some(_) | None => Ok(()),
        }
    }

    /// The number of devices on images of the pools that are served; for metrics.
    pub fn attached_devices(&self) -> Result<usize> {
        let pools = self.pools.serving();
        let file_systems: Vec<u64> = pools.iter().map(|pool| pool.device).collect();
        count_devices_on(self.host.as_ref(), &file_systems)
    }
}

/// The code is FAILED_PRECONDITION: with any other code the kubelet does not mount the volume at
/// all.
fn not_grown(record: &VolumeRecord, error: &Error) -> Error {
    let then = if is_refusal(error) {
        "the kernel cannot grow it while it is mounted; it is grown the next time the volume is staged, so delete the pods that use it"
    } else {
        "it is usable at its current size; the next staging tries again"
    };
    let reason = format!("its file system was not grown ({}): {then}", chain(error));
    Error::refused(format!("volume {}", record.uuid), reason)
}

/// Refuses a capability that does not match the volume.
fn fits(record: &VolumeRecord, capability: Option<&Capability>) -> Result<()> {
    let Some(capability) = capability else {
        return Ok(());
    };
    for_its_readers(record, capability)?;
    let Some(formatted) = &record.formatted else {
        return Ok(());
    };
    let is_block = capability.access_type.fs().is_none();
    if is_block == (formatted.kind == crate::record::FormattedAs::Raw) {
        return Ok(());
    }
    Err(Error::invalid(
        "volume_capability",
        format!(
            "access type {} does not match a volume that is used as {}",
            capability.access_type.as_str(),
            formatted.kind.as_str()
        ),
    ))
}
