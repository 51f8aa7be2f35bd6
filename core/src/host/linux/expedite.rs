//! RCU grace periods, expedited while file systems are about to be frozen.
//!
//! FIFREEZE waits for three of them before it's done, and its file system's writers with it: 25 ms
//! of standing still on an idle machine, twice that for several at once, since one that comes in
//! the middle of a grace period waits for the next one too. Expedited, all three are less than a
//! millisecond (ADR 0028). The kernel has a switch for that, for all of itself and for everyone:
//! `/sys/kernel/rcu_expedited`. It is on for the time of a cut, and off again afterwards.
//!
//! Who has set the switch to on, or `/sys/kernel/rcu_normal`, which wins over it, has decided, and
//! nothing is changed. Where it can't be written, freezes take their 25 ms.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Read by the kernel at the beginning of each wait for a grace period.
const SWITCH: &str = "/sys/kernel/rcu_expedited";
const OFF: &str = "0";
/// Any number but 0 is on. This one is ours, so that what a crash has left on is known from what
/// somebody has decided.
const ON: &str = "20908";

/// The kernel's switch, for the sessions of one guard.
pub struct Expedite {
    switch: PathBuf,
    /// Sessions that want it on.
    sessions: Mutex<usize>,
}

/// The switch is on while it lives, if it may be.
pub struct Expedited<'a>(&'a Expedite);

impl Default for Expedite {
    fn default() -> Expedite {
        Expedite::at(Path::new(SWITCH))
    }
}

impl Expedite {
    fn at(switch: &Path) -> Expedite {
        Expedite {
            switch: switch.to_path_buf(),
            sessions: Mutex::default(),
        }
    }

    /// Turns it on for a session. Touches a file only where nothing of this guard is frozen: before
    /// the first session that freezes, and after the last. Killed in between, it's left on, for
    /// [`Expedite::restore`]. The guard of another state dir that turns it off too early costs time
    /// alone.
    pub fn begin(&self) -> Expedited<'_> {
        let mut sessions = self.sessions();
        *sessions += 1;
        if *sessions == 1 && self.is(OFF) && self.set(ON) && !self.is(ON) {
            // A kernel that takes every number for 1: nobody could tell whose that is.
            self.set(OFF);
        }
        Expedited(self)
    }

    /// Turns it off if we have turned it on, or a crash of ours has left it so.
    pub fn restore(&self) {
        if self.is(ON) {
            self.set(OFF);
        }
    }

    fn sessions(&self) -> MutexGuard<'_, usize> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is(&self, value: &str) -> bool {
        let mut text = [0; 16];
        let read = OpenOptions::new().read(true).open(&self.switch);
        let read = read.and_then(|mut switch| switch.read(&mut text));
        read.is_ok_and(|length| text[..length].trim_ascii() == value.as_bytes())
    }

    fn set(&self, value: &str) -> bool {
        let opened = OpenOptions::new()
            .write(true)
            .truncate(true)
            .open(&self.switch);
        opened
            .and_then(|mut switch| switch.write_all(value.as_bytes()))
            .is_ok()
    }
}

impl Drop for Expedited<'_> {
    fn drop(&mut self) {
        let mut sessions = self.0.sessions();
        *sessions -= 1;
        if *sessions == 0 {
            self.0.restore();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn switch(value: &str) -> (tempfile::NamedTempFile, Expedite) {
        let mut file = tempfile::Builder::new()
            .prefix("slackwater-")
            .tempfile()
            .unwrap();
        writeln!(file, "{value}").unwrap();
        let expedite = Expedite::at(file.path());
        (file, expedite)
    }

    #[test]
    fn the_switch_is_on_until_the_last_session_has_ended() {
        let (_file, expedite) = switch(OFF);
        let first = expedite.begin();
        let second = expedite.begin();
        assert!(expedite.is(ON));
        drop(first);
        assert!(expedite.is(ON));
        drop(second);
        assert!(expedite.is(OFF));
        drop(expedite.begin());
        assert!(expedite.is(OFF));
    }

    #[test]
    fn a_decision_of_the_administrator_is_left_alone() {
        let (_file, expedite) = switch("1");
        let session = expedite.begin();
        assert!(expedite.is("1"));
        drop(session);
        expedite.restore();
        assert!(expedite.is("1"));
    }

    #[test]
    fn a_switch_that_a_crash_has_left_on_is_turned_off() {
        let (file, crashed) = switch(OFF);
        std::mem::forget(crashed.begin());
        let next = Expedite::at(file.path());
        assert!(next.is(ON));
        next.restore();
        assert!(next.is(OFF));
    }

    #[test]
    fn a_missing_switch_is_not_a_failure() {
        let expedite = Expedite::at(Path::new("/nowhere/at/all"));
        drop(expedite.begin());
        expedite.restore();
    }
}
