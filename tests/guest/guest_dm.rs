//! Disks below device mapper, which the kernels of containers and small machines often lack: a
//! pool's disk that hangs, and other software's devices on top of a volume's device. In a guest
//! kernel (tests/guest), with the real driver as a process.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and writes files"
)]

use std::fs;
use std::future::Future;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use slackwater::csi::VolumeCapability;
use slackwater::host::linux::LinuxHost;
use slackwater::host::{Device, Host};
use slackwater_testkit::guest::{self, in_guest};
use slackwater_testkit::{Client, Scratch, Server, WAIT_TIMEOUT, block, disk, mount, run};
use tonic::Code;

const MIB: u64 = 1 << 20;
const DISKS: [&str; 2] = ["below:1G", "well:1G"];

/// A linear device on a whole disk. It is resumed before it is removed.
struct Linear(&'static str);

impl Linear {
    fn on(device: &str, name: &'static str) -> Linear {
        let sectors = run("blockdev", &["--getsz", device]);
        let table = format!("0 {} linear {device} 0", sectors.trim());
        run("dmsetup", &["create", name, "--table", &table]);
        Linear(name)
    }

    fn device(&self) -> String {
        format!("/dev/mapper/{}", self.0)
    }

    /// From now on, reads and writes wait; data is not written back first.
    fn suspend(&self) {
        run("dmsetup", &["suspend", "--noflush", "--nolockfs", self.0]);
    }

    fn resume(&self) {
        run("dmsetup", &["resume", self.0]);
    }

    fn remove(self) {
        run("dmsetup", &["remove", "--retry", self.0]);
    }
}

/// Creates an xfs and mounts it.
fn mounted(device: &str, at: &Path) {
    run("mkfs.xfs", &["-q", "-f", device]);
    run("mount", &[device, at.to_str().unwrap()]);
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

async fn until<F: Future<Output = bool>>(what: &str, mut check: impl FnMut() -> F) {
    let start = Instant::now();
    while !check().await {
        assert!(start.elapsed() < WAIT_TIMEOUT, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// A volume in use.
struct UsedVolume {
    id: String,
    how: VolumeCapability,
    staging: PathBuf,
    target: PathBuf,
}

impl UsedVolume {
    async fn on(
        scratch: &Scratch,
        client: &Client,
        pool: &str,
        how: VolumeCapability,
    ) -> UsedVolume {
        let parameters = [("pool", pool)];
        let name = format!("{pool}-volume");
        let created = client.create(&name, 256 * MIB, how.clone(), &parameters);
        let used = UsedVolume {
            id: created.await.unwrap(),
            how,
            staging: scratch.join("kubelet").join(format!("{name}.staging")),
            target: scratch.join("kubelet").join(name),
        };
        used.up(client).await;
        used
    }

    async fn up(&self, client: &Client) {
        let (id, staging, how) = (&self.id, &self.staging, &self.how);
        client.stage(id, staging, how.clone()).await.unwrap();
        let published = client.publish(id, staging, &self.target, how.clone(), false);
        published.await.unwrap();
    }

    async fn down(&self, client: &Client) {
        client.unpublish(&self.id, &self.target).await.unwrap();
        client.unstage(&self.id, &self.staging).await.unwrap();
    }
}

#[test]
fn a_disk_that_device_mapper_suspends_blocks_only_its_own_pool() {
    let test = "guest_dm::a_disk_that_device_mapper_suspends_blocks_only_its_own_pool";
    in_guest(test, &DISKS, || {
        let scratch = Scratch::new();
        let below = Linear::on(&guest::disk("below"), "slackwater-below");
        let [hangs, well] = ["hangs", "well"].map(|name| scratch.dir(name));
        mounted(&below.device(), &hangs);
        mounted(&guest::disk("well"), &well);
        let pools = [&hangs, &well].map(|at| {
            let name = at.file_name().unwrap().display();
            format!("{name}=file:{},init", at.display())
        });
        let server = Server::start(&scratch, &[&pools[0], &pools[1]]);
        runtime().block_on(async {
            let client = server.client();
            let stuck = UsedVolume::on(&scratch, &client, "hangs", mount("xfs")).await;
            let free = UsedVolume::on(&scratch, &client, "well", mount("ext4")).await;
            fs::write(stuck.target.join("data"), "kept").unwrap();
            run("sync", &[]);
            below.suspend();
            until("the pool is not served", async || {
                let refused = client.list().await.err();
                refused.is_some_and(|status| status.message().contains("its disk hangs"))
            })
            .await;
            assert!(client.is_ready().await);
            free.down(&client).await;
            free.up(&client).await;
            // With the mount table alone.
            client.unpublish(&stuck.id, &stuck.target).await.unwrap();
            below.resume();
            until("the pool is served again", async || {
                client.list().await.is_ok()
            })
            .await;
            stuck.up(&client).await;
            let kept = fs::read_to_string(stuck.target.join("data")).unwrap();
            assert_eq!(kept, "kept");
            for used in [&stuck, &free] {
                used.down(&client).await;
                client.delete_unused(&used.id).await;
            }
        });
    });
}

#[test]
fn holders_of_a_volumes_device_are_named_and_keep_it_attached() {
    let test = "guest_dm::holders_of_a_volumes_device_are_named_and_keep_it_attached";
    in_guest(test, &DISKS, || {
        let scratch = Scratch::new();
        let well = scratch.dir("well");
        mounted(&guest::disk("well"), &well);
        let server = Server::start(&scratch, &[&format!("well=file:{},init", well.display())]);
        runtime().block_on(async {
            let client = server.client();
            let used = UsedVolume::on(&scratch, &client, "well", block()).await;
            let uuid = used.id.split_once('.').unwrap().1;
            let image = well.join("volumes").join(uuid).join("data.img");
            let device = disk::loops_on(&image).pop().unwrap();
            let tenants = Linear::on(&device, "tenants");
            used.down(&client).await;
            let refused = client.delete(&used.id).await.unwrap_err();
            assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
            assert!(refused.message().contains("(tenants)"), "{refused:?}");
            assert!(image.exists());
            tenants.remove();
            client.delete_unused(&used.id).await;
            assert!(!image.exists());
        });
    });
}

#[test]
fn a_device_that_is_being_removed_is_not_claimed() {
    let test = "guest_dm::a_device_that_is_being_removed_is_not_claimed";
    in_guest(test, &DISKS, || {
        let host = LinuxHost::new(Vec::new());
        let goes = Linear::on(&guest::disk("well"), "goes");
        let device = Device {
            path: "/run/guest/no-node".into(),
            rdev: fs::metadata(goes.device()).unwrap().rdev(),
        };
        // Its node can be missing for another reason.
        host.is_claimed(&device).unwrap_err();
        let mut removal = Command::new("dmsetup").args(["remove", "goes"]).spawn();
        assert!(!host.is_claimed(&device).unwrap());
        assert!(removal.as_mut().unwrap().wait().unwrap().success());
    });
}
