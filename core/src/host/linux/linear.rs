//! Mapped devices that show another block device.

use nix::errno::Errno;
use nix::sys::stat::{major, minor};

use super::device_mapper::{DeviceMapper, Selector, Target};
use crate::host::LinearTable;

const SECTOR: u64 = 512;

/// Loads a table that shows a lower device, named by its number: a path could pass to another device.
pub(super) fn load(
    mapper: &mut DeviceMapper,
    uuid: &str,
    table: &LinearTable,
    read_only: bool,
) -> Result<(), Errno> {
    let targets = targets(table).ok_or(Errno::EINVAL)?;
    // Linux 6.1 loads a table that is longer than the device below it.
    if lower_bytes(table.lower.rdev)? < table.bytes {
        return Err(Errno::EINVAL);
    }
    mapper.load(Selector::Uuid(uuid), &targets, read_only)
}

/// ENXIO if there is no such device.
fn lower_bytes(rdev: u64) -> Result<u64, Errno> {
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
    use crate::host::Device;

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
        assert_eq!([first.kind, rest.kind], ["linear", "linear"]);
    }

    #[test]
    fn a_device_that_is_too_small_for_two_targets_is_refused() {
        assert_eq!(targets(&table(1 << 20)), None);
        assert_eq!(targets(&table(0)), None);
        assert!(targets(&table((1 << 20) + 512)).is_some());
    }
}
