//! What is wrong for many acts: which calls it may refuse, and that nothing is left of it.

use std::path::Path;
use std::time::Duration;

use slackwater::error::chain;
use tonic::Code;

use crate::acts::{INLINE, Kind, NAMES};
use crate::world::{Lasting, OTHER, POOL, Step, staging, target};
use crate::{Run, Verdict, makes};

impl Run {
    pub fn begin(&mut self, kind: Kind) -> Verdict {
        self.end()?;
        match kind {
            Kind::Full => self.world.begin(&Lasting::Full),
            Kind::Unreadable { n, how, begins } => {
                let mut files = self.world.record_files();
                let path = files.swap_remove(n % files.len());
                self.world.begin(&Lasting::Unreadable(path, how));
                if begins {
                    self.start()?;
                }
            }
            Kind::Dead { anew, seen } => {
                self.world.begin(&Lasting::Dead { anew });
                if seen {
                    self.look()?;
                }
            }
            Kind::Hangs => {
                self.world.begin(&Lasting::Hangs);
                let driver = self.world.driver().map_err(|error| chain(&error))?;
                driver.look_at_pool_within("default", Duration::from_millis(1));
            }
        }
        self.take_over()
    }

    /// It ends, and the process looks around as it does every 10 seconds.
    pub fn end(&mut self) -> Verdict {
        let Some(lasted) = self.world.lasting.clone() else {
            return Ok(());
        };
        let hidden = self.world.refuses() || lasted.has_no_disk();
        self.world.end();
        self.look()?;
        if lasted.has_no_disk() {
            self.serve_again(&lasted)?;
        }
        self.take_over()?;
        let left = self.model.inline.iter().find(|(_, inline)| !inline.mounted);
        match left {
            Some((name, _)) if hidden => Err(format!("inline {name} is left after {lasted:?}")),
            Some(_) | None => Ok(()),
        }
    }

    fn look(&self) -> Verdict {
        let driver = self.world.driver().map_err(|error| chain(&error))?;
        let looked = self.world.call(&driver, &Step::LookAgain);
        looked.map(drop).map_err(|error| chain(&error))
    }

    /// A pool whose disk is back is served again, without a restart: once nothing stands any more on
    /// a file system that was mounted before.
    fn serve_again(&mut self, lasted: &Lasting) -> Verdict {
        // The first look may be the one that finds the disk dead. Who asked a disk that hung learns
        // of its answer a moment after.
        let mut looks = 0;
        while self.world.refuses() && looks < 1000 {
            let stays = *lasted == Lasting::Dead { anew: true } && self.is_used();
            if stays && looks > 2 {
                self.end_pods()?;
            }
            self.look()?;
            looks += 1;
            std::thread::yield_now();
        }
        match self.world.refuses() {
            true => Err(format!(
                "not served after {lasted:?}: {}",
                self.world.serving().unwrap_or_default()
            )),
            false => Ok(()),
        }
    }

    /// Whether a mount shows a volume.
    fn is_used(&self) -> bool {
        let volumes = self.model.volumes.values();
        let mut faces = volumes.map(|volume| &volume.face);
        faces.any(|face| face.staged || !face.published.is_empty())
            || self.model.inline.values().any(|inline| inline.mounted)
    }

    /// The kubelet ends all pods.
    fn end_pods(&mut self) -> Verdict {
        for name in NAMES {
            for step in [
                Step::Unpublish(name, 0),
                Step::Unpublish(name, 1),
                Step::Unstage(name),
            ] {
                self.call(&step)?;
            }
        }
        let mut inline = INLINE.into_iter();
        inline.try_for_each(|name| self.call(&Step::UnpublishInline(name)))
    }

    /// What must hold while the pool's disk is lost.
    pub fn check_without_disk(&self) -> Verdict {
        if self.world.capacity("default")? != 0 {
            return Err("a pool without its disk has room".into());
        }
        if self.world.capacity(OTHER)? == 0 {
            return Err("the other pool has no room".into());
        }
        self.world.live_in_other_pool()
    }

    /// A call to a pool whose disk the driver knows to be lost: it's refused, for now, and nothing
    /// changes. `None` if it works from the mount table alone, or the pool is served.
    pub fn call_without_disk(&mut self, step: &Step) -> Option<Verdict> {
        let is_lost = self
            .world
            .lasting
            .as_ref()
            .is_some_and(Lasting::has_no_disk);
        if !is_lost || !self.world.refuses() {
            return None;
        }
        let unmounted = match step {
            Step::Unstage(name) => Some(staging(name)),
            Step::Unpublish(name, n) => Some(target(name, *n)),
            Step::UnpublishInline(name) => Some(target(name, 0)),
            _ => None,
        };
        if let Some(path) = unmounted {
            // The kernel writes back a file system that is unmounted for good.
            return self.world.host.unmount_waits(&path).then_some(Ok(()));
        }
        let invalid = matches!(self.model.clone().step(step), Err(Code::InvalidArgument));
        let answer = self.world.run(step);
        self.world.forget_unanswered();
        let code = answer
            .as_ref()
            .map_err(|error| Run::code(step, error))
            .err();
        Some(match code {
            Some(Code::Unavailable) => Ok(()),
            Some(Code::InvalidArgument) if invalid => Ok(()),
            _ => {
                let said = answer.map_err(|error| chain(&error));
                Err(format!("{said:?} of a pool that isn't served"))
            }
        })
    }

    /// What was being deleted may be back, and what was left of an earlier boot ended.
    pub fn take_over(&mut self) -> Verdict {
        let now = self.observe()?;
        self.model.adopt(&self.model.clone(), &now)
    }

    /// Inline volumes that a driver which begins now can't see, and can't end.
    pub fn hidden_inline(&self) -> Vec<&'static str> {
        if self
            .world
            .lasting
            .as_ref()
            .is_some_and(Lasting::has_no_disk)
        {
            return INLINE.to_vec();
        }
        let Some(Lasting::Unreadable(path, _)) = &self.world.lasting else {
            return Vec::new();
        };
        let needs = |name: &&'static str| self.needs(&Step::UnpublishInline(name), path);
        INLINE.into_iter().filter(needs).collect()
    }

    /// Whether an inline volume is unmounted by a call, and ended only once its pool can be seen.
    pub fn hides_end(&self, step: &Step) -> bool {
        let lasting = self.world.lasting.as_ref();
        matches!(step, Step::UnpublishInline(_))
            && (lasting.is_some_and(Lasting::has_no_disk)
                || !self.may_be_refused(step).is_empty()
                || self.world.refuses())
    }

    /// The codes with which a call may be refused for what is wrong now: none if it doesn't need
    /// what is wrong, or takes something from a full pool.
    pub fn may_be_refused(&self, step: &Step) -> Vec<Code> {
        match &self.world.lasting {
            None => Vec::new(),
            Some(Lasting::Full) if step.is_undoing() => Vec::new(),
            Some(Lasting::Full) => match step {
                Step::Expand(..) | Step::ExpandNode(_) => vec![Code::OutOfRange, Code::Aborted],
                _ => vec![Code::ResourceExhausted, Code::Aborted],
            },
            Some(Lasting::Dead { .. } | Lasting::Hangs) if step.is_unmounting() => Vec::new(),
            Some(Lasting::Dead { .. } | Lasting::Hangs) => {
                vec![Code::Unavailable, Code::Aborted, Code::Internal]
            }
            // INTERNAL says that nothing is left, so where something may be there is no such answer
            // by a driver that has never read the record.
            Some(Lasting::Unreadable(path, _)) if self.needs(step, path) => {
                let mut codes = vec![Code::Unavailable, Code::Aborted];
                if !makes(step) || self.world.remembers {
                    codes.push(Code::Internal);
                }
                codes
            }
            Some(Lasting::Unreadable(..) | Lasting::UnreadableAfter(..)) => Vec::new(),
        }
    }

    /// Whether a call has to do with what a record on the pool is of.
    fn needs(&self, step: &Step, record: &Path) -> bool {
        let below = record.strip_prefix(POOL).unwrap_or(record);
        let mut parts = below.iter().filter_map(|part| part.to_str());
        let (Some(part), Some(uuid)) = (parts.next(), parts.next()) else {
            // The pool's own.
            return true;
        };
        let volume = |name: &str| part == "volumes" && self.world.id(name).ends_with(uuid);
        let snapshot =
            |name: &str| part == "snapshots" && self.world.snapshot_id(name).ends_with(uuid);
        let inline = |name: &str| part == "volumes" && self.world.inline_id(name).ends_with(uuid);
        match step {
            Step::Snapshot(name, of, _) => snapshot(name) || volume(of),
            Step::DeleteSnapshot(name) => snapshot(name),
            Step::Restore(name, of, ..) => volume(name) || snapshot(of),
            Step::Clone(name, of, ..) => volume(name) || volume(of),
            // Any snapshot may be a member.
            Step::Group(_, of) => part == "snapshots" || of.iter().any(|name| volume(name)),
            Step::DeleteGroup(_) => part == "snapshots",
            Step::PublishInline(name, _) | Step::UnpublishInline(name) => inline(name),
            Step::Create(name, _)
            | Step::Delete(name)
            | Step::Modify(name, _)
            | Step::Expand(name, _)
            | Step::ExpandNode(name)
            | Step::StageAs(name, _)
            | Step::Unstage(name)
            | Step::PublishAs(name, ..)
            | Step::Unpublish(name, _) => volume(name),
            other => panic!("{other:?} is no call of this test"),
        }
    }
}
