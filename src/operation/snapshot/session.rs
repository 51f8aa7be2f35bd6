//! A share that is driven from outside: the agent's end of a cut across nodes.
//!
//! Steps come one at a time, each once and in order. When they end before the commit, whatever
//! the reason, everything is thawed and what was made is deleted; but for members of a group that
//! were kept where another node decides: these are in doubt until somebody settles them.

use uuid::Uuid;

use super::attempt::{Kept, Share};
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
use crate::operation::{Driver, member_of};
use crate::record::SnapshotState;

/// What a share begins with.
#[derive(Clone, Debug)]
pub struct BeginShare {
    /// Request name of the snapshot or group.
    pub name: String,
    /// `None` for a single snapshot.
    pub group: Option<GroupId>,
    /// This try.
    pub attempt: Uuid,
    /// The class.
    pub parameters: SnapshotParameters,
    /// This node's volumes, each once; one for a single snapshot.
    pub volume_ids: Vec<String>,
    /// All of the group, in the order of its request.
    pub all_volumes: Vec<VolumeId>,
    /// Of this try.
    pub level: Level,
    /// As in [`crate::operation::CreateSnapshot::requisite`].
    pub requisite: Vec<String>,
}

/// A step, after the share was begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShareStep {
    /// A step of the cut.
    Cut(CutStep),
    /// Make the members durable, but do not commit them.
    Keep(Kept),
    /// Commit the members.
    Commit,
}

/// The answer to a step that was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShareAnswer {
    /// The members are prepared; these are in use.
    Begun(Vec<Used>),
    /// There is nothing to cut, and the share has ended: CreateSnapshot alone answers, with the
    /// snapshot that exists or with a copy.
    Plain,
    /// To a step of the cut.
    Cut(CutAnswer),
    /// To `keep`.
    Kept,
    /// To `commit`.
    Committed,
}

/// Whoever drives a share.
pub trait Coordinator {
    /// The next step; `None` once none will come.
    fn next(&mut self) -> Option<ShareStep>;
    /// Is told an answer. One that has gone shows by the next step.
    fn send_reply(&mut self, answer: ShareAnswer);
    /// Is told that a step has failed, before what was made is deleted.
    fn failing(&mut self, _error: &Error) {}
}

impl Driver {
    /// Serves a share to its end. `abort` thaws it from another thread, once the coordinator is
    /// known to have gone.
    ///
    /// On an error nothing is frozen, and nothing is left (or it's [`Error::RollbackFailed`]). A crash of
    /// this process leaves what the end of the steps at this point would, once it's started again.
    pub fn serve_share(
        &self,
        begin: &BeginShare,
        abort: &AbortHandle,
        coordinator: &mut dyn Coordinator,
    ) -> Result<()> {
        let name = match begin.group {
            Some(group) => self.lock_group(group, begin)?,
            None => match self.lock_single(begin)? {
                Some(locks) => locks,
                None => {
                    coordinator.send_reply(ShareAnswer::Plain);
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
        let mut share = self.begin_share(&begin.volume_ids, begin.level, parameters, plan)?;
        coordinator.send_reply(ShareAnswer::Begun(share.used()));

        let local = Local::new(&self.seams, &share.members, parameters).aborted_by(abort);
        let local = match self.room(&share.members) {
            Ok(room) => local.with_room(room),
            Err(first) => return Err(self.undo_share(&mut share, first)),
        };
        match stand_still(Box::new(local), coordinator) {
            Ok(Some(kept)) => {
                if self.keep_and_commit(&mut share, &kept, coordinator)? {
                    // The locks first: the coordinator's next call needs them.
                    drop((share, name));
                    coordinator.send_reply(ShareAnswer::Committed);
                }
                Ok(())
            }
            Ok(None) => self.undone(&mut share),
            Err(first) => Err(self.undo_share(&mut share, first)),
        }
    }

    /// The locks that a share needs.
    pub fn locks_of_share(&self, begin: &BeginShare) -> Vec<Key> {
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

    /// Of a group that has nothing here yet. What is in doubt, or committed by another try, must
    /// be seen by whoever coordinates before it's begun again.
    fn lock_group(&self, group: GroupId, begin: &BeginShare) -> Result<Vec<LockGuard>> {
        let lock = self.locks.acquire(Key::Group(group.0))?;
        // Before the list, which may have one by then that couldn't be read.
        let ours = membership(group, &sources(&begin.volume_ids)?, &begin.parameters);
        let seen = self
            .look_at_each(&ours.members)
            .and_then(|()| self.members_read(group, &begin.parameters));
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

    /// Of a single snapshot; `None` where there is nothing to cut.
    fn lock_single(&self, begin: &BeginShare) -> Result<Option<Vec<LockGuard>>> {
        let name = &begin.name;
        let by_name = self.locks.acquire(Key::SnapshotName(name.clone()))?;
        let [volume_id] = begin.volume_ids.as_slice() else {
            return Err(Error::invalid(
                "source_volume_ids",
                "must contain one volume if there is no group_id",
            ));
        };
        if self.find_snapshot_name(name)?.is_some() {
            return Ok(None);
        }
        let source = self.source_of(name, volume_id)?;
        self.check_requisite(&begin.requisite)?;
        if !source.pool.backend.shares_blocks() {
            return Ok(None);
        }
        let id = SnapshotId::of_name(source.pool.id(), NameKind::Snapshot, name);
        Ok(Some(vec![
            by_name,
            self.locks.acquire(Key::Snapshot(id.uuid))?,
        ]))
    }

    /// From a cut that is proven good to its commit; whether it was committed.
    fn keep_and_commit(
        &self,
        share: &mut Share,
        kept: &Kept,
        coordinator: &mut dyn Coordinator,
    ) -> Result<bool> {
        if let Err(first) = self.keep_share(share, kept) {
            return Err(self.undo_share(share, first));
        }
        coordinator.send_reply(ShareAnswer::Kept);
        match coordinator.next() {
            Some(ShareStep::Commit) => {
                self.commit_share(share)?;
                Ok(true)
            }
            // Nobody else can commit it any more.
            None if share.decides() => self.undone(share).map(|()| false),
            None => Ok(false),
            Some(_) if share.decides() => Err(self.undo_share(share, out_of_order())),
            Some(_) => Err(out_of_order()),
        }
    }

    /// Deletes what was made, because the steps have ended.
    fn undone(&self, share: &mut Share) -> Result<()> {
        match self.undo_share(share, Error::Stopping) {
            Error::Stopping => Ok(()),
            undo => Err(undo),
        }
    }
}

/// The steps of a cut, one at a time, until it's to be kept; `None` if they end before. Nothing is
/// frozen afterwards.
fn stand_still(
    mut local: Box<dyn Participant>,
    coordinator: &mut dyn Coordinator,
) -> Result<Option<Kept>> {
    let done = steps(local.as_mut(), coordinator);
    if let Err(error) = &done {
        // Other nodes needn't stand still until this one has cleaned up.
        coordinator.failing(error);
    }
    done
}

fn steps(local: &mut dyn Participant, coordinator: &mut dyn Coordinator) -> Result<Option<Kept>> {
    let mut done = 0;
    while let Some(step) = coordinator.next() {
        let step = match step {
            ShareStep::Cut(step) => step,
            ShareStep::Keep(kept) if done == 6 => return Ok(Some(kept)),
            ShareStep::Keep(_) | ShareStep::Commit => return Err(out_of_order()),
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
        coordinator.send_reply(ShareAnswer::Cut(local.step(step)?));
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
