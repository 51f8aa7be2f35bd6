//! A call fails, what comes next succeeds, and then a call fails again: what the first failure has
//! left must not mislead the second.
//!
//! The first call fails at each of its effects, in each way, and the last one as well. Its repeats
//! must converge to where it ends when nothing fails, and nothing that was synced may be lost.

use std::time::Duration;

use nix::errno::Errno;
use slackwater::error::chain;
use slackwater::host::memory::FaultMode;
use slackwater::model::{Level, Wipe};

use crate::sweep::Sample;
use crate::trial::{Calm, End, Scenario};
use crate::world::{How, SIZE, Step, World};
use crate::{BTRFS, V, XFS, staged, used};

const WAYS: [FaultMode; 4] = [
    FaultMode::Before(Errno::EIO),
    FaultMode::Before(Errno::ENOSPC),
    FaultMode::After(Errno::EIO),
    FaultMode::CrashAfter,
];

/// One in so many pairs of failures is tried, unless all are asked for.
const SHARE: usize = 37;

/// Calls of which the first and the last fail.
struct Again {
    before: Vec<Step>,
    first: Step,
    /// What succeeds after the first failure.
    between: Vec<Step>,
    last: Step,
}

impl Again {
    /// The last call, as one that nothing comes before.
    fn last(&self) -> Scenario {
        Scenario {
            before: self.before.clone(),
            act: self.last.clone(),
        }
    }

    /// How it ends if nothing fails, and the number of effects of the first and the last call.
    fn calm(&self) -> (Calm, [usize; 2]) {
        let mut world = World::after(&self.before);
        let start = world.host.effects();
        world.run(&self.first).expect("a calm call");
        let first = world.host.effects() - start;
        self.succeed(&mut world).expect("calm calls");
        let start = world.host.effects();
        let answer = world.run(&self.last).expect("a calm call");
        let last = world.host.effects() - start;
        let end = || End {
            answer: answer.clone(),
            picture: world.picture(),
        };
        let calm = Calm {
            end: end(),
            rebooted: end(),
            effects: last,
            looks: 0,
        };
        world.finish().expect("a calm end");
        (calm, [first, last])
    }

    fn succeed(&self, world: &mut World) -> Result<(), String> {
        // What is remembered of a failed cut is over.
        world.host.pass_time(Duration::from_secs(3600));
        for step in &self.between {
            let done = world.run(step);
            done.map_err(|error| format!("{step:?}: {}", chain(&error)))?;
        }
        Ok(())
    }

    /// A call with a fault at its n-th effect; whether there was one.
    fn fail(world: &mut World, step: &Step, n: usize, way: FaultMode) -> Result<bool, String> {
        world.host.fail_effect(n, way);
        // What the caller is told is judged by what follows.
        let _ = world.run(step);
        let fired = world.host.faults_left() == 0;
        world.host.clear_faults();
        if !world.is_up() {
            world.run(&Step::Start).map_err(|error| chain(&error))?;
        }
        Ok(fired)
    }

    fn trial(&self, calm: &Calm, faults: [(usize, FaultMode); 2]) -> Result<(), String> {
        let [(n, way), (m, again)] = faults;
        let mut world = World::after(&self.before);
        Again::fail(&mut world, &self.first, n, way)?;
        self.succeed(&mut world)?;
        world.check()?;
        Again::fail(&mut world, &self.last, m, again)?;
        self.last().converge(&mut world, calm, false)
    }

    fn sweep(&self) {
        let (calm, [first, last]) = self.calm();
        let said = format!("{:?} {:?} {:?}", self.before, self.first, self.last);
        let sample = Sample::one_in(SHARE, &said);
        let (mut trials, mut found) = (0, Vec::new());
        for n in 1..=first {
            // One more than it has when all goes well: what the first failure has left.
            for m in 1..=last + 1 {
                for (w, way) in WAYS.into_iter().enumerate() {
                    for (a, again) in WAYS.into_iter().enumerate() {
                        if !sample.has(&[n, 2 * m, 3 * w, 5 * a]) {
                            continue;
                        }
                        trials += 1;
                        let faults = [(n, way), (m, again)];
                        if let Err(why) = self.trial(&calm, faults) {
                            found.push(format!("{faults:?}: {why}"));
                        }
                    }
                }
            }
        }
        let shown: Vec<_> = found.iter().take(12).cloned().collect();
        let said = format!("{:?}, {:?}, of {trials}", self.first, self.last);
        assert!(found.is_empty(), "{said}:\n{}", shown.join("\n"));
    }
}

/// The first and the last call of volumes with these steps before, and what succeeds between.
fn again(before: Vec<Step>, first: Step, between: &[Step], last: Step) {
    let between = between.to_vec();
    Again {
        before,
        first,
        between,
        last,
    }
    .sweep();
}

#[test]
fn growths_with_a_stage_between() {
    for how in [How::EXT4, XFS, How::THICK] {
        let (first, last) = (Step::Expand(V, 2 * SIZE), Step::Expand(V, 3 * SIZE));
        again(used(how), first, &[Step::Stage(V), Step::Write(V, 8)], last);
    }
}

#[test]
fn growths_of_what_is_staged() {
    for how in [BTRFS, How::BLOCK] {
        let grown = [Step::ExpandNode(V), Step::Write(V, 8)];
        let (first, last) = (Step::Expand(V, 2 * SIZE), Step::Expand(V, 3 * SIZE));
        again(staged(how), first, &grown, last);
    }
    let (first, last) = (Step::Expand(V, 2 * SIZE), Step::ExpandNode(V));
    again(staged(XFS), first.clone(), &[first], last);
}

#[test]
fn a_growth_with_a_copy_between() {
    let (first, last) = (Step::Expand(V, 2 * SIZE), Step::Expand(V, 3 * SIZE));
    let cut = Step::Snapshot("s", V, Level::Filesystem);
    again(staged(XFS), first.clone(), &[cut], last.clone());
    let clone = Step::Clone("new", V, How::EXT4, 2 * SIZE);
    again(used(How::EXT4), first, &[clone], last);
}

#[test]
fn a_volume_that_ends_after_it_was_made() {
    for how in [How::EXT4, How::THICK, How::BLOCK] {
        let create = Step::Create(V, how);
        again(vec![], create.clone(), &[create], Step::Delete(V));
    }
    let wiped = used(How::EXT4.wiped(Wipe::Zero));
    let anew = [Step::Delete(V)];
    again(wiped, Step::Delete(V), &anew, Step::Create(V, XFS));
    let publish = Step::PublishInline(V, XFS);
    let uses = [publish.clone(), Step::Write(V, 7)];
    again(vec![], publish, &uses, Step::UnpublishInline(V));
}

#[test]
fn a_stage_that_ends_after_it_was_made() {
    for how in [How::EXT4, BTRFS] {
        let (create, stage) = (vec![Step::Create(V, how)], Step::Stage(V));
        let uses = [stage.clone(), Step::Write(V, 7)];
        again(create, stage.clone(), &uses, Step::Unstage(V));
        again(
            used(how),
            stage.clone(),
            &[stage],
            Step::Publish(V, 0, false),
        );
    }
    let block = vec![Step::Create(V, How::BLOCK), Step::Stage(V)];
    let publish = Step::Publish(V, 0, false);
    let uses = [publish.clone(), Step::Write(V, 7)];
    again(block.clone(), publish, &uses, Step::Unpublish(V, 0));
    let stage = [Step::Unstage(V)];
    again(block, Step::Unstage(V), &stage, Step::Stage(V));
}

#[test]
fn cuts_of_what_was_written_between() {
    for how in [How::EXT4, How::THICK] {
        let cut = |name| Step::Snapshot(name, V, Level::Filesystem);
        let uses = [cut("s"), Step::Write(V, 8)];
        again(staged(how), cut("s"), &uses, cut("t"));
        again(staged(how), cut("s"), &uses, Step::DeleteSnapshot("s"));
        let restore = Step::Restore("new", "s", how, 2 * SIZE);
        again(staged(how), cut("s"), &uses, restore);
    }
}

#[test]
fn groups_of_what_was_written_between() {
    let before: Vec<Step> = ["a", "b"]
        .into_iter()
        .flat_map(|name| {
            let write = Step::Write(name, 1);
            [Step::Create(name, XFS), Step::Stage(name), write]
        })
        .collect();
    let group = |name| Step::Group(name, &["a", "b"]);
    let uses = [group("g"), Step::Write("a", 8)];
    again(before.clone(), group("g"), &uses, group("h"));
    again(before, group("g"), &uses, Step::DeleteGroup("g"));
}
