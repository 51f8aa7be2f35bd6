//! Resolves groups that are in doubt: what a crash of the node or the router, or a failure of the
//! network between them, left of an attempt is committed or deleted, and never combined with
//! another attempt.
//!
//! The first member of the group alone decides: once it is `ready`, all members of its attempt are
//! committed, and before that none is. If it is on this node, this node resolves the group by
//! itself, at the start and periodically. If it is on another node, the router asks that node and
//! sends the decision to this one.

use std::collections::BTreeMap;
use std::time::Duration;

use uuid::Uuid;

use super::members::{Member, by_pool, id_of};
use crate::error::{Error, Result, chain};
use crate::model::GroupId;
use crate::operation::lock::{Key, LockGuard};
use crate::operation::pools::lookup::PoolLookup;
use crate::operation::{Snapshot, Snapshots};
use crate::record::{GroupMembership, SnapshotRecord, SnapshotState};

/// How often, and at which interval, a call that only reads a group tries to get its lock, which
/// other such calls may hold.
const LOCK_TRIES: u32 = 10;
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// A member of a group, in any state.
#[derive(Clone, Debug)]
pub struct GroupMember {
    /// The snapshot as it is reported once it is committed.
    pub snapshot: Snapshot,
    /// The attempt that created it.
    pub attempt: Uuid,
    pub state: SnapshotState,
}

/// The part of a group that is on this node.
#[derive(Clone, Debug)]
pub struct GroupHere {
    /// Another call for the group is running, so this may be outdated.
    pub busy: bool,
    /// Its members in pools that are served.
    pub members: Vec<GroupMember>,
    /// The whole group, from the record of a member that is cut or committed.
    pub membership: Option<GroupMembership>,
    /// Why this node may have further members that are not in the list.
    pub unseen: Option<String>,
}

/// The decision about members that are cut and not committed.
#[derive(Clone, Debug, Default)]
pub struct GroupDecision {
    /// The attempt that is committed.
    pub commit: Option<Uuid>,
    /// Attempts that are not committed, and whose members are deleted. Members of an attempt that
    /// the coordinator has not seen stay as they are: it is younger than the decision.
    pub undo: Vec<Uuid>,
}

impl Snapshots {
    /// The part of a group that is on this node. The records of `members` are read by their IDs,
    /// and it is an error if one cannot be read. So a member that is not in the result does not
    /// exist here.
    pub fn group_here(&self, group: GroupId, members: &[String]) -> Result<GroupHere> {
        let lock = self.lock_to_read(group);
        // These checks precede the listing. In the other order, a record that becomes readable in
        // between would be missed: neither listed nor reported as unreadable. The pool of each of
        // `members` must be served or belong to another node; then a member that is not listed does
        // not exist here.
        let unseen = self.check_all_readable().err().map(|error| chain(&error));
        self.read_each(members)?;
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
        if found.is_empty() {
            self.sync_deleted()?;
        }
        let known = |state: SnapshotState| {
            let mut records = found.values().map(|(_, record)| record);
            records.find(|record| record.state == state)?.group.clone()
        };
        let membership = known(SnapshotState::Ready).or_else(|| known(SnapshotState::Cut));
        let group_member = |(pool, record): &Member| GroupMember {
            snapshot: self.pools.snapshot(pool, record),
            attempt: record.attempt,
            state: record.state,
        };
        Ok(GroupHere {
            busy: lock.is_err(),
            members: found.values().map(group_member).collect(),
            membership,
            unseen,
        })
    }

    /// Acquires the lock of a group. Another call that only reads the group holds it for a moment.
    fn lock_to_read(&self, group: GroupId) -> Result<LockGuard> {
        for _ in 1..LOCK_TRIES {
            if let Ok(lock) = self.pools.locks.acquire(Key::Group(group.0)) {
                return Ok(lock);
            }
            self.host.pause(LOCK_RETRY_INTERVAL);
        }
        self.pools.locks.acquire(Key::Group(group.0))
    }

    /// Resolves a group by the decision of a coordinator that has read the first member. If the
    /// first member is on this node, its record is read again and has priority. A repeat changes
    /// nothing.
    pub fn resolve_group_by(&self, group: GroupId, decision: &GroupDecision) -> Result<()> {
        let _lock = self.pools.locks.acquire(Key::Group(group.0))?;
        self.resolve(group.0, Some(decision))
    }

    /// Deletes the members of a group on this node, committed or not, and the members with these
    /// IDs.
    pub fn delete_group_here(&self, group: GroupId, members: &[String]) -> Result<()> {
        let _lock = self.pools.locks.acquire(Key::Group(group.0))?;
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

    /// Resolves a group whose lock the caller holds. An error if that cannot be decided on this
    /// node now.
    pub(in crate::operation) fn resolve_group(&self, group: Uuid) -> Result<()> {
        self.resolve(group, None)
    }

    fn resolve(&self, group: Uuid, decision: Option<&GroupDecision>) -> Result<()> {
        // No caller has received these, so they are deleted whatever happens to the other members.
        let unanswered = self.members_of(group, SnapshotState::Preparing).into_iter();
        for (pool, uuids) in by_pool(unanswered.map(|(pool, record)| (pool, record.uuid))) {
            let ended = pool.backend.snapshots.delete_all_unanswered(&uuids);
            ended.map_err(Error::into_indeterminate)?;
        }
        let (mut committed, mut undone, mut decided) = (Vec::new(), Vec::new(), Ok(()));
        for (pool, mut record) in self.members_of(group, SnapshotState::Cut) {
            match self.is_committed(&record, decision) {
                Ok(Some(true)) => {
                    record.state = SnapshotState::Ready;
                    committed.push((pool, record));
                }
                Ok(Some(false)) => undone.push((pool, record.uuid)),
                Ok(None) => {}
                Err(error) => {
                    decided = Err(error);
                    break;
                }
            }
        }
        // The record of the first member is not among them, so their order does not matter.
        for (pool, records) in by_pool(committed) {
            let records: Vec<&SnapshotRecord> = records.iter().collect();
            let updated = pool.backend.update_snapshots(&records);
            updated.map_err(Error::into_indeterminate)?;
        }
        for (pool, uuids) in by_pool(undone) {
            let ended = pool.backend.snapshots.delete_all(&uuids);
            ended.map_err(Error::into_indeterminate)?;
        }
        decided
    }

    /// Resolves the group of a member, and checks that none of its members on any node is in doubt.
    /// The caller holds the lock of the group. Returns `false` if this node alone cannot know that.
    /// It is an error if a member of this node cannot be read.
    pub(in crate::operation) fn resolve_and_check_whole(
        &self,
        record: &SnapshotRecord,
        group: &GroupMembership,
    ) -> Result<bool> {
        let unsettled = |error: Error| Error::GroupInDoubt {
            group: group.id.to_string(),
            reason: chain(&error),
        };
        let mut is_all_readable = true;
        for member in &group.members {
            match self.pools.owner(member) {
                Ok(PoolLookup::Pool(pool, id)) => {
                    pool.backend.snapshots.get(id.uuid).map_err(unsettled)?;
                }
                Ok(PoolLookup::Unknown) => {
                    is_all_readable &= self.is_created_without_router(record);
                }
                Err(Error::Unreachable { .. }) => is_all_readable = false,
                Err(error) => return Err(unsettled(error)),
            }
        }
        match self.resolve_group(group.id) {
            Ok(()) => {}
            // The first member is on another node.
            Err(Error::Unreachable { .. }) => is_all_readable = false,
            Err(error) => return Err(unsettled(error)),
        }
        Ok(is_all_readable && self.members_of(group.id, SnapshotState::Cut).is_empty())
    }

    /// Whether the attempt of a member that is cut is committed: by the record of the first member
    /// if that is in a pool of this node, otherwise by the decision; `None` if neither decides
    /// about this attempt. A pool that this node has forgotten may belong to another node by now,
    /// so what is in it is not gone.
    fn is_committed(
        &self,
        record: &SnapshotRecord,
        decision: Option<&GroupDecision>,
    ) -> Result<Option<bool>> {
        let lead = record.group.as_ref().and_then(|of| of.members.first());
        let owner = lead.map_or(Ok(PoolLookup::Unknown), |lead| self.pools.owner(lead));
        match (owner, decision) {
            (Ok(PoolLookup::Pool(pool, lead)), _) => {
                let lead = pool.backend.snapshots.get(lead.uuid)?;
                let lead = lead.filter(|lead| lead.state == SnapshotState::Ready);
                Ok(Some(
                    lead.is_some_and(|lead| lead.attempt == record.attempt),
                ))
            }
            // Without a router the first member cannot be on another node.
            (Ok(PoolLookup::Unknown), _) if self.is_created_without_router(record) => {
                Ok(Some(false))
            }
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

    /// Whether a member belongs to a group that this node created without a router. Only then is
    /// the ID of the group derived from this node's home and the name.
    fn is_created_without_router(&self, record: &SnapshotRecord) -> bool {
        let alone = GroupId::of_name(self.pools.home(), &record.name).0;
        record.group.as_ref().is_some_and(|of| of.id == alone)
    }
}
