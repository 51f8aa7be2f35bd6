//! `pool.json`: who a pool is, written once when it's made.

use serde::{Deserialize, Serialize};

use super::Record;
use crate::model::{HomeId, PoolId, SnapshotRoom};

/// Identity of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolRecord {
    /// The pool.
    pub id: PoolId,
    /// The machine it belongs to. Changed by `pool adopt` alone.
    pub home: HomeId,
    /// The name it was made with, for people: the definition's name counts.
    #[serde(default)]
    pub name: String,
    /// Seconds since 1970.
    #[serde(default)]
    pub created_at: u64,
    /// Whether snapshots may take the room that volumes were promised, where its definition doesn't
    /// say it. Pools of before have none, and are best effort. A program that ignores it treats
    /// the pool as it treats all others, so that it needs no higher version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshots: Option<SnapshotRoom>,
}

impl Record for PoolRecord {
    const VERSION: u32 = 1;
    const WHAT: &'static str = "record of a pool";
}
