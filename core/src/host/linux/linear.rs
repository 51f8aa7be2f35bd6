//! Mapped devices that show another block device.

use nix::errno::Errno;
use nix::sys::stat::{major, minor};

use super::device_mapper::{DeviceMapper, Selector, Target};
use super::thin::{examine, number};
use crate::error::HostError;
use crate::host::{Device, LinearTable, MappedDevice, Result};

const SECTOR: u64 = 512;

/// Loads a table that shows a lower device, named by its number: a path could pass to another device.
pub(super) fn load(
    mapper: &mut DeviceMapper,
    uuid: &str,
    table: &LinearTable,
    read_only: bool,
) -> std::result::Result<(), Errno> {
    let targets = targets(table).ok_or(Errno::EINVAL)?;
    // Linux 6.1 loads a table that is longer than the device below it.
    if lower_bytes(table.lower.rdev)? < table.bytes {
        return Err(Errno::EINVAL);
    }
    mapper.load(Selector::Uuid(uuid), &targets, read_only)
}

/// `None` on a kernel without device mapper, and in a container that may not use it: volumes that need
/// none must be served there, too. Where devtmpfs has the node and no module is behind it, opening it is
/// ENODEV or ENXIO.
pub(super) fn open_mapper() -> Result<Option<DeviceMapper>> {
    match DeviceMapper::open() {
        Ok(mapper) => Ok(Some(mapper)),
        Err(error) => match error.code() {
            Some(Errno::ENOENT | Errno::ENODEV | Errno::ENXIO | Errno::EPERM | Errno::EACCES) => {
                Ok(None)
            }
            Some(_) | None => Err(error),
        },
    }
}

pub(super) fn find(uuid: &str) -> Result<Option<MappedDevice<LinearTable>>> {
    let Some(mapper) = &mut open_mapper()? else {
        return Ok(None);
    };
    let found = examine(mapper, Selector::Uuid(uuid));
    let found = found.map_err(|errno| HostError::errno("examine", uuid, errno))?;
    Ok(found.map(|found| {
        let table = found.table.as_deref().and_then(table_of);
        found.with_table(table)
    }))
}

/// The inverse of [`targets`], for tables above loop devices.
fn table_of(found: &[Target]) -> Option<LinearTable> {
    let lower = number(found.first()?.parameters.split_ascii_whitespace().next()?)?;
    let lower = Device::of_loop(Device::loop_number_of(lower)?);
    let sectors: u64 = found.iter().map(|target| target.sectors).sum();
    let table = LinearTable {
        lower,
        bytes: sectors.checked_mul(SECTOR)?,
    };
    let is_it = targets(&table).is_some_and(|targets| found == targets.as_slice());
    is_it.then_some(table)
}

/// ENXIO if there is no such device.
fn lower_bytes(rdev: u64) -> std::result::Result<u64, Errno> {
    let path = format!("/sys/dev/block/{}:{}/size", major(rdev), minor(rdev));
    let sectors = std::fs::read_to_string(path).map_err(|_| Errno::ENXIO)?;
    let sectors: u64 = sectors.trim().parse().map_err(|_| Errno::EBADMSG)?;
    Ok(sectors.saturating_mul(SECTOR))
}

fn targets(table: &LinearTable) -> Option<[Target; 2]> {
    let rdev = table.lower.rdev;
    let target = |(start, bytes): (u64, u64)| Target {
        start: start / SECTOR,
        sectors: bytes / SECTOR,
        kind: "linear".into(),
        parameters: format!("{}:{} {}", major(rdev), minor(rdev), start / SECTOR),
    };
    table.targets().map(|targets| targets.map(target))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(bytes: u64) -> LinearTable {
        let lower = Device::of_loop(3);
        LinearTable { lower, bytes }
    }

    #[test]
    fn two_targets_show_the_lower_device_without_a_gap() {
        let [first, rest] = targets(&table((4 << 20) + 512)).unwrap();
        assert_eq!((first.start, first.sectors), (0, 2048));
        assert_eq!(first.parameters, "7:3 0");
        assert_eq!((rest.start, rest.sectors), (2048, 3 * 2048 + 1));
        assert_eq!(rest.parameters, "7:3 2048");
        assert_eq!([&*first.kind, &*rest.kind], ["linear", "linear"]);
        assert_eq!(table_of(&[first, rest]), Some(table((4 << 20) + 512)));
    }

    #[test]
    fn a_device_that_is_too_small_for_two_targets_is_refused() {
        assert_eq!(targets(&table(1 << 20)), None);
        assert_eq!(targets(&table(0)), None);
        assert!(targets(&table((1 << 20) + 512)).is_some());
    }
}
