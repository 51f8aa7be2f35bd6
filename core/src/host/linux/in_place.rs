//! Controls which files of a btrfs are overwritten in place (FS_NOCOW_FL, which turns off checksums
//! as well).
//!
//! A loop device writes its image with direct I/O, and a file system may change a page while it is
//! being written. Where btrfs keeps checksums, that gives a checksum error of this block after a
//! crash before Linux 6.15, and slow buffered writes since. Blocks can be shared only between two
//! files with checksums or two without; only an empty file can be switched.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

use nix::errno::Errno;
use nix::sys::statfs::{BTRFS_SUPER_MAGIC, fstatfs};

use super::files::{open_existing, open_or_create, open_real_dir};
use super::image::length;
use super::sys::fs::{COMPRESSED, NO_COW, flags, set_flags};
use crate::error::HostError;
use crate::host::Result;

fn is_btrfs(file: impl AsFd, path: &Path) -> Result<bool> {
    let found = fstatfs(file).map_err(|errno| HostError::errno("statfs", path, errno))?;
    Ok(found.filesystem_type() == BTRFS_SUPER_MAGIC)
}

/// Makes files that are created in a directory from now on be written in place.
pub(super) fn of_folder(path: &Path) -> Result<()> {
    let folder = open_real_dir(path)?;
    if !is_btrfs(&folder, path)? {
        return Ok(());
    }
    let set = flags(&folder).and_then(|flags| match flags & COMPRESSED {
        0 => set_flags(&folder, flags | NO_COW),
        _ => Err(Errno::EINVAL),
    });
    match set {
        Ok(()) => Ok(()),
        // Zoned disks do not support this, and it conflicts with a directory that is to be
        // compressed.
        Err(errno @ (Errno::EPERM | Errno::EINVAL | Errno::EOPNOTSUPP)) => {
            tracing::warn!(
                path = %path.display(), %errno,
                "failed to disable copy-on-write for new files; images keep btrfs checksums"
            );
            Ok(())
        }
        Err(errno) => Err(HostError::errno("set flags of", path, errno)),
    }
}

/// Creates an empty file that can share blocks with another.
pub(super) fn make_like(path: &Path, source: &Path) -> Result<()> {
    let file = open_or_create(path)?;
    if length(&file, path)? > 0 || !is_btrfs(&file, path)? {
        return Ok(());
    }
    let source = (open_existing(source, false)?, source);
    let flags_of = |(file, path): (&File, &Path)| {
        flags(file).map_err(|errno| HostError::errno("read flags of", path, errno))
    };
    let in_place = flags_of((&source.0, source.1))? & NO_COW;
    let others = flags_of((&file, path))? & !NO_COW;
    // The flags are set even if nothing seems to change: with the mount option nodatasum, a new
    // file has no checksums even without the flag, and this enables them again.
    set_flags(&file, others | in_place)
        .map_err(|errno| HostError::errno("set flags of", path, errno))
}
