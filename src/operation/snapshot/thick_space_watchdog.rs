//! Copies that give way to the thick volumes they are made from.
//!
//! From the first clone until it has blocks of its own again, a thick volume shares blocks with
//! its copy, and a write to one of them takes another from what the pool has free. There was room
//! for all of them when the copy was admitted; but anybody may fill the pool meanwhile. So the room
//! is watched, and when it gets low the copy is emptied: then every block is the volume's own, and
//! no write to it needs another one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use crate::backend::Image;
use crate::error::{Error, HostError, Result};
use crate::operation::Pool;
use crate::operation::pools::capacity::headroom;

/// Bytes a second at which a pool is filled at most: what is left above the limit says when the
/// next look is due.
const MAX_FILL_BYTES_PER_SECOND: u64 = 10_000_000_000;
/// Between two looks, at least and at most.
const POLL_INTERVALS: [Duration; 2] = [Duration::from_millis(2), Duration::from_secs(1)];

/// A copy that shares blocks with the thick volume that it is made from.
pub(in crate::operation) struct ThickCopy {
    pub(in crate::operation) pool: Arc<Pool>,
    pub(in crate::operation) image: Image,
    /// Bytes of its volume's image.
    pub(in crate::operation) bytes: u64,
    /// Set when it was emptied: no writer needs to stand still for it any more.
    pub(in crate::operation) emptied: Arc<AtomicBool>,
}

impl ThickCopy {
    /// Gives the copy blocks of its own, so that those that its volume has are the volume's alone:
    /// then it takes every write on a full pool, and nobody who uses it has waited.
    pub(in crate::operation) fn unshare(&self) -> Result<()> {
        self.pool.backend.unshare(self.image, self.bytes)
    }
}

/// Watches the room of copies until it's dropped or [`ThickSpaceWatchdog::stop`]; of none, if that's empty. A
/// crash ends it, and copies with it at the next start: until then a pool that is filled to the
/// last block fails writes.
#[derive(Default)]
pub(in crate::operation) struct ThickSpaceWatchdog {
    copies: Arc<[ThickCopy]>,
    watch: Option<Watch>,
}

struct Watch {
    /// Dropped when the thread is to end.
    go_on: Sender<()>,
    /// Why a copy was emptied, if one was.
    thread: JoinHandle<Option<Error>>,
}

impl ThickSpaceWatchdog {
    /// Begins to watch; no thread where there are no copies.
    pub(in crate::operation) fn watch(copies: Vec<ThickCopy>) -> Result<ThickSpaceWatchdog> {
        if copies.is_empty() {
            return Ok(ThickSpaceWatchdog::default());
        }
        let copies: Arc<[ThickCopy]> = copies.into();
        let watched = copies.clone();
        let (go_on, end) = channel();
        let watch = move || {
            let (mut why, mut wait) = look(&watched);
            while end.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
                // Again each time: a clone that ran has given it blocks since.
                let seen = look(&watched);
                (why, wait) = (why.or(seen.0), seen.1);
            }
            why
        };
        let thread = Builder::new().name("give-way".into()).spawn(watch);
        let thread = thread.map_err(|error| Error::Host {
            doing: "watch the free space of a thick volume".into(),
            source: HostError::io("start", "a thread", &error),
        })?;
        let watch = Some(Watch { go_on, thread });
        Ok(ThickSpaceWatchdog { copies, watch })
    }

    /// The copies of thick volumes.
    pub(in crate::operation) fn copies(&self) -> &[ThickCopy] {
        &self.copies
    }

    /// Ends it; no copy is emptied afterwards. An error if one was: it's worthless, whatever else
    /// became of it. Told once.
    pub(in crate::operation) fn stop(&mut self) -> Result<()> {
        let Some(Watch { go_on, thread }) = self.watch.take() else {
            return Ok(());
        };
        drop(go_on);
        let why = thread.join().map_err(|_| Error::Bug {
            invariant: "the watchdog for thick volumes does not panic".into(),
        })?;
        why.map_or(Ok(()), Err)
    }
}

impl Drop for ThickSpaceWatchdog {
    fn drop(&mut self) {
        let _ = self.stop();
    }
}

/// Empties the copies of pools whose room is low; why, and when the next look is due. Not a word
/// here: the log may lie on a file system that is frozen just now.
fn look(copies: &[ThickCopy]) -> (Option<Error>, Duration) {
    let (mut why, mut wait) = (None, POLL_INTERVALS[1]);
    for copy in copies {
        let backend = &copy.pool.backend;
        // A pool that doesn't answer isn't full.
        let Ok(space) = backend.disk() else {
            continue;
        };
        let limit = headroom(space.total) / 2;
        wait = wait.min(until_filled(space.available.saturating_sub(limit)));
        if space.available >= limit {
            continue;
        }
        copy.emptied.store(true, Ordering::SeqCst);
        // One that failed is tried again, at the next look.
        let _ = backend.empty(copy.image);
        why.get_or_insert(Error::OutOfSpace {
            pool: copy.pool.definition.name.clone(),
            required: copy.bytes,
            available: space.available,
        });
    }
    (why, wait)
}

/// How long it takes at least to fill so many bytes, as far as a look may wait for it.
fn until_filled(bytes: u64) -> Duration {
    let filled = Duration::from_secs_f64(bytes as f64 / MAX_FILL_BYTES_PER_SECOND as f64);
    filled.clamp(POLL_INTERVALS[0], POLL_INTERVALS[1])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::memory::MemoryHost;
    use crate::model::SnapshotParameters;
    use crate::operation::tests::{driver, new_volume};
    use crate::operation::{CreateGroup, CreateSnapshot};

    #[test]
    fn a_snapshot_of_a_thick_volume_unshares_the_copy_and_not_the_volume() {
        let host = MemoryHost::new();
        let driver = driver(&host);
        let mut thick = new_volume("a");
        thick.parameters.allocation = crate::model::Allocation::Thick;
        let source = driver.create_volume(&thick).unwrap().id;
        let before = host.effect_log().len();
        let asked = CreateSnapshot {
            name: "s".into(),
            source_volume_id: source.to_string(),
            parameters: SnapshotParameters::default(),
            requisite: Vec::new(),
        };
        let single = driver.create_snapshot(&asked).unwrap();
        let asked = CreateGroup {
            name: "g".into(),
            source_volume_ids: vec![source.to_string()],
            parameters: SnapshotParameters::default(),
        };
        let group = driver.create_group(&asked).unwrap();
        let log = host.effect_log();
        let unshared = log[before..].iter();
        let unshared: Vec<_> = unshared
            .filter(|line| line.starts_with("unshare"))
            .collect();
        for copy in [single.id, group.snapshots[0].id] {
            let copy = format!("snapshots/{}", copy.uuid);
            assert!(unshared.iter().any(|line| line.contains(&copy)), "{log:#?}");
        }
        let live = format!("volumes/{}", source.uuid);
        assert!(
            !unshared.iter().any(|line| line.contains(&live)),
            "{log:#?}"
        );
    }

    #[test]
    fn a_look_is_due_before_what_is_left_can_be_filled() {
        assert_eq!(until_filled(0), POLL_INTERVALS[0]);
        assert_eq!(until_filled(4 << 20), POLL_INTERVALS[0]);
        assert_eq!(
            until_filled(MAX_FILL_BYTES_PER_SECOND / 10),
            Duration::from_millis(100)
        );
        assert_eq!(until_filled(MAX_FILL_BYTES_PER_SECOND), POLL_INTERVALS[1]);
        assert_eq!(until_filled(u64::MAX), POLL_INTERVALS[1]);
    }
}
