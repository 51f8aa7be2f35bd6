//! Discarding the free blocks of a file system on the disk, or in the image, below it.

use std::os::fd::AsFd;
use std::path::Path;

use nix::errno::Errno;
use nix::unistd::syncfs;

use super::files::open_real_dir;
use super::freeze::root_fd;
use super::sys;
use crate::error::HostError;
use crate::host::{MountRoot, Result};

/// FITRIM over the whole file system that contains a directory.
pub(super) fn trim(path: &Path) -> Result<()> {
    let directory = open_real_dir(path)?;
    sync(&directory, path)?;
    match sys::fs::trim(directory, 0) {
        Ok(bytes) => {
            tracing::debug!(path = %path.display(), bytes, "discarded free blocks of a file system");
        }
        // The disk does not support discard, or the file system may not issue it. The blocks are
        // free nevertheless.
        Err(errno @ (Errno::EOPNOTSUPP | Errno::ENOTTY | Errno::EINVAL | Errno::EPERM)) => {
            tracing::warn!(
                path = %path.display(), %errno,
                "failed to discard free blocks (FITRIM), because the disk or file system does not support it"
            );
        }
        Err(errno) => return Err(HostError::errno("trim the file system of", path, errno)),
    }
    Ok(())
}

/// FITRIM of the volume whose root is open.
pub(super) fn trim_volume(root: &MountRoot, least: u64) -> Result<()> {
    let device = &root.device.path;
    let directory = root_fd(root)?;
    sync(directory, device)?;
    let bytes = sys::fs::trim(directory, least)
        .map_err(|errno| HostError::errno("trim the file system on", device, errno))?;
    tracing::debug!(device = %device.display(), bytes, "released unused blocks of a volume's image");
    Ok(())
}

/// FITRIM uses the free space that is recorded on disk, and the release of blocks may be in a
/// transaction that is still in memory.
fn sync(directory: impl AsFd, path: &Path) -> Result<()> {
    syncfs(directory).map_err(|errno| HostError::errno("sync the file system of", path, errno))
}
