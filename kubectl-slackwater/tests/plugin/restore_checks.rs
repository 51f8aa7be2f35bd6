//! Restores into another namespace whose copies are checked before they are transferred.

use serde_json::{Value, json};

use crate::across::{NAMES, cuts, has_arrived, run_with as run, server};
use crate::fixture::id;
use crate::simulated_server::{Cut, Server, Shared, requests};

pub const CHECK: [&str; 4] = ["--verify", "true", "--verify-image", "x"];

/// The same group, of which both members are on one node, and a kubelet whose pods end in this phase.
fn on_one_node(before: fn(&mut Server, &http::Method, &str)) -> Shared {
    let server = server();
    let mut now = server.lock().unwrap();
    now.before = Some(before);
    let handle = json!(id(0, 2));
    let contents = now.objects.iter_mut();
    for (path, content) in contents.filter(|(path, _)| path.contains("contents/")) {
        let status = &mut content["status"];
        match path.ends_with("content-1") {
            true => status["snapshotHandle"] = handle.clone(),
            false if path.ends_with("/content") => {
                status["volumeSnapshotInfoList"][1]["snapshotHandle"] = handle.clone();
            }
            false => {}
        }
    }
    drop(now);
    server
}

/// A kubelet: the pods of checks have this status.
pub fn pods(server: &mut Server, status: &Value) {
    for (path, object) in &mut server.objects {
        if path.contains("/pods/slackwater-verify") {
            object["status"] = status.clone();
        }
    }
}

fn succeed(server: &mut Server, method: &http::Method, path: &str) {
    let is_transfer = method == http::Method::PATCH && path.contains("/persistentvolumes/");
    let pod = |change: &String| change.contains("/pods/slackwater-verify");
    if is_transfer && !server.changes.iter().any(pod) {
        server.broken.push("nothing was checked".into());
    }
    pods(server, &json!({"phase": "Succeeded"}));
}

pub fn fail(server: &mut Server, _: &http::Method, _: &str) {
    pods(
        server,
        &json!({"phase": "Failed", "reason": "Evicted", "message": "no room"}),
    );
}

fn has_pods(server: &Shared) -> bool {
    let server = server.lock().unwrap();
    server.objects.keys().any(|path| path.contains("/pods/"))
}

#[test]
fn copies_are_transferred_after_their_check_whatever_kills_the_command() {
    let whole = on_one_node(succeed);
    run(&whole, Cut::Never, 1, &CHECK).unwrap();
    let many = requests(&whole);
    has_arrived(&whole, "whole");
    let changes = whole.lock().unwrap().changes.clone();
    let end = changes
        .iter()
        .position(|it| it.starts_with("DELETE") && it.contains("/pods/"));
    assert_eq!(end, Some(3), "two claims, and the pod: {changes:?}");
    for cut in cuts(many) {
        let server = on_one_node(succeed);
        let first = run(&server, cut, 1, &CHECK);
        run(&server, Cut::Never, 1, &CHECK)
            .unwrap_or_else(|failure| panic!("{cut:?}: {first:?}, {failure:?}"));
        has_arrived(&server, &format!("{cut:?}"));
        assert!(!has_pods(&server), "{cut:?}");
    }
}

#[test]
fn copies_whose_check_fails_are_not_transferred() {
    let server = on_one_node(fail);
    for more in [&[][..], &["--suffix", "old"]] {
        let said = run(&server, Cut::Never, 1, &[&CHECK, more].concat());
        let said = said.unwrap_err().message;
        let why = match more.is_empty() {
            true => "the check failed: Evicted: no room",
            false => "becomes test/data",
        };
        assert!(said.contains(why), "{said}");
        let now = server.lock().unwrap();
        assert_eq!(now.changes.len(), 4, "{:?}", now.changes);
        for claim in NAMES {
            let copy = &now.objects[&Server::claim_path("shop", &format!("restore-{claim}"))];
            assert_eq!(copy["status"]["phase"], "Bound");
        }
    }
    server.lock().unwrap().tick();
    assert!(!has_pods(&server));
    // Checked again, they are good.
    server.lock().unwrap().before = Some(succeed);
    run(&server, Cut::Never, 1, &CHECK).unwrap();
    has_arrived(&server, "checked again");
}
