//! The common part of volumes and snapshots: a directory with a record and an image.
//!
//! The directory shows the state of its object: it is created with an intent, its object is
//! complete once the record says so, and one rename moves it into the trash.

mod delete;
mod write;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use uuid::Uuid;

use super::folder::Folder;
use super::{RECORD, SNAPSHOTS, VOLUMES, part};
use crate::backend::Image;
use crate::error::{Error, Result, chain};
use crate::record::{
    self, Record, SnapshotOrigin, SnapshotRecord, SnapshotState, VolumeRecord, VolumeState,
};

/// A record of a volume or snapshot.
pub trait StoredRecord: Record + Clone + Send {
    /// The pool's directory of all objects of this kind.
    const PART: &'static str;
    /// The noun for one object in messages.
    const NOUN: &'static str;
    /// The image of the object with this UUID.
    fn image(uuid: Uuid) -> Image;
    /// Its UUID, which is the name of its directory.
    fn uuid(&self) -> Uuid;
    /// It is complete, and callers may know of it.
    fn is_ready(&self) -> bool;
    /// Its creation was never acknowledged, so no caller relies on it.
    fn is_unanswered(&self) -> bool;
    /// Like [`StoredRecord::is_unanswered`], but neither a copy that a repeat continues nor a
    /// member of a group, which is resolved together with its group.
    fn is_abandoned(&self) -> bool;
    /// Like [`StoredRecord::is_unanswered`], and a copy that a repeat of its call would continue.
    fn is_begun_copy(&self) -> bool;
}

impl StoredRecord for VolumeRecord {
    const PART: &'static str = VOLUMES;
    const NOUN: &'static str = "volume";

    fn image(uuid: Uuid) -> Image {
        Image::Volume(uuid)
    }

    fn uuid(&self) -> Uuid {
        self.uuid
    }

    fn is_ready(&self) -> bool {
        self.state == VolumeState::Ready
    }

    fn is_unanswered(&self) -> bool {
        self.state == VolumeState::Creating
    }

    /// Whether a whole spare is kept is decided by the record of its volume.
    fn is_abandoned(&self) -> bool {
        self.is_unanswered() && self.copy.is_none() && !self.is_whole_spare()
    }

    fn is_begun_copy(&self) -> bool {
        self.is_unanswered() && self.copy.is_some()
    }
}

impl StoredRecord for SnapshotRecord {
    const PART: &'static str = SNAPSHOTS;
    const NOUN: &'static str = "snapshot";

    fn image(uuid: Uuid) -> Image {
        Image::Snapshot(uuid)
    }

    fn uuid(&self) -> Uuid {
        self.uuid
    }

    fn is_ready(&self) -> bool {
        self.state == SnapshotState::Ready
    }

    /// Whether a snapshot in state `cut` is kept is decided by the first member of its group.
    fn is_unanswered(&self) -> bool {
        self.state == SnapshotState::Preparing
    }

    fn is_abandoned(&self) -> bool {
        let is_known = self.group.is_some() || self.is_base();
        self.is_unanswered() && self.copy.is_none() && !is_known
    }

    fn is_begun_copy(&self) -> bool {
        self.is_unanswered() && self.copy.is_some() && self.group.is_none()
    }
}

/// The contents of a directory, as this process last read or wrote them. Only this process writes
/// to it, because it holds the pool's lock.
pub(in crate::backend) enum Entry<R> {
    /// A record.
    Known(Box<R>),
    /// A record that cannot be read.
    Damaged(String),
}

struct Index<R> {
    entries: BTreeMap<Uuid, Entry<R>>,
    /// Records that were read after a start or after a failed write. The rename that created them
    /// may not be durable yet, so they are synced before any reply relies on them. Each has its own
    /// mark, so that a sync covers only what was read before it.
    unsynced: HashMap<Uuid, u64>,
    /// The last mark that was given.
    marks: u64,
}

impl<R> Index<R> {
    fn mark_unsynced(&mut self, uuid: Uuid) {
        self.marks += 1;
        self.unsynced.insert(uuid, self.marks);
    }
}

/// All volumes, or all snapshots, of a pool.
pub struct RecordStore<R> {
    folder: Arc<Folder>,
    /// Never held during an access to the disk, which may hang.
    index: Mutex<Index<R>>,
    /// The directory of all objects is known to exist durably. Set after it was created and synced.
    is_parent_created: AtomicBool,
}

impl<R: StoredRecord> RecordStore<R> {
    /// Reads the existing records.
    pub(in crate::backend) fn read(folder: Arc<Folder>) -> Result<RecordStore<R>> {
        let store = RecordStore {
            folder,
            index: Mutex::new(Index {
                entries: BTreeMap::new(),
                unsynced: HashMap::new(),
                marks: 0,
            }),
            is_parent_created: AtomicBool::new(false),
        };
        for uuid in store.uuids()? {
            // A directory with neither record nor image is an incomplete creation, which is a
            // leftover.
            if let Some(entry) = store.read_entry(uuid) {
                let mut index = store.index();
                index.entries.insert(uuid, entry);
                index.mark_unsynced(uuid);
            }
        }
        Ok(store)
    }

    /// The UUIDs of all directories, whatever they contain.
    fn uuids(&self) -> Result<Vec<Uuid>> {
        let names = self.folder.list(R::PART)?;
        Ok(names
            .iter()
            .filter_map(|name| Uuid::try_parse(name).ok())
            .collect())
    }

    /// Reads the contents of a directory; `None` if it has neither record nor image. An image is
    /// created only after its record is durable, so an image without a record has had one, and is
    /// kept.
    fn read_entry(&self, uuid: Uuid) -> Option<Entry<R>> {
        let read = record::load::<R>(self.folder.host.as_ref(), &self.record(uuid));
        let damaged = |why: String| Some(Entry::Damaged(why));
        match read {
            Ok(Some(record)) if record.uuid() == uuid => Some(Entry::Known(Box::new(record))),
            Ok(Some(record)) => damaged(format!(
                "its record describes another {}, {}",
                R::NOUN,
                record.uuid()
            )),
            Ok(None) => match self.folder.store.has_image(&self.dir(uuid)) {
                Ok(false) => None,
                Ok(true) => damaged("its record is missing, but its image exists".into()),
                Err(error) => damaged(chain(&error)),
            },
            Err(error) => damaged(chain(&error)),
        }
    }

    /// Reads a damaged record again: the disk may have been slow, or an administrator has repaired
    /// it.
    fn reread(&self, uuid: Uuid) {
        let is_damaged = |index: &Index<R>| {
            let entry = index.entries.get(&uuid);
            matches!(entry, Some(Entry::Damaged(_)))
        };
        if !is_damaged(&self.index()) {
            return;
        }
        let found = self.read_entry(uuid);
        let mut index = self.index();
        // Unless another thread has deleted or written it since.
        if is_damaged(&index) {
            match found {
                Some(entry) => index.entries.insert(uuid, entry),
                None => index.entries.remove(&uuid),
            };
        }
    }

    /// Locks the index. A panic of another thread cannot leave it partly changed.
    fn index(&self) -> MutexGuard<'_, Index<R>> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(in crate::backend) fn dir(&self, uuid: Uuid) -> PathBuf {
        self.folder.root.join(part(R::image(uuid)))
    }

    fn record(&self, uuid: Uuid) -> PathBuf {
        self.dir(uuid).join(RECORD)
    }

    /// Returns a record after syncing it; an error if the record exists and cannot be read.
    pub fn get(&self, uuid: Uuid) -> Result<Option<R>> {
        self.reread(uuid);
        loop {
            let index = self.index();
            let Some(entry) = index.entries.get(&uuid) else {
                return Ok(None);
            };
            if !index.unsynced.contains_key(&uuid) {
                return match entry {
                    Entry::Known(record) => Ok(Some(record.as_ref().clone())),
                    Entry::Damaged(problem) => Err(self.damaged_error(uuid, problem.clone())),
                };
            }
            drop(index);
            self.sync_records(&[uuid])?;
        }
    }

    fn damaged_error(&self, uuid: Uuid, problem: String) -> Error {
        Error::Damaged {
            path: self.folder.path.join(part(R::image(uuid))).join(RECORD),
            problem,
        }
    }

    /// Records that are ready and can be read, with a UUID after `after`, in the order of UUIDs, at most `limit`.
    pub fn ready(&self, after: Option<Uuid>, limit: usize) -> Vec<R> {
        self.ready_if(after, limit, |_| true)
    }

    /// The same for those records that fit.
    pub fn ready_if(&self, after: Option<Uuid>, limit: usize, fits: impl Fn(&R) -> bool) -> Vec<R> {
        use std::ops::Bound::{Excluded, Unbounded};
        let from = after.map_or(Unbounded, Excluded);
        let index = self.index();
        let records = known(index.entries.range((from, Unbounded)));
        let ready = records.filter(|record| record.is_ready() && fits(record));
        ready.take(limit).cloned().collect()
    }

    /// What `look` finds in the records that are ready.
    pub fn filter_map_ready<T>(&self, look: impl Fn(&R) -> Option<T>) -> Vec<T> {
        let index = self.index();
        let ready = known(&index.entries).filter(|record| record.is_ready());
        ready.filter_map(look).collect()
    }

    /// Records that are not ready.
    pub fn unready(&self) -> Vec<R> {
        let index = self.index();
        let records = known(&index.entries);
        records
            .filter(|record| !record.is_ready())
            .cloned()
            .collect()
    }

    /// The number of records that are ready.
    pub fn count(&self) -> u64 {
        let index = self.index();
        let records = known(&index.entries);
        records.filter(|record| record.is_ready()).count() as u64
    }

    /// Records that cannot be read, with the reason. Each is read again first.
    pub fn damaged(&self) -> Vec<(Uuid, String)> {
        let problem = |(uuid, entry): (&Uuid, &Entry<R>)| match entry {
            Entry::Damaged(problem) => Some((*uuid, problem.clone())),
            Entry::Known(_) => None,
        };
        let damaged = || -> Vec<_> { self.index().entries.iter().filter_map(problem).collect() };
        for (uuid, _) in damaged() {
            self.reread(uuid);
        }
        damaged()
    }

    /// Applies `look` to all entries.
    pub(in crate::backend) fn map<T>(&self, look: impl Fn(Uuid, &Entry<R>) -> T) -> Vec<T> {
        let index = self.index();
        let entries = index.entries.iter();
        entries.map(|(uuid, entry)| look(*uuid, entry)).collect()
    }

    /// The UUIDs of all entries in any state, including damaged ones, without access to the disk.
    pub fn all(&self) -> Vec<Uuid> {
        self.index().entries.keys().copied().collect()
    }

    /// Directories that [`RecordStore::delete_abandoned`] probably has to delete, according to the
    /// memory of this process.
    pub(in crate::backend) fn abandoned(&self) -> Result<Vec<Uuid>> {
        let uuids = self.uuids()?;
        let index = self.index();
        let is_abandoned = |uuid: &Uuid| match index.entries.get(uuid) {
            Some(Entry::Known(record)) => record.is_abandoned(),
            Some(Entry::Damaged(_)) => false,
            None => true,
        };
        Ok(uuids.into_iter().filter(is_abandoned).collect())
    }

    /// Incomplete copies, according to the memory of this process.
    pub(in crate::backend) fn begun_copies(&self) -> Vec<Uuid> {
        let index = self.index();
        let begun = known(&index.entries).filter(|record| record.is_begun_copy());
        begun.map(StoredRecord::uuid).collect()
    }

    /// All images, including those whose record cannot be read.
    pub(in crate::backend) fn images(&self) -> Result<Vec<Image>> {
        Ok(self.uuids()?.into_iter().map(R::image).collect())
    }

    /// Sets the entry of a record that is on disk or is about to be written.
    pub(in crate::backend) fn remember(&self, record: &R) {
        let entry = Entry::Known(Box::new(record.clone()));
        self.index().entries.insert(record.uuid(), entry);
    }
}

impl RecordStore<SnapshotRecord> {
    /// The hidden bases of volumes.
    pub fn bases(&self) -> Vec<SnapshotRecord> {
        let index = self.index();
        let records = known(&index.entries);
        records.filter(|record| record.is_base()).cloned().collect()
    }

    /// The fields of a snapshot's record from which its ID is derived, also from a record that
    /// cannot be parsed otherwise; `None` if they are missing. No other field of such a record may
    /// be trusted.
    pub fn origin(&self, uuid: Uuid) -> Option<SnapshotOrigin> {
        let bytes = self.folder.host.read_file(&self.record(uuid)).ok()?;
        SnapshotOrigin::parse(&bytes?)
    }
}

/// The readable records among entries.
fn known<'a, R: 'a>(
    entries: impl IntoIterator<Item = (&'a Uuid, &'a Entry<R>)>,
) -> impl Iterator<Item = &'a R> {
    entries.into_iter().filter_map(|(_, entry)| match entry {
        Entry::Known(record) => Some(record.as_ref()),
        Entry::Damaged(_) => None,
    })
}
