//! Start: whose pools are these, which are served, and what did a crash leave?
//!
//! A pool is made by an explicit act only, and a blank folder may be a disk that isn't mounted.
//! So a blank path where the node record knows a pool is never made a pool; it is looked at
//! again while the other pools serve. A pool of another home waits for `pool adopt`.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use super::admin;
use super::ground::{self, PoolGround};
use super::image::{self, OpenImage};
use super::make;
use super::pool::{Pool, ServingState};
use super::watch::{self, PoolQuestions};
use crate::backend::Backend;
use crate::backend::file::{FileBackend, OpenResult};
use crate::cut::Seams;
use crate::error::{Error, ErrorContext, Result, chain};
use crate::host::{Effect, Host};
use crate::model::{HomeId, PoolDefinition, PoolId, PoolPlace};
use crate::operation::{CutCounts, Driver, InFlight, Locks, Settings, usage};
use crate::record::node::KnownPool;
use crate::record::{self, NodeRecord};

/// How long a start waits for the lock of a pool that a process which was killed just now served.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// Where the simulated host has its pools.
fn memory_path(name: &str) -> PathBuf {
    Path::new("/memory").join(name)
}

/// The folder of a definition.
pub(in crate::operation) fn folder(definition: &PoolDefinition) -> PathBuf {
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
        Ok(volumes) => tracing::warn!(?volumes, "thawed file systems after a crash"),
        Err(error) => {
            tracing::error!(error = %chain(&error), "failed to thaw file systems after a crash");
        }
    }
}

impl Driver {
    /// Opens the pools, takes their locks and ends the idle loop devices that a crash left. The rest is
    /// left to [`Driver::clean`], [`Driver::wipe`] and [`Driver::resolve_groups`]. A pool that can't be
    /// served is refused by name and doesn't hold up the others. It is an error only where no pool is
    /// served and none is known, which is a mistake in the definitions.
    pub fn start(settings: Settings, seams: Seams) -> Result<Driver> {
        let host = seams.host.clone();
        // Before anything touches an image: a frozen one that was unmounted is hidden.
        sweep(&seams);
        let mut record: NodeRecord =
            record::load(host.as_ref(), &settings.node_record)?.unwrap_or_default();
        // The rename that put it there may not be durable yet.
        let folder = settings.node_record.parent().unwrap_or(Path::new("/"));
        if record != NodeRecord::default()
            && let Err(error) = host.perform(&Effect::SyncDir { path: folder })
        {
            tracing::error!(error = %chain(&error), "failed to sync the node record");
        }
        let questions = PoolQuestions::new();
        let hanging = watch::hanging(&host, &questions, &settings.pools);
        if record.home.is_none() {
            let homes = homes(host.as_ref(), &settings, &hanging);
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
            copies: crate::operation::snapshot::copy::Copies::default(),
            copied: std::sync::atomic::AtomicU64::new(0),
            published: crate::operation::usage::published::Published::default(),
            backoffs: Mutex::default(),
            cuts: CutCounts::default(),
            small: Mutex::default(),
            questions,
        };
        let mut wrong = None;
        for definition in &driver.settings.pools {
            let state = match driver.open_unless(&hanging, definition) {
                Err(error @ Error::Locked { .. }) if driver.settings.alone => return Err(error),
                Err(error) => {
                    let state = driver.refuse(definition, &error);
                    wrong = wrong.or(Some(error).filter(is_mistake));
                    state
                }
                Ok(state) => state,
            };
            log_refused(&state);
            let mut states = driver.pools.write().unwrap_or_else(PoisonError::into_inner);
            states.push(state);
        }
        let no_id = |state: &ServingState| matches!(state, ServingState::Refused { id: None, .. });
        if let Some(error) = wrong.filter(|_| driver.states().iter().all(no_id)) {
            return Err(error);
        }
        if let Err(error) = driver.forget_earlier_stages() {
            tracing::warn!(error = %chain(&error), "failed to remove entries of an earlier boot from the state directory");
        }
        driver.watch_published();
        driver.remember()?;
        Ok(driver)
    }

    /// Ends freezes that a crash has left. Apart from the looks, which wait for disks.
    pub fn sweep_freezes(&self) {
        sweep(&self.seams);
    }

    /// Takes over what an administrator's act has written. A home that is settled stays: the
    /// cluster knows it.
    pub(in crate::operation) fn read_node_record(&self) {
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
            Err(error) => tracing::error!(error = %chain(&error), "failed to read the node record"),
        }
    }

    /// A pool that could not be opened, as the node record knows it.
    pub(in crate::operation) fn refuse(
        &self,
        definition: &PoolDefinition,
        error: &Error,
    ) -> ServingState {
        ServingState::Refused {
            definition: definition.clone(),
            id: self.known(definition).map(|(id, _)| id),
            why: chain(error),
            was: None,
        }
    }

    /// How long a pool's lock is waited for: later on it's looked at again and again.
    fn lock_patience(&self) -> Duration {
        match self.states().len() < self.settings.pools.len() {
            true => LOCK_TIMEOUT,
            false => Duration::ZERO,
        }
    }

    /// Opens one pool, or says why it isn't served. `was` is the file system on which this process
    /// has served it before.
    pub(in crate::operation) fn open_pool(
        &self,
        definition: &PoolDefinition,
        was: Option<u64>,
    ) -> Result<ServingState> {
        let outer = folder(definition);
        let refused = |id, why: String| {
            Ok(ServingState::Refused {
                definition: definition.clone(),
                id,
                why,
                was: None,
            })
        };
        let known = self.known(definition);
        image::leave_dead(self.host.as_ref(), definition, &outer)?;
        let found = make::probe(self.host.as_ref(), &outer)?;
        image::check_kind(definition, &found)?;
        let is_nothing = matches!(found, make::Probe::Blank | make::Probe::Missing);
        if is_nothing && definition.init && known.is_none() {
            ground::check_mount(self.host.as_ref(), definition, &outer)?;
        }
        let patience = self.lock_patience();
        let (image, found) = self.open_image(definition, found, known.is_none(), patience)?;
        let path = image
            .as_ref()
            .map_or(outer.clone(), |image| image.folder.clone());
        match found {
            make::Probe::Pool(pool) if pool.home != self.home() => {
                return refused(
                    Some(pool.id),
                    format!(
                        "it belongs to home {}, but the home of this machine is {}; if its disk was moved here permanently, run `slackwater pool adopt {}`",
                        pool.home,
                        self.home(),
                        definition.name
                    ),
                );
            }
            make::Probe::Pool(pool) => {
                if let Some((id, why)) = self.rival(definition, pool.id) {
                    if let Some(image) = image {
                        // Of two images with one uuid the kernel mounts one.
                        image::close(self.host.as_ref(), image)?;
                    }
                    return refused(id, why);
                }
            }
            found if known.is_some() => {
                let (id, last) = known.unzip();
                return refused(id, absent(&path, &found, last));
            }
            _ if definition.init || definition.place == PoolPlace::Memory => {
                if definition.place == PoolPlace::Memory {
                    admin::make_folders(self.host.as_ref(), &path)?;
                }
                make::check_extent(self.host.as_ref(), definition, &path)?;
                make::make_pool(self.host.as_ref(), &definition.name, &path, self.home())?;
            }
            found => return Err(no_pool(definition, &path, &found)),
        }
        make::check_extent(self.host.as_ref(), definition, &path)?;
        self.serve_folder(definition, (&outer, &path), patience, (image, was))
    }

    /// Serves the pool in a folder, where one has just been seen or made.
    fn serve_folder(
        &self,
        definition: &PoolDefinition,
        (outer, path): (&Path, &Path),
        patience: Duration,
        (image, was): (Option<OpenImage>, Option<u64>),
    ) -> Result<ServingState> {
        let refused = |id, why| {
            Ok(ServingState::Refused {
                definition: definition.clone(),
                id,
                why,
                was: None,
            })
        };
        match FileBackend::open(self.host.clone(), path, patience)? {
            OpenResult::Pool(backend) => match self.stays_behind(&backend, was)? {
                Some(why) => refused(Some(backend.pool().id), why),
                None => Ok(ServingState::Serving(Arc::new(self.recover(
                    definition,
                    backend.with_extent(definition.extent),
                    (outer, path),
                    image,
                )?))),
            },
            OpenResult::Locked(_) => Err(Error::Locked {
                place: path.display().to_string(),
            }),
            OpenResult::Blank => refused(None, format!("{} contains no pool", path.display())),
        }
    }

    /// Why a pool with this id must not be served from this place: it is a copy of one at another
    /// place, or may be. The one that is served goes on, or else the one at the place that the node
    /// record names; if that decides nothing, none of them is served. With the id, unless another
    /// place stands for it.
    fn rival(&self, definition: &PoolDefinition, id: PoolId) -> Option<(Option<PoolId>, String)> {
        let why = |place: &PoolPlace| {
            format!(
                "the same pool ({id}) also exists at {place}; one of them is a copy: remove the one that must not be used from the configuration"
            )
        };
        if let Some(pool) = self.serving().into_iter().find(|pool| pool.id() == id) {
            return Some((None, why(&pool.definition.place)));
        }
        let named = self
            .node_record()
            .pools
            .get(&id)
            .map(|known| known.place.clone());
        if named.as_deref() == Some(&definition.place.to_string()) {
            return None;
        }
        let others = self.settings.pools.iter();
        let machine = self.machine_folders();
        let mut others = others.filter(|other| other.name != definition.name);
        others.find_map(|other| {
            let is_named = named.as_deref() == Some(&other.place.to_string());
            let found = match watch::answers(&self.host, &self.questions, other) {
                true => image::identify(self.host.as_ref(), other, &machine),
                false => Err(watch::no_answer(other)),
            };
            match found {
                Ok(Some(found)) if found.id == id => {
                    Some((Some(id).filter(|_| !is_named), why(&other.place)))
                }
                Err(error) if is_named => Some((
                    Some(id),
                    format!(
                        "this machine had the same pool ({id}) at {}, which cannot be read now ({}); if that pool is permanently gone, remove it from the configuration",
                        other.place,
                        chain(&error)
                    ),
                )),
                Ok(_) | Err(_) => None,
            }
        })
    }

    /// Ends what a crash left on a pool, before its first call.
    fn recover(
        &self,
        definition: &PoolDefinition,
        backend: FileBackend,
        folders: (&Path, &Path),
        image: Option<OpenImage>,
    ) -> Result<Pool> {
        let host = self.host.as_ref();
        let ground = PoolGround::of(host, definition, folders, &self.machine_folders())?;
        let doing = || format!("examine pool {}", definition.name);
        let place = self.host.stat(&backend.path()).context(doing)?;
        let mounts = self.mounts()?;
        let leftovers = backend.recover(&|device| !usage::of_device(&mounts, device).is_empty())?;
        let mut pool = Pool {
            definition: definition.clone(),
            backend: Box::new(backend),
            image,
            ground,
            leftovers,
            device: place.map_or(0, |place| place.id.device),
        };
        let (ended, failed) = self.delete_leftover_inline(&pool);
        pool.leftovers.ephemeral = ended;
        if let Some(error) = failed {
            tracing::error!(pool = %definition.name, error = %chain(&error), "failed to delete an unused inline volume");
        }
        tracing::info!(pool = %definition.name, id = %pool.id(), volumes = pool.backend.count(), leftovers = pool.leftovers.total(), "serving");
        Ok(pool)
    }

    /// Folders of the file systems on which this machine lives.
    pub(in crate::operation) fn machine_folders(&self) -> Vec<PathBuf> {
        ground::machine_folders(&self.settings.node_record, &self.settings.allowed_paths)
    }

    /// What the node record knows of a definition, by place or by name.
    fn known(&self, definition: &PoolDefinition) -> Option<(PoolId, KnownPool)> {
        let place = definition.place.to_string();
        let record = self.node_record();
        let mut pools = record.pools.iter();
        pools
            .find(|(_, known)| known.place == place || known.name == definition.name)
            .map(|(id, known)| (*id, known.clone()))
    }

    /// The same as [`Driver::remember`]; a failure is tried again by the next look.
    pub(in crate::operation) fn note_served(&self) {
        if let Err(error) = self.remember() {
            tracing::error!(error = %chain(&error), "failed to write the node record");
        }
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
                .context(|| "examine the node record".into())?
                .is_some()
        {
            return Ok(());
        }
        admin::store_node(self.host.as_ref(), path, &record)
    }

    pub(in crate::operation) fn node_record(&self) -> MutexGuard<'_, NodeRecord> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Logs a pool that is not served, once for each reason.
pub(in crate::operation) fn log_refused(state: &ServingState) {
    if let ServingState::Refused {
        definition, why, ..
    } = state
    {
        tracing::error!(pool = %definition.name, reason = why, "refusing to serve a pool");
    }
}

/// Whether an error says that a definition, or what lies at its place, is wrong: it stays so until
/// a person does something.
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

/// Homes of the pools that are there.
fn homes(host: &dyn Host, settings: &Settings, hanging: &BTreeSet<String>) -> BTreeSet<HomeId> {
    let machine = ground::machine_folders(&settings.node_record, &settings.allowed_paths);
    let pools = settings.pools.iter();
    let mut homes = BTreeSet::new();
    for definition in pools.filter(|pool| !hanging.contains(&pool.name)) {
        // One that can't be read says so when it's opened.
        let pool = image::identify(host, definition, &machine).ok().flatten();
        homes.extend(pool.map(|pool| pool.home));
    }
    homes
}

/// Why a place isn't made a pool: this machine had one there.
fn absent(path: &Path, found: &make::Probe, last: Option<KnownPool>) -> String {
    let what = if *found == make::Probe::Missing {
        "does not exist"
    } else {
        "contains no pool"
    };
    format!(
        "{} {what}, but this machine had it at {}; is its disk mounted? (If it is permanently gone: `slackwater pool forget`)",
        path.display(),
        last.map(|known| known.place).unwrap_or_default()
    )
}

fn no_pool(definition: &PoolDefinition, path: &Path, found: &make::Probe) -> Error {
    let what = match found {
        make::Probe::Missing => "does not exist".to_string(),
        make::Probe::Foreign(what) => format!("is not a pool: {what}"),
        make::Probe::Pool(_) | make::Probe::Image(_) | make::Probe::Blank => {
            "is empty and has never been a pool".to_string()
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

#[cfg(test)]
mod tests;
