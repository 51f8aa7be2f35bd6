//! Loop devices of images. An image never has two of them: an existing device is used again, or the
//! call returns a retryable error. A loop device is identified by the device and inode number of
//! its backing file, never by a path.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::path::Path;

use uuid::Uuid;

use super::linear::Linear;
use super::{FileStore, IMAGE};
use crate::backend::records::part;
use crate::backend::store::{Devices, FindPublished, Watched};
use crate::backend::{AttachMode, Attached, FoundDevice, Image};
use crate::error::{Error, ErrorContext, Result};
use crate::host::{
    Device, DeviceHold, Effect, FileId, FileStat, LoopHold, LoopSpec, LoopStatus, attach_loop,
};
use crate::model::Allocation;
use crate::model::size::image_bytes;
use crate::record::VolumeRecord;

impl FileStore {
    /// A volume's image and every loop device on it; `None` if there is no image.
    fn loops_on(&self, uuid: Uuid) -> Result<Option<(FileStat, Vec<LoopStatus>)>> {
        let name = Path::new(&uuid.to_string()).join(IMAGE);
        self.host
            .loops_on(&self.volume(uuid), &name)
            .context(|| format!("find the loop devices of volume {uuid}"))
    }

    pub(super) fn new_loop(
        &self,
        record: &VolumeRecord,
        path: &Path,
        backing: FileId,
        mode: AttachMode,
    ) -> Result<LoopHold> {
        let spec = LoopSpec {
            image: path,
            backing,
            block_size: record.block_size,
            autoclear: !mode.lasting,
            read_only: mode.read_only,
        };
        attach_loop(self.host.as_ref(), spec).context(|| format!("attach volume {}", record.uuid))
    }

    /// Uses the only loop device on the image, if it has the settings of a device of this driver.
    fn reuse(
        &self,
        uuid: Uuid,
        found: &LoopStatus,
        image: &FileStat,
        mode: AttachMode,
    ) -> Result<LoopHold> {
        let name = format!("/dev/loop{}", found.number);
        if !is_whole(found) {
            return Err(busy(
                uuid,
                format!("{name} maps only a part of its image; detach it"),
            ));
        }
        if found.read_only != mode.read_only {
            let how = if found.read_only {
                "read-only"
            } else {
                "for writing"
            };
            return Err(Error::refused(
                format!("volume {uuid}"),
                format!(
                    "{name} has its image open {how}; a second loop device on the same image would corrupt it"
                ),
            ));
        }
        if mode.lasting && found.autoclear {
            return Err(busy(
                uuid,
                format!(
                    "{name} is still open from an earlier mount and is detached when it is closed"
                ),
            ));
        }
        let held = self
            .host
            .hold_loop(found.number, image.id)
            .context(|| format!("open {name}"))?;
        let hold = held.ok_or_else(|| Error::Pending {
            what: format!("{name} of volume {uuid}"),
        })?;
        self.catch_up(&hold, &name, image.size)?;
        Ok(hold)
    }

    /// Uses the only loop device on the image, and the mapped device above it.
    fn reuse_both(
        &self,
        record: &VolumeRecord,
        (found, above): (&LoopStatus, &Linear),
        image: &FileStat,
        mode: AttachMode,
    ) -> Result<DeviceHold> {
        // The mapped device keeps the loop device attached.
        let lower = AttachMode {
            lasting: false,
            ..mode
        };
        let lower = self.reuse(record.uuid, found, image, lower)?;
        self.reuse_linear(record, above, &lower.device(), mode)
    }

    /// Disables discards on the device of a thick volume: mkfs, fstrim and lazy initialization would
    /// free its blocks. Each table that a mapped device gets enables them.
    fn keep_blocks(&self, record: &VolumeRecord, device: &Device) -> Result<()> {
        let disabled = self.perform(Effect::DisableDiscard { device });
        disabled.context(|| format!("disable discard on the device of volume {}", record.uuid))
    }

    /// A device that stayed attached after its volume was unstaged keeps the image's size of that
    /// time.
    fn catch_up(&self, hold: &LoopHold, name: &str, size: u64) -> Result<()> {
        let doing = || format!("resize {name} to the size of its image");
        if self.host.device_bytes(&hold.device()).context(doing)? < size {
            let number = hold.number;
            self.perform(Effect::ResizeLoop { number }).context(doing)?;
        }
        Ok(())
    }

    /// The volume's image, and the number of a device if it is attached to that image.
    fn standing(&self, uuid: Uuid, device: &Device) -> Result<Option<(FileId, Option<u32>)>> {
        Ok(self.loops_on(uuid)?.map(|(image, loops)| {
            let mut numbers = loops.iter().map(|found| found.number);
            let number = numbers.find(|number| Device::of_loop(*number) == *device);
            (image.id, number)
        }))
    }

    /// Loop devices on images of this pool that are neither mounted, bind-mounted nor claimed. A
    /// device whose status cannot be read is kept.
    pub(super) fn list_idle(
        &self,
        images: &[Image],
        in_use: &dyn Fn(&Device) -> bool,
    ) -> Result<Vec<(u32, FileId)>> {
        let doing = || "list the loop devices of the pool's images".to_string();
        let images: Vec<_> = images.iter().map(|image| self.image(*image)).collect();
        let folder = |image: &Path| image.parent()?.file_name().map(OsStr::to_os_string);
        let folders: HashSet<_> = images.iter().filter_map(|image| folder(image)).collect();
        let may_be = |name: &Path| {
            name.ends_with(IMAGE) && folder(name).is_some_and(|folder| folders.contains(&folder))
        };
        let host = self.host.as_ref();
        let mut loops = host.loop_devices(&may_be).context(doing)?;
        loops.retain(|device| device.status.is_ok());
        let mut ids = HashSet::new();
        for image in images.iter().filter(|_| !loops.is_empty()) {
            ids.extend(self.host.stat(image).context(doing)?.map(|image| image.id));
        }
        let mut idle = Vec::new();
        for found in loops.into_iter().filter_map(|device| device.status.ok()) {
            let device = Device::of_loop(found.number);
            if ids.contains(&found.backing)
                && !in_use(&device)
                && !host.is_claimed(&device).context(doing)?
            {
                idle.push((found.number, found.backing));
            }
        }
        Ok(idle)
    }
}

impl Devices for FileStore {
    fn list(&self, uuid: Uuid) -> Result<Vec<FoundDevice>> {
        let Some((_, loops)) = self.loops_on(uuid)? else {
            return Ok(Vec::new());
        };
        let found = loops.into_iter().map(|found| {
            let above = self.above(uuid, &found)?;
            Ok(FoundDevice {
                device: above.map_or(Device::of_loop(found.number), |above| above.device),
                whole: is_whole(&found),
                read_only: found.read_only,
            })
        });
        found.collect()
    }

    fn attach(&self, record: &VolumeRecord, mode: AttachMode) -> Result<Attached> {
        let uuid = record.uuid;
        let unfinished = self.remove_unfinished(uuid);
        unfinished.map_err(Error::into_indeterminate)?;
        let path = self.volume(uuid);
        let shown = self.path.join(part(Image::Volume(uuid))).join(IMAGE);
        let Some((image, loops)) = self.loops_on(uuid)? else {
            return Err(Error::Damaged {
                path: shown,
                problem: "the image is missing".into(),
            });
        };
        if image.size < image_bytes(record.size) {
            let problem = format!(
                "the image has {} bytes, the volume {}",
                image.size, record.size
            );
            return Err(Error::Damaged {
                path: shown,
                problem,
            });
        }
        let hold = match loops.as_slice() {
            [] if self.should_use_linear(record, mode)? => {
                self.new_linear(record, image.id, mode)?
            }
            [] => self.new_loop(record, &path, image.id, mode)?.into(),
            [found] => match self.above(uuid, found)? {
                Some(above) => self.reuse_both(record, (found, &above), &image, mode)?,
                None => self.reuse(uuid, found, &image, mode)?.into(),
            },
            several => {
                let names: Vec<_> = several
                    .iter()
                    .map(|found| format!("/dev/loop{}", found.number))
                    .collect();
                return Err(busy(
                    uuid,
                    format!(
                        "{} are attached to its image at the same time; detach all but one",
                        names.join(" and ")
                    ),
                ));
            }
        };
        if record.allocation == Allocation::Thick
            && let Err(error) = self.keep_blocks(record, &hold.device)
        {
            let device = hold.device.clone();
            drop(hold);
            self.detach(uuid, &device)?;
            return Err(error);
        }
        Ok(Attached {
            device: hold.device.clone(),
            hold,
        })
    }

    fn detach(&self, uuid: Uuid, device: &Device) -> Result<()> {
        if self.linear_at(uuid, device)?.is_some() {
            return self.remove_linear(uuid);
        }
        let Some((backing, Some(number))) = self.standing(uuid, device)? else {
            return Ok(());
        };
        let effect = Effect::DetachLoop { number, backing };
        self.perform(effect)
            .context(|| format!("detach {} of volume {uuid}", device.path.display()))
    }

    /// The kernel does not let a user of a mapped device change the loop device below it.
    fn watch(&self, uuid: Uuid, attached: Attached) -> Result<Option<Watched>> {
        match attached.device.loop_number() {
            Some(_) => self.watch_attached(uuid, attached).map(Some),
            None => Ok(None),
        }
    }

    fn find_published(&self, nodes: &[u64]) -> Option<FindPublished<'_>> {
        self.find_published_among(nodes)
    }

    /// Only the loop device of a thick volume has limits to reset. A mapped device that is removed
    /// leaves none.
    fn released(&self, record: &VolumeRecord, device: &Device) -> Result<()> {
        let Some(number) = device
            .loop_number()
            .filter(|_| record.allocation == Allocation::Thick)
        else {
            return Ok(());
        };
        let doing = || format!("reset the limits of {}", device.path.display());
        self.perform(Effect::RecreateLoop { number }).context(doing)
    }

    fn resize(&self, record: &VolumeRecord, device: &Device) -> Result<()> {
        let uuid = record.uuid;
        let Some(found) = self.linear_at(uuid, device)? else {
            return self.resize_loop(uuid, device);
        };
        let lower = found.table.as_ref().map(|table| table.lower.clone());
        let lower = lower.ok_or_else(|| pending(uuid, device))?;
        self.resize_loop(uuid, &lower)?;
        self.grow_linear(uuid, &found, &lower)?;
        match record.allocation {
            Allocation::Thin => Ok(()),
            Allocation::Thick => self.keep_blocks(record, device),
        }
    }
}

impl FileStore {
    fn resize_loop(&self, uuid: Uuid, device: &Device) -> Result<()> {
        let found = self.standing(uuid, device)?;
        let (backing, number) = found.ok_or_else(|| Error::no_volume(uuid))?;
        let pending = || pending(uuid, device);
        let number = number.ok_or_else(pending)?;
        // Keeping it open prevents its number from being attached to another image.
        let held = self.host.hold_loop(number, backing);
        let _held = held
            .context(|| format!("open {}", device.path.display()))?
            .ok_or_else(pending)?;
        self.perform(Effect::ResizeLoop { number })
            .context(|| format!("resize {}", device.path.display()))
    }
}

/// Whether a device maps the image from the first to the last byte.
fn is_whole(found: &LoopStatus) -> bool {
    found.offset == 0 && found.size_limit == 0
}

fn pending(uuid: Uuid, device: &Device) -> Error {
    Error::Pending {
        what: format!("{} of volume {uuid}", device.path.display()),
    }
}

pub(super) fn busy(uuid: Uuid, holder: String) -> Error {
    Error::Busy {
        subject: format!("volume {uuid}"),
        holder,
    }
}
