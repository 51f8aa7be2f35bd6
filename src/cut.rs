//! The consistent cut: one coordinator, participants, and the guard who alone freezes.
//!
//! One try is `quiesce -> sync and clone ahead -> freeze -> cut -> thaw -> release -> verdict`.
//! Who prepares and commits the members' records, and tries again, is `operation`.

pub mod guard;

use std::path::PathBuf;
use std::sync::Arc;

use crate::error::Result;
pub use crate::hook::HookTarget;
use crate::hook::{Hooks, NoHooks};
use crate::host::memory::MemoryHost;
use crate::host::{Device, FileId, Freezer, Host};
use crate::model::{FsType, Level, SnapshotParameters};

/// How a member is used while it's cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Use {
    /// By nobody: no device is on it.
    Quiet,
    /// As a raw device: whatever is written to it is in one order only for itself.
    Raw,
    /// As a mounted file system.
    Mounted {
        /// Its device.
        device: Device,
        /// Which.
        fs: FsType,
        /// One of its mount points, as the mount table has it.
        mount_point: PathBuf,
    },
}

/// One image to be cut. Its target exists, empty; what a failed try leaves in it is the caller's
/// to delete.
#[derive(Clone, Debug)]
pub struct Member {
    /// The volume.
    pub target: HookTarget,
    /// Its image.
    pub source: PathBuf,
    /// Device and inode of that image.
    pub image: FileId,
    /// The file that becomes the copy.
    pub copy: PathBuf,
    /// How it's used now.
    pub in_use: Use,
    /// Clones on this pool gain nothing from running side by side (btrfs).
    pub in_series: bool,
}

/// What a try reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The level.
    pub level: Level,
    /// Why not a higher one.
    pub reason: String,
    /// When: nanoseconds since 1970, while all stood still.
    pub cut_at: u64,
}

/// The three seams that a cut works through.
#[derive(Clone)]
pub struct Seams {
    /// Kernel and disk.
    pub host: Arc<dyn Host>,
    /// Who freezes.
    pub freezer: Arc<dyn Freezer>,
    /// Who quiesces.
    pub hooks: Arc<dyn Hooks>,
}

impl Seams {
    /// On a simulated machine, which is its own guard; without hooks.
    pub fn simulated(host: MemoryHost) -> Seams {
        let host = Arc::new(host);
        Seams {
            host: host.clone(),
            freezer: host,
            hooks: Arc::new(NoHooks),
        }
    }
}

/// One try at `level`. On an error nothing is frozen or quiesced any more (or will be thawed and
/// released without us), and the copies are worthless.
pub fn attempt(
    _seams: &Seams,
    _members: &[Member],
    _level: Level,
    _parameters: &SnapshotParameters,
) -> Result<Outcome> {
    Err(crate::error::Error::Unsupported {
        what: "a cut".into(),
    })
}
