//! Where a pool is found: its folder, after everything that must be opened or mounted for it. What a
//! pool contains is known to [`PoolBackend`].

pub mod image;
pub mod lvm;
pub mod make;
pub mod pool_fs;

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{ErrorContext, Result};
use crate::host::{Device, Host};
use crate::model::{HomeId, PoolDefinition, PoolId, PoolPlace};

use super::PoolBackend;
use super::records::write_lock;
use image::{MOUNT_POINT, OpenImage};
use lvm::{CreatePolicy, OpenRecords};
use make::Probe;

/// What is mounted where a pool's file system belongs.
enum FoundMount {
    /// The device of the pool.
    Own,
    /// Another device; the text says which.
    Foreign(String),
}

fn find_mount(host: &dyn Host, device: &Device, target: &Path) -> Result<Option<FoundMount>> {
    let table = host.mounts().context(|| "read the mount table".into())?;
    let found = table.iter().rfind(|mount| mount.mount_point == target);
    Ok(found.map(|mount| match mount.device == device.rdev {
        true => FoundMount::Own,
        false => FoundMount::Foreign(format!(
            "{} ({}) is mounted at {}; unmount it",
            mount.source.display(),
            mount.fs_name,
            target.display()
        )),
    }))
}

/// What must stay open while the folder of a pool is in use.
#[derive(Debug)]
pub enum OpenPlace {
    /// The image that contains the pool.
    Image(OpenImage),
    /// The records of a pool of LVM.
    Records(OpenRecords),
}

impl OpenPlace {
    /// The pool's folder.
    pub fn folder(&self) -> &Path {
        match self {
            OpenPlace::Image(image) => &image.folder,
            OpenPlace::Records(records) => &records.folder,
        }
    }

    /// The ID that the pool has, if that is known without its folder.
    pub fn id(&self) -> Option<PoolId> {
        match self {
            OpenPlace::Image(_) => None,
            OpenPlace::Records(records) => Some(records.header.id),
        }
    }

    /// Unmounts it, unless it is in use. No file of the pool may be open any more. Returns whether
    /// it was unmounted.
    pub fn close(self, host: &dyn Host) -> Result<bool> {
        match self {
            OpenPlace::Image(image) => image::close(host, image),
            OpenPlace::Records(records) => lvm::close(host, &records),
        }
    }
}

/// The place of a pool.
pub struct FoundPlace {
    /// The path of the definition, or that of the records.
    pub outer: PathBuf,
    /// What was opened.
    pub open: Option<OpenPlace>,
    /// What is in the pool's folder.
    pub found: Probe,
}

impl FoundPlace {
    /// The pool's folder.
    pub fn folder(&self) -> PathBuf {
        let inner = self.open.as_ref().map(OpenPlace::folder);
        inner.unwrap_or(&self.outer).to_path_buf()
    }
}

/// How to open a place.
pub struct OpenOptions {
    pub create: CreatePolicy,
    /// How long to wait for a lock.
    pub max_wait: Duration,
    /// Folders on the file systems that have the machine's own files.
    pub machine: Vec<PathBuf>,
}

/// Opens the place of a definition: mounts the image or the records of the pool, and creates them
/// where that is allowed.
pub fn open(
    host: &dyn Host,
    definition: &PoolDefinition,
    opening: &OpenOptions,
) -> Result<FoundPlace> {
    match definition.place {
        PoolPlace::Lvm { .. } => open_records(host, definition, opening),
        PoolPlace::File { .. } | PoolPlace::Memory { .. } => open_folder(host, definition, opening),
    }
}

fn open_records(
    host: &dyn Host,
    definition: &PoolDefinition,
    opening: &OpenOptions,
) -> Result<FoundPlace> {
    let open = lvm::open(host, definition, opening.create, opening.max_wait)?;
    let found = match &open {
        Some(open) => {
            let found = make::probe(host, &open.folder)?;
            lvm::check_folder(host, definition, open, &found)?;
            found
        }
        None => Probe::Blank,
    };
    let inner = open.as_ref().map(|open| open.folder.clone());
    Ok(FoundPlace {
        outer: inner.unwrap_or_else(|| definition.place.to_string().into()),
        open: open.map(OpenPlace::Records),
        found,
    })
}

fn open_folder(
    host: &dyn Host,
    definition: &PoolDefinition,
    opening: &OpenOptions,
) -> Result<FoundPlace> {
    let outer = folder(definition);
    image::unmount_dead_image(host, definition, &outer)?;
    let found = make::probe(host, &outer)?;
    image::check_kind(definition, &found)?;
    let may_create = definition.init && !opening.create.is_known;
    let is_nothing = matches!(found, Probe::Blank | Probe::Missing);
    if is_nothing && may_create {
        pool_fs::check_mount(host, definition, &outer)?;
    }
    let mut place = FoundPlace {
        outer,
        open: None,
        found,
    };
    let Some(size) = definition.image else {
        return Ok(place);
    };
    match place.found {
        Probe::Image(_) => {}
        Probe::Blank if may_create => {}
        Probe::Missing if may_create => make::make_folder(host, &place.outer)?,
        _ => return Ok(place),
    }
    let image = image::open(host, definition, size, opening.max_wait, &opening.machine)?;
    place.found = make::probe(host, &image.folder)?;
    place.open = Some(OpenPlace::Image(image));
    Ok(place)
}

/// The ID and the home of the pool at a place, if there is one. An image is mounted to read it, and
/// stays mounted for the opening.
pub fn identify(
    host: &dyn Host,
    definition: &PoolDefinition,
    machine: &[PathBuf],
) -> Result<Option<(PoolId, HomeId)>> {
    if let PoolPlace::Lvm { pool } = &definition.place {
        let found = lvm::identify(host, pool)?;
        return Ok(found.map(|header| (header.id, header.home)));
    }
    let path = folder(definition);
    let found = match (definition.image, make::probe(host, &path)?) {
        (Some(size), Probe::Image(_)) => {
            let image = image::open(host, definition, size, Duration::ZERO, machine)?;
            PoolBackend::identify(host, &image.folder)?
        }
        (None, Probe::Pool(pool)) => Some(pool),
        _ => None,
    };
    Ok(found.map(|pool| (pool.id, pool.home)))
}

/// Makes the same accesses as the opening of a place, which may hang on a disk that hangs. Their
/// errors are left to the opening.
pub fn access(host: &dyn Host, definition: &PoolDefinition) {
    if let PoolPlace::Lvm { pool } = &definition.place {
        let _ = lvm::identify(host, pool);
        return;
    }
    let outer = folder(definition);
    let inner = definition.image.map(|_| outer.join(MOUNT_POINT));
    for path in inner.into_iter().chain([outer]) {
        let _ = match make::probe(host, &path) {
            Ok(Probe::Pool(_) | Probe::Image(_)) => write_lock(host, &path),
            Ok(Probe::Blank) if definition.init => host.backing_fs(&path).map(drop),
            Ok(Probe::Blank | Probe::Missing | Probe::Foreign(_)) | Err(_) => Ok(()),
        };
    }
}

/// The path of a pool on the simulated host.
fn memory_path(name: &str) -> PathBuf {
    Path::new("/memory").join(name)
}

/// The folder of a pool, or the path that stands for it while it is not open.
pub fn folder(definition: &PoolDefinition) -> PathBuf {
    match &definition.place {
        PoolPlace::File { path } => path.clone(),
        PoolPlace::Lvm { pool } => Path::new(lvm::FOLDER).join(pool.mapped()),
        PoolPlace::Memory { .. } => memory_path(&definition.name),
    }
}
