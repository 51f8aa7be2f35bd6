//! A file system in a file without a name, which is filled and then read as an image.
//!
//! The file has no name, its loop device is detached with its last user, and its mount is attached
//! nowhere. So nothing of it is left when the process ends, however it ends.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::libc;
use nix::sys::stat::Mode;
use nix::sys::statvfs::{FsFlags, fstatvfs};
use nix::unistd::{UnlinkatFlags, syncfs, unlinkat};
use uuid::Uuid;

use super::files::{failed, space_of};
use super::import_source::wait_for_lease;
use super::{ImportSource, format, loop_device, sys};
use crate::error::HostError;
use crate::host::{FileId, LoopSpec, Result};
use crate::model::FsType;

/// A file system with this block size can be used on every disk.
const BLOCK: u32 = 4096;
/// How long udev may have the loop device open after its last use.
const DETACH_TIMEOUT: Duration = Duration::from_secs(60);

/// A mounted file system in a file.
pub struct ScratchImage {
    /// The directory that has the file.
    folder: PathBuf,
    image: File,
    /// The root directory, and the mount, which must end after it.
    root: File,
    mount: OwnedFd,
}

impl ScratchImage {
    /// Creates an empty file system of `bytes`, of which about `used` will be written.
    pub fn create(folder: &Path, bytes: u64, used: u64, fs: FsType) -> Result<ScratchImage> {
        let image = OpenOptions::new()
            .read(true)
            .write(true)
            .mode(0o600)
            .custom_flags(libc::O_TMPFILE)
            .open(folder)
            .map_err(failed("create a file without a name in", folder))?;
        // Its metadata, roughly: what is missing by then is found when it is written.
        let needed = used + used / 16 + (64 << 20);
        let available = space_of(&image, folder)?.available;
        if available < needed {
            let what = format!("it has {available} bytes free, and about {needed} are needed");
            return Err(HostError::unexpected("use", folder, what));
        }
        image
            .set_len(bytes)
            .map_err(failed("set the length of a file in", folder))?;
        let found = image.metadata().map_err(failed("stat a file in", folder))?;
        let spec = LoopSpec {
            image: folder,
            backing: FileId {
                device: found.dev(),
                inode: found.ino(),
            },
            block_size: BLOCK,
            autoclear: true,
            read_only: false,
        };
        let hold = loop_device::attach_file(&image, &spec)?;
        let device = hold.device();
        format::format(&device, fs, Uuid::new_v4(), &[], true)?;
        let mount = mount(&device.path, fs)
            .map_err(|errno| HostError::errno("mount", &device.path, errno))?;
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        // Opened now, so that it reports every error of a write from here on.
        let root = openat(&mount, ".", flags, Mode::empty())
            .map_err(|errno| HostError::errno("open", &device.path, errno))?;
        // mkfs.ext4 has created it, and e2fsck would create it again.
        match unlinkat(&root, "lost+found", UnlinkatFlags::RemoveDir) {
            Ok(()) | Err(Errno::ENOENT) => {}
            Err(errno) => return Err(HostError::errno("remove lost+found on", folder, errno)),
        }
        Ok(ScratchImage {
            folder: folder.to_path_buf(),
            image,
            root: File::from(root),
            mount,
        })
    }

    /// Its root directory.
    pub fn root(&self) -> &File {
        &self.root
    }

    /// Unmounts it. An error if not everything was written. What is returned cannot be changed by
    /// anyone.
    pub fn into_source(self) -> Result<ImportSource> {
        let ScratchImage {
            folder,
            image,
            root,
            mount,
        } = self;
        let written = syncfs(&root).and_then(|()| fstatvfs(&root));
        let is_broken = match &written {
            Ok(found) => found.flags().contains(FsFlags::ST_RDONLY),
            Err(_) => true,
        };
        drop(root);
        drop(mount);
        if is_broken || image.sync_data().is_err() {
            let what = "the file system in it could not be written; is the disk full?";
            return Err(HostError::unexpected("use", folder, what));
        }
        // Opened before the other descriptor is closed, which is open for writing.
        let link = format!("/proc/self/fd/{}", image.as_raw_fd());
        let open = File::open(link).map_err(failed("open a file in", &folder))?;
        drop(image);
        // The lease is the proof that the loop device has released the file; the next call reports an
        // error. The content was made durable before, so an unmount that fails loses nothing.
        let _ = wait_for_lease(&open, DETACH_TIMEOUT);
        ImportSource::file(&folder, open, BLOCK)
    }
}

/// Mounts a device without attaching the mount anywhere.
fn mount(device: &Path, fs: FsType) -> nix::Result<OwnedFd> {
    let text = |bytes: &[u8]| CString::new(bytes).map_err(|_| Errno::EINVAL);
    let context = sys::open_fs(&text(fs.name().as_bytes())?)?;
    let source = text(device.as_os_str().as_bytes())?;
    sys::set_fs_option(&context, c"source", Some(&source))?;
    sys::mount_fs(&context)
}
