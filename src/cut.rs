//! The consistent cut: one coordinator, its participants, and the freeze guard, which is the only
//! process that freezes.
//!
//! One attempt runs these steps: `sync and clone ahead -> quiesce -> sync and update the clones ->
//! freeze -> cut -> thaw -> release -> verify`. The module `operation` prepares and commits the
//! records of the members. In a cut across nodes the router is the coordinator, and each
//! participant is a stream to an agent.

mod abort;
mod clone_worker;
pub mod coordinator;
pub mod local;
pub mod participant;
pub mod retry;
mod semaphore;
mod step_workers;
#[cfg(test)]
mod tests;
mod unused;

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
pub use local::SpaceCheck;
pub use retry::Attempt;
pub(crate) use unused::copy_unused;

/// How a member is used while it is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Use {
    /// Not in use: no device is attached to it.
    Unused,
    /// As a raw device. Without a mapped device that is suspended, its writes are ordered only among
    /// themselves, not relative to writes to other volumes.
    Raw,
    /// As a mounted file system.
    Mounted {
        /// The device of the file system.
        device: Device,
        /// The type of the file system.
        fs: FsType,
        /// One of its mount points, as in the mount table.
        mount_point: PathBuf,
    },
}

/// One volume to be cut. Its copy exists and is empty. If an attempt fails, the caller deletes what
/// the attempt left in the copy.
#[derive(Clone)]
pub struct CutMember {
    /// The volume.
    pub target: HookTarget,
    /// Makes the copy. It is used for one attempt only, because it records what it has copied.
    pub copier: Arc<dyn Copier>,
    /// How the volume is used now.
    pub in_use: Use,
    /// Why it is in use as a raw device that the guard cannot suspend, and what helps; `None` if it can,
    /// or need not.
    pub unsuspendable_reason: Option<String>,
    /// Set when its copy was emptied because the pool needed the space: the cut is then lost.
    pub emptied: Arc<AtomicBool>,
}

/// What an attempt reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The level that was reached.
    pub level: Level,
    /// Why the level is not higher; empty for the highest level.
    pub reason: String,
    /// Time of the cut in nanoseconds since 1970, taken between the freeze and the cut.
    pub cut_at: u64,
    /// Durations and numbers of the attempt.
    pub stats: CutStats,
}

/// Durations and numbers of a cut, for logs and metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CutStats {
    /// Time until all hooks were ready, if any ran.
    pub quiesce: Option<Duration>,
    /// Time from then until all members were thawed: how long this cut held applications.
    pub held: Option<Duration>,
    /// Time of the write-backs before the freeze. Of participants that work in parallel, the
    /// slowest one counts.
    pub sync: Duration,
    /// Time from the first freeze to the last thaw, if anything was frozen.
    pub freeze: Option<Duration>,
    /// Time until all hooks had ended, if any ran.
    pub release: Option<Duration>,
    /// Extents cloned before the freeze, including those of volumes that are not in use.
    pub extents_ahead: u64,
    /// Extents cloned while writers were blocked.
    pub extents_within: u64,
    /// A problem with the release of an application, such as a hook that had to be killed. The cut
    /// is good nevertheless.
    pub release_problem: Option<String>,
}

/// The interfaces that a cut works through, which tests replace.
#[derive(Clone)]
pub struct CutInterfaces {
    /// The kernel and the disk.
    pub host: Arc<dyn Host>,
    /// The freeze guard.
    pub freezer: Arc<dyn Freezer>,
    /// The quiesce hooks.
    pub hooks: Arc<dyn Hooks>,
}

impl CutInterfaces {
    /// The interfaces of a simulated machine, which acts as its own guard and has no hooks.
    pub fn simulated(host: MemoryHost) -> CutInterfaces {
        let host = Arc::new(host);
        CutInterfaces {
            host: host.clone(),
            freezer: host,
            hooks: Arc::new(NoHooks),
        }
    }
}

/// One attempt of a cut of members on this node. The caller holds the locks of their volumes.
///
/// On an error nothing is frozen or quiesced any more (or it will be thawed and released without
/// this process), and the copies are worthless. [`Error::QuiesceFailed`] is the error to which
/// [`SnapshotParameters::on_quiesce_failure`] applies. [`Error::CutLost`] means that all steps were
/// done, but the cut is not proven to be consistent. If `level` is `application` and no hook is
/// configured, a class that allows a lower level gets that level in the same attempt.
///
/// If this process crashes, the guard thaws the file systems, and the applications are released
/// because the stdin of their hooks ends. The copies remain, prepared and not committed.
///
/// [`Error::QuiesceFailed`]: crate::error::Error::QuiesceFailed
/// [`Error::CutLost`]: crate::error::Error::CutLost
pub fn attempt(
    interfaces: &CutInterfaces,
    members: &[CutMember],
    now: &Attempt<'_>,
    parameters: &SnapshotParameters,
    room: Arc<SpaceCheck>,
) -> Result<Outcome> {
    let used = members.iter().filter(|member| member.in_use != Use::Unused);
    let targets: Vec<HookTarget> = used.map(|member| member.target.clone()).collect();
    let local = local::Local::new(interfaces, members, parameters).with_room(room);
    let spec = coordinator::CutSpec {
        level: now.level,
        parameters,
        targets: &targets,
    };
    let context = coordinator::CutContext {
        hooks: interfaces.hooks.as_ref(),
        now_nanos: &|| interfaces.host.now_nanos(),
        disturbed: now.disturbed,
    };
    coordinator::run(&context, vec![Box::new(local)], &spec)
}
