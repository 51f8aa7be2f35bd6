//! Changes that pods make to the loop devices of their raw block volumes, on a simulated machine.

use std::path::Path;

use super::*;
use crate::host::Host;
use crate::host::memory::{MemoryHost, MemoryOptions};
use crate::model::VolumeId;
use crate::operation::tests::{block, driver, volume};
use crate::operation::{Driver, PublishVolume, StageVolume};

const KUBELET: &str = "/var/lib/kubelet";

fn publish(driver: &Driver, id: VolumeId, target: &str) -> Result<()> {
    driver.volumes.publish_volume(&PublishVolume {
        volume_id: id.to_string(),
        staging_path: format!("{KUBELET}/stage-{}", id.uuid),
        target_path: target.into(),
        capability: block(),
        read_only: false,
    })
}

/// A machine on which pods get the loop devices themselves.
fn without_device_mapper() -> MemoryHost {
    MemoryHost::with_options(MemoryOptions {
        device_mapper: false,
        ..MemoryOptions::default()
    })
}

/// A raw block volume that is published at a target, and the number of its loop device.
fn published(driver: &Driver, name: &str, target: &str) -> (VolumeId, u32) {
    let id = volume(driver, name);
    driver
        .volumes
        .stage_volume(&StageVolume {
            volume_id: id.to_string(),
            staging_path: format!("{KUBELET}/stage-{}", id.uuid),
            capability: block(),
        })
        .unwrap();
    publish(driver, id, target).unwrap();
    let number = driver.usage.published.lock().of[&id.uuid]
        .watched
        .hold
        .device
        .loop_number();
    (id, number.unwrap())
}

fn target(name: &str) -> String {
    format!("{KUBELET}/{name}")
}

fn end(driver: &Driver, id: VolumeId, target: &str) {
    driver
        .volumes
        .unpublish_volume(&id.to_string(), target)
        .unwrap();
    let staging = format!("{KUBELET}/stage-{}", id.uuid);
    driver
        .volumes
        .unstage_volume(&id.to_string(), &staging)
        .unwrap();
    driver.volumes.delete_volume(&id.to_string()).unwrap();
}

#[test]
fn a_device_is_held_while_it_is_published_and_no_longer() {
    let host = without_device_mapper();
    let driver = driver(&host);
    let (id, number) = published(&driver, "a", &target("a"));
    host.detach_loop(number).unwrap();
    assert_eq!(
        host.loops().unwrap().len(),
        1,
        "an open descriptor keeps it"
    );
    end(&driver, id, &target("a"));
    assert_eq!(host.loops().unwrap().len(), 0);
    assert!(driver.usage.published.lock().of.is_empty());
}

#[test]
fn a_change_is_reported_everywhere_once_and_further_publishes_are_refused() {
    let host = without_device_mapper();
    let driver = driver(&host);
    let (id, number) = published(&driver, "a", &target("a"));
    let (other, _) = published(&driver, "b", &target("b"));
    driver.usage.watch_published();
    assert_eq!(driver.usage.changed_devices(), Vec::new());
    host.set_loop_flags(number, true, true).unwrap();
    driver.usage.watch_published();
    let changed = driver.usage.changed_devices();
    assert_eq!(changed.len(), 1);
    assert_eq!(changed[0].uuid, id.uuid);
    assert!(changed[0].problem.contains("partition"), "{changed:?}");
    assert_eq!(driver.pool_status()[0].changed, changed);
    let health = driver.volumes.volume_health(&id.to_string()).unwrap();
    assert!(
        health
            .findings
            .iter()
            .any(|one| one.reason == "DeviceChanged")
    );
    let health = driver.volumes.volume_health(&other.to_string()).unwrap();
    assert_eq!(health.findings.len(), 0, "the other one is as it was");
    let error = publish(&driver, id, &target("a2")).unwrap_err();
    assert!(
        error.to_string().contains("unpublish it everywhere"),
        "{error}"
    );
    publish(&driver, id, &target("a")).expect("what is there already is there");
    publish(&driver, other, &target("b2")).unwrap();
    // Once the flag is reset, the device is unchanged again.
    host.set_loop_flags(number, true, false).unwrap();
    publish(&driver, id, &target("a2")).unwrap();
    assert_eq!(driver.usage.changed_devices(), Vec::new());
}

#[test]
fn a_publish_looks_by_itself_before_the_next_round() {
    let host = without_device_mapper();
    let driver = driver(&host);
    let (id, number) = published(&driver, "a", &target("a"));
    host.detach_loop(number).unwrap();
    let error = publish(&driver, id, &target("a2")).unwrap_err();
    assert!(error.to_string().contains("detach"), "{error}");
}

#[test]
fn direct_io_is_switched_on_again() {
    let host = without_device_mapper();
    let driver = driver(&host);
    let (_, number) = published(&driver, "a", &target("a"));
    host.set_loop_flags(number, false, false).unwrap();
    driver.usage.watch_published();
    assert!(host.loops().unwrap()[0].direct_io);
    assert_eq!(driver.usage.changed_devices(), Vec::new());
}

#[test]
fn a_restart_holds_what_is_published_again() {
    let host = without_device_mapper();
    let driver_before = driver(&host);
    let (id, number) = published(&driver_before, "a", &target("a"));
    drop(driver_before);
    let host = host.restart_process();
    let driver = driver(&host);
    host.detach_loop(number).unwrap();
    assert_eq!(host.loops().unwrap().len(), 1);
    driver.usage.watch_published();
    assert_eq!(driver.usage.changed_devices().len(), 1);
    end(&driver, id, &target("a"));
    assert_eq!(host.loops().unwrap().len(), 0);
}

#[test]
fn a_number_that_a_target_still_shows_is_no_other_volumes() {
    let host = without_device_mapper();
    let driver_before = driver(&host);
    let (id, number) = published(&driver_before, "a", &target("a"));
    drop(driver_before);
    let host = host.restart_process();
    host.detach_loop(number).unwrap();
    assert_eq!(host.loops().unwrap().len(), 0, "nothing held it");
    let driver = driver(&host);
    let lost = vec![Path::new(KUBELET).join("a")];
    assert_eq!(driver.usage.lost_devices(), lost);
    let health = driver.volumes.storage_health().unwrap();
    assert!(health.iter().any(|one| one.reason == "DeviceLost"));
    let (other, another) = published(&driver, "b", &target("b"));
    assert_ne!(another, number);
    end(&driver, id, &target("a"));
    driver.usage.watch_published();
    assert_eq!(driver.usage.lost_devices(), Vec::<PathBuf>::new());
    end(&driver, other, &target("b"));
}
