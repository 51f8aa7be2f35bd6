//! Ranges of images that are sent to another host, and received from one.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use nix::errno::Errno;

use super::files::{failed, open_existing};
use super::image::{each_data, each_extent, free, length};
use crate::error::HostError;
use crate::host::Result;
use crate::host::piece::{Piece, add, add_owned};

pub(super) fn read(path: &Path, start: u64, bytes: u64) -> Result<Vec<Piece>> {
    let file = open_existing(path, false)?;
    let end = start.saturating_add(bytes).min(length(&file, path)?);
    let mut pieces = Vec::new();
    each_extent(&file, path, start..end, |extent| {
        let mut bytes = vec![0; (extent.end - extent.start) as usize];
        file.read_exact_at(&mut bytes, extent.start)
            .map_err(failed("read", path))?;
        add_owned(&mut pieces, extent.start, bytes);
        Ok(())
    })?;
    Ok(pieces)
}

pub(super) fn write(
    path: &Path,
    range: Range<u64>,
    pieces: &[Piece],
    zeros: &[Range<u64>],
) -> Result<()> {
    let file = open_existing(path, true)?;
    let (end, room) = (range.end, length(&file, path)?);
    if end > room {
        let what = format!("it has {room} bytes, but {end} are needed");
        return Err(HostError::unexpected("write", path, what));
    }
    let written = pieces.iter().map(|piece| piece.offset..piece.end());
    let mut written = written.chain(zeros.iter().cloned());
    if written.any(|it| it.start < range.start || it.end > end) {
        let what = format!("the data is not between {} and {end}", range.start);
        return Err(HostError::unexpected("write", path, what));
    }
    let mut zeros = zeros.iter();
    zeros.try_for_each(|range| zero(&file, path, range.clone()))?;
    pieces.iter().try_for_each(|piece| {
        file.write_all_at(&piece.bytes, piece.offset)
            .map_err(failed("write", path))
    })
}

/// Frees the blocks of a range, and writes zeros to what still has data: a thin pool frees whole
/// blocks only, and not every file system and not every thin pool frees blocks in this way.
fn zero(file: &File, path: &Path, range: Range<u64>) -> Result<()> {
    match free(file, path, range.clone()) {
        Err(error) if error.code() == Some(Errno::EOPNOTSUPP) => {}
        freed => freed?,
    }
    each_data(file, path, range, |at, data| {
        let mut present = Vec::new();
        add(&mut present, at, data);
        // A block that was freed must not be allocated again.
        present.iter().try_for_each(|piece| {
            let zeros = vec![0; piece.bytes.len()];
            let zeroed = file.write_all_at(&zeros, piece.offset);
            zeroed.map_err(failed("zero", path))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_gets_data_and_zeros_and_keeps_the_rest() {
        let file = tempfile::Builder::new().prefix("slackwater-").tempfile();
        let file = file.unwrap();
        file.as_file().write_all_at(&[7; 64 << 10], 0).unwrap();
        let piece = Piece {
            offset: 8192,
            bytes: vec![9; 4096],
        };
        let zeros = [4096..8192, 12288..20480];
        write(file.path(), 4096..32768, &[piece], &zeros).unwrap();
        let mut expected = vec![7; 64 << 10];
        expected[4096..20480].fill(0);
        expected[8192..12288].fill(9);
        assert!(std::fs::read(file.path()).unwrap() == expected);
        let outside = write(file.path(), 4096..8192, &[], &[4096..4097, 8000..8193]);
        let why = crate::error::chain(&outside.unwrap_err());
        assert!(why.contains("not between"), "{why}");
    }
}
