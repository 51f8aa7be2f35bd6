//! A participation that is driven by a remote coordinator: the agent's side of a cut across nodes.
//!
//! Each step comes once, in order. If the steps end before the commit, for any reason, everything
//! is thawed and the members are deleted. Members of a group that are kept while another node
//! decides are the exception: they are in doubt until they are resolved.

use uuid::Uuid;

use super::attempt::{Participation, VerifiedCut};
use super::members::{membership, sources};
use super::source::Source;
use crate::cut::AbortHandle;
use crate::cut::coordinator::Used;
use crate::cut::local::Local;
use crate::cut::participant::{CutAnswer, CutStep, Participant};
use crate::error::{Error, Result};
use crate::model::id::NameKind;
use crate::model::{GroupId, Level, SnapshotId, SnapshotParameters, VolumeId};
use crate::operation::lock::{Key, LockGuard};
use crate::operation::{Snapshots, member_of};
use crate::record::SnapshotState;

/// The parameters of a participation.
#[derive(Clone, Debug)]
pub struct BeginParticipation {
    /// The name of the snapshot or group in the request.
    pub name: String,
    /// The group; `None` for a single snapshot.
    pub group: Option<GroupId>,
    /// The ID of this attempt.
    pub attempt: Uuid,
    /// The parameters of the class.
    pub parameters: SnapshotParameters,
    /// The volumes of this node, each once. A single snapshot has one.
    pub volume_ids: Vec<String>,
    /// All volumes of the group, in the order of its request.
    pub all_volumes: Vec<VolumeId>,
    /// The level of this attempt.
    pub level: Level,
    /// As in [`crate::operation::CreateSnapshot::requisite`].
    pub requisite: Vec<String>,
}

/// A step after the participation has begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParticipationStep {
    Cut(CutStep),
    /// Make the members durable, but do not commit them.
    Keep(VerifiedCut),
    /// Commit the members.
    Commit,
}

/// The answer to a step that was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParticipationAnswer {
    /// The members are prepared; these are in use.
    Begun(Vec<Used>),
    /// There is nothing to cut, and the participation has ended: the caller gets its reply from
    /// CreateSnapshot, which returns the snapshot that exists or a copy.
    Plain,
    /// The answer to a step of the cut.
    Cut(CutAnswer),
    /// The answer to [`ParticipationStep::Keep`].
    Kept,
    /// The answer to [`ParticipationStep::Commit`].
    Committed,
}

/// The coordinator that drives a participation.
pub trait Coordinator {
    /// Waits for the next step. Returns `None` once no further step will come.
    fn next(&mut self) -> Option<ParticipationStep>;
    /// Sends an answer. If the coordinator is gone, this does nothing, and the next step is `None`.
    fn send_reply(&mut self, answer: ParticipationAnswer);
    /// Reports that a step has failed, before the members are deleted.
    fn failing(&mut self, _error: &Error) {}
}

impl Snapshots {
    /// Serves a participation to its end. `abort` thaws it from another thread, once it is known that the
    /// coordinator is gone.
    ///
    /// On an error nothing is frozen, and nothing is left (or the error is
    /// [`Error::RollbackFailed`]). After a crash of this process, the next start leaves the same as
    /// an end of the steps at this point.
    pub fn serve_participation(
        &self,
        begin: &BeginParticipation,
        abort: &AbortHandle,
        coordinator: &mut dyn Coordinator,
    ) -> Result<()> {
        let name = match begin.group {
            Some(group) => self.lock_group(group, begin)?,
            None => match self.lock_single(begin)? {
                Some(locks) => locks,
                None => {
                    coordinator.send_reply(ParticipationAnswer::Plain);
                    return Ok(());
                }
            },
        };
        let whole = begin
            .group
            .map(|group| membership(group, &begin.all_volumes, &begin.parameters));
        let plan = |source: &Source| match (begin.group, &whole) {
            (Some(group), Some(whole)) => {
                self.plan_member(source, group, &begin.name, whole, begin.attempt)
            }
            _ => {
                let id = SnapshotId::of_name(source.id.pool, NameKind::Snapshot, &begin.name);
                self.plan_single(source, id, &begin.name, &begin.parameters, begin.attempt)
            }
        };
        let parameters = &begin.parameters;
        let volumes = (&begin.volume_ids[..], None);
        let mut participation = self.begin_participation(volumes, begin.level, parameters, plan)?;
        coordinator.send_reply(ParticipationAnswer::Begun(participation.used()));

        let local =
            Local::new(&self.interfaces, &participation.members, parameters).aborted_by(abort);
        let local = match self.room(&participation.members) {
            Ok(room) => local.with_room(room),
            Err(first) => return Err(self.undo_participation(&mut participation, first)),
        };
        match freeze_and_cut(Box::new(local), coordinator) {
            Ok(Some(kept)) => {
                if self.keep_and_commit(&mut participation, &kept, coordinator)? {
                    // The locks are released first, because the next call of the coordinator needs
                    // them.
                    drop((participation, name));
                    coordinator.send_reply(ParticipationAnswer::Committed);
                }
                Ok(())
            }
            Ok(None) => self.undone(&mut participation),
            Err(first) => Err(self.undo_participation(&mut participation, first)),
        }
    }

    /// The locks that a participation needs.
    pub fn locks_of_participation(&self, begin: &BeginParticipation) -> Vec<Key> {
        let sources = sources(&begin.volume_ids).unwrap_or_default();
        let of_source = |source: VolumeId| {
            let snapshot = match begin.group {
                Some(group) => member_of(group, source),
                None => SnapshotId::of_name(source.pool, NameKind::Snapshot, &begin.name),
            };
            [Key::Volume(source.uuid), Key::Snapshot(snapshot.uuid)]
        };
        let whole = match begin.group {
            Some(group) => Key::Group(group.0),
            None => Key::SnapshotName(begin.name.clone()),
        };
        let mut locks = vec![whole];
        locks.extend(sources.into_iter().flat_map(of_source));
        locks
    }

    /// Locks a group that must not have members on this node yet. The coordinator must first
    /// resolve members that are in doubt, or find those that another attempt has committed.
    fn lock_group(&self, group: GroupId, begin: &BeginParticipation) -> Result<Vec<LockGuard>> {
        let lock = self.pools.locks.acquire(Key::Group(group.0))?;
        // This check precedes the listing. In the other order, a record that becomes readable in
        // between would be missed: neither listed nor reported as unreadable.
        let ours = membership(group, &sources(&begin.volume_ids)?, &begin.parameters);
        let seen = self
            .read_each(&ours.members)
            .and_then(|()| self.check_members_readable(group, &begin.parameters));
        let states = [SnapshotState::Ready, SnapshotState::Cut];
        let mut found = states
            .into_iter()
            .flat_map(|state| self.members_of(group.0, state));
        match found.next() {
            None => seen.map(|()| vec![lock]),
            Some(_) => Err(Error::Pending {
                what: format!("group snapshot {group} (an earlier call has left members)"),
            }),
        }
    }

    /// Locks a single snapshot. Returns `None` if there is nothing to cut.
    fn lock_single(&self, begin: &BeginParticipation) -> Result<Option<Vec<LockGuard>>> {
        let name = &begin.name;
        let by_name = self.pools.locks.acquire(Key::SnapshotName(name.clone()))?;
        let [volume_id] = begin.volume_ids.as_slice() else {
            return Err(Error::invalid(
                "source_volume_ids",
                "must contain one volume if there is no group_id",
            ));
        };
        if self.find_snapshot_name(name)?.is_some() {
            return Ok(None);
        }
        let source = self.source_of(name, volume_id, None)?;
        self.check_requisite(&begin.requisite)?;
        if !source.pool.backend.facts.shares_blocks {
            return Ok(None);
        }
        let id = SnapshotId::of_name(source.pool.id(), NameKind::Snapshot, name);
        Ok(Some(vec![
            by_name,
            self.pools.locks.acquire(Key::Snapshot(id.uuid))?,
        ]))
    }

    /// Keeps the members of a cut that was proven to be good, and commits them. Returns whether
    /// they were committed.
    fn keep_and_commit(
        &self,
        participation: &mut Participation,
        kept: &VerifiedCut,
        coordinator: &mut dyn Coordinator,
    ) -> Result<bool> {
        if let Err(first) = self.keep_participation(participation, kept) {
            return Err(self.undo_participation(participation, first));
        }
        coordinator.send_reply(ParticipationAnswer::Kept);
        match coordinator.next() {
            Some(ParticipationStep::Commit) => {
                self.commit_participation(participation)?;
                Ok(true)
            }
            // No other node can commit it any more.
            None if participation.decides() => self.undone(participation).map(|()| false),
            None => Ok(false),
            Some(_) if participation.decides() => {
                Err(self.undo_participation(participation, out_of_order()))
            }
            Some(_) => Err(out_of_order()),
        }
    }

    /// Deletes the members after the steps have ended.
    fn undone(&self, participation: &mut Participation) -> Result<()> {
        match self.undo_participation(participation, Error::Stopping) {
            Error::Stopping => Ok(()),
            undo => Err(undo),
        }
    }
}

/// Runs the steps of a cut until the cut is to be kept. Returns `None` if the steps end before
/// that. Nothing is frozen afterwards.
fn freeze_and_cut(
    mut local: Box<dyn Participant>,
    coordinator: &mut dyn Coordinator,
) -> Result<Option<VerifiedCut>> {
    let done = steps(local.as_mut(), coordinator);
    if let Err(error) = &done {
        // Reported now, so that the other nodes do not stay frozen until this one has cleaned up.
        coordinator.failing(error);
    }
    done
}

fn steps(
    local: &mut dyn Participant,
    coordinator: &mut dyn Coordinator,
) -> Result<Option<VerifiedCut>> {
    let mut done = 0;
    while let Some(step) = coordinator.next() {
        let step = match step {
            ParticipationStep::Cut(step) => step,
            ParticipationStep::Keep(kept) if done == 6 => return Ok(Some(kept)),
            ParticipationStep::Keep(_) | ParticipationStep::Commit => return Err(out_of_order()),
        };
        done = match (done, step) {
            (0, CutStep::Ready(_)) => 1,
            // A router of the previous release does not know this step.
            (1, CutStep::Ahead { .. }) => 2,
            (1 | 2, CutStep::Prepare) => 3,
            (3, CutStep::Freeze) => 4,
            (4, CutStep::Cut) => 5,
            (5, CutStep::Written) => 6,
            _ => return Err(out_of_order()),
        };
        coordinator.send_reply(ParticipationAnswer::Cut(local.step(step)?));
    }
    Ok(None)
}

fn out_of_order() -> Error {
    Error::invalid(
        "step",
        "is out of order; the order is begin, ready, ahead, prepare, freeze, cut, written, keep, commit",
    )
}

#[cfg(test)]
pub(in crate::operation) mod tests;
