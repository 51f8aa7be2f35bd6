//! What users of volumes, and administrators, do on a simulated machine.

use std::path::Path;

use nix::errno::Errno;

use super::super::MemoryHost;
use super::super::content::Health;
use super::super::disk::{BLOCK, Ino};
use super::super::machine::Machine;
use super::super::mounts::Shown;
use super::super::user::Answer;
use crate::model::FsType;

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

    /// The loop device whose node is bind-mounted at a path.
    fn node_at(&self, path: &Path) -> Answer<u32> {
        match self.top(path).ok_or(Errno::ENOENT)?.shown {
            Shown::Node(number) => Ok(number),
            Shown::Fs(_) | Shown::Base => Err(Errno::ENOTBLK),
        }
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

    /// Fills the pool's disk, and each thin pool, until `bytes` are available.
    pub fn leave_available(&self, bytes: u64) {
        let mut machine = self.lock();
        machine.disk.capacity = machine.used() + bytes;
        machine.leave_thin_available(bytes);
    }

    /// Changes the size of the pool's disk, and of the data of each thin pool.
    pub fn set_capacity(&self, bytes: u64) {
        let mut machine = self.lock();
        machine.disk.capacity = bytes;
        let pools = machine.thin_pools.values_mut();
        pools.for_each(|pool| pool.data_bytes = bytes);
    }

    /// Changes the size of the metadata of each thin pool.
    pub fn set_thin_metadata(&self, bytes: u64) {
        let mut machine = self.lock();
        let pools = machine.thin_pools.values_mut();
        pools.for_each(|pool| pool.metadata_bytes = bytes);
    }
}
