//! Pools in thin pools of LVM, with the real LVM and the real driver as a process.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and writes files"
)]

use std::fs::{self, OpenOptions};
use std::future::Future;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use slackwater::csi::VolumeCapability;
use slackwater_testkit::guest::{self, in_guest};
use slackwater_testkit::snapshots::from_snapshot;
use slackwater_testkit::{Client, Scratch, Server, WAIT_TIMEOUT, binary, block, mount, run};
use tonic::Status;

const MIB: u64 = 1 << 20;
pub(crate) const DISKS: [&str; 1] = ["pool:1G"];
const GROUP: &str = "slackwater-vg";
/// Device mapper's name for the thin pool `thin` of this group.
pub(crate) const MAPPED: &str = "slackwater--vg-thin";
pub(crate) const POOL: &str =
    "default=lvm:slackwater-vg/thin,init,overcommit=4,rawBlock=unfiltered";

/// A second pool, in the same group.
pub(crate) const OTHER: &str = "other=lvm:slackwater-vg/other,init,rawBlock=unfiltered";

pub(crate) fn create_other_pool() {
    create_thin_pool("other", "400M", "4M");
}

fn create_group(device: &str) {
    run("vgcreate", &[GROUP, device]);
}

pub(crate) fn create_pool(size: &str) {
    create_pool_with(size, "8M");
}

pub(crate) fn create_pool_with(size: &str, metadata: &str) {
    create_pool_on(&guest::disk("pool"), size, metadata);
}

pub(crate) fn create_pool_on(device: &str, size: &str, metadata: &str) {
    create_group(device);
    create_thin_pool("thin", size, metadata);
}

fn create_thin_pool(name: &str, size: &str, metadata: &str) {
    let size = ["--size", size, "--poolmetadatasize", metadata];
    let how = ["--chunksize", "64k", "--type", "thin-pool", "--name", name];
    run("lvcreate", &[&size[..], &how[..], &[GROUP]].concat());
    let place = format!("{GROUP}/{name}");
    run("lvchange", &["--errorwhenfull", "y", &place]);
}

/// Runs a program that must fail, and returns what it prints.
fn fails(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(!output.status.success(), "{program} {arguments:?}");
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    text
}

/// Gives the guest what distributions install as LVM's configuration, which consists of comments.
/// With `--lvm-autoactivate`, udev activates volume groups as soon as they are complete.
pub(crate) fn configure_as_distributions() {
    fs::write("/etc/lvm/lvm.conf", "").unwrap();
}

pub(crate) const AUTOACTIVATE: [&str; 1] = ["--lvm-autoactivate"];

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

pub(crate) async fn until<F: Future<Output = bool>>(what: &str, mut check: impl FnMut() -> F) {
    let start = Instant::now();
    while !check().await {
        assert!(start.elapsed() < WAIT_TIMEOUT, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// A volume and its paths.
pub(crate) struct Volume {
    pub(crate) id: String,
    pub(crate) how: VolumeCapability,
    staging: PathBuf,
    pub(crate) target: PathBuf,
}

impl Volume {
    pub(crate) fn of(scratch: &Scratch, name: &str, id: String, how: VolumeCapability) -> Volume {
        Volume {
            id,
            how,
            staging: scratch.join("kubelet").join(format!("{name}.staging")),
            target: scratch.join("kubelet").join(name),
        }
    }

    pub(crate) async fn up(&self, client: &Client) {
        self.try_up(client).await.unwrap();
    }

    pub(crate) async fn try_up(&self, client: &Client) -> Result<(), Status> {
        fs::create_dir_all(&self.staging).unwrap();
        let (id, how) = (&self.id, self.how.clone());
        client.stage(id, &self.staging, how.clone()).await?;
        let published = client.publish(id, &self.staging, &self.target, how, false);
        published.await
    }

    pub(crate) async fn down(&self, client: &Client) {
        self.try_down(client).await.unwrap();
    }

    pub(crate) async fn try_down(&self, client: &Client) -> Result<(), Status> {
        client.unpublish(&self.id, &self.target).await?;
        client.unstage(&self.id, &self.staging).await
    }
}

pub(crate) async fn created(
    scratch: &Scratch,
    client: &Client,
    name: &str,
    how: VolumeCapability,
) -> Volume {
    let id = client.create(name, 64 * MIB, how.clone(), &[]).await;
    Volume::of(scratch, name, id.unwrap(), how)
}

pub(crate) async fn restore(
    scratch: &Scratch,
    client: &Client,
    snapshot: &str,
    how: VolumeCapability,
) -> Volume {
    let source = from_snapshot(snapshot);
    let name = format!("of-{snapshot}");
    let made = client.create_from(&name, 64 * MIB, how.clone(), source, &[]);
    Volume::of(scratch, &name, made.await.unwrap().volume_id, how)
}

pub(crate) fn write_at(device: &Path, at: u64, byte: u8) {
    let file = OpenOptions::new().write(true).open(device).unwrap();
    file.write_all_at(&[byte; 4096], at).unwrap();
    file.sync_all().unwrap();
}

pub(crate) fn read_at(device: &Path, at: u64) -> u8 {
    let mut bytes = [0; 4096];
    let file = fs::File::open(device).unwrap();
    file.read_exact_at(&mut bytes, at).unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]));
    bytes[0]
}

pub(crate) fn end(mut server: Server) {
    server.signal(Signal::SIGTERM);
    assert_eq!(server.wait(), Some(0), "{}", server.log());
}

const RELEASE: [&str; 3] = ["pool", "release", "default=lvm:slackwater-vg/thin"];

/// Unmaps the records of a pool that no driver serves.
pub(crate) fn release() {
    run(binary(), &RELEASE);
}

/// Ends the driver, and checks what it leaves.
pub(crate) fn end_pool(server: Server) {
    end(server);
    check_pool();
}

/// The same for a driver that also has the other pool.
pub(crate) fn end_both_pools(server: Server) {
    end(server);
    let other = "other=lvm:slackwater-vg/other";
    run(binary(), &["pool", "release", other]);
    check_released("other");
    check_pool();
}

/// Checks a pool that no driver serves any more: only its records are mapped, no metadata snapshot
/// is reserved, and its metadata and its volume group have no error.
pub(crate) fn check_pool() {
    release();
    check_released("thin");
    run("vgchange", &["--activate", "n", GROUP]);
    let left = run("dmsetup", &["ls"]);
    assert_eq!(left.trim(), "No devices found");
    run("vgck", &[GROUP]);
}

/// The same for one released thin pool of the group, which is not mapped afterwards.
fn check_released(name: &str) {
    let mapped = format!("slackwater--vg-{name}");
    let status = run("dmsetup", &["status", &mapped]);
    let held = status.split_whitespace().nth(6);
    assert_eq!(held, Some("-"), "{status}");
    // This fails while the pool has another device.
    run("dmsetup", &["remove", &mapped]);
    run("thin_check", &[&format!("/dev/mapper/{mapped}_tmeta")]);
}

#[test]
fn volumes_of_both_kinds_are_created_snapshotted_restored_and_deleted() {
    let test = "guest_lvm::volumes_of_both_kinds_are_created_snapshotted_restored_and_deleted";
    in_guest(test, &DISKS, || {
        create_pool("640M");
        let scratch = Scratch::new();
        let mut server = Server::start(&scratch, &[POOL]);
        runtime().block_on(async {
            let client = server.client();
            let files = created(&scratch, &client, "files", mount("ext4")).await;
            let raw = created(&scratch, &client, "raw", block()).await;
            files.up(&client).await;
            raw.up(&client).await;
            fs::write(files.target.join("data"), "before").unwrap();
            run("sync", &[]);
            write_at(&raw.target, MIB, 1);
            let class = [("consistency", "crash")];
            let cut = client.snapshot("cut", &files.id, &class).await.unwrap();
            let raw_cut = client.snapshot("raw-cut", &raw.id, &class).await.unwrap();
            fs::write(files.target.join("data"), "after").unwrap();
            write_at(&raw.target, MIB, 2);

            let listed = run(
                binary(),
                &[
                    "volumes",
                    "--json",
                    "--node-record",
                    scratch.join("node.json").to_str().unwrap(),
                ],
            );
            assert!(listed.contains("\"thin_id\": 3"), "{listed}");
            assert!(listed.contains("\"thin_id\": 4"), "{listed}");

            // The driver is killed while both are in use.
            server.kill();
            server.restart();
            let client = server.client();
            assert_eq!(client.list().await.unwrap().len(), 2);
            let read = fs::read_to_string(files.target.join("data")).unwrap();
            assert_eq!((read.as_str(), read_at(&raw.target, MIB)), ("after", 2));

            let restored = restore(&scratch, &client, &cut.snapshot_id, mount("ext4")).await;
            let raw_restored = restore(&scratch, &client, &raw_cut.snapshot_id, block()).await;
            restored.up(&client).await;
            raw_restored.up(&client).await;
            let read = fs::read_to_string(restored.target.join("data")).unwrap();
            assert_eq!(
                (read.as_str(), read_at(&raw_restored.target, MIB)),
                ("before", 1)
            );
            for volume in [&files, &raw, &restored, &raw_restored] {
                volume.down(&client).await;
                client.delete(&volume.id).await.unwrap();
            }
            for id in [cut.snapshot_id, raw_cut.snapshot_id] {
                client.delete_snapshot(&id).await.unwrap();
            }
            assert_eq!(client.list().await.unwrap().len(), 0);
        });
        end_pool(server);
    });
}

#[test]
fn lvm_leaves_a_pool_alone_until_it_is_released() {
    let test = "guest_lvm::lvm_leaves_a_pool_alone_until_it_is_released";
    in_guest(test, &DISKS, || {
        create_pool("640M");
        let scratch = Scratch::new();
        let server = Server::start(&scratch, &[POOL]);
        let volume = runtime()
            .block_on(async { created(&scratch, &server.client(), "a", mount("ext4")).await });
        let text = fails(binary(), &RELEASE);
        assert!(text.contains("another slackwater process"), "{text}");
        end(server);
        fails("lvchange", &["--activate", "n", "slackwater-vg/thin"]);
        fails("lvremove", &["--yes", "slackwater-vg/thin"]);
        let thin = ["--virtualsize", "64M", "--thin", "--name", "theirs"];
        fails("lvcreate", &[&thin[..], &["slackwater-vg/thin"]].concat());
        run("lvextend", &["--size", "+64M", "slackwater-vg/thin"]);

        release();
        run("lvchange", &["--activate", "n", "slackwater-vg/thin"]);
        run("lvchange", &["--activate", "y", "slackwater-vg/thin"]);
        let server = Server::start(&scratch, &[POOL]);
        runtime().block_on(async {
            let client = server.client();
            assert_eq!(
                client.list().await.unwrap(),
                std::slice::from_ref(&volume.id)
            );
            client.delete(&volume.id).await.unwrap();
        });
        end_pool(server);
    });
}

#[test]
fn a_group_that_is_activated_late_is_served() {
    let test = "guest_lvm::a_group_that_is_activated_late_is_served";
    in_guest(test, &DISKS, || {
        create_pool("640M");
        run("vgchange", &["--activate", "n", GROUP]);
        let scratch = Scratch::new();
        let server = Server::spawn(&scratch, &[POOL], &[], &[]);
        runtime().block_on(async {
            let client = server.client();
            until("the driver answers", async || client.is_ready().await).await;
            let refused = client.list().await.unwrap_err();
            let text = refused.message();
            assert!(
                text.contains("vgchange --activate y slackwater-vg"),
                "{text}"
            );
            run("vgchange", &["--activate", "y", GROUP]);
            until("the pool is served", async || client.list().await.is_ok()).await;
        });
        end_pool(server);
    });
}

#[test]
fn pools_as_other_programs_leave_them_are_refused_and_not_changed() {
    let test = "guest_lvm::pools_as_other_programs_leave_them_are_refused_and_not_changed";
    in_guest(test, &DISKS, || {
        create_group(&guest::disk("pool"));
        let message = |text: &str| {
            run("dmsetup", &["message", MAPPED, "0", text]);
        };
        let containerd = || {
            message("create_thin 1");
            message("create_thin 7");
            message("delete 1");
        };
        let docker = || {
            message("create_thin 1");
            message("set_transaction_id 0 1");
        };
        // After two creations, each of which a set ID follows.
        let docker_twice = || {
            docker();
            message("create_thin 2");
            message("set_transaction_id 1 2");
        };
        let held = || message("reserve_metadata_snap");
        let lvm = || {
            let thin = ["--virtualsize", "64M", "--thin", "--name", "theirs"];
            run("lvcreate", &[&thin[..], &["slackwater-vg/thin"]].concat());
        };
        let no_zeroing = || {
            run("lvchange", &["--zero", "n", "slackwater-vg/thin"]);
        };
        let queueing = || {
            run("lvchange", &["--errorwhenfull", "n", "slackwater-vg/thin"]);
        };
        let cases: [(&str, &dyn Fn()); 7] = [
            ("the thin device 7", &containerd),
            ("its transaction ID is 1", &docker),
            ("its transaction ID is 2", &docker_twice),
            ("a snapshot of its metadata is held", &held),
            ("thin volumes of its own", &lvm),
            ("lvchange --zero y slackwater-vg/thin", &no_zeroing),
            ("lvchange --errorwhenfull y slackwater-vg/thin", &queueing),
        ];
        for (expected, use_it) in cases {
            create_thin_pool("thin", "512M", "8M");
            use_it();
            let before = run("dmsetup", &["status"]);
            let node_record = Scratch::new();
            let node_record = node_record.join("node.json");
            let text = fails(
                binary(),
                &[
                    "pool",
                    "init",
                    "default=lvm:slackwater-vg/thin",
                    "--node-record",
                    node_record.to_str().unwrap(),
                ],
            );
            assert!(text.contains(expected), "{expected}: {text}");
            assert_eq!(run("dmsetup", &["status"]), before, "{expected}");
            run("lvremove", &["--yes", "--force", "slackwater-vg/thin"]);
        }
    });
}

#[test]
fn records_are_written_and_volumes_deleted_while_the_pool_is_full() {
    let test = "guest_lvm::records_are_written_and_volumes_deleted_while_the_pool_is_full";
    in_guest(test, &DISKS, || {
        create_pool("320M");
        let scratch = Scratch::new();
        let mut server = Server::start(&scratch, &[POOL]);
        runtime().block_on(async {
            let client = server.client();
            let raw = created(&scratch, &client, "raw", block()).await;
            let other = created(&scratch, &client, "other", block()).await;
            raw.up(&client).await;
            // The records take no discards, so their blocks stay.
            let table = fs::read_to_string("/proc/self/mounts").unwrap();
            let folder = table
                .lines()
                .filter_map(|line| line.split(' ').nth(1))
                .find(|at| at.starts_with("/run/slackwater/pools/"))
                .unwrap();
            fails("fstrim", &[folder]);
            let device = OpenOptions::new().write(true).open(&raw.target).unwrap();
            let mut full = false;
            for at in 0..64 {
                let written = device.write_all_at(&[1; MIB as usize], at * MIB);
                full |= written.and_then(|()| device.sync_all()).is_err();
            }
            drop(device);
            assert!(full, "{}", run("dmsetup", &["status", MAPPED]));
            // Records are written also by a driver that starts now.
            server.kill();
            server.restart();
            let client = server.client();
            for n in 0..20 {
                let made = created(&scratch, &client, &format!("n{n}"), block()).await;
                client.delete(&made.id).await.unwrap();
            }
            raw.down(&client).await;
            client.delete(&other.id).await.unwrap();
            client.delete(&raw.id).await.unwrap();
            let again = created(&scratch, &client, "again", block()).await;
            again.up(&client).await;
            write_at(&again.target, MIB, 1);
            again.down(&client).await;
        });
        end_pool(server);
    });
}

#[test]
fn the_demo_uses_a_thin_pool_and_gives_it_back() {
    let test = "guest_lvm::the_demo_uses_a_thin_pool_and_gives_it_back";
    in_guest(test, &["pool:2G"], || {
        create_pool("1500M");
        let place = [
            "demo",
            "--pool",
            "lvm:slackwater-vg/thin",
            "--dir",
            "/run/guest",
        ];
        // Of another program, and without data.
        run("dmsetup", &["message", MAPPED, "0", "create_thin 7"]);
        let refused = fails(binary(), &place);
        assert!(refused.contains("it has the thin device 7"), "{refused}");
        run("dmsetup", &["message", MAPPED, "0", "delete 7"]);
        let before = run("dmsetup", &["status", MAPPED]);
        let reported = run(binary(), &place);
        assert!(reported.contains("nothing is left behind"), "{reported}");
        let fields = |status: &str| {
            let all: Vec<String> = status.split_whitespace().map(str::to_string).collect();
            // Of the pool: its transaction ID and its blocks in use.
            (all[3].clone(), all[5].clone())
        };
        let after = run("dmsetup", &["status", MAPPED]);
        assert_eq!(fields(&after), fields(&before));
        let scratch = Scratch::new();
        end(Server::start(&scratch, &[POOL]));
        let refused = fails(binary(), &place);
        assert!(refused.contains("was used before"), "{refused}");
        check_pool();
    });
}
