//! The number of a new mapped device.

use nix::errno::Errno;
use nix::sys::stat::{major, makedev, minor};

use super::super::device_mapper::{DeviceMapper, Selector};
use super::super::mounts;
use super::failed_on;
use crate::host::mapper::mapped_path;
use crate::host::{Effect, Result};

/// More numbers in a row are not in use.
const NUMBER_TRIES: u64 = 4096;

/// Creates a device. The kernel gives it the lowest free number. If another program has removed the
/// device of a published volume, its target still shows that number, and the new device gets a
/// number that no mount shows.
pub(super) fn create(mapper: &mut DeviceMapper, effect: &Effect<'_>, uuid: &str) -> Result<()> {
    // LVM's filters match names, so devices of this driver have a common one.
    let name = &uuid.to_ascii_lowercase();
    let failed = |errno| failed_on(effect, mapped_path(uuid))(errno);
    let shown = mounts::shown_devices()?;
    let rdev = mapper.create(name, uuid, None).map_err(failed)?.rdev;
    if !shown.contains(&rdev) {
        return Ok(());
    }
    let removed = mapper.remove(Selector::Uuid(uuid), false);
    removed.map_err(failed)?;
    let above = (minor(rdev) + 1..).take(NUMBER_TRIES as usize);
    let numbers = above.map(|minor| makedev(major(rdev), minor));
    for number in numbers.filter(|number| !shown.contains(number)) {
        match mapper.create(name, uuid, Some(number)) {
            Err(Errno::ENXIO) => {}
            created => return created.map(drop).map_err(failed),
        }
    }
    Err(failed(Errno::EBUSY))
}
