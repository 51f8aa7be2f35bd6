//! A Unix socket, and the lifetime of its file.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use nix::sys::stat::{Mode, fchmod};
use tokio::net::{UnixListener, UnixSocket};

/// Maximum number of connections that wait to be accepted.
const BACKLOG: u32 = 1024;

/// Why the socket cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another process listens there.
    #[error("{} is served by another process", .0.display())]
    Taken(PathBuf),
    /// The file is not a socket, so the driver must not remove it.
    #[error("{} exists and is not a socket; remove it or choose another endpoint", .0.display())]
    NotASocket(PathBuf),
    /// The kernel returned an error.
    #[error("{doing} {}", path.display())]
    Io {
        /// The verb.
        doing: &'static str,
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// A listening socket.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    file: SocketFile,
}

/// The file of a socket. Dropping this removes the file, unless another file has replaced it.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Socket {
    /// Binds the path. A file that a dead process left is removed. Must be called within a tokio
    /// runtime.
    pub fn bind(path: &Path) -> Result<Socket, BindError> {
        let io = |doing| {
            move |source| BindError::Io {
                doing,
                path: path.to_path_buf(),
                source,
            }
        };
        remove_stale(path)?;
        let socket = UnixSocket::new_stream().map_err(io("create a socket for"))?;
        // The file gets the socket's mode when it is created, so other users cannot connect at any
        // moment; besides, no process can connect before `listen`.
        fchmod(&socket, Mode::S_IRUSR | Mode::S_IWUSR)
            .map_err(|errno| io("set the mode of")(errno.into()))?;
        socket.bind(path).map_err(io("bind"))?;
        let metadata = fs::symlink_metadata(path).map_err(io("examine"))?;
        let file = SocketFile {
            path: path.to_path_buf(),
            device: metadata.dev(),
            inode: metadata.ino(),
        };
        let listener = socket.listen(BACKLOG).map_err(io("listen on"))?;
        Ok(Socket { listener, file })
    }

    pub(super) fn into_parts(self) -> (UnixListener, SocketFile) {
        (self.listener, self.file)
    }
}

impl SocketFile {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let still_ours = fs::symlink_metadata(&self.path)
            .is_ok_and(|now| (now.dev(), now.ino()) == (self.device, self.inode));
        if still_ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "failed to remove the socket");
        }
    }
}

/// Removes a socket on which no process listens.
fn remove_stale(path: &Path) -> Result<(), BindError> {
    let io = |doing, source| BindError::Io {
        doing,
        path: path.to_path_buf(),
        source,
    };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(io("examine", error)),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(BindError::NotASocket(path.to_path_buf()));
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        // A full queue also shows that a process listens.
        Ok(_) => return Err(BindError::Taken(path.to_path_buf())),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            return Err(BindError::Taken(path.to_path_buf()));
        }
        Err(error) => return Err(io("connect to", error)),
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io("remove", error)),
        _ => Ok(()),
    }
}
