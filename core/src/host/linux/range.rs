//! Ranges of images that are sent to another host, and received from one.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use super::files::{failed, open_existing};
use super::image::{is_device, length, next_data, offset};
use crate::error::HostError;
use crate::host::Result;
use crate::host::piece::{Piece, add};

/// Size of one read.
const PIECE: usize = 1 << 20;

/// The kernel does not report which blocks of a device have data, so all of it is read.
pub(super) fn read(path: &Path, start: u64, bytes: u64) -> Result<Vec<Piece>> {
    let file = open_existing(path, false)?;
    let end = start.saturating_add(bytes).min(length(&file, path)?);
    let is_device = is_device(&file, path)?;
    let find_data = |at| match is_device {
        true => Ok(Some((at, end))),
        false => next_data(&file, at, path),
    };
    let mut pieces = Vec::new();
    let mut buffer = vec![0; PIECE];
    let mut at = start;
    while at < end
        && let Some((data, data_end)) = find_data(at)?
    {
        let data_end = data_end.min(end);
        at = data.max(start);
        while at < data_end {
            let read = &mut buffer[..(data_end - at).min(PIECE as u64) as usize];
            file.read_exact_at(read, at).map_err(failed("read", path))?;
            add(&mut pieces, at, read);
            at += read.len() as u64;
        }
    }
    drop_pages(&file, path, start, bytes)?;
    Ok(pieces)
}

pub(super) fn write(path: &Path, start: u64, bytes: u64, pieces: &[Piece]) -> Result<()> {
    let file = open_existing(path, true)?;
    let (end, room) = (start.saturating_add(bytes), length(&file, path)?);
    if end > room {
        let what = format!("it has {room} bytes, but {end} are needed");
        return Err(HostError::unexpected("write", path, what));
    }
    if pieces.iter().any(|it| it.offset < start || it.end() > end) {
        let what = format!("the data is not between {start} and {end}");
        return Err(HostError::unexpected("write", path, what));
    }
    pieces.iter().try_for_each(|piece| {
        file.write_all_at(&piece.bytes, piece.offset)
            .map_err(failed("write", path))
    })
}

/// This is advice only: a copy must not displace the cached pages of volumes in use.
fn drop_pages(file: &File, path: &Path, start: u64, bytes: u64) -> Result<()> {
    let (start, bytes) = (offset(start, path)?, offset(bytes, path)?);
    let _ = posix_fadvise(file, start, bytes, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
    Ok(())
}
