//! The interface to the freeze guard. This process never freezes a file system itself: the guard
//! does, and thaws even if this process dies.
//!
//! The real implementation is `cut::guard`; a simulated machine has its own.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use super::{Device, FileId, Result};
use crate::model::FsType;

/// The open root directory of a mounted file system, verified to be on its device. While it is
/// open, the file system cannot be unmounted.
pub struct MountRoot {
    /// The device of the file system.
    pub device: Device,
    /// The handle that keeps it open: an [`std::os::fd::OwnedFd`] on the real host.
    pub keep: Box<dyn std::any::Any + Send + Sync>,
}

impl fmt::Debug for MountRoot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "root of {}", self.device.path.display())
    }
}

/// One file system to be frozen.
#[derive(Debug)]
pub struct FreezeMember {
    /// ID of its volume, for the journal, logs and messages.
    pub volume_id: String,
    /// Namespace of its PVC, if known; a namespace is limited in how many freezes it may hold.
    pub namespace: Option<String>,
    /// The image below the device. After all processes have crashed, the device is identified by
    /// it.
    pub image: FileId,
    /// The type of the file system.
    pub fs: FsType,
    /// Its open root.
    pub root: MountRoot,
}

/// Time limits of a freeze.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreezeLimits {
    /// Limit of each call of [`Freeze::sync`].
    pub sync: Duration,
    /// Time from the first FIFREEZE until the guard thaws in any case.
    pub freeze: Duration,
}

/// How FIFREEZE waits for the three RCU grace periods that it needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GracePeriods {
    /// About a millisecond: the kernel expedites grace periods (`/sys/kernel/rcu_expedited`) for
    /// the duration of the cut.
    #[default]
    Expedited,
    /// 25 ms for one idle file system, twice that for several.
    Normal,
}

impl FromStr for GracePeriods {
    type Err = UnknownGracePeriods;

    fn from_str(text: &str) -> std::result::Result<GracePeriods, UnknownGracePeriods> {
        match text {
            "expedited" => Ok(GracePeriods::Expedited),
            "normal" => Ok(GracePeriods::Normal),
            _ => Err(UnknownGracePeriods(text.to_string())),
        }
    }
}

/// A value that is neither of the two names.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a valid value for grace periods; give expedited or normal")]
pub struct UnknownGracePeriods(String);

/// A freeze in the journal, and its state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Journalled {
    pub volume_id: String,
    pub device: PathBuf,
    /// The process that requested it.
    pub owner: u32,
    /// Seconds since 1970.
    pub since: u64,
    /// When the guard thaws at the latest, in seconds since 1970.
    pub until: u64,
    /// Whether its owner is alive and holds it.
    pub held: bool,
}

/// Freezes file systems.
pub trait Freezer: Send + Sync + 'static {
    /// Checks that a guard accepts requests, or can be started. It is called before an application
    /// is quiesced for a freeze; the result does not guarantee anything for later. Takes at most a
    /// second.
    fn ready(&self) -> Result<()> {
        Ok(())
    }

    /// Passes file systems to the guard, after they were written into the journal. The guard is
    /// started if it is not running. Nothing is frozen yet.
    fn begin(&self, members: Vec<FreezeMember>, limits: FreezeLimits) -> Result<Box<dyn Freeze>>;

    /// Thaws every freeze in the journal that has no live owner or is past its deadline, and no
    /// other. Returns the IDs of the volumes that were thawed. It runs at start, before any
    /// operation on an image, and periodically.
    fn sweep(&self) -> Result<Vec<String>>;

    /// The freezes that are in the journal now.
    fn journalled(&self) -> Result<Vec<Journalled>>;

    /// Stops the guard if this process started it, and waits until its process has exited.
    fn stop_guard(&self) {}
}

/// File systems that the guard holds for a cut. Dropping this thaws all of them.
///
/// The order of calls is `sync` (any number of times), `freeze`, one `thaw` per member, `written`,
/// `drop`.
pub trait Freeze: Send + Sync {
    /// syncfs of all members, in parallel. It fails if one fails or the time limit expires: data
    /// that could not be written is missing from the cut.
    fn sync(&self) -> Result<()>;

    /// FIFREEZE of all members, in parallel; all are frozen when it returns. After an error (one
    /// was refused, the deadline passed, the guard died) all are thawed again, or are thawed once
    /// their FIFREEZE returns.
    fn freeze(&self) -> Result<()>;

    /// FITHAW of one member. Returns true if it was still frozen by this session: only then are the
    /// copies consistent that were made since [`Freeze::freeze`] returned. Returns false if it was
    /// thawed early: at the deadline, at the guard's exit, or by a foreign process. Several threads
    /// may thaw several members.
    fn thaw(&self, member: usize) -> Result<bool>;

    /// Checks that everything since the last [`Freeze::sync`] could be written back. FIFREEZE also
    /// writes back, but does not report what it could not write (when the pool is full). This is
    /// called after the last [`Freeze::thaw`]; an error means that the cut may lack data written
    /// before it. A write-back that failed only afterwards is reported as well, because the kernel
    /// does not distinguish the two. The time limit is that of `sync`.
    fn written(&self) -> Result<()>;

    /// Thaws all members at once, even if another thread is using the session: that thread gets an
    /// error, or a [`Freeze::thaw`] that returns false. Afterwards the session can only be dropped.
    /// This does not wait: a FIFREEZE that hangs is thawed when it returns.
    fn give_up(&self);
}
