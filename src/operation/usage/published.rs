//! Loop devices of published raw block volumes: the driver holds them open, and compares them with
//! their state at the time of the publish.
//!
//! A pod with such a volume has the loop device itself, and the kernel requires no capability for
//! detaching it or for changing its flags or its file. An open descriptor keeps a detached device
//! attached, so that its number is never used for another volume. All other changes are detected
//! within seconds, and corrected where that is possible.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::sys::stat::{major, minor};
use uuid::Uuid;

use crate::error::{Error, ErrorContext, Result, chain};
use crate::host::{DeviceHold, Effect, FileId, LOOP_MAJOR, LoopStatus, Mount};
use crate::model::PoolId;
use crate::operation::lock::Key;
use crate::operation::{Pool, Usage, usage};
use crate::record::VolumeRecord;

/// All published devices.
#[derive(Debug, Default)]
pub(in crate::operation) struct Published {
    devices: Mutex<Devices>,
}

#[derive(Debug, Default)]
struct Devices {
    of: BTreeMap<Uuid, Shown>,
    /// Counts the devices, to distinguish a device from a later one of the same volume.
    made: u64,
    /// Targets that show a loop device that is no longer attached.
    lost: BTreeSet<PathBuf>,
}

/// A published device.
#[derive(Debug)]
struct Shown {
    pool: PoolId,
    /// Keeps the loop device open.
    hold: DeviceHold,
    number: u32,
    backing: FileId,
    read_only: bool,
    /// Whether the device should bypass the pool's page cache; false where that is not possible.
    direct_io: bool,
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

    /// Targets whose loop device was detached while no driver ran.
    pub(in crate::operation) fn lost_devices(&self) -> Vec<PathBuf> {
        self.published.lock().lost.iter().cloned().collect()
    }

    /// Holds a device open until no mount shows it any more, if it is a loop device: `now` is the
    /// state of that. If the volume already has a published device, that one is kept.
    pub(in crate::operation) fn keep_published(
        &self,
        pool: &Pool,
        uuid: Uuid,
        hold: DeviceHold,
        now: Option<LoopStatus>,
    ) {
        let Some(now) = now else { return };
        let mut devices = self.published.lock();
        devices.made += 1;
        let made = devices.made;
        devices.of.entry(uuid).or_insert(Shown {
            pool: pool.id(),
            number: now.number,
            backing: now.backing,
            read_only: now.read_only,
            direct_io: now.direct_io,
            made,
            problem: None,
            hold,
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
    pub(in crate::operation) fn let_go(&self, uuid: Uuid) -> Result<()> {
        let device = |devices: &Devices| Some(devices.of.get(&uuid)?.hold.device.clone());
        let Some(device) = device(&self.published.lock()) else {
            return Ok(());
        };
        if !usage::of_device(&self.mounts()?, &device).is_empty() {
            return Ok(());
        }
        let gone = self.published.lock().of.remove(&uuid);
        gone.map_or(Ok(()), |shown| self.detach_changed(&shown))
    }

    /// Detaches a device that is now attached to another file, because it is no longer found as the
    /// device of a volume. While the descriptor is open, its number cannot be reused for another
    /// volume.
    fn detach_changed(&self, shown: &Shown) -> Result<()> {
        let number = shown.number;
        match self.look_at(number) {
            Ok(Some(LoopStatus { backing, .. })) if backing != shown.backing => self
                .host
                .perform(&Effect::DetachLoop { number, backing })
                .map(drop)
                .context(|| format!("detach /dev/loop{number}")),
            // On a dead disk the state of the device cannot be read.
            Err(error) if !error.is_lost_disk() => Err(error),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    fn look_at(&self, number: u32) -> Result<Option<LoopStatus>> {
        let found = self.host.loop_status(number);
        found.context(|| format!("read the state of /dev/loop{number}"))
    }

    /// Checks all published devices, and opens those that an earlier process published. If the
    /// mount table cannot be read, it changes nothing.
    pub(in crate::operation) fn watch_published(&self) {
        let known: Vec<_> = {
            let devices = self.published.lock();
            let each = devices.of.iter();
            each.map(|(uuid, shown)| (*uuid, shown.made, shown.number))
                .collect()
        };
        let mounts = match self.mounts() {
            Ok(mounts) => mounts,
            Err(error) => {
                tracing::warn!(error = %chain(&error), "failed to examine published devices");
                return;
            }
        };
        let nodes: Vec<(u32, &Mount)> = mounts.iter().filter_map(loop_node).collect();
        if known.is_empty() && nodes.is_empty() {
            self.published.lock().lost.clear();
            return;
        }
        for (uuid, made, number) in known {
            if nodes.iter().any(|(shown, _)| *shown == number) {
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
        self.find_detached(&nodes);
        self.hold_again(&nodes);
    }

    /// Compares a device with its state at the time of the publish, and re-enables direct I/O.
    fn compare(&self, uuid: Uuid, made: u64) -> Result<()> {
        let number = |devices: &Devices| devices.of.get(&uuid).map(|shown| shown.number);
        let Some(number) = number(&self.published.lock()) else {
            return Ok(());
        };
        // While its descriptor is open the device is attached.
        let Some(now) = self.look_at(number)? else {
            return Ok(());
        };
        let mut devices = self.published.lock();
        let Some(shown) = devices.of.get_mut(&uuid).filter(|now| now.made == made) else {
            return Ok(());
        };
        let mut wrong = Vec::new();
        if now.backing != shown.backing {
            wrong.push("is attached to another file");
        }
        if now.autoclear {
            wrong.push("was set to detach when it is closed");
        }
        if now.partscan {
            wrong.push("has partition scanning enabled");
        }
        if now.offset != 0 || now.size_limit != 0 {
            wrong.push("maps only a part of its image");
        }
        if now.read_only != shown.read_only {
            wrong.push("has a different read-only state");
        }
        let problem = (!wrong.is_empty()).then(|| {
            format!(
                "its device /dev/loop{number} {}; it was changed by the pod that uses it or by another process on the node",
                wrong.join(" and ")
            )
        });
        let is_news = problem != shown.problem;
        shown.problem.clone_from(&problem);
        let mend = shown.direct_io && !now.direct_io && now.backing == shown.backing;
        drop(devices);
        if let Some(problem) = problem.filter(|_| is_news) {
            tracing::error!(volume = %uuid, problem, "found a changed device of a published volume");
        }
        if mend {
            self.mend_direct_io(uuid, made, number);
        }
        Ok(())
    }

    fn mend_direct_io(&self, uuid: Uuid, made: u64, number: u32) {
        match self.host.perform(&Effect::SetDirectIo { number }) {
            Ok(_) => {
                tracing::warn!(volume = %uuid, number, "re-enabled direct I/O of a published device");
            }
            Err(error) => {
                tracing::warn!(volume = %uuid, number, error = %chain(&error), "failed to re-enable direct I/O of a published device");
                // Direct I/O is not possible; it is not tried again.
                let mut devices = self.published.lock();
                if let Some(shown) = devices.of.get_mut(&uuid).filter(|now| now.made == made) {
                    shown.direct_io = false;
                }
            }
        }
    }

    /// Finds targets that show the number of a detached loop device: it was detached while no
    /// driver held it open. No image is ever attached to such a number; the pod reads errors until
    /// it is deleted.
    fn find_detached(&self, nodes: &[(u32, &Mount)]) {
        let is_lost = |number: u32| matches!(self.host.loop_status(number), Ok(None));
        let lost: BTreeSet<PathBuf> = nodes
            .iter()
            .filter(|(number, _)| is_lost(*number))
            .map(|(_, mount)| mount.mount_point.clone())
            .collect();
        let mut devices = self.published.lock();
        for path in lost.difference(&devices.lost) {
            tracing::error!(path = %path.display(), "found a published raw block volume whose loop device was detached; delete its pod");
        }
        devices.lost = lost;
    }

    /// Opens published devices that are not held open yet.
    fn hold_again(&self, nodes: &[(u32, &Mount)]) {
        let mut numbers: BTreeSet<u32> = nodes.iter().map(|(number, _)| *number).collect();
        for shown in self.published.lock().of.values() {
            numbers.remove(&shown.number);
        }
        let look = |number| self.host.loop_status(number).ok().flatten();
        let shown: Vec<LoopStatus> = numbers.into_iter().filter_map(look).collect();
        if shown.is_empty() {
            return;
        }
        for pool in self.pools.serving() {
            self.hold_those_of(&pool, &shown);
        }
    }

    fn hold_those_of(&self, pool: &Pool, shown: &[LoopStatus]) {
        let raw = pool.backend.volumes.ready(None, usize::MAX).into_iter();
        for record in raw.filter(VolumeRecord::is_raw) {
            // A call that holds the lock opens the device or detaches it; at startup there is no
            // such call.
            let Ok(_lock) = self.pools.locks.acquire(Key::Volume(record.uuid)) else {
                continue;
            };
            if let Err(error) = self.hold_one(pool, &record, shown) {
                tracing::warn!(volume = %record.uuid, error = %chain(&error), "failed to open a published device");
            }
        }
    }

    fn hold_one(&self, pool: &Pool, record: &VolumeRecord, shown: &[LoopStatus]) -> Result<()> {
        if let Some((hold, found)) = pool.backend.devices().hold(record.uuid, shown)? {
            // What the pod changed before is unknown, so direct I/O is enabled.
            let was = LoopStatus {
                direct_io: true,
                ..found
            };
            self.keep_published(pool, record.uuid, hold, Some(was));
        }
        Ok(())
    }
}

/// The number of the loop device whose node a mount shows.
fn loop_node(mount: &Mount) -> Option<(u32, &Mount)> {
    let rdev = mount.node.filter(|rdev| major(*rdev) == LOOP_MAJOR)?;
    Some((u32::try_from(minor(rdev)).ok()?, mount))
}

#[cfg(test)]
mod tests;
