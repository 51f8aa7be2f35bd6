//! Who keeps a session from the driver's side: reads the guard's answers, notices its end, ends it
//! when it's late, and thaws in its place.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::client::KILL_DELAY;
use super::journal::Own;
use super::protocol::{Ask, MESSAGE, Say, code};
use super::shared::{Answers, Shared};
use slackwater_core::host::linux::freeze;

/// How long our own FITHAWs are waited for before the session goes on without their answer.
const THAW_TIMEOUT: Duration = Duration::from_secs(1);
/// How often a FITHAW that failed, or came before the guard's end, is repeated.
const THAW_RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// Then the sweep goes on with what is journalled.
const TRIES: u32 = 300;

/// How listening ended.
enum Ending {
    /// In order: nothing is frozen any more.
    Bye,
    /// The connection ended before that.
    Dead,
    /// The guard is late.
    Late,
}

/// Serves a session until all of it is thawed.
pub(super) fn keep(shared: &Arc<Shared>) {
    match listen(shared) {
        Ending::Bye => finish(shared, all_thawed(shared)),
        Ending::Dead => {
            // The end of the connection is the end of all its threads, and of their FIFREEZEs.
            let thawed = thaw_all(shared, false);
            finish(shared, thawed);
        }
        Ending::Late => {
            // Nothing is logged before all is thawed: the log may lie on a frozen file system.
            let thawed = thaw_all(shared, true);
            tracing::warn!("stopped waiting for a freeze guard that missed its deadline");
            finish(shared, thawed);
        }
    }
}

fn listen(shared: &Shared) -> Ending {
    let mut bytes = [0; MESSAGE];
    loop {
        if is_late(shared) {
            return Ending::Late;
        }
        if !readable(shared) {
            continue;
        }
        match shared.channel.receive(&mut bytes) {
            Ok(Some(())) => match Say::decode(&bytes) {
                Some(Say::Bye) => return Ending::Bye,
                Some(say) => note(shared, say),
                // Another protocol: such a guard has refused the session, so nothing is frozen. It may
                // hold a freeze of another driver.
                None if shared.state().ready.is_none() => {
                    note(shared, Say::Ready(Errno::EPROTO as i32));
                    return Ending::Bye;
                }
                None => return Ending::Late,
            },
            Ok(None) => return Ending::Dead,
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(_) => return Ending::Late,
        }
    }
}

/// Whether the guard isn't to be waited for any more. One that has a FIFREEZE that hangs, and has
/// thawed everything else, must only show that it's there: it will thaw what comes out of it.
fn is_late(shared: &Shared) -> bool {
    let mut state = shared.state();
    let Some(late_at) = state.late_at else {
        return false;
    };
    let now = Instant::now();
    // Who doesn't thaw when it's asked to is stopped: there is nothing to wait for.
    let is_overdue = |answers: &Answers| {
        answers.thawed.is_none() && answers.thaw_by.is_some_and(|thaw_by| now >= thaw_by)
    };
    if state.answers.iter().any(is_overdue) {
        // Its answer may be there, unread, since it's us who were stopped.
        return !wait_for(shared.channel.as_fd(), Duration::ZERO);
    }
    // It's asked at the deadline, and must have answered when it's late.
    let is_asked = state.asked.is_some_and(|asked| asked == late_at);
    if now + KILL_DELAY < late_at || state.answers.iter().all(Answers::is_settled) {
        return false;
    }
    if !is_asked {
        state.alive = false;
        state.asked = Some(late_at);
        drop(state);
        // One that has ended in order has said so, which is read next.
        let _ = shared.channel.send(&Ask::Ping.encode());
        return false;
    }
    if now < late_at {
        return false;
    }
    let is_frozen = |answers: &Answers| answers.frozen.is_some() && !answers.is_settled();
    if state.answers.iter().any(is_frozen) || !state.alive {
        // Its answers may be there, unread, since it's us who were stopped.
        return !wait_for(shared.channel.as_fd(), Duration::ZERO);
    }
    state.late_at = Some(now + KILL_DELAY);
    false
}

/// Waits for a message, at most until the guard would be late, and never long: that moment may be
/// set meanwhile.
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

fn note(shared: &Shared, say: Say) {
    let mut state = shared.state();
    match say {
        Say::Ready(errno) => state.ready = Some(errno),
        Say::Synced(member, errno) => {
            if let Some(answers) = state.answers.get_mut(member as usize) {
                answers.synced = Some(errno);
            }
        }
        Say::Frozen(member, errno) => {
            if let Some(answers) = state.answers.get_mut(member as usize) {
                answers.frozen = Some(errno);
            }
            // What comes out of a FIFREEZE that was late is thawed in the next moment.
            let soon = Instant::now() + KILL_DELAY;
            state.late_at = state.late_at.map(|late_at| late_at.max(soon));
        }
        Say::Thawed {
            member,
            errno,
            early,
        } => {
            if let Some(answers) = state.answers.get_mut(member as usize) {
                answers.thawed.get_or_insert((errno, early));
                answers.by_guard = errno == 0 || errno == Errno::EINVAL as i32;
            }
        }
        Say::Pong => state.alive = true,
        Say::Bye => {}
    }
    drop(state);
    shared.tell();
}

/// Whether the guard's last FITHAWs left nothing frozen.
fn all_thawed(shared: &Shared) -> bool {
    let state = shared.state();
    state.answers.iter().all(|answers| match answers.thawed {
        Some((errno, _)) => errno == 0 || errno == Errno::EINVAL as i32,
        None => true,
    })
}

/// Ends the guard, unless another session relies on it. One of another pid namespace can't be ended.
fn kill(shared: &Shared) {
    if let Some(guard) = &shared.guard
        && !shared.others_rely_on_it()
    {
        let _ = guard.kill();
    }
}

/// Whether the guard can't freeze any more: then what FITHAW says is final.
fn guard_has_ended(shared: &Shared) -> bool {
    let mut bytes = [0; MESSAGE];
    loop {
        match shared.channel.receive(&mut bytes) {
            // What it had said before its end counts: whom it never froze, for one.
            Ok(Some(())) => {
                if let Some(say) = Say::decode(&bytes) {
                    note(shared, say);
                }
            }
            Ok(None) => return true,
            Err(_) => return false,
        }
    }
}

/// Thaws everything through the driver's own descriptors, each in a thread, since one may hang;
/// `is_late`: then the guard is ended. True if all is thawed for good.
fn thaw_all(shared: &Arc<Shared>, is_late: bool) -> bool {
    {
        let mut state = shared.state();
        state.lost = true;
        if state.late_at.is_none() {
            // It was never asked to freeze.
            drop(state);
            shared.tell();
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
            // The roots are closed before the session hears of it, and may be unmounted then.
            drop(shared);
            let _ = done.send(thawed);
        });
        match thawing {
            Ok(_) => waited_for += 1,
            Err(error) => tracing::error!(%error, "failed to start a thread for thawing"),
        }
    }
    drop(done);
    shared.tell();
    // First the writers go on; a FITHAW that hangs is waited for a little.
    shared.wait(Instant::now() + THAW_TIMEOUT, |state| {
        let thawed = |answers: &Answers| answers.thawed.is_some() || answers.is_settled();
        state.answers.iter().all(thawed).then_some(())
    });
    if is_late {
        // Other sessions need not spare the guard for this one.
        let journal = &mut *shared.journal();
        let _ = journal.as_mut().map_or(Ok(()), Own::expire);
    }
    collect(shared, &answers, waited_for, is_late)
}

/// Waits for the last answer: what the guard might still freeze is thawed until it has ended. One
/// that is late is ended as soon as no other session relies on it.
fn collect(shared: &Shared, answers: &Receiver<bool>, waited_for: usize, is_late: bool) -> bool {
    let mut thawed = 0;
    if is_late {
        kill(shared);
    }
    for _ in 0..waited_for {
        let answer = loop {
            match answers.recv_timeout(THAW_RETRY_INTERVAL) {
                Err(RecvTimeoutError::Timeout) if is_late => kill(shared),
                Err(RecvTimeoutError::Timeout) => {}
                answer => break answer,
            }
        };
        thawed += usize::from(answer == Ok(true));
    }
    thawed == shared.members.len()
}

/// Whether the guard never froze it, or thawed it: what is frozen now is a stranger's.
fn is_none_of_ours(shared: &Shared, at: usize) -> bool {
    let answers = shared.state().answers[at];
    let never = answers.frozen.is_some_and(|errno| errno != 0);
    // `early` by our own hands comes with the guard's end, or is no proof.
    never || answers.by_guard
}

/// Thaws one until the guard has ended and the kernel says that it isn't frozen.
fn thaw_one(shared: &Shared, at: usize) -> bool {
    let member = &shared.members[at];
    for _ in 0..TRIES {
        if is_none_of_ours(shared, at) {
            return true;
        }
        // Asked before the FITHAW: what was frozen before its end is met by it.
        let final_word = guard_has_ended(shared);
        let errno = code(freeze::thaw(member.root.as_fd()));
        let thawed = errno == 0 || errno == Errno::EINVAL as i32;
        if thawed {
            let mut state = shared.state();
            state.answers[at].thawed.get_or_insert((0, true));
            drop(state);
            shared.tell();
        }
        if thawed && final_word {
            return true;
        }
        thread::sleep(THAW_RETRY_INTERVAL);
    }
    tracing::error!(volume = %member.volume_id, device = %member.device.display(), "failed to thaw, the file system may still be frozen; the sweep retries");
    false
}

/// All threads are done: the entry goes if nothing is frozen.
fn finish(shared: &Shared, thawed: bool) {
    let journal = shared.journal().take();
    match journal {
        Some(journal) if thawed => journal.remove_entry(),
        // Its lock is given back, and the sweep takes it over.
        Some(_) | None => {}
    }
    let mut state = shared.state();
    state.ended = true;
    drop(state);
    shared.tell();
}
