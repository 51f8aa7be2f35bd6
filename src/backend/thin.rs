//! A pool of thin devices: each volume and snapshot is a thin device of one thin pool.
//!
//! The ID of the thin device is the number of the image in its record. A snapshot is created within
//! the cut, by one message, so nothing of it exists in the pool before. A device has the UUID
//! `SLACKWATER-<pool>-<volume or snapshot>`: the kernel refuses a second device with the same UUID,
//! so an image never has two, and a device is found even while no record can be read.

mod copier;
mod device;
mod message;
mod numbers;
mod recorded;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use nix::errno::Errno;
use uuid::Uuid;

pub(super) use self::message::claim;
use self::message::{check_committed, check_identity, send, status};
use self::numbers::ThinIdAllocator;
pub use self::recorded::recorded_ids;
use self::recorded::{ThinImage, image_in, objects};
use super::mapped::UnusedTables;
use super::records::{SNAPSHOTS, TRASH, VOLUMES, part};
use super::store::{DeletedImage, ImageSize, NewImage, Store, StoreProperties};
use super::{Copier, Image, ImageHandle, MetadataSpace};
use crate::error::{Error, ErrorContext, HostError, Result};
use crate::host::{self, Budget, Device, DeviceHold, Effect, FileId, Host, Space, ThinMessage};
use crate::model::size::image_bytes;
use crate::model::{PoolId, Wipe, size};

/// What the UUIDs of all devices of this driver begin with.
pub const DEVICE_PREFIX: &str = host::mapper::UUID_PREFIX;

/// The share of its metadata that a thin pool keeps free: without free metadata it could not create
/// snapshots, and writes to shared blocks would fail.
pub const METADATA_RESERVE_DIVISOR: u64 = 10;

/// The transaction ID of a thin pool that this driver uses: the bytes of "slackwtr", so that no other
/// program arrives at it. LVM counts from 0, Docker from 1, and containerd leaves 0. LVM creates no
/// thin volumes in a pool whose transaction ID is not the one that it has recorded.
pub const TRANSACTION_ID: u64 = u64::from_be_bytes(*b"slackwtr");

/// The thin device with the header of a pool of LVM.
pub const HEADER_ID: u32 = 1;
/// The thin device with the records of a pool of LVM.
pub const RECORDS_ID: u32 = 2;
/// The first ID of a volume or snapshot.
const FIRST_ID: u32 = 3;

/// The thin device that doctor creates for a trial, and removes again. No volume gets this ID.
pub const TRIAL_ID: u32 = host::mapper::MAX_THIN_ID;

/// The UUID of the mapped device of a volume or snapshot.
pub fn device_uuid(pool: PoolId, uuid: Uuid) -> String {
    format!("{DEVICE_PREFIX}{pool}-{uuid}")
}

/// The UUID of the mapped device with the records of a pool.
pub fn records_device(id: PoolId) -> String {
    format!("{DEVICE_PREFIX}{id}{RECORDS_SUFFIX}")
}

/// The pool with this device of records.
pub fn pool_of_records(device: &str) -> Option<PoolId> {
    let id = device.strip_prefix(DEVICE_PREFIX)?;
    id.strip_suffix(RECORDS_SUFFIX)?.parse().ok()
}

const RECORDS_SUFFIX: &str = "-records";

/// The thin devices of a pool.
pub(super) struct ThinStore {
    host: Arc<dyn Host>,
    /// The path of the folder through the pinned descriptor.
    root: PathBuf,
    /// The name of the thin pool.
    pool: String,
    /// What the UUIDs of its devices begin with.
    prefix: String,
    /// The device number of the thin pool.
    rdev: u64,
    facts: StoreProperties,
    numbers: Mutex<ThinIdAllocator>,
    /// Held while a device is looked for and created.
    activating: Arc<Mutex<()>>,
    tables: UnusedTables,
}

impl ThinStore {
    /// The caller has the lock of the pool, so no other process of this driver reads its metadata.
    pub(super) fn open(
        host: Arc<dyn Host>,
        root: &Path,
        pool: &str,
        id: PoolId,
    ) -> host::Result<ThinStore> {
        let sector = host.backing_fs(root)?.sector;
        let facts = StoreProperties {
            shares_blocks: true,
            default_block_size: sector,
            min_block_size: sector,
            thick_refusal: None,
            // dm-thin compares times and counts no references: a write to a block that was once
            // shared needs a free block, even if the other image has given it up.
            unshares: false,
            reserves_by_writing: true,
            zeroing_refusal: Some(
                "a thin pool writes to new blocks where blocks are shared, and the old blocks would keep their data",
            ),
            largest: size::MAX,
        };
        let status = status(host.as_ref(), pool)?;
        if status.holds_metadata {
            // A process that has read the metadata was killed before it released the snapshot.
            let message = ThinMessage::ReleaseMetadata;
            send(host.as_ref(), pool, status.rdev, message)?;
        }
        let store = ThinStore {
            rdev: status.rdev,
            root: root.to_path_buf(),
            pool: pool.into(),
            prefix: format!("{DEVICE_PREFIX}{id}-"),
            facts,
            numbers: Mutex::default(),
            activating: Arc::default(),
            tables: UnusedTables::default(),
            host,
        };
        let numbers = store.read_numbers()?;
        *store.numbers.lock().unwrap_or_else(PoisonError::into_inner) = numbers;
        Ok(store)
    }

    /// The IDs of all thin devices and of all records, including those in the trash. Before that,
    /// the removal of records is made durable: a record that came back with a power loss would
    /// delete the thin device that has its ID by then.
    fn read_numbers(&self) -> host::Result<ThinIdAllocator> {
        let devices = self.host.thin_devices(&self.pool)?;
        let mut taken: BTreeSet<u32> = devices.into_keys().collect();
        for dir in objects(self.host.as_ref(), &self.root.join(TRASH))? {
            self.perform(Effect::SyncDir { path: &dir })?;
        }
        for part in [TRASH, VOLUMES, SNAPSHOTS] {
            let folder = &self.root.join(part);
            if self.host.stat(folder)?.is_some() {
                self.perform(Effect::SyncDir { path: folder })?;
            }
        }
        let recorded = recorded_ids(self.host.as_ref(), &self.root)?;
        taken.extend(recorded.ids);
        taken.extend(self.shown()?);
        let host = self.host.as_ref();
        ThinIdAllocator::read(host, &self.root, taken, recorded.is_incomplete)
    }

    /// The IDs in the tables of all devices, including foreign ones.
    fn shown(&self) -> host::Result<BTreeSet<u32>> {
        let tables = self.mapped()?.into_iter().filter_map(|it| it.table);
        Ok(tables.map(|table| table.id).collect())
    }

    fn perform(&self, effect: Effect<'_>) -> host::Result<()> {
        self.host.perform(&effect).map(drop)
    }

    fn send(&self, message: ThinMessage) -> host::Result<()> {
        send(self.host.as_ref(), &self.pool, self.rdev, message)
    }

    /// The UUID of the device of a volume or snapshot.
    fn device_uuid(&self, uuid: Uuid) -> String {
        format!("{}{uuid}", self.prefix)
    }

    fn find_image(&self, image: Image) -> host::Result<Option<ThinImage>> {
        image_in(self.host.as_ref(), &self.root.join(part(image)))
    }

    fn get_image(&self, image: Image) -> host::Result<ThinImage> {
        let absent = || HostError::errno("find", self.root.join(part(image)), Errno::ENOENT);
        self.find_image(image)?.ok_or_else(absent)
    }

    /// The handle of an image of `bytes` that is shown by a device.
    fn handle(&self, held: DeviceHold, bytes: u64) -> host::Result<ImageHandle> {
        let path = held.device.path.clone();
        let stat = self.host.stat(&path)?;
        Ok(ImageHandle {
            host: self.host.clone(),
            path,
            bytes,
            modified: stat.map_or(0, |stat| stat.modified),
            device: Some(held),
        })
    }
}

impl Store for ThinStore {
    fn facts(&self) -> StoreProperties {
        self.facts
    }

    /// Without enough free metadata nothing is available.
    fn space(&self) -> host::Result<Space> {
        let status = status(self.host.as_ref(), &self.pool)?;
        let is_short = status.metadata.free() < status.metadata.total / METADATA_RESERVE_DIVISOR;
        let free = if is_short { 0 } else { status.data.free() };
        Ok(Space {
            total: status.data.total,
            available: free,
            free,
            inodes: 0,
            inodes_free: 0,
        })
    }

    fn metadata(&self) -> host::Result<Option<MetadataSpace>> {
        let status = status(self.host.as_ref(), &self.pool)?;
        Ok(Some((&status).into()))
    }

    fn deleted(&self) -> host::Result<Vec<DeletedImage>> {
        recorded::deleted(self.host.as_ref(), &self.root, &self.pool)
    }

    /// [`Store::wipe`] has discarded the blocks.
    fn trim(&self) -> host::Result<()> {
        Ok(())
    }

    fn allocate_id(&self) -> Result<u32> {
        let mut numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        numbers.take((self.host.as_ref(), &self.root), &self.pool, || {
            self.shown()
        })
    }

    fn size(&self, image: Image) -> host::Result<Option<ImageSize>> {
        Ok(self.sizes(&[image])?.pop().flatten())
    }

    fn sizes(&self, images: &[Image]) -> host::Result<Vec<Option<ImageSize>>> {
        if images.is_empty() {
            return Ok(Vec::new());
        }
        let devices = self.host.thin_devices(&self.pool)?;
        let each = images.iter().map(|image| match self.find_image(*image) {
            Ok(Some(image)) => {
                let length = image_bytes(image.size);
                Ok(devices.get(&image.id).map(|allocated| ImageSize {
                    length,
                    // A growth that failed may have left blocks beyond the end.
                    allocated: length.min(*allocated),
                }))
            }
            Ok(None) => Ok(None),
            Err(_) => {
                let bytes = recorded::unnamed(self.host.as_ref(), &self.root, &devices)?;
                Ok(Some(ImageSize {
                    length: bytes,
                    allocated: bytes,
                }))
            }
        });
        each.collect()
    }

    fn length(&self, image: Image) -> host::Result<Option<u64>> {
        let image = self.find_image(image)?;
        Ok(image.map(|image| image_bytes(image.size)))
    }

    fn create(&self, image: Image, new: NewImage) -> host::Result<()> {
        match new.like {
            // The copier creates it, together with its blocks.
            Some(_) => Ok(()),
            None => {
                let id = self.get_image(image)?.id;
                self.send(ThinMessage::CreateThin { id })?;
                check_committed(self.host.as_ref(), &self.pool)
            }
        }
    }

    /// Users cannot write to these blocks before a record is written that has their size, so a repeat
    /// after a crash does no harm. The blocks keep their content, because an error may have hidden
    /// that the record was written.
    fn open_beyond(&self, image: Image, length: u64) -> Result<(ImageHandle, u64)> {
        let doing = || format!("open the thin device of {image} beyond its end");
        let found = self.get_image(image).context(doing)?;
        let from = image_bytes(found.size).max(self.shown_bytes(found)?);
        let held = self.open_second(ThinImage {
            size: length,
            ..found
        })?;
        Ok((self.handle(held, length).context(doing)?, from))
    }

    /// A thin device has no length. Its record has one, which its device gets.
    fn lengthen(&self, _: Image, _: u64, _: bool) -> host::Result<()> {
        Ok(())
    }

    fn shorten(&self, _: Image, _: u64) -> host::Result<()> {
        Ok(())
    }

    /// Messages are durable at once. What was written to a device is durable after its fsync, which
    /// the store itself does before it closes a device.
    fn sync(&self, image: Image) -> host::Result<()> {
        let own = self.device_uuid(self.get_image(image)?.uuid);
        match self.host.hold_mapped(&own)? {
            Some(held) => self.perform(Effect::SyncFile {
                path: &held.device.path,
            }),
            None => Ok(()),
        }
    }

    /// It would not help: see [`StoreProperties::unshares`].
    fn unshare(&self, _: Image, _: u64, _: u64) -> host::Result<()> {
        Ok(())
    }

    fn renew_fs_id(&self, image: Image, uuid: Uuid) -> Result<()> {
        let doing = || format!("assign a new fsid to the btrfs of {image}");
        let held = self.open_device(self.get_image(image).context(doing)?)?;
        let path = &held.device.path;
        self.perform(Effect::RenewFsId { image: path, uuid })
            .and_then(|()| self.perform(Effect::SyncFile { path }))
            .context(doing)
    }

    fn open(&self, image: Image) -> Result<ImageHandle> {
        let doing = || format!("open the thin device of {image}");
        let found = self.get_image(image).context(doing)?;
        let held = self.open_device(found)?;
        let mut handle = self.handle(held, image_bytes(found.size)).context(doing)?;
        if let Image::Snapshot(_) = image {
            // Nothing writes to it, and no other image gets its ID. Its device is new each time.
            handle.modified = u64::from(found.id);
        }
        Ok(handle)
    }

    fn copier(&self, source: Image, copy: Image, _: &Arc<Budget>) -> Result<Box<dyn Copier>> {
        let found = self.get_image(source);
        let found = found.context(|| format!("find the thin device of {source}"))?;
        let origin = found.id;
        Ok(Box::new(copier::ThinCopier {
            host: self.host.clone(),
            pool: self.pool.clone(),
            prefix: self.prefix.clone(),
            device: self.device_uuid(found.uuid),
            origin,
            copy: self.root.join(part(copy)),
            id: OnceLock::new(),
            prepared: OnceLock::new(),
            image: FileId {
                device: self.rdev,
                inode: u64::from(origin),
            },
            is_sealed: AtomicBool::new(false),
            activating: self.activating.clone(),
        }))
    }

    /// Whether the thin device exists is seen when it is deleted.
    fn has_image(&self, dir: &Path) -> host::Result<bool> {
        Ok(image_in(self.host.as_ref(), dir)?.is_some())
    }

    /// A thin pool does not discard the blocks of a thin device that is deleted, so they are
    /// discarded before. Zeroing is refused when a volume is created.
    fn wipe(&self, dir: &Path, wipe: Wipe) -> Result<bool> {
        let doing = || format!("wipe an image ({})", wipe.as_str());
        match wipe {
            Wipe::None => return Ok(false),
            Wipe::Zero => {
                return Err(HostError::errno("zero", dir, Errno::EOPNOTSUPP)).context(doing);
            }
            Wipe::Discard => {}
        }
        let Some(image) = image_in(self.host.as_ref(), dir).context(doing)? else {
            return Ok(false);
        };
        let devices = self.host.thin_devices(&self.pool).context(doing)?;
        if devices.contains_key(&image.id) {
            // The device of a thick volume takes no discards.
            self.remove_devices(image.uuid).context(doing)?;
            let held = self.open_device(image)?;
            let path = &held.device.path;
            self.perform(Effect::Discard { path, from: 0 })
                .context(doing)?;
        }
        Ok(false)
    }

    fn remove(&self, dir: &Path) -> host::Result<()> {
        let Some(ThinImage { uuid, id, .. }) = image_in(self.host.as_ref(), dir)? else {
            return Ok(());
        };
        self.remove_devices(uuid)?;
        match self.send(ThinMessage::Delete { id }) {
            Err(error) if error.code() == Some(Errno::ENODATA) => Ok(()),
            Ok(()) => check_committed(self.host.as_ref(), &self.pool),
            Err(error) => Err(error),
        }
    }

    fn detach_idle(
        &self,
        images: &[Image],
        in_use: &dyn Fn(&Device) -> bool,
    ) -> Result<Vec<(Device, Result<()>)>> {
        self.remove_idle(images, in_use)
    }
}

fn missing_error(uuid: Uuid) -> Error {
    Error::Damaged {
        path: part(Image::Volume(uuid)),
        problem: "the thin device is missing".into(),
    }
}
