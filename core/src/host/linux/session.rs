//! Sessions as processes.
//!
//! std opens every pipe close-on-exec, and so are all our descriptors: neither the guard nor
//! another session inherits the writing end of a session's stdin.

use std::io::{ErrorKind, Read};
use std::os::fd::AsFd;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::{Gid, Pid, User, geteuid, getgrouplist};

use super::program::FOLDERS;
use super::sys;
use crate::error::HostError;
use crate::host::session::{Account, Heard, Session, SessionSpec, SessionState};
use crate::host::{Done, Result};

/// So much is read in one look: a program that never stops talking doesn't hold us up.
const MAX_READ_BYTES: usize = 1 << 20;

/// Starts one.
pub(super) fn start(spec: &SessionSpec<'_>) -> Result<Done> {
    let program = spec.program;
    let mut command = command(spec);
    // Nothing is set if that's who this process is, which may not set it anyway.
    let is_other = |account: &&Account| geteuid().is_root() || account.uid != geteuid().as_raw();
    sys::start_apart(&mut command, spec.account.filter(is_other));
    let mut child = command
        .spawn()
        .map_err(|error| HostError::io("start", program, &error))?;
    let pid = Pid::from_raw(child.id() as i32);
    let session = Process {
        pid,
        stdin: child.stdin.take(),
        stdout: child.stdout.take(),
        stderr: child.stderr.take(),
        child: Some(child),
        heard: Heard::default(),
        ended: None,
    };
    let pipes = [
        session.stdout.as_ref().map(|pipe| pipe.as_fd()),
        session.stderr.as_ref().map(|pipe| pipe.as_fd()),
    ];
    for pipe in pipes.into_iter().flatten() {
        // Only our end: the program's has a file description of its own.
        fcntl(pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))
            .map_err(|errno| HostError::errno("read from", program, errno))?;
    }
    Ok(Done::Session(Box::new(session)))
}

#[expect(
    clippy::disallowed_methods,
    reason = "sessions are started here alone: an absolute path, an empty environment"
)]
fn command(spec: &SessionSpec<'_>) -> Command {
    let mut command = Command::new(spec.program);
    command
        .args(spec.arguments)
        .env_clear()
        .env("LANG", "C.UTF-8")
        .env(
            "PATH",
            format!("/usr/local/sbin:/usr/local/bin:{}", FOLDERS.join(":")),
        )
        .env("SLACKWATER_HOOK", spec.name)
        .env("SLACKWATER_SECONDS", spec.seconds.to_string())
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    if let Some(account) = spec.account {
        command
            .env("USER", &account.name)
            .env("LOGNAME", &account.name)
            .env("HOME", &account.home);
    }
    command
}

/// A user by name.
pub(super) fn account(name: &str) -> Result<Account> {
    let found = User::from_name(name).map_err(|errno| HostError::errno("find", name, errno))?;
    let user = found.ok_or_else(|| {
        let what = format!("user {name:?} does not exist on this machine");
        HostError::unexpected("find", name, what)
    })?;
    let failed = |errno| HostError::errno("find the groups of", name, errno);
    let c_name = std::ffi::CString::new(name).map_err(|_| failed(Errno::EINVAL))?;
    let groups = getgrouplist(&c_name, user.gid).map_err(failed)?;
    Ok(Account {
        name: user.name,
        home: user.dir,
        uid: user.uid.as_raw(),
        gid: user.gid.as_raw(),
        groups: groups.into_iter().map(Gid::as_raw).collect(),
    })
}

#[derive(Debug)]
struct Process {
    /// Also of its process group. Ours until it's waited for.
    pid: Pid,
    /// `None` once its end has been waited for.
    child: Option<Child>,
    stdin: Option<ChildStdin>,
    stdout: Option<ChildStdout>,
    stderr: Option<ChildStderr>,
    heard: Heard,
    ended: Option<(bool, String)>,
}

impl Process {
    fn listen(&mut self) {
        let heard = &mut self.heard;
        drain(&mut self.stdout, |bytes| heard.stdout(bytes));
        drain(&mut self.stderr, |bytes| heard.stderr(bytes));
    }

    /// Whether it has ended; it isn't waited for, so its number stays its own.
    fn has_ended(&mut self) -> bool {
        if self.child.is_none() {
            return false;
        }
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        match waitid(Id::Pid(self.pid), flags) {
            Ok(WaitStatus::StillAlive) | Err(Errno::EINTR) => false,
            Ok(_) => true,
            Err(errno) => {
                // Its number may be another's already, so nothing is sent to it.
                self.child = None;
                self.ended = Some((false, format!("an unknown exit status ({errno})")));
                false
            }
        }
    }

    /// Takes its end, and ends what it has left in its group.
    fn reap(&mut self) {
        let Some(mut child) = self.child.take() else {
            return;
        };
        // Before it's waited for: until then nobody else can have its number. ESRCH is well.
        let _ = killpg(self.pid, Signal::SIGKILL);
        self.ended = Some(match child.wait() {
            Ok(status) => (status.success(), status.to_string()),
            Err(error) => (false, format!("an unknown exit status ({error})")),
        });
    }
}

impl Session for Process {
    fn poll(&mut self) -> SessionState {
        // Its end first, its words then: what it said before its end is in the pipe.
        let has_ended = self.has_ended();
        self.listen();
        if has_ended {
            self.reap();
        }
        match &self.ended {
            Some((success, status)) => SessionState::Ended {
                was_ready: self.heard.is_ready(),
                success: *success,
                status: status.clone(),
            },
            None if self.heard.is_ready() => SessionState::Ready,
            None => SessionState::Starting,
        }
    }

    fn said(&self) -> String {
        self.heard.said()
    }

    fn let_go(&mut self) {
        self.stdin = None;
    }

    fn kill(&mut self, by_force: bool) {
        if self.child.is_some() {
            let signal = if by_force {
                Signal::SIGKILL
            } else {
                Signal::SIGTERM
            };
            // One that has just ended is seen by the next look.
            let _ = killpg(self.pid, signal);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stdin = None;
        if self.has_ended() {
            self.reap();
        }
        if let Some(mut child) = self.child.take() {
            // Somebody has to take its end, whenever that is. Without a thread, our own end does.
            let waiting = std::thread::Builder::new().name("session".into());
            let _ = waiting.spawn(move || child.wait());
        }
    }
}

/// Reads what is there; a pipe at its end is closed.
fn drain(pipe: &mut Option<impl Read>, mut take: impl FnMut(&[u8])) {
    let mut piece = [0; 8192];
    let mut read = 0;
    while let Some(open) = pipe.as_mut().filter(|_| read < MAX_READ_BYTES) {
        match open.read(&mut piece) {
            Ok(0) => *pipe = None,
            Ok(bytes) => {
                take(&piece[..bytes]);
                read += bytes;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return,
            Err(_) => *pipe = None,
        }
    }
}
