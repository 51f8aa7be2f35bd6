//! What the status of a move shows.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::decide::{Decision, Observed};
use super::object::{MoveStatus, Phase};
use super::observe::bytes_done;
use crate::router::kube::reconcile::with_transitions;

/// The condition of a move: whether it proceeds.
pub(super) const CONDITION: &str = "Proceeding";
/// The condition of a move: whether its target has the content that the volume had a short time ago.
const PRE_COPIED: &str = "CopiedInAdvance";
/// Its reason after a step has failed.
pub(super) const FAILED: &str = "StepFailed";

/// The status that a decision leads to, without the step.
pub(super) fn shown(seen: &Observed, decision: &Decision) -> MoveStatus {
    let before = seen.object.status.clone().unwrap_or_default();
    let failed = |condition: &Condition| condition.reason == FAILED;
    if decision.step.is_some()
        && decision.phase == before.phase
        && before.conditions.iter().any(failed)
    {
        // Until another phase is reached, it shows why the last try of a step has failed.
        return before;
    }
    let waits = !decision.message.is_empty();
    let condition = Condition {
        last_transition_time: Time(seen.now),
        message: decision.message.clone(),
        observed_generation: None,
        reason: decision.reason.into(),
        status: if waits { "False" } else { "True" }.into(),
        type_: CONDITION.into(),
    };
    let generation = seen.object.metadata.generation;
    let mut conditions = vec![condition];
    conditions.extend(copied_in_advance(seen, &before));
    let conditions = with_transitions(conditions, &before.conditions, generation);
    let total = before.bytes_total;
    let done = seen
        .copy
        .as_ref()
        .map_or(before.bytes_done, |copy| bytes_done(copy, total));
    let abort_reason = before.abort_reason.clone();
    let abort_reason = abort_reason.or_else(|| decision.abort_reason.clone());
    MoveStatus {
        phase: decision.phase,
        message: match decision.phase {
            // The events about it expire.
            Phase::Aborted => abort_reason.clone().unwrap_or_default(),
            _ => decision.message.clone(),
        },
        abort_reason,
        bytes_done: match before.phase.is_final() || before.switched_at.is_some() {
            true => before.bytes_done,
            false => done,
        },
        conditions,
        ..before
    }
}

/// The condition about the copies before the fence, once there is one. From the fence on it stays as it
/// was.
fn copied_in_advance(seen: &Observed, before: &MoveStatus) -> Option<Condition> {
    let mut conditions = before.conditions.iter();
    let pre_copy = &before.pre_copy;
    if pre_copy.round == 0 || before.fenced_at.is_some() || before.phase > Phase::Waiting {
        return conditions.find(|one| one.type_ == PRE_COPIED).cloned();
    }
    let content = seen.copy.as_ref().ok().and_then(|copy| copy.content);
    let (status, reason, message) = match &pre_copy.problem {
        Some(problem) => ("False", "Refused", problem.clone()),
        None if content.is_some_and(|content| content.is_whole) => {
            ("True", "Copied", String::new())
        }
        None => ("False", "Copying", String::new()),
    };
    Some(Condition {
        last_transition_time: Time(seen.now),
        message,
        observed_generation: None,
        reason: reason.into(),
        status: status.into(),
        type_: PRE_COPIED.into(),
    })
}
