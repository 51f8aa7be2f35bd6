//! Write order: a counter is written from volume to volume, and is never synced. If all volumes are
//! cut at one moment, no volume is ahead of the one before it, and none is more than one behind.

use std::path::{Path, PathBuf};

use futures_util::future::join_all;

use super::{GIB, Node, rounds};
use slackwater_testkit::mount;
use slackwater_testkit::snapshots::{from_snapshot, members};
pub use slackwater_testkit::writers::{WRITERS, Writers, counts_in, is_consistent};

/// The minimum size of xfs.
const SIZE: u64 = GIB / 2;

pub struct Volume {
    pub id: String,
    pub staging: PathBuf,
    fs: &'static str,
}

impl AsRef<Path> for Volume {
    fn as_ref(&self) -> &Path {
        &self.staging
    }
}

/// The counters in restored volumes, by writer and volume.
pub async fn counters(node: &Node, volumes: &[Volume], snapshots: &[String]) -> Vec<Vec<u64>> {
    let restored = volumes.iter().zip(snapshots).enumerate();
    let restored = restored.map(|(n, (volume, snapshot))| async move {
        let name = format!("restored-{n}");
        let staging = node.staging(&name);
        let capability = mount(volume.fs);
        let source = from_snapshot(snapshot);
        let create = node
            .client
            .create_from(&name, SIZE, capability.clone(), source, &[]);
        let id = create.await.unwrap().volume_id;
        let stage = node.client.stage(&id, &staging, capability);
        stage.await.unwrap();
        let counts = counts_in(&staging);
        node.unstage_and_delete(&id, &staging).await;
        counts
    });
    let counts = join_all(restored).await;
    (0..WRITERS)
        .map(|writer| counts.iter().map(|counters| counters[writer]).collect())
        .collect()
}

/// Creates and stages volumes of these kinds.
pub async fn staged(node: &Node, kinds: &[&'static str]) -> Vec<Volume> {
    let mut volumes = Vec::new();
    for (n, fs) in kinds.iter().enumerate() {
        let name = format!("v{n}");
        let staging = node.staging(&name);
        let id = node.client.create(&name, SIZE, mount(fs), &[]).await;
        let id = id.unwrap();
        node.stage(&id, &staging, mount(fs)).await;
        volumes.push(Volume { id, staging, fs });
    }
    volumes
}

/// Cuts `cuts` times under load, or, `in_sequence`, one volume after the other. Returns the number
/// of cuts that were out of order.
async fn violations(node: &Node, kinds: &[&'static str], cuts: usize, in_sequence: bool) -> usize {
    let volumes = staged(node, kinds).await;
    let ids: Vec<String> = volumes.iter().map(|volume| volume.id.clone()).collect();
    let writers = Writers::start(&volumes);
    let (mut wrong, mut last) = (0, 0);
    for cut in 0..cuts {
        let (client, name) = (&node.client, format!("cut-{cut}"));
        let group = match in_sequence {
            true => client.in_sequence(&name, &ids).await,
            false => {
                let group = client.group(&name, &ids, &[]).await;
                group.unwrap_or_else(|status| panic!("{status}\n{}", node.server.log()))
            }
        };
        let found = counters(node, &volumes, &members(&group)).await;
        wrong += usize::from(!found.iter().all(|row| is_consistent(row)));
        let writes = writers.counts();
        assert!(writes > last, "the writers continue after each cut");
        last = writes;
        client.delete_all_of(&group).await;
    }
    drop(writers);
    for volume in &volumes {
        node.unstage_and_delete(&volume.id, &volume.staging).await;
    }
    wrong
}

#[tokio::test(flavor = "multi_thread")]
async fn no_cut_of_two_volumes_is_out_of_order() {
    let node = Node::new();
    for kinds in [
        ["ext4", "ext4"],
        ["xfs", "xfs"],
        ["btrfs", "btrfs"],
        ["xfs", "ext4"],
    ] {
        let cuts = rounds(15, 1500);
        assert_eq!(violations(&node, &kinds, cuts, false).await, 0, "{kinds:?}");
    }
    node.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn no_cut_of_four_volumes_is_out_of_order() {
    let node = Node::new();
    let cuts = rounds(30, 3000);
    let kinds = ["ext4", "xfs", "btrfs", "ext4"];
    assert_eq!(violations(&node, &kinds, cuts, false).await, 0);
    node.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn no_cut_of_sixteen_volumes_is_out_of_order() {
    let node = Node::on("xfs", 32 * GIB);
    let cuts = rounds(8, 800);
    assert_eq!(violations(&node, &["ext4"; 16], cuts, false).await, 0);
    node.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn no_cut_on_a_btrfs_pool_is_out_of_order() {
    let node = Node::on("btrfs", 16 * GIB);
    let cuts = rounds(10, 500);
    let kinds = ["ext4", "xfs", "btrfs"];
    assert_eq!(violations(&node, &kinds, cuts, false).await, 0);
    node.assert_nothing_left();
}

/// Proof that the oracle detects a violation: the same writers, but each volume is frozen and cut
/// by itself.
#[tokio::test(flavor = "multi_thread")]
async fn cut_in_sequence_the_order_is_broken() {
    let node = Node::new();
    assert_ne!(violations(&node, &["ext4"; 4], 5, true).await, 0);
    node.assert_nothing_left();
}
