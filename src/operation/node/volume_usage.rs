//! Numbers of single volumes: their bytes, how these grow, and their last cut. Metrics have them
//! (`--metrics-per-volume`), and a router gets those of each pool.
//!
//! The bytes are measured in the background: those of a lineage again when a cut was made or something of
//! it was created or deleted, otherwise hourly, and with pauses, so that measuring takes a twentieth of the
//! time at most. A scrape, or a query of a router, only reads what is in memory.

pub(in crate::operation) mod growth;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::disk::STATUS_TIMEOUT;
use crate::backend::{Family, Image, LineageBytes, VolumeBytes};
use crate::error::{Error, chain};
use crate::model::{Level, PoolId, VolumeId};
use crate::operation::lock::Key;
use crate::operation::{Driver, Pool, ServingState};
use growth::{GrownVolume, Growth};

/// Volumes that are written to change their numbers without a cut.
const MEASUREMENT_INTERVAL: Duration = Duration::from_secs(3600);
/// After a measurement, the next one waits for this many times as long.
const PAUSE_FACTOR: u32 = 19;

/// What is reported of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeReport {
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
pub(in crate::operation) struct VolumeStatistics(Mutex<HashMap<PoolId, PoolStatistics>>);

/// The blocks of all images of a pool, each counted once, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageUsage {
    /// Those that one volume has, and no other image.
    pub exclusive: u64,
    /// Those that a volume has, and another image, too.
    pub shared: u64,
    /// Those that only snapshots and hidden bases have.
    pub snapshots: u64,
    /// An upper bound of those of images that may share some and were not compared.
    pub undivided: u64,
    /// The number of volumes that were not measured yet.
    pub unmeasured: u64,
    /// When the oldest of these numbers was measured, in seconds since 1970.
    pub measured_at: u64,
    /// The volumes to which most bytes were added in the last day, the most first; `None` before that is
    /// known after a start.
    pub grown: Option<Vec<GrownVolume>>,
}

#[derive(Default)]
struct PoolStatistics {
    /// By lineage.
    measured: BTreeMap<Uuid, Measured>,
    /// By volume and incarnation.
    cuts: BTreeMap<(Uuid, Uuid), LastCut>,
    /// The next measurement does not begin before.
    paused_until: Option<Instant>,
    /// The number of volumes when the volumes to measure were last selected.
    volumes: usize,
    /// When the first pass and the last one began that have ended.
    passes: Option<(Moment, Moment)>,
}

/// A time, by both clocks.
#[derive(Clone, Copy, Debug)]
struct Moment {
    at: Instant,
    /// In seconds since 1970.
    seconds: u64,
}

struct Measured {
    family: Family,
    at: Moment,
    bytes: LineageBytes,
    growth: BTreeMap<Uuid, Growth>,
}

impl PoolStatistics {
    /// Whether a volume that was created at this time did not exist at the first pass.
    fn is_new(&self, created_at: u64) -> bool {
        let first = self.passes.map(|(first, _)| first.seconds);
        first.is_some_and(|first| created_at > first)
    }

    fn insert(&mut self, lineage: Uuid, family: Family, at: Moment, bytes: LineageBytes) {
        let before = self.measured.remove(&lineage);
        let growth = growth::continued(before, &family, at, &bytes, |at| self.is_new(at));
        let measured = Measured {
            family,
            at,
            bytes,
            growth,
        };
        self.measured.insert(lineage, measured);
    }

    /// `None` before anything was measured.
    fn usage(&self, pool: PoolId) -> Option<ImageUsage> {
        let (first, last) = self.passes?;
        let each = self.measured.values();
        let mut usage = ImageUsage {
            measured_at: last.seconds,
            ..ImageUsage::default()
        };
        let mut volumes = 0;
        for measured in each.clone() {
            let bytes = &measured.bytes;
            usage.exclusive += bytes.exclusive;
            usage.shared += bytes.shared;
            usage.snapshots += bytes.snapshots;
            usage.undivided += bytes.undivided;
            usage.measured_at = usage.measured_at.min(measured.at.seconds);
            volumes += bytes.volumes.len();
        }
        usage.unmeasured = self.volumes.saturating_sub(volumes) as u64;
        // By then, everything was measured twice.
        let is_known = last.at.saturating_duration_since(first.at) >= MEASUREMENT_INTERVAL;
        usage.grown = is_known.then(|| {
            let each = each.flat_map(|measured| &measured.growth);
            growth::most(pool, each)
        });
        Some(usage)
    }
}

impl VolumeStatistics {
    fn get(&self) -> MutexGuard<'_, HashMap<PoolId, PoolStatistics>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lineages that are to be measured; `None` if none may be now. Forgets those that are gone.
    fn due(&self, pool: &Pool, now: Instant) -> Option<Vec<(Uuid, Family)>> {
        let mut lineages = pool.backend.lineages();
        let mut all = self.get();
        let numbers = all.entry(pool.id()).or_default();
        let is_there = |lineage: &Uuid| lineages.contains_key(lineage);
        numbers.measured.retain(|lineage, _| is_there(lineage));
        let volumes = lineages.values().map(|family| family.volumes.len());
        numbers.volumes = volumes.sum();
        if numbers.paused_until.is_some_and(|until| now < until) {
            return None;
        }
        lineages.retain(|lineage, family| {
            numbers.measured.get(lineage).is_none_or(|measured| {
                measured.family != *family
                    || now.saturating_duration_since(measured.at.at) >= MEASUREMENT_INTERVAL
            })
        });
        Some(lineages.into_iter().collect())
    }

    /// The blocks of the images of a pool; `None` before they were measured.
    pub(in crate::operation) fn image_usage(&self, pool: PoolId) -> Option<ImageUsage> {
        self.get().get(&pool)?.usage(pool)
    }

    /// Remembers the last cut of each volume, also of snapshots that will be deleted, and forgets those of
    /// deleted volumes.
    fn note_cuts(&self, pool: &Pool) {
        let volumes = pool
            .backend
            .volumes
            .filter_map_ready(|volume| Some(((volume.uuid, volume.incarnation), ())));
        let volumes: BTreeMap<_, _> = volumes.into_iter().collect();
        let cuts = pool.backend.snapshots.filter_map_ready(|snapshot| {
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
            .filter_map_ready(|volume| Some((volume.uuid, volume.incarnation, volume.lineage())));
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
                bytes: measured.and_then(|measured| measured.bytes.volumes.get(&uuid).copied()),
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
        if !self.pools.settings.should_count_blocks() {
            return;
        }
        let Ok(Some(pool)) = self.pools.pool(pool) else {
            return;
        };
        let at = Moment {
            at: now,
            seconds: self.host.now(),
        };
        self.numbers.note_cuts(&pool);
        let Some(due) = self.numbers.due(&pool, now) else {
            return;
        };
        let begun = Instant::now();
        let mut by_size = Vec::new();
        for (lineage, family) in due {
            if !self.can_measure(&pool) {
                return;
            }
            let may_read = |image| self.can_measure(&pool) && !self.is_in_use(image);
            match pool.backend.compare_lineage(&family, &may_read) {
                Ok(Some(bytes)) => {
                    let mut all = self.numbers.get();
                    let numbers = all.entry(pool.id()).or_default();
                    numbers.insert(lineage, family, at, bytes);
                }
                Ok(None) => by_size.push((lineage, family)),
                Err(error) => log_failure(&pool, &error),
            }
        }
        self.estimate(&pool, by_size, at);
        let mut all = self.numbers.get();
        let numbers = all.entry(pool.id()).or_default();
        let first = numbers.passes.map_or(at, |(first, _)| first);
        numbers.passes = Some((first, at));
        numbers.paused_until = Some(now + begun.elapsed() * PAUSE_FACTOR);
    }

    /// Measures lineages by the sizes of their images. If one cannot be read, the others are.
    fn estimate(&self, pool: &Pool, lineages: Vec<(Uuid, Family)>, at: Moment) {
        if lineages.is_empty() {
            return;
        }
        match pool.backend.estimate_lineages(&lineages) {
            Ok(bytes) => {
                let mut all = self.numbers.get();
                let numbers = all.entry(pool.id()).or_default();
                for ((lineage, family), bytes) in lineages.into_iter().zip(bytes) {
                    numbers.insert(lineage, family, at, bytes);
                }
            }
            Err(error) if lineages.len() == 1 => log_failure(pool, &error),
            Err(_) => {
                for one in lineages {
                    self.estimate(pool, vec![one], at);
                }
            }
        }
    }

    /// Whether a pool is still served, and the process is not about to end.
    fn can_measure(&self, pool: &Arc<Pool>) -> bool {
        let serving = self.pools.serving();
        let is_served = serving.iter().any(|one| Arc::ptr_eq(one, pool));
        is_served && !self.pools.in_flight.is_stopping()
    }

    /// Whether a call works on a volume: reading the map of its image would delay a cut.
    fn is_in_use(&self, image: Image) -> bool {
        match image {
            Image::Volume(uuid) => self.pools.locks.is_held(&Key::Volume(uuid)),
            Image::Snapshot(_) => false,
        }
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

/// Logged for developers only: usually an image was deleted at the same time, or is used by a call.
fn log_failure(pool: &Pool, error: &Error) {
    tracing::debug!(pool = %pool.definition.name, error = %chain(error), "failed to measure volumes, will retry");
}

#[cfg(test)]
mod tests;
