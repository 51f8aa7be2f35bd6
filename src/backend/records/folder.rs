//! The pool's folder, with a pinned descriptor, and its trash.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, TryLockError};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::trim::{Trimmed, Undiscarded};
use super::{RECORD, SNAPSHOTS, TRASH, VOLUMES};
use crate::backend::store::Store;
use crate::error::{Error, ErrorContext, Result};
use crate::host::{Effect, Host};
use crate::model::Wipe;
use crate::record::{self, Record, SnapshotRecord, VolumeRecord};

/// The folder of a pool.
pub struct Folder {
    pub(in crate::backend) host: Arc<dyn Host>,
    /// The configured path, for messages.
    pub path: PathBuf,
    /// The path through the pinned descriptor, for all accesses.
    pub(in crate::backend) root: PathBuf,
    pub(in crate::backend) store: Box<dyn Store>,
    /// Held during a wipe until the blocks are freed. No caller waits for it. Blocks that two
    /// images share are overwritten when the last of the two is deleted, so the second wipe must
    /// see that the first image is gone.
    pub(in crate::backend) wiping: Mutex<()>,
    /// Blocks that were freed and are not discarded yet.
    pub(super) undiscarded: Undiscarded,
    /// When the volumes were trimmed last.
    pub(super) trimmed: Trimmed,
}

/// The part that is read of the record of a deleted volume or snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Deleted {
    #[serde(default)]
    wipe: Wipe,
}

impl Record for Deleted {
    const VERSION: u32 = if VolumeRecord::VERSION > SnapshotRecord::VERSION {
        VolumeRecord::VERSION
    } else {
        SnapshotRecord::VERSION
    };
    const WHAT: &'static str = "record of the object that is being deleted";
}

impl Folder {
    pub(in crate::backend) fn open(
        host: Arc<dyn Host>,
        path: &Path,
        root: PathBuf,
        store: Box<dyn Store>,
    ) -> Result<Folder> {
        let folder = Folder {
            host,
            path: path.to_path_buf(),
            root,
            store,
            wiping: Mutex::new(()),
            undiscarded: Undiscarded::default(),
            trimmed: Trimmed::default(),
        };
        folder.read_undiscarded_mark()?;
        Ok(folder)
    }

    pub(in crate::backend) fn perform(
        &self,
        effect: Effect<'_>,
        doing: impl FnOnce() -> String,
    ) -> Result<()> {
        self.host.perform(&effect).map(drop).context(doing)
    }

    /// The names in one of the pool's directories.
    pub(in crate::backend) fn list(&self, part: &str) -> Result<Vec<String>> {
        let names = self.host.list_dir(&self.root.join(part));
        Ok(names
            .context(|| format!("list {part} of pool {}", self.path.display()))?
            .unwrap_or_default())
    }

    pub(super) fn is_there(&self, path: &Path, doing: impl FnOnce() -> String) -> Result<bool> {
        Ok(self.host.stat(path).context(doing)?.is_some())
    }

    /// Makes the entries of one of the pool's directories durable.
    pub(in crate::backend) fn sync(&self, part: &str) -> Result<()> {
        let path = self.root.join(part);
        self.perform(Effect::SyncDir { path: &path }, || format!("sync {part}"))
    }

    /// Makes renames into the trash durable, from all directories that they came from.
    pub(in crate::backend) fn sync_all(&self) -> Result<()> {
        self.sync(TRASH)?;
        self.sync(VOLUMES)?;
        // A pool that an earlier release created has no such directory until its first snapshot.
        let snapshots = self.root.join(SNAPSHOTS);
        match self.is_there(&snapshots, || format!("find {SNAPSHOTS}"))? {
            true => self.sync(SNAPSHOTS),
            false => Ok(()),
        }
    }

    /// Like [`Folder::sync_all`], if there is an object in the trash.
    pub(in crate::backend) fn sync_deleted(&self) -> Result<()> {
        let is_object = |name: &String| {
            let uuid = name.split('.').next().unwrap_or_default();
            Uuid::try_parse(uuid).is_ok()
        };
        match self.list(TRASH)?.iter().any(is_object) {
            true => self.sync_all(),
            false => Ok(()),
        }
    }

    /// How the record in a directory says that its image is to be wiped.
    pub(in crate::backend) fn wipe_of(&self, dir: &Path) -> Result<Wipe> {
        match record::load::<Deleted>(self.host.as_ref(), &dir.join(RECORD)) {
            Ok(Some(record)) => Ok(record.wipe),
            // It is unknown whether the record requires a wipe: a later read may succeed and return
            // one.
            Err(error @ Error::Host { .. }) => Err(error),
            // A damaged record cannot require a wipe.
            Ok(None) | Err(_) => Ok(Wipe::None),
        }
    }

    /// Purges entries of the trash: wipes each as its record says, frees the blocks, and removes
    /// the record last. After an error, those before are purged. An entry whose removal was not durable
    /// is purged again after a power loss.
    pub(in crate::backend) fn empty_trash(&self, names: &[String]) -> Result<()> {
        names.iter().try_for_each(|name| self.purge(name))?;
        self.sync(TRASH)
    }

    fn purge(&self, name: &str) -> Result<()> {
        let doing = || format!("empty trash entry {name}");
        let dir = self.root.join(TRASH).join(name);
        if self.store.has_image(&dir).context(doing)? {
            let wipe = self.wipe_of(&dir)?;
            self.remove_image(&dir, wipe)?;
        }
        for file in self.host.list_dir(&dir).context(doing)?.unwrap_or_default() {
            let path = dir.join(file);
            self.perform(Effect::RemoveFile { path: &path }, doing)?;
        }
        self.perform(Effect::RemoveDir { path: &dir }, doing)
    }

    /// Entries of the trash that belonged to these volumes or snapshots. The UUIDs of a volume and a
    /// snapshot are never equal.
    pub(in crate::backend) fn trash_of(&self, uuids: &[Uuid]) -> Result<Vec<String>> {
        let mut names = self.list(TRASH)?;
        names.retain(|name| {
            let uuid = name.split_once('.').map(|(uuid, _)| Uuid::try_parse(uuid));
            matches!(uuid, Some(Ok(uuid)) if uuids.contains(&uuid))
        });
        Ok(names)
    }

    fn remove_image(&self, dir: &Path, wipe: Wipe) -> Result<()> {
        let alone = (wipe == Wipe::Zero).then(|| self.wiping.try_lock());
        let _alone = match alone {
            None => None,
            Some(Ok(alone)) => Some(alone),
            Some(Err(TryLockError::Poisoned(poisoned))) => Some(poisoned.into_inner()),
            Some(Err(TryLockError::WouldBlock)) => {
                return Err(Error::Pending {
                    what: format!("pool {} (a wipe of another image)", self.path.display()),
                });
            }
        };
        if self.store.wipe(dir, wipe)? {
            self.mark_undiscarded()?;
        }
        let removed = self.store.remove(dir);
        removed.context(|| "delete an image".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::formats::files;
    use crate::record::fuzz::records;

    /// How the files of a kind say that an image is to be wiped, once its record is in the trash, and
    /// before.
    fn wipes<T: Record>(kind: &str, wipe: impl Fn(T) -> Wipe) -> Vec<(Wipe, Wipe)> {
        let path = Path::new(RECORD);
        let found = files(kind).into_values().map(|bytes| {
            let deleted: Deleted = record::decode(path, &bytes).unwrap();
            (deleted.wipe, wipe(record::decode(path, &bytes).unwrap()))
        });
        found.collect()
    }

    /// A record in the trash is read by any later program, which wipes the image as it says.
    #[test]
    fn a_record_in_the_trash_says_how_its_image_is_wiped() {
        for wipes in [
            wipes("volume", |record: VolumeRecord| record.wipe),
            wipes("snapshot", |record: SnapshotRecord| record.wipe),
        ] {
            assert!(wipes.iter().all(|(deleted, record)| deleted == record));
            for wipe in [Wipe::Zero, Wipe::Discard] {
                assert!(wipes.contains(&(wipe, wipe)), "{wipe:?}");
            }
        }
    }

    #[test]
    fn fuzz_records_in_the_trash() {
        for kind in ["volume", "snapshot"] {
            records::<Deleted>(kind, |record| record.wipe == Wipe::None);
        }
    }
}
