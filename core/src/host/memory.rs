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
//! of what was not synced. And since every change passes through [`super::Host::perform`], any of them
//! can be made to fail or to be the last ([`MemoryHost::fail_effect`]).

mod check;
mod clones;
mod content;
mod disk;
mod fault;
mod foreign;
mod freezer;
mod kernel;
mod lasting;
mod loops;
mod machine;
mod mounts;
mod perform;
mod targets;
#[cfg(test)]
mod tests;
mod user;
mod watch;

use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::{Kept, LoopHold, Result};
use crate::error::{HostCause, HostError};
use crate::model::size::GIB;
use disk::Ino;
pub use fault::FaultMode;
pub use foreign::{Held, Unreadable};
pub use freezer::STRANGE_TOKEN;
pub use lasting::Hung;
use machine::{Machine, Process};

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
    /// Whether files of the pool's disk can share blocks.
    fn shares_blocks(&self) -> bool {
        matches!(self.ground.as_str(), "xfs" | "btrfs")
    }

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
            "is not below an allowed directory ({})",
            folders.join(", ")
        ))
    }
}

/// A process on a simulated machine.
#[derive(Clone)]
pub struct MemoryHost {
    machine: Arc<Mutex<Machine>>,
    /// Tells who waits for a disk that hangs when that may have ended.
    released: Arc<Condvar>,
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
                machine.violation(format!("{folder} cannot be created"));
            }
        }
        let process = machine.start_process();
        MemoryHost {
            machine: Arc::new(Mutex::new(machine)),
            released: Arc::default(),
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
        self.released.notify_all();
        self.another_process()
    }

    /// Starts another process beside this one.
    pub fn another_process(&self) -> MemoryHost {
        let process = self.lock().start_process();
        MemoryHost {
            machine: Arc::clone(&self.machine),
            released: Arc::clone(&self.released),
            process,
        }
    }

    /// Ends all processes, mounts and loop devices, and starts a process in a new boot. With a
    /// power loss, what wasn't synced is lost.
    pub fn reboot(&self, power_loss: bool) -> MemoryHost {
        self.lock().reboot(power_loss);
        self.released.notify_all();
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

    /// Looks at the machine, unless that is to fail.
    fn look<T>(
        &self,
        action: &'static str,
        subject: &Path,
        look: impl FnOnce(&mut Machine) -> std::result::Result<T, HostCause>,
    ) -> Result<T> {
        self.with(action, subject, |machine| {
            machine.faults.next_look()?;
            look(machine)
        })
    }

    /// The machine, for a living process.
    fn with<T>(
        &self,
        action: &'static str,
        subject: &Path,
        work: impl FnOnce(&mut Machine) -> std::result::Result<T, HostCause>,
    ) -> Result<T> {
        let waits = |machine: &mut Machine| {
            machine.is_alive(self.process) && machine.waits(self.process, action, subject)
        };
        let machine = self.released.wait_while(self.lock(), waits);
        let mut machine = machine.unwrap_or_else(PoisonError::into_inner);
        let done = match machine.is_alive(self.process) {
            true => work(&mut machine),
            false => Err(dead()),
        };
        done.map_err(|cause| HostError {
            action,
            subject: subject.into(),
            cause,
        })
    }

    /// Keeps a loop open for this process.
    fn hold(&self, number: u32, key: u64) -> LoopHold {
        let keep = Box::new(self.keep(Closes::Opener(key)));
        LoopHold { number, keep }
    }

    fn kept(&self, closes: Closes) -> Kept {
        Kept(Box::new(self.keep(closes)))
    }

    fn keep(&self, closes: Closes) -> Keep {
        let machine = Arc::clone(&self.machine);
        Keep { machine, closes }
    }
}

/// What a dead process is told; nothing reads it in earnest.
fn dead() -> HostCause {
    HostCause::Unexpected("process is dead".into())
}

/// Something open, closed when this is dropped.
struct Keep {
    machine: Arc<Mutex<Machine>>,
    closes: Closes,
}

/// What is closed.
#[derive(Clone, Copy, Debug)]
enum Closes {
    /// An opener, by its key.
    Opener(u64),
    /// A pinned folder, by its descriptor.
    Pin(u64),
    /// A lock, by who has it on what.
    Lock(Process, Ino),
}

impl Drop for Keep {
    fn drop(&mut self) {
        let mut machine = self.machine.lock().unwrap_or_else(PoisonError::into_inner);
        match self.closes {
            Closes::Opener(key) => drop(machine.openers.remove(&key)),
            Closes::Pin(fd) => machine.unpin(fd),
            Closes::Lock(process, ino) => machine.unlock(process, ino),
        }
        machine.settle();
    }
}
