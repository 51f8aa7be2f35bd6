//! Driver and guard are both gone: the next sweep thaws what is journalled, wherever it is, and
//! nothing else.

use nix::sys::signal::Signal;
use slackwater::host::{Freezer, Host};
use slackwater::model::FsType::{self, Btrfs, Ext4, Xfs};

use crate::bench::{
    Bench, Write_, are_stopped, await_stop, eventually_within, freeze_by_hand, guards, is_frozen,
    long, member, signal, thaw,
};
use crate::driver::{Driver, Task};

const ALL: [FsType; 3] = [Ext4, Xfs, Btrfs];

/// Freezes all volumes, and kills first the driver and then the stopped guard.
pub fn leave_frozen(bench: &Bench, kinds: &[FsType]) {
    let mut driver = Driver::start(bench, kinds, &Task::Cut(long()), &[]);
    assert!(driver.says("frozen"));
    let guard = bench.guard_pid().unwrap();
    signal(guard, Signal::SIGSTOP);
    await_stop(guard);
    driver.kill();
    signal(guard, Signal::SIGKILL);
    eventually_within("the guard's end", || guards(&bench.state).is_empty());
}

/// No device of a bench has a file system any more, and no private mount is left.
pub fn assert_free(bench: &Bench) {
    for volume in &bench.volumes {
        eventually_within("a free device", || {
            !bench.pool.host.is_claimed(&volume.device).unwrap()
        });
    }
    let mounts = bench.pool.host.mounts().unwrap();
    assert!(
        !mounts
            .iter()
            .any(|mount| mount.mount_point.starts_with(&bench.state))
    );
    let folder = std::fs::read_dir(bench.state.join("mnt"));
    assert_eq!(folder.map_or(0, Iterator::count), 0);
    assert!(bench.journal_is_empty());
}

#[test]
fn the_next_sweep_thaws_what_is_journalled_and_never_a_strangers() {
    let kinds = [Ext4, Xfs, Btrfs, Ext4];
    let mut bench = Bench::new(&kinds);
    let stranger = bench.volumes.pop().unwrap();
    leave_frozen(&bench, &ALL);
    freeze_by_hand(&stranger.target);
    let writers = bench.writers();
    assert!(are_stopped(&writers), "nobody is there to thaw them");
    let listed = bench.guard.journalled().unwrap();
    assert_eq!(listed.len(), 3);
    assert!(listed.iter().all(|entry| !entry.held));
    assert_eq!(bench.guard.sweep().unwrap(), ["v0", "v1", "v2"]);
    writers.into_iter().for_each(Write_::goes_on);
    bench.assert_all_thawed();
    assert!(bench.guard.sweep().unwrap().is_empty());
    assert!(thaw(&stranger.target), "the stranger's freeze stayed");
}

#[test]
fn the_next_guard_thaws_as_well() {
    let mut bench = Bench::new(&[Ext4, Ext4]);
    let other = bench.volumes.pop().unwrap();
    leave_frozen(&bench, &[Ext4]);
    assert!(is_frozen(&bench.volumes[0].target));
    let member = member(&bench.pool, "other", &other, Ext4);
    let session = bench.guard.begin(vec![member], long()).unwrap();
    Write_::start(&bench.volumes[0].target).goes_on();
    drop(session);
    bench.assert_all_thawed();
}

#[test]
fn what_was_unmounted_while_frozen_is_thawed_through_its_own_loop() {
    let bench = Bench::new(&ALL);
    for volume in &bench.volumes {
        std::fs::write(volume.target.join("before"), "never synced").unwrap();
    }
    leave_frozen(&bench, &ALL);
    for volume in &bench.volumes {
        crate::bench::unmount(&volume.target);
        assert!(
            bench.pool.host.is_claimed(&volume.device).unwrap(),
            "hidden, and frozen"
        );
    }
    assert_eq!(bench.guard.sweep().unwrap(), ["v0", "v1", "v2"]);
    assert_free(&bench);
    for (volume, fs) in bench.volumes.iter().zip(ALL) {
        bench.pool.mount(&volume.device, &volume.target, fs, &[]);
        let read = std::fs::read_to_string(volume.target.join("before")).unwrap();
        assert_eq!(read, "never synced");
    }
    bench.assert_all_thawed();
}

#[test]
fn what_is_held_is_left_alone_and_what_is_gone_is_forgotten() {
    let bench = Bench::new(&[Ext4]);
    let session = bench.frozen(&[Ext4], long());
    assert!(bench.guard.sweep().unwrap().is_empty());
    let listed = bench.guard.journalled().unwrap();
    assert!(listed.len() == 1 && listed[0].held && listed[0].owner == std::process::id());
    assert!(listed[0].until > listed[0].since);
    assert!(session.thaw(0).unwrap(), "the sweep didn't touch it");
    drop(session);

    // Thawed by a stranger and unmounted; another image is on that loop device by now.
    leave_frozen(&bench, &[Ext4]);
    assert!(thaw(&bench.volumes[0].target));
    crate::bench::unmount(&bench.volumes[0].target);
    assert!(bench.guard.sweep().unwrap().is_empty());
    assert_free(&bench);
}

#[test]
fn an_entry_of_another_boot_is_dropped_and_one_that_can_not_be_read_is_told() {
    let bench = Bench::new(&[Ext4]);
    leave_frozen(&bench, &[Ext4]);
    let folder = bench.state.join("freezes");
    let entry = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.extension().is_some_and(|end| end == "json"))
        .unwrap();
    let text = std::fs::read_to_string(&entry).unwrap();
    let boot = bench.pool.host.boot_id().unwrap().to_string();
    std::fs::write(&entry, "{").unwrap();
    let told = crate::scratch::said(&bench.guard.sweep().unwrap_err());
    assert!(told.contains(entry.to_str().unwrap()), "{told}");
    assert!(is_frozen(&bench.volumes[0].target));
    let other = uuid::Uuid::new_v4().to_string();
    std::fs::write(&entry, text.replace(&boot, &other)).unwrap();
    assert!(bench.guard.sweep().unwrap().is_empty());
    assert!(bench.journal_is_empty());
    assert!(thaw(&bench.volumes[0].target), "it was left alone");
}
