//! What an image's map was when its copy was last put right, so that a freeze reads one map
//! instead of two.
//!
//! Where the image still has the address that it had then, the copy is taken to have it as well.
//! That isn't certain: what was read may have changed before it was cloned, and somebody may move
//! a copy's blocks. So it's proven afterwards, when nobody waits for it
//! ([`agrees`](super::Host::agrees)): a place that the copy has from the image, and that the image
//! had all the time, was shared all the time, and nobody writes to what is shared.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Extent;
use super::difference::Differences;

/// A map of more runs isn't remembered (40 bytes each): both maps are read then, as without memory.
const MOST_RUNS: usize = 1 << 20;

/// Of one image and its copy, through one cut.
#[derive(Debug, Default)]
pub struct Known(Mutex<Memory>);

/// What is known.
#[derive(Debug, Default)]
pub(in crate::host) struct Memory {
    /// The image's map at the last pass; `None` if it wasn't remembered.
    pub(in crate::host) runs: Option<Vec<Extent>>,
    /// Ranges (first byte, end) that were cloned after that, within the window.
    pub(in crate::host) redone: Vec<(u64, u64)>,
    /// The next pass is the one within the window.
    pub(in crate::host) is_last: bool,
}

impl Known {
    /// The next pass is the last one: what it clones is noted, and no map is remembered any more.
    /// Room for its notes is made here, since within the window nothing should grow.
    pub fn seal(&self) {
        let mut memory = self.lock();
        let runs = memory.runs.as_ref().map_or(0, Vec::len);
        memory.redone.reserve(runs);
        memory.is_last = true;
    }

    pub(in crate::host) fn lock(&self) -> MutexGuard<'_, Memory> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Memory {
    /// Puts down a run that a pass has seen which isn't the last; [`Memory::remember`] ends it.
    pub(in crate::host) fn see(seen: &mut Vec<Extent>, run: &Extent) {
        // One more than is remembered tells that it's too long.
        if seen.len() <= MOST_RUNS {
            seen.push(*run);
        }
    }

    /// The whole map of such a pass.
    pub(in crate::host) fn remember(&mut self, seen: Vec<Extent>) {
        self.runs = (seen.len() <= MOST_RUNS).then_some(seen);
    }

    /// Whether a copy of `size` bytes has, by its own map, all that was taken for granted.
    ///
    /// # Errors
    /// Those of reading the map.
    pub(in crate::host) fn agrees<E>(
        &self,
        copy: impl Iterator<Item = Result<Extent, E>>,
        size: u64,
    ) -> Result<bool, E> {
        let Some(runs) = &self.runs else {
            return Ok(true);
        };
        let mut redone = self.redone.iter().copied().peekable();
        for range in Differences::new(runs.iter().copied().map(Ok), copy, 0, size) {
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

    fn agrees(known: &[Extent], redone: &[(u64, u64)], copy: &[Extent]) -> bool {
        let memory = Memory {
            runs: Some(known.to_vec()),
            redone: redone.iter().map(|(a, b)| (a * 4096, b * 4096)).collect(),
            is_last: true,
        };
        let copy = copy.iter().copied().map(Ok::<_, Infallible>);
        memory.agrees(copy, 100 * 4096).unwrap()
    }

    #[test]
    fn only_what_was_cloned_in_the_window_may_differ() {
        let known = [run(0, 50, 10), run(20, 80, 10)];
        assert!(agrees(&known, &[], &known));
        // In other pieces it's the same.
        assert!(agrees(
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
        assert!(!agrees(&known, &[], &moved));
        assert!(agrees(&known, &[(4, 6)], &moved));
        assert!(agrees(&known, &[(0, 1), (3, 7), (8, 9)], &moved));
        assert!(!agrees(&known, &[(4, 5)], &moved));
        assert!(!agrees(&known, &[(5, 6)], &moved));
        // Two that touch were told as one.
        assert!(!agrees(&known, &[(4, 5), (5, 6)], &moved));
        // What is missing, and what is too much.
        assert!(!agrees(&known, &[], &known[..1]));
        assert!(!agrees(&known, &[], &[known[0], known[1], run(40, 300, 1)]));
        assert!(agrees(&known, &[(20, 30)], &known[..1]));
    }

    #[test]
    fn without_a_place_nothing_is_taken_for_granted() {
        let mut unplaced = run(3, 0, 2);
        unplaced.opaque = true;
        let known = [unplaced];
        assert!(!agrees(&known, &[], &[run(3, 70, 2)]));
        assert!(agrees(&known, &[(3, 5)], &[run(3, 70, 2)]));
    }

    #[test]
    fn a_map_that_is_too_long_is_not_remembered() {
        let known = Known::default();
        let mut seen = Vec::new();
        for _ in 0..MOST_RUNS + 10 {
            Memory::see(&mut seen, &run(0, 1, 1));
        }
        assert_eq!(seen.len(), MOST_RUNS + 1, "it takes no more room than that");
        known.lock().remember(seen);
        assert!(known.lock().runs.is_none());
        known.lock().remember(vec![run(0, 1, 1)]);
        known.seal();
        let memory = known.lock();
        assert!(memory.is_last && memory.redone.capacity() >= 1);
        let mut without = Memory::default();
        without.redone.push((0, 1));
        let other = [run(9, 9, 9)];
        let copy = other.iter().copied().map(Ok::<_, Infallible>);
        assert!(without.agrees(copy, 4096 * 100).unwrap());
    }
}
