//! Schedules of snapshots, with the real API server and the real snapshot controller. The test does the
//! work of csi-snapshotter.

mod link;
mod routers;

use std::process::Command;
use std::sync::Arc;

use http::Method;
use k8s_openapi::jiff::tz::TimeZone;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use slackwater::router::Cluster;
use slackwater::router::kube::{AgentReports, InCluster};

use crate::kube::api::{Agents, DRIVER, eventually, options};
use crate::kube::plane::Plane;
use link::Link;

const POOL: &str = "11111111-2222-4333-8444-000000000001";

/// The policies of the chart. The router and this test have the same account.
fn apply_policies(plane: &Plane) {
    let output = Command::new(plane.program().with_file_name("helm"))
        .args(["template", "slackwater", "deploy/chart"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .arg("--namespace=slackwater")
        .arg("--set=schedules.create=true")
        .arg("--api-versions=snapshot.storage.k8s.io/v1")
        .arg("--show-only=templates/admission.yaml")
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{error}");
    let text = String::from_utf8(output.stdout).unwrap();
    let router = "system:serviceaccount:slackwater:slackwater-controller";
    assert!(text.contains(router));
    plane.apply(&text.replace(router, "admin"));
}

struct Fixture {
    plane: Plane,
    _agents: Arc<Agents>,
    cluster: Arc<InCluster>,
    link: Arc<Link>,
}

impl Fixture {
    fn new() -> Option<Fixture> {
        let mut plane = Plane::start("schedules of snapshots")?;
        for (crd, name) in [
            (
                include_str!("../../../deploy/chart/crds/pools.yaml"),
                "pools",
            ),
            (
                include_str!("../../../deploy/chart/crds/snapshotschedules.yaml"),
                "snapshotschedules",
            ),
        ] {
            plane.apply(crd);
            let name = format!("crd/{name}.slackwater.dev");
            plane.kubectl(&["wait", "--for=condition=Established", &name]);
        }
        plane.start_snapshot_controller();
        apply_policies(&plane);
        for namespace in ["slackwater", "shop"] {
            plane.kubectl(&["create", "namespace", namespace]);
        }
        for (name, policy) in [("hourly", "Delete"), ("retained", "Retain")] {
            plane.apply(
                &json!({"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotClass",
                    "metadata": {"name": name}, "driver": DRIVER, "deletionPolicy": policy})
                .to_string(),
            );
        }
        let agents = Arc::<Agents>::default();
        agents.say("node-1", "home-1", &[POOL]);
        let link = Link::new(|| 0, Box::new(|_, _| {}));
        let inside = plane.runtime.enter();
        let client = link.client(plane.client());
        let reports = Arc::clone(&agents) as Arc<dyn AgentReports>;
        let cluster = InCluster::start(client, options("router-a"), reports);
        cluster.schedule_snapshots();
        drop(inside);
        Some(Fixture {
            plane,
            _agents: agents,
            cluster,
            link,
        })
    }

    fn get(&self, what: &str, field: &str) -> String {
        let path = format!("jsonpath={{{field}}}");
        let words = ["get", "-n", "shop", what, "-o", &path];
        self.plane.try_kubectl(&words).unwrap_or_default()
    }

    fn patch(&self, what: &str, patch: &Value, more: &[&str]) {
        let patch = patch.to_string();
        let words = ["patch", "-n", "shop", what, "--type=merge", "-p", &patch];
        self.plane.kubectl(&[&words[..], more].concat());
    }

    /// A claim that is bound to a volume of the driver.
    fn claim(&self, name: &str) {
        let volume = json!({"apiVersion": "v1", "kind": "PersistentVolume",
            "metadata": {"name": format!("pv-{name}")},
            "spec": {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"],
                "csi": {"driver": DRIVER, "volumeHandle": format!("{POOL}.{POOL}")}}});
        self.plane.apply(&volume.to_string());
        let claim = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": "shop"},
            "spec": {"accessModes": ["ReadWriteOnce"], "volumeName": format!("pv-{name}"),
                "storageClassName": "", "resources": {"requests": {"storage": "1Gi"}}}});
        self.plane.apply(&claim.to_string());
        let uid = self.get(&format!("pvc/{name}"), ".metadata.uid");
        let bound = json!({"spec": {"claimRef": {"namespace": "shop", "name": name, "uid": uid}}});
        self.patch(&format!("pv/pv-{name}"), &bound, &[]);
        let bound = json!({"status": {"phase": "Bound"}});
        self.patch(&format!("pvc/{name}"), &bound, &["--subresource=status"]);
    }

    fn schedule(&self, name: &str, spec: &Value) {
        let object = json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "SnapshotSchedule",
            "metadata": {"name": name, "namespace": "shop"}, "spec": spec});
        self.plane.apply(&object.to_string());
    }

    /// The reason of a condition of a schedule.
    fn reason(&self, name: &str, condition: &str) -> String {
        let field = format!(".status.conditions[?(@.type==\"{condition}\")].reason");
        self.get(&format!("snapshotschedules.slackwater.dev/{name}"), &field)
    }

    /// The name of the set of a slot.
    fn set(&self, schedule: &str, slot: Timestamp, claim: &str) -> String {
        let what = format!("snapshotschedules.slackwater.dev/{schedule}");
        let uid = self.get(&what, ".metadata.uid");
        let slot = slot.to_zoned(TimeZone::UTC).strftime("%Y%m%d-%H%M");
        format!("{schedule}-{slot}-{}-{claim}", &uid[..5])
    }

    fn exists(&self, snapshot: &str) -> bool {
        !self
            .get(&format!("volumesnapshot/{snapshot}"), ".metadata.uid")
            .is_empty()
    }

    /// Deletes the snapshots of contents that are being deleted, as csi-snapshotter does.
    fn is_gone(&self, snapshot: &str) -> bool {
        let words = ["get", "volumesnapshotcontents", "-o", "json"];
        let all: Value = serde_json::from_str(&self.plane.kubectl(&words)).unwrap();
        for content in all["items"].as_array().unwrap() {
            let metadata = &content["metadata"];
            if !metadata["deletionTimestamp"].is_null() {
                let name = metadata["name"].as_str().unwrap();
                let none = json!({"metadata": {"finalizers": null}}).to_string();
                let what = format!("volumesnapshotcontent/{name}");
                // It may be gone by now.
                let words = ["patch", &what, "--type=merge", "-p", &none];
                let _ = self.plane.try_kubectl(&words);
            }
        }
        !self.exists(snapshot)
    }

    /// A set as the router would have created it.
    fn older(&self, name: &str, uid: &str) {
        let object = json!({"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
            "metadata": {"name": name, "namespace": "shop",
                "labels": {"slackwater.dev/schedule-uid": uid}},
            "spec": {"volumeSnapshotClassName": "hourly",
                "source": {"persistentVolumeClaimName": "data"}}});
        self.plane.apply(&object.to_string());
    }

    /// What csi-snapshotter writes at a content.
    fn finish(&self, snapshot: &str, number: u128) {
        let what = format!("volumesnapshot/{snapshot}");
        eventually("the snapshot has a content", || {
            !self
                .get(&what, ".status.boundVolumeSnapshotContentName")
                .is_empty()
        });
        let content = self.get(&what, ".status.boundVolumeSnapshotContentName");
        let content = format!("volumesnapshotcontent/{content}");
        let level = json!({"metadata": {"annotations": {"slackwater.dev/level": "filesystem"}}});
        self.patch(&content, &level, &[]);
        let handle = format!("{POOL}.{}", uuid::Uuid::from_u128(number));
        let status = json!({"status": {"snapshotHandle": handle, "readyToUse": true}});
        self.patch(&content, &status, &["--subresource=status"]);
        eventually("the snapshot is ready", || {
            self.get(&what, ".status.readyToUse") == "true"
        });
    }
}

/// The newest slot of `every: 30d`: it does not change while the test runs.
fn newest_slot() -> Timestamp {
    let now = Timestamp::now().as_second();
    Timestamp::from_second(now - now % (30 * 24 * 60 * 60)).unwrap()
}

#[test]
fn schedules_create_and_delete_snapshots() {
    let Some(fixture) = Fixture::new() else {
        return;
    };
    fixture.claim("data");
    refuses(&fixture);
    let keep = json!({"claims": ["data"], "class": "hourly", "every": "30d", "keep": {"last": 1}});
    fixture.schedule("pg", &keep);
    let schedule = "snapshotschedules.slackwater.dev/pg";
    eventually("the next slot is shown", || {
        !fixture.get(schedule, ".status.nextSlot").is_empty()
    });
    assert_eq!(fixture.reason("pg", "Cut"), "NoneYet");

    // Sets of earlier slots, one of which is kept by a person, and an object with the label alone.
    let uid = fixture.get(schedule, ".metadata.uid");
    only_the_router_makes_sets(&fixture, &uid);
    let slot = newest_slot();
    let ago = |hours: i64| slot - SignedDuration::from_hours(hours);
    let old = [3, 2, 1].map(|hours| fixture.set("pg", ago(hours), "data"));
    for (number, name) in (1..).zip(&old) {
        fixture.older(name, &uid);
        fixture.finish(name, number);
    }
    fixture.older("by-hand", &uid);
    fixture.finish("by-hand", 9);
    eventually("those that are not to be kept are deleted", || {
        fixture.is_gone(&old[0]) && fixture.is_gone(&old[1])
    });
    assert!(fixture.exists(&old[2]) && fixture.exists("by-hand"));

    let new = fixture.set("pg", slot, "data");
    makes_up_for_a_missed_slot(&fixture, (&old[2], &new), slot);

    // A set that a person deletes is not created again.
    fixture.plane.kubectl(&[
        "delete",
        "volumesnapshot",
        "-n",
        "shop",
        "--wait=false",
        &new,
    ]);
    eventually("it is gone", || fixture.is_gone(&new));
    eventually("there is no last cut any more", || {
        fixture.get(schedule, ".status.lastCutSlot").is_empty()
    });
    assert!(!fixture.exists(&new));
    let status = fixture.cluster.status().and_then(|status| status.schedules);
    assert!(status.is_some_and(|all| all.contains_key("shop/pg")));
    runs_when_a_person_requests_it(&fixture);
    reports_what_fails(&fixture);
    reads_no_schedule_without_need(&fixture);
    groups(&fixture);
    fixture.plane.runtime.block_on(fixture.cluster.shut_down());
}

/// Neither a user of the namespace gives a snapshot the label, nor does the router delete one without it.
fn only_the_router_makes_sets(fixture: &Fixture, uid: &str) {
    let user = ["--as=mallory", "--as-group=system:masters"];
    let snapshot = |name: &str, labels: &Value| {
        json!({"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshot",
            "metadata": {"name": name, "namespace": "shop", "labels": labels},
            "spec": {"volumeSnapshotClassName": "hourly",
                "source": {"persistentVolumeClaimName": "data"}}})
        .to_string()
    };
    let create = |name: &str, labels: &Value| {
        let file = fixture.plane.path(name);
        std::fs::write(&file, snapshot(name, labels)).unwrap();
        let words = ["create", "-f", file.to_str().unwrap()];
        fixture.plane.try_kubectl(&[&words[..], &user].concat())
    };
    let label = json!({"slackwater.dev/schedule-uid": uid});
    // The API server uses a policy a moment after it was created.
    let denied = "only the controller of Slackwater sets the label";
    let mut number = 0;
    eventually("a label of others is denied", || {
        number += 1;
        let created = create(&format!("forged-{number}"), &label);
        created.is_err_and(|error| error.contains(denied))
    });
    create("own", &json!({"app": "pg"})).unwrap();
    let patch = json!({"metadata": {"labels": label}}).to_string();
    let words = [
        "patch",
        "-n",
        "shop",
        "volumesnapshot/own",
        "--type=merge",
        "-p",
        &patch,
    ];
    let error = fixture.plane.try_kubectl(&[&words[..], &user].concat());
    assert!(
        error.as_ref().is_err_and(|error| error.contains(denied)),
        "{error:?}"
    );
    let words = ["delete", "-n", "shop", "volumesnapshot/own", "--wait=false"];
    let error = fixture.plane.try_kubectl(&words);
    let denied = "deletes only snapshots of schedules";
    assert!(
        error.as_ref().is_err_and(|error| error.contains(denied)),
        "{error:?}"
    );
    fixture.plane.kubectl(&[&words[..], &user].concat());
}

/// A slot was missed, as after an outage, and `old` is the only set so far.
fn makes_up_for_a_missed_slot(fixture: &Fixture, (old, new): (&str, &str), slot: Timestamp) {
    let schedule = "snapshotschedules.slackwater.dev/pg";
    let keep = json!({"metadata": {"annotations": {"slackwater.dev/keep": "true"}}});
    fixture.patch(&format!("volumesnapshot/{old}"), &keep, &[]);
    let last = json!({"status": {"lastSlot": (slot - SignedDuration::from_hours(5)).to_string()}});
    fixture.patch(schedule, &last, &["--subresource=status"]);
    eventually("a snapshot is created", || fixture.exists(new));
    eventually("the slot is recorded", || {
        fixture.get(schedule, ".status.lastSlot") == slot.to_string()
    });
    assert!(fixture.exists(old), "the new one is not ready");
    fixture.finish(new, 4);
    eventually("the new one is the last cut", || {
        fixture.get(schedule, ".status.lastCutSlot") == slot.to_string()
            && fixture.get(schedule, ".status.level") == "filesystem"
            && fixture.reason("pg", "Cut") == "Ready"
    });
    eventually("the one that a person keeps stays", || {
        fixture.reason("pg", "Retention") == "InUse"
    });
    assert!(fixture.exists(old));
    assert_eq!(fixture.get(schedule, ".status.deletions[*].name"), old);
    let waits = fixture.get(schedule, ".status.deletions[*].waits");
    assert!(waits.contains("slackwater.dev/keep"), "{waits}");
    let keep = json!({"metadata": {"annotations": {"slackwater.dev/keep": null}}});
    fixture.patch(&format!("volumesnapshot/{old}"), &keep, &[]);
    eventually("it is deleted afterwards", || fixture.is_gone(old));
    eventually("nothing is left to be done", || {
        fixture.reason("pg", "Retention") == "Kept"
    });
    assert!(fixture.exists(new) && fixture.exists("by-hand"));
    let shown = fixture
        .plane
        .kubectl(&["get", "-n", "shop", "snapshotschedules.slackwater.dev"]);
    assert!(
        shown.contains("LAST CUT") && shown.contains("filesystem"),
        "{shown}"
    );
}

/// `runAt` is one more slot, as `kubectl slackwater schedule run` writes it.
fn runs_when_a_person_requests_it(fixture: &Fixture) {
    let schedule = "snapshotschedules.slackwater.dev/pg";
    let now = Timestamp::now().as_second();
    let minute = Timestamp::from_second(now - now % 60).unwrap();
    let run = json!({"spec": {"runAt": minute.to_string()}});
    fixture.patch(schedule, &run, &[]);
    let set = fixture.set("pg", minute, "data");
    eventually("a set of this minute is created", || fixture.exists(&set));
    eventually("the slot is recorded", || {
        fixture.get(schedule, ".status.lastSlot") == minute.to_string()
    });
    fixture.finish(&set, 5);
    eventually("it is the last cut", || {
        fixture.get(schedule, ".status.lastCutSlot") == minute.to_string()
    });
    let wrong = json!({"spec": {"runAt": "2026-11-22T11:05:30Z"}}).to_string();
    let words = [
        "patch",
        "-n",
        "shop",
        schedule,
        "--type=merge",
        "-p",
        &wrong,
    ];
    let error = fixture.plane.try_kubectl(&words).unwrap_err();
    assert!(error.contains("spec.runAt"), "{error}");
}

/// What the router may not read or delete is a condition and an event, and the rest goes on.
fn reports_what_fails(fixture: &Fixture) {
    let is_recorded = |reason: &str, event: &str| {
        let words = ["get", "events", "-n", "shop", "-o", "json"];
        let all = fixture.plane.kubectl(&words);
        let all: Value = serde_json::from_str(&all).unwrap();
        let mut all = all["items"].as_array().unwrap().iter();
        all.any(|it| {
            let message = it["message"].as_str().unwrap_or_default();
            it["reason"] == event && message.starts_with(reason) && message.contains("forbidden")
        })
    };
    fixture.link.deny(Method::GET, "/volumesnapshotclasses");
    eventually("the pass that fails is reported", || {
        fixture.reason("pg", "Scheduling") == "ReadFailed"
    });
    eventually("with an event", || {
        is_recorded("ReadFailed", "NotScheduled")
    });
    fixture.link.allow_all();
    eventually("the next one is as before", || {
        fixture.reason("pg", "Scheduling") == "Scheduled"
    });
    // Sets that are not to be kept.
    let uid = fixture.get("snapshotschedules.slackwater.dev/pg", ".metadata.uid");
    let ago = |hours: i64| newest_slot() - SignedDuration::from_hours(hours);
    let old = [8, 7].map(|hours| fixture.set("pg", ago(hours), "data"));
    fixture.link.deny(Method::DELETE, "/volumesnapshots/");
    fixture.link.deny(Method::GET, "/persistentvolumeclaims");
    for (number, name) in (21..).zip(&old) {
        fixture.older(name, &uid);
        fixture.finish(name, number);
    }
    eventually("claims that cannot be listed are reported", || {
        fixture.reason("pg", "Retention") == "ReadFailed"
    });
    eventually("with an event", || {
        is_recorded("ReadFailed", "RetentionWaits")
    });
    assert_eq!(fixture.reason("pg", "Scheduling"), "Scheduled");
    fixture.link.allow_all();
    fixture.link.deny(Method::DELETE, "/volumesnapshots/");
    eventually("the refused deletion is reported", || {
        fixture.reason("pg", "Retention") == "DeleteFailed"
    });
    eventually("with an event", || {
        is_recorded("DeleteFailed", "RetentionWaits")
    });
    fixture.link.allow_all();
    eventually("both are deleted", || {
        old.iter().all(|name| fixture.is_gone(name))
    });
    eventually("nothing is left to be done", || {
        fixture.reason("pg", "Retention") == "Kept"
    });
}

/// A schedule is read by itself only if something is to be done.
fn reads_no_schedule_without_need(fixture: &Fixture) {
    let asked = |end: &str| fixture.link.asked(&Method::GET, end);
    let passes = || asked("/volumesnapshotclasses");
    let all = ["pg", "often", "retained", "missing"];
    let reads = || all.map(|name| asked(&format!("/snapshotschedules/{name}")));
    // What has just been written is in the watch a moment later.
    let started = passes();
    eventually("the watch has the last status", || passes() > started + 3);
    let before = (passes(), reads());
    eventually("several passes", || passes() > before.0 + 5);
    assert_eq!(reads(), before.1);
}

/// What is not valid is refused by the schema, or with a condition.
fn refuses(fixture: &Fixture) {
    let both = json!({"claims": ["data"], "selector": {"matchLabels": {"a": "b"}}, "class": "hourly", "every": "30d"});
    let group = json!({"claims": ["data"], "group": true, "class": "hourly", "every": "30d"});
    let expressions = json!({"selector": {"matchLabels": {"a": "b"},
        "matchExpressions": [{"key": "x", "operator": "Exists"}]}, "class": "hourly", "every": "30d"});
    for (spec, reason) in [
        (both, "give either selector or claims"),
        (group, "claims make single ones"),
        (expressions, "matchExpressions"),
    ] {
        let object = json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "SnapshotSchedule",
            "metadata": {"name": "wrong", "namespace": "shop"}, "spec": spec});
        let file = fixture.plane.path("wrong");
        std::fs::write(&file, object.to_string()).unwrap();
        let words = ["create", "-f", file.to_str().unwrap()];
        let error = fixture.plane.try_kubectl(&words).unwrap_err();
        assert!(error.contains(reason), "{error}");
    }
    for (name, class, every, reason) in [
        ("retained", "retained", "30d", "ClassRetains"),
        ("missing", "missing", "30d", "NoClass"),
        ("often", "hourly", "1m", "Invalid"),
    ] {
        fixture.schedule(
            name,
            &json!({"claims": ["data"], "class": class, "every": every}),
        );
        eventually("the schedule is refused", || {
            fixture.reason(name, "Scheduling") == reason
        });
    }
}

/// A group is created in the version that the cluster has.
fn groups(fixture: &Fixture) {
    let spec =
        json!({"selector": {"matchLabels": {"app": "pg"}}, "class": "groups", "every": "30d"});
    fixture.schedule("all", &spec);
    eventually("a cluster without groups is recognized", || {
        fixture.reason("all", "Scheduling") == "NoGroups"
    });
    fixture.plane.apply_group_crds();
    let crd = "crd/volumegroupsnapshotclasses.groupsnapshot.storage.k8s.io";
    let version = fixture.get(crd, ".spec.versions[?(@.storage==true)].name");
    fixture.plane.apply(
        &json!({"apiVersion": format!("groupsnapshot.storage.k8s.io/{version}"),
            "kind": "VolumeGroupSnapshotClass", "metadata": {"name": "groups"},
            "driver": DRIVER, "deletionPolicy": "Delete"})
        .to_string(),
    );
    let schedule = "snapshotschedules.slackwater.dev/all";
    eventually("its class is found", || {
        fixture.reason("all", "Scheduling") == "Scheduled"
    });
    let slot = newest_slot();
    let last = json!({"status": {"lastSlot": (slot - SignedDuration::from_hours(2)).to_string()}});
    fixture.patch(schedule, &last, &["--subresource=status"]);
    let name = fixture.set("all", slot, "");
    let group = format!("volumegroupsnapshot/{}", name.trim_end_matches('-'));
    eventually("a group snapshot is created", || {
        fixture.get(&group, ".spec.source.selector.matchLabels.app") == "pg"
    });
    assert_eq!(
        fixture.get(&group, ".spec.volumeGroupSnapshotClassName"),
        "groups"
    );
}
