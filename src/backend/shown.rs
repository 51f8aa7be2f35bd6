//! Which volume a mount shows, also of a pool that is not open. All of it is read from the kernel,
//! without access to a disk.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::sys::stat::{major, minor};

use super::file::object_of;
use super::mapped::object_of_device;
use crate::host::mapper::UUID_PREFIX;
use crate::host::{Host, LOOP_MAJOR, Mount};

/// A volume that a mount shows.
pub struct ShownVolume {
    /// The name of its directory in the pool.
    pub name: String,
    /// The path of its image file, if it has one, as the kernel shows it.
    pub image: Option<PathBuf>,
}

/// The volume that a mount shows; `None` if it shows none, or one that the kernel does not name.
pub fn find_shown(host: &dyn Host, mount: &Mount) -> Option<ShownVolume> {
    let mapped = mapped_of(host, mount);
    let below = || loop_below(host, mapped.as_deref()?);
    let image = loop_of(mount).or_else(below).and_then(|number| {
        let path = format!("/sys/block/loop{number}/loop/backing_file");
        let shown = host.read_file(Path::new(&path)).ok().flatten()?;
        Some(PathBuf::from(OsStr::from_bytes(shown.trim_ascii_end())))
    });
    let name = match &image {
        Some(image) => object_of(image),
        None => mapped.as_deref().and_then(object_of_device),
    };
    Some(ShownVolume {
        name: name?.to_string(),
        image,
    })
}

/// Whether a mount shows a device of a kind that volumes have: any loop device, or a mapped device of
/// this driver. If its pool is not served, it is a mount of a volume. A node whose device was removed
/// shows nothing any more.
pub fn is_volume_mount(host: &dyn Host, mount: &Mount) -> bool {
    loop_of(mount).is_some() || mapped_of(host, mount).is_some() || is_removed(host, mount)
}

/// Whether a mount is the node of a device that another program has removed.
fn is_removed(host: &dyn Host, mount: &Mount) -> bool {
    mount.node.is_some_and(|rdev| {
        let path = format!("/sys/dev/block/{}:{}/size", major(rdev), minor(rdev));
        matches!(host.read_file(Path::new(&path)), Ok(None))
    })
}

/// The UUID of the mapped device of this driver that a mount shows.
fn mapped_of(host: &dyn Host, mount: &Mount) -> Option<String> {
    let rdev = mount.shown_device();
    let path = format!("/sys/dev/block/{}:{}/dm/uuid", major(rdev), minor(rdev));
    let uuid = String::from_utf8(host.read_file(Path::new(&path)).ok()??).ok()?;
    let uuid = uuid.trim_end();
    uuid.starts_with(UUID_PREFIX).then(|| uuid.to_string())
}

/// The number of the loop device that a mount shows.
fn loop_of(mount: &Mount) -> Option<u32> {
    let rdev = mount.shown_device();
    let number = (major(rdev) == LOOP_MAJOR).then(|| minor(rdev));
    number.and_then(|number| u32::try_from(number).ok())
}

/// The number of the loop device below the mapped device of this driver with a UUID.
fn loop_below(host: &dyn Host, uuid: &str) -> Option<u32> {
    host.linear_device(uuid).ok()??.table?.lower.loop_number()
}
