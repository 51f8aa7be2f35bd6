//! CSI paths: the files and directories that the driver creates and removes at them, and what they
//! show.
//!
//! Only the last components are stored. What the CO creates before it calls (parents, staging
//! directories) is assumed to exist, unless a test removes it.

use std::path::Path;

use nix::errno::Errno;

use super::machine::Machine;
use super::mounts::{Mounted, Shown};
use crate::error::HostCause;
use crate::host::{FileId, FileKind, FileStat, NodeKind, Space};
use crate::model::FsType;

/// st_dev of the disk that contains CSI paths.
pub(super) fn callers_device() -> u64 {
    nix::sys::stat::makedev(259, 1)
}

/// Inode of a file system's root directory.
fn root_inode(fs: FsType) -> u64 {
    match fs {
        FsType::Ext4 => 2,
        FsType::Xfs => 128,
        FsType::Btrfs => 256,
    }
}

impl Machine {
    pub(super) fn kind_at(&self, path: &Path) -> Option<FileKind> {
        self.stat_target(path).map(|stat| stat.kind)
    }

    /// Refuses a path that [`crate::host::Host::check_path`] refuses.
    pub(super) fn allow(&mut self, path: &Path) -> Result<(), HostCause> {
        match self.options.check(path) {
            Ok(()) => Ok(()),
            Err(why) => {
                self.violation(format!("an effect on {}: {why}", path.display()));
                Err(Errno::EXDEV.into())
            }
        }
    }

    pub(super) fn make_target(&mut self, path: &Path, kind: NodeKind) -> Result<(), HostCause> {
        self.allow(path)?;
        let wanted = match kind {
            NodeKind::Dir => FileKind::Dir,
            NodeKind::File => FileKind::File,
        };
        match self.kind_at(path) {
            Some(found) if found == wanted => Ok(()),
            Some(_) => Err(Errno::EEXIST.into()),
            None => {
                let parent = path.parent().and_then(|parent| self.stat_or_parent(parent));
                match parent.map(|parent| parent.kind) {
                    Some(FileKind::Dir) => {}
                    Some(_) => return Err(Errno::ENOTDIR.into()),
                    None => return Err(Errno::ENOENT.into()),
                }
                let ino = self.fresh();
                self.targets.insert(path.to_path_buf(), (kind, ino));
                Ok(())
            }
        }
    }

    pub(super) fn remove_target(&mut self, path: &Path) -> Result<(), HostCause> {
        self.allow(path)?;
        if self.top(path).is_some() {
            return Err(Errno::EBUSY.into());
        }
        if self
            .targets
            .keys()
            .any(|other| other != path && other.starts_with(path))
        {
            return Err(Errno::ENOTEMPTY.into());
        }
        self.targets.remove(path);
        Ok(())
    }

    /// lstat of a CSI path.
    pub(super) fn stat_target(&self, path: &Path) -> Option<FileStat> {
        let stat = |device, inode, kind, rdev| FileStat {
            id: FileId { device, inode },
            kind,
            size: 0,
            allocated: 0,
            rdev,
            modified: 0,
        };
        match self.top(path) {
            Some(Mounted {
                shown: Shown::Fs(number),
                line,
            }) => {
                let root = self
                    .supers
                    .get(number)
                    .map_or(2, |found| root_inode(found.fs));
                Some(stat(line.device, root, FileKind::Dir, 0))
            }
            Some(Mounted {
                shown: Shown::Node(number),
                line,
            }) => {
                let rdev = self.device(*number).rdev;
                Some(stat(
                    line.device,
                    1000 + u64::from(*number),
                    FileKind::Block,
                    rdev,
                ))
            }
            Some(Mounted {
                shown: Shown::Base, ..
            }) => Some(stat(callers_device(), 2, FileKind::Dir, 0)),
            None => self.targets.get(path).map(|(kind, ino)| match kind {
                NodeKind::Dir => stat(callers_device(), *ino, FileKind::Dir, 0),
                NodeKind::File => stat(callers_device(), *ino, FileKind::File, 0),
            }),
        }
    }

    /// lstat of a path that the driver did not create: the CO has created a directory there.
    pub(super) fn stat_or_parent(&self, path: &Path) -> Option<FileStat> {
        let absent = self.absent.iter().any(|absent| path.starts_with(absent));
        let created = || FileStat {
            id: FileId {
                device: callers_device(),
                inode: 1,
            },
            kind: FileKind::Dir,
            size: 0,
            allocated: 0,
            rdev: 0,
            modified: 0,
        };
        self.stat_target(path).or_else(|| (!absent).then(created))
    }

    /// statfs of a CSI path.
    pub(super) fn space_target(&self, path: &Path) -> Result<Space, Errno> {
        let shown = self.top(path).map(|mounted| mounted.shown);
        let Some(number) = shown.and_then(Shown::fs) else {
            self.stat_target(path).ok_or(Errno::ENOENT)?;
            return Ok(Space {
                total: 1 << 36,
                available: 1 << 35,
                free: 1 << 35,
                inodes: 1 << 22,
                inodes_free: 1 << 21,
            });
        };
        let fs = self.content(number)?.fs().ok_or(Errno::EIO)?;
        let free = fs.bytes.saturating_sub(fs.used());
        let (inodes, inodes_free) = match fs.fs {
            FsType::Btrfs => (0, 0),
            FsType::Ext4 | FsType::Xfs => (
                fs.bytes / 16384,
                fs.bytes / 16384 - (11 + fs.tokens.len() as u64).min(fs.bytes / 16384),
            ),
        };
        Ok(Space {
            total: fs.bytes,
            available: free,
            free,
            inodes,
            inodes_free,
        })
    }
}
