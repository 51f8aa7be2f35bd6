//! Opens a file that the driver did not create, by a path that a caller has given.
//!
//! Users may own a part of the path, and exchange it for a symbolic link at any time. So the path is
//! resolved once, without following any link, and everything else uses the open file.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::libc;
use nix::sys::statvfs::fstatvfs;

use super::ImportSource;
use super::files::failed;
use super::import_source::FILE_BLOCK;
use super::sys::blocks::{clone_file, clone_range};
use super::target_path::walk;
use crate::error::HostError;
use crate::host::{ForeignFile, Result};

/// The directory with the open descriptors of this process.
pub(super) const DESCRIPTORS: &str = "/proc/self/fd";

/// An open file, and the path of its descriptor.
pub(super) struct OpenedFile {
    source: ImportSource,
    path: PathBuf,
    allocated: u64,
}

/// The path of an open descriptor.
fn path_of(file: impl AsFd) -> PathBuf {
    Path::new(DESCRIPTORS).join(file.as_fd().as_raw_fd().to_string())
}

/// Opens a regular file below a directory, which the administrator has chosen. No part of the path
/// below it may be a symbolic link.
pub(super) fn open(top: &Path, below: &Path) -> Result<OpenedFile> {
    let path = &top.join(below);
    let folder = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_PATH | libc::O_DIRECTORY)
        .open(top)
        .map_err(failed("open directory", top))?;
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
    let found = walk(&OwnedFd::from(folder), below, flags).map_err(|errno| match errno {
        Errno::ELOOP => {
            let what = format!(
                "a part of its path below {} is a symbolic link, which is not followed",
                top.display()
            );
            HostError::unexpected("import", path, what)
        }
        errno => HostError::errno("open", path, errno),
    })?;
    let found = File::from(found);
    // Opening a FIFO or a device can have an effect, so it is opened after its kind is known.
    if !found.metadata().map_err(failed("stat", path))?.is_file() {
        let what = "it is not a regular file";
        return Err(HostError::unexpected("import", path, what));
    }
    let file = File::open(path_of(&found)).map_err(failed("open", path))?;
    let allocated = file.metadata().map_err(failed("stat", path))?.blocks() * 512;
    let opened = path_of(&file);
    let source = ImportSource::file(path, file, FILE_BLOCK)?;
    match source.bytes() {
        0 => Err(HostError::unexpected("import", path, "it is empty")),
        _ => Ok(OpenedFile {
            source,
            path: opened,
            allocated,
        }),
    }
}

impl ForeignFile for OpenedFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn bytes(&self) -> u64 {
        self.source.bytes()
    }

    fn allocated(&self) -> u64 {
        self.allocated
    }

    fn block_size(&self) -> u32 {
        FILE_BLOCK
    }

    fn state(&self) -> String {
        self.source.state().unwrap_or_default()
    }

    fn check_unchanged(&self) -> Result<()> {
        self.source.check_unchanged()
    }

    fn find_obstacle(&self, folder: &Path) -> Result<Option<String>> {
        let nameless = OpenOptions::new()
            .read(true)
            .write(true)
            .mode(0o600)
            .custom_flags(libc::O_TMPFILE)
            .open(folder)
            .map_err(failed("create a file without a name in", folder))?;
        let block = fstatvfs(&nameless)
            .map_err(|errno| HostError::errno("statfs", folder, errno))?
            .block_size();
        // One block shows it. A clone of the whole file would take as long as the import.
        let cloned = match self.source.bytes() >= block {
            true => clone_range(&self.source, &nameless, 0, block),
            false => clone_file(&self.source, &nameless),
        };
        match cloned {
            Ok(()) => Ok(None),
            Err(errno) => match obstacle(errno) {
                Some(why) => Ok(Some(why.into())),
                None => Err(HostError::errno("clone a block to", folder, errno)),
            },
        }
    }
}

/// Why the kernel refuses to share blocks, if it does so for any file like this one.
fn obstacle(errno: Errno) -> Option<&'static str> {
    match errno {
        Errno::EXDEV => Some(
            "it is on another file system than the pool (before Linux 5.18, another mount of it is enough)",
        ),
        Errno::EOPNOTSUPP | Errno::ENOTTY => Some("its file system cannot share blocks"),
        Errno::EINVAL => Some(
            "its file system refuses to share its blocks with those of images (on btrfs because it has checksums, and images have none)",
        ),
        Errno::ETXTBSY => Some("it is a swap file"),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
