//! Writers and the oracle of write order: a counter is written from volume to volume, and is never
//! synced. If all volumes are cut at one moment, no volume is ahead of the one before it, and none
//! is more than one behind.
//!
//! A volume is a folder, or a block device. A cut of a block device contains what has reached the
//! device, so the counter bypasses the page cache there.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

/// The number of concurrent writers. Each has files of its own.
pub const WRITERS: usize = 2;

/// Running writers. They end when this is dropped.
pub struct Writers {
    stop: Arc<AtomicBool>,
    /// Rounds that all writers have completed.
    pub rounds: Arc<AtomicU64>,
    threads: Vec<JoinHandle<()>>,
}

impl Writers {
    /// Starts writers that write to these volumes in this order.
    pub fn start(volumes: &[impl AsRef<Path>]) -> Writers {
        let stop = Arc::new(AtomicBool::new(false));
        let rounds = Arc::new(AtomicU64::new(0));
        let threads = (0..WRITERS).map(|writer| {
            let each = volumes
                .iter()
                .map(|volume| Counter::open(volume.as_ref(), writer));
            let mut counters: Vec<_> = each.collect();
            counters.iter_mut().for_each(|counter| counter.write(0));
            let (stop, rounds) = (stop.clone(), rounds.clone());
            std::thread::spawn(move || {
                let mut count = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    count += 1;
                    counters.iter_mut().for_each(|counter| counter.write(count));
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            })
        });
        Writers {
            threads: threads.collect(),
            stop,
            rounds,
        }
    }

    /// Verifies that the writers make progress: no volume is frozen.
    #[track_caller]
    pub fn assert_flowing(&self, context: &str) {
        let before = self.rounds.load(Ordering::Relaxed);
        super::eventually(&format!("{context}: the writers get on"), || {
            self.rounds.load(Ordering::Relaxed) > before + 10
        });
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

/// Bytes of a write to a block device.
const PAGE: usize = 4096;

#[repr(align(4096))]
struct Page([u8; PAGE]);

/// Where a writer writes in one volume.
struct Counter {
    file: File,
    /// `None` in a folder, where the counter has a file of its own.
    page: Option<(Box<Page>, u64)>,
}

fn is_device(volume: &Path) -> bool {
    fs::metadata(volume).unwrap().file_type().is_block_device()
}

impl Counter {
    fn open(volume: &Path, writer: usize) -> Counter {
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        match is_device(volume) {
            true => Counter {
                file: options
                    .custom_flags(nix::libc::O_DIRECT)
                    .open(volume)
                    .unwrap(),
                page: Some((Box::new(Page([0; PAGE])), (writer * PAGE) as u64)),
            },
            false => {
                options.create(true).truncate(false);
                let path = volume.join(format!("counter-{writer}"));
                Counter {
                    file: options.open(path).unwrap(),
                    page: None,
                }
            }
        }
    }

    fn write(&mut self, count: u64) {
        let bytes = count.to_le_bytes();
        let written = match &mut self.page {
            Some((page, at)) => {
                page.0[..bytes.len()].copy_from_slice(&bytes);
                self.file.write_all_at(&page.0, *at)
            }
            // Not synced: a cut includes what is in the page cache.
            None => self.file.write_all_at(&bytes, 0),
        };
        written.unwrap();
    }

    fn read(&mut self) -> u64 {
        let mut bytes = [0; 8];
        match &mut self.page {
            Some((page, at)) => {
                self.file.read_exact_at(&mut page.0, *at).unwrap();
                bytes.copy_from_slice(&page.0[..8]);
            }
            None => self.file.read_exact_at(&mut bytes, 0).unwrap(),
        }
        u64::from_le_bytes(bytes)
    }
}

/// The counter of each writer in a volume, or in a copy of it.
pub fn shown(volume: &Path) -> [u64; WRITERS] {
    std::array::from_fn(|writer| Counter::open(volume, writer).read())
}

/// Whether one writer's counters, in the order of the volumes, are consistent.
pub fn is_consistent(row: &[u64]) -> bool {
    let (first, last) = (row[0], row[row.len() - 1]);
    row.windows(2).all(|pair| pair[0] >= pair[1]) && first <= last + 1
}
