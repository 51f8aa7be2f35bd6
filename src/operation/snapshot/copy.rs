//! Copies that cannot share blocks: from one pool to another, and in a pool without reflink. The
//! blocks of thick volumes are written in the same way where nothing else reserves them.
//!
//! A volume is copied only while it is not in use, and never under a freeze: NodeStageVolume aborts
//! the copy. Copies log their progress, have a limited rate, and continue after a restart if the
//! source has not changed.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::plan::Prepared;
use super::remote::{Receiving, SentRange};
use super::source::Source;
use crate::backend::{Image, ImageHandle};
use crate::cut::Use;
use crate::error::{Error, ErrorContext, Result};
use crate::model::pool::WAY_OUT;
use crate::model::size::MIB;
use crate::model::{Level, PoolId, SnapshotId};
use crate::operation::lock::Key;
use crate::operation::pools::capacity::admit_snapshot;
use crate::operation::{CreateSnapshot, Pool, Snapshot, Snapshots};
use crate::record::{CopyProgress, SnapshotState};

/// Bytes of one effect. Between two effects, a copy checks whether it was aborted or the driver
/// stops.
const STEP: u64 = 16 * MIB;
/// Bytes after which the progress is made durable and logged.
const SAVE: u64 = 512 * MIB;
/// Maximum rate of all copies together that read or write a pool, in bytes per second. It is half
/// of what a SATA disk delivers, so that copies never use all of a disk.
const MAX_BYTES_PER_SECOND: u64 = 256 * MIB;
/// Maximum number of copies that run in parallel.
const MAX_COPIES: usize = 8;
/// Maximum time that a copy waits for other copies before a step.
const MAX_STEP_DELAY: Duration = Duration::from_secs(2);

/// The error for a volume that is in use and therefore not copied, with the alternatives.
pub(in crate::operation) fn no_sharing(pool: &Pool, volume_id: &str) -> Error {
    let name = &pool.definition.name;
    let why = if pool.backend.facts.shares_blocks {
        "it is in use, and cloning it into another pool would copy a volume that changes during the copy; take a snapshot and restore it there, or unstage the volume first".to_string()
    } else {
        format!(
            "it is in use, and pool {name} cannot share blocks, so a snapshot or clone would copy a volume that changes during the copy; unstage it first; {WAY_OUT}"
        )
    };
    Error::refused(format!("volume {volume_id}"), why)
}

/// Opens the source of a copy. Returns it with the progress of a copy of it that begins now.
pub(in crate::operation) fn begin_at(
    pool: &Pool,
    image: Image,
) -> Result<(ImageHandle, CopyProgress)> {
    let source = pool
        .backend
        .open_image(image)
        .map_err(Error::into_indeterminate)?;
    let begin = CopyProgress {
        copied: 0,
        source_modified: source.modified(),
        base: None,
    };
    Ok((source, begin))
}

/// What an image is filled from.
pub(in crate::operation) enum Origin<'a> {
    /// An image of this node.
    Image(&'a ImageHandle),
    /// A snapshot that another node sends.
    Remote(Receiving<'a>),
}

impl Origin<'_> {
    pub(in crate::operation) fn bytes(&self) -> u64 {
        match self {
            Origin::Image(image) => image.bytes(),
            Origin::Remote(receiving) => receiving.bytes(),
        }
    }
}

/// The range of an image that is to be filled.
pub(in crate::operation) struct Filling<'a> {
    pub(in crate::operation) image: Image,
    /// What is copied; nothing is copied beyond its end.
    pub(in crate::operation) source: Option<Origin<'a>>,
    pub(in crate::operation) target: &'a ImageHandle,
    /// The blocks of the target are reserved by writing them.
    pub(in crate::operation) reserves: bool,
    pub(in crate::operation) range: Range<u64>,
}

impl Filling<'_> {
    fn verb(&self) -> &'static str {
        match self.source {
            Some(_) => "copy into",
            None => "write all blocks of",
        }
    }

    /// The next step from an offset on.
    fn plan(&mut self, at: u64) -> Result<Step> {
        if let Some(Origin::Remote(receiving)) = &mut self.source
            && let Some(range) = receiving.next_difference(at)?
        {
            return Ok(Step {
                end: range.end(),
                bytes: range.cost(),
                difference: Some(range),
            });
        }
        let bytes = STEP.min(self.range.end - at);
        Ok(Step {
            end: at + bytes,
            bytes,
            difference: None,
        })
    }

    fn perform(&mut self, at: u64, step: &Step) -> Result<()> {
        let (verb, image, length) = (self.verb(), self.image, step.end - at);
        let doing = || format!("{verb} {image}");
        let whole = at..step.end;
        let mut reserved = vec![whole];
        if let Some(source) = &mut self.source
            && at < source.bytes()
        {
            let end = source.bytes().min(at + length);
            match (source, &step.difference) {
                (Origin::Image(source), _) => {
                    let copied = source.copy_to(self.target, at, end - at);
                    copied.context(doing)?;
                }
                (Origin::Remote(receiving), Some(range)) => {
                    reserved = receiving.write_difference(self.target, range, doing)?;
                }
                (Origin::Remote(receiving), None) => {
                    receiving.receive(self.target, at, end, doing)?;
                }
            }
        }
        let mut reserved = reserved.into_iter().filter(|_| self.reserves);
        reserved.try_for_each(|range| {
            let rewritten = self.target.rewrite(range.start, range.end - range.start);
            rewritten.context(doing)
        })
    }
}

/// A step of a copy.
struct Step {
    /// The offset up to which it fills the image.
    end: u64,
    /// Bytes that it copies, for the limit of the rate.
    bytes: u64,
    difference: Option<SentRange>,
}

/// Seconds after which an unfinished copy is forgotten if no call has asked for it since. Sidecars
/// repeat their calls every few minutes at the latest.
const FORGOTTEN_AFTER_SECONDS: u64 = 3600;

/// The copies that run.
#[derive(Debug, Default)]
pub(in crate::operation) struct Copies {
    /// When a call last asked for each unfinished copy, in seconds since 1970, by the volume or
    /// snapshot that is filled.
    asked: Mutex<HashMap<Uuid, u64>>,
    /// The running copies of volumes, by the source volume, with a flag that aborts the copy.
    of: Mutex<HashMap<Uuid, Arc<AtomicBool>>>,
    /// The namespace of each running copy.
    running: Mutex<Vec<Option<String>>>,
    /// When the next step may begin, for each pool.
    paces: Mutex<HashMap<PoolId, Instant>>,
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
}

impl Copies {
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
    fn begin(&self, claim: Option<&str>, pools: [PoolId; 2]) -> Result<Copying<'_>> {
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
        let step = Duration::from_secs_f64(length as f64 / MAX_BYTES_PER_SECOND as f64);
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

    /// An error if the volume was used since the copy began. It is also checked after the last
    /// byte; a use after that does not affect the copy.
    pub(in crate::operation) fn check(&self) -> Result<()> {
        match &self.of {
            Some((volume, ended)) if ended.load(Ordering::SeqCst) => Err(Error::Busy {
                subject: format!("the copy of volume {volume}"),
                holder: "the volume was staged or published, which aborted the copy".into(),
            }),
            Some(_) | None => Ok(()),
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

impl Snapshots {
    /// Registers a copy for a claim. A source volume must not be in use, and must be unchanged
    /// since the plan.
    pub(in crate::operation) fn begin_copy(
        &self,
        of: Option<&Source>,
        claim: Option<&str>,
        pools: [PoolId; 2],
    ) -> Result<Copying<'_>> {
        let mut copying = self.copies.begin(claim, pools)?;
        let Some(source) = of else {
            return Ok(copying);
        };
        let _lock = self.pools.locks.acquire(Key::Volume(source.id.uuid))?;
        self.check_unchanged(source)?;
        if self.use_of(source).map_err(Error::into_indeterminate)? != Use::Quiet
            || self.usage.staged_as_block(&source.record)?.is_some()
        {
            return Err(no_sharing(&source.pool, &source.text));
        }
        let ended = Arc::new(AtomicBool::default());
        let mut running = self
            .copies
            .of
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if running.contains_key(&source.id.uuid) {
            return Err(Error::Pending {
                what: format!("the copy of volume {}", source.text),
            });
        }
        running.insert(source.id.uuid, ended.clone());
        drop(running);
        copying.of = Some((source.id.uuid, ended));
        Ok(copying)
    }

    /// Fills a range of an image at a bounded rate, durably at the end. `save` records durably how
    /// far the image is filled; it is called once that much of it is durable.
    pub(in crate::operation) fn fill(
        &self,
        copying: &Copying<'_>,
        mut filling: Filling<'_>,
        mut save: impl FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        let (verb, image) = (filling.verb(), filling.image);
        let doing = || format!("{verb} {image}");
        let (mut at, end) = (filling.range.start, filling.range.end);
        let mut unsaved = 0;
        // Why the copy ends before its end; what was copied stays for a repeat.
        let mut ending = None;
        while at < end {
            copying.check()?;
            if self.pools.in_flight.is_stopping() {
                ending = Some(Error::Stopping);
            }
            if ending.is_some() || unsaved >= SAVE {
                filling.target.sync().context(doing)?;
                save(at)?;
                unsaved = 0;
                tracing::info!(destination = %filling.image, copied = at, of = end, "{}", match filling.source { Some(_) => "copying", None => "writing all blocks" });
            }
            if let Some(ending) = ending {
                return Err(ending);
            }
            let begun = Instant::now();
            let done = filling.plan(at).and_then(|step| {
                let next = self.copies.step(begun, copying.pools, step.bytes);
                filling.perform(at, &step)?;
                Ok((step, next))
            });
            let (step, next) = match done {
                Err(error @ Error::Unreachable { .. }) => {
                    ending = Some(error);
                    continue;
                }
                done => done?,
            };
            at = step.end;
            unsaved += step.bytes;
            self.copied.fetch_add(step.bytes, Ordering::Relaxed);
            self.host
                .pause(next.saturating_duration_since(Instant::now()));
        }
        filling.target.sync().context(doing)?;
        copying.check()
    }

    /// Creates a snapshot in a pool that cannot share blocks: a copy, while the volume is not in
    /// use.
    pub(in crate::operation) fn copy_snapshot(
        &self,
        request: &CreateSnapshot,
        source: &Source,
        id: SnapshotId,
    ) -> Result<Snapshot> {
        let pool = &source.pool;
        self.copies.ask(id.uuid, self.host.now());
        let claim = source.record.claim.as_deref();
        let copying = self.begin_copy(Some(source), claim, [pool.id(), pool.id()])?;
        let (from_image, begin) = begin_at(pool, Image::Volume(source.id.uuid))?;
        let begun = pool.backend.snapshots.get(id.uuid)?.filter(|begun| {
            begun.source_incarnation == source.record.incarnation
                && begun.size == source.record.size
                && begun
                    .copy
                    .is_some_and(|copy| copy.source_modified == begin.source_modified)
                // If that is unknown, opening it fails.
                && pool.backend.has_image(Image::Snapshot(id.uuid)).unwrap_or(true)
        });
        let mut record = match begun {
            Some(begun) => begun,
            None => {
                let attempt = self.host.random_uuid();
                let mut record = self.plan_snapshot(source, id, &request.name, attempt);
                record.copy = Some(begin);
                let ended = pool.backend.snapshots.delete_unanswered(id.uuid);
                ended.map_err(Error::into_indeterminate)?;
                pool.backend
                    .prepare_snapshot(&record, &|space| admit_snapshot(pool, space, &record))?;
                record
            }
        };
        record.promised = Some(request.parameters.least());
        let image = Image::Snapshot(id.uuid);
        let from = record.copy.unwrap_or(begin);
        let copied = pool.backend.open_image(image).and_then(|target| {
            let filling = Filling {
                image,
                source: Some(Origin::Image(&from_image)),
                target: &target,
                reserves: false,
                range: from.copied..from_image.bytes(),
            };
            self.fill(&copying, filling, |copied| {
                record.copy = Some(CopyProgress { copied, ..from });
                pool.backend.update_snapshot(&record)
            })
        });
        let committed = copied.and_then(|()| {
            pool.backend.snapshots.sync_image(id.uuid)?;
            record.copy = None;
            record.level = Level::Filesystem;
            record.reason = "a copy of a volume that was not in use".into();
            record.cut_at = self.host.now_nanos();
            record.state = SnapshotState::Ready;
            pool.backend.update_snapshot(&record)
        });
        match committed {
            Ok(()) => Ok(self.pools.snapshot(pool, &record)),
            Err(Error::Stopping) => Err(Error::Stopping),
            Err(first) => {
                let made = [Prepared {
                    pool: pool.clone(),
                    record,
                }];
                Err(self.undo_snapshots(&made, first))
            }
        }
    }

    /// Bytes copied since the start.
    pub fn copied(&self) -> u64 {
        self.copied.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests;
