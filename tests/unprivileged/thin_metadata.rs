//! Reads metadata that thin-provisioning-tools have written, which are independent of this driver.

#![expect(
    clippy::disallowed_methods,
    reason = "a test writes its files and starts programs"
)]

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::process::Command;

use proptest::prelude::*;
use slackwater_core::error::HostError;
use slackwater_core::thin_metadata::{BLOCK, Damage, Metadata, Result};
use slackwater_testkit::left_out;

const RESTORE: &str = "/usr/sbin/thin_restore";
/// Blocks of data of a pool, and its blocks of metadata.
const DATA: u64 = 1 << 20;
const BLOCKS: u64 = 2048;

type Mapping = BTreeMap<u64, u64>;
type Devices = BTreeMap<u32, Mapping>;

/// The input of thin_restore.
fn xml(devices: &Devices) -> String {
    let mut xml = format!(
        r#"<superblock uuid="" time="3" transaction="77" flags="0" version="2" data_block_size="256" nr_data_blocks="{DATA}">"#
    );
    for (id, mapping) in devices {
        let all = mapping.len();
        write!(
            xml,
            r#"<device dev_id="{id}" mapped_blocks="{all}" transaction="{id}" creation_time="1" snap_time="2">"#
        )
        .expect("text");
        for (block, data) in mapping {
            write!(
                xml,
                r#"<single_mapping origin_block="{block}" data_block="{data}" time="3"/>"#
            )
            .expect("text");
        }
        xml += "</device>";
    }
    xml + "</superblock>"
}

/// The blocks of metadata with these devices; `None` without thin_restore.
fn restored(devices: &Devices) -> Option<Vec<u8>> {
    if !Path::new(RESTORE).exists() {
        left_out(&format!(
            "metadata of thin pools: {RESTORE} is not installed (thin-provisioning-tools)"
        ));
        return None;
    }
    let directory = tempfile::TempDir::with_prefix("slackwater-").expect("a directory");
    let [input, output] = ["input", "output"].map(|name| directory.path().join(name));
    fs::write(&input, xml(devices)).expect("a file");
    fs::write(&output, vec![0; BLOCK * BLOCKS as usize]).expect("a file");
    let [from, to] = [&input, &output].map(|path| path.as_os_str());
    let restored = Command::new(RESTORE)
        .args(["-i".as_ref(), from, "-o".as_ref(), to])
        .output()
        .expect("thin_restore starts");
    assert!(restored.status.success(), "{restored:?}");
    Some(fs::read(&output).expect("the metadata"))
}

/// All devices and their blocks, and the blocks of metadata that were read.
fn read(bytes: &[u8]) -> (Result<Devices>, BTreeSet<u64>) {
    let blocks = RefCell::new(BTreeSet::new());
    let read = |block: u64| {
        blocks.borrow_mut().insert(block);
        let found = bytes.chunks_exact(BLOCK).nth(block as usize);
        found
            .map(<[u8]>::to_vec)
            .ok_or_else(|| HostError::unexpected("read", "metadata", "it ends before"))
    };
    let found = Metadata::open(&read).and_then(|pool| {
        assert_eq!(pool.superblock().transaction_id, 77);
        assert_eq!(pool.superblock().data_block_bytes, 128 << 10);
        let mut found = Devices::new();
        for (id, device) in pool.devices()? {
            let ranges = pool.mapped(id, 0, usize::MAX)?.expect("the device");
            let each = |range: &slackwater_core::thin_metadata::MappedRange| {
                let (block, data) = (range.block, range.data);
                (0..range.count).map(move |i| (block + i, data + i))
            };
            let mapping: Mapping = ranges.iter().flat_map(each).collect();
            assert_eq!(device.mapped_blocks, mapping.len() as u64);
            assert_eq!(device.transaction_id, u64::from(id));
            assert_eq!((device.created, device.snapshotted), (1, 2));
            found.insert(id, mapping);
        }
        Ok(found)
    });
    (found, blocks.into_inner())
}

fn devices() -> impl Strategy<Value = Devices> {
    let mapping = (0u64..3, 0..1500usize).prop_flat_map(|(gaps, all)| {
        let block = 0..(all as u64 + 1) << (4 * gaps);
        prop::collection::btree_map(block, 0..DATA, 0..=all)
    });
    prop::collection::btree_map(0u32..1 << 24, mapping, 0..5)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 100, ..ProptestConfig::default() })]
    #[test]
    fn devices_that_thin_restore_has_written_are_read(devices in devices()) {
        if let Some(bytes) = restored(&devices) {
            prop_assert_eq!(read(&bytes).0.expect("no damage"), devices);
        }
    }
}

/// 100,000 blocks that follow no other, beside small devices that share some of them.
fn large() -> Devices {
    let scattered = |block: u64| (block, block * 7919 % 1_000_003);
    let alternating = (0..100_000).map(scattered).collect::<Mapping>();
    let some = alternating.clone().into_iter().step_by(500).collect();
    let others = (0..300).map(|block| (1 << 40 | block, DATA - 1 - block));
    Devices::from([
        (1, alternating),
        (2, some),
        (3, Mapping::new()),
        (1 << 20, others.collect()),
    ])
}

#[test]
fn a_large_device_that_thin_restore_has_written_is_read() {
    if let Some(bytes) = restored(&large()) {
        let (found, blocks) = read(&bytes);
        assert_eq!(found.expect("no damage"), large());
        assert!(blocks.len() > 100_000 / 252, "{}", blocks.len());
    }
}

#[test]
fn damage_of_each_block_that_thin_restore_has_written_is_found() {
    let Some(bytes) = restored(&large()) else {
        return;
    };
    let (_, blocks) = read(&bytes);
    // Of the leaves, which are alike, a part. The others are the first and the last ones.
    let some = blocks.iter().step_by(40).chain(blocks.iter().rev().take(8));
    for block in some.chain(blocks.iter().take(2)) {
        for at in [0, 5, 8, 16, 24, 31, 32, 2000, BLOCK - 1] {
            let mut damaged = bytes.clone();
            damaged[*block as usize * BLOCK + at] ^= 0x40;
            match read(&damaged).0 {
                Err(Damage::Block { block: found, .. }) => assert_eq!(found, *block),
                other => panic!("block {block}, byte {at}: {:?}", other.map(|_| "no damage")),
            }
        }
    }
}
