//! Thin pools and thin devices of the kernel's dm-thin.
//!
//! A mapped device is found by its UUID and opened by its number, at the node that devtmpfs creates.
//! Links in /dev/mapper exist only where udev runs.

mod create;
mod metadata;
mod snapshot;
mod status;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use nix::errno::Errno;
use nix::sys::stat::minor;

pub(super) use self::metadata::{extents, thin_devices};
pub(super) use self::snapshot::{create_snapshot, prepare_snapshot};
pub(super) use self::status::number;
use self::status::{Pool, pool_of};
use super::device_mapper::{DeviceMapper, Selector, Target};
use super::linear;
use super::loop_device::{open_exclusive, open_verified};
use crate::error::HostError;
use crate::host::mapper::{UNKNOWN_THIN_ID, mapped_path};
use crate::host::{
    Device, DeviceHold, Effect, MappedDevice, Result, ThinMessage, ThinPoolStatus, ThinTable,
};

const SECTOR: u64 = 512;
/// The type of a thin pool in its table.
const POOL_TARGET: &str = "thin-pool";

fn failed(action: &'static str, subject: &str) -> impl Fn(Errno) -> HostError {
    move |errno| HostError::errno(action, subject, errno)
}

fn not_understood(subject: &str, line: &str) -> HostError {
    let what = format!("the device mapper answered `{line}`, which is not understood");
    HostError::unexpected("examine", subject, what)
}

/// The status of a thin pool; `None` if no device has this name, or if it has no table.
pub(super) fn pool(name: &str) -> Result<Option<ThinPoolStatus>> {
    let found = find_pool(&mut DeviceMapper::open()?, name)?;
    Ok(found.map(|pool| pool.status))
}

fn find_pool(mapper: &mut DeviceMapper, name: &str) -> Result<Option<Pool>> {
    let failed = failed("examine", name);
    let device = Selector::Name(name);
    let Some(info) = mapper
        .info(device)
        .map_err(&failed)?
        .filter(|info| info.has_table)
    else {
        return Ok(None);
    };
    // The name may belong to another device by now, but its number does not while it is one device.
    let device = Selector::Number(info.rdev);
    let table = only(mapper.table(device).map_err(&failed)?, name)?;
    let status = only(mapper.status(device).map_err(&failed)?, name)?;
    let line = || {
        not_understood(
            name,
            &format!("{} / {}", table.parameters, status.parameters),
        )
    };
    let pool = pool_of(info.rdev, &table.parameters, &status.parameters);
    Ok(Some(pool.ok_or_else(line)?))
}

/// The only target of a thin pool.
fn only(targets: Vec<Target>, name: &str) -> Result<Target> {
    match <[Target; 1]>::try_from(targets) {
        Ok([target]) if target.kind == POOL_TARGET => Ok(target),
        Ok([target]) => {
            let what = format!("it is no thin pool, but a device of type {}", target.kind);
            Err(HostError::unexpected("examine", name, what))
        }
        Err(_) => {
            let what = "it is no thin pool, but a device with several parts";
            Err(HostError::unexpected("examine", name, what))
        }
    }
}

fn number_text(rdev: u64) -> String {
    format!("{}:{}", nix::sys::stat::major(rdev), minor(rdev))
}

fn node(rdev: u64) -> Device {
    Device {
        path: PathBuf::from(format!("/dev/dm-{}", minor(rdev))),
        rdev,
    }
}

fn get_pool(mapper: &mut DeviceMapper, name: &str) -> Result<Pool> {
    let absent = || HostError::unexpected("examine", name, "there is no such thin pool");
    find_pool(mapper, name)?.ok_or_else(absent)
}

/// A pool that is not suspended. LVM suspends a pool while it extends it: a message could wait for it,
/// and the kernel refuses a table with EINVAL. EAGAIN if it is suspended.
fn get_running_pool(mapper: &mut DeviceMapper, name: &str, action: &'static str) -> Result<Pool> {
    let pool = get_pool(mapper, name)?;
    let info = mapper.info(Selector::Number(pool.status.rdev));
    match info.map_err(failed(action, name))? {
        Some(info) if info.suspended => Err(failed(action, name)(Errno::EAGAIN)),
        Some(_) | None => Ok(pool),
    }
}

/// The devices on thin devices of this pool, and those without a table whose UUID has this prefix.
pub(super) fn devices(pool: &str, prefix: &str) -> Result<Vec<MappedDevice>> {
    let mapper = &mut DeviceMapper::open()?;
    let rdev = get_pool(mapper, pool)?.status.rdev;
    devices_on(mapper, (pool, rdev), prefix, None)
}

/// The same for the pool with this number, and of the devices with this prefix only those with a UUID
/// in `own`.
pub(super) fn devices_of(
    (pool, rdev): (&str, u64),
    prefix: &str,
    own: &[&str],
) -> Result<Vec<MappedDevice>> {
    let mapper = &mut DeviceMapper::open()?;
    let rdev = match mapper.table(Selector::Number(rdev)).as_deref() {
        Ok([target]) if target.kind == POOL_TARGET => rdev,
        // It was deactivated, and may have another number now.
        Ok(_) | Err(_) => get_pool(mapper, pool)?.status.rdev,
    };
    devices_on(mapper, (pool, rdev), prefix, Some(own))
}

fn devices_on(
    mapper: &mut DeviceMapper,
    (pool, rdev): (&str, u64),
    prefix: &str,
    own: Option<&[&str]>,
) -> Result<Vec<MappedDevice>> {
    let listed = mapper.list().map_err(failed("list", "mapped devices"))?;
    let is_wanted =
        |uuid: &str| !uuid.starts_with(prefix) || own.is_none_or(|own| own.contains(&uuid));
    let mut found = Vec::new();
    for it in listed {
        // Only to save a call: the device may have been replaced since.
        if it.uuid.is_some_and(|uuid| !is_wanted(&uuid)) {
            continue;
        }
        let examined = examine(mapper, Selector::Number(it.rdev));
        let Some(device) = examined.map_err(failed("examine", &it.name))? else {
            continue;
        };
        let has_no_table = device.table.is_none();
        let targets = device.table.as_deref();
        let mut table = targets.and_then(|targets| thin_table(targets, pool, rdev));
        if let Some(bytes) = targets.and_then(failed_bytes) {
            let used = match mapper.dependencies(Selector::Number(device.device.rdev)) {
                // It was removed just now.
                Err(Errno::ENXIO) => continue,
                used => used.map_err(failed("examine", &it.name))?,
            };
            table = used.contains(&rdev).then(|| ThinTable {
                pool: pool.into(),
                id: UNKNOWN_THIN_ID,
                bytes,
            });
        }
        let is_of_pool = table.is_some() || (has_no_table && device.uuid.starts_with(prefix));
        if is_of_pool && is_wanted(&device.uuid) {
            found.push(device.with_table(table));
        }
    }
    Ok(found)
}

/// What is known of a device; `None` if it does not exist.
pub(super) fn examine(
    mapper: &mut DeviceMapper,
    device: Selector<'_>,
) -> std::result::Result<Option<MappedDevice<Vec<Target>>>, Errno> {
    let Some((info, table)) = mapper.examine(device)? else {
        return Ok(None);
    };
    Ok(Some(MappedDevice {
        device: node(info.rdev),
        uuid: mapper.uuid().to_owned(),
        table: info.has_table.then_some(table),
        read_only: info.read_only,
        has_inactive_table: info.has_inactive_table,
        suspended: info.suspended,
        deferred_remove: info.deferred_remove,
    }))
}

/// The size of a device on a thin device of a pool that has failed: the kernel answers one word instead
/// of the table.
fn failed_bytes(targets: &[Target]) -> Option<u64> {
    let mut thin = targets.iter().filter(|target| target.kind == "thin");
    let failed = thin.find(|target| target.parameters.trim() == "Fail")?;
    Some(failed.sectors * SECTOR)
}

/// The table of a device that shows a thin device of the pool with this device number.
fn thin_table(targets: &[Target], pool: &str, rdev: u64) -> Option<ThinTable> {
    let mut thin = targets.iter().filter(|target| target.kind == "thin");
    thin.find_map(|target| {
        let mut words = target.parameters.split_ascii_whitespace();
        let is_it = number(words.next()?)? == rdev;
        let id = words.next()?.parse().ok()?;
        is_it.then(|| ThinTable {
            pool: pool.into(),
            id,
            bytes: target.sectors * SECTOR,
        })
    })
}

/// Opens the device with a UUID; `None` if there is none, or it has no table. An open device keeps its
/// number.
pub(super) fn hold(uuid: &str) -> Result<Option<DeviceHold>> {
    open(uuid, open_verified)
}

/// Like [`hold`], and no file system and no other process can claim it while it is open.
pub(super) fn claim(uuid: &str) -> Result<Option<DeviceHold>> {
    open(uuid, open_exclusive)
}

fn open(uuid: &str, open: impl Fn(&Device) -> Result<File>) -> Result<Option<DeviceHold>> {
    let mapper = &mut DeviceMapper::open()?;
    let find = |mapper: &mut DeviceMapper| {
        let found = mapper.info(Selector::Uuid(uuid));
        found.map_err(failed("examine", uuid))
    };
    let Some(info) = find(mapper)?.filter(|found| found.has_table) else {
        return Ok(None);
    };
    let device = node(info.rdev);
    let file = open(&device);
    // The kernel removes a device that was closed last a moment later, and its number can pass to
    // another one before it is open.
    if find(mapper)?.is_none_or(|now| now.rdev != info.rdev) {
        return Ok(None);
    }
    Ok(Some(DeviceHold {
        device,
        keep: Box::new(OwnedFd::from(file?)),
    }))
}

/// Performs the effects on thin pools and mapped devices.
pub(super) fn act(effect: &Effect<'_>) -> Result<()> {
    let mapper = &mut DeviceMapper::open()?;
    let named = |uuid: &str| failed_on(effect, mapped_path(uuid));
    match *effect {
        Effect::ThinMessage { pool, message } => send(mapper, pool, message),
        Effect::CreateMapped { uuid } => create::create(mapper, effect, uuid),
        Effect::LoadTable {
            uuid,
            table,
            read_only,
        } => {
            let rdev = get_running_pool(mapper, &table.pool, effect.name())?
                .status
                .rdev;
            let target = Target {
                start: 0,
                sectors: table.bytes / SECTOR,
                kind: "thin".into(),
                parameters: format!("{} {}", number_text(rdev), table.id),
            };
            let loaded = mapper.load(Selector::Uuid(uuid), &[target], read_only);
            loaded.map_err(named(uuid))
        }
        Effect::LoadLinear {
            uuid,
            table,
            read_only,
        } => linear::load(mapper, uuid, table, read_only).map_err(named(uuid)),
        Effect::ResumeMapped { uuid } => {
            let resumed = mapper.resume(Selector::Uuid(uuid));
            resumed.map(drop).map_err(named(uuid))
        }
        Effect::ClearTable { uuid } => {
            let cleared = mapper.clear(Selector::Uuid(uuid));
            cleared.map(drop).map_err(named(uuid))
        }
        Effect::RemoveMapped { uuid } => match mapper.remove(Selector::Uuid(uuid), true) {
            Ok(()) | Err(Errno::ENXIO) => Ok(()),
            Err(errno) => Err(named(uuid)(errno)),
        },
        _ => Err(failed_on(effect, PathBuf::new())(Errno::ENOSYS)),
    }
}

fn failed_on(effect: &Effect<'_>, path: PathBuf) -> impl FnOnce(Errno) -> HostError {
    let action = effect.name();
    move |errno| HostError::errno(action, path, errno)
}

fn send(mapper: &mut DeviceMapper, name: &str, message: ThinMessage) -> Result<()> {
    let failed = failed(message.name(), name);
    let pool = get_running_pool(mapper, name, message.name())?;
    let device = Selector::Number(pool.status.rdev);
    let text = match message {
        ThinMessage::CreateThin { id } => format!("create_thin {id}"),
        ThinMessage::Delete { id } => format!("delete {id}"),
        ThinMessage::ReleaseMetadata => "release_metadata_snap".into(),
        ThinMessage::SetTransactionId { from, to } => format!("set_transaction_id {from} {to}"),
    };
    mapper.message(device, &text).map_err(failed)
}
