//! A node for tests: a driver with one pool on a disk of its own, and short methods for frequent
//! calls.

use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::{Client, Disk, Scratch, Server};
use slackwater::csi::VolumeCapability;
use tonic::{Code, Status};

/// One MiB.
pub const MIB: u64 = 1 << 20;
/// One GiB.
pub const GIB: u64 = 1 << 30;

/// A driver with one pool named `default`.
pub struct Node {
    /// The process.
    pub server: Server,
    /// Its client.
    pub client: Client,
    /// The pool's disk.
    pub disk: Disk,
    /// The last field, because the others depend on it and are dropped first.
    pub scratch: Scratch,
}

impl Node {
    /// The node of a driver that runs.
    pub fn of(server: Server, disk: Disk, scratch: Scratch) -> Node {
        Node {
            client: server.client(),
            server,
            disk,
            scratch,
        }
    }

    /// Starts a node on a disk of `size` bytes with a file system.
    pub fn on(fs: &str, size: u64) -> Node {
        let scratch = Scratch::new();
        let disk = Disk::new(&scratch, "pool", fs, size);
        let server = Server::start(&scratch, &[&definition(&disk.mount_point)]);
        Node::of(server, disk, scratch)
    }

    /// The same, with a configuration file, which is written into the scratch folder.
    pub fn configured(
        fs: &str,
        size: u64,
        config: impl FnOnce(&Scratch) -> String,
        environment: &[(&str, &str)],
    ) -> Node {
        let scratch = Scratch::new();
        let disk = Disk::new(&scratch, "pool", fs, size);
        let file = scratch.join("slackwater.toml");
        std::fs::write(&file, config(&scratch)).unwrap();
        let more = ["--config", file.to_str().unwrap()];
        let pool = definition(&disk.mount_point);
        let server = Server::spawn(&scratch, &[&pool], &more, environment);
        server.wait_ready();
        Node::of(server, disk, scratch)
    }

    /// Kills the driver and starts it again with another environment.
    pub fn restart_with(&mut self, environment: &[(&str, &str)]) {
        self.server.restart_with(environment);
        self.client = self.server.client();
    }

    /// The output of a command with `--json`; `words` begin with the command's name.
    pub fn cli_json(&self, words: &[&str]) -> serde_json::Value {
        let printed = super::run(super::binary(), &[words, &["--json"]].concat());
        serde_json::from_str(&printed).unwrap()
    }

    /// `slackwater frozen --json`, while the driver runs.
    pub fn frozen(&self, more: &[&str]) -> serde_json::Value {
        let state = self.scratch.join("state");
        let words = ["frozen", "--state-dir", state.to_str().unwrap()];
        self.cli_json(&[&words, more].concat())
    }

    /// The snapshots in the output of `slackwater volumes --json`.
    pub fn cli_snapshots(&self) -> Vec<serde_json::Value> {
        let pool = format!("default=file:{}", self.disk.mount_point.display());
        let record = self.scratch.join("node.json");
        let record = record.to_str().unwrap();
        let volumes = self.cli_json(&["volumes", "--pool", &pool, "--node-record", record]);
        volumes["snapshots"].as_array().unwrap().clone()
    }

    /// Starts a node on a sparse xfs disk of 8 GiB.
    #[allow(clippy::new_without_default, reason = "it starts a process")]
    pub fn new() -> Node {
        Node::on("xfs", 8 * GIB)
    }

    /// A path below the allowed folder. Its parent exists.
    pub fn path(&self, name: &str) -> PathBuf {
        self.scratch.join("kubelet").join(name)
    }

    /// A staging path, created as the kubelet creates it.
    pub fn staging(&self, name: &str) -> PathBuf {
        super::disk::folder(&self.path(&format!("{name}.staging")))
    }

    /// Creates a volume of 1 GiB.
    pub async fn created(&self, name: &str, capability: VolumeCapability) -> String {
        let created = self.client.create(name, GIB, capability, &[]).await;
        created.unwrap()
    }

    /// Stages a volume.
    pub async fn stage(&self, id: &str, staging: &Path, capability: VolumeCapability) {
        let staged = self.client.stage(id, staging, capability).await;
        staged.unwrap();
    }

    /// Creates a volume of 1 GiB and stages it.
    pub async fn staged(&self, name: &str, staging: &Path, fs: &str) -> String {
        let id = self.created(name, super::mount(fs)).await;
        self.stage(&id, staging, super::mount(fs)).await;
        id
    }

    /// Unstages and deletes a volume.
    pub async fn unstage_and_delete(&self, id: &str, staging: &Path) {
        self.client.unstage(id, staging).await.unwrap();
        self.client.delete_unused(id).await;
    }

    /// The image of the volume with this ID.
    pub fn image(&self, id: &str) -> PathBuf {
        self.disk
            .mount_point
            .join("volumes")
            .join(volume_uuid(id))
            .join("data.img")
    }

    /// A device is detached when its last opener closes it, and a program that scans all devices
    /// opens it for a moment.
    pub fn assert_no_device(&self, id: &str) {
        let image = self.image(id);
        super::eventually("no device is attached to the image", || {
            super::disk::loops_on(&image).is_empty()
        });
    }

    /// Verifies that nothing is left once all volumes are deleted.
    pub fn assert_nothing_left(&self) {
        assert_eq!(
            self.disk.volumes(),
            Vec::<PathBuf>::new(),
            "no volume is left"
        );
        assert_eq!(
            self.disk.snapshots(),
            Vec::<PathBuf>::new(),
            "no snapshot is left"
        );
        assert_eq!(self.disk.trash(), Vec::<PathBuf>::new(), "no trash is left");
        let pool = self.disk.mount_point.clone();
        super::eventually("no loop device is left", || {
            super::disk::loops_below(&pool).is_empty()
        });
        let kubelet = self.scratch.join("kubelet");
        assert_eq!(
            super::disk::mounts_below(&kubelet),
            Vec::new(),
            "no mount is left"
        );
    }
}

/// `--pool` for a folder in which a pool may be created.
pub fn definition(path: &Path) -> String {
    format!("default=file:{},init", path.display())
}

/// The volume's own part of an ID.
pub fn volume_uuid(id: &str) -> &str {
    id.split_once('.').unwrap().1
}

/// Fails unless a call was refused with this code. Returns the message.
#[track_caller]
pub fn refused<T: std::fmt::Debug>(answer: Result<T, Status>, code: Code) -> String {
    let status = answer.expect_err("this is refused");
    assert_eq!(status.code(), code, "{status:?}");
    status.message().to_string()
}

/// Writes bytes that differ from all others, and syncs them.
pub fn write_pattern(path: &Path, seed: u8, bytes: usize) {
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create(!path.exists())
        .open(path)
        .unwrap();
    file.write_all(&pattern(seed, bytes)).unwrap();
    file.sync_all().unwrap();
}

/// Checks the bytes that [`write_pattern`] wrote.
#[track_caller]
pub fn check_pattern(path: &Path, seed: u8, bytes: usize) {
    let mut found = vec![0; bytes];
    let mut file = std::fs::File::open(path).unwrap();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_exact(&mut found).unwrap();
    assert!(
        found == pattern(seed, bytes),
        "every acknowledged byte of {} is present",
        path.display()
    );
}

/// Bytes that hardly compress, and differ for each seed.
pub fn pattern(seed: u8, bytes: usize) -> Vec<u8> {
    (0..bytes)
        .map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8 ^ seed)
        .collect()
}
