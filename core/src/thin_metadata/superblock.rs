//! The superblock, and the copy of it that begins a snapshot of the metadata.

use std::ops::RangeInclusive;

use super::{
    BLOCK, Damage, ReadBlock, Result, SUPERBLOCK, Source, damaged, get_block, u32_at, u64_at,
};

pub(super) const MAGIC: u64 = 27_022_010;
/// Versions of the format. The second one has features that do not change what is read here.
const VERSIONS: RangeInclusive<u32> = 1..=2;
/// What the kernel combines with the checksums of superblocks.
pub(super) const SALT: u32 = 160_774;
const SECTOR: u64 = 512;
/// The smallest blocks of data and the largest ones, 64 KiB and 1 GiB. Others are multiples of the
/// smallest.
const DATA_BLOCKS: RangeInclusive<u64> = 1 << 16..=1 << 30;
/// How often the superblock is read until its checksum is right. The kernel writes it again with each
/// commit, and a disk may return a part from before and a part from after that.
const READS: usize = 3;

/// Where the fields of a superblock are.
mod at {
    pub(super) const MAGIC: usize = 32;
    pub(super) const VERSION: usize = 40;
    pub(super) const TRANSACTION_ID: usize = 48;
    pub(super) const HELD_ROOT: usize = 56;
    /// Space maps begin with the number of blocks and the number of those in use.
    pub(super) const DATA_SPACE: usize = 64;
    pub(super) const METADATA_SPACE: usize = 192;
    pub(super) const MAPPING_ROOT: usize = 320;
    pub(super) const DETAILS_ROOT: usize = 328;
    pub(super) const DATA_BLOCK_SECTORS: usize = 336;
    pub(super) const BLOCK_SECTORS: usize = 340;
    // At 344 is the number of blocks of metadata when it was created. It is not that of today: an
    // extension changes the space map alone.
    pub(super) const INCOMPATIBLE: usize = 360;
}

/// What is read of a superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    pub transaction_id: u64,
    /// The block with the superblock of the snapshot of the metadata; 0 without one.
    pub held_root: u64,
    /// The size of a block of data in bytes.
    pub data_block_bytes: u64,
    pub(super) mapping_root: u64,
    pub(super) details_root: u64,
}

/// The superblock, the number of blocks of metadata and the number of blocks of data.
pub(super) fn get(read: &ReadBlock<'_>) -> Result<(Superblock, u64, u64)> {
    let mut bytes = get_block(read, SUPERBLOCK, SALT);
    for _ in 1..READS {
        if matches!(bytes, Err(Damage::Block { .. })) {
            bytes = get_block(read, SUPERBLOCK, SALT);
        }
    }
    let bytes = bytes?;
    let superblock = parse(SUPERBLOCK, &bytes)?;
    let (blocks, data_blocks) = (
        u64_at(&bytes, at::METADATA_SPACE),
        u64_at(&bytes, at::DATA_SPACE),
    );
    if data_blocks
        .checked_mul(superblock.data_block_bytes)
        .is_none()
    {
        return damaged(SUPERBLOCK, format!("it has {data_blocks} blocks of data"));
    }
    Ok((superblock, blocks, data_blocks))
}

/// The superblock of a snapshot. The kernel removes the space maps from it.
pub(super) fn get_snapshot(source: Source<'_>, block: u64) -> Result<Superblock> {
    parse(block, &source.get(SUPERBLOCK, block, SALT)?)
}

fn parse(block: u64, bytes: &[u8]) -> Result<Superblock> {
    let magic = u64_at(bytes, at::MAGIC);
    if magic != MAGIC {
        return damaged(
            block,
            format!("its magic number is {magic} instead of {MAGIC}"),
        );
    }
    let version = u32_at(bytes, at::VERSION);
    if !VERSIONS.contains(&version) {
        return damaged(block, format!("its version is {version} instead of 1 or 2"));
    }
    let features = u32_at(bytes, at::INCOMPATIBLE);
    if features != 0 {
        return damaged(
            block,
            format!("it has the features {features:#x}, which are unknown"),
        );
    }
    let block_bytes = u64::from(u32_at(bytes, at::BLOCK_SECTORS)) * SECTOR;
    if block_bytes != BLOCK as u64 {
        return damaged(
            block,
            format!("its blocks have {block_bytes} bytes instead of {BLOCK}"),
        );
    }
    let data_block_bytes = u64::from(u32_at(bytes, at::DATA_BLOCK_SECTORS)) * SECTOR;
    if !DATA_BLOCKS.contains(&data_block_bytes)
        || !data_block_bytes.is_multiple_of(*DATA_BLOCKS.start())
    {
        return damaged(
            block,
            format!("its blocks of data have {data_block_bytes} bytes"),
        );
    }
    Ok(Superblock {
        transaction_id: u64_at(bytes, at::TRANSACTION_ID),
        held_root: u64_at(bytes, at::HELD_ROOT),
        data_block_bytes,
        mapping_root: u64_at(bytes, at::MAPPING_ROOT),
        details_root: u64_at(bytes, at::DETAILS_ROOT),
    })
}
