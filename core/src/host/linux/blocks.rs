//! Reads and writes of a block device past the page cache, which may be older than the disk where
//! another process or another mapped device has written.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use super::files::failed;
use super::{loop_device, sys};
use crate::error::HostError;
use crate::host::{Device, Result};

/// Alignment of memory, offsets and lengths. It is at least the logical block size of each disk.
const ALIGNMENT: usize = 4096;
/// Size of one write to a whole device.
const PIECE: usize = 1 << 20;

/// Memory that the kernel accepts for direct I/O.
struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    length: usize,
}

impl Aligned {
    fn zeros(length: usize) -> Aligned {
        let bytes = vec![0; length + ALIGNMENT];
        let start = bytes.as_ptr().align_offset(ALIGNMENT);
        Aligned {
            bytes,
            start,
            length,
        }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.length]
    }
}

/// A device that is open for reads.
pub(super) struct Reader<'a> {
    device: &'a Device,
    open: File,
}

impl Reader<'_> {
    pub(super) fn open(device: &Device) -> Result<Reader<'_>> {
        let open = loop_device::open_direct(device, false)?;
        Ok(Reader { device, open })
    }

    pub(super) fn read(&self, offset: u64, length: usize) -> Result<Vec<u8>> {
        let mut memory = Aligned::zeros(length);
        self.open
            .read_exact_at(memory.bytes(), offset)
            .map_err(failed("read", &self.device.path))?;
        Ok(memory.bytes().to_vec())
    }
}

pub(super) fn read(device: &Device, offset: u64, length: usize) -> Result<Vec<u8>> {
    Reader::open(device)?.read(offset, length)
}

pub(super) fn write(device: &Device, offset: u64, bytes: &[u8]) -> Result<()> {
    let mut memory = Aligned::zeros(bytes.len());
    memory.bytes().copy_from_slice(bytes);
    let open = loop_device::open_direct(device, true)?;
    open.write_all_at(memory.bytes(), offset)
        .map_err(failed("write", &device.path))?;
    flush(&open, device)
}

/// The zeros are written one after another: a request to zero a range, and a write of zeros that the
/// kernel recognizes, need not allocate blocks.
pub(super) fn fill_with_zeros(device: &Device, from: u64) -> Result<()> {
    let open = loop_device::open_direct(device, true)?;
    let size = sys::block_bytes(&open)
        .map_err(|errno| HostError::errno("read the size of", &device.path, errno))?;
    each_piece(from..size, |bytes, at| {
        open.write_all_at(bytes, at)
            .map_err(failed("zero", &device.path))
    })?;
    flush(&open, device)
}

/// Zeros are written as well: a thin device without a block reads as zeros.
pub(super) fn rewrite(device: &Device, range: &Range<u64>) -> Result<()> {
    let open = loop_device::open_direct(device, true)?;
    each_piece(range.clone(), |bytes, at| {
        open.read_exact_at(bytes, at)
            .map_err(failed("read", &device.path))?;
        open.write_all_at(bytes, at)
            .map_err(failed("write", &device.path))
    })
}

/// Calls a function with the memory and the offset of each piece of a range.
fn each_piece(range: Range<u64>, write: impl Fn(&mut [u8], u64) -> Result<()>) -> Result<()> {
    let mut memory = Aligned::zeros(PIECE);
    let mut at = range.start;
    while at < range.end {
        let piece = (range.end - at).min(PIECE as u64) as usize;
        write(&mut memory.bytes()[..piece], at)?;
        at += piece as u64;
    }
    Ok(())
}

fn flush(open: &File, device: &Device) -> Result<()> {
    open.sync_all().map_err(failed("fsync", &device.path))?;
    sys::block_flush(open).map_err(|errno| HostError::errno("flush", &device.path, errno))
}
