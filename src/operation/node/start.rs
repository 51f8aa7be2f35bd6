//! The start of the driver: determines whose pools these are and which of them are served, and
//! cleans up what a crash left.
//!
//! A pool is created only by an explicit action, and an empty folder may be the mount point of a
//! disk that is not mounted. So no pool is created at an empty path at which the node record has a
//! pool. The driver checks that path again while the other pools are served. A pool of another home
//! waits for `slackwater pool adopt`.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::disk::{self, PoolQueries};
use crate::backend::place::{self, pool_fs};
use crate::cut::CutInterfaces;
use crate::error::{Error, Result, chain};
use crate::host::{Effect, Host};
use crate::model::HomeId;
use crate::operation::snapshot::cut::sweep;
use crate::operation::{Driver, Pools, ServingState, Settings, Snapshots, Usage, Volumes};
use crate::record::{self, NodeRecord};

/// How long the opening of a pool may take at the start, even if those before it took too long.
const MIN_OPENING: Duration = Duration::from_secs(1);
/// The same if the start must fail while another process has the pool: longer than its lock is waited
/// for.
const MIN_OPENING_ALONE: Duration = Duration::from_secs(6);

impl Driver {
    /// Opens the pools, takes their locks and detaches unused loop devices that a crash left. The
    /// other cleanups are done by [`Driver::clean`], [`Driver::wipe`] and
    /// [`Driver::resolve_groups`]. A pool that cannot be served is refused, with its name, and does
    /// not delay the others. It is an error only if no pool is served or known, and each is a mistake
    /// in its definition or is held by another process.
    pub fn start(settings: Settings, interfaces: CutInterfaces) -> Result<Driver> {
        Driver::start_within(settings, interfaces, disk::DISK_TIMEOUT)
    }

    /// Like [`Driver::start`], with another timeout for the opening of pools, for a process that has
    /// nothing to do without them, and for tests in which one takes longer.
    pub fn start_within(
        settings: Settings,
        interfaces: CutInterfaces,
        max_wait: Duration,
    ) -> Result<Driver> {
        let host = interfaces.host.clone();
        // This comes before any access to an image: a frozen file system that was unmounted is
        // hidden.
        sweep(&interfaces);
        let mut record: NodeRecord =
            record::load(host.as_ref(), &settings.node_record)?.unwrap_or_default();
        // The rename of the record may not be durable yet.
        let folder = settings.node_record.parent().unwrap_or(Path::new("/"));
        if record != NodeRecord::default()
            && let Err(error) = host.perform(&Effect::SyncDir { path: folder })
        {
            tracing::error!(error = %chain(&error), "failed to sync the node record");
        }
        let questions = PoolQueries::new();
        let hanging = disk::hanging(&host, &questions, &settings.pools);
        if record.home.is_none() {
            let homes = homes(host.as_ref(), &settings, &hanging);
            // With two homes, neither is chosen: all pools wait for `slackwater pool adopt`.
            if homes.len() < 2 {
                let found = homes.first().copied();
                record.home = Some(found.unwrap_or_else(|| HomeId(host.random_uuid())));
            }
        }
        let pools = Arc::new(Pools::new(settings, host, record));
        let usage = Arc::new(Usage::new(pools.clone(), interfaces.freezer.clone()));
        let snapshots = Arc::new(Snapshots::new(pools.clone(), usage.clone(), interfaces));
        let driver = Driver {
            host: pools.host.clone(),
            volumes: Volumes::new(pools.clone(), usage.clone(), snapshots.clone()),
            pools,
            usage,
            snapshots,
            questions,
            numbers: Arc::default(),
        };
        driver.open_all(&hanging, max_wait)?;
        if let Err(error) = driver.usage.forget_earlier_stages() {
            tracing::warn!(error = %chain(&error), "failed to remove entries of an earlier boot from the state directory");
        }
        driver.usage.watch_published();
        driver.pools.remember()?;
        Ok(driver)
    }

    /// Opens the pools, or returns what is wrong with one of them: see [`Driver::start`].
    fn open_all(&self, hanging: &BTreeSet<String>, max_wait: Duration) -> Result<()> {
        let (mut wrong, mut may_come) = (None, false);
        let deadline = Instant::now().checked_add(max_wait);
        for definition in &self.pools.settings.pools {
            // All together, so that several disks that hang do not delay the start for longer.
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let least = match self.pools.settings.alone {
                true => MIN_OPENING_ALONE,
                false => MIN_OPENING,
            };
            let left = left.unwrap_or(max_wait).max(least.min(max_wait));
            let state = match self.open_unless(hanging, definition, left) {
                Err(error @ Error::Locked { .. }) if self.pools.settings.alone => {
                    return Err(error);
                }
                Err(error) => {
                    let state = self.refuse(definition, &error);
                    may_come |= !is_mistake(&error);
                    wrong = wrong.or(Some(error).filter(is_mistake));
                    state
                }
                Ok(state) => state,
            };
            self.pools.add(state);
        }
        let no_id = |state: &ServingState| matches!(state, ServingState::Refused { id: None, .. });
        let is_useless = || !may_come && self.pools.states().iter().all(no_id);
        if let Some(error) = wrong.filter(|_| is_useless()) {
            return Err(error);
        }
        Ok(())
    }
}

/// Whether an error means that a definition, or what lies at its place, is wrong: only a person can
/// change that.
fn is_mistake(error: &Error) -> bool {
    !matches!(
        error,
        Error::Damaged { .. }
            | Error::Host { .. }
            | Error::Busy { .. }
            | Error::Pending { .. }
            | Error::Unreachable { .. }
    )
}

/// The homes of the pools that exist.
fn homes(host: &dyn Host, settings: &Settings, hanging: &BTreeSet<String>) -> BTreeSet<HomeId> {
    let machine = pool_fs::machine_folders(&settings.node_record, &settings.allowed_paths);
    let pools = settings.pools.iter();
    let mut homes = BTreeSet::new();
    for definition in pools.filter(|pool| !hanging.contains(&pool.name)) {
        // The opening of a pool reports that it cannot be read.
        let pool = place::identify(host, definition, &machine).ok().flatten();
        homes.extend(pool.map(|(_, home)| home));
    }
    homes
}

#[cfg(test)]
mod tests;
