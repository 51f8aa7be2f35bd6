//! Which sets are deleted: examples of each rule, and random sets and clocks.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const GOOD: State = State::Good { is_at_level: true };
const BELOW: State = State::Good { is_at_level: false };

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn now() -> Timestamp {
    at("2026-11-22T12:30:00Z")
}

/// A set of this many hours ago.
fn ago(hours: i64) -> Timestamp {
    at("2026-11-22T12:00:00Z") - SignedDuration::from_hours(hours)
}

fn keep(last: usize, hourly: usize, daily: usize, weekly: usize) -> Keep {
    Keep {
        last,
        hourly,
        daily,
        weekly,
        max_age: None,
    }
}

fn of_age(hours: i64) -> Keep {
    Keep {
        max_age: Some(SignedDuration::from_hours(hours)),
        ..Keep::default()
    }
}

/// The hours of the sets that are deleted.
fn deleted(keep: &Keep, sets: &[(i64, State)]) -> Vec<(i64, Reason)> {
    let sets: Vec<_> = sets
        .iter()
        .map(|(hours, state)| (ago(*hours), *state))
        .collect();
    let found = victims(keep, &TimeZone::UTC, now(), &sets);
    let hours = |slot: Timestamp| ago(0).duration_since(slot).as_hours();
    found
        .into_iter()
        .map(|(slot, reason)| (hours(slot), reason))
        .collect()
}

fn surplus(hours: &[i64]) -> Vec<(i64, Reason)> {
    hours.iter().map(|it| (*it, Reason::Surplus)).collect()
}

#[test]
fn the_last_ones_are_kept() {
    let sets = [4, 3, 2, 1, 0].map(|hours| (hours, GOOD));
    assert_eq!(deleted(&keep(2, 0, 0, 0), &sets), surplus(&[4, 3, 2]));
    assert_eq!(deleted(&keep(9, 0, 0, 0), &sets), []);
    assert_eq!(deleted(&keep(2, 0, 0, 0), &[]), []);
}

#[test]
fn one_of_each_period_that_has_one_is_kept() {
    // Midnight is 12 hours ago, and this week began 6 days before it.
    let sets = [180, 60, 40, 30, 14, 13, 2, 1].map(|hours| (hours, GOOD));
    assert_eq!(
        deleted(&keep(0, 0, 2, 0), &sets),
        surplus(&[180, 60, 40, 30, 14, 2])
    );
    assert_eq!(
        deleted(&keep(0, 0, 0, 2), &sets),
        surplus(&[60, 40, 30, 14, 13, 2])
    );
    assert_eq!(
        deleted(&keep(0, 3, 0, 0), &sets),
        surplus(&[180, 60, 40, 30, 14])
    );
    // Rules add up.
    assert_eq!(
        deleted(&keep(1, 2, 2, 2), &sets),
        surplus(&[60, 40, 30, 14])
    );
}

#[test]
fn days_and_hours_are_those_of_the_zone() {
    let berlin = super::super::slots::zone(Some("Europe/Berlin")).unwrap();
    // The hour from 02:00 to 03:00 comes twice.
    let slots = [
        "2026-10-25T00:10:00Z",
        "2026-10-25T00:40:00Z",
        "2026-10-25T01:10:00Z",
        "2026-10-25T01:40:00Z",
    ];
    let sets = slots.map(|slot| (at(slot), GOOD));
    let found = victims(&keep(0, 2, 0, 0), &berlin, now(), &sets);
    let slots: Vec<_> = found.iter().map(|(slot, _)| slot.to_string()).collect();
    assert_eq!(slots, ["2026-10-25T00:10:00Z", "2026-10-25T01:10:00Z"]);
    // 23:30 in UTC is the next day there.
    let sets = ["2026-11-20T22:30:00Z", "2026-11-20T23:30:00Z"].map(|slot| (at(slot), GOOD));
    assert_eq!(victims(&keep(0, 0, 2, 0), &berlin, now(), &sets), []);
    assert_eq!(
        victims(&keep(0, 0, 2, 0), &TimeZone::UTC, now(), &sets).len(),
        1
    );
}

#[test]
fn only_good_sets_count() {
    let sets = [
        (3, GOOD),
        (2, GOOD),
        (1, State::Unready),
        (0, State::Partial),
    ];
    assert_eq!(deleted(&keep(2, 0, 0, 0), &sets), []);
    assert_eq!(deleted(&keep(1, 0, 0, 0), &sets), surplus(&[3]));
    let sets = [
        (3, State::Leaving),
        (2, GOOD),
        (1, State::Leaving),
        (0, GOOD),
    ];
    assert_eq!(deleted(&keep(1, 0, 0, 0), &sets), surplus(&[2]));
}

#[test]
fn a_set_below_the_level_displaces_none_at_it() {
    let sets = [(5, GOOD), (4, GOOD), (3, BELOW), (2, BELOW), (1, BELOW)];
    assert_eq!(deleted(&keep(1, 0, 0, 0), &sets), surplus(&[5, 3, 2]));
    assert_eq!(deleted(&keep(2, 0, 0, 0), &sets), surplus(&[3]));
    // Of a day, the newest one at the level is kept, and the newest one at all.
    assert_eq!(deleted(&keep(0, 0, 1, 0), &sets), surplus(&[5, 3, 2]));
    // Below the level, they are kept in the same way.
    let sets = [(3, BELOW), (2, BELOW), (1, BELOW)];
    assert_eq!(deleted(&keep(1, 0, 0, 0), &sets), surplus(&[3, 2]));
}

#[test]
fn what_did_not_become_ready_is_deleted_a_day_later() {
    let sets = [(30, State::Unready), (23, State::Unready), (1, GOOD)];
    assert_eq!(
        deleted(&keep(9, 0, 0, 0), &sets),
        [(30, Reason::NeverReady)]
    );
    let sets = [(30, State::Unready), (23, State::Unready)];
    assert_eq!(
        deleted(&keep(1, 0, 0, 0), &sets),
        [],
        "there is no newer good set"
    );
    let sets = [(40, GOOD), (30, State::Unready)];
    assert_eq!(deleted(&keep(1, 0, 0, 0), &sets), []);
}

#[test]
fn an_incomplete_set_stays_as_long_as_an_older_one_is_kept() {
    let sets = [
        (5, State::Partial),
        (4, GOOD),
        (3, State::Partial),
        (2, GOOD),
        (0, GOOD),
    ];
    assert_eq!(deleted(&keep(9, 0, 0, 0), &sets), [(5, Reason::Incomplete)]);
    assert_eq!(
        deleted(&keep(1, 0, 0, 0), &sets),
        [
            (5, Reason::Incomplete),
            (4, Reason::Surplus),
            (3, Reason::Incomplete),
            (2, Reason::Surplus)
        ]
    );
}

#[test]
fn the_newest_ones_are_never_too_old() {
    let sets = [(50, GOOD), (40, GOOD), (30, BELOW)];
    assert_eq!(deleted(&of_age(24), &sets), [(50, Reason::Expired)]);
    let sets = [(50, GOOD), (40, BELOW), (30, BELOW)];
    assert_eq!(deleted(&of_age(24), &sets), [(40, Reason::Expired)]);
    assert_eq!(deleted(&of_age(24), &[(1000, GOOD)]), []);
}

#[test]
fn sets_of_the_future_neither_count_nor_are_deleted() {
    let sets = [
        (2, GOOD),
        (1, GOOD),
        (-1, GOOD),
        (-200, GOOD),
        (-300, State::Unready),
    ];
    assert_eq!(deleted(&keep(1, 0, 0, 0), &sets), surplus(&[2]));
}

fn states() -> impl Strategy<Value = State> {
    prop_oneof![
        4 => Just(GOOD),
        2 => Just(BELOW),
        1 => Just(State::Partial),
        1 => Just(State::Unready),
        1 => Just(State::Leaving),
    ]
}

fn keeps() -> impl Strategy<Value = Keep> {
    let number = || 0_usize..4;
    let age = proptest::option::of(1_i64..600);
    (number(), number(), number(), number(), age).prop_map(|(last, hourly, daily, weekly, age)| {
        Keep {
            max_age: age.map(SignedDuration::from_hours),
            ..keep(last, hourly, daily, weekly)
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    /// The rules that hold whatever the clock says.
    #[test]
    fn nothing_is_lost(
        keep in keeps(),
        sets in proptest::collection::btree_map(-10_i64..900, states(), 0..30),
        jump in -2000_i64..20_000,
    ) {
        let sets: BTreeMap<Timestamp, State> = sets
            .into_iter()
            .map(|(quarters, state)| (now() - SignedDuration::from_mins(15 * quarters), state))
            .collect();
        let all: Vec<_> = sets.iter().map(|(slot, state)| (*slot, *state)).collect();
        let then = now() + SignedDuration::from_mins(15 * jump);
        let found = victims(&keep, &TimeZone::UTC, then, &all);
        let is_good = |state: &State| matches!(state, State::Good { .. });
        let at_or_before = |slot: &Timestamp| *slot <= then;
        let newest = |is_meant: &dyn Fn(&State) -> bool| {
            let mut meant = sets.iter().filter(|(slot, state)| at_or_before(slot) && is_meant(state));
            meant.next_back().map(|(slot, _)| *slot)
        };
        let (good, at_level) = (newest(&is_good), newest(&|state| *state == GOOD));
        for (slot, _) in &found {
            prop_assert!(Some(*slot) != good && Some(*slot) != at_level);
            prop_assert!(good.is_some_and(|newest| *slot < newest));
            prop_assert!(sets[slot] != GOOD || at_level.is_some_and(|newest| *slot < newest));
            prop_assert!(sets[slot] != State::Leaving && at_or_before(slot));
        }
        // What a number includes of the sets at the level, it includes also with others among them.
        let only: Vec<_> = all.iter().copied().filter(|(_, state)| *state == GOOD).collect();
        let without: BTreeSet<_> = victims(&keep, &TimeZone::UTC, then, &only).into_iter().collect::<BTreeMap<_, _>>().into_keys().collect();
        for (slot, reason) in &found {
            prop_assert!(sets[slot] != GOOD || without.contains(slot), "{slot} {reason:?}");
        }
        // The numbers do not depend on the clock.
        if keep.max_age.is_none() && then >= now() + SignedDuration::from_hours(3) {
            let later = victims(&keep, &TimeZone::UTC, then + SignedDuration::from_hours(10_000), &all);
            let of = |found: &[(Timestamp, Reason)]| -> Vec<_> {
                found.iter().filter(|(_, reason)| *reason == Reason::Surplus).copied().collect()
            };
            prop_assert_eq!(of(&later), of(&found));
        }
    }
}
