//! How this node uses volumes, as the mount table and sysfs of the kernel show it.

pub(in crate::operation) mod block_stage;
pub(in crate::operation) mod devices;
pub(in crate::operation) mod not_grown;
pub(in crate::operation) mod paths;
pub(in crate::operation) mod published;
pub(in crate::operation) mod show;
pub(in crate::operation) mod view;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use uuid::Uuid;
use uuid::fmt::Hyphenated;

use self::not_grown::NotGrown;
use self::published::Published;
use crate::error::{Error, ErrorContext, Result};
use crate::host::{Device, Freezer, Host, Mount};
use crate::operation::Pools;

/// How this node uses volumes, read from the kernel, and what it remembers of it: published devices
/// and volumes that could not be grown. It is part of the [`Driver`](crate::operation::Driver) and
/// uses the pools.
pub struct Usage {
    host: Arc<dyn Host>,
    pools: Arc<Pools>,
    /// The freeze guard, whose journal names the volumes that may be frozen.
    freezer: Arc<dyn Freezer>,
    published: Published,
    /// Volumes in use whose file system is smaller than it should be.
    small: Mutex<BTreeMap<Uuid, NotGrown>>,
}

impl Usage {
    /// Nothing is remembered yet.
    pub(in crate::operation) fn new(pools: Arc<Pools>, freezer: Arc<dyn Freezer>) -> Usage {
        Usage {
            host: pools.host.clone(),
            pools,
            freezer,
            published: Published::default(),
            small: Mutex::default(),
        }
    }

    pub(super) fn mounts(&self) -> Result<Vec<Mount>> {
        self.host.mounts().context(|| "read the mount table".into())
    }

    /// The topmost mount at a path of a CSI request.
    pub(super) fn mount_at(&self, path: &Path) -> Result<Option<Mount>> {
        let mounts = self.mounts()?;
        Ok(at(&mounts, &self.table_path(path)?)
            .last()
            .copied()
            .cloned())
    }

    /// The devices that the kernel has stacked on a device, as the end of a sentence: for example,
    /// a volume group that the node has activated. Empty if there are none, or if they cannot be
    /// read.
    pub(super) fn holders(&self, device: &Device) -> String {
        let Some(name) = device.path.file_name() else {
            return String::new();
        };
        let folder = Path::new("/sys/block").join(name).join("holders");
        let found = self.host.list_dir(&folder).ok().flatten();
        let holders = found.unwrap_or_default().into_iter().map(|holder| {
            let name = folder.join(&holder).join("dm/name");
            let name = self.host.read_file(&name).ok().flatten();
            match name.map(|name| String::from_utf8_lossy(&name).trim().to_string()) {
                Some(name) if !name.is_empty() => format!("{holder} ({name})"),
                Some(_) | None => holder,
            }
        });
        let holders: Vec<String> = holders.collect();
        match holders.is_empty() {
            true => String::new(),
            false => format!("; used by {}", holders.join(", ")),
        }
    }

    /// Refuses an operation on a device that a file system or a process with exclusive access
    /// claims. The caller has checked that no mount shows the device. A mkfs that survived its
    /// driver is such a process.
    pub(super) fn refuse_claimed(&self, volume: Uuid, device: &Device) -> Result<()> {
        match self.find_holder(device)? {
            None => Ok(()),
            Some(holder) => Err(Error::Busy {
                subject: format!("volume {volume}"),
                holder,
            }),
        }
    }

    /// Describes the holder that claims a device which no mount shows.
    pub(super) fn find_holder(&self, device: &Device) -> Result<Option<String>> {
        let claim = |holders| {
            format!(
                "{} is held by a file system that is not mounted here (frozen, or in another mount namespace), or by a program that has it open exclusively, such as a running mkfs{holders}",
                device.path.display()
            )
        };
        let is_claimed = self.is_claimed(device)?;
        Ok(is_claimed.then(|| claim(self.holders(device))))
    }

    /// Whether a file system or a process with exclusive access claims a device.
    pub(super) fn is_claimed(&self, device: &Device) -> Result<bool> {
        self.host
            .is_claimed(device)
            .context(|| format!("examine {}", device.path.display()))
            .map_err(Error::into_indeterminate)
    }
}

/// All mounts that show the device: mounts of its file system, and targets to which its node is
/// bound.
pub(super) fn of_device<'a>(mounts: &'a [Mount], device: &Device) -> Vec<&'a Mount> {
    mounts.iter().filter(|mount| shows(mount, device)).collect()
}

/// Whether a mount shows a device.
pub(super) fn shows(mount: &Mount, device: &Device) -> bool {
    mount.shown_device() == device.rdev
}

/// The UIDs of pods in the path of a mount: the target paths of the kubelet contain them.
pub(super) fn pods_of(mount: &Mount) -> impl Iterator<Item = &str> {
    let is_uid = |name: &&str| name.len() == Hyphenated::LENGTH && Uuid::try_parse(name).is_ok();
    let names = mount.mount_point.iter().filter_map(|name| name.to_str());
    names.filter(is_uid)
}

/// Mounts at a path, the topmost last.
pub(super) fn at<'a>(mounts: &'a [Mount], path: &Path) -> Vec<&'a Mount> {
    mounts
        .iter()
        .filter(|mount| mount.mount_point == path)
        .collect()
}

/// The error for a path at which something other than the volume is mounted.
pub(super) fn foreign_mount(path: &Path, mount: &Mount) -> Error {
    let reason = format!(
        "something else is mounted there ({} of {}); unmount it first",
        mount.fs_name,
        mount.source.display()
    );
    Error::refused(path.display(), reason)
}

/// Whether a mount is a device node bound to a target, rather than a file system.
pub(super) fn is_node(mount: &Mount) -> bool {
    mount.node.is_some()
}
