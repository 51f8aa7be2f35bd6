//! Volumes on mapped devices, a guard of their own, and checks of what is frozen and suspended.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use slackwater::cut::guard::GuardClient;
use slackwater::host::freezer::FreezeLimits;
use slackwater::host::linux::{LinuxHost, freeze};
use slackwater::host::{FileId, Freeze, FreezeMember, Freezer, Host};
use slackwater::model::FsType;
use slackwater_testkit::{WAIT_TIMEOUT, eventually, guest, run, state_of};

const MIB: u64 = 1 << 20;

/// The guest's disk, for [`slackwater_testkit::guest::in_guest`].
pub const DISKS: [&str; 1] = ["pool:1G"];

/// The UUID of the device of a volume.
pub fn uuid_of(at: usize) -> String {
    format!("SLACKWATER-test-{at}")
}

/// A volume on a linear device.
pub struct Volume {
    pub at: usize,
    /// Where its file system is mounted, if it has one.
    pub mounted: Option<(PathBuf, FsType)>,
}

impl Volume {
    /// The name of its device.
    pub fn name(&self) -> String {
        name_of(self.at)
    }

    fn node(&self) -> PathBuf {
        PathBuf::from(format!("/dev/mapper/{}", self.name()))
    }

    /// Whether its device is suspended.
    pub fn is_suspended(&self) -> bool {
        is_suspended(&self.name())
    }

    /// What the driver passes to the guard.
    pub fn member(&self, host: &LinuxHost) -> FreezeMember {
        let mapped = host.hold_mapped(&uuid_of(self.at)).unwrap().unwrap();
        let device = &mapped.device;
        let root = self.mounted.as_ref();
        let root = root.map(|(path, fs)| host.open_mount_root(path, device, *fs).unwrap());
        FreezeMember {
            volume_id: format!("v{}", self.at),
            namespace: None,
            image: FileId {
                device: device.rdev,
                inode: self.at as u64,
            },
            root,
            mapped: Some(mapped),
        }
    }
}

fn name_of(at: usize) -> String {
    format!("slackwater-test-{at}")
}

/// Whether a mapped device is suspended.
pub fn is_suspended(name: &str) -> bool {
    run("dmsetup", &["info", name]).contains("SUSPENDED")
}

/// Whether a mapped device has a table that the next resume would switch to.
pub fn has_inactive_table(name: &str) -> bool {
    run("dmsetup", &["info", name]).contains("INACTIVE")
}

/// Creates a linear device on a part of another device.
pub fn create_linear(name: &str, uuid: &str, below: &str, start: u64, bytes: u64) {
    let table = linear(below, start, bytes);
    run(
        "dmsetup",
        &["create", name, "--uuid", uuid, "--table", &table],
    );
}

pub fn linear(below: &str, start: u64, bytes: u64) -> String {
    format!("0 {} linear {below} {}", bytes / 512, start / 512)
}

/// Volumes with these file systems, or raw ones, and a state directory.
pub struct Fixture {
    pub host: LinuxHost,
    pub state: PathBuf,
    pub guard: GuardClient,
    pub volumes: Vec<Volume>,
}

/// A limit that no test reaches.
pub fn long() -> FreezeLimits {
    limits(slackwater::model::snapshot::MAX_FREEZE_TIMEOUT)
}

pub fn limits(freeze: Duration) -> FreezeLimits {
    FreezeLimits {
        sync: Duration::from_secs(30),
        freeze,
    }
}

/// A guard of a state directory, in this process.
pub fn guard_of(state: &Path) -> GuardClient {
    let host = LinuxHost::new(Vec::new()).with_own_folder(GuardClient::private_folder(state));
    GuardClient::new(Arc::new(host), state.to_path_buf())
        .with_program(env!("CARGO_BIN_EXE_slackwater-guard").into())
}

impl Fixture {
    pub fn new(kinds: &[Option<FsType>]) -> Fixture {
        let state = PathBuf::from("/run/guest/state");
        let disk = guest::disk("pool");
        let mut start = 0;
        let mut volumes = Vec::new();
        for (at, kind) in kinds.iter().enumerate() {
            let bytes = match kind {
                Some(FsType::Xfs) => 320 * MIB,
                Some(FsType::Btrfs) => 128 * MIB,
                Some(FsType::Ext4) | None => 64 * MIB,
            };
            create_linear(&name_of(at), &uuid_of(at), &disk, start, bytes);
            start += bytes;
            let mut volume = Volume { at, mounted: None };
            if let Some(fs) = kind {
                let (node, folder) = (volume.node(), PathBuf::from(format!("/mnt/v{at}")));
                make_fs(*fs, &node);
                fs::create_dir_all(&folder).unwrap();
                run("mount", &[text(&node), text(&folder)]);
                volume.mounted = Some((folder, *fs));
            }
            volumes.push(volume);
        }
        Fixture {
            host: LinuxHost::new(Vec::new()),
            guard: guard_of(&state),
            state,
            volumes,
        }
    }

    pub fn members(&self) -> Vec<FreezeMember> {
        let volumes = self.volumes.iter();
        volumes.map(|volume| volume.member(&self.host)).collect()
    }

    pub fn begin(&self, limits: FreezeLimits) -> Box<dyn Freeze> {
        self.guard.begin(self.members(), limits).unwrap()
    }

    /// All steps up to a session that holds everything.
    pub fn frozen(&self) -> Box<dyn Freeze> {
        let session = self.begin(long());
        session.sync().unwrap();
        session.freeze().unwrap();
        session
    }

    /// Starts a write to each volume.
    pub fn writers(&self) -> Vec<ProbeWrite> {
        self.volumes.iter().map(ProbeWrite::start).collect()
    }

    pub fn journal_is_empty(&self) -> bool {
        match fs::read_dir(self.state.join("freezes")) {
            Ok(entries) => entries.count() == 0,
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        }
    }

    /// No device is suspended, no file system is frozen, and the journal is empty.
    pub fn assert_all_free(&self, after: &str) {
        for volume in &self.volumes {
            assert!(!volume.is_suspended(), "{after}: {} waits", volume.name());
        }
        self.writers().into_iter().for_each(ProbeWrite::goes_on);
        eventually("an empty journal", || self.journal_is_empty());
    }

    /// The PID of the guard that listens now.
    pub fn guard_pid(&self) -> u32 {
        guards()[0]
    }
}

fn make_fs(fs: FsType, node: &Path) {
    match fs {
        FsType::Ext4 => run("mkfs.ext4", &["-q", "-F", text(node)]),
        FsType::Xfs => run("mkfs.xfs", &["-q", "-f", text(node)]),
        FsType::Btrfs => run("mkfs.btrfs", &["-q", "-f", text(node)]),
    };
}

impl Drop for Fixture {
    /// After a failure, this process could not end while a thread of it waits for a device.
    fn drop(&mut self) {
        for pid in guards() {
            signal(pid, Signal::SIGKILL);
        }
        let all = run("dmsetup", &["ls", "--exec", "echo"]);
        for device in all.split_whitespace() {
            run("dmsetup", &["resume", device]);
        }
        for (folder, _) in self.volumes.iter().filter_map(|one| one.mounted.as_ref()) {
            thaw(folder);
        }
    }
}

/// FITHAW by a foreign process. Returns whether the file system was frozen.
pub fn thaw(folder: &Path) -> bool {
    File::open(folder).is_ok_and(|root| freeze::thaw(root.as_fd()).is_ok())
}

/// One write, which waits while its volume is frozen or suspended.
pub struct ProbeWrite(Receiver<()>);

impl ProbeWrite {
    pub fn start(volume: &Volume) -> ProbeWrite {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::SeqCst);
        let path = match &volume.mounted {
            Some((folder, _)) => folder.join(format!("probe-{number}")),
            None => volume.node(),
        };
        let create = volume.mounted.is_some();
        let (done, wait) = channel();
        thread::spawn(move || {
            let file = OpenOptions::new().write(true).create(create).open(&path);
            let written = file.and_then(|mut file| {
                file.write_all(&number.to_le_bytes())?;
                file.sync_all()
            });
            written.unwrap();
            let _ = done.send(());
        });
        ProbeWrite(wait)
    }

    /// Whether it still waits, after a time in which a write that does not wait has mostly ended.
    pub fn is_stopped(&self) -> bool {
        self.0.recv_timeout(Duration::from_millis(400)).is_err()
    }

    /// Waits until the write ends.
    pub fn goes_on(self) {
        let written = self.0.recv_timeout(WAIT_TIMEOUT);
        written.expect("a writer continues after the thaw");
    }
}

/// PIDs of the running guards.
pub fn guards() -> Vec<u32> {
    let processes = fs::read_dir("/proc").unwrap();
    let pids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let is_guard = |pid: &u32| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let program = words.split(|c| *c == 0).next().unwrap_or_default();
        program.ends_with(b"slackwater-guard")
    };
    pids.filter(is_guard).collect()
}

pub fn signal(pid: u32, signal: Signal) {
    match nix::sys::signal::kill(Pid::from_raw(pid as i32), signal) {
        Ok(()) | Err(Errno::ESRCH) => {}
        Err(errno) => panic!("signal {pid}: {errno}"),
    }
}

/// Waits until a process has a state of /proc/PID/stat for a while.
pub fn await_state(pid: u32, wanted: char) {
    let stat = PathBuf::from(format!("/proc/{pid}/stat"));
    let mut seen = 0;
    eventually("the state of a process", || {
        let is_it = state_of(&stat) == Some(wanted);
        seen = if is_it { seen + 1 } else { 0 };
        seen > 5
    });
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
