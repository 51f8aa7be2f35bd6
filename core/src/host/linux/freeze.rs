//! Kernel access for freezing: the verified root of a mount, FIFREEZE, FITHAW, and starting and
//! stopping the guard's process.
//!
//! A file system is never frozen by its path: between the lookup and the freeze another file system
//! could be mounted there, or the host's own could become visible.

use std::any::Any;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::os::unix::thread::JoinHandleExt;
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use nix::errno::Errno;
use nix::sys::mman::{MlockAllFlags, mlockall};
use nix::sys::pthread::pthread_kill;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;

use super::files::{failed, open_existing, open_real_dir};
use super::{growth, sys};
use crate::error::HostError;
use crate::fault;
use crate::host::{Device, DeviceHold, MountRoot, Result};
use crate::model::FsType;

/// Opens the root of a mount, and verifies on the descriptor that it is the one on `device`.
pub(super) fn open_mount_root(
    mount_point: &Path,
    device: &Device,
    fs: FsType,
) -> Result<MountRoot> {
    // The last component must not be a symbolic link; the directories above belong to root, or come
    // from the mount table.
    let root = open_real_dir(mount_point)?;
    growth::prove_root("freeze", &root, device, mount_point, fs)?;
    Ok(MountRoot {
        device: device.clone(),
        fs,
        keep: Box::new(OwnedFd::from(root)),
    })
}

/// Writes back a whole file system; fails if any data could not be written.
pub fn sync(root: BorrowedFd<'_>) -> std::result::Result<(), Errno> {
    nix::unistd::syncfs(root)
}

/// FIFREEZE. It has no time limit; EBUSY if the file system is already frozen.
pub fn freeze(root: BorrowedFd<'_>) -> std::result::Result<(), Errno> {
    sys::fs::freeze(root)
}

/// FITHAW. EINVAL if the file system is not frozen; waits while a FIFREEZE of the same file system
/// hangs.
pub fn thaw(root: BorrowedFd<'_>) -> std::result::Result<(), Errno> {
    sys::fs::thaw(root)
}

/// Locks this process in memory, so that it can act while its disk cannot, and raises its limit of
/// open descriptors; as far as permitted.
pub fn stay_in_memory() {
    // With one arena per thread, all arenas would be locked in memory too.
    sys::use_one_arena();
    // Otherwise memory for this process could have to wait for writes to a device that it has
    // suspended itself. Threads inherit it.
    if let Err(errno) = sys::become_io_flusher() {
        tracing::debug!(%errno, "no permission to allocate memory independently of block devices");
    }
    // Without this permission the guard still works in most cases.
    let _ = mlockall(MlockAllFlags::MCL_CURRENT | MlockAllFlags::MCL_FUTURE);
    // Each file system of each session needs a descriptor.
    if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
    }
    let _ = OpenOptions::new()
        .write(true)
        .open("/proc/self/oom_score_adj")
        .and_then(|mut file| file.write_all(b"-1000"));
}

/// The signal with which [`interrupt`] ends a system call that waits.
const INTERRUPT: Signal = Signal::SIGUSR1;

/// Lets threads of this process be interrupted, and does nothing else.
pub fn allow_interrupts() -> std::result::Result<(), Errno> {
    sys::interrupt_with(INTERRUPT)
}

/// Interrupts the system call in which a thread waits, if it can be interrupted: the call returns
/// EINTR. If the thread is just about to wait, it is not interrupted; so this is repeated until the
/// call has returned.
pub fn interrupt<T>(thread: &JoinHandle<T>) {
    // The thread exists as long as it can be joined.
    let _ = pthread_kill(thread.as_pthread_t(), INTERRUPT);
}

/// A handle of a process that stays valid when its PID is reused.
pub struct Process(OwnedFd);

impl Process {
    /// Opens the process that has a PID at this moment; the caller must verify afterwards that it
    /// is the intended one.
    pub fn open(pid: u32) -> std::result::Result<Process, Errno> {
        match pid {
            // The process is in another PID namespace.
            0 => Err(Errno::ESRCH),
            pid => sys::open_process(pid).map(Process),
        }
    }

    /// Sends SIGKILL; success if the process has already exited.
    pub fn kill(&self) -> std::result::Result<(), Errno> {
        match sys::kill_process(&self.0) {
            Err(Errno::ESRCH) => Ok(()),
            other => other,
        }
    }
}

impl AsFd for Process {
    /// The descriptor is readable once the process has exited with all its threads.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A guard that this process started. It exits when this is dropped and nothing that it froze for
/// this process is frozen any more.
pub struct Started {
    stdin: Option<ChildStdin>,
    ended: Arc<AtomicBool>,
}

impl Started {
    /// Lets the guard exit, as dropping this does, without waiting for it.
    pub fn release(&mut self) {
        self.stdin = None;
    }

    /// Whether the guard's process has exited.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }
}

/// The command that runs the guard's program with its arguments.
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

/// Replaces this process with the guard. Returns only if that failed.
pub fn become_guard(
    program: &Path,
    socket: &Path,
    state_dir: &Path,
    with_parent: bool,
) -> HostError {
    let error = guard(program, socket, state_dir, with_parent).exec();
    HostError::io("run", program, &error)
}

/// Starts the guard as a separate process. It gets an empty environment and, of this process's
/// descriptors, only stderr and a pipe; end of file on the pipe signals that this process has
/// exited.
pub fn start_guard(program: &Path, socket: &Path, state_dir: &Path) -> Result<Started> {
    let mut command = guard(program, socket, state_dir, true);
    command
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::null());
    command.envs(fault::for_guard());
    sys::start_alone(&mut command);
    let mut child = command.spawn().map_err(failed("run", program))?;
    let Some(stdin) = child.stdin.take() else {
        return Err(HostError::unexpected(
            "run",
            program,
            "its stdin is not available",
        ));
    };
    // Without a thread that waits for it, the guard would become a zombie when it exits.
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
    descriptor("freeze", &root.device, root.keep.as_ref())
}

/// The descriptor of the block device within a [`DeviceHold`] of the real host.
pub fn device_fd(hold: &DeviceHold) -> Result<BorrowedFd<'_>> {
    descriptor("suspend", &hold.device, hold.keep.as_ref())
}

fn descriptor<'a>(
    action: &'static str,
    device: &Device,
    keep: &'a (dyn Any + Send + Sync),
) -> Result<BorrowedFd<'a>> {
    let keep = keep.downcast_ref::<OwnedFd>();
    keep.map(AsFd::as_fd).ok_or_else(|| {
        HostError::unexpected(action, &device.path, "it belongs to a simulated machine")
    })
}

/// Takes the lock of an existing file and holds it as long as the file is open in any process;
/// `None` if another process has it. Unlike [`files::try_lock`](super::files::try_lock), the lock
/// stays with a copy of the descriptor that was passed to the guard.
pub fn lock_shared_with_guard(path: &Path) -> Result<Option<File>> {
    let file = open_existing(path, false)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(std::fs::TryLockError::WouldBlock) => Ok(None),
        Err(std::fs::TryLockError::Error(error)) => Err(HostError::io("lock", path, &error)),
    }
}
