//! Reads the extent map of a file (FIEMAP).

use std::fs::File;
use std::ops::Range;
use std::path::Path;

use nix::errno::Errno;

use super::files::open_existing;
use super::sys::blocks::{self, Map, Record};
use super::thin;
use crate::error::HostError;
use crate::host::{Extent, Result};

/// Flags of an extent whose address does not identify single blocks.
const OPAQUE: u32 = blocks::UNKNOWN
    | blocks::DELALLOC
    | blocks::ENCODED
    | blocks::ENCRYPTED
    | blocks::NOT_ALIGNED
    | blocks::INLINE
    | blocks::TAIL;

/// Flags of an extent that has no address of its own: its content is not equal to any other extent,
/// not even to itself.
const UNPLACED: u32 = blocks::UNKNOWN | blocks::DELALLOC | blocks::INLINE | blocks::TAIL;

fn extent(record: &Record) -> Extent {
    let is = |flags: u32| record.flags & flags != 0;
    Extent {
        logical: record.logical,
        physical: if is(UNPLACED) { 0 } else { record.physical },
        length: record.length,
        unwritten: is(blocks::UNWRITTEN) && !is(OPAQUE),
        opaque: is(OPAQUE),
    }
}

/// Iterates over the extents of an open file from an offset on, in pages of fixed size.
pub(super) struct Runs<'a> {
    file: &'a File,
    path: &'a Path,
    map: Box<Map>,
    /// Position in the page, and number of its records.
    next: usize,
    got: usize,
    /// Offset at which the next page begins.
    from: u64,
    /// The last page has been read.
    last: bool,
    /// Write back dirty pages before reading the next page. This is set only for the first page: a
    /// caller that needs an exact map has stopped all writers, and for others it makes no
    /// difference.
    sync: bool,
}

impl<'a> Runs<'a> {
    pub(super) fn new(file: &'a File, path: &'a Path, from: u64) -> Runs<'a> {
        Runs {
            file,
            path,
            map: Map::new(),
            next: 0,
            got: 0,
            from,
            last: false,
            sync: true,
        }
    }

    fn turn(&mut self) -> Result<()> {
        let page = self
            .map
            .read(self.file, self.from, std::mem::take(&mut self.sync))
            .map_err(|errno| HostError::errno("read the extent map of", self.path, errno))?;
        (self.next, self.got) = (0, page.len());
        let Some(record) = page.last() else {
            self.last = true;
            return Ok(());
        };
        let end = record.logical.saturating_add(record.length);
        if end <= self.from {
            let what = "its extent map is not in ascending order";
            return Err(HostError::unexpected(
                "read the extent map of",
                self.path,
                what,
            ));
        }
        self.last = record.flags & blocks::LAST != 0 || end == u64::MAX;
        self.from = end;
        Ok(())
    }
}

impl Iterator for Runs<'_> {
    type Item = Result<Extent>;

    fn next(&mut self) -> Option<Result<Extent>> {
        Some(self.record()?.map(|record| extent(&record)))
    }
}

impl Runs<'_> {
    fn record(&mut self) -> Option<Result<Record>> {
        while self.next == self.got {
            if self.last {
                return None;
            }
            if let Err(error) = self.turn() {
                (self.last, self.next, self.got) = (true, 0, 0);
                return Some(Err(error));
            }
        }
        let record = *self.map.record(self.next)?;
        self.next += 1;
        Some(Ok(record))
    }
}

/// The ranges of a file whose blocks are shared with another file, in order from this byte on,
/// after writing back dirty pages. Empty on a file system without extent maps, where files share
/// nothing.
pub(super) fn shared_from<'a>(
    file: &'a File,
    path: &'a Path,
    from: u64,
) -> impl Iterator<Item = Result<Range<u64>>> + 'a {
    let mut runs = Runs::new(file, path, from);
    std::iter::from_fn(move || {
        loop {
            match runs.record()? {
                Ok(record) if record.flags & blocks::SHARED != 0 => {
                    let end = record.logical.saturating_add(record.length);
                    return Some(Ok(record.logical..end));
                }
                Ok(_) => {}
                Err(error) if error.code() == Some(Errno::EOPNOTSUPP) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
    })
}

pub(super) fn shares_blocks(path: &Path) -> Result<bool> {
    let file = open_existing(path, false)?;
    let first = shared_from(&file, path, 0).next();
    Ok(first.transpose()?.is_some())
}

pub(super) fn extents(path: &Path, from: u64, limit: usize) -> Result<Vec<Extent>> {
    let file = open_existing(path, false)?;
    match thin::extents(&file, path, from, limit)? {
        Some(extents) => Ok(extents),
        None => Runs::new(&file, path, from).take(limit).collect(),
    }
}

pub(super) fn extent_count(path: &Path) -> Result<u64> {
    count(&open_existing(path, false)?, path)
}

pub(super) fn count(file: &File, path: &Path) -> Result<u64> {
    blocks::count(file).map_err(|errno| HostError::errno("count the extents of", path, errno))
}
