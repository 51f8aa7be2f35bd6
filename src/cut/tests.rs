//! Tests of a cut on fakes that log each event.

mod fakes;
mod refused;

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Barrier, Condvar, Mutex};
use std::time::Duration;

use super::coordinator::{self, CutSpec};
use super::participant::{CutAnswer, CutStep, Participant, Prepared, Readiness, Thawed};
use super::*;
use crate::error::{Error, chain};
use crate::model::{OnQuiesceFailure, SharedVolume};
use fakes::{TestVolume, Trouble, World, member, mounted, raw};

fn application() -> SnapshotParameters {
    SnapshotParameters {
        consistency: Level::Application,
        ..SnapshotParameters::default()
    }
}

/// Two mounted volumes whose clones run in series, so that the order is always the same, and one
/// that is not in use.
fn group() -> Vec<TestVolume> {
    let mut members = vec![mounted("a"), member("idle", Use::Unused), mounted("b")];
    for member in &mut members {
        member.is_serial = true;
    }
    members
}

/// One attempt. What it disturbs is not recorded.
fn attempt(
    world: &World,
    members: &[TestVolume],
    level: Level,
    parameters: &SnapshotParameters,
) -> crate::error::Result<Outcome> {
    let now = Attempt {
        level,
        why: "",
        disturbed: &Cell::new(false),
    };
    let (interfaces, members) = (world.interfaces(), world.members(members));
    super::attempt(&interfaces, &members, &now, parameters, Arc::new(|| Ok(())))
}

/// An attempt that may panic. The caller checks what it left.
fn tried(world: &World, volumes: &[TestVolume], level: Level) -> Result<Outcome, String> {
    let parameters = application();
    let now = Attempt {
        level,
        why: "",
        disturbed: &Cell::new(false),
    };
    let room = world.room();
    let members = world.members(volumes);
    let attempt = || super::attempt(&world.interfaces(), &members, &now, &parameters, room);
    match catch_unwind(AssertUnwindSafe(attempt)) {
        Ok(done) => done.map_err(|error| chain(&error)),
        Err(_) => Err("panic".into()),
    }
}

#[test]
fn the_order_is_quiesce_freeze_cut_thaw_release() {
    let world = World::with_hooks(&["db"]);
    let outcome = tried(&world, &group(), Level::Application).unwrap();
    let wanted = [
        "root a",
        "count a",
        "count idle",
        "root b",
        "count b",
        "clone_whole idle",
        "begin a b",
        "sync",
        "clone_ahead a",
        "clone_ahead b",
        "sync",
        "clone_rest a",
        "clone_rest b",
        "quiesce db",
        "sync",
        "clone_rest a",
        "clone_rest b",
        "room",
        "freeze",
        "clock",
        "clone_rest a",
        "thaw a",
        "clone_rest b",
        "thaw b",
        "verify",
        "release",
        "written",
        "verify a",
        "verify b",
    ];
    assert_eq!(world.log(), wanted);
    assert_eq!(outcome.level, Level::Application);
    assert_eq!(outcome.reason, "");
    assert_eq!(outcome.cut_at, fakes::CUT_AT);
    let stats = outcome.stats;
    assert_eq!((stats.extents_ahead, stats.extents_within), (7, 2));
    assert!(stats.held.is_some());
    assert!(stats.freeze.is_some() && stats.quiesce.is_some() && stats.release.is_some());
    world.assert_still();
}

#[test]
fn nothing_of_the_clone_ahead_runs_while_an_application_is_held() {
    for is_serial in [true, false] {
        let world = World::with_hooks(&["db"]);
        let mut members = vec![mounted("a"), member("idle", Use::Unused), mounted("b")];
        members.iter_mut().for_each(|one| one.is_serial = is_serial);
        tried(&world, &members, Level::Application).unwrap();
        let log = world.log();
        let at = |event: &str| log.iter().position(|line| line == event).unwrap();
        let (held, frozen) = (at("quiesce db"), at("freeze"));
        let ahead = ["clone_ahead", "clone_whole", "begin", "root"];
        let is_ahead = |line: &String| ahead.iter().any(|word| line.starts_with(word));
        assert!(log[..held].iter().any(is_ahead), "{log:?}");
        assert!(!log[held..].iter().any(is_ahead), "{log:?}");
        let while_held = &log[held..frozen];
        assert_eq!(while_held[1], "sync", "{log:?}");
        for event in ["clone_rest a", "clone_rest b", "room"] {
            assert!(
                while_held.iter().any(|line| line == event),
                "{event}: {log:?}"
            );
        }
    }
}

#[test]
fn an_application_is_held_for_more_passes_only_while_each_leaves_less() {
    // Number of ranges that each pass clones, the number that makes another pass worthwhile, and
    // the number of passes before and after the hooks.
    for (ranges, min_useful_ranges, passes) in
        [(2_000, 2_500, 1), (3_000, 2_500, 3), (60, 0, 1), (70, 0, 3)]
    {
        let world = World::with_hooks(&["db"]);
        world.set_ranges(ranges, min_useful_ranges);
        tried(&world, &[mounted("a")], Level::Application).unwrap();
        let log = world.log();
        let count = |log: &[String]| log.iter().filter(|line| *line == "clone_rest a").count();
        let held = log.iter().position(|line| line == "quiesce db").unwrap();
        let frozen = log.iter().position(|line| line == "freeze").unwrap();
        assert_eq!(count(&log[..held]), passes, "{ranges}: {log:?}");
        assert_eq!(count(&log[held..frozen]), passes, "{ranges}: {log:?}");
        assert_eq!(count(&log[frozen..]), 1, "{ranges}: {log:?}");
    }
}

#[test]
fn what_has_grown_since_is_refused_before_the_freeze() {
    let world = World::with_hooks(&["db"]);
    world.grow_when_quiesced(5_000_001);
    let error = tried(&world, &[mounted("a")], Level::Application).unwrap_err();
    assert!(error.contains("longer than freezeTimeout"), "{error}");
    let log = world.log();
    assert!(log.contains(&"release".into()), "{log:?}");
    assert!(!log.contains(&"freeze".into()), "{log:?}");
    world.assert_still();
}

#[test]
fn in_parallel_all_are_frozen_before_the_first_is_cut_and_thawed_after_their_own_cut() {
    let world = World::default();
    let members: Vec<_> = ["a", "b", "c", "d"].map(mounted).into();
    tried(&world, &members, Level::Filesystem).unwrap();
    let log = world.log();
    let at = |event: &str| log.iter().rposition(|line| line == event).unwrap();
    let frozen = at("freeze");
    for name in ["a", "b", "c", "d"] {
        let cut = at(&format!("clone_rest {name}"));
        assert!(frozen < cut && cut < at(&format!("thaw {name}")), "{log:?}");
    }
    world.assert_still();
}

#[test]
fn a_failure_at_any_step_leaves_nothing_quiesced_or_frozen() {
    let good = World::with_hooks(&["db"]);
    tried(&good, &group(), Level::Application).unwrap();
    let steps = good.log().len();
    for trouble in [Trouble::Error, Trouble::Panic] {
        for step in 0..steps {
            let world = World::with_hooks(&["db"]);
            world.plan(step, trouble);
            let done = tried(&world, &group(), Level::Application);
            let log = world.log();
            // Reading the clock cannot fail.
            let is_harmless = log[step] == "clock" && trouble == Trouble::Error;
            assert_eq!(done.is_ok(), is_harmless, "{trouble:?} at {step}: {log:?}");
            world.assert_still();
            let failed_at = &log[step];
            let cuts = |log: &[String]| log.iter().filter(|l| *l == "clone_rest b").count();
            if failed_at == "freeze" {
                // One pass ran ahead of the hooks, and one after them.
                assert_eq!(cuts(&log), 2, "nothing is cut without a freeze");
            }
        }
    }
}

#[test]
fn after_a_failure_all_are_thawed_before_anybody_is_released() {
    for trouble in [Trouble::Error, Trouble::Panic] {
        for event in ["clock", "clone_rest a", "thaw a", "clone_rest b", "thaw b"] {
            let good = World::with_hooks(&["db"]);
            tried(&good, &group(), Level::Application).unwrap();
            let step = good.log().iter().rposition(|line| line == event).unwrap();
            let world = World::with_hooks(&["db"]);
            world.plan(step, trouble);
            let _ = tried(&world, &group(), Level::Application);
            assert_eq!(
                world.released_while_frozen(),
                0,
                "{event}: {:?}",
                world.log()
            );
            world.assert_still();
        }
    }
}

#[test]
fn a_thaw_that_came_early_loses_the_cut() {
    let world = World::with_hooks(&["db"]);
    let last = |world: &World, event: &str| {
        tried(world, &group(), Level::Application).unwrap();
        world.log().iter().rposition(|line| line == event).unwrap()
    };
    let step = last(&World::with_hooks(&["db"]), "thaw a");
    world.plan(step, Trouble::Early);
    let error = tried(&world, &group(), Level::Application).unwrap_err();
    assert!(
        error.contains("writers of volume a continued before it was cut"),
        "{error}"
    );
    assert!(world.log().contains(&"thaw b".into()), "{:?}", world.log());
    world.assert_still();
}

#[test]
fn a_copy_that_was_moved_loses_the_cut() {
    let world = World::with_hooks(&["db"]);
    world.move_copies();
    let parameters = application();
    let error = attempt(&world, &group(), Level::Application, &parameters).unwrap_err();
    assert!(matches!(error, Error::CutLost { .. }), "{error:?}");
    assert!(
        chain(&error).contains("volume a or of its copy were moved"),
        "{error}"
    );
    world.assert_still();
}

#[test]
fn a_session_that_died_in_the_window_loses_the_level() {
    let world = World::with_hooks(&["db"]);
    let step = {
        let good = World::with_hooks(&["db"]);
        tried(&good, &group(), Level::Application).unwrap();
        good.log().iter().position(|line| line == "verify").unwrap()
    };
    world.plan(step, Trouble::Error);
    let parameters = application();
    let error = attempt(&world, &group(), Level::Application, &parameters).unwrap_err();
    assert!(matches!(error, Error::QuiesceFailed { .. }), "{error:?}");
    assert_eq!(world.log().last().unwrap(), "release");
    world.assert_still();
}

#[test]
fn a_session_that_had_to_be_killed_is_reported_beside_a_good_cut() {
    let world = World::with_hooks(&["db"]);
    world.set_release_problem("db was killed");
    let outcome = tried(&world, &group(), Level::Application).unwrap();
    assert_eq!(outcome.level, Level::Application);
    assert_eq!(
        outcome.stats.release_problem.as_deref(),
        Some("db was killed")
    );
}

#[test]
fn raw_devices_that_can_be_suspended_are_cut_with_the_guard() {
    let world = World::default();
    let mapped = |mut volume: TestVolume| {
        volume.is_mapped = true;
        volume
    };
    let outcome = tried(&world, &[mapped(raw("r"))], Level::Filesystem).unwrap();
    world.assert_still();
    let (level, reason) = (outcome.level, outcome.reason);
    assert_eq!(level, Level::Crash);
    assert!(reason.contains("raw block device"), "{reason}");
    let log = world.log();
    let at = |event: &str| log.iter().position(|line| line.starts_with(event));
    assert!(at("freeze").unwrap() < at("thaw").unwrap(), "{log:?}");
    assert_eq!(at("clone_whole"), None, "{log:?}");
    let with_a_file_system = [mapped(raw("r")), mounted("m")];
    let outcome = tried(&World::default(), &with_a_file_system, Level::Filesystem);
    assert_eq!(outcome.unwrap().level, Level::Filesystem);
    let with_one_that_is_not_in_use = [mapped(raw("r")), member("q", Use::Unused)];
    let outcome = tried(
        &World::default(),
        &with_one_that_is_not_in_use,
        Level::Filesystem,
    );
    assert_eq!(outcome.unwrap().level, Level::Filesystem);
}

#[test]
fn each_use_is_cut_in_its_own_way_and_gets_its_own_level() {
    let level_of = |world: &World, members: &[TestVolume], level| {
        let outcome = tried(world, members, level).unwrap();
        world.assert_still();
        (outcome.level, outcome.reason)
    };
    let world = World::default();
    let (level, reason) = level_of(&world, &[raw("r")], Level::Filesystem);
    assert_eq!(level, Level::Crash);
    assert!(reason.contains("raw block device"), "{reason}");
    assert_eq!(
        world.log(),
        ["count r", "count r", "room", "clock", "clone_whole r"]
    );

    let world = World::with_hooks(&["db"]);
    let (level, _) = level_of(&world, &[raw("r")], Level::Application);
    assert_eq!(level, Level::Application);
    let wanted = [
        "count r",
        "quiesce db",
        "count r",
        "room",
        "clock",
        "clone_whole r",
        "verify",
        "release",
    ];
    assert_eq!(world.log(), wanted);

    let world = World::default();
    let (level, reason) = level_of(&world, &[mounted("m")], Level::Crash);
    assert_eq!(
        (level, reason.as_str()),
        (Level::Crash, "crash was requested")
    );
    assert_eq!(
        world.log(),
        ["count m", "count m", "room", "clock", "clone_whole m"]
    );

    let world = World::with_hooks(&["db"]);
    let idle = [member("idle", Use::Unused), member("other", Use::Unused)];
    let (level, reason) = level_of(&world, &idle, Level::Application);
    assert_eq!(level, Level::Filesystem);
    assert!(reason.contains("not in use"), "{reason}");
    assert!(
        !world
            .log()
            .iter()
            .any(|line| line.contains("freeze") || line.contains("quiesce"))
    );

    let world = World::default();
    let (level, _) = level_of(&world, &idle, Level::Crash);
    assert_eq!(
        level,
        Level::Crash,
        "several that nobody uses need no moment"
    );
}

#[test]
fn without_a_hook_application_is_refused_or_falls_back_as_the_class_says() {
    let world = World::default();
    let error = tried(&world, &[mounted("a")], Level::Application).unwrap_err();
    assert!(error.contains("volume a: no hook is configured"), "{error}");
    assert_eq!(world.log(), [""; 0], "nothing is touched");

    let falls = SnapshotParameters {
        on_quiesce_failure: OnQuiesceFailure::Degrade(Level::Filesystem),
        ..application()
    };
    let outcome = attempt(&world, &[mounted("a")], Level::Application, &falls).unwrap();
    assert_eq!(outcome.level, Level::Filesystem);
    assert_eq!(outcome.reason, "no hook is configured for volume a");

    let world = World::with_hooks(&["db", "web"]);
    let skips = SnapshotParameters {
        shared_volume: SharedVolume::Skip,
        ..application()
    };
    let outcome = attempt(&world, &[mounted("a")], Level::Application, &skips).unwrap();
    assert_eq!(outcome.level, Level::Filesystem);
    assert!(
        outcome.reason.contains("skips them all: db, web"),
        "{}",
        outcome.reason
    );
    assert!(!world.log().iter().any(|line| line.starts_with("quiesce")));
}

#[test]
fn a_halt_thaws_in_the_middle_of_a_cut_and_nothing_is_frozen_after_it() {
    let world = World::default();
    let members = world.members(&[mounted("a")]);
    let parameters = SnapshotParameters::default();
    let local = |abort: &AbortHandle| {
        let mut local =
            local::Local::new(&world.interfaces(), &members, &parameters).aborted_by(abort);
        local.ready(Level::Filesystem).unwrap();
        local
    };
    let abort = AbortHandle::default();
    let mut frozen = local(&abort);
    frozen.prepare().unwrap();
    frozen.freeze().unwrap();
    abort.now();
    world.assert_still();
    let thawed = frozen.cut().unwrap();
    assert!(
        thawed
            .lost
            .unwrap()
            .contains("writers of volume a continued")
    );

    let abort = AbortHandle::default();
    abort.now();
    let error = local(&abort).prepare().unwrap_err();
    assert!(matches!(error, Error::CutLost { .. }), "{error:?}");
    assert_eq!(
        world.log().iter().filter(|line| *line == "freeze").count(),
        1
    );
    world.assert_still();
}

impl Far {
    fn freeze(&self) -> crate::error::Result<()> {
        if let Some(aborted) = &self.aborted {
            let wait = aborted.1.wait_timeout_while(
                aborted.0.lock().unwrap(),
                Duration::from_secs(60),
                |aborted| !*aborted,
            );
            assert!(*wait.unwrap().0, "it is halted");
            return Err(Error::Stopping);
        }
        self.world.note(&format!("frozen {}", self.name));
        match self.fails {
            true => Err(Error::no_volume(self.name)),
            false => Ok(()),
        }
    }
}

/// A participant of another node.
struct Far {
    name: &'static str,
    world: World,
    meet: Arc<Barrier>,
    fails: bool,
    /// How long its members would be blocked.
    stall: Duration,
    /// If set, its freeze waits for an abort.
    aborted: Option<Arc<(Mutex<bool>, Condvar)>>,
}

impl Participant for Far {
    fn step(&mut self, step: CutStep) -> crate::error::Result<CutAnswer> {
        match step {
            CutStep::Ready(_) => Ok(CutAnswer::Ready(Readiness {
                in_use: 1,
                frozen: 1,
                stall: self.stall,
                most_extents: Some((self.name.into(), 1)),
                ..Readiness::default()
            })),
            CutStep::Ahead { .. } => Ok(CutAnswer::Ahead(Prepared::default())),
            CutStep::Prepare => {
                // This would hang if the participants ran this step one after the other.
                self.meet.wait();
                Ok(CutAnswer::Prepared(Prepared::default()))
            }
            CutStep::Freeze => self.freeze().map(|()| CutAnswer::Frozen),
            CutStep::Cut => {
                self.world.note(&format!("cut {}", self.name));
                Ok(CutAnswer::Thawed(Thawed::default()))
            }
            CutStep::Written => Ok(CutAnswer::Written),
        }
    }

    fn abort(&self) -> Box<dyn Fn() + Send + Sync> {
        let (world, name, aborted) = (self.world.clone(), self.name, self.aborted.clone());
        Box::new(move || {
            world.note(&format!("halted {name}"));
            if let Some(aborted) = &aborted {
                *aborted.0.lock().unwrap() = true;
                aborted.1.notify_all();
            }
        })
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        self.world.note(&format!("gone {}", self.name));
    }
}

#[test]
fn no_participant_cuts_before_all_have_frozen() {
    for fails in [false, true] {
        let world = World::with_hooks(&["db"]);
        let meet = Arc::new(Barrier::new(3));
        let participants = ["x", "y", "z"].map(|name| {
            let far = Far {
                name,
                world: world.clone(),
                meet: meet.clone(),
                fails: fails && name == "y",
                stall: Duration::ZERO,
                aborted: None,
            };
            Box::new(far) as Box<dyn Participant>
        });
        let spec = CutSpec {
            level: Level::Application,
            parameters: &application(),
            targets: &[mounted("a").target],
        };
        let context = coordinator::CutContext {
            hooks: &world,
            now_nanos: &|| fakes::CUT_AT,
            disturbed: &Cell::new(false),
        };
        let done = coordinator::run(&context, participants.into(), &spec);
        assert_eq!(done.is_err(), fails);
        let log = world.log();
        let first_cut = log.iter().position(|line| line.starts_with("cut"));
        let last_frozen = log.iter().rposition(|line| line.starts_with("frozen"));
        assert_eq!(first_cut.is_none(), fails, "{log:?}");
        assert!(fails || first_cut > last_frozen, "{log:?}");
        // After a failed cut all participants were dropped; in a good one each thawed with its cut.
        let thawed = if fails { "gone" } else { "cut" };
        let thawed = log.iter().rposition(|line| line.starts_with(thawed));
        let released = log.iter().position(|line| line == "release");
        assert!(thawed < released, "{log:?}");
    }
}

#[test]
fn no_writer_waits_for_the_clone_of_a_copy_that_was_emptied() {
    let clones = |emptied: bool| {
        let world = World::default();
        let members = [mounted("a"), mounted("b")];
        for member in &members {
            member
                .emptied
                .store(emptied, std::sync::atomic::Ordering::SeqCst);
        }
        let _ = tried(&world, &members, Level::Filesystem);
        world.assert_still();
        let log = world.log();
        log.iter()
            .filter(|line| line.starts_with("clone_rest"))
            .count()
    };
    assert_eq!(clones(true) + 2, clones(false));
}

#[test]
fn one_that_fails_to_freeze_ends_all_others_at_once() {
    let world = World::default();
    let meet = Arc::new(Barrier::new(3));
    let participants = ["x", "y", "z"].map(|name| {
        let far = Far {
            name,
            world: world.clone(),
            meet: meet.clone(),
            fails: name == "y",
            stall: Duration::ZERO,
            aborted: (name == "z").then(Arc::default),
        };
        Box::new(far) as Box<dyn Participant>
    });
    let spec = CutSpec {
        level: Level::Filesystem,
        parameters: &SnapshotParameters::default(),
        targets: &[],
    };
    let disturbed = Cell::new(false);
    let context = coordinator::CutContext {
        hooks: &world,
        now_nanos: &|| fakes::CUT_AT,
        disturbed: &disturbed,
    };
    let error = coordinator::run(&context, participants.into(), &spec).unwrap_err();
    assert!(
        matches!(error, Error::NotFound { .. }),
        "the cause: {error:?}"
    );
    assert!(disturbed.get());
    let log = world.log();
    let at = |event: &str| log.iter().position(|line| line == event);
    for name in ["x", "z"] {
        let aborted = at(&format!("halted {name}"));
        assert!(aborted.is_some() && aborted < at("gone y"), "{log:?}");
    }
    assert_eq!(at("halted y"), None, "it undoes what it has made");
}
