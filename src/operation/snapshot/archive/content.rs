//! Archives of content that no driver manages, so that it is imported as an exported snapshot is.

use std::io::Write;

use ring::digest;

use super::{ArchiveWriter, ArchivedSnapshot, Manifest, SEGMENT_BYTES};
use crate::error::{Error, Result};
use crate::host::Piece;
use crate::host::piece::ZERO_BLOCK;
use crate::model::{Allocation, Level, Wipe};
use crate::operation::snapshot::remote::{Checksum, SnapshotRange};

/// Content that is read from its beginning to its end.
pub trait Content {
    /// The data of a range, without blocks of zeros. What is beyond the end is left out.
    fn read(&mut self, offset: u64, length: u64) -> Result<Vec<Piece>>;

    /// Called after the last range. An error unless it is certain that nothing changed since the
    /// first one.
    fn check(&mut self) -> Result<()>;

    /// Whether it has to be read a second time, because [`Content::check`] does not see all changes.
    fn is_read_twice(&self) -> bool;
}

/// What is known about content.
pub struct ContentInfo {
    /// Where it is from, for messages.
    pub source: String,
    pub bytes: u64,
    pub block_size: u32,
    /// A number that is another one if the content is another one.
    pub identity: u64,
    /// Nanoseconds since 1970.
    pub read_at: u64,
}

impl ContentInfo {
    /// The content as a snapshot of a volume that was never formatted by a driver.
    pub(in crate::operation) fn into_snapshot(self) -> ArchivedSnapshot {
        let image_bytes = self.bytes.next_multiple_of(ZERO_BLOCK);
        ArchivedSnapshot {
            snapshot_id: self.source.clone(),
            volume_id: self.source,
            name: String::new(),
            pool: String::new(),
            size: image_bytes,
            image_bytes,
            block_size: self.block_size,
            allocation: Allocation::default(),
            wipe: Wipe::default(),
            formatted: None,
            capabilities: Vec::new(),
            cut_at: self.read_at,
            level: Level::Crash,
            identity: self.identity,
            base: None,
        }
    }
}

/// A number for the content of a file, from its state.
pub fn content_identity(state: &str) -> u64 {
    let mut first = [0; 8];
    let whole = digest::digest(&digest::SHA256, state.as_bytes());
    first.copy_from_slice(&whole.as_ref()[..8]);
    u64::from_le_bytes(first)
}

/// Writes content as an archive with one snapshot of a volume that was never formatted by a driver.
/// If the content has changed the archive has no end, so its import fails.
pub fn archive_content(
    content: &mut dyn Content,
    facts: ContentInfo,
    to: &mut dyn Write,
) -> Result<()> {
    let source = facts.source.clone();
    let member = facts.into_snapshot();
    let image_bytes = member.image_bytes;
    let manifest = Manifest {
        group: None,
        members: vec![member],
    };
    let mut archive = ArchiveWriter::begin(to, &manifest)?;
    let (is_read_twice, mut checksums) = (content.is_read_twice(), Vec::new());
    for offset in (0..image_bytes).step_by(SEGMENT_BYTES as usize) {
        let length = SEGMENT_BYTES.min(image_bytes - offset);
        let pieces = read_blocks(content, offset, length)?;
        if is_read_twice {
            checksums.push(Checksum::sha256(&[], &pieces));
        }
        let range = SnapshotRange {
            offset,
            length,
            checksum: None,
            pieces,
            changed: Vec::new(),
        };
        archive.segment(0, &range)?;
    }
    if is_read_twice {
        for (offset, first) in (0..image_bytes)
            .step_by(SEGMENT_BYTES as usize)
            .zip(checksums)
        {
            let pieces = read_blocks(content, offset, SEGMENT_BYTES.min(image_bytes - offset))?;
            if !first.is_of(&[], &pieces) {
                let why = format!("its bytes from {offset} on changed while it was read");
                return Err(Error::refused(source, why));
            }
        }
    }
    content.check()?;
    archive.end()
}

/// Reads a range. A block that the content ends in is completed with zeros, because volumes on devices
/// are written in whole blocks.
fn read_blocks(content: &mut dyn Content, offset: u64, length: u64) -> Result<Vec<Piece>> {
    let mut pieces = content.read(offset, length)?;
    if let Some(last) = pieces.last_mut() {
        let end = last.end().next_multiple_of(ZERO_BLOCK);
        last.bytes.resize((end - last.offset) as usize, 0);
    }
    Ok(pieces)
}

#[cfg(test)]
mod tests {
    use super::super::ArchiveReader;
    use super::*;

    /// The last block is not whole.
    const BYTES: u64 = 2 * SEGMENT_BYTES + 100;

    /// A block at the beginning of each segment; `changes` is the number of a read that differs.
    struct Blocks {
        reads: u32,
        changes: Option<u32>,
        is_read_twice: bool,
    }

    impl Content for Blocks {
        fn read(&mut self, offset: u64, _length: u64) -> Result<Vec<Piece>> {
            self.reads += 1;
            let byte = if self.changes == Some(self.reads) {
                2
            } else {
                1
            };
            Ok(vec![Piece {
                offset,
                bytes: vec![byte; ZERO_BLOCK as usize],
            }])
        }

        fn check(&mut self) -> Result<()> {
            Ok(())
        }

        fn is_read_twice(&self) -> bool {
            self.is_read_twice
        }
    }

    fn archived(changes: Option<u32>, is_read_twice: bool) -> (Result<()>, Result<()>) {
        let facts = ContentInfo {
            source: "/dev/others/pvc-1".into(),
            bytes: BYTES,
            block_size: 512,
            identity: 7,
            read_at: 0,
        };
        let mut content = Blocks {
            reads: 0,
            changes,
            is_read_twice,
        };
        let mut archive = Vec::new();
        let done = archive_content(&mut content, facts, &mut archive);
        let mut reader = ArchiveReader::begin(&archive[..]).unwrap();
        assert_eq!(
            reader.manifest.members[0].size,
            2 * SEGMENT_BYTES + ZERO_BLOCK
        );
        while let Some(range) = reader.range(0).unwrap() {
            let whole = range.pieces.iter().map(|piece| piece.bytes.len() as u64);
            assert_eq!(whole.collect::<Vec<_>>(), [ZERO_BLOCK], "{}", range.offset);
        }
        (done, reader.end())
    }

    #[test]
    fn an_archive_of_content_that_changes_has_no_end() {
        for is_read_twice in [false, true] {
            let (done, whole) = archived(None, is_read_twice);
            done.unwrap();
            whole.unwrap();
        }
        for changed in 4..=6 {
            let (done, whole) = archived(Some(changed), true);
            let why = done.unwrap_err().to_string();
            assert!(why.contains("changed while it was read"), "{why}");
            assert!(whole.unwrap_err().to_string().contains("truncated"));
        }
    }
}
