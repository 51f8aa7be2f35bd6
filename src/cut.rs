//! The consistent cut: one coordinator, participants, and the guard who alone freezes.
//!
//! One try is `sync and clone ahead -> quiesce -> sync and put right -> freeze -> cut -> thaw ->
//! release -> verdict`.
//! Who prepares and commits the members' records is `operation`; across nodes the router
//! coordinates, with a stream to each agent as its participant.

mod abort;
pub mod backoff;
mod clone_worker;
pub mod coordinator;
pub mod local;
pub mod participant;
pub mod retry;
mod semaphore;
mod step_workers;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::backend::Copier;
use crate::error::Result;
pub use crate::hook::HookTarget;
use crate::hook::{Hooks, NoHooks};
use crate::host::memory::MemoryHost;
use crate::host::{Device, Freezer, Host};
use crate::model::{FsType, Level, SnapshotParameters};

pub use slackwater_guard as guard;

pub use abort::AbortHandle;
pub use local::Room;
pub use retry::Attempt;

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

/// One volume to be cut. Its copy exists and is empty; what a failed attempt leaves in it is the
/// caller's to delete.
#[derive(Clone)]
pub struct CutMember {
    /// The volume.
    pub target: HookTarget,
    /// Makes the copy. For one attempt only, since it remembers what it has copied.
    pub copier: Arc<dyn Copier>,
    /// How the volume is used now.
    pub in_use: Use,
    /// Set when its copy was emptied, because the pool needed the space: the cut is lost.
    pub emptied: Arc<AtomicBool>,
}

/// What a try reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The level.
    pub level: Level,
    /// Why not a higher one; empty for the highest.
    pub reason: String,
    /// When: nanoseconds since 1970, while all stood still.
    pub cut_at: u64,
    /// What it took.
    pub stats: CutStats,
}

/// What a cut took, for logs and metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CutStats {
    /// Until all hooks were ready, if any ran.
    pub quiesce: Option<Duration>,
    /// From then until all were thawed: how long applications were held by this cut.
    pub held: Option<Duration>,
    /// Writing back before the freeze, both times; the longest of all participants.
    pub sync: Duration,
    /// From the first freeze to the last thaw, if anything was frozen.
    pub freeze: Option<Duration>,
    /// Until all hooks had ended, if any ran.
    pub release: Option<Duration>,
    /// Extents cloned before the freeze, those of unused volumes included.
    pub extents_ahead: u64,
    /// Extents cloned while writers stood still.
    pub extents_within: u64,
    /// An application that was released, but not as it should be: the cut is good.
    pub release_problem: Option<String>,
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

/// One try over members of this node, whose volumes are locked.
///
/// On an error nothing is frozen or quiesced any more (or will be thawed and released without
/// us), and the copies are worthless. [`Error::QuiesceFailed`] is what
/// [`SnapshotParameters::on_quiesce_failure`] is about; [`Error::CutLost`] says that everything
/// was done and isn't proven. Where `level` is `application` and no hook is configured, a class
/// that allows a lower level gets it in the same try.
///
/// A crash of this process ends in thawed file systems (the guard) and released applications (the
/// end of their stdin); the copies stay, prepared.
///
/// [`Error::QuiesceFailed`]: crate::error::Error::QuiesceFailed
/// [`Error::CutLost`]: crate::error::Error::CutLost
pub fn attempt(
    seams: &Seams,
    members: &[CutMember],
    now: &Attempt<'_>,
    parameters: &SnapshotParameters,
    room: Arc<Room>,
) -> Result<Outcome> {
    let used = members.iter().filter(|member| member.in_use != Use::Quiet);
    let targets: Vec<HookTarget> = used.map(|member| member.target.clone()).collect();
    let local = local::Local::new(seams, members, parameters).with_room(room);
    let spec = coordinator::CutSpec {
        level: now.level,
        parameters,
        targets: &targets,
    };
    let context = coordinator::CutContext {
        hooks: seams.hooks.as_ref(),
        now_nanos: &|| seams.host.now_nanos(),
        disturbed: now.disturbed,
    };
    coordinator::run(&context, vec![Box::new(local)], &spec)
}
