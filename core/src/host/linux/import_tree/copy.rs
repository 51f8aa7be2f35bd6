//! Copies the entries of a directory.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat, readlinkat};
use nix::libc;
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{LinkatFlags, linkat, symlinkat};

use super::super::image::each_data;
use super::super::import_source::{State, check_unchanged, take_lease};
use super::super::sys;
use super::walk::{Entry, Kept, Kind, open_below, reopen};
use super::{ImportTree, TreeProgress, metadata};
use crate::error::HostError;
use crate::host::Result;
use crate::host::piece::add;

pub(super) struct Copy<'a> {
    tree: &'a ImportTree,
    target: &'a File,
    /// The copy of the last directory that was visited.
    folder: Option<OwnedFd>,
    /// The first name of each file that has several.
    first: HashMap<(u64, u64), PathBuf>,
    /// All directories. They get their metadata at the end, because entries would change their times,
    /// and inherit their default ACLs.
    folders: Vec<PathBuf>,
    kept: Kept<'a>,
    progress: TreeProgress,
    report: &'a mut dyn FnMut(TreeProgress),
}

impl<'a> Copy<'a> {
    pub(super) fn new(
        tree: &'a ImportTree,
        target: &'a File,
        report: &'a mut dyn FnMut(TreeProgress),
    ) -> Copy<'a> {
        Copy {
            tree,
            target,
            folder: None,
            first: HashMap::new(),
            folders: Vec::new(),
            kept: Kept::new(tree.limits, &tree.path),
            progress: TreeProgress::default(),
            report,
        }
    }

    pub(super) fn add(&mut self, entry: &Entry<'_>) -> Result<()> {
        let path = entry.path;
        match (entry.kind, entry.metadata) {
            (Kind::Other(_), _) | (_, None) => return Ok(()),
            (Kind::Folder, _) => self.add_folder(path)?,
            (kind, Some(found)) => {
                let id = (found.dev(), found.ino());
                match self.first.get(&id) {
                    Some(first) => self.link(first, path)?,
                    None => match kind {
                        Kind::Symlink => self.add_symlink(entry, found)?,
                        _ => self.add_file(entry, found)?,
                    },
                }
                if found.nlink() > 1 && !self.first.contains_key(&id) {
                    self.kept.add(path.as_os_str())?;
                    self.first.insert(id, path.to_path_buf());
                }
            }
        }
        self.progress.entries += 1;
        (self.report)(self.progress);
        Ok(())
    }

    /// Sets the metadata of all directories.
    pub(super) fn finish(self) -> Result<()> {
        for path in &self.folders {
            let failed = |errno| HostError::errno("open", self.tree.whole(path), errno);
            let from = File::from(open_below(&self.tree.root, path).map_err(failed)?);
            let found = from.metadata();
            let found = found.map_err(|error| failed(sys::errno_of(&error)))?;
            let to = File::from(open_below(self.target, path).map_err(failed)?);
            let to = reopen(&to, 0, path)?;
            metadata::copy(&from, &to, &found, &self.tree.whole(path))?;
        }
        Ok(())
    }

    fn add_folder(&mut self, path: &Path) -> Result<()> {
        if let Some((parent, name)) = split(path) {
            let parent = open_below(self.target, parent);
            parent
                .and_then(|parent| mkdirat(parent, name, Mode::S_IRWXU))
                .map_err(|errno| self.failed("create", path, errno))?;
        }
        let opened = open_below(self.target, path);
        self.folder = Some(opened.map_err(|errno| self.failed("open", path, errno))?);
        self.kept.add(path.as_os_str())?;
        self.folders.push(path.to_path_buf());
        Ok(())
    }

    /// The copy of the directory that has the entry, and the entry's name.
    fn place<'b>(&self, path: &'b Path) -> Result<(&OwnedFd, &'b OsStr)> {
        let name = split(path).map(|(_, name)| name);
        let place = self.folder.as_ref().zip(name);
        place.ok_or_else(|| self.failed("create", path, Errno::ENOENT))
    }

    fn link(&self, first: &Path, path: &Path) -> Result<()> {
        let (folder, name) = self.place(path)?;
        let linked = split(first).ok_or(Errno::ENOENT).and_then(|(of, first)| {
            let of = open_below(self.target, of)?;
            linkat(of, first, folder, name, LinkatFlags::empty())
        });
        linked.map_err(|errno| self.failed("link", path, errno))
    }

    fn add_symlink(&self, entry: &Entry<'_>, found: &Metadata) -> Result<()> {
        let path = entry.path;
        let (folder, name) = self.place(path)?;
        let failed = |errno| self.failed("copy the symbolic link", path, errno);
        let text = readlinkat(entry.open, "").map_err(failed)?;
        symlinkat(text.as_os_str(), folder, name).map_err(failed)?;
        let to = open_below(folder, Path::new(name)).map_err(failed)?;
        let whole = self.tree.whole(path);
        metadata::copy_of_link((entry.open, found), (&to, folder, name), &whole)
    }

    fn add_file(&mut self, entry: &Entry<'_>, found: &Metadata) -> Result<()> {
        let whole = self.tree.whole(entry.path);
        // Otherwise it would wait for a process with a write lease.
        let from = reopen(entry.open, libc::O_NONBLOCK, &whole);
        let from = from.map_err(|error| match error.code() {
            Some(Errno::EAGAIN) => {
                let what = "a process has a lease on it; end that first";
                HostError::unexpected("import", &whole, what)
            }
            _ => error,
        })?;
        take_lease(&from, &whole)?;
        // From here on no process changes its data; it may have been changed since it was visited.
        let state = State::of(found);
        check_unchanged(&from, &whole, &state)?;
        let (folder, name) = self.place(entry.path)?;
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
        let to = openat(folder, name, flags, Mode::S_IRUSR | Mode::S_IWUSR);
        let to = File::from(to.map_err(|errno| self.failed("create", entry.path, errno))?);
        each_data(&from, &whole, 0..found.len(), |at, data| {
            let mut pieces = Vec::new();
            add(&mut pieces, at, data);
            for piece in pieces {
                let written = to.write_all_at(&piece.bytes, piece.offset);
                written.map_err(|error| full("write", &whole, sys::errno_of(&error)))?;
            }
            self.progress.bytes += data.len() as u64;
            (self.report)(self.progress);
            Ok(())
        })?;
        let sized = to.set_len(found.len());
        sized.map_err(|error| full("write", &whole, sys::errno_of(&error)))?;
        metadata::copy(entry.open, &to, found, &whole)?;
        check_unchanged(&from, &whole, &state)
    }

    fn failed(&self, action: &'static str, path: &Path, errno: Errno) -> HostError {
        full(action, &self.tree.whole(path), errno)
    }
}

/// The error of a change of the copy.
pub(super) fn full(action: &'static str, path: &Path, errno: Errno) -> HostError {
    match errno {
        Errno::ENOSPC => {
            let what = "the new file system is full; give a larger --size";
            HostError::unexpected(action, path, what)
        }
        errno => HostError::errno(action, path, errno),
    }
}

/// The path of the directory and the name in it; `None` for the directory that is imported.
fn split(path: &Path) -> Option<(&Path, &OsStr)> {
    Some((path.parent()?, path.file_name()?))
}
