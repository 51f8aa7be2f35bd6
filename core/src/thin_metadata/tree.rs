//! The B-trees of the metadata.

use super::{BLOCK, ReadBlock, Result, damaged, get_block, u32_at, u64_at};

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
    /// Reads a node whose keys must be at least `low` and less than `high`.
    fn read(read: &ReadBlock<'_>, block: u64, size: usize, keys: &Bounds) -> Result<Node> {
        let bytes = get_block(read, block, NODE_SALT)?;
        let is_leaf = match u32_at(&bytes, 4) {
            IS_LEAF => true,
            IS_INTERNAL => false,
            _ => return damaged(block, "it is neither a leaf nor an internal node"),
        };
        let (entries, most) = (u32_at(&bytes, 16) as usize, u32_at(&bytes, 20) as usize);
        let value_size = u32_at(&bytes, 24) as usize;
        // Values of internal nodes are block numbers.
        if value_size != if is_leaf { size } else { KEY } {
            return damaged(block, "its values have the wrong size");
        }
        if entries > most || most > (BLOCK - HEADER) / (KEY + value_size) {
            return damaged(block, "it has too many entries");
        }
        let node = Node {
            block,
            entries,
            values: HEADER + most * KEY,
            value_size,
            is_leaf,
            bytes,
        };
        let are_ordered = (1..entries).all(|i| node.key(i - 1) < node.key(i));
        let are_within =
            entries == 0 || (keys.contain(node.key(0)) && keys.contain(node.key(entries - 1)));
        if !are_ordered || !are_within {
            return damaged(block, "its keys are not in order");
        }
        if entries == 0 && !is_leaf {
            return damaged(block, "it is an internal node without entries");
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
    fn bounds(&self, i: usize, outer: &Bounds) -> Bounds {
        let next = (i + 1 < self.entries).then(|| self.key(i + 1));
        Bounds {
            low: self.key(i),
            high: next.or(outer.high),
        }
    }
}

/// Keys from `low` on and below `high`.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    low: u64,
    high: Option<u64>,
}

impl Bounds {
    const ALL: Bounds = Bounds { low: 0, high: None };

    fn contain(&self, key: u64) -> bool {
        key >= self.low && self.high.is_none_or(|high| key < high)
    }
}

/// A tree whose root was read.
pub(super) struct Tree<'a> {
    read: &'a ReadBlock<'a>,
    root: Node,
    /// The size of a value in a leaf.
    size: usize,
    /// The number of levels above the leaves.
    height: usize,
}

impl<'a> Tree<'a> {
    pub(super) fn open(read: &'a ReadBlock<'a>, root: u64, size: usize) -> Result<Tree<'a>> {
        let root = Node::read(read, root, size, &Bounds::ALL)?;
        let mut height = 0;
        let mut node = root.clone();
        while !node.is_leaf {
            height += 1;
            if height > MAX_HEIGHT {
                return damaged(node.block, "the tree is too high");
            }
            let bounds = node.bounds(0, &Bounds::ALL);
            node = Node::read(read, u64_at(node.value(0), 0), size, &bounds)?;
        }
        Ok(Tree {
            read,
            root,
            size,
            height,
        })
    }
}

/// Where a cursor is in a node.
struct Place {
    node: Node,
    /// The next entry.
    at: usize,
    bounds: Bounds,
}

/// Walks through a tree in the order of its keys. It has one node of each level in memory.
pub(super) struct Cursor<'a> {
    read: &'a ReadBlock<'a>,
    size: usize,
    height: usize,
    places: Vec<Place>,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(tree: Tree<'a>) -> Cursor<'a> {
        let root = Place {
            node: tree.root,
            at: 0,
            bounds: Bounds::ALL,
        };
        let mut cursor = Cursor {
            read: tree.read,
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
        let bounds = place.node.bounds(place.at, &place.bounds);
        let block = u64_at(place.node.value(place.at), 0);
        let node = Node::read(self.read, block, self.size, &bounds)?;
        if node.is_leaf != (self.places.len() == self.height) {
            return damaged(block, "it is on the wrong level of its tree");
        }
        if node.entries == 0 {
            return damaged(block, "it has no entries");
        }
        let at = 0;
        self.places.push(Place { node, at, bounds });
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

    /// The next entry of a leaf; `None` at the end.
    pub(super) fn next_entry(&mut self) -> Result<Option<(u64, Vec<u8>)>> {
        while let Some(place) = self.places.last() {
            if place.node.is_leaf {
                let key = place.node.key(place.at);
                let value = place.node.value(place.at).to_vec();
                self.skip();
                return Ok(Some((key, value)));
            }
            self.descend()?;
        }
        Ok(None)
    }
}
