//! Remembers the map that an image had when its copy was last corrected, so that a freeze reads one
//! map instead of two.
//!
//! Where the image still has the address that it had then, the copy is assumed to have it too. That
//! is not certain: the address may have changed between reading the map and cloning, and a foreign
//! process may move blocks of the copy. So it is verified after the freeze, when no writer waits
//! ([`verify_copy`](super::Host::verify_copy)): if the copy has an address from the image, and the
//! image has had it all the time, the block was shared all the time, and a shared block is never
//! overwritten.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Extent;
use super::difference::Differences;

/// Maximum number of extents remembered for all images of a cut together (40 bytes each; while a
/// map is read, the previous one is in memory too). For images beyond that, both maps are read.
const MAX_RUNS: usize = 2 << 20;
/// Smallest number of extents for which memory is reserved at once.
const MIN_RESERVED_EXTENTS: usize = 4096;

/// How many extents the images of one cut may still remember.
#[derive(Debug)]
pub struct Budget(AtomicUsize);

impl Default for Budget {
    fn default() -> Budget {
        Budget(AtomicUsize::new(MAX_RUNS))
    }
}

impl Budget {
    fn take(&self, runs: usize) -> bool {
        let less = |left: usize| left.checked_sub(runs);
        let order = Ordering::SeqCst;
        self.0.fetch_update(order, order, less).is_ok()
    }
}

/// A map in memory; empty once it became too long for the budget.
#[derive(Debug)]
pub(in crate::host) struct Map {
    runs: Vec<Extent>,
    /// Extents taken from the budget for this map.
    taken: usize,
    is_whole: bool,
    budget: Arc<Budget>,
}

impl Map {
    /// Appends an extent.
    pub(in crate::host) fn see(&mut self, run: &Extent) {
        if self.is_whole && self.runs.len() == self.taken {
            let more = self.taken.max(MIN_RESERVED_EXTENTS);
            self.is_whole = self.budget.take(more);
            if self.is_whole {
                self.taken += more;
                self.runs.reserve_exact(more);
            } else {
                self.runs = Vec::new();
            }
        }
        if self.is_whole {
            self.runs.push(*run);
        }
    }

    pub(in crate::host) fn runs(&self) -> impl Iterator<Item = Extent> {
        self.runs.iter().copied()
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        self.budget.0.fetch_add(self.taken, Ordering::SeqCst);
    }
}

/// What is remembered of one image and its copy during one cut.
#[derive(Debug, Default)]
pub struct Known(Mutex<Memory>);

/// The remembered state.
#[derive(Debug, Default)]
pub(in crate::host) struct Memory {
    /// The image's map at the last pass; `None` if it was not remembered.
    pub(in crate::host) runs: Option<Map>,
    /// Ranges (first byte, end) that were cloned after that, within the freeze.
    pub(in crate::host) redone: Vec<(u64, u64)>,
    /// The next pass is the one within the freeze.
    pub(in crate::host) is_last: bool,
    /// Extents that the image had at the last pass.
    extents: Option<u64>,
    budget: Arc<Budget>,
}

impl Known {
    /// For an image of a cut whose images share a budget.
    pub fn sharing(budget: &Arc<Budget>) -> Known {
        Known(Mutex::new(Memory {
            budget: budget.clone(),
            ..Memory::default()
        }))
    }

    /// Declares that the next pass is the last: the ranges that it clones are recorded, and its map
    /// is not remembered. Memory for these records is reserved here, because nothing should
    /// allocate during the freeze.
    pub fn seal(&self) {
        let mut memory = self.lock();
        let runs = memory.runs.as_ref().map_or(0, |map| map.runs.len());
        memory.redone.reserve(runs);
        memory.is_last = true;
    }

    /// How many extents the image had when a pass last read its map, if one has.
    pub fn extents(&self) -> Option<u64> {
        self.lock().extents
    }

    pub(in crate::host) fn lock(&self) -> MutexGuard<'_, Memory> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Memory {
    /// Records the number of extents that a pass has found.
    pub(in crate::host) fn set_extents(&mut self, extents: u64) {
        self.extents = Some(extents);
    }

    /// An empty map for a pass that is not the last; [`Memory::remember`] stores it.
    pub(in crate::host) fn map(&self) -> Map {
        Map {
            runs: Vec::new(),
            taken: 0,
            is_whole: true,
            budget: self.budget.clone(),
        }
    }

    /// Stores the whole map of such a pass.
    pub(in crate::host) fn remember(&mut self, seen: Map) {
        self.runs = seen.is_whole.then_some(seen);
    }

    /// Whether a copy of `size` bytes has, by its own map, everything that was assumed about it.
    ///
    /// # Errors
    /// Returns the errors of reading the map.
    pub(in crate::host) fn verify_copy<E>(
        &self,
        copy: impl Iterator<Item = Result<Extent, E>>,
        size: u64,
    ) -> Result<bool, E> {
        let Some(runs) = &self.runs else {
            return Ok(true);
        };
        let mut redone = self.redone.iter().copied().peekable();
        for range in Differences::new(runs.runs().map(Ok), copy, 0, size) {
            let (start, end) = range?;
            while redone
                .next_if(|(_, redone_end)| *redone_end <= start)
                .is_some()
            {}
            let is_redone = |(from, until): &(u64, u64)| *from <= start && end <= *until;
            if !redone.peek().is_some_and(is_redone) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn run(block: u64, place: u64, blocks: u64) -> Extent {
        Extent {
            logical: block * 4096,
            physical: place * 4096,
            length: blocks * 4096,
            unwritten: false,
            opaque: false,
        }
    }

    fn verify_copy(known: &[Extent], redone: &[(u64, u64)], copy: &[Extent]) -> bool {
        let mut memory = Memory {
            redone: redone.iter().map(|(a, b)| (a * 4096, b * 4096)).collect(),
            is_last: true,
            ..Memory::default()
        };
        let mut map = memory.map();
        known.iter().for_each(|run| map.see(run));
        memory.remember(map);
        let copy = copy.iter().copied().map(Ok::<_, Infallible>);
        memory.verify_copy(copy, 100 * 4096).unwrap()
    }

    #[test]
    fn only_what_was_cloned_in_the_window_may_differ() {
        let known = [run(0, 50, 10), run(20, 80, 10)];
        assert!(verify_copy(&known, &[], &known));
        // The same content split into other extents is equal.
        assert!(verify_copy(
            &known,
            &[],
            &[run(0, 50, 4), run(4, 54, 6), run(20, 80, 10)]
        ));
        let moved = [
            run(0, 50, 4),
            run(4, 200, 2),
            run(6, 56, 4),
            run(20, 80, 10),
        ];
        assert!(!verify_copy(&known, &[], &moved));
        assert!(verify_copy(&known, &[(4, 6)], &moved));
        assert!(verify_copy(&known, &[(0, 1), (3, 7), (8, 9)], &moved));
        assert!(!verify_copy(&known, &[(4, 5)], &moved));
        assert!(!verify_copy(&known, &[(5, 6)], &moved));
        // Two adjacent ranges count as one.
        assert!(!verify_copy(&known, &[(4, 5), (5, 6)], &moved));
        // A missing extent, and a superfluous one.
        assert!(!verify_copy(&known, &[], &known[..1]));
        assert!(!verify_copy(
            &known,
            &[],
            &[known[0], known[1], run(40, 300, 1)]
        ));
        assert!(verify_copy(&known, &[(20, 30)], &known[..1]));
    }

    #[test]
    fn the_known_extents_of_all_images_of_a_cut_are_bounded_together() {
        let budget: Arc<Budget> = Arc::default();
        let remembered = |runs: usize| {
            let mut memory = Known::sharing(&budget).0.into_inner().unwrap();
            let mut map = memory.map();
            (0..runs).for_each(|_| map.see(&run(0, 50, 1)));
            memory.remember(map);
            memory
        };
        let most = MAX_RUNS;
        let first = remembered(most / 2);
        assert!(first.runs.is_some());
        let second = remembered(most / 2 + 1);
        assert!(second.runs.is_none(), "both maps are read for it");
        drop(second);
        let third = remembered(most / 4);
        assert!(third.runs.is_some(), "what wasn't remembered is free again");
        drop((first, third));
        assert_eq!(budget.0.load(Ordering::SeqCst), most);
    }

    #[test]
    fn without_an_address_nothing_is_considered_known() {
        let mut unplaced = run(3, 0, 2);
        unplaced.opaque = true;
        let known = [unplaced];
        assert!(!verify_copy(&known, &[], &[run(3, 70, 2)]));
        assert!(verify_copy(&known, &[(3, 5)], &[run(3, 70, 2)]));
    }

    #[test]
    fn a_map_that_is_too_long_is_not_remembered() {
        let known = Known::default();
        let map = |runs: usize| {
            let mut map = known.lock().map();
            (0..runs).for_each(|_| map.see(&run(0, 1, 1)));
            map
        };
        let seen = map(MAX_RUNS + 10);
        assert_eq!(seen.runs.capacity(), 0, "it takes no room any more");
        known.lock().remember(seen);
        assert!(known.lock().runs.is_none());
        let one = map(1);
        known.lock().remember(one);
        known.seal();
        let memory = known.lock();
        assert!(memory.is_last && memory.redone.capacity() >= 1);
        let mut without = Memory::default();
        without.redone.push((0, 1));
        let other = [run(9, 9, 9)];
        let copy = other.iter().copied().map(Ok::<_, Infallible>);
        assert!(without.verify_copy(copy, 4096 * 100).unwrap());
    }
}
