//! The crossing from async to blocking. What is started here ends by itself: a caller that goes
//! away (deadline, cancelled call) leaves the work running, with its locks, and a repeat meets
//! "pending" or the finished result.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::watch;

use super::Driver;
use crate::error::{Error, Result, chain};

/// How long a caller waits for the clean-up of what failed: it takes milliseconds, unless the
/// pool's disk hangs, and that is often what it failed by.
const CLEAN_UP: Duration = Duration::from_secs(3);

thread_local! {
    /// Of the operation that this thread runs: why it fails, while it cleans up.
    static FAILING: RefCell<Option<watch::Sender<Option<String>>>> = const { RefCell::new(None) };
}

/// A clean-up that runs, until this is dropped. If it takes longer than [`CLEAN_UP`], the caller
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
        if tokio::time::timeout(CLEAN_UP, cleaned).await.is_err() {
            return why;
        }
    }
}

/// Counts what runs.
#[derive(Debug, Default)]
pub struct InFlight {
    running: AtomicUsize,
    stopping: AtomicBool,
}

impl InFlight {
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
        // Counted before the look at `stopping`, so that whoever stops sees it or is seen.
        self.in_flight.running.fetch_add(1, Ordering::SeqCst);
        let running = Running(self.clone());
        if self.in_flight.stopping.load(Ordering::SeqCst) {
            return Err(Error::Stopping);
        }
        let span = tracing::Span::current();
        let (failing, told) = watch::channel(None);
        let task = tokio::task::spawn_blocking(move || {
            FAILING.set(Some(failing));
            let done = span.in_scope(|| work(&running.0));
            FAILING.set(None);
            done
        });
        tokio::select! {
            done = task => done.map_err(|panic| Error::Bug {
                invariant: format!("an operation ends without a panic: {panic}"),
            })?,
            why = stuck(told) => Err(Error::Pending {
                what: format!("the clean-up of a call that failed ({why})"),
            }),
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
