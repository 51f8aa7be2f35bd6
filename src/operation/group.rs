//! CreateVolumeGroupSnapshot, DeleteVolumeGroupSnapshot, GetVolumeGroupSnapshot.
//!
//! A group is nothing but its members: each one's record names them all. They are cut together by
//! one try, and committed by the first one's record.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use uuid::Uuid;

use super::cutting::Source;
use super::lock::{Guard, Key};
use super::pool::Owner;
use super::{CreateGroup, Driver, Group, NamedGroup, Pool};
use crate::error::{Error, Kind, Mismatch, Result};
use crate::model::id::NameKind;
use crate::model::{GroupId, SnapshotId, SnapshotParameters, VolumeId};
use crate::record::{GroupMembership, SnapshotRecord, SnapshotState};

/// A member that is there.
pub(super) type Member = (Arc<Pool>, SnapshotRecord);

impl Driver {
    /// CreateVolumeGroupSnapshot: all members at one moment, or none. A crash leaves members that
    /// are in no list; the next start ends them, or commits them all if the first one was.
    pub fn create_group(&self, request: &CreateGroup) -> Result<Group> {
        let id = GroupId::of_name(self.settled_home()?, &request.name);
        let _group = self.locks.acquire(Key::Group(id.0))?;
        self.settle_group(id.0)?;
        let found = self.members_of(id.0, SnapshotState::Ready);
        if let Some((_, one)) = found.first() {
            let membership = one.group.clone().unwrap_or_else(|| no_membership(id.0));
            same_request(request, &membership)?;
            return self.group(id, &membership, found);
        }
        let ids = &request.source_volume_ids;
        let made = self.tries(
            &format!("group {}", request.name),
            &request.parameters,
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
    pub(super) fn plan_member(
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
    pub(super) fn members_of(&self, group: Uuid, state: SnapshotState) -> Vec<Member> {
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

    /// The answer for a group, in the order of its sources; an error if a member is missing.
    fn group(
        &self,
        id: GroupId,
        membership: &GroupMembership,
        found: Vec<Member>,
    ) -> Result<Group> {
        let mut snapshots = Vec::new();
        for member in &membership.members {
            let (pool, _, record) = self.find_snapshot(member).map_err(|error| match error {
                Error::NotFound { .. } => Error::refused(
                    format!("group snapshot {id}"),
                    format!("its member {member} is gone; delete the group"),
                ),
                other => other,
            })?;
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
        self.settle_group(id.0)?;
        let found = self.members_of(id.0, SnapshotState::Ready);
        if let Some(membership) = found.first().and_then(|(_, one)| one.group.as_ref()) {
            same_members(request, membership)?;
        }
        let known = found.first().and_then(|(_, one)| one.group.as_ref());
        let members = known.map(|membership| &membership.members);
        let members = members.into_iter().flatten().chain(&request.snapshot_ids);
        self.end_members(id.0, members)
    }

    /// Deletes members, also those without a record: an earlier try may have left their blocks.
    pub(super) fn end_members<'a>(
        &self,
        group: Uuid,
        members: impl Iterator<Item = &'a String>,
    ) -> Result<()> {
        let mut ends = BTreeMap::new();
        for member in members {
            // One on a pool that isn't served now is not gone.
            if let Owner::Pool(pool, id) = self.owner(member)? {
                ends.insert(id, pool);
            }
        }
        let _locks: Vec<Guard> = ends
            .keys()
            .map(|id| self.locks.acquire(Key::Snapshot(id.uuid)))
            .collect::<Result<_>>()?;
        for (id, pool) in ends {
            let record = pool.backend.snapshot(id.uuid)?;
            if record.is_none_or(|record| record.group.is_some_and(|of| of.id == group)) {
                pool.backend.delete_snapshot(id.uuid)?;
            }
        }
        Ok(())
    }

    /// GetVolumeGroupSnapshot.
    pub fn get_group(&self, request: &NamedGroup) -> Result<Group> {
        let absent = || Error::NotFound {
            kind: Kind::Group,
            id: request.group_id.clone(),
        };
        let id: GroupId = request.group_id.parse().map_err(|_| absent())?;
        let found = self.members_of(id.0, SnapshotState::Ready);
        let membership = found.first().and_then(|(_, one)| one.group.clone());
        let Some(membership) = membership else {
            // "There is none" is only known where all pools have answered.
            self.all_serving()?;
            return Err(absent());
        };
        same_members(request, &membership)?;
        self.group(id, &membership, found)
    }
}

/// Ids of volumes; of what isn't one there is none.
fn sources(ids: &[String]) -> Result<Vec<VolumeId>> {
    let parsed = ids
        .iter()
        .map(|id| id.parse().map_err(|_| Error::no_volume(id)));
    parsed.collect()
}

/// The id of a volume's member of a group.
fn member_of(group: GroupId, source: VolumeId) -> SnapshotId {
    let name = format!("{group}\n{source}");
    SnapshotId::of_name(source.pool, NameKind::Member, &name)
}

/// What each member of a new group is told of it; the same on every node.
pub(super) fn membership(
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
    }
}

/// A record among a group's members always has one.
fn no_membership(id: Uuid) -> GroupMembership {
    GroupMembership {
        id,
        members: Vec::new(),
        sources: Vec::new(),
        asked: None,
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

/// Ids that are given must be the members', all of them; none given says nothing.
pub fn same_members(request: &NamedGroup, membership: &GroupMembership) -> Result<()> {
    let given: BTreeSet<_> = request.snapshot_ids.iter().collect();
    if given.is_empty() || given == membership.members.iter().collect() {
        return Ok(());
    }
    Err(Error::invalid(
        "snapshot_ids",
        format!(
            "are not the members of group snapshot {}, which are {}",
            request.group_id,
            membership.members.join(", ")
        ),
    ))
}
