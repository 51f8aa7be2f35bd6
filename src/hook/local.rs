//! Hooks of this machine: programs in the configuration file.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::definition::HookDefinition;
use super::session::{RELEASE_GRACE, Running, Sessions, shared_by};
use super::{HookTarget, Hooks, Quiesced};
use crate::error::{Error, HostError, Result, chain};
use crate::host::{Account, Done, Effect, Host, Session, SessionSpec};
use crate::model::SharedVolume;

/// The hooks of the configuration file.
pub struct LocalHooks {
    /// Ordered by name.
    hooks: Vec<HookDefinition>,
    host: Arc<dyn Host>,
    grace: Duration,
}

impl LocalHooks {
    /// Creates hooks with unique names; `host` starts their programs.
    pub fn new(mut hooks: Vec<HookDefinition>, host: Arc<dyn Host>) -> LocalHooks {
        hooks.sort_by(|a, b| a.name.cmp(&b.name));
        LocalHooks {
            hooks,
            host,
            grace: RELEASE_GRACE,
        }
    }

    /// Sets the time between the end of a session's stdin and SIGTERM; the default is 10 s.
    #[must_use]
    pub fn with_grace(mut self, grace: Duration) -> LocalHooks {
        self.grace = grace;
        self
    }

    /// A hook, and the user that runs it.
    fn get_hook(&self, name: &str) -> Result<(&HookDefinition, Option<Account>)> {
        let hook = self.hooks.iter().find(|hook| hook.name == name);
        let hook =
            hook.ok_or_else(|| Error::bug(format!("hook {name} is one of the selected hooks")))?;
        let account = hook.user.as_deref().map(|user| self.host.account(user));
        let account = account
            .transpose()
            .map_err(|error| not_started(hook, &error))?;
        Ok((hook, account))
    }

    fn start(&self, hook: &HookDefinition, account: Option<&Account>) -> Result<Box<dyn Session>> {
        let done = self.host.perform(&Effect::StartSession(SessionSpec {
            name: &hook.name,
            program: hook.program(),
            arguments: &hook.arguments(),
            account,
            seconds: hook.seconds(),
        }));
        match done {
            Ok(Done::Session(session)) => Ok(session),
            Ok(Done::Plain | Done::Loop(_) | Done::Cloned(_) | Done::Checked(_)) => {
                Err(Error::bug("StartSession returns a session"))
            }
            Err(error) => Err(not_started(hook, &error)),
        }
    }
}

fn not_started(hook: &HookDefinition, error: &HostError) -> Error {
    Error::quiesce_failed(
        &hook.name,
        format!("its program cannot be started: {}", chain(error)),
    )
}

impl Hooks for LocalHooks {
    fn wanted(&self, targets: &[HookTarget], shared: SharedVolume) -> Result<Vec<String>> {
        let mut wanted = BTreeSet::new();
        for target in targets {
            let its: Vec<&str> = self
                .hooks
                .iter()
                .filter(|hook| hook.selector.matches(target))
                .map(|hook| hook.name.as_str())
                .collect();
            wanted.extend(shared_by(&target.volume_id, its, shared)?);
        }
        Ok(wanted.into_iter().map(String::from).collect())
    }

    fn quiesce(&self, names: &[String], timeout: Duration) -> Result<Box<dyn Quiesced>> {
        let begun = Instant::now();
        let mut sessions = Sessions::new(self.grace);
        // This precedes the first quiesced application, because a directory service may be slow.
        let found = names.iter().map(|name| self.get_hook(name));
        for (hook, account) in found.collect::<Result<Vec<_>>>()? {
            let begun = Instant::now();
            let session = self.start(hook, account.as_ref())?;
            sessions.running.push(Running {
                name: hook.name.clone(),
                begun,
                timeout: hook.timeout,
                is_here: true,
                session,
            });
        }
        sessions.ready(begun, timeout)
    }
}
