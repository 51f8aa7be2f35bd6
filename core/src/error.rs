//! The one error of the driver, named by condition, and the host's error beneath it.
//!
//! `Display` of a variant says only itself, in a fragment that reads well after "failed to";
//! sources are linked and printed once, at the edge ([`chain`]). No variant knows a gRPC code:
//! `service/status.rs` does. Nothing here ever holds a secret.

use std::fmt;
use std::path::PathBuf;

/// What an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A volume.
    Volume,
    /// A snapshot.
    Snapshot,
    /// A group of snapshots.
    Group,
    /// A node of the cluster.
    Node,
    /// A pool.
    Pool,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Volume => "volume",
            Kind::Snapshot => "snapshot",
            Kind::Group => "group snapshot",
            Kind::Node => "node",
            Kind::Pool => "pool",
        })
    }
}

/// The first difference between what exists and what was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The field that differs.
    pub field: &'static str,
    /// Its value on the existing object.
    pub found: String,
    /// Its value in the request.
    pub wanted: String,
}

impl Mismatch {
    /// A difference in a field.
    pub fn new(
        field: &'static str,
        found: impl fmt::Display,
        wanted: impl fmt::Display,
    ) -> Mismatch {
        Mismatch {
            field,
            found: found.to_string(),
            wanted: wanted.to_string(),
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {} instead of {}",
            self.field, self.found, self.wanted
        )
    }
}

/// Result of everything above `host`.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation did not happen.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The request itself is wrong: nothing was changed.
    #[error("{field}: {problem}")]
    Invalid {
        /// The field of the request, by its CSI name.
        field: String,
        /// What was given and what would be right.
        problem: String,
    },
    /// The object does not exist, and every place where it could be has answered.
    #[error("{kind} {id} does not exist")]
    NotFound {
        /// What kind of object.
        kind: Kind,
        /// The id as given.
        id: String,
    },
    /// An object of this name or at this path exists and differs.
    #[error("{kind} {id} exists with {mismatch}")]
    Exists {
        /// What kind of object.
        kind: Kind,
        /// Its name or id.
        id: String,
        /// The first difference.
        mismatch: Mismatch,
    },
    /// Another operation on the same object is running.
    #[error("an operation on {what} is running; try again")]
    Pending {
        /// The object.
        what: String,
    },
    /// The object is used by somebody.
    #[error("volume {id} is in use: {holder}")]
    InUse {
        /// The volume.
        id: String,
        /// Who holds it, and how to end that.
        holder: String,
    },
    /// The object is in a state in which this must not be done.
    #[error("{subject}: {reason}")]
    Refused {
        /// The object.
        subject: String,
        /// Why, and the way out.
        reason: String,
    },
    /// Another process of this program serves a pool.
    #[error("{place}: another slackwater process serves this pool; stop that process first")]
    Locked {
        /// The pool's folder.
        place: String,
    },
    /// A member of a group can't be deleted before every member is committed or undone.
    #[error(
        "group snapshot {group} is still in doubt on some nodes, so its members cannot be deleted: {reason}; try again"
    )]
    Unsettled {
        /// The group.
        group: String,
        /// What is in the way.
        reason: String,
    },
    /// Something that is not ours holds what we need for the moment.
    #[error("{subject} is in use: {holder}")]
    Busy {
        /// The object.
        subject: String,
        /// The holder.
        holder: String,
    },
    /// The pool has not enough room.
    #[error("pool {pool} has {available} bytes available, but {required} are needed")]
    OutOfSpace {
        /// Name of the pool.
        pool: String,
        /// Bytes needed.
        required: u64,
        /// Bytes available.
        available: u64,
    },
    /// A snapshot would take room that volumes were promised.
    #[error(
        "pool {pool} guarantees {promised} bytes to its volumes (snapshots=reserved), but next to its snapshots only {room} bytes would remain for them; delete snapshots or volumes that are not needed, or enlarge the pool"
    )]
    Promised {
        /// Name of the pool.
        pool: String,
        /// Bytes that volumes were promised.
        promised: u64,
        /// Bytes that could be kept for them.
        room: u64,
    },
    /// A size that can't be met.
    #[error("{field}: {problem}")]
    OutOfRange {
        /// The field of the request.
        field: String,
        /// What was asked for and what is possible.
        problem: String,
    },
    /// No topology of the request is served here.
    #[error(
        "accessibility_requirements: none of the requisite topologies is the home of this node, {home}"
    )]
    TopologyMismatch {
        /// Our home.
        home: String,
    },
    /// A list token that this driver did not give out.
    #[error(
        "starting_token {token:?} was not issued by this driver; start the list again without a token"
    )]
    BadToken {
        /// The token.
        token: String,
    },
    /// The owner of the object can't be asked now. Never "not found".
    #[error("{what} is unavailable: {reason}")]
    Unreachable {
        /// The pool or agent.
        what: String,
        /// Why, and what would change it.
        reason: String,
    },
    /// This driver does not serve the call.
    #[error("{what} is not enabled")]
    Unsupported {
        /// The call or capability.
        what: String,
    },
    /// What is on the pool can't be understood; it's left as it is.
    #[error("{path} is damaged: {problem}", path = path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// The host refused an effect; everything done before it has been undone durably.
    #[error("{doing}")]
    Host {
        /// What was being done.
        doing: String,
        /// The host's answer.
        #[source]
        source: HostError,
    },
    /// A step failed and so did its clean-up: work is left, a retry or the next start finishes it.
    #[error("cleanup after a failure did not finish ({undo}); try again")]
    RollbackFailed {
        /// The first failure.
        #[source]
        first: Box<Error>,
        /// The failed clean-up, as text.
        undo: String,
    },
    /// An application could not be held still, or was not until the cut was made. Everything that
    /// was done has been undone durably.
    #[error("hook {hook} did not keep its application quiesced: {reason}")]
    QuiesceFailed {
        /// The hook's name; several, joined by ", ".
        hook: String,
        /// What its program did.
        reason: String,
    },
    /// A cut that was made can't be trusted, and has been thrown away, durably.
    #[error("the cut was discarded: {reason}")]
    CutLost {
        /// What is not proven.
        reason: String,
    },
    /// All tries have failed, not long ago: applications are left alone for a while.
    #[error("paused for {seconds} s after {sets} failed calls; the last error was")]
    Paused {
        /// Until the next try.
        seconds: u64,
        /// Calls that have failed, one after the other.
        sets: u32,
        /// What the last one was answered with.
        #[source]
        last: std::sync::Arc<Error>,
    },
    /// What an agent has answered, passed on as it is: its code was chosen for the same caller.
    #[error("{message}")]
    Forwarded {
        /// The gRPC code.
        code: i32,
        /// The agent's sentence.
        message: String,
    },
    /// The driver is stopping.
    #[error("the driver is stopping")]
    Stopping,
    /// A broken invariant: a defect of this program.
    #[error("internal error (please report it): violated invariant: {invariant}")]
    Bug {
        /// What should have been true.
        invariant: String,
    },
}

impl Error {
    /// A request field that is wrong.
    pub fn invalid(field: impl Into<String>, problem: impl Into<String>) -> Error {
        Error::Invalid {
            field: field.into(),
            problem: problem.into(),
        }
    }

    /// A volume that does not exist.
    pub fn no_volume(id: impl fmt::Display) -> Error {
        Error::NotFound {
            kind: Kind::Volume,
            id: id.to_string(),
        }
    }

    /// An object that is there, and not as it was asked for.
    pub fn exists(kind: Kind, id: impl fmt::Display, mismatch: Mismatch) -> Error {
        Error::Exists {
            kind,
            id: id.to_string(),
            mismatch,
        }
    }

    /// Something that must not be done in this state.
    pub fn refused(subject: impl fmt::Display, reason: impl Into<String>) -> Error {
        Error::Refused {
            subject: subject.to_string(),
            reason: reason.into(),
        }
    }

    /// The error of a call whose clean-up has ended like this: final only if nothing is left.
    pub fn with_undo(self, undone: Result<()>) -> Error {
        match undone {
            Ok(()) => self,
            Err(undo) => Error::RollbackFailed {
                first: Box::new(self),
                undo: chain(&undo),
            },
        }
    }

    /// For looks that a verb begins with: a look that fails says nothing about what an earlier
    /// try of the same call has left, so the answer must not be final.
    pub fn into_indeterminate(self) -> Error {
        match self {
            // Says so by itself.
            silent @ Error::Host {
                source:
                    HostError {
                        cause: HostCause::NoAnswer,
                        ..
                    },
                ..
            } => silent,
            first @ Error::Host { .. } => Error::RollbackFailed {
                first: Box::new(first),
                undo: "it is unknown what an earlier attempt left behind".into(),
            },
            other => other,
        }
    }

    /// Whether the root cause is a disk that is dead or takes no writes any more.
    pub fn is_lost_disk(&self) -> bool {
        matches!(self, Error::Host { source, .. } if source.is_lost_disk())
    }

    /// Whether the root cause is a full disk.
    pub fn is_no_space(&self) -> bool {
        matches!(self, Error::Host { source, .. } if source.is_no_space())
            || matches!(self, Error::OutOfSpace { .. } | Error::Promised { .. })
    }
}

/// Puts what was being done around a host's refusal.
pub trait ErrorContext<T> {
    /// `doing` is a fragment after "failed to": "format volume X".
    fn context(self, doing: impl FnOnce() -> String) -> Result<T>;
}

impl<T> ErrorContext<T> for std::result::Result<T, HostError> {
    fn context(self, doing: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|source| Error::Host {
            doing: doing(),
            source,
        })
    }
}

/// The whole chain of an error, joined by ": ".
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text.push_str(": ");
        text.push_str(&source.to_string());
        next = source.source();
    }
    text
}

/// Why the kernel or a program refused.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{action} {}", subject.display())]
pub struct HostError {
    /// The verb: "open", "mount", "fsync".
    pub action: &'static str,
    /// The object.
    pub subject: PathBuf,
    /// The cause.
    #[source]
    pub cause: HostCause,
}

/// The cause within a [`HostError`].
#[derive(Clone, Debug, thiserror::Error)]
pub enum HostCause {
    /// An errno of the kernel.
    #[error("{0}")]
    Errno(nix::errno::Errno),
    /// A program ended with an error. Its first lines of stderr, without control characters.
    #[error("{program} failed with {status}: {stderr}")]
    Tool {
        /// Its name.
        program: String,
        /// Exit status or signal.
        status: String,
        /// What it said.
        stderr: String,
    },
    /// A program that must be installed isn't.
    #[error("program {program} is not installed (package {package})")]
    Missing {
        /// Its name.
        program: String,
        /// The Debian package that has it.
        package: &'static str,
    },
    /// What was found is not what must be there.
    #[error("{0}")]
    Unexpected(String),
    /// There was no answer in time. It says nothing about what was asked for.
    #[error("no answer in time; the disk or the server behind it hangs")]
    NoAnswer,
}

impl HostError {
    /// With an errno.
    pub fn errno(
        action: &'static str,
        subject: impl Into<PathBuf>,
        errno: nix::errno::Errno,
    ) -> Self {
        HostError {
            action,
            subject: subject.into(),
            cause: HostCause::Errno(errno),
        }
    }

    /// With an I/O error; one without an errno is told as text.
    pub fn io(action: &'static str, subject: impl Into<PathBuf>, error: &std::io::Error) -> Self {
        let cause = match error.raw_os_error() {
            Some(code) => HostCause::Errno(nix::errno::Errno::from_raw(code)),
            None => HostCause::Unexpected(error.to_string()),
        };
        HostError {
            action,
            subject: subject.into(),
            cause,
        }
    }

    /// With a sentence.
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

    /// The errno, if it is one.
    pub fn code(&self) -> Option<nix::errno::Errno> {
        match &self.cause {
            HostCause::Errno(errno) => Some(*errno),
            HostCause::Tool { .. }
            | HostCause::Missing { .. }
            | HostCause::Unexpected(_)
            | HostCause::NoAnswer => None,
        }
    }

    /// With no answer in time.
    pub fn no_answer(action: &'static str, subject: impl Into<PathBuf>) -> Self {
        HostError {
            action,
            subject: subject.into(),
            cause: HostCause::NoAnswer,
        }
    }

    /// Whether it says that a file system is dead: shut down, or without its disk.
    pub fn is_dead_disk(&self) -> bool {
        matches!(
            self.code(),
            Some(nix::errno::Errno::EIO | nix::errno::Errno::ESHUTDOWN)
        )
    }

    /// Whether it says that the file system has no files of such a length.
    pub fn is_too_large(&self) -> bool {
        self.code() == Some(nix::errno::Errno::EFBIG)
    }

    /// Whether it says that a file system is dead, or can't be written any more.
    pub fn is_lost_disk(&self) -> bool {
        use nix::errno::Errno;
        self.is_dead_disk()
            || matches!(
                self.code(),
                Some(Errno::ENODEV | Errno::ENXIO | Errno::EROFS | Errno::EUCLEAN | Errno::ESTALE)
            )
    }

    /// Whether it says that the disk is full.
    pub fn is_no_space(&self) -> bool {
        matches!(
            self.code(),
            Some(nix::errno::Errno::ENOSPC | nix::errno::Errno::EDQUOT)
        )
    }
}
