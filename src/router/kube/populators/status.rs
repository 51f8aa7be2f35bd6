//! The status of data sources: the claims that name them, and a condition.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use ::kube::ResourceExt;
use ::kube::api::Api;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;

use super::Populators;
use super::controller::Memory;
use super::decide::{Class, Phase, Shown};
use super::observe::class_of;
use super::source::{ClaimStatus, Kind, Source, SourceName, SourceStatus, source_of};
use super::state::{State, is_bound, uid};
use crate::error::Result;
use crate::router::kube::reconcile::{
    Controller, Next, Outcome, Reconciler, with_transitions, write_status,
};

/// The most claims in a status.
const MAX_CLAIMS: usize = 100;
/// The condition: whether all claims that name the source are filled, or will be without help.
const CONDITION: &str = "Proceeding";

/// A source and the status that it should have.
pub(super) struct Reported {
    kind: Kind,
    source: Source,
    wanted: SourceStatus,
}

impl fmt::Display for Reported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.as_str(), self.source.path())
    }
}

/// Writes the status of data sources.
pub(super) struct StatusController(pub(super) Arc<Populators>);

#[tonic::async_trait]
impl Reconciler for StatusController {
    type Object = Reported;
    type Step = SourceStatus;

    fn next(reported: &Reported) -> Next<SourceStatus> {
        match reported.source.status.as_ref() == Some(&reported.wanted) {
            true => Next::Done,
            false => Next::Step(reported.wanted.clone()),
        }
    }

    async fn execute(&self, reported: &Reported, status: SourceStatus) -> Result<Outcome> {
        let namespace = reported.source.namespace().unwrap_or_default();
        let client = self.0.client.clone();
        let api = Api::<Source>::namespaced_with(client, &namespace, &reported.kind);
        let name = reported.source.name_any();
        write_status(&api, &reported.to_string(), &name, &status).await
    }
}

#[tonic::async_trait]
impl Controller for StatusController {
    const NAME: &'static str = "statuses of data sources";

    async fn list(&self, _leads_since: Timestamp) -> Option<Vec<Reported>> {
        if !self.0.has_read_objects() {
            return None;
        }
        let mut named: BTreeMap<SourceName, Vec<PersistentVolumeClaim>> = BTreeMap::new();
        for claim in self.0.claims().into_values() {
            let is_own = matches!(class_of(&self.0, &claim), Class::Own { .. });
            if let (Some(name), true) = (source_of(&claim), is_own) {
                named.entry(name).or_default().push(claim);
            }
        }
        let memory = self.0.memory();
        let now = Timestamp::now();
        let each = Kind::ALL.into_iter().flat_map(|kind| {
            let sources = self.0.sources(kind).into_values();
            sources.map(move |source| (kind, source))
        });
        let each = each.map(|(kind, source)| {
            let name = SourceName {
                kind,
                namespace: source.namespace().unwrap_or_default(),
                name: source.name_any(),
            };
            let claims = named.get(&name).map(Vec::as_slice).unwrap_or_default();
            let wanted = wanted(&source, claims, &memory, now);
            Reported {
                kind,
                source,
                wanted,
            }
        });
        Some(each.collect())
    }
}

/// The status that a source should have.
fn wanted(
    source: &Source,
    claims: &[PersistentVolumeClaim],
    memory: &Memory,
    now: Timestamp,
) -> SourceStatus {
    let before = source.status.clone().unwrap_or_default();
    let mut each: Vec<(Phase, bool, ClaimStatus)> = Vec::new();
    for claim in claims {
        let state = State::of(claim);
        match memory.shown(uid(claim)) {
            _ if !is_granted(source, claim, &state, memory) => {}
            Some(shown) => each.push((shown.phase, shown.is_problem, entry(claim, &state, shown))),
            None if state.is_done => {
                let shown = populated();
                each.push((Phase::Populated, false, entry(claim, &state, &shown)));
            }
            // A user has given it a volume.
            None if is_bound(claim) => {}
            // This controller has not decided about it yet.
            None => {
                let same = |one: &&ClaimStatus| one.uid == uid(claim);
                if let Some(old) = before.claims.iter().find(same) {
                    let phase = Phase::ALL
                        .into_iter()
                        .find(|phase| phase.as_str() == old.phase);
                    each.push((phase.unwrap_or(Phase::Waiting), false, old.clone()));
                }
            }
        }
    }
    for (phase, _, claim) in &mut each {
        claim.since = since(*phase, claim, &before, now);
    }
    each.sort_by(|a, b| {
        let key =
            |one: &(Phase, bool, ClaimStatus)| (one.0, one.2.namespace.clone(), one.2.name.clone());
        key(a).cmp(&key(b))
    });
    let count = |is_it: fn(Phase) -> bool| each.iter().filter(|one| is_it(one.0)).count() as u64;
    let problem = each.iter().find(|one| one.1).map(|one| &one.2);
    let condition = Condition {
        last_transition_time: Time(now),
        message: problem.map_or_else(String::new, |claim| {
            format!(
                "claim {}/{}: {}",
                claim.namespace, claim.name, claim.message
            )
        }),
        observed_generation: None,
        reason: problem.map_or("Proceeding", |claim| &claim.reason).into(),
        status: if problem.is_some() { "False" } else { "True" }.into(),
        type_: CONDITION.into(),
    };
    let generation = source.metadata.generation;
    SourceStatus {
        populated: count(|phase| phase == Phase::Populated),
        failed: count(|phase| phase == Phase::Failed),
        waiting: count(|phase| !matches!(phase, Phase::Populated | Phase::Failed)),
        conditions: with_transitions(vec![condition], &before.conditions, generation),
        claims: each.into_iter().map(|one| one.2).take(MAX_CLAIMS).collect(),
    }
}

/// Since when a claim that is neither populated nor failed has its phase.
fn since(phase: Phase, claim: &ClaimStatus, before: &SourceStatus, now: Timestamp) -> Option<Time> {
    if matches!(phase, Phase::Populated | Phase::Failed) {
        return None;
    }
    let mut old = before.claims.iter();
    let old = old.find(|old| old.uid == claim.uid && old.phase == claim.phase);
    old.and_then(|old| old.since.clone()).or(Some(Time(now)))
}

/// Whether a claim is shown in the status of a source. One of another namespace is, as long as a
/// ReferenceGrant was seen for it: otherwise everybody who can create claims could change the status.
fn is_granted(
    source: &Source,
    claim: &PersistentVolumeClaim,
    state: &State,
    memory: &Memory,
) -> bool {
    let is_own = claim.metadata.namespace == source.metadata.namespace;
    // What was populated is not observed again. The UID of the source is not known without a grant.
    let was_populated = || state.is_done && state.is_of(source);
    is_own || memory.is_granted(uid(claim)).unwrap_or_else(was_populated)
}

fn populated() -> Shown {
    Shown {
        phase: Phase::Populated,
        reason: "Populated",
        message: String::new(),
        is_problem: false,
        percent: None,
    }
}

fn entry(claim: &PersistentVolumeClaim, state: &State, shown: &Shown) -> ClaimStatus {
    let meta = &claim.metadata;
    ClaimStatus {
        namespace: meta.namespace.clone().unwrap_or_default(),
        name: meta.name.clone().unwrap_or_default(),
        uid: uid(claim).into(),
        phase: shown.phase.as_str().into(),
        reason: shown.reason.into(),
        message: shown.message.clone(),
        failures: state.failures,
        received_bytes: state.received_bytes,
        total_bytes: state.total_bytes,
        digest: state.digest.clone(),
        since: None,
        progress_at: state.progress_at.clone(),
        progress_since: state.progress_since.clone(),
        progress_since_bytes: state.progress_since_bytes,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::state::STATE;
    use super::*;

    fn claim(number: usize, state: &State) -> PersistentVolumeClaim {
        let state = serde_json::to_string(state).unwrap();
        serde_json::from_value(json!({"metadata": {"namespace": "shop",
            "name": format!("data-{number:03}"), "uid": format!("c-{number}"),
            "annotations": {STATE: state}}}))
        .unwrap()
    }

    fn in_namespace(namespace: &str) -> Source {
        let mut source = Source::default();
        source.metadata.namespace = Some(namespace.into());
        source.metadata.uid = Some("s".into());
        source
    }

    fn shown(phase: Phase, reason: &'static str, is_problem: bool) -> Shown {
        Shown {
            phase,
            reason,
            message: "why".into(),
            is_problem,
            percent: None,
        }
    }

    #[test]
    fn a_claim_of_another_namespace_is_in_a_status_as_long_as_it_is_granted() {
        let source = in_namespace("images");
        let mut claims = vec![claim(0, &State::default())];
        claims[0].metadata.namespace = Some("images".into());
        claims.extend((1..4).map(|number| claim(number, &State::default())));
        let done = |source: &str| State {
            is_done: true,
            ..State::new(source.into())
        };
        // The last one was populated, says a user who does not know the UID of the source.
        claims.extend([claim(4, &done("s/1")), claim(5, &done("s2/1"))]);
        let mut memory = Memory::default();
        for uid in ["c-0", "c-1", "c-2", "c-3"] {
            memory.set(uid, shown(Phase::Waiting, "NotAllowed", true));
        }
        memory.set_granted("c-1", true);
        memory.set_granted("c-2", false);
        let status = wanted(&source, &claims, &memory, Timestamp::UNIX_EPOCH);
        let names: Vec<_> = status.claims.iter().map(|one| &*one.name).collect();
        assert_eq!(names, ["data-000", "data-001", "data-004"]);
        let others = &claims[2..4];
        let status = wanted(&source, others, &memory, Timestamp::UNIX_EPOCH);
        assert_eq!(status.conditions[0].reason, "Proceeding");
        assert_eq!((status.waiting, status.claims.len()), (0, 0));
    }

    #[test]
    fn a_status_has_at_most_a_hundred_claims_and_those_with_problems_first() {
        let done = State {
            is_done: true,
            ..State::new("s/1".into())
        };
        let begun = State {
            failures: 3,
            ..State::new("s/1".into())
        };
        let mut claims: Vec<_> = (0..150).map(|number| claim(number, &done)).collect();
        claims.push(claim(150, &begun));
        claims.push(claim(151, &begun));
        let mut memory = Memory::default();
        memory.set("c-150", shown(Phase::Populating, "Populating", false));
        memory.set("c-151", shown(Phase::Failed, "PopulateFailed", true));
        let now = Timestamp::UNIX_EPOCH;
        let status = wanted(&in_namespace("shop"), &claims, &memory, now);
        assert_eq!(
            (status.populated, status.waiting, status.failed),
            (150, 1, 1)
        );
        assert_eq!(status.claims.len(), MAX_CLAIMS);
        let first: Vec<_> = status.claims.iter().take(3).map(|one| &*one.name).collect();
        assert_eq!(first, ["data-151", "data-150", "data-000"]);
        assert_eq!(status.claims[0].failures, 3);
        let condition = &status.conditions[0];
        assert_eq!(
            (&*condition.status, &*condition.reason),
            ("False", "PopulateFailed")
        );
        assert_eq!(condition.message, "claim shop/data-151: why");

        // Another leader, which has not decided yet, keeps what was shown, and a status without changes
        // is not written again.
        let source = Source {
            status: Some(status.clone()),
            ..in_namespace("shop")
        };
        let again = wanted(&source, &claims, &memory, Timestamp::MAX);
        assert_eq!(again, status);
        let kept = wanted(&source, &claims, &Memory::default(), now);
        assert_eq!(kept.claims[..2], status.claims[..2]);
    }

    #[test]
    fn a_claim_has_since_when_it_is_in_its_phase_and_the_numbers_of_its_rate() {
        let at = |seconds| Timestamp::from_second(seconds).unwrap();
        let filling = State {
            received_bytes: Some(7),
            progress_at: Some(Time(at(6))),
            progress_since: Some(Time(at(5))),
            progress_since_bytes: Some(3),
            ..State::new("s/1".into())
        };
        let claims = [claim(0, &filling)];
        let mut memory = Memory::default();
        let mut source = in_namespace("shop");
        let mut shows = |phase: Phase, seconds: i64| {
            memory.set("c-0", shown(phase, "why", false));
            let status = wanted(&source, &claims, &memory, at(seconds));
            source.status = Some(status.clone());
            status.claims[0].clone()
        };
        let since = |claim: ClaimStatus| claim.since.map(|since| since.0.as_second());
        assert_eq!(since(shows(Phase::Waiting, 1)), Some(1));
        assert_eq!(since(shows(Phase::Waiting, 2)), Some(1));
        let populating = shows(Phase::Populating, 3);
        assert_eq!(populating.progress_at, filling.progress_at);
        assert_eq!(populating.progress_since, filling.progress_since);
        assert_eq!(populating.progress_since_bytes, Some(3));
        assert_eq!(since(populating), Some(3));
        assert_eq!(since(shows(Phase::Populated, 4)), None);
        assert_eq!(since(shows(Phase::Failed, 5)), None);
    }
}
