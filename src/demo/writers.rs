//! Writers that write across several volumes without syncing, a check of what a cut contains of
//! their writes, and the hook that blocks one of them.
//!
//! Each writer counts, and writes its count to one volume after the other. If the volumes are cut
//! at one point in time, no volume is ahead of the one before it. The first writer pauses between
//! two counts when asked to, as an application does: in a cut all its counts are equal.

use std::fs::{File, OpenOptions};
use std::io::{Read, Result, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The first obeys the hook, the second does not.
const WRITERS: usize = 2;
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Running writers; dropping this stops them.
pub(super) struct Writers {
    stop: Arc<AtomicBool>,
    /// Longest time between two acknowledged writes of the writer that ignores the hook, in
    /// nanoseconds.
    stall: Arc<AtomicU64>,
    counts: Arc<AtomicU64>,
    threads: Vec<JoinHandle<()>>,
}

impl Writers {
    /// Starts writers on the root directories of the volumes; `folder` is the directory for
    /// requests of the hook.
    pub(super) fn start(roots: &[PathBuf], folder: &Path) -> Result<Writers> {
        let mut tide = Writers {
            stop: Arc::default(),
            stall: Arc::default(),
            counts: Arc::default(),
            threads: Vec::new(),
        };
        for writer in 0..WRITERS {
            let files: Vec<File> = roots
                .iter()
                .map(|root| {
                    let mut options = OpenOptions::new();
                    let file = options.write(true).create(true).truncate(true);
                    let file = file.open(root.join(name(writer)))?;
                    file.write_all_at(&0u64.to_le_bytes(), 0)?;
                    Ok(file)
                })
                .collect::<Result<_>>()?;
            let (stop, stall, counts) =
                (tide.stop.clone(), tide.stall.clone(), tide.counts.clone());
            let asks = (writer == 0).then(|| Requests::new(folder));
            tide.threads.push(thread::spawn(move || {
                write(&files, &stop, &stall, &counts, asks.as_ref());
            }));
        }
        Ok(tide)
    }

    /// The counts so far.
    pub(super) fn counts(&self) -> u64 {
        self.counts.load(Ordering::Relaxed)
    }

    /// Starts a new measurement of the longest stall.
    pub(super) fn forget_stall(&self) {
        self.stall.store(0, Ordering::Relaxed);
    }

    /// The longest time between two acknowledged writes since then.
    pub(super) fn stall(&self) -> Duration {
        Duration::from_nanos(self.stall.load(Ordering::Relaxed))
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

fn name(writer: usize) -> String {
    format!("counter-{writer}")
}

/// Counts until it is stopped, or a write fails, which the comparison reports.
fn write(
    files: &[File],
    stop: &AtomicBool,
    stall: &AtomicU64,
    counts: &AtomicU64,
    requests: Option<&Requests>,
) {
    let mut count = 0u64;
    let mut last = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        if let Some(requests) = requests {
            requests.wait_while_quiesced(stop);
        }
        count += 1;
        for file in files {
            if file.write_all_at(&count.to_le_bytes(), 0).is_err() {
                return;
            }
            let now = Instant::now();
            if requests.is_none() {
                let gap = u64::try_from((now - last).as_nanos()).unwrap_or(u64::MAX);
                stall.fetch_max(gap, Ordering::Relaxed);
            }
            last = now;
        }
        counts.fetch_add(1, Ordering::Relaxed);
    }
}

/// The communication between writer and hook: files in a directory.
struct Requests {
    still: PathBuf,
    quiesce: PathBuf,
}

impl Requests {
    fn new(folder: &Path) -> Requests {
        Requests {
            still: folder.join("still"),
            quiesce: folder.join("quiesce"),
        }
    }

    fn wait_while_quiesced(&self, stop: &AtomicBool) {
        if !self.quiesce.exists() {
            return;
        }
        let _ = File::create(&self.still);
        while self.quiesce.exists() && !stop.load(Ordering::Relaxed) {
            thread::sleep(POLL_INTERVAL);
        }
        let _ = std::fs::remove_file(&self.still);
    }
}

/// Checks the restored volumes, in order; the error is a sentence.
pub(super) fn judge(roots: &[PathBuf]) -> std::result::Result<String, String> {
    let mut results = Vec::new();
    for writer in 0..WRITERS {
        let mut counts = Vec::new();
        for root in roots {
            let bytes =
                std::fs::read(root.join(name(writer))).map_err(|error| error.to_string())?;
            let bytes = bytes.try_into().map_err(|_| "a counter is truncated")?;
            counts.push(u64::from_le_bytes(bytes));
        }
        let ordered = counts.windows(2).all(|pair| pair[0] >= pair[1]);
        let spread = counts
            .first()
            .zip(counts.last())
            .map_or(0, |(a, b)| a - (*b).min(*a));
        let most = if writer == 0 { 0 } else { 1 };
        if !ordered || spread > most {
            return Err(format!("the counts {counts:?} are out of order"));
        }
        results.push(format!("{counts:?}"));
    }
    Ok(results.join(" and "))
}

/// The hook program: asks the first writer to pause, prints READY, and lets it continue when its
/// stdin ends, or after its timeout.
pub(super) fn hook(folder: &Path, deadline: Duration) -> Result<()> {
    let requests = Requests::new(folder);
    let begun = Instant::now();
    File::create(&requests.quiesce)?;
    while !requests.still.exists() && begun.elapsed() < deadline {
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
