//! A driver with volumes, and the same work without a driver next to it on the same disk.

use std::fs::OpenOptions;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::unistd::{Whence, lseek};
use tokio::runtime::Runtime;

use super::hand::{Hand, Programs};
use super::stall;
use slackwater_testkit::node::{Node, definition, volume_uuid};
use slackwater_testkit::{Disk, Scratch, Server, mount, run};

const BLOCK: u64 = 4096;
/// The unit for punching and searching.
const PIECE: usize = 1 << 20;

pub struct Fixture {
    pub runtime: Runtime,
    pub hand: Hand,
    pub programs: Programs,
    /// The last field, because the others depend on it and are dropped first.
    pub node: Node,
}

/// A mounted volume of the driver.
pub struct Volume {
    pub id: String,
    pub staging: PathBuf,
    pub image: PathBuf,
}

impl Fixture {
    /// Starts a driver with a pool on a file system.
    pub fn new(pool: &str, size: u64) -> Fixture {
        Fixture::configured(pool, size, Scratch::new(), &[])
    }

    /// The same with a hook for all volumes, which writes a line to its log when it is ready, and
    /// when it is released.
    pub fn with_hook(pool: &str, size: u64) -> (Fixture, PathBuf) {
        let scratch = Scratch::new();
        let (log, program) = (scratch.join("hook.log"), scratch.join("hook"));
        let config = scratch.join("hooks.toml");
        let note = format!("date +%s%N >> {}", log.display());
        let script = format!("{note}\necho READY\ncat > /dev/null\n{note}\n");
        std::fs::write(&program, script).expect("a hook");
        let command = ["/bin/sh", program.to_str().expect("plain")];
        let hook = format!(
            "[[hook]]\nname = \"app\"\ncommand = {command:?}\nvolume = \"*\"\ntimeout = \"120s\"\n"
        );
        std::fs::write(&config, hook).expect("a configuration");
        let more = ["--config", config.to_str().expect("plain")];
        (Fixture::configured(pool, size, scratch, &more), log)
    }

    fn configured(pool: &str, size: u64, scratch: Scratch, more: &[&str]) -> Fixture {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        // Like /run: journals of freezes need not survive a reboot.
        let state = scratch.dir("state");
        run(
            "mount",
            &["-t", "tmpfs", "tmpfs", state.to_str().expect("plain")],
        );
        let disk = Disk::new(&scratch, "pool", pool, size);
        let server = Server::spawn(&scratch, &[&definition(&disk.mount_point)], more, &[]);
        server.wait_ready();
        // A client must be created within a runtime.
        let client = runtime.block_on(async { server.client() });
        let node = Node {
            server,
            client,
            disk,
            scratch,
        };
        let beside = node.disk.mount_point.join("by-hand");
        std::fs::create_dir(&beside).expect("a folder");
        Fixture {
            runtime,
            hand: Hand::new(beside.join("effects"), node.scratch.join("kubelet")),
            programs: Programs::new(beside.join("programs")),
            node,
        }
    }

    /// Creates a volume.
    pub fn volume(&self, name: &str, fs: &str, size: u64) -> Volume {
        let staging = self.node.staging(name);
        let client = &self.node.client;
        let id = self.runtime.block_on(async {
            let id = client.create(name, size, mount(fs), &[]).await;
            let id = id.expect("create");
            client.stage(&id, &staging, mount(fs)).await.expect("stage");
            id
        });
        let folder = self.node.disk.mount_point.join("volumes");
        let image = folder.join(volume_uuid(&id)).join("data.img");
        stall::make_file(&staging);
        Volume { id, staging, image }
    }

    /// Deletes a volume.
    pub fn end(&self, volume: &Volume) {
        let (id, staging) = (&volume.id, &volume.staging);
        self.runtime
            .block_on(self.node.unstage_and_delete(id, staging));
    }

    /// Splits a volume's image into this many more extents without changing its content: blocks of
    /// zeros are punched out of a file that is not being written.
    pub fn break_up(&self, volume: &Volume, fs: &str, pieces: u64) {
        let path = volume.staging.join("broken");
        let file = std::fs::File::create(path).expect("a file");
        let zeros = vec![0; PIECE];
        let bytes = 2 * BLOCK * pieces;
        for at in (0..bytes).step_by(PIECE) {
            file.write_all_at(&zeros, at).expect("room");
        }
        file.sync_all().expect("fsync");
        drop(file);
        let client = &self.node.client;
        let (id, staging) = (&volume.id, &volume.staging);
        self.runtime.block_on(async {
            client.unstage(id, staging).await.expect("unstage");
            punch(&volume.image, pieces);
            let staged = client.stage(id, staging, mount(fs)).await;
            staged.expect("stage");
        });
        // The next access to the mount must not be part of the measurement.
        run("sync", &["--file-system", staging.to_str().expect("plain")]);
    }
}

/// Punches `count` blocks of zeros, each between two blocks that stay.
fn punch(image: &Path, count: u64) {
    let file = OpenOptions::new().read(true).write(true).open(image);
    let file = file.expect("an image");
    let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    let offset = |at: u64| i64::try_from(at).expect("no image is so long");
    let seek = |at, whence| lseek(file.as_fd(), offset(at), whence).map(|at| at.cast_unsigned());
    let (mut punched, mut at) = (0, 0);
    let mut pair = vec![0; 2 * BLOCK as usize];
    while punched < count {
        let data = match seek(at, Whence::SeekData) {
            Ok(data) => data.next_multiple_of(BLOCK),
            Err(Errno::ENXIO) => break,
            Err(error) => panic!("SEEK_DATA: {error}"),
        };
        let end = seek(data, Whence::SeekHole).expect("the file ends with a hole");
        at = data;
        while at + 2 * BLOCK <= end && punched < count {
            file.read_exact_at(&mut pair, at).expect("a read");
            if pair.iter().all(|byte| *byte == 0) {
                let block = offset(at + BLOCK);
                fallocate(&file, mode, block, offset(BLOCK)).expect("a hole");
                punched += 1;
            }
            at += 2 * BLOCK;
        }
        at = at.max(end);
    }
    assert_eq!(punched, count, "there were enough zeros");
    file.sync_all().expect("fsync");
}
