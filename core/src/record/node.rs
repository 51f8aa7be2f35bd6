//! The node's record of its pools, on the machine's own disk (`--node-record`).
//!
//! A disk that was not mounted at boot looks like an empty folder. This record is how the driver
//! knows that a pool should be there, and which home this machine has.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Record;
use crate::model::{HomeId, PoolId};

/// What this machine has had.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    /// Its home, once it has one.
    #[serde(default)]
    pub home: Option<HomeId>,
    /// Its pools.
    #[serde(default)]
    pub pools: BTreeMap<PoolId, KnownPool>,
    /// Pools that `pool forget` ended: ids of their volumes count as deleted.
    #[serde(default)]
    pub forgotten: BTreeMap<PoolId, KnownPool>,
}

/// A pool as it was last seen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownPool {
    /// Its name in the configuration.
    pub name: String,
    /// Where it was: "file:/path".
    pub place: String,
}

impl Record for NodeRecord {
    const VERSION: u32 = 1;
    const WHAT: &'static str = "record of this node";
}
