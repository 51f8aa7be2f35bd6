//! `slackwater pool release`: gives a thin pool back to LVM for maintenance.

use std::path::PathBuf;
use std::time::Duration;

use nix::errno::Errno;

use super::{folder, mapped_device, thin_pool};
use crate::backend::PoolBackend;
use crate::backend::thin::{DEVICE_PREFIX, RECORDS_ID, pool_of_records};
use crate::error::{Error, ErrorContext, Result};
use crate::host::{Effect, Host, MappedDevice, Mount, ThinTable};
use crate::model::PoolDefinition;

/// The holder in the error for records that are mounted in another mount namespace.
const MOUNTED_ELSEWHERE: &str = "its records are mounted, perhaps in the mount namespace of a container; stop the driver that serves it";

/// Unmounts the records of a pool and removes their device, after which LVM can deactivate the thin
/// pool. Refused while a driver serves the pool or a volume is used; the devices of unused volumes are
/// removed. The next start of the driver attaches the records again. Returns whether there was
/// something to release.
///
/// It needs neither the header nor the records, which may be damaged.
pub fn release(host: &dyn Host, pool: &PoolDefinition) -> Result<bool> {
    let mapped = thin_pool(pool)?.mapped();
    let doing = || format!("release pool {}", pool.name);
    let devices = host.mapped_devices(mapped, DEVICE_PREFIX).context(doing)?;
    let id_of = |device: &MappedDevice| device.table.as_ref().and_then(ThinTable::known_id);
    let (own, others): (Vec<_>, Vec<_>) = devices
        .into_iter()
        .filter(|device| device.table.is_some())
        .partition(|device| {
            let is_records = matches!(id_of(device), None | Some(RECORDS_ID));
            is_records && pool_of_records(&device.uuid).is_some()
        });
    let busy = |holder: String| Error::Busy {
        subject: format!("pool {}", pool.name),
        holder,
    };
    for device in &own {
        check_unserved(host, pool, device)?;
    }
    let mut used = Vec::new();
    for device in &others {
        // One of another program is only named.
        let is_own = device.uuid.starts_with(DEVICE_PREFIX);
        if !is_own {
            used.push(device.device.path.display().to_string());
        } else if !remove_unused(host, mapped, device).context(doing)? {
            used.push(device.uuid.to_ascii_lowercase());
        }
    }
    if !used.is_empty() {
        return Err(busy(format!(
            "{} are attached; delete the pods, or end the other programs, that use them",
            used.join(" and ")
        )));
    }
    for device in &own {
        unmount(host, pool, device)?;
        if host.is_claimed(&device.device).context(doing)? {
            return Err(busy(MOUNTED_ELSEWHERE.into()));
        }
        let uuid = &device.uuid;
        let removed = host.perform(&Effect::RemoveMapped { uuid });
        removed.context(doing)?;
    }
    Ok(!own.is_empty())
}

/// Removes the device of a volume, or one that a crash has left, unless a mount shows it or a process
/// has it open: a driver that does not serve the pool leaves the devices of the pods that have ended.
fn remove_unused(
    host: &dyn Host,
    mapped: &str,
    device: &MappedDevice,
) -> crate::host::Result<bool> {
    let rdev = device.device.rdev;
    let mounts = host.mounts()?;
    let shows = |mount: &Mount| mount.device == rdev || mount.shown_device() == rdev;
    if device.suspended || mounts.iter().any(shows) || host.is_claimed(&device.device)? {
        return Ok(false);
    }
    let uuid = &device.uuid;
    host.perform(&Effect::RemoveMapped { uuid })?;
    // One that is open is removed when it is closed.
    Ok(mapped_device(host, mapped, uuid)?.is_none())
}

/// The own folder, if the device with the records is mounted there.
fn mounted(
    host: &dyn Host,
    pool: &PoolDefinition,
    device: &MappedDevice,
) -> Result<Option<PathBuf>> {
    let doing = || format!("release pool {}", pool.name);
    let Some(target) = pool_of_records(&device.uuid).map(folder) else {
        return Ok(None);
    };
    let mounts = host.mounts().context(doing)?;
    let shows = |mount: &Mount| mount.mount_point == target && mount.device == device.device.rdev;
    Ok(mounts.iter().any(shows).then_some(target))
}

/// Fails if a driver has locked the records, or if they are mounted where this process sees no mount.
fn check_unserved(host: &dyn Host, pool: &PoolDefinition, device: &MappedDevice) -> Result<()> {
    let doing = || format!("release pool {}", pool.name);
    let Some(target) = mounted(host, pool, device)? else {
        return match host.is_claimed(&device.device).context(doing)? {
            false => Ok(()),
            true => Err(Error::Busy {
                subject: format!("pool {}", pool.name),
                holder: MOUNTED_ELSEWHERE.into(),
            }),
        };
    };
    // The pool may be damaged in a way that prevents the lock.
    match PoolBackend::lock(host, &target, Duration::ZERO) {
        Ok(None) => Err(Error::Locked {
            place: pool.place.to_string(),
        }),
        Ok(Some(_)) | Err(_) => Ok(()),
    }
}

/// Unmounts the records from the own folder.
fn unmount(host: &dyn Host, pool: &PoolDefinition, device: &MappedDevice) -> Result<()> {
    let doing = || format!("release pool {}", pool.name);
    let Some(target) = &mounted(host, pool, device)? else {
        return Ok(());
    };
    match host.perform(&Effect::Unmount { target }) {
        Err(error) if error.code() == Some(Errno::EBUSY) => Err(Error::Busy {
            subject: format!("pool {}", pool.name),
            holder: format!("a process has files in {} open", target.display()),
        }),
        done => done.map(drop).context(doing),
    }
}
