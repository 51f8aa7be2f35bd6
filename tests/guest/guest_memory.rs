//! Memory while writers wait for a cut: the driver and the guard allocate none, and a machine that
//! is short of it stops no writer for longer than the guard allows.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and writes files"
)]

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use slackwater_testkit::guest::{in_guest, in_guest_with};
use slackwater_testkit::{Scratch, Server, block, eventually, mount};
use tonic::Code;

use crate::guest_lvm::{DISKS, POOL, Volume, create_pool, created, end_pool, runtime};
use crate::guest_suspended::suspended;

/// The sections in a log, each as `name number`.
fn sections(log: &Path, count: usize) -> Vec<String> {
    let read = || {
        let text = fs::read_to_string(log).unwrap_or_default();
        text.lines().map(str::to_string).collect::<Vec<_>>()
    };
    eventually("the last section", || read().len() >= count);
    let mut found = read();
    found.sort();
    found
}

#[test]
fn driver_and_guard_allocate_nothing_while_writers_of_thin_volumes_wait() {
    let test = "guest_memory::driver_and_guard_allocate_nothing_while_writers_of_thin_volumes_wait";
    in_guest(test, &DISKS, || {
        create_pool("640M");
        let scratch = Scratch::new();
        let (driver, guard) = (scratch.join("driver"), scratch.join("guard"));
        let plan = format!(
            "driver.memory:log={},guard.memory:log={}",
            driver.display(),
            guard.display()
        );
        let plan = [("SLACKWATER_FAULT", plan.as_str()), ("RUST_BACKTRACE", "1")];
        let server = Server::spawn(&scratch, &[POOL], &[], &plan);
        server.wait_ready();
        runtime().block_on(async {
            let client = server.client();
            let mut volumes = Vec::new();
            for (name, how) in [("a", mount("ext4")), ("b", mount("ext4")), ("c", block())] {
                let volume = created(&scratch, &client, name, how).await;
                volume.up(&client).await;
                volumes.push(volume);
            }
            let ids: Vec<String> = volumes.iter().map(|volume| volume.id.clone()).collect();
            // The first cut is the one that would find something not prepared.
            for cut in ["first", "second"] {
                for volume in &volumes[..2] {
                    fs::write(volume.target.join("data"), cut).unwrap();
                }
                let group = client.group(cut, &ids, &[]).await.unwrap();
                // The worker of the first member runs in the thread of the coordinator.
                let expected = ["coordinator 0", "keeper 0", "worker 0", "worker 0"];
                assert_eq!(sections(&driver, 4), expected, "{}", server.log());
                assert_eq!(sections(&guard, 3), ["member 0"; 3], "{}", server.log());
                fs::remove_file(&driver).unwrap();
                fs::remove_file(&guard).unwrap();
                client.delete_all_of(&group).await;
            }
            for volume in volumes {
                volume.down(&client).await;
                client.delete(&volume.id).await.unwrap();
            }
        });
        end_pool(server);
    });
}

/// Programs that take all memory again and again, each until the kernel kills it.
struct Eater(Child);

impl Eater {
    fn start() -> Eater {
        let all = "echo 1000 >/proc/self/oom_score_adj; while :; do tail /dev/zero; done";
        let mut command = Command::new("sh");
        command.args(["-c", all]).process_group(0);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Eater(command.spawn().unwrap())
    }
}

impl Drop for Eater {
    fn drop(&mut self) {
        let _ = killpg(Pid::from_raw(self.0.id() as i32), Signal::SIGKILL);
        let _ = self.0.wait();
    }
}

/// Keeps pages of a volume dirty until it is stopped. Counts its writes.
fn dirty(volume: &Volume, stop: &AtomicBool, writes: &AtomicUsize) {
    let mut file = File::create(volume.target.join("dirty")).unwrap();
    let bytes = vec![7; 1 << 20];
    while !stop.load(Ordering::Relaxed) {
        file.write_all(&bytes).unwrap();
        if writes.fetch_add(1, Ordering::Relaxed) % 16 == 15 {
            file = File::create(volume.target.join("dirty")).unwrap();
        }
    }
}

const FREEZE_TIMEOUT: &str = "3s";
/// The longest time for which a writer waits: that timeout, and as long for a machine without memory.
const LONGEST: Duration = Duration::from_secs(6);

/// Watches for how long a mapped device is suspended at a time, and for how long it could not watch itself.
/// It starts no program and so needs little memory.
fn longest_suspension(stop: &AtomicBool) -> (Duration, Duration) {
    let flags = fs::read_dir("/sys/block").unwrap().filter_map(|block| {
        let flag = block.unwrap().path().join("dm/suspended");
        flag.exists().then_some(flag)
    });
    let flags: Vec<PathBuf> = flags.collect();
    let mut since = vec![None; flags.len()];
    let (mut longest, mut longest_gap, mut seen) = (Duration::ZERO, Duration::ZERO, Instant::now());
    while !stop.load(Ordering::Relaxed) {
        for (flag, since) in flags.iter().zip(&mut since) {
            let is_suspended = fs::read(flag).is_ok_and(|read| read.starts_with(b"1"));
            let begun = is_suspended.then(|| since.unwrap_or_else(Instant::now));
            longest = longest.max(begun.map_or(Duration::ZERO, |begun| begun.elapsed()));
            *since = begun;
        }
        longest_gap = longest_gap.max(seen.elapsed());
        seen = Instant::now();
        thread::sleep(Duration::from_millis(20));
    }
    (longest, longest_gap)
}

/// Makes cuts while memory is short: each one ends, and then the writers continue.
async fn cuts(server: &Server, ids: &[String], writes: &[AtomicUsize; 2]) {
    let client = server.client();
    for cut in 0..2 {
        let seen = writes.each_ref().map(|one| one.load(Ordering::Relaxed));
        // Another class each time, because a failed cut is not repeated for a minute.
        let extents = (1_000_000 + cut).to_string();
        let class = [
            ("retries", "0"),
            ("maxExtents", extents.as_str()),
            ("freezeTimeout", FREEZE_TIMEOUT),
        ];
        match client.group(&format!("cut-{cut}"), ids, &class).await {
            Ok(group) => client.delete_all_of(&group).await,
            Err(status) => {
                let is_lost = matches!(status.code(), Code::Internal | Code::Aborted);
                assert!(is_lost, "{status}");
                println!("cut {cut}: {status}");
            }
        }
        // A cut that was lost can be answered before the last device is resumed.
        eventually("nothing is suspended", || suspended().is_empty());
        for (seen, writes) in seen.into_iter().zip(writes) {
            let goes_on = || writes.load(Ordering::Relaxed) > seen;
            eventually("a writer continues", goes_on);
        }
    }
}

#[test]
fn a_cut_without_free_memory_ends_and_leaves_nothing_frozen() {
    let test = "guest_memory::a_cut_without_free_memory_ends_and_leaves_nothing_frozen";
    in_guest_with(&["--mem", "200M"], test, &DISKS, || {
        create_pool("640M");
        let scratch = Scratch::new();
        let server = Server::start(&scratch, &[POOL]);
        let runtime = runtime();
        let (client, volumes) = runtime.block_on(async {
            let client = server.client();
            let a = created(&scratch, &client, "a", mount("ext4")).await;
            let b = created(&scratch, &client, "b", mount("ext4")).await;
            a.up(&client).await;
            b.up(&client).await;
            (client, [a, b])
        });
        let ids = volumes.each_ref().map(|volume| volume.id.clone());
        let (stop, writes) = (AtomicBool::new(false), [const { AtomicUsize::new(0) }; 2]);
        let before = oom_kills();
        thread::scope(|scope| {
            for (volume, writes) in volumes.iter().zip(&writes) {
                let stop = &stop;
                scope.spawn(move || dirty(volume, stop, writes));
            }
            let watching = scope.spawn(|| longest_suspension(&stop));
            let eater = Eater::start();
            eventually("the memory is used up", || oom_kills() > before);
            runtime.block_on(cuts(&server, &ids, &writes));
            println!("{} programs killed for memory", oom_kills() - before);
            drop(eater);
            stop.store(true, Ordering::Relaxed);
            let (longest, gap) = watching.join().unwrap();
            println!("suspended for {longest:?} at most, watched every {gap:?} at least");
            // The guard does not run either while the machine lets this process wait.
            assert!(longest < LONGEST + 2 * gap, "{longest:?}, {gap:?}");
        });
        runtime.block_on(async {
            for volume in &volumes {
                volume.down(&client).await;
                volume.up(&client).await;
            }
            let group = client.group("after", &ids, &[]).await.unwrap();
            client.delete_all_of(&group).await;
            for volume in volumes {
                volume.down(&client).await;
                client.delete(&volume.id).await.unwrap();
            }
        });
        end_pool(server);
    });
}

/// How many programs the kernel has killed for their memory.
fn oom_kills() -> u64 {
    let counters = fs::read_to_string("/proc/vmstat").unwrap();
    let line = counters
        .lines()
        .find_map(|line| line.strip_prefix("oom_kill "));
    line.unwrap().parse().unwrap()
}
