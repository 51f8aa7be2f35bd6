//! The copy of one image that is not in use, which needs no coordinator.

use std::time::Duration;

use nix::errno::Errno;

use super::local::{SYNC_BUDGET, check_ready, not_frozen, refusal};
use crate::backend::Copier;
use crate::error::{Error, ErrorContext, HostError, Result, chain};
use crate::host::freezer::FreezeLimits;
use crate::host::{self, DeviceHold, FreezeMember, Freezer};

/// Copies the image of a volume or snapshot with this ID that is not in use. Returns the number of
/// extents.
///
/// If a running copy, for example to another node, reads the image through a mapped device, the guard
/// suspends that device for this copy. So it is resumed even if this process dies.
pub(crate) fn copy_unused(
    freezer: &dyn Freezer,
    id: &str,
    copier: &dyn Copier,
    freeze_timeout: Duration,
) -> Result<u64> {
    let mapped = || {
        let mapped = copier.mapped();
        mapped.context(|| format!("open the device of {id}"))
    };
    if let Some(mapped) = mapped()? {
        return copy_suspended(freezer, id, (copier, mapped), freeze_timeout);
    }
    match copier.copy_whole() {
        Err(error) if error.code() == Some(Errno::EBUSY) => match mapped()? {
            // It was opened just now.
            Some(mapped) => copy_suspended(freezer, id, (copier, mapped), freeze_timeout),
            None => Err(Error::Busy {
                subject: id.into(),
                holder: chain(&error),
            }),
        },
        copied => copied.context(doing(id)),
    }
}

fn doing(id: &str) -> impl Fn() -> String {
    move || format!("copy {id}")
}

fn copy_suspended(
    freezer: &dyn Freezer,
    id: &str,
    (copier, mapped): (&dyn Copier, DeviceHold),
    freeze_timeout: Duration,
) -> Result<u64> {
    let member = FreezeMember {
        volume_id: id.into(),
        namespace: None,
        image: copier.image(),
        root: None,
        mapped: Some(mapped),
    };
    let limits = FreezeLimits {
        sync: SYNC_BUDGET,
        freeze: freeze_timeout,
    };
    check_ready(freezer, true)?;
    let held = freezer.begin(vec![member], limits).map_err(refusal)?;
    let ahead = copier.copy_ahead().context(doing(id))?;
    copier.seal();
    held.freeze().map_err(not_frozen)?;
    let rest: host::Result<u64> = copier.copy_delta();
    let was_held: host::Result<bool> = held.thaw(0);
    let rest = rest.context(doing(id))?;
    let is_same = was_held.and_then(|was_held| Ok::<_, HostError>(was_held && copier.verify()?));
    match is_same.context(|| format!("verify the copy of {id}"))? {
        true => Ok(ahead + rest),
        false => Err(Error::CutLost {
            reason: format!(
                "the device of {id} was resumed, or its copy changed, before it was complete"
            ),
        }),
    }
}
