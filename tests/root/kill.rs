//! The real process, killed with SIGKILL (or stopped) before and after each of its effects on the
//! disk or the kernel, on real loop devices. After a restart and a repeat, the result is the same
//! as without a fault: nothing is formatted twice, no acknowledged byte is lost, nothing is left.
//!
//! The process itself counts effects (`core/src/fault.rs`), so a new effect is covered without being
//! listed here.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and works on its own files"
)]

use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::Signal;
use slackwater::csi::VolumeCapability;
use slackwater_testkit::{
    Client, Disk, Scratch, Server, Sweep, WAIT_TIMEOUT, block, disk, eventually, mount, run,
};
use tonic::{Code, Status};

const MIB: u64 = 1 << 20;
const DATA: usize = 1 << 18;

/// The kind of volume of a script.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Mounted(&'static str),
    Thick(&'static str),
    Wiped,
    Block,
    Inline,
    Grown,
}

impl Kind {
    fn capability(self) -> VolumeCapability {
        match self {
            Kind::Mounted(fs) | Kind::Thick(fs) => mount(fs),
            Kind::Grown => mount("xfs"),
            Kind::Wiped | Kind::Inline => mount("ext4"),
            Kind::Block => block(),
        }
    }

    fn parameters(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Kind::Thick(_) => &[("allocation", "thick")],
            Kind::Wiped => &[("wipe", "zero")],
            Kind::Mounted(_) | Kind::Block | Kind::Inline | Kind::Grown => &[],
        }
    }
}

/// The fixture of a sweep.
struct Fixture {
    server: Server,
    disk: Disk,
    scratch: Scratch,
    /// Effects are counted from the moment when this file exists.
    gate: PathBuf,
}

/// One run of a script: what has been acknowledged so far.
struct Run<'a> {
    fixture: &'a mut Fixture,
    kind: Kind,
    name: String,
    staging: PathBuf,
    target: PathBuf,
    /// How often the process was found dead.
    deaths: usize,
    stopped: bool,
}

impl Fixture {
    fn new() -> Fixture {
        let scratch = Scratch::new();
        let disk = Disk::new(&scratch, "pool", "xfs", 4096 * MIB);
        let server = Server::start(
            &scratch,
            &[&format!("default=file:{},init", disk.mount_point.display())],
        );
        let gate = scratch.join("gate");
        Fixture {
            server,
            disk,
            scratch,
            gate,
        }
    }

    /// Restarts the driver with a fault. It counts effects once the gate exists.
    fn arm(&mut self, fault: &str) {
        let _ = std::fs::remove_file(&self.gate);
        let faults = format!("{fault},effect.all:after={}", self.gate.display());
        self.server.restart_with(&[("SLACKWATER_FAULT", &faults)]);
        std::fs::write(&self.gate, "").unwrap();
    }

    fn assert_nothing_left(&self, context: &str) {
        // The driver cleans up what a killed process has left while it serves.
        eventually(&format!("{context}: no volume is left"), || {
            self.disk.volumes().is_empty()
        });
        eventually(&format!("{context}: no trash is left"), || {
            self.disk.trash().is_empty()
        });
        eventually("no loop device is left", || {
            disk::loops_below(&self.disk.mount_point).is_empty()
        });
        assert_eq!(
            disk::mounts_below(&self.scratch.join("kubelet")),
            Vec::new(),
            "{context}: no mount is left"
        );
    }
}

impl Run<'_> {
    fn client(&self) -> Client {
        self.fixture.server.client()
    }

    /// Repeats a call until it succeeds. After a death, the driver is started again without faults.
    /// A call that is cut off (the process is stopped or slow) is repeated after the process
    /// continues.
    async fn until_done<T, F>(&mut self, what: &str, call: impl Fn(Client) -> F) -> T
    where
        F: Future<Output = Result<T, Status>>,
    {
        let start = std::time::Instant::now();
        while start.elapsed() < WAIT_TIMEOUT {
            let answer =
                tokio::time::timeout(Duration::from_millis(500), call(self.client())).await;
            if !self.fixture.server.is_alive() {
                self.deaths += 1;
                self.fixture.server.restart();
                self.check_devices();
                continue;
            }
            match answer {
                Ok(Ok(value)) => return value,
                Ok(Err(status)) if status.code() == Code::Aborted => {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                // No answer: the connection ends before the kernel reports that the process has
                // ended.
                Ok(Err(status)) if std::error::Error::source(&status).is_some() => {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                Ok(Err(status)) => panic!("{what} of {}: {status:?}", self.name),
                // The driver is slow.
                Err(_) if !self.fixture.server.is_stopped() => {}
                Err(_) => {
                    self.stopped = true;
                    self.fixture.server.signal(Signal::SIGCONT);
                }
            }
        }
        panic!("{what} of {} never ends", self.name);
    }

    /// Never two devices on one image.
    fn check_devices(&self) {
        for volume in self.fixture.disk.volumes() {
            let image = volume.join("data.img");
            if image.exists() {
                assert!(
                    disk::loops_on(&image).len() <= 1,
                    "{}: two devices on one image",
                    self.name
                );
            }
        }
    }

    async fn whole_life(&mut self) {
        if self.kind == Kind::Inline {
            return self.inline_life().await;
        }
        let (name, kind) = (self.name.clone(), self.kind);
        let id = self
            .until_done("create", |c| {
                let name = name.clone();
                async move {
                    c.create(&name, 320 * MIB, kind.capability(), kind.parameters())
                        .await
                }
            })
            .await;
        self.show(&id).await;
        let data = self.data();
        write(&data, &self.name);
        let created = self.identity(&id);
        if self.kind == Kind::Grown {
            let (at, target) = (id.clone(), self.target.clone());
            self.until_done("expand", |c| {
                let id = at.clone();
                async move { c.expand(&id, 640 * MIB).await }
            })
            .await;
            let grown = self
                .until_done("expand node", |c| {
                    let (id, target) = (at.clone(), target.clone());
                    async move { c.expand_node(&id, &target).await }
                })
                .await;
            assert_eq!(grown, 640 * MIB);
        }
        self.hide(&id).await;
        self.show(&id).await;
        check(&data, &self.name);
        assert_eq!(
            self.identity(&id),
            created,
            "{}: formatted twice",
            self.name
        );
        self.hide(&id).await;
        self.until_done("delete", |c| {
            let id = id.clone();
            async move { c.delete(&id).await }
        })
        .await;
    }

    async fn inline_life(&mut self) {
        let (name, target) = (self.name.clone(), self.target.clone());
        self.until_done("publish", |c| {
            let (name, target) = (name.clone(), target.clone());
            async move {
                c.publish_inline(&name, &target, "ext4", &[("size", "64Mi")])
                    .await
            }
        })
        .await;
        let data = self.data();
        write(&data, &self.name);
        check(&data, &self.name);
        self.until_done("unpublish", |c| {
            let (name, target) = (name.clone(), target.clone());
            async move { c.unpublish(&name, &target).await }
        })
        .await;
    }

    async fn show(&mut self, id: &str) {
        let (staging, target, kind) = (self.staging.clone(), self.target.clone(), self.kind);
        self.until_done("stage", |c| {
            let (id, staging) = (id.to_string(), staging.clone());
            async move { c.stage(&id, &staging, kind.capability()).await }
        })
        .await;
        self.until_done("publish", |c| {
            let (id, staging, target) = (id.to_string(), staging.clone(), target.clone());
            async move {
                c.publish(&id, &staging, &target, kind.capability(), false)
                    .await
            }
        })
        .await;
    }

    async fn hide(&mut self, id: &str) {
        let (staging, target) = (self.staging.clone(), self.target.clone());
        self.until_done("unpublish", |c| {
            let (id, target) = (id.to_string(), target.clone());
            async move { c.unpublish(&id, &target).await }
        })
        .await;
        self.until_done("unstage", |c| {
            let (id, staging) = (id.to_string(), staging.clone());
            async move { c.unstage(&id, &staging).await }
        })
        .await;
    }

    /// The path of the data.
    fn data(&self) -> PathBuf {
        if self.kind == Kind::Block {
            self.target.clone()
        } else {
            self.target.join("data")
        }
    }

    /// The UUID of the file system; empty for block.
    fn identity(&self, id: &str) -> String {
        if self.kind == Kind::Block {
            return String::new();
        }
        let uuid = id.split_once('.').unwrap().1;
        let image = self
            .fixture
            .disk
            .mount_point
            .join("volumes")
            .join(uuid)
            .join("data.img");
        let device = disk::loops_on(&image);
        run("blkid", &["-p", "-s", "UUID", "-o", "value", &device[0]])
    }
}

fn write(path: &Path, seed: &str) {
    use std::io::Write;
    let bytes: Vec<u8> = seed.bytes().cycle().take(DATA).collect();
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create(!path.exists())
        .open(path)
        .unwrap();
    file.write_all(&bytes).unwrap();
    file.sync_all().unwrap();
}

fn check(path: &Path, seed: &str) {
    use std::io::Read;
    let mut found = vec![0; DATA];
    std::fs::File::open(path)
        .unwrap()
        .read_exact(&mut found)
        .unwrap();
    assert!(
        found.iter().copied().eq(seed.bytes().cycle().take(DATA)),
        "{seed}: acknowledged bytes are lost"
    );
}

async fn run_script(fixture: &mut Fixture, kind: Kind, name: &str) -> (usize, bool) {
    let staging = fixture.scratch.dir(&format!("kubelet/{name}.staging"));
    let target = fixture.scratch.join(&format!("kubelet/{name}"));
    let mut run = Run {
        fixture,
        kind,
        name: name.to_string(),
        staging,
        target,
        deaths: 0,
        stopped: false,
    };
    run.whole_life().await;
    let seen = (run.deaths, run.stopped);
    fixture.assert_nothing_left(name);
    seen
}

async fn sweep(kind: Kind, label: &str, modes: &[&str]) {
    let mut fixture = Fixture::new();
    let part = Sweep::requested();
    for (at, mode) in modes.iter().enumerate() {
        // Of two parts, each one has all effects, each with one of two modes.
        for n in (1..).filter(|n| (n + at) % part.of == part.n) {
            let name = format!("{label}-{mode}-{n}");
            let log = fixture.scratch.join(&format!("{name}.effects"));
            let plan = format!("effect.{n}:{mode},effect.all:log={}", log.display());
            fixture.arm(&plan);
            let (deaths, stopped) = run_script(&mut fixture, kind, &name).await;
            let happened = if mode.starts_with("kill") {
                deaths == 1
            } else {
                stopped
            };
            if !happened {
                let effects = std::fs::read_to_string(&log).unwrap().lines().count();
                assert!(effects < n, "{name} occurs: there are {effects} effects");
                assert!(effects > 10, "{label}: only {effects} effects");
                println!("{label}, {mode}: {effects} effects");
                break;
            }
        }
    }
}

const KILLS: &[&str] = &["kill", "kill-after"];

#[tokio::test]
async fn an_ext4_volume_survives_a_kill_at_every_effect() {
    sweep(Kind::Mounted("ext4"), "ext4", KILLS).await;
}

#[tokio::test]
async fn an_ext4_volume_survives_a_stop_and_a_cut_off_call_at_every_effect() {
    sweep(Kind::Mounted("ext4"), "stop", &["stop"]).await;
}

#[tokio::test]
async fn a_thick_xfs_volume_survives_a_kill_at_every_effect() {
    sweep(Kind::Thick("xfs"), "thick", KILLS).await;
}

#[tokio::test]
async fn a_btrfs_volume_survives_a_kill_at_every_effect() {
    sweep(Kind::Mounted("btrfs"), "btrfs", KILLS).await;
}

#[tokio::test]
async fn a_wiped_volume_survives_a_kill_at_every_effect() {
    sweep(Kind::Wiped, "wiped", KILLS).await;
}

#[tokio::test]
async fn a_block_volume_survives_a_kill_at_every_effect() {
    sweep(Kind::Block, "block", KILLS).await;
}

#[tokio::test]
async fn an_inline_volume_survives_a_kill_at_every_effect() {
    sweep(Kind::Inline, "inline", KILLS).await;
}

#[tokio::test]
async fn a_growing_volume_survives_a_kill_at_every_effect() {
    sweep(Kind::Grown, "grown", KILLS).await;
}

/// The start itself has effects: it creates the pool, and cleans up what a crash has left.
#[tokio::test]
async fn a_start_survives_a_kill_at_every_effect() {
    for mode in KILLS {
        for n in 1.. {
            let scratch = Scratch::new();
            let disk = Disk::new(&scratch, "pool", "xfs", 512 * MIB);
            let pool = format!("default=file:{},init", disk.mount_point.display());
            let plan = format!("effect.{n}:{mode}");
            let mut server = Server::spawn(&scratch, &[&pool], &[], &[("SLACKWATER_FAULT", &plan)]);
            let died = loop {
                if !server.is_alive() {
                    break true;
                }
                if server.client().is_ready().await {
                    break false;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            };
            server.restart();
            let id = server
                .client()
                .create("a", 16 * MIB, mount("ext4"), &[])
                .await
                .unwrap();
            server.client().delete(&id).await.unwrap();
            if !died {
                assert!(n > 4, "a start that creates a pool has effects");
                break;
            }
        }
    }
}
