//! Write order across nodes: volumes of several agents are frozen at one moment.

use std::sync::atomic::Ordering;

use super::cluster::{Cluster, ids};
use crate::support::snapshots::members;
use crate::support::writers::{Writers, is_consistent};

/// Cuts `cuts` times under load. Returns the number of cuts that were out of order.
async fn violations(
    pools: &[&str],
    on: &[(usize, &'static str)],
    cuts: usize,
    environment: &[(&str, &str)],
) -> usize {
    let mut cluster = Cluster::new(pools).await;
    let volumes = cluster.volumes(on).await;
    if !environment.is_empty() {
        for agent in &mut cluster.agents {
            agent.restart_with(environment);
        }
    }
    let writers = Writers::start(&volumes);
    let (mut wrong, mut last) = (0, 0);
    for cut in 0..cuts {
        let name = format!("cut-{cut}");
        let group = cluster.until_made(&name, &volumes, &[], &name).await;
        for (snapshot, id) in group.snapshots.iter().zip(ids(&volumes)) {
            assert_eq!(snapshot.source_volume_id, id);
            assert_eq!(snapshot.creation_time, group.creation_time);
            assert_eq!(snapshot.group_snapshot_id, group.group_snapshot_id);
        }
        let found = cluster.counters(&volumes, &group).await;
        wrong += usize::from(!found.iter().all(|row| is_consistent(row)));
        let writes = writers.rounds.load(Ordering::Relaxed);
        assert!(writes > last, "the writers continue after each cut");
        last = writes;
        assert_eq!(members(&group).len(), volumes.len());
        cluster.delete_group(&group).await;
    }
    drop(writers);
    cluster.tear_down(volumes).await;
    wrong
}

#[tokio::test(flavor = "multi_thread")]
async fn no_cut_of_two_volumes_on_two_nodes_is_out_of_order() {
    let on = [(0, "ext4"), (1, "xfs")];
    assert_eq!(violations(&["xfs", "btrfs"], &on, 20, &[]).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_cut_of_four_volumes_on_two_nodes_is_out_of_order() {
    // The counter alternates between the nodes.
    let on = [(0, "ext4"), (1, "xfs"), (0, "btrfs"), (1, "ext4")];
    assert_eq!(violations(&["xfs", "xfs"], &on, 20, &[]).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_cut_of_volumes_on_three_nodes_is_out_of_order() {
    let on = [(2, "ext4"), (0, "ext4"), (1, "xfs")];
    assert_eq!(violations(&["xfs", "btrfs", "xfs"], &on, 5, &[]).await, 0);
}

/// Proof that the oracle detects a violation: the same writers, but each volume is frozen and cut
/// by itself.
#[tokio::test(flavor = "multi_thread")]
async fn cut_in_sequence_on_each_node_the_order_is_broken() {
    let on = [(0, "ext4"), (1, "ext4"), (0, "ext4"), (1, "ext4")];
    let in_sequence = [("SLACKWATER_CUT_IN_SEQUENCE", "1")];
    assert_ne!(violations(&["xfs", "xfs"], &on, 5, &in_sequence).await, 0);
}
