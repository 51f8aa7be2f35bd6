//! The actions on pools of LVM.

use std::path::Path;
use std::time::Duration;

use super::{Adopted, InitResult, homes, lock, machine_home, other_home, remember};
use crate::backend::PoolBackend;
use crate::backend::place::lvm::{self, CreatePolicy};
use crate::backend::place::make::{self, Probe};
use crate::backend::place::{self, FoundPlace, OpenOptions, OpenPlace};
use crate::error::{Error, Result, chain};
use crate::host::Host;
use crate::model::{HomeId, PoolDefinition};
use crate::operation::pools::node_record::load_node;
use crate::operation::pools::pool::pool_kind;
use crate::record::NodeRecord;

fn no_pool(pool: &PoolDefinition) -> Error {
    Error::refused(
        format!("pool {}", pool.name),
        format!("no pool was found at {}", pool.place),
    )
}

/// Opens the records without waiting for another process.
fn open_for_admin(
    host: &dyn Host,
    pool: &PoolDefinition,
    (home, init): (HomeId, bool),
    node: &NodeRecord,
) -> Result<FoundPlace> {
    let opening = OpenOptions {
        create: CreatePolicy {
            home,
            init,
            is_known: node.find_pool(pool).is_some(),
        },
        max_wait: Duration::ZERO,
        machine: Vec::new(),
    };
    place::open(host, pool, &opening)
}

/// Ends an action: unmounts the records, unless a driver has them open.
fn close(host: &dyn Host, pool: &PoolDefinition, open: Option<OpenPlace>) {
    if let Some(open) = open
        && let Err(error) = open.close(host)
    {
        tracing::warn!(pool = %pool.name, error = %chain(&error), "failed to unmount the records of the pool");
    }
}

pub(super) fn init(
    host: &dyn Host,
    node_record: &Path,
    pool: &PoolDefinition,
) -> Result<InitResult> {
    let mut node = load_node(host, node_record)?;
    let name = lvm::thin_pool(pool)?;
    lvm::usable(host, pool, name)?;
    // The same error occurs again when the pool is opened or created.
    let found = lvm::identify(host, name).ok().flatten();
    let home = machine_home(host, &node, &[])?;
    let home = home.unwrap_or_else(|| match &found {
        Some(found) => found.home,
        None => HomeId(host.random_uuid()),
    });
    let place = open_for_admin(host, pool, (home, true), &node)?;
    let path = place.folder();
    let made = match (&place.found, &place.open) {
        (Probe::Pool(record), _) if record.home != home => Err(other_home(pool, record, home)),
        (Probe::Pool(record), _) => Ok((record.clone(), false)),
        (_, None) => Err(no_pool(pool)),
        (_, Some(open)) => lock(host, pool, &path).and_then(|_lock| {
            let id = open.id().ok_or_else(|| no_pool(pool))?;
            let (name, kind) = (&pool.name, pool_kind(pool));
            let record = make::make_pool_of_kind(host, name, &path, kind, (id, home))?;
            Ok((record, true))
        }),
    };
    let made = made.and_then(|(record, changed)| {
        remember(host, node_record, &mut node, pool, &record)?;
        Ok(InitResult {
            pool: record,
            changed,
            warnings: Vec::new(),
        })
    });
    close(host, pool, place.open);
    made
}

/// Makes the pool belong to this machine: first its header, then its record. With `dry_run` only
/// returns what would be done.
pub(super) fn adopt(
    host: &dyn Host,
    node_record: &Path,
    pool: &PoolDefinition,
    others: &[PoolDefinition],
    dry_run: bool,
) -> Result<Adopted> {
    let mut node = load_node(host, node_record)?;
    let name = lvm::thin_pool(pool)?;
    lvm::usable(host, pool, name)?;
    let found = lvm::identify(host, name)?;
    let found = found.ok_or_else(|| no_pool(pool))?;
    let others = others.iter().filter(|other| other.place != pool.place);
    let others: Vec<_> = others.cloned().collect();
    let home = match node.home {
        Some(home) => home,
        None => homes(host, &node, &others)?
            .first()
            .copied()
            .unwrap_or(found.home),
    };
    let from = Some(found.home).filter(|before| *before != home);
    if dry_run {
        let record = make::new_record(host, &pool.name, (found.id, home));
        return Ok(Adopted { pool: record, from });
    }
    if from.is_some() {
        lvm::set_home(host, pool, home)?;
    }
    let place = open_for_admin(host, pool, (home, false), &node)?;
    let path = place.folder();
    let adopted = match &place.found {
        Probe::Pool(record) if record.home == home => Ok((record.clone(), from)),
        Probe::Pool(record) => lock(host, pool, &path).and_then(|_lock| {
            let before = record.home;
            let mut record = record.clone();
            record.home = home;
            PoolBackend::replace_record(host, &path, &record)?;
            Ok((record, Some(before)))
        }),
        Probe::Blank | Probe::Missing | Probe::Foreign(_) | Probe::Image(_) => Err(no_pool(pool)),
    };
    let adopted = adopted.and_then(|(record, from)| {
        remember(host, node_record, &mut node, pool, &record)?;
        Ok(Adopted { pool: record, from })
    });
    close(host, pool, place.open);
    adopted
}
