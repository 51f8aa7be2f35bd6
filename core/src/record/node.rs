//! The node's record of its pools, on the machine's own disk (`--node-record`).
//!
//! A disk that was not mounted at boot looks like an empty directory. This record tells the driver
//! which pools must exist, and which topology segment this machine has.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Record;
use crate::model::{HomeId, PoolDefinition, PoolId, PoolPlace};

/// The pools and the identity of this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    /// Its topology segment, once it has one.
    #[serde(default)]
    pub home: Option<HomeId>,
    #[serde(default)]
    pub pools: BTreeMap<PoolId, KnownPool>,
    /// Pools removed by `pool forget`: the IDs of their volumes count as deleted.
    #[serde(default)]
    pub forgotten: BTreeMap<PoolId, KnownPool>,
}

impl NodeRecord {
    /// The pool that this machine had at a place.
    pub fn find_pool_at(&self, place: &PoolPlace) -> Option<PoolId> {
        let place = place.to_string();
        self.find(|known| known.place == place)
    }

    /// The pool that this machine had at the place of a definition, or else under its name.
    pub fn find_pool(&self, definition: &PoolDefinition) -> Option<PoolId> {
        let named = || self.find(|known| known.name == definition.name);
        self.find_pool_at(&definition.place).or_else(named)
    }

    fn find(&self, is_wanted: impl Fn(&KnownPool) -> bool) -> Option<PoolId> {
        let mut known = self.pools.iter();
        known.find(|(_, known)| is_wanted(known)).map(|(id, _)| *id)
    }
}

/// A pool as it was when it was last opened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownPool {
    /// Its name in the configuration.
    pub name: String,
    /// Its place: "file:/path".
    pub place: String,
}

impl Record for NodeRecord {
    const VERSION: u32 = 1;
    const WHAT: &'static str = "record of this node";
}
