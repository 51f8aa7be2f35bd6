//! Pools that are not open: what is in a folder, and the creation of a pool in it. All kinds of
//! pools have a folder with their records.

use std::path::Path;
use std::time::Duration;

use super::PoolBackend;
use crate::backend::records::{LOCK_FILE, POOL_FILE, SNAPSHOTS, TRASH, VOLUMES};
use crate::backend::{PoolKind, file, thin};
use crate::error::{ErrorContext, Result};
use crate::host::{self, Effect, FileKind, Host, Kept};
use crate::record::{self, PoolRecord};

/// The temporary file of a pool's record that a crash may leave.
const HALF_WRITTEN: &str = "pool.json.new";

impl PoolBackend {
    /// Reads the record of the pool at a path without taking its lock; `None` if there is no pool.
    pub fn identify(host: &dyn Host, path: &Path) -> Result<Option<PoolRecord>> {
        record::load(host, &path.join(POOL_FILE))
    }

    /// Takes the lock of a pool, for which it waits for `max_wait`; `None` if another process has
    /// it. The lock is released when the result is dropped.
    pub fn lock(host: &dyn Host, path: &Path, max_wait: Duration) -> host::Result<Option<Kept>> {
        host.lock_file(&path.join(LOCK_FILE), max_wait)
    }

    /// Replaces the record of a pool durably. The caller has its lock.
    pub fn replace_record(host: &dyn Host, path: &Path, record: &PoolRecord) -> Result<()> {
        record::store(host, &path.join(POOL_FILE), record)
    }

    /// Whether an entry of a folder without a pool's record is what an interrupted creation of a
    /// pool leaves.
    pub fn is_remnant(host: &dyn Host, path: &Path, name: &str) -> Result<bool> {
        let entry = path.join(name);
        let doing = || format!("examine {}", entry.display());
        let is = |kind| -> Result<bool> {
            let found = host.stat(&entry).context(doing)?;
            Ok(found.is_none_or(|found| found.kind == kind))
        };
        match name {
            HALF_WRITTEN | LOCK_FILE => is(FileKind::File),
            VOLUMES | SNAPSHOTS | TRASH => Ok(is(FileKind::Dir)? && {
                let names = host.list_dir(&entry).context(doing)?;
                names.is_none_or(|names| names.is_empty())
            }),
            _ => Ok(false),
        }
    }

    /// Creates a pool in an empty folder, or completes a creation that was interrupted.
    pub fn make(
        host: &dyn Host,
        path: &Path,
        kind: PoolKind<'_>,
        record: &PoolRecord,
    ) -> Result<()> {
        let doing = || format!("create pool {}", record.name);
        for part in [VOLUMES, SNAPSHOTS, TRASH] {
            let path = &path.join(part);
            host.perform(&Effect::MakeDir { path }).context(doing)?;
        }
        match kind {
            PoolKind::File { .. } => {
                let parts = [VOLUMES, SNAPSHOTS].map(|part| path.join(part));
                file::prepare(host, path, &parts).context(doing)?;
            }
            PoolKind::Thin { pool } => thin::claim(host, pool).context(doing)?,
        }
        // They are durable before pool.json exists.
        host.perform(&Effect::SyncDir { path }).context(doing)?;
        PoolBackend::replace_record(host, path, record)
    }
}
