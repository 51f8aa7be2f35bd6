//! A pool on an image: an ext4 disk with one reserved image, whose xfs is the pool (`image=SIZE`).

use std::path::PathBuf;

use super::disk::{loops_on, mounts_below};
use super::node::{GIB, MIB};
use super::{Client, Disk, Scratch, mount, run};

/// An ext4 disk of 2 GiB.
pub fn ext4(scratch: &Scratch) -> Disk {
    Disk::new(scratch, "pool", "ext4", 2 * GIB)
}

/// The pool in the words of `--pool`.
pub fn definition(disk: &Disk, size: &str) -> String {
    format!(
        "default=file:{},init,image={size}",
        disk.mount_point.display()
    )
}

/// The path of the image.
pub fn image(disk: &Disk) -> PathBuf {
    disk.mount_point.join("pool.img")
}

/// Where the image is mounted.
pub fn mounted(disk: &Disk) -> PathBuf {
    disk.mount_point.join("mounted")
}

/// The only device that is attached to the image.
#[track_caller]
pub fn the_loop(disk: &Disk) -> String {
    let loops = loops_on(&image(disk));
    assert_eq!(loops.len(), 1, "one device on the image: {loops:?}");
    loops[0].clone()
}

/// The UUID of the image's file system, which is new each time the image is formatted.
pub fn fs_uuid(disk: &Disk) -> String {
    run(
        "blkid",
        &["-p", "-o", "value", "-s", "UUID", &the_loop(disk)],
    )
}

/// Whether the image is neither mounted nor attached.
pub fn unmounted(disk: &Disk) -> bool {
    mounts_below(&mounted(disk)).is_empty() && loops_on(&image(disk)).is_empty()
}

/// Creates a volume and stages it. Returns its ID and the staging path.
pub async fn staged(client: &Client, scratch: &Scratch, name: &str, fs: &str) -> (String, PathBuf) {
    let id = client
        .create(name, 400 * MIB, mount(fs), &[])
        .await
        .unwrap();
    let staging = scratch.dir(&format!("kubelet/{name}"));
    client.stage(&id, &staging, mount(fs)).await.unwrap();
    (id, staging)
}
