//! Pages, ranges and their bounds, without a pool.

use super::*;

const END: u64 = 100 * RANGE_ALIGNMENT_BYTES;

fn walk() -> Walk {
    Walk {
        at: 0,
        end: END,
        ranges: Vec::new(),
    }
}

fn page(walk: Walk, starting_offset: u64, most: usize) -> (Vec<(u64, u64)>, Option<u64>) {
    let page = walk.page(starting_offset, most, MetadataOf::default());
    assert_eq!(page.capacity, END);
    (page.ranges, page.next)
}

#[test]
fn ranges_are_rounded_outward_and_merged() {
    let mut walk = walk();
    walk.take(
        (
            vec![
                (5, 6),
                (RANGE_ALIGNMENT_BYTES + 1, RANGE_ALIGNMENT_BYTES + 2),
                (9 * RANGE_ALIGNMENT_BYTES, END),
            ],
            END,
        ),
        None,
    );
    let expected = vec![
        (0, 2 * RANGE_ALIGNMENT_BYTES),
        (9 * RANGE_ALIGNMENT_BYTES, 91 * RANGE_ALIGNMENT_BYTES),
    ];
    assert_eq!(page(walk, 0, 10), (expected, None));
}

#[test]
fn a_volumes_end_within_a_block_is_the_last_ranges_end() {
    let mut walk = Walk {
        end: RANGE_ALIGNMENT_BYTES + 512,
        ..walk()
    };
    walk.take(
        (
            vec![(RANGE_ALIGNMENT_BYTES, RANGE_ALIGNMENT_BYTES + 512)],
            RANGE_ALIGNMENT_BYTES + 512,
        ),
        None,
    );
    assert_eq!(
        walk.page(0, 1, MetadataOf::default()).ranges,
        [(RANGE_ALIGNMENT_BYTES, 512)]
    );
}

#[test]
fn what_the_base_did_not_have_is_reported_whatever_it_is() {
    let mut walk = walk();
    walk.take(
        (vec![(0, 1)], 50 * RANGE_ALIGNMENT_BYTES),
        Some(40 * RANGE_ALIGNMENT_BYTES),
    );
    walk.take(
        (
            vec![(60 * RANGE_ALIGNMENT_BYTES, 61 * RANGE_ALIGNMENT_BYTES)],
            END,
        ),
        Some(40 * RANGE_ALIGNMENT_BYTES),
    );
    let expected = vec![
        (0, RANGE_ALIGNMENT_BYTES),
        (40 * RANGE_ALIGNMENT_BYTES, 60 * RANGE_ALIGNMENT_BYTES),
    ];
    assert_eq!(page(walk, 0, 10), (expected, None));
}

#[test]
fn a_full_page_goes_on_with_the_first_range_that_it_has_no_room_for() {
    let ranges = || {
        vec![
            (0, 1),
            (10 * RANGE_ALIGNMENT_BYTES, 11 * RANGE_ALIGNMENT_BYTES),
            (20 * RANGE_ALIGNMENT_BYTES, 21 * RANGE_ALIGNMENT_BYTES),
        ]
    };
    let mut all = walk();
    all.take((ranges(), END), None);
    let first = vec![
        (0, RANGE_ALIGNMENT_BYTES),
        (10 * RANGE_ALIGNMENT_BYTES, RANGE_ALIGNMENT_BYTES),
    ];
    assert_eq!(page(all, 0, 2), (first, Some(20 * RANGE_ALIGNMENT_BYTES)));
    let mut part = walk();
    part.take((ranges(), 50 * RANGE_ALIGNMENT_BYTES), None);
    assert_eq!(page(part, 0, 3).1, Some(50 * RANGE_ALIGNMENT_BYTES));
}

#[test]
fn nothing_is_reported_that_ends_before_the_offset() {
    let mut walk = Walk {
        at: 3 * RANGE_ALIGNMENT_BYTES,
        ..walk()
    };
    walk.take(
        (
            vec![(3 * RANGE_ALIGNMENT_BYTES, 5 * RANGE_ALIGNMENT_BYTES)],
            END,
        ),
        None,
    );
    assert_eq!(
        page(walk, 3 * RANGE_ALIGNMENT_BYTES + 1, 9).0,
        [(3 * RANGE_ALIGNMENT_BYTES, 2 * RANGE_ALIGNMENT_BYTES)]
    );
}

#[test]
fn a_step_that_knows_less_than_a_block_still_goes_on() {
    let mut walk = walk();
    walk.take((vec![], 100), None);
    assert_eq!(
        (walk.at, walk.ranges.clone()),
        (RANGE_ALIGNMENT_BYTES, vec![(0, RANGE_ALIGNMENT_BYTES)])
    );
}

fn run(logical: u64, physical: u64, length: u64, unwritten: bool) -> Extent {
    Extent {
        logical,
        physical,
        length,
        unwritten,
        opaque: false,
    }
}

#[test]
fn reserved_blocks_are_not_allocated_and_ranges_are_cut_to_the_volume() {
    let runs = [
        run(0, 7, 10, false),
        run(10, 17, 10, true),
        run(20, 27, 100, false),
    ];
    assert_eq!(allocated(&runs, 5, 50), (vec![(5, 10), (20, 50)], 50));
}

#[test]
fn beyond_a_full_look_nothing_is_known() {
    let full: Vec<_> = (0..EXTENTS_PER_STEP as u64)
        .map(|n| run(2 * n, n, 1, false))
        .collect();
    let known = 2 * EXTENTS_PER_STEP as u64 - 1;
    let (ranges, end) = differing(&full, &full, 0, u64::MAX);
    assert_eq!((ranges, end), (vec![], known));
    assert_eq!(differing(&full, &[], 0, u64::MAX).1, known);
    assert_eq!(allocated(&full[1..], 0, 1 << 40).1, 1 << 40);
}
