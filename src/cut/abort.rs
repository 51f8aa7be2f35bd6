//! Aborts the freeze of a participant from another thread, at once and during any step.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::error::{Error, Result};
use crate::host::Freeze;

/// Shared by a participant, which works in its own thread, and the thread that notices that the
/// coordinator is gone.
#[derive(Clone, Default)]
pub struct AbortHandle(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    aborted: bool,
    held: Option<Weak<dyn Freeze>>,
}

impl AbortHandle {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Thaws what is frozen, without waiting for it. The participant cannot freeze anything
    /// afterwards.
    pub fn now(&self) {
        let held = {
            let mut state = self.state();
            state.aborted = true;
            state.held.take().and_then(|held| held.upgrade())
        };
        if let Some(held) = held {
            held.give_up();
        }
    }

    /// Registers the session that [`AbortHandle::now`] gives up. If it was called before, this
    /// gives up the session and returns an error.
    pub(super) fn watch(&self, held: &Arc<dyn Freeze>) -> Result<()> {
        let mut state = self.state();
        if state.aborted {
            drop(state);
            held.give_up();
            return Err(Error::CutLost {
                reason: "the coordinator of the cut is gone".into(),
            });
        }
        state.held = Some(Arc::downgrade(held));
        Ok(())
    }
}
