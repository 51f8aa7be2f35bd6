//! Faults that tests plan for a process: it is killed or stopped at a step, a thread hangs there, or
//! the step fails. Only a build with the feature `fault` has them; in all others, these functions
//! just perform the step.
//!
//! The environment variable `SLACKWATER_FAULT` has the plan: `scope.step:mode`, and more of them
//! after commas.
//!
//! | scope | steps |
//! |---|---|
//! | `effect` | each [`Effect`](crate::host::Effect) and each request to the guard, by its name (the first one) or by its number, counted from 1 in the order in which they begin; `all` of them |
//! | `guard` | what the freeze guard does in a session; `memory`: its sections that must allocate nothing |
//! | `router` | the steps of a cut on several nodes, and of a copy to another node |
//! | `driver` | `kill_guard`: the driver kills a guard that does not thaw in time; `memory`: its sections that must allocate nothing |
//!
//! | mode | |
//! |---|---|
//! | `kill`, `stop` | SIGKILL or SIGSTOP to this process before the step, once |
//! | `kill-after`, `stop-after` | the same after it |
//! | `hang` | each thread that reaches the step waits forever |
//! | `error=ERRNO` | the effect is not performed, and fails once |
//! | `delay=SECONDS` | the step comes later |
//! | `log=FILE` | appends `number name` of each effect that begins and each fault that sends a signal, or `name number` of each section that ends, with its number of allocations |
//! | `after=FILE` | effects are counted and logged only once the file exists |
//!
//! A driver gives the faults of the scope `guard` to the guard that it starts.

#[cfg(feature = "fault")]
pub mod memory;
#[cfg(feature = "fault")]
mod plan;

#[cfg(feature = "fault")]
pub use {
    memory::{with_memory, without_memory},
    plan::{COPY_STEPS, CUT_STEPS, around, check, delay, effect, effects, for_guard},
};

#[cfg(not(feature = "fault"))]
pub use absent::{around, check, delay, effect, for_guard, with_memory, without_memory};

/// Reaches a step that has no length.
pub fn reach(scope: &'static str, step: &'static str) {
    around(scope, step, || ());
}

#[cfg(not(feature = "fault"))]
mod absent {
    use std::time::Duration;

    use crate::error::HostError;

    /// Refuses an invalid plan.
    pub fn check() -> Result<(), HostError> {
        Ok(())
    }

    /// Performs a step.
    pub fn around<T>(_scope: &'static str, _step: &'static str, act: impl FnOnce() -> T) -> T {
        act()
    }

    /// Performs an effect, or a step that changes something but cannot be a value.
    pub fn effect<T>(
        _name: &'static str,
        act: impl FnOnce() -> Result<T, HostError>,
    ) -> Result<T, HostError> {
        act()
    }

    /// Performs what must allocate nothing.
    pub fn without_memory<T>(_scope: &'static str, _section: &str, act: impl FnOnce() -> T) -> T {
        act()
    }

    /// Performs what may allocate within such a section.
    pub fn with_memory<T>(act: impl FnOnce() -> T) -> T {
        act()
    }

    /// How much later a step comes.
    pub fn delay(_scope: &'static str, _step: &'static str) -> Duration {
        Duration::ZERO
    }

    /// The environment variable for a guard that is started.
    pub fn for_guard() -> Option<(&'static str, String)> {
        None
    }
}
