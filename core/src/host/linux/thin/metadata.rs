//! The metadata of a thin pool, which the kernel changes at any time: which thin devices there are, and
//! where their blocks are.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use nix::errno::Errno;

use super::super::device_mapper::{DeviceMapper, Selector};
use super::super::{blocks, files};
use super::{failed, get_pool, node, number, number_text};
use crate::error::HostError;
use crate::host::{Extent, Result};
use crate::thin_metadata::{self, BLOCK, Damage, Metadata, SUPERBLOCK};

/// How often, and how long, another process is waited for that has a snapshot of the metadata. It reads
/// the metadata in milliseconds, or in seconds if it has millions of blocks.
const RESERVE_TRIES: u32 = 100;
const RESERVE_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// A pool has at most one snapshot of its metadata, so one thread of this process after another reads
/// it. Each pool, named by its device number, has a lock of its own, because its disk may hang.
static READERS: Mutex<BTreeMap<u64, Arc<Mutex<()>>>> = Mutex::new(BTreeMap::new());

fn reader_lock(pool: u64) -> Arc<Mutex<()>> {
    let mut readers = READERS.lock().unwrap_or_else(PoisonError::into_inner);
    readers.entry(pool).or_default().clone()
}

/// The thin devices of a pool, each with the bytes of its blocks, as of a moment after the last commit
/// before this call.
pub(in crate::host::linux) fn thin_devices(pool: &str) -> Result<BTreeMap<u32, u64>> {
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
pub(in crate::host::linux) fn extents(
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
    let reserved = reserve(mapper, number);
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

/// Reserves a snapshot of the metadata. One that stays was left by a process that was killed, or that
/// could not release it while the metadata was full, so it is released.
fn reserve(mapper: &mut DeviceMapper, pool: Selector<'_>) -> std::result::Result<(), Errno> {
    const RESERVE: &str = "reserve_metadata_snap";
    for _ in 0..RESERVE_TRIES {
        match mapper.message(pool, RESERVE) {
            Err(Errno::EBUSY) => thread::sleep(RESERVE_RETRY_INTERVAL),
            answer => return answer,
        }
    }
    mapper.message(pool, RELEASE)?;
    mapper.message(pool, RESERVE)
}

const RELEASE: &str = "release_metadata_snap";

/// The snapshot of the metadata of a pool, which is released also after a panic.
struct Reservation<'a> {
    mapper: &'a mut DeviceMapper,
    /// `None` after it was released.
    pool: Option<Selector<'static>>,
}

impl Reservation<'_> {
    fn release(&mut self) -> std::result::Result<(), Errno> {
        let pool = self.pool.take();
        pool.map_or(Ok(()), |pool| self.mapper.message(pool, RELEASE))
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
