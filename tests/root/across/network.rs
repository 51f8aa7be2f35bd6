//! The network between router and agent is cut while the file systems are frozen.

use std::time::Duration;

use slackwater_testkit::cluster::{Cluster, ids};
use slackwater_testkit::eventually;
use slackwater_testkit::writers::Writers;

/// The longest timeout of a class, so that a thaw was not caused by the deadline.
const LONG: [(&str, &str); 2] = [("freezeTimeout", "30s"), ("retries", "0")];

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_cut_off_thaws_by_itself_and_no_snapshot_is_kept() {
    let mut cluster = Cluster::new(&["xfs", "xfs"]).await;
    let volumes = cluster.volumes(&[(0, "ext4"), (1, "xfs")]).await;
    let writers = Writers::start(&volumes);
    cluster.arm_router("router.cut:hang").await;
    let client = cluster.router.client.clone();
    let asked = ids(&volumes);
    let call = tokio::spawn(async move { client.group("g", &asked, &LONG).await });
    // All file systems are frozen, and the router sends nothing.
    eventually("all are frozen", || {
        let frozen = |agent: &slackwater_testkit::cluster::Agent| agent.frozen() == 1;
        let before = writers.counts();
        std::thread::sleep(Duration::from_millis(400));
        let stands = writers.counts() == before;
        stands && cluster.agents.iter().all(frozen)
    });
    cluster.agents[1].wire.cut();
    eventually("the node that is cut off thaws", || {
        cluster.agents[1].frozen() == 0
    });
    assert_eq!(
        cluster.agents[0].frozen(),
        1,
        "the other agent is still frozen by its stream, so the deadline has not passed"
    );
    // When the router ends, the other agent thaws at once, too.
    cluster.router.process.kill();
    cluster.assert_thawed(&writers, "the router has ended");
    assert!(call.await.unwrap().is_err());
    cluster.agents[1].wire.mend();
    cluster.restart_router(&[]).await;
    cluster.assert_none_or_all(&volumes, "mended").await;
    cluster
        .assert_comes_to_one("g", &volumes, &[], "mended")
        .await;
    drop(writers);
    cluster.tear_down(volumes).await;
}

/// The answer to a step never arrives: the router gives up by itself.
#[tokio::test(flavor = "multi_thread")]
async fn a_router_that_is_cut_off_from_a_node_gives_up_and_names_the_node() {
    let mut cluster = Cluster::new(&["xfs", "xfs"]).await;
    let volumes = cluster.volumes(&[(0, "ext4"), (1, "xfs")]).await;
    let writers = Writers::start(&volumes);
    let agent = &mut cluster.agents[1];
    agent.arm("effect.guard_sync:stop");
    cluster.listed("armed").await;
    let client = cluster.router.client.clone();
    let asked = ids(&volumes);
    let call = tokio::spawn(async move { client.group("g", &asked, &LONG).await });
    eventually("the agent has reached the step", || {
        cluster.agents[1].is_stopped()
    });
    cluster.agents[1].wire.cut();
    let agent = &cluster.agents[1];
    agent.server.signal(nix::sys::signal::Signal::SIGCONT);
    let answer = tokio::time::timeout(slackwater_testkit::WAIT_TIMEOUT, call).await;
    let status = answer.expect("the call ends").unwrap().unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unavailable, "{status}");
    assert!(status.message().contains("node-1"), "{status}");
    cluster.assert_thawed(&writers, "after the router gave up");
    // While the agent is unreachable, none of its objects is considered deleted.
    let status = cluster.router.client.snapshots("").await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unavailable, "{status}");
    cluster.agents[1].wire.mend();
    cluster
        .assert_comes_to_one("g", &volumes, &[], "mended")
        .await;
    drop(writers);
    cluster.tear_down(volumes).await;
}
