//! Schedules of snapshots.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use crate::changes::steps;
use crate::fixture::{DRIVER, World, days_ago, id, said};
use crate::restores::CLASSES;

const API: &str = "slackwater.dev/v1alpha1";
const RESOURCE: &str = "snapshotschedules.slackwater.dev";

fn condition(kind: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({"type": kind, "status": status, "reason": reason, "message": message,
        "lastTransitionTime": "2026-11-22T10:00:00Z"})
}

fn fill(world: &World) {
    let schedule = |name: &str, spec: Value, status: Value| {
        let mut whole = json!({"class": "slackwater"});
        let fields = spec.as_object().unwrap().clone();
        whole.as_object_mut().unwrap().extend(fields);
        let object = json!({"apiVersion": API, "kind": "SnapshotSchedule",
            "metadata": {"name": name, "namespace": "shop"}, "spec": whole, "status": status});
        world.put(object);
    };
    let scheduled = condition("Scheduling", "True", "Scheduled", "");
    let ready = condition("Cut", "True", "Ready", "");
    let good = json!({"lastCut": days_ago(2), "level": "filesystem", "delay": "12s",
        "nextSlot": "2096-11-22T10:05:00Z", "conditions": [scheduled, ready]});
    let labels = json!({"matchLabels": {"app": "pg"}});
    schedule(
        "pg",
        json!({"selector": labels, "cron": "5 * * * *", "timeZone": "Europe/Berlin"}),
        good,
    );
    schedule(
        "claims",
        json!({"claims": ["data-pg-0", "cache"], "every": "1h"}),
        json!({"nextSlot": "2096-11-22T10:05:00Z", "conditions": [scheduled,
            condition("Cut", "False", "NotReady", "claims-x: no space\u{1b}[2J"),
            condition("Retention", "False", "Deleting", "claims-y is being deleted")]}),
    );
    schedule(
        "broken",
        json!({"claims": ["cache"], "every": "1h"}),
        json!({"conditions": [condition("Scheduling", "False", "NoClass",
            "there is no VolumeSnapshotClass slackwater")]}),
    );
    schedule(
        "paused",
        json!({"claims": ["cache"], "every": "1h", "suspend": true}),
        json!({"conditions": [condition("Scheduling", "False", "Suspended", "")]}),
    );
    schedule(
        "unread",
        json!({"claims": ["cache"], "every": "1h"}),
        json!({}),
    );
}

/// Without what differs from run to run: times, and in names of sets the slot and the UID.
fn plain(text: &str) -> String {
    let parse = |word: &str| {
        let bare = word.trim_matches(|c: char| !c.is_ascii_alphanumeric());
        if bare.parse::<Timestamp>().is_ok() {
            return word.replace(bare, "SLOT");
        }
        // NAME-YYYYMMDD-HHMM-UID[-CLAIM]
        let parts: Vec<_> = bare.splitn(4, '-').collect();
        match parts[..] {
            [name, day, _, rest] if day.len() == 8 && day.parse::<u32>().is_ok() => {
                let claim = rest.get(5..).unwrap_or_default();
                word.replace(bare, &format!("{name}-SLOT-UID{claim}"))
            }
            _ => word.to_string(),
        }
    };
    let of_line = |line: &str| line.split(' ').map(parse).collect::<Vec<_>>().join(" ");
    text.lines().map(of_line).collect::<Vec<_>>().join("\n")
}

#[test]
fn schedules_are_listed_and_run_on_request() {
    let Some(world) = World::start("schedules with kubectl slackwater") else {
        return;
    };
    world.fill();
    world.user_of_shop();
    fill(&world);
    let commands: [&[&str]; 5] = [
        &["schedules", "-n", "shop"],
        &["schedules", "-A", "-o", "wide"],
        &["schedules", "-n", "shop", "-o", "name"],
        &["schedules", "-n", "other"],
        &["schedules", "-n", "shop", "--as", "dev"],
    ];
    let text = commands.map(|words| world.says(words)).join("\n");
    insta::assert_snapshot!("schedules", text);
    retention(&world);
    refused(&world);
    runs_a_group(&world);
    reports_a_slot_that_was_skipped(&world);
    restores_what_was_taken_last(&world);
}

fn retention(world: &World) {
    let due = |name: &str, reason: &str, waits: &str| json!({"name": name, "reason": reason, "waits": waits});
    let surplus = "no number of keep includes it";
    let deletions = json!([
        due("pg-a", surplus, "claim shop/x is restored from it\u{1b}[2J"),
        due("pg-b", surplus, "")
    ]);
    let scheduled = |reason: &str| {
        let mut one = condition("Scheduling", "True", reason, "");
        one["observedGeneration"] = json!(1);
        one
    };
    let clocks = condition(
        "Retention",
        "False",
        "ClocksDiffer",
        "the clocks differ by 90 s",
    );
    let former = condition(
        "Retention",
        "True",
        "FormerSets",
        "3 sets are of claims or of a selector that the spec does not have any more",
    );
    let states = [
        (
            "pg",
            json!({"deletions": deletions, "conditions": [scheduled("Scheduled"), former]}),
        ),
        (
            "claims",
            json!({"deletions": [], "conditions": [scheduled("Scheduled"), clocks]}),
        ),
        (
            "paused",
            json!({"deletions": [due("paused-a", surplus, "")],
            "conditions": [scheduled("Suspended")]}),
        ),
    ];
    for (name, status) in states {
        world.status(&format!("{RESOURCE}/{name}"), status);
    }
    let commands: [&[&str]; 7] = [
        &["schedule", "retention", "pg", "-n", "shop"],
        &["schedule", "retention", "pg", "-n", "shop", "-o", "name"],
        &["schedule", "retention", "claims", "-n", "shop"],
        &["schedule", "retention", "paused", "-n", "shop"],
        &[
            "schedule",
            "retention",
            "paused",
            "-n",
            "shop",
            "-o",
            "json",
        ],
        &["schedule", "retention", "unread", "-n", "shop"],
        &["schedule", "retention", "absent", "-n", "shop"],
    ];
    let mut text = commands.map(|words| world.says(words)).join("\n");
    // A spec that the controller has not read.
    let keep = json!({"spec": {"keep": {"last": 1}}}).to_string();
    let what = format!("{RESOURCE}/pg");
    let words = ["patch", "-n", "shop", &what, "--type=merge", "-p", &keep];
    world.plane.kubectl(&words);
    text.push_str(&world.says(commands[0]));
    insta::assert_snapshot!("schedule_retention", text);
}

fn refused(world: &World) {
    let of = |name: &'static str, more: &[&'static str]| {
        [&["schedule", "run", name, "-n", "shop"][..], more].concat()
    };
    let commands = [
        of("absent", &[]),
        of("broken", &["--yes"]),
        of("paused", &["--yes"]),
        of("unread", &["--yes"]),
        of("pg", &["--yes", "--as", "dev"]),
        of("pg", &[]),
        of("claims", &["--dry-run"]),
        of("claims", &["--yes"]),
    ];
    let commands: Vec<_> = commands.iter().map(Vec::as_slice).collect();
    let text = steps(
        world,
        &[
            RESOURCE,
            "-n",
            "shop",
            "--field-selector",
            "metadata.name=claims",
        ],
        &commands,
    );
    // The slot of what is stored is in JSON.
    let run_at = field(world, "claims", ".spec.runAt");
    insta::assert_snapshot!("schedule_run", plain(&text.replace(&run_at, "SLOT")));
}

fn field(world: &World, schedule: &str, path: &str) -> String {
    let path = format!("jsonpath={{{path}}}");
    let what = format!("{RESOURCE}/{schedule}");
    world
        .plane
        .kubectl(&["get", "-n", "shop", &what, "-o", &path])
}

/// The test does the work of the controllers.
fn runs_a_group(world: &World) {
    let words = ["schedule", "run", "pg", "-n", "shop", "--yes", "--wait"];
    let mut command = world.command(&words);
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut progress = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut seen = vec![progress.next().unwrap().unwrap()];
    let slot: Timestamp = field(world, "pg", ".spec.runAt").parse().unwrap();
    let uid = field(world, "pg", ".metadata.uid");
    let name = format!("pg-{}-{}", slot.strftime("%Y%m%d-%H%M"), &uid[..5]);
    let groups = "groupsnapshot.storage.k8s.io/v1beta2";
    world.put(
        json!({"apiVersion": groups, "kind": "VolumeGroupSnapshotContent",
        "metadata": {"name": "run-content", "annotations": {"slackwater.dev/level": "filesystem"}},
        "spec": {"deletionPolicy": "Delete", "driver": DRIVER,
            "source": {"volumeHandles": [id(0, 1)]},
            "volumeGroupSnapshotRef": {"name": name, "namespace": "shop"}}}),
    );
    world.put(json!({"apiVersion": groups, "kind": "VolumeGroupSnapshot",
        "metadata": {"name": name, "namespace": "shop"},
        "spec": {"source": {"selector": {"matchLabels": {"app": "pg"}}}},
        "status": {"readyToUse": false}}));
    seen.push(progress.next().unwrap().unwrap());
    let ready = json!({"boundVolumeGroupSnapshotContentName": "run-content", "readyToUse": true});
    world.status(&format!("volumegroupsnapshot/{name}"), ready);
    let mut output = child.wait_with_output().unwrap();
    output.stderr = (seen.join("\n") + "\n").into_bytes();
    insta::assert_snapshot!("schedule_run_waits", plain(&said(&words, &output)));
}

fn reports_a_slot_that_was_skipped(world: &World) {
    let words = ["schedule", "run", "claims", "-n", "shop", "--yes", "--wait"];
    let mut command = world.command(&words);
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut progress = BufReader::new(child.stderr.take().unwrap()).lines();
    let first = progress.next().unwrap().unwrap();
    let slot = field(world, "claims", ".spec.runAt");
    world.status(&format!("{RESOURCE}/claims"), json!({ "lastSlot": slot }));
    let last = progress.next().unwrap().unwrap();
    let mut output = child.wait_with_output().unwrap();
    output.stderr = format!("{first}\n{last}\n").into_bytes();
    insta::assert_snapshot!("schedule_run_skipped", plain(&said(&words, &output)));
}

/// The sets of the last complete slot, by the names that the controller gives them.
fn restores_what_was_taken_last(world: &World) {
    let restore = |schedule: &str| {
        let of = format!("snapshotschedule/{schedule}");
        let words = [
            "restore",
            &of,
            "-n",
            "shop",
            "--suffix",
            "check",
            "--dry-run",
        ];
        plain(&world.says(&words))
    };
    let mut text = vec![restore("absent"), restore("claims")];
    let slot = "2026-11-22T10:05:00Z";
    world.status(
        &format!("{RESOURCE}/claims"),
        json!({ "lastCutSlot": slot }),
    );
    let uid = field(world, "claims", ".metadata.uid");
    let name = |claim: &str| format!("claims-20261122-1005-{}-{claim}", &uid[..5]);
    let ready = json!({"readyToUse": true, "restoreSize": "1Gi"});
    let taken = |claim: &str, n: u8| {
        let level = json!({"slackwater.dev/level": "filesystem"});
        world.snapshot(&name(claim), claim, &id(0, n), level, ready.clone());
    };
    taken("data-pg-0", 81);
    // One of the two was deleted since then.
    text.push(restore("claims"));
    taken("cache", 82);
    world.plane.apply(CLASSES);
    text.push(restore("claims"));
    insta::assert_snapshot!("schedule_restore", text.join("\n"));
}
