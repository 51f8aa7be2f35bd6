//! Commands that change objects.

use serde_json::{Value, json};

use crate::fixture::{POOLS, World, days_ago, id, without_suffix};

#[test]
fn changes_are_planned_permitted_and_confirmed_first() {
    let Some(world) = World::start("changes with kubectl slackwater") else {
        return;
    };
    world.fill();
    world.user_of_shop();
    let node = |name: &str| json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}});
    world.put(node("node-1"));
    world.put(node("node-2"));
    pools(&world);
    orphans(&world);
    moves(&world);
}

/// Orphans as the controller lists them in the status of two pools.
fn orphans(world: &World) {
    let [first, second, _] = POOLS;
    let orphan = |pool: usize, n: u8, kind: &str, more: Value| {
        let mut one = json!({"id": id(pool, n), "kind": kind, "since": days_ago(4)});
        let more = more.as_object().cloned().unwrap_or_default();
        one.as_object_mut().unwrap().extend(more);
        one
    };
    let volume = orphan(
        0,
        91,
        "Volume",
        json!({"message": "its pool\u{1b}[31m was moved"}),
    );
    let member = orphan(0, 92, "Snapshot", json!({"group": "group-7"}));
    let due = orphan(1, 93, "Volume", json!({"deleteAt": "2026-11-30T12:00:00Z"}));
    for (pool, count, listed, requested) in [
        (first, 7, json!([volume, member]), json!(null)),
        (second, 1, json!([due]), json!([id(1, 93)])),
    ] {
        let orphans = json!({"checked": "2026-11-27T00:00:00Z", "count": count, "listed": listed});
        world.status(&format!("pool/{pool}"), json!({"orphans": orphans}));
        let spec = json!({"spec": {"deleteOrphans": requested}}).to_string();
        world
            .plane
            .kubectl(&["patch", "pool", pool, "--type=merge", "-p", &spec]);
    }
    let (a, b, c) = (id(0, 91), id(0, 92), id(1, 93));
    let said = steps(
        world,
        &["pools"],
        &[
            &["orphans"],
            &["orphans", "-o", "name"],
            &["orphans", "--as", "dev"],
            &["orphans", "--delete", &a, "absent"],
            &["orphans", "--delete", &a, &b],
            &["orphans", "--delete", &a, &b, "--yes", "--as", "dev"],
            &["orphans", "--delete", &a, &b, "--dry-run"],
            &["orphans", "--delete", &a, &b, "--yes"],
            &["orphans", "--delete", &a, "--yes"],
            &["orphans", "--keep", &c, &b, "--yes"],
            &["orphans", "--keep", &c, "--yes"],
            &["orphans", "--keep", &a, "--yes"],
        ],
    );
    insta::assert_snapshot!("orphans", said);
}

/// Runs commands, and reports what is stored after each.
pub fn steps(world: &World, resource: &[&str], commands: &[&[&str]]) -> String {
    let mut all = Vec::new();
    for words in commands {
        let said = world.says(words);
        let stored = world.plane.kubectl(
            &[
                &["get", "-o", "jsonpath={range .items[*]}{.spec}{'\\n'}{end}"],
                resource,
            ]
            .concat(),
        );
        all.push(format!("{said}stored:\n{stored}"));
    }
    all.join("\n")
}

fn pools(world: &World) {
    let [served, _, away] = POOLS;
    let of = |pool: &str, commands: &[&[&str]]| {
        let only = format!("metadata.name={pool}");
        steps(world, &["pools", "--field-selector", &only], commands)
    };
    let lost = of(
        away,
        &[
            &["pool", "lose", "default", "--reason", "x"],
            &["pool", "lose", "absent", "--reason", "x"],
            &["pool", "lose", "node-3/default"],
            &["pool", "lose", "node-3/default", "--reason", "disk burnt"],
            &[
                "pool",
                "lose",
                "node-3/default",
                "--reason",
                "disk burnt",
                "--dry-run",
            ],
            &[
                "pool",
                "lose",
                "node-3/default",
                "--reason",
                "disk burnt",
                "--yes",
                "--as",
                "dev",
            ],
            &[
                "pool",
                "lose",
                "node-3/default",
                "--reason",
                "disk burnt",
                "--yes",
            ],
            &[
                "pool",
                "lose",
                "node-3/default",
                "--reason",
                "disk burnt",
                "--yes",
            ],
            &["pool", "evacuate", away, "--yes"],
            &["pool", "hand-over", away, "--to-node", "node-1", "--yes"],
            &["pool", "lose", away, "--undo"],
            &["pool", "lose", away, "--undo", "--yes"],
            &["pool", "hand-over", away, "--to-node", "absent", "--yes"],
            &["pool", "hand-over", away, "--to-node", "node-1", "--yes"],
        ],
    );
    insta::assert_snapshot!("pool_lose", lost);
    let evacuated = of(
        served,
        &[
            &["pool", "lose", "node-1/default", "--reason", "x", "--yes"],
            &["pool", "lose", "node-1/default", "--reason", "x", "--force"],
            &["pool", "evacuate", "node-1/default"],
            &[
                "pool",
                "evacuate",
                "node-1/default",
                "--yes",
                "--wait",
                "--timeout",
                "1s",
            ],
            &["pool", "evacuate", "node-1/default", "--undo", "--yes"],
        ],
    );
    insta::assert_snapshot!("pool_evacuate", evacuated);
    may_list_and_not_patch(world);
}

/// Missing permissions are listed for a user who may see pools and not change them.
fn may_list_and_not_patch(world: &World) {
    world.plane.kubectl(&[
        "create",
        "clusterrole",
        "looks",
        "--verb=get,list",
        "--resource=pools.slackwater.dev,volumemoves.slackwater.dev",
    ]);
    world.plane.kubectl(&[
        "create",
        "clusterrolebinding",
        "looks",
        "--clusterrole=looks",
        "--user=dev",
    ]);
    let commands: [&[&str]; 2] = [
        &["pool", "evacuate", "node-1/default", "--yes", "--as", "dev"],
        &[
            "move",
            "data-pg-0",
            "-n",
            "shop",
            "--to-node",
            "node-2",
            "--yes",
            "--as",
            "dev",
        ],
    ];
    let said = commands.map(|words| world.says(words)).join("\n");
    insta::assert_snapshot!("missing_permissions", said);
}

fn moves(world: &World) {
    let text = steps(
        world,
        &["volumemoves", "-n", "shop"],
        &[
            &["move", "data-pg-0", "-n", "shop"],
            &["move", "data-pg-0", "-n", "shop", "--to-node", "node-2"],
            &[
                "move",
                "data-pg-0",
                "-n",
                "shop",
                "--to-node",
                "node-2",
                "--dry-run",
            ],
            &[
                "move",
                "data-pg-0",
                "-n",
                "shop",
                "--to-node",
                "node-1",
                "--yes",
            ],
            &[
                "move",
                "data-pg-0",
                "-n",
                "shop",
                "--to-node",
                "absent",
                "--yes",
            ],
            &[
                "move",
                "cache",
                "-n",
                "shop",
                "--to-node",
                "node-2",
                "--yes",
            ],
            &[
                "move",
                "foreign",
                "-n",
                "shop",
                "--to-node",
                "node-2",
                "--yes",
            ],
            &[
                "move",
                "data-pg-0",
                "-n",
                "shop",
                "--to-pool",
                POOLS[1],
                "--keep-source",
                "soon",
                "--yes",
            ],
        ],
    );
    insta::assert_snapshot!("move_refused", without_suffix(&text, "data-pg-0-"));
    let done = [
        json!({"phase": "Copying", "to": {"node": "node-2"}, "bytesDone": 1 << 30, "bytesTotal": 20u64 << 30}),
        json!({"phase": "Copying", "bytesDone": 11u64 << 30}),
        json!({"phase": "Waiting", "message": "pod shop/pg-0 uses it\u{1b}[2J"}),
        json!({"phase": "Switched", "message": "its PersistentVolume is exchanged"}),
        json!({"phase": "Switched", "message": "", "stillMs": 1234, "switchedAt": "2026-11-22T10:00:00Z"}),
    ];
    let text = followed(world, "data-pg-0", &done);
    insta::assert_snapshot!("move_done", text);
    let undone = [json!({"phase": "Aborted", "message": "the pool of node-2 has no room"})];
    let text = followed(world, "data-pg-1", &undone);
    insta::assert_snapshot!("move_undone", text);
}

/// A move with `--wait`, while its controller writes these parts of the status.
fn followed(world: &World, claim: &str, states: &[Value]) -> String {
    let to = if claim == "data-pg-1" {
        "node-1"
    } else {
        "node-2"
    };
    let words = [
        "move",
        claim,
        "-n",
        "shop",
        "--to-node",
        to,
        "--yes",
        "--wait",
    ];
    let filter = format!("@.spec.claim==\"{claim}\"");
    world.followed(&words, ("volumemoves", &filter), states)
}
