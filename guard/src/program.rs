//! `slackwater-guard`: a socket, and a session for each connection.
//!
//! It uses neither async code nor logs. The driver starts it when it is first needed, or it runs as
//! a separate container. It exits at SIGTERM, or once its parent is gone and no session is left.
//! Threads of a frozen session never wait for what a new connection needs (memory, threads), which
//! other threads allocate.

use std::io::{PipeWriter, pipe};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::journal::Journal;
use super::session::{self, Common};
use super::sweep::Sweeper;
use slackwater_core::error::{HostError, chain};
use slackwater_core::fault;
use slackwater_core::host::linux::freeze;
use slackwater_core::host::linux::seqpacket::Listener;
use slackwater_core::host::{Effect, Host, Kept, Result};

/// How long the sweep at the start may delay the first connection.
const SWEEP_TIMEOUT: Duration = Duration::from_secs(3);
/// Stack size in bytes of the thread that sweeps: it reads and writes records.
const SWEEP_STACK: usize = 128 << 10;
/// How often a guard that waits for another one's exit tries the lock.
const LOCK_POLL_MILLISECONDS: u16 = 200;
/// Poll interval for the end of the last session, once no more are accepted.
const DRAIN_POLL_MILLISECONDS: u16 = 20;

/// The arguments of the program.
#[derive(Clone, Debug)]
pub struct Options {
    /// The path at which it listens.
    pub socket: PathBuf,
    /// The directory of the journal and the lock.
    pub state_dir: PathBuf,
    /// Stdin is a pipe from the driver that has started it; at end of file the guard exits, too.
    pub with_parent: bool,
}

/// Why it stops accepting connections.
enum End {
    /// A signal: everything is thawed at once.
    Signal,
    /// The parent is gone, and so are its sessions. Sessions of another driver continue.
    Parent,
}

/// Serves until it is asked to exit. If another guard with this state directory is alive, a guard
/// that was started by a driver returns at once, since one is enough; a guard that was started by a
/// supervisor waits until the other exits.
pub fn run(host: Arc<dyn Host>, options: &Options) -> Result<()> {
    // Ctrl-C at the driver's terminal must not reach the guard. (setsid fails if the process
    // already is a group leader.)
    let _ = nix::unistd::setsid();
    fault::check()?;
    Journal::new(host.clone(), options.state_dir.clone()).make_folders()?;
    let signals = signals()?;
    let Some(lock) = turn(host.as_ref(), options, &signals)? else {
        return Ok(());
    };
    sweep(host.clone(), options);
    let listener = Listener::bind(&options.socket)?;
    freeze::stay_in_memory();
    freeze::allow_interrupts()
        .map_err(|errno| HostError::errno("handle", "the signal for suspends that wait", errno))?;
    let (stop, stopped) = stop_line(options)?;
    let common = Arc::new(Common::default());
    // Without device mapper there are no devices to suspend; a session with one tries it again.
    let _ = common.mapper.open();
    let mut sessions: Vec<JoinHandle<()>> = Vec::new();
    let end = loop {
        match wait(&listener, &signals, options.with_parent) {
            Some(Some(end)) => break end,
            Some(None) => {}
            None => continue,
        }
        sessions.retain(|session| !session.is_finished());
        let Ok(channel) = listener.accept() else {
            // Perhaps no descriptor is free until a session ends.
            thread::sleep(Duration::from_millis(u64::from(DRAIN_POLL_MILLISECONDS)));
            continue;
        };
        let (line, common) = (stopped.clone(), common.clone());
        // If no thread can be started, the connection is closed, and the driver reports that.
        let serving = thread::Builder::new().stack_size(session::STACK_BYTES);
        if let Ok(session) = serving.spawn(move || session::serve(channel, line.as_fd(), &common)) {
            sessions.push(session);
        }
    };
    let left = leave(host.as_ref(), options, (listener, lock));
    drain(&signals, sessions, stop, matches!(end, End::Signal));
    left
}

/// The lock of the one guard that serves; `None` if this guard is not needed.
fn turn(host: &dyn Host, options: &Options, signals: &SignalFd) -> Result<Option<Kept>> {
    let path = options.state_dir.join("guard.lock");
    loop {
        let lock = host.try_lock_file(&path)?;
        if lock.is_some() || options.with_parent {
            return Ok(lock);
        }
        let mut ready = [PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
        if poll(&mut ready, LOCK_POLL_MILLISECONDS).is_ok() && ready[0].any() == Some(true) {
            return Ok(None);
        }
    }
}

fn stop_line(options: &Options) -> Result<(PipeWriter, Arc<std::io::PipeReader>)> {
    let (stopped, stop) =
        pipe().map_err(|error| HostError::io("create a pipe for", &options.socket, &error))?;
    Ok((stop, Arc::new(stopped)))
}

/// Signals are read from a descriptor, so they interrupt nothing.
fn signals() -> Result<SignalFd> {
    let mut set = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        set.add(signal);
    }
    set.thread_block()
        .and_then(|()| SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC))
        .map_err(|errno| HostError::errno("wait for", "signals", errno))
}

/// Thaws what an earlier guard has left; in a thread, since a FITHAW may hang.
fn sweep(host: Arc<dyn Host>, options: &Options) {
    let state_dir = options.state_dir.clone();
    let (done, wait) = std::sync::mpsc::channel();
    // Its stack stays allocated in the process, and is locked in memory later.
    let sweeping = thread::Builder::new().stack_size(SWEEP_STACK);
    let sweeping = sweeping.spawn(move || {
        if let Err(error) = Sweeper::new(host, state_dir).sweep(false) {
            eprintln!("slackwater: guard: {}", chain(&error));
        }
        let _ = done.send(());
    });
    if sweeping.is_ok() {
        let _ = wait.recv_timeout(SWEEP_TIMEOUT);
    }
}

/// Waits for a connection (`Some(None)`) or for a reason to exit; `None` if interrupted.
fn wait(listener: &Listener, signals: &SignalFd, with_parent: bool) -> Option<Option<End>> {
    let stdin = std::io::stdin();
    // Only POLLHUP matters, which poll always reports: nothing is ever written to this pipe.
    let parent: BorrowedFd<'_> = match with_parent {
        true => stdin.as_fd(),
        false => signals.as_fd(),
    };
    let mut ready = [
        PollFd::new(signals.as_fd(), PollFlags::POLLIN),
        PollFd::new(listener.as_fd(), PollFlags::POLLIN),
        PollFd::new(parent, PollFlags::empty()),
    ];
    poll(&mut ready, PollTimeout::NONE).ok()?;
    let is_ready = |at: usize| ready[at].any() == Some(true);
    if is_ready(0) {
        return Some(Some(End::Signal));
    }
    if is_ready(2) {
        return Some(Some(End::Parent));
    }
    is_ready(1).then_some(None)
}

/// Makes way for another guard. The socket is removed first, while this guard holds the lock.
fn leave(host: &dyn Host, options: &Options, listening: (Listener, Kept)) -> Result<()> {
    let removed = host.perform(&Effect::RemoveFile {
        path: &options.socket,
    });
    drop(listening);
    removed.map(drop)
}

/// Waits for the sessions to end. A signal thaws all of them.
fn drain(signals: &SignalFd, sessions: Vec<JoinHandle<()>>, stop: PipeWriter, at_once: bool) {
    let mut stop = Some(stop).filter(|_| !at_once);
    while sessions.iter().any(|session| !session.is_finished()) {
        let mut ready = [PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
        let got = poll(&mut ready, PollTimeout::from(DRAIN_POLL_MILLISECONDS));
        if got.is_ok() && ready[0].any() == Some(true) {
            // The signal must be read, or poll would report it again forever.
            let _ = signals.read_signal();
            stop = None;
        }
    }
    drop(stop);
}
