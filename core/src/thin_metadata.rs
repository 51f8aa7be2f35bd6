//! Reads the metadata of a thin pool: which thin devices it has, and which blocks each of them has.
//!
//! The metadata is a B-tree of thin devices, whose values are the roots of a B-tree of blocks each.
//! The kernel changes it while the pool is active, so only the snapshot of the metadata that a pool
//! holds on request (`reserve_metadata_snap`) can be read then.
//!
//! Every block has a checksum and its own number. Both are verified, and keys must increase: damage
//! is an error, and never a thin device or a change that is missing.

mod tree;

use std::collections::BTreeMap;

use self::tree::{Cursor, Tree};
use crate::crc32c::crc32c;

/// The size of a block of metadata in bytes.
pub const BLOCK: usize = 4096;
/// The superblock is the first block.
const SUPERBLOCK: u64 = 0;
const MAGIC: u64 = 27_022_010;
/// Versions of the format. The second one has features that do not change what is read here.
const VERSIONS: std::ops::RangeInclusive<u32> = 1..=2;
/// What the kernel combines with the checksums of superblocks.
const SUPERBLOCK_SALT: u32 = 160_774;
/// The number of bits of the time in a mapping. The number of the block precedes it.
const TIME_BITS: u32 = 24;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    #[error("block {block} of the metadata of the thin pool is damaged: {what}")]
    Block { block: u64, what: &'static str },
    #[error("block {block} of the metadata of the thin pool cannot be read: {error}")]
    Unreadable { block: u64, error: String },
}

pub type Result<T> = std::result::Result<T, Damage>;

fn damaged<T>(block: u64, what: &'static str) -> Result<T> {
    Err(Damage::Block { block, what })
}

/// Reads the block of metadata with this number, [`BLOCK`] bytes.
pub type ReadBlock<'a> = dyn Fn(u64) -> std::result::Result<Vec<u8>, String> + 'a;

/// What is read of a superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    pub transaction_id: u64,
    /// The block with the superblock of the snapshot of the metadata; 0 without one.
    pub held_root: u64,
    /// Blocks of data in use; 0 in a snapshot of the metadata, which does not count them.
    pub data_blocks_used: u64,
    /// The size of a block of data in bytes.
    pub data_block_bytes: u64,
    mapping_root: u64,
    details_root: u64,
}

/// What the metadata says of a thin device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThinDevice {
    /// Blocks of data, including shared ones.
    pub mapped_blocks: u64,
    /// The transaction ID of the pool when the device was created.
    pub transaction_id: u64,
    /// The time, which counts snapshots, when it was created.
    pub created: u32,
    /// The time when it was the origin of a snapshot for the last time.
    pub snapshotted: u32,
}

/// Blocks of a thin device that follow each other, also in the data of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappedRange {
    /// The first block of the thin device.
    pub block: u64,
    /// The block of data in which it is.
    pub data: u64,
    /// The number of blocks.
    pub count: u64,
}

impl MappedRange {
    fn continues_at(&self, block: u64, data: u64) -> bool {
        (block, data) == (self.block + self.count, self.data + self.count)
    }
}

/// The metadata of a pool.
pub struct Metadata<'a> {
    read: &'a ReadBlock<'a>,
    superblock: Superblock,
}

impl<'a> Metadata<'a> {
    /// The metadata that the superblock describes. The pool must not be active.
    pub fn open(read: &'a ReadBlock<'a>) -> Result<Metadata<'a>> {
        Metadata::open_at(read, SUPERBLOCK)
    }

    /// The snapshot of the metadata that the pool holds; `None` if it holds none.
    pub fn open_snapshot(read: &'a ReadBlock<'a>) -> Result<Option<Metadata<'a>>> {
        let live = Metadata::open(read)?;
        match live.superblock.held_root {
            SUPERBLOCK => Ok(None),
            block => Metadata::open_at(read, block).map(Some),
        }
    }

    fn open_at(read: &'a ReadBlock<'a>, block: u64) -> Result<Metadata<'a>> {
        let bytes = get_block(read, block, SUPERBLOCK_SALT)?;
        if u64_at(&bytes, 32) != MAGIC {
            return damaged(block, "it is not a superblock");
        }
        if !VERSIONS.contains(&u32_at(&bytes, 40)) {
            return damaged(block, "its version is not known");
        }
        let superblock = Superblock {
            transaction_id: u64_at(&bytes, 48),
            held_root: u64_at(&bytes, 56),
            // The space map of the data: its size, and the number of blocks in use.
            data_blocks_used: u64_at(&bytes, 64 + 8),
            data_block_bytes: u64::from(u32_at(&bytes, 336)) * 512,
            mapping_root: u64_at(&bytes, 320),
            details_root: u64_at(&bytes, 328),
        };
        Ok(Metadata { read, superblock })
    }

    pub fn superblock(&self) -> Superblock {
        self.superblock
    }

    /// All thin devices by their ID.
    pub fn devices(&self) -> Result<BTreeMap<u32, ThinDevice>> {
        let mut found = BTreeMap::new();
        let root = self.superblock.details_root;
        let mut details = Cursor::new(Tree::open(self.read, root, 24)?);
        while let Some((id, value)) = details.next_entry()? {
            let Ok(id) = u32::try_from(id) else {
                return damaged(root, "the ID of a thin device is too large");
            };
            let device = ThinDevice {
                mapped_blocks: u64_at(&value, 0),
                transaction_id: u64_at(&value, 8),
                created: u32_at(&value, 16),
                snapshotted: u32_at(&value, 20),
            };
            found.insert(id, device);
        }
        Ok(found)
    }

    /// The blocks of a thin device; `None` if there is no such device.
    fn blocks(&self, id: u32) -> Result<Option<Cursor<'a>>> {
        let tree = Tree::open(self.read, self.superblock.mapping_root, 8)?;
        let mut devices = Cursor::new(tree);
        devices.seek(u64::from(id))?;
        match devices.next_entry()? {
            Some((found, root)) if found == u64::from(id) => {
                let tree = Tree::open(self.read, u64_at(&root, 0), 8)?;
                Ok(Some(Cursor::new(tree)))
            }
            _ => Ok(None),
        }
    }

    /// The ranges of blocks that a thin device has, in increasing order, from this block on, and at
    /// most `limit` of them. `None` if there is no such device.
    pub fn mapped(&self, id: u32, from: u64, limit: usize) -> Result<Option<Vec<MappedRange>>> {
        let Some(mut blocks) = self.blocks(id)? else {
            return Ok(None);
        };
        blocks.seek(from)?;
        let mut found: Vec<MappedRange> = Vec::new();
        while let Some((block, value)) = blocks.next_entry()? {
            let data = u64_at(&value, 0) >> TIME_BITS;
            if let Some(last) = found.last_mut().filter(|it| it.continues_at(block, data)) {
                last.count += 1;
                continue;
            }
            if found.len() == limit {
                break;
            }
            let count = 1;
            found.push(MappedRange { block, data, count });
        }
        Ok(Some(found))
    }
}

/// Reads a block, and verifies its checksum and its number.
fn get_block(read: &ReadBlock<'_>, block: u64, salt: u32) -> Result<Vec<u8>> {
    let bytes = read(block).map_err(|error| Damage::Unreadable { block, error })?;
    if bytes.len() != BLOCK {
        return damaged(block, "it is not complete");
    }
    // The kernel leaves out the last step of the standard's checksum.
    if u32_at(&bytes, 0) != !crc32c(&bytes[4..]) ^ salt {
        return damaged(block, "its checksum is wrong");
    }
    if u64_at(&bytes, 8) != block {
        return damaged(block, "it has the number of another block");
    }
    Ok(bytes)
}

/// The number at this place. The caller has verified the length.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let bytes = bytes.get(at..).and_then(|rest| rest.first_chunk());
    bytes.copied().map_or(0, u32::from_le_bytes)
}

/// Like [`u32_at`].
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let bytes = bytes.get(at..).and_then(|rest| rest.first_chunk());
    bytes.copied().map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
mod tests;
