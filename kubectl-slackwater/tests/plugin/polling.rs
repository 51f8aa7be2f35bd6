//! Commands that wait for the end of an operation while the API server is away for a moment, or refuses
//! to answer.

use std::sync::{Arc, Mutex};

use clap::Parser;
use kubectl_slackwater::cli::{Cli, Command};
use kubectl_slackwater::cluster::Cluster;
use kubectl_slackwater::failure::{DENIED, FAILED, Failure};
use kubectl_slackwater::volumes::move_volume;
use serde_json::json;

use crate::fixture::{DRIVER, id};
use crate::simulated_server::{Cut, Server, client};

const MOVE: &str = "/apis/slackwater.dev/v1alpha1/namespaces/shop/volumemoves/data-new";

/// A move with `--wait`, of which this number of polls is answered with this code.
fn moved(failing: usize, code: u16) -> Result<(), Failure> {
    let mut server = Server::default();
    server.put(
        &Server::claim_path("shop", "data"),
        json!({"metadata": {"name": "data", "namespace": "shop"}, "spec": {"volumeName": "pv"},
            "status": {"phase": "Bound"}}),
    );
    server.put(
        &Server::volume_path("pv"),
        json!({"metadata": {"name": "pv"}, "spec": {"csi": {"driver": DRIVER, "volumeHandle": id(0, 1)}}}),
    );
    server.put(
        "/api/v1/nodes/node-2",
        json!({"metadata": {"name": "node-2"}}),
    );
    server.failing.insert(MOVE.into(), (failing, code));
    server.before = Some(|server, _, path| {
        if let Some(object) = server.objects.get_mut(MOVE).filter(|_| path == MOVE) {
            object["status"] = json!({"phase": "Done", "switchedAt": "2026-11-22T10:00:00Z"});
        }
    });
    let server = Arc::new(Mutex::new(server));
    let words = [
        "x",
        "move",
        "data",
        "--to-node",
        "node-2",
        "--yes",
        "--wait",
    ];
    let Command::Move(arguments) = Cli::parse_from(words).command else {
        panic!("another command")
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build();
    runtime.unwrap().block_on(async {
        let cluster = Cluster::with_client(client(&server, Cut::Never), "shop", DRIVER);
        move_volume::run(&cluster, &arguments).await
    })
}

#[test]
fn a_poll_that_fails_does_not_end_a_wait() {
    moved(1, 503).unwrap();
}

#[test]
fn a_poll_that_is_refused_ends_a_wait_at_once() {
    for (code, exit_code) in [(403, DENIED), (404, FAILED)] {
        let failure = moved(1, code).unwrap_err();
        assert_eq!(failure.code, exit_code, "{}", failure.message);
        assert!(failure.message.contains("data-new"), "{}", failure.message);
    }
}
