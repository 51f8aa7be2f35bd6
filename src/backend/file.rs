//! A pool of image files: `pool.json`, `lock`, `volumes/<uuid>/{record.json,data.img}`, `trash/`.
//!
//! The directory of a volume is its life: it appears with an intent, is complete once its record
//! says so, and leaves by one rename into `trash/`. All paths go through a pinned descriptor of
//! the folder, so that whatever is mounted over it later is never taken for the pool.

mod device;
mod image;
mod recover;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use uuid::Uuid;

use super::{Admit, AttachMode, Attached, Backend, FoundDevice, Leftovers, PoolSpace};
use crate::error::{Doing, Error, Result};
use crate::host::{Device, Effect, Host, Kept};
use crate::model::size::image_bytes;
use crate::record::{self, PoolRecord, VolumeRecord, VolumeState};

/// Name of the pool's record within its folder.
pub const POOL_FILE: &str = "pool.json";
/// Name of the file that the serving process locks.
pub const LOCK_FILE: &str = "lock";
/// Directory of volumes.
pub const VOLUMES: &str = "volumes";
/// Directory of what is being deleted.
pub const TRASH: &str = "trash";
const RECORD: &str = "record.json";
const IMAGE: &str = "data.img";

/// What a volume's directory holds, as last read or written by this process, which has the
/// pool's lock: nobody else writes it.
enum Entry {
    /// A record.
    Known(Box<VolumeRecord>),
    /// A record that can't be read.
    Damaged(String),
}

/// Entries, and bytes promised to growths that are running.
#[derive(Default)]
struct Index {
    entries: BTreeMap<Uuid, Entry>,
    growing: HashMap<Uuid, u64>,
    /// Records as read, after a start or a failed write: the rename that put them there may not
    /// be durable yet, so they are synced before anything is answered by them.
    unsynced: HashSet<Uuid>,
}

/// A pool of image files.
pub struct FileBackend {
    host: Arc<dyn Host>,
    /// The folder, as configured; for people.
    path: PathBuf,
    /// The folder, as pinned; for work.
    root: PathBuf,
    /// The folder and the pool's lock, for as long as this lives.
    _kept: [Kept; 2],
    pool: PoolRecord,
    sector: u32,
    least_sector: u32,
    fs_name: String,
    index: Mutex<Index>,
}

/// What lies at a configured path.
pub enum Found {
    /// No pool: the folder has no `pool.json`.
    Blank,
    /// Another process serves it.
    Locked(PoolRecord),
    /// A pool, locked by us from now on.
    Pool(Box<FileBackend>),
}

impl FileBackend {
    /// Reads who the pool at a path is, without taking it; `None` if there is none.
    pub fn identify(host: &dyn Host, path: &Path) -> Result<Option<PoolRecord>> {
        record::load(host, &path.join(POOL_FILE))
    }

    /// Opens the pool at `path`: takes its lock and reads its records.
    pub fn open(host: Arc<dyn Host>, path: &Path) -> Result<Found> {
        let what = || format!("open pool folder {}", path.display());
        if host.stat(&path.join(POOL_FILE)).doing(what)?.is_none() {
            return Ok(Found::Blank);
        }
        let (root, folder) = host.pin_dir(path).doing(what)?;
        let Some(pool) = record::load::<PoolRecord>(host.as_ref(), &root.join(POOL_FILE))? else {
            return Ok(Found::Blank);
        };
        let Some(lock) = host.try_lock_file(&root.join(LOCK_FILE)).doing(what)? else {
            return Ok(Found::Locked(pool));
        };
        let ground = host.ground(path).doing(what)?;
        let index = Mutex::new(Index::default());
        let backend = FileBackend {
            host,
            path: path.to_path_buf(),
            root,
            _kept: [folder, lock],
            pool,
            sector: ground.sector,
            least_sector: ground.least_sector,
            fs_name: ground.fs_name,
            index,
        };
        backend.read_records()?;
        Ok(Found::Pool(Box::new(backend)))
    }

    fn read_records(&self) -> Result<()> {
        let names = self.list(VOLUMES)?;
        let mut index = self.index();
        for uuid in names.iter().filter_map(|name| Uuid::try_parse(name).ok()) {
            // A directory with neither record nor image is half made: `recover` ends it.
            if let Some(entry) = self.read_entry(uuid) {
                index.entries.insert(uuid, entry);
                index.unsynced.insert(uuid);
            }
        }
        Ok(())
    }

    /// What a volume's directory holds now; `None` if neither record nor image is there. An image
    /// is made when its record is durable: one without a record was a volume, and is kept.
    fn read_entry(&self, uuid: Uuid) -> Option<Entry> {
        let read = record::load::<VolumeRecord>(self.host.as_ref(), &self.record_path(uuid));
        let damaged = |why: String| Some(Entry::Damaged(why));
        match read {
            Ok(Some(record)) if record.uuid == uuid => Some(Entry::Known(Box::new(record))),
            Ok(Some(record)) => {
                damaged(format!("its record is of another volume, {}", record.uuid))
            }
            Ok(None) => match self.host.stat(&self.image_path(uuid)) {
                Ok(None) => None,
                Ok(Some(_)) => damaged("its record is missing, its image is there".into()),
                Err(error) => damaged(crate::error::chain(&error)),
            },
            Err(error) => damaged(crate::error::chain(&error)),
        }
    }

    /// Reads a damaged record again: the disk may have been slow, or somebody has repaired it.
    fn reread(&self, index: &mut Index, uuid: Uuid) {
        if let Some(Entry::Damaged(_)) = index.entries.get(&uuid) {
            match self.read_entry(uuid) {
                Some(entry) => index.entries.insert(uuid, entry),
                None => index.entries.remove(&uuid),
            };
        }
    }

    /// The index; a panic of another thread can't leave it half changed.
    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn list(&self, folder: &str) -> Result<Vec<String>> {
        let names = self.host.list_dir(&self.root.join(folder));
        Ok(names
            .doing(|| format!("list {folder} of pool {}", self.path.display()))?
            .unwrap_or_default())
    }

    fn dir(&self, uuid: Uuid) -> PathBuf {
        self.root.join(VOLUMES).join(uuid.hyphenated().to_string())
    }

    fn record_path(&self, uuid: Uuid) -> PathBuf {
        self.dir(uuid).join(RECORD)
    }

    fn image_path(&self, uuid: Uuid) -> PathBuf {
        self.dir(uuid).join(IMAGE)
    }

    fn perform(&self, effect: Effect<'_>, doing: impl FnOnce() -> String) -> Result<()> {
        self.host.perform(&effect).map(drop).doing(doing)
    }

    fn remember(&self, record: &VolumeRecord) {
        self.index()
            .entries
            .insert(record.uuid, Entry::Known(Box::new(record.clone())));
    }

    fn known(&self, record: &VolumeRecord) -> bool {
        record.state == VolumeState::Ready
    }
}

impl Backend for FileBackend {
    fn pool(&self) -> &PoolRecord {
        &self.pool
    }

    fn place(&self) -> String {
        format!("file:{}", self.path.display())
    }

    fn path(&self) -> PathBuf {
        self.path.clone()
    }

    fn default_block_size(&self) -> u32 {
        self.sector
    }

    fn least_block_size(&self) -> u32 {
        self.least_sector
    }

    fn refuses_thick(&self) -> Option<&'static str> {
        (self.fs_name == "btrfs").then_some("btrfs writes elsewhere even where blocks are reserved")
    }

    fn refuses_zeroing(&self) -> Option<&'static str> {
        (self.fs_name == "btrfs")
            .then_some("btrfs writes zeros elsewhere and leaves the old blocks as they are")
    }

    fn volume(&self, uuid: Uuid) -> Result<Option<VolumeRecord>> {
        let mut index = self.index();
        self.reread(&mut index, uuid);
        if index.unsynced.contains(&uuid) && index.entries.contains_key(&uuid) {
            let path = self.dir(uuid);
            let synced = self.perform(Effect::SyncDir { path: &path }, || {
                format!("sync the record of volume {uuid}")
            });
            synced.map_err(|first| Error::Undo {
                first: Box::new(first),
                undo: "whether its record is durable isn't known".into(),
            })?;
            index.unsynced.remove(&uuid);
        }
        match index.entries.get(&uuid) {
            Some(Entry::Known(record)) => Ok(Some(record.as_ref().clone())),
            Some(Entry::Damaged(problem)) => {
                let path = self
                    .path
                    .join(VOLUMES)
                    .join(uuid.hyphenated().to_string())
                    .join(RECORD);
                Err(Error::Damaged {
                    path,
                    problem: problem.clone(),
                })
            }
            None => Ok(None),
        }
    }

    fn volumes(&self, after: Option<Uuid>, limit: usize) -> Vec<VolumeRecord> {
        use std::ops::Bound::{Excluded, Unbounded};
        let index = self.index();
        let from = after.map_or(Unbounded, Excluded);
        let records = index
            .entries
            .range((from, Unbounded))
            .filter_map(|(_, entry)| match entry {
                Entry::Known(record) if self.known(record) => Some(record.as_ref().clone()),
                Entry::Known(_) | Entry::Damaged(_) => None,
            });
        records.take(limit).collect()
    }

    fn damaged(&self) -> Vec<(Uuid, String)> {
        let problem = |(uuid, entry): (&Uuid, &Entry)| match entry {
            Entry::Damaged(problem) => Some((*uuid, problem.clone())),
            Entry::Known(_) => None,
        };
        let mut index = self.index();
        let before: Vec<_> = index.entries.iter().filter_map(problem).collect();
        for (uuid, _) in before {
            self.reread(&mut index, uuid);
        }
        index.entries.iter().filter_map(problem).collect()
    }

    fn count(&self) -> u64 {
        let index = self.index();
        index
            .entries
            .values()
            .filter(|entry| matches!(entry, Entry::Known(record) if self.known(record)))
            .count() as u64
    }

    fn space(&self) -> Result<PoolSpace> {
        self.space_of(&self.index())
    }

    fn create(&self, record: VolumeRecord, admit: Admit<'_>) -> Result<VolumeRecord> {
        self.create_image(record, admit)
    }

    fn update(&self, record: &VolumeRecord) -> Result<()> {
        let path = self.record_path(record.uuid);
        let stored = record::store(self.host.as_ref(), &path, record);
        match &stored {
            Ok(()) => self.remember(record),
            // The rename may have been done: what a restart would read is what counts.
            Err(_) => {
                if let Ok(Some(found)) = record::load(self.host.as_ref(), &path) {
                    self.remember(&found);
                }
                self.index().unsynced.insert(record.uuid);
            }
        }
        stored
    }

    fn grow(&self, record: &VolumeRecord, size: u64, admit: Admit<'_>) -> Result<VolumeRecord> {
        {
            let mut index = self.index();
            self.admit(&index, admit)?;
            index.growing.insert(
                record.uuid,
                image_bytes(size).saturating_sub(image_bytes(record.size)),
            );
        }
        let grown = self.grow_image(record, size);
        self.index().growing.remove(&record.uuid);
        grown
    }

    fn delete(&self, uuid: Uuid) -> Result<()> {
        self.delete_volume(uuid)
    }

    fn shares_blocks(&self) -> bool {
        false
    }

    fn clones_in_series(&self) -> bool {
        self.fs_name == "btrfs"
    }

    fn image_path(&self, _image: crate::backend::Image) -> PathBuf {
        PathBuf::new()
    }

    fn prepare(&self, _record: &VolumeRecord, _admit: Admit<'_>) -> Result<()> {
        Err(Error::Unsupported {
            what: "not yet".into(),
        })
    }

    fn complete(&self, _record: &VolumeRecord) -> Result<VolumeRecord> {
        Err(Error::Unsupported {
            what: "not yet".into(),
        })
    }

    fn snapshot(&self, _uuid: Uuid) -> Result<Option<crate::record::SnapshotRecord>> {
        Ok(None)
    }

    fn snapshots(&self, _after: Option<Uuid>, _limit: usize) -> Vec<crate::record::SnapshotRecord> {
        Vec::new()
    }

    fn unready_snapshots(&self) -> Vec<crate::record::SnapshotRecord> {
        Vec::new()
    }

    fn damaged_snapshots(&self) -> Vec<(Uuid, String)> {
        Vec::new()
    }

    fn prepare_snapshot(
        &self,
        _record: &crate::record::SnapshotRecord,
        _admit: Admit<'_>,
    ) -> Result<()> {
        Err(Error::Unsupported {
            what: "not yet".into(),
        })
    }

    fn sync_snapshot(&self, _uuid: Uuid) -> Result<()> {
        Err(Error::Unsupported {
            what: "not yet".into(),
        })
    }

    fn update_snapshot(&self, _record: &crate::record::SnapshotRecord) -> Result<()> {
        Err(Error::Unsupported {
            what: "not yet".into(),
        })
    }

    fn delete_snapshot(&self, _uuid: Uuid) -> Result<()> {
        Ok(())
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

    fn released(&self, record: &VolumeRecord, device: &Device) -> Result<()> {
        self.renew_device(record, device)
    }

    fn resize(&self, uuid: Uuid, device: &Device) -> Result<()> {
        self.resize_device(uuid, device)
    }

    fn recover(&self, in_use: &dyn Fn(&Device) -> bool) -> Result<Leftovers> {
        self.end_leftovers(in_use)
    }
}
