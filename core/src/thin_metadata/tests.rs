//! Metadata in memory, built as the kernel builds it: a snapshot shares the nodes of its origin until
//! one of both changes.

#![allow(
    clippy::unwrap_used,
    reason = "a test panics where an expectation fails"
)]

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::tree::NODE_SALT;
use super::*;

type Mapping = BTreeMap<u64, u64>;
type Entries = Vec<(u64, Vec<u8>)>;

/// Blocks of metadata by their number, without the superblock.
#[derive(Default)]
struct Disk {
    blocks: Vec<Vec<u8>>,
    /// The nodes that exist, by kind, keys and values.
    known: BTreeMap<(bool, Entries), u64>,
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

fn seal(bytes: &mut [u8], salt: u32) {
    let sum = !crc32c(&bytes[4..]) ^ salt;
    put(bytes, 0, &sum.to_le_bytes());
}

impl Disk {
    /// A node with these entries; an existing one if there is one.
    fn node(&mut self, is_leaf: bool, entries: &[(u64, Vec<u8>)], size: usize) -> u64 {
        let key = (is_leaf, entries.to_vec());
        if let Some(block) = self.known.get(&key) {
            return *block;
        }
        let block = self.blocks.len() as u64 + 1;
        let mut bytes = vec![0; BLOCK];
        let most = (BLOCK - 32) / (8 + size);
        put(
            &mut bytes,
            4,
            &(if is_leaf { 2u32 } else { 1 }).to_le_bytes(),
        );
        put(&mut bytes, 8, &block.to_le_bytes());
        put(&mut bytes, 16, &(entries.len() as u32).to_le_bytes());
        put(&mut bytes, 20, &(most as u32).to_le_bytes());
        put(&mut bytes, 24, &(size as u32).to_le_bytes());
        for (i, (key, value)) in entries.iter().enumerate() {
            put(&mut bytes, 32 + i * 8, &key.to_le_bytes());
            put(&mut bytes, 32 + most * 8 + i * size, value);
        }
        seal(&mut bytes, NODE_SALT);
        self.blocks.push(bytes);
        self.known.insert(key, block);
        block
    }

    /// A tree whose nodes have at most `fan` entries.
    fn tree(&mut self, entries: &[(u64, Vec<u8>)], size: usize, fan: usize) -> u64 {
        let mut level: Vec<(u64, u64)> = match entries.is_empty() {
            true => vec![(0, self.node(true, &[], size))],
            false => entries
                .chunks(fan)
                .map(|part| (part[0].0, self.node(true, part, size)))
                .collect(),
        };
        while level.len() > 1 {
            let entry = |(key, block): &(u64, u64)| (*key, block.to_le_bytes().to_vec());
            let nodes: Vec<_> = level.iter().map(entry).collect();
            let parts = nodes.chunks(fan.max(2));
            level = parts
                .map(|part| (part[0].0, self.node(false, part, 8)))
                .collect();
        }
        level[0].1
    }

    /// The superblock of a pool with these thin devices, and the blocks behind it.
    fn pool(mut self, devices: &BTreeMap<u32, Mapping>, fan: usize) -> Vec<Vec<u8>> {
        let mut roots = Vec::new();
        let mut details = Vec::new();
        for (id, mapping) in devices {
            let entry =
                |(block, data): (&u64, &u64)| (*block, (data << 24 | 7).to_le_bytes().to_vec());
            let entries: Vec<_> = mapping.iter().map(entry).collect();
            let root = self.tree(&entries, 8, fan);
            roots.push((u64::from(*id), root.to_le_bytes().to_vec()));
            let mut value = (mapping.len() as u64).to_le_bytes().to_vec();
            value.extend(9u64.to_le_bytes());
            value.extend(1u32.to_le_bytes());
            value.extend(2u32.to_le_bytes());
            details.push((u64::from(*id), value));
        }
        let mapping = self.tree(&roots, 8, fan);
        let details = self.tree(&details, 24, fan);
        let mut bytes = vec![0; BLOCK];
        put(&mut bytes, 32, &MAGIC.to_le_bytes());
        put(&mut bytes, 40, &2u32.to_le_bytes());
        put(&mut bytes, 48, &5u64.to_le_bytes());
        put(&mut bytes, 320, &mapping.to_le_bytes());
        put(&mut bytes, 328, &details.to_le_bytes());
        put(&mut bytes, 336, &128u32.to_le_bytes());
        seal(&mut bytes, SUPERBLOCK_SALT);
        self.blocks.insert(0, bytes);
        self.blocks
    }
}

fn reader(blocks: &[Vec<u8>]) -> impl Fn(u64) -> std::result::Result<Vec<u8>, String> {
    let blocks = blocks.to_vec();
    move |block| {
        blocks
            .get(block as usize)
            .cloned()
            .ok_or("beyond the end".into())
    }
}

fn expand(ranges: &[MappedRange]) -> Mapping {
    let each = |range: &MappedRange| {
        let (block, data) = (range.block, range.data);
        (0..range.count).map(move |i| (block + i, data + i))
    };
    ranges.iter().flat_map(each).collect()
}

type Content = (BTreeMap<u32, ThinDevice>, [Option<Vec<MappedRange>>; 2]);

/// All that can be read of the two devices.
fn read_all(blocks: &[Vec<u8>]) -> Result<Content> {
    let read = reader(blocks);
    let pool = Metadata::open(&read)?;
    let all = |id| pool.mapped(id, 0, usize::MAX);
    Ok((pool.devices()?, [all(1)?, all(2)?]))
}

/// A device, and one that differs from it in a few blocks.
fn two_devices() -> impl Strategy<Value = (BTreeMap<u32, Mapping>, usize, u64)> {
    let first = prop::collection::btree_map(0u64..600, 0u64..1 << 30, 0..400);
    let changes = prop::collection::vec((0u64..600, prop::option::of(1u64 << 30..1 << 31)), 0..12);
    (first, changes, 2usize..9, 0u64..600).prop_map(|(first, changes, fan, from)| {
        let mut second = first.clone();
        for (block, data) in changes {
            match data {
                Some(data) => second.insert(block, data),
                None => second.remove(&block),
            };
        }
        (BTreeMap::from([(1, first), (2, second)]), fan, from)
    })
}

proptest! {
    #[test]
    fn what_is_read_is_what_the_devices_have((devices, fan, from) in two_devices()) {
        let blocks = Disk::default().pool(&devices, fan);
        let read = reader(&blocks);
        let pool = Metadata::open(&read).unwrap();
        let (one, two) = (&devices[&1], &devices[&2]);
        prop_assert_eq!(pool.devices().unwrap()[&2].mapped_blocks, two.len() as u64);

        let found = pool.mapped(1, from, usize::MAX).unwrap().unwrap();
        let expected: Mapping = one.range(from..).map(|(block, data)| (*block, *data)).collect();
        prop_assert_eq!(expand(&found), expected);
        let joined = found.windows(2).all(|pair| !pair[0].continues_at(pair[1].block, pair[1].data));
        prop_assert!(joined, "ranges are joined: {:?}", found);
        let part = pool.mapped(1, from, 3).unwrap().unwrap();
        prop_assert_eq!(&part[..], &found[..found.len().min(3)]);
    }
}

fn two_large_devices() -> BTreeMap<u32, Mapping> {
    let first: Mapping = (0..20_000).map(|block| (block, 3 * block)).collect();
    let mut second = first.clone();
    second.insert(777, 1 << 20);
    BTreeMap::from([(1, first), (2, second)])
}

#[test]
fn a_device_that_does_not_exist_is_not_found() {
    let blocks = Disk::default().pool(&two_large_devices(), 50);
    let read = reader(&blocks);
    let pool = Metadata::open(&read).unwrap();
    assert_eq!(pool.mapped(3, 0, 1), Ok(None));
    assert!(Metadata::open_snapshot(&read).unwrap().is_none());
}

/// A byte of any block that is read has changed.
#[test]
fn every_damaged_byte_is_found() {
    let mut devices = two_large_devices();
    devices
        .values_mut()
        .for_each(|mapping| mapping.retain(|block, _| *block % 40 == 17));
    let blocks = Disk::default().pool(&devices, 60);
    let expected = read_all(&blocks).unwrap();
    for block in 0..blocks.len() {
        for at in (0..BLOCK).step_by(13).chain(0..40) {
            let mut damaged = blocks.clone();
            damaged[block][at] ^= 1 << (at % 8);
            match read_all(&damaged) {
                Ok(found) => panic!("block {block}, byte {at}: {found:?} instead of {expected:?}"),
                Err(Damage::Block { block: found, .. }) => assert_eq!(found, block as u64),
                Err(other) => panic!("{other}"),
            }
        }
    }
}

/// Checksums are correct, but what they protect makes no sense.
#[test]
fn nodes_that_contradict_their_tree_are_refused() {
    let blocks = Disk::default().pool(&two_large_devices(), 60);
    let change = |block: usize, at: usize, value: &[u8]| {
        let mut blocks = blocks.clone();
        put(&mut blocks[block], at, value);
        seal(
            &mut blocks[block],
            if block == 0 {
                SUPERBLOCK_SALT
            } else {
                NODE_SALT
            },
        );
        read_all(&blocks).map(drop)
    };
    assert_eq!(change(1, 16, &60u32.to_le_bytes()), Ok(()));
    for (at, value) in [
        (4, 3u32),
        (16, 1000),
        (20, 5000),
        (24, 16),
        (24, 0),
        (16, 0),
        (20, 59),
    ] {
        assert!(change(1, at, &value.to_le_bytes()).is_err(), "{at} {value}");
    }
    // Keys that are not in order, or that belong to another node.
    assert!(change(1, 40, &0u64.to_le_bytes()).is_err());
    assert!(change(1, 32 + 59 * 8, &60u64.to_le_bytes()).is_err());
    // A root that is no node, a root beyond the end, and a circle.
    for root in [0u64, 1 << 40] {
        assert!(change(0, 320, &root.to_le_bytes()).is_err());
    }
    let internal = blocks.iter().skip(1).position(|it| it[4] == 1).unwrap() + 1;
    let most = u32_at(&blocks[internal], 20) as usize;
    let itself = (internal as u64).to_le_bytes();
    assert!(change(internal, 32 + most * 8, &itself).is_err());
}

#[test]
fn fuzz_the_metadata() {
    let devices = BTreeMap::from([
        (1, Mapping::from([(0, 1), (9, 2)])),
        (2, Mapping::from([(0, 1), (7, 3)])),
    ]);
    let seed = Disk::default().pool(&devices, 2).concat();
    let all = |bytes: &[u8]| {
        let mut blocks: Vec<Vec<u8>> = bytes.chunks(BLOCK).map(<[u8]>::to_vec).collect();
        // A checksum would hide what lies behind it.
        for (i, block) in blocks
            .iter_mut()
            .enumerate()
            .filter(|(_, it)| it.len() == BLOCK)
        {
            seal(block, if i == 0 { SUPERBLOCK_SALT } else { NODE_SALT });
        }
        blocks
    };
    let target = |bytes: &[u8]| drop(read_all(&all(bytes)));
    crate::fuzz::fuzz("thin metadata", &[seed], target, |bytes| {
        // A reader that trusts the number of entries.
        if let Some(node) = all(bytes).get(1) {
            assert!(node.len() < BLOCK || u32_at(node, 16) <= 252, "planted");
        }
    });
}
