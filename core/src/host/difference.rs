//! Computes from the maps of two files that share blocks where their content may differ, without
//! I/O.
//!
//! Two places are equal if both read as zeros according to their maps (a hole, or allocated and
//! never written), or if both have the same disk address. Everything else is reported as different:
//! the result may include too much, never too little. This holds as long as no block of either file
//! can be freed and reused during the comparison.

use super::Extent;

/// Ranges (first byte, end) in which two maps differ, in ascending order, adjacent ranges merged.
///
/// Each map is read only as far as needed and never twice, so maps of any length are compared in
/// constant memory. After an error in either map the comparison stops.
pub struct Differences<A, B> {
    left: Side<A>,
    right: Side<B>,
    at: u64,
    end: u64,
    failed: bool,
}

/// One of the two maps, and the position in it.
struct Side<I> {
    runs: I,
    run: Option<Extent>,
    ended: bool,
}

/// What a map records about a position.
#[derive(Clone, Copy)]
enum Content {
    Zeros,
    At(u64),
    /// Comparable only as a whole extent.
    Whole(Extent),
}

impl Content {
    fn same(self, other: Content) -> bool {
        match (self, other) {
            (Content::Zeros, Content::Zeros) => true,
            (Content::At(left), Content::At(right)) => left == right,
            // An address of 0 (inline, or delayed allocation) identifies nothing.
            (Content::Whole(left), Content::Whole(right)) => left == right && left.physical != 0,
            (Content::Zeros | Content::At(_) | Content::Whole(_), _) => false,
        }
    }
}

impl<I, E> Side<I>
where
    I: Iterator<Item = Result<Extent, E>>,
{
    fn new(runs: I) -> Side<I> {
        Side {
            runs,
            run: None,
            ended: false,
        }
    }

    /// Returns what is at a position, and where that content ends. Positions must ascend between
    /// calls.
    fn look(&mut self, at: u64) -> Result<(Content, u64), E> {
        while !self.ended && self.run.is_none_or(|run| end_of(&run) <= at) {
            self.run = self.runs.next().transpose()?;
            self.ended = self.run.is_none();
        }
        let Some(run) = self.run.filter(|_| !self.ended) else {
            return Ok((Content::Zeros, u64::MAX));
        };
        if run.logical > at {
            return Ok((Content::Zeros, run.logical));
        }
        let content = if run.opaque {
            Content::Whole(run)
        } else if run.unwritten {
            Content::Zeros
        } else {
            Content::At(run.physical.wrapping_add(at - run.logical))
        };
        Ok((content, end_of(&run)))
    }
}

fn end_of(run: &Extent) -> u64 {
    run.logical.saturating_add(run.length)
}

impl<A, B, E> Differences<A, B>
where
    A: Iterator<Item = Result<Extent, E>>,
    B: Iterator<Item = Result<Extent, E>>,
{
    /// Compares from `start` to `end`. Both maps must ascend without overlaps and include every
    /// extent that ends after `start`; the part of an extent before `start` is ignored.
    pub fn new(left: A, right: B, start: u64, end: u64) -> Differences<A, B> {
        Differences {
            left: Side::new(left),
            right: Side::new(right),
            at: start,
            end,
            failed: false,
        }
    }

    /// The position that the comparison has reached.
    pub fn at(&self) -> u64 {
        self.at
    }

    fn advance(&mut self) -> Result<Option<(u64, u64)>, E> {
        let mut open = None;
        while self.at < self.end {
            let (left, left_end) = self.left.look(self.at)?;
            let (right, right_end) = self.right.look(self.at)?;
            if left.same(right) {
                if let Some(start) = open {
                    return Ok(Some((start, self.at)));
                }
            } else {
                open.get_or_insert(self.at);
            }
            self.at = left_end.min(right_end).min(self.end);
        }
        Ok(open.map(|start| (start, self.at)))
    }
}

impl<A, B, E> Iterator for Differences<A, B>
where
    A: Iterator<Item = Result<Extent, E>>,
    B: Iterator<Item = Result<Extent, E>>,
{
    type Item = Result<(u64, u64), E>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let next = self.advance().transpose();
        self.failed = matches!(next, Some(Err(_)));
        next
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use proptest::prelude::*;

    use super::*;

    /// What a block of a small test file reads as, and how its map represents that.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Block {
        Hole,
        Reserved(u64),
        Data(u64),
        Packed(u64),
        Unplaced,
    }

    const BLOCKS: u64 = 24;

    /// Builds a map from the disk blocks 1..8, so that the same address occurs often; at random
    /// each block is an extent of its own or is merged with the next.
    fn map_of(blocks: &[Block], joins: &[bool]) -> Vec<Extent> {
        let mut runs: Vec<Extent> = Vec::new();
        for (at, block) in blocks.iter().enumerate() {
            let (physical, unwritten, opaque) = match *block {
                Block::Hole => continue,
                Block::Reserved(physical) => (physical, true, false),
                Block::Data(physical) => (physical, false, false),
                Block::Packed(physical) => (physical, false, true),
                Block::Unplaced => (0, false, true),
            };
            let run = Extent {
                logical: at as u64,
                physical,
                length: 1,
                unwritten,
                opaque,
            };
            match runs.last_mut() {
                Some(last)
                    if joins[at]
                        && !opaque
                        && !last.opaque
                        && last.unwritten == unwritten
                        && last.logical + last.length == run.logical
                        && last.physical + last.length == physical =>
                {
                    last.length += 1;
                }
                _ => runs.push(run),
            }
        }
        runs
    }

    fn same(left: Block, right: Block) -> bool {
        match (left, right) {
            (Block::Unplaced, _) | (_, Block::Unplaced) => false,
            (Block::Hole | Block::Reserved(_), Block::Hole | Block::Reserved(_)) => true,
            (left, right) => left == right,
        }
    }

    fn block() -> impl Strategy<Value = Block> {
        prop_oneof![
            2 => Just(Block::Hole),
            2 => (1u64..8).prop_map(Block::Reserved),
            6 => (1u64..8).prop_map(Block::Data),
            1 => (1u64..3).prop_map(Block::Packed),
            1 => Just(Block::Unplaced),
        ]
    }

    fn runs(map: Vec<Extent>) -> impl Iterator<Item = Result<Extent, Infallible>> {
        map.into_iter().map(Ok)
    }

    fn size() -> usize {
        BLOCKS as usize
    }

    proptest! {
        #[test]
        fn exactly_the_blocks_that_differ_are_in_the_ranges(
            left in prop::collection::vec(block(), size()),
            right in prop::collection::vec(block(), size()),
            copied in prop::collection::vec(any::<bool>(), size()),
            joins in prop::collection::vec(any::<bool>(), 2 * size()),
            start in 0..BLOCKS,
            end in 0..=BLOCKS,
        ) {
            let right: Vec<_> = (0..size())
                .map(|at| if copied[at] { left[at] } else { right[at] })
                .collect();
            let ranges: Vec<_> = Differences::new(
                runs(map_of(&left, &joins)),
                runs(map_of(&right, &joins[size()..])),
                start,
                end,
            )
            .map(|range| range.unwrap())
            .collect();
            for at in 0..BLOCKS {
                let reported = ranges.iter().any(|(from, to)| (*from..*to).contains(&at));
                let differs = (start..end).contains(&at)
                    && !same(left[at as usize], right[at as usize]);
                prop_assert_eq!(reported, differs, "block {} of {:?}", at, &ranges);
            }
            // The ranges are maximal: none is empty, and none touches the next.
            prop_assert!(ranges.iter().all(|(from, to)| from < to));
            prop_assert!(ranges.windows(2).all(|pair| pair[0].1 < pair[1].0));
        }
    }

    #[test]
    fn a_compressed_run_is_equal_only_as_a_whole() {
        let packed = |logical, length| Extent {
            logical,
            physical: 9,
            length,
            unwritten: false,
            opaque: true,
        };
        let ranges = |left, right| {
            Differences::new(runs(vec![left]), runs(vec![right]), 0, 8)
                .map(|range| range.unwrap())
                .collect::<Vec<_>>()
        };
        assert_eq!(ranges(packed(0, 8), packed(0, 8)), []);
        assert_eq!(ranges(packed(0, 8), packed(0, 4)), [(0, 8)]);
        assert_eq!(ranges(packed(0, 4), packed(4, 4)), [(0, 8)]);
    }

    #[test]
    fn an_error_ends_the_comparison() {
        let left = vec![Err("torn"), Err("again")].into_iter();
        let right = std::iter::empty();
        let mut differences = Differences::new(left, right, 0, 8);
        assert_eq!(differences.next(), Some(Err("torn")));
        assert_eq!(differences.next(), None);
    }
}
