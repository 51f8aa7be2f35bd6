//! CreateVolumeGroupSnapshot, DeleteVolumeGroupSnapshot, GetVolumeGroupSnapshot.
//!
//! A group consists only of its members: the record of each one names all of them. One attempt cuts
//! them together, and the record of the first member commits them.

use std::collections::BTreeSet;

use super::members::{Member, id_of, membership, no_membership, sources};
use super::source::Source;
use crate::cut::retry::Subject;
use crate::error::{Error, Kind, Mismatch, Result};
use crate::model::GroupId;
use crate::operation::lock::Key;
use crate::operation::{CreateGroup, Group, NamedGroup, Snapshots, member_of};
use crate::record::{GroupMembership, SnapshotState};

impl Snapshots {
    /// The locks that CreateVolumeGroupSnapshot needs.
    pub fn locks_of_group(&self, request: &CreateGroup) -> Vec<Key> {
        let group = GroupId::of_name(self.pools.home(), &request.name);
        let sources = sources(&request.source_volume_ids).unwrap_or_default();
        let each = sources.into_iter().flat_map(|source| {
            let member = member_of(group, source);
            [Key::Volume(source.uuid), Key::Snapshot(member.uuid)]
        });
        each.chain([Key::Group(group.0)]).collect()
    }

    /// CreateVolumeGroupSnapshot: all members at one point in time, or none. A crash leaves members
    /// that are not listed. The next start deletes them, or commits all of them if the first one
    /// was committed.
    pub fn create_group(&self, request: &CreateGroup) -> Result<Group> {
        let id = GroupId::of_name(self.pools.get_home()?, &request.name);
        let _group = self.pools.locks.acquire(Key::Group(id.0))?;
        self.resolve_group(id.0)?;
        let ids = &request.source_volume_ids;
        // This check precedes the listing. In the other order, a record that becomes readable in
        // between would be missed: neither listed nor reported as unreadable.
        let seen = sources(ids)
            .map(|sources| membership(id, &sources, &request.parameters))
            .and_then(|asked| self.read_each(&asked.members))
            .and_then(|()| self.check_members_readable(id, &request.parameters));
        let found = self.members_of(id.0, SnapshotState::Ready);
        if let Some((_, one)) = found.first() {
            let membership = one.group.clone().unwrap_or_else(|| no_membership(id.0));
            same_request(request, &membership)?;
            // This also applies to members that may be deleted individually: the request asks for
            // all of them.
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
                let share =
                    self.begin_participation((ids, None), now.level, &request.parameters, plan)?;
                let made = self.make(share, now, &request.parameters)?;
                Ok(made.snapshots)
            },
        )?;
        let snapshots: Vec<_> = made
            .iter()
            .map(|one| self.pools.snapshot(&one.pool, &one.record))
            .collect();
        let cut_at = snapshots.first().map_or(0, |snapshot| snapshot.cut_at);
        Ok(Group {
            id,
            snapshots,
            cut_at,
        })
    }

    /// The reply for a group, in the order of its sources. It is an error if a member is missing,
    /// unless `some_may_be_gone`.
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
            let (pool, _, record) = match self.pools.get_snapshot(member) {
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
            snapshots.push(self.pools.snapshot(&pool, &record));
        }
        let cut_at = found.first().map_or(0, |(_, record)| record.cut_at);
        Ok(Group {
            id,
            snapshots,
            cut_at,
        })
    }

    /// DeleteVolumeGroupSnapshot. A crash leaves some of the members, which a repeat deletes.
    pub fn delete_group(&self, request: &NamedGroup) -> Result<()> {
        let Ok(id) = request.group_id.parse::<GroupId>() else {
            return Ok(());
        };
        let _group = self.pools.locks.acquire(Key::Group(id.0))?;
        self.resolve_group(id.0)?;
        let seen = self.check_all_readable();
        let found = self.members_of(id.0, SnapshotState::Ready);
        if let Some(membership) = found.first().and_then(|(_, one)| one.group.as_ref()) {
            same_members(request, membership, found.iter().map(id_of))?;
        }
        if found.is_empty() {
            self.sync_deleted()?;
            if request.snapshot_ids.is_empty() {
                // Its members are unknown, so they may be wherever this node could not look.
                return seen;
            }
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
            .read_each(&request.snapshot_ids)
            .and_then(|()| self.check_all_readable());
        let found = self.members_of(id.0, SnapshotState::Ready);
        let membership = found.first().and_then(|(_, one)| one.group.clone());
        let Some(membership) = membership else {
            // Only if everything could be read is it certain that the group does not exist.
            seen?;
            return Err(absent());
        };
        same_members(request, &membership, found.iter().map(id_of))?;
        self.group(id, &membership, found, membership.independent)
    }
}

/// Explains why snapshots of two attempts are not a group.
pub fn of_another_moment(member: &str) -> String {
    format!("its member {member} was cut by a different attempt than its first member")
}

/// A repeat must name the same volumes and the same parameters.
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

/// If the request contains IDs, they must be exactly those of the members. If the members may be
/// deleted individually, those that no longer exist may be given or left out.
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
