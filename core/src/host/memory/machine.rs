//! State that survives a process, and state that ends with it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::errno::Errno;
use uuid::Uuid;

use super::disk::{Data, Disk, Ino, Node, ROOT, Slot};
use super::fault::Faults;
use super::freezer::{Froze, GuardState};
use super::lasting::Delayed;
use super::loops::LoopDev;
use super::mounts::{Mounted, Super};
use super::thin::ThinPool;
use super::unreadable::{Flawed, Unreadable};
use super::{EPOCH, MemoryOptions};
use crate::host::{FileId, NodeKind};

/// ID of a simulated process.
pub(super) type Process = u64;

/// st_dev of the pool's disk.
pub(super) fn pool_device() -> u64 {
    nix::sys::stat::makedev(259, 2)
}

/// A process that has something open.
#[derive(Clone, Debug)]
pub(super) struct Opener {
    /// `None` is a foreign process: it survives the driver's processes.
    pub(super) process: Option<Process>,
    pub(super) what: Opened,
}

#[derive(Clone, Debug)]
pub(super) enum Opened {
    /// A block device.
    Loop(u32),
    /// A block device, exclusively.
    Claimed(u32),
    /// A file on the mount with this id.
    OnMount(u32),
}

#[derive(Debug)]
pub(super) struct Machine {
    pub(super) options: MemoryOptions,
    pub(super) disk: Disk,
    /// Loop devices and mapped devices, by number.
    pub(super) loops: BTreeMap<u32, LoopDev>,
    /// Thin pools, by name.
    pub(super) thin_pools: BTreeMap<String, ThinPool>,
    pub(super) mounts: Vec<Mounted>,
    /// Mounted file systems, by loop device.
    pub(super) supers: BTreeMap<u32, Super>,
    /// Loop devices whose file system is frozen, and which process froze it.
    pub(super) frozen: BTreeMap<u32, Froze>,
    pub(super) guard: GuardState,
    /// Files and directories at CSI paths, with their inodes.
    pub(super) targets: BTreeMap<PathBuf, (NodeKind, Ino)>,
    /// Directories of CSI paths that the CO has not created.
    pub(super) absent: BTreeSet<PathBuf>,
    /// Removed disks, by the directory at which they belong.
    pub(super) pulled: BTreeMap<PathBuf, Ino>,
    /// The pool's disk accepts no more data.
    pub(super) full: bool,
    /// Directories whose disk is dead.
    pub(super) dead: BTreeSet<Ino>,
    /// Directories whose disk hangs.
    pub(super) hung: BTreeSet<Ino>,
    /// Effects that wait.
    pub(super) delayed: Option<Delayed>,
    /// Files whose content cannot be read.
    pub(super) unreadable: BTreeMap<Ino, Flawed>,
    pub(super) openers: BTreeMap<u64, Opener>,
    pub(super) alive: BTreeSet<Process>,
    pub(super) pins: BTreeMap<u64, (Process, Ino)>,
    /// Pinned directories of a file system that has died and was mounted again since.
    pub(super) dead_pins: BTreeSet<u64>,
    pub(super) locks: BTreeMap<Ino, Process>,
    pub(super) boot: Uuid,
    pub(super) faults: Faults,
    /// The kernel refuses to grow mounted ext4 file systems for the machine's processes.
    pub(super) refuses_ext4_growth: bool,
    pub(super) violations: Vec<String>,
    /// Other threads may run between two effects.
    pub(super) turns: bool,
    /// Time that [`Host::pause`] and tests let pass.
    pub(super) passed: Duration,
    serial: u64,
}

impl Machine {
    pub(super) fn boot(options: MemoryOptions) -> Machine {
        let disk = Disk::new(options.capacity);
        let mut machine = Machine {
            disk,
            loops: BTreeMap::new(),
            thin_pools: BTreeMap::new(),
            mounts: Vec::new(),
            supers: BTreeMap::new(),
            frozen: BTreeMap::new(),
            guard: GuardState::default(),
            targets: BTreeMap::new(),
            absent: BTreeSet::new(),
            pulled: BTreeMap::new(),
            full: false,
            dead: BTreeSet::new(),
            hung: BTreeSet::new(),
            delayed: None,
            unreadable: BTreeMap::new(),
            openers: BTreeMap::new(),
            alive: BTreeSet::new(),
            pins: BTreeMap::new(),
            dead_pins: BTreeSet::new(),
            locks: BTreeMap::new(),
            boot: Uuid::nil(),
            faults: Faults::default(),
            refuses_ext4_growth: false,
            violations: Vec::new(),
            turns: true,
            passed: Duration::ZERO,
            serial: 1000,
            options,
        };
        machine.boot = machine.uuid();
        machine.mount_base();
        machine
    }

    /// Time since 1970. With a seed, every effect takes a second and nothing else takes time.
    pub(super) fn now(&self) -> Duration {
        let now = match self.options.seed {
            Some(_) => Duration::from_secs(EPOCH + self.faults.log.len() as u64),
            None => {
                let since = SystemTime::now().duration_since(UNIX_EPOCH);
                since.unwrap_or_default()
            }
        };
        now + self.passed
    }

    /// A number that this machine has not used.
    pub(super) fn fresh(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }

    /// Random, or derived from the seed.
    pub(super) fn uuid(&mut self) -> Uuid {
        let serial = self.fresh();
        match self.options.seed {
            Some(seed) => Uuid::new_v5(&Uuid::from_u64_pair(seed, serial), b"memory"),
            None => Uuid::new_v4(),
        }
    }

    pub(super) fn violation(&mut self, what: String) {
        self.violations.push(what);
    }

    // Processes

    pub(super) fn start_process(&mut self) -> Process {
        let process = self.fresh();
        self.alive.insert(process);
        process
    }

    pub(super) fn is_alive(&self, process: Process) -> bool {
        self.alive.contains(&process)
    }

    pub(super) fn processes(&self) -> Vec<Process> {
        self.alive.iter().copied().collect()
    }

    /// Closes everything that the process had open, and removes what only that kept alive.
    pub(super) fn kill(&mut self, process: Process) {
        self.alive.remove(&process);
        self.openers
            .retain(|_, opener| opener.process != Some(process));
        self.pins.retain(|_, (owner, _)| *owner != process);
        self.locks.retain(|_, owner| *owner != process);
        self.orphan(process);
        self.remove_unreferenced();
    }

    /// Removes what no opener needs any more: superblocks, autoclear loop devices, unnamed inodes.
    pub(super) fn remove_unreferenced(&mut self) {
        let mounted: BTreeSet<u32> = self
            .mounts
            .iter()
            .filter_map(|mounted| mounted.shown.fs())
            .collect();
        let ended: Vec<u32> = self
            .supers
            .keys()
            .copied()
            .filter(|n| !mounted.contains(n) && !self.frozen.contains_key(n))
            .collect();
        for number in ended {
            // No process is left that could receive the error of data for which there is no space.
            let _ = self.write_back(number);
            self.supers.remove(&number);
        }
        // A mapped device that is removed closes the device below it.
        while let Some(number) = self.find_idle() {
            self.loops.remove(&number);
        }
        let open = self.open_inodes();
        self.disk.collect(open);
    }

    fn find_idle(&self) -> Option<u32> {
        let mut all = self.loops.iter();
        let idle = all.find(|(number, dev)| dev.autoclear && self.openers_of(**number) == 0);
        idle.map(|(number, _)| *number)
    }

    /// Open inodes that have no name.
    pub(super) fn open_inodes(&self) -> Vec<Ino> {
        let loops = self.loops.values().filter_map(|dev| dev.backing.image());
        loops
            .chain(self.pins.values().map(|(_, ino)| *ino))
            .chain(self.pulled.values().copied())
            .chain(self.thin_inodes())
            .collect()
    }

    pub(super) fn used(&self) -> u64 {
        self.disk.used(self.looped_inodes())
    }

    pub(super) fn available(&self) -> u64 {
        if self.full {
            return 0;
        }
        self.disk.capacity.saturating_sub(self.used())
    }

    // Paths

    pub(super) fn pin(&mut self, process: Process, ino: Ino) -> (PathBuf, u64) {
        let fd = self.fresh();
        self.pins.insert(fd, (process, ino));
        (PathBuf::from(format!("/proc/self/fd/{fd}")), fd)
    }

    pub(super) fn unpin(&mut self, fd: u64) {
        self.pins.remove(&fd);
    }

    /// Releases a lock. If the process is dead, another process may hold the lock by now.
    pub(super) fn unlock(&mut self, process: Process, ino: Ino) {
        if self.locks.get(&ino) == Some(&process) {
            self.locks.remove(&ino);
        }
    }

    /// flock belongs to an open file: a second lock is refused, even to the same process.
    pub(super) fn try_lock(&mut self, process: Process, ino: Ino) -> bool {
        let free = !self.locks.contains_key(&ino);
        if free {
            self.locks.insert(ino, process);
        }
        free
    }

    /// Whether a path leads to the pool's disk, rather than to the machine's own disk.
    pub(super) fn is_of_pool(&self, path: &Path) -> bool {
        path.starts_with(super::POOLS) || path.starts_with("/proc/self/fd")
    }

    /// The first directory of a path and the names below it.
    fn names(&self, process: Process, path: &Path) -> Result<(Ino, Vec<String>), Errno> {
        let mut names = Vec::new();
        for part in path.components() {
            match part {
                Component::RootDir => {}
                Component::Normal(name) => names.push(name.to_string_lossy().into_owned()),
                Component::Prefix(_) | Component::CurDir | Component::ParentDir => {
                    return Err(Errno::EINVAL);
                }
            }
        }
        if !path.is_absolute() {
            return Err(Errno::EINVAL);
        }
        if names.len() >= 4 && names[..3] == ["proc", "self", "fd"] {
            let fd = names[3].parse().ok();
            if fd.is_some_and(|fd| self.dead_pins.contains(&fd)) {
                return Err(Errno::EIO);
            }
            let ino = fd
                .and_then(|fd: u64| self.pins.get(&fd))
                .filter(|(owner, _)| *owner == process)
                .ok_or(Errno::ENOENT)?
                .1;
            names.drain(..4);
            return Ok((ino, names));
        }
        Ok(self.tree_at(path).unwrap_or((ROOT, names)))
    }

    /// The inode that a path names.
    pub(super) fn find(&self, process: Process, path: &Path) -> Result<Option<Ino>, Errno> {
        if let Some(ino) = self.thin_at(path) {
            return Ok(Some(ino));
        }
        let (mut ino, names) = self.names(process, path)?;
        for name in names {
            self.check_alive(ino)?;
            match self.disk.node(ino) {
                Some(Node::Dir(dir)) => match dir.live.get(&name) {
                    Some(next) => ino = *next,
                    None => return Ok(None),
                },
                Some(Node::File(_)) => return Err(Errno::ENOTDIR),
                None => return Ok(None),
            }
        }
        self.check_alive(ino)?;
        Ok(self.disk.node(ino).map(|_| ino))
    }

    pub(super) fn check_alive(&self, folder: Ino) -> Result<(), Errno> {
        match self.dead.contains(&folder) && !self.faults.is_exempt() {
            true => Err(Errno::EIO),
            false => Ok(()),
        }
    }

    /// The content of a file, as far as it can be read.
    pub(super) fn read(&mut self, ino: Ino) -> Result<Vec<u8>, Errno> {
        let bytes = &self.disk.file(ino)?.live.bytes;
        let flawed = self.unreadable.get_mut(&ino);
        match flawed
            .filter(|_| !self.faults.is_exempt())
            .and_then(Flawed::read)
        {
            None => Ok(bytes.clone()),
            Some(Unreadable::Error) => Err(Errno::EIO),
            Some(Unreadable::Zeros) => Ok(vec![0; bytes.len()]),
        }
    }

    /// The parent directory and the name of a path that need not exist.
    pub(super) fn slot(&self, process: Process, path: &Path) -> Result<Slot, Errno> {
        let name = path
            .file_name()
            .ok_or(Errno::EINVAL)?
            .to_string_lossy()
            .into_owned();
        let parent = path.parent().ok_or(Errno::EINVAL)?;
        let dir = self.find(process, parent)?.ok_or(Errno::ENOENT)?;
        self.disk.dir(dir)?;
        Ok((dir, name))
    }

    /// Creates a directory and its parents durably, as an administrator would have done before.
    pub(super) fn make_folder(&mut self, path: &Path) -> Result<Ino, Errno> {
        let mut ino = ROOT;
        for part in path.components() {
            if let Component::Normal(name) = part {
                let parent = ino;
                ino = self
                    .disk
                    .make_dir(&(parent, name.to_string_lossy().into_owned()))?;
                self.disk.sync_dir(parent)?;
            }
        }
        Ok(ino)
    }

    /// The data of an image, by inode.
    pub(super) fn data_mut(&mut self, ino: Ino) -> Result<&mut Data, Errno> {
        Ok(&mut self.disk.file_mut(ino)?.live)
    }

    pub(super) fn image_id(ino: Ino) -> FileId {
        FileId {
            device: pool_device(),
            inode: ino,
        }
    }

    /// Loop devices whose backing file is an image.
    pub(super) fn loops_on(&self, ino: Ino) -> Vec<u32> {
        self.loops
            .iter()
            .filter(|(_, dev)| dev.backing.image() == Some(ino))
            .map(|(n, _)| *n)
            .collect()
    }
}
