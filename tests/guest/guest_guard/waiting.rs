//! A suspend that waits for I/O, because the device below is suspended.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use slackwater::model::FsType::Ext4;
use slackwater_testkit::guest::{self, in_guest};
use slackwater_testkit::{eventually, run};

use super::driver::Driver;
use super::fixture::{
    DISKS, Fixture, ProbeWrite, await_state, create_linear, guards, limits, linear, long,
};

/// Puts a volume onto a device of its own that is suspended, with a write on its way.
fn make_hang(fixture: &Fixture, at: usize) -> Child {
    let (start, bytes) = (768 << 20, 64 << 20);
    create_linear("lower", "lower", &guest::disk("pool"), start, bytes);
    let name = fixture.volumes[at].name();
    let table = linear("/dev/mapper/lower", 0, bytes);
    run("dmsetup", &["load", &name, "--table", &table]);
    run("dmsetup", &["resume", &name]);
    run("dmsetup", &["suspend", "--noflush", "--nolockfs", "lower"]);
    let writer = Command::new("dd")
        .args(["if=/dev/zero", &format!("of=/dev/mapper/{name}")])
        .args(["oflag=direct", "bs=4k", "count=1"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    await_state(writer.id(), 'D');
    writer
}

fn go_on(mut writer: Child) {
    run("dmsetup", &["resume", "lower"]);
    assert!(writer.wait().unwrap().success());
}

#[test]
fn a_suspend_that_hangs_is_interrupted_at_the_deadline() {
    let test = "guest_guard::waiting::a_suspend_that_hangs_is_interrupted_at_the_deadline";
    in_guest(test, &DISKS, || {
        let fixture = Fixture::new(&[Some(Ext4), None]);
        let writer = make_hang(&fixture, 1);
        let session = fixture.begin(limits(Duration::from_secs(1)));
        let guard = guards();
        let error = session.freeze().unwrap_err();
        let error = slackwater::error::chain(&error);
        assert!(
            error.contains("ETIMEDOUT") || error.contains("deadline"),
            "{error}"
        );
        // The other volume continues, and the guard, which is not to blame, too.
        ProbeWrite::start(&fixture.volumes[0]).goes_on();
        drop(session);
        assert!(fixture.journal_is_empty(), "nothing can become suspended");
        assert!(fixture.volumes.iter().all(|one| !one.is_suspended()));
        assert_eq!(guards(), guard);
        go_on(writer);
        fixture.assert_all_free("the deadline");
    });
}

#[test]
fn a_suspend_that_waits_is_interrupted_when_another_member_has_failed() {
    let test =
        "guest_guard::waiting::a_suspend_that_waits_is_interrupted_when_another_member_has_failed";
    in_guest(test, &DISKS, || {
        let fixture = Fixture::new(&[Some(Ext4), None, None]);
        let writer = make_hang(&fixture, 1);
        let mut driver = Driver::start(&fixture, long(), "guard.sync:stop");
        eventually("a guard", || !guards().is_empty());
        let guard = fixture.guard_pid();
        await_state(guard, 'T');
        let failing = &fixture.volumes[2];
        run("dmsetup", &["suspend", &failing.name()]);
        super::fixture::signal(guard, nix::sys::signal::Signal::SIGCONT);
        // The deadline, which interrupts as well, begins later than this.
        let begun = Instant::now();
        let lines = driver.run();
        assert!(begun.elapsed() < long().freeze, "it waited: {lines:?}");
        let refused = lines.iter().any(|line| line.contains("EBUSY"));
        assert!(refused, "{lines:?}");
        assert!(fixture.journal_is_empty(), "nothing can become suspended");
        assert!(failing.is_suspended(), "the foreign suspend stayed");
        assert!(!fixture.volumes[1].is_suspended());
        ProbeWrite::start(&fixture.volumes[0]).goes_on();
        run("dmsetup", &["resume", &failing.name()]);
        go_on(writer);
        fixture.assert_all_free("a failure");
    });
}

#[test]
fn a_guard_that_is_killed_while_a_suspend_waits_leaves_nothing_suspended() {
    let test = "guest_guard::waiting::a_guard_that_is_killed_while_a_suspend_waits_leaves_nothing_suspended";
    in_guest(test, &DISKS, || {
        let fixture = Fixture::new(&[Some(Ext4), None]);
        let writer = make_hang(&fixture, 1);
        let driver = Driver::start(&fixture, long(), "");
        driver.await_word("freezing");
        // The writer of the frozen file system waits; then the suspend of the other volume does.
        eventually("a frozen volume", || fixture.volumes[0].is_suspended());
        let guard = fixture.guard_pid();
        super::fixture::signal(guard, nix::sys::signal::Signal::SIGKILL);
        eventually("the guard's end", || !guards().contains(&guard));
        let failed = driver.as_str().unwrap();
        assert!(failed.contains("failed"), "{failed}");
        ProbeWrite::start(&fixture.volumes[0]).goes_on();
        assert!(!fixture.volumes[1].is_suspended());
        go_on(writer);
        fixture.assert_all_free("a killed guard");
    });
}
