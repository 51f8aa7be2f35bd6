//! The whole life of a volume, on each kind of pool, as each kind of volume.

use nix::sys::signal::Signal;
use tonic::Code;

use super::{GIB, MIB, Node, check_pattern, refused, write_pattern};
use slackwater_testkit::{WAIT_TIMEOUT, block, disk, eventually, mount};

/// Create, stage, publish, write, grow, unpublish, unstage, stage again, verify, delete.
async fn whole_life(node: &Node, fs: &str) {
    let client = &node.client;
    let (staging, target) = (node.staging(fs), node.path(&format!("{fs}.target")));
    let id = client
        .create(&format!("life-{fs}"), GIB, mount(fs), &[])
        .await
        .unwrap();
    for round in 0..2 {
        // Each call twice: a repeat returns the same answer.
        for _ in 0..2 {
            client.stage(&id, &staging, mount(fs)).await.unwrap();
        }
        for _ in 0..2 {
            client
                .publish(&id, &staging, &target, mount(fs), false)
                .await
                .unwrap();
        }
        if round == 0 {
            write_pattern(&target.join("data"), 7, 3 << 20);
            let (total, used) = client.stats(&id, &target).await.unwrap();
            assert!(
                total > 700 * MIB && total <= GIB && used >= 3 * MIB,
                "{total} {used}"
            );
        } else {
            check_pattern(&target.join("data"), 7, 3 << 20);
        }
        let busy = refused(client.delete(&id).await, Code::FailedPrecondition);
        assert!(
            busy.contains(staging.to_str().unwrap()),
            "the holder is named: {busy}"
        );
        for _ in 0..2 {
            client.unpublish(&id, &target).await.unwrap();
        }
        assert!(!target.exists(), "the target is removed");
        for _ in 0..2 {
            client.unstage(&id, &staging).await.unwrap();
        }
        node.assert_no_device(&id);
    }
    for _ in 0..2 {
        client.delete(&id).await.unwrap();
    }
}

async fn whole_block_life(node: &Node) {
    let client = &node.client;
    let (staging, target) = (node.staging("block"), node.path("block.target"));
    let id = client
        .create("life-block", GIB, block(), &[])
        .await
        .unwrap();
    for round in 0..2 {
        for _ in 0..2 {
            client.stage(&id, &staging, block()).await.unwrap();
            client
                .publish(&id, &staging, &target, block(), false)
                .await
                .unwrap();
        }
        if round == 0 {
            write_pattern(&target, 9, 5 << 20);
            assert_eq!(client.stats(&id, &target).await.unwrap().0, GIB);
            assert_eq!(client.expand(&id, 2 * GIB).await.unwrap(), 2 * GIB);
            assert_eq!(client.expand_node(&id, &target).await.unwrap(), 2 * GIB);
        }
        check_pattern(&target, 9, 5 << 20);
        let bytes = slackwater_testkit::run("blockdev", &["--getsize64", target.to_str().unwrap()]);
        assert_eq!(bytes.trim(), (2 * GIB).to_string());
        for _ in 0..2 {
            client.unpublish(&id, &target).await.unwrap();
        }
        assert!(!target.exists());
        refused(client.delete(&id).await, Code::FailedPrecondition);
        for _ in 0..2 {
            client.unstage(&id, &staging).await.unwrap();
        }
    }
    client.delete(&id).await.unwrap();
}

async fn lives_on(pool: &str) {
    let node = Node::on(pool, 8 * GIB);
    for fs in ["ext4", "xfs", "btrfs"] {
        whole_life(&node, fs).await;
    }
    whole_block_life(&node).await;
    node.assert_nothing_left();
}

#[tokio::test]
async fn volumes_live_on_an_xfs_pool() {
    lives_on("xfs").await;
}

#[tokio::test]
async fn volumes_live_on_a_btrfs_pool() {
    lives_on("btrfs").await;
}

#[tokio::test]
async fn volumes_live_on_an_ext4_pool() {
    lives_on("ext4").await;
}

#[tokio::test]
async fn a_mounted_xfs_or_btrfs_grows_while_it_is_used() {
    let node = Node::new();
    for fs in ["xfs", "btrfs"] {
        let (staging, target) = (node.staging(fs), node.path(fs));
        let id = node.staged(fs, &staging, fs).await;
        node.client
            .publish(&id, &staging, &target, mount(fs), false)
            .await
            .unwrap();
        write_pattern(&target.join("before"), 1, 1 << 20);
        node.client.expand(&id, 3 * GIB).await.unwrap();
        // Also if the given path is published read-only.
        let read_only = node.path("ro");
        node.client
            .publish(&id, &staging, &read_only, mount(fs), true)
            .await
            .unwrap();
        for path in [&read_only, &target, &target] {
            assert_eq!(node.client.expand_node(&id, path).await.unwrap(), 3 * GIB);
            assert!(node.client.stats(&id, path).await.unwrap().0 > 2 * GIB + 512 * MIB);
        }
        node.client.unpublish(&id, &read_only).await.unwrap();
        assert!(node.client.stats(&id, &target).await.unwrap().0 > 2 * GIB + 512 * MIB);
        check_pattern(&target.join("before"), 1, 1 << 20);
        node.client.unpublish(&id, &target).await.unwrap();
        node.unstage_and_delete(&id, &staging).await;
    }
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_volume_that_grew_while_it_was_unstaged_is_grown_at_the_next_stage() {
    let node = Node::new();
    for fs in ["xfs", "btrfs"] {
        let staging = node.staging(fs);
        let id = node.staged(fs, &staging, fs).await;
        node.client.unstage(&id, &staging).await.unwrap();
        node.client.expand(&id, 3 * GIB).await.unwrap();
        node.stage(&id, &staging, mount(fs)).await;
        assert!(node.client.stats(&id, &staging).await.unwrap().0 > 2 * GIB + 512 * MIB);
        node.unstage_and_delete(&id, &staging).await;
    }
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_restart_while_staged_and_published_loses_nothing() {
    let mut node = Node::new();
    let (staging, target) = (node.staging("m"), node.path("m"));
    let (bstaging, btarget) = (node.staging("b"), node.path("b"));
    let id = node.created("m", mount("ext4")).await;
    let bid = node.created("b", block()).await;
    node.stage(&id, &staging, mount("ext4")).await;
    node.client
        .publish(&id, &staging, &target, mount("ext4"), false)
        .await
        .unwrap();
    node.stage(&bid, &bstaging, block()).await;
    node.client
        .publish(&bid, &bstaging, &btarget, block(), false)
        .await
        .unwrap();
    write_pattern(&target.join("data"), 3, 1 << 20);
    write_pattern(&btarget, 4, 1 << 20);
    for _ in 0..3 {
        node.server.restart();
        node.client = node.server.client();
        node.stage(&id, &staging, mount("ext4")).await;
        node.client
            .publish(&id, &staging, &target, mount("ext4"), false)
            .await
            .unwrap();
        node.client
            .publish(&bid, &bstaging, &btarget, block(), false)
            .await
            .unwrap();
        check_pattern(&target.join("data"), 3, 1 << 20);
        check_pattern(&btarget, 4, 1 << 20);
    }
    for (id, staging, target) in [(&id, &staging, &target), (&bid, &bstaging, &btarget)] {
        node.client.unpublish(id, target).await.unwrap();
        node.client.unstage(id, staging).await.unwrap();
        node.client.delete(id).await.unwrap();
    }
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_sigterm_during_calls_finishes_them_and_exits_with_0() {
    let mut node = Node::new();
    let mut calls = Vec::new();
    for n in 0..20 {
        let client = node.client.clone();
        calls.push(tokio::spawn(async move {
            client
                .create(&format!("term-{n}"), GIB, mount("xfs"), &[])
                .await
        }));
    }
    tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    node.server.signal(Signal::SIGTERM);
    let mut created = Vec::new();
    for call in calls {
        created.extend(call.await.unwrap().ok());
    }
    assert_eq!(node.server.wait(), Some(0));
    assert!(!node.server.socket().exists(), "the socket is removed");
    node.server.restart();
    node.client = node.server.client();
    let listed = node.client.list().await.unwrap();
    for id in &created {
        assert!(listed.contains(id), "every answered volume exists");
    }
    for id in &listed {
        node.client.delete(id).await.unwrap();
    }
    node.assert_nothing_left();
}

#[tokio::test]
async fn an_inline_volume_lives_and_dies_with_its_target_and_its_size_holds() {
    let node = Node::new();
    let target = node.path("inline");
    for fs in ["ext4", "xfs", "btrfs"] {
        for _ in 0..2 {
            node.client
                .publish_inline("csi-0123456789", &target, fs, &[("size", "400Mi")])
                .await
                .unwrap();
        }
        let file = std::fs::File::create(target.join("big")).unwrap();
        let filled = (0..500).try_for_each(|_| {
            std::io::Write::write_all(&mut &file, &vec![1; MIB as usize])
                .and_then(|()| file.sync_data())
        });
        assert!(filled.is_err(), "more than its size does not fit");
        drop(file);
        let message = refused(
            node.client
                .publish_inline("csi-0123456789", &target, fs, &[("size", "500Mi")])
                .await,
            Code::AlreadyExists,
        );
        assert!(message.contains("size"), "{message}");
        for _ in 0..2 {
            node.client
                .unpublish("csi-0123456789", &target)
                .await
                .unwrap();
        }
        assert!(!target.exists());
        node.assert_nothing_left();
    }
    refused(
        node.client
            .publish_inline("csi-1", &target, "ext4", &[])
            .await,
        Code::InvalidArgument,
    );
    assert!(!target.exists());
}

#[tokio::test]
async fn calls_cut_off_after_some_milliseconds_succeed_when_repeated() {
    let node = Node::new();
    for ms in 1..=20u64 {
        let name = format!("cut-{ms}");
        let (staging, target) = (node.staging(&name), node.path(&name));
        let cut = std::time::Duration::from_millis(ms);
        let id = repeat(|| node.client.create(&name, GIB, mount("ext4"), &[]), cut).await;
        repeat(|| node.client.stage(&id, &staging, mount("ext4")), cut).await;
        repeat(
            || {
                node.client
                    .publish(&id, &staging, &target, mount("ext4"), false)
            },
            cut,
        )
        .await;
        write_pattern(&target.join("data"), ms as u8, 1 << 16);
        repeat(|| node.client.unpublish(&id, &target), cut).await;
        repeat(|| node.client.unstage(&id, &staging), cut).await;
        repeat(|| node.client.delete(&id), cut).await;
    }
    node.assert_nothing_left();
}

/// Makes calls with a short deadline, then without one until they succeed. Between, only ABORTED is
/// allowed.
async fn repeat<T, F>(call: impl Fn() -> F, cut: std::time::Duration) -> T
where
    F: Future<Output = Result<T, tonic::Status>>,
{
    if let Ok(Ok(value)) = tokio::time::timeout(cut, call()).await {
        return value;
    }
    let start = std::time::Instant::now();
    loop {
        match call().await {
            Ok(value) => return value,
            Err(status) if status.code() == Code::Aborted => {
                assert!(
                    start.elapsed() < WAIT_TIMEOUT,
                    "pending for ever: {status:?}"
                );
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
            Err(status) => panic!("{status:?}"),
        }
    }
}

#[tokio::test]
async fn a_killed_driver_leaves_its_mounts_to_the_next_one() {
    let mut node = Node::new();
    let staging = node.staging("x");
    let id = node.staged("x", &staging, "xfs").await;
    node.server.kill();
    assert!(
        !disk::loops_on(&node.image(&id)).is_empty(),
        "the mount keeps its device"
    );
    node.server.restart();
    node.client = node.server.client();
    node.client.unstage(&id, &staging).await.unwrap();
    eventually("the device is detached with its mount", || {
        disk::loops_on(&node.image(&id)).is_empty()
    });
    node.client.delete(&id).await.unwrap();
    node.assert_nothing_left();
}

#[tokio::test]
async fn the_logical_block_size_is_that_of_the_pool_or_of_the_class_and_never_changes() {
    let node = Node::new();
    for (asked, shown) in [("", "4096"), ("512", "512"), ("4096", "4096")] {
        let name = format!("sector-{asked}");
        let (staging, target) = (node.staging(&name), node.path(&name));
        let parameters: &[_] = if asked.is_empty() {
            &[]
        } else {
            &[("blockSize", asked)]
        };
        let id = node
            .client
            .create(&name, GIB, block(), parameters)
            .await
            .unwrap();
        for _ in 0..2 {
            node.stage(&id, &staging, block()).await;
            node.client
                .publish(&id, &staging, &target, block(), false)
                .await
                .unwrap();
            let sector =
                slackwater_testkit::run("blockdev", &["--getss", target.to_str().unwrap()]);
            assert_eq!(sector.trim(), shown);
            let device = &disk::loops_on(&node.image(&id))[0];
            let direct = slackwater_testkit::run("losetup", &["-n", "-O", "DIO", device]);
            assert_eq!(direct.trim(), "1", "direct I/O with blocks of {shown}");
            node.client.unpublish(&id, &target).await.unwrap();
            node.client.unstage(&id, &staging).await.unwrap();
        }
        let other = if shown == "512" { "4096" } else { "512" };
        let message = refused(
            node.client
                .create(&name, GIB, block(), &[("blockSize", other)])
                .await,
            Code::AlreadyExists,
        );
        assert!(message.contains("blockSize"), "{message}");
        node.client.delete(&id).await.unwrap();
    }
    node.assert_nothing_left();
}
