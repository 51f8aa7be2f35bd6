//! Loop devices, attached with LOOP_CONFIGURE only: it sets everything at once, whereas between
//! LOOP_SET_FD and LOOP_SET_STATUS64 the device exists without its flags (and the latter drops
//! autoclear).
//!
//! The backing file of a loop device is what LOOP_GET_STATUS64 returns while the device is open.
//! Its lo_device is the kernel's dev_t in the same encoding as st_dev, on xfs, on ext4, and on
//! btrfs (where it is the anonymous number); the tests compare them.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::AtFlags;
use nix::libc;
use nix::unistd::{AccessFlags, faccessat};

use super::files::failed;
use super::{mounts, sys};
use crate::error::HostError;
use crate::host::question::TimedQueries;
use crate::host::{Device, FileId, LoopDevice, LoopHold, LoopSpec, LoopStatus, Result};

const CONTROL: &str = "/dev/loop-control";

const LO_FLAGS_READ_ONLY: u32 = 1;
const LO_FLAGS_AUTOCLEAR: u32 = 4;
const LO_FLAGS_PARTSCAN: u32 = 8;
const LO_FLAGS_DIRECT_IO: u32 = 16;

/// Two processes may get the same free number, and only one of them can attach it. With n
/// contenders, the unluckiest needs n attempts.
const ATTACH_TRIES: u32 = 256;
/// After this many failed attempts, every other one uses a new device: the number that the kernel
/// offers may be unusable (claimed without a backing file, or being removed).
const TRIES_BEFORE_NEW_DEVICE: u32 = 24;
/// devtmpfs creates a node at once, but udev in a container's own /dev may create it late.
const NODE_TRIES: u32 = 500;
const NODE_WAIT: Duration = Duration::from_millis(10);
/// Maximum number of unused devices with a discard limit that are kept.
const LIMITED_KEPT: usize = 16;
/// A healthy file system returns the identity of an open file within microseconds.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);

fn control() -> Result<File> {
    let path = Path::new(CONTROL);
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .map_err(failed("open", path))
}

fn queue_file(number: u32, name: &str) -> PathBuf {
    PathBuf::from(format!("/sys/block/loop{number}/queue/{name}"))
}

fn queue_value(number: u32, name: &str) -> Option<u64> {
    let text = std::fs::read_to_string(queue_file(number, name)).ok()?;
    text.trim().parse().ok()
}

/// Opens a block device and verifies that its node has the right number. Symbolic links are
/// followed (LVM names its devices by them): /dev belongs to root, and the number is the proof.
pub(super) fn open_verified(device: &Device) -> Result<File> {
    open_node(device, libc::O_RDONLY)
}

/// Like [`open_verified`], but with O_PATH, for a bind mount.
pub(super) fn open_verified_path(device: &Device) -> Result<File> {
    open_node(device, libc::O_PATH)
}

/// Opens a device for direct I/O.
pub(super) fn open_direct(device: &Device, write: bool) -> Result<File> {
    let access = if write { libc::O_RDWR } else { libc::O_RDONLY };
    open_node(device, access | libc::O_DIRECT)
}

/// Opens a device exclusively: EBUSY if it is claimed.
pub(super) fn open_exclusive(device: &Device) -> Result<File> {
    open_node(device, libc::O_EXCL)
}

fn open_node(device: &Device, flags: libc::c_int) -> Result<File> {
    let path = &device.path;
    let write = flags & libc::O_ACCMODE == libc::O_RDWR;
    let file = OpenOptions::new()
        .read(true)
        .write(write)
        .custom_flags(flags | libc::O_NONBLOCK)
        .open(path)
        .map_err(failed("open", path))?;
    let found = file.metadata().map_err(failed("stat", path))?;
    if !found.file_type().is_block_device() || found.rdev() != device.rdev {
        let what = format!("it is not the block device {}", number_text(device.rdev));
        return Err(HostError::unexpected("open", path, what));
    }
    Ok(file)
}

fn number_text(rdev: u64) -> String {
    use nix::sys::stat::{major, minor};
    format!("{}:{}", major(rdev), minor(rdev))
}

/// Attaches an image to a free loop device.
pub(super) fn attach(spec: &LoopSpec<'_>) -> Result<LoopHold> {
    attach_file(&open_image(spec)?, spec)
}

/// Like [`attach`], with the open file of the image; the path is a name for people.
pub(super) fn attach_file(image: &File, spec: &LoopSpec<'_>) -> Result<LoopHold> {
    let control = control()?;
    // A process that still has such a node bind-mounted, or has created a copy in a container,
    // would get access to the image that is attached to its number.
    let shown = mounts::shown_loops()?;
    for turn in 0..ATTACH_TRIES {
        let number = match turn > TRIES_BEFORE_NEW_DEVICE && turn % 2 == 0 {
            true => new_number(&control, &shown)?,
            false => pick(&control, turn, &shown)?,
        };
        let Some(device) = wait_for_node(number)? else {
            pause(turn);
            continue;
        };
        let mut info = sys::LoopInfo::zeroed();
        info.flags = LO_FLAGS_DIRECT_IO
            | (u32::from(spec.autoclear) * LO_FLAGS_AUTOCLEAR)
            | (u32::from(spec.read_only) * LO_FLAGS_READ_ONLY);
        name_for_people(spec.image, &mut info.file_name);
        match sys::loop_configure(&device, image.as_fd(), spec.block_size, info) {
            Ok(()) => return hold_attached(number, spec),
            // Another process attached this number first.
            Err(Errno::EBUSY) => pause(turn),
            Err(errno) => return Err(HostError::errno("attach", spec.image, errno)),
        }
    }
    let what = format!(
        "other processes took every loop device that the kernel offered in {ATTACH_TRIES} attempts"
    );
    Err(HostError::unexpected("attach", spec.image, what))
}

/// Waits longer with each attempt, so that contenders do not stay in step.
fn pause(turn: u32) {
    thread::sleep(Duration::from_millis(u64::from(turn.min(20))));
}

fn open_image(spec: &LoopSpec<'_>) -> Result<File> {
    let image = super::files::open_existing(spec.image, !spec.read_only)?;
    let found = image.metadata().map_err(failed("stat", spec.image))?;
    let id = FileId {
        device: found.dev(),
        inode: found.ino(),
    };
    if id != spec.backing || !found.is_file() {
        let what = format!("it is {id:?} instead of the expected {:?}", spec.backing);
        return Err(HostError::unexpected("attach", spec.image, what));
    }
    Ok(image)
}

/// A discard limit of 0 stays with the number after its image is detached, and the kernel does not
/// allow raising it again: a later volume on this number could never be trimmed.
fn is_limited(number: u32) -> bool {
    queue_value(number, "discard_max_bytes") == Some(0)
        && queue_value(number, "discard_max_hw_bytes").is_some_and(|bytes| bytes > 0)
}

/// Creates a device with a new number that no mount shows.
fn new_number(control: &File, shown: &BTreeSet<u32>) -> Result<u32> {
    loop {
        let number = sys::loop_add(control, None)
            .map_err(|errno| HostError::errno("create a loop device in", CONTROL, errno))?;
        if !shown.contains(&number) {
            return Ok(number);
        }
    }
}

/// Picks the number to attach to: the kernel's free one, unless a mount still shows it or it has a
/// leftover discard limit.
///
/// Only removing a device clears the limit, and a process that has just been given its number would
/// find it gone. So another free number is taken, or a new one created. Only when many limited
/// devices have accumulated are they re-created, and never the one that the kernel currently offers
/// to all processes.
fn pick(control: &File, turn: u32, shown: &BTreeSet<u32>) -> Result<u32> {
    let failed = |errno| HostError::errno("find a free loop device in", CONTROL, errno);
    let offered = sys::loop_free(control).map_err(failed)?;
    if !is_limited(offered) && !shown.contains(&offered) {
        return Ok(offered);
    }
    let (limited, free): (Vec<u32>, Vec<u32>) = numbers(false)?
        .into_iter()
        .filter(|number| *number != offered && !shown.contains(number))
        .partition(|number| is_limited(*number));
    if limited.len() >= LIMITED_KEPT {
        limited
            .into_iter()
            .for_each(|number| make_new(control, number));
    }
    match free.get(turn as usize % free.len().max(1)) {
        Some(number) => Ok(*number),
        None => new_number(control, shown),
    }
}

/// Re-creates a free device if it has a discard limit.
pub(super) fn renew(number: u32) -> Result<()> {
    if is_limited(number) {
        make_new(&control()?, number);
    }
    Ok(())
}

/// A failure is harmless: the device is in use by now (EBUSY), or another process has created it
/// again (EEXIST).
fn make_new(control: &File, number: u32) {
    if sys::loop_remove(control, number).is_ok() {
        let _ = sys::loop_add(control, Some(number));
    }
}

/// Opens the node of a number, after waiting a little for it; `None` if the device was removed
/// again.
fn wait_for_node(number: u32) -> Result<Option<File>> {
    let device = Device::of_loop(number);
    for _ in 0..NODE_TRIES {
        let error = match open_node(&device, libc::O_RDWR) {
            Ok(file) => return Ok(Some(file)),
            Err(error) => error,
        };
        match error.code() {
            Some(Errno::ENOENT) => thread::sleep(NODE_WAIT),
            Some(Errno::ENXIO | Errno::ENODEV | Errno::EBUSY) => return Ok(None),
            _ => return Err(error),
        }
    }
    let what = "the kernel created the loop device, but its device node does not appear; is /dev the host's /dev?";
    Err(HostError::unexpected("open", device.path, what))
}

/// Stores the end of the image's path, for `losetup`; nothing relies on it.
fn name_for_people(image: &Path, name: &mut [u8; 64]) {
    let bytes = image.as_os_str().as_bytes();
    let tail = &bytes[bytes.len().saturating_sub(name.len() - 1)..];
    name[..tail.len()].copy_from_slice(tail);
}

/// Replaces the descriptor that configured the device by a read-only one: a kernel that protects
/// mounted devices refuses to mount a device that is open for writing.
fn hold_attached(number: u32, spec: &LoopSpec<'_>) -> Result<LoopHold> {
    let Some((keep, info)) = open_attached(number, spec.backing)? else {
        let what = "another process detached the loop device immediately";
        return Err(HostError::unexpected("attach", spec.image, what));
    };
    if info.flags & LO_FLAGS_DIRECT_IO == 0 {
        tracing::warn!(
            number, image = %spec.image.display(), block_size = spec.block_size,
            "attached a loop device without direct I/O, which this image and block size do not allow; it uses the pool's page cache"
        );
    }
    Ok(held(number, keep))
}

fn held(number: u32, keep: OwnedFd) -> LoopHold {
    LoopHold {
        number,
        keep: Box::new(keep),
    }
}

/// Opens a loop device and reads its status; `None` if its backing file is another one, or if it
/// has none.
fn open_attached(number: u32, backing: FileId) -> Result<Option<(OwnedFd, sys::LoopInfo)>> {
    Ok(ask(number)?.filter(|(_, info)| backing_of(info) == backing))
}

fn backing_of(info: &sys::LoopInfo) -> FileId {
    FileId {
        device: info.device,
        inode: info.inode,
    }
}

/// Reads the status of a loop device. The kernel asks the image's file system for it, which may
/// hang.
fn ask(number: u32) -> Result<Option<(OwnedFd, sys::LoopInfo)>> {
    static QUESTIONS: TimedQueries<u32> = TimedQueries::new();
    let answer = QUESTIONS.ask(number, STATUS_TIMEOUT, move || open_any(number));
    answer.unwrap_or_else(|| {
        let path = Device::of_loop(number).path;
        Err(HostError::no_answer("query the image of", path))
    })
}

fn open_any(number: u32) -> Result<Option<(OwnedFd, sys::LoopInfo)>> {
    let device = Device::of_loop(number);
    let opened = match open_verified(&device) {
        Ok(file) => file,
        Err(error)
            if matches!(
                error.code(),
                Some(Errno::ENOENT | Errno::ENXIO | Errno::ENODEV)
            ) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    match sys::loop_status(&opened) {
        Ok(info) => Ok(Some((opened.into(), info))),
        Err(Errno::ENXIO) => Ok(None),
        Err(errno) => Err(HostError::errno("query the image of", device.path, errno)),
    }
}

pub(super) fn hold(number: u32, backing: FileId) -> Result<Option<LoopHold>> {
    Ok(open_attached(number, backing)?.map(|(keep, _)| held(number, keep)))
}

/// Detaches the device, unless it is no longer attached to this image.
pub(super) fn detach(number: u32, backing: FileId) -> Result<()> {
    let Some((device, _)) = open_attached(number, backing)? else {
        return Ok(());
    };
    clear(number, &device)
}

/// While the descriptor is open, the number cannot be reused for another image.
fn clear(number: u32, device: impl AsFd) -> Result<()> {
    match sys::loop_clear(device) {
        Ok(()) | Err(Errno::ENXIO) => Ok(()),
        Err(errno) => Err(HostError::errno(
            "detach",
            Device::of_loop(number).path,
            errno,
        )),
    }
}

/// Detaches a device whose image lies on a dead file system, unless the file system turns out to be
/// alive.
pub(super) fn detach_dead(number: u32, name: &Path) -> Result<()> {
    let opened = match open_verified(&Device::of_loop(number)) {
        Ok(file) => file,
        Err(error) if matches!(error.code(), Some(Errno::ENOENT | Errno::ENXIO)) => return Ok(()),
        Err(error) => return Err(error),
    };
    let is_dead = matches!(ask(number), Err(error) if error.is_dead_disk());
    if is_dead && image_name(number).is_some_and(|shown| shown.ends_with(name)) {
        clear(number, opened)?;
    }
    Ok(())
}

/// Turns direct I/O on again.
pub(super) fn set_direct_io(number: u32) -> Result<()> {
    let device = Device::of_loop(number);
    sys::loop_set_direct_io(open_verified(&device)?)
        .map_err(|errno| HostError::errno("set direct I/O of", device.path, errno))
}

pub(super) fn resize(number: u32) -> Result<()> {
    let device = Device::of_loop(number);
    sys::loop_set_capacity(open_verified(&device)?)
        .map_err(|errno| HostError::errno("resize", device.path, errno))
}

/// Prevents holes in the image from being punched through this loop device. With a discard limit of
/// 0 the loop driver refuses fallocate altogether: not only discards (fstrim, mkfs, `-o discard`),
/// but also the write-zeroes by which ext4 initializes its tables lazily, which would punch holes
/// too.
pub(super) fn forbid_discard(device: &Device) -> Result<()> {
    let number = number_text(device.rdev);
    let path = PathBuf::from(format!("/sys/dev/block/{number}/queue/discard_max_bytes"));
    OpenOptions::new()
        .write(true)
        .open(&path)
        .and_then(|mut file| file.write_all(b"0"))
        .map_err(failed("write", &path))?;
    let found = std::fs::read_to_string(&path).map_err(failed("read", &path))?;
    match found.trim() {
        "0" => Ok(()),
        other => {
            let what = format!("it reads {other:?} after 0 was written");
            Err(HostError::unexpected("write", path, what))
        }
    }
}

/// The numbers of all loop devices that are attached, or of all that are not. Nearly every call
/// needs this list, and numbers accumulate because the kernel never removes them; so each costs
/// only one access(2), relative to the directory to which the links of /sys/block lead.
fn numbers(attached: bool) -> Result<Vec<u32>> {
    let path = Path::new("/sys/devices/virtual/block");
    let folder = File::open(path).map_err(failed("open", path))?;
    let mut numbers = Vec::new();
    for entry in std::fs::read_dir(path).map_err(failed("list", path))? {
        let name = entry.map_err(failed("list", path))?.file_name();
        let Some(name) = name.to_str() else { continue };
        let Some(number) = name
            .strip_prefix("loop")
            .and_then(|number| number.parse::<u32>().ok())
        else {
            continue;
        };
        // Only an attached loop device has this directory.
        let inner = format!("{name}/loop");
        let found = faccessat(&folder, inner.as_str(), AccessFlags::F_OK, AtFlags::empty());
        if found.is_ok() == attached {
            numbers.push(number);
        }
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// The attached loop devices whose image name `may_be` accepts, by number. Devices that disappear
/// while the list is built are left out.
pub(super) fn list(may_be: &dyn Fn(&Path) -> bool) -> Result<Vec<LoopDevice>> {
    let mut devices = Vec::new();
    for number in numbers(true)? {
        let image = image_name(number);
        if image.as_ref().is_some_and(|name| !may_be(name)) {
            continue;
        }
        let status = match ask(number) {
            Ok(None) => continue,
            Ok(Some((_, info))) => Ok(status_of(number, &info)),
            Err(error) => Err(error),
        };
        devices.push(LoopDevice {
            number,
            image: image.unwrap_or_default(),
            status,
        });
    }
    Ok(devices)
}

fn status_of(number: u32, info: &sys::LoopInfo) -> LoopStatus {
    LoopStatus {
        number,
        backing: backing_of(info),
        offset: info.offset,
        size_limit: info.size_limit,
        read_only: info.flags & LO_FLAGS_READ_ONLY != 0,
        autoclear: info.flags & LO_FLAGS_AUTOCLEAR != 0,
        direct_io: info.flags & LO_FLAGS_DIRECT_IO != 0,
        partscan: info.flags & LO_FLAGS_PARTSCAN != 0,
    }
}

/// The status of one device.
pub(super) fn status(number: u32) -> Result<Option<LoopStatus>> {
    Ok(ask(number)?.map(|(_, info)| status_of(number, &info)))
}

/// The path of a loop device's image as the kernel shows it, which it does without asking the
/// image's file system. `None` if it is not known (it is too long, or the device is just being
/// detached).
fn image_name(number: u32) -> Option<PathBuf> {
    let path = format!("/sys/block/loop{number}/loop/backing_file");
    let shown = std::fs::read(path).ok()?;
    let name = shown.strip_suffix(b"\n").unwrap_or(&shown);
    let name = name.strip_suffix(b" (deleted)").unwrap_or(name);
    (!name.is_empty()).then(|| OsStr::from_bytes(name).into())
}

pub(super) fn bytes(device: &Device) -> Result<u64> {
    sys::block_bytes(open_verified(device)?)
        .map_err(|errno| HostError::errno("read the size of", &device.path, errno))
}

/// A mounted file system claims its device, as does a frozen one that was unmounted.
pub(super) fn is_claimed(device: &Device) -> Result<bool> {
    match open_exclusive(device) {
        Ok(_) => Ok(false),
        Err(error) => match error.code() {
            Some(Errno::EBUSY) => Ok(true),
            // The kernel removes a mapped device when its last opener closes it.
            Some(Errno::ENOENT | Errno::ENXIO) if is_gone(device) => Ok(false),
            _ => Err(error),
        },
    }
}

/// Whether the kernel has no block device with this number any more. A missing node does not tell: a
/// container may have a /dev of its own. The kernel removes the node a moment before the number.
fn is_gone(device: &Device) -> bool {
    let entry = Path::new("/sys/dev/block").join(number_text(device.rdev));
    (0..NODE_TRIES).any(|tried| {
        thread::sleep(NODE_WAIT * tried.min(1));
        matches!(entry.try_exists(), Ok(false))
    })
}

/// Describes what is missing if the control device cannot be used.
pub(super) fn missing() -> Option<String> {
    match control() {
        Ok(_) => None,
        Err(error) => Some(format!(
            "{}; load the module (modprobe loop), and mount the host's /dev into the container",
            crate::error::chain(&error)
        )),
    }
}
