//! The common part of volumes and snapshots: a directory with a record and an image.
//!
//! The directory shows the state of its object: it is created with an intent, its object is
//! complete once the record says so, and one rename moves it into the trash.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use uuid::Uuid;

use super::folder::Folder;
use super::{IMAGE, RECORD, SNAPSHOTS, TRASH, VOLUMES};
use crate::error::{Error, Result, chain};
use crate::host::Effect;
use crate::record::{self, Record, SnapshotRecord, SnapshotState, VolumeRecord, VolumeState};

/// A record of a volume or snapshot.
pub(super) trait StoredRecord: Record + Clone + Send {
    /// The pool's directory of all objects of this kind.
    const PART: &'static str;
    /// The noun for one object in messages.
    const NOUN: &'static str;
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

    fn uuid(&self) -> Uuid {
        self.uuid
    }

    fn is_ready(&self) -> bool {
        self.state == VolumeState::Ready
    }

    fn is_unanswered(&self) -> bool {
        self.state == VolumeState::Creating
    }

    fn is_abandoned(&self) -> bool {
        self.is_unanswered() && self.copy.is_none()
    }

    fn is_begun_copy(&self) -> bool {
        self.is_unanswered() && self.copy.is_some()
    }
}

impl StoredRecord for SnapshotRecord {
    const PART: &'static str = SNAPSHOTS;
    const NOUN: &'static str = "snapshot";

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
        self.is_unanswered() && self.copy.is_none() && self.group.is_none()
    }

    fn is_begun_copy(&self) -> bool {
        self.is_unanswered() && self.copy.is_some() && self.group.is_none()
    }
}

/// The contents of a directory, as this process last read or wrote them. Only this process writes
/// to it, because it holds the pool's lock.
pub(super) enum Entry<R> {
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
pub(super) struct RecordStore<R> {
    folder: Arc<Folder>,
    /// Never held during an access to the disk, which may hang.
    index: Mutex<Index<R>>,
    /// The directory of all objects is known to exist durably. Set after it was created and synced.
    founded: AtomicBool,
}

impl<R: StoredRecord> RecordStore<R> {
    /// Reads the existing records.
    pub(super) fn read(folder: Arc<Folder>) -> Result<RecordStore<R>> {
        let store = RecordStore {
            folder,
            index: Mutex::new(Index {
                entries: BTreeMap::new(),
                unsynced: HashMap::new(),
                marks: 0,
            }),
            founded: AtomicBool::new(false),
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
            Ok(None) => match self.folder.host.stat(&self.image(uuid)) {
                Ok(None) => None,
                Ok(Some(_)) => damaged("its record is missing, but its image exists".into()),
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

    pub(super) fn dir(&self, uuid: Uuid) -> PathBuf {
        let name = uuid.hyphenated().to_string();
        self.folder.root.join(R::PART).join(name)
    }

    fn record(&self, uuid: Uuid) -> PathBuf {
        self.dir(uuid).join(RECORD)
    }

    pub(super) fn image(&self, uuid: Uuid) -> PathBuf {
        self.dir(uuid).join(IMAGE)
    }

    /// The path of one of its files, for messages.
    pub(super) fn shown(&self, uuid: Uuid, file: &str) -> PathBuf {
        let name = uuid.hyphenated().to_string();
        self.folder.path.join(R::PART).join(name).join(file)
    }

    /// Returns a record after syncing it; an error if the record exists and cannot be read.
    pub(super) fn get(&self, uuid: Uuid) -> Result<Option<R>> {
        self.reread(uuid);
        loop {
            let index = self.index();
            let Some(entry) = index.entries.get(&uuid) else {
                return Ok(None);
            };
            let Some(mark) = index.unsynced.get(&uuid).copied() else {
                return match entry {
                    Entry::Known(record) => Ok(Some(record.as_ref().clone())),
                    Entry::Damaged(problem) => Err(self.is_damaged(uuid, problem.clone())),
                };
            };
            drop(index);
            let path = self.dir(uuid);
            let synced = self.folder.perform(Effect::SyncDir { path: &path }, || {
                format!("sync the record of {} {uuid}", R::NOUN)
            });
            synced.map_err(|first| Error::RollbackFailed {
                first: Box::new(first),
                undo: "it is unknown whether its record is durable".into(),
            })?;
            let mut index = self.index();
            if index.unsynced.get(&uuid) == Some(&mark) {
                index.unsynced.remove(&uuid);
            }
        }
    }

    fn is_damaged(&self, uuid: Uuid, problem: String) -> Error {
        let path = self.shown(uuid, RECORD);
        Error::Damaged { path, problem }
    }

    /// The bytes of a record, if the file can be read. They need not be a valid record of this
    /// driver.
    pub(super) fn bytes(&self, uuid: Uuid) -> Option<Vec<u8>> {
        self.folder.host.read_file(&self.record(uuid)).ok()?
    }

    /// Records that are ready, with a UUID after `after`, in the order of UUIDs, at most `limit`.
    pub(super) fn ready(&self, after: Option<Uuid>, limit: usize) -> Vec<R> {
        use std::ops::Bound::{Excluded, Unbounded};
        let from = after.map_or(Unbounded, Excluded);
        let index = self.index();
        let records = known(index.entries.range((from, Unbounded)));
        let ready = records.filter(|record| record.is_ready());
        ready.take(limit).cloned().collect()
    }

    /// Records that are not ready.
    pub(super) fn unready(&self) -> Vec<R> {
        let index = self.index();
        let records = known(&index.entries);
        records
            .filter(|record| !record.is_ready())
            .cloned()
            .collect()
    }

    /// The number of records that are ready.
    pub(super) fn count(&self) -> u64 {
        let index = self.index();
        let records = known(&index.entries);
        records.filter(|record| record.is_ready()).count() as u64
    }

    /// Records that cannot be read, with the reason. Each is read again first.
    pub(super) fn damaged(&self) -> Vec<(Uuid, String)> {
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
    pub(super) fn map<T>(&self, look: impl Fn(Uuid, &Entry<R>) -> T) -> Vec<T> {
        let index = self.index();
        let entries = index.entries.iter();
        entries.map(|(uuid, entry)| look(*uuid, entry)).collect()
    }

    /// The UUIDs of all entries, including damaged ones.
    pub(super) fn all(&self) -> Vec<Uuid> {
        self.index().entries.keys().copied().collect()
    }

    /// Directories that [`RecordStore::delete_abandoned`] probably has to delete, according to the
    /// memory of this process.
    pub(super) fn abandoned(&self) -> Result<Vec<Uuid>> {
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
    pub(super) fn begun_copies(&self) -> Vec<Uuid> {
        let index = self.index();
        let begun = known(&index.entries).filter(|record| record.is_begun_copy());
        begun.map(StoredRecord::uuid).collect()
    }

    /// All images, including those whose record cannot be read.
    pub(super) fn images(&self) -> Result<Vec<PathBuf>> {
        let uuids = self.uuids()?;
        Ok(uuids.into_iter().map(|uuid| self.image(uuid)).collect())
    }

    /// Sets the entry of a record that is on disk or is about to be written.
    pub(super) fn remember(&self, record: &R) {
        let entry = Entry::Known(Box::new(record.clone()));
        self.index().entries.insert(record.uuid(), entry);
    }

    /// Creates the directory and records the intent, durably.
    pub(super) fn begin(&self, record: &R) -> Result<()> {
        let doing = || format!("create {} {}", R::NOUN, record.uuid());
        let dir = self.dir(record.uuid());
        self.found(doing)?;
        self.folder.perform(Effect::MakeDir { path: &dir }, doing)?;
        self.folder.sync(R::PART)?;
        record::store(
            self.folder.host.as_ref(),
            &self.record(record.uuid()),
            record,
        )
    }

    /// Creates the directory of all objects. A pool that an earlier release created has no
    /// directory of snapshots. An existing one may not be durable, which cannot be detected.
    fn found(&self, doing: impl Fn() -> String) -> Result<()> {
        if R::PART == VOLUMES || self.founded.load(Ordering::Acquire) {
            return Ok(());
        }
        let root = &self.folder.root;
        let path = root.join(R::PART);
        self.folder
            .perform(Effect::MakeDir { path: &path }, &doing)?;
        self.folder
            .perform(Effect::SyncDir { path: root }, &doing)?;
        self.founded.store(true, Ordering::Release);
        Ok(())
    }

    /// Replaces a record durably.
    pub(super) fn update(&self, record: &R) -> Result<()> {
        let (uuid, host) = (record.uuid(), self.folder.host.as_ref());
        let path = self.record(uuid);
        let stored = record::store(host, &path, record);
        match &stored {
            Ok(()) => self.remember(record),
            // The rename may have succeeded: the record that a restart would read is the valid one.
            Err(_) => {
                if let Ok(Some(found)) = record::load(host, &path) {
                    self.remember(&found);
                }
                self.index().mark_unsynced(uuid);
            }
        }
        stored
    }

    /// Syncs an image. This is enough before [`RecordStore::update`], which syncs the image's name
    /// as well.
    pub(super) fn sync_image(&self, uuid: Uuid) -> Result<()> {
        let image = Effect::SyncFile {
            path: &self.image(uuid),
        };
        self.folder
            .perform(image, || format!("sync {} {uuid}", R::NOUN))
    }

    /// Syncs an image and its name.
    pub(super) fn sync(&self, uuid: Uuid) -> Result<()> {
        self.sync_image(uuid)?;
        let dir = Effect::SyncDir {
            path: &self.dir(uuid),
        };
        self.folder
            .perform(dir, || format!("sync {} {uuid}", R::NOUN))
    }

    /// Deletes what is left of a creation that was never acknowledged, like
    /// [`Backend::delete_unanswered`](crate::backend::Backend::delete_unanswered). Decides by the
    /// record on disk, not by the memory of this process.
    pub(super) fn delete_unanswered(&self, uuid: Uuid) -> Result<()> {
        match self.read_entry(uuid) {
            Some(Entry::Known(record)) if !record.is_unanswered() => Err(Error::Pending {
                what: format!("{} {uuid} (another call has just completed it)", R::NOUN),
            }),
            Some(Entry::Damaged(problem)) => Err(self.is_damaged(uuid, problem)),
            Some(Entry::Known(_)) | None => self.delete(uuid),
        }
    }

    /// Deletes an object that no call continues, and returns whether it was one. Decides by the
    /// record on disk. Everything else is kept, above all what cannot be read, and an image without
    /// a record.
    pub(super) fn delete_abandoned(&self, uuid: Uuid) -> Result<bool> {
        match self.read_entry(uuid) {
            Some(Entry::Known(record)) if !record.is_abandoned() => Ok(false),
            Some(Entry::Damaged(_)) => Ok(false),
            Some(Entry::Known(_)) | None => self.delete(uuid).map(|()| true),
        }
    }

    /// Deletes an incomplete copy if it is still one according to the disk, and returns whether it
    /// was.
    pub(super) fn delete_begun_copy(&self, uuid: Uuid) -> Result<bool> {
        match self.read_entry(uuid) {
            Some(Entry::Known(record)) if record.is_begun_copy() => {
                self.delete(uuid).map(|()| true)
            }
            Some(_) | None => Ok(false),
        }
    }

    /// Deletes an object, like [`Backend::delete`](crate::backend::Backend::delete): one rename
    /// hides it, and any caller can repeat the steps that follow.
    pub(super) fn delete(&self, uuid: Uuid) -> Result<()> {
        self.hide(uuid)?;
        let folder = &self.folder;
        let mine = folder.trash_of(uuid)?;
        if mine.is_empty() {
            return Ok(());
        }
        let ended = folder
            .sync(TRASH)
            .and_then(|()| folder.sync(R::PART))
            .and_then(|()| mine.iter().try_for_each(|name| folder.empty_trash(name)));
        // The object is hidden, but its blocks are not free. The error is not final, and a repeat
        // continues.
        ended.map_err(|first| Error::RollbackFailed {
            undo: format!("blocks of {} {uuid} are not freed yet", R::NOUN),
            first: Box::new(first),
        })
    }

    /// The first step of [`RecordStore::delete`]. The rename is not durable yet.
    pub(super) fn hide(&self, uuid: Uuid) -> Result<()> {
        let doing = || format!("delete {} {uuid}", R::NOUN);
        let (folder, dir) = (&self.folder, self.dir(uuid));
        if folder.stat(&dir, doing)?.is_some() {
            let tag = folder.host.random_uuid().simple().to_string();
            let trash = folder
                .root
                .join(TRASH)
                .join(format!("{uuid}.{}", &tag[..8]));
            let rename = Effect::Rename {
                from: &dir,
                to: &trash,
            };
            if let Err(error) = folder.perform(rename, doing)
                && folder.stat(&dir, doing)?.is_some()
            {
                return Err(error);
            }
        }
        self.index().entries.remove(&uuid);
        Ok(())
    }

    /// Returns the result. On an error the object is deleted durably, or the error says that it is
    /// not.
    pub(super) fn or_delete<T>(&self, uuid: Uuid, result: Result<T>) -> Result<T> {
        result.map_err(|first| first.with_undo(self.delete(uuid)))
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
