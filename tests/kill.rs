//! The real process, killed with SIGKILL (or stopped) before and after each effect that it has on
//! the disk or the kernel, on real loop devices. After a restart and a repeat everything is as if
//! nothing had happened: nothing formatted twice, no acknowledged byte lost, nothing left.
//!
//! Effects are counted by the process itself (`host/fault.rs`), so that a new effect is swept
//! without being listed here. `SLACKWATER_SWEEP=full` sweeps each kind of volume with each mode.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test says what it expects, and works on its own files"
)]

#[path = "support/mod.rs"]
mod support;

use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::Signal;
use slackwater::csi::VolumeCapability;
use support::{Client, Disk, Scratch, Server, WAIT_TIMEOUT, block, disk, eventually, mount, run};
use tonic::{Code, Status};

const MIB: u64 = 1 << 20;
const DATA: usize = 1 << 18;

/// What a script makes.
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

/// The world of a sweep.
struct World {
    server: Server,
    disk: Disk,
    scratch: Scratch,
    /// Exists from the moment from which effects are counted.
    gate: PathBuf,
}

/// One run of a script: what has been acknowledged so far.
struct Run<'a> {
    world: &'a mut World,
    kind: Kind,
    name: String,
    staging: PathBuf,
    target: PathBuf,
    /// How often the process was found dead.
    deaths: usize,
    stopped: bool,
}

impl World {
    fn new() -> World {
        let scratch = Scratch::new();
        let disk = Disk::new(&scratch, "pool", "xfs", 4096 * MIB);
        let server = Server::start(
            &scratch,
            &[&format!("default=file:{},init", disk.mount_point.display())],
        );
        let gate = scratch.join("gate");
        World {
            server,
            disk,
            scratch,
            gate,
        }
    }

    /// Restarts the driver so that it counts from when the gate opens.
    fn arm(&mut self, plan: &str, log: Option<&Path>) {
        let _ = std::fs::remove_file(&self.gate);
        let gate = self.gate.to_str().unwrap().to_string();
        let mut environment = vec![("SLACKWATER_FAULT_AFTER", gate.as_str())];
        if !plan.is_empty() {
            environment.push(("SLACKWATER_FAULT", plan));
        }
        let log = log.map(|log| log.to_str().unwrap().to_string());
        if let Some(log) = &log {
            environment.push(("SLACKWATER_FAULT_LOG", log));
        }
        self.server.restart_with(&environment);
        std::fs::write(&self.gate, "").unwrap();
    }

    fn assert_nothing_left(&self, context: &str) {
        // What a death has left is ended while the driver serves.
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
        self.world.server.client()
    }

    /// Calls until it's done: after a death the driver is started again, without faults; a call
    /// that is cut off (the process is stopped, or slow) is repeated after the process goes on.
    async fn until_done<T, F>(&mut self, what: &str, call: impl Fn(Client) -> F) -> T
    where
        F: Future<Output = Result<T, Status>>,
    {
        let begun = std::time::Instant::now();
        while begun.elapsed() < WAIT_TIMEOUT {
            let answer =
                tokio::time::timeout(Duration::from_millis(500), call(self.client())).await;
            if !self.world.server.is_alive() {
                self.deaths += 1;
                self.world.server.restart();
                self.check_devices();
                continue;
            }
            match answer {
                Ok(Ok(value)) => return value,
                Ok(Err(status)) if status.code() == Code::Aborted => {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                // No answer: the connection is gone before the kernel says that the process is.
                Ok(Err(status)) if std::error::Error::source(&status).is_some() => {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                Ok(Err(status)) => panic!("{what} of {}: {status:?}", self.name),
                // It takes its time.
                Err(_) if !self.world.server.is_stopped() => {}
                Err(_) => {
                    self.stopped = true;
                    self.world.server.signal(Signal::SIGCONT);
                }
            }
        }
        panic!("{what} of {} never ends", self.name);
    }

    /// Never two devices on one image.
    fn check_devices(&self) {
        for volume in self.world.disk.volumes() {
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
        let made = self.identity(&id);
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
        assert_eq!(self.identity(&id), made, "{}: formatted twice", self.name);
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

    /// Where the data goes.
    fn data(&self) -> PathBuf {
        if self.kind == Kind::Block {
            self.target.clone()
        } else {
            self.target.join("data")
        }
    }

    /// The uuid of the file system; nothing for block.
    fn identity(&self, id: &str) -> String {
        if self.kind == Kind::Block {
            return String::new();
        }
        let uuid = id.split_once('.').unwrap().1;
        let image = self
            .world
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

async fn run_script(world: &mut World, kind: Kind, name: &str) -> (usize, bool) {
    let staging = world.scratch.dir(&format!("kubelet/{name}.staging"));
    let target = world.scratch.join(&format!("kubelet/{name}"));
    let mut run = Run {
        world,
        kind,
        name: name.to_string(),
        staging,
        target,
        deaths: 0,
        stopped: false,
    };
    run.whole_life().await;
    let seen = (run.deaths, run.stopped);
    world.assert_nothing_left(name);
    seen
}

/// Counts the effects of a script's whole life, undisturbed.
async fn count(world: &mut World, kind: Kind, label: &str) -> usize {
    let log = world.scratch.join(&format!("{label}.effects"));
    world.arm("", Some(&log));
    run_script(world, kind, &format!("{label}-count")).await;
    std::fs::read_to_string(&log).unwrap().lines().count()
}

async fn sweep(kind: Kind, label: &str, modes: &[&str]) {
    let mut world = World::new();
    let effects = count(&mut world, kind, label).await;
    assert!(
        effects > 10,
        "{label}: a life has effects, {effects} were counted"
    );
    for mode in modes {
        for n in 1.. {
            world.arm(&format!("{n}:{mode}"), None);
            let name = format!("{label}-{mode}-{n}");
            let (deaths, stopped) = run_script(&mut world, kind, &name).await;
            let happened = if mode.starts_with("kill") {
                deaths == 1
            } else {
                stopped
            };
            if !happened {
                // Past the last one. A busy unmount is tried again, so the count varies by some.
                assert!(n + 4 > effects, "{label}: the fault {n}:{mode} happens");
                break;
            }
        }
    }
    println!("{label}: {effects} effects, each with {modes:?}");
}

const KILLS: &[&str] = &["kill-before", "kill-after"];

#[tokio::test]
async fn an_ext4_volume_survives_a_kill_at_every_effect() {
    sweep(Kind::Mounted("ext4"), "ext4", KILLS).await;
}

#[tokio::test]
async fn an_ext4_volume_survives_a_stop_and_a_cut_off_call_at_every_effect() {
    sweep(Kind::Mounted("ext4"), "stop", &["stop-before"]).await;
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

/// The start itself has effects: it makes the pool, and it ends what a crash left.
#[tokio::test]
async fn a_start_survives_a_kill_at_every_effect() {
    for mode in KILLS {
        for n in 1.. {
            let scratch = Scratch::new();
            let disk = Disk::new(&scratch, "pool", "xfs", 512 * MIB);
            let pool = format!("default=file:{},init", disk.mount_point.display());
            let plan = format!("{n}:{mode}");
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
                assert!(n > 4, "a start that makes a pool has effects");
                break;
            }
        }
    }
}
