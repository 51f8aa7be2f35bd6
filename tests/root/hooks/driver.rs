//! Hooks with the whole driver, on a simulated machine: the order, the recorded level, retries and
//! fallback.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use slackwater::cut::CutInterfaces;
use slackwater::error::{Error, HostError, Result};
use slackwater::hook::HookDefinition;
use slackwater::host::freezer::{FreezeLimits, JournaledFreeze};
use slackwater::host::memory::MemoryHost;
use slackwater::host::{Freeze, FreezeMember, Freezer};
use slackwater::model::{Level, OnQuiesceFailure, SnapshotParameters};
use slackwater::operation::{CreateSnapshot, Driver, Snapshot, StageVolume};

use super::GOOD;
use super::hook_folder::*;
use crate::simulation::{VolumeConfig, create, settings, staging};

/// The simulated guard, which writes into the log of the hooks.
struct Noting {
    inner: MemoryHost,
    log: PathBuf,
}

struct NotingFreeze {
    inner: Box<dyn Freeze>,
    log: PathBuf,
}

fn note(log: &PathBuf, word: &str) {
    let mut log = OpenOptions::new()
        .create(true)
        .append(true)
        .open(log)
        .unwrap();
    writeln!(log, "{word}").unwrap();
}

type HostResult<T> = slackwater::host::Result<T>;

impl Freezer for Noting {
    fn begin(
        &self,
        members: Vec<FreezeMember>,
        limits: FreezeLimits,
    ) -> HostResult<Box<dyn Freeze>> {
        if self.log.with_file_name("no-guard").exists() {
            return Err(HostError::unexpected("ask", "guard.sock", "planned"));
        }
        Ok(Box::new(NotingFreeze {
            inner: self.inner.begin(members, limits)?,
            log: self.log.clone(),
        }))
    }

    fn sweep(&self) -> HostResult<Vec<String>> {
        self.inner.sweep()
    }

    fn list_journaled(&self) -> HostResult<Vec<JournaledFreeze>> {
        self.inner.list_journaled()
    }
}

impl Freeze for NotingFreeze {
    fn sync(&self) -> HostResult<()> {
        // Once an application is held, if the test planned a fault.
        let held = std::fs::read_to_string(&self.log).is_ok_and(|log| log.contains("quiesced"));
        if held && self.log.with_file_name("disk-dies").exists() {
            return Err(HostError::errno("write back", "/dev/loop0", Errno::EIO));
        }
        self.inner.sync()
    }

    fn freeze(&self) -> HostResult<()> {
        if self.log.with_file_name("frozen-elsewhere").exists() {
            return Err(HostError::errno("freeze", "/dev/loop0", Errno::EBUSY));
        }
        self.inner.freeze()?;
        note(&self.log, "frozen");
        Ok(())
    }

    fn thaw(&self, member: usize) -> HostResult<bool> {
        note(&self.log, "thaw");
        // A hook that ends in the window: the window lasts until then.
        if let Ok(pid) = std::fs::read_to_string(self.log.with_file_name("ends")) {
            until("the hook's end", || !runs(&pid));
        }
        self.inner.thaw(member)
    }

    fn written(&self) -> HostResult<()> {
        self.inner.written()
    }

    fn give_up(&self) {
        self.inner.give_up();
    }
}

struct Node {
    hook_folder: HookFolder,
    host: MemoryHost,
    driver: Driver,
    volume: String,
}

impl Node {
    /// A driver with a staged volume.
    fn start(hooks: impl FnOnce(&HookFolder) -> Vec<HookDefinition>) -> Node {
        Node::start_with_grace(LONG, hooks)
    }

    fn start_with_grace(
        grace: Duration,
        hooks: impl FnOnce(&HookFolder) -> Vec<HookDefinition>,
    ) -> Node {
        let hook_folder = HookFolder::new();
        let host = MemoryHost::new();
        let interfaces = CutInterfaces {
            hooks: Arc::new(local(hooks(&hook_folder)).with_grace(grace)),
            freezer: Arc::new(Noting {
                inner: host.clone(),
                log: hook_folder.path("log"),
            }),
            ..CutInterfaces::simulated(host.clone())
        };
        let driver = Driver::start(settings(), interfaces).unwrap();
        let volume = driver
            .volumes
            .create_volume(&create("data", VolumeConfig::EXT4))
            .unwrap();
        let volume = volume.id.to_string();
        let staging_path = staging("data");
        driver
            .volumes
            .stage_volume(&StageVolume {
                volume_id: volume.clone(),
                staging_path: staging_path.to_str().unwrap().into(),
                capability: VolumeConfig::EXT4.capability(),
            })
            .unwrap();
        Node {
            hook_folder,
            host,
            driver,
            volume,
        }
    }

    fn snapshot(&self, name: &str, parameters: &SnapshotParameters) -> Result<Snapshot> {
        self.driver.snapshots.create_snapshot(&CreateSnapshot {
            name: name.into(),
            source_volume_id: self.volume.clone(),
            parameters: parameters.clone(),
            requisite: Vec::new(),
        })
    }

    fn assert_clean(&self) {
        assert_eq!(self.host.violations(), [""; 0]);
        assert!(Freezer::list_journaled(&self.host).unwrap().is_empty());
    }
}

fn application() -> SnapshotParameters {
    SnapshotParameters {
        consistency: Level::Application,
        retry_interval: Duration::from_millis(1),
        ..SnapshotParameters::default()
    }
}

/// The reason why hook `db` failed, reported together with the pause that began.
fn failed_hook(error: &Error) -> &str {
    match error {
        Error::Paused { last, .. } => failed_hook(last),
        Error::QuiesceFailed { hook, reason } if hook == "db" => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_order_is_quiesce_freeze_thaw_release() {
    let node = Node::start(|hook_folder| vec![hook_folder.hook("db", GOOD)]);
    let snapshot = node.snapshot("s", &application()).unwrap();
    assert_eq!(snapshot.level, Level::Application);
    assert_eq!(snapshot.reason, "");
    let order = ["quiesced", "frozen", "thaw", "released"];
    assert_eq!(node.hook_folder.lines("log"), order);
    let again = node.snapshot("s", &application()).unwrap();
    // Only the first call knows for how long it froze.
    let expected = Snapshot {
        frozen: None,
        ..snapshot
    };
    assert_eq!(again, expected);
    assert_eq!(
        node.hook_folder.lines("log"),
        order,
        "a repeat disturbs no application"
    );
    node.assert_clean();
}

#[test]
fn a_lower_level_runs_no_hook() {
    let node = Node::start(|hook_folder| vec![hook_folder.hook("db", GOOD)]);
    let snapshot = node.snapshot("s", &SnapshotParameters::default()).unwrap();
    assert_eq!(snapshot.level, Level::Filesystem);
    assert_eq!(node.hook_folder.lines("log"), ["frozen", "thaw"]);
}

#[test]
fn a_hook_that_fails_is_retried() {
    // Its third start is the first that succeeds.
    let body = format!("echo start >> starts; [ $(wc -l < starts) -ge 3 ] || exit 1; {GOOD}");
    let node = Node::start(|hook_folder| vec![hook_folder.hook("db", &body)]);
    let snapshot = node.snapshot("s", &application()).unwrap();
    assert_eq!(snapshot.level, Level::Application);
    assert_eq!(node.hook_folder.lines("starts").len(), 3);
    assert_eq!(
        node.hook_folder.lines("log"),
        ["quiesced", "frozen", "thaw", "released"]
    );
    node.assert_clean();
}

#[test]
fn a_hook_that_always_fails_leaves_no_snapshot_or_one_of_the_level_that_the_class_allows() {
    let body = "echo start >> starts; echo no database >&2; exit 1";
    let node = Node::start(|hook_folder| vec![hook_folder.hook("db", body)]);
    let error = node.snapshot("s", &application()).unwrap_err();
    assert!(failed_hook(&error).contains("no database"), "{error:?}");
    assert_eq!(
        node.hook_folder.lines("starts").len(),
        3,
        "one try and two more"
    );
    let repeat = node.snapshot("s", &application()).unwrap_err();
    assert!(failed_hook(&repeat).contains("no database"), "{repeat:?}");
    assert_eq!(
        node.hook_folder.lines("starts").len(),
        3,
        "a repeat disturbs no application"
    );
    assert_eq!(node.hook_folder.lines("log"), [""; 0], "nothing was frozen");
    for (level, frozen) in [(Level::Filesystem, 2), (Level::Crash, 0)] {
        let node = Node::start(|hook_folder| vec![hook_folder.hook("db", body)]);
        let falls = SnapshotParameters {
            on_quiesce_failure: OnQuiesceFailure::Degrade(level),
            ..application()
        };
        let snapshot = node.snapshot("s", &falls).unwrap();
        assert_eq!(snapshot.level, level);
        assert!(snapshot.reason.contains("hook db"), "{}", snapshot.reason);
        assert!(
            snapshot.reason.contains("no database"),
            "{}",
            snapshot.reason
        );
        assert_eq!(node.hook_folder.lines("log").len(), frozen);
        node.assert_clean();
    }
    node.assert_clean();
}

#[test]
fn a_hook_that_dies_under_the_freeze_loses_the_level() {
    let body = "echo $$ > ends; echo quiesced >> log; echo READY; \
                while ! grep -q frozen log; do sleep 0.001; done; echo lost >&2; exit 0";
    let node = Node::start(|hook_folder| vec![hook_folder.hook("db", body)]);
    let parameters = SnapshotParameters {
        retries: 0,
        ..application()
    };
    let error = node.snapshot("s", &parameters).unwrap_err();
    let reason = failed_hook(&error);
    assert!(
        reason.contains("before the cut was complete: lost"),
        "{reason}"
    );
    node.assert_clean();
}

#[test]
fn a_hook_that_must_be_killed_costs_no_snapshot() {
    let body = "echo READY; while :; do sleep 0.05; done";
    let node = Node::start_with_grace(GRACE, |hook_folder| vec![hook_folder.hook("db", body)]);
    let snapshot = node.snapshot("s", &application()).unwrap();
    assert_eq!(snapshot.level, Level::Application);
    node.assert_clean();
}

#[test]
fn without_a_hook_there_is_no_application_level() {
    let node = Node::start(|_| Vec::new());
    let error = node.snapshot("s", &application()).unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error:?}");
    let falls = SnapshotParameters {
        on_quiesce_failure: OnQuiesceFailure::Degrade(Level::Filesystem),
        ..application()
    };
    let snapshot = node.snapshot("s", &falls).unwrap();
    assert_eq!(snapshot.level, Level::Filesystem);
    assert!(
        snapshot.reason.contains("no hook is configured"),
        "{}",
        snapshot.reason
    );
    node.assert_clean();
}

#[test]
fn after_any_failure_an_application_is_not_disturbed_again_before_its_pause_is_over() {
    let node = Node::start(|hook_folder| vec![hook_folder.hook("db", GOOD)]);
    node.hook_folder.touch("disk-dies");
    for call in 0..5 {
        let error = node.snapshot("s", &application()).unwrap_err();
        let Error::Paused { last, .. } = &error else {
            panic!("{call}: {error:?}");
        };
        assert!(
            matches!(**last, Error::Host { .. }),
            "the code is the error's: {error:?}"
        );
    }
    let log = ["quiesced", "released"];
    assert_eq!(
        node.hook_folder.lines("log"),
        log,
        "held once by five calls"
    );
    node.assert_clean();
}

#[test]
fn no_application_is_held_where_the_guard_or_the_pool_fails_ahead_of_the_hooks() {
    let node = Node::start(|hook_folder| vec![hook_folder.hook("db", GOOD)]);
    node.hook_folder.touch("no-guard");
    for call in 0..5 {
        let error = node.snapshot("s", &application()).unwrap_err();
        assert!(matches!(error, Error::Host { .. }), "{call}: {error:?}");
    }
    assert_eq!(node.hook_folder.lines("log"), [""; 0]);
    std::fs::remove_file(node.hook_folder.path("no-guard")).unwrap();
    node.snapshot("s", &application()).unwrap();
    node.assert_clean();
}

#[test]
fn a_hook_that_lives_past_its_own_time_does_not_prove_that_it_held() {
    // Like a server that ends its pause by itself while its client still waits.
    let pauses = "echo READY; cat > /dev/null";
    let slow = "sleep 1.5; echo READY; cat > /dev/null";
    let node = Node::start(|hook_folder| {
        vec![
            hook_folder.hook_of("db", pauses, |parts| parts.timeout = Some("1s".into())),
            hook_folder.hook("slow", slow),
        ]
    });
    let parameters = SnapshotParameters {
        retries: 0,
        ..application()
    };
    let error = node.snapshot("s", &parameters).unwrap_err();
    let reason = failed_hook(&error);
    assert!(reason.contains("its own deadline (1 s)"), "{reason}");
    node.assert_clean();
}

#[test]
fn what_another_program_has_frozen_is_refused_at_once_or_cut_at_level_crash() {
    let node = Node::start(|hook_folder| vec![hook_folder.hook("db", GOOD)]);
    node.hook_folder.touch("frozen-elsewhere");
    let error = node.snapshot("s", &application()).unwrap_err();
    let Error::Paused { last, .. } = &error else {
        panic!("{error:?}");
    };
    assert!(matches!(**last, Error::Busy { .. }), "{error:?}");
    assert_eq!(
        node.hook_folder.lines("log"),
        ["quiesced", "released"],
        "one try"
    );
    let falls = SnapshotParameters {
        on_quiesce_failure: OnQuiesceFailure::Degrade(Level::Crash),
        ..SnapshotParameters::default()
    };
    let snapshot = node.snapshot("s", &falls).unwrap();
    assert_eq!(snapshot.level, Level::Crash);
    assert!(
        snapshot.reason.contains("another program"),
        "{}",
        snapshot.reason
    );
    node.assert_clean();
}
