//! Restores into another namespace: from wherever a command was killed, and with real controllers.

use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use clap::Parser;
use kubectl_slackwater::change::Progress;
use kubectl_slackwater::cli::{Cli, Command};
use kubectl_slackwater::cluster::Cluster;
use kubectl_slackwater::failure::Result;
use kubectl_slackwater::restore::cross_namespace::CrossNamespaceRestore;
use serde_json::json;

use crate::fixture::{DRIVER, LONG, POOLS, World, id, said, without_waits};
use crate::restores::CLASSES;
use crate::simulated_server::{Cut, Server, Shared, client, requests};

const SNAPSHOTS: &str = "/apis/snapshot.storage.k8s.io/v1";
const GROUPS: &str = "/apis/groupsnapshot.storage.k8s.io/v1";
pub const NAMES: [&str; 2] = ["data", "log"];

/// A group of two members on two nodes, whose claims are in use.
pub fn server() -> Shared {
    let mut server = Server::default();
    server.put(
        &format!("{GROUPS}/namespaces/shop/volumegroupsnapshots/nightly"),
        json!({"metadata": {"name": "nightly", "namespace": "shop", "uid": "group"},
            "status": {"readyToUse": true, "boundVolumeGroupSnapshotContentName": "content"}}),
    );
    let handles: Vec<_> = (0..2)
        .map(|n| json!({"snapshotHandle": id(n, 1)}))
        .collect();
    server.put(
        &format!("{GROUPS}/volumegroupsnapshotcontents/content"),
        json!({"metadata": {"name": "content"}, "spec": {"driver": DRIVER,
            "source": {"volumeHandles": ["a", "b"]},
            "volumeGroupSnapshotRef": {"name": "nightly", "namespace": "shop"}},
            "status": {"volumeSnapshotInfoList": handles}}),
    );
    for (n, claim) in NAMES.into_iter().enumerate() {
        let (name, content) = (format!("nightly-{claim}"), format!("content-{n}"));
        server.put(
            &format!("{SNAPSHOTS}/namespaces/shop/volumesnapshots/{name}"),
            json!({"metadata": {"name": name, "namespace": "shop", "uid": claim},
                "spec": {"source": {"persistentVolumeClaimName": claim}},
                "status": {"readyToUse": true, "restoreSize": "1Gi", "volumeGroupSnapshotName": "nightly",
                    "boundVolumeSnapshotContentName": content}}),
        );
        server.put(
            &format!("{SNAPSHOTS}/volumesnapshotcontents/{content}"),
            json!({"metadata": {"name": content}, "spec": {"driver": DRIVER,
                "volumeSnapshotRef": {"name": name, "namespace": "shop"}},
                "status": {"snapshotHandle": id(n, 1)}}),
        );
        server.put(
            &Server::claim_path("shop", claim),
            json!({"metadata": {"name": claim, "namespace": "shop", "labels": {"app": "pg"}},
                "spec": {"volumeName": format!("own-{claim}"), "accessModes": ["ReadWriteOnce"],
                    "storageClassName": "slackwater", "resources": {"requests": {"storage": "1Gi"}}},
                "status": {"phase": "Bound"}}),
        );
        let (pool, node) = (POOLS[n], format!("node-{n}"));
        server.put(
            &format!("/apis/slackwater.dev/v1alpha1/pools/{pool}"),
            json!({"metadata": {"name": pool}, "status": {"node": node}}),
        );
    }
    server.put(
        "/apis/storage.k8s.io/v1/storageclasses/slackwater",
        json!({"metadata": {"name": "slackwater"}, "provisioner": DRIVER,
            "volumeBindingMode": "WaitForFirstConsumer"}),
    );
    let namespace = json!({"metadata": {"name": "test"}});
    server.put("/api/v1/namespaces/test", namespace);
    Arc::new(Mutex::new(server))
}

const SETS: &str = "/apis/apps/v1/namespaces/test/statefulsets";

/// A StatefulSet in the other namespace, and its claims as those of which the snapshots were taken.
fn with_stateful_set(server: &Shared) {
    let template =
        |name| json!({"metadata": {"name": name}, "spec": {"storageClassName": "slackwater"}});
    let mut server = server.lock().unwrap();
    server.put(
        &format!("{SETS}/pg"),
        json!({"metadata": {"name": "pg", "namespace": "test", "uid": "set"},
            "spec": {"replicas": 0, "volumeClaimTemplates": [template("data"), template("log")]}}),
    );
    for claim in NAMES {
        let path = format!("{SNAPSHOTS}/namespaces/shop/volumesnapshots/nightly-{claim}");
        let snapshot = server.objects.get_mut(&path).unwrap();
        snapshot["spec"]["source"]["persistentVolumeClaimName"] = json!(format!("{claim}-pg-0"));
    }
}

#[test]
fn a_stateful_set_that_is_scaled_up_gets_none_of_the_claims() {
    let server = server();
    with_stateful_set(&server);
    // It is scaled up once the copies are there to be transferred.
    server.lock().unwrap().before = Some(|server, method, _| {
        if method == http::Method::POST && server.changes.len() == 1 {
            let set = server.objects.get_mut(&format!("{SETS}/pg")).unwrap();
            set["spec"]["replicas"] = json!(1);
        }
    });
    let said = run_with(&server, Cut::Never, 1, &["--statefulset", "pg"]);
    let said = said.unwrap_err().message;
    assert!(
        said.contains("StatefulSet test/pg has 1 replicas: scale it down first: kubectl scale statefulset pg -n test --replicas=0"),
        "{said}"
    );
    let changes = server.lock().unwrap().changes.len();
    assert_eq!(changes, 2, "nothing is transferred");
    // Scaled down again, it gets them.
    let set = &format!("{SETS}/pg");
    server.lock().unwrap().before = None;
    server.lock().unwrap().objects.get_mut(set).unwrap()["spec"]["replicas"] = json!(0);
    run_with(&server, Cut::Never, 1, &["--statefulset", "pg"]).unwrap();
    let server = server.lock().unwrap();
    for claim in NAMES {
        let new = &server.objects[&Server::claim_path("test", &format!("{claim}-pg-0"))];
        assert_eq!(new["status"]["phase"], "Bound");
    }
}

/// One run of the command, which ends where the connection ends. `ticks` is how often the controllers
/// run while the program waits.
fn run(server: &Shared, cut: Cut, ticks: usize) -> Result<String> {
    run_with(server, cut, ticks, &[])
}

pub fn run_with(server: &Shared, cut: Cut, ticks: usize, more: &[&str]) -> Result<String> {
    let words = ["x", "restore", "nightly", "--to-namespace", "test", "--yes"];
    let words = words.iter().chain(more);
    let Command::Restore(arguments) = Cli::parse_from(words).command else {
        panic!("another command")
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.unwrap().block_on(async {
        let cluster = Cluster::with_client(client(server, cut), "shop", DRIVER);
        let across = CrossNamespaceRestore::read(&cluster, &arguments, "test").await?;
        for _ in 0..20 {
            match across.advance().await? {
                Progress::Running(_) => (0..ticks).for_each(|_| server.lock().unwrap().tick()),
                Progress::Ended(result) => return result,
            }
        }
        assert_eq!(ticks, 0, "it does not end: {:?}", server.lock().unwrap());
        Ok("it goes on".into())
    })
}

#[track_caller]
pub fn has_arrived(server: &Shared, context: &str) {
    let mut server = server.lock().unwrap();
    // What is being deleted goes.
    server.tick();
    assert!(server.broken.is_empty(), "{context}: {server:?}");
    for claim in NAMES {
        let new = &server.objects[&Server::claim_path("test", claim)];
        assert_eq!(new["status"]["phase"], "Bound", "{context}");
        assert_eq!(new["metadata"]["labels"], json!({}), "{context}");
        let name = new["spec"]["volumeName"].as_str().unwrap();
        let volume = &server.objects[&Server::volume_path(name)];
        let handle = format!("nightly-{claim}");
        assert_eq!(volume["spec"]["csi"]["volumeHandle"], handle, "{context}");
        assert_eq!(
            volume["spec"]["claimRef"]["uid"], new["metadata"]["uid"],
            "{context}"
        );
        let policy = &volume["spec"]["persistentVolumeReclaimPolicy"];
        assert_eq!(policy, "Delete", "{context}");
        let annotations = &volume["metadata"]["annotations"];
        assert!(
            annotations["slackwater.dev/transfer"].is_null(),
            "{context}"
        );
        let own = &server.objects[&Server::claim_path("shop", claim)];
        assert!(own["metadata"]["deletionTimestamp"].is_null(), "{context}");
    }
    let count = |part: &str| server.objects.keys().filter(|it| it.contains(part)).count();
    assert_eq!(count("/persistentvolumes/"), 2, "{context}");
    assert_eq!(count("/persistentvolumeclaims/"), 4, "{context}");
}

/// All cuts of a run with this number of requests.
pub fn cuts(requests: usize) -> impl Iterator<Item = Cut> {
    (0..requests).flat_map(|at| [Cut::Before(at), Cut::After(at)])
}

#[test]
fn a_restore_into_another_namespace_that_is_killed_at_any_request_is_completed_by_the_next_one() {
    let whole = server();
    run(&whole, Cut::Never, 1).unwrap();
    has_arrived(&whole, "whole");
    let many = requests(&whole);
    // Two claims, and the five steps of each transfer.
    let changes = whole.lock().unwrap().changes.clone();
    assert_eq!(changes.len(), 12, "{changes:?}");
    for cut in cuts(many) {
        // The controllers run or do not run between the two.
        for ticks in 0..3 {
            let server = server();
            let first = run(&server, cut, 1);
            (0..ticks).for_each(|_| server.lock().unwrap().tick());
            let context = format!("{cut:?} {ticks}: {first:?}");
            run(&server, Cut::Never, 1).unwrap_or_else(|error| panic!("{context}: {error:?}"));
            has_arrived(&server, &context);
        }
    }
}

#[test]
fn a_restore_into_another_namespace_that_is_killed_twice_is_completed_too() {
    let whole = server();
    run(&whole, Cut::Never, 1).unwrap();
    let many = requests(&whole);
    for (n, first) in cuts(many).enumerate() {
        for second in cuts(many).skip(n % 101).step_by(101) {
            let server = server();
            for cut in [first, second, Cut::Never] {
                if run(&server, cut, 1).is_ok() {
                    break;
                }
                server.lock().unwrap().tick();
            }
            has_arrived(&server, &format!("{first:?} {second:?}"));
        }
    }
}

#[test]
fn no_transfer_begins_before_all_volumes_exist() {
    let server = server();
    server.lock().unwrap().before = Some(|server, method, path| {
        let is_transfer = method == http::Method::PATCH && path.contains("/persistentvolumes/");
        let bound = server.objects.iter().filter(|(path, claim)| {
            path.contains("/persistentvolumeclaims/restore-") && claim["status"]["phase"] == "Bound"
        });
        if is_transfer && server.changes.len() == 2 && bound.count() != 2 {
            server.broken.push("a transfer has begun".into());
        }
    });
    run(&server, Cut::Never, 1).unwrap();
    has_arrived(&server, "whole");
}

#[test]
fn claims_of_two_times_are_not_restored() {
    // One that was restored and used, and one that was deleted since.
    let arrived = server();
    run(&arrived, Cut::Never, 1).unwrap();
    let path = Server::claim_path("test", "log");
    arrived.lock().unwrap().objects.remove(&path);
    // A claim of another user, before the first step.
    let taken = server();
    let foreign = json!({"metadata": {"name": "log", "namespace": "test"}, "spec": {}});
    taken.lock().unwrap().put(&path, foreign);
    // A pod that would start with the first claim.
    let waiting = server();
    waiting.lock().unwrap().put(
        "/api/v1/namespaces/test/pods/pg-0",
        json!({"metadata": {"name": "pg-0", "namespace": "test"}, "spec": {"volumes": [
            {"name": "data", "persistentVolumeClaim": {"claimName": "log"}}]}}),
    );
    for (server, why, more) in [
        (
            arrived,
            "The remaining claims would be from a different point in time: test/log",
            0,
        ),
        (taken, "claim test/log exists", 0),
        (waiting, "pod test/pg-0 waits for the claim log", 2),
    ] {
        let before = server.lock().unwrap().changes.len();
        let said = run(&server, Cut::Never, 1).unwrap_err().message;
        assert!(said.contains(why), "{said}");
        let changes = server.lock().unwrap().changes.len();
        assert_eq!(changes, before + more, "{why}: nothing is transferred");
    }
}

#[test]
fn only_the_claims_of_this_restore_are_transferred() {
    let begun = server();
    assert_eq!(run(&begun, Cut::Never, 0).unwrap(), "it goes on");
    let said = run_with(&begun, Cut::Never, 1, &["--suffix", "copy"]);
    let said = said.unwrap_err().message;
    assert!(said.contains("becomes test/data"), "{said}");
    let foreign = server();
    foreign.lock().unwrap().put(
        &Server::claim_path("shop", "restore-data"),
        json!({"metadata": {"name": "restore-data", "namespace": "shop"}, "spec": {},
            "status": {"phase": "Bound"}}),
    );
    let said = run(&foreign, Cut::Never, 1).unwrap_err().message;
    assert!(said.contains("was not created by this command"), "{said}");
}

#[test]
fn a_node_that_the_provisioner_gives_up_is_not_chosen_again_and_again() {
    let server = server();
    server.lock().unwrap().before = Some(|server, _, _| {
        let path = Server::claim_path("shop", "restore-log");
        if let Some(claim) = server.objects.get_mut(&path) {
            let annotations = claim["metadata"]["annotations"].as_object_mut().unwrap();
            annotations.remove("volume.kubernetes.io/selected-node");
        }
    });
    let said = run(&server, Cut::Never, 1).unwrap_err().message;
    assert!(said.contains("cannot be created on node node-1"), "{said}");
    // The next run tries it again.
    server.lock().unwrap().before = None;
    run(&server, Cut::Never, 1).unwrap();
    has_arrived(&server, "after room was made");
}

#[test]
fn a_volume_that_needs_a_pod_is_refused_where_its_node_is_not_known() {
    let server = server();
    let pool = format!("/apis/slackwater.dev/v1alpha1/pools/{}", POOLS[1]);
    server.lock().unwrap().objects.remove(&pool);
    let said = run(&server, Cut::Never, 1).unwrap_err().message;
    assert!(
        said.contains("the node of VolumeSnapshot nightly-log is not known"),
        "{said}"
    );
}

#[test]
fn snapshots_are_restored_into_another_namespace() {
    let Some(mut world) = World::start("restores into another namespace with kubectl slackwater")
    else {
        return;
    };
    world.fill();
    world.plane.apply(CLASSES);
    world.plane.apply(READER);
    let words = ["restore", "nightly-2", "-n", "shop", "--to-namespace"];
    let says = |more: &[&str]| world.says(&[&words[..], more].concat());
    let mut all = vec![
        says(&["shop"]),
        says(&["absent"]),
        says(&["other", "--statefulset", "pg"]),
        says(&["other", "--as", "reader"]),
        says(&["other"]),
        says(&["other", "--dry-run", "-o", "wide"]),
        world.says(&[
            "restore",
            "volumesnapshot/before-upgrade",
            "-n",
            "shop",
            "--to-namespace",
            "other",
            "--suffix",
            "old",
            "--dry-run",
            "--storage-class",
            "at-once",
        ]),
    ];
    world.put(json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data-pg-1", "namespace": "other"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}));
    all.push(says(&["other"]));
    world.remove_claim("other", "data-pg-1");
    world.put(json!({"apiVersion": "apps/v1", "kind": "StatefulSet",
        "metadata": {"name": "pg", "namespace": "other"},
        "spec": {"replicas": 0, "serviceName": "pg", "selector": {"matchLabels": {"app": "pg"}},
            "template": {"metadata": {"labels": {"app": "pg"}}, "spec": {"containers": [
                {"name": "c", "image": "i"}]}},
            "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": {
                "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "20Gi"}}}}]}}));
    let for_set = ["other", "--statefulset", "pg"];
    for replicas in [1, 0] {
        let replicas = format!("--replicas={replicas}");
        let words = ["scale", "statefulset/pg", "-n", "other", &replicas];
        world.plane.kubectl(&words);
        all.push(says(&for_set));
    }
    all.push(says(&[&for_set[..], &["--suffix", "copy"]].concat()));
    all.push(world.says(&[
        "restore",
        "volumesnapshotcontent/x",
        "--to-namespace",
        "other",
        "--statefulset",
        "pg",
    ]));
    let check = ["--verify", "true", "--verify-image", "x"];
    for more in [&[][..], &["--discard"]] {
        all.push(says(&[&["other", "--dry-run"][..], &check, more].concat()));
    }
    let content = [
        "restore",
        "volumesnapshotcontent/x",
        "--to-namespace",
        "other",
    ];
    all.push(world.says(&[&content[..], &check].concat()));
    world.plane.start_controllers();
    let words = [&words[..], &for_set, &["--yes"]].concat();
    let mut child = world.command(&words);
    let child = child.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = child.spawn().unwrap();
    let mut uids = provision(&world);
    let output = child.wait_with_output().unwrap();
    all.push(said(&words, &output));
    all.push(world.says(&words));
    let columns =
        "-o=custom-columns=:.metadata.name,:.status.phase,:.metadata.labels,:.spec.volumeName";
    all.push(
        world
            .plane
            .kubectl(&["get", "pvc", "-n", "other", "--no-headers", columns]),
    );
    let former = world
        .plane
        .kubectl(&["get", "pvc", "-n", "shop", "-o", "name"]);
    assert!(!former.contains("restore-"), "{former}");
    let mut text = all.join("\n");
    uids.push(uid_of(&world, "before-upgrade"));
    for (n, uid) in uids.iter().enumerate() {
        text = text.replace(uid, &format!("UID-{n}"));
    }
    insta::assert_snapshot!("restore_to_another_namespace", without_waits(&text));
}

fn uid_of(world: &World, snapshot: &str) -> String {
    let uid = "jsonpath={.metadata.uid}";
    let words = ["get", "volumesnapshot", snapshot, "-n", "shop", "-o", uid];
    world.plane.kubectl(&words)
}

/// Creates the volumes of the claims that a restore creates, as the provisioner does once a node is
/// selected. Returns the UIDs of the snapshots.
fn provision(world: &World) -> Vec<String> {
    let mut uids = Vec::new();
    for (n, name) in ["nightly-2-a", "nightly-2-b"].into_iter().enumerate() {
        let uid = uid_of(world, name);
        let claim = format!("restore-{uid}");
        let start = Instant::now();
        let node =
            "jsonpath={.items[*].metadata.annotations.volume\\.kubernetes\\.io/selected-node}";
        let field = format!("metadata.name={claim}");
        let words = [
            "get",
            "pvc",
            "-n",
            "shop",
            "--field-selector",
            &field,
            "-o",
            node,
        ];
        while world.plane.kubectl(&words) != format!("node-{}", n + 1) {
            assert!(start.elapsed() < LONG, "claim {claim} was not created");
        }
        world.put(json!({"apiVersion": "v1", "kind": "PersistentVolume",
            "metadata": {"name": format!("pv-of-{name}")},
            "spec": {"accessModes": ["ReadWriteOnce"], "storageClassName": "slackwater",
                "capacity": {"storage": "20Gi"}, "persistentVolumeReclaimPolicy": "Delete",
                "claimRef": {"namespace": "shop", "name": claim},
                "csi": {"driver": DRIVER, "volumeHandle": id(n, 60)}}}));
        uids.push(uid);
    }
    uids
}

/// A user who may read everything, and change nothing.
pub const READER: &str = "apiVersion: rbac.authorization.k8s.io/v1\n\
    kind: ClusterRole\n\
    metadata: {name: reader}\n\
    rules:\n\
    - {apiGroups: ['*'], resources: ['*'], verbs: [get, list]}\n\
    ---\n\
    apiVersion: rbac.authorization.k8s.io/v1\n\
    kind: ClusterRoleBinding\n\
    metadata: {name: reader}\n\
    roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: reader}\n\
    subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: reader}]\n";
