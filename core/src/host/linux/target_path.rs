//! CSI paths: the staging and target paths that the kubelet passes.
//!
//! The driver runs as root, and a user who can write to a pod's directory could put a symbolic link
//! where a path is expected. So a CSI path is never passed to the kernel as text. The allowed
//! directory is opened (the operator chose it, so it may be a symbolic link, or lie behind one);
//! from there openat2 walks to the parent of the last component without following any symbolic
//! link, though across mounts; and the last component is only reached through the descriptor of its
//! parent.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat, openat2};
use nix::libc;
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use super::files::describe;
use crate::error::HostError;
use crate::host::{FileKind, FileStat, NodeKind, Result};

/// How often a walk is repeated when a concurrent rename disturbed it.
const WALK_TRIES: u32 = 16;

/// The directories in which CSI paths may lie.
pub(super) struct Folders {
    /// Directories for CSI calls (`--allowed-path`).
    pub(super) allowed: Vec<PathBuf>,
    /// Directories of the driver itself, for its private mounts; a CSI call may not name a path in
    /// them.
    pub(super) own: Vec<PathBuf>,
}

/// A resolved path: the open parent directory and the name in it.
pub(super) struct Place {
    parent: OwnedFd,
    leaf: OsString,
    path: PathBuf,
}

/// Why a path cannot be resolved.
enum Stop {
    /// A message for the caller.
    Refused(String),
    /// A directory on the way does not exist.
    Absent(PathBuf),
    /// An error of the kernel.
    Errno(Errno),
}

impl Folders {
    /// Implements [`crate::host::Host::check_path`].
    pub(super) fn check(&self, path: &Path) -> std::result::Result<(), String> {
        let resolved = match resolve(path, &self.allowed) {
            Ok(place) => place.refuse_link(),
            Err(stop) => Err(stop),
        };
        resolved.map_err(|stop| match stop {
            Stop::Refused(text) => text,
            Stop::Absent(folder) => format!(
                "{path:?}: the directory {folder:?} does not exist; the caller must create it before the call"
            ),
            Stop::Errno(errno) => format!("{path:?} cannot be resolved: {errno}"),
        })
    }

    /// Resolves a path that must be reachable.
    pub(super) fn place(&self, action: &'static str, path: &Path) -> Result<Place> {
        self.find(action, path)?
            .ok_or_else(|| HostError::errno(action, path, Errno::ENOENT))
    }

    /// Implements [`crate::host::Effect::RemoveTarget`].
    pub(super) fn remove(&self, path: &Path) -> Result<()> {
        let found = self.find("remove", path)?;
        found.map_or(Ok(()), |target| target.remove())
    }

    /// Resolves a path; `None` if a directory on the way to it does not exist.
    pub(super) fn find(&self, action: &'static str, path: &Path) -> Result<Option<Place>> {
        let roots: Vec<_> = self.allowed.iter().chain(&self.own).cloned().collect();
        match resolve(path, &roots) {
            Ok(place) => Ok(Some(place)),
            Err(Stop::Absent(_)) => Ok(None),
            Err(Stop::Refused(text)) => Err(HostError::unexpected(action, path, text)),
            Err(Stop::Errno(errno)) => Err(HostError::errno(action, path, errno)),
        }
    }
}

/// Splits a path into the allowed directory that contains it and the names below it, without I/O.
fn split<'a>(
    path: &'a Path,
    roots: &'a [PathBuf],
) -> std::result::Result<(&'a Path, Vec<&'a OsStr>), String> {
    let bytes = path.as_os_str().as_bytes();
    if !path.is_absolute() {
        return Err(format!("{path:?} is not an absolute path"));
    }
    if bytes.len() >= libc::PATH_MAX as usize {
        return Err(format!(
            "the path has {} bytes; at most {} are allowed",
            bytes.len(),
            libc::PATH_MAX - 1
        ));
    }
    if bytes.contains(&0) {
        return Err(format!("{path:?} contains a zero byte"));
    }
    let odd = |name: &[u8]| name.is_empty() || name == b"." || name == b"..";
    if bytes[1..].split(|c| *c == b'/').any(odd) {
        return Err(format!(
            "{path:?} has an empty, `.` or `..` component; give the path without it"
        ));
    }
    let below = |root: &'a PathBuf| {
        let rest = path.strip_prefix(root).ok()?;
        let names: Vec<_> = rest
            .components()
            .filter_map(|part| match part {
                Component::Normal(name) => Some(name),
                _ => None,
            })
            .collect();
        (!names.is_empty()).then_some((root.as_path(), names))
    };
    roots.iter().find_map(below).ok_or_else(|| {
        let mut list = String::new();
        for root in roots {
            let _ = write!(list, " {}", root.display());
        }
        format!("{path:?} is not below an allowed directory (--allowed-path:{list})")
    })
}

fn resolve(path: &Path, roots: &[PathBuf]) -> std::result::Result<Place, Stop> {
    let (root, mut names) = split(path, roots).map_err(Stop::Refused)?;
    let leaf = names.pop().unwrap_or_default().to_os_string();
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let top = open(root, flags, Mode::empty()).map_err(|errno| match errno {
        Errno::ENOENT => Stop::Absent(root.to_path_buf()),
        errno => Stop::Errno(errno),
    })?;
    let parent = if names.is_empty() {
        top
    } else {
        let rest: PathBuf = names.iter().collect();
        walk(&top, &rest, flags).map_err(|errno| explain(&top, root, &names, errno))?
    };
    Ok(Place {
        parent,
        leaf,
        path: path.to_path_buf(),
    })
}

/// Opens a path below a directory without following any symbolic link.
pub(super) fn walk(
    top: &OwnedFd,
    rest: &Path,
    flags: OFlag,
) -> std::result::Result<OwnedFd, Errno> {
    let how = OpenHow::new().flags(flags).resolve(
        ResolveFlag::RESOLVE_BENEATH
            | ResolveFlag::RESOLVE_NO_SYMLINKS
            | ResolveFlag::RESOLVE_NO_MAGICLINKS,
    );
    let mut tries = 0;
    loop {
        match openat2(top, rest, how) {
            Err(Errno::EAGAIN | Errno::EINTR) if tries < WALK_TRIES => tries += 1,
            other => return other,
        }
    }
}

/// Finds the component that stopped a walk by looking up one after the other, only for the error
/// message.
fn explain(top: &OwnedFd, root: &Path, names: &[&OsStr], errno: Errno) -> Stop {
    let mut whole = root.to_path_buf();
    let mut folder: Option<OwnedFd> = None;
    for name in names {
        whole.push(name);
        let above = folder.as_ref().unwrap_or(top);
        let found = openat(
            above,
            *name,
            OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC,
            Mode::empty(),
        );
        let next = match found {
            Ok(next) => next,
            Err(Errno::ENOENT) => return Stop::Absent(whole),
            Err(errno) => return Stop::Errno(errno),
        };
        match kind_of(&next) {
            Ok(FileKind::Dir) => folder = Some(next),
            Ok(FileKind::Link) => return Stop::Refused(link_text(&whole)),
            Ok(_) => return Stop::Refused(format!("{whole:?} is not a directory")),
            Err(errno) => return Stop::Errno(errno),
        }
    }
    Stop::Errno(errno)
}

fn link_text(path: &Path) -> String {
    format!("{path:?} is a symbolic link; symbolic links are not followed")
}

fn kind_of(fd: &OwnedFd) -> std::result::Result<FileKind, Errno> {
    let clone = fd
        .try_clone()
        .map_err(|error| super::sys::errno_of(&error))?;
    let found = File::from(clone)
        .metadata()
        .map_err(|error| super::sys::errno_of(&error))?;
    Ok(describe(&found).kind)
}

impl Place {
    /// `/proc/self/fd/P/leaf`, which can be passed to the kernel instead of the path.
    pub(super) fn by_parent(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.parent.as_raw_fd())).join(&self.leaf)
    }

    /// Opens the topmost mount or file at the place with O_PATH; `None` if nothing exists there.
    fn open_leaf(&self) -> std::result::Result<Option<File>, Errno> {
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        match openat(&self.parent, self.leaf.as_os_str(), flags, Mode::empty()) {
            Ok(fd) => Ok(Some(File::from(fd))),
            Err(Errno::ENOENT) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// This must not use stat, which a file system that shut itself down after an error refuses:
    /// its mount must still be unmounted.
    fn refuse_link(&self) -> std::result::Result<(), Stop> {
        let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
        match walk(&self.parent, Path::new(&self.leaf), flags) {
            Ok(_) | Err(Errno::ENOENT) => Ok(()),
            Err(Errno::ELOOP) => Err(Stop::Refused(link_text(&self.path))),
            Err(errno) => Err(Stop::Errno(errno)),
        }
    }

    /// lstat; a symbolic link is described and not refused, so that the caller can decide.
    pub(super) fn stat(&self) -> Result<Option<FileStat>> {
        let leaf = self
            .open_leaf()
            .map_err(|errno| HostError::errno("stat", &self.path, errno))?;
        let Some(leaf) = leaf else { return Ok(None) };
        let found = leaf
            .metadata()
            .map_err(|error| HostError::io("stat", &self.path, &error))?;
        Ok(Some(describe(&found)))
    }

    /// Opens the topmost mount or file with O_PATH; it must have one of the given kinds.
    pub(super) fn open(
        &self,
        action: &'static str,
        kinds: &[FileKind],
    ) -> Result<(File, FileStat)> {
        let leaf = self
            .open_leaf()
            .and_then(|leaf| leaf.ok_or(Errno::ENOENT))
            .map_err(|errno| HostError::errno(action, &self.path, errno))?;
        let found = leaf
            .metadata()
            .map_err(|error| HostError::io(action, &self.path, &error))?;
        let stat = describe(&found);
        if stat.kind == FileKind::Link {
            return Err(self.unexpected(action, link_text(&self.path)));
        }
        if !kinds.contains(&stat.kind) {
            return Err(self.unexpected(action, wrong_kind(stat.kind, kinds)));
        }
        Ok((leaf, stat))
    }

    /// Opens the directory for reading, which ioctls of file systems require.
    pub(super) fn open_dir(&self, action: &'static str) -> Result<File> {
        let (leaf, _) = self.open(action, &[FileKind::Dir])?;
        // Opening "." relative to the verified descriptor cannot reach another directory.
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        openat(leaf, ".", flags, Mode::empty())
            .map(File::from)
            .map_err(|errno| HostError::errno(action, &self.path, errno))
    }

    pub(super) fn make(&self, kind: NodeKind) -> Result<()> {
        let created = match kind {
            NodeKind::Dir => mkdirat(
                &self.parent,
                self.leaf.as_os_str(),
                Mode::from_bits_truncate(0o750),
            ),
            NodeKind::File => openat(
                &self.parent,
                self.leaf.as_os_str(),
                OFlag::O_CREAT
                    | OFlag::O_EXCL
                    | OFlag::O_NOFOLLOW
                    | OFlag::O_WRONLY
                    | OFlag::O_CLOEXEC,
                Mode::from_bits_truncate(0o600),
            )
            .map(drop),
        };
        match created {
            Err(Errno::EEXIST) => {
                let wanted = match kind {
                    NodeKind::Dir => FileKind::Dir,
                    NodeKind::File => FileKind::File,
                };
                self.open("make", &[wanted]).map(drop)
            }
            other => other.map_err(|errno| HostError::errno("make", &self.path, errno)),
        }
    }

    pub(super) fn remove(&self) -> Result<()> {
        let Some(found) = self.stat()? else {
            return Ok(());
        };
        let how = match found.kind {
            FileKind::Dir => UnlinkatFlags::RemoveDir,
            FileKind::File if found.size == 0 => UnlinkatFlags::NoRemoveDir,
            FileKind::File => {
                let what = format!(
                    "it is a file of {} bytes instead of an empty file",
                    found.size
                );
                return Err(self.unexpected("remove", what));
            }
            FileKind::Link => return Err(self.unexpected("remove", link_text(&self.path))),
            kind @ (FileKind::Block | FileKind::Other) => {
                let what = wrong_kind(kind, &[FileKind::Dir, FileKind::File]);
                return Err(self.unexpected("remove", what));
            }
        };
        match unlinkat(&self.parent, self.leaf.as_os_str(), how) {
            Err(Errno::ENOENT) => Ok(()),
            other => other.map_err(|errno| HostError::errno("remove", &self.path, errno)),
        }
    }

    fn unexpected(&self, action: &'static str, what: String) -> HostError {
        HostError::unexpected(action, &self.path, what)
    }
}

fn wrong_kind(found: FileKind, wanted: &[FileKind]) -> String {
    let wanted: Vec<_> = wanted.iter().map(|kind| kind_name(*kind)).collect();
    format!(
        "it is {} instead of {}",
        kind_name(found),
        wanted.join(" or ")
    )
}

fn kind_name(kind: FileKind) -> &'static str {
    match kind {
        FileKind::File => "a file",
        FileKind::Dir => "a directory",
        FileKind::Block => "a block device",
        FileKind::Link => "a symbolic link",
        FileKind::Other => "an unknown kind of file",
    }
}
