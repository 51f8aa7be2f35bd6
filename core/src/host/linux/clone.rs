//! Sharing blocks between images: whole images at once, in pieces before a cut, and the remaining
//! differences during the cut.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::libc;
use nix::sys::statfs::{XFS_SUPER_MAGIC, fstatfs};
use nix::sys::statvfs::fstatvfs;
use nix::unistd::ftruncate;

use super::files::{failed, open_existing, open_source};
use super::image::{length, next_data, offset};
use super::map::{self, Runs};
use super::sys::blocks::{clone_file, clone_range};
use crate::error::HostError;
use crate::host::difference::Differences;
use crate::host::{Done, Extent, Known, Result};

/// Writers of the source wait for a piece: with extents of 4 KiB and 15 us each, at most 30 ms.
const CLONE_PIECE: u64 = 8 << 20;
/// Writers also wait for a piece that is unshared, that is, copied: 4 MiB on a slow disk.
const UNSHARE_PIECE: u64 = 4 << 20;
/// A source changes its length between two reads of the length only once, at an expansion or its
/// undo, and not repeatedly.
const MAX_LENGTH_CHANGES: u32 = 8;

/// The two files of a clone.
struct Pair<'a> {
    source: File,
    source_path: &'a Path,
    target: File,
    target_path: &'a Path,
}

impl<'a> Pair<'a> {
    fn open(source_path: &'a Path, target_path: &'a Path) -> Result<Pair<'a>> {
        let pair = Pair {
            source: open_source(source_path)?,
            source_path,
            target: open_existing(target_path, true)?,
            target_path,
        };
        let id = |file: &File, path| {
            let found = file.metadata().map_err(failed("stat", path))?;
            Ok((found.dev(), found.ino()))
        };
        if id(&pair.source, source_path)? == id(&pair.target, target_path)? {
            let what = "source and target are the same file";
            return Err(HostError::unexpected("clone to", target_path, what));
        }
        Ok(pair)
    }

    /// Sets the length of the target to the present length of the source and returns it.
    fn fit(&self) -> Result<u64> {
        let size = length(&self.source, self.source_path)?;
        if length(&self.target, self.target_path)? != size {
            ftruncate(&self.target, offset(size, self.target_path)?)
                .map_err(|errno| HostError::errno("set the length of", self.target_path, errno))?;
        }
        Ok(size)
    }

    /// Block size of the file system in bytes; ranges must be aligned to it.
    fn block(&self) -> Result<u64> {
        let found = fstatvfs(&self.target)
            .map_err(|errno| HostError::errno("statfs", self.target_path, errno))?;
        Ok(found.block_size().max(512))
    }

    /// Whether a second read of a map returns the same addresses unless the file was written: xfs
    /// does not move blocks by itself. btrfs does, during a balance.
    fn has_stable_extents(&self) -> Result<bool> {
        let found = fstatfs(&self.target)
            .map_err(|errno| HostError::errno("statfs", self.target_path, errno))?;
        Ok(found.filesystem_type() == XFS_SUPER_MAGIC)
    }

    /// Clones a range of an image of `size` bytes. Returns false if the source's end has moved
    /// since.
    fn range(&self, start: u64, end: u64, size: u64) -> Result<bool> {
        match clone_range(&self.source, &self.target, start, end - start) {
            Ok(()) => Ok(true),
            Err(Errno::EINVAL) if length(&self.source, self.source_path)? != size => Ok(false),
            Err(errno) => Err(HostError::errno("clone to", self.target_path, errno)),
        }
    }

    /// Clones again the ranges that differ, as far as both maps show, and calls `note` for each
    /// range.
    fn clone_again(
        &self,
        source_map: impl Iterator<Item = Result<Extent>>,
        copy: impl Iterator<Item = Result<Extent>>,
        size: u64,
        mut note: impl FnMut((u64, u64)),
    ) -> Result<Done> {
        let block = self.block()?;
        let mut ranges = 0;
        for range in Differences::new(source_map, copy, 0, size.next_multiple_of(block)) {
            let (start, end) = range?;
            ranges += 1;
            note((start, end));
            let mut at = start - start % block;
            let end = end.next_multiple_of(block).min(size);
            while at < end {
                let next = (at + CLONE_PIECE).min(end);
                if !self.range(at, next, size)? {
                    let what = "its length changed while it was being cloned";
                    return Err(HostError::unexpected("clone", self.source_path, what));
                }
                at = next;
            }
        }
        Ok(Done::Cloned(ranges))
    }
}

pub(super) fn whole(source: &Path, target: &Path) -> Result<Done> {
    let pair = Pair::open(source, target)?;
    // FICLONE makes an empty target exactly as long as the source is at that moment; in a longer
    // target it would leave the data beyond the source's end.
    if length(&pair.target, target)? > 0 {
        ftruncate(&pair.target, 0)
            .map_err(|errno| HostError::errno("set the length of", target, errno))?;
    }
    clone_file(&pair.source, &pair.target)
        .map_err(|errno| HostError::errno("clone to", target, errno))?;
    map::count(&pair.target, target).map(Done::Cloned)
}

/// Skips extents without data; short ones within a piece are cloned with it, because a call costs
/// more than a few extents.
pub(super) fn ahead(source: &Path, target: &Path) -> Result<Done> {
    let pair = Pair::open(source, target)?;
    // Otherwise, data of the target would remain where the source has none.
    ftruncate(&pair.target, 0)
        .map_err(|errno| HostError::errno("set the length of", target, errno))?;
    let block = pair.block()?;
    let (mut size, mut at, mut races) = (pair.fit()?, 0, 0);
    while let Some((data, _)) = next_data(&pair.source, at, source)? {
        let start = data - data % block;
        let end = start.saturating_add(CLONE_PIECE).min(size);
        // The source has grown since its length was read.
        if start >= end || !pair.range(start, end, size)? {
            races += 1;
            if races > MAX_LENGTH_CHANGES {
                let what = "its length keeps changing";
                return Err(HostError::unexpected("clone", source, what));
            }
            size = pair.fit()?;
            if start >= size {
                break;
            }
            continue;
        }
        at = end;
        if at >= size {
            break;
        }
    }
    pair.fit()?;
    map::count(&pair.target, target).map(Done::Cloned)
}

/// One pass over both maps, in pages of fixed size. The copy's map is read again each time, because
/// its earlier content does not prove the present one: a balance or a defragmentation of the pool
/// moves blocks, and another file can reuse their old place. On xfs, where that is rare, the map is
/// taken from `known`, which halves the time during the freeze, and [`verify_copy`] verifies it
/// afterwards.
pub(super) fn rest(source: &Path, target: &Path, known: &Known) -> Result<Done> {
    let pair = Pair::open(source, target)?;
    let size = pair.fit()?;
    // The maps are read one after the other: on xfs two concurrent readers of maps that share
    // blocks contend at each extent for the lock of the same allocation group, and wake each other
    // 100,000 times.
    let mut extents = 0;
    let source_map = Runs::new(&pair.source, source, 0).inspect(|_| extents += 1);
    let copy = Runs::new(&pair.target, target, 0);
    let mut known = known.lock();
    let before = known.runs.take();
    let done = if known.is_last {
        match before {
            None => pair.clone_again(source_map, copy, size, drop),
            Some(before) => {
                let redone = &mut known.redone;
                let same = before.runs().map(Ok);
                let done = pair.clone_again(source_map, same, size, |range| redone.push(range));
                known.runs = Some(before);
                done
            }
        }
    } else if pair.has_stable_extents()? {
        let mut new_map = known.map();
        let noting = source_map.inspect(|run| {
            if let Ok(run) = run {
                new_map.see(run);
            }
        });
        let done = match before {
            Some(before) => pair.clone_again(noting, before.runs().map(Ok), size, drop),
            None => pair.clone_again(noting, copy, size, drop),
        }?;
        known.remember(new_map);
        Ok(done)
    } else {
        pair.clone_again(source_map, copy, size, drop)
    }?;
    known.set_extents(extents);
    Ok(done)
}

/// Whether the map of the copy contains what was assumed about it.
pub(super) fn verify_copy(copy: &Path, known: &Known) -> Result<bool> {
    let file = open_existing(copy, false)?;
    let size = length(&file, copy)?;
    known.lock().verify_copy(Runs::new(&file, copy, 0), size)
}

/// Gives every shared block of the range a place of its own; a crash leaves some of them shared.
/// Blocks that are not shared are skipped, because FALLOC_FL_UNSHARE_RANGE would allocate blocks
/// for holes.
pub(super) fn unshare(path: &Path, start: u64, bytes: u64) -> Result<()> {
    let file = open_existing(path, true)?;
    let end = start.saturating_add(bytes);
    let mode = FallocateFlags::FALLOC_FL_UNSHARE_RANGE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    for shared in map::shared_from(&file, path, start) {
        let shared = shared?;
        let (mut at, last) = (shared.start.max(start), shared.end.min(end));
        if shared.start >= end {
            break;
        }
        while at < last {
            // An image that was truncated in the meantime shares nothing any more, and must not get
            // new blocks.
            if length(&file, path)? <= at {
                return Ok(());
            }
            // Pieces end at multiples of the piece size, so that no block is in two pieces.
            let next = (at - at % UNSHARE_PIECE + UNSHARE_PIECE).min(last);
            match fallocate(&file, mode, offset(at, path)?, offset(next - at, path)?) {
                Ok(()) => at = next,
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(HostError::errno("unshare the blocks of", path, errno)),
            }
        }
    }
    Ok(())
}

/// Tests whether two files in a directory can share blocks, with two unnamed files, which disappear
/// with their descriptors even after a crash.
pub(super) fn trial(folder: &Path) -> bool {
    use std::os::unix::fs::{FileExt, OpenOptionsExt};
    let nameless = || {
        std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .mode(0o600)
            .custom_flags(libc::O_TMPFILE)
            .open(folder)
    };
    let (Ok(source), Ok(target)) = (nameless(), nameless()) else {
        // Unnamed files are not supported, or there is no space for them. Every file system that is
        // known to share blocks supports them, so sharing is not assumed where it cannot be tested.
        return false;
    };
    source.write_all_at(&[0x5a; 4096], 0).is_ok() && clone_file(&source, &target).is_ok()
}
