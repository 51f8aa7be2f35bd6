//! Orphans get objects again: with a command that is killed at any request, with others that do the same at
//! the same time, and with a real API server.

use std::sync::{Arc, Mutex};

use http::Method;
use k8s_openapi::jiff::Timestamp;
use kubectl_slackwater::cli::adopt::AdoptArguments;
use kubectl_slackwater::cluster::Cluster;
use kubectl_slackwater::failure::Result;
use kubectl_slackwater::orphans::adopt::{complete, read_adoption};
use serde_json::{Value, json};

use crate::across::READER;
use crate::fixture::{DRIVER, POOLS, World, days_ago, id};
use crate::simulated_server::{Cut, Server, Shared, client, requests};
use crate::transfers::{cuts, place};

const POOL_PATH: &str = "/apis/slackwater.dev/v1alpha1/pools/11111111-2222-4333-8444-000000000001";
const OWN: &str = "adopted-00000000-0000-4000-8000-000000000091";
const GIB: i64 = 1 << 30;

fn now() -> Timestamp {
    "2026-11-27T12:00:00Z".parse().unwrap()
}

fn orphans(listed: Value) -> Value {
    json!({"checked": now().to_string(), "count": 1, "listed": listed})
}

/// A pool with an orphan of a kind.
fn server(kind: &str) -> Shared {
    let mut server = Server::default();
    let volume = json!({"sizeBytes": GIB, "fileSystem": "ext4"});
    let orphan = json!({"id": id(0, 91), "kind": kind, "since": days_ago(1), "volume": volume});
    server.put(
        POOL_PATH,
        json!({"metadata": {"name": POOLS[0], "labels": {"slackwater.dev/driver": DRIVER}},
            "spec": {},
            "status": {"node": "node-1", "name": "fast", "health": "Healthy", "home": "home-1",
                "orphans": orphans(json!([orphan]))}}),
    );
    Arc::new(Mutex::new(server))
}

fn arguments(kind: &str) -> AdoptArguments {
    let own = Some(place("shop"));
    let is_volume = kind == "Volume";
    AdoptArguments {
        adopt: Some(id(0, 91)),
        new_claim: own.clone().filter(|_| is_volume),
        new_snapshot: own.filter(|_| !is_volume),
        ..AdoptArguments::default()
    }
}

/// One run of the command, which ends where the connection ends. `then` is what happens between the plan and
/// the first change.
fn run(
    server: &Shared,
    cut: Cut,
    arguments: &AdoptArguments,
    then: impl FnOnce(&mut Server),
) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.unwrap().block_on(async {
        let cluster = Cluster::with_client(client(server, cut), "shop", DRIVER);
        let (planned, _) = read_adoption(&cluster, arguments, now()).await?;
        then(&mut server.lock().unwrap());
        complete(&cluster, arguments, &planned, now()).await
    })
}

/// The objects of the orphan: their paths.
fn paths(kind: &str) -> [String; 2] {
    let snapshots = "/apis/snapshot.storage.k8s.io/v1";
    match kind {
        "Volume" => [Server::volume_path(OWN), Server::claim_path("shop", "data")],
        _ => [
            format!("{snapshots}/volumesnapshotcontents/{OWN}"),
            format!("{snapshots}/namespaces/shop/volumesnapshots/data"),
        ],
    }
}

#[track_caller]
fn is_adopted(server: &Shared, kind: &str, context: &str) {
    let mut server = server.lock().unwrap();
    server.tick();
    server.tick();
    assert!(server.broken.is_empty(), "{context}: {server:?}");
    let [owner, user] = paths(kind);
    let objects: Vec<_> = server.objects.keys().cloned().collect();
    let mut expected = vec![owner.clone(), user.clone(), POOL_PATH.to_string()];
    expected.sort();
    assert_eq!(objects, expected, "{context}");
    let (owner, user) = (&server.objects[&owner], &server.objects[&user]);
    let reference = match kind {
        "Volume" => &owner["spec"]["claimRef"],
        _ => &owner["spec"]["volumeSnapshotRef"],
    };
    assert_eq!(reference["uid"], user["metadata"]["uid"], "{context}");
    let is_bound = user["status"]["phase"] == "Bound" || user["status"]["readyToUse"] == true;
    assert!(is_bound, "{context}: {user}");
}

#[test]
fn an_adoption_that_is_killed_at_any_request_is_completed_by_the_next_one() {
    for kind in ["Volume", "Snapshot"] {
        let arguments = arguments(kind);
        let whole = server(kind);
        run(&whole, Cut::Never, &arguments, |_| {}).unwrap();
        is_adopted(&whole, kind, "whole");
        assert_eq!(whole.lock().unwrap().changes.len(), 2, "{kind}");
        for cut in cuts(requests(&whole)) {
            // The controllers run or do not run between the two, and so does the next check of orphans.
            for ticks in 0..4 {
                let server = server(kind);
                let first = run(&server, cut, &arguments, |_| {});
                let context = format!("{kind} {cut:?} {ticks}: {first:?}");
                let mut between = server.lock().unwrap();
                (0..ticks).for_each(|_| between.tick());
                if between.objects.contains_key(&paths(kind)[0]) && ticks > 0 {
                    let mut pool = between.objects[POOL_PATH].clone();
                    pool["status"]["orphans"] = orphans(json!([]));
                    between.put(POOL_PATH, pool);
                }
                drop(between);
                run(&server, Cut::Never, &arguments, |_| {})
                    .unwrap_or_else(|error| panic!("{context}: {error:?}"));
                is_adopted(&server, kind, &context);
            }
        }
    }
}

/// A PersistentVolume of another administrator.
fn volume(name: &str, handle: &str, claim: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {
        "csi": {"driver": DRIVER, "volumeHandle": handle},
        "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"],
        "volumeMode": "Filesystem", "storageClassName": "slackwater",
        "persistentVolumeReclaimPolicy": "Retain",
        "claimRef": {"namespace": "shop", "name": claim}}})
}

#[test]
fn what_has_changed_since_the_plan_is_noticed() {
    let changed = |then: fn(&mut Server), why: &str| {
        let server = server("Volume");
        let failure = run(&server, Cut::Never, &arguments("Volume"), then).unwrap_err();
        assert!(failure.message.contains(why), "{}", failure.message);
        let server = server.lock().unwrap();
        assert!(server.changes.is_empty(), "{:?}", server.changes);
    };
    changed(
        |server| {
            let mut pool = server.objects[POOL_PATH].clone();
            pool["spec"]["deleteOrphans"] = json!([id(0, 91)]);
            server.put(POOL_PATH, pool);
        },
        "--keep",
    );
    changed(
        |server| {
            let mut pool = server.objects[POOL_PATH].clone();
            pool["status"]["orphans"]["listed"][0]["volume"]["sizeBytes"] = json!(2 * GIB);
            server.put(POOL_PATH, pool);
        },
        "has changed since the plan",
    );
    changed(
        |server| {
            let path = Server::volume_path("pvc-1");
            server.put(&path, volume("pvc-1", &id(0, 91), "data"));
        },
        "PersistentVolume pvc-1 names it",
    );
    changed(
        |server| {
            let claim = json!({"metadata": {"name": "data", "namespace": "shop"}, "spec": {}});
            server.put(&Server::claim_path("shop", "data"), claim);
        },
        "PersistentVolumeClaim shop/data exists",
    );
}

/// A provisioner would give them to it, too.
#[test]
fn a_volume_gets_the_mount_options_of_its_class() {
    for (fs, expected) in [("ext4", json!(["noatime"])), ("", Value::Null)] {
        let server = server("Volume");
        {
            let mut server = server.lock().unwrap();
            let mut pool = server.objects[POOL_PATH].clone();
            pool["status"]["orphans"]["listed"][0]["volume"]["fileSystem"] = json!(fs);
            server.put(POOL_PATH, pool);
            let class = json!({"metadata": {"name": "slackwater"}, "provisioner": DRIVER,
                "mountOptions": ["noatime"]});
            let path = "/apis/storage.k8s.io/v1/storageclasses/slackwater";
            server.put(path, class);
        }
        run(&server, Cut::Never, &arguments("Volume"), |_| {}).unwrap();
        let server = server.lock().unwrap();
        let volume = &server.objects[&paths("Volume")[0]];
        assert_eq!(volume["spec"]["mountOptions"], expected, "{fs:?}");
    }
}

/// Both have seen no PersistentVolume. A volume with two of them could be used through both.
#[test]
fn of_two_adoptions_under_different_names_none_creates_a_claim() {
    let server = server("Volume");
    server.lock().unwrap().before = Some(|server, method, path| {
        if *method == Method::POST && path == "/api/v1/persistentvolumes" {
            let path = Server::volume_path("other");
            server.put(&path, volume("other", &id(0, 91), "other"));
        }
    });
    let failure = run(&server, Cut::Never, &arguments("Volume"), |_| {}).unwrap_err();
    let why = format!(
        "several PersistentVolumes name it, of which all but one must be deleted: {OWN}, other"
    );
    assert!(failure.message.contains(&why), "{}", failure.message);
    let server = server.lock().unwrap();
    assert!(!server.objects.contains_key(&paths("Volume")[1]));
}

/// The same command runs twice at the same time.
#[test]
fn of_two_equal_adoptions_each_completes_the_other() {
    let server = server("Volume");
    server.lock().unwrap().before = Some(|server, method, path| {
        let (own, claim) = (Server::volume_path(OWN), Server::claim_path("shop", "data"));
        if *method == Method::POST && path == "/api/v1/persistentvolumes" {
            server.put(&own, volume(OWN, &id(0, 91), "data"));
        } else if *method == Method::POST {
            let claim_of = json!({"metadata": {"name": "data", "namespace": "shop"},
                "spec": {"volumeName": OWN, "accessModes": ["ReadWriteOnce"],
                    "storageClassName": "slackwater", "resources": {"requests": {"storage": "1Gi"}}}});
            server.put(&claim, claim_of);
        }
    });
    run(&server, Cut::Never, &arguments("Volume"), |_| {}).unwrap();
    server.lock().unwrap().before = None;
    is_adopted(&server, "Volume", "two at the same time");
}

/// The object of another handle has the name in the last moment.
#[test]
fn an_object_of_the_name_with_another_handle_is_refused() {
    let server = server("Volume");
    server.lock().unwrap().before = Some(|server, method, path| {
        if *method == Method::POST && path == "/api/v1/persistentvolumes" {
            let path = Server::volume_path(OWN);
            server.put(&path, volume(OWN, &id(0, 92), "data"));
        }
    });
    let failure = run(&server, Cut::Never, &arguments("Volume"), |_| {}).unwrap_err();
    let why = format!("PersistentVolume {OWN} exists, and is of something else");
    assert!(failure.message.contains(&why), "{}", failure.message);
    let server = server.lock().unwrap();
    assert!(!server.objects.contains_key(&paths("Volume")[1]));
}

#[test]
fn orphans_get_their_objects_from_a_real_api_server() {
    let Some(world) = World::start("adoptions with kubectl slackwater") else {
        return;
    };
    let none = world.says(&["orphans", "--adopt", &id(0, 91), "--claim", "shop/data"]);
    world.fill();
    world.user_of_shop();
    for (name, provisioner) in [("slackwater", DRIVER), ("other", "csi.example.org")] {
        world.plane.apply(&format!(
            "{{apiVersion: storage.k8s.io/v1, kind: StorageClass, metadata: {{name: {name}}}, \
             provisioner: {provisioner}}}"
        ));
    }
    world.plane.apply(READER);
    fill(&world);
    let volume = |more: &[&str]| said(&world, 91, more);
    let claim = ["--claim", "shop/found"];
    let all = [
        none,
        world.says(&["orphans", "-o", "wide"]),
        refusals(&world),
        volume(&[]),
        volume(&[&claim[..], &["--dry-run"]].concat()),
        volume(&[&claim[..], &["--yes", "--as", "dev"]].concat()),
        volume(&[&claim[..], &["--yes", "--as", "reader"]].concat()),
        said(
            &world,
            92,
            &["--snapshot", "shop/found", "--yes", "--as", "reader"],
        ),
        volume(&[&claim[..], &["--yes"]].concat()),
        volume(&[&claim[..], &["--yes"]].concat()),
        volume(&["--claim", "shop/again", "--yes"]),
        said(
            &world,
            94,
            &[
                "--class",
                "",
                "--name",
                "raw",
                "--claim",
                "other/raw",
                "--yes",
            ],
        ),
        said(&world, 92, &["--snapshot", "shop/found", "--yes"]),
        said(&world, 92, &["--snapshot", "shop/found", "--yes"]),
        created(&world),
    ];
    insta::assert_snapshot!("adopt", all.join("\n"));
}

fn said(world: &World, n: u8, more: &[&str]) -> String {
    let id = id(0, n);
    world.says(&[&["orphans", "--adopt", &id], more].concat())
}

/// What the controller has found in two pools. The check of the second one is old.
fn fill(world: &World) {
    let orphan = |pool: usize, n: u8, kind: &str, more: Value| {
        let mut one = json!({"id": id(pool, n), "kind": kind, "since": days_ago(4)});
        let more = more.as_object().cloned().unwrap_or_default();
        one.as_object_mut().unwrap().extend(more);
        one
    };
    let volume =
        json!({"volume": {"sizeBytes": 10 * GIB, "fileSystem": "xfs", "claim": "shop/data"}});
    let raw = json!({"volume": {"sizeBytes": GIB}});
    let fenced = json!({"volume": {"sizeBytes": GIB, "problem": "VolumeRevert shop/x\u{1b}[31m replaces its content"}});
    let first = json!([
        orphan(0, 91, "Volume", volume.clone()),
        orphan(0, 92, "Snapshot", json!({"group": "group-7"})),
        orphan(0, 93, "Volume", json!({})),
        orphan(0, 94, "Volume", raw),
        orphan(0, 95, "Volume", fenced),
        orphan(0, 96, "Volume", volume.clone()),
    ]);
    let second = json!([orphan(1, 97, "Volume", volume.clone())]);
    let third = json!([orphan(2, 98, "Volume", volume)]);
    let recent = Timestamp::now().to_string();
    for (pool, checked, listed) in [
        (POOLS[0], recent.as_str(), first),
        (POOLS[1], "2026-01-02T03:04:05Z", second),
        (POOLS[2], recent.as_str(), third),
    ] {
        let orphans = json!({"checked": checked, "count": 6, "listed": listed});
        world.status(&format!("pool/{pool}"), json!({"orphans": orphans}));
    }
    let requested = json!({"spec": {"deleteOrphans": [id(0, 96)]}}).to_string();
    world
        .plane
        .kubectl(&["patch", "pool", POOLS[0], "--type=merge", "-p", &requested]);
}

fn refusals(world: &World) -> String {
    let claim = ["--claim", "shop/found", "--yes"];
    let of = |id: &str| world.says(&[&["orphans", "--adopt", id][..], &claim].concat());
    let with = |more: &[&str]| said(world, 91, &[more, &["--yes"]].concat());
    let all = [
        of("absent"),
        of("11111111-2222-4333-8444-000000000009.00000000-0000-4000-8000-000000000091"),
        // A PersistentVolume names it.
        of(&id(0, 1)),
        of(&id(0, 92)),
        of(&id(0, 93)),
        of(&id(0, 95)),
        of(&id(0, 96)),
        of(&id(0, 99)),
        of(&id(1, 97)),
        of(&id(2, 98)),
        with(&["--claim", "found"]),
        with(&["--claim", "shop/cache"]),
        with(&["--claim", "shop/found", "--class", "other"]),
        with(&["--claim", "shop/found", "--class", "absent"]),
        with(&["--claim", "shop/found", "--name", "pvc-1"]),
        // The API server refuses the claim, and so no PersistentVolume is created.
        with(&["--claim", "absent/found"]),
        with(&["--claim", "shop/found", "--delete", "x"]),
        with(&["--snapshot", "shop/found"]),
        said(world, 94, &["--yes"]),
    ];
    let stored = world
        .plane
        .kubectl(&["get", "persistentvolumes", "-o", "name"]);
    format!("{}\nstored:\n{stored}", all.join("\n"))
}

/// The objects that were created.
fn created(world: &World) -> String {
    let get = |words: &[&str]| {
        let text = world
            .plane
            .kubectl(&[&["get", "-o", "json"], words].concat());
        let object: Value = serde_json::from_str(&text).unwrap();
        let annotations = &object["metadata"]["annotations"];
        let shown = json!({"annotations": annotations, "spec": object["spec"]});
        format!(
            "{}\n{}",
            words.join(" "),
            serde_json::to_string_pretty(&shown).unwrap()
        )
    };
    let content = get(&[
        "volumesnapshotcontent",
        "adopted-00000000-0000-4000-8000-000000000092",
    ]);
    [
        get(&["persistentvolume", OWN]),
        get(&["persistentvolumeclaim", "-n", "shop", "found"]),
        get(&["persistentvolume", "raw"]),
        get(&["persistentvolumeclaim", "-n", "other", "raw"]),
        content,
        get(&["volumesnapshot", "-n", "shop", "found"]),
    ]
    .join("\n")
}
