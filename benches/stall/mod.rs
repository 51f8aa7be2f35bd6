//! The effect of a cut on concurrent writers: the longest time between two acknowledged writes, at
//! the cut and at any other moment of the call.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::libc::O_DIRECT;

use super::measure::now;

const BLOCK: usize = 4096;
/// Shorter gaps mean nothing: a writer waits this long for a core.
const LEAST: u64 = 1_000_000;
/// The size of a writer's file, which never grows, so that no write allocates another block.
pub const WRITTEN: u64 = 32 << 20;
/// Time for the last writes to be acknowledged after a cut.
const AFTER: Duration = Duration::from_millis(30);

/// The load on a volume.
#[derive(Clone, Copy, PartialEq)]
pub enum Load {
    /// A block into the page cache every millisecond: enough to notice a freeze, and almost no
    /// load.
    Idle,
    /// Random blocks with direct I/O, one after the other.
    Busy,
}

/// Milliseconds between two acknowledged writes, of the writer that waited longest.
#[derive(Clone, Copy, Default)]
pub struct Stall {
    /// The gap in which the cut was.
    pub cut: f64,
    /// The longest of all other gaps.
    pub other: f64,
}

/// A time without a write: from, until.
type Gap = (u64, u64);

/// A writer for each volume. They end when this is dropped.
pub struct Writers {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Vec<Gap>>>,
    started_at: u64,
}

/// Opens the file of a volume's writer, and creates it with all its blocks if it does not exist.
fn file(volume: &Path, load: Load) -> File {
    let path: PathBuf = volume.join("written");
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let file = options.open(&path).expect("a file");
    if file.metadata().expect("stat").len() < WRITTEN {
        let bytes = vec![1; 1 << 20];
        for at in (0..WRITTEN).step_by(bytes.len()) {
            file.write_all_at(&bytes, at).expect("room");
        }
        file.sync_all().expect("fsync");
    }
    match load {
        Load::Idle => file,
        Load::Busy => options.custom_flags(O_DIRECT).open(&path).expect("a file"),
    }
}

/// Creates a volume's file, so that the first writer finds it.
pub fn make_file(volume: &Path) {
    drop(file(volume, Load::Idle));
}

impl Writers {
    pub fn start(volumes: &[&Path], load: Load) -> Writers {
        let stop = Arc::new(AtomicBool::new(false));
        let threads = volumes.iter().enumerate().map(|(n, volume)| {
            let (file, stop) = (file(volume, load), stop.clone());
            std::thread::spawn(move || write(&file, load, n as u64, &stop))
        });
        let threads = threads.collect();
        // The delays that starting writers cause each other are not stalls.
        std::thread::sleep(Duration::from_millis(200));
        Writers {
            stop,
            threads,
            started_at: now(),
        }
    }

    /// Ends them after a cut at this moment.
    pub fn stall(mut self, cut_at: u64) -> Stall {
        std::thread::sleep(AFTER);
        self.stop.store(true, Ordering::Relaxed);
        let mut stall = Stall::default();
        for thread in self.threads.drain(..) {
            for (from, until) in thread.join().expect("no write fails") {
                if until < self.started_at {
                    continue;
                }
                let took = (until - from) as f64 / 1e6;
                let at = match (from..=until).contains(&cut_at) {
                    true => &mut stall.cut,
                    false => &mut stall.other,
                };
                *at = at.max(took);
            }
        }
        stall
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn write(file: &File, load: Load, seed: u64, stop: &AtomicBool) -> Vec<Gap> {
    // Direct I/O needs aligned memory.
    let room = vec![7; 2 * BLOCK];
    let start = room.as_ptr().align_offset(BLOCK);
    let block = &room[start..start + BLOCK];
    let (mut gaps, mut last) = (Vec::new(), now());
    let mut random = 0x9e37_79b9_7f4a_7c15 ^ (seed << 17) ^ last;
    while !stop.load(Ordering::Relaxed) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let at = match load {
            Load::Idle => 0,
            Load::Busy => random % (WRITTEN / BLOCK as u64) * BLOCK as u64,
        };
        file.write_all_at(block, at).expect("a write");
        let acknowledged = now();
        if acknowledged.saturating_sub(last) >= LEAST {
            gaps.push((last, acknowledged));
        }
        last = acknowledged;
        if load == Load::Idle {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    gaps
}
