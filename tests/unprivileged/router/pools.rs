//! Pools that agents adopt and forget for the router.

use std::path::Path;
use std::time::Instant;

use slackwater::agent::Pool;
use slackwater::agent::pool::Presence;
use slackwater::error::chain;
use slackwater::host::{Effect, Host};
use slackwater::model::PoolId;
use slackwater::operation::pools::admin;
use slackwater::router::kube::AgentReports;
use slackwater::router::kube::pools::requests::progress::PoolRequest;

use crate::router::cluster::*;
use crate::router::fake::Fake;
use crate::service::harness::pool;

const MOVED: &str = "moved=file:/memory/moved";

/// A node with a pool of its own, and with the disk of another machine.
fn node_with_disk() -> (AgentNode, PoolId) {
    let mut node = AgentNode::start("node-b", &["default"], None);
    let theirs = Path::new("/srv/theirs.json");
    let made = admin::init(&node.machine, theirs, &pool(MOVED)).unwrap();
    node.restart(&["default", MOVED]);
    (node, made.pool.id)
}

/// What the router knows of a pool of the node.
fn shown(routed: &TestRouter, id: PoolId) -> Vec<Pool> {
    let reports = routed.agents.reports().into_iter();
    let answers = reports.filter_map(|report| report.seen);
    let pools = answers.flat_map(|(_, answer)| answer.pools.clone());
    pools.filter(|pool| pool.id == id.to_string()).collect()
}

async fn ask(routed: &TestRouter, id: PoolId, request: PoolRequest) -> Result<(), String> {
    let answer = routed.agents.change_pool("node-b", id, request).await;
    answer.map_err(|error| chain(&error).to_string())
}

/// The disk is elsewhere, and the agent is started again.
async fn moves(routed: &TestRouter, node: &mut AgentNode, from: &str, to: &str) {
    let (from, to) = (Path::new(from), Path::new(to));
    node.machine.perform(&Effect::Rename { from, to }).unwrap();
    node.restart(&["default", MOVED]);
    let moment = Instant::now();
    routed.until_answered_since("node-b", moment).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_adopts_a_pool_whose_disk_it_has_and_forgets_one_whose_disk_is_gone() {
    let (mut node, id) = node_with_disk();
    let routed = TestRouter::of(&[&node]).await;
    let found = shown(&routed, id);
    assert_eq!(found[0].presence(), Presence::OtherHome, "{found:?}");
    let reported = ask(&routed, id, PoolRequest::Forget).await.unwrap_err();
    assert!(
        reported.contains("it is present at file:/memory/moved"),
        "{reported}"
    );
    for _ in 0..2 {
        ask(&routed, id, PoolRequest::Adopt).await.unwrap();
        // The router has asked the agent again before it has the answer.
        let found = shown(&routed, id);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].refusal.as_str(), found[0].forgotten), ("", false));
    }
    let reported = ask(&routed, id, PoolRequest::Forget).await.unwrap_err();
    assert!(reported.contains("it is present"), "{reported}");
    moves(&routed, &mut node, "/memory/moved", "/memory/away").await;
    let reported = ask(&routed, id, PoolRequest::Adopt).await.unwrap_err();
    assert!(reported.contains("mount its disk there"), "{reported}");
    for _ in 0..2 {
        ask(&routed, id, PoolRequest::Forget).await.unwrap();
        assert!(shown(&routed, id)[0].forgotten);
    }
    let unknown = PoolId(uuid::Uuid::from_u128(7));
    for request in [PoolRequest::Adopt, PoolRequest::Forget] {
        let reported = ask(&routed, unknown, request).await.unwrap_err();
        assert!(reported.contains(&unknown.to_string()), "{reported}");
    }
}

/// A node has forgotten a pool whose disk was moved to another one, and the disk returns: the agent has
/// one answer about the pool, which the router accepts.
#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_returns_after_it_was_forgotten_can_be_adopted_again() {
    let (mut node, id) = node_with_disk();
    let routed = TestRouter::of(&[&node]).await;
    ask(&routed, id, PoolRequest::Adopt).await.unwrap();
    moves(&routed, &mut node, "/memory/moved", "/memory/away").await;
    ask(&routed, id, PoolRequest::Forget).await.unwrap();
    // Another machine has adopted it in the meantime.
    let away = pool("moved=file:/memory/away");
    let (machine, theirs) = (&node.machine, Path::new("/srv/theirs.json"));
    assert!(
        admin::adopt(machine, theirs, &away, &[], false)
            .unwrap()
            .from
            .is_some()
    );
    moves(&routed, &mut node, "/memory/away", "/memory/moved").await;
    let is_there = |pool: &Pool| pool.id == id.to_string() && !pool.forgotten;
    routed
        .until_described("node-b", |reported| reported.pools.iter().any(is_there))
        .await;
    let found = shown(&routed, id);
    assert_eq!((found.len(), found[0].presence()), (1, Presence::OtherHome));
    ask(&routed, id, PoolRequest::Adopt).await.unwrap();
    assert_eq!(shown(&routed, id)[0].refusal, "");
    node.kill();
    let reported = ask(&routed, id, PoolRequest::Adopt).await.unwrap_err();
    assert!(reported.contains("node-b"), "{reported}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_of_an_earlier_release_is_named_as_such() {
    let id = PoolId(uuid::Uuid::from_u128(1));
    let fake = Fake::new("node-b", "home", &[id]);
    let served = fake.serve();
    let routed = TestRouter::new(&[("node-b", served.address)]).await;
    for request in [PoolRequest::Adopt, PoolRequest::Forget] {
        let reported = ask(&routed, id, request).await.unwrap_err();
        assert!(
            reported.contains("earlier release") && reported.contains("node-b"),
            "{reported}"
        );
    }
    let reported = routed
        .agents
        .change_pool("node-x", id, PoolRequest::Adopt)
        .await;
    assert!(reported.unwrap_err().to_string().contains("node-x"));
}
