//! The kernel, the disk and the programs of this node, behind one trait.
//!
//! Everything that *changes* something is a value, [`Effect`], and passes through one method,
//! [`Host::perform`]; everything else only looks. So what the driver does can be counted, made to
//! fail and cut off at any point, and a new effect is covered by the fault sweep without being
//! listed anywhere.
//!
//! Two implementations: [`linux::LinuxHost`], the only place with `unsafe`, with programs and
//! with mount(2); and [`memory::MemoryHost`], a simulation with the same rules.

pub mod difference;
pub mod effect;
#[cfg(feature = "fault")]
mod fault;
pub mod freezer;
pub mod known;
pub mod linux;
pub mod memory;
pub mod mountinfo;
pub mod session;

use std::path::{Path, PathBuf};
use std::time::Duration;

use uuid::Uuid;

pub use effect::{Done, Effect, LoopSpec, MountSpec, NodeKind};
pub use freezer::{Freeze, FreezeMember, Freezer, MountRoot};
pub use known::Known;
pub use mountinfo::Mount;
pub use session::{Session, SessionSpec, SessionState};

use crate::error::HostError;
use crate::model::FsType;

/// A step that changes something and is no [`Effect`], since it can't be a value (those of a
/// freeze session): counted, and made to fail, beside the effects.
#[cfg(feature = "fault")]
pub fn step<T>(name: &'static str, act: impl FnOnce() -> Result<T>) -> Result<T> {
    fault::step(name, act)
}

/// A step that changes something and is no [`Effect`], since it can't be a value (those of a
/// freeze session): counted, and made to fail, in a build for tests.
#[cfg(not(feature = "fault"))]
pub fn step<T>(_name: &'static str, act: impl FnOnce() -> Result<T>) -> Result<T> {
    act()
}

/// Result of the host.
pub type Result<T> = std::result::Result<T, HostError>;

/// A file, whatever its name: the kernel's device and inode numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId {
    /// st_dev.
    pub device: u64,
    /// st_ino.
    pub inode: u64,
}

/// What stat says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStat {
    /// Device and inode.
    pub id: FileId,
    /// File, directory, ...
    pub kind: FileKind,
    /// Length in bytes.
    pub size: u64,
    /// Bytes of blocks that it has on the pool.
    pub allocated: u64,
    /// st_rdev of a device node, 0 else.
    pub rdev: u64,
    /// When its content was changed last, in nanoseconds since 1970.
    pub modified: u64,
}

/// The kinds that matter here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Dir,
    /// A block device node.
    Block,
    /// A symbolic link (never followed).
    Link,
    /// Anything else.
    Other,
}

/// Room on a file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// Bytes in all.
    pub total: u64,
    /// Bytes that we may still fill.
    pub available: u64,
    /// Bytes free, those kept for root included.
    pub free: u64,
    /// Inodes in all; 0 where the file system has no such number.
    pub inodes: u64,
    /// Inodes free.
    pub inodes_free: u64,
}

/// What lies beneath a pool's folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ground {
    /// Name of the file system, as the kernel's mount table has it ("xfs", "tmpfs", "nfs4").
    pub fs_name: String,
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// Logical block size for direct I/O on it, in bytes.
    pub sector: u32,
    /// The least logical block size with which a file that shares no blocks can have direct I/O.
    pub least_sector: u32,
    /// Files can share blocks (FICLONE): tried, with files that have no name.
    pub shares_blocks: bool,
}

/// A run of a file's map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte in the file.
    pub logical: u64,
    /// Where it is on the disk (on btrfs: in its address space).
    pub physical: u64,
    /// Bytes.
    pub length: u64,
    /// Reserved, never written: reads zeros.
    pub unwritten: bool,
    /// Its address says nothing about single blocks (compressed, inline, not yet placed): two
    /// such runs are the same only if they are equal as a whole.
    pub opaque: bool,
}

/// An attached loop device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopStatus {
    /// N of /dev/loopN.
    pub number: u32,
    /// The file beneath: of LOOP_GET_STATUS64, never a path.
    pub backing: FileId,
    /// Offset into the file: 0 for ours.
    pub offset: u64,
    /// Bytes shown at most: 0 (all) for ours.
    pub size_limit: u64,
    /// Read-only.
    pub read_only: bool,
    /// Vanishes with its last opener.
    pub autoclear: bool,
    /// Bypasses the pool's page cache.
    pub direct_io: bool,
}

/// A block device node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its node.
    pub path: PathBuf,
    /// Its number, as st_rdev and the mount table have it.
    pub rdev: u64,
}

impl Device {
    /// /dev/loopN: loop devices have major 7.
    pub fn of_loop(number: u32) -> Device {
        Device {
            path: PathBuf::from(format!("/dev/loop{number}")),
            rdev: nix::sys::stat::makedev(7, u64::from(number)),
        }
    }
}

/// Keeps a loop device open, and with it attached: while this lives, the number can't come to
/// stand for another image.
pub struct LoopHold {
    /// N of /dev/loopN.
    pub number: u32,
    /// What keeps it open.
    pub keep: Box<dyn std::any::Any + Send>,
}

impl LoopHold {
    /// Its device.
    pub fn device(&self) -> Device {
        Device::of_loop(self.number)
    }
}

impl std::fmt::Debug for LoopHold {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "loop{}", self.number)
    }
}

/// Something that stays open or locked until this is dropped, or the process ends.
pub struct Kept(pub Box<dyn std::any::Any + Send + Sync>);

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("kept")
    }
}

/// What blkid finds on a device, read past every cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Signature {
    /// Nothing that blkid knows. Not a proof that nothing is there.
    None,
    /// A file system.
    Fs {
        /// blkid's name of it.
        name: String,
        /// Its uuid, as text.
        uuid: String,
        /// Its size in bytes, where the super block says it.
        size: Option<u64>,
    },
    /// Something else: a partition table, a RAID or LVM member, or several at once.
    Other(String),
}

/// Who looks and changes. Every method may block; none is called from async code directly.
pub trait Host: Send + Sync + 'static {
    /// The one way to change disk or kernel. An error means: not done, or not known to be done.
    fn perform(&self, effect: &Effect<'_>) -> Result<Done>;

    /// Opens a directory, and gives the path by which it can be reached whatever is mounted over
    /// it later (`/proc/self/fd/N`), for as long as it's kept open.
    fn pin_dir(&self, path: &Path) -> Result<(PathBuf, Kept)>;
    /// Takes the exclusive lock of a file, for as long as it's kept; `None` if it's taken.
    fn try_lock_file(&self, path: &Path) -> Result<Option<Kept>>;
    /// The whole of a small file; `None` if there is none.
    fn read_file(&self, path: &Path) -> Result<Option<Vec<u8>>>;
    /// Names in a directory, sorted; `None` if there is none.
    fn list_dir(&self, path: &Path) -> Result<Option<Vec<String>>>;
    /// lstat; `None` if nothing is there.
    fn stat(&self, path: &Path) -> Result<Option<FileStat>>;
    /// statfs.
    fn space(&self, path: &Path) -> Result<Space>;
    /// The file system beneath a folder.
    fn ground(&self, path: &Path) -> Result<Ground>;

    /// The map of a file from an offset on, written back first; at most `limit` runs, none at its
    /// end. Runs ascend and don't overlap; the first may begin before `from`.
    fn extents(&self, path: &Path, from: u64, limit: usize) -> Result<Vec<Extent>>;
    /// Whether a copy has, by its map, what [`Effect::CloneRest`] took for granted of it. If not,
    /// it may not be what the image was, and is to be thrown away.
    fn agrees(&self, copy: &Path, known: &Known) -> Result<bool>;
    /// Number of runs of a file's map, without reading it; not written back first.
    fn extent_count(&self, path: &Path) -> Result<u64>;

    /// Opens the root directory of a file system at a mount point of the mount table, and proves
    /// on the open descriptor that it's the one on `device`.
    fn open_mount_root(&self, mount_point: &Path, device: &Device, fs: FsType)
    -> Result<MountRoot>;

    /// The mount table of this mount namespace.
    fn mounts(&self) -> Result<Vec<Mount>>;
    /// All attached loop devices.
    fn loops(&self) -> Result<Vec<LoopStatus>>;
    /// Opens an attached loop and, with it open, proves that it stands on `backing`; `None` if not.
    fn hold_loop(&self, number: u32, backing: FileId) -> Result<Option<LoopHold>>;
    /// Whether a device is claimed by a file system or another exclusive opener.
    fn is_claimed(&self, device: &Device) -> Result<bool>;
    /// Bytes that a device shows.
    fn device_bytes(&self, device: &Device) -> Result<u64>;
    /// What is on a device.
    fn signature(&self, device: &Device) -> Result<Signature>;
    /// Whether a mounted file system is smaller than its device by more than its own rounding:
    /// then it is to be grown.
    fn wants_growth(&self, device: &Device, mount_point: &Path, fs: FsType) -> Result<bool>;

    /// A caller's path (staging or target): absolute, below an allowed folder, no link on its
    /// way. The parent must exist. Error text is for the caller.
    fn check_path(&self, path: &Path) -> std::result::Result<(), String>;
    /// A caller's path as the mount table spells it: the allowed folder itself may be a link.
    fn mount_table_path(&self, path: &Path) -> Result<PathBuf> {
        Ok(path.to_path_buf())
    }
    /// stat of a caller's path, without following links; `None` if nothing is there.
    fn stat_caller(&self, path: &Path) -> Result<Option<FileStat>>;
    /// statfs of a caller's path.
    fn space_caller(&self, path: &Path) -> Result<Space>;

    /// The kernel's id of this boot.
    fn boot_id(&self) -> Result<Uuid>;
    /// A random uuid.
    fn random_uuid(&self) -> Uuid;
    /// Seconds since 1970.
    fn now(&self) -> u64;
    /// Nanoseconds since 1970.
    fn now_nanos(&self) -> u64 {
        self.now().saturating_mul(1_000_000_000)
    }
    /// Lets time pass. On a simulated machine nobody really waits.
    fn pause(&self, time: Duration) {
        std::thread::sleep(time);
    }
    /// Name of what is missing, without which no volume works on this host, with the fix; empty
    /// if all is there.
    fn missing(&self) -> Vec<String>;
}
