//! What the cuts of this process have come to: for metrics and logs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::metrics::histogram::Histogram;

use crate::cut::Outcome;
use crate::error::{Error, ErrorContext, Result};
use crate::model::Level;
use crate::operation::Driver;

/// Upper ends of the histograms' buckets, in seconds: a freeze lasts milliseconds, and at most
/// 30 s; an application takes longer to be quiesced.
const BUCKETS: [f64; 12] = [
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 120.0,
];

/// Everything that is counted of cuts, since the start.
#[derive(Debug)]
pub struct CutCounts {
    levels: [AtomicU64; 3],
    /// Tries in which an application could not be held still.
    pub quiesce_failed: AtomicU64,
    /// Cuts that were thrown away: a deadline, a guard that died, a stranger's thaw.
    pub lost: AtomicU64,
    /// Tries that ended otherwise.
    pub failed: AtomicU64,
    /// Applications that didn't release by themselves.
    pub release_problems: AtomicU64,
    /// Extents cloned before the freeze.
    pub extents_ahead: AtomicU64,
    /// Extents cloned while writers stood still.
    pub extents_within: AtomicU64,
    /// From the first freeze to the last thaw.
    pub freeze: Histogram,
    /// Until all hooks were ready.
    pub quiesce: Histogram,
    /// Writing back before the freeze.
    pub sync: Histogram,
}

impl Default for CutCounts {
    fn default() -> CutCounts {
        let histogram = || Histogram::new(BUCKETS);
        CutCounts {
            levels: Default::default(),
            quiesce_failed: AtomicU64::default(),
            lost: AtomicU64::default(),
            failed: AtomicU64::default(),
            release_problems: AtomicU64::default(),
            extents_ahead: AtomicU64::default(),
            extents_within: AtomicU64::default(),
            freeze: histogram(),
            quiesce: histogram(),
            sync: histogram(),
        }
    }
}

impl CutCounts {
    /// Cuts that were proven good and reached this level.
    pub fn reached(&self, level: Level) -> u64 {
        self.levels[level as usize].load(Ordering::Relaxed)
    }

    /// Counts one try, and tells what it took.
    pub fn count(&self, attempt: &Result<Outcome>) {
        self.add(attempt);
        let Ok(outcome) = attempt else { return };
        let ms = |time: Option<Duration>| time.map_or(0, |time| time.as_millis() as u64);
        let stats = &outcome.stats;
        if let Some(problem) = &stats.release_problem {
            tracing::warn!(problem, "completed a cut, but released an application late");
        }
        tracing::info!(
            level = %outcome.level,
            reason = %outcome.reason,
            freeze_ms = ms(stats.freeze),
            quiesce_ms = ms(stats.quiesce),
            held_ms = ms(stats.held),
            sync_ms = ms(Some(stats.sync)),
            extents_ahead = stats.extents_ahead,
            extents_within = stats.extents_within,
            "cut"
        );
    }

    fn add(&self, attempt: &Result<Outcome>) {
        let add = |counter: &AtomicU64, more: u64| {
            counter.fetch_add(more, Ordering::Relaxed);
        };
        let outcome = match attempt {
            Ok(outcome) => outcome,
            Err(Error::QuiesceFailed { .. }) => return add(&self.quiesce_failed, 1),
            Err(Error::CutLost { .. }) => return add(&self.lost, 1),
            Err(_) => return add(&self.failed, 1),
        };
        let stats = &outcome.stats;
        add(&self.levels[outcome.level as usize], 1);
        add(&self.extents_ahead, stats.extents_ahead);
        add(&self.extents_within, stats.extents_within);
        add(
            &self.release_problems,
            u64::from(stats.release_problem.is_some()),
        );
        let observe = |histogram: &Histogram, time: Duration| histogram.observe(time.as_secs_f64());
        observe(&self.sync, stats.sync);
        if let Some(time) = stats.freeze {
            observe(&self.freeze, time);
        }
        if let Some(time) = stats.quiesce {
            observe(&self.quiesce, time);
        }
    }
}

impl Driver {
    /// What the cuts have come to.
    pub fn cut_counts(&self) -> &CutCounts {
        &self.cuts
    }

    /// File systems that are journalled as frozen now, by this driver or another one.
    pub fn frozen(&self) -> Result<usize> {
        let journalled = self.seams.freezer.journalled();
        Ok(journalled
            .context(|| "read the freeze journal".into())?
            .len())
    }

    /// Whether the freeze guard answers, or can be started: without it nothing is frozen, and so
    /// no volume in use is cut. Takes a second at most.
    pub fn guard_alive(&self) -> bool {
        self.seams.freezer.ready().is_ok()
    }
}
