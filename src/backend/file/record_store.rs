//! What volumes and snapshots have in common: a directory with a record and an image.
//!
//! The directory is the life of its owner: it appears with an intent, is complete once the record
//! says so, and leaves by one rename into the trash.

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

/// What lies on a shelf.
pub(super) trait StoredRecord: Record + Clone + Send {
    /// The pool's directory of them.
    const PART: &'static str;
    /// One of them, in a sentence.
    const NOUN: &'static str;
    /// Its uuid, which is the name of its directory.
    fn uuid(&self) -> Uuid;
    /// Complete: callers know of it.
    fn is_ready(&self) -> bool;
    /// Its creation was never answered: no caller counts on it.
    fn is_unanswered(&self) -> bool;
    /// As [`StoredRecord::is_unanswered`], and neither a copy that a repeat goes on with nor a member of
    /// a group, which is settled with its group.
    fn is_abandoned(&self) -> bool;
    /// As [`StoredRecord::is_unanswered`], and a copy that a repeat goes on with, if one comes.
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

    /// What is cut is decided about by its group's first member.
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

/// What a directory holds, as last read or written by this process, which has the pool's lock:
/// nobody else writes it.
pub(super) enum Entry<R> {
    /// A record.
    Known(Box<R>),
    /// A record that can't be read.
    Damaged(String),
}

struct Index<R> {
    entries: BTreeMap<Uuid, Entry<R>>,
    /// Records as read, after a start or a failed write: the rename that put them there may not
    /// be durable yet, so they are synced before anything is answered by them. Each with a mark of
    /// its own, so that a sync ends only what came before it.
    unsynced: HashMap<Uuid, u64>,
    /// The last mark.
    marks: u64,
}

impl<R> Index<R> {
    fn mark_unsynced(&mut self, uuid: Uuid) {
        self.marks += 1;
        self.unsynced.insert(uuid, self.marks);
    }
}

/// All of one kind.
pub(super) struct RecordStore<R> {
    folder: Arc<Folder>,
    /// Never held while the disk is asked, which may not answer.
    index: Mutex<Index<R>>,
    /// The directory of all is there, durably: known, once that was seen to.
    founded: AtomicBool,
}

impl<R: StoredRecord> RecordStore<R> {
    /// With the records that are there.
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
            // A directory with neither record nor image is half made: it's a leftover.
            if let Some(entry) = store.read_entry(uuid) {
                let mut index = store.index();
                index.entries.insert(uuid, entry);
                index.mark_unsynced(uuid);
            }
        }
        Ok(store)
    }

    /// Of every directory, whatever is in it.
    fn uuids(&self) -> Result<Vec<Uuid>> {
        let names = self.folder.list(R::PART)?;
        Ok(names
            .iter()
            .filter_map(|name| Uuid::try_parse(name).ok())
            .collect())
    }

    /// What a directory holds now; `None` if neither record nor image is there. An image is made
    /// when its record is durable: one without a record had one, and is kept.
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

    /// Reads a damaged record again: the disk may have been slow, or somebody has repaired it.
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
        // Unless it was ended or written meanwhile.
        if is_damaged(&index) {
            match found {
                Some(entry) => index.entries.insert(uuid, entry),
                None => index.entries.remove(&uuid),
            };
        }
    }

    /// The index; a panic of another thread can't leave it half changed.
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

    /// A file of it, for people.
    pub(super) fn shown(&self, uuid: Uuid, file: &str) -> PathBuf {
        let name = uuid.hyphenated().to_string();
        self.folder.path.join(R::PART).join(name).join(file)
    }

    /// A record, synced; an error if there is one that can't be read.
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

    /// The bytes of a record, if they can be had: it need be none of this program's.
    pub(super) fn bytes(&self, uuid: Uuid) -> Option<Vec<u8>> {
        self.folder.host.read_file(&self.record(uuid)).ok()?
    }

    /// Those that are ready, in the order of uuids after `after`, at most `limit`.
    pub(super) fn ready(&self, after: Option<Uuid>, limit: usize) -> Vec<R> {
        use std::ops::Bound::{Excluded, Unbounded};
        let from = after.map_or(Unbounded, Excluded);
        let index = self.index();
        let records = known(index.entries.range((from, Unbounded)));
        let ready = records.filter(|record| record.is_ready());
        ready.take(limit).cloned().collect()
    }

    /// Those that aren't.
    pub(super) fn unready(&self) -> Vec<R> {
        let index = self.index();
        let records = known(&index.entries);
        records
            .filter(|record| !record.is_ready())
            .cloned()
            .collect()
    }

    /// Number of those that are ready.
    pub(super) fn count(&self) -> u64 {
        let index = self.index();
        let records = known(&index.entries);
        records.filter(|record| record.is_ready()).count() as u64
    }

    /// Those that can't be read, read again first, and why.
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

    /// What `look` makes of everything there is.
    pub(super) fn map<T>(&self, look: impl Fn(Uuid, &Entry<R>) -> T) -> Vec<T> {
        let index = self.index();
        let entries = index.entries.iter();
        entries.map(|(uuid, entry)| look(*uuid, entry)).collect()
    }

    /// All there are, whatever is in them.
    pub(super) fn all(&self) -> Vec<Uuid> {
        self.index().entries.keys().copied().collect()
    }

    /// Directories that are probably to be ended by [`RecordStore::delete_abandoned`]: by what this process
    /// remembers of them.
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

    /// Copies that were begun, by what this process remembers.
    pub(super) fn begun_copies(&self) -> Vec<Uuid> {
        let index = self.index();
        let begun = known(&index.entries).filter(|record| record.is_begun_copy());
        begun.map(StoredRecord::uuid).collect()
    }

    /// Every image there is, also beside a record that can't be read.
    pub(super) fn images(&self) -> Result<Vec<PathBuf>> {
        let uuids = self.uuids()?;
        Ok(uuids.into_iter().map(|uuid| self.image(uuid)).collect())
    }

    /// What is known of it from now on, on disk or soon to be.
    pub(super) fn remember(&self, record: &R) {
        let entry = Entry::Known(Box::new(record.clone()));
        self.index().entries.insert(record.uuid(), entry);
    }

    /// Makes the directory and records the intent, durably.
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

    /// Pools of an earlier release have no directory of snapshots; and one that is there may not
    /// be durable, which can't be seen.
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
            // The rename may have been done: what a restart would read is what counts.
            Err(_) => {
                if let Ok(Some(found)) = record::load(host, &path) {
                    self.remember(&found);
                }
                self.index().mark_unsynced(uuid);
            }
        }
        stored
    }

    /// Syncs an image: enough before an [`RecordStore::update`], which syncs its name as well.
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

    /// Ends what is left of a creation that was never answered, as
    /// [`Backend::delete_unanswered`](crate::backend::Backend::delete_unanswered) says: by what the disk
    /// says now, whatever this process remembers.
    pub(super) fn delete_unanswered(&self, uuid: Uuid) -> Result<()> {
        match self.read_entry(uuid) {
            Some(Entry::Known(record)) if !record.is_unanswered() => Err(Error::Pending {
                what: format!("{} {uuid} (another call has just completed it)", R::NOUN),
            }),
            Some(Entry::Damaged(problem)) => Err(self.is_damaged(uuid, problem)),
            Some(Entry::Known(_)) | None => self.delete(uuid),
        }
    }

    /// Ends one that no call goes on with, by what the disk says now; whether it was one. Anything
    /// else is left alone: above all what can't be read, or has no record beside its image.
    pub(super) fn delete_abandoned(&self, uuid: Uuid) -> Result<bool> {
        match self.read_entry(uuid) {
            Some(Entry::Known(record)) if !record.is_abandoned() => Ok(false),
            Some(Entry::Damaged(_)) => Ok(false),
            Some(Entry::Known(_)) | None => self.delete(uuid).map(|()| true),
        }
    }

    /// Ends a copy that was begun, if the disk says now that it is one; whether it was.
    pub(super) fn delete_begun_copy(&self, uuid: Uuid) -> Result<bool> {
        match self.read_entry(uuid) {
            Some(Entry::Known(record)) if record.is_begun_copy() => {
                self.delete(uuid).map(|()| true)
            }
            Some(_) | None => Ok(false),
        }
    }

    /// Ends one, as [`Backend::delete`](crate::backend::Backend::delete) says: one rename takes it
    /// out of sight, and what follows can be repeated by any caller.
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
        // It's out of sight, its blocks are not free: not final, a repeat goes on.
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

    /// Passes a result on; what failed is ended durably, or the error says that it isn't.
    pub(super) fn or_delete<T>(&self, uuid: Uuid, result: Result<T>) -> Result<T> {
        result.map_err(|first| first.with_undo(self.delete(uuid)))
    }
}

/// The records among entries.
fn known<'a, R: 'a>(
    entries: impl IntoIterator<Item = (&'a Uuid, &'a Entry<R>)>,
) -> impl Iterator<Item = &'a R> {
    entries.into_iter().filter_map(|(_, entry)| match entry {
        Entry::Known(record) => Some(record.as_ref()),
        Entry::Damaged(_) => None,
    })
}
