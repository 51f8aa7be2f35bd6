//! Checks the directory of the freeze journal, and tries a freeze on a temporary file system.
//!
//! The trial uses the guard, as a cut does, so the file system is thawed even if this process dies.
//! No other process uses the file system.

use std::time::Duration;

use super::trial::{Mounted, on_mounted};
use super::{Check, Subject, kernel};
use crate::error::{ErrorContext, Result, chain};
use crate::host::freezer::FreezeLimits;
use crate::host::{FileKind, FreezeMember, Freezer, Host};
use crate::model::{FsType, PoolPlace};

/// Only a hang reaches these limits.
const LIMITS: FreezeLimits = FreezeLimits {
    sync: Duration::from_secs(5),
    freeze: Duration::from_secs(5),
};
/// File systems whose content is lost at a reboot, as freezes are.
const VOLATILE_FS: [&str; 2] = ["tmpfs", "ramfs"];
/// Name of the member in journal and logs.
const MEMBER: &str = "doctor";

pub(super) fn examine(host: &dyn Host, freezer: &dyn Freezer, examined: &Subject) -> Vec<Check> {
    let state = state_dir(host, examined);
    let usable = state.level != super::CheckStatus::Fail;
    let mut checks = vec![state];
    if usable {
        checks.push(trial(host, freezer, examined));
    }
    checks
}

/// Checks the directory of the journal: it must not be on a file system that may be frozen, and
/// preferably is on one that a reboot empties.
fn state_dir(host: &dyn Host, examined: &Subject) -> Check {
    let path = &examined.state_dir;
    let subject = format!("state directory {}", path.display());
    let on_a_pool = examined.pools.iter().find(|pool| match &pool.place {
        PoolPlace::File { path: folder } => path.starts_with(folder),
        PoolPlace::Lvm { .. } | PoolPlace::Memory { .. } => false,
    });
    let elsewhere = "give another directory with --state-dir, such as /run/slackwater/state";
    if let Some(pool) = on_a_pool {
        let found = format!("it is on pool {}", pool.name);
        return Check::fail(subject, found, elsewhere);
    }
    let mut there = None;
    for folder in path.ancestors() {
        match host.stat(folder) {
            Ok(Some(stat)) if stat.kind == FileKind::File => {
                let found = format!("{} is a file", folder.display());
                return Check::fail(subject, found, elsewhere);
            }
            Ok(Some(_)) => {
                there = Some(folder);
                break;
            }
            Ok(None) => {}
            Err(error) => return Check::fail(subject, chain(&error), elsewhere),
        }
    }
    let made = match there {
        Some(folder) if folder == path => "",
        Some(_) | None => " (not created yet)",
    };
    match host.backing_fs(there.unwrap_or(path)) {
        Ok(backing) if VOLATILE_FS.contains(&backing.fs_name.as_str()) => Check::ok(
            subject,
            format!("on {}, as recommended{made}", backing.fs_name),
        ),
        Ok(backing) => Check::warn(
            subject,
            format!(
                "on {}: the freeze journal survives a reboot, but the freezes do not{made}",
                backing.fs_name
            ),
            "put it on a tmpfs, such as /run",
        ),
        Err(error) => Check::warn(subject, chain(&error), elsewhere),
    }
}

fn trial(host: &dyn Host, freezer: &dyn Freezer, examined: &Subject) -> Check {
    let fix = "see the checks of privileges, programs and loop devices; until this works, snapshots of mounted volumes need consistency: crash";
    let not_tried = |why: &str| Check::warn("freeze", format!("not tried: {why}"), fix);
    match kernel::may_mount(host) {
        Some(true) => {}
        Some(false) | None => return not_tried("it needs CAP_SYS_ADMIN"),
    }
    if !kernel::is_there(host, &examined.programs, "mkfs.ext4") {
        return not_tried("mkfs.ext4 is missing");
    }
    let frozen = on_mounted(
        host,
        &examined.trial_dir,
        FsType::Ext4,
        |mounted| freeze(host, freezer, mounted),
        || freezer.stop_guard(),
    );
    match frozen {
        Ok(true) => Check::ok(
            "freeze",
            "the freeze guard froze and thawed a temporary ext4 file system",
        ),
        Ok(false) => Check::warn(
            "freeze",
            "another program thawed a temporary ext4 file system early",
            "find the program that thaws file systems it did not freeze; cuts are discarded because of it",
        ),
        Err(error) => Check::warn("freeze", chain(&error), fix),
    }
}

/// Returns true if it was still frozen when it was thawed.
fn freeze(host: &dyn Host, freezer: &dyn Freezer, mounted: &Mounted<'_>) -> Result<bool> {
    let doing = || "try a freeze".to_string();
    let root = host
        .open_mount_root(mounted.target, mounted.device, FsType::Ext4)
        .context(doing)?;
    let member = FreezeMember {
        volume_id: MEMBER.into(),
        namespace: None,
        image: mounted.image.id,
        root: Some(root),
        mapped: None,
    };
    let session = freezer.begin(vec![member], LIMITS).context(doing)?;
    session.sync().context(doing)?;
    session.freeze().context(doing)?;
    session.thaw(0).context(doing)
}
