//! Opens pools at the start and while the process runs, and closes their places at its end.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::disk;
use crate::backend::place::lvm::{self, CreatePolicy};
use crate::backend::place::pool_fs::{self, PoolFs};
use crate::backend::place::{self, OpenPlace, make};
use crate::backend::{OpenResult, PoolBackend};
use crate::error::{Error, ErrorContext, Result, chain};
use crate::model::{PoolDefinition, PoolId, PoolPlace};
use crate::operation::pools::pool::{folders, pool_kind};
use crate::operation::{Driver, Pool, Presence, ServingState, usage};
use crate::record::node::KnownPool;

/// How long a start waits for the lock of a pool that a process which was killed just now served:
/// less than [`disk::DISK_TIMEOUT`], so that the start learns that another process has it.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

impl Driver {
    /// A pool that could not be opened, as the node record knows it.
    pub(in crate::operation) fn refuse(
        &self,
        definition: &PoolDefinition,
        error: &Error,
    ) -> ServingState {
        let known = self.pools.known(definition);
        ServingState::refused(definition, known.map(|(id, _)| id), reason(error))
    }

    /// How long to wait for the lock of a pool. After the start the driver does not wait, because
    /// it tries again in the background.
    fn max_lock_wait(&self) -> Duration {
        match self.pools.states().len() < self.pools.settings.pools.len() {
            true => LOCK_TIMEOUT,
            false => Duration::ZERO,
        }
    }

    /// Opens one pool, or returns why it is not served. `was` is the file system on which this
    /// process has served the pool before. A pool whose place is not open after `max_wait` is
    /// refused until then.
    pub(in crate::operation) fn open_pool(
        &self,
        definition: &PoolDefinition,
        was: Option<u64>,
        max_wait: Duration,
    ) -> Result<ServingState> {
        let refused = |id, why| Ok(ServingState::refused(definition, id, why));
        let host = self.host.as_ref();
        let known = self.pools.known(definition);
        let max_lock_wait = self.max_lock_wait();
        let create = CreatePolicy {
            home: self.pools.home(),
            init: definition.init,
            is_known: known.is_some(),
        };
        let opening = place::OpenOptions {
            create,
            max_wait: max_lock_wait,
            machine: self.machine_folders(),
        };
        let opened = disk::open(&self.host, &self.questions, definition, opening, max_wait);
        let place = match opened.ok_or_else(|| disk::still_opening(definition))? {
            Ok(place) => place,
            Err(error) => return self.refuse_thin(definition, error),
        };
        let path = place.folder();
        let (outer, found, place) = (place.outer, place.found, place.open);
        match found {
            make::Probe::Pool(pool) if pool.home != self.pools.home() => {
                return refused(
                    Some(pool.id),
                    format!(
                        "it belongs to home {}, but the home of this machine is {}; if its disk was moved here permanently, run `slackwater pool adopt {}`",
                        pool.home,
                        self.pools.home(),
                        definition.name
                    ),
                )
                .map(|state: ServingState| state.with(Presence::OtherHome));
            }
            make::Probe::Pool(pool) => {
                if let Some((id, why)) = self.find_duplicate(definition, pool.id) {
                    if let Some(place) = place {
                        // The kernel mounts only one of two xfs images with the same UUID.
                        place.close(host)?;
                    }
                    return refused(id, why);
                }
            }
            found if known.is_some() => {
                let (id, last) = known.unzip();
                let state = ServingState::refused(definition, id, absent(&path, &found, last));
                return Ok(state.with(presence_of(&found)));
            }
            _ if definition.init || definition.place.is_memory() => {
                if definition.place.is_memory() {
                    make::make_folders(host, &path)?;
                }
                make::check_extent(host, definition, &path)?;
                let (name, kind) = (&definition.name, pool_kind(definition));
                let id = place.as_ref().and_then(OpenPlace::id);
                let id = id.unwrap_or_else(|| PoolId(host.random_uuid()));
                make::make_pool_of_kind(host, name, &path, kind, (id, self.pools.home()))?;
            }
            found => return Err(no_pool(definition, &path, &found)),
        }
        make::check_extent(host, definition, &path)?;
        self.serve_folder(definition, (&outer, &path), max_lock_wait, (place, was))
    }

    /// A pool whose place could not be opened. The header of a pool of LVM says whose it is, also if the
    /// pool cannot be opened for that reason. It is missing if no thin pool is there, or an unused one.
    fn refuse_thin(&self, definition: &PoolDefinition, error: Error) -> Result<ServingState> {
        let PoolPlace::Lvm { pool } = &definition.place else {
            return Err(error);
        };
        let known = self.pools.known(definition).map(|(id, _)| id);
        match lvm::identify(self.host.as_ref(), pool) {
            Ok(Some(header)) if header.home != self.pools.home() => {
                let why = reason(&error);
                let state = ServingState::refused(definition, Some(header.id), why);
                Ok(state.with(Presence::OtherHome))
            }
            Ok(None) if known.is_some() => {
                let state = ServingState::refused(definition, known, reason(&error));
                Ok(state.with(Presence::Absent))
            }
            Ok(_) | Err(_) => Err(error),
        }
    }

    /// Serves the pool in a directory in which a pool was just found or created.
    fn serve_folder(
        &self,
        definition: &PoolDefinition,
        (outer, path): (&Path, &Path),
        max_wait: Duration,
        (place, was): (Option<OpenPlace>, Option<u64>),
    ) -> Result<ServingState> {
        let refused = |id, why| Ok(ServingState::refused(definition, id, why));
        match PoolBackend::open(self.host.clone(), path, pool_kind(definition), max_wait)? {
            OpenResult::Pool(backend) => match self.find_stale_devices(&backend, was)? {
                Some(why) => refused(Some(backend.record.id), why),
                None => Ok(ServingState::Serving(Arc::new(self.recover(
                    definition,
                    *backend,
                    (outer, path),
                    place,
                )?))),
            },
            OpenResult::Locked => Err(Error::Locked {
                place: path.display().to_string(),
            }),
            OpenResult::Blank => refused(None, format!("{} contains no pool", path.display())),
        }
    }

    /// Why a pool with this ID must not be served from this place: it is, or may be, a copy of a
    /// pool at another place. The pool that is served already stays; otherwise the place in the
    /// node record decides; if it decides nothing, none of them is served. The ID is returned as
    /// well, unless another place represents it.
    fn find_duplicate(
        &self,
        definition: &PoolDefinition,
        id: PoolId,
    ) -> Option<(Option<PoolId>, String)> {
        let why = |place: &PoolPlace| {
            format!(
                "the same pool ({id}) also exists at {place}; one of them is a copy: remove the one that must not be used from the configuration"
            )
        };
        if let Some(pool) = self
            .pools
            .serving()
            .into_iter()
            .find(|pool| pool.id() == id)
        {
            return Some((None, why(&pool.definition.place)));
        }
        let named = self
            .pools
            .node_record()
            .pools
            .get(&id)
            .map(|known| known.place.clone());
        if named.as_deref() == Some(&definition.place.to_string()) {
            return None;
        }
        let others = self.pools.settings.pools.iter();
        let machine = self.machine_folders();
        let mut others = others.filter(|other| other.name != definition.name);
        others.find_map(|other| {
            let is_named = named.as_deref() == Some(&other.place.to_string());
            let found = match disk::answers(&self.host, &self.questions, other) {
                true => place::identify(self.host.as_ref(), other, &machine),
                false => Err(disk::no_answer(other)),
            };
            match found {
                Ok(Some((found, _))) if found == id => {
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

    /// Cleans up what a crash left on a pool, before its first call.
    fn recover(
        &self,
        definition: &PoolDefinition,
        backend: PoolBackend,
        folders: (&Path, &Path),
        open: Option<OpenPlace>,
    ) -> Result<Pool> {
        let host = self.host.as_ref();
        let pool_fs = PoolFs::of(host, definition, folders, &self.machine_folders())?;
        let doing = || format!("examine pool {}", definition.name);
        let place = self.host.stat(&backend.folder.path).context(doing)?;
        let mounts = self.usage.mounts()?;
        let leftovers = backend.recover(&|device| !usage::of_device(&mounts, device).is_empty())?;
        let mut pool = Pool {
            definition: definition.clone(),
            backend,
            place: open,
            pool_fs,
            leftovers,
            device: place.map_or(0, |place| place.id.device),
        };
        let (ended, failed) = self.volumes.delete_leftover_inline(&pool);
        pool.leftovers.ephemeral = ended;
        if let Some(error) = failed {
            tracing::error!(pool = %definition.name, error = %chain(&error), "failed to delete an unused inline volume");
        }
        tracing::info!(pool = %definition.name, id = %pool.id(), volumes = pool.backend.volumes.count(), leftovers = pool.leftovers.total(), "serving");
        Ok(pool)
    }

    /// Folders of the file systems on which this machine lives.
    pub(in crate::operation) fn machine_folders(&self) -> Vec<PathBuf> {
        pool_fs::machine_folders(
            &self.pools.settings.node_record,
            &self.pools.settings.allowed_paths,
        )
    }

    /// Why a pool whose disk was mounted again cannot be served yet: devices of its volumes still
    /// use the previous mount, and the image would get a second device. Devices that nothing shows
    /// are detached.
    pub(in crate::operation) fn find_stale_devices(
        &self,
        backend: &PoolBackend,
        was: Option<u64>,
    ) -> Result<Option<String>> {
        let doing = || format!("examine {}", backend.folder.path.display());
        let now = self.host.stat(&backend.folder.path).context(doing)?;
        let former = was.filter(|was| now.is_none_or(|now| now.id.device != *was));
        let names = folders(backend);
        let is_named = |name: &str| names.contains(name);
        let there = self.usage.detach_dead_devices(&is_named, former)?;
        let there: Vec<_> = there
            .iter()
            .map(|device| device.path.display().to_string())
            .collect();
        Ok((!there.is_empty()).then(|| {
            format!(
                "its disk was mounted again, but {} of its volumes still use the previous mount; delete the pods that use them",
                there.join(", ")
            )
        }))
    }

    /// Opens a pool whose disk answers. The others are tried again in the background.
    pub(in crate::operation) fn open_unless(
        &self,
        hanging: &BTreeSet<String>,
        definition: &PoolDefinition,
        max_wait: Duration,
    ) -> Result<ServingState> {
        match hanging.contains(&definition.name) {
            true => Err(disk::no_answer(definition)),
            false => self.open_pool(definition, None, max_wait),
        }
    }

    /// Unmounts the images that no volume uses and the records of pools of LVM, at the end of the
    /// process, after all operations. The next start finds the ones that stay mounted.
    pub fn leave(&self) {
        if self.running() > 0 {
            return;
        }
        for state in self.pools.take_all() {
            let ServingState::Serving(pool) = state else {
                continue;
            };
            let Some(Pool {
                backend,
                place: Some(place),
                definition,
                ..
            }) = self.take_sole_reference(pool)
            else {
                continue;
            };
            // The backend has the directory open.
            drop(backend);
            let name = &definition.name;
            match place.close(self.host.as_ref()) {
                Ok(true) => tracing::info!(pool = %name, "unmounted the folder of the pool"),
                Ok(false) => {
                    tracing::info!(pool = %name, "keeping the folder of the pool mounted because it is in use");
                }
                Err(error) => {
                    tracing::warn!(pool = %name, error = %chain(&error), "failed to unmount the folder of the pool");
                }
            }
        }
    }

    /// The only reference to a pool, after the probes of it have finished, which takes a moment.
    fn take_sole_reference(&self, mut pool: Arc<Pool>) -> Option<Pool> {
        const MAX_ATTEMPTS: u32 = 200;
        const WAIT: Duration = Duration::from_millis(10);
        for _ in 0..MAX_ATTEMPTS {
            pool = match Arc::try_unwrap(pool) {
                Ok(pool) => return Some(pool),
                Err(shared) => shared,
            };
            self.host.pause(WAIT);
        }
        None
    }
}

/// Why a pool is not served. Each error that says so names the pool itself.
fn reason(error: &Error) -> String {
    match error {
        Error::Unreachable { reason, .. } => reason.clone(),
        _ => chain(error),
    }
}

/// Why no pool is created at a place at which this machine had a pool.
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

/// The state of a pool whose place contains `found` instead.
fn presence_of(found: &make::Probe) -> Presence {
    match found {
        // It is not known which pool is on an image before the image is mounted.
        make::Probe::Image(_) => Presence::Unknown,
        _ => Presence::Absent,
    }
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
