//! Thick volumes on a pool of LVM.

use super::*;
use crate::model::size::{GIB, GRAIN};
use crate::model::{Allocation, CapacityRange, SnapshotParameters};
use crate::operation::{CreateSnapshot, ExpandVolume};
use crate::record::ContentSource;

fn thick(name: &str, bytes: u64) -> CreateVolume {
    let mut request = new_volume(name);
    request.parameters.allocation = Allocation::Thick;
    request.capacity = CapacityRange::new(bytes.try_into().unwrap(), 0).unwrap();
    request
}

fn snapshot(of: &str) -> CreateSnapshot {
    CreateSnapshot {
        name: "s".into(),
        source_volume_id: of.into(),
        parameters: SnapshotParameters::default(),
        requisite: Vec::new(),
    }
}

fn capacity(driver: &Driver, allocation: Allocation) -> u64 {
    let mut ask = AskCapacity {
        capabilities: Vec::new(),
        parameters: new_volume("b").parameters,
        topology: None,
    };
    ask.parameters.allocation = allocation;
    driver.pools.capacity(&ask).unwrap().available
}

fn keeping_promises(host: &MemoryHost) -> Driver {
    start_with(
        host,
        &[pool("default=lvm:vg/pool,init,rawBlock=unfiltered")],
    )
    .unwrap()
}

#[test]
fn the_capacity_for_thick_volumes_is_what_one_can_have() {
    let host = MemoryHost::new();
    let driver = keeping_promises(&host);
    let bytes = capacity(&driver, Allocation::Thick);
    assert!(bytes > GIB, "{bytes}");
    let refused = driver.volumes.create_volume(&thick("a", bytes + GRAIN));
    assert!(
        matches!(refused, Err(Error::OutOfSpace { .. })),
        "{refused:?}"
    );
    driver.volumes.create_volume(&thick("a", bytes)).unwrap();
    assert_eq!(capacity(&driver, Allocation::Thick), 0);
    assert_eq!(capacity(&driver, Allocation::Thin), 0);
    assert_eq!(host.violations(), Vec::<String>::new());
}

#[test]
fn a_snapshot_of_a_thick_volume_keeps_room_for_a_whole_copy() {
    let host = MemoryHost::new();
    let driver = keeping_promises(&host);
    let before = capacity(&driver, Allocation::Thin);
    let made = driver.volumes.create_volume(&thick("a", GIB)).unwrap();
    assert_eq!(before - capacity(&driver, Allocation::Thin), GIB);
    let id = made.id.to_string();
    let made = driver.snapshots.create_snapshot(&snapshot(&id)).unwrap();
    assert_eq!(before - capacity(&driver, Allocation::Thin), 2 * GIB);

    let mut copy = thick("b", GIB);
    copy.content_source = Some(ContentSource::Snapshot(made.id.to_string()));
    let refused = chain(&driver.volumes.create_volume(&copy).unwrap_err());
    assert!(refused.contains("parameters.allocation"), "{refused}");
    copy.parameters.allocation = Allocation::Thin;
    driver.volumes.create_volume(&copy).unwrap();
    assert_eq!(host.violations(), Vec::<String>::new());
}

#[test]
fn a_snapshot_of_a_thick_volume_without_room_for_a_copy_is_refused() {
    let host = MemoryHost::new();
    let driver = keeping_promises(&host);
    let bytes = capacity(&driver, Allocation::Thick) / 4 * 3;
    let made = driver.volumes.create_volume(&thick("a", bytes)).unwrap();
    let refused = driver
        .snapshots
        .create_snapshot(&snapshot(&made.id.to_string()));
    assert!(
        matches!(refused, Err(Error::OutOfSpace { .. })),
        "{refused:?}"
    );
    assert_eq!(thin_ids(&host), [1, 2, 3]);
}

#[test]
fn a_thick_volume_does_not_grow() {
    let host = MemoryHost::new();
    let driver = keeping_promises(&host);
    let made = driver.volumes.create_volume(&thick("a", GIB)).unwrap();
    let refused = driver.volumes.expand_volume(&ExpandVolume {
        volume_id: made.id.to_string(),
        capacity: CapacityRange::new(2 << 30, 0).unwrap(),
        capability: None,
    });
    assert!(
        matches!(refused, Err(Error::OutOfRange { .. })),
        "{refused:?}"
    );
}

#[test]
fn thick_volumes_need_a_pool_that_keeps_its_promises() {
    let host = MemoryHost::new();
    let driver = keeping_promises(&host);
    let made = driver.volumes.create_volume(&thick("a", GIB)).unwrap();
    drop(driver);
    let host = host.restart_process();
    let driver = start(&host);
    assert_eq!(capacity(&driver, Allocation::Thick), 0);
    let refused = chain(&driver.volumes.create_volume(&thick("b", GIB)).unwrap_err());
    assert!(refused.contains("overcommit=1"), "{refused}");
    let asked = snapshot(&made.id.to_string());
    let refused = chain(&driver.snapshots.create_snapshot(&asked).unwrap_err());
    assert!(refused.contains("overcommit=1"), "{refused}");
    assert_eq!(thin_ids(&host), [1, 2, 3]);
}

/// Whether a fault at effect `n` of the creation was the last one there.
fn interrupted(n: usize, mode: FaultMode) -> bool {
    let context = format!("effect {n}, {mode:?}");
    let host = MemoryHost::new();
    let driver = keeping_promises(&host);
    host.fail_effect(n, mode);
    let request = thick("a", GIB);
    drop(driver.volumes.create_volume(&request));
    let is_over = host.faults_left() > 0;
    host.clear_faults();
    drop(driver);
    let host = host.reboot(true);
    let driver = keeping_promises(&host);
    let made = driver.volumes.create_volume(&request).unwrap();
    let devices = host.thin_devices(NAME).unwrap();
    assert_eq!(devices.len(), 3, "{context}: {devices:?}");
    let blocks = devices.values().filter(|bytes| **bytes >= GIB).count();
    assert_eq!(blocks, 1, "{context}: {devices:?}");
    driver.volumes.delete_volume(&made.id.to_string()).unwrap();
    assert_eq!(host.violations(), Vec::<String>::new(), "{context}");
    is_over
}

#[test]
fn a_creation_that_is_interrupted_leaves_no_blocks_behind() {
    for mode in [
        FaultMode::CrashBefore,
        FaultMode::CrashAfter,
        FaultMode::Before(nix::errno::Errno::EIO),
    ] {
        let mut each = 1..;
        assert!(each.any(|n| interrupted(n, mode)));
    }
}
