//! One freeze session in the guard: a thread that waits for the driver's messages and for the
//! deadline, and a thread for each member ([`member`]), which alone syncs, freezes and thaws its file
//! system, and suspends and resumes its mapped device.
//!
//! The code of these files follows these rules:
//! 1. All threads exist before the first FIFREEZE. From then until the last FITHAW nothing here
//!    allocates, logs, or opens a file; threads wait and wake each other with futexes, and answers
//!    are sent without blocking. Grace periods are expedited only before that, and restored only
//!    after it.
//! 2. The thread that froze a file system thaws it: it remembers that its FIFREEZE succeeded, and
//!    only then calls FITHAW. So a foreign freeze (EBUSY) is never thawed. The same is true of
//!    devices.
//! 3. No device is suspended before the last file system is frozen. A device is resumed before the
//!    file system on it is thawed, and FITHAW is not called while the device is suspended, because
//!    it would wait for the device.
//! 4. `over` is set once and never cleared: by the deadline, the end of the connection, a signal,
//!    or a failure of any member. From then on nothing is frozen or suspended any more; a thread
//!    whose FIFREEZE returns late sees it and thaws at once, and one that waits in a suspend is
//!    interrupted. A member that hangs does not delay any other member.
//! 5. The session ends when all its threads have ended. Until then the lock of the journal entry is
//!    held.

mod member;

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::load::Load;
use super::mapped::{Mapped, Mapper};
use super::protocol::{
    LONG_MESSAGE_BYTES, MAX_DESCRIPTORS, MAX_MEMBERS, MESSAGE_BYTES, Passed, Reply, Request,
    Version, decode_passed,
};
use member::{Member, Order, run_member};
use slackwater_core::fault;
use slackwater_core::host::linux::expedite::Expedite;
use slackwater_core::host::linux::freeze;
use slackwater_core::host::linux::seqpacket::Channel;
use slackwater_core::model::snapshot::MAX_FREEZE_TIMEOUT;

/// Threads here call only a few system calls; a larger stack would waste locked memory.
pub(super) const STACK_BYTES: usize = 64 << 10;

/// Poll interval for the end of all threads; it grows by this amount each time.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// How often a session with mapped devices looks for a suspend that must be interrupted, and how
/// often it is interrupted.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(10);

/// What all sessions of this process share.
#[derive(Default)]
pub(super) struct Common {
    pub(super) expedite: Expedite,
    pub(super) load: Load,
    pub(super) mapper: Mapper,
}

/// State that the threads of a session share.
struct Shared {
    channel: Channel,
    version: Version,
    limit: Duration,
    /// Whether grace periods are expedited while something may be frozen.
    expedite: bool,
    /// When everything must be thawed; set before the first FIFREEZE.
    deadline: OnceLock<Instant>,
    over: AtomicBool,
    /// How many members are not frozen yet. The devices are suspended when none is left.
    unfrozen: AtomicUsize,
    members: Vec<Member>,
}

impl Shared {
    /// Sends a message without blocking: if the driver does not read, the deadline passes.
    fn send_reply(&self, reply: Reply) {
        let _ = self.channel.send(&reply.encode(self.version));
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
            member.wake();
        }
    }

    fn command_all(&self, order: Order) {
        for member in &self.members {
            member.command(order);
        }
    }

    /// Interrupts the suspends that wait, once the session is over.
    fn interrupt(&self, threads: &[JoinHandle<()>]) {
        if !self.is_over() {
            return;
        }
        for (member, thread) in self.members.iter().zip(threads) {
            if member.is_suspending() {
                freeze::interrupt(thread);
            }
        }
    }

    fn has_mapped(&self) -> bool {
        self.members.iter().any(|member| member.mapped.is_some())
    }
}

/// Serves one connection until it ends.
pub(super) fn serve(channel: Channel, stop: BorrowedFd<'_>, common: &Common) {
    fault::reach("guard", "accepted");
    // Only root and the guard's own user are served; the mode of the socket ensures the same.
    let own_user = nix::unistd::geteuid().as_raw();
    if !matches!(channel.peer(), Ok((_, user)) if user == 0 || user == own_user) {
        return;
    }
    let Some(begun) = receive(&channel, stop) else {
        return;
    };
    let open = |begun: Begun| {
        let version = begun.version;
        let open = begun.open(&common.mapper);
        open.map_err(|errno| (version, errno))
    };
    let (shared, lock) = match begun.and_then(open) {
        Ok(open) => open.share(channel),
        Err((version, errno)) => {
            let _ = channel.send(&Reply::Ready(errno as i32).encode(version));
            return;
        }
    };
    let admitted = common.load.admit(&vec![None; shared.members.len()]);
    let Ok(_admitted) = admitted else {
        shared.send_reply(Reply::Ready(Errno::EAGAIN as i32));
        return;
    };
    let threads = match start_member_threads(&shared) {
        Ok(threads) => threads,
        Err(errno) => {
            shared.send_reply(Reply::Ready(errno as i32));
            return;
        }
    };
    fault::reach("guard", "begun");
    shared.send_reply(Reply::Ready(0));
    let mut expedited = None;
    listen(&shared, &threads, stop, || {
        if shared.expedite {
            expedited = Some(common.expedite.begin());
            fault::reach("guard", "expedited");
        }
    });
    shared.stop();
    while shared.members.iter().any(Member::is_suspending) {
        shared.interrupt(&threads);
        thread::sleep(EXIT_POLL_INTERVAL);
    }
    for thread in threads {
        // The thread cannot panic, and if it did, there would be nothing more to do.
        let _ = thread.join();
    }
    drop(expedited);
    fault::reach("guard", "ended");
    // The descriptors are also closed before the driver is notified of the end, because it may
    // unmount then.
    let Ok(shared) = Arc::try_unwrap(shared) else {
        return;
    };
    drop(shared.members);
    drop(lock);
    let _ = shared.channel.send(&Reply::Ended.encode(shared.version));
}

/// A refusal, and the version in which it is sent.
type Refused = (Version, Errno);

/// The first message.
struct Begun {
    version: Version,
    limit: Duration,
    expedite: bool,
    passed: Vec<Passed>,
    fds: Vec<OwnedFd>,
}

/// A session whose devices were verified.
struct Open {
    version: Version,
    limit: Duration,
    expedite: bool,
    members: Vec<Member>,
    lock: File,
}

/// Receives the first message; `None` if there is none.
fn receive(channel: &Channel, stop: BorrowedFd<'_>) -> Option<Result<Begun, Refused>> {
    let mut bytes = [0; LONG_MESSAGE_BYTES];
    loop {
        match wait(channel, stop, None) {
            (_, true) => return None,
            (true, false) => {}
            // The call was interrupted.
            (false, false) => continue,
        }
        let (length, fds) = match channel.receive_with_fds(&mut bytes, MAX_DESCRIPTORS + 1) {
            Ok(received) => received?,
            Err(errno) => return Some(Err((Version::One, errno))),
        };
        match (length, bytes.first_chunk().and_then(Request::decode)) {
            // The driver only checks whether the guard is alive, and knows this version.
            (MESSAGE_BYTES, Some((version, Request::Ping))) if fds.is_empty() => {
                let _ = channel.send(&Reply::Pong.encode(version));
            }
            (MESSAGE_BYTES | LONG_MESSAGE_BYTES, Some((version, request))) => {
                let begun = begun(version, request, &bytes, (length, fds));
                return Some(begun.map_err(|errno| (version, errno)));
            }
            _ => return Some(Err((Version::One, Errno::EPROTO))),
        }
    }
}

fn begun(
    version: Version,
    request: Request,
    bytes: &[u8; LONG_MESSAGE_BYTES],
    (length, fds): (usize, Vec<OwnedFd>),
) -> Result<Begun, Errno> {
    let Request::Begin {
        members,
        freeze,
        expedite,
    } = request
    else {
        return Err(Errno::EPROTO);
    };
    let members = members as usize;
    if members == 0 || members > MAX_MEMBERS {
        return Err(Errno::E2BIG);
    }
    let passed = match (version, length) {
        (Version::One, MESSAGE_BYTES) => vec![Passed::Root; members],
        (Version::Two, LONG_MESSAGE_BYTES) => decode_passed(bytes, members).ok_or(Errno::EPROTO)?,
        _ => return Err(Errno::EPROTO),
    };
    let descriptors: usize = passed.iter().map(|passed| passed.count()).sum();
    if fds.len() != descriptors + 1 {
        return Err(Errno::E2BIG);
    }
    Ok(Begun {
        version,
        // The limit applies whatever the driver requests.
        limit: freeze.min(MAX_FREEZE_TIMEOUT),
        expedite,
        passed,
        fds,
    })
}

impl Begun {
    /// Verifies the mapped devices: a device that the guard may not suspend ends the session before
    /// anything is frozen.
    fn open(self, mapper: &Mapper) -> Result<Open, Errno> {
        let mut fds = self.fds.into_iter();
        let mut next = || fds.next().ok_or(Errno::E2BIG);
        let mut members = Vec::with_capacity(self.passed.len());
        for passed in self.passed {
            let root = match passed {
                Passed::Root | Passed::Both => Some(next()?),
                Passed::Mapped => None,
            };
            let mapped = match passed {
                Passed::Root => None,
                Passed::Mapped | Passed::Both => {
                    let mapped = Mapped::new(mapper.open()?, next()?)?;
                    mapped.check()?;
                    Some(mapped)
                }
            };
            members.push(Member::new(root, mapped));
        }
        Ok(Open {
            version: self.version,
            limit: self.limit,
            expedite: self.expedite,
            members,
            lock: File::from(next()?),
        })
    }
}

impl Open {
    fn share(self, channel: Channel) -> (Arc<Shared>, File) {
        let shared = Shared {
            channel,
            version: self.version,
            limit: self.limit,
            expedite: self.expedite,
            deadline: OnceLock::new(),
            over: AtomicBool::new(false),
            unfrozen: AtomicUsize::new(self.members.len()),
            members: self.members,
        };
        (Arc::new(shared), self.lock)
    }
}

fn start_member_threads(shared: &Arc<Shared>) -> Result<Vec<JoinHandle<()>>, Errno> {
    let mut threads = Vec::with_capacity(shared.members.len());
    for at in 0..shared.members.len() {
        let thread_shared = shared.clone();
        let at = at as u32;
        let thread = thread::Builder::new()
            .stack_size(STACK_BYTES)
            .spawn(move || {
                fault::without_memory("guard", "member", || run_member(&thread_shared, at));
            });
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
    let mut bytes = [0; MESSAGE_BYTES];
    let mut looks = None;
    let has_mapped = shared.has_mapped();
    loop {
        let deadline = shared.deadline.get().copied();
        let pending = deadline.filter(|_| !shared.over.load(Ordering::SeqCst));
        let interrupt = deadline.filter(|_| has_mapped);
        let interrupt = interrupt.map(|_| after(INTERRUPT_INTERVAL));
        // Once the session is to end, its threads have usually ended before the first poll.
        let look = looks.map(|looks: u32| after(EXIT_POLL_INTERVAL.saturating_mul(looks.min(20))));
        if look.is_some() && threads.iter().all(JoinHandle::is_finished) {
            return;
        }
        let until = [pending.or(look), interrupt].into_iter().flatten().min();
        let (readable, stopped) = wait(&shared.channel, stop, until);
        if stopped {
            return;
        }
        shared.interrupt(threads);
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
        let request = Request::decode(&bytes).filter(|(version, _)| *version == shared.version);
        match request.map(|(_, request)| request) {
            Some(Request::Sync) => shared.command_all(Order::Sync),
            Some(Request::Freeze) => {
                // A second freeze would exceed the deadline in any case.
                if shared.deadline.set(after(shared.limit)).is_err() {
                    return;
                }
                before();
                shared.command_all(Order::Freeze);
            }
            Some(Request::Thaw(member)) => match shared.members.get(member as usize) {
                // Its thread may have ended already, after thawing.
                Some(_) if shared.over.load(Ordering::SeqCst) => {}
                Some(member) => member.command(Order::Thaw),
                None => return,
            },
            Some(Request::Ping) => shared.send_reply(Reply::Pong),
            Some(Request::End) => {
                shared.stop();
                looks = Some(0);
                thread::yield_now();
            }
            Some(Request::Begin { .. }) | None => return,
        }
    }
}

fn after(limit: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(limit).unwrap_or(now)
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
