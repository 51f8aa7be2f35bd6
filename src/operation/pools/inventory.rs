//! Lists what is on pools. It only reads, and takes no lock, so it works while a driver is running.

use std::path::{Path, PathBuf};

use uuid::Uuid;

use super::image::look_through;
use super::make::Probe;
use super::node_record::{known_at, load_node};
use crate::backend::records::{SNAPSHOTS, VOLUMES};
use crate::error::{ErrorContext, Result, chain};
use crate::host::Host;
use crate::model::{HomeId, PoolDefinition, PoolId, PoolPlace};
use crate::record::{self, NodeRecord, Record, SnapshotRecord, VolumeRecord};

/// A pool that is configured, or that this machine has had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolEntry {
    /// Its name.
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
    /// Its state.
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
    pub fn word(&self) -> &'static str {
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
    let known = known_at(node, place);
    let mut folder = None;
    let (id, home, state) = match place {
        PoolPlace::Memory => (None, None, PoolPresence::Blank),
        PoolPlace::File { path } => match look_through(host, path) {
            Ok((inner, Probe::Pool(found))) => {
                folder = Some(inner);
                let is_ours = node.home.is_none_or(|home| home == found.home);
                let state = if is_ours {
                    PoolPresence::Here
                } else {
                    PoolPresence::OtherHome
                };
                (Some(found.id), Some(found.home), state)
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
    /// The pool's ID.
    pub pool_id: PoolId,
    /// Its record.
    pub record: VolumeRecord,
    /// Bytes of the blocks that its image has.
    pub allocated: u64,
}

/// A snapshot on a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotEntry {
    /// The pool's name.
    pub pool: String,
    /// The pool's ID.
    pub pool_id: PoolId,
    /// Its record.
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

/// Reads the volumes and snapshots of the pool in a folder. Those that are deleted during the call
/// are omitted.
pub fn read(host: &dyn Host, name: &str, pool_id: PoolId, path: &Path) -> Result<Inventory> {
    let mut inventory = Inventory::default();
    let pool = || name.to_string();
    let (volumes, damaged) = shelf(host, name, &path.join(VOLUMES), |one: &VolumeRecord| {
        one.uuid
    })?;
    inventory.damaged.extend(damaged);
    inventory
        .volumes
        .extend(volumes.into_iter().map(|(record, allocated)| VolumeEntry {
            pool: pool(),
            pool_id,
            record,
            allocated,
        }));
    let (snapshots, damaged) = shelf(host, name, &path.join(SNAPSHOTS), |one: &SnapshotRecord| {
        one.uuid
    })?;
    inventory.damaged.extend(damaged);
    inventory.snapshots.extend(
        snapshots
            .into_iter()
            .map(|(record, allocated)| SnapshotEntry {
                pool: pool(),
                pool_id,
                record,
                allocated,
            }),
    );
    Ok(inventory)
}

/// Records with the bytes of their images, and records that cannot be read.
type RecordsRead<R> = (Vec<(R, u64)>, Vec<DamagedEntry>);

fn shelf<R: Record>(
    host: &dyn Host,
    pool: &str,
    folder: &Path,
    uuid: impl Fn(&R) -> Uuid,
) -> Result<RecordsRead<R>> {
    let names = host
        .list_dir(folder)
        .context(|| format!("list {} of pool {pool}", folder.display()))?
        .unwrap_or_default();
    let (mut records, mut damaged) = (Vec::new(), Vec::new());
    for entry in names {
        let path = folder.join(&entry);
        match read_one(host, &path, &entry, &uuid) {
            Ok(Some(one)) => records.push(one),
            Ok(None) => {}
            Err(problem) => damaged.push(DamagedEntry {
                pool: pool.to_string(),
                path,
                problem,
            }),
        }
    }
    Ok((records, damaged))
}

fn read_one<R: Record>(
    host: &dyn Host,
    path: &Path,
    name: &str,
    uuid: impl Fn(&R) -> Uuid,
) -> Result<Option<(R, u64)>, String> {
    let load = || record::load::<R>(host, &path.join("record.json")).map_err(|error| chain(&error));
    let image = || {
        let image = host.stat(&path.join("data.img"));
        image.map_err(|error| chain(&error))
    };
    let record = match load()? {
        Some(record) => record,
        // It was deleted between the two reads, or its creation has just begun: an image is created
        // after its record.
        None if image()?.is_none() => return Ok(None),
        None => load()?.ok_or("it has no record.json")?,
    };
    if Uuid::try_parse(name) != Ok(uuid(&record)) {
        return Err(format!("its record describes {}", uuid(&record)));
    }
    Ok(Some((record, image()?.map_or(0, |stat| stat.allocated))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::Effect;
    use crate::host::memory::MemoryHost;

    #[test]
    fn what_is_just_begun_is_left_out_and_an_image_without_its_record_is_told() {
        let (host, pool) = (MemoryHost::new(), Path::new("/memory/pool"));
        let one = pool.join(VOLUMES).join(Uuid::from_u128(1).to_string());
        host.make_folder(&one).unwrap();
        let damaged = || {
            let found = read(&host, "default", PoolId(Uuid::from_u128(2)), pool).unwrap();
            assert!(found.volumes.is_empty());
            found.damaged.into_iter().map(|one| one.problem)
        };
        let write = |name: &str| {
            let path = one.join(name);
            let bytes = b"{";
            host.perform(&Effect::WriteFile { path: &path, bytes })
        };
        write("record.json.new").unwrap();
        assert_eq!(damaged().count(), 0);
        write("data.img").unwrap();
        let told: Vec<_> = damaged().collect();
        assert_eq!(told, ["it has no record.json"]);
    }
}
