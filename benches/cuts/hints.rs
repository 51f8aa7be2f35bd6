//! Random writes after a snapshot, compared with those before it, on images with extent size hints:
//! xfs allocates this much at once where a shared block is written (`cowextsize`), or a block that
//! is not allocated yet (`extsize`).

use std::path::{Path, PathBuf};

use slackwater::host::Host;
use slackwater::host::linux::LinuxHost;

use super::measure::{Spread, fill, given};
use slackwater_testkit::{Disk, Scratch, run};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 256 * MIB;
/// Bytes; 0 is the file system's default (cowextsize: 128 KiB, extsize: none).
const HINTS: [u64; 6] = [0, 4096, 16384, 65536, 524_288, 2 * MIB];

fn plain(path: &Path) -> &str {
    path.to_str().expect("plain names")
}

/// A loop device with direct I/O, like the driver's. It is detached when this is dropped.
struct Bare(PathBuf);

impl Bare {
    fn new(image: &Path) -> Bare {
        let words = ["--find", "--show", "--direct-io=on", plain(image)];
        Bare(run("losetup", &words).trim().into())
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        run("losetup", &["--detach", plain(&self.0)]);
    }
}

/// Writes of 4 KiB per second, at random places.
fn random_writes(device: &Path) -> f64 {
    let milliseconds = given("MILLISECONDS", 1500);
    let job = [
        "--name=x".to_string(),
        format!("--filename={}", device.display()),
        "--ioengine=libaio".into(),
        "--direct=1".into(),
        "--rw=randwrite".into(),
        "--bs=4k".into(),
        "--iodepth=4".into(),
        format!("--size={SIZE}"),
        format!("--runtime={milliseconds}ms"),
        "--time_based".into(),
        "--randrepeat=0".into(),
        "--norandommap".into(),
        "--allow_file_create=0".into(),
        "--output-format=json".into(),
    ];
    let words: Vec<&str> = job.iter().map(String::as_str).collect();
    let said = run("fio", &words);
    let start = said.find('{').expect("fio speaks JSON");
    let result: serde_json::Value = serde_json::from_str(&said[start..]).expect("JSON");
    result["jobs"][0]["write"]["iops"]
        .as_f64()
        .expect("a number")
}

/// Creates an image with a hint, either written or sparse.
fn image(path: &Path, hint: &str, bytes: u64, written: bool) {
    let file = std::fs::File::create(path).expect("a file");
    if bytes > 0 {
        let command = format!("{hint} {bytes}");
        run("xfs_io", &["-c", &command, plain(path)]);
    }
    file.set_len(SIZE).expect("its length");
    if written {
        fill(path, SIZE);
    }
}

fn extents(path: &Path) -> f64 {
    let host = LinuxHost::new(Vec::new());
    host.extent_count(path).expect("FIEMAP") as f64
}

fn said(bytes: u64) -> String {
    match bytes {
        0 => "none".into(),
        bytes if bytes < MIB => format!("{} KiB", bytes >> 10),
        bytes => format!("{} MiB", bytes >> 20),
    }
}

#[derive(Default, Clone)]
struct Seen {
    before: Vec<f64>,
    after: Vec<f64>,
    again: Vec<f64>,
    pieces: Vec<f64>,
}

pub fn measure() {
    let rounds = given("ROUNDS", 5);
    let scratch = Scratch::new();
    let disk = Disk::new(&scratch, "disk", "xfs", 16 << 30);
    for (hint, shared) in [("cowextsize", true), ("extsize", false)] {
        let mut seen = vec![Seen::default(); HINTS.len()];
        for round in 0..rounds {
            for turn in 0..HINTS.len() {
                let at = (round + turn) % HINTS.len();
                one(&disk, hint, HINTS[at], shared, &mut seen[at]);
            }
        }
        tell(hint, shared, &seen);
    }
}

fn one(disk: &Disk, hint: &str, bytes: u64, shared: bool, seen: &mut Seen) {
    let path = disk.mount_point.join("image");
    let copy = disk.mount_point.join("copy");
    image(&path, hint, bytes, shared);
    let bare = Bare::new(&path);
    seen.before.push(random_writes(&bare.0));
    if shared {
        run("cp", &["--reflink=always", plain(&path), plain(&copy)]);
        run("sync", &[plain(&copy)]);
    }
    seen.after.push(random_writes(&bare.0));
    // By now most blocks are no longer shared.
    seen.again.push(random_writes(&bare.0));
    run("sync", &[plain(&path)]);
    seen.pieces.push(extents(&path));
    drop(bare);
    std::fs::remove_file(&path).expect("the file exists");
    if shared {
        std::fs::remove_file(&copy).expect("the file exists");
    }
}

fn tell(hint: &str, shared: bool, seen: &[Seen]) {
    let (first, second) = match shared {
        true => ("before a snapshot, /s", "after it / before it"),
        false => ("sparse, /s", "later / at first"),
    };
    println!("\n{hint}: 4 KiB random writes, depth 4, medians and quartiles\n");
    println!(
        "| {hint} | {first} | {second} | once more / at first | after it, / none | extents at the end |"
    );
    println!("|---|---|---|---|---|---|");
    let ratio =
        |these: &[f64], those: &[f64]| Spread::of(these.iter().zip(those).map(|(a, b)| a / b));
    for (bytes, one) in HINTS.iter().zip(seen) {
        println!(
            "| {} | {:.0} | {} | {} | {} | {:.0} |",
            said(*bytes),
            Spread::of(one.before.iter().copied()).middle,
            ratio(&one.after, &one.before),
            ratio(&one.again, &one.before),
            ratio(&one.after, &seen[0].after),
            Spread::of(one.pieces.iter().copied()).middle,
        );
    }
}
