//! Reads the metadata of a thin pool: which thin devices it has, and which blocks each of them has.
//!
//! The metadata is a B-tree of thin devices, whose values are the roots of a B-tree of blocks each.
//! The kernel changes it while the pool is active, so only the snapshot of the metadata that a pool
//! holds on request (`reserve_metadata_snap`) can be read then.
//!
//! Every block has a checksum and its own number. Both are verified, and keys must increase: damage
//! is an error, and never a thin device or a change that is missing.

mod superblock;
mod tree;

use std::collections::BTreeMap;
use std::ops::Range;

pub use self::superblock::Superblock;
use self::tree::{Cursor, Entry, Tree};
use crate::crc32c::crc32c;
use crate::error::HostError;

/// The size of a block of metadata in bytes.
pub const BLOCK: usize = 4096;
/// The metadata in bytes that a mapped block needs at least: a full leaf has only entries, with a key
/// and a value of 8 bytes each.
pub const MIN_PER_MAPPING: u64 = 16;
/// The metadata in bytes that a mapped block needs at most, in a map that no discard has thinned out.
/// A leaf has at most 252 entries ((4096 - 32) / 16, rounded down to a multiple of 3) and is split
/// into halves, so it has at least 126: 32.5 bytes for each. Internal nodes have as many entries, and
/// the bitmaps of the space maps have 2 bits for each block: less than 1 byte. A block that has three
/// or more references is in a further tree, with at most 336 entries ((4096 - 32) / 12) and at least
/// 168 in a leaf: 24.4 bytes, for three mappings. That is 42; the rest is for the copies that exist
/// until a transaction ends. A thick copy of a thin volume begins with its map, in which discards may
/// have left leaves with 84 entries: at most 62 bytes for each. The tenth of the metadata that is
/// always kept free is enough for that if such copies have a third of the metadata.
pub const MAX_PER_MAPPING: u64 = 48;
/// The metadata in bytes that a map needs at most besides: a node that is not half full in each of at
/// most 4 levels, which are enough for 126^4 blocks.
pub const MAX_PER_MAP: u64 = 4 * BLOCK as u64;
/// The superblock is the first block.
pub const SUPERBLOCK: u64 = 0;
/// The number of bits of the time in a mapping. The number of the block precedes it.
const TIME_BITS: u32 = 24;
/// The IDs of thin devices have 24 bits.
const IDS: Range<u64> = 0..1 << 24;

#[derive(Debug, thiserror::Error)]
pub enum Damage {
    /// A block is not as the kernel writes it.
    #[error("block {block} of the metadata of the thin pool is damaged: {what}")]
    Block { block: u64, what: String },
    /// A block cannot be read.
    #[error("block {block} of the metadata of the thin pool cannot be read")]
    Unreadable {
        block: u64,
        #[source]
        error: HostError,
    },
}

pub type Result<T> = std::result::Result<T, Damage>;

fn damaged<T>(block: u64, what: impl Into<String>) -> Result<T> {
    let what = what.into();
    Err(Damage::Block { block, what })
}

/// Reads the block of metadata with this number, [`BLOCK`] bytes.
pub type ReadBlock<'a> = dyn Fn(u64) -> std::result::Result<Vec<u8>, HostError> + 'a;

/// The blocks of metadata.
#[derive(Clone, Copy)]
struct Source<'a> {
    read: &'a ReadBlock<'a>,
    blocks: u64,
}

impl Source<'_> {
    /// Reads a block to which another one refers, and verifies its checksum and its number.
    fn get(&self, from: u64, block: u64, salt: u32) -> Result<Vec<u8>> {
        // No block refers to the superblock.
        if !(SUPERBLOCK + 1..self.blocks).contains(&block) {
            let what = format!("it refers to block {block} of {}", self.blocks);
            return damaged(from, what);
        }
        get_block(self.read, block, salt)
    }
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
    source: Source<'a>,
    superblock: Superblock,
    /// The block of that superblock.
    block: u64,
    data_blocks: u64,
}

impl<'a> Metadata<'a> {
    /// The metadata that the superblock describes. The pool must not be active: the kernel uses a
    /// block again two commits after it is freed.
    pub fn open(read: &'a ReadBlock<'a>) -> Result<Metadata<'a>> {
        let (superblock, blocks, data_blocks) = superblock::get(read)?;
        Ok(Metadata {
            source: Source { read, blocks },
            superblock,
            block: SUPERBLOCK,
            data_blocks,
        })
    }

    /// The snapshot of the metadata that the pool holds; `None` if it holds none.
    pub fn open_snapshot(read: &'a ReadBlock<'a>) -> Result<Option<Metadata<'a>>> {
        let live = Metadata::open(read)?;
        let block = live.superblock.held_root;
        if block == SUPERBLOCK {
            return Ok(None);
        }
        let superblock = superblock::get_snapshot(live.source, block)?;
        if superblock.data_block_bytes != live.superblock.data_block_bytes {
            let found = superblock.data_block_bytes;
            return damaged(block, format!("blocks of data have {found} bytes in it"));
        }
        // What is in the space maps is not part of a snapshot. They only grow.
        Ok(Some(Metadata {
            superblock,
            block,
            ..live
        }))
    }

    pub fn superblock(&self) -> Superblock {
        self.superblock
    }

    /// All thin devices by their ID. A device that is in only one of the two
    /// trees, of details and of mappings, is damage.
    pub fn devices(&self) -> Result<BTreeMap<u32, ThinDevice>> {
        let mut found = BTreeMap::new();
        let root = self.superblock.details_root;
        let mut details = self.tree(self.block, root, 24, IDS)?;
        let mut mapped = self.mapped_devices()?;
        while let Some(Entry { node, key, value }) = details.next_entry()? {
            match mapped.next_entry()? {
                Some(entry) if entry.key == key => {}
                _ => return damaged(node, format!("thin device {key} has no mappings")),
            }
            let device = ThinDevice {
                mapped_blocks: u64_at(&value, 0),
                transaction_id: u64_at(&value, 8),
                created: u32_at(&value, 16),
                snapshotted: u32_at(&value, 20),
            };
            if device.mapped_blocks > self.data_blocks {
                let (blocks, all) = (device.mapped_blocks, self.data_blocks);
                return damaged(
                    node,
                    format!("thin device {key} has {blocks} blocks of {all}"),
                );
            }
            found.insert(key as u32, device);
        }
        match mapped.next_entry()? {
            Some(Entry { node, key, .. }) => {
                damaged(node, format!("thin device {key} has no details"))
            }
            None => Ok(found),
        }
    }

    fn tree(&self, from: u64, root: u64, size: usize, keys: Range<u64>) -> Result<Cursor<'a>> {
        Ok(Cursor::new(Tree::open(
            self.source,
            from,
            root,
            size,
            keys,
        )?))
    }

    /// The tree of thin devices, whose values are the roots of their trees.
    fn mapped_devices(&self) -> Result<Cursor<'a>> {
        self.tree(self.block, self.superblock.mapping_root, 8, IDS)
    }

    /// The blocks of a thin device; `None` if there is no such device.
    fn blocks(&self, id: u32) -> Result<Option<Cursor<'a>>> {
        let mut devices = self.mapped_devices()?;
        devices.seek(u64::from(id))?;
        match devices.next_entry()? {
            Some(Entry { node, key, value }) if key == u64::from(id) => {
                // The first byte behind each block has an offset.
                let keys = 0..u64::MAX / self.superblock.data_block_bytes;
                self.tree(node, u64_at(&value, 0), 8, keys).map(Some)
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
        while let Some(Entry { node, key, value }) = blocks.next_entry()? {
            let (block, data) = (key, u64_at(&value, 0) >> TIME_BITS);
            if data >= self.data_blocks {
                let all = self.data_blocks;
                return damaged(
                    node,
                    format!("block {block} is in block {data} of {all} of the data"),
                );
            }
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
        return damaged(block, format!("it has only {} bytes", bytes.len()));
    }
    // The kernel leaves out the last step of the standard's checksum.
    let (found, right) = (u32_at(&bytes, 0), !crc32c(&bytes[4..]) ^ salt);
    if found != right {
        let what = format!("its checksum is {found:#010x} instead of {right:#010x}");
        return damaged(block, what);
    }
    match u64_at(&bytes, 8) {
        own if own == block => Ok(bytes),
        own => damaged(block, format!("it has the number of block {own}")),
    }
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
