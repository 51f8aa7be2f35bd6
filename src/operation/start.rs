//! Start: whose pools are these, which are served, and what did a crash leave?
//!
//! A pool is made by an explicit act only, and a blank folder may be a disk that isn't mounted.
//! So a blank path where the node record knows a pool is never made a pool; it is looked at
//! again while the other pools serve. A pool of another home waits for `pool adopt`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use super::pool::{Pool, PoolState};
use super::pool_image::{self, OpenImage};
use super::{CutCounts, Driver, InFlight, Locks, Settings, pool_make, usage};
use crate::backend::Backend;
use crate::backend::file::{FileBackend, Found};
use crate::cut::Seams;
use crate::error::{Doing, Error, Result, chain};
use crate::host::{Effect, Host};
use crate::model::{HomeId, PoolDefinition, PoolPlace};
use crate::record::node::KnownPool;
use crate::record::{self, NodeRecord};

/// Where the simulated host has its pools.
fn memory_path(name: &str) -> PathBuf {
    Path::new("/memory").join(name)
}

/// The folder of a definition.
pub(super) fn folder(definition: &PoolDefinition) -> PathBuf {
    match &definition.place {
        PoolPlace::File { path } => path.clone(),
        PoolPlace::Memory => memory_path(&definition.name),
    }
}

/// Ends freezes that a crash has left. What can't be thawed now is tried again: the driver serves
/// meanwhile.
fn sweep(seams: &Seams) {
    match seams.freezer.sweep() {
        Ok(volumes) if volumes.is_empty() => {}
        Ok(volumes) => tracing::warn!(?volumes, "thawed what a crash had left frozen"),
        Err(error) => {
            tracing::error!(error = %chain(&error), "can't end the freezes that a crash has left");
        }
    }
}

impl Driver {
    /// Opens the pools, takes their locks and ends what a crash left. A pool that can't be served
    /// doesn't hold up the others; a path that was never a pool, without `init`, is an error.
    pub fn start(settings: Settings, seams: Seams) -> Result<Driver> {
        let host = seams.host.clone();
        // Before anything touches an image: a frozen one that was unmounted is hidden.
        sweep(&seams);
        let mut record: NodeRecord =
            record::load(host.as_ref(), &settings.node_record)?.unwrap_or_default();
        if record.home.is_none() {
            let homes = homes(host.as_ref(), &settings);
            // Of two homes none is ours: all wait for `adopt`.
            if homes.len() < 2 {
                let found = homes.first().copied();
                record.home = Some(found.unwrap_or_else(|| HomeId(host.random_uuid())));
            }
        }
        let nobodys_home = HomeId(host.random_uuid());
        let driver = Driver {
            settings,
            host,
            seams,
            home: RwLock::new(record.home),
            nobodys_home,
            pools: RwLock::new(Vec::new()),
            record: Mutex::new(record),
            locks: Locks::default(),
            in_flight: InFlight::default(),
            formats: std::sync::atomic::AtomicU64::new(0),
            copies: super::copying::Copies::default(),
            copied: std::sync::atomic::AtomicU64::new(0),
            pauses: Mutex::default(),
            cuts: CutCounts::default(),
        };
        let mut states = Vec::new();
        for definition in &driver.settings.pools {
            states.push(driver.open_or_refuse(definition)?);
        }
        *driver.pools.write().unwrap_or_else(PoisonError::into_inner) = states;
        driver.settle_groups();
        driver.remember()?;
        Ok(driver)
    }

    /// Looks again at the node record, which `pool forget` and `pool adopt` may have changed, and
    /// at pools that aren't served: a disk may have come back.
    pub fn look_again(&self) {
        sweep(&self.seams);
        self.read_node_record();
        for state in self.states() {
            let PoolState::Refused {
                definition,
                why: before,
                ..
            } = state
            else {
                continue;
            };
            let state = match self.open_pool(&definition) {
                Ok(state) => state,
                Err(error) => PoolState::Refused {
                    id: None,
                    why: chain(&error),
                    definition: definition.clone(),
                },
            };
            if let PoolState::Refused { why, .. } = &state
                && *why == before
            {
                continue;
            }
            let mut pools = self.pools.write().unwrap_or_else(PoisonError::into_inner);
            if let Some(slot) = pools
                .iter_mut()
                .find(|slot| slot.definition().name == definition.name)
            {
                *slot = state;
            }
        }
        self.settle_groups();
        if let Err(error) = self.remember() {
            tracing::error!(error = %chain(&error), "can't write the node record");
        }
    }

    /// Goes on with deletes that failed half-way, in every pool that is served. Takes as long as
    /// their wipes.
    pub fn end_trash(&self) {
        for pool in self.serving() {
            if !self.in_flight.is_stopping() {
                pool.backend.end_trash();
            }
        }
    }

    /// Takes over what an administrator's act has written. A home that is settled stays: the
    /// cluster knows it.
    fn read_node_record(&self) {
        match record::load::<NodeRecord>(self.host.as_ref(), &self.settings.node_record) {
            Ok(Some(found)) => {
                let mut home = self.home.write().unwrap_or_else(PoisonError::into_inner);
                *home = home.or(found.home);
                let settled = *home;
                drop(home);
                *self.node_record() = NodeRecord {
                    home: settled,
                    ..found
                };
            }
            // It's written again.
            Ok(None) => {}
            Err(error) => tracing::error!(error = %chain(&error), "can't read the node record"),
        }
    }

    /// A pool that can't be read doesn't hold up the others; a bad definition does.
    fn open_or_refuse(&self, definition: &PoolDefinition) -> Result<PoolState> {
        match self.open_pool(definition) {
            Err(
                error @ (Error::Damaged { .. }
                | Error::Host { .. }
                | Error::Busy { .. }
                | Error::Pending { .. }),
            ) => {
                let why = chain(&error);
                tracing::error!(pool = %definition.name, "not served: {why}");
                let id = self.known(definition).map(|(id, _)| id);
                Ok(PoolState::Refused {
                    definition: definition.clone(),
                    id,
                    why,
                })
            }
            opened => opened,
        }
    }

    /// Opens one pool, or says why it isn't served.
    fn open_pool(&self, definition: &PoolDefinition) -> Result<PoolState> {
        let outer = folder(definition);
        let refused = |id, why: String| {
            tracing::error!(pool = %definition.name, "not served: {why}");
            Ok(PoolState::Refused {
                definition: definition.clone(),
                id,
                why,
            })
        };
        let known = self.known(definition);
        let found = pool_make::look(self.host.as_ref(), &outer)?;
        pool_image::check_kind(definition, &found)?;
        let (image, found) = self.open_image(definition, found, known.is_none())?;
        let path = image.as_ref().map_or(outer, |image| image.folder.clone());
        match found {
            pool_make::Found::Pool(pool) if pool.home != self.home() => {
                return refused(
                    Some(pool.id),
                    format!(
                        "it belongs to home {}, this machine is {}; if its disk came here for good, run `slackwater pool adopt {}`",
                        pool.home,
                        self.home(),
                        definition.name
                    ),
                );
            }
            pool_make::Found::Pool(_) => {}
            found if known.is_some() => {
                let (id, last) = known.unzip();
                let what = if found == pool_make::Found::Missing {
                    "does not exist"
                } else {
                    "has no pool"
                };
                return refused(
                    id,
                    format!(
                        "{} {what}, but this machine had it at {}; is its disk mounted? (`slackwater pool forget` ends it)",
                        path.display(),
                        last.map(|known: KnownPool| known.place).unwrap_or_default()
                    ),
                );
            }
            _ if definition.init || definition.place == PoolPlace::Memory => {
                if definition.place == PoolPlace::Memory {
                    self.make_dirs(&path)?;
                }
                pool_make::make_pool(self.host.as_ref(), &definition.name, &path, self.home())?;
            }
            found => return Err(no_pool(definition, &path, &found)),
        }
        match FileBackend::open(self.host.clone(), &path)? {
            Found::Pool(backend) => Ok(PoolState::Serving(Arc::new(
                self.recover(definition, *backend, image)?,
            ))),
            Found::Locked(_) => Err(Error::refused(
                path.display(),
                "another slackwater process serves this pool; stop it first",
            )),
            Found::Blank => refused(None, format!("{} has no pool any more", path.display())),
        }
    }

    /// Ends what a crash left on a pool, before its first call.
    fn recover(
        &self,
        definition: &PoolDefinition,
        backend: FileBackend,
        image: Option<OpenImage>,
    ) -> Result<Pool> {
        let mounts = self.mounts()?;
        let leftovers = backend.recover(&|device| !usage::of_device(&mounts, device).is_empty())?;
        let mut pool = Pool {
            definition: definition.clone(),
            backend: Box::new(backend),
            image,
            leftovers,
        };
        pool.leftovers.ephemeral = self.end_stale_ephemerals(&pool)?;
        tracing::info!(pool = %definition.name, id = %pool.id(), volumes = pool.backend.count(), leftovers = pool.leftovers.total(), "serving");
        Ok(pool)
    }

    /// Inline volumes of an earlier boot: their pods are gone, and nobody unpublishes them.
    fn end_stale_ephemerals(&self, pool: &Pool) -> Result<u64> {
        let boot = self.host.boot_id().doing(|| "read the boot id".into())?;
        let mut ended = 0;
        for record in pool
            .backend
            .volumes(None, usize::MAX)
            .into_iter()
            .filter(|record| record.ephemeral)
        {
            let this_boot = record
                .last_stage
                .as_ref()
                .is_some_and(|stage| stage.boot == Some(boot));
            if this_boot || !pool.backend.devices(record.uuid)?.is_empty() {
                continue;
            }
            match pool.backend.delete(record.uuid) {
                Ok(()) => ended += 1,
                Err(error) => {
                    tracing::error!(volume = %record.uuid, error = %chain(&error), "can't end an inline volume of an earlier boot");
                }
            }
        }
        Ok(ended)
    }

    /// What the node record knows of a definition, by place or by name.
    fn known(&self, definition: &PoolDefinition) -> Option<(crate::model::PoolId, KnownPool)> {
        let place = definition.place.to_string();
        let record = self.node_record();
        let mut pools = record.pools.iter();
        pools
            .find(|(_, known)| known.place == place || known.name == definition.name)
            .map(|(id, known)| (*id, known.clone()))
    }

    /// Writes what is served into the node record, if that is news.
    fn remember(&self) -> Result<()> {
        let mut record = self.node_record();
        let before = record.clone();
        for pool in self.serving() {
            let known = KnownPool {
                name: pool.definition.name.clone(),
                place: pool.definition.place.to_string(),
            };
            record.forgotten.remove(&pool.id());
            record.pools.insert(pool.id(), known);
        }
        let path = &self.settings.node_record;
        if *record == before
            && self
                .host
                .stat(path)
                .doing(|| "look at the node record".into())?
                .is_some()
        {
            return Ok(());
        }
        self.make_dirs(path.parent().unwrap_or(Path::new("/")))?;
        record::store(self.host.as_ref(), path, &*record)
    }

    /// mkdir -p.
    fn make_dirs(&self, path: &Path) -> Result<()> {
        let mut missing: Vec<&Path> = Vec::new();
        for folder in path.ancestors() {
            if self
                .host
                .stat(folder)
                .doing(|| format!("look at {}", folder.display()))?
                .is_some()
            {
                break;
            }
            missing.push(folder);
        }
        missing.iter().rev().try_for_each(|folder| {
            self.host
                .perform(&Effect::MakeDir { path: folder })
                .map(drop)
                .doing(|| format!("make {}", folder.display()))
        })
    }

    pub(super) fn node_record(&self) -> MutexGuard<'_, NodeRecord> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Homes of the pools that are there.
fn homes(host: &dyn Host, settings: &Settings) -> BTreeSet<HomeId> {
    let mut homes = BTreeSet::new();
    for definition in &settings.pools {
        // One that can't be read says so when it's opened.
        let pool = pool_image::identify(host, definition).ok().flatten();
        homes.extend(pool.map(|pool| pool.home));
    }
    homes
}

fn no_pool(definition: &PoolDefinition, path: &Path, found: &pool_make::Found) -> Error {
    let what = match found {
        pool_make::Found::Missing => "does not exist".to_string(),
        pool_make::Found::Foreign(what) => format!("is not a pool: {what}"),
        pool_make::Found::Pool(_) | pool_make::Found::Image(_) | pool_make::Found::Blank => {
            "is empty and was never a pool".to_string()
        }
    };
    Error::refused(
        path.display(),
        format!(
            "{what}; if this is the right disk, run `slackwater pool init {}` once, or add `,init` to its definition",
            definition.plainly()
        ),
    )
}
