//! `image.json`: the record of a pool's own xfs image, next to it in the pool's directory.

use serde::{Deserialize, Serialize};

use super::{Formatted, Record};

/// The record of the image that holds a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRecord {
    /// Size of the image in bytes, every block of which is reserved. It is raised after more blocks
    /// have been reserved and before the file system is grown; it is never lowered.
    pub size: u64,
    /// Logical block size of its loop devices, set at creation and never changed.
    pub block_size: u32,
    /// The file system in it, written before mkfs starts and again after it has exited.
    pub formatted: Formatted,
    /// Seconds since 1970.
    #[serde(default)]
    pub created_at: u64,
}

impl Record for ImageRecord {
    const VERSION: u32 = 1;
    const WHAT: &'static str = "record of a pool's image";
}
