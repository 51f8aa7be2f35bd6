//! A simulated host with the kernel's rules, in plain safe Rust.
//!
//! A [`MemoryHost`] is a handle of one *process* on one *machine*. Disk, loop devices, mounts and
//! the boot id belong to the machine and survive the process; open devices, locks and pinned
//! folders die with it ([`MemoryHost::restart_process`]). [`MemoryHost::reboot`] ends mounts and
//! loop devices, and with a power loss everything that was not synced, in the most adverse way
//! that is still legal.
//!
//! The simulation writes down when an invariant of the driver is broken
//! ([`MemoryHost::violations`]): data formatted over, a second loop device on an image, a rename
//! of what was not synced. And since every change passes through [`Host::perform`], any of them
//! can be made to fail or to be the last ([`MemoryHost::fail_effect`]).

mod content;
mod disk;
mod fault;
mod loops;
mod machine;
mod mounts;
mod perform;
#[cfg(test)]
mod tests;
mod user;

use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use uuid::Uuid;

use super::{Device, Done, Effect, FileId, FileKind, FileStat, Ground, Host, LoopHold, LoopStatus};
use super::{Mount, Result, Signature, Space};
use crate::error::{HostCause, HostError};
use crate::model::FsType;
use crate::model::size::{GIB, MIB};
pub use fault::FaultMode;
use machine::{Machine, Process};
use perform::Acted;
pub use user::Held;

/// The folder that exists on every simulated machine, on its pool's disk; pools go below it.
pub const POOLS: &str = "/memory";
/// Where the node's record lies by default; exists as well.
const STATE: &str = "/var/lib/slackwater";
/// Callers' paths, unless other folders are given.
const CALLERS: &str = "/var/lib/kubelet";
/// Room on a simulated disk unless said: for a few volumes of the sizes that test suites ask for.
const CAPACITY: u64 = 100 * GIB;
/// A simulated clock that stands still but for the effects.
const EPOCH: u64 = 1_700_000_000;

/// What a simulated machine is like.
#[derive(Clone, Debug)]
pub struct MemoryOptions {
    /// Bytes of the pool's disk.
    pub capacity: u64,
    /// Folders that callers' paths must be below.
    pub allowed: Vec<PathBuf>,
    /// Makes uuids and the clock repeatable; for tests.
    pub seed: Option<u64>,
    /// Logical block size of the pool's disk.
    pub sector: u32,
    /// Name of the file system beneath pools.
    pub ground: String,
}

impl Default for MemoryOptions {
    fn default() -> MemoryOptions {
        MemoryOptions {
            capacity: CAPACITY,
            allowed: vec![CALLERS.into()],
            seed: None,
            sector: 512,
            ground: "xfs".into(),
        }
    }
}

impl MemoryOptions {
    /// What [`Host::check_path`] says.
    fn check(&self, path: &Path) -> std::result::Result<(), String> {
        if !path.is_absolute() {
            return Err("is not an absolute path".into());
        }
        let plain = |part: Component<'_>| matches!(part, Component::RootDir | Component::Normal(_));
        if !path.components().all(plain) {
            return Err("has '..' in it".into());
        }
        if self
            .allowed
            .iter()
            .any(|folder| path.starts_with(folder) && path != folder)
        {
            return Ok(());
        }
        let folders: Vec<String> = self
            .allowed
            .iter()
            .map(|folder| folder.display().to_string())
            .collect();
        Err(format!(
            "is not below an allowed folder ({})",
            folders.join(", ")
        ))
    }
}

/// A process on a simulated machine.
#[derive(Clone)]
pub struct MemoryHost {
    machine: Arc<Mutex<Machine>>,
    process: Process,
}

impl Default for MemoryHost {
    fn default() -> MemoryHost {
        MemoryHost::new()
    }
}

impl MemoryHost {
    /// Boots a machine and starts a process on it.
    pub fn new() -> MemoryHost {
        MemoryHost::with_options(MemoryOptions::default())
    }

    /// The same with a pool's disk of so many bytes.
    pub fn with_capacity(capacity: u64) -> MemoryHost {
        MemoryHost::with_options(MemoryOptions {
            capacity,
            ..MemoryOptions::default()
        })
    }

    /// The same with everything said.
    pub fn with_options(options: MemoryOptions) -> MemoryHost {
        let mut machine = Machine::boot(options);
        for folder in [POOLS, STATE] {
            if machine.make_folder(Path::new(folder)).is_err() {
                machine.violation(format!("{folder} can't be made"));
            }
        }
        let process = machine.start_process();
        MemoryHost {
            machine: Arc::new(Mutex::new(machine)),
            process,
        }
    }

    /// Makes a folder and its parents, durably: what an administrator did before.
    pub fn make_folder(&self, path: &Path) -> Result<()> {
        let made = self.lock().make_folder(path);
        made.map(drop)
            .map_err(|errno| HostError::errno("make", path, errno))
    }

    /// Kills this process and starts another on the same machine: its loop holds, locks and
    /// pinned folders are gone, its further calls fail.
    pub fn restart_process(&self) -> MemoryHost {
        self.lock().kill(self.process);
        self.another_process()
    }

    /// Starts another process beside this one.
    pub fn another_process(&self) -> MemoryHost {
        let process = self.lock().start_process();
        MemoryHost {
            machine: Arc::clone(&self.machine),
            process,
        }
    }

    /// Ends all processes, mounts and loop devices, and starts a process in a new boot. With a
    /// power loss, what wasn't synced is lost.
    pub fn reboot(&self, power_loss: bool) -> MemoryHost {
        self.lock().reboot(power_loss);
        self.another_process()
    }

    /// Whether this process still lives.
    pub fn is_alive(&self) -> bool {
        self.lock().is_alive(self.process)
    }

    /// A panic of another thread leaves a machine in one of its states.
    fn lock(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The machine, for a living process.
    fn look<T>(
        &self,
        action: &'static str,
        subject: &Path,
        look: impl FnOnce(&mut Machine) -> std::result::Result<T, HostCause>,
    ) -> Result<T> {
        let mut machine = self.lock();
        let looked = if machine.is_alive(self.process) {
            look(&mut machine)
        } else {
            Err(dead())
        };
        looked.map_err(|cause| HostError {
            action,
            subject: subject.into(),
            cause,
        })
    }

    /// Keeps a loop open for this process.
    fn hold(&self, number: u32, key: u64) -> LoopHold {
        let keep = Keep {
            machine: Arc::clone(&self.machine),
            key,
        };
        LoopHold {
            number,
            keep: Box::new(keep),
        }
    }
}

/// What a dead process is told; nothing reads it in earnest.
fn dead() -> HostCause {
    HostCause::Unexpected("process is dead".into())
}

/// Something open, closed when this is dropped.
struct Keep {
    machine: Arc<Mutex<Machine>>,
    key: u64,
}

impl Drop for Keep {
    fn drop(&mut self) {
        let mut machine = self.machine.lock().unwrap_or_else(PoisonError::into_inner);
        machine.openers.remove(&self.key);
        machine.settle();
    }
}

impl Host for MemoryHost {
    fn perform(&self, effect: &Effect<'_>) -> Result<Done> {
        let subject = perform::subject(effect);
        let acted = self.look(effect.name(), &subject, |machine| {
            let described = format!("{} {}", effect.name(), subject.display());
            let fault = machine.faults.next(effect.name(), described);
            match fault {
                Some(FaultMode::Before(errno)) => return Err(errno.into()),
                Some(FaultMode::CrashBefore) => {
                    machine.kill(self.process);
                    return Err(dead());
                }
                Some(FaultMode::After(_) | FaultMode::CrashAfter) | None => {}
            }
            let acted = machine.act(self.process, effect);
            let late = match fault {
                Some(FaultMode::After(errno)) => Some(errno.into()),
                Some(FaultMode::CrashAfter) => Some(dead()),
                Some(FaultMode::Before(_) | FaultMode::CrashBefore) | None => None,
            };
            if let (Ok(Acted::Loop { key, .. }), Some(_)) = (&acted, &late) {
                machine.openers.remove(key);
            }
            if fault == Some(FaultMode::CrashAfter) {
                machine.kill(self.process);
            }
            machine.settle();
            late.map_or(acted, Err)
        })?;
        // Other threads get their turn between two effects.
        std::thread::yield_now();
        Ok(match acted {
            Acted::Plain => Done::Plain,
            Acted::Loop { number, key } => Done::Loop(self.hold(number, key)),
        })
    }

    fn pin_dir(&self, path: &Path) -> Result<PathBuf> {
        self.look("open", path, |machine| {
            let ino = machine.find(self.process, path)?.ok_or(Errno::ENOENT)?;
            machine.disk.dir(ino)?;
            Ok(machine.pin(self.process, ino))
        })
    }

    fn try_lock_file(&self, path: &Path) -> Result<bool> {
        self.look("lock", path, |machine| {
            let slot = machine.slot(self.process, path)?;
            let ino = machine.disk.make_file(&slot)?;
            Ok(machine.try_lock(self.process, ino))
        })
    }

    fn read_file(&self, path: &Path) -> Result<Option<Vec<u8>>> {
        self.look("read", path, |machine| {
            match machine.find(self.process, path)? {
                Some(ino) => Ok(Some(machine.disk.file(ino)?.live.bytes.clone())),
                None => Ok(None),
            }
        })
    }

    fn list_dir(&self, path: &Path) -> Result<Option<Vec<String>>> {
        self.look("list", path, |machine| {
            match machine.find(self.process, path)? {
                Some(ino) => Ok(Some(machine.disk.dir(ino)?.live.keys().cloned().collect())),
                None => Ok(None),
            }
        })
    }

    fn stat(&self, path: &Path) -> Result<Option<FileStat>> {
        self.look("stat", path, |machine| {
            let Some(ino) = machine.find(self.process, path)? else {
                return Ok(None);
            };
            let (kind, size, allocated) = match machine.disk.file(ino) {
                Ok(file) => (FileKind::File, file.live.size, file.live.allocated()),
                Err(_) => (FileKind::Dir, 0, 0),
            };
            Ok(Some(FileStat {
                id: Machine::image_id(ino),
                kind,
                size,
                allocated,
                rdev: 0,
            }))
        })
    }

    fn space(&self, path: &Path) -> Result<Space> {
        self.look("statfs", path, |machine| {
            machine.find(self.process, path)?.ok_or(Errno::ENOENT)?;
            let free = machine.available();
            let inodes = machine.disk.capacity / (2 * MIB) + 1024;
            Ok(Space {
                total: machine.disk.capacity,
                available: free,
                free,
                inodes,
                inodes_free: inodes,
            })
        })
    }

    fn ground(&self, path: &Path) -> Result<Ground> {
        self.look("statfs", path, |machine| {
            machine.find(self.process, path)?.ok_or(Errno::ENOENT)?;
            let options = &machine.options;
            Ok(Ground {
                fs_name: options.ground.clone(),
                mount_point: POOLS.into(),
                sector: options.sector,
            })
        })
    }

    fn mounts(&self) -> Result<Vec<Mount>> {
        self.look("read", Path::new("/proc/self/mountinfo"), |machine| {
            Ok(machine
                .mounts
                .iter()
                .map(|mounted| mounted.line.clone())
                .collect())
        })
    }

    fn loops(&self) -> Result<Vec<LoopStatus>> {
        self.look("list", Path::new("/sys/block"), |machine| {
            Ok(machine.loop_status())
        })
    }

    fn hold_loop(&self, number: u32, backing: FileId) -> Result<Option<LoopHold>> {
        let key = self.look("open", &Device::of_loop(number).path, |machine| {
            let stands = machine
                .loops
                .get(&number)
                .is_some_and(|dev| dev.backing.id() == backing);
            Ok(stands.then(|| machine.open_loop(Some(self.process), number)))
        })?;
        Ok(key.map(|key| self.hold(number, key)))
    }

    fn is_claimed(&self, device: &Device) -> Result<bool> {
        self.look("open", &device.path, |machine| {
            let number = loops::loop_number(device).ok_or(Errno::ENOTBLK)?;
            Ok(machine.supers.contains_key(&number))
        })
    }

    fn device_bytes(&self, device: &Device) -> Result<u64> {
        self.look("open", &device.path, |machine| {
            let number = loops::loop_number(device).ok_or(Errno::ENOTBLK)?;
            Ok(machine.loops.get(&number).map_or(0, |dev| dev.bytes))
        })
    }

    fn signature(&self, device: &Device) -> Result<Signature> {
        self.look("probe", &device.path, |machine| {
            let number = loops::loop_number(device).ok_or(Errno::ENOTBLK)?;
            Ok(machine.content(number)?.signature())
        })
    }

    fn wants_growth(&self, device: &Device, mount_point: &Path, fs: FsType) -> Result<bool> {
        self.look("statfs", mount_point, |machine| {
            let number = loops::loop_number(device).ok_or(Errno::ENOTBLK)?;
            let bytes = machine.dev(number)?.bytes;
            let content = machine
                .content(number)?
                .fs()
                .filter(|content| content.fs == fs);
            Ok(content.ok_or(Errno::EINVAL)?.bytes < bytes)
        })
    }

    fn check_path(&self, path: &Path) -> std::result::Result<(), String> {
        self.lock().options.check(path)
    }

    fn stat_caller(&self, path: &Path) -> Result<Option<FileStat>> {
        self.look("stat", path, |machine| Ok(machine.stat_target(path)))
    }

    fn space_caller(&self, path: &Path) -> Result<Space> {
        self.look("statfs", path, |machine| Ok(machine.space_target(path)?))
    }

    fn boot_id(&self) -> Result<Uuid> {
        self.look(
            "read",
            Path::new("/proc/sys/kernel/random/boot_id"),
            |machine| Ok(machine.boot),
        )
    }

    fn random_uuid(&self) -> Uuid {
        self.lock().uuid()
    }

    fn now(&self) -> u64 {
        let machine = self.lock();
        match machine.options.seed {
            Some(_) => EPOCH + machine.faults.log.len() as u64,
            None => {
                let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
                since.map_or(0, |since| since.as_secs())
            }
        }
    }

    fn missing(&self) -> Vec<String> {
        Vec::new()
    }
}
