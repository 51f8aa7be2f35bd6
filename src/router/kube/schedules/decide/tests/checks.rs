//! The check of restores, beside what a schedule does.

use serde_json::json;

use super::super::super::check::{Found, State};
use super::super::show::{RESTORE_CHECKED, SCHEDULING};
use super::world::{World, at, condition, message};

fn state() -> State {
    State {
        names_schedule: true,
        is_suspended: false,
        is_running: false,
        created: at("2026-11-01T00:00:00Z"),
        scheduled: Some(at("2026-11-21T03:30:00Z")),
        succeeded: Some(at("2026-11-21T03:34:00Z")),
    }
}

fn checked() -> World {
    let spec =
        json!({"claims": ["a"], "class": "c", "every": "1h", "check": {"cronJob": "nightly"}});
    let mut world = World::new(spec);
    world.check = Some(Found::Present(state()));
    world
}

#[test]
fn the_last_check_of_a_restore_is_a_condition() {
    let mut world = checked();
    world.run();
    assert_eq!(
        condition(&world.status(), RESTORE_CHECKED),
        ("True", "Checked")
    );
    // It is written once.
    let writes = world.writes;
    world.run();
    assert_eq!(world.writes, writes);
    world.check = Some(Found::Missing);
    world.run();
    assert_eq!(
        condition(&world.status(), RESTORE_CHECKED),
        ("False", "NoCronJob")
    );
    // A person does not want it any more.
    world.change(&json!({"check": null}));
    world.check = None;
    world.run();
    assert_eq!(condition(&world.status(), RESTORE_CHECKED), ("", ""));
}

#[test]
fn a_check_that_cannot_be_read_or_is_wrong_keeps_no_snapshot_from_being_taken() {
    for wrong in [
        json!({"cronJob": "../x"}),
        json!({"cronJob": "x", "maxAge": "400d"}),
        json!({}),
    ] {
        let mut world = checked();
        world.change(&json!({"check": wrong}));
        world.check = None;
        world.now = at("2026-11-22T01:02:00Z");
        world.run();
        assert_eq!(world.created.len(), 1, "{wrong}");
        let status = world.status();
        assert_eq!(condition(&status, RESTORE_CHECKED), ("False", "Invalid"));
        assert_eq!(condition(&status, SCHEDULING).0, "True");
        assert!(
            message(&status, RESTORE_CHECKED).starts_with("check."),
            "{wrong}"
        );
    }
    let mut world = checked();
    world.check = Some(Found::Unread("forbidden".into()));
    world.now = at("2026-11-22T01:02:00Z");
    world.run();
    assert_eq!(world.created.len(), 1);
    assert_eq!(
        condition(&world.status(), RESTORE_CHECKED),
        ("False", "ReadFailed")
    );
}

#[test]
fn a_suspended_schedule_shows_its_last_check() {
    let mut world = checked();
    world.change(&json!({"suspend": true}));
    world.run();
    assert_eq!(
        condition(&world.status(), RESTORE_CHECKED),
        ("True", "Checked")
    );
}
