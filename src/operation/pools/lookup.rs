//! Which pool serves an ID, a name or a storage class, and why a pool cannot be used now.

use std::sync::Arc;

use uuid::Uuid;

use crate::backend::PoolBackend;
use crate::backend::records::{RecordStore, StoredRecord};
use crate::error::{Error, Kind, Result};
use crate::model::id::NameKind;
use crate::model::{GroupId, PoolId, SnapshotId, VolumeId};
use crate::operation::{Pool, Pools, ServingState, Snapshot, SnapshotState, Volume};
use crate::record::{Reverting, SnapshotRecord, VolumeRecord, VolumeState};

impl Pools {
    /// The pool of an ID. A pool that is not served is an error, never [`PoolLookup::Unknown`]: its
    /// disk may come back.
    pub(in crate::operation) fn owner(&self, volume_id: &str) -> Result<PoolLookup> {
        let Ok(id) = volume_id.parse::<VolumeId>() else {
            return Ok(PoolLookup::Unknown);
        };
        Ok(match self.pool(id.pool)? {
            Some(pool) => PoolLookup::Pool(pool, id),
            None => PoolLookup::Unknown,
        })
    }

    /// Finds what was created with a name in the pools that are served on this node.
    pub(in crate::operation) fn find_named<R: StoredRecord>(
        &self,
        kind: NameKind,
        name: &str,
        records: for<'a> fn(&'a PoolBackend) -> &'a RecordStore<R>,
    ) -> Result<Option<(Arc<Pool>, R)>> {
        for pool in self.serving() {
            let id = VolumeId::of_name(pool.id(), kind, name);
            let found = records(&pool.backend).get(id.uuid)?;
            if let Some(record) = found.filter(R::is_ready) {
                return Ok(Some((pool, record)));
            }
        }
        Ok(None)
    }

    /// The served pool of this ID, or `None` if an administrator has removed it from the node
    /// record with `slackwater pool forget`.
    pub(in crate::operation) fn pool(&self, wanted: PoolId) -> Result<Option<Arc<Pool>>> {
        // Served pools come first: a refused one may be a copy with the same ID.
        let mut serving = self.serving().into_iter();
        if let Some(pool) = serving.find(|pool| pool.id() == wanted) {
            pool.count_read()?;
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

    /// The pool and record of a volume, which must exist and not be fenced.
    pub(in crate::operation) fn get_volume(
        &self,
        volume_id: &str,
    ) -> Result<(Arc<Pool>, VolumeId, VolumeRecord)> {
        self.get_volume_for(volume_id, None)
    }

    /// Like [`Pools::get_volume`], for a move: its own fence does not keep it from the volume, but its end
    /// does. A request that was delayed on its way has no effect after that.
    pub(in crate::operation) fn get_volume_for(
        &self,
        volume_id: &str,
        move_uid: Option<Uuid>,
    ) -> Result<(Arc<Pool>, VolumeId, VolumeRecord)> {
        let found = self.get_volume_even_if_fenced(volume_id)?;
        check_fence(volume_id, &found.2, move_uid)?;
        if move_uid.is_some() && found.2.lifted == move_uid {
            let reason = "the fence of this move was lifted for good";
            return Err(Error::refused(format!("volume {volume_id}"), reason));
        }
        Ok(found)
    }

    /// Like [`Pools::get_volume_for`], also for a volume that a revert has fenced and not changed yet: it may
    /// be read, so that its content can be kept in a snapshot.
    pub(in crate::operation) fn get_volume_to_read(
        &self,
        volume_id: &str,
        move_uid: Option<Uuid>,
    ) -> Result<(Arc<Pool>, VolumeId, VolumeRecord)> {
        let found = self.get_volume_even_if_fenced(volume_id)?;
        let reverting = found.2.reverting.as_ref();
        match reverting.is_some_and(|it| !it.is_switched) && move_uid.is_none() {
            true => Ok(found),
            false => self.get_volume_for(volume_id, move_uid),
        }
    }

    /// The pool and record of a volume, which must exist. A volume whose creation has not finished
    /// does not exist.
    pub(in crate::operation) fn get_volume_even_if_fenced(
        &self,
        volume_id: &str,
    ) -> Result<(Arc<Pool>, VolumeId, VolumeRecord)> {
        let PoolLookup::Pool(pool, id) = self.owner(volume_id)? else {
            return Err(Error::no_volume(volume_id));
        };
        match pool.backend.volumes.get(id.uuid)? {
            Some(record) if record.state == crate::record::VolumeState::Ready => {
                Ok((pool, id, record))
            }
            Some(_) | None => Err(Error::no_volume(volume_id)),
        }
    }

    /// The pool of a storage class: the named one, the one named `default`, or the only one.
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
                pool.count_read()?;
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

    /// The pools for a list request: the requested one, or all.
    pub(in crate::operation) fn to_list(&self, only: Option<PoolId>) -> Result<Vec<Arc<Pool>>> {
        let Some(only) = only else {
            return self.all_serving();
        };
        self.pool(only).map(|pool| pool.into_iter().collect())
    }

    /// All pools, or an error if one of them is not served, because its contents are unknown.
    pub(in crate::operation) fn all_serving(&self) -> Result<Vec<Arc<Pool>>> {
        let each = self.states().into_iter().map(|state| match state {
            ServingState::Serving(pool) => pool.count_read().map(|()| pool),
            ServingState::Refused {
                definition, why, ..
            } => Err(Error::Unreachable {
                what: format!("pool {}", definition.name),
                reason: why,
            }),
        });
        each.collect()
    }

    /// The pool and record of a snapshot, which must exist and be committed.
    pub(in crate::operation) fn get_snapshot(
        &self,
        snapshot_id: &str,
    ) -> Result<(Arc<Pool>, SnapshotId, SnapshotRecord)> {
        self.get_snapshot_if(snapshot_id, |record| record.state == SnapshotState::Ready)
    }

    /// Like [`Pools::get_snapshot`], also for a deleted snapshot that is the hidden base of its volume.
    pub(in crate::operation) fn get_snapshot_or_base(
        &self,
        snapshot_id: &str,
    ) -> Result<(Arc<Pool>, SnapshotId, SnapshotRecord)> {
        self.get_snapshot_if(snapshot_id, |record| {
            record.state == SnapshotState::Ready || record.is_base()
        })
    }

    fn get_snapshot_if(
        &self,
        snapshot_id: &str,
        is_right: impl Fn(&SnapshotRecord) -> bool,
    ) -> Result<(Arc<Pool>, SnapshotId, SnapshotRecord)> {
        let absent = || Error::NotFound {
            kind: Kind::Snapshot,
            id: snapshot_id.to_string(),
        };
        let PoolLookup::Pool(pool, id) = self.owner(snapshot_id)? else {
            return Err(absent());
        };
        match pool.backend.snapshots.get(id.uuid)? {
            Some(record) if is_right(&record) => Ok((pool, id, record)),
            Some(_) | None => Err(absent()),
        }
    }

    /// A snapshot as replies describe it.
    pub(in crate::operation) fn snapshot(&self, pool: &Pool, record: &SnapshotRecord) -> Snapshot {
        let id = |uuid| VolumeId {
            pool: pool.id(),
            uuid,
        };
        Snapshot {
            id: id(record.uuid),
            source_volume_id: id(record.source),
            size: record.size,
            cut_at: record.cut_at,
            level: record.level,
            reason: record.reason.clone(),
            group: record.group.as_ref().map(|group| GroupId(group.id)),
            independent: record.group.as_ref().is_some_and(|of| of.independent),
            home: self.home(),
            frozen: None,
        }
    }

    /// A volume as replies describe it.
    pub(in crate::operation) fn volume(&self, pool: &Pool, record: &VolumeRecord) -> Volume {
        Volume {
            id: VolumeId {
                pool: pool.id(),
                uuid: record.uuid,
            },
            size: record.size,
            home: self.home(),
            content_source: record.content_source.clone(),
            ephemeral: record.ephemeral,
            is_complete: record.state == VolumeState::Ready,
        }
    }
}

/// Refuses a volume that a move has fenced, except for that move, and one that a revert has fenced.
pub(in crate::operation) fn check_fence(
    volume: &str,
    record: &VolumeRecord,
    move_uid: Option<Uuid>,
) -> Result<()> {
    let busy = |holder: String| {
        let subject = format!("volume {volume}");
        Err(Error::Busy { subject, holder })
    };
    if let Some(Reverting { uid, name, .. }) = &record.reverting {
        return busy(format!(
            "the VolumeRevert {name} with UID {uid} gives it the content of a snapshot; wait until that revert has ended, or delete it to abort the revert"
        ));
    }
    if record.spare.is_some() {
        return busy("it is the new image of a volume that is being reverted".into());
    }
    match record.fenced {
        Some(fenced) if move_uid != Some(fenced) => {
            let reason = format!(
                "the VolumeMove with UID {fenced} is moving it to another pool; wait until that move has ended, or delete it to abort the move"
            );
            Err(Error::refused(format!("volume {volume}"), reason))
        }
        Some(_) | None => Ok(()),
    }
}

/// The result of a lookup by ID.
pub(in crate::operation) enum PoolLookup {
    /// A pool that is served.
    Pool(Arc<Pool>, VolumeId),
    /// The ID is not one of this driver, or its pool was removed with `slackwater pool forget`.
    Unknown,
}
