//! Checks a pool of LVM: the kernel's support, how LVM has set the thin pool up, whose pool it is,
//! its space and its records.

use std::path::Path;

use super::pool::{identity, records, subject};
use super::server::server;
use super::{Check, Subject, kernel, lvm_filter};
use crate::backend::MetadataSpace;
use crate::backend::place::lvm::{self, FoundPool};
use crate::backend::place::make;
use crate::error::{Result, chain};
use crate::host::mapper::Usage;
use crate::host::{Host, ThinPoolStatus};
use crate::model::size::HumanBytes;
use crate::model::{PoolDefinition, ThinPoolName};
use crate::operation::pools::inventory::{self, Inventory};
use crate::record::NodeRecord;

/// The module of the kernel, loaded or built in.
const MODULE: &str = "/sys/module/dm_thin_pool";

pub(super) fn examine(
    host: &dyn Host,
    node: &NodeRecord,
    pool: &PoolDefinition,
    name: &ThinPoolName,
    examined: &Subject,
) -> Vec<Check> {
    let mut checks = vec![module(host, pool)];
    checks.extend(repair(host, pool, examined));
    checks.extend(group(host, pool, name));
    let status = match lvm::usable(host, pool, name) {
        Ok(status) => status,
        Err(error) => {
            let fix = "run the command that the message names";
            checks.push(Check::fail(subject(pool), chain(&error), fix));
            return checks;
        }
    };
    checks.push(data(pool, name, &status));
    let found = lvm::find_pool(host, name);
    let records = match &found {
        Ok(Some(FoundPool {
            id,
            folder: Some(folder),
            ..
        })) => Some(inventory::read_thin(host, &pool.name, *id, (name, folder))),
        Ok(_) | Err(_) => None,
    };
    let space = MetadataSpace::from(&status);
    let reserved = match &records {
        Some(Ok(records)) => records.reserved_metadata(&space),
        Some(Err(_)) | None => 0,
    };
    checks.push(metadata(pool, name, &status, reserved));
    match found {
        Err(error) => checks.push(Check::fail(
            subject(pool),
            chain(&error),
            "check the disk, or restore the metadata of the thin pool",
        )),
        Ok(None) => checks.push(not_made(node, pool, name)),
        Ok(Some(found)) => {
            let is_home = node.home == Some(found.home);
            if is_home && kernel::is_there(host, &examined.programs, "lvm") {
                let subject = format!("{}: LVM's filter", subject(pool));
                checks.push(lvm_filter::examine(host, name, examined, subject));
            }
            checks.extend(found_pool(host, node, pool, &found, records));
        }
    }
    checks
}

fn module(host: &dyn Host, pool: &PoolDefinition) -> Check {
    let subject = format!("{}: dm_thin_pool", subject(pool));
    match host.stat(Path::new(MODULE)) {
        Ok(Some(_)) => Check::ok(subject, "the kernel has thin pools"),
        Ok(None) | Err(_) => Check::fail(
            subject,
            "the kernel module is not loaded, and a container cannot load it",
            "run on the host: modprobe dm_thin_pool; and list it in /etc/modules-load.d",
        ),
    }
}

/// Without thin_check, LVM activates a pool unchecked, or not at all. Known only where the programs
/// of the host are visible.
fn repair(host: &dyn Host, pool: &PoolDefinition, examined: &Subject) -> Option<Check> {
    let is_there = |program: &str| kernel::is_there(host, &examined.programs, program);
    let subject = format!("{}: thin_check", subject(pool));
    match (is_there("lvm"), is_there("thin_check")) {
        (false, _) => None,
        (true, true) => Some(Check::ok(subject, "LVM can check and repair the pool")),
        (true, false) => Some(Check::warn(
            subject,
            "LVM cannot check the pool when it activates it, nor repair it",
            "install thin-provisioning-tools (device-mapper-persistent-data)",
        )),
    }
}

/// Whether only this machine uses the volume group. Known only where LVM is installed.
fn group(host: &dyn Host, pool: &PoolDefinition, name: &ThinPoolName) -> Option<Check> {
    let subject = format!("{}: volume group", subject(pool));
    match lvm::group_problem(host, name) {
        Ok(None) => None,
        Ok(Some(problem)) => {
            let fix = "run the command that the message names";
            Some(Check::fail(subject, problem, fix))
        }
        Err(error) => {
            let fix = format!("run: vgs {}", name.group());
            Some(Check::warn(subject, chain(&error), fix))
        }
    }
}

/// The space of the thin pool, unless there is enough.
fn room(pool: &PoolDefinition, (what, usage, reserved): (&str, Usage, u64), fix: String) -> Check {
    let subject = format!("{}: {what}", subject(pool));
    let mut found = format!(
        "{} of {} free",
        HumanBytes(usage.free()),
        HumanBytes(usage.total)
    );
    if reserved > 0 {
        let reserved = HumanBytes(reserved);
        found += &format!(", of which thick volumes and their snapshots may take {reserved}");
    }
    let available = usage.free().saturating_sub(reserved);
    match available < usage.total / 100 * super::LOW_SPACE_PERCENT {
        true => Check::warn(subject, found, fix),
        false => Check::ok(subject, found),
    }
}

fn data(pool: &PoolDefinition, name: &ThinPoolName, status: &ThinPoolStatus) -> Check {
    let fix = format!("delete volumes, or run: lvextend --size +SIZE {name}");
    room(pool, ("space", status.data, 0), fix)
}

fn metadata(
    pool: &PoolDefinition,
    name: &ThinPoolName,
    status: &ThinPoolStatus,
    reserved: u64,
) -> Check {
    let fix = format!("run: lvextend --poolmetadatasize +SIZE {name}");
    room(pool, ("metadata", status.metadata, reserved), fix)
}

fn not_made(node: &NodeRecord, pool: &PoolDefinition, name: &ThinPoolName) -> Check {
    match node.find_pool(pool) {
        Some(id) => Check::fail(
            subject(pool),
            format!("there is no pool in {name}, but this machine had pool {id} there"),
            format!("if it is permanently gone: slackwater pool forget {id}"),
        ),
        None if pool.init => Check::ok(subject(pool), "serve creates it"),
        None => Check::warn(
            subject(pool),
            format!("there is no pool in {name} yet"),
            format!("run slackwater pool init {}", pool.plainly()),
        ),
    }
}

fn found_pool(
    host: &dyn Host,
    node: &NodeRecord,
    pool: &PoolDefinition,
    found: &FoundPool,
    records_found: Option<Result<Inventory>>,
) -> Vec<Check> {
    let record = make::new_record(host, &pool.name, (found.id, found.home));
    let mut checks = identity(node, pool, &record);
    match (&found.folder, records_found) {
        (Some(folder), Some(found)) => {
            checks.push(server(host, pool, folder));
            checks.extend(records(pool, found));
        }
        _ => checks.push(Check::ok(
            format!("{}: records", subject(pool)),
            "not mounted here: run doctor while the pool is served, in the mount namespace of its driver",
        )),
    }
    checks
}
