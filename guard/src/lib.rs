//! The freeze guard: a separate process that freezes all file systems and suspends mapped devices,
//! and always resumes and thaws them, even if the driver dies. The driver links this crate too, for
//! its side of a session.
//!
//! | module | content |
//! |---|---|
//! | `command` | the command line of `slackwater-guard` |
//! | `program`, `session` | the guard process: a socket, a session per connection, a thread per member |
//! | `mapped` | a mapped device, as both sides use it |
//! | `client`, `shared`, `keeper` | the driver's side of a session, and what the driver does without the guard |
//! | `journal`, `sweep` | freezes are recorded before they start, and thawed by the next process after a crash |
//! | `load` | limits of what is held at a time |
//! | `protocol` | the messages between driver and guard |
//!
//! File systems are thawed whichever process dies: by the guard when the connection ends (the
//! driver died) and at the deadline; by the driver through its own descriptors when the guard dies,
//! or does not react for a second; and by the sweep, which runs at the start of either and every few seconds,
//! when both died.

mod client;
pub mod command;
mod journal;
mod keeper;
mod load;
mod mapped;
pub mod program;
mod protocol;
mod session;
mod shared;
mod sweep;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use client::Session;
use journal::{Entry, EntryMember, Journal, LockedEntry};
use load::{Admitted, Load};
use mapped::{Mapped, Mapper};
pub use protocol::{MAX_DESCRIPTORS, MAX_MEMBERS};
use protocol::{MESSAGE_BYTES, Reply, Request, Version};
use shared::Member;
use slackwater_core::error::HostError;
use slackwater_core::host::freezer::{FreezeLimits, GracePeriods, JournaledFreeze};
use slackwater_core::host::linux::freeze::{self, Process, Started};
use slackwater_core::host::linux::seqpacket::Channel;
use slackwater_core::host::{Device, Freeze, FreezeMember, Freezer, Host, Result};
use sweep::Sweeper;

/// Name of the program. It is installed next to the driver's.
pub const PROGRAM: &str = "slackwater-guard";
/// Name of the socket in the state directory.
const SOCKET: &str = "guard.sock";
/// How long a guard may take to start, and to take a session over, on a loaded machine.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// How often the driver tries to connect in this time.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// A guard that exits at once, because another one was still running, is started again after this
/// time.
const RESTART_DELAY: Duration = Duration::from_millis(200);
/// If a guard is alive but cannot be reached, another one is started after this time.
const SECOND_START_DELAY: Duration = Duration::from_secs(4);
/// How long a guard that others start may be unreachable, including a restart of its container.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a guard that others have started may take to answer a ping.
const PONG_TIMEOUT: Duration = Duration::from_secs(1);

/// Which process starts the guard.
enum Starter {
    /// The driver, when the guard is needed. Tests set the path of another program than the one
    /// next to the driver's.
    Ourselves(Option<PathBuf>),
    /// A supervisor; in a cluster, the guard is a container next to the driver's.
    Others,
}

/// The guard as the driver uses it: started when it is needed, and killed when it is late.
///
/// A guard that others have started may be out of reach, in another PID namespace. Then the driver
/// cannot kill it, and repeats thawing until the guard's connection has ended, or for a minute;
/// after that the sweeps take over.
pub struct GuardClient {
    host: Arc<dyn Host>,
    state_dir: PathBuf,
    starter: Starter,
    grace_periods: GracePeriods,
    mapper: Mapper,
    /// What this driver has passed to the guard.
    load: Load,
    /// The guards that this process has started.
    started: Mutex<Vec<Started>>,
    sweeper: Sweeper,
}

impl GuardClient {
    /// Creates a client with the directory of the socket and of the journal (`--state-dir`).
    /// [`GuardClient::private_folder`] must be configured in the host as a directory of the driver.
    pub fn new(host: Arc<dyn Host>, state_dir: PathBuf) -> GuardClient {
        GuardClient {
            sweeper: Sweeper::new(host.clone(), state_dir.clone()),
            host,
            state_dir,
            starter: Starter::Ourselves(None),
            grace_periods: GracePeriods::default(),
            mapper: Mapper::default(),
            load: Load::default(),
            started: Mutex::default(),
        }
    }

    /// Uses a guard that others start with the same `--state-dir`.
    #[must_use]
    pub fn started_by_others(mut self) -> GuardClient {
        self.starter = Starter::Others;
        self
    }

    /// Sets how FIFREEZE waits for grace periods.
    #[must_use]
    pub fn with_grace_periods(mut self, grace_periods: GracePeriods) -> GuardClient {
        self.grace_periods = grace_periods;
        self
    }

    /// Sets the path of the program, which differs in tests.
    #[must_use]
    pub fn with_program(mut self, program: PathBuf) -> GuardClient {
        self.starter = Starter::Ourselves(Some(program));
        self
    }

    /// The directory in which a file system that was unmounted while frozen is mounted, to be
    /// thawed.
    pub fn private_folder(state_dir: &Path) -> PathBuf {
        Sweeper::private_folder(state_dir)
    }

    /// Thaws everything in the journal, even if a process holds it: running cuts fail, and report
    /// the reason.
    pub fn thaw_all(&self) -> Result<Vec<String>> {
        self.sweeper.sweep(true)
    }

    /// Fails if this process would start the guard and its program is missing: without it no volume
    /// in use could be snapshotted.
    pub fn check_program(&self) -> Result<()> {
        match &self.starter {
            Starter::Ourselves(None) => program().map(drop),
            Starter::Ourselves(Some(_)) | Starter::Others => Ok(()),
        }
    }

    fn socket(&self) -> PathBuf {
        self.state_dir.join(SOCKET)
    }

    /// Connects to a live guard, and starts one if there is none.
    fn connect(&self, until: Instant) -> Result<(Channel, Option<Process>)> {
        let socket = self.socket();
        let program = match &self.starter {
            Starter::Ourselves(Some(program)) => program.clone(),
            Starter::Ourselves(None) => program()?,
            Starter::Others => return self.connect_to_running(until),
        };
        let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        let mut last_start = None;
        loop {
            if let Some(channel) = Channel::connect(&socket)?
                && let Some(guard) = prove(&channel)
            {
                return Ok((channel, guard));
            }
            let now = Instant::now();
            if now >= until {
                let what = "the freeze guard did not start; its own error message is on stderr";
                return Err(HostError::unexpected("freeze", &socket, what));
            }
            started.retain(|guard| !guard.has_ended());
            let pause = match started.is_empty() {
                true => RESTART_DELAY,
                false => SECOND_START_DELAY,
            };
            if last_start.is_none_or(|at: Instant| now.duration_since(at) >= pause) {
                started.push(freeze::start_guard(&program, &socket, &self.state_dir)?);
                last_start = Some(now);
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Connects to the guard that others have started.
    fn connect_to_running(&self, until: Instant) -> Result<(Channel, Option<Process>)> {
        let socket = self.socket();
        let until = until.min(Instant::now() + RECONNECT_TIMEOUT);
        loop {
            if let Some(channel) = Channel::connect(&socket)?
                && let Some(guard) = prove(&channel)
            {
                return Ok((channel, guard));
            }
            if Instant::now() >= until {
                return Err(HostError::unexpected("ask", &socket, NO_REPLY));
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Makes one attempt.
    fn hand_over(
        &self,
        members: &[FreezeMember],
        limits: FreezeLimits,
        until: Instant,
        admitted: &Arc<Admitted>,
    ) -> Result<Session> {
        let copies = members.iter().map(|member| self.copy(member));
        let copies = copies.collect::<Result<Vec<(Member, EntryMember)>>>()?;
        let (copies, entries): (Vec<_>, Vec<_>) = copies.into_iter().unzip();
        let (channel, guard) = self.connect(until)?;
        if client::version_of(&copies) == Version::Two {
            // No descriptor is passed to a guard that does not know what it is for.
            self.check_version(&channel)?;
        }
        let journal = self.create_entry(entries, limits)?;
        let (how, max_wait) = (self.grace_periods, START_TIMEOUT / 2);
        let held = (copies, admitted.clone());
        Session::begin(channel, guard, held, journal, limits, how, max_wait)
    }

    /// EPROTONOSUPPORT if the guard does not know mapped devices. A guard that does not answer is
    /// treated when the session begins.
    fn check_version(&self, channel: &Channel) -> Result<()> {
        match ping(channel, Version::Two) {
            Pong::Refused => Err(outdated()),
            Pong::Same | Pong::None => Ok(()),
        }
    }

    fn create_entry(&self, members: Vec<EntryMember>, limits: FreezeLimits) -> Result<LockedEntry> {
        let now = self.host.now();
        let entry = Entry {
            boot: self.host.boot_id()?,
            owner: std::process::id(),
            since: now,
            until: now + (limits.sync + limits.freeze).as_secs() + 1,
            freezing: false,
            members,
        };
        Journal::new(self.host.clone(), self.state_dir.clone()).begin(entry)
    }

    /// Creates a member with its own copies of the descriptors, and its entry of the journal.
    fn copy(&self, member: &FreezeMember) -> Result<(Member, EntryMember)> {
        let nothing = || HostError::unexpected("freeze", &member.volume_id, NOTHING);
        let device = member.device().ok_or_else(nothing)?;
        let copy = |fd: BorrowedFd<'_>| {
            let copy = fd.try_clone_to_owned();
            copy.map_err(|error| {
                HostError::io("duplicate the file descriptor of", &device.path, &error)
            })
        };
        let root = match &member.root {
            Some(root) if root.device.rdev != device.rdev => {
                let what = format!("its file system is on {}", root.device.path.display());
                return Err(HostError::unexpected("suspend", &device.path, what));
            }
            Some(root) => Some(copy(freeze::root_fd(root)?)?),
            None => None,
        };
        let mut uuid = None;
        let mut mapped = None;
        if let Some(hold) = &member.mapped {
            let opened = self.mapped(device, copy(freeze::device_fd(hold)?)?)?;
            uuid = Some(opened.1);
            mapped = Some(opened.0);
        }
        let entry = EntryMember::of(member, device, uuid);
        let member = Member {
            volume_id: member.volume_id.clone(),
            device: device.path.clone(),
            root,
            mapped,
        };
        Ok((member, entry))
    }

    /// A device that may be suspended, and its UUID.
    fn mapped(&self, device: &Device, open: OwnedFd) -> Result<(Mapped, String)> {
        let name = device.path.display();
        let refused = |errno| {
            let subject = match errno {
                Errno::EPERM => format!("{name}, which is not a mapped device of this driver"),
                Errno::EBUSY => format!(
                    "{name}, which another program has suspended or is about to give another table; see dmsetup info, and resume it"
                ),
                Errno::EOPNOTSUPP => format!("{name} without the device mapper of the kernel"),
                _ => name.to_string(),
            };
            HostError::errno("suspend", subject, errno)
        };
        let mapped = self
            .mapper
            .open()
            .and_then(|mapper| Mapped::new(mapper, open));
        let mapped = mapped.map_err(refused)?;
        if mapped.rdev() != device.rdev {
            let what = "the open device has another number";
            return Err(HostError::unexpected("suspend", &device.path, what));
        }
        let uuid = mapped.check().map_err(refused)?;
        Ok((mapped, uuid))
    }
}

/// The path of the guard's program: in the directory of this program, never from PATH.
pub fn program() -> Result<PathBuf> {
    let own = Path::new("/proc/self/exe");
    let running = std::fs::read_link(own).map_err(|error| HostError::io("read", own, &error))?;
    // The name may end with "(deleted)", but the directory does not.
    let program = running.with_file_name(PROGRAM);
    match program.is_file() {
        true => Ok(program),
        false => Err(HostError::unexpected(
            "find",
            &program,
            "the freeze guard's program is missing; install it into the same folder as slackwater, from the same release",
        )),
    }
}

const NO_REPLY: &str = "the freeze guard does not answer; check that its container is running and executes `slackwater guard` with the same --state-dir";

const NOTHING: &str = "it has neither a file system nor a mapped device";

/// The error of a guard that does not know mapped devices.
fn outdated() -> HostError {
    let guard = "the freeze guard, which is of an earlier release that cannot suspend devices; update the guard: install slackwater-guard of this release, or use one image for all containers";
    HostError::errno("hand mapped devices over to", guard, Errno::EPROTONOSUPPORT)
}

/// The answer of a guard to a ping.
enum Pong {
    /// It knows this version.
    Same,
    /// It is alive, and does not know this version.
    Refused,
    None,
}

fn ping(channel: &Channel, version: Version) -> Pong {
    if channel.send(&Request::Ping.encode(version)).is_err() {
        return Pong::None;
    }
    let timeout = PollTimeout::try_from(PONG_TIMEOUT).unwrap_or(PollTimeout::MAX);
    let mut one = [PollFd::new(channel.as_fd(), PollFlags::POLLIN)];
    let answered = poll(&mut one, timeout).is_ok() && one[0].any() == Some(true);
    let mut bytes = [0; MESSAGE_BYTES];
    if !answered || !matches!(channel.receive(&mut bytes), Ok(Some(()))) {
        return Pong::None;
    }
    match Reply::decode(&bytes) {
        // A guard of an older release refuses every ping, which shows that it is alive too.
        Some((answer, Reply::Pong | Reply::Ready(_))) if answer == version => Pong::Same,
        _ => Pong::Refused,
    }
}

/// The process at the other end, if it is visible in this PID namespace; `None` if it is gone.
///
/// The PID is that of the process that made the socket listen. The PID may have been reused since,
/// unless the guard is still alive; and the guard is alive if the connection still exists after its
/// process was opened.
fn prove(channel: &Channel) -> Option<Option<Process>> {
    let (pid, _) = channel.peer().ok()?;
    let process = Process::open(pid).ok();
    let mut one = [PollFd::new(channel.as_fd(), PollFlags::empty())];
    poll(&mut one, PollTimeout::ZERO).ok()?;
    (one[0].any() == Some(false)).then_some(process)
}

impl Freezer for GuardClient {
    fn ready(&self, mapped: bool) -> Result<()> {
        if matches!(self.starter, Starter::Ourselves(_)) {
            return Ok(());
        }
        let socket = self.socket();
        let version = if mapped { Version::Two } else { Version::One };
        let answer = match Channel::connect(&socket)? {
            Some(channel) => ping(&channel, version),
            None => Pong::None,
        };
        match answer {
            Pong::Same => Ok(()),
            Pong::Refused if mapped => Err(outdated()),
            Pong::Refused | Pong::None => Err(HostError::unexpected("ask", &socket, NO_REPLY)),
        }
    }

    fn begin(&self, members: Vec<FreezeMember>, limits: FreezeLimits) -> Result<Box<dyn Freeze>> {
        let refused = |what: String| Err(HostError::unexpected("freeze", &self.state_dir, what));
        if members.is_empty() || members.len() > MAX_MEMBERS {
            return refused(format!(
                "a freeze of {} file systems was requested; between 1 and {MAX_MEMBERS} are possible",
                members.len()
            ));
        }
        let descriptors: usize = members.iter().map(descriptors).sum();
        if descriptors > MAX_DESCRIPTORS {
            return refused(format!(
                "a freeze of {descriptors} file systems and devices was requested; at most {MAX_DESCRIPTORS} are possible"
            ));
        }
        if let Some(device) = twice(&members) {
            return refused(format!(
                "{} is listed twice; a file system can be frozen only once",
                device.path.display()
            ));
        }
        let namespaces: Vec<_> = members.iter().map(|one| one.namespace.clone()).collect();
        let admitted = self.load.admit(&namespaces);
        let full = |why| HostError::errno("hand the file systems over to", why, Errno::EAGAIN);
        let admitted = Arc::new(admitted.map_err(full)?);
        Journal::new(self.host.clone(), self.state_dir.clone()).make_folders()?;
        let until = Instant::now() + START_TIMEOUT;
        loop {
            match self.hand_over(&members, limits, until, &admitted) {
                Ok(session) => return Ok(Box::new(session)),
                // Nothing is frozen yet, so another guard can be used.
                Err(error) if is_gone(&error) && Instant::now() < until => {
                    tracing::warn!(error = %slackwater_core::error::chain(&error), "failed to hand file systems over to the freeze guard, will retry");
                    if error.code() == Some(Errno::EPROTO) {
                        thread::sleep(RESTART_DELAY);
                    }
                }
                // The guard of an earlier driver exits, and the one of this release is started.
                Err(error)
                    if error.code() == Some(Errno::EPROTONOSUPPORT)
                        && matches!(self.starter, Starter::Ourselves(_))
                        && Instant::now() < until =>
                {
                    thread::sleep(RESTART_DELAY);
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn sweep(&self) -> Result<Vec<String>> {
        self.sweeper.sweep(false)
    }

    fn list_journaled(&self) -> Result<Vec<JournaledFreeze>> {
        self.sweeper.list_journaled()
    }

    fn stop_guard(&self) {
        let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        started.iter_mut().for_each(Started::release);
        let until = Instant::now() + START_TIMEOUT;
        while !started.iter().all(Started::has_ended) && Instant::now() < until {
            thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Whether the guard exited between the connection and the transfer of the session.
fn is_gone(error: &HostError) -> bool {
    // EPROTO: a guard of a release without any version that this one knows, which exits with its
    // last session.
    let codes = [Errno::EPIPE, Errno::ECONNRESET, Errno::EPROTO];
    error.code().is_some_and(|code| codes.contains(&code)) || client::is_gone(error)
}

/// How many descriptors of a member are passed.
fn descriptors(member: &FreezeMember) -> usize {
    usize::from(member.root.is_some()) + usize::from(member.mapped.is_some())
}

fn twice(members: &[FreezeMember]) -> Option<&Device> {
    let mut seen = std::collections::BTreeSet::new();
    let mut devices = members.iter().filter_map(FreezeMember::device);
    devices.find(|device| !seen.insert(device.rdev))
}
