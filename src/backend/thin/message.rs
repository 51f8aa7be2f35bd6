//! Messages to a thin pool, and its status.

use super::TRANSACTION_ID;
use crate::error::HostError;
use crate::host::mapper::ThinPoolMode;
use crate::host::{self, Effect, Host, ThinMessage, ThinPoolStatus};

/// Claims a thin pool of the simulated host, which has no header.
pub(in crate::backend) fn claim(host: &dyn Host, pool: &str) -> host::Result<()> {
    let status = status(host, pool)?;
    if status.transaction_id == 0 {
        let message = ThinMessage::SetTransactionId {
            from: 0,
            to: TRANSACTION_ID,
        };
        host.perform(&Effect::ThinMessage { pool, message })?;
    }
    Ok(())
}

pub(super) fn status(host: &dyn Host, pool: &str) -> host::Result<ThinPoolStatus> {
    let absent = || HostError::unexpected("examine", pool, "there is no such thin pool");
    host.thin_pool(pool)?.ok_or_else(absent)
}

/// Sends a message to the thin pool with this name, if it has this device number.
pub(super) fn send(
    host: &dyn Host,
    pool: &str,
    rdev: u64,
    message: ThinMessage,
) -> host::Result<()> {
    check_identity(host, pool, rdev)?;
    host.perform(&Effect::ThinMessage { pool, message })
        .map(drop)
}

/// Fails if the kernel could not commit the message that was sent last. It reports no error then, but
/// takes the message back, and makes the pool read-only.
pub(super) fn check_committed(host: &dyn Host, pool: &str) -> host::Result<()> {
    match status(host, pool)?.mode {
        ThinPoolMode::ReadWrite | ThinPoolMode::OutOfData => Ok(()),
        ThinPoolMode::ReadOnly | ThinPoolMode::Failed => Err(HostError::unexpected(
            "change",
            pool,
            "the kernel could not commit the change to the metadata of the thin pool",
        )),
    }
}

/// Refuses another pool that has got the name of this one, since an administrator has renamed a
/// volume group.
pub(super) fn check_identity(host: &dyn Host, pool: &str, rdev: u64) -> host::Result<()> {
    match status(host, pool)?.rdev == rdev {
        true => Ok(()),
        false => Err(HostError::unexpected(
            "use",
            pool,
            "another thin pool has this name now; restart the driver with the present name of its pool",
        )),
    }
}
