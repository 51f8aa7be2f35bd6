//! The seam to who freezes: never this process itself, but the guard, which thaws whatever
//! becomes of us.
//!
//! The real one is `cut::guard`; a simulated machine has one of its own.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use super::{Device, FileId, Result};
use crate::model::FsType;

/// The root directory of a mounted file system, open, and proven to be on its device. While it's
/// open, the file system can't be unmounted.
pub struct MountRoot {
    /// The device beneath.
    pub device: Device,
    /// What keeps it open: an [`std::os::fd::OwnedFd`] on the real host.
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
    /// Id of its volume, for journal, logs and people.
    pub volume_id: String,
    /// Namespace of its claim, if it's known: none may have everything.
    pub namespace: Option<String>,
    /// The image beneath the device: after a crash of all processes the device is known by it.
    pub image: FileId,
    /// Which file system.
    pub fs: FsType,
    /// Its open root.
    pub root: MountRoot,
}

/// How long things may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreezeLimits {
    /// For each call of [`Freeze::sync`].
    pub sync: Duration,
    /// From the first FIFREEZE until the guard thaws whatever happens.
    pub freeze: Duration,
}

/// How a FIFREEZE waits for the three RCU grace periods that it needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GracePeriods {
    /// A millisecond: the kernel is told to hurry, by `/sys/kernel/rcu_expedited`, for the time of
    /// the cut.
    #[default]
    Expedited,
    /// 25 ms for one file system that was idle, twice that for several.
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

/// Neither of the two words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a valid value for grace periods; give expedited or normal")]
pub struct UnknownGracePeriods(String);

/// A freeze that is journalled, and what became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Journalled {
    /// Id of the volume.
    pub volume_id: String,
    /// The device.
    pub device: PathBuf,
    /// Process that asked for it.
    pub owner: u32,
    /// Seconds since 1970.
    pub since: u64,
    /// Seconds since 1970: when the guard thaws at the latest.
    pub until: u64,
    /// Its owner still lives and holds it.
    pub held: bool,
}

/// Who freezes.
pub trait Freezer: Send + Sync + 'static {
    /// Whether a guard would take something now, or can be started. Asked before an application
    /// is quiesced for a freeze, and it says nothing about the next moment. Takes a second at most.
    fn ready(&self) -> Result<()> {
        Ok(())
    }

    /// Hands file systems to the guard, which is started if it isn't there, after they were
    /// written into the journal. Nothing is frozen yet.
    fn begin(&self, members: Vec<FreezeMember>, limits: FreezeLimits) -> Result<Box<dyn Freeze>>;

    /// Thaws what is journalled and held by nobody, or past its deadline, and nothing else.
    /// The ids of the volumes that were thawed. Runs at start, before anything touches an image,
    /// and again from time to time.
    fn sweep(&self) -> Result<Vec<String>>;

    /// What is journalled now.
    fn journalled(&self) -> Result<Vec<Journalled>>;

    /// Ends the guard, if it was started from here, and waits until its process has ended.
    fn stop_guard(&self) {}
}

/// File systems in the guard's hands. Dropping it thaws them all.
///
/// The order is `sync` (any number of times), `freeze`, one `thaw` for each member, `written`,
/// `drop`.
pub trait Freeze: Send + Sync {
    /// syncfs of all, in parallel. An error of one, or the end of the budget, is an error: what
    /// couldn't be written isn't in the cut.
    fn sync(&self) -> Result<()>;

    /// FIFREEZE of all, in parallel; all are frozen when it returns. On an error (one refused, the
    /// deadline, the guard died) all are thawed again, or will be once their FIFREEZE returns.
    fn freeze(&self) -> Result<()>;

    /// FITHAW of one member. True if it was still frozen by us: only then is what was cut since
    /// [`Freeze::freeze`] returned consistent. False if somebody thawed it early: the deadline,
    /// the guard's end, a stranger. May be called from several threads for several members.
    fn thaw(&self, member: usize) -> Result<bool>;

    /// Whether everything since the last [`Freeze::sync`] could be written back: FIFREEZE writes
    /// back as well, and doesn't tell what it couldn't (a full pool). Asked after the last
    /// [`Freeze::thaw`]; an error means that the cut may lack what was written before it. What
    /// failed only afterwards is an error as well: the kernel doesn't tell them apart. Within the
    /// budget of `sync`.
    fn written(&self) -> Result<()>;

    /// Thaws all at once, whatever another thread does with it just now: that ends with an error,
    /// or with a [`Freeze::thaw`] that says false. It can only be dropped then. Doesn't wait: a
    /// FIFREEZE that hangs is thawed when it returns.
    fn give_up(&self);
}
