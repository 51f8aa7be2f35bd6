//! System calls for which nix has no safe wrapper. All `unsafe` code of the crate is here.
//!
//! Each function takes an open descriptor and plain values, and returns an errno on failure.

#![expect(
    unsafe_code,
    reason = "ioctl, statx and the mount calls have no safe face; each use is argued"
)]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::errno::Errno;
use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction, signal};
use nix::unistd::{Gid, Uid, setgid, setgroups, setsid, setuid};
use nix::{request_code_none, request_code_read, request_code_readwrite};

#[cfg(feature = "fault")]
mod allocator;
pub mod attributes;
pub mod blocks;
pub mod fs;
pub mod message;

use crate::host::Account;

type Result<T> = std::result::Result<T, Errno>;

/// `struct loop_info64` of linux/loop.h.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct LoopInfo {
    pub device: u64,
    pub inode: u64,
    rdevice: u64,
    pub offset: u64,
    pub size_limit: u64,
    pub number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    pub flags: u32,
    pub file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

impl LoopInfo {
    /// All zero: no offset, no limit, no flags.
    pub fn zeroed() -> LoopInfo {
        LoopInfo {
            device: 0,
            inode: 0,
            rdevice: 0,
            offset: 0,
            size_limit: 0,
            number: 0,
            encrypt_type: 0,
            encrypt_key_size: 0,
            flags: 0,
            file_name: [0; 64],
            crypt_name: [0; 64],
            encrypt_key: [0; 32],
            init: [0; 2],
        }
    }
}

/// `struct loop_config` of linux/loop.h.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

const LOOP_CLR_FD: u64 = 0x4C01;
const LOOP_GET_STATUS64: u64 = 0x4C05;
const LOOP_SET_CAPACITY: u64 = 0x4C07;
const LOOP_SET_DIRECT_IO: u64 = 0x4C08;
const LOOP_CONFIGURE: u64 = 0x4C0A;
const LOOP_CTL_ADD: u64 = 0x4C80;
const LOOP_CTL_REMOVE: u64 = 0x4C81;
const LOOP_CTL_GET_FREE: u64 = 0x4C82;
/// The size of `struct dm_ioctl` of linux/dm-ioctl.h.
const DM_IOCTL: u32 = 312;

/// ioctl with a plain number.
fn ioctl_value(fd: impl AsFd, request: u64, value: libc::c_int) -> Result<libc::c_int> {
    // SAFETY: the descriptor is open for the call; the requests passed here take a number or
    // nothing, and access no memory.
    Errno::result(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request as _, value) })
}

/// ioctl with a structure.
///
/// # Safety
/// `T` must be the structure that `request` reads and writes.
unsafe fn ioctl_struct<T>(fd: impl AsFd, request: u64, argument: &mut T) -> Result<libc::c_int> {
    // SAFETY: the descriptor is open and the reference is valid for the call; the caller guarantees
    // that the type matches the request.
    Errno::result(unsafe {
        libc::ioctl(
            fd.as_fd().as_raw_fd(),
            request as _,
            std::ptr::from_mut(argument),
        )
    })
}

/// Sends a command to the device mapper. The buffer begins with a `struct dm_ioctl`.
pub fn device_mapper(control: impl AsFd, command: u8, buffer: &mut [u64]) -> Result<()> {
    let size = bytes_of(buffer).len() as u32;
    if size < DM_IOCTL {
        return Err(Errno::EINVAL);
    }
    // The kernel reads and writes as many bytes as the structure says, so it says the buffer's size.
    bytes_of(buffer)[12..16].copy_from_slice(&size.to_ne_bytes());
    let request = request_code_readwrite!(0xfd, command, DM_IOCTL);
    // SAFETY: the descriptor is open for the call, and the kernel accesses only the bytes of the
    // buffer, whose size was just stored in it.
    let result = unsafe {
        libc::ioctl(
            control.as_fd().as_raw_fd(),
            request as _,
            buffer.as_mut_ptr(),
        )
    };
    Errno::result(result).map(drop)
}

pub fn bytes_of(words: &mut [u64]) -> &mut [u8] {
    let length = size_of_val(words);
    // SAFETY: the words are valid and borrowed for as long as the bytes are, and every pattern of
    // bits is a valid byte and a valid word.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), length) }
}

/// The number of a loop device that is not in use at the moment; one is created if there is none.
pub fn loop_free(control: impl AsFd) -> Result<u32> {
    ioctl_value(control, LOOP_CTL_GET_FREE, 0).map(|number| number as u32)
}

/// Removes an unused loop device, and with it every setting of its queue; EBUSY if it is attached
/// or open.
pub fn loop_remove(control: impl AsFd, number: u32) -> Result<()> {
    ioctl_value(control, LOOP_CTL_REMOVE, number as libc::c_int).map(drop)
}

/// Creates a loop device with a given or a new number; EEXIST if it exists.
pub fn loop_add(control: impl AsFd, number: Option<u32>) -> Result<u32> {
    let wanted = number.map_or(-1, |number| number as libc::c_int);
    ioctl_value(control, LOOP_CTL_ADD, wanted).map(|number| number as u32)
}

/// Attaches a file.
pub fn loop_configure(
    device: impl AsFd,
    file: BorrowedFd<'_>,
    block_size: u32,
    info: LoopInfo,
) -> Result<()> {
    let mut config = LoopConfig {
        fd: file.as_raw_fd() as u32,
        block_size,
        info,
        reserved: [0; 8],
    };
    // SAFETY: LOOP_CONFIGURE reads a loop_config; the file's descriptor stays open during the call.
    unsafe { ioctl_struct(device, LOOP_CONFIGURE, &mut config) }.map(drop)
}

/// The status of a loop device; ENXIO if nothing is attached.
pub fn loop_status(device: impl AsFd) -> Result<LoopInfo> {
    let mut info = LoopInfo::zeroed();
    // SAFETY: LOOP_GET_STATUS64 writes a loop_info64.
    unsafe { ioctl_struct(device, LOOP_GET_STATUS64, &mut info) }?;
    Ok(info)
}

/// Detaches the file, at once or when the last opener closes the device.
pub fn loop_clear(device: impl AsFd) -> Result<()> {
    ioctl_value(device, LOOP_CLR_FD, 0).map(drop)
}

/// Makes the device bypass the page cache of its image's file system.
pub fn loop_set_direct_io(device: impl AsFd) -> Result<()> {
    ioctl_value(device, LOOP_SET_DIRECT_IO, 1).map(drop)
}

/// Sets the size of the device to that of the file.
pub fn loop_set_capacity(device: impl AsFd) -> Result<()> {
    ioctl_value(device, LOOP_SET_CAPACITY, 0).map(drop)
}

/// Size of a block device in bytes.
pub fn block_bytes(device: impl AsFd) -> Result<u64> {
    let mut bytes = 0u64;
    let request = request_code_read!(0x12, 114, size_of::<libc::size_t>());
    // SAFETY: BLKGETSIZE64 writes 64 bits.
    unsafe { ioctl_struct(device, request, &mut bytes) }?;
    Ok(bytes)
}

/// Size of the blocks in which a block device is addressed.
pub fn logical_block_bytes(device: impl AsFd) -> Result<u32> {
    let mut bytes = 0u32;
    // SAFETY: BLKSSZGET writes an int.
    unsafe { ioctl_struct(device, request_code_none!(0x12, 104), &mut bytes) }?;
    Ok(bytes)
}

/// Takes a read lease on a file: a process that opens it for writing waits until the descriptor is
/// closed, or for /proc/sys/fs/lease-break-time, and [`has_read_lease`] becomes false. EAGAIN if the
/// file is open for writing already.
pub fn take_read_lease(file: impl AsFd) -> Result<()> {
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open; both commands take a number.
    Errno::result(unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_RDLCK) })?;
    // The kernel would send SIGIO, which ends a process that does not handle it.
    // SAFETY: as above.
    Errno::result(unsafe { libc::fcntl(fd, libc::F_SETOWN, 0) }).map(drop)
}

/// Whether no process waits to write to a file with a lease.
pub fn has_read_lease(file: impl AsFd) -> Result<bool> {
    // SAFETY: the descriptor is open; the command takes no argument.
    let lease = Errno::result(unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_GETLEASE) })?;
    Ok(lease == libc::F_RDLCK)
}

/// Discards a range of a block device, in multiples of its sectors.
pub fn block_discard(device: impl AsFd, offset: u64, length: u64) -> Result<()> {
    let mut range = [offset, length];
    // SAFETY: BLKDISCARD reads two numbers of 64 bits.
    unsafe { ioctl_struct(device, request_code_none!(0x12, 119), &mut range) }.map(drop)
}

/// Writes back and drops the page cache of a block device.
pub fn block_flush(device: impl AsFd) -> Result<()> {
    ioctl_value(device, request_code_none!(0x12, 97), 0).map(drop)
}

/// statx of an open file, including mount ID and direct I/O alignment.
pub fn statx(file: impl AsFd) -> Result<libc::statx> {
    let mut answer = std::mem::MaybeUninit::<libc::statx>::zeroed();
    let mask = libc::STATX_BASIC_STATS | libc::STATX_MNT_ID | libc::STATX_DIOALIGN;
    // SAFETY: the empty path names the open descriptor; the kernel writes one statx.
    Errno::result(unsafe {
        libc::statx(
            file.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            mask,
            answer.as_mut_ptr(),
        )
    })?;
    // SAFETY: all bytes were zero before, which is a valid statx, and the call succeeded.
    Ok(unsafe { answer.assume_init() })
}

/// Whether the mount table has changed since it was opened, or since the last call.
pub fn has_mount_table_changed(table: impl AsFd) -> bool {
    let mut poll = libc::pollfd {
        fd: table.as_fd().as_raw_fd(),
        events: libc::POLLPRI,
        revents: 0,
    };
    // SAFETY: one valid pollfd, and a timeout of zero.
    let ready = unsafe { libc::poll(&raw mut poll, 1, 0) };
    ready > 0 && poll.revents & (libc::POLLPRI | libc::POLLERR) != 0
}

/// Makes a command start its program with only its three standard descriptors. The driver's own
/// descriptors are close-on-exec, but the process that started the driver may have left others
/// open, such as a lock or one end of a pipe.
pub fn start_alone(command: &mut Command) {
    // SAFETY: runs between fork and exec and makes one system call.
    unsafe { command.pre_exec(leave_inherited) };
}

/// Marks all descriptors except the standard ones close-on-exec. They are not closed at once,
/// because std reports a failed exec through one of them.
fn leave_inherited() -> io::Result<()> {
    // SAFETY: the arguments are numbers. Linux 5.11; `open_tree` with `mount_setattr` below needs
    // 5.12.
    let done = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            3,
            libc::c_uint::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        )
    };
    Errno::result(done)?;
    Ok(())
}

/// Makes a command start its program in a session and process group of its own, as another user if
/// `account` is given, with only its standard descriptors, and with SIGPIPE ignored, so that it is
/// not killed when no process reads its output any more.
pub fn start_apart(command: &mut Command, account: Option<&Account>) {
    let account = account.map(|account| {
        let groups: Vec<Gid> = account.groups.iter().copied().map(Gid::from_raw).collect();
        (
            Uid::from_raw(account.uid),
            Gid::from_raw(account.gid),
            groups,
        )
    });
    let apart = move || {
        leave_inherited()?;
        setsid()?;
        // SAFETY: no handler is installed.
        unsafe { signal(Signal::SIGPIPE, SigHandler::SigIgn) }?;
        if let Some((uid, gid, groups)) = &account {
            setgroups(groups)?;
            setgid(*gid)?;
            setuid(*uid)?;
        }
        Ok(())
    };
    // SAFETY: runs between fork and exec and makes only system calls, on memory that was filled
    // before; it neither allocates nor takes a lock.
    unsafe { command.pre_exec(apart) };
}

/// Makes all threads allocate from one arena, if the C library supports that.
pub fn use_one_arena() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes and returns numbers only; a failure shows in the return value.
    let _ = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Makes this thread, and those that it starts, allocate memory without waiting for writes to block
/// devices. EPERM without CAP_SYS_RESOURCE.
pub fn become_io_flusher() -> Result<()> {
    /// linux/prctl.h, Linux 5.6.
    const PR_SET_IO_FLUSHER: libc::c_int = 57;
    let [on, unused]: [libc::c_ulong; 2] = [1, 0];
    // SAFETY: the arguments are numbers.
    Errno::result(unsafe { libc::prctl(PR_SET_IO_FLUSHER, on, unused, unused, unused) }).map(drop)
}

/// Makes a signal interrupt the system calls that can be interrupted, and have no other effect.
pub fn interrupt_with(signal: Signal) -> Result<()> {
    extern "C" fn do_nothing(_: libc::c_int) {}
    // Without SA_RESTART, so that the call is not repeated.
    let handler = SigHandler::Handler(do_nothing);
    let action = SigAction::new(handler, SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler does nothing, which is safe at any moment.
    unsafe { sigaction(signal, &action) }.map(drop)
}

fn new_fd(result: libc::c_long) -> Result<OwnedFd> {
    let fd = Errno::result(result)?;
    // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) })
}

/// Creates a detached copy of the mount at an open path (a bind mount that is not attached yet).
pub fn clone_mount(source: impl AsFd) -> Result<OwnedFd> {
    const OPEN_TREE_CLONE: libc::c_uint = 1;
    let flags = OPEN_TREE_CLONE | libc::O_CLOEXEC as libc::c_uint | libc::AT_EMPTY_PATH as u32;
    // SAFETY: an open descriptor and an empty, zero-terminated path.
    new_fd(unsafe {
        libc::syscall(
            libc::SYS_open_tree,
            source.as_fd().as_raw_fd(),
            c"".as_ptr(),
            flags,
        )
    })
}

/// Makes a detached mount read-only.
pub fn set_read_only(mount: impl AsFd) -> Result<()> {
    const MOUNT_ATTR_RDONLY: u64 = 1;
    // `struct mount_attr`: attr_set, attr_clr, propagation, userns_fd.
    let attributes = [MOUNT_ATTR_RDONLY, 0, 0, 0];
    // SAFETY: an open descriptor, an empty path, and a mount_attr of the given size.
    Errno::result(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            attributes.as_ptr(),
            size_of_val(&attributes),
        )
    })
    .map(drop)
}

/// Attaches a detached mount to an open directory or file.
pub fn place_mount(mount: impl AsFd, target: impl AsFd) -> Result<()> {
    const EMPTY_PATHS: libc::c_uint = 0x4 | 0x40; // MOVE_MOUNT_F_EMPTY_PATH, MOVE_MOUNT_T_EMPTY_PATH
    // SAFETY: two open descriptors, two empty paths.
    Errno::result(unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            mount.as_fd().as_raw_fd(),
            c"".as_ptr(),
            target.as_fd().as_raw_fd(),
            c"".as_ptr(),
            EMPTY_PATHS,
        )
    })
    .map(drop)
}

/// Opens a file system context in which mount options can be tried without mounting.
pub fn open_fs(name: &CStr) -> Result<OwnedFd> {
    const FSOPEN_CLOEXEC: libc::c_uint = 1;
    // SAFETY: a zero-terminated string.
    new_fd(unsafe { libc::syscall(libc::SYS_fsopen, name.as_ptr(), FSOPEN_CLOEXEC) })
}

/// Sets one option on a context.
pub fn set_fs_option(context: impl AsFd, key: &CStr, value: Option<&CStr>) -> Result<()> {
    const SET_FLAG: libc::c_uint = 0;
    const SET_STRING: libc::c_uint = 1;
    let (command, value) = match value {
        Some(value) => (SET_STRING, value.as_ptr()),
        None => (SET_FLAG, std::ptr::null()),
    };
    // SAFETY: zero-terminated strings, or null where the command takes none.
    Errno::result(unsafe {
        libc::syscall(
            libc::SYS_fsconfig,
            context.as_fd().as_raw_fd(),
            command,
            key.as_ptr(),
            value,
            0,
        )
    })
    .map(drop)
}

/// Creates the file system of a context, and a mount of it that is attached nowhere: it ends with its last
/// descriptor.
pub fn mount_fs(context: impl AsFd) -> Result<OwnedFd> {
    const CREATE: libc::c_uint = 6;
    const FSMOUNT_CLOEXEC: libc::c_uint = 1;
    const NOSUID_NODEV_NOEXEC_NOATIME: libc::c_uint = 0x2 | 0x4 | 0x8 | 0x10;
    let fd = context.as_fd().as_raw_fd();
    let none = std::ptr::null::<libc::c_char>();
    // SAFETY: an open descriptor; the command takes neither key nor value.
    Errno::result(unsafe { libc::syscall(libc::SYS_fsconfig, fd, CREATE, none, none, 0) })?;
    // SAFETY: an open descriptor and numbers.
    new_fd(unsafe {
        libc::syscall(
            libc::SYS_fsmount,
            fd,
            FSMOUNT_CLOEXEC,
            NOSUID_NODEV_NOEXEC_NOATIME,
        )
    })
}

/// Opens a pidfd, which refers to the same process even after its PID is reused.
pub fn open_process(pid: u32) -> Result<OwnedFd> {
    // SAFETY: the arguments are numbers.
    new_fd(unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) })
}

/// Sends SIGKILL to the process of [`open_process`]; ESRCH if it has exited.
pub fn kill_process(process: impl AsFd) -> Result<()> {
    // SAFETY: an open descriptor, a signal number, and no siginfo.
    Errno::result(unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            process.as_fd().as_raw_fd(),
            libc::SIGKILL,
            std::ptr::null::<libc::siginfo_t>(),
            0,
        )
    })
    .map(drop)
}

/// Accepts the next connection of a listening socket.
pub fn accept(listener: impl AsFd) -> Result<OwnedFd> {
    use nix::sys::socket::{SockFlag, accept4};
    new_fd(accept4(listener.as_fd().as_raw_fd(), SockFlag::SOCK_CLOEXEC)?.into())
}

/// Converts an error of the standard library to an errno.
pub fn errno_of(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_sizes_of_the_kernels_headers() {
        assert_eq!(size_of::<LoopInfo>(), 232);
        assert_eq!(size_of::<LoopConfig>(), 304);
    }
}
