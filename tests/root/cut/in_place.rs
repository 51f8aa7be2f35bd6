//! btrfs pools whose images are written in place, pools of an earlier release whose images are not,
//! and pools with both kinds: blocks are shared only within one kind.

use std::path::{Path, PathBuf};

use super::restores::restores;
use super::{GIB, Node, check_pattern, write_pattern};
use slackwater_testkit::snapshots::{from_snapshot, from_volume};
use slackwater_testkit::{Scratch, Server, mount, run};

/// Whether a file or folder has the attribute for writing in place.
fn is_in_place(path: &Path) -> bool {
    let listed = run("lsattr", &["-d", path.to_str().unwrap()]);
    listed.split_whitespace().next().unwrap().contains('C')
}

/// Sets whether new files in these folders of a pool are written in place.
fn mark(pool: &Path, folders: &[&str], mark: &str) {
    for folder in folders {
        run("chattr", &[mark, pool.join(folder).to_str().unwrap()]);
    }
}

fn image_of(pool: &Path, folder: &str, id: &str) -> PathBuf {
    let uuid = super::volume_uuid(id);
    pool.join(folder).join(uuid).join("data.img")
}

#[tokio::test(flavor = "multi_thread")]
async fn images_of_a_new_btrfs_pool_are_written_in_place() {
    let node = Node::on("btrfs", 8 * GIB);
    let staging = node.staging("v");
    let id = node.staged("v", &staging, "ext4").await;
    let pool = &node.disk.mount_point;
    assert!(is_in_place(&node.image(&id)));
    let snapshot = node.client.snapshot("s", &id, &[]).await.unwrap();
    let snapshot = snapshot.snapshot_id;
    assert!(is_in_place(&image_of(pool, "snapshots", &snapshot)));
    assert!(!is_in_place(pool), "only images");
    node.client.delete_snapshot(&snapshot).await.unwrap();
    node.unstage_and_delete(&id, &staging).await;
    node.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_btrfs_pool_of_an_earlier_release_stays_as_it_is() {
    let mut node = Node::on("btrfs", 16 * GIB);
    let pool = node.disk.mount_point.clone();
    mark(&pool, &["volumes", "snapshots"], "-C");
    node.restart_with(&[]);
    assert!(!is_in_place(&pool.join("volumes")));
    for fs in ["ext4", "btrfs"] {
        restores(&node, fs).await;
    }
    node.assert_nothing_left();
}

/// An administrator has set the attribute on the folders by hand; existing images do not have it.
#[tokio::test(flavor = "multi_thread")]
async fn every_copy_has_the_in_place_attribute_of_its_source() {
    let node = Node::on("btrfs", 16 * GIB);
    let (client, pool) = (&node.client, node.disk.mount_point.clone());
    for (n, marks) in [["-C", "+C"], ["+C", "-C"]].into_iter().enumerate() {
        let name = format!("v{n}");
        mark(&pool, &["volumes"], marks[0]);
        let staging = node.staging(&name);
        let id = node.staged(&name, &staging, "xfs").await;
        write_pattern(&staging.join("file"), 1, 3 << 20);
        mark(&pool, &["volumes", "snapshots"], marks[1]);
        let kind = is_in_place(&node.image(&id));
        let snapshot = client.snapshot(&name, &id, &[]).await.unwrap().snapshot_id;
        assert_eq!(is_in_place(&image_of(&pool, "snapshots", &snapshot)), kind);
        for (copy, source) in [
            ("clone", from_volume(&id)),
            ("restore", from_snapshot(&snapshot)),
        ] {
            let copy = format!("{name}-{copy}");
            let creation = client.create_from(&copy, GIB, mount("xfs"), source, &[]);
            let created = creation.await.unwrap().volume_id;
            assert_eq!(is_in_place(&node.image(&created)), kind);
            let place = node.staging(&copy);
            client.stage(&created, &place, mount("xfs")).await.unwrap();
            check_pattern(&place.join("file"), 1, 3 << 20);
            node.unstage_and_delete(&created, &place).await;
        }
        client.delete_snapshot(&snapshot).await.unwrap();
        node.unstage_and_delete(&id, &staging).await;
    }
    node.assert_nothing_left();
}

/// The pools share a file system, but their images are of different kinds.
#[tokio::test(flavor = "multi_thread")]
async fn two_pools_on_one_btrfs_copy_from_each_other() {
    let scratch = Scratch::new();
    let disk = slackwater_testkit::Disk::new(&scratch, "pool", "btrfs", 16 * GIB);
    let folders = ["old", "new"].map(|name| scratch.dir(&format!("pool/{name}")));
    let pools = ["old", "new"].map(|name| {
        let path = disk.mount_point.join(name);
        format!("{name}=file:{},init,mount=any", path.display())
    });
    let server = Server::start(&scratch, &pools.each_ref().map(String::as_str));
    let client = server.client();
    mark(&folders[0], &["volumes", "snapshots"], "-C");
    for (from, to) in [("old", "new"), ("new", "old")] {
        let class = [("pool", from)];
        let creation = client.create(from, GIB, mount("ext4"), &class);
        let id = creation.await.unwrap();
        let class = [("pool", to)];
        let staging = scratch.dir(&format!("kubelet/{from}"));
        client.stage(&id, &staging, mount("ext4")).await.unwrap();
        write_pattern(&staging.join("file"), 1, 3 << 20);
        let snapshot = client.snapshot(from, &id, &[]).await.unwrap().snapshot_id;
        client.unstage(&id, &staging).await.unwrap();
        for (name, source) in [
            ("clone", from_volume(&id)),
            ("restore", from_snapshot(&snapshot)),
        ] {
            let name = format!("{from}-{name}");
            let creation = client.create_from(&name, GIB, mount("ext4"), source, &class);
            let created = creation.await.unwrap().volume_id;
            let image = image_of(&disk.mount_point.join(to), "volumes", &created);
            assert_eq!(is_in_place(&image), to == "new");
            client
                .stage(&created, &staging, mount("ext4"))
                .await
                .unwrap();
            check_pattern(&staging.join("file"), 1, 3 << 20);
            // Also a copy of the copy, with shared blocks.
            let again = client
                .snapshot(&name, &created, &[])
                .await
                .unwrap()
                .snapshot_id;
            client.delete_snapshot(&again).await.unwrap();
            client.unstage(&created, &staging).await.unwrap();
            client.delete(&created).await.unwrap();
        }
        client.delete_snapshot(&snapshot).await.unwrap();
        client.delete(&id).await.unwrap();
    }
}

/// A loop device with 512-byte sectors would be written through the page cache there.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_does_not_go_to_a_disk_whose_blocks_are_larger() {
    let scratch = Scratch::new();
    let _disk = slackwater_testkit::Disk::new(&scratch, "small", "ext4", 2 * GIB);
    let image = scratch.join("large.disk");
    std::fs::File::create(&image)
        .unwrap()
        .set_len(2 * GIB)
        .unwrap();
    let attach = ["--find", "--show", "-b", "4096", image.to_str().unwrap()];
    let device = run("losetup", &attach);
    run("mkfs.ext4", &["-q", "-F", device.trim()]);
    run(
        "mount",
        &[device.trim(), scratch.dir("large").to_str().unwrap()],
    );
    let pools =
        ["small", "large"].map(|name| format!("{name}=file:{},init", scratch.join(name).display()));
    let server = Server::start(&scratch, &pools.each_ref().map(String::as_str));
    let client = server.client();
    let class = [("pool", "small"), ("blockSize", "512")];
    let id = client
        .create("v", GIB / 2, mount("ext4"), &class)
        .await
        .unwrap();
    let class = [("pool", "large")];
    let copied = client.create_from("c", GIB / 2, mount("ext4"), from_volume(&id), &class);
    let message = super::refused(copied.await, tonic::Code::InvalidArgument);
    assert!(
        message.contains("parameters.pool") && message.contains("4096"),
        "{message}"
    );
    client.delete(&id).await.unwrap();
}
