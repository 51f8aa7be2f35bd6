//! Whether a pool is served: decided when it's opened, and here from then on.
//!
//! The disk beneath a pool can die or hang at any time, so every look writes to each pool that is
//! served. One whose disk fails isn't served any more: new operations are refused, and its folder
//! and its lock are let go of when the last operation on it has ended. It is served again when its
//! disk takes writes again, or is there anew.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::disk::DISK_TIMEOUT;
use super::start::log_refused;
use crate::error::chain;
use crate::model::PoolDefinition;
use crate::operation::pools::pool::{Former, folders};
use crate::operation::{Driver, Pool, ServingState};

impl Driver {
    /// Looks at the node record, which `pool forget` and `pool adopt` may have changed, at
    /// published devices, and at all pools, one after the other.
    pub fn refresh_pools(&self) {
        self.read_node_record();
        for definition in &self.settings.pools {
            self.look_at_pool(&definition.name);
        }
        self.look_at_node();
    }

    /// The same without the pools, whose disks may hang.
    pub fn look_at_node(&self) {
        self.read_node_record();
        self.watch_published();
        self.note_served();
    }

    /// Looks whether a pool's disk still takes writes, or whether one that isn't served can be. It
    /// may hang with the disk; several at a time come to one decision.
    pub fn look_at_pool(&self, name: &str) {
        self.look_at_pool_within(name, DISK_TIMEOUT);
    }

    /// The same with a limit of its own for the disk's answer: for tests, in which a disk hangs
    /// for certain.
    pub fn look_at_pool_within(&self, name: &str, patience: Duration) {
        let mut states = self.states().into_iter();
        let Some(before) = states.find(|state| state.definition().name == name) else {
            return;
        };
        let now = match &before {
            ServingState::Serving(pool) => match self.try_disk(pool, patience) {
                Ok(()) => return,
                Err(why) => ServingState::Refused {
                    definition: pool.definition.clone(),
                    id: Some(pool.id()),
                    why,
                    was: Some(Arc::new(Former {
                        pool: Arc::downgrade(pool),
                        device: pool.device,
                        volumes: folders(pool.backend.as_ref()),
                    })),
                },
            },
            ServingState::Refused {
                definition, was, ..
            } => self.try_again(definition, was.as_ref(), patience),
        };
        self.decide(&before, now);
    }

    /// Whether the disk of a pool takes writes; if not, why the pool isn't served.
    fn try_disk(&self, pool: &Arc<Pool>, patience: Duration) -> std::result::Result<(), String> {
        let asked = pool.clone();
        let question = move || asked.backend.try_disk();
        let about = ("disk", pool.definition.name.clone());
        match self.questions.ask(about, patience, question) {
            Some(Ok(())) => Ok(()),
            Some(Err(error)) if error.is_lost_disk() => Err(format!(
                "its disk is dead and must be mounted again ({})",
                chain(&error)
            )),
            // A full disk, for one, is no dead one.
            Some(Err(error)) => {
                tracing::debug!(pool = %pool.definition.name, error = %chain(&error), "failed to write to the disk of a pool");
                Ok(())
            }
            None => Err(format!(
                "its disk hangs: nothing could be written to it for {} s; check whether its file system is frozen or its disk is gone",
                patience.as_secs()
            )),
        }
    }

    /// Looks at a pool that isn't served. Operations that have not ended keep it as it was, and its
    /// lock: then it is the same one that is served again, or none.
    fn try_again(
        &self,
        definition: &PoolDefinition,
        was: Option<&Arc<Former>>,
        patience: Duration,
    ) -> ServingState {
        let refused = |id, why| ServingState::Refused {
            definition: definition.clone(),
            id,
            why,
            was: was.cloned(),
        };
        if let Some(pool) = was.and_then(|was| was.pool.upgrade()) {
            return match self.try_disk(&pool, patience) {
                Ok(()) => ServingState::Serving(pool),
                Err(why) => refused(Some(pool.id()), why),
            };
        }
        let opened = self.open_pool(definition, was.map(|was| was.device));
        match opened.unwrap_or_else(|error| self.refuse(definition, &error)) {
            ServingState::Refused { id, why, .. } => refused(id, why),
            serving => serving,
        }
    }

    /// Puts a new state in the place of the one that was looked at, unless another look was quicker.
    fn decide(&self, before: &ServingState, now: ServingState) {
        let mut states = self.pools.write().unwrap_or_else(PoisonError::into_inner);
        if let ServingState::Serving(pool) = &now {
            let is_it = |state: &ServingState| matches!(state, ServingState::Serving(other) if other.id() == pool.id());
            if states.iter().any(is_it) {
                // A copy, opened at the same time: the next look says so.
                return;
            }
        }
        let name = &now.definition().name;
        let slot = states
            .iter_mut()
            .find(|slot| slot.definition().name == *name);
        let Some(slot) = slot else { return };
        let is_news = match (before, &*slot) {
            (ServingState::Serving(before), ServingState::Serving(there))
                if Arc::ptr_eq(before, there) =>
            {
                true
            }
            (ServingState::Refused { .. }, ServingState::Refused { why: there, .. }) => {
                !matches!(&now, ServingState::Refused { why, .. } if why == there)
            }
            _ => return,
        };
        let there = std::mem::replace(slot, now.clone());
        drop(states);
        if is_news {
            log_refused(&now);
        }
        if matches!(now, ServingState::Serving(_)) {
            self.note_served();
        }
        drop(there);
    }
}
