//! Snapshots, groups, restores and clones: of volumes that are quiet, mounted, raw or thick.

use slackwater::model::{FsType, Level};

use crate::trial::Scenario;
use crate::world::{How, SIZE, Step};
use crate::{BTRFS, V, XFS, cut_offs, sweep, sweep_repeat, used};

const S: &str = "s";
const NEW: &str = "new";
const G: &str = "g";
const THREE: &[&str] = &["a", "b", "c"];
const FS: Level = Level::Filesystem;

/// A staged volume with a token that was synced and one that wasn't; of a raw one both are.
fn busy(how: How) -> Vec<Step> {
    busy_as(V, how, 7)
}

fn busy_as(name: &'static str, how: How, token: u64) -> Vec<Step> {
    let mut steps = vec![Step::Create(name, how), Step::Stage(name)];
    if how.fs.is_none() {
        steps.push(Step::Publish(name, 0, false));
    }
    steps.push(Step::Write(name, token));
    steps.push(match how.fs {
        Some(_) => Step::WriteUnsynced(name, token + 100),
        None => Step::Write(name, token + 100),
    });
    steps
}

fn three() -> Vec<Step> {
    let hows = [How::EXT4, XFS, BTRFS];
    let each = THREE.iter().zip(hows).zip(10..);
    each.flat_map(|((name, how), token)| busy_as(name, how, token))
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
fn snapshot_of_what_nobody_uses() {
    for how in [How::EXT4, How::BLOCK] {
        sweep(&used(how), snapshot());
    }
    sweep(&[Step::Create(V, XFS)], snapshot());
}

#[test]
fn snapshot_of_what_is_mounted() {
    for how in [How::EXT4, XFS, BTRFS] {
        sweep(&busy(how), snapshot());
    }
}

#[test]
fn snapshot_that_freezes_nothing() {
    sweep(&busy(How::BLOCK), snapshot());
    sweep(&busy(XFS), Step::Snapshot(S, V, Level::Crash));
}

#[test]
fn snapshot_of_a_thick_volume() {
    sweep(&used(How::THICK), snapshot());
    sweep(&busy(How::THICK), snapshot());
}

#[test]
fn snapshot_while_strangers_thaw() {
    let (before, act) = (busy(XFS), snapshot());
    Scenario { before, act }.sweep_thaws();
    let (before, act) = (three(), Step::Group(G, THREE));
    Scenario { before, act }.sweep_thaws();
}

#[test]
fn delete_snapshot() {
    for how in [How::EXT4, How::THICK] {
        sweep(&after(busy(how), &[snapshot()]), Step::DeleteSnapshot(S));
    }
}

#[test]
fn restore() {
    for (how, times) in [
        (How::EXT4, 1),
        (XFS, 2),
        (BTRFS, 2),
        (How::BLOCK, 2),
        (How::THICK, 2),
    ] {
        let before = after(busy(how), &[snapshot()]);
        sweep(&before, Step::Restore(NEW, S, how, times * SIZE));
    }
}

#[test]
fn restore_of_a_deleted_volume() {
    let gone = [snapshot(), Step::Delete(V)];
    sweep(&after(used(XFS), &gone), Step::Restore(NEW, S, XFS, SIZE));
}

#[test]
fn clone() {
    for how in [How::EXT4, BTRFS, How::BLOCK] {
        sweep(&used(how), Step::Clone(NEW, V, how, SIZE));
        sweep(&busy(how), Step::Clone(NEW, V, how, 2 * SIZE));
    }
}

#[test]
fn stage_of_a_restored_volume() {
    for how in [How::EXT4, XFS, BTRFS, How::THICK] {
        let copies = [snapshot(), Step::Restore(NEW, S, how, 2 * SIZE)];
        sweep(&after(busy(how), &copies), Step::Stage(NEW));
    }
}

#[test]
fn group() {
    let (before, act) = (three(), Step::Group(G, THREE));
    Scenario { before, act }.sweep_once();
    // Of two, also what follows a failure.
    let mut before = busy_as("a", XFS, 1);
    before.extend(busy_as("b", How::EXT4, 2));
    sweep(&before, Step::Group(G, &THREE[..2]));
}

#[test]
fn group_of_what_is_partly_used() {
    let mut before = busy_as("a", XFS, 1);
    before.extend([Step::Create("b", How::BLOCK), Step::Create("c", How::THICK)]);
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
fn repeats_of_half_made_cuts() {
    sweep_repeat(&busy(How::EXT4), snapshot());
    sweep_repeat(&after(busy(XFS), &[snapshot()]), Step::DeleteSnapshot(S));
    sweep_repeat(
        &after(busy(BTRFS), &[snapshot()]),
        Step::Restore(NEW, S, BTRFS, 2 * SIZE),
    );
}

#[test]
fn start_with_what_a_crash_left_of_a_cut() {
    let made = || after(busy(How::EXT4), &[snapshot()]);
    let calls = [
        (busy(How::EXT4), snapshot()),
        (busy(How::THICK), snapshot()),
        (made(), Step::DeleteSnapshot(S)),
        (
            made(),
            Step::Restore(NEW, S, How::fs(FsType::Ext4), 2 * SIZE),
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
