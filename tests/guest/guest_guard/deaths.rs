//! kill -9 and SIGSTOP of the guard at each step of a session, and the sweep after the driver has
//! died, too.

use std::fs;
use std::time::Duration;

use nix::sys::signal::Signal;
use slackwater::host::freezer::FreezeLimits;
use slackwater::host::{Freezer, Host};
use slackwater::model::FsType::{Btrfs, Ext4, Xfs};
use slackwater_testkit::guest::in_guest;
use slackwater_testkit::{eventually, run};

use super::driver::Driver;
use super::fixture::{DISKS, Fixture, ProbeWrite, await_state, guards, long, signal, text};

/// How many steps come before the session has begun: a driver without a guard waits for another one,
/// which here fails in the same way.
const BEFORE: usize = 2;

/// The steps of the guard, with a fault before or after each.
fn at_each_step(mode: &str) -> [String; 14] {
    [
        ("accepted", ""),
        ("begun", ""),
        ("sync", ""),
        ("sync", "-after"),
        ("expedited", ""),
        ("freeze", ""),
        ("freeze", "-after"),
        ("suspend", ""),
        ("suspend", "-after"),
        ("resume", ""),
        ("resume", "-after"),
        ("thaw", ""),
        ("thaw", "-after"),
        ("ended", ""),
    ]
    .map(|(step, after)| format!("guard.{step}:{mode}{after}"))
}

fn await_no_guard() {
    for pid in guards() {
        // A guard that the driver had no need to kill.
        signal(pid, Signal::SIGCONT);
    }
    eventually("no guard without a driver", || guards().is_empty());
}

fn assert_usable(fixture: &Fixture, after: &str) {
    fixture.assert_all_free(after);
    let session = fixture.frozen();
    assert!(
        session.thaw(0).unwrap() && session.thaw(1).unwrap(),
        "{after}"
    );
}

/// The driver runs its whole session, whatever happens to the guard.
fn sessions_with_a_guard_that(mode: &str) {
    let fixture = Fixture::new(&[Some(Ext4), None]);
    for fault in &at_each_step(mode)[BEFORE..] {
        // A killed guard is detected at once; a stopped one when it is late.
        let limits = match mode {
            "stop" => FreezeLimits {
                sync: Duration::from_secs(5),
                freeze: Duration::from_secs(1),
            },
            _ => long(),
        };
        let lines = Driver::start(&fixture, limits, fault).run();
        let is_proven = lines.iter().any(|line| line == "[true, true]");
        // At the last step, everything was resumed, thawed and reported.
        assert_eq!(is_proven, fault.contains("ended"), "{fault}: {lines:?}");
        fixture.writers().into_iter().for_each(ProbeWrite::goes_on);
        await_no_guard();
        fixture.guard.sweep().unwrap();
        assert_usable(&fixture, fault);
        fixture.guard.stop_guard();
    }
}

#[test]
fn a_guard_that_is_killed_at_any_step_leaves_nothing_suspended() {
    let test = "guest_guard::deaths::a_guard_that_is_killed_at_any_step_leaves_nothing_suspended";
    in_guest(test, &DISKS, || sessions_with_a_guard_that("kill"));
}

#[test]
fn a_guard_that_is_stopped_at_any_step_leaves_nothing_suspended() {
    let test = "guest_guard::deaths::a_guard_that_is_stopped_at_any_step_leaves_nothing_suspended";
    in_guest(test, &DISKS, || sessions_with_a_guard_that("stop"));
}

/// Stops the guard at a step, and kills first the driver and then the guard.
fn leave_at(fixture: &Fixture, fault: &str) {
    let mut driver = Driver::start(fixture, long(), fault);
    eventually("a guard", || !guards().is_empty());
    driver.go_on();
    let guard = fixture.guard_pid();
    await_state(guard, 'T');
    driver.kill();
    signal(guard, Signal::SIGKILL);
    eventually("the guard's end", || guards().is_empty());
}

#[test]
fn a_sweep_resumes_and_thaws_what_is_left_at_any_step() {
    let test = "guest_guard::deaths::a_sweep_resumes_and_thaws_what_is_left_at_any_step";
    in_guest(test, &DISKS, || {
        let fixture = Fixture::new(&[Some(Xfs), None]);
        for fault in at_each_step("stop") {
            leave_at(&fixture, &fault);
            let suspended = fixture.volumes.iter().filter(|one| one.is_suspended());
            let suspended = suspended.count();
            let expected = match fault.as_str() {
                // The thread of the other volume may have done the same before the stop.
                "guard.suspend:stop" => 0..=1,
                "guard.suspend:stop-after" => 1..=2,
                "guard.resume:stop" => 2..=2,
                "guard.resume:stop-after" => 1..=1,
                // The second volume is resumed by its own order, which did not come.
                "guard.thaw:stop" | "guard.thaw:stop-after" => 1..=1,
                _ => 0..=0,
            };
            assert!(expected.contains(&suspended), "{fault}: {suspended}");
            let swept = fixture.guard.sweep().unwrap();
            assert!(suspended == 0 || !swept.is_empty(), "{fault}: {swept:?}");
            assert_usable(&fixture, &fault);
            fixture.guard.stop_guard();
        }
    });
}

fn leave_frozen(fixture: &Fixture) {
    let mut driver = Driver::start(fixture, long(), "");
    driver.await_word("frozen");
    let guard = fixture.guard_pid();
    signal(guard, Signal::SIGSTOP);
    await_state(guard, 'T');
    driver.kill();
    signal(guard, Signal::SIGKILL);
    eventually("the guard's end", || guards().is_empty());
}

#[test]
fn the_sweep_resumes_the_journalled_devices_and_no_others() {
    let test = "guest_guard::deaths::the_sweep_resumes_the_journalled_devices_and_no_others";
    in_guest(test, &DISKS, || {
        let mut fixture = Fixture::new(&[Some(Ext4), Some(Btrfs), None, None]);
        let foreign = fixture.volumes.pop().unwrap();
        leave_frozen(&fixture);
        run("dmsetup", &["suspend", &foreign.name()]);
        let writers = fixture.writers();
        assert!(writers.iter().all(ProbeWrite::is_stopped));
        assert_eq!(fixture.guard.sweep().unwrap(), ["v0", "v1", "v2"]);
        writers.into_iter().for_each(ProbeWrite::goes_on);
        fixture.assert_all_free("a sweep");
        assert!(foreign.is_suspended());

        // Of another device with the same number, and of another boot.
        leave_frozen(&fixture);
        let folder = fixture.state.join("freezes");
        let entries = fs::read_dir(&folder).unwrap();
        let mut paths = entries.map(|entry| entry.unwrap().path());
        let is_entry = |path: &std::path::PathBuf| path.extension().is_some_and(|it| it == "json");
        let entry = paths.find(is_entry).unwrap();
        let written = fs::read_to_string(&entry).unwrap();
        let boot = fixture.host.boot_id().unwrap().to_string();
        for (from, to) in [
            ("SLACKWATER-test-2", "SLACKWATER-test-9"),
            (&boot, "00000000-0000-0000-0000-000000000001"),
        ] {
            fs::write(&entry, written.replace(from, to)).unwrap();
            fixture.guard.sweep().unwrap();
            assert!(fixture.volumes[2].is_suspended(), "{to}");
        }
        fs::write(&entry, &written).unwrap();
        fixture.guard.sweep().unwrap();
        fixture.assert_all_free("the sweep of the true entry");
    });
}

#[test]
fn a_file_system_that_was_unmounted_while_frozen_is_thawed_through_its_mapped_device() {
    let test = "guest_guard::deaths::a_file_system_that_was_unmounted_while_frozen_is_thawed_through_its_mapped_device";
    in_guest(test, &DISKS, || {
        let fixture = Fixture::new(&[Some(Ext4), Some(Xfs)]);
        leave_frozen(&fixture);
        for volume in &fixture.volumes {
            run("dmsetup", &["resume", &volume.name()]);
            let (folder, _) = volume.mounted.as_ref().unwrap();
            run("umount", &[text(folder)]);
        }
        assert_eq!(fixture.guard.sweep().unwrap(), ["v0", "v1"]);
        assert!(fixture.journal_is_empty());
        for volume in &fixture.volumes {
            let (folder, _) = volume.mounted.as_ref().unwrap();
            let node = format!("/dev/mapper/{}", volume.name());
            run("mount", &[&node, text(folder)]);
        }
        fixture.assert_all_free("a second mount");
    });
}
