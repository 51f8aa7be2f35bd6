//! What the mapped devices of all kinds of pools have in common.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use uuid::Uuid;
use uuid::fmt::Hyphenated;

use crate::error::{Error, ErrorContext, Result};
use crate::host::mapper::UUID_PREFIX;
use crate::host::{self, Effect, Host, MappedDevice, ThinTable, mapped_path};

/// The name of the directory of the volume or snapshot with this device.
pub fn object_of_device(device: &str) -> Option<&str> {
    let (_, name) = device.split_at_checked(device.len().checked_sub(Hyphenated::LENGTH)?)?;
    let is_object = device.starts_with(UUID_PREFIX) && Uuid::try_parse(name).is_ok();
    is_object.then_some(name)
}

/// The tables that this process has loaded and not used, since a step failed and so did dropping the
/// table: the UUIDs of their devices. Without them, a table that is not in use is another program's.
#[derive(Default)]
pub(super) struct UnusedTables(Mutex<BTreeSet<String>>);

impl UnusedTables {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loads a table into the device with this UUID, and switches the device to it. After an error the
    /// device has the table that it had.
    pub(super) fn switch(
        &self,
        host: &dyn Host,
        uuid: &str,
        load: &Effect<'_>,
    ) -> host::Result<()> {
        // A load whose result is an error may have been done.
        self.lock().insert(uuid.into());
        let loaded = host.perform(load);
        let done = loaded.and_then(|_| host.perform(&Effect::ResumeMapped { uuid }));
        if done.is_ok() || host.perform(&Effect::ClearTable { uuid }).is_ok() {
            self.lock().remove(uuid);
        }
        done.map(drop)
    }

    /// What another program does with a device, if it is about to change it. A table that this process
    /// has left is dropped.
    pub(super) fn changed_by_others<T>(
        &self,
        host: &dyn Host,
        found: &MappedDevice<T>,
    ) -> host::Result<Option<String>> {
        let uuid = &found.uuid;
        if found.suspended {
            return Ok(Some(suspended_by_others(uuid)));
        }
        if !found.has_inactive_table {
            return Ok(None);
        }
        if self.lock().contains(uuid) {
            host.perform(&Effect::ClearTable { uuid })?;
            self.lock().remove(uuid);
            return Ok(None);
        }
        let name = uuid.to_ascii_lowercase();
        Ok(Some(format!(
            "another program has loaded a table into {name} that is not in use yet; if no program needs it: dmsetup clear {name}"
        )))
    }
}

/// The error for a device that cannot be removed because another program has suspended it.
pub(super) fn suspended_error<T>(found: &MappedDevice<T>) -> Error {
    Error::Busy {
        subject: found.device.path.display().to_string(),
        holder: suspended_by_others(&found.uuid),
    }
}

/// Drops a table that was loaded and is not in use: a crash came in between.
pub(super) fn clear_unused_table<T>(host: &dyn Host, found: &MappedDevice<T>) -> Result<()> {
    let uuid = &found.uuid;
    if found.has_inactive_table {
        let cleared = host.perform(&Effect::ClearTable { uuid });
        cleared.context(|| format!("clear {}", mapped_path(uuid).display()))?;
    }
    Ok(())
}

/// Creates a device with this table. After an error it may exist, with or without the table.
pub(crate) fn create_mapped(host: &dyn Host, uuid: &str, table: &ThinTable) -> host::Result<()> {
    host.perform(&Effect::CreateMapped { uuid })?;
    load_table(host, uuid, table)
}

/// Loads a table into a device that has none, and puts it in use.
pub(super) fn load_table(host: &dyn Host, uuid: &str, table: &ThinTable) -> host::Result<()> {
    host.perform(&Effect::LoadTable {
        uuid,
        table,
        read_only: false,
    })?;
    host.perform(&Effect::ResumeMapped { uuid }).map(drop)
}

pub(super) fn suspended_by_others(uuid: &str) -> String {
    let name = uuid.to_ascii_lowercase();
    format!("another program has suspended {name}; if no program needs that: dmsetup resume {name}")
}
