//! The size of volumes, next to snapshots: reserved for them where the pool says so.

use tonic::Code;

use super::held::{Release, arm, await_stop, end_of, go_on};
use super::room::{check, overwrite, staged};
use super::{GIB, MIB, Node, pattern, refused};
use slackwater_testkit::{Disk, Scratch, Server, WAIT_TIMEOUT};

/// The size of each of two volumes on a pool of 1 GiB, and the amount that is written to each.
const SIZE: u64 = 300 * MIB;
const BYTES: usize = 240 << 20;

#[tokio::test]
async fn a_new_pool_reserves_the_size_of_its_volumes_against_snapshots() {
    let node = Node::on("xfs", GIB);
    let (a, at_a) = staged(&node, "a", SIZE, "ext4", &[]).await;
    let (_, at_b) = staged(&node, "b", SIZE, "ext4", &[]).await;
    overwrite(&at_a.join("data"), 1, BYTES).unwrap();
    let first = node.client.snapshot("s1", &a, &[]).await.unwrap();
    overwrite(&at_a.join("data"), 2, BYTES).unwrap();

    let second = node.client.snapshot("s2", &a, &[]).await;
    let message = refused(second, Code::ResourceExhausted);
    assert!(message.contains("snapshots=reserved"), "{message}");
    assert_eq!(node.client.snapshots("").await.unwrap().len(), 1);
    assert_eq!(node.disk.snapshots().len(), 1, "nothing is left");

    for (at, seed) in [(&at_b, 3), (&at_a, 4)] {
        overwrite(&at.join("data"), seed, BYTES).unwrap();
        check(&at.join("data"), seed, BYTES);
    }
    let id = first.snapshot_id;
    node.client.delete_snapshot(&id).await.unwrap();
    // xfs frees the blocks of a deleted file some time after its last close.
    let start = std::time::Instant::now();
    while let Err(status) = node.client.snapshot("s2", &a, &[]).await {
        let is_full = status.code() == Code::ResourceExhausted;
        assert!(is_full && start.elapsed() < WAIT_TIMEOUT, "{status}");
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
}

/// The same with best effort, which proves that the test above is meaningful.
async fn runs_full(node: &Node, why: &str) {
    let (a, at_a) = staged(node, "a", SIZE, "ext4", &[]).await;
    let (_, at_b) = staged(node, "b", SIZE, "ext4", &[]).await;
    for n in [1, 2] {
        overwrite(&at_a.join("data"), n, BYTES).unwrap();
        let name = format!("s{n}");
        node.client.snapshot(&name, &a, &[]).await.expect(why);
    }
    let written = overwrite(&at_a.join("data"), 3, BYTES)
        .and_then(|()| overwrite(&at_b.join("data"), 4, BYTES));
    assert!(written.is_err(), "{why}: the pool is full");
}

#[tokio::test]
async fn a_pool_of_an_earlier_release_stays_best_effort() {
    let mut node = Node::on("xfs", GIB);
    let path = node.disk.mount_point.join("pool.json");
    let mut record: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let fields = record.as_object_mut().unwrap();
    assert_eq!(fields.remove("snapshots").unwrap(), "reserved");
    assert_eq!(fields["version"], 1, "an earlier release can read it");
    std::fs::write(&path, record.to_string()).unwrap();
    node.restart_with(&[]);
    runs_full(&node, "its record has no setting").await;
}

#[tokio::test]
async fn a_definition_overrides_the_setting_in_the_pool_record() {
    let scratch = Scratch::new();
    let disk = Disk::new(&scratch, "pool", "xfs", GIB);
    let place = disk.mount_point.display();
    let pool = format!("default=file:{place},init,snapshots=best-effort");
    let server = Server::start(&scratch, &[&pool]);
    let client = server.client();
    let node = Node {
        server,
        client,
        disk,
        scratch,
    };
    runs_full(&node, "its definition sets it").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_until_the_cut_count_as_well() {
    let mut node = Node::on("xfs", GIB);
    let (a, at_a) = staged(&node, "a", 400 * MIB, "ext4", &[]).await;
    staged(&node, "b", 400 * MIB, "ext4", &[]).await;
    arm(&mut node, "effect.guard_sync:stop");
    let release = Release::of(&node);
    let (client, of) = (node.client.clone(), a.clone());
    let call = tokio::spawn(async move { client.snapshot("s", &of, &[("retries", "0")]).await });
    await_stop(&node);
    std::fs::write(at_a.join("data"), pattern(1, BYTES)).unwrap();
    go_on(&node);
    let message = refused(end_of(call).await, Code::ResourceExhausted);
    assert!(message.contains("snapshots=reserved"), "{message}");
    assert!(node.disk.snapshots().is_empty(), "nothing is left");
    drop(release);
}
