//! A snapshot of another node, from which a volume is filled.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ring::digest;

use crate::backend::ImageHandle;
use crate::error::{Error, ErrorContext, Result};
use crate::host::Piece;
use crate::host::piece::ZERO_BLOCK;
use crate::model::size::image_bytes;
use crate::record::{CopyProgress, Formatted};

/// This many zeros count as one byte of data.
const ZEROS_PER_BYTE: u64 = 16;

/// Proves that the router has granted a snapshot to a reader.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket(pub [u8; 32]);

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ticket")
    }
}

/// A snapshot that is granted to a reader, and what its copy must know.
#[derive(Clone, Debug, PartialEq)]
pub struct Offer {
    pub ticket: Ticket,
    /// A number that is another one if the snapshot was deleted and created again.
    pub identity: u64,
    /// The identities of snapshots; the differences to them can be read.
    pub bases: Vec<u64>,
    /// Size of the snapshot in bytes.
    pub size: u64,
    /// Length of its image in bytes.
    pub image_bytes: u64,
    /// Logical block size, which its copy must keep.
    pub block_size: u32,
    /// Its file system.
    pub formatted: Option<Formatted>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct SnapshotRange {
    pub offset: u64,
    pub length: u64,
    /// The data of the range; the rest of it reads as zeros. Empty if only the checksum was wanted.
    pub pieces: Vec<Piece>,
    /// If differences were wanted: the parts that may differ from the base, in ascending order. The
    /// data is within them, and the rest of them reads as zeros.
    pub changed: Vec<Range<u64>>,
    /// `None` in an archive, whose frames have a SHA-256.
    pub checksum: Option<Checksum>,
}

/// A checksum of what differs and of the data of a range, with the offset of each block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// Of data that is sent: TLS protects the network, so this finds errors of programs and memory.
    Crc32(u32),
    /// To compare a copy with its source, without its data.
    Sha256([u8; 32]),
}

impl Checksum {
    pub fn crc32(changed: &[Range<u64>], pieces: &[Piece]) -> Checksum {
        let mut hasher = crc32fast::Hasher::new();
        each_part(changed, pieces, |bytes| hasher.update(bytes));
        Checksum::Crc32(hasher.finalize())
    }

    pub fn sha256(changed: &[Range<u64>], pieces: &[Piece]) -> Checksum {
        let mut context = digest::Context::new(&digest::SHA256);
        each_part(changed, pieces, |bytes| context.update(bytes));
        let mut result = [0; 32];
        result.copy_from_slice(context.finish().as_ref());
        Checksum::Sha256(result)
    }

    /// Whether it is the checksum of this.
    pub(super) fn is_of(self, changed: &[Range<u64>], pieces: &[Piece]) -> bool {
        let computed = match self {
            Checksum::Crc32(_) => Checksum::crc32(changed, pieces),
            Checksum::Sha256(_) => Checksum::sha256(changed, pieces),
        };
        computed == self
    }
}

/// Passes on what a checksum covers. It does not depend on how the data is divided into pieces.
fn each_part(changed: &[Range<u64>], pieces: &[Piece], mut update: impl FnMut(&[u8])) {
    for Range { start, end } in changed {
        update(&start.to_le_bytes());
        update(&end.to_le_bytes());
    }
    for piece in pieces {
        let blocks = piece.bytes.chunks(ZERO_BLOCK as usize);
        for (offset, block) in (piece.offset..).step_by(ZERO_BLOCK as usize).zip(blocks) {
            update(&offset.to_le_bytes());
            update(block);
        }
    }
}

impl SnapshotRange {
    /// Bytes that the limit of the rate counts, for differences.
    pub(super) fn cost(&self) -> u64 {
        let changed = self.changed.iter().map(|range| range.end - range.start);
        cost(&self.pieces, changed.sum())
    }

    /// The differing parts without data; `None` if the parts or the data are not in ascending order,
    /// or are not within each other.
    pub(super) fn zeros(&self) -> Option<Vec<Range<u64>>> {
        let (mut zeros, mut at) = (Vec::new(), self.offset);
        let mut pieces = self.pieces.iter().peekable();
        for Range { start, end } in self.changed.iter().cloned() {
            if start < at || end <= start {
                return None;
            }
            at = start;
            while let Some(piece) = pieces.next_if(|piece| piece.offset < end) {
                if piece.offset < at || piece.end() > end {
                    return None;
                }
                zeros.push(at..piece.offset);
                at = piece.end();
            }
            zeros.push(at..end);
            at = end;
        }
        zeros.retain(|range| !range.is_empty());
        let is_inside = at <= self.end() && pieces.next().is_none();
        is_inside.then_some(zeros)
    }

    pub(in crate::operation) fn end(&self) -> u64 {
        self.offset.saturating_add(self.length)
    }
}

/// Bytes of data.
pub(super) fn data(pieces: &[Piece]) -> u64 {
    let bytes = pieces.iter().map(|piece| piece.bytes.len() as u64);
    bytes.sum()
}

/// Bytes that the limit of the rate counts if this data was read in a number of bytes. Zeros take less
/// time than data, above all in holes.
pub(super) fn cost(pieces: &[Piece], read: u64) -> u64 {
    let data = data(pieces);
    data + read.saturating_sub(data) / ZEROS_PER_BYTE
}

/// The agent of another node, which sends a snapshot.
pub trait SnapshotSource: Send + Sync {
    /// The name of its node.
    fn node(&self) -> &str;
    /// Requests the ranges of the snapshot from an offset on, or only their digests.
    fn read(&self, from: u64, wanted: Wanted) -> Result<Box<dyn Ranges>>;
}

/// The ranges of a snapshot, in order.
pub trait Ranges: Send {
    /// The next one; `None` at the end.
    fn next(&mut self) -> Result<Option<SnapshotRange>>;
}

/// What a reader of a snapshot wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    Data,
    /// The data where it differs from the snapshot with this identity.
    Differences(u64),
    /// Only the digests of the data, to verify a copy.
    Digests,
}

/// Why a snapshot is received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To create a volume, which is independent of that of the snapshot.
    Restore,
    /// For a volume that moves to this node: it stays incomplete, and a later call continues with a
    /// later snapshot.
    Fill,
    /// To complete a volume that moves to this node.
    Move,
}

/// A snapshot that the agent of another node offers.
pub struct RemoteSnapshot {
    pub id: String,
    pub offer: Offer,
    pub source: Arc<dyn SnapshotSource>,
    pub purpose: Purpose,
    /// Read the copy back, and compare it, before it is complete.
    pub verify: bool,
    /// It is in an archive that is imported.
    pub is_archived: bool,
}

impl RemoteSnapshot {
    /// Size of its copy. Its image may be longer than its record says, and so may be the file system
    /// on it.
    pub(super) fn size(&self) -> u64 {
        match self.offer.image_bytes > image_bytes(self.offer.size) {
            true => self.offer.image_bytes,
            false => self.offer.size,
        }
    }

    /// The error of an answer that is wrong, or that did not arrive.
    pub(super) fn failed(&self, reason: impl Into<String>) -> Error {
        Error::unreachable(format!("the agent of node {}", self.source.node()), reason)
    }
}

/// The ranges of a snapshot that are written into an image.
pub(in crate::operation) struct Receiving<'a> {
    remote: &'a RemoteSnapshot,
    ranges: Box<dyn Ranges>,
    /// Bytes received by this node.
    count: &'a AtomicU64,
    /// The image has the content of a base; only differences to it are sent.
    has_base: bool,
}

impl<'a> Receiving<'a> {
    pub(super) fn begin(
        remote: &'a RemoteSnapshot,
        from: &CopyProgress,
        count: &'a AtomicU64,
    ) -> Result<Receiving<'a>> {
        let wanted = from.base.map_or(Wanted::Data, Wanted::Differences);
        let ranges = remote.source.read(from.copied, wanted)?;
        Ok(Receiving {
            remote,
            ranges,
            count,
            has_base: from.base.is_some(),
        })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.remote.offer.image_bytes
    }

    /// The next range from an offset on if differences are sent; `None` if a range of any length can
    /// be received.
    pub(super) fn next_difference(&mut self, at: u64) -> Result<Option<SnapshotRange>> {
        match self.has_base && at < self.bytes() {
            true => self.next(at, self.bytes()).map(Some),
            false => Ok(None),
        }
    }

    /// Writes a range in which only differences are sent, and returns the zeros in it.
    pub(super) fn write_difference(
        &self,
        target: &ImageHandle,
        range: &SnapshotRange,
        doing: impl Fn() -> String,
    ) -> Result<Vec<Range<u64>>> {
        let zeros = range.zeros().ok_or_else(|| {
            let reason = format!("it sent differences from {} on out of order", range.offset);
            self.remote.failed(reason)
        })?;
        let written = target.write(range.offset..range.end(), &range.pieces, &zeros);
        written.context(doing)?;
        Ok(zeros)
    }

    /// The next range from an offset on, which ends at `end` at the latest.
    fn next(&mut self, at: u64, end: u64) -> Result<SnapshotRange> {
        let range = self.ranges.next()?;
        let range = range.ok_or_else(|| {
            let reason = format!("it sent {at} bytes of a snapshot of {end} bytes");
            self.remote.failed(reason)
        })?;
        let received: usize = range.pieces.iter().map(|piece| piece.bytes.len()).sum();
        self.count.fetch_add(received as u64, Ordering::Relaxed);
        let next = range.end();
        let inside = |piece: &Piece| piece.offset >= at && piece.end() <= next;
        if range.offset != at || next <= at || next > end || !range.pieces.iter().all(inside) {
            let reason = format!("it sent other data than the bytes from {at} to {end}");
            return Err(self.remote.failed(reason));
        }
        let checksum = range.checksum;
        let is_right = checksum.map_or(self.remote.is_archived, |checksum| {
            checksum.is_of(&range.changed, &range.pieces)
        });
        if !is_right {
            let reason = format!("the data from {at} to {next} was damaged on its way");
            return Err(self.remote.failed(reason));
        }
        Ok(range)
    }

    /// Writes the ranges from an offset up to another one.
    pub(super) fn receive(
        &mut self,
        target: &ImageHandle,
        from: u64,
        end: u64,
        doing: impl Fn() -> String,
    ) -> Result<()> {
        let mut at = from;
        while at < end {
            let range = self.next(at, end)?;
            let written = target.write(at..range.end(), &range.pieces, &[]);
            written.context(&doing)?;
            at = range.end();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
