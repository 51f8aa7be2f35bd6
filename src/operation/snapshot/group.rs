//! CreateVolumeGroupSnapshot, DeleteVolumeGroupSnapshot, GetVolumeGroupSnapshot.
//!
//! A group is nothing but its members: each one's record names them all. They are cut together by
//! one try, and committed by the first one's record.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use uuid::Uuid;

use super::source::Source;
use crate::backend::file::SNAPSHOTS;
use crate::cut::retry::Subject;
use crate::error::{Error, Kind, Mismatch, Result};
use crate::model::id::NameKind;
use crate::model::{GroupId, Members, SnapshotId, SnapshotParameters, VolumeId};
use crate::operation::lock::{Key, LockGuard};
use crate::operation::pools::pool::PoolLookup;
use crate::operation::{CreateGroup, Driver, Group, NamedGroup, Pool};
use crate::record::{GroupMembership, SnapshotRecord, SnapshotState};

/// A member that is there.
pub(in crate::operation) type Member = (Arc<Pool>, SnapshotRecord);

/// The id of a member, as callers have it.
pub(in crate::operation) fn id_of((pool, record): &Member) -> String {
    let (pool, uuid) = (pool.id(), record.uuid);
    SnapshotId { pool, uuid }.to_string()
}

impl Driver {
    /// The locks that CreateVolumeGroupSnapshot needs.
    pub fn locks_of_group(&self, request: &CreateGroup) -> Vec<Key> {
        let group = GroupId::of_name(self.home(), &request.name);
        let sources = sources(&request.source_volume_ids).unwrap_or_default();
        let each = sources.into_iter().flat_map(|source| {
            let member = member_of(group, source);
            [Key::Volume(source.uuid), Key::Snapshot(member.uuid)]
        });
        each.chain([Key::Group(group.0)]).collect()
    }

    /// CreateVolumeGroupSnapshot: all members at one moment, or none. A crash leaves members that
    /// are in no list; the next start ends them, or commits them all if the first one was.
    pub fn create_group(&self, request: &CreateGroup) -> Result<Group> {
        let id = GroupId::of_name(self.settled_home()?, &request.name);
        let _group = self.locks.acquire(Key::Group(id.0))?;
        self.resolve_group(id.0)?;
        let ids = &request.source_volume_ids;
        // Before the list, which may have one by then that couldn't be read.
        let seen = sources(ids)
            .map(|sources| membership(id, &sources, &request.parameters))
            .and_then(|asked| self.look_at_each(&asked.members))
            .and_then(|()| self.members_read(id, &request.parameters));
        let found = self.members_of(id.0, SnapshotState::Ready);
        if let Some((_, one)) = found.first() {
            let membership = one.group.clone().unwrap_or_else(|| no_membership(id.0));
            same_request(request, &membership)?;
            // Also of members that may be deleted one by one: all are asked for.
            return self.group(id, &membership, found, false);
        }
        seen?;
        let made = self.retry(
            &Subject {
                name: &format!("group {}", request.name),
                volumes: ids,
                parameters: &request.parameters,
            },
            |now| {
                let membership = membership(id, &sources(ids)?, &request.parameters);
                let attempt = self.host.random_uuid();
                let plan = |source: &Source| {
                    self.plan_member(source, id, &request.name, &membership, attempt)
                };
                let share = self.begin_share(ids, now.level, &request.parameters, plan)?;
                self.make(share, now, &request.parameters)
            },
        )?;
        let snapshots: Vec<_> = made
            .iter()
            .map(|one| self.snapshot(&one.pool, &one.record))
            .collect();
        let cut_at = snapshots.first().map_or(0, |snapshot| snapshot.cut_at);
        Ok(Group {
            id,
            snapshots,
            cut_at,
        })
    }

    /// The record of a new member.
    pub(in crate::operation) fn plan_member(
        &self,
        source: &Source,
        group: GroupId,
        name: &str,
        membership: &GroupMembership,
        attempt: Uuid,
    ) -> SnapshotRecord {
        SnapshotRecord {
            group: Some(membership.clone()),
            ..self.plan_snapshot(source, member_of(group, source.id), name, attempt)
        }
    }

    /// Members of a group on the pools that are served.
    pub(in crate::operation) fn members_of(
        &self,
        group: Uuid,
        state: SnapshotState,
    ) -> Vec<Member> {
        let is_member = |record: &SnapshotRecord| {
            record.state == state && record.group.as_ref().is_some_and(|of| of.id == group)
        };
        let mut found = Vec::new();
        for pool in self.serving() {
            let records = match state {
                SnapshotState::Ready => pool.backend.snapshots(None, usize::MAX),
                SnapshotState::Preparing | SnapshotState::Cut => pool.backend.unready_snapshots(),
            };
            let mine = records.into_iter().filter(is_member);
            found.extend(mine.map(|record| (pool.clone(), record)));
        }
        found
    }

    /// The answer for a group, in the order of its sources; an error if a member is missing,
    /// unless some may be.
    fn group(
        &self,
        id: GroupId,
        membership: &GroupMembership,
        found: Vec<Member>,
        some_may_be_gone: bool,
    ) -> Result<Group> {
        let broken = |why: String| {
            let subject = format!("group snapshot {id}");
            Error::refused(subject, format!("{why}; delete the group"))
        };
        let mut snapshots = Vec::new();
        let mut attempts = BTreeSet::new();
        for member in &membership.members {
            let (pool, _, record) = match self.find_snapshot(member) {
                Err(Error::NotFound { .. }) if some_may_be_gone => continue,
                Err(Error::NotFound { .. }) => {
                    return Err(broken(format!("its member {member} no longer exists")));
                }
                found => found?,
            };
            attempts.insert(record.attempt);
            if attempts.len() > 1 {
                return Err(broken(of_another_moment(member)));
            }
            snapshots.push(self.snapshot(&pool, &record));
        }
        let cut_at = found.first().map_or(0, |(_, record)| record.cut_at);
        Ok(Group {
            id,
            snapshots,
            cut_at,
        })
    }

    /// DeleteVolumeGroupSnapshot. A crash leaves some members, which a repeat ends.
    pub fn delete_group(&self, request: &NamedGroup) -> Result<()> {
        let Ok(id) = request.group_id.parse::<GroupId>() else {
            return Ok(());
        };
        let _group = self.locks.acquire(Key::Group(id.0))?;
        self.resolve_group(id.0)?;
        let seen = self.all_seen();
        let found = self.members_of(id.0, SnapshotState::Ready);
        if let Some(membership) = found.first().and_then(|(_, one)| one.group.as_ref()) {
            same_members(request, membership, found.iter().map(id_of))?;
        }
        if found.is_empty() && request.snapshot_ids.is_empty() {
            // Wherever its members were: what can't be seen now may have them.
            return seen;
        }
        let known = found.iter().filter_map(|(_, one)| one.group.as_ref());
        let mut members: BTreeSet<String> = known.flat_map(|of| of.members.clone()).collect();
        members.extend(found.iter().map(id_of));
        members.extend(request.snapshot_ids.iter().cloned());
        self.delete_members(id.0, members.iter())
    }

    /// Looks at snapshots by their ids; an error if one can't be looked at, or its record can't be
    /// read: whether it's there isn't known then.
    pub(in crate::operation) fn look_at_each(&self, members: &[String]) -> Result<()> {
        members.iter().try_for_each(|member| {
            if let PoolLookup::Pool(pool, id) = self.owner(member)? {
                pool.backend.snapshot(id.uuid)?;
            }
            Ok(())
        })
    }

    /// An error if a record that can't be read may be that of a member of this group: it may have
    /// been asked for with other volumes before, which may be gone. A name that was made for an object
    /// of Kubernetes is asked for with the same volumes, of which the caller looks at each.
    pub(in crate::operation) fn members_read(
        &self,
        group: GroupId,
        parameters: &SnapshotParameters,
    ) -> Result<()> {
        if parameters.is_of_object {
            return Ok(());
        }
        for pool in self.serving() {
            for (uuid, _) in pool.backend.damaged_snapshots() {
                if !is_of_others(&pool, uuid, group) {
                    pool.backend.snapshot(uuid)?;
                }
            }
        }
        Ok(())
    }

    /// An error if a snapshot may be there that isn't seen: on a pool that isn't served, or by a
    /// record that can't be read.
    pub(in crate::operation) fn all_seen(&self) -> Result<()> {
        for pool in self.all_serving()? {
            if let Some((uuid, problem)) = pool.backend.damaged_snapshots().into_iter().next() {
                let path = pool.backend.path().join(SNAPSHOTS).join(uuid.to_string());
                return Err(Error::Damaged { path, problem });
            }
        }
        Ok(())
    }

    /// Deletes members, also those without a record: an earlier try may have left their blocks.
    pub(in crate::operation) fn delete_members<'a>(
        &self,
        group: Uuid,
        members: impl Iterator<Item = &'a String>,
    ) -> Result<()> {
        let mut ends = BTreeMap::new();
        for member in members {
            // One on a pool that isn't served now is not gone.
            if let PoolLookup::Pool(pool, id) = self.owner(member)? {
                ends.insert(id, pool);
            }
        }
        let _locks: Vec<LockGuard> = ends
            .keys()
            .map(|id| self.locks.acquire(Key::Snapshot(id.uuid)))
            .collect::<Result<_>>()?;
        // All are looked at before the first is deleted: one that can't be read keeps them all.
        let mut deletes = Vec::new();
        for (id, pool) in ends {
            let record = pool.backend.snapshot(id.uuid)?;
            if record.is_none_or(|record| record.group.is_some_and(|of| of.id == group)) {
                deletes.push((id, pool));
            }
        }
        let mut deletes = deletes.into_iter();
        deletes.try_for_each(|(id, pool)| pool.backend.delete_snapshot(id.uuid))
    }

    /// GetVolumeGroupSnapshot.
    pub fn get_group(&self, request: &NamedGroup) -> Result<Group> {
        let absent = || Error::NotFound {
            kind: Kind::Group,
            id: request.group_id.clone(),
        };
        let id: GroupId = request.group_id.parse().map_err(|_| absent())?;
        let seen = self
            .look_at_each(&request.snapshot_ids)
            .and_then(|()| self.all_seen());
        let found = self.members_of(id.0, SnapshotState::Ready);
        let membership = found.first().and_then(|(_, one)| one.group.clone());
        let Some(membership) = membership else {
            // "There is none" is only known where all has been seen.
            seen?;
            return Err(absent());
        };
        same_members(request, &membership, found.iter().map(id_of))?;
        self.group(id, &membership, found, membership.independent)
    }
}

/// Ids of volumes; of what isn't one there is none.
pub(in crate::operation) fn sources(ids: &[String]) -> Result<Vec<VolumeId>> {
    let parsed = ids
        .iter()
        .map(|id| id.parse().map_err(|_| Error::no_volume(id)));
    parsed.collect()
}

/// Why snapshots that were made by two attempts are no group.
pub fn of_another_moment(member: &str) -> String {
    format!("its member {member} was cut by a different attempt than its first member")
}

/// The id of a volume's member of a group.
pub fn member_of(group: GroupId, source: VolumeId) -> SnapshotId {
    let name = format!("{group}\n{source}");
    SnapshotId::of_name(source.pool, NameKind::Member, &name)
}

/// Whether a snapshot whose record can't be read is proven to be no member of a group: its id
/// follows from what the record still says.
fn is_of_others(pool: &Pool, uuid: Uuid, group: GroupId) -> bool {
    let Some(origin) = pool.backend.origin(uuid) else {
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

/// What each member of a new group is told of it; the same on every node.
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

/// A record among a group's members always has one.
fn no_membership(id: Uuid) -> GroupMembership {
    GroupMembership {
        id,
        members: Vec::new(),
        sources: Vec::new(),
        asked: None,
        independent: false,
    }
}

/// A repeat must ask for the same volumes in the same way.
pub fn same_request(request: &CreateGroup, membership: &GroupMembership) -> Result<()> {
    let differs = |mismatch| {
        let name = format!("{:?}", request.name);
        Err(Error::exists(Kind::Group, name, mismatch))
    };
    let wanted: BTreeSet<_> = request.source_volume_ids.iter().collect();
    if wanted != membership.sources.iter().collect() {
        let (found, wanted) = (&membership.sources, &request.source_volume_ids);
        let (found, wanted) = (found.join(", "), wanted.join(", "));
        return differs(Mismatch::new("source_volume_ids", found, wanted));
    }
    let asked = request.parameters.to_string();
    match &membership.asked {
        Some(found) if *found != asked => differs(Mismatch::new("parameters", found, asked)),
        Some(_) | None => Ok(()),
    }
}

/// Ids that are given must be the members', all of them; none given says nothing. Of members that
/// may be deleted one by one, those that are gone may be given or left out.
pub fn same_members(
    request: &NamedGroup,
    membership: &GroupMembership,
    mut left: impl Iterator<Item = String>,
) -> Result<()> {
    let given: BTreeSet<_> = request.snapshot_ids.iter().collect();
    let members: BTreeSet<_> = membership.members.iter().collect();
    let is_right = match membership.independent {
        true => given.is_subset(&members) && left.all(|member| given.contains(&member)),
        false => given == members,
    };
    if given.is_empty() || is_right {
        return Ok(());
    }
    Err(Error::invalid(
        "snapshot_ids",
        format!(
            "do not match the members of group snapshot {}, which are {}",
            request.group_id,
            membership.members.join(", ")
        ),
    ))
}

#[cfg(test)]
mod tests;
