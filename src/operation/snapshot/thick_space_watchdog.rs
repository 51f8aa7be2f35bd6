//! Empties the copies of thick volumes when their pool runs out of space.
//!
//! From the first clone until the copy has blocks of its own, a thick volume shares blocks with its
//! copy, and a write to a shared block takes another one from the free space of the pool. There was
//! space for all of them when the copy was admitted, but other writers may fill the pool while the
//! copy is made. So the watchdog polls the free space, and empties the copy when it gets low. Then
//! each block belongs to the volume alone, and no write to it needs another one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use crate::backend::Image;
use crate::error::{Error, HostError, Result};
use crate::operation::Pool;
use crate::operation::pools::capacity::headroom;

/// Maximum rate at which a pool can fill up, in bytes per second. Together with the free space
/// above the limit it determines when the next poll is due.
const MAX_FILL_BYTES_PER_SECOND: u64 = 10_000_000_000;
/// Minimum and maximum time between two polls.
const POLL_INTERVALS: [Duration; 2] = [Duration::from_millis(2), Duration::from_secs(1)];

/// A copy that shares blocks with the thick volume that it is made from.
pub(in crate::operation) struct ThickCopy {
    pub(in crate::operation) pool: Arc<Pool>,
    pub(in crate::operation) image: Image,
    /// Size of the volume's image in bytes.
    pub(in crate::operation) bytes: u64,
    /// Set when the copy was emptied: no writer needs to be blocked for it any more.
    pub(in crate::operation) emptied: Arc<AtomicBool>,
}

impl ThickCopy {
    /// Gives the copy blocks of its own, so that the blocks of the volume belong to the volume
    /// alone. Then the volume accepts every write even if the pool is full. Its writers do not wait
    /// for this.
    pub(in crate::operation) fn unshare(&self) -> Result<()> {
        self.pool.backend.unshare(self.image, self.bytes)
    }
}

/// Watches the free space for copies until it is dropped or [`ThickSpaceWatchdog::stop`] is called;
/// does nothing if there are no copies. A crash of the driver ends the watch, and the next start
/// deletes the copies; until then, writes fail if the pool is filled to the last block.
#[derive(Default)]
pub(in crate::operation) struct ThickSpaceWatchdog {
    copies: Arc<[ThickCopy]>,
    watch: Option<WatchThread>,
}

struct WatchThread {
    /// Dropped to end the thread.
    keep_running: Sender<()>,
    /// Returns why a copy was emptied, if one was.
    thread: JoinHandle<Option<Error>>,
}

impl ThickSpaceWatchdog {
    /// Starts to watch. Without copies, no thread is started.
    pub(in crate::operation) fn start(copies: Vec<ThickCopy>) -> Result<ThickSpaceWatchdog> {
        if copies.is_empty() {
            return Ok(ThickSpaceWatchdog::default());
        }
        let copies: Arc<[ThickCopy]> = copies.into();
        let watched = copies.clone();
        let (keep_running, end) = channel();
        let watch = move || {
            let (mut why, mut wait) = empty_copies_if_low_space(&watched);
            while end.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
                // The copies are emptied again each time, because a clone that was running may have
                // given them blocks since.
                let seen = empty_copies_if_low_space(&watched);
                (why, wait) = (why.or(seen.0), seen.1);
            }
            why
        };
        let thread = Builder::new().name("thick-space".into()).spawn(watch);
        let thread = thread.map_err(|error| Error::Host {
            doing: "watch the free space of a thick volume".into(),
            source: HostError::io("start", "a thread", &error),
        })?;
        let watch = Some(WatchThread {
            keep_running,
            thread,
        });
        Ok(ThickSpaceWatchdog { copies, watch })
    }

    /// The copies of thick volumes.
    pub(in crate::operation) fn copies(&self) -> &[ThickCopy] {
        &self.copies
    }

    /// Ends the watch; no copy is emptied afterwards. Returns an error if a copy was emptied, since
    /// it is then worthless whatever else succeeded. Only the first call returns the error.
    pub(in crate::operation) fn stop(&mut self) -> Result<()> {
        let Some(WatchThread {
            keep_running,
            thread,
        }) = self.watch.take()
        else {
            return Ok(());
        };
        drop(keep_running);
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

/// Empties the copies in pools whose free space is low. Returns the reason, and when the next poll
/// is due. It must not log: the log may be on a file system that is frozen now.
fn empty_copies_if_low_space(copies: &[ThickCopy]) -> (Option<Error>, Duration) {
    let (mut why, mut wait) = (None, POLL_INTERVALS[1]);
    for copy in copies {
        let backend = &copy.pool.backend;
        // A pool that does not respond does not count as full.
        let Ok(space) = backend.disk() else {
            continue;
        };
        let limit = headroom(space.total) / 2;
        wait = wait.min(until_filled(space.available.saturating_sub(limit)));
        if space.available >= limit {
            continue;
        }
        copy.emptied.store(true, Ordering::SeqCst);
        // If this fails, the next poll repeats it.
        let _ = backend.empty(copy.image);
        why.get_or_insert(Error::OutOfSpace {
            pool: copy.pool.definition.name.clone(),
            enlarge: copy.pool.definition.place.enlarge(),
            required: copy.bytes,
            available: space.available,
        });
    }
    (why, wait)
}

/// Minimum time in which this number of bytes can be written, within the bounds of the poll
/// interval.
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
        let source = driver.volumes.create_volume(&thick).unwrap().id;
        let before = host.effect_log().len();
        let asked = CreateSnapshot {
            name: "s".into(),
            source_volume_id: source.to_string(),
            parameters: SnapshotParameters::default(),
            requisite: Vec::new(),
        };
        let single = driver.snapshots.create_snapshot(&asked).unwrap();
        let asked = CreateGroup {
            name: "g".into(),
            source_volume_ids: vec![source.to_string()],
            parameters: SnapshotParameters::default(),
        };
        let group = driver.snapshots.create_group(&asked).unwrap();
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
