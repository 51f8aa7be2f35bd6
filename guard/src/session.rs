//! One freeze session in the guard: a thread that waits for the driver's messages and for the
//! deadline, and a thread for each file system, which alone syncs, freezes and thaws it.
//!
//! The code of this file follows these rules:
//! 1. All threads exist before the first FIFREEZE. From then until the last FITHAW nothing here
//!    allocates, logs, or accesses a file; threads wait and wake each other with futexes, and
//!    answers are sent without blocking. Grace periods are expedited only before that, and restored
//!    only after it.
//! 2. The thread that froze a file system thaws it: it remembers that its FIFREEZE succeeded, and
//!    only then calls FITHAW. So a foreign freeze (EBUSY) is never thawed.
//! 3. `over` is set once and never cleared: by the deadline, the end of the connection, a signal,
//!    or a failure of any member. From then on nothing is frozen any more; a thread whose FIFREEZE
//!    returns late sees it and thaws at once. A member that hangs does not delay any other member.
//! 4. The session ends when all its threads have ended. Until then the lock of the journal entry is
//!    held.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::load::Load;
use super::protocol::{Ask, MESSAGE, MOST_MEMBERS, Say, code};
use slackwater_core::fault;
use slackwater_core::host::linux::expedite::Expedite;
use slackwater_core::host::linux::freeze;
use slackwater_core::host::linux::seqpacket::Channel;
use slackwater_core::model::snapshot::MAX_FREEZE_TIMEOUT;

/// Threads here call only a few system calls; a larger stack would waste locked memory.
pub(super) const STACK: usize = 64 << 10;

/// A file system whose thaw fails stays frozen, and a later attempt may succeed; if none does, it
/// stays in the journal.
const THAW_TRIES: u32 = 20;
/// Time between two attempts.
const THAW_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Poll interval for the end of all threads; it grows by this amount each time.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// What a thread must do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Wait,
    Sync,
    Freeze,
    Thaw,
}

/// State that the threads of a session share.
struct Shared {
    channel: Channel,
    limit: Duration,
    /// Whether grace periods are expedited while something may be frozen.
    expedite: bool,
    /// When everything must be thawed; set before the first FIFREEZE.
    deadline: OnceLock<Instant>,
    over: AtomicBool,
    members: Vec<Member>,
}

struct Member {
    root: OwnedFd,
    order: Mutex<Order>,
    changed: Condvar,
}

impl Member {
    fn order(&self) -> MutexGuard<'_, Order> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    /// Sends a message without blocking: if the driver does not read, the deadline passes.
    fn say(&self, say: Say) {
        let _ = self.channel.send(&say.encode());
    }

    fn is_late(&self) -> bool {
        self.deadline
            .get()
            .is_some_and(|deadline| Instant::now() >= *deadline)
    }

    fn is_over(&self) -> bool {
        self.is_late() || self.over.load(Ordering::SeqCst)
    }

    /// Ends the session for all members; this is irreversible.
    fn stop(&self) {
        self.over.store(true, Ordering::SeqCst);
        for member in &self.members {
            // The lock is held so that no notification is lost between a thread's check of `over`
            // and its wait.
            let _order = member.order();
            member.changed.notify_one();
        }
    }

    fn command(&self, member: &Member, order: Order) {
        *member.order() = order;
        member.changed.notify_one();
    }

    /// The next order; `None` once the session is over and no order is left.
    fn next(&self, member: &Member) -> Option<Order> {
        let mut order = member.order();
        loop {
            if *order != Order::Wait {
                return Some(std::mem::replace(&mut *order, Order::Wait));
            }
            if self.over.load(Ordering::SeqCst) {
                return None;
            }
            order = member
                .changed
                .wait(order)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The main function of a member's thread.
fn attend(shared: &Shared, at: u32) {
    let Some(member) = shared.members.get(at as usize) else {
        return;
    };
    let mut frozen = false;
    while let Some(order) = shared.next(member) {
        match order {
            Order::Wait => {}
            Order::Sync => sync(shared, member, at),
            Order::Freeze => frozen = freeze(shared, member, at),
            Order::Thaw => {
                thaw(shared, member, at, frozen, false);
                frozen = false;
            }
        }
        // A member that failed ends the session for all; a member that returned late finds it
        // ended.
        if frozen && shared.is_over() {
            thaw(shared, member, at, frozen, true);
            frozen = false;
        }
    }
    if frozen {
        thaw(shared, member, at, frozen, true);
    }
}

fn sync(shared: &Shared, member: &Member, at: u32) {
    let errno = fault::around("guard", "sync", || code(freeze::sync(member.root.as_fd())));
    shared.say(Say::Synced(at, errno));
}

/// Returns whether the file system is now frozen by this session.
fn freeze(shared: &Shared, member: &Member, at: u32) -> bool {
    let errno = fault::around("guard", "freeze", || {
        match (shared.is_late(), shared.is_over()) {
            (true, _) => Errno::ETIMEDOUT as i32,
            // Another member has failed, and has reported that before.
            (false, true) => Errno::ECANCELED as i32,
            (false, false) => code(freeze::freeze(member.root.as_fd())),
        }
    });
    shared.say(Say::Frozen(at, errno));
    if errno != 0 {
        shared.stop();
    }
    errno == 0
}

/// Thaws the file system if this session froze it; afterwards it does not hold it frozen.
fn thaw(shared: &Shared, member: &Member, at: u32, frozen: bool, unasked: bool) {
    let early = unasked || !frozen || shared.is_over();
    let mut errno = 0;
    if frozen {
        fault::around("guard", "thaw", || {
            for _ in 0..THAW_TRIES {
                errno = code(freeze::thaw(member.root.as_fd()));
                if errno == 0 || errno == Errno::EINVAL as i32 {
                    break;
                }
                thread::sleep(THAW_RETRY_INTERVAL);
            }
        });
    }
    shared.say(Say::Thawed {
        member: at,
        errno,
        early,
    });
}

/// Serves one connection until it ends.
pub(super) fn serve(channel: Channel, stop: BorrowedFd<'_>, expedite: &Expedite, load: &Load) {
    fault::reach("guard", "accepted");
    // Only root and the guard's own user are served; the mode of the socket ensures the same.
    let own_user = nix::unistd::geteuid().as_raw();
    if !matches!(channel.peer(), Ok((_, user)) if user == 0 || user == own_user) {
        return;
    }
    let (shared, lock) = match receive(channel, stop) {
        Ok(begun) => begun,
        Err(None) => return,
        Err(Some((channel, errno))) => {
            let _ = channel.send(&Say::Ready(errno as i32).encode());
            return;
        }
    };
    let admitted = load.admit(&vec![None; shared.members.len()]);
    let Ok(_admitted) = admitted else {
        shared.say(Say::Ready(Errno::EAGAIN as i32));
        return;
    };
    let threads = match attendants(&shared) {
        Ok(threads) => threads,
        Err(errno) => {
            shared.say(Say::Ready(errno as i32));
            return;
        }
    };
    fault::reach("guard", "begun");
    shared.say(Say::Ready(0));
    let mut expedited = None;
    listen(&shared, &threads, stop, || {
        if shared.expedite {
            expedited = Some(expedite.begin());
            fault::reach("guard", "expedited");
        }
    });
    shared.stop();
    for thread in threads {
        // The thread cannot panic, and if it did, there would be nothing more to do.
        let _ = thread.join();
    }
    drop(expedited);
    fault::reach("guard", "ended");
    // The root descriptors are also closed before the driver is notified of the end, because it may
    // unmount then.
    let Ok(shared) = Arc::try_unwrap(shared) else {
        return;
    };
    drop(shared.members);
    drop(lock);
    let _ = shared.channel.send(&Say::Bye.encode());
}

/// Receives the first message.
#[expect(
    clippy::type_complexity,
    reason = "a refusal is returned through the channel on which the request arrived"
)]
fn receive(
    channel: Channel,
    stop: BorrowedFd<'_>,
) -> Result<(Arc<Shared>, File), Option<(Channel, Errno)>> {
    let mut bytes = [0; MESSAGE];
    let (members, limit, expedite, fds) = loop {
        match wait(&channel, stop, None) {
            (_, true) => return Err(None),
            (true, false) => {}
            // The call was interrupted.
            (false, false) => continue,
        }
        let fds = match channel.receive_with_fds(&mut bytes, MOST_MEMBERS + 1) {
            Ok(Some(fds)) => fds,
            Ok(None) => return Err(None),
            Err(errno) => return Err(Some((channel, errno))),
        };
        match Ask::decode(&bytes) {
            Some(Ask::Begin {
                members,
                freeze,
                expedite,
            }) => break (members, freeze, expedite, fds),
            // The driver only checks whether the guard is alive.
            Some(Ask::Ping) if fds.is_empty() => {
                let _ = channel.send(&Say::Pong.encode());
            }
            Some(_) | None => return Err(Some((channel, Errno::EPROTO))),
        }
    };
    let members = members as usize;
    if members == 0 || members > MOST_MEMBERS || fds.len() != members + 1 {
        return Err(Some((channel, Errno::E2BIG)));
    }
    let mut fds = fds;
    let Some(lock) = fds.pop() else {
        return Err(Some((channel, Errno::EPROTO)));
    };
    let members = fds.into_iter().map(|root| Member {
        root,
        order: Mutex::new(Order::Wait),
        changed: Condvar::new(),
    });
    let shared = Shared {
        channel,
        // The limit applies whatever the driver requests.
        limit: limit.min(MAX_FREEZE_TIMEOUT),
        expedite,
        deadline: OnceLock::new(),
        over: AtomicBool::new(false),
        members: members.collect(),
    };
    Ok((Arc::new(shared), File::from(lock)))
}

fn attendants(shared: &Arc<Shared>) -> Result<Vec<JoinHandle<()>>, Errno> {
    let mut threads = Vec::with_capacity(shared.members.len());
    for at in 0..shared.members.len() {
        let thread_shared = shared.clone();
        let at = at as u32;
        let thread = thread::Builder::new()
            .stack_size(STACK)
            .spawn(move || attend(&thread_shared, at));
        match thread {
            Ok(thread) => threads.push(thread),
            Err(_) => {
                shared.stop();
                return Err(Errno::EAGAIN);
            }
        }
    }
    Ok(threads)
}

/// Handles messages until the session has ended, the driver is gone, or the program must exit.
/// `before` is called once, before the first FIFREEZE.
fn listen(
    shared: &Shared,
    threads: &[JoinHandle<()>],
    stop: BorrowedFd<'_>,
    mut before: impl FnMut(),
) {
    let mut bytes = [0; MESSAGE];
    let mut looks = None;
    loop {
        let deadline = shared.deadline.get().copied();
        let pending = deadline.filter(|_| !shared.over.load(Ordering::SeqCst));
        // Once the session is to end, its threads have usually ended before the first poll.
        let look = looks.map(|looks: u32| after(EXIT_POLL_INTERVAL.saturating_mul(looks.min(20))));
        if look.is_some() && threads.iter().all(JoinHandle::is_finished) {
            return;
        }
        let (readable, stopped) = wait(&shared.channel, stop, pending.or(look));
        if stopped {
            return;
        }
        looks = looks.map(|looks| looks + 1);
        if pending.is_some_and(|deadline| Instant::now() >= deadline) {
            fault::reach("guard", "deadline");
            shared.stop();
        }
        if !readable {
            continue;
        }
        match shared.channel.receive(&mut bytes) {
            Ok(Some(())) => {}
            Err(Errno::EAGAIN | Errno::EINTR) => continue,
            // The driver has finished or is gone; a driver never sends an invalid message.
            Ok(None) | Err(_) => return,
        }
        match Ask::decode(&bytes) {
            Some(Ask::Sync) => command_all(shared, Order::Sync),
            Some(Ask::Freeze) => {
                // A second freeze would exceed the deadline in any case.
                if shared.deadline.set(after(shared.limit)).is_err() {
                    return;
                }
                before();
                command_all(shared, Order::Freeze);
            }
            Some(Ask::Thaw(member)) => match shared.members.get(member as usize) {
                // Its thread may have ended already, after thawing.
                Some(_) if shared.over.load(Ordering::SeqCst) => {}
                Some(member) => shared.command(member, Order::Thaw),
                None => return,
            },
            Some(Ask::Ping) => shared.say(Say::Pong),
            Some(Ask::End) => {
                shared.stop();
                looks = Some(0);
                thread::yield_now();
            }
            Some(Ask::Begin { .. }) | None => return,
        }
    }
}

fn after(limit: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(limit).unwrap_or(now)
}

fn command_all(shared: &Shared, order: Order) {
    for member in &shared.members {
        shared.command(member, order);
    }
}

/// Waits until the driver sends a message or disconnects, the program must exit, or `until` is
/// reached.
fn wait(channel: &Channel, stop: BorrowedFd<'_>, until: Option<Instant>) -> (bool, bool) {
    let timeout = match until {
        None => PollTimeout::NONE,
        Some(until) => {
            let left = until.saturating_duration_since(Instant::now());
            // If rounding makes a poll too short, it is repeated.
            PollTimeout::try_from(left.as_millis() + 1).unwrap_or(PollTimeout::MAX)
        }
    };
    let mut both = [
        PollFd::new(channel.as_fd(), PollFlags::POLLIN),
        PollFd::new(stop, PollFlags::POLLIN),
    ];
    if poll(&mut both, timeout).is_err() {
        return (false, false);
    }
    (both[0].any() == Some(true), both[1].any() == Some(true))
}
