//! A FIFREEZE that hangs: another process has frozen the pool below, so nothing can be written
//! back.

use std::fs::{self, File};
use std::io::Write;
use std::time::Duration;

use nix::sys::signal::Signal;
use slackwater::host::freezer::FreezeLimits;
use slackwater::host::{Freezer, Host};
use slackwater::model::FsType::{self, Btrfs, Ext4, Xfs};
use slackwater_testkit::eventually;

use crate::guard::driver::{Driver, Task};
use crate::guard::fixture::{
    Fixture, ProbeWrite, WAIT_TIMEOUT, freeze_by_hand, guards, limits, long, member, signal, thaw,
};
use crate::guard::hidden::leave_frozen;
use crate::host_linux::scratch::error_text;

const SHORT: FreezeLimits = FreezeLimits {
    sync: Duration::from_secs(1),
    freeze: Duration::from_secs(1),
};

/// Data that a FIFREEZE has to write back.
fn make_dirty(fixture: &Fixture, at: usize) {
    let path = fixture.volumes[at].target.join("dirty");
    let mut file = File::create(path).unwrap();
    file.write_all(&vec![at as u8 + 1; 4 << 20]).unwrap();
}

#[test]
fn a_sync_that_hangs_fails_in_time() {
    let fixture = Fixture::new(&[Ext4]);
    make_dirty(&fixture, 0);
    let session = fixture.begin(&[Ext4], SHORT);
    freeze_by_hand(&fixture.pool.pool);
    let message = error_text(&session.sync().unwrap_err());
    assert!(
        message.contains("could not be written back within 1s"),
        "{message}"
    );
    assert!(
        session.freeze().is_err(),
        "the session is of no use any more"
    );
    drop(session);
    assert!(fixture.guard.sweep().unwrap().is_empty());
    assert!(thaw(&fixture.pool.pool));
    fixture.assert_all_thawed();
}

#[test]
fn a_freeze_that_hangs_fails_in_time_and_is_thawed_when_it_returns() {
    for fs in [Ext4, Xfs, Btrfs] {
        let fixture = Fixture::new(&[fs]);
        let healthy = Fixture::new(&[Ext4]);
        make_dirty(&fixture, 0);
        let mut members = fixture.members(&[fs]);
        members.extend(healthy.members(&[Ext4]));
        let session = fixture.guard.begin(members, SHORT).unwrap();
        freeze_by_hand(&fixture.pool.pool);
        let message = error_text(&session.freeze().unwrap_err());
        assert!(message.contains("before the deadline"), "{fs}: {message}");
        ProbeWrite::start(&healthy.volumes[0].target).goes_on();
        let guard = fixture
            .guard_pid()
            .expect("the guard has not failed, and runs");
        drop(session);
        assert!(!fixture.journal_is_empty(), "it may still be frozen");
        // After its deadline, and held: the thaw is tried, and hangs or finds nothing frozen; the
        // entry stays.
        eventually("a second after the deadline", || {
            let listed = fixture.guard.list_journaled().unwrap();
            fixture.pool.host.now() > listed[0].until + 1
        });
        let _ = fixture.guard.sweep();
        assert!(!fixture.journal_is_empty());
        assert!(thaw(&fixture.pool.pool));
        fixture.assert_all_thawed();
        assert_eq!(fixture.guard_pid(), Some(guard), "{fs}");
    }
}

/// A FITHAW writes the superblock, and waits for a disk that is busy.
#[test]
fn a_thaw_that_waits_for_the_disk_loses_neither_the_cut_nor_the_guard() {
    let fixture = Fixture::new(&[Ext4]);
    let session = fixture.frozen(&[Ext4], long());
    let guard = fixture.guard_pid().unwrap();
    freeze_by_hand(&fixture.pool.pool);
    let verdict = std::thread::scope(|scope| {
        let thawing = scope.spawn(|| session.thaw(0));
        // A guard that answered nothing would be killed after a second.
        std::thread::sleep(Duration::from_secs(3));
        assert!(!thawing.is_finished(), "it waits");
        assert!(thaw(&fixture.pool.pool));
        thawing.join().unwrap()
    });
    assert!(verdict.unwrap(), "it was frozen until its own thaw");
    drop(session);
    assert_eq!(fixture.guard_pid(), Some(guard));
    fixture.assert_all_thawed();
}

#[test]
fn thaws_that_hang_are_errors_after_the_deadline_without_a_wait_for_each() {
    let kinds = [Ext4; 4];
    let fixture = Fixture::new(&kinds);
    let session = fixture.frozen(&kinds, limits(Duration::from_secs(3)));
    freeze_by_hand(&fixture.pool.pool);
    let mut took = Vec::new();
    for at in 0..kinds.len() {
        let begun = std::time::Instant::now();
        let message = error_text(&session.thaw(at).unwrap_err());
        assert!(message.contains("hangs and is retried"), "{message}");
        took.push(begun.elapsed());
    }
    let others: Duration = took[1..].iter().sum();
    assert!(others < took[0], "{took:?}");
    drop(session);
    assert!(!fixture.journal_is_empty(), "it may still be frozen");
    assert!(thaw(&fixture.pool.pool));
    fixture.assert_all_thawed();
}

/// A guard that was killed could not exit before its FITHAW returns, and no other guard could start.
#[test]
fn a_thaw_that_waits_for_a_disk_after_the_deadline_stops_no_cut_of_another_pool() {
    let fixture = Fixture::new(&[Ext4]);
    let healthy = Fixture::new(&[Ext4]);
    let session = fixture.frozen(&[Ext4], limits(Duration::from_secs(3)));
    let guard = fixture.guard_pid().unwrap();
    freeze_by_hand(&fixture.pool.pool);
    let message = error_text(&session.thaw(0).unwrap_err());
    assert!(message.contains("hangs and is retried"), "{message}");
    let member = member(&healthy.pool, "healthy", &healthy.volumes[0], Ext4);
    let other = fixture.guard.begin(vec![member], long()).unwrap();
    other.freeze().unwrap();
    assert!(other.thaw(0).unwrap());
    drop(other);
    drop(session);
    assert_eq!(fixture.guard_pid(), Some(guard));
    assert!(thaw(&fixture.pool.pool));
    fixture.assert_all_thawed();
    assert_eq!(fixture.guard_pid(), Some(guard));
}

/// After the deaths of driver and guard.
#[test]
fn a_sweep_waits_no_longer_for_four_file_systems_than_for_one() {
    let sweep = |kinds: &[FsType]| {
        let fixture = Fixture::new(kinds);
        leave_frozen(&fixture, kinds);
        freeze_by_hand(&fixture.pool.pool);
        let begun = std::time::Instant::now();
        let message = error_text(&fixture.guard.sweep().unwrap_err());
        let took = begun.elapsed();
        assert!(message.contains("FITHAW hangs"), "{message}");
        assert!(thaw(&fixture.pool.pool));
        eventually("a sweep that finds nothing frozen", || {
            fixture.guard.sweep().is_ok() && fixture.journal_is_empty()
        });
        fixture.assert_all_thawed();
        took
    };
    let (one, four) = (sweep(&[Ext4]), sweep(&[Ext4; 4]));
    assert!(four < 3 * one, "{one:?} and {four:?}");
}

#[test]
fn a_freeze_that_completes_in_a_killed_guard_is_thawed_by_the_driver() {
    let fixture = Fixture::new(&[Xfs]);
    make_dirty(&fixture, 0);
    let session = fixture.begin(&[Xfs], limits(Duration::from_secs(3)));
    freeze_by_hand(&fixture.pool.pool);
    std::thread::scope(|scope| {
        let freezing = scope.spawn(|| session.freeze().is_err());
        let guard = fixture.guard_pid().unwrap();
        await_hang(guard);
        signal(guard, Signal::SIGKILL);
        assert!(freezing.join().unwrap());
    });
    drop(session);
    assert!(thaw(&fixture.pool.pool));
    fixture.assert_all_thawed();
}

#[test]
fn a_freeze_that_completes_in_a_killed_guard_without_a_driver_is_swept() {
    let fixture = Fixture::new(&[Xfs]);
    let task = Task::Cut(long());
    // Stopped before its FIFREEZE, so that data can be made dirty after the sync.
    let faults = [("SLACKWATER_FAULT", "guard.freeze:stop")];
    let mut driver = Driver::start(&fixture, &[Xfs], &task, &faults);
    assert!(driver.says("freezing"));
    let guard = fixture.guard_pid().unwrap();
    crate::guard::fixture::await_stop(guard);
    make_dirty(&fixture, 0);
    freeze_by_hand(&fixture.pool.pool);
    signal(guard, Signal::SIGCONT);
    await_hang(guard);
    driver.kill();
    signal(guard, Signal::SIGKILL);
    // The dying guard still holds the entry.
    assert!(fixture.guard.sweep().unwrap().is_empty());
    assert!(fixture.guard.list_journaled().unwrap()[0].held);
    assert!(thaw(&fixture.pool.pool));
    eventually("the guard's end", || guards(&fixture.state).is_empty());
    eventually("a sweep that thaws it", || {
        fixture.guard.sweep().unwrap();
        fixture.journal_is_empty()
    });
    ProbeWrite::start(&fixture.volumes[0].target).goes_on();
}

/// Waits until a thread of a process hangs in the kernel.
fn await_hang(pid: u32) {
    let is_stuck = |stat: String| {
        let state = stat.rsplit(')').next().unwrap_or_default().trim_start();
        state.starts_with('D')
    };
    let mut seen = 0;
    eventually("a FIFREEZE that hangs", || {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        let stuck = tasks
            .filter_map(|task| fs::read_to_string(task.ok()?.path().join("stat")).ok())
            .any(is_stuck);
        // Any I/O looks like this for a moment.
        seen = if stuck { seen + 1 } else { 0 };
        seen > 20
    });
}

#[test]
fn one_member_that_hangs_holds_up_no_other_session() {
    let fixture = Fixture::new(&[Xfs]);
    let healthy = Fixture::new(&[Ext4]);
    make_dirty(&fixture, 0);
    let kinds: [FsType; 1] = [Xfs];
    let session = fixture.begin(&kinds, SHORT);
    freeze_by_hand(&fixture.pool.pool);
    assert!(session.freeze().is_err());
    let member = member(&healthy.pool, "healthy", &healthy.volumes[0], Ext4);
    let other = fixture
        .guard
        .begin(vec![member], limits(WAIT_TIMEOUT))
        .unwrap();
    other.freeze().unwrap();
    assert!(other.thaw(0).unwrap());
    drop(other);
    drop(session);
    assert!(thaw(&fixture.pool.pool));
    fixture.assert_all_thawed();
}
