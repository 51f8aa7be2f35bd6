//! The simulated disk: a tree of directories and files, each with its current state and the state
//! that would remain after a power loss.
//!
//! The rules are those of a journaling file system at its worst: a file's data is durable as of its
//! last fsync (before that it is empty), a directory's entries as of the last fsync of the
//! directory; a rename is one step, so fsync of either directory makes both ends of it durable.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use nix::errno::Errno;

use super::content::Content;

/// Inode number.
pub(super) type Ino = u64;
/// The inode of "/".
pub(super) const ROOT: Ino = 2;
/// Block size of the simulated file system.
pub(super) const BLOCK: u64 = 4096;

/// What an inode is.
#[derive(Clone, Debug)]
pub(super) enum Node {
    Dir(Dir),
    /// A file; boxed, because directories are small.
    File(Box<File>),
}

#[derive(Clone, Debug, Default)]
pub(super) struct Dir {
    pub(super) live: BTreeMap<String, Ino>,
    pub(super) durable: BTreeMap<String, Ino>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct File {
    pub(super) live: Data,
    pub(super) durable: Data,
}

/// The content of a file. Small files have bytes; images have a size and the content of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Data {
    pub(super) bytes: Vec<u8>,
    pub(super) size: u64,
    /// Bytes of the blocks that were reserved by fallocate.
    pub(super) reserved: u64,
    pub(super) content: Content,
    /// Addresses of the blocks of the content, in order from the image's first byte on. An address
    /// that occurs in several images is shared.
    pub(super) map: Vec<u64>,
    /// When it was last changed: a number that only grows.
    pub(super) modified: u64,
    /// Why this copy must never be served, if it must not.
    pub(super) flaw: Option<&'static str>,
    /// The state of a copy by ranges that is not finished.
    pub(super) copying: Option<Copying>,
    /// The state of an image that is received by ranges.
    pub(super) receiving: Option<Receiving>,
}

/// The progress of a copy by ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Copying {
    pub(super) source: Ino,
    /// When the source had last been changed when the copy began; `None` if the source could
    /// change.
    pub(super) modified: Option<u64>,
    /// All bytes before this offset are copied.
    pub(super) copied: u64,
}

/// The progress of an image that is received by ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Receiving {
    /// What it contains in the end.
    pub(super) content: Content,
    /// Bytes of the source.
    pub(super) size: u64,
    /// All bytes before this offset are written.
    pub(super) received: u64,
}

impl Data {
    /// Bytes of blocks on the pool, including shared ones: st_blocks.
    pub(super) fn allocated(&self) -> u64 {
        self.reserved.max(self.content.used()).max(self.small())
    }

    fn small(&self) -> u64 {
        (self.bytes.len() as u64).next_multiple_of(BLOCK)
    }

    /// Bytes of blocks without content of a device, which are never shared.
    fn unmapped(&self) -> u64 {
        let mapped = self.map.len() as u64 * BLOCK;
        self.small() + self.reserved.saturating_sub(mapped)
    }

    /// Shares the content of `source` with this file: its blocks are shared, its reserved ones are
    /// not.
    pub(super) fn share(&mut self, source: &Data) {
        self.content = source.content.clone();
        self.map.clone_from(&source.map);
        self.reserved = 0;
    }
}

/// A rename between two directories, neither of which has been synced since.
#[derive(Clone, Debug)]
pub(super) struct Move {
    pub(super) ends: [(Ino, String); 2],
}

#[derive(Debug)]
pub(super) struct Disk {
    pub(super) nodes: BTreeMap<Ino, Node>,
    pub(super) moves: Vec<Move>,
    next: Ino,
    /// Number of blocks allocated so far; no address is used twice.
    placed: u64,
    /// Number of changes of files so far.
    changes: u64,
    /// Number of inodes at which unreachable ones are collected.
    collect_at: usize,
    pub(super) capacity: u64,
}

/// The parent directory and the last name of a path.
pub(super) type Slot = (Ino, String);

impl Disk {
    pub(super) fn new(capacity: u64) -> Disk {
        Disk {
            nodes: BTreeMap::from([(ROOT, Node::Dir(Dir::default()))]),
            moves: Vec::new(),
            next: 128,
            placed: 0,
            changes: 0,
            collect_at: 64,
            capacity,
        }
    }

    pub(super) fn node(&self, ino: Ino) -> Option<&Node> {
        self.nodes.get(&ino)
    }

    pub(super) fn dir(&self, ino: Ino) -> Result<&Dir, Errno> {
        match self.nodes.get(&ino) {
            Some(Node::Dir(dir)) => Ok(dir),
            Some(Node::File(_)) => Err(Errno::ENOTDIR),
            None => Err(Errno::ENOENT),
        }
    }

    fn dir_mut(&mut self, ino: Ino) -> Result<&mut Dir, Errno> {
        match self.nodes.get_mut(&ino) {
            Some(Node::Dir(dir)) => Ok(dir),
            Some(Node::File(_)) => Err(Errno::ENOTDIR),
            None => Err(Errno::ENOENT),
        }
    }

    pub(super) fn file(&self, ino: Ino) -> Result<&File, Errno> {
        match self.nodes.get(&ino) {
            Some(Node::File(file)) => Ok(file),
            Some(Node::Dir(_)) => Err(Errno::EISDIR),
            None => Err(Errno::ENOENT),
        }
    }

    pub(super) fn file_mut(&mut self, ino: Ino) -> Result<&mut File, Errno> {
        match self.nodes.get_mut(&ino) {
            Some(Node::File(file)) => Ok(file),
            Some(Node::Dir(_)) => Err(Errno::EISDIR),
            None => Err(Errno::ENOENT),
        }
    }

    /// Records that a file was changed: each block of its content gets an address, the first
    /// `rewritten` blocks get new ones.
    pub(super) fn changed(&mut self, ino: Ino, rewritten: usize) -> Result<(), Errno> {
        self.changes += 1;
        let (changes, mut placed) = (self.changes, self.placed);
        let data = &mut self.file_mut(ino)?.live;
        data.modified = changes;
        let blocks = (data.content.used() / BLOCK) as usize;
        data.map.truncate(blocks);
        let mut place = || {
            placed += 1;
            placed
        };
        data.map
            .iter_mut()
            .take(rewritten)
            .for_each(|at| *at = place());
        data.map.resize_with(blocks, place);
        self.placed = placed;
        Ok(())
    }

    /// Gives blocks of a file's content new addresses.
    pub(super) fn place_again(&mut self, ino: Ino, blocks: &[usize]) -> Result<(), Errno> {
        let mut placed = self.placed;
        let map = &mut self.file_mut(ino)?.live.map;
        for index in blocks {
            if let Some(place) = map.get_mut(*index) {
                placed += 1;
                *place = placed;
            }
        }
        self.placed = placed;
        Ok(())
    }

    /// Addresses of the blocks of all reachable files; `open` as in [`Disk::used`].
    pub(super) fn places(
        &self,
        open: impl IntoIterator<Item = Ino>,
        wanted: impl Fn(Ino) -> bool,
    ) -> HashSet<u64> {
        let mut from: Vec<Ino> = open.into_iter().chain([ROOT]).collect();
        let found = self
            .reach(&mut from, false)
            .into_iter()
            .filter(|ino| wanted(*ino));
        let files = found.filter_map(|ino| self.file(ino).ok());
        files
            .flat_map(|file| file.live.map.iter().copied())
            .collect()
    }

    /// The inode of a name in a directory.
    pub(super) fn find(&self, (dir, name): &Slot) -> Result<Option<Ino>, Errno> {
        Ok(self.dir(*dir)?.live.get(name).copied())
    }

    fn add(&mut self, (dir, name): &Slot, node: Node) -> Result<Ino, Errno> {
        let ino = self.next;
        self.dir_mut(*dir)?.live.insert(name.clone(), ino);
        self.next += 1;
        self.nodes.insert(ino, node);
        Ok(ino)
    }

    /// A new empty file without a name.
    pub(super) fn make_unnamed(&mut self) -> Ino {
        let ino = self.next;
        self.next += 1;
        self.nodes.insert(ino, Node::File(Box::default()));
        ino
    }

    /// mkdir; an existing directory is success.
    pub(super) fn make_dir(&mut self, slot: &Slot) -> Result<Ino, Errno> {
        match self.find(slot)? {
            Some(ino) => self.dir(ino).map(|_| ino).map_err(|_| Errno::EEXIST),
            None => self.add(slot, Node::Dir(Dir::default())),
        }
    }

    /// The existing file, or a new empty one.
    pub(super) fn make_file(&mut self, slot: &Slot) -> Result<Ino, Errno> {
        match self.find(slot)? {
            Some(ino) => self.file(ino).map(|_| ino),
            None => self.add(slot, Node::File(Box::default())),
        }
    }

    /// Assigns another inode to a name, immediately and durably: a new directory if none is given.
    pub(super) fn replace(&mut self, slot: &Slot, ino: Option<Ino>) -> Result<(), Errno> {
        let ino = match ino {
            Some(ino) => ino,
            None => self.add(slot, Node::Dir(Dir::default()))?,
        };
        let dir = self.dir_mut(slot.0)?;
        dir.live.insert(slot.1.clone(), ino);
        dir.durable.insert(slot.1.clone(), ino);
        Ok(())
    }

    pub(super) fn sync_file(&mut self, ino: Ino) -> Result<(), Errno> {
        let file = self.file_mut(ino)?;
        file.durable = file.live.clone();
        Ok(())
    }

    pub(super) fn sync_dir(&mut self, ino: Ino) -> Result<(), Errno> {
        let dir = self.dir_mut(ino)?;
        dir.durable = dir.live.clone();
        let (now, later): (Vec<Move>, Vec<Move>) = std::mem::take(&mut self.moves)
            .into_iter()
            .partition(|one| one.ends.iter().any(|end| end.0 == ino));
        self.moves = later;
        for (other, name) in now.into_iter().flat_map(|one| one.ends) {
            if let Ok(dir) = self.dir_mut(other) {
                match dir.live.get(&name).copied() {
                    Some(ino) => dir.durable.insert(name, ino),
                    None => dir.durable.remove(&name),
                };
            }
        }
        Ok(())
    }

    pub(super) fn rename(&mut self, from: &Slot, to: &Slot) -> Result<(), Errno> {
        let ino = self.find(from)?.ok_or(Errno::ENOENT)?;
        let is_dir = matches!(self.node(ino), Some(Node::Dir(_)));
        match self.find(to)?.and_then(|old| self.node(old)) {
            Some(Node::Dir(old)) if is_dir && !old.live.is_empty() => return Err(Errno::ENOTEMPTY),
            Some(Node::Dir(_)) if !is_dir => return Err(Errno::EISDIR),
            Some(Node::File(_)) if is_dir => return Err(Errno::ENOTDIR),
            Some(Node::Dir(_) | Node::File(_)) | None => {}
        }
        self.dir_mut(from.0)?.live.remove(&from.1);
        self.dir_mut(to.0)?.live.insert(to.1.clone(), ino);
        if from.0 != to.0 {
            self.moves.push(Move {
                ends: [from.clone(), to.clone()],
            });
        }
        Ok(())
    }

    /// unlink; success if the file does not exist.
    pub(super) fn remove_file(&mut self, slot: &Slot) -> Result<(), Errno> {
        if let Some(ino) = self.find(slot)? {
            self.file(ino)?;
            self.dir_mut(slot.0)?.live.remove(&slot.1);
        }
        Ok(())
    }

    /// rmdir; success if the directory does not exist.
    pub(super) fn remove_dir(&mut self, slot: &Slot) -> Result<(), Errno> {
        if let Some(ino) = self.find(slot)? {
            if !self.dir(ino)?.live.is_empty() {
                return Err(Errno::ENOTEMPTY);
            }
            self.dir_mut(slot.0)?.live.remove(&slot.1);
        }
        Ok(())
    }

    pub(super) fn reach(&self, from: &mut Vec<Ino>, with_durable: bool) -> BTreeSet<Ino> {
        let mut seen = BTreeSet::new();
        while let Some(ino) = from.pop() {
            if seen.insert(ino)
                && let Some(Node::Dir(dir)) = self.nodes.get(&ino)
            {
                from.extend(dir.live.values());
                if with_durable {
                    from.extend(dir.durable.values());
                }
            }
        }
        seen
    }

    /// Whether an inode is a directory, or lies below it.
    pub(super) fn is_below(&self, folder: Ino, ino: Ino) -> bool {
        self.reach(&mut vec![folder], false).contains(&ino)
    }

    /// Bytes of the blocks that files have, each block counted once; `open` are inodes that have no
    /// name but are open.
    pub(super) fn used(&self, open: impl IntoIterator<Item = Ino>) -> u64 {
        let mut from: Vec<Ino> = open.into_iter().chain([ROOT]).collect();
        self.used_by(self.reach(&mut from, false))
    }

    /// Bytes of the blocks that files have, each block counted once.
    pub(super) fn used_by(&self, files: impl IntoIterator<Item = Ino>) -> u64 {
        let (mut places, mut bytes) = (Vec::new(), 0);
        for file in files.into_iter().filter_map(|ino| self.file(ino).ok()) {
            bytes += file.live.unmapped();
            places.extend_from_slice(&file.live.map);
        }
        places.sort_unstable();
        places.dedup();
        bytes + places.len() as u64 * BLOCK
    }

    /// Removes unreachable inodes once there are enough of them.
    pub(super) fn collect(&mut self, open: impl IntoIterator<Item = Ino>) {
        if self.nodes.len() < self.collect_at {
            return;
        }
        let mut from: Vec<Ino> = open.into_iter().chain([ROOT]).collect();
        let seen = self.reach(&mut from, true);
        self.nodes.retain(|ino, _| seen.contains(ino));
        self.collect_at = 2 * self.nodes.len() + 64;
    }
}
