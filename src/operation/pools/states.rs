//! Which of the configured pools are served, and the changes of that.

use std::sync::{Arc, PoisonError};

use crate::operation::{Pool, Pools, ServingState};

impl Pools {
    pub(in crate::operation) fn states(&self) -> Vec<ServingState> {
        self.states
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub(in crate::operation) fn serving(&self) -> Vec<Arc<Pool>> {
        let states = self.states();
        states
            .into_iter()
            .filter_map(|state| match state {
                ServingState::Serving(pool) => Some(pool),
                ServingState::Refused { .. } => None,
            })
            .collect()
    }

    /// Adds a configured pool, at the start.
    pub(in crate::operation) fn add(&self, state: ServingState) {
        log_refused(&state);
        let mut states = self.states.write().unwrap_or_else(PoisonError::into_inner);
        states.push(state);
    }

    /// Removes all pools, at the end of the process.
    pub(in crate::operation) fn take_all(&self) -> Vec<ServingState> {
        let mut states = self.states.write().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *states)
    }

    /// Stores the new state of a pool, unless another call has changed it since `before` was read.
    /// Returns whether it was stored.
    pub(in crate::operation) fn replace(&self, before: &ServingState, now: &ServingState) -> bool {
        let mut states = self.states.write().unwrap_or_else(PoisonError::into_inner);
        if let ServingState::Serving(pool) = now {
            let is_it = |state: &ServingState| matches!(state, ServingState::Serving(other) if other.id() == pool.id());
            if states.iter().any(is_it) {
                // A copy that was opened at the same time: the next refresh reports it.
                return false;
            }
        }
        let name = &now.definition().name;
        let slot = states
            .iter_mut()
            .find(|slot| slot.definition().name == *name);
        let Some(slot) = slot else {
            return false;
        };
        let is_news = match (before, &*slot) {
            (ServingState::Serving(before), ServingState::Serving(there))
                if Arc::ptr_eq(before, there) =>
            {
                true
            }
            (ServingState::Refused { .. }, ServingState::Refused { why: there, .. }) => {
                !matches!(now, ServingState::Refused { why, .. } if why == there)
            }
            _ => return false,
        };
        let before = std::mem::replace(slot, now.clone());
        drop(states);
        drop(before);
        if is_news {
            log_refused(now);
        }
        true
    }
}

/// Logs a pool that is not served, once for each reason.
fn log_refused(state: &ServingState) {
    if let ServingState::Refused {
        definition, why, ..
    } = state
    {
        tracing::error!(pool = %definition.name, reason = why, "refusing to serve a pool");
    }
}
