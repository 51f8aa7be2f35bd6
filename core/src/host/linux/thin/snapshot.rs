//! Snapshots of thin devices, in two steps: whatever needs memory is done before writers wait.

use std::sync::{Mutex, PoisonError};

use nix::errno::Errno;

use super::{devices_on, failed, get_running_pool};
use crate::error::HostError;
use crate::host::linux::device_mapper::{DeviceMapper, Selector};
use crate::host::{MappedDevice, PreparedThinSnapshot, Result, ThinSnapshot};

const ACTION: &str = "create_snap";

/// The message, and what sends it.
struct Call {
    mapper: DeviceMapper,
    /// The device numbers of the devices that show the origin.
    active: Vec<u64>,
    text: String,
}

/// Finds the devices that show the origin, opens the device mapper, and writes the message.
pub(in crate::host::linux) fn prepare_snapshot(
    snapshot: ThinSnapshot,
) -> Result<PreparedThinSnapshot> {
    let ThinSnapshot {
        pool, id, origin, ..
    } = &snapshot;
    let mapper = &mut DeviceMapper::open()?;
    let rdev = get_running_pool(mapper, pool, ACTION)?.status.rdev;
    if rdev != snapshot.rdev {
        let what = "another thin pool has this name now";
        return Err(HostError::unexpected(ACTION, pool, what));
    }
    let devices = devices_on(mapper, (pool, rdev), "", None)?.into_iter();
    let shows_it = |it: &MappedDevice| it.table.as_ref().is_some_and(|on| on.id == *origin);
    let call = Call {
        mapper: mapper.small(),
        active: devices
            .filter(shows_it)
            .map(|device| device.device.rdev)
            .collect(),
        text: format!("create_snap {id} {origin}"),
    };
    Ok(PreparedThinSnapshot {
        keep: Box::new(Mutex::new(call)),
        snapshot,
    })
}

/// Sends the message, if all devices that show the origin are suspended and the pool is not.
pub(in crate::host::linux) fn create_snapshot(prepared: &PreparedThinSnapshot) -> Result<()> {
    let ThinSnapshot {
        pool, rdev, origin, ..
    } = &prepared.snapshot;
    let failed = failed(ACTION, pool);
    let call = prepared.keep.downcast_ref::<Mutex<Call>>();
    let call = call.ok_or(Errno::EINVAL).map_err(&failed)?;
    let call = &mut *call.lock().unwrap_or_else(PoisonError::into_inner);
    for number in &call.active {
        let info = call.mapper.info(Selector::Number(*number));
        // A device that has been removed since shows nothing.
        if info.map_err(&failed)?.is_some_and(|info| !info.suspended) {
            let what = format!("{} is active on thin device {origin}", call.mapper.uuid());
            return Err(HostError::unexpected(ACTION, pool, what));
        }
    }
    let info = call.mapper.info(Selector::Number(*rdev));
    match info.map_err(&failed)? {
        None => return Err(failed(Errno::ENXIO)),
        Some(info) if info.suspended => return Err(failed(Errno::EAGAIN)),
        Some(_) => {}
    }
    let sent = call.mapper.message(Selector::Number(*rdev), &call.text);
    sent.map_err(failed)
}
