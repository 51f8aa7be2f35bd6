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
use std::ops::Range;

use self::tree::{Cursor, Next, Tree};
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

    /// The ranges of blocks that a thin device has, in increasing order, from this block on. `each`
    /// returns whether it wants more. `None` if there is no such device.
    pub fn allocated(
        &self,
        id: u32,
        from: u64,
        each: impl FnMut(Range<u64>) -> bool,
    ) -> Result<Option<()>> {
        let Some(mut blocks) = self.blocks(id)? else {
            return Ok(None);
        };
        blocks.seek(from)?;
        let mut ranges = Ranges::new(each);
        while let Some((block, _)) = blocks.next_entry()? {
            if !ranges.add(block) {
                return Ok(Some(()));
            }
        }
        ranges.finish();
        Ok(Some(()))
    }

    /// The ranges of blocks that two thin devices do not share, in increasing order, from this block
    /// on. `each` returns whether it wants more. `None` if one of the devices does not exist.
    ///
    /// Parts of the trees that both devices share are not read.
    pub fn differences(
        &self,
        [one, other]: [u32; 2],
        from: u64,
        each: impl FnMut(Range<u64>) -> bool,
    ) -> Result<Option<()>> {
        let (Some(mut one), Some(mut other)) = (self.blocks(one)?, self.blocks(other)?) else {
            return Ok(None);
        };
        one.seek(from)?;
        other.seek(from)?;
        let mut ranges = Ranges::new(each);
        while let Some(block) = next_difference(&mut one, &mut other)? {
            if !ranges.add(block) {
                return Ok(Some(()));
            }
        }
        ranges.finish();
        Ok(Some(()))
    }
}

/// The next block that two thin devices do not share.
fn next_difference(one: &mut Cursor<'_>, other: &mut Cursor<'_>) -> Result<Option<u64>> {
    loop {
        let (first, second) = (one.peek(), other.peek());
        match (first, second) {
            (None, None) => return Ok(None),
            (Some(Next::Node(a)), Some(Next::Node(b))) if a.block == b.block => {
                one.skip();
                other.skip();
            }
            // The higher node may contain the other one. At the same height, the one that begins
            // first has blocks that come before those of the other one.
            (Some(Next::Node(a)), Some(Next::Node(b))) => {
                let order = (b.height, a.first).cmp(&(a.height, b.first));
                if order.is_le() {
                    one.descend()?;
                }
                if order.is_ge() {
                    other.descend()?;
                }
            }
            (Some(Next::Node(node)), Some(Next::Entry(entry))) if entry.key < node.first => {
                other.skip();
                return Ok(Some(entry.key));
            }
            (Some(Next::Entry(entry)), Some(Next::Node(node))) if entry.key < node.first => {
                one.skip();
                return Ok(Some(entry.key));
            }
            (Some(Next::Node(_)), _) => one.descend()?,
            (_, Some(Next::Node(_))) => other.descend()?,
            (Some(Next::Entry(a)), Some(Next::Entry(b))) if a.key == b.key => {
                one.skip();
                other.skip();
                if a.value >> TIME_BITS != b.value >> TIME_BITS {
                    return Ok(Some(a.key));
                }
            }
            (Some(Next::Entry(a)), second) if second.is_none_or(|next| a.key < next.first()) => {
                one.skip();
                return Ok(Some(a.key));
            }
            (_, Some(Next::Entry(b))) => {
                other.skip();
                return Ok(Some(b.key));
            }
            (Some(Next::Entry(_)), None) => return Ok(None),
        }
    }
}

/// Joins blocks to ranges.
struct Ranges<F> {
    open: Option<Range<u64>>,
    each: F,
}

impl<F: FnMut(Range<u64>) -> bool> Ranges<F> {
    fn new(each: F) -> Ranges<F> {
        Ranges { open: None, each }
    }

    /// Adds a block behind all others. Returns whether more are wanted.
    fn add(&mut self, block: u64) -> bool {
        match &mut self.open {
            Some(open) if open.end == block => {
                open.end += 1;
                true
            }
            open => match open.replace(block..block + 1) {
                Some(range) => (self.each)(range),
                None => true,
            },
        }
    }

    fn finish(mut self) {
        if let Some(range) = self.open.take() {
            (self.each)(range);
        }
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
