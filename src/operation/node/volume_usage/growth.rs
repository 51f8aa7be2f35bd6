//! How many bytes each volume has added to its pool in the last day.
//!
//! This is in memory: after a start it is not known for an hour, and the router keeps what it has.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::{Measured, Moment};
use crate::backend::{Family, LineageBytes};
use crate::model::{PoolId, VolumeId};

/// The least time between two samples.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(3600);
/// Older samples are dropped. It is the time for which a Pool object has samples, too.
const SAMPLE_RETENTION: Duration = Duration::from_secs(24 * 3600);
/// Volumes of a pool that are reported.
const MAX_REPORTED: usize = 10;

/// A volume that has added bytes to its pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrownVolume {
    pub id: VolumeId,
    /// With its snapshots. A lower bound if its blocks are not compared with those of its snapshots.
    pub bytes: u64,
    /// Since when, in seconds since 1970.
    pub since: u64,
}

/// What a volume has added to its pool, less what was freed.
#[derive(Clone, Debug)]
pub(super) struct Growth {
    /// In bytes, since the process has found it.
    total: i128,
    /// The total at earlier times, the oldest first.
    samples: Vec<(Moment, i128)>,
}

impl Growth {
    fn new(since: Moment) -> Growth {
        Growth {
            total: 0,
            samples: vec![(since, 0)],
        }
    }

    fn add(&mut self, bytes: i128, now: Moment) {
        self.total += bytes;
        let age = |at: Instant| now.at.saturating_duration_since(at);
        self.samples
            .retain(|(taken, _)| age(taken.at) <= SAMPLE_RETENTION);
        let last = self.samples.last().map(|(taken, _)| age(taken.at));
        if last.is_none_or(|age| age >= SAMPLE_INTERVAL) {
            self.samples.push((now, self.total));
        }
    }

    fn last_day(&self) -> Option<(u64, u64)> {
        let (since, before) = self.samples.first()?;
        let grown = u64::try_from(self.total - before).ok()?;
        (grown > 0).then_some((grown, since.seconds))
    }
}

/// The growth of the volumes of a lineage, which was measured before or not. What a new volume has of its
/// own was added since its creation.
pub(super) fn continued(
    before: Option<Measured>,
    family: &Family,
    now: Moment,
    bytes: &LineageBytes,
    is_new: impl Fn(u64) -> bool,
) -> BTreeMap<Uuid, Growth> {
    let earlier = |uuid: Uuid| {
        let before = before.as_ref()?;
        let is_same = before.family.volumes.get(&uuid) == family.volumes.get(&uuid);
        let growth = before.growth.get(&uuid).filter(|_| is_same)?;
        Some((growth.clone(), added(before, family, bytes, uuid)))
    };
    let each = family.volumes.iter().map(|(uuid, created_at)| {
        let (mut growth, added) = earlier(*uuid).unwrap_or_else(|| {
            let seconds = match is_new(*created_at) {
                true => *created_at,
                false => now.seconds,
            };
            let own = bytes.volumes.get(uuid).filter(|_| is_new(*created_at));
            let growth = Growth::new(Moment {
                at: now.at,
                seconds,
            });
            (growth, own.map_or(0, |bytes| i128::from(bytes.exclusive)))
        });
        growth.add(added, now);
        (*uuid, growth)
    });
    each.collect()
}

/// The bytes that a volume has added since its lineage was measured.
fn added(before: &Measured, family: &Family, bytes: &LineageBytes, uuid: Uuid) -> i128 {
    let attributed = |bytes: &LineageBytes| Some(*bytes.attributed.as_ref()?.get(&uuid)?);
    let of = |bytes: &LineageBytes| bytes.volumes.get(&uuid).copied().unwrap_or_default();
    let (old, new) = (of(&before.bytes), of(bytes));
    // Blocks of a volume that was deleted are now attributed to others.
    let is_there = |(uuid, at): (&Uuid, &u64)| family.volumes.get(uuid) == Some(at);
    let was_deleted = !before.family.volumes.iter().all(is_there);
    let (old, new) = match (attributed(&before.bytes), attributed(bytes)) {
        (Some(old), Some(new)) if !was_deleted => (old, new),
        (Some(_), Some(_)) => (
            old.exclusive + old.shared + old.snapshots,
            new.exclusive + new.shared + new.snapshots,
        ),
        // What snapshots keep is not known.
        _ => (old.exclusive + old.shared, new.exclusive + new.shared),
    };
    i128::from(new) - i128::from(old)
}

/// The volumes that have added most, the most first.
pub(super) fn most<'a>(
    pool: PoolId,
    all: impl Iterator<Item = (&'a Uuid, &'a Growth)>,
) -> Vec<GrownVolume> {
    let grown = all.filter_map(|(uuid, growth)| {
        let (bytes, since) = growth.last_day()?;
        let id = VolumeId { pool, uuid: *uuid };
        Some(GrownVolume { id, bytes, since })
    });
    let mut grown: Vec<GrownVolume> = grown.collect();
    grown.sort_by_key(|one| (Reverse(one.bytes), one.id.uuid));
    grown.truncate(MAX_REPORTED);
    grown
}
