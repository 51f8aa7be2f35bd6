//! Runs blocking operations on behalf of async callers. An operation that was started runs to its
//! end: if the caller goes away (deadline or cancelled call), it continues and keeps its locks, and
//! a retry returns "pending" or the finished result.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::error::{Error, Result, chain};
use crate::model::PoolId;
use crate::operation::{Driver, Key};

/// How long a caller waits for the cleanup after a failure. The cleanup takes milliseconds unless
/// the pool's disk hangs, which is often the reason for the failure.
const CLEAN_UP_TIMEOUT: Duration = Duration::from_secs(3);

/// Maximum number of concurrent operations of [`WorkClass::Long`], and of [`WorkClass::Cut`].
const MAX_OPERATIONS: usize = 32;
const MAX_CUTS: usize = 16;
/// How long an operation waits for its turn, before it has a thread or a lock. Creating a volume
/// takes milliseconds; only long operations occupy their places for longer than this.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of concurrent reads of one pool: each takes microseconds, unless its disk hangs.
const MAX_PROBES: usize = 16;

/// A class of operations that share a limit on threads. Operations that take long or hang are
/// limited within their own class, so that a thread is always free for calls of the kubelet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkClass {
    /// Calls of the kubelet that change something; one at a time for each volume.
    Node,
    /// Creates, grows and deletes; may copy or wipe for hours.
    Long,
    /// Creates snapshots; may wait for applications.
    Cut,
    /// Calls that only read; they are repeated often.
    Read,
}

/// The number of running reads, by pool.
type Reads = Arc<Mutex<HashMap<PoolId, usize>>>;

/// The pools that the operation of this thread reads.
struct Reading {
    reads: Reads,
    at: Vec<PoolId>,
}

impl Reading {
    fn begin(&mut self, id: PoolId, name: &str) -> Result<()> {
        if self.at.contains(&id) {
            return Ok(());
        }
        let mut reads = self.reads.lock().unwrap_or_else(PoisonError::into_inner);
        let running = reads.entry(id).or_default();
        if *running >= MAX_PROBES {
            return Err(Error::Unreachable {
                what: format!("pool {name}"),
                reason: format!(
                    "{MAX_PROBES} calls that read it have not finished; its disk is slow or hangs"
                ),
            });
        }
        *running += 1;
        self.at.push(id);
        Ok(())
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        let mut reads = self.reads.lock().unwrap_or_else(PoisonError::into_inner);
        for pool in &self.at {
            if let Some(running) = reads.get_mut(pool) {
                *running -= 1;
            }
        }
    }
}

/// The thread-local state of an operation. Dropping it clears the state, also after a panic.
struct Thread;

impl Thread {
    fn of(caller: watch::Sender<Option<String>>, reads: Option<Reads>) -> Thread {
        FAILING.set(Some(caller));
        READING.set(reads.map(|reads| Reading {
            reads,
            at: Vec::new(),
        }));
        Thread
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        FAILING.set(None);
        READING.set(None);
    }
}

/// Counts a read of a pool, if the operation of this thread is in [`WorkClass::Read`].
pub(super) fn count_read(id: PoolId, name: &str) -> Result<()> {
    READING.with_borrow_mut(|reading| match reading {
        Some(reading) => reading.begin(id, name),
        None => Ok(()),
    })
}

thread_local! {
    /// The pools that the operation of this thread reads, if its reads are limited.
    static READING: RefCell<Option<Reading>> = const { RefCell::new(None) };
    /// Receives the reason why the operation of this thread fails, while it cleans up.
    static FAILING: RefCell<Option<watch::Sender<Option<String>>>> = const { RefCell::new(None) };
}

/// Marks a cleanup as running until it is dropped. If the cleanup takes longer than
/// [`CLEAN_UP_TIMEOUT`], the caller receives an error with the reason for the cleanup, which
/// continues with the operation's locks.
pub(super) struct CleanUp(());

impl CleanUp {
    pub(super) fn after(first: &Error) -> CleanUp {
        report_failure(Some(chain(first).to_string()));
        CleanUp(())
    }
}

impl Drop for CleanUp {
    fn drop(&mut self) {
        report_failure(None);
    }
}

fn report_failure(why: Option<String>) {
    FAILING.with_borrow(|caller| {
        // The caller is gone, or there is none: tests call operations without `run_blocking`.
        let _ = caller.as_ref().map(|caller| caller.send_replace(why));
    });
}

/// Returns when a cleanup takes too long, with the reason for the cleanup.
async fn stuck(mut failing: watch::Receiver<Option<String>>) -> String {
    loop {
        let why = failing.wait_for(Option::is_some).await;
        let Ok(why) = why.map(|why| why.clone().unwrap_or_default()) else {
            // The operation has ended.
            return std::future::pending().await;
        };
        let cleaned = failing.wait_for(Option::is_none);
        if tokio::time::timeout(CLEAN_UP_TIMEOUT, cleaned)
            .await
            .is_err()
        {
            return why;
        }
    }
}

/// The operations that are running, and their limits.
#[derive(Debug)]
pub struct InFlight {
    running: AtomicUsize,
    stopping: AtomicBool,
    work: Arc<Semaphore>,
    cuts: Arc<Semaphore>,
    reads: Reads,
}

impl Default for InFlight {
    fn default() -> InFlight {
        InFlight {
            running: AtomicUsize::default(),
            stopping: AtomicBool::default(),
            work: Arc::new(Semaphore::new(MAX_OPERATIONS)),
            cuts: Arc::new(Semaphore::new(MAX_CUTS)),
            reads: Reads::default(),
        }
    }
}

impl InFlight {
    /// Waits for the turn of an operation, if its class is limited.
    async fn turn(&self, class: WorkClass) -> Result<Option<OwnedSemaphorePermit>> {
        let (permits, most) = match class {
            WorkClass::Long => (&self.work, MAX_OPERATIONS),
            WorkClass::Cut => (&self.cuts, MAX_CUTS),
            WorkClass::Node | WorkClass::Read => return Ok(None),
        };
        match tokio::time::timeout(QUEUE_TIMEOUT, permits.clone().acquire_owned()).await {
            Ok(Ok(permit)) => Ok(Some(permit)),
            // The semaphores are never closed.
            Ok(Err(_)) | Err(_) => Err(Error::Pending {
                what: format!("{most} other objects (the limit of this node)"),
            }),
        }
    }

    /// Whether [`Driver::stop`] has been called. Long operations then stop where they can be
    /// resumed.
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }
}

/// One running operation. It is counted until it is dropped, also after a panic.
struct Running(Arc<Driver>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0
            .pools
            .in_flight
            .running
            .fetch_sub(1, Ordering::SeqCst);
    }
}

impl Driver {
    /// Runs a blocking operation to its end. After [`Driver::stop`] no new operation starts.
    pub async fn run_blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Driver) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.run_blocking_in(WorkClass::Node, work).await
    }

    /// Like [`Driver::run_blocking`], within the limit of a class. While the call waits for its turn it
    /// holds neither a lock nor a thread.
    pub async fn run_blocking_in<T: Send + 'static>(
        self: &Arc<Self>,
        class: WorkClass,
        work: impl FnOnce(&Driver) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let turn = self.pools.in_flight.turn(class).await?;
        // Counted before `stopping` is read: either this operation sees `stopping`, or the caller
        // of `stop` sees this operation in the count.
        self.pools.in_flight.running.fetch_add(1, Ordering::SeqCst);
        let running = Running(self.clone());
        if self.pools.in_flight.stopping.load(Ordering::SeqCst) {
            return Err(Error::Stopping);
        }
        let span = tracing::Span::current();
        let (failing, failures) = watch::channel(None);
        let reads = (class == WorkClass::Read).then(|| self.pools.in_flight.reads.clone());
        let task = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            let _thread = Thread::of(failing, reads);
            span.in_scope(|| work(&running.0))
        });
        tokio::select! {
            done = task => done.map_err(|panic| Error::Bug {
                invariant: format!("no operation panics: {panic}"),
            })?,
            why = stuck(failures) => Err(Error::Pending {
                what: format!("the cleanup of a failed call ({why})"),
            }),
        }
    }

    /// Waits until none of these locks is held, or until the time is over, and acquires none of
    /// them. No thread is blocked, and the wait ends if the caller goes away.
    pub async fn wait_until_free(&self, keys: &[Key], max_wait: Duration) {
        if !self.pools.in_flight.is_stopping() {
            self.pools.locks.wait_until_free(keys, max_wait).await;
        }
    }

    /// Whether no new operation begins any more, and long ones end early.
    pub fn is_stopping(&self) -> bool {
        self.pools.in_flight.is_stopping()
    }

    /// Rejects new operations from now on.
    pub fn stop(&self) {
        self.pools.in_flight.stopping.store(true, Ordering::SeqCst);
    }

    /// The number of operations that are running now.
    pub fn running(&self) -> usize {
        self.pools.in_flight.running.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests;
