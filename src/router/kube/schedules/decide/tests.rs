//! What is done about a schedule, from every state in which a router may find it.

mod checks;
mod former;
mod overdue;
mod random;
mod unread;
mod world;

use jiff::SignedDuration;
use serde_json::json;

use super::show::{CUT, RETENTION, SCHEDULING};
use super::*;
use world::{CLAIMS, Crash, World, at, condition};

fn world() -> World {
    World::new(json!({"claims": ["a", "b"], "class": "c", "every": "1h", "keep": {"last": 2}}))
}

/// A world with a good set of claim a for each of these hours of the day.
fn of_hours(keep: serde_json::Value, hours: &[u8]) -> World {
    let mut world = World::new(json!({"claims": ["a"], "class": "c", "every": "1h", "keep": keep}));
    for hour in hours {
        world.add_good("a", &format!("2026-11-22T{hour:02}:00:00Z"));
    }
    let last = hours.last().unwrap();
    world.now = at(&format!("2026-11-22T{last:02}:10:00Z"));
    world.schedule.status = Some(ScheduleStatus {
        last_slot: Some(Time(at(&format!("2026-11-22T{last:02}:00:00Z")))),
        ..ScheduleStatus::default()
    });
    world
}

#[test]
fn a_new_schedule_waits_for_its_first_slot() {
    let mut world = world();
    world.run();
    assert_eq!(world.created, Vec::<String>::new());
    let status = world.status();
    assert_eq!(status.next_slot.as_deref(), Some("2026-11-22T01:00:00Z"));
    assert_eq!(condition(&status, CUT), ("Unknown", "NoneYet"));
    assert_eq!(condition(&status, SCHEDULING), ("True", "Scheduled"));
    // It is due within a minute after the slot.
    world.now = at("2026-11-22T01:00:00Z") + jitter(world.uid());
    world.run();
    assert_eq!(
        world.created,
        ["pg-20261122-0100-0a1b2-a", "pg-20261122-0100-0a1b2-b"]
    );
    assert_eq!(condition(&world.status(), CUT).0, "Unknown");
    world.finish(Some(Level::Filesystem));
    world.run();
    let status = world.status();
    assert_eq!(condition(&status, CUT), ("True", "Ready"));
    assert_eq!(status.level.as_deref(), Some("filesystem"));
    assert_eq!(status.last_cut_slot, Some(Time(at("2026-11-22T01:00:00Z"))));
    assert_eq!(status.next_slot.as_deref(), Some("2026-11-22T02:00:00Z"));
    assert_eq!(status.overdue_since, None);
    let before = world.writes;
    world.run();
    assert_eq!(
        world.writes, before,
        "nothing is written while nothing changes"
    );
}

#[test]
fn a_slot_is_not_due_before_its_jitter() {
    let mut world = world();
    let jitter = jitter(world.uid());
    assert!(
        jitter > SignedDuration::ZERO,
        "choose another UID for this test"
    );
    world.now = at("2026-11-22T01:00:00Z") + jitter - SignedDuration::from_secs(1);
    world.run();
    assert_eq!(world.created, Vec::<String>::new());
}

#[test]
fn missed_slots_are_executed_once() {
    let mut world = world();
    world.now = at("2026-11-22T05:30:00Z");
    world.run();
    world.run();
    assert_eq!(
        world.created,
        ["pg-20261122-0500-0a1b2-a", "pg-20261122-0500-0a1b2-b"]
    );
    assert_eq!(world.status().missed, 0);
}

#[test]
fn a_slot_is_skipped_after_its_deadline() {
    let mut world = world();
    world.schedule.spec.starting_deadline = Some("10m".into());
    world.now = at("2026-11-22T05:30:00Z");
    world.run();
    let status = world.status();
    assert_eq!((world.created.len(), status.missed), (0, 1));
    assert_eq!(condition(&status, CUT), ("False", "Missed"));
    assert_eq!(status.overdue_since, Some(Time(at("2026-11-22T01:00:00Z"))));
    world.run();
    assert_eq!(world.status().missed, 1, "it is counted once");
    assert_eq!(world.skipped(), ["05:00"], "of the others nothing is known");
    world.now = at("2026-11-22T06:02:00Z");
    world.run();
    assert_eq!(world.created.len(), CLAIMS.len());
}

#[test]
fn slots_that_passed_while_no_router_executed_them_are_listed() {
    let mut world = world();
    world.run();
    world.now = at("2026-11-22T04:02:00Z");
    world.run();
    assert_eq!(world.created.len(), CLAIMS.len());
    assert_eq!(world.skipped(), ["01:00", "02:00", "03:00"]);
    assert_eq!(world.status().missed, 0, "they had no deadline");
    // A person has changed the times in the meantime, so it is not known which slots there were.
    world.schedule.spec.every = Some("30m".into());
    world.schedule.metadata.generation = Some(2);
    world.now = at("2026-11-22T06:02:00Z");
    world.run();
    assert_eq!(world.skipped(), ["01:00", "02:00", "03:00"]);
    world.now = at("2026-11-22T07:02:00Z");
    world.run();
    assert_eq!(world.skipped(), ["01:00", "02:00", "03:00", "06:30"]);
    // Nothing is skipped while it is suspended.
    world.schedule.spec.suspend = true;
    world.schedule.metadata.generation = Some(3);
    world.run();
    world.now = at("2026-11-22T09:02:00Z");
    world.run();
    world.schedule.spec.suspend = false;
    world.schedule.metadata.generation = Some(4);
    world.now = at("2026-11-22T09:32:00Z");
    world.run();
    assert_eq!(world.skipped().len(), 4);
    // The newest ones are kept.
    world.now = at("2026-11-24T09:32:00Z");
    world.run();
    let skipped = world.skipped();
    assert_eq!((skipped.len(), &*skipped[0]), (20, "23:30"));
    assert_eq!(skipped[19], "09:00");
}

#[test]
fn slots_pass_while_a_schedule_is_suspended() {
    let mut world = world();
    world.schedule.spec.suspend = true;
    world.now = at("2026-11-22T05:30:00Z");
    world.run();
    let status = world.status();
    assert_eq!(condition(&status, SCHEDULING), ("False", "Suspended"));
    assert_eq!(status.overdue_since, None);
    world.schedule.spec.suspend = false;
    world.run();
    assert_eq!(world.created, Vec::<String>::new(), "they were not missed");
    world.now = at("2026-11-22T06:02:00Z");
    world.run();
    assert_eq!(world.created.len(), CLAIMS.len());
}

#[test]
fn a_crash_at_any_point_of_a_slot_changes_nothing() {
    for crash in [
        Crash::Before,
        Crash::Within,
        Crash::BeforeStatus,
        Crash::Never,
    ] {
        let mut world = world();
        world.now = at("2026-11-22T01:02:00Z");
        world.pass(crash);
        world.run();
        let expected = ["pg-20261122-0100-0a1b2-a", "pg-20261122-0100-0a1b2-b"];
        assert_eq!(world.created, expected, "{crash:?}");
        // A set that a person deletes is not created again.
        world.objects.clear();
        world.run();
        assert_eq!(world.created, expected, "{crash:?}");
    }
}

#[test]
fn what_cannot_be_scheduled_is_refused_with_its_reason() {
    type Change = fn(&mut World);
    let all: [(Change, &str); 6] = [
        (|world| world.class = None, "NoClass"),
        (|world| world.class_mut().is_ours = false, "OtherDriver"),
        (|world| world.class_mut().deletes = false, "ClassRetains"),
        (
            |world| world.class_mut().level = Err("wrong".into()),
            "InvalidClass",
        ),
        (
            |world| world.schedule.spec.cron = Some("x".into()),
            "Invalid",
        ),
        (
            |world| {
                world.schedule.spec = serde_json::from_value(json!({
                    "selector": {"matchLabels": {"app": "pg"}}, "class": "c", "every": "1h",
                }))
                .unwrap();
            },
            "NoGroups",
        ),
    ];
    for (change, reason) in all {
        let mut world = of_hours(json!({"last": 1}), &[1, 2, 3]);
        world.now = at("2026-11-22T09:00:00Z");
        change(&mut world);
        world.run();
        let status = world.status();
        assert_eq!(condition(&status, SCHEDULING), ("False", reason));
        assert_eq!(
            (world.created.len(), world.deleted.len()),
            (0, 0),
            "{reason}"
        );
        assert_eq!(status.next_slot, None);
    }
}

#[test]
fn a_set_that_fails_is_reported() {
    let mut world = world();
    world.now = at("2026-11-22T01:02:00Z");
    world.run();
    world.fail("pg-20261122-0100-0a1b2-b", "no space");
    world.run();
    let status = world.status();
    assert_eq!(condition(&status, CUT), ("False", "NotReady"));
    let message = status
        .conditions
        .iter()
        .find(|one| one.type_ == CUT)
        .map(|one| one.message.clone());
    assert_eq!(
        message.as_deref(),
        Some("pg-20261122-0100-0a1b2-b: no space")
    );
    // Without a report of an error, after five minutes.
    let mut world = self::world();
    world.now = at("2026-11-22T01:02:00Z");
    world.run();
    world.now = at("2026-11-22T01:06:00Z");
    world.run();
    assert_eq!(condition(&world.status(), CUT), ("Unknown", "InProgress"));
    world.now = at("2026-11-22T01:08:00Z");
    world.run();
    assert_eq!(condition(&world.status(), CUT), ("False", "NotReady"));
}

#[test]
fn sets_are_deleted_one_at_a_time_after_a_newer_good_one() {
    let mut world = of_hours(json!({"last": 2}), &[1, 2, 3, 4]);
    world.pass(Crash::Never);
    assert_eq!(world.deleted, ["pg-20261122-0100-0a1b2-a"]);
    world.run();
    assert_eq!(
        world.deleted,
        ["pg-20261122-0100-0a1b2-a", "pg-20261122-0200-0a1b2-a"]
    );
    assert_eq!(condition(&world.status(), RETENTION), ("True", "Kept"));
    // A new set displaces the oldest one only when it is ready.
    world.now = at("2026-11-22T05:02:00Z");
    world.run();
    assert_eq!((world.created.len(), world.deleted.len()), (1, 2));
    world.finish(Some(Level::Filesystem));
    world.run();
    assert_eq!(world.deleted.len(), 3);
}

#[test]
fn while_a_set_is_being_deleted_no_other_one_is() {
    let mut world = of_hours(json!({"last": 1}), &[1, 2, 3]);
    world.leave("pg-20261122-0100-0a1b2-a");
    world.run();
    assert_eq!(world.deleted, Vec::<String>::new());
    assert_eq!(condition(&world.status(), RETENTION), ("False", "Deleting"));
}

#[test]
fn nothing_is_deleted_while_the_clocks_differ() {
    let mut world = of_hours(json!({"last": 1}), &[1, 2, 3]);
    world.skew = true;
    world.run();
    assert_eq!(world.deleted, Vec::<String>::new());
    assert_eq!(
        condition(&world.status(), RETENTION),
        ("False", "ClocksDiffer")
    );
    world.skew = false;
    world.run();
    assert_eq!(world.deleted.len(), 2);
}

#[test]
fn a_set_in_use_stays_and_the_others_go() {
    let mut world = of_hours(json!({"last": 1}), &[1, 2, 3]);
    world.used.insert("pg-20261122-0100-0a1b2-a".into());
    world.run();
    assert_eq!(world.deleted, ["pg-20261122-0200-0a1b2-a"]);
    assert_eq!(condition(&world.status(), RETENTION), ("False", "InUse"));
    world.used.clear();
    world.run();
    assert_eq!(world.deleted.len(), 2);
}

/// The sets that the status lists, each with why it waits.
fn listed(world: &World) -> Vec<(String, String)> {
    let all = world.status().deletions.unwrap();
    all.into_iter().map(|one| (one.name, one.waits)).collect()
}

#[test]
fn what_is_not_to_be_kept_is_listed_in_its_order() {
    let mut world = of_hours(json!({"last": 1}), &[1, 2, 3]);
    let [first, second] = ["pg-20261122-0100-0a1b2-a", "pg-20261122-0200-0a1b2-a"];
    world.used.insert(first.into());
    world.pass(Crash::Never);
    let waits = |name: &str, why: &str| (name.to_string(), why.to_string());
    assert_eq!(
        listed(&world),
        [waits(first, "it is used"), waits(second, "")]
    );
    world.run();
    assert_eq!(listed(&world), [waits(first, "it is used")]);
    world.used.clear();
    world.run();
    assert_eq!(listed(&world), []);
}

#[test]
fn a_suspended_schedule_lists_what_it_would_delete_and_deletes_nothing() {
    let mut world = of_hours(json!({"last": 1}), &[1, 2, 3]);
    world.schedule.spec.suspend = true;
    world.run();
    assert_eq!((world.deleted.len(), listed(&world).len()), (0, 2));
    world.schedule.spec.keep = serde_json::from_value(json!({"maxAge": "30m"})).unwrap();
    world.run();
    let waits: Vec<_> = listed(&world).into_iter().map(|(_, waits)| waits).collect();
    assert_eq!(
        waits,
        ["", "after each new set, one is deleted for its age"]
    );
    assert_eq!(world.status().expired, Vec::new());
    world.schedule.spec.keep = None;
    world.run();
    assert_eq!((world.deleted.len(), listed(&world).len()), (0, 0));
    let status = world.status();
    assert_eq!(condition(&status, SCHEDULING), ("False", "Suspended"));
}

#[test]
fn a_set_below_the_level_displaces_none() {
    let mut world = of_hours(json!({"last": 1}), &[1, 2, 3]);
    world
        .levels
        .insert("pg-20261122-0300-0a1b2-a".into(), Some(Level::Crash));
    // A level that is not known counts as lower.
    world.levels.insert("pg-20261122-0200-0a1b2-a".into(), None);
    world.run();
    assert_eq!(world.deleted, ["pg-20261122-0200-0a1b2-a"]);
    assert_eq!(world.status().level.as_deref(), Some("crash"));
}

#[test]
fn without_keep_all_are_kept() {
    let mut world = of_hours(json!({}), &[1, 2, 3]);
    world.run();
    assert_eq!(world.deleted, Vec::<String>::new());
    assert_eq!(condition(&world.status(), RETENTION), ("True", "AllKept"));
}

#[test]
fn one_set_is_removed_for_its_age_after_each_new_one() {
    for crash in [
        Crash::Before,
        Crash::Within,
        Crash::BeforeStatus,
        Crash::Never,
    ] {
        let mut world = of_hours(json!({"maxAge": "30m"}), &[1, 2, 3, 4]);
        world.pass(crash);
        world.run();
        world.pass(crash);
        world.run();
        assert_eq!(world.deleted, ["pg-20261122-0100-0a1b2-a"], "{crash:?}");
        // A clock that jumps ahead removes no more.
        world.schedule.spec.every = Some("365d".into());
        world.now += SignedDuration::from_hours(24 * 300);
        world.run();
        assert_eq!(world.deleted.len(), 1, "{crash:?}");
        world.add_good("a", "2026-11-22T05:00:00Z");
        world.run();
        assert_eq!(world.deleted.len(), 2, "{crash:?}");
    }
}

#[test]
fn a_schedule_is_run_once_when_a_person_requests_it() {
    for crash in [
        Crash::Before,
        Crash::Within,
        Crash::BeforeStatus,
        Crash::Never,
    ] {
        let mut world = world();
        world.now = at("2026-11-22T01:07:30Z");
        world.run();
        world.finish(Some(Level::Filesystem));
        world.run();
        let regular = world.created.clone();
        // Without a wait for the jitter of its regular slots.
        world.schedule.spec.run_at = Some("2026-11-22T01:07:00Z".into());
        world.pass(crash);
        world.run();
        let run = ["pg-20261122-0107-0a1b2-a", "pg-20261122-0107-0a1b2-b"];
        assert_eq!(world.created[regular.len()..], run, "{crash:?}");
        let status = world.status();
        assert_eq!(status.next_slot.as_deref(), Some("2026-11-22T02:00:00Z"));
        // Neither after they were deleted, nor after the schedule was suspended.
        world.objects.clear();
        world.schedule.spec.suspend = true;
        world.run();
        world.schedule.spec.suspend = false;
        world.run();
        assert_eq!(world.created.len(), 4, "{crash:?}");
        world.now = at("2026-11-22T02:02:00Z");
        world.run();
        assert_eq!(
            world.created[4..],
            ["pg-20261122-0200-0a1b2-a", "pg-20261122-0200-0a1b2-b"]
        );
    }
}

#[test]
fn a_run_in_the_minute_of_a_slot_is_the_slot() {
    let mut world = world();
    world.now = at("2026-11-22T01:00:01Z");
    assert!(jitter(world.uid()) > SignedDuration::from_secs(1));
    world.schedule.spec.run_at = Some("2026-11-22T01:00:00Z".into());
    world.run();
    world.now = at("2026-11-22T01:10:00Z");
    world.run();
    assert_eq!(world.created.len(), CLAIMS.len());
}

#[test]
fn a_run_of_the_future_waits_and_one_of_the_past_of_a_schedule_is_none() {
    let mut world = world();
    // Before the schedule was created, as in a manifest from another cluster.
    world.schedule.spec.run_at = Some("2026-11-22T00:05:00Z".into());
    world.run();
    assert_eq!(world.created, Vec::<String>::new());
    world.schedule.spec.run_at = Some("2026-11-22T00:30:00Z".into());
    world.run();
    assert_eq!(world.created, Vec::<String>::new());
    let next = world.status().next_slot;
    assert_eq!(next.as_deref(), Some("2026-11-22T00:30:00Z"));
    // While it is suspended, it passes as others do.
    world.now = at("2026-11-22T00:31:00Z");
    world.schedule.spec.suspend = true;
    world.run();
    world.schedule.spec.suspend = false;
    world.run();
    assert_eq!(world.created, Vec::<String>::new());
    world.schedule.spec.run_at = Some("2026-11-22T00:40:30Z".into());
    world.run();
    assert_eq!(condition(&world.status(), SCHEDULING), ("False", "Invalid"));
}

#[test]
fn a_set_of_a_run_counts_in_retention() {
    let mut world = of_hours(json!({"last": 2}), &[1, 2]);
    world.schedule.spec.run_at = Some("2026-11-22T02:10:00Z".into());
    world.run();
    world.finish(Some(Level::Filesystem));
    world.run();
    assert_eq!(world.created, ["pg-20261122-0210-0a1b2-a"]);
    assert_eq!(world.deleted, ["pg-20261122-0100-0a1b2-a"]);
}

#[test]
fn a_run_is_skipped_after_the_deadline_which_begins_with_the_next_minute() {
    for (seconds, created) in [(70, 1), (72, 0)] {
        let mut world = of_hours(json!({"last": 2}), &[1, 2]);
        world.schedule.spec.starting_deadline = Some("10s".into());
        world.schedule.spec.run_at = Some("2026-11-22T02:09:00Z".into());
        world.now = at("2026-11-22T02:09:00Z") + SignedDuration::from_secs(seconds);
        world.run();
        assert_eq!(world.created.len(), created, "{seconds}");
        assert_eq!(world.status().missed, 1 - created as u64);
    }
}

#[test]
fn clocks_that_were_wrong_do_not_stop_a_schedule() {
    let mut world = world();
    world.now = at("2036-01-01T00:10:00Z");
    world.run();
    world.finish(Some(Level::Filesystem));
    world.run();
    assert_eq!(world.created.len(), CLAIMS.len());
    world.now = at("2026-11-22T01:10:00Z");
    world.run();
    assert_eq!(
        world.created.len(),
        CLAIMS.len(),
        "it is not known whether this slot was executed"
    );
    world.now = at("2026-11-22T02:02:00Z");
    world.run();
    assert_eq!(world.created.len(), 2 * CLAIMS.len());
    // The set of the future is not the last cut.
    assert_eq!(world.status().last_cut_slot, None);
    // A clock that is set back by less executes nothing again.
    world.now = at("2026-11-22T01:50:00Z");
    world.run();
    assert_eq!(
        world.status().last_slot,
        Some(Time(at("2026-11-22T02:00:00Z")))
    );
    assert_eq!(world.created.len(), 2 * CLAIMS.len());
}

#[test]
fn objects_that_only_have_the_label_are_left_alone() {
    let mut world = of_hours(json!({"last": 1}), &[1, 2]);
    let good = world.objects["pg-20261122-0100-0a1b2-a"].clone();
    type Change = fn(&mut serde_json::Value);
    let changes: [(&str, Change); 5] = [
        ("other-name", |_| {}),
        ("pg-20261122-0030-0a1b2", |_| {}),
        ("pg-20261122-0020-0a1b2-a", |it| {
            it["metadata"]["labels"] = json!({});
        }),
        ("pg-20261122-0010-0a1b2-a", |it| {
            it["spec"]["source"] = json!({"volumeSnapshotContentName": "x"});
        }),
        ("pg-20261122-2300-0a1b2-a", |_| {}),
    ];
    for (name, change) in changes {
        let mut object = good.clone();
        object["metadata"]["name"] = json!(name);
        change(&mut object);
        world.objects.insert(name.into(), object);
    }
    world.now = at("2026-11-23T05:10:00Z");
    world.schedule.spec.every = Some("365d".into());
    world.run();
    assert_eq!(world.deleted, ["pg-20261122-0100-0a1b2-a"]);
    assert_eq!(
        world.status().last_cut_slot,
        Some(Time(at("2026-11-22T02:00:00Z"))),
        "one that was created long before its slot is none"
    );
}

#[test]
fn sets_of_another_volume_displace_none() {
    // The claim was made again after the second set, with an empty volume.
    let mut world = of_hours(json!({"last": 1}), &[1, 2, 3, 4, 5]);
    for hour in ["01", "02"] {
        let old = format!("pg-20261122-{hour}00-0a1b2-a");
        world.volumes.insert(old, "old".into());
    }
    world.run();
    assert_eq!(
        world.deleted,
        [
            "pg-20261122-0100-0a1b2-a",
            "pg-20261122-0300-0a1b2-a",
            "pg-20261122-0400-0a1b2-a"
        ],
        "the newest set of each volume stays"
    );
}

#[test]
fn a_set_of_one_claim_that_cannot_go_keeps_none_of_another() {
    let mut world = world();
    for hour in 1..=4 {
        for claim in CLAIMS {
            world.add_good(claim, &format!("2026-11-22T{hour:02}:00:00Z"));
        }
    }
    world.leave("pg-20261122-0100-0a1b2-b");
    world.now = at("2026-11-22T04:10:00Z");
    world.schedule.status = Some(ScheduleStatus {
        last_slot: Some(Time(at("2026-11-22T04:00:00Z"))),
        ..ScheduleStatus::default()
    });
    world.run();
    assert_eq!(
        world.deleted,
        ["pg-20261122-0100-0a1b2-a", "pg-20261122-0200-0a1b2-a"]
    );
    assert_eq!(condition(&world.status(), RETENTION), ("False", "Deleting"));
}

#[test]
fn what_is_not_to_be_kept_is_deleted_if_nothing_can_be_created() {
    let mut world = of_hours(json!({"last": 1}), &[1, 2, 3]);
    world.now = at("2026-11-22T04:10:00Z");
    let failed = world::condition_of(SCHEDULING, "False", show::CREATE_FAILED);
    world.schedule.status.as_mut().unwrap().conditions = vec![failed];
    let decision = decide(&world.seen());
    let Some(Step::Delete(deletion)) = &decision.step else {
        panic!("{decision:?}");
    };
    assert_eq!(deletion.set.name, "pg-20261122-0100-0a1b2-a");
    let slot = decision.status.last_slot;
    assert_eq!(slot, Some(Time(at("2026-11-22T03:00:00Z"))), "not settled");
    world.run();
    assert_eq!(world.deleted.len(), 2);
    assert_eq!(world.created, ["pg-20261122-0400-0a1b2-a"]);
}

#[test]
fn the_jitter_does_not_count_as_a_delay() {
    let mut world = world();
    world.schedule.spec.starting_deadline = Some("1s".into());
    world.now = at("2026-11-22T01:00:00Z") + jitter(world.uid());
    world.run();
    assert_eq!(world.created.len(), CLAIMS.len());
}
