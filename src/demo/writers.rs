//! Writers that write across several volumes without syncing, a check of what a cut contains of
//! their writes, and the hook that blocks one of them.
//!
//! Each writer counts, and writes its count to one volume after the other. If the volumes are cut
//! at one point in time, no volume is ahead of the one before it, and none is more than one behind.
//! The first writer pauses between two counts when a hook requests it, as an application does: in
//! such a cut all its counts are equal.
//!
//! A volume is a directory, or a block device. A cut of a block device contains what has reached the
//! device, so the counter bypasses the page cache there.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;

/// The number of concurrent writers. The first obeys the hook, the second does not.
pub const WRITERS: usize = 2;
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Running writers; dropping this stops them.
#[derive(Debug)]
pub struct Writers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    /// Longest time between two acknowledged writes of a writer that obeys no hook, in nanoseconds.
    stall: AtomicU64,
    counts: AtomicU64,
    /// The first write that failed. Its writer has ended.
    failure: OnceLock<Error>,
}

impl Writers {
    /// Starts writers that write to these volumes in this order; the hook puts its requests into
    /// `hook_dir`, if there is one.
    pub fn start(volumes: &[impl AsRef<Path>], hook_dir: Option<&Path>) -> Result<Writers> {
        let mut writers = Writers {
            shared: Arc::default(),
            threads: Vec::new(),
        };
        for writer in 0..WRITERS {
            let create = OpenOptions::new().write(true).create(true).clone();
            let counters = volumes
                .iter()
                .map(|volume| Counter::open(volume.as_ref(), writer, create.clone()));
            let mut counters: Vec<_> = counters.collect::<Result<_>>()?;
            for counter in &mut counters {
                counter.write(0)?;
            }
            let requests = hook_dir.filter(|_| writer == 0).map(Requests::new);
            let shared = writers.shared.clone();
            writers.threads.push(thread::spawn(move || {
                write(&mut counters, &shared, requests.as_ref());
            }));
        }
        Ok(writers)
    }

    /// The counts that all writers have written to all volumes.
    pub fn counts(&self) -> u64 {
        self.shared.counts.load(Ordering::Relaxed)
    }

    /// Why a writer has ended by itself, if one has.
    pub fn failure(&self) -> Option<&Error> {
        self.shared.failure.get()
    }

    /// Starts a new measurement of the longest stall.
    pub(super) fn reset_stall(&self) {
        self.shared.stall.store(0, Ordering::Relaxed);
    }

    /// The longest time between two acknowledged writes since then.
    pub(super) fn stall(&self) -> Duration {
        Duration::from_nanos(self.shared.stall.load(Ordering::Relaxed))
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Counts until it is stopped, or a write fails.
fn write(counters: &mut [Counter], shared: &Shared, requests: Option<&Requests>) {
    let mut count = 0u64;
    let mut last = Instant::now();
    while !shared.stop.load(Ordering::Relaxed) {
        if let Some(requests) = requests {
            requests.wait_while_quiesced(&shared.stop);
        }
        count += 1;
        for counter in &mut *counters {
            if let Err(error) = counter.write(count) {
                let _ = shared.failure.set(error);
                return;
            }
            let now = Instant::now();
            if requests.is_none() {
                let gap = u64::try_from((now - last).as_nanos()).unwrap_or(u64::MAX);
                shared.stall.fetch_max(gap, Ordering::Relaxed);
            }
            last = now;
        }
        shared.counts.fetch_add(1, Ordering::Relaxed);
    }
}

/// Bytes of a write to a block device.
const PAGE: usize = 4096;

#[repr(align(4096))]
struct Page([u8; PAGE]);

/// Where a writer writes in one volume.
struct Counter {
    file: File,
    /// `None` in a directory, where the counter has a file of its own.
    page: Option<(Box<Page>, u64)>,
}

impl Counter {
    fn open(volume: &Path, writer: usize, mut options: OpenOptions) -> Result<Counter> {
        if !volume.metadata()?.file_type().is_block_device() {
            let file = options.open(volume.join(format!("counter-{writer}")))?;
            return Ok(Counter { file, page: None });
        }
        let direct = options.create(false).custom_flags(OFlag::O_DIRECT.bits());
        Ok(Counter {
            file: direct.open(volume)?,
            page: Some((Box::new(Page([0; PAGE])), (writer * PAGE) as u64)),
        })
    }

    fn write(&mut self, count: u64) -> Result<()> {
        let bytes = count.to_le_bytes();
        match &mut self.page {
            Some((page, at)) => {
                page.0[..bytes.len()].copy_from_slice(&bytes);
                self.file.write_all_at(&page.0, *at)
            }
            // Not synced: a cut includes what is in the page cache.
            None => self.file.write_all_at(&bytes, 0),
        }
    }

    fn read(&mut self) -> Result<u64> {
        let mut bytes = [0; size_of::<u64>()];
        match &mut self.page {
            Some((page, at)) => {
                self.file.read_exact_at(&mut page.0, *at)?;
                bytes.copy_from_slice(&page.0[..size_of::<u64>()]);
            }
            None => {
                let length = self.file.metadata()?.len();
                if length != bytes.len() as u64 {
                    let what = format!("a counter has {length} bytes");
                    return Err(Error::new(ErrorKind::InvalidData, what));
                }
                self.file.read_exact_at(&mut bytes, 0)?;
            }
        }
        Ok(u64::from_le_bytes(bytes))
    }
}

/// The count of each writer in a volume, or in a copy of it.
pub fn counts_in(volume: &Path) -> Result<[u64; WRITERS]> {
    let mut counts = [0; WRITERS];
    for (writer, count) in counts.iter_mut().enumerate() {
        let options = OpenOptions::new().read(true).clone();
        *count = Counter::open(volume, writer, options)?.read()?;
    }
    Ok(counts)
}

/// Whether the counts of one writer, in the order of the volumes, are those of one point in time.
pub fn is_consistent(counts: &[u64]) -> bool {
    let is_ordered = counts.is_sorted_by(|before, after| before >= after);
    !counts.is_empty() && is_ordered && spread(counts) <= 1
}

fn spread(counts: &[u64]) -> u64 {
    let ends = counts.first().zip(counts.last());
    ends.map_or(0, |(first, last)| first.abs_diff(*last))
}

/// Checks the restored volumes, in order; the error is a sentence.
pub(super) fn check(volumes: &[PathBuf]) -> std::result::Result<String, String> {
    let all = volumes.iter().map(|volume| counts_in(volume));
    let all: Vec<_> = all
        .collect::<Result<_>>()
        .map_err(|error| format!("the counts cannot be read: {error}"))?;
    let mut results = Vec::new();
    for writer in 0..WRITERS {
        let counts: Vec<u64> = all.iter().map(|counts| counts[writer]).collect();
        let was_paused = writer == 0;
        if !is_consistent(&counts) || (was_paused && spread(&counts) > 0) {
            return Err(format!("the counts {counts:?} are out of order"));
        }
        results.push(format!("{counts:?}"));
    }
    Ok(results.join(" and "))
}

/// The communication between writer and hook: files in a directory.
struct Requests {
    paused: PathBuf,
    quiesce: PathBuf,
}

impl Requests {
    fn new(dir: &Path) -> Requests {
        Requests {
            paused: dir.join("paused"),
            quiesce: dir.join("quiesce"),
        }
    }

    fn wait_while_quiesced(&self, stop: &AtomicBool) {
        if !self.quiesce.exists() {
            return;
        }
        let _ = File::create(&self.paused);
        while self.quiesce.exists() && !stop.load(Ordering::Relaxed) {
            thread::sleep(POLL_INTERVAL);
        }
        let _ = std::fs::remove_file(&self.paused);
    }
}

/// The hook program: asks the first writer to pause, prints READY, and lets it continue when its
/// stdin ends, or after its timeout.
pub(super) fn hook(folder: &Path, deadline: Duration) -> Result<()> {
    let requests = Requests::new(folder);
    let begun = Instant::now();
    File::create(&requests.quiesce)?;
    while !requests.paused.exists() && begun.elapsed() < deadline {
        thread::sleep(POLL_INTERVAL);
    }
    let release = requests.quiesce.clone();
    thread::spawn(move || {
        thread::sleep(deadline);
        let _ = std::fs::remove_file(&release);
        std::process::exit(1);
    });
    println!("READY");
    std::io::stdout().flush()?;
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    std::fs::remove_file(&requests.quiesce)
}
