//! Cron expressions that are allowed, how near their slots are, and which days they have.

use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;

use super::*;
use crate::router::kube::schedules::slots::Timetable;

#[test]
fn what_is_not_documented_is_refused_with_its_field() {
    for (wrong, field, item) in [
        ("0 0 * * +1", "day of the week", "+1"),
        ("0 0 * * 1#2", "day of the week", "1#2"),
        ("0 0 * * 5L", "day of the week", "5L"),
        ("0 0 * * L", "day of the week", "L"),
        ("0 0 15W * *", "day of the month", "15W"),
        ("0 0 LW * *", "day of the month", "LW"),
        ("0 0 ? * 1", "day of the month", "?"),
        ("0 0 L,x * *", "day of the month", "x"),
        ("0 0 0 * *", "day of the month", "0"),
        ("0 SUN * * *", "hour", "SUN"),
        ("+5 0 * * *", "minute", "+5"),
        ("5/15 * * * *", "minute", "5/15"),
        ("*/0 * * * *", "minute", "*/0"),
        ("0 5-1 * * *", "hour", "5-1"),
        ("0 1,,2 * * *", "hour", ""),
        ("0 1,* * * *", "hour", "*"),
        ("0 0 * 13 *", "month", "13"),
        ("0 0 * MAYBE *", "month", "MAYBE"),
        ("0 0 * * FRI-MON", "day of the week", "FRI-MON"),
    ] {
        let error = check(wrong).err().unwrap_or_default();
        let expected = format!("is not valid: the field {field} has {item:?}; allowed are");
        assert!(error.contains(&expected), "{wrong}: {error}");
    }
    for wrong in ["@reboot", "@every 5m", "0 0 * * * *", ""] {
        let error = check(wrong).err().unwrap_or_default();
        assert!(error.contains("is not valid: it has"), "{wrong}: {error}");
    }
}

#[test]
fn what_is_documented_is_allowed() {
    for (right, plain) in [
        ("0 3 * JAN,mar-MAY mon-FRI", "0 3 * JAN,mar-MAY mon-FRI"),
        ("*/30 1-5/2 1,L * 7", "*/30 1-5/2 1,L * 7"),
        ("0 0 29 2 *", "0 0 29 2 *"),
        ("0 0 31 * *", "0 0 31 * *"),
        ("0 0 31 2 1", "0 0 31 2 1"),
        ("@daily", "0 0 * * *"),
    ] {
        assert_eq!(check(right), Ok(plain.to_string()));
        let table = Timetable::cron(right, TimeZone::UTC).unwrap();
        assert!(table.next(Timestamp::UNIX_EPOCH).is_some(), "{right}");
    }
}

#[test]
fn a_date_that_never_comes_is_refused() {
    for never in ["0 0 31 2 *", "0 0 30,31 FEB *", "0 0 31 2,4,6,9,11 *"] {
        let error = check(never).err().unwrap_or_default();
        assert!(
            error.contains("never due: no month of the field month"),
            "{error}"
        );
    }
}

/// Slots that are too near on one day of the year alone, or at a turn of the year alone.
#[test]
fn slots_that_are_near_on_a_single_day_are_refused() {
    for near in [
        "0,58 0,23 31 12 5",
        "0,58 0,23 1,31 1,12 *",
        "0,58 0,23 28,1 2,3 *",
        "0,58 0,23 1,L * *",
        "1 0 29 2 *",
    ] {
        let found = check(near);
        let is_near = near != "1 0 29 2 *";
        let text = found.clone().err().unwrap_or_default();
        assert_eq!(text.contains("more often"), is_near, "{near}: {found:?}");
    }
    // The days never follow each other.
    for right in [
        "0,58 0,23 2,L * *",
        "0,58 0,23 * * 1,3,5",
        "0,58 0,23 1 1,3 *",
    ] {
        assert!(check(right).is_ok(), "{right}: {:?}", check(right));
    }
}

fn item(least: u32, most: u32) -> impl Strategy<Value = String> {
    let value = least..=most;
    let range = (value.clone(), value.clone()).prop_map(|(a, b)| (a.min(b), a.max(b)));
    prop_oneof![
        2 => Just("*".to_string()),
        1 => (1..=most).prop_map(|step| format!("*/{step}")),
        3 => value.prop_map(|value| value.to_string()),
        1 => (range, 1_u32..5).prop_map(|((a, b), step)| format!("{a}-{b}/{step}")),
    ]
}

fn list(least: u32, most: u32) -> impl Strategy<Value = String> {
    let items = proptest::collection::vec(item(least, most), 1..3);
    items.prop_map(|items| match items.iter().any(|item| item == "*") {
        true => "*".into(),
        false => items.join(","),
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// croner has the same days, and the distances of its slots are never less than what was computed.
    #[test]
    fn the_slots_of_croner_are_those_that_were_checked(
        fields in (list(0, 59), list(0, 23), list(1, 31), list(1, 12), list(0, 7)),
        start in 1_000_000_000_i64..1_800_000_000,
    ) {
        let (minute, hour, day, month, weekday) = fields;
        let text = format!("{minute} {hour} {day} {month} {weekday}");
        let read = super::fields(&text).unwrap();
        let Ok(table) = Timetable::cron(&text, TimeZone::UTC) else {
            prop_assert!(!read.is_ever_due() || read.nearest().is_some_and(|near| near < MIN_INTERVAL), "{}", text);
            return Ok(());
        };
        prop_assert!(read.is_ever_due());
        let mut at = Timestamp::from_second(start).unwrap();
        let mut before: Option<Timestamp> = None;
        for _ in 0..20 {
            let Some(next) = table.next(at) else { break };
            let zoned = next.to_zoned(TimeZone::UTC);
            prop_assert!(read.is_due(zoned.date()), "{} {}", text, next);
            if let Some(before) = before {
                prop_assert!(next.duration_since(before) >= SignedDuration::from_mins(5), "{}", text);
                let mut days = before.to_zoned(TimeZone::UTC).date();
                days = days.tomorrow().unwrap();
                while days < zoned.date() {
                    prop_assert!(!read.is_due(days), "{} {}", text, days);
                    days = days.tomorrow().unwrap();
                }
            }
            (before, at) = (Some(next), next);
        }
    }
}
