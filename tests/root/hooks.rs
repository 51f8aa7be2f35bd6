//! Hooks as real programs: how they quiesce, release and misbehave, and the consequences for a cut
//! and for the driver.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test panics where an expectation fails, and works on its own files"
)]

mod death;
mod driver;
mod hook_folder;
mod kill;

use std::fs;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

use slackwater::error::Error;
use slackwater::hook::{HookParts, HookTarget, Hooks};
use slackwater::model::SharedVolume;

use hook_folder::*;

/// Quiesces, holds until its stdin ends, and releases.
pub const GOOD: &str = "echo quiesced >> log; echo READY; cat > /dev/null; echo released >> log";

#[test]
fn a_session_holds_from_ready_until_the_end_of_its_stdin() {
    let hook_folder = HookFolder::new();
    let hooks = local(vec![hook_folder.hook("a", GOOD)]);
    let mut held = quiesce(&hooks, &["a"], LONG).unwrap();
    assert_eq!(hook_folder.lines("log"), ["quiesced"]);
    held.verify().unwrap();
    assert_eq!(held.release().unwrap(), None);
    assert_eq!(hook_folder.lines("log"), ["quiesced", "released"]);
}

#[test]
fn sessions_run_in_parallel() {
    let hook_folder = HookFolder::new();
    // Each is ready only once the other one has been started.
    let body = |own: &str, other: &str| {
        format!("touch {own}; while [ ! -e {other} ]; do sleep 0.01; done; {GOOD}")
    };
    let hooks = local(vec![
        hook_folder.hook("a", &body("x", "y")),
        hook_folder.hook("b", &body("y", "x")),
    ]);
    let mut held = quiesce(&hooks, &["a", "b"], LONG).unwrap();
    held.verify().unwrap();
    assert_eq!(held.release().unwrap(), None);
    assert_eq!(hook_folder.read("log").matches("released").count(), 2);
}

#[test]
fn a_session_that_is_dropped_is_released() {
    let hook_folder = HookFolder::new();
    let hooks = local(vec![hook_folder.hook("a", GOOD)]);
    drop(quiesce(&hooks, &["a"], LONG).unwrap());
    assert_eq!(hook_folder.lines("log"), ["quiesced", "released"]);
}

#[test]
fn a_hook_gets_its_deadline_and_only_the_drivers_environment() {
    let hook_folder = HookFolder::new();
    let body = "echo \"$@\" > arguments; env | sort > environment; pwd -P > folder; \
                ps -o pid=,pgid=,sid= -p $$ > ids; readlink /proc/$$/fd/* > open; \
                echo READY; cat > /dev/null";
    let hook = hook_folder.hook_of("a", body, |parts: &mut HookParts| {
        parts.timeout = Some("59500ms".into());
        parts
            .command
            .extend(["--for={seconds}s".into(), "; echo $HOME".into()]);
    });
    // A file that this test has open, a file that the parent of the tests has left open, and an earlier
    // session.
    let _ours = fs::File::open("/proc/self/status").unwrap();
    let (_read, write) = std::io::pipe().unwrap();
    let inherited = nix::unistd::dup(&write).unwrap();
    let other = local(vec![hook_folder.hook("b", GOOD)]);
    let _before = quiesce(&other, &["b"], LONG).unwrap();
    quiesce(&local(vec![hook]), &["a"], LONG)
        .unwrap()
        .release()
        .unwrap();
    assert_eq!(hook_folder.read("arguments"), "--for=60s ; echo $HOME\n");
    let environment = hook_folder.read("environment");
    let names: Vec<_> = environment
        .lines()
        .filter_map(|line| line.split_once('='))
        .collect();
    let ours = [
        "LANG",
        "OLDPWD",
        "PATH",
        "PWD",
        "SLACKWATER_HOOK",
        "SLACKWATER_SECONDS",
        "_",
    ];
    assert!(
        names.iter().all(|(name, _)| ours.contains(name)),
        "{environment}"
    );
    assert!(
        environment.contains("SLACKWATER_HOOK=a\nSLACKWATER_SECONDS=60\n"),
        "{environment}"
    );
    let ids: Vec<_> = hook_folder
        .read("ids")
        .split_whitespace()
        .map(String::from)
        .collect();
    assert_eq!(ids[0], ids[1], "its own process group");
    assert_eq!(ids[0], ids[2], "its own session");
    let open = hook_folder.lines("open");
    let inherited = fs::read_link(format!("/proc/self/fd/{}", inherited.as_raw_fd())).unwrap();
    assert!(
        !open.iter().any(|file| Path::new(file) == inherited),
        "{open:?}"
    );
    // Its standard streams, and the files that the shell itself has opened.
    let own = hook_folder.path("");
    let is_own = |file: &String| file.starts_with("pipe:") || Path::new(file).starts_with(&own);
    assert!(open.len() >= 3 && open.iter().all(is_own), "{open:?}");
}

#[test]
fn one_that_ends_before_it_is_ready_fails_with_its_words_and_the_others_are_released() {
    let hook_folder = HookFolder::new();
    let bad = "while [ \"$(cat log 2>/dev/null)\" != quiesced ]; do sleep 0.01; done; \
               echo 'no  such\tdatabase' >&2; echo NOT READY; exit 3";
    let hooks = local(vec![
        hook_folder.hook("good", GOOD),
        hook_folder.hook("bad", bad),
    ]);
    let error = refused(quiesce(&hooks, &["good", "bad"], LONG));
    assert_eq!(
        error,
        "hook bad did not keep its application quiesced: it exited with exit status: 3 before it \
         printed READY: no such database"
    );
    assert_eq!(hook_folder.lines("log"), ["quiesced", "released"]);
}

#[test]
fn one_that_never_says_ready_fails_at_the_timeout_and_gets_the_reason() {
    let hook_folder = HookFolder::new();
    let silent = "echo waiting for a lock >&2; cat > /dev/null; echo released >> log";
    let hook = hook_folder.hook("a", silent);
    // On a slow machine, it may not have printed anything that early.
    let has_output = [200, 2000, 20_000].iter().any(|millis| {
        let _ = fs::remove_file(hook_folder.path("log"));
        let timeout = Duration::from_millis(*millis);
        let error = refused(quiesce(&local(vec![hook.clone()]), &["a"], timeout));
        let expected = format!("did not print READY within {millis} ms");
        assert!(error.contains(&expected), "{error}");
        assert_eq!(hook_folder.lines("log"), ["released"]);
        error.ends_with(": waiting for a lock")
    });
    assert!(has_output, "its output is in the error");
    // Its own deadline applies as well: at the end of it, it has released by itself.
    let hook = hook_folder.hook_of("b", silent, |parts| parts.timeout = Some("100ms".into()));
    let error = refused(quiesce(&local(vec![hook]), &["b"], LONG));
    assert!(error.contains("within 100 ms"), "{error}");
}

#[test]
fn one_that_dies_while_it_is_to_hold_is_found() {
    let hook_folder = HookFolder::new();
    let body = "echo READY; while [ ! -e die ]; do sleep 0.01; done; echo gone >&2; exit 0";
    let hooks = local(vec![hook_folder.hook("a", body)]);
    let mut held = quiesce(&hooks, &["a"], LONG).unwrap();
    held.verify().unwrap();
    hook_folder.touch("die");
    until("the hook's end", || held.verify().is_err());
    let error = refused(held.verify());
    assert!(error.contains("hook a"), "{error}");
    assert!(
        error.contains("exited with exit status: 0 before the cut was complete: gone"),
        "{error}"
    );
}

#[test]
fn one_that_lives_past_its_own_time_is_not_taken_to_hold() {
    let hook_folder = HookFolder::new();
    let hook = hook_folder.hook_of("a", GOOD, |parts| parts.timeout = Some("1s".into()));
    let hooks = local(vec![hook]);
    let mut held = quiesce(&hooks, &["a"], LONG).unwrap();
    until("its time to pass", || held.verify().is_err());
    let error = refused(held.verify());
    assert!(
        error.contains("hook a") && error.contains("its own deadline (1 s) had passed"),
        "{error}"
    );
    assert_eq!(held.release().unwrap(), None);
    assert_eq!(hook_folder.lines("log"), ["quiesced", "released"]);
}

#[test]
fn one_that_says_at_its_release_that_it_failed_loses_the_level() {
    let hook_folder = HookFolder::new();
    let body = "echo READY; cat > /dev/null; echo connection lost >&2; exit 2";
    let hooks = local(vec![hook_folder.hook("a", body)]);
    let error = quiesce(&hooks, &["a"], LONG)
        .unwrap()
        .release()
        .unwrap_err();
    assert!(matches!(error, Error::QuiesceFailed { .. }), "{error:?}");
    assert!(
        error.to_string().contains(
            "it exited with exit status: 2 during release, so its application may not have stayed \
             quiesced: connection lost"
        ),
        "{error}"
    );
}

#[test]
fn one_that_ignores_its_stdin_is_ended_with_all_that_it_started_and_the_cut_is_good() {
    let hook_folder = HookFolder::new();
    // The second one also ignores SIGTERM.
    let loops = "sleep 1000 & echo $$ $! > pids.$SLACKWATER_HOOK; echo READY; \
                 while :; do sleep 0.05; done";
    for (name, body, how) in [
        ("polite", loops.to_string(), "was terminated by SIGTERM"),
        ("deaf", format!("trap '' TERM; {loops}"), "was killed"),
    ] {
        let hooks = local(vec![hook_folder.hook(name, &body)]).with_grace(GRACE);
        let mut held = quiesce(&hooks, &[name], LONG).unwrap();
        held.verify().unwrap();
        let failure = held.release().unwrap().expect("the failure is reported");
        assert!(
            failure.contains(&format!("hook {name} did not exit within 300 ms")),
            "{failure}"
        );
        assert!(failure.ends_with(how), "{failure}");
        let pids = hook_folder.read(&format!("pids.{name}"));
        assert_eq!(pids.split_whitespace().count(), 2);
        for pid in pids.split_whitespace() {
            until("the hook's end", || !runs(pid));
        }
    }
}

#[test]
fn what_a_session_leaves_behind_in_its_group_is_ended() {
    let hook_folder = HookFolder::new();
    let body = "sleep 1000 > /dev/null 2>&1 & echo $! > pid; echo READY; cat > /dev/null";
    let hooks = local(vec![hook_folder.hook("a", body)]);
    let held = quiesce(&hooks, &["a"], LONG).unwrap();
    let pid = hook_folder.read("pid");
    assert!(runs(&pid));
    assert_eq!(held.release().unwrap(), None);
    until("the hook's end", || !runs(&pid));
}

#[test]
fn ready_is_a_line_among_others_and_much_output_delays_nothing() {
    let hook_folder = HookFolder::new();
    let talk = "yes a line of a program that talks | head -c 300000";
    let body = format!(
        "{talk}; {talk} >&2; printf 'READY?\\nNOT READY\\nrea'; printf 'dy\\n  READY \\r\\n'; \
         {talk}; {talk} >&2; cat > /dev/null; echo released >> log"
    );
    let hooks = local(vec![hook_folder.hook("a", &body)]);
    let held = quiesce(&hooks, &["a"], LONG).unwrap();
    assert_eq!(held.release().unwrap(), None);
    assert_eq!(hook_folder.lines("log"), ["released"]);
    // A line without an end is not a line.
    let half = hook_folder.hook("b", "printf READY; cat > /dev/null");
    let error = refused(quiesce(
        &local(vec![half]),
        &["b"],
        Duration::from_millis(300),
    ));
    assert!(error.contains("did not print READY"), "{error}");
}

#[test]
fn a_program_or_user_that_is_not_there_is_named() {
    let hook_folder = HookFolder::new();
    let mut hook = hook_folder.hook("a", GOOD);
    hook.command = vec!["/nowhere/hold".into()];
    let error = refused(quiesce(&local(vec![hook]), &["a"], LONG));
    assert!(error.contains("hook a"), "{error}");
    assert!(error.contains("start /nowhere/hold: ENOENT"), "{error}");
    let hook = hook_folder.hook_of("b", GOOD, |parts| parts.user = Some("no-such-user".into()));
    // It is looked up before another hook holds its application.
    let good = hook_folder.hook("a", GOOD);
    let error = refused(quiesce(&local(vec![good, hook]), &["a", "b"], LONG));
    assert!(
        error.contains("user \"no-such-user\" does not exist on this machine"),
        "{error}"
    );
    assert_eq!(hook_folder.lines("log"), [""; 0], "nothing ran");
}

#[test]
fn a_hook_runs_as_its_user_with_that_users_groups_alone() {
    let hook_folder = HookFolder::new();
    let body = "id -u > uid; id -g > gid; id -G > groups; env > environment; echo READY; \
                cat > /dev/null";
    let hook = hook_folder.hook_of("a", body, |parts| parts.user = Some("nobody".into()));
    quiesce(&local(vec![hook]), &["a"], LONG)
        .unwrap()
        .release()
        .unwrap();
    let account = nix::unistd::User::from_name("nobody")
        .unwrap()
        .expect("every machine has one");
    assert_eq!(hook_folder.read("uid").trim(), account.uid.to_string());
    assert_eq!(hook_folder.read("gid").trim(), account.gid.to_string());
    assert_eq!(
        hook_folder.read("groups").trim(),
        account.gid.to_string(),
        "none of root's"
    );
    let environment = hook_folder.read("environment");
    assert!(environment.contains("USER=nobody\n"), "{environment}");
}

fn target(id: &str, claim: &str) -> HookTarget {
    HookTarget {
        volume_id: id.into(),
        claim: Some(claim.into()),
        node: None,
    }
}

#[test]
fn hooks_of_several_users_of_a_volume_are_chosen_by_the_class() {
    let hook_folder = HookFolder::new();
    let of = |name: &str, pvc: &str| {
        hook_folder.hook_of(name, GOOD, |parts| {
            (parts.volume, parts.pvc) = (None, Some(pvc.into()));
        })
    };
    let hooks = local(vec![
        of("web", "shop/data"),
        of("db", "shop/*"),
        of("other", "x/*"),
    ]);
    let data = target("1", "shop/data");
    let logs = target("2", "shop/logs");
    let wanted = |targets: &[HookTarget], shared| hooks.wanted(targets, shared).unwrap();
    let both = [data.clone(), logs.clone()];
    assert_eq!(
        wanted(&both, SharedVolume::All),
        ["db", "web"],
        "each hook once, by name"
    );
    assert_eq!(wanted(&both[..1], SharedVolume::One), ["db"]);
    assert_eq!(wanted(&both[..1], SharedVolume::Skip), [""; 0]);
    assert_eq!(
        wanted(&both, SharedVolume::Skip),
        ["db"],
        "it is the only hook of volume 2"
    );
    assert_eq!(
        wanted(&[target("3", "shop2/data")], SharedVolume::All),
        [""; 0]
    );
    let error = hooks.wanted(&both, SharedVolume::Fail).unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error:?}");
    assert!(
        error
            .to_string()
            .contains("volume 1: several hooks select it (db, web)"),
        "{error}"
    );
    assert_eq!(
        wanted(&both[1..], SharedVolume::Fail),
        ["db"],
        "one is not several"
    );
}
