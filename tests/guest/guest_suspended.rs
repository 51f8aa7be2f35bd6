//! A thin pool that another program holds suspended, as LVM does while it extends a pool, at each
//! step of a group cut and of the calls around it.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and writes files"
)]

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use slackwater_testkit::guest::{in_guest, rounds};
use slackwater_testkit::snapshots::members;
use slackwater_testkit::writers::Writers;
use slackwater_testkit::{Client, Scratch, Server, Sweep, block, mount, run, state_of};
use tonic::Code;

use crate::guest_guard::fixture::{guards, signal};
use crate::guest_lvm::{DISKS, POOL, Volume, create_pool, created, end_pool, runtime, until};

const MAPPED: &str = "slackwater--vg-thin";

#[test]
fn lvextend_delays_writers_and_cuts_and_lets_none_fail() {
    let test = "guest_suspended::lvextend_delays_writers_and_cuts_and_lets_none_fail";
    in_guest(test, &DISKS, || {
        create_pool("640M");
        let scratch = Scratch::new();
        let server = Server::start(&scratch, &[POOL]);
        runtime().block_on(async {
            let client = server.client();
            let raw = created(&scratch, &client, "raw", block()).await;
            let files = created(&scratch, &client, "files", mount("ext4")).await;
            raw.up(&client).await;
            files.up(&client).await;
            let ids = [raw.id.clone(), files.id.clone()];
            let writers = Writers::start(&[&raw.target, &files.target]);
            for round in 0..rounds(2, 30) {
                let extending = thread::spawn(|| {
                    run("lvextend", &["--size", "+8M", "slackwater-vg/thin"]);
                });
                while !extending.is_finished() {
                    calls(&client, &format!("while-{round}"), &ids, false).await;
                }
                extending.join().unwrap();
                assert_eq!(suspended(), "", "{}", server.log());
                writers.assert_flowing("lvextend");
            }
            drop(writers);
            for volume in [raw, files] {
                volume.down(&client).await;
                client.delete(&volume.id).await.unwrap();
            }
        });
        end_pool(server);
    });
}

/// The mapped devices that are suspended.
pub(crate) fn suspended() -> String {
    let columns = [
        "info",
        "--columns",
        "--noheadings",
        "--options",
        "name,suspended",
    ];
    let listed = run("dmsetup", &columns);
    let lines = listed.lines().filter(|line| line.contains("Suspended"));
    lines.collect()
}

fn write(volumes: [&Volume; 2], byte: u8) {
    let [files, raw] = volumes;
    fs::write(files.target.join("data"), [byte; 4096]).unwrap();
    let device = OpenOptions::new().write(true).open(&raw.target).unwrap();
    device.write_all_at(&[byte; 4096], 0).unwrap();
    device.sync_all().unwrap();
}

/// A cut that ended at the deadline of the guard.
const LOST: &str = "the cut was discarded";

/// Makes a cut of both volumes, a volume, and a larger volume, and deletes all of them. Repeats what
/// is ABORTED or UNAVAILABLE until it succeeds, as sidecars do; with `may_lose`, also cuts that are
/// lost.
async fn calls(client: &Client, name: &str, ids: &[String], may_lose: bool) {
    let size = 16 << 20;
    let mut again = 0;
    let mut retry = |status: tonic::Status| {
        let is_temporary = matches!(status.code(), Code::Aborted | Code::Unavailable);
        let is_lost = status.code() == Code::Internal && status.message().contains(LOST);
        assert!(is_temporary || may_lose && is_lost, "{status}");
        again += 1;
        assert!(again < 1000, "it never ends: {status}");
        thread::sleep(Duration::from_millis(100));
        again
    };
    // After a failed cut, the driver leaves the application alone for a minute, unless the class is
    // another one.
    let mut attempt = 0;
    let group = loop {
        let extents = (1_000_000 + attempt).to_string();
        let class = [("retries", "0"), ("maxExtents", &extents)];
        match client
            .group(&format!("{name}-{attempt}"), ids, &class)
            .await
        {
            Ok(group) => break group,
            Err(status) => attempt = retry(status),
        }
    };
    let id = loop {
        match client.create(name, size, block(), &[]).await {
            Ok(id) => break id,
            Err(status) => {
                retry(status);
            }
        }
    };
    while let Err(status) = client.expand(&id, 2 * size).await {
        retry(status);
    }
    while let Err(status) = client.delete(&id).await {
        retry(status);
    }
    while let Err(status) = client
        .delete_group(&group.group_snapshot_id, &members(&group))
        .await
    {
        retry(status);
    }
}

/// The steps of the guard in each session, before and after which it stops.
const OF_GUARD: [&str; 6] = ["begun", "sync", "freeze", "suspend", "resume", "thaw"];

/// When the driver or a guard has stopped itself at a step: suspends the pool, lets the process
/// continue, and resumes the pool after this time. A guard that replaces another stops itself again.
/// Returns whether the pool was suspended before the end.
fn hold_at_stop(
    driver: u32,
    length: Duration,
    has_ended: Arc<AtomicBool>,
) -> thread::JoinHandle<bool> {
    let is_stopped = |pid: &u32| {
        let stat = format!("/proc/{pid}/stat");
        state_of(Path::new(&stat)) == Some('T')
    };
    thread::spawn(move || {
        let (mut begun, mut is_held) = (None, false);
        while is_held || !has_ended.load(Ordering::SeqCst) {
            let processes = guards().into_iter().chain([driver]);
            for stopped in processes.filter(is_stopped) {
                if begun.is_none() {
                    run("dmsetup", &["suspend", "--noflush", "--nolockfs", MAPPED]);
                    (begun, is_held) = (Some(Instant::now()), true);
                }
                signal(stopped, Signal::SIGCONT);
            }
            if is_held && begun.is_some_and(|begun: Instant| begun.elapsed() >= length) {
                run("dmsetup", &["resume", MAPPED]);
                is_held = false;
            }
            thread::sleep(Duration::from_millis(5));
        }
        begun.is_some()
    })
}

/// A driver with two volumes, and what its steps are.
struct Held {
    server: Server,
    gate: PathBuf,
    files: Volume,
    raw: Volume,
}

impl Held {
    fn ids(&self) -> [String; 2] {
        [self.files.id.clone(), self.raw.id.clone()]
    }

    /// Restarts the driver with a fault that counts effects from now on.
    fn arm(&mut self, fault: &str) {
        let _ = fs::remove_file(&self.gate);
        let plan = format!("{fault},effect.all:after={}", self.gate.display());
        self.server.restart_with(&[("SLACKWATER_FAULT", &plan)]);
        fs::write(&self.gate, "").unwrap();
    }

    /// The faults that stop a process at each step of the calls.
    async fn steps(&mut self) -> Vec<String> {
        let log = self.gate.with_extension("log");
        self.arm(&format!("effect.all:log={}", log.display()));
        calls(&self.server.client(), "counted", &self.ids(), true).await;
        let count = fs::read_to_string(&log).unwrap().lines().count();
        let effects = (1..=count).map(|number| format!("effect.{number}:stop"));
        let modes = ["stop", "stop-after"];
        let of_guard = OF_GUARD.map(|step| modes.map(|mode| format!("guard.{step}:{mode}")));
        of_guard.into_iter().flatten().chain(effects).collect()
    }

    /// Holds the pool suspended from a step of the calls on.
    async fn hold(&mut self, step: usize, fault: &str, length: Duration) {
        write([&self.files, &self.raw], step as u8);
        self.arm(fault);
        let driver = self.server.pid().as_raw() as u32;
        let has_ended = Arc::<AtomicBool>::default();
        let holding = hold_at_stop(driver, length, has_ended.clone());
        let client = self.server.client();
        calls(&client, &format!("cut-{step}"), &self.ids(), true).await;
        has_ended.store(true, Ordering::SeqCst);
        let was_held = holding.join().unwrap();
        println!("{fault}: held {was_held}");
        // The number of effects varies slightly.
        assert!(was_held || fault.starts_with("effect"), "{fault}");
        assert_eq!(suspended(), "", "{fault}\n{}", self.server.log());
        // As soon as the pool is served again, a cut succeeds at once, and so do unmount and mount.
        until("the pool is served", async || client.list().await.is_ok()).await;
        for volume in [&self.files, &self.raw] {
            volume.down(&client).await;
            volume.up(&client).await;
        }
        write([&self.files, &self.raw], step as u8);
        let extents = (2_000_000 + step).to_string();
        let class = [("maxExtents", extents.as_str())];
        let name = format!("after-{step}");
        let group = client.group(&name, &self.ids(), &class).await.unwrap();
        client.delete_all_of(&group).await;
    }
}

#[test]
fn a_pool_that_is_held_suspended_at_any_step_delays_calls_and_leaves_nothing_suspended() {
    let test = "guest_suspended::a_pool_that_is_held_suspended_at_any_step_delays_calls_and_leaves_nothing_suspended";
    in_guest(test, &DISKS, || {
        create_pool("640M");
        let scratch = Scratch::new();
        let server = Server::start(&scratch, &[POOL]);
        runtime().block_on(async {
            let client = server.client();
            let files = created(&scratch, &client, "files", mount("ext4")).await;
            let raw = created(&scratch, &client, "raw", block()).await;
            files.up(&client).await;
            raw.up(&client).await;
            let gate = scratch.join("gate");
            let mut held = Held {
                server,
                gate,
                files,
                raw,
            };
            let length = Duration::from_secs(slackwater_testkit::rounds(1, 20) as u64);
            let steps = held.steps().await;
            assert!(steps.len() > 60, "{steps:?}");
            let count = rounds(6, steps.len());
            let part = Sweep::requested();
            for n in (0..count).skip(part.n).step_by(part.of) {
                let step = n * steps.len() / count;
                held.hold(step, &steps[step], length).await;
            }
            let Held {
                server, files, raw, ..
            } = held;
            for volume in [files, raw] {
                volume.down(&server.client()).await;
                server.client().delete(&volume.id).await.unwrap();
            }
            end_pool(server);
        });
    });
}
