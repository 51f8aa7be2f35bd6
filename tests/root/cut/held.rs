//! Cuts that are stopped in the middle, by stopping the driver or its guard at a step, and the
//! cleanup that is needed if a test fails while they are stopped.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::Node;
use slackwater_testkit::{WAIT_TIMEOUT, binary, eventually, run, state_of, succeeds};

/// Restarts the driver so that it stops, or is killed, at a step of its next work.
pub fn arm(node: &mut Node, fault: &str) {
    let gate = node.scratch.join("gate");
    let _ = std::fs::remove_file(&gate);
    let faults = format!("{fault},effect.all:after={}", gate.display());
    node.restart_with(&[("SLACKWATER_FAULT", &faults)]);
    std::fs::write(gate, "").unwrap();
}

/// Waits until the driver has stopped itself.
pub fn await_stop(node: &Node) {
    eventually("the driver has reached the step", || {
        node.server.is_stopped()
    });
}

/// Waits until the driver hangs in the kernel, for example in a write to a frozen file system.
pub fn await_hang(node: &Node) {
    let tasks = format!("/proc/{}/task", node.server.pid());
    let mut seen = 0;
    eventually("the driver hangs in the kernel", || {
        let threads = std::fs::read_dir(&tasks).unwrap().flatten();
        let mut states = threads.map(|thread| thread.path().join("stat"));
        let stuck = states.any(|stat| state_of(&stat) == Some('D'));
        // Any I/O looks like this for a moment.
        seen = if stuck { seen + 1 } else { 0 };
        seen > 20
    });
}

/// Continues the driver.
pub fn go_on(node: &Node) {
    node.server.signal(Signal::SIGCONT);
}

/// The result of a call that must not hang.
pub async fn end_of<T>(call: tokio::task::JoinHandle<T>) -> T {
    let ended = tokio::time::timeout(WAIT_TIMEOUT, call).await;
    ended.expect("the call ends").unwrap()
}

/// Continues or thaws everything that is stopped when it is dropped, also if a test fails.
/// Otherwise neither volume nor pool could be removed.
pub struct Release {
    state: PathBuf,
    /// File systems that the test itself freezes.
    folders: Vec<PathBuf>,
}

impl Release {
    pub fn of(node: &Node) -> Release {
        Release {
            state: node.scratch.join("state"),
            folders: Vec::new(),
        }
    }

    /// Freezes a file system by hand.
    pub fn freeze(&mut self, folder: &Path) {
        self.folders.push(folder.to_path_buf());
        run("fsfreeze", &["-f", folder.to_str().unwrap()]);
    }

    /// Thaws the file systems that were frozen by hand.
    pub fn thaw(&mut self) {
        for folder in self.folders.drain(..) {
            run("fsfreeze", &["-u", folder.to_str().unwrap()]);
        }
    }

    /// Waits until the guard has stopped itself.
    pub fn await_stopped_guard(&self) {
        eventually("the guard has reached the step", || {
            let stat = |pid| PathBuf::from(format!("/proc/{pid}/stat"));
            let mut guards = self.guards().into_iter();
            guards.any(|pid| state_of(&stat(pid)) == Some('T'))
        });
    }

    /// Kills the guards with SIGKILL.
    pub fn kill_guards(&self) {
        for guard in self.guards() {
            let _ = kill(Pid::from_raw(guard), Signal::SIGKILL);
        }
    }

    /// The guards of this driver.
    fn guards(&self) -> Vec<i32> {
        let state = self.state.to_str().unwrap();
        let entries = std::fs::read_dir("/proc").unwrap().flatten();
        let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let is_guard = |pid: &i32| {
            let words = std::fs::read_to_string(format!("/proc/{pid}/cmdline"));
            words.is_ok_and(|words| {
                let mut words = words.split('\0');
                words.any(|word| word.ends_with("slackwater-guard"))
                    && words.any(|word| word == state)
            })
        };
        numbers.filter(is_guard).collect()
    }
}

impl Drop for Release {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        for folder in self.folders.drain(..) {
            let _ = succeeds("fsfreeze", &["-u", folder.to_str().unwrap()]);
        }
        self.kill_guards();
        let state = self.state.to_str().unwrap();
        let _ = succeeds(binary(), &["frozen", "--state-dir", state, "--thaw"]);
    }
}

/// One write in a thread of its own.
pub struct Probe(Receiver<()>);

impl Probe {
    pub fn start(folder: &Path) -> Probe {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::SeqCst);
        let path = folder.join(format!("probe-{number}"));
        let (done, wait) = channel();
        std::thread::spawn(move || {
            let written =
                std::fs::File::create(&path).and_then(|mut file| file.write_all(b"probe"));
            if written.and_then(|()| std::fs::remove_file(&path)).is_ok() {
                let _ = done.send(());
            }
        });
        Probe(wait)
    }

    /// Whether the write still waits, after a time in which an unblocked write has mostly ended. A
    /// write that is only slow counts as stopped, too; only `goes_on` proves that a writer is not
    /// stopped.
    pub fn is_stopped(&self) -> bool {
        self.0.recv_timeout(Duration::from_millis(400)).is_err()
    }

    #[track_caller]
    pub fn goes_on(self) {
        let gone_on = self.0.recv_timeout(WAIT_TIMEOUT);
        gone_on.expect("the writer continues");
    }
}
