//! Numbers of single volumes for metrics (`--metrics-per-volume`): their bytes, and their last cut.
//!
//! The bytes are measured in the background: those of a lineage again when a cut was made or something of
//! it was created or deleted, otherwise hourly, and with pauses, so that measuring takes a twentieth of the
//! time at most. A scrape only reads what is in memory.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::pool_status::STATUS_TIMEOUT;
use crate::backend::{Family, VolumeBytes};
use crate::error::chain;
use crate::model::{Level, PoolId, VolumeId};
use crate::operation::{Driver, Pool, ServingState};

/// Volumes that are written to change their numbers without a cut.
const MEASURING_INTERVAL: Duration = Duration::from_secs(3600);
/// After a measurement, the next one waits for this many times as long.
const PAUSE_FACTOR: u32 = 19;

/// What is reported of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeReport {
    /// Its ID.
    pub id: VolumeId,
    /// The name of its pool in the configuration.
    pub pool: String,
    /// Its bytes; `None` before they were measured.
    pub bytes: Option<VolumeBytes>,
    /// The last cut, if one is known: snapshots that were deleted before the start of the process are not.
    pub last_cut: Option<LastCut>,
}

/// A cut of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastCut {
    /// In nanoseconds since 1970.
    pub at: u64,
    /// The consistency level that it reached.
    pub level: Level,
}

/// What is known of the volumes of all pools.
#[derive(Default)]
pub(in crate::operation) struct VolumeNumbers(Mutex<HashMap<PoolId, PoolNumbers>>);

#[derive(Default)]
struct PoolNumbers {
    /// By lineage.
    measured: BTreeMap<Uuid, Measured>,
    /// By volume and incarnation.
    cuts: BTreeMap<(Uuid, Uuid), LastCut>,
    /// The next measurement does not begin before.
    paused_until: Option<Instant>,
}

struct Measured {
    family: Family,
    at: Instant,
    bytes: BTreeMap<Uuid, VolumeBytes>,
}

impl VolumeNumbers {
    fn get(&self) -> MutexGuard<'_, HashMap<PoolId, PoolNumbers>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The families that are to be measured, if any may be now. Forgets those that are gone.
    fn due(&self, pool: &Pool, now: Instant) -> Vec<(Uuid, Family)> {
        let mut families = pool.backend.families();
        let mut all = self.get();
        let numbers = all.entry(pool.id()).or_default();
        let is_there = |lineage: &Uuid| families.contains_key(lineage);
        numbers.measured.retain(|lineage, _| is_there(lineage));
        if numbers.paused_until.is_some_and(|until| now < until) {
            return Vec::new();
        }
        families.retain(|lineage, family| {
            numbers.measured.get(lineage).is_none_or(|measured| {
                measured.family != *family
                    || now.saturating_duration_since(measured.at) >= MEASURING_INTERVAL
            })
        });
        families.into_iter().collect()
    }

    /// Remembers the last cut of each volume, also of snapshots that will be deleted, and forgets those of
    /// deleted volumes.
    fn note_cuts(&self, pool: &Pool) {
        let volumes = pool
            .backend
            .volumes
            .find_ready(|volume| Some(((volume.uuid, volume.incarnation), ())));
        let volumes: BTreeMap<_, _> = volumes.into_iter().collect();
        let cuts = pool.backend.snapshots.find_ready(|snapshot| {
            let cut = LastCut {
                at: snapshot.cut_at,
                level: snapshot.level,
            };
            let of = (snapshot.source, snapshot.source_incarnation);
            (snapshot.cut_at > 0).then_some((of, cut))
        });
        let mut all = self.get();
        let known = &mut all.entry(pool.id()).or_default().cuts;
        known.retain(|volume, _| volumes.contains_key(volume));
        for (volume, cut) in cuts {
            if volumes.contains_key(&volume) {
                let last = known.entry(volume).or_insert(cut);
                if last.at <= cut.at {
                    *last = cut;
                }
            }
        }
    }

    /// What is known of the volumes that a pool has now.
    fn usage(&self, pool: &Pool) -> Vec<VolumeReport> {
        self.note_cuts(pool);
        let volumes = pool
            .backend
            .volumes
            .find_ready(|volume| Some((volume.uuid, volume.incarnation, volume.lineage())));
        let mut all = self.get();
        let numbers = all.entry(pool.id()).or_default();
        let usage = volumes.into_iter().map(|(uuid, incarnation, lineage)| {
            let measured = numbers.measured.get(&lineage);
            VolumeReport {
                id: VolumeId {
                    pool: pool.id(),
                    uuid,
                },
                pool: pool.definition.name.clone(),
                bytes: measured.and_then(|measured| measured.bytes.get(&uuid).copied()),
                last_cut: numbers.cuts.get(&(uuid, incarnation)).copied(),
            }
        });
        usage.collect()
    }
}

impl Driver {
    /// Measures the volumes of a pool for which that is due, one lineage after the other. It changes
    /// nothing, and waits only for the disk of this pool.
    pub fn measure_volumes(&self, pool: PoolId) {
        self.measure_volumes_at(pool, Instant::now());
    }

    pub(in crate::operation) fn measure_volumes_at(&self, pool: PoolId, now: Instant) {
        if !self.pools.settings.metrics_per_volume {
            return;
        }
        let Ok(Some(pool)) = self.pools.pool(pool) else {
            return;
        };
        self.numbers.note_cuts(&pool);
        let due = self.numbers.due(&pool, now);
        if due.is_empty() {
            return;
        }
        let begun = Instant::now();
        for (lineage, family) in due {
            if self.pools.in_flight.is_stopping() {
                return;
            }
            match pool.backend.measure_family(&family) {
                Ok(bytes) => {
                    let measured = Measured {
                        family,
                        at: now,
                        bytes,
                    };
                    let mut all = self.numbers.get();
                    let numbers = all.entry(pool.id()).or_default();
                    numbers.measured.insert(lineage, measured);
                }
                // Usually one of its images was deleted at the same time.
                Err(error) => {
                    tracing::debug!(pool = %pool.definition.name, error = %chain(&error), "failed to measure volumes, will retry");
                }
            }
        }
        let until = now + begun.elapsed() * PAUSE_FACTOR;
        let mut all = self.numbers.get();
        all.entry(pool.id()).or_default().paused_until = Some(until);
    }

    /// The numbers of all volumes of served pools, from memory; `None` unless `--metrics-per-volume` is given.
    /// A pool whose disk hangs delays the result by [`STATUS_TIMEOUT`] at most, and is left out.
    pub fn volume_usage(&self) -> Option<Vec<VolumeReport>> {
        if !self.pools.settings.metrics_per_volume {
            return None;
        }
        let mut found = Vec::new();
        for state in self.pools.states() {
            let ServingState::Serving(pool) = state else {
                continue;
            };
            let numbers = Arc::clone(&self.numbers);
            let about = ("volumes", pool.definition.name.clone());
            let look = move || numbers.usage(&pool);
            let usage = self.questions.ask(about, STATUS_TIMEOUT, look);
            found.extend(usage.unwrap_or_default());
        }
        Some(found)
    }
}

#[cfg(test)]
mod tests;
