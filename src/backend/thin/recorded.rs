//! What the records of a pool say of its thin devices, read directly from their files, so that records
//! in the trash count as well.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use uuid::Uuid;

use crate::backend::records::{RECORD, SNAPSHOTS, TRASH, VOLUMES};
use crate::backend::store::DeletedImage;
use crate::error::{HostError, chain};
use crate::host::{self, Host};
use crate::model::Allocation;
use crate::model::size::image_bytes;

/// The part of a record that describes the image.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub(super) struct ThinImage {
    /// The volume or snapshot.
    #[serde(skip)]
    pub(super) uuid: Uuid,
    /// The ID of the thin device.
    #[serde(default, rename = "image")]
    pub(super) id: u32,
    #[serde(default)]
    pub(super) size: u64,
    #[serde(default)]
    pub(super) allocation: Allocation,
    #[serde(default)]
    pub(super) lineage: Option<Uuid>,
    #[serde(default)]
    pub(super) incarnation: Option<Uuid>,
    /// Only a snapshot has it.
    #[serde(default)]
    pub(super) source_incarnation: Option<Uuid>,
}

impl ThinImage {
    /// As in the records of volumes and snapshots.
    fn lineage(&self) -> Option<Uuid> {
        self.lineage
            .or(self.source_incarnation)
            .or(self.incarnation)
    }
}

/// The image that the record in a directory describes; `None` without a record or an ID.
pub(super) fn image_in(host: &dyn Host, dir: &Path) -> host::Result<Option<ThinImage>> {
    let path = dir.join(RECORD);
    let Some(bytes) = host.read_file(&path)? else {
        return Ok(None);
    };
    let image: ThinImage = serde_json::from_slice(&bytes)
        .map_err(|error| HostError::unexpected("read", path, error.to_string()))?;
    let named = uuid_of(dir).filter(|_| image.id != 0);
    Ok(named.map(|uuid| ThinImage { uuid, ..image }))
}

/// The volume or snapshot whose directory this is, which may be in the trash.
fn uuid_of(dir: &Path) -> Option<Uuid> {
    let name = dir.file_name()?.to_str()?;
    Uuid::try_parse(name.split('.').next()?).ok()
}

/// The IDs of thin devices that the records of a pool name, including those in the trash.
#[derive(Debug, Default)]
pub struct RecordedIds {
    pub ids: BTreeSet<u32>,
    /// A record could not be read, so its ID is unknown.
    pub is_incomplete: bool,
    /// The directories of deleted volumes and snapshots whose records cannot be read, and why. Their
    /// thin devices stay.
    pub unreadable_trash: Vec<(PathBuf, String)>,
}

/// Reads the IDs of all records of the pool in a folder.
pub fn recorded_ids(host: &dyn Host, root: &Path) -> host::Result<RecordedIds> {
    let mut found = RecordedIds::default();
    for part in [TRASH, VOLUMES, SNAPSHOTS] {
        for dir in objects(host, &root.join(part))? {
            match image_in(host, &dir) {
                Ok(image) => found.ids.extend(image.map(|image| image.id)),
                Err(error) => {
                    found.is_incomplete = true;
                    if part == TRASH {
                        found.unreadable_trash.push((dir, chain(&error)));
                    }
                }
            }
        }
    }
    Ok(found)
}

/// The directories of volumes or snapshots in a directory of the pool.
pub(super) fn objects(host: &dyn Host, folder: &Path) -> host::Result<Vec<PathBuf>> {
    let names = host.list_dir(folder)?.unwrap_or_default();
    let dirs = names.into_iter().map(|name| folder.join(name));
    Ok(dirs.filter(|dir| uuid_of(dir).is_some()).collect())
}

/// An upper bound for an image whose record cannot be read: the blocks of all thin devices that no
/// record names.
pub(super) fn unnamed(
    host: &dyn Host,
    root: &Path,
    devices: &BTreeMap<u32, u64>,
) -> host::Result<u64> {
    let recorded = recorded_ids(host, root)?;
    let unnamed = devices.iter().filter(|(id, _)| !recorded.ids.contains(id));
    Ok(unnamed.map(|(_, bytes)| bytes).sum())
}

/// The images in the trash of a pool that still have their thin devices.
pub(super) fn deleted(host: &dyn Host, root: &Path, pool: &str) -> host::Result<Vec<DeletedImage>> {
    let dirs = objects(host, &root.join(TRASH))?;
    if dirs.is_empty() {
        return Ok(Vec::new());
    }
    let devices = host.thin_devices(pool)?;
    let mut found = Vec::new();
    for dir in dirs {
        match image_in(host, &dir) {
            Ok(None) => {}
            Ok(Some(image)) => found.extend(devices.get(&image.id).map(|blocks| DeletedImage {
                lineage: image.lineage(),
                allocation: image.allocation,
                length: image_bytes(image.size),
                blocks: *blocks,
            })),
            Err(_) => {
                let blocks = unnamed(host, root, &devices)?;
                found.push(DeletedImage {
                    lineage: None,
                    allocation: Allocation::Thick,
                    length: blocks,
                    blocks,
                });
            }
        }
    }
    Ok(found)
}
