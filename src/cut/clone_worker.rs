//! Members of this node whose clones are made one after the other, beside other lanes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::CutMember;
use super::participant::Thawed;
use super::semaphore::Semaphore;
use crate::backend::Copier;
use crate::error::{ErrorContext, Result, chain};
use crate::host::{self, Freeze};

/// A step that all lanes do at the same time.
#[derive(Clone, Copy, Debug)]
pub(super) enum CloneStep {
    /// Clone, beside the writers.
    Ahead,
    /// Clone again what was written since, beside the writers.
    Delta,
    /// The next delta is the last.
    Seal,
    /// Clone the last delta while frozen, and thaw.
    Cut,
    /// Verify that the copies are what the cut assumed.
    Verify,
}

/// A member of a lane.
pub(super) struct ClonedMember {
    /// Its index among the members.
    pub(super) at: usize,
    /// Its index in the guard's session.
    pub(super) slot: usize,
}

/// Members whose clones are made one after the other.
pub(super) struct CloneWorker {
    pub(super) members: Arc<[CutMember]>,
    pub(super) lane: Vec<ClonedMember>,
    pub(super) held: Arc<dyn Freeze>,
    /// A clone of some lane has failed, so the others need not keep their writers waiting.
    pub(super) failed: Arc<AtomicBool>,
    /// Limits how many lanes clone ahead at once; not used while anything is frozen.
    pub(super) ahead: Arc<Semaphore>,
}

impl CloneWorker {
    /// Does a step for each of its members.
    pub(super) fn act(&self, step: CloneStep) -> Result<Thawed> {
        match step {
            CloneStep::Ahead => self.each(|copier| {
                let _turn = self.ahead.acquire();
                copier.copy_ahead()
            }),
            CloneStep::Delta => self.each(Copier::copy_delta),
            CloneStep::Seal => self.each(|copier| {
                copier.seal();
                Ok(0)
            }),
            CloneStep::Cut => self.cut(),
            CloneStep::Verify => self.verify(),
        }
    }

    fn each(&self, copy: impl Fn(&(dyn Copier + 'static)) -> host::Result<u64>) -> Result<Thawed> {
        let mut done = Thawed::default();
        for one in &self.lane {
            done.extents += copied(&self.members[one.at], &copy)?;
        }
        Ok(done)
    }

    fn verify(&self) -> Result<Thawed> {
        let mut done = Thawed::default();
        for one in &self.lane {
            let member = &self.members[one.at];
            let volume = &member.target.volume_id;
            let is_same = member.copier.verify();
            if !is_same.context(|| format!("verify the copy of volume {volume}"))? {
                done.lost.get_or_insert(format!(
                    "blocks of volume {volume} or of its copy were moved during the cut; is the pool being defragmented?"
                ));
            }
        }
        Ok(done)
    }

    /// Runs within the freeze. Even after an error all are thawed, each right after its own cut.
    fn cut(&self) -> Result<Thawed> {
        let mut done = Thawed::default();
        let mut first = None;
        for one in &self.lane {
            let member = &self.members[one.at];
            let mut cloned = Ok(0);
            let emptied = member.emptied.load(Ordering::SeqCst);
            if !self.failed.fetch_or(emptied, Ordering::SeqCst) && !emptied {
                cloned = copied(member, Copier::copy_delta);
                self.failed.fetch_or(cloned.is_err(), Ordering::SeqCst);
            }
            let thawed = self.held.thaw(one.slot);
            let volume = &member.target.volume_id;
            let lost = match thawed {
                Ok(true) => None,
                Ok(false) => Some(thawed_early(volume)),
                Err(error) => Some(format!(
                    "it is unknown whether volume {volume} was still frozen: {}",
                    chain(&error)
                )),
            };
            done.lost = done.lost.or(lost);
            match cloned {
                Ok(extents) => done.extents += extents,
                Err(error) => first = first.or(Some(error)),
            }
        }
        first.map_or(Ok(done), Err)
    }
}

fn thawed_early(volume: &str) -> String {
    format!(
        "the file system of volume {volume} was thawed before it was cut: freezeTimeout expired, the freeze guard exited, or another program thawed it"
    )
}

/// Copies a member; returns the number of extents or ranges.
pub(super) fn copied(
    member: &CutMember,
    copy: impl Fn(&(dyn Copier + 'static)) -> host::Result<u64>,
) -> Result<u64> {
    copy(&*member.copier).context(|| format!("cut volume {}", member.target.volume_id))
}
