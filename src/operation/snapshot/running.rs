//! The copies that run on this node, for reports and so that they can be ended. In memory only: a copy
//! is registered from its begin until its entry is dropped, however it ends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::model::VolumeId;

/// Why bytes are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyKind {
    /// A new volume gets the content of a snapshot.
    Restore,
    /// A new volume gets the content of another one.
    Clone,
    /// A volume moves to this node.
    Move,
    /// A volume gets a new image with the content of one of its snapshots.
    Revert,
    /// A new volume gets the content of an archive or a file.
    Import,
    /// A snapshot is written into an archive.
    Export,
    /// A snapshot gets the content of its volume, in a pool that cannot share blocks.
    Snapshot,
    /// The blocks of a new thick volume are written.
    Write,
    /// The blocks that a thick volume grows by are written.
    Growth,
}

/// What a copy is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyOf {
    pub kind: CopyKind,
    /// The ID of the volume or snapshot that is filled, or of the snapshot that is exported.
    pub id: VolumeId,
    /// The request name of a volume that is created by it; empty for other copies.
    pub name: String,
    /// "namespace/name" of the claim for which it runs, if that is known.
    pub claim: Option<String>,
    /// The node whose agent sends the content, if that is another one.
    pub source_node: Option<String>,
}

/// How far a running copy is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyStatus {
    pub of: CopyOf,
    /// For how long it has run.
    pub running_for: Duration,
    /// Bytes of the image that had been filled before, by a copy that was interrupted.
    pub before: u64,
    /// Bytes of the image that are filled, or skipped because they do not differ.
    pub copied: u64,
    /// Bytes of the whole image; 0 while that is not known.
    pub total: u64,
}

/// The copies that run on this node.
#[derive(Debug, Default)]
pub(super) struct RunningCopies(Mutex<Vec<Arc<Progress>>>);

#[derive(Debug)]
struct Progress {
    of: CopyOf,
    begun: Instant,
    bytes: Mutex<Bytes>,
    /// The copy is to end.
    is_unwanted: AtomicBool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Bytes {
    before: u64,
    copied: u64,
    total: u64,
}

/// A copy that is registered until this is dropped.
pub(super) struct CopyEntry<'a> {
    all: &'a RunningCopies,
    progress: Arc<Progress>,
}

impl RunningCopies {
    fn all(&self) -> MutexGuard<'_, Vec<Arc<Progress>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a copy that begins now.
    pub(super) fn begin(&self, of: CopyOf) -> CopyEntry<'_> {
        let progress = Arc::new(Progress {
            of,
            begun: Instant::now(),
            bytes: Mutex::default(),
            is_unwanted: AtomicBool::default(),
        });
        self.all().push(progress.clone());
        CopyEntry {
            all: self,
            progress,
        }
    }

    /// Lets the copy end that creates the volume with this request name.
    pub(super) fn end(&self, name: &str) {
        let is_its = |progress: &&Arc<Progress>| !name.is_empty() && progress.of.name == name;
        for progress in self.all().iter().filter(is_its) {
            progress.is_unwanted.store(true, Ordering::SeqCst);
        }
    }

    /// All that run, the oldest first.
    pub(super) fn list(&self) -> Vec<CopyStatus> {
        let all = self.all();
        let each = all.iter().map(|progress| {
            let Bytes {
                before,
                copied,
                total,
            } = *progress.bytes();
            CopyStatus {
                of: progress.of.clone(),
                running_for: progress.begun.elapsed(),
                before,
                copied,
                total,
            }
        });
        each.collect()
    }
}

impl Progress {
    fn bytes(&self) -> MutexGuard<'_, Bytes> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CopyEntry<'_> {
    /// The image is filled from here on.
    pub(super) fn starts(&self, at: u64, total: u64) {
        let at = at.min(total);
        *self.progress.bytes() = Bytes {
            before: at,
            copied: at,
            total,
        };
    }

    /// The image is filled up to here.
    pub(super) fn reached(&self, at: u64) {
        let mut bytes = self.progress.bytes();
        bytes.copied = at.min(bytes.total);
    }

    /// The request name of the volume that it creates, if the copy is not wanted any more.
    pub(super) fn unwanted(&self) -> Option<&str> {
        let is_unwanted = self.progress.is_unwanted.load(Ordering::SeqCst);
        is_unwanted.then_some(self.progress.of.name.as_str())
    }
}

impl Drop for CopyEntry<'_> {
    fn drop(&mut self) {
        let mut all = self.all.all();
        all.retain(|progress| !Arc::ptr_eq(progress, &self.progress));
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::model::PoolId;

    fn of(n: usize) -> CopyOf {
        CopyOf {
            kind: CopyKind::Restore,
            id: VolumeId {
                pool: PoolId(Uuid::from_u128(1)),
                uuid: Uuid::from_u128(n as u128),
            },
            name: format!("volume-{n}"),
            claim: None,
            source_node: None,
        }
    }

    #[test]
    fn a_copy_is_listed_until_its_entry_is_dropped() {
        let all = RunningCopies::default();
        let first = all.begin(of(1));
        let second = all.begin(of(2));
        let listed = || all.list().into_iter().map(|one| one.of).collect::<Vec<_>>();
        assert_eq!(listed(), [of(1), of(2)]);
        drop(first);
        assert_eq!(listed(), [of(2)]);
        drop(second);
        assert!(listed().is_empty());
    }

    /// Two copies may be equal, as those of an export that is run twice.
    #[test]
    fn of_two_equal_copies_only_the_one_that_ends_is_removed() {
        let all = RunningCopies::default();
        let (first, second) = (all.begin(of(1)), all.begin(of(1)));
        second.starts(0, 7);
        drop(first);
        assert_eq!(all.list().len(), 1);
        assert_eq!(all.list()[0].total, 7);
    }

    #[test]
    fn a_copy_that_panics_or_fails_leaves_nothing() {
        let all = RunningCopies::default();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let entry = all.begin(of(1));
            entry.starts(0, 9);
            // The lock of the list is poisoned as well.
            let _list = all.all();
            panic!("a bug");
        }));
        assert!(panicked.is_err());
        assert!(all.list().is_empty());
        let fails = || -> Result<(), ()> {
            let _entry = all.begin(of(1));
            Err(())
        };
        assert!(fails().is_err());
        assert!(all.list().is_empty());
    }

    #[test]
    fn a_thousand_copies_are_counted_each_by_itself() {
        let all = RunningCopies::default();
        std::thread::scope(|scope| {
            for thread in 0..10 {
                let all = &all;
                scope.spawn(move || {
                    let entries: Vec<_> =
                        (0..100).map(|n| all.begin(of(thread * 100 + n))).collect();
                    for (n, entry) in entries.iter().enumerate() {
                        entry.starts(0, 1000);
                        entry.reached(n as u64);
                    }
                    for one in all.list() {
                        let n = one.of.id.uuid.as_u128() % 100;
                        assert!([0, n].contains(&u128::from(one.copied)), "{one:?}");
                    }
                });
            }
        });
        assert!(all.list().is_empty());
        let entries: Vec<_> = (0..1000).map(|n| all.begin(of(n))).collect();
        assert_eq!(all.list().len(), 1000);
        drop(entries);
        assert!(all.list().is_empty());
    }

    #[test]
    fn bytes_never_exceed_the_total() {
        let all = RunningCopies::default();
        let entry = all.begin(of(1));
        let bytes = || {
            let one = all.list().remove(0);
            (one.before, one.copied, one.total)
        };
        entry.reached(5);
        assert_eq!(bytes(), (0, 0, 0), "the total is not known yet");
        entry.starts(3, 8);
        assert_eq!(bytes(), (3, 3, 8));
        entry.reached(9);
        assert_eq!(bytes(), (3, 8, 8));
        entry.starts(9, 8);
        assert_eq!(bytes(), (8, 8, 8));
    }

    #[test]
    fn only_the_copy_of_the_named_volume_is_unwanted() {
        let all = RunningCopies::default();
        let unnamed = CopyOf {
            name: String::new(),
            ..of(3)
        };
        let entries = [all.begin(of(1)), all.begin(of(2)), all.begin(unnamed)];
        all.end("volume-2");
        all.end("");
        let unwanted = entries.each_ref().map(CopyEntry::unwanted);
        assert_eq!(unwanted, [None, Some("volume-2"), None]);
    }
}
