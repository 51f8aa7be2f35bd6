//! Counters and histograms of the cuts of this process, for metrics and logs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::metrics::histogram::Histogram;

use crate::cut::Outcome;
use crate::error::{Error, ErrorContext, Result};
use crate::host::freezer::JournaledFreeze;
use crate::model::Level;
use crate::operation::Snapshots;

/// A freeze that lasts for this number of seconds is reported. A cut takes milliseconds.
const LONG_FREEZE_SECONDS: u64 = 10;

/// Upper bounds of the buckets of the histograms, in seconds. A freeze lasts milliseconds, and at
/// most 30 s; quiescing an application takes longer.
const BUCKETS: [f64; 12] = [
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 120.0,
];

/// A volume whose file system has been frozen for longer than a cut takes. Times are seconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LongFreeze {
    pub volume_id: String,
    pub since: u64,
    /// When the guard thaws at the latest.
    pub until: u64,
    /// Whether its owner is alive and holds it.
    pub held: bool,
}

/// The counters and histograms of cuts since the start.
#[derive(Debug)]
pub struct CutCounts {
    levels: [AtomicU64; 3],
    /// Attempts in which an application could not be quiesced.
    pub quiesce_failed: AtomicU64,
    /// Cuts that were discarded: the deadline passed, the guard died, or another program thawed.
    pub lost: AtomicU64,
    /// Attempts that failed for another reason.
    pub failed: AtomicU64,
    /// Applications that did not release by themselves.
    pub release_problems: AtomicU64,
    /// Extents cloned before the freeze.
    pub extents_ahead: AtomicU64,
    /// Extents cloned while writers were blocked.
    pub extents_within: AtomicU64,
    /// Time from the first freeze to the last thaw.
    pub freeze: Histogram,
    /// Time until all hooks were ready.
    pub quiesce: Histogram,
    /// Time of the write-backs before the freeze.
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
    /// Number of cuts that were proven to be good and reached this level.
    pub fn reached(&self, level: Level) -> u64 {
        self.levels[level as usize].load(Ordering::Relaxed)
    }

    /// Counts one attempt, and logs its durations and numbers.
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

impl Snapshots {
    /// The counters and histograms of cuts.
    pub fn cut_counts(&self) -> &CutCounts {
        &self.cuts
    }

    /// Number of file systems that are frozen now according to the freeze journal, by this driver
    /// or another one.
    pub fn frozen(&self) -> Result<usize> {
        let journaled = self.interfaces.freezer.list_journaled();
        Ok(journaled
            .context(|| "read the freeze journal".into())?
            .len())
    }

    /// File systems that have been frozen for longer than a cut takes, by the freeze journal.
    pub fn long_freezes(&self) -> Result<Vec<LongFreeze>> {
        let journaled = self.interfaces.freezer.list_journaled();
        let journaled = journaled.context(|| "read the freeze journal".into())?;
        Ok(lasting(journaled, self.host.now()))
    }

    /// Whether the freeze guard replies, or can be started. Without it nothing is frozen, so no
    /// volume in use is cut. Takes a second at most.
    pub fn guard_alive(&self) -> bool {
        self.interfaces.freezer.ready(false).is_ok()
    }
}

/// Those that began at least [`LONG_FREEZE_SECONDS`] before `now`, or whose deadline is over.
fn lasting(journaled: Vec<JournaledFreeze>, now: u64) -> Vec<LongFreeze> {
    let is_long = |one: &JournaledFreeze| {
        one.freezing && (now.saturating_sub(one.since) >= LONG_FREEZE_SECONDS || now > one.until)
    };
    let long = journaled.into_iter().filter(is_long);
    long.map(|one| LongFreeze {
        volume_id: one.volume_id,
        since: one.since,
        until: one.until,
        held: one.held,
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_freeze_is_long_ten_seconds_after_it_began_or_at_its_deadline() {
        let journaled = |volume: &str, since: u64, until: u64, freezing: bool| JournaledFreeze {
            volume_id: volume.into(),
            device: "/dev/loop7".into(),
            owner: 12,
            since,
            until,
            freezing,
            held: true,
            mapped: None,
        };
        let all = vec![
            journaled("new", 91, 120, true),
            journaled("long", 90, 120, true),
            journaled("late", 95, 99, true),
            journaled("prepared", 10, 20, false),
            // The clock of the node was set back.
            journaled("future", 200, 210, true),
        ];
        let found = lasting(all, 100).into_iter().map(|one| one.volume_id);
        assert_eq!(found.collect::<Vec<_>>(), ["long", "late"]);
    }
}
