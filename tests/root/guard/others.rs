//! A guard that a supervisor starts, as in a cluster, where it runs in a container next to the
//! driver's: the driver only connects to it, and may be unable to see its process.

use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::Signal;
use slackwater::cut::guard::GuardClient;
use slackwater::host::linux::seqpacket::{Channel, Listener, MESSAGE_BYTES};
use slackwater::host::{Freezer, Result};
use slackwater::model::FsType::{Ext4, Xfs};
use slackwater_testkit::eventually;

use crate::guard::deaths::{assert_session_ends, at_each_step, cut_with, each_step};
use crate::guard::driver::{Driver, Sight, Task};
use crate::guard::fixture::{
    Fixture, ProbeWrite, await_stop, guard_of, guards, is_frozen, limits, long, signal,
};
use crate::host_linux::scratch::{error_text, text};

/// `slackwater guard`. It is killed when this is dropped.
struct SupervisedGuard(Child);

impl SupervisedGuard {
    /// Starts one, with an optional fault, and waits until it listens.
    fn start(fixture: &Fixture, fault: &str) -> SupervisedGuard {
        let socket = fixture.state.join("guard.sock");
        let child = Command::new(env!("CARGO_BIN_EXE_slackwater"))
            .args(["guard", "--socket", text(&socket)])
            .args(["--state-dir", text(&fixture.state)])
            .env("SLACKWATER_FAULT", fault)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        eventually("a guard that listens", || {
            Channel::connect(&socket).is_ok_and(|channel| channel.is_some())
        });
        SupervisedGuard(child)
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    fn kill(&mut self) {
        signal(self.pid(), Signal::SIGKILL);
        self.0.wait().unwrap();
    }
}

impl Drop for SupervisedGuard {
    fn drop(&mut self) {
        self.kill();
    }
}

fn asked(fixture: &Fixture) -> GuardClient {
    guard_of(&fixture.state).started_by_others()
}

fn error_of(outcome: Result<impl Sized>) -> String {
    outcome
        .err()
        .map_or_else(String::new, |error| error_text(&error))
}

/// Answers for a while as a guard does that has no version of this driver's protocol. It runs in
/// this process, so a driver that killed it would end the test.
fn of_another_protocol(fixture: &Fixture, time: Duration) -> std::thread::JoinHandle<usize> {
    answering(fixture, time, |_| {
        let mut answer = [0; MESSAGE_BYTES];
        answer[0] = 9;
        answer[4] = 1;
        answer
    })
}

/// Answers the first message of each connection for a while. Returns how many there were.
fn answering(
    fixture: &Fixture,
    time: Duration,
    answer: impl Fn(&[u8; MESSAGE_BYTES]) -> [u8; MESSAGE_BYTES] + Send + 'static,
) -> std::thread::JoinHandle<usize> {
    std::fs::create_dir_all(&fixture.state).unwrap();
    let socket = fixture.state.join("guard.sock");
    let listener = Listener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        let end = std::time::Instant::now() + time;
        let mut sessions = 0;
        while std::time::Instant::now() < end {
            let mut ready = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
            if poll(&mut ready, 10u16).unwrap() == 0 {
                continue;
            }
            let channel = listener.accept().unwrap();
            let mut bytes = [0; MESSAGE_BYTES];
            if let Ok(Some(_)) = channel.receive_with_fds(&mut bytes, 200) {
                sessions += 1;
                let _ = channel.send(&answer(&bytes));
            }
        }
        std::fs::remove_file(&socket).unwrap();
        sessions
    })
}

#[test]
fn a_guard_of_another_protocol_is_waited_for_and_never_killed() {
    let fixture = Fixture::new(&[Ext4]);
    let other = of_another_protocol(&fixture, Duration::from_secs(1));
    let why = error_of(asked(&fixture).ready(false));
    assert!(why.contains("does not answer"), "{why}");
    // The driver's own guard takes over once the other one has ended.
    let session = fixture.frozen(&[Ext4], long());
    assert!(session.thaw(0).unwrap());
    drop(session);
    assert!(other.join().unwrap() >= 2);
    assert_eq!(guards(&fixture.state).len(), 1);
    assert!(fixture.journal_is_empty());
}

/// What a guard of the first release answers: it has version 1, and refuses others with EPROTO.
fn answer_of_version_1(asked: &[u8; MESSAGE_BYTES]) -> [u8; MESSAGE_BYTES] {
    const PING: u8 = 5;
    const PONG: u8 = 5;
    const READY: u8 = 1;
    let mut answer = [0; MESSAGE_BYTES];
    answer[0] = 1;
    match (asked[0], asked[4]) {
        (1, PING) => answer[4] = PONG,
        _ => (answer[4], answer[12]) = (READY, nix::errno::Errno::EPROTO as u8),
    }
    answer
}

#[test]
fn a_guard_of_the_first_release_is_used_unless_a_device_must_be_suspended() {
    let fixture = Fixture::new(&[Ext4]);
    let first = answering(&fixture, Duration::from_secs(1), answer_of_version_1);
    let guard = asked(&fixture);
    guard.ready(false).unwrap();
    let error = guard.ready(true).unwrap_err();
    assert_eq!(error.code(), Some(nix::errno::Errno::EPROTONOSUPPORT));
    assert!(error_text(&error).contains("update the guard"));
    assert_eq!(first.join().unwrap(), 2);
}

#[test]
fn a_supervised_guard_is_used_and_never_started() {
    let fixture = Fixture::new(&[Ext4]);
    let guard = asked(&fixture);
    for error_text in [
        error_of(guard.ready(false)),
        error_of(guard.begin(fixture.members(&[Ext4]), long())),
    ] {
        assert!(
            error_text.contains("check that its container is running"),
            "{error_text}"
        );
    }
    assert!(guards(&fixture.state).is_empty());
    assert!(fixture.journal_is_empty());

    let beside = SupervisedGuard::start(&fixture, "");
    guard.ready(false).unwrap();
    let session = guard.begin(fixture.members(&[Ext4]), long()).unwrap();
    session.sync().unwrap();
    session.freeze().unwrap();
    assert!(is_frozen(&fixture.volumes[0].target));
    assert!(session.thaw(0).unwrap());
    drop(session);
    assert_eq!(
        guards(&fixture.state),
        [beside.pid()],
        "the driver does not end it"
    );
    fixture.assert_all_thawed();
}

#[test]
fn a_stopped_guard_is_unavailable_however_often_it_is_called() {
    let fixture = Fixture::new(&[Ext4]);
    let (guard, beside) = (asked(&fixture), SupervisedGuard::start(&fixture, ""));
    guard.ready(false).unwrap();
    signal(beside.pid(), Signal::SIGSTOP);
    await_stop(beside.pid());
    assert!(error_of(guard.ready(false)).contains("does not answer"));
    // More connections than its queue holds: none of them hangs.
    let socket = fixture.state.join("guard.sock");
    let waiting: Vec<_> = (0..100)
        .map(|_| Channel::connect(&socket).unwrap())
        .collect();
    assert!(waiting.iter().any(Option::is_none), "its queue is full");
    assert!(error_of(guard.ready(false)).contains("does not answer"));
    drop(waiting);
    signal(beside.pid(), Signal::SIGCONT);
    eventually("a guard that continues", || guard.ready(false).is_ok());
}

/// After the session, nothing is frozen, and the next guard works.
fn session_beside_a_guard_that(meets: &str, sight: Sight) {
    let kinds = [Ext4, Xfs];
    let fixture = Fixture::new(&kinds);
    let mut beside = SupervisedGuard::start(&fixture, meets);
    let mut driver = Driver::beside(&fixture, &kinds, &cut_with(meets), &[], Some(sight));
    assert_session_ends(&mut driver, &fixture, meets);
    // A supervisor that restarts the guard.
    beside.kill();
    drop(driver);
    fixture.guard.sweep().unwrap();
    fixture.assert_all_thawed();
    let _beside = SupervisedGuard::start(&fixture, "");
    let session = asked(&fixture)
        .begin(fixture.members(&kinds), long())
        .unwrap();
    session.sync().unwrap();
    session.freeze().unwrap();
    assert!(
        session.thaw(0).unwrap() && session.thaw(1).unwrap(),
        "{meets}"
    );
}

#[test]
fn a_supervised_guard_that_is_killed_at_any_step_leaves_nothing_frozen() {
    for fault in at_each_step("kill") {
        session_beside_a_guard_that(&fault, Sight::Seen);
    }
}

#[test]
fn a_supervised_guard_that_is_stopped_at_any_step_leaves_nothing_frozen() {
    for fault in at_each_step("stop") {
        session_beside_a_guard_that(&fault, Sight::Seen);
    }
}

/// The driver cannot kill it, and thaws by itself.
#[test]
fn a_guard_in_another_pid_namespace_that_is_stopped_or_killed_leaves_nothing_frozen() {
    for fault in [
        "guard.freeze:stop",
        "guard.freeze:kill",
        "guard.freeze:stop-after",
        "guard.freeze:kill-after",
        "guard.thaw:stop",
        "guard.thaw:kill",
    ] {
        session_beside_a_guard_that(fault, Sight::Apart);
    }
}

/// A freeze that completes in a continued guard, long after the driver has given it up, must not
/// stay either.
#[test]
fn a_guard_in_another_pid_namespace_that_continues_later_freezes_nothing() {
    for fault in ["guard.freeze:stop", "guard.freeze:stop-after"] {
        let kinds = [Ext4, Xfs];
        let fixture = Fixture::new(&kinds);
        let beside = SupervisedGuard::start(&fixture, fault);
        let task = Task::Cut(limits(Duration::from_secs(1)));
        let mut driver = Driver::beside(&fixture, &kinds, &task, &[], Some(Sight::Apart));
        driver.run();
        for volume in &fixture.volumes {
            ProbeWrite::start(&volume.target).goes_on();
        }
        signal(beside.pid(), Signal::SIGCONT);
        eventually("a guard that has finished the session", || {
            fixture.guard.sweep().unwrap();
            fixture.journal_is_empty()
        });
        fixture.assert_all_thawed();
    }
}

fn each_step_of_a_driver_beside(mode: &str, sight: Sight) {
    let fixture = Fixture::new(&[Ext4, Xfs]);
    let beside = SupervisedGuard::start(&fixture, "");
    each_step(&fixture, mode, Some(sight), || {
        eventually("an empty journal", || {
            fixture.guard.sweep().unwrap();
            fixture.journal_is_empty()
        });
    });
    assert_eq!(guards(&fixture.state), [beside.pid()]);
    fixture.assert_all_thawed();
}

#[test]
fn a_driver_with_a_supervised_guard_that_is_killed_after_any_step_leaves_nothing_frozen() {
    each_step_of_a_driver_beside("kill-after", Sight::Seen);
}

#[test]
fn a_driver_with_a_supervised_guard_that_is_stopped_after_any_step_leaves_nothing_frozen() {
    each_step_of_a_driver_beside("stop-after", Sight::Seen);
}
