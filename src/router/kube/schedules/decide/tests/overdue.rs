//! Since when a schedule has no set that it should have.

use jiff::Timestamp;
use serde_json::json;

use super::world::{Crash, World, at};
use super::*;

fn world() -> World {
    World::new(json!({"claims": ["a"], "class": "c", "every": "1h"}))
}

fn overdue(world: &World) -> Option<Timestamp> {
    world.status().overdue_since.map(|since| since.0)
}

/// The first slot is executed and becomes good, at this time of the day.
fn after_first_slot(world: &mut World) {
    world.now = at("2026-11-22T01:02:00Z");
    world.run();
    world.finish(Some(Level::Filesystem));
    world.run();
    assert_eq!(overdue(world), None);
}

#[test]
fn slots_in_which_a_schedule_was_suspended_are_not_overdue() {
    let mut world = world();
    after_first_slot(&mut world);
    world.change(&json!({"suspend": true}));
    for time in ["01:10", "05:10", "09:50"] {
        world.now = at(&format!("2026-11-22T{time}:00Z"));
        world.run();
        assert_eq!(overdue(&world), None);
    }
    world.change(&json!({"suspend": false}));
    world.run();
    assert_eq!(overdue(&world), None, "the newest set is that of 01:00");
    world.now = at("2026-11-22T09:59:00Z");
    world.run();
    assert_eq!((overdue(&world), world.created.len()), (None, 1));
    world.now = at("2026-11-22T10:20:00Z");
    world.run();
    assert_eq!(world.created.len(), 2);
    assert_eq!(
        overdue(&world),
        Some(at("2026-11-22T10:00:00Z")),
        "this one counts"
    );
}

#[test]
fn a_resumption_that_no_router_has_seen_makes_nothing_overdue() {
    // Suspended when it was read last.
    let mut world = world();
    after_first_slot(&mut world);
    world.change(&json!({"suspend": true}));
    world.now = at("2026-11-22T01:10:00Z");
    world.run();
    world.change(&json!({"suspend": false}));
    world.now = at("2026-11-22T06:20:00Z");
    world.run();
    assert_eq!(overdue(&world), Some(at("2026-11-22T06:00:00Z")));
    // Suspended and resumed while no router read it.
    let mut world = self::world();
    after_first_slot(&mut world);
    world.change(&json!({"suspend": true}));
    world.change(&json!({"suspend": false}));
    world.now = at("2026-11-22T06:20:00Z");
    world.run();
    assert_eq!(overdue(&world), Some(at("2026-11-22T06:00:00Z")));
    // Nothing was changed, so each of them was missed.
    let mut world = self::world();
    after_first_slot(&mut world);
    world.now = at("2026-11-22T06:20:00Z");
    world.run();
    assert_eq!(overdue(&world), Some(at("2026-11-22T02:00:00Z")));
}

#[test]
fn a_claim_is_not_overdue_for_slots_before_it_was_added() {
    let mut world = world();
    after_first_slot(&mut world);
    world.now = at("2026-11-22T01:30:00Z");
    world.change(&json!({"claims": ["a", "b"]}));
    world.run();
    assert_eq!(overdue(&world), None);
    world.now = at("2026-11-22T02:20:00Z");
    world.run();
    assert_eq!(overdue(&world), Some(at("2026-11-22T02:00:00Z")));
    world.finish(Some(Level::Filesystem));
    world.run();
    assert_eq!(overdue(&world), None);
    // Only the sets of the other claim become good.
    world.now = at("2026-11-22T03:20:00Z");
    world.run();
    let name = world.created.last().unwrap().clone();
    world.objects.remove(&name);
    world.finish(Some(Level::Filesystem));
    world.now = at("2026-11-22T03:50:00Z");
    world.run();
    assert_eq!(overdue(&world), Some(at("2026-11-22T03:00:00Z")));
    // A change of something else changes nothing of that.
    world.change(&json!({"keep": {"last": 3}}));
    world.run();
    assert_eq!(overdue(&world), Some(at("2026-11-22T03:00:00Z")));
    world.change(&json!({"claims": ["a"]}));
    world.run();
    assert_eq!(overdue(&world), None);
    world.change(&json!({"claims": ["a", "b"]}));
    world.run();
    assert_eq!(overdue(&world), None, "it was added again at 03:50");
}

#[test]
fn a_change_by_which_a_slot_was_missed_hides_none_that_is_due() {
    for crash in [Crash::Before, Crash::BeforeStatus, Crash::Never] {
        let mut world = world();
        after_first_slot(&mut world);
        // No set of these slots becomes good, and the spec is changed while a router reads it.
        for hour in ["02", "03"] {
            world.now = at(&format!("2026-11-22T{hour}:02:00Z"));
            world.run();
        }
        world.change(&json!({"keep": {"last": 3}}));
        world.now = at("2026-11-22T04:02:00Z");
        world.pass(crash);
        world.run();
        assert_eq!(
            overdue(&world),
            Some(at("2026-11-22T02:00:00Z")),
            "{crash:?}"
        );
    }
}

#[test]
fn a_clock_that_was_wrong_hides_no_slot_for_ever() {
    let mut world = world();
    after_first_slot(&mut world);
    world.now = at("2036-01-01T00:10:00Z");
    world.change(&json!({"claims": ["a", "b"]}));
    world.run();
    world.now = at("2026-11-22T01:50:00Z");
    world.run();
    world.now = at("2026-11-22T02:20:00Z");
    world.run();
    assert_eq!(overdue(&world), Some(at("2026-11-22T02:00:00Z")));
}

#[test]
fn the_record_alone_is_not_written() {
    let mut world = world();
    after_first_slot(&mut world);
    let before = world.writes;
    // As a CustomResourceDefinition of an earlier release leaves it.
    world.schedule.status.as_mut().unwrap().needed_since.clear();
    world.run();
    assert_eq!(world.writes, before);
    assert_eq!(overdue(&world), None);
}
