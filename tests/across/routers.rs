//! Routers that die at any step, and two that are asked for the same group.

use super::ground::{Cluster, PATIENCE, ids, until_made};
use super::support::eventually;
use super::support::snapshots::members;
use super::support::writers::{Writers, is_consistent};

const PARAMETERS: [(&str, &str); 2] = [("freezeTimeout", "30s"), ("retries", "0")];

/// Asks a router that dies meanwhile.
async fn asked_in_vain(cluster: &mut Cluster, name: &str, ids: &[String]) {
    let call = cluster.router.client.group(name, ids, &PARAMETERS);
    let answer = tokio::time::timeout(PATIENCE, call).await;
    assert!(answer.expect("the call ends").is_err(), "{name}");
    eventually(&format!("{name}: it has died"), || {
        !cluster.router.process.is_alive()
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_killed_at_any_step_leaves_nothing_frozen_or_torn() {
    let mut cluster = Cluster::new(&["xfs", "xfs"]).await;
    let volumes = cluster.volumes(&[(0, "ext4"), (1, "xfs")]).await;
    let writers = Writers::start(&volumes);
    for step in [
        "begin",
        "ready",
        "ahead",
        "prepare",
        "freeze",
        "cut",
        "written",
        "keep",
        "kept",
        "commit",
        "lead-committed",
        "committed",
    ] {
        cluster.arm_router(&format!("{step}:abort")).await;
        asked_in_vain(&mut cluster, step, &ids(&volumes)).await;
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

/// Its first member is committed: so is the group, and the next call says so.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_whose_first_member_is_committed_is_rolled_forward_by_the_next_call() {
    let mut cluster = Cluster::new(&["xfs", "xfs"]).await;
    let volumes = cluster.volumes(&[(0, "ext4"), (1, "xfs")]).await;
    let writers = Writers::start(&volumes);
    cluster.arm_router("lead-committed:abort").await;
    asked_in_vain(&mut cluster, "g", &ids(&volumes)).await;
    let moment = prost_types::Timestamp::from(std::time::SystemTime::now());
    cluster.restart_router(&[]).await;
    let group = cluster
        .until_made("g", &volumes, &PARAMETERS, "again")
        .await;
    let cut = group.creation_time.unwrap();
    let is_before = (cut.seconds, cut.nanos) < (moment.seconds, moment.nanos);
    assert!(is_before, "it's the cut of the first call: {cut} {moment}");
    for row in cluster.counters(&volumes, &group).await {
        assert!(is_consistent(&row), "{row:?}");
    }
    cluster.delete_group(&group).await;
    drop(writers);
    cluster.tear_down(volumes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_dead_router_has_left_in_doubt_is_settled_without_a_call() {
    let mut cluster = Cluster::new(&["xfs", "xfs"]).await;
    let volumes = cluster.volumes(&[(0, "ext4"), (1, "xfs")]).await;
    // Committed by the first member.
    cluster.arm_router("lead-committed:abort").await;
    asked_in_vain(&mut cluster, "g", &ids(&volumes)).await;
    cluster.restart_router(&[]).await;
    // Until that is known everywhere, none of its members is listed, here or by its source.
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
    cluster.arm_router("kept:abort").await;
    asked_in_vain(&mut cluster, "h", &ids(&volumes)).await;
    cluster.restart_router(&[]).await;
    cluster.until_no_snapshots("rolled back").await;
    cluster.tear_down(volumes).await;
}

/// The first member's agent can't be asked: what is in doubt stays so, and nothing is guessed.
#[tokio::test(flavor = "multi_thread")]
async fn a_doubt_waits_for_the_agent_that_can_end_it() {
    let mut cluster = Cluster::new(&["xfs", "xfs"]).await;
    let volumes = cluster.volumes(&[(0, "ext4"), (1, "xfs")]).await;
    cluster.arm_router("lead-committed:abort").await;
    asked_in_vain(&mut cluster, "g", &ids(&volumes)).await;
    cluster.agents[0].server.kill();
    cluster.restart_router(&[]).await;
    let client = cluster.router.client.clone();
    let again = client.group("g", &ids(&volumes), &PARAMETERS).await;
    let status = again.unwrap_err();
    assert_eq!(status.code(), tonic::Code::Unavailable, "{status}");
    assert!(status.message().contains("node-0"), "{status}");
    // Longer than what settles by itself waits; and through a restart of the one in doubt.
    cluster.agents[1].restart_with(&[]);
    tokio::time::sleep(std::time::Duration::from_secs(15)).await;
    assert_eq!(cluster.agents[1].disk.snapshots().len(), 1, "left alone");
    cluster.agents[0].restart_with(&[]);
    let group = cluster
        .until_made("g", &volumes, &PARAMETERS, "again")
        .await;
    assert_eq!(members(&group).len(), 2);
    cluster.delete_group(&group).await;
    cluster.tear_down(volumes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_routers_asked_for_the_same_group_one_makes_it() {
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
