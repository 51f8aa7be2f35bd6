//! A pool of any kind: the records of its volumes and snapshots, their life cycle and its space. A
//! [`Store`] does what differs between the kinds. A backend keeps its own data consistent;
//! `operation` decides what a CSI call means.

mod closed;
pub mod metadata;
mod recover;
mod room;
pub mod shares;
mod snapshot;
mod spare;
#[cfg(test)]
mod tests;
mod volume;

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use uuid::Uuid;

use super::file::FileStore;
use super::records::{Folder, POOL_FILE, RecordStore, write_lock};
use super::store::{Devices, Store, StoreProperties};
use super::thin::ThinStore;
use super::{Copier, Image, ImageHandle, PoolKind};
use crate::error::{ErrorContext, Result};
use crate::host::{Budget, ForeignFile, Host, Kept};
use crate::record::{PoolRecord, SnapshotRecord, VolumeRecord};
use room::Growing;

/// One pool. The caller holds the lock of a volume during every call that names it.
pub struct PoolBackend {
    pub record: PoolRecord,
    /// What does not change while the pool is open.
    pub facts: StoreProperties,
    pub folder: Arc<Folder>,
    pub volumes: RecordStore<VolumeRecord>,
    pub snapshots: RecordStore<SnapshotRecord>,
    /// Held while available space is checked and taken.
    growing: Mutex<Growing>,
    /// The pinned folder and the pool's lock, which this value keeps.
    _kept: [Kept; 2],
}

/// What was found at a configured path.
pub enum OpenResult {
    /// No pool: the folder has no `pool.json`.
    Blank,
    /// Another process serves it.
    Locked,
    /// A pool, which is now locked by this process.
    Pool(Box<PoolBackend>),
}

impl PoolBackend {
    /// Opens the pool at `path`: takes its lock, for which it waits for `max_wait`, and reads its
    /// records.
    pub fn open(
        host: Arc<dyn Host>,
        path: &Path,
        kind: PoolKind<'_>,
        max_wait: Duration,
    ) -> Result<OpenResult> {
        let what = || format!("open the directory of pool {}", path.display());
        if host.stat(&path.join(POOL_FILE)).context(what)?.is_none() {
            return Ok(OpenResult::Blank);
        }
        let (root, pinned) = host.pin_dir(path).context(what)?;
        let Some(record) = PoolBackend::identify(host.as_ref(), &root)? else {
            return Ok(OpenResult::Blank);
        };
        let lock = PoolBackend::lock(host.as_ref(), &root, max_wait);
        let Some(lock) = lock.context(what)? else {
            return Ok(OpenResult::Locked);
        };
        let store: Box<dyn Store> = match kind {
            PoolKind::File { extent } => {
                let store = FileStore::open(host.clone(), path, &root, extent);
                Box::new(store.context(what)?)
            }
            PoolKind::Thin { pool } => {
                let store = ThinStore::open(host.clone(), &root, pool, record.id);
                Box::new(store.context(what)?)
            }
        };
        let facts = store.facts();
        let folder = Arc::new(Folder::open(host, path, root, store)?);
        Ok(OpenResult::Pool(Box::new(PoolBackend {
            record,
            facts,
            volumes: RecordStore::read(folder.clone())?,
            snapshots: RecordStore::read(folder.clone())?,
            folder,
            growing: Mutex::default(),
            _kept: [pinned, lock],
        })))
    }

    /// The host that it is on.
    pub fn host(&self) -> &dyn Host {
        self.folder.host.as_ref()
    }

    fn store(&self) -> &dyn Store {
        self.folder.store.as_ref()
    }

    /// The devices of its volumes.
    pub fn devices(&self) -> &dyn Devices {
        self.store()
    }

    /// Writes to the pool's disk, durably and without needing free space. An error means that the
    /// disk is dead or no longer accepts writes. Returns only after the disk has answered.
    pub fn try_disk(&self) -> Result<()> {
        write_lock(self.folder.host.as_ref(), &self.folder.root)
            .context(|| "write to its disk".into())
    }

    /// Opens an image to copy from it, or to write to it while it is being filled.
    pub fn open_image(&self, image: Image) -> Result<ImageHandle> {
        self.store().open(image)
    }

    /// Whether an image exists. A crash may have left a record whose image was not created yet.
    pub fn has_image(&self, image: Image) -> Result<bool> {
        Ok(self.find_length(image)?.is_some())
    }

    /// The length of an image in bytes; `None` if it does not exist.
    pub fn find_length(&self, image: Image) -> Result<Option<u64>> {
        let size = self.store().size(image);
        let size = size.context(|| format!("find the image of {image}"))?;
        Ok(size.map(|size| size.length))
    }

    /// Extends an image that is being filled to at least this length.
    pub fn lengthen(&self, image: Image, length: u64) -> Result<()> {
        let longer = self.store().lengthen(image, length, false);
        longer.context(|| format!("extend the image of {image}"))
    }

    /// Why no image of this pool can share blocks with a file that the driver did not create; `None` if
    /// one can.
    pub fn find_obstacle(&self, file: &dyn ForeignFile) -> Result<Option<String>> {
        let found = self.store().find_obstacle(file);
        found.context(|| "examine whether an image can share blocks with the file".into())
    }

    /// Makes a prepared image the clone of such a file, which must not change during the call.
    pub fn clone_file(&self, file: &dyn ForeignFile, copy: Image) -> Result<()> {
        let cloned = self.store().clone_file(file, copy);
        cloned.context(|| format!("clone the file into {copy}"))
    }

    /// Returns the copier of an image of this pool, which may be in use, into a prepared image. All
    /// members of a cut share `budget`. Requires [`StoreProperties::shares_blocks`].
    pub fn copier(
        &self,
        source: Image,
        copy: Image,
        budget: &Arc<Budget>,
    ) -> Result<Box<dyn Copier>> {
        self.store().copier(source, copy, budget)
    }

    /// Gives the btrfs on an image a new fsid. No device may be attached to the image.
    pub fn renew_fs_id(&self, image: Image, fs_id: Uuid) -> Result<()> {
        self.store().renew_fs_id(image, fs_id)
    }

    /// Frees all blocks of an image whose creation was never acknowledged, so that the blocks it
    /// shared belong to the other image alone.
    pub fn empty(&self, image: Image) -> Result<()> {
        let emptied = self.store().shorten(image, 0);
        emptied.context(|| format!("truncate the image of {image} to 0 bytes"))
    }
}
