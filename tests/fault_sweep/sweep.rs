//! Which trials there are: every effect and every look in every way, and what an undo adds. By
//! default a share of them, spread evenly: each scenario begins elsewhere, and the ways take turns
//! from effect to effect. `SLACKWATER_SWEEP=full` has all of them.

use std::path::PathBuf;

use nix::errno::Errno;
use slackwater::host::memory::{FaultMode, Unreadable};

use crate::trial::{Calm, Came, Fault, Scenario, Then};
use crate::world::check::Picture;
use crate::world::{Lasting, Step, World, settings};

const MODES: [FaultMode; 6] = [
    FaultMode::Before(Errno::EIO),
    FaultMode::Before(Errno::ENOSPC),
    FaultMode::Before(Errno::EBUSY),
    FaultMode::After(Errno::EIO),
    FaultMode::CrashBefore,
    FaultMode::CrashAfter,
];

/// One in so many trials is made, unless all are asked for.
const SHARE: usize = 2;

/// Which trials are made.
pub struct Sample {
    share: usize,
    /// Where this scenario begins.
    from: usize,
}

impl Sample {
    fn of(scenario: &Scenario) -> Sample {
        Sample::one_in(SHARE, &format!("{:?} {:?}", scenario.before, scenario.act))
    }

    /// One in so many, unless all are asked for.
    pub fn one_in(share: usize, said: &str) -> Sample {
        let full = std::env::var_os("SLACKWATER_SWEEP").is_some_and(|value| value == "full");
        let share = if full { 1 } else { share };
        let from = said.bytes().map(usize::from).sum();
        Sample { share, from }
    }

    /// Which of so many.
    fn of_all(&self, all: usize) -> Vec<usize> {
        (1..=all).filter(|n| self.has(&[*n])).collect()
    }

    /// Whether a trial is made; `place` says which it is.
    pub fn has(&self, place: &[usize]) -> bool {
        (self.from + place.iter().sum::<usize>()).is_multiple_of(self.share)
    }
}

impl Scenario {
    pub fn sweep(&self) {
        let (calm, mut failures) = self.single();
        for n in 1..=calm.effects {
            self.sweep_undo(&calm, n, &mut failures);
        }
        failures.assert_none(&self.act);
    }

    /// The same with one fault at a time: for calls of many effects.
    pub fn sweep_once(&self) {
        let (_, failures) = self.single();
        failures.assert_none(&self.act);
    }

    /// Nothing goes wrong, or the process dies after each effect in turn: for many calls.
    pub fn sweep_crashes(&self) {
        let calm = self.calm();
        let mut failures = Failures::of(self);
        self.all(&calm, &[Fault::Effects(Vec::new())], &mut failures);
        for n in failures.sample.of_all(calm.effects) {
            let crash = Fault::Effects(vec![(n, FaultMode::CrashAfter)]);
            self.all(&calm, &[crash], &mut failures);
        }
        failures.assert_none(&self.act);
    }

    fn single(&self) -> (Calm, Failures) {
        let calm = self.calm();
        let mut failures = Failures::of(self);
        self.all(&calm, &[Fault::Effects(Vec::new())], &mut failures);
        for n in failures.sample.of_all(calm.looks) {
            self.all(&calm, &[Fault::Look(n)], &mut failures);
        }
        for (n, lasting) in self.lasting().into_iter().enumerate() {
            if failures.sample.has(&[n]) {
                self.all(&calm, &[Fault::Lasting(lasting)], &mut failures);
            }
        }
        for n in 1..=calm.effects {
            for (way, mode) in MODES.into_iter().enumerate() {
                if failures.sample.has(&[n, way]) {
                    self.all(&calm, &[Fault::Effects(vec![(n, mode)])], &mut failures);
                }
            }
        }
        (calm, failures)
    }

    /// What may be wrong from the call on, and stay so.
    fn lasting(&self) -> Vec<Lasting> {
        let mut records = World::after(&self.before).record_files();
        let (error, zeros) = (Unreadable::Error, Unreadable::Zeros);
        let ways =
            |path: &PathBuf| [error, zeros].map(|how| Lasting::Unreadable(path.clone(), how));
        let mut all = vec![Lasting::Full, Lasting::Dead { anew: false }];
        all.extend(records.iter().flat_map(ways));
        // A driver that has begun before reads them in the middle of calls, or while it looks.
        records.push(settings().node_record);
        let later = |path: &PathBuf| {
            let ways = [(error, 0), (error, 1), (zeros, 1), (error, 2)];
            ways.map(|(how, reads)| Lasting::UnreadableAfter(path.clone(), how, reads))
        };
        all.extend(records.iter().flat_map(later));
        all
    }

    /// A stranger thaws before each effect in turn: what was cut then is never served.
    pub fn sweep_thaws(&self) {
        let calm = self.calm();
        let mut failures = Failures::of(self);
        for n in 1..=calm.effects {
            let thaw = Fault::Effects(vec![(n, FaultMode::Thaw)]);
            self.all(&calm, &[thaw], &mut failures);
        }
        failures.assert_none(&self.act);
    }

    /// The n-th effect fails, and then each that follows it.
    fn sweep_undo(&self, calm: &Calm, n: usize, failures: &mut Failures) {
        let first = (n, FaultMode::Before(Errno::EIO));
        for (way, second) in [FaultMode::Before(Errno::EIO), FaultMode::CrashAfter]
            .into_iter()
            .enumerate()
        {
            let pair = |after| [Fault::Effects(vec![first, (n + after, second)])];
            (1..)
                .take_while(|after| {
                    // What isn't tried isn't the end.
                    !failures.sample.has(&[n, way, *after])
                        || self.all(calm, &pair(*after), failures)
                })
                .for_each(drop);
        }
    }

    /// A call whose undo fails as well, and then each effect and each look of its repeat. What
    /// looks the same after the first call is tried once.
    pub fn sweep_repeat(&self) {
        let calm = self.calm();
        let mut failures = Failures::of(self);
        let mut seen = Vec::new();
        let eio = FaultMode::Before(Errno::EIO);
        for n in 1..=calm.effects {
            let cut_off = Fault::Effects(vec![(n, FaultMode::CrashAfter)]);
            if failures.sample.has(&[n]) {
                self.sweep_second(&calm, cut_off, &mut seen, &mut failures);
            }
            let undone = |after| Fault::Effects(vec![(n, eio), (n + after, eio)]);
            (1..)
                .take_while(|after| {
                    !failures.sample.has(&[n, *after])
                        || self.sweep_second(&calm, undone(*after), &mut seen, &mut failures)
                })
                .for_each(drop);
        }
        failures.assert_none(&self.act);
    }

    /// Every fault of the call that follows a first one; says whether the first came true.
    fn sweep_second(
        &self,
        calm: &Calm,
        first: Fault,
        seen: &mut Vec<(Picture, bool)>,
        failures: &mut Failures,
    ) -> bool {
        if !self.all(calm, std::slice::from_ref(&first), failures) {
            return false;
        }
        let left = self.left_after(&first);
        if seen.contains(&left) {
            return true;
        }
        seen.push(left);
        let eio = FaultMode::Before(Errno::EIO);
        let effect = |n| [first.clone(), Fault::Effects(vec![(n, eio)])];
        let look = |n| [first.clone(), Fault::Look(n)];
        let among = seen.len();
        (1..)
            .take_while(|n| {
                !failures.sample.has(&[among, *n]) || self.all(calm, &effect(*n), failures)
            })
            .for_each(drop);
        (1..)
            .take_while(|n| {
                !failures.sample.has(&[among, *n]) || self.all(calm, &look(*n), failures)
            })
            .for_each(drop);
        true
    }

    fn left_after(&self, fault: &Fault) -> (Picture, bool) {
        let mut world = World::after(&self.before);
        fault.plan(&mut world).expect("a fault can be planned");
        // The answer is judged in the trial.
        let _ = world.run(&self.act);
        let mut picture = world.picture();
        // Names in the trash have a random part.
        for file in picture
            .files
            .iter_mut()
            .filter(|file| file.starts_with("trash/"))
        {
            *file = file
                .split_once('.')
                .map_or(file.clone(), |(_, rest)| rest[8..].into());
        }
        (picture, world.host.is_alive())
    }

    /// Whatever comes after; says whether all faults came true.
    fn all(&self, calm: &Calm, faults: &[Fault], failures: &mut Failures) -> bool {
        let mut came = Came::default();
        let repeats = [Then::Repeat, Then::PowerLoss, Then::RepeatAndPowerLoss];
        for then in repeats.into_iter().chain([Then::Forget]) {
            let of_interest = match then {
                Then::Forget => came.forgotten,
                // What a second fault adds is seen without it.
                Then::RepeatAndPowerLoss => self.act.rpc().is_some() && faults[0].is_single(),
                Then::Repeat | Then::PowerLoss => true,
            };
            if !of_interest {
                continue;
            }
            failures.trials += 1;
            match self.trial(calm, faults, then) {
                Ok(this) => came = this,
                Err(why) => failures.found.push(format!("{faults:?}, {then:?}: {why}")),
            }
        }
        came.fired
    }
}

/// What the trials have found: all of it, because one defect seldom comes alone.
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
