//! A volume as the kernel shows it: its devices and their mounts.

use crate::backend::FoundDevice;
use crate::error::Result;
use crate::host::{Device, Mount};
use crate::operation::{Pool, Usage, usage};
use crate::record::VolumeRecord;

/// The state of a volume in the kernel at one moment.
pub(in crate::operation) struct View {
    pub(in crate::operation) devices: Vec<FoundDevice>,
    pub(in crate::operation) mounts: Vec<Mount>,
}

impl Usage {
    pub(in crate::operation) fn view(&self, pool: &Pool, record: &VolumeRecord) -> Result<View> {
        let devices = pool.backend.devices().list(record.uuid)?;
        let mounts = self.mounts()?;
        Ok(View { devices, mounts })
    }
}

impl View {
    /// Mounts that show the volume.
    pub(in crate::operation) fn uses(&self) -> Vec<&Mount> {
        self.mounts
            .iter()
            .filter(|mount| self.device_of(mount).is_some())
            .collect()
    }

    /// The volume's device that a mount shows.
    pub(in crate::operation) fn device_of(&self, mount: &Mount) -> Option<&Device> {
        self.devices
            .iter()
            .map(|found| &found.device)
            .find(|device| usage::shows(mount, device))
    }
}
