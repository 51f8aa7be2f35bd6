//! Dates of the API server, clocks, and classes.

use serde_json::json;

use super::*;
use crate::model::Level;

#[test]
fn the_date_of_a_response_is_read() {
    let date = parse_date("Sun, 22 Nov 2026 11:05:09 GMT").unwrap();
    assert_eq!(date.to_string(), "2026-11-22T11:05:09Z");
    for wrong in [
        "",
        "2026-11-22T11:05:09Z",
        "Sun, 22 Nov 2026 11:05:09 CET",
        "Sun, 31 Nov 2026 11:05:09 GMT",
    ] {
        assert_eq!(parse_date(wrong), None, "{wrong}");
    }
}

#[test]
fn the_earlier_clock_counts() {
    let at = |second: i64| Timestamp::from_second(1_800_000_000 + second).unwrap();
    assert_eq!(clocks(at(60), at(0)), (at(0), None));
    assert_eq!(clocks(at(0), at(60)), (at(0), None));
    let (now, skew) = clocks(at(61), at(0));
    assert_eq!(now, at(0));
    assert!(skew.unwrap().contains("differ by 61 s"));
    assert!(clocks(at(0), at(100)).1.is_some());
}

#[test]
fn a_class_says_its_driver_its_policy_and_its_level() {
    let read = |driver: &str, policy: &str, parameters: Value| {
        let object = json!({"metadata": {"name": "c"}, "driver": driver, "deletionPolicy": policy,
            "parameters": parameters});
        class(
            &serde_json::from_value(object).unwrap(),
            "csi.slackwater.dev",
        )
    };
    let expected = |is_ours, deletes, level| Class {
        is_ours,
        deletes,
        level: Ok(level),
    };
    let application = json!({"consistency": "application"});
    assert_eq!(
        read("csi.slackwater.dev", "Delete", application),
        expected(true, true, Level::Application)
    );
    assert_eq!(
        read("other", "Retain", Value::Null),
        expected(false, false, Level::Filesystem)
    );
    assert!(
        read(
            "csi.slackwater.dev",
            "Delete",
            json!({"consistency": "total"})
        )
        .level
        .is_err()
    );
}
