//! A pod with a raw block volume has the loop device itself: its actions on the device affect
//! neither another volume nor the deletion of its own.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use slackwater::host::mountinfo;
use tonic::Code;

use super::{GIB, Node, refused, volume_uuid, write_pattern};
use slackwater_testkit::{block, disk, eventually, mount, run, unmount};

/// The ioctls of linux/loop.h that a container may use on a device of its own without any
/// capability.
mod tenant {
    nix::ioctl_none_bad!(clear, 0x4C01);
    nix::ioctl_write_int_bad!(change, 0x4C06);
    nix::ioctl_write_int_bad!(direct_io, 0x4C08);
    nix::ioctl_read_bad!(status, 0x4C05, [u8; 232]);
    nix::ioctl_write_ptr_bad!(set_status, 0x4C04, [u8; 232]);
}

/// LOOP_CLR_FD.
#[expect(unsafe_code, reason = "the ioctl has no safe form")]
fn clear(target: &Path) {
    let device = File::open(target).unwrap();
    // SAFETY: the descriptor is open; the ioctl takes nothing.
    unsafe { tenant::clear(device.as_raw_fd()) }.unwrap();
}

/// LOOP_CHANGE_FD: attaches another file of the same length to a read-only device.
#[expect(unsafe_code, reason = "the ioctl has no safe form")]
fn change(target: &Path, own: &Path) {
    let device = File::open(target).unwrap();
    let own = File::open(own).unwrap();
    // SAFETY: both descriptors are open.
    unsafe { tenant::change(device.as_raw_fd(), own.as_raw_fd()) }.unwrap();
}

#[expect(unsafe_code, reason = "the ioctl has no safe form")]
fn set_direct_io(target: &Path, on: bool) {
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .open(target)
        .unwrap();
    // SAFETY: the descriptor is open and the argument is a number.
    unsafe { tenant::direct_io(device.as_raw_fd(), i32::from(on)) }.unwrap();
}

/// `lo_flags` of LOOP_GET_STATUS64.
#[expect(unsafe_code, reason = "the ioctl has no safe form")]
fn status(device: &File) -> ([u8; 232], u32) {
    let mut info = [0; 232];
    // SAFETY: the kernel writes a loop_info64, which has 232 bytes.
    unsafe { tenant::status(device.as_raw_fd(), &raw mut info) }.unwrap();
    let flags = u32::from_ne_bytes(info[52..56].try_into().unwrap());
    (info, flags)
}

/// Enables partition scanning.
#[expect(unsafe_code, reason = "the ioctl has no safe form")]
fn scan_partitions(target: &Path) {
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .open(target)
        .unwrap();
    let (mut info, flags) = status(&device);
    info[52..56].copy_from_slice(&(flags | 8).to_ne_bytes());
    // SAFETY: the kernel reads a loop_info64, which has 232 bytes.
    unsafe { tenant::set_status(device.as_raw_fd(), &raw const info) }.unwrap();
}

fn is_direct(target: &Path) -> bool {
    status(&File::open(target).unwrap()).1 & 16 != 0
}

/// The N of the loop device at a target.
fn number(target: &Path) -> u64 {
    let rdev = std::fs::metadata(target).unwrap().rdev();
    assert_eq!(nix::sys::stat::major(rdev), 7);
    nix::sys::stat::minor(rdev)
}

/// A raw block volume with this name, staged, and published at a target of the same name, with its loop
/// device: a pod cannot change a mapped device, which volumes have otherwise where that is possible.
async fn published(node: &Node, name: &str, read_only: bool) -> (String, PathBuf, PathBuf) {
    let (staging, target) = (node.staging(name), node.path(name));
    let class = [("blockGroups", "false")];
    let id = node.client.create(name, GIB, block(), &class).await;
    let id = id.unwrap();
    node.stage(&id, &staging, block()).await;
    node.client
        .publish(&id, &staging, &target, block(), read_only)
        .await
        .unwrap();
    (id, staging, target)
}

async fn end(node: &Node, (id, staging, target): &(String, PathBuf, PathBuf)) {
    node.client.unpublish(id, target).await.unwrap();
    assert!(!target.exists(), "the target is gone");
    node.unstage_and_delete(id, staging).await;
}

/// Waits until the driver has detected the pod's change, and logged it with these words.
fn reported(node: &Node, id: &str, words: &str) {
    eventually("the change is reported", || {
        node.server
            .log()
            .lines()
            .any(|line| line.contains(volume_uuid(id)) && line.contains(words))
    });
}

#[tokio::test]
async fn a_device_that_its_pod_detaches_stays_attached_while_it_is_published() {
    let mut node = Node::new();
    let a = published(&node, "a", false).await;
    write_pattern(&a.2, 1, 1 << 16);
    clear(&a.2);
    assert_eq!(
        disk::loops_on(&node.image(&a.0)).len(),
        1,
        "an open descriptor keeps it"
    );
    super::check_pattern(&a.2, 1, 1 << 16);
    reported(&node, &a.0, "detach");
    let message = refused(
        node.client
            .publish(&a.0, &a.1, &node.path("second"), block(), false)
            .await,
        Code::FailedPrecondition,
    );
    assert!(
        message.contains("detach") && message.contains("unpublish"),
        "{message}"
    );
    // A new device has the right attributes.
    node.client.unpublish(&a.0, &a.2).await.unwrap();
    node.client
        .publish(&a.0, &a.1, &a.2, block(), false)
        .await
        .unwrap();
    super::check_pattern(&a.2, 1, 1 << 16);
    // A restart opens the descriptor again.
    node.restart_with(&[]);
    clear(&a.2);
    assert_eq!(disk::loops_on(&node.image(&a.0)).len(), 1);
    super::check_pattern(&a.2, 1, 1 << 16);
    end(&node, &a).await;
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_number_that_a_target_still_shows_is_never_given_to_another_volume() {
    let mut node = Node::new();
    let a = published(&node, "a", false).await;
    let lost = number(&a.2);
    // While no driver runs, no descriptor keeps the device.
    node.server.kill();
    clear(&a.2);
    assert_eq!(
        disk::loops_on(&node.image(&a.0)),
        Vec::<String>::new(),
        "detached"
    );
    node.restart_with(&[]);
    let b = published(&node, "b", false).await;
    assert_ne!(number(&b.2), lost, "a raw volume has another number");
    let staging = node.staging("c");
    let c = node.staged("c", &staging, "xfs").await;
    let shown = disk::mounts_below(&staging).pop().unwrap();
    assert_ne!(shown.source, Path::new(&format!("/dev/loop{lost}")));
    let secret = b"SECRET of another tenant".repeat(100);
    let device = OpenOptions::new().write(true).open(&b.2).unwrap();
    device.write_all_at(&secret, 0).unwrap();
    device.sync_all().unwrap();
    drop(device);
    let mut read = vec![0; secret.len()];
    let seen = File::open(&a.2).and_then(|device| device.read_exact_at(&mut read, 0));
    assert!(seen.is_err() || read != secret, "another tenant's data");
    // Each of them can be removed, in any order.
    end(&node, &a).await;
    end(&node, &b).await;
    node.unstage_and_delete(&c, &staging).await;
    node.assert_nothing_left();
}

#[tokio::test]
async fn direct_io_that_a_pod_disables_is_restored_and_other_flags_are_reported() {
    let node = Node::new();
    let a = published(&node, "a", false).await;
    assert!(is_direct(&a.2), "the pool's disk supports it");
    set_direct_io(&a.2, false);
    assert!(!is_direct(&a.2));
    eventually("direct I/O is on again", || is_direct(&a.2));
    reported(&node, &a.0, "direct I/O");
    // It is repaired, so nothing is refused.
    let second = node.path("second");
    node.client
        .publish(&a.0, &a.1, &second, block(), false)
        .await
        .unwrap();
    scan_partitions(&a.2);
    reported(&node, &a.0, "partition");
    let message = refused(
        node.client
            .publish(&a.0, &a.1, &node.path("third"), block(), false)
            .await,
        Code::FailedPrecondition,
    );
    assert!(message.contains("partition"), "{message}");
    node.client.unpublish(&a.0, &second).await.unwrap();
    end(&node, &a).await;
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_file_that_a_pod_attaches_to_its_device_is_reported_and_is_detached_with_the_pod() {
    let node = Node::new();
    let a = published(&node, "a", true).await;
    let own = node.scratch.join("own.img");
    File::create(&own).unwrap().set_len(GIB).unwrap();
    change(&a.2, &own);
    reported(&node, &a.0, "another file");
    let message = refused(
        node.client
            .publish(&a.0, &a.1, &node.path("second"), block(), true)
            .await,
        Code::FailedPrecondition,
    );
    assert!(message.contains("another file"), "{message}");
    refused(node.client.delete(&a.0).await, Code::FailedPrecondition);
    end(&node, &a).await;
    assert_eq!(
        disk::loops_on(&own),
        Vec::<String>::new(),
        "nothing is left"
    );
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_folder_that_is_named_like_a_device_is_not_that_device() {
    let node = Node::new();
    let a = published(&node, "a", false).await;
    // As the kubelet does for a volume with `medium: Memory` and a `subPath`.
    let name = format!("loop{}", number(&a.2));
    let (memory, sub) = (node.scratch.dir("memory"), node.scratch.dir("sub"));
    run(
        "mount",
        &["-t", "tmpfs", "tenant", memory.to_str().unwrap()],
    );
    let folder = disk::folder(&memory.join(&name));
    run(
        "mount",
        &["--bind", folder.to_str().unwrap(), sub.to_str().unwrap()],
    );
    // It is neither a second target nor found as a volume.
    node.client.unpublish(&a.0, &a.2).await.unwrap();
    assert_eq!(disk::loops_on(&node.image(&a.0)), Vec::<String>::new());
    node.unstage_and_delete(&a.0, &a.1).await;
    unmount(&sub);
    unmount(&memory);
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_node_that_is_bound_elsewhere_counts_as_a_use_whatever_its_name_is() {
    let node = Node::new();
    let a = published(&node, "a", false).await;
    // The kubelet makes such a bind mount of a published volume for its own maps.
    let other = node.scratch.join("map");
    File::create(&other).unwrap();
    run(
        "mount",
        &["--bind", a.2.to_str().unwrap(), other.to_str().unwrap()],
    );
    let shown = mountinfo::parse(&std::fs::read("/proc/self/mountinfo").unwrap()).unwrap();
    assert!(shown.iter().any(|mount| mount.mount_point == other));
    node.client.unpublish(&a.0, &a.2).await.unwrap();
    assert_eq!(disk::loops_on(&node.image(&a.0)).len(), 1, "it is in use");
    node.client.unstage(&a.0, &a.1).await.unwrap();
    refused(node.client.delete(&a.0).await, Code::FailedPrecondition);
    unmount(&other);
    node.client.delete_unused(&a.0).await;
    // A staged file system is not disturbed by any of this.
    let staging = node.staging("m");
    let m = node.staged("m", &staging, "ext4").await;
    node.client
        .publish(&m, &staging, &node.path("mounted"), mount("ext4"), false)
        .await
        .unwrap();
    node.client
        .unpublish(&m, &node.path("mounted"))
        .await
        .unwrap();
    node.unstage_and_delete(&m, &staging).await;
    node.assert_nothing_left();
}
