//! The members of a group snapshot on this node.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use uuid::Uuid;

use crate::error::{Error, Result};
use crate::model::id::NameKind;
use crate::model::{GroupId, Members, SnapshotId, SnapshotParameters, VolumeId};
use crate::operation::lock::LockGuard;
use crate::operation::pools::lookup::PoolLookup;
use crate::operation::{GroupMembership, Key, Pool, SnapshotState, Snapshots};
use crate::record::SnapshotRecord;

/// A member that exists, and its pool.
pub(in crate::operation) type Member = (Arc<Pool>, SnapshotRecord);

/// What concerns the snapshots of each pool, in which it is done together.
pub(in crate::operation) fn by_pool<T>(
    each: impl IntoIterator<Item = (Arc<Pool>, T)>,
) -> Vec<(Arc<Pool>, Vec<T>)> {
    let mut pools: Vec<(Arc<Pool>, Vec<T>)> = Vec::new();
    for (pool, one) in each {
        match pools.iter_mut().find(|(known, _)| known.id() == pool.id()) {
            Some((_, its)) => its.push(one),
            None => pools.push((pool, vec![one])),
        }
    }
    pools
}

/// The ID of a member, as callers know it.
pub(in crate::operation) fn id_of((pool, record): &Member) -> String {
    let (pool, uuid) = (pool.id(), record.uuid);
    SnapshotId { pool, uuid }.to_string()
}

/// The IDs of volumes. An ID that cannot be parsed is the ID of no volume.
pub(in crate::operation) fn sources(ids: &[String]) -> Result<Vec<VolumeId>> {
    let parsed = ids
        .iter()
        .map(|id| id.parse().map_err(|_| Error::no_volume(id)));
    parsed.collect()
}

pub fn member_of(group: GroupId, source: VolumeId) -> SnapshotId {
    let name = format!("{group}\n{source}");
    SnapshotId::of_name(source.pool, NameKind::Member, &name)
}

/// Whether a snapshot whose record cannot be read is certainly no member of a group: its ID follows
/// from the parts of the record that can be read.
fn is_of_others(pool: &Pool, uuid: Uuid, group: GroupId) -> bool {
    let Some(origin) = pool.backend.snapshots.origin(uuid) else {
        return false;
    };
    let pool = pool.id();
    let source = VolumeId {
        pool,
        uuid: origin.source,
    };
    let id = match origin.group {
        Some(of) if of.id == group.0 => return false,
        Some(of) => member_of(GroupId(of.id), source),
        None => SnapshotId::of_name(pool, NameKind::Snapshot, &origin.name),
    };
    id.uuid == uuid
}

/// What the record of each member of a new group contains about the group. It is the same on all
/// nodes.
pub(in crate::operation) fn membership(
    group: GroupId,
    sources: &[VolumeId],
    parameters: &SnapshotParameters,
) -> GroupMembership {
    let members = sources.iter().map(|source| member_of(group, *source));
    GroupMembership {
        id: group.0,
        members: members.map(|member| member.to_string()).collect(),
        sources: sources.iter().map(VolumeId::to_string).collect(),
        asked: Some(parameters.to_string()),
        independent: parameters.members == Members::Independent,
    }
}

/// For the record of a member without a membership, which does not occur.
pub(in crate::operation) fn no_membership(id: Uuid) -> GroupMembership {
    GroupMembership {
        id,
        members: Vec::new(),
        sources: Vec::new(),
        asked: None,
        independent: false,
    }
}

impl Snapshots {
    /// Members of a group in served pools.
    pub(in crate::operation) fn members_of(
        &self,
        group: Uuid,
        state: SnapshotState,
    ) -> Vec<Member> {
        let is_member = |record: &SnapshotRecord| {
            record.state == state && record.group.as_ref().is_some_and(|of| of.id == group)
        };
        let mut found = Vec::new();
        for pool in self.pools.serving() {
            let records = match state {
                SnapshotState::Ready => pool.backend.snapshots.ready(None, usize::MAX),
                SnapshotState::Preparing | SnapshotState::Cut => pool.backend.snapshots.unready(),
            };
            let mine = records.into_iter().filter(is_member);
            found.extend(mine.map(|record| (pool.clone(), record)));
        }
        found
    }

    /// Reads the records of snapshots by their IDs. An error if one cannot be read, or its pool is
    /// not served: then it is unknown whether the snapshot exists.
    pub(in crate::operation) fn read_each(&self, members: &[String]) -> Result<()> {
        let mut found = Vec::new();
        for member in members {
            if let PoolLookup::Pool(pool, id) = self.pools.owner(member)? {
                found.push((pool, id.uuid));
            }
        }
        for (pool, uuids) in by_pool(found) {
            let snapshots = &pool.backend.snapshots;
            snapshots.sync_records(&uuids)?;
            uuids
                .iter()
                .try_for_each(|uuid| snapshots.get(*uuid).map(drop))?;
        }
        Ok(())
    }

    /// An error if a record that cannot be read may belong to a member of this group: an earlier
    /// request may have named other volumes, which may be gone. A name that was generated for a
    /// Kubernetes object is always requested with the same volumes, and the caller checks the
    /// members of these by ID.
    pub(in crate::operation) fn check_members_readable(
        &self,
        group: GroupId,
        parameters: &SnapshotParameters,
    ) -> Result<()> {
        if parameters.is_of_object {
            return Ok(());
        }
        for pool in self.pools.serving() {
            for (uuid, _) in pool.backend.snapshots.damaged() {
                if !is_of_others(&pool, uuid, group) {
                    pool.backend.snapshots.get(uuid)?;
                }
            }
        }
        Ok(())
    }

    /// An error if there may be snapshots that were not read: in a pool that is not served, or with
    /// a record that cannot be read.
    pub(in crate::operation) fn check_all_readable(&self) -> Result<()> {
        for pool in self.pools.all_serving()? {
            for (uuid, _) in pool.backend.snapshots.damaged() {
                pool.backend.snapshots.get(uuid)?;
            }
        }
        Ok(())
    }

    /// Makes deletions durable that failed after they had hidden a snapshot: a power loss would
    /// restore it. The delete of a snapshot by its ID does this by itself, but the members of a group
    /// that are hidden already are not found, and a caller may name none or others.
    pub(in crate::operation) fn sync_deleted(&self) -> Result<()> {
        let mut pools = self.pools.serving().into_iter();
        pools.try_for_each(|pool| pool.backend.sync_deleted())
    }

    /// Deletes members, also those without a record: an earlier attempt may have left their blocks.
    pub(in crate::operation) fn delete_members<'a>(
        &self,
        group: Uuid,
        members: impl Iterator<Item = &'a String>,
    ) -> Result<()> {
        let mut ends = BTreeMap::new();
        for member in members {
            // A member in a pool that is not served now is not gone.
            if let PoolLookup::Pool(pool, id) = self.pools.owner(member)? {
                ends.insert(id, pool);
            }
        }
        let _locks: Vec<LockGuard> = ends
            .keys()
            .map(|id| self.pools.locks.acquire(Key::Snapshot(id.uuid)))
            .collect::<Result<_>>()?;
        // All records are read before the first member is deleted: if one cannot be read, none is
        // deleted.
        let mut deletes = Vec::new();
        for (pool, uuids) in by_pool(ends.into_iter().map(|(id, pool)| (pool, id.uuid))) {
            pool.backend.snapshots.sync_records(&uuids)?;
            for uuid in uuids {
                let record = pool.backend.snapshots.get(uuid)?;
                let is_member =
                    |one: &SnapshotRecord| one.group.as_ref().is_some_and(|of| of.id == group);
                if record.as_ref().is_none_or(is_member) {
                    deletes.push((pool.clone(), (uuid, record)));
                }
            }
        }
        let uuids = deletes.iter().map(|(_, (uuid, _))| *uuid);
        let _deleting = self.grants.begin_delete(uuids)?;
        let mut pools = by_pool(deletes).into_iter();
        pools.try_for_each(|(pool, ends)| self.delete_or_keep_as_bases(&pool, ends))
    }

    /// Groups with members here that are not committed: their cut is running, or a failed one left
    /// them.
    pub(in crate::operation) fn uncommitted_groups(&self) -> BTreeSet<Uuid> {
        let pools = self.pools.serving().into_iter();
        let unready = pools.flat_map(|pool| pool.backend.snapshots.unready());
        unready.filter_map(|one| Some(one.group?.id)).collect()
    }
}
