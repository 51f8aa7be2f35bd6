//! Devices of other software on top of a volume's. In a guest kernel (tests/guest), which has device
//! mapper where the machine's has none, with the real driver as a process.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test says what it expects, and writes files"
)]

#[path = "support/mod.rs"]
mod support;

use std::path::{Path, PathBuf};

use slackwater::csi::VolumeCapability;
use support::guest::{self, in_guest};
use support::{Client, Scratch, Server, block, run};
use tonic::Code;

const MIB: u64 = 1 << 20;
const DISKS: [&str; 1] = ["well:1G"];

/// A linear device on the whole of another.
struct Linear(&'static str);

impl Linear {
    fn on(device: &str, name: &'static str) -> Linear {
        let sectors = run("blockdev", &["--getsz", device]);
        let table = format!("0 {} linear {device} 0", sectors.trim());
        run("dmsetup", &["create", name, "--table", &table]);
        Linear(name)
    }

    fn remove(self) {
        run("dmsetup", &["remove", "--retry", self.0]);
    }
}

/// Makes an xfs and mounts it.
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

/// A volume in use.
struct Used {
    id: String,
    how: VolumeCapability,
    staging: PathBuf,
    target: PathBuf,
}

impl Used {
    async fn on(scratch: &Scratch, client: &Client, pool: &str, how: VolumeCapability) -> Used {
        let parameters = [("pool", pool)];
        let name = format!("{pool}-volume");
        let made = client.create(&name, 256 * MIB, how.clone(), &parameters);
        let used = Used {
            id: made.await.unwrap(),
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
fn what_stands_on_a_volumes_device_is_named_and_keeps_it() {
    let test = "what_stands_on_a_volumes_device_is_named_and_keeps_it";
    in_guest(test, &DISKS, || {
        let scratch = Scratch::new();
        let well = scratch.dir("well");
        mounted(&guest::disk("well"), &well);
        let server = Server::start(&scratch, &[&format!("well=file:{},init", well.display())]);
        runtime().block_on(async {
            let client = server.client();
            let used = Used::on(&scratch, &client, "well", block()).await;
            let uuid = used.id.split_once('.').unwrap().1;
            let image = well.join("volumes").join(uuid).join("data.img");
            let device = support::disk::loops_on(&image).pop().unwrap();
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
