//! Who uses a device, by the kernel's mount table.

use std::path::Path;

use super::Driver;
use crate::error::{Doing, Error, Result};
use crate::host::{Device, Mount};

impl Driver {
    pub(super) fn mounts(&self) -> Result<Vec<Mount>> {
        self.host.mounts().doing(|| "read the mount table".into())
    }

    /// The topmost mount at a caller's path.
    pub(super) fn mount_at(&self, path: &Path) -> Result<Option<Mount>> {
        let mounts = self.mounts()?;
        Ok(at(&mounts, &self.table_path(path)?)
            .last()
            .copied()
            .cloned())
    }

    /// Whether a file system or an exclusive opener has a device.
    pub(super) fn is_claimed(&self, device: &Device) -> Result<bool> {
        self.host
            .is_claimed(device)
            .doing(|| format!("look at {}", device.path.display()))
    }
}

/// Every mount that shows the device: its file system, or its node bound to a target.
pub(super) fn of_device<'a>(mounts: &'a [Mount], device: &Device) -> Vec<&'a Mount> {
    mounts.iter().filter(|mount| shows(mount, device)).collect()
}

/// Whether a mount shows a device.
pub(super) fn shows(mount: &Mount, device: &Device) -> bool {
    // A bound device node: the mount is of the file system that has /dev, its root is the node.
    if is_node(mount) {
        return mount.root.file_name() == device.path.file_name();
    }
    // btrfs has device numbers of its own, so there the source counts.
    mount.device == device.rdev || mount.source == device.path
}

/// Whether a mount shows a loop device at all: then it's a volume's, of a pool that isn't served.
pub(super) fn is_of_loop(mount: &Mount) -> bool {
    let node = if is_node(mount) {
        &mount.root
    } else {
        &mount.source
    };
    let name = node.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| {
        name.strip_prefix("loop")
            .is_some_and(|n| !n.is_empty() && n.bytes().all(|c| c.is_ascii_digit()))
    })
}

/// Mounts at a path, the topmost last.
pub(super) fn at<'a>(mounts: &'a [Mount], path: &Path) -> Vec<&'a Mount> {
    mounts
        .iter()
        .filter(|mount| mount.mount_point == path)
        .collect()
}

/// What is to be said of a path where something that isn't the volume is mounted.
pub(super) fn stranger(path: &Path, mount: &Mount) -> Error {
    let reason = format!(
        "something else is mounted there ({} of {}); unmount it first",
        mount.fs_name,
        mount.source.display()
    );
    Error::refused(path.display(), reason)
}

/// Whether a mount is a device node bound to a target, rather than a file system.
pub(super) fn is_node(mount: &Mount) -> bool {
    matches!(mount.fs_name.as_str(), "devtmpfs" | "tmpfs") && mount.root != Path::new("/")
}
