//! A volume that was used as a raw device is mounted if its user has created a file system on it.

use std::path::Path;

use tonic::Code;

use super::{GIB, Node, check_pattern, refused, write_pattern};
use slackwater_testkit::{block, disk, mount, run, succeeds};

/// Creates a raw volume and does something on its published device.
async fn raw(node: &Node, name: &str, act: impl FnOnce(&Path)) -> String {
    let (staging, target) = (node.staging(name), node.path(&format!("{name}.target")));
    let client = &node.client;
    let id = client.create(name, GIB, block(), &[]).await.unwrap();
    client.stage(&id, &staging, block()).await.unwrap();
    client
        .publish(&id, &staging, &target, block(), false)
        .await
        .unwrap();
    act(&target);
    client.unpublish(&id, &target).await.unwrap();
    client.unstage(&id, &staging).await.unwrap();
    id
}

/// The options of a mount point in the mount table.
fn options(at: &Path) -> String {
    let found = disk::mounts_below(at.parent().unwrap());
    let mount = found.into_iter().rfind(|mount| mount.mount_point == at);
    let mount = mount.unwrap();
    format!("{},{}", mount.options.join(","), mount.super_options)
}

/// Creates a file system with a file on a raw device, as a backup program does.
fn restore(node: &Node, device: &Path, fs: &str, words: &[&str]) {
    let mut arguments = words.to_vec();
    arguments.push(device.to_str().unwrap());
    run(&format!("mkfs.{fs}"), &arguments);
    let private = node.scratch.dir("private");
    let (device, at) = (device.to_str().unwrap(), private.to_str().unwrap());
    // Through a loop device of its own, as in a virtual machine.
    run("mount", &["-o", "loop", device, at]);
    write_pattern(&private.join("data"), 7, 1 << 20);
    slackwater_testkit::unmount(&private);
}

#[tokio::test]
async fn a_file_system_on_a_raw_volume_is_mounted_with_caution() {
    let node = Node::new();
    for fs in ["ext4", "xfs", "btrfs"] {
        let id = raw(&node, fs, |device| restore(&node, device, fs, &["-q"])).await;
        let (staging, target) = (node.staging(fs), node.path(&format!("{fs}.mounted")));
        for _ in 0..2 {
            let mut with_flags = mount(fs);
            set_flags(&mut with_flags, &["suid", "dev"]);
            let client = &node.client;
            client
                .stage(&id, &staging, with_flags.clone())
                .await
                .unwrap();
            client
                .publish(&id, &staging, &target, with_flags, false)
                .await
                .unwrap();
            check_pattern(&target.join("data"), 7, 1 << 20);
            for at in [&staging, &target] {
                let found = options(at);
                assert!(
                    found.contains("nosuid") && found.contains("nodev"),
                    "{found}"
                );
                assert!(
                    fs != "ext4" || found.contains("errors=remount-ro"),
                    "{found}"
                );
                assert!(fs != "xfs" || found.contains("nouuid"), "{found}");
            }
            client.unpublish(&id, &target).await.unwrap();
            client.unstage(&id, &staging).await.unwrap();
        }
        // From now on it is a file system.
        refused(
            node.client.stage(&id, &staging, block()).await,
            Code::FailedPrecondition,
        );
        node.client.delete_unused(&id).await;
    }
    node.assert_nothing_left();
}

fn set_flags(capability: &mut slackwater::csi::VolumeCapability, flags: &[&str]) {
    use slackwater::csi::volume_capability::AccessType;
    if let Some(AccessType::Mount(mount)) = &mut capability.access_type {
        mount.mount_flags = flags.iter().map(|flag| flag.to_string()).collect();
    }
}

#[tokio::test]
async fn two_raw_volumes_with_the_same_content_are_mounted_together() {
    let node = Node::new();
    for fs in ["xfs", "btrfs"] {
        // mkfs.btrfs refuses a UUID that blkid has just seen on another device.
        let words: &[&str] = match fs {
            "xfs" => &["-q", "-m", "uuid=11111111-2222-3333-4444-555555555555"],
            _ => &["-q", "-U", "11111111-2222-3333-4444-666666666666"],
        };
        let mut both = Vec::new();
        for name in ["a", "b"] {
            let name = format!("{fs}-{name}");
            let make = |device: &Path| {
                let mut arguments = words.to_vec();
                arguments.push(device.to_str().unwrap());
                run(&format!("mkfs.{fs}"), &arguments);
            };
            let id = raw(&node, &name, make).await;
            let staging = node.staging(&name);
            node.stage(&id, &staging, mount(fs)).await;
            std::fs::write(staging.join("whose"), &name).unwrap();
            both.push((id, staging, name));
        }
        for (id, staging, name) in both {
            assert_eq!(
                std::fs::read_to_string(staging.join("whose")).unwrap(),
                name
            );
            node.unstage_and_delete(&id, &staging).await;
        }
    }
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_raw_volume_without_one_whole_file_system_of_that_kind_is_refused_and_untouched() {
    let node = Node::new();
    let text = |device: &Path| device.to_str().unwrap().to_string();
    type Act<'a> = &'a dyn Fn(&Path);
    let cases: [(&str, Act<'_>, &str); 5] = [
        ("blank", &|_| {}, "no known file system"),
        (
            "other",
            &|device| drop(run("mkfs.xfs", &["-q", &text(device)])),
            "xfs was found on it",
        ),
        (
            "swap",
            &|device| drop(run("mkswap", &[&text(device)])),
            "swap was found on it",
        ),
        (
            "long",
            &|device| {
                run("mkfs.ext4", &["-q", "-F", &text(device)]);
                // Twice as many blocks as the device has.
                run(
                    "debugfs",
                    &["-w", "-R", "ssv blocks_count 524288", &text(device)],
                );
            },
            "bytes",
        ),
        (
            "table",
            &|device| {
                run("mkfs.ext4", &["-q", "-F", &text(device)]);
                let mut sector = vec![0; 512];
                sector[446..462]
                    .copy_from_slice(&[0, 0, 2, 0, 0x83, 0, 1, 0, 8, 0, 0, 0, 16, 0, 0, 0]);
                sector[510..512].copy_from_slice(&[0x55, 0xAA]);
                let file = std::fs::OpenOptions::new()
                    .write(true)
                    .open(device)
                    .unwrap();
                std::os::unix::fs::FileExt::write_all_at(&file, &sector, 0).unwrap();
                file.sync_all().unwrap();
            },
            "partition table",
        ),
    ];
    for (name, act, why) in cases {
        let id = raw(&node, name, act).await;
        let changed = || {
            std::fs::metadata(node.image(&id))
                .unwrap()
                .modified()
                .unwrap()
        };
        let before = changed();
        let staging = node.staging(name);
        let message = refused(
            node.client.stage(&id, &staging, mount("ext4")).await,
            Code::FailedPrecondition,
        );
        assert!(message.contains(why), "{name}: {message}");
        node.assert_no_device(&id);
        assert_eq!(changed(), before, "nothing was written");
        // It is a raw device as before.
        node.stage(&id, &staging, block()).await;
        node.unstage_and_delete(&id, &staging).await;
    }
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_raw_volume_in_use_is_not_mounted() {
    let node = Node::new();
    let (staging, target) = (node.staging("used"), node.path("used.target"));
    let client = &node.client;
    let id = client.create("used", GIB, block(), &[]).await.unwrap();
    client.stage(&id, &staging, block()).await.unwrap();
    let other = node.staging("other");
    let message = refused(
        client.stage(&id, &other, mount("ext4")).await,
        Code::FailedPrecondition,
    );
    assert!(message.contains("staged"), "{message}");
    client
        .publish(&id, &staging, &target, block(), false)
        .await
        .unwrap();
    run("mkfs.ext4", &["-q", "-F", target.to_str().unwrap()]);
    client.unstage(&id, &staging).await.unwrap();
    let message = refused(
        client.stage(&id, &other, mount("ext4")).await,
        Code::FailedPrecondition,
    );
    assert!(message.contains("published"), "{message}");
    client.unpublish(&id, &target).await.unwrap();
    client.stage(&id, &other, mount("ext4")).await.unwrap();
    node.unstage_and_delete(&id, &other).await;
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_dirty_ext4_on_a_raw_volume_is_checked_before_it_counts_as_one() {
    let node = Node::new();
    let spoil = |commands: &'static [&'static str]| {
        move |device: &Path| {
            run("mkfs.ext4", &["-q", "-F", device.to_str().unwrap()]);
            for command in commands {
                run("debugfs", &["-w", "-R", command, device.to_str().unwrap()]);
            }
        }
    };
    let good = raw(&node, "good", spoil(&["ssv state 0"])).await;
    let staging = node.staging("good");
    node.stage(&good, &staging, mount("ext4")).await;
    node.client.unstage(&good, &staging).await.unwrap();
    node.assert_no_device(&good);
    assert!(succeeds(
        "e2fsck",
        &["-fn", node.image(&good).to_str().unwrap()]
    ));
    node.client.delete(&good).await.unwrap();
    let bad = raw(&node, "bad", spoil(&["clri <2>", "ssv state 3"])).await;
    let staging = node.staging("bad");
    refused(
        node.client.stage(&bad, &staging, mount("ext4")).await,
        Code::FailedPrecondition,
    );
    node.stage(&bad, &staging, block()).await;
    node.unstage_and_delete(&bad, &staging).await;
    node.assert_nothing_left();
}
