//! Disks that die while they are served.

use std::path::{Path, PathBuf};

use slackwater::csi;
use tonic::Code;

use super::{GIB, Node, check_pattern, refused, write_pattern};
use slackwater_testkit::{
    Client, Disk, Scratch, Server, WAIT_TIMEOUT, block, mount, run, succeeds,
};

/// Shuts a file system down, as a log that cannot be written does.
fn kill(disk: &Disk) {
    let folder = disk.mount_point.to_str().unwrap();
    run("xfs_io", &["-x", "-c", "shutdown", folder]);
}

async fn create(client: &Client, pool: &str, name: &str) -> String {
    let parameters = [("pool", pool)];
    let created = client.create(name, GIB / 2, mount("ext4"), &parameters);
    created.await.unwrap()
}

#[tokio::test]
async fn a_dead_disk_and_the_loops_on_it_affect_only_their_own_pool() {
    let _alone = ALONE.lock().await;
    for fs in ["xfs", "ext4"] {
        let scratch = Scratch::new();
        let dead = Disk::new(&scratch, "dead", fs, 2 * GIB);
        let well = Disk::new(&scratch, "well", fs, 2 * GIB);
        let definition =
            |disk: &Disk, name| format!("{name}=file:{},init", disk.mount_point.display());
        let pools = [definition(&dead, "dead"), definition(&well, "well")];
        let mut server = Server::start(&scratch, &[&pools[0], &pools[1]]);
        let client = server.client();
        let at = |name: &str| scratch.dir("kubelet").join(name);
        let lost = create(&client, "dead", "lost").await;
        let id = create(&client, "well", "id").await;
        for (id, name) in [(&lost, "dead"), (&id, "well")] {
            let (staging, target) = (at(name), at(&format!("{name}.target")));
            client.stage(id, &staging, mount("ext4")).await.unwrap();
            client
                .publish(id, &staging, &target, mount("ext4"), false)
                .await
                .unwrap();
        }
        write_pattern(&at("well.target").join("data"), 1, 1 << 20);
        // Also of a foreign image with the file name of volume images.
        let image = dead.mount_point.join("data.img");
        std::fs::File::create(&image)
            .unwrap()
            .set_len(1 << 20)
            .unwrap();
        assert!(succeeds("losetup", &["--find", image.to_str().unwrap()]));
        kill(&dead);

        client.unpublish(&id, &at("well.target")).await.unwrap();
        client.unstage(&id, &at("well")).await.unwrap();
        client.stage(&id, &at("well"), mount("ext4")).await.unwrap();
        check_pattern(&at("well").join("data"), 1, 1 << 20);
        // mkfs.btrfs looks up every mounted loop device, including the dead one.
        let btrfs = client.create("btrfs", GIB / 2, mount("btrfs"), &[("pool", "well")]);
        let btrfs = btrfs.await.unwrap();
        let created = client.stage(&btrfs, &at("btrfs"), mount("btrfs")).await;
        created.unwrap();
        client.unstage(&btrfs, &at("btrfs")).await.unwrap();
        client.delete_unused(&btrfs).await;
        let other = create(&client, "well", "other").await;
        server.restart();
        let client = server.client();
        client.delete(&other).await.unwrap();
        client.unstage(&id, &at("well")).await.unwrap();
        client.delete_unused(&id).await;
        assert_eq!(well.volumes(), Vec::<std::path::PathBuf>::new(), "{fs}");
    }
}

/// One at a time: every driver of the machine probes a file system that is shut down or frozen.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// Waits for an event that takes one or two refreshes of the pools.
async fn until<F: Future<Output = bool>>(what: &str, mut check: impl FnMut() -> F) {
    let start = std::time::Instant::now();
    while !check().await {
        assert!(start.elapsed() < WAIT_TIMEOUT, "not in time: {what}");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
}

/// Waits until the only pool is no longer served. Returns the reason.
async fn unserved(client: &Client) -> String {
    until("the pool is not served", || async {
        matches!(client.list().await, Err(status) if status.code() == Code::Unavailable)
    })
    .await;
    assert_eq!(client.capacity(&[]).await.unwrap(), 0);
    refused(client.list().await, Code::Unavailable)
}

async fn served(client: &Client) {
    until("the pool is served again", || async {
        client.list().await.is_ok()
    })
    .await;
    assert!(client.capacity(&[]).await.unwrap() > 0);
}

/// Creates and publishes a volume with a file system and a raw one. Returns their paths.
async fn two_published(node: &Node) -> [(String, PathBuf, PathBuf); 2] {
    let created = async |name: &str, how: csi::VolumeCapability| {
        let id = node.client.create(name, GIB / 2, how.clone(), &[]).await;
        let (id, staging, target) = (id.unwrap(), node.staging(name), node.path(name));
        node.stage(&id, &staging, how.clone()).await;
        let published = node.client.publish(&id, &staging, &target, how, false);
        published.await.unwrap();
        (id, staging, target)
    };
    [
        created("fs", mount("ext4")).await,
        created("raw", block()).await,
    ]
}

#[tokio::test]
async fn a_pool_whose_disk_dies_is_unserved_until_its_disk_is_mounted_again() {
    let _alone = ALONE.lock().await;
    let node = Node::on("xfs", 4 * GIB);
    let [fs, raw] = two_published(&node).await;
    write_pattern(&fs.2.join("data"), 1, 1 << 20);
    write_pattern(&raw.2, 2, 1 << 20);
    kill(&node.disk);
    let why = unserved(&node.client).await;
    assert!(why.contains("its disk is dead"), "{why}");

    // As the kubelet ends pods. A repeat also succeeds.
    for (id, staging, target) in [&fs, &raw] {
        for _ in 0..2 {
            node.client.unpublish(id, target).await.unwrap();
            node.client.unstage(id, staging).await.unwrap();
        }
    }
    // The driver no longer uses the disk.
    node.disk.unmount();
    node.disk.mount();
    served(&node.client).await;
    for (id, staging, target) in [&fs, &raw] {
        let how = if *id == fs.0 { mount("ext4") } else { block() };
        node.stage(id, staging, how.clone()).await;
        let published = node.client.publish(id, staging, target, how, false);
        published.await.unwrap();
    }
    check_pattern(&fs.2.join("data"), 1, 1 << 20);
    check_pattern(&raw.2, 2, 1 << 20);
    for (id, staging, target) in [&fs, &raw] {
        node.client.unpublish(id, target).await.unwrap();
        node.unstage_and_delete(id, staging).await;
    }
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_disk_that_was_mounted_again_is_not_served_while_devices_use_the_old_mount() {
    let _alone = ALONE.lock().await;
    let node = Node::on("xfs", 4 * GIB);
    let [fs, raw] = two_published(&node).await;
    kill(&node.disk);
    unserved(&node.client).await;
    // The pods still run, and the same disk comes back with another device number.
    let folder = node.disk.mount_point.to_str().unwrap();
    run("umount", &["-l", folder]);
    let image = node.disk.image.to_str().unwrap();
    let device = run("losetup", &["--find", "--show", image]);
    run("mount", &["-o", "nouuid", device.trim(), folder]);
    until("the error names the users of the disk", || async {
        refused(node.client.list().await, Code::Unavailable).contains("delete the pods")
    })
    .await;
    for (id, staging, target) in [&fs, &raw] {
        node.client.unpublish(id, target).await.unwrap();
        node.client.unstage(id, staging).await.unwrap();
    }
    served(&node.client).await;
    for (id, ..) in [&fs, &raw] {
        node.client.delete_unused(id).await;
    }
    run("losetup", &["-d", device.trim()]);
    node.assert_nothing_left();
}

/// A frozen file system that is thawed at the end, also after a panic.
struct Frozen<'a>(&'a Path);

impl Frozen<'_> {
    fn new(folder: &Path) -> Frozen<'_> {
        run("fsfreeze", &["-f", folder.to_str().unwrap()]);
        Frozen(folder)
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        succeeds("fsfreeze", &["-u", self.0.to_str().unwrap()]);
    }
}

#[tokio::test]
async fn a_pool_whose_disk_hangs_is_unserved_until_it_answers() {
    let _alone = ALONE.lock().await;
    let node = Node::on("xfs", 4 * GIB);
    let [fs, raw] = two_published(&node).await;
    write_pattern(&fs.2.join("data"), 1, 1 << 20);
    let frozen = Frozen::new(&node.disk.mount_point);
    let why = unserved(&node.client).await;
    assert!(why.contains("its disk hangs"), "{why}");
    for (id, _, target) in [&fs, &raw] {
        node.client.unpublish(id, target).await.unwrap();
    }
    assert!(node.client.is_ready().await);
    drop(frozen);
    served(&node.client).await;
    check_pattern(&fs.1.join("data"), 1, 1 << 20);
    for (id, staging, _) in [&fs, &raw] {
        node.unstage_and_delete(id, staging).await;
    }
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_pool_on_an_image_whose_file_system_fails_is_served_again() {
    let _alone = ALONE.lock().await;
    let scratch = Scratch::new();
    let disk = Disk::new(&scratch, "pool", "ext4", 3 * GIB);
    let pool = format!("default=file:{},init,image=2Gi", disk.mount_point.display());
    let server = Server::start(&scratch, &[&pool]);
    let client = server.client();
    let id = client
        .create("v", GIB / 2, mount("ext4"), &[])
        .await
        .unwrap();
    let staging = scratch.dir("kubelet/v");
    client.stage(&id, &staging, mount("ext4")).await.unwrap();
    write_pattern(&staging.join("data"), 1, 1 << 20);
    let inner = disk.mount_point.join("mounted");

    let frozen = Frozen::new(&inner);
    unserved(&client).await;
    drop(frozen);
    served(&client).await;
    check_pattern(&staging.join("data"), 1, 1 << 20);

    run("xfs_io", &["-x", "-c", "shutdown", inner.to_str().unwrap()]);
    unserved(&client).await;
    until("the error names the users of the disk", || async {
        refused(client.list().await, Code::Unavailable).contains("delete the pods")
    })
    .await;
    client.unstage(&id, &staging).await.unwrap();
    served(&client).await;
    client.stage(&id, &staging, mount("ext4")).await.unwrap();
    check_pattern(&staging.join("data"), 1, 1 << 20);
    client.unstage(&id, &staging).await.unwrap();
    client.delete_unused(&id).await;
}

#[tokio::test]
async fn a_disk_that_hangs_at_a_start_delays_only_its_own_pool() {
    let _alone = ALONE.lock().await;
    let scratch = Scratch::new();
    let hangs = Disk::new(&scratch, "hangs", "xfs", 2 * GIB);
    let well = Disk::new(&scratch, "well", "xfs", 2 * GIB);
    let definition = |disk: &Disk, name| format!("{name}=file:{},init", disk.mount_point.display());
    let pools = [definition(&hangs, "hangs"), definition(&well, "well")];
    let mut server = Server::start(&scratch, &[&pools[0], &pools[1]]);
    let kept = create(&server.client(), "hangs", "kept").await;
    server.kill();
    let frozen = Frozen::new(&hangs.mount_point);
    server.restart();
    let client = server.client();
    let id = create(&client, "well", "id").await;
    let staging = scratch.dir("kubelet/id");
    client.stage(&id, &staging, mount("ext4")).await.unwrap();
    let parameters = [("pool", "hangs")];
    let refused_there = client.create("new", GIB / 2, mount("ext4"), &parameters);
    let why = refused(refused_there.await, Code::Unavailable);
    assert!(
        why.contains("pool hangs") && why.contains("does not answer"),
        "{why}"
    );
    drop(frozen);
    until("the pool is served without a restart", || async {
        client
            .capacity(&parameters)
            .await
            .is_ok_and(|free| free > 0)
    })
    .await;
    client.delete(&kept).await.unwrap();
    client.unstage(&id, &staging).await.unwrap();
    client.delete_unused(&id).await;
    assert_eq!((hangs.volumes(), well.volumes()), (Vec::new(), Vec::new()));
}
