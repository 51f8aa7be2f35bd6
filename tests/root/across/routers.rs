//! Routers that die at any step, and two routers with requests for the same group.

use slackwater::fault;
use slackwater_testkit::WAIT_TIMEOUT;
use slackwater_testkit::cluster::{Cluster, ids, until_made};
use slackwater_testkit::eventually;
use slackwater_testkit::snapshots::members;
use slackwater_testkit::writers::{Writers, is_consistent};

const PARAMETERS: [(&str, &str); 2] = [("freezeTimeout", "30s"), ("retries", "0")];

/// Sends a request to a router that dies during the call.
async fn request_that_fails(cluster: &mut Cluster, name: &str, ids: &[String]) {
    let call = cluster.router.client.group(name, ids, &PARAMETERS);
    let answer = tokio::time::timeout(WAIT_TIMEOUT, call).await;
    assert!(answer.expect("the call ends").is_err(), "{name}");
    eventually(&format!("{name}: the router has died"), || {
        !cluster.router.process.is_alive()
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_killed_at_any_step_leaves_nothing_frozen_or_torn() {
    let mut cluster = Cluster::new(&["xfs", "xfs"]).await;
    let volumes = cluster.volumes(&[(0, "ext4"), (1, "xfs")]).await;
    let writers = Writers::start(&volumes);
    for step in fault::CUT_STEPS {
        cluster.arm_router(&format!("router.{step}:kill")).await;
        request_that_fails(&mut cluster, step, &ids(&volumes)).await;
        cluster.assert_thawed(&writers, step);
        cluster.restart_router(&[]).await;
        cluster.assert_none_or_all(&volumes, step).await;
        cluster
            .assert_comes_to_one(step, &volumes, &PARAMETERS, step)
            .await;
    }
    drop(writers);
    cluster.tear_down(volumes).await;
}

/// The first member is committed, so the group is committed, and the next call returns it.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_whose_first_member_is_committed_is_rolled_forward_by_the_next_call() {
    let mut cluster = Cluster::new(&["xfs", "xfs"]).await;
    let volumes = cluster.volumes(&[(0, "ext4"), (1, "xfs")]).await;
    let writers = Writers::start(&volumes);
    cluster.arm_router("router.lead-committed:kill").await;
    request_that_fails(&mut cluster, "g", &ids(&volumes)).await;
    let moment = prost_types::Timestamp::from(std::time::SystemTime::now());
    cluster.restart_router(&[]).await;
    let group = cluster
        .until_made("g", &volumes, &PARAMETERS, "again")
        .await;
    let cut = group.creation_time.unwrap();
    let is_before = (cut.seconds, cut.nanos) < (moment.seconds, moment.nanos);
    assert!(
        is_before,
        "the cut is that of the first call: {cut} {moment}"
    );
    for row in cluster.counters(&volumes, &group).await {
        assert!(is_consistent(&row), "{row:?}");
    }
    cluster.delete_group(&group).await;
    drop(writers);
    cluster.tear_down(volumes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn members_in_doubt_after_the_death_of_a_router_are_resolved_without_a_call() {
    let mut cluster = Cluster::new(&["xfs", "xfs"]).await;
    let volumes = cluster.volumes(&[(0, "ext4"), (1, "xfs")]).await;
    // Committed by the first member.
    cluster.arm_router("router.lead-committed:kill").await;
    request_that_fails(&mut cluster, "g", &ids(&volumes)).await;
    cluster.restart_router(&[]).await;
    // Until all agents know it, none of its members is listed, neither here nor by its source.
    let lead = ids(&volumes).remove(0);
    cluster.listed("all agents have answered").await;
    let of_lead = cluster.router.client.snapshots(&lead).await.unwrap();
    if cluster.listed("not settled yet").await.is_empty() {
        assert_eq!(of_lead, [""; 0]);
    }
    cluster.until_listed_at_once(2, "rolled forward").await;
    let group = cluster
        .until_made("g", &volumes, &PARAMETERS, "again")
        .await;
    cluster.delete_group(&group).await;
    // Kept by all, committed by none.
    cluster.arm_router("router.kept:kill").await;
    request_that_fails(&mut cluster, "h", &ids(&volumes)).await;
    cluster.restart_router(&[]).await;
    cluster.until_no_snapshots("rolled back").await;
    cluster.tear_down(volumes).await;
}

/// The first member's agent cannot be reached: members in doubt stay in doubt, and the router does
/// not guess.
#[tokio::test(flavor = "multi_thread")]
async fn a_member_in_doubt_waits_for_the_agent_that_can_resolve_it() {
    let mut cluster = Cluster::new(&["xfs", "xfs"]).await;
    let volumes = cluster.volumes(&[(0, "ext4"), (1, "xfs")]).await;
    cluster.arm_router("router.lead-committed:kill").await;
    request_that_fails(&mut cluster, "g", &ids(&volumes)).await;
    cluster.agents[0].server.kill();
    cluster.restart_router(&[]).await;
    let client = cluster.router.client.clone();
    let again = client.group("g", &ids(&volumes), &PARAMETERS).await;
    let status = again.unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unavailable, "{status}");
    assert!(status.message().contains("node-0"), "{status}");
    // Longer than the automatic resolution waits, and through a restart of the agent with the
    // member in doubt.
    cluster.agents[1].restart_with(&[]);
    tokio::time::sleep(std::time::Duration::from_secs(15)).await;
    assert_eq!(
        cluster.agents[1].disk.snapshots().len(),
        1,
        "the member is left alone"
    );
    cluster.agents[0].restart_with(&[]);
    let group = cluster
        .until_made("g", &volumes, &PARAMETERS, "again")
        .await;
    assert_eq!(members(&group).len(), 2);
    cluster.delete_group(&group).await;
    cluster.tear_down(volumes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_routers_with_requests_for_the_same_group_one_creates_it() {
    let cluster = Cluster::new(&["xfs", "xfs"]).await;
    let volumes = cluster.volumes(&[(0, "ext4"), (1, "xfs")]).await;
    let writers = Writers::start(&volumes);
    let other = cluster.another_router("other").await;
    for round in 0..10 {
        let name = format!("g-{round}");
        let (a, b) = tokio::join!(
            until_made(&cluster.router.client, &name, &volumes, &PARAMETERS, &name),
            until_made(&other.client, &name, &volumes, &PARAMETERS, &name),
        );
        assert_eq!(a, b, "{name}");
        for row in cluster.counters(&volumes, &a).await {
            assert!(is_consistent(&row), "{name}: {row:?}");
        }
        let listed = cluster.listed(&name).await;
        assert_eq!(listed.len(), 2, "{name}: {listed:?}");
        // Deleted by both.
        let members = members(&a);
        let deleted = other.client.delete_group(&a.group_snapshot_id, &members);
        deleted.await.unwrap();
        cluster.delete_group(&a).await;
        cluster.assert_no_snapshots(&name);
    }
    drop(writers);
    cluster.tear_down(volumes).await;
}
