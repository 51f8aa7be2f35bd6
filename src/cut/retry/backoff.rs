//! Records which cuts have failed, so that callers that repeat their calls forever do not disturb
//! an application forever.
//!
//! The records are in memory only. After a restart a volume is tried at once, as an administrator
//! who has repaired a hook expects.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};

/// Delay after the first failure, in seconds. It doubles with each further failure.
const FIRST_DELAY_SECONDS: u64 = 60;
/// Maximum delay, in seconds.
const MAX_DELAY_SECONDS: u64 = 30 * 60;
/// Maximum number of entries. A node has far fewer volumes whose snapshots fail at the same time.
/// At the limit, the entry whose pause ends first is dropped.
const MAX_ENTRIES: usize = 4096;

/// The volumes whose last cut failed, each together with its class. A tenant who repeats the call
/// under another name therefore disturbs no application, and a tenant who has corrected the class
/// does not have to wait.
#[derive(Debug, Default)]
pub struct Backoffs {
    names: Mutex<BTreeMap<String, Backoff>>,
}

#[derive(Clone, Debug)]
struct Backoff {
    /// Number of consecutive sets of attempts that failed.
    sets: u32,
    last: Arc<Error>,
    /// Seconds since 1970.
    since: u64,
}

impl Backoff {
    fn error(&self, seconds: u64) -> Error {
        Error::Paused {
            seconds,
            sets: self.sets,
            last: self.last.clone(),
        }
    }

    /// Length of the pause, in seconds.
    fn length(&self) -> u64 {
        let doublings = self.sets.saturating_sub(1).min(MAX_DELAY_SECONDS.ilog2());
        (FIRST_DELAY_SECONDS << doublings).min(MAX_DELAY_SECONDS)
    }

    fn until(&self) -> u64 {
        self.since.saturating_add(self.length())
    }

    /// Remaining pause in seconds; 0 if it is over. The pause also ends if the clock is set back.
    fn left(&self, now: u64) -> u64 {
        if now < self.since {
            return 0;
        }
        self.until().saturating_sub(now)
    }
}

impl Backoffs {
    fn names(&self) -> MutexGuard<'_, BTreeMap<String, Backoff>> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks whether all of `keys` may be tried at time `now` (seconds since 1970). Otherwise it
    /// returns the recorded failure of the key with the longest pause, as [`Error::Paused`].
    pub fn check(&self, keys: &[String], now: u64) -> Result<()> {
        let names = self.names();
        let paused = keys.iter().filter_map(|key| names.get(key));
        match paused.max_by_key(|pause| pause.left(now)) {
            Some(pause) if pause.left(now) > 0 => Err(pause.error(pause.left(now))),
            Some(_) | None => Ok(()),
        }
    }

    /// Records that a whole set of attempts for `keys` has failed. Returns the error for the
    /// caller, which contains the pause that begins now.
    pub fn failed(&self, keys: &[String], error: Error, now: u64) -> Error {
        let mut names = self.names();
        let before = keys.iter().filter_map(|key| names.get(key));
        let sets = before.map(|pause| pause.sets).max().unwrap_or(0);
        let pause = Backoff {
            sets: sets.saturating_add(1),
            last: Arc::new(error),
            since: now,
        };
        for key in keys {
            names.insert(key.clone(), pause.clone());
            if names.len() > MAX_ENTRIES {
                let others = names.iter().filter(|(name, _)| *name != key);
                let first = others.min_by_key(|(_, pause)| pause.until());
                if let Some(first) = first.map(|(name, _)| name.clone()) {
                    names.remove(&first);
                }
            }
        }
        pause.error(pause.length())
    }

    /// Removes the entries of `keys`, because their cut succeeded.
    pub fn forget(&self, keys: &[String]) {
        for key in keys {
            self.names().remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::chain;
    use proptest::prelude::*;

    fn lost(n: u64) -> Error {
        Error::CutLost {
            reason: format!("reason {n}"),
        }
    }

    fn left(backoffs: &Backoffs, name: &str, now: u64) -> u64 {
        match backoffs.check(&[name.into()], now) {
            Ok(()) => 0,
            Err(Error::Paused { seconds, .. }) => seconds,
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn pauses_double_up_to_half_an_hour_and_a_success_ends_them() {
        let backoffs = Backoffs::default();
        let mut now = 1_000_000;
        let mut minutes = Vec::new();
        for n in 0..40 {
            assert!(backoffs.check(&["a".into()], now).is_ok());
            let answer = backoffs.failed(&["a".into()], lost(n), now);
            assert_eq!(
                chain(&answer),
                chain(&backoffs.check(&["a".into()], now).unwrap_err())
            );
            let length = left(&backoffs, "a", now);
            assert_eq!(left(&backoffs, "a", now + length - 1), 1);
            minutes.push(length / 60);
            now += length;
        }
        assert_eq!(minutes[..7], [1, 2, 4, 8, 16, 30, 30]);
        assert_eq!(minutes[39], 30);
        let _ = backoffs.failed(&["a".into()], lost(7), now);
        assert!(backoffs.check(&["b".into()], now).is_ok(), "another name");
        let error = backoffs.check(&["a".into()], now).unwrap_err();
        assert_eq!(
            chain(&error),
            "paused for 1800 s after 41 failed calls; the last error was: the cut was discarded: \
             reason 7"
        );
        backoffs.forget(&["a".into()]);
        assert!(backoffs.check(&["a".into()], now).is_ok());
        let _ = backoffs.failed(&["a".into()], lost(8), now);
        assert_eq!(left(&backoffs, "a", now), 60, "begins again");
    }

    #[test]
    fn a_clock_that_is_set_back_delays_no_retry() {
        let backoffs = Backoffs::default();
        let _ = backoffs.failed(&["a".into()], lost(0), 5_000_000);
        assert!(backoffs.check(&["a".into()], 4_999_999).is_ok());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4))]
        #[test]
        fn it_never_grows_beyond_its_bound(names in prop::collection::vec(0..10_000u32, 0..6000)) {
            let backoffs = Backoffs::default();
            for (now, name) in names.iter().enumerate() {
                let (name, now) = (name.to_string(), now as u64);
                let _ = backoffs.failed(std::slice::from_ref(&name), lost(now), now);
                prop_assert!(backoffs.names().len() <= MAX_ENTRIES);
                prop_assert!(backoffs.check(&[name], now).is_err(), "the newest is there");
            }
        }
    }
}
