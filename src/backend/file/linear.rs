//! Mapped devices above the loop devices of published raw block volumes.
//!
//! A mapped device can be suspended, so that its volume can join a group; and the kernel forwards no
//! ioctl of loop devices through its table, so that a pod cannot detach or change the loop device.
//!
//! The loop device has the flag autoclear: the kernel detaches it when the table that names it is
//! removed. So one mapped device is all that a crash leaves, with or without a table; the next attach
//! uses or replaces it, and a start removes it if nothing uses it.

use std::path::Path;

use nix::errno::Errno;
use uuid::Uuid;

use super::device::busy;
use super::{FileStore, object_of};
use crate::backend::mapped::{clear_unused_table, suspended_error};
use crate::backend::{AttachMode, Image};
use crate::error::{Error, ErrorContext, HostError, Result};
use crate::host::mapper::UUID_PREFIX;
use crate::host::{
    self, Device, DeviceHold, Effect, FileId, Host, LinearTable, LoopStatus, MappedDevice,
    mapped_path,
};
use crate::record::VolumeRecord;

pub(super) type Linear = MappedDevice<LinearTable>;

/// The UUID of the mapped device of a volume. The UUIDs of volumes depend on their pools, so no two
/// pools have the same.
pub(super) fn device_uuid(volume: Uuid) -> String {
    format!("{UUID_PREFIX}linear-{volume}")
}

/// The UUID of the mapped device that may be above the loop device of this image of a volume.
pub fn mapped_above(image: &Path) -> Option<String> {
    let volume = Uuid::try_parse(object_of(image)?).ok()?;
    Some(device_uuid(volume))
}

/// The mapped device with this UUID, if its table shows this loop device.
pub(super) fn above(host: &dyn Host, uuid: &str, number: u32) -> host::Result<Option<Linear>> {
    let found = host.linear_device(uuid)?;
    Ok(found.filter(|found| shows(found, number)))
}

fn shows(found: &Linear, number: u32) -> bool {
    let table = found.table.as_ref();
    table.is_some_and(|table| table.lower.loop_number() == Some(number))
}

impl FileStore {
    pub(super) fn above(&self, volume: Uuid, found: &LoopStatus) -> Result<Option<Linear>> {
        let found = above(self.host.as_ref(), &device_uuid(volume), found.number);
        found.context(|| format!("find the mapped device of volume {volume}"))
    }

    /// The mapped device of a volume, if it is this device.
    pub(super) fn linear_at(&self, volume: Uuid, device: &Device) -> Result<Option<Linear>> {
        let found = self.host.linear_device(&device_uuid(volume));
        let found = found.context(|| format!("find the mapped device of volume {volume}"))?;
        Ok(found.filter(|found| found.device.rdev == device.rdev))
    }

    /// Whether a volume is to be published with a mapped device.
    pub(super) fn should_use_linear(
        &self,
        record: &VolumeRecord,
        mode: AttachMode,
    ) -> Result<bool> {
        // A smaller image has no place for the two parts of the table.
        let is_possible = |bytes| LinearTable::targets_of(bytes).is_some();
        if !mode.lasting || !record.block_groups || !is_possible(record.size) {
            return Ok(false);
        }
        let has = self.host.has_device_mapper();
        has.context(|| "open the device mapper".into())
    }

    /// Removes the mapped device of a volume that a crash has left without a table in use. One that it
    /// has loaded keeps the loop device attached.
    pub(super) fn remove_unfinished(&self, volume: Uuid) -> Result<()> {
        let uuid = &device_uuid(volume);
        let found = self.host.linear_device(uuid);
        let found = found.context(|| format!("examine {}", mapped_path(uuid).display()))?;
        match found.is_some_and(|found| found.table.is_none()) {
            true => self.remove_linear(volume),
            false => Ok(()),
        }
    }

    /// Attaches a loop device and creates the mapped device above it. On an error neither is left, or
    /// the error is [`Error::RollbackFailed`].
    pub(super) fn new_linear(
        &self,
        record: &VolumeRecord,
        backing: FileId,
        mode: AttachMode,
    ) -> Result<DeviceHold> {
        let lower = AttachMode {
            lasting: false,
            ..mode
        };
        let hold = self.new_loop(record, &self.volume(record.uuid), backing, lower)?;
        let uuid = &device_uuid(record.uuid);
        let create = || {
            self.perform(Effect::CreateMapped { uuid })?;
            self.load_linear(record.uuid, &hold.device(), mode.read_only)?;
            self.hold_linear(record.uuid)
        };
        let created = create().context(|| format!("create {}", mapped_path(uuid).display()));
        created.map_err(|first| first.with_undo(self.remove_linear(record.uuid)))
    }

    /// Uses the mapped device that a volume has.
    pub(super) fn reuse_linear(
        &self,
        record: &VolumeRecord,
        found: &Linear,
        lower: &Device,
        mode: AttachMode,
    ) -> Result<DeviceHold> {
        let volume = record.uuid;
        let name = found.device.path.display();
        if found.read_only != mode.read_only {
            let how = match found.read_only {
                true => "read-only",
                false => "for writing",
            };
            let reason = format!("{name} has its image open {how}");
            return Err(Error::refused(format!("volume {volume}"), reason));
        }
        if mode.lasting && found.deferred_remove {
            let holder = format!("{name} is open and is removed when it is closed");
            return Err(busy(volume, holder));
        }
        self.refuse_changed(volume, found)?;
        let doing = || format!("examine {}", lower.path.display());
        let bytes = self.host.device_bytes(lower).context(doing)?;
        if found.table.as_ref().is_none_or(|table| table.bytes < bytes) {
            self.grow_linear(volume, found, lower)?;
        }
        let held = self.hold_linear(volume);
        held.context(|| format!("open {name}"))
    }

    /// Gives a mapped device the present length of the loop device below it.
    pub(super) fn grow_linear(&self, volume: Uuid, found: &Linear, lower: &Device) -> Result<()> {
        self.refuse_changed(volume, found)?;
        let loaded = self.load_linear(volume, lower, found.read_only);
        loaded.context(|| format!("resize {} of volume {volume}", found.device.path.display()))
    }

    fn load_linear(&self, volume: Uuid, lower: &Device, read_only: bool) -> host::Result<()> {
        let uuid = &device_uuid(volume);
        let table = &LinearTable {
            lower: lower.clone(),
            bytes: self.host.device_bytes(lower)?,
        };
        let load = Effect::LoadLinear {
            uuid,
            table,
            read_only,
        };
        self.tables.switch(self.host.as_ref(), uuid, &load)
    }

    fn refuse_changed(&self, volume: Uuid, found: &Linear) -> Result<()> {
        let changed = self.tables.changed_by_others(self.host.as_ref(), found);
        let changed = changed.context(|| format!("examine {}", found.device.path.display()))?;
        changed.map_or(Ok(()), |holder| Err(busy(volume, holder)))
    }

    fn hold_linear(&self, volume: Uuid) -> host::Result<DeviceHold> {
        let uuid = device_uuid(volume);
        let held = self.host.hold_mapped(&uuid)?;
        held.ok_or_else(|| HostError::errno("open", mapped_path(&uuid), Errno::EBUSY))
    }

    /// Removes the mapped device of a volume, and with it the loop device. While it is open, the
    /// kernel keeps both.
    pub(super) fn remove_linear(&self, volume: Uuid) -> Result<()> {
        let uuid = &device_uuid(volume);
        let removed = self.perform(Effect::RemoveMapped { uuid });
        removed.context(|| format!("remove {}", mapped_path(uuid).display()))
    }

    /// Removes the mapped devices of images that are not in use, and drops tables that a crash has
    /// left unused. The guard has already resumed what it had suspended, so a device that is suspended
    /// was suspended by another program: it is left as it is.
    pub(super) fn remove_idle_linear(
        &self,
        images: &[Image],
        in_use: &dyn Fn(&Device) -> bool,
    ) -> Result<Vec<(Device, Result<()>)>> {
        let mut removed = Vec::new();
        for image in images {
            let Image::Volume(volume) = *image else {
                continue;
            };
            let uuid = &device_uuid(volume);
            let doing = || format!("examine {}", mapped_path(uuid).display());
            let Some(found) = self.host.linear_device(uuid).context(doing)? else {
                continue;
            };
            if found.suspended && found.table.is_some() {
                let error = suspended_error(&found);
                removed.push((found.device, Err(error)));
                continue;
            }
            clear_unused_table(&*self.host, &found)?;
            let device = found.device;
            if !in_use(&device) && !self.host.is_claimed(&device).context(doing)? {
                removed.push((device, self.remove_linear(volume)));
            }
        }
        Ok(removed)
    }
}
