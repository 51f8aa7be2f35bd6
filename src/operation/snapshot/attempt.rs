//! The part of one node in one attempt of a cut, called a participation: its members are prepared, kept,
//! and committed or undone.
//!
//! An attempt locks all its volumes, so that no call stages, publishes, expands or deletes one
//! while it runs. The members of a participation are not listed until they are committed. In role
//! `all` this process has the only one. In a cluster the router coordinates those of several nodes, each
//! by a stream ([`super::session`]).

use std::time::Duration;

use super::copy::no_sharing;
use super::cut::used;
use super::members::by_pool;
use super::plan::PreparedSnapshot;
use super::source::Source;
use super::thick_space_watchdog::{ThickCopy, ThickSpaceWatchdog};
use uuid::Uuid;

use crate::backend::Image;
use crate::cut::coordinator::{self, Used};
use crate::cut::{Attempt, CutMember, Outcome, Use};
use crate::error::{Error, Result};
use crate::model::size::image_bytes;
use crate::model::{Allocation, Level, SnapshotId, SnapshotParameters, SnapshotSpacePolicy};
use crate::operation::Snapshots;
use crate::operation::lock::{Key, LockGuard};
use crate::operation::pools::capacity::{admit_snapshot, check_guarantees, check_setup};
use crate::record::{Base, SnapshotRecord, SnapshotState};

/// Why a raw member of a group has level `crash`: nothing has flushed the caches of its writers.
const RAW_IN_GROUP: &str = "common moment, device cache not flushed";

/// The members of one node in one attempt. Their volumes are locked until all members are kept.
pub(in crate::operation) struct Participation {
    pub(in crate::operation) made: Vec<PreparedSnapshot>,
    pub(in crate::operation) members: Vec<CutMember>,
    locks: Vec<LockGuard>,
    /// Locks of the members of a group, so that no call deletes one before the group is created.
    _members: Vec<LockGuard>,
    /// Watches the copies of thick volumes until these have blocks of their own.
    watchdog: ThickSpaceWatchdog,
}

/// The committed members of an attempt.
pub(in crate::operation) struct CommittedAttempt {
    pub(in crate::operation) snapshots: Vec<PreparedSnapshot>,
    /// From the first freeze to the last thaw, if anything was frozen.
    pub(in crate::operation) frozen: Option<Duration>,
}

/// The properties of a cut that was proven to be good. They are the same for all its members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedCut {
    /// Nanoseconds since 1970.
    pub cut_at: u64,
    /// The level that was reached.
    pub level: Level,
    /// Why the level is not higher.
    pub reason: String,
}

impl From<Outcome> for VerifiedCut {
    fn from(outcome: Outcome) -> VerifiedCut {
        VerifiedCut {
            cut_at: outcome.cut_at,
            level: outcome.level,
            reason: outcome.reason,
        }
    }
}

impl Participation {
    /// The members in use.
    pub(in crate::operation) fn used(&self) -> Vec<Used> {
        self.members.iter().filter_map(used).collect()
    }

    /// The member whose record decides about all others: in a group the first member, which may be
    /// on another node.
    fn lead(&self) -> Option<usize> {
        let leads = |one: &PreparedSnapshot| match &one.record.group {
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
        let copy = |(one, member): (&PreparedSnapshot, &CutMember)| ThickCopy {
            pool: one.pool.clone(),
            image: Image::Snapshot(one.record.uuid),
            bytes: image_bytes(one.record.size),
            emptied: member.emptied.clone(),
        };
        thick.map(copy).collect()
    }

    /// Whether this node alone decides about the commit of the attempt.
    pub(in crate::operation) fn decides(&self) -> bool {
        self.lead().is_some()
    }
}

impl Snapshots {
    /// Locks the volumes and prepares a member of each, with the record from `plan`. On an error
    /// nothing is left, or the error is [`Error::RollbackFailed`]. A crash leaves members that the
    /// next start deletes.
    pub(in crate::operation) fn begin_participation(
        &self,
        (volume_ids, move_uid): (&[String], Option<Uuid>),
        level: Level,
        parameters: &SnapshotParameters,
        plan: impl Fn(&Source) -> SnapshotRecord,
    ) -> Result<Participation> {
        let (locks, sources) = self.lock_sources(volume_ids, move_uid)?;
        let copies = |source: &&Source| !source.pool.backend.facts.shares_blocks;
        if let Some(source) = sources.iter().find(copies) {
            return Err(no_sharing(&source.pool, &source.text));
        }
        for source in &sources {
            check_setup(&source.pool)?;
        }
        let uses = self.uses_of(&sources)?;
        let planned = sources.iter().map(plan).map(|record| SnapshotRecord {
            base: parameters.keep_base.then_some(Base::Keep),
            for_clone: parameters.for_clone,
            ..record
        });
        let planned: Vec<SnapshotRecord> = planned.collect();
        // For a single snapshot, the caller acquired this lock before it checked whether the
        // snapshot exists.
        let grouped = planned.iter().filter(|one| one.group.is_some());
        let grouped = grouped.map(|one| self.pools.locks.acquire(Key::Snapshot(one.uuid)));
        let mut participation = Participation {
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
        // What an earlier attempt left is deleted only after this check, so an error here is not
        // final.
        let members = self.members(&sources, &uses, &copies);
        participation.members = members.map_err(Error::into_indeterminate)?;
        coordinator::admit(&participation.used(), level, parameters)?;
        if let Err(first) = self.prepare_participation(&mut participation, &sources, planned) {
            return Err(self.undo_participation(&mut participation, first));
        }
        match ThickSpaceWatchdog::start(participation.of_thick()) {
            Ok(watch) => participation.watchdog = watch,
            Err(first) => return Err(self.undo_participation(&mut participation, first)),
        }
        Ok(participation)
    }

    /// Prepares the members, after all of them were admitted: their records are written together. After
    /// an error the caller undoes the participation.
    fn prepare_participation(
        &self,
        participation: &mut Participation,
        sources: &[Source],
        planned: Vec<SnapshotRecord>,
    ) -> Result<()> {
        let mut admitted = Vec::new();
        for (source, record) in sources.iter().zip(planned) {
            let pool = source.pool.clone();
            // A snapshot that an earlier attempt left because its cleanup failed was never reported
            // as created.
            let ended = pool.backend.snapshots.delete_unanswered(record.uuid);
            ended.map_err(Error::into_indeterminate)?;
            admitted.push(self.before_bases(&pool, || {
                let admit = |space: &_| admit_snapshot(&pool, space, &record);
                pool.backend.admit_snapshot(&record, &admit)
            })?);
            participation.made.push(PreparedSnapshot { pool, record });
        }
        let pools = participation.made.iter().map(|one| one.pool.clone());
        let mut begun = by_pool(pools.zip(admitted)).into_iter();
        begun.try_for_each(|(pool, records)| pool.backend.begin_snapshots(&records))
    }

    /// Cuts, keeps and commits the members of an attempt that is on this node only. On an error no
    /// member is left, or the error is [`Error::RollbackFailed`].
    pub(in crate::operation) fn make(
        &self,
        mut participation: Participation,
        now: &Attempt<'_>,
        parameters: &SnapshotParameters,
    ) -> Result<CommittedAttempt> {
        let cut = self.cut(&participation.members, now, parameters);
        let kept = cut.and_then(|outcome| {
            let frozen = outcome.stats.freeze;
            self.keep_participation(&mut participation, &outcome.into())?;
            Ok(frozen)
        });
        let frozen = match kept {
            Ok(frozen) => frozen,
            Err(first) => return Err(self.undo_participation(&mut participation, first)),
        };
        self.commit_participation(&mut participation)?;
        Ok(CommittedAttempt {
            snapshots: participation.made,
            frozen,
        })
    }

    /// Makes the members durable, the image before the record, and unlocks the volumes. A single
    /// snapshot stays `preparing` until it is committed; members of a group are `cut` from now on.
    /// After an error the caller undoes the participation.
    pub(in crate::operation) fn keep_participation(
        &self,
        participation: &mut Participation,
        kept: &VerifiedCut,
    ) -> Result<()> {
        // Checked again, because the volumes were written between the admission of the copies and
        // the cut.
        let mut judged = Vec::new();
        for pool in participation.made.iter().map(|one| &one.pool) {
            if pool.snapshots() == SnapshotSpacePolicy::Reserved && !judged.contains(&pool.id()) {
                self.before_bases(pool, || check_guarantees(pool, &pool.backend.space()?))?;
                judged.push(pool.id());
            }
        }
        let each = participation.made.iter();
        for (pool, uuids) in by_pool(each.map(|one| (one.pool.clone(), one.record.uuid))) {
            pool.backend.snapshots.sync_images(&uuids)?;
        }
        for (one, member) in participation.made.iter_mut().zip(&participation.members) {
            one.record.cut_at = kept.cut_at;
            one.record.level = kept.level;
            one.record.reason = kept.reason.clone();
            if one.record.group.is_some() {
                if member.in_use == Use::Raw {
                    one.record.level = Level::Crash;
                    one.record.reason = RAW_IN_GROUP.into();
                }
                one.record.state = SnapshotState::Cut;
            }
        }
        update(
            participation
                .made
                .iter()
                .filter(|one| one.record.group.is_some()),
        )?;
        // The rest takes long for thick volumes, and is not affected by what other calls do to the
        // volumes.
        participation.locks.clear();
        let mut thick = participation.watchdog.copies().iter();
        let unshared = thick.try_for_each(ThickCopy::unshare);
        // This precedes the commit: a copy that the watchdog has emptied must not be committed.
        participation.watchdog.stop().and(unshared)
    }

    /// Commits the members. In a group the record of the first member decides, so that after a
    /// crash the others are all rolled forward with it, or all rolled back. On an error before that
    /// record is written, no member of this node is left.
    pub(in crate::operation) fn commit_participation(
        &self,
        participation: &mut Participation,
    ) -> Result<()> {
        let lead = participation.lead();
        for one in &mut participation.made {
            one.record.state = SnapshotState::Ready;
        }
        if let Err(first) = update(lead.and_then(|at| participation.made.get(at))) {
            return Err(self.undo_participation(participation, first));
        }
        // The attempt is committed from here on: a repeat of the call or the next start completes
        // what fails.
        let others = participation.made.iter().enumerate();
        let others = others.filter(|(at, _)| Some(*at) != lead);
        update(others.map(|(_, one)| one)).map_err(|first| Error::RollbackFailed {
            first: Box::new(first),
            undo: "at least one member of the group is not committed yet".into(),
        })
    }

    /// Deletes the members of a failed attempt.
    pub(in crate::operation) fn undo_participation(
        &self,
        participation: &mut Participation,
        first: Error,
    ) -> Error {
        let first = match (participation.watchdog.stop(), first) {
            // The attempt was ended for another reason, and is not reported as a lack of space.
            (_, Error::Stopping) => Error::Stopping,
            // If the watchdog has emptied a copy, any other failure is a consequence of that.
            (Err(why), _) => why,
            (Ok(()), first) => first,
        };
        // The first member decides about its group. If it cannot be deleted, it may be committed,
        // and the other members must follow it.
        self.undo_snapshots(&participation.made, participation.lead(), first)
    }
}

/// Replaces the records of members on disk. After an error or a crash, each is the old or the new one.
fn update<'a>(members: impl IntoIterator<Item = &'a PreparedSnapshot>) -> Result<()> {
    let each = members.into_iter();
    let mut pools = by_pool(each.map(|one| (one.pool.clone(), &one.record))).into_iter();
    pools.try_for_each(|(pool, records)| pool.backend.update_snapshots(&records))
}
