//! Write order across nodes: volumes of several agents are frozen at one moment.

use slackwater_testkit::cluster::{Cluster, ids};
use slackwater_testkit::snapshots::members;
use slackwater_testkit::writers::{Writers, is_consistent};

/// Cuts `cuts` times under load, or, `in_sequence`, one volume after the other. Returns the number
/// of cuts that were out of order.
async fn violations(
    pools: &[&str],
    on: &[(usize, &'static str)],
    cuts: usize,
    in_sequence: bool,
) -> usize {
    let cluster = Cluster::new(pools).await;
    let volumes = cluster.volumes(on).await;
    let client = &cluster.router.client;
    let writers = Writers::start(&volumes);
    let (mut wrong, mut last) = (0, 0);
    for cut in 0..cuts {
        let name = format!("cut-{cut}");
        let group = match in_sequence {
            true => client.in_sequence(&name, &ids(&volumes)).await,
            false => cluster.until_made(&name, &volumes, &[], &name).await,
        };
        for (snapshot, id) in group.snapshots.iter().zip(ids(&volumes)) {
            assert_eq!(snapshot.source_volume_id, id);
            assert!(in_sequence || snapshot.creation_time == group.creation_time);
            assert_eq!(snapshot.group_snapshot_id, group.group_snapshot_id);
        }
        let found = cluster.counters(&volumes, &group).await;
        wrong += usize::from(!found.iter().all(|row| is_consistent(row)));
        let writes = writers.counts();
        assert!(writes > last, "the writers continue after each cut");
        last = writes;
        assert_eq!(members(&group).len(), volumes.len());
        client.delete_all_of(&group).await;
    }
    drop(writers);
    cluster.tear_down(volumes).await;
    wrong
}

#[tokio::test(flavor = "multi_thread")]
async fn no_cut_of_two_volumes_on_two_nodes_is_out_of_order() {
    let on = [(0, "ext4"), (1, "xfs")];
    assert_eq!(violations(&["xfs", "btrfs"], &on, 20, false).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_cut_of_four_volumes_on_two_nodes_is_out_of_order() {
    // The counter alternates between the nodes.
    let on = [(0, "ext4"), (1, "xfs"), (0, "btrfs"), (1, "ext4")];
    assert_eq!(violations(&["xfs", "xfs"], &on, 20, false).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_cut_of_volumes_on_three_nodes_is_out_of_order() {
    let on = [(2, "ext4"), (0, "ext4"), (1, "xfs")];
    assert_eq!(violations(&["xfs", "btrfs", "xfs"], &on, 5, false).await, 0);
}

/// Proof that the oracle detects a violation: the same writers, but each volume is frozen and cut
/// by itself.
#[tokio::test(flavor = "multi_thread")]
async fn cut_in_sequence_on_each_node_the_order_is_broken() {
    let on = [(0, "ext4"), (1, "ext4"), (0, "ext4"), (1, "ext4")];
    assert_ne!(violations(&["xfs", "xfs"], &on, 5, true).await, 0);
}
