//! Hooks of this machine: programs named in the configuration file.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::definition::HookDefinition;
use super::{HookTarget, Hooks, Quiesced};
use crate::error::{Error, Result, chain};
use crate::host::{Done, Effect, Host, Session, SessionSpec, SessionState};
use crate::model::SharedVolume;

/// Between the end of a session's stdin and SIGTERM: an application that has stood still needs a
/// moment to get going, and then its client to say goodbye.
const GRACE: Duration = Duration::from_secs(10);
/// Between SIGTERM and SIGKILL, and after that until it's given up.
const LAST_GRACE: Duration = Duration::from_secs(2);
/// Between two looks at sessions that aren't there yet: short beside starting a program.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// The hooks of the configuration file.
pub struct LocalHooks {
    /// In the order of names.
    hooks: Vec<HookDefinition>,
    host: Arc<dyn Host>,
    grace: Duration,
}

impl LocalHooks {
    /// With names that are unique; `host` starts their programs.
    pub fn new(mut hooks: Vec<HookDefinition>, host: Arc<dyn Host>) -> LocalHooks {
        hooks.sort_by(|a, b| a.name.cmp(&b.name));
        LocalHooks {
            hooks,
            host,
            grace: GRACE,
        }
    }

    /// With another time between the end of a session's stdin and SIGTERM, 10 s otherwise.
    #[must_use]
    pub fn with_grace(mut self, grace: Duration) -> LocalHooks {
        self.grace = grace;
        self
    }

    fn start(&self, name: &str) -> Result<(HookDefinition, Box<dyn Session>)> {
        let hook = self.hooks.iter().find(|hook| hook.name == name);
        let hook = hook.ok_or_else(|| Error::Bug {
            invariant: format!("hook {name} is one of those that were found"),
        })?;
        let done = self.host.perform(&Effect::StartSession(SessionSpec {
            name,
            program: hook.program(),
            arguments: &hook.arguments(),
            user: hook.user.as_deref(),
            seconds: hook.seconds(),
        }));
        match done {
            Ok(Done::Session(session)) => Ok((hook.clone(), session)),
            Ok(Done::Plain | Done::Loop(_) | Done::Cloned(_)) => Err(Error::Bug {
                invariant: "StartSession gives a session".into(),
            }),
            Err(error) => Err(Error::QuiesceFailed {
                hook: name.into(),
                reason: format!("its program can't be started: {}", chain(&error)),
            }),
        }
    }
}

impl Hooks for LocalHooks {
    fn wanted(&self, targets: &[HookTarget], shared: SharedVolume) -> Result<Vec<String>> {
        let mut wanted = BTreeSet::new();
        for target in targets {
            let its: Vec<&str> = self
                .hooks
                .iter()
                .filter(|hook| hook.whose.matches(target))
                .map(|hook| hook.name.as_str())
                .collect();
            match (its.as_slice(), shared) {
                ([] | [_], _) | (_, SharedVolume::All) => wanted.extend(its),
                ([first, ..], SharedVolume::One) => drop(wanted.insert(*first)),
                (_, SharedVolume::Skip) => {}
                (_, SharedVolume::Fail) => {
                    return Err(Error::refused(
                        format!("volume {}", target.volume_id),
                        format!(
                            "several hooks are for it ({}), and the class has sharedVolume: \
                             fail; leave one, or choose all, one or skip",
                            its.join(", ")
                        ),
                    ));
                }
            }
        }
        Ok(wanted.into_iter().map(String::from).collect())
    }

    fn quiesce(&self, names: &[String], timeout: Duration) -> Result<Box<dyn Quiesced>> {
        let begun = Instant::now();
        let mut sessions = Sessions {
            running: Vec::with_capacity(names.len()),
            grace: self.grace,
        };
        for name in names {
            let (hook, session) = self.start(name)?;
            sessions.running.push(Running { hook, session });
        }
        while !sessions.are_ready(begun.elapsed(), timeout)? {
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(Box::new(sessions))
    }
}

struct Running {
    hook: HookDefinition,
    session: Box<dyn Session>,
}

impl Running {
    fn failed(&self, reason: String) -> Error {
        let said = self.session.said();
        let reason = match said.as_str() {
            "" => reason,
            said => format!("{reason}: {said}"),
        };
        Error::QuiesceFailed {
            hook: self.hook.name.clone(),
            reason,
        }
    }
}

/// Sessions that were started. Dropping them releases them, and waits for that.
struct Sessions {
    running: Vec<Running>,
    grace: Duration,
}

impl Sessions {
    /// Whether all have said READY; `waited` since the first was started.
    fn are_ready(&mut self, waited: Duration, timeout: Duration) -> Result<bool> {
        let mut all = true;
        for running in &mut self.running {
            let state = running.session.look();
            let limit = timeout.min(running.hook.timeout);
            match state {
                SessionState::Ready => {}
                SessionState::Starting if waited < limit => all = false,
                SessionState::Starting => {
                    let limit = limit.as_millis();
                    return Err(running.failed(format!("it did not say READY within {limit} ms")));
                }
                SessionState::Ended {
                    was_ready, status, ..
                } => {
                    let before = if was_ready {
                        "before all others were ready"
                    } else {
                        "before it said READY"
                    };
                    return Err(running.failed(format!("it ended with {status} {before}")));
                }
            }
        }
        Ok(all)
    }

    /// Waits for all ends; whether all have come.
    fn ended_within(&mut self, time: Duration) -> bool {
        let until = Instant::now() + time;
        loop {
            let ended = |running: &mut Running| {
                matches!(running.session.look(), SessionState::Ended { .. })
            };
            // Each is looked at: its pipes are emptied by that.
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
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Those that haven't ended, which are sent a signal.
    fn signal(&mut self, by_force: bool) -> Vec<String> {
        let mut names = Vec::new();
        for running in &mut self.running {
            if !matches!(running.session.look(), SessionState::Ended { .. }) {
                running.session.end(by_force);
                names.push(running.hook.name.clone());
            }
        }
        names
    }

    /// Ends them all. Names of those that had to be told by a signal, and how that went.
    fn end(&mut self) -> (Vec<String>, &'static str) {
        for running in &mut self.running {
            running.session.let_go();
        }
        if self.ended_within(self.grace) {
            return (Vec::new(), "");
        }
        let signalled = self.signal(false);
        if self.ended_within(LAST_GRACE) {
            return (signalled, "was ended by SIGTERM");
        }
        self.signal(true);
        if self.ended_within(LAST_GRACE) {
            return (signalled, "was killed");
        }
        (signalled, "was killed, and has not ended yet")
    }
}

impl Quiesced for Sessions {
    fn verify(&mut self) -> Result<()> {
        for running in &mut self.running {
            match running.session.look() {
                SessionState::Ready => {}
                SessionState::Starting => {
                    return Err(Error::Bug {
                        invariant: "a session that was ready stays so".into(),
                    });
                }
                SessionState::Ended { status, .. } => {
                    let reason = format!("it ended with {status} before the cut was made");
                    return Err(running.failed(reason));
                }
            }
        }
        Ok(())
    }

    fn release(mut self: Box<Self>) -> Result<Option<String>> {
        let (signalled, how) = self.end();
        let running = std::mem::take(&mut self.running);
        for mut running in running {
            let SessionState::Ended {
                success: false,
                status,
                ..
            } = running.session.look()
            else {
                continue;
            };
            if !signalled.contains(&running.hook.name) {
                let reason = format!(
                    "it ended with {status} when it was to release, so what it held may have \
                     been lost"
                );
                return Err(running.failed(reason));
            }
        }
        Ok((!signalled.is_empty()).then(|| {
            let names = signalled.join(", ");
            format!(
                "hook {names} did not end within {} ms after the end of its stdin, and {how}",
                self.grace.as_millis()
            )
        }))
    }
}

impl Drop for Sessions {
    fn drop(&mut self) {
        if !self.running.is_empty() {
            let (signalled, how) = self.end();
            if !signalled.is_empty() {
                let hooks = signalled.join(", ");
                tracing::warn!(hooks, how, "a hook did not release by itself");
            }
        }
    }
}
