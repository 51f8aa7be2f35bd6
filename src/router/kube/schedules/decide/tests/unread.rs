//! What cannot be read.

use serde_json::json;

use super::super::show::unread;
use super::world::{condition, message};
use super::*;

#[test]
fn without_members_and_uses_slots_are_executed_and_nothing_is_deleted() {
    let mut world = of_hours(json!({"last": 1}), &[1, 2, 3]);
    world.is_unreadable = true;
    world.run();
    assert_eq!(world.deleted, Vec::<String>::new());
    let status = world.status();
    assert_eq!(condition(&status, RETENTION), ("False", "ReadFailed"));
    assert_eq!(condition(&status, SCHEDULING), ("True", "Scheduled"));
    let why = message(&status, RETENTION);
    assert!(why.contains("claims cannot be listed"), "{why}");
    world.now = at("2026-11-22T04:02:00Z");
    world.run();
    assert_eq!((world.created.len(), world.deleted.len()), (1, 0));
    // A suspended one only lists what it would delete.
    world.schedule.spec.suspend = true;
    world.run();
    world.schedule.spec.suspend = false;
    world.is_unreadable = false;
    world.run();
    assert_eq!(world.deleted.len(), 2);
    assert_eq!(condition(&world.status(), RETENTION), ("True", "Kept"));
}

#[test]
fn a_failed_pass_is_shown_and_forgets_nothing() {
    let mut world = of_hours(json!({"last": 3}), &[1, 2]);
    world.run();
    let before = world.status();
    let now = world.now + SignedDuration::from_mins(1);
    world.schedule.metadata.generation = Some(2);
    let failed = unread(&world.schedule, now, "cannot list: forbidden").status;
    assert_eq!(condition(&failed, SCHEDULING), ("False", "ReadFailed"));
    assert_eq!(message(&failed, SCHEDULING), "cannot list: forbidden");
    let types = failed.conditions.iter().map(|one| one.type_.as_str());
    assert_eq!(types.collect::<Vec<_>>(), [SCHEDULING, CUT, RETENTION]);
    assert_eq!(
        failed.conditions[0].observed_generation,
        Some(1),
        "the new spec was not considered"
    );
    assert_eq!(failed.conditions[1..], before.conditions[1..]);
    assert_eq!(
        (&failed.last_slot, &failed.level),
        (&before.last_slot, &before.level)
    );
    // The same again is nothing to write.
    world.schedule.status = Some(failed.clone());
    let again = unread(
        &world.schedule,
        now + SignedDuration::from_mins(1),
        "cannot list: forbidden",
    );
    assert!(again.status.is_shown_by(&failed));
    // A suspended schedule does nothing, so nothing of it fails.
    world.schedule.spec.suspend = true;
    world.schedule.status = Some(before.clone());
    assert!(
        unread(&world.schedule, now, "x")
            .status
            .is_shown_by(&before)
    );
}
