//! `pool.json`: the identity of a pool, written once when the pool is created.

use serde::{Deserialize, Serialize};

use super::Record;
use crate::model::{HomeId, PoolId, SnapshotSpacePolicy};

/// Identity of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolRecord {
    pub id: PoolId,
    /// The machine to which it belongs. Only `pool adopt` changes it.
    pub home: HomeId,
    /// The name with which it was created, for information only: the name in its definition is the
    /// one that counts.
    #[serde(default)]
    pub name: String,
    /// Seconds since 1970.
    #[serde(default)]
    pub created_at: u64,
    /// Whether snapshots may use the space that is guaranteed to volumes, if the pool's definition
    /// does not set it. Pools of earlier releases have no value, which means best effort. A program
    /// that ignores the field treats the pool as best effort, so it needs no higher version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshots: Option<SnapshotSpacePolicy>,
}

impl Record for PoolRecord {
    const VERSION: u32 = 1;
    const WHAT: &'static str = "record of a pool";
}
