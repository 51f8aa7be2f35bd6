//! The selection of trials: every effect and every read of the host fails in every mode, and so
//! does what an undo adds. By default only a share of the trials runs, spread evenly: each scenario
//! begins at another position, and the modes alternate from effect to effect.
//! `SLACKWATER_SWEEP=full` runs all of them, and `SLACKWATER_SWEEP=3/16` those of about one scenario in
//! 16.

use std::path::PathBuf;

use nix::errno::Errno;
use slackwater::host::memory::{FaultMode, Unreadable};
use slackwater_testkit::Sweep;

use crate::fault_sweep::trial::{Baseline, Fault, FollowUp, Scenario, TrialResult};
use crate::simulation::check::ObservedState;
use crate::simulation::{LastingFault, Simulation, Step, settings};

const MODES: [FaultMode; 6] = [
    FaultMode::Before(Errno::EIO),
    FaultMode::Before(Errno::ENOSPC),
    FaultMode::Before(Errno::EBUSY),
    FaultMode::After(Errno::EIO),
    FaultMode::CrashBefore,
    FaultMode::CrashAfter,
];

/// One in this many trials runs, unless all are requested.
const SHARE: usize = 2;

/// The selection of trials.
pub struct Sample {
    share: usize,
    /// The position at which this scenario begins.
    from: usize,
}

/// A number that differs between scenarios, and is the same in each run.
fn position(description: &str) -> usize {
    description.bytes().map(usize::from).sum()
}

/// Whether the scenario with this description belongs to the part of all scenarios that is requested.
pub fn is_requested(description: &str) -> bool {
    let Sweep { n, of, .. } = Sweep::requested();
    position(description) % of == n
}

impl Sample {
    fn of(scenario: &Scenario) -> Sample {
        Sample::one_in(SHARE, &scenario.description())
    }

    /// One in `share` trials, unless all are requested.
    pub fn one_in(share: usize, description: &str) -> Sample {
        let is_full = Sweep::requested().is_full;
        let share = if is_full { 1 } else { share };
        let from = position(description);
        Sample { share, from }
    }

    /// The selected ones of this number of trials.
    fn of_all(&self, all: usize) -> Vec<usize> {
        (1..=all).filter(|n| self.has(&[*n])).collect()
    }

    /// Whether a trial is selected; `place` identifies it.
    pub fn has(&self, place: &[usize]) -> bool {
        (self.from + place.iter().sum::<usize>()).is_multiple_of(self.share)
    }
}

impl Scenario {
    fn description(&self) -> String {
        format!("{:?} {:?}", self.before, self.act)
    }

    pub fn sweep(&self) {
        if !is_requested(&self.description()) {
            return;
        }
        let (baseline, mut failures) = self.single();
        for n in 1..=baseline.effects {
            self.sweep_undo(&baseline, n, &mut failures);
        }
        failures.assert_none(&self.act);
    }

    /// The same with one fault at a time, for calls with many effects.
    pub fn sweep_once(&self) {
        if !is_requested(&self.description()) {
            return;
        }
        let (_, failures) = self.single();
        failures.assert_none(&self.act);
    }

    /// Without a fault, and with the process killed after each effect in turn; for many calls.
    pub fn sweep_crashes(&self) {
        if !is_requested(&self.description()) {
            return;
        }
        let baseline = self.baseline();
        let mut failures = Failures::of(self);
        self.all(&baseline, &[Fault::Effects(Vec::new())], &mut failures);
        for n in failures.sample.of_all(baseline.effects) {
            let crash = Fault::Effects(vec![(n, FaultMode::CrashAfter)]);
            self.all(&baseline, &[crash], &mut failures);
        }
        failures.assert_none(&self.act);
    }

    fn single(&self) -> (Baseline, Failures) {
        let baseline = self.baseline();
        let mut failures = Failures::of(self);
        self.all(&baseline, &[Fault::Effects(Vec::new())], &mut failures);
        for n in failures.sample.of_all(baseline.looks) {
            self.all(&baseline, &[Fault::Look(n)], &mut failures);
        }
        for (n, lasting_fault) in self.lasting_fault().into_iter().enumerate() {
            if failures.sample.has(&[n]) {
                self.all(
                    &baseline,
                    &[Fault::LastingFault(lasting_fault)],
                    &mut failures,
                );
            }
        }
        for n in 1..=baseline.effects {
            for (way, mode) in MODES.into_iter().enumerate() {
                if failures.sample.has(&[n, way]) {
                    self.all(&baseline, &[Fault::Effects(vec![(n, mode)])], &mut failures);
                }
            }
        }
        (baseline, failures)
    }

    /// The faults that may last from the call on.
    fn lasting_fault(&self) -> Vec<LastingFault> {
        let mut records = Simulation::after(&self.before).record_files();
        let (error, zeros) = (Unreadable::Error, Unreadable::Zeros);
        let ways = |path: &PathBuf| {
            [error, zeros].map(|mode| LastingFault::Unreadable(path.clone(), mode))
        };
        let mut all = vec![LastingFault::Full, LastingFault::Dead { remounted: false }];
        all.extend(records.iter().flat_map(ways));
        // A driver that was started before the fault reads them in the middle of calls, or while it
        // refreshes its pools.
        records.push(settings().node_record);
        let later_reads = |path: &PathBuf| {
            let ways = [(error, 0), (error, 1), (zeros, 1), (error, 2)];
            ways.map(|(mode, reads)| LastingFault::UnreadableAfter(path.clone(), mode, reads))
        };
        all.extend(records.iter().flat_map(later_reads));
        all
    }

    /// A foreign process thaws before each effect in turn: what was cut then is never served.
    pub fn sweep_thaws(&self) {
        if !is_requested(&self.description()) {
            return;
        }
        let baseline = self.baseline();
        let mut failures = Failures::of(self);
        for n in 1..=baseline.effects {
            let thaw = Fault::Effects(vec![(n, FaultMode::Thaw)]);
            self.all(&baseline, &[thaw], &mut failures);
        }
        failures.assert_none(&self.act);
    }

    /// The n-th effect fails, and in addition each later one in turn.
    fn sweep_undo(&self, baseline: &Baseline, n: usize, failures: &mut Failures) {
        let first = (n, FaultMode::Before(Errno::EIO));
        for (way, second) in [FaultMode::Before(Errno::EIO), FaultMode::CrashAfter]
            .into_iter()
            .enumerate()
        {
            let pair = |after| [Fault::Effects(vec![first, (n + after, second)])];
            (1..)
                .take_while(|after| {
                    // A trial that is not selected does not end the loop.
                    !failures.sample.has(&[n, way, *after])
                        || self.all(baseline, &pair(*after), failures)
                })
                .for_each(drop);
        }
    }

    /// A call whose undo fails as well, and then each effect and each read of its repeat fails.
    /// First calls that leave the same state are tried once.
    pub fn sweep_repeat(&self) {
        if !is_requested(&self.description()) {
            return;
        }
        let baseline = self.baseline();
        let mut failures = Failures::of(self);
        let mut known_states = Vec::new();
        let eio = FaultMode::Before(Errno::EIO);
        for n in 1..=baseline.effects {
            let cut_off = Fault::Effects(vec![(n, FaultMode::CrashAfter)]);
            if failures.sample.has(&[n]) {
                self.sweep_second(&baseline, cut_off, &mut known_states, &mut failures);
            }
            let undone = |after| Fault::Effects(vec![(n, eio), (n + after, eio)]);
            (1..)
                .take_while(|after| {
                    !failures.sample.has(&[n, *after])
                        || self.sweep_second(
                            &baseline,
                            undone(*after),
                            &mut known_states,
                            &mut failures,
                        )
                })
                .for_each(drop);
        }
        failures.assert_none(&self.act);
    }

    /// Every fault of the call that follows a first fault. Returns whether the first fault
    /// occurred.
    fn sweep_second(
        &self,
        baseline: &Baseline,
        first: Fault,
        known_states: &mut Vec<(ObservedState, bool)>,
        failures: &mut Failures,
    ) -> bool {
        if !self.all(baseline, std::slice::from_ref(&first), failures) {
            return false;
        }
        let left = self.left_after(&first);
        if known_states.contains(&left) {
            return true;
        }
        known_states.push(left);
        let eio = FaultMode::Before(Errno::EIO);
        let effect = |n| [first.clone(), Fault::Effects(vec![(n, eio)])];
        let look = |n| [first.clone(), Fault::Look(n)];
        let state_number = known_states.len();
        (1..)
            .take_while(|n| {
                !failures.sample.has(&[state_number, *n])
                    || self.all(baseline, &effect(*n), failures)
            })
            .for_each(drop);
        (1..)
            .take_while(|n| {
                !failures.sample.has(&[state_number, *n]) || self.all(baseline, &look(*n), failures)
            })
            .for_each(drop);
        true
    }

    fn left_after(&self, fault: &Fault) -> (ObservedState, bool) {
        let mut sim = Simulation::after(&self.before);
        fault.plan(&mut sim).expect("a fault can be planned");
        // The trial judges the answer.
        let _ = sim.run(&self.act);
        let mut observed_state = sim.observed_state();
        // Names in the trash have a random part.
        for file in observed_state
            .files
            .iter_mut()
            .filter(|file| file.starts_with("trash/"))
        {
            *file = file
                .split_once('.')
                .map_or(file.clone(), |(_, rest)| rest[8..].into());
        }
        (observed_state, sim.host.is_alive())
    }

    /// All follow-ups of these faults. Returns whether all faults occurred.
    fn all(&self, baseline: &Baseline, faults: &[Fault], failures: &mut Failures) -> bool {
        let mut result = TrialResult::default();
        let repeats = [
            FollowUp::Repeat,
            FollowUp::PowerLoss,
            FollowUp::RepeatAndPowerLoss,
        ];
        for then in repeats.into_iter().chain([FollowUp::Forget]) {
            let of_interest = match then {
                FollowUp::Forget => result.forgotten,
                // Trials with a single fault show what a second one adds.
                FollowUp::RepeatAndPowerLoss => self.act.rpc().is_some() && faults[0].is_single(),
                FollowUp::Repeat | FollowUp::PowerLoss => true,
            };
            if !of_interest {
                continue;
            }
            failures.trials += 1;
            match self.trial(baseline, faults, then) {
                Ok(this) => result = this,
                Err(why) => failures.found.push(format!("{faults:?}, {then:?}: {why}")),
            }
        }
        result.fired
    }
}

/// The failures of all trials, because one defect seldom comes alone.
struct Failures {
    sample: Sample,
    trials: usize,
    found: Vec<String>,
}

impl Failures {
    fn of(scenario: &Scenario) -> Failures {
        Failures {
            sample: Sample::of(scenario),
            trials: 0,
            found: Vec::new(),
        }
    }

    fn assert_none(&self, act: &Step) {
        let first: Vec<_> = self.found.iter().take(12).cloned().collect();
        let (found, trials) = (self.found.len(), self.trials);
        assert_eq!(found, 0, "{act:?}, of {trials}:\n{}", first.join("\n"));
    }
}
