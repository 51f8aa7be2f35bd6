//! `slackwater frozen`, `slackwater guard` by itself, and the start of `slackwater serve`.

use std::os::fd::AsFd;
use std::process::{Child, Command, Output, Stdio};

use nix::sys::signal::Signal;
use serde_json::Value;
use slackwater::host::linux::seqpacket::Channel;
use slackwater::model::FsType::{Ext4, Xfs};

use crate::bench::{Bench, Write_, eventually_within, is_frozen, long, signal};
use crate::hidden::leave_frozen;
use crate::scratch::text;

fn slackwater(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_slackwater"))
        .args(arguments)
        .output()
        .unwrap()
}

fn told(arguments: &[&str]) -> String {
    let output = slackwater(arguments);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn frozen(bench: &Bench, more: &[&str]) -> String {
    let words = [&["frozen", "--state-dir", text(&bench.state)], more].concat();
    told(&words)
}

#[test]
fn frozen_lists_who_holds_what_and_thaws_it() {
    let kinds = [Ext4, Xfs];
    let bench = Bench::new(&kinds);
    assert_eq!(frozen(&bench, &[]).lines().count(), 1, "only its head");
    assert_eq!(frozen(&bench, &["--thaw"]).lines().count(), 1);

    let session = bench.frozen(&kinds, long());
    let table = frozen(&bench, &[]);
    assert_eq!(table.lines().count(), 3, "{table}");
    assert!(table.contains("v0") && table.contains("held"), "{table}");
    let json: Value = serde_json::from_str(&frozen(&bench, &["--json"])).unwrap();
    let first = &json["frozen"][0];
    assert_eq!(first["volume"], "v0");
    assert_eq!(first["device"], text(&bench.volumes[0].device.path));
    assert_eq!(first["owner_pid"], std::process::id());
    assert_eq!(first["state"], "held");
    let seconds = first["until"].as_u64().unwrap() - first["since"].as_u64().unwrap();
    assert!((30..=31).contains(&seconds), "{seconds}");

    // Said explicitly, what is held is thawed, too; its cut is lost.
    let json: Value = serde_json::from_str(&frozen(&bench, &["--thaw", "--json"])).unwrap();
    assert_eq!(json["thawed"], serde_json::json!(["v0", "v1"]));
    for volume in &bench.volumes {
        Write_::start(&volume.target).goes_on();
    }
    assert!(!session.thaw(0).unwrap() && !session.thaw(1).unwrap());
    drop(session);
    bench.assert_all_thawed();
}

#[test]
fn frozen_thaws_what_nobody_holds() {
    let bench = Bench::new(&[Ext4]);
    leave_frozen(&bench, &[Ext4]);
    assert!(frozen(&bench, &[]).contains("orphaned"));
    assert!(
        is_frozen(&bench.volumes[0].target),
        "a look changes nothing"
    );
    assert!(frozen(&bench, &["--thaw"]).contains("v0"));
    bench.assert_all_thawed();
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
fn a_guard_by_itself_lives_until_it_is_told_to_end() {
    let bench = Bench::new(&[Ext4]);
    let socket = bench.state.join("guard.sock");
    let words = [
        "guard",
        "--socket",
        text(&socket),
        "--state-dir",
        text(&bench.state),
    ];
    let mut guard = start(&words);
    eventually_within("a socket", || socket.exists());
    assert!(
        slackwater(&[words.as_slice(), &["--with-parent"]].concat())
            .status
            .success(),
        "a second one of a driver isn't needed"
    );
    // One that a supervisor has started would be started for ever: it waits for its turn.
    let mut next = [start(&words), start(&words)];
    let session = bench.frozen(&[Ext4], long());
    assert!(
        next.iter_mut()
            .all(|one| one.0.try_wait().unwrap().is_none())
    );
    assert!(session.thaw(0).unwrap());
    drop(session);
    assert!(guard.0.try_wait().unwrap().is_none());
    signal(guard.0.id(), Signal::SIGTERM);
    assert!(guard.0.wait().unwrap().success());
    eventually_within("the next one's turn", || socket.exists());
    assert!(bench.frozen(&[Ext4], long()).thaw(0).unwrap());
    for guard in &mut next {
        signal(guard.0.id(), Signal::SIGTERM);
        assert!(guard.0.wait().unwrap().success());
    }
    assert!(!socket.exists());
}

#[test]
fn a_driver_that_starts_thaws_before_it_opens_its_pools() {
    let bench = Bench::new(&[Xfs]);
    leave_frozen(&bench, &[Xfs]);
    crate::bench::unmount(&bench.volumes[0].target);
    let folder = bench.pool.root.join("of-the-driver");
    std::fs::create_dir(&folder).unwrap();
    crate::scratch::run("mount", &["--bind", text(&bench.pool.pool), text(&folder)]);
    let pool = folder.join("new");
    std::fs::create_dir(&pool).unwrap();
    let socket = bench.pool.root.join("csi/csi.sock");
    let driver = start(&[
        "serve",
        "--endpoint",
        &format!("unix://{}", text(&socket)),
        "--node-name",
        "n1",
        "--pool",
        &format!("a=file:{},init,mount=any", text(&pool)),
        "--state-dir",
        text(&bench.state),
        "--node-record",
        text(&bench.pool.root.join("node.json")),
    ]);
    eventually_within("a socket", || socket.exists());
    crate::hidden::assert_free(&bench);
    drop(driver);
}

/// A session of nothing that could be frozen: the errno of the guard's answer.
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
    eventually_within("an answer", || {
        matches!(channel.receive(&mut answer), Ok(Some(())))
    });
    u32::from_le_bytes([answer[12], answer[13], answer[14], answer[15]])
}

/// Memory of its own of a process, in KiB.
fn own_memory(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.unwrap().trim().trim_end_matches("kB").trim();
    kib.parse().unwrap()
}

#[test]
fn a_guard_that_holds_all_that_it_takes_stays_within_its_memory_and_refuses_more() {
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
        eventually_within("a guard that listens", || {
            channel = Channel::connect(&socket).unwrap();
            channel.is_some()
        });
        channel.unwrap()
    };
    // Its container has 64 MiB; the pages of the program, and what the kernel keeps for threads,
    // come on top.
    let most = 36 << 10;
    let again = nix::errno::Errno::EAGAIN as u32;
    let admitted = |members| {
        let mut held = None;
        // What has ended counts until its last thread has.
        eventually_within("a place", || {
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
