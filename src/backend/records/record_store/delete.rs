//! Deletes objects: a rename into the trash hides each of them.

use uuid::Uuid;

use super::{Entry, RecordStore, StoredRecord};
use crate::backend::records::TRASH;
use crate::error::{Error, Result};
use crate::host::Effect;

impl<R: StoredRecord> RecordStore<R> {
    /// Deletes what remains of a creation that was never acknowledged. The record is read from the
    /// disk again; it is an error if it cannot be read, or if the object is complete.
    pub fn delete_unanswered(&self, uuid: Uuid) -> Result<()> {
        self.delete_all_unanswered(&[uuid])
    }

    /// The same for several. On an error of any record none is deleted.
    pub fn delete_all_unanswered(&self, uuids: &[Uuid]) -> Result<()> {
        for uuid in uuids {
            match self.read_entry(*uuid) {
                Some(Entry::Known(record)) if !record.is_unanswered() => {
                    return Err(Error::Pending {
                        what: format!("{} {uuid} (another call has just completed it)", R::NOUN),
                    });
                }
                Some(Entry::Damaged(problem)) => return Err(self.damaged_error(*uuid, problem)),
                Some(Entry::Known(_)) | None => {}
            }
        }
        self.delete_all(uuids)
    }

    /// Deletes an object that no call continues, and returns whether it was one. Decides by the
    /// record on disk. Everything else is kept, above all what cannot be read, and an image without
    /// a record.
    pub(in crate::backend) fn delete_abandoned(&self, uuid: Uuid) -> Result<bool> {
        match self.read_entry(uuid) {
            Some(Entry::Known(record)) if !record.is_abandoned() => Ok(false),
            Some(Entry::Damaged(_)) => Ok(false),
            Some(Entry::Known(_)) | None => self.delete(uuid).map(|()| true),
        }
    }

    /// Deletes an incomplete copy if it is still one according to the disk, and returns whether it
    /// was.
    pub(in crate::backend) fn delete_begun_copy(&self, uuid: Uuid) -> Result<bool> {
        match self.read_entry(uuid) {
            Some(Entry::Known(record)) if record.is_begun_copy() => {
                self.delete(uuid).map(|()| true)
            }
            Some(_) | None => Ok(false),
        }
    }

    /// Deletes an object: a durable rename hides it, then its blocks are freed, and its record is
    /// removed last. Also removes what an earlier attempt left of it. It is a success if nothing
    /// exists. A failure or a crash leaves an entry in the trash, which a repeat or
    /// [`PoolBackend::clean_up`](crate::backend::PoolBackend::clean_up) purges.
    pub fn delete(&self, uuid: Uuid) -> Result<()> {
        self.delete_all(&[uuid])
    }

    /// The same for several objects, whose renames are made durable together. A crash leaves any of
    /// them, and of the others any in the trash. Those before the first that cannot be hidden are
    /// deleted.
    pub fn delete_all(&self, uuids: &[Uuid]) -> Result<()> {
        let hidden = uuids.iter().try_for_each(|uuid| self.hide(*uuid));
        match (hidden, self.purge(uuids)) {
            (Ok(()), purged) => purged,
            (Err(first), purged) => Err(first.with_undo(purged)),
        }
    }

    /// Frees the blocks of hidden objects and removes their records.
    fn purge(&self, uuids: &[Uuid]) -> Result<()> {
        let folder = &self.folder;
        let theirs = folder.trash_of(uuids)?;
        if theirs.is_empty() {
            return Ok(());
        }
        let ended = folder
            .sync(TRASH)
            .and_then(|()| folder.sync(R::PART))
            .and_then(|()| folder.empty_trash(&theirs));
        // The objects are hidden, but their blocks are not free. The error is not final, and a repeat
        // continues.
        ended.map_err(|first| Error::RollbackFailed {
            undo: match uuids {
                [uuid] => format!("blocks of {} {uuid} are not freed yet", R::NOUN),
                _ => format!(
                    "blocks of {} {}s are not all freed yet",
                    uuids.len(),
                    R::NOUN
                ),
            },
            first: Box::new(first),
        })
    }

    /// The first step of [`RecordStore::delete`], which leaves the blocks to
    /// [`PoolBackend::clean_up`](crate::backend::PoolBackend::clean_up). The rename is not durable
    /// yet.
    pub fn hide(&self, uuid: Uuid) -> Result<()> {
        let doing = || format!("delete {} {uuid}", R::NOUN);
        let (folder, dir) = (&self.folder, self.dir(uuid));
        if folder.is_there(&dir, doing)? {
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
                && folder.is_there(&dir, doing)?
            {
                return Err(error);
            }
        }
        let mut index = self.index();
        index.entries.remove(&uuid);
        index.unsynced.remove(&uuid);
        Ok(())
    }

    /// Returns the result. On an error the object is deleted durably, or the error says that it is
    /// not.
    pub(in crate::backend) fn or_delete<T>(&self, uuid: Uuid, result: Result<T>) -> Result<T> {
        result.map_err(|first| first.with_undo(self.delete(uuid)))
    }
}
