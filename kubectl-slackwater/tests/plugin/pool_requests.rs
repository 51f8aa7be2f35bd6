//! Pools that nodes are asked to adopt and to forget: which fields are set, and how their end is awaited.

use std::sync::{Arc, Mutex};

use clap::Parser;
use http::Method;
use kubectl_slackwater::cli::{Cli, Command};
use kubectl_slackwater::cluster::Cluster;
use kubectl_slackwater::failure::{Failure, Result, TIMED_OUT};
use kubectl_slackwater::pools;
use serde_json::{Value, json};

use crate::fixture::{DRIVER, POOLS};
use crate::simulated_server::{Cut, Server, Shared, client, requests};
use crate::transfers::cuts;

const PATH: &str = "/apis/slackwater.dev/v1alpha1/pools/11111111-2222-4333-8444-000000000001";

/// A pool of node-1 whose disk is missing there.
fn server() -> Shared {
    let mut server = Server::default();
    server.put(
        PATH,
        json!({"metadata": {"name": POOLS[0], "generation": 7, "labels": {"slackwater.dev/driver": DRIVER}},
            "spec": {},
            "status": {"node": "node-1", "name": "fast", "health": "NotServed", "volumes": 3, "snapshots": 2}}),
    );
    for node in ["node-1", "node-2"] {
        let path = format!("/api/v1/nodes/{node}");
        server.put(&path, json!({"metadata": {"name": node}}));
    }
    Arc::new(Mutex::new(server))
}

fn run_with(server: &Shared, cut: Cut, words: &[&str]) -> Result<()> {
    let words = ["x", "pool"].iter().chain(words);
    let Command::Pool(command) = Cli::parse_from(words).command else {
        panic!("another command")
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build();
    runtime.unwrap().block_on(async {
        let cluster = Cluster::with_client(client(server, cut), "shop", DRIVER);
        pools::run(&cluster, command).await
    })
}

fn run(server: &Shared, words: &[&str]) -> Result<()> {
    run_with(server, Cut::Never, words)
}

fn spec(server: &Shared) -> Value {
    server.lock().unwrap().objects[PATH]["spec"].clone()
}

fn set(server: &Shared, pointer: &str, value: Value) {
    let mut server = server.lock().unwrap();
    let mut object = server.objects[PATH].clone();
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    let parent = object.pointer_mut(parent).unwrap();
    parent[key] = value;
    server.put(PATH, object);
}

#[track_caller]
fn fails(done: Result<()>, words: &str) -> Failure {
    let failure = done.unwrap_err();
    assert!(failure.message.contains(words), "{}", failure.message);
    failure
}

const ADOPT: [&str; 4] = ["adopt", "node-1/fast", "--to-node", "node-2"];
const FORGET: [&str; 2] = ["forget", "fast"];

#[test]
fn a_field_is_set_and_withdrawn_and_nothing_without_yes() {
    for (words, field, node) in [
        (&ADOPT[..], "adopt", "node-2"),
        (&FORGET, "forget", "node-1"),
        (
            &["forget", "fast", "--on-node", "node-2"],
            "forget",
            "node-2",
        ),
    ] {
        let server = server();
        fails(run(&server, words), "add --yes");
        let dry = [words, &["--yes", "--dry-run"]].concat();
        run(&server, &dry).unwrap();
        assert_eq!(spec(&server), json!({}), "{words:?}");
        let yes = [words, &["--yes"]].concat();
        for _ in 0..2 {
            run(&server, &yes).unwrap();
            assert_eq!(spec(&server), json!({field: node}), "{words:?}");
        }
        let patched = format!("PATCH {PATH}");
        let changes = server.lock().unwrap().changes.clone();
        assert_eq!(
            changes.iter().filter(|one| **one == patched).count(),
            1,
            "{changes:?}"
        );
        let undo = [field, "fast", "--undo"];
        fails(run(&server, &undo), "add --yes");
        for _ in 0..2 {
            run(&server, &[&undo[..], &["--yes"]].concat()).unwrap();
            assert_eq!(spec(&server), json!({}), "{words:?}");
        }
    }
}

#[test]
fn a_request_that_is_killed_at_any_request_is_completed_by_a_repeat() {
    for (words, field, node) in [
        (&ADOPT[..], "adopt", "node-2"),
        (&FORGET, "forget", "node-1"),
    ] {
        let yes = [words, &["--yes"]].concat();
        let whole = server();
        run(&whole, &yes).unwrap();
        for cut in cuts(requests(&whole)) {
            let server = server();
            let _ = run_with(&server, cut, &yes);
            run(&server, &yes).unwrap();
            assert_eq!(spec(&server), json!({field: node}), "{cut:?}");
        }
    }
}

#[test]
fn what_can_not_be_adopted_is_refused_before_it_is_requested() {
    let adopt = [&ADOPT[..], &["--yes"]].concat();
    let server = server();
    let absent = ["adopt", "fast", "--to-node", "node-9", "--yes"];
    fails(run(&server, &absent), "node-9");
    set(&server, "/spec/lost", json!(true));
    fails(run(&server, &adopt), "marked as lost");
    set(&server, "/spec", json!({}));
    // It has the node already.
    set(&server, "/status/health", json!("Healthy"));
    run(&server, &["adopt", "fast", "--to-node", "node-1", "--yes"]).unwrap();
    assert_eq!(spec(&server), json!({}));
    set(&server, "/status/node", json!(""));
    let reported = fails(run(&server, &["forget", POOLS[0], "--yes"]), "--on-node");
    assert_eq!(reported.code, kubectl_slackwater::failure::FAILED);
    // Another user changes the pool before it is patched.
    server.lock().unwrap().before = Some(|server, method, _| {
        if *method == Method::PATCH {
            let pool = server.objects.get_mut(PATH).unwrap();
            pool["metadata"]["resourceVersion"] = json!("1");
        }
    });
    let adopt = ["adopt", POOLS[0], "--to-node", "node-2", "--yes"];
    fails(run(&server, &adopt), "has changed since it was read");
}

/// Runs a command with `--wait`. `then` changes the object at each poll.
fn waited(words: &[&str], then: fn(&mut Value)) -> Result<()> {
    static THEN: Mutex<Option<fn(&mut Value)>> = Mutex::new(None);
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock();
    *THEN.lock().unwrap() = Some(then);
    let server = server();
    server.lock().unwrap().before = Some(|server, method, path| {
        let is_poll = *method == Method::GET && path == PATH;
        if let (true, Some(then)) = (is_poll, *THEN.lock().unwrap()) {
            then(server.objects.get_mut(PATH).unwrap());
        }
    });
    let more = ["--yes", "--wait", "--timeout", "1s"];
    run(&server, &[words, &more[..]].concat())
}

#[test]
fn the_end_of_a_request_is_that_of_the_controller() {
    waited(&ADOPT, |pool| {
        pool["spec"] = json!({});
        pool["status"]["node"] = json!("node-2");
    })
    .unwrap();
    waited(&FORGET, |pool| {
        pool["spec"] = json!({});
        pool["status"]["health"] = json!("Forgotten");
    })
    .unwrap();
    let elsewhere = ["forget", "fast", "--on-node", "node-2"];
    waited(&elsewhere, |pool| pool["spec"] = json!({})).unwrap();
    // The pool is being handed over, or the controller does not do it.
    let handed = waited(&ADOPT, |pool| pool["spec"] = json!({"node": "node-2"}));
    assert_eq!(handed.unwrap_err().code, TIMED_OUT);
    for words in [&ADOPT[..], &FORGET] {
        assert_eq!(waited(words, |_| {}).unwrap_err().code, TIMED_OUT);
        let withdrawn = waited(words, |pool| pool["spec"] = json!({}));
        fails(withdrawn, "by another user");
    }
}
