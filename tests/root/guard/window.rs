//! The freeze window: which writers are blocked, which accesses work, and the result of the thaw.

use std::fs;
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::unistd::{AccessFlags, access};
use slackwater::cut::guard::MAX_MEMBERS;
use slackwater::host::Freezer;
use slackwater::model::FsType::{self, Btrfs, Ext4, Xfs};
use slackwater_testkit::eventually;

use crate::guard::fixture::{
    Fixture, ProbeWrite, SWITCH, are_stopped, assert_not_expedited, await_stop, freeze_by_hand,
    guard_of, guards, is_expedited, limits, long, member, short, signal, switch, thaw,
};
use crate::host_linux::scratch::{error_text, text, try_run};

const ALL: [FsType; 3] = [Ext4, Xfs, Btrfs];

#[test]
fn a_frozen_file_system_blocks_writers_until_its_own_thaw() {
    let fixture = Fixture::new(&ALL);
    let session = fixture.begin(&ALL, long());
    session.sync().unwrap();
    session.sync().unwrap();
    // Only prepared.
    ProbeWrite::start(&fixture.volumes[0].target).goes_on();
    session.freeze().unwrap();
    let writers = fixture.writers();
    assert!(are_stopped(&writers));
    for (at, writer) in writers.into_iter().enumerate() {
        assert!(writer.is_stopped(), "{at} waits for its own thaw");
        assert!(session.thaw(at).unwrap(), "{at} was frozen all the time");
        writer.goes_on();
    }
    assert!(!fixture.journal_is_empty());
    drop(session);
    // The guard removes the entry after the end of the connection.
    eventually("an empty journal", || fixture.journal_is_empty());
    let again = fixture.frozen(&ALL, long());
    assert!(
        (0..3).all(|at| again.thaw(at).unwrap()),
        "the same guard serves again"
    );
    assert_eq!(guards(&fixture.state).len(), 1);
}

#[test]
fn many_file_systems_are_thawed_at_once_from_several_threads() {
    let kinds = [Ext4; 12];
    let fixture = Fixture::new(&kinds);
    let session = fixture.frozen(&kinds, long());
    let verdicts: Vec<bool> = std::thread::scope(|scope| {
        let session = &session;
        let threads: Vec<_> = (0..kinds.len())
            .map(|at| scope.spawn(move || session.thaw(at).unwrap()))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert_eq!(verdicts, vec![true; kinds.len()]);
    drop(session);
    fixture.assert_all_thawed();
}

#[test]
fn a_dropped_session_is_thawed() {
    let fixture = Fixture::new(&[Ext4, Xfs]);
    let session = fixture.frozen(&[Ext4, Xfs], long());
    let writer = ProbeWrite::start(&fixture.volumes[1].target);
    assert!(writer.is_stopped());
    assert!(session.thaw(0).unwrap());
    drop(session);
    assert!(
        fixture.journal_is_empty(),
        "everything is known to be thawed"
    );
    writer.goes_on();
    fixture.assert_all_thawed();
}

#[test]
fn a_foreign_thaw_is_detected() {
    let fixture = Fixture::new(&ALL);
    let session = fixture.frozen(&ALL, long());
    assert!(thaw(&fixture.volumes[1].target));
    assert!(session.thaw(0).unwrap());
    assert!(
        !session.thaw(1).unwrap(),
        "a foreign process thawed it early"
    );
    assert!(!session.thaw(1).unwrap(), "and the result does not change");
    assert!(session.thaw(2).unwrap());
    drop(session);
    fixture.assert_all_thawed();
}

/// FIFREEZE writes back data that came after the last sync, and reports success.
#[test]
fn a_failed_write_back_of_a_freeze_is_reported_afterwards() {
    let fixture = Fixture::new(&[Xfs]);
    let session = fixture.begin(&[Xfs], long());
    session.sync().unwrap();
    fill(&fixture.pool.pool);
    let data = fixture.volumes[0].target.join("data");
    // Into the page cache: the pool has no space for it.
    std::fs::write(data, vec![7; 24 << 20]).unwrap();
    session.freeze().unwrap();
    assert!(session.thaw(0).unwrap(), "it was frozen the whole time");
    let error = error_text(&session.written().unwrap_err());
    assert!(error.contains("write back"), "{error}");
    drop(session);

    let fixture = Fixture::new(&ALL);
    let session = fixture.frozen(&ALL, long());
    for at in 0..ALL.len() {
        assert!(session.thaw(at).unwrap());
    }
    session.written().unwrap();
}

/// Fills it to the last block.
fn fill(folder: &std::path::Path) {
    use std::io::Write;
    for (name, piece) in [("fill", 1 << 20), ("more", 4096)] {
        let mut file = std::fs::File::create(folder.join(name)).unwrap();
        while file.write_all(&vec![0; piece]).is_ok() {}
        let _ = file.sync_all();
    }
}

#[test]
fn a_foreign_freeze_is_refused_and_left_alone() {
    let fixture = Fixture::new(&[Ext4, Ext4]);
    freeze_by_hand(&fixture.volumes[1].target);
    let session = fixture.begin(&[Ext4, Ext4], long());
    session.sync().unwrap();
    let refused = error_text(&session.freeze().unwrap_err());
    assert!(refused.contains("EBUSY"), "{refused}");
    assert!(
        refused.contains(text(&fixture.volumes[1].device.path)),
        "{refused}"
    );
    ProbeWrite::start(&fixture.volumes[0].target).goes_on();
    assert!(session.thaw(0).is_err() && session.freeze().is_err() && session.sync().is_err());
    drop(session);
    assert!(fixture.journal_is_empty());
    assert!(fixture.guard.sweep().unwrap().is_empty());
    assert!(
        thaw(&fixture.volumes[1].target),
        "the foreign freeze stayed"
    );
}

#[test]
fn a_foreign_freeze_is_left_alone_when_the_driver_thaws_for_a_dead_guard() {
    for sent in [Signal::SIGKILL, Signal::SIGSTOP] {
        let fixture = Fixture::new(&[Ext4, Ext4]);
        freeze_by_hand(&fixture.volumes[1].target);
        let session = fixture.begin(&[Ext4, Ext4], limits(Duration::from_secs(2)));
        session.freeze().unwrap_err();
        let pid = fixture.guard_pid().unwrap();
        signal(pid, sent);
        drop(session);
        signal(pid, Signal::SIGCONT);
        eventually("an empty journal", || fixture.journal_is_empty());
        ProbeWrite::start(&fixture.volumes[0].target).goes_on();
        assert!(
            thaw(&fixture.volumes[1].target),
            "the foreign freeze stayed"
        );
    }
}

#[test]
fn at_the_deadline_the_guard_thaws_by_itself() {
    let fixture = Fixture::new(&ALL);
    // The guard worked correctly and keeps running, unless a slow machine has made it late.
    let guard = short(|limits| {
        let session = fixture.begin(&ALL, limits);
        let guard = fixture.guard_pid();
        session.freeze().ok()?;
        let writers = fixture.writers();
        writers.into_iter().for_each(ProbeWrite::goes_on);
        for at in 0..ALL.len() {
            assert!(!session.thaw(at).unwrap());
        }
        drop(session);
        fixture.assert_all_thawed();
        guard.filter(|guard| guards(&fixture.state) == [*guard])
    });
    assert!(fixture.frozen(&ALL, long()).thaw(0).unwrap());
    assert_eq!(fixture.guard_pid(), Some(guard));
}

#[test]
fn nothing_can_be_unmounted_in_the_window() {
    let fixture = Fixture::new(&ALL);
    let session = fixture.frozen(&ALL, long());
    for volume in &fixture.volumes {
        let refused = try_run("umount", &[text(&volume.target)]).unwrap_err();
        assert!(refused.contains("busy"), "{refused}");
    }
    for at in 0..ALL.len() {
        assert!(session.thaw(at).unwrap());
    }
    drop(session);
    for volume in &fixture.volumes {
        crate::guard::fixture::unmount(&volume.target);
    }
}

#[test]
fn a_guard_that_is_killed_or_stopped_in_the_window_is_replaced_by_the_driver_itself() {
    for signal_sent in [Signal::SIGKILL, Signal::SIGSTOP] {
        let fixture = Fixture::new(&ALL);
        let (session, writers) = short(|limits| {
            // A killed guard is detected at once; a stopped one when it is late.
            let limits = match signal_sent {
                Signal::SIGSTOP => limits,
                _ => long(),
            };
            let session = fixture.begin(&ALL, limits);
            session.freeze().ok()?;
            let writers = fixture.writers();
            are_stopped(&writers).then_some((session, writers))
        });
        let pid = fixture.guard_pid().unwrap();
        signal(pid, signal_sent);
        writers.into_iter().for_each(ProbeWrite::goes_on);
        for at in 0..ALL.len() {
            assert!(!session.thaw(at).unwrap(), "{signal_sent}");
        }
        drop(session);
        fixture.assert_all_thawed();
        eventually("its end", || !guards(&fixture.state).contains(&pid));
        let again = fixture.frozen(&ALL, long());
        assert!(
            (0..3).all(|at| again.thaw(at).unwrap()),
            "a new guard serves"
        );
    }
}

#[test]
fn a_guard_that_receives_a_signal_thaws_first() {
    let fixture = Fixture::new(&[Xfs]);
    let session = fixture.frozen(&[Xfs], long());
    let writer = ProbeWrite::start(&fixture.volumes[0].target);
    assert!(writer.is_stopped());
    let pid = fixture.guard_pid().unwrap();
    signal(pid, Signal::SIGTERM);
    writer.goes_on();
    assert!(!session.thaw(0).unwrap());
    drop(session);
    fixture.assert_all_thawed();
    eventually("its end", || !guards(&fixture.state).contains(&pid));
}

#[test]
fn a_guard_that_is_stopped_before_is_replaced_at_once() {
    let fixture = Fixture::new(&[Ext4]);
    drop(fixture.begin(&[Ext4], long()));
    let pid = fixture.guard_pid().unwrap();
    signal(pid, Signal::SIGSTOP);
    await_stop(pid);
    let session = fixture.frozen(&[Ext4], long());
    assert!(session.thaw(0).unwrap());
    assert_ne!(fixture.guard_pid(), Some(pid));
}

#[test]
fn two_drivers_share_one_guard_and_outlive_each_other() {
    let fixture = Fixture::new(&[Ext4, Ext4]);
    let first = guard_of(&fixture.state);
    let of = |at: usize| vec![member(&fixture.pool, "v", &fixture.volumes[at], Ext4)];
    let one = first.begin(of(0), long()).unwrap();
    let two = fixture.guard.begin(of(1), long()).unwrap();
    let pid = fixture.guard_pid();
    assert_eq!(guards(&fixture.state).len(), 1);
    one.freeze().unwrap();
    two.freeze().unwrap();
    assert!(one.thaw(0).unwrap());
    drop(one);
    // The guard's parent has ended; the other driver's session continues.
    drop(first);
    eventually("no more connections", || {
        !fixture.state.join("guard.sock").exists()
    });
    assert!(two.thaw(0).unwrap());
    drop(two);
    eventually("its end", || guards(&fixture.state).is_empty());
    let three = fixture.guard.begin(of(0), long()).unwrap();
    assert_ne!(fixture.guard_pid(), pid);
    three.freeze().unwrap();
    assert!(three.thaw(0).unwrap());
}

#[test]
fn invalid_sessions_are_refused_before_anything_is_frozen() {
    let fixture = Fixture::new(&[Ext4]);
    let of = |count: usize| {
        (0..count)
            .map(|_| member(&fixture.pool, "v", &fixture.volumes[0], Ext4))
            .collect::<Vec<_>>()
    };
    let refused = |count| match fixture.guard.begin(of(count), long()) {
        Ok(_) => panic!("{count} were not refused"),
        Err(error) => error_text(&error),
    };
    assert!(refused(0).contains("between 1 and"));
    assert!(refused(MAX_MEMBERS + 1).contains("between 1 and"));
    assert!(refused(2).contains("listed twice"));
    assert!(
        guards(&fixture.state).is_empty(),
        "no guard was started for that"
    );
    let session = fixture.begin(&[Ext4], long());
    assert!(session.thaw(0).is_err(), "before it is frozen");
    session.freeze().unwrap();
    assert!(session.thaw(1).is_err(), "nobody's number");
    assert!(session.freeze().is_err(), "twice");
    assert!(session.thaw(0).unwrap());
    drop(session);

    let file = fixture.pool.root.join("file");
    fs::write(&file, "").unwrap();
    let nowhere = guard_of(&file.join("state"));
    let error = nowhere.begin(of(1), long()).err().unwrap();
    assert!(
        error_text(&error).contains(text(&file)),
        "{}",
        error_text(&error)
    );
    let deep = guard_of(&fixture.pool.root.join("x".repeat(120)));
    let error = deep.begin(of(1), long()).err().unwrap();
    assert!(
        error_text(&error).contains("shorter --state-dir"),
        "{}",
        error_text(&error)
    );
}

#[test]
fn kills_at_any_moment_leave_nothing_frozen_and_no_false_verdict() {
    let kinds = [Ext4, Xfs];
    let fixture = Fixture::new(&kinds);
    let (mut proven, mut round) = (0, 0u64);
    // From before the sync until long after the thaw; on a slow machine, this takes longer.
    while round < 40 || (proven == 0 && round < 400) {
        let span = 100 << (round / 40);
        let Ok(session) = fixture.guard.begin(fixture.members(&kinds), long()) else {
            panic!("round {round}: a guard always starts again");
        };
        let pid = fixture.guard_pid();
        let killer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(round * 37 % span));
            pid.into_iter().for_each(|pid| signal(pid, Signal::SIGKILL));
        });
        let frozen = session.sync().and_then(|()| session.freeze());
        if frozen.is_ok() {
            let writer = ProbeWrite::start(&fixture.volumes[1].target);
            std::thread::sleep(Duration::from_millis(round % 4 * 10));
            let went_on = writer.has_gone_on();
            let verdict = session.thaw(1).unwrap();
            assert!(
                !(went_on && verdict),
                "round {round}: it was not frozen to the end"
            );
            if !went_on {
                writer.goes_on();
            }
            proven += u32::from(session.thaw(0).unwrap() && verdict);
        }
        drop(session);
        killer.join().unwrap();
        assert!(fixture.journal_is_empty(), "round {round}");
        assert!(!thaw(&fixture.volumes[0].target) && !thaw(&fixture.volumes[1].target));
        round += 1;
    }
    assert!(proven > 0, "some must have come before the kill");
}

/// Guards of other tests turn it off, too, so the test tries again until it is on.
#[test]
fn grace_periods_are_expedited_while_something_is_frozen_and_not_afterwards() {
    let is_ours = matches!(switch().as_str(), "0" | "20908");
    if !is_ours || access(SWITCH, AccessFlags::W_OK).is_err() {
        slackwater_testkit::left_out(&format!(
            "expedited grace periods: {SWITCH} is set by another program, or cannot be written here"
        ));
        return;
    }
    let fixture = Fixture::new(&[Ext4]);
    eventually("the switch is on in the window", || {
        let session = fixture.frozen(&[Ext4], long());
        let on = is_expedited();
        assert!(session.thaw(0).unwrap());
        on
    });
    assert_not_expedited();
}
