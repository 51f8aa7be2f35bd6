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
pub mod question;
pub mod session;

use std::path::{Path, PathBuf};
use std::time::Duration;

use uuid::Uuid;

pub use effect::{Check, Checked, Done, Effect, LoopSpec, MountSpec, NodeKind};
pub use freezer::{Freeze, FreezeMember, Freezer, MountRoot};
pub use known::{Budget, Known};
pub use mountinfo::{FolderMount, Mount};
pub use session::{Account, Session, SessionSpec, SessionState};

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
pub struct BackingFs {
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
    /// Files that are made in the folder are written in place. On btrfs only where it was marked so
    /// ([`Effect::WriteInPlace`]): else they have checksums, which direct I/O can leave wrong.
    pub in_place: bool,
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
    /// The kernel looks for partitions on it: never on ours.
    pub partscan: bool,
}

/// An attached loop device, whether or not it can be asked what it stands on.
#[derive(Debug)]
pub struct LoopDevice {
    /// N of /dev/loopN.
    pub number: u32,
    /// What it stands on. An error is the device's own: its image lies on a file system that is
    /// dead or hangs.
    pub status: Result<LoopStatus>,
}

/// The major number of loop devices.
pub const LOOP_MAJOR: u64 = 7;

/// A block device node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its node.
    pub path: PathBuf,
    /// Its number, as st_rdev and the mount table have it.
    pub rdev: u64,
}

impl Device {
    /// /dev/loopN.
    pub fn of_loop(number: u32) -> Device {
        Device {
            path: PathBuf::from(format!("/dev/loop{number}")),
            rdev: nix::sys::stat::makedev(LOOP_MAJOR, u64::from(number)),
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
        /// What else is there, such as a partition table.
        beside: Option<String>,
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
    /// The same, waiting for as long as `patience` while it's taken. A process that was killed may
    /// leave its locks taken for a moment: a program that it was just starting has them, too,
    /// between fork and exec.
    fn lock_file(&self, path: &Path, patience: Duration) -> Result<Option<Kept>> {
        const STEP: Duration = Duration::from_millis(50);
        let mut waited = Duration::ZERO;
        loop {
            let lock = self.try_lock_file(path)?;
            if lock.is_some() || waited >= patience {
                return Ok(lock);
            }
            if waited.is_zero() {
                tracing::info!(path = %path.display(), "waiting for a lock");
            }
            self.pause(STEP);
            waited += STEP;
        }
    }
    /// The whole of a small file; `None` if there is none.
    fn read_file(&self, path: &Path) -> Result<Option<Vec<u8>>>;
    /// Names in a directory, sorted; `None` if there is none.
    fn list_dir(&self, path: &Path) -> Result<Option<Vec<String>>>;
    /// lstat; `None` if nothing is there.
    fn stat(&self, path: &Path) -> Result<Option<FileStat>>;
    /// statfs.
    fn space(&self, path: &Path) -> Result<Space>;
    /// The mount that shows a folder. Its device number is the file system's, also on btrfs.
    fn mount_of(&self, folder: &Path) -> Result<FolderMount>;
    /// The file system beneath a folder.
    fn backing_fs(&self, path: &Path) -> Result<BackingFs>;

    /// The map of a file from an offset on, written back first; at most `limit` runs, none at its
    /// end. Runs ascend and don't overlap; the first may begin before `from`.
    fn extents(&self, path: &Path, from: u64, limit: usize) -> Result<Vec<Extent>>;
    /// Whether a copy has, by its map, what [`Effect::CloneDelta`] took for granted of it. If not,
    /// it may not be what the image was, and is to be thrown away.
    fn verify_copy(&self, copy: &Path, known: &Known) -> Result<bool>;
    /// Number of runs of a file's map, without reading it; not written back first.
    fn extent_count(&self, path: &Path) -> Result<u64>;

    /// Opens the root directory of a file system at a mount point of the mount table, and proves
    /// on the open descriptor that it's the one on `device`.
    fn open_mount_root(&self, mount_point: &Path, device: &Device, fs: FsType)
    -> Result<MountRoot>;

    /// The mount table of this mount namespace.
    fn mounts(&self) -> Result<Vec<Mount>>;
    /// The attached loop devices, by number. Those whose image has a name for which `may_be` is
    /// false are not asked, and left out. The name is the one that the kernel shows, which may
    /// begin elsewhere than ours.
    fn loop_devices(&self, may_be: &dyn Fn(&Path) -> bool) -> Result<Vec<LoopDevice>>;
    /// All attached loop devices that answer: for reports. Whether a device stands on an image,
    /// [`Host::loops_on`] says.
    fn loops(&self) -> Result<Vec<LoopStatus>> {
        let devices = self.loop_devices(&|_| true)?;
        Ok(devices
            .into_iter()
            .filter_map(|one| one.status.ok())
            .collect())
    }
    /// An image and every loop device on it; `None` if there is no image. `name` is the end of the
    /// image's path by which it is told from other images.
    ///
    /// A device of that name which can't be asked may be on this image, so it is an error, with one
    /// exception: if it says that its file system is dead, and the image's file system answers
    /// afterwards, then they are two, for what is dead stays dead.
    fn loops_on(&self, image: &Path, name: &Path) -> Result<Option<(FileStat, Vec<LoopStatus>)>> {
        let devices = self.loop_devices(&|shown| shown.ends_with(name))?;
        let Some(found) = self.stat(image)? else {
            return Ok(None);
        };
        let mut loops = Vec::new();
        for device in devices {
            match device.status {
                Ok(status) if status.backing == found.id => loops.push(status),
                Ok(_) => {}
                Err(error) if error.is_dead_disk() => {
                    tracing::debug!(device = device.number, %error, "skipped a loop device on a dead file system");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(Some((found, loops)))
    }
    /// One loop device; `None` if nothing is attached to it.
    fn loop_status(&self, number: u32) -> Result<Option<LoopStatus>> {
        let devices = self.loop_devices(&|_| true)?;
        let mut found = devices.into_iter().filter(|device| device.number == number);
        found.next().map(|device| device.status).transpose()
    }
    /// Opens an attached loop and, with it open, proves that it stands on `backing`; `None` if not.
    fn hold_loop(&self, number: u32, backing: FileId) -> Result<Option<LoopHold>>;
    /// Whether a device is claimed by a file system or another exclusive opener.
    fn is_claimed(&self, device: &Device) -> Result<bool>;
    /// Bytes that a device shows.
    fn device_bytes(&self, device: &Device) -> Result<u64>;
    /// What is on a device.
    fn signature(&self, device: &Device) -> Result<Signature>;
    /// Whether the file system on a device that is not mounted was left with errors, or without
    /// having been unmounted where no journal makes up for that. Only ext4 tells.
    fn is_unclean(&self, device: &Device, fs: FsType) -> Result<bool>;
    /// Whether a mounted file system is smaller than its device by more than its own rounding:
    /// then it is to be grown.
    fn wants_growth(&self, device: &Device, mount_point: &Path, fs: FsType) -> Result<bool>;

    /// Whether the ext4 on a device that is smaller than that can be grown by
    /// [`Effect::GrowUnmounted`] without moving what is in it.
    fn grows_unmounted(&self, device: &Device) -> Result<bool>;

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
    /// A user of this machine, by name; may take as long as a directory service.
    fn account(&self, name: &str) -> Result<Account> {
        Err(HostError::unexpected(
            "find",
            name,
            "the simulated host has no users",
        ))
    }
    /// Name of what is missing, without which no volume works on this host, with the fix; empty
    /// if all is there.
    fn missing(&self) -> Vec<String>;
}
