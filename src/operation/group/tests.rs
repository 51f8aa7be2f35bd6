//! Groups whose records can't be read, whose members are of two attempts, or that are deleted while
//! they are being made.

use std::path::{Path, PathBuf};

use super::*;
use crate::backend::file::SNAPSHOTS;
use crate::cut::Halt;
use crate::host::Host;
use crate::host::memory::MemoryHost;
use crate::operation::session::tests::{
    GROUP, all_steps, begin, driver, far, served, states, volume,
};
use crate::operation::session::{Coordinator, ShareAnswer, ShareStep};
use crate::operation::{CreateSnapshot, Snapshot};

fn request(name: &str, sources: &[VolumeId]) -> CreateGroup {
    CreateGroup {
        name: name.into(),
        source_volume_ids: sources.iter().map(VolumeId::to_string).collect(),
        parameters: SnapshotParameters::default(),
    }
}

fn named(group: GroupId, snapshots: &[Snapshot]) -> NamedGroup {
    NamedGroup {
        group_id: group.to_string(),
        snapshot_ids: snapshots.iter().map(|one| one.id.to_string()).collect(),
    }
}

/// The path of a snapshot's record, as the machine has it.
fn record_of(id: SnapshotId) -> PathBuf {
    let folder = Path::new("/memory/default").join(SNAPSHOTS);
    folder.join(id.uuid.to_string()).join("record.json")
}

/// Replaces a record by one of a newer release, and starts the driver again; what the record was.
fn unreadable(driver: &Driver, host: &MemoryHost, id: SnapshotId) -> (MemoryHost, Vec<u8>) {
    driver.leave();
    let host = host.restart_process();
    let path = record_of(id);
    let before = host.read_file(&path).unwrap().unwrap();
    let mut newer: serde_json::Value = serde_json::from_slice(&before).unwrap();
    newer["version"] = 99.into();
    host.put_file(&path, newer.to_string().as_bytes()).unwrap();
    (host, before)
}

fn is_damaged<T: std::fmt::Debug>(result: Result<T>) {
    assert!(matches!(result, Err(Error::Damaged { .. })), "{result:?}");
}

#[test]
fn a_group_whose_only_record_cannot_be_read_is_neither_absent_nor_made_again_nor_deleted() {
    let host = MemoryHost::new();
    let driver = driver(&host);
    let sources = [volume(&driver, "a")];
    let made = driver.create_group(&request("g", &sources)).unwrap();
    let id = made.snapshots[0].id;
    let (host, before) = unreadable(&driver, &host, id);
    let files = host.files_below(Path::new("/memory/default"));

    let driver = self::driver(&host);
    is_damaged(driver.create_group(&request("g", &sources)));
    is_damaged(driver.get_group(&named(made.id, &[])));
    is_damaged(driver.get_group(&named(made.id, &made.snapshots)));
    is_damaged(driver.delete_group(&named(made.id, &[])));
    is_damaged(driver.delete_group(&named(made.id, &made.snapshots)));
    is_damaged(driver.delete_snapshot(&id.to_string()));
    assert_eq!(driver.locks_held(), 0);
    assert_eq!(host.files_below(Path::new("/memory/default")), files);

    // Another group of this volume is no matter of the damaged one.
    let other = driver.create_group(&request("h", &sources)).unwrap();
    driver
        .delete_group(&named(other.id, &other.snapshots))
        .unwrap();

    host.put_file(&record_of(id), &before).unwrap();
    let found = driver.get_group(&named(made.id, &made.snapshots)).unwrap();
    assert_eq!(found.cut_at, made.cut_at);
    assert_eq!(
        driver.create_group(&request("g", &sources)).unwrap().cut_at,
        made.cut_at
    );
}

#[test]
fn a_share_begins_nothing_over_a_member_whose_record_cannot_be_read() {
    let host = MemoryHost::new();
    let driver = driver(&host);
    let ours = [volume(&driver, "a")];
    let all = [ours[0], far()];
    served(&driver, &begin(Some(GROUP), &all, &ours), all_steps())
        .0
        .unwrap();
    let here = driver.group_here(GROUP, &[]).unwrap();
    assert_eq!(here.unseen, None);
    let id = here.members[0].snapshot.id;
    let (host, before) = unreadable(&driver, &host, id);

    let driver = self::driver(&host);
    let (done, told) = served(&driver, &begin(Some(GROUP), &all, &ours), all_steps());
    is_damaged(done);
    assert_eq!(told, 0, "it's found before anything is prepared");
    let unseen = driver.group_here(GROUP, &[]).unwrap().unseen;
    assert!(unseen.is_some_and(|why| why.contains(&id.uuid.to_string())));
    is_damaged(driver.end_group_here(GROUP, &[id.to_string()]));
    host.put_file(&record_of(id), &before).unwrap();
    driver.group_here(GROUP, &[id.to_string()]).unwrap();
    assert_eq!(states(&driver, GROUP), [SnapshotState::Ready]);
}

#[test]
fn of_a_group_with_a_damaged_member_none_is_deleted() {
    let host = MemoryHost::new();
    let driver = driver(&host);
    let sources = ["a", "b", "c"].map(|name| volume(&driver, name));
    let made = driver.create_group(&request("g", &sources)).unwrap();
    for one in 0..3 {
        let (host, before) = unreadable(&driver, &host, made.snapshots[one].id);
        let driver = self::driver(&host);
        is_damaged(driver.delete_group(&named(made.id, &made.snapshots)));
        is_damaged(driver.delete_group(&named(made.id, &[])));
        host.put_file(&record_of(made.snapshots[one].id), &before)
            .unwrap();
        driver
            .get_snapshot(&made.snapshots[one].id.to_string())
            .unwrap();
        let found = driver.get_group(&named(made.id, &made.snapshots)).unwrap();
        assert_eq!(found.snapshots.len(), 3, "{one}");
    }
}

#[test]
fn the_absence_of_a_group_is_not_concluded_from_a_pool_that_is_not_served() {
    let host = MemoryHost::new();
    let driver = driver(&host);
    let sources = [volume(&driver, "a")];
    let made = driver.create_group(&request("g", &sources)).unwrap();
    driver.leave();
    let host = host.restart_process();
    host.pull_disk(Path::new("/memory/default")).unwrap();
    let driver = self::driver(&host);
    for ids in [&[][..], &made.snapshots] {
        let deleted = driver.delete_group(&named(made.id, ids));
        assert!(
            matches!(deleted, Err(Error::Unreachable { .. })),
            "{deleted:?}"
        );
    }
}

#[test]
fn members_of_two_attempts_are_not_reported_as_one_group_and_are_deleted_together() {
    let host = MemoryHost::new();
    let driver = driver(&host);
    let sources = ["a", "b"].map(|name| volume(&driver, name));
    let made = driver.create_group(&request("g", &sources)).unwrap();
    let pool = driver.serving().remove(0);
    let mut second = pool
        .backend
        .snapshot(made.snapshots[1].id.uuid)
        .unwrap()
        .unwrap();
    second.attempt = Uuid::from_u128(5);
    pool.backend.update_snapshot(&second).unwrap();
    for error in [
        driver
            .get_group(&named(made.id, &made.snapshots))
            .unwrap_err(),
        driver.create_group(&request("g", &sources)).unwrap_err(),
    ] {
        assert!(matches!(error, Error::Refused { .. }), "{error:?}");
        assert!(error.to_string().contains("delete the group"), "{error}");
    }
    driver.delete_group(&named(made.id, &[])).unwrap();
    assert_eq!(pool.backend.count_snapshots(), 0);
}

/// Asks for the deletion of a member at each step.
struct Deletes<'a> {
    driver: &'a Driver,
    steps: std::vec::IntoIter<ShareStep>,
    member: String,
    refused: usize,
}

impl Coordinator for Deletes<'_> {
    fn next(&mut self) -> Option<ShareStep> {
        let deleted = self.driver.delete_snapshot(&self.member);
        assert!(matches!(deleted, Err(Error::Pending { .. })), "{deleted:?}");
        self.refused += 1;
        self.steps.next()
    }

    fn tell(&mut self, _answer: ShareAnswer) {}
}

#[test]
fn a_member_is_not_deleted_while_its_group_is_being_made() {
    let driver = driver(&MemoryHost::new());
    let ours = [volume(&driver, "a")];
    let member = member_of(GROUP, ours[0]).to_string();
    let mut deletes = Deletes {
        driver: &driver,
        steps: all_steps().into_iter(),
        member: member.clone(),
        refused: 0,
    };
    let begun = begin(Some(GROUP), &ours, &ours);
    driver
        .serve_share(&begun, &Halt::default(), &mut deletes)
        .unwrap();
    assert_eq!(deletes.refused, all_steps().len());
    assert_eq!(driver.locks_held(), 0);
    assert_eq!(states(&driver, GROUP), [SnapshotState::Ready]);
    let deleted = driver.delete_snapshot(&member);
    assert!(matches!(deleted, Err(Error::Invalid { .. })), "{deleted:?}");
}

#[test]
fn a_name_whose_snapshot_appears_meanwhile_is_not_prepared_over_it() {
    let driver = driver(&MemoryHost::new());
    let source = volume(&driver, "a");
    let asked = CreateSnapshot {
        name: "s".into(),
        source_volume_id: source.to_string(),
        parameters: SnapshotParameters::default(),
        requisite: Vec::new(),
    };
    let made = driver.create_snapshot(&asked).unwrap();
    let pool = driver.serving().remove(0);
    let again = pool.backend.end_unanswered_snapshot(made.id.uuid);
    assert!(matches!(again, Err(Error::Pending { .. })), "{again:?}");
    let again = pool.backend.end_unanswered(source.uuid);
    assert!(matches!(again, Err(Error::Pending { .. })), "{again:?}");
    assert_eq!(driver.create_snapshot(&asked).unwrap().cut_at, made.cut_at);
}
