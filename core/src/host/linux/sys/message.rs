//! Messages with descriptors.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use nix::errno::Errno;
use nix::libc;

use super::Result;

/// Receives one message with its descriptors, close-on-exec, at most `most` of them. If there are
/// more, or if this process can have no more, all are closed and the error is EMFILE. nix has a
/// wrapper that leaves them open then.
pub fn receive_with_fds(
    socket: impl AsFd,
    bytes: &mut [u8],
    most: usize,
) -> Result<(usize, Vec<OwnedFd>)> {
    const FD: usize = size_of::<libc::c_int>();
    // SAFETY: CMSG_LEN only calculates. CMSG_SPACE would have room for one more if `most` is odd.
    let needed = unsafe { libc::CMSG_LEN((most * FD) as libc::c_uint) } as usize;
    let mut space = vec![0_u64; needed.div_ceil(size_of::<u64>())];
    let mut part = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    // SAFETY: all-zero is a valid empty header.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    header.msg_control = space.as_mut_ptr().cast();
    header.msg_controllen = needed as _;
    let fd = socket.as_fd().as_raw_fd();
    // SAFETY: the header describes `bytes` and `space`, which live until the end of this function.
    let length =
        Errno::result(unsafe { libc::recvmsg(fd, &raw mut header, libc::MSG_CMSG_CLOEXEC) })?;
    let mut received = Vec::new();
    // SAFETY: the kernel has just filled in the header and `space`, which is aligned for it.
    let mut control = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
    while !control.is_null() {
        // SAFETY: the pointer is to a control message within `space`.
        let (found, data) = unsafe { (&*control, libc::CMSG_DATA(control).cast::<libc::c_int>()) };
        if (found.cmsg_level, found.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: CMSG_LEN only calculates.
            let bytes = found.cmsg_len - unsafe { libc::CMSG_LEN(0) } as usize;
            for n in 0..bytes / FD {
                // SAFETY: the message has this many descriptors, which the kernel has just
                // returned, each once.
                received.push(unsafe { OwnedFd::from_raw_fd(data.add(n).read_unaligned()) });
            }
        }
        // SAFETY: as for CMSG_FIRSTHDR.
        control = unsafe { libc::CMSG_NXTHDR(&raw const header, control) };
    }
    match header.msg_flags & libc::MSG_CTRUNC {
        0 => Ok((length as usize, received)),
        _ => Err(Errno::EMFILE),
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn descriptors_beyond_the_limit_are_closed() {
        use nix::sys::socket::{
            AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, sendmsg, socketpair,
        };
        let (from, to) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )
        .unwrap();
        let (read, _write) = nix::unistd::pipe().unwrap();
        let path = |fd: i32| std::fs::read_link(format!("/proc/self/fd/{fd}")).ok();
        let ours = path(read.as_raw_fd());
        let opened = || (0..1000).filter(|fd| path(*fd) == ours).count();
        // The pipe has two ends.
        assert_eq!(opened(), 2);
        for (sent, most) in [(3, 8), (8, 8), (9, 8), (60, 8), (7, 7), (8, 7)] {
            let fds = vec![read.as_raw_fd(); sent];
            let rights = [ControlMessage::ScmRights(&fds)];
            let bytes = [io::IoSlice::new(b"message")];
            sendmsg::<()>(from.as_raw_fd(), &bytes, &rights, MsgFlags::empty(), None).unwrap();
            let mut bytes = [0; 16];
            match receive_with_fds(&to, &mut bytes, most) {
                Ok((length, fds)) => {
                    assert_eq!((length, fds.len()), (7, sent));
                    assert_eq!(opened(), 2 + sent);
                }
                Err(error) => assert!(sent > most && error == Errno::EMFILE, "{sent}: {error}"),
            }
            assert_eq!(opened(), 2, "{sent} of at most {most}");
        }
    }
}
