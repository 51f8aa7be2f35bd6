//! A model of a cluster with one claim, and controllers that are interrupted, late, or not the leader any
//! more.

mod users;

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use slackwater_testkit::Sweep;

use super::cached::{content, snapshot};
use super::*;
use crate::router::kube::populators::cache::{
    CacheSeen, CachedSnapshot, ContentSeen, Key, NONE, SNAPSHOT, node_of, restored_from,
};
use crate::router::kube::populators::state::{is_block, owner, phase, pod_phase, prime_name};

/// The most cached snapshots.
const MOST: usize = 2;

/// What happens.
#[derive(Clone, Copy, Debug)]
enum Happens {
    /// The leader observes and does a step. With a number, it is interrupted after this number of writes.
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
    /// The driver cuts a snapshot, also one that is not waited for any more.
    Cut,
    /// A pod of a user uses the prime claim, and writes to it.
    OtherPod,
    /// The pod of the claim has started, and writes to it.
    UserWrites,
    /// Another claim with the same content was filled.
    CacheAppears,
    /// A user has created a snapshot with the name of the key.
    FakeAppears,
    /// A user has created a prime claim from what has the name of the key.
    FakePrime,
    /// A user has created a snapshot of the prime claim, and records it there.
    FakeMark,
    /// A prime claim that is created from a snapshot is bound to a volume that was there before.
    OldVolume,
    /// Another controller leads, which does not know what this one has created.
    NewLeader,
    CacheGone,
    OtherReceives(bool),
    /// As many pods as are allowed are running.
    WaitsForTurn(bool),
}

/// A snapshot, and which version of the source it has completely.
#[derive(Clone, Debug)]
struct Cached {
    name: String,
    uid: String,
    created: i64,
    /// The volume, once the snapshot controller has read it from the prime claim.
    volume: Option<String>,
    prime: String,
    is_ready: bool,
    cut: Option<String>,
    record: Option<String>,
    version: String,
    is_own: bool,
    is_leaving: bool,
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
    snapshots: Vec<Cached>,
    /// Volumes that were created from snapshots, and their content.
    restored: BTreeMap<String, Option<String>>,
    /// Volumes to which others have written.
    tainted: BTreeSet<String>,
    /// The UID of a prime claim that another pod uses.
    shared: Option<String>,
    is_received: bool,
    waits_for_turn: bool,
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
            snapshots: Vec::new(),
            restored: BTreeMap::new(),
            tainted: BTreeSet::new(),
            shared: None,
            is_received: false,
            waits_for_turn: false,
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
            cache: self.cache(),
            waits_for_turn: self.waits_for_turn.then(String::new),
        }
    }

    /// The key of a version of the source, on the node of the volume.
    fn key(&self, generation: i64) -> Option<Key> {
        let node = node_of(&self.claim, self.prime.as_ref())?;
        let (kind, source) = source(generation);
        Key::of((kind, &source), &self.claim, "class-1", Some(node))
    }

    fn cache(&self) -> Option<CacheSeen> {
        let key = self.key(self.generation).filter(|_| !self.is_source_gone)?;
        let all = self.snapshots.iter();
        let read = |one: &Cached| {
            let times = (one.created, one.is_leaving);
            let bound = one.volume.as_ref().map(|_| format!("sc-{}", one.uid));
            let object = snapshot(&one.name, &one.uid, times, one.is_ready, bound);
            CachedSnapshot {
                is_own: one.is_own,
                ..CachedSnapshot::read(&object)
            }
        };
        let name = key.snapshot_name();
        let named = self.snapshots.iter().find(|one| one.name == name);
        let its_content = named.and_then(|one| {
            let volume = one.volume.as_ref()?;
            let mut content = content(&one.uid, volume, one.record.as_deref());
            content.metadata.resource_version = Some(one.version.clone());
            Some(ContentSeen::read(&content))
        });
        let prime = self.prime.as_ref().map(uid);
        Some(CacheSeen {
            key,
            most: MOST,
            snapshots: all.map(read).collect(),
            content: its_content,
            is_shared: prime.is_some() && self.shared.as_deref() == prime,
            receiver: self.is_received.then(|| "other".into()),
        })
    }

    /// Does a step, and not more than this number of writes of it.
    fn execute(&mut self, seen: &Seen, step: Step, writes: Option<usize>) -> Option<()> {
        let most = writes.unwrap_or(usize::MAX);
        if most == 0 {
            return None;
        }
        match step {
            Step::CreatePrime {
                node,
                from,
                keeps_no_snapshot,
            } => {
                self.create_prime(seen, node.as_deref(), from.as_deref())?;
                if let (Some(prime), true) = (&mut self.prime, keeps_no_snapshot) {
                    annotate(prime, SNAPSHOT, Some(NONE));
                }
            }
            Step::MakeRoom { uid, node, .. } => {
                let mut its = self.snapshots.iter_mut();
                its.find(|one| one.uid == uid)?.is_leaving = true;
                let set = [
                    (SNAPSHOT, Some(NONE)),
                    (SELECTED_NODE, Some(node.as_str())),
                    (NODE, Some(node.as_str())),
                ];
                self.annotate_prime(seen, &set)?;
            }
            Step::CreateSnapshot(name) => self.create_snapshot(seen, name, most)?,
            Step::RecordSnapshot(name, version) => self.record(seen, &name, version.as_deref())?,
            Step::DeleteSnapshot(_, uid) | Step::GiveUpSnapshot(_, uid) => {
                let mut its = self.snapshots.iter_mut();
                its.find(|one| one.uid == uid)?.is_leaving = true;
            }
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

    fn create_snapshot(&mut self, seen: &Seen, name: String, most: usize) -> Option<()> {
        let prime = seen.prime.as_ref()?;
        let uid = format!("sn-{}", self.next());
        let mark = match self.snapshots.iter().any(|one| one.name == name) {
            true => NONE,
            false => {
                self.add_snapshot(&name, &uid, self::uid(prime));
                self.snapshots.last_mut().unwrap().is_own = true;
                &uid
            }
        };
        if most == 1 {
            return None;
        }
        let now = self.seen();
        let its = now
            .prime
            .as_ref()
            .filter(|its| self::uid(*its) == self::uid(prime))?;
        let is_same = annotation(its, SNAPSHOT) == annotation(prime, SNAPSHOT);
        is_same.then(|| self.annotate_prime(&now, &[(SNAPSHOT, Some(mark))]))?
    }

    /// Only complete content of the key is recorded, and nothing that others have written.
    fn record(&mut self, seen: &Seen, name: &str, version: Option<&str>) -> Option<()> {
        let next = self.next();
        let key = &seen.cache.as_ref()?.key;
        let mut its = self.snapshots.iter_mut();
        let its = its.find(|one| name == format!("sc-{}", one.uid))?;
        if Some(its.version.as_str()) != version {
            return None;
        }
        let content = its.cut.as_ref().expect("complete content");
        let generation = content.strip_prefix("s-1/").unwrap().parse().unwrap();
        let (kind, source) = source(generation);
        let node = node_of(&seen.claim, seen.prime.as_ref());
        let expected = Key::of((kind, &source), &seen.claim, "class-1", node);
        assert_eq!(expected.as_ref(), Some(key), "{its:?}");
        its.record = Some(key.to_string());
        its.version = next;
        Some(())
    }

    fn add_snapshot(&mut self, name: &str, uid: &str, prime: &str) {
        let version = self.next();
        self.snapshots.push(Cached {
            name: name.into(),
            uid: uid.into(),
            created: self.seconds,
            volume: None,
            prime: prime.into(),
            is_ready: false,
            cut: None,
            record: None,
            version,
            is_own: false,
            is_leaving: false,
        });
    }

    /// Which version of the source a volume has completely, and nothing else.
    fn content_now(&self, volume: &str) -> Option<String> {
        if self.tainted.contains(volume) {
            return None;
        }
        if let Some(content) = self.restored.get(volume) {
            return content.clone();
        }
        let (last, version) = self.content.get(volume)?.last()?;
        let is_complete = self.ends.get(last) == Some(&End::Code(0));
        is_complete.then(|| version.clone())
    }

    /// Snapshot controller and driver. A snapshot is cut some time after its volume was read.
    fn snapshot_controller(&mut self) {
        self.snapshots.retain(|one| !one.is_leaving);
        let Some(prime) = self.prime.as_ref().filter(|prime| is_bound(prime)) else {
            return;
        };
        let volume = volume_name(prime).map(str::to_string);
        let bound = volume.as_ref().and_then(|name| self.volumes.get(name));
        if bound.is_some_and(|volume| prime::bound_to(volume) == Some(uid(prime))) {
            for one in self
                .snapshots
                .iter_mut()
                .filter(|one| one.prime == uid(prime))
            {
                one.volume = one.volume.take().or_else(|| volume.clone());
            }
        }
    }

    fn cut(&mut self) {
        let all = self.snapshots.iter();
        let contents: Vec<_> = all
            .map(|one| one.volume.as_deref().map(|volume| self.content_now(volume)))
            .collect();
        for (one, content) in self.snapshots.iter_mut().zip(contents) {
            if let (Some(content), false) = (content, one.is_ready) {
                one.is_ready = true;
                one.cut = content;
            }
        }
    }

    fn create_prime(&mut self, seen: &Seen, node: Option<&str>, from: Option<&str>) -> Option<()> {
        if self.prime.is_some() {
            return None;
        }
        let version = self.next();
        let mut new = prime();
        new.metadata.uid = Some(format!("q-{version}"));
        new.metadata.resource_version = Some(version);
        new.metadata.creation_timestamp = object(json!(time(self.seconds).to_string()));
        new.spec.as_mut().unwrap().data_source_ref = from.map(|name| {
            object(json!({"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": name}))
        });
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
        let prime = seen.prime.as_ref().unwrap();
        if let Some(content) = self.restored.get(&name) {
            assert!(!self.content.contains_key(&name), "{self:?}");
            assert_eq!(content.as_deref(), annotation(prime, SOURCE), "{self:?}");
            return Some(());
        }
        let pods = &self.content[&name];
        let (last, version) = pods.last().unwrap();
        assert_eq!(self.ends.get(last), Some(&End::Code(0)), "{self:?}");
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
        self.snapshot_controller();
        let version = self.next();
        if let Some(prime) = &mut self.prime {
            let uid = prime.metadata.uid.clone();
            let from = restored_from(prime);
            let mut ready = self.snapshots.iter().filter(|one| one.is_ready);
            let restores = from.map(|from| ready.find(|one| one.name == from));
            if is_leaving(prime) {
            } else if volume_name(prime).is_none()
                && annotation(prime, SELECTED_NODE).is_some()
                && !matches!(restores, Some(None))
            {
                let name = format!("pv-{version}");
                if let Some(Some(from)) = restores {
                    self.restored.insert(name.clone(), from.cut.clone());
                }
                let mut new = volume();
                new.metadata.name = Some(name.clone());
                new.metadata.resource_version = Some(version.clone());
                let now = time(self.seconds).to_string();
                new.metadata.creation_timestamp = object(json!(now));
                let spec = new.spec.as_mut().unwrap();
                spec.claim_ref.as_mut().unwrap().uid = uid;
                spec.csi.as_mut().unwrap().volume_handle.clone_from(&name);
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

    fn pod_prints(&mut self, bytes: u64) {
        let line = json!({"received": bytes, "durable": bytes, "validator": [34, 34]});
        let is_recorded = self.prime.as_ref().zip(self.pod.as_ref());
        let is_recorded =
            is_recorded.is_some_and(|(prime, pod)| annotation(prime, POD) == Some(uid(pod)));
        let runs = self
            .pod
            .as_ref()
            .is_some_and(|pod| pod_phase(pod) == "Running");
        if runs && is_recorded {
            self.numbers = Numbers::parse(&line.to_string());
        }
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
            Happens::PodPrints(bytes) => self.pod_prints(bytes),
            Happens::SourceChanges => self.generation += 1,
            Happens::SourceGone(is_gone) => self.is_source_gone = is_gone,
            Happens::Forbidden(is_forbidden) => self.is_forbidden = is_forbidden,
            Happens::PrimeIsDeleted => self.delete_prime(),
            Happens::Later(seconds) => self.seconds += seconds,
            Happens::Cut => self.cut(),
            Happens::OtherPod => self.other_pod(),
            Happens::UserWrites => {
                let its = volume_name(&self.claim).map(str::to_string);
                self.tainted.extend(its);
            }
            Happens::CacheAppears => self.appears(true),
            Happens::FakeAppears => self.appears(false),
            Happens::FakePrime => self.fake_prime(),
            Happens::FakeMark => self.fake_mark(),
            Happens::OldVolume => self.old_volume(),
            Happens::NewLeader => self.snapshots.iter_mut().for_each(|one| one.is_own = false),
            Happens::CacheGone => self.snapshots.clear(),
            Happens::OtherReceives(receives) => self.is_received = receives,
            Happens::WaitsForTurn(waits) => self.waits_for_turn = waits,
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
        let staying = self.snapshots.iter().filter(|one| !one.is_leaving);
        // One can be created while another one appears.
        assert!(staying.count() <= MOST + 1, "{self:?}");
    }

    /// Everything goes well from now on.
    fn settle(&mut self) {
        self.is_forbidden = false;
        self.is_source_gone = false;
        self.is_received = false;
        self.waits_for_turn = false;
        self.generation += 1;
        self.goes_well();
    }

    fn goes_well(&mut self) {
        for _ in 0..60 {
            self.happens(Happens::Later(600));
            self.happens(Happens::Schedule);
            self.happens(Happens::Step(None));
            self.happens(Happens::Kubernetes);
            self.happens(Happens::Cut);
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
        1 => any::<bool>().prop_map(Happens::WaitsForTurn),
        3 => (1..700_i64).prop_map(Happens::Later),
        4 => cache(),
    ]
}

/// What happens around the cache.
fn cache() -> impl Strategy<Value = Happens> {
    prop_oneof![
        4 => Just(Happens::Cut),
        1 => Just(Happens::OtherPod),
        1 => Just(Happens::UserWrites),
        2 => Just(Happens::CacheAppears),
        1 => Just(Happens::FakeAppears),
        1 => Just(Happens::FakePrime),
        2 => Just(Happens::FakeMark),
        1 => Just(Happens::OldVolume),
        1 => Just(Happens::NewLeader),
        1 => Just(Happens::CacheGone),
        1 => any::<bool>().prop_map(Happens::OtherReceives),
    ]
}

#[test]
fn a_claim_with_cached_content_is_filled_without_a_pod() {
    let mut world = World::new();
    world.happens(Happens::Schedule);
    world.happens(Happens::CacheAppears);
    world.goes_well();
    assert!(is_bound(&world.claim) && world.prime.is_none(), "{world:?}");
    assert_eq!(world.attempts, 0);
    // What was cached without a record, or is used by another pod, is not used.
    for wrong in [Happens::FakeAppears, Happens::FakePrime] {
        let mut world = World::new();
        world.happens(Happens::Schedule);
        world.happens(wrong);
        world.goes_well();
        assert!(is_bound(&world.claim), "{world:?}");
        assert_eq!(world.attempts, 1, "{wrong:?}");
    }
}

/// A user has created it before the population began. What is recorded at the claim is complete then.
#[test]
fn a_prime_claim_of_another_creator_is_replaced() {
    let mut world = World::new();
    world.happens(Happens::Schedule);
    world.happens(Happens::CacheAppears);
    world.happens(Happens::FakePrime);
    world.goes_well();
    assert!(is_bound(&world.claim) && world.prime.is_none(), "{world:?}");
    assert!(State::of(&world.claim).is_done, "{world:?}");
    assert_eq!(world.attempts, 0);
}

#[test]
fn a_claim_is_filled_by_one_pod() {
    let mut world = World::new();
    world.settle();
    assert!(is_bound(&world.claim), "{world:?}");
    assert_eq!(world.attempts, 1);
    let [cached] = &world.snapshots[..] else {
        panic!("{world:?}");
    };
    assert!(cached.record.is_some(), "{world:?}");
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
    #![proptest_config(ProptestConfig::with_cases(Sweep::requested().random(512)))]
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
