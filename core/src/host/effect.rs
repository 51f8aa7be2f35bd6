//! Every change that the driver makes on disk or in the kernel, as a value.

use std::ops::Range;
use std::path::{Path, PathBuf};

use uuid::Uuid;

use super::{
    Device, FileId, Known, LinearTable, LoopHold, MountRoot, Piece, PreparedThinSnapshot, Session,
    SessionSpec, ThinMessage, ThinTable,
};
use crate::model::FsType;

/// One change. Paths inside a pool begin with a path that [`super::Host::pin_dir`] returned; CSI
/// paths have passed [`super::Host::check_path`] and are resolved again, without following links,
/// when the effect is performed.
#[derive(Debug)]
pub enum Effect<'a> {
    /// mkdir with mode 0700; an existing directory is success.
    MakeDir {
        /// The directory.
        path: &'a Path,
    },
    /// Creates or replaces a file with mode 0600 and writes its bytes; they are not yet durable.
    WriteFile {
        /// The file.
        path: &'a Path,
        /// Its whole content.
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
    /// fsync of several files and directories at the same time, so that the file system makes most of
    /// them durable together. After an error or a crash, any of them may be durable.
    SyncAll {
        /// The files and directories.
        paths: &'a [PathBuf],
    },
    /// rename; replaces a file that exists at `to`.
    Rename {
        /// The old path.
        from: &'a Path,
        /// The new path.
        to: &'a Path,
    },
    /// unlink of a file; success if it does not exist.
    RemoveFile {
        /// The file.
        path: &'a Path,
    },
    /// rmdir; success if the directory does not exist.
    RemoveDir {
        /// The directory.
        path: &'a Path,
    },
    /// Creates the image if it is missing and extends it to `size` bytes; it never shortens the
    /// image. With `reserve`, every block is allocated. The result is not yet durable. After ENOSPC
    /// the length may have grown.
    Allocate {
        /// The image.
        path: &'a Path,
        /// Bytes, a multiple of [`crate::model::size::GRAIN`].
        size: u64,
        /// Allocate every block.
        reserve: bool,
    },
    /// Makes files that are created in an empty directory from now on be overwritten in place where
    /// the file system would otherwise copy on write (btrfs: FS_NOCOW_FL); no change on other file
    /// systems.
    WriteInPlace {
        /// The directory.
        path: &'a Path,
    },
    /// Creates an empty file that can share blocks with another: on btrfs, either both are written
    /// in place or neither is. A file that already has content is left unchanged. The result is not
    /// yet durable.
    MakeLike {
        /// The new file.
        path: &'a Path,
        /// The other file.
        source: &'a Path,
    },
    /// Truncates an image to undo a growth that failed. It never goes below the length that the
    /// image had before the growth, because a device may have exposed that length since.
    Truncate {
        /// The image.
        path: &'a Path,
        /// The new length in bytes.
        size: u64,
    },
    /// Overwrites all blocks with zeros, durably, except blocks that are shared with another file:
    /// those are overwritten when the last file that has them is deleted.
    Zero {
        /// The image.
        path: &'a Path,
    },
    /// Creates an empty file to which the file system allocates blocks in units of `bytes` (xfs:
    /// extsize). A file that already has blocks is left unchanged. The result is not yet durable.
    HintExtents {
        /// The file.
        path: &'a Path,
        /// Size of an allocation in bytes: a power of two.
        bytes: u64,
    },
    /// Frees all blocks from an offset on; [`Effect::Trim`] passes the discard on to the pool's disk.
    Discard {
        /// The image.
        path: &'a Path,
        from: u64,
    },
    /// FITRIM: discards the free blocks of a file system on the disk below it. If the disk does not
    /// support discard, that is logged and counts as success.
    Trim {
        /// A directory on the file system.
        path: &'a Path,
    },
    /// FITRIM of a volume: frees the blocks of its image that its file system does not use. Runs of
    /// less than `least` bytes stay, because each hole adds an extent to the image.
    TrimVolume {
        /// The root of its file system.
        root: &'a MountRoot,
        /// The smallest run that is freed, in bytes.
        least: u64,
    },
    /// FICLONE of a whole image. It is atomic with respect to writers of the image, who wait until
    /// it is complete (about 15 us per extent on xfs). The target must exist; its content is
    /// replaced, and it takes the source's length.
    CloneWhole {
        /// The image.
        source: &'a Path,
        /// A file on the same file system that no other process has open.
        target: &'a Path,
    },
    /// Clones an image in pieces of at most 8 MiB; writers can continue between the pieces. The
    /// copy is torn until [`Effect::CloneDelta`] corrects it. The target must exist and takes the
    /// source's length.
    ClonePreFreeze {
        /// The image.
        source: &'a Path,
        /// The file that becomes its copy.
        target: &'a Path,
    },
    /// Clones again every range in which the source's map, written back, differs from the copy's
    /// own map in address or flags. If the source is frozen, the copy is exact afterwards, provided
    /// that [`super::Host::verify_copy`] confirms it.
    CloneDelta {
        /// The image.
        source: &'a Path,
        /// A copy made by [`Effect::ClonePreFreeze`].
        target: &'a Path,
        /// The maps that earlier passes recorded; this pass adds its own.
        known: &'a Known,
    },
    /// FALLOC_FL_UNSHARE_RANGE of shared blocks, in pieces of at most 4 MiB. Afterwards the file
    /// shares no block of the range with another, and holes stay holes. Concurrent writers are safe
    /// but wait for each piece.
    Unshare {
        /// The image.
        path: &'a Path,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// Copies the data of a range from one image to another on any file system; holes stay holes.
    /// The result is not yet durable.
    CopyRange {
        /// The image.
        source: &'a Path,
        /// The copy; it exists and is long enough.
        target: &'a Path,
        /// The first byte, in both images.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// Writes a range of an image that is filled from elsewhere. Outside the pieces and the zeros the
    /// image keeps what it has. The result is not yet durable.
    WriteRange {
        /// The image; it exists and is long enough.
        target: &'a Path,
        /// The first byte of the range.
        offset: u64,
        /// Bytes of the range.
        length: u64,
        /// The data within the range, in ascending order.
        pieces: &'a [Piece],
        /// The parts of the range that read as zeros afterwards. Blocks are freed where possible.
        zeros: &'a [Range<u64>],
    },
    /// Gives the btrfs in a detached image a new fsid, so that it can be mounted while the file
    /// system from which it was copied is mounted too. The log tree that fsync wrote is kept. A
    /// crash leaves the old fsid or the new one (with checksums other than crc32c, an image that
    /// must not be used).
    RenewFsId {
        image: &'a Path,
        /// The new fsid.
        uuid: Uuid,
    },
    /// LOOP_CONFIGURE.
    AttachLoop(LoopSpec<'a>),
    /// LOOP_CLR_FD, only if the device's backing file is still `backing`.
    DetachLoop {
        /// N of /dev/loopN.
        number: u32,
        /// The expected backing file.
        backing: FileId,
    },
    /// LOOP_CLR_FD of a device whose status cannot be read because the file system of its image is
    /// dead. It is detached only if the status still fails that way and the image's path ends with
    /// `name`.
    DetachDeadLoop {
        /// N of /dev/loopN.
        number: u32,
        /// The end of the image's path.
        name: &'a Path,
    },
    /// LOOP_SET_CAPACITY: sets the size of the device to that of its image.
    ResizeLoop {
        /// N of /dev/loopN.
        number: u32,
    },
    /// LOOP_SET_DIRECT_IO: makes the device bypass the pool's page cache again.
    SetDirectIo {
        /// N of /dev/loopN.
        number: u32,
    },
    /// Sets discard_max_bytes of the queue to 0, so that nothing above the device can free reserved
    /// blocks. A mapped device gets the limit of its table again with each table.
    DisableDiscard { device: &'a Device },
    /// Removes and re-creates a free loop device, so that the next user of its number does not
    /// inherit the discard limit set by [`Effect::DisableDiscard`]. A device in use is left alone.
    RecreateLoop {
        /// N of /dev/loopN.
        number: u32,
    },
    /// mkfs.
    Format {
        device: &'a Device,
        /// The file system to create.
        fs: FsType,
        uuid: Uuid,
        /// Additional arguments, already checked.
        options: &'a [String],
        /// Do not discard the device first, as for thick volumes.
        keep_blocks: bool,
    },
    /// Checks an unmounted file system with its own tool (e2fsck, xfs_repair, btrfs check); the
    /// tool is never killed. Returns [`Done::Checked`]. An error means that the tool could not run,
    /// or, for [`Check::Preen`] and [`Check::Whole`], that it could not repair what it found.
    CheckFs {
        device: &'a Device,
        /// The type of the file system.
        fs: FsType,
        /// What to check, and whether to repair.
        how: Check,
    },
    /// Grows a mounted file system to the size of its device.
    GrowFs {
        device: &'a Device,
        /// Its mount point (a CSI path).
        mount_point: &'a Path,
        /// The type of the file system.
        fs: FsType,
    },
    /// Grows an unmounted ext4 file system to the size of its device (resize2fs). It must follow a
    /// [`Check::Whole`]; the program is never killed. If a crash interrupts it, a [`Check::Repair`]
    /// is needed.
    GrowUnmounted { device: &'a Device },
    /// Creates the last component of a CSI path: a directory, or an empty file on which a device is
    /// bind-mounted. An existing one of the same kind is success.
    MakeTarget {
        /// The CSI path.
        path: &'a Path,
        /// Directory or file.
        kind: NodeKind,
    },
    /// Removes the last component of a CSI path: an empty directory or an empty file; success if it
    /// does not exist.
    RemoveTarget {
        /// The CSI path.
        path: &'a Path,
    },
    /// Mounts a file system.
    Mount(MountSpec<'a>),
    /// Bind-mounts one CSI path on another.
    Bind {
        /// The path to be shown (a CSI path).
        source: &'a Path,
        /// The mount point (a CSI path).
        target: &'a Path,
        /// Make the bind mount read-only before it becomes visible.
        read_only: bool,
    },
    /// Bind-mounts a device node on a file at a CSI path.
    BindDevice {
        /// The device; the node at its path must have its number.
        device: &'a Device,
        /// The mount point (a CSI path of a file).
        target: &'a Path,
    },
    /// Unmounts the topmost mount at a CSI path, never lazily and never by force.
    Unmount {
        /// The CSI path.
        target: &'a Path,
    },
    /// Writes bytes to a device, past the page cache and durably. This process has claimed the device
    /// ([`super::Host::claim_mapped`]). A crash may leave a part of the bytes.
    WriteBlocks {
        device: &'a Device,
        /// A multiple of 4096.
        offset: u64,
        /// Their number is a multiple of 4096.
        bytes: &'a [u8],
    },
    /// Writes zeros to a device from an offset (a multiple of 4096) to its end, in this order and
    /// durably, so that each of these blocks is allocated.
    FillWithZeros { device: &'a Device, from: u64 },
    /// Reads a range of a device and writes the same again. A thin device then has a block of its own
    /// wherever it had none or shared one; it is durable after [`Effect::SyncFile`]. No other process
    /// writes there until it returns.
    Rewrite {
        device: &'a Device,
        /// In multiples of 4096.
        range: &'a Range<u64>,
    },
    /// Sends a message to a thin pool.
    ThinMessage {
        /// The name of the pool.
        pool: &'a str,
        message: ThinMessage,
    },
    /// Creates a snapshot of a thin device. EEXIST if the ID is taken, ENODATA if the origin does not
    /// exist, EAGAIN while the pool is suspended. Devices that show the origin must be suspended,
    /// otherwise writes that are on their way reach the snapshot as well: the kernel does not check
    /// this, so the host refuses it. Allocates nothing, except after an error.
    CreateThinSnapshot { prepared: &'a PreparedThinSnapshot },
    /// Creates a mapped device without a table. EBUSY if one with this UUID exists. Its number is one
    /// that no mount shows.
    CreateMapped {
        /// Its UUID, which is also its name.
        uuid: &'a str,
    },
    /// Loads a table into a mapped device, which uses it from the next [`Effect::ResumeMapped`] on.
    LoadTable {
        /// The UUID of the device.
        uuid: &'a str,
        table: &'a ThinTable,
        /// The device is read-only with this table.
        read_only: bool,
    },
    /// Like [`Effect::LoadTable`], for a table that shows another block device. EINVAL if the lower
    /// device is shorter than the table, or the table is too short for its two targets; ENXIO if the
    /// lower device does not exist.
    LoadLinear {
        /// The UUID of the device.
        uuid: &'a str,
        table: &'a LinearTable,
        /// The device is read-only with this table.
        read_only: bool,
    },
    /// Switches a mapped device to the table that was loaded last, and lets its I/O continue.
    ResumeMapped {
        /// The UUID of the device.
        uuid: &'a str,
    },
    /// Drops the table that the next [`Effect::ResumeMapped`] would switch to. It is success if there
    /// is none.
    ClearTable {
        /// The UUID of the device.
        uuid: &'a str,
    },
    /// Removes a mapped device, at once or when its last opener closes it. It is success if it does
    /// not exist.
    RemoveMapped {
        /// The UUID of the device.
        uuid: &'a str,
    },
    /// Starts a session without waiting for it. The session ends when this process ends.
    StartSession(SessionSpec<'a>),
}

/// How to attach an image.
#[derive(Clone, Copy, Debug)]
pub struct LoopSpec<'a> {
    pub image: &'a Path,
    /// The file that the opened image must be.
    pub backing: FileId,
    /// Logical block size.
    pub block_size: u32,
    /// Detach when the last opener closes the device (for mounted volumes).
    pub autoclear: bool,
    /// Attach read-only.
    pub read_only: bool,
}

/// How to mount a device.
#[derive(Clone, Copy, Debug)]
pub struct MountSpec<'a> {
    /// The device, which the caller holds open.
    pub device: &'a Device,
    /// The mount point: a CSI path of a directory.
    pub target: &'a Path,
    /// The type of the file system.
    pub fs: FsType,
    /// Options from the CO, checked by [`crate::model::mount_option`].
    pub options: &'a [String],
    /// Mount read-only.
    pub read_only: bool,
}

/// How a file system is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// Repairs what can be repaired without a decision by a person: `e2fsck -p`. ext4 only.
    Preen,
    /// Like [`Check::Preen`], but also if the file system is marked clean: `e2fsck -fp`. ext4 only.
    Whole,
    /// Reads the whole file system and changes nothing.
    Look,
    /// Repairs everything that it finds; files without a parent directory go to lost+found.
    Repair,
}

/// What a check found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked {
    /// The file system has no error left.
    pub sound: bool,
    /// The output of the program.
    pub report: String,
}

/// The kind of the last component of a CSI path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeKind {
    Dir,
    /// An empty file.
    File,
}

/// The result of an effect.
#[derive(Debug)]
pub enum Done {
    /// No result.
    Plain,
    /// AttachLoop: the device, held open.
    Loop(LoopHold),
    /// CloneWhole and ClonePreFreeze: the number of extents of the copy. CloneDelta: the number of
    /// ranges that differed.
    Cloned(u64),
    /// CheckFs: the result of the check.
    Checked(Checked),
    /// StartSession: the session.
    Session(Box<dyn Session>),
}

impl Effect<'_> {
    /// A short name, used in logs, metrics and fault injection.
    pub fn name(&self) -> &'static str {
        match self {
            Effect::MakeDir { .. } => "make_dir",
            Effect::WriteFile { .. } => "write_file",
            Effect::SyncFile { .. } => "sync_file",
            Effect::SyncDir { .. } => "sync_dir",
            Effect::SyncAll { .. } => "sync_all",
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
            Effect::WriteRange { .. } => "write_range",
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
            Effect::WriteBlocks { .. } => "write_blocks",
            Effect::FillWithZeros { .. } => "fill_with_zeros",
            Effect::Rewrite { .. } => "rewrite",
            Effect::ThinMessage { message, .. } => message.name(),
            Effect::CreateThinSnapshot { .. } => "create_snap",
            Effect::CreateMapped { .. } => "create_mapped",
            Effect::LoadTable { .. } => "load_table",
            Effect::LoadLinear { .. } => "load_linear",
            Effect::ResumeMapped { .. } => "resume_mapped",
            Effect::ClearTable { .. } => "clear_table",
            Effect::RemoveMapped { .. } => "remove_mapped",
            Effect::StartSession(_) => "start_session",
        }
    }
}
