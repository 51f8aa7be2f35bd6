//! The pools of this node: which are served, and why the others aren't.

use std::sync::Arc;
use std::time::Duration;

use uuid::Uuid;

use super::ground::PoolGround;
use super::image::OpenImage;
use super::start::folder;
use super::watch::Former;
use crate::backend::{Backend, Leftovers, PoolSpace};
use crate::error::{Error, Result};
use crate::model::{MountRule, PoolDefinition, PoolId, SnapshotRoom, VolumeId};
use crate::operation::Driver;
use crate::operation::detach::look_at;
use crate::record::VolumeRecord;

/// How long a look at the room of a pool may take: it asks each image.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);

/// A pool that is served.
pub struct Pool {
    /// As configured.
    pub definition: PoolDefinition,
    /// Its storage.
    pub backend: Box<dyn Backend>,
    /// The image that it lies on, if its definition says so.
    pub image: Option<OpenImage>,
    /// What it lies on.
    pub ground: PoolGround,
    /// What its start found and ended.
    pub leftovers: Leftovers,
    /// The file system that its folder is on (st_dev).
    pub device: u64,
}

impl Pool {
    /// Its id.
    pub fn id(&self) -> PoolId {
        self.backend.pool().id
    }

    /// Volumes and snapshots whose records can't be read.
    pub(in crate::operation) fn damaged(&self) -> Vec<(Uuid, String)> {
        let mut damaged = self.backend.damaged();
        damaged.extend(self.backend.damaged_snapshots());
        damaged
    }

    /// Whether snapshots may take the room that volumes were promised: as its definition says, or
    /// else as it was made.
    pub fn snapshots(&self) -> SnapshotRoom {
        let said = self.definition.snapshots;
        said.or(self.backend.pool().snapshots)
            .unwrap_or(SnapshotRoom::BestEffort)
    }

    /// Bytes that may still be promised, at this overcommit.
    pub fn promisable(&self, space: &PoolSpace) -> u64 {
        let kept = super::capacity::kept_for_new(self, space);
        super::capacity::promisable(space, self.definition.overcommit, kept)
    }
}

/// A configured pool.
#[derive(Clone)]
pub enum ServingState {
    /// Served.
    Serving(Arc<Pool>),
    /// Not served now; looked at again.
    Refused {
        /// As configured.
        definition: PoolDefinition,
        /// Its id, if it's known.
        id: Option<PoolId>,
        /// Why, and what would change it.
        why: String,
        /// What it was, if this process has served it.
        was: Option<Arc<Former>>,
    },
}

impl ServingState {
    /// As configured.
    pub fn definition(&self) -> &PoolDefinition {
        match self {
            ServingState::Serving(pool) => &pool.definition,
            ServingState::Refused { definition, .. } => definition,
        }
    }
}

/// A configured pool as it is now, for metrics, reports and people.
#[derive(Clone, Debug)]
pub struct PoolStatus {
    /// Name in the configuration.
    pub name: String,
    /// "file:/path".
    pub place: String,
    /// Its id, if it's known.
    pub id: Option<PoolId>,
    /// Why it isn't served; `None` if it is.
    pub refusal: Option<String>,
    /// Room, if it's served and could be measured.
    pub space: Option<PoolSpace>,
    /// Bytes that may still be promised, if that is known.
    pub promisable: Option<u64>,
    /// Number of volumes.
    pub volumes: u64,
    /// Number of snapshots.
    pub snapshots: u64,
    /// Number of records of volumes and snapshots that can't be read.
    pub damaged: u64,
    /// What it lies on, if it's served.
    pub ground: Option<PoolGround>,
    /// Whether its images can share blocks.
    pub shares_blocks: bool,
    /// Its definition says that it may be in any folder.
    pub any_mount: bool,
    /// Published volumes whose devices were changed by who uses them.
    pub changed: Vec<crate::operation::ChangedDevice>,
    /// What its start found and ended.
    pub leftovers: Leftovers,
    /// UIDs of pods that keep its disk, if it isn't served.
    pub pods: Vec<String>,
}

/// Where an id leads.
pub(in crate::operation) enum PoolLookup {
    /// To a pool that is served.
    Pool(Arc<Pool>, VolumeId),
    /// Nowhere: it isn't an id of ours, or its pool was forgotten.
    Unknown,
}

impl Driver {
    pub(in crate::operation) fn states(&self) -> Vec<ServingState> {
        self.pools
            .read()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .clone()
    }

    pub(in crate::operation) fn serving(&self) -> Vec<Arc<Pool>> {
        let states = self.states();
        states
            .into_iter()
            .filter_map(|state| match state {
                ServingState::Serving(pool) => Some(pool),
                ServingState::Refused { .. } => None,
            })
            .collect()
    }

    /// Who owns an id. A pool that isn't served is never "nobody": its disk may come back.
    pub(in crate::operation) fn owner(&self, volume_id: &str) -> Result<PoolLookup> {
        let Ok(id) = volume_id.parse::<VolumeId>() else {
            return Ok(PoolLookup::Unknown);
        };
        Ok(match self.pool(id.pool)? {
            Some(pool) => PoolLookup::Pool(pool, id),
            None => PoolLookup::Unknown,
        })
    }

    /// A pool that is served; `None` only if it was forgotten.
    pub(in crate::operation) fn pool(&self, wanted: PoolId) -> Result<Option<Arc<Pool>>> {
        // Before those that are refused: one of them may be a copy.
        let mut serving = self.serving().into_iter();
        if let Some(pool) = serving.find(|pool| pool.id() == wanted) {
            look_at(&pool)?;
            return Ok(Some(pool));
        }
        for state in self.states() {
            match state {
                ServingState::Refused {
                    id: Some(pool),
                    why,
                    definition,
                    ..
                } if pool == wanted => {
                    return Err(Error::Unreachable {
                        what: format!("pool {} ({pool})", definition.name),
                        reason: why,
                    });
                }
                ServingState::Serving(_) | ServingState::Refused { .. } => {}
            }
        }
        if self.node_record().forgotten.contains_key(&wanted) {
            return Ok(None);
        }
        Err(Error::Unreachable {
            what: format!("pool {wanted}"),
            reason: "no pool of this node has this ID; mount its disk and configure it, or forget it with `slackwater pool forget`".into(),
        })
    }

    /// The pool and record of a volume that must exist. A half-made one doesn't.
    pub(in crate::operation) fn find(
        &self,
        volume_id: &str,
    ) -> Result<(Arc<Pool>, VolumeId, VolumeRecord)> {
        let PoolLookup::Pool(pool, id) = self.owner(volume_id)? else {
            return Err(Error::no_volume(volume_id));
        };
        match pool.backend.volume(id.uuid)? {
            Some(record) if record.state == crate::record::VolumeState::Ready => {
                Ok((pool, id, record))
            }
            Some(_) | None => Err(Error::no_volume(volume_id)),
        }
    }

    /// The pool that a class means: the named one, the one named `default`, or the only one.
    pub(in crate::operation) fn choose_pool(&self, name: Option<&str>) -> Result<Arc<Pool>> {
        let states = self.states();
        let wanted = name.unwrap_or("default");
        let named = states
            .iter()
            .find(|state| state.definition().name == wanted);
        let only = if name.is_none() && states.len() == 1 {
            states.first()
        } else {
            None
        };
        match named.or(only) {
            Some(ServingState::Serving(pool)) => {
                look_at(pool)?;
                Ok(pool.clone())
            }
            Some(ServingState::Refused {
                definition, why, ..
            }) => Err(Error::Unreachable {
                what: format!("pool {}", definition.name),
                reason: why.clone(),
            }),
            None => {
                let names: Vec<_> = states
                    .iter()
                    .map(|state| state.definition().name.as_str())
                    .collect();
                let problem = match name {
                    Some(name) => format!(
                        "{name:?} is not a pool of this node; its pools are {}",
                        names.join(", ")
                    ),
                    None => format!(
                        "is missing, and no pool is named \"default\"; give one of {}",
                        names.join(", ")
                    ),
                };
                Err(Error::invalid("parameters.pool", problem))
            }
        }
    }

    /// Every configured pool as it is now. One whose disk hangs holds it up for a moment only.
    pub fn pool_status(&self) -> Vec<PoolStatus> {
        let status = |state: ServingState| match state {
            ServingState::Serving(pool) => self.status_of_served(pool),
            ServingState::Refused {
                definition,
                id,
                why,
                was,
            } => PoolStatus {
                pods: self.pods_on(&folder(&definition), was.as_deref()),
                name: definition.name,
                place: definition.place.to_string(),
                id,
                refusal: Some(why),
                ground: None,
                shares_blocks: false,
                any_mount: definition.mount == Some(MountRule::Any),
                space: None,
                promisable: None,
                volumes: 0,
                snapshots: 0,
                damaged: 0,
                changed: Vec::new(),
                leftovers: Leftovers::default(),
            },
        };
        self.states().into_iter().map(status).collect()
    }

    fn status_of_served(&self, pool: Arc<Pool>) -> PoolStatus {
        let mut changed = self.changed_devices();
        changed.retain(|changed| changed.pool == pool.id());
        let definition = &pool.definition;
        let (name, place) = (definition.name.clone(), definition.place.to_string());
        let id = pool.id();
        let unknown = PoolStatus {
            name,
            place,
            id: Some(id),
            refusal: Some("its disk does not answer".into()),
            space: None,
            promisable: None,
            volumes: 0,
            snapshots: 0,
            damaged: 0,
            changed,
            leftovers: pool.leftovers,
            ground: Some(pool.ground.clone()),
            shares_blocks: pool.backend.shares_blocks(),
            any_mount: definition.mount == Some(MountRule::Any),
            pods: Vec::new(),
        };
        let (known, about) = (unknown.clone(), unknown.name.clone());
        let look = move || {
            let space = pool.backend.space().ok();
            PoolStatus {
                refusal: None,
                // First: what can be read again counts as a volume or snapshot.
                damaged: pool.damaged().len() as u64,
                promisable: space.as_ref().map(|space| pool.promisable(space)),
                space,
                volumes: pool.backend.count(),
                snapshots: pool.backend.count_snapshots(),
                ..known
            }
        };
        self.questions
            .ask(("status", about), STATUS_TIMEOUT, look)
            .unwrap_or(unknown)
    }
}
