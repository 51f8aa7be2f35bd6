//! `slackwater pool release`: gives a thin pool back to LVM for maintenance.

use std::time::Duration;

use nix::errno::Errno;

use super::{folder, thin_pool};
use crate::backend::PoolBackend;
use crate::backend::thin::{DEVICE_PREFIX, RECORDS_ID, pool_of_records};
use crate::error::{Error, ErrorContext, Result};
use crate::host::{Effect, Host, MappedDevice};
use crate::model::{PoolDefinition, PoolId};

/// Unmounts the records of a pool and removes their device, after which LVM can deactivate the thin
/// pool. Refused while a driver serves the pool or a volume is attached. The next start of the driver
/// attaches the records again. Returns whether there was something to release.
///
/// It needs neither the header nor the records, which may be damaged.
pub fn release(host: &dyn Host, pool: &PoolDefinition) -> Result<bool> {
    let mapped = thin_pool(pool)?.mapped();
    let doing = || format!("release pool {}", pool.name);
    let devices = host.mapped_devices(mapped, DEVICE_PREFIX).context(doing)?;
    let id_of = |device: &MappedDevice| device.table.as_ref().map(|table| table.id);
    let (own, others): (Vec<_>, Vec<_>) = devices
        .into_iter()
        .filter(|device| device.table.is_some())
        .partition(|device| {
            id_of(device) == Some(RECORDS_ID) && pool_of_records(&device.uuid).is_some()
        });
    let busy = |holder: String| Error::Busy {
        subject: format!("pool {}", pool.name),
        holder,
    };
    if !others.is_empty() {
        let names: Vec<&str> = others.iter().map(|device| device.uuid.as_str()).collect();
        return Err(busy(format!(
            "{} are attached; delete the pods that use them",
            names.join(" and ")
        )));
    }
    for device in &own {
        if let Some(id) = pool_of_records(&device.uuid) {
            unmount(host, pool, id, device)?;
        }
        if host.is_claimed(&device.device).context(doing)? {
            return Err(busy(
                "its records are mounted, perhaps in the mount namespace of a container; stop the driver that serves it"
                    .into(),
            ));
        }
        let uuid = &device.uuid;
        let removed = host.perform(&Effect::RemoveMapped { uuid });
        removed.context(doing)?;
    }
    Ok(!own.is_empty())
}

/// Unmounts the records from the own folder, unless a driver has locked them.
fn unmount(
    host: &dyn Host,
    pool: &PoolDefinition,
    id: PoolId,
    device: &MappedDevice,
) -> Result<()> {
    let doing = || format!("release pool {}", pool.name);
    let target = &folder(id);
    let mounts = host.mounts().context(doing)?;
    let shows = |mount: &&crate::host::Mount| {
        mount.mount_point == *target && mount.device == device.device.rdev
    };
    if !mounts.iter().any(|mount| shows(&mount)) {
        return Ok(());
    }
    // The pool may be damaged in a way that prevents the lock.
    let lock = PoolBackend::lock(host, target, Duration::ZERO);
    if matches!(lock, Ok(None)) {
        return Err(Error::Locked {
            place: pool.place.to_string(),
        });
    }
    drop(lock);
    match host.perform(&Effect::Unmount { target }) {
        Err(error) if error.code() == Some(Errno::EBUSY) => Err(Error::Busy {
            subject: format!("pool {}", pool.name),
            holder: format!("a process has files in {} open", target.display()),
        }),
        done => done.map(drop).context(doing),
    }
}
