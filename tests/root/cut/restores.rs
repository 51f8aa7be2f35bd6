//! Restores and clones: of a source in any state, with a larger size, in use together with the
//! source, and independent of it.

use std::path::Path;

use tonic::Code;

use super::{GIB, MIB, Node, check_pattern, refused, write_pattern};
use slackwater_testkit::snapshots::{from_snapshot, from_volume};
use slackwater_testkit::{block, mount};

const BYTES: usize = 3 << 20;

/// Writes without a sync.
fn write_loosely(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
}

/// Takes a snapshot of a mounted volume, restores it twice, larger, while the volume is in use, and
/// deletes everything in any order.
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
    // Later writes are not in it.
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
    // A clone of the volume in use, in its present state.
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
        // ext4 grows online only with a privilege that root does not have on every machine.
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
        // It is independent: what is written here is in no other volume.
        write_pattern(&place.join("synced"), 3, BYTES);
    }
    check_pattern(&staging.join("synced"), 2, BYTES);
    check_pattern(&place.join("synced"), 2, BYTES);

    // The source is deleted first, then the snapshot: the volumes created from them stay.
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
async fn a_mounted_volume_and_its_restore_are_used_together_on_an_xfs_pool() {
    let node = Node::new();
    for fs in ["ext4", "xfs", "btrfs"] {
        restores(&node, fs).await;
    }
    node.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mounted_volume_and_its_restore_are_used_together_on_a_btrfs_pool() {
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
async fn a_restore_that_does_not_fit_its_source_is_refused_with_the_reason() {
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
    let response = make("a", small, mount("ext4"), from_snapshot(&snapshot), &[]).await;
    assert!(refused(response, Code::OutOfRange).contains("required_bytes"));
    let response = make("b", GIB, other, from_snapshot(&snapshot), &[]).await;
    assert!(refused(response, Code::InvalidArgument).contains("volume_capabilities"));
    let gone = snapshot.replace(&snapshot[40..44], "0000");
    let response = make("c", GIB, mount("ext4"), from_snapshot(&gone), &[]).await;
    refused(response, Code::NotFound);
    let response = make("d", GIB, mount("ext4"), from_volume("nothing"), &[]).await;
    refused(response, Code::NotFound);
    // A name keeps its source.
    let created = make("e", GIB, mount("ext4"), from_snapshot(&snapshot), &[]).await;
    let created = created.unwrap().volume_id;
    let response = make("e", GIB, mount("ext4"), from_volume(&id), &[]).await;
    assert!(refused(response, Code::AlreadyExists).contains("volume_content_source"));
    let response = client.snapshot("s", &created, &[]).await;
    assert!(refused(response, Code::AlreadyExists).contains("source_volume_id"));
    client.delete(&created).await.unwrap();
    client.delete_snapshot(&snapshot).await.unwrap();
    node.unstage_and_delete(&id, &staging).await;
    node.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thick_volume_accepts_every_write_after_a_snapshot_on_a_full_pool() {
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
    // Another program fills the pool to the last block.
    let filler = node.disk.mount_point.join("filler");
    slackwater_testkit::succeeds(
        "dd",
        &["if=/dev/zero", &format!("of={}", filler.display()), "bs=1M"],
    );
    write_pattern(&staging.join("data"), 2, 48 << 20);
    check_pattern(&staging.join("data"), 2, 48 << 20);
    // There is no space for another one: it is refused, and nothing of it is left.
    let response = client.snapshot("t", &id, &[]).await;
    refused(response, Code::ResourceExhausted);
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
async fn a_pool_without_block_sharing_copies_idle_volumes() {
    let node = Node::on("ext4", 8 * GIB);
    let client = &node.client;
    let staging = node.staging("v");
    let id = node.staged("v", &staging, "ext4").await;
    write_pattern(&staging.join("data"), 1, BYTES);
    let response = client.snapshot("s", &id, &[]).await;
    let response = refused(response, Code::FailedPrecondition);
    assert!(
        response.contains("image=SIZE"),
        "the solution is named: {response}"
    );
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
