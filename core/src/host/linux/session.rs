//! Sessions as processes.
//!
//! std opens every pipe close-on-exec, and all other descriptors of the driver are close-on-exec
//! too, so neither the guard nor another session inherits the write end of a session's stdin.

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
use crate::host::session::{Account, Session, SessionOutput, SessionSpec, SessionState};
use crate::host::{Done, Result};

/// Maximum number of bytes read in one poll, so that a program that writes without end does not
/// block the driver.
const MAX_READ_BYTES: usize = 1 << 20;

pub(super) fn start(spec: &SessionSpec<'_>) -> Result<Done> {
    let program = spec.program;
    let mut command = command(spec);
    // Nothing is set if this process already runs as that user, because then it may lack the
    // permission.
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
        output: SessionOutput::default(),
        ended: None,
    };
    let pipes = [
        session.stdout.as_ref().map(|pipe| pipe.as_fd()),
        session.stderr.as_ref().map(|pipe| pipe.as_fd()),
    ];
    for pipe in pipes.into_iter().flatten() {
        // Only the driver's end: the program's end has a file description of its own.
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

/// Looks up a user by name.
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
    /// Also the ID of its process group. It cannot be reused until the process is waited for.
    pid: Pid,
    /// `None` once it has been waited for.
    child: Option<Child>,
    stdin: Option<ChildStdin>,
    stdout: Option<ChildStdout>,
    stderr: Option<ChildStderr>,
    output: SessionOutput,
    ended: Option<(bool, String)>,
}

impl Process {
    fn listen(&mut self) {
        let output = &mut self.output;
        drain(&mut self.stdout, |bytes| output.stdout(bytes));
        drain(&mut self.stderr, |bytes| output.stderr(bytes));
    }

    /// Whether the process has exited. It is not waited for, so its PID cannot be reused.
    fn has_ended(&mut self) -> bool {
        if self.child.is_none() {
            return false;
        }
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        match waitid(Id::Pid(self.pid), flags) {
            Ok(WaitStatus::StillAlive) | Err(Errno::EINTR) => false,
            Ok(_) => true,
            Err(errno) => {
                // Its PID may have been reused, so no signal is sent to it.
                self.child = None;
                self.ended = Some((false, format!("an unknown exit status ({errno})")));
                false
            }
        }
    }

    /// Waits for the process and kills what it has left in its process group.
    fn reap(&mut self) {
        let Some(mut child) = self.child.take() else {
            return;
        };
        // This must happen before the wait: until then the PID cannot be reused. ESRCH is harmless.
        let _ = killpg(self.pid, Signal::SIGKILL);
        self.ended = Some(match child.wait() {
            Ok(status) => (status.success(), status.to_string()),
            Err(error) => (false, format!("an unknown exit status ({error})")),
        });
    }
}

impl Session for Process {
    fn poll(&mut self) -> SessionState {
        // Its exit is checked first and its output read afterwards: what it wrote before exiting is
        // in the pipe.
        let has_ended = self.has_ended();
        self.listen();
        if has_ended {
            self.reap();
        }
        match &self.ended {
            Some((success, status)) => SessionState::Ended {
                was_ready: self.output.is_ready(),
                success: *success,
                status: status.clone(),
            },
            None if self.output.is_ready() => SessionState::Ready,
            None => SessionState::Starting,
        }
    }

    fn stderr_excerpt(&self) -> String {
        self.output.stderr_excerpt()
    }

    fn close_stdin(&mut self) {
        self.stdin = None;
    }

    fn kill(&mut self, by_force: bool) {
        if self.child.is_some() {
            let signal = if by_force {
                Signal::SIGKILL
            } else {
                Signal::SIGTERM
            };
            // A process that has just exited is noticed by the next poll.
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
            // The process must be waited for, whenever it exits. If no thread can be started, init
            // does that when this process exits.
            let waiting = std::thread::Builder::new().name("session".into());
            let _ = waiting.spawn(move || child.wait());
        }
    }
}

/// Reads what is available; a pipe at its end is closed.
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
