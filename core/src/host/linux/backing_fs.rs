//! Properties of the file system that holds a pool's directory.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::libc;

use super::files::failed;
use super::{clone, mounts, sys};
use crate::error::HostError;
use crate::host::{BackingFs, FolderMount, Mount, Result};

/// Limits of a loop device's logical block size: a sector, and the smallest page.
const SECTOR_MIN: u32 = 512;
const SECTOR_MAX: u32 = 4096;

pub(super) fn backing_fs(path: &Path) -> Result<BackingFs> {
    let folder = open(path)?;
    let mount = mount_of_open(&folder, path)?.mount;
    let min_sector = fit(direct_io(path).or_else(|| disk_sector(&folder, &mount)));
    let sector = fit(shared_blocks(&folder));
    Ok(BackingFs {
        sector: sector.max(min_sector),
        min_sector,
        shares_blocks: clone::trial(path),
        in_place: mount.fs_name != "btrfs"
            || sys::fs::flags(&folder).is_ok_and(|flags| flags & sys::fs::NO_COW != 0),
        fs_name: mount.fs_name,
        mount_point: mount.mount_point,
    })
}

fn open(path: &Path) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECTORY)
        .open(path)
        .map_err(failed("open directory", path))
}

pub(super) fn mount_of(path: &Path) -> Result<FolderMount> {
    mount_of_open(&open(path)?, path)
}

/// Finds the mount by its ID: a prefix of the path would be wrong with symbolic links, bind mounts
/// and over-mounts.
fn mount_of_open(folder: &File, path: &Path) -> Result<FolderMount> {
    let found = sys::statx(folder).map_err(|errno| HostError::errno("statx", path, errno))?;
    if found.stx_mask & libc::STATX_MNT_ID == 0 {
        let what =
            "the kernel does not report the mount ID of a file; Linux 5.8 or newer is needed";
        return Err(HostError::unexpected("statx", path, what));
    }
    let mut table = mounts::table()?.into_iter();
    let mount = table.find(|mount| u64::from(mount.id) == found.stx_mnt_id);
    let mount = mount.ok_or_else(|| {
        let what = "its mount is not in the mount table of this mount namespace (was it unmounted lazily?)";
        HostError::unexpected("find the mount of", path, what)
    })?;
    let is_mount_point = found.stx_attributes & libc::STATX_ATTR_MOUNT_ROOT as u64 != 0;
    Ok(FolderMount::new(mount, is_mount_point, found.stx_ino))
}

/// Limits a size to those that a loop device can have.
fn fit(size: Option<u32>) -> u32 {
    let sector = size.unwrap_or(SECTOR_MIN);
    sector.next_power_of_two().clamp(SECTOR_MIN, SECTOR_MAX)
}

/// An XFS file that shares blocks (a snapshot, a clone, and their source) accepts direct writes of
/// whole file system blocks only. A loop device with a smaller block size falls back to buffered
/// I/O on it: Linux 6.15 and newer decide that when it is attached, older kernels for each write.
fn shared_blocks(folder: &File) -> Option<u32> {
    let geometry = sys::fs::xfs_geometry(folder).ok()?;
    (geometry.flags & sys::fs::XFS_REFLINK != 0).then_some(geometry.block_size)
}

/// The alignment that statx reports for an unnamed file, which disappears when it is closed.
fn direct_io(path: &Path) -> Option<u32> {
    let nameless = OpenOptions::new()
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags(libc::O_TMPFILE)
        .open(path)
        .ok()?;
    let found = sys::statx(&nameless).ok()?;
    (found.stx_mask & libc::STATX_DIOALIGN != 0 && found.stx_dio_offset_align > 0)
        .then_some(found.stx_dio_offset_align)
}

/// The logical block size of the disk; for a partition, of its whole disk. On btrfs the disk is
/// found by the source of the mount, because files have an anonymous device number.
fn disk_sector(folder: &File, mount: &Mount) -> Option<u32> {
    use nix::sys::stat::{major, minor};
    use std::os::unix::fs::MetadataExt;
    let by_number = |rdev: u64| {
        let disk = format!("/sys/dev/block/{}:{}", major(rdev), minor(rdev));
        ["queue", "../queue"].iter().find_map(|queue| {
            let text =
                std::fs::read_to_string(format!("{disk}/{queue}/logical_block_size")).ok()?;
            text.trim().parse().ok()
        })
    };
    by_number(folder.metadata().ok()?.dev())
        .or_else(|| by_number(std::fs::metadata(&mount.source).ok()?.rdev()))
}
