//! Unmounts volumes, and detaches their devices, on this node.

use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use uuid::Uuid;

use crate::backend::FoundDevice;
use crate::backend::file::dead_devices;
use crate::backend::shown::is_volume_mount;
use crate::error::{Error, ErrorContext, Result, chain};
use crate::host::{Device, Effect};
use crate::operation::{Pool, Usage, usage};
use crate::record::VolumeRecord;

const LINGER_WAIT: Duration = Duration::from_millis(10);

/// How long the driver waits for a program that scans devices (udev, losetup, another driver). A
/// scan takes milliseconds, and up to half a second on a busy machine.
const LINGER_TRIES: u32 = 50;

impl Usage {
    /// Unmounts the volume at a path, as often as it is mounted there. If its pool is served, only
    /// mounts of its own devices are unmounted, otherwise mounts of any device of a kind that volumes
    /// have. Returns the devices that the volume had before.
    pub(in crate::operation) fn unmount_all(
        &self,
        owned: Option<(&Pool, Uuid)>,
        path: &Path,
    ) -> Result<Vec<FoundDevice>> {
        let here = self.table_path(path)?;
        let devices = match owned {
            Some((pool, uuid)) => pool.backend.devices().list(uuid)?,
            None => Vec::new(),
        };
        let record = owned.and_then(|(pool, uuid)| pool.backend.volumes.get(uuid).ok().flatten());
        // The node of a published raw volume may belong to no attached device, because the user of
        // the device can detach it. No other volume gets its number while the node is bound.
        let raw = record.as_ref().is_some_and(VolumeRecord::is_raw);
        loop {
            let mounts = self.mounts()?;
            let Some(top) = usage::at(&mounts, &here).last().copied() else {
                return Ok(devices);
            };
            let ours = devices.iter().any(|found| usage::shows(top, &found.device))
                || (record.is_none() || raw && usage::is_node(top))
                    && is_volume_mount(self.host.as_ref(), top);
            if !ours {
                return Err(Error::refused(
                    path.display(),
                    format!(
                        "the file system mounted there ({} of {}) is not this volume",
                        top.fs_name,
                        top.source.display()
                    ),
                ));
            }
            self.unmount(path)?;
        }
    }

    /// Unmounts once. The host waits for a busy mount for a moment only. The unmount is never
    /// forced, because processes with open files would lose their writes.
    pub(in crate::operation) fn unmount(&self, path: &Path) -> Result<()> {
        match self.host.perform(&Effect::Unmount { target: path }) {
            Ok(_) => Ok(()),
            Err(error) if error.code() == Some(Errno::EBUSY) => {
                let reason = "a process has files on it open or its working directory there; stop that process first";
                Err(Error::refused(path.display(), reason))
            }
            Err(error) => Err(error).context(|| format!("unmount {}", path.display())),
        }
    }

    /// Detaches devices of a volume that nothing uses any more. A device that is claimed (by
    /// another mount namespace or a frozen file system) or held open stays until that ends. Limits
    /// of devices in `before` that are gone are reset for their next user.
    pub(in crate::operation) fn free_devices(
        &self,
        pool: &Pool,
        uuid: Uuid,
        before: &[FoundDevice],
    ) -> Result<()> {
        self.close_published(uuid)?;
        let mut still = pool.backend.devices().list(uuid)?;
        // Usually the device of a mounted volume was detached with its mount, and nothing is left
        // to do.
        if !still.is_empty() {
            let mounts = self.mounts()?;
            for found in still
                .iter()
                .filter(|found| usage::of_device(&mounts, &found.device).is_empty())
            {
                if self.is_claimed(&found.device)? {
                    tracing::warn!(volume = %uuid, device = %found.device.path.display(), "unmounted a volume here, but a file system or another device still holds its device{}", self.holders(&found.device));
                    continue;
                }
                pool.backend.devices().detach(uuid, &found.device)?;
            }
            still = pool.backend.devices().list(uuid)?;
        }
        if still.is_empty() {
            self.clear_not_grown(uuid);
        }
        self.renew(pool, uuid, before, &still)
    }

    /// Detaches devices of a volume whose pool is not served, if their disk is dead and nothing
    /// shows them any more. They would prevent the disk from being mounted again.
    pub(in crate::operation) fn free_dead_devices(&self, uuid: Uuid) -> Result<()> {
        self.close_published(uuid)?;
        self.clear_not_grown(uuid);
        let name = uuid.to_string();
        self.detach_dead_devices(&|named| named == name, None)
            .map(drop)
    }

    /// The devices of volumes with matching names whose disk is dead, or was mounted again:
    /// `former` is the file system before that. Those that nothing shows are detached. The result
    /// includes devices that do not answer, because their state is unknown.
    pub(in crate::operation) fn detach_dead_devices(
        &self,
        is_named: &dyn Fn(&str) -> bool,
        former: Option<u64>,
    ) -> Result<Vec<Device>> {
        let host = self.host.as_ref();
        let found = dead_devices(host, is_named, former)?;
        if found.is_empty() {
            return Ok(Vec::new());
        }
        let mounts = self.mounts()?;
        for dead in found.iter().filter(|dead| dead.is_detachable()) {
            let device = &dead.device;
            if usage::of_device(&mounts, device).is_empty() && !self.is_claimed(device)? {
                tracing::info!(device = %device.path.display(), "detaching an unused device of a dead disk");
                dead.detach(host)?;
            }
        }
        Ok(found.into_iter().map(|dead| dead.device).collect())
    }

    /// Refuses to work from the mount table alone on a volume that may be frozen: a frozen file
    /// system that is unmounted is hidden, and stays frozen.
    pub(in crate::operation) fn refuse_frozen(&self, volume_id: &str) -> Result<()> {
        let journaled = self.freezer.list_journaled();
        let journaled = journaled
            .context(|| "read the freeze journal".into())
            .map_err(Error::into_indeterminate)?;
        match journaled.iter().any(|one| one.volume_id == volume_id) {
            true => Err(Error::Pending {
                what: format!("a freeze of volume {volume_id}"),
            }),
            false => Ok(()),
        }
    }

    /// A device that still exists after it was detached. The kernel keeps it for as long as a
    /// process has it open: a program that scans devices for a moment, a reader for longer.
    pub(in crate::operation) fn lingering(
        &self,
        pool: &Pool,
        uuid: Uuid,
    ) -> Result<Option<Device>> {
        for _ in 0..LINGER_TRIES {
            match pool.backend.devices().list(uuid)?.first() {
                None => return Ok(None),
                Some(_) => std::thread::sleep(LINGER_WAIT),
            }
        }
        Ok(pool
            .backend
            .devices()
            .list(uuid)?
            .first()
            .map(|found| found.device.clone()))
    }

    /// A failure is only logged: the next attach resets the device as well.
    fn renew(
        &self,
        pool: &Pool,
        uuid: Uuid,
        before: &[FoundDevice],
        still: &[FoundDevice],
    ) -> Result<()> {
        let Some(record) = pool
            .backend
            .volumes
            .get(uuid)?
            .filter(|_| !before.is_empty())
        else {
            return Ok(());
        };
        for gone in before
            .iter()
            .filter(|found| !still.iter().any(|still| still.device == found.device))
        {
            if let Err(error) = pool.backend.devices().released(&record, &gone.device) {
                tracing::warn!(volume = %uuid, error = %chain(&error), "failed to reset a limit of a released loop device");
            }
        }
        Ok(())
    }
}

/// Calls `unmount` with the argument false. If the disk of the pool fails, calls it again with
/// true, which works from the mount table alone, and then once more with false: the error may have
/// been temporary, and the state of the pool should reflect the unmount. A failure of that last
/// call does not change the result.
pub(in crate::operation) fn without_disk(unmount: impl Fn(bool) -> Result<()>) -> Result<()> {
    match unmount(false) {
        Err(error) if error.is_lost_disk() => unmount(true).inspect(|()| {
            if let Err(error) = unmount(false) {
                tracing::debug!(error = %chain(&error), "unmounted a volume of a dead disk, its device is cleaned up later");
            }
        }),
        done => done,
    }
}
