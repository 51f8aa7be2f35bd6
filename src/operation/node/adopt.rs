//! Adopts and forgets pools for the router: the actions of [`admin`] in the process of the driver.
//!
//! Both change the node record, one at a time. What is at a place is read from its disk, never from the
//! request and never from the node record.

use super::disk;
use crate::backend::place;
use crate::error::{Error, Result};
use crate::model::{PoolDefinition, PoolId, PoolPlace};
use crate::operation::lock::Key;
use crate::operation::pools::admin;
use crate::operation::{Driver, ServingState};

impl Driver {
    /// Makes a configured pool with this ID belong to this machine, and serves it. Nothing is changed if
    /// it is served already.
    pub fn adopt_pool(&self, id: PoolId) -> Result<()> {
        let _record = self.pools.locks.acquire(Key::NodeRecord)?;
        // The home of this machine is read from the record.
        self.pools.read_node_record();
        self.pools.remember()?;
        if self.serving_at(id).is_some() {
            return Ok(());
        }
        let refuse = |why: String| Err(Error::refused(format!("pool {id}"), why));
        let found = self.definitions_of(id)?;
        let definition = match found[..] {
            [one] => one,
            [] => {
                return refuse(
                    "it is at no place that is configured on this node; mount its disk there, and add it to the pools of the driver".into(),
                );
            }
            [one, other, ..] => {
                return refuse(format!(
                    "it is at {} and at {}, so one of them is a copy; remove the one that must not be used from the pools of the driver",
                    one.place, other.place
                ));
            }
        };
        let (host, record) = (self.host.as_ref(), &self.pools.settings.node_record);
        let others = &self.pools.settings.pools;
        let adopted = admin::adopt(host, record, definition, others, false)?;
        tracing::info!(pool = %definition.name, %id, from = ?adopted.from, "adopted a pool");
        self.pools.read_node_record();
        self.probe_pool(&definition.name);
        Ok(())
    }

    /// Forgets a pool that is absent. Nothing is changed if it was forgotten before.
    pub fn forget_pool(&self, id: PoolId) -> Result<()> {
        let _record = self.pools.locks.acquire(Key::NodeRecord)?;
        self.pools.read_node_record();
        let place = match self.serving_at(id) {
            Some(place) => Some(place),
            None => self
                .definitions_of(id)?
                .first()
                .map(|one| one.place.clone()),
        };
        if let Some(place) = place {
            return Err(Error::refused(
                format!("pool {id}"),
                format!(
                    "it is present at {place}; a pool can be forgotten only after its disk was unmounted, or its thin pool deactivated"
                ),
            ));
        }
        let (host, record) = (self.host.as_ref(), &self.pools.settings.node_record);
        admin::forget_id(host, record, id)?;
        tracing::info!(%id, "forgot a pool");
        self.pools.read_node_record();
        // The definition at whose place it was does not wait for it any more.
        for state in self.pools.states() {
            if matches!(&state, ServingState::Refused { id: Some(its), .. } if *its == id) {
                self.probe_pool(&state.definition().name);
            }
        }
        match self.pools.node_record().forgotten.contains_key(&id) {
            true => Ok(()),
            // A refresh has written the record at the same time.
            false => Err(Error::Pending {
                what: Key::NodeRecord.to_string(),
            }),
        }
    }

    /// The place from which a pool is served.
    fn serving_at(&self, id: PoolId) -> Option<PoolPlace> {
        let serving = self.pools.serving();
        let pool = serving.iter().find(|pool| pool.id() == id);
        pool.map(|pool| pool.definition.place.clone())
    }

    /// Definitions at whose places a pool with this ID is, which is not served. An error if the disk at
    /// which it should be cannot be read.
    fn definitions_of(&self, id: PoolId) -> Result<Vec<&PoolDefinition>> {
        let machine = self.machine_folders();
        let mut found = Vec::new();
        for state in self.pools.states() {
            let ServingState::Refused {
                definition,
                id: its,
                ..
            } = state
            else {
                continue;
            };
            let configured = self.pools.settings.pools.iter();
            let Some(definition) = configured.clone().find(|one| one.name == definition.name)
            else {
                continue;
            };
            let there = match disk::answers(&self.host, &self.questions, definition) {
                true => place::identify(self.host.as_ref(), definition, &machine),
                false => Err(disk::no_answer(definition)),
            };
            match there {
                Ok(Some((there, _))) if there == id => found.push(definition),
                Err(error) if its == Some(id) => return Err(error),
                // The disk of another pool.
                Ok(_) | Err(_) => {}
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests;
