//! ioctls about the blocks of a file: where they are, and sharing them with another file.

use std::os::fd::{AsFd, AsRawFd};

use nix::libc;
use nix::{request_code_readwrite, request_code_write};

use super::{Result, ioctl_struct, ioctl_value};

/// Records per FIEMAP call: 112 KiB, so that two maps can be read in parallel with little memory,
/// and the cost of a call is small compared with its records.
pub const RECORDS: usize = 2048;

/// `struct fiemap_extent` of linux/fiemap.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Record {
    pub logical: u64,
    pub physical: u64,
    pub length: u64,
    reserved64: [u64; 2],
    pub flags: u32,
    reserved: [u32; 3],
}

/// FIEMAP_EXTENT_*: the last extent of the file.
pub const LAST: u32 = 0x1;
/// The location is not known.
pub const UNKNOWN: u32 = 0x2;
/// Delayed allocation: not yet placed.
pub const DELALLOC: u32 = 0x4;
/// Compressed or encrypted.
pub const ENCODED: u32 = 0x8;
pub const ENCRYPTED: u32 = 0x80;
/// Offsets may not be block aligned.
pub const NOT_ALIGNED: u32 = 0x100;
/// Stored with metadata.
pub const INLINE: u32 = 0x200;
/// Shares a block with other files.
pub const TAIL: u32 = 0x400;
/// Allocated, never written.
pub const UNWRITTEN: u32 = 0x800;
/// Shared with another file.
pub const SHARED: u32 = 0x2000;

/// `struct fiemap`.
#[repr(C)]
#[derive(Default)]
struct Head {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    room: u32,
    reserved: u32,
}

/// `struct fiemap`, followed by its records.
#[repr(C)]
pub struct Map {
    head: Head,
    records: [Record; RECORDS],
}

/// FIEMAP_FLAG_SYNC.
const SYNC: u32 = 1;

impl Map {
    /// An empty map with space for one answer.
    pub fn new() -> Box<Map> {
        Box::new(Map {
            head: Head::default(),
            records: [Record::default(); RECORDS],
        })
    }

    /// Reads the part of a file's map at or after `start`, with `sync` after writing back dirty
    /// pages.
    pub fn read(&mut self, file: impl AsFd, start: u64, sync: bool) -> Result<&[Record]> {
        self.head = Head {
            start,
            length: u64::MAX - start,
            flags: if sync { SYNC } else { 0 },
            room: RECORDS as u32,
            ..Head::default()
        };
        let request = request_code_readwrite!(b'f', 11, size_of::<Head>());
        // SAFETY: FS_IOC_FIEMAP reads and writes a fiemap and at most `room` records behind it.
        unsafe { ioctl_struct(file, request, self) }?;
        Ok(&self.records[..(self.head.mapped as usize).min(RECORDS)])
    }

    /// A record of the last answer.
    pub fn record(&self, at: usize) -> Option<&Record> {
        self.records.get(at)
    }
}

/// Number of records of a file's map, without writing back dirty pages.
pub fn count(file: impl AsFd) -> Result<u64> {
    let mut head = Head {
        length: u64::MAX,
        ..Head::default()
    };
    let request = request_code_readwrite!(b'f', 11, size_of::<Head>());
    // SAFETY: FS_IOC_FIEMAP with room for no record reads and writes a fiemap.
    unsafe { ioctl_struct(file, request, &mut head) }?;
    Ok(head.mapped.into())
}

/// `struct file_clone_range` of linux/fs.h.
#[repr(C)]
struct CloneRange {
    source: i64,
    offset: u64,
    length: u64,
    target_offset: u64,
}

/// FICLONE: replaces the target's content by the source's, as far as the source extends.
pub fn clone_file(source: impl AsFd, target: impl AsFd) -> Result<()> {
    let request = request_code_write!(0x94, 9, size_of::<libc::c_int>());
    ioctl_value(target, request, source.as_fd().as_raw_fd()).map(drop)
}

/// FICLONERANGE at the same offset in both.
pub fn clone_range(source: impl AsFd, target: impl AsFd, offset: u64, length: u64) -> Result<()> {
    let mut range = CloneRange {
        source: source.as_fd().as_raw_fd().into(),
        offset,
        length,
        target_offset: offset,
    };
    let request = request_code_write!(0x94, 13, size_of::<CloneRange>());
    // SAFETY: FICLONERANGE reads a file_clone_range; the source's descriptor stays open during the
    // call.
    unsafe { ioctl_struct(target, request, &mut range) }.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_sizes_of_the_kernels_headers() {
        assert_eq!(size_of::<Record>(), 56);
        assert_eq!(size_of::<Head>(), 32);
        assert_eq!(size_of::<Map>(), 32 + RECORDS * 56);
        assert_eq!(size_of::<CloneRange>(), 32);
    }
}
