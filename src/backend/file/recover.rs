//! Cleanup after a crash: incomplete volumes and snapshots, trash, and loop devices that are not in
//! use.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::path::Path;

use uuid::Uuid;

use super::{FileBackend, IMAGE, TRASH};
use crate::backend::{Image, Leftover, Leftovers};
use crate::error::{ErrorContext, Result, chain};
use crate::host::{Device, Effect, FileId};
use crate::model::Wipe;

impl FileBackend {
    /// Runs before the first call is served. A loop device that cannot be detached is logged and
    /// does not delay the others. The other leftovers may take as long to clean up as a large disk
    /// takes to overwrite, so they are only counted here, and are cleaned up while the pool is
    /// served (`Driver::clean`, `Driver::wipe`).
    pub(super) fn free_loops(&self, in_use: &dyn Fn(&Device) -> bool) -> Result<Leftovers> {
        let mut found = Leftovers::default();
        let pool = &self.pool.name;
        for number in self.idle_loops(in_use)? {
            match self.free_loop(number) {
                (device, Ok(())) => {
                    found.loops += 1;
                    tracing::info!(%pool, device, "detached an unused loop device");
                }
                (device, Err(error)) => {
                    tracing::error!(%pool, device, error = %chain(&error), "failed to detach an unused loop device");
                }
            }
        }
        for leftover in self.find_leftovers()? {
            *match &leftover {
                Leftover::Copy(_) => continue,
                Leftover::Volume(_) => &mut found.half_made,
                Leftover::Snapshot(_) => &mut found.snapshots,
                Leftover::Trash { .. } => &mut found.trash,
            } += 1;
        }
        Ok(found)
    }

    /// What failed or interrupted calls may have left. A name in the trash that is not that of a
    /// volume or snapshot was not put there by this driver.
    pub(super) fn find_leftovers(&self) -> Result<Vec<Leftover>> {
        let volumes = self.volumes.abandoned()?.into_iter().map(Leftover::Volume);
        let snapshots = self.snapshots.abandoned()?;
        let snapshots = snapshots.into_iter().map(Leftover::Snapshot);
        let trash = self.folder.list(TRASH)?.into_iter().filter_map(|name| {
            let uuid = Uuid::try_parse(name.split('.').next()?).ok()?;
            Some(Leftover::Trash { uuid, name })
        });
        let of_volumes = self.volumes.begun_copies().into_iter().map(Image::Volume);
        let of_snapshots = self.snapshots.begun_copies().into_iter();
        let copies = of_volumes.chain(of_snapshots.map(Image::Snapshot));
        let copies = copies.map(Leftover::Copy);
        Ok(volumes
            .chain(snapshots)
            .chain(trash)
            .chain(copies)
            .collect())
    }

    /// Cleans up a leftover, if it still exists and still is one.
    pub(super) fn clean_up_leftover(&self, leftover: &Leftover) -> Result<bool> {
        match leftover {
            Leftover::Volume(uuid) => self.volumes.delete_abandoned(*uuid),
            Leftover::Snapshot(uuid) => self.snapshots.delete_abandoned(*uuid),
            Leftover::Copy(Image::Volume(uuid)) => self.volumes.delete_begun_copy(*uuid),
            Leftover::Copy(Image::Snapshot(uuid)) => self.snapshots.delete_begun_copy(*uuid),
            Leftover::Trash { name, .. } => {
                if !self.folder.list(TRASH)?.contains(name) {
                    return Ok(false);
                }
                self.folder.sync_all()?;
                self.folder.empty_trash(name).map(|()| true)
            }
        }
    }

    /// Whether the cleanup of a leftover overwrites blocks. A record that cannot be read now counts
    /// as one that does not require it.
    pub(super) fn asks_for_wipe(&self, leftover: &Leftover) -> bool {
        let dir = match leftover {
            Leftover::Volume(uuid) | Leftover::Copy(Image::Volume(uuid)) => self.volumes.dir(*uuid),
            Leftover::Snapshot(uuid) | Leftover::Copy(Image::Snapshot(uuid)) => {
                self.snapshots.dir(*uuid)
            }
            Leftover::Trash { name, .. } => self.folder.root.join(TRASH).join(name),
        };
        matches!(self.folder.wipe_of(&dir), Ok(Wipe::Zero))
    }

    /// Loop devices on images of this pool that are neither mounted, bind-mounted nor claimed. A
    /// device whose status cannot be read is kept.
    fn idle_loops(&self, in_use: &dyn Fn(&Device) -> bool) -> Result<Vec<(u32, FileId)>> {
        let doing = || "list the loop devices of the pool's images".to_string();
        let mut images = self.volumes.images()?;
        images.extend(self.snapshots.images()?);
        let folder = |image: &Path| image.parent()?.file_name().map(OsStr::to_os_string);
        let folders: HashSet<_> = images.iter().filter_map(|image| folder(image)).collect();
        let may_be = |name: &Path| {
            name.ends_with(IMAGE) && folder(name).is_some_and(|folder| folders.contains(&folder))
        };
        let host = self.folder.host.as_ref();
        let mut loops = host.loop_devices(&may_be).context(doing)?;
        loops.retain(|device| device.status.is_ok());
        let mut ids = HashSet::new();
        for image in images.iter().filter(|_| !loops.is_empty()) {
            ids.extend(self.folder.stat(image, doing)?.map(|image| image.id));
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

    fn free_loop(&self, (number, backing): (u32, FileId)) -> (String, Result<()>) {
        let name = format!("/dev/loop{number}");
        let result = self
            .folder
            .perform(Effect::DetachLoop { number, backing }, || {
                format!("detach {name}")
            });
        (name, result)
    }
}
