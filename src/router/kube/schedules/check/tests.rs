//! What the results of a CronJob say about a schedule.

use serde_json::{Value, json};

use super::*;

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

/// A CronJob that was created on the first of the month, and is read on the third at noon.
fn reason(spec: &Value, status: &Value) -> (&'static str, &'static str, String) {
    let mut cron_job = json!({
        "metadata": {"creationTimestamp": "2026-11-01T00:00:00Z"},
        "spec": {"schedule": "30 3 * * *", "jobTemplate": {"spec": {"template": {"spec": {"containers": [
            {"name": "check", "command": ["kubectl-slackwater", "restore", "snapshotschedule/pg"]}]}}}}},
        "status": status,
    });
    let fields = spec.as_object().unwrap().clone();
    cron_job["spec"].as_object_mut().unwrap().extend(fields);
    let cron_job: CronJob = serde_json::from_value(cron_job).unwrap();
    let now = at("2026-11-03T12:00:00Z");
    let found = Found::Present(State::of(&cron_job, "pg", now));
    verdict(&check(), &found, now)
}

fn check() -> Check {
    Check {
        cron_job: "nightly".into(),
        max_age: SignedDuration::from_hours(24),
    }
}

#[test]
fn only_the_last_check_counts_and_only_for_its_time() {
    let (first, second, third) = (
        "2026-11-01T03:30:00Z",
        "2026-11-02T03:30:00Z",
        "2026-11-03T03:30:00Z",
    );
    let running = json!([{"name": "nightly-1"}]);
    let ended = "2026-11-03T03:34:00Z";
    let cases = [
        (json!({}), ("False", "NeverChecked")),
        (
            json!({"lastScheduleTime": third, "active": running}),
            ("False", "NeverChecked"),
        ),
        (json!({"lastScheduleTime": third}), ("False", "CheckFailed")),
        (
            json!({"lastScheduleTime": third, "lastSuccessfulTime": ended}),
            ("True", "Checked"),
        ),
        // The next one has failed, runs, or did not start.
        (
            json!({"lastScheduleTime": third, "lastSuccessfulTime": second}),
            ("False", "CheckFailed"),
        ),
        (
            json!({"lastScheduleTime": "2026-11-03T11:59:00Z", "lastSuccessfulTime": ended, "active": running}),
            ("True", "Checked"),
        ),
        (
            json!({"lastScheduleTime": third, "lastSuccessfulTime": second, "active": running}),
            ("False", "CheckTooOld"),
        ),
        (
            json!({"lastScheduleTime": first, "lastSuccessfulTime": second}),
            ("False", "CheckTooOld"),
        ),
    ];
    for (status, expected) in cases {
        let (condition, reason, message) = reason(&json!({}), &status);
        assert_eq!((condition, reason), expected, "{status}: {message}");
    }
    assert_eq!(
        reason(
            &json!({}),
            &json!({"lastScheduleTime": third, "lastSuccessfulTime": ended})
        )
        .2,
        "checked at 2026-11-03T03:34:00Z"
    );
}

#[test]
fn a_new_cron_job_is_waited_for() {
    let state = State {
        names_schedule: true,
        is_suspended: false,
        is_running: false,
        created: at("2026-11-03T00:00:00Z"),
        scheduled: None,
        succeeded: None,
    };
    let (status, reason, _) = verdict(&check(), &Found::Present(state), at("2026-11-03T12:00:00Z"));
    assert_eq!((status, reason), ("Unknown", "NotChecked"));
}

#[test]
fn a_cron_job_that_checks_nothing_of_the_schedule_proves_nothing() {
    let good = json!({"lastScheduleTime": "2026-11-03T03:30:00Z", "lastSuccessfulTime": "2026-11-03T03:34:00Z"});
    let of = |containers: Value| json!({"jobTemplate": {"spec": {"template": {"spec": {"containers": containers}}}}});
    let container = |words: &[&str]| json!([{"name": "other"}, {"name": "check", "args": words}]);
    for (words, expected) in [
        (&["restore", "snapshotschedule/pg"][..], "Checked"),
        (
            &["kubectl slackwater restore \"snapshotschedule/pg\" --yes"],
            "Checked",
        ),
        (&["restore", "snapshotschedule/pg-2"], "OtherCronJob"),
        (&["restore", "xsnapshotschedule/pg"], "OtherCronJob"),
        (&["true"], "OtherCronJob"),
        (&[], "OtherCronJob"),
    ] {
        let (_, reason, _) = reason(&of(container(words)), &good);
        assert_eq!(reason, expected, "{words:?}");
    }
    let (status, why, _) = reason(&json!({"suspend": true}), &good);
    assert_eq!((status, why), ("False", "CronJobSuspended"));
    let now = at("2026-11-03T12:00:00Z");
    for (found, expected) in [
        (Found::Missing, "NoCronJob"),
        (Found::Unread("forbidden".into()), "ReadFailed"),
    ] {
        let (status, reason, _) = verdict(&check(), &found, now);
        assert_eq!((status, reason), ("False", expected));
    }
}
