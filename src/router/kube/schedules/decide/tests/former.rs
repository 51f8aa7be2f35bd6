//! Sets of a spec that was changed: of a selector instead of claims, of other claims, of another class.

use serde_json::{Value, json};

use super::world::{World, at, condition, message};
use super::*;

fn world(spec: &Value) -> World {
    let mut world = World::new(json!({"class": "c", "every": "1h", "keep": {"last": 2}}));
    world.has_groups = true;
    world.change(spec);
    world
}

fn selector() -> Value {
    json!({"selector": {"matchLabels": {"app": "pg"}}, "claims": null})
}

fn claims() -> Value {
    json!({"selector": null, "claims": ["a", "b"]})
}

/// Executes the slots of these hours.
fn cut(world: &mut World, hours: impl IntoIterator<Item = u8>) {
    for hour in hours {
        world.now = at(&format!("2026-11-22T{hour:02}:02:00Z"));
        world.run();
        world.finish(Some(Level::Filesystem));
        world.run();
    }
}

#[test]
fn sets_of_a_former_selector_or_of_former_claims_stay_and_are_reported() {
    for (former, present, number) in [(selector(), claims(), 2), (claims(), selector(), 4)] {
        let mut world = world(&former);
        cut(&mut world, 1..=3);
        let of_former: Vec<_> = world.objects.keys().cloned().collect();
        assert_eq!((of_former.len(), world.deleted.len()), (number, number / 2));
        assert_eq!(condition(&world.status(), RETENTION), ("True", "Kept"));
        world.change(&present);
        world.run();
        let status = world.status();
        assert_eq!(condition(&status, RETENTION), ("True", "FormerSets"));
        assert_eq!(condition(&status, CUT), ("Unknown", "NoneYet"));
        assert!(status.overdue_since.is_none() && status.last_cut_slot.is_none());
        let newest = of_former.last().unwrap();
        let expected = format!("{number} sets are of claims or of a selector");
        let found = message(&status, RETENTION);
        assert!(
            found.contains(&expected) && found.contains(newest),
            "{found}"
        );
        // The new sets are counted by themselves.
        cut(&mut world, 4..=9);
        assert!(
            of_former
                .iter()
                .all(|name| world.objects.contains_key(name))
        );
        assert_eq!(world.objects.len(), 6);
        assert_eq!(
            condition(&world.status(), RETENTION),
            ("True", "FormerSets")
        );
        // A person deletes them.
        world.objects.retain(|name, _| !of_former.contains(name));
        world.run();
        assert_eq!(condition(&world.status(), RETENTION), ("True", "Kept"));
        assert_eq!(message(&world.status(), RETENTION), "");
    }
}

#[test]
fn sets_count_again_after_the_spec_was_changed_back() {
    let mut world = world(&selector());
    cut(&mut world, 1..=2);
    world.change(&claims());
    cut(&mut world, 3..=4);
    world.change(&selector());
    cut(&mut world, 5..=5);
    let mut left: Vec<_> = world.objects.keys().map(|name| &name[12..16]).collect();
    left.sort_unstable();
    assert_eq!(left, ["0200", "0300", "0300", "0400", "0400", "0500"]);
    assert_eq!(world.deleted, ["pg-20261122-0100-0a1b2"]);
}

#[test]
fn sets_of_a_claim_that_left_the_spec_stay_and_are_reported() {
    let mut world = world(&claims());
    cut(&mut world, 1..=3);
    world.change(&json!({"claims": ["a"]}));
    cut(&mut world, 4..=6);
    assert_eq!(
        condition(&world.status(), RETENTION),
        ("True", "FormerSets")
    );
    assert!(message(&world.status(), RETENTION).contains("pg-20261122-0300-0a1b2-b"));
    // Among themselves, they are counted by the present numbers.
    world.change(&json!({"keep": {"last": 1}}));
    world.run();
    let mut of_b = world.objects.keys().filter(|name| name.ends_with("-b"));
    assert_eq!(of_b.next().unwrap(), "pg-20261122-0300-0a1b2-b");
    assert_eq!(of_b.next(), None);
}

#[test]
fn without_keep_former_sets_are_nothing_special() {
    let mut world = world(&selector());
    cut(&mut world, 1..=2);
    world.change(&claims());
    world.change(&json!({"keep": null}));
    world.run();
    assert_eq!(condition(&world.status(), RETENTION), ("True", "AllKept"));
}

/// The level of the present class counts, whichever class a set was created with.
#[test]
fn sets_of_another_class_are_counted_by_the_level_of_the_present_one() {
    let mut world = world(&json!({"claims": ["a"]}));
    cut(&mut world, 1..=2);
    world.change(&json!({"class": "stricter"}));
    world.class_mut().level = Ok(Level::Application);
    // None reaches the new level, so the newest ones count as before.
    cut(&mut world, 3..=3);
    let left: Vec<_> = world.objects.keys().map(|name| &name[12..16]).collect();
    assert_eq!(left, ["0200", "0300"]);
    world.now = at("2026-11-22T04:02:00Z");
    world.run();
    world.finish(Some(Level::Application));
    world.run();
    cut(&mut world, 5..=6);
    let left: Vec<_> = world.objects.keys().map(|name| &name[12..16]).collect();
    assert_eq!(
        left,
        ["0400", "0500", "0600"],
        "that of 04:00 is the only one at the level"
    );
    world.change(&json!({"class": "c"}));
    world.class_mut().level = Ok(Level::Filesystem);
    world.run();
    let left: Vec<_> = world.objects.keys().map(|name| &name[12..16]).collect();
    assert_eq!(left, ["0500", "0600"]);
}
