//! Mounts: reading the mount table, mounting a device, bind mounts, unmounting.
//!
//! File systems are mounted with sys-mount. Bind mounts do not use mount(2): a detached copy of the
//! mount is created, made read-only if required, and only then attached, so that at no moment, nor
//! after a crash, a writable mount exists where a read-only one was requested. Unmounting uses nix:
//! the `NOFOLLOW` of sys-mount is O_NOFOLLOW, which umount2 refuses.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::mount::{MntFlags, MsFlags, umount2};
use nix::sched::CloneFlags;
use nix::sys::stat::{major, makedev, minor};
use sys_mount::MountFlags;

use super::files::failed;
use super::program::FOLDERS;
use super::target_path::Folders;
use super::{loop_device, sys};
use crate::error::HostError;
use crate::host::{Device, FileKind, LOOP_MAJOR, Mount, MountSpec, Result, mountinfo};
use crate::model::mount_option;

/// The table of this thread's mount namespace, because a thread may have its own.
const TABLE: &str = "/proc/thread-self/mountinfo";
/// The names of all drivers of devices, with their major numbers.
const DEVICE_NUMBERS: &str = "/proc/devices";
/// Maximum number of times the table is read. The kernel shows it in pages, between which it may
/// change; then it is read again. Mounts that do not change are shown correctly in any case.
const TABLE_READS: u32 = 16;
/// How often an unmount is retried while the mount is busy for a reason that ends by itself.
const BUSY_TRIES: u32 = 60;
const BUSY_RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// Exists if the kernel has SELinux and it is enabled.
const SELINUX: &str = "/sys/fs/selinux/enforce";

/// Reads the mount table of the kernel.
pub(super) fn table() -> Result<Vec<Mount>> {
    let path = Path::new(TABLE);
    let mut file = File::open(path).map_err(failed("open", path))?;
    let mut text = Vec::new();
    for _ in 0..TABLE_READS {
        text.clear();
        file.rewind().map_err(failed("read", path))?;
        file.read_to_end(&mut text).map_err(failed("read", path))?;
        if !sys::has_mount_table_changed(&file) {
            break;
        }
    }
    let mut mounts = mountinfo::parse(&text)
        .map_err(|error| HostError::unexpected("read", path, error.to_string()))?;
    // Only root creates nodes there; a pod can create a node with any number on a tmpfs of its own.
    let devices = std::fs::metadata("/dev").ok().map(|found| found.dev());
    for mount in &mut mounts {
        if mount.fs_name == "btrfs" {
            mount.disk = source_device(mount);
        }
        if mount.fs_name == "devtmpfs" || Some(mount.device) == devices {
            mount.node = bound_node(mount);
        }
    }
    Ok(mounts)
}

/// The number of the device at the path in the source of a mount. Neither the directory nor a link in
/// it is on a disk, so this does not wait.
fn source_device(mount: &Mount) -> Option<u64> {
    if !mount.source.starts_with("/dev") {
        return None;
    }
    let found = std::fs::metadata(&mount.source).ok()?;
    found.file_type().is_block_device().then(|| found.rdev())
}

/// The number of the device node that a mount shows, if it shows one. Another mount may cover it, so
/// it is read from the node itself only where the name says nothing.
fn bound_node(mount: &Mount) -> Option<u64> {
    let kinds = ["devtmpfs", "tmpfs"];
    if !kinds.contains(&mount.fs_name.as_str()) || mount.root == Path::new("/") {
        return None;
    }
    if mount.fs_name == "devtmpfs"
        && let Some(rdev) = mount.root.to_str().and_then(number_of_name)
    {
        return Some(rdev);
    }
    let found = std::fs::symlink_metadata(&mount.mount_point).ok()?;
    let is_shown = found.dev() == mount.device && found.file_type().is_block_device();
    is_shown.then(|| found.rdev())
}

/// The number of a loop device or mapped device by the path of its node in devtmpfs, where the kernel
/// chooses the names, also of a node that is gone.
fn number_of_name(root: &str) -> Option<u64> {
    let name = root.trim_end_matches("//deleted");
    if let Some(number) = name.strip_prefix("/loop") {
        return Some(Device::of_loop(number.parse().ok()?).rdev);
    }
    let minor: u32 = name.strip_prefix("/dm-")?.parse().ok()?;
    Some(makedev(mapper_major()?, minor.into()))
}

/// The major number of mapped devices, which the kernel chooses when it loads the device mapper. It
/// does not change while there are any.
fn mapper_major() -> Option<u64> {
    static MAJOR: OnceLock<u64> = OnceLock::new();
    if let Some(major) = MAJOR.get() {
        return Some(*major);
    }
    let major = major_in(&std::fs::read_to_string(DEVICE_NUMBERS).ok()?)?;
    Some(*MAJOR.get_or_init(|| major))
}

fn major_in(devices: &str) -> Option<u64> {
    let mut pairs = devices
        .lines()
        .filter_map(|line| line.trim().split_once(' '));
    let (major, _) = pairs.find(|(_, name)| *name == "device-mapper")?;
    major.parse().ok()
}

/// Numbers of the loop devices whose node is bind-mounted, whether they are attached or not and
/// whichever process mounted the node.
pub(super) fn shown_loops() -> Result<BTreeSet<u32>> {
    let shown = shown_devices()?.into_iter();
    Ok(shown
        .filter(|rdev| major(*rdev) == LOOP_MAJOR)
        .filter_map(|rdev| u32::try_from(minor(rdev)).ok())
        .collect())
}

/// The same for devices of all kinds.
pub(super) fn shown_devices() -> Result<BTreeSet<u64>> {
    let mounts = table()?;
    Ok(mounts.iter().filter_map(bound_node).collect())
}

/// The mount table with CSI paths spelled as callers spell them: where an allowed directory is a
/// symbolic link or lies behind one, the kernel shows another path for what is mounted below it.
pub(super) fn table_for_callers(folders: &Folders) -> Result<Vec<Mount>> {
    let mut mounts = table()?;
    let behind_links: Vec<(PathBuf, &PathBuf)> = folders
        .allowed
        .iter()
        .chain(&folders.own)
        .filter_map(|spelled| Some((std::fs::canonicalize(spelled).ok()?, spelled)))
        .filter(|(real, spelled)| real != *spelled)
        .collect();
    for mount in &mut mounts {
        for (real, spelled) in &behind_links {
            if let Ok(rest) = mount.mount_point.strip_prefix(real)
                && !rest.as_os_str().is_empty()
            {
                mount.mount_point = spelled.join(rest);
                break;
            }
        }
    }
    Ok(mounts)
}

fn by_fd(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Mounts a device by its own path, which then appears in the mount table. That is safe because
/// /dev belongs to root and the caller of this effect holds the loop device open.
#[expect(clippy::disallowed_methods, reason = "the only place that mounts")]
pub(super) fn mount(folders: &Folders, spec: &MountSpec<'_>) -> Result<()> {
    let device = loop_device::open_verified(spec.device)?;
    let (target, _) = folders
        .place("mount", spec.target)?
        .open("mount", &[FileKind::Dir])?;
    let selinux = Path::new(SELINUX).exists();
    let (flags, data) = split_options(spec.options, spec.read_only, selinux);
    let mounted = sys_mount::Mount::builder()
        .fstype(spec.fs.name())
        .flags(flags)
        .data(&data)
        .mount(&spec.device.path, by_fd(&target));
    drop(device);
    match mounted {
        Ok(_) => Ok(()),
        Err(error) if sys::errno_of(&error) == Errno::EINVAL => Err(explain(spec, selinux)),
        Err(error) => Err(HostError::io("mount", spec.target, &error)),
    }
}

/// Converts options to the flags and the data of mount(2).
fn split_options(options: &[String], read_only: bool, selinux: bool) -> (MountFlags, String) {
    let mut flags = MountFlags::empty();
    let mut data: Vec<String> = Vec::new();
    for option in options {
        if let Some((flag, set)) = flag_of(option) {
            flags.set(flag, set);
        } else if mount_option::is_label(option) {
            // mount(8) does the same: without SELinux the kernel would refuse the option as
            // unknown.
            if selinux {
                data.push(quoted(option));
            }
        } else if !mount_option::is_ignored(option) {
            data.push(option.clone());
        }
    }
    if read_only {
        flags.insert(MountFlags::RDONLY);
    }
    (flags, data.join(","))
}

/// For an option that is a mount flag, the flag and whether the option sets or clears it.
fn flag_of(option: &str) -> Option<(MountFlags, bool)> {
    let lazytime = MountFlags::from_bits_retain(libc::MS_LAZYTIME);
    Some(match option {
        "ro" => (MountFlags::RDONLY, true),
        "rw" => (MountFlags::RDONLY, false),
        "nosuid" => (MountFlags::NOSUID, true),
        "suid" => (MountFlags::NOSUID, false),
        "nodev" => (MountFlags::NODEV, true),
        "dev" => (MountFlags::NODEV, false),
        "noexec" => (MountFlags::NOEXEC, true),
        "exec" => (MountFlags::NOEXEC, false),
        "noatime" => (MountFlags::NOATIME, true),
        "atime" => (MountFlags::NOATIME, false),
        "nodiratime" => (MountFlags::NODIRATIME, true),
        "diratime" => (MountFlags::NODIRATIME, false),
        "relatime" => (MountFlags::RELATIME, true),
        "norelatime" => (MountFlags::RELATIME, false),
        "strictatime" => (MountFlags::STRICTATIME, true),
        "nostrictatime" => (MountFlags::STRICTATIME, false),
        "lazytime" => (lazytime, true),
        "nolazytime" => (lazytime, false),
        "sync" => (MountFlags::SYNCHRONOUS, true),
        "async" => (MountFlags::SYNCHRONOUS, false),
        "dirsync" => (MountFlags::DIRSYNC, true),
        "mand" => (MountFlags::MANDLOCK, true),
        "nomand" => (MountFlags::MANDLOCK, false),
        "silent" => (MountFlags::SILENT, true),
        "loud" => (MountFlags::SILENT, false),
        _ => return None,
    })
}

/// Quotes the value of a label, because the kernel would split it at commas.
fn quoted(label: &str) -> String {
    match label.split_once('=') {
        Some((key, value)) if !value.starts_with('"') => format!("{key}=\"{value}\""),
        Some(_) | None => label.to_string(),
    }
}

/// EINVAL does not identify the cause, so the options are set one by one on a file system context,
/// which refuses the wrong one by name.
fn explain(spec: &MountSpec<'_>, selinux: bool) -> HostError {
    let fs = spec.fs;
    let tried = spec
        .options
        .iter()
        .filter(|option| flag_of(option).is_none() && !mount_option::is_ignored(option))
        .filter(|option| !mount_option::is_label(option) || selinux)
        .find_map(|option| refused_option(fs.name(), option));
    let text = tried.unwrap_or_else(|| {
        format!(
            "EINVAL: the device {} has no {fs} that this kernel can mount with these options{}",
            spec.device.path.display(),
            match fs {
                crate::model::FsType::Xfs =>
                    " (or a file system with the same UUID is mounted: `nouuid`)",
                _ => "",
            }
        )
    });
    HostError::unexpected("mount", spec.target, text)
}

fn refused_option(fs: &str, option: &str) -> Option<String> {
    let context = sys::open_fs(&CString::new(fs).ok()?).ok()?;
    let (key, value) = match option.split_once('=') {
        Some((key, value)) => (key, Some(CString::new(value.trim_matches('"')).ok()?)),
        None => (option, None),
    };
    let errno = sys::set_fs_option(&context, &CString::new(key).ok()?, value.as_deref()).err()?;
    // The messages of the context, one per read: "e xfs: Unknown parameter 'x'".
    let mut message = [0u8; 512];
    let length = File::from(context).read(&mut message).unwrap_or(0);
    let message = String::from_utf8_lossy(&message[..length]);
    let value = value.as_deref().map(CStr::to_string_lossy);
    let reason = refusal(&message, &value.unwrap_or_default()).unwrap_or_else(|| errno.to_string());
    let key = mount_option::key(option);
    Some(format!("{fs} rejects the mount option {key:?}: {reason}"))
}

/// The reason in the kernel's message. `None` if there is none, or if it contains the value of the
/// option: values may be sensitive, and the reason appears in an event.
fn refusal(message: &str, value: &str) -> Option<String> {
    let message = message.trim_start_matches("e ").trim();
    let contains_value = !value.is_empty() && message.contains(value);
    (!message.is_empty() && !contains_value).then(|| message.to_string())
}

/// Bind-mounts one CSI path on another.
pub(super) fn bind(folders: &Folders, source: &Path, target: &Path, read_only: bool) -> Result<()> {
    let (shown, stat) = folders
        .place("bind", source)?
        .open("bind", &[FileKind::Dir, FileKind::File])?;
    bind_open(folders, &shown, stat.kind, target, read_only)
}

/// Bind-mounts a device node on a file at a CSI path.
pub(super) fn bind_device(folders: &Folders, device: &Device, target: &Path) -> Result<()> {
    let node = loop_device::open_verified_path(device)?;
    bind_open(folders, &node, FileKind::File, target, false)
}

fn bind_open(
    folders: &Folders,
    shown: &File,
    kind: FileKind,
    target: &Path,
    read_only: bool,
) -> Result<()> {
    let (onto, _) = folders.place("bind", target)?.open("bind", &[kind])?;
    let failed = |errno| match errno {
        Errno::ENOSYS => HostError::unexpected(
            "bind",
            target,
            "the kernel lacks mount_setattr; Linux 5.12 or newer is needed",
        ),
        errno => HostError::errno("bind", target, errno),
    };
    let mount = sys::clone_mount(shown).map_err(failed)?;
    if read_only {
        sys::set_read_only(&mount).map_err(failed)?;
    }
    sys::place_mount(&mount, &onto).map_err(failed)
}

/// Unmounts the topmost mount at a CSI path. It is reached through its parent directory, since a
/// descriptor of the mount itself would keep it busy.
#[expect(clippy::disallowed_methods, reason = "the only place that unmounts")]
pub(super) fn unmount(folders: &Folders, target: &Path) -> Result<()> {
    let place = folders.place("unmount", target)?;
    let mut tries = 0;
    loop {
        match umount2(&place.by_parent(), MntFlags::UMOUNT_NOFOLLOW) {
            // A program that another thread is starting has copies of this process's descriptors,
            // including closed ones, until it executes.
            Err(Errno::EBUSY) if tries < BUSY_TRIES => {
                tries += 1;
                thread::sleep(BUSY_RETRY_INTERVAL);
            }
            other => {
                return other.map_err(|errno| HostError::errno("unmount", target, errno));
            }
        }
    }
}

/// Whether the image of a mounted loop device cannot be queried because its disk is dead or hangs.
pub(super) fn has_dead_loop_mount() -> Result<bool> {
    let loops: BTreeSet<u32> = table()?.iter().filter_map(Mount::source_loop).collect();
    Ok(loops
        .into_iter()
        .any(|number| loop_device::status(number).is_err()))
}

/// Runs `work` on a separate thread with its own mount namespace, which has no file systems on loop
/// devices; the programs that it starts inherit the namespace. This is needed for programs that
/// query every mounted device.
///
/// The namespace is a copy, and a copied mount keeps a file system in use after its unmount. So the
/// mounts of volumes are unmounted in the copy before `work` begins.
#[expect(clippy::disallowed_methods, reason = "of a copy of the table alone")]
pub(super) fn without_loops<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let root = Path::new("/");
    let apart = || {
        nix::sched::unshare(CloneFlags::CLONE_NEWNS)
            .map_err(|errno| HostError::errno("copy the mount table of", root, errno))?;
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        nix::mount::mount(None::<&str>, root, None::<&str>, private, None::<&str>)
            .map_err(|errno| HostError::errno("set the mount propagation of", root, errno))?;
        for mount in table()?.iter().rev() {
            let needed = FOLDERS
                .iter()
                .any(|folder| Path::new(folder).starts_with(&mount.mount_point));
            if mount.source_loop().is_some() && !needed {
                // A mount that stays makes the program fail as it would without this copy.
                let flags = MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW;
                if let Err(errno) = umount2(&mount.mount_point, flags) {
                    let target = mount.mount_point.display();
                    tracing::debug!(%target, %errno, "failed to unmount a copied mount");
                }
            }
        }
        work()
    };
    thread::scope(|scope| {
        let worker = thread::Builder::new().name("own-mounts".into());
        let worker = worker.spawn_scoped(scope, apart);
        let worker = worker.map_err(|error| HostError::io("start a thread for", root, &error))?;
        worker
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(words: &[&str], read_only: bool, selinux: bool) -> (MountFlags, String) {
        let options: Vec<_> = words.iter().map(|word| word.to_string()).collect();
        split_options(&options, read_only, selinux)
    }

    #[test]
    fn numbers_of_devices_are_known_by_their_names() {
        let devices =
            "Character devices:\n  1 mem\n\nBlock devices:\n  7 loop\n253 device-mapper\n";
        assert_eq!(major_in(devices), Some(253));
        assert_eq!(major_in("Block devices:\n  7 loop\n"), None);
        let third = Device::of_loop(3).rdev;
        for (root, rdev) in [
            ("/loop3", Some(third)),
            ("/loop3//deleted", Some(third)),
            ("/loop-control", None),
            ("/loop3/loop4", None),
            ("/dm-", None),
            ("/sda", None),
        ] {
            assert_eq!(number_of_name(root), rdev, "{root}");
        }
    }

    #[test]
    fn fuzz_refusals_of_mount_options() {
        let value = "k3y";
        let seeds = [
            "e xfs: Unknown parameter 'x'\n",
            "e ext4: Bad value for 'x': k3y\n",
        ];
        crate::fuzz::fuzz_text("refusals of mount options", &seeds, |message| {
            let reason = refusal(message, value)?;
            assert!(!reason.is_empty() && !reason.contains(value));
            Some(reason)
        });
    }

    #[test]
    fn known_options_become_flags_and_the_rest_goes_to_the_file_system() {
        let (flags, data) = split(
            &[
                "noatime",
                "nodev",
                "defaults",
                "commit=30",
                "x-systemd.automount",
                "discard",
            ],
            false,
            false,
        );
        assert_eq!(flags, MountFlags::NOATIME | MountFlags::NODEV);
        assert_eq!(data, "commit=30,discard");
    }

    #[test]
    fn the_last_option_wins_except_that_a_read_only_request_always_wins() {
        assert!(
            !split(&["ro", "rw"], false, false)
                .0
                .contains(MountFlags::RDONLY)
        );
        assert!(
            split(&["ro", "rw"], true, false)
                .0
                .contains(MountFlags::RDONLY)
        );
        assert!(
            !split(&["nosuid", "suid"], false, false)
                .0
                .contains(MountFlags::NOSUID)
        );
    }

    #[test]
    fn a_label_arrives_whole_or_not_at_all() {
        let label = "context=system_u:object_r:container_file_t:s0:c15,c25";
        let (_, data) = split(&[label, "discard"], false, true);
        assert_eq!(
            data,
            "context=\"system_u:object_r:container_file_t:s0:c15,c25\",discard"
        );
        assert_eq!(
            split(&[&data[..data.len() - 8]], false, true).1,
            &data[..data.len() - 8]
        );
        assert_eq!(split(&[label, "discard"], false, false).1, "discard");
    }
}
