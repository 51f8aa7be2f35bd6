//! The fault plan: which effects go wrong, and how.

use std::collections::BTreeMap;
use std::path::Path;

use nix::errno::Errno;

use super::machine::Machine;
use super::{MemoryHost, dead};
use crate::error::HostCause;

/// How an effect goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultMode {
    /// Refused: nothing was done. (Of a clone, a copy or a new fsid, which take time, a part may
    /// have been: the image is flawed.)
    Before(Errno),
    /// Done, and reported as failed: an fsync whose error is an older one, a program that is
    /// killed when it had finished.
    After(Errno),
    /// The process dies before it, or in the middle of what takes time.
    CrashBefore,
    /// The process dies when it was done, before it could know.
    CrashAfter,
    /// A stranger thaws whatever is frozen, writes [`super::STRANGE_TOKEN`] there, and then it's
    /// done as usual.
    Thaw,
}

/// Counts effects and says which go wrong.
#[derive(Debug, Default)]
pub(super) struct Faults {
    /// Names of effects so far.
    pub(super) log: Vec<String>,
    planned: BTreeMap<usize, FaultMode>,
    always: BTreeMap<String, Errno>,
    /// Looks so far.
    pub(super) looks: usize,
    planned_looks: BTreeMap<usize, Errno>,
    /// Looks are a test's own.
    pub(super) aside: bool,
}

impl Faults {
    /// Plans a fault for the `n`-th effect from now on; 1 is the next.
    pub(super) fn plan(&mut self, n: usize, mode: FaultMode) {
        self.planned.insert(self.log.len() + n, mode);
    }

    /// From now on every effect of this name is refused; `None` ends that.
    pub(super) fn always(&mut self, name: &str, errno: Option<Errno>) {
        match errno {
            Some(errno) => self.always.insert(name.into(), errno),
            None => self.always.remove(name),
        };
    }

    /// Plans a fault for the `n`-th look from now on.
    pub(super) fn plan_look(&mut self, n: usize, errno: Errno) {
        self.planned_looks.insert(self.looks + n, errno);
    }

    /// Counts one look.
    pub(super) fn next_look(&mut self) -> Result<(), Errno> {
        if self.aside {
            return Ok(());
        }
        self.looks += 1;
        self.planned_looks.remove(&self.looks).map_or(Ok(()), Err)
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
    /// One effect, as the plan of faults has it. `cut_off` is what one that isn't done may leave
    /// all the same; `close` ends what one that is done keeps open, when nobody hears of it.
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
                    machine.thaw_by_stranger();
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
            machine.settle();
            late.map_or(acted, Err)
        })
    }
}
