//! Transfers that are given up, from wherever one was killed.

use kubectl_slackwater::change::{self, Progress};
use kubectl_slackwater::cli::Change;
use kubectl_slackwater::cluster::Cluster;
use kubectl_slackwater::cluster::object;
use kubectl_slackwater::failure::Result;
use kubectl_slackwater::transfer::{Direction, advance, find_recorded_transfer};
use serde_json::json;

use crate::fixture::DRIVER;
use crate::simulated_server::{Cut, Server, Shared, client, requests};
use crate::transfers::{cuts, has_arrived, place, run, server};

/// One run of the command with `--undo`.
fn undo(server: &Shared, cut: Cut, ticks: usize) -> Result<String> {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.unwrap().block_on(async {
        let cluster = Cluster::with_client(client(server, cut), "shop", DRIVER);
        let Some(transfer) = find_recorded_transfer(&cluster, &place("shop")).await? else {
            return Ok("nothing".into());
        };
        for _ in 0..20 {
            match advance(&transfer, Direction::Undo).await? {
                Progress::Running(_) => (0..ticks).for_each(|_| server.lock().unwrap().tick()),
                Progress::Ended(result) => return result,
            }
        }
        panic!("it does not end: {:?}", server.lock().unwrap());
    })
}

/// Whether the new claim is bound.
fn is_through(server: &Shared) -> bool {
    let server = server.lock().unwrap();
    let new = server.objects.get(&Server::claim_path("other", "data"));
    new.is_some_and(|new| new["status"]["phase"] == "Bound")
}

#[track_caller]
fn is_back(server: &Shared, policy: &str, context: &str) {
    let mut server = server.lock().unwrap();
    // What is being deleted goes.
    server.tick();
    assert!(server.broken.is_empty(), "{context}: {server:?}");
    let volume = &server.objects[&Server::volume_path("pv")];
    let old = &server.objects[&Server::claim_path("shop", "data")];
    let spec = &volume["spec"];
    assert_eq!(spec["persistentVolumeReclaimPolicy"], policy, "{context}");
    assert_eq!(spec["claimRef"]["uid"], old["metadata"]["uid"], "{context}");
    let record = &volume["metadata"]["annotations"]["slackwater.dev/transfer"];
    assert!(record.is_null(), "{context}: {volume}");
    assert_eq!(old["status"]["phase"], "Bound", "{context}");
    assert_eq!(old["spec"]["volumeName"], "pv", "{context}");
    assert_eq!(old["metadata"]["labels"], json!({"app": "pg"}), "{context}");
    assert_eq!(old["metadata"]["annotations"]["team"], "x", "{context}");
    let new = Server::claim_path("other", "data");
    assert!(!server.objects.contains_key(&new), "{context}");
}

#[test]
fn a_transfer_that_was_killed_at_any_request_is_given_up() {
    for policy in ["Delete", "Retain"] {
        let whole = server(policy);
        run(&whole, Cut::Never, 1).unwrap();
        let many = requests(&whole);
        let (mut back, mut through) = (0, 0);
        for cut in cuts(many) {
            for ticks in 0..3 {
                let server = server(policy);
                let _ = run(&server, cut, 1);
                (0..ticks).for_each(|_| server.lock().unwrap().tick());
                let context = format!("{policy} {cut:?} {ticks}");
                let has_arrived_already = is_through(&server);
                match undo(&server, Cut::Never, 1) {
                    Ok(_) if !has_arrived_already => {
                        is_back(&server, policy, &context);
                        assert_eq!(undo(&server, Cut::Never, 1).unwrap(), "nothing");
                        back += 1;
                    }
                    // It has ended, or it is refused, with the command that goes back.
                    Ok(said) => assert_eq!(said, "nothing", "{context}"),
                    Err(failure) => {
                        assert!(has_arrived_already, "{context}: {failure:?}");
                        let way = "transfer data -n other --to-namespace shop --name data";
                        assert!(failure.message.contains(way), "{}", failure.message);
                        through += 1;
                    }
                }
                // It can begin again, or go on.
                run(&server, Cut::Never, 1).unwrap_or_else(|error| panic!("{context}: {error:?}"));
                has_arrived(&server, policy, &context);
            }
        }
        assert!(back > 20 && through > 0, "{back} {through}");
    }
}

#[test]
fn an_undo_that_is_killed_at_any_request_is_completed_by_the_next_one() {
    let whole = server("Delete");
    run(&whole, Cut::Never, 1).unwrap();
    for (n, first) in cuts(requests(&whole)).enumerate() {
        for ticks in 0..2 {
            // How long the undo is from here.
            let begin = || {
                let server = server("Delete");
                let _ = run(&server, first, 1);
                (0..ticks).for_each(|_| server.lock().unwrap().tick());
                server
            };
            let whole = begin();
            if is_through(&whole) || undo(&whole, Cut::Never, 1).unwrap() == "nothing" {
                continue;
            }
            for second in cuts(requests(&whole)).skip(n % 7).step_by(7) {
                let server = begin();
                let context = format!("{first:?} {ticks} {second:?}");
                let _ = undo(&server, second, 1);
                server.lock().unwrap().tick();
                if is_through(&server) {
                    // The new claim was bound before it was deleted.
                    assert!(undo(&server, Cut::Never, 1).is_err(), "{context}");
                    run(&server, Cut::Never, 1).unwrap();
                    has_arrived(&server, "Delete", &context);
                    continue;
                }
                // The transfer does not go on, unless this has ended.
                let is_begun = server.lock().unwrap().objects[&Server::volume_path("pv")].clone();
                let record = &is_begun["metadata"]["annotations"]["slackwater.dev/transfer"];
                if record
                    .as_str()
                    .is_some_and(|record| record.contains("undo"))
                {
                    let said = run(&server, Cut::Never, 1).unwrap_err().message;
                    assert!(said.contains("is being undone"), "{context}: {said}");
                }
                undo(&server, Cut::Never, 1).unwrap_or_else(|error| panic!("{context}: {error:?}"));
                is_back(&server, "Delete", &context);
            }
        }
    }
}

/// A request that a run of the transfer has decided on before the undo began, and that the API server gets
/// only now.
fn late(server: &Shared, request: impl AsyncFnOnce(&Cluster, &Change) -> Result<()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    let change = Change {
        yes: true,
        dry_run: false,
    };
    let _ = runtime.unwrap().block_on(async {
        let cluster = Cluster::with_client(client(server, Cut::Never), "shop", DRIVER);
        request(&cluster, &change).await
    });
}

/// A server with a transfer that was killed after this number of changes.
fn begun_with(changes: usize) -> Shared {
    for at in 0.. {
        let server = server("Delete");
        let _ = run(&server, Cut::After(at), 1);
        if server.lock().unwrap().changes.len() == changes {
            return server;
        }
    }
    unreachable!()
}

#[test]
fn a_late_delete_of_the_old_claim_loses_no_data() {
    let whole = begun_with(1);
    undo(&whole, Cut::Never, 1).unwrap();
    let many = requests(&whole);
    for cut in cuts(many) {
        let server = begun_with(1);
        let path = Server::claim_path("shop", "data");
        let old = server.lock().unwrap().objects[&path]["metadata"].clone();
        let _ = undo(&server, cut, 1);
        late(&server, async |cluster, change| {
            let which = (
                old["uid"].as_str().unwrap(),
                old["resourceVersion"].as_str(),
            );
            change::delete(cluster, change, &object::CLAIM, "shop", "data", which).await
        });
        server.lock().unwrap().tick();
        undo(&server, Cut::Never, 1).unwrap_or_else(|error| panic!("{cut:?}: {error:?}"));
        is_back(&server, "Delete", &format!("{cut:?}"));
    }
}

#[test]
fn a_late_claim_in_the_other_namespace_is_deleted_again() {
    let whole = begun_with(3);
    undo(&whole, Cut::Never, 1).unwrap();
    let mut late_claims = 0;
    for cut in cuts(requests(&whole)) {
        let server = begun_with(3);
        let volume = server.lock().unwrap().objects[&Server::volume_path("pv")].clone();
        let record = &volume["metadata"]["annotations"]["slackwater.dev/transfer"];
        let record: serde_json::Value = serde_json::from_str(record.as_str().unwrap()).unwrap();
        let _ = undo(&server, cut, 1);
        let volume = server.lock().unwrap().objects[&Server::volume_path("pv")].clone();
        if volume["metadata"]["annotations"]["slackwater.dev/transfer"].is_null() {
            continue;
        }
        late_claims += 1;
        late(&server, async |cluster, change| {
            let claim = record["claim"].clone();
            change::create(cluster, change, &object::CLAIM, "other", claim).await?;
            Ok(())
        });
        undo(&server, Cut::Never, 1).unwrap_or_else(|error| panic!("{cut:?}: {error:?}"));
        is_back(&server, "Delete", &format!("{cut:?}"));
    }
    assert!(late_claims > 20, "{late_claims}");
}

#[test]
fn another_users_claims_stay() {
    // In place of the old claim, and in place of the new one.
    let taken = begun_with(2);
    taken.lock().unwrap().tick();
    let foreign = json!({"metadata": {"name": "data", "namespace": "shop"}, "spec": {}});
    let path = Server::claim_path("shop", "data");
    taken.lock().unwrap().put(&path, foreign);
    let said = undo(&taken, Cut::Never, 1).unwrap_err().message;
    assert!(
        said.contains("is not bound to the PersistentVolume"),
        "{said}"
    );
    taken.lock().unwrap().objects.remove(&path);
    undo(&taken, Cut::Never, 1).unwrap();
    is_back(&taken, "Delete", "after a foreign claim");

    let beside = begun_with(2);
    beside.lock().unwrap().tick();
    let foreign = json!({"metadata": {"name": "data", "namespace": "other"}, "spec": {}});
    let path = Server::claim_path("other", "data");
    beside.lock().unwrap().put(&path, foreign);
    undo(&beside, Cut::Never, 1).unwrap();
    let mut server = beside.lock().unwrap();
    let foreign = server.objects.remove(&path).unwrap();
    assert!(foreign["metadata"]["deletionTimestamp"].is_null());
    drop(server);
    is_back(&beside, "Delete", "beside a foreign claim");
}
