//! The walk through a directory, in an order that depends on the names alone.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::libc;

use super::super::files::failed;
use crate::error::HostError;
use crate::host::Result;

/// How much of a directory is kept in memory. Its users decide what it has, and the process that imports
/// it shares the memory of the driver's container.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// Entries, of each of which the survey keeps 16 bytes.
    pub(super) entries: usize,
    /// Bytes of names and paths at the same time.
    pub(super) bytes: usize,
}

impl Limits {
    /// 128 MiB of hashes, and twice 64 MiB of names and paths: of the walk and of the copy.
    pub(super) const DEFAULT: Limits = Limits {
        entries: 8 << 20,
        bytes: 64 << 20,
    };
}

/// What is kept at the moment.
pub(super) struct Kept<'a> {
    limits: Limits,
    top: &'a Path,
    entries: usize,
    bytes: usize,
}

impl<'a> Kept<'a> {
    pub(super) fn new(limits: Limits, top: &'a Path) -> Kept<'a> {
        Kept {
            limits,
            top,
            entries: 0,
            bytes: 0,
        }
    }

    fn add_entry(&mut self) -> Result<()> {
        self.entries += 1;
        match self.entries > self.limits.entries {
            true => Err(self.refuse(&format!("it has more than {} entries", self.limits.entries))),
            false => Ok(()),
        }
    }

    /// A name or path that is kept from now on.
    pub(super) fn add(&mut self, path: &OsStr) -> Result<()> {
        self.bytes += KEPT_BESIDE + path.len();
        match self.bytes > self.limits.bytes {
            true => {
                let bytes = self.limits.bytes;
                let what =
                    format!("the names in it need more than {bytes} bytes of memory at once");
                Err(self.refuse(&what))
            }
            false => Ok(()),
        }
    }

    fn end(&mut self, path: &OsStr) {
        self.bytes = self.bytes.saturating_sub(KEPT_BESIDE + path.len());
    }

    fn refuse(&self, what: &str) -> HostError {
        let what = format!(
            "{what}; import its directories one by one, or copy the files with another program"
        );
        HostError::unexpected("import", self.top, what)
    }
}

/// Bytes of a name beside its text: the vector that has it, and the allocation.
const KEPT_BESIDE: usize = 40;

/// An entry of a directory, or the directory itself.
pub(super) struct Entry<'a> {
    /// The path below the directory; empty for itself.
    pub(super) path: &'a Path,
    pub(super) kind: Kind,
    /// What the kernel reports about it; `None` for a mount point.
    pub(super) metadata: Option<&'a Metadata>,
    /// Open with O_PATH; for a mount point, the directory that has it.
    pub(super) open: &'a File,
}

#[derive(Clone, Copy)]
pub(super) enum Kind {
    Folder,
    File,
    Symlink,
    /// It is not copied.
    Other(&'static str),
}

impl Kind {
    fn of(metadata: &Metadata) -> Kind {
        let kind = metadata.file_type();
        if kind.is_dir() {
            Kind::Folder
        } else if kind.is_file() {
            Kind::File
        } else if kind.is_symlink() {
            Kind::Symlink
        } else if kind.is_socket() {
            Kind::Other("a socket")
        } else if kind.is_fifo() {
            Kind::Other("a FIFO")
        } else {
            Kind::Other("a device")
        }
    }
}

/// The path of an entry for people.
pub(super) fn whole(top: &Path, path: &Path) -> PathBuf {
    match path.as_os_str().is_empty() {
        true => top.to_path_buf(),
        false => top.join(path),
    }
}

/// Visits a directory and everything below it: each directory before its entries, which follow it at
/// once, except that those of its own directories come later. Only one directory is open at a time, so
/// the depth is limited by the length of a path alone.
pub(super) fn walk(
    root: &OwnedFd,
    top: &Path,
    limits: Limits,
    mut visit: impl FnMut(&Entry<'_>) -> Result<()>,
) -> Result<()> {
    let mut kept = Kept::new(limits, top);
    let mut folders = vec![PathBuf::new()];
    while let Some(path) = folders.pop() {
        kept.end(path.as_os_str());
        kept.add_entry()?;
        let folder = open_below(root, &path).map_err(|errno| gone(errno, &whole(top, &path)))?;
        let folder = File::from(folder);
        let found = stat(&folder, top, &path)?;
        visit(&Entry {
            path: &path,
            kind: Kind::of(&found),
            metadata: Some(&found),
            open: &folder,
        })?;
        for name in names(&folder, &whole(top, &path), &mut kept)? {
            kept.end(&name);
            let path = path.join(&name);
            let open = match open_below(&folder, Path::new(&name)) {
                Ok(open) => File::from(open),
                Err(Errno::EXDEV) => {
                    kept.add_entry()?;
                    visit(&Entry {
                        path: &path,
                        kind: Kind::Other("a mount point"),
                        metadata: None,
                        open: &folder,
                    })?;
                    continue;
                }
                Err(errno) => return Err(gone(errno, &whole(top, &path))),
            };
            let found = stat(&open, top, &path)?;
            match Kind::of(&found) {
                Kind::Folder => {
                    kept.add(path.as_os_str())?;
                    folders.push(path);
                }
                kind => {
                    kept.add_entry()?;
                    visit(&Entry {
                        path: &path,
                        kind,
                        metadata: Some(&found),
                        open: &open,
                    })?;
                }
            }
        }
    }
    Ok(())
}

fn stat(open: &File, top: &Path, path: &Path) -> Result<Metadata> {
    let whole = whole(top, path);
    open.metadata().map_err(failed("stat", &whole))
}

/// Opens what is at a path below a directory with O_PATH, also a symbolic link. EXDEV if it is a mount
/// point.
pub(super) fn open_below(folder: impl AsFd, path: &Path) -> nix::Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC)
        .resolve(
            ResolveFlag::RESOLVE_BENEATH
                | ResolveFlag::RESOLVE_NO_SYMLINKS
                | ResolveFlag::RESOLVE_NO_XDEV,
        );
    match path.as_os_str().is_empty() {
        true => openat2(folder, ".", how),
        false => openat2(folder, path, how),
    }
}

fn gone(errno: Errno, path: &Path) -> HostError {
    let what = match errno {
        Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::EXDEV | Errno::EAGAIN => {
            "it was removed or replaced while the directory was read; stop what uses the directory"
        }
        Errno::ENAMETOOLONG => "its path has more than 4095 bytes; move it up",
        errno => return HostError::errno("open", path, errno),
    };
    HostError::unexpected("import", path, what)
}

/// Opens a file for reading that is open with O_PATH, and keeps the time of its last access if that is
/// permitted.
pub(super) fn reopen(open: &File, flags: libc::c_int, path: &Path) -> Result<File> {
    let link = PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd()));
    let with = |flags| {
        OpenOptions::new()
            .read(true)
            .custom_flags(flags)
            .open(&link)
    };
    let opened = with(flags | libc::O_NOATIME).or_else(|error| match error.raw_os_error() {
        Some(libc::EPERM) => with(flags),
        _ => Err(error),
    });
    opened.map_err(failed("open", path))
}

/// The names in a directory, sorted.
fn names(folder: &File, path: &Path, kept: &mut Kept<'_>) -> Result<Vec<OsString>> {
    let open = reopen(folder, libc::O_DIRECTORY, path)?;
    let failed = |errno| HostError::errno("list", path, errno);
    let mut names = Vec::new();
    for entry in Dir::from_fd(open.into()).map_err(failed)?.iter() {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().to_bytes();
        if !matches!(name, b"." | b"..") {
            let name = OsStr::from_bytes(name);
            kept.add(name)?;
            names.push(name.to_os_string());
        }
    }
    names.sort_unstable();
    Ok(names)
}
