//! Fault injection in the guard, for tests that kill or stop it at a step: only in a build with the
//! feature `fault`, and only if `SLACKWATER_GUARD_FAULT=STEP:kill` or `STEP:stop` is set.
//!
//! Steps: accepted, begun, sync-before, sync-after, expedited, freeze-before, freeze-after,
//! thaw-before, thaw-after, deadline, ended. The fault happens once, in the first thread that
//! reaches the step; other threads that reach it wait, because a stop takes a moment to reach them.

use std::time::Duration;

use super::client::KILL_DELAY;

/// Does nothing.
#[cfg(not(feature = "fault"))]
pub(super) fn at(_step: &'static str) {}

/// Executes the fault that is planned for a step.
#[cfg(feature = "fault")]
pub(super) fn at(step: &'static str) {
    use nix::sys::signal::{Signal, raise};
    use std::sync::{Mutex, PoisonError};

    static MET: Mutex<bool> = Mutex::new(false);
    let Some((planned, signal)) = PLAN.get().and_then(Option::as_ref) else {
        return;
    };
    if planned != step {
        return;
    }
    let mut met = MET.lock().unwrap_or_else(PoisonError::into_inner);
    if std::mem::replace(&mut *met, true) {
        return;
    }
    let signal = match signal.as_str() {
        "kill" => Signal::SIGKILL,
        _ => Signal::SIGSTOP,
    };
    // A process is always permitted to signal itself.
    let _ = raise(signal);
}

#[cfg(feature = "fault")]
static PLAN: std::sync::OnceLock<Option<(String, String)>> = std::sync::OnceLock::new();

/// Reads the plan, before anything is frozen.
pub(super) fn prepare() {
    #[cfg(feature = "fault")]
    {
        let text =
            std::env::var(slackwater_core::host::linux::freeze::GUARD_FAULT).unwrap_or_default();
        let plan = text
            .split_once(':')
            .map(|(step, signal)| (step.into(), signal.into()));
        let _ = PLAN.set(plan);
    }
}

/// How long the driver waits for the answer to a thaw request. Tests that inspect what is frozen
/// extend it with `SLACKWATER_THAW_SECONDS`, in a build with the feature `fault`.
pub(super) fn thaw_patience() -> Duration {
    #[cfg(feature = "fault")]
    if let Ok(text) = std::env::var("SLACKWATER_THAW_SECONDS") {
        return text.parse().map_or(KILL_DELAY, Duration::from_secs);
    }
    KILL_DELAY
}
