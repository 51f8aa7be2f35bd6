//! Growing file systems to the size of their devices.
//!
//! Mounted file systems are grown by an ioctl on a descriptor of the mount's root that was verified
//! to be the right file system, and not by resize2fs, xfs_growfs or `btrfs filesystem resize`:
//! these take paths, which may refer to something else by the time they are used, and they only
//! issue the same ioctls. resize2fs grows an unmounted ext4, because the kernel has no call for
//! that.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use nix::errno::Errno;

use super::files::failed;
use super::program::RESIZE2FS;
use super::sys::fs as fs_calls;
use super::target_path::Folders;
use super::{loop_device, missing, superblock};
use crate::error::HostError;
use crate::host::{Device, Result};
use crate::model::FsType;

/// Smallest size of an XFS allocation group in blocks (XFS_MIN_AG_BLOCKS): the kernel does not add
/// a shorter last one.
const XFS_AG_MIN: u64 = 64;

/// The result of a growth.
struct Plan {
    now: u64,
    then: u64,
    act: Act,
}

enum Act {
    Ext4,
    Xfs { max_inode_percent: u32 },
    Btrfs { id: u64 },
}

pub(super) fn wanted(
    folders: &Folders,
    device: &Device,
    mount_point: &Path,
    fs: FsType,
) -> Result<bool> {
    let root = folders.place("measure", mount_point)?.open_dir("measure")?;
    let plan = plan(&root, device, mount_point, fs)?;
    Ok(plan.then > plan.now)
}

pub(super) fn grow(
    folders: &Folders,
    device: &Device,
    mount_point: &Path,
    fs: FsType,
) -> Result<()> {
    let root = folders.place("grow", mount_point)?.open_dir("grow")?;
    let plan = plan(&root, device, mount_point, fs)?;
    if plan.then <= plan.now {
        return Ok(());
    }
    let grown = match plan.act {
        Act::Ext4 => fs_calls::ext4_resize(&root, plan.then),
        Act::Xfs { max_inode_percent } => fs_calls::xfs_grow(&root, plan.then, max_inode_percent),
        Act::Btrfs { id } => fs_calls::btrfs_grow(&root, id),
    };
    grown.map_err(|errno| match (errno, fs) {
        (Errno::EPERM, FsType::Ext4) if !missing::has_capability(missing::SYS_RESOURCE) => {
            HostError::errno(
                "grow (without the capability CAP_SYS_RESOURCE) the ext4 at",
                mount_point,
                errno,
            )
        }
        (Errno::EPERM, _) if !missing::has_capability(missing::SYS_ADMIN) => HostError::unexpected(
            "grow",
            mount_point,
            "this process lacks the capability CAP_SYS_ADMIN; run the driver as privileged",
        ),
        (errno, _) => HostError::errno("grow", mount_point, errno),
    })
}

/// Whether an unmounted ext4 can be grown without moving anything in it: the space that mkfs
/// reserved for group descriptors suffices. An interruption of such a growth can be repaired.
pub(super) fn can_grow_unmounted(device: &Device) -> Result<bool> {
    let found = ext4_superblock(device)?;
    Ok(found.can_grow_in_place(loop_device::bytes(device)?))
}

/// Runs resize2fs, to the size of the device. resize2fs refuses a file system that e2fsck has not
/// just checked.
pub(super) fn grow_unmounted(device: &Device) -> Result<()> {
    let path = &device.path;
    let name = path.to_string_lossy();
    let ended = RESIZE2FS.run_on(loop_device::open_verified(device)?, path, &[name.as_ref()])?;
    match ended.status.success() {
        true => Ok(()),
        false => Err(ended.error("grow", path)),
    }
}

fn plan(root: &File, device: &Device, mount_point: &Path, fs: FsType) -> Result<Plan> {
    let failed = |errno| HostError::errno("measure", mount_point, errno);
    let bytes = loop_device::bytes(device)?;
    match fs {
        FsType::Ext4 => {
            prove(root, device, mount_point)?;
            let found = ext4_superblock(device)?;
            Ok(Plan {
                now: found.blocks,
                then: found.blocks_on(bytes),
                act: Act::Ext4,
            })
        }
        FsType::Xfs => {
            prove(root, device, mount_point)?;
            let found = fs_calls::xfs_geometry(root).map_err(failed)?;
            Ok(Plan {
                now: found.data_blocks,
                then: xfs_blocks(bytes, found.block_size.into(), found.ag_blocks.into()),
                act: Act::Xfs {
                    max_inode_percent: found.max_inode_percent,
                },
            })
        }
        FsType::Btrfs => {
            let info = fs_calls::btrfs_info(root).map_err(failed)?;
            let found = fs_calls::btrfs_device(root, info.max_id).map_err(failed)?;
            prove_btrfs(&info, &found, device, mount_point)?;
            let sector = u64::from(info.sector_size.max(1));
            Ok(Plan {
                now: found.total_bytes,
                then: bytes / sector * sector,
                act: Act::Btrfs { id: info.max_id },
            })
        }
    }
}

/// Reads through the device's page cache, in which the mounted file system keeps its superblock.
pub(super) fn ext4_superblock(device: &Device) -> Result<superblock::Ext4> {
    let mut head = vec![0; 4096];
    loop_device::open_verified(device)?
        .read_exact_at(&mut head, 0)
        .map_err(failed("read", &device.path))?;
    superblock::ext4(&head)
        .ok_or_else(|| HostError::unexpected("measure", &device.path, "it has no ext4 superblock"))
}

fn xfs_blocks(device_bytes: u64, block_size: u64, ag_blocks: u64) -> u64 {
    let blocks = device_bytes / block_size.max(1);
    let rest = blocks % ag_blocks.max(1);
    if rest < XFS_AG_MIN {
        blocks - rest
    } else {
        blocks
    }
}

/// Verifies on the open root of a mount that its file system is the one on a device.
pub(super) fn prove_root(
    action: &'static str,
    root: &File,
    device: &Device,
    mount_point: &Path,
    fs: FsType,
) -> Result<()> {
    let proven = match fs {
        FsType::Ext4 | FsType::Xfs => prove(root, device, mount_point),
        FsType::Btrfs => fs_calls::btrfs_info(root)
            .and_then(|info| Ok((info, fs_calls::btrfs_device(root, info.max_id)?)))
            .map_err(|errno| HostError::errno(action, mount_point, errno))
            .and_then(|(info, found)| prove_btrfs(&info, &found, device, mount_point)),
    };
    proven.map_err(|error| HostError { action, ..error })
}

fn prove(root: &File, device: &Device, mount_point: &Path) -> Result<()> {
    let found = root.metadata().map_err(failed("stat", mount_point))?;
    if found.dev() == device.rdev {
        return Ok(());
    }
    let what = format!("{} is not mounted there", device.path.display());
    Err(HostError::unexpected("measure", mount_point, what))
}

/// Files of btrfs have an anonymous device number, so btrfs is asked for its devices.
fn prove_btrfs(
    info: &fs_calls::BtrfsInfo,
    found: &fs_calls::BtrfsDevice,
    device: &Device,
    mount_point: &Path,
) -> Result<()> {
    let end = found
        .path
        .iter()
        .position(|c| *c == 0)
        .unwrap_or(found.path.len());
    let path = String::from_utf8_lossy(&found.path[..end]).into_owned();
    let same = std::fs::metadata(&path).is_ok_and(|node| node.rdev() == device.rdev);
    if info.num_devices == 1 && same {
        return Ok(());
    }
    let what = format!(
        "the file system mounted there has {} devices, including {path}, instead of only {}",
        info.num_devices,
        device.path.display()
    );
    Err(HostError::unexpected("measure", mount_point, what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_last_allocation_group_that_is_too_short_is_omitted() {
        assert_eq!(xfs_blocks(1000 * 4096, 4096, 500), 1000);
        assert_eq!(xfs_blocks(1063 * 4096, 4096, 500), 1000);
        assert_eq!(xfs_blocks(1064 * 4096 + 511, 4096, 500), 1064);
    }
}
