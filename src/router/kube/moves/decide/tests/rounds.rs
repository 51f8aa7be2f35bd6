//! The copies before the fence.

use super::world::{COPY, World};
use super::*;
use crate::router::kube::moves::object::PreCopy;

/// A world whose pod uses the volume, with a move that does what it can.
fn copied_in_advance(changes: u64, when: When) -> World {
    let mut world = World::new(when);
    world.changes = changes;
    world.start_pod();
    world.run_pod();
    go_on(&mut world);
    world
}

fn go_on(world: &mut World) {
    for _ in 0..100 {
        let Some(decided) = world.decided() else {
            return;
        };
        let is_eviction = matches!(decided.1.step, Some(Step::Evict(_)));
        world.execute(&decided);
        world.check();
        if is_eviction && world.pod.is_none() {
            return;
        }
    }
    panic!("it does not end: {world:?}");
}

fn pre_copy(world: &World) -> PreCopy {
    let status = world.object.as_ref().unwrap().status.as_ref();
    status.unwrap().pre_copy.clone()
}

fn condition(world: &World, type_: &str) -> (String, String) {
    let status = world.object.as_ref().unwrap().status.clone().unwrap();
    let mut its = status
        .conditions
        .into_iter()
        .filter(|one| one.type_ == type_);
    let its = its.next().unwrap();
    (its.status, its.reason)
}

#[test]
fn rounds_are_made_until_little_is_written_and_at_most_five() {
    for (changes, rounds) in [(0, 2), ((256 << 20) - 1, 2), (256 << 20, 5), (1 << 40, 5)] {
        let mut world = copied_in_advance(changes, When::Drained);
        assert_eq!(
            (phase(&world), pre_copy(&world).round),
            (Phase::Waiting, rounds)
        );
        assert_eq!(world.snapshots.len(), 1, "the base of the next copy");
        let base = world.snapshots.values().next().unwrap().identity;
        assert_eq!(
            world
                .filled
                .map(|filled| (filled.identity, filled.is_whole)),
            Some((base, true))
        );
        assert_eq!(
            condition(&world, "CopiedInAdvance"),
            ("True".into(), "Copied".into())
        );
        assert_eq!(
            condition(&world, "Proceeding"),
            ("False".into(), "InUse".into())
        );
        // Another round every ten minutes, in the same phase.
        world.seconds += 599;
        go_on(&mut world);
        assert_eq!(pre_copy(&world).round, rounds);
        world.seconds += 1;
        go_on(&mut world);
        assert_eq!(
            (phase(&world), pre_copy(&world).round),
            (Phase::Waiting, rounds + 1)
        );
        world.end();
    }
}

#[test]
fn a_volume_that_nothing_uses_is_not_copied_in_advance() {
    let mut world = World::new(When::Drained);
    go_on(&mut world);
    assert_eq!((world.handle(), world.fills), (Some(COPY), 0));
}

#[test]
fn a_move_that_evicts_copies_first_and_goes_on_if_that_is_refused() {
    let world = copied_in_advance(0, When::Now);
    assert!(world.pod.is_none() && world.filled.is_some_and(|filled| filled.is_whole));
    for refuses in ["rounds", "copies"] {
        let mut world = World::new(When::Now);
        (world.refuses_rounds, world.refuses) = (refuses == "rounds", refuses == "copies");
        world.start_pod();
        world.run_pod();
        go_on(&mut world);
        assert!(world.pod.is_none(), "{refuses}: it goes on");
        assert_eq!(
            condition(&world, "CopiedInAdvance"),
            ("False".into(), "Refused".into())
        );
        world.refuses = false;
        go_on(&mut world);
        assert_eq!(world.handle(), Some(COPY), "{refuses}");
        world.end();
    }
}

#[test]
fn a_round_that_failed_or_lost_its_base_is_made_again_ten_minutes_later() {
    type Fail = fn(&mut World);
    let failures: [(&str, Fail); 3] = [
        ("the base is gone", |world| world.snapshots.clear()),
        ("the source refuses", |world| world.refuses_rounds = true),
        ("the target refuses", |world| world.refuses = true),
    ];
    for (what, fail) in failures {
        let mut world = copied_in_advance(0, When::Drained);
        fail(&mut world);
        world.seconds += 600;
        go_on(&mut world);
        let fills = world.fills;
        (world.refuses, world.refuses_rounds) = (false, false);
        world.seconds += 599;
        go_on(&mut world);
        assert_eq!(world.fills, fills, "{what}: not at once");
        world.seconds += 1;
        go_on(&mut world);
        assert!(world.fills > fills, "{what}");
        assert_eq!(world.snapshots.len(), 1, "{what}");
        assert_eq!(condition(&world, "CopiedInAdvance").0, "True", "{what}");
        world.end();
    }
}

#[test]
fn a_copy_that_is_begun_is_completed_under_the_fence() {
    let mut world = World::new(When::Drained);
    world.start_pod();
    world.run_pod();
    until(&mut world, |world| world.filled.is_some());
    assert!(!world.filled.unwrap().is_whole);
    (world.pod, world.is_cordoned) = (None, true);
    until(&mut world, |world| {
        world.source.fenced && phase(world) == Phase::LastCopy
    });
    let decided = world.decided().unwrap();
    assert!(matches!(decided.1.step, Some(Step::Fill(_))), "{decided:?}");
    until(&mut world, |world| world.handle() == Some(COPY));
    world.end();
}
