//! What the cuts of this process have come to: for metrics.

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::time::Duration;

use super::Driver;
use crate::cut::Outcome;
use crate::error::{Error, Result};
use crate::model::Level;

/// Upper ends of the histograms' buckets, in seconds: a freeze lasts milliseconds, and at most 30 s.
pub const BUCKETS: [f64; 11] = [
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0,
];

/// Durations, by buckets.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    /// How many were at most as long as each of [`BUCKETS`], and not as long as the one before.
    pub counts: [u64; BUCKETS.len()],
    /// How many in all.
    pub count: u64,
    /// Seconds in all.
    pub sum: f64,
}

impl Histogram {
    fn add(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        self.count += 1;
        self.sum += seconds;
        if let Some(n) = BUCKETS.iter().position(|most| seconds <= *most) {
            self.counts[n] += 1;
        }
    }
}

/// Everything that is counted of cuts, since the start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CutCounts {
    /// Cuts that were proven good, by the level that they reached.
    pub levels: BTreeMap<Level, u64>,
    /// Tries in which an application could not be held still.
    pub quiesce_failed: u64,
    /// Cuts that were thrown away: a deadline, a guard that died, a stranger's thaw.
    pub lost: u64,
    /// Tries that ended otherwise.
    pub failed: u64,
    /// Applications that didn't release by themselves.
    pub release_problems: u64,
    /// From the first freeze to the last thaw.
    pub freeze: Histogram,
    /// Until all hooks were ready.
    pub quiesce: Histogram,
    /// Writing back before the freeze.
    pub sync: Histogram,
    /// Extents cloned before the freeze.
    pub extents_ahead: u64,
    /// Extents cloned while writers stood still.
    pub extents_within: u64,
}

impl CutCounts {
    fn add(&mut self, attempt: &Result<Outcome>) {
        let outcome = match attempt {
            Ok(outcome) => outcome,
            Err(Error::QuiesceFailed { .. }) => return self.quiesce_failed += 1,
            Err(Error::CutLost { .. }) => return self.lost += 1,
            Err(_) => return self.failed += 1,
        };
        *self.levels.entry(outcome.level).or_default() += 1;
        let stats = &outcome.stats;
        if let Some(time) = stats.freeze {
            self.freeze.add(time);
        }
        if let Some(time) = stats.quiesce {
            self.quiesce.add(time);
        }
        self.sync.add(stats.sync);
        self.extents_ahead += stats.extents_ahead;
        self.extents_within += stats.extents_within;
        self.release_problems += u64::from(stats.release_problem.is_some());
    }
}

impl Driver {
    /// What the cuts have come to.
    pub fn cut_counts(&self) -> CutCounts {
        self.cuts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Counts one try, and tells what it took.
    pub(super) fn count_cut(&self, attempt: &Result<Outcome>) {
        self.cuts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .add(attempt);
        let Ok(outcome) = attempt else { return };
        let ms = |time: Option<Duration>| time.map_or(0, |time| time.as_millis() as u64);
        let stats = &outcome.stats;
        if let Some(problem) = &stats.release_problem {
            tracing::warn!("the cut is good, but an application was not released as it should be: {problem}");
        }
        tracing::info!(
            level = %outcome.level,
            reason = %outcome.reason,
            freeze_ms = ms(stats.freeze),
            quiesce_ms = ms(stats.quiesce),
            sync_ms = ms(Some(stats.sync)),
            extents_ahead = stats.extents_ahead,
            extents_within = stats.extents_within,
            "cut"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_in_one_bucket_and_in_the_sum() {
        let mut histogram = Histogram::default();
        histogram.add(Duration::from_millis(7));
        histogram.add(Duration::from_secs(60));
        assert_eq!(histogram.counts.iter().sum::<u64>(), 1);
        assert_eq!(histogram.counts[2], 1);
        assert_eq!(histogram.count, 2);
        assert!(histogram.sum > 60.0);
    }
}
