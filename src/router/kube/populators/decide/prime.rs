//! Decisions about a claim that has a prime claim: an attempt is in progress, or has ended.

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::SignedDuration;

use super::{Class, Decision, Phase, PodSeen, Seen, Step, bind, cached, delete_pod, retries};
use crate::model::size::HumanBytes;
use crate::router::kube::populators::cache::{has_source, restored_from};
use crate::router::kube::populators::pod::{Attempt, ending, waits_for};
use crate::router::kube::populators::state::{
    MAX_FAILURES, NODE, POD, Point, SELECTED_NODE, SOURCE, State, WAITS_FOR_TURN, annotation,
    is_bound, is_leaving, phase, pod_phase, point_of, uid, volume_name,
};

/// Between two records of progress at a claim.
const PROGRESS_INTERVAL: SignedDuration = SignedDuration::from_secs(15);

/// What follows a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// No other attempt.
    Nothing,
    /// An attempt that continues on the same volume.
    SameVolume,
    /// An attempt on a new volume.
    NewVolume,
}

/// The UID of the claim to which a PersistentVolume is bound.
pub(super) fn bound_to(volume: &PersistentVolume) -> Option<&str> {
    let claim = volume.spec.as_ref()?.claim_ref.as_ref()?;
    claim.uid.as_deref()
}

pub(super) fn decide(seen: &Seen, prime: &PersistentVolumeClaim) -> Decision {
    if let PodSeen::Forbidden(why) = &seen.pod {
        return Decision::problem(("NotAllowed", why.clone()));
    }
    let state = State::of(&seen.claim);
    let volume = seen.volume.as_ref();
    if volume.is_some_and(|volume| bound_to(volume) == Some(uid(&seen.claim))) {
        return Decision::of(
            Phase::Binding,
            "Binding",
            "the volume is bound to the claim",
        );
    }
    let is_given_up = state.given_up.as_deref() == Some(uid(prime));
    if is_given_up || is_leaving(prime) || phase(prime) == "Lost" || is_outdated(seen, prime) {
        return clean_up(seen, prime);
    }
    if let Some(from) = restored_from(prime) {
        return cached::restored(seen, prime, &state, from);
    }
    // A user has created it.
    if has_source(prime) {
        return clean_up(seen, prime);
    }
    if !is_bound(prime) {
        return unbound(seen, prime);
    }
    let record = annotation(prime, POD);
    match (record, &seen.pod) {
        (Some(record), PodSeen::Here(pod)) if uid(pod.as_ref()) == record => {
            recorded(seen, prime, pod, &state)
        }
        // The controller was interrupted between its creation and its record.
        (_, PodSeen::Here(_)) => {
            let why = "the pod is not the recorded one";
            fail(seen, prime, state, Next::NewVolume, why)
        }
        (Some(record), _) if state.failed_pod.as_deref() != Some(record) => {
            fail(seen, prime, state, Next::NewVolume, "the pod was deleted")
        }
        // There is no pod, and none was lost.
        (_, _) => begin(seen, prime, &state),
    }
}

/// The source was changed before the program has begun. An attempt that has begun goes on.
fn is_outdated(seen: &Seen, prime: &PersistentVolumeClaim) -> bool {
    let Ok((_, source)) = &seen.source else {
        return false;
    };
    let has_begun = match &seen.pod {
        PodSeen::Here(pod) => {
            annotation(prime, POD) == Some(uid(pod.as_ref())) && pod_phase(pod) != "Pending"
        }
        PodSeen::Absent | PodSeen::Forbidden(_) => false,
    };
    !has_begun && annotation(prime, SOURCE) != Some(&source.version())
}

/// Pod and prime claim are deleted, and with the prime claim the volume.
fn clean_up(seen: &Seen, prime: &PersistentVolumeClaim) -> Decision {
    let decision = Decision::waits("CleaningUp", "what a failed attempt has left is deleted");
    match &seen.pod {
        PodSeen::Here(pod) => delete_pod(decision, pod),
        _ if is_leaving(prime) => decision,
        _ => decision.with(Step::DeletePrime),
    }
}

/// The volume of the prime claim is created.
fn unbound(seen: &Seen, prime: &PersistentVolumeClaim) -> Decision {
    let name = prime.metadata.name.as_deref().unwrap_or_default();
    let message = format!("the volume is created; events are at claim {name}");
    let decision = Decision::of(Phase::Provisioning, "Provisioning", message);
    if volume_name(prime).is_some() || seen.class != (Class::Own { waits: true }) {
        return decision;
    }
    let node = |claim: &PersistentVolumeClaim| annotation(claim, SELECTED_NODE).map(str::to_string);
    let copied = annotation(prime, NODE);
    match (node(prime), node(&seen.claim), copied) {
        (Some(_), ..) => decision,
        (None, Some(node), Some(copied)) if node == copied => {
            let room = cached::makes_room(seen, prime, &node);
            decision.with(room.unwrap_or(Step::DropNode))
        }
        (None, Some(node), _) => decision.with(Step::SelectNode(node)),
        (None, None, Some(_)) => decision.with(Step::ForgetNode),
        (None, None, None) => decision,
    }
}

/// A pod is created: the first one of the prime claim, or one that continues on its volume.
fn begin(seen: &Seen, prime: &PersistentVolumeClaim, state: &State) -> Decision {
    let (kind, source) = match &seen.source {
        Ok(found) => found,
        Err(why) => return Decision::problem(why.clone()),
    };
    let origins = match &seen.origins {
        Ok(origins) => origins.clone(),
        Err(why) => return Decision::problem(why.clone()),
    };
    if !state.is_due(seen.now) {
        return retries(state);
    }
    if let Some(why) = &seen.waits_for_turn {
        return Decision::waits(WAITS_FOR_TURN, why);
    }
    let attempt = Attempt {
        kind: *kind,
        source: source.clone(),
        origins,
        resume: point_of(prime),
        digest: state.digest.clone(),
    };
    let decision = Decision::of(Phase::Populating, "Populating", "the pod is created");
    decision.with(Step::CreatePod(Box::new(attempt)))
}

/// The recorded pod exists.
fn recorded(seen: &Seen, prime: &PersistentVolumeClaim, pod: &Pod, state: &State) -> Decision {
    if state.failed_pod.as_deref() == Some(uid(pod)) {
        return delete_pod(retries(state), pod);
    }
    let numbers = seen.numbers.as_ref();
    let point = numbers.and_then(|numbers| numbers.point());
    let digest = numbers.and_then(|numbers| numbers.digest());
    let waits = match waits_for(pod) {
        Some(why) => format!("the pod waits: {why}"),
        None => filling(state),
    };
    let mut populating = Decision::of(Phase::Populating, "Populating", waits);
    if let Some(shown) = &mut populating.shown {
        shown.percent = state.percent();
    }
    // Both are recorded before the end of the pod is: the next attempt needs them.
    if let Some(point) = point.filter(|point| is_newer(point, prime)) {
        return populating.with(Step::Keep(point));
    }
    if state.digest.is_none() && digest.is_some() {
        let state = State {
            digest,
            ..state.clone()
        };
        return populating.with(Step::Note(Box::new(state)));
    }
    match pod_phase(pod) {
        "Succeeded" => succeeded(seen, prime),
        "Failed" => {
            let ending = ending(pod);
            let has_point = point_of(prime).is_some();
            let next = match ending.exit_code {
                Some(10) => Next::Nothing,
                Some(11) => Next::SameVolume,
                Some(12) => Next::NewVolume,
                Some(_) if has_point => Next::SameVolume,
                // Without an exit code it is not certain that the program has ended.
                Some(_) | None => Next::NewVolume,
            };
            fail(seen, prime, state.clone(), next, &ending.message)
        }
        _ => progress(seen, state, populating),
    }
}

fn is_newer(point: &Point, prime: &PersistentVolumeClaim) -> bool {
    point_of(prime).is_none_or(|old| old.validator != point.validator || old.bytes < point.bytes)
}

/// How far a pod is, as it is recorded at the claim.
fn filling(state: &State) -> String {
    match (state.percent(), state.received_bytes, state.total_bytes) {
        (Some(percent), Some(bytes), Some(total)) => {
            let bytes = HumanBytes(bytes);
            format!(
                "the pod fills the volume: {percent} %, {bytes} of {} received",
                HumanBytes(total)
            )
        }
        (_, Some(bytes), _) => format!("the pod fills the volume: {} received", HumanBytes(bytes)),
        _ => "the pod fills the volume".into(),
    }
}

fn progress(seen: &Seen, state: &State, populating: Decision) -> Decision {
    let Some(numbers) = &seen.numbers else {
        return populating;
    };
    let last = state.progress_at.as_ref();
    let is_early = last.is_some_and(|last| seen.now.duration_since(last.0) < PROGRESS_INTERVAL);
    let is_same = state.received_bytes == Some(numbers.received);
    if is_early || is_same {
        return populating;
    }
    let now = Some(Time(seen.now));
    // A pod that begins again with fewer bytes has another rate.
    let begun = state.progress_since_bytes;
    let begun = begun.filter(|bytes| last.is_some() && *bytes <= numbers.received);
    let state = State {
        received_bytes: Some(numbers.received),
        total_bytes: numbers.total,
        progress_at: now.clone(),
        progress_since: match begun {
            Some(_) => state.progress_since.clone(),
            None => now,
        },
        progress_since_bytes: begun.or(Some(numbers.received)),
        ..state.clone()
    };
    populating.with(Step::Note(Box::new(state)))
}

/// The volume is filled. The pod stays until the claim is bound, as the only evidence of that.
fn succeeded(seen: &Seen, prime: &PersistentVolumeClaim) -> Decision {
    let cached = cached::before_binding(seen, prime);
    cached.unwrap_or_else(|| bind(seen, prime))
}

/// Records that an attempt has failed.
fn fail(
    seen: &Seen,
    prime: &PersistentVolumeClaim,
    state: State,
    next: Next,
    message: &str,
) -> Decision {
    let failures = state.failures.saturating_add(1);
    let is_final = next == Next::Nothing || failures >= MAX_FAILURES;
    let stays = next == Next::SameVolume && !is_final;
    let record = annotation(prime, POD).map(str::to_string);
    let source = annotation(prime, SOURCE).map(str::to_string);
    let state = State {
        source: source.unwrap_or(state.source),
        failures,
        failed_at: Some(Time(seen.now)),
        failed_pod: record.filter(|_| stays),
        given_up: (!stays).then(|| uid(prime).to_string()),
        is_final,
        message: message.into(),
        received_bytes: None,
        total_bytes: None,
        progress_at: None,
        progress_since: None,
        progress_since_bytes: None,
        ..state
    };
    retries(&state).with(Step::Note(Box::new(state.clone())))
}
