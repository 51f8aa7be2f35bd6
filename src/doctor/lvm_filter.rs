//! A trial whether the LVM of the host ignores raw block volumes: a thin device with the label of a
//! physical volume, whose name is like those of volumes.

use std::path::Path;
use std::time::Duration;

use uuid::Uuid;

use super::{Check, Subject};
use crate::backend::mapped::create_mapped;
use crate::backend::place::lvm::raw_block::{FILTER, filter_record};
use crate::backend::thin::{DEVICE_PREFIX, TRIAL_ID};
use crate::error::{Error, ErrorContext, Result, chain};
use crate::host::{Effect, Host, ThinMessage, ThinTable};
use crate::model::ThinPoolName;
use crate::model::size::MIB;
use crate::record::{self, LvmFilterRecord};

/// The size of the device.
const TRIAL_BYTES: u64 = 4 * MIB;
/// How often udev is asked for the device, which it creates after the kernel has.
const MAX_ATTEMPTS: usize = 20;
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Tries it, and stores the result where the driver reads it. `subject` is that of the check.
pub(super) fn examine(
    host: &dyn Host,
    name: &ThinPoolName,
    examined: &Subject,
    subject: String,
) -> Check {
    let fix = format!(
        "set `{FILTER}` in the section `devices` of /etc/lvm/lvm.conf, and run doctor again"
    );
    let seen = trial(host, name).and_then(|ignored| {
        keep(host, &examined.node_record, ignored)?;
        Ok(ignored)
    });
    match seen {
        Ok(true) => Check::ok(subject, "LVM ignores raw block volumes"),
        Ok(false) => Check::warn(
            subject,
            "LVM uses what tenants write to raw block volumes, so they are refused",
            fix,
        ),
        Err(error) => Check::warn(
            subject,
            format!(
                "it is not known whether LVM ignores raw block volumes: {}",
                chain(&error)
            ),
            fix,
        ),
    }
}

fn keep(host: &dyn Host, node_record: &Path, ignored: bool) -> Result<()> {
    let path = &filter_record(node_record);
    let checked_at = host.now();
    match ignored {
        true => record::store(host, path, &LvmFilterRecord { checked_at }),
        false => {
            let removed = host.perform(&Effect::RemoveFile { path });
            removed
                .map(drop)
                .context(|| format!("remove {}", path.display()))
        }
    }
}

/// Whether LVM ignores the device of the trial.
fn trial(host: &dyn Host, name: &ThinPoolName) -> Result<bool> {
    let uuid = &format!("{DEVICE_PREFIX}trial-{}", host.random_uuid());
    // What a killed doctor has left.
    remove(host, name)?;
    let tried = write_label(host, name, uuid).and_then(|label| is_ignored(host, &label));
    let removed = remove(host, name);
    let ignored = tried?;
    removed.map(|()| ignored)
}

fn remove(host: &dyn Host, name: &ThinPoolName) -> Result<()> {
    let doing = || format!("remove the device of a trial from {name}");
    let pool = name.mapped();
    for found in host.mapped_devices(pool, DEVICE_PREFIX).context(doing)? {
        let is_trial = found.uuid.starts_with(&format!("{DEVICE_PREFIX}trial-"));
        if is_trial {
            let uuid = &found.uuid;
            host.perform(&Effect::RemoveMapped { uuid })
                .context(doing)?;
        }
    }
    if host
        .thin_devices(pool)
        .context(doing)?
        .contains_key(&TRIAL_ID)
    {
        let message = ThinMessage::Delete { id: TRIAL_ID };
        host.perform(&Effect::ThinMessage { pool, message })
            .context(doing)?;
    }
    Ok(())
}

/// Creates the device and writes the label. Returns the UUID of the physical volume.
fn write_label(host: &dyn Host, name: &ThinPoolName, uuid: &str) -> Result<String> {
    let doing = || format!("create a device for a trial in {name}");
    let pool = name.mapped();
    let message = ThinMessage::CreateThin { id: TRIAL_ID };
    let table = &ThinTable {
        pool: pool.into(),
        id: TRIAL_ID,
        bytes: TRIAL_BYTES,
    };
    let sent = host.perform(&Effect::ThinMessage { pool, message });
    sent.and_then(|_| create_mapped(host, uuid, table))
        .context(doing)?;
    let held = host.hold_mapped(uuid).context(doing)?;
    let held = held.ok_or_else(|| Error::bug("the device was just created"))?;
    let volume = label_uuid(host.random_uuid());
    host.perform(&Effect::WriteBlocks {
        device: &held.device,
        offset: 0,
        bytes: &label(&volume),
    })
    .context(doing)?;
    Ok(volume)
}

/// Whether LVM ignores the physical volume, although it could see it.
fn is_ignored(host: &dyn Host, volume: &str) -> Result<bool> {
    let lists = |ignore_nothing| {
        let listed = host.is_listed_by_lvm(volume, ignore_nothing);
        listed.context(|| "list physical volumes".into())
    };
    for _ in 0..MAX_ATTEMPTS {
        if lists(true)? {
            return lists(false).map(|listed| !listed);
        }
        host.pause(RETRY_INTERVAL);
    }
    Err(Error::refused(
        "the trial",
        "LVM does not find the device even where it ignores none",
    ))
}

/// 32 letters and digits in groups, as LVM writes it.
fn label_uuid(random: Uuid) -> String {
    let text = random.simple().to_string();
    let mut groups = Vec::new();
    let mut rest = text.as_str();
    for length in [6, 4, 4, 4, 4, 4, 6] {
        let (group, after) = rest.split_at(length);
        groups.push(group);
        rest = after;
    }
    groups.join("-")
}

/// The first 4096 bytes of a physical volume without metadata (`struct label_header` and `struct
/// pv_header` of LVM). All numbers are little-endian. The label is in sector 1, and its header has 32
/// bytes.
fn label(volume: &str) -> Vec<u8> {
    const SECTOR: usize = 512;
    const HEADER: usize = 32;
    let mut bytes = vec![0; 4096];
    let mut put = |at: usize, what: &[u8]| bytes[SECTOR + at..][..what.len()].copy_from_slice(what);
    put(0, b"LABELONE");
    put(8, &1u64.to_le_bytes());
    put(20, &(HEADER as u32).to_le_bytes());
    put(24, b"LVM2 001");
    put(HEADER, volume.replace('-', "").as_bytes());
    put(HEADER + 32, &TRIAL_BYTES.to_le_bytes());
    // One area of data from the first MiB to the end; then the ends of both lists of areas.
    put(HEADER + 40, &MIB.to_le_bytes());
    let checksum = crc(&bytes[SECTOR + 20..2 * SECTOR]);
    bytes[SECTOR + 16..][..4].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// LVM's checksum: CRC-32 with its own start, and not inverted at the end.
fn crc(bytes: &[u8]) -> u32 {
    const START: u32 = 0xf597_a6cf;
    const POLYNOMIAL: u32 = 0xedb8_8320;
    bytes.iter().fold(START, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (POLYNOMIAL & (crc & 1).wrapping_neg())
        })
    })
}
