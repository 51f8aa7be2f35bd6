//! Fails or cuts off every effect of every operation in turn, and proves that the caller's
//! repeats end where an undisturbed call ends.
//!
//! Pass 1 counts the effects of an operation. Pass 2 repeats it with the n-th effect refused,
//! done but reported as failed, or as the last thing that the process did; then as the last
//! before the power went. After each: an error that has the caller forget the object must have
//! left nothing; repeats must converge to the same answer and the same picture of the machine;
//! nothing that a user synced may be lost; and led to its end, the volume must leave nothing.

mod world;

use std::path::Path;

use nix::errno::Errno;
use slackwater::error::{Result, chain};
use slackwater::host::Host;
use slackwater::host::memory::FaultMode;
use slackwater::model::size::image_bytes;
use slackwater::model::{FsType, Wipe};
use world::{How, POOL, Picture, SIZE, Step, World};

/// A caller repeats; one that has not got there after so many tries never will.
const TRIES: usize = 4;

const MODES: [FaultMode; 6] = [
    FaultMode::Before(Errno::EIO),
    FaultMode::Before(Errno::ENOSPC),
    FaultMode::Before(Errno::EBUSY),
    FaultMode::After(Errno::EIO),
    FaultMode::CrashBefore,
    FaultMode::CrashAfter,
];

/// An operation, and what was before.
struct Scenario {
    before: Vec<Step>,
    act: Step,
}

/// What goes wrong, in order; positions count from the operation's first effect.
#[derive(Clone, Debug)]
enum Fault {
    Effects(Vec<(usize, FaultMode)>),
    Look(usize),
}

impl Fault {
    fn is_single(&self) -> bool {
        matches!(self, Fault::Look(_)) || matches!(self, Fault::Effects(faults) if faults.len() < 2)
    }

    fn plan(&self, world: &World) {
        match self {
            Fault::Effects(faults) => {
                for (n, mode) in faults {
                    world.host.fail_effect(*n, *mode);
                }
            }
            Fault::Look(n) => world.host.fail_look(*n, Errno::EIO),
        }
    }
}

/// What comes after a call that went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    Repeat,
    PowerLoss,
    /// Repeats until it's done, and then the power goes.
    RepeatAndPowerLoss,
    /// After a final answer: the caller has no such object any more, and goes on without it.
    Forget,
}

/// How an undisturbed call ends.
struct Calm {
    end: End,
    /// The same when the machine has booted again before.
    rebooted: End,
    effects: usize,
    looks: usize,
}

/// What the caller hears, and what can be seen.
struct End {
    answer: String,
    picture: Picture,
}

impl Scenario {
    fn calm(&self) -> Calm {
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
    fn again_after_reboot(&self) -> Vec<Step> {
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
    fn trial(&self, calm: &Calm, faults: &[Fault], then: Then) -> Result<Came, String> {
        let mut world = World::after(&self.before);
        let before = world.picture();
        let (mut fired, mut forgotten, mut acknowledged) = (true, false, false);
        let mut said = String::new();
        for fault in faults {
            if !world.is_up() {
                let started = world.run(&Step::Start);
                started.map_err(|error| format!("{said}{}", chain(&error)))?;
            }
            fault.plan(&world);
            let answer = world.run(&self.act);
            fired &= world.host.faults_left() == 0;
            world.host.clear_faults();
            acknowledged = answer.is_ok() && self.act.rpc().is_some();
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
                    files.retain(|file| file.starts_with("volumes/"));
                    files
                };
                let (now, then) = (volumes(world.picture()), volumes(before));
                let durably = match self.act {
                    Step::Create(..) | Step::PublishInline(..) if forgotten && now != then => {
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

    /// What was acknowledged survives a power loss.
    fn kept(&self, world: &mut World, before: &[String]) -> Result<(), String> {
        world.run(&Step::Start).map_err(|error| chain(&error))?;
        let now = world.records();
        match now == *before {
            true => Ok(()),
            false => Err(format!("and a power loss: {now:?} instead of {before:?}")),
        }
    }

    /// The caller's life without the object, on a driver that has started again.
    fn forget(&self, world: &mut World) -> Result<(), String> {
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
    fn nothing_left(&self, world: &World, before: &Picture) -> Result<(), String> {
        let now = world.picture();
        let wrong = match self.act {
            Step::Create(..) | Step::PublishInline(..) | Step::Publish(..) => now.differs(before),
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

    fn is_as_long_as_before(&self, world: &World, name: &str) -> bool {
        let id = &world.ids[name];
        let (_, uuid) = id.split_once('.').expect("an id has two parts");
        let image = format!("{POOL}/volumes/{uuid}/data.img");
        let image = world.host.stat(Path::new(&image)).expect("a living host");
        image.is_some_and(|image| image.size == image_bytes(SIZE))
    }

    /// What the caller hears in the end.
    fn repeat(&self, world: &mut World, power_loss: bool) -> Result<String, String> {
        let mut last = String::from("never tried");
        for _ in 0..TRIES {
            match self.attempt(world, power_loss) {
                Ok(answer) => return Ok(answer),
                Err(error) => last = chain(&error),
            }
        }
        Err(format!("does not converge: {last}"))
    }

    fn converge(&self, world: &mut World, calm: &Calm, power_loss: bool) -> Result<(), String> {
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
        match world.run(&self.act).map_err(|error| chain(&error)) {
            Ok(again) if again == answer => world.finish(),
            other => Err(format!("the next repeat says {other:?}")),
        }
    }

    fn attempt(&self, world: &mut World, power_loss: bool) -> Result<String> {
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

    fn sweep(&self) {
        let calm = self.calm();
        let mut failures = Failures::default();
        self.all(&calm, &[Fault::Effects(Vec::new())], &mut failures);
        for n in 1..=calm.looks {
            self.all(&calm, &[Fault::Look(n)], &mut failures);
        }
        for n in 1..=calm.effects {
            for mode in MODES {
                self.all(&calm, &[Fault::Effects(vec![(n, mode)])], &mut failures);
            }
            self.sweep_undo(&calm, n, &mut failures);
        }
        failures.assert_none(&self.act);
    }

    /// The n-th effect fails, and then each that follows it.
    fn sweep_undo(&self, calm: &Calm, n: usize, failures: &mut Failures) {
        let first = (n, FaultMode::Before(Errno::EIO));
        for second in [FaultMode::Before(Errno::EIO), FaultMode::CrashAfter] {
            let pair = |after| [Fault::Effects(vec![first, (n + after, second)])];
            (1..)
                .take_while(|after| self.all(calm, &pair(*after), failures))
                .for_each(drop);
        }
    }

    /// A call whose undo fails as well, and then each effect and each look of its repeat. What
    /// looks the same after the first call is tried once.
    fn sweep_repeat(&self) {
        let calm = self.calm();
        let mut failures = Failures::default();
        let mut seen = Vec::new();
        let eio = FaultMode::Before(Errno::EIO);
        for n in 1..=calm.effects {
            let cut_off = Fault::Effects(vec![(n, FaultMode::CrashAfter)]);
            self.sweep_second(&calm, cut_off, &mut seen, &mut failures);
            let undone = |after| Fault::Effects(vec![(n, eio), (n + after, eio)]);
            (1..)
                .take_while(|after| {
                    self.sweep_second(&calm, undone(*after), &mut seen, &mut failures)
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
        (1..)
            .take_while(|n| self.all(calm, &effect(*n), failures))
            .for_each(drop);
        (1..)
            .take_while(|n| self.all(calm, &look(*n), failures))
            .for_each(drop);
        true
    }

    fn left_after(&self, fault: &Fault) -> (Picture, bool) {
        let mut world = World::after(&self.before);
        fault.plan(&world);
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

/// What came of the faults of a trial.
#[derive(Clone, Copy, Debug, Default)]
struct Came {
    /// All of them came true.
    fired: bool,
    /// The caller has been given a final answer.
    forgotten: bool,
}

/// What the trials have found: all of it, because one defect seldom comes alone.
#[derive(Default)]
struct Failures {
    trials: usize,
    found: Vec<String>,
}

impl Failures {
    fn assert_none(&self, act: &Step) {
        let first: Vec<_> = self.found.iter().take(12).cloned().collect();
        let (found, trials) = (self.found.len(), self.trials);
        assert_eq!(found, 0, "{act:?}, of {trials}:\n{}", first.join("\n"));
    }
}

fn sweep_repeat(before: &[Step], act: Step) {
    let before = before.to_vec();
    Scenario { before, act }.sweep_repeat();
}

fn sweep(before: &[Step], act: Step) {
    let before = before.to_vec();
    Scenario { before, act }.sweep();
}

const XFS: How = How::fs(FsType::Xfs);
const BTRFS: How = How::fs(FsType::Btrfs);
const V: &str = "v";

/// A volume that was used, and is staged no more.
fn used(how: How) -> Vec<Step> {
    let mut steps = staged(how);
    if how.fs.is_none() {
        steps.push(Step::Unpublish(V, 0));
    }
    steps.push(Step::Unstage(V));
    steps
}

/// A staged volume with a token; a block volume is published for that.
fn staged(how: How) -> Vec<Step> {
    let mut steps = vec![Step::Create(V, how), Step::Stage(V)];
    if how.fs.is_none() {
        steps.push(Step::Publish(V, 0, false));
    }
    steps.push(Step::Write(V, 7));
    steps
}

fn published(how: How) -> Vec<Step> {
    let mut steps = staged(how);
    if how.fs.is_some() {
        steps.push(Step::Publish(V, 0, false));
    }
    steps
}

#[test]
fn create() {
    for how in [How::EXT4, How::THICK, How::BLOCK] {
        sweep(&[], Step::Create(V, how));
        sweep(&[Step::Create("other", XFS)], Step::Create(V, how));
    }
}

#[test]
fn create_again_after_a_delete() {
    sweep(
        &[Step::Create(V, XFS), Step::Delete(V)],
        Step::Create(V, How::EXT4),
    );
}

#[test]
fn delete() {
    for wipe in [Wipe::None, Wipe::Zero, Wipe::Discard] {
        sweep(&used(How::EXT4.wiped(wipe)), Step::Delete(V));
        sweep(&used(How::THICK.wiped(wipe)), Step::Delete(V));
    }
    sweep(&used(How::BLOCK), Step::Delete(V));
    sweep(&[Step::Create(V, XFS)], Step::Delete(V));
}

#[test]
fn modify() {
    sweep(&used(How::EXT4), Step::Modify(V, Wipe::Discard));
}

#[test]
fn expand() {
    for how in [How::EXT4, How::THICK] {
        sweep(&used(how), Step::Expand(V, 2 * SIZE));
        sweep(&staged(how), Step::Expand(V, 2 * SIZE));
    }
}

#[test]
fn stage() {
    for how in [How::EXT4, XFS, BTRFS, How::THICK, How::BLOCK] {
        sweep(&[Step::Create(V, how)], Step::Stage(V));
    }
}

#[test]
fn stage_again() {
    for how in [How::EXT4, XFS, BTRFS, How::THICK, How::BLOCK] {
        sweep(&used(how), Step::Stage(V));
        sweep(&staged(how), Step::Stage(V));
    }
}

#[test]
fn stage_what_grew_meanwhile() {
    for how in [How::EXT4, XFS, BTRFS] {
        let mut steps = used(how);
        steps.push(Step::Expand(V, 2 * SIZE));
        sweep(&steps, Step::Stage(V));
    }
}

#[test]
fn stage_after_a_reboot() {
    for how in [XFS, How::BLOCK] {
        let mut steps = published(how);
        steps.push(Step::Reboot);
        sweep(&steps, Step::Stage(V));
    }
}

#[test]
fn publish() {
    for how in [How::EXT4, BTRFS] {
        for read_only in [false, true] {
            sweep(&staged(how), Step::Publish(V, 0, read_only));
            sweep(&published(how), Step::Publish(V, 1, read_only));
        }
    }
}

#[test]
fn publish_block() {
    let stage = [Step::Create(V, How::BLOCK), Step::Stage(V)];
    for read_only in [false, true] {
        sweep(&stage, Step::Publish(V, 0, read_only));
    }
    sweep(&published(How::BLOCK), Step::Publish(V, 1, false));
    let mut steps = published(How::BLOCK);
    steps.push(Step::Unpublish(V, 0));
    sweep(&steps, Step::Publish(V, 1, true));
}

#[test]
fn unpublish() {
    for how in [How::EXT4, BTRFS, How::BLOCK] {
        sweep(&published(how), Step::Unpublish(V, 0));
        let mut steps = published(how);
        steps.push(Step::Publish(V, 1, false));
        sweep(&steps, Step::Unpublish(V, 0));
    }
}

#[test]
fn unstage() {
    for how in [How::EXT4, BTRFS] {
        sweep(&staged(how), Step::Unstage(V));
    }
    let mut steps = staged(How::BLOCK);
    steps.push(Step::Unpublish(V, 0));
    sweep(&steps, Step::Unstage(V));
}

#[test]
fn expand_node() {
    for how in [How::EXT4, XFS, BTRFS, How::BLOCK] {
        let mut steps = staged(how);
        steps.push(Step::Expand(V, 2 * SIZE));
        sweep(&steps, Step::ExpandNode(V));
    }
}

#[test]
fn publish_inline() {
    for how in [How::EXT4, XFS, How::THICK] {
        sweep(&[], Step::PublishInline(V, how));
    }
}

#[test]
fn unpublish_inline() {
    for how in [How::EXT4, How::THICK.wiped(Wipe::Zero)] {
        sweep(
            &[Step::PublishInline(V, how), Step::Write(V, 7)],
            Step::UnpublishInline(V),
        );
    }
}

#[test]
fn start() {
    sweep(&[], Step::Start);
    sweep(&published(How::EXT4), Step::Start);
    sweep(&published(How::BLOCK), Step::Start);
    sweep(
        &[Step::PublishInline(V, XFS), Step::Write(V, 7)],
        Step::Start,
    );
}

#[test]
fn repeats_of_what_is_half_undone() {
    sweep_repeat(&[], Step::Create(V, How::THICK));
    sweep_repeat(&[], Step::PublishInline(V, How::EXT4));
    sweep_repeat(&[Step::Create(V, How::BLOCK)], Step::Stage(V));
    sweep_repeat(&used(BTRFS), Step::Stage(V));
    sweep_repeat(&staged(How::EXT4), Step::Publish(V, 0, true));
    sweep_repeat(
        &[Step::Create(V, How::BLOCK), Step::Stage(V)],
        Step::Publish(V, 0, false),
    );
    sweep_repeat(&used(How::EXT4.wiped(Wipe::Zero)), Step::Delete(V));
    sweep_repeat(&used(How::THICK), Step::Expand(V, 2 * SIZE));
}

#[test]
fn start_with_what_a_crash_left() {
    let calls = [
        (vec![], Step::Create(V, How::THICK)),
        (used(How::EXT4.wiped(Wipe::Discard)), Step::Delete(V)),
        (used(How::EXT4), Step::Expand(V, 2 * SIZE)),
        (vec![Step::Create(V, How::EXT4)], Step::Stage(V)),
        (staged(How::BLOCK)[..2].to_vec(), Step::Publish(V, 0, false)),
        (vec![], Step::PublishInline(V, How::EXT4)),
        (
            vec![Step::PublishInline(V, How::EXT4)],
            Step::UnpublishInline(V),
        ),
    ];
    for (before, call) in calls {
        let mut world = World::after(&before);
        let effects = world.host.effects();
        world.run(&call).expect("a calm call");
        for n in 1..=world.host.effects() - effects {
            let mut before = before.clone();
            before.push(Step::CutOff(Box::new(call.clone()), n));
            sweep(&before, Step::Start);
        }
    }
}

#[test]
fn a_disk_that_comes_back() {
    let mut steps = used(How::EXT4);
    steps.extend([Step::PullDisk, Step::Start, Step::PutDiskBack]);
    sweep(&steps, Step::LookAgain);
}

#[test]
fn volumes_staged_read_only() {
    let how = How {
        read_only: true,
        ..XFS
    };
    let stage = [Step::Create(V, how), Step::Stage(V)];
    sweep(&stage[..1], Step::Stage(V));
    for read_only in [false, true] {
        sweep(&stage, Step::Publish(V, 0, read_only));
    }
    sweep(&[], Step::PublishInline(V, how));
}
