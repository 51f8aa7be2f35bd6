//! Which errors are final for a caller, and which are a lack of space.

use nix::errno::Errno;

use super::{Error, HostCause};

impl Error {
    /// Whether a caller may forget the object: nothing runs or is left that a repeat of
    /// the call would continue or delete.
    pub fn is_final(&self) -> bool {
        match self {
            Error::Pending { .. }
            | Error::GroupInDoubt { .. }
            | Error::Busy { .. }
            | Error::RollbackFailed { .. }
            | Error::Unreachable { .. }
            | Error::Damaged { .. }
            | Error::Stopping
            | Error::Bug { .. } => false,
            Error::Paused { last, .. } => last.is_final(),
            // CANCELLED, DEADLINE_EXCEEDED, ABORTED and UNAVAILABLE.
            Error::Forwarded { code, .. } => ![1, 4, 10, 14].contains(code),
            Error::Host { source, .. } => !matches!(
                source.cause,
                HostCause::NoAnswer | HostCause::Errno(Errno::EAGAIN)
            ),
            _ => true,
        }
    }

    /// Whether the root cause is a full disk.
    pub fn is_no_space(&self) -> bool {
        matches!(self, Error::Host { source, .. } if source.is_no_space())
            || matches!(
                self,
                Error::OutOfSpace { .. }
                    | Error::SpaceGuaranteed { .. }
                    | Error::OutOfMetadata { .. }
            )
    }
}
