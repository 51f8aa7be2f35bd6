//! Our programs: started here alone. (`session` starts those that an administrator names.)
//!
//! A program is looked for in four fixed folders, never in `$PATH`; it gets an empty environment,
//! no standard input and no shell, and inherits no descriptor, since every one of ours is opened
//! close-on-exec.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use crate::error::{HostCause, HostError};
use crate::host::Result;
use crate::host::session::speakable;

/// Where distributions put system programs.
pub(super) const FOLDERS: [&str; 4] = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"];

/// A program and what to install to have it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Program {
    pub(super) name: &'static str,
    pub(super) package: &'static str,
}

pub(super) const MKFS_EXT4: Program = Program {
    name: "mkfs.ext4",
    package: "e2fsprogs",
};
pub(super) const MKFS_XFS: Program = Program {
    name: "mkfs.xfs",
    package: "xfsprogs",
};
pub(super) const MKFS_BTRFS: Program = Program {
    name: "mkfs.btrfs",
    package: "btrfs-progs",
};
pub(super) const BTRFSTUNE: Program = Program {
    name: "btrfstune",
    package: "btrfs-progs",
};
pub(super) const BLKID: Program = Program {
    name: "blkid",
    package: "util-linux",
};

/// How it ended.
pub(super) struct Ended {
    pub(super) program: Program,
    pub(super) status: ExitStatus,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

impl Program {
    pub(super) fn find(self) -> Option<PathBuf> {
        FOLDERS
            .iter()
            .map(|folder| Path::new(folder).join(self.name))
            .find(|path| path.is_file())
    }

    /// Runs it to its end, about `subject`.
    #[expect(
        clippy::disallowed_methods,
        reason = "the one place that starts programs"
    )]
    pub(super) fn run<S: AsRef<OsStr>>(self, subject: &Path, arguments: &[S]) -> Result<Ended> {
        let path = self.find().ok_or_else(|| HostError {
            action: "run a program for",
            subject: subject.to_path_buf(),
            cause: HostCause::Missing {
                program: self.name.to_string(),
                package: self.package,
            },
        })?;
        let output = Command::new(&path)
            .args(arguments)
            .env_clear()
            .env("LC_ALL", "C")
            .env("PATH", FOLDERS.join(":"))
            .current_dir("/")
            .stdin(Stdio::null())
            .output()
            .map_err(|error| HostError::io("run", &path, &error))?;
        Ok(Ended {
            program: self,
            status: output.status,
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: speakable(&String::from_utf8_lossy(&output.stderr)),
        })
    }
}

impl Ended {
    /// The error that this end is.
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
    fn a_program_that_is_not_there_is_named_with_its_package() {
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
    fn a_program_sees_no_environment_but_ours() {
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
