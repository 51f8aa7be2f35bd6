//! The effect of a concurrent un-share on a writer, of its own image or of the copy.

use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use slackwater::host::linux::LinuxHost;
use slackwater::host::{Effect, Host};

use crate::measure::{Spread, given};
use crate::{Blocks, WORKED, fill, image};
use slackwater_testkit::{Disk, run};

/// The concurrent un-share: none, or that of one of two images that share all blocks.
const UNSHARED: [&str; 3] = ["none", "the copy", "the live image"];

/// Writes per second into a live image, and their median time in ms, while the image or its copy is
/// un-shared repeatedly.
fn writes_beside(disk: &Disk, way: usize) -> (f64, f64) {
    let [live, copy] = ["live", "copy"].map(|name| disk.mount_point.join(name));
    let names = [&live, &copy].map(|path| path.to_str().expect("plain"));
    let host = LinuxHost::new(Vec::new());
    let mut times = Vec::new();
    let until = Duration::from_millis(given("MILLISECONDS", 1500) as u64);
    let mut spent = Duration::ZERO;
    while spent < until {
        run("cp", &["--reflink=always", names[0], names[1]]);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| write_until(&live, &done));
            let start = Instant::now();
            match way {
                0 => std::thread::sleep(until / 4),
                _ => {
                    let path = if way == 1 { &copy } else { &live };
                    let (offset, length) = (0, WORKED);
                    let unshare = Effect::Unshare {
                        path,
                        offset,
                        length,
                    };
                    host.perform(&unshare).expect("un-shared");
                }
            }
            spent += start.elapsed();
            done.store(true, Ordering::SeqCst);
            times.extend(writer.join().expect("writes"));
        });
    }
    (
        times.len() as f64 / spent.as_secs_f64(),
        Spread::of(times).middle,
    )
}

/// Milliseconds of each write of 4 KiB without the page cache, at places all over the image.
fn write_until(path: &Path, done: &AtomicBool) -> Vec<f64> {
    let file = std::fs::OpenOptions::new()
        .write(true)
        .custom_flags(nix::libc::O_DIRECT)
        .open(path)
        .expect("the image");
    let pages = vec![7_u8; 8192];
    let aligned = pages.as_ptr().align_offset(4096);
    let page = &pages[aligned..aligned + 4096];
    let (mut times, mut place) = (Vec::new(), 1_u64);
    while !done.load(Ordering::SeqCst) {
        place = place
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let at = (place >> 33) % (WORKED / 4096) * 4096;
        let start = Instant::now();
        file.write_all_at(page, at).expect("a write");
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    times
}

/// The effect of a snapshot on the writer of a thick volume: un-sharing the copy, as the driver
/// does, compared with un-sharing the volume.
pub fn measure(disk: &Disk) {
    let live = disk.mount_point.join("live");
    image(&live, Blocks::Unwritten);
    fill(&live, WORKED);
    let mut rates = [const { Vec::new() }; 3];
    let mut medians = [const { Vec::new() }; 3];
    for round in 0..given("ROUNDS", 6) {
        for turn in 0..UNSHARED.len() {
            let at = (round + turn) % UNSHARED.len();
            let (rate, median) = writes_beside(disk, at);
            rates[at].push(rate);
            medians[at].push(median);
        }
    }
    println!("\na writer of 4 KiB beside an un-share of, ratios of the same round");
    println!("\n| | writes/s | / none | median ms |");
    println!("|---|---|---|---|");
    for (at, name) in UNSHARED.into_iter().enumerate() {
        let ratio = Spread::of(rates[at].iter().zip(&rates[0]).map(|(a, b)| a / b));
        let [rate, median] = [&rates[at], &medians[at]].map(|all| Spread::of(all.iter().copied()));
        println!("| {name} | {:.0} | {ratio} | {median} |", rate.middle);
    }
}
