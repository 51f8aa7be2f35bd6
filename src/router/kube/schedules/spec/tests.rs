//! Specs that are valid and those that are not; names of sets.

use ::kube::ResourceExt;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::*;

fn schedule(spec: Value) -> SnapshotSchedule {
    serde_json::from_value(json!({
        "metadata": {"name": "pg", "namespace": "shop", "uid": "0a1b2c3d-1111-4222-8333-444444444444"},
        "spec": spec,
    }))
    .unwrap()
}

fn plan(spec: Value) -> Result<Plan, String> {
    Plan::of(&schedule(spec))
}

#[test]
fn a_schedule_is_of_a_group_or_of_single_claims() {
    let group = plan(json!({
        "selector": {"matchLabels": {"app": "pg"}}, "class": "c", "every": "1h",
        "keep": {"last": 6, "daily": 7, "maxAge": "90d"}, "startingDeadline": "10m",
    }))
    .unwrap();
    assert_eq!(
        group.what,
        ScheduleTarget::Group([("app".into(), "pg".into())].into())
    );
    assert_eq!(group.what.series(), [String::new()].into());
    let keep = group.keep.unwrap();
    assert_eq!(
        (keep.last, keep.hourly, keep.daily, keep.weekly),
        (6, 0, 7, 0)
    );
    assert_eq!(keep.max_age, Some(SignedDuration::from_hours(90 * 24)));
    assert_eq!(group.deadline, Some(SignedDuration::from_mins(10)));

    let claims = plan(json!({
        "claims": ["b", "a", "b"], "class": "c", "cron": "5 * * * *", "timeZone": "Europe/Berlin", "keep": {},
    }))
    .unwrap();
    assert_eq!(
        claims.what,
        ScheduleTarget::Claims(["a".into(), "b".into()].into())
    );
    assert!(claims.keep.is_none(), "without a number all are kept");
}

#[test]
fn what_is_not_valid_is_refused_with_its_reason() {
    let with = |change: Value| {
        let mut spec = json!({"claims": ["a"], "class": "c", "every": "1h"});
        for (field, value) in change.as_object().unwrap() {
            spec[field] = value.clone();
        }
        plan(spec).err().unwrap_or_default()
    };
    assert_eq!(with(json!({})), "");
    let labels = json!({"matchLabels": {"app": "pg"}});
    for (change, reason) in [
        (json!({"claims": null}), "give a selector or claims"),
        (json!({"claims": []}), "claims is empty"),
        (json!({"claims": ["a", ""]}), "claims is empty"),
        (json!({"selector": labels}), "not both"),
        (json!({"group": true}), "claims make single snapshots"),
        (
            json!({"claims": null, "selector": labels, "group": false}),
            "a selector makes group snapshots",
        ),
        (
            json!({"claims": null, "selector": {}}),
            "matchLabels is empty",
        ),
        (
            json!({"claims": null, "selector": {"matchLabels": {"a": "b"}, "matchExpressions": [{"key": "x", "operator": "Exists"}]}}),
            "matchExpressions is not supported",
        ),
        (json!({"class": ""}), "class is missing"),
        (json!({"every": null}), "give cron or every"),
        (json!({"cron": "0 0 * * *"}), "not both"),
        (json!({"every": "4m"}), "at least 5m"),
        (json!({"every": "soon"}), "every \"soon\" is not a duration"),
        (json!({"every": "366d"}), "at most 365 days"),
        (json!({"timeZone": "Mars"}), "is not a time zone"),
        (json!({"keep": {"last": 0}}), "a number in keep is 0"),
        (json!({"keep": {"maxAge": "0s"}}), "keep.maxAge \"0s\""),
        (json!({"runAt": "soon"}), "runAt \"soon\""),
        (json!({"runAt": "2026-11-22T11:05:30Z"}), "whole minutes"),
        (json!({"startingDeadline": "1w"}), "startingDeadline \"1w\""),
        (json!({"claims": ["x".repeat(240)]}), "are too long"),
    ] {
        let error = with(change.clone());
        assert!(error.contains(reason), "{change}: {error}");
    }
}

#[test]
fn names_have_the_slot_in_utc_and_are_read_back() {
    let names = plan(json!({"claims": ["a"], "class": "c", "every": "1h"}))
        .unwrap()
        .names;
    let slot: Timestamp = "2026-11-22T11:05:00Z".parse().unwrap();
    assert_eq!(names.name(slot, ""), "pg-20261122-1105-0a1b2");
    assert_eq!(names.name(slot, "data"), "pg-20261122-1105-0a1b2-data");
    assert_eq!(names.slot("pg-20261122-1105-0a1b2", ""), Some(slot));
    assert_eq!(
        names.slot("pg-20261122-1105-0a1b2-data", "data"),
        Some(slot)
    );
    for (name, claim) in [
        ("pg-20261122-1105-0a1b2-data", ""),
        ("pg-20261122-1105-0a1b2", "data"),
        ("pg-20261122-1105-0a1b3", ""),
        ("pg-20261122-1165-0a1b2", ""),
        ("pg-20261322-1105-0a1b2", ""),
        ("pg-2026112-21105-0a1b2", ""),
        ("pg2-20261122-1105-0a1b2", ""),
        ("pg-+0261122-1105-0a1b2", ""),
        ("pg-2026112", ""),
        ("pg-20261122-110ä-0a1b2", ""),
        ("", ""),
    ] {
        assert_eq!(names.slot(name, claim), None, "{name} {claim}");
    }
}

#[test]
fn a_name_that_is_too_long_is_refused() {
    let mut long =
        schedule(json!({"selector": {"matchLabels": {"a": "b"}}, "class": "c", "every": "1h"}));
    long.metadata.name = Some("x".repeat(253 - 20));
    assert!(Plan::of(&long).is_ok(), "{}", long.name_any().len());
    long.metadata.name = Some("x".repeat(253 - 19));
    assert!(Plan::of(&long).err().unwrap().contains("too long"));
}
