//! The end of a participant's freeze from outside, at once, whatever step it's in.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::error::{Error, Result};
use crate::host::Freeze;

/// Shared by a participant, which works in its own thread, and whoever notices that its
/// coordinator has gone.
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

    /// Thaws what is frozen, without waiting for it; nothing is frozen any more from now on.
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

    /// What is to be given up; an error if it's too late, with everything given up.
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
