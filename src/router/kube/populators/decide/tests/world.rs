//! A model of a cluster with one claim, and controllers that are interrupted, late, or not the leader any
//! more.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::router::kube::populators::state::{is_block, owner, phase, pod_phase, prime_name};

/// What happens.
#[derive(Clone, Copy, Debug)]
enum Happens {
    /// The leader observes and does a step. With a number, it is interrupted after so many writes.
    Step(Option<usize>),
    /// A controller observes and decides, and does nothing yet.
    Observe,
    /// It does its step late.
    Late(Option<usize>),
    /// Kubernetes does its work: provisioner, binder, kubelet, garbage collector.
    Kubernetes,
    /// The provisioner gives back the node.
    GiveBack,
    Schedule,
    PodRuns,
    PodEnds(i32),
    /// It is evicted, or its node is gone.
    PodVanishes,
    PodPrints(u64),
    SourceChanges,
    SourceGone(bool),
    Forbidden(bool),
    PrimeIsDeleted,
    Later(i64),
}

/// How a pod has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Code(i32),
    /// Nothing is known about it.
    Unknown,
}

#[derive(Clone, Debug)]
struct World {
    version: u64,
    seconds: i64,
    generation: i64,
    is_source_gone: bool,
    is_forbidden: bool,
    claim: PersistentVolumeClaim,
    prime: Option<PersistentVolumeClaim>,
    pod: Option<Pod>,
    numbers: Option<Numbers>,
    volumes: BTreeMap<String, PersistentVolume>,
    /// Pods that have run on a volume, and the version of their source.
    content: BTreeMap<String, Vec<(String, String)>>,
    ends: BTreeMap<String, End>,
    late: Option<(Seen, Step)>,
    attempts: u32,
}

impl World {
    fn new() -> World {
        let mut claim = claim();
        annotate(&mut claim, SELECTED_NODE, None);
        World {
            version: 10,
            seconds: 0,
            generation: 1,
            is_source_gone: false,
            is_forbidden: false,
            claim,
            prime: None,
            pod: None,
            numbers: None,
            volumes: BTreeMap::new(),
            content: BTreeMap::new(),
            ends: BTreeMap::new(),
            late: None,
            attempts: 0,
        }
    }

    fn next(&mut self) -> String {
        self.version += 1;
        self.version.to_string()
    }

    fn seen(&self) -> Seen {
        let volume = self.prime.as_ref().and_then(volume_name);
        Seen {
            now: time(self.seconds),
            driver: DRIVER.into(),
            claim: self.claim.clone(),
            class: Class::Own { waits: true },
            source: match self.is_source_gone {
                true => Err(("SourceMissing", String::new())),
                false => Ok(source(self.generation)),
            },
            origins: Ok(Vec::new()),
            prime: self.prime.clone(),
            volume: volume.and_then(|name| self.volumes.get(name)).cloned(),
            pod: match (&self.pod, self.is_forbidden) {
                (_, true) => PodSeen::Forbidden(String::new()),
                (Some(pod), _) => PodSeen::Here(Box::new(pod.clone())),
                (None, _) => PodSeen::Absent,
            },
            numbers: self.numbers.clone(),
        }
    }

    /// Does a step, and not more than so many writes of it.
    fn execute(&mut self, seen: &Seen, step: Step, writes: Option<usize>) -> Option<()> {
        let most = writes.unwrap_or(usize::MAX);
        if most == 0 {
            return None;
        }
        match step {
            Step::CreatePrime(node) => self.create_prime(seen, node.as_deref())?,
            Step::SelectNode(node) => {
                let set = [
                    (SELECTED_NODE, Some(node.as_str())),
                    (NODE, Some(node.as_str())),
                ];
                self.annotate_prime(seen, &set)?;
            }
            Step::DropNode => self.annotate_claim(seen, SELECTED_NODE, None)?,
            Step::ForgetNode => self.annotate_prime(seen, &[(NODE, None)])?,
            Step::Keep(point) => {
                let bytes = point.bytes.to_string();
                let set = [
                    (DURABLE, Some(bytes.as_str())),
                    (VALIDATOR, Some(point.validator.as_str())),
                ];
                self.annotate_prime(seen, &set)?;
            }
            Step::CreatePod(attempt) => self.create_pod(seen, &attempt, most)?,
            Step::DeletePod(uid) => {
                let its = self.pod.as_mut();
                let its = its.filter(|pod| pod.metadata.uid.as_deref() == Some(&*uid))?;
                its.metadata.deletion_timestamp = object(json!(time(0).to_string()));
            }
            Step::DeletePrime => {
                self.same_prime(seen)?;
                self.delete_prime();
            }
            Step::Bind => self.bind(seen)?,
            Step::Note(state) => {
                let text = serde_json::to_string(&state).unwrap();
                self.annotate_claim(seen, STATE, Some(&text))?;
            }
        }
        Some(())
    }

    fn delete_prime(&mut self) {
        let version = self.next();
        if let Some(prime) = &mut self.prime {
            prime.metadata.deletion_timestamp = object(json!(time(0).to_string()));
            prime.metadata.resource_version = Some(version);
        }
    }

    /// The prime claim, if it is the version that was seen.
    fn same_prime(&mut self, seen: &Seen) -> Option<&mut PersistentVolumeClaim> {
        let version = &seen.prime.as_ref()?.metadata.resource_version;
        let its = self.prime.as_mut()?;
        (its.metadata.resource_version == *version).then_some(its)
    }

    fn annotate_prime(&mut self, seen: &Seen, set: &[(&str, Option<&str>)]) -> Option<()> {
        let version = self.next();
        let its = self.same_prime(seen)?;
        for (key, value) in set {
            annotate(its, key, *value);
        }
        its.metadata.resource_version = Some(version);
        Some(())
    }

    fn annotate_claim(&mut self, seen: &Seen, key: &str, value: Option<&str>) -> Option<()> {
        let version = self.next();
        let is_same = self.claim.metadata.resource_version == seen.claim.metadata.resource_version;
        if !is_same {
            return None;
        }
        annotate(&mut self.claim, key, value);
        self.claim.metadata.resource_version = Some(version);
        Some(())
    }

    fn create_prime(&mut self, seen: &Seen, node: Option<&str>) -> Option<()> {
        if self.prime.is_some() {
            return None;
        }
        let version = self.next();
        let mut new = prime();
        new.metadata.uid = Some(format!("q-{version}"));
        new.metadata.resource_version = Some(version);
        annotate(&mut new, SELECTED_NODE, node);
        annotate(&mut new, NODE, node);
        let (_, source) = seen.source.as_ref().ok()?;
        annotate(&mut new, SOURCE, Some(&source.version()));
        new.spec.as_mut().unwrap().volume_name = None;
        new.status.as_mut().unwrap().phase = Some("Pending".into());
        self.prime = Some(new);
        Some(())
    }

    fn create_pod(&mut self, seen: &Seen, attempt: &Attempt, most: usize) -> Option<()> {
        self.annotate_prime(seen, &[(POD, Some(CREATING))])?;
        if most == 1 {
            return None;
        }
        if self.pod.is_some() || self.is_forbidden {
            let before = annotation(seen.prime.as_ref()?, POD).map(str::to_string);
            let marked = self.seen();
            return self.annotate_prime(&marked, &[(POD, before.as_deref())]);
        }
        let uid = format!("p-{}", self.next());
        let mut new = super::pod(&uid, "Pending", None);
        let labels = new.metadata.labels.get_or_insert_default();
        labels.insert("version".into(), attempt.source.version());
        assert_eq!(
            new.metadata.name.as_deref(),
            Some(&*prime_name(&self.claim))
        );
        assert_eq!(
            new.metadata.owner_references,
            Some(vec![owner(&self.claim)])
        );
        self.pod = Some(new);
        self.numbers = None;
        self.attempts += 1;
        if most == 2 {
            return None;
        }
        let marked = self.seen();
        self.annotate_prime(&marked, &[(POD, Some(&uid))])
    }

    /// The volume has the content of one version of the source, completely, and nothing else.
    fn bind(&mut self, seen: &Seen) -> Option<()> {
        let version = self.next();
        let volume = seen.volume.as_ref()?;
        let name = volume.metadata.name.clone()?;
        let its = self.volumes.get_mut(&name)?;
        if its.metadata.resource_version != volume.metadata.resource_version {
            return None;
        }
        let reference = its.spec.as_mut()?.claim_ref.as_mut()?;
        reference.name.clone_from(&self.claim.metadata.name);
        reference.uid.clone_from(&self.claim.metadata.uid);
        its.metadata.resource_version = Some(version);
        let pods = &self.content[&name];
        let (last, version) = pods.last().unwrap();
        assert_eq!(self.ends.get(last), Some(&End::Code(0)), "{self:?}");
        let prime = seen.prime.as_ref().unwrap();
        assert_eq!(annotation(prime, POD), Some(last.as_str()), "{self:?}");
        for (other, its) in &pods[..pods.len() - 1] {
            let end = self.ends.get(other);
            let can_continue = matches!(end, Some(End::Code(11 | 137)));
            assert!(can_continue && its == version, "mixed: {self:?}");
        }
        Some(())
    }

    /// Provisioner, binder, kubelet, garbage collector.
    fn kubernetes(&mut self) {
        if self.pod.as_ref().is_some_and(is_leaving) {
            self.pod_vanishes();
        }
        let is_used = self.pod.is_some();
        if self.prime.as_ref().is_some_and(is_leaving) && !is_used {
            let uid = self.prime.take().unwrap().metadata.uid;
            let is_its = |volume: &PersistentVolume| prime::bound_to(volume) == uid.as_deref();
            self.volumes.retain(|_, volume| !is_its(volume));
        }
        let version = self.next();
        if let Some(prime) = &mut self.prime {
            let uid = prime.metadata.uid.clone();
            if is_leaving(prime) {
            } else if volume_name(prime).is_none() && annotation(prime, SELECTED_NODE).is_some() {
                let name = format!("pv-{version}");
                let mut new = volume();
                new.metadata.name = Some(name.clone());
                new.metadata.resource_version = Some(version.clone());
                let spec = new.spec.as_mut().unwrap();
                spec.claim_ref.as_mut().unwrap().uid = uid;
                self.volumes.insert(name.clone(), new);
                set_bound(prime, &name);
                prime.metadata.resource_version = Some(version);
            } else if let Some(name) = volume_name(prime) {
                let its = self.volumes.get(name);
                if its.is_none_or(|its| prime::bound_to(its) != uid.as_deref())
                    && phase(prime) != "Lost"
                {
                    prime.status.as_mut().unwrap().phase = Some("Lost".into());
                    prime.metadata.resource_version = Some(version);
                }
            }
        }
        let uid = self.claim.metadata.uid.clone();
        let mut its = self.volumes.iter();
        let its = its.find(|(_, volume)| prime::bound_to(volume) == uid.as_deref());
        if let (Some((name, _)), false) = (its, is_bound(&self.claim)) {
            let name = name.clone();
            set_bound(&mut self.claim, &name);
            self.claim.metadata.resource_version = Some(self.next());
        }
    }

    fn pod_vanishes(&mut self) {
        if let Some(pod) = self.pod.take() {
            let uid = pod.metadata.uid.unwrap();
            self.ends.entry(uid).or_insert(End::Unknown);
            self.numbers = None;
        }
    }

    fn pod_runs(&mut self) {
        let volume = self.prime.as_ref().filter(|prime| is_bound(prime));
        let volume = volume.and_then(volume_name).map(str::to_string);
        if let (Some(pod), Some(volume)) = (&mut self.pod, volume)
            && pod_phase(pod) == "Pending"
        {
            pod.status.as_mut().unwrap().phase = Some("Running".into());
            let version = pod.metadata.labels.as_ref().unwrap()["version"].clone();
            let entry = (pod.metadata.uid.clone().unwrap(), version);
            self.content.entry(volume).or_default().push(entry);
        }
    }

    fn pod_ends(&mut self, code: i32) {
        let Some(pod) = &mut self.pod else { return };
        if pod_phase(pod) != "Running" {
            return;
        }
        let uid = pod.metadata.uid.clone().unwrap();
        let phase = if code == 0 { "Succeeded" } else { "Failed" };
        pod.status = super::pod(&uid, phase, Some(code)).status;
        self.ends.insert(uid, End::Code(code));
    }

    fn happens(&mut self, what: Happens) {
        match what {
            Happens::Step(writes) => {
                let seen = self.seen();
                if let Some(step) = step(&seen) {
                    self.execute(&seen, step, writes);
                }
            }
            Happens::Observe => {
                let seen = self.seen();
                self.late = step(&seen).map(|step| (seen, step));
            }
            Happens::Late(writes) => {
                if let Some((seen, step)) = self.late.take() {
                    self.execute(&seen, step, writes);
                }
            }
            Happens::Kubernetes => self.kubernetes(),
            Happens::GiveBack => {
                let version = self.next();
                if let Some(prime) = self.prime.as_mut().filter(|prime| !is_bound(prime)) {
                    annotate(prime, SELECTED_NODE, None);
                    prime.metadata.resource_version = Some(version);
                }
            }
            Happens::Schedule => {
                if annotation(&self.claim, SELECTED_NODE).is_none() {
                    let version = self.next();
                    annotate(
                        &mut self.claim,
                        SELECTED_NODE,
                        Some(&format!("n-{version}")),
                    );
                    self.claim.metadata.resource_version = Some(version);
                }
            }
            Happens::PodRuns => self.pod_runs(),
            Happens::PodEnds(code) => self.pod_ends(code),
            Happens::PodVanishes => self.pod_vanishes(),
            Happens::PodPrints(bytes) => {
                let line = json!({"received": bytes, "durable": bytes, "validator": [34, 34]});
                let is_recorded = self.prime.as_ref().zip(self.pod.as_ref());
                let is_recorded = is_recorded
                    .is_some_and(|(prime, pod)| annotation(prime, POD) == Some(uid(pod)));
                let runs = self
                    .pod
                    .as_ref()
                    .is_some_and(|pod| pod_phase(pod) == "Running");
                if runs && is_recorded {
                    self.numbers = Numbers::parse(&line.to_string());
                }
            }
            Happens::SourceChanges => self.generation += 1,
            Happens::SourceGone(is_gone) => self.is_source_gone = is_gone,
            Happens::Forbidden(is_forbidden) => self.is_forbidden = is_forbidden,
            Happens::PrimeIsDeleted => self.delete_prime(),
            Happens::Later(seconds) => self.seconds += seconds,
        }
        self.check();
    }

    /// The claim has no volume that is not filled, and its volume stays.
    fn check(&self) {
        let uid = self.claim.metadata.uid.as_deref();
        let its = |one: &&PersistentVolume| prime::bound_to(one) == uid;
        assert!(self.volumes.values().filter(its).count() <= 1, "{self:?}");
        if let Some(name) = volume_name(&self.claim) {
            assert!(
                self.volumes.contains_key(name),
                "it has lost its volume: {self:?}"
            );
        }
        assert!(!is_block(&self.claim));
    }

    /// Everything goes well from now on.
    fn settle(&mut self) {
        self.is_forbidden = false;
        self.is_source_gone = false;
        self.generation += 1;
        for _ in 0..60 {
            self.happens(Happens::Later(600));
            self.happens(Happens::Schedule);
            self.happens(Happens::Step(None));
            self.happens(Happens::Kubernetes);
            self.happens(Happens::PodRuns);
            self.happens(Happens::PodEnds(0));
        }
    }
}

fn anything() -> impl Strategy<Value = Happens> {
    let code = prop_oneof![Just(0), Just(10), Just(11), Just(12), Just(137)];
    let writes = || prop_oneof![4 => Just(None), 1 => (0..3_usize).prop_map(Some)];
    prop_oneof![
        12 => writes().prop_map(Happens::Step),
        2 => Just(Happens::Observe),
        2 => writes().prop_map(Happens::Late),
        6 => Just(Happens::Kubernetes),
        1 => Just(Happens::GiveBack),
        3 => Just(Happens::Schedule),
        4 => Just(Happens::PodRuns),
        4 => code.prop_map(Happens::PodEnds),
        1 => Just(Happens::PodVanishes),
        2 => (1..9_u64).prop_map(Happens::PodPrints),
        1 => Just(Happens::SourceChanges),
        1 => any::<bool>().prop_map(Happens::SourceGone),
        1 => any::<bool>().prop_map(Happens::Forbidden),
        1 => Just(Happens::PrimeIsDeleted),
        3 => (1..700_i64).prop_map(Happens::Later),
    ]
}

#[test]
fn a_claim_is_filled_by_one_pod() {
    let mut world = World::new();
    world.settle();
    assert!(is_bound(&world.claim), "{world:?}");
    assert_eq!(world.attempts, 1);
}

#[test]
fn a_source_that_fails_is_tried_ten_times() {
    let mut world = World::new();
    for _ in 0..400 {
        world.happens(Happens::Later(600));
        world.happens(Happens::Schedule);
        world.happens(Happens::Step(None));
        world.happens(Happens::Kubernetes);
        world.happens(Happens::PodRuns);
        world.happens(Happens::PodEnds(12));
    }
    assert_eq!(world.attempts, 10);
    assert!(
        world.prime.is_none() && world.volumes.is_empty(),
        "{world:?}"
    );
    world.settle();
    assert!(is_bound(&world.claim), "{world:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]
    #[test]
    fn no_sequence_binds_a_volume_that_is_not_filled(all in proptest::collection::vec(anything(), 1..120)) {
        let mut world = World::new();
        for what in all {
            world.happens(what);
        }
        world.settle();
        prop_assert!(is_bound(&world.claim), "{:?}", world);
        prop_assert!(world.prime.is_none() && world.pod.is_none(), "something is left: {:?}", world);
        prop_assert_eq!(world.volumes.len(), 1, "{:?}", world);
        prop_assert!(State::of(&world.claim).is_done, "{:?}", world);
    }
}
