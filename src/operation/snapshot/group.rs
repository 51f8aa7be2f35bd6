//! CreateVolumeGroupSnapshot, DeleteVolumeGroupSnapshot, GetVolumeGroupSnapshot.
//!
//! A group is nothing but its members: each one's record names them all. They are cut together by
//! one try, and committed by the first one's record.

use std::collections::BTreeSet;

use super::members::{Member, id_of, membership, no_membership, sources};
use super::source::Source;
use crate::cut::retry::Subject;
use crate::error::{Error, Kind, Mismatch, Result};
use crate::model::GroupId;
use crate::operation::lock::Key;
use crate::operation::{CreateGroup, Driver, Group, NamedGroup, member_of};
use crate::record::{GroupMembership, SnapshotState};

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

/// Why snapshots that were made by two attempts are no group.
pub fn of_another_moment(member: &str) -> String {
    format!("its member {member} was cut by a different attempt than its first member")
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
