//! The code table: which gRPC code an error is for the caller of a call.
//!
//! The callers act on codes, not on texts, so the table is made by what they do:
//!
//! - external-provisioner (CreateVolume), csi-snapshotter and the kubelet (stage, publish) take
//!   CANCELLED, DEADLINE_EXCEEDED, UNAVAILABLE and ABORTED for "may still be in progress": they
//!   repeat the same call, and undo it before they let go of it. Every other code (but
//!   RESOURCE_EXHAUSTED, which snapshotter and kubelet also repeat) is final: nothing is left, the
//!   object can be forgotten without a delete, an unstage or an unpublish.
//! - Deletes, unstage, unpublish and detach are repeated after any error.
//! - external-resizer gives up growth on INVALID_ARGUMENT, NOT_FOUND and OUT_OF_RANGE, so that the
//!   user can lower the claim again, and waits for pods to end on FAILED_PRECONDITION.
//!
//! The rule: **a final code only where it's certain that nothing is left.** The table is tested
//! and rendered into `docs/errors.md`. This is the only place that knows codes.

#![deny(clippy::wildcard_enum_match_arm)]

use tonic::{Code, Status};

use super::Rpc;
use crate::error::{Error, HostCause, chain};

/// A message travels in a header, percent-encoded to up to three times its length, and clients
/// take headers of 16 KiB in all; what a caller gave may be as long as a request.
const MESSAGE_BYTES: usize = 2048;

/// An error as the caller of a call gets it. `details` stay empty, as the specification demands.
pub fn status(rpc: Rpc, error: &Error) -> Status {
    Status::new(code(rpc, error), clipped(chain(error)))
}

/// The table.
pub fn code(rpc: Rpc, error: &Error) -> Code {
    match error {
        Error::Invalid { .. } => Code::InvalidArgument,
        Error::NotFound { .. } => Code::NotFound,
        Error::Exists { .. } => Code::AlreadyExists,
        // The same call is right a moment later. For `Undo`, something is left that only a retry
        // or the next start removes: the caller must not forget the object.
        Error::Pending { .. }
        | Error::Unsettled { .. }
        | Error::Busy { .. }
        | Error::RollbackFailed { .. } => Code::Aborted,
        Error::InUse { .. } | Error::Refused { .. } | Error::Locked { .. } => {
            Code::FailedPrecondition
        }
        Error::OutOfSpace { .. } | Error::Promised { .. } => no_space(rpc),
        Error::OutOfRange { .. } => Code::OutOfRange,
        // The scheduler is asked for another node.
        Error::TopologyMismatch { .. } => Code::ResourceExhausted,
        // The specification's own code for a token, although no retry helps.
        Error::BadToken { .. } => Code::Aborted,
        // Final: nothing is left of the tries. The administrator has to look at the hook.
        Error::QuiesceFailed { .. } => Code::FailedPrecondition,
        // As final; only chance, or a machine too slow, was against it.
        Error::CutLost { .. } => Code::Internal,
        // What it was before.
        Error::Paused { last, .. } => self::code(rpc, last),
        Error::Unreachable { .. } | Error::Stopping => Code::Unavailable,
        Error::Forwarded { code, .. } => Code::from_i32(*code),
        Error::Unsupported { .. } => Code::Unimplemented,
        // A record that can't be read may be that of a volume which an earlier try of the same
        // call has made, or has staged: its storage is there, so a final code would have it
        // forgotten. UNAVAILABLE goes on until somebody repairs or removes the record. Where
        // callers repeat anyway, the plain word for "broken, look at it".
        Error::Damaged { .. } if makes(rpc) => Code::Unavailable,
        Error::Damaged { .. } => Code::Internal,
        // What was done before has been undone durably (a failed undo is `Undo`): final.
        Error::Host { .. } if error.is_no_space() => no_space(rpc),
        // The file system has no files of this length, however much room there is.
        Error::Host { source, .. } if source.is_too_large() => Code::OutOfRange,
        Error::Host { source, .. } => match source.cause {
            // For growth FAILED_PRECONDITION would mean "in use", and nothing would be tried again.
            HostCause::Missing { .. } if !grows(rpc) => Code::FailedPrecondition,
            // What isn't known must not be taken for "nothing there".
            HostCause::NoAnswer => Code::Unavailable,
            HostCause::Missing { .. }
            | HostCause::Errno(_)
            | HostCause::Tool { .. }
            | HostCause::Unexpected(_) => Code::Internal,
        },
        // Nobody knows what a defect has left behind.
        Error::Bug { .. } if makes(rpc) => Code::Aborted,
        Error::Bug { .. } => Code::Internal,
    }
}

/// RESOURCE_EXHAUSTED has a new volume scheduled elsewhere, and everything else repeated. Growth
/// would be repeated for ever; OUT_OF_RANGE lets the user lower the claim again.
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

/// Calls that make something which the caller forgets after a final code.
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

/// A code as the specification writes it.
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
