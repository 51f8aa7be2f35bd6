//! The next step of a move, decided from what exists and from nothing else. So a router that crashed
//! anywhere is continued by the next one.
//!
//! The fence at the source is the invariant: from before the last snapshot until the source is
//! deleted, or the move is aborted, nothing but the move uses the source. So there are never two
//! copies that can be written, whichever of them the PersistentVolume names.

mod abort;
mod pre_copy;

use std::collections::BTreeMap;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use uuid::Uuid;

use super::object::{MoveStatus, Phase, Place, VolumeMove, When};
use crate::operation::{MoveSnapshotStatus, MovingState, VolumeMoveStatus};
use crate::router::kube::adopt::manifest::{Goal, HANDLE, Manifest};
use crate::router::kube::adopt::step::{self, Step as PvStep};
use crate::router::kube::reconcile::Next;
use crate::router::volume_moves::Round;

/// The claim of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClaimState {
    /// It does not exist, is being deleted, or was created again.
    Gone,
    /// It exists, and is bound or not.
    Here { is_bound: bool },
}

/// A pod that names the claim and has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PodUse {
    pub(super) name: String,
    pub(super) uid: String,
    /// The node that it is bound to.
    pub(super) node: Option<String>,
    /// One of its containers was started.
    pub(super) has_started: bool,
}

/// What a move has to know.
#[derive(Clone, Debug)]
pub(super) struct Observed {
    pub(super) object: VolumeMove,
    pub(super) now: Timestamp,
    /// The topology key of the driver.
    pub(super) key: String,
    /// What it would begin with, or why it cannot begin. Read only before it has begun.
    pub(super) proposal: Option<Result<MoveStatus, Refusal>>,
    pub(super) claim: ClaimState,
    /// The PersistentVolume, and what is stored of it.
    pub(super) live: Option<Manifest>,
    pub(super) noted: Option<Manifest>,
    /// Another PersistentVolume that names the source or the copy.
    pub(super) double: Option<String>,
    /// The claim in another namespace that the PersistentVolume, or what is stored of it, is bound to.
    pub(super) foreign_volume: Option<String>,
    /// The claim in another namespace that has the source, without the fence of this move.
    pub(super) foreign_source: Option<String>,
    /// A PersistentVolume that names the copy.
    pub(super) names_copy: Option<String>,
    /// The volumes, or why they are not known.
    pub(super) source: Result<VolumeMoveStatus, String>,
    pub(super) copy: Result<VolumeMoveStatus, String>,
    /// The snapshots of the move that exist, if the source is known.
    pub(super) snapshots: BTreeMap<Round, MoveSnapshotStatus>,
    /// Why no volume can be moved to the pool of the copy now.
    pub(super) target_problem: Option<String>,
    /// The pool of the copy is marked as lost.
    pub(super) is_target_lost: bool,
    pub(super) pods: Vec<PodUse>,
    /// The node of the source takes no new pods.
    pub(super) is_cordoned: bool,
    /// The node to which the PersistentVolume is attached.
    pub(super) attached: Option<String>,
}

/// Why a move cannot begin: the reason of its condition, and a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) reason: &'static str,
    pub(super) message: String,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    /// Protects the object from being forgotten.
    AddFinalizer,
    /// Lets the object go.
    RemoveFinalizer,
    /// Records source and target.
    Begin(Box<MoveStatus>),
    /// Ends a pod that uses the volume, as its disruption budgets allow.
    Evict(PodUse),
    /// Deletes a pod that waits on the node of the source, and would wait for ever.
    DeletePod(PodUse),
    /// Records that a round of copies before the fence begins.
    BeginRound(u32),
    /// Takes the snapshot of the round.
    Snapshot(u32),
    /// Copies what differs in this snapshot.
    Fill(u32),
    Fence,
    /// Records since when nothing uses the source.
    MarkFenced,
    /// Copies the source, and compares the copy with it.
    Copy,
    /// Exchanges the PersistentVolume.
    Pv(PvStep),
    /// Records that the PersistentVolume names the copy.
    MarkSwitched,
    LiftFence,
    DeleteSnapshot(Round),
    DeleteCopy,
    DeleteSource,
}

/// What is to be done about a move, and what its status shows.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::router::kube) struct Decision {
    pub(super) phase: Phase,
    /// What it waits for; empty if it does not wait.
    pub(super) message: String,
    /// The reason of the condition, if there is one.
    pub(super) reason: &'static str,
    pub(super) step: Option<Step>,
    /// Why the move is undone, if it is.
    pub(super) abort_reason: Option<String>,
}

/// A move that has begun.
struct Begun<'a> {
    seen: &'a Observed,
    uid: Uuid,
    status: &'a MoveStatus,
    from: &'a Place,
    to: &'a Place,
}

fn act(phase: Phase, step: Step) -> Decision {
    Decision {
        phase,
        message: String::new(),
        reason: "Proceeding",
        step: Some(step),
        abort_reason: None,
    }
}

fn wait(phase: Phase, reason: &'static str, message: impl Into<String>) -> Decision {
    Decision {
        phase,
        message: message.into(),
        reason,
        step: None,
        abort_reason: None,
    }
}

/// Decides what is to be done.
pub(super) fn decide(seen: &Observed) -> Decision {
    let object = &seen.object;
    let empty = MoveStatus::default();
    let status = object.status.as_ref().unwrap_or(&empty);
    if status.phase.is_final() {
        return match object.has_finalizer() {
            true => act(status.phase, Step::RemoveFinalizer),
            false => wait(status.phase, "Ended", ""),
        };
    }
    let (Some(from), Some(to), Some(uid)) = (&status.from, &status.to, object.uid()) else {
        return begin(seen);
    };
    let begun = Begun {
        seen,
        uid,
        status,
        from,
        to,
    };
    begun.decide()
}

/// A move that has not begun has changed nothing.
fn begin(seen: &Observed) -> Decision {
    let object = &seen.object;
    match (object.is_leaving(), object.has_finalizer(), &seen.proposal) {
        (true, true, _) => act(Phase::Aborted, Step::RemoveFinalizer),
        (true, false, _) => wait(Phase::Aborted, "Ended", ""),
        (false, _, Some(Err(refusal))) => {
            wait(Phase::Pending, refusal.reason, refusal.message.clone())
        }
        (false, _, None) => wait(Phase::Pending, "Unknown", "its claim is not read yet"),
        (false, false, Some(Ok(_))) => act(Phase::Pending, Step::AddFinalizer),
        (false, true, Some(Ok(status))) => {
            act(Phase::Pending, Step::Begin(Box::new(status.clone())))
        }
    }
}

impl Begun<'_> {
    fn decide(&self) -> Decision {
        let handle = self.seen.live.as_ref().and_then(|live| live.text(HANDLE));
        let is_at = |place: &Place| handle == Some(place.handle.as_str());
        if let Some(claim) = &self.seen.foreign_volume {
            // It is not changed: an administrator has bound it elsewhere, or the status is false. Once it
            // has named the copy, the copy may have the only data.
            return match is_at(self.to) || self.status.switched_at.is_some() {
                true => self.end(),
                false => self.abort(&format!("its PersistentVolume is bound to claim {claim}")),
            };
        }
        match (&self.seen.live, &self.seen.noted) {
            (Some(_), _) if is_at(self.to) => self.arrived(),
            (Some(live), Some(noted)) if live.is_leaving() && live.uid() == noted.uid() => {
                self.exchange()
            }
            (None, Some(_)) => self.exchange(),
            (None, None) if self.status.switched_at.is_some() => self.end(),
            (None, None) => self.abort("its PersistentVolume does not exist any more"),
            (Some(_), _) if self.status.switched_at.is_some() && !is_at(self.from) => self.end(),
            (Some(_), _) if self.status.switched_at.is_some() => wait(
                Phase::Switched,
                "PersistentVolumeChanged",
                "its PersistentVolume names the source again",
            ),
            (Some(live), _) => match self.abort_reason(live, is_at(self.from)) {
                Some(why) => self.abort(&why),
                None => self.proceed(),
            },
        }
    }

    fn goal(&self) -> Goal<'_> {
        Goal {
            key: &self.seen.key,
            home: &self.to.home,
            handle: Some(&self.to.handle),
        }
    }

    /// Why the move is undone, while its PersistentVolume is as it was.
    fn abort_reason(&self, live: &Manifest, is_at_source: bool) -> Option<String> {
        let seen = self.seen;
        if seen.object.is_leaving() {
            return Some("it is being deleted".into());
        }
        if self.status.phase == Phase::Aborting {
            let reason = self.status.abort_reason.as_ref();
            return Some(reason.unwrap_or(&self.status.message).clone());
        }
        if seen.claim == ClaimState::Gone {
            return Some("its claim does not exist any more".into());
        }
        let is_same = live.uid() == self.status.volume_uid.as_deref();
        if !is_at_source || !is_same || live.is_leaving() {
            return Some("its PersistentVolume was changed or is being deleted".into());
        }
        if let Some(double) = &seen.double {
            return Some(format!("PersistentVolume {double} names the same volume"));
        }
        if let Some(claim) = &seen.foreign_source {
            return Some(format!("its source is the volume of claim {claim}"));
        }
        seen.is_target_lost
            .then(|| format!("the pool on node {} is marked as lost", self.to.node))
    }

    /// Towards the copy, while the PersistentVolume names the source.
    fn proceed(&self) -> Decision {
        let source = match &self.seen.source {
            Ok(source) => source,
            Err(why) => return wait(self.begun_phase(), "SourceUnknown", why),
        };
        match source.fenced {
            _ if source.state != MovingState::Ready => {
                let why = format!("volume {} does not exist on its node", self.from.handle);
                wait(self.begun_phase(), "SourceUnknown", why)
            }
            None => self.before_fence(source),
            Some(fenced) if fenced != self.uid => {
                let why = format!("the VolumeMove with UID {fenced} moves its volume");
                wait(Phase::Waiting, "OtherMove", why)
            }
            Some(_) if self.status.fenced_at.is_none() => act(Phase::Fenced, Step::MarkFenced),
            Some(_) => self.copy(),
        }
    }

    /// The phase of a move that cannot go on now.
    fn begun_phase(&self) -> Phase {
        self.status.phase.max(Phase::Copying)
    }

    /// While the source is used it is copied. Once nothing uses it, a copy that was made in advance is
    /// not needed any more: the application waits.
    fn before_fence(&self, source: &VolumeMoveStatus) -> Decision {
        if let Some(problem) = &self.seen.target_problem {
            let why = format!("its target on node {}: {problem}", self.to.node);
            return wait(self.begun_phase(), "TargetNotReady", why);
        }
        let in_use = self.drain(source);
        if in_use.step == Some(Step::Fence) {
            return in_use;
        }
        match self.pre_copy() {
            // It still waits for what it waits for.
            Some(pre_copy) if pre_copy.phase == Phase::Waiting => Decision {
                step: pre_copy.step,
                ..in_use
            },
            Some(pre_copy) => pre_copy,
            None => in_use,
        }
    }

    /// Until nothing uses the source, and nothing is about to use it.
    fn drain(&self, source: &VolumeMoveStatus) -> Decision {
        let seen = self.seen;
        let waits = |reason, message: String| wait(Phase::Waiting, reason, message);
        let is_now = seen.object.spec.when == When::Now;
        let mut placed = seen.pods.iter().filter(|pod| pod.node.is_some());
        if let Some(pod) = placed.next() {
            if is_now {
                return act(Phase::Waiting, Step::Evict(pod.clone()));
            }
            let node = &self.from.node;
            return waits(
                "InUse",
                format!(
                    "pod {} uses the volume: end it, for example with kubectl drain {node}",
                    pod.name
                ),
            );
        }
        if let Some(user) = &source.user {
            return waits("InUse", user.clone());
        }
        if let Some(node) = &seen.attached {
            return waits("InUse", format!("it is still attached to node {node}"));
        }
        match seen.pods.first() {
            Some(pod) if !seen.is_cordoned => waits(
                "NotCordoned",
                format!(
                    "pod {} would be started on node {} again: cordon that node, which kubectl drain does",
                    pod.name, self.from.node
                ),
            ),
            Some(_) | None => act(Phase::Waiting, Step::Fence),
        }
    }

    /// Until the copy is complete and the PersistentVolume is about to be deleted.
    fn copy(&self) -> Decision {
        match &self.seen.copy {
            Ok(copy) if copy.state == MovingState::Ready => self.exchange(),
            Ok(copy) => self.misplaced(Phase::LastCopy).unwrap_or_else(|| {
                let begun = self.begun_round(copy).map(Step::Fill);
                act(Phase::LastCopy, begun.unwrap_or(Step::Copy))
            }),
            Err(why) => wait(Phase::LastCopy, "TargetUnknown", why),
        }
    }

    /// A pod that was placed on the node of the source after the fence waits there for ever, because
    /// its node no longer matches once the volume is moved.
    fn misplaced(&self, phase: Phase) -> Option<Decision> {
        let own = Some(&self.from.node).filter(|node| **node != self.to.node);
        let is_misplaced = |pod: &&PodUse| pod.node.as_ref() == own && !pod.has_started;
        let mut pods = self.seen.pods.iter().filter(|_| own.is_some());
        let pod = pods.find(is_misplaced)?;
        let is_now = self.seen.object.spec.when == When::Now;
        is_now.then(|| act(phase, Step::DeletePod(pod.clone())))
    }

    /// The steps of the PersistentVolume to the copy.
    fn exchange(&self) -> Decision {
        let seen = self.seen;
        let next = step::next(self.goal(), seen.live.as_ref(), seen.noted.as_ref());
        if let (Some(node), Next::Step(PvStep::Retain | PvStep::Note | PvStep::Delete)) =
            (&seen.attached, &next)
        {
            let why = format!("it is still attached to node {node}");
            return wait(Phase::LastCopy, "InUse", why);
        }
        match next {
            Next::Step(step) => act(Phase::Switched, Step::Pv(step)),
            Next::Refused(why) => wait(Phase::Switched, "PersistentVolumeChanged", why),
            Next::Wait | Next::Done => wait(
                Phase::Switched,
                "Switching",
                "its PersistentVolume is being deleted",
            ),
        }
    }

    /// The PersistentVolume names the copy.
    fn arrived(&self) -> Decision {
        let seen = self.seen;
        // Recorded before anything that makes it possible to lose sight of the PersistentVolume: from
        // now on the copy has what the application writes.
        if self.status.switched_at.is_none() {
            return act(Phase::Switched, Step::MarkSwitched);
        }
        if seen.noted.is_some() {
            return self.exchange();
        }
        if let Some(decision) = self.misplaced(Phase::Switched) {
            return decision;
        }
        let live = seen.live.as_ref();
        if live.is_some_and(|live| live.policy_before().is_some() && !live.is_leaving()) {
            let is_bound = live.is_some_and(|live| live.phase() == "Bound");
            return match seen.claim {
                ClaimState::Here { is_bound: true } if is_bound => {
                    act(Phase::Switched, Step::Pv(PvStep::Restore))
                }
                ClaimState::Gone => act(Phase::Switched, Step::Pv(PvStep::Restore)),
                ClaimState::Here { .. } => wait(
                    Phase::Switched,
                    "Binding",
                    "its PersistentVolume is not bound again yet",
                ),
            };
        }
        self.end()
    }

    /// The end of the source.
    fn end(&self) -> Decision {
        let source = match &self.seen.source {
            Ok(source) => source,
            Err(why) => return wait(Phase::Switched, "SourceUnknown", why),
        };
        if let Some(double) = &self.seen.double {
            let why = format!("PersistentVolume {double} names one of its volumes");
            return wait(Phase::Switched, "OtherPersistentVolume", why);
        }
        if let Some(round) = self.seen.snapshots.keys().next() {
            return act(Phase::Switched, Step::DeleteSnapshot(*round));
        }
        if source.state == MovingState::Absent || source.fenced != Some(self.uid) {
            // Without the fence it is not, or no longer, the source of this move.
            return act(Phase::Done, Step::RemoveFinalizer);
        }
        let kept = match self.seen.object.keep_source() {
            Ok(kept) => kept,
            Err(why) => return wait(Phase::Switched, "KeepSource", why),
        };
        let switched_at = self
            .status
            .switched_at
            .as_ref()
            .map_or(self.seen.now, |at| at.0);
        let age = self.seen.now.duration_since(switched_at);
        let is_over = SignedDuration::try_from(kept).is_ok_and(|kept| age >= kept);
        if !is_over && self.seen.claim != ClaimState::Gone {
            let why = format!("the source on node {} is kept", self.from.node);
            return wait(Phase::Switched, "SourceKept", why);
        }
        self.without_copy()
            .unwrap_or_else(|| act(Phase::Switched, Step::DeleteSource))
    }

    /// The source is not deleted while it may be the only copy of the volume of a PersistentVolume.
    fn without_copy(&self) -> Option<Decision> {
        self.seen.live.as_ref()?;
        let why = match &self.seen.copy {
            Ok(copy) if copy.state == MovingState::Ready => return None,
            Ok(_) => format!("the copy on node {} does not exist", self.to.node),
            Err(why) => format!("the copy on node {}: {why}", self.to.node),
        };
        let why = format!("the source on node {} is kept: {why}", self.from.node);
        Some(wait(Phase::Switched, "NoCopy", why))
    }
}

#[cfg(test)]
mod tests;
