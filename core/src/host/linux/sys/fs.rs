//! Calls of file systems: trimming, growing while mounted, freezing, writing back.

use std::os::fd::{AsFd, AsRawFd};

use nix::errno::Errno;
use nix::libc;
use nix::{request_code_read, request_code_readwrite, request_code_write};

use super::{Result, ioctl_struct};

/// `struct xfs_fsop_geom_v1`: contains everything that is needed here, and is supported by every
/// kernel.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct XfsGeometry {
    pub block_size: u32,
    rt_extent_size: u32,
    pub ag_blocks: u32,
    ag_count: u32,
    log_blocks: u32,
    sector_size: u32,
    inode_size: u32,
    pub max_inode_percent: u32,
    pub data_blocks: u64,
    rt_blocks: u64,
    rt_extents: u64,
    log_start: u64,
    uuid: [u8; 16],
    sunit: u32,
    swidth: u32,
    version: i32,
    pub flags: u32,
    log_sector_size: u32,
    rt_sector_size: u32,
    dir_block_size: u32,
    pad: u32,
}

/// XFS_FSOP_GEOM_FLAGS_REFLINK.
pub const XFS_REFLINK: u32 = 1 << 20;

/// `struct xfs_growfs_data`.
#[repr(C)]
struct XfsGrow {
    new_blocks: u64,
    max_inode_percent: u32,
    pad: u32,
}

/// The beginning of `struct btrfs_ioctl_fs_info_args`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BtrfsInfo {
    /// The highest device ID in use; on a file system with one device, the ID of that device.
    pub max_id: u64,
    pub num_devices: u64,
    fsid: [u8; 16],
    node_size: u32,
    pub sector_size: u32,
    rest: [u64; 123],
}

/// `struct btrfs_ioctl_dev_info_args`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BtrfsDevice {
    id: u64,
    uuid: [u8; 16],
    bytes_used: u64,
    pub total_bytes: u64,
    unused: [u64; 379],
    /// Path of the device node, zero-terminated.
    pub path: [u8; 1024],
}

/// `struct btrfs_ioctl_vol_args`.
#[repr(C)]
struct BtrfsResize {
    fd: i64,
    name: [u8; 4088],
}

/// FS_NOCOW_FL: the file is overwritten in place.
pub const NO_COW: i32 = 0x0080_0000;
/// FS_COMPR_FL: the file is compressed.
pub const COMPRESSED: i32 = 0x0000_0004;

/// FS_IOC_GETFLAGS: the attributes that chattr changes.
pub fn flags(file: impl AsFd) -> Result<i32> {
    let mut flags = 0i32;
    let request = request_code_read!(b'f', 1, size_of::<nix::libc::c_long>());
    // SAFETY: FS_IOC_GETFLAGS writes an int, although its request number encodes a long.
    unsafe { ioctl_struct(file, request, &mut flags) }?;
    Ok(flags)
}

/// FS_IOC_SETFLAGS.
pub fn set_flags(file: impl AsFd, mut flags: i32) -> Result<()> {
    let request = request_code_write!(b'f', 2, size_of::<nix::libc::c_long>());
    // SAFETY: FS_IOC_SETFLAGS reads an int, although its request number encodes a long.
    unsafe { ioctl_struct(file, request, &mut flags) }.map(drop)
}

/// `struct fsxattr`.
#[repr(C)]
#[derive(Default)]
struct FileAttributes {
    flags: u32,
    extent_size: u32,
    extents: u32,
    project: u32,
    copied_extent_size: u32,
    pad: [u8; 8],
}

/// FS_XFLAG_EXTSIZE.
const EXTENT_SIZE: u32 = 0x0000_0800;

/// FS_IOC_FSSETXATTR with an extent size: the file system allocates blocks to the file in units of
/// `bytes`.
pub fn set_extent_size(file: impl AsFd, bytes: u32) -> Result<()> {
    let mut attributes = FileAttributes::default();
    let read = request_code_read!(b'X', 31, size_of::<FileAttributes>());
    // SAFETY: FS_IOC_FSGETXATTR writes an fsxattr.
    unsafe { ioctl_struct(file.as_fd(), read, &mut attributes) }?;
    attributes.flags |= EXTENT_SIZE;
    attributes.extent_size = bytes;
    let write = request_code_write!(b'X', 32, size_of::<FileAttributes>());
    // SAFETY: FS_IOC_FSSETXATTR reads an fsxattr.
    unsafe { ioctl_struct(file, write, &mut attributes) }.map(drop)
}

/// `struct fstrim_range`.
#[repr(C)]
struct TrimRange {
    start: u64,
    len: u64,
    min_len: u64,
}

/// FITRIM over a whole file system, of free runs of at least `min_len` bytes; returns the bytes
/// that were trimmed.
pub fn trim(file: impl AsFd, min_len: u64) -> Result<u64> {
    let mut range = TrimRange {
        start: 0,
        len: u64::MAX,
        min_len,
    };
    let request = request_code_readwrite!(b'X', 121, size_of::<TrimRange>());
    // SAFETY: FITRIM reads and writes an fstrim_range.
    unsafe { ioctl_struct(file, request, &mut range) }?;
    Ok(range.len)
}

/// `struct xfs_fs_eofblocks`.
#[repr(C)]
struct XfsReserved {
    version: u32,
    flags: u32,
    uid: u32,
    gid: u32,
    project: u32,
    pad: u32,
    least_size: u64,
    pads: [u64; 12],
}

/// Makes xfs free the blocks that it has preallocated for files, and those of removed files
/// (XFS_IOC_FREE_EOFBLOCKS). Files must have been synced before.
pub fn xfs_release_reserved(file: impl AsFd) -> Result<()> {
    let mut which = XfsReserved {
        version: 1,
        // XFS_EOF_FLAGS_SYNC
        flags: 1,
        uid: 0,
        gid: 0,
        project: 0,
        pad: 0,
        least_size: 0,
        pads: [0; 12],
    };
    let request = request_code_read!(b'X', 58, size_of::<XfsReserved>());
    // SAFETY: XFS_IOC_FREE_EOFBLOCKS reads an xfs_fs_eofblocks.
    unsafe { ioctl_struct(file, request, &mut which) }.map(drop)
}

/// Grows a mounted ext4 to `blocks` blocks.
pub fn ext4_resize(root: impl AsFd, blocks: u64) -> Result<()> {
    let mut blocks = blocks;
    let request = request_code_write!(b'f', 16, size_of::<u64>());
    // SAFETY: EXT4_IOC_RESIZE_FS reads 64 bits.
    unsafe { ioctl_struct(root, request, &mut blocks) }.map(drop)
}

/// Geometry of a mounted XFS.
pub fn xfs_geometry(root: impl AsFd) -> Result<XfsGeometry> {
    let mut geometry = XfsGeometry::default();
    let request = request_code_read!(b'X', 100, size_of::<XfsGeometry>());
    // SAFETY: XFS_IOC_FSGEOMETRY_V1 writes an xfs_fsop_geom_v1.
    unsafe { ioctl_struct(root, request, &mut geometry) }?;
    Ok(geometry)
}

/// Grows the data section of a mounted XFS to `blocks` blocks.
pub fn xfs_grow(root: impl AsFd, blocks: u64, max_inode_percent: u32) -> Result<()> {
    let mut grow = XfsGrow {
        new_blocks: blocks,
        max_inode_percent,
        pad: 0,
    };
    let request = request_code_write!(b'X', 110, size_of::<XfsGrow>());
    // SAFETY: XFS_IOC_FSGROWFSDATA reads an xfs_growfs_data.
    unsafe { ioctl_struct(root, request, &mut grow) }.map(drop)
}

/// FIFREEZE: all writers block from here on. It cannot be interrupted and has no time limit; EBUSY
/// if the file system is already frozen.
pub fn freeze(file: impl AsFd) -> Result<()> {
    let request = request_code_readwrite!(b'X', 119, size_of::<i32>());
    // SAFETY: FIFREEZE takes no argument, although its request number encodes an int.
    unsafe { ioctl_struct(file, request, &mut 0i32) }.map(drop)
}

/// FITHAW; EINVAL if the file system is not frozen.
pub fn thaw(file: impl AsFd) -> Result<()> {
    let request = request_code_readwrite!(b'X', 120, size_of::<i32>());
    // SAFETY: FITHAW takes no argument, although its request number encodes an int.
    unsafe { ioctl_struct(file, request, &mut 0i32) }.map(drop)
}

/// The devices and the sector size of a mounted btrfs.
pub fn btrfs_info(root: impl AsFd) -> Result<BtrfsInfo> {
    let mut info = BtrfsInfo {
        max_id: 0,
        num_devices: 0,
        fsid: [0; 16],
        node_size: 0,
        sector_size: 0,
        rest: [0; 123],
    };
    let request = request_code_read!(0x94, 31, size_of::<BtrfsInfo>());
    // SAFETY: BTRFS_IOC_FS_INFO reads and writes 1024 bytes.
    unsafe { ioctl_struct(root, request, &mut info) }?;
    Ok(info)
}

/// One device of a mounted btrfs.
pub fn btrfs_device(root: impl AsFd, id: u64) -> Result<BtrfsDevice> {
    let mut device = BtrfsDevice {
        id,
        uuid: [0; 16],
        bytes_used: 0,
        total_bytes: 0,
        unused: [0; 379],
        path: [0; 1024],
    };
    let request = request_code_readwrite!(0x94, 30, size_of::<BtrfsDevice>());
    // SAFETY: BTRFS_IOC_DEV_INFO reads and writes a btrfs_ioctl_dev_info_args.
    unsafe { ioctl_struct(root, request, &mut device) }?;
    Ok(device)
}

/// Grows one device of a mounted btrfs to its full size.
pub fn btrfs_grow(root: impl AsFd, id: u64) -> Result<()> {
    let mut resize = BtrfsResize {
        fd: 0,
        name: [0; 4088],
    };
    let words = format!("{id}:max");
    resize.name[..words.len()].copy_from_slice(words.as_bytes());
    let request = request_code_write!(0x94, 3, size_of::<BtrfsResize>());
    // SAFETY: BTRFS_IOC_RESIZE reads a btrfs_ioctl_vol_args, whose name is zero-terminated.
    unsafe { ioctl_struct(root, request, &mut resize) }.map(drop)
}

/// Begins to write the data of a file back, without waiting for it.
pub fn begin_write_back(file: impl AsFd) -> Result<()> {
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open, and no memory is passed.
    let done = unsafe { libc::sync_file_range(fd, 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
    Errno::result(done).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_sizes_of_the_kernels_headers() {
        assert_eq!(size_of::<XfsGeometry>(), 112);
        assert_eq!(size_of::<XfsGrow>(), 16);
        assert_eq!(size_of::<BtrfsInfo>(), 1024);
        assert_eq!(size_of::<BtrfsDevice>(), 4096);
        assert_eq!(size_of::<BtrfsResize>(), 4096);
    }
}
