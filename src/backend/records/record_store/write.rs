//! Writes records and syncs images.

use std::path::{Path, PathBuf};
use std::slice;
use std::sync::atomic::Ordering;

use uuid::Uuid;

use super::{RecordStore, StoredRecord};
use crate::backend::Image;
use crate::backend::records::VOLUMES;
use crate::error::{Error, ErrorContext, Result};
use crate::host::Effect;
use crate::record;

impl<R: StoredRecord> RecordStore<R> {
    /// Creates the directories and records the intents, durably. An error or a crash leaves any of
    /// them.
    pub(in crate::backend) fn begin(&self, records: &[R]) -> Result<()> {
        for record in records {
            let doing = || format!("create {} {}", R::NOUN, record.uuid());
            let dir = self.dir(record.uuid());
            self.create_parent_dir(doing)?;
            self.folder.perform(Effect::MakeDir { path: &dir }, doing)?;
        }
        self.store(records, Some(&self.folder.root.join(R::PART)))
    }

    fn store(&self, records: &[R], parent: Option<&Path>) -> Result<()> {
        let each = records.iter();
        let each = each.map(|record| (self.record(record.uuid()), record));
        let each: Vec<_> = each.collect();
        record::store_all(self.folder.host.as_ref(), &each, parent)
    }

    /// Creates the directory of all objects. A pool that an earlier release created has no
    /// directory of snapshots. An existing one may not be durable, which cannot be detected.
    fn create_parent_dir(&self, doing: impl Fn() -> String) -> Result<()> {
        if R::PART == VOLUMES || self.is_parent_created.load(Ordering::Acquire) {
            return Ok(());
        }
        let root = &self.folder.root;
        let path = root.join(R::PART);
        self.folder
            .perform(Effect::MakeDir { path: &path }, &doing)?;
        self.folder
            .perform(Effect::SyncDir { path: root }, &doing)?;
        self.is_parent_created.store(true, Ordering::Release);
        Ok(())
    }

    /// Replaces a record durably.
    pub(in crate::backend) fn update(&self, record: &R) -> Result<()> {
        self.update_all(slice::from_ref(record))
    }

    /// Replaces several records durably. After an error or a crash, each is the old or the new one.
    pub(in crate::backend) fn update_all(&self, records: &[R]) -> Result<()> {
        let stored = self.store(records, None);
        for record in records {
            let uuid = record.uuid();
            match &stored {
                Ok(()) => self.remember(record),
                // The rename may have succeeded: the record that a restart would read is the valid
                // one.
                Err(_) => {
                    let host = self.folder.host.as_ref();
                    if let Ok(Some(found)) = record::load(host, &self.record(uuid)) {
                        self.remember(&found);
                    }
                    self.index().mark_unsynced(uuid);
                }
            }
        }
        stored
    }

    /// Syncs those of these records that were read and whose names may not be durable yet.
    pub fn sync_records(&self, uuids: &[Uuid]) -> Result<()> {
        let marks: Vec<(Uuid, u64)> = {
            let index = self.index();
            let exist = uuids.iter().filter(|uuid| index.entries.contains_key(uuid));
            let mark = |uuid: &Uuid| Some((*uuid, *index.unsynced.get(uuid)?));
            exist.filter_map(mark).collect()
        };
        let dirs: Vec<PathBuf> = marks.iter().map(|(uuid, _)| self.dir(*uuid)).collect();
        let sync = match &dirs[..] {
            [] => return Ok(()),
            [path] => Effect::SyncDir { path },
            paths => Effect::SyncAll { paths },
        };
        let synced = self.folder.perform(sync, || match &marks[..] {
            [(uuid, _)] => format!("sync the record of {} {uuid}", R::NOUN),
            _ => format!("sync the records of {} {}s", marks.len(), R::NOUN),
        });
        synced.map_err(|first| Error::RollbackFailed {
            first: Box::new(first),
            undo: "it is unknown whether its record is durable".into(),
        })?;
        let mut index = self.index();
        for (uuid, mark) in marks {
            if index.unsynced.get(&uuid) == Some(&mark) {
                index.unsynced.remove(&uuid);
            }
        }
        Ok(())
    }

    /// Syncs images, which must happen before their records say that they are complete. The records
    /// make the images' names durable as well.
    pub fn sync_images(&self, uuids: &[Uuid]) -> Result<()> {
        let images: Vec<Image> = uuids.iter().copied().map(R::image).collect();
        let synced = self.folder.store.sync_all(&images);
        synced.context(|| match uuids {
            [uuid] => format!("sync {} {uuid}", R::NOUN),
            _ => format!("sync {} {}s", uuids.len(), R::NOUN),
        })
    }

    /// The same for one image.
    pub fn sync_image(&self, uuid: Uuid) -> Result<()> {
        self.sync_images(&[uuid])
    }

    /// Syncs an image and its name.
    pub(in crate::backend) fn sync(&self, uuid: Uuid) -> Result<()> {
        self.sync_image(uuid)?;
        let dir = Effect::SyncDir {
            path: &self.dir(uuid),
        };
        self.folder
            .perform(dir, || format!("sync {} {uuid}", R::NOUN))
    }
}
