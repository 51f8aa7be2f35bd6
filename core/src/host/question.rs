//! Queries to the kernel that may never return, such as those about a file system whose disk or
//! server is gone. Each runs on a separate thread, and is abandoned after a time limit.

use std::collections::BTreeMap;
use std::sync::mpsc::channel;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// The queries that hang, by subject. While a query hangs, no second one about the same subject
/// starts; otherwise each poll would leave another thread behind.
pub struct TimedQueries<K>(Mutex<BTreeMap<K, JoinHandle<()>>>);

impl<K: Ord> TimedQueries<K> {
    /// Creates an empty set.
    pub const fn new() -> TimedQueries<K> {
        TimedQueries(Mutex::new(BTreeMap::new()))
    }

    /// Runs a query and returns its result; `None` if it does not return within `max_wait`, or if
    /// an earlier one about the same subject still hangs. A timeout carries no information about
    /// the subject.
    pub fn ask<T: Send + 'static>(
        &self,
        about: K,
        max_wait: Duration,
        question: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        if self.hangs(&about) {
            return None;
        }
        let (sender, receiver) = channel();
        let asked = Builder::new().name("question".into()).spawn(move || {
            // After a timeout the result is discarded.
            let _ = sender.send(question());
        });
        let answer = receiver.recv_timeout(max_wait).ok();
        if let (None, Ok(asked)) = (&answer, asked) {
            self.hanging().insert(about, asked);
        }
        answer
    }

    fn hangs(&self, about: &K) -> bool {
        let mut hanging = self.hanging();
        if hanging.get(about).is_some_and(|asked| !asked.is_finished()) {
            return true;
        }
        hanging.remove(about);
        false
    }

    fn hanging(&self) -> MutexGuard<'_, BTreeMap<K, JoinHandle<()>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Ord> Default for TimedQueries<K> {
    fn default() -> TimedQueries<K> {
        TimedQueries::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(1);
    const LONG_TIMEOUT: Duration = Duration::from_secs(600);

    #[test]
    fn a_question_that_hangs_is_not_asked_again_until_it_ends() {
        let questions = TimedQueries::new();
        assert_eq!(questions.ask("a", LONG_TIMEOUT, || 1), Some(1));
        let (end, wait) = channel::<()>();
        assert_eq!(questions.ask("a", SHORT, move || wait.recv()), None);
        let asked = || panic!("it is asked while the first one hangs");
        assert_eq!(questions.ask::<()>("a", LONG_TIMEOUT, asked), None);
        assert_eq!(
            questions.ask("b", LONG_TIMEOUT, || 2),
            Some(2),
            "others are asked"
        );
        drop(end);
        while questions.hangs(&"a") {
            std::thread::yield_now();
        }
        assert_eq!(questions.ask("a", LONG_TIMEOUT, || 3), Some(3));
    }
}
