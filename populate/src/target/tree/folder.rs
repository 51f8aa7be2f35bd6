//! Folders by their descriptors: nothing here follows a link.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::{SFlag, fstatat};
use nix::unistd::{UnlinkatFlags, unlinkat};

use crate::failure::{Failure, Next, Result};

/// Whether a name of a folder is that of a folder, and not of a link.
pub fn is_folder(parent: &OwnedFd, last: &OsStr) -> bool {
    let found = fstatat(parent, last, AtFlags::AT_SYMLINK_NOFOLLOW);
    let kind = found.map(|found| SFlag::from_bits_truncate(found.st_mode) & SFlag::S_IFMT);
    kind == Ok(SFlag::S_IFDIR)
}

pub fn open_below(parent: impl AsFd, name: &OsStr) -> nix::Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
    openat2(parent, name, how)
}

/// The names in a folder.
fn children(folder: &OwnedFd) -> nix::Result<Vec<Vec<u8>>> {
    let copy = open_below(folder, OsStr::new("."))?;
    let mut found = Vec::new();
    for entry in Dir::from_fd(copy)?.iter() {
        let name = entry?.file_name().to_bytes().to_vec();
        if !matches!(&name[..], b"." | b"..") {
            found.push(name);
        }
    }
    Ok(found)
}

/// Removes what is in the folder at `path`, except what is kept, by its path. Links are removed, never
/// followed.
pub fn clear(
    folder: &OwnedFd,
    path: Option<&[u8]>,
    is_kept: &dyn Fn(&[u8]) -> bool,
) -> nix::Result<()> {
    for child in children(folder)? {
        let path = match path {
            Some(path) => [path, b"/", &child].concat(),
            None => child.clone(),
        };
        let is_kept_here = is_kept(&path);
        let name = OsStr::from_bytes(&child);
        let inner = match open_below(folder, name) {
            Ok(inner) => inner,
            Err(Errno::ENOTDIR | Errno::ELOOP) if is_kept_here => continue,
            Err(Errno::ENOTDIR | Errno::ELOOP) => {
                unlinkat(folder, name, UnlinkatFlags::NoRemoveDir)?;
                continue;
            }
            Err(errno) => return Err(errno),
        };
        clear(&inner, Some(&path), is_kept)?;
        if !is_kept_here {
            unlinkat(folder, name, UnlinkatFlags::RemoveDir)?;
        }
    }
    Ok(())
}

/// Refuses a folder that has anything, except what mkfs creates and `allowed`.
pub fn check_empty(folder: &OwnedFd, allowed: Option<&str>) -> Result<()> {
    let found = children(folder)
        .map_err(|errno| Failure::target("read the volume", &io::Error::from(errno)))?;
    let is_known = |name: &Vec<u8>| {
        &name[..] == b"lost+found" || allowed.is_some_and(|allowed| &name[..] == allowed.as_bytes())
    };
    match found.iter().all(is_known) {
        true => Ok(()),
        false => {
            let what =
                "the volume is not empty: it has a part of an earlier attempt, or data of a user";
            Err(Failure::new(Next::NewVolume, "TargetNotEmpty", what))
        }
    }
}
