//! Lists what is on pools. It only reads, and takes no lock, so it works while a driver is running.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::node_record::load_node;
use crate::backend::MetadataSpace;
use crate::backend::place::image::probe_path;
use crate::backend::place::lvm;
use crate::backend::place::make::Probe;
use crate::backend::pool::metadata::{MapOf, Maps};
use crate::backend::records::{SNAPSHOTS, VOLUMES};
use crate::backend::{file, thin};
use crate::error::{ErrorContext, Result, chain};
use crate::host::Host;
use crate::model::size::{HumanBytes, image_bytes};
use crate::model::{HomeId, PoolDefinition, PoolId, PoolPlace, ThinPoolName};
use crate::record::{
    Formatted, NodeRecord, SnapshotRecord, SnapshotState, VolumeRecord, VolumeState,
};

/// A pool that is configured, or that this machine has had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolEntry {
    pub name: String,
    /// "file:/path".
    pub place: String,
    /// Its ID, if that is known.
    pub id: Option<PoolId>,
    /// Its home, if the pool is present.
    pub home: Option<HomeId>,
    /// The folder with its files, if the pool is present.
    pub folder: Option<PathBuf>,
    /// It is named on the command line or in the configuration file.
    pub configured: bool,
    pub state: PoolPresence,
}

/// The state of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolPresence {
    /// It is present and belongs to this machine.
    Here,
    /// It is present and has another home than this machine.
    OtherHome,
    /// The node record has it, but it is not at its place.
    Absent,
    /// It was not created yet.
    Blank,
    /// It was forgotten.
    Forgotten,
    /// Its place cannot be read, or contains something else, for this reason.
    Unreadable(String),
}

impl PoolPresence {
    /// The word for it in lists.
    pub fn as_str(&self) -> &'static str {
        match self {
            PoolPresence::Here => "here",
            PoolPresence::OtherHome => "other home",
            PoolPresence::Absent => "absent",
            PoolPresence::Blank => "blank",
            PoolPresence::Forgotten => "forgotten",
            PoolPresence::Unreadable(_) => "unreadable",
        }
    }
}

/// Returns the configured pools in their order, then those of the node record, then forgotten ones.
pub fn pools(
    host: &dyn Host,
    node_record: &Path,
    configured: &[PoolDefinition],
) -> Result<Vec<PoolEntry>> {
    let node = load_node(host, node_record)?;
    let mut entries: Vec<PoolEntry> = configured
        .iter()
        .map(|pool| entry(host, &node, &pool.name, &pool.place, true))
        .collect();
    for (id, known) in &node.pools {
        if entries.iter().any(|entry| entry.id == Some(*id)) {
            continue;
        }
        entries.push(match known.place.parse() {
            Ok(place) => PoolEntry {
                id: Some(*id),
                ..entry(host, &node, &known.name, &place, false)
            },
            Err(error) => PoolEntry {
                name: known.name.clone(),
                place: known.place.clone(),
                id: Some(*id),
                home: None,
                folder: None,
                configured: false,
                state: PoolPresence::Unreadable(error.to_string()),
            },
        });
    }
    entries.extend(node.forgotten.iter().map(|(id, known)| PoolEntry {
        name: known.name.clone(),
        place: known.place.clone(),
        id: Some(*id),
        home: None,
        folder: None,
        configured: false,
        state: PoolPresence::Forgotten,
    }));
    Ok(entries)
}

fn entry(
    host: &dyn Host,
    node: &NodeRecord,
    name: &str,
    place: &PoolPlace,
    configured: bool,
) -> PoolEntry {
    let known = node.find_pool_at(place);
    let presence = |of_pool| match node.home.is_none_or(|home| home == of_pool) {
        true => PoolPresence::Here,
        false => PoolPresence::OtherHome,
    };
    let mut folder = None;
    let (id, home, state) = match place {
        PoolPlace::Memory { .. } => (None, None, PoolPresence::Blank),
        PoolPlace::Lvm { pool } => match lvm::find_pool(host, pool) {
            Ok(Some(found)) => {
                folder = found.folder;
                (Some(found.id), Some(found.home), presence(found.home))
            }
            Ok(None) if known.is_some() => (known, None, PoolPresence::Absent),
            Ok(None) => (None, None, PoolPresence::Blank),
            Err(error) => (known, None, PoolPresence::Unreadable(chain(&error))),
        },
        PoolPlace::File { path } => match probe_path(host, path) {
            Ok((inner, Probe::Pool(found))) => {
                folder = Some(inner);
                (Some(found.id), Some(found.home), presence(found.home))
            }
            Ok((_, Probe::Blank | Probe::Missing)) if known.is_some() => {
                (known, None, PoolPresence::Absent)
            }
            Ok((_, Probe::Blank | Probe::Missing)) => (None, None, PoolPresence::Blank),
            Ok((_, Probe::Image(_))) => (
                known,
                None,
                PoolPresence::Unreadable("its image is not mounted here".into()),
            ),
            Ok((_, Probe::Foreign(what))) => (known, None, PoolPresence::Unreadable(what)),
            Err(error) => (known, None, PoolPresence::Unreadable(chain(&error))),
        },
    };
    PoolEntry {
        name: name.to_string(),
        place: place.to_string(),
        id,
        home,
        folder,
        configured,
        state,
    }
}

/// A volume on a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeEntry {
    /// The pool's name.
    pub pool: String,
    pub pool_id: PoolId,
    pub record: VolumeRecord,
    /// Bytes of the blocks that its image has.
    pub allocated: u64,
    /// Its thin device, on a pool of LVM.
    pub thin: Option<ThinEntry>,
}

/// A thin device, which LVM does not list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThinEntry {
    pub id: u32,
    /// The UUID of its mapped device while it is attached.
    pub device: String,
}

/// A snapshot on a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotEntry {
    /// The pool's name.
    pub pool: String,
    pub pool_id: PoolId,
    pub record: SnapshotRecord,
    /// Bytes of the blocks that its image has, including shared ones.
    pub allocated: u64,
}

/// A record that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedEntry {
    /// The pool's name.
    pub pool: String,
    /// The folder of the volume or snapshot.
    pub path: PathBuf,
    /// The reason.
    pub problem: String,
}

/// The contents of one pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// Volumes in the order of UUIDs.
    pub volumes: Vec<VolumeEntry>,
    /// Snapshots in the order of UUIDs.
    pub snapshots: Vec<SnapshotEntry>,
    /// Records that cannot be read.
    pub damaged: Vec<DamagedEntry>,
}

impl Inventory {
    /// Bytes of the metadata of a thin pool that its thick volumes and their snapshots may still take.
    /// What cannot be read is not counted.
    pub fn reserved_metadata(&self, space: &MetadataSpace) -> u64 {
        let mut maps = Maps::default();
        for one in &self.volumes {
            maps.add_volume(&MapOf::volume(&one.record, 0));
        }
        for SnapshotEntry { record, .. } in &self.snapshots {
            let bytes = image_bytes(record.size);
            maps.add_snapshot(record.allocation, record.lineage(), bytes);
        }
        maps.reserved(space)
    }
}

/// Reads the volumes and snapshots of the pool in a folder. Those that are deleted during the call
/// are omitted.
pub fn read(host: &dyn Host, name: &str, pool_id: PoolId, path: &Path) -> Result<Inventory> {
    let mut inventory = Inventory::default();
    for (dir, read) in file::read_all::<VolumeRecord>(host, name, path)? {
        match read {
            Ok((record, allocated)) => inventory.volumes.push(VolumeEntry {
                pool: name.to_string(),
                pool_id,
                record,
                allocated,
                thin: None,
            }),
            Err(problem) => inventory.damaged.push(damaged(name, dir, problem)),
        }
    }
    for (dir, read) in file::read_all::<SnapshotRecord>(host, name, path)? {
        match read {
            Ok((record, allocated)) => inventory.snapshots.push(SnapshotEntry {
                pool: name.to_string(),
                pool_id,
                record,
                allocated,
            }),
            Err(problem) => inventory.damaged.push(damaged(name, dir, problem)),
        }
    }
    Ok(inventory)
}

/// Like [`read`], for a pool of whatever kind.
pub fn read_entry(
    host: &dyn Host,
    pool: &PoolEntry,
    pool_id: PoolId,
    path: &Path,
) -> Result<Inventory> {
    match pool.place.parse() {
        Ok(PoolPlace::Lvm { pool: name }) => read_thin(host, &pool.name, pool_id, (&name, path)),
        Ok(_) | Err(_) => read(host, &pool.name, pool_id, path),
    }
}

/// Like [`read`], with the thin devices of a pool of LVM and the bytes that they have. A thin device
/// without a record, and a record whose thin device is missing, count as damage: after a repair of
/// the pool's metadata, both show what was lost. Objects that are created or deleted during the call
/// are neither.
pub fn read_thin(
    host: &dyn Host,
    pool: &str,
    pool_id: PoolId,
    (name, path): (&ThinPoolName, &Path),
) -> Result<Inventory> {
    let doing = || format!("list the thin devices of {name}");
    let before = host.thin_devices(name.mapped()).context(doing)?;
    let mut inventory = read(host, pool, pool_id, path)?;
    let recorded = thin::recorded_ids(host, path);
    let recorded = recorded.context(|| format!("read the records of pool {pool}"))?;
    let devices = host.thin_devices(name.mapped()).context(doing)?;
    let bytes = |id: u32| devices.get(&id).copied().unwrap_or(0);
    let lost = list_lost(&inventory, [&before, &devices]);
    let lost = lost.into_iter().map(|(dir, what)| {
        let problem = format!("{what} in {name}, so its data are lost unless the metadata of the thin pool is restored");
        damaged(pool, path.join(dir), problem)
    });
    inventory.damaged.extend(lost);
    let is_own = |id: &u32| *id <= thin::RECORDS_ID || *id == thin::TRIAL_ID;
    let is_unrecorded = |id: &u32| !is_own(id) && !recorded.ids.contains(id);
    // While a record cannot be read, a thin device may be its own.
    let unrecorded = devices
        .keys()
        .filter(|id| !recorded.is_incomplete && is_unrecorded(id) && before.contains_key(id))
        .map(|id| {
            let size = HumanBytes(bytes(*id));
            let problem = format!("no record has its thin device {id} ({size}); it is left alone until its record is restored, or until you run: dmsetup message {} 0 \"delete {id}\"", name.mapped());
            damaged(pool, name.to_string().into(), problem)
        });
    inventory.damaged.extend(unrecorded);
    let trash = recorded.unreadable_trash.iter().map(|(dir, why)| {
        let problem = format!("it was deleted, but its thin device stays, because its record cannot be read: {why}; correct record.json, or delete the directory, after which its thin device is listed here");
        damaged(pool, dir.clone(), problem)
    });
    inventory.damaged.extend(trash);
    for entry in &mut inventory.volumes {
        entry.allocated = bytes(entry.record.image);
        entry.thin = Some(ThinEntry {
            id: entry.record.image,
            device: thin::device_uuid(pool_id, entry.record.uuid),
        });
    }
    for entry in &mut inventory.snapshots {
        entry.allocated = bytes(entry.record.image);
    }
    Ok(inventory)
}

/// The directories of objects whose thin devices are missing, or have no block although they had a
/// file system, and which of these it is: a repair of the metadata leaves a device whose map is damaged
/// without blocks. Both lists of devices must agree.
fn list_lost(inventory: &Inventory, devices: [&BTreeMap<u32, u64>; 2]) -> Vec<(PathBuf, String)> {
    let had_fs = |formatted: Option<&Formatted>| {
        formatted.is_some_and(|it| it.complete && it.kind.fs().is_some())
    };
    let volumes = inventory.volumes.iter().map(|one| &one.record);
    let volumes = volumes.filter(|one| one.state == VolumeState::Ready);
    let volumes = volumes.map(|one| (VOLUMES, one.uuid, one.image, had_fs(one.formatted.as_ref())));
    let snapshots = inventory.snapshots.iter().map(|one| &one.record);
    let snapshots = snapshots.filter(|one| one.state != SnapshotState::Preparing);
    let snapshots = snapshots.map(|one| {
        (
            SNAPSHOTS,
            one.uuid,
            one.image,
            had_fs(one.formatted.as_ref()),
        )
    });
    let lost = volumes
        .chain(snapshots)
        .filter_map(|(part, uuid, id, had_fs)| {
            let problem = match devices.map(|devices| devices.get(&id)) {
                [None, None] => format!("its thin device {id} is missing"),
                [Some(0), Some(0)] if had_fs => {
                    format!("its thin device {id} had a file system and has no block")
                }
                _ => return None,
            };
            Some((Path::new(part).join(uuid.to_string()), problem))
        });
    lost.collect()
}

fn damaged(pool: &str, path: PathBuf, problem: String) -> DamagedEntry {
    DamagedEntry {
        pool: pool.to_string(),
        path,
        problem,
    }
}
