//! Groups whose records cannot be read, whose members are of two attempts, or that are deleted
//! while they are being created.

use std::path::{Path, PathBuf};

use super::*;
use crate::backend::records::SNAPSHOTS;
use crate::cut::{AbortHandle, CutInterfaces};
use crate::host::Host;
use crate::host::memory::{FaultMode, MemoryHost};
use crate::model::{Members, SnapshotId, SnapshotParameters, VolumeId};
use crate::operation::snapshot::session::tests::{GROUP, all_steps, begin, far, served, states};
use crate::operation::snapshot::session::{Coordinator, ParticipationAnswer, ParticipationStep};
use crate::operation::tests::{driver, pool, settings, volume};
use crate::operation::{CreateSnapshot, DeleteSnapshotOptions, Driver, GroupDecision, Snapshot};
use uuid::Uuid;

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

/// The path of a snapshot's record on the simulated machine.
fn record_of(id: SnapshotId) -> PathBuf {
    let folder = Path::new("/memory/default").join(SNAPSHOTS);
    folder.join(id.uuid.to_string()).join("record.json")
}

/// Replaces a record by one of a newer release, and restarts the driver. Returns the machine and
/// the original record.
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
    let made = driver
        .snapshots
        .create_group(&request("g", &sources))
        .unwrap();
    let id = made.snapshots[0].id;
    let (host, before) = unreadable(&driver, &host, id);
    let files = host.files_below(Path::new("/memory/default"));

    let driver = self::driver(&host);
    is_damaged(driver.snapshots.create_group(&request("g", &sources)));
    is_damaged(driver.snapshots.get_group(&named(made.id, &[])));
    is_damaged(driver.snapshots.get_group(&named(made.id, &made.snapshots)));
    is_damaged(driver.snapshots.delete_group(&named(made.id, &[])));
    is_damaged(
        driver
            .snapshots
            .delete_group(&named(made.id, &made.snapshots)),
    );
    is_damaged(driver.snapshots.delete_snapshot(&id.to_string()));
    assert_eq!(driver.pools.locks_held(), 0);
    assert_eq!(host.files_below(Path::new("/memory/default")), files);

    // Nor is the group created with other volumes: once the record can be read, it would be of two
    // attempts.
    let others = [volume(&driver, "b")];
    is_damaged(driver.snapshots.create_group(&request("g", &others)));

    // The damaged group does not affect another group of this volume.
    let other = driver
        .snapshots
        .create_group(&request("h", &sources))
        .unwrap();
    driver
        .snapshots
        .delete_group(&named(other.id, &other.snapshots))
        .unwrap();

    host.put_file(&record_of(id), &before).unwrap();
    let found = driver
        .snapshots
        .get_group(&named(made.id, &made.snapshots))
        .unwrap();
    assert_eq!(found.cut_at, made.cut_at);
    assert_eq!(
        driver
            .snapshots
            .create_group(&request("g", &sources))
            .unwrap()
            .cut_at,
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
    let here = driver.snapshots.group_here(GROUP, &[]).unwrap();
    assert_eq!(here.unseen, None);
    let id = here.members[0].snapshot.id;
    let (host, before) = unreadable(&driver, &host, id);

    let driver = self::driver(&host);
    let (done, reported) = served(&driver, &begin(Some(GROUP), &all, &ours), all_steps());
    is_damaged(done);
    assert_eq!(reported, 0, "it's found before anything is prepared");
    let others = [volume(&driver, "b")];
    let (done, reported) = served(&driver, &begin(Some(GROUP), &others, &others), all_steps());
    is_damaged(done);
    assert_eq!(reported, 0, "nor is the group made of other volumes");
    let unseen = driver.snapshots.group_here(GROUP, &[]).unwrap().unseen;
    assert!(unseen.is_some_and(|why| why.contains(&id.uuid.to_string())));
    is_damaged(driver.snapshots.delete_group_here(GROUP, &[id.to_string()]));
    host.put_file(&record_of(id), &before).unwrap();
    driver
        .snapshots
        .group_here(GROUP, &[id.to_string()])
        .unwrap();
    assert_eq!(states(&driver, GROUP), [SnapshotState::Ready]);
}

/// A snapshot whose volume was deleted.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Left {
    Group,
    Share,
    Single,
}

/// Creates a snapshot, deletes its volume, and makes the snapshot's record unreadable. Returns the
/// results of a group and of a share that are requested by the same name with another volume.
fn beside(left: Left, is_newer: bool, is_of_object: bool) -> [Result<()>; 2] {
    let host = MemoryHost::new();
    let driver = driver(&host);
    let [gone, other] = ["a", "b"].map(|name| volume(&driver, name));
    let id = match left {
        Left::Group => {
            let made = driver
                .snapshots
                .create_group(&request("g", &[gone]))
                .unwrap();
            made.snapshots[0].id
        }
        Left::Share => {
            let begin = begin(Some(GROUP), &[gone], &[gone]);
            served(&driver, &begin, all_steps()).0.unwrap();
            driver.snapshots.group_here(GROUP, &[]).unwrap().members[0]
                .snapshot
                .id
        }
        Left::Single => {
            let request = CreateSnapshot {
                name: "g".into(),
                source_volume_id: gone.to_string(),
                parameters: SnapshotParameters::default(),
                requisite: Vec::new(),
            };
            driver.snapshots.create_snapshot(&request).unwrap().id
        }
    };
    driver.volumes.delete_volume(&gone.to_string()).unwrap();
    let (host, _) = unreadable(&driver, &host, id);
    if !is_newer {
        host.put_file(&record_of(id), &[0; 512]).unwrap();
    }
    let driver = self::driver(&host);
    let mut asked = request("g", &[other]);
    let mut begin = begin(Some(GROUP), &[other], &[other]);
    asked.parameters.is_of_object = is_of_object;
    begin.parameters.is_of_object = is_of_object;
    let group = driver.snapshots.create_group(&asked).map(drop);
    let (share, reported) = served(&driver, &begin, all_steps());
    assert_eq!(reported == 0, share.is_err(), "nothing is prepared in vain");
    for error in [&group, &share]
        .into_iter()
        .filter_map(|it| it.as_ref().err())
    {
        let path = id.uuid.to_string();
        assert!(error.to_string().contains(&path), "{error}");
    }
    [group, share]
}

#[test]
fn a_group_is_not_created_again_beside_an_unreadable_member_of_a_volume_that_is_gone() {
    // A record of a newer release still identifies its snapshot or group, so it affects no other.
    let [group, share] = beside(Left::Group, true, false);
    is_damaged(group);
    share.unwrap();
    let [group, share] = beside(Left::Share, true, false);
    group.unwrap();
    is_damaged(share);
    for done in beside(Left::Single, true, false) {
        done.unwrap();
    }
    // A record without any readable content may belong to any group.
    for left in [Left::Group, Left::Share, Left::Single] {
        for done in beside(left, false, false) {
            is_damaged(done);
        }
        // A group of a Kubernetes object is always requested with the same volumes.
        for done in beside(left, false, true) {
            done.unwrap();
        }
    }
}

#[test]
fn of_a_group_with_a_damaged_member_none_is_deleted() {
    let host = MemoryHost::new();
    let driver = driver(&host);
    let sources = ["a", "b", "c"].map(|name| volume(&driver, name));
    let made = driver
        .snapshots
        .create_group(&request("g", &sources))
        .unwrap();
    for one in 0..3 {
        let (host, before) = unreadable(&driver, &host, made.snapshots[one].id);
        let driver = self::driver(&host);
        is_damaged(
            driver
                .snapshots
                .delete_group(&named(made.id, &made.snapshots)),
        );
        is_damaged(driver.snapshots.delete_group(&named(made.id, &[])));
        host.put_file(&record_of(made.snapshots[one].id), &before)
            .unwrap();
        driver
            .snapshots
            .get_snapshot(&made.snapshots[one].id.to_string())
            .unwrap();
        let found = driver
            .snapshots
            .get_group(&named(made.id, &made.snapshots))
            .unwrap();
        assert_eq!(found.snapshots.len(), 3, "{one}");
    }
}

#[test]
fn the_absence_of_a_group_is_not_concluded_from_a_pool_that_is_not_served() {
    let host = MemoryHost::new();
    let driver = driver(&host);
    let sources = [volume(&driver, "a")];
    let made = driver
        .snapshots
        .create_group(&request("g", &sources))
        .unwrap();
    driver.leave();
    let host = host.restart_process();
    host.pull_disk(Path::new("/memory/default")).unwrap();
    let driver = self::driver(&host);
    for ids in [&[][..], &made.snapshots] {
        let deleted = driver.snapshots.delete_group(&named(made.id, ids));
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
    let made = driver
        .snapshots
        .create_group(&request("g", &sources))
        .unwrap();
    let pool = driver.pools.serving().remove(0);
    let mut second = pool
        .backend
        .snapshots
        .get(made.snapshots[1].id.uuid)
        .unwrap()
        .unwrap();
    second.attempt = Uuid::from_u128(5);
    pool.backend.update_snapshot(&second).unwrap();
    for error in [
        driver
            .snapshots
            .get_group(&named(made.id, &made.snapshots))
            .unwrap_err(),
        driver
            .snapshots
            .create_group(&request("g", &sources))
            .unwrap_err(),
    ] {
        assert!(matches!(error, Error::Refused { .. }), "{error:?}");
        assert!(error.to_string().contains("delete the group"), "{error}");
    }
    driver.snapshots.delete_group(&named(made.id, &[])).unwrap();
    assert_eq!(pool.backend.snapshots.count(), 0);
}

/// A coordinator that requests the deletion of a member at each step.
struct Deletes<'a> {
    driver: &'a Driver,
    steps: std::vec::IntoIter<ParticipationStep>,
    member: String,
    refused: usize,
}

impl Coordinator for Deletes<'_> {
    fn next(&mut self) -> Option<ParticipationStep> {
        let deleted = self.driver.snapshots.delete_snapshot(&self.member);
        assert!(matches!(deleted, Err(Error::Pending { .. })), "{deleted:?}");
        self.refused += 1;
        self.steps.next()
    }

    fn send_reply(&mut self, _answer: ParticipationAnswer) {}
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
        .snapshots
        .serve_participation(&begun, &AbortHandle::default(), &mut deletes)
        .unwrap();
    assert_eq!(deletes.refused, all_steps().len());
    assert_eq!(driver.pools.locks_held(), 0);
    assert_eq!(states(&driver, GROUP), [SnapshotState::Ready]);
    let deleted = driver.snapshots.delete_snapshot(&member);
    assert!(matches!(deleted, Err(Error::Invalid { .. })), "{deleted:?}");
}

#[test]
fn a_name_whose_snapshot_appears_during_the_call_is_not_prepared_over_it() {
    let driver = driver(&MemoryHost::new());
    let source = volume(&driver, "a");
    let asked = CreateSnapshot {
        name: "s".into(),
        source_volume_id: source.to_string(),
        parameters: SnapshotParameters::default(),
        requisite: Vec::new(),
    };
    let made = driver.snapshots.create_snapshot(&asked).unwrap();
    let pool = driver.pools.serving().remove(0);
    let again = pool.backend.snapshots.delete_unanswered(made.id.uuid);
    assert!(matches!(again, Err(Error::Pending { .. })), "{again:?}");
    let again = pool.backend.volumes.delete_unanswered(source.uuid);
    assert!(matches!(again, Err(Error::Pending { .. })), "{again:?}");
    assert_eq!(
        driver.snapshots.create_snapshot(&asked).unwrap().cut_at,
        made.cut_at
    );
}

/// A request for a group whose members may be deleted individually.
fn independent(name: &str, sources: &[VolumeId]) -> CreateGroup {
    CreateGroup {
        parameters: SnapshotParameters {
            members: Members::Independent,
            ..SnapshotParameters::default()
        },
        ..request(name, sources)
    }
}

#[test]
fn members_that_are_independent_are_deleted_one_by_one() {
    let driver = driver(&MemoryHost::new());
    let sources = ["a", "b", "c"].map(|name| volume(&driver, name));
    let asked = independent("g", &sources);
    let made = driver.snapshots.create_group(&asked).unwrap();
    let ids: Vec<String> = made
        .snapshots
        .iter()
        .map(|one| one.id.to_string())
        .collect();
    let find = |ids: &[&String]| {
        driver.snapshots.get_group(&NamedGroup {
            group_id: made.id.to_string(),
            snapshot_ids: ids.iter().map(ToString::to_string).collect(),
        })
    };
    // The record of the first member has decided about the others: they stay without it.
    driver.snapshots.delete_snapshot(&ids[0]).unwrap();
    driver.snapshots.delete_snapshot(&ids[0]).unwrap();
    driver.refresh_pools();
    for given in [&[][..], &[&ids[1], &ids[2]], &[&ids[2], &ids[0], &ids[1]]] {
        let left = find(given).unwrap();
        let left: Vec<String> = left
            .snapshots
            .iter()
            .map(|one| one.id.to_string())
            .collect();
        assert_eq!(left, ids[1..], "given {given:?}");
    }
    for wrong in [&[&ids[1]][..], &[&ids[1], &ids[2], &sources[0].to_string()]] {
        let error = find(wrong).unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
    }
    // A repeat of the call requires all members.
    let again = driver.snapshots.create_group(&asked).unwrap_err();
    assert!(matches!(again, Error::Refused { .. }), "{again:?}");
    driver.snapshots.delete_snapshot(&ids[2]).unwrap();
    driver
        .snapshots
        .delete_group(&named(made.id, &made.snapshots))
        .unwrap();
    let error = find(&[]).unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }), "{error:?}");
    assert_eq!(driver.pools.serving()[0].backend.snapshots.count(), 0);
    assert_eq!(driver.pools.locks_held(), 0);
}

/// Sets the state that a crash between the commits of two members leaves: the first one is ready,
/// the second one is cut.
fn in_doubt(driver: &Driver, made: &Group) {
    let pool = driver.pools.serving().remove(0);
    let second = made.snapshots[1].id.uuid;
    let mut second = pool.backend.snapshots.get(second).unwrap().unwrap();
    second.state = SnapshotState::Cut;
    pool.backend.update_snapshot(&second).unwrap();
}

#[test]
fn before_the_first_member_is_deleted_the_others_are_committed() {
    let driver = driver(&MemoryHost::new());
    let sources = ["a", "b"].map(|name| volume(&driver, name));
    for of_any_group in [false, true] {
        let asked = match of_any_group {
            false => independent("g", &sources),
            true => request("h", &sources),
        };
        let made = driver.snapshots.create_group(&asked).unwrap();
        let [first, second] = [0, 1].map(|n| made.snapshots[n].id.to_string());
        in_doubt(&driver, &made);
        let how = DeleteSnapshotOptions {
            of_any_group,
            ..DeleteSnapshotOptions::default()
        };
        driver
            .snapshots
            .delete_without_router(&first, &how)
            .unwrap();
        // Neither a refresh nor a start undoes the second member after the first one was deleted.
        driver.refresh_pools();
        driver.snapshots.get_snapshot(&second).unwrap();
        driver
            .snapshots
            .delete_without_router(&second, &how)
            .unwrap();
    }
    assert_eq!(driver.pools.serving()[0].backend.snapshots.count(), 0);
}

#[test]
fn of_a_group_with_other_nodes_no_member_is_deleted_before_it_is_settled_there() {
    let driver = driver(&MemoryHost::new());
    let ours = [volume(&driver, "a")];
    let all = [ours[0], far()];
    let mut begun = begin(Some(GROUP), &all, &ours);
    begun.parameters.members = Members::Independent;
    served(&driver, &begun, all_steps()).0.unwrap();
    let member = member_of(GROUP, ours[0]).to_string();
    let refused = driver.snapshots.delete_snapshot(&member);
    assert!(
        matches!(refused, Err(Error::GroupInDoubt { .. })),
        "{refused:?}"
    );
    let of = |settled: Option<GroupId>| DeleteSnapshotOptions {
        settled,
        ..DeleteSnapshotOptions::default()
    };
    for settled in [None, Some(GroupId(Uuid::from_u128(78)))] {
        let asked = driver.snapshots.delete_one(&member, &of(settled)).unwrap();
        assert_eq!(asked, Some(GROUP));
    }
    driver.snapshots.get_snapshot(&member).unwrap();
    assert_eq!(
        driver
            .snapshots
            .delete_one(&member, &of(Some(GROUP)))
            .unwrap(),
        None
    );
    assert_eq!(states(&driver, GROUP), []);
}

#[test]
fn a_member_stays_while_another_one_cannot_be_read() {
    let host = MemoryHost::new();
    let driver = driver(&host);
    let sources = ["a", "b"].map(|name| volume(&driver, name));
    let made = driver
        .snapshots
        .create_group(&independent("g", &sources))
        .unwrap();
    let [first, second] = [0, 1].map(|n| made.snapshots[n].id);
    let (host, before) = unreadable(&driver, &host, second);
    let driver = self::driver(&host);
    let refused = driver.snapshots.delete_snapshot(&first.to_string());
    assert!(
        matches!(refused, Err(Error::GroupInDoubt { .. })),
        "{refused:?}"
    );
    driver.snapshots.get_snapshot(&first.to_string()).unwrap();
    host.put_file(&record_of(second), &before).unwrap();
    driver
        .snapshots
        .delete_snapshot(&first.to_string())
        .unwrap();
}

#[test]
fn the_record_of_a_group_that_is_deleted_together_is_that_of_earlier_releases() {
    let host = MemoryHost::new();
    let driver = driver(&host);
    let source = [volume(&driver, "a")];
    for (asked, says) in [
        (request("g", &source), false),
        (independent("h", &source), true),
    ] {
        let made = driver.snapshots.create_group(&asked).unwrap();
        let record = host.read_file(&record_of(made.snapshots[0].id)).unwrap();
        let record: serde_json::Value = serde_json::from_slice(&record.unwrap()).unwrap();
        assert_eq!(record["version"], 1);
        let said = record["group"].get("independent");
        assert_eq!(said.is_some_and(|said| said == true), says, "{record}");
        assert_eq!(said.is_some(), says, "{record}");
    }
}

/// The effects of a call.
struct Costs {
    log: Vec<String>,
}

impl Costs {
    fn of<T>(host: &MemoryHost, call: impl FnOnce() -> T) -> (Costs, T) {
        let before = host.effects();
        let result = call();
        let log = host.effect_log().split_off(before);
        (Costs { log }, result)
    }

    fn count(&self, word: &str) -> usize {
        self.log
            .iter()
            .filter(|line| line.starts_with(word))
            .count()
    }

    fn syncs(&self) -> usize {
        self.count("sync_")
    }
}

const KINDS: [&str; 2] = ["default=memory:", "default=memory-thin:"];

/// A pool of a kind with this number of volumes.
fn with_volumes(kind: &str, count: usize) -> (MemoryHost, Driver, Vec<VolumeId>) {
    let host = MemoryHost::new();
    let driver = start(&host, kind);
    let names = (0..count).map(|n| format!("v{n}"));
    let sources = names.map(|name| volume(&driver, &name)).collect();
    (host, driver, sources)
}

fn start(host: &MemoryHost, kind: &str) -> Driver {
    Driver::start(
        settings(&[pool(kind)]),
        CutInterfaces::simulated(host.clone()),
    )
    .unwrap()
}

#[test]
fn the_records_of_a_group_are_synced_together() {
    for kind in KINDS {
        let of = |count| {
            let (host, driver, sources) = with_volumes(kind, count);
            let create = || driver.snapshots.create_group(&request("g", &sources));
            let (costs, made) = Costs::of(&host, create);
            assert_eq!(made.unwrap().snapshots.len(), count);
            (costs.syncs(), costs.count("rename "))
        };
        let [(few, of_few), (many, of_many)] = [3, 12].map(of);
        assert_eq!((of_few, of_many), (9, 36), "each member has three states");
        assert_eq!(few, many, "{kind}");
    }
}

#[test]
fn the_members_of_a_group_are_deleted_together() {
    for (kind, keep_base) in [(KINDS[0], false), (KINDS[1], false), (KINDS[1], true)] {
        let of = |count| {
            let (host, driver, sources) = with_volumes(kind, count);
            let mut asked = request("g", &sources);
            asked.parameters.keep_base = keep_base;
            let made = driver.snapshots.create_group(&asked).unwrap();
            let all = named(made.id, &made.snapshots);
            let (costs, deleted) = Costs::of(&host, || driver.snapshots.delete_group(&all));
            deleted.unwrap();
            assert_eq!(states(&driver, made.id), []);
            assert_eq!(host.violations(), [""; 0]);
            // A rename of each member, to the trash or to its name, and one of a counter.
            let renames = costs.count("rename ");
            assert!([count, count + 1].contains(&renames), "{renames}");
            costs.syncs()
        };
        let [few, many] = [3, 12].map(of);
        assert_eq!(few, many, "{kind}, {keep_base}");
    }
}

/// What a start after a crash syncs for a group of this number of volumes, whose creation ended when that number
/// records of its members had their name. Returns the number of members that are left, too.
fn settled_after(kind: &str, count: usize, renames: usize) -> (usize, usize) {
    let (host, driver, sources) = with_volumes(kind, count);
    let asked = request("g", &sources);
    let (probe, other, volumes) = with_volumes(kind, count);
    let create = || other.snapshots.create_group(&request("g", &volumes));
    let (costs, made) = Costs::of(&probe, create);
    made.unwrap();
    let renamed = costs.log.iter().enumerate();
    let mut renamed = renamed.filter(|(_, line)| line.starts_with("rename "));
    let last = renamed.nth(renames - 1).unwrap().0 + 1;
    host.fail_effect(last, FaultMode::CrashAfter);
    driver.snapshots.create_group(&asked).unwrap_err();
    drop(driver);
    let host = host.restart_process();
    let driver = start(&host, kind);
    let group = GroupId::of_name(driver.pools.home(), "g");
    let resolve = || {
        driver
            .snapshots
            .resolve_group_by(group, &GroupDecision::default())
    };
    let (costs, resolved) = Costs::of(&host, resolve);
    resolved.unwrap();
    assert!(costs.log.len() > count, "{:?}", costs.log);
    let left = states(&driver, group);
    assert!(left.iter().all(|state| *state == SnapshotState::Ready));
    assert_eq!(host.violations(), [""; 0]);
    (costs.syncs(), left.len())
}

#[test]
fn the_members_that_a_crash_has_left_are_settled_together() {
    for kind in KINDS {
        for (renamed, is_committed) in [(1, false), (2, false), (3, true)] {
            // All members are preparing, all are cut, or the first one is committed.
            let of = |count: usize| {
                let renames = count * renamed.min(2) + usize::from(is_committed);
                let (syncs, left) = settled_after(kind, count, renames);
                assert_eq!(left, if is_committed { count } else { 0 });
                // The record of a member is synced before a process that has read it relies on it.
                syncs
            };
            let [few, many] = [3, 12].map(of);
            assert_eq!(few, many, "{kind}, {renamed}");
        }
    }
}
