//! What freezing needs of the kernel: the verified root of a mount, FIFREEZE, FITHAW, and the
//! start and the end of the guard's process.
//!
//! A file system is never frozen by its path: between the look-up and the act another one could
//! be mounted there, the host's own among them.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use nix::errno::Errno;
use nix::sys::mman::{MlockAllFlags, mlockall};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::files::{failed, open_existing, open_real_dir};
use super::{growth, sys};
use crate::error::HostError;
use crate::host::{Device, MountRoot, Result};
use crate::model::FsType;

/// The variable that plans a fault of the guard (builds for tests).
#[cfg(feature = "fault")]
pub const GUARD_FAULT: &str = "SLACKWATER_GUARD_FAULT";

/// Opens the root of a mount, and proves on the descriptor that it's the one on `device`.
pub(super) fn open_mount_root(
    mount_point: &Path,
    device: &Device,
    fs: FsType,
) -> Result<MountRoot> {
    // No link at the end; directories above belong to root or were walked to by the mount table.
    let root = open_real_dir(mount_point)?;
    growth::prove_root("freeze", &root, device, mount_point, fs)?;
    Ok(MountRoot {
        device: device.clone(),
        keep: Box::new(OwnedFd::from(root)),
    })
}

/// Writes back a whole file system; its error is that of anything that couldn't be written.
pub fn sync(root: BorrowedFd<'_>) -> std::result::Result<(), Errno> {
    nix::unistd::syncfs(root)
}

/// FIFREEZE. Without a limit in time; EBUSY if somebody has frozen it already.
pub fn freeze(root: BorrowedFd<'_>) -> std::result::Result<(), Errno> {
    sys::fs::freeze(root)
}

/// FITHAW. EINVAL if it isn't frozen; waits while a FIFREEZE of the same file system hangs.
pub fn thaw(root: BorrowedFd<'_>) -> std::result::Result<(), Errno> {
    sys::fs::thaw(root)
}

/// Keeps this process in memory, so that it can act while its disk can't, and gives it all the
/// descriptors that it may have; as far as permitted.
pub fn stay_in_memory() {
    // An arena for each thread would be locked as well.
    sys::use_one_arena();
    // Without the right to it, the guard works all the same, mostly.
    let _ = mlockall(MlockAllFlags::MCL_CURRENT | MlockAllFlags::MCL_FUTURE);
    // Each file system of each session is a descriptor here.
    if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
    }
    let _ = OpenOptions::new()
        .write(true)
        .open("/proc/self/oom_score_adj")
        .and_then(|mut file| file.write_all(b"-1000"));
}

/// A process that stays the one it is, whatever becomes of its number.
pub struct Process(OwnedFd);

impl Process {
    /// The process of a number at this moment; the caller proves afterwards that it was the right
    /// one.
    pub fn open(pid: u32) -> std::result::Result<Process, Errno> {
        match pid {
            // A process of another pid namespace.
            0 => Err(Errno::ESRCH),
            pid => sys::open_process(pid).map(Process),
        }
    }

    /// SIGKILL; success if it has ended already.
    pub fn kill(&self) -> std::result::Result<(), Errno> {
        match sys::kill_process(&self.0) {
            Err(Errno::ESRCH) => Ok(()),
            other => other,
        }
    }
}

impl AsFd for Process {
    /// Readable once the process has ended with all its threads.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A guard that was started, and ends when this is dropped (once nothing of ours is frozen).
pub struct Started {
    stdin: Option<ChildStdin>,
    ended: Arc<AtomicBool>,
}

impl Started {
    /// Lets it end, as dropping this does, without waiting for its end.
    pub fn release(&mut self) {
        self.stdin = None;
    }

    /// Whether its process has ended.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }
}

/// The guard's program with what it needs to know.
#[expect(
    clippy::disallowed_methods,
    reason = "the guard's program lies beside the driver's, not in one of the system's folders"
)]
fn guard(program: &Path, socket: &Path, state_dir: &Path, with_parent: bool) -> Command {
    let mut command = Command::new(program);
    command.arg("--socket").arg(socket);
    command.arg("--state-dir").arg(state_dir);
    command.args(with_parent.then_some("--with-parent"));
    command
}

/// Makes this process the guard. Returns only why that failed.
pub fn become_guard(
    program: &Path,
    socket: &Path,
    state_dir: &Path,
    with_parent: bool,
) -> HostError {
    let error = guard(program, socket, state_dir, with_parent).exec();
    HostError::io("run", program, &error)
}

/// Starts the guard as a process of its own: an empty environment, and of this process's
/// descriptors only stderr and a pipe, whose end signals that this process has ended.
pub fn start_guard(program: &Path, socket: &Path, state_dir: &Path) -> Result<Started> {
    let mut command = guard(program, socket, state_dir, true);
    command
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::null());
    #[cfg(feature = "fault")]
    if let Some(fault) = std::env::var_os(GUARD_FAULT) {
        command.env(GUARD_FAULT, fault);
    }
    sys::start_alone(&mut command);
    let mut child = command.spawn().map_err(failed("run", program))?;
    let Some(stdin) = child.stdin.take() else {
        return Err(HostError::unexpected(
            "run",
            program,
            "its stdin is not available",
        ));
    };
    // Without somebody who waits for it, its end would leave a zombie.
    let reaper = thread::Builder::new().name("guard-reaper".into());
    let ended = Arc::new(AtomicBool::new(false));
    let noted = ended.clone();
    reaper
        .spawn(move || {
            drop(child.wait());
            noted.store(true, Ordering::SeqCst);
        })
        .map_err(failed("wait for", program))?;
    Ok(Started {
        stdin: Some(stdin),
        ended,
    })
}

/// The descriptor within a [`MountRoot`] of the real host.
pub fn root_fd(root: &MountRoot) -> Result<BorrowedFd<'_>> {
    let keep = root.keep.downcast_ref::<OwnedFd>();
    keep.map(AsFd::as_fd).ok_or_else(|| {
        HostError::unexpected(
            "freeze",
            &root.device.path,
            "it belongs to a simulated machine",
        )
    })
}

/// Takes the lock of a file that exists, for as long as it's open anywhere, in other processes
/// too; `None` if another has it. Unlike a lock that is given back when dropped, it stays with a
/// copy of the descriptor that was handed to the guard.
pub fn lock_shared_with_guard(path: &Path) -> Result<Option<File>> {
    let file = open_existing(path, false)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(std::fs::TryLockError::WouldBlock) => Ok(None),
        Err(std::fs::TryLockError::Error(error)) => Err(HostError::io("lock", path, &error)),
    }
}
