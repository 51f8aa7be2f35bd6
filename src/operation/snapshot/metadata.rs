//! GetMetadataAllocated, GetMetadataDelta: which blocks of a snapshot are allocated, or differ from
//! those of another snapshot.
//!
//! Two snapshots of a volume share the blocks that were not overwritten between them, so ranges at
//! the same place on the disk have the same content. Nothing writes to a snapshot, and while both
//! snapshots exist, none of their blocks can be reused for other content. Only the file system of
//! the pool may move blocks (a balance of btrfs). So the extent maps are read again after the
//! comparison, and it counts only if neither has changed: then both were valid at the same moment.
//! More than what differs may be reported, never less.

use std::sync::Arc;

use crate::backend::{Image, ImageHandle};
use crate::error::{Error, ErrorContext, Result};
use crate::host::Extent;
use crate::host::difference::Differences;
use crate::model::SnapshotId;
use crate::operation::{GetMetadata, MetadataOf, MetadataPage, Pool, Snapshots};
use crate::record::SnapshotRecord;

/// Ranges begin and end at multiples of this, or at the end of the volume. In bytes.
pub(super) const RANGE_ALIGNMENT_BYTES: u64 = 4096;
/// Maximum number of extents of a map that one step reads: a few MiB, and some ten milliseconds.
const EXTENTS_PER_STEP: usize = 16 << 10;
/// Maximum number of steps of one page, so that a reply takes less than a second even where nothing
/// differs.
const STEPS_PER_PAGE: usize = 8;
/// How often a step is tried if blocks are moved while it runs.
const MAX_ATTEMPTS: usize = 5;

/// A snapshot that is compared, with its open image.
pub(super) struct Side {
    pub(super) record: SnapshotRecord,
    pub(super) image: ImageHandle,
}

impl Snapshots {
    /// One page of either call. A page may have no ranges and still have a next page. This changes
    /// nothing.
    pub fn snapshot_metadata(&self, request: &GetMetadata) -> Result<MetadataPage> {
        let target = side(self.pools.get_snapshot(&request.snapshot_id)?)?;
        let base = request
            .base_snapshot_id
            .as_ref()
            .map(|id| side(self.pools.get_snapshot_or_base(id)?))
            .transpose()?;
        if let Some(base) = &base {
            same_volume(request, base, &target)?;
        }
        let of = MetadataOf {
            base: base.as_ref().map(|base| base.record.incarnation),
            target: target.record.incarnation,
        };
        if request.of.is_some_and(|before| before != of) {
            return Err(gone(request));
        }
        let capacity = target.record.size;
        if request.starting_offset > capacity {
            return Err(Error::OutOfRange {
                field: "starting_offset".into(),
                problem: format!(
                    "{} is beyond the end of the volume, {capacity}",
                    request.starting_offset
                ),
            });
        }
        let mut walk = Walk::new(request.starting_offset, capacity);
        let most = request.max_results.max(1);
        for _ in 0..STEPS_PER_PAGE {
            if walk.at >= walk.end || walk.ranges.len() > most {
                break;
            }
            walk.step(base.as_ref(), &target)?;
        }
        // Both snapshots must have existed all the time. A deleted one may have been created again
        // under the same name, and then has the same ID.
        self.still_there(request, of)?;
        Ok(walk.page(request.starting_offset, most, of))
    }

    /// The number of bytes in which a snapshot may differ from another one of its volume.
    pub(in crate::operation) fn changed_bytes(&self, base: &str, snapshot: &str) -> Result<u64> {
        let mut request = GetMetadata {
            base_snapshot_id: Some(base.to_string()),
            snapshot_id: snapshot.to_string(),
            starting_offset: 0,
            max_results: EXTENTS_PER_STEP,
            of: None,
        };
        let mut bytes = 0;
        loop {
            let page = self.snapshot_metadata(&request)?;
            bytes += page.ranges.iter().map(|(_, length)| length).sum::<u64>();
            let Some(next) = page.next else {
                return Ok(bytes);
            };
            (request.starting_offset, request.of) = (next, Some(page.of));
        }
    }

    fn still_there(&self, request: &GetMetadata, of: MetadataOf) -> Result<()> {
        let base = |id: &str| Ok::<_, Error>(self.pools.get_snapshot_or_base(id)?.2.incarnation);
        let base = request.base_snapshot_id.as_deref().map(base).transpose()?;
        let target = self.pools.get_snapshot(&request.snapshot_id)?.2.incarnation;
        if (MetadataOf { base, target }) == of {
            Ok(())
        } else {
            Err(gone(request))
        }
    }
}

fn side((pool, id, record): (Arc<Pool>, SnapshotId, SnapshotRecord)) -> Result<Side> {
    let image = pool.backend.open_image(Image::Snapshot(id.uuid))?;
    Ok(Side { record, image })
}

fn extents(side: &Side, from: u64) -> Result<Vec<Extent>> {
    let found = side.image.extents(from, EXTENTS_PER_STEP);
    found.context(|| format!("read the extent map of snapshot {}", side.record.uuid))
}

/// Whether two snapshots are snapshots of one volume. UUIDs of different pools never collide, because
/// the UUID of the pool is part of their derivation.
pub(super) fn are_of_one_volume(one: &SnapshotRecord, other: &SnapshotRecord) -> bool {
    let volume = |record: &SnapshotRecord| (record.source, record.source_incarnation);
    volume(one) == volume(other)
}

fn same_volume(request: &GetMetadata, base: &Side, target: &Side) -> Result<()> {
    if are_of_one_volume(&base.record, &target.record) {
        return Ok(());
    }
    Err(Error::invalid(
        "base_snapshot_id",
        format!(
            "{} is a snapshot of another volume than {}; give two snapshots of the same volume, or back up all allocated blocks",
            request.base_snapshot_id.as_deref().unwrap_or_default(),
            request.snapshot_id
        ),
    ))
}

/// The error for snapshots that were deleted during the call.
fn gone(request: &GetMetadata) -> Error {
    Error::Pending {
        what: format!(
            "snapshot {} (it or its base was deleted and recreated)",
            request.snapshot_id
        ),
    }
}

/// Ranges, and the offset up to which they are complete.
type Known = (Vec<(u64, u64)>, u64);

/// The offset up to which a read of a map is complete: if the read reached its limit, the end of
/// its last extent.
fn horizon(runs: &[Extent], end: u64) -> u64 {
    match runs.last() {
        Some(last) if runs.len() >= EXTENTS_PER_STEP => {
            last.logical.saturating_add(last.length).min(end)
        }
        Some(_) | None => end,
    }
}

fn differing(base: &[Extent], target: &[Extent], from: u64, end: u64) -> Known {
    let end = horizon(base, horizon(target, end));
    let runs = |runs: &[Extent]| {
        let runs: Vec<_> = runs.to_vec();
        runs.into_iter().map(Ok::<_, std::convert::Infallible>)
    };
    let ranges = Differences::new(runs(base), runs(target), from, end)
        .flatten()
        .collect();
    (ranges, end)
}

/// The ranges that were written. Holes and unwritten extents read as zeros.
fn allocated(runs: &[Extent], from: u64, end: u64) -> Known {
    let end = horizon(runs, end);
    let ranges = runs
        .iter()
        .filter(|run| !run.unwritten)
        .map(|run| {
            let last = run.logical.saturating_add(run.length);
            (run.logical.max(from), last.min(end))
        })
        .filter(|(start, end)| start < end)
        .collect();
    (ranges, end)
}

/// A comparison that has reached an offset.
pub(super) struct Walk {
    pub(super) at: u64,
    pub(super) end: u64,
    /// Start and end of each range, in bytes. Adjacent ranges are merged.
    pub(super) ranges: Vec<(u64, u64)>,
}

impl Walk {
    pub(super) fn new(from: u64, end: u64) -> Walk {
        Walk {
            at: from - from % RANGE_ALIGNMENT_BYTES,
            end,
            ranges: Vec::new(),
        }
    }

    /// Compares as much as one read of each map covers.
    pub(super) fn step(&mut self, base: Option<&Side>, target: &Side) -> Result<()> {
        let from = self.at;
        let look = |side: &Side| extents(side, from);
        for _ in 0..MAX_ATTEMPTS {
            let before = base.map(look).transpose()?;
            let runs = look(target)?;
            let ranges = match &before {
                Some(before) => differing(before, &runs, from, self.end),
                None => allocated(&runs, from, self.end),
            };
            if before == base.map(look).transpose()? && runs == look(target)? {
                let grown = base.map(|base| base.record.size);
                self.take(ranges, grown);
                return Ok(());
            }
        }
        Err(Error::Pending {
            what: format!(
                "the blocks of snapshot {} (a balance of the pool that moves them)",
                target.record.uuid
            ),
        })
    }

    fn take(&mut self, (ranges, known): Known, base_size: Option<u64>) {
        // An extent ends within a block only at the end of the file.
        let known = if known < self.end {
            known - known % RANGE_ALIGNMENT_BYTES
        } else {
            known
        };
        // If less than a block is known, the whole block is reported. Otherwise the walk would not
        // advance.
        let short = known <= self.at;
        let known = if short {
            (self.at + RANGE_ALIGNMENT_BYTES).min(self.end)
        } else {
            known
        };
        if short {
            self.add(self.at, known);
        }
        for (start, end) in ranges {
            self.add(start, end.min(known));
        }
        // What lies beyond the end of the base is always reported, whatever it contains.
        if let Some(grown) = base_size
            && known > grown
        {
            self.add(grown.max(self.at), known);
        }
        self.at = known;
    }

    fn add(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        let mut start = start - start % RANGE_ALIGNMENT_BYTES;
        let mut end = end.next_multiple_of(RANGE_ALIGNMENT_BYTES).min(self.end);
        while let Some((before, last)) = self.ranges.last().copied()
            && last >= start
        {
            self.ranges.pop();
            (start, end) = (start.min(before), end.max(last));
        }
        self.ranges.push((start, end));
    }

    fn page(mut self, starting_offset: u64, most: usize, of: MetadataOf) -> MetadataPage {
        self.ranges.retain(|(_, end)| *end > starting_offset);
        let next = if self.ranges.len() > most {
            // The start of the first range that does not fit on this page.
            let next = self.ranges[most].0;
            self.ranges.truncate(most);
            Some(next)
        } else {
            (self.at < self.end).then_some(self.at)
        };
        MetadataPage {
            capacity: self.end,
            ranges: self
                .ranges
                .into_iter()
                .map(|(start, end)| (start, end - start))
                .collect(),
            next,
            of,
        }
    }
}

#[cfg(test)]
mod tests;
