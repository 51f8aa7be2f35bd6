//! A pool of image files: `pool.json`, `lock`, `trash/`, and a directory with `record.json` and
//! `data.img` for each volume below `volumes/` and each snapshot below `snapshots/`.
//!
//! All paths go through a pinned descriptor of the folder, so a file system that is mounted over it
//! later is never taken for the pool.

mod copier;
mod device;
mod folder;
mod image;
mod record_store;
mod recover;
mod room;
mod snapshot;
#[cfg(test)]
mod tests;
mod trim;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use uuid::Uuid;

use super::{
    Admit, AttachMode, Attached, Backend, Copier, FoundDevice, Image, ImageHandle, Leftover,
    Leftovers, PoolSpace,
};
use crate::error::{ErrorContext, Result};
use crate::host::{self, Budget, Device, Effect, Host, Kept, LoopHold, LoopStatus, Space};
use crate::model::size;
use crate::record::{self, PoolRecord, SnapshotOrigin, SnapshotRecord, VolumeRecord};
use folder::Folder;
use record_store::RecordStore;
use room::Growing;

/// The name of the pool's record within its folder.
pub const POOL_FILE: &str = "pool.json";
/// The name of the file that the serving process locks.
pub const LOCK_FILE: &str = "lock";
/// The directory of volumes.
pub const VOLUMES: &str = "volumes";
/// The directory of snapshots.
pub const SNAPSHOTS: &str = "snapshots";
/// The directory of volumes and snapshots that are being deleted.
pub const TRASH: &str = "trash";
/// The maximum size of a file on an ext4 with blocks of 4 KiB.
const LARGEST_ON_EXT4: u64 = (1 << 44) - 4096;
const RECORD: &str = "record.json";
/// The name of the image of a volume or snapshot within its directory.
pub const IMAGE: &str = "data.img";

/// A pool of image files.
pub struct FileBackend {
    folder: Arc<Folder>,
    volumes: RecordStore<VolumeRecord>,
    snapshots: RecordStore<SnapshotRecord>,
    /// Held while available space is checked and taken.
    growing: Mutex<Growing>,
    pool: PoolRecord,
    sector: u32,
    least_sector: u32,
    fs_name: String,
    shares_blocks: bool,
    /// The extent size hint of new images in bytes, if the pool's definition sets one.
    extent: Option<u64>,
    /// The pinned folder and the pool's lock, which this value keeps.
    _kept: [Kept; 2],
}

/// What was found at a configured path.
pub enum OpenResult {
    /// No pool: the folder has no `pool.json`.
    Blank,
    /// Another process serves it.
    Locked(PoolRecord),
    /// A pool, which is now locked by this process.
    Pool(Box<FileBackend>),
}

impl FileBackend {
    /// Reads the record of the pool at a path without taking its lock; `None` if there is no pool.
    pub fn identify(host: &dyn Host, path: &Path) -> Result<Option<PoolRecord>> {
        record::load(host, &path.join(POOL_FILE))
    }

    /// Opens the pool at `path`: takes its lock, for which it waits for `patience`, and reads its
    /// records.
    pub fn open(host: Arc<dyn Host>, path: &Path, patience: Duration) -> Result<OpenResult> {
        let what = || format!("open the directory of pool {}", path.display());
        if host.stat(&path.join(POOL_FILE)).context(what)?.is_none() {
            return Ok(OpenResult::Blank);
        }
        let (root, pinned) = host.pin_dir(path).context(what)?;
        let Some(pool) = record::load::<PoolRecord>(host.as_ref(), &root.join(POOL_FILE))? else {
            return Ok(OpenResult::Blank);
        };
        let lock = host.lock_file(&root.join(LOCK_FILE), patience);
        let Some(lock) = lock.context(what)? else {
            return Ok(OpenResult::Locked(pool));
        };
        let ground = host.backing_fs(path).context(what)?;
        let folder = Arc::new(Folder::new(host, path.to_path_buf(), root));
        folder.find_untold()?;
        Ok(OpenResult::Pool(Box::new(FileBackend {
            volumes: RecordStore::read(folder.clone())?,
            snapshots: RecordStore::read(folder.clone())?,
            folder,
            growing: Mutex::default(),
            pool,
            sector: ground.sector,
            least_sector: ground.least_sector,
            fs_name: ground.fs_name,
            shares_blocks: ground.shares_blocks,
            extent: None,
            _kept: [pinned, lock],
        })))
    }

    /// Sets the extent size hint of new images, in bytes.
    pub fn with_extent(self, extent: Option<u64>) -> FileBackend {
        FileBackend { extent, ..self }
    }

    /// Whether the pool's file system is known to write blocks in place. Other file systems may
    /// accept a reservation and a clone without keeping either promise (ZFS, bcachefs, f2fs,
    /// nilfs2).
    fn writes_in_place(&self) -> bool {
        matches!(self.fs_name.as_str(), "xfs" | "ext4" | "ext3" | "ext2")
    }

    fn image_of(&self, image: Image) -> PathBuf {
        match image {
            Image::Volume(uuid) => self.volumes.image(uuid),
            Image::Snapshot(uuid) => self.snapshots.image(uuid),
        }
    }
}

/// Writes to the disk of the pool in a folder, durably. The lock file has no content, so writing it
/// takes no space. A read would not be enough: it may still succeed on a file system that is frozen
/// or whose disk is gone.
pub fn write_lock(host: &dyn Host, folder: &Path) -> host::Result<()> {
    let path = &folder.join(LOCK_FILE);
    host.perform(&Effect::WriteFile { path, bytes: &[] })?;
    host.perform(&Effect::SyncFile { path }).map(drop)
}

impl Backend for FileBackend {
    fn pool(&self) -> &PoolRecord {
        &self.pool
    }

    fn place(&self) -> String {
        format!("file:{}", self.folder.path.display())
    }

    fn path(&self) -> PathBuf {
        self.folder.path.clone()
    }

    fn default_block_size(&self) -> u32 {
        self.sector
    }

    fn least_block_size(&self) -> u32 {
        self.least_sector
    }

    fn refuses_thick(&self) -> Option<&'static str> {
        match self.fs_name.as_str() {
            _ if self.writes_in_place() => None,
            "btrfs" => Some("btrfs copies on write, even where blocks are reserved"),
            _ => Some("only xfs and ext4 are known to write to reserved blocks in place"),
        }
    }

    fn refuses_zeroing(&self) -> Option<&'static str> {
        match self.fs_name.as_str() {
            _ if self.writes_in_place() => None,
            "btrfs" => Some(
                "btrfs copies on write: zeros would go to new blocks, and the old blocks would keep their data",
            ),
            _ => Some("only xfs and ext4 are known to overwrite blocks in place"),
        }
    }

    fn largest(&self) -> u64 {
        match self.fs_name.as_str() {
            "ext4" | "ext3" | "ext2" => LARGEST_ON_EXT4,
            _ => size::MAX,
        }
    }

    fn volume(&self, uuid: Uuid) -> Result<Option<VolumeRecord>> {
        self.volumes.get(uuid)
    }

    fn volumes(&self, after: Option<Uuid>, limit: usize) -> Vec<VolumeRecord> {
        self.volumes.ready(after, limit)
    }

    fn damaged(&self) -> Vec<(Uuid, String)> {
        self.volumes.damaged()
    }

    fn known_volumes(&self) -> Vec<Uuid> {
        self.volumes.all()
    }

    fn count(&self) -> u64 {
        self.volumes.count()
    }

    fn space(&self) -> Result<PoolSpace> {
        self.measure_room()
    }

    fn disk(&self) -> Result<Space> {
        self.measure_disk()
    }

    fn try_disk(&self) -> Result<()> {
        write_lock(self.folder.host.as_ref(), &self.folder.root)
            .context(|| "write to its disk".into())
    }

    fn create(&self, record: VolumeRecord, admit: Admit<'_>) -> Result<VolumeRecord> {
        self.create_image(record, admit)
    }

    fn update(&self, record: &VolumeRecord) -> Result<()> {
        self.volumes.update(record)
    }

    fn grow(&self, record: &VolumeRecord, size: u64, admit: Admit<'_>) -> Result<VolumeRecord> {
        self.grow_image(record, size, admit)
    }

    fn delete(&self, uuid: Uuid) -> Result<()> {
        self.volumes.delete(uuid)
    }

    fn hide(&self, uuid: Uuid) -> Result<()> {
        self.volumes.hide(uuid)
    }

    fn delete_unanswered(&self, uuid: Uuid) -> Result<()> {
        self.volumes.delete_unanswered(uuid)
    }

    fn leftovers(&self) -> Result<Vec<Leftover>> {
        self.find_leftovers()
    }

    fn clean_up(&self, leftover: &Leftover) -> Result<bool> {
        self.clean_up_leftover(leftover)
    }

    fn is_wiped(&self, leftover: &Leftover) -> bool {
        self.asks_for_wipe(leftover)
    }

    fn tell_disk(&self) -> Result<()> {
        self.folder.tell_disk()
    }

    fn trimmed(&self) -> Result<Option<u64>> {
        self.folder.trimmed()
    }

    fn note_trimmed(&self, at: u64) -> Result<()> {
        self.folder.note_trimmed(at)
    }

    fn shares_blocks(&self) -> bool {
        self.shares_blocks
    }

    fn open(&self, image: Image) -> Result<ImageHandle> {
        self.open_image(image)
    }

    fn lengthen(&self, image: Image, bytes: u64) -> Result<()> {
        self.lengthen_image(image, bytes)
    }

    fn clone_quiet(&self, source: Image, copy: Image) -> Result<()> {
        let budget = Arc::default();
        let copied = self.file_copier(source, copy, &budget)?.copy_whole();
        copied
            .map(drop)
            .context(|| format!("clone {source} into {copy}"))
    }

    fn copier(&self, source: Image, copy: Image, budget: &Arc<Budget>) -> Result<Box<dyn Copier>> {
        self.file_copier(source, copy, budget)
    }

    fn renew_fs_id(&self, image: Image, fs_id: Uuid) -> Result<()> {
        let path = &self.image_of(image);
        let renew = Effect::RenewFsId {
            image: path,
            uuid: fs_id,
        };
        self.folder.perform(renew, || {
            format!("assign a new fsid to the btrfs of {image}")
        })
    }

    fn prepare(&self, record: &VolumeRecord, admit: Admit<'_>) -> Result<()> {
        self.prepare_image(record, admit)
    }

    fn complete(&self, record: &VolumeRecord) -> Result<VolumeRecord> {
        self.complete_image(record)
    }

    fn unshare(&self, image: Image, bytes: u64) -> Result<()> {
        self.unshare_image(image, bytes)?;
        // Until the image is synced, a power loss restores the shared blocks.
        let path = self.image_of(image);
        self.folder.perform(Effect::SyncFile { path: &path }, || {
            format!("sync the image of {image:?}")
        })
    }

    fn empty(&self, image: Image) -> Result<()> {
        let (path, size) = (self.image_of(image), 0);
        self.folder
            .perform(Effect::Truncate { path: &path, size }, || {
                format!("truncate the image of {image:?} to 0 bytes")
            })
    }

    fn snapshot(&self, uuid: Uuid) -> Result<Option<SnapshotRecord>> {
        self.snapshots.get(uuid)
    }

    fn snapshots(&self, after: Option<Uuid>, limit: usize) -> Vec<SnapshotRecord> {
        self.snapshots.ready(after, limit)
    }

    fn unready_snapshots(&self) -> Vec<SnapshotRecord> {
        self.snapshots.unready()
    }

    fn damaged_snapshots(&self) -> Vec<(Uuid, String)> {
        self.snapshots.damaged()
    }

    fn origin(&self, uuid: Uuid) -> Option<SnapshotOrigin> {
        SnapshotOrigin::parse(&self.snapshots.bytes(uuid)?)
    }

    fn count_snapshots(&self) -> u64 {
        self.snapshots.count()
    }

    fn prepare_snapshot(&self, record: &SnapshotRecord, admit: Admit<'_>) -> Result<()> {
        self.begin_snapshot(record, admit)
    }

    fn sync_snapshot(&self, uuid: Uuid) -> Result<()> {
        self.snapshots.sync_image(uuid)
    }

    fn update_snapshot(&self, record: &SnapshotRecord) -> Result<()> {
        self.rewrite_snapshot(record)
    }

    fn delete_snapshot(&self, uuid: Uuid) -> Result<()> {
        self.snapshots.delete(uuid)
    }

    fn delete_unanswered_snapshot(&self, uuid: Uuid) -> Result<()> {
        self.snapshots.delete_unanswered(uuid)
    }

    fn image_problem(&self, record: &VolumeRecord) -> Result<Option<String>> {
        self.judge_image(record)
    }

    fn devices(&self, uuid: Uuid) -> Result<Vec<FoundDevice>> {
        self.find_devices(uuid)
    }

    fn attach(&self, record: &VolumeRecord, mode: AttachMode) -> Result<Attached> {
        self.attach_image(record, mode)
    }

    fn detach(&self, uuid: Uuid, device: &Device) -> Result<()> {
        self.detach_image(uuid, device)
    }

    fn hold(&self, uuid: Uuid, among: &[LoopStatus]) -> Result<Option<(LoopHold, LoopStatus)>> {
        self.hold_device(uuid, among)
    }

    fn released(&self, record: &VolumeRecord, device: &Device) -> Result<()> {
        self.renew_device(record, device)
    }

    fn resize(&self, uuid: Uuid, device: &Device) -> Result<()> {
        self.resize_device(uuid, device)
    }

    fn recover(&self, in_use: &dyn Fn(&Device) -> bool) -> Result<Leftovers> {
        self.free_loops(in_use)
    }
}
