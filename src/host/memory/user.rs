//! The rest of the world on a simulated machine: users who write, strangers who hold, and the
//! tests that watch. None of this is counted as an effect of the driver.

use std::path::Path;

use nix::errno::Errno;

use super::content::ContentKind;
use super::disk::Ino;
use super::loops::{Backing, LoopDev};
use super::machine::{Machine, Opened, Opener};
use super::mounts::Shown;
use super::{FaultMode, Keep, MemoryHost};
use crate::host::FileId;

type Answer<T> = std::result::Result<T, Errno>;

/// Something that a stranger has open; closed when this is dropped.
pub struct Held {
    _keep: Keep,
}

impl Machine {
    fn image_at(&self, image: &Path) -> Answer<Ino> {
        self.find(0, image)?.ok_or(Errno::ENOENT)
    }

    /// The loop whose file system is mounted at a path, and whether it can be written there.
    fn fs_at(&self, path: &Path) -> Answer<(u32, bool)> {
        let mounted = self.top(path).ok_or(Errno::ENOENT)?;
        let number = mounted.shown.fs().ok_or(Errno::ENOTDIR)?;
        let of_super = self
            .supers
            .get(&number)
            .is_some_and(|found| found.read_only);
        Ok((number, !mounted.line.is_read_only() && !of_super))
    }

    /// Adds a token to whatever is on a device, if the pool has a block for it.
    fn put_token(&mut self, number: u32, token: u64) -> Answer<()> {
        let ino = self.image_of(number)?;
        let available = self.available();
        let bytes = self.dev(number)?.bytes;
        let data = self.data_mut(ino)?;
        let mut changed = data.clone();
        changed.content.used_before = true;
        match &mut changed.content.kind {
            ContentKind::Fs(fs) => {
                fs.tokens.push(token);
                if fs.used() > fs.bytes {
                    return Err(Errno::ENOSPC);
                }
            }
            ContentKind::Raw(tokens) => tokens.push(token),
            ContentKind::Blank | ContentKind::Foreign(_) => {
                changed.content.kind = ContentKind::Raw(vec![token]);
            }
        }
        if changed.content.used() > bytes {
            return Err(Errno::ENOSPC);
        }
        if changed.allocated() > data.allocated() + available {
            return Err(Errno::ENOSPC);
        }
        *data = changed;
        Ok(())
    }
}

impl MemoryHost {
    /// A user writes a number into the file system at a path, and syncs it.
    pub fn write_token(&self, mount_point: &Path, token: u64) -> Answer<()> {
        self.write_unsynced(mount_point, token)?;
        self.sync(mount_point)
    }

    /// The same without syncing: lost with the power.
    pub fn write_unsynced(&self, mount_point: &Path, token: u64) -> Answer<()> {
        let mut machine = self.lock();
        let (number, writable) = machine.fs_at(mount_point)?;
        if !writable {
            return Err(Errno::EROFS);
        }
        if machine.frozen.contains(&number) {
            return Err(Errno::EAGAIN);
        }
        machine.put_token(number, token)
    }

    /// syncfs.
    pub fn sync(&self, mount_point: &Path) -> Answer<()> {
        let mut machine = self.lock();
        let (number, _) = machine.fs_at(mount_point)?;
        machine.sync_loop(number);
        Ok(())
    }

    /// The numbers in the file system at a path, in the order written.
    pub fn tokens(&self, mount_point: &Path) -> Answer<Vec<u64>> {
        let machine = self.lock();
        let (number, _) = machine.fs_at(mount_point)?;
        Ok(machine
            .content(number)?
            .fs()
            .ok_or(Errno::EIO)?
            .tokens
            .clone())
    }

    /// Bytes of the file system at a path.
    pub fn fs_bytes(&self, mount_point: &Path) -> Answer<u64> {
        let machine = self.lock();
        let (number, _) = machine.fs_at(mount_point)?;
        Ok(machine.content(number)?.fs().ok_or(Errno::EIO)?.bytes)
    }

    /// A user writes a number to the block device at a path, and syncs it.
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

    /// The numbers on the block device at a path.
    pub fn block_tokens(&self, target: &Path) -> Answer<Vec<u64>> {
        let machine = self.lock();
        let number = machine.node_at(target)?;
        Ok(match &machine.content(number)?.kind {
            ContentKind::Raw(tokens) => tokens.clone(),
            ContentKind::Fs(fs) => fs.tokens.clone(),
            ContentKind::Blank | ContentKind::Foreign(_) => Vec::new(),
        })
    }

    /// Bytes of the block device at a path.
    pub fn block_bytes(&self, target: &Path) -> Answer<u64> {
        let machine = self.lock();
        let number = machine.node_at(target)?;
        Ok(machine.dev(number)?.bytes)
    }

    /// The device shows zeros in its first megabytes, whatever else is on it.
    pub fn blank_device(&self, image: &Path) -> Answer<()> {
        let mut machine = self.lock();
        let ino = machine.image_at(image)?;
        machine.data_mut(ino)?.content.reads_blank = true;
        Ok(())
    }

    /// Something that blkid knows by this name stands on the image.
    pub fn put_foreign(&self, image: &Path, name: &str) -> Answer<()> {
        let mut machine = self.lock();
        let ino = machine.image_at(image)?;
        machine.data_mut(ino)?.content.kind = ContentKind::Foreign(name.into());
        machine.disk.sync_file(ino)
    }

    /// Overwrites a file, durably: damage.
    pub fn put_file(&self, path: &Path, bytes: &[u8]) -> Answer<()> {
        let mut machine = self.lock();
        let slot = machine.slot(0, path)?;
        let ino = machine.disk.make_file(&slot)?;
        let data = machine.data_mut(ino)?;
        (data.bytes, data.size) = (bytes.to_vec(), bytes.len() as u64);
        machine.disk.sync_file(ino)?;
        machine.disk.sync_dir(slot.0)
    }

    /// Somebody fills the pool's disk until so many bytes are available.
    pub fn leave_available(&self, bytes: u64) {
        let mut machine = self.lock();
        machine.disk.capacity = machine.used() + bytes;
    }

    /// Gives the pool's disk another size.
    pub fn set_capacity(&self, bytes: u64) {
        self.lock().disk.capacity = bytes;
    }

    /// From now on a caller's folder doesn't exist, nor what would be below it.
    pub fn forget_folder(&self, path: &Path) {
        self.lock().absent.insert(path.to_path_buf());
    }

    // Strangers

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
        Held {
            _keep: Keep {
                machine: self.machine.clone(),
                key,
            },
        }
    }

    /// A stranger attaches a loop device of its own to an image.
    pub fn foreign_loop(&self, image: &Path) -> Answer<u32> {
        let mut machine = self.lock();
        let ino = machine.image_at(image)?;
        let bytes = machine.disk.file(ino)?.live.size;
        Ok(machine.add_loop(strange(Backing::Image(ino), bytes)))
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
        machine
            .loops
            .insert(number, strange(Backing::Stranger(id), 1 << 30));
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
        machine.sync_loop(number);
        machine
            .frozen
            .insert(number)
            .then_some(())
            .ok_or(Errno::EBUSY)
    }

    /// Thaws it again; EINVAL if it isn't frozen.
    pub fn thaw(&self, mount_point: &Path) -> Answer<()> {
        let mut machine = self.lock();
        let (number, _) = machine.fs_at(mount_point)?;
        machine
            .frozen
            .remove(&number)
            .then_some(())
            .ok_or(Errno::EINVAL)
    }

    // Watching

    /// Effects performed so far, refused ones included.
    pub fn effects(&self) -> usize {
        self.lock().faults.log.len()
    }

    /// The effects so far, each with what it was about.
    pub fn effect_log(&self) -> Vec<String> {
        self.lock().faults.log.clone()
    }

    /// The `n`-th effect from now on goes wrong; 1 is the next. May be called for several.
    pub fn fail_effect(&self, n: usize, mode: FaultMode) {
        self.lock().faults.plan(n, mode);
    }

    /// Every effect of this name is refused from now on; `None` ends that.
    pub fn fail_always(&self, name: &str, errno: Option<Errno>) {
        self.lock().faults.always(name, errno);
    }

    /// No more faults.
    pub fn clear_faults(&self) {
        self.lock().faults.clear();
    }

    /// Invariants that were broken, in words.
    pub fn violations(&self) -> Vec<String> {
        self.lock().violations.clone()
    }

    /// All files and directories below a folder, as paths relative to it.
    pub fn files_below(&self, folder: &Path) -> Vec<String> {
        let machine = self.lock();
        let mut paths = Vec::new();
        if let Ok(Some(ino)) = machine.find(0, folder) {
            machine.disk.paths_below(ino, "", &mut paths);
        }
        paths
            .iter()
            .map(|path| path.trim_start_matches('/').to_string())
            .collect()
    }

    /// Callers' leaves that exist.
    pub fn targets(&self) -> Vec<std::path::PathBuf> {
        self.lock().targets.keys().cloned().collect()
    }

    /// Mount points of what was mounted since boot.
    pub fn mounted(&self) -> Vec<std::path::PathBuf> {
        let machine = self.lock();
        let ours = machine
            .mounts
            .iter()
            .filter(|mounted| mounted.shown != Shown::Base);
        ours.map(|mounted| mounted.line.mount_point.clone())
            .collect()
    }

    /// Numbers of loop devices, with whether somebody has them open.
    pub fn loop_numbers(&self) -> Vec<(u32, bool)> {
        let machine = self.lock();
        machine
            .loops
            .keys()
            .map(|number| (*number, machine.openers_of(*number) > 0))
            .collect()
    }
}

impl Machine {
    /// The loop whose node is bound at a path.
    fn node_at(&self, path: &Path) -> Answer<u32> {
        match self.top(path).ok_or(Errno::ENOENT)?.shown {
            Shown::Node(number) => Ok(number),
            Shown::Fs(_) | Shown::Base => Err(Errno::ENOTBLK),
        }
    }
}

fn strange(backing: Backing, bytes: u64) -> LoopDev {
    LoopDev {
        backing,
        bytes,
        offset: 0,
        read_only: false,
        autoclear: false,
        no_discard: false,
        strange: true,
    }
}
