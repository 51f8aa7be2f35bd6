//! Snapshots, groups of snapshots, and volumes that are created from snapshots or other volumes.

pub(in crate::operation) mod archive;
pub(in crate::operation) mod attempt;
pub(in crate::operation) mod base;
pub(in crate::operation) mod begun;
pub(in crate::operation) mod copies;
pub(in crate::operation) mod copy;
pub(in crate::operation) mod create;
pub(in crate::operation) mod cut;
pub(in crate::operation) mod cut_counts;
pub(in crate::operation) mod export;
pub(in crate::operation) mod fill;
pub(in crate::operation) mod for_clone;
pub(in crate::operation) mod foreign;
pub(in crate::operation) mod grants;
pub(in crate::operation) mod group;
pub(in crate::operation) mod list;
pub(in crate::operation) mod members;
pub(in crate::operation) mod metadata;
pub(in crate::operation) mod outgoing;
pub(in crate::operation) mod plan;
pub(in crate::operation) mod remote;
pub(in crate::operation) mod resolve;
pub(in crate::operation) mod restore;
pub(in crate::operation) mod running;
pub(in crate::operation) mod session;
pub(in crate::operation) mod source;
pub(in crate::operation) mod thick_space_watchdog;
pub(in crate::operation) mod write;

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use uuid::Uuid;

use self::copies::Copies;
use self::cut_counts::CutCounts;
use self::grants::Grants;
use crate::cut::CutInterfaces;
use crate::cut::retry::Backoffs;
use crate::host::Host;
use crate::operation::{Pools, Usage};

/// Creates snapshots, groups and clones: the cuts, and the copies where no blocks can be shared. It
/// is part of the [`Driver`](crate::operation::Driver), and uses the pools and the usage.
pub struct Snapshots {
    host: Arc<dyn Host>,
    pools: Arc<Pools>,
    usage: Arc<Usage>,
    /// The freeze guard, the hooks and the host, as a cut uses them.
    interfaces: CutInterfaces,
    backoffs: Backoffs,
    cuts: CutCounts,
    pub(in crate::operation) copies: Copies,
    /// Bytes copied since the start.
    copied: AtomicU64,
    /// Snapshots that other nodes read.
    pub(in crate::operation) grants: Grants,
    /// The base of a volume whose deletion has failed: it may be hidden, with blocks that are not free
    /// yet. A start frees them, too.
    unfreed_bases: Mutex<HashMap<Uuid, Uuid>>,
    /// Bytes sent to other nodes since the start.
    lent_bytes: AtomicU64,
    /// Bytes of snapshots that other nodes have sent.
    received_bytes: AtomicU64,
}

impl Snapshots {
    /// No cut and no copy has been made yet.
    pub(in crate::operation) fn new(
        pools: Arc<Pools>,
        usage: Arc<Usage>,
        interfaces: CutInterfaces,
    ) -> Snapshots {
        Snapshots {
            host: pools.host.clone(),
            copies: Copies::new(pools.settings.copy_rate),
            pools,
            usage,
            interfaces,
            backoffs: Backoffs::default(),
            cuts: CutCounts::default(),
            copied: AtomicU64::default(),
            grants: Grants::default(),
            unfreed_bases: Mutex::default(),
            lent_bytes: AtomicU64::default(),
            received_bytes: AtomicU64::default(),
        }
    }
}
