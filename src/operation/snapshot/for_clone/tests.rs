//! Hidden snapshots for clones: what they contain, who sees them, and what is left of them.

use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;

use super::*;
use crate::error::Error;
use crate::host::memory::{FaultMode, MemoryHost, MemoryOptions};
use crate::model::{CapacityRange, Level, VolumeParameters};
use crate::operation::tests::{ext4, pool, settings};
use crate::operation::{CreateVolume, Driver, ListSnapshots, StageVolume, Wanted};

const STAGING: &str = "/var/lib/kubelet/staging";
const KINDS: [&str; 2] = ["default=memory:", "default=memory-thin:"];

fn start(host: &MemoryHost, kind: &str) -> Driver {
    let settings = settings(&[pool(kind)]);
    Driver::start(settings, crate::cut::CutInterfaces::simulated(host.clone())).unwrap()
}

fn mounted(name: &str) -> CreateVolume {
    CreateVolume {
        name: name.into(),
        capacity: CapacityRange::new(1 << 30, 0).unwrap(),
        capabilities: vec![ext4()],
        parameters: VolumeParameters::default(),
        requisite: Vec::new(),
        content_source: None,
    }
}

fn stage(driver: &Driver, id: &str) {
    let staged = driver.volumes.stage_volume(&StageVolume {
        volume_id: id.into(),
        staging_path: STAGING.into(),
        capability: ext4(),
    });
    staged.unwrap();
}

fn clean(driver: &Driver) {
    for pool in driver.served() {
        driver.clean(pool);
        driver.wipe(pool);
    }
}

fn listed(driver: &Driver) -> usize {
    let page = driver.snapshots.list_snapshots(&ListSnapshots::default());
    page.unwrap().snapshots.len()
}

fn count(driver: &Driver) -> u64 {
    let mut pools = driver.pools.serving();
    pools.remove(0).backend.snapshots.count()
}

fn files(host: &MemoryHost) -> Vec<String> {
    let mut files = host.files_below(Path::new("/memory/default"));
    // Numbers of thin devices are not used again.
    files.retain(|file| file != "next-id");
    files
}

const HOUR: Duration = Duration::from_secs(3600);

#[test]
fn a_volume_in_use_is_frozen_for_the_snapshot_of_its_clone_and_no_list_has_it() {
    for kind in KINDS {
        let host = MemoryHost::new();
        let driver = start(&host, kind);
        let id = driver.volumes.create_volume(&mounted("v")).unwrap().id;
        let id = id.to_string();
        stage(&driver, &id);
        host.write_token(Path::new(STAGING), 7).unwrap();
        let made = driver.snapshots.snapshot_for_clone(&id, "clone").unwrap();
        assert_eq!(made.level, Level::Filesystem, "as a clone on this node");
        // What is written later is not in it.
        host.write_token(Path::new(STAGING), 8).unwrap();
        let again = driver.snapshots.snapshot_for_clone(&id, "clone").unwrap();
        assert!(made.frozen.is_some(), "{kind}");
        let frozen = None;
        assert_eq!(again, Snapshot { frozen, ..made }, "{kind}");
        assert_eq!((listed(&driver), count(&driver)), (0, 1), "{kind}");
        // Another agent can read it.
        let snapshot = made.id.to_string();
        let offer = driver.snapshots.offer(&snapshot, "node", &[]).unwrap();
        let outgoing = driver
            .snapshots
            .open_granted(&offer.ticket, &|_| true, (0, Wanted::Data));
        // While it is read, it is not deleted.
        host.pass_time(HOUR * 3);
        clean(&driver);
        assert_eq!(count(&driver), 1);
        drop(outgoing.unwrap());
        for _ in 0..2 {
            let ended = driver.snapshots.end_for_clone(&id, "clone").unwrap();
            assert_eq!((ended, count(&driver)), (made.id, 0));
        }
        assert_eq!(host.violations(), [""; 0]);
    }
}

#[test]
fn a_snapshot_of_the_same_name_is_neither_used_nor_returned_nor_deleted() {
    let host = MemoryHost::new();
    let driver = start(&host, KINDS[0]);
    let id = driver.volumes.create_volume(&mounted("v")).unwrap().id;
    let id = id.to_string();
    let mut own = request_for_clone(&id, "clone");
    own.parameters.for_clone = false;
    driver.snapshots.create_snapshot(&own).unwrap();
    let refused = driver.snapshots.snapshot_for_clone(&id, "clone");
    assert!(matches!(refused, Err(Error::Exists { .. })), "{refused:?}");
    driver.snapshots.snapshot_for_clone(&id, "other").unwrap();
    own.name = snapshot_name_for_clone("other");
    let refused = driver.snapshots.create_snapshot(&own);
    assert!(matches!(refused, Err(Error::Exists { .. })), "{refused:?}");
    driver.snapshots.end_for_clone(&id, "clone").unwrap();
    assert_eq!((listed(&driver), count(&driver)), (1, 2));
    host.pass_time(HOUR);
    clean(&driver);
    host.pass_time(HOUR);
    clean(&driver);
    assert_eq!((listed(&driver), count(&driver)), (1, 1));
}

#[test]
fn one_that_no_call_names_for_an_hour_is_deleted() {
    for kind in KINDS {
        let host = MemoryHost::new();
        let driver = start(&host, kind);
        let id = driver.volumes.create_volume(&mounted("v")).unwrap().id;
        let id = id.to_string();
        let before = files(&host);
        let ask = |driver: &Driver| driver.snapshots.snapshot_for_clone(&id, "clone").map(drop);
        ask(&driver).unwrap();
        host.pass_time(HOUR - Duration::from_secs(60));
        clean(&driver);
        ask(&driver).unwrap();
        host.pass_time(HOUR - Duration::from_secs(60));
        clean(&driver);
        assert_eq!(count(&driver), 1, "a call has named it");
        // A restart gives the callers another hour.
        drop(driver);
        let host = host.restart_process();
        let driver = start(&host, kind);
        clean(&driver);
        host.pass_time(HOUR - Duration::from_secs(60));
        clean(&driver);
        assert_eq!(count(&driver), 1);
        host.pass_time(Duration::from_secs(60));
        clean(&driver);
        assert_eq!(files(&host), before, "{kind}");
    }
}

/// A volume in use, the files before there was a hidden snapshot, and that snapshot if it is to be
/// deleted.
fn prepared(kind: &str, has_snapshot: bool) -> (MemoryHost, Driver, String, Vec<String>) {
    let host = MemoryHost::new();
    let driver = start(&host, kind);
    let id = driver.volumes.create_volume(&mounted("v")).unwrap().id;
    let id = id.to_string();
    stage(&driver, &id);
    let before = files(&host);
    if has_snapshot {
        driver.snapshots.snapshot_for_clone(&id, "clone").unwrap();
    }
    (host, driver, id, before)
}

/// Whatever fails, a repeat succeeds, and nothing is left: neither after a delete, nor of a snapshot that
/// no call deletes.
#[test]
fn a_fault_at_any_effect_leaves_nothing_after_an_hour() {
    let modes = [
        FaultMode::Before(Errno::EIO),
        FaultMode::After(Errno::EIO),
        FaultMode::CrashBefore,
        FaultMode::CrashAfter,
    ];
    let act = |driver: &Driver, id: &str, is_delete: bool| match is_delete {
        true => driver.snapshots.end_for_clone(id, "clone").map(drop),
        false => driver.snapshots.snapshot_for_clone(id, "clone").map(drop),
    };
    for (kind, is_delete) in KINDS
        .into_iter()
        .flat_map(|kind| [(kind, false), (kind, true)])
    {
        let (host, driver, id, _) = prepared(kind, is_delete);
        let before = host.effects();
        act(&driver, &id, is_delete).unwrap();
        let effects = host.effects() - before;
        assert!(effects > 2, "{kind} {is_delete}: {effects}");
        for (n, mode) in (1..=effects).flat_map(|n| modes.map(|mode| (n, mode))) {
            let case = format!("{kind}, delete: {is_delete}, {mode:?} at {n}");
            let (mut host, mut driver, id, before) = prepared(kind, is_delete);
            host.fail_effect(n, mode);
            let _ = act(&driver, &id, is_delete);
            assert_eq!(host.faults_left(), 0, "{case}");
            if !host.is_alive() {
                drop(driver);
                host = host.restart_process();
                driver = start(&host, kind);
            }
            host.pass_time(HOUR);
            let repeated = act(&driver, &id, is_delete);
            repeated.unwrap_or_else(|error| panic!("{case}: {error}"));
            assert_eq!(
                (listed(&driver), count(&driver)),
                (0, u64::from(!is_delete))
            );
            host.pass_time(HOUR);
            clean(&driver);
            assert_eq!(files(&host), before, "{case}");
            assert_eq!(host.violations(), [""; 0], "{case}");
        }
    }
}

/// A page that has only hidden ones would have no token, and the list would end there.
#[test]
fn hidden_snapshots_take_no_place_on_the_pages_of_a_list() {
    let host = MemoryHost::new();
    let driver = start(&host, KINDS[0]);
    let id = driver.volumes.create_volume(&mounted("v")).unwrap().id;
    let id = id.to_string();
    for n in 0..12 {
        let clone = format!("clone-{n}");
        driver.snapshots.snapshot_for_clone(&id, &clone).unwrap();
        let mut own = request_for_clone(&id, &format!("own-{n}"));
        own.parameters.for_clone = false;
        driver.snapshots.create_snapshot(&own).unwrap();
    }
    let mut request = ListSnapshots {
        max_entries: 1,
        ..ListSnapshots::default()
    };
    let mut all = 0;
    loop {
        let page = driver.snapshots.list_snapshots(&request).unwrap();
        assert_eq!(page.snapshots.len(), 1);
        all += 1;
        request.starting_token = page.next_token;
        if request.starting_token.is_empty() {
            break;
        }
    }
    assert_eq!((all, count(&driver)), (12, 24));
}

#[test]
fn where_blocks_cannot_be_shared_the_snapshot_is_a_copy_of_a_volume_that_is_not_in_use() {
    let host = MemoryHost::with_options(MemoryOptions {
        fs_name: "ext4".into(),
        ..MemoryOptions::default()
    });
    host.make_folder(Path::new("/memory/pool")).unwrap();
    let driver = start(&host, "default=file:/memory/pool,init,mount=any");
    let id = driver.volumes.create_volume(&mounted("v")).unwrap().id;
    let id = id.to_string();
    driver.snapshots.snapshot_for_clone(&id, "clone").unwrap();
    assert_eq!((listed(&driver), count(&driver)), (0, 1));
    stage(&driver, &id);
    let refused = driver.snapshots.snapshot_for_clone(&id, "other");
    assert!(matches!(refused, Err(Error::Refused { .. })), "{refused:?}");
}
