//! The fault plan: which effects go wrong, and how.

use std::collections::BTreeMap;

use nix::errno::Errno;

/// How an effect goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultMode {
    /// Refused: nothing was done.
    Before(Errno),
    /// Done, and reported as failed: an fsync whose error is an older one, a program that is
    /// killed when it had finished.
    After(Errno),
    /// The process dies before it.
    CrashBefore,
    /// The process dies when it was done, before it could know.
    CrashAfter,
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
