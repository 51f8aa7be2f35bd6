//! The crossing from async to blocking. What is started here ends by itself: a caller that goes
//! away (deadline, cancelled call) leaves the work running, with its locks, and a repeat meets
//! "pending" or the finished result.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::error::{Error, Result, chain};
use crate::model::PoolId;
use crate::operation::{Driver, Key};

/// How long a caller waits for the clean-up of what failed: it takes milliseconds, unless the
/// pool's disk hangs, and that is often what it failed by.
const CLEAN_UP_TIMEOUT: Duration = Duration::from_secs(3);

/// Operations of [`Lane::Work`] that run at a time, and of [`Lane::Cut`].
const MAX_OPERATIONS: usize = 32;
const MAX_CUTS: usize = 16;
/// How long one waits for its turn, before it has a thread or a lock. Creating a volume takes
/// milliseconds; only what takes long is there for longer.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(5);
/// Looks at one pool that run at a time: each takes microseconds, unless its disk hangs.
const MAX_PROBES: usize = 16;

/// With whom an operation shares the threads. What takes long, or hangs, is bounded in its own
/// lane, so that calls of the kubelet always find a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// The kubelet's calls that change something: one at a time for each volume.
    Node,
    /// Makes, grows and deletes: may copy or wipe for hours.
    Work,
    /// Snapshots in the making: may wait for applications.
    Cut,
    /// Changes nothing, and is asked again and again.
    Look,
}

/// The looks that run, by pool.
type Looks = Arc<Mutex<HashMap<PoolId, usize>>>;

/// The pools at which the operation of this thread looks.
struct Looking {
    looks: Looks,
    at: Vec<PoolId>,
}

impl Looking {
    fn begin(&mut self, id: PoolId, name: &str) -> Result<()> {
        if self.at.contains(&id) {
            return Ok(());
        }
        let mut looks = self.looks.lock().unwrap_or_else(PoisonError::into_inner);
        let running = looks.entry(id).or_default();
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

impl Drop for Looking {
    fn drop(&mut self) {
        let mut looks = self.looks.lock().unwrap_or_else(PoisonError::into_inner);
        for pool in &self.at {
            if let Some(running) = looks.get_mut(pool) {
                *running -= 1;
            }
        }
    }
}

/// Of the thread of an operation: forgets it at its end, also by a panic.
struct Thread;

impl Thread {
    fn of(caller: watch::Sender<Option<String>>, looks: Option<Looks>) -> Thread {
        FAILING.set(Some(caller));
        LOOKING.set(looks.map(|looks| Looking {
            looks,
            at: Vec::new(),
        }));
        Thread
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        FAILING.set(None);
        LOOKING.set(None);
    }
}

/// Counts a look at a pool, if this thread's operation is one.
pub(super) fn look_at(id: PoolId, name: &str) -> Result<()> {
    LOOKING.with_borrow_mut(|looking| match looking {
        Some(looking) => looking.begin(id, name),
        None => Ok(()),
    })
}

thread_local! {
    /// Of the operation that this thread runs: at which pools it looks, if it's bounded.
    static LOOKING: RefCell<Option<Looking>> = const { RefCell::new(None) };
    /// Of the operation that this thread runs: why it fails, while it cleans up.
    static FAILING: RefCell<Option<watch::Sender<Option<String>>>> = const { RefCell::new(None) };
}

/// A clean-up that runs, until this is dropped. If it takes longer than [`CLEAN_UP_TIMEOUT`], the caller
/// is told why it was needed, and that it isn't done; it goes on, with the operation's locks.
pub(super) struct CleanUp(());

impl CleanUp {
    pub(super) fn after(first: &Error) -> CleanUp {
        tell(Some(chain(first).to_string()));
        CleanUp(())
    }
}

impl Drop for CleanUp {
    fn drop(&mut self) {
        tell(None);
    }
}

fn tell(why: Option<String>) {
    FAILING.with_borrow(|caller| {
        // Nobody listens any more, or nobody ever did: tests call without `detach`.
        let _ = caller.as_ref().map(|caller| caller.send_replace(why));
    });
}

/// Ends when a clean-up takes too long; why it was needed.
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

/// Counts what runs.
#[derive(Debug)]
pub struct InFlight {
    running: AtomicUsize,
    stopping: AtomicBool,
    work: Arc<Semaphore>,
    cuts: Arc<Semaphore>,
    looks: Looks,
}

impl Default for InFlight {
    fn default() -> InFlight {
        InFlight {
            running: AtomicUsize::default(),
            stopping: AtomicBool::default(),
            work: Arc::new(Semaphore::new(MAX_OPERATIONS)),
            cuts: Arc::new(Semaphore::new(MAX_CUTS)),
            looks: Looks::default(),
        }
    }
}

impl InFlight {
    /// Waits for the turn of an operation, if there are bounds for its like.
    async fn turn(&self, lane: Lane) -> Result<Option<OwnedSemaphorePermit>> {
        let (permits, most) = match lane {
            Lane::Work => (&self.work, MAX_OPERATIONS),
            Lane::Cut => (&self.cuts, MAX_CUTS),
            Lane::Node | Lane::Look => return Ok(None),
        };
        match tokio::time::timeout(QUEUE_TIMEOUT, permits.clone().acquire_owned()).await {
            Ok(Ok(permit)) => Ok(Some(permit)),
            // They're never closed.
            Ok(Err(_)) | Err(_) => Err(Error::Pending {
                what: format!("{most} other objects (the limit of this node)"),
            }),
        }
    }

    /// Whether [`Driver::stop`] has been called: long work ends where it can go on later.
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }
}

/// One running operation; counted until dropped, also by a panic.
struct Running(Arc<Driver>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.in_flight.running.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Driver {
    /// Runs blocking work to its end. After [`Driver::stop`] nothing new starts.
    pub async fn detach<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Driver) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.detach_in(Lane::Node, work).await
    }

    /// The same, in turn with others of its lane. The wait for it holds neither lock nor thread.
    pub async fn detach_in<T: Send + 'static>(
        self: &Arc<Self>,
        lane: Lane,
        work: impl FnOnce(&Driver) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let turn = self.in_flight.turn(lane).await?;
        // Counted before the look at `stopping`, so that whoever stops sees it or is seen.
        self.in_flight.running.fetch_add(1, Ordering::SeqCst);
        let running = Running(self.clone());
        if self.in_flight.stopping.load(Ordering::SeqCst) {
            return Err(Error::Stopping);
        }
        let span = tracing::Span::current();
        let (failing, told) = watch::channel(None);
        let looks = (lane == Lane::Look).then(|| self.in_flight.looks.clone());
        let task = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            let _thread = Thread::of(failing, looks);
            span.in_scope(|| work(&running.0))
        });
        tokio::select! {
            done = task => done.map_err(|panic| Error::Bug {
                invariant: format!("no operation panics: {panic}"),
            })?,
            why = stuck(told) => Err(Error::Pending {
                what: format!("the cleanup of a failed call ({why})"),
            }),
        }
    }

    /// Waits until none of these is locked, at most this long, and takes none: what has them ends by
    /// itself. No thread waits, and a caller that goes away ends it.
    pub async fn wait_until_free(&self, keys: &[Key], patience: Duration) {
        if !self.in_flight.is_stopping() {
            self.locks.wait_until_free(keys, patience).await;
        }
    }

    /// No new operations from now on.
    pub fn stop(&self) {
        self.in_flight.stopping.store(true, Ordering::SeqCst);
    }

    /// Operations that are running now.
    pub fn running(&self) -> usize {
        self.in_flight.running.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests;
