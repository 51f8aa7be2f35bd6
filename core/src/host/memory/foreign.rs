//! Strangers on a simulated machine: they hold, freeze, steal, and pull disks out.

use std::path::Path;

use nix::errno::Errno;

use super::freezer::Froze;
use super::loops::{Backing, LoopDev};
use super::machine::{Opened, Opener};
use super::user::Answer;
use super::{Closes, Keep, MemoryHost};
use crate::host::FileId;

/// How the content of a file can't be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// Reading it fails with EIO.
    Error,
    /// Zeros are read in its place.
    Zeros,
}

/// A file that can't be read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flawed {
    how: Unreadable,
    /// So many reads succeed before.
    reads: usize,
    /// Nobody who replaces it can have read it.
    pub(super) is_hidden: bool,
}

impl Flawed {
    /// What one more read finds, if it isn't the content.
    pub(super) fn read(&mut self) -> Option<Unreadable> {
        if self.reads > 0 {
            self.reads -= 1;
            return None;
        }
        self.is_hidden = true;
        Some(self.how)
    }
}

/// Something that a stranger has open; closed when this is dropped.
pub struct Held {
    _keep: Keep,
}

impl MemoryHost {
    /// From now on a caller's folder doesn't exist, nor what would be below it.
    pub fn forget_folder(&self, path: &Path) {
        self.lock().absent.insert(path.to_path_buf());
    }

    /// Somebody reads the loop device of an image.
    pub fn open_reader(&self, image: &Path) -> Answer<Held> {
        let mut machine = self.lock();
        let ino = machine.image_at(image)?;
        let number = *machine.loops_on(ino).first().ok_or(Errno::ENXIO)?;
        let key = machine.open_loop(None, number);
        drop(machine);
        Ok(self.held(key))
    }

    /// Somebody has a file open below a mount point: it can't be unmounted.
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

    fn held(&self, key: u64) -> Held {
        let _keep = self.keep(Closes::Opener(key));
        Held { _keep }
    }

    /// A stranger attaches a loop device of its own to an image.
    pub fn foreign_loop(&self, image: &Path) -> Answer<u32> {
        let mut machine = self.lock();
        let ino = machine.image_at(image)?;
        let bytes = machine.disk.file(ino)?.live.size;
        Ok(machine.add_loop(strange(Backing::Image(ino), image, bytes)))
    }

    /// A loop device goes, and its number comes to stand for a stranger's file; EBUSY while
    /// somebody has it open.
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
        let dev = strange(Backing::Foreign(id), Path::new("/srv/other.img"), 1 << 30);
        machine.loops.insert(number, dev);
        Ok(())
    }

    /// A pod with a raw block volume asks its loop device to detach (LOOP_CLR_FD): it goes with
    /// its last opener.
    pub fn detach_loop(&self, number: u32) -> Answer<()> {
        let mut machine = self.lock();
        let backing = machine.dev(number)?.backing.id();
        machine
            .detach(number, backing)
            .map_err(|_cause| Errno::ENXIO)
    }

    /// A pod with a raw block volume switches direct I/O and partition scanning.
    pub fn set_loop_flags(&self, number: u32, direct_io: bool, partscan: bool) -> Answer<()> {
        let mut machine = self.lock();
        let dev = machine.dev_mut(number)?;
        (dev.direct_io, dev.partscan) = (direct_io, partscan);
        Ok(())
    }

    /// A stranger gives its loop device back.
    pub fn release_loop(&self, number: u32) {
        self.lock().loops.remove(&number);
    }

    /// A stranger freezes the file system at a path.
    pub fn freeze(&self, mount_point: &Path) -> Answer<()> {
        let mut machine = self.lock();
        let (number, _) = machine.fs_at(mount_point)?;
        if machine.frozen.contains_key(&number) {
            return Err(Errno::EBUSY);
        }
        // What finds no room is lost, and the freeze says nothing of it.
        let _ = machine.write_back(number);
        machine.frozen.insert(number, Froze::Foreign);
        Ok(())
    }

    /// Thaws it, whoever froze it; EINVAL if it isn't frozen.
    pub fn thaw(&self, mount_point: &Path) -> Answer<()> {
        let mut machine = self.lock();
        let (number, _) = machine.fs_at(mount_point)?;
        machine
            .frozen
            .remove(&number)
            .map(drop)
            .ok_or(Errno::EINVAL)
    }

    /// The disk of a folder is pulled out: an empty folder is in its place.
    pub fn pull_disk(&self, folder: &Path) -> Answer<()> {
        let mut machine = self.lock();
        let slot = machine.slot(0, folder)?;
        let ino = machine.disk.find(&slot)?.ok_or(Errno::ENOENT)?;
        machine.disk.replace(&slot, None)?;
        machine.pulled.insert(folder.to_path_buf(), ino);
        Ok(())
    }

    /// It is put back, with all that was on it.
    pub fn put_disk_back(&self, folder: &Path) -> Answer<()> {
        let mut machine = self.lock();
        let ino = machine.pulled.remove(folder).ok_or(Errno::ENOENT)?;
        let slot = machine.slot(0, folder)?;
        machine.disk.replace(&slot, Some(ino))
    }

    /// The pool's disk is full, and stays so whatever is freed, until it's said otherwise: others
    /// fill it at once.
    pub fn keep_full(&self, full: bool) {
        self.lock().full = full;
    }

    /// From now on the content of a file can't be read. A file that takes its name can.
    pub fn make_unreadable(&self, path: &Path, how: Unreadable) -> Answer<()> {
        self.make_unreadable_after(path, how, 0)
    }

    /// The same once it was read so many times more.
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

    /// What could not be read can be read again.
    pub fn make_readable(&self) {
        self.lock().unreadable.clear();
    }

    /// The caller removes a leaf of its own, such as a staging folder; EBUSY on a mount point.
    pub fn remove_leaf(&self, path: &Path) -> Answer<()> {
        let mut machine = self.lock();
        if machine.top(path).is_some() {
            return Err(Errno::EBUSY);
        }
        machine.targets.remove(path);
        Ok(())
    }
}

fn strange(backing: Backing, name: &Path, bytes: u64) -> LoopDev {
    LoopDev {
        backing,
        name: name.into(),
        bytes,
        offset: 0,
        read_only: false,
        autoclear: false,
        direct_io: true,
        partscan: false,
        no_discard: false,
        strange: true,
        dead: false,
    }
}
