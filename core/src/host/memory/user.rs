//! Users of volumes on a simulated machine: the data that they write must not be lost. None of this
//! counts as an effect of the driver.

use std::path::Path;

use nix::errno::Errno;

use super::MemoryHost;
use super::content::{ContentKind, Health};
use super::disk::{BLOCK, Ino};
use super::machine::Machine;
use super::mounts::Shown;
use crate::model::FsType;

pub(super) type Answer<T> = std::result::Result<T, Errno>;

impl Machine {
    pub(super) fn image_at(&self, image: &Path) -> Answer<Ino> {
        self.find(0, image)?.ok_or(Errno::ENOENT)
    }

    /// The loop device whose file system is mounted at a path, and whether the mount is writable.
    pub(super) fn fs_at(&self, path: &Path) -> Answer<(u32, bool)> {
        let mounted = self.top(path).ok_or(Errno::ENOENT)?;
        let number = mounted.shown.fs().ok_or(Errno::ENOTDIR)?;
        let of_super = self
            .supers
            .get(&number)
            .is_some_and(|found| found.read_only);
        Ok((number, !mounted.line.is_read_only() && !of_super))
    }

    /// Adds a token to the content of a device if the pool has enough blocks: one for the token
    /// and, if the block that refers to it is shared, one for that.
    fn put_token(&mut self, number: u32, token: u64) -> Answer<()> {
        if self.is_hung_loop(number) {
            return Err(Errno::EAGAIN);
        }
        let ino = self.image_of(number)?;
        let bytes = self.dev(number)?.bytes;
        let limit = match self.full {
            true => self.used(),
            false => self.disk.capacity.max(self.used()),
        };
        let data = self.data_mut(ino)?;
        let before = data.clone();
        data.content.used_before = true;
        match &mut data.content.kind {
            ContentKind::Fs(fs) => fs.tokens.push(token),
            ContentKind::Raw(tokens) => tokens.push(token),
            ContentKind::Blank | ContentKind::Foreign(_) => {
                data.content.kind = ContentKind::Raw(vec![token]);
            }
        }
        let room = data.content.fs().map_or(bytes, |fs| fs.bytes.min(bytes));
        let fits = data.content.used() <= room;
        // A shared block gets a new address when it is written; others keep theirs.
        let rewritten = usize::from(self.shares(ino, 0));
        self.disk.changed(ino, rewritten)?;
        if !fits || self.used() > limit {
            *self.data_mut(ino)? = before;
            return Err(Errno::ENOSPC);
        }
        Ok(())
    }

    /// Frees blocks without content, unless the device forbids discard.
    pub(super) fn trim_volume(&mut self, number: u32) -> Answer<()> {
        if self.dev(number)?.no_discard {
            return Err(Errno::EOPNOTSUPP);
        }
        let ino = self.image_of(number)?;
        self.data_mut(ino)?.reserved = 0;
        Ok(())
    }

    /// Writes back what users have written to a mounted file system. Data for which there is no
    /// space is lost, and the error is reported once.
    pub(super) fn write_back(&mut self, number: u32) -> Answer<()> {
        let dirty = self.supers.get_mut(&number);
        let dirty = dirty.map_or(Vec::new(), |found| std::mem::take(&mut found.dirty));
        let mut all = Ok(());
        for token in dirty {
            all = all.and(self.put_token(number, token));
        }
        self.sync_loop(number);
        all
    }
}

impl MemoryHost {
    /// A user writes a token to the file system at a path, and syncs it.
    pub fn write_token(&self, mount_point: &Path, token: u64) -> Answer<()> {
        self.write_unsynced(mount_point, token)?;
        self.sync(mount_point)
    }

    /// Like [`MemoryHost::write_token`] without syncing: a power loss loses it, and copies of the
    /// image lack it until the file system writes it back. EAGAIN while the file system is frozen
    /// or its disk hangs, where a real writer would wait.
    pub fn write_unsynced(&self, mount_point: &Path, token: u64) -> Answer<()> {
        let mut machine = self.lock();
        let (number, writable) = machine.fs_at(mount_point)?;
        if !writable {
            return Err(Errno::EROFS);
        }
        if machine.frozen.contains_key(&number) || machine.is_hung_loop(number) {
            return Err(Errno::EAGAIN);
        }
        let fs = machine.content(number)?.fs().ok_or(Errno::EIO)?;
        let (used, bytes) = (fs.used(), fs.bytes);
        let found = machine.supers.get_mut(&number).ok_or(Errno::EIO)?;
        found.dirty.push(token);
        if used + found.dirty.len() as u64 * BLOCK > bytes {
            found.dirty.pop();
            return Err(Errno::ENOSPC);
        }
        Ok(())
    }

    /// syncfs.
    pub fn sync(&self, mount_point: &Path) -> Answer<()> {
        let mut machine = self.lock();
        let (number, _) = machine.fs_at(mount_point)?;
        machine.write_back(number)
    }

    /// fstrim: frees blocks without content, unless the device forbids discard.
    pub fn trim(&self, mount_point: &Path) -> Answer<()> {
        let mut machine = self.lock();
        let (number, _) = machine.fs_at(mount_point)?;
        machine.trim_volume(number)
    }

    /// The tokens in the file system at a path, in the order in which they were written.
    pub fn tokens(&self, mount_point: &Path) -> Answer<Vec<u64>> {
        let machine = self.lock();
        let (number, _) = machine.fs_at(mount_point)?;
        let mut tokens = machine
            .content(number)?
            .fs()
            .ok_or(Errno::EIO)?
            .tokens
            .clone();
        let found = machine.supers.get(&number);
        tokens.extend(found.into_iter().flat_map(|found| &found.dirty));
        Ok(tokens)
    }

    /// Size of the file system at a path in bytes.
    pub fn fs_bytes(&self, mount_point: &Path) -> Answer<u64> {
        let machine = self.lock();
        let (number, _) = machine.fs_at(mount_point)?;
        Ok(machine.content(number)?.fs().ok_or(Errno::EIO)?.bytes)
    }

    /// A user writes a token to the block device at a path, and syncs it.
    pub fn write_block_token(&self, target: &Path, token: u64) -> Answer<()> {
        let mut machine = self.lock();
        let number = machine.node_at(target)?;
        if machine.dev(number)?.read_only {
            return Err(Errno::EPERM);
        }
        machine.put_token(number, token)?;
        machine.sync_loop(number);
        Ok(())
    }

    /// The tokens on the block device at a path.
    pub fn block_tokens(&self, target: &Path) -> Answer<Vec<u64>> {
        let machine = self.lock();
        let number = machine.node_at(target)?;
        Ok(machine.content(number)?.tokens().to_vec())
    }

    /// Size of the block device at a path in bytes.
    pub fn block_bytes(&self, target: &Path) -> Answer<u64> {
        let machine = self.lock();
        let number = machine.node_at(target)?;
        Ok(machine.dev(number)?.bytes)
    }

    /// Makes the first megabytes of the device read as zeros, whatever it contains.
    pub fn blank_device(&self, image: &Path) -> Answer<()> {
        let mut machine = self.lock();
        let ino = machine.image_at(image)?;
        machine.data_mut(ino)?.content.reads_blank = true;
        Ok(())
    }

    /// The file system that blkid finds in an image.
    pub fn file_system_in(&self, image: &Path) -> Answer<Option<FsType>> {
        let mut machine = self.lock();
        let ino = machine.image_at(image)?;
        let content = &machine.data_mut(ino)?.content;
        let found = content.fs().filter(|_| !content.reads_blank);
        Ok(found.map(|content| content.fs))
    }

    /// Writes something to the image that blkid reports with this name.
    pub fn put_foreign(&self, image: &Path, name: &str) -> Answer<()> {
        let mut machine = self.lock();
        let ino = machine.image_at(image)?;
        machine.data_mut(ino)?.content.kind = ContentKind::Foreign(name.into());
        machine.disk.changed(ino, 0)?;
        machine.disk.sync_file(ino)
    }

    /// From now on the kernel refuses to grow mounted ext4 file systems, because the machine's
    /// processes lack CAP_SYS_RESOURCE.
    pub fn refuse_ext4_growth(&self) {
        self.lock().refuses_ext4_growth = true;
    }

    /// Leaves the file system in an image with errors that a check can or cannot repair.
    pub fn leave_unclean(&self, image: &Path, repairable: bool) -> Answer<()> {
        let mut machine = self.lock();
        let ino = machine.image_at(image)?;
        let fs = machine.data_mut(ino)?.content.fs_mut();
        fs.ok_or(Errno::EINVAL)?.health = if repairable {
            Health::Unclean
        } else {
            Health::Broken
        };
        machine.disk.changed(ino, 0)?;
        machine.disk.sync_file(ino)
    }

    /// Overwrites a file durably, to simulate damage.
    pub fn put_file(&self, path: &Path, bytes: &[u8]) -> Answer<()> {
        let mut machine = self.lock();
        let slot = machine.slot(0, path)?;
        let ino = machine.disk.make_file(&slot)?;
        let data = machine.data_mut(ino)?;
        (data.bytes, data.size) = (bytes.to_vec(), bytes.len() as u64);
        machine.disk.sync_file(ino)?;
        machine.disk.sync_dir(slot.0)
    }

    /// Fills the pool's disk until `bytes` are available.
    pub fn leave_available(&self, bytes: u64) {
        let mut machine = self.lock();
        machine.disk.capacity = machine.used() + bytes;
    }

    /// Changes the size of the pool's disk.
    pub fn set_capacity(&self, bytes: u64) {
        self.lock().disk.capacity = bytes;
    }
}

impl Machine {
    /// The loop device whose node is bind-mounted at a path.
    fn node_at(&self, path: &Path) -> Answer<u32> {
        match self.top(path).ok_or(Errno::ENOENT)?.shown {
            Shown::Node(number) => Ok(number),
            Shown::Fs(_) | Shown::Base => Err(Errno::ENOTBLK),
        }
    }
}
