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
        // The first one is the oldest.
        volumes: volumes.iter().copied().zip(1..).collect(),
        snapshots: snapshots.iter().copied().collect(),
    }
}

fn bytes(exclusive: u64, shared: u64, snapshots: u64) -> VolumeBytes {
    VolumeBytes {
        exclusive,
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
    assert_eq!(found.volumes[&A], bytes(20 + 90, 20 + 10 + 10, 10));
    assert_eq!(found.volumes[&B], bytes(10, 10, 0));
    // Each block counts once.
    let sums = (
        found.exclusive,
        found.shared,
        found.snapshots,
        found.undivided,
    );
    assert_eq!(sums, (110 + 10, 20 + 10 + 10, 10 + 100, 0));
    // The block that both have is that of the older one.
    let attributed = found.attributed.unwrap();
    assert_eq!((attributed[&A], attributed[&B]), (110 + 40 + 10, 10));
}

/// Maps before and after a write to B, a clone of A: A keeps all blocks, and B gets new ones.
#[test]
fn a_write_to_a_clone_is_charged_to_the_clone() {
    let all = family(&[A, B], &[(OF_A, Some(A))]);
    let attributed = |of_b: Blocks| {
        let maps = vec![
            (Owner::Volume(A), vec![0..40, 50..100]),
            (Owner::SnapshotOf(Some(A)), vec![0..40, 50..100]),
            (Owner::Volume(B), of_b),
        ];
        let attributed = compare(&all, maps).attributed.unwrap();
        (attributed[&A], attributed[&B])
    };
    assert_eq!(attributed(vec![0..40, 50..100]), (90, 0));
    assert_eq!(attributed(vec![0..40, 50..70, 200..230]), (90, 30));
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
    let bounds = estimate(&all, &sizes, true);
    assert_eq!(bounds.volumes[&A], bytes(50, 50, 30));
    let sums = |of: &LineageBytes| (of.exclusive, of.shared, of.snapshots, of.undivided);
    assert_eq!(sums(&bounds), (0, 0, 0, 150));
    assert_eq!(bounds.attributed, None);
    // Without shared blocks they are exact.
    let copies = estimate(&all, &sizes, false);
    assert_eq!(copies.volumes[&A], bytes(100, 0, 30));
    assert_eq!(sums(&copies), (100, 0, 50, 0));
    assert_eq!(copies.attributed.unwrap()[&A], 130);
    // So is the size of a volume without other images.
    let sizes = [(Image::Volume(A), 100)].into_iter().collect();
    let alone = estimate(&family(&[A], &[]), &sizes, true);
    assert_eq!(sums(&alone), (100, 0, 0, 0));
    assert_eq!(alone.attributed.unwrap()[&A], 100);
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
        let mut expected = LineageBytes {
            volumes: [A, B].map(|uuid| (uuid, VolumeBytes::default())).into(),
            ..LineageBytes::default()
        };
        let mut attributed = BTreeMap::from([(A, 0), (B, 0)]);
        for block in 0..60 {
            let has = |map: &[Range<u64>]| map.iter().any(|range| range.contains(&block));
            let holders: Vec<_> = images.iter().filter(|(_, map)| has(map)).map(|(owner, _)| *owner).collect();
            let has_volume = holders.iter().any(|holder| matches!(holder, Owner::Volume(_)));
            match (has_volume, holders.len()) {
                (_, 0) => {}
                (true, 1) => expected.exclusive += 1,
                (true, _) => expected.shared += 1,
                (false, _) => expected.snapshots += 1,
            }
            if let Some(oldest) = [A, B].into_iter().find(|uuid| {
                holders.contains(&Owner::Volume(*uuid)) || holders.contains(&Owner::SnapshotOf(Some(*uuid)))
            }) {
                *attributed.get_mut(&oldest).unwrap() += 1;
            }
            for (uuid, bytes) in &mut expected.volumes {
                match (holders.contains(&Owner::Volume(*uuid)), holders.len()) {
                    (true, 1) => bytes.exclusive += 1,
                    (true, _) => bytes.shared += 1,
                    (false, _) => bytes.snapshots += u64::from(holders.contains(&Owner::SnapshotOf(Some(*uuid)))),
                }
            }
        }
        expected.attributed = Some(attributed);
        prop_assert_eq!(compare(&all, images), expected);
    }
}
