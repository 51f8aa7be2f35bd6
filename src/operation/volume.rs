//! The calls for volumes: create, grow and delete them; stage and publish them on this node.

pub(in crate::operation) mod adopt_raw_fs;
pub(in crate::operation) mod block;
pub(in crate::operation) mod capability;
pub(in crate::operation) mod check;
pub(in crate::operation) mod create;
pub(in crate::operation) mod delete;
pub(in crate::operation) mod describe;
pub(in crate::operation) mod expand;
pub(in crate::operation) mod fit;
pub(in crate::operation) mod format;
pub(in crate::operation) mod health;
pub(in crate::operation) mod import;
pub(in crate::operation) mod import_file;
pub(in crate::operation) mod inline;
pub(in crate::operation) mod list;
pub(in crate::operation) mod modify;
pub(in crate::operation) mod moving;
pub(in crate::operation) mod publish;
pub(in crate::operation) mod reverting;
pub(in crate::operation) mod stage;
pub(in crate::operation) mod stats;
pub(in crate::operation) mod trim;
pub(in crate::operation) mod unstage;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::host::Host;
use crate::operation::{Pools, Snapshots, Usage};

/// Creates and deletes volumes, and makes them available on this node. It is part of the
/// [`Driver`](crate::operation::Driver), and uses the pools, the usage and the snapshots.
pub struct Volumes {
    host: Arc<dyn Host>,
    pools: Arc<Pools>,
    usage: Arc<Usage>,
    snapshots: Arc<Snapshots>,
    formats: AtomicU64,
}

impl Volumes {
    /// No file system has been created yet.
    pub(in crate::operation) fn new(
        pools: Arc<Pools>,
        usage: Arc<Usage>,
        snapshots: Arc<Snapshots>,
    ) -> Volumes {
        Volumes {
            host: pools.host.clone(),
            pools,
            usage,
            snapshots,
            formats: AtomicU64::default(),
        }
    }

    /// The number of file systems created since the start.
    pub fn formats(&self) -> u64 {
        self.formats.load(Ordering::Relaxed)
    }
}
