//! The next step of a revert, decided from what exists and from nothing else. So a router that crashed
//! anywhere is continued by the next one.
//!
//! Two writes of the status are the decisions: that a revert is undone, and that it is not undone any
//! more. Each names the version of the object, so only one of them succeeds. No member switches before
//! the second one, and no fence is lifted before all members have switched, or after the first one.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use tonic::Code;
use uuid::Uuid;

use super::object::{MemberState, RevertMember, RevertPhase as Phase, RevertStatus, VolumeRevert};
use crate::operation::VolumeRevertStatus;
use crate::router::kube::reconcile::with_transitions;

/// The condition of a revert: whether its claims have the content of their snapshots.
const CONDITION: &str = "Complete";

/// Why a revert cannot begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) reason: &'static str,
    pub(super) message: String,
    /// Waiting would not help.
    pub(super) is_final: bool,
}

/// The VolumeSnapshot with the old content of a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Old {
    Absent,
    /// It is not ready, for this reason.
    Pending(String),
    Ready,
    /// Another object has its name.
    Foreign,
}

/// What is known of a member.
#[derive(Clone, Debug)]
pub(super) struct MemberSeen {
    /// Its claim is the same as at the beginning, and has the same volume. Like its pods and the old
    /// content, it is read only before the switch, and before an abort.
    pub(super) is_bound: bool,
    /// The state of the volume, or why it is not known.
    pub(super) volume: Result<VolumeRevertStatus, String>,
    pub(super) old: Old,
    /// The pods that name the claim and have not ended.
    pub(super) pods: Vec<String>,
}

/// What a revert has to know.
#[derive(Clone, Debug)]
pub(super) struct Observed {
    pub(super) object: VolumeRevert,
    pub(super) now: Timestamp,
    /// What it would begin with, or why it cannot begin. Read only before it has begun.
    pub(super) proposal: Option<Result<Vec<RevertMember>, Refusal>>,
    /// In the order of the members in the status.
    pub(super) members: Vec<MemberSeen>,
}

/// A step, for the member with this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Protects the object from being forgotten.
    AddFinalizer,
    /// Lets the object go.
    RemoveFinalizer,
    Fence(usize),
    /// Makes the VolumeSnapshot with the old content.
    Keep(usize),
    /// Of all members that are fenced and have neither a new image nor switched.
    Prepare,
    Switch(usize),
    Lift(usize),
    Abort(usize),
}

impl Step {
    /// Whether a revert in this phase is undone after this step was refused with this code. Everything
    /// else may succeed later.
    pub(super) fn gives_up(self, phase: Phase, code: Code) -> bool {
        if phase >= Phase::Switching {
            return false;
        }
        let is_refused = matches!(
            code,
            Code::NotFound
                | Code::InvalidArgument
                | Code::FailedPrecondition
                | Code::ResourceExhausted
                | Code::OutOfRange
                | Code::Unimplemented
        );
        match self {
            Step::Prepare => is_refused,
            // It is in use, or will be refused again until the deadline.
            Step::Fence(_) => code == Code::Unimplemented,
            _ => false,
        }
    }
}

/// The status that a revert should have, and the step once it has that.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::router::kube) struct Decision {
    pub(super) status: RevertStatus,
    pub(super) step: Option<Step>,
}

/// The name of the VolumeSnapshot with the old content of a member.
pub(super) fn old_name(object: &VolumeRevert, n: usize) -> String {
    let uid = object.metadata.uid.clone().unwrap_or_default();
    format!("before-revert-{uid}-{n}")
}

/// Decides what is to be done.
pub(super) fn decide(seen: &Observed) -> Decision {
    let status = seen.object.status.clone().unwrap_or_default();
    if status.phase.is_final() {
        let step = seen.object.has_finalizer().then_some(Step::RemoveFinalizer);
        return Decision { status, step };
    }
    let (Some(uid), false) = (seen.object.uid(), status.phase == Phase::Other) else {
        return Decision { status, step: None };
    };
    let deciding = Deciding { seen, uid, status };
    match deciding.status.members.is_empty() {
        true => deciding.begin(),
        false => deciding.proceed(),
    }
}

/// The status after a step was refused for good.
pub(super) fn given_up(seen: &Observed, why: &str) -> RevertStatus {
    let status = seen.object.status.clone().unwrap_or_default();
    let uid = seen.object.uid().unwrap_or_default();
    let deciding = Deciding { seen, uid, status };
    deciding.wait(Phase::Aborting, "Refused", why).status
}

struct Deciding<'a> {
    seen: &'a Observed,
    uid: Uuid,
    status: RevertStatus,
}

impl Deciding<'_> {
    fn shown(&self, phase: Phase, reason: &str, message: String) -> RevertStatus {
        let condition = Condition {
            last_transition_time: Time(self.seen.now),
            message: message.clone(),
            observed_generation: None,
            reason: reason.into(),
            status: if phase == Phase::Done {
                "True"
            } else {
                "False"
            }
            .into(),
            type_: CONDITION.into(),
        };
        let generation = self.seen.object.metadata.generation;
        let before = &self.status.conditions;
        let finished = (phase == Phase::Done).then_some(Time(self.seen.now));
        let mut members = self.status.members.clone();
        let each = members.iter_mut().zip(&self.seen.members).enumerate();
        for (n, (member, seen)) in each {
            member.state = self.state(member.state, seen);
            if seen.old == Old::Ready {
                member.old = Some(old_name(&self.seen.object, n));
            }
        }
        RevertStatus {
            phase,
            message,
            members,
            finished_at: finished,
            conditions: with_transitions(vec![condition], before, generation),
        }
    }

    fn state(&self, before: MemberState, member: &MemberSeen) -> MemberState {
        let Ok(volume) = &member.volume else {
            return before;
        };
        match (volume.fenced == Some(self.uid), volume.ended) {
            (true, _) if volume.is_switched => MemberState::Switched,
            (true, _) if volume.is_prepared => MemberState::Prepared,
            (true, _) => MemberState::Fenced,
            (false, Some((ended, true))) if ended == self.uid => MemberState::Reverted,
            (false, Some((ended, false))) if ended == self.uid => MemberState::Kept,
            // A volume may be deleted, or reverted again, once its revert has ended.
            _ if matches!(before, MemberState::Reverted | MemberState::Kept) => before,
            _ if !volume.exists && self.status.phase >= Phase::Switching => MemberState::Lost,
            (false, _) => MemberState::Waiting,
        }
    }

    fn wait(&self, phase: Phase, reason: &str, message: impl Into<String>) -> Decision {
        Decision {
            status: self.shown(phase, reason, message.into()),
            step: None,
        }
    }

    fn act(&self, phase: Phase, step: Step) -> Decision {
        Decision {
            // While a step is repeated, the status shows why its last try has failed.
            status: match self.status.phase == phase && self.has_failed() {
                true => self.shown(phase, FAILED, self.status.message.clone()),
                false => self.shown(phase, "Proceeding", String::new()),
            },
            step: Some(step),
        }
    }

    fn has_failed(&self) -> bool {
        let mut conditions = self.status.conditions.iter();
        conditions.any(|condition| condition.reason == FAILED)
    }

    /// A revert without members has changed nothing.
    fn begin(&self) -> Decision {
        let object = &self.seen.object;
        if object.is_leaving() {
            let step = object.has_finalizer().then_some(Step::RemoveFinalizer);
            let status = self.status.clone();
            return Decision { status, step };
        }
        let why = match &self.seen.proposal {
            Some(Err(refusal)) if refusal.is_final => {
                return self.wait(Phase::Failed, refusal.reason, refusal.message.clone());
            }
            Some(Err(refusal)) => Some(refusal.clone()),
            Some(Ok(_)) | None => None,
        };
        if let Some(late) = self.late() {
            let why = why.map_or_else(|| "it could not be read".into(), |why| why.message);
            return self.wait(Phase::Failed, "DeadlineExceeded", format!("{late}: {why}"));
        }
        match (&self.seen.proposal, why) {
            (_, Some(why)) => self.wait(Phase::Pending, why.reason, why.message),
            (Some(Ok(members)), None) if object.has_finalizer() => {
                let members = members.clone();
                let mut decision = self.wait(Phase::Waiting, "Proceeding", "");
                decision.status.members = members;
                decision
            }
            (Some(_), None) => self.act(Phase::Pending, Step::AddFinalizer),
            (None, None) => self.wait(Phase::Pending, "Unknown", "its claims are not read yet"),
        }
    }

    /// That the deadline has passed, or cannot be read.
    fn late(&self) -> Option<String> {
        let created = self.seen.object.metadata.creation_timestamp.as_ref();
        let deadline = match self.seen.object.deadline() {
            Ok(deadline) => SignedDuration::try_from(deadline).unwrap_or(SignedDuration::MAX),
            Err(why) => return Some(why),
        };
        let age = created.map(|created| self.seen.now.duration_since(created.0));
        age.is_none_or(|age| age > deadline)
            .then(|| format!("it did not begin to switch within {}s", deadline.as_secs()))
    }

    fn proceed(&self) -> Decision {
        match self.status.phase {
            Phase::Switching => self.roll_forward(),
            Phase::Aborting => self.undo(),
            _ => match self.abort_reason() {
                // The next observation undoes it, once this is written.
                Some((reason, why)) => self.wait(Phase::Aborting, reason, why),
                None => self.towards_switch(),
            },
        }
    }

    fn is_fenced(&self, volume: &VolumeRevertStatus) -> bool {
        volume.fenced == Some(self.uid)
    }

    /// Why a revert whose members have not switched is undone.
    fn abort_reason(&self) -> Option<(&'static str, String)> {
        if self.seen.object.is_leaving() {
            return Some(("Deleted", "it is being deleted".into()));
        }
        for (member, seen) in self.status.members.iter().zip(&self.seen.members) {
            let claim = &member.claim;
            if !seen.is_bound {
                let why = format!("claim {claim} does not exist any more, or has another volume");
                return Some(("ClaimChanged", why));
            }
            let Ok(volume) = &seen.volume else {
                continue;
            };
            if !volume.exists {
                let why = format!("the volume of claim {claim} does not exist any more");
                return Some(("VolumeGone", why));
            }
            if !self.is_fenced(volume) && volume.number != member.number {
                let why = format!("another VolumeRevert of claim {claim} has ended since");
                return Some(("OtherRevert", why));
            }
            if let Some(unfit) = &volume.unfit {
                return Some(("SnapshotUnfit", format!("claim {claim}: {unfit}")));
            }
            if seen.old == Old::Foreign {
                let why = format!("the name of the VolumeSnapshot for claim {claim} is in use");
                return Some(("NameInUse", why));
            }
        }
        let late = self.late()?;
        let way = self.in_the_way().or_else(|| self.unknown());
        let message = Some(&self.status.message).filter(|message| !message.is_empty());
        let way = way.or_else(|| message.cloned());
        let way = way.unwrap_or_else(|| self.unprepared());
        Some(("DeadlineExceeded", format!("{late}: {way}")))
    }

    /// The members without a new image.
    fn unprepared(&self) -> String {
        let open = self.known().filter(|(_, volume)| !volume.is_prepared);
        let claims = open.map(|(n, _)| self.status.members[n].claim.as_str());
        let claims: Vec<_> = claims.collect();
        format!(
            "it has no complete new image of claims {}",
            claims.join(", ")
        )
    }

    /// What keeps members from being fenced.
    fn in_the_way(&self) -> Option<String> {
        let members = self.status.members.iter().zip(&self.seen.members);
        let each = members.filter_map(|(member, seen)| {
            let volume = seen.volume.as_ref().ok()?;
            let user = volume.user.as_ref().filter(|_| !self.is_fenced(volume))?;
            let claim = &member.claim;
            Some(match seen.pods.is_empty() {
                true => format!("claim {claim} is in use: {user}"),
                false => format!("claim {claim} is in use by pods {}", seen.pods.join(", ")),
            })
        });
        let each: Vec<_> = each.collect();
        (!each.is_empty()).then(|| each.join("; "))
    }

    /// The first member whose agent cannot be asked.
    fn unknown(&self) -> Option<String> {
        let members = self.status.members.iter().zip(&self.seen.members);
        let mut unknown = members.filter_map(|(member, seen)| {
            let why = seen.volume.as_ref().err()?;
            Some(format!("the volume of claim {}: {why}", member.claim))
        });
        unknown.next()
    }

    /// The volumes of the members whose agents have answered.
    fn known(&self) -> impl Iterator<Item = (usize, &VolumeRevertStatus)> {
        let members = self.seen.members.iter().enumerate();
        members.filter_map(|(n, member)| Some((n, member.volume.as_ref().ok()?)))
    }

    fn towards_switch(&self) -> Decision {
        let phase = self.status.phase;
        if let Some(unknown) = self.unknown() {
            return self.wait(phase, "AgentUnknown", unknown);
        }
        if let Some(way) = self.in_the_way() {
            return self.wait(phase.max(Phase::Waiting), "InUse", way);
        }
        if let Some((n, _)) = self.known().find(|(_, volume)| !self.is_fenced(volume)) {
            return self.act(phase.max(Phase::Fencing), Step::Fence(n));
        }
        // Until the switch the volumes have their old content, so one that is gone is created again.
        if let Some(keeping) = self.keep_old(phase.max(Phase::Keeping)) {
            return keeping;
        }
        if phase < Phase::Preparing {
            return self.wait(Phase::Preparing, "Proceeding", "");
        }
        match self.known().any(|(_, volume)| !volume.is_prepared) {
            true => self.act(Phase::Preparing, Step::Prepare),
            // The next observation switches them, once this is written.
            false => self.wait(Phase::Switching, "Proceeding", ""),
        }
    }

    /// What is to be done until each member has a VolumeSnapshot of its old content.
    fn keep_old(&self, phase: Phase) -> Option<Decision> {
        if !self.seen.object.spec.keep_old {
            return None;
        }
        let mut olds = self.seen.members.iter().enumerate();
        olds.find_map(|(n, member)| match &member.old {
            Old::Ready => None,
            Old::Pending(why) => Some(self.wait(phase, "KeepingOld", why.clone())),
            Old::Absent | Old::Foreign => Some(self.act(phase, Step::Keep(n))),
        })
    }

    /// All members get their new content, whatever happens.
    fn roll_forward(&self) -> Decision {
        let fenced = |volume: &VolumeRevertStatus| volume.exists && self.is_fenced(volume);
        let mut left = self
            .known()
            .filter(|(_, volume)| fenced(volume) && !volume.is_switched);
        if let Some((n, volume)) = left.next() {
            let step = match volume.is_prepared {
                true => Step::Switch(n),
                false => Step::Prepare,
            };
            return self.act(Phase::Switching, step);
        }
        if let Some(unknown) = self.unknown() {
            return self.wait(Phase::Switching, "AgentUnknown", unknown);
        }
        if let Some((n, _)) = self.known().find(|(_, volume)| fenced(volume)) {
            return self.act(Phase::Switching, Step::Lift(n));
        }
        let missing = self.known().filter_map(|(n, _)| {
            let (member, seen) = (&self.status.members[n], &self.seen.members[n]);
            let claim = &member.claim;
            match self.state(member.state, seen) {
                MemberState::Reverted => None,
                MemberState::Lost => Some(format!("the volume of claim {claim} is lost")),
                _ => Some(format!(
                    "the fence of claim {claim} is gone, and its content is not known"
                )),
            }
        });
        let missing: Vec<_> = missing.collect();
        match missing.is_empty() {
            true => self.wait(Phase::Done, "Reverted", ""),
            false => self.wait(Phase::Incomplete, "MemberMissing", missing.join("; ")),
        }
    }

    /// All members keep their content, for good.
    fn undo(&self) -> Decision {
        let is_open = |(n, volume): &(usize, &VolumeRevertStatus)| {
            // Under another fence it cannot begin, and the end of that changes the number.
            let is_planned = volume.number == self.status.members[*n].number;
            let may_begin = volume.fenced.is_none() && is_planned;
            volume.exists && (self.is_fenced(volume) || may_begin)
        };
        let (phase, why) = (Phase::Aborting, self.status.message.clone());
        let reason = self.status.conditions.first();
        let reason = reason.map_or_else(|| "Undone".into(), |it| it.reason.clone());
        if let Some((n, _)) = self.known().find(is_open) {
            return Decision {
                status: self.shown(phase, &reason, why),
                step: Some(Step::Abort(n)),
            };
        }
        match self.unknown() {
            Some(_) => self.wait(phase, &reason, why),
            None => self.wait(Phase::Failed, &reason, why),
        }
    }
}

/// The reason of the condition after a step has failed.
pub(super) const FAILED: &str = "StepFailed";

#[cfg(test)]
mod tests;
