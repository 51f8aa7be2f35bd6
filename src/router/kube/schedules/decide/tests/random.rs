//! Random histories: routers crash anywhere and are continued by others, clocks jump, snapshots fail, people
//! delete sets, and others create objects with our label.

use std::collections::BTreeSet;

use proptest::prelude::*;
use serde_json::{Value, json};
use slackwater_testkit::Sweep;

use super::world::{Crash, World};
use super::*;
use crate::router::kube::schedules::retention::State;

#[derive(Clone, Debug)]
enum Event {
    Pass(Crash),
    /// Minutes.
    Wait(i64),
    /// All clocks are set by this number of minutes.
    Jump(i64),
    Skew(bool),
    Finish(Option<Level>),
    /// A person deletes one of the sets.
    Remove(usize),
    /// Something begins or ends to use one of the sets.
    Use(usize),
    /// A person has the schedule executed now.
    Run,
    /// A user creates an object with the label and a name that may be one of a set.
    Intrude(usize),
}

fn events() -> impl Strategy<Value = Event> {
    let crash = prop_oneof![
        Just(Crash::Before),
        Just(Crash::Within),
        Just(Crash::BeforeStatus),
        Just(Crash::Never)
    ];
    let level = prop_oneof![
        3 => Just(Some(Level::Filesystem)),
        1 => Just(Some(Level::Crash)),
        1 => Just(None),
    ];
    prop_oneof![
        8 => crash.prop_map(Event::Pass),
        6 => (1_i64..90).prop_map(Event::Wait),
        1 => (-3000_i64..3000).prop_map(Event::Jump),
        1 => any::<bool>().prop_map(Event::Skew),
        5 => level.prop_map(Event::Finish),
        1 => (0_usize..9).prop_map(Event::Remove),
        1 => (0_usize..9).prop_map(Event::Use),
        1 => Just(Event::Run),
        1 => (0_usize..9).prop_map(Event::Intrude),
    ]
}

fn keeps() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(json!({"last": 2})),
        Just(json!({"hourly": 3, "daily": 2})),
        Just(json!({"maxAge": "3h"})),
        Just(json!({"last": 3, "maxAge": "2h"})),
        Just(json!({})),
    ]
}

const STRANGE: [&str; 4] = [
    "pg-20261122-0100-0a1b2-c",
    "a-b-c",
    "pg-20261122-9900-0a1b2-a",
    "pg-20261122-0100-0a1b2",
];

/// Does what the event says, and checks what a pass has done.
fn apply(world: &mut World, event: &Event) -> Result<(), TestCaseError> {
    match event {
        Event::Pass(crash) => return pass(world, *crash),
        Event::Wait(minutes) | Event::Jump(minutes) => world.wait(*minutes),
        Event::Skew(skew) => world.skew = *skew,
        Event::Finish(level) => world.finish(*level),
        Event::Remove(number) => {
            let name = world.objects.keys().nth(*number).cloned();
            name.map(|name| world.objects.remove(&name));
        }
        Event::Use(number) => {
            let name = world.objects.keys().nth(*number).cloned();
            if let Some(name) = name.filter(|name| !world.used.remove(name)) {
                world.used.insert(name);
            }
        }
        Event::Run => world.schedule.spec.run_at = Some(world.now.to_string()),
        Event::Intrude(number) => {
            let name = STRANGE[number % STRANGE.len()];
            let object = json!({
                "metadata": {"name": name, "namespace": "shop", "uid": "x", "resourceVersion": "1",
                    "creationTimestamp": world.now.to_string(),
                    "labels": {"slackwater.dev/schedule-uid": world.uid()}},
                "spec": {"source": {"persistentVolumeClaimName": "a"}},
                "status": {"readyToUse": true, "boundVolumeSnapshotContentName": "x"},
            });
            world.objects.insert(name.into(), object);
        }
    }
    Ok(())
}

fn pass(world: &mut World, crash: Crash) -> Result<(), TestCaseError> {
    let before = world.seen();
    let deleted = world.deleted.len();
    world.pass(crash);
    let Some(name) = world.deleted.get(deleted) else {
        return Ok(());
    };
    let listed = decide(&before).status.deletions.unwrap_or_default();
    let mut next = listed.iter().filter(|one| one.waits.is_empty());
    prop_assert!(next.any(|one| one.name == *name), "{name} was not listed");
    prop_assert_eq!(world.deleted.len(), deleted + 1);
    prop_assert!(!STRANGE.contains(&name.as_str()), "{name}");
    prop_assert!(!world.skew && !world.used.contains(name), "{name}");
    prop_assert!(before.is_complete);
    let sets = before
        .sets
        .values()
        .find(|sets| sets.iter().any(|set| set.name == *name));
    let sets = sets.unwrap();
    let set = sets.iter().find(|set| set.name == *name).unwrap();
    let newer = |is_meant: &dyn Fn(&Set) -> bool| {
        let mut sets = sets.iter();
        sets.any(|other| other.slot > set.slot && other.slot <= before.now && is_meant(other))
    };
    prop_assert!(newer(&Set::is_good), "{name} was the newest good set");
    let is_at_level = |set: &Set| set.state == State::Good { is_at_level: true };
    prop_assert!(
        !is_at_level(set) || newer(&is_at_level),
        "{name} was the newest at its level"
    );
    prop_assert!(
        before.object.spec.keep != Some(Default::default()),
        "without keep"
    );
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(Sweep::requested().random(400)))]
    #[test]
    fn no_history_loses_or_repeats_anything(
        keep in keeps(),
        events in proptest::collection::vec(events(), 1..120),
    ) {
        let spec = json!({"claims": ["a"], "class": "c", "every": "30m", "keep": keep});
        let mut world = World::new(spec);
        let mut is_monotonic = true;
        for event in &events {
            is_monotonic &= !matches!(event, Event::Jump(minutes) if *minutes < 0);
            apply(&mut world, event)?;
        }
        world.skew = false;
        world.used.clear();
        world.run();
        let names: BTreeSet<&String> = world.created.iter().collect();
        let removed = events.iter().any(|event| matches!(event, Event::Remove(_)));
        if is_monotonic && !removed {
            prop_assert_eq!(names.len(), world.created.len(), "a slot was executed twice: {:?}", world.created);
        }
        // However it has ended, the next slots are executed.
        for _ in 0..6 {
            world.wait(30);
            world.run();
            world.finish(Some(Level::Filesystem));
        }
        world.run();
        let good = world.seen().sets["a"].iter().filter(|set| set.is_good()).count();
        prop_assert!(good > 0 && world.created.len() >= 3, "{:?}", world.created);
    }
}
