//! The operations: each call of CSI as a function of values, idempotent, locked and recorded.
//!
//! An operation validates, locks, reads, compares, acts and records. Its functions block;
//! [`Driver::detach`] is the one place in which async code calls them. An operation that was
//! started runs to its end, whether or not its caller still waits.

mod detach;
mod lock;
mod node;
pub mod pools;
pub mod request;
mod snapshot;
mod usage;
mod volume;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use uuid::Uuid;

use crate::cut::Seams;
use crate::cut::retry::Backoffs;
use crate::error::{Error, Result};
use crate::host::Host;
use crate::model::{HomeId, PoolDefinition};
use crate::record::NodeRecord;

pub use detach::{InFlight, WorkClass};
pub use lock::{Key, Locks};
pub use node::describe::{Description, Forgotten, Named};
pub use node::pool_status::PoolStatus;
pub use pools::ground::PoolGround;
pub use pools::pool::{Pool, ServingState};
pub use request::*;
pub use snapshot::attempt::Kept;
pub use snapshot::cut_counts::CutCounts;
pub use snapshot::group::{of_another_moment, same_members, same_request};
pub use snapshot::members::member_of;
pub use snapshot::resolve::{GroupDecision, GroupHere, GroupMember};
pub use snapshot::session::{BeginShare, Coordinator, ShareAnswer, ShareStep};
pub use usage::not_grown::NotGrown;
pub use usage::published::ChangedDevice;

pub use crate::cut::AbortHandle;
pub use crate::cut::coordinator::Used;
pub use crate::cut::participant::CutStep;
pub use crate::record::{GroupMembership, SnapshotState};

/// The part of the configuration that the operations use.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// `--node-name`, also the CSI node id.
    pub node_name: String,
    /// `--driver-name`.
    pub driver_name: String,
    /// `--pool`, in the order of the command line.
    pub pools: Vec<PoolDefinition>,
    /// `--node-record`.
    pub node_record: PathBuf,
    /// `--state-dir`: for records that are valid until the next boot.
    pub state_dir: PathBuf,
    /// Role `all`: if another process serves a pool, the command line is wrong, and the start
    /// fails. In a cluster such a pool is refused like every pool that cannot be served.
    pub alone: bool,
    /// `--allowed-path`: directories below which the paths in CSI requests must be, such as the
    /// kubelet's.
    pub allowed_paths: Vec<PathBuf>,
    /// `--max-volumes`: the maximum number of volumes in use on this node.
    pub max_volumes: Option<NonZeroU16>,
    /// `--inline-max-size`: the maximum size in bytes of a pod's inline volume. Without it, no
    /// inline volumes are created.
    pub inline_max_size: Option<u64>,
}

/// The driver of one node.
pub struct Driver {
    settings: Settings,
    host: Arc<dyn Host>,
    /// The freeze guard, the hooks and the host, as a cut uses them.
    seams: Seams,
    /// `None` while pools of several homes wait for `slackwater pool adopt`.
    home: RwLock<Option<HomeId>>,
    /// Used instead of the home while that is `None`. No pool has this ID.
    nobodys_home: HomeId,
    pools: RwLock<Vec<ServingState>>,
    record: Mutex<NodeRecord>,
    locks: Locks,
    in_flight: InFlight,
    formats: AtomicU64,
    copies: snapshot::copy::Copies,
    copied: AtomicU64,
    published: usage::published::Published,
    backoffs: Backoffs,
    cuts: CutCounts,
    /// Volumes in use whose file system is smaller than it should be.
    small: Mutex<BTreeMap<Uuid, NotGrown>>,
    /// Queries to pools whose disks may hang.
    questions: node::disk::PoolQuestions,
}

impl Driver {
    /// The configuration with which the driver was started.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The home of this machine, or an ID that no pool has while the home is not known.
    pub fn home(&self) -> HomeId {
        self.settled_home().unwrap_or(self.nobodys_home)
    }

    /// The home of this machine. It is an error while it is not known: the label of a Node cannot
    /// be changed later.
    pub fn settled_home(&self) -> Result<HomeId> {
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

    /// The number of file systems created since the start.
    pub fn formats(&self) -> u64 {
        self.formats.load(Ordering::Relaxed)
    }

    /// The number of locks that are held.
    pub fn locks_held(&self) -> usize {
        self.locks.held()
    }
}
