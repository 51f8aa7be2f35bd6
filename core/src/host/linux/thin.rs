//! Thin pools and thin devices of the kernel's dm-thin.
//!
//! A mapped device is found by its UUID and opened by its number, at the node that devtmpfs creates.
//! Links in /dev/mapper exist only where udev runs.

mod create;
mod snapshot;
mod status;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use nix::errno::Errno;
use nix::sys::stat::minor;

pub(super) use self::snapshot::{create_snapshot, prepare_snapshot};
pub(super) use self::status::number;
use self::status::{Pool, pool_of};
use super::blocks;
use super::device_mapper::{DeviceMapper, Selector, Suspend, Target};
use super::files;
use super::linear;
use super::loop_device::{open_exclusive, open_verified};
use crate::error::HostError;
use crate::host::mapper::mapped_path;
use crate::host::{
    Device, DeviceHold, Effect, Extent, MappedDevice, Result, ThinMessage, ThinPoolStatus,
    ThinTable,
};
use crate::thin_metadata::{self, BLOCK, Damage, Metadata, SUPERBLOCK};

const SECTOR: u64 = 512;

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
        Ok([target]) if target.kind == "thin-pool" => Ok(target),
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

/// The devices on thin devices of this pool, and those without a table whose UUID has this prefix. Of
/// the devices with this prefix, only those with a UUID in `own`, if it is given.
pub(super) fn devices(pool: &str, prefix: &str, own: Option<&[&str]>) -> Result<Vec<MappedDevice>> {
    let mapper = &mut DeviceMapper::open()?;
    let rdev = get_pool(mapper, pool)?.status.rdev;
    devices_on(mapper, (pool, rdev), prefix, own)
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
        let table = targets.and_then(|targets| thin_table(targets, pool, rdev));
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

/// A pool has at most one snapshot of its metadata, so one thread of this process after another reads
/// it. Each pool, named by its device number, has a lock of its own, because its disk may hang.
static READERS: Mutex<BTreeMap<u64, Arc<Mutex<()>>>> = Mutex::new(BTreeMap::new());

fn reader_lock(pool: u64) -> Arc<Mutex<()>> {
    let mut readers = READERS.lock().unwrap_or_else(PoisonError::into_inner);
    readers.entry(pool).or_default().clone()
}

/// The thin devices of a pool, each with the bytes of its blocks, as of a moment after the last commit
/// before this call.
pub(super) fn thin_devices(pool: &str) -> Result<BTreeMap<u32, u64>> {
    let read = |metadata: &Metadata<'_>| {
        let bytes = metadata.superblock().data_block_bytes;
        let devices = metadata.devices()?.into_iter();
        Ok(devices
            .map(|(id, device)| (id, device.mapped_blocks * bytes))
            .collect())
    };
    match committed(pool, read)? {
        Some(devices) => Ok(devices),
        None => with_metadata(pool, read),
    }
}

/// How often the metadata is read between two commits, before it is read from a snapshot. A pool
/// commits once a second, and when a device with new blocks is flushed.
const COMMITTED_TRIES: usize = 8;

/// Reads the metadata of an active pool as of its last commit, without a snapshot; `None` if it was
/// committed during each try. A snapshot costs three commits, and the kernel does not make its
/// superblock durable together with what it refers to: after a power cut at that moment, thin_check
/// demands a repair.
///
/// A commit writes the superblock last, and no block of a commit is written again before the next one
/// is complete. So what was read is whole if the superblock is the same before and after. It is
/// read twice, because the superblock may be the same again after two commits.
fn committed<T: PartialEq>(
    pool: &str,
    read: impl Fn(&Metadata<'_>) -> thin_metadata::Result<T>,
) -> Result<Option<T>> {
    let node = node(get_pool(&mut DeviceMapper::open()?, pool)?.metadata);
    let device = blocks::Reader::open(&node)?;
    let read_block = |block: u64| device.read(block.saturating_mul(BLOCK as u64), BLOCK);
    let once = || Metadata::open(&read_block).and_then(|metadata| read(&metadata));
    for _ in 0..COMMITTED_TRIES {
        let before = read_block(SUPERBLOCK)?;
        let found = [once(), once()];
        if read_block(SUPERBLOCK)? != before {
            continue;
        }
        let [first, second] = found.map(|found| found.map_err(|damage| unreadable(pool, damage)));
        let (first, second) = (first?, second?);
        if first == second {
            return Ok(Some(first));
        }
    }
    Ok(None)
}

fn unreadable(pool: &str, damage: Damage) -> HostError {
    match damage {
        Damage::Unreadable { error, .. } => error,
        Damage::Block { .. } => HostError::unexpected("examine", pool, damage.to_string()),
    }
}

/// The extents of a thin device from a byte offset on, at most `limit`, by the number of a mapped
/// device that shows it; `None` if it shows none. Dirty data is written back first.
pub(super) fn extents(
    file: &File,
    path: &Path,
    from: u64,
    limit: usize,
) -> Result<Option<Vec<Extent>>> {
    let found = file.metadata().map_err(files::failed("stat", path))?;
    if !found.file_type().is_block_device() {
        return Ok(None);
    }
    file.sync_all().map_err(files::failed("fsync", path))?;
    let Some((pool, id)) = thin_device(found.rdev())? else {
        return Ok(None);
    };
    let (ranges, bytes) = with_metadata(&pool, |metadata| {
        let bytes = metadata.superblock().data_block_bytes;
        let first = from.checked_div(bytes).unwrap_or_default();
        Ok((metadata.mapped(id, first, limit)?, bytes))
    })?;
    let absent = || HostError::unexpected("examine", &pool, format!("it has no thin device {id}"));
    let extents = ranges.ok_or_else(absent)?.into_iter().map(|range| Extent {
        logical: range.block * bytes,
        physical: range.data * bytes,
        length: range.count * bytes,
        unwritten: false,
        opaque: false,
    });
    Ok(Some(extents.collect()))
}

/// The name of the pool and the ID of the thin device that a mapped device shows.
fn thin_device(rdev: u64) -> Result<Option<(String, u32)>> {
    let mapper = &mut DeviceMapper::open()?;
    let subject = number_text(rdev);
    let failed = failed("examine", &subject);
    let table = match mapper.table(Selector::Number(rdev)) {
        Err(Errno::ENXIO) => return Ok(None),
        table => table.map_err(&failed)?,
    };
    let [target] = table.as_slice() else {
        return Ok(None);
    };
    let mut words = target.parameters.split_ascii_whitespace();
    let pool = words.next().and_then(number);
    let id = words.next().and_then(|id| id.parse().ok());
    let (Some(pool), Some(id)) = (pool.filter(|_| target.kind == "thin"), id) else {
        return Ok(None);
    };
    let found = mapper.info(Selector::Number(pool)).map_err(&failed)?;
    Ok(found.map(|_| (mapper.name().to_owned(), id)))
}

/// Reads the metadata of an active pool from a snapshot of it, which the pool holds while it is read. If
/// the process is killed, the pool keeps the snapshot.
fn with_metadata<T>(
    pool: &str,
    read: impl FnOnce(&Metadata<'_>) -> thin_metadata::Result<T>,
) -> Result<T> {
    let mapper = &mut DeviceMapper::open()?;
    let found = get_pool(mapper, pool)?;
    let lock = reader_lock(found.status.rdev);
    let _alone = lock.lock().unwrap_or_else(PoisonError::into_inner);
    let number = Selector::Number(found.status.rdev);
    let reserved = mapper.message(number, "reserve_metadata_snap");
    reserved.map_err(failed("reserve a snapshot of the metadata of", pool))?;
    let mut reservation = Reservation {
        mapper,
        pool: Some(number),
    };
    let result = read_snapshot(pool, found.metadata, read);
    let released = reservation.release();
    released.map_err(failed("release the snapshot of the metadata of", pool))?;
    result
}

/// The snapshot of the metadata of a pool, which is released also after a panic.
struct Reservation<'a> {
    mapper: &'a mut DeviceMapper,
    /// `None` after it was released.
    pool: Option<Selector<'static>>,
}

impl Reservation<'_> {
    fn release(&mut self) -> std::result::Result<(), Errno> {
        let pool = self.pool.take();
        pool.map_or(Ok(()), |pool| {
            self.mapper.message(pool, "release_metadata_snap")
        })
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if let Err(errno) = self.release() {
            tracing::error!(%errno, "failed to release the snapshot of a thin pool's metadata");
        }
    }
}

fn read_snapshot<T>(
    pool: &str,
    metadata: u64,
    read: impl FnOnce(&Metadata<'_>) -> thin_metadata::Result<T>,
) -> Result<T> {
    let node = node(metadata);
    let device = blocks::Reader::open(&node)?;
    let read_block = |block: u64| device.read(block.saturating_mul(BLOCK as u64), BLOCK);
    let unreadable = |damage| unreadable(pool, damage);
    let absent = || HostError::unexpected("examine", pool, "it has no snapshot of its metadata");
    let metadata = Metadata::open_snapshot(&read_block).map_err(unreadable)?;
    read(&metadata.ok_or_else(absent)?).map_err(unreadable)
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
        Effect::SuspendMapped { uuid } => {
            let how = Suspend {
                skip_lockfs: true,
                no_flush: false,
            };
            let suspended = mapper.suspend(Selector::Uuid(uuid), how);
            suspended.map(drop).map_err(named(uuid))
        }
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
