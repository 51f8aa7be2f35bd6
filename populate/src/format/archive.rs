//! A reader of archives of tar: ustar, pax and GNU.
//!
//! The crate `tar` parses the fields of a header. Which bytes are headers, how long they may be, and
//! what the extensions of pax and GNU add is decided here, so that nothing of an archive is in memory
//! without a limit.

use std::io::{self, Read};

use tar::{EntryType, Header};

use crate::failure::{Failure, Result};
use crate::format::name::{Name, PATH_BYTES};

const BLOCK: usize = 512;
/// The longest header of pax; attributes of 64 KiB fit.
const PAX_BYTES: u64 = 1 << 20;
/// The most headers of one entry.
const EXTENSIONS: usize = 16;

/// What an entry is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    File,
    Folder,
    /// With the text of the link.
    Symlink(Vec<u8>),
    /// Another name of an earlier entry.
    HardLink(Name),
    /// A device or a FIFO.
    Device,
}

/// One entry of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// `None` is the root itself.
    pub name: Option<Name>,
    pub kind: Kind,
    pub mode: u32,
    pub owner: (u32, u32),
    /// Seconds and nanoseconds.
    pub modified: (i64, i64),
    /// Bytes of a file.
    pub size: u64,
}

/// What headers of pax and GNU record about the next entry.
#[derive(Default)]
struct Extended {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    owner: (Option<u32>, Option<u32>),
    modified: Option<(i64, i64)>,
}

/// A reader of entries. The content of an entry is read before the next one.
pub struct Archive<R> {
    inner: R,
    /// Of the content and the padding of this entry.
    content: u64,
    padding: u64,
    is_layer: bool,
}

fn refused(what: impl std::fmt::Display) -> Failure {
    Failure::refused("ArchiveRefused", what)
}

fn corrupt(error: io::Error) -> Failure {
    Failure::content("the archive", error)
}

impl<R: Read> Archive<R> {
    pub fn new(inner: R) -> Archive<R> {
        Archive {
            inner,
            content: 0,
            padding: 0,
            is_layer: false,
        }
    }

    /// Sets whether it is a layer of an image. Programs that create layers may leave out the end mark, and
    /// the padding of the last file; the digest of the layer shows whether something was lost.
    pub fn of_layer(self, is_layer: bool) -> Archive<R> {
        Archive { is_layer, ..self }
    }

    /// The next entry; `None` at the end that the archive itself marks. One that only stops has
    /// lost something, unless it is a layer.
    pub fn next_entry(&mut self) -> Result<Option<Entry>> {
        self.skip_content()?;
        let mut extended = Extended::default();
        for before in 0..=EXTENSIONS {
            let mut block = Vec::with_capacity(BLOCK);
            let mut next = self.inner.by_ref().take(BLOCK as u64);
            next.read_to_end(&mut block).map_err(corrupt)?;
            if block.is_empty() && self.is_layer && before == 0 {
                return Ok(None);
            }
            let block = <[u8; BLOCK]>::try_from(block)
                .map_err(|_| refused("the archive ends without its end mark"))?;
            if block == [0; BLOCK] {
                return Ok(None);
            }
            let header = check_checksum(&block)?;
            let size = number(header.entry_size(), "size")?;
            match header.entry_type() {
                EntryType::XHeader => extended.add_pax(&self.extension(size, PAX_BYTES)?)?,
                EntryType::XGlobalHeader => check_global(&self.extension(size, PAX_BYTES)?)?,
                EntryType::GNULongName => extended.path = Some(self.long_name(size)?),
                EntryType::GNULongLink => extended.link = Some(self.long_name(size)?),
                _ => return self.entry(header, size, extended).map(Some),
            }
        }
        Err(refused(format!(
            "an entry has more than {EXTENSIONS} headers"
        )))
    }

    /// Reads content of the entry.
    pub fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        let most = self.content.min(into.len() as u64) as usize;
        if most == 0 {
            return Ok(0);
        }
        match self.inner.read(&mut into[..most]) {
            Ok(0) => Err(refused("the archive ends within a file")),
            Ok(count) => {
                self.content -= count as u64;
                Ok(count)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => self.read(into),
            Err(error) => Err(corrupt(error)),
        }
    }

    /// The reader behind the archive.
    pub fn into_inner(self) -> R {
        self.inner
    }

    fn skip_content(&mut self) -> Result<()> {
        let rest = self.content.saturating_add(self.padding);
        let needed = if self.is_layer { self.content } else { rest };
        (self.content, self.padding) = (0, 0);
        let skipped = io::copy(&mut self.inner.by_ref().take(rest), &mut io::sink());
        match skipped.map_err(corrupt)? >= needed {
            true => Ok(()),
            false => Err(refused("the archive ends within a file")),
        }
    }

    fn begin_content(&mut self, size: u64) {
        self.content = size;
        self.padding = (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64;
    }

    fn extension(&mut self, size: u64, most: u64) -> Result<Vec<u8>> {
        if size > most {
            return Err(refused(format!("a header is longer than {most} bytes")));
        }
        self.begin_content(size);
        let mut bytes = vec![0; size as usize];
        let mut done = 0;
        while done < bytes.len() {
            done += self.read(&mut bytes[done..])?;
        }
        self.skip_content()?;
        Ok(bytes)
    }

    /// A name of GNU, which ends with a zero byte.
    fn long_name(&mut self, size: u64) -> Result<Vec<u8>> {
        let mut bytes = self.extension(size, PATH_BYTES as u64 + 1)?;
        if bytes.last() == Some(&0) {
            bytes.pop();
        }
        Ok(bytes)
    }

    fn entry(&mut self, header: &Header, size: u64, extended: Extended) -> Result<Entry> {
        let path = extended
            .path
            .unwrap_or_else(|| header.path_bytes().into_owned());
        let link = extended
            .link
            .or_else(|| header.link_name_bytes().map(|link| link.into_owned()));
        let link = link.unwrap_or_default();
        let size = extended.size.unwrap_or(size);
        let name = Name::parse(&path)?;
        let (kind, has_content) = match header.entry_type() {
            // Before ustar, a folder was a file whose name ends with a slash.
            EntryType::Regular if path.ends_with(b"/") => (Kind::Folder, false),
            EntryType::Regular | EntryType::Continuous => (Kind::File, true),
            EntryType::Directory => (Kind::Folder, false),
            EntryType::Symlink => (Kind::Symlink(check_link(link)?), false),
            EntryType::Link => {
                let to = Name::parse(&link)?;
                let to = to.ok_or_else(|| refused("a hard link leads to the root"))?;
                (Kind::HardLink(to), true)
            }
            EntryType::Char | EntryType::Block | EntryType::Fifo => (Kind::Device, false),
            EntryType::GNUSparse => return Err(refused(SPARSE)),
            other => {
                let what = format!(
                    "an entry has the type {:?}, which is not supported",
                    other.as_byte() as char
                );
                return Err(refused(what));
            }
        };
        let size = if has_content { size } else { 0 };
        self.begin_content(size);
        let owner = |given: Option<u32>, found: io::Result<u64>| match given {
            Some(id) => Ok(id),
            None => {
                let id = number(found, "owner")?;
                u32::try_from(id).map_err(|_| refused("an owner is not a number of 32 bits"))
            }
        };
        Ok(Entry {
            name,
            kind,
            mode: number(header.mode().map(u64::from), "mode")? as u32 & 0o7777,
            owner: (
                owner(extended.owner.0, header.uid())?,
                owner(extended.owner.1, header.gid())?,
            ),
            modified: match extended.modified {
                Some(modified) => modified,
                None => (
                    number(header.mtime(), "time")?.min(i64::MAX as u64) as i64,
                    0,
                ),
            },
            size,
        })
    }
}

const SPARSE: &str = "the archive has a sparse file; create it without --sparse";

/// A header with its right checksum: all bytes, with spaces for the checksum itself.
fn check_checksum(block: &[u8; BLOCK]) -> Result<&Header> {
    let header = Header::from_byte_slice(block);
    let outside = block[..148].iter().chain(&block[156..]);
    let sum = outside.map(|byte| u32::from(*byte)).sum::<u32>() + 8 * u32::from(b' ');
    match header.cksum() {
        Ok(stored) if stored == sum => Ok(header),
        _ => Err(refused("a header has a wrong checksum")),
    }
}

fn number(found: io::Result<u64>, what: &str) -> Result<u64> {
    found.map_err(|_| refused(format!("a header has an invalid {what}")))
}

fn check_link(link: Vec<u8>) -> Result<Vec<u8>> {
    match !link.is_empty() && link.len() <= PATH_BYTES && !link.contains(&0) {
        true => Ok(link),
        false => Err(refused("a symbolic link has no valid text")),
    }
}

/// The records `LENGTH KEY=VALUE\n` of pax.
fn pax_records(mut bytes: &[u8]) -> Result<Vec<(&[u8], &[u8])>> {
    let invalid = || refused("a header of pax is invalid");
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let space = bytes
            .iter()
            .position(|byte| *byte == b' ')
            .ok_or_else(invalid)?;
        let length = decimal(&bytes[..space]).ok_or_else(invalid)?;
        let length = usize::try_from(length).map_err(|_| invalid())?;
        let record = bytes.get(space + 1..length).ok_or_else(invalid)?;
        let record = record.strip_suffix(b"\n").ok_or_else(invalid)?;
        let equals = record
            .iter()
            .position(|byte| *byte == b'=')
            .ok_or_else(invalid)?;
        found.push((&record[..equals], &record[equals + 1..]));
        bytes = &bytes[length..];
    }
    Ok(found)
}

fn decimal(bytes: &[u8]) -> Option<u64> {
    let is_number = !bytes.is_empty() && bytes.iter().all(u8::is_ascii_digit);
    let text = std::str::from_utf8(bytes).ok()?;
    is_number.then(|| text.parse().ok())?
}

/// Seconds with a fraction, such as `1712345678.25`.
fn time(bytes: &[u8]) -> Option<(i64, i64)> {
    let text = std::str::from_utf8(bytes).ok()?;
    let (seconds, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits: String = fraction
        .chars()
        .chain("000000000".chars())
        .take(9)
        .collect();
    let nanoseconds = decimal(digits.as_bytes())? as i64;
    let seconds: i64 = seconds.parse().ok()?;
    match text.starts_with('-') && nanoseconds > 0 {
        true => Some((seconds.checked_sub(1)?, 1_000_000_000 - nanoseconds)),
        false => Some((seconds, nanoseconds)),
    }
}

/// A header for all entries that follow may not rename or resize all of them.
fn check_global(bytes: &[u8]) -> Result<()> {
    let fields: [&[u8]; 3] = [b"path", b"linkpath", b"size"];
    let records = pax_records(bytes)?;
    match records.iter().any(|(key, _)| fields.contains(key)) {
        true => Err(refused("a global header of pax sets a path or a size")),
        false => Ok(()),
    }
}

impl Extended {
    /// What is not here, such as attributes with file capabilities, is dropped.
    fn add_pax(&mut self, bytes: &[u8]) -> Result<()> {
        let invalid = || refused("a header of pax has an invalid number");
        let id = |value: &[u8]| decimal(value).and_then(|id| u32::try_from(id).ok());
        for (key, value) in pax_records(bytes)? {
            match key {
                b"path" => self.path = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"size" => self.size = Some(decimal(value).ok_or_else(invalid)?),
                b"uid" => self.owner.0 = Some(id(value).ok_or_else(invalid)?),
                b"gid" => self.owner.1 = Some(id(value).ok_or_else(invalid)?),
                b"mtime" => self.modified = Some(time(value).ok_or_else(invalid)?),
                key if key.starts_with(b"GNU.sparse.") => return Err(refused(SPARSE)),
                _ => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests;
