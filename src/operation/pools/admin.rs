//! The actions of an administrator on pools: init, adopt, forget, list.
//!
//! They run in a process of their own, next to the driver: the pool's lock keeps them from changing
//! a pool that is served, and the driver's next refresh finds their result. Each action can be
//! repeated.

mod lvm;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use super::node_record::{load_node, store_node};
use crate::backend::PoolBackend;
use crate::backend::place::image::{self, AdminPool, blank_but_known, file_folder};
use crate::backend::place::lvm::identify;
use crate::backend::place::make::{self, Probe};
use crate::backend::place::pool_fs::{self, machine_folders};
use crate::error::{Error, ErrorContext, Kind, Result};
use crate::host::{Host, Kept};
use crate::model::pool::SHARING_ADVICE;
use crate::model::{HomeId, MountRule, PoolDefinition, PoolId, PoolPlace};
use crate::record::node::KnownPool;
use crate::record::{NodeRecord, PoolRecord};

/// The result of [`init`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InitResult {
    pub pool: PoolRecord,
    /// False if it was a pool of this machine already.
    pub changed: bool,
    /// Warnings about the file system below it.
    pub warnings: Vec<String>,
}

/// The result of [`adopt`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adopted {
    /// The pool with its new home.
    pub pool: PoolRecord,
    /// Its previous home, if that was another one.
    pub from: Option<HomeId>,
}

/// Creates a pool. A path at which the node record has a pool that is missing is refused, because
/// the mount point of an unmounted disk looks like an empty folder.
pub fn init(host: &dyn Host, node_record: &Path, pool: &PoolDefinition) -> Result<InitResult> {
    if matches!(pool.place, PoolPlace::Lvm { .. }) {
        return lvm::init(host, node_record, pool);
    }
    let node = load_node(host, node_record)?;
    let outer = file_folder(pool)?;
    if pool.mount == Some(MountRule::Required)
        && matches!(make::probe(host, outer)?, Probe::Blank | Probe::Missing)
    {
        pool_fs::check_mount(host, pool, outer)?;
    }
    let admin_pool =
        image::open_for_admin(host, &node, pool, true, &machine_folders(node_record, &[]))?;
    let made = init_inside(host, node_record, node, pool, &admin_pool);
    admin_pool.close(host, pool);
    made
}

fn init_inside(
    host: &dyn Host,
    node_record: &Path,
    mut node: NodeRecord,
    pool: &PoolDefinition,
    admin_pool: &AdminPool,
) -> Result<InitResult> {
    let path = admin_pool.folder.as_path();
    if let Probe::Foreign(what) = &admin_pool.found {
        return Err(make::not_blank(path, what));
    }
    let home = machine_home(host, &node, &[])?;
    if let Probe::Pool(record) = &admin_pool.found {
        if let Some(home) = home.filter(|home| *home != record.home) {
            return Err(other_home(pool, record, home));
        }
    } else if let Some(id) = node.find_pool(pool) {
        return Err(blank_but_known(pool, id));
    }
    if admin_pool.found == Probe::Missing {
        make::make_folder(host, path)?;
    }
    let mut warnings = make::check_pool_fs(host, path)?;
    make::check_extent(host, pool, path)?;
    let without = make::find_without_sharing(host, path)?;
    warnings.extend(without.map(|what| format!("{what}; {SHARING_ADVICE}")));
    warnings.extend(admin_pool.warnings(host, pool)?);
    if pool.mount.is_none()
        && let Some(what) = pool_fs::without_mount(host, file_folder(pool)?)?
    {
        warnings.push(format!(
            "{what}: if a disk is meant to be mounted there, stop and mount it first; otherwise set mount=any"
        ));
    }
    let (record, lock) = match &admin_pool.found {
        Probe::Pool(record) => (record.clone(), None),
        Probe::Blank | Probe::Missing | Probe::Foreign(_) | Probe::Image(_) => {
            let lock = lock(host, pool, path)?;
            let home = home.unwrap_or_else(|| HomeId(host.random_uuid()));
            let record = make::make_pool(host, &pool.name, path, home)?;
            (record, Some(lock))
        }
    };
    remember(host, node_record, &mut node, pool, &record)?;
    Ok(InitResult {
        pool: record,
        changed: lock.is_some(),
        warnings,
    })
}

/// Makes a pool belong to this machine. If the node record has no home yet, the home is taken from
/// `others`, which are further pools of this machine. With `dry_run` nothing is changed.
pub fn adopt(
    host: &dyn Host,
    node_record: &Path,
    pool: &PoolDefinition,
    others: &[PoolDefinition],
    dry_run: bool,
) -> Result<Adopted> {
    if matches!(pool.place, PoolPlace::Lvm { .. }) {
        return lvm::adopt(host, node_record, pool, others, dry_run);
    }
    let mut node = load_node(host, node_record)?;
    let admin_pool =
        image::open_for_admin(host, &node, pool, false, &machine_folders(node_record, &[]))?;
    let adopted = adoption(host, &node, pool, others, &admin_pool).and_then(|(adopted, lock)| {
        if dry_run {
            return Ok(adopted);
        }
        if lock.is_some() {
            PoolBackend::replace_record(host, &admin_pool.folder, &adopted.pool)?;
        }
        remember(host, node_record, &mut node, pool, &adopted.pool)?;
        Ok(adopted)
    });
    admin_pool.close(host, pool);
    adopted
}

/// The result to be recorded, and the pool's lock if the home changes.
fn adoption(
    host: &dyn Host,
    node: &NodeRecord,
    pool: &PoolDefinition,
    others: &[PoolDefinition],
    admin_pool: &AdminPool,
) -> Result<(Adopted, Option<Kept>)> {
    let path = admin_pool.folder.as_path();
    let mut record = match &admin_pool.found {
        Probe::Pool(record) => record.clone(),
        Probe::Blank | Probe::Missing | Probe::Foreign(_) | Probe::Image(_) => {
            return Err(Error::refused(
                format!("pool {}", pool.name),
                format!(
                    "no pool was found at {}; is its disk mounted?",
                    path.display()
                ),
            ));
        }
    };
    let others: Vec<_> = others
        .iter()
        .filter(|other| other.place != pool.place)
        .cloned()
        .collect();
    let home = match node.home {
        Some(home) => home,
        // If its other pools have several homes, the first one is used, and the other pools are
        // adopted.
        None => homes(host, node, &others)?
            .first()
            .copied()
            .unwrap_or(record.home),
    };
    let from = Some(record.home).filter(|before| *before != home);
    let lock = from.map(|_| lock(host, pool, path)).transpose()?;
    record.home = home;
    Ok((Adopted { pool: record, from }, lock))
}

/// Forgets a pool, given by its name or ID. A pool that is present is refused, because the driver
/// would serve it again.
pub fn forget(host: &dyn Host, node_record: &Path, which: &str) -> Result<(PoolId, KnownPool)> {
    let node = load_node(host, node_record)?;
    let is_it =
        |(id, known): &(&PoolId, &KnownPool)| known.name == which || id.to_string() == which;
    let matching: Vec<PoolId> = node.pools.iter().filter(is_it).map(|(id, _)| *id).collect();
    match matching[..] {
        [id] => forget_id(host, node_record, id),
        [] => match node.forgotten.iter().find(is_it) {
            Some((id, known)) => Ok((*id, known.clone())),
            None => Err(Error::not_found(Kind::Pool, which)),
        },
        [..] => {
            let ids: Vec<String> = matching.iter().map(PoolId::to_string).collect();
            Err(Error::refused(
                format!("pool {which}"),
                format!(
                    "several pools have this name; give one of the IDs {}",
                    ids.join(", ")
                ),
            ))
        }
    }
}

/// Like [`forget`], for a pool with this ID.
pub fn forget_id(host: &dyn Host, node_record: &Path, id: PoolId) -> Result<(PoolId, KnownPool)> {
    let mut node = load_node(host, node_record)?;
    let Some(known) = node.pools.get(&id).cloned() else {
        return match node.forgotten.get(&id) {
            Some(known) => Ok((id, known.clone())),
            None => Err(Error::not_found(Kind::Pool, id.to_string())),
        };
    };
    check_absent(host, id, &known)?;
    node.pools.remove(&id);
    node.forgotten.insert(id, known.clone());
    store_node(host, node_record, &node)?;
    Ok((id, known))
}

/// Refuses a pool that is present at the place at which this machine had it.
fn check_absent(host: &dyn Host, id: PoolId, known: &KnownPool) -> Result<()> {
    let refuse = |why: String| Err(Error::refused(format!("pool {} ({id})", known.name), why));
    match known.place.parse::<PoolPlace>() {
        Ok(PoolPlace::Lvm { pool }) => {
            match identify(host, &pool)?.is_some_and(|found| found.id == id) {
                true => refuse(format!(
                    "the pool is present in {pool}; a pool can be forgotten only after its thin pool was deactivated (slackwater pool release, then lvchange --activate n {pool}) or removed"
                )),
                false => Ok(()),
            }
        }
        Ok(PoolPlace::File { path }) => {
            let what = match image::probe_path(host, &path)? {
                (_, Probe::Pool(found)) if found.id == id => "the pool is present",
                // It is not known which pool is on an image before the image is mounted.
                (_, Probe::Image(_)) => "there is an image of a pool that is not mounted here",
                (_, Probe::Pool(_) | Probe::Blank | Probe::Missing | Probe::Foreign(_)) => {
                    return Ok(());
                }
            };
            refuse(format!(
                "{what}, at {}; a pool can be forgotten only after its disk was unmounted or its directory was emptied",
                path.display()
            ))
        }
        Ok(PoolPlace::Memory { .. }) | Err(_) => Ok(()),
    }
}

/// The error for a pool of another machine.
pub fn other_home(pool: &PoolDefinition, record: &PoolRecord, home: HomeId) -> Error {
    Error::refused(
        format!("pool {}", pool.name),
        format!(
            "it belongs to another machine (its home is {}, but the home of this machine is {home}); if it is meant to stay here: slackwater pool adopt {}",
            record.home,
            pool.plainly()
        ),
    )
}

/// The homes of the pools that can be read now, each once: those of `pools` in their order, then
/// those of the node record.
fn homes(host: &dyn Host, node: &NodeRecord, pools: &[PoolDefinition]) -> Result<Vec<HomeId>> {
    let known = node
        .pools
        .values()
        .filter_map(|known| known.place.parse().ok());
    let places = pools.iter().map(|pool| pool.place.clone()).chain(known);
    let mut seen = BTreeSet::new();
    let mut homes = Vec::new();
    for place in places {
        let home = match place {
            PoolPlace::File { path } => match image::probe_path(host, &path)? {
                (_, Probe::Pool(record)) => Some(record.home),
                _ => None,
            },
            PoolPlace::Lvm { pool } => identify(host, &pool)?.map(|found| found.home),
            PoolPlace::Memory { .. } => None,
        };
        homes.extend(home.filter(|home| seen.insert(*home)));
    }
    Ok(homes)
}

/// The machine's home, from the node record or else from its pools; `None` if neither has one.
fn machine_home(
    host: &dyn Host,
    node: &NodeRecord,
    pools: &[PoolDefinition],
) -> Result<Option<HomeId>> {
    if node.home.is_some() {
        return Ok(node.home);
    }
    match homes(host, node, pools)?[..] {
        [] => Ok(None),
        [home] => Ok(Some(home)),
        [..] => Err(Error::refused(
            "this machine",
            "its pools have several homes; adopt the pools that are meant to stay: slackwater pool adopt",
        )),
    }
}

/// Takes the pool's lock, which is released when the result is dropped.
fn lock(host: &dyn Host, pool: &PoolDefinition, path: &Path) -> Result<Kept> {
    let lock = PoolBackend::lock(host, path, Duration::ZERO)
        .context(|| format!("lock pool {}", pool.name))?;
    lock.ok_or_else(|| {
        Error::refused(
            format!("pool {}", pool.name),
            "another process serves or changes it; stop that process first",
        )
    })
}

/// Records that this machine has the pool, unless the record says so already.
fn remember(
    host: &dyn Host,
    node_record: &Path,
    node: &mut NodeRecord,
    pool: &PoolDefinition,
    record: &PoolRecord,
) -> Result<()> {
    let before = node.clone();
    node.home.get_or_insert(record.home);
    node.forgotten.remove(&record.id);
    let known = KnownPool {
        name: pool.name.clone(),
        place: pool.place.to_string(),
    };
    node.pools.insert(record.id, known);
    if *node == before {
        return Ok(());
    }
    store_node(host, node_record, node)
}

#[cfg(test)]
mod tests;
