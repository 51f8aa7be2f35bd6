//! A FIFREEZE that hangs: the pool beneath is frozen by somebody, so nothing can be written back.

use std::fs::{self, File};
use std::io::Write;
use std::time::Duration;

use nix::sys::signal::Signal;
use slackwater::host::freezer::FreezeLimits;
use slackwater::host::{Freezer, Host};
use slackwater::model::FsType::{self, Btrfs, Ext4, Xfs};

use crate::bench::{
    Bench, PATIENCE, Write_, eventually_within, freeze_by_hand, guards, limits, long, member,
    signal, thaw,
};
use crate::driver::{Driver, Task};
use crate::scratch::said;

const SHORT: FreezeLimits = FreezeLimits {
    sync: Duration::from_secs(1),
    freeze: Duration::from_secs(1),
};

/// Data that a FIFREEZE has to write back.
fn make_dirty(bench: &Bench, at: usize) {
    let path = bench.volumes[at].target.join("dirty");
    let mut file = File::create(path).unwrap();
    file.write_all(&vec![at as u8 + 1; 4 << 20]).unwrap();
}

#[test]
fn a_sync_that_hangs_fails_in_time() {
    let bench = Bench::new(&[Ext4]);
    make_dirty(&bench, 0);
    let session = bench.begin(&[Ext4], SHORT);
    freeze_by_hand(&bench.pool.pool);
    let told = said(&session.sync().unwrap_err());
    assert!(
        told.contains("could not be written back within 1s"),
        "{told}"
    );
    assert!(
        session.freeze().is_err(),
        "the session is of no use any more"
    );
    drop(session);
    assert!(bench.guard.sweep().unwrap().is_empty());
    assert!(thaw(&bench.pool.pool));
    bench.assert_all_thawed();
}

#[test]
fn a_freeze_that_hangs_fails_in_time_and_is_thawed_when_it_returns() {
    for fs in [Ext4, Xfs, Btrfs] {
        let bench = Bench::new(&[fs]);
        let healthy = Bench::new(&[Ext4]);
        make_dirty(&bench, 0);
        let mut members = bench.members(&[fs]);
        members.extend(healthy.members(&[Ext4]));
        let session = bench.guard.begin(members, SHORT).unwrap();
        freeze_by_hand(&bench.pool.pool);
        let told = said(&session.freeze().unwrap_err());
        assert!(told.contains("before the deadline"), "{fs}: {told}");
        Write_::start(&healthy.volumes[0].target).goes_on();
        let guard = bench
            .guard_pid()
            .expect("it has done nothing wrong, and lives");
        drop(session);
        assert!(!bench.journal_is_empty(), "it may be frozen yet");
        // Past its deadline, and held: it's tried, and hangs or isn't frozen; the entry stays.
        eventually_within("a second after the deadline", || {
            let listed = bench.guard.journalled().unwrap();
            bench.pool.host.now() > listed[0].until + 1
        });
        let _ = bench.guard.sweep();
        assert!(!bench.journal_is_empty());
        assert!(thaw(&bench.pool.pool));
        bench.assert_all_thawed();
        assert_eq!(bench.guard_pid(), Some(guard), "{fs}");
    }
}

#[test]
fn a_freeze_that_comes_out_of_a_killed_guard_is_thawed_by_its_driver() {
    let bench = Bench::new(&[Xfs]);
    make_dirty(&bench, 0);
    let session = bench.begin(&[Xfs], limits(Duration::from_secs(3)));
    freeze_by_hand(&bench.pool.pool);
    std::thread::scope(|scope| {
        let freezing = scope.spawn(|| session.freeze().is_err());
        let guard = bench.guard_pid().unwrap();
        await_hang(guard);
        signal(guard, Signal::SIGKILL);
        assert!(freezing.join().unwrap());
    });
    drop(session);
    assert!(thaw(&bench.pool.pool));
    bench.assert_all_thawed();
}

#[test]
fn a_freeze_that_comes_out_of_a_killed_guard_without_a_driver_is_swept() {
    let bench = Bench::new(&[Xfs]);
    let task = Task::Cut(long());
    // Stopped before its FIFREEZE, so that data can be made dirty after the sync.
    let faults = [("SLACKWATER_GUARD_FAULT", "freeze-before:stop")];
    let mut driver = Driver::start(&bench, &[Xfs], &task, &faults);
    assert!(driver.says("freezing"));
    let guard = bench.guard_pid().unwrap();
    crate::bench::await_stop(guard);
    make_dirty(&bench, 0);
    freeze_by_hand(&bench.pool.pool);
    signal(guard, Signal::SIGCONT);
    await_hang(guard);
    driver.kill();
    signal(guard, Signal::SIGKILL);
    // The dying guard still holds the entry.
    assert!(bench.guard.sweep().unwrap().is_empty());
    assert!(bench.guard.journalled().unwrap()[0].held);
    assert!(thaw(&bench.pool.pool));
    eventually_within("the guard's end", || guards(&bench.state).is_empty());
    eventually_within("a sweep that ends it", || {
        bench.guard.sweep().unwrap();
        bench.journal_is_empty()
    });
    Write_::start(&bench.volumes[0].target).goes_on();
}

/// Waits until a thread of a process hangs in the kernel.
fn await_hang(pid: u32) {
    let is_stuck = |stat: String| {
        let state = stat.rsplit(')').next().unwrap_or_default().trim_start();
        state.starts_with('D')
    };
    let mut seen = 0;
    eventually_within("a FIFREEZE that hangs", || {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        let stuck = tasks
            .filter_map(|task| fs::read_to_string(task.ok()?.path().join("stat")).ok())
            .any(is_stuck);
        // For a moment, every I/O looks so.
        seen = if stuck { seen + 1 } else { 0 };
        seen > 20
    });
}

#[test]
fn one_member_that_hangs_holds_up_no_other_session() {
    let bench = Bench::new(&[Xfs]);
    let healthy = Bench::new(&[Ext4]);
    make_dirty(&bench, 0);
    let kinds: [FsType; 1] = [Xfs];
    let session = bench.begin(&kinds, SHORT);
    freeze_by_hand(&bench.pool.pool);
    assert!(session.freeze().is_err());
    let member = member(&healthy.pool, "healthy", &healthy.volumes[0], Ext4);
    let other = bench.guard.begin(vec![member], limits(PATIENCE)).unwrap();
    other.freeze().unwrap();
    assert!(other.thaw(0).unwrap());
    drop(other);
    drop(session);
    assert!(thaw(&bench.pool.pool));
    bench.assert_all_thawed();
}
