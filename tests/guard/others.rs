//! A guard that others start, as in a cluster, where it's a container beside the driver's: it's
//! only ever asked, and may be out of the driver's sight.

use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::Signal;
use slackwater::cut::guard::GuardClient;
use slackwater::host::freezer::FreezeLimits;
use slackwater::host::linux::seqpacket::{Channel, Listener, MESSAGE};
use slackwater::host::{Freezer, Result};
use slackwater::model::FsType::{Ext4, Xfs};

use crate::bench::{
    Bench, Write_, await_stop, eventually_within, guard_of, guards, is_frozen, limits, long, signal,
};
use crate::deaths::{STEPS, each_step};
use crate::driver::{Driver, Sight, Task};
use crate::scratch::{said, text};

/// `slackwater guard`. Killed when it's dropped.
struct Beside(Child);

impl Beside {
    /// Starts one, with a fault if it's to meet one, and waits until it listens.
    fn start(bench: &Bench, fault: &str) -> Beside {
        let socket = bench.state.join("guard.sock");
        let child = Command::new(env!("CARGO_BIN_EXE_slackwater"))
            .args(["guard", "--socket", text(&socket)])
            .args(["--state-dir", text(&bench.state)])
            .env("SLACKWATER_GUARD_FAULT", fault)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        eventually_within("a guard that listens", || {
            Channel::connect(&socket).is_ok_and(|channel| channel.is_some())
        });
        Beside(child)
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    fn kill(&mut self) {
        signal(self.pid(), Signal::SIGKILL);
        self.0.wait().unwrap();
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        self.kill();
    }
}

fn asked(bench: &Bench) -> GuardClient {
    guard_of(&bench.state).started_by_others()
}

fn told(outcome: Result<impl Sized>) -> String {
    outcome.err().map_or_else(String::new, |error| said(&error))
}

/// Answers as a guard of a release with another protocol does, for a while. It is this process: a
/// driver that kills it ends the test.
fn of_another_protocol(bench: &Bench, time: Duration) -> std::thread::JoinHandle<usize> {
    std::fs::create_dir_all(&bench.state).unwrap();
    let socket = bench.state.join("guard.sock");
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
            let mut bytes = [0; MESSAGE];
            if let Ok(Some(_)) = channel.receive_with_fds(&mut bytes, 200) {
                sessions += 1;
                let mut answer = [0; MESSAGE];
                answer[0] = 2;
                answer[4] = 1;
                let _ = channel.send(&answer);
            }
        }
        std::fs::remove_file(&socket).unwrap();
        sessions
    })
}

#[test]
fn a_guard_of_another_protocol_is_waited_for_and_never_killed() {
    let bench = Bench::new(&[Ext4]);
    let other = of_another_protocol(&bench, Duration::from_secs(1));
    let why = told(asked(&bench).ready());
    assert!(why.contains("does not answer"), "{why}");
    // The driver's own guard takes over once the other one has ended.
    let session = bench.frozen(&[Ext4], long());
    assert!(session.thaw(0).unwrap());
    drop(session);
    assert!(other.join().unwrap() >= 2);
    assert_eq!(guards(&bench.state).len(), 1);
    assert!(bench.journal_is_empty());
}

#[test]
fn a_guard_of_others_is_asked_and_never_started() {
    let bench = Bench::new(&[Ext4]);
    let guard = asked(&bench);
    for said in [
        told(guard.ready()),
        told(guard.begin(bench.members(&[Ext4]), long())),
    ] {
        assert!(
            said.contains("check that its container is running"),
            "{said}"
        );
    }
    assert!(guards(&bench.state).is_empty());
    assert!(bench.journal_is_empty());

    let beside = Beside::start(&bench, "");
    guard.ready().unwrap();
    let session = guard.begin(bench.members(&[Ext4]), long()).unwrap();
    session.sync().unwrap();
    session.freeze().unwrap();
    assert!(is_frozen(&bench.volumes[0].target));
    assert!(session.thaw(0).unwrap());
    drop(session);
    assert_eq!(guards(&bench.state), [beside.pid()], "it's nobody's to end");
    bench.assert_all_thawed();
}

#[test]
fn a_guard_that_is_stopped_is_not_there_however_often_it_is_asked() {
    let bench = Bench::new(&[Ext4]);
    let (guard, beside) = (asked(&bench), Beside::start(&bench, ""));
    guard.ready().unwrap();
    signal(beside.pid(), Signal::SIGSTOP);
    await_stop(beside.pid());
    assert!(told(guard.ready()).contains("does not answer"));
    // As many questions as it lets wait, and more: none of them hangs.
    let socket = bench.state.join("guard.sock");
    let waiting: Vec<_> = (0..100)
        .map(|_| Channel::connect(&socket).unwrap())
        .collect();
    assert!(waiting.iter().any(Option::is_none), "its queue is full");
    assert!(told(guard.ready()).contains("does not answer"));
    drop(waiting);
    signal(beside.pid(), Signal::SIGCONT);
    eventually_within("a guard that goes on", || guard.ready().is_ok());
}

/// The driver goes through its whole session, whatever its guard meets; nothing is frozen then,
/// and the next guard works.
fn session_beside_a_guard_that(meets: &str, sight: Sight) {
    let kinds = [Ext4, Xfs];
    let bench = Bench::new(&kinds);
    let mut beside = Beside::start(&bench, meets);
    // A killed one is noticed at once; a stopped one when it's late, unless all was thawed before.
    let is_awaited = meets.ends_with("stop") && !meets.starts_with("ended");
    let limit = match is_awaited {
        true => FreezeLimits {
            sync: Duration::from_secs(5),
            freeze: Duration::from_secs(1),
        },
        false => long(),
    };
    let mut driver = Driver::beside(&bench, &kinds, &Task::Cut(limit), &[], Some(sight));
    driver.go_on();
    let mut words = Vec::new();
    while let Some(word) = driver.word() {
        words.push(word);
    }
    driver.wait();
    let is_proven = words.iter().any(|word| word == "[true, true]");
    assert_eq!(is_proven, meets.starts_with("ended"), "{meets}: {words:?}");
    for volume in &bench.volumes {
        Write_::start(&volume.target).goes_on();
    }
    // A supervisor that has lost patience.
    beside.kill();
    drop(driver);
    bench.guard.sweep().unwrap();
    bench.assert_all_thawed();
    let _beside = Beside::start(&bench, "");
    let session = asked(&bench).begin(bench.members(&kinds), long()).unwrap();
    session.sync().unwrap();
    session.freeze().unwrap();
    assert!(
        session.thaw(0).unwrap() && session.thaw(1).unwrap(),
        "{meets}"
    );
}

#[test]
fn a_guard_of_others_that_is_killed_at_any_step_leaves_nothing_frozen() {
    for step in STEPS {
        session_beside_a_guard_that(&format!("{step}:kill"), Sight::Seen);
    }
}

#[test]
fn a_guard_of_others_that_is_stopped_at_any_step_leaves_nothing_frozen() {
    for step in STEPS {
        session_beside_a_guard_that(&format!("{step}:stop"), Sight::Seen);
    }
}

/// The driver can't end it, and thaws by itself.
#[test]
fn a_guard_out_of_sight_that_is_stopped_or_killed_leaves_nothing_frozen() {
    for step in ["freeze-before", "freeze-after", "thaw-before"] {
        session_beside_a_guard_that(&format!("{step}:stop"), Sight::Apart);
        session_beside_a_guard_that(&format!("{step}:kill"), Sight::Apart);
    }
}

/// What comes out of a stop long after the driver has given it up must not stay frozen either.
#[test]
fn a_guard_out_of_sight_that_goes_on_later_freezes_nothing_any_more() {
    for step in ["freeze-before", "freeze-after"] {
        let kinds = [Ext4, Xfs];
        let bench = Bench::new(&kinds);
        let beside = Beside::start(&bench, &format!("{step}:stop"));
        let task = Task::Cut(limits(Duration::from_secs(1)));
        let mut driver = Driver::beside(&bench, &kinds, &task, &[], Some(Sight::Apart));
        driver.go_on();
        while driver.word().is_some() {}
        driver.wait();
        for volume in &bench.volumes {
            Write_::start(&volume.target).goes_on();
        }
        signal(beside.pid(), Signal::SIGCONT);
        eventually_within("a guard that is done with it", || {
            bench.guard.sweep().unwrap();
            bench.journal_is_empty()
        });
        bench.assert_all_thawed();
    }
}

fn each_step_of_a_driver_beside(mode: &str, sight: Sight) {
    let bench = Bench::new(&[Ext4, Xfs]);
    let beside = Beside::start(&bench, "");
    each_step(&bench, mode, Some(sight), || {
        eventually_within("an empty journal", || {
            bench.guard.sweep().unwrap();
            bench.journal_is_empty()
        });
    });
    assert_eq!(guards(&bench.state), [beside.pid()]);
    bench.assert_all_thawed();
}

#[test]
fn a_driver_beside_its_guard_that_is_killed_after_any_step_leaves_nothing_frozen() {
    each_step_of_a_driver_beside("kill-after", Sight::Seen);
}

#[test]
fn a_driver_beside_its_guard_that_is_stopped_after_any_step_leaves_nothing_frozen() {
    each_step_of_a_driver_beside("stop-after", Sight::Seen);
}
