//! A simulated host with the kernel's rules, in plain safe Rust.
//!
//! A [`MemoryHost`] is a handle of one *process* on one *machine*. Disk, loop devices, mounts and
//! the boot ID belong to the machine and survive the process; open devices, locks and pinned
//! directories are released with the process (`restart_process`).
//! `reboot` removes mounts and loop devices, and with a power loss everything that
//! was not synced, in the most adverse way that the kernel permits.
//!
//! The machine also has thin pools, as the kernel's dm-thin has them (`thin`).
//!
//! The simulation records when an invariant of the driver is broken (`violations`):
//! data formatted over, a second loop device on an image, a rename of a file that was not synced.
//! Because every change passes through [`super::Host::perform`], a test can make any of them fail
//! or be the last (`fail_effect`).

#![cfg_attr(
    not(any(test, feature = "testing")),
    expect(dead_code, reason = "only tests cause these states")
)]

mod check;
mod clones;
mod content;
mod disk;
mod fault;
mod foreign_file;
mod freezer;
mod kernel;
mod lasting;
mod linear;
mod loops;
mod machine;
mod mapped;
mod mounts;
mod perform;
mod pool_setup;
mod range;
mod sync;
mod targets;
#[cfg(any(test, feature = "testing"))]
mod testing;
#[cfg(test)]
mod tests;
mod thin;
mod trees;
mod unreadable;
mod user;

use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::{Kept, LoopHold, Result};
use crate::error::{HostCause, HostError};
use crate::model::size::GIB;
use disk::Ino;
pub use fault::FaultMode;
pub use freezer::FOREIGN_TOKEN;
use machine::{Machine, Process};
pub use pool_setup::PoolSetup;
#[cfg(any(test, feature = "testing"))]
pub use testing::{Delay, Held, Hung};
pub use unreadable::Unreadable;

/// The directory that exists on every simulated machine, on its pool's disk; pools are created
/// below it.
pub const POOLS: &str = "/memory";
/// The default directory of the node's record; it exists as well.
const STATE: &str = "/var/lib/slackwater";
/// The directory of the driver's private mounts, which show the records of thin pools.
pub const OWN_MOUNTS: &str = "/run/slackwater/pools";
/// The directory of CSI paths, unless others are configured.
const CALLERS: &str = "/var/lib/kubelet";
/// Default size of a simulated disk: enough for a few volumes of the sizes that test suites
/// request.
const CAPACITY: u64 = 100 * GIB;
/// Start of the simulated clock, which only effects advance.
const EPOCH: u64 = 1_700_000_000;

/// Configuration of a simulated machine.
#[derive(Clone, Debug)]
pub struct MemoryOptions {
    /// Size of the pool's disk in bytes.
    pub capacity: u64,
    /// Directories that contain all CSI paths.
    pub allowed: Vec<PathBuf>,
    /// Makes UUIDs and the clock reproducible, for tests.
    pub seed: Option<u64>,
    /// Logical block size of the pool's disk.
    pub sector: u32,
    /// Name of the file system that holds pools.
    pub fs_name: String,
    /// The kernel has a device mapper. The simulated thin pools do not depend on it.
    pub device_mapper: bool,
}

impl Default for MemoryOptions {
    fn default() -> MemoryOptions {
        MemoryOptions {
            capacity: CAPACITY,
            allowed: vec![CALLERS.into()],
            seed: None,
            sector: 512,
            fs_name: "xfs".into(),
            device_mapper: true,
        }
    }
}

impl MemoryOptions {
    /// Whether files of the pool's disk can share blocks.
    fn shares_blocks(&self) -> bool {
        matches!(self.fs_name.as_str(), "xfs" | "btrfs")
    }

    /// Implements [`Host::check_path`].
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
    /// Wakes threads that wait for a hanging disk when that may have ended.
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

    /// Like [`MemoryHost::new`], with the whole configuration.
    pub fn with_options(options: MemoryOptions) -> MemoryHost {
        let mut machine = Machine::boot(options);
        for folder in [POOLS, STATE, "/run/slackwater"] {
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

    /// Creates a directory and its parents durably, as an administrator would have done before.
    pub fn make_folder(&self, path: &Path) -> Result<()> {
        let created = self.lock().make_folder(path);
        created
            .map(drop)
            .map_err(|errno| HostError::errno("make", path, errno))
    }

    /// Starts another process on the same machine.
    pub fn another_process(&self) -> MemoryHost {
        let process = self.lock().start_process();
        MemoryHost {
            machine: Arc::clone(&self.machine),
            released: Arc::clone(&self.released),
            process,
        }
    }

    /// Ignores poisoning: a panic of another thread leaves the machine in one of its valid states.
    fn lock(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a query on the machine, unless it is planned to fail.
    fn look<T>(
        &self,
        action: &'static str,
        subject: &Path,
        look: impl FnOnce(&mut Machine) -> std::result::Result<T, HostCause>,
    ) -> Result<T> {
        self.with(action, subject, |machine| {
            machine.faults.next_query()?;
            look(machine)
        })
    }

    /// The machine, for a live process.
    fn with<T>(
        &self,
        action: &'static str,
        subject: &Path,
        work: impl FnOnce(&mut Machine) -> std::result::Result<T, HostCause>,
    ) -> Result<T> {
        let waits = |machine: &mut Machine| {
            machine.is_alive(self.process)
                && (machine.waits(self.process, action, subject)
                    || self.is_delayed(machine, action))
        };
        let machine = self.released.wait_while(self.lock(), waits);
        let mut machine = machine.unwrap_or_else(PoisonError::into_inner);
        machine.pass_delayed(action);
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

    /// Holds a loop device open for this process.
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

/// The error that calls of a dead process return.
fn dead() -> HostCause {
    HostCause::Unexpected("process is dead".into())
}

/// An open object, which is closed when this is dropped.
struct Keep {
    machine: Arc<Mutex<Machine>>,
    closes: Closes,
}

/// What is closed.
#[derive(Clone, Copy, Debug)]
enum Closes {
    /// An opener, by its key.
    Opener(u64),
    /// A pinned directory, by its descriptor.
    Pin(u64),
    /// A lock, by its holder and inode.
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
        machine.remove_unreferenced();
    }
}
