//! Access: enforced read-only, a single writer, and paths that are not trusted.

use std::os::unix::fs::symlink;

use slackwater::csi::VolumeCapability;
use slackwater::csi::volume_capability::access_mode::Mode;
use slackwater::csi::volume_capability::{AccessType, BlockVolume, MountVolume};
use tonic::Code;

use super::{GIB, Node, refused, write_pattern};
use slackwater_testkit::{block, capability, disk, mount, run, succeeds, unmount};

fn single(fs: &str) -> VolumeCapability {
    let access = AccessType::Mount(MountVolume {
        fs_type: fs.into(),
        ..Default::default()
    });
    capability(access, Mode::SingleNodeSingleWriter)
}

fn flags(words: &[&str]) -> VolumeCapability {
    let mount_flags = words.iter().map(|word| word.to_string()).collect();
    let access = AccessType::Mount(MountVolume {
        fs_type: "xfs".into(),
        mount_flags,
        ..Default::default()
    });
    capability(access, Mode::SingleNodeWriter)
}

#[tokio::test]
async fn a_read_only_publish_next_to_a_writer_can_only_be_read() {
    let node = Node::new();
    for fs in ["ext4", "xfs", "btrfs"] {
        let (staging, rw, ro) = (node.staging(fs), node.path("rw"), node.path("ro"));
        let id = node.staged(fs, &staging, fs).await;
        node.client
            .publish(&id, &staging, &rw, mount(fs), false)
            .await
            .unwrap();
        for _ in 0..2 {
            node.client
                .publish(&id, &staging, &ro, mount(fs), true)
                .await
                .unwrap();
        }
        write_pattern(&rw.join("data"), 1, 4096);
        super::check_pattern(&ro.join("data"), 1, 4096);
        let error = std::fs::write(ro.join("data"), "x").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(nix::libc::EROFS), "{fs}");
        let message = refused(
            node.client
                .publish(&id, &staging, &ro, mount(fs), false)
                .await,
            Code::AlreadyExists,
        );
        assert!(message.contains("readonly"), "{message}");
        for target in [&rw, &ro] {
            node.client.unpublish(&id, target).await.unwrap();
        }
        node.unstage_and_delete(&id, &staging).await;
    }
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_read_only_block_publish_is_alone_and_can_only_be_read() {
    let node = Node::new();
    let (staging, rw, ro) = (node.staging("b"), node.path("rw"), node.path("ro"));
    let id = node.created("b", block()).await;
    node.stage(&id, &staging, block()).await;
    node.client
        .publish(&id, &staging, &rw, block(), false)
        .await
        .unwrap();
    write_pattern(&rw, 5, 1 << 16);
    let message = refused(
        node.client.publish(&id, &staging, &ro, block(), true).await,
        Code::FailedPrecondition,
    );
    assert!(message.contains("read-only"), "{message}");
    assert!(!ro.exists(), "a refused publish leaves no target");
    node.client.unpublish(&id, &rw).await.unwrap();
    node.client
        .publish(&id, &staging, &ro, block(), true)
        .await
        .unwrap();
    super::check_pattern(&ro, 5, 1 << 16);
    let opened = std::fs::OpenOptions::new()
        .write(true)
        .open(&ro)
        .and_then(|file| {
            std::os::unix::fs::FileExt::write_all_at(&file, &[1; 4096], 0)?;
            file.sync_all()
        });
    assert!(opened.is_err(), "a read-only device accepts no write");
    super::check_pattern(&ro, 5, 1 << 16);
    refused(
        node.client
            .publish(&id, &staging, &rw, block(), false)
            .await,
        Code::FailedPrecondition,
    );
    assert_eq!(
        disk::loops_on(&node.image(&id)).len(),
        1,
        "never two devices on one image"
    );
    node.client.unpublish(&id, &ro).await.unwrap();
    node.client
        .publish(&id, &staging, &rw, block(), false)
        .await
        .unwrap();
    write_pattern(&rw, 6, 1 << 16);
    node.client.unpublish(&id, &rw).await.unwrap();
    node.unstage_and_delete(&id, &staging).await;
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_single_writer_has_one_target_and_others_have_many() {
    let node = Node::new();
    let (staging, a, b) = (node.staging("s"), node.path("a"), node.path("b"));
    let id = node.created("s", single("ext4")).await;
    node.stage(&id, &staging, single("ext4")).await;
    for _ in 0..2 {
        node.client
            .publish(&id, &staging, &a, single("ext4"), false)
            .await
            .unwrap();
    }
    let message = refused(
        node.client
            .publish(&id, &staging, &b, single("ext4"), false)
            .await,
        Code::FailedPrecondition,
    );
    assert!(
        message.contains(a.to_str().unwrap()),
        "the other target is named: {message}"
    );
    node.client.unpublish(&id, &a).await.unwrap();
    node.client
        .publish(&id, &staging, &b, single("ext4"), false)
        .await
        .unwrap();
    node.client.unpublish(&id, &b).await.unwrap();
    node.client.unstage(&id, &staging).await.unwrap();
    node.stage(&id, &staging, mount("ext4")).await;
    for target in [&a, &b] {
        node.client
            .publish(&id, &staging, target, mount("ext4"), false)
            .await
            .unwrap();
    }
    for target in [&a, &b] {
        node.client.unpublish(&id, target).await.unwrap();
    }
    node.unstage_and_delete(&id, &staging).await;
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_target_that_leads_out_through_a_link_is_refused_and_nothing_is_touched() {
    let node = Node::new();
    let outside = node.scratch.dir("outside");
    std::fs::write(outside.join("precious"), "x").unwrap();
    symlink(&outside, node.path("link")).unwrap();
    let staging = node.staging("l");
    let id = node.staged("l", &staging, "xfs").await;
    let bad = [
        node.path("link"),
        node.path("link/sub"),
        outside.join("sub"),
        node.path("../outside/sub"),
        "relative".into(),
        "/etc".into(),
    ];
    for target in &bad {
        let message = refused(
            node.client
                .publish(&id, &staging, target, mount("xfs"), false)
                .await,
            Code::InvalidArgument,
        );
        assert!(
            message.contains("target_path"),
            "the field is named: {message}"
        );
        refused(
            node.client.unpublish(&id, target).await,
            Code::InvalidArgument,
        );
        refused(
            node.client.stage(&id, target, mount("xfs")).await,
            Code::InvalidArgument,
        );
    }
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 1);
    assert_eq!(disk::mounts_below(&outside), Vec::new());
    node.unstage_and_delete(&id, &staging).await;
    node.assert_nothing_left();
}

#[tokio::test]
async fn mount_flags_reach_the_kernel_and_labels_stay_whole() {
    let node = Node::new();
    let staging = node.staging("f");
    let label = "context=\"system_u:object_r:container_file_t:s0:c1,c2\"";
    let wanted = flags(&["noatime", "nodev", "logbsize=64k", label]);
    let id = node.created("f", wanted.clone()).await;
    for _ in 0..2 {
        node.stage(&id, &staging, wanted.clone()).await;
    }
    let mounts = disk::mounts_below(&staging);
    let found = mounts.last().unwrap();
    for word in ["noatime", "nodev"] {
        assert!(
            found.options.iter().any(|option| option == word),
            "{:?}",
            found.options
        );
    }
    assert!(
        found.super_options.contains("logbsize=64k"),
        "{}",
        found.super_options
    );
    let message = refused(
        node.client.stage(&id, &staging, flags(&["noatime"])).await,
        Code::AlreadyExists,
    );
    assert!(
        message.contains("with 4 mount flags") && message.contains("instead of xfs with 1"),
        "the difference is reported without the flags: {message}"
    );
    node.client.unstage(&id, &staging).await.unwrap();
    let message = refused(
        node.client.stage(&id, &staging, flags(&["bind"])).await,
        Code::InvalidArgument,
    );
    assert!(message.contains("mount_flags"), "{message}");
    refused(
        node.client
            .stage(&id, &staging, flags(&["no_such_option"]))
            .await,
        Code::Internal,
    );
    node.assert_no_device(&id);
    node.client.delete(&id).await.unwrap();
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_stray_bind_mount_is_named_and_keeps_its_data() {
    let node = Node::new();
    let (staging, stray) = (node.staging("s"), node.scratch.dir("stray"));
    let id = node.staged("s", &staging, "ext4").await;
    run(
        "mount",
        &["--bind", staging.to_str().unwrap(), stray.to_str().unwrap()],
    );
    write_pattern(&stray.join("data"), 2, 4096);
    node.client.unstage(&id, &staging).await.unwrap();
    let message = refused(node.client.delete(&id).await, Code::FailedPrecondition);
    assert!(
        message.contains(stray.to_str().unwrap()),
        "the holder is named: {message}"
    );
    node.stage(&id, &staging, mount("ext4")).await;
    assert_eq!(
        disk::loops_on(&node.image(&id)).len(),
        1,
        "the one device is used again"
    );
    super::check_pattern(&staging.join("data"), 2, 4096);
    node.client.unstage(&id, &staging).await.unwrap();
    unmount(&stray);
    node.client.delete(&id).await.unwrap();
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_foreign_mount_at_a_path_is_never_unmounted_nor_covered() {
    let node = Node::new();
    let (staging, target) = (node.staging("o"), node.path("target"));
    std::fs::create_dir(&target).unwrap();
    run("mount", &["-t", "tmpfs", "tmpfs", target.to_str().unwrap()]);
    std::fs::write(target.join("theirs"), "x").unwrap();
    let id = node.staged("o", &staging, "ext4").await;
    refused(
        node.client
            .publish(&id, &staging, &target, mount("ext4"), false)
            .await,
        Code::FailedPrecondition,
    );
    refused(
        node.client.unpublish(&id, &target).await,
        Code::FailedPrecondition,
    );
    refused(
        node.client.stage(&id, &target, mount("ext4")).await,
        Code::FailedPrecondition,
    );
    assert!(target.join("theirs").exists());
    // The target of another volume is also foreign.
    let other = node.created("other", mount("ext4")).await;
    refused(
        node.client.unstage(&other, &staging).await,
        Code::FailedPrecondition,
    );
    assert!(succeeds("mountpoint", &["-q", staging.to_str().unwrap()]));
    unmount(&target);
    node.client.unstage(&id, &staging).await.unwrap();
    for id in [&id, &other] {
        node.client.delete(id).await.unwrap();
    }
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_volume_is_either_block_or_mounted_for_its_life() {
    let node = Node::new();
    let staging = node.staging("x");
    let both = node.created("x", block()).await;
    node.stage(&both, &staging, block()).await;
    node.client.unstage(&both, &staging).await.unwrap();
    let message = refused(
        node.client.stage(&both, &staging, mount("ext4")).await,
        Code::FailedPrecondition,
    );
    assert!(message.contains("raw block"), "{message}");
    let mounted = node.created("y", mount("ext4")).await;
    node.stage(&mounted, &staging, mount("ext4")).await;
    node.client.unstage(&mounted, &staging).await.unwrap();
    refused(
        node.client.stage(&mounted, &staging, block()).await,
        Code::FailedPrecondition,
    );
    refused(
        node.client.stage(&mounted, &staging, mount("xfs")).await,
        Code::FailedPrecondition,
    );
    let modes = [
        Mode::MultiNodeMultiWriter,
        Mode::MultiNodeReaderOnly,
        Mode::MultiNodeSingleWriter,
        Mode::Unknown,
    ];
    for mode in modes {
        let wanted = capability(AccessType::Block(BlockVolume {}), mode);
        refused(
            node.client.create("z", GIB, wanted, &[]).await,
            Code::InvalidArgument,
        );
    }
    for id in [&both, &mounted] {
        node.client.delete(id).await.unwrap();
    }
    node.assert_nothing_left();
}
