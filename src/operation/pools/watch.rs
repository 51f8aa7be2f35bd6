//! Whether a pool is served: decided when it's opened, and here from then on.
//!
//! The disk beneath a pool can die or hang at any time, so every look writes to each pool that is
//! served. One whose disk fails isn't served any more: new operations are refused, and its folder
//! and its lock are let go of when the last operation on it has ended. It is served again when its
//! disk takes writes again, or is there anew.

use std::collections::{BTreeSet, HashSet};
use std::path::Path;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use uuid::Uuid;

use super::image::MOUNT_POINT;
use super::make::{self, Probe};
use super::start::{folder, log_refused};
use crate::backend::Backend;
use crate::backend::file::{FileBackend, IMAGE, write_lock};
use crate::error::{Error, ErrorContext, Result, chain};
use crate::host::Host;
use crate::host::question::Questions;
use crate::model::PoolDefinition;
use crate::operation::{Driver, Pool, ServingState, usage};

/// A disk answers within milliseconds, or within seconds if it is busy.
const DISK_TIMEOUT: Duration = Duration::from_secs(10);

/// Questions about a pool by its name, of which a disk may never answer one.
pub(in crate::operation) type PoolQuestions = Questions<(&'static str, String)>;

/// A pool that this process has served until its disk failed.
#[derive(Debug)]
pub struct Former {
    /// It lives for as long as an operation on it has not ended.
    pool: Weak<Pool>,
    /// The file system that it was on (st_dev).
    device: u64,
    /// The folders of its volumes.
    volumes: HashSet<String>,
}

impl Driver {
    /// Looks at the node record, which `pool forget` and `pool adopt` may have changed, at
    /// published devices, and at all pools, one after the other.
    pub fn refresh_pools(&self) {
        self.read_node_record();
        for definition in &self.settings.pools {
            self.look_at_pool(&definition.name);
        }
        self.look_at_node();
    }

    /// The same without the pools, whose disks may hang.
    pub fn look_at_node(&self) {
        self.read_node_record();
        self.watch_published();
        self.note_served();
    }

    /// Looks whether a pool's disk still takes writes, or whether one that isn't served can be. It
    /// may hang with the disk; several at a time come to one decision.
    pub fn look_at_pool(&self, name: &str) {
        self.look_at_pool_within(name, DISK_TIMEOUT);
    }

    /// The same with a limit of its own for the disk's answer: for tests, in which a disk hangs
    /// for certain.
    pub fn look_at_pool_within(&self, name: &str, patience: Duration) {
        let mut states = self.states().into_iter();
        let Some(before) = states.find(|state| state.definition().name == name) else {
            return;
        };
        let now = match &before {
            ServingState::Serving(pool) => match self.try_disk(pool, patience) {
                Ok(()) => return,
                Err(why) => ServingState::Refused {
                    definition: pool.definition.clone(),
                    id: Some(pool.id()),
                    why,
                    was: Some(Arc::new(Former {
                        pool: Arc::downgrade(pool),
                        device: pool.device,
                        volumes: folders(pool.backend.as_ref()),
                    })),
                },
            },
            ServingState::Refused {
                definition, was, ..
            } => self.try_again(definition, was.as_ref(), patience),
        };
        self.decide(&before, now);
    }

    /// Whether the disk of a pool takes writes; if not, why the pool isn't served.
    fn try_disk(&self, pool: &Arc<Pool>, patience: Duration) -> std::result::Result<(), String> {
        let asked = pool.clone();
        let question = move || asked.backend.try_disk();
        let about = ("disk", pool.definition.name.clone());
        match self.questions.ask(about, patience, question) {
            Some(Ok(())) => Ok(()),
            Some(Err(error)) if error.is_lost_disk() => Err(format!(
                "its disk is dead and must be mounted again ({})",
                chain(&error)
            )),
            // A full disk, for one, is no dead one.
            Some(Err(error)) => {
                tracing::debug!(pool = %pool.definition.name, error = %chain(&error), "failed to write to the disk of a pool");
                Ok(())
            }
            None => Err(format!(
                "its disk hangs: nothing could be written to it for {} s; check whether its file system is frozen or its disk is gone",
                patience.as_secs()
            )),
        }
    }

    /// Looks at a pool that isn't served. Operations that have not ended keep it as it was, and its
    /// lock: then it is the same one that is served again, or none.
    fn try_again(
        &self,
        definition: &PoolDefinition,
        was: Option<&Arc<Former>>,
        patience: Duration,
    ) -> ServingState {
        let refused = |id, why| ServingState::Refused {
            definition: definition.clone(),
            id,
            why,
            was: was.cloned(),
        };
        if let Some(pool) = was.and_then(|was| was.pool.upgrade()) {
            return match self.try_disk(&pool, patience) {
                Ok(()) => ServingState::Serving(pool),
                Err(why) => refused(Some(pool.id()), why),
            };
        }
        let opened = self.open_pool(definition, was.map(|was| was.device));
        match opened.unwrap_or_else(|error| self.refuse(definition, &error)) {
            ServingState::Refused { id, why, .. } => refused(id, why),
            serving => serving,
        }
    }

    /// Opens a pool, unless it is one whose disk does not answer: the next look serves it.
    pub(in crate::operation) fn open_unless(
        &self,
        hanging: &BTreeSet<String>,
        definition: &PoolDefinition,
    ) -> Result<ServingState> {
        match hanging.contains(&definition.name) {
            true => Err(no_answer(definition)),
            false => self.open_pool(definition, None),
        }
    }

    /// Why a pool whose disk was mounted anew isn't served yet: devices of its volumes still stand on
    /// the file system as it was mounted before, so that there would be two on one image. Those
    /// that nothing shows are being ended.
    pub(in crate::operation) fn stays_behind(
        &self,
        backend: &FileBackend,
        was: Option<u64>,
    ) -> Result<Option<String>> {
        let doing = || format!("examine {}", backend.path().display());
        let now = self.host.stat(&backend.path()).context(doing)?;
        let former = was.filter(|was| now.is_none_or(|now| now.id.device != *was));
        let names = folders(backend);
        let is_named = |shown: &Path| {
            shown.ends_with(IMAGE) && folder_of(shown).is_some_and(|name| names.contains(name))
        };
        let there = self.detach_dead_devices(&is_named, former)?;
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

    /// UIDs of pods whose volumes keep the disk of a pool that isn't served: as kubelets name the
    /// targets of volumes. A few say enough.
    pub(in crate::operation) fn pods_on(&self, place: &Path, was: Option<&Former>) -> Vec<String> {
        const MOST: usize = 16;
        let mut pods = BTreeSet::new();
        for mount in self.mounts().unwrap_or_default() {
            let image = usage::loop_of(&mount).and_then(|number| {
                // Known to the kernel without asking the disk.
                let path = format!("/sys/block/loop{number}/loop/backing_file");
                let shown = self.host.read_file(Path::new(&path)).ok().flatten()?;
                Some(String::from_utf8_lossy(&shown).trim_end().to_string())
            });
            let is_its = |image: &Path| {
                let its = was.zip(folder_of(image));
                its.is_some_and(|(was, name)| was.volumes.contains(name))
                    || image.starts_with(place) && image.ends_with(IMAGE)
            };
            if image.is_some_and(|image| is_its(Path::new(&image))) {
                let names = mount.mount_point.iter().filter_map(|name| name.to_str());
                pods.extend(names.filter(|name| is_uid(name)).map(str::to_string));
            }
        }
        pods.into_iter().take(MOST).collect()
    }

    /// Puts a new state in the place of the one that was looked at, unless another look was quicker.
    fn decide(&self, before: &ServingState, now: ServingState) {
        let mut states = self.pools.write().unwrap_or_else(PoisonError::into_inner);
        if let ServingState::Serving(pool) = &now {
            let is_it = |state: &ServingState| matches!(state, ServingState::Serving(other) if other.id() == pool.id());
            if states.iter().any(is_it) {
                // A copy, opened at the same time: the next look says so.
                return;
            }
        }
        let name = &now.definition().name;
        let slot = states
            .iter_mut()
            .find(|slot| slot.definition().name == *name);
        let Some(slot) = slot else { return };
        let is_news = match (before, &*slot) {
            (ServingState::Serving(before), ServingState::Serving(there))
                if Arc::ptr_eq(before, there) =>
            {
                true
            }
            (ServingState::Refused { .. }, ServingState::Refused { why: there, .. }) => {
                !matches!(&now, ServingState::Refused { why, .. } if why == there)
            }
            _ => return,
        };
        let there = std::mem::replace(slot, now.clone());
        drop(states);
        if is_news {
            log_refused(&now);
        }
        if matches!(now, ServingState::Serving(_)) {
            self.note_served();
        }
        drop(there);
    }
}

/// Whether the disk of a pool that isn't open answers, with success or an error, who reads and
/// writes there as the opening of the pool does.
pub(in crate::operation) fn answers(
    host: &Arc<dyn Host>,
    questions: &PoolQuestions,
    definition: &PoolDefinition,
) -> bool {
    let about = ("closed disk", definition.name.clone());
    let (host, definition) = (host.clone(), definition.clone());
    let question = move || {
        let outer = folder(&definition);
        let inner = definition.image.map(|_| outer.join(MOUNT_POINT));
        for path in inner.into_iter().chain([outer]) {
            // What is wrong there is said by who opens it.
            let _ = match make::probe(host.as_ref(), &path) {
                Ok(Probe::Pool(_) | Probe::Image(_)) => write_lock(host.as_ref(), &path),
                Ok(Probe::Blank) if definition.init => host.backing_fs(&path).map(drop),
                Ok(Probe::Blank | Probe::Missing | Probe::Foreign(_)) | Err(_) => Ok(()),
            };
        }
    };
    questions.ask(about, DISK_TIMEOUT, question).is_some()
}

/// Names of pools whose disks don't answer. All are asked at the same time.
pub(in crate::operation) fn hanging(
    host: &Arc<dyn Host>,
    questions: &PoolQuestions,
    pools: &[PoolDefinition],
) -> BTreeSet<String> {
    std::thread::scope(|scope| {
        let ask = |pool| scope.spawn(move || answers(host, questions, pool));
        let asked: Vec<_> = pools.iter().map(|pool| (&pool.name, ask(pool))).collect();
        let hangs = asked
            .into_iter()
            .filter_map(|(name, asked)| (!asked.join().unwrap_or(false)).then(|| name.clone()));
        hangs.collect()
    })
}

/// Says why a pool whose disk does not answer isn't served.
pub(in crate::operation) fn no_answer(definition: &PoolDefinition) -> Error {
    Error::Unreachable {
        what: format!("pool {}", definition.name),
        reason: format!(
            "its disk does not answer: nothing could be written to it for {} s; check whether its file system is frozen or its disk is gone",
            DISK_TIMEOUT.as_secs()
        ),
    }
}

/// The folders of all volumes of a pool, without asking its disk.
fn folders(backend: &dyn Backend) -> HashSet<String> {
    let all = backend.known_volumes().into_iter();
    all.map(|uuid| uuid.to_string()).collect()
}

/// The name of the folder in which an image lies.
fn folder_of(image: &Path) -> Option<&str> {
    image.parent()?.file_name()?.to_str()
}

fn is_uid(name: &str) -> bool {
    const HYPHENATED: usize = 36;
    name.len() == HYPHENATED && Uuid::try_parse(name).is_ok()
}
