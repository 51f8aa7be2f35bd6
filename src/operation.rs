//! The verbs: every CSI call as an operation on values, idempotent, locked, recorded.
//!
//! One operation = validate -> lock -> look -> compare -> act -> record. The functions here
//! block; [`Driver::detach`] is the one place where async code crosses over, and what it starts
//! ends by itself, whether or not its caller still waits.

mod block;
mod capacity;
mod copying;
mod create;
pub mod cut_counts;
mod cutting;
mod delete;
mod describe;
mod detach;
mod ephemeral;
mod expand;
mod format;
mod give_way;
mod group;
mod health;
pub mod inventory;
mod list;
mod lock;
mod metadata;
mod modify;
mod paths;
mod pool;
pub mod pool_admin;
pub mod pool_image;
pub mod pool_make;
mod publish;
pub mod request;
mod restore;
mod session;
mod settle;
mod share;
mod snapshot;
mod snapshot_list;
mod stage;
mod start;
mod stats;
mod unstage;
mod usage;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use crate::cut::Seams;
use crate::cut::pause::Pauses;
use crate::error::{Error, Result};
use crate::host::Host;
use crate::model::{HomeId, PoolDefinition};
use crate::record::NodeRecord;

pub use cut_counts::CutCounts;
pub use describe::{Description, Forgotten, Named};
pub use detach::InFlight;
pub use group::{same_members, same_request};
pub use list::PAGE as MOST_LISTED;
pub use lock::{Key, Locks};
pub use pool::{Pool, PoolState, PoolStatus};
pub use request::*;
pub use session::{BeginShare, Coordinator, ShareAnswer, ShareStep};
pub use settle::{GroupHere, GroupMember, Verdict};
pub use share::Kept;

pub use crate::cut::Halt;
pub use crate::cut::barrier::Used;
pub use crate::record::{GroupMembership, SnapshotState};

/// What the operations need to know of the configuration.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `--node-name`, also the CSI node id.
    pub node_name: String,
    /// `--driver-name`.
    pub driver_name: String,
    /// `--pool`, in order.
    pub pools: Vec<PoolDefinition>,
    /// `--node-record`.
    pub node_record: PathBuf,
}

/// The driver of one node: its pools, its locks, what runs.
pub struct Driver {
    settings: Settings,
    host: Arc<dyn Host>,
    /// Whoever a cut needs.
    seams: Seams,
    /// `None` while pools of several homes wait for `adopt`.
    home: RwLock<Option<HomeId>>,
    /// Stands for the home meanwhile: no pool has it.
    nobodys_home: HomeId,
    pools: RwLock<Vec<PoolState>>,
    record: Mutex<NodeRecord>,
    locks: Locks,
    in_flight: InFlight,
    formats: AtomicU64,
    copies: copying::Copies,
    copied: AtomicU64,
    pauses: Mutex<Pauses>,
    cuts: CutCounts,
}

impl Driver {
    /// The configuration it was started with.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The home of this machine; one that no pool has while it isn't settled.
    pub fn home(&self) -> HomeId {
        self.settled_home().unwrap_or(self.nobodys_home)
    }

    /// The home of this machine as the cluster may be told: a Node's label is for good.
    pub fn settled_home(&self) -> Result<HomeId> {
        let home = *self.home.read().unwrap_or_else(PoisonError::into_inner);
        home.ok_or_else(|| Error::Unreachable {
            what: "this node".into(),
            reason: "its pools have several homes; run `slackwater pool adopt` for those that are to stay".into(),
        })
    }

    /// The one topology key.
    pub fn topology_key(&self) -> String {
        format!("topology.{}/home", self.settings.driver_name)
    }

    /// What is missing on this host for volumes, with the fix; empty if all is there.
    pub fn missing(&self) -> Vec<String> {
        self.host.missing()
    }

    /// File systems made since the start.
    pub fn formats(&self) -> u64 {
        self.formats.load(Ordering::Relaxed)
    }

    /// Locks held now; none once nothing runs.
    pub fn locks_held(&self) -> usize {
        self.locks.held()
    }
}
