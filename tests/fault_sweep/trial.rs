//! One trial: a call that goes wrong, what comes after, and what must hold then.

use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use slackwater::error::{Result, chain};
use slackwater::host::Host;
use slackwater::host::memory::FaultMode;
use slackwater::model::size::image_bytes;

use crate::world::check::Picture;
use crate::world::{Lasting, POOL, SIZE, Step, World};

/// A caller repeats; one that has not got there after so many tries never will.
const TRIES: usize = 4;

/// An operation, and what was before.
pub struct Scenario {
    pub before: Vec<Step>,
    pub act: Step,
}

/// What goes wrong, in order; positions count from the operation's first effect.
#[derive(Clone, Debug)]
pub enum Fault {
    Effects(Vec<(usize, FaultMode)>),
    Look(usize),
    /// Something that is so during all of the caller's calls. A driver that has begun before it
    /// remembers what it has read, so it starts again; but a disk dies while it is served.
    Lasting(Lasting),
}

impl Fault {
    pub fn is_single(&self) -> bool {
        match self {
            Fault::Look(_) | Fault::Lasting(_) => true,
            Fault::Effects(faults) => faults.len() < 2,
        }
    }

    pub fn plan(&self, world: &mut World) -> Result<(), String> {
        match self {
            Fault::Lasting(lasting) => {
                world.begin(lasting);
                if matches!(lasting, Lasting::Unreadable(..)) && world.is_up() {
                    let started = world.run(&Step::Start);
                    started.map_err(|error| format!("under {lasting:?}: {}", chain(&error)))?;
                }
            }
            Fault::Effects(faults) => {
                for (n, mode) in faults {
                    world.host.fail_effect(*n, *mode);
                }
            }
            Fault::Look(n) => world.host.fail_look(*n, Errno::EIO),
        }
        Ok(())
    }
}

/// What comes after a call that went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    Repeat,
    PowerLoss,
    /// Repeats until it's done, and then the power goes.
    RepeatAndPowerLoss,
    /// After a final answer: the caller has no such object any more, and goes on without it.
    Forget,
}

/// How an undisturbed call ends.
pub struct Calm {
    pub end: End,
    /// The same when the machine has booted again before.
    pub rebooted: End,
    pub effects: usize,
    pub looks: usize,
}

/// What the caller hears, and what can be seen.
pub struct End {
    pub answer: String,
    pub picture: Picture,
}

impl Scenario {
    pub fn calm(&self) -> Calm {
        let mut world = World::after(&self.before);
        let (effects, looks) = (world.host.effects(), world.host.looks());
        let answer = world.run(&self.act).expect("a calm call");
        let (effects, looks) = (world.host.effects() - effects, world.host.looks() - looks);
        let picture = world.picture();
        let end = End { answer, picture };
        world.finish().expect("a calm end");
        let mut world = World::after(&self.before);
        world.reboot(true);
        let answer = self
            .attempt(&mut world, true)
            .expect("a calm call after a reboot");
        let picture = world.picture();
        Calm {
            end,
            rebooted: End { answer, picture },
            effects,
            looks,
        }
    }

    /// What the kubelet does again after a reboot, before it repeats the call.
    pub fn again_after_reboot(&self) -> Vec<Step> {
        let mut again: Vec<Step> = Vec::new();
        for step in self.before.iter().chain([&self.act]) {
            match step {
                Step::Stage(_) | Step::Publish(..) | Step::PublishInline(..) => {
                    again.push(step.clone());
                }
                Step::Unpublish(_, n) => {
                    again.retain(|done| !matches!(done, Step::Publish(_, m, _) if n == m));
                }
                Step::UnpublishInline(_) | Step::Start => again.clear(),
                Step::Unstage(_) => again.retain(|done| !matches!(done, Step::Stage(_))),
                _ => {}
            }
        }
        if again.last() == Some(&self.act) {
            again.pop();
        }
        again
    }

    /// One call that goes wrong, or several in a row, and what must come of it.
    pub fn trial(&self, calm: &Calm, faults: &[Fault], then: Then) -> Result<Came, String> {
        let mut world = World::after(&self.before);
        let before = world.picture();
        let (mut fired, mut forgotten, mut acknowledged) = (true, false, false);
        let mut said = String::new();
        for fault in faults {
            // A start that comes next meets what lasts.
            if !world.is_up() && !matches!(fault, Fault::Lasting(_)) {
                let started = world.run(&Step::Start);
                started.map_err(|error| format!("{said}{}", chain(&error)))?;
            }
            fault.plan(&mut world)?;
            let mut answer = world.run(&self.act);
            fired &= world.host.faults_left() == 0;
            world.host.clear_faults();
            if let Fault::Lasting(lasting) = fault {
                answer = self.under(&mut world, lasting, answer, &before)?;
            }
            // A process that has ended has not answered, whatever its last call came to.
            acknowledged = answer.is_ok() && self.act.rpc().is_some() && world.host.is_alive();
            forgotten = answer.as_ref().is_err_and(|error| self.act.is_final(error))
                && world.host.is_alive();
            said = format!("{said}after {:?}, ", answer.map_err(|error| chain(&error)));
            // A growth that was cut off leaves a longer image, which the next growth takes over.
            let is_growth = matches!(self.act, Step::Expand(..)) && faults.len() > 1;
            if forgotten && !is_growth {
                self.nothing_left(&world, &before)
                    .map_err(|left| format!("{said}which is final: {left}"))?;
            }
        }
        let end = match then {
            Then::Forget if forgotten => self.forget(&mut world),
            Then::Forget => Ok(()),
            Then::Repeat => self.converge(&mut world, calm, false),
            Then::RepeatAndPowerLoss => self.repeat(&mut world, false).and_then(|_| {
                let kept = world.records();
                world.reboot(true);
                self.kept(&mut world, &kept)?;
                world.finish()
            }),
            Then::PowerLoss => {
                let kept = world.records();
                world.reboot(true);
                // Trash may come back: every start ends it before the first call.
                let volumes = |picture: Picture| {
                    let mut files = picture.files;
                    files.retain(|file| !file.starts_with("trash/"));
                    files
                };
                let (now, then) = (volumes(world.picture()), volumes(before));
                let durably = match self.act {
                    Step::Create(..)
                    | Step::PublishInline(..)
                    | Step::Snapshot(..)
                    | Step::Restore(..)
                    | Step::Clone(..)
                    | Step::Group(..)
                        if forgotten && now != then =>
                    {
                        Err(format!("and a power loss: {now:?} instead of {then:?}"))
                    }
                    _ => Ok(()),
                };
                durably
                    .and_then(|()| match acknowledged {
                        true => self.kept(&mut world, &kept),
                        false => Ok(()),
                    })
                    .and_then(|()| self.converge(&mut world, calm, true))
            }
        };
        end.map_err(|why| format!("{said}{why}"))?;
        Ok(Came { fired, forgotten })
    }

    /// The caller repeats while something lasts, and then it ends; the caller's last answer.
    fn under(
        &self,
        world: &mut World,
        lasting: &Lasting,
        first: Result<String>,
        before: &Picture,
    ) -> Result<Result<String>, String> {
        let is_final = |answer: &Result<String>| {
            let is_final = |error| self.act.is_final(error);
            answer.as_ref().is_err_and(is_final)
        };
        let mut answer = first;
        let home = |world: &World| world.driver().ok().map(|driver| driver.home());
        let home_before = home(world);
        for _ in 0..2 {
            if let Err(error) = &answer {
                let must_succeed = match lasting {
                    Lasting::Full => self.act.is_undoing(),
                    Lasting::Dead { .. } | Lasting::Hangs => self.act.is_unmounting(),
                    Lasting::Unreadable(..) => false,
                    Lasting::UnreadableAfter(..) => {
                        lasting.is_of_node_record() && self.act != Step::Start
                    }
                };
                if must_succeed {
                    return Err(format!("under {lasting:?}: {}", chain(error)));
                }
                if is_final(&answer) {
                    let left = self.nothing_left(world, before);
                    left.map_err(|left| format!("{}, which is final: {left}", chain(error)))?;
                    // The caller has forgotten it.
                    break;
                }
            }
            world.check()?;
            world.host.pass_time(Duration::from_secs(3600));
            let is_looked_for = lasting.has_no_disk() || lasting.is_of_node_record();
            if is_looked_for && world.is_up() {
                let looked = world.run(&Step::LookAgain);
                looked.map_err(|error| chain(&error))?;
            }
            answer = world.run(&self.act);
        }
        world.check()?;
        if self.act != Step::Start && home(world) != home_before {
            return Err(format!("another home under {lasting:?}"));
        }
        world.end();
        if world.is_up() {
            let looked = world.run(&Step::LookAgain);
            looked.map_err(|error| chain(&error))?;
        }
        Ok(answer)
    }

    /// What was acknowledged survives a power loss.
    pub fn kept(&self, world: &mut World, before: &[String]) -> Result<(), String> {
        world.run(&Step::Start).map_err(|error| chain(&error))?;
        let now = world.records();
        match now == *before {
            true => Ok(()),
            false => Err(format!("and a power loss: {now:?} instead of {before:?}")),
        }
    }

    /// The caller's life without the object, on a driver that has started again.
    pub fn forget(&self, world: &mut World) -> Result<(), String> {
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
            let done = world.run(&step);
            done.map_err(|error| format!("forgotten, {step:?}: {}", chain(&error)))?;
        }
        Ok(())
    }

    /// A caller that has forgotten the object must not have left anything.
    pub fn nothing_left(&self, world: &World, before: &Picture) -> Result<(), String> {
        let now = world.picture();
        let wrong = match self.act {
            Step::Create(..)
            | Step::PublishInline(..)
            | Step::Publish(..)
            | Step::Snapshot(..)
            | Step::Restore(..)
            | Step::Clone(..)
            | Step::Group(..) => now.differs(before),
            Step::Stage(_) => now.differs(&Picture {
                mounted: before.mounted.clone(),
                loops: before.loops,
                ..now.clone()
            }),
            Step::Expand(name, _) if !self.is_as_long_as_before(world, name) => {
                Some("the image has grown".into())
            }
            _ => None,
        };
        wrong.map_or(Ok(()), Err)
    }

    pub fn is_as_long_as_before(&self, world: &World, name: &str) -> bool {
        let id = &world.ids[name];
        let (_, uuid) = id.split_once('.').expect("an id has two parts");
        let image = format!("{POOL}/volumes/{uuid}/data.img");
        let image = world.host.aside(|host| host.stat(Path::new(&image)));
        let image = image.expect("a living host");
        image.is_some_and(|image| image.size == image_bytes(SIZE))
    }

    /// What the caller hears in the end.
    pub fn repeat(&self, world: &mut World, power_loss: bool) -> Result<String, String> {
        let mut last = String::from("never tried");
        for _ in 0..TRIES {
            match self.attempt(world, power_loss) {
                Ok(answer) => return Ok(answer),
                Err(error) => last = chain(&error),
            }
        }
        Err(format!("does not converge: {last}"))
    }

    pub fn converge(&self, world: &mut World, calm: &Calm, power_loss: bool) -> Result<(), String> {
        let answer = self.repeat(world, power_loss)?;
        let expected = if power_loss {
            &calm.rebooted
        } else {
            &calm.end
        };
        // What was never answered may be there or not when the power comes back.
        let open = power_loss
            && self
                .before
                .iter()
                .any(|step| matches!(step, Step::CutOff(..)));
        if answer != expected.answer && !open {
            return Err(format!("{answer} instead of {}", expected.answer));
        }
        if let Some(wrong) = world.picture().differs(&expected.picture).filter(|_| !open) {
            return Err(wrong);
        }
        world.check()?;
        if let Step::Group(name, volumes) = self.act {
            world.check_order(name, volumes)?;
        }
        match world.run(&self.act).map_err(|error| chain(&error)) {
            Ok(again) if again == answer => world.finish(),
            other => Err(format!("the next repeat says {other:?}")),
        }
    }

    pub fn attempt(&self, world: &mut World, power_loss: bool) -> Result<String> {
        // What is remembered of a failed cut is over.
        world.host.pass_time(Duration::from_secs(3600));
        if self.act == Step::Start && world.is_up() {
            // What the process does by itself, every 10 seconds, about pools that aren't served.
            // Leftovers that it couldn't end wait for the next start.
            if world.refuses() {
                return world.run(&Step::LookAgain);
            }
        }
        if !world.is_up() {
            world.run(&Step::Start)?;
        }
        if power_loss {
            for step in self.again_after_reboot() {
                world.run(&step)?;
            }
        }
        world.run(&self.act)
    }
}

/// What came of the faults of a trial.
#[derive(Clone, Copy, Debug, Default)]
pub struct Came {
    /// All of them came true.
    pub fired: bool,
    /// The caller has been given a final answer.
    pub forgotten: bool,
}
