//! That LVM on this machine ignores what tenants write to raw block volumes: `lvm-filter.json` next to
//! the node record. Doctor writes it after a trial, and removes it after a trial that fails.

use serde::{Deserialize, Serialize};

use super::Record;

/// The last trial that succeeded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LvmFilterRecord {
    /// When it was, in seconds since 1970.
    pub checked_at: u64,
}

impl Record for LvmFilterRecord {
    const VERSION: u32 = 1;
    const WHAT: &'static str = "record of LVM's filter";
}
