//! What was used of a pool in the last day, in the status of its object, and when it will be full at
//! that rate.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

/// The least time between two samples.
const SAMPLE_INTERVAL: SignedDuration = SignedDuration::from_hours(1);
/// Older samples are dropped. It is the time in which most loads repeat.
const SAMPLE_RETENTION: SignedDuration = SignedDuration::from_hours(24);
/// A time that is further away says nothing.
const MAX_AHEAD: SignedDuration = SignedDuration::from_hours(90 * 24);

/// What was used of a pool at some time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UsageSample {
    /// When.
    pub time: Time,
    /// Bytes that were not free.
    pub used_bytes: i64,
}

/// The samples of the last day, with a new one if the last is an hour old. Those of a pool of which it is
/// not known what is used stay as they are.
pub(super) fn sampled(
    samples: &[UsageSample],
    now: Time,
    used_bytes: Option<i64>,
) -> Vec<UsageSample> {
    let Some(used_bytes) = used_bytes else {
        return samples.to_vec();
    };
    // A clock that was wrong has left samples of the future.
    let is_kept = |sample: &&UsageSample| {
        let age = now.0.duration_since(sample.time.0);
        age <= SAMPLE_RETENTION && age >= SignedDuration::ZERO
    };
    let mut kept: Vec<_> = samples.iter().filter(is_kept).cloned().collect();
    let last = kept.last().map(|last| now.0.duration_since(last.time.0));
    if last.is_none_or(|age| age >= SAMPLE_INTERVAL) {
        let time = now;
        kept.push(UsageSample { time, used_bytes });
    }
    kept
}

/// When a pool is full, if it fills as it did since the oldest sample: `None` if it did not fill, if
/// that is less than an hour, or if it takes longer than 90 days.
pub(super) fn full_at(
    samples: &[UsageSample],
    now: Timestamp,
    used_bytes: i64,
    available_bytes: i64,
) -> Option<Timestamp> {
    let first = samples.first()?;
    let time = now.duration_since(first.time.0);
    let grown = used_bytes.checked_sub(first.used_bytes)?;
    if time < SAMPLE_INTERVAL || grown <= 0 || available_bytes < 0 {
        return None;
    }
    let seconds = i128::from(available_bytes) * i128::from(time.as_secs()) / i128::from(grown);
    let ahead = SignedDuration::from_secs(i64::try_from(seconds).ok()?);
    (ahead <= MAX_AHEAD).then(|| now.checked_add(ahead).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: i64 = 1 << 30;

    fn at(minutes: i64) -> Timestamp {
        Timestamp::from_second(1_700_000_000 + minutes * 60).unwrap()
    }

    #[test]
    fn a_day_has_at_most_25_samples_an_hour_apart() {
        let mut samples = Vec::new();
        for minute in 0..3 * 24 * 60 {
            samples = sampled(&samples, Time(at(minute)), Some(minute));
            assert!(samples.len() <= 25);
        }
        assert_eq!(samples.len(), 24);
        for pair in samples.windows(2) {
            assert_eq!(
                pair[1].time.0.duration_since(pair[0].time.0),
                SAMPLE_INTERVAL
            );
        }
        assert!(at(3 * 24 * 60).duration_since(samples[0].time.0) <= SAMPLE_RETENTION);
    }

    #[test]
    fn samples_of_the_future_are_dropped() {
        let wrong = sampled(&[], Time(at(10_000)), Some(1));
        let samples = sampled(&wrong, Time(at(0)), Some(2));
        assert_eq!(samples.len(), 1);
        assert_eq!(samples[0].used_bytes, 2);
    }

    #[test]
    fn a_pool_is_full_at_the_rate_of_the_samples() {
        let samples = sampled(&[], Time(at(0)), Some(10 * GIB));
        let full = |minutes, used, free| full_at(&samples, at(minutes), used * GIB, free * GIB);
        // 2 GiB in two hours, and 6 are free.
        assert_eq!(full(120, 12, 6), Some(at(120 + 360)));
        assert_eq!(full(120, 12, 0), Some(at(120)));
        assert_eq!(full(59, 12, 6), None, "less than an hour");
        assert_eq!(full(120, 10, 6), None, "it does not fill");
        assert_eq!(full(120, 9, 6), None, "it becomes emptier");
        assert_eq!(full(60, 11, 24 * 90 + 1), None, "in more than 90 days");
        assert_eq!(full_at(&[], at(0), GIB, GIB), None);
        assert_eq!(full_at(&samples, at(60), i64::MAX, i64::MAX), Some(at(120)));
        assert_eq!(full_at(&samples, at(60), i64::MIN, 1), None);
    }
}
