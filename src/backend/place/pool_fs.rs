//! The file system below a pool's folder: the mount that shows it, and whether the machine's own
//! files are on it.

use std::path::{Path, PathBuf};

use crate::error::{Error, ErrorContext, Result};
use crate::host::{FolderMount, Host};
use crate::model::{MountRule, PoolDefinition, PoolPlace};

/// The file system below a pool, as it was when the pool was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolFs {
    /// The type of the file system that has the pool's images.
    pub file_system: String,
    /// The mount at the pool's folder or above it, in the notation of findmnt: `/dev/sdb1`, or
    /// `/dev/sda2[/srv/pool]` for a part of a file system.
    pub mount: String,
    /// Why the folder is not the root of a file system that is mounted there; `None` if it is.
    pub without_mount: Option<String>,
    /// The machine's own files are on the file system that has the pool's images.
    pub of_machine: bool,
}

impl PoolFs {
    /// Reads it for the folder of a definition, and for the folder within its image if it has one.
    pub fn of(
        host: &dyn Host,
        definition: &PoolDefinition,
        (outer, inner): (&Path, &Path),
        machine: &[PathBuf],
    ) -> Result<PoolFs> {
        let shown = mount_of(host, outer)?;
        let images = mount_of(host, inner)?.mount;
        Ok(PoolFs {
            mount: shown.mount.shown(),
            without_mount: match definition.place {
                PoolPlace::File { .. } => problem(outer, &shown),
                PoolPlace::Lvm { .. } | PoolPlace::Memory { .. } => None,
            },
            of_machine: is_of_machine(host, images.device, machine),
            file_system: images.fs_name,
        })
    }
}

fn mount_of(host: &dyn Host, folder: &Path) -> Result<FolderMount> {
    host.mount_of(folder)
        .context(|| format!("find the mount of {}", folder.display()))
}

fn problem(folder: &Path, shown: &FolderMount) -> Option<String> {
    (!shown.shows_root).then(|| {
        format!(
            "no file system is mounted at {}, which is a directory on {} ({})",
            folder.display(),
            shown.mount.source.display(),
            shown.mount.fs_name
        )
    })
}

/// Why a folder, which may be missing, is not the root of a file system that is mounted there;
/// `None` if it is.
pub fn without_mount(host: &dyn Host, folder: &Path) -> Result<Option<String>> {
    let found = host
        .stat(folder)
        .context(|| format!("examine {}", folder.display()))?;
    match found {
        None => Ok(Some(format!("{} does not exist", folder.display()))),
        Some(_) => Ok(problem(folder, &mount_of(host, folder)?)),
    }
}

/// Refuses to create a pool in a folder whose disk may be missing, unless the definition allows any
/// folder.
pub fn check_mount(host: &dyn Host, pool: &PoolDefinition, folder: &Path) -> Result<()> {
    if pool.mount == Some(MountRule::Any) || pool.place.is_memory() {
        return Ok(());
    }
    match without_mount(host, folder)? {
        None => Ok(()),
        Some(what) => Err(Error::refused(
            format!("pool {}", pool.name),
            format!(
                "{what}, so no pool is created there; mount its disk, or add mount=any to its definition if the pool is meant to share a file system"
            ),
        )),
    }
}

/// If the machine's own files are on the file system, new volumes and growth leave one fifth of it
/// free: the kubelet evicts pods from a disk with less than 10 or 15 % of free space. Copies and
/// snapshots of existing volumes are limited only by the reserve for metadata, so that a backup is
/// still possible.
const MACHINE_RESERVE_DIVISOR: u64 = 5;

/// Bytes that stay free for the machine on its own file system of this size.
pub fn machine_reserve(total: u64) -> u64 {
    total.div_ceil(MACHINE_RESERVE_DIVISOR)
}

/// Folders on the file systems that have the machine's own files. In a container, `/` is the file
/// system of the container, so the folder of the node record is used as well.
pub fn machine_folders(node_record: &Path, allowed: &[PathBuf]) -> Vec<PathBuf> {
    let root = Path::new("/");
    let record = node_record.parent().unwrap_or(root);
    let own = [root, record].map(Path::to_path_buf);
    own.into_iter().chain(allowed.iter().cloned()).collect()
}

/// Whether one of these folders is on a file system, or will be when it is created.
pub fn is_of_machine(host: &dyn Host, device: u64, machine: &[PathBuf]) -> bool {
    let is_on_it = |folder: &PathBuf| {
        let mut there = folder.ancestors();
        let nearest = there.find(|folder| !matches!(host.stat(folder), Ok(None)));
        let found = nearest.map(|folder| host.mount_of(folder));
        found.is_some_and(|found| found.is_ok_and(|found| found.mount.device == device))
    };
    machine.iter().any(is_on_it)
}
