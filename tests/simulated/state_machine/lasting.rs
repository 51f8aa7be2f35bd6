//! Faults that last for many acts: the calls that they may fail, and checks that nothing of them
//! remains.

use std::path::Path;
use std::time::Duration;

use slackwater::error::chain;
use tonic::Code;

use crate::simulation::{LastingFault, OTHER, POOL, Step, staging, target};
use crate::state_machine::acts::{INLINE, Kind, NAMES};
use crate::state_machine::{Run, Verdict, creates_object};

impl Run {
    pub fn begin(&mut self, kind: Kind) -> Verdict {
        self.end()?;
        match kind {
            Kind::Full => self.sim.begin(&LastingFault::Full),
            Kind::Unreadable { n, config, begins } => {
                let mut files = self.sim.record_files();
                let path = files.swap_remove(n % files.len());
                self.sim.begin(&LastingFault::Unreadable(path, config));
                if begins {
                    self.start()?;
                }
            }
            Kind::Dead { remounted, seen } => {
                self.sim.begin(&LastingFault::Dead { remounted });
                if seen {
                    self.refresh()?;
                }
            }
            Kind::Hangs => {
                self.sim.begin(&LastingFault::Hangs);
                let driver = self.sim.driver().map_err(|error| chain(&error))?;
                driver.probe_pool_within("default", Duration::from_millis(1));
            }
        }
        self.take_over()
    }

    /// Ends the fault. Then the process refreshes its pools, as it does every 10 seconds.
    pub fn end(&mut self) -> Verdict {
        let Some(fault) = self.sim.lasting_fault.clone() else {
            return Ok(());
        };
        let hidden = self.sim.refuses() || fault.has_no_disk();
        self.sim.end();
        self.refresh()?;
        if fault.has_no_disk() {
            self.serve_again(&fault)?;
        }
        self.take_over()?;
        let left = self.model.inline.iter().find(|(_, inline)| !inline.mounted);
        match left {
            Some((name, _)) if hidden => {
                Err(format!("inline volume {name} is left after {fault:?}"))
            }
            Some(_) | None => Ok(()),
        }
    }

    fn refresh(&self) -> Verdict {
        let driver = self.sim.driver().map_err(|error| chain(&error))?;
        let refreshed = self.sim.call(&driver, &Step::Refresh);
        refreshed.map(drop).map_err(|error| chain(&error))
    }

    /// A pool whose disk is back is served again without a restart, once nothing uses a file system
    /// that was mounted before.
    fn serve_again(&mut self, fault: &LastingFault) -> Verdict {
        // The first refresh may be the one that finds the disk dead. A request to a disk that hung
        // returns a moment after the disk answers.
        let mut refreshes = 0;
        while self.sim.refuses() && refreshes < 1000 {
            let stays_unserved = *fault == LastingFault::Dead { remounted: true } && self.is_used();
            if stays_unserved && refreshes > 2 {
                self.end_pods()?;
            }
            self.refresh()?;
            refreshes += 1;
            std::thread::yield_now();
        }
        match self.sim.refuses() {
            true => Err(format!(
                "not served after {fault:?}: {}",
                self.sim.serving().unwrap_or_default()
            )),
            false => Ok(()),
        }
    }

    /// Whether a mount shows a volume.
    fn is_used(&self) -> bool {
        let volumes = self.model.volumes.values();
        let mut views = volumes.map(|volume| &volume.view);
        views.any(|view| view.staged || !view.published.is_empty())
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

    /// Invariants while the pool's disk is missing.
    pub fn check_without_disk(&self) -> Verdict {
        if self.sim.capacity("default")? != 0 {
            return Err("a pool without its disk reports free space".into());
        }
        if self.sim.capacity(OTHER)? == 0 {
            return Err("the other pool reports no free space".into());
        }
        self.sim.live_in_other_pool()
    }

    /// A call to a pool whose disk the driver knows to be missing: it is refused with a temporary
    /// error, and nothing changes. `None` if the call needs only the mount table, or the pool is
    /// served.
    pub fn call_without_disk(&mut self, step: &Step) -> Option<Verdict> {
        let is_lost = self
            .sim
            .lasting_fault
            .as_ref()
            .is_some_and(LastingFault::has_no_disk);
        if !is_lost || !self.sim.refuses() {
            return None;
        }
        let unmounted = match step {
            Step::Unstage(name) => Some(staging(name)),
            Step::Unpublish(name, n) => Some(target(name, *n)),
            Step::UnpublishInline(name) => Some(target(name, 0)),
            _ => None,
        };
        if let Some(path) = unmounted {
            // The kernel must write back a file system before its last unmount.
            return self.sim.host.unmount_waits(&path).then_some(Ok(()));
        }
        let invalid = matches!(self.model.clone().step(step), Err(Code::InvalidArgument));
        let answer = self.sim.run(step);
        self.sim.forget_unanswered();
        let code = answer
            .as_ref()
            .map_err(|error| Run::code(step, error))
            .err();
        Some(match code {
            Some(Code::Unavailable) => Ok(()),
            Some(Code::InvalidArgument) if invalid => Ok(()),
            _ => {
                let answer_text = answer.map_err(|error| chain(&error));
                Err(format!("{answer_text:?} from a pool that is not served"))
            }
        })
    }

    /// A volume that was being deleted may be back, and what remained of an earlier boot may be
    /// cleaned up.
    pub fn take_over(&mut self) -> Verdict {
        let now = self.observe()?;
        self.model.adopt(&self.model.clone(), &now)
    }

    /// Inline volumes that a driver which starts now cannot see, and cannot clean up.
    pub fn hidden_inline(&self) -> Vec<&'static str> {
        if self
            .sim
            .lasting_fault
            .as_ref()
            .is_some_and(LastingFault::has_no_disk)
        {
            return INLINE.to_vec();
        }
        let Some(LastingFault::Unreadable(path, _)) = &self.sim.lasting_fault else {
            return Vec::new();
        };
        let needs = |name: &&'static str| self.needs(&Step::UnpublishInline(name), path);
        INLINE.into_iter().filter(needs).collect()
    }

    /// Whether the call unmounts an inline volume that is deleted only once its pool can be read.
    pub fn hides_end(&self, step: &Step) -> bool {
        let lasting_fault = self.sim.lasting_fault.as_ref();
        matches!(step, Step::UnpublishInline(_))
            && (lasting_fault.is_some_and(LastingFault::has_no_disk)
                || !self.may_be_refused(step).is_empty()
                || self.sim.refuses())
    }

    /// The codes with which a call may be refused because of the fault: none if the call does not
    /// need what is broken, or if it frees something on a full pool.
    pub fn may_be_refused(&self, step: &Step) -> Vec<Code> {
        match &self.sim.lasting_fault {
            None => Vec::new(),
            Some(LastingFault::Full) if step.is_undoing() => Vec::new(),
            Some(LastingFault::Full) => match step {
                Step::Expand(..) | Step::NodeExpandVolume(_) => {
                    vec![Code::OutOfRange, Code::Aborted]
                }
                _ => vec![Code::ResourceExhausted, Code::Aborted],
            },
            Some(LastingFault::Dead { .. } | LastingFault::Hangs) if step.is_unmounting() => {
                Vec::new()
            }
            Some(LastingFault::Dead { .. } | LastingFault::Hangs) => {
                vec![Code::Unavailable, Code::Aborted, Code::Internal]
            }
            // INTERNAL means that nothing is left. A driver that has never read the record cannot
            // give this answer if something may exist.
            Some(LastingFault::Unreadable(path, _)) if self.needs(step, path) => {
                let mut codes = vec![Code::Unavailable, Code::Aborted];
                if !creates_object(step) || self.sim.remembers {
                    codes.push(Code::Internal);
                }
                codes
            }
            Some(LastingFault::Unreadable(..) | LastingFault::UnreadableAfter(..)) => Vec::new(),
        }
    }

    /// Whether a call needs the object of a record on the pool.
    fn needs(&self, step: &Step, record: &Path) -> bool {
        let below = record.strip_prefix(POOL).unwrap_or(record);
        let mut parts = below.iter().filter_map(|part| part.to_str());
        let (Some(part), Some(uuid)) = (parts.next(), parts.next()) else {
            // The pool's own record.
            return true;
        };
        let volume = |name: &str| part == "volumes" && self.sim.id(name).ends_with(uuid);
        let snapshot =
            |name: &str| part == "snapshots" && self.sim.snapshot_id(name).ends_with(uuid);
        let inline = |name: &str| part == "volumes" && self.sim.inline_id(name).ends_with(uuid);
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
            | Step::Receive(name, ..)
            | Step::ImportFile(name, _)
            | Step::Delete(name)
            | Step::Modify(name, _)
            | Step::Expand(name, _)
            | Step::NodeExpandVolume(name)
            | Step::StageAs(name, _)
            | Step::Unstage(name)
            | Step::PublishAs(name, ..)
            | Step::Unpublish(name, _) => volume(name),
            other => panic!("{other:?} is not a call of this test"),
        }
    }
}
