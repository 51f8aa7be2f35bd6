//! Sharing blocks: whole images at once, ahead of a cut in pieces, and what is left within it.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::libc;
use nix::sys::statfs::{XFS_SUPER_MAGIC, fstatfs};
use nix::sys::statvfs::fstatvfs;
use nix::unistd::ftruncate;

use super::files::{failed, open_existing};
use super::image::{length, next_data, offset};
use super::map::{self, Runs};
use super::sys::blocks::{clone_file, clone_range};
use crate::error::HostError;
use crate::host::difference::Differences;
use crate::host::{Done, Extent, Known, Result};

/// Writers of the source wait for a piece: at 4 KiB an extent and 15 us each, 30 ms at worst.
const CLONE_PIECE: u64 = 8 << 20;
/// The same for a piece that is copied: 4 MiB of a slow disk.
const UNSHARE_PIECE: u64 = 4 << 20;
/// A source that shrinks or grows between two looks at its length does so once, at an expansion
/// or its undo; not again and again.
const RACES: u32 = 8;

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
            source: open_existing(source_path, false)?,
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

    /// The target gets the source's present length, which is given back.
    fn fit(&self) -> Result<u64> {
        let size = length(&self.source, self.source_path)?;
        if length(&self.target, self.target_path)? != size {
            ftruncate(&self.target, offset(size, self.target_path)?)
                .map_err(|errno| HostError::errno("set the length of", self.target_path, errno))?;
        }
        Ok(size)
    }

    /// Bytes of a block of their file system: what ranges must be aligned to.
    fn block(&self) -> Result<u64> {
        let found = fstatvfs(&self.target)
            .map_err(|errno| HostError::errno("statfs", self.target_path, errno))?;
        Ok(found.block_size().max(512))
    }

    /// Whether a map's second look tells what it told before, unless somebody has written: xfs
    /// moves nothing by itself. btrfs does, while it's balanced.
    fn keeps_places(&self) -> Result<bool> {
        let found = fstatfs(&self.target)
            .map_err(|errno| HostError::errno("statfs", self.target_path, errno))?;
        Ok(found.filesystem_type() == XFS_SUPER_MAGIC)
    }

    /// Clones a range of an image of `size` bytes. False: the source's end has moved meanwhile.
    fn range(&self, start: u64, end: u64, size: u64) -> Result<bool> {
        match clone_range(&self.source, &self.target, start, end - start) {
            Ok(()) => Ok(true),
            Err(Errno::EINVAL) if length(&self.source, self.source_path)? != size => Ok(false),
            Err(errno) => Err(HostError::errno("clone to", self.target_path, errno)),
        }
    }

    /// Clones again what differs, as far as both maps say, and tells `note` of each range.
    fn put_right(
        &self,
        ours: impl Iterator<Item = Result<Extent>>,
        copy: impl Iterator<Item = Result<Extent>>,
        size: u64,
        mut note: impl FnMut((u64, u64)),
    ) -> Result<Done> {
        let block = self.block()?;
        let mut ranges = 0;
        for range in Differences::new(ours, copy, 0, size.next_multiple_of(block)) {
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
    // FICLONE makes an empty target exactly as long as the source is at that moment; it would
    // leave what a longer one has beyond.
    if length(&pair.target, target)? > 0 {
        ftruncate(&pair.target, 0)
            .map_err(|errno| HostError::errno("set the length of", target, errno))?;
    }
    clone_file(&pair.source, &pair.target)
        .map_err(|errno| HostError::errno("clone to", target, errno))?;
    map::count(&pair.target, target).map(Done::Cloned)
}

/// Runs without data are left out, short ones within a piece are cloned with it: a call costs
/// more than the few runs.
pub(super) fn ahead(source: &Path, target: &Path) -> Result<Done> {
    let pair = Pair::open(source, target)?;
    // Whatever the target had would else stay where the source has no data.
    ftruncate(&pair.target, 0)
        .map_err(|errno| HostError::errno("set the length of", target, errno))?;
    let block = pair.block()?;
    let (mut size, mut at, mut races) = (pair.fit()?, 0, 0);
    while let Some((data, _)) = next_data(&pair.source, at, source)? {
        let start = data - data % block;
        let end = start.saturating_add(CLONE_PIECE).min(size);
        // What lies beyond the length that was seen has come since.
        if start >= end || !pair.range(start, end, size)? {
            races += 1;
            if races > RACES {
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

/// One pass over both maps, in pages of fixed size. The copy's is read anew each time, since what
/// it was is no proof of what it is: a balance or a defragmentation of the pool moves blocks, and
/// their old place may be anybody's. On xfs, where that is rare, it's taken from `known`, half the
/// time in the window, and [`agrees`] proves it afterwards.
pub(super) fn rest(source: &Path, target: &Path, known: &Known) -> Result<Done> {
    let pair = Pair::open(source, target)?;
    let size = pair.fit()?;
    // One after the other: on xfs two readers of maps that share their blocks meet at each extent
    // in the lock of the same group of blocks, and wake each other up 100,000 times.
    let mut extents = 0;
    let ours = Runs::new(&pair.source, source, 0).inspect(|_| extents += 1);
    let copy = Runs::new(&pair.target, target, 0);
    let mut known = known.lock();
    let before = known.runs.take();
    let done = if known.is_last {
        match before {
            None => pair.put_right(ours, copy, size, drop),
            Some(before) => {
                let redone = &mut known.redone;
                let same = before.runs().map(Ok);
                let done = pair.put_right(ours, same, size, |range| redone.push(range));
                known.runs = Some(before);
                done
            }
        }
    } else if pair.keeps_places()? {
        let mut seen = known.map();
        let noting = ours.inspect(|run| {
            if let Ok(run) = run {
                seen.see(run);
            }
        });
        let done = match before {
            Some(before) => pair.put_right(noting, before.runs().map(Ok), size, drop),
            None => pair.put_right(noting, copy, size, drop),
        }?;
        known.remember(seen);
        Ok(done)
    } else {
        pair.put_right(ours, copy, size, drop)
    }?;
    known.set_extents(extents);
    Ok(done)
}

/// Whether the copy has what was taken for granted of it.
pub(super) fn verify_copy(copy: &Path, known: &Known) -> Result<bool> {
    let file = open_existing(copy, false)?;
    let size = length(&file, copy)?;
    known.lock().verify_copy(Runs::new(&file, copy, 0), size)
}

/// Every block of the range that another file has as well gets a place of its own; a crash leaves
/// some of them shared. What isn't shared isn't touched: FALLOC_FL_UNSHARE_RANGE would give blocks
/// to holes.
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
            // One that is emptied meanwhile shares nothing any more, and is not to take blocks.
            if length(&file, path)? <= at {
                return Ok(());
            }
            // Up to the next multiple, so that no block is in two pieces.
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

/// Whether two files in a folder can share blocks: tried with two that have no name, and so
/// vanish with their descriptors, whatever happens.
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
        // No such files, or no room for them: every file system that is known to share blocks has
        // them, so what can't be tried is not promised.
        return false;
    };
    source.write_all_at(&[0x5a; 4096], 0).is_ok() && clone_file(&source, &target).is_ok()
}
