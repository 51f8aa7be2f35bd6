//! The kernel, the disk and the programs of this node, behind one trait.
//!
//! Everything that *changes* something is a value, [`Effect`], and passes through one method,
//! [`Host::perform`]; all other methods only read. So tests can count what the driver does, make it
//! fail, and interrupt it at any point, and the fault sweep covers a new effect without listing it.
//!
//! There are two implementations: [`linux::LinuxHost`], the only place with `unsafe`, with child
//! programs and with mount(2); and [`memory::MemoryHost`], a simulation with the same rules.

pub mod difference;
pub mod effect;
pub mod foreign_file;
pub mod freezer;
pub mod known;
pub mod linux;
pub mod mapper;
pub mod memory;
pub mod mountinfo;
pub mod piece;
pub mod question;
pub mod session;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use uuid::Uuid;

pub use effect::{Check, Checked, Done, Effect, LoopSpec, MountSpec, NodeKind};
pub use foreign_file::ForeignFile;
pub use freezer::{Freeze, FreezeMember, Freezer, MountRoot};
pub use known::{Budget, Known};
pub use mapper::{
    LinearTable, MappedDevice, PreparedThinSnapshot, ThinMessage, ThinPoolMode, ThinPoolStatus,
    ThinSnapshot, ThinTable, VolumeGroup, mapped_path,
};
pub use mountinfo::{FolderMount, Mount};
pub use piece::Piece;
pub use session::{Account, Session, SessionSpec, SessionState};

use crate::error::HostError;
use crate::model::FsType;

pub type Result<T> = std::result::Result<T, HostError>;

/// Identity of a file, whatever its name: the kernel's device and inode numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId {
    /// st_dev.
    pub device: u64,
    /// st_ino.
    pub inode: u64,
}

/// The fields of stat(2) that the driver uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStat {
    /// Device and inode.
    pub id: FileId,
    /// File, directory, ...
    pub kind: FileKind,
    /// Length in bytes.
    pub size: u64,
    /// Bytes of the blocks that are allocated to it on the pool.
    pub allocated: u64,
    /// st_rdev of a device node; 0 for anything else.
    pub rdev: u64,
    /// When its content was last modified, in nanoseconds since 1970.
    pub modified: u64,
}

/// The file types that the driver distinguishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    File,
    Dir,
    /// A block device node.
    Block,
    /// A symbolic link (never followed).
    Link,
    /// Anything else.
    Other,
}

/// Space on a file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space {
    /// Total bytes.
    pub total: u64,
    /// Free bytes, without those reserved for root.
    pub available: u64,
    /// Free bytes, including those reserved for root.
    pub free: u64,
    /// Total inodes; 0 if the file system has no fixed number.
    pub inodes: u64,
    pub inodes_free: u64,
}

/// The file system that holds a pool's directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingFs {
    /// Name of the file system as in the kernel's mount table ("xfs", "tmpfs", "nfs4").
    pub fs_name: String,
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// Logical block size for direct I/O on it, in bytes.
    pub sector: u32,
    /// The smallest logical block size with which a file that shares no blocks can use direct I/O,
    /// in bytes.
    pub min_sector: u32,
    /// Whether files can share blocks (FICLONE), tested with unnamed files.
    pub shares_blocks: bool,
    /// Whether files created in the directory are overwritten in place. On btrfs this is the case
    /// only where the directory was marked so ([`Effect::WriteInPlace`]); otherwise files have
    /// checksums, which direct I/O can leave wrong.
    pub in_place: bool,
}

/// One extent of a file's map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Offset of the first byte in the file.
    pub logical: u64,
    /// Its address on the disk (on btrfs: in its logical address space).
    pub physical: u64,
    /// Length in bytes.
    pub length: u64,
    /// Allocated but never written: reads as zeros.
    pub unwritten: bool,
    /// The address does not identify single blocks (compressed, inline, or delayed allocation). Two
    /// such extents have the same content only if they are equal as a whole.
    pub opaque: bool,
}

/// An attached loop device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopStatus {
    /// N of /dev/loopN.
    pub number: u32,
    /// The backing file, from LOOP_GET_STATUS64, never from a path.
    pub backing: FileId,
    /// Offset into the file; 0 for devices of this driver.
    pub offset: u64,
    /// Maximum number of bytes shown; 0 (all) for devices of this driver.
    pub size_limit: u64,
    pub read_only: bool,
    /// The kernel detaches it when its last opener closes it.
    pub autoclear: bool,
    /// Bypasses the pool's page cache.
    pub direct_io: bool,
    /// The kernel scans it for partitions; never set on devices of this driver.
    pub partscan: bool,
}

/// Attaches an image to a loop device, and holds the device open.
pub fn attach_loop(host: &dyn Host, spec: LoopSpec<'_>) -> Result<LoopHold> {
    match host.perform(&Effect::AttachLoop(spec))? {
        Done::Loop(hold) => Ok(hold),
        Done::Plain | Done::Cloned(_) | Done::Checked(_) | Done::Session(_) => Err(
            HostError::unexpected("attach", spec.image, "no loop device was created"),
        ),
    }
}

/// An attached loop device, whether or not its status can be read.
#[derive(Debug)]
pub struct LoopDevice {
    /// N of /dev/loopN.
    pub number: u32,
    /// The path of its image, as the kernel shows it; empty if that cannot be read.
    pub image: PathBuf,
    /// The backing file and flags. An error belongs to this device alone: its image lies on a file
    /// system that is dead or hangs.
    pub status: Result<LoopStatus>,
}

/// The major number of loop devices.
pub const LOOP_MAJOR: u64 = 7;

/// A block device node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Path of its node.
    pub path: PathBuf,
    /// Its device number, as in st_rdev and the mount table.
    pub rdev: u64,
}

impl Device {
    /// The device /dev/loopN.
    pub fn of_loop(number: u32) -> Device {
        Device {
            path: PathBuf::from(format!("/dev/loop{number}")),
            rdev: nix::sys::stat::makedev(LOOP_MAJOR, u64::from(number)),
        }
    }

    /// The N of /dev/loopN; `None` if it is another device.
    pub fn loop_number(&self) -> Option<u32> {
        Device::loop_number_of(self.rdev)
    }

    /// The N of /dev/loopN, by its device number; `None` if it is another device.
    pub fn loop_number_of(rdev: u64) -> Option<u32> {
        let is_loop = nix::sys::stat::major(rdev) == LOOP_MAJOR;
        is_loop.then(|| nix::sys::stat::minor(rdev) as u32)
    }
}

/// Holds a loop device open and so attached: while this exists, the number cannot be reused for
/// another image.
pub struct LoopHold {
    /// N of /dev/loopN.
    pub number: u32,
    /// The handle that keeps it open.
    pub keep: Box<dyn std::any::Any + Send + Sync>,
}

impl LoopHold {
    pub fn device(&self) -> Device {
        Device::of_loop(self.number)
    }
}

impl std::fmt::Debug for LoopHold {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "loop{}", self.number)
    }
}

/// Holds a device open: while this exists, the kernel does not remove it, and its number cannot be
/// reused.
pub struct DeviceHold {
    pub device: Device,
    /// The handle that keeps it open: an [`std::os::fd::OwnedFd`] on the real host.
    pub keep: Box<dyn std::any::Any + Send + Sync>,
}

impl From<LoopHold> for DeviceHold {
    fn from(hold: LoopHold) -> DeviceHold {
        DeviceHold {
            device: hold.device(),
            keep: hold.keep,
        }
    }
}

impl std::fmt::Debug for DeviceHold {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.device.path.fmt(f)
    }
}

/// A handle whose file stays open or locked until it is dropped or the process exits.
pub struct Kept(pub Box<dyn std::any::Any + Send + Sync>);

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("kept")
    }
}

/// What blkid finds on a device, read without any cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Signature {
    /// Nothing that blkid recognizes. This does not prove that the device is empty.
    None,
    /// A file system.
    Fs {
        /// The name that blkid gives it.
        name: String,
        /// Its UUID, as text.
        uuid: String,
        /// Its size in bytes, where the superblock records it.
        size: Option<u64>,
        /// Any other signature on the device, such as a partition table.
        beside: Option<String>,
    },
    /// Something else: a partition table, a RAID or LVM member, or several at once.
    Other(String),
}

/// The error of a host without thin pools.
fn no_thin_pools(subject: &str) -> HostError {
    HostError::unexpected("examine", subject, "this release has no thin pools of LVM")
}

/// Access to the node, for reading and for changes. Every method may block; none is called directly
/// from async code.
pub trait Host: Send + Sync + 'static {
    /// Applies one change to disk or kernel. What other methods change is listed in docs/architecture.md.
    /// After an error the change was not made, or its outcome is unknown.
    fn perform(&self, effect: &Effect<'_>) -> Result<Done>;

    /// Opens a directory and returns a path (`/proc/self/fd/N`) that reaches it whatever is mounted
    /// over it later, as long as the handle is held.
    fn pin_dir(&self, path: &Path) -> Result<(PathBuf, Kept)>;
    /// Takes the exclusive lock of a file and holds it until the handle is dropped. Returns `None`
    /// if the lock is taken.
    fn try_lock_file(&self, path: &Path) -> Result<Option<Kept>>;
    /// Like [`Host::try_lock_file`], but waits up to `max_wait` while the lock is taken. The locks
    /// of a killed process can stay taken for a moment: a program that it was just starting
    /// inherits them between fork and exec.
    fn lock_file(&self, path: &Path, max_wait: Duration) -> Result<Option<Kept>> {
        const RETRY_INTERVAL: Duration = Duration::from_millis(50);
        let mut waited = Duration::ZERO;
        loop {
            let lock = self.try_lock_file(path)?;
            if lock.is_some() || waited >= max_wait {
                return Ok(lock);
            }
            if waited.is_zero() {
                tracing::info!(path = %path.display(), "waiting for a lock");
            }
            self.pause(RETRY_INTERVAL);
            waited += RETRY_INTERVAL;
        }
    }
    /// Reads a whole small file; `None` if it does not exist.
    fn read_file(&self, path: &Path) -> Result<Option<Vec<u8>>>;
    /// Names in a directory, sorted; `None` if it does not exist.
    fn list_dir(&self, path: &Path) -> Result<Option<Vec<String>>>;
    /// lstat; `None` if nothing exists at the path.
    fn stat(&self, path: &Path) -> Result<Option<FileStat>>;
    /// statfs.
    fn space(&self, path: &Path) -> Result<Space>;
    /// The mount through which a directory is reached. Its device number is the one of the file
    /// system, also on btrfs.
    fn mount_of(&self, folder: &Path) -> Result<FolderMount>;
    /// The file system that holds a directory.
    fn backing_fs(&self, path: &Path) -> Result<BackingFs>;

    /// Whether a file shares blocks with another one, after writing back its dirty pages.
    fn shares_blocks(&self, _path: &Path) -> Result<bool> {
        Ok(true)
    }
    /// Opens a file that the driver did not create: a regular file below a directory that the
    /// administrator has chosen, reached without following a symbolic link below that directory. An
    /// error if it is empty, or open for writing.
    fn open_foreign(&self, top: &Path, _below: &Path) -> Result<Box<dyn ForeignFile>> {
        let what = "this host has no files of others";
        Err(HostError::unexpected("import", top, what))
    }

    /// Reads the map of a file from an offset on, after writing back its dirty pages. Returns at
    /// most `limit` extents, and none at the end of the file. Extents ascend and do not overlap;
    /// the first may begin before `from`.
    fn extents(&self, path: &Path, from: u64, limit: usize) -> Result<Vec<Extent>>;
    /// Reads the data of a range of an image, in ascending order. Blocks of [`piece::ZERO_BLOCK`] bytes
    /// that contain only zeros are left out, whether they are holes or were written.
    fn read_range(&self, path: &Path, offset: u64, length: u64) -> Result<Vec<Piece>>;
    /// Whether the map of a copy contains what [`Effect::CloneDelta`] assumed about it. If not, the
    /// copy may differ from the image and must be discarded.
    fn verify_copy(&self, copy: &Path, known: &Known) -> Result<bool>;
    /// Number of extents of a file, without reading its map and without writing back dirty pages.
    fn extent_count(&self, path: &Path) -> Result<u64>;

    /// Opens the root directory of a file system at a mount point of the mount table, and verifies
    /// on the open descriptor that this file system is the one on `device`.
    fn open_mount_root(&self, mount_point: &Path, device: &Device, fs: FsType)
    -> Result<MountRoot>;

    /// The mount table of this mount namespace.
    fn mounts(&self) -> Result<Vec<Mount>>;
    /// The attached loop devices, ordered by number. Devices whose image has a name for which
    /// `may_be` is false are skipped without a query. The name is the one that the kernel shows,
    /// which may begin with a different path than the driver's.
    fn loop_devices(&self, may_be: &dyn Fn(&Path) -> bool) -> Result<Vec<LoopDevice>>;
    /// All attached loop devices that answer, for reports. To find the devices of one image, use
    /// [`Host::loops_on`].
    fn loops(&self) -> Result<Vec<LoopStatus>> {
        let devices = self.loop_devices(&|_| true)?;
        Ok(devices
            .into_iter()
            .filter_map(|one| one.status.ok())
            .collect())
    }
    /// Returns an image and every loop device on it; `None` if the image does not exist. `name` is
    /// the end of the image's path, which distinguishes it from other images.
    ///
    /// A device with that name whose status cannot be read may be on this image, so it is an error,
    /// with one exception: if the device reports that its file system is dead, and the image's file
    /// system answers afterwards, the two file systems are different, because a dead one never
    /// answers again.
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
    /// The status of one loop device; `None` if nothing is attached to it.
    fn loop_status(&self, number: u32) -> Result<Option<LoopStatus>> {
        let devices = self.loop_devices(&|_| true)?;
        let mut found = devices.into_iter().filter(|device| device.number == number);
        found.next().map(|device| device.status).transpose()
    }
    /// Opens an attached loop device and verifies, while it is open, that its backing file is
    /// `backing`; `None` if it is another file.
    fn hold_loop(&self, number: u32, backing: FileId) -> Result<Option<LoopHold>>;
    /// The status of a thin pool; `None` if there is no active pool with this name.
    fn thin_pool(&self, name: &str) -> Result<Option<ThinPoolStatus>> {
        Err(no_thin_pools(name))
    }
    /// The thin devices of a pool, each with the bytes of its blocks, including shared ones.
    fn thin_devices(&self, pool: &str) -> Result<BTreeMap<u32, u64>> {
        Err(no_thin_pools(pool))
    }
    /// The mapped devices that show a thin device of this pool, including foreign ones, and those
    /// without a table whose UUID begins with `prefix`.
    fn mapped_devices(&self, pool: &str, _prefix: &str) -> Result<Vec<MappedDevice>> {
        Err(no_thin_pools(pool))
    }
    /// The same for the thin pool with this name and device number, but of the devices whose UUID begins
    /// with `prefix` only those in `own`. It takes one call for each of these and for each foreign
    /// device. The pool is found by its number, because an administrator may have renamed its group.
    fn mapped_devices_of(
        &self,
        (pool, _): (&str, u64),
        prefix: &str,
        own: &[&str],
    ) -> Result<Vec<MappedDevice>> {
        let mut found = self.mapped_devices(pool, prefix)?;
        found.retain(|it| !it.uuid.starts_with(prefix) || own.contains(&it.uuid.as_str()));
        Ok(found)
    }
    /// Allocates what [`Effect::CreateThinSnapshot`] needs, and finds the devices that show the origin.
    /// EAGAIN while the pool is suspended.
    fn prepare_thin_snapshot(&self, snapshot: ThinSnapshot) -> Result<PreparedThinSnapshot> {
        Err(no_thin_pools(&snapshot.pool))
    }
    /// Whether the kernel has a device mapper that this process can use.
    fn has_device_mapper(&self) -> Result<bool> {
        Ok(false)
    }
    /// The mapped device with a UUID, which shows another block device; `None` if there is none. Its
    /// table is `None` if it has none, or one of another kind.
    fn linear_device(&self, _uuid: &str) -> Result<Option<MappedDevice<LinearTable>>> {
        Ok(None)
    }
    /// Opens the mapped device with a UUID; `None` if there is none, or it has no table.
    fn hold_mapped(&self, uuid: &str) -> Result<Option<DeviceHold>> {
        Err(no_thin_pools(uuid))
    }
    /// Opens the mapped device with a UUID exclusively: no file system and no other process can claim
    /// it at the same time. `None` if there is none, or it has no table; EBUSY if it is claimed.
    fn claim_mapped(&self, uuid: &str) -> Result<Option<DeviceHold>> {
        Err(no_thin_pools(uuid))
    }
    /// Whether the LVM of this machine lists a physical volume with this UUID: with its own
    /// configuration, or with one that ignores no device.
    fn is_listed_by_lvm(&self, uuid: &str, _ignore_nothing: bool) -> Result<bool> {
        Err(no_thin_pools(uuid))
    }
    /// The volume groups with this name, including those of other machines; `None` where LVM is not
    /// installed.
    fn volume_groups(&self, _name: &str) -> Result<Option<Vec<VolumeGroup>>> {
        Ok(None)
    }
    /// Reads bytes of a device, past the page cache. Offset and length are multiples of 4096.
    fn read_blocks(&self, device: &Device, _offset: u64, _length: usize) -> Result<Vec<u8>> {
        Err(no_thin_pools(&device.path.to_string_lossy()))
    }
    /// Whether a device is claimed by a file system or another exclusive opener.
    fn is_claimed(&self, device: &Device) -> Result<bool>;
    /// Size of a device in bytes.
    fn device_bytes(&self, device: &Device) -> Result<u64>;
    /// What blkid finds on a device.
    fn signature(&self, device: &Device) -> Result<Signature>;
    /// Whether the unmounted file system on a device has recorded errors, or was not unmounted
    /// cleanly where no journal compensates for that. Only ext4 reports this; for the others the
    /// result is false.
    fn is_unclean(&self, device: &Device, fs: FsType) -> Result<bool>;
    /// Whether a mounted file system is smaller than its device by more than its own rounding, so
    /// that it should be grown.
    fn should_grow(&self, device: &Device, mount_point: &Path, fs: FsType) -> Result<bool>;

    /// Whether the ext4 file system on a larger device can be grown by [`Effect::GrowUnmounted`]
    /// without moving data or metadata.
    fn can_grow_unmounted(&self, device: &Device) -> Result<bool>;

    /// Checks a CSI staging or target path: it must be absolute, below an allowed directory, and
    /// without symbolic links. Its parent must exist. The error text is meant for the caller.
    fn check_path(&self, path: &Path) -> std::result::Result<(), String>;
    /// Converts a CSI path to the spelling of the mount table: the allowed directory itself may be
    /// a symbolic link.
    fn mount_table_path(&self, path: &Path) -> Result<PathBuf> {
        Ok(path.to_path_buf())
    }
    /// lstat of a CSI path; `None` if nothing exists there.
    fn stat_csi_path(&self, path: &Path) -> Result<Option<FileStat>>;
    /// statfs of a CSI path.
    fn space_csi_path(&self, path: &Path) -> Result<Space>;

    /// The kernel's id of this boot.
    fn boot_id(&self) -> Result<Uuid>;
    fn random_uuid(&self) -> Uuid;
    /// Seconds since 1970.
    fn now(&self) -> u64;
    /// Nanoseconds since 1970.
    fn now_nanos(&self) -> u64 {
        self.now().saturating_mul(1_000_000_000)
    }
    /// Sleeps. On a simulated machine only the simulated time passes.
    fn pause(&self, time: Duration) {
        std::thread::sleep(time);
    }
    /// Looks up a user of this machine by name. This may take as long as the directory service
    /// needs.
    fn account(&self, name: &str) -> Result<Account> {
        Err(HostError::unexpected(
            "find",
            name,
            "the simulated host has no users",
        ))
    }
    /// Describes each missing prerequisite without which no volume works on this host, with its
    /// fix; empty if nothing is missing.
    fn missing(&self) -> Vec<String>;
}
