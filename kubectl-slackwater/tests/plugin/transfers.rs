//! Claims go to another namespace: from wherever a command was killed, and with real controllers.

use std::sync::{Arc, Mutex};

use kubectl_slackwater::change::Progress;
use kubectl_slackwater::cluster::Cluster;
use kubectl_slackwater::failure::Result;
use kubectl_slackwater::transfer::{Direction, advance, find_transfer, step::NamespacedName};
use serde_json::{Value, json};

use crate::fixture::{DRIVER, World, without_waits};
use crate::simulated_server::{Cut, Server, Shared, client, requests};

pub fn place(namespace: &str) -> NamespacedName {
    NamespacedName {
        namespace: namespace.into(),
        name: "data".into(),
    }
}

/// A claim that is bound to a volume.
pub fn server(policy: &str) -> Shared {
    let mut server = Server::default();
    server.put(
        &Server::claim_path("shop", "data"),
        json!({"metadata": {"name": "data", "namespace": "shop", "uid": "old", "labels": {"app": "pg"},
            "annotations": {"pv.kubernetes.io/bind-completed": "yes", "team": "x"}},
            "spec": {"volumeName": "pv", "accessModes": ["ReadWriteOnce"],
                "storageClassName": "slackwater", "resources": {"requests": {"storage": "1Gi"}}},
            "status": {"phase": "Bound"}}),
    );
    server.put(
        &Server::volume_path("pv"),
        json!({"metadata": {"name": "pv", "annotations": {"pv.kubernetes.io/bound-by-controller": "yes"}},
            "spec": {"csi": {"driver": DRIVER, "volumeHandle": "pool.volume"},
                "persistentVolumeReclaimPolicy": policy,
                "claimRef": {"namespace": "shop", "name": "data", "uid": "old", "resourceVersion": "7"}},
            "status": {"phase": "Bound"}}),
    );
    let namespace = json!({"metadata": {"name": "other"}});
    server.put("/api/v1/namespaces/other", namespace);
    Arc::new(Mutex::new(server))
}

/// One run of the command, which ends where the connection ends. `ticks` is how often the controllers
/// run while the program waits.
pub fn run(server: &Shared, cut: Cut, ticks: usize) -> Result<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.unwrap().block_on(async {
        let cluster = Cluster::with_client(client(server, cut), "shop", DRIVER);
        let Some(transfer) = find_transfer(&cluster, place("shop"), place("other")).await? else {
            return Ok("already".into());
        };
        for _ in 0..20 {
            match advance(&transfer, Direction::Forward).await? {
                Progress::Running(_) => (0..ticks).for_each(|_| server.lock().unwrap().tick()),
                Progress::Ended(result) => return result,
            }
        }
        panic!("it does not end: {:?}", server.lock().unwrap());
    })
}

#[track_caller]
pub fn has_arrived(server: &Shared, policy: &str, context: &str) {
    let server = server.lock().unwrap();
    assert!(server.broken.is_empty(), "{context}: {server:?}");
    let volume = &server.objects[&Server::volume_path("pv")];
    let new = &server.objects[&Server::claim_path("other", "data")];
    assert_eq!(
        volume["spec"]["persistentVolumeReclaimPolicy"], policy,
        "{context}"
    );
    assert_eq!(volume["metadata"]["annotations"], json!({}), "{context}");
    assert_eq!(
        volume["spec"]["claimRef"]["uid"], new["metadata"]["uid"],
        "{context}"
    );
    assert_eq!(new["status"]["phase"], "Bound", "{context}");
    assert_eq!(new["metadata"]["labels"], json!({"app": "pg"}), "{context}");
    let annotations = json!({"team": "x", "slackwater.dev/transferred-from": "shop/data"});
    assert_eq!(new["metadata"]["annotations"], annotations, "{context}");
    let old = Server::claim_path("shop", "data");
    assert!(!server.objects.contains_key(&old), "{context}");
}

/// All cuts of a run with this number of requests.
pub fn cuts(requests: usize) -> impl Iterator<Item = Cut> {
    (0..requests).flat_map(|at| [Cut::Before(at), Cut::After(at)])
}

#[test]
fn a_transfer_that_is_killed_at_any_request_is_completed_by_the_next_one() {
    for policy in ["Delete", "Retain"] {
        let whole = server(policy);
        run(&whole, Cut::Never, 1).unwrap();
        has_arrived(&whole, policy, "whole");
        let many = requests(&whole);
        let changes = whole.lock().unwrap().changes.clone();
        assert_eq!(changes.len(), 5, "{changes:?}");
        for cut in cuts(many) {
            // The controllers run or do not run between the two.
            for ticks in 0..3 {
                let server = server(policy);
                let first = run(&server, cut, 1);
                (0..ticks).for_each(|_| server.lock().unwrap().tick());
                let context = format!("{policy} {cut:?} {ticks}: {first:?}");
                if first.is_err() {
                    run(&server, Cut::Never, 1)
                        .unwrap_or_else(|error| panic!("{context}: {error:?}"));
                }
                has_arrived(&server, policy, &context);
                assert_eq!(run(&server, Cut::Never, 1).unwrap(), "already", "{context}");
            }
        }
    }
}

#[test]
fn a_transfer_that_is_killed_twice_is_completed_too() {
    let whole = server("Delete");
    run(&whole, Cut::Never, 1).unwrap();
    let many = requests(&whole);
    for first in cuts(many) {
        for second in cuts(many) {
            let server = server("Delete");
            let context = format!("{first:?} {second:?}");
            for cut in [first, second, Cut::Never] {
                if run(&server, cut, 1).is_ok() {
                    break;
                }
                server.lock().unwrap().tick();
            }
            has_arrived(&server, "Delete", &context);
        }
    }
}

#[test]
fn what_another_user_does_in_between_is_not_overwritten() {
    let pod = json!({"metadata": {"name": "pg-0", "namespace": "shop"}, "spec": {"volumes": [
        {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]}, "status": {"phase": "Running"}});
    let message = |server: &Shared| run(server, Cut::Never, 1).unwrap_err().message;
    // A pod, before the first step.
    let used = server("Delete");
    used.lock()
        .unwrap()
        .put("/api/v1/namespaces/shop/pods/pg-0", pod.clone());
    let said = message(&used);
    assert!(said.contains("pod shop/pg-0 uses it"), "{said}");
    assert!(used.lock().unwrap().changes.is_empty());
    // One that comes after the record was written: read again before the claim is deleted.
    let late = server("Delete");
    late.lock().unwrap().before = Some(|server, method, _| {
        if method == http::Method::PATCH {
            let pod = json!({"metadata": {"name": "pg-0", "namespace": "shop"}, "spec": {"volumes": [
                {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]}});
            server.put("/api/v1/namespaces/shop/pods/pg-0", pod);
        }
    });
    let said = message(&late);
    assert!(said.contains("pod shop/pg-0 uses it"), "{said}");
    assert!(
        late.lock()
            .unwrap()
            .objects
            .contains_key(&Server::claim_path("shop", "data"))
    );
    // A claim in the other namespace, before and after.
    let foreign = json!({"metadata": {"name": "data", "namespace": "other"}, "spec": {},
        "status": {"phase": "Pending"}});
    let taken = server("Delete");
    taken
        .lock()
        .unwrap()
        .put(&Server::claim_path("other", "data"), foreign.clone());
    let said = message(&taken);
    assert!(said.contains("claim other/data exists"), "{said}");
    assert!(taken.lock().unwrap().changes.is_empty());
    let taken = server("Delete");
    taken.lock().unwrap().before = Some(|server, method, _| {
        if method == http::Method::DELETE {
            let foreign = json!({"metadata": {"name": "data", "namespace": "other"}, "spec": {}});
            server.put(&Server::claim_path("other", "data"), foreign);
        }
    });
    let said = message(&taken);
    assert!(
        said.contains("is not bound to the PersistentVolume"),
        "{said}"
    );
    assert!(!said.contains("delete that claim"), "{said}");
    let volume = taken.lock().unwrap().objects[&Server::volume_path("pv")].clone();
    assert_eq!(volume["spec"]["persistentVolumeReclaimPolicy"], "Retain");
    // When it is gone, the transfer is completed.
    taken.lock().unwrap().before = None;
    taken
        .lock()
        .unwrap()
        .objects
        .remove(&Server::claim_path("other", "data"));
    run(&taken, Cut::Never, 1).unwrap();
    has_arrived(&taken, "Delete", "after a foreign claim");
}

/// Another claim of the same name, on another volume.
fn replace_the_claim(server: &mut Server) {
    let mut claim = server.objects[&Server::claim_path("shop", "data")].clone();
    claim["metadata"]["uid"] = json!("another");
    claim["spec"]["volumeName"] = json!("pv-2");
    server.put(&Server::claim_path("shop", "data"), claim);
}

#[test]
fn only_the_claim_that_was_decided_on_is_deleted() {
    let server = server("Delete");
    // The last read before the first step.
    server.lock().unwrap().before = Some(|server, method, path| {
        let is_last = path == Server::claim_path("other", "data") && method == http::Method::GET;
        if is_last && server.changes.is_empty() {
            replace_the_claim(server);
        }
    });
    run(&server, Cut::Never, 1).unwrap();
    let server = server.lock().unwrap();
    let claim = &server.objects[&Server::claim_path("shop", "data")];
    assert_eq!(claim["metadata"]["uid"], "another");
    assert!(claim["metadata"]["deletionTimestamp"].is_null(), "{claim}");
    let deleted = |change: &&String| change.starts_with("DELETE");
    assert_eq!(server.changes.iter().find(deleted), None);
}

#[test]
fn a_volume_that_changes_before_the_delete_is_decided_on_again() {
    let changes: [fn(&mut Value); 3] = [
        |volume| volume["spec"]["persistentVolumeReclaimPolicy"] = json!("Delete"),
        |volume| volume["metadata"]["annotations"]["slackwater.dev/reclaim-policy"] = json!("x"),
        |volume| volume["metadata"]["annotations"] = json!({}),
    ];
    for change in changes {
        static CHANGE: Mutex<Option<fn(&mut Value)>> = Mutex::new(None);
        *CHANGE.lock().unwrap() = Some(change);
        let server = server("Delete");
        server.lock().unwrap().before = Some(|server, method, path| {
            // After the read of the new claim with which the view of the second step ends.
            let is_late = server.changes.len() == 1;
            let is_last =
                path == Server::claim_path("other", "data") && method == http::Method::GET;
            if is_late
                && is_last
                && let Some(change) = CHANGE.lock().unwrap().take()
            {
                let path = Server::volume_path("pv");
                let mut volume = server.objects[&path].clone();
                change(&mut volume);
                server.put(&path, volume);
            }
            if method == http::Method::DELETE {
                let volume = &server.objects[&Server::volume_path("pv")];
                let policy = &volume["spec"]["persistentVolumeReclaimPolicy"];
                let annotations = &volume["metadata"]["annotations"];
                let is_recorded = !annotations["slackwater.dev/transfer"].is_null();
                let is_busy = !annotations["slackwater.dev/reclaim-policy"].is_null();
                if policy != "Retain" || !is_recorded || is_busy {
                    server.broken.push(format!("deleted with {volume}"));
                }
            }
        });
        let result = run(&server, Cut::Never, 1);
        let server = server.lock().unwrap();
        assert!(server.broken.is_empty(), "{result:?} {:?}", server.broken);
    }
}

#[test]
fn a_claim_that_cannot_be_created_is_not_deleted() {
    // Before the first step, and after the record was written.
    for changes in 0..2 {
        let server = server("Delete");
        let refuse: fn(&mut Server, &http::Method, &str) = |server, _, _| {
            server.refusing = vec!["/api/v1/namespaces/other".into()];
        };
        let refuse_later: fn(&mut Server, &http::Method, &str) = |server, _, _| {
            if server.changes.len() == 1 {
                server.refusing = vec!["/api/v1/namespaces/other".into()];
            }
        };
        server.lock().unwrap().before = Some([refuse, refuse_later][changes]);
        let said = run(&server, Cut::Never, 1).unwrap_err().message;
        assert!(said.contains("exceeded quota"), "{said}");
        let mut server = server.lock().unwrap();
        assert_eq!(server.changes.len(), changes, "{:?}", server.changes);
        assert!(
            server
                .objects
                .contains_key(&Server::claim_path("shop", "data"))
        );
        // When there is room, it is completed.
        (server.before, server.refusing) = (None, Vec::new());
    }
    // A claim of the target's name that appears after the record, and a namespace that goes.
    let taken = server("Delete");
    taken.lock().unwrap().before = Some(|server, method, _| {
        if method == http::Method::PATCH {
            let foreign = json!({"metadata": {"name": "data", "namespace": "other"}, "spec": {}});
            server.put(&Server::claim_path("other", "data"), foreign);
        }
    });
    let gone = server("Delete");
    gone.lock().unwrap().before = Some(|server, method, _| {
        if method == http::Method::PATCH {
            server.objects.remove("/api/v1/namespaces/other");
        }
    });
    for (server, why) in [
        (taken, "is not bound to the PersistentVolume"),
        (gone, "namespace other does not exist"),
    ] {
        let said = run(&server, Cut::Never, 1).unwrap_err().message;
        assert!(said.contains(why), "{said}");
        let server = server.lock().unwrap();
        let old = &server.objects[&Server::claim_path("shop", "data")];
        assert!(old["metadata"]["deletionTimestamp"].is_null(), "{old}");
    }
}

#[test]
fn a_step_that_the_api_server_does_not_store_ends_the_command() {
    let server = server("Delete");
    server.lock().unwrap().before = Some(|server, _, _| {
        let path = Server::volume_path("pv");
        let volume = server.objects.get_mut(&path).unwrap();
        if let Some(annotations) = volume["metadata"]["annotations"].as_object_mut() {
            annotations.remove("slackwater.dev/transfer");
        }
        volume["spec"]["persistentVolumeReclaimPolicy"] = json!("Delete");
    });
    let said = run(&server, Cut::Never, 1).unwrap_err().message;
    assert!(said.contains("did not store this step"), "{said}");
    let old = Server::claim_path("shop", "data");
    assert!(server.lock().unwrap().objects.contains_key(&old));
}

#[test]
fn a_volume_that_something_else_has_begun_with_stays() {
    for annotation in [
        "slackwater.dev/reclaim-policy",
        "slackwater.dev/quarantined-from",
    ] {
        let server = server("Delete");
        {
            let mut server = server.lock().unwrap();
            let path = Server::volume_path("pv");
            let mut volume = server.objects[&path].clone();
            volume["metadata"]["annotations"][annotation] = json!("x");
            server.put(&path, volume);
        }
        let said = run(&server, Cut::Never, 1).unwrap_err().message;
        assert!(said.contains(annotation), "{said}");
        assert!(server.lock().unwrap().changes.is_empty());
    }
}

#[test]
fn claims_go_to_another_namespace() {
    let Some(mut world) = World::start("transfers with kubectl slackwater") else {
        return;
    };
    world.fill();
    world.user_of_shop();
    world.plane.start_controllers();
    let phase = |world: &World, namespace: &str, claim: &str| {
        let path = "jsonpath={.status.phase} {.spec.volumeName} {.metadata.labels}";
        world
            .plane
            .kubectl(&["get", "pvc", claim, "-n", namespace, "-o", path])
    };
    bound(&world, "data-pg-1");
    let to = ["-n", "shop", "--to-namespace", "other"];
    let run = |words: &[&str]| world.says(&[&["transfer"], words, &to].concat());
    let mut all = vec![
        run(&["absent"]),
        run(&["foreign"]),
        run(&["cache"]),
        run(&["data-pg-0"]),
        world.says(&[
            "transfer",
            "data-pg-1",
            "-n",
            "shop",
            "--to-namespace",
            "shop",
        ]),
        world.says(&[
            "transfer",
            "data-pg-1",
            "-n",
            "shop",
            "--to-namespace",
            "absent",
        ]),
        run(&["data-pg-1", "--name", "files"]),
        run(&["data-pg-1"]),
        run(&["data-pg-1", "--dry-run"]),
        run(&["data-pg-1", "--yes", "--as", "dev"]),
    ];
    assert!(phase(&world, "shop", "data-pg-1").starts_with("Bound pvc-2"));
    all.extend(given_up(&world));
    assert!(phase(&world, "shop", "data-pg-1").starts_with("Bound pvc-2"));
    all.push(run(&["data-pg-1", "--name", "moved", "--yes"]));
    all.push(phase(&world, "other", "moved"));
    all.push(run(&["data-pg-1", "--name", "moved", "--yes"]));
    all.push(run(&["data-pg-1", "--yes"]));
    all.push(world.says(&["transfer", "data-pg-1", "-n", "shop", "--undo", "--yes"]));
    let text = world.plane.kubectl(&["get", "pv", "pvc-2", "-o", "json"]);
    let volume: Value = serde_json::from_str(&text).unwrap();
    all.push(format!(
        "{} {} {}",
        volume["spec"]["persistentVolumeReclaimPolicy"],
        volume["status"]["phase"],
        volume["spec"]["claimRef"]["name"]
    ));
    insta::assert_snapshot!("transfer", without_waits(&all.join("\n")));
}

/// Transfers that are given up: one before and one after its claim was deleted.
fn given_up(world: &World) -> Vec<String> {
    let undo = |more: &[&str]| {
        world.says(&[&["transfer", "data-pg-1", "-n", "shop", "--undo"], more].concat())
    };
    let begin = || {
        let text = world
            .plane
            .kubectl(&["get", "pvc", "data-pg-1", "-n", "shop", "-o", "json"]);
        let claim: Value = serde_json::from_str(&text).unwrap();
        let new = json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": "moved", "labels": claim["metadata"]["labels"],
                "annotations": {"slackwater.dev/transferred-from": "shop/data-pg-1"}},
            "spec": {"volumeName": "pvc-2", "accessModes": ["ReadWriteOnce"],
                "storageClassName": "slackwater", "resources": claim["spec"]["resources"]}});
        let record = json!({"from": {"namespace": "shop", "name": "data-pg-1"},
            "uid": claim["metadata"]["uid"], "to": {"namespace": "other", "name": "moved"},
            "policy": "Delete", "claim": new});
        let fields = json!({"metadata": {"annotations": {"slackwater.dev/transfer": record.to_string()}},
            "spec": {"persistentVolumeReclaimPolicy": "Retain"}});
        let fields = fields.to_string();
        let words = ["patch", "pv", "pvc-2", "--type=merge", "-p", &fields];
        world.plane.kubectl(&words);
    };
    let mut all = vec![
        world.says(&["transfer", "absent", "-n", "shop", "--undo"]),
        undo(&["--to-namespace", "other"]),
        undo(&["--yes"]),
    ];
    begin();
    all.extend([undo(&[]), undo(&["--dry-run"]), undo(&["--yes"])]);
    begin();
    world
        .plane
        .kubectl(&["delete", "-n", "shop", "pvc/data-pg-1"]);
    all.extend([undo(&[]), undo(&["--yes"])]);
    all
}

/// Waits until the controllers have bound a claim.
pub fn bound(world: &World, claim: &str) {
    let claim = format!("pvc/{claim}");
    let condition =
        "--for=jsonpath={.metadata.annotations.pv\\.kubernetes\\.io/bind-completed}=yes";
    let words = ["wait", "-n", "shop", &claim, condition, "--timeout=60s"];
    world.plane.kubectl(&words);
}
