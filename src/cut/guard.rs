//! The guard: another process, which alone freezes, and thaws whatever becomes of us.
//!
//! | room | what |
//! |---|---|
//! | `program`, `session` | the process itself: a socket, a session a connection, a thread a member |
//! | `client`, `keeper` | a session from the driver's side, and what is done without the guard |
//! | `journal`, `sweep` | what may be frozen is written down before, and thawed by whoever comes next |
//! | `protocol` | what both ends say to each other |
//!
//! Who thaws, whatever dies: the guard at the end of the connection (the driver died) and at the
//! deadline; the driver through its own descriptors when the guard dies, or is a second late; the
//! sweep at the start of either, and every few seconds, when both died.

mod client;
mod fault;
mod journal;
mod keeper;
pub mod program;
mod protocol;
mod session;
mod sweep;

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::error::HostError;
use crate::host::freezer::{FreezeLimits, Journalled};
use crate::host::linux::freeze::{self, Process, Started};
use crate::host::linux::seqpacket::Channel;
use crate::host::{Freeze, FreezeMember, Freezer, Host, Result};
use client::{Member, Session};
use journal::{Entry, EntryMember, Journal, Own};
pub use protocol::MOST_MEMBERS;
use sweep::Sweeper;

/// Name of the socket in the state dir.
const SOCKET: &str = "guard.sock";
/// How long a guard may take to come up, and to take a session over, on a machine under load.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often it's looked for meanwhile.
const LOOK: Duration = Duration::from_millis(5);
/// A guard that ends at once, because another one was still there, is started again after this.
const START_AGAIN: Duration = Duration::from_millis(200);
/// And one that lives, and isn't found, gets company after this.
const START_ANOTHER: Duration = Duration::from_secs(4);

/// The guard, as the driver sees it: started when it's needed, and killed when it's late.
pub struct Guard {
    host: Arc<dyn Host>,
    state_dir: PathBuf,
    program: Option<PathBuf>,
    /// The guards that we have started.
    started: Mutex<Vec<Started>>,
    sweeper: Sweeper,
}

impl Guard {
    /// With the folder of its socket and of the journal (`--state-dir`). The host must know
    /// [`Guard::private_folder`] as one of its own.
    pub fn new(host: Arc<dyn Host>, state_dir: PathBuf) -> Guard {
        Guard {
            sweeper: Sweeper::new(host.clone(), state_dir.clone()),
            host,
            state_dir,
            program: None,
            started: Mutex::default(),
        }
    }

    /// With another program than this very one: tests are no guards.
    #[must_use]
    pub fn with_program(mut self, program: PathBuf) -> Guard {
        self.program = Some(program);
        self
    }

    /// Where a file system that was unmounted while frozen is mounted to be thawed.
    pub fn private_folder(state_dir: &Path) -> PathBuf {
        Sweeper::private_folder(state_dir)
    }

    /// Thaws everything that is journalled, whoever holds it: cuts that run are lost, and say so.
    pub fn thaw_all(&self) -> Result<Vec<String>> {
        self.sweeper.sweep(true)
    }

    /// A connection to a living guard, which is started if there is none.
    fn connect(&self, until: Instant) -> Result<(Channel, Option<Process>)> {
        let socket = self.state_dir.join(SOCKET);
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
                let what = "the freeze guard does not come up; its own message is on stderr";
                return Err(HostError::unexpected("freeze", &socket, what));
            }
            started.retain(|guard| !guard.has_ended());
            let pause = match started.is_empty() {
                true => START_AGAIN,
                false => START_ANOTHER,
            };
            if last_start.is_none_or(|at: Instant| now.duration_since(at) >= pause) {
                let program = self.program.as_deref();
                started.push(freeze::start_guard(program, &socket, &self.state_dir)?);
                last_start = Some(now);
            }
            thread::sleep(LOOK);
        }
    }

    /// One try.
    fn hand_over(
        &self,
        members: &[FreezeMember],
        limits: FreezeLimits,
        until: Instant,
    ) -> Result<Session> {
        let copies = members.iter().map(copy).collect::<Result<Vec<_>>>()?;
        let (channel, guard) = self.connect(until)?;
        let journal = self.write_down(members, limits)?;
        Session::begin(channel, guard, copies, journal, limits, PATIENCE / 2)
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

/// The process at the other end, if it can be seen from here; `None` if it's gone.
///
/// The number is that of who made the socket listen. It may have been given to another process
/// since, unless the guard still lives, and it does if the connection stands after its process
/// was opened.
fn prove(channel: &Channel) -> Option<Option<Process>> {
    let (pid, _) = channel.peer().ok()?;
    let process = Process::open(pid).ok();
    let mut one = [PollFd::new(channel.as_fd(), PollFlags::empty())];
    poll(&mut one, PollTimeout::ZERO).ok()?;
    (one[0].any() == Some(false)).then_some(process)
}

impl Freezer for Guard {
    fn begin(&self, members: Vec<FreezeMember>, limits: FreezeLimits) -> Result<Box<dyn Freeze>> {
        let refused = |what: String| Err(HostError::unexpected("freeze", &self.state_dir, what));
        if members.is_empty() || members.len() > MOST_MEMBERS {
            return refused(format!(
                "{} file systems at once; between 1 and {MOST_MEMBERS} are possible",
                members.len()
            ));
        }
        if let Some(member) = twice(&members) {
            return refused(format!(
                "{} is named twice; a file system is frozen once",
                member.root.device.path.display()
            ));
        }
        Journal::new(self.host.clone(), self.state_dir.clone()).make_folders()?;
        let until = Instant::now() + PATIENCE;
        loop {
            match self.hand_over(&members, limits, until) {
                Ok(session) => return Ok(Box::new(session)),
                // Nothing is frozen yet: another guard is as good.
                Err(error) if is_gone(&error) && Instant::now() < until => {
                    tracing::warn!(error = %crate::error::chain(&error), "another freeze guard is started");
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
}

/// With a descriptor of its own.
fn copy(member: &FreezeMember) -> Result<Member> {
    let device = &member.root.device.path;
    let root = freeze::root_fd(&member.root)?.try_clone_to_owned();
    Ok(Member {
        volume_id: member.volume_id.clone(),
        device: device.clone(),
        root: root.map_err(|error| HostError::io("copy the descriptor of", device, &error))?,
    })
}

/// The guard ended between connection and hand-over.
fn is_gone(error: &HostError) -> bool {
    matches!(error.code(), Some(Errno::EPIPE | Errno::ECONNRESET)) || client::says_gone(error)
}

fn twice(members: &[FreezeMember]) -> Option<&FreezeMember> {
    let mut seen = std::collections::BTreeSet::new();
    members
        .iter()
        .find(|member| !seen.insert(member.root.device.rdev))
}
