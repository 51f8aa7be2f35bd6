//! The copies that run: their number and their rate are limited.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::running::{CopyEntry, CopyOf, RunningCopies};
use super::source::Source;
use crate::error::{Error, Result};
use crate::model::PoolId;
use crate::model::size::MIB;

/// Maximum rate of all copies together that read or write a pool, in bytes per second, unless
/// `--copy-rate` sets another. It is half of what a SATA disk delivers, so that copies never use all
/// of a disk.
const BYTES_PER_SECOND: u64 = 256 * MIB;
/// Maximum number of copies that run in parallel.
pub(super) const MAX_COPIES: usize = 8;
/// Maximum time that a copy waits for other copies before a step.
const MAX_STEP_DELAY: Duration = Duration::from_secs(2);
/// Seconds after which an unfinished copy is forgotten if no call has asked for it since. Sidecars
/// repeat their calls every few minutes at the latest.
const FORGOTTEN_AFTER_SECONDS: u64 = 3600;

/// The copies that run.
#[derive(Debug)]
pub(in crate::operation) struct Copies {
    /// Maximum rate of all copies together that read or write a pool.
    bytes_per_second: u64,
    /// When a call last asked for each unfinished copy, in seconds since 1970, by the volume or
    /// snapshot that is filled.
    asked: Mutex<HashMap<Uuid, u64>>,
    /// The running copies of volumes, by the source volume, with a flag that aborts the copy.
    of: Mutex<HashMap<Uuid, Arc<AtomicBool>>>,
    /// The namespace of each running copy.
    running: Mutex<Vec<Option<String>>>,
    /// When the next step may begin, for each pool.
    paces: Mutex<HashMap<PoolId, Instant>>,
    /// What runs, with its progress.
    pub(super) listed: RunningCopies,
}

/// A running copy. Dropping it removes it from the list.
pub(in crate::operation) struct Copying<'a> {
    copies: &'a Copies,
    /// The namespace for which it runs.
    namespace: Option<String>,
    /// The pools that it reads and writes.
    pools: [PoolId; 2],
    /// The source volume, and whether its copy was aborted.
    of: Option<(Uuid, Arc<AtomicBool>)>,
    entry: CopyEntry<'a>,
}

impl Copies {
    /// No copy runs yet. The rate is in bytes per second.
    pub(super) fn new(rate: Option<u64>) -> Copies {
        Copies {
            bytes_per_second: rate.unwrap_or(BYTES_PER_SECOND),
            asked: Mutex::default(),
            of: Mutex::default(),
            running: Mutex::default(),
            paces: Mutex::default(),
            listed: RunningCopies::default(),
        }
    }

    /// Aborts the copy of a volume that is about to be used. What was copied is worthless.
    pub(in crate::operation) fn cancel(&self, volume: Uuid) {
        let copies = self.of.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ended) = copies.get(&volume) {
            ended.store(true, Ordering::SeqCst);
        }
    }

    /// Records that a call asks for a copy into this volume or snapshot.
    pub(in crate::operation) fn ask(&self, into: Uuid, now: u64) {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.retain(|_, at| now < at.saturating_add(2 * FORGOTTEN_AFTER_SECONDS));
        asked.insert(into, now);
    }

    /// Whether no call has asked for a copy for `FORGOTTEN_AFTER_SECONDS`. If no call has asked
    /// this process for it, that time begins with the first check, because the callers may have
    /// been down as well.
    pub(in crate::operation) fn is_forgotten(&self, into: Uuid, now: u64) -> bool {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let at = *asked.entry(into).or_insert(now);
        now >= at.saturating_add(FORGOTTEN_AFTER_SECONDS)
    }

    /// Adds a copy to those that run. No namespace has more than half of them, so that the claims
    /// of one namespace do not delay those of all others.
    pub(super) fn begin(&self, of: CopyOf, pools: [PoolId; 2]) -> Result<Copying<'_>> {
        let claim = of.claim.as_deref();
        let namespace = claim.and_then(|claim| Some(claim.split_once('/')?.0.to_string()));
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let of_namespace = running.iter().filter(|one| **one == namespace).count();
        let most = if namespace.is_some() {
            MAX_COPIES / 2
        } else {
            MAX_COPIES
        };
        if running.len() >= MAX_COPIES || of_namespace >= most {
            return Err(Error::Pending {
                what: format!("{most} other copies (the limit of this node)"),
            });
        }
        running.push(namespace.clone());
        Ok(Copying {
            copies: self,
            namespace,
            pools,
            of: None,
            entry: self.listed.begin(of),
        })
    }

    /// Records a step of this length, which began at this time. Returns when the next step may begin,
    /// for all copies in these pools together.
    pub(in crate::operation) fn step(
        &self,
        now: Instant,
        pools: [PoolId; 2],
        length: u64,
    ) -> Instant {
        let step = Duration::from_secs_f64(length as f64 / self.bytes_per_second as f64);
        let mut paces = self.paces.lock().unwrap_or_else(PoisonError::into_inner);
        let due = |paces: &HashMap<_, _>, pool| paces.get(pool).copied().unwrap_or(now).max(now);
        let due = due(&paces, &pools[0]).max(due(&paces, &pools[1]));
        // A delay that was not waited for (in simulated time, or by a copy that failed) does not
        // add up.
        let next = (due + step).min(now + MAX_STEP_DELAY);
        paces.extend(pools.map(|pool| (pool, next)));
        next
    }

    /// Whether a volume is being copied.
    pub(in crate::operation) fn has(&self, volume: Uuid) -> bool {
        let copies = self.of.lock().unwrap_or_else(PoisonError::into_inner);
        copies.contains_key(&volume)
    }
}

impl Copying<'_> {
    /// The pools that it reads and writes.
    pub(in crate::operation) fn pools(&self) -> [PoolId; 2] {
        self.pools
    }

    /// Registers the source volume, which is copied only once at a time.
    pub(super) fn reads(&mut self, source: &Source) -> Result<()> {
        let ended = Arc::new(AtomicBool::default());
        let running = &self.copies.of;
        let mut running = running.lock().unwrap_or_else(PoisonError::into_inner);
        if running.contains_key(&source.id.uuid) {
            return Err(Error::Pending {
                what: format!("the copy of volume {}", source.text),
            });
        }
        running.insert(source.id.uuid, ended.clone());
        drop(running);
        self.of = Some((source.id.uuid, ended));
        Ok(())
    }

    /// Its entry in the list of copies.
    pub(super) fn entry(&self) -> &CopyEntry<'_> {
        &self.entry
    }

    /// An error if the volume was used since the copy began, or if the copy is not wanted any more.
    /// It is also checked after the last byte; a use after that does not affect the copy.
    pub(in crate::operation) fn check(&self) -> Result<()> {
        if let Some((volume, ended)) = &self.of
            && ended.load(Ordering::SeqCst)
        {
            return Err(Error::Busy {
                subject: format!("the copy of volume {volume}"),
                holder: "the volume was staged or published, which aborted the copy".into(),
            });
        }
        match self.entry.unwanted() {
            Some(name) => {
                let what = format!("volume {name} (the copy into it is not wanted any more)");
                Err(Error::pending(what))
            }
            None => Ok(()),
        }
    }
}

impl Drop for Copying<'_> {
    fn drop(&mut self) {
        let running = &self.copies.running;
        let mut running = running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = running.iter().position(|one| *one == self.namespace) {
            running.swap_remove(at);
        }
        drop(running);
        if let Some((volume, _)) = &self.of {
            let mut copies = self
                .copies
                .of
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            copies.remove(volume);
        }
    }
}
