//! Ranges of images that are sent to another host, and received from one.

use std::os::unix::fs::FileExt;
use std::path::Path;

use super::files::{failed, open_existing};
use super::image::{each_data, length};
use crate::error::HostError;
use crate::host::Result;
use crate::host::piece::{Piece, add};

pub(super) fn read(path: &Path, start: u64, bytes: u64) -> Result<Vec<Piece>> {
    let file = open_existing(path, false)?;
    let end = start.saturating_add(bytes).min(length(&file, path)?);
    let mut pieces = Vec::new();
    each_data(&file, path, start..end, |at, data| {
        add(&mut pieces, at, data);
        Ok(())
    })?;
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
