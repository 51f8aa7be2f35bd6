//! Sessions that quiesce applications, whichever host runs them: waiting until all are ready,
//! checking that they are alive, and ending them.

use std::time::{Duration, Instant};

use super::Quiesced;
use crate::error::{Error, Result};
use crate::host::{Session, SessionState};
use crate::model::SharedVolume;

/// Time between the end of a session's stdin and SIGTERM: an application that was quiesced needs a
/// moment to resume, and then its client needs one to disconnect.
pub(super) const RELEASE_GRACE: Duration = Duration::from_secs(10);
/// Time between SIGTERM and SIGKILL, and after that until the session is given up.
const SIGNAL_GRACE: Duration = Duration::from_secs(2);
/// Poll interval for sessions that are not ready: short compared with starting a program.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Which of a volume's hooks run, in order.
pub(super) fn shared_by<T: AsRef<str>>(
    volume_id: &str,
    its: Vec<T>,
    shared: SharedVolume,
) -> Result<Vec<T>> {
    if its.len() < 2 {
        return Ok(its);
    }
    match shared {
        SharedVolume::All => Ok(its),
        SharedVolume::One => Ok(its.into_iter().take(1).collect()),
        SharedVolume::Skip => Ok(Vec::new()),
        SharedVolume::Fail => {
            let names: Vec<&str> = its.iter().map(AsRef::as_ref).collect();
            Err(Error::refused(
                format!("volume {volume_id}"),
                format!(
                    "several hooks select it ({}), but the class has sharedVolume: fail; keep one hook, or set sharedVolume to all, one or skip",
                    names.join(", ")
                ),
            ))
        }
    }
}

/// A session that was started.
pub(super) struct Running {
    /// The name of its hook.
    pub(super) name: String,
    /// When its start began.
    pub(super) begun: Instant,
    /// Its own timeout, counted from then: when it has expired, the application may have been
    /// released, even if the program is alive.
    pub(super) timeout: Duration,
    /// It is a process of this machine, so its state is known for certain. For other sessions only
    /// a normal exit proves that their application stayed quiesced.
    pub(super) is_here: bool,
    /// The session itself.
    pub(super) session: Box<dyn Session>,
}

impl Running {
    /// Checks that its own timeout has not expired.
    fn check_time(&self, before: &str) -> Result<()> {
        if self.begun.elapsed() < self.timeout {
            return Ok(());
        }
        let seconds = self.timeout.as_secs_f64();
        Err(self.failed(format!(
            "its own deadline ({seconds} s) had passed {before}, so it may have released its application; give it a longer timeout"
        )))
    }

    fn failed(&self, reason: String) -> Error {
        let stderr = self.session.stderr_excerpt();
        let reason = match stderr.as_str() {
            "" => reason,
            stderr => format!("{reason}: {stderr}"),
        };
        Error::quiesce_failed(&self.name, reason)
    }
}

/// Sessions that were started. Dropping this releases them, and waits until they have ended.
pub(super) struct Sessions {
    /// In the order in which they were started.
    pub(super) running: Vec<Running>,
    grace: Duration,
}

impl Sessions {
    /// Creates an empty set; each session gets `grace` between the end of its stdin and SIGTERM.
    pub(super) fn new(grace: Duration) -> Sessions {
        Sessions {
            running: Vec::new(),
            grace,
        }
    }

    /// Waits until all have written READY, for at most `timeout` since `begun`.
    pub(super) fn ready(mut self, begun: Instant, timeout: Duration) -> Result<Box<dyn Quiesced>> {
        while !self.are_ready(begun.elapsed(), timeout)? {
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(Box::new(self))
    }

    /// Whether all have written READY; `waited` is the time since the first was started.
    fn are_ready(&mut self, waited: Duration, timeout: Duration) -> Result<bool> {
        let mut all = true;
        for running in &mut self.running {
            let state = running.session.poll();
            let limit = timeout.min(running.timeout);
            match state {
                SessionState::Ready => running.check_time("before all other hooks were ready")?,
                SessionState::Starting if waited < limit => all = false,
                SessionState::Starting => {
                    let limit = limit.as_millis();
                    return Err(running.failed(format!("it did not print READY within {limit} ms")));
                }
                SessionState::Ended {
                    was_ready, status, ..
                } => {
                    let before = if was_ready {
                        "before all other hooks were ready"
                    } else {
                        "before it printed READY"
                    };
                    return Err(running.failed(format!("it exited with {status} {before}")));
                }
            }
        }
        Ok(all)
    }

    /// Waits until all have exited; returns whether they have.
    fn wait_for_exits(&mut self, time: Duration) -> bool {
        let until = Instant::now() + time;
        loop {
            let ended = |running: &mut Running| {
                matches!(running.session.poll(), SessionState::Ended { .. })
            };
            // Each session is polled, because that also empties its pipes.
            let left = self
                .running
                .iter_mut()
                .filter_map(|r| (!ended(r)).then_some(()));
            if left.count() == 0 {
                return true;
            }
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Sends a signal to those that have not exited; returns their names.
    fn signal(&mut self, by_force: bool) -> Vec<String> {
        let mut names = Vec::new();
        for running in &mut self.running {
            if !matches!(running.session.poll(), SessionState::Ended { .. }) {
                running.session.kill(by_force);
                names.push(running.name.clone());
            }
        }
        names
    }

    /// Ends all sessions. Returns the names of those that needed a signal, and the result.
    fn terminate(&mut self) -> (Vec<String>, &'static str) {
        for running in &mut self.running {
            running.session.close_stdin();
        }
        if self.wait_for_exits(self.grace) {
            return (Vec::new(), "");
        }
        let signalled = self.signal(false);
        if self.wait_for_exits(SIGNAL_GRACE) {
            return (signalled, "was terminated by SIGTERM");
        }
        self.signal(true);
        if self.wait_for_exits(SIGNAL_GRACE) {
            return (signalled, "was killed");
        }
        (signalled, "was killed, but has not exited yet")
    }
}

impl Quiesced for Sessions {
    fn verify(&mut self) -> Result<()> {
        for running in &mut self.running {
            match running.session.poll() {
                SessionState::Ready => running.check_time("before the cut was complete")?,
                SessionState::Starting => {
                    return Err(Error::bug("a session that became ready stays ready"));
                }
                SessionState::Ended { status, .. } => {
                    let reason = format!("it exited with {status} before the cut was complete");
                    return Err(running.failed(reason));
                }
            }
        }
        Ok(())
    }

    fn release(mut self: Box<Self>) -> Result<Option<String>> {
        let (signalled, how) = self.terminate();
        let running = std::mem::take(&mut self.running);
        for mut running in running {
            let SessionState::Ended {
                success: false,
                status,
                ..
            } = running.session.poll()
            else {
                continue;
            };
            if !running.is_here && signalled.contains(&running.name) {
                let reason = format!(
                    "it did not exit within {} ms after its stdin was closed, so it is unknown whether its application was quiesced during the cut",
                    self.grace.as_millis()
                );
                return Err(running.failed(reason));
            }
            if !signalled.contains(&running.name) {
                let reason = format!(
                    "it exited with {status} during release, so its application may not have stayed quiesced"
                );
                return Err(running.failed(reason));
            }
        }
        Ok((!signalled.is_empty()).then(|| {
            let names = signalled.join(", ");
            format!(
                "hook {names} did not exit within {} ms after its stdin was closed, and {how}",
                self.grace.as_millis()
            )
        }))
    }
}

impl Drop for Sessions {
    fn drop(&mut self) {
        if !self.running.is_empty() {
            let (signalled, how) = self.terminate();
            if !signalled.is_empty() {
                let hooks = signalled.join(", ");
                tracing::warn!(hooks, how, "stopped hooks that did not exit by themselves");
            }
        }
    }
}
