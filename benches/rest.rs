//! The cost of the idle driver: memory of the real process, its threads, the time from its start to
//! its first answer, and the size of the program.

#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark is not the driver: it may start programs and write files"
)]

#[path = "measure/mod.rs"]
mod measure;

use std::path::Path;
use std::time::{Duration, Instant};

use measure::{Pairs, Spread, given};
use slackwater::cut::guard::{GuardClient, PROGRAM};
use slackwater::host::freezer::FreezeLimits;
use slackwater::host::linux::LinuxHost;
use slackwater::host::{Device, FileId, FreezeMember, Freezer, Host};
use slackwater::model::FsType;
use slackwater_testkit::disk::mounts_below;
use slackwater_testkit::{Client, Disk, Scratch, Server, mount};

const MIB: u64 = 1 << 20;
/// Idle threads of the driver end after 5 s.
const REST: Duration = Duration::from_secs(8);

/// A number of kB from a file of `/proc/PID`, in MiB.
fn proc_mib(pid: impl std::fmt::Display, file: &str, key: &str) -> f64 {
    let path = format!("/proc/{pid}/{file}");
    let text = std::fs::read_to_string(path).expect("the process runs");
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    let number = line.and_then(|line| line.split_whitespace().next());
    number.expect("the line").parse::<f64>().expect("a number") / 1024.0
}

fn print_memory(server: &Server, what: &str) {
    std::thread::sleep(REST);
    let threads = std::fs::read_dir(format!("/proc/{}/task", server.pid()))
        .expect("the process runs")
        .count();
    println!(
        "| {what} | {:.1} | {:.1} | {:.1} | {:.1} | {threads} |",
        proc_mib(server.pid(), "status", "VmRSS:"),
        proc_mib(server.pid(), "status", "RssAnon:"),
        proc_mib(server.pid(), "smaps_rollup", "Pss:"),
        proc_mib(server.pid(), "status", "VmHWM:"),
    );
}

/// The guard's process, found by the state directory among its arguments.
fn guard_of(state: &Path) -> u32 {
    let state = state.to_str().expect("a plain name");
    let is_guard = |pid: &u32| {
        let words = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut words = words.split('\0');
        let program = words.next().unwrap_or_default();
        program.ends_with(PROGRAM) && words.any(|word| word == state)
    };
    let entries = std::fs::read_dir("/proc").expect("/proc").flatten();
    let mut pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(is_guard).expect("a guard")
}

/// The guard's memory, all of which is locked: idle, and with sessions of one member each.
fn print_guard(scratch: &Scratch, disk: &Disk) {
    const SESSIONS: usize = 20;
    let state = scratch.dir("guard-state");
    let host = LinuxHost::new(Vec::new()).with_own_folder(GuardClient::private_folder(&state));
    let host = std::sync::Arc::new(host);
    let number = mounts_below(&disk.mount_point)[0].source_loop();
    let device = Device::of_loop(number.expect("a loop device"));
    let member = || FreezeMember {
        volume_id: "volume".into(),
        namespace: None,
        image: FileId {
            device: 0,
            inode: 0,
        },
        root: Some(
            host.open_mount_root(&disk.mount_point, &device, FsType::Xfs)
                .expect("a root"),
        ),
        mapped: None,
    };
    let guard = GuardClient::new(host.clone(), state.clone())
        .with_program(env!("CARGO_BIN_EXE_slackwater-guard").into());
    let limits = FreezeLimits {
        sync: Duration::from_secs(60),
        freeze: Duration::from_secs(60),
    };
    let begin = || guard.begin(vec![member()], limits).expect("a session");
    drop(begin());
    let pid = guard_of(&state);
    let tell = |what: &str| {
        println!(
            "| {what} | {:.1} | {:.1} |",
            proc_mib(pid, "status", "VmRSS:"),
            proc_mib(pid, "status", "RssAnon:"),
        );
    };
    println!("\nthe guard's memory in MiB, all of it locked\n");
    println!("| | resident | of it anonymous |");
    println!("|---|---|---|");
    tell("at rest, after one session");
    let sessions: Vec<_> = (0..SESSIONS).map(|_| begin()).collect();
    tell("with 20 sessions of one member");
    drop(sessions);
    tell("after them");
    guard.stop_guard();
}

/// Copies a volume of the driver, each copy with a UUID and a name of its own.
fn plant(pool: &Path, id: &str, from: usize, to: usize) {
    let (pool_id, volume) = id.split_once('.').expect("an id");
    let volumes = pool.join("volumes");
    let record =
        std::fs::read_to_string(volumes.join(volume).join("record.json")).expect("a record");
    for n in from..to {
        let seed = format!("volume\nmany-{n}");
        let pool_id = pool_id.parse().expect("a uuid");
        let uuid = uuid::Uuid::new_v5(&pool_id, seed.as_bytes()).to_string();
        let folder = volumes.join(&uuid);
        std::fs::create_dir(&folder).expect("a folder");
        let copy = record
            .replace(volume, &uuid)
            .replace("\"first\"", &format!("\"many-{n}\""));
        std::fs::write(folder.join("record.json"), copy).expect("a record");
        let image = std::fs::File::create(folder.join("data.img")).expect("an image");
        image.set_len(MIB).expect("its length");
    }
}

/// The time from the start of the process to "ready".
fn start(scratch: &Scratch, pool: &str, runtime: &tokio::runtime::Runtime) -> (Server, f64) {
    let started = Instant::now();
    let server = Server::spawn(scratch, &[pool], &[], &[]);
    runtime.block_on(async {
        while !Client::new(server.socket()).is_ready().await {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    (server, started.elapsed().as_secs_f64() * 1e3)
}

fn lives(server: &Server, scratch: &Scratch, runtime: &tokio::runtime::Runtime, count: usize) {
    let staging = scratch.dir("kubelet/life");
    runtime.block_on(async {
        let client = server.client();
        for n in 0..count {
            let name = format!("life-{n}");
            let id = client.create(&name, 64 * MIB, mount("ext4"), &[]).await;
            let id = id.expect("create");
            let staged = client.stage(&id, &staging, mount("ext4")).await;
            staged.expect("stage");
            client.unstage(&id, &staging).await.expect("unstage");
            client.delete(&id).await.expect("delete");
        }
    });
}

/// Milliseconds of a create on each, in turns.
fn creates(full: &Server, blank: &Server, runtime: &tokio::runtime::Runtime) -> Pairs {
    let mut pairs = Pairs::default();
    runtime.block_on(async {
        let clients = [full.client(), blank.client()];
        for n in 0..=given("CREATES", 30) {
            for (client, times) in clients.iter().zip([&mut pairs.ours, &mut pairs.hand]) {
                let name = format!("one-more-{n}");
                let started = Instant::now();
                let id = client.create(&name, MIB, mount("ext4"), &[]).await;
                let took = started.elapsed().as_secs_f64() * 1e3;
                client.delete(&id.expect("create")).await.expect("delete");
                if n > 0 {
                    times.push(took);
                }
            }
        }
    });
    pairs
}

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let scratch = Scratch::new();
    let disk = Disk::new(&scratch, "pool", "xfs", 20 << 30);
    let folder = disk.mount_point.clone();
    let pool = format!("default=file:{},init", folder.display());

    println!("\nmemory in MiB at rest\n");
    println!("| | resident | of it anonymous | proportional | peak | threads |");
    println!("|---|---|---|---|---|---|");
    let (server, _) = start(&scratch, &pool, &runtime);
    print_memory(&server, "just started, no volume");
    lives(&server, &scratch, &runtime, 100);
    print_memory(
        &server,
        "after 100 volumes were created, staged and deleted",
    );
    let first = runtime.block_on(async {
        let client = server.client();
        let created = client.create("first", MIB, mount("ext4"), &[]).await;
        created.expect("create")
    });
    drop(server);

    plant(&folder, &first, 1, 1_000);
    let (server, _) = start(&scratch, &pool, &runtime);
    print_memory(&server, "1,000 volumes, just started");
    lives(&server, &scratch, &runtime, 100);
    let listed = runtime.block_on(async { server.client().list().await.expect("a list") });
    assert_eq!(listed.len(), 1_000);
    print_memory(
        &server,
        "1,000 volumes, after 100 more were created, staged and deleted, and a list of all",
    );
    drop(server);

    plant(&folder, &first, 1_000, 10_000);
    let empty = Scratch::new();
    let other = Disk::new(&empty, "pool", "xfs", 20 << 30);
    let none = format!("default=file:{},init", other.mount_point.display());
    let mut starts = Pairs::default();
    for round in 0..=given("STARTS", 15) {
        let (full, ours) = start(&scratch, &pool, &runtime);
        drop(full);
        let (blank, hand) = start(&empty, &none, &runtime);
        drop(blank);
        if round > 0 {
            starts.add(ours, hand);
        }
    }
    let (server, _) = start(&scratch, &pool, &runtime);
    print_memory(&server, "10,000 volumes, just started");
    let (blank, _) = start(&empty, &none, &runtime);
    let creates = creates(&server, &blank, &runtime);
    drop((server, blank));
    println!(
        "\nstart to ready, ms: 10,000 volumes {}, none {}",
        Spread::of(starts.ours.iter().copied()),
        Spread::of(starts.hand.iter().copied())
    );

    println!(
        "create, ms: with 10,000 volumes {}, with none {}",
        Spread::of(creates.ours.iter().copied()),
        Spread::of(creates.hand.iter().copied())
    );

    print_guard(&scratch, &disk);
    for program in [
        slackwater_testkit::binary(),
        env!("CARGO_BIN_EXE_slackwater-guard"),
    ] {
        let size = std::fs::metadata(program).expect("the program").len();
        println!("\n{program} has {:.1} MiB", size as f64 / MIB as f64);
    }
    print!(
        "{}",
        slackwater_testkit::run("ldd", &[slackwater_testkit::binary()])
    );
}
