//! Restores and clones for readers on many nodes (ReadOnlyMany), which are never written to.

use slackwater::csi::VolumeCapability;
use slackwater::csi::volume_capability::AccessMode;
use slackwater::csi::volume_capability::access_mode::Mode;
use tonic::Code;

use super::{GIB, Node, check_pattern, refused, write_pattern};
use slackwater_testkit::snapshots::{from_snapshot, from_volume};
use slackwater_testkit::{block, disk, mount, run};

fn for_readers(capability: VolumeCapability) -> VolumeCapability {
    VolumeCapability {
        access_mode: Some(AccessMode {
            mode: Mode::MultiNodeReaderOnly.into(),
        }),
        ..capability
    }
}

#[tokio::test]
async fn a_restore_for_readers_is_mounted_read_only_whatever_is_requested() {
    let node = Node::new();
    let client = &node.client;
    for fs in ["ext4", "xfs", "btrfs"] {
        let staging = node.staging(fs);
        let id = node.staged(fs, &staging, fs).await;
        write_pattern(&staging.join("data"), 3, 1 << 20);
        // It was cut without a freeze, so its log has to be replayed.
        let words = [("consistency", "crash")];
        let snapshot = client.snapshot(fs, &id, &words).await.unwrap();
        let name = format!("{fs}-readers");
        let source = from_snapshot(&snapshot.snapshot_id);
        let asked = for_readers(mount(fs));
        let created = client.create_from(&name, GIB, asked.clone(), source, &[]);
        let copy = created.await.unwrap().volume_id;
        let stage = node.staging(&name);
        for _ in 0..2 {
            client.stage(&copy, &stage, asked.clone()).await.unwrap();
        }
        let targets = ["one", "two"].map(|n| node.path(&format!("{name}.{n}")));
        for (target, readonly) in targets.iter().zip([false, true]) {
            for _ in 0..2 {
                client
                    .publish(&copy, &stage, target, asked.clone(), readonly)
                    .await
                    .unwrap();
            }
            check_pattern(&target.join("data"), 3, 1 << 20);
        }
        for at in [&stage, &targets[0], &targets[1]] {
            let error = std::fs::write(at.join("data"), "x").unwrap_err();
            assert_eq!(error.raw_os_error(), Some(nix::libc::EROFS), "{fs}");
            let mounts = disk::mounts_below(at.parent().unwrap());
            let mount = mounts.iter().rfind(|mount| mount.mount_point == **at);
            assert!(
                !mount.unwrap().super_options.contains("norecovery"),
                "{mount:?}"
            );
        }
        for target in &targets {
            client.unpublish(&copy, target).await.unwrap();
        }
        node.unstage_and_delete(&copy, &stage).await;
        client.delete_snapshot(&snapshot.snapshot_id).await.unwrap();
        // The volume itself is for one node.
        let other = node.staging("other");
        refused(
            client.stage(&id, &other, asked).await,
            Code::InvalidArgument,
        );
        node.unstage_and_delete(&id, &staging).await;
    }
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_block_clone_for_readers_has_a_read_only_device() {
    let node = Node::new();
    let client = &node.client;
    let (staging, target) = (node.staging("b"), node.path("b.target"));
    let id = client.create("b", GIB, block(), &[]).await.unwrap();
    client.stage(&id, &staging, block()).await.unwrap();
    client
        .publish(&id, &staging, &target, block(), false)
        .await
        .unwrap();
    write_pattern(&target, 4, 1 << 20);
    client.unpublish(&id, &target).await.unwrap();
    client.unstage(&id, &staging).await.unwrap();
    let asked = for_readers(block());
    let created = client.create_from("readers", GIB, asked.clone(), from_volume(&id), &[]);
    let copy = created.await.unwrap().volume_id;
    client.stage(&copy, &staging, asked.clone()).await.unwrap();
    for _ in 0..2 {
        client
            .publish(&copy, &staging, &target, asked.clone(), false)
            .await
            .unwrap();
    }
    let read_only = run("blockdev", &["--getro", target.to_str().unwrap()]);
    assert_eq!(read_only.trim(), "1");
    check_pattern(&target, 4, 1 << 20);
    client.unpublish(&copy, &target).await.unwrap();
    node.unstage_and_delete(&copy, &staging).await;
    client.delete(&id).await.unwrap();
    node.assert_nothing_left();
}
