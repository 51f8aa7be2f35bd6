//! Members of this node whose clones are made one after the other, beside other lanes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::CutMember;
use super::participant::Thawed;
use super::semaphore::Semaphore;
use crate::error::{Error, ErrorContext, Result, chain};
use crate::host::{Done, Effect, Freeze, Host, Known};

/// What lanes do, all of them at once.
#[derive(Clone, Copy, Debug)]
pub(super) enum CloneStep {
    /// Clone, beside the writers.
    Ahead,
    /// Put right, beside them.
    Rest,
    /// The next time is the last.
    Seal,
    /// Put right, frozen; and thaw.
    Cut,
    /// See that the copies are what the cut took them to be.
    Check,
}

/// A member of a lane: its place among the members, and in the guard's hands.
pub(super) struct ClonedMember {
    pub(super) at: usize,
    pub(super) slot: usize,
    /// Of its image and copy.
    pub(super) known: Arc<Known>,
}

/// Members whose clones are made one after the other.
pub(super) struct CloneWorker {
    pub(super) host: Arc<dyn Host>,
    pub(super) members: Arc<[CutMember]>,
    /// Which.
    pub(super) lane: Vec<ClonedMember>,
    pub(super) held: Arc<dyn Freeze>,
    /// A clone of any lane has failed: the others needn't keep their writers waiting.
    pub(super) failed: Arc<AtomicBool>,
    /// Where lanes wait before they clone ahead; never while anything is frozen.
    pub(super) ahead: Arc<Semaphore>,
}

impl CloneWorker {
    /// Does it for each of its members.
    pub(super) fn act(&self, step: CloneStep) -> Result<Thawed> {
        match step {
            CloneStep::Ahead => self.each(|member, _| self.clone_ahead(member)),
            CloneStep::Rest => self.each(|member, known| self.clone_rest(member, known)),
            CloneStep::Seal => self.each(|_, known| {
                known.seal();
                Ok(0)
            }),
            CloneStep::Cut => self.cut(),
            CloneStep::Check => self.check(),
        }
    }

    fn each(&self, work: impl Fn(&CutMember, &Known) -> Result<u64>) -> Result<Thawed> {
        let mut done = Thawed::default();
        for one in &self.lane {
            done.extents += work(&self.members[one.at], &one.known)?;
        }
        Ok(done)
    }

    fn clone_ahead(&self, member: &CutMember) -> Result<u64> {
        let _turn = self.ahead.acquire();
        let volume = &member.target.volume_id;
        let source = self.host.stat(&member.source);
        let source = source.context(|| format!("examine the image of volume {volume}"))?;
        let size = source.map_or(0, |source| source.size);
        let made = self.host.perform(&Effect::Allocate {
            path: &member.copy,
            size,
            reserve: false,
        });
        made.context(|| format!("extend the copy of volume {volume}"))?;
        clone(&*self.host, member, |source, target| {
            Effect::ClonePreFreeze { source, target }
        })
    }

    fn clone_rest(&self, member: &CutMember, known: &Known) -> Result<u64> {
        clone(&*self.host, member, |source, target| Effect::CloneDelta {
            source,
            target,
            known,
        })
    }

    /// After the thaw: whether the copies are what the window took them to be.
    fn check(&self) -> Result<Thawed> {
        let mut done = Thawed::default();
        for one in &self.lane {
            let member = &self.members[one.at];
            let volume = &member.target.volume_id;
            let is_same = self.host.verify_copy(&member.copy, &one.known);
            if !is_same.context(|| format!("verify the copy of volume {volume}"))? {
                done.lost.get_or_insert(format!(
                    "blocks of volume {volume} or of its copy were moved during the cut; is the pool being defragmented?"
                ));
            }
        }
        Ok(done)
    }

    /// Within the freeze. Whatever happens to one, all are thawed, each right after its own cut.
    fn cut(&self) -> Result<Thawed> {
        let mut done = Thawed::default();
        let mut first = None;
        for one in &self.lane {
            let member = &self.members[one.at];
            let mut cloned = Ok(0);
            let emptied = member.emptied.load(Ordering::SeqCst);
            if !self.failed.fetch_or(emptied, Ordering::SeqCst) && !emptied {
                cloned = self.clone_rest(member, &one.known);
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

/// One clone of a member: how many extents or ranges.
pub(super) fn clone<'a>(
    host: &dyn Host,
    member: &'a CutMember,
    effect: impl FnOnce(&'a std::path::Path, &'a std::path::Path) -> Effect<'a>,
) -> Result<u64> {
    let volume = &member.target.volume_id;
    let done = host.perform(&effect(&member.source, &member.copy));
    match done.context(|| format!("cut volume {volume}"))? {
        Done::Cloned(extents) => Ok(extents),
        Done::Plain | Done::Loop(_) | Done::Checked(_) | Done::Session(_) => Err(Error::Bug {
            invariant: "a clone returns its number of extents".into(),
        }),
    }
}
