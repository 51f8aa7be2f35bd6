//! Restores of snapshots whose namespace is gone: from wherever a command was killed.

use std::sync::{Arc, Mutex};

use clap::Parser;
use kubectl_slackwater::change::Progress;
use kubectl_slackwater::cli::{Cli, Command};
use kubectl_slackwater::cluster::Cluster;
use kubectl_slackwater::failure::Result;
use kubectl_slackwater::restore::deleted_namespace::{ContentName, DeletedNamespaceRestore};
use serde_json::{Value, json};

use crate::fixture::{DRIVER, POOLS, id};
use crate::restore_checks::{CHECK, fail, pods};
use crate::simulated_server::{Cut, Server, Shared, client, requests};

const CONTENTS: &str = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents";
const GROUPS: &str = "/apis/groupsnapshot.storage.k8s.io/v1/volumegroupsnapshotcontents";
const NAMES: [&str; 3] = ["data", "index", "log"];
const GROUP: &str = "volumegroupsnapshotcontent/nightly";
/// The objects that stay.
const OWN: usize = 3 + 1 + 3 + 2 + 1 + 1;

fn content(n: usize) -> String {
    format!("{CONTENTS}/content-{n}")
}

/// The contents of a group of three members, whose namespace is gone. The PersistentVolumes of the claims
/// are Retain.
fn server() -> Shared {
    let mut server = Server::default();
    let handles: Vec<_> = (0..3)
        .map(|n| json!({"snapshotHandle": id(n % 2, n as u8), "volumeHandle": id(n % 2, 10 + n as u8)}))
        .collect();
    server.put(
        &format!("{GROUPS}/nightly"),
        json!({"metadata": {"name": "nightly", "creationTimestamp": "2026-01-02T00:00:00Z"},
            "spec": {"driver": DRIVER, "deletionPolicy": "Retain", "source": {"volumeHandles": ["a", "b", "c"]},
                "volumeGroupSnapshotRef": {"name": "today", "namespace": "shop", "uid": "group"}},
            "status": {"readyToUse": true, "volumeGroupSnapshotHandle": "handle-of-group",
                "volumeSnapshotInfoList": handles}}),
    );
    for (n, claim) in NAMES.into_iter().enumerate() {
        server.put(
            &content(n),
            json!({"metadata": {"name": format!("content-{n}"), "uid": claim,
                    "creationTimestamp": "2026-01-02T00:00:00Z"},
                "spec": {"driver": DRIVER, "deletionPolicy": "Retain", "sourceVolumeMode": "Filesystem",
                    "source": {"volumeHandle": id(n % 2, 10 + n as u8)},
                    "volumeSnapshotRef": {"name": format!("today-{n}"), "namespace": "shop", "uid": format!("old-{n}")}},
                "status": {"readyToUse": true, "snapshotHandle": id(n % 2, n as u8), "restoreSize": 1 << 30,
                    "volumeGroupSnapshotHandle": "handle-of-group"}}),
        );
        let volume = format!("own-{n}");
        server.put(
            &Server::volume_path(&volume),
            json!({"metadata": {"name": volume}, "spec": {"accessModes": ["ReadWriteOnce"],
                "capacity": {"storage": "1Gi"}, "storageClassName": "slackwater",
                "persistentVolumeReclaimPolicy": "Retain", "volumeMode": "Filesystem",
                "claimRef": {"name": claim, "namespace": "shop", "uid": "gone"},
                "csi": {"driver": DRIVER, "volumeHandle": id(n % 2, 10 + n as u8)}}}),
        );
    }
    for (n, pool) in POOLS.iter().take(2).enumerate() {
        let node = format!("node-{n}");
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
    server.put(
        "/api/v1/namespaces/test",
        json!({"metadata": {"name": "test"}}),
    );
    Arc::new(Mutex::new(server))
}

/// One run of the command, which ends where the connection ends. `ticks` is how often the controllers run
/// while the program waits.
fn run(server: &Shared, cut: Cut, ticks: usize) -> Result<String> {
    run_with(server, cut, ticks, &[GROUP])
}

fn run_with(server: &Shared, cut: Cut, ticks: usize, more: &[&str]) -> Result<String> {
    let words = ["x", "restore", "--to-namespace", "test", "--yes"];
    let words = words.iter().chain(more);
    let Command::Restore(arguments) = Cli::parse_from(words).command else {
        panic!("another command")
    };
    let which = ContentName::of(&arguments.source).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.unwrap().block_on(async {
        let cluster = Cluster::with_client(client(server, cut), "default", DRIVER);
        let gone = DeletedNamespaceRestore::read(&cluster, &arguments, &which).await?;
        gone.refuse().await?;
        for _ in 0..20 {
            match gone.advance().await? {
                Progress::Running(_) => (0..ticks).for_each(|_| server.lock().unwrap().tick()),
                Progress::Ended(result) => return result,
            }
        }
        assert_eq!(ticks, 0, "it does not end: {:?}", server.lock().unwrap());
        Ok("it goes on".into())
    })
}

/// The error of a run that changes nothing.
#[track_caller]
fn refused(server: &Shared, more: &[&str]) -> String {
    let before = server.lock().unwrap().changes.len();
    let said = run_with(server, Cut::Never, 1, more).unwrap_err().message;
    let changes = server.lock().unwrap().changes.clone();
    assert_eq!(changes.len(), before, "{said}: {changes:?}");
    said
}

fn edit(server: &Shared, path: &str, edit: impl FnOnce(&mut Value)) {
    let mut server = server.lock().unwrap();
    let mut object = server.objects[path].clone();
    edit(&mut object);
    server.put(path, object);
}

fn snapshot_path(claim: &str) -> String {
    format!("/apis/snapshot.storage.k8s.io/v1/namespaces/test/volumesnapshots/restore-{claim}")
}

fn temporary(claim: &str) -> String {
    format!("{CONTENTS}/restore-{claim}-test")
}

#[track_caller]
fn is_restored(server: &Shared, context: &str) {
    let mut server = server.lock().unwrap();
    // What is being deleted goes.
    server.tick();
    assert!(server.broken.is_empty(), "{context}: {server:?}");
    for (n, claim) in NAMES.into_iter().enumerate() {
        let new = &server.objects[&Server::claim_path("test", claim)];
        assert_eq!(new["status"]["phase"], "Bound", "{context}");
        assert_eq!(new["spec"]["storageClassName"], "slackwater", "{context}");
        let volume = new["spec"]["volumeName"].as_str().unwrap();
        let volume = &server.objects[&Server::volume_path(volume)];
        let handle = &volume["spec"]["csi"]["volumeHandle"];
        assert_eq!(*handle, format!("restore-{claim}"), "{context}");
        let own = &server.objects[&content(n)];
        assert!(own["metadata"]["deletionTimestamp"].is_null(), "{context}");
        assert_eq!(own["spec"]["volumeSnapshotRef"]["namespace"], "shop");
    }
    // A claim and a volume of each, and no temporary objects.
    let names: Vec<_> = server.objects.keys().collect();
    assert_eq!(names.len(), OWN + 6, "{context}: {names:?}");
}

/// All cuts of a run with this number of requests.
fn cuts(requests: usize) -> impl Iterator<Item = Cut> {
    (0..requests).flat_map(|at| [Cut::Before(at), Cut::After(at)])
}

#[test]
fn a_restore_without_its_namespace_that_is_killed_at_any_request_is_completed_by_the_next_one() {
    let whole = server();
    run(&whole, Cut::Never, 1).unwrap();
    is_restored(&whole, "whole");
    let many = requests(&whole);
    // Two temporary objects and a claim of each member are created, and two are deleted.
    let changes = whole.lock().unwrap().changes.clone();
    assert_eq!(changes.len(), 15, "{changes:?}");
    for cut in cuts(many) {
        // The controllers run or do not run between the two.
        for ticks in 0..3 {
            let server = server();
            let first = run(&server, cut, 1);
            (0..ticks).for_each(|_| server.lock().unwrap().tick());
            let context = format!("{cut:?} {ticks}: {first:?}");
            run(&server, Cut::Never, 1).unwrap_or_else(|error| panic!("{context}: {error:?}"));
            is_restored(&server, &context);
        }
    }
    // A repeat changes nothing.
    let before = whole.lock().unwrap().changes.len();
    run(&whole, Cut::Never, 1).unwrap();
    assert_eq!(whole.lock().unwrap().changes.len(), before);
}

/// The same group on one node, and a kubelet whose pods end in this phase.
fn on_one_node(phase: fn(&mut Server, &http::Method, &str)) -> Shared {
    let server = server();
    let second = format!("/apis/slackwater.dev/v1alpha1/pools/{}", POOLS[1]);
    edit(&server, &second, |pool| {
        pool["status"]["node"] = json!("node-0");
    });
    server.lock().unwrap().before = Some(phase);
    server
}

fn succeed(server: &mut Server, method: &http::Method, path: &str) {
    let pod = |change: &String| change.contains("/pods/slackwater-verify");
    let is_end = method == http::Method::DELETE && path.contains("/restore-");
    if is_end && !server.changes.iter().any(pod) {
        server.broken.push("nothing was checked".into());
    }
    pods(server, &json!({"phase": "Succeeded"}));
}

#[test]
fn claims_without_their_namespace_are_checked_whatever_kills_the_command() {
    let words = [&[GROUP], &CHECK[..]].concat();
    let whole = on_one_node(succeed);
    run_with(&whole, Cut::Never, 1, &words).unwrap();
    is_restored(&whole, "whole");
    let changes = whole.lock().unwrap().changes.clone();
    let pods = changes.iter().filter(|it| it.contains("/test/pods"));
    assert_eq!((changes.len(), pods.count()), (17, 2), "{changes:?}");
    for cut in cuts(requests(&whole)) {
        let server = on_one_node(succeed);
        let first = run_with(&server, cut, 1, &words);
        let context = format!("{cut:?}: {first:?}");
        run_with(&server, Cut::Never, 1, &words)
            .unwrap_or_else(|error| panic!("{context}: {error:?}"));
        is_restored(&server, &context);
    }
    // What is restored is not checked again.
    let before = whole.lock().unwrap().changes.len();
    run_with(&whole, Cut::Never, 1, &words).unwrap();
    assert_eq!(whole.lock().unwrap().changes.len(), before);
}

#[test]
fn claims_without_their_namespace_whose_check_fails_are_checked_again() {
    let words = [&[GROUP], &CHECK[..]].concat();
    let server = on_one_node(fail);
    for _ in 0..2 {
        let said = run_with(&server, Cut::Never, 1, &words).unwrap_err();
        let why = "the check failed: Evicted: no room";
        assert!(said.message.contains(why), "{said:?}");
        let mut now = server.lock().unwrap();
        now.tick();
        let temporary = now.objects.keys().filter(|it| it.contains("/restore-"));
        assert!(temporary.count() >= 6, "{:?}", now.objects.keys());
        assert!(!now.objects.keys().any(|it| it.contains("/pods/")));
    }
    server.lock().unwrap().before = Some(succeed);
    run_with(&server, Cut::Never, 1, &words).unwrap();
    is_restored(&server, "checked again");
}

#[test]
fn contents_that_are_deleted_in_the_middle_are_not_needed_any_more() {
    let whole = server();
    run(&whole, Cut::Never, 1).unwrap();
    let all = cuts(requests(&whole)).flat_map(|cut| [(cut, false), (cut, true)]);
    for (cut, is_group_deleted) in all {
        let server = server();
        let first = run(&server, cut, 1);
        let created = |part: &str| {
            let server = server.lock().unwrap();
            let of = |it: &&String| it.starts_with("POST") && it.contains(part);
            server.changes.iter().filter(of).count()
        };
        // All that is needed is in the temporary contents, once they exist.
        if first.is_ok() || created("/volumesnapshotcontents") < 3 {
            continue;
        }
        {
            let mut server = server.lock().unwrap();
            let is_left = server.objects.keys().filter(|it| it.contains("/restore-"));
            let is_left = is_left.filter(|it| it.starts_with(CONTENTS)).count() == 3;
            let leaves = |it: &Value| !it["metadata"]["deletionTimestamp"].is_null();
            if !is_left || server.objects.values().any(leaves) {
                continue;
            }
            for n in 0..3 {
                server.objects.remove(&content(n)).unwrap();
                server
                    .objects
                    .remove(&Server::volume_path(&format!("own-{n}")))
                    .unwrap();
            }
            if is_group_deleted {
                server.objects.remove(&format!("{GROUPS}/nightly")).unwrap();
            }
        }
        let context = format!("{cut:?}: {first:?}");
        run(&server, Cut::Never, 1).unwrap_or_else(|error| panic!("{context}: {error:?}"));
        let mut server = server.lock().unwrap();
        server.tick();
        assert!(server.broken.is_empty(), "{context}");
        let names: Vec<_> = server.objects.keys().collect();
        let deleted = 6 + usize::from(is_group_deleted);
        assert_eq!(names.len(), OWN - deleted + 6, "{context}: {names:?}");
    }
}

#[test]
fn a_group_of_which_a_member_is_missing_is_refused() {
    let server = server();
    server.lock().unwrap().objects.remove(&content(1));
    let said = refused(&server, &[GROUP]);
    let missing = format!(
        "no VolumeSnapshotContent has its snapshot {}, of claim index",
        id(1, 1)
    );
    assert!(said.contains(&missing), "{said}");
    // A single one can be restored, by the name or the handle, also after an interruption.
    let by_handle = format!("volumesnapshotcontent/{}", id(0, 2));
    run_with(&server, Cut::Never, 0, &[&by_handle]).unwrap();
    for which in ["content-0".to_string(), id(0, 2)] {
        let which = format!("volumesnapshotcontent/{which}");
        run_with(&server, Cut::Never, 1, &[&which]).unwrap();
    }
    let server = server.lock().unwrap();
    for claim in ["data", "log"] {
        let new = &server.objects[&Server::claim_path("test", claim)];
        assert_eq!(new["status"]["phase"], "Bound");
    }
}

#[test]
fn contents_from_which_nothing_may_be_restored_are_refused() {
    type Edit = fn(&mut Value);
    let edits: [(&str, Edit); 5] = [
        ("is of the driver other", |it| {
            it["spec"]["driver"] = json!("other");
        }),
        ("has the deletionPolicy Delete", |it| {
            it["spec"]["deletionPolicy"] = json!("Delete");
        }),
        ("is not ready: broken", |it| {
            it["status"]["readyToUse"] = json!(false);
            it["status"]["error"]["message"] = json!("broken");
        }),
        ("is being deleted", |it| {
            it["metadata"]["deletionTimestamp"] = json!("2026-01-02T00:00:00Z");
        }),
        ("the size of its copy is not known", |it| {
            it["status"]["restoreSize"] = json!(0);
        }),
    ];
    for (why, change) in edits {
        let server = server();
        edit(&server, &content(2), change);
        for which in [GROUP, "volumesnapshotcontent/content-2"] {
            let said = refused(&server, &[which]);
            assert!(said.contains(why) && said.contains("content-2"), "{said}");
        }
    }
    let server = server();
    edit(&server, &format!("{GROUPS}/nightly"), |it| {
        it["spec"]["deletionPolicy"] = json!("Delete");
    });
    let said = refused(&server, &[GROUP]);
    assert!(
        said.contains("nightly has the deletionPolicy Delete"),
        "{said}"
    );
    let said = refused(&server, &["volumesnapshotcontent/absent"]);
    assert!(said.contains("has the name or the handle absent"), "{said}");
}

#[test]
fn only_a_namespace_that_is_gone_counts() {
    let put = |server: &Shared, created: &str, uid: Option<&str>| {
        let mut server = server.lock().unwrap();
        let namespace = json!({"metadata": {"name": "shop", "creationTimestamp": created}});
        server.put("/api/v1/namespaces/shop", namespace);
        if let Some(uid) = uid {
            let path = "/apis/snapshot.storage.k8s.io/v1/namespaces/shop/volumesnapshots/today-0";
            let snapshot =
                json!({"metadata": {"name": "today-0", "namespace": "shop", "uid": uid}});
            server.put(path, snapshot);
        }
    };
    let one = "volumesnapshotcontent/content-0";
    let (earlier, later) = ("2026-01-01T00:00:00Z", "2026-01-03T00:00:00Z");
    for (created, uid, why) in [
        (
            earlier,
            Some("old-0"),
            "is of VolumeSnapshot shop/today-0, which exists",
        ),
        (
            later,
            Some("old-0"),
            "is of VolumeSnapshot shop/today-0, which exists",
        ),
        (
            earlier,
            Some("another"),
            "is of namespace shop, which is not gone",
        ),
        (earlier, None, "is of namespace shop, which is not gone"),
        (
            "2026-01-02T00:00:00Z",
            None,
            "is of namespace shop, which is not gone",
        ),
    ] {
        let server = server();
        put(&server, created, uid);
        let said = refused(&server, &[one]);
        assert!(said.contains(why), "{created} {uid:?}: {said}");
    }
    // A content that was never bound is of no namespace before it.
    let unbound = server();
    put(&unbound, later, None);
    edit(&unbound, &content(0), |it| {
        it["spec"]["volumeSnapshotRef"]["uid"] = Value::Null;
    });
    let said = refused(&unbound, &[one]);
    assert!(
        said.contains("is of namespace shop, which is not gone"),
        "{said}"
    );
    let terminating = server();
    put(&terminating, earlier, None);
    edit(&terminating, "/api/v1/namespaces/shop", |it| {
        it["metadata"]["deletionTimestamp"] = json!(later);
    });
    let said = refused(&terminating, &[GROUP]);
    assert!(
        said.contains("shop, which is being deleted: wait"),
        "{said}"
    );
    // One of the same name that was created again is another one, and its VolumeSnapshot, too.
    let again = server();
    put(&again, later, Some("another"));
    run_with(&again, Cut::Never, 1, &[one]).unwrap();
    let again = again.lock().unwrap();
    assert_eq!(
        again.objects[&Server::claim_path("test", "data")]["status"]["phase"],
        "Bound"
    );
}

#[test]
fn objects_of_others_under_the_names_are_refused() {
    let taken = |path: String, object: Value, why: &str| {
        let server = server();
        server.lock().unwrap().put(&path, object);
        let said = refused(&server, &[GROUP]);
        assert!(said.contains(why), "{said}");
    };
    let named = |name: &str| json!({"metadata": {"name": name, "namespace": "test"}, "spec": {}});
    let claim = Server::claim_path("test", "log");
    taken(claim, named("log"), "claim test/log exists: give --suffix");
    let mut pod = named("pg-0");
    pod["spec"]["volumes"] = json!([{"name": "x", "persistentVolumeClaim": {"claimName": "log"}}]);
    taken(
        "/api/v1/namespaces/test/pods/pg-0".into(),
        pod,
        "pod test/pg-0 waits for the claim log",
    );
    let group = "/apis/groupsnapshot.storage.k8s.io/v1/namespaces/test/volumegroupsnapshots/today";
    taken(
        group.into(),
        named("today"),
        "VolumeGroupSnapshot test/today has the name of the group",
    );
    let why = "restore-log exists, and was not created by this command";
    taken(snapshot_path("log"), named("restore-log"), why);
    let why = "restore-log-test exists, and was not created by this command";
    taken(temporary("log"), named("restore-log-test"), why);
}

/// A restore that has created its claims, of which none is bound.
fn begun() -> Shared {
    let server = server();
    let ends = |server: &mut Server, method: &http::Method, path: &str| {
        if *method == http::Method::POST && path.ends_with("/persistentvolumeclaims") {
            server.refusing.push("/api/v1/namespaces/test".into());
        }
    };
    server.lock().unwrap().before = Some(ends);
    let said = run(&server, Cut::Never, 1).unwrap_err().message;
    assert!(said.contains("exceeded quota"), "{said}");
    let mut locked = server.lock().unwrap();
    locked.before = None;
    locked.refusing.clear();
    drop(locked);
    server
}

#[test]
fn temporary_objects_that_are_of_something_else_by_now_are_refused() {
    type Edit = fn(&mut Value);
    let edits: [(&str, Edit); 4] = [
        (
            "has the deletionPolicy Delete, with which the snapshot",
            |it| {
                it["spec"]["deletionPolicy"] = json!("Delete");
            },
        ),
        ("is bound to another VolumeSnapshot", |it| {
            it["spec"]["volumeSnapshotRef"]["uid"] = json!("another");
        }),
        ("was not created by this command", |it| {
            it["spec"]["source"]["snapshotHandle"] = json!(id(0, 77));
        }),
        ("was not created by this command", |it| {
            it["metadata"]["annotations"] = json!({});
        }),
    ];
    for (why, change) in edits {
        let server = begun();
        edit(&server, &temporary("log"), change);
        let said = refused(&server, &[GROUP]);
        assert!(
            said.contains(why) && said.contains("restore-log-test"),
            "{said}"
        );
    }
    let server = begun();
    let said = refused(
        &server,
        &["volumesnapshotcontent/content-2", "--suffix", "x"],
    );
    assert!(
        said.contains("was created by a restore of volumegroupsnapshotcontent/nightly into"),
        "{said}"
    );
    // The same after all claims are bound, before anything is deleted.
    let server = begun();
    server.lock().unwrap().before = Some(|server, method, _| {
        let path = "/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents/restore-data-test";
        if *method == http::Method::POST {
            server.objects.get_mut(path).unwrap()["spec"]["deletionPolicy"] = json!("Delete");
        }
    });
    let said = run(&server, Cut::Never, 1).unwrap_err().message;
    assert!(said.contains("has the deletionPolicy Delete"), "{said}");
    let server = server.lock().unwrap();
    assert!(
        !server.changes.iter().any(|it| it.starts_with("DELETE")),
        "{:?}",
        server.changes
    );
}

#[test]
fn a_content_whose_namespace_was_created_again_in_the_middle_is_created_again() {
    let server = begun();
    for claim in NAMES {
        server
            .lock()
            .unwrap()
            .objects
            .remove(&snapshot_path(claim))
            .unwrap();
    }
    run(&server, Cut::Never, 1).unwrap();
    is_restored(&server, "created again");
}

#[test]
fn claims_of_two_times_are_not_restored_without_a_namespace() {
    let server = server();
    run(&server, Cut::Never, 1).unwrap();
    server
        .lock()
        .unwrap()
        .objects
        .remove(&Server::claim_path("test", "log"));
    server.lock().unwrap().tick();
    let said = refused(&server, &[GROUP]);
    assert!(
        said.contains("The remaining claims would be from a different point in time: log"),
        "{said}"
    );
}

#[test]
fn a_snapshot_that_reports_a_group_without_a_content_ends_the_wait() {
    let server = server();
    server
        .lock()
        .unwrap()
        .objects
        .remove(&format!("{GROUPS}/nightly"));
    server.lock().unwrap().before = Some(|server, _, _| {
        // As csi-snapshotter and snapshot-controller leave it.
        let content = server
            .objects
            .get_mut("/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents/restore-log-test");
        if let Some(content) = content {
            content["status"]["volumeGroupSnapshotHandle"] = json!("handle-of-group");
        }
        let path = "/apis/snapshot.storage.k8s.io/v1/namespaces/test/volumesnapshots/restore-log";
        if let Some(snapshot) = server.objects.get_mut(path) {
            snapshot["status"] = json!({"readyToUse": false});
        }
    });
    let said = run_with(&server, Cut::Never, 1, &["volumesnapshotcontent/content-2"]);
    let said = said.unwrap_err().message;
    assert!(
        said.contains("no VolumeGroupSnapshotContent has this handle"),
        "{said}"
    );
}

#[test]
fn claims_whose_volumes_are_gone_are_named_by_the_user() {
    let server = server();
    server
        .lock()
        .unwrap()
        .objects
        .remove(&Server::volume_path("own-1"));
    let said = refused(&server, &[GROUP]);
    let member = format!("are gone: content-1 ({}, 1 GiB). Give --claim", id(1, 1));
    assert!(said.contains(&member), "{said}");
    for (words, why) in [
        (["--claim", "index"], "a group needs CONTENT=NAME"),
        (
            ["--claim", "absent=index"],
            "no VolumeSnapshotContent absent",
        ),
        (["--claim", "content-1=data"], "into the claim data"),
        (["--claim", "content-1=A"], "A cannot be the name"),
    ] {
        let said = refused(&server, &[&[GROUP], &words[..]].concat());
        assert!(said.contains(why), "{said}");
    }
    run_with(
        &server,
        Cut::Never,
        1,
        &[
            GROUP,
            "--claim",
            "content-1=second",
            "--storage-class",
            "slackwater",
            "--suffix",
            "old",
        ],
    )
    .unwrap();
    let server = server.lock().unwrap();
    for claim in ["data-old", "second-old", "log-old"] {
        assert_eq!(
            server.objects[&Server::claim_path("test", claim)]["status"]["phase"],
            "Bound"
        );
    }
}

#[test]
fn a_claim_that_waits_for_its_volume_gets_its_snapshot_again() {
    let server = server();
    server.lock().unwrap().before = Some(|server, _, _| {
        let claims = server.objects.iter_mut();
        for (_, claim) in claims.filter(|(path, _)| path.contains("/persistentvolumeclaims/")) {
            let annotations = claim["metadata"]["annotations"].as_object_mut().unwrap();
            annotations.remove("volume.kubernetes.io/selected-node");
        }
    });
    let said = run(&server, Cut::Never, 1).unwrap_err().message;
    assert!(
        said.contains("cannot be created on node node-0 now"),
        "{said}"
    );
    let mut locked = server.lock().unwrap();
    locked.before = None;
    for claim in NAMES {
        locked.objects.remove(&snapshot_path(claim)).unwrap();
    }
    drop(locked);
    // The next run selects the node again.
    run(&server, Cut::Never, 1).unwrap();
    is_restored(&server, "after room was made");
}
