//! The driver's error type, named by condition, and the host error that it may wrap.
//!
//! `Display` of a variant prints only its own text, a fragment that reads well after "failed to";
//! sources are linked and printed once, by [`chain`] at the outermost caller. No variant contains a
//! gRPC code: `service/status.rs` maps them. An error never holds a secret.

mod finality;
mod host;
mod printable;

use std::fmt;
use std::path::PathBuf;

pub use host::{HostCause, HostError};

/// What kind of object an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Volume,
    Snapshot,
    /// A group of snapshots.
    Group,
    /// A node of the cluster.
    Node,
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
    /// Creates the difference of one field.
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

/// Result of every layer above `host`.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The request itself is invalid; nothing was changed.
    #[error("{field}: {problem}")]
    Invalid {
        /// The field of the request, by its CSI name.
        field: String,
        /// The value that was given and what is allowed.
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
    /// An object with this name or at this path exists and differs.
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
    /// The object is in use by a process, mount or call.
    #[error("volume {id} is in use: {holder}")]
    InUse {
        /// The volume.
        id: String,
        /// What holds it, and how to release it.
        holder: String,
    },
    /// The object is in a state in which the operation is not allowed.
    #[error("{subject}: {reason}")]
    Refused {
        /// The object.
        subject: String,
        /// The reason, and what the caller can do.
        reason: String,
    },
    /// Another process of this program serves a pool.
    #[error("{place}: another slackwater process serves this pool; stop that process first")]
    Locked {
        /// The pool's directory.
        place: String,
    },
    /// A member of a group cannot be deleted before every member is committed or rolled back.
    #[error(
        "group snapshot {group} is still in doubt on some nodes, so its members cannot be deleted: {reason}; try again"
    )]
    GroupInDoubt {
        group: String,
        /// What prevents the deletion.
        reason: String,
    },
    /// A foreign process, mount or device currently holds what the operation needs.
    #[error("{subject} is in use: {holder}")]
    Busy {
        /// The object.
        subject: String,
        holder: String,
    },
    /// The pool does not have enough free space.
    #[error(
        "pool {pool} has {available} bytes available, but {required} are needed; delete snapshots or volumes that are not needed, or {enlarge}"
    )]
    OutOfSpace {
        /// Name of the pool.
        pool: String,
        /// How an administrator enlarges it ([`PoolPlace::enlarge`](crate::model::PoolPlace::enlarge)).
        enlarge: String,
        /// Bytes needed.
        required: u64,
        /// Bytes available.
        available: u64,
    },
    /// A snapshot would use space that is guaranteed to volumes.
    #[error(
        "pool {pool} guarantees {provisioned} bytes to its volumes (snapshots=reserved), but next to its snapshots only {room} bytes would remain for them; delete snapshots or volumes that are not needed, or {enlarge}"
    )]
    SpaceGuaranteed {
        /// Name of the pool.
        pool: String,
        /// How an administrator enlarges it ([`PoolPlace::enlarge`](crate::model::PoolPlace::enlarge)).
        enlarge: String,
        /// Bytes guaranteed to volumes.
        provisioned: u64,
        /// Bytes that could be kept available for them.
        room: u64,
    },
    /// A thin pool has too little metadata that is free and not reserved for thick volumes.
    #[error(
        "pool {pool} has {available} bytes of metadata that are free and not reserved for thick volumes, but {required} are needed; run: lvextend --poolmetadatasize +SIZE {place}; or delete snapshots"
    )]
    OutOfMetadata {
        /// Name of the pool.
        pool: String,
        /// The thin pool: VG/POOL.
        place: String,
        /// Bytes needed, including those that stay free.
        required: u64,
        /// Bytes available.
        available: u64,
    },
    /// A size that cannot be provided.
    #[error("{field}: {problem}")]
    OutOfRange {
        /// The field of the request.
        field: String,
        /// The size that was requested and the sizes that are possible.
        problem: String,
    },
    /// This node serves none of the topologies in the request.
    #[error(
        "accessibility_requirements: none of the requisite topologies is the home of this node, {home}"
    )]
    TopologyMismatch {
        /// The topology segment of this node.
        home: String,
    },
    /// The pool of this node cannot have the copy of a snapshot, whatever is repeated. That of
    /// another node may.
    #[error("pool {pool} cannot have a copy of the snapshot: {reason}")]
    Unfit {
        /// Name of the pool.
        pool: String,
        reason: String,
    },
    /// A list token that this driver did not issue.
    #[error(
        "starting_token {token:?} was not issued by this driver; start the list again without a token"
    )]
    BadToken { token: String },
    /// The owner of the object cannot be queried now. This is never reported as "not found".
    #[error("{what} is unavailable: {reason}")]
    Unreachable {
        /// The pool or agent.
        what: String,
        /// The reason, and what would change it.
        reason: String,
    },
    /// The call needs an alpha feature that is not enabled.
    #[error("{what} is not enabled")]
    NotEnabled {
        /// The call or capability.
        what: String,
    },
    /// A file on the pool cannot be parsed; it is left unchanged.
    #[error("{path} is damaged: {problem}", path = path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with the file.
        problem: String,
    },
    /// The host refused an effect; everything done before it has been undone durably.
    #[error("{doing}")]
    Host {
        /// The operation that was attempted.
        doing: String,
        #[source]
        source: HostError,
    },
    /// A step failed and so did its rollback. Some work is left; a retry or the next start of the
    /// driver finishes it.
    #[error("cleanup after a failure did not finish ({undo}); try again")]
    RollbackFailed {
        /// The first failure.
        #[source]
        first: Box<Error>,
        /// The failed rollback, as text.
        undo: String,
    },
    /// An application could not be quiesced, or did not stay quiesced until the cut was taken.
    /// Everything that was done has been undone durably.
    #[error("hook {hook} did not keep its application quiesced: {reason}")]
    QuiesceFailed {
        /// The name of the hook; if several failed, their names joined by ", ".
        hook: String,
        /// What the hook's program did.
        reason: String,
    },
    /// The cut was taken but its consistency could not be verified, so it has been deleted durably.
    #[error("the cut was discarded: {reason}")]
    CutLost {
        /// Which condition could not be verified.
        reason: String,
    },
    /// All recent attempts have failed, so applications are not quiesced again for a while.
    #[error("paused for {seconds} s after {sets} failed calls; the last error was")]
    Paused {
        /// Seconds until the next attempt.
        seconds: u64,
        /// Number of consecutive calls that failed.
        sets: u32,
        /// The error of the last call.
        #[source]
        last: std::sync::Arc<Error>,
    },
    /// The error of an agent, forwarded unchanged: its code was chosen for the same caller.
    #[error("{message}")]
    Forwarded {
        /// The gRPC code.
        code: i32,
        /// The agent's message.
        message: String,
    },
    /// The driver is stopping.
    #[error("the driver is stopping")]
    Stopping,
    /// A broken invariant: a bug in this program.
    #[error("internal error (please report it): violated invariant: {invariant}")]
    Bug {
        /// The condition that should have held.
        invariant: String,
    },
}

impl Error {
    /// Creates the error of an invalid request field.
    pub fn invalid(field: impl Into<String>, problem: impl Into<String>) -> Error {
        Error::Invalid {
            field: field.into(),
            problem: problem.into(),
        }
    }

    /// Creates the error of an object that does not exist.
    pub fn not_found(kind: Kind, id: impl fmt::Display) -> Error {
        let id = id.to_string();
        Error::NotFound { kind, id }
    }

    /// Creates the error of a volume that does not exist.
    pub fn no_volume(id: impl fmt::Display) -> Error {
        Error::not_found(Kind::Volume, id)
    }

    /// Creates the error of an object that exists but differs from the request.
    pub fn exists(kind: Kind, id: impl fmt::Display, mismatch: Mismatch) -> Error {
        Error::Exists {
            kind,
            id: id.to_string(),
            mismatch,
        }
    }

    /// Creates the error of an operation that is not allowed in this state.
    pub fn refused(subject: impl fmt::Display, reason: impl Into<String>) -> Error {
        Error::Refused {
            subject: subject.to_string(),
            reason: reason.into(),
        }
    }

    /// Creates the error of something that another operation is working on.
    pub fn pending(what: impl fmt::Display) -> Error {
        let what = what.to_string();
        Error::Pending { what }
    }

    /// Creates the error of something that cannot be reached now.
    pub fn unreachable(what: impl fmt::Display, reason: impl Into<String>) -> Error {
        Error::Unreachable {
            what: what.to_string(),
            reason: reason.into(),
        }
    }

    /// Creates the error of a hook that did not quiesce its application.
    pub fn quiesce_failed(hook: impl fmt::Display, reason: impl Into<String>) -> Error {
        Error::QuiesceFailed {
            hook: hook.to_string(),
            reason: reason.into(),
        }
    }

    /// Creates the error of a broken invariant.
    pub fn bug(invariant: impl Into<String>) -> Error {
        let invariant = invariant.into();
        Error::Bug { invariant }
    }

    /// Combines the error of a call with the result of its rollback. The error stays final only if
    /// the rollback left nothing behind.
    pub fn with_undo(self, undone: Result<()>) -> Error {
        match undone {
            Ok(()) => self,
            Err(undo) => Error::RollbackFailed {
                first: Box::new(self),
                undo: chain(&undo),
            },
        }
    }

    /// For the queries with which an operation begins. If such a query fails, it is unknown what an
    /// earlier attempt of the same call has left behind, so the answer must not be final.
    pub fn into_indeterminate(self) -> Error {
        match self {
            // This cause is already indeterminate.
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

    /// Whether the root cause is a disk that is dead or no longer accepts writes.
    pub fn is_lost_disk(&self) -> bool {
        match self {
            Error::Host { source, .. } => source.is_lost_disk(),
            Error::RollbackFailed { first, .. } => first.is_lost_disk(),
            _ => false,
        }
    }
}

/// Adds the attempted operation to an error of the host.
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

/// Returns the whole chain of an error, joined by ": ".
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
