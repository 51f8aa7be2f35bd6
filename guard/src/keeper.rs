//! The keeper of a session on the driver's side: reads the guard's answers, notices the guard's
//! exit, thaws in place of a guard that is late, and kills it.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::client::KILL_DELAY;
use super::journal::LockedEntry;
use super::mapped::Mapped;
use super::protocol::{MESSAGE_BYTES, Reply};
use super::shared::{Answers, Shared};
use slackwater_core::fault;
use slackwater_core::host::linux::freeze;

/// How long the driver's own FITHAWs may take before the session continues without their result.
const THAW_TIMEOUT: Duration = Duration::from_secs(1);
/// How often a FITHAW is repeated if it failed, or was called before the guard had exited.
const THAW_RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// After this many attempts the sweep takes over what is in the journal.
const MAX_ATTEMPTS: u32 = 300;

/// Why the keeper stopped reading answers.
enum Ending {
    /// The session ended normally: nothing is frozen any more.
    Finished,
    /// The connection ended early.
    Dead,
    /// The guard is late.
    Late,
}

/// Serves a session until everything in it is thawed.
pub(super) fn keep(shared: &Arc<Shared>) {
    match fault::without_memory("driver", "keeper", || listen(shared)) {
        Ending::Finished => finish(shared, is_everything_thawed(shared)),
        Ending::Dead => {
            // The connection ends only after all threads of the guard, and so their FIFREEZEs, have
            // ended.
            let thawed = thaw_all(shared, false);
            finish(shared, thawed);
        }
        Ending::Late => {
            // Nothing is logged before everything is thawed, because the log may lie on a frozen
            // file system.
            let thawed = thaw_all(shared, true);
            tracing::warn!("stopped waiting for a freeze guard that missed its deadline");
            finish(shared, thawed);
        }
    }
}

fn listen(shared: &Shared) -> Ending {
    let mut bytes = [0; MESSAGE_BYTES];
    loop {
        if is_late(shared) {
            return Ending::Late;
        }
        if !readable(shared) {
            continue;
        }
        match shared.channel.receive(&mut bytes) {
            Ok(Some(())) => match decode(shared, &bytes) {
                Some(Reply::Ended) => return Ending::Finished,
                Some(reply) => note(shared, reply),
                // This guard does not know the version of the session, so it has refused it and
                // nothing is frozen. It is not killed, because it may hold a freeze of another
                // driver.
                None if shared.state().ready.is_none() => {
                    note(shared, Reply::Ready(Errno::EPROTO as i32));
                    return Ending::Finished;
                }
                None => return Ending::Late,
            },
            Ok(None) => return Ending::Dead,
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(_) => return Ending::Late,
        }
    }
}

/// A message of the guard; `None` if it is invalid in this session.
fn decode(shared: &Shared, bytes: &[u8; MESSAGE_BYTES]) -> Option<Reply> {
    let (version, reply) = Reply::decode(bytes)?;
    (version == shared.version).then_some(reply)
}

/// Whether to stop waiting for the guard. Until the deadline, a guard that was asked to thaw must only
/// show that it is alive. The same is true after the deadline of a guard with a FIFREEZE that hangs, which
/// has thawed everything else: it will thaw when the FIFREEZE returns.
fn is_late(shared: &Shared) -> bool {
    let mut state = shared.state();
    let Some(late_at) = state.late_at else {
        return false;
    };
    let now = Instant::now();
    let is_silent = state
        .silent_since
        .is_some_and(|since| now.duration_since(since) >= KILL_DELAY);
    let is_overdue = |answers: &Answers| {
        answers.thawed.is_none() && answers.thaw_by.is_some_and(|thaw_by| now >= thaw_by)
    };
    let mut overdue = state.answers.iter().filter(|one| is_overdue(one));
    if overdue.any(|one| is_silent || !one.is_ordered) {
        // Its answer may be available but unread, if this process was the one that was stopped.
        return !wait_for(shared.channel.as_fd(), Duration::ZERO);
    }
    // The guard answers, or still has time to, so FITHAW waits for the disk. The file system stays frozen
    // until then.
    let next_check = state.silent_since.unwrap_or(now) + KILL_DELAY;
    let mut must_ping = false;
    for one in state.answers.iter_mut().filter(|one| is_overdue(one)) {
        one.thaw_by = Some(next_check);
        must_ping = true;
    }
    // The guard is pinged at the deadline, and must have answered by the time at which it counts as
    // late.
    let is_near = now + KILL_DELAY >= late_at && !state.answers.iter().all(Answers::is_settled);
    let is_asked = state.asked == Some(late_at);
    if is_near {
        state.asked = Some(late_at);
    }
    if must_ping || (is_near && !is_asked) {
        drop(state);
        shared.ping();
        return false;
    }
    if !is_near || now < late_at {
        return false;
    }
    let is_frozen = |answers: &Answers| answers.frozen.is_some() && !answers.is_settled();
    if state.answers.iter().any(is_frozen) || is_silent {
        // Its answers may be available but unread, if this process was the one that was stopped.
        return !wait_for(shared.channel.as_fd(), Duration::ZERO);
    }
    if state.silent_since.is_none() {
        state.late_at = Some(now + KILL_DELAY);
    }
    false
}

/// Waits for a message, at most until the guard would be late, and never long, because that time
/// may be set in the meantime.
fn readable(shared: &Shared) -> bool {
    const MAX_WAIT: Duration = Duration::from_millis(250);
    let late_at = shared.state().late_at.filter(|at| *at > Instant::now());
    let left = late_at.map_or(MAX_WAIT, |late_at| {
        late_at
            .saturating_duration_since(Instant::now())
            .min(MAX_WAIT)
    });
    wait_for(shared.channel.as_fd(), left)
}

fn wait_for(fd: std::os::fd::BorrowedFd<'_>, left: Duration) -> bool {
    let timeout = PollTimeout::try_from(left.as_millis() + 1).unwrap_or(PollTimeout::MAX);
    let mut one = [PollFd::new(fd, PollFlags::POLLIN)];
    poll(&mut one, timeout).is_ok() && one[0].any() == Some(true)
}

fn note(shared: &Shared, reply: Reply) {
    let mut state = shared.state();
    state.silent_since = None;
    match reply {
        Reply::Ready(errno) => state.ready = Some(errno),
        Reply::Synced(member, errno) => {
            if let Some(answers) = state.answers.get_mut(member as usize) {
                answers.synced = Some(errno);
            }
        }
        Reply::Frozen(member, errno) => {
            if let Some(answers) = state.answers.get_mut(member as usize) {
                answers.frozen = Some(errno);
            }
            // A FIFREEZE that returns late is thawed immediately afterwards.
            let soon = Instant::now() + KILL_DELAY;
            state.late_at = state.late_at.map(|late_at| late_at.max(soon));
        }
        Reply::Suspended(member, errno) => {
            if let Some(answers) = state.answers.get_mut(member as usize) {
                answers.suspended = Some(errno);
            }
        }
        Reply::Thawed {
            member,
            errno,
            early,
        } => {
            if let Some(answers) = state.answers.get_mut(member as usize) {
                answers.thawed.get_or_insert((errno, early));
                answers.by_guard = errno == 0 || errno == Errno::EINVAL as i32;
            }
        }
        Reply::Pong | Reply::Ended => {}
    }
    drop(state);
    shared.notify();
}

/// Whether the guard's last resumes and FITHAWs left nothing suspended or frozen.
fn is_everything_thawed(shared: &Shared) -> bool {
    let state = shared.state();
    state.answers.iter().all(|answers| match answers.thawed {
        Some((errno, _)) => errno == 0 || errno == Errno::EINVAL as i32,
        None => true,
    })
}

/// Kills the guard, unless another session relies on it. A guard in another PID namespace cannot be
/// killed.
fn kill(shared: &Shared) {
    if let Some(guard) = &shared.guard
        && !shared.is_needed_by_others()
    {
        let _ = guard.kill();
    }
}

/// Whether the guard cannot freeze any more: then the result of FITHAW is final.
fn has_guard_ended(shared: &Shared) -> bool {
    let mut bytes = [0; MESSAGE_BYTES];
    loop {
        match shared.channel.receive(&mut bytes) {
            // Messages that it sent before its exit count; they may report, for example, which
            // members it never froze.
            Ok(Some(())) => {
                if let Some(reply) = decode(shared, &bytes) {
                    note(shared, reply);
                }
            }
            Ok(None) => return true,
            Err(_) => return false,
        }
    }
}

/// Resumes and thaws everything through the driver's own descriptors, each member in a thread, since one may hang.
/// With `is_late`, the guard is then killed. Returns true if everything is finally thawed.
fn thaw_all(shared: &Arc<Shared>, is_late: bool) -> bool {
    {
        let mut state = shared.state();
        state.lose();
        if state.late_at.is_none() {
            // The guard was never asked to freeze.
            drop(state);
            shared.notify();
            return true;
        }
    }
    let (done, answers) = channel();
    let mut waited_for = 0;
    for at in 0..shared.members.len() {
        let (shared, done) = (shared.clone(), done.clone());
        let builder = thread::Builder::new().name("thaw".into());
        let thawing = builder.spawn(move || {
            let thawed = thaw_one(&shared, at);
            // The root descriptors are closed before the session is notified, so that the volumes
            // can be unmounted then.
            drop(shared);
            let _ = done.send(thawed);
        });
        match thawing {
            Ok(_) => waited_for += 1,
            Err(error) => tracing::error!(%error, "failed to start a thread for thawing"),
        }
    }
    drop(done);
    shared.notify();
    // Let the writers continue first; wait a little for a FITHAW that hangs.
    shared.wait(Instant::now() + THAW_TIMEOUT, |state| {
        let thawed = |answers: &Answers| answers.thawed.is_some() || answers.is_settled();
        state.answers.iter().all(thawed).then_some(())
    });
    if is_late {
        // Other sessions need not keep the guard alive for this one.
        let journal = &mut *shared.journal();
        let _ = journal.as_mut().map_or(Ok(()), LockedEntry::expire);
    }
    collect(shared, &answers, waited_for, is_late)
}

/// Waits for the last result: what the guard might still freeze is thawed until it has exited. A
/// late guard is killed as soon as no other session relies on it.
fn collect(shared: &Shared, answers: &Receiver<bool>, waited_for: usize, is_late: bool) -> bool {
    let mut thawed = 0;
    // While its own FITHAW waits for the disk as well, the guard could not exit: it would keep its
    // lock, no other guard could start, and no volume of any pool could be frozen.
    let is_disk_late = (shared.state().answers.iter()).any(|answers| !answers.is_settled());
    let kill_late = || {
        if is_late && !(is_disk_late && is_alive(shared)) {
            kill(shared);
        }
    };
    kill_late();
    for _ in 0..waited_for {
        let answer = loop {
            match answers.recv_timeout(THAW_RETRY_INTERVAL) {
                Err(RecvTimeoutError::Timeout) => {
                    kill_late();
                    resume_again(shared);
                }
                answer => break answer,
            }
        };
        thawed += usize::from(answer == Ok(true));
    }
    thawed == shared.members.len()
}

/// Whether the guard has answered the pings of the last [`KILL_DELAY`]. Pings it once more.
fn is_alive(shared: &Shared) -> bool {
    // Its answers are read.
    has_guard_ended(shared);
    let silent_since = shared.state().silent_since;
    shared.ping();
    silent_since.is_none_or(|since| since.elapsed() < KILL_DELAY)
}

/// Resumes what the guard has suspended since the first attempt: a FITHAW waits for that, in its
/// thread.
fn resume_again(shared: &Shared) {
    for at in 0..shared.members.len() {
        if !is_foreign(shared, at) {
            // The next attempt comes soon. This one does not wait for the thread of the member.
            let _ = resume(shared, at, Mapped::try_resume);
        }
    }
}

/// Resumes the device of a member, unless another program has suspended it. EBUSY if it may be
/// suspended afterwards.
fn resume(
    shared: &Shared,
    at: usize,
    how: impl Fn(&Mapped) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let Some(mapped) = &shared.members[at].mapped else {
        return Ok(());
    };
    let is_foreign = shared.state().answers[at]
        .suspended
        .is_some_and(|errno| errno != 0);
    match is_foreign {
        true if mapped.is_suspended()? => Err(Errno::EBUSY),
        true => Ok(()),
        false => how(mapped),
    }
}

/// Resumes the device of a member, and then thaws its file system. Success if neither was suspended
/// or frozen.
fn release(shared: &Shared, at: usize) -> Result<(), Errno> {
    // FITHAW would wait for a device that is suspended.
    resume(shared, at, Mapped::resume)?;
    match &shared.members[at].root {
        Some(root) => match freeze::thaw(root.as_fd()) {
            Err(Errno::EINVAL) => Ok(()),
            thawed => thawed,
        },
        None => Ok(()),
    }
}

/// Whether the guard never froze the member, or has thawed it: a freeze that exists now is foreign.
fn is_foreign(shared: &Shared, at: usize) -> bool {
    let answers = shared.state().answers[at];
    let never = answers.frozen.is_some_and(|errno| errno != 0);
    // `early`, when set by the driver itself, follows from the guard's exit and so proves nothing.
    never || answers.by_guard
}

/// Resumes and thaws one member until the guard has exited and the kernel reports that the device is
/// not suspended and the file system is not frozen.
fn thaw_one(shared: &Shared, at: usize) -> bool {
    let member = &shared.members[at];
    for _ in 0..MAX_ATTEMPTS {
        if is_foreign(shared, at) {
            return true;
        }
        // Checked before the FITHAW, so that the FITHAW covers everything that was frozen before
        // the guard's exit.
        let final_word = has_guard_ended(shared);
        let thawed = release(shared, at).is_ok();
        if thawed {
            let mut state = shared.state();
            state.answers[at].thawed.get_or_insert((0, true));
            drop(state);
            shared.notify();
        }
        if thawed && final_word {
            return true;
        }
        thread::sleep(THAW_RETRY_INTERVAL);
    }
    tracing::error!(volume = %member.volume_id, device = %member.device.display(), "failed to thaw, the file system may still be frozen; the sweep retries");
    false
}

/// All threads have ended: removes the entry if nothing is frozen.
fn finish(shared: &Shared, thawed: bool) {
    let journal = shared.journal().take();
    match journal {
        Some(journal) if thawed => journal.remove_entry(),
        // The lock is released, and the sweep takes the entry over.
        Some(_) | None => {}
    }
    let mut state = shared.state();
    state.ended = true;
    drop(state);
    shared.notify();
}
