//! Checks the pools: file system, identity, topology segment, free space, lock, records.

use std::path::Path;

use super::server::server;
use super::{Check, Subject, checksums, kernel, lvm};
use crate::backend::place::{image, make, pool_fs};
use crate::backend::records::VOLUMES;
use crate::error::{Result, chain};
use crate::host::{BackingFs, Host};
use crate::model::pool::SHARING_ADVICE;
use crate::model::size::HumanBytes;
use crate::model::{MountRule, PoolDefinition, PoolPlace};
use crate::operation::pools::inventory::{self, Inventory};
use crate::operation::pools::node_record;
use crate::record::{ImageRecord, NodeRecord, PoolRecord};

pub(super) fn examine(host: &dyn Host, examined: &Subject) -> Vec<Check> {
    let mut checks = Vec::new();
    let node = match node_record::load_node(host, &examined.node_record) {
        Ok(node) => node,
        Err(error) => {
            checks.push(Check::fail(
                "node record",
                chain(&error),
                "restore the file, or remove it: pools store the home as well",
            ));
            NodeRecord::default()
        }
    };
    for pool in &examined.pools {
        match &pool.place {
            PoolPlace::File { path } => checks.extend(file_pool(host, &node, pool, path)),
            PoolPlace::Lvm { pool: name } => {
                checks.extend(lvm::examine(host, &node, pool, name, examined));
            }
            PoolPlace::Memory { .. } => {
                checks.push(Check::ok(
                    subject(pool),
                    "simulated; it does not outlive its process",
                ));
            }
        }
    }
    for (id, known) in &node.pools {
        let configured = |pool: &PoolDefinition| {
            pool.place.to_string() == known.place || pool.name == known.name
        };
        if !examined.pools.is_empty() && !examined.pools.iter().any(configured) {
            checks.push(Check::warn(
                format!("pool {}", known.name),
                format!(
                    "this machine had it at {}, but it is not configured",
                    known.place
                ),
                format!("configure it, or forget it: slackwater pool forget {id}"),
            ));
        }
    }
    if examined.pools.is_empty() {
        checks.push(Check::warn(
            "pools",
            "no pool was given",
            "give --pool NAME=file:/path or --config FILE to check pools",
        ));
    }
    checks
}

pub(super) fn subject(pool: &PoolDefinition) -> String {
    format!("pool {}", pool.name)
}

fn file_pool(host: &dyn Host, node: &NodeRecord, pool: &PoolDefinition, path: &Path) -> Vec<Check> {
    let subject = subject(pool);
    let outer = path;
    let (inner, found) = match image::probe_path(host, path) {
        Ok(found) => found,
        Err(error) => {
            return vec![Check::fail(
                subject,
                chain(&error),
                "check the disk, or restore pool.json",
            )];
        }
    };
    let record = match found {
        make::Probe::Pool(record) => record,
        make::Probe::Foreign(what) => {
            let error = make::not_blank(path, &what);
            return vec![Check::fail(
                subject,
                chain(&error),
                "give another directory",
            )];
        }
        make::Probe::Image(record) => return vec![unmounted_image(pool, path, &record)],
        make::Probe::Blank | make::Probe::Missing => {
            return vec![not_made(host, node, pool, path)];
        }
    };
    let path = inner.as_path();
    let mut checks = identity(node, pool, &record);
    checks.extend(image(host, pool, outer));
    checks.extend(mount(host, pool, outer));
    checks.extend(pool_fs(host, pool, path));
    checks.push(room(host, pool, path));
    // Nothing is written to a pool that belongs to another machine.
    if node.home.is_none_or(|home| home == record.home) {
        checks.push(scratch(host, pool, path));
    }
    checks.push(server(host, pool, path));
    let found = inventory::read(host, &pool.name, record.id, path);
    checks.extend(records(pool, found));
    checks
}

/// Reports what is known of a pool that can be examined only while it is served, or where it is
/// mounted.
fn unmounted_image(pool: &PoolDefinition, path: &Path, record: &ImageRecord) -> Check {
    let subject = format!("{}: image", subject(pool));
    if let Err(error) = image::check_kind(pool, &make::Probe::Image(record.clone())) {
        return Check::fail(subject, chain(&error), "correct the definition");
    }
    if !record.formatted.complete {
        return Check::ok(
            subject,
            "its creation was interrupted; pool init or serve completes it",
        );
    }
    Check::ok(
        subject,
        format!(
            "{} reserved in {}, not mounted here: run doctor while the pool is served, in the mount namespace of its driver",
            HumanBytes(record.size),
            path.display()
        ),
    )
}

/// Checks the image that holds a mounted pool: whether all of it is reserved.
fn image(host: &dyn Host, pool: &PoolDefinition, outer: &Path) -> Option<Check> {
    let subject = format!("{}: image", subject(pool));
    let found = match make::probe(host, outer) {
        Ok(make::Probe::Image(record)) => record,
        Ok(_) => return None,
        Err(error) => return Some(Check::fail(subject, chain(&error), "check the disk")),
    };
    if let Err(error) = image::check_kind(pool, &make::Probe::Image(found.clone())) {
        return Some(Check::fail(
            subject,
            chain(&error),
            "correct the definition",
        ));
    }
    let file = host.stat(&outer.join(image::IMAGE_FILE)).ok().flatten();
    let reserved = file.map_or(0, |file| file.allocated);
    if reserved < found.size {
        return Some(Check::warn(
            subject,
            format!(
                "only {} of its {} are reserved: writes can fail when the disk is full",
                HumanBytes(reserved),
                HumanBytes(found.size)
            ),
            "another program punched holes into pool.img: keep the disk from filling up, and move the volumes to a new pool",
        ));
    }
    let wanted = pool.image.unwrap_or(found.size);
    if wanted > found.size {
        return Some(Check::warn(
            subject,
            format!(
                "{}, but {} are requested",
                HumanBytes(found.size),
                HumanBytes(wanted)
            ),
            "restart the driver; if that does not help, see its log",
        ));
    }
    Some(Check::ok(
        subject,
        format!("{} of xfs, fully reserved", HumanBytes(found.size)),
    ))
}

fn not_made(host: &dyn Host, node: &NodeRecord, pool: &PoolDefinition, path: &Path) -> Check {
    let subject = subject(pool);
    if let Some(id) = node.find_pool(pool) {
        return Check::fail(
            subject,
            format!(
                "{} is empty, but this machine had pool {id} there",
                path.display()
            ),
            format!("mount its disk; if it is permanently gone: slackwater pool forget {id}"),
        );
    }
    let nearest = path
        .ancestors()
        .find(|folder| matches!(host.stat(folder), Ok(Some(_))))
        .unwrap_or(path);
    let checked = match pool.image {
        Some(_) => make::check_image_pool_fs(host, nearest),
        None => make::check_pool_fs(host, nearest),
    };
    if let Err(error) = checked {
        return Check::fail(subject, chain(&error), "give another directory");
    }
    if pool.init {
        if let Some(missing) = mount(host, pool, path) {
            let fix = "mount its disk, or set mount=any in its definition if the pool is meant to share a file system";
            return Check::fail(
                subject,
                format!("{}, so serve does not create a pool there", missing.found),
                fix,
            );
        }
        return Check::ok(subject, "not created yet; serve creates it (init)");
    }
    Check::fail(
        subject,
        format!("no pool was created at {} yet", path.display()),
        format!("slackwater pool init {}", pool.plainly()),
    )
}

pub(super) fn identity(
    node: &NodeRecord,
    pool: &PoolDefinition,
    record: &PoolRecord,
) -> Vec<Check> {
    let subject = subject(pool);
    let mut checks = vec![match node.home {
        Some(home) if home != record.home => Check::fail(
            &subject,
            format!(
                "its home is {}, but the home of this machine is {home}",
                record.home
            ),
            format!(
                "if it is meant to stay here: slackwater pool adopt {}",
                pool.plainly()
            ),
        ),
        Some(_) => Check::ok(&subject, format!("{}, home {}", record.id, record.home)),
        None => Check::ok(
            &subject,
            format!(
                "{}, home {}; this machine takes over this home at the first start",
                record.id, record.home
            ),
        ),
    }];
    if node.forgotten.contains_key(&record.id) {
        checks.push(Check::warn(
            &subject,
            "it was forgotten, but it is present again",
            "run slackwater pool adopt, or remove it from the configuration",
        ));
    }
    if let Some(other) = node.find_pool(pool).filter(|id| *id != record.id) {
        checks.push(Check::warn(
            &subject,
            format!("this machine had another pool with this name or path, {other}"),
            format!("mount the disk of that pool elsewhere, or forget it: slackwater pool forget {other}"),
        ));
    }
    checks
}

/// Checks whether a missing disk can be distinguished from the empty directory at its mount point.
fn mount(host: &dyn Host, pool: &PoolDefinition, outer: &Path) -> Option<Check> {
    if pool.mount == Some(MountRule::Any) {
        return None;
    }
    let subject = format!("{}: mount", subject(pool));
    match pool_fs::without_mount(host, outer) {
        Ok(None) => None,
        Ok(Some(what)) => {
            let fix = "if this is intended, set mount=any in its definition; otherwise move its volumes to a separate disk";
            Some(Check::warn(subject, what, fix))
        }
        Err(error) => Some(Check::fail(subject, chain(&error), "check the disk")),
    }
}

fn pool_fs(host: &dyn Host, pool: &PoolDefinition, path: &Path) -> Vec<Check> {
    let subject = format!("{}: file system", subject(pool));
    let (warnings, fs) = match (make::check_pool_fs(host, path), host.backing_fs(path)) {
        (Ok(warnings), Ok(fs)) => (warnings, fs),
        (Err(error), _) => return vec![Check::fail(subject, chain(&error), "move the pool")],
        (_, Err(error)) => return vec![Check::fail(subject, chain(&error), "check the disk")],
    };
    let mut checks: Vec<Check> = warnings
        .into_iter()
        .map(|warning| Check::warn(&subject, warning, "suitable for tests only"))
        .collect();
    if checks.is_empty() {
        checks.push(Check::ok(
            &subject,
            format!(
                "{} mounted at {}, block size {}",
                fs.fs_name,
                fs.mount_point.display(),
                fs.sector
            ),
        ));
    }
    checks.push(snapshots(pool, &fs));
    match host.backing_fs(&path.join(VOLUMES)) {
        Ok(images) => checks.extend(checksums::check(pool, &images, kernel::version(host))),
        Err(error) => checks.push(Check::fail(subject, chain(&error), "check the disk")),
    }
    checks
}

/// Checks the cost of snapshots on a pool.
fn snapshots(pool: &PoolDefinition, pool_fs: &BackingFs) -> Check {
    let subject = format!("{}: snapshots", subject(pool));
    match make::without_sharing(pool_fs) {
        None => Check::ok(
            subject,
            format!(
                "this {} shares blocks between files: snapshots need no copy, also of volumes in use",
                pool_fs.fs_name
            ),
        ),
        Some(what) => Check::warn(subject, what, SHARING_ADVICE),
    }
}

fn room(host: &dyn Host, pool: &PoolDefinition, path: &Path) -> Check {
    let subject = format!("{}: space", subject(pool));
    match host.space(path) {
        Ok(space) => {
            let found = format!(
                "{} of {} free",
                HumanBytes(space.available),
                HumanBytes(space.total)
            );
            if space.available < space.total / 100 * super::LOW_SPACE_PERCENT {
                Check::warn(subject, found, "delete volumes, or enlarge the file system")
            } else {
                Check::ok(subject, found)
            }
        }
        Err(error) => Check::fail(subject, chain(&error), "check the disk"),
    }
}

fn scratch(host: &dyn Host, pool: &PoolDefinition, path: &Path) -> Check {
    let subject = format!("{}: loop device", subject(pool));
    let sector = host.backing_fs(path).map_or(512, |pool_fs| pool_fs.sector);
    match kernel::try_loop(host, path, sector) {
        Ok(status) if status.direct_io => Check::ok(subject, "a temporary image uses direct I/O"),
        Ok(_) => Check::warn(
            subject,
            "a temporary image uses buffered I/O: its pages are cached twice",
            "put the pool on a file system that supports direct I/O",
        ),
        Err(error) => Check::fail(
            subject,
            format!("a temporary image cannot be attached: {}", chain(&error)),
            "see the checks of privileges and loop devices",
        ),
    }
}

pub(super) fn records(pool: &PoolDefinition, found: Result<Inventory>) -> Vec<Check> {
    let subject = format!("{}: records", subject(pool));
    match found {
        Ok(found) => {
            let (volumes, snapshots) = (found.volumes.len(), found.snapshots.len());
            let count = Check::ok(
                &subject,
                format!("{volumes} volume records and {snapshots} snapshot records are valid"),
            );
            let damaged = found.damaged.into_iter().map(|damaged| {
                Check::warn(
                    &subject,
                    format!("{}: {}", damaged.path.display(), damaged.problem),
                    "restore record.json, or what the message names; the image is untouched",
                )
            });
            std::iter::once(count).chain(damaged).collect()
        }
        Err(error) => vec![Check::fail(subject, chain(&error), "check the disk")],
    }
}
