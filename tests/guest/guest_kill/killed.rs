//! A driver that is killed at planned effects while a test repeats its calls.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use slackwater_testkit::{Client, Scratch, Server, eventually};
use tonic::{Code, Status};

use crate::guest_suspended::suspended;

/// The kernel grows no mounted ext4 for a process without this capability.
const WITHOUT_RESOURCES: [&str; 6] = [
    "setpriv",
    "--bounding-set",
    "-sys_resource",
    "--inh-caps",
    "-all",
    "--",
];
/// A step of a call takes less than a second.
const REPEATS: usize = 600;

pub(super) struct Killed {
    pub(super) server: Server,
    log: PathBuf,
    /// The faults that have not occurred yet.
    pub(super) left: BTreeSet<String>,
    /// The names of all effects that have begun.
    pub(super) seen: BTreeSet<String>,
    /// The number of effects of the longest process.
    pub(super) most: usize,
}

/// A driver that ends at once: the first faults are of its next start.
fn spawn(scratch: &Scratch, pools: &[&str], more: &[String]) -> Server {
    let more: Vec<&str> = more.iter().map(String::as_str).collect();
    let at_once = [("SLACKWATER_FAULT", "effect.1:kill")];
    Server::spawn_wrapped(scratch, &WITHOUT_RESOURCES, pools, &more, &at_once)
}

impl Killed {
    /// Starts a driver with these pools and arguments until it serves.
    pub(super) async fn start(
        scratch: &Scratch,
        pools: &[&str],
        more: &[String],
        left: BTreeSet<String>,
    ) -> Killed {
        let mut driver = Killed {
            server: spawn(scratch, pools, more),
            log: scratch.join("effects"),
            left,
            seen: BTreeSet::new(),
            most: 0,
        };
        driver.restart().await;
        driver
    }

    /// Starts the driver with other pools and arguments until it serves.
    pub(super) async fn serve(&mut self, scratch: &Scratch, pools: &[&str], more: &[String]) {
        self.server.kill();
        self.server = spawn(scratch, pools, more);
        self.restart().await;
    }

    /// Kills the driver, and starts it until it serves. No device stays suspended.
    pub(super) async fn restart(&mut self) {
        self.note_effects();
        while !self.serves("").await {
            self.note_death();
        }
        eventually("nothing is suspended", || suspended().is_empty());
    }

    /// Starts the driver with the faults that are left and one more; returns whether it serves.
    pub(super) async fn serves(&mut self, more: &str) -> bool {
        let log = format!("effect.all:log={}", self.log.display());
        let faults = self.left.iter().map(String::as_str);
        let faults: Vec<&str> = faults.chain([more, log.as_str()]).collect();
        let plan = [("SLACKWATER_FAULT", faults.join(","))];
        let plan = plan.each_ref().map(|(name, text)| (*name, text.as_str()));
        self.server.respawn_with(&plan);
        while self.server.is_alive() {
            if self.server.client().is_ready().await {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        false
    }

    /// Kills the driver at this fault once more.
    pub(super) async fn again(&mut self, fault: &str) {
        self.left.insert(fault.to_string());
        self.restart().await;
    }

    /// Takes the log of the effects of the last process. Returns its last line.
    pub(super) fn note_effects(&mut self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let _ = fs::remove_file(&self.log);
        let begun = text.lines().filter_map(|line| line.split_once(' '));
        self.seen.extend(begun.map(|(_, name)| name.to_string()));
        self.most = self.most.max(text.lines().count());
        text.lines().last().unwrap_or_default().to_string()
    }

    pub(super) fn note_death(&mut self) {
        let fault = self.note_effects();
        let log = || self.server.log();
        assert!(self.left.remove(&fault), "it died by itself\n{}", log());
    }

    /// Repeats a call until it succeeds, and starts the driver after each death.
    pub(super) async fn done<T>(
        &mut self,
        what: &str,
        call: impl AsyncFn(Client) -> Result<T, Status>,
    ) -> T {
        for _ in 0..REPEATS {
            let refused = match call(self.server.client()).await {
                Ok(value) => return value,
                Err(refused) => refused,
            };
            if self.was_killed().await {
                continue;
            }
            let is_temporary = matches!(refused.code(), Code::Aborted | Code::Unavailable);
            let is_cut_off = std::error::Error::source(&refused).is_some();
            assert!(is_temporary || is_cut_off, "{what}: {refused}");
        }
        panic!("{what} never succeeds");
    }

    /// Starts the driver again if it was killed.
    pub(super) async fn was_killed(&mut self) -> bool {
        // The connection ends before the process does.
        tokio::time::sleep(Duration::from_millis(20)).await;
        if self.server.is_alive() {
            return false;
        }
        self.note_death();
        self.restart().await;
        true
    }

    /// Repeats a command of archives until it succeeds. Returns its stdout.
    pub(super) async fn archive(&mut self, words: &[&str], input: &[u8]) -> Vec<u8> {
        let mut last = String::new();
        for _ in 0..REPEATS {
            let (done, printed, said) = self.server.archive(words, input);
            if done {
                return printed;
            }
            self.was_killed().await;
            last = said;
        }
        panic!("{words:?} never succeeds: {last}");
    }
}

/// An export that has opened its snapshot and waits for its reader.
pub(super) fn wait_for_reader(mut export: Command) -> WaitingExport {
    let export = export.stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = export.spawn().unwrap();
    // The first byte comes after all images are open; there is none if the driver is dead.
    let _ = child.stdout.as_mut().unwrap().read(&mut [0]);
    WaitingExport(child)
}

pub(super) struct WaitingExport(Child);

impl Drop for WaitingExport {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
