//! Checks which prerequisites this host lacks, for Probe. While all threads are busy, Probe gets the
//! last result; if a check waits too long for a thread, the driver counts as stuck.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::error::{Error, Result};
use crate::operation::Driver;

/// How long a Probe without an earlier result waits for a check that has just begun.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
const FIRST_CHECK_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a check may wait for a thread before the driver counts as stuck: only a restart helps
/// then, which the liveness probe triggers.
const STUCK_AFTER: Duration = Duration::from_secs(60);

/// The last result, and since when the next one has been awaited.
#[derive(Default)]
struct CheckState {
    found: Option<Vec<String>>,
    waiting: Option<Instant>,
}

/// Checks periodically which prerequisites this host lacks, one check at a time.
#[derive(Clone)]
pub(super) struct PrerequisiteCheck {
    state: Arc<Mutex<CheckState>>,
    ended: watch::Sender<()>,
    stuck: Duration,
}

impl Default for PrerequisiteCheck {
    fn default() -> PrerequisiteCheck {
        PrerequisiteCheck {
            state: Arc::default(),
            ended: watch::Sender::new(()),
            stuck: STUCK_AFTER,
        }
    }
}

impl PrerequisiteCheck {
    /// The missing prerequisites of this host: the result of a check that begins now, or, while all
    /// threads are busy, the last result.
    ///
    /// # Errors
    ///
    /// Fails if a check has waited too long for a thread.
    pub(super) async fn missing(&self, driver: &Arc<Driver>) -> Result<Vec<String>> {
        let driver = driver.clone();
        self.result(move || driver.pools.missing()).await
    }

    async fn result(
        &self,
        check_now: impl FnOnce() -> Vec<String> + Send + 'static,
    ) -> Result<Vec<String>> {
        let mut ended = self.ended.subscribe();
        let (since, known) = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let since = match state.waiting {
                Some(since) => since,
                None => {
                    self.begin(check_now);
                    *state.waiting.insert(Instant::now())
                }
            };
            (since, state.found.is_some())
        };
        if since.elapsed() < self.stuck {
            let max_wait = if known {
                PROBE_TIMEOUT
            } else {
                FIRST_CHECK_TIMEOUT
            };
            let _ = tokio::time::timeout(max_wait, ended.changed()).await;
        }
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let late = state
            .waiting
            .is_some_and(|since| since.elapsed() >= self.stuck);
        match &state.found {
            Some(found) if !late => Ok(found.clone()),
            Some(_) | None => Err(Error::unreachable(
                "this driver",
                "all of its worker threads are busy; a disk may hang",
            )),
        }
    }

    fn begin(&self, check_now: impl FnOnce() -> Vec<String> + Send + 'static) {
        let check = self.clone();
        tokio::task::spawn_blocking(move || {
            let found = check_now();
            let mut state = check.state.lock().unwrap_or_else(PoisonError::into_inner);
            *state = CheckState {
                found: Some(found),
                waiting: None,
            };
            drop(state);
            let _ = check.ended.send(());
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_probe_needs_no_free_thread_until_none_has_been_free_for_long() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(1)
            .enable_time()
            .build()
            .unwrap();
        runtime.block_on(async {
            let check = PrerequisiteCheck::default();
            let lacks = |what: &str| {
                let found = vec![what.to_string()];
                move || found
            };
            assert_eq!(check.result(lacks("a")).await.unwrap(), ["a"]);
            assert_eq!(check.result(lacks("b")).await.unwrap(), ["b"]);

            // Occupies its only thread.
            let (free, taken) = channel::<()>();
            let hung = tokio::task::spawn_blocking(move || taken.recv());
            for _ in 0..2 {
                assert_eq!(check.result(lacks("c")).await.unwrap(), ["b"]);
            }
            let impatient = PrerequisiteCheck {
                stuck: Duration::ZERO,
                ..check.clone()
            };
            let error = impatient.result(lacks("d")).await.err().unwrap();
            assert!(matches!(error, Error::Unreachable { .. }), "{error}");

            drop(free);
            let _ = hung.await.unwrap();
            while check.result(lacks("e")).await.unwrap() != ["e"] {}
        });
    }
}
