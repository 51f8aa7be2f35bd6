//! Fails or cuts off every effect of every operation in turn, and proves that the caller's repeats
//! end with the same result as a call without faults.
//!
//! Pass 1 counts the effects of an operation. Pass 2 repeats it with the n-th effect refused,
//! performed but reported as failed, or as the last thing that the process did; then as the last
//! one before a power loss. After each: an error after which the caller forgets the object must
//! have left nothing; repeats must converge to the same answer and the same visible state of the
//! machine; nothing that a user synced may be lost; and deleting the volume must leave nothing. The
//! same holds for a call that is made during a fault that lasts, once the fault has ended: a pool
//! that stays full, a record that cannot be read, from the start or from the middle of a call on, a
//! disk that dies. It also holds for a call that fails after other calls on the same volume have
//! failed and then succeeded.

mod cuts;
mod repeated_failures;
mod sweep;
mod trial;

use crate::simulation::{LastingFault, SIZE, Simulation, Step, VolumeConfig};
use slackwater::model::{FsType, Wipe};
use trial::Scenario;

fn sweep_repeat(before: &[Step], act: Step) {
    let before = before.to_vec();
    Scenario { before, act }.sweep_repeat();
}

fn sweep(before: &[Step], act: Step) {
    let before = before.to_vec();
    Scenario { before, act }.sweep();
}

/// The steps before, and then a call that is cut off by each of its effects in turn.
fn cut_offs(before: &[Step], call: &Step) -> Vec<Vec<Step>> {
    let mut sim = Simulation::after(before);
    let effects = sim.host.effects();
    sim.run(call).expect("the call succeeds without faults");
    let each = 1..=sim.host.effects() - effects;
    let cut_off = |n| {
        let mut before = before.to_vec();
        before.push(Step::CutOff(Box::new(call.clone()), n));
        before
    };
    each.map(cut_off).collect()
}

const XFS: VolumeConfig = VolumeConfig::fs(FsType::Xfs);
const BTRFS: VolumeConfig = VolumeConfig::fs(FsType::Btrfs);
const V: &str = "v";

/// A volume that was used, and is no longer staged.
fn used(config: VolumeConfig) -> Vec<Step> {
    let mut steps = staged(config);
    if config.fs.is_none() {
        steps.push(Step::Unpublish(V, 0));
    }
    steps.push(Step::Unstage(V));
    steps
}

/// A staged volume with a token; a block volume is published for that.
fn staged(config: VolumeConfig) -> Vec<Step> {
    let mut steps = vec![Step::Create(V, config), Step::Stage(V)];
    if config.fs.is_none() {
        steps.push(Step::Publish(V, 0, false));
    }
    steps.push(Step::Write(V, 7));
    steps
}

fn published(config: VolumeConfig) -> Vec<Step> {
    let mut steps = staged(config);
    if config.fs.is_some() {
        steps.push(Step::Publish(V, 0, false));
    }
    steps
}

#[test]
fn create() {
    for config in [VolumeConfig::EXT4, VolumeConfig::THICK, VolumeConfig::BLOCK] {
        sweep(&[], Step::Create(V, config));
        sweep(&[Step::Create("other", XFS)], Step::Create(V, config));
    }
}

#[test]
fn create_again_after_a_delete() {
    sweep(
        &[Step::Create(V, XFS), Step::Delete(V)],
        Step::Create(V, VolumeConfig::EXT4),
    );
}

#[test]
fn delete() {
    for wipe in [Wipe::None, Wipe::Zero, Wipe::Discard] {
        sweep(&used(VolumeConfig::EXT4.wiped(wipe)), Step::Delete(V));
        sweep(&used(VolumeConfig::THICK.wiped(wipe)), Step::Delete(V));
    }
    sweep(&used(VolumeConfig::BLOCK), Step::Delete(V));
    sweep(&[Step::Create(V, XFS)], Step::Delete(V));
}

#[test]
fn modify() {
    sweep(&used(VolumeConfig::EXT4), Step::Modify(V, Wipe::Discard));
}

#[test]
fn expand() {
    for config in [VolumeConfig::EXT4, VolumeConfig::THICK] {
        sweep(&used(config), Step::Expand(V, 2 * SIZE));
        sweep(&staged(config), Step::Expand(V, 2 * SIZE));
    }
    let thick_block = VolumeConfig {
        fs: None,
        ..VolumeConfig::THICK
    };
    sweep(&published(thick_block), Step::Expand(V, 2 * SIZE));
}

#[test]
fn stage() {
    for config in [
        VolumeConfig::EXT4,
        XFS,
        BTRFS,
        VolumeConfig::THICK,
        VolumeConfig::BLOCK,
    ] {
        sweep(&[Step::Create(V, config)], Step::Stage(V));
    }
}

#[test]
fn stage_again() {
    for config in [
        VolumeConfig::EXT4,
        XFS,
        BTRFS,
        VolumeConfig::THICK,
        VolumeConfig::BLOCK,
    ] {
        sweep(&used(config), Step::Stage(V));
        sweep(&staged(config), Step::Stage(V));
    }
}

#[test]
fn stage_a_volume_that_grew_while_it_was_unstaged() {
    for config in [VolumeConfig::EXT4, XFS, BTRFS] {
        let mut steps = used(config);
        steps.push(Step::Expand(V, 2 * SIZE));
        sweep(&steps, Step::Stage(V));
    }
}

#[test]
fn stage_a_volume_that_the_kernel_does_not_grow_while_it_is_mounted() {
    for config in [VolumeConfig::EXT4, VolumeConfig::THICK] {
        let mut steps = used(config);
        steps.extend([Step::RefuseGrowth, Step::Expand(V, 2 * SIZE)]);
        sweep(&steps, Step::Stage(V));
    }
    // A stage that was cut off before its growth.
    let mut steps = staged(VolumeConfig::EXT4);
    steps.extend([Step::RefuseGrowth, Step::Expand(V, 2 * SIZE)]);
    sweep(&steps, Step::Stage(V));
}

#[test]
fn stage_a_volume_that_was_not_unmounted_cleanly() {
    let mut steps = used(VolumeConfig::EXT4);
    steps.push(Step::LeaveUnclean(V));
    sweep(&steps, Step::Stage(V));
}

#[test]
fn stage_after_a_reboot() {
    for config in [XFS, VolumeConfig::BLOCK] {
        let mut steps = published(config);
        steps.push(Step::Reboot);
        sweep(&steps, Step::Stage(V));
    }
}

#[test]
fn publish() {
    for config in [VolumeConfig::EXT4, BTRFS] {
        for read_only in [false, true] {
            sweep(&staged(config), Step::Publish(V, 0, read_only));
            sweep(&published(config), Step::Publish(V, 1, read_only));
        }
    }
}

#[test]
fn publish_block() {
    let stage = [Step::Create(V, VolumeConfig::BLOCK), Step::Stage(V)];
    for read_only in [false, true] {
        sweep(&stage, Step::Publish(V, 0, read_only));
    }
    sweep(&published(VolumeConfig::BLOCK), Step::Publish(V, 1, false));
    let mut steps = published(VolumeConfig::BLOCK);
    steps.push(Step::Unpublish(V, 0));
    sweep(&steps, Step::Publish(V, 1, true));
}

#[test]
fn unpublish() {
    for config in [VolumeConfig::EXT4, BTRFS, VolumeConfig::BLOCK] {
        sweep(&published(config), Step::Unpublish(V, 0));
        let mut steps = published(config);
        steps.push(Step::Publish(V, 1, false));
        sweep(&steps, Step::Unpublish(V, 0));
    }
}

#[test]
fn unstage() {
    for config in [VolumeConfig::EXT4, BTRFS] {
        sweep(&staged(config), Step::Unstage(V));
    }
    let mut steps = staged(VolumeConfig::BLOCK);
    steps.push(Step::Unpublish(V, 0));
    sweep(&steps, Step::Unstage(V));
}

#[test]
fn expand_node() {
    for config in [
        VolumeConfig::EXT4,
        XFS,
        BTRFS,
        VolumeConfig::THICK,
        VolumeConfig::BLOCK,
    ] {
        let mut steps = staged(config);
        steps.push(Step::Expand(V, 2 * SIZE));
        sweep(&steps, Step::NodeExpandVolume(V));
    }
}

#[test]
fn publish_inline() {
    for config in [VolumeConfig::EXT4, XFS, VolumeConfig::THICK] {
        sweep(&[], Step::PublishInline(V, config));
    }
}

#[test]
fn unpublish_inline() {
    for config in [VolumeConfig::EXT4, VolumeConfig::THICK.wiped(Wipe::Zero)] {
        sweep(
            &[Step::PublishInline(V, config), Step::Write(V, 7)],
            Step::UnpublishInline(V),
        );
    }
}

#[test]
fn start() {
    sweep(&[], Step::Start);
    sweep(&published(VolumeConfig::EXT4), Step::Start);
    sweep(&published(VolumeConfig::BLOCK), Step::Start);
    sweep(
        &[Step::PublishInline(V, XFS), Step::Write(V, 7)],
        Step::Start,
    );
}

#[test]
fn repeats_of_interrupted_undo_calls() {
    sweep_repeat(&[], Step::Create(V, VolumeConfig::THICK));
    sweep_repeat(&[], Step::PublishInline(V, VolumeConfig::EXT4));
    sweep_repeat(&[Step::Create(V, VolumeConfig::BLOCK)], Step::Stage(V));
    sweep_repeat(&used(BTRFS), Step::Stage(V));
    sweep_repeat(&staged(VolumeConfig::EXT4), Step::Publish(V, 0, true));
    sweep_repeat(
        &[Step::Create(V, VolumeConfig::BLOCK), Step::Stage(V)],
        Step::Publish(V, 0, false),
    );
    sweep_repeat(&used(VolumeConfig::EXT4.wiped(Wipe::Zero)), Step::Delete(V));
    sweep_repeat(&used(VolumeConfig::THICK), Step::Expand(V, 2 * SIZE));
}

#[test]
fn start_with_what_a_crash_left() {
    let calls = [
        (vec![], Step::Create(V, VolumeConfig::THICK)),
        (
            used(VolumeConfig::EXT4.wiped(Wipe::Discard)),
            Step::Delete(V),
        ),
        (used(VolumeConfig::EXT4), Step::Expand(V, 2 * SIZE)),
        (vec![Step::Create(V, VolumeConfig::EXT4)], Step::Stage(V)),
        (
            staged(VolumeConfig::BLOCK)[..2].to_vec(),
            Step::Publish(V, 0, false),
        ),
        (vec![], Step::PublishInline(V, VolumeConfig::EXT4)),
        (
            vec![Step::PublishInline(V, VolumeConfig::EXT4)],
            Step::UnpublishInline(V),
        ),
    ];
    for (before, call) in calls {
        for before in cut_offs(&before, &call) {
            sweep(&before, Step::Start);
        }
    }
}

#[test]
fn a_disk_that_comes_back() {
    let mut steps = used(VolumeConfig::EXT4);
    steps.extend([Step::PullDisk, Step::Start, Step::PutDiskBack]);
    sweep(&steps, Step::Refresh);
}

#[test]
fn volumes_end_on_a_pool_that_is_full_and_stays_full() {
    let staged = [
        Step::Create(V, VolumeConfig::BLOCK),
        Step::Stage(V),
        Step::Begin(LastingFault::Full),
    ];
    sweep(&staged, Step::Unstage(V));
    let mut unstaged = staged.to_vec();
    unstaged.push(Step::Unstage(V));
    sweep(&unstaged, Step::Stage(V));
    sweep(&unstaged, Step::Delete(V));
    let mut used = used(VolumeConfig::EXT4);
    used.push(Step::Begin(LastingFault::Full));
    sweep(&used, Step::Delete(V));
}

#[test]
fn volumes_staged_read_only() {
    let config = VolumeConfig {
        read_only: true,
        ..XFS
    };
    let stage = [Step::Create(V, config), Step::Stage(V)];
    sweep(&stage[..1], Step::Stage(V));
    for read_only in [false, true] {
        sweep(&stage, Step::Publish(V, 0, read_only));
    }
    sweep(&[], Step::PublishInline(V, config));
}
