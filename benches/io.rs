//! I/O in volumes, compared with the raw image file and a bare loop device, with fio, in turns; the
//! effect of each setting of a loop device; and the effect of a concurrent un-share on a writer.
//!
//! `ROUNDS=2 MILLISECONDS=500 cargo bench --bench io` is a shorter run; `PART=volumes`, `settings`,
//! `allocation` or `unshare` runs a part of it.

#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark is not the driver: it may start programs and write files"
)]

#[path = "measure/mod.rs"]
mod measure;
#[path = "io/unshare.rs"]
mod unshare;

use std::path::{Path, PathBuf};

use measure::{Spread, fill, given};
use slackwater_testkit::{Client, Disk, Scratch, Server, block, mount, run};

const MIB: u64 = 1 << 20;
/// The size of the part of a volume that fio uses.
const WORKED: u64 = 512 * MIB;
const VOLUME: u64 = 640 * MIB;

/// The kinds of load: the name, and the arguments of fio.
const WORK: [Work; 6] = [
    ("4k random read, depth 1", "randread", "4k", 1),
    ("4k random write, depth 1", "randwrite", "4k", 1),
    ("4k random read, depth 16", "randread", "4k", 16),
    ("4k random write, depth 16", "randwrite", "4k", 16),
    ("1 MiB sequential read, depth 4", "read", "1M", 4),
    ("1 MiB sequential write, depth 4", "write", "1M", 4),
];

/// An element of [`WORK`].
type Work = (&'static str, &'static str, &'static str, u32);
/// A bare loop device: its name, direct I/O, its block size, and the settings of its queue.
type Variant = (
    &'static str,
    bool,
    u32,
    &'static [(&'static str, &'static str)],
);

/// Operations per second of fio on a file or device.
fn fio(path: &Path, (_, rw, size, depth): Work) -> f64 {
    let milliseconds = given("MILLISECONDS", 1500);
    let job = [
        "--name=x".to_string(),
        format!("--filename={}", path.display()),
        "--ioengine=libaio".into(),
        "--direct=1".into(),
        format!("--rw={rw}"),
        format!("--bs={size}"),
        format!("--iodepth={depth}"),
        format!("--size={WORKED}"),
        format!("--runtime={milliseconds}ms"),
        "--ramp_time=200ms".into(),
        "--time_based".into(),
        "--randrepeat=0".into(),
        "--norandommap".into(),
        "--allow_file_create=0".into(),
        "--output-format=json".into(),
    ];
    let words: Vec<&str> = job.iter().map(String::as_str).collect();
    let output = run("fio", &words);
    let start = output.find('{').expect("fio speaks JSON");
    let result: serde_json::Value = serde_json::from_str(&output[start..]).expect("JSON");
    let way = if rw.contains("read") { "read" } else { "write" };
    result["jobs"][0][way]["iops"].as_f64().expect("a number")
}

/// The allocation of an image's blocks before the measurement.
#[derive(Clone, Copy, PartialEq)]
enum Blocks {
    Written,
    Unwritten,
    Sparse,
}

/// Creates a new file on the pool's file system.
fn image(path: &Path, blocks: Blocks) {
    let _ = std::fs::remove_file(path);
    std::fs::File::create(path)
        .and_then(|file| file.set_len(VOLUME))
        .expect("a file");
    if blocks != Blocks::Sparse {
        let size = VOLUME.to_string();
        run(
            "fallocate",
            &["--length", &size, path.to_str().expect("plain")],
        );
    }
    if blocks == Blocks::Written {
        fill(path, WORKED);
    }
}

/// A bare loop device. When this is dropped, it is detached and its queue settings are restored:
/// the next device with this number would inherit them.
struct Bare {
    device: PathBuf,
    before: Vec<(PathBuf, String)>,
}

impl Bare {
    fn new(image: &Path, direct: bool, sector: u32) -> Bare {
        let (direct, sector) = (if direct { "on" } else { "off" }, sector.to_string());
        let direct = format!("--direct-io={direct}");
        let image = image.to_str().expect("plain");
        let words = ["--find", "--show", &direct, "--sector-size", &sector, image];
        let device = run("losetup", &words).trim().into();
        let before = Vec::new();
        Bare { device, before }
    }

    /// Sets a file of the queue.
    fn queue(&mut self, file: &str, value: &str) {
        let name = self.device.file_name().expect("a name");
        let path = Path::new("/sys/block").join(name).join("queue").join(file);
        let found = std::fs::read_to_string(&path).expect("a setting");
        // Of several words, the one in brackets is active: "[none] mq-deadline".
        let holds = found.split(['[', ']']).nth(1).unwrap_or(found.trim());
        self.before.push((path.clone(), holds.to_string()));
        std::fs::write(&path, value).expect("the setting can be written");
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        for (path, value) in self.before.iter().rev() {
            let _ = std::fs::write(path, value);
        }
        let device = self.device.to_str().expect("plain");
        run("losetup", &["--detach", device]);
    }
}

/// Measures places in turns: for each load and place, the operations per second of each round.
fn measure(work: &[Work], places: &[(&str, &Path)]) {
    let rounds = given("ROUNDS", 6);
    println!(
        "\n| | {} |",
        places
            .iter()
            .map(|place| place.0)
            .collect::<Vec<_>>()
            .join(" | ")
    );
    println!("|---|{}", "---|".repeat(places.len()));
    for job in work {
        let mut rates = vec![Vec::new(); places.len()];
        for round in 0..rounds {
            for turn in 0..places.len() {
                let at = (round + turn) % places.len();
                rates[at].push(fio(places[at].1, *job));
            }
        }
        let mut cells = Vec::new();
        for rate in &rates {
            let ratio = Spread::of(rate.iter().zip(&rates[0]).map(|(rate, first)| rate / first));
            let middle = Spread::of(rate.iter().copied()).middle;
            cells.push(match cells.is_empty() {
                true => format!("{middle:.0}/s"),
                false => format!("{ratio}"),
            });
        }
        println!("| {} | {} |", job.0, cells.join(" | "));
    }
}

/// The driver's volumes, compared with the file and the best bare loop device.
fn volumes(scratch: &Scratch, disk: &Disk, client: &Client, runtime: &tokio::runtime::Runtime) {
    let raw = disk.mount_point.join("raw");
    image(&raw, Blocks::Written);
    let beneath = disk.mount_point.join("beneath");
    image(&beneath, Blocks::Written);
    let bare = Bare::new(&beneath, true, 512);
    let device = scratch.join("kubelet/block");
    runtime.block_on(async {
        let staging = scratch.dir("kubelet/block.staging");
        let id = client.create("block", VOLUME, block(), &[]).await;
        let id = id.expect("create");
        client.stage(&id, &staging, block()).await.expect("stage");
        let shown = client.publish(&id, &staging, &device, block(), false).await;
        shown.expect("publish");
    });
    fill(&device, WORKED);
    let mut files = Vec::new();
    for fs in ["ext4", "xfs"] {
        let staging = scratch.dir(&format!("kubelet/{fs}.staging"));
        runtime.block_on(async {
            let id = client.create(fs, 2 * VOLUME, mount(fs), &[]).await;
            let id = id.expect("create");
            let staged = client.stage(&id, &staging, mount(fs)).await;
            staged.expect("stage");
        });
        let file = staging.join("file");
        image(&file, Blocks::Written);
        files.push(file);
    }
    println!(
        "\nall blocks written before; the file's operations a second, then of pairs the ratio to it"
    );
    let places: [(&str, &Path); 5] = [
        ("the file itself", &raw),
        ("bare loop device", &bare.device),
        ("block volume", &device),
        ("file in an ext4 volume", &files[0]),
        ("file in an xfs volume", &files[1]),
    ];
    measure(&WORK, &places);
}

/// A bare loop device with each setting, compared with direct I/O and 512-byte blocks.
fn settings(disk: &Disk) {
    let variants: [Variant; 6] = [
        ("direct, 512", true, 512, &[]),
        ("direct, 4096", true, 4096, &[]),
        ("buffered, 512", false, 512, &[]),
        (
            "direct, mq-deadline",
            true,
            512,
            &[("scheduler", "mq-deadline")],
        ),
        ("direct, 32 requests", true, 512, &[("nr_requests", "32")]),
        ("direct, no merges", true, 512, &[("nomerges", "2")]),
    ];
    let mut devices = Vec::new();
    for (n, (name, direct, sector, queue)) in variants.into_iter().enumerate() {
        let file = disk.mount_point.join(format!("variant-{n}"));
        image(&file, Blocks::Written);
        let mut device = Bare::new(&file, direct, sector);
        for (file, value) in queue {
            device.queue(file, value);
        }
        devices.push((name, device));
    }
    println!("\nsettings of a bare loop device, all blocks written; ratios to the first");
    let places: Vec<(&str, &Path)> = devices
        .iter()
        .map(|(name, bare)| (*name, bare.device.as_path()))
        .collect();
    measure(&WORK, &places);
}

/// The cost of blocks that are not allocated yet: each round on a new image, on a direct loop
/// device.
fn allocation(disk: &Disk) {
    let kinds = [
        ("written", Blocks::Written),
        ("reserved, unwritten", Blocks::Unwritten),
        ("sparse", Blocks::Sparse),
    ];
    println!("\nwrites into an image whose blocks are, ratios to the first");
    println!("\n| | {} |", kinds.map(|kind| kind.0).join(" | "));
    println!("|---|{}", "---|".repeat(kinds.len()));
    for job in WORK.into_iter().filter(|job| job.1.contains("write")) {
        let mut rates = [const { Vec::new() }; 3];
        for round in 0..given("ROUNDS", 6) {
            for turn in 0..kinds.len() {
                let at = (round + turn) % kinds.len();
                let file = disk.mount_point.join("allocation");
                image(&file, kinds[at].1);
                let bare = Bare::new(&file, true, 512);
                rates[at].push(fio(&bare.device, job));
            }
        }
        let ratio = |at: usize| Spread::of(rates[at].iter().zip(&rates[0]).map(|(a, b)| a / b));
        let middle = Spread::of(rates[0].iter().copied()).middle;
        println!(
            "| {} | {middle:.0}/s | {} | {} |",
            job.0,
            ratio(1),
            ratio(2)
        );
    }
}

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let scratch = Scratch::new();
    let disk = Disk::new(&scratch, "disk", "xfs", 16 << 30);
    let part = std::env::var("PART").unwrap_or_default();
    let wanted = |name: &str| part.is_empty() || part == name;
    if wanted("volumes") {
        let pool = disk.mount_point.join("pool");
        std::fs::create_dir(&pool).expect("a folder");
        let pool = format!("default=file:{},init,mount=any", pool.display());
        let server = Server::start(&scratch, &[&pool]);
        // A client must be created within a runtime.
        let client = runtime.block_on(async { server.client() });
        volumes(&scratch, &disk, &client, &runtime);
    }
    if wanted("settings") {
        settings(&disk);
    }
    if wanted("allocation") {
        allocation(&disk);
    }
    if wanted("unshare") {
        unshare::measure(&disk);
    }
}
