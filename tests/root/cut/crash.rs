//! The driver is killed or stopped before and after each effect of a group's cut, of a restore and
//! of their deletes, while writers run. No file system stays frozen. A repeat with the same name
//! results in a consistent group, which never has members of two attempts.
//!
//! The process itself counts effects, so a new effect is covered without being listed.

use nix::sys::signal::Signal;

use super::order::{Volume, Writers, counters, is_consistent, staged};
use super::{GIB, Node, rounds};
use slackwater_testkit::snapshots::{from_snapshot, members};
use slackwater_testkit::{WAIT_TIMEOUT, eventually, mount};

type Class = [(&'static str, &'static str); 2];
/// For a stopped driver: its freeze ends soon, and need not succeed.
const SHORT: Class = [("freezeTimeout", "500ms"), ("retries", "0")];
const LONG: Class = [("freezeTimeout", "30s"), ("retries", "0")];

struct Sweep {
    node: Node,
    volumes: Vec<Volume>,
    ids: Vec<String>,
    writers: Writers,
    armed: bool,
}

impl Sweep {
    async fn new() -> Sweep {
        let node = Node::new();
        let volumes = staged(&node, &["ext4", "xfs"]).await;
        let ids = volumes.iter().map(|volume| volume.id.clone()).collect();
        let writers = Writers::start(&volumes);
        Sweep {
            node,
            volumes,
            ids,
            writers,
            armed: false,
        }
    }

    /// Restarts the driver with a fault at its n-th effect.
    fn arm(&mut self, fault: &str) {
        let gate = self.node.scratch.join("gate");
        let _ = std::fs::remove_file(&gate);
        let faults = format!("{fault},effect.all:after={}", gate.display());
        self.node
            .server
            .restart_with(&[("SLACKWATER_FAULT", &faults)]);
        std::fs::write(gate, "").unwrap();
        self.node.client = self.node.server.client();
        self.armed = true;
    }

    /// Whether it was restarted since a fault was planned.
    fn restarted(&self) -> bool {
        !self.armed
    }

    fn disarm(&mut self) {
        self.armed = false;
        self.node.server.restart_with(&[]);
        self.node.client = self.node.server.client();
    }

    /// The writers make progress: no volume is frozen.
    fn assert_flowing(&self, context: &str) {
        self.writers.assert_flowing(context);
    }

    /// All listed snapshots belong to complete groups.
    async fn assert_none_or_all(&self, context: &str) {
        let listed = self.node.client.snapshots("").await.unwrap().len();
        assert!(
            listed.is_multiple_of(self.ids.len()),
            "{context}: {listed} are listed"
        );
    }

    async fn end(self) {
        drop(self.writers);
        for volume in &self.volumes {
            self.node
                .unstage_and_delete(&volume.id, &volume.staging)
                .await;
        }
        self.node.assert_nothing_left();
    }
}

/// Causes one fault in the cut of a group. Returns false if the call has fewer effects.
async fn cut_with(sweep: &mut Sweep, fault: &str, name: &str) -> bool {
    sweep.arm(fault);
    let client = sweep.node.client.clone();
    let (ids, asked) = (sweep.ids.clone(), name.to_string());
    let stops = fault.contains("stop");
    let class = if stops { SHORT } else { LONG };
    let call = tokio::spawn(async move { client.group(&asked, &ids, &class).await });
    if stops {
        eventually(
            &format!("{fault}: the driver is stopped, or the call is done"),
            || sweep.node.server.is_stopped() || call.is_finished(),
        );
        sweep.assert_flowing(fault);
        sweep.node.server.signal(Signal::SIGCONT);
    }
    let answer = tokio::time::timeout(WAIT_TIMEOUT, call).await;
    let answer = answer
        .unwrap_or_else(|_| panic!("{fault}: the call hangs"))
        .unwrap();
    let lived = sweep.node.server.is_alive();
    sweep.assert_flowing(fault);
    sweep.disarm();
    sweep.assert_flowing(fault);
    sweep.assert_none_or_all(fault).await;

    // An existing group belongs to the class of its request.
    let class = if answer.is_ok() { class } else { LONG };
    let again = sweep.node.client.group(name, &sweep.ids, &class).await;
    let group =
        again.unwrap_or_else(|status| panic!("{fault}: {status}\n{}", sweep.node.server.log()));
    if let Ok(first) = &answer {
        assert_eq!(first, &group, "{fault}: an answer stays");
    }
    let snapshots = members(&group);
    for row in counters(&sweep.node, &sweep.volumes, &snapshots).await {
        assert!(is_consistent(&row), "{fault}: {row:?}");
    }
    let id = &group.group_snapshot_id;
    sweep
        .node
        .client
        .delete_group(id, &snapshots)
        .await
        .unwrap();
    sweep.assert_none_or_all(fault).await;
    assert_eq!(
        sweep.node.disk.snapshots().len(),
        0,
        "{fault}: nothing is left"
    );
    !(lived && answer.is_ok())
}

/// Causes faults at each effect until the call has no more; `step` skips some.
async fn sweep_cut(mode: &str, step: usize) -> usize {
    let mut sweep = Sweep::new().await;
    let mut swept = 0;
    for n in (1..).step_by(step) {
        let fault = format!("effect.{n}:{mode}");
        if !cut_with(&mut sweep, &fault, &format!("g-{n}")).await {
            break;
        }
        swept += 1;
    }
    sweep.end().await;
    swept
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_killed_before_any_effect_of_a_cut_leaves_nothing_frozen_or_torn() {
    assert!(sweep_cut("kill", 1).await > 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_killed_after_an_effect_of_a_cut_leaves_nothing_frozen_or_torn() {
    let step = rounds(3, 1);
    assert!(sweep_cut("kill-after", step).await > 20 / step);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_stopped_in_a_cut_blocks_no_writer_beyond_the_deadline() {
    let step = rounds(4, 1);
    let mut sweep = Sweep::new().await;
    // A stopped driver continues, so only the number of effects shows the end.
    for n in (1..60).step_by(step) {
        let fault = format!("effect.{n}:stop");
        cut_with(&mut sweep, &fault, &format!("g-{n}")).await;
    }
    sweep.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_killed_in_a_restore_or_a_delete_finishes_it_when_the_call_is_repeated() {
    let mut sweep = Sweep::new().await;
    let volume = sweep.ids[1].clone();
    let snapshot = sweep.node.client.snapshot("s", &volume, &[]).await.unwrap();
    let snapshot = snapshot.snapshot_id;
    let mut swept = 0;
    for n in 1.. {
        sweep.arm(&format!("effect.{n}:kill"));
        let source = from_snapshot(&snapshot);
        let make = |client: slackwater_testkit::Client| {
            let source = source.clone();
            async move {
                client
                    .create_from("r", GIB, mount("xfs"), source, &[])
                    .await
            }
        };
        let mut restored = make(sweep.node.client.clone()).await;
        if restored.is_err() {
            sweep.disarm();
            restored = make(sweep.node.client.clone()).await;
        }
        let restored = restored.unwrap().volume_id;
        let deleted = sweep.node.client.delete(&restored).await;
        let lived = sweep.node.server.is_alive();
        if deleted.is_err() {
            sweep.disarm();
            sweep.node.client.delete(&restored).await.unwrap();
        }
        assert_eq!(sweep.node.disk.volumes().len(), sweep.ids.len(), "{n}");
        // The driver neither died nor restarted: the fault is beyond the last effect.
        if lived && deleted.is_ok() && !sweep.restarted() {
            break;
        }
        swept += 1;
    }
    assert!(swept > 10, "{swept}");
    sweep.disarm();
    sweep.node.client.delete_snapshot(&snapshot).await.unwrap();
    sweep.end().await;
}
