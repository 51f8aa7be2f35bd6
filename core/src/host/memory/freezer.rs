//! The simulated machine's own guard: it continues to run when the driver's process dies, and
//! thaws.
//!
//! It suspends the mapped devices that the driver passes to it, after all file systems are frozen.
//!
//! Its steps are counted with the effects and fail by the same plan ("freeze_journal",
//! "freeze_sync", "freeze", "thaw", "freeze_written"). Time does not pass here: a deadline passes
//! when a test calls `pass_deadline`.

use std::any::Any;
use std::collections::BTreeMap;
use std::path::Path;
use std::thread::ThreadId;

use nix::errno::Errno;

use super::machine::{Machine, Opened, Opener, Process};
use super::mapped::number_of;
use super::{Closes, Keep, MemoryHost};
use crate::error::HostCause;
use crate::host::freezer::{FreezeLimits, JournaledFreeze};
use crate::host::{Device, Effect, Freeze, FreezeMember, Freezer, Host, MountRoot, Result};
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
    members: Vec<JournaledMember>,
    /// The error of data for which there was no space when the freeze wrote it back.
    unwritten: Option<Errno>,
}

#[derive(Clone, Debug)]
struct JournaledMember {
    volume_id: String,
    number: u32,
    /// It has a file system.
    has_root: bool,
    /// Its device is suspended, too.
    is_mapped: bool,
    /// Keys of what the guard holds open: the root directory, the mapped device.
    open: Vec<u64>,
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
                true => self.close_stdin(id),
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

    /// Closes the root directories and devices of a session.
    fn close_stdin(&mut self, id: u64) {
        if let Some(session) = self.guard.sessions.get(&id) {
            for key in session.members.iter().flat_map(|member| &member.open) {
                self.openers.remove(key);
            }
        }
    }

    /// Resumes and thaws a member of a session; returns whether the session had it suspended and
    /// frozen.
    fn thaw_member(&mut self, id: u64, member: &JournaledMember) -> bool {
        let number = member.number;
        let suspended = self.resume_of_session(number, id);
        let frozen = self.frozen.get(&number) == Some(&Froze::Session(id));
        if frozen {
            self.frozen.remove(&number);
        }
        (suspended || !member.is_mapped) && (frozen || !member.has_root)
    }

    /// Thaws all members of a session and removes it from the journal; returns the volumes that
    /// were frozen.
    fn close_session(&mut self, id: u64) -> Vec<String> {
        self.close_stdin(id);
        let Some(session) = self.guard.sessions.remove(&id) else {
            return Vec::new();
        };
        let thawed = session.members.into_iter();
        let thawed = thawed.filter(|member| self.thaw_member(id, member));
        thawed.map(|member| member.volume_id).collect()
    }

    /// Verifies a member. Returns the number of its device, and what the guard must open.
    fn admit(&self, member: &FreezeMember) -> std::result::Result<(u32, Vec<Opened>), HostCause> {
        let device = member.device().ok_or(Errno::EINVAL)?;
        let number = number_of(device).ok_or(Errno::ENOTBLK)?;
        if self.image_id_of(number)? != member.image {
            return Err(other_file_system());
        }
        let mut opened = Vec::new();
        if let Some(root) = &member.root {
            let fs = self.supers.get(&number).map(|found| found.fs);
            if number_of(&root.device) != Some(number) || fs != Some(root.fs) {
                return Err(other_file_system());
            }
            opened.push(self.opened(root.keep.as_ref())?);
        }
        if let Some(hold) = &member.mapped {
            self.check_resumed(number)?;
            opened.push(self.opened(hold.keep.as_ref())?);
        }
        Ok((number, opened))
    }

    /// What the driver holds open with a handle.
    fn opened(&self, keep: &(dyn Any + Send + Sync)) -> std::result::Result<Opened, Errno> {
        let opener = keep
            .downcast_ref()
            .and_then(|keep: &Keep| match keep.closes {
                Closes::Opener(key) => self.openers.get(&key),
                Closes::Pin(_) | Closes::Lock(..) => None,
            });
        Ok(opener.ok_or(Errno::EBADF)?.what.clone())
    }

    /// syncfs of all members; returns the first error after all have been tried.
    fn sync_session(&mut self, members: &[JournaledMember]) -> std::result::Result<(), Errno> {
        let mut all = Ok(());
        for member in members.iter().filter(|member| member.has_root) {
            all = all.and(self.write_back(member.number));
        }
        all
    }

    /// FIFREEZE of all members with a file system, and then the suspend of all mapped devices; or
    /// nothing. FIFREEZE also writes back, and does not report data for which there is no space.
    fn freeze_session(
        &mut self,
        id: u64,
        members: &[JournaledMember],
    ) -> std::result::Result<(), Errno> {
        let is_taken = |member: &JournaledMember| {
            let number = member.number;
            (member.has_root && self.frozen.contains_key(&number)) || self.is_suspended(number)
        };
        if members.iter().any(is_taken) {
            return Err(Errno::EBUSY);
        }
        for member in members.iter().filter(|member| member.has_root) {
            let unwritten = self.write_back(member.number).err();
            self.frozen.insert(member.number, Froze::Session(id));
            if let Some(session) = self.guard.sessions.get_mut(&id) {
                session.unwritten = session.unwritten.or(unwritten);
            }
        }
        for member in members.iter().filter(|member| member.is_mapped) {
            self.suspend(member.number, Some(id));
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
                | Effect::CreateThinSnapshot { .. }
        ) {
            return;
        }
        let thread = std::thread::current().id();
        let mine = |session: &Session| session.owner == process && session.thread == Some(thread);
        let ids = self.sessions_that(mine);
        let frozen = self.frozen.values();
        let open = frozen.filter(|froze| matches!(froze, Froze::Session(id) if ids.contains(id)));
        if open.count() > 0 || self.is_any_suspended_by(&ids) {
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
        self.remove_unreferenced();
    }
}

impl Freezer for MemoryHost {
    fn begin(&self, members: Vec<FreezeMember>, limits: FreezeLimits) -> Result<Box<dyn Freeze>> {
        let now = self.now();
        let act = |machine: &mut Machine| {
            let known = members.iter().map(|member| machine.admit(member));
            let known = known.collect::<std::result::Result<Vec<_>, HostCause>>()?;
            let mut held = Vec::new();
            for (member, (number, opened)) in members.iter().zip(known) {
                held.push(JournaledMember {
                    volume_id: member.volume_id.clone(),
                    number,
                    has_root: member.root.is_some(),
                    is_mapped: member.mapped.is_some(),
                    open: opened
                        .into_iter()
                        .map(|what| machine.open(None, what))
                        .collect(),
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
        Ok(Box::new(MemoryFreeze {
            host: self.clone(),
            session,
            _members: members,
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
            let known: Vec<u64> = machine.guard.sessions.keys().copied().collect();
            let lost = |froze: &Froze| match froze {
                Froze::Session(id) => !known.contains(id),
                Froze::Foreign => false,
            };
            if machine.frozen.values().any(lost) {
                machine.violation("frozen by us and in no journal".into());
            }
            if machine.is_any_suspended_by_others(&known) {
                machine.violation("suspended by us and in no journal".into());
            }
            Ok(())
        })?;
        Ok(thawed)
    }

    fn list_journaled(&self) -> Result<Vec<JournaledFreeze>> {
        self.look("read", Path::new(GUARD), |machine| {
            let all = machine.guard.sessions.values().flat_map(|session| {
                session.members.iter().map(|member| JournaledFreeze {
                    volume_id: member.volume_id.clone(),
                    device: machine.device(member.number).path,
                    owner: u32::try_from(session.owner).unwrap_or(u32::MAX),
                    since: session.since,
                    until: session.until,
                    freezing: session.thread.is_some(),
                    held: machine.is_alive(session.owner),
                    mapped: match member.is_mapped {
                        true => machine.uuid_of(member.number),
                        false => None,
                    },
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
    _members: Vec<FreezeMember>,
}

impl MemoryFreeze {
    /// The members of the session; an error once the guard has ended it.
    fn members(&self, machine: &Machine) -> std::result::Result<Vec<JournaledMember>, HostCause> {
        let session = machine.guard.sessions.get(&self.session);
        let session =
            session.ok_or_else(|| HostCause::Unexpected("the guard has ended it".into()))?;
        Ok(session.members.clone())
    }
}

impl Freeze for MemoryFreeze {
    fn sync(&self) -> Result<()> {
        self.host.step("freeze_sync", |machine| {
            let members = self.members(machine)?;
            Ok(machine.sync_session(&members)?)
        })
    }

    fn freeze(&self) -> Result<()> {
        let frozen = self.host.step("freeze", |machine| {
            let members = self.members(machine)?;
            Ok(machine.freeze_session(self.session, &members)?)
        });
        if frozen.is_err() {
            let mut machine = self.host.lock();
            if machine.is_alive(self.host.process) {
                for member in self.members(&machine).unwrap_or_default() {
                    machine.thaw_member(self.session, &member);
                }
            }
        }
        frozen
    }

    fn thaw(&self, member: usize) -> Result<bool> {
        self.host.step("thaw", |machine| {
            // A session that the guard has ended is already thawed.
            let Ok(members) = self.members(machine) else {
                return Ok(false);
            };
            let member = members.get(member).ok_or(Errno::EINVAL)?;
            Ok(machine.thaw_member(self.session, member))
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
            machine.remove_unreferenced();
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
            fs,
            keep: Box::new(self.keep(Closes::Opener(key))),
        })
    }
}

fn other_file_system() -> HostCause {
    HostCause::Unexpected("another file system is mounted there".into())
}
