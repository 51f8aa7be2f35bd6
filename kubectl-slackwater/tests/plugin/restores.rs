//! Restores from snapshots and group snapshots.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use serde_json::{Value, json};

use crate::fixture::{DRIVER, World, id, listed, said};

/// Classes whose volumes are created for a pod, and at once.
pub const CLASSES: &str = "apiVersion: storage.k8s.io/v1\n\
    kind: StorageClass\n\
    metadata: {name: slackwater}\n\
    provisioner: csi.slackwater.dev\n\
    volumeBindingMode: WaitForFirstConsumer\n\
    ---\n\
    apiVersion: storage.k8s.io/v1\n\
    kind: StorageClass\n\
    metadata: {name: at-once}\n\
    provisioner: csi.slackwater.dev\n\
    ---\n\
    apiVersion: storage.k8s.io/v1\n\
    kind: StorageClass\n\
    metadata: {name: at-source}\n\
    provisioner: csi.slackwater.dev\n\
    parameters: {restore: source}\n\
    volumeBindingMode: WaitForFirstConsumer\n\
    ---\n\
    apiVersion: storage.k8s.io/v1\n\
    kind: StorageClass\n\
    metadata: {name: foreign}\n\
    provisioner: csi.example.org\n";

#[test]
fn claims_are_restored_from_snapshots() {
    let Some(world) = World::start("restores with kubectl slackwater") else {
        return;
    };
    world.fill();
    world.user_of_shop();
    world.plane.apply(CLASSES);
    refusals(&world);
    default_classes(&world);
    under_other_names(&world);
    programs_get_values(&world);
    permissions_are_listed(&world);
    volumes_are_waited_for(&world);
    copies_are_checked(&world);
    under_the_names_of_a_stateful_set(&world);
}

#[track_caller]
fn assert_snapshot(world: &World, name: &str, commands: &[&[&str]]) {
    let said: Vec<_> = commands.iter().map(|words| world.says(words)).collect();
    insta::assert_snapshot!(name, said.join("\n"));
}

/// The claims of the shop.
fn claims(world: &World) -> String {
    let columns = "-o=custom-columns=:.metadata.name,:.spec.dataSource.name,:.spec.resources.requests.storage,:.spec.storageClassName,:.metadata.labels";
    let text = world
        .plane
        .kubectl(&["get", "pvc", "-n", "shop", "--no-headers", columns]);
    let lines = text.lines().map(|line| {
        let cells: Vec<_> = line.split_whitespace().collect();
        cells.join("  ") + "\n"
    });
    lines.collect()
}

fn refusals(world: &World) {
    let restore_of = |pool, n, name: &str, claim: &str, group: &str, status: Value| {
        let mut whole = json!({"readyToUse": true, "restoreSize": "1Gi"});
        if !group.is_empty() {
            whole["volumeGroupSnapshotName"] = json!(group);
        }
        for (key, value) in status.as_object().unwrap() {
            whole[key] = value.clone();
        }
        world.snapshot(name, claim, &id(pool, n), json!({}), whole);
    };
    let group = |name: &str, snapshots: &[u8], status: Value| {
        let kind = "groupsnapshot.storage.k8s.io/v1beta2";
        let handles: Vec<_> = snapshots.iter().map(|n| id(0, *n)).collect();
        world.put(json!({"apiVersion": kind, "kind": "VolumeGroupSnapshot",
            "metadata": {"name": name, "namespace": "shop"},
            "spec": {"source": {"selector": {"matchLabels": {"app": name}}}}, "status": status}));
        world.put(json!({"apiVersion": kind, "kind": "VolumeGroupSnapshotContent",
            "metadata": {"name": format!("content-of-{name}")},
            "spec": {"deletionPolicy": "Delete", "driver": DRIVER, "source": {"volumeHandles": handles},
                "volumeGroupSnapshotRef": {"name": name, "namespace": "shop"}},
            "status": listed(&handles)}));
    };
    let bound = |name: &str, ready: bool| {
        json!({"readyToUse": ready,
        "boundVolumeGroupSnapshotContentName": format!("content-of-{name}")})
    };
    let member = |name: &str, n: u8, claim: &str, group: &str| {
        restore_of(0, n, name, claim, group, json!({}));
    };
    group("incomplete", &[30, 29], bound("incomplete", true));
    member("incomplete-a", 30, "a", "incomplete");
    // As many as there should be, but one of another snapshot.
    group("crossed", &[36, 37], bound("crossed", true));
    member("crossed-a", 36, "a", "crossed");
    member("crossed-b", 38, "b", "crossed");
    group("unready", &[39], bound("unready", false));
    group("member-unready", &[31], bound("member-unready", true));
    let status = json!({"readyToUse": false});
    restore_of(0, 31, "member-unready-a", "a", "member-unready", status);
    group("contentless", &[40], json!({"readyToUse": true}));
    group("twice", &[32, 41], bound("twice", true));
    member("twice-a", 32, "a", "twice");
    member("twice-b", 41, "a", "twice");
    group("unlisted", &[], bound("unlisted", true));
    group("before-upgrade", &[42], bound("before-upgrade", true));
    restore_of(0, 33, "sizeless", "a", "", json!({"restoreSize": null}));
    let hostile = json!({"readyToUse": false, "error": {"message": "bad \u{1b}[2J\u{202e} text"}});
    restore_of(0, 34, "hostile", "a", "", hostile);
    restore_of(0, 35, "claimless", "gone", "", json!({}));
    assert_snapshot(
        world,
        "restore_refused",
        &[
            &["restore", "nightly-2", "-n", "shop", "--yes"],
            &["restore", "absent", "-n", "shop", "--suffix", "x"],
            &["restore", "nightly-2", "-n", "other", "--suffix", "x"],
            &["restore", "bad\u{1b}[2Jname", "-n", "shop", "--suffix", "x"],
            &["restore", "pod/x", "-n", "shop"],
            &["restore", "before-upgrade", "-n", "shop", "--suffix", "x"],
            &["restore", "failed", "-n", "shop", "--suffix", "x"],
            &["restore", "hostile", "-n", "shop", "--suffix", "x"],
            &["restore", "sizeless", "-n", "shop", "--suffix", "x"],
            &["restore", "incomplete", "-n", "shop", "--suffix", "x"],
            &["restore", "crossed", "-n", "shop", "--suffix", "x"],
            &["restore", "unlisted", "-n", "shop", "--suffix", "x"],
            &["restore", "unready", "-n", "shop", "--suffix", "x"],
            &["restore", "member-unready", "-n", "shop", "--suffix", "x"],
            &["restore", "contentless", "-n", "shop", "--suffix", "x"],
            &["restore", "twice", "-n", "shop", "--suffix", "x"],
            &["restore", "claimless", "-n", "shop"],
            &[
                "restore",
                "claimless",
                "-n",
                "shop",
                "--storage-class",
                "absent",
            ],
            &[
                "restore",
                "claimless",
                "-n",
                "shop",
                "--storage-class",
                "foreign",
            ],
            &["restore", "nightly-2", "-n", "shop", "--suffix", "A\u{9b}"],
            &[
                "restore",
                "nightly-2",
                "-n",
                "shop",
                "--statefulset",
                "absent",
            ],
        ],
    );
}

/// Neither the claim nor an option has a class.
fn default_classes(world: &World) {
    let mark = |class: &str, value: &str| {
        let mark = format!("storageclass.kubernetes.io/is-default-class={value}");
        let words = ["annotate", "--overwrite", "storageclass", class, &mark];
        world.plane.kubectl(&words);
    };
    world.put(json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": "classless", "namespace": "shop"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}));
    let status = json!({"readyToUse": true, "restoreSize": "1Gi"});
    world.snapshot("of-classless", "classless", &id(0, 50), json!({}), status);
    let try_all = || -> Vec<String> {
        ["claimless", "of-classless"]
            .iter()
            .map(|name| {
                world.says(&[
                    "restore",
                    name,
                    "-n",
                    "shop",
                    "--suffix",
                    "default",
                    "--dry-run",
                    "-o",
                    "wide",
                ])
            })
            .collect()
    };
    let mut all = try_all();
    mark("foreign", "true");
    all.extend(try_all());
    mark("foreign", "false");
    mark("at-once", "true");
    all.extend(try_all());
    mark("at-once", "false");
    world.remove_claim("shop", "classless");
    insta::assert_snapshot!("restore_default_class", all.join("\n"));
}

fn under_other_names(world: &World) {
    let before = claims(world);
    let copy = ["restore", "nightly-2", "-n", "shop", "--suffix", "copy"];
    let with = |more: &[&str]| world.says(&[&copy[..], more].concat());
    let planned = with(&[]);
    let tried = with(&["--dry-run", "-o", "wide"]);
    assert_eq!(claims(world), before, "nothing is stored yet");
    let done = with(&["--yes"]);
    let stored = claims(world);
    // What an interrupted run has created is left, and the rest is created.
    world.remove_claim("shop", "data-pg-1-copy");
    let again = with(&["--yes", "--wait"]);
    assert_eq!(claims(world), stored);
    let single = world.says(&[
        "restore",
        "volumesnapshot.snapshot.storage.k8s.io/before-upgrade",
        "-n",
        "shop",
        "--suffix",
        "old",
        "--yes",
    ]);
    let gone = world.says(&[
        "restore",
        "claimless",
        "-n",
        "shop",
        "--storage-class",
        "slackwater",
        "--yes",
        "-o",
        "name",
    ]);
    let all = [planned, tried, done, again, single, gone, claims(world)];
    insta::assert_snapshot!("restore_to_other_names", all.join("\n"));
}

fn programs_get_values(world: &World) {
    let words = [
        "restore",
        "nightly-2",
        "-n",
        "shop",
        "--suffix",
        "json",
        "-o",
        "json",
    ];
    let planned = world.command(&words).output().unwrap();
    assert_eq!(planned.status.code(), Some(4));
    let value: Value = serde_json::from_slice(&planned.stdout).unwrap();
    assert_eq!(value["items"][0]["state"], "planned");
    let done = world
        .command(&[&words[..], &["--yes"]].concat())
        .output()
        .unwrap();
    assert_eq!(done.status.code(), Some(0), "{done:?}");
    let value: Value = serde_json::from_slice(&done.stdout).unwrap();
    let items = value["items"].as_array().unwrap();
    assert_eq!(items.len(), 2);
    let first = &items[0];
    assert_eq!(first["claim"], "data-pg-0-json");
    assert_eq!(first["sourceClaim"], "data-pg-0");
    assert_eq!(first["group"], "nightly-2");
    assert_eq!(first["level"], "application");
    assert_eq!(first["state"], "created");
    assert_eq!(first["sizeBytes"], json!(20i64 << 30));
    assert!(first["cutAt"].is_string(), "{first}");
}

fn permissions_are_listed(world: &World) {
    assert_snapshot(
        world,
        "restore_missing_permissions",
        &[
            &[
                "restore",
                "volumesnapshot/before-upgrade",
                "-n",
                "shop",
                "--suffix",
                "dev",
                "--as",
                "dev",
            ],
            &[
                "restore",
                "nightly-2",
                "-n",
                "shop",
                "--suffix",
                "dev",
                "--as",
                "dev",
            ],
        ],
    );
}

/// With `--wait`, while the provisioner creates the volumes of one class at once, and not those of the
/// other one.
fn volumes_are_waited_for(world: &World) {
    let words = [
        "restore",
        "nightly-2",
        "-n",
        "shop",
        "--suffix",
        "wait",
        "--storage-class",
        "at-once",
        "--yes",
        "--wait",
    ];
    let mut command = world.command(&words);
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut progress = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut seen = Vec::new();
    for claim in ["data-pg-0-wait", "data-pg-1-wait"] {
        seen.extend(progress.next().map(Result::unwrap));
        let event = json!({"apiVersion": "events.k8s.io/v1", "kind": "Event",
            "metadata": {"name": format!("copying-{claim}"), "namespace": "shop"},
            "regarding": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": "shop",
                "name": claim},
            "type": "Normal", "reason": "CopyProgress", "action": "none", "note": "half\u{1b}[2J is copied",
            "reportingController": DRIVER, "reportingInstance": "router",
            "eventTime": "2026-11-22T10:00:00.000000Z"});
        world.put(event);
        seen.extend(progress.next().map(Result::unwrap));
        world.status(&format!("pvc/{claim}"), json!({"phase": "Bound"}));
    }
    let mut output = child.wait_with_output().unwrap();
    output.stderr = (seen.join("\n") + "\n").into_bytes();
    insta::assert_snapshot!("restore_waits", said(&words, &output));
    // A claim that another user has deleted is not waited for.
    world.remove_claim("shop", "data-pg-1-wait");
    world.volume("shop", "data-pg-1-wait", 1, 40, 1);
    let taken = world.says(&words);
    assert!(
        taken.contains("these claims of namespace shop exist: data-pg-1-wait"),
        "{taken}"
    );
}

/// With `--verify`, while a kubelet runs the pod: once it succeeds and the claims stay, once it fails and
/// they are deleted, and once it does not end.
fn copies_are_checked(world: &World) {
    let words = [
        "restore",
        "volumesnapshot/before-upgrade",
        "-n",
        "shop",
        "--suffix",
        "check",
        "--yes",
        "--verify",
        "pg_controldata /restored/data-pg-0",
        "--verify-image",
        "postgres:17",
        "--wait",
        "--timeout",
        "2m",
    ];
    let terminated = |code: i64, message: &str| {
        json!([{"name": "check", "image": "postgres:17", "imageID": "x", "ready": false, "restartCount": 0,
            "state": {"terminated": {"exitCode": code, "message": message}}}])
    };
    let waiting = json!({"phase": "Pending", "conditions": [
        {"type": "PodScheduled", "status": "False", "message": "no node has room\u{1b}[2J"}]});
    let good = [
        waiting,
        json!({"phase": "Running"}),
        json!({"phase": "Succeeded", "containerStatuses": terminated(0, "in production")}),
    ];
    let bad =
        [json!({"phase": "Failed", "containerStatuses": terminated(3, "torn\u{1b}[2J page")})];
    let discard = [&words[..], &["--discard", "--verify-user", "999"]].concat();
    let late = [&words[..words.len() - 1], &["1s"]].concat();
    let (text, pod) = checked(world, &words, &good);
    let mut all = vec![text, pod];
    all.push(pods(world));
    // Volumes that are created at once are on the nodes of their snapshots.
    let apart = [
        &["restore", "nightly-2", "-n", "shop", "--suffix", "apart"],
        &words[7..11],
        &["--dry-run", "--storage-class"],
    ]
    .concat();
    for class in ["at-once", "at-source", "slackwater"] {
        all.push(world.says(&[&apart[..], &[class]].concat()));
    }
    // A claim that was to stay is not deleted.
    all.push(world.says(&discard));
    world.remove_claim("shop", "data-pg-0-check");
    let (text, pod) = checked(world, &discard, &bad);
    all.extend([text, pod]);
    // The controller would let it go.
    world.remove_claim("shop", "data-pg-0-check");
    let (text, _) = checked(world, &late, &[]);
    all.extend([text, pods(world)]);
    world.remove_claim("shop", "data-pg-0-check");
    all.push(world.says(&[&discard[..], &["--dry-run"]].concat()));
    all.push(world.says(&words[..9]));
    insta::assert_snapshot!("restore_verifies", all.join("\n"));
}

fn pods(world: &World) -> String {
    let names = "jsonpath={.items[*].metadata.labels.app\\.kubernetes\\.io/name}";
    world
        .plane
        .kubectl(&["get", "pods", "-n", "shop", "-o", names])
}

/// A restore whose pod gets these states, and the parts of the pod that matter.
fn checked(world: &World, words: &[&str], states: &[Value]) -> (String, String) {
    let mut command = world.command(words);
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut progress = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut seen: Vec<_> = progress.next().into_iter().map(Result::unwrap).collect();
    let pods = world.plane.kubectl(&[
        "get",
        "pods",
        "-n",
        "shop",
        "-l",
        "app.kubernetes.io/name=slackwater-verify",
        "-o",
        "json",
    ]);
    let pods: Value = serde_json::from_str(&pods).unwrap();
    let pod = &pods["items"][0];
    let name = pod["metadata"]["name"].as_str().unwrap_or_default();
    for state in states {
        world.status(&format!("pod/{name}"), state.clone());
        seen.extend(progress.next().map(Result::unwrap));
    }
    seen.extend(progress.map(Result::unwrap));
    let mut output = child.wait_with_output().unwrap();
    output.stderr = (seen.join("\n") + "\n").into_bytes();
    let container = &pod["spec"]["containers"][0];
    let parts = json!({"command": container["command"], "mounts": container["volumeMounts"],
        "user": pod["spec"]["securityContext"], "context": container["securityContext"],
        "token": pod["spec"]["automountServiceAccountToken"], "volumes": pod["spec"]["volumes"],
        "limit": pod["spec"]["activeDeadlineSeconds"]});
    (said(words, &output), parts.to_string() + "\n")
}

fn under_the_names_of_a_stateful_set(world: &World) {
    for claim in ["data-pg-0", "data-pg-1"] {
        world.remove_claim("shop", claim);
    }
    let set = |more: Value| {
        let mut set = json!({"apiVersion": "apps/v1", "kind": "StatefulSet",
            "metadata": {"name": "pg", "namespace": "shop"},
            "spec": {"replicas": 3, "serviceName": "pg", "selector": {"matchLabels": {"app": "pg"}},
                "template": {"metadata": {"labels": {"app": "pg"}},
                    "spec": {"containers": [{"name": "postgres", "image": "x"}]}},
                "volumeClaimTemplates": [{"metadata": {"name": "data", "labels": {"tier": "db"}},
                    "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "slackwater",
                        "resources": {"requests": {"storage": "30Gi"}}}}]}});
        for (key, value) in more["metadata"].as_object().into_iter().flatten() {
            set["metadata"][key] = value.clone();
        }
        for (key, value) in more["spec"].as_object().into_iter().flatten() {
            set["spec"][key] = value.clone();
        }
        world.put(set);
    };
    let remove = || {
        world
            .plane
            .kubectl(&["delete", "-n", "shop", "statefulset/pg"])
    };
    let words = [
        "restore",
        "nightly-2",
        "-n",
        "shop",
        "--statefulset",
        "pg",
        "--yes",
    ];
    let mut all = Vec::new();
    let owner = json!([{"apiVersion": "postgresql.cnpg.io/v1", "kind": "Cluster", "name": "pg", "uid": "1"}]);
    for more in [
        json!({"metadata": {"ownerReferences": owner}}),
        json!({"spec": {"persistentVolumeClaimRetentionPolicy": {"whenScaled": "Delete", "whenDeleted": "Retain"}}}),
        json!({"spec": {"ordinals": {"start": 1}}}),
        json!({"spec": {"replicas": 2}}),
    ] {
        set(more);
        all.push(world.says(&words));
        remove();
    }
    set(json!({}));
    world.put(json!({"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "grows", "namespace": "shop"},
        "spec": {"maxReplicas": 9, "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "pg"}}}));
    all.push(world.says(&words));
    world.plane.kubectl(&["delete", "-n", "shop", "hpa/grows"]);
    all.push(world.says(&words));
    let scale = |replicas: &str| {
        let patch = format!("{{\"spec\":{{\"replicas\":{replicas}}}}}");
        world.plane.kubectl(&[
            "patch",
            "-n",
            "shop",
            "statefulset/pg",
            "--type=merge",
            "-p",
            &patch,
        ]);
    };
    scale("0");
    // The pod of the shop, which waits for its claim.
    all.push(world.says(&words));
    world
        .plane
        .kubectl(&["delete", "-n", "shop", "pod/pg-0", "--force"]);
    // One of its own that is not gone yet.
    let uid = "jsonpath={.metadata.uid}";
    let uid = world
        .plane
        .kubectl(&["get", "-n", "shop", "statefulset/pg", "-o", uid]);
    let owner = json!([{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "pg", "uid": uid}]);
    world.put(json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "pg-7", "namespace": "shop", "ownerReferences": owner},
        "spec": {"containers": [{"name": "postgres", "image": "x"}]}}));
    all.push(world.says(&words));
    world
        .plane
        .kubectl(&["delete", "-n", "shop", "pod/pg-7", "--force"]);
    all.push(world.says(&[&words[..6], &["--dry-run"]].concat()));
    // The class of the claim that is gone has no default: the template's is used.
    all.push(world.says(&words));
    all.push(world.says(&words));
    all.push(claims(world));
    let copy = [
        "restore",
        "nightly-2",
        "-n",
        "shop",
        "--statefulset",
        "pg",
        "--suffix",
        "copy",
        "--yes",
    ];
    // A running StatefulSet does not disturb a copy.
    scale("2");
    all.push(world.says(&copy));
    all.push(world.says(&[
        "restore",
        "claimless",
        "-n",
        "shop",
        "--statefulset",
        "pg",
        "--yes",
    ]));
    insta::assert_snapshot!("restore_to_a_stateful_set", all.join("\n"));
}
