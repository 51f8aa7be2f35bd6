//! What the background cleanup removes, and what it never touches.

use std::path::{Path, PathBuf};

use nix::errno::Errno;
use uuid::Uuid;

use super::*;
use crate::cut::AbortHandle;
use crate::host::memory::{FaultMode, MemoryHost};
use crate::host::{Effect, Host};
use crate::model::{SnapshotParameters, VolumeId};
use crate::operation::snapshot::session::tests::{GROUP, all_steps, begin, states};
use crate::operation::snapshot::session::{Coordinator, ParticipationAnswer, ParticipationStep};
use crate::operation::tests::{driver, new_volume, volume};
use crate::operation::{CreateGroup, CreateSnapshot};
use crate::record::SnapshotState;

const POOL: &str = "/memory/default";

fn snapshot(name: &str, source: VolumeId) -> CreateSnapshot {
    CreateSnapshot {
        name: name.into(),
        source_volume_id: source.to_string(),
        parameters: SnapshotParameters::default(),
        requisite: Vec::new(),
    }
}

fn group(name: &str, sources: &[VolumeId]) -> CreateGroup {
    CreateGroup {
        name: name.into(),
        source_volume_ids: sources.iter().map(VolumeId::to_string).collect(),
        parameters: SnapshotParameters::default(),
    }
}

fn clean(driver: &Driver) {
    for pool in driver.served() {
        driver.clean(pool);
        driver.wipe(pool);
        driver.resolve_groups(pool);
    }
}

fn files(host: &MemoryHost) -> Vec<String> {
    host.files_below(Path::new(POOL))
}

/// Runs a call in which two effects fail, for each pair of effects. The background cleanup removes
/// what the failed call leaves, without a further call.
fn each_pair_of_failures(call: impl Fn(&Driver, &[VolumeId]) -> Result<()>) {
    for gap in 1..6 {
        for first in 1.. {
            let host = MemoryHost::new();
            let driver = driver(&host);
            let sources = ["a", "b"].map(|name| volume(&driver, name));
            let before = files(&host);
            host.fail_effect(first, FaultMode::Before(Errno::EIO));
            host.fail_effect(first + gap, FaultMode::Before(Errno::EIO));
            let done = call(&driver, &sources);
            let all = host.faults_left() == 2;
            host.clear_faults();
            if all {
                break;
            }
            clean(&driver);
            match done {
                Ok(()) => {}
                // The object was complete when its undo failed: the error is not final, and a
                // repeat returns the object.
                Err(Error::RollbackFailed { .. }) if files(&host) != before => {
                    let unready = driver.pools.serving().remove(0).backend.snapshots.unready();
                    assert!(unready.is_empty(), "{first}+{gap}: {unready:?}");
                    let effects = host.effects();
                    call(&driver, &sources).unwrap();
                    assert_eq!(host.effects(), effects + 1, "{first}+{gap}: made again");
                }
                Err(error) => assert_eq!(files(&host), before, "{first}+{gap}: {error:?}"),
            }
            assert_eq!(driver.pools.locks_held(), 0);
        }
    }
}

#[test]
fn what_a_failed_snapshot_has_left_is_ended_without_a_call() {
    each_pair_of_failures(|driver, sources| {
        driver
            .snapshots
            .create_snapshot(&snapshot("s", sources[0]))
            .map(drop)
    });
}

#[test]
fn what_a_failed_volume_has_left_is_ended_without_a_call() {
    each_pair_of_failures(|driver, _| driver.volumes.create_volume(&new_volume("c")).map(drop));
}

#[test]
fn what_a_failed_group_has_left_is_ended_without_a_call_or_whole() {
    for first in 1..60 {
        let host = MemoryHost::new();
        let driver = driver(&host);
        let sources = ["a", "b"].map(|name| volume(&driver, name));
        let before = files(&host);
        for at in [first, first + 1, first + 2] {
            host.fail_effect(at, FaultMode::Before(Errno::EIO));
        }
        let _ = driver.snapshots.create_group(&group("g", &sources));
        host.clear_faults();
        clean(&driver);
        let pool = driver.pools.serving().remove(0);
        match pool.backend.snapshots.count() {
            0 => assert_eq!(files(&host), before, "{first}"),
            many => assert_eq!((many, pool.backend.snapshots.unready().len()), (2, 0)),
        }
    }
}

/// Runs the cleanup at each step.
struct Cleans<'a> {
    driver: &'a Driver,
    steps: std::vec::IntoIter<ParticipationStep>,
}

impl Coordinator for Cleans<'_> {
    fn next(&mut self) -> Option<ParticipationStep> {
        clean(self.driver);
        self.steps.next()
    }

    fn send_reply(&mut self, _answer: ParticipationAnswer) {
        clean(self.driver);
    }
}

#[test]
fn what_is_being_made_is_left_alone() {
    let driver = driver(&MemoryHost::new());
    let ours = [volume(&driver, "a"), volume(&driver, "b")];
    for (group, ours) in [(Some(GROUP), &ours[..]), (None, &ours[..1])] {
        let mut cleans = Cleans {
            driver: &driver,
            steps: all_steps().into_iter(),
        };
        let begun = begin(group, ours, ours);
        let served =
            driver
                .snapshots
                .serve_participation(&begun, &AbortHandle::default(), &mut cleans);
        served.unwrap();
    }
    assert_eq!(states(&driver, GROUP), [SnapshotState::Ready; 2]);
    assert!(driver.snapshots.find_snapshot_name("g").unwrap().is_some());
}

/// A snapshot whose undo failed before the rename into the trash. Returns its folder.
fn left_preparing(host: &MemoryHost, driver: &Driver, source: VolumeId) -> PathBuf {
    for first in 1.. {
        host.fail_effect(first, FaultMode::Before(Errno::EIO));
        host.fail_effect(first + 1, FaultMode::Before(Errno::EIO));
        let done = driver.snapshots.create_snapshot(&snapshot("s", source));
        host.clear_faults();
        assert!(done.is_err(), "it never fails before its rename");
        let pool = driver.pools.serving().remove(0);
        let left = pool.backend.snapshots.unready();
        let folder = |uuid: Uuid| Path::new(POOL).join("snapshots").join(uuid.to_string());
        if let [left] = left.as_slice()
            && host
                .stat(&folder(left.uuid).join("data.img"))
                .unwrap()
                .is_some()
        {
            return folder(left.uuid);
        }
        clean(driver);
    }
    unreachable!()
}

#[test]
fn what_cannot_be_read_is_never_touched_whatever_is_remembered_of_it() {
    for rot in [&b"{"[..], b"", b"newer"] {
        let host = MemoryHost::new();
        let driver = driver(&host);
        let source = volume(&driver, "a");
        let record = left_preparing(&host, &driver, source).join("record.json");
        let good = host.read_file(&record).unwrap().unwrap();
        let mut newer: serde_json::Value = serde_json::from_slice(&good).unwrap();
        newer["version"] = 99.into();
        let newer = newer.to_string().into_bytes();
        let bytes = if rot == b"newer" { &newer } else { rot };
        host.put_file(&record, bytes).unwrap();
        let before = files(&host);
        clean(&driver);
        assert_eq!(files(&host), before);
        // A repeat does not create it again either.
        let again = driver.snapshots.create_snapshot(&snapshot("s", source));
        assert!(matches!(again, Err(Error::Damaged { .. })), "{again:?}");
        host.perform(&Effect::RemoveFile { path: &record }).unwrap();
        let before = files(&host);
        clean(&driver);
        assert_eq!(files(&host), before, "an image without a record");
        host.put_file(&record, &good).unwrap();
        clean(&driver);
        assert!(host.stat(&record).unwrap().is_none());
    }
}

#[test]
fn what_is_complete_on_the_disk_stays_whatever_is_remembered_of_it() {
    let host = MemoryHost::new();
    let driver = driver(&host);
    let source = volume(&driver, "a");
    let record = left_preparing(&host, &driver, source).join("record.json");
    let bytes = host.read_file(&record).unwrap().unwrap();
    let mut ready: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    ready["state"] = "ready".into();
    host.put_file(&record, ready.to_string().as_bytes())
        .unwrap();
    clean(&driver);
    assert!(host.stat(&record).unwrap().is_some());
}

#[test]
fn a_directory_with_neither_record_nor_image_is_ended() {
    let host = MemoryHost::new();
    let driver = driver(&host);
    let made = driver
        .snapshots
        .create_snapshot(&snapshot("s", volume(&driver, "a")))
        .unwrap();
    driver
        .snapshots
        .delete_snapshot(&made.id.to_string())
        .unwrap();
    let before = files(&host);
    for part in ["volumes", "snapshots"] {
        let path = Path::new(POOL)
            .join(part)
            .join(Uuid::from_u128(9).to_string());
        host.perform(&Effect::MakeDir { path: &path }).unwrap();
        clean(&driver);
        assert!(host.stat(&path).unwrap().is_none());
    }
    assert_eq!(files(&host), before);
}

#[test]
fn an_aborted_snapshot_that_is_repeated_after_its_source_was_deleted_leaves_nothing() {
    let host = MemoryHost::new();
    let driver = driver(&host);
    let source = volume(&driver, "a");
    let left = left_preparing(&host, &driver, source);
    driver.volumes.delete_volume(&source.to_string()).unwrap();
    host.fail_effect(1, FaultMode::Before(Errno::EIO));
    let again = driver.snapshots.create_snapshot(&snapshot("s", source));
    assert!(
        matches!(again, Err(Error::RollbackFailed { .. })),
        "{again:?}"
    );
    let again = driver.snapshots.create_snapshot(&snapshot("s", source));
    assert!(matches!(again, Err(Error::NotFound { .. })), "{again:?}");
    assert!(host.stat(&left).unwrap().is_none());
}
