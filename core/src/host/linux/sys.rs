//! System calls that nix has no safe face for. All `unsafe` of the crate is here.
//!
//! Each function takes an open descriptor and plain values, and answers with the errno.

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
use nix::sys::signal::{SigHandler, Signal, signal};
use nix::unistd::{Gid, Uid, setgid, setgroups, setsid, setuid};
use nix::{request_code_none, request_code_read};

pub mod blocks;
pub mod fs;

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

/// ioctl with a plain number.
fn ioctl_value(fd: impl AsFd, request: u64, value: libc::c_int) -> Result<libc::c_int> {
    // SAFETY: the descriptor is open for the call; the requests given here take a number or
    // nothing and touch no memory of ours.
    Errno::result(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), request as _, value) })
}

/// ioctl with a structure.
///
/// # Safety
/// `T` must be the structure that `request` reads and writes.
unsafe fn ioctl_struct<T>(fd: impl AsFd, request: u64, argument: &mut T) -> Result<libc::c_int> {
    // SAFETY: the descriptor is open and the reference valid for the call; the caller says that
    // the size fits.
    Errno::result(unsafe {
        libc::ioctl(
            fd.as_fd().as_raw_fd(),
            request as _,
            std::ptr::from_mut(argument),
        )
    })
}

/// A number of a loop device that nobody uses at the moment; made if there is none.
pub fn loop_free(control: impl AsFd) -> Result<u32> {
    ioctl_value(control, LOOP_CTL_GET_FREE, 0).map(|number| number as u32)
}

/// Removes an unused loop device, and with it everything that was ever set on its queue; EBUSY
/// if it's attached or open.
pub fn loop_remove(control: impl AsFd, number: u32) -> Result<()> {
    ioctl_value(control, LOOP_CTL_REMOVE, number as libc::c_int).map(drop)
}

/// Makes a loop device of a number, or of one that is new; EEXIST if there is one.
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
    // SAFETY: LOOP_CONFIGURE reads a loop_config; the file's descriptor is open meanwhile.
    unsafe { ioctl_struct(device, LOOP_CONFIGURE, &mut config) }.map(drop)
}

/// What is attached; ENXIO if nothing.
pub fn loop_status(device: impl AsFd) -> Result<LoopInfo> {
    let mut info = LoopInfo::zeroed();
    // SAFETY: LOOP_GET_STATUS64 writes a loop_info64.
    unsafe { ioctl_struct(device, LOOP_GET_STATUS64, &mut info) }?;
    Ok(info)
}

/// Detaches, at once or with the last opener.
pub fn loop_clear(device: impl AsFd) -> Result<()> {
    ioctl_value(device, LOOP_CLR_FD, 0).map(drop)
}

/// Lets it bypass the page cache of its file's file system.
pub fn loop_set_direct_io(device: impl AsFd) -> Result<()> {
    ioctl_value(device, LOOP_SET_DIRECT_IO, 1).map(drop)
}

/// Takes over the size of the file.
pub fn loop_set_capacity(device: impl AsFd) -> Result<()> {
    ioctl_value(device, LOOP_SET_CAPACITY, 0).map(drop)
}

/// Bytes of a block device.
pub fn block_bytes(device: impl AsFd) -> Result<u64> {
    let mut bytes = 0u64;
    let request = request_code_read!(0x12, 114, size_of::<libc::size_t>());
    // SAFETY: BLKGETSIZE64 writes 64 bits.
    unsafe { ioctl_struct(device, request, &mut bytes) }?;
    Ok(bytes)
}

/// Writes back and drops what the kernel keeps of a block device.
pub fn block_flush(device: impl AsFd) -> Result<()> {
    ioctl_value(device, request_code_none!(0x12, 97), 0).map(drop)
}

/// What statx says of an open file, mount id and direct I/O included.
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

/// Whether the mount table changed since it was opened, or since this was last asked.
pub fn mounts_changed(table: impl AsFd) -> bool {
    let mut poll = libc::pollfd {
        fd: table.as_fd().as_raw_fd(),
        events: libc::POLLPRI,
        revents: 0,
    };
    // SAFETY: one valid pollfd, and no waiting.
    let ready = unsafe { libc::poll(&raw mut poll, 1, 0) };
    ready > 0 && poll.revents & (libc::POLLPRI | libc::POLLERR) != 0
}

/// Has a program started with its three standard descriptors alone. Ours close by themselves; who
/// started us may have left others open, a lock or one end of a pipe among them.
pub fn start_alone(command: &mut Command) {
    // SAFETY: runs between fork and exec: one system call.
    unsafe { command.pre_exec(leave_inherited) };
}

/// The descriptors after the standard ones close at the next exec, not yet: std tells a failed
/// exec through one of them.
fn leave_inherited() -> io::Result<()> {
    // SAFETY: numbers alone. Linux 5.11; `open_tree` with `mount_setattr` below needs 5.12.
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

/// Has a program started in a session and process group of its own, as somebody else if wanted,
/// with its standard descriptors alone, and with SIGPIPE ignored: nobody listening to it any more
/// doesn't kill it.
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
    // SAFETY: runs between fork and exec: system calls alone, on memory that was filled before;
    // nothing is allocated, no lock is taken.
    unsafe { command.pre_exec(apart) };
}

/// Has all threads take memory from one place; as far as the C library can.
pub fn use_one_arena() {
    #[cfg(target_env = "gnu")]
    // SAFETY: a number for a number; it fails by its answer alone.
    let _ = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

fn new_fd(result: libc::c_long) -> Result<OwnedFd> {
    let fd = Errno::result(result)?;
    // SAFETY: the kernel has just given us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) })
}

/// A detached copy of the mount at an open path (a bind mount that's nowhere yet).
pub fn clone_mount(source: impl AsFd) -> Result<OwnedFd> {
    const OPEN_TREE_CLONE: libc::c_uint = 1;
    let flags = OPEN_TREE_CLONE | libc::O_CLOEXEC as libc::c_uint | libc::AT_EMPTY_PATH as u32;
    // SAFETY: open descriptor, empty path that ends with a zero.
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
    // `struct mount_attr`: what to set, what to clear, propagation, user namespace.
    let attributes = [MOUNT_ATTR_RDONLY, 0, 0, 0];
    // SAFETY: open descriptor, empty path, and a mount_attr of the size that is said.
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

/// Puts a detached mount on an open directory or file.
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

/// A context in which mount options can be tried without mounting.
pub fn open_fs(name: &CStr) -> Result<OwnedFd> {
    const FSOPEN_CLOEXEC: libc::c_uint = 1;
    // SAFETY: a string that ends with a zero.
    new_fd(unsafe { libc::syscall(libc::SYS_fsopen, name.as_ptr(), FSOPEN_CLOEXEC) })
}

/// Gives one option to a context.
pub fn set_fs_option(context: impl AsFd, key: &CStr, value: Option<&CStr>) -> Result<()> {
    const SET_FLAG: libc::c_uint = 0;
    const SET_STRING: libc::c_uint = 1;
    let (command, value) = match value {
        Some(value) => (SET_STRING, value.as_ptr()),
        None => (SET_FLAG, std::ptr::null()),
    };
    // SAFETY: strings that end with a zero, or null where the command takes none.
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

/// A descriptor of a process, which stays its own when its number is given to another.
pub fn open_process(pid: u32) -> Result<OwnedFd> {
    // SAFETY: two numbers.
    new_fd(unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) })
}

/// SIGKILL to the process of [`open_process`]; ESRCH if it has ended.
pub fn kill_process(process: impl AsFd) -> Result<()> {
    // SAFETY: an open descriptor, a signal's number, and no further words.
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

/// The next connection of a listening socket.
pub fn accept(listener: impl AsFd) -> Result<OwnedFd> {
    use nix::sys::socket::{SockFlag, accept4};
    new_fd(accept4(listener.as_fd().as_raw_fd(), SockFlag::SOCK_CLOEXEC)?.into())
}

/// Receives one message with its descriptors, close-on-exec; at most `most` of them.
pub fn receive_with_fds(
    socket: impl AsFd,
    bytes: &mut [u8],
    most: usize,
) -> Result<(usize, Vec<OwnedFd>)> {
    use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
    let mut space = vec![0; (most + 4) * size_of::<libc::c_int>() + 64];
    let mut parts = [io::IoSliceMut::new(bytes)];
    let message = recvmsg::<()>(
        socket.as_fd().as_raw_fd(),
        &mut parts,
        Some(&mut space),
        MsgFlags::MSG_CMSG_CLOEXEC,
    )?;
    let mut received = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(fds) = control {
            // SAFETY: the kernel has just given us these descriptors, each once.
            received.extend(fds.iter().map(|fd| unsafe { OwnedFd::from_raw_fd(*fd) }));
        }
    }
    Ok((message.bytes, received))
}

/// An error of the standard library as an errno.
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
