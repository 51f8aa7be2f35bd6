//! The pools of this node: how they are created and found, where they are stored, and how much
//! space they have left. [`Pools`] also has what all operations share.

pub mod admin;
pub(in crate::operation) mod capacity;
pub mod inventory;
pub(in crate::operation) mod known;
pub(in crate::operation) mod lookup;
pub mod node_record;
pub(in crate::operation) mod pool;
pub(in crate::operation) mod states;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, PoisonError, RwLock};

use crate::error::{Error, Result};
use crate::host::Host;
use crate::model::HomeId;
use crate::operation::{InFlight, Locks, ServingState, Settings};
use crate::record::NodeRecord;

/// The pools of this node, and what all operations share: the configuration, the host, the
/// locks and the limits. It uses no other part of the [`Driver`](crate::operation::Driver).
pub struct Pools {
    pub(in crate::operation) settings: Settings,
    pub(in crate::operation) host: Arc<dyn Host>,
    pub(in crate::operation) locks: Locks,
    pub(in crate::operation) in_flight: InFlight,
    /// `None` while pools of several homes wait for `slackwater pool adopt`.
    home: RwLock<Option<HomeId>>,
    /// Used instead of the home while that is `None`. No pool has this ID.
    placeholder_home: HomeId,
    states: RwLock<Vec<ServingState>>,
    record: Mutex<NodeRecord>,
}

impl Pools {
    /// Without any pool. `record` is the node record as it was read.
    pub(in crate::operation) fn new(
        settings: Settings,
        host: Arc<dyn Host>,
        record: NodeRecord,
    ) -> Pools {
        Pools {
            settings,
            locks: Locks::default(),
            in_flight: InFlight::default(),
            home: RwLock::new(record.home),
            placeholder_home: HomeId(host.random_uuid()),
            host,
            states: RwLock::default(),
            record: Mutex::new(record),
        }
    }

    /// The configuration with which the driver was started.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The home of this machine, or an ID that no pool has while the home is not known.
    pub fn home(&self) -> HomeId {
        self.get_home().unwrap_or(self.placeholder_home)
    }

    /// The home of this machine. It is an error while it is not known: the label of a Node cannot
    /// be changed later.
    pub fn get_home(&self) -> Result<HomeId> {
        let home = *self.home.read().unwrap_or_else(PoisonError::into_inner);
        home.ok_or_else(|| Error::Unreachable {
            what: "this node".into(),
            reason: "its pools have several homes; run `slackwater pool adopt` for the pools that are meant to stay".into(),
        })
    }

    /// The key of the only topology segment.
    pub fn topology_key(&self) -> String {
        format!("topology.{}/home", self.settings.driver_name)
    }

    /// The requirements for volumes that this host does not meet, each with its remedy. Empty if it
    /// meets all of them.
    pub fn missing(&self) -> Vec<String> {
        self.host.missing()
    }

    /// The number of locks that are held.
    pub fn locks_held(&self) -> usize {
        self.locks.held()
    }
}
