//! A volume group with a thin pool, a driver on it, and its messages by hand next to it.

use std::cell::Cell;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::Signal;
use slackwater::host::linux::device_mapper::{DeviceMapper, Selector, Suspend};
use slackwater::host::{
    DeviceHold, Effect, Host, MountSpec, NodeKind, PreparedThinSnapshot, Signature, ThinMessage,
    ThinSnapshot, ThinTable,
};
use slackwater::model::FsType;
use slackwater_testkit::guest::disk;
use slackwater_testkit::{Client, Scratch, Server, free_port, run, succeeds};
use tokio::runtime::Runtime;
use uuid::Uuid;

use super::hand::{Frozen, Hand, write_back};
use super::measure::timed;

pub const GROUP: &str = "slackwater-vg";
/// Device mapper's name for the thin pool `thin` of this group.
pub const MAPPED: &str = "slackwater--vg-thin";
/// Where the driver mounts the records of pools of LVM.
const RECORDS: &str = "/run/slackwater/pools";
/// The size of a volume in bytes. An xfs needs 300 MiB.
pub const SIZE: u64 = 320 << 20;
/// The driver counts upward from 3, and does not arrive here.
const FIRST_ID: u32 = 8_000_000;

pub fn text(path: &Path) -> &str {
    path.to_str().expect("plain names")
}

/// Runs the work while udev starts no programs. They serve its events of device mapper, no call of the driver waits
/// for them, and each start takes longer in the guest, which has one processor, than many a call.
pub fn without_udev<T>(work: impl FnOnce() -> T) -> T {
    run("udevadm", &["control", "--stop-exec-queue"]);
    let done = work();
    run("udevadm", &["control", "--start-exec-queue"]);
    run("udevadm", &["settle"]);
    done
}

/// What the guard does for the driver.
fn suspend(uuid: &str) {
    let how = Suspend {
        skip_lockfs: true,
        no_flush: false,
    };
    let mapper = DeviceMapper::open();
    let suspended = mapper
        .expect("the guest has it")
        .suspend(Selector::Uuid(uuid), how);
    suspended.expect("the device is suspended");
}

/// Whether the guest's LVM reads its disks. While another device is above one of them, LVM would find
/// the same group twice.
fn read_disks(yes: bool) {
    const CONFIGURATION: &str = "/etc/lvm/lvm.conf";
    let mut text = std::fs::read_to_string(CONFIGURATION).expect("the guest's configuration");
    // In User Mode Linux, and in QEMU.
    for disk in ["|^/dev/ubd", "|^/dev/vd"] {
        let (accept, reject) = (format!("\"a{disk}"), format!("\"r{disk}"));
        text = match yes {
            true => text.replace(&reject, &accept),
            false => text.replace(&accept, &reject),
        };
    }
    std::fs::write(CONFIGURATION, text).expect("the guest's configuration");
}

/// A thin pool of LVM. When it is dropped, the group is removed.
pub struct Group {
    device: String,
    is_delayed: bool,
}

impl Group {
    /// With `is_delayed`, each flush of the disk takes 2 ms longer.
    pub fn new(is_delayed: bool) -> Group {
        let below = disk("pool");
        let device = match is_delayed {
            false => below,
            true => {
                let sectors = run("blockdev", &["--getsz", &below]);
                let (sectors, dev) = (sectors.trim(), below);
                let table = format!("0 {sectors} delay {dev} 0 0 {dev} 0 0 {dev} 0 2");
                run("dmsetup", &["create", "pv-delayed", "--table", &table]);
                read_disks(false);
                "/dev/mapper/pv-delayed".into()
            }
        };
        run("vgcreate", &["--yes", GROUP, &device]);
        Group { device, is_delayed }
    }

    pub fn pool(&self, name: &str, size: &str, chunk: &str) {
        let words = ["--yes", "--type", "thin-pool", "--size", size];
        let more = ["--poolmetadatasize", "64M", "--chunksize", chunk];
        run(
            "lvcreate",
            &[&words[..], &more, &["--name", name, GROUP]].concat(),
        );
        let pool = format!("{GROUP}/{name}");
        run("lvchange", &["--errorwhenfull", "y", &pool]);
    }

    pub fn remove_pool(&self, name: &str) {
        run("lvremove", &["--yes", &format!("{GROUP}/{name}")]);
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let removed = succeeds("vgremove", &["--yes", "--force", GROUP])
            && succeeds("pvremove", &["--yes", &self.device])
            && (!self.is_delayed || succeeds("dmsetup", &["remove", "--retry", "pv-delayed"]));
        if self.is_delayed {
            read_disks(true);
        }
        assert!(removed || std::thread::panicking(), "the group is removed");
    }
}

/// Thin devices without the driver: its effects, in its order.
pub struct ThinHand {
    pub hand: Hand,
    pool: String,
    rdev: u64,
    next: Cell<u32>,
    /// The driver records the ID above all IDs before it deletes the newest device.
    mark: Cell<u32>,
}

impl ThinHand {
    pub fn new(root: PathBuf, allowed: PathBuf, pool: &str) -> ThinHand {
        let hand = Hand::new(root, allowed);
        let found = hand.host.thin_pool(pool).expect("its status");
        ThinHand {
            rdev: found.expect("a thin pool").rdev,
            hand,
            pool: pool.into(),
            next: Cell::new(FIRST_ID),
            mark: Cell::new(FIRST_ID),
        }
    }

    pub fn message(&self, message: ThinMessage) {
        let pool = &self.pool;
        self.hand.perform(Effect::ThinMessage { pool, message });
    }

    pub fn new_id(&self) -> u32 {
        self.next.replace(self.next.get() + 1)
    }

    fn uuid(id: u32) -> String {
        format!("SLACKWATER-HAND-{id}")
    }

    /// Creates a device that is removed with its last opener.
    pub fn activate(&self, id: u32, bytes: u64) -> DeviceHold {
        let (uuid, pool) = (&ThinHand::uuid(id), self.pool.clone());
        let table = &ThinTable { pool, id, bytes };
        let read_only = false;
        self.hand.perform(Effect::CreateMapped { uuid });
        self.hand.perform(Effect::LoadTable {
            uuid,
            table,
            read_only,
        });
        self.hand.perform(Effect::ResumeMapped { uuid });
        let held = self.hand.host.hold_mapped(uuid).expect("an open device");
        self.hand.perform(Effect::RemoveMapped { uuid });
        held.expect("a device")
    }

    /// What one bare message needs. The origin has no device, or it is suspended when the message is
    /// sent.
    fn prepare(&self, id: u32, origin: u32) -> PreparedThinSnapshot {
        let (pool, rdev) = (self.pool.clone(), self.rdev);
        let snapshot = ThinSnapshot {
            pool,
            rdev,
            id,
            origin,
        };
        let prepared = self.hand.host.prepare_thin_snapshot(snapshot);
        prepared.expect("prepared")
    }

    /// One bare message.
    pub fn create_snap(&self, id: u32, origin: u32) {
        let prepared = &self.prepare(id, origin);
        self.hand.perform(Effect::CreateThinSnapshot { prepared });
    }

    /// Takes snapshots of mounted volumes at one moment, and deletes them. Returns the milliseconds
    /// from the first freeze to the last thaw.
    pub fn cut(&self, members: &[(u32, PathBuf)]) -> f64 {
        let copies: Vec<u32> = members.iter().map(|_| self.new_id()).collect();
        let pairs = copies.iter().zip(members);
        let prepared: Vec<_> = pairs
            .map(|(id, (origin, _))| self.prepare(*id, *origin))
            .collect();
        let uuids: Vec<String> = members.iter().map(|(id, _)| ThinHand::uuid(*id)).collect();
        let roots: Vec<&Path> = members.iter().map(|(_, path)| path.as_path()).collect();
        roots.iter().copied().for_each(write_back);
        let ((), took) = timed(|| {
            let frozen = Frozen::all(&roots);
            for uuid in &uuids {
                suspend(uuid);
            }
            for prepared in &prepared {
                self.hand.perform(Effect::CreateThinSnapshot { prepared });
            }
            for uuid in &uuids {
                self.hand.perform(Effect::ResumeMapped { uuid });
            }
            drop(frozen);
        });
        for id in copies {
            self.message(ThinMessage::Delete { id });
        }
        took
    }

    /// The same for one volume that is frozen already.
    pub fn snapshot_suspended(&self, id: u32, origin: u32) {
        let uuid = &ThinHand::uuid(origin);
        suspend(uuid);
        self.create_snap(id, origin);
        self.hand.perform(Effect::ResumeMapped { uuid });
    }

    fn begin(&self, folder: &Path) {
        self.hand.perform(Effect::MakeDir { path: folder });
        let path = folder.parent().expect("a folder");
        self.hand.perform(Effect::SyncDir { path });
        self.hand.store(folder);
    }

    pub fn create(&self, name: &str) -> u32 {
        let (folder, id) = (self.hand.volumes.join(name), self.new_id());
        self.begin(&folder);
        self.message(ThinMessage::CreateThin { id });
        self.hand.store(&folder);
        id
    }

    pub fn stage(&self, name: &str, id: u32, fs: FsType, staging: &Path, is_fresh: bool) {
        let (hand, folder) = (&self.hand, self.hand.volumes.join(name));
        let (path, kind) = (staging, NodeKind::Dir);
        hand.perform(Effect::MakeTarget { path, kind });
        let held = self.activate(id, SIZE);
        let device = &held.device;
        let found = hand.host.signature(device).expect("a probe");
        assert_eq!(found == Signature::None, is_fresh, "{found:?}");
        if is_fresh {
            hand.store(&folder);
            hand.perform(Effect::Format {
                device,
                fs,
                uuid: Uuid::new_v4(),
                options: &[],
                keep_blocks: false,
            });
            hand.store(&folder);
        }
        let nouuid = ["nouuid".to_string()];
        let options: &[String] = if fs == FsType::Xfs && !is_fresh {
            &nouuid
        } else {
            &[]
        };
        hand.perform(Effect::Mount(MountSpec {
            device,
            target: staging,
            fs,
            options,
            read_only: false,
        }));
    }

    /// Of a mounted volume.
    pub fn snapshot(&self, name: &str, origin: u32, mount_point: &Path) -> u32 {
        let (folder, id) = (self.hand.snapshots.join(name), self.new_id());
        self.begin(&folder);
        let frozen = Frozen::new(mount_point);
        self.snapshot_suspended(id, origin);
        drop(frozen);
        self.hand.perform(Effect::SyncDir { path: &folder });
        self.hand.store(&folder);
        id
    }

    pub fn restore(&self, name: &str, snapshot: u32, fs: FsType, staging: &Path) -> u32 {
        let (folder, id) = (self.hand.volumes.join(name), self.new_id());
        self.begin(&folder);
        self.create_snap(id, snapshot);
        self.hand.store(&folder);
        self.stage(name, id, fs, staging, false);
        // The folder in which it is staged.
        self.hand.store(&folder);
        id
    }

    /// Of a volume or snapshot without a device.
    pub fn delete(&self, folder: &Path, id: u32) {
        let hand = &self.hand;
        let to = &hand.trash.join(folder.file_name().expect("a name"));
        hand.perform(Effect::Rename { from: folder, to });
        for path in [&hand.trash, folder.parent().expect("a folder")] {
            hand.perform(Effect::SyncDir { path });
        }
        if id >= self.mark.get() {
            hand.store(hand.trash.parent().expect("a folder"));
            self.mark.set(self.next.get());
        }
        let (pool, message) = (&self.pool, ThinMessage::Delete { id });
        // Udev opens a device that is closed, to look at it, and keeps it for a moment.
        while let Err(error) = hand.host.perform(&Effect::ThinMessage { pool, message }) {
            assert_eq!(error.code(), Some(Errno::EBUSY), "{error}");
            std::thread::sleep(Duration::from_millis(1));
        }
        let path = &to.join("record.json");
        hand.perform(Effect::RemoveFile { path });
        hand.perform(Effect::RemoveDir { path: to });
        hand.perform(Effect::SyncDir { path: &hand.trash });
    }
}

/// A driver on a thin pool. The fields are dropped in this order.
pub struct Fixture {
    pub runtime: Runtime,
    pub client: Client,
    pub by_hand: ThinHand,
    server: Server,
    metrics: String,
    pub scratch: Scratch,
    pub group: Group,
}

impl Fixture {
    pub fn new(is_delayed: bool) -> Fixture {
        let group = Group::new(is_delayed);
        group.pool("thin", "9G", "64k");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let scratch = Scratch::new();
        let metrics = format!("127.0.0.1:{}", free_port());
        let pool = "default=lvm:slackwater-vg/thin,init,overcommit=4,snapshots=best-effort,rawBlock=unfiltered";
        let server = Server::spawn(&scratch, &[pool], &["--metrics-address", &metrics], &[]);
        server.wait_ready();
        // A client must be created within a runtime.
        let client = runtime.block_on(async { server.client() });
        // On the same file system as the driver's own records.
        let listed = run("findmnt", &["--noheadings", "--raw", "--output", "TARGET"]);
        let mut targets = listed.lines().map(Path::new);
        let records = targets.find(|path| path.starts_with(RECORDS));
        let records = records.expect("the mounted records");
        let by_hand = ThinHand::new(records.join("by-hand"), scratch.join("kubelet"), MAPPED);
        Fixture {
            runtime,
            client,
            by_hand,
            server,
            metrics,
            scratch,
            group,
        }
    }

    pub fn staging(&self, name: &str) -> PathBuf {
        self.scratch.dir(&format!("kubelet/{name}.staging"))
    }

    /// Milliseconds of all freezes so far, from the first freeze to the last thaw of each cut.
    pub fn frozen(&self) -> f64 {
        let mut stream = TcpStream::connect(&self.metrics).expect("its metrics");
        let request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
        stream.write_all(request).expect("a request");
        let mut reply = String::new();
        stream.read_to_string(&mut reply).expect("a reply");
        let name = "slackwater_freeze_duration_seconds_sum ";
        let value = reply.lines().find_map(|line| line.strip_prefix(name));
        let seconds: f64 = value.expect("the metric").trim().parse().expect("a number");
        seconds * 1e3
    }

    /// Stops the driver and gives the pool back.
    pub fn end(mut self) {
        self.server.signal(Signal::SIGTERM);
        assert_eq!(self.server.wait(), Some(0), "{}", self.server.log());
        let record = self.scratch.join("node.json");
        let place = "default=lvm:slackwater-vg/thin";
        let words = ["pool", "release", place, "--node-record", text(&record)];
        run(slackwater_testkit::binary(), &words);
    }
}
