//! The udev rule of the chart, with a real udev and LVM in a guest kernel (tests/guest): the host
//! ignores the content that a tenant writes to a volume, and everything else works as before.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and starts programs"
)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use slackwater_testkit::guest;
use slackwater_testkit::{Scratch, Server, block, eventually, mount};

use crate::guest_lvm::{
    AUTOACTIVATE, DISKS, POOL, Volume, configure_as_distributions, create_pool, end_pool, runtime,
};

/// For events that happen without further action.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
const RULE: &str = "deploy/chart/files/59-slackwater.rules";
const VOLUME: &str = "0d7e3f5c-1111-4222-8333-444455556666";
fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn run(program: &str, arguments: &[&str]) -> String {
    slackwater_testkit::run(program, arguments)
        .trim()
        .to_string()
}

/// A loop device on a new file of 128 MiB: btrfs needs 109.
fn attached(image: &Path) -> String {
    fs::create_dir_all(image.parent().unwrap()).unwrap();
    fs::File::create(image).unwrap().set_len(128 << 20).unwrap();
    let device = run("losetup", &["--find", "--show", image.to_str().unwrap()]);
    run("udevadm", &["settle"]);
    device
}

fn changed(device: &str) {
    run(
        "udevadm",
        &["trigger", "--settle", "--action=change", device],
    );
}

/// An action of a tenant: creates a file system with a label. A change event for udev follows.
fn labelled(device: &str, label: &str) {
    run("mkfs.ext4", &["-q", "-F", "-L", label, device]);
    changed(device);
}

fn by_label(label: &str) -> bool {
    Path::new("/dev/disk/by-label").join(label).exists()
}

fn properties(device: &str) -> String {
    run("udevadm", &["info", "--query=property", device])
}

/// A volume group with an inactive logical volume, as a tenant's virtual machine leaves it. Returns
/// the mapped devices after an event of this device.
fn group(device: &str, name: &str) -> String {
    run("pvcreate", &["--yes", "--quiet", device]);
    run("vgcreate", &["--yes", "--quiet", name, device]);
    let size = ["--size", "8M", "--activate", "n", "--zero", "n"];
    let named = ["--wipesignatures", "n", "--name", "data", name];
    run("lvcreate", &[&size[..], &named[..]].concat());
    changed(device);
    run("dmsetup", &["ls"])
}

#[test]
fn the_host_ignores_the_content_that_a_tenant_writes_to_a_volume() {
    let test = "guest_udev::the_host_ignores_the_content_that_a_tenant_writes_to_a_volume";
    guest::in_guest_with(&AUTOACTIVATE, test, &["pool:1G"], || {
        configure_as_distributions();
        let disk = guest::disk("pool");
        run("mkfs.xfs", &["-q", "-f", &disk]);
        let pool = PathBuf::from("/mnt/pool");
        fs::create_dir_all(&pool).unwrap();
        run("mount", &[&disk, pool.to_str().unwrap()]);
        let volume = pool.join("volumes").join(VOLUME).join("data.img");

        // Without the rule, the host reacts; otherwise this test would prove nothing.
        let device = attached(&volume);
        labelled(&device, "tenant-before");
        assert!(by_label("tenant-before"), "udev probes loop devices");
        assert!(properties(&device).contains("ID_FS_TYPE=ext4"));
        run("wipefs", &["--quiet", "--all", &device]);
        let mapped = group(&device, "before");
        assert!(mapped.contains("before-data"), "LVM activates it: {mapped}");
        run("vgchange", &["--activate", "n", "before"]);
        run("losetup", &["--detach", &device]);
        run("udevadm", &["settle"]);

        let rules = Path::new("/run/udev/rules.d");
        fs::create_dir_all(rules).unwrap();
        fs::copy(root().join(RULE), rules.join("59-slackwater.rules")).unwrap();
        run("udevadm", &["control", "--reload"]);

        let device = attached(&volume);
        // udev reads changed rules with a delay: it checks at most every 3 s, and `reload` was
        // observed to return before the new rules were in use.
        let start = Instant::now();
        while !properties(&device).contains("SYSTEMD_READY=0") {
            assert!(
                start.elapsed() < WAIT_TIMEOUT,
                "udev does not read the rule"
            );
            changed(&device);
        }
        labelled(&device, "tenant-after");
        assert!(!by_label("tenant-after"), "{}", properties(&device));
        let udev_properties = properties(&device);
        assert!(
            !udev_properties.contains("ID_FS_TYPE=ext4"),
            "{udev_properties}"
        );
        assert!(
            udev_properties.contains("SYSTEMD_READY=0"),
            "{udev_properties}"
        );
        run("wipefs", &["--quiet", "--all", &device]);
        let mapped = group(&device, "tenants");
        assert!(!mapped.contains("tenants-data"), "{mapped}");
        let udev_properties = properties(&device);
        assert!(
            !udev_properties.contains("LVM2_member"),
            "{udev_properties}"
        );
        run("mkfs.btrfs", &["-q", "-f", &device]);
        changed(&device);
        let udev_properties = properties(&device);
        assert!(
            !udev_properties.contains("ID_BTRFS_READY"),
            "{udev_properties}"
        );
        assert!(
            !udev_properties.contains("ID_FS_TYPE=btrfs"),
            "{udev_properties}"
        );

        // The pool's own image, and foreign images, work as before.
        for (image, label) in [("pool.img", "pool-image"), ("volumes/other.img", "others")] {
            let device = attached(&pool.join(image));
            labelled(&device, label);
            assert!(by_label(label), "{image}: {}", properties(&device));
        }
    });
}

/// DISABLE_SUBSYSTEM_RULES, DISABLE_DISK_RULES, DISABLE_OTHER_RULES and PRIMARY_SOURCE of libdevmapper.
const FLAGS: u32 = 0x02 | 0x04 | 0x08 | 0x40;

/// What `udevadm monitor --property` prints of each event.
fn events(printed: &str) -> Vec<BTreeMap<String, String>> {
    let blocks = printed.split("\n\n");
    let each = blocks.map(|block| {
        let properties = block.lines().filter_map(|line| line.split_once('='));
        properties
            .map(|(key, value)| (key.into(), value.into()))
            .collect()
    });
    each.collect()
}

/// The kernel repeats the event number of a call in its event: the flags, and in the lower half the
/// number of the semaphore for which the caller waits.
#[test]
fn no_call_for_a_device_of_ours_lets_udev_examine_it_or_waits_for_it() {
    let test = "guest_udev::no_call_for_a_device_of_ours_lets_udev_examine_it_or_waits_for_it";
    guest::in_guest_with(&AUTOACTIVATE, test, &DISKS, || {
        configure_as_distributions();
        create_pool("640M");
        let scratch = Scratch::new();
        let printed = scratch.join("events");
        let mut monitor = Command::new("udevadm")
            .args(["monitor", "--udev", "--property", "--subsystem-match=block"])
            .stdout(fs::File::create(&printed).unwrap())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        eventually("the monitor runs", || {
            fs::read_to_string(&printed).unwrap().contains("UDEV")
        });
        let server = Server::start(&scratch, &[POOL]);
        runtime().block_on(async {
            let client = server.client();
            for (name, capability) in [("raw", block()), ("ext4", mount("ext4"))] {
                let size = 64 << 20;
                let id = client.create(name, size, capability.clone(), &[]).await;
                let volume = Volume::of(&scratch, name, id.unwrap(), capability.clone());
                volume.up(&client).await;
                // The guard suspends and resumes the device.
                let made = client.snapshot(name, &volume.id, &[]).await.unwrap();
                client.expand(&volume.id, 2 * size).await.unwrap();
                client
                    .expand_node(&volume.id, &volume.target)
                    .await
                    .unwrap();
                volume.down(&client).await;
                client.delete(&volume.id).await.unwrap();
                client.delete_snapshot(&made.snapshot_id).await.unwrap();
            }
        });
        end_pool(server);
        run("udevadm", &["settle"]);
        monitor.kill().unwrap();
        monitor.wait().unwrap();
        let printed = fs::read_to_string(&printed).unwrap();
        let mut seen = BTreeMap::new();
        for event in events(&printed) {
            let uuid = event.get("DM_UUID").map_or("", String::as_str);
            let is_ours = |_: &&String| uuid.starts_with("SLACKWATER-");
            let Some(cookie) = event.get("DM_COOKIE").filter(is_ours) else {
                continue;
            };
            let cookie: u32 = cookie.parse().unwrap();
            assert_eq!(
                (cookie >> 16 & FLAGS, cookie & 0xffff),
                (FLAGS, 0),
                "{event:?}"
            );
            *seen.entry(event["ACTION"].clone()).or_insert(0) += 1;
        }
        // udev is slow here, and does not know the UUID of a device that is gone by then.
        let seen_of = |action: &str| seen.get(action).copied().unwrap_or(0);
        let is_enough = seen_of("change") >= 2 && seen_of("remove") >= 1;
        assert!(is_enough, "{seen:?}\n{printed}");
    });
}
