//! The copy of a thin device by one message. There is nothing to copy ahead of the freeze.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
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
    /// Held while no device of the pool may be created.
    pub(super) activating: Arc<Mutex<()>>,
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

    /// EBUSY if a device shows the thin device.
    fn copy_whole(&self) -> host::Result<u64> {
        let _alone = self
            .activating
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(active) = self.active()?.first() {
            let path = active.device.path.clone();
            return Err(HostError::errno("snapshot", path, Errno::EBUSY));
        }
        let extents = self.snapshot()?;
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

    fn min_useful_ranges(&self) -> u64 {
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
