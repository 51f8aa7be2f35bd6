//! Restores while other users and controllers change objects, against a simulated API server.

use std::sync::{Arc, Mutex};

use clap::Parser;
use kubectl_slackwater::cli::{Cli, Command};
use kubectl_slackwater::cluster::Cluster;
use kubectl_slackwater::failure::Failure;
use kubectl_slackwater::restore;
use serde_json::json;

use crate::memory::{Cut, Server, Shared, client, requests};
use crate::world::DRIVER;

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
            "source": {"volumeHandles": ["a", "b"]}}}),
    );
    for n in 0..2 {
        let name = format!("nightly-{n}");
        server.put(
            &format!("/apis/snapshot.storage.k8s.io/v1/namespaces/shop/volumesnapshots/{name}"),
            json!({"metadata": {"name": name, "namespace": "shop"},
                "spec": {"source": {"persistentVolumeClaimName": format!("data-pg-{n}")}},
                "status": {"readyToUse": true, "restoreSize": "1Gi", "volumeGroupSnapshotName": "nightly"}}),
        );
    }
    server.put(
        SET,
        json!({"metadata": {"name": "pg", "namespace": "shop"}, "spec": {"replicas": 0,
            "volumeClaimTemplates": [{"metadata": {"name": "data"},
                "spec": {"accessModes": ["ReadWriteOnce"]}}]}}),
    );
    Arc::new(Mutex::new(server))
}

fn run(server: &Shared, cut: Cut) -> Result<(), Failure> {
    let words = ["x", "restore", "nightly", "--statefulset", "pg", "--yes"];
    let Command::Restore(arguments) = Cli::parse_from(words).command else {
        panic!("another command")
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.unwrap().block_on(async {
        let cluster = Cluster::with(client(server, cut), "shop", DRIVER);
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
