//! Keeps the record of the pools that this machine has had up to date.

use std::sync::{MutexGuard, PoisonError};

use crate::error::{ErrorContext, Result, chain};
use crate::model::{PoolDefinition, PoolId};
use crate::operation::Pools;
use crate::operation::pools::node_record::store_node;
use crate::record::node::KnownPool;
use crate::record::{self, NodeRecord};

impl Pools {
    pub(in crate::operation) fn node_record(&self) -> MutexGuard<'_, NodeRecord> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads what an administrator has changed in the node record. A home that is set stays,
    /// because the cluster uses it.
    pub(in crate::operation) fn read_node_record(&self) {
        match record::load::<NodeRecord>(self.host.as_ref(), &self.settings.node_record) {
            Ok(Some(found)) => {
                let mut home = self.home.write().unwrap_or_else(PoisonError::into_inner);
                *home = home.or(found.home);
                let settled = *home;
                drop(home);
                *self.node_record() = NodeRecord {
                    home: settled,
                    ..found
                };
            }
            // The next write creates it again.
            Ok(None) => {}
            Err(error) => tracing::error!(error = %chain(&error), "failed to read the node record"),
        }
    }

    /// What the node record knows of a definition, by place or by name.
    pub(in crate::operation) fn known(
        &self,
        definition: &PoolDefinition,
    ) -> Option<(PoolId, KnownPool)> {
        let place = definition.place.to_string();
        let record = self.node_record();
        let mut pools = record.pools.iter();
        pools
            .find(|(_, known)| known.place == place || known.name == definition.name)
            .map(|(id, known)| (*id, known.clone()))
    }

    /// Like [`Pools::remember`], but an error is only logged: the next refresh tries again.
    pub(in crate::operation) fn note_served(&self) {
        if let Err(error) = self.remember() {
            tracing::error!(error = %chain(&error), "failed to write the node record");
        }
    }

    /// Writes the served pools into the node record, if that changes it.
    pub(in crate::operation) fn remember(&self) -> Result<()> {
        let mut record = self.node_record();
        let before = record.clone();
        for pool in self.serving() {
            let known = KnownPool {
                name: pool.definition.name.clone(),
                place: pool.definition.place.to_string(),
            };
            record.forgotten.remove(&pool.id());
            record.pools.insert(pool.id(), known);
        }
        let path = &self.settings.node_record;
        if *record == before
            && self
                .host
                .stat(path)
                .context(|| "examine the node record".into())?
                .is_some()
        {
            return Ok(());
        }
        store_node(self.host.as_ref(), path, &record)
    }
}
