//! Every change that the driver makes on disk or in the kernel, as a value.

use std::path::Path;

use uuid::Uuid;

use super::{Device, FileId, Known, LoopHold, MountRoot, Session, SessionSpec};
use crate::model::FsType;

/// One change. Paths of a pool begin with what [`super::Host::pin_dir`] gave; those of callers
/// have passed [`super::Host::check_path`] and are resolved again, without links, when used.
#[derive(Debug)]
pub enum Effect<'a> {
    /// mkdir, mode 0700; an existing directory is success.
    MakeDir {
        /// The directory.
        path: &'a Path,
    },
    /// Creates or replaces a file, mode 0600, and writes its bytes; not yet durable.
    WriteFile {
        /// The file.
        path: &'a Path,
        /// All of its content.
        bytes: &'a [u8],
    },
    /// fsync of a file.
    SyncFile {
        /// The file.
        path: &'a Path,
    },
    /// fsync of a directory.
    SyncDir {
        /// The directory.
        path: &'a Path,
    },
    /// rename; replaces a file at `to`.
    Rename {
        /// From here.
        from: &'a Path,
        /// To there.
        to: &'a Path,
    },
    /// unlink of a file; nothing there is success.
    RemoveFile {
        /// The file.
        path: &'a Path,
    },
    /// rmdir; nothing there is success.
    RemoveDir {
        /// The directory.
        path: &'a Path,
    },
    /// Creates the image if it's missing and makes it `size` bytes long, never shorter than it
    /// is; with `reserve`, every block of it is allocated. Not yet durable. On ENOSPC the length
    /// may have grown.
    Allocate {
        /// The image.
        path: &'a Path,
        /// Bytes, a multiple of [`crate::model::size::GRAIN`].
        size: u64,
        /// Reserve blocks.
        reserve: bool,
    },
    /// Has files that are made in an empty folder from now on written in place, where the file
    /// system would write elsewhere each time (btrfs: FS_NOCOW_FL); no change on others.
    WriteInPlace {
        /// The folder.
        path: &'a Path,
    },
    /// Creates an empty file that can share blocks with another: on btrfs, both are written in
    /// place or neither is. One that has content already is left as it is. Not yet durable.
    MakeLike {
        /// The new file.
        path: &'a Path,
        /// The other.
        source: &'a Path,
    },
    /// Cuts an image back: the undo of a growth that failed, never below the length that the image
    /// had before it, which a device may have shown since.
    Truncate {
        /// The image.
        path: &'a Path,
        /// Bytes.
        size: u64,
    },
    /// Overwrites all blocks with zeros, durably, but for those that another file has as well: they
    /// are the last one's to overwrite.
    Zero {
        /// The image.
        path: &'a Path,
    },
    /// Creates an empty file that is given blocks by so many bytes at once (xfs: extsize). One
    /// that has blocks already is left as it is. Not yet durable.
    HintExtents {
        /// The file.
        path: &'a Path,
        /// Bytes: a power of two.
        bytes: u64,
    },
    /// Frees all blocks; the pool's disk is told by [`Effect::Trim`].
    Discard {
        /// The image.
        path: &'a Path,
    },
    /// FITRIM: tells the disk beneath a file system which of its blocks are free. A disk that can't
    /// be told is success, and logged.
    Trim {
        /// A directory of the file system.
        path: &'a Path,
    },
    /// FITRIM of a volume: blocks that its file system doesn't need are taken from its image. Runs
    /// of less than `least` bytes stay: each hole makes an extent more.
    TrimVolume {
        /// The root of its file system.
        root: &'a MountRoot,
        /// See above.
        least: u64,
    },
    /// FICLONE of a whole image: atomic against its writers, who wait for all of it (about 15 us
    /// an extent on xfs). The target exists and is replaced; it takes the source's length.
    CloneWhole {
        /// The image.
        source: &'a Path,
        /// A file of the same file system, open by nobody else.
        target: &'a Path,
    },
    /// Clones an image in pieces of at most 8 MiB, between which its writers get on: torn, to be
    /// put right by [`Effect::CloneDelta`]. The target exists, and takes the source's length.
    ClonePreFreeze {
        /// The image.
        source: &'a Path,
        /// The file that becomes its copy.
        target: &'a Path,
    },
    /// Clones again what differs between the source's map, synced, and the copy's own map, in
    /// address or flags. With nobody writing to the source (frozen) the copy is exact afterwards,
    /// if [`super::Host::verify_copy`] says so.
    CloneDelta {
        /// The image.
        source: &'a Path,
        /// A copy by [`Effect::ClonePreFreeze`].
        target: &'a Path,
        /// What earlier passes have seen, and what this one does.
        known: &'a Known,
    },
    /// FALLOC_FL_UNSHARE_RANGE of what is shared, in pieces of at most 4 MiB: every block of the
    /// range is the file's own afterwards, and holes stay holes. Beside writers it's safe, and
    /// they wait for each piece.
    Unshare {
        /// The image.
        path: &'a Path,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// Copies the data of a range of one image into another on any file system; holes stay holes.
    /// Not yet durable.
    CopyRange {
        /// The image.
        source: &'a Path,
        /// The copy: exists, and is long enough.
        target: &'a Path,
        /// First byte, in both.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// Gives the btrfs on an image that nobody has attached a new fsid, so that it can be mounted
    /// beside the one it was copied from; what fsync wrote to its log stays. A crash leaves the old
    /// fsid or the new one (with checksums other than crc32c, an image that is not to be used).
    RenewFsId {
        /// The image.
        image: &'a Path,
        /// The new fsid.
        uuid: Uuid,
    },
    /// LOOP_CONFIGURE.
    AttachLoop(LoopSpec<'a>),
    /// LOOP_CLR_FD, only if it still stands on `backing`.
    DetachLoop {
        /// N of /dev/loopN.
        number: u32,
        /// What it must stand on.
        backing: FileId,
    },
    /// LOOP_CLR_FD of a device that can't be asked what it stands on, because the file system of its
    /// image is dead: only if it still says so, and only if its image has a name that ends so.
    DetachDeadLoop {
        /// N of /dev/loopN.
        number: u32,
        /// The end of the image's path.
        name: &'a Path,
    },
    /// LOOP_SET_CAPACITY: the device takes the size of its image.
    ResizeLoop {
        /// N of /dev/loopN.
        number: u32,
    },
    /// LOOP_SET_DIRECT_IO: the device bypasses the pool's page cache again.
    SetDirectIo {
        /// N of /dev/loopN.
        number: u32,
    },
    /// Sets discard_max_bytes of the queue to 0, so that nothing above un-reserves blocks.
    DisableDiscard {
        /// N of /dev/loopN.
        number: u32,
    },
    /// Makes a free loop device new, so that the next to get its number, whoever that is, finds
    /// no limit of ours on it. One that is in use is left alone.
    RecreateLoop {
        /// N of /dev/loopN.
        number: u32,
    },
    /// mkfs.
    Format {
        /// The device.
        device: &'a Device,
        /// Which.
        fs: FsType,
        /// Its uuid.
        uuid: Uuid,
        /// Checked extra words.
        options: &'a [String],
        /// Do not discard first: thick.
        keep_blocks: bool,
    },
    /// Checks a file system that is not mounted, with the program of its own tools; the program
    /// is never killed. Gives [`Done::Checked`]. An error means that the program could not do its
    /// work, or, for [`Check::Preen`] and [`Check::Whole`], that it could not repair what it found.
    CheckFs {
        /// The device.
        device: &'a Device,
        /// Which.
        fs: FsType,
        /// How.
        how: Check,
    },
    /// Grows a mounted file system to its device.
    GrowFs {
        /// The device.
        device: &'a Device,
        /// Where it is mounted (a caller's path).
        mount_point: &'a Path,
        /// Which.
        fs: FsType,
    },
    /// Grows an ext4 that is not mounted to its device (resize2fs), just after a
    /// [`Check::Whole`]; the program is never killed. Cut off, it leaves what a
    /// [`Check::Repair`] makes whole.
    GrowUnmounted {
        /// The device.
        device: &'a Device,
    },
    /// Makes a caller's leaf: a directory, or an empty file to bind a device on. Existing of the
    /// same kind is success.
    MakeTarget {
        /// The caller's path.
        path: &'a Path,
        /// Directory or file.
        kind: NodeKind,
    },
    /// Removes a caller's leaf: an empty directory or an empty file; nothing there is success.
    RemoveTarget {
        /// The caller's path.
        path: &'a Path,
    },
    /// mount of a file system.
    Mount(MountSpec<'a>),
    /// Bind mount of one caller's path on another.
    Bind {
        /// What to show: a caller's path.
        source: &'a Path,
        /// Where: a caller's path.
        target: &'a Path,
        /// Only to be read: bind, then remount; unmounted again if that fails.
        read_only: bool,
    },
    /// Bind mount of a device node on a caller's file.
    BindDevice {
        /// The device; what its path names must have its number.
        device: &'a Device,
        /// Where: a caller's path, a file.
        target: &'a Path,
    },
    /// Unmounts the topmost mount at a caller's path; never lazily, never by force.
    Unmount {
        /// The caller's path.
        target: &'a Path,
    },
    /// Starts a session; it isn't waited for. It ends by itself when this process does.
    StartSession(SessionSpec<'a>),
}

/// How to attach an image.
#[derive(Clone, Copy, Debug)]
pub struct LoopSpec<'a> {
    /// The image.
    pub image: &'a Path,
    /// What it must be once it's open.
    pub backing: FileId,
    /// Logical block size.
    pub block_size: u32,
    /// Vanish with the last opener (mounted volumes).
    pub autoclear: bool,
    /// Read-only.
    pub read_only: bool,
}

/// How to mount a device.
#[derive(Clone, Copy, Debug)]
pub struct MountSpec<'a> {
    /// The device, held open by the caller meanwhile.
    pub device: &'a Device,
    /// Where: a caller's path, a directory.
    pub target: &'a Path,
    /// Which.
    pub fs: FsType,
    /// Options as given by the caller, checked by [`crate::model::mount_option`].
    pub options: &'a [String],
    /// Mount read-only.
    pub read_only: bool,
}

/// How a file system is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// Repairs what can be repaired without a decision of a person: `e2fsck -p`. ext4 only.
    Preen,
    /// The same, also where the file system says that it is clean: `e2fsck -fp`. ext4 only.
    Whole,
    /// Reads all of it and changes nothing.
    Look,
    /// Repairs whatever it finds; what it can't place goes to lost+found.
    Repair,
}

/// What a check found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked {
    /// The file system has no error, or none any more.
    pub sound: bool,
    /// What the program said.
    pub report: String,
}

/// Kind of a caller's leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeKind {
    /// A directory.
    Dir,
    /// An empty file.
    File,
}

/// What an effect gives back.
#[derive(Debug)]
pub enum Done {
    /// Nothing.
    Plain,
    /// AttachLoop: the device, kept open.
    Loop(LoopHold),
    /// CloneWhole, CloneAhead: how many extents the copy has. CloneRest: how many ranges differed.
    Cloned(u64),
    /// CheckFs: what it found.
    Checked(Checked),
    /// StartSession: the session.
    Session(Box<dyn Session>),
}

impl Effect<'_> {
    /// A short name, for logs, metrics and the fault harness.
    pub fn name(&self) -> &'static str {
        match self {
            Effect::MakeDir { .. } => "make_dir",
            Effect::WriteFile { .. } => "write_file",
            Effect::SyncFile { .. } => "sync_file",
            Effect::SyncDir { .. } => "sync_dir",
            Effect::Rename { .. } => "rename",
            Effect::RemoveFile { .. } => "remove_file",
            Effect::RemoveDir { .. } => "remove_dir",
            Effect::Allocate { .. } => "allocate",
            Effect::WriteInPlace { .. } => "write_in_place",
            Effect::MakeLike { .. } => "make_like",
            Effect::Truncate { .. } => "shorten",
            Effect::Zero { .. } => "zero",
            Effect::HintExtents { .. } => "hint_extents",
            Effect::Discard { .. } => "discard",
            Effect::Trim { .. } => "trim",
            Effect::TrimVolume { .. } => "trim_volume",
            Effect::CloneWhole { .. } => "clone_whole",
            Effect::ClonePreFreeze { .. } => "clone_ahead",
            Effect::CloneDelta { .. } => "clone_rest",
            Effect::Unshare { .. } => "unshare",
            Effect::CopyRange { .. } => "copy_range",
            Effect::RenewFsId { .. } => "renew_fs_id",
            Effect::AttachLoop(_) => "attach_loop",
            Effect::DetachLoop { .. } => "detach_loop",
            Effect::DetachDeadLoop { .. } => "detach_dead_loop",
            Effect::ResizeLoop { .. } => "resize_loop",
            Effect::SetDirectIo { .. } => "set_direct_io",
            Effect::DisableDiscard { .. } => "forbid_discard",
            Effect::RecreateLoop { .. } => "renew_loop",
            Effect::Format { .. } => "format",
            Effect::CheckFs { .. } => "check_fs",
            Effect::GrowFs { .. } => "grow_fs",
            Effect::GrowUnmounted { .. } => "grow_unmounted",
            Effect::MakeTarget { .. } => "make_target",
            Effect::RemoveTarget { .. } => "remove_target",
            Effect::Mount(_) => "mount",
            Effect::Bind { .. } => "bind",
            Effect::BindDevice { .. } => "bind_device",
            Effect::Unmount { .. } => "unmount",
            Effect::StartSession(_) => "start_session",
        }
    }
}
