//! Growth of file systems while they are not mounted, and of those that the kernel does not grow
//! while they are mounted. This process may lack CAP_SYS_RESOURCE, without which the kernel grows
//! no mounted ext4. If it has the capability, the driver under test is started without it.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tonic::Code;

use super::{GIB, MIB, Node, check_pattern, definition, refused, write_pattern};
use slackwater_testkit::{Disk, Scratch, Server, disk, eventually, mount, run, succeeds};

/// A node whose driver may not grow a mounted ext4.
fn without_resources() -> Node {
    let scratch = Scratch::new();
    let disk = Disk::new(&scratch, "pool", "xfs", 64 * GIB);
    let wrapper = [
        "setpriv",
        "--bounding-set",
        "-sys_resource",
        "--inh-caps",
        "-all",
        "--",
    ];
    let server = Server::wrapped(&scratch, &wrapper, &[&definition(&disk.mount_point)]);
    Node::of(server, disk, scratch)
}

/// Bytes of the file system at a path.
async fn total(node: &Node, id: &str, staging: &Path) -> u64 {
    node.client.stats(id, staging).await.unwrap().0
}

/// Whether all of an ext4 is without errors.
fn is_sound(image: &Path) -> bool {
    succeeds("e2fsck", &["-f", "-n", image.to_str().unwrap()])
}

#[tokio::test]
async fn an_ext4_that_the_kernel_does_not_grow_is_grown_when_it_is_staged() {
    let node = without_resources();
    let staging = node.staging("ext4");
    let id = node.staged("ext4", &staging, "ext4").await;
    write_pattern(&staging.join("data"), 5, 1 << 20);
    assert_eq!(node.client.expand(&id, 2 * GIB).await.unwrap(), 2 * GIB);
    // While it is mounted, its size stays the same. The kubelet mounts a volume only after this
    // code.
    let message = refused(
        node.client.expand_node(&id, &staging).await,
        Code::FailedPrecondition,
    );
    assert!(
        message.contains("the next time the volume is staged"),
        "{message}"
    );
    assert!(total(&node, &id, &staging).await < GIB);
    node.client.unstage(&id, &staging).await.unwrap();
    node.stage(&id, &staging, mount("ext4")).await;
    assert!(total(&node, &id, &staging).await > GIB + GIB / 2);
    check_pattern(&staging.join("data"), 5, 1 << 20);
    assert_eq!(
        node.client.expand_node(&id, &staging).await.unwrap(),
        2 * GIB
    );
    node.client.unstage(&id, &staging).await.unwrap();
    node.assert_no_device(&id);
    assert!(is_sound(&node.image(&id)));
    node.client.delete(&id).await.unwrap();
    node.assert_nothing_left();
}

#[tokio::test]
async fn an_ext4_whose_growth_would_move_blocks_is_mounted_with_its_old_size() {
    let node = without_resources();
    let staging = node.staging("tight");
    // No space is reserved for descriptors of further groups.
    let words = [("mkfsOptions", "-O ^resize_inode")];
    let id = node
        .client
        .create("tight", GIB, mount("ext4"), &words)
        .await
        .unwrap();
    for _ in 0..2 {
        node.stage(&id, &staging, mount("ext4")).await;
        assert!(total(&node, &id, &staging).await < GIB);
        node.client.unstage(&id, &staging).await.unwrap();
        node.client.expand(&id, 20 * GIB).await.unwrap();
    }
    node.assert_no_device(&id);
    assert!(is_sound(&node.image(&id)));
    node.client.delete(&id).await.unwrap();
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_repeated_stage_finishes_a_growth_that_was_interrupted() {
    let node = without_resources();
    for fs in ["xfs", "btrfs", "ext4"] {
        let staging = node.staging(fs);
        let id = node.staged(fs, &staging, fs).await;
        write_pattern(&staging.join("data"), 5, 1 << 20);
        node.client.expand(&id, 2 * GIB).await.unwrap();
        node.stage(&id, &staging, mount(fs)).await;
        let bytes = total(&node, &id, &staging).await;
        assert!(bytes > GIB + GIB / 2, "{fs}: {bytes}");
        check_pattern(&staging.join("data"), 5, 1 << 20);
        node.unstage_and_delete(&id, &staging).await;
    }
    node.assert_nothing_left();
}

/// A container that starts has a copy of every mount of its node for a moment; until then, a file
/// system that was unmounted stays in use. Here this is simulated by a bind mount that is no longer
/// in the mount table.
#[tokio::test]
async fn a_copy_of_the_mount_that_ends_after_a_moment_only_delays_a_growth() {
    let node = without_resources();
    let (staging, copy) = (node.staging("v"), node.path("copy"));
    let id = node.staged("v", &staging, "ext4").await;
    node.client.expand(&id, 2 * GIB).await.unwrap();
    std::fs::create_dir(&copy).unwrap();
    let shown = copy.to_str().unwrap();
    run("mount", &["--bind", staging.to_str().unwrap(), shown]);
    let held = std::fs::File::open(&copy).unwrap();
    run("umount", &["--lazy", shown]);
    let ends = thread::spawn(move || {
        thread::sleep(Duration::from_secs(1));
        drop(held);
    });
    node.stage(&id, &staging, mount("ext4")).await;
    ends.join().unwrap();
    let bytes = total(&node, &id, &staging).await;
    assert!(bytes > GIB + GIB / 2, "{bytes}");
    node.unstage_and_delete(&id, &staging).await;
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_published_ext4_is_never_unmounted_to_grow() {
    let node = without_resources();
    let (staging, target) = (node.staging("used"), node.path("used.target"));
    let id = node.staged("used", &staging, "ext4").await;
    node.client
        .publish(&id, &staging, &target, mount("ext4"), false)
        .await
        .unwrap();
    let open = std::fs::File::create(target.join("open")).unwrap();
    node.client.expand(&id, 2 * GIB).await.unwrap();
    node.stage(&id, &staging, mount("ext4")).await;
    open.sync_all().unwrap();
    assert!(total(&node, &id, &staging).await < GIB);
    drop(open);
    node.client.unpublish(&id, &target).await.unwrap();
    node.unstage_and_delete(&id, &staging).await;
    node.assert_nothing_left();
}

/// Processes that run one of the tools on a device of this image.
fn tools_on(image: &Path) -> Vec<i32> {
    let devices = disk::loops_on(image);
    let of = |pid: i32| {
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let words: Vec<String> = words
            .split(|byte| *byte == 0)
            .map(|word| String::from_utf8_lossy(word).into_owned())
            .collect();
        let name = PathBuf::from(words.first()?);
        let is_tool = ["e2fsck", "resize2fs"].contains(&name.file_name()?.to_str()?);
        (is_tool && words.iter().any(|word| devices.contains(word))).then_some(pid)
    };
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(of)
        .collect()
}

/// Kills the driver, or the program that it runs, at many moments of a growth. A repeat then
/// succeeds, and every byte is present.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_growth_that_is_killed_at_any_moment_loses_nothing() {
    const MOMENTS: u32 = 100;
    let mut node = without_resources();
    let staging = node.staging("killed");
    let id = node.staged("killed", &staging, "ext4").await;
    for n in 0..32 {
        write_pattern(&staging.join(format!("data-{n}")), n, 1 << 18);
    }
    node.client.unstage(&id, &staging).await.unwrap();
    let image = node.image(&id);
    let mut size = GIB;
    let mut whole = Duration::ZERO;
    let mut killed = 0;
    for moment in 0..=MOMENTS {
        size += 144 * MIB;
        node.client.expand(&id, size).await.unwrap();
        let start = Instant::now();
        let client = node.server.client();
        let (of, at) = (id.clone(), staging.clone());
        let staged = tokio::spawn(async move { client.stage(&of, &at, mount("ext4")).await });
        if moment == 0 {
            // Without a kill, to measure the duration.
            staged.await.unwrap().unwrap();
            whole = start.elapsed();
        } else {
            let wait = whole.mul_f64(1.3 * f64::from(moment) / f64::from(MOMENTS));
            tokio::time::sleep(wait).await;
            if moment % 2 == 0 {
                node.server.kill();
                killed += 1;
                node.server.restart();
                node.client = node.server.client();
            } else {
                for pid in tools_on(&image) {
                    killed += usize::from(kill(Pid::from_raw(pid), Signal::SIGKILL).is_ok());
                }
            }
            let _ = staged.await.unwrap();
            // A program that has outlived its driver holds the device exclusively.
            let mut answer = node.client.stage(&id, &staging, mount("ext4")).await;
            while answer.as_ref().is_err_and(|e| e.code() == Code::Aborted) {
                answer = node.client.stage(&id, &staging, mount("ext4")).await;
            }
            answer.unwrap_or_else(|error| panic!("moment {moment}: {error:?}"));
        }
        for n in 0..32 {
            check_pattern(&staging.join(format!("data-{n}")), n, 1 << 18);
        }
        let bytes = total(&node, &id, &staging).await;
        node.client.unstage(&id, &staging).await.unwrap();
        eventually("its device is gone", || disk::loops_on(&image).is_empty());
        assert!(is_sound(&image), "moment {moment}");
        if moment == 0 {
            assert!(bytes > size - size / 8, "{bytes} of {size}");
        }
    }
    assert!(killed > MOMENTS as usize / 2, "{killed} were killed");
    node.stage(&id, &staging, mount("ext4")).await;
    assert!(total(&node, &id, &staging).await > size - size / 8);
    node.unstage_and_delete(&id, &staging).await;
    node.assert_nothing_left();
}
