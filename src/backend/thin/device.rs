//! Mapped devices of thin devices. An existing device is used again, or the call returns a retryable
//! error.

use std::collections::BTreeMap;
use std::sync::{MutexGuard, PoisonError};

use nix::errno::Errno;
use uuid::Uuid;

use super::{DEVICE_PREFIX, ThinImage, ThinStore, check_identity, missing_error};
use crate::backend::mapped::{
    clear_unused_table, object_of_device, suspended_by_others, suspended_error,
};
use crate::backend::store::{Devices, FindPublished, Watched};
use crate::backend::{AttachMode, Attached, FoundDevice, Image};
use crate::error::{Error, ErrorContext, HostError, Result, chain};
use crate::host::mapper::FILLING_SUFFIX;
use crate::host::{self, Device, DeviceHold, Effect, MappedDevice, ThinTable, mapped_path};
use crate::model::Allocation;
use crate::model::size::image_bytes;
use crate::record::VolumeRecord;

/// How a device is created to copy its image.
const FOR_A_COPY: AttachMode = AttachMode {
    read_only: false,
    lasting: false,
};

impl ThinStore {
    pub(super) fn mapped(&self) -> host::Result<Vec<MappedDevice>> {
        self.host.mapped_devices(&self.pool, &self.prefix)
    }

    /// The two devices of a volume or snapshot, and all foreign ones.
    fn mapped_of(&self, uuid: Uuid) -> host::Result<Vec<MappedDevice>> {
        let (own, second) = (self.device_uuid(uuid), self.second_uuid(uuid));
        let own = [own.as_str(), second.as_str()];
        let pool = (self.pool.as_str(), self.rdev);
        self.host.mapped_devices_of(pool, &self.prefix, &own)
    }

    /// The UUID of the device through which the blocks of a thick volume are written.
    fn second_uuid(&self, uuid: Uuid) -> String {
        self.device_uuid(uuid) + FILLING_SUFFIX
    }

    /// Removes both devices of a volume or snapshot.
    pub(super) fn remove_devices(&self, uuid: Uuid) -> host::Result<()> {
        let mut found = self.mapped_of(uuid)?;
        found.retain(|device| device.uuid.starts_with(&self.prefix));
        let mut each = found.iter();
        each.try_for_each(|MappedDevice { uuid, .. }| self.perform(Effect::RemoveMapped { uuid }))
    }

    /// Removes the own device among these if a crash or an error has left it without a table. The
    /// caller has locked `activating`, so no other call is creating the device.
    fn remove_unfinished(&self, mut found: Vec<MappedDevice>) -> Result<Vec<MappedDevice>> {
        if let Some(at) = found.iter().position(|device| device.table.is_none()) {
            let MappedDevice { uuid, .. } = &found.remove(at);
            let removed = self.remove_mapped(uuid);
            removed.map_err(Error::into_indeterminate)?;
        }
        Ok(found)
    }

    fn remove_mapped(&self, uuid: &str) -> Result<()> {
        let removed = self.perform(Effect::RemoveMapped { uuid });
        removed.context(|| format!("remove {}", mapped_path(uuid).display()))
    }

    /// Creates a device of an image and opens it. Unless it is to be `lasting`, the kernel removes
    /// it when the last process or mount closes it. On an error no device is left, or the error is
    /// [`Error::RollbackFailed`].
    fn activate(&self, uuid: &str, image: ThinImage, mode: AttachMode) -> Result<DeviceHold> {
        let create = || {
            self.perform(Effect::CreateMapped { uuid })?;
            self.load(uuid, image, mode.read_only)?;
            let hold = self.hold_own(uuid)?;
            if !mode.lasting {
                self.perform(Effect::RemoveMapped { uuid })?;
            }
            Ok(hold)
        };
        let created = create().context(|| format!("create {}", mapped_path(uuid).display()));
        created.map_err(|first| first.with_undo(self.remove_mapped(uuid)))
    }

    /// Gives a device the table for this size of its image.
    fn load(&self, uuid: &str, image: ThinImage, read_only: bool) -> host::Result<()> {
        let table = &ThinTable {
            pool: self.pool.clone(),
            id: image.id,
            bytes: image_bytes(image.size),
        };
        check_identity(self.host.as_ref(), &self.pool, self.rdev)?;
        let load = Effect::LoadTable {
            uuid,
            table,
            read_only,
        };
        self.tables.switch(self.host.as_ref(), uuid, &load)
    }

    /// Refuses a device that another program has created on the thin device of an image.
    fn refuse_foreign(&self, uuid: Uuid, found: &MappedDevice) -> Result<()> {
        match found.uuid == self.device_uuid(uuid) {
            true => Ok(()),
            false => Err(busy(uuid, foreign(found))),
        }
    }

    fn refuse_changed(&self, uuid: Uuid, found: &MappedDevice) -> Result<()> {
        let changed = self.tables.changed_by_others(self.host.as_ref(), found);
        let changed = changed.context(|| format!("examine {}", found.device.path.display()))?;
        changed.map_or(Ok(()), |holder| Err(busy(uuid, holder)))
    }

    /// Gives the device of an image the table for its present size.
    fn reload(&self, uuid: Uuid, found: &MappedDevice, image: ThinImage) -> Result<()> {
        self.refuse_changed(uuid, found)?;
        let loaded = self.load(&self.device_uuid(uuid), image, found.read_only);
        loaded.context(|| format!("resize {} of volume {uuid}", found.device.path.display()))?;
        self.keep_blocks(image, &found.device)
    }

    /// Disables discards on the device of a thick volume: mkfs and fstrim would free its blocks. Each
    /// table that is loaded enables them.
    fn keep_blocks(&self, image: ThinImage, device: &Device) -> Result<()> {
        if image.allocation == Allocation::Thin {
            return Ok(());
        }
        let disabled = self.perform(Effect::DisableDiscard { device });
        disabled.context(|| format!("disable discard on the device of volume {}", image.uuid))
    }

    /// Opens the device of an image that was just found. One that a copy has created is removed when its
    /// last user, which may be udev, closes it; then there is none any more.
    fn hold_or_activate(&self, image: ThinImage, mode: AttachMode) -> Result<DeviceHold> {
        let own = &self.device_uuid(image.uuid);
        let held = self.host.hold_mapped(own);
        match held.context(|| format!("open thin device {}", image.id))? {
            Some(held) => Ok(held),
            None => self.activate(own, image, mode),
        }
    }

    fn hold_own(&self, uuid: &str) -> host::Result<DeviceHold> {
        let gone = || HostError::errno("open", host::mapped_path(uuid), Errno::EBUSY);
        self.host.hold_mapped(uuid)?.ok_or_else(gone)
    }

    /// Opens the device of an image for a copy. A device that is created for this is removed when
    /// the result is dropped.
    pub(super) fn open_device(&self, image: ThinImage) -> Result<DeviceHold> {
        let _alone = self.activating();
        let own = &self.device_uuid(image.uuid);
        let found = self.devices_of(image.uuid, Some(image.id))?;
        let found = self.remove_unfinished(found)?;
        if found.is_empty() {
            return self.activate(own, image, FOR_A_COPY);
        }
        if !found.iter().any(|found| found.uuid == *own) {
            return Err(busy(image.uuid, foreign(&found[0])));
        }
        if let Some(found) = found.iter().find(|found| found.suspended) {
            // Reads would wait. The guard suspends a device for milliseconds only.
            return Err(busy(image.uuid, suspended_by_others(&found.uuid)));
        }
        self.hold_or_activate(image, FOR_A_COPY)
    }

    /// Opens a second device of an image, which has the size in `image`, whatever that of the first
    /// one is. It is removed when the result is dropped. dm-thin locks blocks for the whole pool, so
    /// both devices may be written at the same time.
    pub(super) fn open_second(&self, image: ThinImage) -> Result<DeviceHold> {
        let _alone = self.activating();
        let second = &self.second_uuid(image.uuid);
        let mapped = self.mapped_of(image.uuid);
        let mut found = mapped.context(|| format!("find the devices of {}", image.uuid))?;
        found.retain(|device| device.uuid == *second);
        if !found.is_empty() {
            // A crash or an error has left it.
            let removed = self.remove_mapped(second);
            removed.map_err(Error::into_indeterminate)?;
        }
        self.activate(second, image, FOR_A_COPY)
    }

    /// The bytes of an image that its first device shows; 0 without one.
    pub(super) fn shown_bytes(&self, image: ThinImage) -> Result<u64> {
        let found = self.devices_of(image.uuid, Some(image.id))?;
        let bytes = found.iter().filter_map(|device| device.table.as_ref());
        Ok(bytes.map(|table| table.bytes).max().unwrap_or(0))
    }

    fn activating(&self) -> MutexGuard<'_, ()> {
        let locked = self.activating.lock();
        locked.unwrap_or_else(PoisonError::into_inner)
    }

    /// Uses the only device on a thin device.
    fn reuse(
        &self,
        uuid: Uuid,
        found: &MappedDevice,
        image: ThinImage,
        mode: AttachMode,
    ) -> Result<DeviceHold> {
        let name = found.device.path.display();
        if found.read_only != mode.read_only {
            let how = match found.read_only {
                true => "read-only",
                false => "for writing",
            };
            return Err(Error::refused(
                format!("volume {uuid}"),
                format!("{name} has its thin device open {how}"),
            ));
        }
        if mode.lasting && found.deferred_remove {
            let holder = format!("{name} is open and is removed when it is closed");
            return Err(busy(uuid, holder));
        }
        self.refuse_changed(uuid, found)?;
        let bytes = found.table.as_ref().map_or(0, |table| table.bytes);
        if bytes < image_bytes(image.size) {
            self.reload(uuid, found, image)?;
        }
        self.hold_or_activate(image, mode)
    }

    /// Removes devices that are not in use, and drops tables that a crash has left unused. The guard
    /// has already resumed what it had suspended, so a device that is suspended was suspended by
    /// another program: it is left as it is.
    pub(super) fn remove_idle(
        &self,
        images: &[Image],
        in_use: &dyn Fn(&Device) -> bool,
    ) -> Result<Vec<(Device, Result<()>)>> {
        let doing = || "list the devices of the pool's images".to_string();
        let mut found = self.mapped().context(doing)?;
        let both = images.iter().flat_map(|image| {
            let uuid = image.uuid();
            [self.device_uuid(uuid), self.second_uuid(uuid)].map(|device| (device, *image))
        });
        let own: BTreeMap<String, Image> = both.collect();
        for foreign in found
            .iter()
            .filter(|it| !it.uuid.starts_with(DEVICE_PREFIX))
        {
            let (device, uuid) = (foreign.device.path.display(), &foreign.uuid);
            let id = foreign.table.as_ref().and_then(ThinTable::known_id);
            tracing::error!(%device, uuid, id, "another program has mapped a thin device of this pool, whose volume cannot be attached until that device is removed");
        }
        found.retain(|device| own.contains_key(&device.uuid));
        let mut removed = Vec::new();
        for found in found {
            let uuid = &found.uuid;
            if found.suspended {
                let error = suspended_error(&found);
                removed.push((found.device, Err(error)));
                continue;
            }
            clear_unused_table(&*self.host, &found)?;
            let device = found.device;
            if in_use(&device) || self.host.is_claimed(&device).context(doing)? {
                // A crash may have come between a new table and this.
                if let Err(error) = self.keep_blocks_of(own.get(uuid), &device) {
                    tracing::error!(%uuid, error = %chain(&error), "failed to disable discard on the device of a thick volume");
                }
            } else {
                removed.push((device, self.remove_mapped(uuid)));
            }
        }
        Ok(removed)
    }

    /// Disables discards on the device of an image, if its record says that it is thick.
    fn keep_blocks_of(&self, image: Option<&Image>, device: &Device) -> Result<()> {
        let found = image.map(|image| self.find_image(*image)).transpose();
        let found = found.context(|| format!("read the record of {}", device.path.display()))?;
        let image = found.flatten();
        image.map_or(Ok(()), |image| self.keep_blocks(image, device))
    }

    /// The own device of a volume or snapshot, and foreign devices on its thin device. Without its ID,
    /// which is in the record, foreign devices are found only next to its own one, or if the record
    /// can be read. Without the second one of a thick volume, which this driver alone uses.
    fn devices_of(&self, uuid: Uuid, id: Option<u32>) -> Result<Vec<MappedDevice>> {
        let (own, second) = (self.device_uuid(uuid), self.second_uuid(uuid));
        let found = self.mapped_of(uuid);
        let mut found = found.context(|| format!("find the devices of {uuid}"))?;
        found.retain(|device| device.uuid != second);
        let id_of = |device: &MappedDevice| device.table.as_ref().and_then(ThinTable::known_id);
        let shown = || found.iter().find(|it| it.uuid == own).and_then(id_of);
        let recorded = || self.find_image(Image::Volume(uuid)).ok().flatten();
        let id = id.or_else(shown);
        let id = id.or_else(|| recorded().map(|image| image.id));
        found.retain(|it| it.uuid == own || (id.is_some() && id_of(it) == id));
        Ok(found)
    }
}

impl Devices for ThinStore {
    fn list(&self, uuid: Uuid) -> Result<Vec<FoundDevice>> {
        let mut found = self.devices_of(uuid, None)?;
        if found.iter().any(|device| device.table.is_none()) {
            let _alone = self.activating();
            found = self.remove_unfinished(self.devices_of(uuid, None)?)?;
        }
        let found = found.into_iter().map(|found| FoundDevice {
            device: found.device,
            whole: found.table.is_some(),
            read_only: found.read_only,
        });
        Ok(found.collect())
    }

    fn attach(&self, record: &VolumeRecord, mode: AttachMode) -> Result<Attached> {
        let uuid = record.uuid;
        let _alone = self.activating();
        let image = ThinImage {
            uuid,
            id: record.image,
            size: record.size,
            allocation: record.allocation,
            ..ThinImage::default()
        };
        let found = self.remove_unfinished(self.devices_of(uuid, Some(image.id))?)?;
        for found in &found {
            self.refuse_foreign(uuid, found)?;
        }
        // A UUID has one device.
        let hold = match found.as_slice() {
            [] => {
                let created = self.activate(&self.device_uuid(uuid), image, mode);
                created.map_err(|error| match &error {
                    Error::Host { source, .. } if source.code() == Some(Errno::ENODATA) => {
                        missing_error(uuid)
                    }
                    _ => error,
                })
            }
            [found, ..] => self.reuse(uuid, found, image, mode),
        }?;
        if let Err(first) = self.keep_blocks(image, &hold.device) {
            drop(hold);
            // Users may have a device that existed before.
            return Err(match found.is_empty() {
                true => first.with_undo(self.remove_mapped(&self.device_uuid(uuid))),
                false => first,
            });
        }
        Ok(Attached {
            device: hold.device.clone(),
            hold,
        })
    }

    fn detach(&self, uuid: Uuid, device: &Device) -> Result<()> {
        let Some(found) = self
            .devices_of(uuid, None)?
            .into_iter()
            .find(|found| found.device == *device)
        else {
            return Ok(());
        };
        self.refuse_foreign(uuid, &found)?;
        self.remove_mapped(&found.uuid)
    }

    /// The kernel does not let a user of a device without privileges change it.
    fn watch(&self, _: Uuid, _: Attached) -> Result<Option<Watched>> {
        Ok(None)
    }

    fn find_published(&self, _: &[u64]) -> Option<FindPublished<'_>> {
        None
    }

    /// Without devices that exist for a copy only.
    fn count_without_loops(&self) -> Result<usize> {
        let mapped = self.mapped();
        let mapped = mapped.context(|| "list the devices of the pool's images".into())?;
        let is_volume = |found: &&MappedDevice| {
            let is_own = found.uuid.starts_with(&self.prefix);
            is_own && !found.deferred_remove && object_of_device(&found.uuid).is_some()
        };
        Ok(mapped.iter().filter(is_volume).count())
    }

    /// A device that is removed leaves no settings.
    fn released(&self, _: &VolumeRecord, _: &Device) -> Result<()> {
        Ok(())
    }

    fn resize(&self, record: &VolumeRecord, device: &Device) -> Result<()> {
        let uuid = record.uuid;
        let image = self.get_image(Image::Volume(uuid));
        let image = image.context(|| format!("find the thin device of volume {uuid}"))?;
        let mut devices = self.devices_of(uuid, None)?.into_iter();
        let found = devices.find(|found| found.device == *device);
        let found = found.ok_or_else(|| Error::Pending {
            what: format!("{} of volume {uuid}", device.path.display()),
        })?;
        self.refuse_foreign(uuid, &found)?;
        self.reload(uuid, &found, image)
    }
}

/// A device that another program has created on a thin device of the pool.
fn foreign(found: &MappedDevice) -> String {
    let path = found.device.path.display();
    format!("{path}, a device of another program; if no program uses it: dmsetup remove {path}")
}

fn busy(uuid: Uuid, holder: String) -> Error {
    Error::Busy {
        subject: format!("volume {uuid}"),
        holder,
    }
}
