//! The end of doubt about groups: what a crash of the node, of the router, or of the network
//! between them has left of a try is committed or deleted, never joined with another try.
//!
//! The group's first member alone decides: once it's `ready` all of its try are committed, and
//! while it isn't, none is. Where it's on this node, this node settles by itself, at start and
//! from time to time. Where it's another node's, the router asks there, and says so here.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use uuid::Uuid;

use super::group::Member;
use super::lock::{Guard, Key};
use super::{Driver, PoolState, Snapshot};
use crate::error::{Error, Result, chain};
use crate::model::{GroupId, SnapshotId};
use crate::record::{GroupMembership, SnapshotRecord, SnapshotState};

/// How often somebody who only looks at a group waits for others who only look, and how long each
/// time.
const LOOKS: u32 = 10;
const LOOK: Duration = Duration::from_millis(5);

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
pub struct Verdict {
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
        for member in members {
            // Served, or not this node's: that is the whole look at one which isn't among them.
            if let super::pool::Owner::Pool(pool, id) = self.owner(member)? {
                pool.backend.snapshot(id.uuid)?;
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
            unseen: self.unseen(),
        })
    }

    /// The lock of a group; another look has it for a moment only.
    fn lock_for_a_look(&self, group: GroupId) -> Result<Guard> {
        for _ in 1..LOOKS {
            if let Ok(lock) = self.locks.acquire(Key::Group(group.0)) {
                return Ok(lock);
            }
            self.host.pause(LOOK);
        }
        self.locks.acquire(Key::Group(group.0))
    }

    /// Why not all snapshots of this node can be seen now.
    fn unseen(&self) -> Option<String> {
        self.states().into_iter().find_map(|state| match state {
            PoolState::Serving(_) => None,
            PoolState::Refused {
                definition, why, ..
            } => Some(format!("pool {}: {why}", definition.name)),
        })
    }

    /// Ends the doubt by a verdict of who has seen the group's first member. Where that is this
    /// node's, it's looked at again, and counts more. Done again, it changes nothing.
    pub fn settle_group_by(&self, group: GroupId, verdict: &Verdict) -> Result<()> {
        let _lock = self.locks.acquire(Key::Group(group.0))?;
        self.settle(group.0, Some(verdict))
    }

    /// Deletes what this node has of a group, committed or not, and the members of these ids.
    pub fn end_group_here(&self, group: GroupId, members: &[String]) -> Result<()> {
        let _lock = self.locks.acquire(Key::Group(group.0))?;
        let states = [
            SnapshotState::Ready,
            SnapshotState::Cut,
            SnapshotState::Preparing,
        ];
        let found = states
            .into_iter()
            .flat_map(|state| self.members_of(group.0, state));
        let id = |(pool, record): Member| SnapshotId {
            pool: pool.id(),
            uuid: record.uuid,
        };
        let found: Vec<String> = found.map(|member| id(member).to_string()).collect();
        self.end_members(group.0, found.iter().chain(members))
    }

    /// Settles what a crash has left, one group after another: at start, and when a pool has come
    /// back. Groups that are being made are left alone, and those that another node decides about.
    pub(super) fn settle_groups(&self) {
        let mut groups = BTreeSet::new();
        for pool in self.serving() {
            let records = pool.backend.unready_snapshots();
            groups.extend(records.into_iter().filter_map(|one| Some(one.group?.id)));
        }
        for group in groups {
            let Ok(_lock) = self.locks.acquire(Key::Group(group)) else {
                continue;
            };
            match self.settle_group(group) {
                Ok(()) => {}
                Err(error @ Error::Unreachable { .. }) => {
                    tracing::debug!(%group, error = %chain(&error), "the first member of a group snapshot decides about it, and isn't here");
                }
                Err(error) => {
                    tracing::error!(%group, error = %chain(&error), "can't settle a group snapshot that a crash has left");
                }
            }
        }
    }

    /// Settles one whose lock is held. An error if that can't be decided here and now.
    pub(super) fn settle_group(&self, group: Uuid) -> Result<()> {
        self.settle(group, None)
    }

    fn settle(&self, group: Uuid, verdict: Option<&Verdict>) -> Result<()> {
        for (pool, mut record) in self.members_of(group, SnapshotState::Cut) {
            match self.is_committed(&record, verdict)? {
                Some(true) => {
                    record.state = SnapshotState::Ready;
                    pool.backend.update_snapshot(&record)?;
                }
                Some(false) => {
                    let ended = pool.backend.delete_snapshot(record.uuid);
                    ended.map_err(Error::unseen)?;
                }
                None => {}
            }
        }
        // Nobody has ever counted on these.
        for (pool, record) in self.members_of(group, SnapshotState::Preparing) {
            let ended = pool.backend.delete_snapshot(record.uuid);
            ended.map_err(Error::unseen)?;
        }
        Ok(())
    }

    /// Whether a member that is cut is committed: by the first one's record if it can be seen from
    /// here, else by the verdict; `None` where that says nothing of its try.
    fn is_committed(
        &self,
        record: &SnapshotRecord,
        verdict: Option<&Verdict>,
    ) -> Result<Option<bool>> {
        let lead = record.group.as_ref().and_then(|of| of.members.first());
        match (lead.map(|lead| self.find_snapshot(lead)), verdict) {
            (Some(Ok((_, _, lead))), _) => Ok(Some(lead.attempt == record.attempt)),
            (Some(Err(Error::NotFound { .. })) | None, _) => Ok(Some(false)),
            (Some(Err(Error::Unreachable { .. })), Some(verdict)) => {
                if verdict.commit == Some(record.attempt) {
                    return Ok(Some(true));
                }
                Ok(verdict.undo.contains(&record.attempt).then_some(false))
            }
            (Some(Err(error)), _) => Err(error),
        }
    }
}
