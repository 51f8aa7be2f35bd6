//! Writers and the oracle of write order: a counter is written from folder to folder, and is never
//! synced. If all folders are cut at one moment, no folder is ahead of the one before it, and none
//! is more than one behind.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
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
    /// Starts writers that write to these folders in this order.
    pub fn start(folders: &[impl AsRef<Path>]) -> Writers {
        let stop = Arc::new(AtomicBool::new(false));
        let rounds = Arc::new(AtomicU64::new(0));
        let threads = (0..WRITERS).map(|writer| {
            let files: Vec<_> = folders
                .iter()
                .map(|folder| {
                    let path = folder.as_ref().join(format!("counter-{writer}"));
                    let mut options = OpenOptions::new();
                    options.write(true).create(true).truncate(false);
                    let file = options.open(path).unwrap();
                    file.write_all_at(&0u64.to_le_bytes(), 0).unwrap();
                    file
                })
                .collect();
            let (stop, rounds) = (stop.clone(), rounds.clone());
            std::thread::spawn(move || {
                let mut count = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    count += 1;
                    for file in &files {
                        // Not synced: a cut includes what is in the page cache.
                        file.write_all_at(&count.to_le_bytes(), 0).unwrap();
                    }
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

    /// Verifies that the writers make progress: no folder is frozen.
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

/// The counter of each writer in a folder, or in a copy of it.
pub fn shown(folder: &Path) -> [u64; WRITERS] {
    std::array::from_fn(|writer| {
        let bytes = std::fs::read(folder.join(format!("counter-{writer}"))).unwrap();
        u64::from_le_bytes(bytes.try_into().unwrap())
    })
}

/// Whether one writer's counters, in the order of the folders, are consistent.
pub fn is_consistent(row: &[u64]) -> bool {
    let (first, last) = (row[0], row[row.len() - 1]);
    row.windows(2).all(|pair| pair[0] >= pair[1]) && first <= last + 1
}
