//! Devices of published raw block volumes that their users can change: the driver holds them open,
//! and compares them with their state at the time of the publish.
//!
//! A pod with a raw block volume of a file pool has the loop device itself, and the kernel requires
//! no capability for detaching it or for changing its flags or its file. An open descriptor keeps a detached device
//! attached, so that its number is never used for another volume. All other changes are detected
//! within seconds, and corrected where that is possible.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use uuid::Uuid;

use crate::backend::file::published::is_detached;
use crate::backend::{FindPublished, Watched};
use crate::error::{Error, Result, chain};
use crate::host::Mount;
use crate::model::PoolId;
use crate::operation::lock::Key;
use crate::operation::{Pool, Usage, usage};
use crate::record::VolumeRecord;

/// All published devices.
#[derive(Default)]
pub(in crate::operation) struct Published {
    devices: Mutex<Devices>,
}

#[derive(Default)]
struct Devices {
    of: BTreeMap<Uuid, Shown>,
    /// Counts the devices, to distinguish a device from a later one of the same volume.
    made: u64,
    /// Targets that show a device that is no longer attached.
    lost: BTreeSet<PathBuf>,
}

/// A published device.
struct Shown {
    pool: PoolId,
    watched: Watched,
    made: u64,
    problem: Option<String>,
}

/// A volume whose published device has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedDevice {
    /// The pool of the volume.
    pub pool: PoolId,
    /// The UUID of the volume.
    pub uuid: Uuid,
    /// What has changed, with the name of the device.
    pub problem: String,
}

impl Published {
    fn lock(&self) -> MutexGuard<'_, Devices> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Usage {
    /// Volumes whose published devices were changed by their users.
    pub fn changed_devices(&self) -> Vec<ChangedDevice> {
        let devices = self.published.lock();
        let changed = devices.of.iter().filter_map(|(uuid, shown)| {
            Some(ChangedDevice {
                pool: shown.pool,
                uuid: *uuid,
                problem: shown.problem.clone()?,
            })
        });
        changed.collect()
    }

    /// Targets whose device was detached while no driver ran.
    pub(in crate::operation) fn lost_devices(&self) -> Vec<PathBuf> {
        self.published.lock().lost.iter().cloned().collect()
    }

    /// Holds a device open until no mount shows it any more. If the volume already has a published
    /// device, that one is kept. A device that its user cannot change is not watched.
    pub(in crate::operation) fn keep_published(
        &self,
        pool: &Pool,
        uuid: Uuid,
        watched: Option<Watched>,
    ) {
        let Some(watched) = watched else { return };
        let mut devices = self.published.lock();
        devices.made += 1;
        let made = devices.made;
        devices.of.entry(uuid).or_insert(Shown {
            pool: pool.id(),
            watched,
            made,
            problem: None,
        });
    }

    /// Refuses to publish a volume whose device was changed.
    pub(in crate::operation) fn refuse_changed(&self, volume_id: &str, uuid: Uuid) -> Result<()> {
        let made = self.published.lock().of.get(&uuid).map(|shown| shown.made);
        let Some(made) = made else { return Ok(()) };
        self.compare(uuid, made)
            .map_err(Error::into_indeterminate)?;
        let problem = self
            .published
            .lock()
            .of
            .get(&uuid)
            .and_then(|shown| shown.problem.clone());
        match problem {
            None => Ok(()),
            Some(problem) => Err(Error::refused(
                format!("volume {volume_id}"),
                format!(
                    "{problem}; unpublish it everywhere, then publish it again with a new device"
                ),
            )),
        }
    }

    /// Closes the descriptor of a volume's device once no mount shows the device. It must run
    /// before the device is detached, because the detachment would wait for this descriptor.
    pub(in crate::operation) fn close_published(&self, uuid: Uuid) -> Result<()> {
        let device = |devices: &Devices| Some(devices.of.get(&uuid)?.watched.hold.device.clone());
        let Some(device) = device(&self.published.lock()) else {
            return Ok(());
        };
        if !usage::of_device(&self.mounts()?, &device).is_empty() {
            return Ok(());
        }
        let gone = self.published.lock().of.remove(&uuid);
        gone.map_or(Ok(()), |shown| shown.watched.watch.detach_changed())
    }

    /// Checks all published devices, and opens those that an earlier process published. If the
    /// mount table cannot be read, it changes nothing.
    pub(in crate::operation) fn watch_published(&self) {
        let known: Vec<_> = {
            let devices = self.published.lock();
            let each = devices.of.iter();
            each.map(|(uuid, shown)| (*uuid, shown.made, shown.watched.hold.device.rdev))
                .collect()
        };
        let mounts = match self.mounts() {
            Ok(mounts) => mounts,
            Err(error) => {
                tracing::warn!(error = %chain(&error), "failed to examine published devices");
                return;
            }
        };
        let node = |mount: &'_ Mount| Some((mount.node?, mount.mount_point.clone()));
        let nodes: Vec<(u64, PathBuf)> = mounts.iter().filter_map(node).collect();
        if known.is_empty() && nodes.is_empty() {
            self.published.lock().lost.clear();
            return;
        }
        for (uuid, made, rdev) in known {
            if nodes.iter().any(|(shown, _)| *shown == rdev) {
                // If a device cannot be read now (its disk is dead), its state stays as it was.
                if let Err(error) = self.compare(uuid, made) {
                    tracing::debug!(volume = %uuid, error = %chain(&error), "failed to examine a published device");
                }
            } else {
                let mut devices = self.published.lock();
                if devices.of.get(&uuid).is_some_and(|now| now.made == made) {
                    devices.of.remove(&uuid);
                }
            }
        }
        self.record_detached(&nodes);
        self.hold_again(&nodes);
    }

    /// Compares a device with its state at the time of the publish.
    fn compare(&self, uuid: Uuid, made: u64) -> Result<()> {
        let watch = |devices: &Devices| Some(devices.of.get(&uuid)?.watched.watch.clone());
        let Some(watch) = watch(&self.published.lock()) else {
            return Ok(());
        };
        let problem = watch.examine()?;
        let mut devices = self.published.lock();
        let Some(shown) = devices.of.get_mut(&uuid).filter(|now| now.made == made) else {
            return Ok(());
        };
        let is_news = problem != shown.problem;
        shown.problem.clone_from(&problem);
        drop(devices);
        if let Some(problem) = problem.filter(|_| is_news) {
            tracing::error!(volume = %uuid, problem, "found a changed device of a published volume");
        }
        Ok(())
    }

    /// Finds targets that show the number of a detached device: it was detached while no driver held
    /// it open. No image is ever attached to such a number; the pod reads errors until it is deleted.
    fn record_detached(&self, nodes: &[(u64, PathBuf)]) {
        let lost = nodes
            .iter()
            .filter(|(rdev, _)| is_detached(self.host.as_ref(), *rdev));
        let lost: BTreeSet<PathBuf> = lost.map(|(_, target)| target.clone()).collect();
        let mut devices = self.published.lock();
        for path in lost.difference(&devices.lost) {
            tracing::error!(path = %path.display(), "found a published raw block volume whose device was detached; delete its pod");
        }
        devices.lost = lost;
    }

    /// Opens published devices that are not held open yet.
    fn hold_again(&self, nodes: &[(u64, PathBuf)]) {
        let mut nodes: BTreeSet<u64> = nodes.iter().map(|(rdev, _)| *rdev).collect();
        for shown in self.published.lock().of.values() {
            nodes.remove(&shown.watched.hold.device.rdev);
        }
        let nodes: Vec<u64> = nodes.into_iter().collect();
        for pool in self.pools.serving() {
            if let Some(find) = pool.backend.devices().find_published(&nodes) {
                self.hold_those_of(&pool, &find);
            }
        }
    }

    fn hold_those_of(&self, pool: &Pool, find: &FindPublished<'_>) {
        let raw = pool.backend.volumes.ready(None, usize::MAX).into_iter();
        for record in raw.filter(VolumeRecord::is_raw) {
            // A call that holds the lock opens the device or detaches it; at startup there is no
            // such call.
            let Ok(_lock) = self.pools.locks.acquire(Key::Volume(record.uuid)) else {
                continue;
            };
            match find(record.uuid) {
                Ok(found) => self.keep_published(pool, record.uuid, found),
                Err(error) => {
                    tracing::warn!(volume = %record.uuid, error = %chain(&error), "failed to open a published device");
                }
            }
        }
    }
}
#[cfg(test)]
mod tests;
