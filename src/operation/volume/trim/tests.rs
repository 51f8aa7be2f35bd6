//! What is trimmed, when, and what prevents the trim of a volume.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;

use super::*;
use crate::backend::Image;
use crate::cut::CutInterfaces;
use crate::host::freezer::FreezeLimits;
use crate::host::memory::{FaultMode, MemoryHost};
use crate::host::{Device, FreezeMember, Freezer, Host};
use crate::model::{AccessMode, AccessType, Capability, FsType};
use crate::operation::tests::{block, new_volume, settings};
use crate::operation::{CreateVolume, Driver, StageVolume};

const DAY: Duration = Duration::from_secs(24 * 3600);
const NOTE: &str = "/memory/default/trash/trimmed";

fn driver(host: &MemoryHost, pool: &str) -> Driver {
    let settings = settings(&[pool.parse().unwrap()]);
    Driver::start(settings, CutInterfaces::simulated(host.clone())).unwrap()
}

fn weekly(host: &MemoryHost) -> Driver {
    driver(host, "default=memory:,trim=7d")
}

fn capability(mount_flags: &[&str]) -> Capability {
    Capability {
        access_type: AccessType::Mount {
            fs_type: Some(FsType::Xfs),
            mount_flags: mount_flags.iter().map(|flag| (*flag).to_string()).collect(),
        },
        access_mode: AccessMode::SingleNodeWriter,
    }
}

fn created(driver: &Driver, name: &str, capability: &Capability, thick: bool) -> VolumeId {
    let mut request = CreateVolume {
        capabilities: vec![capability.clone()],
        ..new_volume(name)
    };
    if thick {
        request.parameters.allocation = Allocation::Thick;
    }
    driver.volumes.create_volume(&request).unwrap().id
}

fn staging(id: VolumeId) -> String {
    format!("/var/lib/kubelet/{}", id.uuid)
}

fn stage(driver: &Driver, id: VolumeId, capability: &Capability) {
    let request = StageVolume {
        volume_id: id.to_string(),
        staging_path: staging(id),
        capability: capability.clone(),
    };
    driver.volumes.stage_volume(&request).unwrap();
}

/// A volume that is mounted for writing.
fn used(driver: &Driver, name: &str, thick: bool) -> VolumeId {
    let id = created(driver, name, &capability(&[]), thick);
    stage(driver, id, &capability(&[]));
    id
}

fn device(driver: &Driver, id: VolumeId) -> Device {
    let pool = driver.pools.serving().remove(0);
    pool.backend
        .devices()
        .list(id.uuid)
        .unwrap()
        .remove(0)
        .device
}

/// The devices that one round trims.
fn round(host: &MemoryHost, driver: &Driver) -> Vec<String> {
    let (before, locks) = (host.effect_log().len(), driver.pools.locks_held());
    for pool in driver.served() {
        driver.volumes.trim_volumes(pool);
    }
    assert_eq!(driver.pools.locks_held(), locks);
    let log = host.effect_log();
    let trims = log[before..].iter();
    trims
        .filter_map(|line| Some(line.strip_prefix("trim_volume ")?.to_string()))
        .collect()
}

fn paths(driver: &Driver, ids: &[VolumeId]) -> Vec<String> {
    let mut paths: Vec<_> = ids
        .iter()
        .map(|id| device(driver, *id).path.display().to_string())
        .collect();
    paths.sort();
    paths
}

fn sorted(mut names: Vec<String>) -> Vec<String> {
    names.sort();
    names
}

#[test]
fn thin_volumes_that_are_mounted_to_be_written_are_trimmed_and_no_others() {
    let host = MemoryHost::new();
    let driver = weekly(&host);
    let thin = ["a", "b"].map(|name| used(&driver, name, false));
    used(&driver, "thick", true);
    let read_only = created(&driver, "ro", &capability(&["ro"]), false);
    stage(&driver, read_only, &capability(&["ro"]));
    created(&driver, "unused", &capability(&[]), false);
    let raw = block();
    let block = created(&driver, "raw", &raw, false);
    stage(&driver, block, &raw);
    assert_eq!(sorted(round(&host, &driver)), paths(&driver, &thin));
}

#[test]
fn a_round_comes_once_in_an_interval_also_after_a_restart() {
    let host = MemoryHost::new();
    let driver = weekly(&host);
    let id = used(&driver, "a", false);
    assert_eq!(round(&host, &driver).len(), 1, "never until now");
    assert_eq!(round(&host, &driver).len(), 0);
    host.pass_time(6 * DAY);
    assert_eq!(round(&host, &driver).len(), 0);
    drop(driver);
    let host = host.restart_process();
    let driver = weekly(&host);
    assert_eq!(round(&host, &driver).len(), 0, "the pool says when");
    host.pass_time(DAY);
    assert_eq!(round(&host, &driver), paths(&driver, &[id]));
    assert_eq!(round(&host, &driver).len(), 0);

    // A time that is in the future, and a file that contains no time.
    for note in [u64::MAX.to_string(), "yesterday".into()] {
        host.put_file(Path::new(NOTE), note.as_bytes()).unwrap();
        let host = host.restart_process();
        let driver = weekly(&host);
        assert_eq!(round(&host, &driver).len(), 1, "{note}");
    }
}

#[test]
fn nothing_is_trimmed_where_the_definition_does_not_say_so() {
    let host = MemoryHost::new();
    let driver = driver(&host, "default=memory:");
    used(&driver, "a", false);
    assert_eq!(round(&host, &driver).len(), 0);
    assert_eq!(host.read_file(Path::new(NOTE)).unwrap(), None);
}

#[test]
fn a_volume_that_fails_or_is_in_use_keeps_no_other_from_being_trimmed() {
    let host = MemoryHost::new();
    let driver = weekly(&host);
    let ids = ["a", "b", "c"].map(|name| used(&driver, name, false));
    host.fail_effect(1, FaultMode::Before(Errno::EIO));
    assert_eq!(round(&host, &driver).len(), ids.len(), "each was tried");
    assert_eq!(host.faults_left(), 0);

    host.pass_time(7 * DAY);
    let busy = driver
        .pools
        .locks
        .acquire(Key::Volume(ids[1].uuid))
        .unwrap();
    let trimmed = round(&host, &driver);
    drop(busy);
    assert_eq!(sorted(trimmed), paths(&driver, &[ids[0], ids[2]]));
    assert_eq!(
        round(&host, &driver).len(),
        0,
        "it waits for the next round"
    );
}

#[test]
fn a_volume_that_is_frozen_is_left_alone() {
    let host = MemoryHost::new();
    let driver = weekly(&host);
    let [frozen, other] = ["a", "b"].map(|name| used(&driver, name, false));
    let device = device(&driver, frozen);
    let pool = driver.pools.serving().remove(0);
    let image = Image::Volume(frozen.uuid);
    let copier = pool.backend.copier(image, image, &Arc::default()).unwrap();
    let path = staging(frozen);
    let member = FreezeMember {
        volume_id: frozen.to_string(),
        namespace: None,
        image: copier.image(),
        root: Some(
            host.open_mount_root(Path::new(&path), &device, FsType::Xfs)
                .unwrap(),
        ),
        mapped: None,
    };
    let limits = FreezeLimits {
        sync: DAY,
        freeze: DAY,
    };
    let freeze = host.begin(vec![member], limits).unwrap();
    freeze.freeze().unwrap();
    assert_eq!(round(&host, &driver), paths(&driver, &[other]));
    drop(freeze);
    host.pass_time(7 * DAY);
    assert_eq!(
        sorted(round(&host, &driver)),
        paths(&driver, &[frozen, other])
    );
}

#[test]
fn a_disk_without_room_for_the_note_gets_one_round_all_the_same() {
    let host = MemoryHost::new();
    let driver = weekly(&host);
    used(&driver, "a", false);
    // The first effect is the trim, the second writes the time.
    host.fail_effect(2, FaultMode::Before(Errno::ENOSPC));
    assert_eq!(round(&host, &driver).len(), 1);
    assert_eq!(host.faults_left(), 0);
    assert_eq!(round(&host, &driver).len(), 0);
}

#[test]
fn a_stop_ends_a_round_and_the_next_start_begins_it_again() {
    let host = MemoryHost::new();
    let driver = weekly(&host);
    used(&driver, "a", false);
    driver.stop();
    assert_eq!(round(&host, &driver).len(), 0);
    drop(driver);
    let host = host.restart_process();
    let driver = weekly(&host);
    assert_eq!(round(&host, &driver).len(), 1);
}
