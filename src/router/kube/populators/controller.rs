//! The reconciler of claims that name a data source, and what it remembers for people.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::jiff::Timestamp;

use super::cache::CacheMemory;
use super::decide::{Class, Decision, NOT_GRANTED, PodSeen, Seen, Shown, decide};
use super::observe::{Target, path};
use super::source::source_of;
use super::state::{State, WAITS_FOR_TURN, is_bound, is_leaving, prime_name, uid};
use super::turns::{self, Pass, TurnMemory};
use super::{Populators, execute, observe, snapshots};
use crate::error::{Result, chain};
use crate::router::cluster::ObjectRef;
use crate::router::kube::events::EventBody;
use crate::router::kube::reconcile::{Controller, Next, Outcome, Reconciler};
use crate::telemetry::populations::Count;

/// Steps that one pass does for a claim. From the end of the pod to the end of the cleanup it needs six.
const MAX_STEPS: usize = 12;

/// What is shown of claims, by their UIDs. It decides nothing.
#[derive(Debug, Default)]
pub(super) struct Memory {
    shown: BTreeMap<String, Shown>,
    /// Why the last step of a claim has failed.
    problems: BTreeMap<String, String>,
    /// Whether the source of a claim of another namespace may be used by it.
    granted: BTreeMap<String, bool>,
    pub(super) cache: CacheMemory,
    pub(super) turns: TurnMemory,
}

impl Memory {
    pub(super) fn shown(&self, uid: &str) -> Option<&Shown> {
        self.shown.get(uid)
    }

    /// `None` if that was not observed.
    pub(super) fn is_granted(&self, uid: &str) -> Option<bool> {
        self.granted.get(uid).copied()
    }

    pub(super) fn set_granted(&mut self, uid: &str, is_granted: bool) {
        self.granted.insert(uid.into(), is_granted);
    }

    /// Returns what was shown of the claim before.
    pub(super) fn set(&mut self, uid: &str, shown: Shown) -> Option<Shown> {
        self.shown.insert(uid.into(), shown)
    }
}

/// Fills the volumes of claims.
pub(super) struct PopulateController(pub(super) Arc<Populators>);

impl PopulateController {
    /// Records what is shown of a claim, with an event if it is new.
    fn show(&self, claim: &PersistentVolumeClaim, decision: &Decision) {
        let mut memory = self.0.memory();
        let Some(mut shown) = decision.shown.clone() else {
            memory.shown.remove(uid(claim));
            return;
        };
        let problem = memory.problems.get(uid(claim));
        if let (Some(problem), true) = (problem, decision.step.is_some()) {
            shown = Shown {
                reason: "StepFailed",
                message: problem.clone(),
                is_problem: true,
                ..shown
            };
        }
        let before = memory.set(uid(claim), shown.clone());
        drop(memory);
        if shown.is_news_after(before.as_ref()) {
            let is_warning = shown.is_problem || shown.reason == "AttemptFailed";
            self.0.recorder.record_event(EventBody {
                about: ObjectRef::Claim(path(claim)),
                is_warning,
                reason: shown.reason,
                message: shown.message,
            });
        }
    }

    /// Does one step, and remembers why it has failed.
    async fn step(&self, target: &Target, decision: Decision) -> Result<Outcome> {
        let (Some(step), Some(seen)) = (decision.step, &target.seen) else {
            return Ok(Outcome::Done);
        };
        let done = execute::execute(&self.0, seen, step).await;
        let mut memory = self.0.memory();
        let key = uid(&target.claim).to_string();
        match &done {
            Ok(_) => drop(memory.problems.remove(&key)),
            Err(error) => drop(memory.problems.insert(key, chain(error))),
        }
        done
    }

    /// Whether nothing has to be read for the decision about a claim: it has no prime claim, and what is
    /// in memory already says that it waits.
    fn is_idle(&self, claim: &PersistentVolumeClaim, class: Class, turns: &Pass) -> bool {
        let Some(name) = source_of(claim) else {
            return true;
        };
        if claim.metadata.namespace.as_ref() != Some(&name.namespace) {
            return false;
        }
        let source = observe::known_source(&self.0, &name);
        let seen = Seen {
            now: Timestamp::now(),
            driver: self.0.options.settings.driver.clone(),
            claim: claim.clone(),
            class,
            // Without the snapshots: while another claim receives the content, they are not read.
            cache: snapshots::known(&self.0, claim, None, &source),
            source,
            origins: Ok(Vec::new()),
            prime: None,
            volume: None,
            pod: PodSeen::Absent,
            numbers: None,
            waits_for_turn: turns.refusal(claim),
        };
        let decision = decide(&seen);
        if decision.step.is_some() {
            return false;
        }
        self.show(claim, &decision);
        let waits_for_turn = decision
            .shown
            .is_some_and(|shown| shown.reason == WAITS_FOR_TURN);
        let looks = waits_for_turn && seen.cache.is_some();
        !looks || !self.0.memory().turns.is_due(uid(claim), Instant::now())
    }

    /// The numbers of claims in each phase, and what was received for them.
    fn count<'a>(&self, claims: impl Iterator<Item = &'a PersistentVolumeClaim>) {
        let memory = self.0.memory();
        let each = claims.map(|claim| {
            let state = State::of(claim);
            let phase = match memory.shown(uid(claim)) {
                _ if state.is_done => "Populated",
                Some(shown) => shown.phase.as_str(),
                None => "Waiting",
            };
            Count {
                phase,
                received: match phase {
                    "Populating" => state.received_bytes.unwrap_or(0),
                    _ => 0,
                },
                expected: match phase {
                    "Populating" => state.total_bytes.unwrap_or(0),
                    _ => 0,
                },
            }
        });
        self.0.metrics.populations().set(each);
    }
}

#[tonic::async_trait]
impl Reconciler for PopulateController {
    type Object = Target;
    type Step = Decision;

    async fn observe(&self, target: Target) -> Result<Target> {
        let target = observe::observe(&self.0, target).await?;
        if let Some(seen) = &target.seen {
            let is_granted = !matches!(&seen.source, Err((NOT_GRANTED, _)));
            let key = uid(&target.claim);
            let mut memory = self.0.memory();
            memory.set_granted(key, is_granted);
            memory.turns.set_observed(key, Instant::now());
            drop(memory);
            self.show(&target.claim, &decide(seen));
        }
        Ok(target)
    }

    fn next(target: &Target) -> Next<Decision> {
        let decision = target.seen.as_ref().map(|seen| decide(seen));
        match decision {
            Some(decision) if decision.step.is_some() => Next::Step(decision),
            Some(_) => Next::Wait,
            None => Next::Done,
        }
    }

    /// Does the step and, without a pause, those that follow it.
    async fn execute(&self, target: &Target, decision: Decision) -> Result<Outcome> {
        let mut outcome = self.step(target, decision).await?;
        for _ in 1..MAX_STEPS {
            if outcome == Outcome::Stale || !self.0.leadership.is_leader() {
                break;
            }
            let again = Target {
                claim: target.claim.clone(),
                seen: None,
            };
            let again = self.observe(again).await?;
            let Next::Step(decision) = Self::next(&again) else {
                break;
            };
            outcome = self.step(&again, decision).await?;
        }
        Ok(outcome)
    }
}

#[tonic::async_trait]
impl Controller for PopulateController {
    const NAME: &'static str = "data sources";

    async fn list(&self, _leads_since: Timestamp) -> Option<Vec<Target>> {
        if !self.0.has_read_objects() {
            return None;
        }
        let all = self.0.claims();
        let named: Vec<_> = all
            .values()
            .filter(|claim| source_of(claim).is_some())
            .map(|claim| (claim, observe::class_of(&self.0, claim)))
            .filter(|(_, class)| matches!(class, Class::Own { .. }))
            .collect();
        let has_prime = |claim: &PersistentVolumeClaim| {
            let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
            all.contains_key(&format!("{namespace}/{}", prime_name(claim)))
        };
        let turns = Pass::new(turns::read(&self.0));
        let mut targets = Vec::new();
        for (claim, class) in named.iter().copied() {
            let state = State::of(claim);
            let has_ended = is_bound(claim) && (state.source.is_empty() || state.is_done);
            if is_leaving(claim) || has_ended && !has_prime(claim) {
                continue;
            }
            if !has_prime(claim) && !is_bound(claim) && self.is_idle(claim, class, &turns) {
                continue;
            }
            let claim = claim.clone();
            targets.push(Target { claim, seen: None });
        }
        let uids: BTreeSet<_> = named.iter().map(|(claim, _)| uid(*claim)).collect();
        let mut memory = self.0.memory();
        memory.shown.retain(|key, _| uids.contains(key.as_str()));
        memory.problems.retain(|key, _| uids.contains(key.as_str()));
        memory.granted.retain(|key, _| uids.contains(key.as_str()));
        memory.turns.retain(|key| uids.contains(key));
        drop(memory);
        self.count(named.iter().map(|(claim, _)| *claim));
        Some(targets)
    }

    fn reset(&self) {
        *self.0.memory() = Memory::default();
        self.0.metrics.populations().clear();
    }
}
