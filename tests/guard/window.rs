//! The window itself: who stands still, who may look in, and what the verdict says.

use std::fs;
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::unistd::{AccessFlags, access};
use slackwater::cut::guard::MOST_MEMBERS;
use slackwater::host::Freezer;
use slackwater::model::FsType::{self, Btrfs, Ext4, Xfs};

use crate::bench::{
    Bench, SWITCH, Write_, are_stopped, assert_not_expedited, await_stop, eventually_within,
    freeze_by_hand, guard_of, guards, is_expedited, limits, long, member, short, signal, switch,
    thaw,
};
use crate::scratch::{said, text, try_run};

const ALL: [FsType; 3] = [Ext4, Xfs, Btrfs];

#[test]
fn what_is_frozen_stands_still_until_its_own_thaw() {
    let bench = Bench::new(&ALL);
    let session = bench.begin(&ALL, long());
    session.sync().unwrap();
    session.sync().unwrap();
    // Only prepared.
    Write_::start(&bench.volumes[0].target).goes_on();
    session.freeze().unwrap();
    let writers = bench.writers();
    assert!(are_stopped(&writers));
    for (at, writer) in writers.into_iter().enumerate() {
        assert!(writer.is_stopped(), "{at} waits for its own thaw");
        assert!(session.thaw(at).unwrap(), "{at} was frozen all the time");
        writer.goes_on();
    }
    assert!(!bench.journal_is_empty());
    drop(session);
    assert!(bench.journal_is_empty());
    let again = bench.frozen(&ALL, long());
    assert!(
        (0..3).all(|at| again.thaw(at).unwrap()),
        "the same guard serves again"
    );
    assert_eq!(guards(&bench.state).len(), 1);
}

#[test]
fn many_at_once_are_thawed_from_several_threads() {
    let kinds = [Ext4; 12];
    let bench = Bench::new(&kinds);
    let session = bench.frozen(&kinds, long());
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
    bench.assert_all_thawed();
}

#[test]
fn a_dropped_session_is_thawed() {
    let bench = Bench::new(&[Ext4, Xfs]);
    let session = bench.frozen(&[Ext4, Xfs], long());
    let writer = Write_::start(&bench.volumes[1].target);
    assert!(writer.is_stopped());
    assert!(session.thaw(0).unwrap());
    drop(session);
    assert!(bench.journal_is_empty(), "all is known to be thawed");
    writer.goes_on();
    bench.assert_all_thawed();
}

#[test]
fn a_strangers_thaw_is_noticed() {
    let bench = Bench::new(&ALL);
    let session = bench.frozen(&ALL, long());
    assert!(thaw(&bench.volumes[1].target));
    assert!(session.thaw(0).unwrap());
    assert!(!session.thaw(1).unwrap(), "somebody thawed it early");
    assert!(!session.thaw(1).unwrap(), "and it stays so");
    assert!(session.thaw(2).unwrap());
    drop(session);
    bench.assert_all_thawed();
}

/// FIFREEZE writes back what came after the last sync, and says that all is well.
#[test]
fn what_a_freeze_could_not_write_back_is_told_afterwards() {
    let bench = Bench::new(&[Xfs]);
    let session = bench.begin(&[Xfs], long());
    session.sync().unwrap();
    fill(&bench.pool.pool);
    let data = bench.volumes[0].target.join("data");
    // Into the page cache: the pool has no room for it.
    std::fs::write(data, vec![7; 24 << 20]).unwrap();
    session.freeze().unwrap();
    assert!(session.thaw(0).unwrap(), "it was frozen all the time");
    let error = said(&session.written().unwrap_err());
    assert!(error.contains("write back"), "{error}");
    drop(session);

    let bench = Bench::new(&ALL);
    let session = bench.frozen(&ALL, long());
    for at in 0..ALL.len() {
        assert!(session.thaw(at).unwrap());
    }
    session.written().unwrap();
}

/// To the last block.
fn fill(folder: &std::path::Path) {
    use std::io::Write;
    for (name, piece) in [("fill", 1 << 20), ("more", 4096)] {
        let mut file = std::fs::File::create(folder.join(name)).unwrap();
        while file.write_all(&vec![0; piece]).is_ok() {}
        let _ = file.sync_all();
    }
}

#[test]
fn a_strangers_freeze_is_refused_and_left_alone() {
    let bench = Bench::new(&[Ext4, Ext4]);
    freeze_by_hand(&bench.volumes[1].target);
    let session = bench.begin(&[Ext4, Ext4], long());
    session.sync().unwrap();
    let refused = said(&session.freeze().unwrap_err());
    assert!(refused.contains("EBUSY"), "{refused}");
    assert!(
        refused.contains(text(&bench.volumes[1].device.path)),
        "{refused}"
    );
    Write_::start(&bench.volumes[0].target).goes_on();
    assert!(session.thaw(0).is_err() && session.freeze().is_err() && session.sync().is_err());
    drop(session);
    assert!(bench.journal_is_empty());
    assert!(bench.guard.sweep().unwrap().is_empty());
    assert!(
        thaw(&bench.volumes[1].target),
        "the stranger's freeze stayed"
    );
}

#[test]
fn a_strangers_freeze_is_left_alone_by_who_thaws_for_a_dead_guard() {
    for sent in [Signal::SIGKILL, Signal::SIGSTOP] {
        let bench = Bench::new(&[Ext4, Ext4]);
        freeze_by_hand(&bench.volumes[1].target);
        let session = bench.begin(&[Ext4, Ext4], limits(Duration::from_secs(2)));
        session.freeze().unwrap_err();
        let pid = bench.guard_pid().unwrap();
        signal(pid, sent);
        drop(session);
        signal(pid, Signal::SIGCONT);
        eventually_within("an empty journal", || bench.journal_is_empty());
        Write_::start(&bench.volumes[0].target).goes_on();
        assert!(
            thaw(&bench.volumes[1].target),
            "the stranger's freeze stayed"
        );
    }
}

#[test]
fn at_the_deadline_the_guard_thaws_by_itself() {
    let bench = Bench::new(&ALL);
    // It did what it should, and lives: but where a slow machine has made it late itself.
    let guard = short(|limits| {
        let session = bench.begin(&ALL, limits);
        let guard = bench.guard_pid();
        session.freeze().ok()?;
        let writers = bench.writers();
        writers.into_iter().for_each(Write_::goes_on);
        for at in 0..ALL.len() {
            assert!(!session.thaw(at).unwrap());
        }
        drop(session);
        bench.assert_all_thawed();
        guard.filter(|guard| guards(&bench.state) == [*guard])
    });
    assert!(bench.frozen(&ALL, long()).thaw(0).unwrap());
    assert_eq!(bench.guard_pid(), Some(guard));
}

#[test]
fn nothing_can_be_unmounted_in_the_window() {
    let bench = Bench::new(&ALL);
    let session = bench.frozen(&ALL, long());
    for volume in &bench.volumes {
        let refused = try_run("umount", &[text(&volume.target)]).unwrap_err();
        assert!(refused.contains("busy"), "{refused}");
    }
    for at in 0..ALL.len() {
        assert!(session.thaw(at).unwrap());
    }
    drop(session);
    for volume in &bench.volumes {
        crate::bench::unmount(&volume.target);
    }
}

#[test]
fn a_guard_that_is_killed_or_stopped_in_the_window_is_replaced_by_our_own_hands() {
    for signal_sent in [Signal::SIGKILL, Signal::SIGSTOP] {
        let bench = Bench::new(&ALL);
        let (session, writers) = short(|limits| {
            // A killed one is noticed at once; a stopped one when it's late.
            let limits = match signal_sent {
                Signal::SIGSTOP => limits,
                _ => long(),
            };
            let session = bench.begin(&ALL, limits);
            session.freeze().ok()?;
            let writers = bench.writers();
            are_stopped(&writers).then_some((session, writers))
        });
        let pid = bench.guard_pid().unwrap();
        signal(pid, signal_sent);
        writers.into_iter().for_each(Write_::goes_on);
        for at in 0..ALL.len() {
            assert!(!session.thaw(at).unwrap(), "{signal_sent}");
        }
        drop(session);
        bench.assert_all_thawed();
        eventually_within("its end", || !guards(&bench.state).contains(&pid));
        let again = bench.frozen(&ALL, long());
        assert!(
            (0..3).all(|at| again.thaw(at).unwrap()),
            "a new guard serves"
        );
    }
}

#[test]
fn a_guard_that_is_told_to_end_thaws_first() {
    let bench = Bench::new(&[Xfs]);
    let session = bench.frozen(&[Xfs], long());
    let writer = Write_::start(&bench.volumes[0].target);
    assert!(writer.is_stopped());
    let pid = bench.guard_pid().unwrap();
    signal(pid, Signal::SIGTERM);
    writer.goes_on();
    assert!(!session.thaw(0).unwrap());
    drop(session);
    bench.assert_all_thawed();
    eventually_within("its end", || !guards(&bench.state).contains(&pid));
}

#[test]
fn a_guard_that_is_stopped_before_is_replaced_at_once() {
    let bench = Bench::new(&[Ext4]);
    drop(bench.begin(&[Ext4], long()));
    let pid = bench.guard_pid().unwrap();
    signal(pid, Signal::SIGSTOP);
    await_stop(pid);
    let session = bench.frozen(&[Ext4], long());
    assert!(session.thaw(0).unwrap());
    assert_ne!(bench.guard_pid(), Some(pid));
}

#[test]
fn two_drivers_share_one_guard_and_outlive_each_other() {
    let bench = Bench::new(&[Ext4, Ext4]);
    let first = guard_of(&bench.state);
    let of = |at: usize| vec![member(&bench.pool, "v", &bench.volumes[at], Ext4)];
    let one = first.begin(of(0), long()).unwrap();
    let two = bench.guard.begin(of(1), long()).unwrap();
    let pid = bench.guard_pid();
    assert_eq!(guards(&bench.state).len(), 1);
    one.freeze().unwrap();
    two.freeze().unwrap();
    assert!(one.thaw(0).unwrap());
    drop(one);
    // The guard's parent is gone; the other driver's session goes on.
    drop(first);
    eventually_within("no more connections", || {
        !bench.state.join("guard.sock").exists()
    });
    assert!(two.thaw(0).unwrap());
    drop(two);
    eventually_within("its end", || guards(&bench.state).is_empty());
    let three = bench.guard.begin(of(0), long()).unwrap();
    assert_ne!(bench.guard_pid(), pid);
    three.freeze().unwrap();
    assert!(three.thaw(0).unwrap());
}

#[test]
fn what_can_not_be_is_refused_before() {
    let bench = Bench::new(&[Ext4]);
    let of = |count: usize| {
        (0..count)
            .map(|_| member(&bench.pool, "v", &bench.volumes[0], Ext4))
            .collect::<Vec<_>>()
    };
    let refused = |count| match bench.guard.begin(of(count), long()) {
        Ok(_) => panic!("{count} were not refused"),
        Err(error) => said(&error),
    };
    assert!(refused(0).contains("between 1 and"));
    assert!(refused(MOST_MEMBERS + 1).contains("between 1 and"));
    assert!(refused(2).contains("listed twice"));
    assert!(
        guards(&bench.state).is_empty(),
        "nobody was started for that"
    );
    let session = bench.begin(&[Ext4], long());
    assert!(session.thaw(0).is_err(), "before it's frozen");
    session.freeze().unwrap();
    assert!(session.thaw(1).is_err(), "nobody's number");
    assert!(session.freeze().is_err(), "twice");
    assert!(session.thaw(0).unwrap());
    drop(session);

    let file = bench.pool.root.join("file");
    fs::write(&file, "").unwrap();
    let nowhere = guard_of(&file.join("state"));
    let error = nowhere.begin(of(1), long()).err().unwrap();
    assert!(said(&error).contains(text(&file)), "{}", said(&error));
    let deep = guard_of(&bench.pool.root.join("x".repeat(120)));
    let error = deep.begin(of(1), long()).err().unwrap();
    assert!(
        said(&error).contains("shorter --state-dir"),
        "{}",
        said(&error)
    );
}

#[test]
fn kills_at_any_moment_leave_nothing_frozen_and_no_false_verdict() {
    let kinds = [Ext4, Xfs];
    let bench = Bench::new(&kinds);
    let (mut proven, mut round) = (0, 0u64);
    // From before the sync until long after the thaw: on a slow machine that's a longer time.
    while round < 40 || (proven == 0 && round < 400) {
        let span = 100 << (round / 40);
        let Ok(session) = bench.guard.begin(bench.members(&kinds), long()) else {
            panic!("round {round}: a guard comes up again, always");
        };
        let pid = bench.guard_pid();
        let killer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(round * 37 % span));
            pid.into_iter().for_each(|pid| signal(pid, Signal::SIGKILL));
        });
        let frozen = session.sync().and_then(|()| session.freeze());
        if frozen.is_ok() {
            let writer = Write_::start(&bench.volumes[1].target);
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
        assert!(bench.journal_is_empty(), "round {round}");
        assert!(!thaw(&bench.volumes[0].target) && !thaw(&bench.volumes[1].target));
        round += 1;
    }
    assert!(proven > 0, "some must have come before the kill");
}

/// Other guards turn it off meanwhile: it's seen sooner or later.
#[test]
fn grace_periods_are_expedited_while_something_is_frozen_and_not_afterwards() {
    let is_ours = matches!(switch().as_str(), "0" | "20908");
    if !is_ours || access(SWITCH, AccessFlags::W_OK).is_err() {
        crate::left_out::left_out(&format!(
            "expedited grace periods: {SWITCH} is another's, or can't be written here"
        ));
        return;
    }
    let bench = Bench::new(&[Ext4]);
    eventually_within("it's on in the window", || {
        let session = bench.frozen(&[Ext4], long());
        let on = is_expedited();
        assert!(session.thaw(0).unwrap());
        on
    });
    assert_not_expedited();
}
