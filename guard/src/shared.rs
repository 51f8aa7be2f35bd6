//! State that a freeze session of the driver shares with its keeper.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use nix::errno::Errno;

use super::journal::LockedEntry;
use super::load::Admitted;
use super::mapped::Mapped;
use super::protocol::{Passed, Request, Version};
use slackwater_core::error::HostError;
use slackwater_core::host::Result;
use slackwater_core::host::freezer::FreezeLimits;
use slackwater_core::host::linux::freeze::Process;
use slackwater_core::host::linux::seqpacket::Channel;

/// One member.
pub(super) struct Member {
    pub(super) volume_id: String,
    /// The device, for errors.
    pub(super) device: PathBuf,
    pub(super) root: Option<OwnedFd>,
    pub(super) mapped: Option<Mapped>,
}

impl Member {
    /// What is passed to the guard.
    pub(super) fn passed(&self) -> Passed {
        match (&self.root, &self.mapped) {
            (Some(_), Some(_)) => Passed::Both,
            (None, Some(_)) => Passed::Mapped,
            (_, None) => Passed::Root,
        }
    }
}

/// The guard's answers about a member.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Answers {
    pub(super) synced: Option<i32>,
    pub(super) frozen: Option<i32>,
    pub(super) suspended: Option<i32>,
    /// The errno of the resume or thaw, and whether it was unrequested.
    pub(super) thawed: Option<(i32, bool)>,
    /// When the guard must have thawed, or shown that it is alive.
    pub(super) thaw_by: Option<Instant>,
    /// The order to thaw was sent.
    pub(super) is_ordered: bool,
    /// The guard resumed and thawed it, and succeeded.
    pub(super) by_guard: bool,
}

impl Answers {
    /// Nothing of the member is frozen or suspended by the guard, or can become so.
    pub(super) fn is_settled(&self) -> bool {
        self.thawed.is_some() || self.frozen.is_some_and(|errno| errno != 0)
    }
}

/// The phase of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Open,
    Frozen,
    /// A sync or the freeze failed: the session can only be dropped.
    Broken,
}

pub(super) struct State {
    pub(super) phase: Phase,
    pub(super) answers: Vec<Answers>,
    /// When the guard counts as late.
    pub(super) late_at: Option<Instant>,
    /// The value of `late_at` for which the guard was last pinged.
    pub(super) asked: Option<Instant>,
    /// When the guard was pinged first since its last message.
    pub(super) silent_since: Option<Instant>,
    /// The guard's answer to the start of the session.
    pub(super) ready: Option<i32>,
    /// The guard died, or the session was given up.
    pub(super) lost: bool,
    /// When that became known.
    pub(super) lost_at: Option<Instant>,
    /// The keeper has ended.
    pub(super) ended: bool,
}

impl State {
    pub(super) fn of(members: usize) -> State {
        State {
            phase: Phase::Open,
            answers: vec![Answers::default(); members],
            late_at: None,
            asked: None,
            silent_since: None,
            ready: None,
            lost: false,
            lost_at: None,
            ended: false,
        }
    }

    /// Nothing is expected of the guard any more.
    pub(super) fn lose(&mut self) {
        self.lost = true;
        self.lost_at.get_or_insert_with(Instant::now);
    }
}

/// State shared by session and keeper.
pub(super) struct Shared {
    pub(super) members: Vec<Member>,
    pub(super) channel: Channel,
    pub(super) version: Version,
    /// The guard's process, if it is visible in this PID namespace.
    pub(super) guard: Option<Process>,
    pub(super) journal: Mutex<Option<LockedEntry>>,
    pub(super) limits: FreezeLimits,
    /// Keeps the session counted until its last thread has ended.
    pub(super) _admitted: Arc<Admitted>,
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
}

impl Shared {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn notify(&self) {
        self.changed.notify_all();
    }

    pub(super) fn journal(&self) -> MutexGuard<'_, Option<LockedEntry>> {
        self.journal.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `known` returns a value, or until a point in time.
    pub(super) fn wait<T>(&self, until: Instant, known: impl Fn(&State) -> Option<T>) -> Option<T> {
        let mut state = self.state();
        loop {
            if let Some(found) = known(&state) {
                return Some(found);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Whether the guard must stay alive for another session, which may have something frozen.
    pub(super) fn is_needed_by_others(&self) -> bool {
        let journal = self.journal();
        // If the journal cannot be read, such a session may exist.
        journal
            .as_ref()
            .is_some_and(|own| own.is_another_frozen().unwrap_or(true))
    }

    pub(super) fn error(&self, action: &'static str, at: usize, errno: i32) -> HostError {
        let device = self.members[at].device.clone();
        HostError::errno(action, device, Errno::from_raw(errno))
    }

    /// Sends a message without allocating and without waiting. Returns whether it was sent. The state must
    /// not be locked, because the kernel may allocate.
    pub(super) fn send(&self, request: Request) -> bool {
        self.channel.send(&request.encode(self.version)).is_ok()
    }

    /// Lets the guard show that it is alive.
    pub(super) fn ping(&self) {
        let before = {
            let mut state = self.state();
            let before = state.silent_since;
            state.silent_since = before.or_else(|| Some(Instant::now()));
            before
        };
        // A guard that has ended the session normally has sent a message about it, which is read
        // next.
        if !self.send(Request::Ping) {
            self.state().silent_since = before;
        }
    }

    pub(super) fn everything(&self) -> PathBuf {
        self.members
            .first()
            .map(|member| member.device.clone())
            .unwrap_or_default()
    }

    pub(super) fn failure(&self, action: &'static str, what: &str) -> HostError {
        HostError::unexpected(action, self.everything(), what)
    }

    pub(super) fn ask(&self, action: &'static str, request: Request) -> Result<()> {
        self.channel
            .send(&request.encode(self.version))
            .map_err(|errno| {
                self.failure(action, &format!("cannot send to the freeze guard: {errno}"))
            })
    }
}
