//! Expedites RCU grace periods while file systems are about to be frozen.
//!
//! FIFREEZE waits for three grace periods before it returns, and the writers of its file system
//! wait with it: 25 ms on an idle machine, twice that for several file systems at once, because a
//! FIFREEZE that starts in the middle of a grace period waits for the next one too. Expedited, all
//! three take less than a millisecond (ADR 0028). The kernel has a system-wide switch for that,
//! `/sys/kernel/rcu_expedited`. It is on for the duration of a cut, and off again afterwards.
//!
//! If an administrator has turned this switch on, or `/sys/kernel/rcu_normal`, which overrides it,
//! nothing is changed. If the switch cannot be written, a freeze takes its 25 ms.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The kernel reads it at the beginning of each wait for a grace period.
const SWITCH: &str = "/sys/kernel/rcu_expedited";
const OFF: &str = "0";
/// Any number but 0 means on. This value identifies the driver, so that a switch left on by a crash
/// can be distinguished from an administrator's setting.
const ON: &str = "20908";

/// The kernel's switch, for the sessions of one guard.
pub struct Expedite {
    switch: PathBuf,
    /// Number of sessions that need the switch on.
    sessions: Mutex<usize>,
}

/// Keeps the switch on, if permitted, until it is dropped.
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

    /// Turns the switch on for a session. The file is accessed only while this guard holds nothing
    /// frozen: before the first session freezes, and after the last one. If the guard is killed in
    /// between, the switch stays on until [`Expedite::restore`]. If a guard with another state
    /// directory turns it off too early, that only costs time.
    pub fn begin(&self) -> Expedited<'_> {
        let mut sessions = self.sessions();
        *sessions += 1;
        if *sessions == 1 && self.is(OFF) && self.set(ON) && !self.is(ON) {
            // This kernel stores every number as 1, so the switch could not be attributed to the
            // driver later.
            self.set(OFF);
        }
        Expedited(self)
    }

    /// Turns the switch off if this process has turned it on, or a crashed one has left it on.
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
