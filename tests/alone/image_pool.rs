//! A pool on an image whose container is gone. Needs root.
//!
//! The container copies the mount table, and would keep the mounts of other tests in use.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and works on its own files"
)]

use nix::sys::signal::Signal;

use slackwater_testkit::disk::mounts_below;
use slackwater_testkit::image_pool::*;
use slackwater_testkit::node::{MIB, check_pattern, write_pattern};
use slackwater_testkit::{Disk, Scratch, Server, eventually, mount, run};

const DATA: usize = 1 << 20;

/// Unmounts other tests' mounts, which were copied into the namespace; this has no effect outside,
/// because all other mounts are made private first. Then it executes the program.
const IN_ITS_OWN: &str = r#"
    not_ours() { while read -r _ at _; do case $at in "$1"/*) ;; *) echo "$at" ;; esac; done </proc/self/mounts; }
    not_ours "$1" | while read -r at; do mount --make-private "$at"; done
    not_ours "$1" | grep /slackwater- | tac | while read -r at; do umount --lazy "$at"; done
    mount --make-rslave "$2" && shift 2 && exec "$@"
"#;

/// Runs the driver in a mount namespace of its own, like that of a container: mounts below the
/// kubelet's folder are visible outside, the pool's own mount is not.
fn in_a_container(scratch: &Scratch, disk: &Disk, pool: &str) -> Server {
    let kubelet = scratch.dir("kubelet");
    for words in [
        vec![
            "--bind",
            kubelet.to_str().unwrap(),
            kubelet.to_str().unwrap(),
        ],
        vec!["--make-shared", kubelet.to_str().unwrap()],
    ] {
        run("mount", &words);
    }
    let wrapper = [
        "unshare",
        "--mount",
        "--propagation",
        "unchanged",
        "sh",
        "-c",
        IN_ITS_OWN,
        "sh",
        scratch.path().to_str().unwrap(),
        disk.mount_point.to_str().unwrap(),
    ];
    Server::wrapped(scratch, &wrapper, &[pool])
}

#[tokio::test]
async fn an_image_pool_of_a_dead_container_is_found_by_its_device() {
    let scratch = Scratch::alone();
    let disk = ext4(&scratch);
    let pool = definition(&disk, "1Gi");
    let mut server = in_a_container(&scratch, &disk, &pool);
    let client = server.client();
    let (device, uuid) = (the_loop(&disk), fs_uuid(&disk));
    let (id, staging) = staged(&client, &scratch, "a", "ext4").await;
    write_pattern(&staging.join("before"), 1, DATA);
    assert!(
        mounts_below(&mounted(&disk)).is_empty(),
        "the pool's own mount stays in the container"
    );
    server.kill();
    assert_eq!(
        the_loop(&disk),
        device,
        "the volume keeps the device attached"
    );

    // Outside, and in another container: the same device, the same super block.
    let mut server = Server::start(&scratch, &[&pool]);
    assert_eq!(the_loop(&disk), device);
    let client = server.client();
    check_pattern(&staging.join("before"), 1, DATA);
    write_pattern(&staging.join("after"), 2, DATA);
    let other = client
        .create("b", 32 * MIB, mount("ext4"), &[])
        .await
        .unwrap();
    server.signal(Signal::SIGTERM);
    server.wait();
    let mut server = Server::start(&scratch, &[&pool]);
    assert_eq!(the_loop(&disk), device);
    let client = server.client();
    client.delete(&other).await.unwrap();
    client.unstage(&id, &staging).await.unwrap();
    client.stage(&id, &staging, mount("ext4")).await.unwrap();
    check_pattern(&staging.join("after"), 2, DATA);
    assert_eq!(fs_uuid(&disk), uuid, "formatted once");
    client.unstage(&id, &staging).await.unwrap();
    client.delete(&id).await.unwrap();
    server.signal(Signal::SIGTERM);
    server.wait();
    eventually("the image is unmounted", || unmounted(&disk));
}
