//! Seqpacket sockets that transfer small messages whole, with descriptors, between the driver and
//! its guard.
//!
//! Sending never blocks. Sending and receiving without descriptors does not allocate, and all
//! descriptors are close-on-exec.

use std::fs::{Permissions, set_permissions};
use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, MsgFlags, Shutdown, SockFlag, SockType, UnixAddr, bind,
    connect, getsockopt, listen, recv, send, sendmsg, shutdown, socket, sockopt,
};

use super::sys;
use crate::error::HostError;
use crate::host::Result;

/// Size of a message in bytes.
pub const MESSAGE_BYTES: usize = 32;

/// Connections that may wait while the guard starts threads for others.
const BACKLOG: i32 = 64;

/// A listening socket.
pub struct Listener(OwnedFd);

/// One end of a connection.
pub struct Channel(OwnedFd);

fn address(path: &Path) -> Result<UnixAddr> {
    UnixAddr::new(path).map_err(|errno| match errno {
        Errno::ENAMETOOLONG => HostError::unexpected(
            "name a socket",
            path,
            "the path of a unix socket has at most 107 bytes; give a shorter --state-dir",
        ),
        errno => HostError::errno("name a socket", path, errno),
    })
}

fn new_socket(path: &Path, flags: SockFlag) -> Result<OwnedFd> {
    socket(
        AddressFamily::Unix,
        SockType::SeqPacket,
        SockFlag::SOCK_CLOEXEC | flags,
        None,
    )
    .map_err(|errno| HostError::errno("create a socket for", path, errno))
}

impl Listener {
    /// Creates a socket with mode 0600, replacing one that no process serves any more.
    pub fn bind(path: &Path) -> Result<Listener> {
        let failed = |errno| HostError::errno("listen on", path, errno);
        let address = address(path)?;
        let socket = new_socket(path, SockFlag::empty())?;
        super::files::remove_file(path)?;
        bind(socket.as_raw_fd(), &address).map_err(failed)?;
        set_permissions(path, Permissions::from_mode(0o600))
            .map_err(super::files::failed("chmod", path))?;
        Backlog::new(BACKLOG)
            .and_then(|backlog| listen(&socket, backlog))
            .map_err(failed)?;
        Ok(Listener(socket))
    }

    /// Accepts the next connection.
    pub fn accept(&self) -> std::result::Result<Channel, Errno> {
        sys::accept(&self.0).map(Channel)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Channel {
    /// Connects without blocking; `None` if no process listens there, or if its backlog is full.
    /// Sending and receiving on the connection do not block either.
    pub fn connect(path: &Path) -> Result<Option<Channel>> {
        let address = address(path)?;
        let socket = new_socket(path, SockFlag::SOCK_NONBLOCK)?;
        match connect(socket.as_raw_fd(), &address) {
            Ok(()) => Ok(Some(Channel(socket))),
            Err(Errno::ENOENT | Errno::ECONNREFUSED | Errno::EAGAIN) => Ok(None),
            Err(errno) => Err(HostError::errno("connect to", path, errno)),
        }
    }

    /// Sends a message without blocking: EAGAIN if the receiver's buffer is full.
    pub fn send(&self, message: &[u8; MESSAGE_BYTES]) -> std::result::Result<(), Errno> {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        send(self.0.as_raw_fd(), message, flags).map(drop)
    }

    /// Like [`Channel::send`], with descriptors, and with a message of another length.
    pub fn send_with_fds(
        &self,
        message: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> std::result::Result<(), Errno> {
        let raw: Vec<_> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        sendmsg::<()>(
            self.0.as_raw_fd(),
            &[IoSlice::new(message)],
            &[ControlMessage::ScmRights(&raw)],
            flags,
            None,
        )
        .map(drop)
    }

    /// Receives a message that is available; `None` at the end of the connection. EAGAIN if none is
    /// available; EBADMSG if it does not have the length of a message.
    pub fn receive(
        &self,
        message: &mut [u8; MESSAGE_BYTES],
    ) -> std::result::Result<Option<()>, Errno> {
        whole(recv(self.0.as_raw_fd(), message, MsgFlags::MSG_DONTWAIT))
    }

    /// Receives a message of any length with the descriptors that came along, at most `most`, and
    /// returns its length; this blocks. What does not fit into `message` is dropped.
    pub fn receive_with_fds(
        &self,
        message: &mut [u8],
        most: usize,
    ) -> std::result::Result<Option<(usize, Vec<OwnedFd>)>, Errno> {
        match sys::message::receive_with_fds(&self.0, message, most) {
            Ok((0, _)) | Err(Errno::ECONNRESET) => Ok(None),
            received => received.map(Some),
        }
    }

    /// PID and UID of the other end: of the process that connected, or of the one that made the
    /// socket listen.
    pub fn peer(&self) -> std::result::Result<(u32, u32), Errno> {
        let found = getsockopt(&self.0, sockopt::PeerCredentials)?;
        Ok((found.pid().unsigned_abs(), found.uid()))
    }

    /// Closes the sending direction: the other end reads end of file.
    pub fn finish(&self) {
        // If the other end is gone, it needs no notice.
        let _ = shutdown(self.0.as_raw_fd(), Shutdown::Write);
    }
}

fn whole(length: std::result::Result<usize, Errno>) -> std::result::Result<Option<()>, Errno> {
    match length {
        Ok(MESSAGE_BYTES) => Ok(Some(())),
        Ok(0) | Err(Errno::ECONNRESET) => Ok(None),
        Ok(_) => Err(Errno::EBADMSG),
        Err(errno) => Err(errno),
    }
}
