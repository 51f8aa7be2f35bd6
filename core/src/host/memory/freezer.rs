//! The simulated machine's own guard: it continues to run when the driver's process dies, and
//! thaws.
//!
//! Its steps are counted with the effects and fail by the same plan ("freeze_journal",
//! "freeze_sync", "freeze", "thaw", "freeze_written"). Time does not pass here: a deadline passes
//! when a test calls `pass_deadline`.

use std::collections::BTreeMap;
use std::path::Path;
use std::thread::ThreadId;

use nix::errno::Errno;

use super::machine::{Machine, Opened, Opener, Process};
use super::thin::number_of;
use super::{Closes, Keep, MemoryHost};
use crate::error::HostCause;
use crate::host::freezer::{FreezeLimits, Journalled};
use crate::host::{
    Device, Effect, Freeze, FreezeMember, Freezer, Host, MountRoot, Result, ThinMessage,
};
use crate::model::FsType;

/// The token that a foreign process writes as soon as its thaw permits it.
pub const FOREIGN_TOKEN: u64 = u64::MAX - 1;

/// The subject of the guard's errors.
const GUARD: &str = "guard";

/// Which process froze a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Froze {
    /// A foreign process.
    Foreign,
    /// The driver's guard, for this session.
    Session(u64),
}

/// The guard and its journal, which survives processes but not a reboot.
#[derive(Debug, Default)]
pub(super) struct GuardState {
    pub(super) sessions: BTreeMap<u64, Session>,
    /// The guard dies together with the process that it serves.
    pub(super) dies: bool,
}

#[derive(Debug)]
pub(super) struct Session {
    owner: Process,
    /// The thread that froze, while anything is frozen.
    thread: Option<ThreadId>,
    since: u64,
    until: u64,
    members: Vec<JournalledMember>,
    /// The error of data for which there was no space when the freeze wrote it back.
    unwritten: Option<Errno>,
}

#[derive(Clone, Debug)]
struct JournalledMember {
    volume_id: String,
    number: u32,
    /// Key of the root directory that the guard holds open.
    root: u64,
}

impl Machine {
    /// Handles the death of a process: its guard notices it and thaws, unless the guard died as
    /// well.
    pub(super) fn orphan(&mut self, process: Process) {
        let owned = |session: &Session| session.owner == process;
        let ids: Vec<u64> = self.sessions_that(owned);
        for id in ids {
            match self.guard.dies {
                false => drop(self.close_session(id)),
                true => self.let_go(id),
            }
        }
    }

    fn sessions_that(&self, fits: impl Fn(&Session) -> bool) -> Vec<u64> {
        let found = self
            .guard
            .sessions
            .iter()
            .filter(|(_, session)| fits(session));
        found.map(|(id, _)| *id).collect()
    }

    /// Closes the root directories of a session.
    fn let_go(&mut self, id: u64) {
        if let Some(session) = self.guard.sessions.get(&id) {
            for member in &session.members {
                self.openers.remove(&member.root);
            }
        }
    }

    /// Thaws a member of a session; returns whether the session had it frozen.
    fn thaw_member(&mut self, id: u64, number: u32) -> bool {
        self.resume_of_session(number, id);
        let ours = self.frozen.get(&number) == Some(&Froze::Session(id));
        if ours {
            self.frozen.remove(&number);
        }
        ours
    }

    /// Thaws all members of a session and removes it from the journal; returns the volumes that
    /// were frozen.
    fn close_session(&mut self, id: u64) -> Vec<String> {
        self.let_go(id);
        let Some(session) = self.guard.sessions.remove(&id) else {
            return Vec::new();
        };
        let thawed = session.members.into_iter();
        let thawed = thawed.filter(|member| self.thaw_member(id, member.number));
        thawed.map(|member| member.volume_id).collect()
    }

    /// syncfs of all members; returns the first error after all have been tried.
    fn sync_session(&mut self, numbers: &[u32]) -> std::result::Result<(), Errno> {
        let mut all = Ok(());
        for number in numbers {
            all = all.and(self.write_back(*number));
        }
        all
    }

    /// FIFREEZE of all members, or of none; mapped devices are then suspended as well. It also writes back, and does not report data for which
    /// there is no space.
    fn freeze_session(&mut self, id: u64, numbers: &[u32]) -> std::result::Result<(), Errno> {
        if numbers
            .iter()
            .any(|number| self.frozen.contains_key(number))
        {
            return Err(Errno::EBUSY);
        }
        for number in numbers {
            let unwritten = self.write_back(*number).err();
            self.frozen.insert(*number, Froze::Session(id));
            self.suspend(*number, Some(id));
            if let Some(session) = self.guard.sessions.get_mut(&id) {
                session.unwritten = session.unwritten.or(unwritten);
            }
        }
        if let Some(session) = self.guard.sessions.get_mut(&id) {
            session.thread = Some(std::thread::current().id());
        }
        Ok(())
    }

    /// Records a violation if a thread that has frozen something performs any effect other than
    /// those of a cut before it has thawed.
    pub(super) fn watch_window(&mut self, process: Process, effect: &Effect<'_>) {
        if matches!(
            effect,
            Effect::CloneWhole { .. }
                | Effect::ClonePreFreeze { .. }
                | Effect::CloneDelta { .. }
                | Effect::ThinMessage {
                    message: ThinMessage::CreateSnap { .. },
                    ..
                }
        ) {
            return;
        }
        let thread = std::thread::current().id();
        let mine = |session: &Session| session.owner == process && session.thread == Some(thread);
        let ids = self.sessions_that(mine);
        let frozen = self.frozen.values();
        let open = frozen.filter(|froze| matches!(froze, Froze::Session(id) if ids.contains(id)));
        if open.count() > 0 {
            self.violation(format!("{} between freeze and thaw", effect.name()));
        }
    }

    /// A foreign process thaws everything that is frozen, and every waiting writer writes.
    pub(super) fn thaw_by_foreign_process(&mut self) {
        for number in std::mem::take(&mut self.frozen).into_keys() {
            if let Some(found) = self
                .supers
                .get_mut(&number)
                .filter(|found| !found.read_only)
            {
                found.dirty.push(FOREIGN_TOKEN);
            }
            // As with any other write, the data is lost if there is no space.
            let _ = self.write_back(number);
        }
        self.settle();
    }
}

impl Freezer for MemoryHost {
    fn begin(&self, members: Vec<FreezeMember>, limits: FreezeLimits) -> Result<Box<dyn Freeze>> {
        let now = self.now();
        let act = |machine: &mut Machine| {
            let mut known = Vec::new();
            for member in &members {
                let number = number_of(&member.root.device).ok_or(Errno::ENOTBLK)?;
                let keep: Option<&Keep> = member.root.keep.downcast_ref();
                let opener = keep.and_then(|keep| match keep.closes {
                    Closes::Opener(key) => machine.openers.get(&key),
                    Closes::Pin(_) | Closes::Lock(..) => None,
                });
                let what = opener.ok_or(Errno::EBADF)?.what.clone();
                let image = machine.dev(number)?.backing.id();
                let fs = machine.supers.get(&number).map(|found| found.fs);
                if fs != Some(member.fs) || image != member.image {
                    return Err(other_file_system());
                }
                known.push((member.volume_id.clone(), number, what));
            }
            let mut held = Vec::new();
            for (volume_id, number, what) in known {
                let root = machine.fresh();
                machine.openers.insert(
                    root,
                    Opener {
                        process: None,
                        what,
                    },
                );
                held.push(JournalledMember {
                    volume_id,
                    number,
                    root,
                });
            }
            let id = machine.fresh();
            let session = Session {
                owner: self.process,
                thread: None,
                since: now,
                until: now + limits.freeze.as_secs(),
                members: held,
                unwritten: None,
            };
            machine.guard.sessions.insert(id, session);
            Ok(id)
        };
        // The caller never received a session that was refused, so the guard ends it.
        let ended = |machine: &mut Machine, id: &u64| drop(machine.close_session(*id));
        let session = self.counted("freeze_journal", Path::new(GUARD), |_| {}, act, ended)?;
        let _roots = members.into_iter().map(|member| member.root).collect();
        let host = self.clone();
        Ok(Box::new(MemoryFreeze {
            host,
            session,
            _roots,
        }))
    }

    fn sweep(&self) -> Result<Vec<String>> {
        let left = self.look("read", Path::new(GUARD), |machine| {
            let alive: Vec<Process> = machine.processes();
            Ok(machine.sessions_that(|session| !alive.contains(&session.owner)))
        })?;
        let mut thawed = Vec::new();
        for session in left {
            thawed.extend(self.step("thaw", |machine| Ok(machine.close_session(session)))?);
        }
        self.with("examine", Path::new(GUARD), |machine| {
            let sessions = &machine.guard.sessions;
            let lost = |froze: &Froze| match froze {
                Froze::Session(id) => !sessions.contains_key(id),
                Froze::Foreign => false,
            };
            if machine.frozen.values().any(lost) {
                machine.violation("frozen by us and in no journal".into());
            }
            Ok(())
        })?;
        Ok(thawed)
    }

    fn journalled(&self) -> Result<Vec<Journalled>> {
        self.look("read", Path::new(GUARD), |machine| {
            let all = machine.guard.sessions.values().flat_map(|session| {
                session.members.iter().map(|member| Journalled {
                    volume_id: member.volume_id.clone(),
                    device: machine.device(member.number).path,
                    owner: u32::try_from(session.owner).unwrap_or(u32::MAX),
                    since: session.since,
                    until: session.until,
                    held: machine.is_alive(session.owner),
                })
            });
            Ok(all.collect())
        })
    }
}

/// File systems that the guard holds for a cut.
struct MemoryFreeze {
    host: MemoryHost,
    session: u64,
    _roots: Vec<MountRoot>,
}

impl MemoryFreeze {
    /// The loop devices of the session; an error once the guard has ended it.
    fn numbers(&self, machine: &Machine) -> std::result::Result<Vec<u32>, HostCause> {
        let session = machine.guard.sessions.get(&self.session);
        let session =
            session.ok_or_else(|| HostCause::Unexpected("the guard has ended it".into()))?;
        Ok(session.members.iter().map(|member| member.number).collect())
    }
}

impl Freeze for MemoryFreeze {
    fn sync(&self) -> Result<()> {
        self.host.step("freeze_sync", |machine| {
            let numbers = self.numbers(machine)?;
            Ok(machine.sync_session(&numbers)?)
        })
    }

    fn freeze(&self) -> Result<()> {
        let frozen = self.host.step("freeze", |machine| {
            let numbers = self.numbers(machine)?;
            Ok(machine.freeze_session(self.session, &numbers)?)
        });
        if frozen.is_err() {
            let mut machine = self.host.lock();
            if machine.is_alive(self.host.process) {
                for number in self.numbers(&machine).unwrap_or_default() {
                    machine.thaw_member(self.session, number);
                }
            }
        }
        frozen
    }

    fn thaw(&self, member: usize) -> Result<bool> {
        self.host.step("thaw", |machine| {
            // A session that the guard has ended is already thawed.
            let Ok(numbers) = self.numbers(machine) else {
                return Ok(false);
            };
            let number = *numbers.get(member).ok_or(Errno::EINVAL)?;
            Ok(machine.thaw_member(self.session, number))
        })
    }

    fn written(&self) -> Result<()> {
        self.host.step("freeze_written", |machine| {
            let session = machine.guard.sessions.get(&self.session);
            match session.and_then(|session| session.unwritten) {
                Some(errno) => Err(errno.into()),
                None => Ok(()),
            }
        })
    }

    fn give_up(&self) {
        let mut machine = self.host.lock();
        if machine.is_alive(self.host.process) {
            machine.close_session(self.session);
            machine.settle();
        }
    }
}

impl Drop for MemoryFreeze {
    fn drop(&mut self) {
        self.give_up();
    }
}

impl MemoryHost {
    /// One step of the guard, counted as an effect.
    fn step<T>(
        &self,
        name: &'static str,
        act: impl FnOnce(&mut Machine) -> std::result::Result<T, HostCause>,
    ) -> Result<T> {
        self.counted(name, Path::new(GUARD), |_| {}, act, |_, _| {})
    }

    pub(super) fn open_root(
        &self,
        mount_point: &Path,
        device: &Device,
        fs: FsType,
    ) -> Result<MountRoot> {
        let key = self.look("open", mount_point, |machine| {
            let mounted = machine.top(mount_point).ok_or(Errno::ENOENT)?;
            let number = mounted.shown.fs().ok_or(Errno::ENOTDIR)?;
            let what = Opened::OnMount(mounted.line.id);
            let found = machine.supers.get(&number).map(|found| found.fs);
            if machine.device(number) != *device || found != Some(fs) {
                return Err(other_file_system());
            }
            let key = machine.fresh();
            let process = Some(self.process);
            machine.openers.insert(key, Opener { process, what });
            Ok(key)
        })?;
        Ok(MountRoot {
            device: device.clone(),
            keep: Box::new(self.keep(Closes::Opener(key))),
        })
    }
}

fn other_file_system() -> HostCause {
    HostCause::Unexpected("another file system is mounted there".into())
}
