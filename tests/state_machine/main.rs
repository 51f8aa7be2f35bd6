//! Random calls against a simple model: repeats with equal and with other arguments, faults,
//! crashes, restarts, reboots, power losses, and two callers at once.
//!
//! After every call the answer is the model's, and so is all that can be seen; no invariant of
//! the simulation is broken; every token that a user has synced is there. A call that was cut off
//! has left every part of a volume either as it was or as it should become. Two calls at once
//! answer as if one had come after the other, or one of them is told that the other runs.
//! In the end all is deleted, and nothing is left. `PROPTEST_CASES` sets the number of runs.

mod acts;
mod model;
#[path = "../world/mod.rs"]
mod world;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Barrier;

use acts::{Act, After, INLINE, NAMES, acts};
use model::{Face, Model, Seen};
use proptest::prelude::*;
use slackwater::error::{Error, chain};
use slackwater::host::memory::FaultMode;
use slackwater::host::{Device, Host};
use slackwater::model::PoolId;
use slackwater::model::size::image_bytes;
use slackwater::operation::inventory;
use slackwater::record::{LastStage, VolumeState};
use slackwater::service::status;
use tonic::Code;
use uuid::Uuid;
use world::{POOL, Step, World, staging, target};

/// The world and what it should be.
struct Run {
    world: World,
    model: Model,
    next_token: u64,
}

type Verdict = Result<(), String>;

impl Run {
    fn act(&mut self, act: &Act) -> Verdict {
        match act {
            Act::Call(step) => self.call(step)?,
            Act::Pair(one, other) => self.pair(one, other)?,
            Act::Fault(step, n, mode, after) => self.fault(step, *n, *mode, *after)?,
            Act::Restart => self.start()?,
            Act::Reboot(power_loss) => {
                self.reboot(*power_loss)?;
                self.start()?;
                let now = self.observe()?;
                self.model.adopt(&self.model.clone(), &now)?;
            }
            Act::Write => self.write()?,
        }
        self.world.check()?;
        let (now, expected) = (self.observe()?, self.model.seen());
        if !now.fits(&expected) {
            return Err(format!("{now:?} instead of {expected:?}"));
        }
        self.check_tokens()
    }

    fn reboot(&mut self, power_loss: bool) -> Verdict {
        self.world.reboot(power_loss);
        self.model.reboot();
        // The kubelet removes what is left of pods that were there before.
        for leaf in self.world.host.targets() {
            let removed = self.world.host.remove_leaf(&leaf);
            removed.map_err(|errno| format!("{}: {errno}", leaf.display()))?;
        }
        Ok(())
    }

    fn start(&mut self) -> Verdict {
        let started = self.world.run(&Step::Start);
        started.map(drop).map_err(|error| chain(&error))
    }

    fn code(step: &Step, error: &Error) -> Code {
        let rpc = step.rpc().expect("a step of this test is a call");
        status::code(rpc, error)
    }

    fn call(&mut self, step: &Step) -> Verdict {
        let answer = self.world.run(step);
        let expected = self.model.step(step);
        let found = answer
            .as_ref()
            .map(drop)
            .map_err(|error| Run::code(step, error));
        if found == expected {
            return Ok(());
        }
        let said = answer.map_err(|error| chain(&error));
        Err(format!("{said:?} instead of {expected:?}"))
    }

    /// Both at once, from two threads.
    fn pair(&mut self, one: &Step, other: &Step) -> Verdict {
        let driver = self.world.driver().map_err(|error| chain(&error))?;
        let world = &self.world;
        let together = Barrier::new(2);
        let call = |step: &Step| {
            together.wait();
            let answer = world.call(&driver, step);
            answer.map(drop).map_err(|error| Run::code(step, &error))
        };
        let answers = std::thread::scope(|scope| {
            let other = scope.spawn(|| call(other));
            [Some(call(one)), other.join().ok()]
        });
        let [Some(first), Some(second)] = answers else {
            return Err("a call panicked".into());
        };
        let seen = self.observe()?;
        for turns in [
            [(one, first), (other, second)],
            [(other, second), (one, first)],
        ] {
            let mut model = self.model.clone();
            let fits = |(step, answer): &(&Step, Result<(), Code>)| {
                *answer == Err(Code::Aborted) || model.step(step) == *answer
            };
            if turns.iter().all(fits) && seen.fits(&model.seen()) {
                self.model = model;
                return Ok(());
            }
        }
        Err(format!("{first:?} and {second:?} leave {seen:?}"))
    }

    fn fault(&mut self, step: &Step, n: usize, mode: FaultMode, after: After) -> Verdict {
        self.world.host.fail_effect(n, mode);
        let answer = self.world.run(step);
        let fired = self.world.host.faults_left() == 0;
        self.world.host.clear_faults();
        let mut later = self.model.clone();
        let expected = later.step(step);
        let found = answer
            .as_ref()
            .map(drop)
            .map_err(|error| Run::code(step, error));
        if !fired && found != expected {
            return Err(format!("{found:?} instead of {expected:?}"));
        }
        let mode_crashes = matches!(mode, FaultMode::CrashBefore | FaultMode::CrashAfter);
        match (after, self.world.host.is_alive()) {
            (After::Nothing, true) => {}
            (After::Nothing | After::Restart, _) => self.start()?,
            (After::PowerLoss, _) => {
                self.reboot(true)?;
                later.reboot();
                self.start()?;
            }
        }
        let now = self.observe()?;
        match &answer {
            Ok(_) => {
                self.model = later;
                self.model.adopt(&self.model.clone(), &now)?;
            }
            Err(error) => {
                let forgets = step.is_final(error) && fired && makes(step);
                if forgets && !mode_crashes && !now.same_but_formatted(&self.model.seen()) {
                    let (said, before) = (chain(error), self.model.seen());
                    return Err(format!(
                        "{said} is final, and {now:?} is left of {before:?}"
                    ));
                }
                self.model.adopt(&later, &now)?;
            }
        }
        Ok(())
    }

    fn write(&mut self) -> Verdict {
        for (name, volume) in &mut self.model.volumes {
            self.next_token += 1;
            if self.world.host.fs_bytes(&staging(name)).is_ok() {
                let written = self.world.host.write_token(&staging(name), self.next_token);
                written.map_err(|errno| format!("write to {name}: {errno}"))?;
                volume.tokens.insert(self.next_token);
            }
        }
        let mounted = self.model.inline.iter_mut();
        for (name, inline) in mounted.filter(|(_, inline)| inline.mounted) {
            self.next_token += 1;
            let written = self
                .world
                .host
                .write_token(&target(name, 0), self.next_token);
            written.map_err(|errno| format!("write to inline {name}: {errno}"))?;
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
        for (name, path, tokens) in staged.chain(inline) {
            let Ok(found) = self.world.host.tokens(&path) else {
                continue;
            };
            if !tokens.iter().all(|token| found.contains(token)) {
                return Err(format!("{name} has {found:?} and should have {tokens:?}"));
            }
        }
        Ok(())
    }

    /// What can be seen, read past the driver.
    fn observe(&self) -> Result<Seen, String> {
        let host = &self.world.host;
        let said = |error: &dyn std::error::Error| chain(error);
        let mounts = host.mounts().map_err(|error| said(&error))?;
        let loops = host.loops().map_err(|error| said(&error))?;
        let boot = host.boot_id().map_err(|error| said(&error))?;
        let pool = PoolId(Uuid::nil());
        let found = inventory::read(host, "default", pool, Path::new(POOL))
            .map_err(|error| said(&error))?;
        let mut seen = Seen::default();
        for record in found.volumes.into_iter().map(|found| found.record) {
            if record.state != VolumeState::Ready {
                continue;
            }
            let known = NAMES
                .iter()
                .chain(&INLINE)
                .find(|name| **name == record.name);
            let name = *known.ok_or_else(|| format!("a volume named {}", record.name))?;
            let at = |path: &Path| mounts.iter().rev().find(|mount| mount.mount_point == path);
            if record.ephemeral {
                let mounted = at(&target(name, 0)).is_some();
                seen.inline.insert(name, mounted);
                continue;
            }
            let block = matches!(&record.last_stage, Some(LastStage { boot: Some(then), .. }) if *then == boot);
            let mut published = BTreeMap::new();
            for n in 0..2 {
                if let Some(mount) = at(&target(name, n)) {
                    let of = |number: u32| {
                        Device::of_loop(number).path.file_name() == mount.root.file_name()
                    };
                    let device = loops.iter().find(|found| of(found.number));
                    let read_only = device.map_or(mount.is_read_only(), |device| device.read_only);
                    published.insert(n, read_only);
                }
            }
            let formatted = record.formatted.filter(|formatted| formatted.complete);
            let face = Face {
                size: record.size,
                wipe: record.wipe,
                formatted: formatted.map(|formatted| formatted.kind),
                staged: block || at(&staging(name)).is_some(),
                grown: host
                    .fs_bytes(&staging(name))
                    .is_ok_and(|bytes| bytes >= image_bytes(record.size)),
                published,
            };
            seen.volumes.insert(name, face);
        }
        Ok(seen)
    }

    /// Everything is led to its end, at the first try.
    fn finish(&mut self) -> Verdict {
        let mut steps: Vec<Step> = INLINE
            .iter()
            .map(|name| Step::UnpublishInline(name))
            .collect();
        for name in NAMES {
            steps.extend([Step::Unpublish(name, 0), Step::Unpublish(name, 1)]);
            steps.extend([Step::Unstage(name), Step::Delete(name)]);
        }
        for step in &steps {
            self.call(step)
                .map_err(|why| format!("in the end, {step:?}: {why}"))?;
        }
        self.world.check()?;
        let files = self.world.host.files_below(Path::new(POOL));
        let left = self.world.picture();
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

/// Whether its caller forgets the object after a final answer.
fn makes(step: &Step) -> bool {
    matches!(
        step,
        Step::Create(..) | Step::StageAs(..) | Step::PublishAs(..) | Step::PublishInline(..)
    )
}

fn run(acts: &[Act]) -> Verdict {
    let mut run = Run {
        world: World::after(&[]),
        model: Model::default(),
        next_token: 0,
    };
    for (n, act) in acts.iter().enumerate() {
        run.act(act)
            .map_err(|why| format!("act {n}, {act:?}: {why}"))?;
    }
    run.finish()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_driver_does_what_the_model_does(acts in prop::collection::vec(acts(), 1..50)) {
        if let Err(why) = run(&acts) {
            return Err(TestCaseError::fail(why));
        }
    }
}
