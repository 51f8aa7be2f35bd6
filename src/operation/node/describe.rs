//! What the router asks beside CSI: what this node has, and what a name has become on it.

use uuid::Uuid;

use crate::error::{Error, Result, chain};
use crate::model::id::NameKind;
use crate::model::{HomeId, PoolId, VolumeId};
use crate::operation::lock::Key;
use crate::operation::{Driver, NotGrown, PoolStatus, ServingState};

/// What this node has.
#[derive(Clone, Debug)]
pub struct Description {
    /// The topology value of its volumes, or why there is none.
    pub home: std::result::Result<HomeId, String>,
    /// Each configured pool.
    pub pools: Vec<PoolStatus>,
    /// Pools that it had: their ids lead nowhere, for good.
    pub forgotten: Vec<Forgotten>,
    /// What is missing on this host, with the fix.
    pub missing: Vec<String>,
    /// Groups with members that nobody has committed or undone, and that nothing running is about.
    pub unsettled_groups: Vec<Uuid>,
    /// The same that something running is about.
    pub busy_groups: Vec<Uuid>,
    /// Whether a freeze could begin.
    pub guard: bool,
    /// Volumes in use whose file system is smaller than it should be.
    pub not_grown: Vec<NotGrown>,
}

/// A pool that `pool forget` ended.
#[derive(Clone, Debug)]
pub struct Forgotten {
    /// Its id.
    pub id: PoolId,
    /// Its name in the configuration.
    pub name: String,
    /// Where it was.
    pub place: String,
}

/// What a name is looked up as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Named {
    /// CreateVolume's, with the pool that its class names.
    Volume(Option<String>),
    /// CreateSnapshot's.
    Snapshot,
}

impl Driver {
    /// Everything a router wants to know of this node. Blocks; changes nothing.
    pub fn describe(&self) -> Description {
        let record = self.node_record().clone();
        let forgotten = record.forgotten.into_iter().map(|(id, known)| Forgotten {
            id,
            name: known.name,
            place: known.place,
        });
        let in_part = self.groups_in_part().into_iter();
        let (busy_groups, unsettled_groups) =
            in_part.partition(|group| self.locks.is_held(&Key::Group(*group)));
        Description {
            home: self.settled_home().map_err(|error| chain(&error)),
            pools: self.pool_status(),
            forgotten: forgotten.collect(),
            missing: self.missing(),
            unsettled_groups,
            busy_groups,
            guard: self.guard_alive(),
            not_grown: self.not_grown(),
        }
    }

    /// What a name has become on this node, half-made ones included: whoever goes on with it must
    /// come here. While an operation on the name runs it's "pending". Where nothing is found, a
    /// pool that isn't served and could have it is an error.
    pub fn find_named(&self, named: &Named, name: &str) -> Result<Option<VolumeId>> {
        let (key, kind) = match named {
            Named::Volume(_) => (Key::Name(name.to_string()), NameKind::Volume),
            Named::Snapshot => (Key::SnapshotName(name.to_string()), NameKind::Snapshot),
        };
        let _name = self.locks.acquire(key)?;
        let states = self.states();
        let only = states.len() == 1;
        let mut unseen = None;
        for state in states {
            match state {
                ServingState::Serving(pool) => {
                    let id = VolumeId::of_name(pool.id(), kind, name);
                    let is_there = match named {
                        Named::Volume(_) => pool.backend.volume(id.uuid)?.is_some(),
                        Named::Snapshot => pool.backend.snapshot(id.uuid)?.is_some(),
                    };
                    if is_there {
                        return Ok(Some(id));
                    }
                }
                ServingState::Refused {
                    definition, why, ..
                } => {
                    let could_have = match named {
                        Named::Volume(Some(pool)) => definition.name == *pool,
                        Named::Volume(None) => only || definition.name == "default",
                        Named::Snapshot => true,
                    };
                    if could_have {
                        unseen = Some(Error::Unreachable {
                            what: format!("pool {}", definition.name),
                            reason: why,
                        });
                    }
                }
            }
        }
        unseen.map_or(Ok(None), Err)
    }
}
