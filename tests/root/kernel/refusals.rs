//! Operations that must never happen to data, whatever its state: no second format, no second
//! device.

use std::os::fd::AsRawFd;

use tonic::Code;

use super::{GIB, Node, check_pattern, refused, write_pattern};
use slackwater_testkit::{disk, eventually, mount, run, unmount};

nix::ioctl_readwrite!(fifreeze, b'X', 119, i32);
nix::ioctl_readwrite!(fithaw, b'X', 120, i32);

#[expect(unsafe_code, reason = "the freeze ioctls have no safe form")]
fn freeze(path: &std::path::Path, freeze: bool) {
    let root = std::fs::File::open(path).unwrap();
    let mut zero = 0;
    // SAFETY: the descriptor is open; the argument is not read.
    unsafe {
        if freeze {
            fifreeze(root.as_raw_fd(), &mut zero)
        } else {
            fithaw(root.as_raw_fd(), &mut zero)
        }
    }
    .unwrap();
}

#[tokio::test]
async fn a_formatted_volume_whose_first_megabytes_read_as_zeros_is_never_formatted_again() {
    let node = Node::new();
    for fs in ["ext4", "xfs", "btrfs"] {
        let staging = node.staging(fs);
        let id = node.staged(fs, &staging, fs).await;
        write_pattern(&staging.join("data"), 8, 8 << 20);
        node.client.unstage(&id, &staging).await.unwrap();
        let image = node.image(&id);
        let kept = std::fs::read(&image)
            .map(|bytes| bytes[..64 << 20].to_vec())
            .unwrap();
        run(
            "dd",
            &[
                "if=/dev/zero",
                &format!("of={}", image.display()),
                "bs=1M",
                "count=64",
                "conv=notrunc,fsync",
                "status=none",
            ],
        );
        let before = std::fs::metadata(&image).unwrap().modified().unwrap();
        for _ in 0..2 {
            let message = refused(
                node.client.stage(&id, &staging, mount(fs)).await,
                Code::FailedPrecondition,
            );
            assert!(message.contains("never formatted again"), "{message}");
        }
        assert_eq!(
            std::fs::metadata(&image).unwrap().modified().unwrap(),
            before,
            "nothing was written"
        );
        // Its content comes back, for example with a removed disk: it is complete.
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(&image)
            .unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &kept, 0).unwrap();
        file.sync_all().unwrap();
        drop(file);
        node.stage(&id, &staging, mount(fs)).await;
        check_pattern(&staging.join("data"), 8, 8 << 20);
        node.unstage_and_delete(&id, &staging).await;
    }
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_signature_on_a_volume_that_was_never_formatted_is_left_alone() {
    let node = Node::new();
    let staging = node.staging("s");
    let id = node.created("s", mount("ext4")).await;
    run("mkfs.xfs", &["-q", node.image(&id).to_str().unwrap()]);
    let message = refused(
        node.client.stage(&id, &staging, mount("ext4")).await,
        Code::FailedPrecondition,
    );
    assert!(message.contains("xfs"), "{message}");
    node.client.delete(&id).await.unwrap();
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_file_system_with_a_foreign_freeze_that_was_unmounted_never_gets_a_second_device() {
    let mut node = Node::new();
    for fs in ["xfs", "ext4"] {
        let staging = node.staging(fs);
        let id = node.staged(fs, &staging, fs).await;
        write_pattern(&staging.join("data"), 4, 1 << 16);
        freeze(&staging, true);
        node.client.unstage(&id, &staging).await.unwrap();
        let device = disk::loops_on(&node.image(&id));
        assert_eq!(device.len(), 1, "the hidden super block keeps its device");
        for _ in 0..2 {
            let message = refused(
                node.client.stage(&id, &staging, mount(fs)).await,
                Code::Aborted,
            );
            assert!(
                message.contains(&device[0]),
                "the device is named: {message}"
            );
            refused(node.client.delete(&id).await, Code::FailedPrecondition);
            assert_eq!(
                disk::loops_on(&node.image(&id)),
                device,
                "never a second one"
            );
            node.server.restart();
            node.client = node.server.client();
        }
        // The foreign process thaws the file system that it froze; then everything is as before.
        let private = node.scratch.dir("private");
        run("mount", &["-t", fs, &device[0], private.to_str().unwrap()]);
        freeze(&private, false);
        unmount(&private);
        eventually("the device is gone", || {
            disk::loops_on(&node.image(&id)).is_empty()
        });
        node.stage(&id, &staging, mount(fs)).await;
        check_pattern(&staging.join("data"), 4, 1 << 16);
        node.unstage_and_delete(&id, &staging).await;
    }
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_reader_that_holds_the_device_open_after_umount_is_waited_for() {
    let node = Node::new();
    let staging = node.staging("r");
    let id = node.staged("r", &staging, "ext4").await;
    let device = disk::loops_on(&node.image(&id));
    let reader = std::fs::File::open(&device[0]).unwrap();
    node.client.unstage(&id, &staging).await.unwrap();
    assert_eq!(disk::loops_on(&node.image(&id)), device);
    let message = refused(node.client.delete(&id).await, Code::FailedPrecondition);
    assert!(
        message.contains(&device[0]),
        "the holder is named: {message}"
    );
    node.stage(&id, &staging, mount("ext4")).await;
    assert_eq!(
        disk::loops_on(&node.image(&id)),
        device,
        "the one device is used again"
    );
    node.client.unstage(&id, &staging).await.unwrap();
    drop(reader);
    eventually("the device goes with its reader", || {
        disk::loops_on(&node.image(&id)).is_empty()
    });
    node.client.delete(&id).await.unwrap();
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_foreign_device_on_an_image_is_neither_used_nor_changed() {
    let node = Node::new();
    let staging = node.staging("f");
    let id = node.created("f", mount("ext4")).await;
    let image = node.image(&id);
    let device = run(
        "losetup",
        &["-f", "--show", "-o", "4096", image.to_str().unwrap()],
    );
    let device = device.trim().to_string();
    let message = refused(
        node.client.stage(&id, &staging, mount("ext4")).await,
        Code::Aborted,
    );
    assert!(message.contains(&device), "{message}");
    assert_eq!(disk::loops_on(&image), vec![device.clone()]);
    run("losetup", &["-d", &device]);
    node.stage(&id, &staging, mount("ext4")).await;
    node.unstage_and_delete(&id, &staging).await;
    node.assert_nothing_left();
}

#[tokio::test]
async fn an_image_that_was_cut_short_is_refused() {
    let node = Node::new();
    let staging = node.staging("c");
    let id = node.created("c", mount("ext4")).await;
    std::fs::OpenOptions::new()
        .write(true)
        .open(node.image(&id))
        .unwrap()
        .set_len(GIB / 2)
        .unwrap();
    let message = node
        .client
        .stage(&id, &staging, mount("ext4"))
        .await
        .unwrap_err();
    assert!(message.message().contains("the image has"), "{message:?}");
    node.client.delete(&id).await.unwrap();
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_device_that_outlived_its_stage_shows_the_grown_image() {
    let node = Node::new();
    let staging = node.staging("g");
    for fs in ["xfs", "btrfs"] {
        let id = node.staged(fs, &staging, fs).await;
        let device = disk::loops_on(&node.image(&id));
        let reader = std::fs::File::open(&device[0]).unwrap();
        node.client.unstage(&id, &staging).await.unwrap();
        node.client.expand(&id, 2 * GIB).await.unwrap();
        node.stage(&id, &staging, mount(fs)).await;
        assert_eq!(disk::loops_on(&node.image(&id)), device);
        let (total, _) = node.client.stats(&id, &staging).await.unwrap();
        assert!(total > GIB + GIB / 2, "{fs}: {total}");
        drop(reader);
        node.unstage_and_delete(&id, &staging).await;
    }
    node.assert_nothing_left();
}

/// A mkfs outlives the driver that started it: it holds the device exclusively until it ends, and a
/// second mkfs next to it would create a second file system.
#[cfg(feature = "fault")]
#[tokio::test]
async fn no_second_mkfs_runs_before_the_first_one_has_ended() {
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

    let mut node = Node::new();
    node.server
        .restart_with(&[("SLACKWATER_FAULT", "effect.format:stop")]);
    node.client = node.server.client();
    let staging = node.staging("v");
    let id = node.created("v", mount("xfs")).await;
    let (client, volume, at) = (node.client.clone(), id.clone(), staging.clone());
    let call = tokio::spawn(async move { client.stage(&volume, &at, mount("xfs")).await });
    while !node.server.is_stopped() {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    let device = disk::loops_on(&node.image(&id)).pop().unwrap();
    let mkfs = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_EXCL)
        .open(device)
        .unwrap();
    node.server.restart();
    call.await.unwrap().unwrap_err();
    node.client = node.server.client();
    for _ in 0..2 {
        let status = node.client.stage(&id, &staging, mount("xfs")).await;
        let message = refused(status, Code::Aborted);
        assert!(message.contains("running mkfs"), "{message}");
    }
    let blocks = std::fs::metadata(node.image(&id)).unwrap().blocks();
    assert_eq!(blocks, 0, "nothing was written");
    drop(mkfs);
    node.stage(&id, &staging, mount("xfs")).await;
    node.unstage_and_delete(&id, &staging).await;
    node.assert_nothing_left();
}
