//! A pool in a thin pool of LVM (`lvm:VG/POOL`): LVM has created it and owns its space, and this
//! driver owns the thin devices in it.
//!
//! Thin device 1 is one block with the [`header`], which says whose pool it is. Thin device 2 has an
//! ext4 with the records, which is mounted at [`FOLDER`] and is then the folder of the pool, like
//! that of any other kind. Every block of device 2 is allocated when the pool is created, and none is
//! freed, so a record can be written while the pool is full.
//!
//! The creation claims the pool by its transaction ID, writes the header as "claimed", completes
//! device 2, and writes the header as "ready". Each step checks whether it was done before. A process
//! that opens a pool has claimed the device of the header (O_EXCL), so two of them never create the
//! file system at the same time, and one that has waited reads the header again.

mod checks;
pub mod header;
mod opening;
pub mod raw_block;
mod release;

use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;

use super::make::{self, Probe};
use crate::backend::mapped::{load_table, suspended_by_others};
use crate::backend::thin::{
    DEVICE_PREFIX, HEADER_ID, RECORDS_ID, TRANSACTION_ID, pool_of_records, records_device,
};
use crate::error::{Error, ErrorContext, HostError, Result, chain};
use crate::host::mapper::ThinPoolMode;
use crate::host::{
    Device, DeviceHold, Effect, Host, MappedDevice, Mount, ThinPoolStatus, ThinTable,
};
use crate::model::{HomeId, PoolDefinition, PoolId, PoolPlace, ThinPoolName};
pub use checks::{find_previous_use, group_problem, problem, usable};
use header::{FoundHeader, PoolHeader};
pub use opening::{CreatePolicy, open};
pub use release::release;

/// The directory below which the records of pools are mounted.
pub const FOLDER: &str = "/run/slackwater/pools";

/// The folder of a pool, while its records are mounted.
pub fn folder(id: PoolId) -> PathBuf {
    Path::new(FOLDER).join(id.to_string())
}

/// The records of a pool, which are mounted.
#[derive(Debug)]
pub struct OpenRecords {
    /// The pool's folder.
    pub folder: PathBuf,
    pub header: PoolHeader,
}

/// Unmounts the records. No file of the pool may be open any more. The device stays, so that LVM
/// neither deactivates nor removes the thin pool. Returns whether the records were unmounted.
pub fn close(host: &dyn Host, open: &OpenRecords) -> Result<bool> {
    let target = open.folder.as_path();
    match host.perform(&Effect::Unmount { target }) {
        Err(error) if error.code() == Some(Errno::EBUSY) => Ok(false),
        done => done
            .map(|_| true)
            .context(|| format!("unmount {}", target.display())),
    }
}

/// The header of the pool of a definition; `None` if no thin pool of this name is active, or if nothing
/// was ever stored in it. It waits for the disk.
///
/// # Errors
///
/// [`Error::Damaged`] if the thin pool is in use, but has no header that can be read: it may be a pool
/// of Slackwater that has failed, or that has lost its transaction ID or its header.
pub fn identify(host: &dyn Host, name: &ThinPoolName) -> Result<Option<PoolHeader>> {
    let mapped = name.mapped();
    let doing = || format!("examine the thin pool {name}");
    let Some(status) = host.thin_pool(mapped).context(doing)? else {
        return Ok(None);
    };
    let unclear = |problem: String| {
        Err(Error::Damaged {
            path: name.to_string().into(),
            problem,
        })
    };
    if status.mode == ThinPoolMode::Failed {
        return unclear("it has failed, so its header cannot be read".into());
    }
    if status.transaction_id != TRANSACTION_ID {
        let found = status.transaction_id;
        return match checks::find_previous_use(host, &status, mapped)? {
            None if found == 0 => Ok(None),
            None | Some(_) => unclear(format!(
                "it is in use, and its transaction ID is {found} instead of {TRANSACTION_ID}"
            )),
        };
    }
    let header = match HeaderDevice::open(host, mapped, &status, false).context(doing)? {
        Some(device) => {
            let found = device.read();
            device.close();
            found.context(doing)?
        }
        None => FoundHeader::Incomplete,
    };
    match header {
        FoundHeader::Header(header) => Ok(Some(header)),
        FoundHeader::Newer(version) => Err(newer(name, version)),
        FoundHeader::Incomplete => {
            // The header is written before any other thin device is created.
            let devices = host.thin_devices(mapped).context(doing)?;
            match devices.keys().all(|id| *id == HEADER_ID) {
                true => Ok(None),
                false => unclear("its header is missing, or cannot be read".into()),
            }
        }
    }
}

/// A pool that is not opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundPool {
    pub id: PoolId,
    pub home: HomeId,
    /// The folder with its records, if they are mounted here.
    pub folder: Option<PathBuf>,
}

/// Finds a pool by its records if they are mounted here, or else by its header.
pub fn find_pool(host: &dyn Host, name: &ThinPoolName) -> Result<Option<FoundPool>> {
    let doing = || format!("examine the thin pool {name}");
    let mapped = host.thin_pool(name.mapped()).context(doing)?;
    if mapped.is_none() {
        return Ok(None);
    }
    let devices = host.mapped_devices(name.mapped(), DEVICE_PREFIX);
    let mounts = host.mounts().context(doing)?;
    for device in devices.context(doing)? {
        let Some(id) = pool_of_records(&device.uuid) else {
            continue;
        };
        let folder = folder(id);
        let shows =
            |mount: &Mount| mount.mount_point == folder && mount.device == device.device.rdev;
        if mounts.iter().any(shows)
            && let Probe::Pool(record) = make::probe(host, &folder)?
        {
            return Ok(Some(FoundPool {
                id,
                home: record.home,
                folder: Some(folder),
            }));
        }
    }
    let found = identify(host, name)?;
    Ok(found.map(|header| FoundPool {
        id: header.id,
        home: header.home,
        folder: None,
    }))
}

/// Refuses records that do not belong to the header: a file system without a pool, although the thin
/// pool has volumes, or the records of another pool.
pub fn check_folder(
    host: &dyn Host,
    pool: &PoolDefinition,
    open: &OpenRecords,
    found: &Probe,
) -> Result<()> {
    let damaged = |problem: String| {
        Err(Error::Damaged {
            path: open.folder.clone(),
            problem,
        })
    };
    let id = open.header.id;
    match found {
        Probe::Pool(record) if record.id == id => Ok(()),
        Probe::Pool(record) => damaged(format!(
            "it has the records of pool {}, but the header is that of pool {id}",
            record.id
        )),
        Probe::Blank | Probe::Missing | Probe::Image(_) | Probe::Foreign(_) => {
            let mapped = thin_pool(pool)?.mapped();
            let devices = host.thin_devices(mapped);
            let devices = devices.context(|| format!("list the thin devices of {mapped}"))?;
            match devices.keys().find(|id| **id > RECORDS_ID) {
                None => Ok(()),
                Some(id) => damaged(format!(
                    "it has no pool.json, but the thin pool has the thin device {id}; restore the records, no pool is created there"
                )),
            }
        }
    }
}

/// Gives a pool a new home. Its records must not be mounted anywhere.
pub fn set_home(host: &dyn Host, pool: &PoolDefinition, home: HomeId) -> Result<()> {
    let name = thin_pool(pool)?;
    let status = usable(host, pool, name)?;
    let mapped = name.mapped();
    let doing = || format!("change the home of pool {}", pool.name);
    let device = claim_header(host, pool, mapped, &status, Duration::ZERO)?;
    let changed = device.read().context(doing).and_then(|found| {
        let FoundHeader::Header(header) = found else {
            return Err(Error::Damaged {
                path: name.to_string().into(),
                problem: "it has no header that this program can read".into(),
            });
        };
        let records = records_device(header.id);
        let records = mapped_device(host, mapped, &records).context(doing)?;
        if let Some(records) = records
            && host.is_claimed(&records.device).context(doing)?
        {
            return Err(Error::Busy {
                subject: format!("pool {}", pool.name),
                holder: "its records are mounted; stop the driver that serves it".into(),
            });
        }
        let header = PoolHeader {
            home,
            written: header.written + 1,
            ..header
        };
        device.write(&header).context(doing)
    });
    device.close();
    changed
}

pub fn thin_pool(pool: &PoolDefinition) -> Result<&ThinPoolName> {
    match &pool.place {
        PoolPlace::Lvm { pool } => Ok(pool),
        PoolPlace::File { .. } | PoolPlace::Memory { .. } => Err(Error::refused(
            format!("pool {}", pool.name),
            "it is not a pool of LVM (lvm:VG/POOL)",
        )),
    }
}

fn newer(name: &ThinPoolName, version: u32) -> Error {
    Error::Damaged {
        path: name.to_string().into(),
        problem: format!(
            "its header has version {version}, which this program does not support; use the newer program"
        ),
    }
}

/// The mapped device with a UUID that shows a thin device of a pool, or has no table yet.
fn mapped_device(
    host: &dyn Host,
    pool: &str,
    uuid: &str,
) -> crate::host::Result<Option<MappedDevice>> {
    let mut all = host.mapped_devices(pool, DEVICE_PREFIX)?.into_iter();
    Ok(all.find(|device| device.uuid == uuid))
}

/// Refuses a pool while another program has mapped the thin device of its header or of its records:
/// both would write to it. Those of volumes are refused when they are attached.
fn refuse_foreign(host: &dyn Host, mapped: &str) -> crate::host::Result<()> {
    for found in host.mapped_devices(mapped, DEVICE_PREFIX)? {
        let id = found.table.map(|table| table.id);
        if let Some(id @ (HEADER_ID | RECORDS_ID)) = id
            && !found.uuid.starts_with(DEVICE_PREFIX)
        {
            let (path, uuid) = (found.device.path.display(), found.uuid);
            let what = format!(
                "another program has mapped its thin device {id} as {path} (UUID {uuid:?}); end that program, or run: dmsetup remove {path}"
            );
            return Err(HostError::unexpected("use", mapped, what));
        }
    }
    Ok(())
}

/// Opens the device of the header exclusively. Waits for `max_wait` while another process has it.
fn claim_header<'a>(
    host: &'a dyn Host,
    pool: &PoolDefinition,
    mapped: &str,
    status: &ThinPoolStatus,
    max_wait: Duration,
) -> Result<HeaderDevice<'a>> {
    const RETRY_INTERVAL: Duration = Duration::from_millis(50);
    let mut waited = Duration::ZERO;
    loop {
        match HeaderDevice::open(host, mapped, status, true) {
            Ok(Some(device)) => return Ok(device),
            Err(error) if error.code() == Some(Errno::EBUSY) && waited >= max_wait => {
                return Err(Error::Locked {
                    place: pool.place.to_string(),
                });
            }
            Err(error) if error.code() != Some(Errno::EBUSY) => {
                return Err(error).context(|| format!("open the header of pool {}", pool.name));
            }
            // Another process has removed it just now.
            Ok(None) if waited >= max_wait => {
                return Err(Error::Pending {
                    what: format!("pool {}", pool.name),
                });
            }
            Ok(None) | Err(_) => {}
        }
        host.pause(RETRY_INTERVAL);
        waited += RETRY_INTERVAL;
    }
}

/// The device of a pool's header.
pub(crate) struct HeaderDevice<'a> {
    host: &'a dyn Host,
    uuid: String,
    hold: DeviceHold,
}

impl<'a> HeaderDevice<'a> {
    /// Creates the device, or uses one that another process has or that a crash has left. `None` if
    /// the thin device does not exist, or if another process has removed the device just now.
    pub(crate) fn open(
        host: &'a dyn Host,
        mapped: &str,
        status: &ThinPoolStatus,
        exclusively: bool,
    ) -> crate::host::Result<Option<HeaderDevice<'a>>> {
        refuse_foreign(host, mapped)?;
        let number = status.rdev;
        let (major, minor) = (nix::sys::stat::major(number), nix::sys::stat::minor(number));
        let uuid = format!("{DEVICE_PREFIX}header-{major}-{minor}");
        let perform = |effect: Effect<'_>| host.perform(&effect).map(drop);
        let found = mapped_device(host, mapped, &uuid)?;
        let is_suspended = |found: &MappedDevice| found.suspended && found.table.is_some();
        if found.as_ref().is_some_and(is_suspended) {
            let what = suspended_by_others(&uuid);
            return Err(HostError::unexpected("use", mapped, what));
        }
        if found.is_none_or(|found| found.table.is_none()) {
            // One without a table was left by a crash.
            perform(Effect::RemoveMapped { uuid: &uuid })?;
            let table = &ThinTable {
                pool: mapped.into(),
                id: HEADER_ID,
                bytes: status.block_bytes,
            };
            // A device that another process has created is not removed.
            perform(Effect::CreateMapped { uuid: &uuid })?;
            if let Err(error) = load_table(host, &uuid, table) {
                perform(Effect::RemoveMapped { uuid: &uuid })?;
                return match error.code() {
                    Some(Errno::ENODATA) => Ok(None),
                    _ => Err(error),
                };
            }
        }
        let hold = match exclusively {
            true => host.claim_mapped(&uuid)?,
            false => host.hold_mapped(&uuid)?,
        };
        Ok(hold.map(|hold| HeaderDevice { host, uuid, hold }))
    }

    fn device(&self) -> &Device {
        &self.hold.device
    }

    fn read(&self) -> crate::host::Result<FoundHeader> {
        let slots = self
            .host
            .read_blocks(self.device(), 0, header::SLOTS_BYTES)?;
        Ok(header::decode(&slots))
    }

    fn write(&self, header: &PoolHeader) -> crate::host::Result<()> {
        let written = self.host.perform(&Effect::WriteBlocks {
            device: self.device(),
            offset: header.offset(),
            bytes: &header.encode(),
        });
        written.map(drop)
    }

    /// Damages the header, and closes the device.
    #[cfg(test)]
    pub(crate) fn overwrite(self, bytes: &[u8]) {
        let device = self.device();
        let damage = Effect::WriteBlocks {
            device,
            offset: 0,
            bytes,
        };
        self.host.perform(&damage).expect("the header is written");
        self.close();
    }

    /// Removes the device. If that fails, the next process that opens the pool uses it.
    pub(crate) fn close(self) {
        let HeaderDevice { host, uuid, hold } = self;
        drop(hold);
        if let Err(error) = host.perform(&Effect::RemoveMapped { uuid: &uuid }) {
            tracing::warn!(device = uuid, error = %chain(&error), "failed to remove the device of a pool's header");
        }
    }
}

fn gone(uuid: &str) -> HostError {
    HostError::errno("open", crate::host::mapped_path(uuid), Errno::ENXIO)
}
