//! CreateSnapshot, DeleteSnapshot, GetSnapshot.
//!
//! A snapshot is a group of one: prepared (in no list), cut, made durable, committed. What fails
//! in between is deleted before the answer, and a crash in between at the next start.

use std::sync::Arc;

use uuid::Uuid;

use super::source::Source;
use crate::cut::Use;
use crate::cut::retry::Subject;
use crate::error::{Error, Kind, Mismatch, Result};
use crate::model::id::NameKind;
use crate::model::{GroupId, Level, SnapshotId, SnapshotParameters, VolumeId};
use crate::operation::lock::Key;
use crate::operation::pools::pool::PoolLookup;
use crate::operation::{CreateSnapshot, DeleteOne, Driver, Pool, Snapshot};
use crate::record::{SnapshotRecord, SnapshotState};

/// A snapshot that is being made, and its source.
pub(in crate::operation) struct Prepared {
    pub(in crate::operation) pool: Arc<Pool>,
    pub(in crate::operation) record: SnapshotRecord,
}

impl Driver {
    /// The locks that CreateSnapshot needs.
    pub fn locks_of_snapshot(&self, request: &CreateSnapshot) -> Vec<Key> {
        let mut keys = vec![Key::SnapshotName(request.name.clone())];
        if let Ok(source) = request.source_volume_id.parse::<VolumeId>() {
            let id = SnapshotId::of_name(source.pool, NameKind::Snapshot, &request.name);
            keys.extend([Key::Snapshot(id.uuid), Key::Volume(source.uuid)]);
        }
        keys
    }

    /// CreateSnapshot. A crash leaves a snapshot that is in no list, which the next start or a
    /// repeat ends; on a pool that can't share blocks, a copy that a repeat goes on with.
    pub fn create_snapshot(&self, request: &CreateSnapshot) -> Result<Snapshot> {
        let name = &request.name;
        let _name = self.locks.acquire(Key::SnapshotName(name.clone()))?;
        if let Some((pool, record)) = self.find_snapshot_name(name)? {
            same_request(request, &pool, &record)?;
            return Ok(self.snapshot(&pool, &record));
        }
        let source = self.source_of(name, &request.source_volume_id)?;
        self.check_requisite(&request.requisite)?;
        let id = SnapshotId::of_name(source.pool.id(), NameKind::Snapshot, name);
        let _snapshot = self.locks.acquire(Key::Snapshot(id.uuid))?;
        if !source.pool.backend.shares_blocks() {
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
            let share = self.begin_share(&ids, now.level, parameters, plan)?;
            self.make(share, now, parameters)
        })?;
        let each = made
            .first()
            .map(|one| self.snapshot(&one.pool, &one.record));
        each.ok_or_else(|| Error::Bug {
            invariant: "a single snapshot has a single source".into(),
        })
    }

    /// The source of a new snapshot. That there is none is a final answer: what an earlier call has
    /// left of the snapshot's name is ended first.
    pub(in crate::operation) fn source_of(&self, name: &str, volume_id: &str) -> Result<Source> {
        let absent = match self.source(volume_id) {
            Err(absent @ Error::NotFound { .. }) => absent,
            found => return found,
        };
        let PoolLookup::Pool(pool, _) = self.owner(volume_id)? else {
            return Err(absent);
        };
        let uuid = SnapshotId::of_name(pool.id(), NameKind::Snapshot, name).uuid;
        let lock = self.locks.acquire(Key::Snapshot(uuid));
        let ended = lock.and_then(|_lock| pool.backend.delete_unanswered_snapshot(uuid));
        Err(absent.with_undo(ended))
    }

    /// A snapshot is where its volume is.
    pub(in crate::operation) fn check_requisite(&self, requisite: &[String]) -> Result<()> {
        let home = self.home().to_string();
        match requisite.is_empty() || requisite.contains(&home) {
            true => Ok(()),
            false => Err(Error::TopologyMismatch { home }),
        }
    }

    pub(in crate::operation) fn uses_of(&self, sources: &[Source]) -> Result<Vec<Use>> {
        let uses: Result<_> = sources.iter().map(|source| self.use_of(source)).collect();
        // What an earlier try has left is ended after this look.
        uses.map_err(Error::into_indeterminate)
    }

    /// The record of a new snapshot that is no member.
    pub(in crate::operation) fn plan_single(
        &self,
        source: &Source,
        id: SnapshotId,
        name: &str,
        parameters: &SnapshotParameters,
        attempt: Uuid,
    ) -> SnapshotRecord {
        SnapshotRecord {
            promised: Some(parameters.least()),
            ..self.plan_snapshot(source, id, name, attempt)
        }
    }

    /// What records of all new snapshots have.
    pub(in crate::operation) fn plan_snapshot(
        &self,
        source: &Source,
        id: SnapshotId,
        name: &str,
        attempt: Uuid,
    ) -> SnapshotRecord {
        let record = &source.record;
        SnapshotRecord {
            uuid: id.uuid,
            name: name.to_string(),
            incarnation: self.host.random_uuid(),
            state: SnapshotState::Preparing,
            attempt,
            source: record.uuid,
            source_incarnation: record.incarnation,
            size: record.size,
            block_size: record.block_size,
            allocation: record.allocation,
            formatted: record.formatted.clone(),
            capabilities: record.capabilities.clone(),
            wipe: record.wipe,
            lineage: None,
            cut_at: 0,
            level: Level::Crash,
            promised: None,
            reason: String::new(),
            group: None,
            copy: None,
        }
    }

    /// The snapshot of a name, wherever on this machine it is.
    pub(in crate::operation) fn find_snapshot_name(
        &self,
        name: &str,
    ) -> Result<Option<(Arc<Pool>, SnapshotRecord)>> {
        for pool in self.serving() {
            let id = SnapshotId::of_name(pool.id(), NameKind::Snapshot, name);
            if let Some(record) = pool
                .backend
                .snapshot(id.uuid)?
                .filter(|record| record.state == SnapshotState::Ready)
            {
                return Ok(Some((pool, record)));
            }
        }
        Ok(None)
    }

    /// DeleteSnapshot. What isn't there is deleted; a member goes with its group alone, unless its
    /// class says otherwise. What was restored from it stays.
    pub fn delete_snapshot(&self, snapshot_id: &str) -> Result<()> {
        self.delete_alone(snapshot_id, &DeleteOne::default())
    }

    /// The same as [`Driver::delete_one`], where nobody settles a group of several nodes.
    pub fn delete_alone(&self, snapshot_id: &str, how: &DeleteOne) -> Result<()> {
        match self.delete_one(snapshot_id, how)? {
            None => Ok(()),
            Some(group) => Err(Error::Unsettled {
                group: group.to_string(),
                reason: "not all of its members are in pools that this node serves".into(),
            }),
        }
    }

    /// Deletes a snapshot. Of a member all others must be committed or undone before: its record
    /// may be the one that decides about them. Where some of them are other nodes' and `how`
    /// doesn't say that it's so, nothing is deleted, and the group is answered.
    pub fn delete_one(&self, snapshot_id: &str, how: &DeleteOne) -> Result<Option<GroupId>> {
        let PoolLookup::Pool(pool, id) = self.owner(snapshot_id)? else {
            return Ok(None);
        };
        let _lock = self.locks.acquire(Key::Snapshot(id.uuid))?;
        let delete = || pool.backend.delete_snapshot(id.uuid).map(|()| None);
        let Some(record) = pool.backend.snapshot(id.uuid)? else {
            return delete();
        };
        let Some(of) = &record.group else {
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
        let _group = self.locks.acquire(Key::Group(of.id))?;
        if !self.is_settled(&record, of)? {
            let in_doubt = !self.members_of(of.id, SnapshotState::Cut).is_empty();
            if in_doubt || how.settled != Some(group) {
                return Ok(Some(group));
            }
        }
        delete()
    }

    /// GetSnapshot.
    pub fn get_snapshot(&self, snapshot_id: &str) -> Result<Snapshot> {
        let (pool, _, record) = self.find_snapshot(snapshot_id)?;
        Ok(self.snapshot(&pool, &record))
    }

    /// The pool and record of a snapshot that must exist: committed.
    pub(in crate::operation) fn find_snapshot(
        &self,
        snapshot_id: &str,
    ) -> Result<(Arc<Pool>, SnapshotId, SnapshotRecord)> {
        let absent = || Error::NotFound {
            kind: Kind::Snapshot,
            id: snapshot_id.to_string(),
        };
        let PoolLookup::Pool(pool, id) = self.owner(snapshot_id)? else {
            return Err(absent());
        };
        match pool.backend.snapshot(id.uuid)? {
            Some(record) if record.state == SnapshotState::Ready => Ok((pool, id, record)),
            Some(_) | None => Err(absent()),
        }
    }

    /// As answers tell it.
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
        }
    }
}

/// A repeat must be of the same volume, and take what is there for what it asks for. How that was
/// to be made may have changed since: unlike a group's parameters these are not to be compared,
/// says the interface, but nobody is given a lower level than their class allows.
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
    // What its own class took for one it stays, whatever it has reached: nobody used the volume.
    let least = request.parameters.least();
    match record.promised {
        Some(promised) if promised.max(record.level) < least => {
            let field = "parameters.consistency";
            differs(Mismatch::new(field, record.level, least))
        }
        Some(_) | None => Ok(()),
    }
}
