//! Copies that cannot share blocks: from one pool to another, and in a pool without reflink. The
//! blocks of thick volumes are written in the same way where nothing else reserves them.
//!
//! A volume is copied only while it is not in use, and never under a freeze: NodeStageVolume aborts
//! the copy. Copies log their progress, have a limited rate, and continue after a restart if the
//! source has not changed. For a volume in a thin pool this is unknown, so its copy starts again.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::copies::Copying;
use super::plan::PreparedSnapshot;
use super::remote::{Receiving, SnapshotRange};
use super::running::{CopyKind, CopyOf, CopyStatus};
use super::source::Source;
use crate::backend::{Image, ImageHandle};
use crate::cut::Use;
use crate::error::{Error, ErrorContext, Result};
use crate::model::pool::SHARING_ADVICE;
use crate::model::size::MIB;
use crate::model::{Level, PoolId, SnapshotId};
use crate::operation::lock::Key;
use crate::operation::pools::capacity::admit_snapshot;
use crate::operation::{CreateSnapshot, Pool, Snapshot, Snapshots};
use crate::record::{CopyProgress, SnapshotState};

/// Bytes of one effect. Between two effects, a copy checks whether it was aborted or the driver
/// stops.
const STEP_BYTES: u64 = 16 * MIB;
/// Bytes after which the progress is made durable and logged.
const SAVE_INTERVAL_BYTES: u64 = 512 * MIB;

/// The error for a volume that is in use and therefore not copied, with the alternatives.
pub(in crate::operation) fn no_sharing(pool: &Pool, volume_id: &str) -> Error {
    let name = &pool.definition.name;
    let why = if pool.backend.facts.shares_blocks {
        "it is in use, and cloning it into another pool would copy a volume that changes during the copy; take a snapshot and restore it there, or unstage the volume first".to_string()
    } else {
        format!(
            "it is in use, and pool {name} cannot share blocks, so a snapshot or clone would copy a volume that changes during the copy; unstage it first; {SHARING_ADVICE}"
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
        let bytes = STEP_BYTES.min(self.range.end - at);
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

/// The copy of a volume that becomes a snapshot.
fn full_copy(source: &Source, id: SnapshotId) -> CopyOf {
    CopyOf {
        kind: CopyKind::Snapshot,
        id,
        name: String::new(),
        claim: source.record.claim.clone(),
        source_node: None,
    }
}

/// A step of a copy.
struct Step {
    /// The offset up to which it fills the image.
    end: u64,
    /// Bytes that it copies, for the limit of the rate.
    bytes: u64,
    difference: Option<SnapshotRange>,
}

impl Snapshots {
    /// Registers a copy. A source volume must not be in use, and must be unchanged since the plan.
    pub(in crate::operation) fn begin_copy(
        &self,
        of: CopyOf,
        source: Option<&Source>,
        pools: [PoolId; 2],
    ) -> Result<Copying<'_>> {
        let mut copying = self.copies.begin(of, pools)?;
        let Some(source) = source else {
            return Ok(copying);
        };
        let _lock = self.pools.locks.acquire(Key::Volume(source.id.uuid))?;
        self.check_unchanged(source)?;
        if self.use_of(source).map_err(Error::into_indeterminate)? != Use::Unused
            || self.usage.staged_as_block(&source.record)?.is_some()
        {
            return Err(no_sharing(&source.pool, &source.text));
        }
        copying.reads(source)?;
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
        copying.entry().starts(at, end);
        // Why the copy ends before its end; what was copied stays for a repeat.
        let mut ending = None;
        while at < end {
            copying.check()?;
            if self.pools.in_flight.is_stopping() {
                ending = Some(Error::Stopping);
            }
            if ending.is_some() || unsaved >= SAVE_INTERVAL_BYTES {
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
                let next = self.copies.step(begun, copying.pools(), step.bytes);
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
            copying.entry().reached(at);
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
        let copying = self.begin_copy(full_copy(source, id), Some(source), [pool.id(); 2])?;
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
                (record.copy, record.for_clone) = (Some(begin), request.parameters.for_clone);
                let ended = pool.backend.snapshots.delete_unanswered(id.uuid);
                ended.map_err(Error::into_indeterminate)?;
                pool.backend
                    .prepare_snapshot(&record, &|space| admit_snapshot(pool, space, &record))?;
                record
            }
        };
        record.min_level = Some(request.parameters.least());
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
                let made = [PreparedSnapshot {
                    pool: pool.clone(),
                    record,
                }];
                Err(self.undo_snapshots(&made, None, first))
            }
        }
    }

    /// Stops a copy into the volume of this name, which deletes what was copied.
    pub fn stop_copy(&self, name: &str) {
        self.copies.listed.end(name);
    }

    /// The copies that run, the oldest first.
    pub fn copies(&self) -> Vec<CopyStatus> {
        self.copies.listed.list()
    }

    /// Bytes received from other nodes since the start.
    pub fn received(&self) -> u64 {
        self.received_bytes.load(Ordering::Relaxed)
    }

    /// Bytes copied since the start.
    pub fn copied(&self) -> u64 {
        self.copied.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests;
