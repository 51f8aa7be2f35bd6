//! Creates pools: examines the path, checks whether its file system is suitable, and creates the
//! pool.
//!
//! A pool is created only by an explicit action: `slackwater pool init`, or the word `init` in a
//! definition. Both call [`make_pool`]. With `init` in a definition, it is created only where a
//! file system is mounted ([`pool_fs`](super::pool_fs)). A folder that is not empty and was not
//! created by this driver never becomes a pool. `pool.json` is written last, so a crash before that
//! leaves a folder that still counts as empty, and a repeat completes the pool.

use std::path::Path;

use crate::backend::{PoolBackend, PoolKind};
use crate::error::{Error, ErrorContext, Result};
use crate::host::{BackingFs, Effect, FileKind, Host};
use crate::model::{HomeId, PoolDefinition, PoolId, SnapshotSpacePolicy};
use crate::record::{self, ImageRecord, PoolRecord};

/// The temporary file of an image's record that a crash may leave.
const HALF_WRITTEN_IMAGE: &str = "image.json.new";

/// mkfs.ext4 creates it, so it does not show that the disk is in use.
const LOST_AND_FOUND: &str = "lost+found";

/// The name of an image's record within the pool's folder.
pub const IMAGE_RECORD: &str = "image.json";

/// What is at a pool's path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Probe {
    Pool(PoolRecord),
    /// An image with a pool, which can be examined after it is mounted.
    Image(ImageRecord),
    /// An empty folder, or one in which the creation of a pool was interrupted.
    Blank,
    /// The path does not exist.
    Missing,
    /// Foreign files. Contains a clause for messages, such as "it contains \"photos\"".
    Foreign(String),
}

/// Examines a pool's path. It is an error if a pool's record cannot be read.
pub fn probe(host: &dyn Host, path: &Path) -> Result<Probe> {
    let Some(names) = host
        .list_dir(path)
        .context(|| format!("examine {}", path.display()))?
    else {
        return Ok(Probe::Missing);
    };
    if let Some(record) = PoolBackend::identify(host, path)? {
        return Ok(Probe::Pool(record));
    }
    if let Some(record) = record::load::<ImageRecord>(host, &path.join(IMAGE_RECORD))? {
        return Ok(Probe::Image(record));
    }
    for name in &names {
        if !is_blank_entry(host, path, name)? {
            return Ok(Probe::Foreign(format!("it contains {name:?}")));
        }
    }
    Ok(Probe::Blank)
}

/// Whether an entry of a folder without `pool.json` may exist on an empty disk, or in a pool whose
/// creation was interrupted.
fn is_blank_entry(host: &dyn Host, path: &Path, name: &str) -> Result<bool> {
    match name {
        LOST_AND_FOUND => Ok(true),
        HALF_WRITTEN_IMAGE => {
            let entry = path.join(name);
            let found = host.stat(&entry);
            let found = found.context(|| format!("examine {}", entry.display()))?;
            Ok(found.is_none_or(|found| found.kind == FileKind::File))
        }
        _ => PoolBackend::is_remnant(host, path, name),
    }
}

/// File systems that do not survive a reboot, which volumes must.
const VOLATILE_FS: [&str; 4] = ["tmpfs", "ramfs", "rootfs", "devtmpfs"];
/// Layers over another file system, and read-only file systems.
const UNFIT: [&str; 6] = [
    "overlay", "aufs", "ecryptfs", "squashfs", "iso9660", "erofs",
];
/// Shared between machines, or served by a process that may need memory to free memory.
const NETWORK_FS: [&str; 16] = [
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "virtiofs",
    "ceph",
    "glusterfs",
    "afs",
    "lustre",
    "gpfs",
    "ocfs2",
    "gfs2",
    "beegfs",
    "fuse",
];

/// Whether a folder's file system is suitable for a pool: returns warnings if it is, and an error
/// if it is not. `path` must exist.
pub fn check_pool_fs(host: &dyn Host, path: &Path) -> Result<Vec<String>> {
    let pool_fs = get_pool_fs(host, path)?;
    let name = pool_fs.fs_name.as_str();
    let refuse = |reason: &str| {
        Err(Error::refused(
            path.display(),
            format!("a pool cannot be on {name}: {reason}; give a directory on xfs, btrfs or ext4"),
        ))
    };
    if VOLATILE_FS.contains(&name) {
        return refuse("its contents are lost at a reboot");
    }
    if UNFIT.contains(&name) {
        return refuse("loop devices on it lose data or do not work at all");
    }
    if NETWORK_FS.contains(&name) || name.starts_with("fuse") {
        return refuse("it is not a local disk, so locks and loop devices on it are not reliable");
    }
    let mut warnings = Vec::new();
    match name {
        "xfs" | "ext4" | "ext3" | "ext2" => {}
        "btrfs" => warnings.push(
            "btrfs copies on write also within an image: thick volumes are refused here".into(),
        ),
        _ => warnings.push(format!(
            "{name} is not one of the file systems on which pools are tested (xfs, btrfs, ext4)"
        )),
    }
    if pool_fs.mount_point == Path::new("/") {
        warnings.push(
            "it is on the root file system: new volumes leave 20 % of it free, but snapshots may fill it".into(),
        );
    }
    Ok(warnings)
}

/// Refuses an extent size on a file system that has none.
pub fn check_extent(host: &dyn Host, definition: &PoolDefinition, path: &Path) -> Result<()> {
    if definition.extent.is_none() {
        return Ok(());
    }
    let pool_fs = get_pool_fs(host, path)?;
    if pool_fs.fs_name == "xfs" {
        return Ok(());
    }
    Err(Error::refused(
        path.display(),
        format!(
            "extent=SIZE is for pools on xfs, but this is {}; remove extent= from the definition of pool {}",
            pool_fs.fs_name, definition.name
        ),
    ))
}

/// What it means for a pool that its file system cannot share blocks between files; `None` if it
/// can.
pub fn without_sharing(pool_fs: &BackingFs) -> Option<String> {
    (!pool_fs.shares_blocks).then(|| {
        format!(
            "this {} cannot share blocks between files: snapshots and clones are full copies, and can be made only while the volume is not in use",
            pool_fs.fs_name
        )
    })
}

/// [`without_sharing`] for the file system of a folder.
pub fn find_without_sharing(host: &dyn Host, path: &Path) -> Result<Option<String>> {
    Ok(without_sharing(&get_pool_fs(host, path)?))
}

fn get_pool_fs(host: &dyn Host, path: &Path) -> Result<BackingFs> {
    host.backing_fs(path)
        .context(|| format!("find the file system of {}", path.display()))
}

/// Whether a folder's file system is suitable for a pool's image: as for [`check_pool_fs`], and
/// writes must go to the blocks that are reserved.
pub fn check_image_pool_fs(host: &dyn Host, path: &Path) -> Result<Vec<String>> {
    check_pool_fs(host, path)?;
    let pool_fs = get_pool_fs(host, path)?;
    if pool_fs.fs_name == "btrfs" {
        return Err(Error::refused(
            path.display(),
            "image= is not possible on btrfs, which copies on write even where blocks are reserved; btrfs shares blocks by itself, so remove image=",
        ));
    }
    let needless = pool_fs.shares_blocks.then(|| {
        format!(
            "{} can share blocks by itself: image= is not needed here",
            pool_fs.fs_name
        )
    });
    Ok(needless.into_iter().collect())
}

/// Creates a pool in an empty folder. The folder itself is created if it is missing, its parents
/// are not. An existing pool is returned unchanged. The caller has checked the node record for the
/// path, holds the pool's lock if other processes may act at the same time, and compares the home.
///
/// # Errors
///
/// A folder with foreign files, a missing parent, an unsuitable file system, a failure of the host.
pub fn make_pool(host: &dyn Host, name: &str, path: &Path, home: HomeId) -> Result<PoolRecord> {
    let id = PoolId(host.random_uuid());
    make_pool_of_kind(
        host,
        name,
        path,
        PoolKind::File { extent: None },
        (id, home),
    )
}

/// Like [`make_pool`], with another way to store images, and with the ID of the pool.
pub fn make_pool_of_kind(
    host: &dyn Host,
    name: &str,
    path: &Path,
    kind: PoolKind<'_>,
    (id, home): (PoolId, HomeId),
) -> Result<PoolRecord> {
    match probe(host, path)? {
        Probe::Pool(record) => return Ok(record),
        Probe::Image(_) => return Err(not_blank(path, "it contains an image")),
        Probe::Foreign(what) => return Err(not_blank(path, &what)),
        Probe::Missing => make_folder(host, path)?,
        Probe::Blank => {}
    }
    check_pool_fs(host, path)?;
    let record = new_record(host, name, (id, home));
    PoolBackend::make(host, path, kind, &record)?;
    Ok(record)
}

pub fn new_record(host: &dyn Host, name: &str, (id, home): (PoolId, HomeId)) -> PoolRecord {
    PoolRecord {
        id,
        home,
        name: name.to_string(),
        created_at: host.now(),
        snapshots: Some(SnapshotSpacePolicy::Reserved),
    }
}

/// Creates the folder itself, never its parents: a missing parent is a typing mistake or a missing
/// disk.
pub fn make_folder(host: &dyn Host, path: &Path) -> Result<()> {
    let doing = || format!("create the directory {}", path.display());
    let parent = path.parent().unwrap_or(Path::new("/"));
    if host.stat(parent).context(doing)?.is_none() {
        return Err(Error::refused(
            path.display(),
            format!(
                "the directory {} does not exist; is its disk mounted?",
                parent.display()
            ),
        ));
    }
    check_pool_fs(host, parent)?;
    host.perform(&Effect::MakeDir { path }).context(doing)?;
    host.perform(&Effect::SyncDir { path: parent })
        .context(doing)?;
    Ok(())
}

/// The error for a folder with foreign files.
pub fn not_blank(path: &Path, what: &str) -> Error {
    Error::refused(
        path.display(),
        format!("the directory is neither empty nor a pool ({what}); give an empty directory"),
    )
}

/// Creates a folder and its missing parents, durably. The lowest existing one is synced as well,
/// because a crash may have come right after it was created.
pub fn make_folders(host: &dyn Host, path: &Path) -> Result<()> {
    let doing = || format!("create the directory {}", path.display());
    let mut missing = Vec::new();
    for path in path.ancestors() {
        if host.stat(path).context(doing)?.is_some() {
            if let Some(path) = path.parent() {
                host.perform(&Effect::SyncDir { path }).context(doing)?;
            }
            break;
        }
        missing.push(path);
    }
    for path in missing.into_iter().rev() {
        host.perform(&Effect::MakeDir { path }).context(doing)?;
        if let Some(path) = path.parent() {
            host.perform(&Effect::SyncDir { path }).context(doing)?;
        }
    }
    Ok(())
}
