//! Owner, mode, times and extended attributes of a copied file.

use std::ffi::{CStr, OsStr};
use std::fs::{File, Metadata};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::AtFlags;
use nix::sys::stat::{Mode, UtimensatFlags, fchmod, futimens, utimensat};
use nix::sys::time::TimeSpec;
use nix::unistd::{Gid, Uid, fchown, fchownat};

use super::super::sys::attributes;
use super::copy::full;
use crate::error::HostError;
use crate::host::Result;

/// Copies the metadata of a file or a directory, whose copy has its data already: a change of the
/// owner clears setuid and capabilities, and a change of the data the times.
pub(super) fn copy(from: &File, to: &File, found: &Metadata, path: &Path) -> Result<()> {
    let failed = |errno| full("set the metadata of the copy of", path, errno);
    let (uid, gid) = owner(found);
    fchown(to, Some(uid), Some(gid)).map_err(failed)?;
    copy_attributes(from, to, path)?;
    let mode = Mode::from_bits_truncate(found.mode() & 0o7777);
    fchmod(to, mode).map_err(failed)?;
    let [accessed, modified] = times(found);
    futimens(to, &accessed, &modified).map_err(failed)
}

/// Copies the metadata of a symbolic link. The copy is opened with O_PATH, and is named in a directory.
pub(super) fn copy_of_link(
    (from, found): (&File, &Metadata),
    (to, folder, name): (&OwnedFd, &OwnedFd, &OsStr),
    path: &Path,
) -> Result<()> {
    let failed = |errno| full("set the metadata of the copy of", path, errno);
    let (uid, gid) = owner(found);
    let flags = AtFlags::AT_SYMLINK_NOFOLLOW;
    fchownat(folder, name, Some(uid), Some(gid), flags).map_err(failed)?;
    copy_attributes(from, to, path)?;
    let [accessed, modified] = times(found);
    let flags = UtimensatFlags::NoFollowSymlink;
    utimensat(folder, name, &accessed, &modified, flags).map_err(failed)
}

fn owner(found: &Metadata) -> (Uid, Gid) {
    (Uid::from_raw(found.uid()), Gid::from_raw(found.gid()))
}

fn times(found: &Metadata) -> [TimeSpec; 2] {
    [
        TimeSpec::new(found.atime(), found.atime_nsec()),
        TimeSpec::new(found.mtime(), found.mtime_nsec()),
    ]
}

fn copy_attributes(from: &File, to: impl AsFd, path: &Path) -> Result<()> {
    let read = |errno| match errno {
        Errno::ERANGE | Errno::ENODATA => {
            let what = "its extended attributes changed while the directory was read";
            HostError::unexpected("import", path, what)
        }
        errno => HostError::errno("read the extended attributes of", path, errno),
    };
    for name in attributes::names(from).map_err(read)? {
        if !is_copied(&name) {
            continue;
        }
        let value = attributes::value(from, &name).map_err(read)?;
        attributes::set(&to, &name, &value).map_err(|errno| match errno {
            // ext4 and xfs limit the attributes of a file.
            Errno::ENOSPC | Errno::E2BIG => {
                let what =
                    "the new file system is full, or its extended attributes are too large for it";
                HostError::unexpected("copy the extended attributes of", path, what)
            }
            errno => HostError::errno("copy the extended attributes of", path, errno),
        })?;
    }
    Ok(())
}

/// Whether an extended attribute belongs to the file, and not to where it is stored or used: a container
/// runtime labels the files of a volume for SELinux, and xfs also shows ACLs in its own format.
fn is_copied(name: &CStr) -> bool {
    let name = name.to_bytes();
    match name {
        b"security.selinux" => false,
        b"system.posix_acl_access" | b"system.posix_acl_default" => true,
        _ => {
            let kinds: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];
            kinds.iter().any(|kind| name.starts_with(kind))
                && !name.starts_with(b"trusted.SGI_ACL_")
        }
    }
}
