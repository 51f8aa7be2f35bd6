//! A freeze session, on the driver's side.
//!
//! A separate thread, the keeper, reads the guard's messages. It also acts without the guard: when
//! the connection ends early, the guard does not answer for a second, or it has not thawed a second after
//! the deadline, the keeper resumes and thaws through the driver's own descriptors and then kills the
//! guard, unless another session relies on it, or the disk makes the driver's own FITHAWs wait, too, and
//! the guard answers. A guard that answers but has not thawed yet is waited for until then: FITHAW writes,
//! and the disk may be busy. Only the keeper removes the journal entry, when
//! everything is known to be thawed; in a session whose FIFREEZE hangs, that may be long after the session
//! was dropped.

use std::os::fd::AsFd;
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nix::errno::Errno;

use super::journal::LockedEntry;
use super::keeper;
use super::load::Admitted;
use super::protocol::{Request, Version, code, encode_long};
use super::shared::{Answers, Member, Phase, Shared, State};
use slackwater_core::error::{HostCause, HostError, chain};
use slackwater_core::fault;
use slackwater_core::host::freezer::{FreezeLimits, GracePeriods};
use slackwater_core::host::linux::freeze::{self, Process};
use slackwater_core::host::linux::seqpacket::Channel;
use slackwater_core::host::{Freeze, Result};

/// How late the guard may be with an answer before it is killed.
pub(super) const KILL_DELAY: Duration = Duration::from_secs(1);
/// How much longer than that an answer may take: the time for the guard to exit, and for the
/// driver's own FITHAWs.
const THAW_GRACE: Duration = Duration::from_secs(3);
/// How long dropping a session waits. Normally that takes less than a millisecond.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// File systems that the guard holds for a cut.
pub(super) struct Session(Arc<Shared>, Option<JoinHandle<()>>);

impl Session {
    /// Passes everything to the guard, and waits for its confirmation. `guard` was verified to be
    /// the process at the other end.
    pub(super) fn begin(
        channel: Channel,
        guard: Option<Process>,
        (members, admitted): (Vec<Member>, Arc<Admitted>),
        journal: LockedEntry,
        limits: FreezeLimits,
        grace_periods: GracePeriods,
        max_wait: Duration,
    ) -> Result<Session> {
        let begin = Request::Begin {
            members: members.len() as u32,
            freeze: limits.freeze,
            expedite: grace_periods == GracePeriods::Expedited,
        };
        let passed: Vec<_> = members.iter().map(Member::passed).collect();
        let version = version_of(&members);
        let short = begin.encode(version);
        let long = encode_long(begin, &passed);
        let message = match version {
            Version::One => short.as_slice(),
            Version::Two => long.as_slice(),
        };
        let mut fds = Vec::new();
        for member in &members {
            fds.extend(member.root.as_ref().map(AsFd::as_fd));
            fds.extend(member.mapped.as_ref().map(AsFd::as_fd));
        }
        fds.push(journal.lock().as_fd());
        let sent = fault::effect("guard_begin", || {
            channel.send_with_fds(message, &fds).map_err(|errno| {
                HostError::errno("hand the file systems over to", "the freeze guard", errno)
            })
        });
        if let Err(error) = sent {
            journal.remove_entry();
            return Err(error);
        }
        drop(fds);
        let shared = Arc::new(Shared {
            state: Mutex::new(State::of(members.len())),
            members,
            channel,
            version,
            guard,
            journal: Mutex::new(Some(journal)),
            limits,
            _admitted: admitted,
            changed: Condvar::new(),
        });
        let kept = shared.clone();
        let keeper = thread::Builder::new().name("freeze-keeper".into());
        let keeper = keeper.spawn(move || keeper::keep(&kept)).map_err(|error| {
            if let Some(journal) = shared.journal().take() {
                journal.remove_entry();
            }
            HostError::io("start a thread for", "the freeze guard", &error)
        })?;
        let session = Session(shared, Some(keeper));
        let ready = session.0.wait(Instant::now() + max_wait, |state| {
            state
                .ready
                .or_else(|| (state.lost || state.ended).then_some(-1))
        });
        match ready {
            Some(0) => Ok(session),
            other => Err(session.not_begun(other)),
        }
    }

    /// Why the guard did not take the session over, by its answer.
    fn not_begun(&self, answer: Option<i32>) -> HostError {
        let failed = |what: &str| self.0.failure("freeze", what);
        match (answer, &self.0.guard) {
            (Some(errno), _) if errno == Errno::EAGAIN as i32 => {
                let guard = "the freeze guard, which has reached its limit";
                HostError::errno("hand the file systems over to", guard, Errno::EAGAIN)
            }
            (Some(errno), _) if errno == Errno::EPROTO as i32 => {
                let guard = "the freeze guard, which uses another version of the protocol; the driver waits for it to exit";
                HostError::errno("hand the file systems over to", guard, Errno::EPROTO)
            }
            (Some(errno), _) if errno == Errno::EOPNOTSUPP as i32 => {
                let guard = "the freeze guard, which finds no device mapper; load the module dm_mod, and let the guard's container see /dev/mapper/control";
                HostError::errno("hand a mapped device over to", guard, Errno::EOPNOTSUPP)
            }
            // The driver has checked the same a moment before.
            (Some(errno), _) if errno == Errno::EBUSY as i32 => {
                let guard =
                    "the freeze guard: another program has just suspended a device of the cut";
                HostError::errno("hand mapped devices over to", guard, Errno::EBUSY)
            }
            (Some(errno), _) if errno > 0 => {
                let errno = Errno::from_raw(errno);
                failed(&format!("the freeze guard refused: {errno}"))
            }
            (Some(_), _) => failed(GONE),
            // Nothing in this session is frozen.
            (None, Some(guard)) if !self.0.is_needed_by_others() => {
                let _ = guard.kill();
                failed(SILENT)
            }
            (None, Some(_)) => failed(RELIED_ON),
            (None, None) => failed(STUCK),
        }
    }

    fn usable(&self, action: &'static str, wanted: Phase) -> Result<()> {
        let state = self.0.state();
        if state.lost || state.ended {
            return Err(self.0.failure(action, GONE));
        }
        if state.phase != wanted {
            let what = format!(
                "the freeze session is {:?} but must be {wanted:?}",
                state.phase
            );
            return Err(self.0.failure(action, &what));
        }
        Ok(())
    }

    fn broken(&self, error: HostError) -> HostError {
        self.0.state().phase = Phase::Broken;
        error
    }

    fn freeze_all(&self) -> Result<()> {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        // From the request to the guard on, writers may wait.
        fault::with_memory(|| match self.0.journal().as_mut() {
            Some(journal) => {
                let until = now + self.0.limits.freeze + Duration::from_millis(999);
                journal.begin_freezing(now.as_secs(), until.as_secs())
            }
            None => Ok(()),
        })?;
        let late_at = Instant::now() + self.0.limits.freeze + KILL_DELAY;
        {
            let mut state = self.0.state();
            state.phase = Phase::Frozen;
            state.late_at = Some(late_at);
        }
        self.0.ask("freeze", Request::Freeze)?;
        let answer = self.0.wait(late_at, |state| {
            let answers = || state.answers.iter();
            let frozen = || answers().map(|answers| answers.frozen);
            let suspended = || answers().map(|answers| answers.suspended);
            // A suspend that was cancelled is not the cause of a freeze that failed.
            for (doing, failure) in [
                ("freeze", first_failure(frozen())),
                ("suspend", first_failure(suspended())),
            ] {
                if let Some((at, errno)) = failure {
                    return Some(Err(Some((doing, at, errno))));
                }
            }
            // The deadline may pass while the last answer is still on its way.
            let early = state.answers.iter().any(|answers| answers.thawed.is_some());
            if state.lost || state.ended || early {
                return Some(Err(None));
            }
            let is_mapped = self.0.members.iter().map(|member| member.mapped.is_some());
            let all_suspended = is_mapped
                .zip(suspended())
                .all(|(is_mapped, answer)| !is_mapped || answer.is_some());
            let all_frozen = frozen().all(|answer| answer.is_some());
            (all_frozen && all_suspended).then_some(Ok(()))
        });
        match answer {
            Some(Ok(())) => Ok(()),
            Some(Err(Some((doing, at, errno)))) => {
                self.settle(late_at);
                Err(self.0.error(doing, at, errno))
            }
            Some(Err(None)) => {
                self.settle(late_at);
                Err(self.0.failure("freeze", TOO_LATE))
            }
            None => Err(self.0.failure("freeze", TOO_LATE)),
        }
    }

    /// Waits until the guard has thawed what it had frozen, if it can.
    fn settle(&self, late_at: Instant) {
        self.0.wait(late_at, |state| {
            let settled = state.answers.iter().all(Answers::is_settled);
            (settled || state.lost || state.ended).then_some(())
        });
    }

    fn thaw_one(&self, at: usize) -> Result<bool> {
        let known = |state: &State| state.answers[at].thawed;
        let soon = Instant::now() + KILL_DELAY + fault::delay("driver", "kill_guard");
        let (late_at, is_thawed) = {
            let mut state = self.0.state();
            let answers = &mut state.answers[at];
            answers.thaw_by.get_or_insert(soon);
            answers.is_ordered = true;
            (state.late_at.unwrap_or(soon), known(&state).is_some())
        };
        if !is_thawed {
            // The keeper also notices the guard's exit, and thaws. Nothing is logged here, because
            // the log may lie on a frozen file system.
            if !self.0.send(Request::Thaw(at as u32)) {
                self.0.state().answers[at].is_ordered = false;
            }
            self.0.ping();
        }
        self.0.wait(late_at, |state| {
            let is_up = known(state).is_some() || state.lost || state.ended;
            is_up.then_some(())
        });
        // One time of grace for all members.
        let lost_at = self.0.state().lost_at.unwrap_or_else(Instant::now);
        let answer = self.0.wait(lost_at + THAW_GRACE, |state| {
            known(state).or_else(|| state.ended.then_some((0, true)))
        });
        match answer {
            Some((0, early)) => Ok(!early),
            Some((errno, _)) if errno == Errno::EINVAL as i32 => Ok(false),
            Some((errno, _)) => Err(self.0.error("thaw", at, errno)),
            None => Err(self.0.failure("thaw", "the thaw hangs and is retried")),
        }
    }
}

const GONE: &str = "the freeze guard has exited; all file systems are thawed or will be";
const SILENT: &str = "the freeze guard did not answer; it was killed and is being restarted";
const STUCK: &str = "the freeze guard does not answer, and this process cannot kill it";
const RELIED_ON: &str =
    "the freeze guard does not answer, but it is not killed because another cut depends on it";
const TOO_LATE: &str = "not all file systems and devices were frozen before the deadline; all are thawed again or will be";

/// Whether an error means that no guard was there to take the session over.
pub(super) fn is_gone(error: &HostError) -> bool {
    matches!(&error.cause, HostCause::Unexpected(what) if what == GONE || what == SILENT)
}

/// The version that a session with these members needs.
pub(super) fn version_of(members: &[Member]) -> Version {
    match members.iter().any(|member| member.mapped.is_some()) {
        true => Version::Two,
        false => Version::One,
    }
}

/// The failure that caused the others: a member that was only cancelled is not the cause.
fn first_failure(answers: impl Iterator<Item = Option<i32>>) -> Option<(usize, i32)> {
    answers
        .enumerate()
        .filter_map(|(at, answer)| Some((at, answer?)))
        .filter(|(_, errno)| *errno != 0)
        .min_by_key(|(_, errno)| *errno == Errno::ECANCELED as i32)
}

impl Freeze for Session {
    fn sync(&self) -> Result<()> {
        self.usable("sync", Phase::Open)?;
        let synced = fault::effect("guard_sync", || {
            for answers in &mut self.0.state().answers {
                answers.synced = None;
            }
            self.0.ask("sync", Request::Sync)?;
            let until = Instant::now() + self.0.limits.sync;
            let answer = self.0.wait(until, |state| {
                let synced = || state.answers.iter().map(|answers| answers.synced);
                match first_failure(synced()) {
                    Some((at, errno)) => Some(Err(Some((at, errno)))),
                    None if state.lost || state.ended => Some(Err(None)),
                    None => synced().all(|answer| answer.is_some()).then_some(Ok(())),
                }
            });
            match answer {
                Some(Ok(())) => Ok(()),
                Some(Err(Some((at, errno)))) => Err(self.0.error("write back", at, errno)),
                Some(Err(None)) => Err(self.0.failure("write back", GONE)),
                None => Err(self.slow()),
            }
        });
        synced.map_err(|error| self.broken(error))
    }

    fn freeze(&self) -> Result<()> {
        self.usable("freeze", Phase::Open)?;
        fault::effect("guard_freeze", || self.freeze_all()).map_err(|error| self.broken(error))
    }

    fn thaw(&self, member: usize) -> Result<bool> {
        if member >= self.0.members.len() || self.0.state().phase != Phase::Frozen {
            let what = format!("member {member} was not frozen by this session");
            return Err(self.0.failure("thaw", &what));
        }
        fault::effect("guard_thaw", || self.thaw_one(member))
    }

    fn written(&self) -> Result<()> {
        fault::effect("guard_written", || self.written_back())
    }

    fn give_up(&self) {
        // Threads that wait for the guard stop waiting; the keeper continues until everything is
        // thawed.
        self.0.state().lose();
        self.0.notify();
        if self.0.ask("end", Request::End).is_err() {
            self.0.channel.finish();
        }
    }
}

impl Session {
    /// Checks the file systems with the driver's own copies of the descriptors. They share one open file with the
    /// guard's, so that the kernel reports what has failed since the guard's last syncfs. Each
    /// check runs in a thread, since it may hang.
    fn written_back(&self) -> Result<()> {
        let (done, answers) = channel();
        let members = self.0.members.iter().enumerate();
        let with_root =
            members.filter_map(|(at, member)| Some((at, member, member.root.as_ref()?)));
        let mut started = 0;
        for (at, member, root) in with_root {
            started += 1;
            let failed = |error| HostError::io("write back", &member.device, &error);
            let (root, done) = (root.try_clone().map_err(failed)?, done.clone());
            let syncing = thread::Builder::new().name("write-back".into());
            let synced = syncing.spawn(move || {
                let errno = code(freeze::sync(root.as_fd()));
                drop(root);
                let _ = done.send((at, errno));
            });
            synced.map_err(failed)?;
        }
        let until = Instant::now() + self.0.limits.sync;
        for _ in 0..started {
            let left = until.saturating_duration_since(Instant::now());
            match answers.recv_timeout(left) {
                Ok((_, 0)) => {}
                Ok((at, errno)) => return Err(self.0.error("write back", at, errno)),
                Err(_) => return Err(self.slow()),
            }
        }
        Ok(())
    }

    /// Names the members that are not finished.
    fn slow(&self) -> HostError {
        let state = self.0.state();
        let slow = state
            .answers
            .iter()
            .zip(&self.0.members)
            .find(|(answers, _)| answers.synced.is_none());
        let device = slow.map_or_else(|| self.0.everything(), |(_, member)| member.device.clone());
        let what = format!(
            "dirty data could not be written back within {:?}",
            self.0.limits.sync
        );
        HostError::unexpected("write back", device, what)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.0.ask("end", Request::End).is_err() {
            self.0.channel.finish();
        }
        let until = Instant::now() + CLOSE_TIMEOUT;
        if self
            .0
            .wait(until, |state| state.ended.then_some(()))
            .is_none()
        {
            let error = self.0.failure(
                "end a freeze of",
                "the freeze guard has not finished it yet",
            );
            tracing::warn!(error = %chain(&error), "ending a freeze session takes longer than expected");
        } else if let Some(keeper) = self.1.take() {
            // The last copies of the root descriptors are closed with it, so the volumes can be
            // unmounted.
            let _ = keeper.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reported_failure_is_the_cause_of_the_others() {
        let busy = Errno::EBUSY as i32;
        let cancelled = Errno::ECANCELED as i32;
        let failure = |answers: &[Option<i32>]| first_failure(answers.iter().copied());
        assert_eq!(
            failure(&[Some(cancelled), None, Some(busy)]),
            Some((2, busy))
        );
        assert_eq!(failure(&[Some(0), Some(cancelled)]), Some((1, cancelled)));
        assert_eq!(failure(&[Some(0), None]), None);
    }
}
