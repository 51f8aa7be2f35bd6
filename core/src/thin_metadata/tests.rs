//! Metadata in memory, built as the kernel builds it: a snapshot shares the nodes of its origin until
//! one of both changes.

#![allow(
    clippy::unwrap_used,
    reason = "a test panics where an expectation fails"
)]

use std::cell::Cell;
use std::collections::BTreeMap;

use nix::errno::Errno;
use proptest::prelude::*;

use super::superblock::{MAGIC, SALT as SUPERBLOCK_SALT};
use super::tree::NODE_SALT;
use super::*;

type Mapping = BTreeMap<u64, u64>;
/// Blocks of data of each pool.
const DATA_BLOCKS: u64 = 1 << 31;

type Value = (u64, Vec<u8>);
type Entries = Vec<Value>;

/// Blocks of metadata by their number, without the superblock.
#[derive(Default)]
struct Disk {
    blocks: Vec<Vec<u8>>,
    /// The nodes that exist, by kind, size of values, keys and values.
    known: BTreeMap<(bool, usize, Entries), u64>,
    /// The entries for which a node has space, if not as many as a block.
    most: Option<usize>,
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
    fn node(&mut self, is_leaf: bool, entries: &[Value], size: usize) -> u64 {
        let key = (is_leaf, size, entries.to_vec());
        if let Some(block) = self.known.get(&key) {
            return *block;
        }
        let block = self.blocks.len() as u64 + 1;
        let mut bytes = vec![0; BLOCK];
        let most = self.most.unwrap_or((BLOCK - 32) / (8 + size));
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
    fn tree(&mut self, entries: &[Value], size: usize, fan: usize) -> u64 {
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
        let (mut roots, mut details) = (Vec::new(), Vec::new());
        for (id, mapping) in devices {
            let root = self.device(mapping, fan);
            roots.push(number(u64::from(*id), root));
            details.push(detail(u64::from(*id), mapping.len() as u64));
        }
        self.pool_of(&roots, &details, fan)
    }

    /// The root of the tree of a thin device.
    fn device(&mut self, mapping: &Mapping, fan: usize) -> u64 {
        let entry = |(block, data): (&u64, &u64)| number(*block, data << 24 | 7);
        let entries: Vec<_> = mapping.iter().map(entry).collect();
        self.tree(&entries, 8, fan)
    }

    fn pool_of(mut self, roots: &[Value], details: &[Value], fan: usize) -> Vec<Vec<u8>> {
        let mapping = self.tree(roots, 8, fan);
        let details = self.tree(details, 24, fan);
        let mut bytes = vec![0; BLOCK];
        put(&mut bytes, 32, &MAGIC.to_le_bytes());
        put(&mut bytes, 40, &2u32.to_le_bytes());
        put(&mut bytes, 48, &5u64.to_le_bytes());
        put(&mut bytes, 64, &DATA_BLOCKS.to_le_bytes());
        let all = self.blocks.len() as u64 + 1;
        put(&mut bytes, 192, &all.to_le_bytes());
        put(&mut bytes, 320, &mapping.to_le_bytes());
        put(&mut bytes, 328, &details.to_le_bytes());
        put(&mut bytes, 336, &128u32.to_le_bytes());
        put(&mut bytes, 340, &8u32.to_le_bytes());
        seal(&mut bytes, SUPERBLOCK_SALT);
        self.blocks.insert(0, bytes);
        self.blocks
    }
}

/// An entry with a number.
fn number(key: u64, value: u64) -> Value {
    (key, value.to_le_bytes().to_vec())
}

/// The entry of a thin device in the tree of details.
fn detail(id: u64, mapped_blocks: u64) -> Value {
    let mut value = mapped_blocks.to_le_bytes().to_vec();
    value.extend(9u64.to_le_bytes());
    value.extend(1u32.to_le_bytes());
    value.extend(2u32.to_le_bytes());
    (id, value)
}

/// Blocks in which something is different, with correct checksums.
fn changed(blocks: &[Vec<u8>], block: u64, at: usize, value: &[u8]) -> Vec<Vec<u8>> {
    let mut blocks = blocks.to_vec();
    let changed = &mut blocks[block as usize];
    put(changed, at, value);
    let is_superblock = u64_at(changed, 32) == MAGIC || block == SUPERBLOCK;
    seal(
        changed,
        if is_superblock {
            SUPERBLOCK_SALT
        } else {
            NODE_SALT
        },
    );
    blocks
}

/// A pool that holds a snapshot of its metadata, and has no thin device any more.
fn held(devices: &BTreeMap<u32, Mapping>) -> Vec<Vec<u8>> {
    let mut disk = Disk::default();
    let empty = [disk.tree(&[], 8, 2), disk.tree(&[], 24, 2)];
    let mut blocks = disk.pool(devices, 2);
    let block = blocks.len() as u64;
    let mut copy = blocks[0].clone();
    put(&mut copy, 8, &block.to_le_bytes());
    put(&mut copy, 64, &[0; 256]);
    seal(&mut copy, SUPERBLOCK_SALT);
    blocks.push(copy);
    for (at, value) in [
        (56, block),
        (192, block + 1),
        (320, empty[0]),
        (328, empty[1]),
    ] {
        blocks = changed(&blocks, SUPERBLOCK, at, &value.to_le_bytes());
    }
    blocks
}

fn beyond_the_end() -> HostError {
    HostError::errno("read", "/dev/dm-1", Errno::EIO)
}

fn reader(blocks: &[Vec<u8>]) -> impl Fn(u64) -> std::result::Result<Vec<u8>, HostError> {
    let blocks = blocks.to_vec();
    move |block| {
        let found = blocks.get(block as usize).cloned();
        found.ok_or_else(beyond_the_end)
    }
}

/// The block that is damaged, and what is wrong with it.
#[track_caller]
fn damage<T: std::fmt::Debug>(result: Result<T>) -> (u64, String) {
    match result {
        Err(Damage::Block { block, what }) => (block, what),
        other => panic!("{other:?}"),
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
    assert_eq!(pool.mapped(3, 0, 1).unwrap(), None);
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

fn two_small_devices() -> BTreeMap<u32, Mapping> {
    BTreeMap::from([
        (1, Mapping::from([(0, 1), (9, 2)])),
        (2, Mapping::from([(0, 1), (7, 3)])),
    ])
}

#[test]
fn the_snapshot_of_the_metadata_is_read() {
    let devices = two_small_devices();
    let blocks = held(&devices);
    let read = reader(&blocks);
    assert!(Metadata::open(&read).unwrap().devices().unwrap().is_empty());
    let pool = Metadata::open_snapshot(&read).unwrap().unwrap();
    assert_eq!(Vec::from_iter(pool.devices().unwrap().into_keys()), [1, 2]);
    let found = pool.mapped(2, 0, usize::MAX).unwrap().unwrap();
    assert_eq!(expand(&found), devices[&2]);

    let copy = blocks.len() as u64 - 1;
    for (block, at, value, what) in [
        (SUPERBLOCK, 56, copy - 1, "its checksum is"),
        (SUPERBLOCK, 56, copy + 1, "it refers to block"),
        (copy, 32, 1, "its checksum is"),
        (copy, 336, 256 | 8 << 32, "blocks of data have 131072 bytes"),
    ] {
        let blocks = changed(&blocks, block, at, &u64::to_le_bytes(value));
        let read = reader(&blocks);
        let (_, found) = damage(Metadata::open_snapshot(&read).map(drop));
        assert!(found.starts_with(what), "{found}");
    }
}

#[test]
fn a_page_of_a_large_device_reads_only_its_part() {
    let mapping = (0..100_000u64).map(|block| (block, block * 7919 % 100_003));
    let devices = BTreeMap::from([(1, mapping.collect::<Mapping>())]);
    let blocks = Disk::default().pool(&devices, 126);
    let reads = Cell::new(0);
    let read = |block: u64| {
        reads.set(reads.get() + 1);
        Ok(blocks[block as usize].clone())
    };
    let pool = Metadata::open(&read).unwrap();
    let all = pool.mapped(1, 0, usize::MAX).unwrap().unwrap();
    assert_eq!(all.len(), 100_000);
    assert_eq!(expand(&all), devices[&1]);
    let before = reads.get();
    assert!(before > 100_000 / 126, "{before}");
    let part = pool.mapped(1, 99_000, 500).unwrap().unwrap();
    assert_eq!(part, all[99_000..99_500]);
    // Both trees down to a leaf twice, and five leaves.
    assert!(reads.get() - before < 20, "{}", reads.get() - before);
}

/// The kernel may be writing it.
#[test]
fn a_superblock_that_is_read_in_part_is_read_again() {
    let blocks = Disk::default().pool(&two_small_devices(), 2);
    let reads = Cell::new(0);
    let read = |block: u64| {
        reads.set(reads.get() + 1);
        let mut bytes = blocks[block as usize].clone();
        bytes[48] ^= u8::from(reads.get() < 3);
        Ok(bytes)
    };
    let opened = Metadata::open(&read).unwrap();
    assert_eq!((opened.superblock().transaction_id, reads.get()), (5, 3));
}

#[test]
fn the_error_of_a_disk_is_kept() {
    let reads = Cell::new(0);
    let read = |_| {
        reads.set(reads.get() + 1);
        Err(beyond_the_end())
    };
    match Metadata::open(&read).map(drop).unwrap_err() {
        Damage::Unreadable { block: 0, error } => assert!(error.is_dead_disk()),
        other => panic!("{other}"),
    }
    assert_eq!(reads.get(), 1, "a disk that fails is not asked again");
}

#[test]
fn superblocks_that_make_no_sense_are_refused() {
    let blocks = Disk::default().pool(&two_small_devices(), 2);
    let all = blocks.len();
    for (at, value, what) in [
        (32, 1, "its magic number is"),
        (40, 3, "its version is 3"),
        (40, 0, "its version is 0"),
        (64, u64::MAX, "it has 18446744073709551615 blocks of data"),
        (192, 0, "it refers to block"),
        (192, 3, "it refers to block"),
        (320, 0, "it refers to block 0"),
        (320, all as u64, "it refers to block"),
        (328, 1 << 40, "it refers to block"),
        (336, 8 << 32, "its blocks of data have 0 bytes"),
        (336, 130 | 8 << 32, "its blocks of data have 66560 bytes"),
        (
            336,
            1 << 22 | 8 << 32,
            "its blocks of data have 2147483648 bytes",
        ),
        (336, 128 | 16 << 32, "its blocks have 8192 bytes"),
        (360, 1, "it has the features 0x1"),
    ] {
        let blocks = changed(&blocks, SUPERBLOCK, at, &u64::to_le_bytes(value));
        let (block, found) = damage(read_all(&blocks));
        assert!(found.starts_with(what) && block == SUPERBLOCK, "{found}");
    }
}

/// Checksums are correct, but what they protect makes no sense.
#[test]
fn nodes_that_contradict_their_tree_are_refused() {
    let blocks = Disk::default().pool(&two_large_devices(), 60);
    let refused = |block: u64, at: usize, value: &[u8], what: &str| {
        let (found, why) = damage(read_all(&changed(&blocks, block, at, value)));
        assert!(why.starts_with(what) && found == block, "{found}: {why}");
    };
    // An internal node above leaves, and the root above it.
    let key = |block: u64, i: usize| u64_at(&blocks[block as usize], 32 + 8 * i);
    let is_internal = |block: &u64| blocks[*block as usize][4] == 1;
    let mut internal = (1..blocks.len() as u64).filter(is_internal);
    let above = internal.next().unwrap();
    let top = internal.find(|it| key(*it, 0) == 0).unwrap();
    assert_eq!((key(above, 1), key(top, 1)), (60, 3600));
    let values = |block: u64| 32 + 8 * u32_at(&blocks[block as usize], 20) as usize;
    // The first leaf has the blocks from 0 to 59.
    assert!(read_all(&changed(&blocks, 1, 16, &60u32.to_le_bytes())).is_ok());
    for (at, value, what) in [
        (4, 3u32, "its flags are 0x3"),
        (4, 0, "its flags are 0x0"),
        (16, 1000, "it has 1000 of 254 entries"),
        (20, 5000, "it has 60 of 5000 entries, and space for 254"),
        (20, 59, "it has 60 of 59 entries"),
        (24, 16, "its values have 16 bytes instead of 8"),
        (24, 0, "its values have 0 bytes instead of 8"),
    ] {
        refused(1, at, &value.to_le_bytes(), what);
    }
    refused(1, 8, &2u64.to_le_bytes(), "it has the number of block 2");
    refused(2, 16, &0u32.to_le_bytes(), "it has no entries");
    refused(above, 16, &0u32.to_le_bytes(), "it is an internal node");
    // Keys that are not in order, or that belong to another node.
    refused(1, 40, &0u64.to_le_bytes(), "its key 0 is not in order");
    refused(1, 48, &1u64.to_le_bytes(), "its key 1 is not in order");
    let last = 32 + 59 * 8;
    refused(1, last, &60u64.to_le_bytes(), "its key 60 is not in order");
    refused(2, 32, &59u64.to_le_bytes(), "its key 59 is not in order");
    // Children: the superblock, one beyond the end, itself, one above, and a leaf of another level.
    let child = |block: u64, i: usize, child: u64| {
        let blocks = changed(&blocks, block, values(block) + 8 * i, &child.to_le_bytes());
        damage(read_all(&blocks)).1
    };
    for to in [0, blocks.len() as u64] {
        assert!(child(above, 1, to).starts_with("it refers to block"));
    }
    for (i, to) in [(0, above), (1, above), (0, top), (1, top)] {
        assert!(child(above, i, to).contains("is not in order"));
    }
    assert!(child(top, 0, 1).contains("is on the wrong level"));
    assert!(
        child(above, 1, 1).contains("is not in order"),
        "a leaf twice"
    );
}

#[test]
fn devices_and_blocks_that_cannot_exist_are_refused() {
    let refused = |roots: &[u64], details: &[(u64, u64)], mapping: Mapping, what: &str| {
        let mut disk = Disk::default();
        let root = disk.device(&mapping, 2);
        let roots: Vec<_> = roots.iter().map(|id| number(*id, root)).collect();
        let details: Vec<_> = details.iter().map(|(id, all)| detail(*id, *all)).collect();
        let blocks = disk.pool_of(&roots, &details, 4);
        let read = reader(&blocks);
        let pool = Metadata::open(&read).unwrap();
        let devices = pool.devices().map(drop);
        let (_, found) = damage(devices.and_then(|()| pool.mapped(1, 0, 9).map(drop)));
        assert!(found.starts_with(what), "{found}");
    };
    let none = Mapping::new;
    let beyond = 1 << 24;
    refused(&[1], &[(1, 0), (2, 0)], none(), "thin device 2 has no map");
    refused(&[2], &[(1, 0), (2, 0)], none(), "thin device 1 has no map");
    refused(&[1, 2], &[(1, 0)], none(), "thin device 2 has no details");
    refused(
        &[1, 2, 3],
        &[(1, 0), (3, 0)],
        none(),
        "thin device 3 has no map",
    );
    refused(&[beyond], &[(1, 0)], none(), "its key 16777216 is not in");
    refused(&[1], &[(beyond, 0)], none(), "its key 16777216 is not in");
    let too_many = DATA_BLOCKS + 1;
    refused(
        &[1],
        &[(1, too_many)],
        none(),
        "thin device 1 has 2147483649",
    );
    let block = Mapping::from([(0, 0), (5, DATA_BLOCKS)]);
    refused(&[1], &[(1, 2)], block, "block 5 is in block 2147483648 of");
    for key in [u64::MAX / (64 << 10), u64::MAX - 1, u64::MAX] {
        let what = format!("its key {key} is not in order");
        refused(&[1], &[(1, 2)], Mapping::from([(0, 0), (key, 1)]), &what);
    }
}

/// The bytes of a fuzzed superblock, and of a fuzzed node with three entries of 24 bytes at most.
const FUZZED: [usize; 2] = [364, 32 + 3 * (8 + 24)];

/// The blocks with these first bytes. Checksums and numbers of blocks are correct, because damage of
/// them would hide what lies behind.
fn whole(bytes: &[u8]) -> Vec<Vec<u8>> {
    let (first, rest) = bytes.split_at(bytes.len().min(FUZZED[0]));
    let parts = [first].into_iter().chain(rest.chunks(FUZZED[1]));
    let blocks = (0u64..).zip(parts).map(|(block, part)| {
        let mut bytes = vec![0; BLOCK];
        put(&mut bytes, 0, part);
        put(&mut bytes, 8, &block.to_le_bytes());
        let salt = if block == 0 {
            SUPERBLOCK_SALT
        } else {
            NODE_SALT
        };
        seal(&mut bytes, salt);
        bytes
    });
    blocks.collect()
}

#[test]
fn fuzz_the_metadata() {
    // Nodes without space for more entries than they have are short.
    let blocks = Disk {
        most: Some(3),
        ..Disk::default()
    }
    .pool(&two_small_devices(), 2);
    let lengths = [FUZZED[0]].into_iter().chain([FUZZED[1]; 9]);
    let parts = blocks.iter().zip(lengths);
    let seed: Vec<u8> = parts
        .flat_map(|(block, length)| block[..length].to_vec())
        .collect();
    let valid = read_all(&whole(&seed)).unwrap();
    let target = |bytes: &[u8]| {
        let blocks = whole(bytes);
        let Ok((devices, mapped)) = read_all(&blocks) else {
            return;
        };
        let superblock = &blocks[0];
        let data = u64_at(superblock, 64);
        let bytes = u64::from(u32_at(superblock, 336)) * 512;
        let is_right = |range: &MappedRange| {
            let end = (range.block + range.count).checked_mul(bytes);
            end.is_some() && range.data + range.count <= data
        };
        for ranges in mapped.iter().flatten() {
            assert!(ranges.iter().all(is_right), "{ranges:?}");
            let ascend = |pair: &[MappedRange]| pair[0].block + pair[0].count <= pair[1].block;
            assert!(ranges.windows(2).all(ascend), "{ranges:?}");
        }
        let all = devices
            .values()
            .map(|device| device.mapped_blocks.checked_mul(bytes));
        assert!(all.clone().all(|bytes| bytes.is_some()), "{devices:?}");
    };
    crate::fuzz::fuzz("thin metadata", &[seed], target, |bytes| {
        // A reader that accepts other mappings than the right ones.
        let found = read_all(&whole(bytes)).map(|(_, mapped)| mapped);
        assert!(
            found.is_err() || found.is_ok_and(|found| found == valid.1),
            "planted"
        );
    });
}
