//! Cleanup after a crash: incomplete volumes and snapshots, trash, and loop devices that are not in
//! use.

use uuid::Uuid;

use super::PoolBackend;
use crate::backend::records::{Entry, TRASH};
use crate::backend::{Image, Leftover, Leftovers};
use crate::error::{Result, chain};
use crate::host::Device;
use crate::model::Wipe;

impl PoolBackend {
    /// Makes renames into the trash durable that a failed delete has left.
    pub fn sync_deleted(&self) -> Result<()> {
        self.folder.sync_deleted()
    }

    /// Detaches devices that a crash left, before the first call is served, and counts the other
    /// leftovers. `in_use` returns whether a mount or a published target uses a device. A device
    /// that cannot be detached is logged and does not delay the others. The other leftovers may
    /// take as long to clean up as a large disk takes to overwrite, so they are only counted here,
    /// and are cleaned up while the pool is served (`Driver::clean`, `Driver::wipe`).
    pub fn recover(&self, in_use: &dyn Fn(&Device) -> bool) -> Result<Leftovers> {
        let mut found = Leftovers::default();
        let pool = &self.record.name;
        let mut images = self.volumes.images()?;
        images.extend(self.snapshots.images()?);
        for (device, detached) in self.store().detach_idle(&images, in_use)? {
            let device = device.path.display().to_string();
            match detached {
                Ok(()) => {
                    found.loops += 1;
                    tracing::info!(%pool, device, "detached an unused device");
                }
                Err(error) => {
                    tracing::error!(%pool, device, error = %chain(&error), "failed to detach an unused device");
                }
            }
        }
        for leftover in self.leftovers()? {
            *match &leftover {
                Leftover::Copy(_) | Leftover::Growth(_) => continue,
                Leftover::Switched(uuid) => {
                    // Without it the volume would have no image until the first cleanup.
                    if let Err(error) = self.end_switch(*uuid) {
                        tracing::error!(%pool, volume = %uuid, error = %chain(&error), "failed to complete the revert of a volume");
                    }
                    continue;
                }
                Leftover::Volume(_) | Leftover::Spare(_) => &mut found.half_made,
                Leftover::Snapshot(_) => &mut found.snapshots,
                Leftover::Trash { .. } => &mut found.trash,
            } += 1;
        }
        Ok(found)
    }

    /// What failed or interrupted calls may have left, also of snapshots, because not every caller
    /// repeats its call. The result may contain objects that are being created now. A name in the
    /// trash that is not that of a volume or snapshot was not put there by this driver.
    pub fn leftovers(&self) -> Result<Vec<Leftover>> {
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
        let growths = self.volumes.map(|uuid, entry| match entry {
            Entry::Known(record) => record.growth.map(|_| Leftover::Growth(uuid)),
            Entry::Damaged(_) => None,
        });
        let switched = self.switched().into_iter().map(Leftover::Switched);
        let spares = self.unnamed_spares().into_iter().map(Leftover::Spare);
        Ok(switched
            .chain(spares)
            .chain(volumes)
            .chain(snapshots)
            .chain(trash)
            .chain(copies)
            .chain(growths.into_iter().flatten())
            .collect())
    }

    /// Cleans up a leftover if it still is one according to the disk, and returns whether it was.
    /// The caller holds the lock of its volume or snapshot.
    pub fn clean_up(&self, leftover: &Leftover) -> Result<bool> {
        match leftover {
            Leftover::Volume(uuid) => self.volumes.delete_abandoned(*uuid),
            Leftover::Snapshot(uuid) => self.snapshots.delete_abandoned(*uuid),
            Leftover::Copy(Image::Volume(uuid)) => self.volumes.delete_begun_copy(*uuid),
            Leftover::Copy(Image::Snapshot(uuid)) => self.snapshots.delete_begun_copy(*uuid),
            Leftover::Growth(uuid) => self.abort_growth(*uuid),
            Leftover::Spare(uuid) => self.delete_unnamed_spare(*uuid),
            // Whether it was complete before is not known, so nothing is logged.
            Leftover::Switched(uuid) => self.end_switch(*uuid).map(|()| false),
            Leftover::Trash { name, .. } => {
                if !self.folder.list(TRASH)?.contains(name) {
                    return Ok(false);
                }
                self.folder.sync_all()?;
                self.folder
                    .empty_trash(std::slice::from_ref(name))
                    .map(|()| true)
            }
        }
    }

    /// Whether the cleanup of a leftover overwrites blocks with zeros, which may take hours. A
    /// record that cannot be read now counts as one that does not require it.
    pub fn is_wiped(&self, leftover: &Leftover) -> bool {
        let dir = match leftover {
            Leftover::Volume(uuid)
            | Leftover::Spare(uuid)
            | Leftover::Copy(Image::Volume(uuid)) => self.volumes.dir(*uuid),
            Leftover::Snapshot(uuid) | Leftover::Copy(Image::Snapshot(uuid)) => {
                self.snapshots.dir(*uuid)
            }
            Leftover::Trash { name, .. } => self.folder.root.join(TRASH).join(name),
            Leftover::Growth(_) | Leftover::Switched(_) => return false,
        };
        matches!(self.folder.wipe_of(&dir), Ok(Wipe::Zero))
    }
}
