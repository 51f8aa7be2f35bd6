//! Hooks of a configuration file with the real driver on real disks: the order, retries, fallback
//! levels, several hooks of one volume, and sessions that misbehave.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tonic::Code;

use super::held::{Probe, Release, await_stop, end_of, go_on};
use super::{GIB, MIB, Node, refused};
use slackwater_testkit::{Scratch, eventually, mount};

/// Each hook is named after its claim; `two` has two hooks. `$0` is the script, and its name is the
/// prefix of the names of its files.
const HOOKS: [(&str, &str); 8] = [
    ("good", GOOD),
    // Its third start is the first that succeeds.
    (
        "flaky",
        "[ $(wc -l < $0.starts) -ge 3 ] || exit 1; echo READY; cat > /dev/null",
    ),
    ("mute", "cat > /dev/null; echo released >> $0.log"),
    ("early", "echo no database >&2; exit 3"),
    // Its shell handles SIGTERM only after its child has ended.
    (
        "deaf",
        "trap 'echo released >> $0.log; exit 0' TERM; echo READY; while :; do sleep 0.1; done",
    ),
    ("a-two", GOOD),
    ("b-two", GOOD),
    (
        "mortal",
        "echo $$ > $0.pid; echo READY; exec cat > /dev/null",
    ),
];
const GOOD: &str =
    "echo 0 quiesced >> effects; echo READY; cat > /dev/null; echo 0 released >> effects";

/// The folder of all hooks.
fn folder(scratch: &Scratch) -> PathBuf {
    scratch.join("hooks")
}

fn config(scratch: &Scratch) -> String {
    scratch.dir("hooks");
    let mut text = String::new();
    for (name, body) in HOOKS {
        let program = folder(scratch).join(name);
        let folder = folder(scratch);
        let folder = folder.display();
        std::fs::write(
            &program,
            format!("cd {folder}\ndate +%s%N >> $0.starts\n{body}\n"),
        )
        .unwrap();
        let claim = name.rsplit('-').next().unwrap();
        let command = ["/bin/sh", program.to_str().unwrap()];
        text +=
            &format!("[[hook]]\nname = \"{name}\"\ncommand = {command:?}\npvc = \"t/{claim}\"\n");
    }
    text
}

fn node(environment: &[(&str, &str)]) -> Node {
    Node::configured("xfs", 8 * GIB, config, environment)
}

/// The lines of a file that a hook has written.
fn file(node: &Node, name: &str) -> Vec<String> {
    let text = std::fs::read_to_string(folder(&node.scratch).join(name)).unwrap_or_default();
    text.lines().map(Into::into).collect()
}

fn starts(node: &Node, hook: &str) -> usize {
    file(node, &format!("{hook}.starts")).len()
}

/// Creates and stages a volume of a claim.
async fn volume(node: &Node, claim: &str) -> (String, PathBuf) {
    let parameters = [
        ("csi.storage.k8s.io/pvc/namespace", "t"),
        ("csi.storage.k8s.io/pvc/name", claim),
    ];
    let created = node
        .client
        .create(claim, 64 * MIB, mount("ext4"), &parameters);
    let id = created.await.unwrap();
    let staging = node.staging(claim);
    let staged = node.client.stage(&id, &staging, mount("ext4")).await;
    staged.unwrap();
    (id, staging)
}

/// A class of level application.
fn class<'a>(more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let mut class = vec![
        ("consistency", "application"),
        ("quiesceTimeout", "120s"),
        ("freezeTimeout", "30s"),
        ("retries", "0"),
        ("retryInterval", "10ms"),
    ];
    for (key, value) in more {
        class.retain(|(given, _)| given != key);
        class.push((key, value));
    }
    class
}

/// A snapshot in the output of `slackwater volumes`.
fn listed_snapshot(node: &Node, name: &str) -> Value {
    let all = node.cli_snapshots();
    let one = all.into_iter().find(|snapshot| snapshot["name"] == name);
    one.unwrap_or_else(|| panic!("{name} is not listed"))
}

/// Creates a snapshot. Returns its level, and the reason why it is not higher.
async fn snapshot_level(
    node: &Node,
    name: &str,
    volume: &str,
    more: &[(&str, &str)],
) -> (String, String) {
    let snapshot = node.client.snapshot(name, volume, &class(more)).await;
    let snapshot = snapshot.unwrap_or_else(|status| panic!("{name}: {status}"));
    let listed = listed_snapshot(node, name);
    assert_eq!(listed["id"], snapshot.snapshot_id);
    let deleted = node.client.delete_snapshot(&snapshot.snapshot_id).await;
    deleted.unwrap();
    let text = |key: &str| listed[key].as_str().unwrap().to_string();
    (text("level"), text("reason"))
}

async fn end(node: &Node, volumes: Vec<(String, PathBuf)>) {
    for (id, staging) in volumes {
        Probe::start(&staging).goes_on();
        node.unstage_and_delete(&id, &staging).await;
    }
    node.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_order_is_quiesce_freeze_cut_thaw_release_and_then_commit() {
    let mut node = node(&[]);
    let one = volume(&node, "good").await;
    let effects = folder(&node.scratch).join("effects");
    let log = format!("effect.all:log={}", effects.display());
    node.restart_with(&[("SLACKWATER_FAULT", &log)]);
    let _ = std::fs::remove_file(&effects);
    let (level, reason) = snapshot_level(&node, "s", &one.0, &[]).await;
    assert_eq!((level.as_str(), reason.as_str()), ("application", ""));
    let order = file(&node, "effects");
    let names: Vec<_> = order
        .iter()
        .filter_map(|line| Some(line.split_once(' ')?.1))
        .collect();
    let first = |name: &str| names.iter().position(|n| *n == name).expect(name);
    let last = |name: &str| names.iter().rposition(|n| *n == name).expect(name);
    for (before, after) in [
        // Everything possible is done while the application runs.
        (first("guard_sync"), last("clone_ahead")),
        (last("clone_ahead"), first("start_session")),
        (first("start_session"), first("quiesced")),
        (first("quiesced"), last("guard_sync")),
        (last("guard_sync"), first("guard_freeze")),
        (first("guard_freeze"), last("clone_rest")),
        (last("clone_rest"), first("guard_thaw")),
        (last("guard_thaw"), first("released")),
    ] {
        assert!(before < after, "{names:?}");
    }
    // In the window there is only the cut: the journal is written before it, and everything else
    // after it.
    let window = names[first("guard_freeze")..=last("guard_thaw")].join(" ");
    let journal = "write_file sync_file rename sync_dir";
    assert_eq!(
        window,
        format!("guard_freeze {journal} clone_rest guard_thaw")
    );
    let released = &names[first("released")..];
    assert!(released.contains(&"sync_file"), "{names:?}");
    group_of_two(&node, one).await;
}

/// All applications of a group are held before the first file system is frozen, until the last one
/// is thawed.
async fn group_of_two(node: &Node, one: (String, PathBuf)) {
    let two = volume(node, "two").await;
    let effects = folder(&node.scratch).join("effects");
    std::fs::remove_file(&effects).unwrap();
    let ids = [one.0.clone(), two.0.clone()];
    let group = node.client.group("g", &ids, &class(&[])).await.unwrap();
    let order = file(node, "effects");
    let places = |name: &str| -> Vec<usize> {
        let named = |line: &String| line.split_once(' ').is_some_and(|(_, its)| its == name);
        let places = order.iter().enumerate();
        places.filter(|(_, l)| named(l)).map(|(at, _)| at).collect()
    };
    let (quiesced, released) = (places("quiesced"), places("released"));
    assert_eq!((quiesced.len(), released.len()), (3, 3), "{order:?}");
    let (frozen, thawed) = (places("guard_freeze"), places("guard_thaw"));
    assert_eq!((frozen.len(), thawed.len()), (1, 2), "{order:?}");
    assert!(
        quiesced[2] < frozen[0] && thawed[1] < released[0],
        "{order:?}"
    );
    let levels = node.cli_snapshots();
    assert!(levels.iter().all(|listed| listed["level"] == "application"));
    let members = slackwater_testkit::snapshots::members(&group);
    let id = &group.group_snapshot_id;
    node.client.delete_group(id, &members).await.unwrap();
    end(node, vec![one, two]).await;
}

/// Fails until the third try.
async fn tried_again(node: &Node, volume: &str) {
    let more = [("retries", "2"), ("retryInterval", "300ms")];
    let (level, _) = snapshot_level(node, "flaky", volume, &more).await;
    assert_eq!(level, "application");
    let starts: Vec<u64> = file(node, "flaky.starts")
        .iter()
        .map(|nanos| nanos.parse().unwrap())
        .collect();
    assert_eq!(starts.len(), 3);
    for pair in starts.windows(2) {
        assert!(pair[1] - pair[0] >= 300_000_000, "{starts:?}: an interval");
    }
}

/// Never prints READY: this is reported at the timeout, remembered, and answered with a lower
/// level.
async fn never_ready(node: &Node, volume: &str) {
    let more = [("retries", "1"), ("quiesceTimeout", "300ms")];
    let client = &node.client;
    for _ in 0..3 {
        let response = client.snapshot("mute", volume, &class(&more)).await;
        let response = refused(response, Code::FailedPrecondition);
        assert!(
            response.contains("mute") && response.contains("READY within 300 ms"),
            "{response}"
        );
        assert!(response.contains("paused for"), "{response}");
        assert_eq!(starts(node, "mute"), 2, "repeats disturb no application");
    }
    assert_eq!(file(node, "mute.log").len(), 2, "it was released each time");
    for level in ["filesystem", "crash"] {
        let more = [("quiesceTimeout", "200ms"), ("onQuiesceFailure", level)];
        let (reached, reason) = snapshot_level(node, &format!("mute-{level}"), volume, &more).await;
        assert_eq!(reached, level);
        assert!(
            reason.contains("application was requested") && reason.contains("mute"),
            "{reason}"
        );
    }
}

/// Ends before it is ready.
async fn ends_early(node: &Node, volume: &str) {
    let response = node.client.snapshot("early", volume, &class(&[])).await;
    let response = refused(response, Code::FailedPrecondition);
    assert!(
        response.contains("no database"),
        "its output is in the error: {response}"
    );
    // The volume is paused, whatever the name of the snapshot; a lower level needs no hook.
    let response = node.client.snapshot("early-2", volume, &class(&[])).await;
    let response = refused(response, Code::FailedPrecondition);
    assert!(response.contains("paused for"), "{response}");
    assert_eq!(starts(node, "early"), 1);
    let lower = [("consistency", "filesystem")];
    let (level, _) = snapshot_level(node, "early-3", volume, &lower).await;
    assert_eq!(level, "filesystem");
    assert_eq!(starts(node, "early"), 1);
}

/// Does not read its stdin: the cut succeeds, and the hook is terminated.
async fn deaf(node: &Node, volume: &str) {
    let (level, _) = snapshot_level(node, "deaf", volume, &[]).await;
    assert_eq!(level, "application");
    assert_eq!(file(node, "deaf.log"), ["released"]);
    let log = node.server.log();
    assert!(log.contains("hook deaf did not exit within"), "{log}");
}

async fn shared(node: &Node, volume: &str) {
    for (shared, a, b) in [("all", 1, 1), ("one", 2, 1), ("skip", 2, 1)] {
        let more = [("sharedVolume", shared)];
        let (level, reason) = snapshot_level(node, &format!("two-{shared}"), volume, &more).await;
        let counted = [starts(node, "a-two"), starts(node, "b-two")];
        assert_eq!(counted, [a, b], "{shared}");
        if shared == "skip" {
            assert_eq!(level, "filesystem");
            assert!(reason.contains("a-two, b-two"), "{reason}");
        } else {
            assert_eq!(level, "application", "{shared}");
        }
    }
    let fail = class(&[("sharedVolume", "fail")]);
    let response = node.client.snapshot("two-fail", volume, &fail).await;
    assert!(refused(response, Code::FailedPrecondition).contains("a-two, b-two"));
    assert_eq!([starts(node, "a-two"), starts(node, "b-two")], [2, 1]);
}

/// A volume without a hook.
async fn without(node: &Node, volume: &str) {
    let response = node.client.snapshot("none", volume, &class(&[])).await;
    let response = refused(response, Code::FailedPrecondition);
    assert!(
        response.contains("[[hook]]"),
        "the solution is named: {response}"
    );
    let falls = [("onQuiesceFailure", "filesystem")];
    let (level, reason) = snapshot_level(node, "none", volume, &falls).await;
    assert_eq!(level, "filesystem");
    assert!(reason.contains("no hook is configured"), "{reason}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_that_misbehave_are_reported_retried_or_replaced_by_a_lower_level() {
    let node = node(&[]);
    let mut volumes = Vec::new();
    for claim in ["flaky", "mute", "early", "deaf", "two", "none"] {
        volumes.push(volume(&node, claim).await);
    }
    let id = |n: usize| volumes[n].0.as_str();
    tokio::join!(
        tried_again(&node, id(0)),
        never_ready(&node, id(1)),
        ends_early(&node, id(2)),
        deaf(&node, id(3)),
        shared(&node, id(4)),
        without(&node, id(5)),
    );
    end(&node, volumes).await;
}

fn kill_session(node: &Node) {
    let pid = file(node, "mortal.pid").pop().unwrap().parse().unwrap();
    let pid = nix::unistd::Pid::from_raw(pid);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    let stat = Path::new("/proc").join(pid.to_string()).join("stat");
    // Its parent, the driver, is stopped.
    eventually("its end", || {
        let stat = std::fs::read_to_string(&stat).unwrap_or_default();
        stat.is_empty() || stat.contains(") Z ")
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_dies_in_the_window_lowers_the_level_and_does_not_end_the_freeze() {
    let mut node = node(&[]);
    let one = volume(&node, "mortal").await;
    for (name, more, level) in [
        ("a", ("onQuiesceFailure", "fail"), None),
        ("b", ("onQuiesceFailure", "filesystem"), Some("filesystem")),
        ("c", ("retries", "1"), Some("application")),
    ] {
        node.restart_with(&[("SLACKWATER_FAULT", "effect.guard_freeze:stop-after")]);
        let release = Release::of(&node);
        let starts_before = starts(&node, "mortal");
        let (client, id) = (node.client.clone(), one.0.clone());
        let call = tokio::spawn(async move {
            let class = class(&[more]);
            client.snapshot(name, &id, &class).await
        });
        await_stop(&node);
        assert!(Probe::start(&one.1).is_stopped());
        kill_session(&node);
        go_on(&node);
        let answer = end_of(call).await;
        Probe::start(&one.1).goes_on();
        drop(release);
        let Some(level) = level else {
            let response = refused(answer, Code::FailedPrecondition);
            assert!(
                response.contains("before the cut was complete"),
                "{response}"
            );
            assert!(node.disk.snapshots().is_empty());
            continue;
        };
        let snapshot = answer.unwrap().snapshot_id;
        let listed = listed_snapshot(&node, name);
        assert_eq!(listed["level"], level, "{listed}");
        let again = usize::from(level == "application");
        assert_eq!(starts(&node, "mortal"), starts_before + 1 + again);
        node.client.delete_snapshot(&snapshot).await.unwrap();
    }
    node.restart_with(&[]);
    end(&node, vec![one]).await;
}

/// Killed in the window: the session releases by itself, the file system is thawed, and a repeat of
/// the call is answered.
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_is_killed_in_the_window_releases_its_applications() {
    let mut node = node(&[]);
    let one = volume(&node, "good").await;
    let held = ["0 quiesced", "0 released"].as_slice();
    for (step, held) in [
        // Before the hooks.
        ("guard_sync", &[][..]),
        ("clone_ahead", &[]),
        ("guard_freeze", held),
        ("guard_thaw", held),
    ] {
        let effects = folder(&node.scratch).join("effects");
        let _ = std::fs::remove_file(&effects);
        let fault = format!("effect.{step}:kill-after");
        node.restart_with(&[("SLACKWATER_FAULT", &fault)]);
        let release = Release::of(&node);
        let asked = node.client.snapshot("s", &one.0, &class(&[])).await;
        asked.unwrap_err();
        assert_eq!(node.server.wait(), None, "{step}: the driver was killed");
        eventually("the session has released by itself", || {
            file(&node, "effects") == held
        });
        // Only the guard could thaw it.
        Probe::start(&one.1).goes_on();
        drop(release);
        node.restart_with(&[]);
        assert_eq!(node.cli_snapshots().len(), 0, "{step}: nothing is listed");
        let (level, _) = snapshot_level(&node, "s", &one.0, &[]).await;
        assert_eq!(level, "application", "{step}");
    }
    end(&node, vec![one]).await;
}
