//! Pools that move, are missing, come back, or come from another machine.

use std::process::Command;

use tonic::Code;

use super::{GIB, check_pattern, definition, refused, write_pattern};
use slackwater_testkit::snapshots::from_snapshot;
use slackwater_testkit::{Disk, Scratch, Server, binary, eventually, mount, run};

async fn home(server: &Server) -> String {
    let answer = server
        .client()
        .node()
        .node_get_info(slackwater::csi::NodeGetInfoRequest {})
        .await
        .unwrap()
        .into_inner();
    answer
        .accessible_topology
        .unwrap()
        .segments
        .into_values()
        .next()
        .unwrap()
}

#[tokio::test]
async fn a_renamed_node_and_a_pool_at_another_path_keep_home_and_volumes() {
    let scratch = Scratch::new();
    let disk = Disk::new(&scratch, "pool", "xfs", 4 * GIB);
    let mut server = Server::start(&scratch, &[&definition(&disk.mount_point)]);
    let before = home(&server).await;
    let (client, kubelet) = (server.client(), scratch.join("kubelet"));
    let id = client
        .create("moves", GIB, mount("xfs"), &[])
        .await
        .unwrap();
    let staging = kubelet.join("staging");
    std::fs::create_dir(&staging).unwrap();
    client.stage(&id, &staging, mount("xfs")).await.unwrap();
    write_pattern(&staging.join("data"), 1, 1 << 20);
    client.unstage(&id, &staging).await.unwrap();
    server.kill();
    disk.unmount();
    let elsewhere = scratch.dir("elsewhere");
    disk.mount_at(&elsewhere);
    let pool = format!("default=file:{}", elsewhere.display());
    let state = scratch.join("other-state");
    let more = [
        "--node-name",
        "renamed",
        "--state-dir",
        state.to_str().unwrap(),
    ];
    let server = Server::spawn(&scratch, &[&pool], &more, &[]);
    server.wait_ready();
    let client = server.client();
    assert_eq!(home(&server).await, before);
    assert_eq!(client.list().await.unwrap(), vec![id.clone()]);
    assert_eq!(
        client
            .create("moves", GIB, mount("xfs"), &[])
            .await
            .unwrap(),
        id
    );
    client.stage(&id, &staging, mount("xfs")).await.unwrap();
    check_pattern(&staging.join("data"), 1, 1 << 20);
    client.unstage(&id, &staging).await.unwrap();
    client.delete(&id).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_is_created_on_a_disk_that_is_mounted_late_and_not_in_its_empty_folder() {
    let scratch = Scratch::new();
    let (late, kept) = (
        Disk::new(&scratch, "late", "xfs", 2 * GIB),
        Disk::new(&scratch, "kept", "ext4", 2 * GIB),
    );
    late.unmount();
    let pools = [
        format!("late=file:{},init", late.mount_point.display()),
        format!("kept=file:{},init", kept.mount_point.display()),
    ];
    let mut server = Server::start(&scratch, &pools.each_ref().map(String::as_str));
    let client = server.client();
    let class = [("pool", "late")];
    let created = client.create("a", GIB / 2, mount("ext4"), &class).await;
    let message = refused(created, Code::Unavailable);
    assert!(message.contains("no file system is mounted"), "{message}");
    assert!(message.contains("mount=any"), "{message}");
    assert_eq!(std::fs::read_dir(&late.mount_point).unwrap().count(), 0);
    // A folder of another disk, as a container may have it mounted, is not a pool of this node
    // either.
    let folder = scratch.dir("kept/folder");
    let bind = [
        "--bind",
        folder.to_str().unwrap(),
        late.mount_point.to_str().unwrap(),
    ];
    run("mount", &bind);
    server.restart();
    refused(
        client.create("a", GIB / 2, mount("ext4"), &class).await,
        Code::Unavailable,
    );
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    run("umount", &[late.mount_point.to_str().unwrap()]);
    late.mount();
    let runtime = tokio::runtime::Handle::current();
    let again = client.clone();
    let waiting = tokio::task::spawn_blocking(move || {
        eventually("the pool is created on its disk", || {
            let created = again.create("a", GIB / 2, mount("ext4"), &class);
            runtime.block_on(created).is_ok()
        });
    });
    waiting.await.unwrap();
    assert_eq!(client.list().await.unwrap().len(), 1);
    client
        .delete(&client.list().await.unwrap()[0])
        .await
        .unwrap();
}

#[tokio::test]
async fn a_pool_is_created_at_the_root_of_a_subvolume_and_not_in_a_folder_of_btrfs() {
    let scratch = Scratch::new();
    let disk = Disk::new(&scratch, "disk", "btrfs", 2 * GIB);
    let subvolume = disk.mount_point.join("@pool");
    run(
        "btrfs",
        &["-q", "subvolume", "create", subvolume.to_str().unwrap()],
    );
    scratch.dir("disk/folder");
    let device = slackwater_testkit::disk::mounts_below(&disk.mount_point)[0]
        .source
        .clone();
    let pools = ["whole", "part"].map(|name| scratch.dir(name));
    let options = "-osubvol=@pool";
    let at = |path: &std::path::Path| path.to_str().unwrap().to_string();
    run("mount", &[options, &at(&device), &at(&pools[0])]);
    run(
        "mount",
        &[
            "--bind",
            &at(&disk.mount_point.join("folder")),
            &at(&pools[1]),
        ],
    );
    let definitions = ["whole", "part"].map(|name| {
        let path = scratch.join(name);
        format!("{name}=file:{},init", path.display())
    });
    let server = Server::start(&scratch, &definitions.each_ref().map(String::as_str));
    let client = server.client();
    let created = client
        .create("a", 0, mount("ext4"), &[("pool", "part")])
        .await;
    let message = refused(created, Code::Unavailable);
    assert!(message.contains("no file system is mounted"), "{message}");
    let id = client
        .create("a", 0, mount("ext4"), &[("pool", "whole")])
        .await;
    client.delete(&id.unwrap()).await.unwrap();
}

#[tokio::test]
async fn a_fifth_of_the_machines_own_disk_stays_free_of_new_volumes_but_not_of_restores() {
    let scratch = Scratch::new();
    let disk = Disk::new(&scratch, "disk", "xfs", 8 * GIB);
    // As on nodes where the kubelet's folder and the pool share the root disk.
    let kubelet = disk.mount_point.join("kubelet");
    let more = ["--allowed-path", kubelet.to_str().unwrap()];
    let pool = format!(
        "default=file:{}/pool,init,mount=any",
        disk.mount_point.display()
    );
    let server = Server::spawn(&scratch, &[&pool], &more, &[]);
    server.wait_ready();
    let client = server.client();
    let total = nix::sys::statvfs::statvfs(&disk.mount_point).unwrap();
    let (total, free) = (
        total.blocks() * total.fragment_size(),
        total.blocks_available() * total.fragment_size(),
    );
    for class in [&[][..], &[("allocation", "thick")]] {
        let capacity = client.capacity(class).await.unwrap();
        assert!(capacity > 0, "{class:?}");
        assert!(
            capacity <= free - total / 5,
            "{class:?}: {capacity} of {free}"
        );
    }
    let capacity = client.capacity(&[]).await.unwrap();
    let more = capacity + (1 << 20);
    refused(
        client.create("b", more, mount("ext4"), &[]).await,
        Code::ResourceExhausted,
    );
    let id = client
        .create("a", capacity, mount("ext4"), &[])
        .await
        .unwrap();
    refused(client.expand(&id, more).await, Code::OutOfRange);
    assert_eq!(client.capacity(&[]).await.unwrap(), 0);
    // Copies of existing volumes may use the reserved space.
    let small = GIB / 8;
    client.delete(&id).await.unwrap();
    let source = client
        .create("small", small, mount("ext4"), &[])
        .await
        .unwrap();
    let rest = client.capacity(&[]).await.unwrap();
    let filler = client
        .create("filler", rest, mount("ext4"), &[])
        .await
        .unwrap();
    refused(
        client.create("c", small, mount("ext4"), &[]).await,
        Code::ResourceExhausted,
    );
    let snapshot = client
        .snapshot("s", &source, &[])
        .await
        .unwrap()
        .snapshot_id;
    let restored = client
        .create_from("r", small, mount("ext4"), from_snapshot(&snapshot), &[])
        .await
        .unwrap();
    for id in [&restored.volume_id, &filler, &source] {
        client.delete(id).await.unwrap();
    }
    client.delete_snapshot(&snapshot).await.unwrap();
}

#[tokio::test]
async fn no_pool_is_created_while_a_disk_is_missing_and_the_other_pools_are_served() {
    let scratch = Scratch::new();
    let (lost, kept) = (
        Disk::new(&scratch, "lost", "xfs", 2 * GIB),
        Disk::new(&scratch, "kept", "ext4", 2 * GIB),
    );
    let pools = [
        format!("lost=file:{},init", lost.mount_point.display()),
        format!("kept=file:{},init", kept.mount_point.display()),
    ];
    let pools: Vec<_> = pools.iter().map(String::as_str).collect();
    let mut server = Server::start(&scratch, &pools);
    let in_lost = server
        .client()
        .create("a", GIB / 2, mount("ext4"), &[("pool", "lost")])
        .await
        .unwrap();
    let in_kept = server
        .client()
        .create("b", GIB / 2, mount("ext4"), &[("pool", "kept")])
        .await
        .unwrap();
    server.kill();
    lost.unmount();
    server.restart();
    let client = server.client();
    assert!(client.is_ready().await, "Probe stays ready");
    assert_eq!(
        std::fs::read_dir(&lost.mount_point).unwrap().count(),
        0,
        "nothing is created in the empty folder"
    );
    let unreachable = [
        refused(client.delete(&in_lost).await, Code::Unavailable),
        refused(client.expand(&in_lost, GIB).await, Code::Unavailable),
        refused(
            client
                .create("c", GIB / 2, mount("ext4"), &[("pool", "lost")])
                .await,
            Code::Unavailable,
        ),
        refused(client.list().await, Code::Unavailable),
    ];
    for message in unreachable {
        assert!(message.contains("is its disk mounted?"), "{message}");
    }
    assert_eq!(client.capacity(&[("pool", "lost")]).await.unwrap(), 0);
    assert_eq!(
        client
            .create("b", GIB / 2, mount("ext4"), &[("pool", "kept")])
            .await
            .unwrap(),
        in_kept
    );
    client.delete(&in_kept).await.unwrap();
    // The disk comes back; the driver detects it by itself.
    lost.mount();
    let runtime = tokio::runtime::Handle::current();
    tokio::task::spawn_blocking({
        let client = client.clone();
        move || {
            eventually("the pool is served again", || {
                runtime.block_on(client.list()).is_ok()
            });
        }
    })
    .await
    .unwrap();
    assert_eq!(client.list().await.unwrap(), vec![in_lost.clone()]);
    client.delete(&in_lost).await.unwrap();
}

#[tokio::test]
async fn a_pool_of_another_home_waits_for_adopt() {
    let scratch = Scratch::new();
    let disk = Disk::new(&scratch, "pool", "xfs", 2 * GIB);
    let mut server = Server::start(&scratch, &[&definition(&disk.mount_point)]);
    let old = home(&server).await;
    let id = server
        .client()
        .create("a", GIB / 2, mount("ext4"), &[])
        .await
        .unwrap();
    server.kill();
    // Another machine, with a pool and therefore a home of its own.
    let other = Scratch::new();
    let own = Disk::new(&other, "own", "ext4", GIB);
    let pools = [
        format!("own=file:{},init", own.mount_point.display()),
        format!("default=file:{}", disk.mount_point.display()),
    ];
    let pools: Vec<_> = pools.iter().map(String::as_str).collect();
    let first = Server::start(&other, &pools[..1]);
    let home_of_other = home(&first).await;
    drop(first);
    assert_ne!(old, home_of_other);
    let mut server = Server::start(&other, &pools);
    let message = refused(server.client().delete(&id).await, Code::Unavailable);
    assert!(
        message.contains("pool adopt"),
        "the solution is named: {message}"
    );
    server.kill();
    let record = other.join("node.json");
    run(
        binary(),
        &[
            "pool",
            "adopt",
            "--node-record",
            record.to_str().unwrap(),
            pools[1],
        ],
    );
    server.restart();
    assert_eq!(server.client().list().await.unwrap(), vec![id.clone()]);
    assert_eq!(home(&server).await, home_of_other);
    server.client().delete(&id).await.unwrap();
}

#[tokio::test]
async fn a_fresh_machine_takes_the_home_of_its_disks() {
    let scratch = Scratch::new();
    let disk = Disk::new(&scratch, "pool", "btrfs", 2 * GIB);
    let mut server = Server::start(&scratch, &[&definition(&disk.mount_point)]);
    let before = home(&server).await;
    server.kill();
    std::fs::remove_file(scratch.join("node.json")).unwrap();
    server.restart();
    assert_eq!(home(&server).await, before);
}

#[test]
fn doctor_warns_of_a_btrfs_pool_whose_images_have_checksums() {
    let scratch = Scratch::new();
    let disk = Disk::new(&scratch, "pool", "btrfs", 2 * GIB);
    let (pool, state) = (definition(&disk.mount_point), scratch.join("state"));
    let record = scratch.join("node.json");
    let place = ["--node-record", record.to_str().unwrap()];
    let run_it = |words: &[&str]| {
        let output = Command::new(binary())
            .args(words)
            .args(place)
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    run_it(&["pool", "init", &pool]);
    let doctor = [
        "doctor",
        "--state-dir",
        state.to_str().unwrap(),
        "--pool",
        &pool,
    ];
    let printed = run_it(&doctor);
    assert!(
        printed.contains("written in place, without btrfs checksums"),
        "{printed}"
    );
    // As in a pool that an earlier release created.
    let volumes = disk.mount_point.join("volumes");
    run("chattr", &["-C", volumes.to_str().unwrap()]);
    let printed = run_it(&doctor);
    let line = printed
        .lines()
        .find(|line| line.contains(": checksums: "))
        .unwrap();
    assert!(
        line.starts_with("warn") && line.contains("new pool"),
        "{printed}"
    );
}

#[tokio::test]
async fn node_calls_use_the_mount_table_when_the_pool_is_not_served() {
    let scratch = Scratch::new();
    let disk = Disk::new(&scratch, "pool", "xfs", 2 * GIB);
    let mut server = Server::start(&scratch, &[&definition(&disk.mount_point)]);
    let client = server.client();
    let staging = scratch.dir("kubelet/staging");
    let target = scratch.join("kubelet/target");
    let id = client.create("a", GIB, mount("ext4"), &[]).await.unwrap();
    client.stage(&id, &staging, mount("ext4")).await.unwrap();
    client
        .publish(&id, &staging, &target, mount("ext4"), false)
        .await
        .unwrap();
    server.kill();
    // The disk cannot be unmounted while its volume is mounted; a folder mounted over it hides it
    // as well.
    run(
        "mount",
        &["-t", "tmpfs", "tmpfs", disk.mount_point.to_str().unwrap()],
    );
    server.restart();
    let client = server.client();
    refused(client.delete(&id).await, Code::Unavailable);
    client.unpublish(&id, &target).await.unwrap();
    client.unstage(&id, &staging).await.unwrap();
    assert_eq!(
        slackwater_testkit::disk::mounts_below(&scratch.join("kubelet")),
        Vec::new()
    );
    disk.unmount();
    server.restart();
    server.client().delete(&id).await.unwrap();
}

/// A process that is killed while it starts a program leaves a child that holds all its open files,
/// including the locks of its pools, until the child executes the program.
#[expect(unsafe_code, reason = "code between fork and exec cannot be safe")]
#[tokio::test]
async fn a_start_waits_for_a_lock_that_a_killed_process_left_between_fork_and_exec() {
    use std::io::{Read, Write};
    use std::os::unix::process::CommandExt;
    let scratch = Scratch::new();
    let disk = Disk::new(&scratch, "pool", "xfs", 2 * GIB);
    let pool = definition(&disk.mount_point);
    let mut server = Server::start(&scratch, &[&pool]);
    server.kill();
    let path = disk.mount_point.join("lock");
    let open = || {
        std::fs::File::options()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap()
    };
    let lock = open();
    lock.try_lock().unwrap();
    let ((mut wait, mut go), (mut there, mut tell)) =
        (std::io::pipe().unwrap(), std::io::pipe().unwrap());
    let mut child = std::process::Command::new("true");
    let between = move || {
        tell.write_all(&[1])?;
        wait.read_exact(&mut [0])
    };
    // SAFETY: one write and one read, of descriptors that are open.
    unsafe { child.pre_exec(between) };
    // This returns when the program has begun.
    let started = std::thread::spawn(move || child.status().unwrap());
    there.read_exact(&mut [0]).unwrap();
    // Closed but not unlocked, as by a kill.
    drop(lock);
    let server = Server::spawn(&scratch, &[&pool], &[], &[]);
    let printed = "waiting for a lock";
    eventually("the start waits", || server.log().contains(printed));
    assert!(open().try_lock().is_err(), "the child holds the lock");
    go.write_all(&[1]).unwrap();
    server.wait_ready();
    assert!(started.join().unwrap().success());
}
