//! Growth of ext4 while it is mounted needs CAP_SYS_RESOURCE, which containers and small virtual
//! machines often lack. Therefore these tests run in a guest kernel (tests/guest), with the real
//! driver as a process, on a disk of the guest.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and writes files"
)]

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use slackwater_testkit::guest::{self, in_guest};
use slackwater_testkit::{Client, Scratch, Server, mount, run, succeeds};

const MIB: u64 = 1 << 20;

/// A driver whose pool is the guest's scratch disk.
struct Guest {
    server: Server,
    client: Client,
    runtime: tokio::runtime::Runtime,
    // The last field, because the others depend on it and are dropped first.
    scratch: Scratch,
}

impl Guest {
    fn on(fs: &str) -> Guest {
        let scratch = Scratch::new();
        let disk = guest::disk("pool");
        let force = if fs == "ext4" { "-F" } else { "-f" };
        run(&format!("mkfs.{fs}"), &["-q", force, &disk]);
        let pool = scratch.dir("pool");
        run("mount", &[&disk, pool.to_str().unwrap()]);
        let definition = format!("default=file:{},init", pool.display());
        let server = Server::start(&scratch, &[&definition]);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let client = runtime.block_on(async { server.client() });
        Guest {
            server,
            client,
            runtime,
            scratch,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.join("kubelet").join(name)
    }

    fn create(&self, size: u64, parameters: &[(&str, &str)]) -> String {
        let created = self
            .client
            .create("volume", size, mount("ext4"), parameters);
        self.runtime.block_on(created).unwrap()
    }

    fn up(&self, id: &str) {
        let (staging, target) = (self.path("staging"), self.path("target"));
        self.runtime.block_on(async {
            self.client
                .stage(id, &staging, mount("ext4"))
                .await
                .unwrap();
            self.client
                .publish(id, &staging, &target, mount("ext4"), false)
                .await
                .unwrap();
        });
    }

    fn down(&self, id: &str) {
        self.runtime.block_on(async {
            self.client
                .unpublish(id, &self.path("target"))
                .await
                .unwrap();
            self.client
                .unstage(id, &self.path("staging"))
                .await
                .unwrap();
        });
    }

    fn expand(&self, id: &str, size: u64) {
        let grown = self.runtime.block_on(self.client.expand(id, size)).unwrap();
        assert_eq!(grown, size);
    }

    fn expand_node(&self, id: &str, size: u64) {
        let target = self.path("target");
        let grown = self.client.expand_node(id, &target);
        assert_eq!(self.runtime.block_on(grown).unwrap(), size);
    }

    /// The total size of the user's file system.
    fn total(&self, id: &str) -> u64 {
        let target = self.path("target");
        let stats = self.client.stats(id, &target);
        self.runtime.block_on(stats).unwrap().0
    }

    fn image(&self, id: &str) -> PathBuf {
        let uuid = id.split_once('.').unwrap().1;
        self.scratch
            .join("pool/volumes")
            .join(uuid)
            .join("data.img")
    }

    /// Checks the file system, deletes everything, and stops the driver.
    fn finish(mut self, id: &str) {
        self.down(id);
        run("e2fsck", &["-fn", self.image(id).to_str().unwrap()]);
        self.runtime.block_on(self.client.delete(id)).unwrap();
        assert!(!self.image(id).exists());
        self.server.signal(nix::sys::signal::Signal::SIGTERM);
        assert_eq!(self.server.wait(), Some(0));
    }
}

/// Writes files one after another until it is stopped, and then compares them all.
struct Writer {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<u64>,
}

impl Writer {
    fn on(folder: &Path) -> Writer {
        let stop = Arc::new(AtomicBool::new(false));
        let (stop_requested, folder) = (stop.clone(), folder.to_path_buf());
        let content = |n: u64| vec![n as u8 ^ 0x5a; 64 << 10];
        let thread = thread::spawn(move || {
            let name = |n: u64| folder.join(format!("file-{n}"));
            let mut written = 0;
            while !stop_requested.load(Ordering::SeqCst) {
                let mut file = File::create(name(written)).unwrap();
                file.write_all(&content(written)).unwrap();
                file.sync_all().unwrap();
                written += 1;
            }
            for n in 0..written {
                assert!(fs::read(name(n)).unwrap() == content(n), "file {n}");
            }
            written
        });
        Writer { stop, thread }
    }

    fn stop(self) -> u64 {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().unwrap()
    }
}

/// The space added by the growth can be filled.
fn fill(target: &Path, bytes: u64) {
    let mut file = File::create(target.join("large")).unwrap();
    let piece = vec![7; MIB as usize];
    for _ in 0..bytes / MIB {
        file.write_all(&piece).unwrap();
    }
    file.sync_all().unwrap();
}

fn grows_under_a_writer(pool: &str) {
    let guest = Guest::on(pool);
    let id = guest.create(64 * MIB, &[]);
    guest.up(&id);
    let target = guest.path("target");
    let before = guest.total(&id);
    assert!(before < 64 * MIB);
    let writer = Writer::on(&target);
    for size in [128 * MIB, 256 * MIB] {
        guest.expand(&id, size);
        guest.expand_node(&id, size);
        assert!(guest.total(&id) > size - size / 6, "{size}");
    }
    assert!(writer.stop() > 0);
    fill(&target, 96 * MIB);
    // A repeat changes nothing.
    let grown = guest.total(&id);
    guest.expand_node(&id, 256 * MIB);
    assert_eq!(guest.total(&id), grown);
    guest.finish(&id);
}

#[test]
fn ext4_on_an_xfs_pool_grows_under_a_writer() {
    in_guest(
        "guest_ext4::ext4_on_an_xfs_pool_grows_under_a_writer",
        &["pool:2G"],
        || {
            grows_under_a_writer("xfs");
        },
    );
}

#[test]
fn ext4_on_an_ext4_pool_grows_under_a_writer() {
    in_guest(
        "guest_ext4::ext4_on_an_ext4_pool_grows_under_a_writer",
        &["pool:2G"],
        || {
            grows_under_a_writer("ext4");
        },
    );
}

#[test]
fn ext4_that_grew_while_it_was_not_staged_is_grown_by_its_stage() {
    in_guest(
        "guest_ext4::ext4_that_grew_while_it_was_not_staged_is_grown_by_its_stage",
        &["pool:2G"],
        || {
            let guest = Guest::on("xfs");
            let id = guest.create(64 * MIB, &[]);
            guest.up(&id);
            fs::write(guest.path("target").join("file"), "kept").unwrap();
            guest.down(&id);
            guest.expand(&id, 256 * MIB);
            guest.up(&id);
            assert!(guest.total(&id) > 200 * MIB);
            let kept = fs::read_to_string(guest.path("target").join("file")).unwrap();
            assert_eq!(kept, "kept");
            guest.finish(&id);
        },
    );
}

#[test]
fn thick_ext4_keeps_its_reserved_blocks_while_it_grows() {
    in_guest(
        "guest_ext4::thick_ext4_keeps_its_reserved_blocks_while_it_grows",
        &["pool:2G"],
        || {
            let guest = Guest::on("xfs");
            let id = guest.create(64 * MIB, &[("allocation", "thick")]);
            guest.up(&id);
            guest.expand(&id, 192 * MIB);
            guest.expand_node(&id, 192 * MIB);
            // Whether or not it is refused, it must not release reserved blocks.
            succeeds("fstrim", &[guest.path("target").to_str().unwrap()]);
            let image = fs::metadata(guest.image(&id)).unwrap();
            let blocks = std::os::unix::fs::MetadataExt::blocks(&image);
            assert!(blocks * 512 >= 192 * MIB, "{blocks}");
            guest.finish(&id);
        },
    );
}
