//! Loop devices of volumes as the kernel lists them, also of pools that are not open.

use std::path::Path;

use super::{IMAGE, linear, mapped_above, object_of};
use crate::error::{ErrorContext, Result};
use crate::host::{self, Device, Effect, Host, LoopStatus};

/// The number of attached loop devices of volumes, of all pools together.
pub fn count_devices(host: &dyn Host) -> Result<usize> {
    let found = host.loop_devices(&|image| object_of(image).is_some());
    Ok(found.context(|| "list loop devices".into())?.len())
}

/// The number of devices whose images are on one of these file systems.
pub fn count_devices_on(host: &dyn Host, file_systems: &[u64]) -> Result<usize> {
    let found = host.loops().context(|| "list loop devices".into())?;
    let is_on = |status: &&LoopStatus| file_systems.contains(&status.backing.device);
    Ok(found.iter().filter(is_on).count())
}

/// A device whose disk is dead, or was mounted again since, or that does not answer.
pub struct DeadDevice {
    /// What mounts show: the loop device, or the mapped device above it.
    pub device: Device,
    /// The UUID of the mapped device.
    mapped: Option<String>,
    number: u32,
    status: host::Result<LoopStatus>,
}

/// The dead devices of the volumes with matching names. `former` is the file system that the pool
/// had before its disk was mounted again.
pub fn dead_devices(
    host: &dyn Host,
    is_named: &dyn Fn(&str) -> bool,
    former: Option<u64>,
) -> Result<Vec<DeadDevice>> {
    let may_be = |image: &Path| object_of(image).is_some_and(is_named);
    let found = host.loop_devices(&may_be);
    let mut found = found.context(|| "list loop devices".into())?;
    found.retain(|one| match &one.status {
        Ok(status) => Some(status.backing.device) == former,
        Err(_) => true,
    });
    let dead = found.into_iter().map(|one| {
        let above = mapped_above(&one.image).map(|uuid| linear::above(host, &uuid, one.number));
        let above = above.transpose();
        let above = above.context(|| "find the mapped device of a dead disk".into())?;
        let (device, mapped) = above.flatten().map_or_else(
            || (Device::of_loop(one.number), None),
            |above| (above.device, Some(above.uuid)),
        );
        Ok(DeadDevice {
            device,
            mapped,
            number: one.number,
            status: one.status,
        })
    });
    dead.collect()
}

impl DeadDevice {
    /// Whether it may be detached. A device that does not answer may still be in use.
    pub fn is_detachable(&self) -> bool {
        let status = self.status.as_ref();
        !status.is_err_and(|error| !error.is_dead_disk())
    }

    /// Detaches it, if [`DeadDevice::is_detachable`].
    pub fn detach(&self, host: &dyn Host) -> Result<()> {
        let effect = match (&self.mapped, &self.status) {
            // The kernel then detaches the loop device.
            (Some(uuid), _) => Effect::RemoveMapped { uuid },
            (None, Ok(status)) => Effect::DetachLoop {
                number: self.number,
                backing: status.backing,
            },
            (None, Err(_)) => Effect::DetachDeadLoop {
                number: self.number,
                name: Path::new(IMAGE),
            },
        };
        let detached = host.perform(&effect);
        detached
            .map(drop)
            .context(|| format!("detach {}", self.device.path.display()))
    }
}
