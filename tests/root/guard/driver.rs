//! A driver for tests: this test program in a second process, which can be killed and stopped.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use slackwater::error::HostError;
use slackwater::host::freezer::FreezeLimits;
use slackwater::host::{Device, FileId, FreezeMember, Freezer, Host};
use slackwater::model::FsType;

use crate::guard::fixture::{Fixture, WAIT_TIMEOUT, guard_of, signal};

const PLAN: &str = "SLACKWATER_GUARD_TEST";

/// The variable that selects how it waits for grace periods.
pub const GRACE_PERIODS: &str = "SLACKWATER_TEST_GRACE_PERIODS";

/// The task of the other process.
pub enum Task {
    /// A whole session. The driver waits for a line on stdin before it thaws.
    Cut(FreezeLimits),
    /// Only a sweep.
    Sweep,
}

/// Whether a driver can see the process of a guard that a supervisor has started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sight {
    Seen,
    Apart,
}

/// The other process. It is killed when this is dropped.
pub struct Driver {
    child: Child,
    stdin: Option<ChildStdin>,
    words: Receiver<String>,
}

impl Driver {
    /// Starts it on the volumes of a fixture, with further variables.
    pub fn start(
        fixture: &Fixture,
        kinds: &[FsType],
        task: &Task,
        faults: &[(&str, &str)],
    ) -> Driver {
        Driver::beside(fixture, kinds, task, faults, None)
    }

    /// The same. With `beside`, it uses a guard that a supervisor has started: in the PID namespace
    /// of this test, or in one from which the driver cannot see the guard.
    pub fn beside(
        fixture: &Fixture,
        kinds: &[FsType],
        task: &Task,
        faults: &[(&str, &str)],
        beside: Option<Sight>,
    ) -> Driver {
        let (what, limits) = match task {
            Task::Cut(limits) => ("cut", *limits),
            Task::Sweep => ("sweep", crate::guard::fixture::long()),
        };
        let members: Vec<Value> = fixture
            .volumes
            .iter()
            .zip(kinds)
            .map(|(volume, fs)| {
                json!({
                    "mount": volume.target, "device": volume.device.path,
                    "rdev": volume.device.rdev, "image_device": volume.image.id.device,
                    "image_inode": volume.image.id.inode, "fs": fs,
                })
            })
            .collect();
        let plan = json!({
            "state": fixture.state, "task": what, "members": members,
            "sync": limits.sync.as_millis() as u64, "freeze": limits.freeze.as_millis() as u64,
            "beside": beside.is_some(),
        });
        let program = std::env::current_exe().unwrap();
        let mut command = match beside {
            Some(Sight::Apart) => {
                let mut command = Command::new("unshare");
                command
                    .args(["--pid", "--fork", "--kill-child"])
                    .arg(program);
                command
            }
            Some(Sight::Seen) | None => Command::new(program),
        };
        command
            .args([
                "--exact",
                "guard::driver::the_driver",
                "--ignored",
                "--nocapture",
            ])
            .env(PLAN, plan.to_string())
            .envs(faults.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, words) = channel();
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                // The output of the test harness before a test is on the same line.
                if let Some((_, word)) = line.split_once("driver: ") {
                    let _ = sender.send(word.to_string());
                }
            }
        });
        Driver {
            stdin: child.stdin.take(),
            child,
            words,
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its next output line; `None` if it has ended.
    pub fn as_str(&self) -> Option<String> {
        match self.words.recv_timeout(WAIT_TIMEOUT) {
            Ok(word) => Some(word),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("no word of the driver"),
        }
    }

    /// Whether it prints this line before its end.
    pub fn says(&self, expected: &str) -> bool {
        while let Some(word) = self.as_str() {
            if word == expected {
                return true;
            }
        }
        false
    }

    /// Lets it thaw.
    pub fn go_on(&mut self) {
        drop(self.stdin.take());
    }

    /// Lets it run to its end. Returns its output.
    pub fn run(&mut self) -> Vec<String> {
        self.go_on();
        let lines = std::iter::from_fn(|| self.as_str()).collect();
        self.wait();
        lines
    }

    pub fn kill(&mut self) {
        signal(self.pid(), Signal::SIGKILL);
        self.child.wait().unwrap();
    }

    /// Waits for its end, by the injected fault or regularly.
    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }
}

/// Whether it was ended by SIGKILL.
pub fn was_killed(status: ExitStatus) -> bool {
    status.signal() == Some(Signal::SIGKILL as i32)
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.kill();
    }
}

fn say(word: &str) {
    let mut out = std::io::stdout();
    writeln!(out, "driver: {word}").unwrap();
    out.flush().unwrap();
}

#[test]
#[ignore = "the other process of other tests"]
fn the_driver() {
    // An expected failure is printed as one line instead of a panic, which would look like a failed
    // test.
    if let Err(error) = drive() {
        eprintln!("driver: {}", crate::host_linux::scratch::error_text(&error));
        std::process::exit(1);
    }
}

fn drive() -> Result<(), HostError> {
    let plan: Value = serde_json::from_str(&std::env::var(PLAN).unwrap()).unwrap();
    let path = |value: &Value| PathBuf::from(value.as_str().unwrap());
    let mut guard = guard_of(&path(&plan["state"]));
    if plan["beside"] == true {
        guard = guard.started_by_others();
    }
    if let Ok(how) = std::env::var(GRACE_PERIODS) {
        guard = guard.with_grace_periods(how.parse().unwrap());
    }
    if plan["task"] == "sweep" {
        let swept = guard
            .sweep()
            .map_err(|error| crate::host_linux::scratch::error_text(&error));
        say(&format!("{swept:?}"));
        return Ok(());
    }
    let millis = |value: &Value| Duration::from_millis(value.as_u64().unwrap());
    let limits = FreezeLimits {
        sync: millis(&plan["sync"]),
        freeze: millis(&plan["freeze"]),
    };
    let host = slackwater::host::linux::LinuxHost::new(Vec::new());
    let members = plan["members"].as_array().unwrap();
    let opened = members.iter().enumerate().map(|(at, value)| {
        let fs: FsType = serde_json::from_value(value["fs"].clone()).unwrap();
        let device = Device {
            path: path(&value["device"]),
            rdev: value["rdev"].as_u64().unwrap(),
        };
        FreezeMember {
            volume_id: format!("v{at}"),
            namespace: None,
            image: FileId {
                device: value["image_device"].as_u64().unwrap(),
                inode: value["image_inode"].as_u64().unwrap(),
            },
            root: Some(
                host.open_mount_root(Path::new(&path(&value["mount"])), &device, fs)
                    .unwrap(),
            ),
            mapped: None,
        }
    });
    let session = guard.begin(opened.collect(), limits)?;
    say("begun");
    session.sync()?;
    say("freezing");
    session.freeze()?;
    say("frozen");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let verdicts: Vec<bool> = (0..members.len())
        .map(|at| session.thaw(at))
        .collect::<Result<_, _>>()?;
    say(&format!("{verdicts:?}"));
    drop(session);
    say("done");
    Ok(())
}
