//! One trial: a call that fails, what the caller does next, and what must hold then.

use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use slackwater::error::{Result, chain};
use slackwater::host::Host;
use slackwater::host::memory::FaultMode;
use slackwater::model::size::image_bytes;

use crate::simulation::check::ObservedState;
use crate::simulation::{LastingFault, SIZE, Simulation, Step, is_thin};

/// A caller repeats its call. If it has not succeeded after this many tries, it never will.
const TRIES: usize = 4;

/// The time between the tries of a caller while a fault lasts: longer than every pause of the driver.
/// Both are shorter than the hour after which what a cut off call has begun is deleted.
const BETWEEN_TRIES: Duration = Duration::from_secs(1500);

/// An operation, and the steps before it.
pub struct Scenario {
    pub before: Vec<Step>,
    pub act: Step,
}

/// Faults, in order. Positions count from the operation's first effect.
#[derive(Clone, Debug)]
pub enum Fault {
    Effects(Vec<(usize, FaultMode)>),
    Look(usize),
    /// A fault that lasts during all of the caller's calls. A driver that was started before such a
    /// fault remembers what it has read, so it starts again; a disk, however, dies while it is
    /// served.
    LastingFault(LastingFault),
}

impl Fault {
    pub fn is_single(&self) -> bool {
        match self {
            Fault::Look(_) | Fault::LastingFault(_) => true,
            Fault::Effects(faults) => faults.len() < 2,
        }
    }

    pub fn plan(&self, sim: &mut Simulation) -> Result<(), String> {
        match self {
            Fault::LastingFault(lasting_fault) => {
                sim.begin(lasting_fault);
                if matches!(lasting_fault, LastingFault::Unreadable(..)) && sim.is_up() {
                    let started = sim.run(&Step::Start);
                    started
                        .map_err(|error| format!("under {lasting_fault:?}: {}", chain(&error)))?;
                }
            }
            Fault::Effects(faults) => {
                for (n, mode) in faults {
                    sim.host.fail_effect(*n, *mode);
                }
            }
            Fault::Look(n) => sim.host.fail_query(*n, Errno::EIO),
        }
        Ok(())
    }
}

/// What the caller does after a call that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FollowUp {
    Repeat,
    PowerLoss,
    /// Repeats until the call succeeds; then the power fails.
    RepeatAndPowerLoss,
    /// After a final error: the caller considers the object deleted, and goes on without it.
    Forget,
}

/// The result of a call without faults.
pub struct Baseline {
    pub end: Outcome,
    /// The same after a reboot.
    pub rebooted: Outcome,
    pub effects: usize,
    pub looks: usize,
}

/// The caller's answer, and the visible state.
pub struct Outcome {
    pub answer: String,
    pub observed_state: ObservedState,
}

impl Scenario {
    pub fn baseline(&self) -> Baseline {
        let mut sim = Simulation::after(&self.before);
        let (effects, looks) = (sim.host.effects(), sim.host.looks());
        let answer = sim
            .run(&self.act)
            .expect("the call succeeds without faults");
        let (effects, looks) = (sim.host.effects() - effects, sim.host.looks() - looks);
        let observed_state = sim.observed_state();
        let end = Outcome {
            answer,
            observed_state,
        };
        sim.finish().expect("everything can be deleted");
        let mut sim = Simulation::after(&self.before);
        sim.reboot(true);
        let answer = self
            .attempt(&mut sim, true)
            .expect("the call succeeds after a reboot");
        let observed_state = sim.observed_state();
        Baseline {
            end,
            rebooted: Outcome {
                answer,
                observed_state,
            },
            effects,
            looks,
        }
    }

    /// The steps that the kubelet repeats after a reboot, before it repeats the call.
    pub fn steps_after_reboot(&self) -> Vec<Step> {
        let mut steps: Vec<Step> = Vec::new();
        for step in self.before.iter().chain([&self.act]) {
            match step {
                Step::Stage(_) | Step::Publish(..) | Step::PublishInline(..) => {
                    steps.push(step.clone());
                }
                Step::Unpublish(_, n) => {
                    steps.retain(|done| !matches!(done, Step::Publish(_, m, _) if n == m));
                }
                Step::UnpublishInline(_) | Step::Start => steps.clear(),
                Step::Unstage(_) => steps.retain(|done| !matches!(done, Step::Stage(_))),
                _ => {}
            }
        }
        if steps.last() == Some(&self.act) {
            steps.pop();
        }
        steps
    }

    /// Makes one or several calls that fail, and checks the result.
    pub fn trial(
        &self,
        baseline: &Baseline,
        faults: &[Fault],
        then: FollowUp,
    ) -> Result<TrialResult, String> {
        let mut sim = Simulation::after(&self.before);
        let before = sim.observed_state();
        let (mut fired, mut forgotten, mut acknowledged) = (true, false, false);
        let mut history = String::new();
        for fault in faults {
            // A start that comes next meets a fault that lasts.
            if !sim.is_up() && !matches!(fault, Fault::LastingFault(_)) {
                let started = sim.run(&Step::Start);
                started.map_err(|error| format!("{history}{}", chain(&error)))?;
            }
            fault.plan(&mut sim)?;
            let mut answer = sim.run(&self.act);
            fired &= sim.host.faults_left() == 0;
            sim.host.clear_faults();
            if let Fault::LastingFault(lasting_fault) = fault {
                answer = self.repeat_under(&mut sim, lasting_fault, answer, &before)?;
            }
            // A process that has ended has not answered, whatever the result of its last call.
            acknowledged = answer.is_ok() && self.act.rpc().is_some() && sim.host.is_alive();
            forgotten =
                answer.as_ref().is_err_and(|error| self.act.is_final(error)) && sim.host.is_alive();
            history = format!(
                "{history}after {:?}, ",
                answer.map_err(|error| chain(&error))
            );
            // A growth that was cut off leaves a longer image, which the next growth takes over.
            let is_growth = matches!(self.act, Step::Expand(..)) && faults.len() > 1;
            if forgotten && !is_growth {
                self.check_nothing_left(&sim, &before)
                    .map_err(|left| format!("{history}which is final, but: {left}"))?;
            }
        }
        let end = match then {
            FollowUp::Forget if forgotten => self.forget(&mut sim),
            FollowUp::Forget => Ok(()),
            FollowUp::Repeat => self.converge(&mut sim, baseline, false),
            FollowUp::RepeatAndPowerLoss => self.repeat(&mut sim, false).and_then(|_| {
                let records = sim.records();
                sim.reboot(true);
                self.check_durable(&mut sim, &records)?;
                sim.finish()
            }),
            FollowUp::PowerLoss => {
                let records = sim.records();
                sim.reboot(true);
                // The trash may come back: every start purges it before the first call.
                let volumes = |observed_state: ObservedState| {
                    let mut files = observed_state.files;
                    files.retain(|file| !file.starts_with("trash/"));
                    files
                };
                let (now, then) = (volumes(sim.observed_state()), volumes(before));
                let durably = match self.act {
                    Step::Create(..)
                    | Step::PublishInline(..)
                    | Step::Snapshot(..)
                    | Step::Restore(..)
                    | Step::Receive(..)
                    | Step::ImportFile(..)
                    | Step::Clone(..)
                    | Step::Group(..)
                        if forgotten && now != then =>
                    {
                        Err(format!("after a power loss: {now:?} instead of {then:?}"))
                    }
                    _ => Ok(()),
                };
                durably
                    .and_then(|()| match acknowledged {
                        true => self.check_durable(&mut sim, &records),
                        false => Ok(()),
                    })
                    .and_then(|()| self.converge(&mut sim, baseline, true))
            }
        };
        end.map_err(|why| format!("{history}{why}"))?;
        Ok(TrialResult { fired, forgotten })
    }

    /// The caller repeats while the fault lasts, and then the fault ends. Returns the caller's last
    /// answer.
    fn repeat_under(
        &self,
        sim: &mut Simulation,
        lasting_fault: &LastingFault,
        first: Result<String>,
        before: &ObservedState,
    ) -> Result<Result<String>, String> {
        let is_final = |answer: &Result<String>| {
            let is_final = |error| self.act.is_final(error);
            answer.as_ref().is_err_and(is_final)
        };
        let mut answer = first;
        let home = |sim: &Simulation| sim.driver().ok().map(|driver| driver.pools.home());
        let home_before = home(sim);
        for _ in 0..2 {
            if let Err(error) = &answer {
                let must_succeed = match lasting_fault {
                    LastingFault::Full => self.act.is_undoing(),
                    LastingFault::Dead { .. } | LastingFault::Hangs => self.act.is_unmounting(),
                    LastingFault::Unreadable(..) => false,
                    LastingFault::UnreadableAfter(..) => {
                        lasting_fault.is_of_node_record() && self.act != Step::Start
                    }
                };
                if must_succeed {
                    return Err(format!("under {lasting_fault:?}: {}", chain(error)));
                }
                if is_final(&answer) {
                    let left = self.check_nothing_left(sim, before);
                    left.map_err(|left| format!("{}, which is final, but: {left}", chain(error)))?;
                    // The caller has forgotten the object.
                    break;
                }
            }
            sim.check()?;
            sim.host.pass_time(BETWEEN_TRIES);
            let is_refresh_needed =
                lasting_fault.has_no_disk() || lasting_fault.is_of_node_record();
            if is_refresh_needed && sim.is_up() {
                let refreshed = sim.run(&Step::Refresh);
                refreshed.map_err(|error| chain(&error))?;
            }
            answer = sim.run(&self.act);
        }
        sim.check()?;
        if self.act != Step::Start && home(sim) != home_before {
            return Err(format!("the home changed under {lasting_fault:?}"));
        }
        sim.end();
        if sim.is_up() {
            let refreshed = sim.run(&Step::Refresh);
            refreshed.map_err(|error| chain(&error))?;
        }
        Ok(answer)
    }

    /// What was acknowledged survives a power loss.
    pub fn check_durable(&self, sim: &mut Simulation, before: &[String]) -> Result<(), String> {
        sim.run(&Step::Start).map_err(|error| chain(&error))?;
        let now = sim.records();
        match now == *before {
            true => Ok(()),
            false => Err(format!("after a power loss: {now:?} instead of {before:?}")),
        }
    }

    /// The caller goes on without the object, on a driver that has started again.
    pub fn forget(&self, sim: &mut Simulation) -> Result<(), String> {
        let mut steps = vec![Step::Start];
        match self.act {
            Step::Stage(name) => steps.push(Step::Delete(name)),
            Step::Publish(name, n, _) => {
                steps.extend([Step::Unpublish(name, 1 - n), Step::Unstage(name)]);
                steps.push(Step::Delete(name));
            }
            _ => {}
        }
        let mounted_before = self.before.contains(&self.act);
        for step in steps.into_iter().filter(|_| !mounted_before) {
            let done = sim.run(&step);
            done.map_err(|error| {
                format!("after forgetting the object, {step:?}: {}", chain(&error))
            })?;
        }
        Ok(())
    }

    /// A caller that has forgotten the object must have left nothing.
    pub fn check_nothing_left(
        &self,
        sim: &Simulation,
        before: &ObservedState,
    ) -> Result<(), String> {
        let now = sim.observed_state();
        let difference = match self.act {
            Step::Create(..)
            | Step::PublishInline(..)
            | Step::Publish(..)
            | Step::Snapshot(..)
            | Step::Restore(..)
            | Step::Receive(..)
            | Step::ImportFile(..)
            | Step::Clone(..)
            | Step::Group(..) => now.differs(before),
            Step::Stage(_) => now.differs(&ObservedState {
                mounted: before.mounted.clone(),
                loops: before.loops,
                ..now.clone()
            }),
            Step::Expand(name, _) if !self.is_as_long_as_before(sim, name) => {
                Some("the image is longer than before".into())
            }
            _ => None,
        };
        difference.map_or(Ok(()), Err)
    }

    pub fn is_as_long_as_before(&self, sim: &Simulation, name: &str) -> bool {
        let id = &sim.ids[name];
        // Only an image file has a length besides that of its record.
        if is_thin() {
            return true;
        }
        let image = sim.image("volumes", id);
        let image = sim.host.without_faults(|host| host.stat(Path::new(&image)));
        let image = image.expect("the host is alive");
        image.is_some_and(|image| image.size == image_bytes(SIZE))
    }

    /// Repeats the call, and returns its answer.
    pub fn repeat(&self, sim: &mut Simulation, power_loss: bool) -> Result<String, String> {
        let mut last = String::from("never tried");
        for _ in 0..TRIES {
            match self.attempt(sim, power_loss) {
                Ok(answer) => return Ok(answer),
                Err(error) => last = chain(&error),
            }
        }
        Err(format!("does not converge: {last}"))
    }

    pub fn converge(
        &self,
        sim: &mut Simulation,
        baseline: &Baseline,
        power_loss: bool,
    ) -> Result<(), String> {
        let answer = self.repeat(sim, power_loss)?;
        let expected = if power_loss {
            &baseline.rebooted
        } else {
            &baseline.end
        };
        // What was never answered may exist or not after a power loss.
        let open = power_loss
            && self
                .before
                .iter()
                .any(|step| matches!(step, Step::CutOff(..)));
        if answer != expected.answer && !open {
            return Err(format!("{answer} instead of {}", expected.answer));
        }
        if let Some(difference) = sim
            .observed_state()
            .differs(&expected.observed_state)
            .filter(|_| !open)
        {
            return Err(difference);
        }
        sim.check()?;
        if let Step::Group(name, volumes) = self.act {
            sim.check_order(name, volumes)?;
        }
        match sim.run(&self.act).map_err(|error| chain(&error)) {
            Ok(again) if again == answer => sim.finish(),
            other => Err(format!("the next repeat answers {other:?}")),
        }
    }

    pub fn attempt(&self, sim: &mut Simulation, power_loss: bool) -> Result<String> {
        // The driver no longer remembers a failed cut.
        sim.host.pass_time(Duration::from_secs(3600));
        if self.act == Step::Start && sim.is_up() {
            // What the process does by itself, every 10 seconds, for pools that are not served.
            // Leftovers that it could not clean up wait for the next start.
            if sim.refuses() {
                return sim.run(&Step::Refresh);
            }
        }
        if !sim.is_up() {
            sim.run(&Step::Start)?;
        }
        if power_loss {
            for step in self.steps_after_reboot() {
                sim.run(&step)?;
            }
        }
        sim.run(&self.act)
    }
}

/// The result of the faults of a trial.
#[derive(Clone, Copy, Debug, Default)]
pub struct TrialResult {
    /// All faults occurred.
    pub fired: bool,
    /// The caller has received a final error.
    pub forgotten: bool,
}
