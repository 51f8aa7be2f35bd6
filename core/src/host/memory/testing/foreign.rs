//! What other processes do on a simulated machine: they hold, freeze and detach devices, and remove
//! disks.

use std::path::Path;

use nix::errno::Errno;
use uuid::Uuid;

use super::super::content::Content;
use super::super::freezer::Froze;
use super::super::loops::{Backing, LoopDev};
use super::super::machine::{Opened, Opener};
use super::super::unreadable::{Flawed, Unreadable};
use super::super::user::Answer;
use super::super::{Closes, Keep, MemoryHost};
use crate::host::FileId;
use crate::model::FsType;

/// An object that a foreign process has open; closed when this is dropped.
pub struct Held {
    _keep: Keep,
}

impl MemoryHost {
    /// From now on a directory of CSI paths does not exist, nor anything below it.
    pub fn forget_folder(&self, path: &Path) {
        self.lock().absent.insert(path.to_path_buf());
    }

    /// A foreign process opens the loop device of an image for reading.
    pub fn open_reader(&self, image: &Path) -> Answer<Held> {
        let mut machine = self.lock();
        let ino = machine.image_at(image)?;
        let number = *machine.loops_on(ino).first().ok_or(Errno::ENXIO)?;
        let key = machine.open_loop(None, number);
        drop(machine);
        Ok(self.held(key))
    }

    /// A foreign process opens a file below a mount point, so that it cannot be unmounted.
    pub fn open_file(&self, mount_point: &Path) -> Answer<Held> {
        let mut machine = self.lock();
        let id = machine.top(mount_point).ok_or(Errno::ENOENT)?.line.id;
        let key = machine.fresh();
        machine.openers.insert(
            key,
            Opener {
                process: None,
                what: Opened::OnMount(id),
            },
        );
        drop(machine);
        Ok(self.held(key))
    }

    /// Another driver creates an image with a file system of this length, in which a token was written,
    /// or writes another token to it.
    pub fn write_foreign_image(&self, path: &Path, bytes: u64, token: u64) -> Answer<()> {
        let mut machine = self.lock();
        let parent = path.parent().ok_or(Errno::EINVAL)?;
        machine.make_folder(parent)?;
        let slot = machine.slot(0, path)?;
        let ino = machine.disk.make_file(&slot)?;
        let data = machine.data_mut(ino)?;
        data.size = bytes;
        if data.content.fs().is_none() {
            data.content = Content::fresh(FsType::Ext4, Uuid::from_u128(1), bytes);
        }
        let fs = data.content.fs_mut().ok_or(Errno::EINVAL)?;
        fs.tokens.push(token);
        data.content.used_before = true;
        machine.disk.changed(ino, 1)?;
        machine.disk.sync_file(ino)?;
        machine.disk.sync_dir(slot.0)
    }

    /// The other driver deletes its image.
    pub fn remove_foreign_image(&self, path: &Path) -> Answer<()> {
        let mut machine = self.lock();
        let slot = machine.slot(0, path)?;
        machine.disk.remove_file(&slot)?;
        machine.disk.sync_dir(slot.0)
    }

    fn held(&self, key: u64) -> Held {
        let _keep = self.keep(Closes::Opener(key));
        Held { _keep }
    }

    /// A foreign process attaches a loop device of its own to an image.
    pub fn foreign_loop(&self, image: &Path) -> Answer<u32> {
        let mut machine = self.lock();
        let ino = machine.image_at(image)?;
        let bytes = machine.disk.file(ino)?.live.size;
        Ok(machine.add_loop(foreign_loop_device(Backing::Image(ino), image, bytes)))
    }

    /// A loop device is detached, and its number is reused for a file of a foreign process; EBUSY
    /// while it is open.
    pub fn steal_loop(&self, number: u32) -> Answer<()> {
        let mut machine = self.lock();
        if machine.openers_of(number) > 0 {
            return Err(Errno::EBUSY);
        }
        let inode = machine.fresh();
        let id = FileId {
            device: nix::sys::stat::makedev(259, 3),
            inode,
        };
        let dev = foreign_loop_device(Backing::Foreign(id), Path::new("/srv/other.img"), 1 << 30);
        machine.loops.insert(number, dev);
        Ok(())
    }

    /// A pod with a raw block volume detaches its loop device (LOOP_CLR_FD): it disappears when its
    /// last opener closes it.
    pub fn detach_loop(&self, number: u32) -> Answer<()> {
        let mut machine = self.lock();
        let backing = machine.dev(number)?.backing.id();
        machine
            .detach(number, backing)
            .map_err(|_cause| Errno::ENXIO)
    }

    /// A pod with a raw block volume changes direct I/O and partition scanning of its device.
    pub fn set_loop_flags(&self, number: u32, direct_io: bool, partscan: bool) -> Answer<()> {
        let mut machine = self.lock();
        let dev = machine.dev_mut(number)?;
        (dev.direct_io, dev.partscan) = (direct_io, partscan);
        Ok(())
    }

    /// A foreign process detaches its loop device.
    pub fn release_loop(&self, number: u32) {
        self.lock().loops.remove(&number);
    }

    /// A foreign process suspends the mapped device with a UUID.
    pub fn suspend_mapped(&self, uuid: &str) -> Answer<()> {
        let mut machine = self.lock();
        let number = machine.mapped(uuid).ok_or(Errno::ENXIO)?;
        machine.suspend(number, None);
        Ok(())
    }

    /// A foreign process freezes the file system at a path.
    pub fn freeze(&self, mount_point: &Path) -> Answer<()> {
        let mut machine = self.lock();
        let (number, _) = machine.fs_at(mount_point)?;
        if machine.frozen.contains_key(&number) {
            return Err(Errno::EBUSY);
        }
        // Data for which there is no space is lost, and the freeze does not report that.
        let _ = machine.write_back(number);
        machine.frozen.insert(number, Froze::Foreign);
        Ok(())
    }

    /// Thaws the file system at a path, whichever process froze it; EINVAL if it is not frozen.
    pub fn thaw(&self, mount_point: &Path) -> Answer<()> {
        let mut machine = self.lock();
        let (number, _) = machine.fs_at(mount_point)?;
        machine
            .frozen
            .remove(&number)
            .map(drop)
            .ok_or(Errno::EINVAL)
    }

    /// The disk of a directory is removed: an empty directory takes its place.
    pub fn pull_disk(&self, folder: &Path) -> Answer<()> {
        let mut machine = self.lock();
        let slot = machine.slot(0, folder)?;
        let ino = machine.disk.find(&slot)?.ok_or(Errno::ENOENT)?;
        machine.disk.replace(&slot, None)?;
        machine.pulled.insert(folder.to_path_buf(), ino);
        Ok(())
    }

    /// The disk is put back, with all its data.
    pub fn put_disk_back(&self, folder: &Path) -> Answer<()> {
        let mut machine = self.lock();
        let ino = machine.pulled.remove(folder).ok_or(Errno::ENOENT)?;
        let slot = machine.slot(0, folder)?;
        machine.disk.replace(&slot, Some(ino))
    }

    /// Keeps the pool's disk full, whatever is freed, until this is called with false: other users
    /// fill it at once.
    pub fn keep_full(&self, full: bool) {
        self.lock().full = full;
    }

    /// From now on the content of a file cannot be read. A file that replaces it can be read.
    pub fn make_unreadable(&self, path: &Path, how: Unreadable) -> Answer<()> {
        self.make_unreadable_after(path, how, 0)
    }

    /// Like [`MemoryHost::make_unreadable`], after the file was read `reads` more times.
    pub fn make_unreadable_after(&self, path: &Path, how: Unreadable, reads: usize) -> Answer<()> {
        let mut machine = self.lock();
        let ino = machine.image_at(path)?;
        machine.disk.file(ino)?;
        let is_hidden = reads == 0;
        let flawed = Flawed {
            how,
            reads,
            is_hidden,
        };
        machine.unreadable.insert(ino, flawed);
        Ok(())
    }

    /// All unreadable files can be read again.
    pub fn make_readable(&self) {
        self.lock().unreadable.clear();
    }

    /// The CO removes a directory or file of its own, such as a staging directory; EBUSY on a mount
    /// point.
    pub fn remove_leaf(&self, path: &Path) -> Answer<()> {
        let mut machine = self.lock();
        if machine.top(path).is_some() {
            return Err(Errno::EBUSY);
        }
        machine.targets.remove(path);
        Ok(())
    }

    /// Makes the guard die with the process that it serves: frozen file systems then stay frozen
    /// until the next process sweeps.
    pub fn let_guard_die(&self, dies: bool) {
        self.lock().guard.dies = dies;
    }

    /// The deadline of all freezes passes: the guard thaws.
    pub fn pass_deadline(&self) {
        let mut machine = self.lock();
        let froze = |froze: &Froze| matches!(froze, Froze::Session(_));
        machine.frozen.retain(|_, by| !froze(by));
        machine.remove_unreferenced();
    }

    /// Loop devices whose file system is frozen, and whether a foreign process froze it.
    pub fn frozen(&self) -> Vec<(u32, bool)> {
        let machine = self.lock();
        let frozen = machine.frozen.iter();
        frozen
            .map(|(number, froze)| (*number, *froze == Froze::Foreign))
            .collect()
    }
}

fn foreign_loop_device(backing: Backing, name: &Path, bytes: u64) -> LoopDev {
    LoopDev {
        is_foreign: true,
        ..LoopDev::new(backing, name, bytes)
    }
}
