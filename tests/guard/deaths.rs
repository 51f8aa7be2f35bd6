//! kill -9 and SIGSTOP of the guard and of the driver at each of their steps.

use std::fs;
use std::time::Duration;

use nix::sys::signal::Signal;
use slackwater::host::Freezer;
use slackwater::host::freezer::FreezeLimits;
use slackwater::model::FsType::{Ext4, Xfs};

use crate::bench::{
    Bench, PATIENCE, Write_, assert_not_expedited, await_stop, eventually_within, guards, limits,
    long, short, signal,
};
use crate::driver::{Driver, GRACE_PERIODS, Sight, Task, was_killed};

/// Steps of the guard, with what has been frozen by then in a session of the usual order.
pub const STEPS: [&str; 10] = [
    "accepted",
    "begun",
    "sync-before",
    "sync-after",
    "expedited",
    "freeze-before",
    "freeze-after",
    "thaw-before",
    "thaw-after",
    "ended",
];

/// The driver goes through its whole session, whatever it meets, and ends; nothing is frozen then.
fn session_with_a_guard_that(meets: &str) {
    let kinds = [Ext4, Xfs];
    let bench = Bench::new(&kinds);
    // A killed one is noticed at once; a stopped one when it's late, unless all was thawed before.
    let is_awaited = meets.ends_with("stop") && !meets.starts_with("ended");
    let limit = match is_awaited {
        true => FreezeLimits {
            sync: Duration::from_secs(5),
            freeze: Duration::from_secs(1),
        },
        false => long(),
    };
    let faults = [("SLACKWATER_GUARD_FAULT", meets)];
    let mut driver = Driver::start(&bench, &kinds, &Task::Cut(limit), &faults);
    driver.go_on();
    let mut words = Vec::new();
    while let Some(word) = driver.word() {
        words.push(word);
    }
    driver.wait();
    // At the last step all was thawed, and said so; in the others the cut is thrown away.
    let is_proven = words.iter().any(|word| word == "[true, true]");
    assert_eq!(is_proven, meets.starts_with("ended"), "{meets}: {words:?}");
    for volume in &bench.volumes {
        Write_::start(&volume.target).goes_on();
    }
    for pid in guards(&bench.state) {
        // A stopped one that nobody needed any more is found by the next session.
        signal(pid, Signal::SIGCONT);
    }
    eventually_within("no guard without a driver", || {
        guards(&bench.state).is_empty()
    });
    bench.guard.sweep().unwrap();
    bench.assert_all_thawed();
    assert_not_expedited();
    let session = bench.frozen(&kinds, crate::bench::long());
    assert!(
        session.thaw(0).unwrap() && session.thaw(1).unwrap(),
        "{meets}"
    );
}

#[test]
fn a_guard_that_is_killed_at_any_step_leaves_nothing_frozen() {
    for step in STEPS {
        session_with_a_guard_that(&format!("{step}:kill"));
    }
}

#[test]
fn only_who_wants_grace_periods_expedited_has_a_guard_that_comes_to_it() {
    let bench = Bench::new(&[Ext4]);
    for (how, comes_to_it) in [("expedited", true), ("normal", false)] {
        let told = [
            ("SLACKWATER_GUARD_FAULT", "expedited:kill"),
            (GRACE_PERIODS, how),
        ];
        let mut driver = Driver::start(&bench, &[Ext4], &Task::Cut(long()), &told);
        driver.go_on();
        let words: Vec<String> = std::iter::from_fn(|| driver.word()).collect();
        driver.wait();
        let is_proven = words.iter().any(|word| word == "[true]");
        assert_eq!(is_proven, !comes_to_it, "{how}: {words:?}");
    }
    bench.assert_all_thawed();
}

#[test]
fn a_guard_that_is_stopped_at_any_step_leaves_nothing_frozen() {
    for step in STEPS {
        session_with_a_guard_that(&format!("{step}:stop"));
    }
}

#[test]
fn a_guard_that_is_killed_or_stopped_at_the_deadline_leaves_nothing_frozen() {
    for act in ["kill", "stop"] {
        let bench = Bench::new(&[Ext4]);
        let meets = format!("deadline:{act}");
        let faults = [("SLACKWATER_GUARD_FAULT", meets.as_str())];
        let mut driver = frozen_shortly(&bench, &faults);
        Write_::start(&bench.volumes[0].target).goes_on();
        driver.go_on();
        assert_eq!(driver.word().as_deref(), Some("[false]"));
        assert!(driver.wait().success());
        bench.assert_all_thawed();
    }
}

#[test]
fn a_guard_that_stops_is_not_waited_for_and_lives_on_while_another_session_relies_on_it() {
    let bench = Bench::new(&[Ext4, Ext4]);
    let mut members = bench.members(&[Ext4, Ext4]);
    let second = members.pop().unwrap();
    let sessions = [members, vec![second]].map(|members| {
        let session = bench.guard.begin(members, long()).unwrap();
        session.sync().unwrap();
        session.freeze().unwrap();
        session
    });
    let guard = bench.guard_pid().unwrap();
    signal(guard, Signal::SIGSTOP);
    await_stop(guard);
    // Its deadline is far away.
    assert!(!sessions[0].thaw(0).unwrap(), "such a cut is not proven");
    Write_::start(&bench.volumes[0].target).goes_on();
    assert!(crate::bench::is_frozen(&bench.volumes[1].target));
    assert_eq!(guards(&bench.state), [guard], "it has a session to keep");
    assert!(!sessions[1].thaw(0).unwrap());
    eventually_within("the end of a guard that no session relies on", || {
        guards(&bench.state).is_empty()
    });
    drop(sessions);
    bench.guard.sweep().unwrap();
    bench.assert_all_thawed();
}

#[test]
fn the_guard_thaws_after_the_longest_freeze_of_a_class_whatever_it_was_asked_for() {
    let bench = Bench::new(&[Ext4]);
    let session = bench.frozen(&[Ext4], limits(Duration::from_secs(3000)));
    Write_::start(&bench.volumes[0].target).goes_on();
    assert!(!session.thaw(0).unwrap());
}

/// A driver that has frozen a volume, for a short time.
fn frozen_shortly(bench: &Bench, faults: &[(&str, &str)]) -> Driver {
    short(|limits| {
        let driver = Driver::start(bench, &[Ext4], &Task::Cut(limits), faults);
        if driver.says("frozen") {
            return Some(driver);
        }
        drop(driver);
        eventually_within("the guard's end", || guards(&bench.state).is_empty());
        None
    })
}

/// A driver that meets a fault at its n-th effect or step, with a guard that others have started
/// if `beside` says so. `Err` if it came to its end instead: whether its task is done.
fn driver_with(
    bench: &Bench,
    number: u32,
    mode: &str,
    task: &Task,
    beside: Option<Sight>,
) -> Result<Driver, bool> {
    let fault = format!("{number}:{mode}");
    let faults = [("SLACKWATER_FAULT", fault.as_str())];
    let mut driver = Driver::beside(bench, &[Ext4, Xfs], task, &faults, beside);
    driver.go_on();
    if mode.starts_with("stop") {
        let mut state = String::new();
        eventually_within("a stop or an end", || {
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

/// A driver that meets a fault at each of its effects and steps in turn; after each, `ended`.
pub fn each_step(bench: &Bench, mode: &str, beside: Option<Sight>, ended: impl Fn()) {
    let mut limit = if mode.starts_with("stop") {
        limits(Duration::from_millis(700))
    } else {
        long()
    };
    let mut number = 1;
    loop {
        let mut driver = match driver_with(bench, number, mode, &Task::Cut(limit), beside) {
            Ok(driver) => driver,
            Err(true) => break,
            Err(false) => {
                // It's a slow machine: not all was frozen before the deadline.
                limit = limits(limit.freeze * 5);
                assert!(limit.freeze < PATIENCE, "{number}:{mode}: it fails");
                continue;
            }
        };
        // The guard thaws, at the end of the connection or at the deadline.
        for volume in &bench.volumes {
            Write_::start(&volume.target).goes_on();
            // Nor is it frozen again.
            Write_::start(&volume.target).goes_on();
        }
        driver.kill();
        ended();
        number += 1;
    }
    assert!(number > 15, "only {number} effects and steps were met");
}

fn each_step_of_the_driver(mode: &str) {
    let bench = Bench::new(&[Ext4, Xfs]);
    let guard_ends = || {
        eventually_within("its guard's end", || guards(&bench.state).is_empty());
    };
    each_step(&bench, mode, None, || {
        guard_ends();
        bench.guard.sweep().unwrap();
        bench.assert_all_thawed();
    });
    guard_ends();
    bench.assert_all_thawed();
}

#[test]
fn a_driver_that_is_killed_before_any_step_leaves_nothing_frozen() {
    each_step_of_the_driver("kill-before");
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
    for mode in ["kill-before", "kill-after"] {
        let kinds = [Ext4, Xfs];
        let bench = Bench::new(&kinds);
        let mut number = 1;
        loop {
            crate::hidden::leave_frozen(&bench, &kinds);
            for volume in &bench.volumes {
                crate::bench::unmount(&volume.target);
            }
            let killed = driver_with(&bench, number, mode, &Task::Sweep, None).is_ok();
            bench.guard.sweep().unwrap();
            crate::hidden::assert_free(&bench);
            for (volume, fs) in bench.volumes.iter().zip(kinds) {
                bench.pool.mount(&volume.device, &volume.target, fs, &[]);
            }
            bench.assert_all_thawed();
            if !killed {
                break;
            }
            number += 1;
        }
        assert!(number > 10, "only {number} effects and steps were met");
    }
}

#[test]
fn both_stopped_are_thawed_by_the_sweep_after_the_deadline() {
    let bench = Bench::new(&[Ext4]);
    let (driver, guard, writer) = short(|limits| {
        let driver = Driver::start(&bench, &[Ext4], &Task::Cut(limits), &[]);
        if driver.says("frozen") {
            let guard = bench.guard_pid().unwrap();
            for pid in [guard, driver.pid()] {
                signal(pid, Signal::SIGSTOP);
                await_stop(pid);
            }
            let writer = Write_::start(&bench.volumes[0].target);
            if writer.is_stopped() {
                return Some((driver, guard, writer));
            }
            // It had thawed before.
            signal(guard, Signal::SIGCONT);
        }
        drop(driver);
        eventually_within("the guard's end", || guards(&bench.state).is_empty());
        None
    });
    eventually_within("a sweep that thaws", || {
        bench.guard.sweep().unwrap() == ["v0"]
    });
    writer.goes_on();
    assert!(
        !bench.journal_is_empty(),
        "who holds it might freeze it yet"
    );
    signal(guard, Signal::SIGCONT);
    drop(driver);
    eventually_within("the guard's end", || guards(&bench.state).is_empty());
    assert!(bench.guard.sweep().unwrap().is_empty());
    bench.assert_all_thawed();
}
