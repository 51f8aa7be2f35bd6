//! Image files: their length and their blocks.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, PosixFadviseAdvice, fallocate, posix_fadvise};
use nix::libc;
use nix::unistd::{Whence, ftruncate, lseek};

use super::files::{failed, open_existing, open_or_create};
use super::{map, sys};
use crate::error::HostError;
use crate::host::Result;

/// Size of one write of zeros.
const PIECE: usize = 1 << 20;
/// Number of bytes after which written data is made durable and its pages are dropped, because the
/// page cache of the pool belongs to the volumes in use.
const FLUSH_EVERY: u64 = 256 << 20;
/// How often a long wipe logs its progress.
const PROGRESS_LOG_INTERVAL: Duration = Duration::from_secs(10);

pub(super) fn offset(bytes: u64, path: &Path) -> Result<libc::off_t> {
    libc::off_t::try_from(bytes).map_err(|_| HostError::errno("size", path, Errno::EFBIG))
}

/// The length of a file, or the size of a block device, for which stat reports 0.
pub(super) fn length(file: &File, path: &Path) -> Result<u64> {
    let info = file.metadata().map_err(failed("stat", path))?;
    match info.file_type().is_block_device() {
        true => sys::block_bytes(file)
            .map_err(|errno| HostError::errno("read the size of", path, errno)),
        false => Ok(info.len()),
    }
}

fn is_device(file: &File, path: &Path) -> Result<bool> {
    let info = file.metadata().map_err(failed("stat", path))?;
    Ok(info.file_type().is_block_device())
}

/// xfs accepts the hint only while a file has no blocks.
pub(super) fn hint_extents(path: &Path, bytes: u64) -> Result<()> {
    let file = open_or_create(path)?;
    if file.metadata().map_err(failed("stat", path))?.blocks() > 0 {
        return Ok(());
    }
    let bytes = u32::try_from(bytes)
        .map_err(|_| HostError::errno("set the extent size of", path, Errno::EINVAL))?;
    sys::fs::set_extent_size(file, bytes)
        .map_err(|errno| HostError::errno("set the extent size of", path, errno))
}

pub(super) fn allocate(path: &Path, size: u64, reserve: bool) -> Result<()> {
    let file = open_or_create(path)?;
    let end = offset(size, path)?;
    if reserve {
        // This is fallocate(2) itself and not the C library's posix_fallocate, which writes a byte
        // into every block where the file system cannot reserve blocks.
        let found = file.metadata().map_err(failed("stat", path))?;
        let whole = found.blocks() * 512 >= found.len();
        let start = offset(if whole { found.len() } else { 0 }, path)?;
        return reserve_blocks(&file, start, end)
            .map_err(|errno| HostError::errno("reserve blocks of", path, errno));
    }
    if length(&file, path)? < size {
        ftruncate(&file, end).map_err(|errno| HostError::errno("lengthen", path, errno))?;
    }
    Ok(())
}

/// Starts at the present end if everything before it has blocks: xfs requires free blocks for the
/// whole given range, also where blocks are already reserved. A signal can interrupt it between two
/// extents; blocks that are reserved stay so, and the next call passes them quickly.
fn reserve_blocks(
    file: &File,
    start: libc::off_t,
    end: libc::off_t,
) -> std::result::Result<(), Errno> {
    if start >= end {
        return Ok(());
    }
    loop {
        match fallocate(file, FallocateFlags::empty(), start, end - start) {
            Err(Errno::EINTR) => {}
            other => return other,
        }
    }
}

pub(super) fn shorten(path: &Path, size: u64) -> Result<()> {
    let file = open_existing(path, true)?;
    if length(&file, path)? > size {
        ftruncate(&file, offset(size, path)?)
            .map_err(|errno| HostError::errno("shorten", path, errno))?;
    }
    Ok(())
}

/// Writes zeros over every extent that has data and is not shared. FALLOC_FL_ZERO_RANGE would only
/// mark extents as unwritten. A write to a shared extent would be placed elsewhere, so it is left
/// to the other file.
pub(super) fn zero(path: &Path) -> Result<()> {
    let file = open_existing(path, true)?;
    let size = length(&file, path)?;
    let mut wipe = Wipe {
        file: &file,
        path,
        size,
        zeros: vec![0; PIECE],
        unflushed: 0,
        last_log: Instant::now(),
    };
    write_in_place(&file, path)?;
    // Extents are read one after the other: an image can have any number of them.
    let mut shared = map::shared_from(&file, path, 0);
    let mut run = shared.next().transpose()?;
    let mut at = 0;
    while let Some((start, end)) = next_data(&file, at, path)? {
        at = start;
        while at < end {
            while run.as_ref().is_some_and(|run| run.end <= at) {
                run = shared.next().transpose()?;
            }
            match &run {
                Some(run) if run.start <= at => at = run.end.min(end),
                Some(run) if run.start < end => {
                    wipe.range(at, run.start)?;
                    at = run.start;
                }
                Some(_) | None => {
                    wipe.range(at, end)?;
                    at = end;
                }
            }
        }
    }
    wipe.flush(at)
}

/// Where blocks have been shared, xfs preallocates other blocks around each write and keeps them
/// for minutes: a write would go there, although the block is not shared any more.
fn write_in_place(file: &File, path: &Path) -> Result<()> {
    file.sync_data().map_err(failed("fsync", path))?;
    match sys::fs::xfs_release_reserved(file) {
        // Other file systems do not support this call.
        Ok(()) | Err(Errno::ENOTTY | Errno::EOPNOTSUPP | Errno::EINVAL) => Ok(()),
        Err(errno) => Err(HostError::errno(
            "free the preallocated blocks of",
            path,
            errno,
        )),
    }
}

/// The next extent with data at or after an offset. Allocated blocks that were never written count
/// as holes: they cannot be read, so they contain nothing of the volume.
pub(super) fn next_data(file: &File, at: u64, path: &Path) -> Result<Option<(u64, u64)>> {
    let seek = |whence, from: u64| {
        lseek(file, offset(from, path)?, whence)
            .map(Some)
            .or_else(|errno| match errno {
                Errno::ENXIO => Ok(None),
                errno => Err(HostError::errno("find data in", path, errno)),
            })
    };
    let Some(start) = seek(Whence::SeekData, at)? else {
        return Ok(None);
    };
    let start = start as u64;
    let end = seek(Whence::SeekHole, start)?.map_or(start, |end| end as u64);
    Ok((end > start).then_some((start, end)))
}

struct Wipe<'a> {
    file: &'a File,
    path: &'a Path,
    size: u64,
    zeros: Vec<u8>,
    unflushed: u64,
    last_log: Instant,
}

impl Wipe<'_> {
    fn range(&mut self, start: u64, end: u64) -> Result<()> {
        let mut at = start;
        while at < end {
            let piece = (end - at).min(PIECE as u64);
            self.file
                .write_all_at(&self.zeros[..piece as usize], at)
                .map_err(failed("zero", self.path))?;
            at += piece;
            self.unflushed += piece;
            if self.unflushed >= FLUSH_EVERY {
                self.flush(at)?;
            }
        }
        Ok(())
    }

    fn flush(&mut self, at: u64) -> Result<()> {
        self.file.sync_data().map_err(failed("fsync", self.path))?;
        self.unflushed = 0;
        // This is advice only; a failure does no harm.
        let _ = posix_fadvise(self.file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
        if self.last_log.elapsed() >= PROGRESS_LOG_INTERVAL {
            self.last_log = Instant::now();
            tracing::info!(image = %self.path.display(), done = at, of = self.size, "overwriting an image with zeros");
        }
        Ok(())
    }
}

/// Copies the data of a range; where the source has none, the target keeps its data. The kernel does
/// not report which blocks of a device have data, so zeros count as none there: they need not be
/// written to an image that is being filled.
pub(super) fn copy_range(source: &Path, target: &Path, start: u64, bytes: u64) -> Result<()> {
    let from = open_existing(source, false)?;
    let to = open_existing(target, true)?;
    let end = start.saturating_add(bytes).min(length(&from, source)?);
    let room = length(&to, target)?;
    if end > room {
        let what = format!("it has {room} bytes, but {end} are needed");
        return Err(HostError::unexpected("copy to", target, what));
    }
    let skips_zeros = is_device(&from, source)?;
    each_data(&from, source, start..end, |at, piece| {
        if skips_zeros && piece.iter().all(|byte| *byte == 0) {
            return Ok(());
        }
        to.write_all_at(piece, at).map_err(failed("write", target))
    })
}

/// Reads the data of a range, and passes it on in pieces with their offsets.
pub(super) fn each_data(
    file: &File,
    path: &Path,
    range: Range<u64>,
    mut take: impl FnMut(u64, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut buffer = vec![0; PIECE];
    each_extent(file, path, range, |extent| {
        let mut at = extent.start;
        while at < extent.end {
            let piece = &mut buffer[..(extent.end - at).min(PIECE as u64) as usize];
            file.read_exact_at(piece, at)
                .map_err(failed("read", path))?;
            take(at, piece)?;
            at += piece.len() as u64;
        }
        Ok(())
    })
}

/// Passes on the extents with data in a range, whose pages need not stay in the cache after that. The
/// kernel does not report which blocks of a device have data, so there it is the whole range.
pub(super) fn each_extent(
    file: &File,
    path: &Path,
    range: Range<u64>,
    mut take: impl FnMut(Range<u64>) -> Result<()>,
) -> Result<()> {
    let Range { start, end } = range;
    let is_device = is_device(file, path)?;
    let find_data = |at| match is_device {
        true => Ok(Some((at, end))),
        false => next_data(file, at, path),
    };
    let mut at = start;
    while at < end
        && let Some((data, data_end)) = find_data(at)?
    {
        if data < end {
            take(data.max(start)..data_end.min(end))?;
        }
        at = data_end;
    }
    // This is advice only: a copy must not displace the cached pages of volumes in use.
    let (start, bytes) = (
        offset(start, path)?,
        offset(end.saturating_sub(start), path)?,
    );
    let _ = posix_fadvise(file, start, bytes, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
    Ok(())
}

pub(super) fn discard(path: &Path, from: u64) -> Result<()> {
    let file = open_existing(path, true)?;
    let size = length(&file, path)?;
    free(&file, path, from..size)
}

/// Frees the blocks of a range. The rest of a block that a device does not free keeps its data.
pub(super) fn free(file: &File, path: &Path, range: Range<u64>) -> Result<()> {
    if is_device(file, path)? {
        return discard_device(file, path, range);
    }
    if range.start < range.end {
        let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let length = offset(range.end - range.start, path)?;
        fallocate(file, punch, offset(range.start, path)?, length)
            .map_err(|errno| HostError::errno("free the blocks of", path, errno))?;
    }
    Ok(())
}

/// The kernel frees the blocks of one request under a lock for the whole thin pool, so each is short.
fn discard_device(device: &File, path: &Path, range: Range<u64>) -> Result<()> {
    const STEP_BYTES: u64 = 1 << 30;
    let mut at = range.start;
    while at < range.end {
        let length = STEP_BYTES.min(range.end - at);
        sys::block_discard(device, at, length)
            .map_err(|errno| HostError::errno("discard the blocks of", path, errno))?;
        at += length;
    }
    Ok(())
}
