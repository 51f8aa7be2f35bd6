//! The end of doubt about groups: what a crash of the node, of the router, or of the network
//! between them has left of a try is committed or deleted, never joined with another try.
//!
//! The group's first member alone decides: once it's `ready` all of its try are committed, and
//! while it isn't, none is. Where it's on this node, this node settles by itself, at start and
//! from time to time. Where it's another node's, the router asks there, and says so here.

use std::collections::BTreeMap;
use std::time::Duration;

use uuid::Uuid;

use super::members::{Member, id_of};
use crate::error::{Error, Result, chain};
use crate::model::GroupId;
use crate::operation::lock::{Key, LockGuard};
use crate::operation::pools::lookup::PoolLookup;
use crate::operation::{Driver, Snapshot};
use crate::record::{GroupMembership, SnapshotRecord, SnapshotState};

/// How often somebody who only looks at a group waits for others who only look, and how long each
/// time.
const LOCK_TRIES: u32 = 10;
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// A member of a group, in whatever state.
#[derive(Clone, Debug)]
pub struct GroupMember {
    /// As it's told once it's committed.
    pub snapshot: Snapshot,
    /// The try that made it.
    pub attempt: Uuid,
    /// Where in its life it is.
    pub state: SnapshotState,
}

/// What this node has of a group.
#[derive(Clone, Debug)]
pub struct GroupHere {
    /// Something runs that is about it: what is told may be old by now.
    pub busy: bool,
    /// Its members on pools that are served.
    pub members: Vec<GroupMember>,
    /// All of it, as its members know it that are cut or committed.
    pub membership: Option<GroupMembership>,
    /// Why there may be more of it here.
    pub unseen: Option<String>,
}

/// What becomes of members that are cut and not committed.
#[derive(Clone, Debug, Default)]
pub struct GroupDecision {
    /// The try that is committed.
    pub commit: Option<Uuid>,
    /// Tries that aren't, and whose members are deleted. One that the judge hasn't seen is left
    /// alone: it's younger than the verdict.
    pub undo: Vec<Uuid>,
}

impl Driver {
    /// What this node has of a group. `members` are looked at by their ids: an error if one can't
    /// be, so that one which isn't told isn't there.
    pub fn group_here(&self, group: GroupId, members: &[String]) -> Result<GroupHere> {
        let lock = self.lock_for_a_look(group);
        // Before the list, which may have one by then that couldn't be read. Served, or not this
        // node's: that is the whole look at one which isn't listed then.
        let unseen = self.all_seen().err().map(|error| chain(&error));
        self.look_at_each(members)?;
        let mut found = BTreeMap::new();
        for state in [
            SnapshotState::Ready,
            SnapshotState::Cut,
            SnapshotState::Preparing,
        ] {
            for (pool, record) in self.members_of(group.0, state) {
                found.entry(record.uuid).or_insert((pool, record));
            }
        }
        let known = |state: SnapshotState| {
            let mut records = found.values().map(|(_, record)| record);
            records.find(|record| record.state == state)?.group.clone()
        };
        let membership = known(SnapshotState::Ready).or_else(|| known(SnapshotState::Cut));
        let told = |(pool, record): &Member| GroupMember {
            snapshot: self.snapshot(pool, record),
            attempt: record.attempt,
            state: record.state,
        };
        Ok(GroupHere {
            busy: lock.is_err(),
            members: found.values().map(told).collect(),
            membership,
            unseen,
        })
    }

    /// The lock of a group; another look has it for a moment only.
    fn lock_for_a_look(&self, group: GroupId) -> Result<LockGuard> {
        for _ in 1..LOCK_TRIES {
            if let Ok(lock) = self.locks.acquire(Key::Group(group.0)) {
                return Ok(lock);
            }
            self.host.pause(LOCK_RETRY_INTERVAL);
        }
        self.locks.acquire(Key::Group(group.0))
    }

    /// Ends the doubt by a verdict of who has seen the group's first member. Where that is this
    /// node's, it's looked at again, and counts more. Done again, it changes nothing.
    pub fn resolve_group_by(&self, group: GroupId, decision: &GroupDecision) -> Result<()> {
        let _lock = self.locks.acquire(Key::Group(group.0))?;
        self.resolve(group.0, Some(decision))
    }

    /// Deletes what this node has of a group, committed or not, and the members of these ids.
    pub fn delete_group_here(&self, group: GroupId, members: &[String]) -> Result<()> {
        let _lock = self.locks.acquire(Key::Group(group.0))?;
        let states = [
            SnapshotState::Ready,
            SnapshotState::Cut,
            SnapshotState::Preparing,
        ];
        let found = states
            .into_iter()
            .flat_map(|state| self.members_of(group.0, state));
        let found: Vec<String> = found.map(|member| id_of(&member)).collect();
        self.delete_members(group.0, found.iter().chain(members))
    }

    /// Settles one whose lock is held. An error if that can't be decided here and now.
    pub(in crate::operation) fn resolve_group(&self, group: Uuid) -> Result<()> {
        self.resolve(group, None)
    }

    fn resolve(&self, group: Uuid, decision: Option<&GroupDecision>) -> Result<()> {
        // No caller has ever counted on these, whatever becomes of the others.
        for (pool, record) in self.members_of(group, SnapshotState::Preparing) {
            let ended = pool.backend.delete_unanswered_snapshot(record.uuid);
            ended.map_err(Error::into_indeterminate)?;
        }
        for (pool, mut record) in self.members_of(group, SnapshotState::Cut) {
            match self.is_committed(&record, decision)? {
                Some(true) => {
                    record.state = SnapshotState::Ready;
                    let committed = pool.backend.update_snapshot(&record);
                    committed.map_err(Error::into_indeterminate)?;
                }
                Some(false) => {
                    let ended = pool.backend.delete_snapshot(record.uuid);
                    ended.map_err(Error::into_indeterminate)?;
                }
                None => {}
            }
        }
        Ok(())
    }

    /// Settles the group of a member, whose lock is held, and looks whether no member is in doubt
    /// any more on any node; `false` where this node alone can't know. An error if one of its own
    /// members can't be looked at.
    pub(in crate::operation) fn is_settled(
        &self,
        record: &SnapshotRecord,
        group: &GroupMembership,
    ) -> Result<bool> {
        let unsettled = |error: Error| Error::Unsettled {
            group: group.id.to_string(),
            reason: chain(&error),
        };
        let mut all_seen = true;
        for member in &group.members {
            match self.owner(member) {
                Ok(PoolLookup::Pool(pool, id)) => {
                    pool.backend.snapshot(id.uuid).map_err(unsettled)?;
                }
                Ok(PoolLookup::Unknown) => all_seen &= self.made_alone(record),
                Err(Error::Unreachable { .. }) => all_seen = false,
                Err(error) => return Err(unsettled(error)),
            }
        }
        match self.resolve_group(group.id) {
            Ok(()) => {}
            // The first member is another node's.
            Err(Error::Unreachable { .. }) => all_seen = false,
            Err(error) => return Err(unsettled(error)),
        }
        Ok(all_seen && self.members_of(group.id, SnapshotState::Cut).is_empty())
    }

    /// Whether a member that is cut is committed: by the first one's record if that is on a pool of
    /// this node, else by the verdict; `None` where neither decides about its attempt. A pool that
    /// this node has forgotten may be another node's by now: what is on it is not gone.
    fn is_committed(
        &self,
        record: &SnapshotRecord,
        decision: Option<&GroupDecision>,
    ) -> Result<Option<bool>> {
        let lead = record.group.as_ref().and_then(|of| of.members.first());
        let owner = lead.map_or(Ok(PoolLookup::Unknown), |lead| self.owner(lead));
        match (owner, decision) {
            (Ok(PoolLookup::Pool(pool, lead)), _) => {
                let lead = pool.backend.snapshot(lead.uuid)?;
                let lead = lead.filter(|lead| lead.state == SnapshotState::Ready);
                Ok(Some(
                    lead.is_some_and(|lead| lead.attempt == record.attempt),
                ))
            }
            // Without a router no other node can have the first member.
            (Ok(PoolLookup::Unknown), _) if self.made_alone(record) => Ok(Some(false)),
            (Ok(PoolLookup::Unknown) | Err(Error::Unreachable { .. }), Some(decision)) => {
                if decision.commit == Some(record.attempt) {
                    return Ok(Some(true));
                }
                Ok(decision.undo.contains(&record.attempt).then_some(false))
            }
            (Ok(PoolLookup::Unknown), None) => Ok(None),
            (Err(error), _) => Err(error),
        }
    }

    /// Whether a member is of a group that this node has made without a router: the group's id is
    /// made of the home and the name then.
    fn made_alone(&self, record: &SnapshotRecord) -> bool {
        let alone = GroupId::of_name(self.home(), &record.name).0;
        record.group.as_ref().is_some_and(|of| of.id == alone)
    }
}
