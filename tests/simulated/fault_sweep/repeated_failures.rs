//! A call fails, the next calls succeed, and then a call fails again: what the first failure has
//! left must not mislead the second call.
//!
//! The first call fails at each of its effects, in each mode, and so does the last call. The
//! repeats of the last call must converge to the result without faults, and nothing that was synced
//! may be lost.

use std::time::Duration;

use nix::errno::Errno;
use slackwater::error::chain;
use slackwater::host::memory::FaultMode;
use slackwater::model::{Level, Wipe};

use crate::fault_sweep::sweep::{Sample, is_requested};
use crate::fault_sweep::trial::{Baseline, Outcome, Scenario};
use crate::fault_sweep::{BTRFS, V, XFS, staged, used};
use crate::simulation::{SIZE, Simulation, Step, VolumeConfig};

const WAYS: [FaultMode; 4] = [
    FaultMode::Before(Errno::EIO),
    FaultMode::Before(Errno::ENOSPC),
    FaultMode::After(Errno::EIO),
    FaultMode::CrashAfter,
];

/// One in this many pairs of failures is tried, unless all are requested.
const SHARE: usize = 37;

/// Calls of which the first and the last fail.
struct FailureSequence {
    before: Vec<Step>,
    first: Step,
    /// The calls that succeed after the first failure.
    between: Vec<Step>,
    last: Step,
}

impl FailureSequence {
    /// The last call, as a scenario of its own.
    fn last(&self) -> Scenario {
        Scenario {
            before: self.before.clone(),
            act: self.last.clone(),
        }
    }

    /// The result without faults, and the number of effects of the first and the last call.
    fn baseline(&self) -> (Baseline, [usize; 2]) {
        let mut sim = Simulation::after(&self.before);
        let start = sim.host.effects();
        sim.run(&self.first)
            .expect("the call succeeds without faults");
        let first = sim.host.effects() - start;
        self.succeed(&mut sim)
            .expect("the calls succeed without faults");
        let start = sim.host.effects();
        let answer = sim
            .run(&self.last)
            .expect("the call succeeds without faults");
        let last = sim.host.effects() - start;
        let end = || Outcome {
            answer: answer.clone(),
            observed_state: sim.observed_state(),
        };
        let baseline = Baseline {
            end: end(),
            rebooted: end(),
            effects: last,
            looks: 0,
        };
        sim.finish().expect("everything can be deleted");
        (baseline, [first, last])
    }

    fn succeed(&self, sim: &mut Simulation) -> Result<(), String> {
        // The driver no longer remembers a failed cut.
        sim.host.pass_time(Duration::from_secs(3600));
        for step in &self.between {
            let done = sim.run(step);
            done.map_err(|error| format!("{step:?}: {}", chain(&error)))?;
        }
        Ok(())
    }

    /// Makes a call with a fault at its n-th effect. Returns whether the fault occurred.
    fn fail(sim: &mut Simulation, step: &Step, n: usize, way: FaultMode) -> Result<bool, String> {
        sim.host.fail_effect(n, way);
        // The answer is judged by what follows.
        let _ = sim.run(step);
        let fired = sim.host.faults_left() == 0;
        sim.host.clear_faults();
        if !sim.is_up() {
            sim.run(&Step::Start).map_err(|error| chain(&error))?;
        }
        Ok(fired)
    }

    fn trial(&self, baseline: &Baseline, faults: [(usize, FaultMode); 2]) -> Result<(), String> {
        let [(n, way), (m, again)] = faults;
        let mut sim = Simulation::after(&self.before);
        FailureSequence::fail(&mut sim, &self.first, n, way)?;
        self.succeed(&mut sim)?;
        sim.check()?;
        FailureSequence::fail(&mut sim, &self.last, m, again)?;
        self.last().converge(&mut sim, baseline, false)
    }

    fn sweep(&self) {
        let description = format!("{:?} {:?} {:?}", self.before, self.first, self.last);
        if !is_requested(&description) {
            return;
        }
        let (baseline, [first, last]) = self.baseline();
        let sample = Sample::one_in(SHARE, &description);
        let (mut trials, mut found) = (0, Vec::new());
        for n in 1..=first {
            // One more effect than the call has without faults, because of what the first failure
            // has left.
            for m in 1..=last + 1 {
                for (w, way) in WAYS.into_iter().enumerate() {
                    for (a, again) in WAYS.into_iter().enumerate() {
                        if !sample.has(&[n, 2 * m, 3 * w, 5 * a]) {
                            continue;
                        }
                        trials += 1;
                        let faults = [(n, way), (m, again)];
                        if let Err(why) = self.trial(&baseline, faults) {
                            found.push(format!("{faults:?}: {why}"));
                        }
                    }
                }
            }
        }
        let first_failures: Vec<_> = found.iter().take(12).cloned().collect();
        let summary = format!("{:?}, {:?}, of {trials}", self.first, self.last);
        assert!(
            found.is_empty(),
            "{summary}:\n{}",
            first_failures.join("\n")
        );
    }
}

/// Sweeps the first and the last call of volumes after the steps in `before`, with the calls
/// `between` succeeding.
fn sweep_failures(before: Vec<Step>, first: Step, between: &[Step], last: Step) {
    let between = between.to_vec();
    FailureSequence {
        before,
        first,
        between,
        last,
    }
    .sweep();
}

#[test]
fn growths_with_a_stage_between() {
    for config in [VolumeConfig::EXT4, XFS, VolumeConfig::THICK] {
        let (first, last) = (Step::Expand(V, 2 * SIZE), Step::Expand(V, 3 * SIZE));
        sweep_failures(
            used(config),
            first,
            &[Step::Stage(V), Step::Write(V, 8)],
            last,
        );
    }
}

#[test]
fn growths_of_a_staged_volume() {
    for config in [BTRFS, VolumeConfig::BLOCK] {
        let grown = [Step::NodeExpandVolume(V), Step::Write(V, 8)];
        let (first, last) = (Step::Expand(V, 2 * SIZE), Step::Expand(V, 3 * SIZE));
        sweep_failures(staged(config), first, &grown, last);
    }
    let (first, last) = (Step::Expand(V, 2 * SIZE), Step::NodeExpandVolume(V));
    sweep_failures(staged(XFS), first.clone(), &[first], last);
}

#[test]
fn a_growth_with_a_copy_between() {
    let (first, last) = (Step::Expand(V, 2 * SIZE), Step::Expand(V, 3 * SIZE));
    let cut = Step::Snapshot("s", V, Level::Filesystem);
    sweep_failures(staged(XFS), first.clone(), &[cut], last.clone());
    let clone = Step::Clone("new", V, VolumeConfig::EXT4, 2 * SIZE);
    sweep_failures(used(VolumeConfig::EXT4), first, &[clone], last);
}

#[test]
fn a_volume_that_is_deleted_after_its_creation() {
    for config in [VolumeConfig::EXT4, VolumeConfig::THICK, VolumeConfig::BLOCK] {
        let create = Step::Create(V, config);
        sweep_failures(vec![], create.clone(), &[create], Step::Delete(V));
    }
    let wiped = used(VolumeConfig::EXT4.wiped(Wipe::Zero));
    let delete = [Step::Delete(V)];
    sweep_failures(wiped, Step::Delete(V), &delete, Step::Create(V, XFS));
    let publish = Step::PublishInline(V, XFS);
    let uses = [publish.clone(), Step::Write(V, 7)];
    sweep_failures(vec![], publish, &uses, Step::UnpublishInline(V));
}

#[test]
fn a_volume_that_is_unstaged_after_its_stage() {
    for config in [VolumeConfig::EXT4, BTRFS] {
        let (create, stage) = (vec![Step::Create(V, config)], Step::Stage(V));
        let uses = [stage.clone(), Step::Write(V, 7)];
        sweep_failures(create, stage.clone(), &uses, Step::Unstage(V));
        sweep_failures(
            used(config),
            stage.clone(),
            &[stage],
            Step::Publish(V, 0, false),
        );
    }
    let block = vec![Step::Create(V, VolumeConfig::BLOCK), Step::Stage(V)];
    let publish = Step::Publish(V, 0, false);
    let uses = [publish.clone(), Step::Write(V, 7)];
    sweep_failures(block.clone(), publish, &uses, Step::Unpublish(V, 0));
    let stage = [Step::Unstage(V)];
    sweep_failures(block, Step::Unstage(V), &stage, Step::Stage(V));
}

#[test]
fn cuts_with_a_write_between() {
    for config in [VolumeConfig::EXT4, VolumeConfig::THICK] {
        let cut = |name| Step::Snapshot(name, V, Level::Filesystem);
        let uses = [cut("s"), Step::Write(V, 8)];
        sweep_failures(staged(config), cut("s"), &uses, cut("t"));
        sweep_failures(staged(config), cut("s"), &uses, Step::DeleteSnapshot("s"));
        let restore = Step::Restore("new", "s", config, 2 * SIZE);
        sweep_failures(staged(config), cut("s"), &uses, restore);
    }
}

#[test]
fn groups_with_a_write_between() {
    let before: Vec<Step> = ["a", "b"]
        .into_iter()
        .flat_map(|name| {
            let write = Step::Write(name, 1);
            [Step::Create(name, XFS), Step::Stage(name), write]
        })
        .collect();
    let group = |name| Step::Group(name, &["a", "b"]);
    let uses = [group("g"), Step::Write("a", 8)];
    sweep_failures(before.clone(), group("g"), &uses, group("h"));
    sweep_failures(before, group("g"), &uses, Step::DeleteGroup("g"));
}
