//! The state of each configured pool, for metrics, reports and people.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use super::disk::STATUS_TIMEOUT;
use crate::backend::place::folder;
use crate::backend::place::pool_fs::PoolFs;
use crate::backend::shown::find_shown;
use crate::backend::{Leftovers, PoolSpace};
use crate::model::{MountRule, PoolDefinition, PoolId};
use crate::operation::pools::pool::Former;
use crate::operation::{Driver, ImageUsage, Pool, Presence, ServingState, usage};

/// A configured pool as it is now, for metrics, reports and people.
#[derive(Clone, Debug)]
pub struct PoolStatus {
    /// Name in the configuration.
    pub name: String,
    /// "file:/path".
    pub place: String,
    /// Its ID, if it is known.
    pub id: Option<PoolId>,
    /// Why it is not served; `None` if it is.
    pub refusal: Option<String>,
    /// What was found at its place, if it is not served.
    pub presence: Presence,
    /// Space, if the pool is served and its space could be read.
    pub space: Option<PoolSpace>,
    /// Bytes that may still be provisioned, if that is known.
    pub provisionable: Option<u64>,
    /// The blocks of its images, if it is served and they were counted.
    pub images: Option<ImageUsage>,
    pub volumes: u64,
    pub snapshots: u64,
    /// Number of hidden bases.
    pub bases: u64,
    /// Number of records of volumes and snapshots that cannot be read.
    pub damaged: u64,
    /// The file system below it, if it is served.
    pub pool_fs: Option<PoolFs>,
    /// Whether its images can share blocks.
    pub shares_blocks: bool,
    /// Whether its definition allows any folder.
    pub any_mount: bool,
    /// Published volumes whose devices were changed by their users.
    pub changed: Vec<crate::operation::ChangedDevice>,
    /// What was cleaned up when the pool was opened.
    pub leftovers: Leftovers,
    /// UIDs of pods that prevent its disk from being released, if the pool is not served.
    pub pods: Vec<String>,
}

impl PoolStatus {
    /// The status of a pool of which only the definition is known; `why` says why it is not served.
    fn unknown(definition: &PoolDefinition, id: Option<PoolId>, why: String) -> PoolStatus {
        PoolStatus {
            name: definition.name.clone(),
            place: definition.place.to_string(),
            id,
            refusal: Some(why),
            presence: Presence::Unknown,
            space: None,
            provisionable: None,
            images: None,
            volumes: 0,
            snapshots: 0,
            bases: 0,
            damaged: 0,
            changed: Vec::new(),
            leftovers: Leftovers::default(),
            pool_fs: None,
            shares_blocks: false,
            any_mount: definition.mount == Some(MountRule::Any),
            pods: Vec::new(),
        }
    }
}

impl Driver {
    /// The state of each configured pool. A disk that hangs delays the result by [`STATUS_TIMEOUT`]
    /// at most.
    pub fn pool_status(&self) -> Vec<PoolStatus> {
        let status = |state: ServingState| match state {
            ServingState::Serving(pool) => self.status_of_served(pool),
            ServingState::Refused {
                definition,
                id,
                why,
                presence,
                was,
            } => PoolStatus {
                presence,
                pods: self.pods_on(&folder(&definition), was.as_deref()),
                ..PoolStatus::unknown(&definition, id, why)
            },
        };
        self.pools.states().into_iter().map(status).collect()
    }

    fn status_of_served(&self, pool: Arc<Pool>) -> PoolStatus {
        let mut changed = self.usage.changed_devices();
        changed.retain(|changed| changed.pool == pool.id());
        let (id, why) = (pool.id(), "its disk does not answer".to_string());
        let unknown = PoolStatus {
            changed,
            leftovers: pool.leftovers,
            pool_fs: Some(pool.pool_fs.clone()),
            shares_blocks: pool.backend.facts.shares_blocks,
            ..PoolStatus::unknown(&pool.definition, Some(id), why)
        };
        let (known, about) = (unknown.clone(), unknown.name.clone());
        let numbers = Arc::clone(&self.numbers);
        let look = move || {
            let space = pool.backend.space().ok();
            PoolStatus {
                refusal: None,
                // This comes first: a record that can be read again counts as a volume or snapshot.
                damaged: pool.damaged().len() as u64,
                provisionable: space.as_ref().map(|space| pool.provisionable(space)),
                space,
                images: numbers.image_usage(id),
                volumes: pool.backend.volumes.count(),
                snapshots: pool.backend.snapshots.count(),
                bases: pool.backend.snapshots.bases().len() as u64,
                ..known
            }
        };
        self.questions
            .ask(("status", about), STATUS_TIMEOUT, look)
            .unwrap_or(unknown)
    }

    /// UIDs of pods whose volumes prevent the disk of a pool that is not served from being
    /// released, from the target paths of the kubelet. The number is limited.
    pub(in crate::operation) fn pods_on(&self, place: &Path, was: Option<&Former>) -> Vec<String> {
        const MAX_LISTED: usize = 16;
        let mut pods = BTreeSet::new();
        for mount in self.usage.mounts().unwrap_or_default() {
            let Some(shown) = find_shown(self.host.as_ref(), &mount) else {
                continue;
            };
            let is_below = shown.image.is_some_and(|image| image.starts_with(place));
            if is_below || was.is_some_and(|was| was.volumes.contains(&shown.name)) {
                pods.extend(usage::pods_of(&mount).map(str::to_string));
            }
        }
        pods.into_iter().take(MAX_LISTED).collect()
    }
}
