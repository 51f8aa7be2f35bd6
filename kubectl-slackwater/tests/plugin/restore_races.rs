//! Restores while other users and controllers change objects, against a simulated API server.

use std::sync::{Arc, Mutex};

use clap::Parser;
use kubectl_slackwater::cli::{Cli, Command};
use kubectl_slackwater::cluster::Cluster;
use kubectl_slackwater::failure::Failure;
use kubectl_slackwater::restore;
use serde_json::json;

use crate::fixture::{DRIVER, POOLS, id};
use crate::simulated_server::{Cut, Server, Shared, client, requests};

const SHOP: &str = "/api/v1/namespaces/shop";
const SET: &str = "/apis/apps/v1/namespaces/shop/statefulsets/pg";

/// A group of two members, and a StatefulSet without pods whose claims are gone.
fn server() -> Shared {
    let mut server = Server::default();
    let groups = "/apis/groupsnapshot.storage.k8s.io/v1";
    server.put(
        &format!("{groups}/namespaces/shop/volumegroupsnapshots/nightly"),
        json!({"metadata": {"name": "nightly", "namespace": "shop", "uid": "group"},
            "status": {"readyToUse": true, "boundVolumeGroupSnapshotContentName": "content"}}),
    );
    server.put(
        &format!("{groups}/volumegroupsnapshotcontents/content"),
        json!({"metadata": {"name": "content"}, "spec": {"driver": DRIVER,
            "source": {"volumeHandles": ["a", "b"]},
            "volumeGroupSnapshotRef": {"name": "nightly", "namespace": "shop"}},
            "status": {"volumeSnapshotInfoList": [{"snapshotHandle": "s0"}, {"snapshotHandle": "s1"}]}}),
    );
    for n in 0..2 {
        let name = format!("nightly-{n}");
        server.put(
            &format!("/apis/snapshot.storage.k8s.io/v1/namespaces/shop/volumesnapshots/{name}"),
            json!({"metadata": {"name": name, "namespace": "shop"},
                "spec": {"source": {"persistentVolumeClaimName": format!("data-pg-{n}")}},
                "status": {"readyToUse": true, "restoreSize": "1Gi", "volumeGroupSnapshotName": "nightly",
                    "boundVolumeSnapshotContentName": format!("content-{n}")}}),
        );
        server.put(
            &format!("/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents/content-{n}"),
            json!({"metadata": {"name": format!("content-{n}")}, "spec": {"driver": DRIVER,
                "volumeSnapshotRef": {"name": name, "namespace": "shop"}},
                "status": {"snapshotHandle": format!("s{n}")}}),
        );
    }
    server.put(
        "/apis/storage.k8s.io/v1/storageclasses/default",
        json!({"metadata": {"name": "default", "annotations": {
            "storageclass.kubernetes.io/is-default-class": "true"}}, "provisioner": DRIVER}),
    );
    server.put(
        SET,
        json!({"metadata": {"name": "pg", "namespace": "shop"}, "spec": {"replicas": 0,
            "volumeClaimTemplates": [{"metadata": {"name": "data"},
                "spec": {"accessModes": ["ReadWriteOnce"]}}]}}),
    );
    Arc::new(Mutex::new(server))
}

fn run(server: &Shared, cut: Cut) -> Result<(), Failure> {
    run_with(server, cut, &["--statefulset", "pg"])
}

fn run_with(server: &Shared, cut: Cut, more: &[&str]) -> Result<(), Failure> {
    let words = ["x", "restore", "nightly", "--yes"];
    let words = words.iter().chain(more);
    let Command::Restore(arguments) = Cli::parse_from(words).command else {
        panic!("another command")
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.unwrap().block_on(async {
        let cluster = Cluster::with_client(client(server, cut), "shop", DRIVER);
        restore::run(&cluster, &arguments).await
    })
}

fn claims(server: &Shared) -> Vec<String> {
    let server = server.lock().unwrap();
    let prefix = format!("{SHOP}/persistentvolumeclaims/");
    let names = server
        .objects
        .keys()
        .filter_map(|path| path.strip_prefix(&prefix));
    names.map(str::to_string).collect()
}

#[test]
fn that_no_pod_has_come_is_read_again_before_each_claim() {
    let whole = server();
    run(&whole, Cut::Never).unwrap();
    assert_eq!(claims(&whole), ["data-pg-0", "data-pg-1"]);
    // Its controller has created a pod, or another user has scaled it, after the first claim.
    let pods = server();
    pods.lock().unwrap().before = Some(|server, _, _| {
        if server.changes.len() == 1 {
            let pod = json!({"metadata": {"name": "pg-1", "namespace": "shop"}, "spec": {"volumes": [
                {"name": "data", "persistentVolumeClaim": {"claimName": "data-pg-1"}}]}});
            server.put(&format!("{SHOP}/pods/pg-1"), pod);
        }
    });
    let scaled = server();
    scaled.lock().unwrap().before = Some(|server, _, _| {
        if server.changes.len() == 1 {
            server.objects.get_mut(SET).unwrap()["spec"]["replicas"] = json!(2);
        }
    });
    let replaced = server();
    replaced.lock().unwrap().before = Some(|server, _, _| {
        if server.changes.len() == 1 {
            server.objects.get_mut(SET).unwrap()["metadata"]["uid"] = json!("another");
        }
    });
    for (server, why) in [
        (pods, "pod shop/pg-1 waits for the claim data-pg-1"),
        (scaled, "has 2 replicas"),
        (replaced, "was deleted or replaced"),
    ] {
        let Err(failure) = run(&server, Cut::Never) else {
            panic!("{why}: it was restored")
        };
        assert!(failure.message.contains(why), "{}", failure.message);
        assert_eq!(claims(&server), ["data-pg-0"], "{why}");
    }
}

#[test]
fn a_restore_that_is_killed_at_any_request_is_completed_by_the_next_one() {
    let whole = server();
    run(&whole, Cut::Never).unwrap();
    for at in 0..requests(&whole) {
        for cut in [Cut::Before(at), Cut::After(at)] {
            let server = server();
            let _ = run(&server, cut);
            run(&server, Cut::Never).unwrap_or_else(|failure| panic!("{cut:?}: {failure:?}"));
            let (now, expected) = (server.lock().unwrap(), whole.lock().unwrap());
            let spec = |server: &Server, name: &str| {
                server.objects[&Server::claim_path("shop", name)]["spec"].clone()
            };
            for name in ["data-pg-0", "data-pg-1"] {
                assert_eq!(spec(&now, name), spec(&expected, name), "{cut:?}");
            }
            assert_eq!(now.changes.len(), 2, "{cut:?}: {:?}", now.changes);
        }
    }
}

const DISCARD: [&str; 9] = [
    "--suffix",
    "check",
    "--storage-class",
    "",
    "--verify",
    "true",
    "--verify-image",
    "x",
    "--discard",
];

/// A restore of claims to be discarded, while this happens before each request.
fn check(before: fn(&mut Server, &http::Method, &str)) -> (Shared, Result<(), Failure>) {
    let server = server();
    server.lock().unwrap().before = Some(before);
    let mut words = DISCARD;
    words[3] = "slackwater";
    let class = json!({"metadata": {"name": "slackwater"}, "provisioner": DRIVER});
    server
        .lock()
        .unwrap()
        .put("/apis/storage.k8s.io/v1/storageclasses/slackwater", class);
    let result = run_with(&server, Cut::Never, &words);
    (server, result)
}

/// The pods of checks have ended.
fn end_checks(server: &mut Server) {
    for (path, object) in &mut server.objects {
        if path.contains("/pods/slackwater-verify") {
            object["status"]["phase"] = json!("Succeeded");
        }
    }
}

fn put_user(server: &mut Server) {
    let pod = json!({"metadata": {"name": "app", "namespace": "shop"}, "spec": {"volumes": [
        {"name": "data", "persistentVolumeClaim": {"claimName": "data-pg-1-check"}}]}});
    server.put(&format!("{SHOP}/pods/app"), pod);
}

fn deleted_claims(server: &Shared) -> usize {
    let server = server.lock().unwrap();
    let is_claim = |change: &&String| {
        change.starts_with("DELETE") && change.contains("persistentvolumeclaims")
    };
    server.changes.iter().filter(is_claim).count()
}

#[test]
fn claims_that_an_application_uses_are_not_discarded() {
    let (whole, result) = check(|server, _, _| end_checks(server));
    result.unwrap();
    assert_eq!(deleted_claims(&whole), 2);
    // Before the check, and while it runs.
    let (early, result) = check(|server, _, _| {
        end_checks(server);
        if server.changes.len() == 2 {
            put_user(server);
        }
    });
    let message = result.unwrap_err().message;
    assert!(
        message.contains("pod shop/app uses the claim data-pg-1-check"),
        "{message}"
    );
    assert_eq!(
        early.lock().unwrap().changes.len(),
        2,
        "no pod of the check"
    );
    let (late, result) = check(|server, _, _| {
        end_checks(server);
        if server.changes.len() == 4 {
            put_user(server);
        }
    });
    let message = result.unwrap_err().message;
    assert!(
        message.contains("pod shop/app uses the claim data-pg-1-check"),
        "{message}"
    );
    assert_eq!(deleted_claims(&late), 0);
}

#[test]
fn claims_of_a_check_and_those_of_an_application_are_kept_apart() {
    let words = ["--suffix", "check", "--storage-class", "slackwater"];
    // One that is left of a check, restored without --discard; and one that stays, with it.
    let (server, _) = check(|server, _, _| end_checks(server));
    for (path, object) in &mut server.lock().unwrap().objects {
        if path.contains("persistentvolumeclaims") {
            object["metadata"]
                .as_object_mut()
                .unwrap()
                .remove("deletionTimestamp");
        }
    }
    let message = run_with(&server, Cut::Never, &words).unwrap_err().message;
    assert!(message.contains("created for a check"), "{message}");
    let mut words = DISCARD;
    words[3] = "slackwater";
    let message = run_with(&server, Cut::Never, &words).unwrap_err().message;
    assert!(
        message.contains("claims that it creates itself"),
        "{message}"
    );
}

#[test]
fn claims_are_discarded_if_a_later_one_cannot_be_created() {
    let (server, result) = check(|server, _, _| {
        if server.changes.len() == 1 {
            server.refusing = vec![SHOP.into()];
        }
    });
    let message = result.unwrap_err().message;
    assert!(message.contains("exceeded quota"), "{message}");
    assert_eq!(deleted_claims(&server), 1);
}

#[test]
fn copies_that_may_have_been_used_are_not_completed() {
    let server = server();
    run(&server, Cut::Never).unwrap();
    let second = Server::claim_path("shop", "data-pg-1");
    {
        let mut server = server.lock().unwrap();
        server.objects.remove(&second);
        let first = Server::claim_path("shop", "data-pg-0");
        server.objects.get_mut(&first).unwrap()["status"]["phase"] = json!("Bound");
    }
    let message = run(&server, Cut::Never).unwrap_err().message;
    assert!(
        message.contains("may have changed their volumes: data-pg-0"),
        "{message}"
    );
    assert_eq!(claims(&server), ["data-pg-0"]);
}

#[test]
fn a_pod_that_cannot_be_created_is_found_before_the_claims_are() {
    let (server, result) = check(|server, _, path| {
        let is_pod = path.ends_with("/pods");
        server.refusing = Vec::from_iter(is_pod.then(|| SHOP.to_string()));
    });
    let message = result.unwrap_err().message;
    assert!(message.contains("exceeded quota"), "{message}");
    assert_eq!(server.lock().unwrap().changes.len(), 0);
}

#[test]
fn a_dry_run_checks_the_rest_of_a_plan_past_claims_that_exist() {
    let server = server();
    let set = ["--statefulset", "pg", "--dry-run"];
    let claim = json!({"metadata": {"name": "data-pg-0", "namespace": "shop"}, "spec": {}});
    let path = Server::claim_path("shop", "data-pg-0");
    server.lock().unwrap().put(&path, claim);
    run_with(&server, Cut::Never, &set).unwrap();
    let message = run(&server, Cut::Never).unwrap_err().message;
    assert!(message.contains("exist: data-pg-0"), "{message}");
    server.lock().unwrap().objects.get_mut(SET).unwrap()["spec"]["replicas"] = json!(3);
    let message = run_with(&server, Cut::Never, &set).unwrap_err().message;
    assert!(message.contains("more replicas"), "{message}");
    assert_eq!(server.lock().unwrap().changes.len(), 0);
}

#[test]
fn a_pod_does_not_get_volumes_of_two_times() {
    let server = server();
    {
        let mut server = server.lock().unwrap();
        let templates = &mut server.objects.get_mut(SET).unwrap()["spec"]["volumeClaimTemplates"];
        let wal = json!({"metadata": {"name": "wal"}, "spec": {}});
        templates.as_array_mut().unwrap().push(wal);
        for n in 0..2 {
            let name = format!("wal-pg-{n}");
            let claim = json!({"metadata": {"name": name, "namespace": "shop"}, "spec": {}});
            server.put(&Server::claim_path("shop", &name), claim);
        }
    }
    let message = run(&server, Cut::Never).unwrap_err().message;
    assert!(message.contains("claim wal-pg-0 exists"), "{message}");
    assert_eq!(server.lock().unwrap().changes.len(), 0);
}

#[test]
fn copies_that_exist_on_several_nodes_are_not_checked() {
    let mut words = DISCARD;
    words[3] = "slackwater";
    let words = &words[..8];
    for (pools, is_refused) in [([0, 0], false), ([0, 1], true)] {
        let server = server();
        {
            let mut server = server.lock().unwrap();
            let class = json!({"metadata": {"name": "slackwater"}, "provisioner": DRIVER,
                "volumeBindingMode": "WaitForFirstConsumer"});
            server.put("/apis/storage.k8s.io/v1/storageclasses/slackwater", class);
        }
        run_with(&server, Cut::Never, &words[..4]).unwrap();
        server.lock().unwrap().before = Some(|server, _, _| end_checks(server));
        for (n, pool) in pools.into_iter().enumerate() {
            let mut server = server.lock().unwrap();
            let (volume, node) = (format!("pv-{n}"), format!("node-{pool}"));
            let path = Server::claim_path("shop", &format!("data-pg-{n}-check"));
            let mut claim = server.objects[&path].clone();
            claim["spec"]["volumeName"] = json!(volume);
            claim["status"]["phase"] = json!("Bound");
            server.put(&path, claim);
            server.put(
                &Server::volume_path(&volume),
                json!({"metadata": {"name": volume}, "spec": {"csi": {"volumeHandle": id(pool, 9)}}}),
            );
            server.put(
                &format!("/apis/slackwater.dev/v1alpha1/pools/{}", POOLS[pool]),
                json!({"metadata": {"name": POOLS[pool]}, "status": {"node": node}}),
            );
        }
        let result = run_with(&server, Cut::Never, words);
        assert_eq!(result.is_err(), is_refused, "{result:?}");
        if let Err(failure) = result {
            let said = failure.message;
            let places = "data-pg-0-check on node-0; data-pg-1-check on node-1";
            assert!(said.contains(places), "{said}");
        }
    }
}
