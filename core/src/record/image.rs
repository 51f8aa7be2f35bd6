//! `image.json`: the record of a pool's own xfs image, beside it in the pool's folder.

use serde::{Deserialize, Serialize};

use super::{Formatted, Record};

/// What is known of the image beneath a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRecord {
    /// Bytes that the image has, every block of them reserved. Raised once more are reserved, and
    /// before the file system is grown; never lowered.
    pub size: u64,
    /// Logical block size of its loop devices, decided when it's made and kept.
    pub block_size: u32,
    /// The file system on it, written before mkfs starts and again after it has ended.
    pub formatted: Formatted,
    /// Seconds since 1970.
    #[serde(default)]
    pub created_at: u64,
}

impl Record for ImageRecord {
    const VERSION: u32 = 1;
    const WHAT: &'static str = "record of a pool's image";
}
