//! A thousand claims of several namespaces, decided by the step function: how many pods run, and in which
//! order the claims have their turn.

use std::collections::BTreeMap;

use k8s_openapi::jiff::SignedDuration;
use proptest::prelude::*;

use super::*;
use crate::router::kube::populators::state::{owner, pod_phase, prime_name};
use crate::router::kube::populators::turns::{Limits, Pass, Turns, has_turn};

const CLAIMS: usize = 1000;
/// Nothing here takes as many passes.
const MAX_ROUNDS: usize = 2000;

/// A claim and what was created for it.
struct One {
    seen: Seen,
    waits: bool,
    is_over: bool,
}

impl One {
    fn new(number: usize, namespace: usize) -> One {
        let mut seen = seen();
        let meta = &mut seen.claim.metadata;
        meta.name = Some(format!("data-{number}"));
        meta.uid = Some(format!("c-{number}"));
        meta.namespace = Some(format!("n-{namespace}"));
        let created_at = time(-1000 + i64::try_from(number).unwrap());
        meta.creation_timestamp = object(json!(created_at.to_string()));
        One {
            seen,
            waits: false,
            is_over: false,
        }
    }

    fn namespace(&self) -> &str {
        self.seen.claim.metadata.namespace.as_deref().unwrap()
    }

    fn has_turn(&self, now: Timestamp) -> bool {
        let prime = self.seen.prime.as_ref();
        prime.is_some_and(|prime| has_turn(&self.seen.claim, prime, now))
    }

    fn runs(&self) -> bool {
        matches!(&self.seen.pod, PodSeen::Here(pod) if pod_phase(pod) == "Running")
    }

    fn create_prime(&mut self, number: usize) {
        let claim = &self.seen.claim;
        let mut new = prime();
        let meta = &mut new.metadata;
        meta.name = Some(prime_name(claim));
        meta.uid = Some(format!("q-{number}"));
        meta.namespace.clone_from(&claim.metadata.namespace);
        meta.labels = Some([(CLAIM_LABEL.to_string(), uid(claim).to_string())].into());
        meta.owner_references = Some(vec![owner(claim)]);
        meta.creation_timestamp = object(json!(self.seen.now.to_string()));
        new.spec.as_mut().unwrap().volume_name = None;
        new.status.as_mut().unwrap().phase = Some("Pending".into());
        self.seen.prime = Some(new);
    }

    fn create_pod(&mut self, number: usize) {
        let name = format!("p-{number}");
        let mut new = pod(&name, "Running", None);
        let label = uid(&self.seen.claim).to_string();
        new.metadata.labels = Some([(CLAIM_LABEL.to_string(), label)].into());
        new.metadata.owner_references = Some(vec![owner(&self.seen.claim)]);
        self.seen.pod = PodSeen::Here(Box::new(new));
        annotate(self.seen.prime.as_mut().unwrap(), POD, Some(&name));
    }

    fn execute(&mut self, step: Step, number: usize) {
        match step {
            Step::CreatePrime { .. } => self.create_prime(number),
            Step::CreatePod(_) => self.create_pod(number),
            Step::DeletePod(_) => self.seen.pod = PodSeen::Absent,
            Step::DeletePrime => (self.seen.prime, self.seen.volume) = (None, None),
            Step::Note(state) => {
                self.is_over = state.is_done || state.is_final;
                set_state(&mut self.seen, &state);
            }
            Step::Bind => {
                let volume = self.seen.volume.as_mut().unwrap();
                let reference = volume.spec.as_mut().unwrap().claim_ref.as_mut().unwrap();
                reference.uid.clone_from(&self.seen.claim.metadata.uid);
                set_bound(&mut self.seen.claim, "pv-1");
            }
            other => panic!("{other:?}"),
        }
    }

    /// Provisioner, kubelet and program do their work, or not yet.
    fn happens(&mut self, luck: u64) {
        let is_unbound = |prime: &PersistentVolumeClaim| volume_name(prime).is_none();
        if self.seen.prime.as_ref().is_some_and(is_unbound) && !luck.is_multiple_of(5) {
            set_bound(self.seen.prime.as_mut().unwrap(), "pv-1");
            let mut new = volume();
            let reference = new.spec.as_mut().unwrap().claim_ref.as_mut().unwrap();
            reference.uid = self.seen.prime.as_ref().map(|prime| uid(prime).into());
            self.seen.volume = Some(new);
        }
        if self.runs() {
            let PodSeen::Here(pod) = &mut self.seen.pod else {
                return;
            };
            let name = pod.metadata.uid.clone().unwrap();
            let (phase, code) = match luck % 8 {
                0 => ("Failed", 12),
                1 => ("Failed", 11),
                2..5 => ("Succeeded", 0),
                _ => return,
            };
            pod.status = super::pod(&name, phase, Some(code)).status;
        }
    }
}

/// Numbers without a pattern.
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state >> 8
}

struct World {
    all: Vec<One>,
    limits: Limits,
    pods: usize,
    random: u64,
    now: Timestamp,
}

impl World {
    fn turns(&self) -> Turns {
        let mut turns = Turns::new(self.limits);
        for one in &self.all {
            if one.has_turn(self.now) {
                turns.take(one.namespace(), uid(&one.seen.claim));
            } else if one.waits {
                turns.wait(&one.seen.claim);
            }
        }
        turns
    }

    fn check(&self) {
        let mut running = BTreeMap::<_, usize>::new();
        for one in self.all.iter().filter(|one| one.runs()) {
            *running.entry(one.namespace()).or_default() += 1;
        }
        assert!(running.values().sum::<usize>() <= self.limits.all);
        let most = running.values().max().copied();
        assert!(most.unwrap_or_default() <= self.limits.in_namespace);
    }

    /// One pass over all claims. Returns the namespaces of claims that have begun and whether these had waited
    /// before, and the turns after it.
    fn pass(&mut self) -> (Vec<(String, bool)>, Turns) {
        let mut turns = self.turns();
        let pass = Pass::new(turns.clone());
        let mut begun = Vec::new();
        for index in 0..self.all.len() {
            self.pods += 1;
            let one = &mut self.all[index];
            let claim = &one.seen.claim;
            let refusal = pass.refusal(claim).filter(|_| one.waits);
            // Most of them wait: some are enough to see that nothing is decided about them.
            if refusal.is_some() && !next(&mut self.random).is_multiple_of(16) {
                continue;
            }
            one.seen.now = self.now;
            one.seen.waits_for_turn = refusal.or_else(|| turns.refusal(claim));
            let decision = decide(&one.seen);
            let is_begun = matches!(
                decision.step,
                Some(Step::CreatePrime { .. } | Step::CreatePod(_))
            );
            if is_begun && !one.has_turn(self.now) {
                turns.take(one.namespace(), uid(&one.seen.claim));
                begun.push((one.namespace().to_string(), one.waits));
            }
            one.waits = decision
                .shown
                .is_some_and(|shown| shown.reason == WAITS_FOR_TURN);
            assert!(decision.step.is_none() || !one.waits);
            if let Some(step) = decision.step {
                one.execute(step, self.pods);
            }
        }
        self.check();
        (begun, turns)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1, ..ProptestConfig::default() })]
    #[test]
    fn a_thousand_claims_never_have_more_pods_than_allowed_and_all_have_their_turn(
        all in 8..40_usize, in_namespace in 3..9_usize, namespaces in 1..30_usize, random in 1..u64::MAX,
    ) {
        let mut random = random;
        let claims = (0..CLAIMS).map(|number| {
            // The first namespace has most of them.
            let namespace = usize::try_from(next(&mut random)).unwrap() % (2 * namespaces);
            One::new(number, namespace.saturating_sub(namespaces))
        });
        let claims = claims.collect();
        let limits = Limits { all, in_namespace };
        let mut world = World { all: claims, limits, pods: 0, random, now: time(0) };
        world.pass();
        let mut compared = 0;
        for round in 0.. {
            prop_assert!(round < MAX_ROUNDS);
            world.now += SignedDuration::from_secs(120);
            for one in world.all.iter_mut().filter(|one| one.seen.prime.is_some()) {
                one.happens(next(&mut world.random));
            }
            // What is filled or given up is not checked any more.
            world.all.retain(|one| !one.is_over || one.seen.prime.is_some());
            if world.all.is_empty() {
                prop_assert!(compared > 0);
                break;
            }
            // Claims whose pause ends during the pass have turns that others would have had: such a pass is not
            // compared.
            let waited: Vec<_> = world.all.iter().map(|one| one.waits).collect();
            let (begun, turns) = world.pass();
            let all_waiting = world.all.iter().zip(waited).filter(|(one, waited)| *waited && one.waits);
            for (waiting, _) in all_waiting {
                let its = turns.count(waiting.namespace());
                if its < in_namespace {
                    let total: usize = turns.counts().sum();
                    prop_assert!(total >= all, "a turn is left: {turns:?}");
                }
                let is_compared = begun.iter().all(|(_, had_waited)| *had_waited);
                compared += usize::from(is_compared && !begun.is_empty());
                for (other, _) in begun.iter().filter(|_| is_compared) {
                    let unfair = its < in_namespace && turns.count(other) > its + 1;
                    prop_assert!(!unfair, "{other} {}", waiting.namespace());
                }
            }
        }
    }
}
