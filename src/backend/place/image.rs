//! A pool on an image. Where a folder's file system cannot share blocks (ext4), the pool is a fully
//! reserved xfs in a file in the folder, on a loop device of its own (`image=SIZE`).
//!
//! The folder contains `image.json` (the record), `pool.img`, `lock`, and `mounted/`, where the xfs
//! is mounted and which the rest of the driver uses as the pool's folder. A process that opens an
//! image holds its lock. Each step checks whether it was done before, so the next opening completes
//! what a crash interrupted:
//!
//! - The record says "begun" before the file exists, and "complete" after mkfs. mkfs never runs
//!   again on an image that was complete.
//! - The loop device is found by the device and inode number of the file, also if it was mounted in
//!   a mount namespace that is gone. The volumes' devices keep the superblock of the xfs in use,
//!   and mounting the same device again gives the same superblock. An image never has a second loop
//!   device.
//! - The kernel detaches the loop device after its last unmount, so a crash leaves none.

mod opening;

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::lvm;
use super::make::{self, Probe};
use crate::backend::PoolBackend;
use crate::backend::file::object_of;
use crate::error::{Error, ErrorContext, Result, chain};
use crate::host::{Device, Effect, FileStat, Host, Kept, LoopDevice, LoopStatus};
use crate::model::size::HumanBytes;
use crate::model::{PoolDefinition, PoolId, PoolPlace};
use crate::record::NodeRecord;
use opening::ImageOpener;

/// The name of the image.
pub const IMAGE_FILE: &str = "pool.img";
/// The name of the folder at which it is mounted.
pub const MOUNT_POINT: &str = "mounted";

/// An image that is mounted, and locked by this process while this value exists.
#[derive(Debug)]
pub struct OpenImage {
    /// The pool's folder, within the image.
    pub folder: PathBuf,
    /// Its loop device.
    pub device: Device,
    /// Warnings, such as a configured size that the image does not have, and the reason.
    pub warnings: Vec<String>,
    /// The lock of the outer folder.
    _lock: Kept,
}

/// Checks that a definition fits what is at its path. A definition with `image=` would misread the
/// folder of one without it, and the reverse.
pub fn check_kind(pool: &PoolDefinition, found: &Probe) -> Result<()> {
    let refuse = |reason: String| Err(Error::refused(format!("pool {}", pool.name), reason));
    match (pool.image, found) {
        (None, Probe::Image(record)) => refuse(format!(
            "{} contains a pool on an image of {}; add image={}Mi to its definition",
            pool.place,
            HumanBytes(record.size),
            record.size >> 20
        )),
        (Some(_), Probe::Pool(_)) => refuse(format!(
            "{} contains a pool without an image; remove image= from its definition (a pool cannot be moved onto an image later)",
            pool.place
        )),
        (Some(_), Probe::Image(_) | Probe::Blank | Probe::Missing | Probe::Foreign(_))
        | (None, Probe::Pool(_) | Probe::Blank | Probe::Missing | Probe::Foreign(_)) => Ok(()),
    }
}

/// The directory that holds the pool at a path now, and what it contains: the content of a pool image
/// that is mounted here, or [`Probe::Image`] for one that is not mounted. Changes nothing.
pub fn probe_path(host: &dyn Host, path: &Path) -> Result<(PathBuf, Probe)> {
    let found = make::probe(host, path)?;
    if matches!(found, Probe::Image(_)) {
        let folder = path.join(MOUNT_POINT);
        let shown = host
            .stat(&folder)
            .context(|| format!("examine {}", folder.display()))?;
        if let (Some((_, loops)), Some(shown)) = (on(host, path)?, shown)
            && loops
                .iter()
                .any(|found| Device::of_loop(found.number).rdev == shown.id.device)
        {
            let inner = make::probe(host, &folder)?;
            return Ok((folder, inner));
        }
    }
    Ok((path.to_path_buf(), found))
}

/// Opens the image in a pool's folder, which exists. Creates the image if there is none (the caller
/// has checked that it may be created), completes what a crash interrupted, grows the image to the
/// size in the definition, and mounts it. Waits for its lock for `max_wait`. `machine` are folders
/// on the file systems that have the machine's own files, on which more space stays free.
///
/// # Errors
///
/// [`Error::Refused`] if the image cannot be created; [`Error::Locked`] while another process has
/// it; [`Error::Busy`] while a foreign process or mount uses the image, its device or its mount
/// point; [`Error::Damaged`] if the image is not what its record says; a failure of the host. No
/// error loses data or formats anything.
pub fn open(
    host: &dyn Host,
    pool: &PoolDefinition,
    wanted: u64,
    max_wait: Duration,
    machine: &[PathBuf],
) -> Result<OpenImage> {
    let path = file_folder(pool)?;
    let lock = PoolBackend::lock(host, path, max_wait)
        .context(|| format!("lock pool {}", pool.name))?
        .ok_or_else(|| Error::Locked {
            place: path.display().to_string(),
        })?;
    let opening = ImageOpener {
        host,
        pool,
        path,
        machine,
    };
    let mut warnings = Vec::new();
    let record = match opening.record()? {
        Some(record) if record.formatted.complete => record,
        begun => opening.begin(begun, wanted)?,
    };
    let (record, problem) = match record.formatted.complete {
        true => opening.reserve_more(record, wanted)?,
        false => (record, None),
    };
    if let Some(problem) = problem {
        let size = HumanBytes(record.size);
        warnings.push(format!(
            "its image keeps its size of {size}: {}",
            chain(&problem)
        ));
    }
    if wanted < record.size {
        warnings.push(format!(
            "its image has {} and cannot shrink: image={} is ignored",
            HumanBytes(record.size),
            HumanBytes(wanted)
        ));
    }
    let hold = opening.attach(&record)?;
    let device = hold.device();
    opening.format_once(record, &device)?;
    let folder = opening.mount(&device)?;
    if let Err(error) = opening.grow(&device, &folder) {
        warnings.push(format!(
            "its file system cannot be grown: {}",
            chain(&error)
        ));
    }
    for warning in &warnings {
        tracing::warn!(pool = %pool.name, "{warning}");
    }
    Ok(OpenImage {
        folder,
        device,
        warnings,
        _lock: lock,
    })
}

/// A pool's folder, for the action of an administrator.
#[derive(Debug)]
pub struct AdminPool {
    /// The folder that contains the pool or in which it is to be created.
    pub folder: PathBuf,
    /// What was found there.
    pub found: Probe,
    /// The image, if it was opened for this action.
    image: Option<OpenImage>,
}

impl AdminPool {
    /// Warnings about the image and the file system below it.
    pub fn warnings(&self, host: &dyn Host, pool: &PoolDefinition) -> Result<Vec<String>> {
        if pool.image.is_none() {
            return Ok(Vec::new());
        }
        let mut warnings = make::check_image_pool_fs(host, file_folder(pool)?)?;
        let more = self.image.iter().flat_map(|image| image.warnings.clone());
        warnings.extend(more);
        Ok(warnings)
    }

    /// Ends the action: unmounts what it has mounted. The next user of an image finds it mounted if
    /// this fails.
    pub fn close(self, host: &dyn Host, pool: &PoolDefinition) {
        if let Some(image) = self.image
            && let Err(error) = close(host, image)
        {
            tracing::warn!(pool = %pool.name, error = %chain(&error), "failed to unmount the image of the pool");
        }
    }
}

/// Examines a pool's folder for an action. An image is opened if it is not mounted here. With
/// `make` it is created, unless the node record has a pool there that is missing. For `machine` see
/// [`open`].
pub fn open_for_admin(
    host: &dyn Host,
    node: &NodeRecord,
    pool: &PoolDefinition,
    make: bool,
    machine: &[PathBuf],
) -> Result<AdminPool> {
    let outer = file_folder(pool)?;
    check_kind(pool, &make::probe(host, outer)?)?;
    let (folder, found) = probe_path(host, outer)?;
    let size = match (pool.image, &found) {
        (Some(size), Probe::Image(_)) => size,
        (Some(size), Probe::Blank) if make && folder == *outer => size,
        (Some(size), Probe::Missing) if make => size,
        _ => {
            return Ok(AdminPool {
                folder,
                found,
                image: None,
            });
        }
    };
    if !matches!(found, Probe::Image(_))
        && let Some(id) = node.find_pool(pool)
    {
        return Err(blank_but_known(pool, id));
    }
    if found == Probe::Missing {
        make::make_folder(host, outer)?;
    }
    let image = open(host, pool, size, Duration::ZERO, machine)?;
    Ok(AdminPool {
        found: make::probe(host, &image.folder)?,
        folder: image.folder.clone(),
        image: Some(image),
    })
}

/// Unmounts an image that no volume uses. No file of the pool may be open any more. An image that
/// is in use stays mounted, and the next start finds it. Returns whether it was unmounted.
pub fn close(host: &dyn Host, image: OpenImage) -> Result<bool> {
    let loops = host.loop_devices(&|name| object_of(name).is_some());
    let mut asked = loops.context(|| "list loop devices".into())?.into_iter();
    let alive = host.stat(&image.folder).is_ok();
    // A device whose status cannot be read may be on this image, unless the device is dead and the
    // image is not.
    let is_on_it = |found: LoopDevice| match found.status {
        Ok(status) => status.backing.device == image.device.rdev,
        Err(error) => !(alive && error.is_dead_disk()),
    };
    if asked.any(is_on_it) {
        return Ok(false);
    }
    let target = image.folder.as_path();
    let doing = || format!("unmount {}", target.display());
    match host.perform(&Effect::Unmount { target }) {
        Err(error) if error.code() == Some(nix::errno::Errno::EBUSY) => return Ok(false),
        done => done.map(drop).context(doing)?,
    }
    let number = nix::sys::stat::minor(image.device.rdev) as u32;
    host.perform(&Effect::RecreateLoop { number })
        .map(drop)
        .context(|| format!("renew {}", image.device.path.display()))?;
    Ok(true)
}

/// Unmounts an image whose file system is dead, either alone or together with the disk below it. It
/// can only be mounted again after all devices of its volumes are detached.
pub fn unmount_dead_image(host: &dyn Host, pool: &PoolDefinition, path: &Path) -> Result<()> {
    if pool.image.is_none() {
        return Ok(());
    }
    let folder = path.join(MOUNT_POINT);
    let mounts = host.mounts().context(|| "read the mount table".into())?;
    let is_mounted = mounts.iter().any(|mount| mount.mount_point == folder);
    let is_dead = || matches!(host.stat(&folder), Err(error) if error.is_dead_disk());
    if !is_mounted || !is_dead() {
        return Ok(());
    }
    match host.perform(&Effect::Unmount { target: &folder }) {
        Err(error) if error.code() == Some(nix::errno::Errno::EBUSY) => Err(Error::Busy {
            subject: format!("the image of pool {} (its file system is dead)", pool.name),
            holder: "volumes on it are in use; delete the pods that use them".into(),
        }),
        done => done
            .map(drop)
            .context(|| format!("unmount {}", folder.display())),
    }
}

fn stat_image(host: &dyn Host, path: &Path) -> Result<Option<FileStat>> {
    let image = path.join(IMAGE_FILE);
    host.stat(&image)
        .context(|| format!("examine {}", image.display()))
}

/// The image in a pool's folder and the loop devices on it; `None` if there is no image.
fn on(host: &dyn Host, path: &Path) -> Result<Option<(FileStat, Vec<LoopStatus>)>> {
    host.loops_on(&path.join(IMAGE_FILE), Path::new(IMAGE_FILE))
        .context(|| format!("find the loop devices of the image in {}", path.display()))
}

/// The folders of images and of records. Mounts in them belong to the driver.
pub fn own_folders(pools: &[PoolDefinition]) -> Vec<PathBuf> {
    let folder = |pool: &PoolDefinition| match &pool.place {
        PoolPlace::File { path } => pool.image.map(|_| path.clone()),
        PoolPlace::Lvm { .. } => Some(lvm::FOLDER.into()),
        PoolPlace::Memory { .. } => None,
    };
    pools.iter().filter_map(folder).collect()
}

/// The error for an empty path at which the node record has a pool.
pub fn blank_but_known(pool: &PoolDefinition, id: PoolId) -> Error {
    Error::refused(
        format!("pool {}", pool.name),
        format!(
            "{} is empty, but this machine had pool {id} there: is its disk mounted? If it is permanently gone: slackwater pool forget {id}",
            pool.place
        ),
    )
}

pub fn file_folder(pool: &PoolDefinition) -> Result<&PathBuf> {
    match &pool.place {
        PoolPlace::File { path } => Ok(path),
        PoolPlace::Lvm { .. } | PoolPlace::Memory { .. } => Err(Error::refused(
            format!("pool {}", pool.name),
            "a memory pool does not outlive its process; it cannot be created or adopted",
        )),
    }
}
