//! The B-trees of the metadata.

use std::ops::Range;

use super::{BLOCK, Result, Source, damaged, u32_at, u64_at};

/// The header of a node. The keys follow it, and then the values.
const HEADER: usize = 32;
const KEY: usize = 8;
const IS_INTERNAL: u32 = 1;
const IS_LEAF: u32 = 2;
/// What the kernel combines with the checksums of nodes.
pub(super) const NODE_SALT: u32 = 121_107;
/// A tree of the smallest nodes that the kernel makes has fewer levels, even with 2^64 entries.
const MAX_HEIGHT: usize = 16;

/// A node that was read and verified.
#[derive(Clone, Debug)]
struct Node {
    block: u64,
    bytes: Vec<u8>,
    entries: usize,
    /// Where the values begin.
    values: usize,
    value_size: usize,
    is_leaf: bool,
}

impl Node {
    /// Reads a node to which `from` refers, and whose keys must be in a range. In a leaf, values have
    /// this size.
    fn read(
        source: Source<'_>,
        from: u64,
        block: u64,
        size: usize,
        keys: &Range<u64>,
    ) -> Result<Node> {
        let bytes = source.get(from, block, NODE_SALT)?;
        let is_leaf = match u32_at(&bytes, 4) {
            IS_LEAF => true,
            IS_INTERNAL => false,
            flags => {
                let what = format!("its flags are {flags:#x}, of no leaf and no internal node");
                return damaged(block, what);
            }
        };
        let (entries, most) = (u32_at(&bytes, 16) as usize, u32_at(&bytes, 20) as usize);
        let value_size = u32_at(&bytes, 24) as usize;
        // Values of internal nodes are block numbers.
        let right_size = if is_leaf { size } else { KEY };
        if value_size != right_size {
            let what = format!("its values have {value_size} bytes instead of {right_size}");
            return damaged(block, what);
        }
        let space = (BLOCK - HEADER) / (KEY + value_size);
        if entries > most || most > space {
            let what = format!("it has {entries} of {most} entries, and space for {space}");
            return damaged(block, what);
        }
        if entries == 0 && !is_leaf {
            return damaged(block, "it is an internal node without entries");
        }
        let node = Node {
            block,
            entries,
            values: HEADER + most * KEY,
            value_size,
            is_leaf,
            bytes,
        };
        let mut low = keys.start;
        for key in (0..entries).map(|i| node.key(i)) {
            if key < low || key >= keys.end {
                let end = keys.end;
                let what = format!("its key {key} is not in order, between {low} and {end}");
                return damaged(block, what);
            }
            low = key + 1;
        }
        Ok(node)
    }

    fn key(&self, i: usize) -> u64 {
        u64_at(&self.bytes, HEADER + i * KEY)
    }

    fn value(&self, i: usize) -> &[u8] {
        let at = self.values + i * self.value_size;
        self.bytes.get(at..at + self.value_size).unwrap_or_default()
    }

    /// The keys below an entry of an internal node.
    fn keys_below(&self, i: usize, outer: &Range<u64>) -> Range<u64> {
        let is_last = i + 1 == self.entries;
        let end = if is_last { outer.end } else { self.key(i + 1) };
        self.key(i)..end
    }
}

/// A tree whose root was read.
pub(super) struct Tree<'a> {
    source: Source<'a>,
    root: Node,
    /// The size of a value in a leaf.
    size: usize,
    keys: Range<u64>,
    /// The number of levels above the leaves.
    height: usize,
}

impl<'a> Tree<'a> {
    /// Opens the tree to which `from` refers. All of its keys must be in a range, whose end is below
    /// `u64::MAX`.
    pub(super) fn open(
        source: Source<'a>,
        from: u64,
        root: u64,
        size: usize,
        keys: Range<u64>,
    ) -> Result<Tree<'a>> {
        let root = Node::read(source, from, root, size, &keys)?;
        let mut height = 0;
        let mut node = root.clone();
        let mut below = keys.clone();
        while !node.is_leaf {
            height += 1;
            if height > MAX_HEIGHT {
                let what = format!("its tree has more than {MAX_HEIGHT} levels, or is a circle");
                return damaged(root.block, what);
            }
            below = node.keys_below(0, &below);
            node = Node::read(source, node.block, u64_at(node.value(0), 0), size, &below)?;
        }
        Ok(Tree {
            source,
            root,
            size,
            keys,
            height,
        })
    }
}

/// Where a cursor is in a node.
struct Place {
    node: Node,
    /// The next entry.
    at: usize,
    /// Where its keys are.
    keys: Range<u64>,
}

/// An entry of a leaf.
pub(super) struct Entry {
    /// The block of the leaf.
    pub(super) node: u64,
    pub(super) key: u64,
    pub(super) value: Vec<u8>,
}

/// Walks through a tree in the order of its keys. It has one node of each level in memory.
pub(super) struct Cursor<'a> {
    source: Source<'a>,
    size: usize,
    height: usize,
    places: Vec<Place>,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(tree: Tree<'a>) -> Cursor<'a> {
        let root = Place {
            node: tree.root,
            at: 0,
            keys: tree.keys,
        };
        let mut cursor = Cursor {
            source: tree.source,
            size: tree.size,
            height: tree.height,
            places: vec![root],
        };
        cursor.leave_finished();
        cursor
    }

    /// Leaves nodes without a next entry.
    fn leave_finished(&mut self) {
        while self
            .places
            .last()
            .is_some_and(|it| it.at >= it.node.entries)
        {
            self.places.pop();
            if let Some(above) = self.places.last_mut() {
                above.at += 1;
            }
        }
    }

    /// Leaves out what comes next.
    fn skip(&mut self) {
        if let Some(place) = self.places.last_mut() {
            place.at += 1;
        }
        self.leave_finished();
    }

    /// Continues in the node that comes next. Does nothing before an entry of a leaf.
    fn descend(&mut self) -> Result<()> {
        let Some(place) = self.places.last().filter(|place| !place.node.is_leaf) else {
            return Ok(());
        };
        let (from, keys) = (
            place.node.block,
            place.node.keys_below(place.at, &place.keys),
        );
        let block = u64_at(place.node.value(place.at), 0);
        let node = Node::read(self.source, from, block, self.size, &keys)?;
        if node.is_leaf != (self.places.len() == self.height) {
            return damaged(block, "it is on the wrong level of its tree");
        }
        if node.entries == 0 {
            return damaged(block, "it has no entries");
        }
        let at = 0;
        self.places.push(Place { node, at, keys });
        Ok(())
    }

    /// Continues with the first entry whose key is at least this one.
    pub(super) fn seek(&mut self, key: u64) -> Result<()> {
        while let Some(place) = self.places.last_mut() {
            let entries = place.node.entries;
            match place.node.is_leaf {
                false => {
                    // The last child that begins at the key or before it.
                    let after = (place.at..entries).find(|i| place.node.key(*i) > key);
                    place.at = after.unwrap_or(entries).saturating_sub(1).max(place.at);
                    if place.node.key(place.at) > key {
                        return Ok(());
                    }
                    self.descend()?;
                }
                true => {
                    let from = (place.at..entries).find(|i| place.node.key(*i) >= key);
                    place.at = from.unwrap_or(entries);
                    self.leave_finished();
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// The next entry; `None` at the end.
    pub(super) fn next_entry(&mut self) -> Result<Option<Entry>> {
        while let Some(place) = self.places.last() {
            if place.node.is_leaf {
                let entry = Entry {
                    node: place.node.block,
                    key: place.node.key(place.at),
                    value: place.node.value(place.at).to_vec(),
                };
                self.skip();
                return Ok(Some(entry));
            }
            self.descend()?;
        }
        Ok(None)
    }
}
