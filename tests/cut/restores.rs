//! Restores and clones: of a source in any state, larger, beside it, and independent of it.

use std::path::Path;

use tonic::Code;

use super::support::snapshots::{from_snapshot, from_volume};
use super::support::{block, mount};
use super::{GIB, MIB, Node, check_pattern, refused, write_pattern};

const BYTES: usize = 3 << 20;

/// Writes without a sync.
fn write_loosely(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
}

/// Snapshot of a mounted volume; restored beside it, larger, twice; all of it in any order gone.
pub async fn restores(node: &Node, fs: &str) {
    let client = &node.client;
    let staging = node.staging(fs);
    let id = node.staged(fs, &staging, fs).await;
    write_pattern(&staging.join("synced"), 1, BYTES);
    write_loosely(&staging.join("loose"), "never synced");
    let snapshot = client.snapshot(&format!("s-{fs}"), &id, &[]).await.unwrap();
    assert!(snapshot.ready_to_use);
    assert_eq!(snapshot.source_volume_id, id);
    assert_eq!(snapshot.size_bytes as u64, GIB);
    let again = client.snapshot(&format!("s-{fs}"), &id, &[]).await.unwrap();
    assert_eq!(again, snapshot, "a repeat answers the same");
    // What happens later isn't in it.
    write_pattern(&staging.join("synced"), 2, BYTES);
    write_loosely(&staging.join("later"), "too late");

    let source = from_snapshot(&snapshot.snapshot_id);
    let mut copies = Vec::new();
    for (n, size) in [(0, GIB), (1, 2 * GIB)] {
        let name = format!("{fs}-restored-{n}");
        let volume = client
            .create_from(&name, size, mount(fs), source.clone(), &[])
            .await
            .unwrap();
        assert_eq!(volume.capacity_bytes as u64, size);
        assert_eq!(volume.content_source, Some(source.clone()));
        let place = node.staging(&name);
        copies.push((volume.volume_id, place, size));
    }
    // A clone of the volume in use, as it is now.
    let name = format!("{fs}-clone");
    let clone = client
        .create_from(&name, GIB, mount(fs), from_volume(&id), &[])
        .await
        .unwrap();
    let place = node.staging(&name);
    client
        .stage(&clone.volume_id, &place, mount(fs))
        .await
        .unwrap();
    check_pattern(&place.join("synced"), 2, BYTES);
    assert_eq!(
        std::fs::read_to_string(place.join("later")).unwrap(),
        "too late"
    );

    for (id, place, size) in &copies {
        // ext4 grows online only with a right that not every machine gives to root.
        if fs == "ext4" && *size > GIB {
            continue;
        }
        client.stage(id, place, mount(fs)).await.unwrap();
        check_pattern(&place.join("synced"), 1, BYTES);
        assert_eq!(
            std::fs::read_to_string(place.join("loose")).unwrap(),
            "never synced"
        );
        assert!(!place.join("later").exists());
        let (total, _) = client.stats(id, place).await.unwrap();
        assert!(total > size / 2, "{fs}: {total} of {size}");
        // It's its own: what is written here is nowhere else.
        write_pattern(&place.join("synced"), 3, BYTES);
    }
    check_pattern(&staging.join("synced"), 2, BYTES);
    check_pattern(&place.join("synced"), 2, BYTES);

    // The source first, then the snapshot: what was made from them stays.
    node.unstage_and_delete(&id, &staging).await;
    client.delete_snapshot(&snapshot.snapshot_id).await.unwrap();
    client.delete_snapshot(&snapshot.snapshot_id).await.unwrap();
    check_pattern(&place.join("synced"), 2, BYTES);
    node.unstage_and_delete(&clone.volume_id, &place).await;
    for (id, place, size) in &copies {
        if fs != "ext4" || *size == GIB {
            check_pattern(&place.join("synced"), 3, BYTES);
            client.unstage(id, place).await.unwrap();
        }
        client.delete(id).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mounted_volume_is_restored_beside_itself_on_an_xfs_pool() {
    let node = Node::new();
    for fs in ["ext4", "xfs", "btrfs"] {
        restores(&node, fs).await;
    }
    node.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mounted_volume_is_restored_beside_itself_on_a_btrfs_pool() {
    let node = Node::on("btrfs", 16 * GIB);
    for fs in ["ext4", "xfs", "btrfs"] {
        restores(&node, fs).await;
    }
    node.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_raw_block_volume_is_cut_alone_published_or_not() {
    let node = Node::new();
    let client = &node.client;
    let (staging, target) = (node.staging("raw"), node.path("raw.target"));
    let id = client.create("raw", GIB, block(), &[]).await.unwrap();
    client.stage(&id, &staging, block()).await.unwrap();
    client
        .publish(&id, &staging, &target, block(), false)
        .await
        .unwrap();
    write_pattern(&target, 1, BYTES);
    let published = client.snapshot("published", &id, &[]).await.unwrap();
    write_pattern(&target, 2, BYTES);
    client.unpublish(&id, &target).await.unwrap();
    client.unstage(&id, &staging).await.unwrap();
    let quiet = client.snapshot("quiet", &id, &[]).await.unwrap();
    client.delete(&id).await.unwrap();
    for (seed, snapshot) in [(1, published), (2, quiet)] {
        let name = format!("raw-{seed}");
        let source = from_snapshot(&snapshot.snapshot_id);
        let answer = client.create_from(&name, GIB, mount("ext4"), source.clone(), &[]);
        refused(answer.await, Code::InvalidArgument);
        let copy = client.create_from(&name, GIB, block(), source, &[]).await;
        let copy = copy.unwrap().volume_id;
        client.delete_snapshot(&snapshot.snapshot_id).await.unwrap();
        client.stage(&copy, &staging, block()).await.unwrap();
        client
            .publish(&copy, &staging, &target, block(), false)
            .await
            .unwrap();
        check_pattern(&target, seed, BYTES);
        client.unpublish(&copy, &target).await.unwrap();
        client.unstage(&copy, &staging).await.unwrap();
        client.delete(&copy).await.unwrap();
    }
    node.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_does_not_fit_a_source_is_refused_by_name() {
    let node = Node::new();
    let client = &node.client;
    let staging = node.staging("v");
    let id = node.staged("v", &staging, "ext4").await;
    let snapshot = client.snapshot("s", &id, &[]).await.unwrap().snapshot_id;
    let make = |name: &'static str, size, capability, source, parameters| {
        let client = client.clone();
        async move {
            client
                .create_from(name, size, capability, source, parameters)
                .await
        }
    };
    let (small, other) = (512 * MIB, mount("xfs"));
    let said = make("a", small, mount("ext4"), from_snapshot(&snapshot), &[]).await;
    assert!(refused(said, Code::OutOfRange).contains("required_bytes"));
    let said = make("b", GIB, other, from_snapshot(&snapshot), &[]).await;
    assert!(refused(said, Code::InvalidArgument).contains("volume_capabilities"));
    let gone = snapshot.replace(&snapshot[40..44], "0000");
    let said = make("c", GIB, mount("ext4"), from_snapshot(&gone), &[]).await;
    refused(said, Code::NotFound);
    let said = make("d", GIB, mount("ext4"), from_volume("nothing"), &[]).await;
    refused(said, Code::NotFound);
    // A name keeps its source.
    let made = make("e", GIB, mount("ext4"), from_snapshot(&snapshot), &[]).await;
    let made = made.unwrap().volume_id;
    let said = make("e", GIB, mount("ext4"), from_volume(&id), &[]).await;
    assert!(refused(said, Code::AlreadyExists).contains("volume_content_source"));
    let said = client.snapshot("s", &made, &[]).await;
    assert!(refused(said, Code::AlreadyExists).contains("source_volume_id"));
    client.delete(&made).await.unwrap();
    client.delete_snapshot(&snapshot).await.unwrap();
    node.unstage_and_delete(&id, &staging).await;
    node.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thick_volume_takes_every_write_after_a_snapshot_on_a_full_pool() {
    let node = Node::on("xfs", 5 * GIB / 2);
    let client = &node.client;
    let thick = [("allocation", "thick")];
    let staging = node.staging("v");
    let id = client
        .create("v", GIB, mount("ext4"), &thick)
        .await
        .unwrap();
    client.stage(&id, &staging, mount("ext4")).await.unwrap();
    write_pattern(&staging.join("data"), 1, 48 << 20);
    let snapshot = client.snapshot("s", &id, &[]).await.unwrap().snapshot_id;
    // Somebody else fills the pool to the last block.
    let filler = node.disk.mount_point.join("filler");
    super::support::succeeds(
        "dd",
        &["if=/dev/zero", &format!("of={}", filler.display()), "bs=1M"],
    );
    write_pattern(&staging.join("data"), 2, 48 << 20);
    check_pattern(&staging.join("data"), 2, 48 << 20);
    // No room for another one: refused, and nothing is left of it.
    let said = client.snapshot("t", &id, &[]).await;
    refused(said, Code::ResourceExhausted);
    assert_eq!(
        client.snapshots("").await.unwrap(),
        std::slice::from_ref(&snapshot)
    );
    std::fs::remove_file(filler).unwrap();
    client.delete_snapshot(&snapshot).await.unwrap();
    node.unstage_and_delete(&id, &staging).await;
    node.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_can_not_share_copies_what_nobody_uses() {
    let node = Node::on("ext4", 8 * GIB);
    let client = &node.client;
    let staging = node.staging("v");
    let id = node.staged("v", &staging, "ext4").await;
    write_pattern(&staging.join("data"), 1, BYTES);
    let said = client.snapshot("s", &id, &[]).await;
    let said = refused(said, Code::FailedPrecondition);
    assert!(said.contains("image=SIZE"), "the way out is told: {said}");
    let clone = client.create_from("c", GIB, mount("ext4"), from_volume(&id), &[]);
    refused(clone.await, Code::FailedPrecondition);
    client.unstage(&id, &staging).await.unwrap();
    let snapshot = client.snapshot("s", &id, &[]).await.unwrap().snapshot_id;
    client.delete(&id).await.unwrap();
    let source = from_snapshot(&snapshot);
    let copy = client
        .create_from("c", GIB, mount("ext4"), source, &[])
        .await;
    let copy = copy.unwrap().volume_id;
    client.stage(&copy, &staging, mount("ext4")).await.unwrap();
    check_pattern(&staging.join("data"), 1, BYTES);
    node.unstage_and_delete(&copy, &staging).await;
    client.delete_snapshot(&snapshot).await.unwrap();
    node.assert_nothing_left();
}
