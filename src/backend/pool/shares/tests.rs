//! Which bytes are counted as own, shared and of snapshots.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const A: Uuid = Uuid::from_u128(1);
const B: Uuid = Uuid::from_u128(2);
const OF_A: Uuid = Uuid::from_u128(11);
const OLD: Uuid = Uuid::from_u128(12);

fn family(volumes: &[Uuid], snapshots: &[(Uuid, Option<Uuid>)]) -> Family {
    Family {
        volumes: volumes.iter().copied().collect(),
        snapshots: snapshots.iter().copied().collect(),
    }
}

fn bytes(own: u64, shared: u64, snapshots: u64) -> VolumeBytes {
    VolumeBytes {
        own,
        shared,
        snapshots,
    }
}

#[test]
fn blocks_are_counted_by_who_has_them() {
    let all = family(&[A, B], &[(OF_A, Some(A)), (OLD, None)]);
    let maps = vec![
        (Owner::Volume(A), merged(vec![100..200, 0..10, 10..50])),
        (Owner::Volume(B), merged(vec![40..50, 50..60])),
        // It has kept what the volume has written elsewhere since.
        (Owner::SnapshotOf(Some(A)), vec![0..20, 300..310]),
        (Owner::SnapshotOf(None), vec![190..200, 400..500]),
    ];
    let found = compare(&all, maps);
    // 0..20 with its snapshot, 40..50 with the clone, 190..200 with a snapshot of a deleted volume.
    assert_eq!(found[&A], bytes(20 + 90, 20 + 10 + 10, 10));
    assert_eq!(found[&B], bytes(10, 10, 0));
}

#[test]
fn ranges_are_merged_where_they_touch_or_overlap() {
    assert_eq!(merged(vec![10..20, 0..10, 15..30, 40..50]), [0..30, 40..50]);
    assert_eq!(merged(Vec::new()), []);
}

#[test]
fn sizes_alone_give_bounds() {
    let all = family(&[A], &[(OF_A, Some(A)), (OLD, None)]);
    let sizes = [
        (Image::Volume(A), 100),
        (Image::Snapshot(OF_A), 30),
        (Image::Snapshot(OLD), 20),
    ];
    let sizes = sizes.into_iter().collect();
    assert_eq!(estimate(&all, &sizes, true)[&A], bytes(50, 50, 30));
    assert_eq!(estimate(&all, &sizes, false)[&A], bytes(100, 0, 30));
}

proptest! {
    /// The same as a count of single blocks.
    #[test]
    fn the_walk_counts_each_block_as_a_set_does(
        maps in proptest::collection::vec((0..4usize, proptest::collection::vec((0..40u64, 1..9u64), 0..6)), 1..6),
    ) {
        let owners = [Owner::Volume(A), Owner::Volume(B), Owner::SnapshotOf(Some(A)), Owner::SnapshotOf(None)];
        let mut taken = BTreeSet::new();
        let mut images = Vec::new();
        for (owner, ranges) in maps {
            // A volume has one image.
            if owner > 1 || taken.insert(owner) {
                let ranges = ranges.iter().map(|(start, length)| *start..start + length);
                images.push((owners[owner], merged(ranges.collect())));
            }
        }
        let all = family(&[A, B], &[]);
        let mut expected = nothing(&all);
        for block in 0..60 {
            let has = |map: &[Range<u64>]| map.iter().any(|range| range.contains(&block));
            let holders: Vec<_> = images.iter().filter(|(_, map)| has(map)).map(|(owner, _)| *owner).collect();
            for (uuid, bytes) in &mut expected {
                match (holders.contains(&Owner::Volume(*uuid)), holders.len()) {
                    (true, 1) => bytes.own += 1,
                    (true, _) => bytes.shared += 1,
                    (false, _) => bytes.snapshots += u64::from(holders.contains(&Owner::SnapshotOf(Some(*uuid)))),
                }
            }
        }
        prop_assert_eq!(compare(&all, images), expected);
    }
}
