//! Commands that change nothing.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use crate::fixture::{DRIVER, POOLS, World, days_ago, id, now_seen};

#[test]
fn commands_show_what_their_user_may_see() {
    let Some(world) = World::start("tables of kubectl slackwater") else {
        return;
    };
    assert_snapshot(
        &world,
        "empty_cluster",
        &[&["pools"], &["volumes"], &["snapshots"], &["status"]],
    );
    world.fill();
    world.user_of_shop();
    assert_snapshot(
        &world,
        "pools",
        &[
            &["pools"],
            &["pools", "-o", "wide"],
            &["pools", "-o", "name"],
        ],
    );
    assert_snapshot(
        &world,
        "volumes",
        &[
            &["volumes", "-n", "shop"],
            &["volumes", "-A", "-o", "wide"],
            &["volumes", "-n", "shop", "-l", "n=1", "--no-headers"],
            &["volumes", "-A", "-o", "name"],
        ],
    );
    assert_snapshot(
        &world,
        "snapshots",
        &[
            &["snapshots", "-n", "shop"],
            &["snapshots", "-A", "-o", "wide"],
            &["snapshots", "-n", "other"],
        ],
    );
    assert_snapshot(
        &world,
        "who",
        &[
            &["who", "data-pg-0", "-n", "shop"],
            &["who", "cache", "-n", "shop", "-o", "wide"],
            &["who", "foreign", "-n", "shop"],
            &["who", "absent", "-n", "shop"],
        ],
    );
    assert_snapshot(
        &world,
        "status",
        &[&["status", "-A"], &["status", "-n", "other"]],
    );
    assert_snapshot(
        &world,
        "one_namespace",
        &[
            &["pools", "--as", "dev"],
            &["volumes", "-n", "shop", "--as", "dev"],
            &["snapshots", "-n", "shop", "--as", "dev"],
            &["who", "data-pg-0", "-n", "shop", "--as", "dev"],
            &["status", "-n", "shop", "--as", "dev"],
            &["volumes", "-A", "--as", "dev"],
            &["volumes", "-n", "other", "--as", "dev"],
            &[
                "pools",
                "--as",
                "stranger",
                "--as-group",
                "system:masters",
                "-o",
                "name",
            ],
        ],
    );
    assert_snapshot(
        &world,
        "wrong_command_lines",
        &[
            &["polls"],
            &["pools", "-o", "xml"],
            &["who"],
            &["pools", "-w", "-o", "json"],
            &["status", "-o", "name"],
            &["pools", "--context", "absent"],
        ],
    );
    programs_get_values(&world);
    the_shell_gets_candidates(&world);
    another_release_is_noted(&world);
    what_stays_frozen_is_listed(&world);
    a_pool_that_fills_shows_when_it_is_full(&world);
    claims_that_grow_pools_are_named_as_far_as_their_user_may_see_them(&world);
    running_work_has_its_time_left(&world);
    a_watch_prints_lines_that_change(&world);
}

fn running_work_has_its_time_left(world: &World) {
    let gib = 1i64 << 30;
    let claim = |name: &str, reported: &str| {
        json!({"namespace": "shop", "name": name, "uid": name, "phase": "Populating",
            "message": "the pod fills\u{1b}[2J the volume", "receivedBytes": 3 * gib,
            "totalBytes": 5 * gib, "since": days_ago(5), "progressAt": reported,
            "progressSince": days_ago(4), "progressSinceBytes": gib})
    };
    let now = Timestamp::now().to_string();
    world.put(
        json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "HttpSource",
        "metadata": {"name": "base", "namespace": "shop"},
        "spec": {"url": "https://images.example/base.img", "unverified": true},
        "status": {"claims": [claim("vm-1", &now), claim("vm-2", &days_ago(2))]}}),
    );
    world.put(
        json!({"apiVersion": "slackwater.dev/v1alpha1", "kind": "VolumeRevert",
        "metadata": {"name": "back", "namespace": "shop"},
        "spec": {"groupSnapshot": "nightly-2", "deadline": "49h"},
        "status": {"phase": "Preparing", "members": [
            {"claim": "data-pg-0", "state": "Prepared", "handle": id(0, 1)},
            {"claim": "data-pg-1", "state": "Fenced", "handle": id(1, 2)}]}}),
    );
    let evacuate = json!({"spec": {"evacuate": true}}).to_string();
    let pool = format!("pools.slackwater.dev/{}", POOLS[0]);
    let words = ["patch", &pool, "--type=merge", "-p", &evacuate];
    world.plane.kubectl(&words);
    let status = json!({"evacuation": {"left": 3}, "conditions": [
        {"type": "Evacuated", "status": "False", "reason": "NotEmpty",
            "message": "in it are 3 volumes of claims", "lastTransitionTime": days_ago(3)}]});
    world.status(&pool, status);
    copies_run(world, &now);
    assert_snapshot(
        world,
        "running_work",
        &[&["status", "-A"], &["status", "-n", "other"]],
    );
    let output = world.command(&["status", "-A", "-o", "json"]).output();
    let status: Value = serde_json::from_slice(&output.unwrap().stdout).unwrap();
    let work = status["work"].as_array().unwrap();
    let find = |name: &str| {
        work.iter()
            .find(|one| one["what"].as_str().unwrap().contains(name))
    };
    let filled = find("claim shop/vm-1 ").unwrap();
    assert_eq!(filled["outdated"], false);
    let left = filled["secondsLeft"].as_i64().unwrap();
    assert_eq!(left / 86400, 4, "as long as the first half took");
    let restored = find("restore of claim other/new ").unwrap();
    assert_eq!(restored["resource"], "pools");
    assert_eq!(restored["secondsLeft"].as_i64().unwrap() / 86400, 4);
    let silent = find("claim shop/vm-2 ").unwrap();
    assert_eq!(
        (&silent["outdated"], &silent["secondsLeft"]),
        (&json!(true), &Value::Null)
    );
}

/// The pool of node-2 copies, and that of node-3 did when it was seen last.
fn copies_run(world: &World, now: &str) {
    let gib = 1i64 << 30;
    let copy = |kind: &str, id: String| {
        json!({"kind": kind, "id": id, "since": days_ago(4), "bytesDone": 3 * gib,
            "bytesTotal": 5 * gib, "bytesBefore": gib})
    };
    let mut restore = copy("Restore", id(1, 77));
    restore["claim"] = json!("other/new");
    restore["sourceNode"] = json!("node-1\u{1b}[2J");
    let running = [restore, copy("Revert", id(1, 2)), copy("Export", id(1, 78))];
    let pools = [1, 2].map(|n| format!("pools.slackwater.dev/{}", POOLS[n]));
    world.status(
        &pools[0],
        json!({"lastSeen": now, "copies": {"reportedAt": now, "running": running}}),
    );
    let running = [copy("Clone", id(2, 79))];
    world.status(
        &pools[1],
        json!({"copies": {"reportedAt": days_ago(3), "running": running}}),
    );
}

#[track_caller]
fn assert_snapshot(world: &World, name: &str, commands: &[&[&str]]) {
    let said: Vec<_> = commands.iter().map(|words| world.says(words)).collect();
    insta::assert_snapshot!(name, said.join("\n"));
}

fn programs_get_values(world: &World) {
    let run = |words: &[&str]| world.command(words).output().unwrap().stdout;
    let json_of = |words: &[&str]| serde_json::from_slice::<Value>(&run(words)).unwrap();
    let volumes = json_of(&["volumes", "-A", "-o", "json"]);
    let items = volumes["items"].as_array().unwrap();
    let one = items.iter().find(|it| it["claim"] == "data-pg-1").unwrap();
    assert_eq!(one["sizeBytes"], json!(20i64 << 30));
    assert_eq!(one["handle"], id(1, 2));
    assert_eq!(one["node"], "node-2");
    let status = json_of(&["status", "-A", "-o", "json"]);
    assert_eq!(status["lastCuts"][0]["level"], "application");
    assert_eq!(status["moves"][0]["phase"], "Copying");
    // What a terminal would act on is there for programs, and only escaped.
    let raw = String::from_utf8(run(&["status", "-A", "-o", "json"])).unwrap();
    assert!(!raw.contains('\u{1b}'), "{raw}");
    assert_eq!(status["warnings"][0]["note"], "hostile \u{1b}[2J text");
    let yaml = String::from_utf8(run(&["status", "-A", "-o", "yaml"])).unwrap();
    assert!(
        !yaml.contains('\u{1b}') && yaml.contains("level: application"),
        "{yaml}"
    );
}

fn what_stays_frozen_is_listed(world: &World) {
    assert_snapshot(
        world,
        "frozen_none",
        &[&["frozen"], &["frozen", "-o", "json"]],
    );
    let frozen = |id: String, since: i64, held: bool| json!({"id": id, "since": days_ago(since), "until": days_ago(1), "held": held});
    let pools = POOLS.map(|pool| format!("pool/{pool}"));
    let two = [frozen(id(0, 1), 1, true), frozen(id(0, 77), 4, false)];
    world.status(&pools[0], json!({"frozen": two}));
    let one = [frozen(id(1, 2), 2, false)];
    world.status(&pools[1], json!({"frozen": one, "lastSeen": days_ago(1)}));
    assert_snapshot(
        world,
        "frozen",
        &[
            &["frozen"],
            &["frozen", "-o", "wide"],
            &["frozen", "-o", "name"],
            &["frozen", "--as", "dev"],
            &["status", "-n", "shop"],
        ],
    );
    let json = world.command(&["frozen", "-o", "json"]).output().unwrap();
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["items"][1]["claim"], "shop/data-pg-1");
    assert_eq!(json["items"][1]["state"], "orphaned");
    for (pool, seen) in pools.iter().zip([now_seen(), days_ago(3)]) {
        world.status(pool, json!({"frozen": null, "lastSeen": seen}));
    }
}

fn a_pool_that_fills_shows_when_it_is_full(world: &World) {
    let pools = POOLS.map(|pool| format!("pool/{pool}"));
    let full = days_ago(-3);
    world.status(&pools[0], json!({"fullAt": full}));
    // What was known days ago.
    world.status(&pools[1], json!({"fullAt": full}));
    let status = world.says(&["status", "-n", "other"]);
    let of = |pool: &str| status.lines().find(|line| line.contains(pool)).unwrap();
    assert!(of("POOL").contains("FREE   FULL IN   LARGEST"), "{status}");
    assert!(of("node-1/default").contains("12 GiB   2d   "), "{status}");
    assert!(of("node-2/default").contains("80 GiB   -   "), "{status}");
    let json = world.command(&["pools", "-o", "json"]).output().unwrap();
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["items"][0]["fullAt"], full);
    for pool in &pools[..2] {
        world.status(pool, json!({"fullAt": null}));
    }
}

fn claims_that_grow_pools_are_named_as_far_as_their_user_may_see_them(world: &World) {
    let pools = POOLS.map(|pool| format!("pool/{pool}"));
    let images = |own: i64| {
        json!({"ownBytes": own << 30, "sharedBytes": 5i64 << 30, "snapshotBytes": 3i64 << 30,
            "undividedBytes": 0, "unmeasuredVolumes": 0, "measuredAt": days_ago(1)})
    };
    let grown =
        |id: String, gib: i64| json!({"id": id, "grownBytes": gib << 30, "since": days_ago(2)});
    let growth = |volumes: &[Value]| json!({"measuredAt": days_ago(1), "volumes": volumes});
    let hostile = "\u{1b}[2J".to_string();
    let first = [
        grown(id(0, 2), 9),
        grown(id(0, 1), 4),
        grown(hostile, 2),
        grown(id(0, 3), 1),
    ];
    let first = json!({"images": images(40), "growth": growth(&first)});
    world.status(&pools[0], first);
    world.status(
        &pools[1],
        json!({"images": images(7), "growth": growth(&[])}),
    );
    assert_snapshot(
        world,
        "growth",
        &[
            &["status", "-A"],
            &["status", "-n", "shop", "--as", "dev"],
            &["pools", "-o", "wide"],
        ],
    );
    let json = world
        .command(&["status", "-n", "shop", "-o", "json"])
        .output()
        .unwrap();
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    let volumes = &json["pools"][0]["growth"]["volumes"];
    assert_eq!(volumes[1]["claim"], "shop/data-pg-0", "{volumes}");
    assert_eq!(volumes[0]["claim"], "", "of another namespace: {volumes}");
    assert_eq!(json["pools"][0]["images"]["ownBytes"], 40i64 << 30);
    for pool in &pools[..2] {
        world.status(pool, json!({"images": null, "growth": null}));
    }
}

fn another_release_is_noted(world: &World) {
    let mut driver = json!({"apiVersion": "storage.k8s.io/v1", "kind": "CSIDriver",
        "metadata": {"name": DRIVER, "labels": {"app.kubernetes.io/version": "99.0.0"}}, "spec": {}});
    let noted = |words: &[&str]| {
        let output = world.command(words).output().unwrap();
        let remarks = String::from_utf8(output.stderr).unwrap();
        remarks.contains("note: the driver in the cluster is of release 99.0.0 and this plugin of")
    };
    // The label of something else.
    world.put(driver.clone());
    assert!(!noted(&["pools"]));
    world.plane.kubectl(&["delete", "csidriver", DRIVER]);
    driver["metadata"]["labels"]["app.kubernetes.io/name"] = json!("slackwater");
    world.put(driver);
    assert!(noted(&["pools"]));
    // A command that fails, and one that prints its plan.
    assert!(noted(&["who", "absent", "-n", "shop"]));
    assert!(noted(&["pool", "evacuate", "node-1/default"]));
    assert!(!noted(&["volumes", "-n", "shop", "--as", "dev"]));
    let json = world.command(&["pools", "-o", "json"]).output().unwrap();
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    let note = json["notes"][0].as_str().unwrap();
    assert!(
        note.contains("99.0.0") && note.contains(env!("CARGO_PKG_VERSION")),
        "{note}"
    );
    let own = format!("app.kubernetes.io/version={}", env!("CARGO_PKG_VERSION"));
    let words = ["label", "csidriver", DRIVER, "--overwrite", &own];
    world.plane.kubectl(&words);
    assert!(!noted(&["pools"]));
}

fn a_watch_prints_lines_that_change(world: &World) {
    let mut command = world.command(&["pools", "-w"]);
    let mut watch = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let mut next = || lines.next().unwrap().unwrap();
    // The heading and three pools.
    for word in ["POOL", "node-1/default", "node-3/default", "node-2/default"] {
        let line = next();
        assert!(line.starts_with(word), "{line}");
    }
    let name = format!("pool/{}", crate::fixture::POOLS[1]);
    world.status(&name, json!({"health": "NotServed"}));
    let line = next();
    assert!(
        line.starts_with("node-2/default") && line.contains("NotServed"),
        "{line}"
    );
    world.plane.kubectl(&["delete", &name]);
    assert_eq!(
        next(),
        format!("pool.slackwater.dev/{} deleted", crate::fixture::POOLS[1])
    );
    watch.kill().unwrap();
    watch.wait().unwrap();
}

fn the_shell_gets_candidates(world: &World) {
    let link = world.plane.path("kubectl_complete-slackwater");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_kubectl-slackwater"), &link).unwrap();
    let ask = |words: &[&str]| {
        let output = Command::new(&link)
            .args(words)
            .env("KUBECONFIG", world.plane.path("kubeconfig"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(ask(&["vol"]), "volumes\n:4\n");
    assert_eq!(
        ask(&["who", "-n", "shop", "data"]),
        "data-pg-0\ndata-pg-1\n:4\n"
    );
    assert_eq!(ask(&["who", "--namespace=other", ""]), "files\n:4\n");
    assert_eq!(ask(&["pool", "lose", "node-1"]), "node-1/default\n:4\n");
    assert_eq!(ask(&["volumes", "-n", "sh"]), "shop\n:4\n");
    assert_eq!(ask(&["pools", "--context", ""]), "x\n:4\n");
    assert_eq!(ask(&["pools", "--kubeconfig", ""]), ":0\n");
    // No cluster answers.
    assert_eq!(ask(&["who", "--kubeconfig", "/absent", ""]), ":4\n");
}
