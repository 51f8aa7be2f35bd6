//! The fault plan: which effects fail, and how.

use std::collections::BTreeMap;
use std::path::Path;
use std::thread::{self, ThreadId};

use nix::errno::Errno;

use super::machine::Machine;
use super::{MemoryHost, dead};
use crate::error::HostCause;

/// How an effect fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultMode {
    /// Refused: nothing was done. (A clone, a copy or a new fsid, which take time, may have been
    /// done in part: the image has a flaw.)
    Before(Errno),
    /// Done, but reported as failed: an fsync that reports an older error, or a program that is
    /// killed after it had finished.
    After(Errno),
    /// The process dies before the effect, or in the middle of one that takes time.
    CrashBefore,
    /// The process dies after the effect, before it receives the result.
    CrashAfter,
    /// A foreign process thaws everything that is frozen and writes [`super::FOREIGN_TOKEN`] to it;
    /// then the effect is performed as usual.
    Thaw,
}

/// Counts effects and decides which fail.
#[derive(Debug, Default)]
pub(super) struct Faults {
    /// Names of the effects so far.
    pub(super) log: Vec<String>,
    planned: BTreeMap<usize, FaultMode>,
    always: BTreeMap<String, Errno>,
    /// Number of queries so far.
    pub(super) looks: usize,
    planned_looks: BTreeMap<usize, Errno>,
    /// Threads whose queries are those of the test itself.
    exempt_threads: Vec<ThreadId>,
    /// Number of queries so far that read the metadata of a thin pool.
    pub(super) metadata_reads: usize,
}

impl Faults {
    /// Whether this thread makes queries for the test itself.
    pub(super) fn is_exempt(&self) -> bool {
        !self.exempt_threads.is_empty() && self.exempt_threads.contains(&thread::current().id())
    }

    pub(super) fn begin_exempt(&mut self) {
        self.exempt_threads.push(thread::current().id());
    }

    pub(super) fn end_exempt(&mut self) {
        let own = thread::current().id();
        if let Some(at) = self.exempt_threads.iter().position(|one| *one == own) {
            self.exempt_threads.swap_remove(at);
        }
    }

    /// Plans a fault for the `n`-th effect from now on; 1 is the next.
    pub(super) fn plan(&mut self, n: usize, mode: FaultMode) {
        self.planned.insert(self.log.len() + n, mode);
    }

    /// Makes every effect of this name fail from now on; `None` ends that.
    pub(super) fn always(&mut self, name: &str, errno: Option<Errno>) {
        match errno {
            Some(errno) => self.always.insert(name.into(), errno),
            None => self.always.remove(name),
        };
    }

    /// Plans a fault for the `n`-th query from now on.
    pub(super) fn plan_query(&mut self, n: usize, errno: Errno) {
        self.planned_looks.insert(self.looks + n, errno);
    }

    /// Counts one query.
    pub(super) fn next_query(&mut self) -> Result<(), Errno> {
        if self.is_exempt() {
            return Ok(());
        }
        self.looks += 1;
        self.planned_looks.remove(&self.looks).map_or(Ok(()), Err)
    }

    /// Counts a query that reads the metadata of a thin pool.
    pub(super) fn note_metadata_read(&mut self) {
        self.metadata_reads += usize::from(!self.is_exempt());
    }

    pub(super) fn left(&self) -> usize {
        self.planned.len() + self.planned_looks.len()
    }

    pub(super) fn clear(&mut self) {
        self.planned_looks.clear();
        self.planned.clear();
        self.always.clear();
    }

    /// Counts one effect.
    pub(super) fn next(&mut self, name: &str, described: String) -> Option<FaultMode> {
        self.log.push(described);
        let planned = self.planned.remove(&self.log.len());
        planned.or_else(|| self.always.get(name).copied().map(FaultMode::Before))
    }
}

impl MemoryHost {
    /// Performs one effect according to the fault plan. `cut_off` makes the partial changes of an
    /// effect that is not completed; `close` releases the result of one that is completed when its
    /// process does not receive it.
    pub(super) fn counted<T>(
        &self,
        name: &'static str,
        subject: &Path,
        cut_off: impl FnOnce(&mut Machine),
        act: impl FnOnce(&mut Machine) -> Result<T, HostCause>,
        close: impl FnOnce(&mut Machine, &T),
    ) -> crate::host::Result<T> {
        self.with(name, subject, |machine| {
            let described = format!("{name} {}", subject.display());
            let fault = machine.faults.next(name, described);
            let late = match fault {
                Some(FaultMode::Before(errno)) => {
                    cut_off(machine);
                    return Err(errno.into());
                }
                Some(FaultMode::CrashBefore) => {
                    cut_off(machine);
                    machine.kill(self.process);
                    return Err(dead());
                }
                Some(FaultMode::Thaw) => {
                    machine.thaw_by_foreign_process();
                    None
                }
                Some(FaultMode::After(errno)) => Some(errno.into()),
                Some(FaultMode::CrashAfter) => Some(dead()),
                None => None,
            };
            let acted = act(machine);
            if let (Ok(acted), Some(_)) = (&acted, &late) {
                close(machine, acted);
            }
            if fault == Some(FaultMode::CrashAfter) {
                machine.kill(self.process);
            }
            machine.remove_unreferenced();
            late.map_or(acted, Err)
        })
    }
}
