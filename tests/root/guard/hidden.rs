//! Both driver and guard have ended: the next sweep thaws all journaled file systems, wherever they
//! are mounted, and no others.

use std::path::PathBuf;

use nix::sys::signal::Signal;
use slackwater::host::{Freezer, Host};
use slackwater::model::FsType::{self, Btrfs, Ext4, Xfs};
use slackwater_testkit::eventually;

use crate::guard::driver::{Driver, Task};
use crate::guard::fixture::{
    Fixture, ProbeWrite, are_stopped, await_stop, freeze_by_hand, guards, is_frozen, long, member,
    signal, thaw,
};

const ALL: [FsType; 3] = [Ext4, Xfs, Btrfs];

/// Freezes all volumes, and kills first the driver and then the stopped guard.
pub fn leave_frozen(fixture: &Fixture, kinds: &[FsType]) {
    let mut driver = Driver::start(fixture, kinds, &Task::Cut(long()), &[]);
    assert!(driver.says("frozen"));
    let guard = fixture.guard_pid().unwrap();
    signal(guard, Signal::SIGSTOP);
    await_stop(guard);
    driver.kill();
    signal(guard, Signal::SIGKILL);
    eventually("the guard's end", || guards(&fixture.state).is_empty());
}

/// No device of the fixture has a file system any more, and no private mount is left.
pub fn assert_free(fixture: &Fixture) {
    for volume in &fixture.volumes {
        eventually("a free device", || {
            !fixture.pool.host.is_claimed(&volume.device).unwrap()
        });
    }
    let mounts = fixture.pool.host.mounts().unwrap();
    assert!(
        !mounts
            .iter()
            .any(|mount| mount.mount_point.starts_with(&fixture.state))
    );
    let folder = std::fs::read_dir(fixture.state.join("mnt"));
    assert_eq!(folder.map_or(0, Iterator::count), 0);
    assert!(fixture.journal_is_empty());
}

#[test]
fn the_next_sweep_thaws_journaled_freezes_and_never_foreign_ones() {
    let kinds = [Ext4, Xfs, Btrfs, Ext4];
    let mut fixture = Fixture::new(&kinds);
    let foreign = fixture.volumes.pop().unwrap();
    leave_frozen(&fixture, &ALL);
    freeze_by_hand(&foreign.target);
    let writers = fixture.writers();
    assert!(are_stopped(&writers), "no process is left to thaw them");
    let listed = fixture.guard.list_journaled().unwrap();
    assert_eq!(listed.len(), 3);
    assert!(listed.iter().all(|entry| !entry.held && entry.freezing));
    assert_eq!(fixture.guard.sweep().unwrap(), ["v0", "v1", "v2"]);
    writers.into_iter().for_each(ProbeWrite::goes_on);
    fixture.assert_all_thawed();
    assert!(fixture.guard.sweep().unwrap().is_empty());
    assert!(thaw(&foreign.target), "the foreign freeze stayed");
}

#[test]
fn the_next_guard_thaws_as_well() {
    let mut fixture = Fixture::new(&[Ext4, Ext4]);
    let other = fixture.volumes.pop().unwrap();
    leave_frozen(&fixture, &[Ext4]);
    assert!(is_frozen(&fixture.volumes[0].target));
    let member = member(&fixture.pool, "other", &other, Ext4);
    let session = fixture.guard.begin(vec![member], long()).unwrap();
    ProbeWrite::start(&fixture.volumes[0].target).goes_on();
    drop(session);
    fixture.assert_all_thawed();
}

#[test]
fn a_file_system_that_was_unmounted_while_frozen_is_thawed_through_its_loop_device() {
    let fixture = Fixture::new(&ALL);
    for volume in &fixture.volumes {
        std::fs::write(volume.target.join("before"), "never synced").unwrap();
    }
    leave_frozen(&fixture, &ALL);
    for volume in &fixture.volumes {
        crate::guard::fixture::unmount(&volume.target);
        assert!(
            fixture.pool.host.is_claimed(&volume.device).unwrap(),
            "hidden, and frozen"
        );
    }
    assert_eq!(fixture.guard.sweep().unwrap(), ["v0", "v1", "v2"]);
    assert_free(&fixture);
    for (volume, fs) in fixture.volumes.iter().zip(ALL) {
        fixture.pool.mount(&volume.device, &volume.target, fs, &[]);
        let read = std::fs::read_to_string(volume.target.join("before")).unwrap();
        assert_eq!(read, "never synced");
    }
    fixture.assert_all_thawed();
}

#[test]
fn held_freezes_are_left_alone_and_entries_of_missing_devices_are_dropped() {
    let fixture = Fixture::new(&[Ext4]);
    let session = fixture.frozen(&[Ext4], long());
    assert!(fixture.guard.sweep().unwrap().is_empty());
    let listed = fixture.guard.list_journaled().unwrap();
    assert!(listed.len() == 1 && listed[0].held && listed[0].owner == std::process::id());
    assert!(listed[0].until > listed[0].since);
    assert!(session.thaw(0).unwrap(), "the sweep left it alone");
    drop(session);

    // It was thawed by a foreign process and unmounted, and now another image is on that loop
    // device.
    leave_frozen(&fixture, &[Ext4]);
    assert!(thaw(&fixture.volumes[0].target));
    crate::guard::fixture::unmount(&fixture.volumes[0].target);
    assert!(fixture.guard.sweep().unwrap().is_empty());
    assert_free(&fixture);
}

/// The only entry of the journal.
fn entry_of(fixture: &Fixture) -> PathBuf {
    let folder = std::fs::read_dir(fixture.state.join("freezes")).unwrap();
    let mut paths = folder.map(|entry| entry.unwrap().path());
    let is_entry = |path: &PathBuf| path.extension().is_some_and(|end| end == "json");
    paths.find(is_entry).unwrap()
}

#[test]
fn of_a_session_that_froze_nothing_no_foreign_freeze_is_thawed() {
    let fixture = Fixture::new(&[Ext4]);
    let target = &fixture.volumes[0].target;
    leave_frozen(&fixture, &[Ext4]);
    assert!(thaw(target));
    let entry = entry_of(&fixture);
    let text = std::fs::read_to_string(&entry).unwrap();
    let began = "\"freezing\": true";
    assert!(text.contains(began), "{text}");
    std::fs::write(&entry, text.replace(began, "\"freezing\": false")).unwrap();
    freeze_by_hand(target);
    assert!(fixture.guard.sweep().unwrap().is_empty());
    assert!(fixture.journal_is_empty());
    assert!(thaw(target), "the foreign freeze was left alone");
}

#[test]
fn an_entry_of_another_boot_is_dropped_and_an_unreadable_one_is_reported() {
    let fixture = Fixture::new(&[Ext4]);
    leave_frozen(&fixture, &[Ext4]);
    let entry = entry_of(&fixture);
    let text = std::fs::read_to_string(&entry).unwrap();
    let boot = fixture.pool.host.boot_id().unwrap().to_string();
    std::fs::write(&entry, "{").unwrap();
    let message = crate::host_linux::scratch::error_text(&fixture.guard.sweep().unwrap_err());
    assert!(message.contains(entry.to_str().unwrap()), "{message}");
    assert!(is_frozen(&fixture.volumes[0].target));
    let other = uuid::Uuid::new_v4().to_string();
    std::fs::write(&entry, text.replace(&boot, &other)).unwrap();
    assert!(fixture.guard.sweep().unwrap().is_empty());
    assert!(fixture.journal_is_empty());
    assert!(
        thaw(&fixture.volumes[0].target),
        "the freeze was left alone"
    );
}
