//! CreateSnapshot, DeleteSnapshot, GetSnapshot.
//!
//! A snapshot is a group of one: it is prepared (and not listed), cut, made durable, and committed.
//! After a failure in between it is deleted before the reply, and after a crash at the next start.

use std::sync::Arc;

use uuid::Uuid;

use super::source::Source;
use crate::cut::retry::Subject;
use crate::error::{Error, Kind, Mismatch, Result};
use crate::model::id::NameKind;
use crate::model::{GroupId, SnapshotId, VolumeId};
use crate::operation::lock::Key;
use crate::operation::pools::lookup::PoolLookup;
use crate::operation::{CreateSnapshot, DeleteSnapshotOptions, Pool, Snapshot, Snapshots};
use crate::record::{SnapshotRecord, SnapshotState};

impl Snapshots {
    /// The locks that CreateSnapshot needs.
    pub fn locks_of_snapshot(&self, request: &CreateSnapshot) -> Vec<Key> {
        let mut keys = vec![Key::SnapshotName(request.name.clone())];
        if let Ok(source) = request.source_volume_id.parse::<VolumeId>() {
            let id = SnapshotId::of_name(source.pool, NameKind::Snapshot, &request.name);
            keys.extend([Key::Snapshot(id.uuid), Key::Volume(source.uuid)]);
        }
        keys
    }

    /// CreateSnapshot. A crash leaves a snapshot that is not listed, and that the next start or a
    /// repeat of the call deletes; in a pool that cannot share blocks, it leaves a copy that a
    /// repeat continues.
    pub fn create_snapshot(&self, request: &CreateSnapshot) -> Result<Snapshot> {
        self.create_snapshot_for(request, None)
    }

    /// CreateSnapshot, also of a volume that this move has fenced.
    pub(in crate::operation) fn create_snapshot_for(
        &self,
        request: &CreateSnapshot,
        move_uid: Option<Uuid>,
    ) -> Result<Snapshot> {
        let name = &request.name;
        let _name = self.pools.locks.acquire(Key::SnapshotName(name.clone()))?;
        if let Some((pool, record)) = self.find_snapshot_name(name)? {
            same_request(request, &pool, &record)?;
            return Ok(self.pools.snapshot(&pool, &record));
        }
        let source = self.source_of(name, &request.source_volume_id, move_uid)?;
        self.check_requisite(&request.requisite)?;
        let id = SnapshotId::of_name(source.pool.id(), NameKind::Snapshot, name);
        let _snapshot = self.pools.locks.acquire(Key::Snapshot(id.uuid))?;
        if !source.pool.backend.facts.shares_blocks {
            return self.copy_snapshot(request, &source, id);
        }
        let ids = [request.source_volume_id.clone()];
        let subject = Subject {
            name: &format!("snapshot {name}"),
            volumes: &ids,
            parameters: &request.parameters,
        };
        let made = self.retry(&subject, |now| {
            let attempt = self.host.random_uuid();
            let parameters = &request.parameters;
            let plan = |source: &Source| self.plan_single(source, id, name, parameters, attempt);
            let participation =
                self.begin_participation((&ids, move_uid), now.level, parameters, plan)?;
            self.make(participation, now, parameters)
        })?;
        let one = made.snapshots.first().ok_or_else(|| Error::Bug {
            invariant: "a single snapshot has a single source".into(),
        })?;
        Ok(Snapshot {
            frozen: made.frozen,
            ..self.pools.snapshot(&one.pool, &one.record)
        })
    }

    /// The source of a new snapshot. NotFound is a final answer, so what an earlier call left under
    /// the name of the snapshot is deleted first.
    pub(in crate::operation) fn source_of(
        &self,
        name: &str,
        volume_id: &str,
        move_uid: Option<Uuid>,
    ) -> Result<Source> {
        let absent = match self.source(volume_id, move_uid) {
            Err(absent @ Error::NotFound { .. }) => absent,
            found => return found,
        };
        let PoolLookup::Pool(pool, _) = self.pools.owner(volume_id)? else {
            return Err(absent);
        };
        let uuid = SnapshotId::of_name(pool.id(), NameKind::Snapshot, name).uuid;
        let lock = self.pools.locks.acquire(Key::Snapshot(uuid));
        let ended = lock.and_then(|_lock| pool.backend.snapshots.delete_unanswered(uuid));
        Err(absent.with_undo(ended))
    }

    /// Checks the topology requirement: a snapshot is always where its volume is.
    pub(in crate::operation) fn check_requisite(&self, requisite: &[String]) -> Result<()> {
        let home = self.pools.home().to_string();
        match requisite.is_empty() || requisite.contains(&home) {
            true => Ok(()),
            false => Err(Error::TopologyMismatch { home }),
        }
    }

    /// Finds the snapshot of a name in the served pools of this node.
    pub(in crate::operation) fn find_snapshot_name(
        &self,
        name: &str,
    ) -> Result<Option<(Arc<Pool>, SnapshotRecord)>> {
        self.pools
            .find_named(NameKind::Snapshot, name, |backend| &backend.snapshots)
    }

    /// DeleteSnapshot. A snapshot that does not exist counts as deleted. A member is deleted only
    /// with its group, unless its class says otherwise. Volumes that were restored from the
    /// snapshot stay.
    pub fn delete_snapshot(&self, snapshot_id: &str) -> Result<()> {
        self.delete_without_router(snapshot_id, &DeleteSnapshotOptions::default())
    }

    /// The same as [`Snapshots::delete_one`], without a router that resolves groups across nodes.
    pub fn delete_without_router(
        &self,
        snapshot_id: &str,
        how: &DeleteSnapshotOptions,
    ) -> Result<()> {
        match self.delete_one(snapshot_id, how)? {
            None => Ok(()),
            Some(group) => Err(Error::GroupInDoubt {
                group: group.to_string(),
                reason: "not all of its members are in pools that this node serves".into(),
            }),
        }
    }

    /// Deletes a snapshot. Before a member is deleted, all other members must be committed or
    /// undone, because its record may be the one that decides about them. If some of them are on
    /// other nodes, and `how` does not confirm that they are resolved, nothing is deleted and the
    /// ID of the group is returned.
    pub fn delete_one(
        &self,
        snapshot_id: &str,
        how: &DeleteSnapshotOptions,
    ) -> Result<Option<GroupId>> {
        let PoolLookup::Pool(pool, id) = self.pools.owner(snapshot_id)? else {
            return Ok(None);
        };
        let _lock = self.pools.locks.acquire(Key::Snapshot(id.uuid))?;
        let found = pool.backend.snapshots.get(id.uuid)?;
        if how.for_clone && found.as_ref().is_some_and(|record| !record.for_clone) {
            return Ok(None);
        }
        let delete = || {
            let _deleting = self.grants.begin_delete([id.uuid])?;
            let ended = self.delete_or_keep_as_bases(&pool, [(id.uuid, found.clone())]);
            ended.map(|()| None)
        };
        let Some((record, of)) = found
            .as_ref()
            .and_then(|one| Some((one, one.group.as_ref()?)))
        else {
            return delete();
        };
        if !of.independent && !how.of_any_group {
            return Err(Error::invalid(
                "snapshot_id",
                format!(
                    "{snapshot_id} is a member of the group snapshot {}; delete the group with DeleteVolumeGroupSnapshot",
                    of.id
                ),
            ));
        }
        let group = GroupId(of.id);
        let _group = self.pools.locks.acquire(Key::Group(of.id))?;
        if !self.resolve_and_check_whole(record, of)? {
            let in_doubt = !self.members_of(of.id, SnapshotState::Cut).is_empty();
            if in_doubt || how.settled != Some(group) {
                return Ok(Some(group));
            }
        }
        delete()
    }

    pub fn get_snapshot(&self, snapshot_id: &str) -> Result<Snapshot> {
        let (pool, _, record) = self.pools.get_snapshot(snapshot_id)?;
        Ok(self.pools.snapshot(&pool, &record))
    }
}

/// A repeat must name the same volume, and its class must accept the snapshot that exists. The
/// class may have changed in between: the CSI specification compares the parameters of a group, but
/// not those of a snapshot. Still, no caller gets a lower level than its class allows.
fn same_request(request: &CreateSnapshot, pool: &Pool, record: &SnapshotRecord) -> Result<()> {
    let differs = |mismatch| {
        let name = format!("{:?}", request.name);
        Err(Error::exists(Kind::Snapshot, name, mismatch))
    };
    let source = VolumeId {
        pool: pool.id(),
        uuid: record.source,
    };
    if source.to_string() != request.source_volume_id {
        let wanted = &request.source_volume_id;
        return differs(Mismatch::new("source_volume_id", source, wanted));
    }
    // One that is hidden is deleted without its caller, and another one must not be.
    let purpose = |for_clone| match for_clone {
        true => "a clone on another node",
        false => "its caller",
    };
    if record.for_clone != request.parameters.for_clone {
        let [found, wanted] = [record.for_clone, request.parameters.for_clone].map(purpose);
        return differs(Mismatch::new("purpose", found, wanted));
    }
    // A snapshot counts as having at least the lowest level that its own class accepted, even if it
    // reached a lower one, as for a volume that was not in use.
    let least = request.parameters.least();
    match record.min_level {
        Some(min_level) if min_level.max(record.level) < least => {
            let field = "parameters.consistency";
            differs(Mismatch::new(field, record.level, least))
        }
        Some(_) | None => Ok(()),
    }
}
