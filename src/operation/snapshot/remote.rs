//! A snapshot of another node, from which a volume is filled.

use std::sync::Arc;

use ring::digest;

use crate::backend::ImageHandle;
use crate::error::{Error, ErrorContext, Result};
use crate::host::Piece;
use crate::host::piece::ZERO_BLOCK;
use crate::model::size::image_bytes;
use crate::record::Formatted;

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
    /// Size of the snapshot in bytes.
    pub size: u64,
    /// Length of its image in bytes.
    pub image_bytes: u64,
    /// Logical block size, which its copy must keep.
    pub block_size: u32,
    /// Its file system.
    pub formatted: Option<Formatted>,
}

/// A range of a snapshot.
#[derive(Clone, Debug, PartialEq)]
pub struct SentRange {
    pub offset: u64,
    pub length: u64,
    /// The data of the range; the rest of it reads as zeros. Empty if only the digest was wanted.
    pub pieces: Vec<Piece>,
    /// The digest of the data.
    pub digest: [u8; 32],
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
    fn next(&mut self) -> Result<Option<SentRange>>;
}

/// What a reader of a snapshot wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    Data,
    /// Only the digests of the data, to verify a copy.
    Digests,
}

/// SHA-256 of the data of a range, with the offset of each block.
pub(super) fn digest(pieces: &[Piece]) -> [u8; 32] {
    let mut context = digest::Context::new(&digest::SHA256);
    for piece in pieces {
        let blocks = piece.bytes.chunks(ZERO_BLOCK as usize);
        for (offset, block) in (piece.offset..).step_by(ZERO_BLOCK as usize).zip(blocks) {
            context.update(&offset.to_le_bytes());
            context.update(block);
        }
    }
    let mut result = [0; 32];
    result.copy_from_slice(context.finish().as_ref());
    result
}

/// A snapshot that the agent of another node offers.
pub struct RemoteSnapshot {
    pub id: String,
    pub offer: Offer,
    pub source: Arc<dyn SnapshotSource>,
    /// Read the copy back, and compare it, before it is complete.
    pub verify: bool,
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
}

impl<'a> Receiving<'a> {
    pub(super) fn begin(remote: &'a RemoteSnapshot, from: u64) -> Result<Receiving<'a>> {
        let ranges = remote.source.read(from, Wanted::Data)?;
        Ok(Receiving { remote, ranges })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.remote.offer.image_bytes
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
            let range = self.ranges.next()?;
            let range = range.ok_or_else(|| {
                let reason = format!("it sent {at} bytes of a snapshot of {end} bytes");
                self.remote.failed(reason)
            })?;
            let next = range.offset.saturating_add(range.length);
            let inside = |piece: &Piece| piece.offset >= at && piece.end() <= next;
            if range.offset != at || next <= at || next > end || !range.pieces.iter().all(inside) {
                let reason = format!("it sent other data than the bytes from {at} to {end}");
                return Err(self.remote.failed(reason));
            }
            if digest(&range.pieces) != range.digest {
                let reason = format!("the data from {at} to {next} was damaged on its way");
                return Err(self.remote.failed(reason));
            }
            target
                .write(at, range.length, &range.pieces)
                .context(&doing)?;
            at = next;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
