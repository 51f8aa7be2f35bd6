//! Snapshots, groups, restores and clones of volumes that are idle, mounted, raw or thick.

use slackwater::model::{FsType, Level, Wipe};

use crate::fault_sweep::trial::Scenario;
use crate::fault_sweep::{BTRFS, V, XFS, cut_offs, sweep, sweep_repeat, used};
use crate::simulation::cuts::KEPT;
use crate::simulation::import_file::FOREIGN_BYTES;
use crate::simulation::remote::REMOTE_SIZE;
use crate::simulation::{SIZE, Step, VolumeConfig, is_thin};

const S: &str = "s";
const NEW: &str = "new";
const G: &str = "g";
const THREE: &[&str] = &["a", "b", "c"];
const FS: Level = Level::Filesystem;

/// A staged volume with a token that was synced and one that was not. On a raw volume, both are
/// synced.
fn busy(config: VolumeConfig) -> Vec<Step> {
    busy_as(V, config, 7)
}

fn busy_as(name: &'static str, config: VolumeConfig, token: u64) -> Vec<Step> {
    let mut steps = vec![Step::Create(name, config), Step::Stage(name)];
    if config.fs.is_none() {
        steps.push(Step::Publish(name, 0, false));
    }
    steps.push(Step::Write(name, token));
    steps.push(match config.fs {
        Some(_) => Step::WriteUnsynced(name, token + 100),
        None => Step::Write(name, token + 100),
    });
    steps
}

fn three() -> Vec<Step> {
    let configs = [VolumeConfig::EXT4, XFS, BTRFS];
    let each = THREE.iter().zip(configs).zip(10..);
    each.flat_map(|((name, config), token)| busy_as(name, config, token))
        .collect()
}

fn after(mut steps: Vec<Step>, more: &[Step]) -> Vec<Step> {
    steps.extend_from_slice(more);
    steps
}

fn snapshot() -> Step {
    Step::Snapshot(S, V, FS)
}

#[test]
fn snapshot_of_an_idle_volume() {
    for config in [VolumeConfig::EXT4, VolumeConfig::BLOCK] {
        sweep(&used(config), snapshot());
    }
    sweep(&[Step::Create(V, XFS)], snapshot());
}

#[test]
fn snapshot_of_a_mounted_volume() {
    for config in [VolumeConfig::EXT4, XFS, BTRFS] {
        sweep(&busy(config), snapshot());
    }
}

#[test]
fn snapshot_that_freezes_nothing() {
    sweep(&busy(VolumeConfig::BLOCK), snapshot());
    sweep(&busy(XFS), Step::Snapshot(S, V, Level::Crash));
}

#[test]
fn snapshot_of_a_thick_volume() {
    sweep(&used(VolumeConfig::THICK), snapshot());
    sweep(&busy(VolumeConfig::THICK), snapshot());
}

#[test]
fn snapshot_during_foreign_thaws() {
    let (before, act) = (busy(XFS), snapshot());
    Scenario { before, act }.sweep_thaws();
    let (before, act) = (three(), Step::Group(G, THREE));
    Scenario { before, act }.sweep_thaws();
}

#[test]
fn delete_snapshot() {
    for config in [VolumeConfig::EXT4, VolumeConfig::THICK] {
        sweep(&after(busy(config), &[snapshot()]), Step::DeleteSnapshot(S));
    }
}

/// A volume with a base.
fn with_base(config: VolumeConfig) -> Vec<Step> {
    let [base, _] = KEPT;
    let base = [
        Step::Snapshot(base, V, FS),
        Step::DeleteSnapshot(base),
        Step::Write(V, 8),
    ];
    after(busy(config), &base)
}

#[test]
fn delete_snapshot_that_stays_as_a_base() {
    let [first, next] = KEPT;
    for config in [XFS, VolumeConfig::THICK] {
        let created = [Step::Snapshot(first, V, FS)];
        sweep(&after(busy(config), &created), Step::DeleteSnapshot(first));
        let created = [Step::Snapshot(next, V, FS)];
        sweep(
            &after(with_base(config), &created),
            Step::DeleteSnapshot(next),
        );
    }
}

#[test]
fn delete_volume_with_a_base() {
    let unused = [Step::Unstage(V)];
    sweep(&after(with_base(XFS), &unused), Step::Delete(V));
}

#[test]
fn restore() {
    for (config, times) in [
        (VolumeConfig::EXT4, 1),
        (XFS, 2),
        (BTRFS, 2),
        (VolumeConfig::BLOCK, 2),
        (VolumeConfig::THICK, 2),
    ] {
        let before = after(busy(config), &[snapshot()]);
        sweep(&before, Step::Restore(NEW, S, config, times * SIZE));
    }
}

/// An unused volume with a snapshot, which has been written since.
fn changed(config: VolumeConfig) -> Vec<Step> {
    let mut steps = after(used(config), &[snapshot(), Step::Stage(V)]);
    if config.fs.is_none() {
        steps.extend([Step::Publish(V, 0, false), Step::Write(V, 8)]);
        steps.push(Step::Unpublish(V, 0));
    } else {
        steps.push(Step::Write(V, 8));
    }
    after(steps, &[Step::Unstage(V)])
}

#[test]
fn revert() {
    for config in [
        VolumeConfig::EXT4,
        XFS,
        BTRFS,
        VolumeConfig::BLOCK,
        VolumeConfig::THICK,
        VolumeConfig::EXT4.wiped(Wipe::Zero),
    ] {
        for act in [Step::Revert(V, S), Step::AbortRevert(V, S)] {
            let before = changed(config);
            Scenario { before, act }.sweep_once();
        }
    }
}

#[test]
fn stage_of_a_reverted_volume() {
    for config in [XFS, VolumeConfig::BLOCK, VolumeConfig::THICK] {
        let more = [Step::Expand(V, 2 * SIZE), Step::Revert(V, S)];
        sweep(&after(changed(config), &more), Step::Stage(V));
    }
}

#[test]
fn start_with_what_a_crash_left_of_a_revert() {
    for config in [XFS, VolumeConfig::THICK] {
        for act in [Step::Revert(V, S), Step::AbortRevert(V, S)] {
            for mut before in cut_offs(&changed(config), &act) {
                before.push(Step::Start);
                let act = act.clone();
                Scenario { before, act }.sweep_crashes();
            }
        }
    }
}

#[test]
fn import_file() {
    // Images of thin pools share no blocks with files.
    if is_thin() {
        return;
    }
    for times in [1, 2] {
        let before = [Step::WriteForeign];
        sweep(&before, Step::ImportFile(NEW, times * FOREIGN_BYTES));
        sweep_repeat(&before, Step::ImportFile(NEW, times * FOREIGN_BYTES));
    }
    // Beside a volume that was imported from the same file.
    let imported = Step::ImportFile(V, FOREIGN_BYTES);
    sweep(
        &[Step::WriteForeign, imported.clone()],
        Step::ImportFile(NEW, FOREIGN_BYTES),
    );
    sweep(&[Step::WriteForeign, imported], Step::Delete(V));
}

#[test]
fn receive() {
    for (config, times) in [
        (VolumeConfig::EXT4, 1),
        (VolumeConfig::BLOCK, 1),
        (VolumeConfig::THICK, 2),
    ] {
        sweep(&[], Step::Receive(NEW, config, times * REMOTE_SIZE));
    }
    // What a cut off call has received is continued, or deleted.
    let call = Step::Receive(NEW, VolumeConfig::EXT4, REMOTE_SIZE);
    for mut before in cut_offs(&[], &call) {
        before.push(Step::Start);
        let act = call.clone();
        Scenario { before, act }.sweep_crashes();
    }
}

#[test]
fn stage_of_a_received_volume() {
    let config = VolumeConfig::EXT4;
    let received = [Step::Receive(NEW, config, 2 * REMOTE_SIZE)];
    sweep(&received, Step::Stage(NEW));
}

#[test]
fn restore_of_a_deleted_volume() {
    let gone = [snapshot(), Step::Delete(V)];
    sweep(&after(used(XFS), &gone), Step::Restore(NEW, S, XFS, SIZE));
}

#[test]
fn clone() {
    for config in [VolumeConfig::EXT4, BTRFS, VolumeConfig::BLOCK] {
        sweep(&used(config), Step::Clone(NEW, V, config, SIZE));
        sweep(&busy(config), Step::Clone(NEW, V, config, 2 * SIZE));
    }
}

#[test]
fn stage_of_a_restored_volume() {
    for config in [VolumeConfig::EXT4, XFS, BTRFS, VolumeConfig::THICK] {
        let copies = [snapshot(), Step::Restore(NEW, S, config, 2 * SIZE)];
        sweep(&after(busy(config), &copies), Step::Stage(NEW));
    }
}

#[test]
fn group() {
    let (before, act) = (three(), Step::Group(G, THREE));
    Scenario { before, act }.sweep_once();
    // With two volumes, also what follows a failure.
    let mut before = busy_as("a", XFS, 1);
    before.extend(busy_as("b", VolumeConfig::EXT4, 2));
    sweep(&before, Step::Group(G, &THREE[..2]));
}

#[test]
fn group_of_partly_used_volumes() {
    let mut before = busy_as("a", XFS, 1);
    before.extend([
        Step::Create("b", VolumeConfig::BLOCK),
        Step::Create("c", VolumeConfig::THICK),
    ]);
    let act = Step::Group(G, THREE);
    Scenario { before, act }.sweep_once();
}

#[test]
fn delete_group() {
    sweep(
        &after(three(), &[Step::Group(G, THREE)]),
        Step::DeleteGroup(G),
    );
}

#[test]
fn repeats_of_interrupted_cuts() {
    sweep_repeat(&busy(VolumeConfig::EXT4), snapshot());
    sweep_repeat(&after(busy(XFS), &[snapshot()]), Step::DeleteSnapshot(S));
    let received = Step::Receive(NEW, VolumeConfig::EXT4, REMOTE_SIZE);
    sweep_repeat(&[], received);
    sweep_repeat(
        &after(busy(BTRFS), &[snapshot()]),
        Step::Restore(NEW, S, BTRFS, 2 * SIZE),
    );
}

#[test]
fn start_with_what_a_crash_left_of_a_cut() {
    let created = || after(busy(VolumeConfig::EXT4), &[snapshot()]);
    let calls = [
        (busy(VolumeConfig::EXT4), snapshot()),
        (busy(VolumeConfig::THICK), snapshot()),
        (created(), Step::DeleteSnapshot(S)),
        (
            created(),
            Step::Restore(NEW, S, VolumeConfig::fs(FsType::Ext4), 2 * SIZE),
        ),
        (busy(BTRFS), Step::Clone(NEW, V, BTRFS, SIZE)),
        (three(), Step::Group(G, THREE)),
        (
            after(three(), &[Step::Group(G, THREE)]),
            Step::DeleteGroup(G),
        ),
    ];
    for (mut before, call) in calls {
        before.push(Step::GuardDies);
        for before in cut_offs(&before, &call) {
            let act = Step::Start;
            Scenario { before, act }.sweep_crashes();
        }
    }
}
