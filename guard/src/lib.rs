//! The freeze guard: a separate process that freezes all file systems, and always thaws them, even
//! if the driver dies. The driver links this crate too, for its side of a session.
//!
//! | module | content |
//! |---|---|
//! | `command` | the command line of `slackwater-guard` |
//! | `program`, `session` | the guard process: a socket, a session per connection, a thread per
//! member |
//! | `client`, `shared`, `keeper` | the driver's side of a session, and what the driver does
//! without the guard |
//! | `journal`, `sweep` | freezes are recorded before they start, and thawed by the next process
//! after a crash |
//! | `load` | limits of what is held at a time |
//! | `protocol` | the messages between driver and guard |
//!
//! File systems are thawed whichever process dies: by the guard when the connection ends (the
//! driver died) and at the deadline; by the driver through its own descriptors when the guard dies,
//! or is a second late; and by the sweep, which runs at the start of either and every few seconds,
//! when both died.

mod client;
pub mod command;
mod journal;
mod keeper;
mod load;
pub mod program;
mod protocol;
mod session;
mod shared;
mod sweep;

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use client::Session;
use journal::{Entry, EntryMember, Journal, Own};
use load::{Admitted, Load};
pub use protocol::MOST_MEMBERS;
use protocol::{Ask, MESSAGE, Say};
use shared::Member;
use slackwater_core::error::HostError;
use slackwater_core::host::freezer::{FreezeLimits, GracePeriods, Journalled};
use slackwater_core::host::linux::freeze::{self, Process, Started};
use slackwater_core::host::linux::seqpacket::Channel;
use slackwater_core::host::{Freeze, FreezeMember, Freezer, Host, Result};
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
            Starter::Others => return self.find(until),
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
    fn find(&self, until: Instant) -> Result<(Channel, Option<Process>)> {
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
        let copies = members.iter().map(copy).collect::<Result<Vec<_>>>()?;
        let (channel, guard) = self.connect(until)?;
        let journal = self.write_down(members, limits)?;
        let (how, patience) = (self.grace_periods, START_TIMEOUT / 2);
        let held = (copies, admitted.clone());
        Session::begin(channel, guard, held, journal, limits, how, patience)
    }

    fn write_down(&self, members: &[FreezeMember], limits: FreezeLimits) -> Result<Own> {
        let now = self.host.now();
        let entry = Entry {
            boot: self.host.boot_id()?,
            owner: std::process::id(),
            since: now,
            until: now + (limits.sync + limits.freeze).as_secs() + 1,
            freezing: false,
            members: members.iter().map(EntryMember::of).collect(),
        };
        Journal::new(self.host.clone(), self.state_dir.clone()).begin(entry)
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

/// Whether a guard answers a ping.
fn answers(channel: &Channel) -> bool {
    if channel.send(&Ask::Ping.encode()).is_err() {
        return false;
    }
    let timeout = PollTimeout::try_from(PONG_TIMEOUT).unwrap_or(PollTimeout::MAX);
    let mut one = [PollFd::new(channel.as_fd(), PollFlags::POLLIN)];
    let answered = poll(&mut one, timeout).is_ok() && one[0].any() == Some(true);
    let mut bytes = [0; MESSAGE];
    // A guard of an older release refuses the ping, which shows that it is alive too. A guard with
    // another protocol version is of no use.
    answered && matches!(channel.receive(&mut bytes), Ok(Some(()))) && Say::decode(&bytes).is_some()
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
    fn ready(&self) -> Result<()> {
        if matches!(self.starter, Starter::Ourselves(_)) {
            return Ok(());
        }
        let socket = self.socket();
        match Channel::connect(&socket)? {
            Some(channel) if answers(&channel) => Ok(()),
            Some(_) | None => Err(HostError::unexpected("ask", &socket, NO_REPLY)),
        }
    }

    fn begin(&self, members: Vec<FreezeMember>, limits: FreezeLimits) -> Result<Box<dyn Freeze>> {
        let refused = |what: String| Err(HostError::unexpected("freeze", &self.state_dir, what));
        if members.is_empty() || members.len() > MOST_MEMBERS {
            return refused(format!(
                "a freeze of {} file systems was requested; between 1 and {MOST_MEMBERS} are possible",
                members.len()
            ));
        }
        if let Some(member) = twice(&members) {
            return refused(format!(
                "{} is listed twice; a file system can be frozen only once",
                member.root.device.path.display()
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
                    tracing::warn!(error = %slackwater_core::error::chain(&error), "looking for another freeze guard");
                    if error.code() == Some(Errno::EPROTO) {
                        thread::sleep(RESTART_DELAY);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn sweep(&self) -> Result<Vec<String>> {
        self.sweeper.sweep(false)
    }

    fn journalled(&self) -> Result<Vec<Journalled>> {
        self.sweeper.journalled()
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

/// Creates a member with its own copy of the descriptor.
fn copy(member: &FreezeMember) -> Result<Member> {
    let device = &member.root.device.path;
    let root = freeze::root_fd(&member.root)?.try_clone_to_owned();
    Ok(Member {
        volume_id: member.volume_id.clone(),
        device: device.clone(),
        root: root
            .map_err(|error| HostError::io("duplicate the file descriptor of", device, &error))?,
    })
}

/// Whether the guard exited between the connection and the transfer of the session.
fn is_gone(error: &HostError) -> bool {
    // EPROTO: a guard of a release with another protocol version, which exits with its last
    // session.
    let codes = [Errno::EPIPE, Errno::ECONNRESET, Errno::EPROTO];
    error.code().is_some_and(|code| codes.contains(&code)) || client::is_gone(error)
}

fn twice(members: &[FreezeMember]) -> Option<&FreezeMember> {
    let mut seen = std::collections::BTreeSet::new();
    members
        .iter()
        .find(|member| !seen.insert(member.root.device.rdev))
}
