//! Resumes and thaws what is in the journal and no longer held by any process, and nothing else.
//!
//! A mapped device is found by its UUID, and must have its device number. It is resumed before the
//! file system on it is thawed, because FITHAW would wait for it.
//!
//! A file system is found by its device number in the mount table, and verified on its open root. A
//! file system that was unmounted while frozen has no mount any more, but keeps its loop device:
//! this device is then mounted once more, in a directory of the driver, which reaches the same
//! frozen superblock. A new loop device on the image would create a second superblock, and destroy
//! the data.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::stat::{major, minor};
use uuid::Uuid;

use super::journal::{Entries, EntryMember, Hold, Journal};
use super::mapped;
use slackwater_core::error::{HostError, chain};
use slackwater_core::host::freezer::JournaledFreeze;
use slackwater_core::host::linux::device_mapper::{DeviceMapper, Selector};
use slackwater_core::host::linux::expedite::Expedite;
use slackwater_core::host::linux::freeze;
use slackwater_core::host::{
    Device, DeviceHold, Effect, Host, Kept, Mount, MountRoot, MountSpec, Result,
};
use slackwater_core::model::FsType;

/// A FITHAW takes less than a millisecond, or hangs as long as a FIFREEZE does.
const THAW_TIMEOUT: Duration = Duration::from_secs(2);
/// How often a sweep tries to resume a device. If it stays suspended, it stays in the journal.
const RESUME_TRIES: u32 = 20;
/// Time between two attempts.
const RESUME_RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// How long after its deadline an entry is thawed although it is held, in seconds: driver and guard
/// are then both stopped.
const DEADLINE_GRACE_SECONDS: u64 = 1;
/// How long to wait for another sweep, which takes no longer than a few [`THAW_TIMEOUT`].
const SWEEP_LOCK_TIMEOUT: Duration = Duration::from_secs(20);
const SWEEP_LOCK_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Major number of loop devices.
const LOOP_MAJOR: u64 = 7;
/// Mount options of a hidden file system: neither programs nor devices are needed to thaw it.
const OPTIONS: [&str; 3] = ["nosuid", "nodev", "noexec"];

/// Sweeps one state directory.
#[derive(Clone)]
pub struct Sweeper {
    host: Arc<dyn Host>,
    state_dir: PathBuf,
    journal: Journal,
    /// Devices whose FITHAW hangs.
    hanging: Arc<Mutex<BTreeSet<u64>>>,
}

/// The result of resuming and thawing one member.
enum Thawed {
    /// It was suspended or frozen.
    Now,
    /// It was neither, or does not exist any more.
    NotFrozen,
}

impl Sweeper {
    /// Creates a sweeper of a state directory.
    pub fn new(host: Arc<dyn Host>, state_dir: PathBuf) -> Sweeper {
        Sweeper {
            journal: Journal::new(host.clone(), state_dir.clone()),
            host,
            state_dir,
            hanging: Arc::default(),
        }
    }

    /// The directory of private mounts, which must be configured in the host as a directory of the
    /// driver.
    pub fn private_folder(state_dir: &Path) -> PathBuf {
        state_dir.join("mnt")
    }

    /// The freezes that are in the journal now.
    pub fn list_journaled(&self) -> Result<Vec<JournaledFreeze>> {
        self.journal.list_journaled()
    }

    /// Resumes and thaws entries that no process holds, and those past their deadline; with `all`, every entry.
    /// Once the journal is empty, it also restores kernel settings that a crash during a freeze has
    /// left. Returns the IDs of the volumes that were frozen until now. An error is that of the
    /// first file system that could not be thawed, after all others were tried.
    pub fn sweep(&self, all: bool) -> Result<Vec<String>> {
        let freezes = self.state_dir.join("freezes");
        if self.host.stat(&freezes)?.is_none() {
            return Ok(Vec::new());
        }
        let _lock = self.acquire_lock()?;
        let boot = self.host.boot_id()?;
        let Entries {
            entries,
            unreadable,
        } = self.journal.entries()?;
        let mut errors: Vec<_> = unreadable.into_iter().map(|(_, error)| error).collect();
        let mut thawed = Vec::new();
        for (id, entry) in entries {
            match self.release_entry(id, entry.boot == boot, all) {
                Ok(volumes) => thawed.extend(volumes),
                Err(error) => errors.push(error),
            }
        }
        errors.extend(self.journal.remove_leftovers().err());
        errors.extend(self.leave_all_private_mounts().err());
        match self.journal.is_empty() {
            Ok(true) => Expedite::default().restore(),
            Ok(false) => {}
            Err(error) => errors.push(error),
        }
        let mut errors = errors.into_iter();
        let first = errors.next();
        for error in errors {
            tracing::error!(error = %chain(&error), "failed to thaw a journaled freeze");
        }
        match first {
            Some(error) => {
                if !thawed.is_empty() {
                    tracing::warn!(volumes = ?thawed, "thawed file systems after a crash");
                }
                Err(error)
            }
            None => Ok(thawed),
        }
    }

    /// Only one sweep runs at a time, in all processes.
    fn acquire_lock(&self) -> Result<Kept> {
        let path = self.state_dir.join("sweep.lock");
        let mut waited = Duration::ZERO;
        loop {
            if let Some(lock) = self.host.try_lock_file(&path)? {
                return Ok(lock);
            }
            if waited >= SWEEP_LOCK_TIMEOUT {
                let what = "another process has been sweeping for too long";
                return Err(HostError::unexpected("sweep", &self.state_dir, what));
            }
            thread::sleep(SWEEP_LOCK_POLL_INTERVAL);
            waited += SWEEP_LOCK_POLL_INTERVAL;
        }
    }

    fn release_entry(&self, id: Uuid, is_of_this_boot: bool, all: bool) -> Result<Vec<String>> {
        if !is_of_this_boot {
            // A reboot has thawed it.
            self.journal.remove(id)?;
            return Ok(Vec::new());
        }
        let hold = self.journal.take(id)?;
        let held = matches!(hold, Hold::Held);
        // Read with the lock: its session may have begun to freeze since the journal was listed.
        let Some(entry) = self.journal.entry(id)? else {
            return Ok(Vec::new());
        };
        if !entry.freezing {
            // What is frozen or suspended was frozen by another program.
            if !held {
                self.journal.remove(id)?;
            }
            return Ok(Vec::new());
        }
        let late = self.host.now() > entry.until.saturating_add(DEADLINE_GRACE_SECONDS);
        if held && !late && !all {
            return Ok(Vec::new());
        }
        let mut thawed = Vec::new();
        let mut problem = None;
        // All at once, because each may hang.
        let until = Instant::now() + THAW_TIMEOUT;
        let members = entry.members.iter();
        let releasing: Vec<_> = members.map(|member| self.begin_release(member)).collect();
        for (member, releasing) in entry.members.iter().zip(releasing) {
            match releasing.and_then(|releasing| await_release(member, &releasing, until)) {
                Ok(Thawed::Now) => thawed.push(member.volume_id.clone()),
                Ok(Thawed::NotFrozen) => {}
                Err(error) => {
                    tracing::error!(volume = %member.volume_id, error = %chain(&error), "failed to thaw a file system that the journal lists as frozen");
                    problem = Some(error);
                }
            }
        }
        match problem {
            Some(error) if thawed.is_empty() => return Err(error),
            // It stays in the journal, and is tried again.
            Some(_) => return Ok(thawed),
            None => {}
        }
        // The holder may still have a FIFREEZE that hangs and returns later.
        if !held {
            self.journal.remove(id)?;
        }
        Ok(thawed)
    }

    /// Resumes and thaws a member in a thread: it may hang, and the next sweep then checks it.
    fn begin_release(&self, member: &EntryMember) -> Result<Receiver<Result<Thawed>>> {
        if !self.mark_hanging(member.rdev) {
            return Err(hangs(member));
        }
        let (done, wait) = channel();
        let (sweeper, mine) = (self.clone(), member.clone());
        let spawned = thread::Builder::new().name("thaw".into()).spawn(move || {
            let released = sweeper.release(&mine);
            sweeper.clear_hanging(mine.rdev);
            let _ = done.send(released);
        });
        if let Err(error) = spawned {
            self.clear_hanging(member.rdev);
            return Err(HostError::io("thaw", &member.device, &error));
        }
        Ok(wait)
    }

    fn mark_hanging(&self, rdev: u64) -> bool {
        let mut hanging = self.hanging.lock().unwrap_or_else(PoisonError::into_inner);
        hanging.insert(rdev)
    }

    fn clear_hanging(&self, rdev: u64) {
        let mut hanging = self.hanging.lock().unwrap_or_else(PoisonError::into_inner);
        hanging.remove(&rdev);
    }

    /// Resumes the device of a member, and then thaws its file system.
    fn release(&self, member: &EntryMember) -> Result<Thawed> {
        let was_suspended = match &member.mapped {
            Some(uuid) => match resume(member, uuid)? {
                Resumed::Now => true,
                Resumed::NotSuspended => false,
                // A superblock, frozen or not, keeps its device.
                Resumed::Gone => return Ok(Thawed::NotFrozen),
            },
            None => false,
        };
        let thawed = match member.fs {
            Some(fs) => self.thaw(member, fs)?,
            None => Thawed::NotFrozen,
        };
        Ok(if was_suspended { Thawed::Now } else { thawed })
    }

    fn thaw(&self, member: &EntryMember, fs: FsType) -> Result<Thawed> {
        let device = &member.device();
        // While the device is held open, its number cannot be reused for another image.
        let _hold: Option<DeviceHold> = if major(member.rdev) == LOOP_MAJOR {
            match self
                .host
                .hold_loop(minor(member.rdev) as u32, member.image())?
            {
                Some(hold) => Some(hold.into()),
                // A superblock, frozen or not, keeps its loop device, so this one is gone.
                None => return Ok(Thawed::NotFrozen),
            }
        } else if let Some(uuid) = &member.mapped {
            let hold = self.host.hold_mapped(uuid)?;
            match hold.filter(|hold| hold.device.rdev == member.rdev) {
                Some(hold) => Some(hold),
                None => return Ok(Thawed::NotFrozen),
            }
        } else {
            None
        };
        if let Some(root) = self.find_root(member, device, fs)? {
            return thaw_root(&root);
        }
        if !self.host.is_claimed(device)? {
            return Ok(Thawed::NotFrozen);
        }
        self.thaw_hidden(device, fs)
    }

    fn find_root(
        &self,
        member: &EntryMember,
        device: &Device,
        fs: FsType,
    ) -> Result<Option<MountRoot>> {
        let is_its = |mount: &&Mount| {
            mount.fs_name == fs.name()
                && match fs {
                    FsType::Ext4 | FsType::Xfs => mount.device == member.rdev,
                    // Its device number is anonymous; the open root is verified later.
                    FsType::Btrfs => mount.source == member.device || shows(mount, member),
                }
        };
        let mounts = self.host.mounts()?;
        // A mount may be hidden below another one.
        Ok(mounts.iter().filter(is_its).find_map(|mount| {
            self.host
                .open_mount_root(&mount.mount_point, device, fs)
                .ok()
        }))
    }

    /// Mounts the same device once more, and thaws it there. A crash leaves that mount, which the
    /// next sweep finds and removes.
    fn thaw_hidden(&self, device: &Device, fs: FsType) -> Result<Thawed> {
        let folder = Sweeper::private_folder(&self.state_dir);
        let target = folder.join(self.host.random_uuid().to_string());
        self.host.perform(&Effect::MakeDir { path: &folder })?;
        self.host.perform(&Effect::MakeDir { path: &target })?;
        let options = OPTIONS.map(str::to_string);
        let mount = |read_only| {
            self.host.perform(&Effect::Mount(MountSpec {
                device,
                target: &target,
                fs,
                options: &options,
                read_only,
            }))
        };
        let thawed = match mount(false) {
            // A file system that was mounted read-only can only be mounted read-only again.
            Err(error) if matches!(error.code(), Some(Errno::EBUSY | Errno::EROFS)) => mount(true),
            other => other,
        }
        .and_then(|_| {
            let root = self.host.open_mount_root(&target, device, fs)?;
            thaw_root(&root)
        });
        self.leave_private_mounts(&[target])?;
        thawed
    }

    /// Removes the private mounts of an earlier crash.
    fn leave_all_private_mounts(&self) -> Result<()> {
        let folder = Sweeper::private_folder(&self.state_dir);
        let names = self.host.list_dir(&folder)?.unwrap_or_default();
        let paths: Vec<_> = names.iter().map(|name| folder.join(name)).collect();
        self.leave_private_mounts(&paths)
    }

    fn leave_private_mounts(&self, paths: &[PathBuf]) -> Result<()> {
        if paths.is_empty() {
            return Ok(());
        }
        let mounts = self.host.mounts()?;
        for path in paths {
            for mount in mounts.iter().filter(|mount| mount.mount_point == *path) {
                self.host.perform(&Effect::Unmount {
                    target: &mount.mount_point,
                })?;
            }
            self.host.perform(&Effect::RemoveDir { path })?;
        }
        Ok(())
    }
}

/// Whether the source of a mount is another path of a member's device.
fn shows(mount: &Mount, member: &EntryMember) -> bool {
    let source = mount.source.metadata();
    mount.source.starts_with("/dev") && source.is_ok_and(|found| found.rdev() == member.rdev)
}

/// The result of resuming a mapped device.
enum Resumed {
    /// It was suspended.
    Now,
    NotSuspended,
    /// It does not exist any more.
    Gone,
}

fn await_release(
    member: &EntryMember,
    releasing: &Receiver<Result<Thawed>>,
    until: Instant,
) -> Result<Thawed> {
    let left = until.saturating_duration_since(Instant::now());
    let released = releasing.recv_timeout(left);
    released.unwrap_or_else(|_| Err(hangs(member)))
}

fn hangs(member: &EntryMember) -> HostError {
    let what = "FITHAW hangs, usually because a FIFREEZE of the same file system still hangs; check whether the file system of the pool is frozen or its disk hangs";
    HostError::unexpected("thaw", &member.device, what)
}

/// Resumes the device that has this UUID and the number of a member.
fn resume(member: &EntryMember, uuid: &str) -> Result<Resumed> {
    let failed = |errno| HostError::errno("resume", &member.device, errno);
    let mut mapper = DeviceMapper::open()?;
    let device = Selector::Uuid(uuid);
    let info = mapper.info(device).map_err(failed)?;
    let Some(info) = info.filter(|info| info.rdev == member.rdev) else {
        return Ok(Resumed::Gone);
    };
    if !info.suspended {
        return Ok(Resumed::NotSuspended);
    }
    slackwater_core::fault::effect("sweep_resume", || {
        let resumed = (0..RESUME_TRIES).find_map(|tried| {
            thread::sleep(RESUME_RETRY_INTERVAL * tried.min(1));
            mapped::resume(&mut mapper, device).ok()
        });
        match resumed {
            Some(()) => Ok(Resumed::Now),
            None => Err(failed(Errno::EBUSY)),
        }
    })
}

fn thaw_root(root: &MountRoot) -> Result<Thawed> {
    slackwater_core::fault::effect("sweep_thaw", || {
        match freeze::thaw(freeze::root_fd(root)?) {
            Ok(()) => Ok(Thawed::Now),
            Err(Errno::EINVAL) => Ok(Thawed::NotFrozen),
            Err(errno) => Err(HostError::errno("thaw", &root.device.path, errno)),
        }
    })
}
