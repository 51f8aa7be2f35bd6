//! Space: a pool that fills, with thin and thick volumes, and the remains of a delete on the disk.

use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use tonic::Code;

use super::{GIB, MIB, Node, refused, write_pattern};
use slackwater_testkit::{block, eventually, mount, run, succeeds};

/// Fills a file system.
fn fill(path: &Path) -> Vec<std::io::Error> {
    let mut file = std::fs::File::create(path).unwrap();
    let mut ends = Vec::new();
    for piece in [1 << 20, 1 << 16, 4096] {
        let bytes = vec![0xa5u8; piece];
        ends.push(loop {
            if let Err(error) = file.write_all(&bytes) {
                break error;
            }
        });
        ends.extend(file.sync_data().err());
    }
    ends
}

fn free(path: &Path) -> u64 {
    let found = nix::sys::statvfs::statvfs(path).unwrap();
    found.blocks_available() * found.fragment_size()
}

/// Takes the last block of a pool by reserving it.
fn exhaust(pool: &Path) {
    let file = std::fs::File::create(pool.join("stranger")).unwrap();
    let mut end = 0;
    for piece in [64 * MIB as i64, 1 << 20, 1 << 16, 4096] {
        use nix::fcntl::{FallocateFlags, fallocate};
        while fallocate(&file, FallocateFlags::empty(), end, piece).is_ok() {
            end += piece;
        }
    }
    file.sync_all().unwrap();
}

/// The length of the data that [`fill`] wrote, after reading every byte of it without the page
/// cache.
fn whole(path: &Path) -> u64 {
    use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
    let mut file = std::fs::File::open(path).unwrap();
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
    let (expected, mut found) = (vec![0xa5u8; 1 << 20], vec![0; 1 << 20]);
    let mut length = 0;
    loop {
        let n = std::io::Read::read(&mut file, &mut found).unwrap();
        if n == 0 {
            return length as u64;
        }
        assert!(found[..n] == expected[..n], "at {length}");
        length += n;
    }
}

fn allocated(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().blocks() * 512
}

#[tokio::test]
async fn a_volume_that_does_not_fit_is_refused_and_leaves_nothing() {
    for fs in ["xfs", "ext4", "btrfs"] {
        let node = Node::on(fs, 2 * GIB);
        let room = node.client.capacity(&[]).await.unwrap();
        assert!(room > GIB && room < 2 * GIB, "{room}");
        let message = refused(
            node.client
                .create("big", room + 4096, mount("ext4"), &[])
                .await,
            Code::ResourceExhausted,
        );
        assert!(
            message.contains("default") && message.contains(&room.to_string()),
            "{message}"
        );
        node.assert_nothing_left();
        // The offered space can be allocated, and a repeat does not create a second volume.
        let id = node
            .client
            .create("all", room, mount("ext4"), &[])
            .await
            .unwrap();
        assert_eq!(
            node.client
                .create("all", room, mount("ext4"), &[])
                .await
                .unwrap(),
            id
        );
        assert_eq!(node.client.capacity(&[]).await.unwrap(), 0);
        refused(
            node.client
                .create("more", 16 * MIB, mount("ext4"), &[])
                .await,
            Code::ResourceExhausted,
        );
        let message = refused(node.client.expand(&id, room + MIB).await, Code::OutOfRange);
        assert!(message.contains("available"), "{message}");
        node.client.delete(&id).await.unwrap();
        assert!(node.client.capacity(&[]).await.unwrap() >= room - MIB);
        node.assert_nothing_left();
    }
}

#[tokio::test]
async fn only_the_added_size_of_a_growth_needs_space() {
    let node = Node::on("xfs", 2 * GIB);
    let id = node
        .client
        .create("g", GIB, mount("ext4"), &[("allocation", "thick")])
        .await
        .unwrap();
    assert_eq!(
        node.client
            .create("g", GIB, mount("ext4"), &[("allocation", "thick")])
            .await
            .unwrap(),
        id
    );
    assert_eq!(
        node.client.expand(&id, GIB + 512 * MIB).await.unwrap(),
        GIB + 512 * MIB
    );
    assert!(allocated(&node.image(&id)) >= GIB + 512 * MIB);
    refused(node.client.expand(&id, 3 * GIB).await, Code::OutOfRange);
    assert_eq!(
        node.client.expand(&id, GIB).await.unwrap(),
        GIB + 512 * MIB,
        "volumes cannot shrink"
    );
    node.client.delete(&id).await.unwrap();
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_thick_volume_accepts_every_write_on_a_full_pool() {
    for pool in ["xfs", "ext4"] {
        let node = Node::on(pool, 2 * GIB);
        for fs in ["ext4", "xfs", "btrfs"] {
            let staging = node.staging(fs);
            let size = 400 * MIB;
            let id = node
                .client
                .create(fs, size, mount(fs), &[("allocation", "thick")])
                .await
                .unwrap();
            node.stage(&id, &staging, mount(fs)).await;
            assert!(
                allocated(&node.image(&id)) >= size,
                "{fs} on {pool}: mkfs gave no block back"
            );
            // Written, deleted and trimmed: the blocks stay reserved.
            fill(&staging.join("fill"));
            std::fs::remove_file(staging.join("fill")).unwrap();
            run("sync", &["-f", staging.to_str().unwrap()]);
            let _ = succeeds("fstrim", &[staging.to_str().unwrap()]);
            assert!(
                allocated(&node.image(&id)) >= size,
                "{fs} on {pool}: fstrim gave no block back"
            );
            // Deleted data is freed once the file system's own threads have processed it.
            eventually("the volume has its free space again", || {
                free(&staging) > size / 2
            });
            exhaust(&node.disk.mount_point);
            let ends = fill(&staging.join("data"));
            let room = run("df", &["-B1", staging.to_str().unwrap()]);
            run("sync", &["-f", staging.to_str().unwrap()]);
            let written = whole(&staging.join("data"));
            assert!(
                written > size / 2,
                "{fs} on {pool}: {written} bytes were accepted: {ends:?}\n{room}"
            );
            std::fs::remove_file(node.disk.mount_point.join("stranger")).unwrap();
            node.unstage_and_delete(&id, &staging).await;
        }
        node.assert_nothing_left();
    }
}

#[tokio::test]
async fn thick_is_refused_where_it_cannot_be_guaranteed() {
    let node = Node::on("btrfs", 2 * GIB);
    let message = refused(
        node.client
            .create("t", GIB, mount("ext4"), &[("allocation", "thick")])
            .await,
        Code::InvalidArgument,
    );
    assert!(
        message.contains("allocation") && message.contains("btrfs"),
        "{message}"
    );
    assert_eq!(
        node.client
            .capacity(&[("allocation", "thick")])
            .await
            .unwrap(),
        0
    );
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_thin_pool_that_fills_under_a_writer_fails_the_write_and_nothing_else() {
    let scratch_pool = Node::on("xfs", GIB);
    let node = scratch_pool;
    let staging = node.staging("t");
    let id = node
        .client
        .create("t", 600 * MIB, mount("ext4"), &[])
        .await
        .unwrap();
    let kept = node
        .client
        .create("kept", 16 * MIB, mount("ext4"), &[])
        .await
        .unwrap();
    node.stage(&id, &staging, mount("ext4")).await;
    exhaust(&node.disk.mount_point);
    let mut file = std::fs::File::create(staging.join("data")).unwrap();
    let written = (0..550).try_for_each(|_| {
        file.write_all(&vec![1; MIB as usize])
            .and_then(|()| file.sync_data())
    });
    assert!(
        written.is_err(),
        "a full pool cannot accept reserved writes next to a foreign file"
    );
    drop(file);
    // Everything that frees space still works.
    std::fs::remove_file(node.disk.mount_point.join("stranger")).unwrap();
    node.unstage_and_delete(&id, &staging).await;
    assert_eq!(node.client.list().await.unwrap(), vec![kept.clone()]);
    node.client.delete(&kept).await.unwrap();
    node.assert_nothing_left();
}

#[tokio::test]
async fn delete_works_on_a_pool_that_is_full_to_the_last_block() {
    for fs in ["xfs", "ext4", "btrfs"] {
        let node = Node::on(fs, GIB);
        let id = node
            .client
            .create("d", 100 * MIB, mount("ext4"), &[])
            .await
            .unwrap();
        exhaust(&node.disk.mount_point);
        node.client.delete(&id).await.unwrap();
        std::fs::remove_file(node.disk.mount_point.join("stranger")).unwrap();
        node.assert_nothing_left();
    }
}

/// The solution for a full pool that the documentation names.
#[tokio::test]
async fn volumes_in_use_can_be_unstaged_and_deleted_on_a_full_pool() {
    for fs in ["xfs", "ext4"] {
        let node = Node::on(fs, GIB);
        let mut volumes = Vec::new();
        for (name, capability) in [("m", mount("ext4")), ("b", block())] {
            let created = node.client.create(name, 100 * MIB, capability.clone(), &[]);
            let id = created.await.unwrap();
            let (staging, target) = (node.staging(name), node.path(name));
            let stage = node.client.stage(&id, &staging, capability.clone());
            stage.await.unwrap();
            let publish = node
                .client
                .publish(&id, &staging, &target, capability, false);
            publish.await.unwrap();
            volumes.push((id, staging, target));
        }
        exhaust(&node.disk.mount_point);
        for (id, staging, target) in &volumes {
            node.client.unpublish(id, target).await.unwrap();
            node.client.unstage(id, staging).await.unwrap();
        }
        // A pod of a raw volume comes back, and ends again.
        let (id, staging, target) = &volumes[1];
        node.stage(id, staging, block()).await;
        let publish = node.client.publish(id, staging, target, block(), false);
        publish.await.unwrap();
        node.client.unpublish(id, target).await.unwrap();
        node.client.unstage(id, staging).await.unwrap();
        for (id, ..) in &volumes {
            node.client.delete_unused(id).await;
        }
        std::fs::remove_file(node.disk.mount_point.join("stranger")).unwrap();
        node.assert_nothing_left();
    }
}

/// Whether a disk's image contains a text.
fn disk_holds(image: &Path, text: &[u8]) -> bool {
    let bytes = std::fs::read(image).unwrap();
    bytes
        .windows(text.len())
        .step_by(512)
        .any(|window| window == text)
}

#[tokio::test]
async fn wipe_zero_leaves_no_content_on_the_disk_and_wipe_none_leaves_it() {
    for (wipe, modified, remains) in [
        ("none", None, true),
        ("zero", None, false),
        ("none", Some("zero"), false),
    ] {
        let node = Node::on("xfs", 512 * MIB);
        let (staging, target) = (node.staging("w"), node.path("w"));
        let id = node
            .client
            .create("w", 32 * MIB, block(), &[("wipe", wipe)])
            .await
            .unwrap();
        node.stage(&id, &staging, block()).await;
        node.client
            .publish(&id, &staging, &target, block(), false)
            .await
            .unwrap();
        let secret = b"a secret that begins at a sector 4f1d7a".repeat(14)[..512].to_vec();
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(&target)
            .unwrap();
        (&file).write_all(&secret).unwrap();
        file.sync_all().unwrap();
        drop(file);
        if let Some(wipe) = modified {
            let request = slackwater::csi::ControllerModifyVolumeRequest {
                volume_id: id.clone(),
                mutable_parameters: [("wipe".to_string(), wipe.to_string())].into(),
                ..Default::default()
            };
            node.client
                .controller()
                .controller_modify_volume(request)
                .await
                .unwrap();
        }
        node.client.unpublish(&id, &target).await.unwrap();
        node.unstage_and_delete(&id, &staging).await;
        node.assert_nothing_left();
        run("sync", &["-f", node.disk.mount_point.to_str().unwrap()]);
        assert_eq!(
            disk_holds(&node.disk.image, &secret),
            remains,
            "wipe {wipe}, then {modified:?}"
        );
    }
}

#[tokio::test]
async fn wipe_discard_discards_the_blocks_of_the_disk() {
    let node = Node::on("xfs", GIB);
    let (staging, target) = (node.staging("w"), node.path("w"));
    let id = node
        .client
        .create("w", 256 * MIB, block(), &[("wipe", "discard")])
        .await
        .unwrap();
    node.stage(&id, &staging, block()).await;
    node.client
        .publish(&id, &staging, &target, block(), false)
        .await
        .unwrap();
    write_pattern(&target, 1, 200 << 20);
    node.client.unpublish(&id, &target).await.unwrap();
    node.client.unstage(&id, &staging).await.unwrap();
    run("sync", &["-f", node.disk.mount_point.to_str().unwrap()]);
    let before = allocated(&node.disk.image);
    node.client.delete(&id).await.unwrap();
    // Blocks are discarded on the disk a while later, once for all deletes of that time.
    let given_back = || allocated(&node.disk.image) + 150 * MIB < before;
    eventually("the disk has its blocks back", given_back);
    node.assert_nothing_left();
}
