//! `pool.json`: who a pool is, written once when it's made.

use serde::{Deserialize, Serialize};

use super::Record;
use crate::model::{HomeId, PoolId};

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
}

impl Record for PoolRecord {
    const VERSION: u32 = 1;
    const WHAT: &'static str = "record of a pool";
}
