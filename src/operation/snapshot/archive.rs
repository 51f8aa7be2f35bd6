//! The format in which snapshots are exported and imported: an archive. `docs/backup.md` has its
//! layout.
//!
//! An archive is a sequence of frames, each with its number and a SHA-256 that covers the manifest as
//! well. So a frame that is damaged, missing, out of order or from another archive is found before
//! anything of it is used, and the last frame has the SHA-256 of everything before it.

mod content;

use std::io::{ErrorKind, Read, Write};
use std::ops::Range;

use ring::digest;
use serde::{Deserialize, Serialize};

use super::remote::{SnapshotRange, data};
use crate::error::{Error, Result};
use crate::host::Piece;
use crate::host::piece::ZERO_BLOCK;
use crate::model::size::{self, MIB};
use crate::model::{Allocation, Capability, Level, Wipe};
use crate::record::Formatted;

pub use content::{Content, ContentInfo, archive_content, content_identity};

/// A transfer that converts line ends or stops at an end-of-file character damages it.
const MAGIC: [u8; 14] = *b"SLACKWATER\r\n\x1a\n";
/// The version of the layout. Another one is refused.
const VERSION: u16 = 1;
/// Bytes of the image of a segment in an archive without a base, except for the last one.
pub(super) const SEGMENT_BYTES: u64 = 4 * MIB;
/// Maximum length of the body of a frame: 4 MiB of data, and the lists of parts that differ.
const MAX_BODY_BYTES: u64 = 16 * MIB;
/// Maximum number of snapshots of an archive.
const MAX_MEMBERS: usize = 1024;
const DIGEST_BYTES: usize = 32;

const MANIFEST_FRAME: u32 = 1;
const SEGMENT_FRAME: u32 = 2;
const END_FRAME: u32 = 3;

/// What an archive contains.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The group of which the snapshots are members.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<ArchivedGroup>,
    /// The snapshots, in the order of their segments.
    pub members: Vec<ArchivedSnapshot>,
}

/// A group snapshot. An archive may have some of its members only.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArchivedGroup {
    pub id: String,
    /// The IDs of all its members, also of those in other archives.
    pub members: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ArchivedSnapshot {
    pub snapshot_id: String,
    /// The volume and its name, from which the name of an imported volume is taken.
    pub volume_id: String,
    pub name: String,
    /// The name of its pool.
    pub pool: String,
    /// Size of the volume in bytes.
    pub size: u64,
    /// Length of the image in bytes, which all segments cover together.
    pub image_bytes: u64,
    pub block_size: u32,
    pub allocation: Allocation,
    pub wipe: Wipe,
    /// The file system, if the volume was ever formatted or used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub formatted: Option<Formatted>,
    pub capabilities: Vec<Capability>,
    /// The time of the cut in nanoseconds since 1970, and its consistency level.
    pub cut_at: u64,
    pub level: Level,
    /// A number for its content.
    pub identity: u64,
    /// The identity of the snapshot to which the archive has only the differences.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<u64>,
}

/// An error in an archive. An import changes nothing because of what it could not verify.
fn bad(problem: impl Into<String>) -> Error {
    Error::invalid("archive", problem)
}

/// The beginning of a frame.
#[derive(Clone, Copy)]
struct Head {
    kind: u32,
    number: u64,
    length: u64,
}

const HEADER_BYTES: usize = 20;

impl Head {
    fn bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&self.kind.to_le_bytes());
        bytes[4..12].copy_from_slice(&self.number.to_le_bytes());
        bytes[12..].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    fn parse(bytes: [u8; HEADER_BYTES]) -> Option<Head> {
        let mut fields = Fields(&bytes);
        Some(Head {
            kind: fields.u32()?,
            number: fields.u64()?,
            length: fields.u64()?,
        })
    }

    /// `manifest` is the digest of the manifest's frame; for that frame it is zeros.
    fn digest(self, manifest: &[u8; DIGEST_BYTES], body: &[u8]) -> [u8; DIGEST_BYTES] {
        let mut context = digest::Context::new(&digest::SHA256);
        context.update(manifest);
        context.update(&self.bytes());
        context.update(body);
        finish(context)
    }
}

fn finish(context: digest::Context) -> [u8; DIGEST_BYTES] {
    let mut result = [0; DIGEST_BYTES];
    result.copy_from_slice(context.finish().as_ref());
    result
}

/// Numbers at the beginning of bytes, little endian. `None` if there are too few bytes.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    /// A list of pairs of 64-bit numbers, with its length before it.
    fn pairs(&mut self) -> Option<Vec<(u64, u64)>> {
        let count = self.u32()? as usize;
        if count > self.0.len() / 16 {
            return None;
        }
        (0..count)
            .map(|_| Some((self.u64()?, self.u64()?)))
            .collect()
    }
}

/// Writes an archive.
pub struct ArchiveWriter<W> {
    to: W,
    whole: digest::Context,
    manifest: [u8; DIGEST_BYTES],
    number: u64,
}

impl<W: Write> ArchiveWriter<W> {
    pub fn begin(to: W, manifest: &Manifest) -> Result<ArchiveWriter<W>> {
        let mut writer = ArchiveWriter {
            to,
            whole: digest::Context::new(&digest::SHA256),
            manifest: [0; DIGEST_BYTES],
            number: 0,
        };
        let body = serde_json::to_vec(manifest);
        let body = body.map_err(|error| Error::bug(format!("a manifest as JSON: {error}")))?;
        writer.put(&MAGIC)?;
        writer.put(&VERSION.to_le_bytes())?;
        writer.manifest = writer.frame(MANIFEST_FRAME, &body)?;
        Ok(writer)
    }

    /// The next range of a member of the manifest.
    pub fn segment(&mut self, member: u32, range: &SnapshotRange) -> Result<()> {
        let mut body = Vec::with_capacity(data(&range.pieces) as usize + 1024);
        body.extend(member.to_le_bytes());
        body.extend(range.offset.to_le_bytes());
        body.extend(range.length.to_le_bytes());
        let changed = range.changed.iter().map(|part| (part.start, part.end));
        put_pairs(&mut body, changed);
        let pieces = range.pieces.iter();
        put_pairs(&mut body, pieces.map(|piece| (piece.offset, piece.end())));
        range
            .pieces
            .iter()
            .for_each(|piece| body.extend(&piece.bytes));
        self.frame(SEGMENT_FRAME, &body).map(drop)
    }

    pub fn end(mut self) -> Result<()> {
        let whole = finish(self.whole.clone());
        self.frame(END_FRAME, &whole)?;
        self.to.flush().map_err(|error| cannot_write(&error))
    }

    fn frame(&mut self, kind: u32, body: &[u8]) -> Result<[u8; DIGEST_BYTES]> {
        let head = Head {
            kind,
            number: self.number,
            length: body.len() as u64,
        };
        let digest = head.digest(&self.manifest, body);
        self.put(&head.bytes())?;
        self.put(body)?;
        self.put(&digest)?;
        self.number += 1;
        Ok(digest)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.whole.update(bytes);
        let written = self.to.write_all(bytes);
        written.map_err(|error| cannot_write(&error))
    }
}

fn put_pairs(body: &mut Vec<u8>, pairs: impl ExactSizeIterator<Item = (u64, u64)>) {
    body.extend((pairs.len() as u32).to_le_bytes());
    for (start, end) in pairs {
        body.extend(start.to_le_bytes());
        body.extend(end.to_le_bytes());
    }
}

fn cannot_write(error: &std::io::Error) -> Error {
    Error::unreachable("the output of the export", error.to_string())
}

/// Reads an archive, and verifies every frame before it returns anything of it.
pub struct ArchiveReader<R> {
    from: R,
    pub manifest: Manifest,
    whole: digest::Context,
    digest: [u8; DIGEST_BYTES],
    number: u64,
    /// Bytes that were read.
    at: u64,
    /// The member whose segments are read, and the next byte of its image.
    member: usize,
    offset: u64,
}

impl<R: Read> ArchiveReader<R> {
    pub fn begin(from: R) -> Result<ArchiveReader<R>> {
        let mut reader = ArchiveReader {
            from,
            manifest: Manifest {
                group: None,
                members: Vec::new(),
            },
            whole: digest::Context::new(&digest::SHA256),
            digest: [0; DIGEST_BYTES],
            number: 0,
            at: 0,
            member: 0,
            offset: 0,
        };
        let mut begin = [0; MAGIC.len() + 2];
        reader.fill(&mut begin, "its beginning")?;
        let (magic, version) = begin.split_at(MAGIC.len());
        if magic != MAGIC {
            return Err(bad(
                "is not an archive of Slackwater (its first bytes are others); give the output of slackwater export, unpacked",
            ));
        }
        let version = u16::from_le_bytes([version[0], version[1]]);
        if version != VERSION {
            return Err(bad(format!(
                "has version {version}, and this program reads version {VERSION}"
            )));
        }
        let (body, digest) = reader.frame(MANIFEST_FRAME)?;
        reader.digest = digest;
        reader.manifest = parse_manifest(&body)?;
        Ok(reader)
    }

    /// The next range of a member, whose segments must be the next ones; `None` at the end of the
    /// member's image.
    pub fn range(&mut self, member: usize) -> Result<Option<SnapshotRange>> {
        if member != self.member {
            let reached = self.member;
            return Err(bad(format!("has reached snapshot {reached}, not {member}")));
        }
        let Some(snapshot) = self.manifest.members.get(member) else {
            return Ok(None);
        };
        let (end, base) = (snapshot.image_bytes, snapshot.base);
        if self.offset >= end {
            (self.member, self.offset) = (member + 1, 0);
            return Ok(None);
        }
        let number = self.number;
        let (body, _) = self.frame(SEGMENT_FRAME)?;
        let wrong = |what: String| bad(format!("frame {number}: {what}"));
        let parsed = parse_segment(&body);
        let (of, range) = parsed.ok_or_else(|| wrong("its lists do not match its data".into()))?;
        if of as usize != member || range.offset != self.offset {
            return Err(wrong(format!(
                "it has offset {} of snapshot {of} instead of offset {} of snapshot {member}",
                range.offset, self.offset
            )));
        }
        check_range(&range, end, base.is_some()).map_err(wrong)?;
        self.offset += range.length;
        Ok(Some(range))
    }

    /// Reads the end, after all members. An error unless the archive is whole and nothing follows.
    pub fn end(&mut self) -> Result<()> {
        let number = self.number;
        let whole = finish(self.whole.clone());
        let (body, _) = self.frame(END_FRAME)?;
        if body != whole {
            return Err(bad(format!(
                "frame {number}: the SHA-256 of the archive does not match its content"
            )));
        }
        let more = self.from.read(&mut [0]);
        match more.map_err(|error| bad(format!("cannot be read: {error}")))? {
            0 => Ok(()),
            _ => Err(bad(format!(
                "has more data after its end, byte {}",
                self.at
            ))),
        }
    }

    /// Reads the next frame, of this kind. Returns its body and its digest.
    fn frame(&mut self, kind: u32) -> Result<(Vec<u8>, [u8; DIGEST_BYTES])> {
        let (number, at) = (self.number, self.at);
        let what = format!("frame {number}, which begins at byte {at}");
        let mut head = [0; HEADER_BYTES];
        self.fill(&mut head, &what)?;
        let head = Head::parse(head).filter(|head| head.length <= MAX_BODY_BYTES);
        let Some(head) = head.filter(|head| (1..=END_FRAME).contains(&head.kind)) else {
            return Err(bad(format!("is damaged: {what}, is not a frame")));
        };
        if head.number != number {
            let found = head.number;
            return Err(bad(format!(
                "is out of order: frame {found} is in place of {what}"
            )));
        }
        let mut body = vec![0; head.length as usize];
        self.fill(&mut body, &what)?;
        let mut digest = [0; DIGEST_BYTES];
        self.fill(&mut digest, &what)?;
        if head.digest(&self.digest, &body) != digest {
            return Err(bad(format!(
                "is damaged: {what}, does not match its SHA-256"
            )));
        }
        if head.kind != kind {
            let found = head.kind;
            return Err(bad(format!(
                "is out of order: {what}, has kind {found} instead of {kind}"
            )));
        }
        self.number += 1;
        Ok((body, digest))
    }

    fn fill(&mut self, bytes: &mut [u8], what: &str) -> Result<()> {
        match self.from.read_exact(bytes) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                return Err(bad(format!("is truncated: it ends within {what}")));
            }
            Err(error) => return Err(bad(format!("cannot be read: {error}"))),
        }
        self.whole.update(bytes);
        self.at += bytes.len() as u64;
        Ok(())
    }
}

fn parse_manifest(body: &[u8]) -> Result<Manifest> {
    let parsed = serde_json::from_slice::<Manifest>(body);
    let manifest = parsed.map_err(|error| bad(format!("frame 0: not a manifest: {error}")))?;
    let wrong = |what: &str| Err(bad(format!("frame 0: {what}")));
    if manifest.members.is_empty() || manifest.members.len() > MAX_MEMBERS {
        return wrong("an archive has 1 to 1024 snapshots");
    }
    for one in &manifest.members {
        if one.size == 0 || one.image_bytes < one.size {
            return wrong("an image is shorter than its volume");
        }
        if one.image_bytes > size::MAX || !one.image_bytes.is_multiple_of(ZERO_BLOCK) {
            return wrong(
                "the length of an image is too large, or not a multiple of the size of a block",
            );
        }
        if !(512..=4096).contains(&one.block_size) || !one.block_size.is_power_of_two() {
            return wrong("a block size is not a power of two from 512 to 4096");
        }
        if one.base == Some(one.identity) {
            return wrong("a snapshot is its own base");
        }
    }
    Ok(manifest)
}

/// The member and the range of a segment.
fn parse_segment(body: &[u8]) -> Option<(u32, SnapshotRange)> {
    let mut fields = Fields(body);
    let member = fields.u32()?;
    let (offset, length) = (fields.u64()?, fields.u64()?);
    let changed = fields.pairs()?.into_iter();
    let changed: Vec<Range<u64>> = changed.map(|(start, end)| start..end).collect();
    let mut pieces = Vec::new();
    for (offset, end) in fields.pairs()? {
        let bytes = fields.take(end.checked_sub(offset)?.try_into().ok()?)?;
        let bytes = bytes.to_vec();
        pieces.push(Piece { offset, bytes });
    }
    let range = SnapshotRange {
        checksum: None,
        offset,
        length,
        pieces,
        changed,
    };
    fields.0.is_empty().then_some((member, range))
}

/// Checks that a range is within the image, and its data within the range.
fn check_range(range: &SnapshotRange, end: u64, has_base: bool) -> std::result::Result<(), String> {
    let until = range.offset.checked_add(range.length);
    let Some(until) = until.filter(|until| range.length > 0 && *until <= end) else {
        return Err(format!("it ends beyond the image of {end} bytes"));
    };
    if has_base {
        return match range.zeros() {
            Some(_) => Ok(()),
            None => Err("its parts are out of order".into()),
        };
    }
    let mut at = range.offset;
    for piece in &range.pieces {
        if piece.offset < at || piece.bytes.is_empty() || piece.end() > until {
            return Err("its data is out of order".into());
        }
        at = piece.end();
    }
    if !range.changed.is_empty() || range.length != SEGMENT_BYTES.min(end - range.offset) {
        return Err(format!(
            "a segment of a whole snapshot has {SEGMENT_BYTES} bytes"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
