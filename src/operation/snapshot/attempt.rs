//! One node's share in one try of a cut: its members prepared, kept, committed, or undone.
//!
//! A try takes the locks of all its volumes, so that nobody stages, publishes, grows or deletes
//! one meanwhile. What a share has made is in no list until it's committed. In role `all` the one
//! share is cut by this process; in a cluster the router coordinates several, each driven by a
//! stream ([`super::session`]).

use super::copy::no_sharing;
use super::cut::used;
use super::plan::Prepared;
use super::source::Source;
use super::thick_space_watchdog::{ThickCopy, ThickSpaceWatchdog};
use crate::backend::Image;
use crate::cut::coordinator::{self, Used};
use crate::cut::{Attempt, CutMember, Outcome};
use crate::error::{Error, Result};
use crate::model::size::image_bytes;
use crate::model::{Allocation, Level, SnapshotId, SnapshotParameters, SnapshotRoom};
use crate::operation::Driver;
use crate::operation::lock::{Key, LockGuard};
use crate::operation::pools::capacity::{admit_snapshot, check_promises};
use crate::record::{SnapshotRecord, SnapshotState};

/// Members of one node and one try. Their volumes are locked until all are kept.
pub(in crate::operation) struct Share {
    pub(in crate::operation) made: Vec<Prepared>,
    pub(in crate::operation) members: Vec<CutMember>,
    locks: Vec<LockGuard>,
    /// Of a group's members, which nobody deletes before it's made.
    _members: Vec<LockGuard>,
    /// Of thick volumes' copies, until these have blocks of their own.
    watchdog: ThickSpaceWatchdog,
}

/// What is known of a cut that was proven good: the same for all its members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Nanoseconds since 1970.
    pub cut_at: u64,
    /// What it reached.
    pub level: Level,
    /// Why not more.
    pub reason: String,
}

impl From<Outcome> for Kept {
    fn from(outcome: Outcome) -> Kept {
        Kept {
            cut_at: outcome.cut_at,
            level: outcome.level,
            reason: outcome.reason,
        }
    }
}

impl Share {
    /// Its members that somebody uses.
    pub(in crate::operation) fn used(&self) -> Vec<Used> {
        self.members.iter().filter_map(used).collect()
    }

    /// The one that decides about all others: of a group its first member, which may be another
    /// node's.
    fn lead(&self) -> Option<usize> {
        let leads = |one: &Prepared| match &one.record.group {
            None => true,
            Some(group) => {
                let pool = one.pool.id();
                let uuid = one.record.uuid;
                group.members.first() == Some(&SnapshotId { pool, uuid }.to_string())
            }
        };
        self.made.iter().position(leads)
    }

    /// The copies of its thick volumes.
    fn of_thick(&self) -> Vec<ThickCopy> {
        let made = self.made.iter().zip(&self.members);
        let thick = made.filter(|(one, _)| one.record.allocation == Allocation::Thick);
        let copy = |(one, member): (&Prepared, &CutMember)| ThickCopy {
            pool: one.pool.clone(),
            image: Image::Snapshot(one.record.uuid),
            bytes: image_bytes(one.record.size),
            emptied: member.emptied.clone(),
        };
        thick.map(copy).collect()
    }

    /// Whether this node alone decides whether the try is committed.
    pub(in crate::operation) fn decides(&self) -> bool {
        self.lead().is_some()
    }
}

impl Driver {
    /// Locks the volumes, and prepares a member of each, as `plan` has it. On an error nothing is
    /// left, or it's [`Error::RollbackFailed`]; a crash leaves members that the next start ends.
    pub(in crate::operation) fn begin_share(
        &self,
        volume_ids: &[String],
        level: Level,
        parameters: &SnapshotParameters,
        plan: impl Fn(&Source) -> SnapshotRecord,
    ) -> Result<Share> {
        let (locks, sources) = self.lock_sources(volume_ids)?;
        let copies = |source: &&Source| !source.pool.backend.shares_blocks();
        if let Some(source) = sources.iter().find(copies) {
            return Err(no_sharing(&source.pool, &source.text));
        }
        let uses = self.uses_of(&sources)?;
        let planned: Vec<SnapshotRecord> = sources.iter().map(plan).collect();
        // A single one's caller has its lock, from before the look whether there is one.
        let grouped = planned.iter().filter(|one| one.group.is_some());
        let grouped = grouped.map(|one| self.locks.acquire(Key::Snapshot(one.uuid)));
        let mut share = Share {
            made: Vec::new(),
            members: Vec::new(),
            locks,
            _members: grouped.collect::<Result<_>>()?,
            watchdog: ThickSpaceWatchdog::default(),
        };
        let copies: Vec<Image> = planned
            .iter()
            .map(|one| Image::Snapshot(one.uuid))
            .collect();
        // What an earlier try has left is ended after this look.
        let members = self.members(&sources, &uses, &copies);
        share.members = members.map_err(Error::into_indeterminate)?;
        coordinator::admit(&share.used(), level, parameters)?;
        for (source, record) in sources.iter().zip(planned) {
            if let Err(first) = self.prepare_snapshot(&source.pool, &record) {
                return Err(self.undo_share(&mut share, first));
            }
            let pool = source.pool.clone();
            share.made.push(Prepared { pool, record });
        }
        match ThickSpaceWatchdog::watch(share.of_thick()) {
            Ok(watch) => share.watchdog = watch,
            Err(first) => return Err(self.undo_share(&mut share, first)),
        }
        Ok(share)
    }

    fn prepare_snapshot(
        &self,
        pool: &crate::operation::Pool,
        record: &SnapshotRecord,
    ) -> Result<()> {
        // One that an earlier try has left, whose clean-up failed: it was never answered.
        let ended = pool.backend.delete_unanswered_snapshot(record.uuid);
        ended.map_err(Error::into_indeterminate)?;
        pool.backend
            .prepare_snapshot(record, &|space| admit_snapshot(pool, space, record))
    }

    /// The rest of a try of which this process has all members: cut, kept, committed. On an error
    /// none is left, or it's [`Error::RollbackFailed`].
    pub(in crate::operation) fn make(
        &self,
        mut share: Share,
        now: &Attempt<'_>,
        parameters: &SnapshotParameters,
    ) -> Result<Vec<Prepared>> {
        let cut = self.cut(&share.members, now, parameters);
        let kept = cut.and_then(|outcome| self.keep_share(&mut share, &outcome.into()));
        if let Err(first) = kept {
            return Err(self.undo_share(&mut share, first));
        }
        self.commit_share(&mut share)?;
        Ok(share.made)
    }

    /// Makes what was cut durable, image first, and gives the volumes back. A single one stays
    /// `preparing` until it's committed; members of a group are `cut` from now on. After an error
    /// the caller undoes it.
    pub(in crate::operation) fn keep_share(&self, share: &mut Share, kept: &Kept) -> Result<()> {
        // Since it was admitted, its volumes were written until the cut.
        let mut judged = Vec::new();
        for pool in share.made.iter().map(|one| &one.pool) {
            if pool.snapshots() == SnapshotRoom::Reserved && !judged.contains(&pool.id()) {
                check_promises(pool, &pool.backend.space()?)?;
                judged.push(pool.id());
            }
        }
        for one in &mut share.made {
            one.pool.backend.sync_snapshot(one.record.uuid)?;
            one.record.cut_at = kept.cut_at;
            one.record.level = kept.level;
            one.record.reason = kept.reason.clone();
            if one.record.group.is_some() {
                one.record.state = SnapshotState::Cut;
                one.pool.backend.update_snapshot(&one.record)?;
            }
        }
        // What follows takes long for thick volumes, and doesn't mind what is done to them.
        share.locks.clear();
        let mut thick = share.watchdog.copies().iter();
        let unshared = thick.try_for_each(ThickCopy::unshare);
        // Before anything is committed; what has given way isn't.
        share.watchdog.stop().and(unshared)
    }

    /// Commits: the first member's record decides for a group, so that after a crash the others
    /// are rolled forward with it, or all back. On an error before that none of this node is left.
    pub(in crate::operation) fn commit_share(&self, share: &mut Share) -> Result<()> {
        let lead = share.lead();
        if let Some(one) = lead.and_then(|at| share.made.get_mut(at))
            && let Err(first) = ready(one)
        {
            return Err(self.undo_share(share, first));
        }
        // It's committed: what fails is finished by a repeat or the next start.
        let others = share.made.iter_mut().enumerate();
        let mut others = others.filter(|(at, _)| Some(*at) != lead);
        others.try_for_each(|(_, one)| {
            ready(one).map_err(|first| Error::RollbackFailed {
                first: Box::new(first),
                undo: "at least one member of the group is not committed yet".into(),
            })
        })
    }

    /// Deletes what a try has made.
    pub(in crate::operation) fn undo_share(&self, share: &mut Share, first: Error) -> Error {
        let first = match (share.watchdog.stop(), first) {
            // Not for want of room, and not to be told as that.
            (_, Error::Stopping) => Error::Stopping,
            // Whatever has failed, has failed for this.
            (Err(why), _) => why,
            (Ok(()), first) => first,
        };
        // The first one decides about its group: if it can't be deleted it may be committed, and
        // the others are to follow it.
        let lead = share.lead();
        let leads = lead.and_then(|at| share.made.get(at)).into_iter();
        let others = share.made.iter().enumerate();
        let others = others.filter(|(at, _)| Some(*at) != lead);
        self.undo_snapshots(leads.chain(others.map(|(_, one)| one)), first)
    }
}

/// Commits one.
fn ready(one: &mut Prepared) -> Result<()> {
    one.record.state = SnapshotState::Ready;
    one.pool.backend.update_snapshot(&one.record)
}
