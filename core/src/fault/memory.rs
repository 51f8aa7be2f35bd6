//! Sections that must allocate nothing, because writers wait for them.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::cell::Cell;

use super::plan;

thread_local! {
    /// How often this thread has allocated in its present section; `None` outside of sections.
    static ALLOCATIONS: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Notes an allocation of this thread. The allocator calls it. With `RUST_BACKTRACE`, the place is
/// printed.
pub fn allocates() {
    let Ok(Some(count)) = ALLOCATIONS.try_with(Cell::take) else {
        return;
    };
    // The thread is outside of the section here, so what this allocates does not count.
    // A thread that panics may hold the lock of backtraces.
    if !std::thread::panicking() {
        let place = Backtrace::capture();
        if place.status() == BacktraceStatus::Captured {
            eprintln!("allocates while writers wait:\n{place}");
        }
    }
    ALLOCATIONS.set(Some(count + 1));
}

/// Performs what must allocate nothing. If the plan names a file for it, the number of allocations of
/// this thread is written there afterwards. A section within a section belongs to the outer one.
pub fn without_memory<T>(scope: &'static str, section: &str, act: impl FnOnce() -> T) -> T {
    if ALLOCATIONS.get().is_some() || !plan::is_planned(scope, "memory") {
        return act();
    }
    ALLOCATIONS.set(Some(0));
    // A panic leaves the section as well.
    let _left = Leaves;
    let done = act();
    let count = ALLOCATIONS.take().unwrap_or_default();
    plan::log(scope, "memory", &format!("{section} {count}"));
    done
}

/// Performs what a section does before the first writer waits. It may allocate.
pub fn with_memory<T>(act: impl FnOnce() -> T) -> T {
    let section = ALLOCATIONS.take();
    let done = act();
    ALLOCATIONS.set(section);
    done
}

struct Leaves;

impl Drop for Leaves {
    fn drop(&mut self) {
        ALLOCATIONS.set(None);
    }
}
