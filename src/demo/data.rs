//! Test data: written with a checksum, and compared.

use std::fs::{File, OpenOptions};
use std::io::{Read, Result, Seek, SeekFrom, Write};
use std::path::Path;

/// Size of one write.
const PIECE: usize = 1 << 20;

/// Pseudo-random numbers from a seed: xorshift64.
struct Numbers(u64);

impl Numbers {
    fn fill(&mut self, piece: &mut [u8]) {
        for word in piece.chunks_mut(8) {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            word.copy_from_slice(&self.0.to_le_bytes()[..word.len()]);
        }
    }
}

/// FNV-1a over words: detects changed data, but not forged data.
struct Checksum(u64);

impl Checksum {
    fn new() -> Checksum {
        Checksum(0xcbf2_9ce4_8422_2325)
    }

    fn add(&mut self, piece: &[u8]) {
        for word in piece.chunks(8) {
            let mut bytes = [0; 8];
            bytes[..word.len()].copy_from_slice(word);
            self.0 = (self.0 ^ u64::from_le_bytes(bytes)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

/// Writes bytes from the start of a file or device, durably; returns their checksum.
pub(super) fn write(path: &Path, bytes: u64, seed: u64) -> Result<u64> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)?;
    // The seed must not be zero, because xorshift would then generate only zeros.
    let mut numbers = Numbers(seed << 1 | 1);
    let mut checksum = Checksum::new();
    let mut piece = vec![0; PIECE];
    let mut rest = bytes;
    while rest > 0 {
        let part = &mut piece[..usize::try_from(rest).map_or(PIECE, |rest| rest.min(PIECE))];
        numbers.fill(part);
        checksum.add(part);
        file.write_all(part)?;
        rest -= part.len() as u64;
    }
    file.sync_all()?;
    Ok(checksum.0)
}

/// The checksum of the first bytes of a file or device.
pub(super) fn checksum(path: &Path, bytes: u64) -> Result<u64> {
    let mut file = File::open(path)?.take(bytes);
    let mut checksum = Checksum::new();
    let mut piece = vec![0; PIECE];
    loop {
        let mut filled = 0;
        while filled < PIECE {
            match file.read(&mut piece[filled..])? {
                0 => break,
                count => filled += count,
            }
        }
        checksum.add(&piece[..filled]);
        if filled < PIECE {
            return Ok(checksum.0);
        }
    }
}

/// Size of a device in bytes.
pub(super) fn device_bytes(path: &Path) -> Result<u64> {
    File::open(path)?.seek(SeekFrom::End(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_distinguished_from_anything_else() {
        let file = tempfile::NamedTempFile::with_prefix("slackwater-").unwrap();
        let bytes = 3 * PIECE as u64 + 5;
        let written = write(file.path(), bytes, 7).unwrap();
        assert_eq!(checksum(file.path(), bytes).unwrap(), written);
        assert_ne!(checksum(file.path(), bytes - 1).unwrap(), written);
        assert_ne!(write(file.path(), bytes, 6).unwrap(), written);
    }
}
