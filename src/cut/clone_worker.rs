//! Clones members of this node one after the other, in parallel with other workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::CutMember;
use super::participant::Thawed;
use super::semaphore::Semaphore;
use crate::backend::Copier;
use crate::error::{ErrorContext, Result, chain};
use crate::fault;
use crate::host::{self, Freeze};

/// A step that all workers do at the same time.
#[derive(Clone, Copy, Debug)]
pub(super) enum CloneStep {
    /// Clone while writers continue.
    Ahead,
    /// Clone again what was written since, while writers continue.
    Delta,
    /// Prepare for the last delta, so that it takes no memory.
    Seal,
    /// Clone the last delta while the file systems are frozen, and thaw.
    Cut,
    /// Verify that the copies are what the cut assumed.
    Verify,
}

/// A member that a worker clones.
pub(super) struct ClonedMember {
    /// Its index among the members of the cut.
    pub(super) at: usize,
    /// Its index in the guard's session.
    pub(super) slot: usize,
}

/// A worker that clones its members one after the other.
pub(super) struct CloneWorker {
    pub(super) members: Arc<[CutMember]>,
    pub(super) class: Vec<ClonedMember>,
    pub(super) held: Arc<dyn Freeze>,
    /// Set when a clone of any worker has failed. The other workers then skip their clones, which
    /// would only block their writers for longer.
    pub(super) failed: Arc<AtomicBool>,
    /// Limits how many workers clone ahead in parallel. It is not used while anything is frozen.
    pub(super) ahead: Arc<Semaphore>,
}

impl CloneWorker {
    /// Does a step for each of the members.
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
            CloneStep::Cut => fault::without_memory("driver", "worker", || self.cut()),
            CloneStep::Verify => self.verify(),
        }
    }

    fn each(&self, copy: impl Fn(&(dyn Copier + 'static)) -> host::Result<u64>) -> Result<Thawed> {
        let mut done = Thawed::default();
        for one in &self.class {
            done.extents += copied(&self.members[one.at], &copy)?;
        }
        Ok(done)
    }

    fn verify(&self) -> Result<Thawed> {
        let mut done = Thawed::default();
        for one in &self.class {
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

    /// Runs within the freeze. Each member is thawed right after its own cut, and after an error
    /// all members are still thawed.
    fn cut(&self) -> Result<Thawed> {
        let mut done = Thawed::default();
        let mut first = None;
        for one in &self.class {
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
        "writers of volume {volume} continued before it was cut: freezeTimeout expired, the freeze guard exited, or another program thawed its file system or resumed its device"
    )
}

/// Copies a member. Returns the number of extents or ranges.
pub(super) fn copied(
    member: &CutMember,
    copy: impl Fn(&(dyn Copier + 'static)) -> host::Result<u64>,
) -> Result<u64> {
    copy(&*member.copier).context(|| format!("cut volume {}", member.target.volume_id))
}
