//! Child programs of the driver, which are started only here. (`session` starts the programs that
//! an administrator configures.)
//!
//! A program is searched for in four fixed directories, never in `$PATH`. It gets an empty
//! environment, no standard input (or the device on which it works) and no shell. It inherits no
//! other descriptor, because the driver opens every descriptor close-on-exec.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::freeze::Process;
use crate::error::{HostCause, HostError};
use crate::host::Result;
use crate::host::session::one_line_excerpt;

/// Where distributions install system programs.
pub(super) const FOLDERS: [&str; 4] = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"];

/// A program, and the package to install if it is missing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Program {
    pub(super) name: &'static str,
    pub(super) package: &'static str,
}

pub(super) const MKFS_EXT4: Program = Program::new("mkfs.ext4", "e2fsprogs");
pub(super) const MKFS_XFS: Program = Program::new("mkfs.xfs", "xfsprogs");
pub(super) const MKFS_BTRFS: Program = Program::new("mkfs.btrfs", "btrfs-progs");
pub(super) const BTRFSTUNE: Program = Program::new("btrfstune", "btrfs-progs");
pub(super) const E2FSCK: Program = Program::new("e2fsck", "e2fsprogs");
pub(super) const RESIZE2FS: Program = Program::new("resize2fs", "e2fsprogs");
pub(super) const XFS_REPAIR: Program = Program::new("xfs_repair", "xfsprogs");
pub(super) const BTRFS: Program = Program::new("btrfs", "btrfs-progs");
pub(super) const BLKID: Program = Program::new("blkid", "util-linux");

/// The result of a program that has exited.
pub(super) struct Ended {
    pub(super) program: Program,
    pub(super) status: ExitStatus,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

impl Program {
    const fn new(name: &'static str, package: &'static str) -> Program {
        Program { name, package }
    }

    pub(super) fn find(self) -> Option<PathBuf> {
        FOLDERS
            .iter()
            .map(|folder| Path::new(folder).join(self.name))
            .find(|path| path.is_file())
    }

    /// Runs the program until it exits; errors name `subject`.
    pub(super) fn run<S: AsRef<OsStr>>(self, subject: &Path, arguments: &[S]) -> Result<Ended> {
        self.run_with(Stdio::null(), None, subject, arguments)
    }

    /// Like [`Program::run`], with an open device as standard input, which the program does not
    /// read: the device stays attached until the program has exited, even if this process dies.
    pub(super) fn run_on<S: AsRef<OsStr>>(
        self,
        device: File,
        subject: &Path,
        arguments: &[S],
    ) -> Result<Ended> {
        self.run_with(device.into(), None, subject, arguments)
    }

    /// Like [`Program::run`], but kills the program if it takes longer than `limit`. Returns once
    /// the program has exited, however long that takes on a disk that hangs, so that nothing else
    /// is done to the disk at the same time.
    pub(super) fn run_within<S: AsRef<OsStr>>(
        self,
        limit: Duration,
        subject: &Path,
        arguments: &[S],
    ) -> Result<Ended> {
        self.run_with(Stdio::null(), Some(limit), subject, arguments)
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "the only place that starts programs"
    )]
    fn run_with<S: AsRef<OsStr>>(
        self,
        stdin: Stdio,
        limit: Option<Duration>,
        subject: &Path,
        arguments: &[S],
    ) -> Result<Ended> {
        let path = self.find().ok_or_else(|| HostError {
            action: "run a program for",
            subject: subject.to_path_buf(),
            cause: HostCause::Missing {
                program: self.name.to_string(),
                package: self.package,
            },
        })?;
        let child = Command::new(&path)
            .args(arguments)
            .env_clear()
            .env("LC_ALL", "C")
            .env("PATH", FOLDERS.join(":"))
            .current_dir("/")
            .stdin(stdin)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| HostError::io("run", &path, &error))?;
        let watch = limit.map(|limit| Watch::over(&child, limit)).transpose()?;
        let output = child.wait_with_output();
        let killed = watch.is_some_and(Watch::disarm);
        let output = output.map_err(|error| HostError::io("wait for", &path, &error))?;
        let stderr = one_line_excerpt(&String::from_utf8_lossy(&output.stderr));
        Ok(Ended {
            program: self,
            status: output.status,
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: match limit {
                Some(limit) if killed => format!("it was killed after {limit:?}; {stderr}"),
                Some(_) | None => stderr,
            },
        })
    }
}

/// Kills a child that takes too long.
struct Watch {
    done: Sender<()>,
    killed: JoinHandle<bool>,
}

impl Watch {
    fn over(child: &Child, limit: Duration) -> Result<Watch> {
        let subject = PathBuf::from(child.id().to_string());
        // The child has not been waited for, so its PID cannot be reused.
        let process = Process::open(child.id())
            .map_err(|errno| HostError::errno("watch process", &subject, errno))?;
        let (done, ended) = channel();
        let watching = thread::Builder::new().name("program-watch".into());
        let killed = watching.spawn(move || {
            let late = ended.recv_timeout(limit) == Err(RecvTimeoutError::Timeout);
            late && process.kill().is_ok()
        });
        let killed = killed.map_err(|error| HostError::io("watch process", subject, &error))?;
        Ok(Watch { done, killed })
    }

    /// Stops the watch after the child has exited; returns whether the child was killed.
    fn disarm(self) -> bool {
        drop(self.done);
        self.killed.join().unwrap_or(false)
    }
}

impl Ended {
    /// The error that describes this exit.
    pub(super) fn error(&self, action: &'static str, subject: &Path) -> HostError {
        HostError {
            action,
            subject: subject.to_path_buf(),
            cause: HostCause::Tool {
                program: self.program.name.to_string(),
                status: self.status.to_string(),
                stderr: self.stderr.clone(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_named_with_its_package() {
        let none = Program {
            name: "mkfs.nosuch",
            package: "nosuch-progs",
        };
        let error = none.run(Path::new("/dev/null"), &["-x"]).err().unwrap();
        let text = crate::error::chain(&error);
        assert!(
            text.contains("mkfs.nosuch is not installed (package nosuch-progs)"),
            "{text}"
        );
    }

    #[test]
    fn a_program_that_takes_too_long_is_ended_before_the_answer() {
        let sleep = Program {
            name: "sleep",
            package: "coreutils",
        };
        let limit = Duration::from_millis(50);
        let ended = sleep.run_within(limit, Path::new("/dev/x"), &["86400"]);
        let text = crate::error::chain(&ended.unwrap().error("format", Path::new("/dev/x")));
        assert!(text.contains("SIGKILL"), "{text}");
        assert!(text.contains("it was killed after 50ms"), "{text}");
        let limit = Duration::from_secs(86400);
        let ended = sleep.run_within(limit, Path::new("/dev/x"), &["0"]);
        assert!(ended.unwrap().status.success());
    }

    #[test]
    fn a_program_gets_only_the_drivers_environment() {
        let env = Program {
            name: "env",
            package: "coreutils",
        };
        let ended = env.run::<&str>(Path::new("/"), &[]).unwrap();
        let mut lines: Vec<_> = ended.stdout.lines().collect();
        lines.sort_unstable();
        assert_eq!(lines, ["LC_ALL=C", "PATH=/usr/sbin:/sbin:/usr/bin:/bin"]);
    }
}
