//! A driver for tests: this test program in a second process, which has faults and can be killed.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use slackwater::error::{HostError, chain};
use slackwater::host::Freezer;
use slackwater::host::freezer::FreezeLimits;
use slackwater::host::linux::LinuxHost;
use slackwater_testkit::WAIT_TIMEOUT;

use super::fixture::{Fixture, Volume, guard_of, signal};

const PLAN: &str = "SLACKWATER_GUARD_TEST";

/// The other process. It is killed when this is dropped.
pub struct Driver {
    child: Child,
    stdin: Option<ChildStdin>,
    words: Receiver<String>,
}

impl Driver {
    /// Starts it on the volumes of a fixture, with faults. It runs a whole session, and waits for
    /// the end of its stdin before it thaws.
    pub fn start(fixture: &Fixture, limits: FreezeLimits, faults: &str) -> Driver {
        let volumes = fixture.volumes.iter();
        let members: Vec<Value> = volumes
            .map(|volume| {
                let mounted = volume.mounted.as_ref();
                json!({ "at": volume.at, "mounted": mounted })
            })
            .collect();
        let plan = json!({
            "state": fixture.state, "members": members,
            "sync": limits.sync.as_millis() as u64, "freeze": limits.freeze.as_millis() as u64,
        });
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "guest_guard::driver::the_driver"])
            .args(["--ignored", "--nocapture"])
            .env(PLAN, plan.to_string())
            .env("SLACKWATER_FAULT", faults)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
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

    /// Its next output line; `None` if it has ended.
    pub fn as_str(&self) -> Option<String> {
        match self.words.recv_timeout(WAIT_TIMEOUT) {
            Ok(word) => Some(word),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("no word of the driver"),
        }
    }

    /// Waits until it prints this line.
    pub fn await_word(&self, expected: &str) {
        loop {
            let word = self.as_str();
            match word.as_deref() {
                Some(word) if word == expected => return,
                Some(_) => {}
                None => panic!("the driver ended before it was {expected}"),
            }
        }
    }

    /// Lets it thaw.
    pub fn go_on(&mut self) {
        drop(self.stdin.take());
    }

    /// Lets it run to its end. Returns its output.
    pub fn run(&mut self) -> Vec<String> {
        self.go_on();
        let lines = std::iter::from_fn(|| self.as_str()).collect();
        self.child.wait().unwrap();
        lines
    }

    pub fn kill(&mut self) {
        signal(self.child.id(), Signal::SIGKILL);
        self.child.wait().unwrap();
    }
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
    match drive() {
        Ok(()) => say("done"),
        Err(error) => say(&format!("failed: {}", chain(&error))),
    }
}

fn drive() -> Result<(), HostError> {
    let plan: Value = serde_json::from_str(&std::env::var(PLAN).unwrap()).unwrap();
    let state: PathBuf = serde_json::from_value(plan["state"].clone()).unwrap();
    let guard = guard_of(&state);
    let millis = |value: &Value| Duration::from_millis(value.as_u64().unwrap());
    let limits = FreezeLimits {
        sync: millis(&plan["sync"]),
        freeze: millis(&plan["freeze"]),
    };
    let host = LinuxHost::new(Vec::new());
    let members = plan["members"].as_array().unwrap().iter().map(|value| {
        let volume = Volume {
            at: value["at"].as_u64().unwrap() as usize,
            mounted: serde_json::from_value(value["mounted"].clone()).unwrap(),
        };
        volume.member(&host)
    });
    let members: Vec<_> = members.collect();
    let count = members.len();
    let session = guard.begin(members, limits)?;
    say("begun");
    session.sync()?;
    say("freezing");
    session.freeze()?;
    say("frozen");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let verdicts = (0..count).map(|at| session.thaw(at));
    let verdicts: Vec<bool> = verdicts.collect::<Result<_, _>>()?;
    say(&format!("{verdicts:?}"));
    Ok(())
}
