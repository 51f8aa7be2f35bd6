//! GetMetadataAllocated, GetMetadataDelta: which blocks of a snapshot are there, or differ from
//! those of another.
//!
//! Two snapshots of a volume share the blocks that nobody overwrote between them, so what has the
//! same place on the disk has the same content. Nobody writes to a snapshot, and while both exist
//! none of their blocks can come to stand for anything else. Only the pool's own file system may
//! move them (a balance of btrfs): maps are read again after they were compared, and the
//! comparison counts only if neither has changed, for then there was a moment at which both were
//! true. More than differs may be told, never less.

use crate::backend::{Image, ImageHandle};
use crate::error::{Error, ErrorContext, Result};
use crate::host::Extent;
use crate::host::difference::Differences;
use crate::operation::{AskMetadata, Driver, MetadataOf, MetadataPage};
use crate::record::SnapshotRecord;

/// Ranges begin and end at multiples of this, or at the volume's end.
const GRAIN: u64 = 4096;
/// Runs of a map that are looked at in one step: a few MiB, and some ten milliseconds.
const STEP: usize = 16 << 10;
/// Steps of one page, so that a page is an answer within a second even where nothing differs.
const STEPS: usize = 8;
/// How often a step is begun anew because blocks were moved meanwhile.
const TRIES: usize = 5;

/// One snapshot of the request.
struct Side {
    record: SnapshotRecord,
    image: ImageHandle,
}

impl Driver {
    /// One page of either call. A page may have no ranges and yet a next one. It changes nothing.
    pub fn snapshot_metadata(&self, request: &AskMetadata) -> Result<MetadataPage> {
        let target = self.side(&request.snapshot_id)?;
        let base = request
            .base_snapshot_id
            .as_ref()
            .map(|id| self.side(id))
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
        let mut walk = Walk {
            at: request.starting_offset - request.starting_offset % GRAIN,
            end: capacity,
            ranges: Vec::new(),
        };
        let most = request.max_results.max(1);
        for _ in 0..STEPS {
            if walk.at >= walk.end || walk.ranges.len() > most {
                break;
            }
            self.step(&mut walk, base.as_ref(), &target)?;
        }
        // Both were there all the while: a deleted one's name may have come again, and with it
        // the same id.
        self.still_there(request, of)?;
        Ok(walk.page(request.starting_offset, most, of))
    }

    fn side(&self, id: &str) -> Result<Side> {
        let (pool, id, record) = self.find_snapshot(id)?;
        let image = pool.backend.open(Image::Snapshot(id.uuid))?;
        Ok(Side { record, image })
    }

    fn still_there(&self, request: &AskMetadata, of: MetadataOf) -> Result<()> {
        let now = |id: &str| Ok::<_, Error>(self.find_snapshot(id)?.2.incarnation);
        let base = request.base_snapshot_id.as_deref().map(now).transpose()?;
        let target = now(&request.snapshot_id)?;
        if (MetadataOf { base, target }) == of {
            Ok(())
        } else {
            Err(gone(request))
        }
    }

    /// Compares as much as both maps tell in one look each.
    fn step(&self, walk: &mut Walk, base: Option<&Side>, target: &Side) -> Result<()> {
        let look = |side: &Side| extents(side, walk.at);
        for _ in 0..TRIES {
            let before = base.map(look).transpose()?;
            let runs = look(target)?;
            let ranges = match &before {
                Some(before) => differing(before, &runs, walk.at, walk.end),
                None => allocated(&runs, walk.at, walk.end),
            };
            if before == base.map(look).transpose()? && runs == look(target)? {
                let grown = base.map(|base| base.record.size);
                walk.take(ranges, grown);
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
}

fn extents(side: &Side, from: u64) -> Result<Vec<Extent>> {
    let found = side.image.extents(from, STEP);
    found.context(|| format!("read the extent map of snapshot {}", side.record.uuid))
}

fn same_volume(request: &AskMetadata, base: &Side, target: &Side) -> Result<()> {
    let volume = |side: &Side| (side.record.source, side.record.source_incarnation);
    // Two pools have no uuid in common, since it's made of the pool's own.
    if volume(base) == volume(target) {
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

/// Snapshots that were deleted while they were told of.
fn gone(request: &AskMetadata) -> Error {
    Error::Pending {
        what: format!(
            "snapshot {} (it or its base was deleted and recreated)",
            request.snapshot_id
        ),
    }
}

/// Ranges, and how far they are all known.
type Known = (Vec<(u64, u64)>, u64);

/// Where a look at a map ends: nothing is known beyond the last run of a full one.
fn horizon(runs: &[Extent], end: u64) -> u64 {
    match runs.last() {
        Some(last) if runs.len() >= STEP => last.logical.saturating_add(last.length).min(end),
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

/// What was written: holes and reserved blocks read as zeros.
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

/// A page that is being made.
struct Walk {
    at: u64,
    end: u64,
    /// (first byte, end), merged.
    ranges: Vec<(u64, u64)>,
}

impl Walk {
    fn take(&mut self, (ranges, known): Known, base_size: Option<u64>) {
        // A run ends within a block only where the file does.
        let known = if known < self.end {
            known - known % GRAIN
        } else {
            known
        };
        // Less than a block is known: that block is told of, or there would be no end to it.
        let short = known <= self.at;
        let known = if short {
            (self.at + GRAIN).min(self.end)
        } else {
            known
        };
        if short {
            self.add(self.at, known);
        }
        for (start, end) in ranges {
            self.add(start, end.min(known));
        }
        // What the base didn't have is told of, whatever it reads as.
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
        let mut start = start - start % GRAIN;
        let mut end = end.next_multiple_of(GRAIN).min(self.end);
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
            // Where the first range begins that this page has no room for.
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
