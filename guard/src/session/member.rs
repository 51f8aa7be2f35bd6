//! One member of a session in the guard: the thread that alone acts on its file system and on its
//! mapped device. The rules of [`super`] apply.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use nix::errno::Errno;

use super::super::mapped::{Mapped, Suspended};
use super::super::protocol::{Reply, code};
use super::Shared;
use slackwater_core::fault;
use slackwater_core::host::linux::freeze;

/// A file system whose thaw fails stays frozen, and a later attempt may succeed; if none does, it
/// stays in the journal. The same is true of a device and its resume.
const THAW_TRIES: u32 = 20;
/// Time between two attempts.
const THAW_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// What a thread must do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Wait,
    Sync,
    Freeze,
    Suspend,
    Thaw,
}

pub(super) struct Member {
    root: Option<OwnedFd>,
    pub(super) mapped: Option<Mapped>,
    order: Mutex<Order>,
    changed: Condvar,
    /// Its thread is in the call that suspends the device, or about to be.
    suspending: AtomicBool,
}

/// What this session holds of a member.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    /// The file system; or nothing, if the member has none.
    is_frozen: bool,
    suspended: Option<Suspended>,
}

impl Member {
    pub(super) fn new(root: Option<OwnedFd>, mapped: Option<Mapped>) -> Member {
        Member {
            root,
            mapped,
            order: Mutex::new(Order::Wait),
            changed: Condvar::new(),
            suspending: AtomicBool::new(false),
        }
    }

    fn order(&self) -> MutexGuard<'_, Order> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn command(&self, order: Order) {
        *self.order() = order;
        self.changed.notify_one();
    }

    /// Lets its thread see that the session is over.
    pub(super) fn wake(&self) {
        // The lock is held so that no notification is lost between the thread's check and its wait.
        let _order = self.order();
        self.changed.notify_one();
    }

    pub(super) fn is_suspending(&self) -> bool {
        self.suspending.load(Ordering::SeqCst)
    }

    /// The next order; `None` once the session is over and no order is left.
    fn next(&self, shared: &Shared) -> Option<Order> {
        let mut order = self.order();
        loop {
            if *order != Order::Wait {
                return Some(std::mem::replace(&mut *order, Order::Wait));
            }
            if shared.over.load(Ordering::SeqCst) {
                return None;
            }
            order = self
                .changed
                .wait(order)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The main function of a member's thread.
pub(super) fn run_member(shared: &Shared, at: u32) {
    let Some(member) = shared.members.get(at as usize) else {
        return;
    };
    let mut held = Held::default();
    while let Some(order) = member.next(shared) {
        match order {
            Order::Wait => {}
            Order::Sync => sync(shared, member, at),
            Order::Freeze => held.is_frozen = freeze(shared, member, at),
            Order::Suspend => held.suspended = suspend(shared, member, at),
            Order::Thaw => thaw(shared, member, at, std::mem::take(&mut held), false),
        }
        // A member that failed ends the session for all; a member that returned late finds it
        // ended.
        if held.is_frozen && shared.is_over() {
            thaw(shared, member, at, std::mem::take(&mut held), true);
        }
    }
    if held.is_frozen {
        thaw(shared, member, at, held, true);
    }
}

fn sync(shared: &Shared, member: &Member, at: u32) {
    let errno = fault::around("guard", "sync", || match &member.root {
        Some(root) => code(freeze::sync(root.as_fd())),
        None => 0,
    });
    shared.send_reply(Reply::Synced(at, errno));
}

/// Why nothing may be frozen or suspended any more.
fn refusal(shared: &Shared) -> Result<(), Errno> {
    match (shared.is_late(), shared.is_over()) {
        (true, _) => Err(Errno::ETIMEDOUT),
        // Another member has failed, and has reported that before.
        (false, true) => Err(Errno::ECANCELED),
        (false, false) => Ok(()),
    }
}

/// Returns whether the file system is now frozen by this session. The last member that is frozen
/// lets all devices be suspended.
fn freeze(shared: &Shared, member: &Member, at: u32) -> bool {
    let errno = fault::around("guard", "freeze", || {
        code(refusal(shared).and_then(|()| match &member.root {
            Some(root) => freeze::freeze(root.as_fd()),
            None => Ok(()),
        }))
    });
    shared.send_reply(Reply::Frozen(at, errno));
    if errno != 0 {
        shared.stop();
    } else if shared.unfrozen.fetch_sub(1, Ordering::SeqCst) == 1 {
        let mapped = shared.members.iter().filter(|one| one.mapped.is_some());
        mapped.for_each(|one| one.command(Order::Suspend));
    }
    errno == 0
}

/// Returns the device as it is now suspended by this session.
fn suspend(shared: &Shared, member: &Member, at: u32) -> Option<Suspended> {
    let mapped = member.mapped.as_ref()?;
    let done = fault::around("guard", "suspend", || {
        member.suspending.store(true, Ordering::SeqCst);
        let done = loop {
            match refusal(shared).and_then(|()| mapped.suspend()) {
                // Another signal, such as SIGSTOP, or the one that ends the session.
                Err(Errno::EINTR) => {}
                done => break done,
            }
        };
        member.suspending.store(false, Ordering::SeqCst);
        done
    });
    shared.send_reply(Reply::Suspended(at, code(done.map(drop))));
    if done.is_err() {
        shared.stop();
    }
    done.ok()
}

/// Resumes the device and thaws the file system if this session suspended and froze them;
/// afterwards it holds neither.
fn thaw(shared: &Shared, member: &Member, at: u32, held: Held, unasked: bool) {
    let early = unasked || !held.is_frozen || shared.is_over();
    let mut errno = 0;
    if let (Some(mapped), Some(suspended)) = (&member.mapped, held.suspended) {
        errno = fault::around("guard", "resume", || resume(mapped, suspended));
    }
    let is_resumed = errno == 0 || errno == Errno::EINVAL as i32;
    if held.is_frozen && is_resumed && member.root.is_some() {
        let thawed = fault::around("guard", "thaw", || thaw_root(member));
        errno = if thawed == 0 { errno } else { thawed };
    }
    shared.send_reply(Reply::Thawed {
        member: at,
        errno,
        early,
    });
}

/// Repeats an action a few times until it succeeds.
fn repeat(act: impl Fn() -> Result<(), Errno>) -> i32 {
    let mut done = act();
    for _ in 1..THAW_TRIES {
        if matches!(done, Ok(()) | Err(Errno::EINVAL)) {
            break;
        }
        thread::sleep(THAW_RETRY_INTERVAL);
        done = act();
    }
    code(done)
}

/// EINVAL if another program had resumed it before; any other errno if it is still suspended.
fn resume(mapped: &Mapped, suspended: Suspended) -> i32 {
    let is_still = mapped.is_still(suspended);
    let done = repeat(|| mapped.resume().map_err(not_invalid));
    match (done, is_still) {
        (0, false) => Errno::EINVAL as i32,
        (done, _) => done,
    }
}

/// EINVAL if another program had thawed it before; any other errno if it may still be frozen.
fn thaw_root(member: &Member) -> i32 {
    repeat(|| {
        let (Some(root), mapped) = (&member.root, &member.mapped) else {
            return Ok(());
        };
        // FITHAW would wait for a device that another program has suspended.
        match mapped.as_ref().map_or(Ok(false), Mapped::is_suspended) {
            Ok(false) => freeze::thaw(root.as_fd()),
            Ok(true) => Err(Errno::EBUSY),
            Err(errno) => Err(not_invalid(errno)),
        }
    })
}

/// EINVAL has a meaning of its own.
fn not_invalid(errno: Errno) -> Errno {
    match errno {
        Errno::EINVAL => Errno::EIO,
        errno => errno,
    }
}
