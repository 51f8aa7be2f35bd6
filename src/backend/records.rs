//! The directories of a pool, which are the same for all kinds of pools: `pool.json`, `lock`,
//! `trash/`, and a directory with `record.json` for each volume below `volumes/` and each snapshot
//! below `snapshots/`.

mod folder;
mod record_store;
mod trim;

use std::path::{Path, PathBuf};

pub use folder::Folder;
pub(super) use record_store::Entry;
pub use record_store::{RecordStore, StoredRecord};

use super::Image;
use crate::host::{self, Effect, Host};

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
pub(super) const RECORD: &str = "record.json";

/// The directory of an image and its record, within the pool.
pub(super) fn part(image: Image) -> PathBuf {
    let (part, uuid) = match image {
        Image::Volume(uuid) => (VOLUMES, uuid),
        Image::Snapshot(uuid) => (SNAPSHOTS, uuid),
    };
    Path::new(part).join(uuid.hyphenated().to_string())
}

/// Writes to the disk of the pool in a folder, durably. The lock file has no content, so writing it
/// takes no space. A read would not be enough: it may still succeed on a file system that is frozen
/// or whose disk is gone.
pub fn write_lock(host: &dyn Host, folder: &Path) -> host::Result<()> {
    let path = &folder.join(LOCK_FILE);
    host.perform(&Effect::WriteFile { path, bytes: &[] })?;
    host.perform(&Effect::SyncFile { path }).map(drop)
}
