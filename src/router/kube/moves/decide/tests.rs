//! Moves in a model of a cluster: everything may happen between two steps, and a router may do a step
//! late, after another one has gone on.

use ::kube::api::ObjectMeta;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use proptest::prelude::*;
use serde_json::json;

use super::super::execute::shown;
use super::*;
use crate::router::kube::adopt::manifest::POLICY;
use crate::router::kube::adopt::manifest::tests::{KEY, volume};
use crate::router::kube::volume_move::{FINALIZER, MoveSpec, When};

const UID: Uuid = Uuid::from_u128(7);
const SOURCE: &str = "pool-a.source";
const COPY: &str = "pool-b.copy";

/// A volume and what was written to it last.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Data {
    exists: bool,
    fenced: bool,
    lifted: bool,
    content: u64,
}

#[derive(Clone, Debug)]
struct World {
    object: Option<VolumeMove>,
    has_claim: bool,
    live: Option<Manifest>,
    noted: Option<Manifest>,
    source: Data,
    copy: Data,
    snapshot: Option<u64>,
    /// What the application has written last.
    written: u64,
    pod: Option<PodUse>,
    is_cordoned: bool,
    is_source_away: bool,
    is_copy_away: bool,
    is_target_lost: bool,
    double: bool,
    /// The agent of the target refuses the copy.
    refuses: bool,
    /// A router has written something late that names no version: it may be left, and harms no data.
    wrote_late: bool,
    seconds: i64,
    versions: u64,
}

fn place(node: &str, handle: &str) -> Place {
    Place {
        node: node.into(),
        home: format!("home-of-{node}"),
        pool: "11111111-2222-4333-8444-555555555555".into(),
        pool_name: "default".into(),
        handle: handle.into(),
    }
}

impl World {
    fn new(when: When) -> World {
        let object = VolumeMove {
            metadata: ObjectMeta {
                name: Some("move".into()),
                uid: Some(UID.to_string()),
                resource_version: Some("1".into()),
                generation: Some(1),
                ..ObjectMeta::default()
            },
            spec: MoveSpec {
                claim: "data".into(),
                when,
                keep_source: Some("60s".into()),
                ..MoveSpec::default()
            },
            ..VolumeMove::default()
        };
        World {
            object: Some(object),
            has_claim: true,
            live: Some(volume("pv", SOURCE, "home-of-a")),
            noted: None,
            source: Data {
                exists: true,
                ..Data::default()
            },
            copy: Data::default(),
            snapshot: None,
            written: 0,
            pod: None,
            is_cordoned: false,
            is_source_away: false,
            is_copy_away: false,
            is_target_lost: false,
            double: false,
            refuses: false,
            wrote_late: false,
            seconds: 1_800_000_000,
            versions: 10,
        }
    }

    fn handle(&self) -> Option<&str> {
        self.live.as_ref().and_then(|live| live.text(HANDLE))
    }

    fn named(&self) -> Option<Data> {
        match self.handle()? {
            SOURCE => Some(self.source),
            _ => Some(self.copy),
        }
    }

    /// Whether the pod has the volume mounted.
    fn uses(&self) -> bool {
        self.pod.as_ref().is_some_and(|pod| pod.has_started)
    }

    fn seen(&self) -> Option<Observed> {
        let object = self.object.clone()?;
        let moved = |data: Data, user: bool| MovedVolume {
            state: match data.exists {
                true => MovingState::Ready,
                false => MovingState::Absent,
            },
            fenced: data.fenced.then_some(UID),
            lifted: data.lifted.then_some(UID),
            user: user.then(|| "it is mounted".to_string()),
            ..MovedVolume::default()
        };
        let is_at_source = self.handle() == Some(SOURCE);
        let mut source = moved(self.source, self.uses() && is_at_source);
        source.snapshots = self.snapshot.iter().map(|_| ("s".into(), true)).collect();
        let away = |is_away, moved| match is_away {
            true => Err("it is down".to_string()),
            false => Ok(moved),
        };
        let begun = object
            .status
            .as_ref()
            .is_some_and(|status| status.from.is_some());
        let refusal = Refusal {
            reason: "NoClaim",
            message: "its claim does not exist".into(),
        };
        let proposal = MoveStatus {
            phase: Phase::Waiting,
            volume: Some("pv".into()),
            volume_uid: Some("uid-1".into()),
            claim_uid: Some("claim-1".into()),
            from: Some(place("a", SOURCE)),
            to: Some(place("b", COPY)),
            ..MoveStatus::default()
        };
        let can_begin = self.has_claim && is_at_source;
        Some(Observed {
            object,
            now: Timestamp::from_second(self.seconds).unwrap(),
            key: KEY.into(),
            proposal: (!begun).then(|| can_begin.then_some(proposal).ok_or(refusal)),
            claim: match self.has_claim {
                true => ClaimState::Here {
                    is_bound: self.live.is_some(),
                },
                false => ClaimState::Gone,
            },
            live: self.live.clone(),
            noted: self
                .noted
                .clone()
                .filter(|noted| noted.uid() == Some("uid-1")),
            double: self.double.then(|| "other".into()),
            source: away(self.is_source_away, source),
            copy: match self.is_target_lost {
                true => Ok(MovedVolume::default()),
                false => away(self.is_copy_away, moved(self.copy, false)),
            },
            target_problem: self.is_copy_away.then(|| "it is down".into()),
            is_target_lost: self.is_target_lost,
            pods: self.pod.iter().cloned().collect(),
            is_cordoned: self.is_cordoned,
            attached: None,
        })
    }

    fn change(&mut self, change: impl FnOnce(&mut Manifest)) {
        self.versions += 1;
        let Some(live) = self.live.as_mut() else {
            return;
        };
        change(live);
        live.0.metadata.resource_version = Some(self.versions.to_string());
    }

    fn write(&mut self, status: &MoveStatus) {
        self.versions += 1;
        let version = self.versions.to_string();
        if let Some(object) = &mut self.object {
            object.status = Some(status.clone());
            object.metadata.resource_version = Some(version);
        }
    }

    /// What the router decides now; `None` if nothing is to be done.
    fn decided(&self) -> Option<(Observed, Decision)> {
        let seen = self.seen()?;
        let decision = decide(&seen);
        let before = seen.object.status.clone().unwrap_or_default();
        let is_new = decision.step.is_some() || shown(&seen, &decision) != before;
        is_new.then_some((seen, decision))
    }

    /// Does what a router has decided from what it had seen, which may be old.
    fn execute(&mut self, (seen, decision): &(Observed, Decision)) {
        let version = |object: &VolumeMove| object.metadata.resource_version.clone();
        let is_same = self.object.as_ref().map(version) == Some(version(&seen.object));
        let before = seen.object.status.clone().unwrap_or_default();
        let status = shown(seen, decision);
        if status != before {
            if is_same {
                self.write(&status);
            }
            return;
        }
        let Some(step) = &decision.step else { return };
        match step {
            Step::Begin(begun) if is_same => self.write(begun),
            Step::MarkFenced if is_same => self.write(&MoveStatus {
                fenced_at: Some(Time(seen.now)),
                ..status
            }),
            Step::MarkSwitched if is_same => self.write(&MoveStatus {
                switched_at: Some(Time(seen.now)),
                ..status
            }),
            Step::AddFinalizer | Step::RemoveFinalizer if is_same => self.finalizer(step),
            Step::Begin(_)
            | Step::MarkFenced
            | Step::MarkSwitched
            | Step::AddFinalizer
            | Step::RemoveFinalizer => {}
            Step::Evict(pod) | Step::DeletePod(pod) => {
                self.pod = self.pod.take().filter(|now| now.uid != pod.uid);
            }
            Step::Pv(step) => self.exchange(*step, seen),
            Step::Copy if self.refuses && is_same => self.write(&MoveStatus {
                phase: Phase::Aborting,
                message: "no room".into(),
                ..status
            }),
            Step::Copy if self.refuses => {}
            Step::DeleteSource => {
                let is_ready = |copy: &MovedVolume| copy.state == MovingState::Ready;
                let has_copy = seen.copy.as_ref().is_ok_and(is_ready);
                assert!(has_copy || seen.live.is_none(), "the last copy: {self:?}");
                self.order(step);
            }
            step => self.order(step),
        }
    }

    fn finalizer(&mut self, step: &Step) {
        self.versions += 1;
        let version = self.versions.to_string();
        let Some(object) = &mut self.object else {
            return;
        };
        object.metadata.resource_version = Some(version);
        object.metadata.finalizers = match step {
            Step::AddFinalizer => Some(vec![FINALIZER.into()]),
            _ => None,
        };
        if object.is_leaving() && !object.has_finalizer() {
            self.object = None;
        }
    }

    /// What an agent does, which checks for itself what it must.
    fn order(&mut self, step: &Step) {
        match step {
            Step::Fence | Step::LiftFence | Step::DeleteSnapshot | Step::DeleteSource
                if self.is_source_away => {}
            Step::Copy if self.is_source_away || self.is_copy_away => {}
            Step::DeleteCopy if self.is_copy_away => {}
            Step::Fence => {
                let used = self.uses() && self.handle() == Some(SOURCE);
                if self.source.exists && !used && !self.source.lifted {
                    self.source.fenced = true;
                }
            }
            Step::LiftFence => (self.source.fenced, self.source.lifted) = (false, true),
            Step::Copy => {
                if self.source.fenced {
                    let content = *self.snapshot.get_or_insert(self.source.content);
                    if !self.copy.exists {
                        self.copy = Data {
                            exists: true,
                            content,
                            ..Data::default()
                        };
                    }
                }
            }
            Step::DeleteSnapshot => self.snapshot = None,
            Step::DeleteCopy => self.copy = Data::default(),
            Step::DeleteSource => {
                if self.source.fenced {
                    self.source = Data::default();
                }
            }
            other => panic!("{other:?} is not for agents"),
        }
    }

    /// The API server refuses what names another version.
    fn exchange(&mut self, step: PvStep, seen: &Observed) {
        let version = |one: &Option<Manifest>| {
            one.as_ref()
                .map(|one| (one.uid().map(String::from), one.version().map(String::from)))
        };
        let is_same = version(&self.live) == version(&seen.live);
        match step {
            PvStep::Strike => self.noted = None,
            PvStep::Note => self.noted = seen.live.as_ref().map(Manifest::plain),
            PvStep::Make if self.live.is_none() => {
                let goal = Goal {
                    key: KEY,
                    home: "home-of-b",
                    handle: Some(COPY),
                };
                self.live = seen.noted.as_ref().map(|noted| noted.at(goal));
                self.versions += 1;
                let uid = format!("uid-{}", self.versions);
                let phase = if self.has_claim { "Bound" } else { "Released" };
                self.change(|live| {
                    live.0.metadata.uid = Some(uid);
                    live.0.data["status"] = json!({ "phase": phase });
                });
            }
            _ if !is_same => {}
            PvStep::Retain => self.change(|live| {
                let before = live.policy().to_string();
                let annotations = live.0.metadata.annotations.get_or_insert_default();
                annotations.insert(POLICY.into(), before);
                live.0.data["spec"]["persistentVolumeReclaimPolicy"] = json!("Retain");
            }),
            PvStep::Restore => self.change(|live| {
                let before = live.policy_before().map(String::from);
                live.0.metadata.annotations.as_mut().unwrap().remove(POLICY);
                live.0.data["spec"]["persistentVolumeReclaimPolicy"] = json!(before);
            }),
            PvStep::Delete => self.change(|live| {
                let now = serde_json::from_value(json!("2026-01-02T00:00:00Z")).unwrap();
                live.0.metadata.deletion_timestamp = Some(now);
            }),
            PvStep::Release => self.live = None,
            PvStep::Make => {}
        }
    }

    /// What Kubernetes and the provisioner do by themselves.
    fn others(&mut self) {
        if self.has_claim || self.uses() {
            return;
        }
        self.change(|live| live.0.data["status"] = json!({ "phase": "Released" }));
        let Some(live) = &self.live else { return };
        if live.policy() != "Delete" || live.is_leaving() {
            return;
        }
        match live.text(HANDLE) {
            Some(SOURCE) if self.source.fenced || self.is_source_away => {}
            Some(SOURCE) => (self.source, self.live) = (Data::default(), None),
            Some(_) if self.is_copy_away => {}
            Some(_) => (self.copy, self.live) = (Data::default(), None),
            None => {}
        }
    }

    /// A pod of the claim is created and placed where its PersistentVolume is.
    fn start_pod(&mut self) {
        let Some(handle) = self.handle() else { return };
        let node = if handle == SOURCE { "a" } else { "b" };
        if self.pod.is_some() || !self.has_claim {
            return;
        }
        self.versions += 1;
        let is_kept_off = node == "a" && self.is_cordoned;
        self.pod = Some(PodUse {
            name: "db-0".into(),
            uid: self.versions.to_string(),
            node: (!is_kept_off).then(|| node.into()),
            has_started: false,
        });
    }

    /// The kubelet mounts the volume of a placed pod, unless it is fenced or somewhere else; then the
    /// application writes.
    fn run_pod(&mut self) {
        let handle = self.handle().map(String::from);
        let Some(pod) = &mut self.pod else { return };
        let node = match handle.as_deref() {
            Some(SOURCE) => "a",
            Some(_) => "b",
            None => return,
        };
        if pod.node.as_deref() != Some(node) {
            return;
        }
        let data = if node == "a" {
            &mut self.source
        } else {
            &mut self.copy
        };
        if !pod.has_started && (!data.exists || data.fenced) {
            return;
        }
        pod.has_started = true;
        assert!(data.exists && !data.fenced, "{node} is used");
        assert_eq!(data.content, self.written, "it has lost what was written");
        self.written += 1;
        data.content = self.written;
        // Only one copy may be written: nothing can start to use the other one.
        let other = if node == "a" { None } else { Some(self.source) };
        assert!(other.is_none_or(|other| !other.exists || other.fenced));
    }

    fn check(&self) {
        if !self.has_claim || self.is_target_lost {
            return;
        }
        let data = match (&self.live, &self.noted) {
            (Some(_), _) => self.named().unwrap(),
            (None, Some(_)) => self.copy,
            (None, None) => panic!("the PersistentVolume is lost"),
        };
        assert!(data.exists, "no copy: {self:?}");
        assert_eq!(data.content, self.written, "an old copy: {self:?}");
    }

    /// Everything is repaired, and the router goes on to the end.
    fn end(&mut self) {
        (self.is_source_away, self.is_copy_away) = (false, false);
        (self.is_cordoned, self.double, self.refuses) = (true, false, false);
        for round in 0..400 {
            self.pod = None;
            self.seconds += 30;
            self.others();
            self.check();
            if let Some(decided) = self.decided() {
                self.execute(&decided);
                continue;
            }
            if round > 300 {
                break;
            }
        }
        let status = self
            .object
            .as_ref()
            .and_then(|object| object.status.clone());
        if let Some(object) = &self.object {
            let phase = status.clone().unwrap_or_default().phase;
            let never_began = status.as_ref().is_none_or(|status| status.from.is_none());
            // It keeps the source, which is the only copy.
            let is_stuck = self.is_target_lost
                && self.source.exists
                && status.is_some_and(|status| status.switched_at.is_some());
            let may_stay = never_began || is_stuck;
            assert!(phase.is_final() || may_stay, "{phase:?}: {self:?}");
            assert!(!object.has_finalizer() || may_stay, "{self:?}");
        }
        if self.is_target_lost {
            return;
        }
        assert!(self.noted.is_none() || self.wrote_late, "{self:?}");
        assert_eq!(self.snapshot, None, "{self:?}");
        let left = [self.source, self.copy]
            .iter()
            .filter(|one| one.exists)
            .count();
        assert!(
            left == usize::from(self.has_claim) || self.wrote_late,
            "{self:?}"
        );
        if let Some(live) = self.live.as_ref().filter(|_| !self.wrote_late) {
            assert_eq!((live.policy(), live.policy_before()), ("Delete", None));
            assert!(!live.is_leaving() && !self.named().unwrap().fenced);
        }
    }
}

/// What may happen between two steps.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// The router observes, decides and does one step.
    Step,
    /// A router observes and decides, and does its step with the next `Late`.
    Decide,
    Late,
    StartPod,
    RunPod,
    EndPod,
    Cordon(bool),
    SourceAway(bool),
    CopyAway(bool),
    Wait,
    DeleteClaim,
    DeleteMove,
    Double(bool),
    Refuses(bool),
    LoseTarget,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        12 => Just(Event::Step),
        2 => Just(Event::Decide),
        2 => Just(Event::Late),
        2 => Just(Event::StartPod),
        4 => Just(Event::RunPod),
        2 => Just(Event::EndPod),
        2 => any::<bool>().prop_map(Event::Cordon),
        1 => any::<bool>().prop_map(Event::SourceAway),
        1 => any::<bool>().prop_map(Event::CopyAway),
        1 => Just(Event::Wait),
        1 => any::<bool>().prop_map(Event::Double),
        1 => any::<bool>().prop_map(Event::Refuses),
    ]
}

/// What can happen once, and when.
fn ending() -> impl Strategy<Value = Option<(usize, Event)>> {
    let event = prop_oneof![
        Just(Event::DeleteClaim),
        Just(Event::DeleteMove),
        Just(Event::LoseTarget),
    ];
    proptest::option::of((0_usize..60, event))
}

fn happen(world: &mut World, late: &mut Option<(Observed, Decision)>, event: Event) {
    match event {
        Event::Step => {
            if let Some(decided) = world.decided() {
                world.execute(&decided);
            }
        }
        Event::Decide => *late = world.decided(),
        Event::Late => {
            if let Some(decided) = late.take() {
                let harmless = [PvStep::Retain, PvStep::Note, PvStep::Make].map(Step::Pv);
                let step = decided.1.step.as_ref();
                world.wrote_late |= step.is_some_and(|step| harmless.contains(step));
                world.execute(&decided);
            }
        }
        Event::StartPod => world.start_pod(),
        Event::RunPod => world.run_pod(),
        Event::EndPod => world.pod = None,
        Event::Cordon(is_cordoned) => world.is_cordoned = is_cordoned,
        Event::SourceAway(is_away) => world.is_source_away = is_away,
        Event::CopyAway(is_away) => world.is_copy_away = is_away,
        Event::Wait => world.seconds += 45,
        Event::Double(is_there) => world.double = is_there,
        Event::Refuses(refuses) => world.refuses = refuses,
        Event::LoseTarget => world.is_target_lost = true,
        Event::DeleteClaim => world.has_claim = false,
        Event::DeleteMove => {
            let now = Timestamp::from_second(world.seconds).unwrap();
            let has_finalizer = world.object.as_ref().is_some_and(VolumeMove::has_finalizer);
            match &mut world.object {
                Some(object) if has_finalizer => {
                    object.metadata.deletion_timestamp = Some(Time(now));
                    object.metadata.resource_version = Some("deleted".into());
                }
                _ => world.object = None,
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn whatever_happens_one_copy_is_used_and_nothing_is_left(
        is_now in any::<bool>(),
        events in proptest::collection::vec(event(), 0..80),
        ending in ending(),
    ) {
        let mut world = World::new(if is_now { When::Now } else { When::Drained });
        let mut late = None;
        for (at, event) in events.into_iter().enumerate() {
            if let Some((_, ending)) = ending.filter(|(when, _)| *when == at) {
                happen(&mut world, &mut late, ending);
                world.check();
            }
            happen(&mut world, &mut late, event);
            world.others();
            world.check();
        }
        world.end();
    }
}

fn until(world: &mut World, is_reached: impl Fn(&World) -> bool) {
    for _ in 0..60 {
        if is_reached(world) {
            return;
        }
        let decided = world.decided().expect("it goes on");
        world.execute(&decided);
        world.check();
    }
    panic!("not reached: {world:?}");
}

fn phase(world: &World) -> Phase {
    let object = world.object.as_ref().unwrap();
    object
        .status
        .as_ref()
        .map(|status| status.phase)
        .unwrap_or_default()
}

#[test]
fn a_move_passes_through_its_phases_and_keeps_the_source() {
    let mut world = World::new(When::Drained);
    world.start_pod();
    world.run_pod();
    let mut phases = vec![phase(&world)];
    let step = |world: &mut World| {
        let Some(decided) = world.decided() else {
            return false;
        };
        world.execute(&decided);
        true
    };
    while step(&mut world) {
        phases.push(phase(&world));
    }
    let message = world
        .object
        .as_ref()
        .unwrap()
        .status
        .clone()
        .unwrap()
        .message;
    assert!(
        message.contains("db-0") && message.contains("kubectl drain a"),
        "{message}"
    );
    world.is_cordoned = true;
    world.pod = None;
    world.start_pod();
    while step(&mut world) {
        phases.push(phase(&world));
    }
    world.pod = None;
    assert_eq!(world.handle(), Some(COPY));
    assert!(world.source.exists && world.source.fenced && world.copy.exists);
    world.seconds += 59;
    while step(&mut world) {}
    assert!(world.source.exists, "it is kept for a minute");
    world.seconds += 1;
    while step(&mut world) {
        phases.push(phase(&world));
    }
    assert!(!world.source.exists);
    phases.dedup();
    let expected = [
        Phase::Pending,
        Phase::Waiting,
        Phase::Fenced,
        Phase::LastCopy,
        Phase::Switched,
        Phase::Done,
    ];
    assert_eq!(phases, expected);
    world.end();
}

#[test]
fn a_move_that_is_deleted_before_the_switch_is_undone_from_every_state() {
    let mut begun = World::new(When::Drained);
    let mut states = vec![begun.clone()];
    while let Some(decided) = begun.decided() {
        begun.execute(&decided);
        states.push(begun.clone());
    }
    assert!(states.len() > 15, "{}", states.len());
    for (at, state) in states.into_iter().enumerate() {
        let is_over = state
            .live
            .as_ref()
            .is_none_or(|live| live.is_leaving() || live.text(HANDLE) == Some(COPY));
        let mut world = state;
        happen(&mut world, &mut None, Event::DeleteMove);
        world.end();
        assert!(world.object.is_none(), "{at}");
        let expected = if is_over { COPY } else { SOURCE };
        assert_eq!(world.handle(), Some(expected), "{at}");
    }
}

#[test]
fn a_pod_that_was_started_too_early_is_deleted_only_by_a_move_that_evicts() {
    for when in [When::Now, When::Drained] {
        let mut world = World::new(when);
        until(&mut world, |world| world.source.fenced);
        world.start_pod();
        world.run_pod();
        let pod = world.pod.clone().unwrap();
        assert!(pod.node.as_deref() == Some("a") && !pod.has_started);
        until(&mut world, |world| world.handle() == Some(COPY));
        let is_deleted = world.pod.is_none();
        assert_eq!(is_deleted, when == When::Now);
    }
}
