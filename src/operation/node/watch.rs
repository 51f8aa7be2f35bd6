//! Refreshes the state of the pools while the process runs.
//!
//! The disk of a pool can die or hang at any time, so every refresh writes to each served pool. A
//! pool whose disk fails is no longer served: new operations are refused, and its directory and
//! lock are released when the last operation on it has finished. The pool is served again when
//! its disk accepts writes again, or was replaced and mounted.

use std::sync::Arc;
use std::time::Duration;

use super::disk::DISK_TIMEOUT;
use crate::error::chain;
use crate::model::PoolDefinition;
use crate::operation::pools::pool::{Former, folders};
use crate::operation::{Driver, Pool, Presence, ServingState};

impl Driver {
    /// Reads the node record, which `slackwater pool forget` and `slackwater pool adopt` may have
    /// changed, and examines published devices and all pools, one after the other.
    pub fn refresh_pools(&self) {
        self.pools.read_node_record();
        for definition in &self.pools.settings.pools {
            self.probe_pool(&definition.name);
        }
        self.refresh_node();
    }

    /// Like [`Driver::refresh_pools`], without the pools, whose disks may hang.
    pub fn refresh_node(&self) {
        self.pools.read_node_record();
        self.usage.watch_published();
        self.pools.note_served();
    }

    /// Checks whether the disk of a served pool still accepts writes, or whether a refused pool can
    /// be served. It may hang with the disk. Concurrent calls result in one change.
    pub fn probe_pool(&self, name: &str) {
        self.probe_pool_within(name, DISK_TIMEOUT);
    }

    /// Like [`Driver::probe_pool`], with another timeout for the disk, for tests in which a disk
    /// hangs.
    pub fn probe_pool_within(&self, name: &str, max_wait: Duration) {
        let mut states = self.pools.states().into_iter();
        let Some(before) = states.find(|state| state.definition().name == name) else {
            return;
        };
        let now = match &before {
            ServingState::Serving(pool) => match self.try_disk(pool, max_wait) {
                Ok(()) => return,
                Err(why) => ServingState::Refused {
                    definition: Box::new(pool.definition.clone()),
                    id: Some(pool.id()),
                    why,
                    presence: Presence::Unknown,
                    was: Some(Arc::new(Former {
                        pool: Arc::downgrade(pool),
                        device: pool.device,
                        volumes: folders(&pool.backend),
                    })),
                },
            },
            ServingState::Refused {
                definition, was, ..
            } => self.try_again(definition, was.as_ref(), max_wait),
        };
        if self.pools.replace(&before, &now) && matches!(now, ServingState::Serving(_)) {
            self.pools.note_served();
        }
    }

    /// Whether the disk of a pool accepts writes; if not, why the pool is no longer served.
    fn try_disk(&self, pool: &Arc<Pool>, max_wait: Duration) -> std::result::Result<(), String> {
        let asked = pool.clone();
        let question = move || asked.backend.try_disk();
        let about = ("disk", pool.definition.name.clone());
        match self.questions.ask(about, max_wait, question) {
            Some(Ok(())) => Ok(()),
            Some(Err(error)) if error.is_lost_disk() => Err(format!(
                "its disk is dead and must be mounted again ({})",
                chain(&error)
            )),
            // Other errors, such as a full disk, do not mean that the disk is dead.
            Some(Err(error)) => {
                tracing::debug!(pool = %pool.definition.name, error = %chain(&error), "failed to write to the disk of a pool");
                Ok(())
            }
            None => Err(format!(
                "its disk hangs: nothing could be written to it for {} s; check whether its file system is frozen or its disk is gone",
                max_wait.as_secs()
            )),
        }
    }

    /// Checks a pool that is not served. While operations on it have not finished, they keep it
    /// open and locked; then the same pool is served again, or none.
    fn try_again(
        &self,
        definition: &PoolDefinition,
        was: Option<&Arc<Former>>,
        max_wait: Duration,
    ) -> ServingState {
        let still = |mut state: ServingState| {
            if let ServingState::Refused { was: former, .. } = &mut state {
                *former = was.cloned();
            }
            state
        };
        if let Some(pool) = was.and_then(|was| was.pool.upgrade()) {
            return match self.try_disk(&pool, max_wait) {
                Ok(()) => ServingState::Serving(pool),
                Err(why) => still(ServingState::refused(definition, Some(pool.id()), why)),
            };
        }
        let opened = self.open_pool(definition, was.map(|was| was.device), max_wait);
        still(opened.unwrap_or_else(|error| self.refuse(definition, &error)))
    }
}
