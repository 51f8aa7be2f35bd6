//! A reader of qcow2 images, versions 2 and 3.
//!
//! It reads one file that is open already, and opens nothing: an image that refers to another file is
//! refused by its header. The layout is that of docs/interop/qcow2.txt of QEMU.

use std::fs::File;
use std::io::Read;

use crate::failure::{Failure, Result};
use crate::target::disk::read_at;

/// The sizes of clusters that QEMU supports, as exponents of two.
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// The largest first table, as in QEMU.
const L1_BYTES: u64 = 32 << 20;
/// The header of version 2, and the one of version 3 with all fields that are known.
const HEADER_2: usize = 72;
const HEADER_3: usize = 104;
/// A feature that only marks that reference counts, which are not read, may be wrong.
const DIRTY: u64 = 1;
/// The header has the type of compression.
const COMPRESSION_TYPE: u64 = 1 << 3;
/// Extensions of the header: their end, the name of an external file, the header of LUKS.
const EXTENSIONS_END: u32 = 0;
const EXTERNAL_DATA: u32 = 0x4441_5441;
const ENCRYPTION: u32 = 0x0537_be77;

/// Bits of an entry of a table.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const ZERO: u64 = 1;

/// The header of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    is_v3: bool,
    cluster_bits: u32,
    /// Bytes of the disk.
    pub size: u64,
    l1_offset: u64,
    l1_entries: u64,
    is_zstd: bool,
}

fn refused(what: impl std::fmt::Display) -> Failure {
    Failure::refused("FormatRefused", format!("the qcow2 image {what}"))
}

fn corrupt(what: impl std::fmt::Display) -> Failure {
    Failure::refused("Corrupt", format!("the qcow2 image {what}"))
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32> {
    let part = bytes.get(at..at + 4).and_then(|part| part.try_into().ok());
    part.map(u32::from_be_bytes)
        .ok_or_else(|| corrupt("has a short header"))
}

fn u64_at(bytes: &[u8], at: usize) -> Result<u64> {
    let part = bytes.get(at..at + 8).and_then(|part| part.try_into().ok());
    part.map(u64::from_be_bytes)
        .ok_or_else(|| corrupt("has a short header"))
}

impl Header {
    /// Parses the first cluster, or as much of it as is there. What refers to other files, and what
    /// this program does not know, is refused.
    pub fn parse(bytes: &[u8]) -> Result<Header> {
        if !bytes.starts_with(b"QFI\xfb") {
            return Err(corrupt("has no magic"));
        }
        let version = u32_at(bytes, 4)?;
        if !matches!(version, 2 | 3) {
            return Err(refused(format!("has the version {version}")));
        }
        if u64_at(bytes, 8)? != 0 || u32_at(bytes, 16)? != 0 {
            return Err(refused(
                "has a backing file; flatten it with qemu-img convert",
            ));
        }
        if u32_at(bytes, 32)? != 0 {
            return Err(refused("is encrypted"));
        }
        let cluster_bits = u32_at(bytes, 20)?;
        if !CLUSTER_BITS.contains(&cluster_bits) {
            return Err(corrupt(format!("has clusters of 2^{cluster_bits} bytes")));
        }
        let mut header = Header {
            is_v3: version == 3,
            cluster_bits,
            size: u64_at(bytes, 24)?,
            l1_offset: u64_at(bytes, 40)?,
            l1_entries: u32_at(bytes, 36)?.into(),
            is_zstd: false,
        };
        let mut length = HEADER_2;
        if header.is_v3 {
            length = u32_at(bytes, 100)? as usize;
            header.check_features(bytes, length)?;
        }
        check_extensions(bytes, length)?;
        header.check_table()?;
        Ok(header)
    }

    fn check_features(&mut self, bytes: &[u8], length: usize) -> Result<()> {
        let features = u64_at(bytes, 72)?;
        let unknown = features & !(DIRTY | COMPRESSION_TYPE);
        if unknown != 0 {
            return Err(refused(format!(
                "has incompatible features {unknown:#x}: an external data file, extended entries, corruption, or what this program does not know"
            )));
        }
        if length < HEADER_3 || !length.is_multiple_of(8) {
            return Err(corrupt(format!("has a header of {length} bytes")));
        }
        let kind = if length > HEADER_3 {
            bytes.get(HEADER_3).copied()
        } else {
            Some(0)
        };
        match (kind, features & COMPRESSION_TYPE != 0) {
            (Some(0), _) => {}
            (Some(1), true) => self.is_zstd = true,
            _ => return Err(refused("has an unknown compression")),
        }
        Ok(())
    }

    fn check_table(&self) -> Result<()> {
        let needed = self.size.div_ceil(self.l2_covers());
        if needed * 8 > L1_BYTES || self.l1_entries < needed {
            return Err(corrupt(format!(
                "has {} entries in its L1 table for a disk of {} bytes",
                self.l1_entries, self.size
            )));
        }
        match self.l1_offset % self.cluster() {
            0 => Ok(()),
            _ => Err(corrupt("has an L1 table that is not aligned to a cluster")),
        }
    }

    fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bytes of the disk that one second table maps.
    fn l2_covers(&self) -> u64 {
        self.cluster() * (self.cluster() / 8)
    }
}

fn check_extensions(bytes: &[u8], mut at: usize) -> Result<()> {
    // What is not within the first bytes is checked when the whole first cluster is there.
    while at + 8 <= bytes.len() {
        match u32_at(bytes, at)? {
            EXTENSIONS_END => break,
            EXTERNAL_DATA => return Err(refused("has an external data file")),
            ENCRYPTION => return Err(refused("is encrypted")),
            _ => {}
        }
        let length = u32_at(bytes, at + 4)? as usize;
        at = at
            .saturating_add(8)
            .saturating_add(length.next_multiple_of(8));
    }
    Ok(())
}

/// An image in a file.
pub struct Image<'a> {
    file: &'a File,
    length: u64,
    pub header: Header,
}

/// What is at a place of the disk.
enum Place {
    Zeros,
    At(u64),
    /// Compressed, at an offset with a length.
    Compressed(u64, usize),
}

impl<'a> Image<'a> {
    pub fn open(file: &'a File) -> Result<Image<'a>> {
        let failed = |error| Failure::target("read the temporary file", &error);
        let length = file.metadata().map_err(failed)?.len();
        let mut first = vec![0; 1 << *CLUSTER_BITS.end()];
        let count = read_at(file, 0, &mut first).map_err(failed)?;
        let bits = u32_at(&first[..count], 20)?.min(*CLUSTER_BITS.end());
        let header = Header::parse(&first[..count.min(1 << bits)])?;
        Ok(Image {
            file,
            length,
            header,
        })
    }

    /// Passes all of the disk to `write`, from its beginning to its end.
    pub fn read(&self, mut write: impl FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
        let header = &self.header;
        let mut cluster = vec![0; header.cluster() as usize];
        let zeros = vec![0; header.cluster() as usize];
        for l1 in 0..header.size.div_ceil(header.l2_covers()) {
            let l2 = self.second_table(l1)?;
            for index in 0..header.cluster() / 8 {
                let at = l1 * header.l2_covers() + index * header.cluster();
                if at >= header.size {
                    break;
                }
                let place = match &l2 {
                    None => Place::Zeros,
                    Some(table) => self.place(u64_at(table, index as usize * 8)?)?,
                };
                let bytes = match place {
                    Place::Zeros => &zeros,
                    Place::At(offset) => {
                        self.read_data(offset, &mut cluster)?;
                        &cluster
                    }
                    Place::Compressed(offset, length) => {
                        self.decompress(offset, length, &mut cluster)?;
                        &cluster
                    }
                };
                let length = (header.size - at).min(header.cluster());
                write(at, &bytes[..length as usize])?;
            }
        }
        Ok(())
    }

    fn second_table(&self, index: u64) -> Result<Option<Vec<u8>>> {
        let mut entry = [0; 8];
        self.read_exact(self.header.l1_offset.saturating_add(index * 8), &mut entry)?;
        let entry = u64::from_be_bytes(entry);
        if entry & !(OFFSET | COPIED) != 0 {
            return Err(corrupt(format!("has the entry {entry:#x} in its L1 table")));
        }
        match self.aligned(entry & OFFSET)? {
            0 => Ok(None),
            offset => {
                let mut table = vec![0; self.header.cluster() as usize];
                self.read_exact(offset, &mut table)?;
                Ok(Some(table))
            }
        }
    }

    fn place(&self, entry: u64) -> Result<Place> {
        if entry & COMPRESSED != 0 {
            // The offset has fewer bits the larger a cluster is; above it are 512-byte sectors.
            let bits = 62 - (self.header.cluster_bits - 8);
            let offset = entry & ((1 << bits) - 1);
            let sectors = (entry & !(COPIED | COMPRESSED)) >> bits;
            let length = (sectors + 1) * 512 - offset % 512;
            return Ok(Place::Compressed(offset, length as usize));
        }
        let flag = if self.header.is_v3 { ZERO } else { 0 };
        if entry & !(OFFSET | COPIED | flag) != 0 {
            return Err(corrupt(format!("has the entry {entry:#x} in an L2 table")));
        }
        match self.aligned(entry & OFFSET)? {
            0 => Ok(Place::Zeros),
            _ if entry & flag != 0 => Ok(Place::Zeros),
            offset => Ok(Place::At(offset)),
        }
    }

    fn aligned(&self, offset: u64) -> Result<u64> {
        match offset % self.header.cluster() {
            0 => Ok(offset),
            _ => Err(corrupt(format!(
                "refers to {offset:#x}, which is within a cluster"
            ))),
        }
    }

    /// A cluster at the end of the file may be shorter: QEMU writes no zeros after it.
    fn read_data(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let count = self.read_some(offset, into)?;
        into[count..].fill(0);
        Ok(())
    }

    fn read_exact(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        match self.read_some(offset, into)? == into.len() {
            true => Ok(()),
            false => Err(corrupt("is shorter than its tables require")),
        }
    }

    fn read_some(&self, offset: u64, into: &mut [u8]) -> Result<usize> {
        if offset >= self.length {
            return Err(corrupt("is shorter than its tables require"));
        }
        let read = read_at(self.file, offset, into);
        read.map_err(|error| Failure::target("read the temporary file", &error))
    }

    fn decompress(&self, offset: u64, length: usize, into: &mut [u8]) -> Result<()> {
        let mut packed = vec![0; length];
        let count = self.read_some(offset, &mut packed)?;
        let packed = &packed[..count];
        let unpacked = match self.header.is_zstd {
            true => {
                let decoder = ruzstd::decoding::StreamingDecoder::new_with_max_window_size(
                    packed,
                    1 << *CLUSTER_BITS.end(),
                );
                decoder
                    .map_err(|error| error.to_string())
                    .and_then(|mut decoder| {
                        decoder.read_exact(into).map_err(|error| error.to_string())
                    })
            }
            false => {
                let mut decoder = flate2::read::DeflateDecoder::new(packed);
                decoder.read_exact(into).map_err(|error| error.to_string())
            }
        };
        unpacked.map_err(|error| corrupt(format!("has an invalid compressed cluster: {error}")))
    }
}

#[cfg(test)]
mod tests;
