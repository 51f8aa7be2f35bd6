//! What is wrong for many acts: which calls it may refuse, and that nothing is left of it.

use std::path::Path;

use slackwater::error::chain;
use tonic::Code;

use crate::acts::{INLINE, Kind};
use crate::world::{Lasting, POOL, Step};
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
        }
        self.take_over()
    }

    /// It ends, and the process looks around as it does every 10 seconds.
    pub fn end(&mut self) -> Verdict {
        let Some(lasted) = self.world.lasting.clone() else {
            return Ok(());
        };
        let hidden = self.world.refuses();
        self.world.end();
        let looked = self.world.run(&Step::LookAgain);
        looked.map_err(|error| chain(&error))?;
        self.take_over()?;
        let left = self.model.inline.iter().find(|(_, inline)| !inline.mounted);
        match left {
            Some((name, _)) if hidden => Err(format!("inline {name} is left after {lasted:?}")),
            Some(_) | None => Ok(()),
        }
    }

    /// What was being deleted may be back, and what was left of an earlier boot ended.
    pub fn take_over(&mut self) -> Verdict {
        let now = self.observe()?;
        self.model.adopt(&self.model.clone(), &now)
    }

    /// Inline volumes that a driver which begins now can't see, and can't end.
    pub fn hidden_inline(&self) -> Vec<&'static str> {
        let Some(Lasting::Unreadable(path, _)) = &self.world.lasting else {
            return Vec::new();
        };
        let needs = |name: &&'static str| self.needs(&Step::UnpublishInline(name), path);
        INLINE.into_iter().filter(needs).collect()
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
            // INTERNAL says that nothing is left, so where something may be there is no such answer
            // by a driver that has never read the record.
            Some(Lasting::Unreadable(path, _)) if self.needs(step, path) => {
                let mut codes = vec![Code::Unavailable, Code::Aborted];
                if !makes(step) || self.world.remembers {
                    codes.push(Code::Internal);
                }
                codes
            }
            Some(Lasting::Unreadable(..)) => Vec::new(),
        }
    }

    /// Whether a group is asked for whose record may be hidden, and whose volumes were deleted: no
    /// name leads to such a member any more.
    pub fn is_hidden_group(&self, step: &Step) -> bool {
        let (Step::Group(name, _), Some(lasting)) = (step, &self.world.lasting) else {
            return false;
        };
        let gone = |source: &&'static str| !self.model.volumes.contains_key(*source);
        let group = self.model.groups.get(name);
        lasting.hides() && group.is_some_and(|group| group.members.keys().any(gone))
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
