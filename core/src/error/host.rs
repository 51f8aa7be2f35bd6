//! Errors of the host: of the kernel, of a disk, or of a program.

use std::path::PathBuf;

use nix::errno::Errno;

use super::printable::printable;

/// Why the kernel or a program refused.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{action} {}", printable(subject))]
pub struct HostError {
    /// The verb, such as "open", "mount" or "fsync".
    pub action: &'static str,
    /// The object of the verb.
    pub subject: PathBuf,
    /// The cause of the failure.
    #[source]
    pub cause: HostCause,
}

/// The cause within a [`HostError`].
#[derive(Clone, Debug, thiserror::Error)]
pub enum HostCause {
    /// An errno returned by the kernel.
    #[error("{0}")]
    Errno(Errno),
    /// A program exited with an error.
    #[error("{program} failed with {status}: {stderr}")]
    Tool {
        /// Its name.
        program: String,
        /// Exit status or signal.
        status: String,
        /// The first lines of its stderr, without control characters.
        stderr: String,
    },
    /// A required program is not installed.
    #[error("program {program} is not installed (package {package})")]
    Missing {
        /// Its name.
        program: String,
        /// The Debian package that contains it.
        package: &'static str,
    },
    /// The state that was found is not the required one.
    #[error("{0}")]
    Unexpected(String),
    /// There was no answer in time. The outcome of the request is unknown.
    #[error("no answer in time; the disk or the server behind it hangs")]
    NoAnswer,
}

impl HostError {
    /// Creates an error with an errno.
    pub fn errno(action: &'static str, subject: impl Into<PathBuf>, errno: Errno) -> Self {
        HostError {
            action,
            subject: subject.into(),
            cause: HostCause::Errno(errno),
        }
    }

    /// Creates an error from an I/O error; if it has no errno, its text is used.
    pub fn io(action: &'static str, subject: impl Into<PathBuf>, error: &std::io::Error) -> Self {
        let cause = match error.raw_os_error() {
            Some(code) => HostCause::Errno(Errno::from_raw(code)),
            None => HostCause::Unexpected(error.to_string()),
        };
        HostError {
            action,
            subject: subject.into(),
            cause,
        }
    }

    /// Creates an error with a message.
    pub fn unexpected(
        action: &'static str,
        subject: impl Into<PathBuf>,
        what: impl Into<String>,
    ) -> Self {
        HostError {
            action,
            subject: subject.into(),
            cause: HostCause::Unexpected(what.into()),
        }
    }

    /// The errno, if the cause is one.
    pub fn code(&self) -> Option<Errno> {
        match &self.cause {
            HostCause::Errno(errno) => Some(*errno),
            HostCause::Tool { .. }
            | HostCause::Missing { .. }
            | HostCause::Unexpected(_)
            | HostCause::NoAnswer => None,
        }
    }

    /// Creates the error of a request that was not answered in time.
    pub fn no_answer(action: &'static str, subject: impl Into<PathBuf>) -> Self {
        HostError {
            action,
            subject: subject.into(),
            cause: HostCause::NoAnswer,
        }
    }

    /// Whether the request was not answered in time.
    pub fn is_no_answer(&self) -> bool {
        matches!(self.cause, HostCause::NoAnswer)
    }

    /// Whether the cause means that a file system is dead: shut down, or without its disk.
    pub fn is_dead_disk(&self) -> bool {
        matches!(self.code(), Some(Errno::EIO | Errno::ESHUTDOWN))
    }

    /// Whether the cause means that the file system does not support files of such a length.
    pub fn is_too_large(&self) -> bool {
        self.code() == Some(Errno::EFBIG)
    }

    /// Whether the cause means that a file system is dead or can no longer be written.
    pub fn is_lost_disk(&self) -> bool {
        self.is_dead_disk()
            || matches!(
                self.code(),
                Some(Errno::ENODEV | Errno::ENXIO | Errno::EROFS | Errno::EUCLEAN | Errno::ESTALE)
            )
    }

    /// Whether the cause means that the disk is full.
    pub fn is_no_space(&self) -> bool {
        matches!(self.code(), Some(Errno::ENOSPC | Errno::EDQUOT))
    }
}
