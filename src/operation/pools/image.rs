//! A pool on an image: where a folder's file system can't share blocks (ext4), the pool is one
//! fully reserved xfs in the folder, on a loop device of its own (`image=SIZE`).
//!
//! In the folder lie `image.json` (the record), `pool.img`, `lock`, and `mounted/`, where the xfs
//! is mounted: everything else takes that for the pool's folder. Whoever opens an image holds its
//! lock. Each step is found done or is done again, so that a crash at any of them is ended by the
//! next opening:
//!
//! - the record says "begun" before there is a file, and "complete" after mkfs: an image that was
//!   complete is never given to mkfs again;
//! - the loop device is found by device and inode of the file, also when its mount was in a
//!   namespace that is gone (the volumes' devices keep the super block alive, and mounting the
//!   same device shows the same super block), and there is never a second one;
//! - the loop device goes with its last mount, so that a crash leaves none.

mod opening;

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::make::{self, Probe};
use super::node_record::known_as;
use crate::backend::file::LOCK_FILE;
use crate::error::{Error, ErrorContext, Result, chain};
use crate::host::{Device, Effect, FileStat, Host, Kept, LoopDevice, LoopStatus};
use crate::model::size::Human;
use crate::model::{PoolDefinition, PoolId, PoolPlace};
use crate::record::NodeRecord;
use opening::Opening;

//::identify;

/// Name of the image.
pub const IMAGE_FILE: &str = "pool.img";
/// Name of the folder at which it's mounted.
pub const MOUNT_POINT: &str = "mounted";

/// An image that is mounted, locked by us for as long as this lives.
#[derive(Debug)]
pub struct OpenImage {
    /// The pool's folder, within the image.
    pub folder: PathBuf,
    /// Its loop device.
    pub device: Device,
    /// What to know: a size that isn't served, and why.
    pub warnings: Vec<String>,
    /// Of the outer folder.
    _lock: Kept,
}

/// Whether a definition and what lies at its path go together: one with `image=` and one without
/// would each take the other's folder for something else.
pub fn check_kind(pool: &PoolDefinition, found: &Probe) -> Result<()> {
    let refuse = |reason: String| Err(Error::refused(format!("pool {}", pool.name), reason));
    match (pool.image, found) {
        (None, Probe::Image(record)) => refuse(format!(
            "{} contains a pool on an image of {}; add image={}Mi to its definition",
            pool.place,
            Human(record.size),
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
pub fn look_through(host: &dyn Host, path: &Path) -> Result<(PathBuf, Probe)> {
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

/// Opens the image in a pool's folder, which exists: makes it if there is none (the caller knows
/// that one may be made), ends what a crash left, grows it to what the definition says, and
/// mounts it. Waits for its lock as long as `patience`. `machine` are folders of the machine's own file
/// systems, of which more stays free.
///
/// # Errors
///
/// [`Error::Refused`] where it can't be made; [`Error::Locked`] while another process has it;
/// [`Error::Busy`] while a
/// stranger holds image, device or mount point; [`Error::Damaged`] if the image isn't what its
/// record says; a failure of the host. None of them loses or formats anything.
pub fn open(
    host: &dyn Host,
    pool: &PoolDefinition,
    wanted: u64,
    patience: Duration,
    machine: &[PathBuf],
) -> Result<OpenImage> {
    let path = file_folder(pool)?;
    let lock = host
        .lock_file(&path.join(LOCK_FILE), patience)
        .context(|| format!("lock pool {}", pool.name))?
        .ok_or_else(|| Error::Locked {
            place: path.display().to_string(),
        })?;
    let opening = Opening {
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
        let size = Human(record.size);
        warnings.push(format!(
            "its image keeps its size of {size}: {}",
            chain(&problem)
        ));
    }
    if wanted < record.size {
        warnings.push(format!(
            "its image has {} and cannot shrink: image={} is ignored",
            Human(record.size),
            Human(wanted)
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

/// A pool's folder as an administrator's act finds it.
#[derive(Debug)]
pub struct Inside {
    /// Where the pool is, or is to be made.
    pub folder: PathBuf,
    /// What lies there.
    pub found: Probe,
    /// The image, if it was opened for the act.
    image: Option<OpenImage>,
}

impl Inside {
    /// What to know of the image and its ground.
    pub fn warnings(&self, host: &dyn Host, pool: &PoolDefinition) -> Result<Vec<String>> {
        if pool.image.is_none() {
            return Ok(Vec::new());
        }
        let mut warnings = make::check_image_ground(host, file_folder(pool)?)?;
        let more = self.image.iter().flat_map(|image| image.warnings.clone());
        warnings.extend(more);
        Ok(warnings)
    }

    /// The act is done: what it has mounted is unmounted. What can't be is found by the next who
    /// needs it.
    pub fn leave(self, host: &dyn Host, pool: &PoolDefinition) {
        if let Some(image) = self.image
            && let Err(error) = close(host, image)
        {
            tracing::warn!(pool = %pool.name, error = %chain(&error), "failed to unmount the image of the pool");
        }
    }
}

/// Looks into a pool's folder for an act. An image is opened if it isn't mounted here, and with
/// `make` it's made, unless the node record misses a pool there. `machine`: see [`open`].
pub fn enter(
    host: &dyn Host,
    node: &NodeRecord,
    pool: &PoolDefinition,
    make: bool,
    machine: &[PathBuf],
) -> Result<Inside> {
    let outer = file_folder(pool)?;
    check_kind(pool, &make::probe(host, outer)?)?;
    let (folder, found) = look_through(host, outer)?;
    let size = match (pool.image, &found) {
        (Some(size), Probe::Image(_)) => size,
        (Some(size), Probe::Blank) if make && folder == *outer => size,
        (Some(size), Probe::Missing) if make => size,
        _ => {
            return Ok(Inside {
                folder,
                found,
                image: None,
            });
        }
    };
    if !matches!(found, Probe::Image(_))
        && let Some(id) = known_as(node, pool)
    {
        return Err(blank_but_known(pool, id));
    }
    if found == Probe::Missing {
        make::make_folder(host, outer)?;
    }
    let image = open(host, pool, size, Duration::ZERO, machine)?;
    Ok(Inside {
        found: make::probe(host, &image.folder)?,
        folder: image.folder.clone(),
        image: Some(image),
    })
}

/// Unmounts an image that no volume uses; nothing of the pool may be open any more. One that is
/// used stays as it is, and is found by the next start. `true` if it's gone.
pub fn close(host: &dyn Host, image: OpenImage) -> Result<bool> {
    let is_image = |name: &Path| name.ends_with(crate::backend::file::IMAGE);
    let loops = host.loop_devices(&is_image);
    let mut asked = loops.context(|| "list loop devices".into())?.into_iter();
    let alive = host.stat(&image.folder).is_ok();
    // One that can't be asked may be on it, unless it is dead and the image is not.
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

/// Unmounts an image whose file system is dead, by itself or with the disk beneath: it can only be
/// mounted anew, once no volume's device stands on it.
pub(in crate::operation) fn leave_dead(
    host: &dyn Host,
    pool: &PoolDefinition,
    path: &Path,
) -> Result<()> {
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

/// The folders of images: their mounts are the driver's own.
pub fn own_folders(pools: &[PoolDefinition]) -> Vec<PathBuf> {
    let folder = |pool: &PoolDefinition| match &pool.place {
        PoolPlace::File { path } => pool.image.map(|_| path.clone()),
        PoolPlace::Memory => None,
    };
    pools.iter().filter_map(folder).collect()
}

/// The refusal of a blank path where a pool should be.
pub fn blank_but_known(pool: &PoolDefinition, id: PoolId) -> Error {
    Error::refused(
        format!("pool {}", pool.name),
        format!(
            "{} is empty, but this machine had pool {id} there: is its disk mounted? If it is permanently gone: slackwater pool forget {id}",
            pool.place
        ),
    )
}

/// The folder of a file pool.
pub fn file_folder(pool: &PoolDefinition) -> Result<&PathBuf> {
    match &pool.place {
        PoolPlace::File { path } => Ok(path),
        PoolPlace::Memory => Err(Error::refused(
            format!("pool {}", pool.name),
            "a memory pool does not outlive its process; it cannot be created or adopted",
        )),
    }
}
