//! The copy of a thin device by one message. There is nothing to copy ahead of the freeze.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nix::errno::Errno;

use super::{check_committed, image_in};
use crate::backend::{Copier, CopyCost, CopyMode};
use crate::error::HostError;
use crate::host::mapper::FILLING_SUFFIX;
use crate::host::{
    self, DeviceHold, Effect, FileId, Host, MappedDevice, PreparedThinSnapshot, ThinSnapshot,
};

/// The time of a message that creates a snapshot: 0.3 to 0.5 ms, measured on 16 devices under
/// writers.
const SNAPSHOT_TIME: Duration = Duration::from_micros(500);

/// How often, and how long after one another, a device is resumed that could not be resumed.
const RESUME_TRIES: u32 = 100;
const RESUME_WAIT: Duration = Duration::from_millis(100);

/// Creates a snapshot of a thin device.
pub(super) struct ThinCopier {
    pub(super) host: Arc<dyn Host>,
    pub(super) pool: String,
    pub(super) prefix: String,
    /// The UUID of the first device of the source.
    pub(super) device: String,
    pub(super) origin: u32,
    /// The directory of the copy. Its record is written after the copier is created.
    pub(super) copy: PathBuf,
    /// The ID of the copy, once it was read.
    pub(super) id: OnceLock<u32>,
    pub(super) image: FileId,
    /// What the message needs, allocated before any writer waits.
    pub(super) prepared: OnceLock<PreparedThinSnapshot>,
    pub(super) is_sealed: AtomicBool,
}

impl ThinCopier {
    fn id(&self) -> host::Result<u32> {
        if let Some(id) = self.id.get() {
            return Ok(*id);
        }
        let absent = || HostError::errno("find", &self.copy, Errno::ENOENT);
        let found = image_in(self.host.as_ref(), &self.copy)?.ok_or_else(absent)?;
        Ok(*self.id.get_or_init(|| found.id))
    }

    /// The mapped devices that show the thin device.
    fn active(&self) -> host::Result<Vec<MappedDevice>> {
        let second = self.device.clone() + FILLING_SUFFIX;
        let own = [self.device.as_str(), second.as_str()];
        let pool = (self.pool.as_str(), self.image.device);
        let mut devices = self.host.mapped_devices_of(pool, &self.prefix, &own)?;
        devices.retain(|device| {
            let table = device.table.as_ref();
            table.is_some_and(|table| table.id == self.origin)
        });
        Ok(devices)
    }

    fn prepare(&self) -> host::Result<&PreparedThinSnapshot> {
        if let Some(prepared) = self.prepared.get() {
            return Ok(prepared);
        }
        let prepared = self.host.prepare_thin_snapshot(ThinSnapshot {
            pool: self.pool.clone(),
            rdev: self.image.device,
            id: self.id()?,
            origin: self.origin,
        })?;
        Ok(self.prepared.get_or_init(|| prepared))
    }

    /// Creates the snapshot. All devices that show the origin are suspended.
    fn snapshot(&self) -> host::Result<u64> {
        let prepared = self.prepare()?;
        self.host
            .perform(&Effect::CreateThinSnapshot { prepared })?;
        Ok(1)
    }

    /// Creates the snapshot of an image that is not in use. Only copies of it may be running, whose
    /// devices are suspended for it. The kernel removes such a device with its last opener. (After a
    /// crash that opener waits for its reads, and stays with the device, if the device is suspended.)
    fn snapshot_quiet(&self) -> host::Result<u64> {
        let active = self.active()?.into_iter();
        let (copying, others): (Vec<_>, Vec<_>) = active
            .filter(|device| !device.suspended)
            .partition(|device| device.deferred_remove && device.uuid.starts_with(&self.prefix));
        if let Some(other) = others.first() {
            let path = other.device.path.clone();
            return Err(HostError::errno("snapshot", path, Errno::EBUSY));
        }
        self.prepare()?;
        let mut done = Ok(());
        for MappedDevice { uuid, .. } in &copying {
            done = done.and_then(|()| {
                let suspended = self.host.perform(&Effect::SuspendMapped { uuid });
                suspended.map(drop)
            });
        }
        let done = done.and_then(|()| self.snapshot());
        let resumed: Vec<_> = copying.iter().map(|it| self.resume(&it.uuid)).collect();
        resumed.into_iter().collect::<host::Result<()>>()?;
        done
    }

    /// The copy, which reads the device, waits until this succeeds. So it is repeated for a while:
    /// LVM may have suspended the pool.
    fn resume(&self, uuid: &str) -> host::Result<()> {
        let resume = || self.host.perform(&Effect::ResumeMapped { uuid }).map(drop);
        for _ in 0..RESUME_TRIES {
            if resume().is_ok() {
                return Ok(());
            }
            self.host.pause(RESUME_WAIT);
        }
        resume()
    }
}

impl Copier for ThinCopier {
    fn image(&self) -> FileId {
        self.image
    }

    /// The device that shows the thin device, if one does. If a foreign one shows it as well, the
    /// message is refused.
    fn mapped(&self) -> host::Result<Option<DeviceHold>> {
        self.host.hold_mapped(&self.device)
    }

    fn is_serial(&self) -> bool {
        false
    }

    fn cost(&self, _: CopyMode) -> host::Result<CopyCost> {
        Ok(CopyCost {
            extents: 1,
            stall: SNAPSHOT_TIME,
        })
    }

    fn copy_whole(&self) -> host::Result<u64> {
        let extents = self.snapshot_quiet()?;
        check_committed(self.host.as_ref(), &self.pool)?;
        Ok(extents)
    }

    fn copy_ahead(&self) -> host::Result<u64> {
        self.prepare().map(|_| 0)
    }

    fn copy_delta(&self) -> host::Result<u64> {
        match self.is_sealed.load(Ordering::SeqCst) {
            true => self.snapshot(),
            false => Ok(0),
        }
    }

    fn worthwhile(&self) -> u64 {
        0
    }

    fn seal(&self) {
        self.is_sealed.store(true, Ordering::SeqCst);
    }

    /// The kernel reports no error if it cannot commit a message, and takes it back.
    fn verify(&self) -> host::Result<bool> {
        let id = self.id()?;
        Ok(self.host.thin_devices(&self.pool)?.contains_key(&id))
    }
}
