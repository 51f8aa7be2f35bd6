//! The interface to the freeze guard. This process never freezes a file system itself: the guard
//! does, and thaws even if this process dies. The same is true of mapped devices, which the guard
//! suspends and resumes.
//!
//! The real implementation is `cut::guard`; a simulated machine has its own.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use super::{Device, DeviceHold, FileId, Result};
use crate::model::FsType;

/// The open root directory of a mounted file system, verified to be on its device. While it is
/// open, the file system cannot be unmounted.
pub struct MountRoot {
    /// The device of the file system.
    pub device: Device,
    /// The type of the file system.
    pub fs: FsType,
    /// The handle that keeps it open: an [`std::os::fd::OwnedFd`] on the real host.
    pub keep: Box<dyn std::any::Any + Send + Sync>,
}

impl fmt::Debug for MountRoot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "root of {}", self.device.path.display())
    }
}

/// One volume of a cut: a file system to be frozen, a mapped device to be suspended, or a file system
/// and the mapped device below it.
#[derive(Debug)]
pub struct FreezeMember {
    /// ID of its volume, for the journal, logs and messages.
    pub volume_id: String,
    /// Namespace of its PVC, if known; a namespace is limited in how many freezes it may hold.
    pub namespace: Option<String>,
    /// The image below the device. After all processes have crashed, the device is identified by
    /// it.
    pub image: FileId,
    /// The open root of its file system, if it is mounted.
    pub root: Option<MountRoot>,
    /// Its mapped device, if that is to be suspended. A file system on it is frozen before.
    pub mapped: Option<DeviceHold>,
}

impl FreezeMember {
    /// The device, for the journal and for messages; `None` for a member without anything to freeze
    /// or to suspend.
    pub fn device(&self) -> Option<&Device> {
        let mapped = self.mapped.as_ref().map(|hold| &hold.device);
        mapped.or_else(|| self.root.as_ref().map(|root| &root.device))
    }
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
pub struct JournaledFreeze {
    pub volume_id: String,
    pub device: PathBuf,
    /// The process that requested it.
    pub owner: u32,
    /// Seconds since 1970.
    pub since: u64,
    /// When the guard thaws at the latest, in seconds since 1970.
    pub until: u64,
    /// Whether its file system may be frozen, or its device suspended. Before that it is only prepared.
    pub freezing: bool,
    /// Whether its owner is alive and holds it.
    pub held: bool,
    /// The UUID of its mapped device, if that may be suspended.
    pub mapped: Option<String>,
}

/// Freezes file systems, and suspends mapped devices.
pub trait Freezer: Send + Sync + 'static {
    /// Checks that a guard accepts requests, or can be started; with `mapped`, also requests with
    /// mapped devices: EPROTONOSUPPORT if the guard is of a release that cannot suspend them. It is called
    /// before an application is quiesced for a freeze; the result does not guarantee anything for
    /// later. Takes at most a second.
    fn ready(&self, mapped: bool) -> Result<()> {
        let _ = mapped;
        Ok(())
    }

    /// Passes members to the guard, after they were written into the journal. The guard is started
    /// if it is not running. Nothing is frozen or suspended yet.
    ///
    /// Of a mapped device, EPROTONOSUPPORT if the guard is of a release that cannot suspend it, EOPNOTSUPP if
    /// the guard finds no device mapper, EPERM if the device is not one of this driver, and EBUSY if
    /// another program has suspended it, or has loaded a table that a resume would switch to.
    fn begin(&self, members: Vec<FreezeMember>, limits: FreezeLimits) -> Result<Box<dyn Freeze>>;

    /// Thaws every freeze in the journal that has no live owner or is past its deadline, and no
    /// other. Returns the IDs of the volumes that were thawed. It runs at start, before any
    /// operation on an image, and periodically.
    fn sweep(&self) -> Result<Vec<String>>;

    /// The freezes that are in the journal now.
    fn list_journaled(&self) -> Result<Vec<JournaledFreeze>>;

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

    /// FIFREEZE of all members with a file system, in parallel, and then the suspend of all members
    /// with a mapped device, in parallel; all are frozen and suspended when it returns. After an
    /// error (one was refused, the deadline passed, the guard died) all are resumed and thawed again,
    /// or are thawed once their FIFREEZE returns.
    fn freeze(&self) -> Result<()>;

    /// Resumes the device of one member, and then thaws its file system. Returns true if both were
    /// still held by this session: only then are the copies consistent that were made since
    /// [`Freeze::freeze`] returned. Returns false if it was resumed or thawed early: at the deadline,
    /// at the guard's exit, or by a foreign process. Several threads may thaw several members.
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
