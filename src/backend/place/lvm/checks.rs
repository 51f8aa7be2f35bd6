//! Whether a thin pool can be used as LVM has set it up. Each refusal contains the command that fixes it.

use crate::backend::thin::TRANSACTION_ID;
use crate::error::{Error, ErrorContext, Result};
use crate::host::mapper::ThinPoolMode;
use crate::host::{Host, ThinPoolStatus};
use crate::model::size::HumanBytes;
use crate::model::{PoolDefinition, ThinPoolName};

/// What LVM appends to the name of the device of a pool in which it has thin volumes of its own.
const OF_LVM: &str = "-tpool";

/// The status of a pool that may be used. It is an error that is tried again if the pool is not
/// there, or is set up in a way that loses data.
pub fn usable(
    host: &dyn Host,
    pool: &PoolDefinition,
    name: &ThinPoolName,
) -> Result<ThinPoolStatus> {
    let refuse = |reason: String| {
        Err(Error::Unreachable {
            what: format!("pool {}", pool.name),
            reason,
        })
    };
    let mapped = name.mapped();
    let examine = |mapped: &str| {
        let found = host.thin_pool(mapped);
        found.context(|| format!("examine the thin pool {name}"))
    };
    if examine(&format!("{mapped}{OF_LVM}"))?.is_some() {
        return refuse(format!(
            "LVM has thin volumes of its own in {name} (the device {mapped}{OF_LVM} exists); give it a pool of its own: lvcreate --type thin-pool --size SIZE --name NAME {}",
            name.group()
        ));
    }
    let Some(status) = examine(mapped)? else {
        return refuse(format!(
            "there is no active thin pool {name}; activate it with `vgchange --activate y {}`, or create it with `lvcreate --type thin-pool --size SIZE --name {} {}` and `lvchange --errorwhenfull y {name}` (the kernel module dm_thin_pool is needed: modprobe dm_thin_pool)",
            name.group(),
            name.pool(),
            name.group()
        ));
    };
    match problem(&status, pool, name) {
        Some(reason) => refuse(reason),
        None => Ok(status),
    }
}

/// thin_repair of thin-provisioning-tools 0.9 copies the flag needs_check, and LVM 2.03.16 does not
/// let thin_check clear it by default, so a repaired pool would stay read-only.
const CLEAR_NEEDS_CHECK: &str = r#"global/thin_check_options=["-q","--clear-needs-check-flag"]"#;

/// What is wrong with a pool, and the command that mends it.
pub fn problem(
    status: &ThinPoolStatus,
    pool: &PoolDefinition,
    name: &ThinPoolName,
) -> Option<String> {
    let repair = || {
        format!(
            "stop the pods that use its volumes and the driver, then run: slackwater pool release {}; lvchange --activate n {name}; lvconvert --repair {name}; lvchange --activate y --config '{CLEAR_NEEDS_CHECK}' {name}",
            pool.plainly()
        )
    };
    if status.needs_check {
        return Some(format!(
            "the metadata of {name} needs a check; {}",
            repair()
        ));
    }
    match status.mode {
        ThinPoolMode::Failed => {
            return Some(format!("{name} has failed; {}", repair()));
        }
        // The kernel makes the pool writable again once its metadata has room.
        ThinPoolMode::ReadOnly if status.metadata.free() == 0 => {
            return Some(format!(
                "{name} is read-only because its metadata is full; run: lvextend --poolmetadatasize +SIZE {name}"
            ));
        }
        ThinPoolMode::ReadOnly => {
            return Some(format!(
                "{name} is read-only; if LVM made it read-only, run: lvchange --permission rw {name}; otherwise {}",
                repair()
            ));
        }
        ThinPoolMode::ReadWrite | ThinPoolMode::OutOfData => {}
    }
    if !status.zeroes_blocks {
        return Some(format!(
            "{name} does not zero new blocks (skip_block_zeroing), so a volume would show what another one has deleted; run: lvchange --zero y {name}"
        ));
    }
    if !status.errors_when_full {
        return Some(format!(
            "{name} lets writes wait when it is full (queue_if_no_space), and a snapshot would wait with them; run: lvchange --errorwhenfull y {name}"
        ));
    }
    None
}

/// Why a pool is not taken from the volume group that LVM lists, and the command that mends it: another
/// machine could use the thin pool at the same time. `None` if LVM is not installed, as in containers.
pub fn group_problem(host: &dyn Host, name: &ThinPoolName) -> Result<Option<String>> {
    let group = name.group();
    let doing = || format!("list the volume group {group}");
    let found = host.volume_groups(group).context(doing)?;
    let found = found.unwrap_or_default();
    if let [first, _, ..] = found.as_slice() {
        return Ok(Some(format!(
            "there are {} volume groups with the name {group}; rename the one without the pool: vgrename UUID NAME (one of the UUIDs is {})",
            found.len(),
            first.uuid
        )));
    }
    let problem = found.into_iter().find_map(|found| {
        if !found.lock_type.is_empty() {
            return Some(format!(
                "the volume group {group} is shared between machines (lock type {}), and each would use the thin pool as its own; give a pool of a local group, or run: vgchange --lock-type none {group}",
                found.lock_type
            ));
        }
        found.is_foreign.then(|| {
            format!(
                "the volume group {group} belongs to the machine with the system ID {id}; if that machine does not use it any more, run: vgchange --yes --config 'local/extra_system_ids=[\"{id}\"]' --systemid \"\" {group}",
                id = found.system_id
            )
        })
    });
    Ok(problem)
}

/// Whether a pool has never been used: only then may it be taken. Otherwise says what was found.
pub fn find_previous_use(
    host: &dyn Host,
    status: &ThinPoolStatus,
    mapped: &str,
) -> Result<Option<String>> {
    let doing = || format!("examine the thin pool {mapped}");
    if status.holds_metadata {
        return Ok(Some("a snapshot of its metadata is held".into()));
    }
    if status.mode != ThinPoolMode::ReadWrite {
        return Ok(Some("it has no free space".into()));
    }
    if status.data.used > 0 {
        let used = HumanBytes(status.data.used);
        return Ok(Some(format!("{used} of its data are in use")));
    }
    let devices = host.thin_devices(mapped).context(doing)?;
    if let Some(id) = devices.keys().next() {
        return Ok(Some(format!("it has the thin device {id}")));
    }
    let active = host.mapped_devices(mapped, "").context(doing)?;
    let active = active.iter().find(|device| device.table.is_some());
    Ok(active.map(|device| format!("the device {} uses it", device.uuid)))
}

/// The command that restores the transaction ID of a pool of this driver, which has another one now.
pub fn recovery_advice(name: &ThinPoolName, found: u64) -> String {
    let mapped = name.mapped();
    format!("dmsetup message {mapped} 0 \"set_transaction_id {found} {TRANSACTION_ID}\"")
}

/// The error for a pool with the transaction ID of another program.
pub fn foreign_id(pool: &PoolDefinition, name: &ThinPoolName, found: u64, known: bool) -> Error {
    let recovery_advice = recovery_advice(name, found);
    let reason = match known {
        true => format!(
            "this machine had the pool in {name}, but its transaction ID is {found} instead of {TRANSACTION_ID}; if lvconvert --repair has replaced its metadata, check that `slackwater volumes` is right afterwards and run: {recovery_advice}"
        ),
        false => format!(
            "another program uses {name}: its transaction ID is {found}, but 0 in a pool that was never used, and {TRANSACTION_ID} in one of Slackwater; give another pool (if it was one of Slackwater before a repair: {recovery_advice})"
        ),
    };
    // Both can change while the driver runs.
    match known {
        true => Error::Unreachable {
            what: format!("pool {}", pool.name),
            reason,
        },
        false => Error::refused(format!("pool {}", pool.name), reason),
    }
}
