//! A counting semaphore.

use std::sync::{Condvar, Mutex, PoisonError};

/// Shared by all threads that it limits.
pub(super) struct Semaphore {
    free: Mutex<usize>,
    changed: Condvar,
}

/// A permit. Dropping it lets the next thread in.
pub(super) struct Permit<'a>(&'a Semaphore);

impl Semaphore {
    /// Creates a semaphore with `most` permits, at least one.
    pub(super) fn new(most: usize) -> Semaphore {
        Semaphore {
            free: Mutex::new(most.max(1)),
            changed: Condvar::new(),
        }
    }

    /// Waits for a permit.
    pub(super) fn acquire(&self) -> Permit<'_> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        while *free == 0 {
            let waited = self.changed.wait(free);
            free = waited.unwrap_or_else(PoisonError::into_inner);
        }
        *free -= 1;
        Permit(self)
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        let free = self.0.free.lock();
        *free.unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn no_more_than_the_limit_are_within_and_all_get_through() {
        let (gate, within, most) = (Semaphore::new(2), AtomicUsize::new(0), AtomicUsize::new(0));
        // Two threads must be within at the same time: the semaphore lets more than one in.
        let meet = Barrier::new(2);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let _pass = gate.acquire();
                    most.fetch_max(within.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    meet.wait();
                    within.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        assert_eq!(most.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn a_panic_within_leaves() {
        let gate = Semaphore::new(1);
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _pass = gate.acquire();
            panic!("planned");
        }));
        assert!(ended.is_err());
        drop(gate.acquire());
    }
}
