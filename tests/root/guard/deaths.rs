//! kill -9 and SIGSTOP of the guard and of the driver at each of their steps.

use std::fs;
use std::time::Duration;

use nix::sys::signal::Signal;
use slackwater::host::Freezer;
use slackwater::host::freezer::FreezeLimits;
use slackwater::model::FsType::{Ext4, Xfs};
use slackwater_testkit::eventually;

use crate::guard::driver::{Driver, GRACE_PERIODS, Sight, Task, was_killed};
use crate::guard::fixture::{
    Fixture, ProbeWrite, WAIT_TIMEOUT, assert_not_expedited, await_stop, guards, limits, long,
    short, signal,
};

/// A fault before, and for steps that take time also after, each step of the guard in a session of
/// the usual order.
pub fn at_each_step(mode: &str) -> [String; 10] {
    [
        ("accepted", ""),
        ("begun", ""),
        ("sync", ""),
        ("sync", "-after"),
        ("expedited", ""),
        ("freeze", ""),
        ("freeze", "-after"),
        ("thaw", ""),
        ("thaw", "-after"),
        ("ended", ""),
    ]
    .map(|(step, after)| format!("guard.{step}:{mode}{after}"))
}

/// The cut of a session whose guard meets a fault. A killed guard is detected at once; a stopped
/// one when it is late, unless everything was thawed before.
pub fn cut_with(fault: &str) -> Task {
    let is_awaited = fault.contains(":stop") && !fault.starts_with("guard.ended");
    Task::Cut(match is_awaited {
        true => FreezeLimits {
            sync: Duration::from_secs(5),
            freeze: Duration::from_secs(1),
        },
        false => long(),
    })
}

/// The driver runs its whole session of two volumes, whatever happens to the guard, and ends; then
/// writers go on.
pub fn assert_session_ends(driver: &mut Driver, fixture: &Fixture, fault: &str) {
    let lines = driver.run();
    // At the last step, everything was thawed and reported; in the others, the cut is discarded.
    let is_proven = lines.iter().any(|line| line == "[true, true]");
    assert_eq!(
        is_proven,
        fault.starts_with("guard.ended"),
        "{fault}: {lines:?}"
    );
    for volume in &fixture.volumes {
        ProbeWrite::start(&volume.target).goes_on();
    }
}

/// After the session, nothing is frozen.
fn session_with_a_guard_that(meets: &str) {
    let kinds = [Ext4, Xfs];
    let fixture = Fixture::new(&kinds);
    let faults = [("SLACKWATER_FAULT", meets)];
    let mut driver = Driver::start(&fixture, &kinds, &cut_with(meets), &faults);
    assert_session_ends(&mut driver, &fixture, meets);
    for pid in guards(&fixture.state) {
        // The next session finds a stopped guard that no session needed any more.
        signal(pid, Signal::SIGCONT);
    }
    eventually("no guard without a driver", || {
        guards(&fixture.state).is_empty()
    });
    fixture.guard.sweep().unwrap();
    fixture.assert_all_thawed();
    assert_not_expedited();
    let session = fixture.frozen(&kinds, crate::guard::fixture::long());
    assert!(
        session.thaw(0).unwrap() && session.thaw(1).unwrap(),
        "{meets}"
    );
}

#[test]
fn a_guard_that_is_killed_at_any_step_leaves_nothing_frozen() {
    for fault in at_each_step("kill") {
        session_with_a_guard_that(&fault);
    }
}

#[test]
fn grace_periods_are_expedited_only_by_the_guard_of_a_driver_that_enables_it() {
    let fixture = Fixture::new(&[Ext4]);
    for (how, comes_to_it) in [("expedited", true), ("normal", false)] {
        let environment = [
            ("SLACKWATER_FAULT", "guard.expedited:kill"),
            (GRACE_PERIODS, how),
        ];
        let mut driver = Driver::start(&fixture, &[Ext4], &Task::Cut(long()), &environment);
        let lines = driver.run();
        let is_proven = lines.iter().any(|line| line == "[true]");
        assert_eq!(is_proven, !comes_to_it, "{how}: {lines:?}");
    }
    fixture.assert_all_thawed();
}

#[test]
fn a_guard_that_is_stopped_at_any_step_leaves_nothing_frozen() {
    for fault in at_each_step("stop") {
        session_with_a_guard_that(&fault);
    }
}

#[test]
fn a_guard_that_is_killed_or_stopped_at_the_deadline_leaves_nothing_frozen() {
    for act in ["kill", "stop"] {
        let fixture = Fixture::new(&[Ext4]);
        let meets = format!("guard.deadline:{act}");
        let faults = [("SLACKWATER_FAULT", meets.as_str())];
        let mut driver = frozen_shortly(&fixture, &faults);
        ProbeWrite::start(&fixture.volumes[0].target).goes_on();
        driver.go_on();
        assert_eq!(driver.as_str().as_deref(), Some("[false]"));
        assert!(driver.wait().success());
        fixture.assert_all_thawed();
    }
}

#[test]
fn a_stopped_guard_is_not_waited_for_and_survives_while_another_session_relies_on_it() {
    let fixture = Fixture::new(&[Ext4, Ext4]);
    let mut members = fixture.members(&[Ext4, Ext4]);
    let second = members.pop().unwrap();
    let sessions = [members, vec![second]].map(|members| {
        let session = fixture.guard.begin(members, long()).unwrap();
        session.sync().unwrap();
        session.freeze().unwrap();
        session
    });
    let guard = fixture.guard_pid().unwrap();
    signal(guard, Signal::SIGSTOP);
    await_stop(guard);
    // Its deadline is far away.
    assert!(
        !sessions[0].thaw(0).unwrap(),
        "such a cut is not proven to be consistent"
    );
    ProbeWrite::start(&fixture.volumes[0].target).goes_on();
    assert!(crate::guard::fixture::is_frozen(&fixture.volumes[1].target));
    assert_eq!(
        guards(&fixture.state),
        [guard],
        "the guard still has a session"
    );
    assert!(!sessions[1].thaw(0).unwrap());
    eventually("the end of a guard that no session relies on", || {
        guards(&fixture.state).is_empty()
    });
    drop(sessions);
    fixture.guard.sweep().unwrap();
    fixture.assert_all_thawed();
}

#[test]
fn the_guard_thaws_after_the_longest_freeze_timeout_whatever_was_requested() {
    let fixture = Fixture::new(&[Ext4]);
    let session = fixture.frozen(&[Ext4], limits(Duration::from_secs(3000)));
    ProbeWrite::start(&fixture.volumes[0].target).goes_on();
    assert!(!session.thaw(0).unwrap());
}

/// A driver that has frozen a volume for a short time.
fn frozen_shortly(fixture: &Fixture, faults: &[(&str, &str)]) -> Driver {
    short(|limits| {
        let driver = Driver::start(fixture, &[Ext4], &Task::Cut(limits), faults);
        if driver.says("frozen") {
            return Some(driver);
        }
        drop(driver);
        eventually("the guard's end", || guards(&fixture.state).is_empty());
        None
    })
}

/// A driver with a fault at its n-th effect or step. If `beside` is given, its guard is started by
/// a supervisor. `Err` if the driver ended instead: whether its task was done.
fn driver_with(
    fixture: &Fixture,
    number: u32,
    mode: &str,
    task: &Task,
    beside: Option<Sight>,
) -> Result<Driver, bool> {
    let fault = format!("effect.{number}:{mode}");
    let faults = [("SLACKWATER_FAULT", fault.as_str())];
    let mut driver = Driver::beside(fixture, &[Ext4, Xfs], task, &faults, beside);
    driver.go_on();
    if mode.starts_with("stop") {
        let mut state = String::new();
        eventually("a stop or an end", || {
            let path = format!("/proc/{}/stat", driver.pid());
            let stat = fs::read_to_string(path).unwrap_or_default();
            state = stat
                .rsplit(')')
                .next()
                .unwrap_or_default()
                .trim_start()
                .into();
            state.starts_with(['T', 'Z'])
        });
        if state.starts_with('T') {
            return Ok(driver);
        }
    }
    if was_killed(driver.wait()) {
        return Ok(driver);
    }
    Err(driver.says("done"))
}

/// A driver with a fault at each of its effects and steps in turn. Calls `ended` after each.
pub fn each_step(fixture: &Fixture, mode: &str, beside: Option<Sight>, ended: impl Fn()) {
    let mut limit = if mode.starts_with("stop") {
        limits(Duration::from_millis(700))
    } else {
        long()
    };
    let mut number = 1;
    loop {
        let mut driver = match driver_with(fixture, number, mode, &Task::Cut(limit), beside) {
            Ok(driver) => driver,
            Err(true) => break,
            Err(false) => {
                // On a slow machine, not everything was frozen before the deadline.
                limit = limits(limit.freeze * 5);
                assert!(
                    limit.freeze < WAIT_TIMEOUT,
                    "{number}:{mode}: the session fails"
                );
                continue;
            }
        };
        // The guard thaws, at the end of the connection or at the deadline.
        for volume in &fixture.volumes {
            ProbeWrite::start(&volume.target).goes_on();
            // It is not frozen again.
            ProbeWrite::start(&volume.target).goes_on();
        }
        driver.kill();
        ended();
        number += 1;
    }
    assert!(number > 15, "only {number} effects and steps were met");
}

fn each_step_of_the_driver(mode: &str) {
    let fixture = Fixture::new(&[Ext4, Xfs]);
    let guard_ends = || {
        eventually("its guard's end", || guards(&fixture.state).is_empty());
    };
    each_step(&fixture, mode, None, || {
        guard_ends();
        fixture.guard.sweep().unwrap();
        fixture.assert_all_thawed();
    });
    guard_ends();
    fixture.assert_all_thawed();
}

#[test]
fn a_driver_that_is_killed_before_any_step_leaves_nothing_frozen() {
    each_step_of_the_driver("kill");
}

#[test]
fn a_driver_that_is_killed_after_any_step_leaves_nothing_frozen() {
    each_step_of_the_driver("kill-after");
}

#[test]
fn a_driver_that_is_stopped_after_any_step_leaves_nothing_frozen() {
    each_step_of_the_driver("stop-after");
}

#[test]
fn a_sweep_that_is_killed_at_any_step_is_finished_by_the_next() {
    for mode in ["kill", "kill-after"] {
        let kinds = [Ext4, Xfs];
        let fixture = Fixture::new(&kinds);
        let mut number = 1;
        loop {
            crate::guard::hidden::leave_frozen(&fixture, &kinds);
            for volume in &fixture.volumes {
                crate::guard::fixture::unmount(&volume.target);
            }
            let killed = driver_with(&fixture, number, mode, &Task::Sweep, None).is_ok();
            fixture.guard.sweep().unwrap();
            crate::guard::hidden::assert_free(&fixture);
            for (volume, fs) in fixture.volumes.iter().zip(kinds) {
                fixture.pool.mount(&volume.device, &volume.target, fs, &[]);
            }
            fixture.assert_all_thawed();
            if !killed {
                break;
            }
            number += 1;
        }
        assert!(number > 10, "only {number} effects and steps were met");
    }
}

#[test]
fn volumes_of_a_stopped_driver_and_a_stopped_guard_are_thawed_by_the_sweep_after_the_deadline() {
    let fixture = Fixture::new(&[Ext4]);
    let (driver, guard, writer) = short(|limits| {
        let driver = Driver::start(&fixture, &[Ext4], &Task::Cut(limits), &[]);
        if driver.says("frozen") {
            let guard = fixture.guard_pid().unwrap();
            for pid in [guard, driver.pid()] {
                signal(pid, Signal::SIGSTOP);
                await_stop(pid);
            }
            let writer = ProbeWrite::start(&fixture.volumes[0].target);
            if writer.is_stopped() {
                return Some((driver, guard, writer));
            }
            // It had thawed before.
            signal(guard, Signal::SIGCONT);
        }
        drop(driver);
        eventually("the guard's end", || guards(&fixture.state).is_empty());
        None
    });
    eventually("a sweep that thaws", || {
        fixture.guard.sweep().unwrap() == ["v0"]
    });
    writer.goes_on();
    assert!(
        !fixture.journal_is_empty(),
        "a process that holds the entry might still freeze the file system"
    );
    signal(guard, Signal::SIGCONT);
    drop(driver);
    eventually("the guard's end", || guards(&fixture.state).is_empty());
    assert!(fixture.guard.sweep().unwrap().is_empty());
    fixture.assert_all_thawed();
}
