//! `slackwater guard`: a socket, and a session for each connection.
//!
//! Without async and without logs. It is started by the driver when it's first needed, or by
//! itself as a container of its own, and ends at SIGTERM, or once its parent is gone and no session
//! is left. Threads of a frozen session never wait for what a new connection needs (memory,
//! threads): those are made by others.

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
use super::load::Load;
use super::sweep::Sweeper;
use super::{fault, session};
use slackwater_core::error::{HostError, chain};
use slackwater_core::host::linux::expedite::Expedite;
use slackwater_core::host::linux::freeze;
use slackwater_core::host::linux::seqpacket::Listener;
use slackwater_core::host::{Effect, Host, Kept, Result};

/// How long the sweep at the start may hold up the first connection.
const SWEEP_TIMEOUT: Duration = Duration::from_secs(3);
/// Stack of the thread that sweeps, in bytes: it reads and writes records.
const SWEEP_STACK: usize = 128 << 10;
/// How often, in milliseconds, a guard that waits for another one's end looks for it.
const LOCK_POLL_MILLISECONDS: u16 = 200;
/// How often it's looked whether the last session has ended, once no more come.
const DRAIN_POLL_MILLISECONDS: u16 = 20;

/// How it's called.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where it listens.
    pub socket: PathBuf,
    /// Journal and lock.
    pub state_dir: PathBuf,
    /// Stdin is a pipe from the driver that has started it; at its end it ends, too.
    pub with_parent: bool,
}

/// Why it stops taking connections.
enum End {
    /// A signal: everything is thawed at once.
    Signal,
    /// The parent is gone, and so are its sessions. Those of another driver go on.
    Parent,
}

/// Serves until it's told to end. If another guard of this state dir lives, one that a driver has
/// started returns at once, since one is enough; one of a supervisor waits for its turn.
pub fn run(host: Arc<dyn Host>, options: &Options) -> Result<()> {
    // Ctrl-C at the driver's terminal isn't meant for us. (It fails for who is a leader already.)
    let _ = nix::unistd::setsid();
    fault::prepare();
    Journal::new(host.clone(), options.state_dir.clone()).make_folders()?;
    let signals = signals()?;
    let Some(lock) = turn(host.as_ref(), options, &signals)? else {
        return Ok(());
    };
    sweep(host.clone(), options);
    let listener = Listener::bind(&options.socket)?;
    freeze::stay_in_memory();
    let (stop, stopped) = stop_line(options)?;
    let (expedite, load) = (Arc::new(Expedite::default()), Load::default());
    let mut sessions: Vec<JoinHandle<()>> = Vec::new();
    let end = loop {
        match wait(&listener, &signals, options.with_parent) {
            Some(Some(end)) => break end,
            Some(None) => {}
            None => continue,
        }
        sessions.retain(|session| !session.is_finished());
        let Ok(channel) = listener.accept() else {
            // Out of descriptors, perhaps, until a session ends.
            thread::sleep(Duration::from_millis(u64::from(DRAIN_POLL_MILLISECONDS)));
            continue;
        };
        let (line, expedite, load) = (stopped.clone(), expedite.clone(), load.clone());
        // Without a thread the connection is closed, and its driver says so.
        let serving = thread::Builder::new().stack_size(session::STACK);
        if let Ok(session) =
            serving.spawn(move || session::serve(channel, line.as_fd(), &expedite, &load))
        {
            sessions.push(session);
        }
    };
    let left = leave(host.as_ref(), options, (listener, lock));
    drain(&signals, sessions, stop, matches!(end, End::Signal));
    left
}

/// The lock of the one guard that serves; `None` where this one isn't needed.
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

/// Signals come as bytes, and interrupt nothing.
fn signals() -> Result<SignalFd> {
    let mut set = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        set.add(signal);
    }
    set.thread_block()
        .and_then(|()| SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC))
        .map_err(|errno| HostError::errno("wait for", "signals", errno))
}

/// What an earlier guard has left; in a thread, since a FITHAW may hang.
fn sweep(host: Arc<dyn Host>, options: &Options) {
    let state_dir = options.state_dir.clone();
    let (done, wait) = std::sync::mpsc::channel();
    // Its stack stays with the process, and is locked later.
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

/// Waits for a connection (`Some(None)`) or an end; `None` if interrupted.
fn wait(listener: &Listener, signals: &SignalFd, with_parent: bool) -> Option<Option<End>> {
    let stdin = std::io::stdin();
    // POLLHUP alone, which needs no asking for: nobody ever writes there.
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

/// Makes room for another guard: first the socket goes, which is ours as long as the lock is.
fn leave(host: &dyn Host, options: &Options, listening: (Listener, Kept)) -> Result<()> {
    let removed = host.perform(&Effect::RemoveFile {
        path: &options.socket,
    });
    drop(listening);
    removed.map(drop)
}

/// Waits for the sessions to end. A signal thaws them all.
fn drain(signals: &SignalFd, sessions: Vec<JoinHandle<()>>, stop: PipeWriter, at_once: bool) {
    let mut stop = Some(stop).filter(|_| !at_once);
    while sessions.iter().any(|session| !session.is_finished()) {
        let mut ready = [PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
        let got = poll(&mut ready, PollTimeout::from(DRAIN_POLL_MILLISECONDS));
        if got.is_ok() && ready[0].any() == Some(true) {
            // Taken, or it would be there for ever.
            let _ = signals.read_signal();
            stop = None;
        }
    }
    drop(stop);
}
