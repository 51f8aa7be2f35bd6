//! Answers the router's queries that are not part of CSI: the state of this node, and which ID a
//! name has on it.

use uuid::Uuid;

use crate::error::{Error, Result, chain};
use crate::model::id::NameKind;
use crate::model::{HomeId, PoolId, VolumeId};
use crate::operation::lock::Key;
use crate::operation::pools::lookup::check_fence;
use crate::operation::volume::reverting::fences_of;
use crate::operation::{Driver, LongFreeze, NotGrown, PoolStatus, RevertFence, ServingState};

/// The state of this node.
#[derive(Clone, Debug)]
pub struct Description {
    /// The topology value of its volumes, or the reason why it has none.
    pub home: std::result::Result<HomeId, String>,
    /// Each configured pool.
    pub pools: Vec<PoolStatus>,
    /// Pools that were removed with `slackwater pool forget`. Their IDs are never valid again.
    pub forgotten: Vec<Forgotten>,
    /// Features that are missing on this host, with the remedy.
    pub missing: Vec<String>,
    /// Groups with members that are neither committed nor aborted, and for which no operation is
    /// running.
    pub groups_in_doubt: Vec<Uuid>,
    /// The same kind of groups, with an operation in progress.
    pub busy_groups: Vec<Uuid>,
    /// Whether the freeze guard answers or can be started.
    pub guard: bool,
    /// Volumes in use whose file system is smaller than it should be.
    pub not_grown: Vec<NotGrown>,
    /// Volumes that a move has fenced, with its UID.
    pub fences: Vec<(VolumeId, Uuid)>,
    /// Volumes that a revert has fenced.
    pub revert_fences: Vec<RevertFence>,
    /// Volumes whose file systems have been frozen for longer than a cut takes.
    pub long_freezes: Vec<LongFreeze>,
}

/// A pool that was removed with `slackwater pool forget`.
#[derive(Clone, Debug)]
pub struct Forgotten {
    pub id: PoolId,
    /// Its name in the configuration.
    pub name: String,
    pub place: String,
}

/// The kind of object that a name is looked up for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NameLookup {
    /// The name in a CreateVolume request, with the pool that its storage class names.
    Volume(Option<String>),
    /// The name in a CreateSnapshot request.
    Snapshot,
}

impl Driver {
    /// The state of this node for a router. It blocks, and changes nothing.
    pub fn describe(&self) -> Description {
        let record = self.pools.node_record().clone();
        let forgotten = record.forgotten.into_iter().map(|(id, known)| Forgotten {
            id,
            name: known.name,
            place: known.place,
        });
        let in_part = self.snapshots.uncommitted_groups().into_iter();
        let (busy_groups, groups_in_doubt) =
            in_part.partition(|group| self.pools.locks.is_held(&Key::Group(*group)));
        let mut missing = self.pools.missing();
        let long_freezes = self.snapshots.long_freezes().unwrap_or_else(|error| {
            missing.push(format!("what is frozen is not known: {}", chain(&error)));
            Vec::new()
        });
        Description {
            home: self.pools.get_home().map_err(|error| chain(&error)),
            pools: self.pool_status(),
            forgotten: forgotten.collect(),
            missing,
            groups_in_doubt,
            busy_groups,
            guard: self.snapshots.guard_alive(),
            not_grown: self.usage.not_grown(),
            fences: self.fences(),
            revert_fences: self.revert_fences(),
            long_freezes,
        }
    }

    fn revert_fences(&self) -> Vec<RevertFence> {
        let pools = self.pools.serving();
        pools.iter().flat_map(fences_of).collect()
    }

    fn fences(&self) -> Vec<(VolumeId, Uuid)> {
        let pools = self.pools.serving().into_iter();
        let fences = pools.flat_map(|pool| {
            let of = |uuid| VolumeId {
                pool: pool.id(),
                uuid,
            };
            let look =
                |record: &crate::record::VolumeRecord| Some((of(record.uuid), record.fenced?));
            pool.backend.volumes.filter_map_ready(look)
        });
        fences.collect()
    }

    /// The ID that a name has on this node, also if its object is incomplete: only this node can
    /// continue such a creation. While an operation on the name is running, the error is
    /// [`Error::Pending`]. If nothing is found while a pool that could have the name is not served,
    /// that is an error.
    pub fn find_named(&self, named: &NameLookup, name: &str) -> Result<Option<VolumeId>> {
        let (key, kind) = match named {
            NameLookup::Volume(_) => (Key::Name(name.to_string()), NameKind::Volume),
            NameLookup::Snapshot => (Key::SnapshotName(name.to_string()), NameKind::Snapshot),
        };
        let _name = self.pools.locks.acquire(key)?;
        let states = self.pools.states();
        let only = states.len() == 1;
        let mut unseen = None;
        for state in states {
            match state {
                ServingState::Serving(pool) => {
                    let id = VolumeId::of_name(pool.id(), kind, name);
                    let is_there = match named {
                        NameLookup::Volume(_) => match pool.backend.volumes.get(id.uuid)? {
                            Some(record) => check_fence(name, &record, None).map(|()| true)?,
                            None => false,
                        },
                        NameLookup::Snapshot => pool.backend.snapshots.get(id.uuid)?.is_some(),
                    };
                    if is_there {
                        return Ok(Some(id));
                    }
                }
                ServingState::Refused {
                    definition, why, ..
                } => {
                    let could_have = match named {
                        NameLookup::Volume(Some(pool)) => definition.name == *pool,
                        NameLookup::Volume(None) => only || definition.name == "default",
                        NameLookup::Snapshot => true,
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
