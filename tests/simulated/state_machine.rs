//! Random calls, compared with a simple model: repeats with equal and with different arguments,
//! faults, crashes, restarts, reboots, power losses, and two callers at once.
//!
//! The calls include snapshots, groups, and volumes created from snapshots and volumes. The faults
//! include a foreign process that thaws and writes. A call may fail, others succeed, and it fails
//! again. Faults may last for many acts: a pool that stays full, a record that cannot be read, a
//! disk that is dead or hangs. During such a fault, only the calls that need the broken part fail,
//! and after it the state is as before.
//!
//! After every call, the answer and all visible state equal the model's, no invariant of the
//! simulation is broken, and every token that a user has synced is present. A call that was cut off
//! has left every part of a volume either in its old or in its new state. Two calls at once answer
//! as if they had run one after the other, or one of them reports that the other runs. At the end,
//! everything is deleted, and nothing is left. `PROPTEST_CASES` sets the number of runs, and
//! `PROPTEST_RNG_SEED` selects them, which `make test` derives from the commit.

mod acts;
mod cuts;
mod lasting;
mod model;
mod observe;

use std::path::Path;
use std::sync::Barrier;
use std::time::Duration;

use crate::simulation::{
    LastingFault, POOL, SIZE, Simulation, Step, VolumeConfig, staging, target,
};
use acts::{Act, After, GROUPS, INLINE, Kind, NAMES, SNAPSHOTS, acts, prelude};
use model::Model;
use nix::errno::Errno;
use proptest::prelude::*;
use slackwater::error::{Error, chain};
use slackwater::host::memory::{FaultMode, Unreadable};
use slackwater::model::size::GIB;
use slackwater::model::{FsType, Level, Wipe};
use slackwater::record::FormattedAs;
use slackwater::service::status;
use tonic::Code;

/// The simulation and its expected state.
struct Run {
    sim: Simulation,
    model: Model,
    next_token: u64,
}

type Verdict = Result<(), String>;

impl Run {
    fn new() -> Run {
        let run = Run {
            sim: Simulation::with_other_pool(),
            model: Model::default(),
            next_token: 0,
        };
        // Space for all volumes at their full size.
        run.sim.host.set_capacity(64 * GIB);
        run
    }

    fn acts(&mut self, acts: &[Act]) -> Verdict {
        for (n, act) in acts.iter().enumerate() {
            self.act(act)
                .map_err(|why| format!("act {n}, {act:?}: {why}"))?;
        }
        Ok(())
    }

    fn act(&mut self, act: &Act) -> Verdict {
        // The driver no longer remembers a failed cut.
        self.sim.host.pass_time(Duration::from_secs(3600));
        // A start waits for a disk that hangs.
        if self.sim.lasting_fault == Some(LastingFault::Hangs)
            && matches!(act, Act::Restart | Act::Reboot(_) | Act::Fault(..))
        {
            self.end()?;
        }
        match act {
            Act::Call(step) => self.call(step)?,
            Act::Pair(one, other) => self.pair(one, other)?,
            Act::Fault(step, n, mode, after) => self.fault(step, *n, *mode, *after)?,
            Act::Restart => {
                self.start()?;
                if self.model.inline.values().any(|inline| !inline.mounted) {
                    self.take_over()?;
                }
            }
            Act::Reboot(power_loss) => {
                self.reboot(*power_loss)?;
                self.start()?;
                self.take_over()?;
            }
            Act::Write(synced) => self.write(*synced)?,
            Act::Begin(kind) => self.begin(*kind)?,
            Act::End => self.end()?,
        }
        self.sim.check()?;
        if self
            .sim
            .lasting_fault
            .as_ref()
            .is_some_and(LastingFault::has_no_disk)
        {
            self.check_without_disk()?;
        }
        let (now, expected) = (self.observe()?, self.model.seen());
        if !now.fits(&expected) {
            return Err(format!("{now:?} instead of {expected:?}"));
        }
        for (name, group) in &self.model.groups {
            if group.is_whole() {
                let sources: Vec<&str> = group.sources.iter().copied().collect();
                self.sim.check_order(name, &sources)?;
            }
        }
        self.check_tokens()
    }

    fn reboot(&mut self, power_loss: bool) -> Verdict {
        self.sim.reboot(power_loss);
        let hidden = self.hidden_inline();
        self.model.reboot(|name| hidden.contains(&name));
        // The kubelet removes what is left of pods from before the reboot.
        for leaf in self.sim.host.targets() {
            let removed = self.sim.host.remove_leaf(&leaf);
            removed.map_err(|errno| format!("{}: {errno}", leaf.display()))?;
        }
        Ok(())
    }

    fn start(&mut self) -> Verdict {
        let started = self.sim.run(&Step::Start);
        started.map(drop).map_err(|error| chain(&error))
    }

    fn code(step: &Step, error: &Error) -> Code {
        let rpc = step.rpc().expect("a step of this test is a call");
        status::code(rpc, error)
    }

    fn call(&mut self, step: &Step) -> Verdict {
        self.model.shown = self.shown()?;
        if let Some(done) = self.call_without_disk(step) {
            return done;
        }
        let may_be_refused = self.may_be_refused(step);
        let answer = self.sim.run(step);
        let mut later = self.model.clone();
        let expected = later.step(step);
        let found = answer
            .as_ref()
            .map(drop)
            .map_err(|error| Run::code(step, error));
        if found == expected {
            // An inline volume that cannot be read is unmounted now, and deleted once it can be
            // read.
            if self.hides_end(step) {
                let now = self.observe()?;
                return self.model.adopt(&later, &now);
            }
            self.model = later;
            if found.is_ok() {
                self.model.answered(step);
            }
            return Ok(());
        }
        match answer {
            Err(error) if may_be_refused.contains(&Run::code(step, &error)) => {
                self.sim.forget_unanswered();
                self.refused(step, &error, &later)
            }
            answer => {
                let message = answer.map_err(|error| chain(&error));
                Err(format!("{message:?} instead of {expected:?}"))
            }
        }
    }

    /// Checks a call that failed on its way to `later`: a final error must leave nothing behind.
    fn refused(&mut self, step: &Step, error: &Error, later: &Model) -> Verdict {
        let now = self.observe()?;
        let forgets = step.is_final(error) && creates_object(step);
        let mut before = self.model.seen();
        // An inline volume of an earlier boot may be deleted at any time.
        let stays =
            |name: &&'static str, mounted: &mut bool| *mounted || now.inline.contains_key(name);
        before.inline.retain(stays);
        if forgets && !now.equals_except_formatting(&before) {
            let message = chain(error);
            return Err(format!(
                "{message} is final, but {now:?} is left instead of {before:?}"
            ));
        }
        self.model.adopt(later, &now)
    }

    /// Makes both calls at once, from two threads.
    fn pair(&mut self, one: &Step, other: &Step) -> Verdict {
        if self.sim.lasting_fault.is_some() {
            self.call(one)?;
            return self.call(other);
        }
        let driver = self.sim.driver().map_err(|error| chain(&error))?;
        self.model.shown = self.shown()?;
        self.sim.before_call(one);
        self.sim.before_call(other);
        self.sim.host.take_turns(true);
        let sim = &self.sim;
        let together = Barrier::new(2);
        let call = |step: &Step| {
            together.wait();
            let answer = sim.call(&driver, step);
            answer.map(drop).map_err(|error| Run::code(step, &error))
        };
        let answers = std::thread::scope(|scope| {
            let other = scope.spawn(|| call(other));
            [Some(call(one)), other.join().ok()]
        });
        self.sim.host.take_turns(false);
        let [Some(first), Some(second)] = answers else {
            return Err("a call panicked".into());
        };
        self.compare_pair([(one, first), (other, second)])
    }

    /// Compares two calls that ran at once, and their answers, with both orders in which they may have
    /// run.
    fn compare_pair(&mut self, calls: [(&Step, Result<(), Code>); 2]) -> Verdict {
        let seen = self.observe()?;
        // Also of the volume of one call, as the other call created or mounted it.
        let shown = self.shown()?;
        self.model.shown.extend(shown);
        let [first, second] = calls;
        for turns in [[first, second], [second, first]] {
            for taken in [[false, false], [true, false], [false, true], [true, true]] {
                let mut model = self.model.clone();
                let fits = |((step, answer), taken): (&(&Step, Result<(), Code>), bool)| {
                    match *answer {
                        // A delete may have renamed it into the trash, and its wipe waits for the
                        // other's.
                        Err(Code::Aborted) if taken => {
                            let mut partly = model.clone();
                            let is_gone = step.is_undoing() && model.step(step).is_ok();
                            // Of a group, this may be true of some members only.
                            if let Step::DeleteGroup(_) = step
                                && partly.adopt_groups(&model, &seen).is_ok()
                            {
                                model = partly;
                            }
                            is_gone
                        }
                        Err(Code::Aborted) => true,
                        answer => !taken && model.step(step) == answer,
                    }
                };
                if turns.iter().zip(taken).all(fits) && seen.fits(&model.seen()) {
                    self.model = model;
                    for (step, answer) in turns {
                        self.record_pair_answer(step, answer);
                    }
                    return Ok(());
                }
            }
        }
        let [first, second] = calls.map(|(_, answer)| answer);
        Err(format!("{first:?} and {second:?} result in {seen:?}"))
    }

    /// Records the answer of one of two concurrent calls. It says nothing about an object that the
    /// other call has deleted.
    fn record_pair_answer(&mut self, step: &Step, answer: Result<(), Code>) {
        let (is_there, makes) = match step {
            Step::Snapshot(name, ..) => (self.model.snapshots.contains_key(name), true),
            Step::DeleteSnapshot(name) => (self.model.snapshots.contains_key(name), false),
            Step::Group(name, _) => (self.model.groups.contains_key(name), true),
            Step::DeleteGroup(name) => (self.model.groups.contains_key(name), false),
            Step::Restore(name, ..)
            | Step::Receive(name, ..)
            | Step::ImportFile(name, _)
            | Step::Clone(name, ..) => (self.model.volumes.contains_key(name), true),
            _ => return,
        };
        if answer.is_err() {
            return;
        }
        if makes && is_there {
            self.sim.before_call(step);
            self.sim.after_call(step);
        } else if !makes {
            self.sim.after_call(step);
            // One call deleted it, and the other created it again at another time.
            if is_there {
                self.sim.forget_cut_times();
            }
        }
        self.sim.forget_unanswered();
    }

    fn fault(&mut self, step: &Step, n: usize, mode: FaultMode, after: After) -> Verdict {
        self.model.shown = self.shown()?;
        let may_be_refused = self.may_be_refused(step);
        self.sim.host.fail_effect(n, mode);
        let answer = self.sim.run(step);
        let fired = self.sim.host.faults_left() == 0;
        self.sim.host.clear_faults();
        let mut later = self.model.clone();
        let expected = later.step(step);
        let found = answer
            .as_ref()
            .map(drop)
            .map_err(|error| Run::code(step, error));
        let is_refused = found.is_err_and(|code| may_be_refused.contains(&code));
        if !fired && found != expected && !is_refused {
            return Err(format!("{found:?} instead of {expected:?}"));
        }
        let mode_crashes = matches!(mode, FaultMode::CrashBefore | FaultMode::CrashAfter);
        match (after, self.sim.host.is_alive()) {
            (After::Nothing, true) => {}
            (After::Nothing | After::Restart, _) => self.start()?,
            (After::PowerLoss, _) => {
                self.reboot(true)?;
                let hidden = self.hidden_inline();
                later.reboot(|name| hidden.contains(&name));
                self.start()?;
            }
        }
        self.sim.forget_unanswered();
        let now = self.observe()?;
        match &answer {
            Ok(_) if self.hides_end(step) => self.model.adopt(&later, &now)?,
            Ok(_) => {
                let mut kept_small = later.clone();
                // A volume that cannot be grown when it is staged is mounted with its old size.
                if let (Step::StageAs(name, _), true) = (step, fired) {
                    kept_small.set_grown(name, false);
                }
                self.model = later;
                self.model.adopt(&kept_small, &now)?;
            }
            Err(error) => {
                if mode_crashes || !fired {
                    self.model.adopt(&later, &now)?;
                } else {
                    self.refused(step, error, &later)?;
                }
            }
        }
        Ok(())
    }

    fn write(&mut self, synced: bool) -> Verdict {
        let host = &self.sim.host;
        let lasting_fault = self.sim.lasting_fault.clone();
        let may_fail = |errno: &Errno| {
            let expected = match &lasting_fault {
                Some(LastingFault::Full) => Errno::ENOSPC,
                Some(LastingFault::Hangs) => Errno::EAGAIN,
                Some(LastingFault::Dead { .. }) => Errno::EIO,
                Some(LastingFault::Unreadable(..) | LastingFault::UnreadableAfter(..)) | None => {
                    return false;
                }
            };
            *errno == expected
        };
        for (name, volume) in &mut self.model.volumes {
            self.next_token += 1;
            let writable = volume
                .view
                .published
                .iter()
                .find(|(_, read_only)| !**read_only);
            let written = if host.fs_bytes(&staging(name)).is_ok() {
                match synced {
                    true => host.write_token(&staging(name), self.next_token),
                    false => host.write_unsynced(&staging(name), self.next_token),
                }
            } else if let (Some((n, _)), Some(FormattedAs::Raw)) = (writable, volume.view.formatted)
            {
                // A write to a device takes effect at once.
                host.write_block_token(&target(name, *n), self.next_token)
            } else {
                continue;
            };
            match written {
                Err(errno) if may_fail(&errno) => continue,
                written => written.map_err(|errno| format!("write to {name}: {errno}"))?,
            }
            if synced {
                volume.tokens.insert(self.next_token);
            }
        }
        let mounted = self.model.inline.iter_mut();
        for (name, inline) in mounted.filter(|(_, inline)| inline.mounted) {
            self.next_token += 1;
            let written = self.sim.host.write_token(&target(name, 0), self.next_token);
            match written {
                Err(errno) if may_fail(&errno) => continue,
                written => written.map_err(|errno| format!("write to inline {name}: {errno}"))?,
            }
            inline.tokens.insert(self.next_token);
        }
        Ok(())
    }

    fn check_tokens(&self) -> Verdict {
        let staged = self
            .model
            .volumes
            .iter()
            .map(|(name, volume)| (*name, staging(name), &volume.tokens));
        let inline = self
            .model
            .inline
            .iter()
            .map(|(name, inline)| (*name, target(name, 0), &inline.tokens));
        let published = self.model.volumes.iter().filter_map(|(name, volume)| {
            let n = volume.view.published.keys().next()?;
            Some((*name, target(name, *n), &volume.tokens))
        });
        for (name, path, tokens) in staged.chain(published).chain(inline) {
            let found = self.sim.host.tokens(&path);
            let Ok(found) = found.or_else(|_| self.sim.host.block_tokens(&path)) else {
                continue;
            };
            if !tokens.iter().all(|token| found.contains(token)) {
                return Err(format!("{name} has {found:?} instead of {tokens:?}"));
            }
        }
        Ok(())
    }

    /// Deletes everything, with calls that must succeed at the first try.
    fn finish(&mut self) -> Verdict {
        self.end()?;
        let mut steps: Vec<Step> = INLINE
            .iter()
            .map(|name| Step::UnpublishInline(name))
            .collect();
        for name in NAMES {
            steps.extend([Step::Unpublish(name, 0), Step::Unpublish(name, 1)]);
            steps.extend([Step::Unstage(name), Step::Delete(name)]);
        }
        steps.extend(SNAPSHOTS.map(Step::DeleteSnapshot));
        steps.extend(GROUPS.map(Step::DeleteGroup));
        for step in &steps {
            self.call(step)
                .map_err(|why| format!("while deleting everything, {step:?}: {why}"))?;
        }
        // What the process does by itself, every 10 seconds.
        let refreshed = self.sim.run(&Step::Refresh);
        refreshed.map_err(|error| chain(&error).to_string())?;
        self.sim.check()?;
        let mut files = self.sim.host.files_below(Path::new(POOL));
        // The count of the IDs of thin devices stays.
        files.retain(|file| !file.starts_with("next-id"));
        let left = self.sim.observed_state();
        let nothing = left.mounted.is_empty()
            && left.loops == 0
            && left.targets.is_empty()
            && files == ["lock", "pool.json", "snapshots", "trash", "volumes"];
        if nothing {
            Ok(())
        } else {
            Err(format!("left at the end: {left:?}, {files:?}"))
        }
    }
}

/// Whether the caller forgets the object after a final answer.
fn creates_object(step: &Step) -> bool {
    matches!(
        step,
        Step::Create(..)
            | Step::StageAs(..)
            | Step::PublishAs(..)
            | Step::PublishInline(..)
            | Step::Snapshot(..)
            | Step::Restore(..)
            | Step::Receive(..)
            | Step::ImportFile(..)
            | Step::Clone(..)
            | Step::Group(..)
    )
}

fn run(acts: &[Act]) -> Verdict {
    let mut run = Run::new();
    run.acts(acts)?;
    run.finish()
}

/// A group is deleted, and the delete fails when its member was already renamed away. Then the
/// group's name is used for other volumes, so no call names that member any more.
#[test]
fn objects_that_no_call_names_any_more_are_deleted_nevertheless() {
    let create = |name| Act::Call(Step::Create(name, VolumeConfig::EXT4));
    for mode in [FaultMode::Before(Errno::EIO), FaultMode::After(Errno::EIO)] {
        // The effects of such a delete, starting with the rename.
        for n in 1..=7 {
            let acts = [
                create("a"),
                create("b"),
                create("c"),
                Act::Call(Step::Group("g", &["c"])),
                Act::Fault(Step::DeleteGroup("g"), n, mode, After::Nothing),
                Act::Call(Step::Group("g", &["a", "b"])),
            ];
            run(&acts).unwrap_or_else(|why| panic!("{mode:?} at {n}: {why}"));
        }
    }
}

/// After a temporary error of the disk, an unpublish uses only the mount table. The volume is
/// deleted nevertheless.
#[test]
fn an_inline_volume_is_deleted_wherever_its_unpublish_fails() {
    for mode in [FaultMode::Before(Errno::EIO), FaultMode::After(Errno::EIO)] {
        for n in 1..=8 {
            let acts = [
                Act::Call(Step::PublishInline("x", VolumeConfig::EXT4)),
                Act::Fault(Step::UnpublishInline("x"), n, mode, After::Nothing),
            ];
            run(&acts).unwrap_or_else(|why| panic!("{mode:?} at {n}: {why}"));
        }
    }
}

/// The driver noticed the dead disk or not, and the disk comes back in each possible state.
#[test]
fn an_inline_volume_that_was_unpublished_without_its_disk_is_deleted_once_the_disk_is_back() {
    for (remounted, seen) in [(false, false), (false, true), (true, false), (true, true)] {
        let acts = [
            Act::Call(Step::PublishInline("x", VolumeConfig::EXT4)),
            Act::Begin(Kind::Dead { remounted, seen }),
            Act::Call(Step::UnpublishInline("x")),
            Act::End,
        ];
        run(&acts).unwrap_or_else(|why| panic!("remounted {remounted}, noticed {seen}: {why}"));
    }
}

#[test]
fn a_raw_block_volume_is_unpublished_while_its_disk_hangs() {
    let create = Step::Create("a", VolumeConfig::EXT4);
    for act in [
        Act::Call(Step::Unpublish("a", 0)),
        Act::Pair(Step::Unpublish("a", 0), create),
    ] {
        let acts = [
            Act::Call(Step::Create("a", VolumeConfig::BLOCK)),
            Act::Call(Step::StageAs("a", VolumeConfig::BLOCK)),
            Act::Call(Step::PublishAs("a", 0, false, VolumeConfig::BLOCK)),
            Act::Begin(Kind::Hangs),
            act.clone(),
            Act::End,
        ];
        run(&acts).unwrap_or_else(|why| panic!("{act:?}: {why}"));
    }
}

/// A thin device must be suspended while its snapshot is created, even if nothing can write to it.
#[test]
fn a_snapshot_of_a_read_only_raw_block_volume_is_created() {
    let acts = [
        Act::Call(Step::Create("a", VolumeConfig::BLOCK)),
        Act::Call(Step::StageAs("a", VolumeConfig::BLOCK)),
        Act::Call(Step::PublishAs("a", 0, true, VolumeConfig::BLOCK)),
        Act::Call(Step::Snapshot("s", "a", Level::Crash)),
    ];
    run(&acts).unwrap();
}

/// A driver that has started while a record was unreadable does not know whether the other records
/// are durable.
#[test]
fn a_volume_is_unstaged_when_its_disk_dies_before_its_record_is_synced() {
    for remounted in [false, true] {
        let acts = [
            Act::Call(Step::Create("a", VolumeConfig::EXT4)),
            Act::Call(Step::Create("c", VolumeConfig::EXT4)),
            Act::Call(Step::Modify("a", Wipe::None)),
            Act::Begin(Kind::Unreadable {
                n: 0,
                config: Unreadable::Error,
                begins: true,
            }),
            Act::Begin(Kind::Dead {
                remounted,
                seen: false,
            }),
            Act::Call(Step::Unstage("c")),
            Act::Call(Step::Unstage("a")),
        ];
        run(&acts).unwrap_or_else(|why| panic!("remounted {remounted}: {why}"));
    }
}

/// A delete of a group fails after it has hidden the last member, and the repeat, which names other
/// snapshots, finds none of the members. Its answer survives a power loss.
#[test]
fn a_deleted_group_does_not_come_back_with_a_power_loss() {
    let create = |name| Act::Call(Step::Create(name, VolumeConfig::EXT4));
    let delete = |n| {
        let mode = FaultMode::Before(Errno::EIO);
        Act::Fault(Step::DeleteGroup("h"), n, mode, After::Nothing)
    };
    // A start purges the trash, but not while the record of a volume cannot be read.
    let unreadable = Act::Begin(Kind::Unreadable {
        n: 1,
        config: Unreadable::Error,
        begins: false,
    });
    for n in 1..=24 {
        let acts = [
            create("a"),
            create("b"),
            create("c"),
            unreadable.clone(),
            Act::Call(Step::Group("h", &["b", "c"])),
            // Refused; the caller names the members of this group from now on.
            Act::Call(Step::Group("h", &["a", "b"])),
            Act::Restart,
            delete(n),
            delete(1),
            Act::Reboot(true),
        ];
        run(&acts).unwrap_or_else(|why| panic!("at {n}: {why}"));
    }
}

/// One of two calls at once creates a raw volume that has a file system, and the other one mounts it.
#[test]
fn the_second_of_two_calls_finds_a_file_system_on_the_volume_of_the_first() {
    for config in [VolumeConfig::EXT4, VolumeConfig::fs(FsType::Btrfs)] {
        let mut run = Run::new();
        let acts = [
            Act::Call(Step::Create("a", config)),
            Act::Call(Step::StageAs("a", config)),
            Act::Write(true),
            Act::Call(Step::Snapshot("t", "a", Level::Filesystem)),
        ];
        run.acts(&acts).unwrap();
        let steps = [
            Step::Restore("b", "t", VolumeConfig::BLOCK, SIZE),
            Step::StageAs("b", config),
        ];
        let answers = steps.each_ref().map(|step| run.sim.run(step).map(drop));
        assert!(answers.iter().all(Result::is_ok), "{answers:?}");
        let [restore, stage] = &steps;
        let compared = run.compare_pair([(stage, Ok(())), (restore, Ok(()))]);
        compared.unwrap_or_else(|why| panic!("{config:?}: {why}"));
        run.finish().unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_driver_behaves_like_the_model(
        prelude in prelude(),
        acts in prop::collection::vec(acts(), 1..50),
    ) {
        let acts = [prelude, acts.concat()].concat();
        if let Err(why) = run(&acts) {
            return Err(TestCaseError::fail(why));
        }
    }
}
