//! What is done next about a claim that names a data source. Pure functions of what was read.
//!
//! The volume is created for another claim, the prime claim `prime-UID`, and filled by a pod of the same
//! name. When the pod has succeeded, the PersistentVolume is bound to the claim itself.
//!
//! - There is at most one prime claim and one pod of a claim, because their names follow from its UID.
//!   The prime claim records the UID of its pod, and only the end of that pod is believed. A pod that is
//!   not recorded may have written to the volume, so the prime claim is given up with it.
//! - A failure is recorded at the claim before anything is deleted. A prime claim that is given up is
//!   never used again, so nothing of two attempts is mixed. Only an attempt that can continue where the
//!   last one has ended keeps it.
//! - Each step names its object by uid and version. So a controller that has lost its leadership without
//!   noticing cannot bind or delete anything that has changed since.

mod cached;
mod prime;
#[cfg(test)]
mod tests;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod};
use k8s_openapi::jiff::Timestamp;

use super::cache::CacheSeen;
use super::metrics::Numbers;
use super::pod::{Attempt, check};
use super::source::{Kind, Source};
use super::state::{
    MAX_FAILURES, Point, SELECTED_NODE, State, WAITS_FOR_TURN, annotation, is_bound, is_leaving,
    is_of, uid, volume_name,
};

/// The StorageClass of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// There is none yet, or it is of another driver: the claim is left alone.
    Foreign,
    /// Of this driver.
    Own {
        /// It waits for the first consumer: volumes are created on the node that was selected.
        waits: bool,
    },
}

/// The pod of a claim.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum PodSeen {
    /// The namespace does not allow the controller to create pods.
    Forbidden(String),
    Absent,
    Here(Box<Pod>),
}

/// Everything that is known about a claim.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) now: Timestamp,
    pub(super) driver: String,
    pub(super) claim: PersistentVolumeClaim,
    pub(super) class: Class,
    /// The source, or why it cannot be used.
    pub(super) source: Result<(Kind, Source), Reason>,
    /// The origins that the Secret of the source lists, or why it cannot be used.
    pub(super) origins: Result<Vec<String>, Reason>,
    pub(super) prime: Option<PersistentVolumeClaim>,
    /// The PersistentVolume of the prime claim.
    pub(super) volume: Option<PersistentVolume>,
    pub(super) pod: PodSeen,
    /// The last line of the log of the pod.
    pub(super) numbers: Option<Numbers>,
    /// `None` if the content of the source is not cached.
    pub(super) cache: Option<CacheSeen>,
    /// Why no pod may be started for the claim now; `None` if it is its turn.
    pub(super) waits_for_turn: Option<String>,
}

/// A word and a sentence about why nothing is done.
pub(super) type Reason = (&'static str, String);

/// The namespace of the source does not allow the use of its source by the claim.
pub(super) const NOT_GRANTED: &str = "NotGranted";

/// One step.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    /// The prime claim is created, for a node that was selected, and empty or from a snapshot.
    CreatePrime {
        node: Option<String>,
        from: Option<String>,
        /// No snapshot of its volume will be created, so no other claim waits for it.
        keeps_no_snapshot: bool,
    },
    /// The prime claim gets the node that was selected for the claim.
    SelectNode(String),
    /// The provisioner has given back the node of the prime claim: the scheduler selects another one
    /// when the claim has none, either.
    DropNode,
    /// The prime claim forgets the node that was given back.
    ForgetNode,
    /// A pod is created, and recorded at the prime claim.
    CreatePod(Box<Attempt>),
    /// The pod with this UID is deleted.
    DeletePod(String),
    DeletePrime,
    /// The volume of the prime claim is snapshotted, and the snapshot is recorded at the prime claim.
    CreateSnapshot(String),
    /// The VolumeSnapshotContent with this name and version records that its snapshot may be used.
    RecordSnapshot(String, Option<String>),
    /// The snapshot with this name and UID is deleted, because space is short or there are too many.
    DeleteSnapshot(String, String),
    /// It is deleted because it cannot be used.
    GiveUpSnapshot(String, String),
    /// The snapshot with this name and UID is deleted, and the provisioner tries this node once more.
    MakeRoom {
        name: String,
        uid: String,
        node: String,
    },
    /// A point at which another attempt can continue is recorded at the prime claim.
    Keep(Point),
    /// The PersistentVolume is bound to the claim.
    Bind,
    /// The state is recorded at the claim.
    Note(Box<State>),
}

/// How far a claim is, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    Failed,
    Waiting,
    Provisioning,
    Populating,
    Binding,
    Populated,
}

impl Phase {
    pub(super) const ALL: [Phase; 6] = [
        Phase::Failed,
        Phase::Waiting,
        Phase::Provisioning,
        Phase::Populating,
        Phase::Binding,
        Phase::Populated,
    ];

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Phase::Failed => "Failed",
            Phase::Waiting => "Waiting",
            Phase::Provisioning => "Provisioning",
            Phase::Populating => "Populating",
            Phase::Binding => "Binding",
            Phase::Populated => "Populated",
        }
    }
}

/// What is shown of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shown {
    pub(super) phase: Phase,
    pub(super) reason: &'static str,
    pub(super) message: String,
    /// A person has to do something.
    pub(super) is_problem: bool,
    /// How much of the content was received by the pod that runs.
    pub(super) percent: Option<u8>,
}

impl Shown {
    /// Whether users have not been shown this before: another reason or problem, or another quarter of
    /// the content.
    pub(super) fn is_news_after(&self, before: Option<&Shown>) -> bool {
        let quarter = |shown: &Shown| shown.percent.map_or(0, |percent| percent / 25);
        before.is_none_or(|old| {
            old.reason != self.reason
                || self.is_problem && old.message != self.message
                || quarter(old) < quarter(self)
        })
    }
}

/// What is decided.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Decision {
    pub(super) step: Option<Step>,
    /// `None` if nothing is shown, because the claim is left alone.
    pub(super) shown: Option<Shown>,
}

impl Decision {
    fn of(phase: Phase, reason: &'static str, message: impl Into<String>) -> Decision {
        let shown = Shown {
            phase,
            reason,
            message: message.into(),
            is_problem: false,
            percent: None,
        };
        Decision {
            step: None,
            shown: Some(shown),
        }
    }

    fn waits(reason: &'static str, message: impl Into<String>) -> Decision {
        Decision::of(Phase::Waiting, reason, message)
    }

    /// Nothing is done before a person has changed something.
    fn problem((reason, message): Reason) -> Decision {
        let mut decision = Decision::waits(reason, message);
        if let Some(shown) = &mut decision.shown {
            shown.is_problem = true;
        }
        decision
    }

    fn with(self, step: Step) -> Decision {
        Decision {
            step: Some(step),
            ..self
        }
    }
}

/// Decides about a claim.
pub(super) fn decide(seen: &Seen) -> Decision {
    let Class::Own { .. } = seen.class else {
        return Decision::default();
    };
    // What belongs to it is deleted with it.
    if is_leaving(&seen.claim) {
        return Decision::default();
    }
    if let Some(taken) = taken(seen) {
        return Decision::problem(taken);
    }
    if is_bound(&seen.claim) {
        return bound(seen);
    }
    if volume_name(&seen.claim).is_some() {
        return Decision::of(Phase::Binding, "Binding", "the claim names its volume");
    }
    match &seen.prime {
        Some(prime) => prime::decide(seen, prime),
        None => without_prime(seen),
    }
}

/// A user has created an object with the name of the prime claim or of the pod.
fn taken(seen: &Seen) -> Option<Reason> {
    let prime = seen.prime.as_ref();
    let is_taken = prime.is_some_and(|prime| !is_of(prime, &seen.claim))
        || matches!(&seen.pod, PodSeen::Here(pod) if !is_of(pod.as_ref(), &seen.claim));
    is_taken.then(|| {
        let name = super::state::prime_name(&seen.claim);
        let message = format!("{name} exists and was not created for this claim; delete it");
        ("NameTaken", message)
    })
}

/// The claim has its volume. What is left of the population is deleted.
fn bound(seen: &Seen) -> Decision {
    let state = State::of(&seen.claim);
    let populated = || Decision::of(Phase::Populated, "Populated", "the volume is filled");
    if let PodSeen::Here(pod) = &seen.pod {
        return delete_pod(populated(), pod);
    }
    if let Some(prime) = &seen.prime {
        let is_its = seen.volume.as_ref().is_some_and(|volume| {
            prime::bound_to(volume) == Some(uid(prime))
                && volume.metadata.name.as_deref() == volume_name(&seen.claim)
        });
        // Its deletion would delete the volume.
        return match is_its || is_leaving(prime) {
            true => populated(),
            false => populated().with(Step::DeletePrime),
        };
    }
    let is_forbidden = matches!(seen.pod, PodSeen::Forbidden(_));
    if state.source.is_empty() || state.is_done || is_forbidden {
        // Nothing was begun, and a user has given it a volume; or nothing more may be done.
        return Decision {
            step: None,
            shown: state.is_done.then(|| populated().shown).flatten(),
        };
    }
    let done = State {
        is_done: true,
        failed_pod: None,
        given_up: None,
        message: String::new(),
        ..state
    };
    populated().with(Step::Note(Box::new(done)))
}

/// The PersistentVolume of a prime claim is bound to the claim.
fn bind(seen: &Seen, its_prime: &PersistentVolumeClaim) -> Decision {
    let binding = Decision::of(Phase::Binding, "Binding", "the volume is filled");
    let is_its = seen.volume.as_ref().is_some_and(|volume| {
        let spec = volume.spec.as_ref();
        let csi = spec.and_then(|spec| spec.csi.as_ref());
        volume.metadata.name.as_deref() == volume_name(its_prime)
            && prime::bound_to(volume) == Some(uid(its_prime))
            && csi.is_some_and(|csi| csi.driver == seen.driver)
            && !is_leaving(volume)
    });
    match is_its {
        true => binding.with(Step::Bind),
        false => Decision::problem((
            "VolumeChanged",
            "the PersistentVolume of the prime claim is not bound to it any more".into(),
        )),
    }
}

fn delete_pod(decision: Decision, pod: &Pod) -> Decision {
    match is_leaving(pod) {
        true => decision,
        false => decision.with(Step::DeletePod(uid(pod).into())),
    }
}

/// No attempt is in progress.
fn without_prime(seen: &Seen) -> Decision {
    let state = State::of(&seen.claim);
    if let PodSeen::Here(pod) = &seen.pod {
        return delete_pod(
            Decision::waits("CleaningUp", "the pod of an attempt is deleted"),
            pod,
        );
    }
    if let PodSeen::Forbidden(why) = &seen.pod {
        return Decision::problem(("NotAllowed", why.clone()));
    }
    let (kind, source) = match &seen.source {
        Ok(found) => found,
        Err(why) => return Decision::problem(why.clone()),
    };
    if state.source != source.version() {
        let new = State::new(source.version());
        return Decision::waits("Begins", "its population begins").with(Step::Note(Box::new(new)));
    }
    if state.is_final {
        return failed(&state);
    }
    if let Err(why) = check(*kind, &source.spec, &seen.claim) {
        return Decision::problem(("Unsuitable", why));
    }
    if let Err(why) = &seen.origins {
        return Decision::problem(why.clone());
    }
    if !state.is_due(seen.now) {
        return retries(&state);
    }
    let node = annotation(&seen.claim, SELECTED_NODE).map(str::to_string);
    if seen.class == (Class::Own { waits: true }) && node.is_none() {
        return Decision::waits(
            "WaitForFirstConsumer",
            "the volume is created when a pod that uses the claim is scheduled",
        );
    }
    create_prime(seen, &state, node)
}

fn create_prime(seen: &Seen, state: &State, node: Option<String>) -> Decision {
    let provisioning = |message| Decision::of(Phase::Provisioning, "Provisioning", message);
    if let Some(cache) = seen.cache.as_ref().filter(|_| !state.is_uncached) {
        if let Some(snapshot) = cache.find_usable(&seen.claim, &seen.driver) {
            let decision = provisioning("the volume is created from a cached snapshot");
            return decision.with(Step::CreatePrime {
                node,
                from: Some(snapshot.name.clone()),
                keeps_no_snapshot: false,
            });
        }
        if let Some(other) = &cache.receiver {
            let message = format!("claim {other} receives the same content for this node");
            return Decision::waits("WaitForCache", message);
        }
    }
    if let Some(why) = &seen.waits_for_turn {
        return Decision::waits(WAITS_FOR_TURN, why);
    }
    // There is one with the name of the key, which this claim cannot use.
    let cache = seen.cache.as_ref();
    let keeps_no_snapshot = cache.is_some_and(|cache| cache.find_named().is_some());
    provisioning("the volume is created").with(Step::CreatePrime {
        node,
        from: None,
        keeps_no_snapshot,
    })
}

/// No other attempt is made.
fn failed(state: &State) -> Decision {
    let reason = match state.failures >= MAX_FAILURES {
        true => "AttemptsExhausted",
        false => "PopulateFailed",
    };
    let mut decision = Decision::of(Phase::Failed, reason, state.message.clone());
    if let Some(shown) = &mut decision.shown {
        shown.is_problem = true;
    }
    decision
}

/// The last attempt has failed, and another one is made later.
fn retries(state: &State) -> Decision {
    let message = format!("attempt {} has failed: {}", state.failures, state.message);
    Decision::waits("AttemptFailed", message)
}
