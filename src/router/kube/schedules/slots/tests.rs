//! Slots of intervals and cron expressions, also when clocks are changed.

use super::*;

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn cron(text: &str, name: &str) -> Timetable {
    Timetable::cron(text, zone(Some(name)).unwrap()).unwrap()
}

/// The slots after a time, in UTC.
fn slots(table: &Timetable, after: &str, number: usize) -> Vec<String> {
    let first = table.next(at(after));
    let each = std::iter::successors(first, |slot| table.next(*slot));
    each.take(number).map(|slot| slot.to_string()).collect()
}

#[test]
fn intervals_are_multiples_in_utc() {
    let table = Timetable::every(SignedDuration::from_hours(6), TimeZone::UTC).unwrap();
    assert_eq!(
        slots(&table, "2026-11-22T11:05:00Z", 2),
        ["2026-11-22T12:00:00Z", "2026-11-22T18:00:00Z"]
    );
    let noon = at("2026-11-22T12:00:00Z");
    assert_eq!(table.last(noon), Some(noon), "a slot is due at its time");
    assert_eq!(
        table.last(at("2026-11-22T11:59:59.9Z")),
        Some(at("2026-11-22T06:00:00Z"))
    );
    assert_eq!(table.next(noon), Some(at("2026-11-22T18:00:00Z")));
    // Before 1970, where remainders are negative.
    assert_eq!(
        table.last(at("1969-12-31T23:00:00Z")),
        Some(at("1969-12-31T18:00:00Z"))
    );
}

#[test]
fn slots_are_at_least_five_minutes_apart() {
    let every = |text: &str| {
        let time = crate::router::kube::custom_resource::duration::duration(text).unwrap();
        Timetable::every(SignedDuration::try_from(time).unwrap(), TimeZone::UTC)
    };
    assert!(every("5m").is_ok() && every("2d").is_ok());
    for wrong in ["4m", "299s", "301s"] {
        assert!(every(wrong).is_err(), "{wrong}");
    }
    let of = |text: &str| Timetable::cron(text, TimeZone::UTC);
    for right in [
        "*/5 * * * *",
        "0,55 3 * * *",
        "5 0,23 * * 1",
        "@daily",
        "30 2 L * *",
    ] {
        assert!(of(right).is_ok(), "{right}: {:?}", of(right).err());
    }
    for wrong in [
        "* * * * *",
        "0,4 3 1 1 *",
        "0,58 * * * *",
        "*/7 * * * *",
        "1,59 22,23 * * 3",
    ] {
        let error = of(wrong).err().unwrap_or_default();
        assert!(
            error.contains("more often than every 5 minutes"),
            "{wrong}: {error}"
        );
    }
}

#[test]
fn what_is_no_cron_expression_is_refused() {
    for wrong in [
        "",
        "x",
        "60 * * * *",
        "0 0 * *",
        "0 0 0 * * *",
        "0 0 1 1 * 2030",
    ] {
        let error = Timetable::cron(wrong, TimeZone::UTC).err();
        assert!(
            error.is_some_and(|it| it.contains("is not valid")),
            "{wrong:?}"
        );
    }
    let never = Timetable::cron("0 0 31 2 *", TimeZone::UTC).err();
    assert!(never.is_some_and(|it| it.contains("never due")));
}

#[test]
fn zones_are_known_without_zoneinfo_of_the_image() {
    // The image has no zoneinfo; this machine has, so the database of the program is asked itself.
    assert!(TimeZoneDatabase::bundled().get("Asia/Kolkata").is_ok());
    assert_eq!(
        slots(
            &cron("0 3 * * *", "Asia/Kolkata"),
            "2026-11-22T00:00:00Z",
            1
        ),
        ["2026-11-22T21:30:00Z"]
    );
    assert_eq!(zone(None), Ok(TimeZone::UTC));
    for wrong in ["Europe/Bonn", "", "../../etc/passwd", "GMT+25"] {
        assert!(zone(Some(wrong)).is_err(), "{wrong}");
    }
}

#[test]
fn a_day_that_is_changed_has_its_slot_once() {
    // Clocks go from 02:00 to 03:00 on 2026-03-29, and from 03:00 to 02:00 on 2026-10-25.
    let table = cron("30 2 * * *", "Europe/Berlin");
    assert_eq!(
        slots(&table, "2026-03-27T12:00:00Z", 3),
        [
            "2026-03-28T01:30:00Z",
            "2026-03-29T01:00:00Z",
            "2026-03-30T00:30:00Z"
        ],
        "02:30 does not exist, so it is executed at 03:00"
    );
    assert_eq!(
        slots(&table, "2026-10-24T12:00:00Z", 2),
        ["2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"],
        "02:30 comes twice"
    );
    // Each hour is a slot, also the one that comes twice.
    let table = cron("0 * * * *", "Europe/Berlin");
    assert_eq!(
        slots(&table, "2026-10-24T23:30:00Z", 3),
        [
            "2026-10-25T00:00:00Z",
            "2026-10-25T01:00:00Z",
            "2026-10-25T02:00:00Z"
        ]
    );
}

#[test]
fn schedules_are_spread_over_a_minute() {
    let seconds = |n: u32| jitter(&format!("{n:08x}-1111-4222-8333-444444444444")).as_secs();
    let all: std::collections::BTreeSet<i64> = (0..1000).map(seconds).collect();
    assert!(all.iter().all(|second| (0..60).contains(second)));
    assert!(all.len() > 30, "{all:?}");
    assert_eq!(seconds(7), seconds(7));
}

proptest::proptest! {
    /// The two searches agree: between a slot and the next one there is none.
    #[test]
    fn the_last_slot_and_the_next_one_are_neighbours(
        second in 1_600_000_000_i64..1_900_000_000,
        which in 0_usize..6,
        name in proptest::sample::select(vec!["UTC", "Europe/Berlin", "Australia/Lord_Howe", "America/St_Johns"]),
    ) {
        let rules = ["*/5 * * * *", "30 2 * * *", "0 0 * * 0", "15 1,2,3 * * *", "0 12 1 * *", "5 * * * *"];
        let table = cron(rules[which], name);
        let now = Timestamp::from_second(second).unwrap();
        let (last, next) = (table.last(now).unwrap(), table.next(now).unwrap());
        proptest::prop_assert!(last <= now && now < next);
        proptest::prop_assert_eq!(table.next(last), Some(next), "{} {}", last, next);
        proptest::prop_assert_eq!(table.last(next), Some(next));
        let before = next.checked_sub(SignedDuration::from_secs(1)).unwrap();
        proptest::prop_assert_eq!(table.last(before), Some(last));
    }
}
