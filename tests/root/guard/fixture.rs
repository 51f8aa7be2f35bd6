//! The fixture of the guard's tests: volumes, a guard of its own, and checks of frozen file
//! systems.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use slackwater::cut::guard::GuardClient;
use slackwater::host::freezer::FreezeLimits;
use slackwater::host::linux::{LinuxHost, freeze};
use slackwater::host::{Freeze, FreezeMember, Freezer, Host};
use slackwater::model::FsType;
use slackwater::model::size::MIB;
pub use slackwater_testkit::WAIT_TIMEOUT;
use slackwater_testkit::eventually;

use crate::host_linux::scratch::{Scratch, Volume, text};

/// A pool with mounted volumes, and a state directory.
pub struct Fixture {
    pub state: PathBuf,
    pub guard: GuardClient,
    pub volumes: Vec<Volume>,
    // Dropped after the volumes on it.
    pub pool: Scratch,
}

pub fn limits(freeze: Duration) -> FreezeLimits {
    FreezeLimits {
        sync: Duration::from_secs(30),
        freeze,
    }
}

/// A limit that no test reaches by itself: the maximum that the guard accepts.
pub fn long() -> FreezeLimits {
    limits(slackwater::model::snapshot::MAX_FREEZE_TIMEOUT)
}

/// A limit that is reached soon after the file systems are frozen: the shortest of these for which
/// `frozen` finds that they are.
pub fn short<T>(mut frozen: impl FnMut(FreezeLimits) -> Option<T>) -> T {
    let mut each = [1, 5, 25].into_iter();
    let found = each.find_map(|seconds| frozen(limits(Duration::from_secs(seconds))));
    found.expect("a freeze takes less than 25 s")
}

pub fn size_of(fs: FsType) -> u64 {
    match fs {
        FsType::Ext4 => 64 * MIB,
        FsType::Xfs => 320 * MIB,
        FsType::Btrfs => 128 * MIB,
    }
}

/// A guard of a state directory, in this process.
pub fn guard_of(state: &Path) -> GuardClient {
    let host = LinuxHost::new(Vec::new()).with_own_folder(GuardClient::private_folder(state));
    GuardClient::new(Arc::new(host), state.to_path_buf())
        .with_program(env!("CARGO_BIN_EXE_slackwater-guard").into())
}

impl Fixture {
    pub fn new(kinds: &[FsType]) -> Fixture {
        let pool = Scratch::sized(FsType::Xfs, 2048 * MIB);
        let state = pool.root.join("state");
        let volumes = kinds
            .iter()
            .enumerate()
            .map(|(at, fs)| pool.volume(&format!("v{at}"), *fs, size_of(*fs)))
            .collect();
        Fixture {
            guard: guard_of(&state),
            state,
            volumes,
            pool,
        }
    }

    pub fn members(&self, kinds: &[FsType]) -> Vec<FreezeMember> {
        assert_eq!(kinds.len(), self.volumes.len());
        self.volumes
            .iter()
            .zip(kinds)
            .enumerate()
            .map(|(at, (volume, fs))| member(&self.pool, &format!("v{at}"), volume, *fs))
            .collect()
    }

    pub fn begin(&self, kinds: &[FsType], limits: FreezeLimits) -> Box<dyn Freeze> {
        self.guard.begin(self.members(kinds), limits).unwrap()
    }

    /// All steps up to a frozen session.
    pub fn frozen(&self, kinds: &[FsType], limits: FreezeLimits) -> Box<dyn Freeze> {
        let session = self.begin(kinds, limits);
        session.sync().unwrap();
        session.freeze().unwrap();
        session
    }

    /// Starts a write to each volume.
    pub fn writers(&self) -> Vec<ProbeWrite> {
        let volumes = self.volumes.iter();
        volumes
            .map(|volume| ProbeWrite::start(&volume.target))
            .collect()
    }

    /// Whether the journal is empty.
    pub fn journal_is_empty(&self) -> bool {
        match fs::read_dir(self.state.join("freezes")) {
            Ok(entries) => entries.count() == 0,
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        }
    }

    pub fn assert_all_thawed(&self) {
        self.writers().into_iter().for_each(ProbeWrite::goes_on);
        eventually("an empty journal", || self.journal_is_empty());
    }

    /// The PID of the guard that listens now.
    pub fn guard_pid(&self) -> Option<u32> {
        guards(&self.state).into_iter().next()
    }
}

/// The kernel's switch for expedited grace periods. All guards of this machine turn it on and off.
pub const SWITCH: &str = "/sys/kernel/rcu_expedited";

/// Its value; empty if it does not exist.
pub fn switch() -> String {
    let text = fs::read_to_string(SWITCH).unwrap_or_default();
    text.trim().to_string()
}

/// Whether a guard has turned it on.
pub fn is_expedited() -> bool {
    switch() == "20908"
}

/// No guard has left it on: guards of other tests turn it off again.
pub fn assert_not_expedited() {
    eventually("no guard has left the switch on", || !is_expedited());
}

impl Drop for Fixture {
    fn drop(&mut self) {
        // A failed test may leave frozen file systems that no process will thaw; the pool could not
        // be removed.
        for pid in guards(&self.state) {
            signal(pid, nix::sys::signal::Signal::SIGKILL);
        }
        for volume in &self.volumes {
            thaw(&volume.target);
        }
        thaw(&self.pool.pool);
        // Without the state directory, no guard would turn the switch off.
        let _ = self.guard.sweep();
        // Their loop devices would stay open.
        self.volumes.clear();
    }
}

pub fn member(pool: &Scratch, id: &str, volume: &Volume, fs: FsType) -> FreezeMember {
    let root = pool
        .host
        .open_mount_root(&volume.target, &volume.device, fs)
        .unwrap();
    FreezeMember {
        volume_id: id.into(),
        namespace: None,
        image: volume.image.id,
        root: Some(root),
        mapped: None,
    }
}

/// FIFREEZE by a foreign process.
pub fn freeze_by_hand(folder: &Path) {
    let root = File::open(folder).unwrap();
    freeze::freeze(root.as_fd()).unwrap();
}

/// FITHAW by a foreign process. Returns whether the file system was frozen.
pub fn thaw(folder: &Path) -> bool {
    File::open(folder).is_ok_and(|root| freeze::thaw(root.as_fd()).is_ok())
}

/// Whether writers are blocked, checked without changing that: a probe writes in a thread of its
/// own, and continues once the file system is thawed.
pub fn is_frozen(folder: &Path) -> bool {
    ProbeWrite::start(folder).is_stopped()
}

/// How long a blocked writer is observed.
const LOOK: Duration = Duration::from_millis(400);

/// One write.
pub struct ProbeWrite(Receiver<()>);

impl ProbeWrite {
    pub fn start(folder: &Path) -> ProbeWrite {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::SeqCst);
        let path = folder.join(format!("probe-{number}"));
        let (done, wait) = channel();
        thread::spawn(move || {
            // If the file system is unmounted while the probe waits, the write fails, which ends
            // the wait as well.
            let _ = File::create(&path).and_then(|mut file| file.write_all(b"probe"));
            let _ = fs::remove_file(&path);
            let _ = done.send(());
        });
        ProbeWrite(wait)
    }

    /// Whether the write still waits, after a time in which an unblocked write has mostly ended. A
    /// write that is only slow counts as stopped, too; only `goes_on` proves that a writer is not
    /// stopped.
    pub fn is_stopped(&self) -> bool {
        self.0.recv_timeout(LOOK).is_err()
    }

    /// Whether it has ended by now. May be called once.
    pub fn has_gone_on(&self) -> bool {
        self.0.try_recv().is_ok()
    }

    /// Waits until the write ends.
    pub fn goes_on(self) {
        self.0
            .recv_timeout(WAIT_TIMEOUT)
            .expect("a writer continues after the thaw");
    }
}

/// Whether all of them still wait, after the same time as for one.
pub fn are_stopped(writers: &[ProbeWrite]) -> bool {
    thread::sleep(LOOK);
    !writers.iter().any(ProbeWrite::has_gone_on)
}

/// PIDs of the running guards of a state directory.
pub fn guards(state: &Path) -> Vec<u32> {
    let wanted = text(state);
    let processes = fs::read_dir("/proc").unwrap();
    processes
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| {
            let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let words: Vec<_> = words.split(|c| *c == 0).collect();
            words[0].ends_with(b"slackwater-guard") && words.contains(&wanted.as_bytes())
        })
        .collect()
}

pub fn signal(pid: u32, signal: nix::sys::signal::Signal) {
    match nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid as i32), signal) {
        Ok(()) | Err(Errno::ESRCH) => {}
        Err(errno) => panic!("signal {pid}: {errno}"),
    }
}

/// Waits until a process is stopped.
pub fn await_stop(pid: u32) {
    eventually("a stopped process", || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit(')')
            .next()
            .unwrap_or_default()
            .trim_start()
            .starts_with(['T', 't'])
    });
}

/// umount by a foreign process. A process that another thread is just starting holds our
/// descriptors until it runs exec, so a mount may be busy for a moment.
pub fn unmount(folder: &Path) {
    eventually("an unmounted folder", || {
        crate::host_linux::scratch::try_run("umount", &[text(folder)]).is_ok()
    });
}
