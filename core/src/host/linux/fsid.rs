//! Gives an unmounted btrfs a new fsid.
//!
//! This makes the same change as `btrfstune -M` (the superblock gets the new fsid, and keeps the
//! old one as the metadata UUID, which every tree block still has; Linux 5.0 and newer mount that),
//! but only in the superblocks. btrfstune also commits a transaction; after that a log tree that
//! was written by fsync and not yet replayed no longer matches, and the file system cannot be
//! mounted at all.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use uuid::Uuid;

use super::files::{failed, open_existing};
use super::program::BTRFSTUNE;
use super::superblock::{Btrfs, Checksum};
use crate::error::HostError;
use crate::host::Result;

const ACTION: &str = "change the fsid of";

/// Offsets of the superblocks: the primary one, and its copies where the device is long enough.
const PLACES: [u64; 3] = [64 << 10, 64 << 20, 256 << 30];

/// Writes the copies first and the primary superblock last, so a crash leaves the primary with
/// either the old fsid or the new one.
pub(super) fn renew(image: &Path, uuid: Uuid) -> Result<()> {
    let file = open_existing(image, true)?;
    let wrong = |what: &str| HostError::unexpected(ACTION, image, what);
    let first = read(&file, image, PLACES[0])?.ok_or_else(|| wrong("it contains no btrfs"))?;
    first.check().map_err(|what| wrong(&what))?;
    if first.fsid() == uuid {
        return Ok(());
    }
    match first.checksum() {
        Checksum::Good => {}
        Checksum::Bad => return Err(wrong("its superblock is damaged")),
        Checksum::Foreign if first.has_log() => {
            return Err(wrong(
                "its log must be replayed first, and its checksums are not crc32c, so its fsid cannot be changed directly; mount its source once and copy it again",
            ));
        }
        Checksum::Foreign => return by_program(image, uuid),
    }
    for place in PLACES.into_iter().rev() {
        let Some(mut block) = read(&file, image, place)? else {
            continue;
        };
        if !matches!(block.checksum(), Checksum::Good) || block.fsid() != first.fsid() {
            // This copy belongs to another file system, so the kernel does not use it.
            continue;
        }
        if place == PLACES[0] {
            file.sync_data().map_err(failed("fsync", image))?;
        }
        block.renew(uuid);
        file.write_all_at(block.bytes(), place)
            .map_err(failed(ACTION, image))?;
    }
    file.sync_data().map_err(failed("fsync", image))
}

/// The superblock at an offset; `None` if there is none, or if the image is shorter.
fn read(file: &File, image: &Path, place: u64) -> Result<Option<Btrfs>> {
    let mut bytes = vec![0; Btrfs::BYTES];
    match file.read_exact_at(&mut bytes, place) {
        Ok(()) => Ok(Btrfs::read(bytes, place)),
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(HostError::io(ACTION, image, &error)),
    }
}

/// Uses btrfstune where the checksum is of a type that is not computed here.
fn by_program(image: &Path, uuid: Uuid) -> Result<()> {
    let uuid = uuid.to_string();
    let words = [
        "-f".as_ref(),
        "-M".as_ref(),
        uuid.as_ref(),
        image.as_os_str(),
    ];
    let ended = BTRFSTUNE.run(image, &words)?;
    if ended.status.success() {
        Ok(())
    } else {
        Err(ended.error(ACTION, image))
    }
}
