//! The crossing from async to blocking. What is started here ends by itself: a caller that goes
//! away (deadline, cancelled call) leaves the work running, with its locks, and a repeat meets
//! "pending" or the finished result.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::Driver;
use crate::error::{Error, Result};

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
        let task = tokio::task::spawn_blocking(move || span.in_scope(|| work(&running.0)));
        task.await.map_err(|panic| Error::Bug {
            invariant: format!("an operation ends without a panic: {panic}"),
        })?
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
