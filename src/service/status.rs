//! The code table: which gRPC code an error has for the caller of a call.
//!
//! Callers act on codes, not on texts, so the table follows from what they do:
//!
//! - external-provisioner (CreateVolume), csi-snapshotter and the kubelet (stage, publish)
//!   interpret CANCELLED, DEADLINE_EXCEEDED, UNAVAILABLE and ABORTED as "may still be in progress":
//!   they repeat the same call, and undo it before they forget the object. Every other code (except
//!   RESOURCE_EXHAUSTED, for which csi-snapshotter and the kubelet also repeat the call) is final:
//!   nothing is left, and the object can be forgotten without a delete, an unstage or an unpublish.
//! - Deletes, unstage, unpublish and detach are repeated after any error.
//! - external-resizer gives up an expansion on INVALID_ARGUMENT, NOT_FOUND and OUT_OF_RANGE, so
//!   that the user can lower the PVC's request again, and waits for pods to end on
//!   FAILED_PRECONDITION.
//!
//! The rule: **a final code is returned only if it is certain that nothing is left.** The table is
//! tested and rendered into `docs/errors.md`. No other module maps errors to codes.

#![deny(clippy::wildcard_enum_match_arm)]

use nix::errno::Errno;
use tonic::{Code, Status};

use super::Rpc;
use crate::error::{Error, HostCause, chain};

/// A message is sent in a header, percent-encoded to up to three times its length, and clients
/// accept headers of 16 KiB in total; a value from the caller may be as long as a request.
const MESSAGE_BYTES: usize = 2048;

/// The status of an error for the caller of a call. `details` stay empty, as CSI requires.
pub fn status(rpc: Rpc, error: &Error) -> Status {
    Status::new(code(rpc, error), clipped(chain(error)))
}

/// The table.
pub fn code(rpc: Rpc, error: &Error) -> Code {
    match error {
        Error::Invalid { .. } => Code::InvalidArgument,
        Error::NotFound { .. } => Code::NotFound,
        Error::Exists { .. } => Code::AlreadyExists,
        // The same call succeeds later. After `RollbackFailed`, something is left that only a retry
        // or the next start removes, so the caller must not forget the object.
        Error::Pending { .. }
        | Error::GroupInDoubt { .. }
        | Error::Busy { .. }
        | Error::RollbackFailed { .. } => Code::Aborted,
        Error::InUse { .. } | Error::Refused { .. } | Error::Locked { .. } => {
            Code::FailedPrecondition
        }
        Error::OutOfSpace { .. } | Error::SpaceGuaranteed { .. } | Error::OutOfMetadata { .. } => {
            no_space(rpc)
        }
        Error::OutOfRange { .. } => Code::OutOfRange,
        // Makes the scheduler select another node.
        Error::TopologyMismatch { .. } | Error::Unfit { .. } => Code::ResourceExhausted,
        // The code that CSI defines for an invalid token, although a retry does not help.
        Error::BadToken { .. } => Code::Aborted,
        // Final: nothing is left of the attempts. The administrator must examine the hook.
        Error::QuiesceFailed { .. } => Code::FailedPrecondition,
        // Also final; the cause was a coincidence, or a machine that is too slow.
        Error::CutLost { .. } => Code::Internal,
        // The code of the last failure.
        Error::Paused { last, .. } => self::code(rpc, last),
        Error::Unreachable { .. } | Error::Stopping => Code::Unavailable,
        Error::Forwarded { code, .. } => Code::from_i32(*code),
        Error::NotEnabled { .. } => Code::Unimplemented,
        // A record that cannot be read may be that of a volume that an earlier attempt of the same
        // call has created or staged: its storage exists, so after a final code the caller would
        // forget it. UNAVAILABLE is returned until an administrator repairs or removes the record.
        // Where callers repeat the call after any error, INTERNAL is returned.
        Error::Damaged { .. } if makes(rpc) => Code::Unavailable,
        Error::Damaged { .. } => Code::Internal,
        // Everything done before has been undone durably (a failed rollback is `RollbackFailed`),
        // so this is final.
        Error::Host { .. } if error.is_no_space() => no_space(rpc),
        // The file system does not support files of this length, however much free space it has.
        Error::Host { source, .. } if source.is_too_large() => Code::OutOfRange,
        Error::Host { source, .. } => match source.cause {
            // For an expansion, FAILED_PRECONDITION would mean "in use", and the call would not be
            // repeated.
            HostCause::Missing { .. } if !grows(rpc) => Code::FailedPrecondition,
            // LVM has suspended a thin pool while it changes it, and nothing was done.
            HostCause::Errno(Errno::EAGAIN) => Code::Aborted,
            // An unknown result must not be taken for "does not exist".
            HostCause::NoAnswer => Code::Unavailable,
            HostCause::Missing { .. }
            | HostCause::Errno(_)
            | HostCause::Tool { .. }
            | HostCause::Unexpected(_) => Code::Internal,
        },
        // It is not known what a bug has left behind.
        Error::Bug { .. } if makes(rpc) => Code::Aborted,
        Error::Bug { .. } => Code::Internal,
    }
}

/// RESOURCE_EXHAUSTED makes the scheduler place a new volume elsewhere, and makes callers repeat
/// all other calls. An expansion would be repeated forever; OUT_OF_RANGE lets the user lower the
/// PVC's request again.
fn no_space(rpc: Rpc) -> Code {
    if grows(rpc) {
        Code::OutOfRange
    } else {
        Code::ResourceExhausted
    }
}

fn grows(rpc: Rpc) -> bool {
    matches!(rpc, Rpc::ControllerExpandVolume | Rpc::NodeExpandVolume)
}

/// Calls that create an object which the caller forgets after a final code.
fn makes(rpc: Rpc) -> bool {
    matches!(
        rpc,
        Rpc::CreateVolume
            | Rpc::CreateSnapshot
            | Rpc::CreateVolumeGroupSnapshot
            | Rpc::ControllerPublishVolume
            | Rpc::NodeStageVolume
            | Rpc::NodePublishVolume
    )
}

fn clipped(mut message: String) -> String {
    if message.len() > MESSAGE_BYTES {
        message.truncate(message.floor_char_boundary(MESSAGE_BYTES));
        message.push('…');
    }
    message
}

/// The name of a code in the specification.
pub fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}
