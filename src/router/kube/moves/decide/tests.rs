//! Moves in a model of a cluster: everything may happen between two steps, and a router may do a step
//! late, after another one has gone on.

mod rounds;
mod world;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use proptest::prelude::*;
use slackwater_testkit::Sweep;

use super::*;
use crate::router::kube::moves::object::When;
use crate::router::volume_moves::ROUNDS;
use world::{COPY, SOURCE, World};

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
    RefusesRounds(bool),
    /// A snapshot is deleted by something else, for example for lack of space.
    LoseSnapshot(u32),
    /// The incomplete copy is deleted by its agent.
    LoseFilled,
    Changes(u64),
    LoseTarget,
    /// The object is removed together with its finalizer.
    Remove,
    LiftWithoutMove,
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
        1 => any::<bool>().prop_map(Event::RefusesRounds),
        1 => proptest::sample::select(ROUNDS.to_vec()).prop_map(Event::LoseSnapshot),
        1 => Just(Event::LoseFilled),
        1 => Just(Event::LiftWithoutMove),
        1 => (0_u64..2).prop_map(|many| Event::Changes(many << 40)),
    ]
}

/// What can happen once, and when.
fn ending() -> impl Strategy<Value = Option<(usize, Event)>> {
    let event = prop_oneof![
        Just(Event::DeleteClaim),
        Just(Event::DeleteMove),
        Just(Event::LoseTarget),
        Just(Event::Remove),
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
        Event::Wait => world.seconds += 200,
        Event::Double(is_there) => world.double = is_there,
        Event::Refuses(refuses) => world.refuses = refuses,
        Event::RefusesRounds(refuses) => world.refuses_rounds = refuses,
        Event::LoseSnapshot(round) => drop(world.snapshots.remove(&Some(round))),
        Event::LoseFilled => world.filled = None,
        Event::Changes(bytes) => world.changes = bytes,
        Event::LoseTarget => world.is_target_lost = true,
        Event::Remove => (world.object, world.was_removed) = (None, true),
        Event::LiftWithoutMove => world.lift_without_move(),
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
    #![proptest_config(ProptestConfig::with_cases(Sweep::requested().random(2000)))]

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
    assert!(world.fills > 0, "it was copied while the pod used it");
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
        Phase::Copying,
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

/// An administrator has bound the PersistentVolume elsewhere, or a tenant has written the status.
#[test]
fn nothing_of_a_claim_in_another_namespace_is_changed_in_any_state() {
    let mut world = World::new(When::Drained);
    let mut states = Vec::new();
    loop {
        states.extend(world.seen());
        world.seconds += 30;
        let Some(decided) = world.decided() else {
            break;
        };
        world.execute(&decided);
    }
    assert!(states.iter().any(|seen| seen.names_copy.is_some()));
    let foreign = || Some("other/data".to_string());
    for seen in states {
        for (is_forgotten, has_copy) in [(false, true), (true, true), (false, false)] {
            let mut seen = seen.clone();
            seen.foreign_volume = foreign();
            seen.claim = ClaimState::Gone;
            if let Some(status) = seen.object.status.as_mut().filter(|_| is_forgotten) {
                status.switched_at = None;
            }
            if !has_copy {
                seen.copy = Ok(VolumeMoveStatus::default());
            }
            let step = decide(&seen).step;
            let begins = matches!(
                step,
                Some(Step::Pv(_) | Step::Fence | Step::Copy | Step::Snapshot(_) | Step::Fill(_))
            );
            assert!(!begins, "{step:?} for {seen:?}");
            let deletes_named = step == Some(Step::DeleteCopy) && seen.names_copy.is_some();
            let deletes_last = step == Some(Step::DeleteSource) && !has_copy;
            assert!(!deletes_named && !deletes_last, "{step:?} for {seen:?}");
        }
        let mut seen = seen;
        let is_fenced = (seen.source.as_ref()).is_ok_and(|source| source.fenced.is_some());
        let at_source = seen.names_copy.is_none() && seen.live.is_some();
        let status = seen.object.status.as_ref();
        let has_begun = status.is_some_and(|it| it.from.is_some() && !it.phase.is_final());
        if has_begun && at_source && !is_fenced {
            seen.foreign_source = foreign();
            let decision = decide(&seen);
            assert_eq!(decision.phase.max(Phase::Aborting), decision.phase);
            assert!(decision.abort_reason.is_some(), "{decision:?}");
        }
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
