//! `slackwater frozen`, `slackwater guard` as a separate process, and the start of `slackwater
//! serve`.

use std::os::fd::AsFd;
use std::process::{Child, Command, Output, Stdio};

use nix::sys::signal::Signal;
use serde_json::Value;
use slackwater::host::linux::seqpacket::Channel;
use slackwater::model::FsType::{Ext4, Xfs};
use slackwater_testkit::eventually;

use crate::guard::fixture::{Fixture, ProbeWrite, is_frozen, long, signal};
use crate::guard::hidden::leave_frozen;
use crate::host_linux::scratch::text;

fn slackwater(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_slackwater"))
        .args(arguments)
        .output()
        .unwrap()
}

fn output_of(arguments: &[&str]) -> String {
    let output = slackwater(arguments);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn frozen(fixture: &Fixture, more: &[&str]) -> String {
    let words = [&["frozen", "--state-dir", text(&fixture.state)], more].concat();
    output_of(&words)
}

#[test]
fn frozen_lists_the_holders_of_freezes_and_thaws_them() {
    let kinds = [Ext4, Xfs];
    let fixture = Fixture::new(&kinds);
    assert_eq!(frozen(&fixture, &[]).lines().count(), 1, "only its head");
    assert_eq!(frozen(&fixture, &["--thaw"]).lines().count(), 1);

    let session = fixture.frozen(&kinds, long());
    let table = frozen(&fixture, &[]);
    assert_eq!(table.lines().count(), 3, "{table}");
    assert!(table.contains("v0") && table.contains("held"), "{table}");
    let json: Value = serde_json::from_str(&frozen(&fixture, &["--json"])).unwrap();
    let first = &json["frozen"][0];
    assert_eq!(first["volume"], "v0");
    assert_eq!(first["device"], text(&fixture.volumes[0].device.path));
    assert_eq!(first["owner_pid"], std::process::id());
    assert_eq!(first["state"], "held");
    let seconds = first["until"].as_u64().unwrap() - first["since"].as_u64().unwrap();
    assert!((30..=31).contains(&seconds), "{seconds}");

    // With an explicit option, a held freeze is thawed, too; its cut is lost.
    let json: Value = serde_json::from_str(&frozen(&fixture, &["--thaw", "--json"])).unwrap();
    assert_eq!(json["thawed"], serde_json::json!(["v0", "v1"]));
    for volume in &fixture.volumes {
        ProbeWrite::start(&volume.target).goes_on();
    }
    assert!(!session.thaw(0).unwrap() && !session.thaw(1).unwrap());
    drop(session);
    fixture.assert_all_thawed();
}

#[test]
fn frozen_thaws_file_systems_without_a_holder() {
    let fixture = Fixture::new(&[Ext4]);
    leave_frozen(&fixture, &[Ext4]);
    assert!(frozen(&fixture, &[]).contains("orphaned"));
    assert!(
        is_frozen(&fixture.volumes[0].target),
        "listing changes nothing"
    );
    assert!(frozen(&fixture, &["--thaw"]).contains("v0"));
    fixture.assert_all_thawed();
}

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        signal(self.0.id(), Signal::SIGKILL);
        self.0.wait().unwrap();
    }
}

fn start(arguments: &[&str]) -> Running {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slackwater"));
    command.args(arguments).stdin(Stdio::null());
    Running(command.spawn().unwrap())
}

#[test]
fn a_separate_guard_runs_until_it_receives_a_signal() {
    let fixture = Fixture::new(&[Ext4]);
    let socket = fixture.state.join("guard.sock");
    let words = [
        "guard",
        "--socket",
        text(&socket),
        "--state-dir",
        text(&fixture.state),
    ];
    let mut guard = start(&words);
    eventually("a socket", || socket.exists());
    assert!(
        slackwater(&[words.as_slice(), &["--with-parent"]].concat())
            .status
            .success(),
        "a second guard of a driver is not needed"
    );
    // A guard that a supervisor has started would be restarted for ever, so it waits for its turn.
    let mut next = [start(&words), start(&words)];
    let session = fixture.frozen(&[Ext4], long());
    assert!(
        next.iter_mut()
            .all(|one| one.0.try_wait().unwrap().is_none())
    );
    assert!(session.thaw(0).unwrap());
    drop(session);
    assert!(guard.0.try_wait().unwrap().is_none());
    signal(guard.0.id(), Signal::SIGTERM);
    assert!(guard.0.wait().unwrap().success());
    eventually("the next one's turn", || socket.exists());
    assert!(fixture.frozen(&[Ext4], long()).thaw(0).unwrap());
    for guard in &mut next {
        signal(guard.0.id(), Signal::SIGTERM);
        assert!(guard.0.wait().unwrap().success());
    }
    assert!(!socket.exists());
}

#[test]
fn a_driver_that_starts_thaws_before_it_opens_its_pools() {
    let fixture = Fixture::new(&[Xfs]);
    leave_frozen(&fixture, &[Xfs]);
    crate::guard::fixture::unmount(&fixture.volumes[0].target);
    let folder = fixture.pool.root.join("of-the-driver");
    std::fs::create_dir(&folder).unwrap();
    crate::host_linux::scratch::run(
        "mount",
        &["--bind", text(&fixture.pool.pool), text(&folder)],
    );
    let pool = folder.join("new");
    std::fs::create_dir(&pool).unwrap();
    let socket = fixture.pool.root.join("csi/csi.sock");
    let driver = start(&[
        "serve",
        "--endpoint",
        &format!("unix://{}", text(&socket)),
        "--node-name",
        "n1",
        "--pool",
        &format!("a=file:{},init,mount=any", text(&pool)),
        "--state-dir",
        text(&fixture.state),
        "--node-record",
        text(&fixture.pool.root.join("node.json")),
    ]);
    eventually("a socket", || socket.exists());
    crate::guard::hidden::assert_free(&fixture);
    drop(driver);
}

/// A session whose members cannot be frozen. Returns the errno of the guard's answer.
fn session(channel: &Channel, members: usize) -> u32 {
    let null = std::fs::File::open("/dev/null").unwrap();
    let mut begin = [0; 32];
    for (at, word) in [1, 1, members as u32].into_iter().enumerate() {
        begin[at * 4..at * 4 + 4].copy_from_slice(&word.to_le_bytes());
    }
    // One more for the lock.
    let fds = vec![null.as_fd(); members + 1];
    channel.send_with_fds(&begin, &fds).unwrap();
    let mut answer = [0; 32];
    eventually("an answer", || {
        matches!(channel.receive(&mut answer), Ok(Some(())))
    });
    u32::from_le_bytes([answer[12], answer[13], answer[14], answer[15]])
}

/// The private memory of a process, in KiB.
fn own_memory(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.unwrap().trim().trim_end_matches("kB").trim();
    kib.parse().unwrap()
}

#[test]
fn a_guard_with_its_maximum_of_sessions_stays_within_its_memory_and_refuses_more() {
    let folder = tempfile::Builder::new()
        .prefix("slackwater-load-")
        .tempdir()
        .unwrap();
    let socket = folder.path().join("guard.sock");
    let guard = start(&[
        "guard",
        "--socket",
        text(&socket),
        "--state-dir",
        text(folder.path()),
    ]);
    let connect = || {
        let mut channel = None;
        eventually("a guard that listens", || {
            channel = Channel::connect(&socket).unwrap();
            channel.is_some()
        });
        channel.unwrap()
    };
    // The guard's container has 64 MiB. The pages of the program, and the kernel's memory for
    // threads, come in addition.
    let most = 36 << 10;
    let again = nix::errno::Errno::EAGAIN as u32;
    let admitted = |members| {
        let mut held = None;
        // An ended session counts until its last thread has ended.
        eventually("a free session", || {
            let channel = connect();
            let is_ready = session(&channel, members) == 0;
            held = Some(channel);
            is_ready
        });
        held
    };
    for _ in 0..2 {
        let sessions: Vec<_> = (0..64).map(|_| admitted(4)).collect();
        assert_eq!(session(&connect(), 1), again, "no more sessions");
        let memory = own_memory(guard.0.id());
        assert!(memory < most, "{memory} KiB");
        drop(sessions);
        let _all = [admitted(128), admitted(128)];
        assert_eq!(session(&connect(), 1), again, "no more file systems");
    }
}
